"""Curves show what the metrics say: means over the last episodes, the time that was spent, runs beside each other."""

from __future__ import annotations

import io
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilt.core.checksums import write_json
from hilt.core.errors import ConfigError, EmptyError
from hilt.observe import Metrics
from hilt.observe.drawing import DASHES, WIDTH, Chart, Line, Svg, axes, dash_of, short, ticks
from hilt.observe.metrics import GOES_ON
from hilt.observe.plots import PANELS, PlottedRun, all_charts, final_numbers, grouped, page, plot, pooled
from hilt.observe.statistics import wilson
from tests.observe.toy_run import make_run
from tests.teleop import chromium


def write_run(
    folder: Path, episodes: list[tuple[bool, int, int]], updates: list[tuple[int, float]] = (), config: str = ""
) -> Path:
    """Episodes are (success, length, steps of a person); updates (number, critic's
    loss), at ten times as many steps."""
    with Metrics(folder) as metrics:
        for update, loss in updates:
            metrics.write("update", {"critic_loss": loss, "log_steps": 10 * update}, update=update, step=10 * update)
        step = 0
        for success, length, human in episodes:
            step += length
            metrics.write(
                "episode",
                {"success": success, "length": length, "return": 1.0, "intervention_steps": human},
                update=0,
                step=step,
            )
    if config:
        (folder / "config.yaml").write_text(config)
    return folder


def lines_of(charts: list[Chart], title: str) -> dict[str, Line]:
    (chart,) = [one for one in charts if one.title.startswith(title)]
    return {line.name: line for line in chart.lines}


def charts_in(page: str, axis: str) -> list[dict[str, Any]]:
    """What the page itself knows of its charts over one axis."""
    return [
        found for text in re.findall(r'data-chart="(.*?)"', page) if (found := json.loads(unescape(text)))["x"] == axis
    ]


def test_a_point_is_the_mean_of_the_last_episodes(tmp_path: Path):
    run = write_run(tmp_path / "run", [(True, 10, 5), (False, 20, 0), (True, 10, 0), (True, 30, 0), (False, 10, 10)])
    charts = all_charts(grouped([PlottedRun.load(run)]), "step", 3)
    success = lines_of(charts, "Success of the last 3 episodes")
    assert success["all"].x.tolist() == [10, 30, 40, 70, 80]
    assert success["all"].y.tolist() == pytest.approx([1, 1 / 2, 2 / 3, 2 / 3, 2 / 3])
    assert success["without take-over"].x.tolist() == [30, 40, 70] and success[
        "without take-over"
    ].y.tolist() == pytest.approx([0, 1 / 2, 2 / 3])
    person = lines_of(charts, "Intervention rate")[""]
    assert person.y.tolist() == pytest.approx([5 / 10, 5 / 30, 5 / 40, 0, 10 / 50]), (
        "a share of steps, not a mean of shares"
    )
    assert lines_of(charts, "Episode length")["successes"].y.tolist() == pytest.approx([10, 10, 50 / 3])
    raw = lines_of(all_charts(grouped([PlottedRun.load(run)]), "step", 1), "Success of the last 1 episodes")["all"]
    assert raw.y.tolist() == [1, 0, 1, 1, 0]
    assert not [chart.title for chart in charts if "Loss" in chart.title], "what there is nothing of is not drawn"


GUARDED: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "Dead ReLUs": ({"dead_relus": 0.2}, {"": 0.2}),
    "Effective rank of the features": ({"effective_rank": 40.0}, {"": 40.0}),
    "KL of the policy": (
        {"policy_kl": 0.3, "ppo_kl": 0.1},
        {"between two looks": 0.3, "from the one that collected": 0.1},
    ),
    "Expected and realized value": ({"q/online": 0.5, "realized_q": 0.4}, {"expected": 0.5, "realized": 0.4}),
    "Age of the weights that act": ({"weights_age": 3.0}, {"": 3.0}),
    "Value model": (
        {"value_expected": 0.6, "value_realized": 0.5, "value_hopeless": 0.1},
        {"expected": 0.6, "realized": 0.5, "ended as hopeless": 0.1},
    ),
    "Conservative term": ({"conservative_loss": 2.0}, {"": 2.0}),
    "Bounded by realized returns": ({"bounded_share": 0.7}, {"": 0.7}),
    "Beside the frozen policy": ({"pull_loss": 0.2, "correction": 0.05}, {"pull": 0.2, "correction": 0.05}),
    "Good steps": ({"share/good": 0.6}, {"": 0.6}),
    "Loss by condition": (
        {"imitation/conditioned_loss": 0.3, "imitation/loss_of_wrong_condition": 0.5},
        {"right": 0.3, "exchanged": 0.5},
    ),
}
"""Panels of what alarms look at: figures of a run, and the curves that they make"""


