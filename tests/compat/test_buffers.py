"""The buffers that HIL-SERL users know: the same batches, and right where the originals are wrong."""

from __future__ import annotations

import json
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, EmptyError, SchemaError, UnknownNameError
from hilt.core.tree import flatten, unflatten
from hilt.replay import MemoryEfficientReplayBufferDataStore, ReplayBufferDataStore
from tests.effort import rounds

GOLDEN = Path(__file__).parent.parent / "golden/hilserl"
FACTS = json.loads((GOLDEN / "facts.json").read_text())


@dataclass
class Box:
    """As much of a Gymnasium space as the buffers look at."""

    shape: tuple[int, ...]
    dtype: Any = np.float32


@dataclass
class Dict:
    spaces: dict[str, Any] = field(default_factory=dict)


def space(stack: int = 1) -> Dict:
    image = Box((stack, 8, 8, 3), np.uint8)
    return Dict({"front": image, "state": Box((stack, 3)), "wrist": image})


def golden(stack: int) -> dict[str, dict[str, Any]]:
    """By the first part of the key."""
    groups: dict[str, dict[str, Any]] = {}
    for path, values in np.load(GOLDEN / f"buffers_n{stack}.npz").items():
        group, _, rest = path.partition("/")
        groups.setdefault(group, {})[rest] = values
    return groups


def transitions(stack: int) -> list[dict[str, Any]]:
    columns = golden(stack)["in"]
    return [unflatten({path: values[i] for path, values in columns.items()}) for i in range(19)]


def make(kind: str, stack: int = 1, capacity: int = 50, **options: Any) -> Any:
    if kind == "plain":
        return ReplayBufferDataStore(space(stack), Box((2,)), capacity, **options)
    return MemoryEfficientReplayBufferDataStore(
        space(stack), Box((2,)), capacity, image_keys=("front", "wrist"), **options
    )


BOTH = pytest.mark.parametrize("kind", ["plain", "efficient"])


def picture(number: int) -> Any:
    """A frame that names its number in every pixel's neighborhood."""
    frame = np.full((8, 8, 3), number % 250, np.uint8)
    frame[0, 0] = [number % 256, number // 256, 7]
    return frame


def observed(numbers: list[int]) -> dict[str, Any]:
    """An observation: frames stacked, oldest first, and a state that names them."""
    front = np.stack([picture(n) for n in numbers])
    return {"front": front, "wrist": front ^ 255, "state": np.float32([[n, -n, 1] for n in numbers])}


def transition(
    now: int, after: int | None = None, done: bool = False, mask: float | None = None, **extra: Any
) -> dict[str, Any]:
    after = now + 1 if after is None else after
    mask = 1.0 - done if mask is None else mask
    action = np.float32([now, -now])
    made = {
        "observations": observed([now]),
        "next_observations": observed([after]),
        "actions": action,
        "rewards": float(now),
    }
    return made | {"masks": mask, "dones": done} | extra


def check_right(buffer: Any, inserted: list[dict[str, Any]], pack: bool = False) -> None:
    """Every transition in the buffer is one that was inserted, in every field; found by its reward."""
    by_reward = {float(t["rewards"]): t for t in inserted}
    assert len(by_reward) == len(inserted)
    options = {"pack_obs_and_next_obs": True} if pack else {}
    batch = buffer.sample(len(buffer), indx=np.arange(len(buffer)), **options)
    assert len(set(batch["rewards"].tolist())) == len(buffer)
    for i in range(len(buffer)):
        wanted = by_reward[float(batch["rewards"][i])]
        if pack:
            wanted = flatten(wanted)
            for camera in ("front", "wrist"):
                after = wanted.pop(f"next_observations/{camera}")
                wanted[f"observations/{camera}"] = np.concatenate([wanted[f"observations/{camera}"], after[-1:]])
            wanted = unflatten(wanted)
        got = {path: values[i] for path, values in flatten(batch).items()}
        assert set(got) == set(flatten(wanted))
        for path, value in flatten(wanted).items():
            assert np.array_equal(got[path], value), path


# -- the same batches as upstream
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [1, 2])
@BOTH
def test_the_same_batch_for_the_same_seed(kind: str, stack: int):
    """The memory-efficient buffer of HIL-SERL draws by rejection over its slots; ours draws as the plain one does."""
    buffer = make(kind, stack)
    buffer.batch_insert(transitions(stack))
    buffer.seed(3)
    for group in ("plain_seed3_0", "plain_seed3_1"):
        batch, wanted = flatten(buffer.sample(8)), golden(stack)[group]
        assert set(batch) == set(wanted)
        for path, values in wanted.items():
            assert batch[path].dtype == values.dtype and np.array_equal(batch[path], values), path
    buffer.close()


