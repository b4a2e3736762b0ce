"""RLDS steps as trajectories, and into a log, a queue, a client and an observer.
tests/peers/test_rlds.py has the real ones."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, HiltError, SchemaError
from hilt.formats.episodes import StoredSteps
from hilt.formats.rlds import (
    InvalidArgumentError,
    Trajectory,
    convert_rlds_to_trajectories,
    create_log_schema,
    create_trajectory_data_spec,
    push_rlds_to_reverb,
)
from hilt.replay import Log, QueuedDataStore, ReplayBufferDataStore, Schema
from tests.effort import rounds
from tests.formats.rlds_steps import LAST, MID, TERMINAL, as_numbers, episode, expected, random_episodes, step
from tests.wire.pair import FLUSH_MS, Pair

NO_STEPS = "No dataset representing RLDS steps exist in the data."
FEATURES = "['observation', 'action', 'reward', 'discount', 'is_first', 'is_last', 'is_terminal']"


def converted(data: Any, **options: Any) -> tuple[list[tuple[Any, ...]], str | None]:
    found = []
    try:
        for trajectory in convert_rlds_to_trajectories(data, **options):
            found.append(as_numbers(trajectory))
    except InvalidArgumentError as error:
        return found, str(error)
    return found, None


def types(data: Any) -> list[tuple[int, int]]:
    return [(one[0], one[4]) for one in converted(data)[0]]


# Trajectories


@settings(deadline=None, max_examples=rounds(80, 1000))
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.03, 0.2]))
def test_every_step_and_every_error_is_as_tf_agents_has_it(seed: int, spoil: float) -> None:
    episodes = random_episodes(np.random.default_rng(seed), spoil)
    assert converted(episodes) == expected(episodes)
    columns = [
        {"steps": StoredSteps({k: np.stack([one[k] for one in e["steps"]]) for k in e["steps"][0]})} for e in episodes
    ]
    assert converted(columns) == expected(episodes)


def test_the_types_of_a_trajectory_are_those_of_tf_agents() -> None:
    trajectory = next(iter(convert_rlds_to_trajectories([episode(1, 3)])))
    assert type(trajectory) is Trajectory
    assert trajectory._fields == (
        "step_type",
        "observation",
        "action",
        "policy_info",
        "next_step_type",
        "reward",
        "discount",
    )
    assert (
        trajectory.step_type.dtype == trajectory.next_step_type.dtype == np.int32
        and trajectory.discount.dtype == np.float32
    )
    assert trajectory.observation.dtype == np.float32 and trajectory.policy_info == ()


def test_plain_numbers_get_the_types_that_tensorflow_gives_them() -> None:
    plain = {
        "observation": [1, 2],
        "action": 0.1,
        "reward": 1.0,
        "discount": 1.0,
        "is_first": True,
        "is_last": True,
        "is_terminal": False,
    }
    (trajectory,) = convert_rlds_to_trajectories([{"steps": [plain]}])
    assert (
        trajectory.observation.dtype == np.int32
        and trajectory.action == np.float32(0.1)
        and trajectory.reward.dtype == np.float32
    )


def test_nested_observations_and_actions_are_those_of_the_step() -> None:
    """Upstream's keep the pair: [2, ...]."""
    steps = [
        step(i, i == 0, i == 2, observation={"a": {"b": np.full(3, i)}, "c": np.int8(i)}, action={"d": np.float64(i)})
        for i in range(3)
    ]
    found = list(convert_rlds_to_trajectories([{"steps": steps}]))
    assert [t.observation["a"]["b"].tolist() for t in found] == [[0] * 3, [1] * 3, [2] * 3]
    assert [t.observation["c"] for t in found] == [0, 1, 2] and found[0].observation["c"].dtype == np.int8
    assert [t.action["d"] for t in found] == [0.0, 1.0, 2.0] and found[0].action["d"].dtype == np.float64


STRICT = {
    "single step that is not the last": (
        [[step(0, first=True)], episode(1, 2)["steps"]],
        (0, 0),
        "is not the last must not be followed by another",
    ),
    "two first steps": (
        [[step(0, first=True), *episode(1, 3)["steps"]]],
        (0, 0),
        "must not follow a first step of the same episode",
    ),
    "begins with mid": ([[step(0), step(1), step(2, last=True)]], (0, 0), "An episode must begin with a first step"),
    "the second": (
        [episode(0, 2)["steps"], [step(0, first=True)]],
        (1, 0),
        "is not the last must not be followed by another",
    ),
}


