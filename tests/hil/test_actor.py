"""The actor beside a learner that does nothing but receive, publish and answer; both are real, over a real wire."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict

from hilt.core.errors import ConfigError, DeadlineError, RefusedError, SchemaError
from hilt.core.trajectory import Source
from hilt.hil.actor import Acted, Weights, act, reward_columns
from hilt.hil.config import Hil, ValueUse, Wire, of_run
from hilt.hil.environment import make_env, spaces, trainer_config
from hilt.hil.importing import columns_for
from hilt.policies import precision
from hilt.policies.agent.agent import Agent
from hilt.policies.agent.config import AgentConfig, EncoderConfig
from hilt.recording.recording_folder import nested
from hilt.replay import Channel, Log, QueuedDataStore, Schema
from hilt.runs.acted_journal import ActedJournal
from hilt.teleop.devices import Device, Reading
from hilt.value.online_value import OnlineValue
from hilt.value.value_model import load_value_model
from hilt.wire import TrainerServer
from hilt.wire.keys import new_keys
from tests.hil.toy import Toy
from tests.value.valued import save_untrained
from tests.wire.processes import free_port

DEADLINE_S = 120.0


class Told(Toy):
    """Notes what it was asked, and may have a take-over of its own, as HIL-SERL's environments have."""

    starts: ClassVar[list[tuple[str, int]]] = []
    actions: ClassVar[list[list[float]]] = []

    def __init__(self, own_person: bool = False, at: int = 0, **options: Any):
        super().__init__(**options)
        self._own_person, self._at = own_person, at

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        Told.starts.append(((options or {})["split"], (options or {})["state"]))
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        Told.actions.append(np.asarray(action).tolist())
        *result, info = super().step(action)
        return (
            (*result, {**info, "intervene_action": np.full(3, 0.25)})
            if self._own_person and (self.steps == self._at if self._at else self.steps % 2)
            else (*result, info)
        )  # type: ignore[return-value]


class Paid(Told):
    """An environment whose own info has a reward of the same name as Hilt's once had."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *result, info = super().step(action)
        return (*result, {**info, "task_reward": 99.0})  # type: ignore[return-value]


class Flat(Toy):
    """One vector to see, and seven numbers to act with: an environment of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space, self.action_space = (
            Dict({"state": Box(-1, 1, (2,), np.float32)}),
            Box(-1, 1, (7,), np.float32),
        )

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return super().step(action[:3])

    def _seen(self) -> Any:
        return {"state": np.zeros(2, np.float32)}


class Hand(Device):
    """Presses, and loses contact, at given steps."""

    gives_actions = True

    def __init__(self, lost: int = -1, stop: int = -1):
        super().__init__()
        self._lost, self._stop, self._step = lost, stop, 0

    def read(self) -> Reading:
        self._step += 1
        return Reading(lost=self._step == self._lost, events=("stop",) if self._step == self._stop else ())


