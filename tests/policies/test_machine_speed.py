"""Calibrations: the arithmetic with numbers that are made up, the file, and a machine that is really measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hilt import cli
from hilt.core.errors import CorruptError
from hilt.policies.cost import machine_speed
from hilt.policies.cost.calibration_layers import layer_counts
from hilt.policies.cost.fits import BareTime, Fit, LayerTime
from hilt.policies.cost.machine_speed import (
    Calibration,
    SimulatorTime,
    calibration_file,
    fits_of,
    interpolated,
    measure,
    simulator_key,
)
from hilt.policies.cost.op_counts import OpCost, OpCounts

MADE_UP = Calibration(
    device="cpu",
    machine="a machine that is made up",
    measured_at="2026-01-01T00:00:00+00:00",
    machine_load=0.0,
    curves={
        "product float32": [(1e3, 1e-6), (1e9, 1.0)],
        "convolution float32": [(1e3, 1e-6), (1e9, 1.0)],
        "attention float32": [(1e3, 1e-6), (1e9, 1.0)],
        "plain float32": [(1e3, 1e-6), (1e9, 1.0)],
        "hard float32": [(1e3, 1e-5), (1e9, 10.0)],
        "adam": [(1e3, 1e-3), (1e6, 1.0)],
    },
    fits={"acting": Fit(2.0, 2.0, 1e-6), "gradient": Fit(3.0, 3.0, 0.0)},
)
"""1e9 flops or bytes a second, 1e8 bytes of what is hard, 1e6 numbers of Adam"""


def test_between_two_sizes_time_is_interpolated_on_logarithmic_scales():
    curve = [(10.0, 1.0), (1000.0, 4.0)]
    assert interpolated(curve, 100.0) == pytest.approx(2.0)
    assert interpolated(curve, 5.0) == 1.0, "less takes as long as the smallest"
    assert interpolated(curve, 3000.0) == pytest.approx(12.0), "more grows with the work"


def test_seconds_are_the_sum_of_operations_and_of_calls():
    product, moving = OpCost("product", "float32", 10**6, 3 * 10**6), OpCost("plain", "float32", 0, 10**6)
    assert MADE_UP.seconds_of(moving) == pytest.approx(1e-3)
    assert MADE_UP.seconds_of(product) == pytest.approx(3e-3), "its bytes take longer than its arithmetic"
    assert MADE_UP.seconds_of(product._replace(nbytes=0)) == pytest.approx(1e-3)
    assert MADE_UP.seconds_of(product._replace(nbytes=0, dtype="bfloat16")) == pytest.approx(1e-3), "as in float32"
    assert MADE_UP.seconds_of(moving._replace(kind="hard")) == pytest.approx(1e-2)
    counts = OpCounts(Counter({product: 2, moving: 4, OpCost("view", "", 0, 0): 10}))
    assert MADE_UP.bare(counts) == BareTime(pytest.approx(2 * 3e-3), pytest.approx(4 * 1e-3), 16)
    assert MADE_UP.seconds(counts, "acting") == pytest.approx(2 * 10e-3 + 16e-6)
    assert MADE_UP.seconds(counts, "gradient") == pytest.approx(3 * 10e-3)
    apart = replace(MADE_UP, fits={"acting": Fit(2.0, 0.5, 1e-6, overlap=True)})
    assert apart.seconds(counts, "acting") == pytest.approx(2 * 6e-3 + 0.5 * 4e-3, rel=1e-3), "launches are hidden"
    slow = replace(MADE_UP, fits={"acting": Fit(1.0, 1.0, 1e-3, overlap=True)})
    view = OpCost("view", "", 0, 0)
    first, last = (OpCounts(Counter(order), order) for order in ([view] * 9 + [product], [product] + [view] * 9))
    assert slow.seconds(first, "acting") == pytest.approx(10e-3 + 3e-3)
    assert slow.seconds(last, "acting") == pytest.approx(10e-3), "views are launched while the product is computed"
    assert MADE_UP.adam_seconds(10**5) == pytest.approx(0.1)


def test_each_way_has_the_fit_of_its_kind():
    """Launches overlap with computing on a GPU, but not where a CUDA graph has them in it, and not on a CPU."""
    ways = ("acting", "compiled gradient", "captured compiled acting")
    layers = [LayerTime(way, "plain", 1, 1, 1, 2.0 * s, s, 0.0, 3) for way in ways for s in (1.0, 2.0, 3.0)]
    assert {way: fit.overlap for way, fit in fits_of(layers, "cuda").items()} == dict(
        zip(ways, (True, True, False), strict=True)
    )
    assert not any(fit.overlap for fit in fits_of(layers, "cpu").values())
    assert all(fit.heavy == pytest.approx(2.0) for fit in fits_of(layers, "cuda").values())


def test_file_is_read_back_and_a_damaged_one_is_refused(tmp_path: Path):
    known = MADE_UP.with_simulator("tabletop/reach", SimulatorTime(0.1, 0.01, 0.02))
    path = known.save(tmp_path / "below" / "calibration.json")
    assert Calibration.load("cpu", path) == known and Calibration.load("cpu", tmp_path / "none.json") is None
    path.write_text(path.read_text().replace("made up", "made UP"))
    with pytest.raises(CorruptError, match=r"damaged \(checksum\): measure again, hilt doctor --calibrate"):
        Calibration.load("cpu", path)


def test_file_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_speed, "VERSION", 0)
    path = MADE_UP.save(tmp_path / "calibration.json")
    monkeypatch.undo()
    with pytest.raises(CorruptError, match=r"another version of Hilt: measure again, hilt doctor --calibrate"):
        Calibration.load("cpu", path)


def test_key_of_a_simulator_has_no_lengths():
    assert simulator_key("tabletop/pick", {"step_limit": 5, "image_size": 64, "wait_steps": 1}) == (
        "tabletop/pick image_size=64"
    )


def test_machine_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Sizes are few, and nothing is said about how fast anything is."""
    small = {"side": (8, 32), "numbers": (2**8, 2**12, 2**14, 2**15), "tokens": (8, 16)}
    monkeypatch.setitem(machine_speed.SIZES, "cpu", machine_speed.SIZES["cpu"] | small)
    monkeypatch.setitem(machine_speed.LAYERS, "cpu", (("plain", 16, 2, 8), ("plain", 32, 2, 8), ("adapted", 32, 2, 8)))
    monkeypatch.setattr(machine_speed, "ROUND_S", 1e-4)
    monkeypatch.setitem(machine_speed.ROUNDS, "cpu", 1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = measure("cpu")
    assert {layer.way for layer in found.layers} == {"acting", "gradient"} == found.fits.keys()
    assert all(layer.calls > 5 and min(layer.bare) > 0 and layer.measured_s > 0 for layer in found.layers)
    assert all(fit.heavy == fit.light >= 0 and fit.call_s >= 0 for fit in found.fits.values())
    for curve in found.curves.values():
        assert curve == sorted(curve) and [y for _, y in curve] == sorted(y for _, y in curve)
    words = ["doctor", "--calibrate", "--task", "tabletop/reach", "-o", "image_size=32"]
    result = CliRunner().invoke(cli.app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for text in (
        "Gflop/s",
        "adapted layer of width 32, 2 rows of 8 tokens, gradient:",
        "tabletop/reach image_size=32: ",
        "steps/s",
    ):
        assert text in result.output
    kept = Calibration.load("cpu")
    assert kept is not None and [*kept.simulators] == ["tabletop/reach image_size=32"]
    assert f"kept in {calibration_file('cpu')}" in result.output
    monkeypatch.setattr(machine_speed, "measure", lambda device, report: MADE_UP)
    again = CliRunner().invoke(cli.app, ["doctor", "--calibrate"], env={"COLUMNS": "200"})
    assert "a machine that is made up" in again.output
    kept = Calibration.load("cpu")
    assert kept is not None and kept.curves == MADE_UP.curves and len(kept.simulators) == 1, "simulators stay"
    calibration_file("cpu").write_text("{}")
    again = CliRunner().invoke(cli.app, ["doctor", "--calibrate"], env={"COLUMNS": "200"})
    assert again.exit_code == 0 and Calibration.load("cpu") == MADE_UP, "a damaged file is replaced"


def test_options_without_calibrate_are_refused():
    result = CliRunner().invoke(cli.app, ["doctor", "--task", "tabletop/reach"])
    assert result.exit_code == 1 and "are of --calibrate" in result.output


def test_layers_of_a_gpu_are_gone_through_in_all_ways(monkeypatch: pytest.MonkeyPatch):
    """Without one: nothing is compiled or captured, and only which layers are measured is tried."""
    compiled: list[torch.nn.Module] = []

    def compiling(layer: torch.nn.Module, dynamic: bool) -> torch.nn.Module:
        compiled.append(layer)
        return layer

    def timed(run: Callable[[], object], device: torch.device) -> float:
        run()
        return 1.0

    monkeypatch.setattr(torch, "compile", compiling)
    monkeypatch.setattr(machine_speed.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(machine_speed, "timed", timed)
    monkeypatch.setattr(machine_speed, "timed_alone", timed)
    sizes = (("plain", 64, 2, 8), ("plain", 64, 4, 8), ("gated", 64, 2, 8), ("adapted", 64, 2, 8))
    monkeypatch.setitem(machine_speed.LAYERS, "cuda", sizes)
    layers = list(machine_speed._layers(MADE_UP, torch.device("cpu"), torch.bfloat16, "cuda"))
    assert len(compiled) == 3, "each kind and width once"
    ways = [f"{form}{way}" for form in ("", "compiled ") for way in ("acting", "gradient")]
    ways += ["captured acting", "captured compiled acting"]
    assert sorted((layer.kind, layer.rows, layer.way) for layer in layers) == sorted(
        (kind, rows, way) for kind, _, rows, _ in sizes for way in ways
    )
    for one in ("", "compiled "):
        bare = {layer.way: layer.bare for layer in layers if layer.kind == "adapted"}
        assert bare["acting"] == bare[f"captured {one}acting"] and bare["acting"] < bare[f"{one}gradient"]
    assert fits_of(layers, "cuda").keys() == set(ways)


def test_on_a_cpu_a_call_alone_is_timed_as_any(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_speed, "timed", lambda run, device: 3.0)
    assert machine_speed.timed_alone(lambda: None, torch.device("cpu")) == 3.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_fits_of_a_gpu_are_near_its_own_layers():
    found = measure("cuda")
    ways = {"acting", "gradient", "captured acting"}
    assert (
        ways | {f"compiled {way}" for way in ("acting", "gradient")} | {"captured compiled acting"} == found.fits.keys()
    )
    for way, fit in found.fits.items():
        errors = []
        for one in (layer for layer in found.layers if layer.way == way):
            learns = way.endswith("gradient")
            counts = layer_counts(one.kind, one.width, one.rows, one.tokens, torch.bfloat16, learns)
            errors.append(found.seconds(counts, way) / one.measured_s - 1)
        assert np.median(np.abs(errors)) < 0.25, f"{way}: {fit}, {errors}"
