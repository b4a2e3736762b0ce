"""The time of many operations from that of each, by a few numbers that are fitted to layers which were measured.

    seconds = heavy * heavy_s + light * light_s + call_s * calls

`heavy_s` is the sum of the seconds that products, convolutions and attention take by themselves, and `light_s` that of
all other operations, which compute little and move numbers: compiled code joins them, and so they have a factor of
their own. On a CPU both factors are the same. A GPU computes while the next operations are launched: there the longer
of launching (``call_s * calls``) and computing (the other two terms) counts, unless a CUDA graph has all launches in
it. Where the order of the operations is known, that holds of each part of them: a GPU that has nothing to do waits for
the next launch. Errors are relative ones, of which the squares are least, and no number is negative.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

HEAVY = ("product", "convolution", "attention")
"""Kinds of operations whose time is `heavy_s`; that of the others is `light_s`"""
ENOUGH = 3
"""Layers from which two factors are found; fewer have one in common"""


class BareTime(NamedTuple):
    """What operations take by themselves, in seconds, and how many they are."""

    heavy_s: float
    light_s: float
    calls: int


@dataclass(frozen=True)
class Fit:
    """The numbers by which the time of many operations follows from that of each."""

    heavy: float
    light: float
    call_s: float
    overlap: bool = False
    """Whether operations are launched while earlier ones are computed, as on a GPU"""

    def seconds(self, bare: BareTime) -> float:
        """The time of these operations one after the other, much the same all along."""
        parts = (self.heavy * bare.heavy_s + self.light * bare.light_s, self.call_s * bare.calls)
        return max(parts) if self.overlap else sum(parts)

    def seconds_in_turn(self, operations: Iterable[BareTime]) -> float:
        """The time of operations that overlap with launches, in their order: each is launched when the one before it
        has been, and computed when it is launched and the one before it is computed."""
        launched = computed = 0.0
        for each in operations:
            launched += self.call_s * each.calls
            if busy := self.heavy * each.heavy_s + self.light * each.light_s:
                computed = max(launched, computed) + busy
        return max(launched, computed)


@dataclass(frozen=True)
class LayerTime:
    """One layer as it was measured, in seconds, and the sums of its operations."""

    way: str
    kind: str
    """"plain", "gated" or "adapted" """
    width: int
    rows: int
    tokens: int
    measured_s: float
    heavy_s: float
    light_s: float
    calls: int

    @property
    def bare(self) -> BareTime:
        return BareTime(self.heavy_s, self.light_s, self.calls)


def fitted(layers: Sequence[LayerTime]) -> Fit:
    """One factor for all operations, and the time of a call: for a CPU."""
    factor, call_s = _least_squares(layers, _both, _calls)
    return Fit(factor, factor, call_s)


def fitted_captured(layers: Sequence[LayerTime]) -> Fit:
    """Both factors and the time of a call: for CUDA graphs, whose operations follow one another."""
    heavy, light, call_s = _least_squares(layers, _heavy, _light, _calls)
    return Fit(heavy, light, call_s)


def fitted_overlapping(layers: Sequence[LayerTime]) -> Fit:
    """The same where the longer of launching and computing counts: some layers, those with the least to compute for
    each operation, are bound by launching, and the others by computing."""
    ordered = sorted(layers, key=lambda layer: _both(layer) / layer.calls)
    found = []
    for split in range(len(ordered) + 1):
        (call_s,), computing = _least_squares(ordered[:split], _calls), ordered[split:]
        if len(computing) < ENOUGH:
            heavy = light = _least_squares(computing, _both)[0]
        else:
            heavy, light = _least_squares(computing, _heavy, _light)
        found.append(Fit(heavy, light, call_s, overlap=True))
    return min(found, key=lambda fit: sum(error**2 for error in relative_errors(fit, layers)))


def relative_errors(fit: Fit, layers: Sequence[LayerTime]) -> list[float]:
    """How far the time by the fit is from the measured one, relative to it, of each layer."""
    return [fit.seconds(layer.bare) / layer.measured_s - 1 for layer in layers]


def _least_squares(layers: Sequence[LayerTime], *terms: Callable[[LayerTime], float]) -> list[float]:
    """The number for each term with which the sum of all terms is nearest to the measured time; none is negative. The
    best one of the solutions in which some of them are 0."""
    shares = np.array([[term(layer) / layer.measured_s for term in terms] for layer in layers])
    best, least = np.zeros(len(terms)), float(len(layers))
    if not least:
        return best.tolist()
    for count in range(1, len(terms) + 1):
        for chosen in map(list, itertools.combinations(range(len(terms)), count)):
            scale = np.linalg.norm(shares[:, chosen], axis=0)
            scale[scale == 0] = 1.0
            part = np.linalg.lstsq(shares[:, chosen] / scale, np.ones(len(layers)), rcond=1e-6)[0] / scale
            error = float(((shares[:, chosen] @ part - 1) ** 2).sum())
            if part.min() >= 0 and error < least:
                best, least = np.zeros(len(terms)), error
                best[chosen] = part
    return best.tolist()


def _both(layer: LayerTime) -> float:
    return layer.heavy_s + layer.light_s


def _heavy(layer: LayerTime) -> float:
    return layer.heavy_s


def _light(layer: LayerTime) -> float:
    return layer.light_s


def _calls(layer: LayerTime) -> float:
    return float(layer.calls)


__all__ = ["BareTime", "Fit", "LayerTime", "fitted", "fitted_captured", "fitted_overlapping", "relative_errors"]