class Learner:
    """What an actor needs of one. Weights of version v let the policy give tanh(v / 10), nearly."""

    def __init__(self, config: Hil, folder: Path, run: str = "this run"):
        self.config, self.run, self.over, self.update, self.told = config, run, False, 0, []  # type: ignore[var-annotated]
        self.limit, self.precision = 0, {}  # type: ignore[var-annotated]
        space = spaces(config)
        columns = columns_for(config, make_env(config, False))
        self.log = Log.open(folder) if (folder / "log.json").exists() else Log.create(folder, Schema.declare(columns))
        self._agent = Agent.make(nested(space.observation_space), space.action_space, config.agent)
        if config.help.quantile:
            self._agent.measure_disagreement()
        self.server = TrainerServer(trainer_config(config, learner=True), request_callback=self._answer)
        self.episodes: Channel[Any] = Channel()
        if config.store == "log":
            self.server.register_data_store(of_run(run), self.log)
        else:
            self.server.register_channel(of_run(run, "trajectories"), self.episodes)
        self.server.start(threaded=True)

    def _answer(self, _: str, payload: Any) -> dict[str, Any]:
        self.told.append(payload)
        left = {"left": self.limit - len(self.log)} if self.limit else {}
        return {
            "stop": self.over,
            "update": self.update,
            "online": len(self.log),
            "run": self.run,
            **self.precision,
            **left,
        }

    def publish(self, version: int, mean: float | None = None) -> None:
        weights = self._agent.acting_state()
        state = {key: value if key.startswith("critic.") else np.zeros_like(value) for key, value in weights.items()}
        actions = len(state["actor.mlp.out.bias"]) // 2
        # mean, and log of the standard deviation
        state["actor.mlp.out.bias"] = np.repeat(np.float32([version / 10 if mean is None else mean, -30]), actions)
        self.server.publish_network(state, version)

    def wait(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not ready():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def column(self, *names: str) -> list[Any]:
        read = self.log.read(self.log.all().keys(), list(names))
        return [read[name] for name in names]

    def close(self) -> None:
        self.server.stop()
        self.log.close()


def config(**settings: Any) -> Hil:
    task = {"task": f"{__name__}:Told", "task_options": {"delay": 0.002}}
    agent = AgentConfig(encoder=EncoderConfig(kind="none"), hidden=[8])
    return Hil(**{**task, "agent": agent, "wire": Wire(port=free_port(), broadcast_port=free_port()), **settings})


@pytest.fixture
def learner(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Learner]:
    Told.starts, Told.actions = [], []
    monkeypatch.setattr("hilt.hil.actor.FLUSH_S", DEADLINE_S)  # a machine that stands still delivers late
    learner = Learner(config(**getattr(request, "param", {})), tmp_path / "log")
    yield learner
    learner.close()


def acting(
    learner: Learner, folder: Path, until: Callable[[], bool], name: str = "actor-1", said: list[str] | None = None
) -> Acted:
    """Acts in this thread until that holds."""
    deadline = time.monotonic() + DEADLINE_S
    lines = [] if said is None else said

    def stop() -> bool:
        assert time.monotonic() < deadline, f"it took too long; the actor said {lines}"
        return until()

    return act(learner.config, folder, name, stop=stop, notify=lines.append)


@pytest.mark.parametrize("learner", [{"random_steps": 9}], indirect=True)
def test_random_steps_come_first_and_every_step_carries_the_weights_that_made_it(learner: Learner, tmp_path: Path):
    learner.publish(1)
    said: list[str] = []
    newest = [1]

    def until() -> bool:
        count, have = len(learner.log), newest[0]
        if count >= 15 * have and (learner.column("policy_version")[0] == have).any():  # in the middle of an episode
            if have < 4:
                newest[0] += 1
                learner.publish(newest[0])
            else:
                learner.over = count > 70
        return False

    acted = acting(learner, tmp_path / "actor", until, said=said)
    assert acted.reason == "the run has ended" and acted.spooled == 0 and acted.steps == len(learner.log)
    sources, versions, actions = learner.column("source", "policy_version", "actions")
    assert sources.tolist() == [Source.RANDOM] * 9 + [Source.POLICY] * (len(sources) - 9)
    assert (
        versions[:9].tolist() == [-1] * 9
        and sorted(set(versions[9:].tolist())) == [1, 2, 3, 4]
        and (np.diff(versions[9:]) >= 0).all()
    )
    np.testing.assert_allclose(actions[9:], np.repeat(np.tanh(versions[9:, None] / 10), 3, 1), atol=1e-4)
    assert np.abs(np.diff(actions[:9, 0])).min() > 0, "random ones differ"
    # what the environment got is what the log has, and it began in all states of `train` before any came again
    np.testing.assert_array_equal(np.array(Told.actions, np.float32), actions)
    assert {split for split, _ in Told.starts} == {"train"} and sorted(state for _, state in Told.starts[:8]) == list(
        range(8)
    )
    assert (
        learner.told[0] == {"actor": "actor-1"}
        and learner.told[-1]["bye"]
        and learner.told[-1]["steps"] == len(sources)
    )
    assert any(line.startswith("episode 1: 6 steps, no success, return 0; weights") for line in said)


@pytest.mark.parametrize(
    "learner",
    [{"random_steps": 20, "agent": AgentConfig(encoder=EncoderConfig(kind="none"), hidden=[8], action_indices=[0, 2])}],
    indirect=True,
)
def test_random_steps_leave_alone_what_the_policy_never_moves(learner: Learner, tmp_path: Path):
    acting(learner, tmp_path / "actor", lambda: len(learner.log) >= 20)
    sources, actions = learner.column("source", "actions")
    assert set(sources.tolist()) == {Source.RANDOM} and len(actions) >= 20
    assert (actions[:, 1] == 0).all() and (np.array(Told.actions)[:, 1] == 0).all(), "an arm would have turned"
    assert np.abs(actions[:, [0, 2]]).max(0).min() > 0.3


def test_actor_without_weights_waits_and_gives_up(learner: Learner, tmp_path: Path):
    said: list[str] = []
    report = lambda phase, note="": said.append(f"{phase}: {note}")  # noqa: E731
    with pytest.raises(
        DeadlineError,
        match=rf"no weights from 127.0.0.1:{learner.config.wire.broadcast_port} yet, after 3 s: look at",
    ):
        act(learner.config, tmp_path / "actor", report=report, learner_timeout_s=3)
    where = f"127.0.0.1:{learner.config.wire.broadcast_port}"
    assert not Told.actions and not Told.starts and said[-1] == f"episode 1: waiting: no weights from {where} yet"
    nobody = config()
    with pytest.raises(
        DeadlineError, match=rf"at 127.0.0.1:{nobody.wire.port} yet \(nothing can be reached there .*\), after"
    ):
        act(nobody, tmp_path / "other", learner_timeout_s=0.1)


LOOKS = {"agent": AgentConfig(encoder=EncoderConfig(kind="small", features=4), hidden=[8])}


@pytest.mark.parametrize("learner", [LOOKS], indirect=True)
@pytest.mark.parametrize(
    ("own", "told", "computes"),
    [("auto", "bfloat16", "bfloat16"), ("float32", "bfloat16", "float32"), ("auto", "", "auto")],
)
def test_actor_uses_the_precision_of_the_run_unless_its_own_is_set(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, told: str, computes: str
):
    """On a machine on which bfloat16 is emulated, which it says."""
    monkeypatch.setattr(precision, "_by_instructions", lambda: "float32")
    monkeypatch.setattr(precision, "trial", lambda: precision.Trial(0.04, 1.0))
    made: list[Agent] = []
    make = Agent.make
    monkeypatch.setattr(Agent, "make", lambda *given: made.append(make(*given)) or made[-1])
    learner.precision, learner.config.agent.encoder.precision = ({"precision": told} if told else {}), own
    learner.publish(1)
    said: list[str] = []
    acting(learner, tmp_path / "actor", lambda: len(Told.actions) >= 3, said=said)
    assert made[-1].encoder.config.precision == computes and learner.config.agent.encoder.precision == own
    slow = (
        "precision: bfloat16 is at least 25 times slower than float32 on this CPU: a run with "
        "agent.encoder.precision=float32 would"
    )
    assert any(line.startswith(slow) for line in said) == (computes == "bfloat16")


@pytest.mark.parametrize("learner", [{"random_steps": 10}], indirect=True)
def test_a_restarted_actor_goes_on_counting_and_waits_for_weights_again(learner: Learner, tmp_path: Path):
    acting(learner, tmp_path / "actor", lambda: len(Told.actions) >= 7)
    assert len(Told.starts) == 2
    with pytest.raises(DeadlineError, match="no weights"):
        act(learner.config, tmp_path / "actor", learner_timeout_s=3)
    learner.publish(1)
    before = len(Told.actions)
    assert before == 10, "the rest of the random steps, and not one with its own weights"
    acting(learner, tmp_path / "actor", lambda: len(learner.log) >= 40)
    assert learner.column("source")[0][:40].tolist() == [Source.RANDOM] * 10 + [Source.POLICY] * 30
    seen = [state for _, state in Told.starts]
    assert sorted(seen[:8]) == list(range(8)), "over three lives, no state came twice before all were there"
    Told.starts.clear()
    acting(learner, tmp_path / "actor-2", lambda: len(Told.starts) >= 4, "actor-2")
    assert [state for _, state in Told.starts[:4]] != seen[:4], "another actor has another order"


@pytest.mark.parametrize("learner", [{"task_options": {"own_person": True}}], indirect=True)
def test_a_take_over_of_the_environments_own_counts_as_a_persons(learner: Learner, tmp_path: Path):
    learner.publish(5)
    acting(learner, tmp_path / "actor", lambda: len(learner.log) >= 12)
    sources, versions, actions = learner.column("source", "policy_version", "actions")
    odd = np.arange(6) % 2 == 0  # the first step of an episode is its number 1
    assert sources[:6].tolist() == [Source.HUMAN if person else Source.POLICY for person in odd]
    assert versions[:6].tolist() == [-1 if person else 5 for person in odd]
    np.testing.assert_allclose(actions[:6, 0], np.where(odd, 0.25, np.tanh(0.5)), atol=1e-4)


@pytest.mark.parametrize(
    "learner",
    [
        {
            "task_options": {"own_person": True, "at": 5},
            "agent": AgentConfig(encoder=EncoderConfig(kind="none"), hidden=[8], chunk=3),
        }
    ],
    indirect=True,
)
def test_chunks_are_executed_without_looking_and_a_take_over_drops_the_rest(learner: Learner, tmp_path: Path):
    """The log has what was executed, and which weights decided it."""
    state = {key: np.zeros_like(value) for key, value in learner._agent.acting_state().items()}
    means = np.repeat(np.float32([0.1, 0.2, 0.3]), 3)  # three numbers of each of three actions
    state["actor.mlp.out.bias"] = np.concatenate([means, np.full(9, -30, np.float32)])
    learner.server.publish_network(state, 7)
    acting(learner, tmp_path / "actor", lambda: len(learner.log) >= 13)
    names = ("source", "chunk", "chunk_index", "actions", "policy_version", "truncated")
    sources, numbers, places, actions, versions, truncated = (column[:12].tolist() for column in learner.column(*names))
    assert truncated == 2 * [*(5 * [False]), True]
    assert sources == 2 * [*(4 * [Source.POLICY]), Source.HUMAN, Source.POLICY]
    assert places == 2 * [0, 1, 2, 0, -1, 0]
    assert numbers == 2 * [0, 0, 0, 1, -1, 2]
    assert versions == 2 * [7, 7, 7, 7, -1, 7]
    expected = [0.25 if place < 0 else np.tanh(means[3 * place]) for place in places]
    np.testing.assert_allclose([action[0] for action in actions], expected, atol=1e-4)


@pytest.mark.parametrize(
    "learner", [{"operator": f"{__name__}:Hand", "operator_options": {"lost": 3, "stop": 8}}], indirect=True
)
def test_lost_contact_is_a_column_and_stop_ends_the_run(learner: Learner, tmp_path: Path):
    learner.publish(1)
    acted = acting(learner, tmp_path / "actor", lambda: False)
    assert acted.reason == "stop was pressed" and acted.steps == 7 and learner.told[-1]["stop"] is True
    lost, sources, truncated = learner.column("lost", "source", "truncated")
    assert lost.tolist() == [step == 2 for step in range(7)] and sources[2] == Source.HUMAN
    assert truncated.tolist() == [step in (5, 6) for step in range(7)]


def test_actor_continues_without_the_learner_and_loses_nothing(learner: Learner, tmp_path: Path):
    learner.publish(1)
    again: list[Learner] = []
    done = threading.Event()

    def life() -> None:
        learner.wait(lambda: len(learner.log) >= 10)
        learner.close()
        have = len(Told.actions)
        learner.wait(lambda: len(Told.actions) >= have + 50)  # it never waits for the network
        again.append(Learner(learner.config, tmp_path / "log"))
        again[0].wait(lambda: len(again[0].log) >= have + 60)
        done.set()

    thread = threading.Thread(target=life)
    thread.start()
    acted = acting(learner, tmp_path / "actor", done.is_set)
    thread.join(DEADLINE_S)
    (learner_again,) = again
    assert acted.reason == "stopped" and acted.spooled == 0
    np.testing.assert_array_equal(learner_again.column("actions")[0], np.array(Told.actions, np.float32))
    assert set(learner_again.column("policy_version")[0].tolist()) == {1}
    learner_again.close()


@pytest.mark.parametrize("learner", [{"max_ahead": 30, "updates_per_step": 4.0, "task_options": {}}], indirect=True)
def test_updates_per_step_make_a_simulation_wait_longer(learner: Learner, tmp_path: Path):
    learner.publish(1)
    over = threading.Event()
    thread = threading.Thread(target=lambda: acting(learner, tmp_path / "actor", over.is_set))
    thread.start()

    def stands() -> int:
        """The number of steps when it waits for the learner: then it asks ten times a second, and reports nothing."""
        heard = len(learner.told)
        learner.wait(lambda: sum(set(told) == {"actor"} for told in learner.told[heard:]) > 5)
        learner.wait(lambda: len(learner.log) == len(Told.actions))
        return len(learner.log)

    try:
        first = stands()
        learner.update = 4 * (first - 30 + 20)
        learner.wait(lambda: len(learner.log) > first)
        assert first < stands() <= first + 25, "20, and the few that were on their way; with one update a step 80"
    finally:
        over.set()
        thread.join(DEADLINE_S)


@pytest.mark.parametrize("learner", [{"max_ahead": 30, "task_options": {}}], indirect=True)
def test_a_simulation_does_not_outrun_the_learner_but_acts_on_when_that_is_gone(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hilt.hil.actor.ANSWER_S", 2.0)
    monkeypatch.setattr("hilt.hil.actor.FLUSH_S", 1.0)
    learner.publish(1)
    acted: list[Acted] = []
    thread = threading.Thread(
        target=lambda: acted.append(acting(learner, tmp_path / "actor", lambda: len(Told.actions) >= 400))
    )
    thread.start()
    learner.wait(
        lambda: learner.told and learner.told[-1].get("steps", 0) > 0 and len(learner.log) == len(Told.actions)
    )
    # it waits now, and asks ten times a second
    learner.wait(lambda: sum(set(told) == {"actor"} for told in learner.told) > 5)
    stands = len(learner.log)
    assert 30 <= stands < 400
    learner.update = 60
    learner.wait(lambda: len(learner.log) > stands)
    learner.close()
    thread.join(DEADLINE_S)
    assert acted[0].steps == len(Told.actions) >= 400


@pytest.mark.parametrize("limit", [3, 77])
def test_actor_makes_at_most_max_env_steps(learner: Learner, tmp_path: Path, limit: int):
    learner.publish(1)
    acting(learner, tmp_path / "actor", lambda: len(Told.actions) >= 2)  # of an earlier life, here or in the spool
    learner.limit, since = limit, []  # type: ignore[var-annotated]

    def still() -> bool:
        since.extend([time.monotonic()] if len(learner.log) >= limit else [])
        return bool(since) and time.monotonic() - since[0] > 0.5

    acting(learner, tmp_path / "actor", still)
    assert len(learner.log) == len(Told.actions) == limit, "exactly; then it waits for the word of the learner"


class Silent(Toy):
    """Says nothing of success, or only at the end."""

    def __init__(self, ends: bool = False, **options: Any):
        super().__init__(**options)
        self._ends = ends

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        *result, info = super().step(action)
        return (*result, info if self._ends and (result[2] or result[3]) else {})  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        ({"task": f"{__name__}:Silent", "task_options": {"ends": ends}}, words)
        for ends, words in ((False, "no"), (True, "yes"))
    ],
    indirect=["learner"],
)
def test_actor_reports_whether_success_is_known(learner: Learner, tmp_path: Path, words: str):
    learner.publish(1)
    acting(learner, tmp_path / "actor", lambda: any(told.get("says_success") == words for told in learner.told))
    assert {told["says_success"] for told in learner.told if "says_success" in told} <= {"not yet", words}


