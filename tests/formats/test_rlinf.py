"""RLinf's folders, those that the real library wrote among them (tests/golden/rlinf)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import CorruptError, FormatError, SchemaError, UnknownNameError, UnsafeError
from hilt.core.tree import flatten
from hilt.formats import Writer, create, rlinf
from hilt.formats.convert import convert
from hilt.formats.episodes import Episode
from hilt.formats.experience import open_dataset as open_log
from hilt.formats.rlinf import open_dataset
from hilt.formats.rlinf_trajectory import step_rows
from hilt.replay import Trajectory, TrajectoryReplayBuffer
from tests.compat.test_buffer import golden_trajectories
from tests.formats.toy_episodes import assert_all_same, made, write, write_stopped_at_every_call
from tests.replay.rlinf_golden import FOLDER, packed, under

torch = pytest.importorskip("torch")
SHAPES = [(3, 2), (4, 3), (2, 2), (6, 1)]


def wanted() -> dict[float, dict[str, Any]]:
    """Every step of the four trajectories, by the number that names it."""
    values, steps = packed("trajectories.npz"), {}
    for i, (length, width) in enumerate(SHAPES):
        fields = {
            path: step_rows(path, a, length)
            for path, a in under(values, str(i)).items()
            if isinstance(a, np.ndarray) and a.ndim > 1
        }
        for t in range(length):
            for b in range(width):
                steps[float(fields["curr_obs/states"][t, b, 0])] = {path: array[t, b] for path, array in fields.items()}
    return steps


@pytest.mark.parametrize("folder", ["pt", "pkl", "checkpoint"])
def test_folders_of_the_original(folder: str) -> None:
    assert rlinf.matches(FOLDER / folder)
    dataset, steps = open_dataset(FOLDER / folder), wanted()
    assert dataset.describe() == {"trajectories": 4}
    seen = []
    for episode in dataset:
        columns = flatten(episode.columns)
        ended = columns["terminated"] | columns["truncated"]
        assert not ended[:-1].any(), "an episode goes on after its end"
        for t, name in enumerate(columns["observations/states"][:, 0].tolist()):
            step = steps[name]
            for path, value in step.items():
                ours = path.replace("curr_obs", "observations").replace("next_obs", "next_observations")
                ours = "extra/rewards" if path == "rewards" else ours
                assert np.array_equal(columns[ours][t], value) and columns[ours].dtype == value.dtype, path
            assert columns["rewards"][t] == step["rewards"].sum(dtype=np.float32)
            assert (
                columns["terminated"][t] == step["terminations"].any()
                and columns["truncated"][t] == step["truncations"].any()
            )
            assert (
                columns["source"][t] == step["intervene_flags"].any()
                and columns["policy_version"][t] == step["versions"].flat[0]
            )
            seen.append(name)
    assert sorted(seen) == sorted(steps)
    assert episode.facts["environment"] == 0 and episode.facts["model_weights_id"].startswith("88cb322f")
    if folder != "checkpoint":  # which has no rows of resets any more
        lengths = [len(e) for e in dataset if e.facts["rollout_epochs"] == 2]
        assert sum(lengths) == 6 and max(lengths) <= 3, "the environment was reset after three steps"
    assert not dataset.notes.counts


def test_ranks_single_files_and_a_log(tmp_path: Path) -> None:
    for rank in (0, 1, 10):
        shutil.copytree(FOLDER / "pt", tmp_path / f"rank_{rank}")
    alone = len(open_dataset(FOLDER / "pt"))
    assert rlinf.matches(tmp_path) and len(open_dataset(tmp_path)) == 3 * alone
    file = sorted((FOLDER / "pkl").glob("*.pkl"))[1]
    assert rlinf.matches(file) and sum(len(e) for e in open_dataset(file)) == 12
    summary = convert(tmp_path, tmp_path / "log", format="rlinf")
    assert (summary.episodes, summary.steps) == (3 * alone, 3 * 28)
    small = next(open_dataset(file).jobs(first=1, images=False))()
    assert (
        small is not None
        and "states" in small.columns["observations"]
        and "main_images" not in small.columns["observations"]
    )


def test_what_torch_alone_has_becomes_float32(tmp_path: Path) -> None:
    trajectory = golden_trajectories()[0]
    trajectory.prev_logprobs = trajectory.prev_logprobs.to(torch.bfloat16)  # type: ignore[union-attr]
    with_buffer(tmp_path, [trajectory])
    dataset = open_dataset(tmp_path)
    column = np.concatenate([e.columns["prev_logprobs"] for e in dataset])
    assert column.dtype == np.float32 and len(column) == 6
    assert np.array_equal(np.sort(column, axis=None), np.sort(trajectory.prev_logprobs.float().numpy(), axis=None))
    assert set(dataset.notes.counts) == {"prev_logprobs: bfloat16 is kept as float32"}


def with_buffer(folder: Path, trajectories: list[Trajectory], kind: str = "pt") -> None:
    buffer = TrajectoryReplayBuffer(trajectory_format=kind)
    buffer.add_trajectories(trajectories)
    buffer.save_checkpoint(str(folder))
    buffer.close()


def test_damage_costs_one_trajectory(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "pt", tmp_path / "a")
    one, two, *_ = sorted((tmp_path / "a").glob("*.pt"))
    one.unlink()
    raw = bytearray(two.read_bytes())
    raw[len(raw) // 2] ^= 255
    two.write_bytes(raw)
    outcome: list[Any] = []
    for job in open_dataset(tmp_path / "a").jobs():
        try:
            outcome.append(len(job() or ()))
        except CorruptError as error:
            outcome.append(str(error))
    assert "trajectory_0_" in outcome[0] and "is missing, and the index names it" in outcome[0]
    assert "trajectory_1_" in outcome[1] and sum(outcome[2:]) == 10


@pytest.mark.parametrize("kind", ["pt", "pkl"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"next_obs": {}}, "without curr_obs, next_obs, actions or rewards"),
        ({"rewards": None}, "without curr_obs"),
        ({"nonsense": 1}, "a trajectory has no field 'nonsense'"),
        ({"prev_values": "long"}, "prev_values has"),
        ({"versions": "wide"}, "versions has shape"),
    ],
)
def test_trajectories_of_another_kind(change: dict[str, Any], text: str, kind: str, tmp_path: Path) -> None:
    with_buffer(tmp_path, golden_trajectories()[:1], kind)
    (path,) = tmp_path.glob(f"trajectory_*.{kind}")
    from hilt.formats import rlinf_folder as folders

    values = folders.read_trajectory(path)
    fills = {"long": torch.zeros(50, 2, 1), "wide": torch.zeros(3, 5, 1)}
    folders.write_trajectory(
        path, {**values, **{name: fills.get(v, v) if isinstance(v, str) else v for name, v in change.items()}}
    )
    with pytest.raises(CorruptError, match=text):
        list(open_dataset(tmp_path))


def test_code_is_refused_and_folders_without_an_index(tmp_path: Path) -> None:
    import os
    import pickle

    class Gadget:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "it-ran"),)

    shutil.copytree(FOLDER / "pkl", tmp_path / "a")
    (tmp_path / "a" / next((FOLDER / "pkl").glob("trajectory_0*.pkl")).name).write_bytes(
        pickle.dumps({"rewards": Gadget()})
    )
    with pytest.raises(UnsafeError, match=r"asks for posix\.mkdir"):
        list(open_dataset(tmp_path / "a"))
    assert not (tmp_path / "it-ran").exists()
    with pytest.raises(FormatError, match=r"no trajectory_index\.json in it, nor in rank_0"):
        open_dataset(tmp_path)
    index = tmp_path / "a" / "trajectory_index.json"
    index.write_text(json.dumps({"trajectory_id_list": [3]}))
    with pytest.raises(FormatError, match="not those of an RLinf replay buffer"):
        open_dataset(tmp_path / "a")


# Writing


def episodes() -> list[Episode]:
    made_here = [made(4, 0), made(1, 1, source=0, ended="truncated"), made(3, 2, source=[0, 1, 2], ended="")]
    for episode in made_here:
        episode.columns |= {
            "times": {"sent": np.arange(len(episode)) / 3},
            "versions": np.ones((len(episode), 1), np.int16),
        }
    made_here[0].facts |= {"model_weights_id": "../../x", "max_episode_length": 70}
    made_here[1].columns["truncated"][:] = made_here[1].columns["terminated"][:] = True
    return made_here


@pytest.mark.parametrize("kind", ["pt", "pkl"])
def test_what_we_write_is_read_as_it_was(kind: str, tmp_path: Path) -> None:
    write(create(tmp_path / "a", "rlinf", trajectory_format=kind), episodes())
    dataset = open_dataset(tmp_path / "a")
    assert_all_same(list(dataset), episodes())
    assert not dataset.notes.counts and len(list((tmp_path / "a").glob(f"trajectory_*.{kind}"))) == 3
    alone = made(3, 1)
    alone.columns["observations"], alone.columns["next_observations"] = np.zeros((3, 2)), np.ones((3, 2))
    write(create(tmp_path / "b", "rlinf"), [alone])
    assert_all_same(list(open_dataset(tmp_path / "b")), [alone])
    buffer = TrajectoryReplayBuffer(load_path=str(tmp_path / "a"))
    batch = buffer.sample(64)
    assert buffer.total_samples == 8 and batch["curr_obs"]["state"].shape[1:] == (3,)
    buffer.close()


def test_a_log_goes_there_and_back(tmp_path: Path) -> None:
    convert(FOLDER / "pt", tmp_path / "log", format="rlinf")
    convert(tmp_path / "log", tmp_path / "there", format="log", to="rlinf")
    convert(tmp_path / "there", tmp_path / "again", format="rlinf")
    assert_all_same(list(open_log(tmp_path / "again")), list(open_log(tmp_path / "log")))
    for file in (tmp_path / "there").glob("hilt_*.pt"):  # as RLinf itself sees it
        file.unlink()
    got = np.concatenate([e.columns["observations"]["states"][:, 0] for e in open_dataset(tmp_path / "there")])
    assert sorted(got.tolist()) == sorted(wanted())


def test_a_stopped_writer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = episodes()

    def check(folder: Path) -> None:
        assert_all_same(list(open_dataset(folder)), asked)
        assert len(list(folder.iterdir())) == 2 * 3 + 3

    def make(folder: Path) -> Writer:
        return create(folder, "rlinf")

    with monkeypatch.context() as patch:
        assert write_stopped_at_every_call(make, asked, check, tmp_path, patch) > 20


def test_writing_refuses_and_a_spoiled_companion_is_found(tmp_path: Path) -> None:
    nameless = made(2)
    nameless.columns["actions"] = {"arm": np.zeros((2, 3))}
    with pytest.raises(SchemaError, match="have actions, one array"):
        create(tmp_path / "a", "rlinf").add(0, nameless)
    with pytest.raises(UnknownNameError, match="no trajectory format named 'npz'"):
        create(tmp_path / "a", "rlinf", trajectory_format="npz")
    write(create(tmp_path / "b", "rlinf"), episodes()[:1])
    from hilt.replay import tensors as bridge

    path = tmp_path / "b" / "hilt_0.pt"
    kept = bridge.load_pt(path)
    for change in (
        {"names": "["},
        {"names": '["nothing"]'},
        {"facts": "3"},
        {"columns": {"source": torch.zeros(9)}},
        {"columns": 3},
    ):
        bridge.save_pt({**kept, **change}, path)
        with pytest.raises(CorruptError, match="trajectory_0_"):
            list(open_dataset(tmp_path / "b"))
