"""Groups of simulated episodes in a run with a person (algorithm=mixed): what they add to the gradient, which of them
are learned from, what imitation takes of them, and a run of real processes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.algos.config import PolicyGradient
from hilt.core.config import build
from hilt.core.errors import ConfigError
from hilt.core.trajectory import Source
from hilt.core.tree import flatten
from hilt.envs.env_protocol import Env
from hilt.hil.actor import act
from hilt.hil.config import Hil, check
from hilt.hil.environment import GroupPlay, check_groups, make_env, simulated, spaces
from hilt.hil.groups import GroupBatch, add_gradient, policy_gradient
from hilt.hil.launch import begin_run, commands
from hilt.hil.learner import Learner
from hilt.hil.make_agent import make_agent
from hilt.observe.metrics import read_metrics
from hilt.policies.base import drawn_fields, join, rejoin, select
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.recording.record import Settings
from hilt.recording.script import record_with_script
from hilt.replay import Log
from hilt.runs.checkpoint import load
from tests.hil.toy_run import wire

TASKS = "tabletop/press_red+tabletop/press_blue"
OPTIONS = {"image_size": 16, "cameras": ["wrist"], "control_hz": 5, "step_limit": 6}
SIZES = {"cameras": ["wrist_image"], "image_size": 16, "state_dim": 1, "action_dim": 3, "chunk": 3}
SMALL = {**SIZES, "width": 32, "depth": 1, "keypoints": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy") / "small"
    SmallVLA(SmallVLAConfig.from_json(SMALL), seed=0).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shown")
    task = Hil(task=TASKS, task_options=OPTIONS)
    record_with_script(Settings(TASKS, OPTIONS, 2, seed=0), path, lambda: make_env(task, operator=False), {})
    return path / "log"


def config(folder: Path, *changes: Any) -> Hil:
    made = Hil(task=TASKS, task_options=dict(OPTIONS), algorithm="mixed", batch_size=8, seed=1)
    made.agent.kind, made.agent.options = "vla", {"policy": str(folder)}
    made.mixed.group_size, made.mixed.groups, made.mixed.period = 2, 2, 2
    return build(made, *changes)


@pytest.fixture(scope="module")
def env(folder: Path) -> Iterator[Env]:
    made = make_env(config(folder), operator=False)
    yield made
    made.close()


# The gradient


def batch_of(policy: Any, success: list[bool], chunks: int = 2) -> GroupBatch:
    """Groups of two episodes, each of some chunks, whose last one was executed in part."""
    draws, rng, records, rows = torch.Generator().manual_seed(0), np.random.default_rng(0), [], []
    for _ in range(chunks * len(success)):
        picture = rng.integers(0, 255, (16, 16, 3)).astype(np.uint8)
        rows.append({"wrist_image": picture, "state": rng.normal(size=1).astype(np.float32), "instruction": "go"})
        records.append(drawn_fields(policy.act(rows[-1:], sample=True, generator=draws)[1]))
    executed = np.array([3] * (chunks - 1) + [1]).repeat(1).tolist() * len(success)
    return GroupBatch(
        rows,
        join(records),
        np.array(executed),
        np.repeat(np.arange(len(success)), chunks),
        np.array(success),
        np.arange(len(success)) // 2,
    )


def gradients(policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def moved(policy: torch.nn.Module, size: float) -> None:
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(size * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))


@pytest.mark.parametrize("head", ["tokens", "gaussian", "flow"])
def test_the_gradient_is_that_of_imitation_and_of_the_surrogate_computed_by_hand(
    folder: Path, env: Env, shown: Path, tmp_path: Path, head: str
):
    SmallVLA(SmallVLAConfig.from_json({**SMALL, "head": head}), seed=0).save_pretrained(tmp_path / head)
    agent = make_agent(config(tmp_path / head), env)
    batch = batch_of(agent.policy, [True, False, True, True])  # the second group has no signal
    moved(agent.policy, 0.02)  # newer weights than those that acted
    with Log.open(shown, "r") as log:
        read = log.read(log.all().keys()[:4])
    imitated = {
        "observations": read["observations"],
        "actions": np.repeat(read["actions"][:, None], 3, 1),
        "mask": np.ones((4, 3), bool),
        "task": np.zeros(4, np.int64),
    }
    gradient = policy_gradient(config(tmp_path / head).mixed)
    found: dict[str, dict[str, torch.Tensor]] = {}

    def step(beside: Callable[[Any], dict[str, float]] | None) -> dict[str, torch.Tensor]:
        """The gradient with which a step is made, which is not made."""
        agent._draws.manual_seed(7)
        agent._descend = lambda every=False: found.update(last=gradients(agent.policy)) or 0.0
        agent.imitate(imitated, beside=beside)
        return found["last"]

    alone = step(None)
    both = step(lambda policy: add_gradient(policy, batch, gradient, 0.3))
    # by hand: advantages of +-1/sqrt(2) over a deviation of 1/sqrt(2); each episode's numbers have the same mean
    agent.policy.zero_grad(set_to_none=True)
    rows = slice(0, 4)
    change = agent.policy.evaluate(rejoin(agent.policy, batch.rows[rows], select(batch.drawn, rows))).log_prob
    ratio = (change - torch.from_numpy(batch.drawn["log_prob"][rows])).exp()
    worth = torch.tensor([1, 1, -1, -1]).view(4, 1, 1) * (0.5 / (0.5**0.5 + 1e-6))
    each = torch.maximum(-worth * ratio, -worth * ratio.clamp(0.8, 1.28))
    done = torch.tensor([3, 1, 3, 1]).view(4, 1, 1) > torch.arange(3).view(1, 3, 1)
    (0.3 * (each * done).sum() / (4 * 4 * 3)).backward()  # four episodes, each with four actions of three numbers
    surrogate = gradients(agent.policy)
    assert any(grad.abs().max() > 1e-4 for grad in surrogate.values())
    for name, grad in both.items():
        zero = torch.zeros_like(grad)
        torch.testing.assert_close(grad, alone.get(name, zero) + surrogate.get(name, zero), atol=1e-6, rtol=1e-4)
    agent.close()


def test_a_group_that_ended_alike_has_no_gradient_and_is_not_evaluated(folder: Path):
    policy = SmallVLA.from_pretrained(folder).eval()
    batch = batch_of(policy, [True, True, False, False])
    assert add_gradient(policy, batch, PolicyGradient(), 1.0) == {} and not gradients(policy)
    figures = add_gradient(policy, batch_of(policy, [True, False]), PolicyGradient(), 1.0)
    assert figures["ppo_kl"] == pytest.approx(0, abs=1e-5) and figures["clip_fraction"] == 0
    assert gradients(policy) and figures["groups/entropy"] > 0


def test_the_settings_of_groups_change_what_is_played_and_learned(folder: Path):
    """estimator, clip_low, clip_high and weight in the gradient; temperature, task and task_options in the actor."""
    asked = {"estimator": "rloo", "clip_low": 0.05, "clip_high": 0.5, "weight": 2.0}
    gradient = policy_gradient(config(folder, {"mixed": asked}).mixed)
    assert gradient == PolicyGradient("rloo", clip_low=0.05, clip_high=0.5)
    policy, found = SmallVLA.from_pretrained(folder).eval(), []
    batch = batch_of(policy, [True, False])
    for settings, weight in ((PolicyGradient(), 1.0), (PolicyGradient(), 2.0), (gradient, 1.0)):
        policy.zero_grad(set_to_none=True)
        add_gradient(policy, batch, settings, weight)
        found.append(torch.cat([grad.flatten() for grad in gradients(policy).values()]))
    torch.testing.assert_close(found[1], 2 * found[0])
    torch.testing.assert_close(found[2], found[0] * (2**0.5 + 2e-6), rtol=1e-3, atol=1e-7)  # 1 and not 0.5 / 0.5**0.5
    other = {"temperature": 0.5, "task": "tabletop/pick", "task_options": {"image_size": 8}}
    acting = simulated(config(folder, {"operator": "script", "control_hz": 5.0, "mixed": other}))
    assert (acting.task, acting.task_options) == ("tabletop/pick", {"image_size": 8})
    assert (acting.operator, acting.control_hz, acting.agent.options["sample"]) == ("", 0.0, True)
    assert (acting.agent.options["temperature"], acting.agent.options["mode"]) == (0.5, "synchronous")
    assert simulated(config(folder)).task_options == OPTIONS


# The actor


def test_group_play_gives_the_members_of_a_group_one_initial_state():
    play, turns, ids = GroupPlay(2), [], []
    for number in range(5):
        turns.append(play.begin(number))
        fresh = play.fresh
        ids.append((int((noted := play.columns())["group"]), int(noted["member"])))
        assert fresh == (noted["member"] == 0) and not play.fresh
    assert turns == [0, 0, 1, 1, 2] and [member for _, member in ids] == [0, 1, 0, 1, 0]
    assert len({group for group, _ in ids}) == 3
    assert [GroupPlay().begin(number) for number in (3, 4)] == [3, 4] and GroupPlay().columns()["group"] == -1


# Which groups are learned from


@pytest.fixture(scope="module")
def played(folder: Path, shown: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with real processes' parts: a learner, an actor whose script takes over, and one that plays groups. Some of
    the policy's failures are called successes afterwards, so that groups have a signal."""
    run = tmp_path_factory.mktemp("played") / "run"
    settings = {"demo_path": [str(shown)], "operator": "script", "max_steps": 8, "log_period": 2, "max_ahead": 12}
    asked = config(folder, settings, {"steps_per_update": 2, "checkpoint_period": 4}, "mixed.max_age=100")
    asked.wire.port = asked.wire.broadcast_port = 0
    frozen = begin_run(run, "vla", asked)
    learner, said = Learner(frozen, run), list[str]()
    with ThreadPoolExecutor(3) as pool:
        learning = pool.submit(learner.run)
        acting = [
            pool.submit(
                act, frozen, run / "actors" / name, name, stop=learning.done, notify=said.append, simulation=plays
            )
            for name, plays in (("actor-1", False), ("simulation-1", True))
        ]
        assert learning.result(300).reason == "max_steps"
        assert all(one.result(300).steps for one in acting)
    assert not [line for line in said if line.startswith("the learner: ")], "every report was understood"
    return run


