"""A run's folder, its demonstrations, and how its processes are looked after; the processes here are small scripts."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hilt.core.checksums import read_json, write_json
from hilt.core.config import thaw
from hilt.core.errors import ConfigError, HiltError
from hilt.core.trajectory import Source
from hilt.hil import launch as module
from hilt.hil.config import Goal, HelpRequests, Hil, Wire
from hilt.hil.launch import (
    CHANGEABLE,
    KIND,
    Child,
    begin_run,
    commands,
    demonstrate,
    resume_run,
    train,
    with_demonstrations,
)
from hilt.replay import Log
from hilt.replay.storage.lock import WriterLock

TOY: dict[str, Any] = {"task": "tests.hil.toy:Toy"}
DEADLINE_S = 120.0
WAITS = (
    "import signal as s, sys, time; s.signal(s.SIGUSR1, lambda n, _: sys.exit(128 + n)); print('there', "
    "flush=True); time.sleep(600)"
)


def scripts(monkeypatch: pytest.MonkeyPatch, **codes: str) -> None:
    made = {name.replace("_", "-"): [sys.executable, "-c", code] for name, code in codes.items()}
    monkeypatch.setattr(module, "commands", lambda config, run, debug: made)


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def started(said: list[str]) -> list[int]:
    return [int(line.split("process ")[1].split(",")[0]) for line in said if "process " in line]


# The folder


def test_a_run_is_frozen_once_and_resumed_with_its_settings(tmp_path: Path):
    run = tmp_path / "runs" / "one"
    config = begin_run(run, "mine", Hil(batch_size=12, wire=Wire(port=0, broadcast_port=0)))
    assert thaw(Hil, run / "config.yaml") == config and config.batch_size == 12
    assert config.wire.port > 0 and config.wire.broadcast_port not in (0, config.wire.port), "port 0 becomes a free one"
    with pytest.raises(ConfigError, match=r"has a run already: --resume goes on with it, --run FOLDER begins another"):
        begin_run(run, "mine", Hil())
    assert resume_run(run, "mine", []) == resume_run(run, "", []) == config
    assert resume_run(run, "", ["max_steps=5", "wire.host=::1"]).max_steps == 5
    assert resume_run(run, "", []).wire.host == "::1", "what was changed is frozen"
    assert resume_run(run, "", ["wire.port=0"]).wire.port not in (0, config.wire.port), (
        "another free one, if that is taken by now"
    )
    card = read_json(run / "run.json")
    assert card["recipe"] == "mine" and len(card["id"]) == 16
    assert card["changed"][0]["settings"]["max_steps"] == {"was": 1_000_000, "now": 5}
    assert (
        card["changed"][0]["step"] == 0
        and resume_run(run, "", ["agent.rlpd.learning_rate=1e-5"]).agent.rlpd.learning_rate == 1e-5
    )


def test_resume_refuses_breaking_changes(tmp_path: Path):
    begin_run(tmp_path / "run", "mine", Hil())
    begun = (tmp_path / "run" / "config.yaml").read_text()
    for override, words in {
        "batch_size=8": (
            "batch_size was 256 in .* and is 8 now, which a resumed run cannot change: leave it out, or begin another"
        ),
        "agent.rlpd.discount=0.5": r"agent\.rlpd\.discount was 0.97",
        "task_options.image_size=32": r"task_options was \{\} in .* and is \{'image_size': 32\} now",
    }.items():
        with pytest.raises(ConfigError, match=words):
            resume_run(tmp_path / "run", "", ["max_steps=5", override])
    with pytest.raises(ConfigError, match="is a run of mine, not of yours: leave the recipe out"):
        resume_run(tmp_path / "run", "yours", [])
    assert (tmp_path / "run" / "config.yaml").read_text() == begun
    with pytest.raises(ConfigError, match="has no run of `hilt train` to resume: leave out --resume to begin one"):
        resume_run(tmp_path / "other", "", [])
    with pytest.raises(ConfigError, match="max_steps=-1: expected a whole number of at least 0"):
        resume_run(tmp_path / "run", "", ["max_steps=-1"])
    with pytest.raises(ConfigError, match="batch_size=0: expected a whole number of at least 2"):
        begin_run(tmp_path / "new", "mine", Hil(batch_size=0))
    assert not (tmp_path / "new").exists(), "so that the right settings may begin there"
    (tmp_path / "things").mkdir()
    (tmp_path / "things" / "letter.txt").write_text("")
    with pytest.raises(ConfigError, match=r"is not a run: letter\.txt is in it"):
        begin_run(tmp_path / "things", "mine", Hil())


def test_resume_may_change_the_classifier_of_a_run_that_has_one(tmp_path: Path):
    """Its log has the column for what the task itself reports, and a run without a classifier has none."""
    for name, classifier in (("with", "old"), ("without", "")):
        KIND.begin(tmp_path / name, "mine", Hil(task="tabletop/reach", classifier=classifier), {})
    new = tmp_path / "new"
    new.mkdir()
    with pytest.raises(ConfigError, match=r"classifier=.*new: no classifier is there, and this run has old\. Make one"):
        resume_run(tmp_path / "with", "", [f"classifier={new}"])
    with pytest.raises(ConfigError, match="classifier=: no classifier is there"):
        resume_run(tmp_path / "with", "", ["classifier="])
    (new / "classifier.json").write_text("{}")
    changed = resume_run(tmp_path / "with", "", [f"classifier={new}", "classifier_threshold=0.8"])
    assert (changed.classifier, changed.classifier_threshold) == (str(new), 0.8)
    [noted] = read_json(tmp_path / "with" / "run.json")["changed"]
    assert noted["settings"]["classifier"] == {"was": "old", "now": str(new)}
    assert noted["settings"]["classifier_threshold"] == {"was": 0.0, "now": 0.8}
    with pytest.raises(ConfigError, match=r"classifier was '' in .* which a resumed run cannot change"):
        resume_run(tmp_path / "without", "", [f"classifier={new}"])


def test_resume_changeable_settings_exist():
    for key in CHANGEABLE:
        functools.reduce(getattr, key.split("."), Hil())
    parts = {"wire": Wire, "goal": Goal, "help": HelpRequests}
    whole = {f"{part}.{name}" for part, kind in parts.items() for name in kind.__dataclass_fields__}
    assert {
        key
        for key in CHANGEABLE
        if "." in key and not key.startswith(("agent.rlpd.", "agent.critic.", "mixed.", "recap.", "value.alarm_"))
    } == whole


# Demonstrations


def test_demonstrations_are_recorded_once_and_given_to_the_learner(tmp_path: Path):
    config, said = Hil(**TOY, demonstrations=3, demonstration_options={"expert": f"{__name__}:slow"}), []  # type: ignore[var-annotated]
    told: list[Any] = []
    demonstrate(config, tmp_path, said.append, report=lambda *given: told.append(given))
    assert told == sorted(told) and told[-1] == ("recording demonstrations of tests.hil.toy:Toy", 3, 3)
    assert said[0].startswith("recording 3 demonstrations of tests.hil.toy:Toy with its script")
    demonstrate(config, tmp_path, said.append)
    assert len(said) == 2, "they are there"
    with Log.open(tmp_path / "demonstrations" / "log", "r") as log:
        assert len(log.trajectories()) == 3 and len(log.by_source("demo")) == len(log)
        assert abs(log.read(log.all().keys(), ["actions"])["actions"]).max() <= 0.7, "as the options have it"
        assert (log.read(log.all().keys(), ["source"])["source"] == Source.DEMO).all()
    assert with_demonstrations(config, tmp_path).demo_path == [str(tmp_path / "demonstrations" / "log")]
    assert with_demonstrations(Hil(demo_path=["a"]), tmp_path).demo_path == ["a"]


def slow(env: Any) -> Any:
    expert = env.unwrapped.expert()
    return lambda: 0.7 * expert()


# Processes


def test_the_commands_are_one_learner_and_the_actors_that_were_asked_for(tmp_path: Path):
    found = commands(Hil(actors=2, wire=Wire(host="10.0.0.1")), tmp_path, debug=True)
    assert list(found) == ["learner", "actor-1", "actor-2"]
    theirs = {name: command[command.index("hilt") :] for name, command in found.items()}
    assert theirs["learner"] == ["hilt", "--debug", "learner", "--run", str(tmp_path), "--resume"]
    own = ["--name", "actor-2", "--spool", str(tmp_path / "actors" / "actor-2"), "--learner", "10.0.0.1"]
    assert theirs["actor-2"] == ["hilt", "--debug", "actor", str(tmp_path / "config.yaml"), *own]
    with pytest.raises(ConfigError, match=r"actors=0: expected a whole number of at least 1\. A learner alone"):
        train(Hil(actors=0), tmp_path)


def test_the_run_ends_with_its_learner_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scripts(monkeypatch, learner="import time; time.sleep(1.5)", actor_1=WAITS, actor_2=WAITS)
    said: list[str] = []
    looks: list[int] = []
    phases: list[str] = []
    outcome = train(
        Hil(), tmp_path, notify=said.append, look=lambda: looks.append(1), report=lambda name, *_: phases.append(name)
    )
    assert phases == ["waiting until the learner has started", "waiting until the learner and the actors have ended"]
    assert (
        outcome.ended and not outcome.restarts and len(looks) >= 2 and len(started(said)) == 3 and gone(started(said))
    )


def test_processes_of_a_hilt_train_that_was_killed_are_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scripts(monkeypatch, learner="")
    locks = [WriterLock(folder) for folder in (tmp_path, tmp_path / "actors" / "actor-1" / "spool")]
    (tmp_path / "actors" / "actor-1" / "spool").mkdir(parents=True)
    for lock in locks:
        lock.__enter__()
    said: list[str] = []
    ended: list[WriterLock] = []

    def end() -> None:
        """One after the other, once they are waited for."""
        deadline = time.monotonic() + DEADLINE_S
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        for lock in locks:
            time.sleep(0.4)
            ended.append(lock)
            lock.__exit__()

    thread = threading.Thread(target=end)
    thread.start()
    assert train(Hil(), tmp_path, notify=said.append).ended
    assert f"is still at work in {tmp_path}: waiting until it has ended" in said[0] and ended == locks
    thread.join(DEADLINE_S)


def test_stopped_from_outside_all_are_asked_and_who_does_not_hear_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "END_S", 2.0)
    deaf = (
        "import signal, time; signal.signal(signal.SIGUSR1, signal.SIG_IGN); print('there', "
        "flush=True); time.sleep(600)"
    )
    scripts(monkeypatch, learner=WAITS, actor_1=deaf)
    said: list[str] = []
    ready = [tmp_path / "logs" / f"{name}.log" for name in ("learner", "actor-1")]
    outcome = train(
        Hil(), tmp_path, notify=said.append, stop=lambda: all(path.exists() and path.read_text() for path in ready)
    )
    assert not outcome.ended and said[-1] == "actor-1 did not end within 2 s: killed" and gone(started(said))


def test_an_error_of_a_process_is_the_error_of_the_run_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    says = (
        "import sys, time; time.sleep(0.5); print('error: the arm is not there. Switch it on.', "
        "file=sys.stderr); sys.exit(1)"
    )
    scripts(monkeypatch, learner=WAITS, actor_1=says)
    said: list[str] = []
    with pytest.raises(HiltError, match=r"^actor-1: the arm is not there\. Switch it on\.$"):
        train(Hil(), tmp_path, notify=said.append)
    assert gone(started(said))
    scripts(monkeypatch, learner="1 / 0", actor_1=WAITS)
    words = r"learner ended with exit code 1; its last words, from .*learner\.log:\nTraceback(.|\n)*ZeroDivisionError"
    write_json(tmp_path / "run.json", {"id": "a"})
    with pytest.raises(HiltError, match=words):
        train(Hil(), tmp_path, notify=said.append)
    assert gone(started(said))
    ended = read_json(tmp_path / "run.json")["ended"]
    assert (ended["reason"], ended["words"]) == ("failed", "learner: ZeroDivisionError: division by zero")


def test_launch_restarts_killed_processes_up_to_three_times_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scripts(monkeypatch, learner=WAITS, actor_1=WAITS)
    said: list[str] = []

    def kill() -> None:
        deadline, killed = time.monotonic() + DEADLINE_S, 0
        while killed < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
            if len(pids := started([line for line in said if line.startswith("actor-1")])) > killed:
                os.kill(pids[-1], signal.SIGKILL if killed else signal.SIGSEGV)  # each of them was somebody's doing
                killed += 1

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(
        HiltError, match=r"actor-1 was killed 4 times within a minute, last by SIGKILL\. Find out by whom"
    ):
        train(Hil(), tmp_path, notify=said.append)
    thread.join()
    assert (tmp_path / "logs/actor-1.log").read_text().count("actor-1 was killed by SIG") == 3
    assert sum("is started again" in line for line in said) == 3 and "by SIGSEGV and is started again" in "".join(said)
    assert gone(started(said))


def test_launch_prints_the_page_address_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (
        "import time; print('actor: episode 1'); print('open http://127.0.0.1:8080/?token=a', "
        "flush=True); time.sleep(600)"
    )
    scripts(monkeypatch, learner=WAITS, actor_1=page)
    said: list[str] = []
    train(Hil(), tmp_path, notify=said.append, stop=lambda: any("open http" in line for line in said))
    assert "actor-1: open http://127.0.0.1:8080/?token=a" in said and not any("episode" in line for line in said)


def test_launch_appends_to_the_log_of_a_child(tmp_path: Path):
    child = Child(
        "one",
        [sys.executable, "-c", "import sys; print('error: it is broken', flush=True); sys.exit(1)"],
        tmp_path / "one.log",
    )
    (tmp_path / "one.log").write_text("error: of long ago\n")
    child.start()
    assert child.wait(DEADLINE_S) and child.failed and str(child.error()) == "one: it is broken"
    assert (tmp_path / "one.log").read_text() == "error: of long ago\nerror: it is broken\n"