def test_a_spool_of_another_run_is_not_sent_into_this_one(learner: Learner, tmp_path: Path):
    learner.publish(1)
    acting(learner, tmp_path / "actor", lambda: len(learner.log) >= 1)
    learner.close()
    other = Learner(replace(learner.config, random_steps=5), tmp_path / "other", run="another run")
    other.publish(1)
    acting(other, tmp_path / "actor", lambda: len(other.log) >= 20)  # nothing waited in it: it belongs to that one now
    assert (other.column("source")[0] == Source.RANDOM).sum() == 5, "its first steps are counted anew"
    other.close()
    with_steps = QueuedDataStore(10, path=tmp_path / "actor" / "spool")
    with_steps.insert({"actions": np.zeros(3)})
    with_steps.close()
    third = Learner(learner.config, tmp_path / "third", run="a third")
    with pytest.raises(
        ConfigError, match=r"has 1 steps that the learner of another run has not got.* another folder with --spool"
    ):
        act(learner.config, tmp_path / "actor", learner_timeout_s=DEADLINE_S)
    third.close()


def test_a_learner_of_another_run_at_the_same_place_gets_nothing_of_an_actor_that_lives_on(
    learner: Learner, tmp_path: Path
):
    learner.publish(1)
    other: list[Learner] = []

    def life() -> None:
        learner.wait(lambda: len(learner.log) >= 10)
        learner.close()
        other.append(Learner(learner.config, tmp_path / "other", run="another run"))

    thread = threading.Thread(target=life)
    thread.start()
    with pytest.raises(RefusedError, match=r"it is of another run\. \d+ steps wait in .*actor for their own"):
        acting(learner, tmp_path / "actor", lambda: False)
    thread.join(DEADLINE_S)
    assert not len(other[0].log)
    other[0].close()
    back = Learner(learner.config, tmp_path / "log")
    back.publish(2)
    spooled = len(Told.actions)
    acting(back, tmp_path / "actor", lambda: len(back.log) >= spooled)
    np.testing.assert_array_equal(back.column("actions")[0], np.array(Told.actions, np.float32)[: len(back.log)])
    back.close()