@pytest.mark.parametrize("stack", [1, 2])
@BOTH
def test_the_same_transitions_at_the_same_places(kind: str, stack: int):
    buffer = make(kind, stack)
    for one in transitions(stack):
        buffer.insert(one)
    for group, places in [
        ("plain_indx", golden(stack)["plain_indx"].pop("indx")),
        ("plain_download_2_6", np.arange(2, 6)),
    ]:
        batch = flatten(buffer.sample(len(places), indx=places))
        for path, values in golden(stack)[group].items():
            if path != "indx":
                assert batch[path].dtype == values.dtype and np.array_equal(batch[path], values), path
    buffer.close()


def named(batch: dict[str, Any]) -> list[int]:
    """Which transitions these are: 100 * episode + step."""
    return batch["observations/state"][:, -1, 0].astype(int).tolist()


@pytest.mark.parametrize("stack", [1, 2])
@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("capacity", [50, 12])
def test_packed_and_unpacked_as_upstream(stack: int, pack: bool, capacity: int):
    word = "packed" if pack else "unpacked"
    wanted = golden(stack)[f"efficient_cap{capacity}_{word}"]
    buffer = make("efficient", stack, capacity)
    buffer.batch_insert(transitions(stack))
    ours = flatten(buffer.sample(12, pack_obs_and_next_obs=pack))
    layout = {path: [str(values.dtype), list(values.shape)] for path, values in ours.items()}
    assert layout == FACTS["layout"][f"efficient_{word}_n{stack}"]
    everything = flatten(buffer.sample(len(buffer), indx=np.arange(len(buffer)), pack_obs_and_next_obs=pack))
    place = {name: i for i, name in enumerate(named(everything))}
    known = [i for i, name in enumerate(named(wanted)) if name in place]
    assert len(known) == 12 if capacity == 50 else known  # in a small buffer, other ones may be left
    for i in known:
        for path, values in wanted.items():
            assert np.array_equal(everything[path][place[named(wanted)[i]]], values[i]), path
    buffer.close()


@pytest.mark.parametrize("stack", [1, 2])
@BOTH
def test_every_transition_is_found_at_its_place(kind: str, stack: int):
    """Upstream's length counts slots, N more per episode; ours counts transitions."""
    buffer = make(kind, stack)
    buffer.batch_insert(transitions(stack))
    assert len(buffer) == FACTS["slots"][f"efficient_cap50_n{stack}"]["valid"] == 19
    buffer.close()


def test_a_full_buffer_keeps_the_newest():
    for capacity in (7, 12):
        buffer = make("plain", 1, capacity)
        buffer.batch_insert(transitions(1))
        kept = named(flatten(buffer.sample(1, indx=np.arange(len(buffer)))))
        assert kept[-5:] == [400, 401, 402, 403, 404]
        assert kept == [int(t["observations"]["state"][-1, 0]) for t in transitions(1)][-len(kept) :]
        assert capacity // 2 < len(buffer) <= capacity
        buffer.close()


@pytest.mark.parametrize(
    "group", ["plain_seed3_1", "plain_indx", "plain_download_2_6", "efficient_cap50_packed", "efficient_cap12_unpacked"]
)
def test_one_changed_number_is_noticed(group: str, monkeypatch: pytest.MonkeyPatch):
    real = golden(1)
    real[group]["rewards"][-1] += 1
    monkeypatch.setitem(globals(), "golden", lambda stack: {name: dict(columns) for name, columns in real.items()})
    with pytest.raises(AssertionError, match="rewards"):
        if group == "plain_seed3_1":
            test_the_same_batch_for_the_same_seed("plain", 1)
        elif group.startswith("plain"):
            test_the_same_transitions_at_the_same_places("plain", 1)
        else:
            test_packed_and_unpacked_as_upstream(1, "unpacked" not in group, 50 if "50" in group else 12)


# -- right where upstream is wrong
# -----------------------------------------------------------------------------------------------------