@pytest.mark.parametrize("title", GUARDED)
def test_figures_that_alarms_look_at_are_drawn(title: str, tmp_path: Path):
    figures, expected = GUARDED[title]
    with Metrics(tmp_path) as metrics:
        for update in (10, 20):
            metrics.write("update", figures, update=update, step=update)
    found = lines_of(all_charts(grouped([PlottedRun.load(tmp_path)]), "step", 2), title)
    assert {name: line.y.tolist() for name, line in found.items()} == {
        name: pytest.approx([value] * 2) for name, value in expected.items()
    }


def test_what_a_critic_expects_is_drawn_beside_what_came_and_not_without(tmp_path: Path):
    with Metrics(tmp_path) as metrics:
        metrics.write("update", {"q/online": 0.5, "value": 0.7}, update=1, step=1)
        metrics.write("update", {"value": 0.7, "realized_return": 0.6}, update=2, step=2)
        metrics.write("update", {"validation_loss": 0.4}, update=3, step=3)
    charts = all_charts(grouped([PlottedRun.load(tmp_path)]), "step", 1)
    value = lines_of(charts, "Expected and realized value")
    assert (value["expected"].y.tolist(), value["realized"].y.tolist()) == ([0.7], [0.6])
    assert "Loss by condition" not in [chart.title for chart in charts]


def test_two_runs_with_every_curve_of_a_panel(tmp_path: Path):
    """The panel with most curves has seven; there were four dash patterns, and
    drawing two runs ended in an IndexError."""
    names = ["torch", "sample_wait", "wait", "simulator", "model", "update", "other"]
    for number in range(2):
        with Metrics(tmp_path / f"run-{number}") as metrics:
            for update in (10, 20):
                metrics.write("update", {f"{name}_share": 0.1 for name in names}, update=update, step=update)
        (tmp_path / f"run-{number}" / "config.yaml").write_text(f"batch_size: {number + 1}\n")
    runs = [tmp_path / f"run-{number}" for number in range(2)]
    (chart,) = all_charts(grouped([PlottedRun.load(run) for run in runs]), "step", 1)
    assert len(chart.lines) == 14 and len({dash_of(line) for line in chart.lines}) == 7, (
        "each name has a dash pattern of its own"
    )
    assert all(
        len({dash_of(line) for line in chart.lines if line.name == name}) == 1
        for name in {line.name for line in chart.lines}
    )
    assert max(len(panel.curves) for panel in PANELS) <= len(DASHES)
    assert len(plot(runs, tmp_path / "plots")) == 3
    names = {line.name for line in chart.lines}
    drawn = [
        (float(x), text)
        for x, text in re.findall(r'<text x="([\d.]+)"[^>]*>([^<]*)</text>', Svg().chart(chart))
        if text in names
    ]
    assert {text for _, text in drawn} == names and all(x + 5 * len(text) < WIDTH for x, text in drawn), (
        "all names are in the picture"
    )


def test_dash_patterns_are_for_curves_that_are_there(tmp_path: Path):
    for number in range(2):
        with Metrics(tmp_path / f"run-{number}") as metrics:
            for update in (10, 20):
                metrics.write(
                    "update",
                    {f"{name}_share": 0.2 for name in ("simulator", "model", "update")},
                    update=update,
                    step=update,
                )
        (tmp_path / f"run-{number}" / "config.yaml").write_text(f"batch_size: {number + 1}\n")
    (chart,) = all_charts(grouped([PlottedRun.load(tmp_path / f"run-{number}") for number in range(2)]), "step", 1)
    assert {line.name: line.dash for line in chart.lines} == {"simulator": 0, "policy": 1, "learning": 2}


