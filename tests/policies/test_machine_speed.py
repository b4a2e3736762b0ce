"""Calibrations: the arithmetic with numbers that are made up, the file, and a machine that is really measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.core.errors import CorruptError
from hilt.policies.cost import machine_speed
from hilt.policies.cost.machine_speed import (
    Calibration,
    Fit,
    LayerTime,
    SimulatorTime,
    calibration_file,
    fitted,
    fitted_overlapping,
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
    fits={"acting": Fit(2.0, 1e-6), "gradient": Fit(3.0, 0.0)},
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
    assert MADE_UP.bare_seconds(counts) == pytest.approx(2 * 3e-3 + 4 * 1e-3)
    assert MADE_UP.seconds(counts, "acting") == pytest.approx(2 * 10e-3 + 16e-6)
    assert MADE_UP.seconds(counts, "gradient") == pytest.approx(3 * 10e-3)
    assert MADE_UP.adam_seconds(10**5) == pytest.approx(0.1)


def test_fit_finds_factor_and_time_of_a_call():
    layers = [LayerTime("acting", 1, 1, 1, 1.5 * bare + 2e-3 * calls, bare, calls) for bare, calls in ((1, 9), (5, 90))]
    fit = fitted(layers)
    assert (fit.factor, fit.call_s) == (pytest.approx(1.5), pytest.approx(2e-3))
    quick = [LayerTime("acting", 1, 1, 1, seconds, bare, 10) for seconds, bare in ((1.0, 2.0), (4.0, 5.0))]
    assert fitted(quick).call_s == 0 and 0.5 < fitted(quick).factor < 0.8, "no time is negative"


def test_on_a_gpu_the_longer_of_computing_and_launching_counts():
    """Launches of 10 us beside computing at 1.2 times the bare time: layers of 0.1 to 3 ms, of which the smaller are
    bound by their launches."""
    sizes = ((1e-4, 30), (2e-4, 30), (9e-4, 30), (3.3e-3, 30))
    times = [LayerTime("acting", 1, 1, 1, max(1.2 * bare, 1e-5 * calls), bare, calls) for bare, calls in sizes]
    fit = fitted_overlapping(times)
    assert (fit.factor, fit.call_s, fit.overlap) == (pytest.approx(1.2), pytest.approx(1e-5), True)
    assert fit.seconds(1e-3, 1000) == pytest.approx(1e-2) and fit.seconds(1.0, 1000) == pytest.approx(1.2)
    counts = OpCounts(Counter({OpCost("plain", "float32", 0, 10**6): 4}))
    known = replace(MADE_UP, fits={"acting": Fit(2.0, 1e-6, overlap=True)})
    assert known.seconds(counts, "acting") == pytest.approx(8e-3), "4e-6 of launches are hidden"
    computing = [layer for layer in times if layer.bare_s > 5e-4]
    assert fitted_overlapping(computing) == Fit(pytest.approx(1.2), 0.0, True)


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
    monkeypatch.setitem(machine_speed.SIZES, "cpu", small)
    monkeypatch.setitem(machine_speed.LAYERS, "cpu", ((16, 2, 8), (32, 2, 8)))
    monkeypatch.setattr(machine_speed, "ROUND_S", 1e-4)
    monkeypatch.setattr(machine_speed, "ROUNDS", 1)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = measure("cpu")
    assert {layer.way for layer in found.layers} == {"acting", "gradient"} == found.fits.keys()
    assert all(layer.calls > 5 and layer.bare_s > 0 and layer.measured_s > 0 for layer in found.layers)
    assert all(fit.factor >= 0 and fit.call_s >= 0 for fit in found.fits.values())
    for curve in found.curves.values():
        assert curve == sorted(curve) and [y for _, y in curve] == sorted(y for _, y in curve)
    words = ["doctor", "--calibrate", "--task", "tabletop/reach", "-o", "image_size=32"]
    result = CliRunner().invoke(cli.app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for text in ("Gflop/s", "layer of width 32, 8 tokens, gradient:", "tabletop/reach image_size=32: ", "steps/s"):
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
