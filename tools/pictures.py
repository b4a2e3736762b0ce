"""Draws the pictures of the documentation from what they show: ``python tools/pictures.py [NAME...]``.

    docs/life-of-an-observation.svg      the table of that page, as the way through actor, wire, log and learner
    docs/life-of-a-log-probability.svg   the table of that page, from the rollout to the loss
    docs/wire-guarantees.svg             a step on the wire, and what happens when a part dies: `WIRE` below
    docs/learning-tasks.svg              success before and after reinforcement learning: bench/results/task_*.json
    docs/learning-pick.svg               one task in different hands: bench/results/pick_*.json
    docs/learning-curves.svg             a run that learns: bench/results/curve_button-0.json, from its metrics.jsonl
    docs/libero-six.svg                  GRPO in six tasks of LIBERO: bench/results/libero_*-0.json

`tests/test_pictures.py` fails when one of them is not what this draws, and when `WIRE` has a name that the wire does
not have. `tools/architecture.py` draws the parts of Hilt, `tools/screenshots.py` takes pictures of `hilt open`.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.drawing import Drawing, text_width, wrapped

ROOT = Path(__file__).resolve().parent.parent
DOCS, RESULTS = ROOT / "docs", ROOT / "bench" / "results"
WIDTH, MARGIN = 960, 24


# The life of a thing: the hops of a page's table, in columns


@dataclass(frozen=True)
class Hop:
    """A row of such a table."""

    file: str
    function: str
    what: str


@dataclass(frozen=True)
class Column:
    """The hops from this function to the next column's: where they run."""

    first: str
    title: str
    where: str


@dataclass(frozen=True)
class Life:
    """What `life` draws: a way down the columns, into a store below the last but one, and up the last one."""

    page: str
    title: str
    columns: Sequence[Column]
    store: str
    stored: str
    between: str = ""


OBSERVATION = Life(
    "life-of-an-observation",
    "The life of an observation: from the camera to the batch",
    [
        Column("TabletopEnv.step", "The actor acts", "the actor's process"),
        Column("TrainerServer._data", "The learner receives", "a thread of the learner"),
        Column("Table.read", "The learner draws", "a thread of the learner, then its loop"),
    ],
    "The log, on disk",
    "A row for each step, and every frame once",
    "network",
)
LOG_PROBABILITY = Life(
    "life-of-a-log-probability",
    "The life of a log-probability: from the policy to the loss",
    [
        Column("roll_out", "The policy acts", "rollout, without gradient"),
        Column("Updater._rows", "The policy learns", "update, with gradient"),
    ],
    "The records of all chunks",
    "Inputs, samples, and the log-probability at which they were drawn",
)
ROW = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \| (.+) \|$", re.MULTILINE)


def hops(page: str) -> list[Hop]:
    """The rows of a page's table."""
    return [Hop(*row) for row in ROW.findall((DOCS / f"{page}.md").read_text())]


def columns_of(plan: Life) -> list[list[Hop]]:
    """The hops of each column."""
    all_hops = hops(plan.page)
    functions = [hop.function for hop in all_hops]
    if missing := [column.first for column in plan.columns if column.first not in functions]:
        raise SystemExit(f"docs/{plan.page}.md has no row of {missing}: name the first of each column in this tool")
    starts = [functions.index(column.first) for column in plan.columns]
    return [all_hops[start:end] for start, end in zip(starts, [*starts[1:], len(all_hops)], strict=True)]


