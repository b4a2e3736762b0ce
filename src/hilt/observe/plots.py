"""Curves of runs: success, interventions, losses and rates over online steps (or
samples) and minutes, as PNG files and as one page.

Runs whose settings differ only by the seed become one curve, their mean, in a band from the lowest
to the highest of them. Others have a curve each, named after the settings in which they differ, or
after their folders where these are more than three.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from hilt.core.checksums import read_json
from hilt.core.errors import ConfigError, EmptyError
from hilt.core.files import DISK
from hilt.core.progress import Report, silent
from hilt.core.tree import Array
from hilt.observe.drawing import BOTTOM, HEIGHT, LEFT, PALETTE, RIGHT, TOP, WIDTH, Chart, Line, Pixels, Svg, draw
from hilt.observe.metrics import FILE, read_metrics, running
from hilt.observe.sinks import config_of
from hilt.observe.statistics import over_scenes, wilson

SMOOTH = 20
"""Episodes, or records of the learner, of which a point is the mean"""
MAX_POINTS = 200
"""Of a curve; more would not be seen"""
MAX_KINDS = 3
"""Of evaluations, each with dots of its own: the maximum number of names"""
COLUMNS, HEAD = 4, 74.0
"""Of a PNG: charts beside each other at most, and the height of its title"""
SAME = ("seed", "wire.", "sinks", "log_period", "checkpoint_")
"""Settings that do not make two runs different ones: they begin so"""
DARK = ["6ea0ff", "ff9c5b", "43c79b", "b594f5", "f07a8a", "3dc0d4", "d3a940", "9aa1ad"]
SOURCES = ("online", "demo", "human")
"""Whose steps they are"""
COLORS = {"human": 1, "demo": 2, "without take-over": 2}
"""Of curves, when one run is drawn"""

Record = Mapping[str, Any]
Value = Callable[[Record], float | None]


@dataclass(frozen=True)
class Panel:
    """What one chart shows: which records it reads, and its curves by name."""

    title: str
    unit: str
    kind: str
    curves: Mapping[str, Value]
    percent: bool = False
    weight: str = ""
    """A mean over episodes is weighted by this: a share of all steps, not the mean of shares"""
    raw: Sequence[str] = ()
    """Curves that are not smoothed: numbers that only grow, and those that are no sample of anything"""


def _get(name: str) -> Value:
    return lambda record: record.get(name)


def _success(record: Record) -> float | None:
    return None if record.get("success") is None else float(record["success"])


def _alone(record: Record) -> float | None:
    return None if record.get("intervention_steps", 1) or record.get("lost_steps") else _success(record)


def _interventions(record: Record) -> float | None:
    return (
        record["intervention_steps"] / record["length"]
        if "intervention_steps" in record and record.get("length")
        else None
    )


def _length_of_success(record: Record) -> float | None:
    return record.get("length") if record.get("success") else None


def _expected(record: Record) -> float | None:
    """What the critic expects, in records that have what came of it, too."""
    name = "q/online" if "realized_q" in record else "value" if "realized_return" in record else ""
    return record.get(name)


def _first_of(*names: str) -> Value:
    return lambda record: next((record[name] for name in names if record.get(name) is not None), None)


def _right_condition(record: Record) -> float | None:
    """The loss beside which there is one of the wrong condition."""
    if "validation_loss_of_wrong_condition" in record:
        return record.get("validation_loss")
    return record.get("imitation/conditioned_loss")


def _per_source(name: str) -> dict[str, Value]:
    return {source: _get(f"{name}/{source}") for source in SOURCES}


PANELS = [
    Panel(
        "Success of the last {n} episodes",
        "of episodes",
        "episode",
        {"all": _success, "without take-over": _alone},
        percent=True,
    ),
    Panel("Intervention rate", "of online steps", "episode", {"": _interventions}, percent=True, weight="length"),
    Panel("Episode length", "steps", "episode", {"all": _get("length"), "successes": _length_of_success}),
    Panel("Episode duration", "seconds", "episode", {"": _get("seconds")}),
    Panel("Episode return", "sum of rewards", "episode", {"": _get("return")}),
    Panel("Critic loss", "", "update", {"": _get("critic_loss")}),
    Panel(
        "Actor and temperature loss",
        "",
        "update",
        {"actor": _get("actor_loss"), "temperature": _get("temperature_loss")},
    ),
    Panel(
        "Loss (in training: mean of {n} records)",
        "",
        "update",
        {"training": _get("loss"), "held out": _get("validation_loss")},
        raw=["held out"],
    ),
    Panel(
        "Absolute error of imitation",
        "of normalized actions",
        "update",
        {"training": _get("l1"), "held out": _get("validation_l1")},
        raw=["held out"],
    ),
    Panel("KL of the style", "nats", "update", {"": _get("style_kl")}),
    Panel("Policy and value loss", "", "update", {"policy": _get("policy_loss"), "critic": _get("value_loss")}),
    Panel("Clip fraction", "of ratios", "update", {"": _get("clip_fraction")}, percent=True),
    Panel("KL to the reference", "nats", "update", {"": _get("kl")}),
    Panel(
        "Dropped groups",
        "",
        "update",
        {f"all {name}": _get(f"dropped_all_{name}") for name in ("succeeded", "failed")},
    ),
    Panel("Learning rate", "", "update", {"": _get("learning_rate")}, raw=[""]),
    Panel("Gradient norm", "before clipping", "update", {"": _get("gradient_norm")}),
    Panel("Q values by source", "", "update", _per_source("q")),
    Panel(
        "Expected and realized value",
        "",
        "update",
        {"expected": _expected, "realized": _first_of("realized_q", "realized_return")},
    ),
    Panel("TD error by source", "", "update", _per_source("td_error")),
    Panel("Critic gradient by source", "of its gradient", "update", _per_source("gradient_share"), percent=True),
    Panel("Batch reward by source", "mean", "update", _per_source("reward")),
    Panel("Conservative term", "", "update", {"": _get("conservative_loss")}),
    Panel("Bounded by realized returns", "of values", "update", {"": _get("bounded_share")}, percent=True),
    Panel("Beside the frozen policy", "", "update", {"pull": _get("pull_loss"), "correction": _get("correction")}),
    Panel("Good steps", "of the batch", "update", {"": _get("share/good")}, percent=True),
    Panel(
        "Loss by condition",
        "",
        "update",
        {
            "right": _right_condition,
            "exchanged": _first_of("validation_loss_of_wrong_condition", "imitation/loss_of_wrong_condition"),
        },
        raw=["right", "exchanged"],
    ),
    Panel(
        "Value model",
        "of episodes",
        "update",
        {
            "expected": _get("value_expected"),
            "realized": _get("value_realized"),
            "ended as hopeless": _get("value_hopeless"),
            "hopeless that succeeded": _get("value_recovered"),
        },
        percent=True,
    ),
    Panel("Policy entropy", "nats", "update", {"": _get("entropy")}),
    Panel("Temperature", "", "update", {"": _get("temperature")}),
    Panel(
        "Throughput",
        "per second",
        "update",
        {
            name: _get(f"{key}_per_second")
            for name, key in (("updates",) * 2, ("online steps", "env_steps"), ("samples",) * 2)
        },
    ),
    Panel("Control lateness", "ms, 99th percentile", "actor", {"": _get("lateness_p99_ms")}),
    Panel("Weight staleness", "updates", "update", {"": _get("staleness")}),
    Panel("Age of the weights that act", "s; in post-training steps", "update", {"": _get("weights_age")}),
    Panel("Dead ReLUs", "of units", "update", {"": _get("dead_relus")}, percent=True, raw=[""]),
    Panel("Effective rank of the features", "singular values", "update", {"": _get("effective_rank")}, raw=[""]),
    Panel(
        "KL of the policy",
        "nats of each number",
        "update",
        {"between two looks": _get("policy_kl"), "from the one that collected": _get("ppo_kl")},
    ),
    Panel(
        "Time of the learner",
        "of its time",
        "update",
        {"torch": _get("torch_share"), "batches": _get("sample_wait_share"), "waiting for steps": _get("wait_share")}
        | {
            name: _get(f"{key}_share")
            for name, key in (("simulator",) * 2, ("policy", "model"), ("learning", "update"), ("other",) * 2)
        },
        percent=True,
    ),
    Panel(
        "Steps in the replay",
        "steps",
        "update",
        {name: _get(f"{key}_steps") for name, key in zip(SOURCES, ("log", "demo", "human"), strict=True)},
        raw=SOURCES,
    ),
]


@dataclass
class PlottedRun:
    """One run, as its folder has it."""

    path: Path
    records: list[dict[str, Any]]
    config: dict[str, Any]
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> PlottedRun:
        if not (path / FILE).is_file():
            raise ConfigError(f"{path} is not a run: there is no {FILE} in it. Give the folder that `hilt train` made.")
        records = read_metrics(path)
        for record, seconds in zip(records, running(records), strict=True):
            record["minutes"] = seconds / 60
        records = [record for record in records if "prepared_updates" not in record]  # they have no online steps
        if not any(record["kind"] in ("update", "episode") for record in records):
            raise EmptyError(f"{path} has no metrics to draw yet: no episode has ended, and no update was made.")
        found = [read_json(file) for file in sorted(path.glob("evaluations/*/evaluation.json"))]
        return cls(path, records, _flat(config_of(path)), sorted(found, key=lambda one: one["update"]))

    @property
    def tried(self) -> list[str]:
        """The tasks of its evaluations."""
        return sorted({one.get("task", "") for one in self.evaluations})

    @property
    def counted(self) -> str:
        """What the `step` of its records is."""
        return "samples" if any("samples_per_second" in record for record in self.records) else "online steps"

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]


@dataclass
class RunGroup:
    """Runs that are drawn as one."""

    runs: list[PlottedRun]
    name: str = ""


def plot(paths: Sequence[Path], out: Path, smooth: int = SMOOTH, report: Report = silent) -> list[Path]:
    """Draws these runs into ``curves.html``, ``curves-steps.png`` and
    ``curves-minutes.png`` of a folder, and gives their paths."""
    if smooth < 1:
        raise ConfigError(f"smooth={smooth}: expected how many episodes a point is the mean of, at least 1.")
    runs, charts = list[PlottedRun](), dict[str, list[Chart]]()
    for number, path in enumerate(paths):
        report("reading runs", number, len(paths), str(path))
        runs.append(PlottedRun.load(path))
    groups = grouped(runs)
    DISK.make_folders(out)
    for number, axis in enumerate(("step", "minutes")):
        report("drawing curves", number, 4)
        charts[axis] = all_charts(groups, axis, smooth)
    made = {out / "curves.html": page(groups, charts, smooth).encode()}
    for number, (axis, name) in enumerate((("step", "steps"), ("minutes", "minutes"))):
        report("drawing curves", 2 + number, 4)
        made[out / f"curves-{name}.png"] = picture(groups, charts[axis])
    for path, data in made.items():
        DISK.replace(path, data, durable=False)
    return list(made)


def grouped(runs: Sequence[PlottedRun]) -> list[RunGroup]:
    """Those that differ only by their seed together, each group with a name that tells it from the others."""
    keys = sorted({key for run in runs for key in run.config if not key.startswith(SAME)})
    groups: dict[tuple[str, ...], RunGroup] = {}
    for run in runs:
        same = tuple(str(run.config.get(key)) for key in keys) if run.config else (str(run.path),)
        groups.setdefault(same, RunGroup([])).runs.append(run)
    made = list(groups.values())
    differing = [key for key in keys if len({str(group.runs[0].config.get(key)) for group in made}) > 1]
    is_named = 0 < len(differing) <= 3  # with more than three settings in its name, a run is known better by its folder
    for group in made:
        words = [f"{key.rpartition('.')[2]}={group.runs[0].config.get(key)}" for key in differing]
        group.name = ", ".join(words) if is_named and group.runs[0].config else group.runs[0].path.name
        if len(group.runs) > 1:
            seeds = ", ".join(str(run.config.get("seed", "?")) for run in group.runs)
            group.name += f" ({len(group.runs)} runs, seeds {seeds})"
    return made


def all_charts(groups: Sequence[RunGroup], axis: str, smooth: int) -> list[Chart]:
    """Returns one chart for each panel for which the runs have data."""
    charts = []
    for panel in PANELS:
        lines: list[Line] = []
        dashes: dict[str, int] = {}  # of the curves that some run has: a panel knows more than any of them
        for place, group in enumerate(groups):
            for number, name in enumerate(panel.curves):
                made = [one for run in group.runs if (one := curve(run, panel, name, axis, smooth)) is not None]
                if made:
                    dash = dashes.setdefault(name, len(dashes))
                    color, dash, whose = (
                        (place, dash, group.name) if len(groups) > 1 else (COLORS.get(name, number), 0, "")
                    )
                    lines.append(mean_of(made, Line(name, *made[0], color, dash, whose=whose)))
            if panel is PANELS[0]:
                whose = group.name if len(groups) > 1 else ""
                lines += [
                    dots for run in group.runs for dots in evaluation_dots(run, axis, place if whose else None, whose)
                ]
        if lines:
            titles = {"step": _counted(groups), "minutes": "minutes"}
            title = "Success in evaluations" if all(line.dots for line in lines) else panel.title.format(n=smooth)
            charts.append(Chart(title, panel.unit, titles[axis], lines, panel.percent))
    return charts


def curve(run: PlottedRun, panel: Panel, name: str, axis: str, smooth: int) -> tuple[Array, Array] | None:
    """(x, y) of one run: the means over the last `smooth` values, or over as many as there are."""
    value, records = panel.curves[name], run.of(panel.kind)
    found = [
        (record[axis], got, record.get(panel.weight) or 1.0) for record in records if (got := value(record)) is not None
    ]
    if not found:
        return None
    x, y, weight = np.array(found, np.float64).T
    if name not in panel.raw:
        y = _rolling(y * weight, smooth) / _rolling(weight, smooth)
    shown = np.unique(np.linspace(0, len(x) - 1, MAX_POINTS).round().astype(int))
    return x[shown], y[shown]


def mean_of(curves: Sequence[tuple[Array, Array]], line: Line) -> Line:
    """One curve for several runs, as far as all of them have one."""
    if len(curves) == 1:
        return line
    begin, end = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    x = np.linspace(begin, max(begin, end), MAX_POINTS)
    y = np.stack([np.interp(x, *one) for one in curves])
    return Line(line.name, x, y.mean(0), line.color, line.dash, y.min(0), y.max(0), whose=line.whose)


def evaluation_dots(run: PlottedRun, axis: str, color: int | None, whose: str) -> list[Line]:
    """Success on the numbered states of each split and task with its interval, where the learner was when it made those
    weights. Of more than `MAX_KINDS` of these, all tasks of a split together."""
    updates, lines, several = run.of("update"), [], len(run.tried) > 1
    known = [one for one in run.evaluations if one["success"] is not None]
    if len({(one["split"], one.get("task", "")) for one in known}) > MAX_KINDS:
        known = pooled(known)
    kinds = sorted({(one["split"], one.get("task", "")) for one in known}, reverse=True)
    for number, (split, task) in enumerate(kinds if updates else ()):
        found = [one for one in known if (one["split"], one.get("task", "")) == (split, task)]
        x = np.interp(
            [one["update"] for one in found], [one["update"] for one in updates], [one[axis] for one in updates]
        )
        y, low, high = (np.array([one[name] for one in found], np.float64) for name in ("success", "low", "high"))
        name = f"{task.rpartition('/')[2]}, {split}" if several else f"on {split} states"
        lines.append(Line(name, x, y, 3 + number if color is None else color, 0, low, high, dots=True, whose=whose))
    return lines


def pooled(evaluations: Sequence[Record]) -> list[dict[str, Any]]:
    """One for all tasks that were tried on a split after an update; of a task that was tried twice then, the
    last counts. The interval counts episodes of one scene together where tasks share their scenes, which
    results of older versions do not contain."""
    found: dict[Any, dict[str, Record]] = {}
    for one in evaluations:
        found.setdefault((one["split"], one["update"], one.get("sample")), {})[one.get("task", "")] = one
    made = []
    for (split, update, _), tasks in found.items():
        episodes = sum(one["episodes"] for one in tasks.values())
        good = sum(round(one["success"] * one["episodes"]) for one in tasks.values())
        low, high = wilson(good, episodes)
        if all("outcomes" in one and "scene" in one for one in tasks.values()):
            each = [
                (task, one["scene"], o["state"], bool(o["success"]))
                for task, one in tasks.items()
                for o in one["outcomes"]
            ]
            low, high, _ = over_scenes(each)
        made.append(
            {
                "split": split,
                "update": update,
                "task": "all tasks",
                "success": good / episodes,
                "low": low,
                "high": high,
            }
        )
    return made


def final_numbers(run: PlottedRun, smooth: int) -> dict[str, str]:
    """What the table shows of a run: how it stands at its end."""
    episodes, updates = run.of("episode")[-smooth:], run.of("update")
    success = [_success(one) for one in episodes if _success(one) is not None]
    alone = [_alone(one) for one in run.of("episode") if _alone(one) is not None][-smooth:]
    steps = sum(one.get("length", 0) for one in episodes)
    lengths = [one["length"] for one in run.of("episode") if _length_of_success(one)][-smooth:]
    rates = [
        _mean([one[name] for one in updates[-smooth:] if one.get(name) is not None])
        for name in ("updates_per_second", "env_steps_per_second", "samples_per_second")
    ]
    return {
        "evaluation": "; ".join(_last_evaluation(run, task) for task in run.tried) or "–",
        f"last {smooth} episodes": _percent(_mean(success)),
        "without take-over": _percent(_mean(alone)),
        "a person's steps": _percent(
            sum(one.get("intervention_steps", 0) for one in episodes) / steps if steps else None
        ),
        "contact lost": _percent(sum(one.get("lost_steps", 0) for one in episodes) / steps if steps else None),
        "steps per success": _number(_mean(lengths)),
        "return": _number(_mean([one["return"] for one in episodes if one.get("return") is not None])),
        run.counted: f"{max(one['step'] for one in run.records):,}",
        "updates": f"{max(one['update'] for one in run.records):,}",
        "minutes": f"{run.records[-1]['minutes']:.1f}",
        "updates/s": _number(rates[0]),
        "steps/s": _number(rates[1]),
        "samples/s": _number(rates[2]),
    }


def _last_evaluation(run: PlottedRun, task: str) -> str:
    last = max(
        (one for one in run.evaluations if one.get("task", "") == task),
        key=lambda one: (one["split"] == "test", one["update"]),
    )
    if last["success"] is None:
        return "–"
    whose = f"{task}: " if len(run.tried) > 1 else ""
    return (
        f"{whose}{_percent(last['success'])} [{100 * last['low']:.0f}, {100 * last['high']:.0f}] of "
        f"{last['episodes']} {last['split']}"
    )


def page(groups: Sequence[RunGroup], charts: Mapping[str, Sequence[Chart]], smooth: int) -> str:
    """Everything on one page that needs nothing else."""
    rows = [
        (number, run.path.resolve().name, final_numbers(run, smooth))
        for number, group in enumerate(groups)
        for run in group.runs
    ]
    known = [
        name
        for name in dict.fromkeys(name for row in rows for name in row[2])
        if any(row[2].get(name, "–") != "–" for row in rows)
    ]
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in ("run", *known))
    table = [f"<tr>{heads}</tr>"]
    for number, name, numbers in rows:
        cells = "".join(f"<td>{html.escape(numbers.get(name, '–'))}</td>" for name in known)
        table.append(
            f'<tr><td><i style="background:var(--c{number % len(PALETTE)})"></i>{html.escape(name)}</td>{cells}</tr>'
        )
    legend = [
        f'<span><i style="background:var(--c{n % len(PALETTE)})"></i>{html.escape(group.name)}</span>'
        for n, group in enumerate(groups)
    ]
    return Template((files("hilt.observe") / "page.html").read_text()).substitute(
        title=html.escape(_title(groups)),
        subtitle=html.escape(_subtitle(groups)),
        counted=_counted(groups),
        legend="".join(legend) if len(groups) > 1 else "",
        light=" ".join(f"--c{n}: #{code};" for n, code in enumerate(PALETTE)),
        dark=" ".join(f"--c{n}: #{code};" for n, code in enumerate(DARK)),
        steps="".join(Svg().chart(chart) for chart in charts["step"]),
        minutes="".join(Svg().chart(chart) for chart in charts["minutes"]),
        table="".join(table),
        frame=[LEFT, RIGHT, TOP, BOTTOM, WIDTH, HEIGHT],
    )


def picture(groups: Sequence[RunGroup], charts: Sequence[Chart]) -> bytes:
    """The same as a PNG."""
    head = HEAD + 20 * (len(groups) > 1)
    rows = -(-len(charts) // COLUMNS)
    columns = -(-len(charts) // rows)  # as many in each row as leave the least of the last one empty
    on = Pixels(columns, rows, head)
    on.text(LEFT - 44, 34, _title(groups), 22, bold=True)
    on.text(LEFT - 44, 56, _subtitle(groups), 13, color="faint")
    right = LEFT - 44
    for number, group in enumerate(groups) if len(groups) > 1 else ():
        on.line(np.array([[right, 76.0], [right + 22, 76.0]]), number, 3)
        right += 30 + on.text(right + 30, 80, group.name, 13) + 24
    for number, chart in enumerate(charts):
        on.corner = (number % columns * WIDTH, head + number // columns * HEIGHT)
        draw(chart, on)
    return on.png()


def _title(groups: Sequence[RunGroup]) -> str:
    runs = [run for group in groups for run in group.runs]
    tasks = dict.fromkeys(
        str(task) for run in runs for task in run.config.get("tasks", [run.config.get("task")]) if task
    )
    named = ", ".join(tasks) if len(tasks) <= MAX_KINDS else f"{len(tasks)} tasks"
    return f"{named or 'Learning'}: {runs[0].path.resolve().name if len(runs) == 1 else f'{len(runs)} runs'}"


def _subtitle(groups: Sequence[RunGroup]) -> str:
    runs = [run for group in groups for run in group.runs]
    steps, updates = (max(record[name] for run in runs for record in run.records) for name in ("step", "update"))
    most = "" if len(runs) == 1 else "at most "
    text = (
        f"{most}{steps:,} {_counted(groups)}, {updates:,} updates, "
        f"{max(run.records[-1]['minutes'] for run in runs):.1f} minutes"
    )
    several = any(len(group.runs) > 1 for group in groups)
    return (
        text
        + ". A curve is the mean of runs that differ by their seed, its band reaches from the lowest to the highest"
        * several
    )


def _counted(groups: Sequence[RunGroup]) -> str:
    return " or ".join(sorted({run.counted for group in groups for run in group.runs}))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _rolling(values: Array, window: int) -> Array:
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - window, 0)
    result: Array = (sums[ends] - sums[begins]) / (ends - begins)
    return result


def _mean(values: Sequence[Any]) -> float | None:
    return float(np.mean(values)) if values else None


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f}%"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