def test_a_run_with_a_person_and_groups(played: Path):
    updates = read_metrics(played, ["update"])
    assert [record["groups"] for record in updates] == [2.0] * 4, "every second update has two groups"
    assert all(record["share/groups"] == 8 / 24 for record in updates), "two groups of two episodes of two chunks"
    last = updates[-1]
    decided = [last[f"groups/{name}"] for name in ("used", "no_signal", "too_old", "interrupted")]
    assert sum(decided[:2]) == 8 and decided[2:] == [0, 0]
    reports = [record for record in read_metrics(played, ["actor"]) if record["actor"] == "simulation-1"]
    assert reports and reports[-1]["simulation"]
    with Log.open(played / "log", "r") as log:
        columns = ["group", "member", "source", "record", "decided", "observations/images/wrist"]
        steps = {n: log.read(log.trajectory_keys(n), columns) for n in log.trajectories()}
        facts = {n: log.facts.about(n) for n in log.trajectories()}
    of_groups = {n: read for n, read in steps.items() if read["group"][0] >= 0}
    firsts: dict[int, list[Any]] = {}
    for number, read in of_groups.items():
        assert (read["source"] == Source.POLICY).all() and len(set(read["group"])) == 1
        firsts.setdefault(int(read["group"][0]), []).append(read["observations"]["images"]["wrist"][0])
        if "group" in facts[number]:
            assert facts[number]["member"] == read["member"][0] and not facts[number]["success"]
    assert all(np.array_equal(frames[0], frame) for frames in firsts.values() for frame in frames), "the same state"
    assert len({frames[0].tobytes() for frames in firsts.values()}) > 1, "and each group another one"
    reported = {record["trajectory"] for record in read_metrics(played, ["episode"])}
    assert reported and not reported & set(of_groups), "curves are of what the policy does by itself"
    assert last["step"] <= sum(len(read["group"]) for n, read in steps.items() if n not in of_groups)