def life(plan: Life) -> str:
    """Draws the table of a page: down the columns, into the store, and up the last column."""
    columns, gap, top = columns_of(plan), 44, 128
    wide = (WIDTH - 2 * MARGIN - gap * (len(columns) - 1)) / len(columns)
    texts = {hop: wrapped(hop.what.replace("`", ""), 13.5, wide - 26) for column in columns for hop in column}
    tall = 62 + 18 * max(len(lines) for lines in texts.values())
    step = tall + 24
    rows = max(map(len, columns))
    on = Drawing(plan.title, WIDTH, top + rows * step - 24 + MARGIN)
    on.text(MARGIN, 42, plan.title, 21, bold=True)
    left = [MARGIN + number * (wide + gap) for number in range(len(columns))]
    numbers = iter(range(1, 100))
    places: dict[Hop, float] = {}
    for number, (column, x) in enumerate(zip(columns, left, strict=True)):
        color, up = ("blue", "amber", "teal")[number if len(columns) == 3 else 2 * number], number == len(columns) - 1
        on.text(x, 84, plan.columns[number].title, 16, color, bold=True)
        on.text(x, 105, plan.columns[number].where, 13, "soft")
        for row, hop in enumerate(column):
            y = places[hop] = top + step * (rows - 1 - row if up else row)
            on.rect(x, y, wide, tall, f"{color}-pale", color)
            on.text(x + 13, y + 24, f"{next(numbers)} {hop.function}", 14.5, bold=True, mono=True)
            on.text(x + 13, y + 42, hop.file, 12, "soft", mono=True)
            for line, words in enumerate(texts[hop]):
                on.text(x + 13, y + 64 + 18 * line, words, 13.5)
            if row:
                begin, end = (y + step, y + tall) if up else (y - 24, y)
                on.arrow([(x + wide / 2, begin), (x + wide / 2, end)])
    for number in range(len(columns) - 2):  # from the last of a column to the first of the next
        x, middle = left[number] + wide, left[number] + wide + gap / 2
        start, end = places[columns[number][-1]] + tall / 2, places[columns[number + 1][0]] + tall / 2
        on.arrow([(x, start), (middle, start), (middle, end), (left[number + 1], end)])
        on.upright(middle - 7, (start + end) / 2, plan.between)
    _store(on, plan, (left[-2], wide), places[columns[-2][-1]] + tall, (left[-1], places[columns[-1][0]]), tall)
    return on.svg()


def _store(
    on: Drawing, plan: Life, column: tuple[float, float], above: float, to: tuple[float, float], tall: float
) -> None:
    """The store in which the last column but one ends, beside the box with which the last column begins."""
    (x, wide), (right, top) = column, to
    tall, top = min(tall, 130), top + max(0, tall - 130) / 2
    on.arrow([(x + wide / 2, above), (x + wide / 2, top)])
    on.cylinder(x + 20, top, wide - 40, tall, "panel", "line")
    on.text(x + wide / 2, top + tall / 2 - 6, plan.store, 15, anchor="middle", bold=True)
    for line, words in enumerate(wrapped(plan.stored, 13.5, wide - 72)):
        on.text(x + wide / 2, top + tall / 2 + 15 + 18 * line, words, 13.5, "soft", "middle")
    on.arrow([(x + wide - 20, top + tall / 2), (right, top + tall / 2)])


# The wire's guarantees, as a sequence


@dataclass(frozen=True)
class Lane:
    """A party of the sequence: a class, and where it is."""

    name: str
    where: str
    x: float


@dataclass(frozen=True)
class Message:
    """An arrow from one lane to another. `kind` is a message of the wire, or a method of the lane it goes to."""

    sender: str
    receiver: str
    kind: str
    fields: str = ""
    lost: bool = False


@dataclass(frozen=True)
class Event:
    """Something that happens to a lane: a note upon it; `bad`: it dies."""

    lane: str
    text: str
    bad: bool = False


@dataclass(frozen=True)
class Scene:
    """A guarantee, and the messages that keep it."""

    title: str
    moves: Sequence[Message | Event]


