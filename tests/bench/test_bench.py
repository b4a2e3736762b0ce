"""The benchmarks run and say what they must; nothing here depends on how fast the machine is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from bench import formats, learn, learn_methods, learn_switch, robot, wire
from bench.__main__ import load_groups, main
from bench.lab import Group, Lab
from bench.peers import Peer, installed
from bench.report import KEYS, Report, Row, at_least, at_most
from bench.sides import Side
from bench.timing import in_turns

from tests.forked import ROOT, TIMEOUT_S, ForkServer


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> list[dict[str, Any]]:
    """The rows of ``python -m bench replay --quick``, in a process of its own."""
    beside, folder = tmp_path_factory.mktemp("script"), tmp_path_factory.mktemp("bench")
    words = ["replay", "--quick", "--json", str(folder / "rows.json"), "--dir", str(folder)]
    (beside / "bench_replay.py").write_text(f"from bench.__main__ import main\nraise SystemExit(main({words}))\n")
    done = fork_server.run(beside / "bench_replay.py", TIMEOUT_S, ROOT)
    assert done.returncode == 0, done.stderr
    assert "commit:" in done.stdout and "machine: cpu" in done.stdout and "limits of the machine" in done.stdout
    assert list(folder.iterdir()) == [folder / "rows.json"], "the data is removed at the end"
    rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())
    return rows


def test_every_row_is_there_and_whole(quick: list[dict[str, Any]]):
    assert [row["name"] for row in quick] == [name for group in load_groups("replay").values() for name in group.rows]
    for row in quick:
        assert set(KEYS) <= set(row), row["name"]
        assert row["unit"] and row["what"] and row["commit"] and row["machine"]["cores"], row["name"]
        if row["what"] != "not measured":  # without torch
            assert row["ours"] >= 0, row["name"]


def test_a_run_that_fails_keeps_the_rows_that_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def rows(lab: Lab) -> Iterator[Row]:
        yield Row("first", 2.5, "s", "a step")
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr("bench.__main__.load_groups", lambda suite: {"steps": Group(["first", "second"], rows)})
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        main(["vla", "--json", str(tmp_path / "rows.json"), "--dir", str(tmp_path)])
    (kept,) = json.loads((tmp_path / "rows.json").read_text())
    assert (kept["name"], kept["ours"]) == ("first", 2.5)
    shown = capsys.readouterr()
    assert "first: 2.5 s" in shown.err and "first" in shown.out


def test_ratios_are_those_of_the_figures(quick: list[dict[str, Any]]):
    for row in quick:
        for ratio, other in (("ratio_to_peer", "peer_value"), ("ratio_to_limit", "limit")):
            if row[other]:
                assert row[ratio] == pytest.approx(row["ours"] / row[other]), row["name"]
            else:
                assert row[ratio] is None, row["name"]
        if row["peer"]:
            assert row["peer_value"] == row["peers"][row["peer"]]
        if row["low"] is not None:
            assert row["low"] <= row["ours"] <= row["high"], row["name"]


def test_bench_quick_row_meets_no_target(quick: list[dict[str, Any]]):
    for row in quick:
        assert row["met"] is (False if row["target"] else None), row["name"]
        if row["target"]:
            assert "ran at another size" in row["note"], row["name"]


def test_limits_stand_beside_the_rows_that_name_them(quick: list[dict[str, Any]]):
    limited = {row["name"] for row in quick if row["limit"]}
    assert limited == {"w1_sample_warm", "w1_sample_cold", "w1_insert_power_safe"}
    assert set(quick[0]["limits"]) == {
        "memcpy",
        "gather of 49,152-byte rows",
        "cold pread gather",
        "disk write + fsync",
    }


def test_met_needs_every_target_every_peer_and_the_full_size():
    good = {"name": "x", "ours": 30.0, "unit": "batches/s", "what": "", "peers": {"a": 10.0, "b": 20.0}, "limit": 40.0}
    targets = [at_least(1.5, "peer"), at_least(0.75, "limit")]
    assert Row(**good, targets=targets).met is True
    assert Row(**good, targets=targets).peer == "b"
    assert Row(**good, targets=[at_least(1.6, "peer")]).met is False
    assert Row(**good, targets=[at_least(31)]).met is False
    assert Row(**good).met is None
    absent = Row(**good, targets=targets, absent={"c": "no module named c"})
    assert absent.met is False and "c was not measured: no module named c" in absent.notes
    small = Row(**good, targets=targets, size="2 instead of 20")
    assert small.met is False and small.notes == "ran at another size: 2 instead of 20"
    either = Row(**good, targets=[at_least(2, "peer"), at_least(0.75, "limit")], enough="any")
    assert either.met is True and either.target == ">= 2x peer or >= 0.75x limit"
    assert Row(**good, targets=[at_least(2, "peer"), at_least(0.8, "limit")], enough="any").met is False
    assert Row("x", None, "s", "", [at_most(1)]).met is False
    assert Row("x", 1.0, "s", "", [at_most(1)], peers={"slow": 9.0, "fast": 3.0}).peer == "fast"


def test_the_page_is_renewed_between_its_marks(tmp_path: Path):
    report = Report(
        "python -m bench replay", [Row("x", 1234.5, "rows/s", "what it is", [at_least(1000)])], {"memcpy": "5 GB/s"}
    )
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- replay: begin -->\nold\n<!-- replay: end -->\nafter\n")
    report.write_markdown(page, "replay")
    report.write_markdown(page, "replay")
    text = page.read_text()
    assert text.startswith("before\n<!-- replay: begin -->\n- command:") and text.endswith(
        "<!-- replay: end -->\nafter\n"
    )
    assert "old" not in text and text.count("| x | 1,234 |") == 1 and "| >= 1,000 rows/s | yes |" in text


def test_a_peer_that_is_not_installed_is_named_with_the_cure():
    class Nowhere(Peer):
        name, package = "nowhere", "no_such_package_as_this"

    found, absent = installed((Nowhere,))
    assert found == [] and "no_such_package_as_this" in absent["nowhere"] and "pip install" in absent["nowhere"]


def test_an_unknown_row_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["replay", "--only", "w9"])
    assert "no row or group is called 'w9'; choose from add_cost_growth" in capsys.readouterr().err


def test_contenders_take_turns():
    calls: list[str] = []
    rates = in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2, seconds=0.001)
    turns = [name for i, name in enumerate(calls) if i == 0 or calls[i - 1] != name]
    assert turns == ["a", "b"] * 3, "one round that is not counted, and two that are"
    assert len(rates["a"].rounds) == 2 and rates["a"].spread[0] <= rates["a"].median <= rates["a"].spread[1]


def test_bench_size_is_noted_only_when_it_differs(tmp_path: Path):
    lab = Lab(tmp_path, quick=True)
    assert (
        lab.size(20_000, 20_000, "transitions") == ""
        and lab.size(2_000, 20_000, "transitions") == "2,000 transitions instead of 20,000"
    )


def test_the_wire_suite_lists_its_rows(capsys: pytest.CaptureFixture[str]):
    assert main(["wire", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "stream: w1_stream, w1_stream_disk_spool, w1_stream_keys",
        "latency: w1_latency_process_p50, w1_latency_process_p99, w1_latency_power_p50, w1_latency_power_p99",
        "weights: weights_50mb, weights_50mb_4",
        "strangers: strangers_cpu, strangers_memory",
        "actors: actors_8_lag_p99, actors_8_memory",
    ]


def test_the_wire_suite_runs(tmp_path: Path):
    assert (
        main(["wire", "--quick", "--only", "latency", "--json", str(tmp_path / "rows.json"), "--dir", str(tmp_path)])
        == 0
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.json"], "the data is removed at the end"
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["name"] for row in rows] == list(load_groups("wire")["latency"].rows)
    for row in rows:
        assert set(KEYS) <= set(row) and row["low"] <= row["ours"] <= row["high"] and row["limit"] > 0, row["name"]
        assert row["met"] is (False if row["target"] else None) and "100 transitions instead of 1,800" in row["note"], (
            row["name"]
        )


@pytest.mark.parametrize(
    ("python", "why"), [("nowhere", "there is no .venv-reverb"), (sys.executable, "No module named 'reverb'")]
)
def test_bench_row_without_reverb_names_the_install(python: str, why: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "REVERB", Path(python))
    with ExitStack() as stack:
        found, absent = wire.reverb_or_why_not(stack, 100)
    assert not found and why in absent["Reverb"] and "make bench ARGS=wire installs it" in absent["Reverb"]


def test_bench_side_replies_and_reports_errors():
    with Side("bench.wire_sides", "socket") as one, Side("bench.wire_sides", "socket") as other:
        one.ask("connect", kind="PUSH", ports=[other.ask("bind", kind="PULL")])
        other.tell("receive", nbytes=1000, count=3)
        start = one.ask("send", nbytes=1000, count=3)
        assert other.answer() > start
        with pytest.raises(RuntimeError, match="has no attribute 'sing'"):
            one.ask("sing")
        other.tell("receive", nbytes=1000, count=1)
        with pytest.raises(RuntimeError, match=r"gave no answer within 0\.1 s"):
            other.answer(timeout=0.1)
        one.ask("send", nbytes=999, count=1)
        with pytest.raises(RuntimeError, match="999 bytes came, 1000 were sent"):
            other.answer()
    with Side("bench.wire_sides", "nobody") as gone, pytest.raises(RuntimeError, match="KeyError: 'nobody'"):
        gone.answer()


def test_the_formats_suite_lists_its_rows(capsys: pytest.CaptureFixture[str]):
    assert main(["formats", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "read: rlds_read_jpeg, rlds_read_png",
        "to_log: rlds_to_log",
        "memory: rlds_memory, rlds_memory_growth",
    ]


def test_formats_without_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Our sides of every row, and what is said when there is no .venv-reverb."""
    monkeypatch.setattr(formats, "TFDS", tmp_path / "nowhere")
    monkeypatch.setattr(Lab, "pick", lambda self, full, quick: 50 if quick >= 200 else 1)
    monkeypatch.setattr(formats, "POOL", 5)
    rows = {row.name: row for group in formats.GROUPS.values() for row in group.run(Lab(tmp_path, quick=True))}
    assert list(tmp_path.iterdir()) == []
    for row in rows.values():
        assert row.ours is not None and row.ours >= 0 and row.met is False, row.name
        assert "was not measured: there is no .venv-reverb; make bench ARGS=formats" in row.notes
    assert (
        rows["rlds_read_jpeg"].limit
        and rows["rlds_read_png"].limit
        and rows["rlds_memory"].limit == 50 * 128 * 128 * 3 / 1e6
    )


