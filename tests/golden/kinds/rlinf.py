"""Numbers of RLinf's TrajectoryReplayBuffer and of its trajectory builder (tests/golden/rlinf/README.md).

`expected.json` with `expected.npz` is what its buffer sampled, `rollout.json` with `rollout.npz` what its
builder made, and `trajectories.npz` what lies in the folders `pt`, `pkl` and `checkpoint`. All of it is
exact. Two things are right in ours and are left out: the versions of extracted interventions, which
upstream drops, and how those of two epochs end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hilt.core.tree import flatten
from tests import golden
from tests.replay.rlinf_golden import EPOCHS, builder_of, packed, trajectory_of, under

PARTS = {
    "expected.npz": ("expected.json", "expected.npz"),
    "rollout.npz": ("rollout.json", "rollout.npz"),
    "trajectories.npz": ("trajectories.npz", "pt", "pkl", "checkpoint"),
}
ENDS = ("dones", "terminations", "truncations")


def matches(path: Path) -> Path | None:
    name = next((name for name, parts in PARTS.items() if path.name in parts), None)
    return path.with_name(name) if name and all((path.parent / part).exists() for part in PARTS[name]) else None


def compare(case: Path) -> golden.Result:
    folder = case.parent
    if case.name == "trajectories.npz":
        return golden.compare(loaded(folder), stored_in(folder))
    if case.name == "rollout.npz":
        return golden.compare(built(folder), comparable(folder))
    ours: dict[str, Any] = {}
    for cases in runs(folder):
        ours |= sampled(folder, cases)
    return golden.compare({**ours, **index_streams(folder)}, expected(folder))


# --- sampling ---


def listed(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "expected.json").read_text())


def runs(folder: Path) -> list[list[dict[str, Any]]]:
    """Cases of one buffer, in order: those that grow share theirs."""
    cases = listed(folder)["cases"]
    growing = [case for case in cases if case["how"] == "grow"]
    return [[case] for case in cases if case["how"] != "grow"] + ([growing] if growing else [])


def sampled(folder: Path, cases: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """What one of our buffers gives for the calls of these cases, by case, draw and key."""
    from hilt.replay import TrajectoryReplayBuffer

    buffer = TrajectoryReplayBuffer(seed=cases[0].get("seed", 1), sample_window_size=cases[0]["window"], **options)
    ours: dict[str, Any] = {}
    added = 0
    for case in cases:
        if case["how"] == "load_checkpoint":
            shard = {"local_rank": case["rank"], "world_size": case["world"]} if "rank" in case else {}
            buffer.load_checkpoint(str(folder / case["folder"]), is_distributed=bool(shard), **shard)
        else:
            until = case.get("added", 4)
            buffer.add_trajectories(trajectories(folder)[added:until])
            added = until
        for name in ("size", "total_samples", "trajectory_counter"):
            if name in case:
                ours[f"{case['name']}/{name}"] = getattr(buffer, name)
        for draw in range(len(case["rows"])):
            for key, values in flatten(buffer.sample(case["num_chunks"])).items():
                ours[f"{case['name']}/{draw}/{key}"] = values.numpy()
    buffer.close()
    return ours


def expected(folder: Path) -> dict[str, Any]:
    """What RLinf's gave, in the same form."""
    stored = listed(folder)
    with np.load(folder / "expected.npz") as file:
        columns = {key: file[key] for key in stored["keys"]}
    theirs: dict[str, Any] = {}
    for case in stored["cases"]:
        theirs |= {
            f"{case['name']}/{name}": case[name]
            for name in ("size", "total_samples", "trajectory_counter")
            if name in case
        }
        for draw, (first, stop) in enumerate(case["rows"]):
            theirs |= {f"{case['name']}/{draw}/{key}": columns[key][first:stop] for key in stored["keys"]}
    for seed, draws in stored["index_stream"].items():
        theirs[f"index_stream/{seed}"] = [draw["ids"] for draw in draws]
    return theirs


def index_streams(folder: Path) -> dict[str, Any]:
    from hilt.replay import tensors as bridge

    ours: dict[str, Any] = {}
    for seed, draws in listed(folder)["index_stream"].items():
        source = bridge.generator(int(seed))
        ours[f"index_stream/{seed}"] = [bridge.randint(source, draw["high"], draw["n"]).tolist() for draw in draws]
    return ours


def trajectories(folder: Path) -> list[Any]:
    stored = packed("trajectories.npz", folder)
    return [trajectory_of(under(stored, str(i))) for i in range(4)]


# --- files ---


def loaded(folder: Path) -> dict[str, Any]:
    """What we read from the folders that RLinf wrote."""
    from hilt.replay import tensors as bridge

    ours: dict[str, Any] = {}
    for name in ("pt", "pkl", "checkpoint"):
        index = json.loads((folder / name / "trajectory_index.json").read_text())["trajectory_index"]
        for number, entry in index.items():
            kind = "pkl" if name == "pkl" else "pt"
            path = folder / name / f"trajectory_{number}_{entry['model_weights_id']}.{kind}"
            ours |= {
                f"{name}/{number}/{key}": value
                for key, value in as_numpy(getattr(bridge, f"load_{kind}")(path)).items()
            }
    return ours