def test_minutes_leave_out_the_time_in_which_it_did_not_run(tmp_path: Path):
    records = [(0, 10, {}), (60, 20, {}), (3660, 20, {"kind": "event", "event": GOES_ON}), (3720, 30, {})]
    lines = [
        {"kind": "update", "time": 1e9 + at, "update": update, "step": update, "critic_loss": 1.0, **more}
        for at, update, more in records
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (line,) = lines_of(all_charts(grouped([PlottedRun.load(tmp_path)]), "minutes", 1), "Critic loss").values()
    assert line.x.tolist() == [0.0, 1.0, 2.0]


def test_runs_that_differ_by_their_seed_are_one_curve(tmp_path: Path):
    config = "seed: {}\nbatch_size: {}\nwire: {{port: {}}}\n"
    runs = [
        write_run(tmp_path / name, [], [(10, loss), (20, loss)], config.format(seed, batch, 5000 + seed))
        for name, seed, batch, loss in (("a", 1, 64, 1.0), ("b", 2, 64, 3.0), ("c", 1, 128, 5.0))
    ]
    groups = grouped([PlottedRun.load(run) for run in runs])
    assert [group.name for group in groups] == ["batch_size=64 (2 runs, seeds 1, 2)", "batch_size=128"]
    (chart,) = [one for one in all_charts(groups, "step", 1) if one.title == "Critic loss"]
    both, alone = chart.lines
    assert (
        set(both.y) == {2.0}
        and set(both.low) == {1.0}
        and set(both.high) == {3.0}
        and (both.x[0], both.x[-1]) == (100, 200)
    )
    assert set(alone.y) == {5.0} and alone.low is None and both.color != alone.color
    (one,) = grouped([PlottedRun.load(runs[0]), PlottedRun.load(runs[1])])
    assert one.name == "a (2 runs, seeds 1, 2)"
    others = grouped([PlottedRun.load(write_run(tmp_path / name, [(True, 1, 0)])) for name in ("x", "y")])
    assert [group.name for group in others] == ["x", "y"], "without settings nobody knows what they have in common"
    many = "tau: {0}\nactors: {0}\nn_step: {0}\nbatch_size: {0}\n"
    others = grouped(
        [PlottedRun.load(write_run(tmp_path / name, [(True, 1, 0)], [], many.format(name))) for name in "123"]
    )
    assert [group.name for group in others] == ["1", "2", "3"], (
        "where too many settings differ, their folders tell them apart"
    )


def test_three_files_that_need_nothing_else(tmp_path: Path):
    image = pytest.importorskip("PIL.Image")
    run = make_run(tmp_path / "<run> & more", episodes=40)
    page, steps, minutes = plot([run], tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "curves-minutes.png",
        "curves-steps.png",
        "curves.html",
    ]
    text = page.read_text()
    assert "http" not in text and "<link" not in text and "src=" not in text and "$" not in text
    assert "tabletop/pick: &lt;run&gt; &amp; more" in text and "<run>" not in text
    assert len(charts_in(text, "online steps")) == len(charts_in(text, "minutes")) == 17
    evaluation = charts_in(text, "minutes")[0]["lines"][2]
    assert (
        evaluation["name"] == "on test states"
        and evaluation["y"] == [0.55, 0.97]
        and evaluation["x"][1] == pytest.approx(10, abs=0.1)
    )
    pixels = [np.asarray(image.open(io.BytesIO(path.read_bytes())).convert("RGB")) for path in (steps, minutes)]
    assert pixels[0].shape == pixels[1].shape and (pixels[0] != pixels[1]).any()
    assert (np.abs(pixels[0].astype(int) - (0x2F, 0x6F, 0xDE)).max(-1) < 10).sum() > 3000, "the curves are there"


def test_the_table_has_how_a_run_ended(tmp_path: Path):
    run = write_run(tmp_path / "run", [(False, 40, 0), (True, 10, 5), (True, 30, 0)], [(10, 1.0), (20, 1.0)])
    numbers = final_numbers(PlottedRun.load(run), 2)
    wanted = {
        "last 2 episodes": "100%",
        "without take-over": "50%",
        "a person's steps": "12%",
        "steps per success": "20",
        "return": "1",
    }
    assert {**numbers, **wanted} == numbers
    assert (numbers["online steps"], numbers["updates"], numbers["evaluation"]) == ("200", "20", "–")
    assert (
        final_numbers(PlottedRun.load(make_run(tmp_path / "toy", episodes=20)), 20)["evaluation"]
        == "97% [87, 99] of 100 test"
    )


def test_plots_of_fine_tuning_show_held_out_losses_unsmoothed(tmp_path: Path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("tasks: [tabletop/pick, tabletop/drawer]\n")
    with Metrics(tmp_path / "run") as metrics:
        for update, loss in ((10, 3.0), (20, 2.0), (30, 1.0)):
            rates = {"learning_rate": 1e-3, "gradient_norm": 1.0, "samples_per_second": 5.0}
            metrics.write("update", {"loss": loss, **rates}, update=update, step=16 * update)
            metrics.write("update", {"validation_loss": loss}, update=update, step=16 * update)
    for task in ("pick", "drawer"):
        card = {
            "task": f"tabletop/{task}",
            "split": "test",
            "update": 20,
            "episodes": 4,
            "success": 0.5,
            "low": 0.1,
            "high": 0.9,
        }
        (tmp_path / "run/evaluations" / task).mkdir(parents=True)
        write_json(tmp_path / "run/evaluations" / task / "evaluation.json", card)
    charts = all_charts(grouped([PlottedRun.load(tmp_path / "run")]), "step", 20)
    losses = lines_of(charts, "Loss (in training: mean of 20 records)")
    assert losses["held out"].y.tolist() == [3, 2, 1] and losses["training"].y.tolist() == [3, 2.5, 2]
    assert {chart.x_label for chart in charts} == {"samples"}
    assert set(lines_of(charts, "Success in evaluations")) == {"pick, test", "drawer, test"}
    page, steps, _ = plot([tmp_path / "run"], tmp_path / "out")
    text = page.read_text()
    assert (
        "tabletop/pick, tabletop/drawer: run" in text
        and "480 samples, 30 updates" in text
        and "online steps" not in text
    )
    assert "tabletop/drawer: 50% [10, 90] of 4 test; tabletop/pick: 50%" in text and "without take-over" not in text
    assert image.open(steps).size[0] == 2160, "five charts in two rows"


def test_dots_of_many_tasks_are_pooled(tmp_path: Path):
    tasks = f"tasks: {[f'libero_10/{task}' for task in range(10)]}\n"
    run = write_run(tmp_path / "run", [(True, 10, 0)], [(0, 1.0), (10, 1.0)], tasks)

    def evaluated(name: str, task: int, update: int, success: float, split: str = "eval") -> None:
        card = {
            "task": f"libero_10/{task}",
            "split": split,
            "update": update,
            "episodes": 4,
            "success": success,
            "low": 0,
            "high": 1,
        }
        (run / "evaluations" / name).mkdir(parents=True)
        write_json(run / "evaluations" / name / "evaluation.json", {**card, "sample": False})

    for task in range(3):
        evaluated(f"a-{task}", task, 0, 0.0)
    assert set(lines_of(all_charts(grouped([PlottedRun.load(run)]), "step", 1), "Success")) >= {
        f"{task}, eval" for task in range(3)
    }
    for task in range(10):
        evaluated(f"b-{task}", task, 10, 0.25 * (task < 4))
        evaluated(f"c-{task}", task, 10, 1.0, "test")
    evaluated("b-9-2", 9, 10, 1.0)  # tried once more
    lines = lines_of(all_charts(grouped([PlottedRun.load(run)]), "step", 1), "Success")
    assert [name for name, line in lines.items() if line.dots] == ["all tasks, test", "all tasks, eval"]
    dots = lines["all tasks, eval"]
    assert (
        dots.x.tolist() == [0, 100] and dots.y.tolist() == [0, 8 / 40] and (dots.low[1], dots.high[1]) == wilson(8, 40)
    )
    assert "<title>10 tasks: run" in page(grouped([PlottedRun.load(run)]), {"step": [], "minutes": []}, 1)


def test_pooled_tasks_that_share_their_scenes_are_clusters():
    """400 episodes in 100 scenes whose four tasks end alike say as much as 100."""
    alike = [{"state": state, "success": state < 80} for state in range(100)]
    common = {
        "split": "eval",
        "update": 7,
        "episodes": 100,
        "success": 0.8,
        "low": 0.71,
        "high": 0.87,
        "outcomes": alike,
    }
    cards = [
        {**common, "task": f"tabletop/press_{name}", "scene": "tabletop/press"}
        for name in ("red", "green", "blue", "gray")
    ]
    (one,) = pooled(cards)
    low, high = wilson(80, 100)
    assert one["success"] == 0.8 and (one["low"], one["high"]) == pytest.approx((low, high), abs=2e-3)
    (apart,) = pooled([{**card, "scene": card["task"]} for card in cards])
    assert (apart["low"], apart["high"]) == wilson(320, 400), "tasks with scenes of their own are independent"


@pytest.mark.skipif(bool(chromium.absent()), reason=chromium.absent())
def test_the_page_in_a_browser(tmp_path: Path, chromium_tab: Any):
    """The two axes take turns, and pointing at a curve tells its value."""
    pytest.importorskip("selenium")
    pytest.importorskip("PIL")
    from selenium.webdriver import ActionChains

    run = write_run(tmp_path / "run", [], [(0, 2.5), (100, 2.5)])
    page = plot([run], tmp_path / "out")[0]
    chromium_tab.get(page.as_uri())
    steps, minutes = chromium_tab.find_element("id", "steps"), chromium_tab.find_element("id", "minutes")
    assert steps.is_displayed() and not minutes.is_displayed()
    ActionChains(chromium_tab).move_to_element(steps.find_element("css selector", "svg")).perform()
    tip = chromium_tab.find_element("id", "tip").text.splitlines()
    assert len(tip) == 1 and tip[0].endswith(" online steps"), "far from both points"
    svg = steps.find_element("css selector", "svg")
    ActionChains(chromium_tab).move_to_element_with_offset(svg, int(svg.size["width"] * 0.445), 0).perform()
    assert chromium_tab.find_element("id", "tip").text.splitlines()[1] == "2.5"
    chromium_tab.find_element("css selector", "[data-axis=minutes]").click()
    assert minutes.is_displayed() and not steps.is_displayed()


def test_plots_refuse_runs_without_metrics(tmp_path: Path):
    with pytest.raises(
        ConfigError, match=r"is not a run: there is no metrics.jsonl in it. Give the folder that `hilt train` made"
    ):
        plot([tmp_path], tmp_path)
    Metrics(tmp_path / "new").close()
    with pytest.raises(EmptyError, match="has no metrics to draw yet: no episode has ended"):
        plot([tmp_path / "new"], tmp_path)
    with pytest.raises(ConfigError, match="smooth=0: expected how many episodes a point is the mean of, at least 1"):
        plot([make_run(tmp_path / "run", episodes=3)], tmp_path, smooth=0)


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e6))
def test_ticks_are_a_few_round_numbers_within(low: float, span: float):
    found = ticks(low, low + span, 5)
    steps = np.diff(found)
    assert 2 <= len(found) <= 7 and found[0] >= low - 1e-6 * span and found[-1] <= low + span * (1 + 1e-6)
    assert steps == pytest.approx(steps[0], rel=1e-3)