@pytest.mark.parametrize("name", STRICT)
def test_strict_rejects_what_upstream_lets_pass(name: str) -> None:
    steps, place, said = STRICT[name]
    data = [{"steps": one} for one in steps]
    assert converted(data) == expected(data) and converted(data)[1] is None
    with pytest.raises(InvalidArgumentError, match=said) as caught:
        list(convert_rlds_to_trajectories(data, strict=True))
    assert (caught.value.episode, caught.value.step) == place


def test_strict_lets_right_episodes_pass() -> None:
    data = [episode(0, 3), episode(5, 1), episode(6, 2, terminal=False)]
    assert converted(data, strict=True) == expected(data)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("value", ["nan", "zero", "absent", "none", "inf"])
def test_a_last_step_may_have_anything_and_nothing_harmful_comes_of_it(value: str, terminal: bool) -> None:
    data = [episode(0, 2, terminal), episode(5, 3, terminal), episode(9, 1, terminal)]
    for one in data:
        last = one["steps"][-1]
        for name in ("action", "reward", "discount"):
            if value == "absent":
                del last[name]
            else:
                last[name] = {
                    "nan": np.float32(np.nan),
                    "zero": np.float32(0),
                    "none": None,
                    "inf": np.float32(np.inf),
                }[value]
    ends = [t for t in convert_rlds_to_trajectories(data, strict=True) if t.step_type == 2]
    assert len(ends) == 3
    for t in ends:
        assert (t.action, t.reward, t.discount) == (0, 0, 0 if terminal or value == "zero" else 1)
        assert t.action.dtype == t.reward.dtype == np.float32
    finite = {
        "observations": ("f4", (2,)),
        "next_observations": ("f4", (2,)),
        "actions": ("f4", (), True),
        "rewards": ("f4", (), True),
    }
    with Log.anonymous(Schema.declare({**finite, "discount": ("f4", (), True)})) as log:
        assert push_rlds_to_reverb(data, log) == 6
        assert np.isfinite(log.all().sample(50)["rewards"]).all() and len(log) == 3


def test_elsewhere_every_feature_must_be_there_whatever_it_holds() -> None:
    data = [episode(0, 3)]
    data[0]["steps"][1]["reward"] = np.float32(np.nan)
    assert np.isnan(converted(data)[0][1][5])
    del data[0]["steps"][1]["reward"]
    with pytest.raises(ValueError, match="Invalid RLDS step spec"):
        converted(data)


def test_the_whole_of_a_nested_action_may_be_absent_at_the_end() -> None:
    steps = [step(i, i == 0, action={"arm": np.ones(2, np.int64), "grip": np.ones((), np.float32)}) for i in range(2)]
    data = [{"steps": [*steps, {k: v for k, v in step(2, last=True).items() if k != "action"}]}]
    last = list(convert_rlds_to_trajectories(data))[-1]
    assert last.action["arm"].tolist() == [0, 0] and last.action["arm"].dtype == np.int64 and last.action["grip"] == 0


