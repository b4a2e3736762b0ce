"""Small, whole datasets of each format, to be spoilt."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.tree import flatten, unflatten
from hilt.formats import create
from hilt.formats.episodes import Episode

GOLDEN = Path(__file__).parent.parent / "golden"
FORMATS = ("rlds", "lerobot", "hil-serl", "rlinf", "robomimic", "minari", "log")


def samples(format: str, folder: Path) -> list[Path]:
    """Of each kind that there is, and what our own writers make: it holds things of
    ours, which may be spoilt as well."""
    folder.mkdir(parents=True)
    if format == "log":
        return [written(format, folder / "ours")]
    if format in ("rlds", "lerobot", "rlinf"):
        names = {"rlds": "all_features bridge_like d4rl_like", "lerobot": "v3_image v3_video v21_image v21_video"}
        found = [GOLDEN / format / name for name in names.get(format, "pkl pt checkpoint").split()]
        found = [path / "1.0.0" if format == "rlds" else path for path in found]
    else:
        found = {"hil-serl": hilserl, "robomimic": robomimic, "minari": minari}[format](folder)
    return found if format == "minari" else [*found, written(format, folder / "ours")]


def written(format: str, folder: Path) -> Path:
    writer = create(folder, format, **({"images": "png"} if format == "lerobot" else {}))
    for number in range(3):
        steps = transitions(4 + number)
        kept = [key for key in flatten(steps[0]) if not key.startswith(("infos", "masks", "dones"))]
        columns = {key: np.stack([flatten(step)[key] for step in steps]) for key in kept}
        last = np.arange(len(steps)) == len(steps) - 1
        ends = {
            "terminated": last,
            "truncated": np.zeros(len(steps), bool),
            "source": np.full(len(steps), number, np.uint8),
        }
        facts = {"success": True, "language_instruction": "go", "note": {"a": [1, None, "x"]}}
        writer.add(
            number, Episode(unflatten({**columns, **ends, "rewards": columns["rewards"].astype(np.float32)}), facts)
        )
    writer.finish()
    writer.close()
    return folder


def transitions(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(count)
    states, pictures = (
        rng.normal(size=(count + 1, 1, 4)).astype(np.float32),
        rng.integers(0, 255, (count + 1, 1, 8, 8, 3), np.uint8),
    )
    frames = [{"state": state, "front": picture} for state, picture in zip(states, pictures, strict=True)]
    return [
        {
            "observations": frames[i],
            "next_observations": frames[i + 1],
            "actions": rng.normal(size=3),
            "rewards": float(i == count - 1),
            "masks": float(i < count - 1),
            "dones": i == count - 1,
            "infos": {"succeed": np.bool_(True), "grasp_penalty": -0.02},
        }
        for i in range(count)
    ]


def hilserl(folder: Path) -> list[Path]:
    demos = folder / "demos_1.pkl"
    demos.write_bytes(pickle.dumps(transitions(5) + transitions(3), protocol=4))
    old = folder / "demos_2.pkl"
    old.write_bytes(pickle.dumps(transitions(4), protocol=2))
    run = folder / "run"
    for name in ("buffer", "demo_buffer"):
        (run / name).mkdir(parents=True)
        for step in (5, 10):
            steps = [{k: v for k, v in one.items() if k != "infos"} for one in transitions(step)]
            (run / name / f"transitions_{step}.pkl").write_bytes(
                pickle.dumps(steps if name == "buffer" else steps[2:4], protocol=4)
            )
    return [demos, old, run]


def robomimic(folder: Path) -> list[Path]:
    import h5py

    rng = np.random.default_rng(0)
    path = folder / "demo.hdf5"
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "type": 1, "env_kwargs": {}})
        data.attrs["total"] = 9
        for number, steps in enumerate((5, 4)):
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = steps
            demo.attrs["model_file"] = "<mujoco/>"
            demo["actions"], demo["rewards"] = rng.normal(size=(steps, 7)), np.zeros(steps)
            demo["dones"], demo["states"] = np.arange(steps) == steps - 1, rng.normal(size=(steps, 6))
            for group in ("obs", "next_obs")[: 2 - number]:
                demo.create_group(group)["state"] = rng.normal(size=(steps, 3))
                demo[group].create_dataset(
                    "agentview_image", data=rng.integers(0, 255, (steps, 8, 8, 3), np.uint8), compression="gzip"
                )
        mask = file.create_group("mask")
        mask["train"] = np.array([b"demo_0"])
    libero = folder / "libero_demo.hdf5"
    with h5py.File(path, "r") as file, h5py.File(libero, "w") as copy:
        file.copy("data", copy)
        copy["data"].attrs["problem_info"] = json.dumps({"language_instruction": "open the drawer"})
    return [path, libero]


def minari(folder: Path) -> list[Path]:
    import h5py

    rng = np.random.default_rng(0)
    data = folder / "lift" / "data"
    data.mkdir(parents=True)
    with h5py.File(data / "main_data.hdf5", "w") as file:
        for number, steps in enumerate((4, 3)):
            episode = file.create_group(f"episode_{number}")
            episode.attrs["id"], episode.attrs["total_steps"], episode.attrs["seed"] = number, steps, 7
            observations = episode.create_group("observations")
            observations["state"] = rng.normal(size=(steps + 1, 3))
            observations.create_dataset(
                "image", data=rng.integers(0, 255, (steps + 1, 8, 8, 3), np.uint8), compression="gzip"
            )
            episode["actions"], episode["rewards"] = rng.normal(size=(steps, 2)).astype(np.float32), np.zeros(steps)
            episode["terminations"], episode["truncations"] = np.arange(steps) == steps - 1, np.zeros(steps, bool)
            episode.create_group("infos")["success"] = np.arange(steps + 1) == steps
    box = {"type": "Box", "dtype": "float64", "shape": [3], "low": [0, 0, 0], "high": [1, 1, 1]}
    picture = {
        "type": "Box",
        "dtype": "uint8",
        "shape": [8, 8, 3],
        "low": [[[0] * 3] * 8] * 8,
        "high": [[[255] * 3] * 8] * 8,
    }
    space = {"type": "Dict", "subspaces": {"state": box, "image": picture}}
    action = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1, -1], "high": [1, 1]}
    known = {
        "total_episodes": 2,
        "total_steps": 7,
        "data_format": "hdf5",
        "dataset_id": "lift",
        "minari_version": "0.5.3",
    }
    known |= {"observation_space": json.dumps(space), "action_space": json.dumps(action)}
    (data / "metadata.json").write_text(json.dumps(known))
    return [folder / "lift", *(minari_arrow(folder / kind, kind, known) for kind in ("arrow", "parquet"))]


def minari_arrow(folder: Path, kind: str, known: dict[str, Any]) -> Path:
    """Two episodes without pictures, in one of Arrow's forms."""
    import pyarrow as arrow
    import pyarrow.dataset as datasets

    rng = np.random.default_rng(0)
    state = arrow.FixedSizeListArray.from_arrays(rng.normal(size=27), 3)
    rows = {
        "episode_id": np.repeat(np.arange(2, dtype=np.int32), [5, 4]),
        "observations": arrow.StructArray.from_arrays([state], names=["state"]),
        "actions": arrow.FixedSizeListArray.from_arrays(rng.normal(size=18).astype(np.float32), 2),
        **{"rewards": np.zeros(9), "terminations": np.zeros(9, bool), "truncations": np.zeros(9, bool)},
    }
    batch = arrow.RecordBatch.from_pydict({name: arrow.array(column) for name, column in rows.items()})
    datasets.write_dataset(
        batch, folder / "data", format=kind, partitioning=["episode_id"], existing_data_behavior="overwrite_or_ignore"
    )
    for number in range(2):
        (folder / f"data/{number}/metadata.json").write_text(
            json.dumps({"id": number, "total_steps": 4 - number, "seed": 7})
        )
    (folder / "data/metadata.json").write_text(json.dumps({**known, "data_format": kind}))
    return folder