LOOP, QUEUE, CLIENT, SERVER, LOG = "control loop", "QueuedDataStore", "TrainerClient", "TrainerServer", "Log"
LANES = [
    Lane(LOOP, "actor", 88),
    Lane(QUEUE, "actor: memory, spool", 266),
    Lane(CLIENT, "actor: a thread", 438),
    Lane(SERVER, "learner: a thread", 728),
    Lane(LOG, "learner: disk", 892),
]
WIRE = [
    Scene(
        "With a spool a step is on disk when insert returns; the control loop never waits for the network",
        [Message(LOOP, QUEUE, "insert", "step 42"), Message(QUEUE, CLIENT, "on_insert")],
    ),
    Scene(
        "A step leaves the actor only when it would survive a power cut at the learner",
        [
            Message(CLIENT, SERVER, "hello", "boot, first=42"),
            Message(SERVER, CLIENT, "welcome", "have=41"),
            Message(CLIENT, SERVER, "data", "boot, first=42, steps 42 to 45"),
            Message(SERVER, LOG, "insert", "42 to 45"),
            Message(SERVER, CLIENT, "ack", "process=45, power=41"),
            Message(SERVER, LOG, "sync"),
            Message(SERVER, CLIENT, "ack", "process=45, power=45"),
            Message(CLIENT, QUEUE, "acknowledge", "45"),
        ],
    ),
    Scene(
        "The network fails: what arrived is not stored again, what did not is sent again",
        [
            Message(CLIENT, SERVER, "data", "boot, first=46, steps 46 to 49"),
            Message(SERVER, LOG, "insert", "46 to 49"),
            Message(SERVER, CLIENT, "ack", "process=49", lost=True),
            Message(CLIENT, SERVER, "data", "first=50, steps 50 to 53", lost=True),
            Event(CLIENT, "no answer: a new connection"),
            Message(CLIENT, SERVER, "hello", "boot, first=46"),
            Message(SERVER, CLIENT, "welcome", "have=49"),
            Message(CLIENT, SERVER, "data", "boot, first=50, steps 50 to 53"),
        ],
    ),
    Scene(
        "The learner dies: its next process reads from the rows of the log which steps it has",
        [
            Event(SERVER, "killed, and started again", bad=True),
            Message(CLIENT, SERVER, "ping"),
            Message(SERVER, CLIENT, "stranger"),
            Message(CLIENT, SERVER, "hello", "boot, first=50"),
            Message(SERVER, LOG, "received_by", "boot"),
            Message(SERVER, CLIENT, "welcome", "have=53"),
        ],
    ),
    Scene(
        "The actor dies: its next process sends what the spool still holds, under the same boot",
        [
            Event(CLIENT, "killed, and started again", bad=True),
            Message(CLIENT, QUEUE, "parcel", "54 to 57"),
            Message(CLIENT, SERVER, "hello", "boot, first=54"),
            Message(SERVER, CLIENT, "welcome", "have=53"),
            Message(CLIENT, SERVER, "data", "boot, first=54, steps 54 to 57"),
        ],
    ),
    Scene(
        "An actor that asks late gets the newest weights, and never an older version after a newer one",
        [
            Event(SERVER, "versions 7, 8 and 9 are published"),
            Message(CLIENT, SERVER, "want", "have=6"),
            Message(SERVER, CLIENT, "weights", "version=9"),
        ],
    ),
]
HEAD, MOVE, BAND, APART = 138, 36, 56, 12
"""Pixels of the head, of a message, of a guarantee's title, and between guarantees"""


def wire() -> str:
    """Draws `WIRE`: time goes down, and each guarantee is a band."""
    heights = [BAND + MOVE * len(scene.moves) for scene in WIRE]
    tops = [HEAD + sum(heights[:number]) + APART * number for number in range(len(WIRE))]
    tall = tops[-1] + heights[-1] + MARGIN
    on = Drawing("The wire: what is sent, and what is kept when a part dies", WIDTH, tall)
    on.text(MARGIN, 42, on.title, 21, bold=True)
    for top, height in zip(tops, heights, strict=True):
        on.rect(MARGIN / 2, top, WIDTH - MARGIN, height)
    x = {lane.name: lane.x for lane in LANES}
    for lane in LANES:
        _lane(on, lane, tall - MARGIN)
    on.text((x[CLIENT] + x[SERVER]) / 2, 86, "network", 14, "soft", "middle")
    on.text((x[CLIENT] + x[SERVER]) / 2, 114, "(calls are dashed)", 13, "soft", "middle")
    for number, (scene, top) in enumerate(zip(WIRE, tops, strict=True), 1):
        title = f"{number}  {scene.title}"
        on.rect(MARGIN - 4, top + 10, text_width(title, 15) + 8, 26, "panel", "panel", 0)  # over the lanes' lines
        on.text(MARGIN, top + 28, title, 15, "teal", bold=True)
        for y, move in enumerate(scene.moves):
            at = top + BAND + MOVE * y + 4
            _event(on, x[move.lane], at, move) if isinstance(move, Event) else _message(on, x, at, move)
    return on.svg()


def _lane(on: Drawing, lane: Lane, bottom: float) -> None:
    side = "blue" if "actor" in lane.where else "amber"
    wide = text_width(lane.name, 13.5, mono=True) + 20
    on.line([(lane.x, 120), (lane.x, bottom)], "edge", 1.5)
    on.rect(lane.x - wide / 2, 64, wide, 32, f"{side}-pale", side)
    on.text(lane.x, 85, lane.name, 13.5, anchor="middle", bold=True, mono=True)
    on.text(lane.x, 114, lane.where, 13, "soft", "middle")


