"""Minari's datasets. Those that the real library writes are read in tests/peers/test_hdf5.py."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import CorruptError, FormatError, UnsafeError
from hilt.core.tree import Array, flatten
from hilt.formats import minari
from hilt.formats.convert import convert
from hilt.formats.minari import open_dataset

h5py = pytest.importorskip("h5py")
pytest.importorskip("PIL")


def box(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    return {"type": "Box", "dtype": dtype, "shape": list(shape), "low": 0, "high": 255}


SPACES = {
    "observation_space": {
        "type": "Dict",
        "subspaces": {
            "state": box((3,), "float32"),
            "camera": box((32, 40, 3), "uint8"),
            "gray": box((40, 32), "uint8"),
            "mission": {"type": "Text"},
            "pair": {"type": "Tuple", "subspaces": [{"type": "Discrete", "n": 5, "start": 0}, box((2, 2), "float64")]},
        },
    },
    "action_space": {"type": "Tuple", "subspaces": [{"type": "Discrete", "n": 4, "start": 0}, box((2,), "float32")]},
}


def jpeg(image: Array) -> Array:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG")
    return np.frombuffer(file.getvalue(), np.uint8)


def decoded(data: Array) -> Array:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data.tobytes())))


def written(folder: Path, lengths: tuple[int, ...] = (4, 3), **about: Any) -> tuple[Path, list[dict[str, Any]]]:
    """A dataset as Minari 0.5.4 lays it out, and what is in it."""
    (folder / "data").mkdir(parents=True)
    metadata = {
        "total_episodes": len(lengths),
        "total_steps": sum(lengths),
        "data_format": "hdf5",
        "jpeg_encoding": True,
    }
    metadata |= {name: json.dumps(space) for name, space in SPACES.items()} | about
    (folder / "data" / "metadata.json").write_text(json.dumps(metadata))
    rng, inside = np.random.default_rng(0), []
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for number, length in enumerate(lengths):
            camera = [jpeg(rng.integers(0, 256, (32, 40, 3), np.uint8)) for _ in range(length + 1)]
            gray = [jpeg(np.full((40, 32), 7 * i, np.uint8)) for i in range(length + 1)]
            columns = {
                "observations/state": rng.normal(size=(length + 1, 3)).astype(np.float32),
                "observations/pair/_index_0": rng.integers(0, 5, length + 1),
                "observations/pair/_index_1": rng.normal(size=(length + 1, 2, 2)),
                "actions/_index_0": rng.integers(0, 4, length),
                "actions/_index_1": rng.normal(size=(length, 2)).astype(np.float32),
                "rewards": rng.normal(size=length),
                "terminations": np.arange(length) == (length - 1 if number == 0 else -1),
                "truncations": np.arange(length) == (length - 1 if number == 1 else -1),
                "infos/x": np.arange(length + 1.0),
                "infos/deep/y": np.ones((length, 2)),
            }
            group = file.create_group(f"episode_{number}")
            for path, values in columns.items():
                group[path] = values
            group["observations/mission"] = ["go there"] * (length + 1)
            of_any_length = group.create_dataset("observations/camera", (length + 1,), h5py.vlen_dtype(np.uint8))
            for i, data in enumerate(camera):
                of_any_length[i] = data
            assert len({len(g) for g in gray}) == 1
            group["observations/gray"] = np.stack(gray)
            group.attrs.update(
                {"id": number, "seed": 7 + number, "total_steps": length, "options/a/b": 3, "rewards_sum": 1.5}
            )
            columns |= {"observations/camera": np.stack(list(map(decoded, camera)))}
            columns |= {"observations/gray": np.stack(list(map(decoded, gray)))}
            inside.append(columns)
    return folder, inside


def assert_inside(columns: dict[str, Array], inside: dict[str, Array]) -> None:
    length = len(inside["rewards"])
    for path, values in inside.items():
        ours = path.replace("_index_", "").replace("terminations", "terminated").replace("truncations", "truncated")
        if path.startswith("observations/"):
            assert np.array_equal(columns[ours], values[:-1]) and np.array_equal(columns[f"next_{ours}"], values[1:]), (
                path
            )
        else:
            assert np.array_equal(columns[ours], values[-length:]) and columns[ours].dtype == values.dtype, path


def test_a_dataset(tmp_path: Path) -> None:
    folder, inside = written(tmp_path / "door-v2")
    for place in (folder, folder / "data", folder / "data" / "main_data.hdf5"):
        assert minari.matches(place)
        dataset = open_dataset(place)
        assert len(dataset) == 2 and dataset.describe()["total_steps"] == 7
        for episode, wanted in zip(dataset, inside, strict=True):
            assert_inside(flatten(episode.columns), wanted)
            assert (episode.columns["source"] == 2).all()
    assert episode.facts == {
        "episode_id": 1,
        "seed": 8,
        "options": {"a": {"b": 3}},
        "language_instruction": "go there",
        "episode_metadata": {"rewards_sum": 1.5},
    }
    assert dataset.notes.counts == {"infos of the reset, before the first step: not carried over": 2}
    small = next(dataset.jobs(first=1, images=False))()
    assert small is not None and sorted(small.columns["observations"]) == ["pair", "state"]
    summary = convert(folder, tmp_path / "log", format="minari")
    assert (summary.episodes, summary.steps, summary.unknown) == (2, 7, 2)


def test_arrays_that_are_not_pictures_stay_as_they_are(tmp_path: Path) -> None:
    folder, _ = written(tmp_path / "a", (3,), jpeg_encoding=False)
    raw = np.arange(4 * 32 * 40 * 3, dtype=np.uint8).reshape(4, 32, 40, 3)
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        seen = file["episode_0/observations"]
        del seen["camera"], seen["gray"]
        seen["camera"] = raw
        seen["gray"] = raw[..., 0].transpose(0, 2, 1)
    (episode,) = open_dataset(folder)
    assert np.array_equal(episode.columns["observations"]["camera"], raw[:-1])
    assert episode.columns["observations"]["gray"].shape == (3, 40, 32)


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_arrow(kind: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.dataset as datasets

    def fixed(values: Array, pad: int = 0) -> Any:
        flat = np.pad(values.reshape(len(values), -1), ((0, pad), (0, 0)))
        return pa.FixedSizeListArray.from_arrays(flat.reshape(-1), flat.shape[1])

    folder, inside = written(tmp_path / "a", (4,), data_format=kind)
    (folder / "data" / "main_data.hdf5").unlink()
    one, image = inside[0], jpeg(np.zeros((32, 40, 3), np.uint8)).tobytes()
    one["observations/camera"] = np.zeros((5, 32, 40, 3), np.uint8)
    del one["observations/gray"], one["infos/deep/y"]
    struct = pa.StructArray.from_arrays
    pair = struct(
        [pa.array(one["observations/pair/_index_0"]), fixed(one["observations/pair/_index_1"])], names=["0", "1"]
    )
    seen = [fixed(one["observations/state"]), pa.array([image] * 5, pa.binary()), pa.array(["go there"] * 5), pair]
    deep = pa.field("z", pa.list_(pa.float64(), 6), metadata={"shape": "2,3"})
    columns = {
        "episode_id": pa.array(np.zeros(5, np.int32)),
        "observations": struct(seen, names=["state", "camera", "mission", "pair"]),
        "actions": struct(
            [pa.array(np.pad(one["actions/_index_0"], (0, 1))), fixed(one["actions/_index_1"], 1)], names=["0", "1"]
        ),
        **{name: pa.array(np.pad(one[name], (0, 1))) for name in ("rewards", "terminations", "truncations")},
        "infos": struct(
            [pa.array(one["infos/x"]), fixed(np.arange(30.0).reshape(5, 2, 3))],
            fields=[pa.field("x", pa.float64()), deep],
        ),
    }
    datasets.write_dataset(
        pa.RecordBatch.from_pydict(columns), folder / "data", format=kind, partitioning=["episode_id"],
        existing_data_behavior="overwrite_or_ignore",
    )  # fmt: skip
    (folder / "data" / "0" / "metadata.json").write_text(json.dumps({"id": 0, "total_steps": 4, "seed": 3}))
    dataset = open_dataset(folder)
    assert minari.matches(folder) and len(dataset) == 1
    (episode,) = dataset
    assert_inside(flatten(episode.columns), one)
    assert np.array_equal(episode.columns["infos"]["z"], np.arange(30.0).reshape(5, 2, 3)[1:])
    assert episode.facts == {"episode_id": 0, "seed": 3, "language_instruction": "go there"}
    small = next(dataset.jobs(images=False))()
    assert small is not None and sorted(small.columns["observations"]) == ["pair", "state"]
    (file,) = (folder / "data" / "0").glob(f"*.{kind}")
    for damage in (file.read_bytes()[:-50], b"", b"x" * 500):
        file.write_bytes(damage)
        with pytest.raises(CorruptError, match="/0: damaged") as caught:
            list(open_dataset(folder))
        assert "\n" not in str(caught.value)
    file.unlink()
    with pytest.raises(CorruptError, match="/0: damaged"):
        list(open_dataset(folder))


def test_what_cannot_be_read(tmp_path: Path) -> None:
    assert not minari.matches(tmp_path)
    folder, _ = written(tmp_path / "a", (3, 3, 3))
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        del file["episode_0/rewards"]
        file["episode_0/rewards"] = np.zeros(2)
        del file["episode_1/observations/gray"]
        file["episode_1/observations/gray"] = np.zeros((4, 99), np.uint8)
    outcome: list[Any] = []
    for job in open_dataset(folder).jobs():
        try:
            outcome.append(len(job() or ()))
        except CorruptError as error:
            outcome.append(str(error))
    assert (
        "rows, for 2 steps" in outcome[0]
        and "episode_1/observations/gray: neither a PNG nor a JPEG image" in outcome[1]
        and outcome[2] == 3
    )
    (folder / "data" / "other.hdf5").write_bytes((folder / "data" / "main_data.hdf5").read_bytes())
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        del file["episode_2/infos"]
        file["episode_2/infos"] = h5py.ExternalLink("other.hdf5", "episode_2/infos")
    with pytest.raises(UnsafeError, match="leads to another place or file"):
        list(open_dataset(folder).jobs())[2]()
    about = folder / "data" / "metadata.json"
    for text in ("{", "[]", '{"observation_space": "{"}'):
        about.write_text(text)
        with pytest.raises(FormatError, match="not the metadata of a Minari dataset"):
            open_dataset(folder)
    about.write_text('{"data_format": "zarr"}')
    with pytest.raises(FormatError, match="data_format is 'zarr'; hdf5, arrow and parquet are read"):
        open_dataset(folder)


@pytest.mark.parametrize("name", ["rewards", "terminations", "truncations"])
def test_an_episode_without_what_every_step_has_is_damaged(name: str, tmp_path: Path) -> None:
    path, _ = written(tmp_path / "a")
    with h5py.File(path / "data/main_data.hdf5", "a") as file:
        del file["episode_0"][name]
        del file["episode_1"][name]
        file["episode_1"][name] = np.zeros((3, 1))
    for job in open_dataset(path).jobs():
        with pytest.raises(CorruptError, match=rf"episode_\d/{name}: expected one number for each step, got"):
            job()


def test_an_element_that_stands_for_many_is_not_read_as_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hilt.formats.hdf5.MAX_ELEMENTS", 100)
    folder, _ = written(tmp_path / "a", (4,))
    with pytest.raises(CorruptError, match="is longer than 100 bytes; it was not read"):
        list(open_dataset(folder))