def test_axes_and_numbers_that_can_be_read():
    def of(*values: float, percent: bool = False) -> tuple[float, ...]:
        return axes(Chart("", "", "", [Line("", np.arange(len(values)), np.array(values))], percent))

    assert of(0.3, 0.5, percent=True)[2:] == (0.0, 1.0)
    assert of(1.0, 2.0, 5.0)[2] == 0.0 and of(97.0, 98.0)[2] > 90 and of(-3.0, -1.0)[2] < -3
    spiked = of(*[1.0 + n % 2 for n in range(500)], 900.0)
    assert spiked[3] < 10, "one value does not press the others flat"
    assert of(4.0)[:2] == (0.0, 1.0) and of(1.0, 2.0)[:2] == (0.0, 1.0), "one point has axes too"
    low, high = of(4.0, 4.0)[2:]
    assert low < 4 < high
    assert [short(value) for value in (12_000, 2_500_000, 0.004, -3, 0, 0.00002)] == [
        "12k",
        "2.5M",
        "0.004",
        "-3",
        "0",
        "2.0e-05",
    ]


def test_updates_before_online_learning_are_not_drawn_over_online_steps(tmp_path: Path):
    with Metrics(tmp_path) as metrics:
        for number in (1.0, 2.0):
            metrics.write("update", {"critic_loss": 9.0, "prepared_updates": number}, update=0, step=0)
        with pytest.raises(EmptyError, match="no metrics to draw yet"):
            PlottedRun.load(tmp_path)
        for update in (1, 2):
            metrics.write("update", {"critic_loss": 1.0}, update=update, step=5 * update)
    (line,) = lines_of(all_charts(grouped([PlottedRun.load(tmp_path)]), "step", 1), "Critic loss").values()
    assert line.x.tolist() == [5, 10] and line.y.tolist() == [1, 1]