def _message(on: Drawing, x: dict[str, float], y: float, move: Message) -> None:
    """An arrow with its text above it: of the network drawn through, of a call within a machine dashed."""
    begin, end = x[move.sender], x[move.receiver]
    color, sent = "red" if move.lost else "line", {move.sender, move.receiver} == {CLIENT, SERVER}
    stop = begin + 0.8 * (end - begin) if move.lost else end
    on.arrow([(begin, y + 8), (stop, y + 8)], color, dashed=not sent)
    if move.lost:
        x_cross = stop + (14 if end > begin else -14)
        on.line([(x_cross - 6, y + 2), (x_cross + 6, y + 14)], "red", 2.6)
        on.line([(x_cross - 6, y + 14), (x_cross + 6, y + 2)], "red", 2.6)
    words = f"{move.kind} " if sent else f"{move.kind}({move.fields})"
    details = move.fields if sent else ""
    wide = text_width(words, 13.5, mono=True) + text_width(details, 13.5)
    start = (begin + stop - wide) / 2
    on.text(start, y, words.strip(), 13.5, "red" if move.lost else "ink", bold=sent, mono=True)
    if details:
        on.text(start + text_width(words, 13.5, mono=True), y, details, 13.5, "soft")


def _event(on: Drawing, x: float, y: float, event: Event) -> None:
    color = "red" if event.bad else "teal"
    wide = text_width(event.text, 13.5) + 20
    on.rect(x - wide / 2, y - 12, wide, 26, f"{color}-pale", color, 13)
    on.text(x, y + 6, event.text, 13.5, anchor="middle")


# What was learned: success by seed


@dataclass(frozen=True)
class Dots:
    """Runs that differ by their seed: success of each, in percent."""

    name: str
    color: str
    shares: Sequence[float]

    @property
    def mean(self) -> float:
        return sum(self.shares) / len(self.shares)


@dataclass(frozen=True)
class Row:
    """A line of a chart; of two sets of runs the second came after the first."""

    label: str
    note: str
    runs: Sequence[Dots]


def percent(outcomes: Sequence[object]) -> float:
    """The share of episodes that ended with success: true, or the number of steps that it took."""
    return 100 * sum(map(bool, outcomes)) / len(outcomes)