@pytest.mark.parametrize("learner", [{"store": "trajectories"}], indirect=True)
def test_episodes_are_sent_whole_where_the_learner_keeps_trajectories(learner: Learner, tmp_path: Path):
    learner.publish(1)
    acted = acting(learner, tmp_path / "actor", lambda: len(Told.actions) >= 20)
    got = [learner.episodes.get(timeout=DEADLINE_S) for _ in range(3)]
    assert [item["actor"] for item in got] == ["actor-1"] * 3 and len(got[0]["trajectory"]["rewards"]) == 6
    assert acted.spooled == 1, "the unfinished one: nothing is kept on the disk here"


def test_with_keys_only_who_has_one_comes_in(tmp_path: Path):
    Told.actions = []
    new_keys(tmp_path / "keys", ["learner", "arm"])
    with_keys = config(wire=Wire(port=free_port(), broadcast_port=free_port(), keys=str(tmp_path / "keys")))
    learner = Learner(with_keys, tmp_path / "log")
    learner.publish(1)
    acting(learner, tmp_path / "actor", lambda: len(learner.log) >= 5)
    before = len(Told.actions)
    stranger = replace(with_keys, wire=replace(with_keys.wire, keys=""))
    with pytest.raises(RefusedError, match=r"the learner there has keys .* this side has none: .* wire\.keys=FOLDER"):
        act(stranger, tmp_path / "stranger")
    assert before == len(Told.actions) >= 5
    learner.close()


