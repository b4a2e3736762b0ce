"""`TrajectoryReplayBuffer` beside the numbers of RLinf's own, and right where RLinf's is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import (
    ClosedError,
    ConfigError,
    CorruptError,
    EmptyError,
    FormatError,
    HiltError,
    SchemaError,
    StorageError,
    UnknownNameError,
)
from hilt.core.tree import flatten
from hilt.replay import Trajectory, TrajectoryCache, TrajectoryReplayBuffer
from tests.replay.rlinf_golden import FOLDER, nested, packed, under

torch = pytest.importorskip("torch")
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


def golden_trajectories() -> list[Trajectory]:
    values = packed("trajectories.npz")
    out = []
    for i in range(4):
        fields = nested(under(values, str(i)))
        tensors = {
            k: ({n: torch.from_numpy(v) for n, v in x.items()} if isinstance(x, dict) else x) for k, x in fields.items()
        }
        tensors = {k: torch.from_numpy(x) if isinstance(x, np.ndarray) and x.ndim else x for k, x in tensors.items()}
        tensors["max_episode_length"] = int(tensors["max_episode_length"])
        tensors["model_weights_id"] = str(tensors["model_weights_id"])
        out.append(Trajectory.from_dict(tensors))
    return out


def same_as_golden(buffer: TrajectoryReplayBuffer, case: dict[str, Any]) -> None:
    with np.load(FOLDER / "expected.npz") as file:
        columns = {key: file[key] for key in EXPECTED["keys"]}
    for first, stop in case["rows"]:
        batch = flatten(buffer.sample(case["num_chunks"]))
        assert list(batch) == EXPECTED["keys"]
        for key, values in batch.items():
            wanted = columns[key][first:stop]
            assert values.numpy().dtype == wanted.dtype, key
            assert np.array_equal(values.numpy(), wanted), key


@pytest.mark.parametrize("case", [c for c in EXPECTED["cases"] if c["how"] != "grow"], ids=lambda case: case["name"])
@pytest.mark.parametrize("cache_size", [0, pytest.param(1, marks=pytest.mark.long), 5])
def test_batches_of_the_original(case: dict[str, Any], cache_size: int) -> None:
    cache: dict[str, Any] = {"enable_cache": cache_size > 0, "cache_size": max(1, cache_size)}
    buffer = TrajectoryReplayBuffer(seed=case.get("seed", 1), sample_window_size=case["window"], **cache)
    if case["how"] == "add_trajectories":
        buffer.add_trajectories(golden_trajectories())
    else:
        shard = {"local_rank": case["rank"], "world_size": case["world"]} if "rank" in case else {}
        buffer.load_checkpoint(str(FOLDER / case["folder"]), is_distributed=bool(shard), **shard)
    for name in ("size", "total_samples", "trajectory_counter"):
        assert getattr(buffer, name) == case.get(name, getattr(buffer, name))
    same_as_golden(buffer, case)
    buffer.close()


def test_the_window_moves_on_as_trajectories_come() -> None:
    cases = [c for c in EXPECTED["cases"] if c["how"] == "grow"]
    buffer = TrajectoryReplayBuffer(seed=cases[0]["seed"], sample_window_size=cases[0]["window"])
    trajectories, added = golden_trajectories(), 0
    for case in cases:
        buffer.add_trajectories(trajectories[added : case["added"]])
        added = case["added"]
        same_as_golden(buffer, case)
    buffer.close()


# RLinf's seven defects, one by one


def test_defect_1_every_trajectory_of_an_index_has_its_file(tmp_path: Path) -> None:
    """With a window or cache smaller than the history, all of it is in the
    checkpoint, and every rank can load its share."""
    for i, options in enumerate([{"sample_window_size": 3}, {"cache_size": 2}, {"enable_cache": False}]):
        buffer = TrajectoryReplayBuffer(**options)
        buffer.add_trajectories(golden_trajectories())
        buffer.sample(4)
        buffer.save_checkpoint(str(tmp_path / str(i)))
        buffer.close()
        index = json.loads((tmp_path / str(i) / "trajectory_index.json").read_text())
        assert index["trajectory_id_list"] == [0, 1, 2, 3]
        total = 0
        for rank in range(3):
            shard = TrajectoryReplayBuffer(
                load_path=str(tmp_path / str(i)), is_distributed=True, local_rank=rank, world_size=3
            )
            assert shard.stats()["corrupt"] == 0
            total += shard.total_samples
            shard.sample(8)
            shard.close()
        assert total == 6 + 12 + 4 + 6


def test_defect_2_window_0_means_all_without_auto_save() -> None:
    buffer = TrajectoryReplayBuffer(sample_window_size=0, auto_save=False)
    buffer.add_trajectories(golden_trajectories())
    states = torch.cat([buffer.sample(64)["curr_obs"]["states"][:, 0] for _ in range(30)])
    assert set((states // 1000).long().tolist()) == {0, 1, 2, 3}
    buffer.close()


def test_defect_3_no_cache_and_no_auto_save() -> None:
    buffer = TrajectoryReplayBuffer(enable_cache=False, auto_save=False)
    buffer.add_trajectories(golden_trajectories())
    assert buffer.sample(5)["actions"].shape[0] == 5
    assert buffer.get_stats() == {"num_trajectories": 4, "total_samples": 28, "cache_size": 0}
    buffer.close()


def test_defect_4_other_fields_are_refused_by_name() -> None:
    buffer = TrajectoryReplayBuffer()
    first, second = golden_trajectories()[:2]
    buffer.add_trajectories([first])
    second.forward_inputs = {"action": second.forward_inputs["action"]}
    with pytest.raises(SchemaError, match=r"forward_inputs/tokens: expected .*, got nothing"):
        buffer.add_trajectories([second])
    assert len(buffer) == 1
    buffer.sample(3)
    with pytest.raises(SchemaError, match=r"needs rewards or prev_logprobs of shape \[T, B, ...\]"):
        buffer.add_trajectories([Trajectory(actions=torch.zeros(2, 2, 3))])
    buffer.close()


@pytest.mark.parametrize("kind", ["pt", "pkl"])
def test_defect_5_a_damaged_file_is_left_out_and_named(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(FOLDER / kind, tmp_path / "c")
    damaged = next((tmp_path / "c").glob(f"trajectory_1_*.{kind}"))
    damaged.write_bytes(damaged.read_bytes()[:-200])
    next((tmp_path / "c").glob(f"trajectory_2_*.{kind}")).unlink()
    buffer = TrajectoryReplayBuffer(sample_window_size=0, enable_cache=False, load_path=str(tmp_path / "c"))
    for _ in range(10):
        assert set((buffer.sample(16)["curr_obs"]["states"][:, 0] // 1000).long().tolist()) <= {0, 3}
    assert buffer.stats()["corrupt"] == 2
    assert damaged.name in caplog.text and "is missing" in caplog.text
    buffer.close()


def test_defect_6_a_checkpoint_before_the_first_sample(tmp_path: Path) -> None:
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(tmp_path / "auto"))
    buffer.add_trajectories(golden_trajectories())
    buffer.save_checkpoint(str(tmp_path / "saved"))
    buffer.close()
    assert len(list((tmp_path / "saved").glob("trajectory_*.pt"))) == 4


def test_defect_7_clear_clears_and_global_generators_are_left_alone(tmp_path: Path) -> None:
    np.random.seed(5)
    torch.manual_seed(5)
    before = np.random.get_state()[1].copy(), torch.get_rng_state().clone()  # type: ignore[index]
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(tmp_path))
    buffer.add_trajectories(golden_trajectories())
    buffer.sample(4)
    buffer.clear()
    assert len(buffer) == 0 and buffer.total_samples == 0
    assert not list(tmp_path.glob("trajectory_*.pt"))
    assert json.loads((tmp_path / "trajectory_index.json").read_text())["trajectory_id_list"] == []
    with pytest.raises(EmptyError, match=r"Cannot sample from an empty buffer\."):
        buffer.sample(1)
    buffer.add_trajectories(golden_trajectories()[:1])
    assert list(buffer._index.entries) == [4]
    assert np.array_equal(np.random.get_state()[1], before[0]) and torch.equal(torch.get_rng_state(), before[1])  # type: ignore[index]
    buffer.close()


# Files


def test_index_and_metadata_have_both_names(tmp_path: Path) -> None:
    buffer = TrajectoryReplayBuffer(seed=9)
    buffer.add_trajectories(golden_trajectories())
    buffer.save_checkpoint(str(tmp_path))
    index = json.loads((tmp_path / "trajectory_index.json").read_text())
    entry = index["trajectory_index"]["1"]
    assert set(entry) == {"uuid", "model_weights_id", "trajectory_id", "num_samples", "shape", "max_episode_length"}
    assert (entry["num_samples"], entry["shape"][:2], entry["max_episode_length"]) == (12, [4, 3], 8)
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    assert metadata == {"trajectory_format": "pt", "size": 4, "total_samples": 28, "trajectory_counter": 4, "seed": 9}
    for only in ("uuid", "model_weights_id"):  # either is read
        other = "uuid" if only == "model_weights_id" else "model_weights_id"
        for number, listed in index["trajectory_index"].items():
            named = {**listed, "uuid": listed["model_weights_id"]}
            index["trajectory_index"][number] = {k: v for k, v in named.items() if k != other}
        (tmp_path / "trajectory_index.json").write_text(json.dumps(index))
        again = TrajectoryReplayBuffer(load_path=str(tmp_path))
        assert len(again) == 4 and again.stats()["corrupt"] == 0
        again.close()
        index = json.loads(
            json.dumps(
                {
                    **index,
                    "trajectory_index": {k: {**e, **entry_names(e)} for k, e in index["trajectory_index"].items()},
                }
            )
        )
    buffer.close()


def entry_names(entry: dict[str, Any]) -> dict[str, Any]:
    name = entry.get("model_weights_id", entry.get("uuid"))
    return {"uuid": name, "model_weights_id": name}


@pytest.mark.parametrize("kind", ["pt", "pkl"])
def test_auto_save_writes_what_load_reads(tmp_path: Path, kind: str) -> None:
    buffer = TrajectoryReplayBuffer(
        auto_save=True, auto_save_path=str(tmp_path), trajectory_format=kind, sample_window_size=0
    )
    buffer.add_trajectories(golden_trajectories())
    buffer.flush()
    other = TrajectoryReplayBuffer(load_path=str(tmp_path), sample_window_size=0)
    assert other.trajectory_format == kind
    a, b = flatten(buffer.sample(20)), flatten(other.sample(20))
    assert all(torch.equal(a[key], b[key]) for key in a)
    for path in tmp_path.glob(f"trajectory_*.{kind}"):
        original = FOLDER / kind / path.name
        assert original.exists()
    other.close()
    buffer.close()


def test_the_index_never_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    """While a thread writes, every index that can be read names only whole files."""
    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=str(tmp_path))
    for _ in range(10):
        buffer.add_trajectories(golden_trajectories())
        if (tmp_path / "trajectory_index.json").exists():
            index = json.loads((tmp_path / "trajectory_index.json").read_text())
            for entry in index["trajectory_index"].values():
                assert (tmp_path / f"trajectory_{entry['trajectory_id']}_{entry['model_weights_id']}.pt").exists()
    buffer.close()


def test_bfloat16_comes_back_as_it_was(tmp_path: Path) -> None:
    values = torch.randn(3, 2, 4).to(torch.bfloat16)
    buffer = TrajectoryReplayBuffer(seed=0)
    buffer.add_trajectories([Trajectory(rewards=torch.zeros(3, 2), actions=values, model_weights_id="w")])
    batch = buffer.sample(6)
    assert batch["actions"].dtype == torch.bfloat16
    assert {tuple(row.tolist()) for row in batch["actions"]} <= {tuple(row.tolist()) for row in values.reshape(6, 4)}
    buffer.save_checkpoint(str(tmp_path))
    again = TrajectoryReplayBuffer(load_path=str(tmp_path))
    again._generator.manual_seed(0)
    assert torch.equal(again.sample(6)["actions"], batch["actions"])
    again.close()
    buffer.close()


def test_the_log_underneath_knows_who_acted_and_what_ended() -> None:
    buffer = TrajectoryReplayBuffer()
    trajectories = golden_trajectories()
    buffer.add_trajectories(trajectories)
    assert buffer.log is not None
    human = sum(
        int((t.intervene_flags != 0).flatten(2).any(-1).sum()) for t in trajectories if t.intervene_flags is not None
    )
    assert len(buffer.log.by_source("human")) == human > 0
    assert len(buffer.log.all()) == 28
    buffer.close()


# Errors


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"auto_save=True needs auto_save_path="):
        TrajectoryReplayBuffer(auto_save=True)
    with pytest.raises(ConfigError, match=r"auto_save_path= is only used with auto_save=True"):
        TrajectoryReplayBuffer(auto_save_path=str(tmp_path))
    with pytest.raises(UnknownNameError, match=r"no trajectory format named 'ptt'; did you mean 'pt'\?"):
        TrajectoryReplayBuffer(trajectory_format="ptt")
    for name, value, expected in [
        (
            "sample_window_size",
            -1,
            "sample_window_size: expected a whole number from 0 on, the number of trajectories, 0 for all; got -1",
        ),
        ("sample_window_size", None, "sample_window_size: expected a whole number from 0 on, .*; got None"),
        ("cache_size", "5", "max_size: expected a whole number from 1 on, .*; got '5'"),
        ("trajectory_format", 3, "no trajectory format named '3'. Known: pkl, pt"),
        ("load_path", 3, "load_path: expected the name of a folder, text or a pathlib.Path, got 3"),
        (
            "sed",
            3,
            (
                r"TrajectoryReplayBuffer: no argument named 'sed'; did you mean 'seed'\? Expected "
                r"TrajectoryReplayBuffer\(seed=1234, "
            ),
        ),
    ]:
        with pytest.raises(HiltError, match=expected):
            TrajectoryReplayBuffer(**{name: value})
    with pytest.raises(ConfigError, match=r"auto_save_path: expected the name of a folder, .* got 3"):
        TrajectoryReplayBuffer(auto_save=True, auto_save_path=3)  # type: ignore[arg-type]
    buffer = TrajectoryReplayBuffer()
    with pytest.raises(FileNotFoundError, match=r"Metadata not found at") as caught:
        buffer.load_checkpoint(str(tmp_path / "nowhere"))
    assert isinstance(caught.value, StorageError)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: buffer.load_checkpoint(None), "load_path: expected the name of a folder, .* got None"),  # type: ignore[arg-type]
        (lambda: buffer.save_checkpoint(None), "save_path: expected the name of a folder, .* got None"),  # type: ignore[arg-type]
        (lambda: buffer.add_trajectories(None), "add_trajectories: expected a list of trajectories, got NoneType"),  # type: ignore[arg-type]
        (lambda: buffer.add_trajectories(Trajectory()), "expected a list of trajectories, got Trajectory"),  # type: ignore[arg-type]
        (lambda: buffer.add_trajectories([{}]), "expected a Trajectory, got dict; Trajectory.from_dict"),  # type: ignore[list-item]
        (lambda: buffer.is_ready("a"), "min_size: expected a whole number, .*; got 'a'"),  # type: ignore[arg-type]
        (lambda: buffer.sample("a"), "num_chunks: expected a whole number from 1 on, .*; got 'a'"),  # type: ignore[arg-type]
        (lambda: buffer.sample(chunks=1), r"TrajectoryReplayBuffer.sample: no argument named 'chunks'"),  # type: ignore[call-arg]
        (lambda: Trajectory(rewrds=1), r"Trajectory: no argument named 'rewrds'; did you mean 'rewards'\?"),  # type: ignore[call-arg]
    ]
    for call, said in calls:
        with pytest.raises(HiltError, match=said):
            call()
    with pytest.raises(ConfigError, match=r"local_rank \(3\) must be in range \[0, 3\)"):
        buffer.load_checkpoint(str(FOLDER / "pt"), is_distributed=True, local_rank=3, world_size=3)
    with pytest.raises(ConfigError, match=r"num_chunks: expected a whole number from 1 on, .* got 0"):
        buffer.sample(0)
    buffer.close()
    with pytest.raises(ClosedError, match=r"this buffer is closed"):
        buffer.sample(1)


# The cache


def test_cache_is_first_in_first_out_and_grows() -> None:
    cache = TrajectoryCache(max_size=2)
    for number, length in enumerate([2, 3, 5]):
        cache.put(number, {"a": torch.full((length, 2), float(number)), "obs": {"b": torch.arange(length)}})
    assert list(cache.cache) == [1, 2] and cache.get(0) is None
    assert cache.get_slot_length() == 5
    one, two = cache.get(1), cache.get(2)
    assert one is not None and two is not None
    assert torch.equal(one["a"], torch.ones(3, 2)) and torch.equal(two["obs"]["b"], torch.arange(5))
    assert cache.get_buffer()["a"].shape == (10, 2)
    with pytest.raises(SchemaError, match=r"obs/b: trajectory 9 lacks this field"):
        cache.put(9, {"a": torch.zeros(2, 2)})
    with pytest.raises(SchemaError, match=r"Trajectory contains no tensor fields\."):
        cache.put(9, {"x": "text"})
    with pytest.raises(
        ConfigError, match=r"max_size: expected a whole number from 1 on, .* give enable_cache=False; got 0"
    ):
        TrajectoryCache(0)
    cache.clear()
    assert len(cache) == 0


def test_cached_trajectories_are_not_read_from_disk() -> None:
    for size, reads in ((0, 8), (4, 0)):
        buffer = TrajectoryReplayBuffer(enable_cache=size > 0, cache_size=max(1, size), sample_window_size=0)
        buffer.add_trajectories(golden_trajectories())
        buffer.sample(8)
        assert buffer.stats()["disk_reads"] == reads
        buffer.close()


@pytest.mark.parametrize(
    "text", ["[" * 10**6, '{"trajectory_format": "pt", "seed": 1e999, "trajectory_counter": 4}', "[]", "{", "{}"]
)
def test_metadata_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "pt", tmp_path / "c")
    (tmp_path / "c/metadata.json").write_text(text)
    with pytest.raises(
        (CorruptError, FormatError), match=r"metadata\.json|its JSON files are not those of an RLinf replay buffer"
    ):
        TrajectoryReplayBuffer(load_path=str(tmp_path / "c"))


NAMELESS = [
    *({"trajectory_id": number} for number in ([0] * 1000, "x", 10**200)),
    *({name: "x" * 1000} for name in ("uuid", "model_weights_id")),
]


@pytest.mark.parametrize("change", NAMELESS, ids=lambda change: next(iter(change)))
def test_an_index_of_names_that_no_file_can_have_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "pt", tmp_path / "c")
    index = json.loads((tmp_path / "c/trajectory_index.json").read_text())
    index["trajectory_index"]["2"] |= change
    (tmp_path / "c/trajectory_index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match="its JSON files are not those of an RLinf replay buffer"):
        TrajectoryReplayBuffer(load_path=str(tmp_path / "c"))
