"""Real RLinf code loads folders that we wrote, and draws the same batches from them.

Give a checkout of RLinf's public repository, which is not a package that pip can install:

    HILT_RLINF=path/to/RLinf python -m pytest -m peers tests/peers/test_rlinf.py
"""

from __future__ import annotations

import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hilt.core.tree import flatten
from hilt.replay import TrajectoryReplayBuffer
from tests.compat.test_buffer import golden_trajectories

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def real() -> Any:
    """RLinf's own class. The packages above its file import Ray and CUDA parts, so they are left out."""
    checkout = os.environ.get("HILT_RLINF")
    if not checkout:
        pytest.skip("HILT_RLINF does not name a checkout of RLinf")
    for name in (
        "rlinf",
        "rlinf.data",
        "rlinf.data.schema",
        "rlinf.data.storage",
        "rlinf.data.storage.replay",
        "rlinf.utils",
    ):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(checkout, *name.split(".")))]
        sys.modules[name] = package
    log = types.ModuleType("rlinf.utils.logging")
    log.get_logger = lambda: logging.getLogger("rlinf")  # type: ignore[attr-defined]
    sys.modules["rlinf.utils.logging"] = log
    from rlinf.data.storage.replay.buffer import TrajectoryReplayBuffer as Real

    return Real


@pytest.mark.parametrize("kind", ["pt", "pkl"])
@pytest.mark.parametrize("how", ["save_checkpoint", "auto_save"])
@pytest.mark.parametrize("window", [2, 100])
def test_rlinf_reads_our_folders(real: Any, kind: str, how: str, window: int, tmp_path: Path) -> None:
    auto = {"auto_save": True, "auto_save_path": str(tmp_path)} if how == "auto_save" else {}
    ours = TrajectoryReplayBuffer(seed=7, trajectory_format=kind, sample_window_size=window, **auto)  # type: ignore[arg-type]
    ours.add_trajectories(golden_trajectories())
    if how == "save_checkpoint":
        ours.save_checkpoint(str(tmp_path))
    else:
        ours.flush()
    theirs = real(seed=7, sample_window_size=window)
    theirs.load_checkpoint(str(tmp_path))
    for _ in range(3):
        a, b = flatten(ours.sample(16)), flatten(theirs.sample(16))
        assert list(a) == list(b)
        for key in a:
            assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key
    theirs.close()
    ours.close()


@pytest.mark.parametrize("kind", ["pt", "pkl"])
def test_we_read_what_it_wrote(real: Any, kind: str, tmp_path: Path) -> None:
    from rlinf.data.schema.embodied_types import Trajectory as RealTrajectory

    theirs = real(seed=7, auto_save=True, auto_save_path=str(tmp_path / "auto"), trajectory_format=kind)
    theirs.add_trajectories([RealTrajectory(**t.to_dict()) for t in golden_trajectories()])
    theirs.sample(1)  # a checkpoint before the first sample would be empty
    theirs.save_checkpoint(str(tmp_path / "saved"))
    theirs.close()
    ours = TrajectoryReplayBuffer(load_path=str(tmp_path / "saved"))
    again = real(seed=7)
    again.load_checkpoint(str(tmp_path / "saved"))
    a, b = flatten(ours.sample(28)), flatten(again.sample(28))
    for key in a:
        if key != "prev_values":  # RLinf does not cut its extra rows, see docs/replay.md
            assert torch.equal(a[key], b[key]), key
    again.close()
    ours.close()


@pytest.mark.parametrize("kind", ["pt", "pkl"])
def test_rlinf_samples_from_a_converted_log(real: Any, kind: str, tmp_path: Path) -> None:
    from hilt.formats import create, open_dataset
    from hilt.formats.convert import convert
    from tests.formats.toy_episodes import made, write

    episodes = [made(5, 1, source=[0, 1, 1, 0, 0]), made(3, 2), made(7, 3, source=0, ended="truncated")]
    write(create(tmp_path / "log", "log"), episodes)
    convert(tmp_path / "log", tmp_path / "rlinf", to="rlinf", trajectory_format=kind)
    theirs = real(seed=7)
    theirs.load_checkpoint(str(tmp_path / "rlinf"))
    assert (len(theirs), theirs.total_samples) == (3, 15)
    steps = {tuple(e.columns["actions"][i]): (e, i) for e in open_dataset(tmp_path / "log") for i in range(len(e))}
    batch, seen = theirs.sample(15), set()
    for row in range(15):
        action = tuple(batch["actions"][row].numpy())
        episode, i = steps[action]
        seen.add(action)
        for field, name in (("curr_obs", "observations"), ("next_obs", "next_observations")):
            for key, column in episode.columns[name].items():
                assert torch.equal(batch[field][key][row], torch.from_numpy(column[i].copy())), (field, key)
        assert batch["rewards"][row].item() == episode.columns["rewards"][i]
        assert batch["dones"][row].item() == (episode.columns["terminated"][i] or episode.columns["truncated"][i])
        assert batch["intervene_flags"][row].all().item() == (episode.columns["source"][i] == 1)
    assert len(seen) > 5
    theirs.close()
