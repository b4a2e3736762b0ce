"""Sinks have what was written to them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hilt.core.errors import MissingPackageError, UnknownNameError
from hilt.observe import Metrics
from hilt.observe.sinks import SINKS, config_of, run_id


def test_tensorboard(tmp_path: Path):
    pytest.importorskip("tensorboard", reason="pip install 'hilt[tensorboard]'; make test-peers runs it")
    check_tensorboard(tmp_path)


def check_tensorboard(folder: Path) -> None:
    """Read by TensorBoard's own reader: updates that were made again are there once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first in (True, False):
        with Metrics(folder, ["tensorboard"]) as metrics:
            if not first:
                metrics.resumed(20, 40)
            for update in (10, 20, 30, 40) if first else (30,):
                values = {"critic_loss": update / 100 + (not first), "note": "text", "q/demo": float("nan")}
                metrics.write("update", values, update=update, step=2 * update)
            metrics.write("episode", {"success": first, "return": 1.5}, update=30, step=70 + 10 * (not first))
    found = {}
    for axis in ("updates", "steps"):
        reader = EventAccumulator(str(folder / "tensorboard" / f"over_{axis}"))
        reader.Reload()
        found |= {
            tag: [(event.step, round(event.value, 3)) for event in reader.Scalars(tag)]
            for tag in reader.Tags()["scalars"]
        }
    assert found.pop("update/not_finite") == [(10, 1), (20, 1), (30, 1)]
    assert found == {
        "update/critic_loss": [(10, 0.1), (20, 0.2), (30, 1.3)],
        "episode/success": [(70, 1.0), (80, 0.0)],
        "episode/return": [(70, 1.5), (80, 1.5)],
    }


@pytest.mark.parametrize("sink", sorted(SINKS))
def test_sink_without_its_package_names_the_pip_line(sink: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith(f"{sink}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, sink, None)
    with pytest.raises(MissingPackageError, match=rf"needs the package '{sink}'.*pip install 'hilt\[{sink}\]'"):
        Metrics(tmp_path / "run", [sink])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_an_unknown_sink(tmp_path: Path):
    with pytest.raises(UnknownNameError, match="no sink named 'tensorbord'; did you mean 'tensorboard'"):
        Metrics(tmp_path, ["tensorbord"])


def test_a_resumed_run_is_known_again(tmp_path: Path):
    assert run_id(tmp_path) == run_id(tmp_path) != run_id(tmp_path / "other")
    assert config_of(tmp_path) == {}
    (tmp_path / "config.yaml").write_text("seed: 3\nwire: {port: 1}\n")
    assert config_of(tmp_path) == {"seed": 3, "wire": {"port": 1}}