def test_settings_that_differ_are_refused_before_anything_moves(learner: Learner, tmp_path: Path):
    learner.config.agent.hidden = [16]
    with pytest.raises(
        RefusedError, match=r"the settings differ: version is .*\[16\].* there and .*\[8\].* at the learner"
    ):
        act(learner.config, tmp_path / "actor", learner_timeout_s=DEADLINE_S)
    assert not Told.starts


def test_steps_that_the_learner_refuses_are_an_error_with_its_reason(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    learner.publish(1)
    seen = {"state": {"left/point": np.zeros(3, np.float32)}, "images": {"front": np.zeros((8, 8, 3), np.uint8)}}
    monkeypatch.setattr(Told, "_seen", lambda self: seen)
    with pytest.raises(
        RefusedError, match=r"the learner refuses this actor's steps: .*images/front.* Give both sides the same recipe"
    ):
        acting(learner, tmp_path / "actor", lambda: False)


@pytest.mark.parametrize("learner", [{"control_hz": 50.0, "task_options": {}}], indirect=True)
def test_actor_keeps_the_control_rate_and_reports_lateness(learner: Learner, tmp_path: Path):
    learner.publish(1)
    acting(learner, tmp_path / "actor", lambda: len(learner.log) >= 30)
    (times,) = learner.column("times")
    assert (times["observed"] <= times["sent"]).all() and (times["sent"] <= times["applied"]).all()
    assert np.median(np.diff(times["sent"])) > 0.015, "about 50 steps a second, where it could do hundreds"
    assert (
        learner.told[-1]["lateness_p99_ms"] >= learner.told[-1]["lateness_p50_ms"] >= 0 and "missed" in learner.told[-1]
    )


def test_an_environment_that_keeps_its_own_rate_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Told, "timing", lambda self: {}, raising=False)
    with pytest.raises(ConfigError, match=r"control_hz=7, and .* keeps 200 Hz itself"):
        act(config(control_hz=7.0), tmp_path / "actor", learner_timeout_s=0.1)
    with pytest.raises(DeadlineError):
        act(config(control_hz=200.0), tmp_path / "actor", learner_timeout_s=0.1)