@BOTH
def test_gaps(kind: str):
    """Interventions at t = 3, 4, 10, 11, 20: upstream shows (state 10, picture 5) and (state 20, picture 12)."""
    assert FACTS["wrong"]["gaps"][2][:2] == [10, 5]
    buffer = make(kind)
    inserted = [transition(t) for t in (3, 4, 10, 11, 20)]
    buffer.batch_insert(inserted)
    check_right(buffer, inserted)
    if kind == "efficient":
        check_right(buffer, inserted, pack=True)
    assert sum(s.frames["observations/front"] for s in buffer.log.segments) == 8 if kind == "efficient" else True
    buffer.close()


@BOTH
def test_truncation_without_done(kind: str):
    """Upstream shows (state 100, picture 4)."""
    assert FACTS["wrong"]["truncation"][4][:2] == [100, 4]
    buffer = make(kind)
    inserted = [transition(t) for t in (0, 1, 2, 3, 100, 101, 102, 103)]
    buffer.batch_insert(inserted)
    check_right(buffer, inserted)
    if kind == "efficient":
        check_right(buffer, inserted, pack=True)
    assert buffer.log.trajectories() == [0, 1]
    buffer.close()


ORDERS = st.permutations(list(range(24)))


@settings(max_examples=rounds(8, 100), deadline=None, suppress_health_check=list(HealthCheck))
@given(ORDERS, st.integers(2, 6), st.sampled_from(["plain", "efficient"]), st.integers(8, 40))
def test_any_order_and_any_capacity(order: list[int], episode: int, kind: str, capacity: int):
    """Interleaved, backwards, shuffled, more than fits: whatever is there is what was inserted."""
    buffer = make(kind, capacity=capacity)
    inserted = [transition(t, done=t % episode == episode - 1) for t in order]
    for i, one in enumerate(inserted):
        buffer.insert(one)
        if i % 8 == 7:
            check_right(buffer, inserted[: i + 1])
    check_right(buffer, inserted)
    if kind == "efficient":
        check_right(buffer, inserted, pack=True)
    assert len(buffer) <= capacity
    buffer.close()


