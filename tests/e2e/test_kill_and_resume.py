"""`hilt train` as real processes: killed, each side and all of it, interrupted, and
resumed; the log is what the environments produced."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hilt.core.checksums import read_json
from hilt.core.trajectory import Source
from hilt.observe.metrics import read_metrics
from hilt.replay import Log, QueuedDataStore
from hilt.runs.checkpoint import load, numbers
from tests.e2e.journaled import image_of
from tests.effort import is_long
from tests.forked import ForkedCommand, ForkServer
from tests.sessions import members
from tests.wire.processes import free_port

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 300.0
RECIPE = "tests.e2e.journaled:recipe"
KILLS = 200
"""Of a run with a VLA, in long tests"""


class Train:
    """`hilt train` on one folder, over its lives."""

    def __init__(self, folder: Path, fork_server: ForkServer):
        self._fork_server = fork_server
        self.run, self.journals, self.output = folder / "run", folder / "journals", folder / "output"
        self.journals.mkdir()
        self.forked = not is_long()
        """Whether runs are forked from a process that has imported torch, which takes seconds in each life"""
        self.process: subprocess.Popen[bytes] | ForkedCommand | None = None
        self.kills: Counter[str] = Counter()

    def start(self, *words: str) -> None:
        """In `make test` forked from a process that has imported torch, which takes seconds in each life."""
        if "--resume" not in words:  # the learner comes back to them after it was killed
            words = (*words, f"wire.port={free_port()}", f"wire.broadcast_port={free_port()}")
        words = ("train", *words, "--run", str(self.run))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        if self.forked:
            self.process = self._fork_server.start_run(words, self.output, environment)
            return
        with self.output.open("ab") as out:
            command = [sys.executable, "-m", "hilt", *words]
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, env=environment, cwd=ROOT, start_new_session=True
            )

    def pid(self, name: str) -> int:
        """Of the newest process of this name."""
        found = re.findall(rf"{name}(?:: process| was killed by \w+ and is started again, process) (\d+)", self.said())
        return int(found[-1])

    def said(self) -> str:
        return self.output.read_text()

    def steps(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in self.journals.iterdir())

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not ready():
            assert self.process is not None and self.process.poll() is None, f"it ended before {what}: {self.said()}"
            assert time.monotonic() < deadline, f"{what} took too long: {self.said()}"
            time.sleep(0.02)

    def wait_steps(self, count: int) -> None:
        target = self.steps() + count
        self.wait(lambda: self.steps() >= target, f"{count} more steps")

    def updates(self) -> int:
        return (
            max((record["update"] for record in read_metrics(self.run)), default=0)
            if (self.run / "metrics.jsonl").exists()
            else 0
        )

    def kill(self, *names: str) -> None:
        """One that was killed a moment ago is killed again when it has been started again."""
        self.wait(lambda: all(_alive(self.pid(name)) for name in names), f"{' and '.join(names)} were running")
        for name in names:
            os.kill(self.pid(name), signal.SIGKILL)
        self.kills[" and ".join(names)] += 1

    def end(self, number: int = 0) -> int:
        assert self.process is not None
        if number:
            self.process.send_signal(number)
        code = self.process.wait(DEADLINE_S)
        self.wait_gone()
        return code

    def wait_gone(self) -> None:
        """None of the processes that were ever started is left."""
        pids = {int(pid) for pid in re.findall(r"process (\d+)", self.said())}
        deadline = time.monotonic() + DEADLINE_S
        while left := [pid for pid in pids if _alive(pid)]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return "hilt" in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace") and _state(pid) != "Z"
    except OSError:
        return False


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def train(memory_path: Path, fork_server: ForkServer) -> Iterator[Train]:
    train = Train(memory_path, fork_server)
    yield train
    if train.process is not None and train.process.poll() is None:
        train.process.kill()
        train.process.wait(DEADLINE_S)
    train.wait_gone()


def check(train: Train, actors: int = 1) -> dict[str, int]:
    """The log has every step of every environment, in order, once, pixel for pixel; but for the last one of a life,
    whose insert may not have returned. What a spool still has is the same as what the log has, or comes after it."""
    journals = {
        int(path.stem): [json.loads(line) for line in path.read_text().splitlines()]
        for path in train.journals.iterdir()
    }
    with Log.open(train.run / "log", "r") as log:
        rows = log.read(log.all().keys())
        lengths = [len(log.trajectory_keys(number)) for number in log.trajectories()]
    before, after = rows["observations"]["state"].astype(int), rows["next_observations"]["state"].astype(int)
    names = list(zip(after[:, 0].tolist(), after[:, 1].tolist(), strict=True))
    assert len(set(names)) == len(names), "a step is in the log twice"
    where = {name: row for row, name in enumerate(names)}
    spooled = set()
    for folder in (train.run / "actors").iterdir():
        spool = QueuedDataStore(1, path=folder / "spool")
        spooled |= {
            tuple(step["next_observations"]["state"].astype(int)[:2].tolist()) for step in spool.get_latest_data(-1)
        }
        spool.close()
    last = lost = 0
    for life, lines in journals.items():
        for place, line in enumerate(lines):
            name = (life, line["count"])
            if name not in where:
                lost += name not in spooled and place + 1 < len(lines)
                last += name not in spooled
                continue
            row = where[name]
            assert before[row].tolist()[:2] == [life, line["count"] - 1] and after[row, 2] == before[row, 2]
            np.testing.assert_array_equal(rows["actions"][row], np.float32(line["action"]))
            assert rows["rewards"][row] == line["reward"]
            assert [bool(rows["terminated"][row]), bool(rows["truncated"][row])] == line["ends"] and rows["succeed"][
                row
            ] == line["ends"][0]
            np.testing.assert_array_equal(rows["observations"]["image"][row], image_of(life, line["count"] - 1))
            np.testing.assert_array_equal(rows["next_observations"]["image"][row], image_of(life, line["count"]))
    assert lost == 0, f"{lost} steps whose insert had returned are not in the log"
    assert last <= len(journals), "at most the last step of each life, which was under way"
    assert set(names) <= {(life, line["count"]) for life, lines in journals.items() for line in lines}
    policy = rows["source"] == Source.POLICY
    assert (rows["policy_version"][policy] > 0).all() and (rows["policy_version"][~policy] == -1).all()
    assert (rows["source"] == Source.RANDOM).sum() <= 30 * actors, "random steps are counted over all lives"
    assert max(lengths) <= 12
    return {"steps": len(names), "lives of environments": len(journals), "under way when killed": last}


def test_each_side_is_killed_and_the_whole_is_interrupted_and_nothing_is_lost(
    train: Train, counted: Callable[[str], None]
):
    train.start(RECIPE, f"task_options.folder={train.journals}")
    train.wait_steps(60)
    for names in (("actor-1",), ("learner",), ("actor-1", "learner")):
        train.kill(*names)
        train.wait_steps(40)
    assert train.end(signal.SIGINT) == 130, train.said()
    assert "stopped: " in train.said() and f"hilt train --run {train.run} --resume" in train.said()
    assert list((train.run / "checkpoints").iterdir()), "Ctrl-C leaves a checkpoint"

    before, most = train.updates(), train.steps() + 10  # with an update for each step: more than without new steps
    train.start("--resume", f"max_steps={most}")
    assert train.end() == 0, train.said()
    found = check(train)
    assert train.updates() > before and "ended: " in train.said()
    assert read_json(train.run / "run.json")["changed"][0]["settings"]["max_steps"]["now"] == most
    assert found["lives of environments"] >= 4
    counted(f"SIGKILL: {dict(train.kills)}, Ctrl-C: 1; {found}; 0 lost, 0 doubled")


def small_policy(train: Train, folder: Path) -> list[str]:
    """What a run with a vision-language-action policy is started with, which is made now."""
    from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig

    sizes = {"cameras": ["full_image"], "image_size": 32, "state_dim": 3, "action_dim": 2, "chunk": 4}
    config = SmallVLAConfig.from_json({**sizes, "width": 32, "depth": 1, "keypoints": 2})
    SmallVLA(config, seed=0).save_pretrained(folder / "policy")
    given = [f"task_options.folder={train.journals}", f"agent.options.policy={folder / 'policy'}"]
    return ["tests.e2e.journaled:vla_recipe", *given]


def test_a_simulation_of_groups_and_the_learner_are_killed_and_each_group_counts_once(
    train: Train, tmp_path: Path, counted: Callable[[str], None]
):
    """algorithm=mixed: a learner, an actor as in any run, and one that plays groups of episodes."""
    words = ["algorithm=mixed", "mixed.imitation=filtered", "mixed.group_size=2", "mixed.groups=1", "mixed.period=2"]
    train.start(*small_policy(train, tmp_path), *words, "checkpoint_period=5")
    train.wait(lambda: train.updates() >= 10, "ten updates")
    for names in (("simulation-1",), ("learner",), ("simulation-1", "learner")):
        before = max(numbers(train.run))
        train.kill(*names)
        train.wait(lambda: max(numbers(train.run)) > before + 10, "ten more updates")  # noqa: B023
    assert train.end(signal.SIGINT) == 130, train.said()
    found = check(train)
    groups = load(train.run, max(numbers(train.run))).state["groups"]
    with Log.open(train.run / "log", "r") as log:
        played = {int(group) for group in log.read(log.all().keys(), ["group"])["group"]} - {-1}
    assert len(groups["decided"]) == len(set(groups["decided"])) == sum(groups["totals"].values())
    assert set(groups["decided"]) <= played
    learned = groups["totals"].get("used", 0) + groups["totals"].get("no_signal", 0)
    assert learned == max(numbers(train.run)) // 2, "one group in every second update, whatever was killed"
    counted(f"SIGKILL: {dict(train.kills)}; {found}; groups: {groups['totals']}; 0 lost, 0 doubled")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_vla_and_its_learner_are_killed_and_no_step_is_lost_or_doubled(
    train: Train, tmp_path: Path, counted: Callable[[str], None]
):
    """With a policy that acts in chunks: at random moments, each side and both, and `hilt train` itself."""
    rng, train.forked = random.Random(23), True  # in half an hour instead of two
    train.start(*small_policy(train, tmp_path))
    train.wait_steps(60)
    for kill in range(KILLS):
        names = rng.choice([("actor-1",), ("learner",), ("actor-1", "learner"), ()])
        train.wait_steps(rng.randint(1, 60))
        if names:
            train.kill(*names)
        if not names or kill % 3 == 2:  # more than three deaths in a minute, and `hilt train` would give up
            train.end(signal.SIGKILL)
            train.start("--resume")
            train.wait_steps(1)
    assert train.end(signal.SIGINT) == 130, train.said()
    before = train.updates()
    train.start("--resume", f"max_steps={before + 10}")
    assert train.end() == 0, train.said()
    counted(f"SIGKILL: {dict(train.kills)}; {check(train)}; 0 lost, 0 doubled")
    with Log.open(train.run / "log", "r") as log:
        rows = log.read(log.all().keys(), ["chunk", "chunk_index", "source"])
    planned = rows["source"] == Source.POLICY
    assert ((rows["chunk_index"][planned] >= 0) & (rows["chunk_index"][planned] < 4)).all()


@pytest.mark.timeout(1500)
def test_signals_to_all_processes_are_answered_by_one_and_no_update_is_lost(train: Train):
    """Slurm and Kubernetes may send them to all; a second one comes while the learner
    saves. To one side alone they do nothing."""
    for number, times in ((signal.SIGTERM, 2), (signal.SIGHUP, 1)):
        before, steps = train.updates(), train.steps()
        train.start(*(["--resume"] if before else [RECIPE, f"task_options.folder={train.journals}"]))
        # a resumed learner may have steps to learn from before the actor makes one
        train.wait(lambda: train.updates() > before and train.steps() > steps, "an update and a step")  # noqa: B023
        assert train.process is not None
        for name in ("learner", "actor-1"):
            os.kill(train.pid(name), number)
        train.wait_steps(20)
        for _ in range(times):
            for pid in (train.process.pid, train.pid("learner"), train.pid("actor-1")):
                with contextlib.suppress(ProcessLookupError):  # it may have ended in order by now
                    os.kill(pid, number)
            time.sleep(0.1)
        late = {-number} if times > 1 else set()  # the second one came after all was saved and said, while Python ended
        assert train.end() in {128 + number, *late} and "stopped: " in train.said(), train.said()
        made = re.findall(r"ends: stopped, after (\d+) updates", (train.run / "logs" / "learner.log").read_text())
        assert int(made[-1]) == max(numbers(train.run)) >= before and "started again" not in train.said(), train.said()
    check(train)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_each_signal_to_each_target_in_each_phase_of_a_run_with_an_actor(train: Train, number: int):
    """To `hilt train` alone, to its group, to its session; while the sides start,
    collect and learn, once and again while it ends."""
    targets = ["process", "group", "session"]
    for place, (times, phase) in enumerate(
        (times, phase) for times in (1, 2) for phase in ("start", "collect", "update")
    ):
        before, steps, heard = train.updates(), train.steps(), len(train.said()) if train.output.exists() else 0
        train.start(*(["--resume"] if place else [RECIPE, f"task_options.folder={train.journals}"]))
        assert train.process is not None
        ready = {
            "start": lambda: "actor-1: process" in train.said()[heard:],  # noqa: B023
            "collect": lambda: train.steps() > steps,  # noqa: B023
            "update": lambda: train.updates() > before,  # noqa: B023
        }
        train.wait(ready[phase], phase)
        target = targets[(place + number) % 3]
        for again in range(times):
            time.sleep(0.5 * again)
            pids = (
                members(train.process.pid)
                if target == "session"
                else [train.process.pid if target == "process" else -train.process.pid]
            )
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # it may have ended in order by now
                    os.kill(pid, number)
        said = f"{phase}, {target}, {times} times: "
        late = {-number} if times > 1 else set()  # the second one came after all was saved and said, while Python ended
        assert train.end() in {128 + number, *late} and train.said()[heard:].count("stopped: ") >= 1, (
            said + train.said()
        )
        assert "Traceback" not in train.said() and "started again" not in train.said(), said + train.said()
        assert max(numbers(train.run), default=0) >= train.updates() >= before + (phase == "update"), (
            said + train.said()
        )
    check(train)


@pytest.mark.peers
@pytest.mark.timeout(2400)
def test_a_soak_of_kills(train: Train, counted: Callable[[str], None]):
    """Two actors; something is killed every few seconds, also while it starts, and once `hilt train` itself."""
    rng = random.Random(6)
    train.start(RECIPE, f"task_options.folder={train.journals}", "actors=2")
    train.wait_steps(50)
    end = time.monotonic() + 180
    while time.monotonic() < end:
        names = rng.choice(
            [("learner",), ("actor-1",), ("actor-2",), ("learner", "actor-1"), ("learner", "actor-1", "actor-2")]
        )
        time.sleep(rng.uniform(12, 30))  # more often, and `hilt train` gives up: at most 3 in a minute
        if train.process is not None and train.process.poll() is None:
            train.kill(*(name for name in names if _alive(train.pid(name))))
        else:
            assert "was killed 4 times within a minute" in train.said(), train.said()
            train.start("--resume")
            train.kills["given up"] += 1
            train.wait_steps(1)
    train.end(signal.SIGKILL)  # its children notice, and end
    train.kills["hilt train"] += 1
    train.start("--resume")
    train.wait_steps(20)
    assert train.end(signal.SIGINT) == 130, train.said()
    train.start("--resume", f"max_env_steps={train.steps() + 150}")
    assert train.end() == 0, train.said()
    counted(f"SIGKILL: {dict(train.kills)}; {check(train, actors=2)}; 0 lost, 0 doubled")