@pytest.mark.parametrize(
    "learner",
    [
        {
            "task": f"{__name__}:Flat",
            "task_options": {},
            "agent": AgentConfig("single-arm-learned-gripper", EncoderConfig(kind="none")),
        }
    ],
    indirect=True,
)
def test_a_learned_gripper_needs_a_penalty(learner: Learner, tmp_path: Path):
    learner.publish(1)
    with pytest.raises(SchemaError, match="info has no grasp_penalty, which single-arm-learned-gripper learns from"):
        act(learner.config, tmp_path / "actor", learner_timeout_s=DEADLINE_S)


def test_weights_are_taken_once_with_their_version_and_the_newest_wins():
    weights = Weights()
    weights.arrived("a")
    assert weights.take() is None, "they have no number yet"
    weights.numbered(1)
    weights.arrived("b")
    assert weights.take() == ("a", 1)
    weights.numbered(2)
    weights.arrived("c")
    weights.numbered(3)
    assert weights.take() == ("c", 3) and weights.take() is None


def test_weights_that_come_while_others_are_taken_are_not_lost():
    class Late(Weights):
        """The next ones arrive just after it has looked."""

        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name == "_newest" and found is self.__dict__["_newest"] and not self.__dict__.get("came"):
                self.__dict__["came"] = True
                self.arrived("b")
                self.numbered(2)
            return found

    weights = Late()
    assert weights.take() is None and weights.take() == ("b", 2)


