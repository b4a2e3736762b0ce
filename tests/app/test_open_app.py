"""The app of `hilt open`, served by the command and opened in a real browser; and who may open it.

Screenshots are left in the folder that HILT_ARTIFACTS names, else in pytest's own.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tools import screenshots
from typer.testing import CliRunner

import hilt.cli
from hilt.app.episodes.episode_shelf import data_key
from hilt.app.open_app import Served, first_page
from hilt.app.run_library import id_of
from hilt.core.platform import LINUX
from hilt.core.web import listen
from hilt.formats.listing.episode_source import source_key
from hilt.observe.metrics import Metrics
from hilt.runs.folder import note_end
from tests.app.episode_samples import make_log
from tests.app.opened import serving
from tests.app.test_run_library import make_run
from tests.teleop import chromium

NASTY = "<img src=x onerror=alert(1)>"
needs_chromium = pytest.mark.skipif(bool(chromium.absent()), reason=chromium.absent() or "it is here")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`hilt open` on a folder of three runs, one of them damaged."""
    folder = tmp_path_factory.mktemp("runs")
    note_end(make_run(folder / "good", 60), "goal", 590, "goal, after 590 updates")
    make_run(folder / NASTY, 40, recipe=NASTY)
    (folder / NASTY / "evaluations" / "eval-1").mkdir(parents=True)
    (folder / NASTY / "evaluations" / "eval-1" / "evaluation.json").write_text("[]")
    (make_run(folder / "damaged") / "run.json").write_text("{")
    with serving(folder) as found:
        yield found


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("HILT_ARTIFACTS") or tmp_path_factory.mktemp("artifacts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def chrome(served: Any, chromium_tab: Any) -> Any:
    """A browser in which the address was opened once, so that it has the cookie."""
    chromium_tab.get(served.url)
    chromium.wait(chromium_tab, "return document.querySelectorAll('.hilt-table tbody tr').length === 2")
    return chromium_tab


def get(served: Any, path: str = "/", **headers: str) -> tuple[int, str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
    connection.request("GET", path, headers={"Host": f"127.0.0.1:{served.port}", **headers})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers


def test_app_needs_its_token_also_on_this_machine(served: Any):
    status, text, _ = get(served)
    assert status == 403 and "needs its token" in text and "<style>" in text
    assert "此页面需要令牌" in get(served, **{"Accept-Language": "zh-CN"})[1]
    assert get(served, "/?token=wrong")[0] == 403
    status, text, headers = get(served, f"/run?id=%22%3Ex&token={served.token}")
    assert status == 200 and 'content="0;url=/run?id=%22%3Ex"' in text
    cookie = headers["Set-Cookie"].partition(";")[0]
    assert "HttpOnly" in headers["Set-Cookie"] and "samesite=strict" in headers["Set-Cookie"].lower()
    status, text, headers = get(served, Cookie=cookie)
    assert status == 200 and headers["X-Frame-Options"] == "DENY"
    assert "default-src 'self'" in headers["Content-Security-Policy"]
    status, text, _ = get(served, Cookie=cookie, Origin="http://evil.example")
    assert status == 403 and "is not this page" in text
    status, text, _ = get(served, Cookie=cookie, Host="evil.example")
    assert status == 403 and "is not this machine" in text


def test_open_beyond_this_machine_is_refused_without_tls(tmp_path: Path):
    def refused(*words: str) -> str:
        result = CliRunner().invoke(hilt.cli.app, ["open", str(tmp_path), "--no-browser", *words])
        assert result.exit_code == 1
        return result.stderr

    assert "--certificate FILE --key FILE" in refused("--host", "0.0.0.0")
    assert "belong together" in refused("--certificate", "x.pem")
    assert "no such file" in refused("--host", "0.0.0.0", "--certificate", "x.pem", "--key", "y.pem")
    result = CliRunner().invoke(hilt.cli.app, ["open", str(tmp_path / "nothing")])
    assert result.exit_code == 1 and "Name a run, a log, a dataset" in result.stderr


def test_unknown_address_is_a_page_of_the_app(served: Any):
    cookie = get(served, f"/?token={served.token}")[2]["Set-Cookie"].partition(";")[0]
    status, text, _ = get(served, "/nothing", Cookie=cookie)
    assert status == 404 and "There is no such page." in text and "/episodes" in text and "exist" not in text
    assert get(served, "/api/nothing", Cookie=cookie)[:2] == (404, "there is no such address")


def test_first_page_is_that_of_the_episodes_if_there_is_no_run(tmp_path: Path):
    for name in ("data", "runs", "none"):
        (tmp_path / name).mkdir()
    make_log(tmp_path / "data" / "log", 1)
    make_run(tmp_path / "runs" / "run")
    assert [first_page([tmp_path / name]) for name in ("data", "data/log", "runs", "none")] == [
        "episodes",
        "episodes",
        "",
        "",
    ]
    assert first_page([tmp_path]) == "", "there is a run among them"
    where = Served("127.0.0.1", token="a")
    with listen("127.0.0.1", 0) as listener:
        assert where.address(listener, "episodes").endswith("/episodes?token=a")


@needs_chromium
def test_table_shows_runs_as_text_and_a_damaged_one_beside_them(chrome: Any, artifacts: Path):
    table = chrome.find_element("css selector", ".hilt-table").text
    assert "good" in table and "goal, after 590 updates" in table and "last sign of life" in table
    assert NASTY in table and not chrome.find_elements("css selector", ".hilt-main img")
    assert "damaged" in chrome.find_element("css selector", ".hilt-alarm").text
    chrome.save_screenshot(str(artifacts / "runs.png"))


@needs_chromium
def test_app_keys_language_and_theme(chrome: Any, artifacts: Path):
    chrome.execute_script("document.querySelector('.hilt-help').style.maxHeight = '90px'")
    chromium.key(chrome, "?", True, "?")
    chromium.wait(chrome, "return document.querySelector('.hilt-help').open")
    top, hidden = chrome.execute_script(
        "const one = document.querySelector('.hilt-help'); return [one.scrollTop, one.scrollHeight - one.clientHeight]"
    )
    assert top == 0 and hidden > 0, "it opens at its top"
    assert "started again with another address" in chrome.execute_script(
        "return document.querySelector('#popup').textContent"
    )
    chromium.key(chrome, "?", True, "?")
    chromium.wait(chrome, "return !document.querySelector('.hilt-help').open")
    chrome.find_element("css selector", ".hilt-language").click()
    chromium.wait(chrome, "return document.querySelector('.hilt-nav')?.innerText.includes('训练')")
    chromium.wait(chrome, "return document.documentElement.lang === 'zh'")
    chrome.find_element("css selector", ".hilt-language").click()
    chromium.wait(chrome, "return document.querySelector('.hilt-nav')?.innerText.includes('Runs')")
    for theme in ("dark", "light"):  # the system's is light: the first click changes something
        chrome.find_element("css selector", ".hilt-theme").click()
        dark = "" if theme == "dark" else "!"
        chromium.wait(
            chrome,
            f"return document.cookie.includes('hilt-theme={theme}') && document.querySelector('.hilt-theme') && "
            f"{dark}document.body.classList.contains('body--dark')",
        )
        chromium.wait(chrome, "return document.querySelectorAll('.hilt-table tbody tr').length === 2")
        chrome.save_screenshot(str(artifacts / f"runs-{theme}.png"))


@needs_chromium
def test_app_loads_nothing_from_other_hosts(chrome: Any, served: Any):
    loaded = chrome.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    hosts = {urlsplit(name).netloc for name in loaded if not name.startswith(("data:", "blob:"))}
    assert len(loaded) > 5 and hosts == {urlsplit(served.base).netloc}


def open_run(chrome: Any, served: Any, name: str = "good") -> None:
    chrome.get(f"{served.base}/run?id={id_of(served.folder / name)}")
    chromium.wait(chrome, "return document.querySelector('.hilt-curves')?.curves?.charts.length > 3")


@needs_chromium
def test_run_page_shows_curves_that_share_range_and_cursor(chrome: Any, served: Any, artifacts: Path):
    open_run(chrome, served)
    from selenium.webdriver import ActionChains

    first, second = chrome.find_elements("css selector", ".hilt-charts canvas")[:2]
    assert first.get_attribute("aria-label").startswith("Success of the last 20 episodes")
    ActionChains(chrome).move_to_element(first).perform()
    middle = chromium.wait(chrome, "return document.querySelector('.hilt-curves').curves.cursor")
    assert 400 < middle < 800, "of 1180 steps"
    ActionChains(chrome).move_to_element(second).click_and_hold().move_by_offset(80, 0).release().perform()
    low, high = chromium.wait(chrome, "return document.querySelector('.hilt-curves').curves.zoom")
    assert 0 < low < high < 1180
    chrome.find_element("css selector", ".hilt-reset").click()
    chromium.wait(chrome, "return document.querySelector('.hilt-curves').curves.zoom === null")
    chrome.execute_script(
        "const curves = document.querySelector('.hilt-curves').curves; curves.level = 0; curves.ask(true)"
    )
    chromium.wait(chrome, "return document.querySelector('.hilt-charts strong').innerText.includes('last 1 episodes')")
    chromium.wait(
        chrome, "return document.querySelector('.hilt-main').innerText.includes('In the recipe tabletop_button')"
    )
    chrome.save_screenshot(str(artifacts / "run.png"))


@needs_chromium
def test_run_page_grows_with_the_run(chrome: Any, served: Any):
    open_run(chrome, served)
    with Metrics(served.folder / "good") as metrics:
        metrics.write("update", {"critic_loss": 0.001}, update=9000, step=18000)
    grown = "Math.max(...document.querySelector('.hilt-curves').curves.charts.map((chart) => chart.lines[0].x.at(-1)))"
    chromium.wait(chrome, f"return {grown} === 18000")
    chromium.wait(chrome, "return document.querySelector('.hilt-facts').innerText.includes('18,000')")


@needs_chromium
def test_run_page_shows_alarms_and_events_in_the_language_of_the_page(chrome: Any, served: Any):
    raised = (
        "alarm no_signal: in 95% of the groups all members end alike, and most of these fail (5 steps; limit 90%). "
    )
    alarm = {"event": raised + "A cure.", "alarm": "no_signal", "alarm/no_signal": 1.0}
    with Metrics(served.folder / "good") as metrics:
        metrics.write("event", alarm, update=9000, step=18000)
        metrics.event("waits: there is no online step yet", update=9000, step=18000)
        metrics.event(NASTY, update=9000, step=18000)
    chrome.execute_script("document.cookie = 'hilt-language=zh; path=/'")
    open_run(chrome, served)
    chromium.wait(chrome, "return document.querySelector('.hilt-alarm')?.innerText.startsWith('警报 no_signal：95%')")
    events = "[...document.querySelectorAll('.hilt-output')].map((one) => one.textContent).join()"
    chromium.wait(chrome, f"return {events}.includes('等待：还没有在线步')")
    assert NASTY in chrome.execute_script(f"return {events}"), "what is not known stays as it is"
    Metrics(served.folder / "good").close()  # who goes on raises it anew
    chromium.wait(chrome, "return !document.querySelector('.hilt-alarm')")
    chrome.execute_script("document.cookie = 'hilt-language=en; path=/'")


@needs_chromium
def test_run_page_runs_a_command_and_shows_its_output(chrome: Any, served: Any):
    open_run(chrome, served)
    *_, plot = chrome.find_elements("css selector", ".hilt-do")
    assert f"hilt plot {served.folder / 'good'}" in plot.text
    plot.find_element("css selector", ".hilt-button").click()
    chromium.wait(chrome, "return document.querySelector('.hilt-output').innerText.includes('exit code 0')", 300)
    assert (served.folder / "good" / "plots" / "curves.html").is_file()


@needs_chromium
def test_compare_page_is_opened_from_the_table(chrome: Any, served: Any, artifacts: Path):
    chrome.get(served.base)
    chromium.wait(chrome, "return document.querySelectorAll('.hilt-table tbody tr').length === 2")
    chrome.find_element("css selector", ".hilt-table thead .q-checkbox").click()
    chromium.wait(chrome, "return document.querySelector('.hilt-compare').getAttribute('href')")
    chrome.find_element("css selector", ".hilt-compare").click()
    chromium.wait(chrome, "return document.querySelector('.hilt-curves')?.curves?.charts.length > 3")
    problem = chrome.find_element("css selector", ".hilt-curves .hilt-alarm").text
    assert NASTY in problem and "evaluation.json" in problem, "what is damaged is shown beside the rest"
    text = chrome.find_element("css selector", ".hilt-main").text
    assert "No setting differs." in text and NASTY in text and "no evaluation of the same states" in text
    chrome.save_screenshot(str(artifacts / "compare.png"))
    made = screenshots.take(chrome, served.base, served.folder / "good", artifacts)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made), "those of the documentation"


def post(served: Any, path: str, body: dict[str, Any], language: str = "en") -> tuple[int, str]:
    cookie = get(served, f"/?token={served.token}")[2]["Set-Cookie"].partition(";")[0]
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
    sender = {"Host": f"127.0.0.1:{served.port}", "Origin": served.base, "Cookie": cookie, "Accept-Language": language}
    connection.request("POST", path, json.dumps(body), sender)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_view_refuses_edits_and_saved_views(tmp_path: Path):
    log = make_log(tmp_path / "mine", 3, images=False)
    edit = {"data": data_key(log), "source": source_key(log), "number": 0, "action": "success"}
    with serving(tmp_path, "--view") as viewed:
        for path in ("edit", "many", "views"):
            status, said = post(viewed, f"/episodes/{path}", edit)
            assert status == 400 and "hilt open --view only shows: nothing can be changed" in said, (status, said)
        assert "hilt open --view 只能查看" in json.loads(post(viewed, "/episodes/edit", edit, "zh")[1])["error"]
    assert not (log / "edits.jsonl").exists()
    with serving(tmp_path) as changed:
        status, said = post(changed, "/episodes/edit", edit)
        assert status == 200 and json.loads(said)["edit"]["text"] == "label success", said
        answer = json.loads(post(changed, "/episodes/edit", {**edit, "action": "bad"}, "zh")[1])
        assert [one["text"] for one in answer["history"]] == ["标为坏数据", "标注为成功"]
        many = {"data": edit["data"], "episodes": {edit["source"]: [0, 1]}, "action": "tag", "name": "slow"}
        assert json.loads(post(changed, "/episodes/many", many, "zh")[1])["text"] == "添加标签 slow"
    assert (log / "edits.jsonl").exists()


def test_view_shows_commands_and_no_buttons_that_run_them(tmp_path: Path, served: Any):
    key = id_of(make_run(tmp_path / "run"))
    with serving(tmp_path, "--view") as viewed:
        for found, run, has_button in ((viewed, key, False), (served, id_of(served.folder / "good"), True)):
            cookie = get(found, f"/?token={found.token}")[2]["Set-Cookie"].partition(";")[0]
            text = ""
            while "hilt-do" not in text:  # until the runs were found
                text = get(found, f"/run?id={run}", Cookie=cookie)[1]
            assert "hilt plot" in text and ('"Run"' in text.replace("\\", "")) == has_button


def test_run_page_links_to_the_episodes_of_a_run_with_a_log(served: Any):
    cookie = get(served, f"/?token={served.token}")[2]["Set-Cookie"].partition(";")[0]
    run = served.folder / "good"
    link, page = f"/episodes?data={data_key(run)}", f"/run?id={id_of(run)}"
    assert link not in get(served, page, Cookie=cookie)[1]
    (run / "log").mkdir()
    (run / "log" / "log.json").write_text("{}")
    assert link in get(served, page, Cookie=cookie)[1]


def test_videos_come_from_the_folder_of_a_run_alone(served: Any):
    cookie = get(served, f"/?token={served.token}")[2]["Set-Cookie"].partition(";")[0]
    run = served.folder / "good"
    (run / "film.mp4").write_bytes(b"film")
    (served.folder / "secret.mp4").write_bytes(b"secret")
    (run / "link.mp4").symlink_to(served.folder / "secret.mp4")
    key = id_of(run)
    assert get(served, f"/video?run={key}&file=film.mp4", Cookie=cookie)[:2] == (200, "film")
    for wrong in ("../secret.mp4", "link.mp4", "/etc/passwd", "run.json", "none.mp4", f"{served.folder}/secret.mp4"):
        assert get(served, f"/video?run={key}&file={wrong}", Cookie=cookie)[0] == 404
    assert get(served, "/video?run=other&file=film.mp4", Cookie=cookie)[0] == 404
    assert get(served, f"/api/curves?run={key}&smooth=0", Cookie=cookie)[0] == 404


@pytest.mark.skipif(not LINUX or not os.confstr("CS_GNU_LIBC_VERSION"), reason="the C library has no such settings")
def test_freed_memory_is_given_back_to_the_system():
    """In a process of its own, since the settings stay."""
    code = """
from hilt.core.platform import give_memory_back
def anon():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
assert give_memory_back()
before = anon()
kept = [bytes(100_000) for _ in range(500)]
del kept
assert anon() - before < 10_000, (before, anon())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
