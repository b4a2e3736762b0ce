"""Packed steps are stored as if they had come one by one: the same rows, frames and
ends, whatever stream they are cut from."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hilt.core.errors import ClosedError, ConfigError, FormatError, HiltError, SchemaError
from hilt.core.tree import flatten, unflatten
from hilt.replay import Log, QueuedDataStore, Schema
from hilt.replay.sampling.limiters import Queue
from hilt.replay.step_encoder import PackedBlock
from hilt.replay.writer import RunningEpisodes
from tests.compat.test_buffers import make, transition
from tests.effort import rounds
from tests.replay.test_faults import Running
from tests.replay.toy_steps import IMAGE, SCHEMA, numbers, trajectory

RAW = ["#trajectory", "#offset", "#sequence", "#origin", "#flags", "#width"]
FOLLOW, GAP, TERMINATE, TRUNCATE, OTHER_STATE, OTHER_IMAGE, STAND_STILL = range(7)
SENDERS = [("arm", "b0", "env"), ("arm", "b1", "env"), ("", "", "")]


class Stream:
    """The steps of one sender, each made from the numbers of its two observations."""

    def __init__(self, number: int, layout: str):
        self._now, self._layout = [1000 * number] * 2, layout
        self._fresh = 1000 * number

    def steps(self, events: list[int]) -> list[dict[str, Any]]:
        return [self._step(event) for event in events]

    def _step(self, event: int) -> dict[str, Any]:
        image, state = self._now
        if event == GAP:
            image = state = self._next()
        elif event == OTHER_STATE:
            state = self._next()
        elif event == OTHER_IMAGE:
            image = self._next()
        after = [image, state] if event == STAND_STILL else [self._next()] * 2
        step: dict[str, Any] = {
            "observations": self._observation(image, state),
            "next_observations": self._observation(*after),
            "actions": np.full(3, state * 0.5, np.float64 if "wide" in self._layout else np.float32),
            "rewards": np.float32(state),
        }
        if event in (TERMINATE, TRUNCATE):
            step["terminated"], step["truncated"] = event == TERMINATE, event == TRUNCATE
            after = [self._next()] * 2
        if "full" in self._layout:
            step = {"terminated": False, "truncated": False, "source": state % 3, "policy_version": state, **step}
        if "lone" in self._layout:
            del step["next_observations"]
        self._now = after
        return step

    def _observation(self, image: int, state: int) -> dict[str, Any]:
        kind: Any = np.float64 if "wide" in self._layout else np.float32
        seen = {"state": np.array([state, -state], kind)}
        if "blind" not in self._layout:
            seen["image"] = np.full(IMAGE, image % 251, np.uint8)
            seen["image"][0, 0] = np.frombuffer(np.uint32(image).tobytes()[:3], np.uint8)
        if "depth" in self._layout:
            seen["depth"] = np.full((20, 20), image, kind)  # stored as float32, as frames
        return seen

    def _next(self) -> int:
        self._fresh += 1
        return self._fresh


def schema_of(layout: str) -> Schema:
    """Everything narrow."""
    (step,) = Stream(0, layout.replace("wide", "")).steps([FOLLOW])
    return Schema.of(
        {
            key: value
            for key, value in step.items()
            if key not in ("terminated", "truncated", "source", "policy_version")
        }
    )


def parcels(queue: QueuedDataStore, after: int, cuts: list[int]) -> list[tuple[int, PackedBlock]]:
    """What was inserted after this number, cut into blocks of so many steps at most."""
    found, turn = [], 0
    while (parcel := queue.parcel(after)) is not None:
        block, size = PackedBlock(parcel.packed or {}), cuts[turn % len(cuts)]
        if block.steps > size:
            small = queue.parcel(after, size * max(1, parcel.nbytes // block.steps))
            assert small is not None and small.packed is not None
            parcel, block = small, PackedBlock(small.packed)
        found.append((parcel.first, block))
        after, turn = parcel.last, turn + 1
    return found


def content(log: Log) -> dict[str, Any]:
    keys = log.all().keys()
    with log.reading() as steps:
        raw = dict(zip(RAW, steps.fields(keys, RAW), strict=True))
    entries = log.index.entries
    index = {
        name: entries[name].tolist()
        for name in ("key", "steps", "sequence", "origin", "sources", "ended", "open", "width")
    }
    names = log.facts.origins()
    return {
        "keys": keys.tolist(),
        **{name: values.tolist() for name, values in raw.items()},
        **index,
        "from": [names[origin] for origin in raw["#origin"].tolist()],
        "frames": [segment.frames for segment in log.segments],
        "rows": [segment.rows for segment in log.segments],
        "live": (log.live_steps, log.live_bytes),
        **({path: value.tobytes() for path, value in flatten(log.read(keys)).items()} if len(keys) else {}),
        "drawn": [log.all().sampler(seed=1).sample(7, ["actions"])["actions"].tolist()] if len(keys) else [],
    }


def one_by_one(chains: RunningEpisodes, log: Log, sender: Any, block: PackedBlock, first: int, done: int) -> None:
    for number, step in enumerate(list(block)[done:], first + done):
        chains.insert(sender, log.check(unflatten(step), cast=True), number, 0)


moves = st.lists(st.sampled_from(range(7)), min_size=1, max_size=12)
turns = st.lists(st.tuples(st.integers(0, 2), moves), min_size=1, max_size=6)


@settings(max_examples=rounds(20, 200), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    layout=st.sampled_from(["", "full", "wide", "wide depth", "blind", "lone", "lone blind full", "depth full"]),
    turns=turns,
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    rows=st.integers(1, 7),
    unnamed=st.integers(1, 3),
)
def test_a_block_is_stored_as_its_steps_are(layout: str, turns: Any, cuts: list[int], rows: int, unnamed: int):
    schema = schema_of(layout)
    with (
        ExitStack() as ending,
        tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder,
    ):
        logs = [
            Log.create(Path(folder) / name, schema, durability="never", segment_bytes=rows * schema.layout.step_bytes)
            for name in ("steps", "blocks")
        ]
        for log in logs:
            ending.callback(log.close)
        steps, blocks = (RunningEpisodes(log, unnamed) for log in logs)
        streams = [(Stream(i, layout), QueuedDataStore(10_000)) for i in range(3)]
        fast = 0
        for who, events in turns:
            stream, queue = streams[who]
            after = queue.latest_data_id()
            queue.batch_insert(stream.steps(events))
            for first, block in parcels(queue, after, cuts):
                one_by_one(steps, logs[0], SENDERS[who], block, first, 0)
                done = len(blocks.insert_block(SENDERS[who], block, first, 0))
                assert done in (0, block.steps)
                fast += done
                one_by_one(blocks, logs[1], SENDERS[who], block, first, done)
        assert fast == sum(len(events) for _, events in turns)  # none of these needs the slow way
        wanted, found = content(logs[0]), content(logs[1])
        for name in wanted:
            # cast apart, they are compared in full and found the same
            if "wide depth" not in layout or name not in ("frames", "live"):
                assert found[name] == wanted[name], name
        for log in logs:
            assert log.damage() == []
            log.close()
        for name in ("steps", "blocks"):
            reopened = Log.open(Path(folder) / name)
            ending.callback(reopened.close)
            assert content(reopened)["#sequence"] == wanted["#sequence"]
            assert len(reopened) == len(wanted["keys"])


# The buffers, with their ends from dones and masks


ends = st.sampled_from([(False, 1.0), (False, 0.0), (True, 0.0), (True, 1.0), (True, 0.5)])


@settings(max_examples=rounds(8, 100), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(["plain", "efficient"]), chosen=st.lists(ends, min_size=1, max_size=20), whole=st.booleans()
)
def test_buffers_read_the_same_ends_from_a_block(kind: str, chosen: list[Any], whole: bool):
    one, many = make(kind), make(kind)
    queue = QueuedDataStore(100)
    for n, (done, mask) in enumerate(chosen):
        number: Any = (lambda value: value) if whole else np.asarray
        step = transition(n, done=number(done), mask=number(mask))
        queue.insert(step)
        one.insert(step, "a", n, boot="b", store="s")
    for first, block in parcels(queue, -1, [5]):
        stored = many.insert_block(block, "a", first, 0, boot="b", store="s")
        for number, step in enumerate(list(block)[stored:], first + stored):
            many.insert(unflatten(step), "a", number, boot="b", store="s")
    wanted, found = content(one.log), content(many.log)
    for name in wanted:
        assert found[name] == wanted[name], name
    assert many.latest_data_id() == one.latest_data_id() == len(chosen)
    assert len(many.get_latest_data(0)) == len(chosen)
    one.close()
    many.close()


def test_keys_that_a_buffer_does_not_store_are_passed_over_in_a_block(caplog: pytest.LogCaptureFixture):
    buffer, queue = make("efficient"), QueuedDataStore(10)
    for n in range(6):
        queue.insert({**transition(n), "times": {"sent": 0.1 * n}, "source": 1})
    ((first, block),) = parcels(queue, -1, [10])
    assert buffer.insert_block(block, "a", first, 0, boot="b", store="s") == 6
    assert buffer.log.read(buffer.view.keys(), ["source"])["source"].tolist() == [1] * 6
    assert "transitions have times, which this buffer does not store" in caplog.text
    buffer.close()


def test_grasp_penalties_of_infos():
    buffer = make("plain", include_grasp_penalty=True)
    queue = QueuedDataStore(10)
    for n in range(6):
        queue.insert({**transition(n), "infos": {"grasp_penalty": -0.25 * n}})
    ((first, block),) = parcels(queue, -1, [10])
    assert buffer.insert_block(block, "a", first, 0, boot="b", store="s") == 6
    assert buffer.sample(6, indx=np.arange(6))["grasp_penalty"].tolist() == [-0.25 * n for n in range(6)]
    buffer.close()


# Blocks that lie


def good(count: int = 6) -> dict[str, Any]:
    queue = QueuedDataStore(100)
    queue.batch_insert(Stream(0, "").steps([FOLLOW] * count))
    parcel = queue.parcel(-1)
    assert parcel is not None and parcel.packed is not None
    return parcel.packed


def changed(part: str, name: str, value: Callable[[Any], Any]) -> dict[str, Any]:
    packed = good()
    return {**packed, part: {**packed[part], name: value(packed[part][name])}}


FRAME = "observations/image"


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        ([], "a block of steps is a list"),
        ({}, "a block of steps has no columns"),
        ({**good(), "numbers": None}, "a block of steps has no numbers"),
        ({"columns": {}, "frames": {}, "numbers": {}}, "columns of different lengths or none"),
        (changed("columns", "actions", lambda a: a[:-1]), "columns of different lengths or none"),
        (changed("columns", "actions", lambda a: a.tolist()), "columns of different lengths or none"),
        (changed("columns", "rewards", lambda a: a[0]), "columns of different lengths or none"),
        (
            changed("numbers", FRAME, lambda a: a + 2),
            "observations/image: a block of steps refers to frames that it does not have",
        ),
        (
            changed("numbers", FRAME, lambda a: a - 1),
            "observations/image: a block of steps refers to frames that it does not have",
        ),
        (
            changed("numbers", FRAME, lambda a: a[:, None]),
            "observations/image: a block of steps refers to frames that it does not have",
        ),
        (changed("numbers", FRAME, lambda a: a.astype(float)), "refers to frames that it does not have"),
        (changed("numbers", FRAME, lambda a: a.astype(np.uint64)), "refers to frames that it does not have"),
        (changed("frames", FRAME, lambda a: a[:-1]), "refers to frames that it does not have"),
        (changed("frames", FRAME, lambda a: np.uint8(3)), "refers to frames that it does not have"),
        ({**good(), "frames": {}}, "refers to frames that it does not have"),
        (
            {"columns": {"a": np.zeros(1 << 17, bool)}, "frames": {}, "numbers": {}},
            "a block of 131072 steps; at most 65536",
        ),
    ],
)
def test_what_does_not_fit_together(packed: Any, said: str):
    if (
        packed
        and "numbers" in packed
        and packed.get("numbers")
        and FRAME in packed["numbers"]
        and said.startswith("observations/image")
    ):
        packed["numbers"].pop("next_" + FRAME, None)  # the first to be looked at
    with pytest.raises(FormatError, match=said):
        PackedBlock(packed)


@pytest.mark.parametrize(
    "change",
    [
        ("columns", "rewards", lambda a: a.astype("S4")),
        ("columns", "rewards", lambda a: a.astype("M8[s]")),
        ("columns", "actions", lambda a: a[:, :2]),
        ("columns", "observations/state", lambda a: a[:, None]),
        ("frames", FRAME, lambda a: a[..., :2]),
        ("frames", FRAME, lambda a: a.astype(np.float32)),
        ("frames", FRAME, lambda a: a.astype(np.int64) + 300),
    ],
)
def test_what_does_not_fit_the_schema_stores_nothing(tmp_path: Path, change: Any):
    """It is left to be inserted one by one, which says what is wrong."""
    with Log.create(tmp_path / "log", schema_of(""), durability="never") as log:
        assert RunningEpisodes(log).insert_block(SENDERS[0], PackedBlock(changed(*change)), 0, 0) == []
        assert len(log) == 0 and log.appended == 0


def test_a_strange_source_is_refused_and_does_not_come_back(tmp_path: Path):
    """One by one, in a block or in a trajectory: what is refused is not there when the log is opened again."""
    said = r"source: expected one of 0 \(policy\), 1 \(human\), 2 \(demo\), 3 \(random\), got 200"
    packed = good(3)
    packed["columns"] = {**packed["columns"], "source": np.array([0, 200, 0], np.uint8)}
    log = Log.create(tmp_path / "log", schema_of(""), durability="never")
    chains = RunningEpisodes(log)
    assert chains.insert_block(SENDERS[0], PackedBlock(packed), 0, 0) == []
    steps = [unflatten(step) for step in PackedBlock(packed)]
    for number in (0, 2):
        chains.insert(SENDERS[0], log.check(steps[number], cast=True), number, 0)
    with pytest.raises(SchemaError, match=said):
        log.check(steps[1], cast=True)
    with pytest.raises(SchemaError, match=said):
        log.add(unflatten({path: np.asarray(value)[None, None] for path, value in flatten(steps[1]).items()}))
    log.close()
    with Log.open(tmp_path / "log") as log:
        assert sequences(log) == [0, 2]


def test_an_empty_block(tmp_path: Path):
    packed = good()
    none = {
        part: {path: values[:0] if part != "frames" else values for path, values in packed[part].items()}
        for part in packed
    }
    with Log.create(tmp_path / "log", schema_of(""), durability="never") as log:
        assert RunningEpisodes(log).insert_block(SENDERS[0], PackedBlock(none), 0, 0) == []


# When it cannot be stored


@pytest.mark.parametrize("durability", ["every step", "every episode", "never"])
def test_no_room_at_any_call(memory_path: Path, durability: str, counted: Callable[[str], None]):
    """What is said to be stored is stored, nothing else is, and the rest can be inserted
    later; also after the log was opened again."""
    events = [FOLLOW] * 5 + [TERMINATE, FOLLOW, GAP, FOLLOW] + [FOLLOW] * 6
    schema = schema_of("")
    queue = QueuedDataStore(100)
    queue.batch_insert(Stream(0, "").steps(events))
    blocks = parcels(queue, -1, [7])
    failures = 0
    for full_at in range(1, 10**6, rounds(5, 1)):
        files = Running()
        log = Log.create(
            memory_path / "log", schema, durability=durability, files=files, segment_bytes=3 * schema.layout.step_bytes
        )
        chains, known = RunningEpisodes(log), []
        files.calls, files.full_at = 0, full_at
        for first, block in blocks:
            stored = len(chains.insert_block(SENDERS[0], block, first, 0))
            known += range(first, first + stored)
            assert sequences(log) == known
            failures += stored < block.steps
            for number, step in enumerate(list(block)[stored:], first + stored):
                leaves, before = log.check(unflatten(step), cast=True), log.appended
                try:
                    chains.insert(SENDERS[0], leaves, number, 0)
                except HiltError:
                    if log.appended == before:
                        chains.insert(SENDERS[0], leaves, number, 0)
                known.append(number)
                assert sequences(log) == known
        calls, files.full_at = files.calls, -1
        assert log.read(log.all().keys(), ["rewards"])["rewards"].tolist() == [
            step["rewards"] for step in queue.get_latest_data(-1)
        ]
        assert log.damage() == []
        log.close()
        with Log.open(memory_path / "log") as again:
            assert sequences(again) == known == list(range(len(events)))
        shutil.rmtree(memory_path / "log")
        if calls < full_at:
            break
    assert failures > rounds(0, 5)
    counted(f"no room at any of {full_at} calls; {failures} blocks were cut short")


def sequences(log: Log) -> list[int]:
    with log.reading() as steps:
        found: list[int] = steps.fields(log.all().keys(), ["#sequence"])[0].tolist()
    return found


def test_a_closed_log(tmp_path: Path):
    log = Log.create(tmp_path / "log", schema_of(""), durability="never")
    chains, block = RunningEpisodes(log), PackedBlock(good())
    assert len(chains.insert_block(SENDERS[0], block, 0, 0)) == 6
    log.close()
    assert chains.insert_block(SENDERS[0], block, 6, 0) == []
    with pytest.raises(ClosedError, match="this log is closed; open it again"):
        chains.insert(SENDERS[0], log.check(unflatten(next(iter(block))), cast=True), 6, 0)


def test_a_limiter_lets_a_block_in_as_a_whole_or_not(tmp_path: Path):
    with Log.create(tmp_path / "log", schema_of(""), durability="never") as log:
        sampler = log.all().sampler("fifo", limiter=Queue(8), max_times_sampled=1)
        chains = RunningEpisodes(log)
        assert len(chains.insert_block(SENDERS[0], PackedBlock(good()), 0, 0)) == 6
        assert chains.insert_block(SENDERS[0], PackedBlock(good()), 6, 0) == []
        assert len(log) == 6 and sampler.limiter is not None and sampler.limiter.stats()["inserts"] == 6
        sampler.sample(6, timeout=0)
        assert len(chains.insert_block(SENDERS[0], PackedBlock(good()), 6, 0)) == 6


def test_capacity_holds_for_blocks(tmp_path: Path):
    with Log.create(tmp_path / "log", schema_of(""), durability="never", capacity_steps=20) as log:
        chains, stream, queue = RunningEpisodes(log), Stream(0, ""), QueuedDataStore(1000)
        for turn in range(10):
            after = queue.latest_data_id()
            queue.batch_insert(stream.steps([FOLLOW] * 8 + [TERMINATE] * (turn % 2)))
            for first, block in parcels(queue, after, [9]):
                assert len(chains.insert_block(SENDERS[0], block, first, 0)) == block.steps
                assert len(log) <= 20
        assert sequences(log)[-1] == queue.latest_data_id()
        rewards = {n: step["rewards"] for n, step in enumerate(queue.get_latest_data(-1))}
        assert log.read(log.all().keys(), ["rewards"])["rewards"].tolist() == [rewards[n] for n in sequences(log)]


def test_a_sender_that_is_forgotten_leaves_nothing_running(tmp_path: Path):
    with Log.create(tmp_path / "log", schema_of(""), durability="never") as log:
        chains = RunningEpisodes(log)
        chains.insert_block(SENDERS[0], PackedBlock(good()), 0, 0)
        assert log.index.entries["open"].tolist() == [True]
        chains.forget(SENDERS[0])
        chains.forget(SENDERS[0])
        assert log.index.entries["open"].tolist() == [False]


@pytest.mark.parametrize("sequence", ["a", None, 1.5, -2, 1 << 70])
def test_a_sequence_that_is_no_number_of_a_transition_is_refused_before_anything_is_stored(sequence: Any):
    with Log.anonymous(SCHEMA) as log:
        said = "sequence: expected a whole number from -1 on"
        with pytest.raises(ConfigError, match=said), log.episode() as episode:
            episode.append(numbers(0, 1)[0], sequence)
        with pytest.raises(ConfigError, match=said):
            log.add(trajectory([numbers(0, 2)]), sequence=sequence)
        assert not len(log.all())