def test_policy_info_is_made_from_the_step_and_the_next() -> None:
    def info(now: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        return {"next": after["observation"], "ends": bool(after["is_first"])}

    found = [t.policy_info for t in convert_rlds_to_trajectories([episode(1, 2), episode(7, 1)], info)]
    assert [i["next"].tolist() for i in found] == [[2, -2], [7, -7], [0, 0]] and [i["ends"] for i in found] == [
        False,
        True,
        True,
    ]


def test_nothing_is_read_before_it_is_asked_for() -> None:
    read = []

    def episodes() -> Iterator[dict[str, Any]]:
        for i in range(5):
            read.append(i)
            yield {"steps": iter(episode(10 * i, 2)["steps"])}

    found = iter(convert_rlds_to_trajectories(episodes()))
    assert read == [0]
    assert as_numbers(next(found))[2] == 0
    assert read == [0, 1]  # the type of the next step
    assert [as_numbers(t)[2] for t in found] == [10, 100, 110, 200, 210, 300, 310, 400, 410]


def test_what_can_be_read_again_is_converted_again() -> None:
    trajectories = convert_rlds_to_trajectories([episode(0, 3)])
    assert len(list(trajectories)) == len(list(trajectories)) == 3


# What is refused


@pytest.mark.parametrize(
    "data", [[], iter([]), [{"no": 1}], [{"steps": []}], [3], {"steps": []}, 7, "path", None, [episode(0, 1)["steps"]]]
)
def test_data_without_steps(data: Any) -> None:
    with pytest.raises(ValueError) as error:
        create_trajectory_data_spec(data)
    assert str(error.value).startswith(NO_STEPS) and isinstance(error.value, HiltError)
    with Log.anonymous(create_log_schema([episode(0, 2)])) as log, pytest.raises(ValueError, match=NO_STEPS):
        push_rlds_to_reverb(data, log)


def test_episodes_without_steps_give_nothing() -> None:
    assert len(converted([{"steps": []}, episode(0, 2), {"steps": []}])[0]) == 2


def test_steps_that_lack_a_feature() -> None:
    bad = episode(0, 3)
    for one in bad["steps"]:
        del one["discount"]
    for function in (create_trajectory_data_spec, convert_rlds_to_trajectories, create_log_schema):
        with pytest.raises(SchemaError) as error:
            function([bad])
        found = "['observation', 'action', 'reward', 'is_first', 'is_last', 'is_terminal']"
        assert str(error.value) == f"Invalid RLDS step spec. Features expected are {FEATURES}, but found {found}"
    with pytest.raises(SchemaError, match="Invalid RLDS step spec"):  # and so does a column
        converted([{"steps": StoredSteps({"is_first": np.ones(2, bool), "is_last": np.ones(2, bool)})}])


def test_the_error_is_tensorflows_too_where_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(Exception):
        def __init__(self, node_def: Any, op: Any, message: str):
            super().__init__()
            self.message = message

        def __str__(self) -> str:
            return self.message

    bad = [{"steps": [step(0, first=True), step(1)]}]
    with pytest.raises(InvalidArgumentError) as error:
        list(convert_rlds_to_trajectories(bad))
    assert not isinstance(error.value, Theirs)
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(errors=SimpleNamespace(InvalidArgumentError=Theirs)))
    with pytest.raises(Theirs) as caught:
        list(convert_rlds_to_trajectories(bad))
    assert (
        isinstance(caught.value, InvalidArgumentError)
        and isinstance(caught.value, ValueError)
        and isinstance(caught.value, HiltError)
    )
    assert str(caught.value) == MID and (caught.value.episode, caught.value.step, caught.value.pushed) == (0, 1, None)


# The spec


def test_the_spec_of_a_trajectory() -> None:
    spec = create_trajectory_data_spec([episode(0, 2)])
    assert (spec.step_type.dtype, spec.step_type.shape, spec.step_type.name) == (np.int32, (), "step_type")
    assert spec.next_step_type == spec.step_type and spec.policy_info == ()
    assert (spec.observation.dtype, spec.observation.shape, spec.observation.name) == (np.float32, (2,), None)
    assert (spec.discount.dtype, spec.discount.name, spec.discount.minimum, spec.discount.maximum) == (
        np.float32,
        "discount",
        0.0,
        1.0,
    )


def test_the_spec_of_a_text() -> None:
    data = [{"steps": [step(0, True, True, observation={"told": b"pick"})]}]
    assert create_trajectory_data_spec(data).observation["told"].dtype == object
    assert next(iter(convert_rlds_to_trajectories(data))).observation["told"] == b"pick"


def test_what_a_first_step_lacks_is_looked_for_in_later_ones() -> None:
    short = {"steps": [{k: v for k, v in step(0, True, True).items() if k not in ("action", "reward", "discount")}]}
    assert create_trajectory_data_spec([short, episode(0, 2)]).action.dtype == np.float32
    assert types([short, episode(0, 2)]) == [(2, 2), (0, 2), (2, 0)]
    with pytest.raises(SchemaError, match=r"but found \['observation', 'is_first', 'is_last', 'is_terminal'\]"):
        create_trajectory_data_spec([short, short])


# Into a log


def test_n_steps_of_e_episodes_are_n_minus_e_transitions_of_a_log() -> None:
    data = [episode(0, 4, note="a"), episode(10, 1), episode(20, 3, terminal=False)]
    with Log.anonymous(create_log_schema(data)) as log:
        assert push_rlds_to_reverb(iter(data), log) == 8
        assert len(log) == 8 - 3 and log.trajectories() == [0, 1]
        first, second = (log.read(log.trajectory_keys(n)) for n in log.trajectories())
        assert first["observations"].tolist() == [[i, -i] for i in (0, 1, 2)]
        assert first["next_observations"].tolist() == [[i, -i] for i in (1, 2, 3)]
        assert first["actions"].tolist() == [0, 10, 20] and first["rewards"].tolist() == [0, 1, 2]
        assert first["terminated"].tolist() == [False, False, True] and not first["truncated"].any()
        assert second["truncated"].tolist() == [False, True] and not second["terminated"].any()
        assert first["discount"].tolist() == [0.5] * 3 and first["source"].tolist() == [2] * 3
        assert log.facts.about(0) == {
            "episode_metadata": {"note": "a"},
            "last_step": {"action": 30.0, "reward": 3.0, "discount": 0.5},
        }