def test_the_journal_counts_over_lives(tmp_path: Path):
    for life in range(3):
        journal = ActedJournal(tmp_path / "acted")
        assert (journal.episodes, journal.steps) == (life, 2 * life) and journal.begin_episode() == life
        journal.step()
        journal.step()
        journal.close()


def test_steps_have_the_reward_of_the_task_and_the_dense_one_beside_it(tmp_path: Path):
    model = save_untrained(tmp_path / "value", {"observations/state/left/point": 3})
    use = {"task": f"{__name__}:Paid", "value": ValueUse(str(model), reward=2.0)}
    learner = Learner(config(**use), tmp_path / "log")
    learner.publish(1)
    acting(learner, tmp_path / "actor", lambda: len(learner.log) >= 12)
    rewards, dense, succeed = learner.column("rewards", "shaping_reward", "succeed")
    assert rewards.tolist() == succeed.astype(float).tolist(), "the reward of the toy is its success"
    value, steps = OnlineValue(load_value_model(model)), learner.log.read(learner.log.all().keys())
    seen = [
        np.array([value({"state": {"left/point": row}})[0] for row in steps[name]["state"]["left"]["point"]])
        for name in ("observations", "next_observations")
    ]
    want = 2 * (learner.config.agent.rlpd.discount * seen[1] * ~steps["terminated"].astype(bool) - seen[0])
    np.testing.assert_allclose(dense, want, rtol=1e-4, atol=1e-5)
    learner.close()


def test_an_episode_that_a_value_model_ends_is_marked_in_the_log(tmp_path: Path):
    """So that no model is trained later on an outcome that nobody knows."""
    model = save_untrained(tmp_path / "value", {"observations/state/left/point": 3})
    use = {"task": f"{__name__}:Paid", "value": ValueUse(str(model), stop_below=0.999, stop_patience=2)}
    learner = Learner(config(**use), tmp_path / "log")
    learner.publish(1)
    acting(learner, tmp_path / "actor", lambda: len(learner.log) >= 12)
    chances, truncated = learner.column("stopped_by_value", "truncated")
    assert truncated.any() and ((chances >= 0) == truncated.astype(bool)).all() and (chances < 0.999).all()
    learner.close()


@pytest.mark.parametrize("learner", [{"task": f"{__name__}:Paid"}], indirect=True)
def test_the_info_of_an_environment_does_not_replace_its_reward(learner: Learner, tmp_path: Path):
    learner.publish(1)
    acting(learner, tmp_path / "actor", lambda: len(learner.log) >= 12)
    rewards, succeed = learner.column("rewards", "succeed")
    assert rewards.tolist() == succeed.astype(float).tolist()


@pytest.mark.parametrize(
    ("dense", "logged", "shaping"), [(0.0, 0.5, {}), (2.0, 0.25, {"shaping_reward": np.float32(0.25)})]
)
def test_the_reward_of_the_task_is_looked_for_only_with_a_dense_one(
    dense: float, logged: float, shaping: dict[str, Any]
):
    found = reward_columns(0.5, {"hilt/task_reward": 0.25}, config(value=ValueUse("m", reward=dense)))
    assert found == {"rewards": np.float32(logged), **shaping}