@settings(max_examples=rounds(8, 100), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 3), min_size=10, max_size=60), st.booleans())
def test_actors_in_turns(turns: list[int], named_actors: bool):
    """Four actors, one store: each one's steps follow each other, told apart by name or by their frames."""
    buffer = make("efficient", capacity=1000)
    at = [0, 1000, 2000, 3000]
    inserted = []
    for who in turns:
        inserted.append(transition(at[who]))
        buffer.insert(inserted[-1], actor=f"actor {who}" if named_actors else "")
        at[who] += 1
    check_right(buffer, inserted)
    assert len(buffer.log.trajectories()) == len(set(turns))  # no chain was broken
    batch = buffer.view.sampler(sequence_length=3, seed=0).sample(30)
    for i in range(30):
        first = int(batch["rewards"][i, 0])
        assert batch["rewards"][i][batch["mask"][i]].tolist() == list(range(first, min(first + 3, at[first // 1000])))
    buffer.close()


def test_stacks_that_move_by_one():
    """Frames of a stack are stored once, also over the wrap-around of a small buffer."""
    buffer = MemoryEfficientReplayBufferDataStore(space(3), Box((2,)), 20, image_keys=("front", "wrist"))
    inserted = []
    for t in range(60):
        start = t - t % 10
        now, after = ([max(start, n) for n in range(t + d - 2, t + d + 1)] for d in (0, 1))
        one = transition(t, done=t % 10 == 9)
        inserted.append(one | {"observations": observed(now), "next_observations": observed(after)})
        buffer.insert(inserted[-1])
    check_right(buffer, inserted)
    check_right(buffer, inserted, pack=True)
    frames = sum(s.frames["observations/front"] for s in buffer.log.segments)
    rows = sum(s.rows for s in buffer.log.segments)
    assert frames <= rows + 3 * (rows // 10 + len(buffer.log.segments) + 1)
    buffer.close()


def test_stacks_that_cannot_be_packed_say_so():
    buffer = make("efficient", 2)
    odd = transition(0) | {"observations": observed([0, 1]), "next_observations": observed([5, 6])}
    buffer.insert(odd)
    check_right(buffer, [odd])
    with pytest.raises(
        SchemaError, match="observations/front: observation and next observation cannot be packed into one stack"
    ):
        buffer.sample(1, pack_obs_and_next_obs=True)
    buffer.close()


# -- ends
# ----------------------------------------------------------------------------------------------------------------------


def test_done_and_mask_become_terminated_and_truncated():
    buffer = make("plain")
    buffer.insert(transition(0, done=True, mask=0.0))
    buffer.insert(transition(10, done=True, mask=1.0))
    buffer.insert(transition(20))
    buffer.insert(transition(30, done=False, terminated=True, truncated=False))
    batch = buffer.log.read(buffer.view.keys(), ["terminated", "truncated", "dones", "masks"])
    assert batch["terminated"].tolist() == [True, False, False, True]
    assert batch["truncated"].tolist() == [False, True, False, False]
    assert batch["dones"].tolist() == [True, True, False, False]
    assert batch["masks"].tolist() == [0, 1, 1, 1]
    buffer.close()


def test_source_and_policy_version():
    buffer = make("plain")
    buffer.insert(transition(0, source=1, policy_version=7))
    buffer.insert(transition(1))
    assert buffer.log.read(buffer.view.keys(), ["source", "policy_version"])["policy_version"].tolist() == [7, -1]
    assert len(buffer.log.by_source("human")) == 1
    assert "source" not in buffer.sample(1)  # a batch has the columns that upstream's has
    assert buffer.sample(1, keys=["source"])["source"].shape == (1,)
    buffer.close()


# -- further columns
# -----------------------------------------------------------------------------------------------------------------


def test_next_actions_labels_and_penalties():
    buffer = make("plain", include_next_actions=True, include_label=True, include_grasp_penalty=True)
    extra = {"next_actions": np.float32([3, 4]), "next_intvn": True, "labels": 5}
    buffer.insert(transition(0, **extra, grasp_penalty=-0.1))
    buffer.insert(transition(1, **extra, infos={"grasp_penalty": -0.2, "succeed": True, "left": object()}))
    buffer.insert(transition(2, **extra, grasp_penalty=-0.3, infos={"grasp_penalty": 9.0}))
    batch = buffer.sample(3, indx=[0, 1, 2])
    assert np.allclose(batch["grasp_penalty"], [-0.1, -0.2, -0.3]) and batch["grasp_penalty"].dtype == np.float32
    assert batch["next_actions"].tolist() == [[3, 4]] * 3
    assert batch["next_intvn"].tolist() == [True] * 3
    assert batch["labels"].tolist() == [5] * 3 and batch["labels"].dtype == int
    with pytest.raises(SchemaError, match=r"grasp_penalty: expected float32 \(\), got nothing\. Add this field\."):
        buffer.insert(transition(3, **extra))
    buffer.close()


def test_infos_are_passed_over():
    buffer = make("plain")
    buffer.insert(transition(0, infos={"succeed": True, "grasp_penalty": 1.0, "what": "ever"}))
    assert set(buffer.sample(1)) == {"observations", "next_observations", "actions", "rewards", "masks", "dones"}
    buffer.close()


@BOTH
def test_what_a_recording_has_beside_a_transition_is_passed_over_with_one_warning(
    kind: str, caplog: pytest.LogCaptureFixture
):
    """Pickles that `hilt data convert --to hil-serl` writes have every column of the log as a key."""
    buffer = make(kind)
    more = {
        "times": {"observed": 0.5, "sent": 0.6},
        "labels": 1,
        "terminated": False,
        "truncated": False,
        "source": 2,
        "policy_version": 3,
    }
    for number in range(3):
        buffer.insert(transition(number, **more, infos={}))
    check_right(buffer, [transition(number) for number in range(3)])
    assert buffer.log.read(buffer.log.all().keys(), ["source"])["source"].tolist() == [2, 2, 2]
    said = [record.getMessage() for record in caplog.records if record.name == "hilt.replay"]
    (warning,) = said
    assert warning.startswith(
        "transitions have times, labels, which this buffer does not store; it stores observations, "
    )
    buffer.close()


# -- bad transitions
# -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"actions": np.zeros(3, np.float32)}, r"actions: expected float32 \(2,\), got float32 \(3,\)"),
        ({"actions": np.zeros(1, np.float32)}, r"actions: expected float32 \(2,\), got float32 \(1,\)"),
        ({"rewards": "one"}, r"rewards: expected float32 \(\), got <U3 \(\)"),
        (
            {"observations": {"state": np.zeros((1, 3), np.float32)}},
            r"observations/front: expected uint8 \(1, 8, 8, 3\), got nothing",
        ),
        ({"dones": None}, "dones: expected bool"),
        ({"masks": np.ones(2)}, r"masks: expected float32 \(\), got float64 \(2,\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@BOTH
def test_a_bad_transition_is_named_and_changes_nothing(kind: str, changes: dict[str, Any], said: str):
    buffer = make(kind)
    buffer.insert(transition(0))
    with pytest.raises(SchemaError, match=said):
        buffer.insert(transition(1, **changes))
    buffer.insert(transition(1))
    assert len(buffer) == 2 == buffer.latest_data_id()
    assert buffer.stats()["rejected"] == 1
    check_right(buffer, [transition(0), transition(1)])
    assert buffer.log.trajectories() == [0]
    buffer.close()


@pytest.mark.parametrize("key", ["dones", "masks", "rewards", "actions"])
def test_a_missing_field_is_named(key: str):
    buffer = make("plain")
    one = transition(0)
    del one[key]
    with pytest.raises(SchemaError, match=rf"{key}: expected .*, got nothing.*Add this field\."):
        buffer.insert(one)
    assert buffer.stats()["rejected"] == 1
    buffer.close()


def test_other_widths_are_taken_as_numpy_would():
    """What HIL-SERL's actor really sends: float64 rewards and masks, and a reward that is a truth value."""
    buffer = make("plain")
    buffer.insert(transition(0, actions=np.array([1.0, 2.0]), rewards=True, masks=np.float64(1), dones=np.False_))
    batch = buffer.sample(1)
    assert {path: str(values.dtype) for path, values in flatten(batch).items() if "/" not in path} == {
        "actions": "float32",
        "rewards": "float32",
        "masks": "float32",
        "dones": "bool",
    }
    assert batch["rewards"].tolist() == [1.0]
    buffer.close()


# -- sampling
# ----------------------------------------------------------------------------------------------------------------------


def test_keys_and_places():
    buffer = make("efficient")
    buffer.batch_insert(transition(t) for t in range(10))
    assert set(flatten(buffer.sample(4, keys=["rewards", "observations/state"]))) == {"rewards", "observations/state"}
    packed = buffer.sample(4, keys=["observations", "rewards"], pack_obs_and_next_obs=True)
    assert packed["observations"]["front"].shape == (4, 2, 8, 8, 3)
    assert set(packed) == {"observations", "rewards"}
    batch = buffer.sample(3, indx=[9, 0, 0])
    assert batch["rewards"].tolist() == [9, 0, 0]
    assert buffer.log.read(batch.steps)["rewards"].tolist() == [9, 0, 0]
    assert batch.weights.tolist() == [1, 1, 1]
    for bad in ([10], [-1], [[1]], [0.5]):
        with pytest.raises(ConfigError, match=r"indx: expected whole numbers in \[0, 10\), got"):
            buffer.sample(1, indx=bad)
    with pytest.raises(UnknownNameError, match="no column named 'reward'; did you mean 'rewards'"):
        buffer.sample(1, keys=["reward"])
    buffer.close()


def test_an_empty_buffer_says_so():
    """Upstream fails with 'high <= 0', or looks for a valid slot for ever."""
    for kind in ("plain", "efficient"):
        buffer = make(kind)
        with pytest.raises(EmptyError, match="holds no step yet"):
            buffer.sample(4)
        buffer.close()


def test_seeds():
    buffer = make("plain", seed=5)
    buffer.batch_insert(transition(t) for t in range(30))
    first = buffer.sample(20)["rewards"].tolist()
    assert buffer.sample(20)["rewards"].tolist() != first
    buffer.seed(5)
    assert buffer.sample(20)["rewards"].tolist() == first
    buffer.close()


def test_an_iterator():
    torch = pytest.importorskip("torch")
    buffer = make("efficient")
    buffer.batch_insert(transition(t) for t in range(10))
    for device in (None, "cpu", ["cpu", "cpu"]):
        batches = buffer.get_iterator(
            queue_size=3, sample_args={"batch_size": 6, "pack_obs_and_next_obs": True}, device=device
        )
        for _ in range(4):
            batch = next(batches)
            for one in batch if isinstance(batch, list) else [batch]:
                assert one["observations"]["front"].shape == (6, 2, 8, 8, 3)
                assert isinstance(one["rewards"], np.ndarray if device is None else torch.Tensor)
                assert (np.asarray(one["observations"]["front"])[:, 0, 5, 5, 0] == np.asarray(one["rewards"])).all()
        batches.close()
    with pytest.raises(ConfigError, match=r"device is a builtins\.float"):
        buffer.get_iterator(sample_args={"batch_size": 2}, device=0.5)
    buffer.close()


# -- ids
# ----------------------------------------------------------------------------------------------------------------------


def test_latest_data():
    buffer = make("plain")
    assert (buffer.latest_data_id(), buffer.get_latest_data(0)) == (0, [])
    buffer.batch_insert([transition(t) for t in range(5)])
    mark = buffer.latest_data_id()
    assert mark == 5
    buffer.insert(transition(50, source=1))
    buffer.insert(transition(51))
    latest = buffer.get_latest_data(mark)
    assert [float(t["rewards"]) for t in latest] == [50, 51]
    assert set(latest[0]) == {"observations", "next_observations", "actions", "rewards", "masks", "dones"}
    for path, value in flatten(transition(50)).items():
        assert np.array_equal(flatten(latest[0])[path], value)
    assert len(buffer.get_latest_data(0)) == 7 == len(buffer.get_latest_data(-1))
    assert buffer.get_latest_data(7) == [] == buffer.get_latest_data(99)
    buffer.close()


def test_latest_data_of_actors_in_turns():
    """In the order they were inserted, though each actor's steps lie together."""
    buffer = make("plain", capacity=100)
    for t in range(10):
        buffer.insert(transition(t), actor="a")
        buffer.insert(transition(1000 + t), actor="b")
    assert [float(t["rewards"]) for t in buffer.get_latest_data(15)] == [1007, 8, 1008, 9, 1009]
    buffer.close()


def test_latest_data_that_is_gone():
    buffer = make("plain", capacity=8)
    buffer.batch_insert(transition(t, done=t % 4 == 3) for t in range(20))
    assert [float(t["rewards"]) for t in buffer.get_latest_data(3)] == [float(t) for t in range(12, 20)]
    buffer.batch_insert(transition(t, done=t == 24) for t in range(20, 26))  # evicts whole episodes
    assert len(buffer) < 8
    assert [float(t["rewards"]) for t in buffer.get_latest_data(3)] == [float(t) for t in range(26 - len(buffer), 26)]
    buffer.close()


# -- persistence
# ---------------------------------------------------------------------------------------------------------------------


@BOTH
def test_a_buffer_with_a_path_is_there_again(kind: str, tmp_path: Path):
    inserted = [transition(t, done=t % 5 == 4) for t in range(12)]
    buffer = make(kind, path=tmp_path / "buffer")
    buffer.batch_insert(inserted)
    buffer.close()
    buffer = make(kind, path=tmp_path / "buffer")
    assert len(buffer) == 12 == buffer.latest_data_id()
    check_right(buffer, inserted)
    more = [transition(t) for t in range(12, 20)]
    buffer.batch_insert(more)
    check_right(buffer, inserted + more)
    assert [float(t["rewards"]) for t in buffer.get_latest_data(12)] == list(range(12, 20))
    buffer.close()
    buffer = make(kind, capacity=10, path=tmp_path / "buffer", durability="every step")  # settings may change
    assert len(buffer) <= 10
    assert buffer.log.durability.words == "every step"
    check_right(buffer, inserted + more)
    buffer.close()
    with pytest.raises(SchemaError, match=r"this log has another schema: .*labels: added without a default"):
        make(kind, path=tmp_path / "buffer", include_label=True)


def test_a_buffer_without_a_path_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    buffer = make("plain")
    buffer.insert(transition(0))
    assert list(tmp_path.iterdir())
    buffer.close()
    assert list(tmp_path.iterdir()) == []


# -- spaces
# ----------------------------------------------------------------------------------------------------------------------


def test_spaces():
    nested = Dict({"arm": Dict({"pose": Box((6,)), "open": Box((), np.int64)})})
    buffer = ReplayBufferDataStore(nested, Box((2,), np.float64), 10, next_observation_space=nested)
    assert dict(buffer.log.schema.columns)["observations/arm/pose"].shape == (6,)
    obs = {"arm": {"pose": np.zeros(6, np.float32), "open": 1}}
    buffer.insert(
        {
            "observations": obs,
            "next_observations": obs,
            "actions": np.zeros(2),
            "rewards": 0,
            "masks": 1,
            "dones": False,
        }
    )
    assert buffer.sample(1)["actions"].dtype == np.float64
    buffer.close()
    flat = ReplayBufferDataStore(Box((4,)), Box((2,)), 10)
    flat.insert(
        {
            "observations": np.zeros(4),
            "next_observations": np.ones(4),
            "actions": np.zeros(2),
            "rewards": 0,
            "masks": 1,
            "dones": False,
        }
    )
    assert flat.sample(2)["next_observations"].tolist() == [[1.0] * 4] * 2
    flat.close()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: ReplayBufferDataStore(3, Box((2,)), 10),
            "observations: expected a space with a shape and a dtype .or a Dict space., got int",
        ),
        (
            lambda: ReplayBufferDataStore(Dict({"x": "y"}), Box((2,)), 10),
            "observations/x: expected a space with a shape and a dtype",
        ),
        (
            lambda: ReplayBufferDataStore(Box((4,)), Box((2,)), 10, Box((5,))),
            "next_observation_space: expected the observation space",
        ),
        (
            lambda: ReplayBufferDataStore(Box((4,)), Box((2,)), 0),
            "capacity: expected a whole number from 1 on, .*; got 0",
        ),
        (
            lambda: MemoryEfficientReplayBufferDataStore(space(), Box((2,)), 10),
            "no image key in the observation space named 'image'",
        ),
        (
            lambda: MemoryEfficientReplayBufferDataStore(
                Dict({"a": Box((1, 8, 8, 3), np.uint8), "b": Box((2, 8, 8, 3), np.uint8)}),
                Box((2,)),
                10,
                image_keys=("a", "b"),
            ),
            "image_keys: expected one stack size for all images, got {'a': 1, 'b': 2}",
        ),
    ],
)
def test_arguments_that_cannot_work(call: Any, said: str):
    with pytest.raises((ConfigError, UnknownNameError), match=said):
        call()


def test_many_threads_insert_and_sample():
    buffer = make("efficient", capacity=60)
    wrong: list[Any] = []

    def insert(first: int) -> None:
        for t in range(80):
            buffer.insert(transition(first + t, done=t % 9 == 8), actor=f"{first}" if first % 2000 else "")

    def sample() -> None:
        for _ in range(60):
            batch = buffer.sample(16, pack_obs_and_next_obs=True)
            number = batch["rewards"].astype(int)
            frames = batch["observations"]["front"][:, :, 0, 0].astype(int)
            if not (
                (frames[:, 0, 0] + 256 * frames[:, 0, 1] == number)
                & (frames[:, 1, 0] + 256 * frames[:, 1, 1] == number + 1)
            ).all():
                wrong.append(number)

    buffer.insert(transition(9000))
    threads = [threading.Thread(target=insert, args=(1000 * i,)) for i in range(4)] + [
        threading.Thread(target=sample) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert buffer.latest_data_id() == 321
    buffer.close()


def test_a_slash_in_a_key_is_a_level():
    """Two arms of HIL-SERL's show left/wrist and right/wrist."""
    arms = Dict({f"{arm}/wrist": Box((1, 4, 4, 3), np.uint8) for arm in ("left", "right")})
    store = MemoryEfficientReplayBufferDataStore(arms, Box((14,)), 10, image_keys=list(arms.spaces))
    before, after = (
        {key: np.full((1, 4, 4, 3), t + (key == "right/wrist"), np.uint8) for key in arms.spaces} for t in (1, 3)
    )
    ends = {"rewards": 0.0, "masks": 1.0, "dones": False}
    store.insert({"observations": before, "next_observations": after, "actions": np.zeros(14, np.float32), **ends})
    batch = store.sample(1)
    assert batch["observations"]["right"]["wrist"].max() == 2 and batch["next_observations"]["left"]["wrist"].max() == 3
    store.close()


def test_a_penalty_that_is_not_asked_for_is_passed_over():
    """HIL-SERL's loader takes it out of ``infos`` whatever the buffer is."""
    for asked in (False, True):
        store = ReplayBufferDataStore(Dict({"state": Box((2,))}), Box((7,)), 10, include_grasp_penalty=asked)
        seen = {"state": np.zeros(2, np.float32)}
        ends = {"rewards": 0.0, "masks": 1.0, "dones": False, "grasp_penalty": -0.02, "infos": {"grasp_penalty": -0.02}}
        store.insert({"observations": seen, "next_observations": seen, "actions": np.zeros(7, np.float32), **ends})
        assert ("grasp_penalty" in store.sample(1)) == asked
        store.close()