def test_no_transition_crosses_from_one_episode_to_the_next_inside_one_element() -> None:
    data = [
        {
            "steps": episode(0, 3)["steps"]
            + episode(10, 2, terminal=False)["steps"]
            + [step(20, first=True)]
            + episode(30, 2)["steps"]
        }
    ]
    with Log.anonymous(create_log_schema(data)) as log:
        assert push_rlds_to_reverb(data, log) == 8
        columns = log.read(log.trajectory_keys(0))
        pairs = (
            np.stack([columns["observations"][:, 0], columns["next_observations"][:, 0]], axis=1).astype(int).tolist()
        )
        assert pairs == [[0, 1], [1, 2], [10, 11], [30, 31]]
        assert columns["terminated"].tolist() == [False, True, False, True] and columns["truncated"].tolist() == [
            False,
            False,
            True,
            False,
        ]


def test_policy_info_becomes_columns() -> None:
    def info(now: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        return {"sum": now["reward"] + after["reward"]}

    data = [episode(0, 3), episode(10, 2)]
    with Log.anonymous(create_log_schema(data, info)) as log:
        assert push_rlds_to_reverb(data, log, info) == 5
        assert log.read(log.all().keys())["policy_info"]["sum"].tolist() == [1, 3, 21]


BAD = {
    TERMINAL: [step(0, first=True), step(1, terminal=True), step(2, last=True)],
    MID: [step(0, first=True), step(1), step(2)],
    LAST: [step(0), step(1), step(2, last=True)],
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_episode_half_way(text: str) -> None:
    data = [episode(0, 3), episode(10, 4), {"steps": BAD[text]}, episode(20, 5)]
    with Log.anonymous(create_log_schema(data)) as log:
        with pytest.raises(InvalidArgumentError) as error:
            push_rlds_to_reverb(data, log)
        assert len(log) == 5 and error.value.pushed == 7
        place = {TERMINAL: "step 1 of episode 2", MID: "step 2 of episode 2", LAST: "step 3 of episode 1"}[text]
        assert str(error.value) == f"{text} It is {place}; 7 steps were pushed before."
    observer = Observer(data)
    with pytest.raises(InvalidArgumentError) as error:
        push_rlds_to_reverb(data, observer)
    assert error.value.pushed == len(observer.got) == 7 and observer.got == expected(data[:2])[0]


def test_a_later_episode_of_another_shape() -> None:
    data = [episode(0, 3), {"steps": [step(i, i == 0, i == 1, observation=np.zeros(3, np.float32)) for i in range(2)]}]
    with (
        Log.anonymous(create_log_schema(data)) as log,
        pytest.raises(SchemaError, match="observations: expected") as error,
    ):
        push_rlds_to_reverb(data, log)
    assert error.value.pushed == 3  # type: ignore[attr-defined]


def test_a_log_whose_schema_does_not_fit() -> None:
    declared = {
        "observations": ("f4", (3,)),
        "next_observations": ("f4", (3,)),
        "actions": ("f8", ()),
        "masks2": ("f4", ()),
    }
    with Log.anonymous(Schema.declare(declared)) as log, pytest.raises(ValueError) as error:
        push_rlds_to_reverb([episode(0, 3)], log)
    assert str(error.value) == (
        "Replay buffer table signature spec should match RLDS data spec. observations: the log has float32 "
        "(3,), the data float32 (2,); next_observations: the log has float32 (3,), the data float32 (2,); "
        "actions: the log has float64 (), the data float32 (); masks2: the log has float32 (), the data "
        "nothing; rewards: the log has nothing, the data float32 ()."
    )
    assert len(log) == 0


def test_columns_of_steps_that_a_log_lacks_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    kept = {
        name: ("f4", (2,) if "obs" in name else ())
        for name in ("observations", "next_observations", "actions", "rewards")
    }
    data = [{"steps": [step(i, i == 0, i == 1, more=np.int8(1)) for i in range(2)]}]
    with Log.anonymous(Schema.declare(kept)) as log, caplog.at_level(logging.WARNING, "hilt"):
        assert push_rlds_to_reverb(data, log) == 2
        assert len(log) == 1
    assert "the log has no column for discount, more: left out" in caplog.text


# Into stores, clients and observers


def test_a_data_store_gets_transitions() -> None:
    queue = QueuedDataStore(100)
    assert push_rlds_to_reverb([episode(0, 3), episode(10, 2)], queue) == 5
    got = queue.get_latest_data(-1)
    assert [(t["observations"][0], t["next_observations"][0], t["terminated"]) for t in got] == [
        (0, 1, 0),
        (1, 2, 1),
        (10, 11, 1),
    ]


def test_a_learners_buffer_gets_its_masks_and_dones() -> None:
    space = SimpleNamespace(shape=(2,), dtype=np.float32)
    with Log.anonymous(create_log_schema([episode(0, 2)])):
        buffer = ReplayBufferDataStore(space, SimpleNamespace(shape=(), dtype=np.float32), 100, seed=0)
        assert push_rlds_to_reverb([episode(0, 3), episode(10, 3, terminal=False)], buffer) == 6
        got = buffer.get_latest_data(0)
        assert [(float(t["masks"]), bool(t["dones"])) for t in got] == [(1, False), (0, True), (1, False), (1, True)]
        buffer.close()


@pytest.fixture
def pair(memory_path: Path) -> Iterator[Pair]:
    made = Pair(memory_path)
    yield made
    made.close()


def test_a_client_sends_them_to_the_learners_log(pair: Pair, tmp_path: Path) -> None:
    data = [episode(0, 30), episode(100, 20, terminal=False)]
    with Log.create(tmp_path / "log", create_log_schema(data)) as log:
        pair.server(stores={"demos": log})
        client = pair.client(stores={"demos": pair.spool()})
        assert push_rlds_to_reverb(data, client) == 50
        assert client.update(FLUSH_MS) and len(log) == 48
        columns = log.read(log.all().keys())
        assert sorted(columns["rewards"].tolist()) == [*range(29), *range(100, 119)] and columns["truncated"].sum() == 1


def test_a_client_with_two_stores_is_asked_which(pair: Pair) -> None:
    client = SimpleNamespace(data_stores={"a": 1, "b": 2})
    with pytest.raises(ConfigError, match=r"with one data store, got 2 \(a, b\); give client.data_stores\[NAME\]"):
        push_rlds_to_reverb([episode(0, 2)], client)


@pytest.mark.parametrize("target", [set(), None, []])
def test_something_that_takes_no_trajectories(target: Any) -> None:
    wanted = (
        f"expected a TF-Agents Reverb observer, a Log, a TrainerClient or a data store, got {type(target).__name__}"
    )
    with pytest.raises(ConfigError, match=wanted):
        push_rlds_to_reverb([episode(0, 2)], target)


class Observer:
    """As much of a TF-Agents observer as is used."""

    def __init__(self, data: Any, signature: Any = None, room: int = 1000):
        self.got: list[tuple[Any, ...]] = []
        self._room = room
        self._signature = signature or Trajectory(
            *[() if s == () else SimpleNamespace(dtype=s.dtype, shape=(None, *s.shape)) for s in spec(data)]
        )

    def get_table_signature(self) -> Any:
        return self._signature

    def __call__(self, trajectory: Any) -> None:
        if len(self.got) == self._room:
            raise RuntimeError("full")
        self.got.append(as_numbers(trajectory))


def spec(data: Any) -> Trajectory:
    return create_trajectory_data_spec(data)


def test_an_observer_gets_every_trajectory() -> None:
    data = [episode(0, 3), episode(10, 1), episode(20, 2, terminal=False)]
    observer = Observer(data)
    assert push_rlds_to_reverb(data, observer) == 6
    assert observer.got == expected(data)[0]


def test_what_an_observer_raises_has_the_count() -> None:
    data = [episode(0, 3), episode(10, 3)]
    with pytest.raises(RuntimeError) as error:
        push_rlds_to_reverb(data, Observer(data, room=4))
    assert error.value.pushed == 4  # type: ignore[attr-defined]


def test_an_observer_with_another_signature() -> None:
    data, other = (
        [episode(0, 2)],
        [{"steps": [step(0, True, True, observation={"a": np.zeros(2)}, reward=np.float64(0))]}],
    )
    fields = [s if s == () else SimpleNamespace(dtype=s.dtype, shape=(None, *s.shape)) for s in spec(data)]
    observer = Observer(data, Trajectory(*fields))
    with pytest.raises(ValueError) as error:
        push_rlds_to_reverb(other, observer)
    assert str(error.value) == (
        "Replay buffer table signature spec should match RLDS data spec. observation/a: the table has nothing, "
        "the data float64 (None, 2); reward: the table has float32 (None,), the data float64 (None,); "
        "observation: the table has float32 (None, 2), the data nothing."
    )
    observer.get_table_signature = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="step_type: the table has nothing, the data int32"):
        push_rlds_to_reverb(data, observer)
    assert observer.got == []