def stored_in(folder: Path) -> dict[str, Any]:
    """What went in: a checkpoint without `auto_save` has its ends cut to T rows,
    one after each step of a single epoch."""
    theirs: dict[str, Any] = {}
    stored = packed("trajectories.npz", folder)
    for name in ("pt", "pkl", "checkpoint"):
        for key, value in stored.items():
            number, _, what = key.partition("/")
            if name == "checkpoint" and what in ENDS:
                steps = len(stored[f"{number}/rewards"])
                epochs = EPOCHS[int(number)]
                value = value.reshape(epochs, -1, *value.shape[1:])[:, 1:].reshape(steps, *value.shape[1:])
            theirs[f"{name}/{key}"] = value.item() if what == "max_episode_length" else value
    return theirs


# --- the builder ---


def built(folder: Path) -> dict[str, Any]:
    """What ours makes of the four trajectories, and of the inputs in the file."""
    from hilt.compat.rlinf.rollout_result import (
        ChunkStepResult,
        EmbodiedRolloutResult,
        convert_trajectories_to_batch,
        get_model_weights_id,
    )
    from hilt.replay.tensors import import_torch, to_torch

    torch, made = import_torch(), packed("rollout.npz", folder)
    notes = json.loads((folder / "rollout.json").read_text())
    groups: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    for i, whole in enumerate(trajectories(folder)):
        builder = builder_of(whole, EPOCHS[i])
        environments = whole.rewards.shape[1]
        sizes = [2, 1] if environments == 3 else [1] * environments
        groups |= {f"split/{i}/{count}": builder.to_splited_trajectories(count) for count in range(1, environments + 1)}
        groups[f"sizes/{i}/{'-'.join(map(str, sizes))}"] = builder.to_splited_trajectories_by_sizes(sizes)
        for mode in ("any", "all"):
            parts = whole.extract_intervene_traj(mode)
            ours[f"extract/{i}/{mode}"] = parts and len(parts)
            groups[f"extract/{i}/{mode}"] = parts or []
    for name, parts in groups.items():
        for number, part in enumerate(parts):
            ours |= {
                f"{name}/{number}/{key}": value
                for key, value in as_numpy(part.to_dict()).items()
                if ours_to_compare(f"{name}/{key}")
            }
    joined = as_numpy(convert_trajectories_to_batch([trajectory_of(under(made, f"cat_in/{i}")) for i in range(2)]))
    ours |= {f"cat_out/{key}": value for key, value in joined.items()} | {"cat_keys": sorted(joined)}
    for case in ("chunk/0", "chunk/1", "flat/0", "flat/1"):
        given = to_torch({name: made[f"update/{case}/{name}"] for name in ("actions", "flags", "intervene_actions")})
        inputs = {"action": given["actions"], "model_action": given["actions"]}
        builder = EmbodiedRolloutResult()
        builder.append_step_result(ChunkStepResult(actions=given["actions"], forward_inputs=inputs))
        builder.mark_last_step_with_intervene_flags(given["flags"])
        marked = builder.intervene_flags[-1].clone()
        builder.update_last_actions(given["intervene_actions"], given["flags"])
        after = {"marked_flags": marked, "new_actions": builder.actions[-1], "new_flags": builder.intervene_flags[-1]}
        after["forward_action"] = builder.forward_inputs[-1]["action"]
        ours |= {f"update/{case}/{name}": value.numpy() for name, value in after.items()}
        ours[f"update/{case}"] = list(builder.forward_inputs[-1])
    for i, case in enumerate(notes["weights_ids"]):
        versions = torch.tensor(case["values"], dtype=getattr(torch, case["dtype"])).reshape(case["shape"])
        ours[f"weights_ids/{i}"] = get_model_weights_id(versions)
    return ours


def comparable(folder: Path) -> dict[str, Any]:
    """What RLinf's made, without the inputs."""
    made, notes = packed("rollout.npz", folder), json.loads((folder / "rollout.json").read_text())
    inputs = ("actions", "flags", "intervene_actions")
    given = (
        "cat_in/",
        *(f"update/{case}/{name}" for case in ("chunk/0", "chunk/1", "flat/0", "flat/1") for name in inputs),
    )
    theirs = {key: value for key, value in made.items() if not key.startswith(given)}
    theirs = {key: value.item() if key.endswith("/max_episode_length") else value for key, value in theirs.items()}
    theirs = {key: value for key, value in theirs.items() if ours_to_compare(key)}
    theirs |= {f"weights_ids/{i}": case["id"] for i, case in enumerate(notes.pop("weights_ids"))}
    return theirs | notes | {"cat_keys": sorted(notes["cat_keys"])}


def ours_to_compare(key: str) -> bool:
    """Not what is right in ours only."""
    return not (
        key.startswith("extract/")
        and (key.endswith("/versions") or (key.startswith("extract/3/") and key.endswith(ENDS)))
    )


def as_numpy(tree: dict[str, Any]) -> dict[str, Any]:
    leaves = flatten({key: value for key, value in tree.items() if value is not None and value != {}})
    return {key: value.numpy() if hasattr(value, "numpy") else value for key, value in leaves.items()}
