"""`hilt open`: its list with 100,000 episodes, its memory, frames under the cursor, and what ten pages cost a learner.

The app is a process of its own, as a user starts it, and its pages are in a real browser (Chromium, headless). Times
are taken by the page itself, so that what drives the browser is not in them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.teleop import chromium

from bench.lab import Group, Lab, files_of, remove
from bench.limits import drop_page_cache
from bench.open_data import make_film, make_many
from bench.open_live import live
from bench.open_sides import App, chromium_alone, enter, filter_list, first_paint, open_episode, scrub, visitor
from bench.report import Row, at_most
from hilt.app.episodes.episode_shelf import data_key
from hilt.formats.listing.episode_source import source_key

EPISODES, OPENED = 100_000, 1_000
FILTERS = (
    "success=false task=pick",
    'instruction~"red cube" success=true',
    "steps>=6 return>0.5 source=human",
    "level=417",
    "tag=grasp end=truncated",
    "level>=900 task=place version=7",
    "trajectory>=50000 human>=2",
)
SIZE, FILM_EPISODES, FILM_STEPS = (480, 640), 6, 150
STATES = ("cold", "warm")
HOW = {"forward": "dragged forward, 30 steps a second", "backward": "the same backward", "random": "ten jumps a second"}
DRAG_MS, JUMP_MS = 33.0, 100.0
"""Between two steps of a cursor that is dragged, and between two jumps of it"""
ORDERS = ("forward", "backward", "random")
FORMATS = ("log", "h264", "av1")
SCRUBS = tuple(f"scrub_{format}_{order}_{state}" for format in FORMATS for order in ORDERS for state in STATES)


def listing(lab: Lab) -> list[Row]:
    """The list of episodes in a browser that has never seen it, from an app that has just begun."""
    episodes, visits, rounds = lab.pick(EPISODES, 200), lab.pick(9, 2), lab.pick(3, 1)
    if why := chromium.absent():
        return _absent(GROUPS["list"].rows, why)
    first, again, filtered, memory = [], [], [], {}
    log = make_many(lab.new("many"), episodes)
    lab.progress(f"list: {episodes:,} episodes were made")
    for number in range(rounds):
        drop_page_cache(files_of(log))
        with App([log]) as app, visitor(app, lab.new(f"profile-{number}")) as browser:
            first.append(first_paint(browser, app))
            again += [first_paint(browser, app) for _ in range(visits)]
            chromium.wait(browser, "return document.querySelector('.episodes').component.page?.unread === 0", 600)
            filtered += [filter_list(browser, text) for text in FILTERS]
            memory = app.memory()
            lab.progress(f"list: round {number + 1} of {rounds}")
    remove(log)
    size = lab.size(episodes, EPISODES, "episodes")
    what = "from the navigation to the list until its rows are on the screen"
    return [
        _row("first_paint_first", first, "ms", f"{what}: an app that has just begun, an empty browser, nothing of the "
             "log in the page cache", 1000.0, size),
        _row("first_paint_again", again, "ms", f"{what}: again", 1000.0, size),
        _row("filter", filtered, "ms", f"from Enter to the rows that a filter admits, {len(FILTERS)} filters that were "
             "not asked before: facts, texts, steps, sources, tags; percentile 95", 300.0, size, 95),
        _row("memory_list", [_held(memory) / 1e6], "MB", "memory of the app with the list read, beyond the "
             "page cache", 400.0, size, note=_kinds(memory)),
    ]  # fmt: skip


def opening(lab: Lab) -> list[Row]:
    """One episode after the other, each on a page of its own, as a person goes through them with the arrow keys."""
    episodes, opened = lab.pick(EPISODES, 60), lab.pick(OPENED, 12)
    if why := chromium.absent():
        return _absent(GROUPS["opened"].rows, why)
    log = make_many(lab.new("many"), episodes)
    memory: list[int] = []
    kinds: dict[str, int] = {}
    with App([log]) as app, visitor(app, lab.new("profile-opened")) as browser:
        first_paint(browser, app)
        chromium.wait(browser, "return document.querySelector('.episodes').component.page?.unread === 0", 600)
        address = f"{app.base}/episode?data={data_key(log)}&source={source_key(log)}&number="
        for place in range(opened):
            open_episode(browser, f"{address}{place * (episodes // opened)}")
            memory.append(_held(app.memory()))
            if place % 100 == 99:
                lab.progress(f"opened: {place + 1} episodes, {memory[-1] / 1e6:.0f} MB")
        kinds = app.memory()
    remove(log)
    size = lab.size(opened, OPENED, "episodes")
    middle = len(memory) // 2
    grown = (np.median(memory[-len(memory) // 10 :]) - np.median(memory[middle : middle + len(memory) // 10 + 1])) / 1e6
    return [
        _row("memory_opened", [max(memory) / 1e6], "MB", f"the most of that while {opened:,} "
             f"of {episodes:,} episodes are opened one after the other", 400.0, size,
             note=_kinds(kinds)),
        _row("memory_growth", [float(grown)], "MB", "by how much it grew from the middle of them to the end", 10.0,
             size),
    ]  # fmt: skip


def scrubbing(lab: Lab) -> list[Row]:
    """The same two cameras from a log and from LeRobot's videos; the cursor is dragged over the timeline."""
    if why := chromium.absent():
        return _absent(SCRUBS, why)
    size, steps, episodes = (SIZE, FILM_STEPS, FILM_EPISODES) if not lab.quick else ((48, 64), 20, 3)
    paths = _films(lab, episodes, steps, size)
    lab.progress("scrub: the data are made")
    took: dict[str, list[float]] = {}
    limits: dict[str, float] = {}
    with chromium_alone(lab.new("profile-scrub")) as browser:
        for format, path in paths.items():
            drop_page_cache(files_of(path))
            with App([path]) as app:
                enter(browser, app)
                browser.execute_cdp_cmd("Network.setCacheDisabled", {"cacheDisabled": True})
                for episode in range(episodes):
                    order = ORDERS[episode % len(ORDERS)]
                    if any(lab.wants("scrub", f"scrub_{format}_{order}_{state}") for state in STATES):
                        _scrub_episode(browser, app, path, episode, order, took, f"scrub_{format}_{order}")
                lab.progress(f"scrub: {format}")
            limits[format] = _direct(path, format, episodes, steps)
    for path in paths.values():
        remove(path)
    what = f"two cameras of {size[1]}x{size[0]}, from the wish for a step until both show it, percentile 95"
    rows = []
    for name, found in took.items():
        _, format, order, state = name.split("_")
        text = f"{what}; {HOW[order]}; {'nothing in any cache' if state == 'cold' else 'seen before, page reloaded'}"
        rows.append(_row(name, found, "ms", text, 50.0, lab.size(steps, FILM_STEPS, "steps"), 95))
        if order == "random":
            rows[-1].limit = limits[format]
            rows[-1].limit_name = "reading and decoding both frames alone in a process, without app, JPEG and browser"
    return rows