def results(pattern: str) -> list[dict[str, Any]]:
    """The results of these runs, in the order of their seeds."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]
    if not found:
        raise SystemExit(f"there are no results bench/results/{pattern}; expected one of each seed")
    return found


def dots(name: str, color: str, pattern: str, key: str) -> Dots:
    return Dots(name, color, [percent(run[key]) for run in results(pattern)])


def task_row(task: str) -> Row:
    files = f"task_{task}-*.json"
    before = dots("imitation of the demonstrations", "amber", files, "before")
    after = dots("after reinforcement learning", "teal", files, "after")
    return Row(task, f"{results(files)[0]['updates']:,} updates", [before, after])


def tasks() -> str:
    """Draws success of imitation and of what reinforcement learning made of it, of every task and seed."""
    names = sorted({re.sub(r"task_(\w+)-\d+", r"\1", path.stem) for path in RESULTS.glob("task_*.json")})
    rows = sorted(map(task_row, names), key=lambda row: -row.runs[-1].mean)
    return chart("Success in 100 test states, before and after: a dot for each seed", rows)


OURS, OTHERS = ("Hilt", "teal"), ("others", "blue")
HANDS = [  # label, note, whose, files, the key of their outcomes
    ("RLPD with an operator", "the recipe", OURS, "pick_ours-5min-*.json", "ours"),
    ("nobody takes over", "demonstrations alone", OURS, "pick_without_operator-5min-*.json", "trial"),
    ("a late operator", "5 steps late, and inexact", OURS, "pick_delayed_operator-5min-*.json", "trial"),
    ("a tired operator", "500 steps in all", OURS, "pick_tired_operator-5min-*.json", "trial"),
    ("the operator alone", "beside a still policy", OTHERS, "pick_ours-5min-*.json", "operator"),
    ("Stable-Baselines3", "SAC, best of four variants", OTHERS, "pick_sb3-{best}-5min-*.json", "trial"),
    ("HG-DAgger", "imitates corrections", OTHERS, "pick_hg_dagger-5min-*.json", "trial"),
    ("RLPD, stopped early", "as many updates as SB3", OURS, "pick_equal-5min-*.json", "trial"),
    ("imitation alone", "before the first update", OTHERS, "pick_ours-5min-*.json", "bc"),
    ("no demonstrations", "and nobody takes over", OURS, "pick_bare-5min-*.json", "trial"),
]


def pick() -> str:
    """Draws success of tabletop_pick after five minutes, in different hands."""
    variants = [dots("", "", f"pick_sb3-{number}-5min-*.json", "trial").mean for number in range(4)]
    best = variants.index(max(variants))
    rows = [Row(label, note, [dots(*whose, files.format(best=best), key)]) for label, note, whose, files, key in HANDS]
    return chart("tabletop/pick after five minutes: success, a dot for each seed", rows)


def chart(title: str, rows: Sequence[Row]) -> str:
    """Draws a row for each of these over an axis from 0 to 100%, a dot for each seed, and the mean."""
    left = MARGIN + 34 + max(max(text_width(row.label, 15.5), text_width(row.note, 13.5)) for row in rows)
    right, step, top = WIDTH - 44 - 64 * max(len(row.runs) for row in rows), 54, 128
    bottom = top + step * len(rows)
    on = Drawing(title, WIDTH, bottom + 50)
    on.text(MARGIN, 42, title, 21, bold=True)
    at = MARGIN + 8.0
    for runs in {runs.name: runs for row in rows for runs in row.runs}.values():
        on.circle(at, 74, 7, runs.color, "paper")
        on.text(at + 15, 79, runs.name, 14.5, "soft")
        at += text_width(runs.name, 14.5) + 50
    for number in range(0, 101, 20):
        x = left + (right - left) * number / 100
        on.line([(x, top), (x, bottom)], "edge", 1)
        on.text(x, bottom + 24, f"{number}%", 13.5, "soft", "middle")
    for number, row in enumerate(rows):
        y = top + step * (number + 0.5)
        on.text(MARGIN, y - 1, row.label, 15.5, bold=True)
        on.text(MARGIN, y + 17, row.note, 13.5, "soft")
        _dots(on, row, y, left, right)
    on.text(right + 22, top - 6, "mean", 13.5, "soft")
    return on.svg()


def _dots(on: Drawing, row: Row, y: float, left: float, right: float) -> None:
    def x(share: float) -> float:
        return round(left + (right - left) * share / 100, 1)

    if len(row.runs) > 1:
        on.line([(x(row.runs[0].mean), y), (x(row.runs[-1].mean), y)], "edge", 5)
    for runs in row.runs:
        for seed, share in enumerate(runs.shares):
            on.circle(x(share), y + 6.5 * (seed - (len(runs.shares) - 1) / 2), 6, runs.color, "paper")
    means = " → ".join(f"{runs.mean:.3g}" for runs in row.runs)
    on.text(right + 22, y + 5, f"{means}%", 15, bold=True)


# A run that learns: curves


@dataclass(frozen=True)
class Panel:
    """One chart over updates, or over episodes. Points are (update, value) or (update, value, low, high)."""

    title: str
    note: str
    top: float
    unit: str
    line: Sequence[tuple[float, float]] = ()
    points: Sequence[tuple[float, float, float, float]] = ()
    others: Sequence[Sequence[tuple[float, float]]] = ()
    """Of other seeds, in other colors"""


def wilson(successes: int, episodes: int) -> tuple[float, float]:
    """The 95% interval of a success rate, in percent."""
    z, share = 1.96, successes / episodes
    middle = (share + z * z / (2 * episodes)) / (1 + z * z / episodes)
    reach = z / (1 + z * z / episodes) * (share * (1 - share) / episodes + (z / (2 * episodes)) ** 2) ** 0.5
    return 100 * (middle - reach), 100 * (middle + reach)


def _mean_of_last(values: Sequence[tuple[float, float, float]], last: int = 20) -> list[tuple[float, float]]:
    """Of (update, numerator, denominator), the quotients of the sums over the last episodes, as soon as there are as
    many."""
    found = []
    for end in range(last, len(values) + 1):
        _, above, below = zip(*values[end - last : end], strict=True)
        found.append((values[end - 1][0], sum(above) / sum(below)))
    return found


def curves() -> str:
    """Draws what a run reached in its evaluations, how much its operator acted, and how long its episodes were."""
    (run,) = results("curve_button-0.json")
    validations = [(at, 100 * won / of, *wilson(won, of)) for at, won, of in run["validations"]]
    acted = [(at, 100 * person, length) for at, length, person, _ in run["episodes"]]
    lengths = [(at, length, 1) for at, length, _, _ in run["episodes"]]
    panels = [
        Panel("Success, nobody takes over", f"of {run['validations'][0][2]} evaluation states, 95% interval", 100, "%",
              points=validations),
        Panel("Steps that the operator made", "share, last 20 episodes", 50, "%", _mean_of_last(acted)),
        Panel("Steps of an episode", "mean of the last 20", 25, "", _mean_of_last(lengths)),
    ]  # fmt: skip
    gap, wide, tall, top = 62, (WIDTH - 2 * MARGIN - 2 * 62 - 40) / 3, 200, 136
    on = Drawing("tabletop_button learns: one run, over its updates", WIDTH, top + tall + 62)
    on.text(MARGIN, 42, on.title, 21, bold=True)
    last = 100 * -(-run["episodes"][-1][0] // 100)
    for number, panel in enumerate(panels):
        _panel(on, panel, MARGIN + 40 + number * (wide + gap), top, (wide, tall), last)
    on.text(WIDTH / 2, top + tall + 48, "updates", 13.5, "soft", "middle")
    return on.svg()


def _panel(on: Drawing, panel: Panel, left: float, top: float, size: tuple[float, float], last: float) -> None:
    wide, tall = size

    def place(update: float, value: float) -> tuple[float, float]:
        return round(left + wide * update / last, 1), round(top + tall * (1 - value / panel.top), 1)

    on.text(left - 38, top - 46, panel.title, 15.5, bold=True)
    on.text(left - 38, top - 26, panel.note, 13, "soft")
    for part in range(6):
        value = panel.top * part / 5
        on.line([place(0, value), place(last, value)], "edge", 1)
        on.text(left - 8, place(0, value)[1] + 4.5, f"{value:g}{panel.unit}", 13, "soft", "end")
    for update in range(0, int(last) + 1, 500 if last < 3_000 else 1_000):
        on.text(place(update, 0)[0], top + tall + 22, f"{update:,}", 13, "soft", "middle")
    if panel.line:
        on.polyline([place(*point) for point in panel.line], "teal", 2.2)
    for color, other in zip(("amber", "blue"), panel.others, strict=False):
        on.polyline([place(*point) for point in other], color, 1.5)
        for point in other:
            on.circle(*place(*point), 3.5, color, "paper")
    for update, value, low, high in panel.points:
        on.line([place(update, low), place(update, high)], "teal", 2)
        on.circle(*place(update, value), 5.5, "teal", "paper")


def libero() -> str:
    """Draws for six tasks of LIBERO how many drawn episodes succeeded, and what the most likely actions reached."""
    runs = [run for run in results("libero_*-0.json") if "drawn_share" in run["settings"]]
    others = results("libero_*-[12].json")
    gap, wide, tall, down = 62, (WIDTH - 2 * MARGIN - 2 * 62 - 40) / 3, 130, 240
    on = Drawing("GRPO in six tasks of LIBERO: success in ten evaluation states, three seeds", WIDTH, 2 * down + 84)
    on.text(MARGIN, 42, on.title, 21, bold=True)
    note = "large points: seed 0, 95% interval, and its drawn episodes (line), on two cores; "
    note += "amber, blue: seeds 1 and 2, on one"
    on.text(MARGIN, 66, note, 13.5, "soft")
    for number, run in enumerate(runs):
        ends = list(itertools.accumulate(episodes for episodes, _ in run["steps"]))
        steps = [(end, 100 * won, made) for end, (made, won) in zip(ends, run["steps"], strict=True)]
        points = [(at, 100 * won / of, *wilson(won, of)) for at, won, of in run["validations"]]
        minutes = f"seed 0: {run['episodes']:,} episodes, {run['seconds'] / 60:.0f} minutes"
        seeds = [each for each in others if each["task"] == run["task"]]
        lines = [[(at, 100 * won / of) for at, won, of in each["validations"]] for each in seeds]
        panel = Panel(run["task"], minutes, 100, "%", _mean_of_last(steps, 5), points, lines)
        left, top = MARGIN + 40 + number % 3 * (wide + gap), 138 + number // 3 * down
        _panel(on, panel, left, top, (wide, tall), 1_600)
    return on.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "life-of-an-observation": lambda: life(OBSERVATION),
    "life-of-a-log-probability": lambda: life(LOG_PROBABILITY),
    "wire-guarantees": wire,
    "learning-tasks": tasks,
    "learning-pick": pick,
    "learning-curves": curves,
    "libero-six": libero,
}


def main(names: Sequence[str]) -> int:
    if unknown := [name for name in names if name not in PICTURES]:
        raise SystemExit(f"no pictures named {unknown}; expected some of {list(PICTURES)}")
    for name in names or PICTURES:
        path = DOCS / f"{name}.svg"
        path.write_text(PICTURES[name]())
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