@pytest.fixture(scope="module")
def template(played: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of that run as if nothing was learned yet: all of it was acted with the first weights, and in each group
    the first episode succeeded."""
    run = tmp_path_factory.mktemp("template") / "run"
    shutil.copytree(played, run, ignore=shutil.ignore_patterns("checkpoints", "metrics.jsonl", "starts.json", "actors"))
    with Log.open(run / "log") as log:
        for number in log.trajectories():
            keys = log.trajectory_keys(number)
            read = log.read(keys, ["group", "member"])
            log.relabel(number, "policy_version", np.full(len(keys), 1_000_000))
            if read["group"][0] >= 0:
                log.relabel(number, "succeed", np.arange(len(keys)) * (read["member"] == 0) == len(keys) - 1)
    return run


@pytest.fixture(scope="module")
def seen(folder: Path) -> Any:
    return spaces(config(folder))


def learner(template: Path, run: Path, folder: Path, shown: Path, seen: Any, *changes: Any) -> Learner:
    """On a copy of the template, or what became of it."""
    if not run.exists():
        shutil.copytree(template, run)
    settings = {"demo_path": [str(shown)], "steps_per_update": 2, "log_period": 1, "max_steps": 6}
    asked = config(folder, {**settings, "checkpoint_period": 2, "operator": "script"}, "mixed.max_age=100", *changes)
    return Learner(asked, run, resume=True, env=seen, wire=wire())


def run_until_killed(kill_at: int, *given: Any) -> None:
    """In a process of its own, so that nothing that other tests have set in torch changes how numbers are rounded."""
    torch.set_num_threads(1)
    one = learner(*given)

    def stop() -> bool:
        if one.update >= kill_at:
            one._saver.wait(60)
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    one.run(stop)


def test_killed_and_resumed_it_learns_from_each_group_once_and_the_same_bit_for_bit(
    template: Path, tmp_path: Path, folder: Path, shown: Path, seen: Any, fork: Any
):
    given = (folder, shown, seen)
    # one is killed after the update with groups that follows the checkpoint, which is lost
    for name, kill_at, code, *changes in (
        ("whole", 100, 0),
        ("cut", 5, -signal.SIGKILL, "checkpoint_period=3"),
        ("cut", 100, 0, "checkpoint_period=3"),
    ):
        child = fork.Process(target=run_until_killed, args=(kill_at, template, tmp_path / name, *given, *changes))
        child.start()
        child.join(240)
        assert child.exitcode == code
    whole, cut = (load(tmp_path / name, 6) for name in ("whole", "cut"))
    assert different(whole.agent, cut.agent) == {}
    assert whole.state["experience"] == cut.state["experience"]
    assert whole.state["groups"]["decided"] == cut.state["groups"]["decided"]
    assert whole.state["groups"]["totals"] == cut.state["groups"]["totals"] == {"used": 6}
    curves = [
        [(r["update"], r.get("ppo_kl"), r["imitation/loss"], r["groups/used"]) for r in read_metrics(path, ["update"])]
        for path in (tmp_path / "whole", tmp_path / "cut")
    ]
    assert curves[0] == curves[1] and [used for *_, used in curves[0]] == [0, 2, 2, 4, 4, 6]
    assert [kl is not None for _, kl, _, _ in curves[0]] == [False, True] * 3


def different(a: Any, b: Any) -> dict[str, float]:
    """The leaves that are not the same, and by how much."""
    ours, theirs = flatten(a), flatten(b)
    assert ours.keys() == theirs.keys()
    unlike = [path for path in ours if not np.array_equal(ours[path], theirs[path])]
    return {path: float(abs(np.asarray(ours[path], float) - np.asarray(theirs[path], float)).max()) for path in unlike}


def test_groups_that_are_too_old_or_interrupted_are_dropped_and_counted(
    template: Path, tmp_path: Path, folder: Path, shown: Path, seen: Any
):
    shutil.copytree(template, tmp_path / "run")
    with Log.open(tmp_path / "run" / "log") as log:
        first = next(n for n in log.trajectories() if log.read(log.trajectory_keys(n)[:1], ["group"])["group"][0] >= 0)
        log.delete(first)
    given = (template, tmp_path / "run", folder, shown, seen)
    one = learner(*given, "mixed.max_age=1", "max_steps=100")
    mixed = one.config.mixed
    assert (mixed.group_size, mixed.groups, mixed.period) == (2, 2, 2)
    summary = one.run(lambda: bool(one._groups and one._groups._totals["too_old"]))
    # of the weights of update 0: taken by updates 2 and 4, when none and one version were newer; not by update 6
    assert (summary.reason, summary.update) == ("stopped", 5)
    assert read_metrics(tmp_path / "run", ["update"])[-1]["groups/interrupted"] == 1
    assert one._groups is not None and one._groups._totals["used"] == 4 and one._groups.waiting == 0


@pytest.mark.parametrize("imitation", ["hg-dagger", "filtered"])
def test_imitation_takes_nothing_of_groups_not_even_their_successes(
    template: Path, tmp_path: Path, folder: Path, shown: Path, seen: Any, imitation: str
):
    shutil.copytree(template, tmp_path / "run")
    with Log.open(tmp_path / "run" / "log") as log:
        for number in log.trajectories():
            log.annotate(number, success=True)
    one = learner(template, tmp_path / "run", folder, shown, seen, f"mixed.imitation={imitation}")
    data = one.experience
    assert data.groups is not None and len(data.groups) and len(data.human)
    groups, online = set(data.groups.keys().tolist()), set(data.online.keys().tolist())
    imitated = set((data.human | data._successes).keys().tolist())
    assert not groups & (online | imitated) and groups | online == set(data.log.all().keys().tolist())
    assert imitated == (online if imitation == "filtered" else set(data.human.keys().tolist()))
    assert data.total == len(online) and data.counts()["group_steps"] == len(groups)
    batch = data.sample(64, {"hg-dagger": "demo"}.get(imitation, imitation))
    assert batch.counts.keys() == {"demonstrations", "human"} | ({"successes"} if imitation == "filtered" else set())
    one._undo.close()


# What is refused


class Recordless(SmallVLA):
    """A policy that does not say how likely its actions were."""

    def act(self, *given: Any, **named: Any) -> Any:
        actions, record = super().act(*given, **named)
        return actions, {name: array for name, array in record.items() if name != "log_prob"}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (["agent.kind=actor_critic"], "algorithm=mixed with agent.kind=actor_critic: .* Give agent.kind=vla"),
        (["agent.options.server=ws://arm:8000"], "a policy server sends no log-probabilities.*Leave the server out"),
        (["store=trajectories"], "algorithm=mixed with store=trajectories: .* Give store=log"),
        (["mixed.group_size=1"], "mixed.group_size=1: expected"),
        (["mixed.imitation=rlpd"], "imitation.*rlpd"),
        ([{"view_shares": {"successes": 1.0}}], "view_shares has 'successes', and hg-dagger imitates demonstrations"),
        (["mixed.task_options.image_size=8"], "mixed.task_options=.*would do nothing: it needs mixed.task=NAME"),
    ],
)
def test_settings_that_cannot_work_are_refused(folder: Path, changes: list[Any], error: str):
    with pytest.raises((ConfigError, KeyError), match=error):
        check(config(folder, *changes))


def test_a_task_of_groups_that_does_not_fit_is_refused(
    folder: Path, seen: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    check_groups(config(folder), seen)
    with pytest.raises(ConfigError, match=r"algorithm=mixed: .* is an arm, and groups .* Give mixed\.task=NAME"):
        check_groups(config(folder), seen._replace(keeps_rate=True))
    fits = {"task": "tabletop/press_red+tabletop/press_blue", "task_options": OPTIONS}
    check_groups(config(folder, {"mixed": fits}), seen._replace(keeps_rate=True))
    with pytest.raises(ConfigError, match=r"mixed\.task=tabletop/press_red has 1 tasks, and task=.* has 2"):
        check_groups(config(folder, {"mixed": {**fits, "task": "tabletop/press_red"}}), seen)
    with pytest.raises(ConfigError, match=r"has other observations than .*Give it mixed\.task_options"):
        check_groups(config(folder, {"mixed": {**fits, "task_options": {**OPTIONS, "image_size": 8}}}), seen)
    with pytest.raises(ConfigError, match=r"--simulation plays groups .* algorithm=bc learns from none"):
        act(config(folder, "algorithm=bc", {"mixed": {"group_size": 8, "groups": 4, "period": 10}}), tmp_path,
            simulation=True)  # fmt: skip
    monkeypatch.setattr("hilt.hil.agents.vla_options.load_policy", lambda path, **_: Recordless.from_pretrained(path))
    asked = config(folder)
    with pytest.raises(ConfigError, match=r"records no log-probabilities .* Give algorithm=hg-dagger"):
        Learner(asked, tmp_path / "run", env=seen, wire=wire())


def test_hilt_train_starts_the_simulations_that_were_asked_for(folder: Path, tmp_path: Path):
    asked = commands(config(folder, "mixed.simulations=2"), tmp_path)
    assert list(asked) == ["learner", "actor-1", "simulation-1", "simulation-2"]
    assert ["--simulation" in command for command in asked.values()] == [False, False, True, True]
    assert list(commands(config(folder, "mixed.simulations=0"), tmp_path)) == ["learner", "actor-1"]
