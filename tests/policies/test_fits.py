"""Fits find the numbers by which times were made up, whatever the layers are."""

from __future__ import annotations

import numpy as np
import pytest

from hilt.policies.cost.fits import (
    BareTime,
    Fit,
    LayerTime,
    fitted,
    fitted_captured,
    fitted_overlapping,
    relative_errors,
)

SIZES = ((1e-5, 2e-5, 40), (8e-5, 5e-5, 60), (2e-4, 3e-4, 40), (1e-3, 4e-4, 60), (6e-3, 9e-4, 120))
BARE = [BareTime(*size) for size in SIZES]
"""Of layers of which the first ones have many calls for what they compute"""


def timed(fit: Fit, *bare: BareTime) -> list[LayerTime]:
    """Layers that take exactly as long as a fit says."""
    return [LayerTime("acting", "plain", 1, 1, 1, fit.seconds(each), *each) for each in bare]


def near(fit: Fit) -> Fit:
    return Fit(pytest.approx(fit.heavy), pytest.approx(fit.light), pytest.approx(fit.call_s), fit.overlap)


def test_one_factor_and_the_time_of_a_call_are_found():
    exact = Fit(1.5, 1.5, 2e-6)
    assert fitted(timed(exact, *BARE)) == near(exact)
    assert fitted(timed(exact, *BARE[:2])) == near(exact)
    quick = [
        LayerTime("acting", "plain", 1, 1, 1, seconds, bare, 0.0, 10) for seconds, bare in ((1.0, 2.0), (4.0, 5.0))
    ]
    assert fitted(quick).call_s == 0 and 0.5 < fitted(quick).heavy < 0.8, "no time is negative"


@pytest.mark.parametrize("exact", [Fit(1.2, 0.3, 1e-6), Fit(1.1, 0.4, 0.0), Fit(0.9, 0.0, 2e-6)])
def test_both_factors_and_the_time_of_a_call_in_a_graph_are_found(exact: Fit):
    assert fitted_captured(timed(exact, *BARE)) == near(exact)


def test_on_a_gpu_the_longer_of_computing_and_launching_counts():
    """Launches of 3 us beside computing, by which the first two layers are bound."""
    exact = Fit(1.2, 0.4, 3e-6, overlap=True)
    bound = [exact.call_s * each.calls > 1.2 * each.heavy_s + 0.4 * each.light_s for each in BARE]
    assert bound == [True, True, False, False, False]
    layers = timed(exact, *BARE)
    assert fitted_overlapping(layers) == near(exact)
    assert fitted_overlapping(layers[2:]) == near(Fit(1.2, 0.4, 0.0, overlap=True)), "no launch is seen"
    assert relative_errors(fitted_overlapping(layers[:2]), layers[:2]) == pytest.approx([0.0, 0.0])
    assert exact.seconds(BareTime(1e-3, 0.0, 1000)) == pytest.approx(3e-3)
    assert exact.seconds(BareTime(1.0, 0.0, 1000)) == pytest.approx(1.2)


def test_what_is_launched_first_counts_as_well_where_computing_comes_later():
    """100 launches of 10 us without anything to compute, and ten operations of 1 ms."""
    fit = Fit(1.0, 0.5, 1e-5, overlap=True)
    small, large = [BareTime(0.0, 1e-7, 1)] * 100, [BareTime(1e-3, 0.0, 1)] * 10
    assert fit.seconds_in_turn([*small, *large]) == pytest.approx(1e-3 + 1e-5 + 10e-3, rel=1e-3)
    assert fit.seconds_in_turn([*large, *small]) == pytest.approx(1e-5 + 10e-3, rel=1e-3), "launched meanwhile"
    assert fit.seconds_in_turn([BareTime(0.0, 0.0, 1)] * 7) == pytest.approx(7e-5), "views take launches only"
    assert fit.seconds_in_turn(small * 10) == pytest.approx(fit.seconds(BareTime(0.0, 1e-4, 1000)), rel=1e-3)


def test_two_layers_have_one_factor():
    """Two factors would be exact for any two times."""
    found = fitted_overlapping(timed(Fit(1.2, 0.4, 0.0, overlap=True), *BARE[3:]))
    assert found.heavy == found.light and 0.8 < found.heavy < 1.2


def test_fits_of_times_with_noise_are_near_and_never_negative():
    draws = np.random.default_rng(0)
    for exact, fit in (
        (Fit(1.3, 1.3, 2e-6), fitted),
        (Fit(1.2, 0.3, 1e-6), fitted_captured),
        (Fit(1.2, 0.4, 3e-6, True), fitted_overlapping),
    ):
        for _ in range(20):
            layers = [
                LayerTime("acting", "plain", 1, 1, 1, exact.seconds(each) * draws.uniform(0.9, 1.1), *each)
                for each in BARE * 2
            ]
            found = fit(layers)
            assert min(found.heavy, found.light, found.call_s) >= 0
            assert max(map(abs, relative_errors(found, layers))) < 0.25


def test_without_layers_all_is_zero():
    assert fitted([]) == Fit(0.0, 0.0, 0.0) and fitted_overlapping([]) == Fit(0.0, 0.0, 0.0, overlap=True)
