"""Makes screenshots of `hilt open` for the documentation, in a real browser.

    python tools/screenshots.py docs runs/mine runs/other recordings/frames

writes each picture into the first folder twice, light and dark (``-dark.png``): ``open-runs.png`` (the table) and
``open-run.png`` (the page of the first run), with
``open-episodes.png`` and ``open-episode.png`` (the episodes in which a person took over, and the first of them), and
``open-take-over.png`` if an actor of the first run has its operator in the browser now. Of a run whose policy is a VLA
there is that page alone, as ``person-and-vla.png``, in the middle of a plan. ``open-classifier.png`` is the page that
labels frames, of the first path for which that page has trained a classifier (``NAME-classifiers/1``).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.teleop import chromium

from hilt.app.classifiers.classifier_data import own_folder
from hilt.app.episodes.episode_shelf import data_key
from hilt.app.open_app import THEME_COOKIE
from hilt.app.run_library import id_of
from hilt.hil.evaluate import config_of
from hilt.hil.operator_page import operator_pages
from hilt.observe.metrics import FILE as METRICS

WIDTH, HEIGHT = 1280, 900
COLORS = 128
"""As many as such a page needs: a third of the bytes"""

RELATIVE = """
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) walk.currentNode.nodeValue = walk.currentNode.nodeValue.replaceAll(arguments[0], "");
"""
"""Shows paths relative to the working folder: that of this machine is of no interest"""
COCKPIT = "document.querySelector('.hilt')?.cockpit"
LOW, TALL = 600, 1500
"""Pixels of a page with a short table, and of one that is shown from its beginning to its end"""


def take(browser: Any, base: str, run: Path, out: Path) -> list[Path]:
    """Takes the pictures of runs with a browser in which the app was opened."""
    if config_of(run).agent.kind == "vla":
        planned = f"{COCKPIT}?.ages.length > 3 && {COCKPIT}.status?.path && {COCKPIT}.status.step < 4"
        ready = f"document.querySelector('.confidence') && {planned}"
        return photographs(browser, base, out, "person-and-vla", f"/take-over?id={id_of(run)}", ready)
    pages = [
        ("open-runs", "/", "document.querySelector('.hilt-table tbody tr')", LOW),
        ("open-run", f"/run?id={id_of(run)}", "document.querySelector('.hilt-curves')?.curves?.charts.length", HEIGHT),
    ]
    if operator_pages(run):
        drawn = f"{COCKPIT}?.ages.length > 3"
        pages.append(("open-take-over", f"/take-over?id={id_of(run)}", drawn, HEIGHT))
    return [path for page in pages for path in photographs(browser, base, out, *page)]


def take_episodes(browser: Any, base: str, run: Path, out: Path) -> list[Path]:
    """Takes the pictures of the list of the episodes in which a person took over, and of the first of them in the
    middle, if there is one."""
    seen = "[...document.querySelectorAll('table img')].slice(0, 12).every((one) => one.complete)"
    rows = "document.querySelector('table tbody a')?.href"
    path = f"/episodes?data={data_key(run)}&filter=source%3Dhuman"
    made = photographs(browser, base, out, "open-episodes", path, f"{rows} && {seen}")
    there = urlsplit(browser.execute_script(f"return {rows}"))
    shown = "document.querySelector('.episode')?.component?.episodes"
    ready = f"{shown}?.length && {shown}.every((one) => one.cameras.every((camera) => camera.shown === camera.wanted))"
    middle = "document.querySelector('.episode').component.seek(4)"
    page = f"{there.path}?{there.query}"
    return [*made, *photographs(browser, base, out, "open-episode", page, ready, TALL, middle)]


def take_classifier(browser: Any, base: str, data: Path, out: Path) -> list[Path]:
    """Takes the pictures of the page that labels frames, of a recording, log or run with a classifier."""
    page = "document.querySelector('.classifier')?.component"
    seen = "[...document.querySelectorAll('.classifier img')].every((one) => one.complete)"
    ready = f"{page}?.use && {page}.frame && {seen}"
    return photographs(browser, base, out, "open-classifier", f"/classifier?data={data_key(data)}", ready, TALL)


def photographs(
    browser: Any, base: str, out: Path, name: str, path: str, ready: str, height: int = HEIGHT, do: str = ""
) -> list[Path]:
    """Takes the pictures of one page, light and dark, as soon as it is ready; `do`: after this line of JavaScript."""
    themes = {"light": out / f"{name}.png", "dark": out / f"{name}-dark.png"}
    return [photograph(browser, base + path, made, theme, ready, height, do) for theme, made in themes.items()]


def photograph(browser: Any, address: str, made: Path, theme: str, ready: str, height: int, do: str) -> Path:
    chromium.shape(browser, WIDTH, height)
    browser.add_cookie({"name": THEME_COOKIE, "value": theme})
    browser.get(address)
    dark = "" if theme == "dark" else "!"
    ready = f"return {ready} && {dark}document.body.classList.contains('body--dark')"
    chromium.wait(browser, ready)
    if do:
        browser.execute_script(do)
        chromium.wait(browser, ready)
    # its letters are not on every machine that makes these pictures
    browser.execute_script("document.querySelector('.hilt-language').style.display = 'none'")
    browser.execute_script(RELATIVE, f"{Path.cwd()}/")
    picture = Image.open(BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    picture.quantize(COLORS, dither=Image.Dither.NONE).save(made, optimize=True)
    browser.delete_cookie(THEME_COOKIE)
    return made


def main(out: Path, paths: list[Path]) -> None:
    runs, judged = [path for path in paths if (path / METRICS).is_file()], [p for p in paths if own_folder(p).is_dir()]
    words = [sys.executable, "-m", "hilt", "open", *map(str, paths), "--port", "0", "--no-browser"]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process,
        tempfile.TemporaryDirectory() as profile,
    ):
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("open ").strip()
        browser = chromium.start(Path(profile))
        try:
            browser.get(url)
            chromium.wait(browser, f"return document.querySelectorAll('.hilt-table tbody tr').length >= {len(runs)}")
            base = f"http://{urlsplit(url).netloc}"
            made = take(browser, base, runs[0], out) if runs else []
            if runs and config_of(runs[0]).agent.kind != "vla":
                made += take_episodes(browser, base, runs[0], out)
            made += [path for data in judged[:1] for path in take_classifier(browser, base, data, out)]
            for path in made:
                print(path)
        finally:
            browser.quit()
            process.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