def _films(lab: Lab, episodes: int, steps: int, size: tuple[int, int]) -> dict[str, Path]:
    """The same episodes in each format that is asked for."""
    from hilt.formats.convert import convert

    log = make_film(lab.new("log"), episodes, steps, size)
    wanted = [format for format in FORMATS if any(lab.wants("scrub", row) for row in SCRUBS if f"_{format}_" in row)]
    for codec in set(wanted) - {"log"}:
        convert(log, lab.new(codec), to="lerobot", fps=30, codec=codec)
    return {format: lab.folder / format for format in wanted}


def _scrub_episode(
    browser: Any, app: App, path: Path, episode: int, order: str, took: dict[str, list[float]], name: str
) -> None:
    """One episode that the app has not touched, with none of its pages in memory, and then again."""
    address = f"{app.base}/episode?data={data_key(path)}&source={source_key(path)}&number={episode}"
    drop_page_cache(files_of(path))
    for state in STATES:
        open_episode(browser, address)
        last = int(browser.execute_script("return document.querySelector('.episode').component.last"))
        steps = {
            "forward": list(range(1, last)),
            "backward": list(range(last - 1, 0, -1)),
            "random": (1 + np.random.default_rng(episode).permutation(last - 1))[:60].tolist(),
        }[order]
        found = scrub(browser, steps, JUMP_MS if order == "random" else DRAG_MS)
        took.setdefault(f"{name}_{state}", []).extend(found)


def _direct(path: Path, format: str, episodes: int, steps: int) -> float:
    """Milliseconds, percentile 95, to read and decode the frames of both cameras at random steps."""
    from hilt.app.episodes.dataset_episodes import DatasetEpisodes
    from hilt.formats.listing.episode_table import Vocabulary
    from hilt.formats.listing.log_episodes import LogEpisodes

    drop_page_cache(files_of(path))
    source: Any = (LogEpisodes if format == "log" else DatasetEpisodes)(path, "", Vocabulary())
    cameras, took = list(source.cameras(0)), []
    for episode in range(episodes):
        source.frame(episode, 0, 0, cameras[0])
        for step in np.random.default_rng(episode).permutation(steps)[:60].tolist():
            begun = time.perf_counter()
            for camera in cameras:
                source.frame(episode, 0, step, camera)
            took.append(1e3 * (time.perf_counter() - begun))
    source.close()
    return float(np.percentile(took, 95))


def _row(
    name: str,
    values: Sequence[float],
    unit: str,
    what: str,
    most: float,
    size: str,
    percentile: float = 50,
    note: str = "",
) -> Row:
    """A row with a bound; `low - high` are the smallest and the largest of its values."""
    ours = float(np.percentile(values, percentile))
    spread = (min(values), max(values)) if len(values) > 1 else None
    return Row(name, ours, unit, what, [at_most(most)], spread=spread, size=size, note=note)


def _absent(rows: Sequence[str], why: str) -> list[Row]:
    return [Row(name, None, "ms", "not measured", [at_most(0)], absent={"Chromium": why}) for name in rows]


def _held(memory: dict[str, int]) -> int:
    """The memory of a process without the page cache, which the kernel may reclaim."""
    return memory["RssAnon"] + memory["RssShmem"]


def _kinds(memory: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in memory.items())


GROUPS = {
    "list": Group(("first_paint_first", "first_paint_again", "filter", "memory_list"), listing),
    "opened": Group(("memory_opened", "memory_growth"), opening),
    "scrub": Group(SCRUBS, scrubbing),
    "live": Group(("learner_cost", "app_cpu"), live),
}