def test_the_robot_suite_lists_its_rows(capsys: pytest.CaptureFixture[str]):
    assert main(["robot", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "tabletop: tabletop_steps, tabletop_physics, tabletop_render",
        "server: server_period_idle_p50, server_period_idle_p99, server_period_p50, "
        "server_period_p99, server_requests, server_getstate_p50",
        "page: page_frame_age_p50, page_frame_age_p95, page_key_latency_p50, page_key_latency_p95",
    ]


def test_the_robot_suite_without_its_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Our sides of every row, and what is said when gym-hil and a browser are not there."""
    monkeypatch.setattr(robot, "GYM_HIL", str(tmp_path / "nowhere"))
    monkeypatch.setattr("tests.teleop.chromium.absent", lambda: "there is no browser")
    monkeypatch.setattr(Lab, "pick", lambda self, full, quick: 1 if quick <= 2 else 10)
    monkeypatch.setattr(Lab, "seconds", 0.05)
    rows = {row.name: row for group in robot.GROUPS.values() for row in group.run(Lab(tmp_path, quick=True))}
    assert list(rows) == [name for group in robot.GROUPS.values() for name in group.rows]
    for row in rows.values():
        assert row.met is (False if row.targets else None) and "ran at another size" in row.notes, row.name
        if row.name.startswith("page_"):
            assert row.ours is None and "Chromium was not measured: there is no browser" in row.notes
        else:
            assert row.ours is not None and row.ours > 0 and (row.limit or row.peers), row.name
    notes = rows["tabletop_steps"].notes
    assert "gym-hil was not measured" in notes and "make bench ARGS=robot installs it" in notes
    assert rows["server_period_p99"].ours > rows["server_period_p99"].limit / 2, "it is in the unit of its limit"


def test_the_learn_suite_lists_its_rows(capsys: pytest.CaptureFixture[str]):
    assert main(["learn", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "pick: pick_success, pick_margin, pick_steps, pick_bc, pick_sb3, pick_equal_updates, "
        "pick_operator_steps, pick_hg_dagger, pick_without_operator, pick_delayed_operator, pick_tired_operator, "
        "pick_without_demonstrations, pick_operator_alone",
        "learner: learner_in_torch, learner_in_torch_frozen, learner_updates, learner_updates_bfloat16",
        "control: control_lateness_p99",
        "tasks: task_button, task_pick, task_pick_red, task_drawer, task_push, task_insert, task_peg",
        f"methods: {', '.join(learn_methods.ROWS)}",
        f"switch: {', '.join(learn_switch.ROWS)}",
        "state_updates: state_updates",
        "state: state_button, state_window, state_drawer, state_door, state_pick, state_pick_50",
        "images: images_button, images_window, images_drawer, images_door, images_pick, images_pick_50",
    ]
    with pytest.raises(SystemExit):
        main(["replay", "--seeds", "2"])
    assert "--seeds, --minutes and --cores are for the suite learn" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["learn", "--cores", "0"])
    assert "--cores 0, but there are" in capsys.readouterr().err


def trials(*successes: int, states: int = 100) -> list[learn.Trial]:
    """One for each seed: so many successes, of 12 steps each."""
    return [learn.Trial([12] * n + [0] * (states - n)) for n in successes]


def pick_rows(
    tmp_path: Path, ours: list[learn.Trial], absent: dict[str, str] | None = None, seeds: int = 5
) -> dict[str, Row]:
    tried = {"0.0003": trials(0, 50, 97, 0, 0), "0.001": trials(20, 10, 0, 0, 0)}
    sb3 = {} if absent else {f"SB3 2 SAC, learning rate {rate}": found for rate, found in tried.items()}
    others = {"bc": trials(30, 40, 69, 40, 40), "bare": trials(0, 0, 0, 0, 0), "operator": trials(100, 99, 98, 99, 99)}
    others |= {name: trials(66, 66, 66, 66, 66) for name in learn.OTHERS} | (
        {} if absent else {learn.EQUAL: trials(50, 50, 80, 60, 60)}
    )
    made = {
        name: [learn.Made(1000, 900, 10 * seed) for seed in range(5)]
        for name in ("ours", *learn.OTHERS, *sb3, learn.EQUAL)
    }
    lab = Lab(tmp_path, quick=False, seeds=seeds)
    rows = learn.pick_rows(lab, {"ours": ours, **others, **sb3}, absent or {}, "facts", 47.0, made)
    assert [row.name for row in rows] == list(learn.GROUPS["pick"].rows)
    return {row.name: row for row in rows}


def test_learning_is_judged_seed_by_seed(tmp_path: Path):
    rows = pick_rows(tmp_path, trials(100, 95, 98, 100, 100))
    assert rows["pick_success"].met and "100% (96-100), 95% (89-98), 98% (93-99)" in rows["pick_success"].notes
    assert rows["pick_margin"].ours == 1 and rows["pick_margin"].met, (
        "97 was the better one of the two in the last seed"
    )
    assert rows["pick_bc"].met and rows["pick_bc"].spread == (30, 69)
    assert rows["pick_steps"].ours == 12 and rows["pick_steps"].met, "fewer than the demonstrations' 47"
    assert rows["pick_sb3"].ours is None and rows["pick_sb3"].peer == "SB3 2 SAC, learning rate 0.0003"
    assert rows["pick_operator_alone"].ours == 99 and rows["pick_without_demonstrations"].ours == 0
    assert (
        rows["pick_hg_dagger"].ours == 66
        and "1,000 steps, 900 updates, 20 steps by the operator" in rows["pick_hg_dagger"].notes
    )
    assert (
        rows["pick_operator_steps"].ours == 20
        and "tired_operator: 0, 10, 20, 30, 40" in rows["pick_operator_steps"].notes
    )
    equal = rows["pick_equal_updates"]
    assert equal.ours == 60 and equal.peers == {"SB3 2 SAC, learning rate 0.0003": pytest.approx(29.4)}
    assert "1,000 steps, 900 updates" in equal.notes
    assert "1,000 steps, 900 updates" in rows["pick_sb3"].notes
    assert not pick_rows(tmp_path, trials(100, 95, 96, 100, 100))["pick_margin"].met
    never = pick_rows(tmp_path, trials(0, 100, 100, 100, 100))["pick_steps"]
    assert never.ours is None and not never.met, "a seed without success is not quick"


def test_learning_at_another_size_or_without_its_peer_meets_nothing(tmp_path: Path):
    for rows in (pick_rows(tmp_path, trials(100, 100), seeds=2), pick_rows(tmp_path, trials(2, 2, 2, 2, 2, states=2))):
        assert all(
            row.met is (False if row.targets else None) and "ran at another size" in row.notes for row in rows.values()
        )
    rows = pick_rows(
        tmp_path, trials(100, 100, 100, 100, 100), absent={"Stable-Baselines3": "No module named 'stable_baselines3'"}
    )
    assert (
        rows["pick_margin"].ours is None
        and not rows["pick_margin"].met
        and "was not measured: No module" in rows["pick_sb3"].notes
    )


def test_a_loop_that_only_sleeps():
    with Side("bench.learn_sides", "sleep") as side:
        late = side.ask("watch", hz=100, seconds=0.2)
    assert len(late) == 20 and min(late) >= 0
