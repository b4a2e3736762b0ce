"""Everything that can be known is found before anything is made, all of it at once,
and a run that came to nothing leaves nothing."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.checksums import read_json, write_json
from hilt.core.config import build
from hilt.core.errors import ConfigError, HiltError, Problems, SeveralErrors
from hilt.core.tree import ArraySpec
from hilt.formats.episodes import Episode
from hilt.hil import preflight
from hilt.hil.config import Hil, Wire
from hilt.hil.importing import _fitted, other_rates, other_tasks
from hilt.hil.launch import begin_run, check_wire, own_ports
from hilt.hil.preflight import check_begin
from hilt.replay import Log, Schema
from hilt.runs.folder import failure_noted, note_end, undone_if_nothing_is_kept
from hilt.vla.config import Vla
from tests.hil.toy_run import demonstrations, episode, spaces

TOY: dict[str, Any] = {"task": "tests.hil.toy:Toy"}


def test_one_problem_is_itself_and_several_are_listed_once_each():
    problems = Problems()
    problems.report()
    assert not problems.check(build, Hil(), "sed=3", "batch_size=many") and len(problems.errors) == 2
    assert not problems.check(build, Hil(), "sed=3") and len(problems.errors) == 2, "once"
    with pytest.raises(
        SeveralErrors, match=r"^2 things cannot work as they are:\n  - no setting named 'sed'.*\n  - batch_size: "
    ):
        problems.report()
    with pytest.raises(ConfigError, match=r"^no setting named 'sed'"):
        build(Hil(), "sed=3")


def test_every_wrong_setting_of_a_file_is_named(tmp_path: Path):
    wrong = "sed: 3\nagent: {hiden: [1], encoder: {kind: [1]}}\nwire: {port: here, host: there}\ntask_options: {x: 1}\n"
    (tmp_path / "a.yaml").write_text(wrong)
    with pytest.raises(SeveralErrors) as error:
        build(Hil(), tmp_path / "a.yaml")
    assert len(error.value.errors) == 4 and all(
        word in str(error.value) for word in ("'sed'", "hiden", "encoder.kind", "wire.port")
    )


def test_a_run_lists_all_that_cannot_work_and_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else find(name, *more))
    config = Hil(
        **TOY,
        operator="spacemose",
        sinks=["wandb", "tensorbord"],
        demo_path=["nowhere", "none/*.pkl"],
        classifier="nofolder",
    )
    with pytest.raises(SeveralErrors) as error:
        begin_run(tmp_path / "run", "mine", config)
    said = str(error.value)
    for words in (
        "operator=spacemose: no device named 'spacemose'; did you mean 'spacemouse'?",
        "needs the package 'wandb', which is not installed: pip install 'hilt[wandb]'",
        "no sink named 'tensorbord'",
        "demo_path has nowhere, and there is no such file or folder",
        "demo_path has none/*.pkl, and there is no such file",
        "nofolder is no reward classifier",
    ):
        assert words in said, said
    assert len(error.value.errors) == 6 and not (tmp_path / "run").exists()


def test_settings_that_are_wrong_and_those_that_are_idle_are_listed_together():
    with pytest.raises(SeveralErrors) as error:
        check_begin(Hil(batch_size=0, n_step=0, lost_contact="pause", collect_steps=5, actors=0))
    starts = [str(one).partition("=")[0] for one in error.value.errors]
    assert sorted(starts) == ["actors", "batch_size", "collect_steps", "lost_contact", "n_step"], "collect_steps once"


def test_demonstrations_of_another_task_are_refused_before_anything_is_made(tmp_path: Path):
    shown = demonstrations(tmp_path / "shown", range(1))
    with pytest.raises(HiltError, match=r"shown has no observations/.*Give demonstrations of the same task"):
        begin_run(tmp_path / "run", "mine", Hil(**TOY, demo_path=[str(shown)]))
    Log.create(tmp_path / "empty", Log.open(shown, "r").schema).close()
    with pytest.raises(ConfigError, match=r"there is no episode in it\. Record some with: hilt record"):
        begin_run(tmp_path / "run", "mine", Hil(**TOY, demo_path=[str(tmp_path / "empty")]))
    with pytest.raises(ConfigError, match="Pendulum-v1 has no script that could record them"):
        check_begin(Hil(task="Pendulum-v1", demonstrations=2))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["none", "spacemose"])
def test_preflight_unknown_operator_names_the_empty_one(name: str):
    with pytest.raises(
        ConfigError, match=rf"operator={name}: no device named.*Leave it empty \(operator=\) if no one takes over"
    ):
        check_begin(Hil(**TOY, operator=name))


def test_operators_are_refused_for_their_options_and_for_want_of_a_terminal():
    with pytest.raises(ConfigError, match=r"the device browser cannot be made with the options \{'hots': 1\}"):
        check_begin(Hil(**TOY, operator="browser", operator_options={"hots": 1, "mode": "hold"}))
    check_begin(Hil(**TOY, operator="keyboard"))
    with pytest.raises(ConfigError, match="needs a terminal of its own, which hilt train does not give"):
        check_begin(Hil(**TOY, operator="keyboard"), whole=True)


def test_post_training_lists_all_that_cannot_work(tmp_path: Path):
    settings: dict[str, Any] = {"seed": -1, "policy": "nowhere", "sinks": ["none"], "rewards": {"success": 0}}
    with pytest.raises(SeveralErrors) as error:
        build(Vla(), {**settings, "collect": {"group_size": 0}, "critic": {"kind": "shared"}}).check()
    wrong = [
        "seed=-1",
        "policy=nowhere",
        "no sink named",
        "all coefficients of rewards are 0",
        "group_size",
        "kind=shared",
    ]
    for words in (*wrong, "nothing to try"):
        assert words in str(error.value), words


def test_a_run_that_an_error_ends_before_it_has_anything_leaves_no_folder(tmp_path: Path):
    run = tmp_path / "run"
    begin_run(run, "mine", Hil(**TOY))
    with pytest.raises(HiltError, match=r"^no$"), undone_if_nothing_is_kept(run):
        (run / "logs").mkdir()
        Log.create(run / "log", Log.open(demonstrations(tmp_path / "shown", range(1)), "r").schema).close()
        raise HiltError("no")
    assert not run.exists()
    begin_run(run, "mine", Hil(**TOY))
    kept = r"^no\n.*run has what was made until then: hilt train --run .* --resume"
    with pytest.raises(HiltError, match=kept), undone_if_nothing_is_kept(run):
        with (
            Log.create(run / "log", Log.open(tmp_path / "shown", "r").schema) as log,
            log.episode(actor="a") as running,
        ):
            running.append({name: value for name, value in next(episode(0)).items() if name not in ("succeed", "lost")})
        raise HiltError("no")
    assert (run / "config.yaml").exists()


def test_preflight_uses_free_ports_if_the_defaults_are_taken(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with socket.create_server(("127.0.0.1", 0)) as free:  # not the usual one, which a run on this machine may have
            port, beside = taken.getsockname()[1], free.getsockname()[1]
        monkeypatch.setattr(Wire.__init__, "__defaults__", ("127.0.0.1", port, beside, *Wire.__init__.__defaults__[3:]))
        moved = own_ports(Hil(), said.append)
        assert moved.wire.port not in (0, port) and moved.wire.broadcast_port not in (0, moved.wire.port)
        assert said == [f"port {port} is taken: this run uses {moved.wire.port} and {moved.wire.broadcast_port}"]
        check_wire(moved)
        asked = Hil(wire=Wire(port=port, broadcast_port=0))
        assert own_ports(asked, said.append) == asked and len(said) == 1, "who asked for it finds it taken"
        with pytest.raises(ConfigError, match=f"port {port} is taken"):
            check_wire(asked)
        away = Hil(wire=Wire(host="10.1.2.3"))
        assert own_ports(away) == away, "actors of other machines look there"
    assert own_ports(Hil()) == Hil()


@pytest.mark.parametrize(
    ("recorded", "trained", "warns"),
    [
        ("tabletop/pick", "tabletop/button", True),
        ("lab:pick", "lab:insert", True),
        ("tabletop/pick", "tabletop/pick", False),
        ("robot/left.yaml", "robot/127.0.0.1:5000", False),  # an address says nothing of a task
        ("robot/arm.yaml", "hilt.recipes.migrate:HilSerlTask", False),
        (None, "tabletop/pick", False),
    ],
)
def test_demonstrations_of_another_task_with_the_same_columns_are_warned_of(
    recorded: str | None, trained: str, warns: bool, tmp_path: Path
):
    demonstrations(tmp_path / "demos", range(1))
    if recorded is not None:
        with Log.open(tmp_path / "demos") as log:
            log.annotate(log.trajectories()[0], task=recorded)
    lines = other_tasks(Hil(task=trained, demo_path=[str(tmp_path / "demos")]))
    assert len(lines) == warns and all(
        f"recorded of {recorded}, and this run learns {trained}" in line for line in lines
    )


@pytest.mark.parametrize(("recorded", "here", "warns"), [(10.0, 5.0, True), (10.0, 10.0, False), (None, 5.0, False)])
def test_demonstrations_of_another_rate_are_warned_of(recorded: float | None, here: float, warns: bool, tmp_path: Path):
    demonstrations(tmp_path / "demos", range(1))
    if recorded is not None:
        with Log.open(tmp_path / "demos") as log:
            log.annotate(log.trajectories()[0], fps=recorded)
    config = Hil(task="tabletop/pick", demo_path=[str(tmp_path / "demos")])
    env = spaces()
    assert other_rates(config, env) == [], "a task without a rate of its own"
    env.control_hz = here
    lines = other_rates(config, env)
    assert len(lines) == warns and all(
        "recorded at 10 steps a second, and tabletop/pick has 5 here" in line and "task_options.control_hz=10" in line
        for line in lines
    )


def test_a_run_that_begins_tells_of_another_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    demonstrations(tmp_path / "demos", range(1))
    with Log.open(tmp_path / "demos") as log:
        log.annotate(log.trajectories()[0], fps=10.0)
    monkeypatch.setattr(preflight, "check_imports", lambda config, env: None)  # the columns are not those of the toy
    said: list[str] = []
    check_begin(Hil(**TOY, demo_path=[str(tmp_path / "demos")]), notify=said.append)
    assert len(said) == 1 and "recorded at 10 steps a second, and tests.hil.toy:Toy has 200 here" in said[0]


def test_preflight_recording_without_hil_serl_observations_names_the_option():
    image, state = np.zeros((2, 8, 8, 3), np.uint8), np.zeros((2, 3), np.float32)
    columns = {"observations": {"images": {"front": image}, "state": {"tcp_pose": state}}, "actions": state}
    schema = Schema.declare({"observations": {"front": ArraySpec(np.dtype(np.uint8), (1, 8, 8, 3))}})
    with pytest.raises(
        HiltError, match=r"has no observations/front.*Record it with `hilt record TASK --observations hil-serl`"
    ):
        _fitted(schema, Episode(columns), "recordings/pick")


def test_error_that_ends_a_run_is_noted_unless_an_alarm_was(tmp_path: Path):
    write_json(tmp_path / "run.json", {"id": "a"})
    for error, words in ((HiltError("no room"), "no room"), (RuntimeError("no CUDA"), "RuntimeError: no CUDA")):
        with pytest.raises(type(error), match=str(error)), failure_noted(tmp_path):
            raise error
        ended = read_json(tmp_path / "run.json")["ended"]
        assert (ended["reason"], ended["words"]) == ("failed", words)
        note_end(tmp_path)
    note_end(tmp_path, "alarm", 3, "it stands still")
    with pytest.raises(HiltError, match="alarm"), failure_noted(tmp_path):
        raise HiltError("alarm")
    assert read_json(tmp_path / "run.json")["ended"]["words"] == "it stands still"
