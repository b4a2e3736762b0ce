"""How sure a success rate is: intervals of shares, of episodes that share a scene, and of the difference between two policies.

    low, high = wilson(97, 100)                       # independent episodes
    low, high = clustered(outcomes, scenes)           # four tasks in each of 100 scenes are not 400 independent episodes
    gain, low, high = paired_difference(before, after, scenes)
    share, low, high = crossed(outcomes)              # [seeds, scenes]: several policies in the same scenes
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

from hilt.core.errors import ConfigError

Z = 1.959963984540054
"""Of a 95% interval"""
RESAMPLES = 10_000


def wilson(successes: float, episodes: float) -> tuple[float, float]:
    """The 95% interval of a share: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
    if not 0 <= successes <= episodes or episodes < 1:
        raise ConfigError(f"{successes} successes of {episodes} episodes: expected at least one episode, and no more successes.")
    share, scale = successes / episodes, Z * Z / episodes
    half = Z * math.sqrt(share * (1 - share) / episodes + scale / (4 * episodes))
    low, high = ((share + scale / 2 + sign * half) / (1 + scale) for sign in (-1, 1))
    return (low if successes else 0.0), (high if successes < episodes else 1.0)


def clustered(outcomes: Sequence[bool], clusters: Sequence[Hashable]) -> tuple[float, float]:
    """The 95% interval of a share where outcomes of one cluster, such as one scene, may depend on each other.

    It is Wilson's with the effective number of episodes: p(1 - p) over the variance of p between clusters, from as few as there are
    clusters to as many as there are episodes. Where all outcomes are alike there is no variance to measure, and each cluster counts once.
    """
    sums, sizes = _by_cluster(outcomes, clusters)
    episodes, count = len(outcomes), len(sizes)
    share = sums.sum() / episodes
    if count < 2 or share in (0.0, 1.0):
        effective = float(count)
    else:
        between = float(((sums - share * sizes) ** 2).sum()) * count / (count - 1) / episodes**2
        effective = min(max(share * (1 - share) / max(between, 1e-12), count), episodes)
    return wilson(share * effective, effective)


def paired_difference(
    before: Sequence[bool], after: Sequence[bool], clusters: Sequence[Hashable], seed: int = 0
) -> tuple[float, float, float]:
    """How much larger the second share is, with a 95% interval: a bootstrap that draws whole clusters, in each of which both were tried.

    Episode i of `before` and of `after` began alike and belong to cluster i.
    """
    if len(before) != len(after):
        raise ConfigError(f"{len(before)} and {len(after)} episodes cannot be paired: try both policies from the same initial states.")
    gains, sizes = _by_cluster(np.subtract(np.asarray(after, float), np.asarray(before, float)), clusters)
    drawn = np.random.default_rng(seed).integers(len(sizes), size=(RESAMPLES, len(sizes)))
    means = gains[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(gains.sum() / sizes.sum()), float(low), float(high)


def crossed(values: np.ndarray, difference: bool = False, seed: int = 0) -> tuple[float, float, float]:
    """The mean of outcomes [seeds, scenes], or of their `difference`, with a 95% interval: a bootstrap that draws seeds and scenes anew, as
    both are samples. Where all outcomes are alike there is nothing else to draw, and the interval is that of one episode in each scene."""
    table = np.asarray(values, float)
    if table.ndim != 2 or not table.size:
        raise ConfigError(f"values have the shape {list(table.shape)}; expected is [seeds, scenes].")
    if table.min() == table.max():
        mean = float(table.flat[0])
        return (mean, mean, mean) if difference else (mean, *wilson(mean * table.shape[1], table.shape[1]))
    rng = np.random.default_rng(seed)
    rows = rng.integers(len(table), size=(RESAMPLES, len(table)))
    of_scene = np.stack([table[drawn].mean(0) for drawn in rows])  # [RESAMPLES, scenes]
    columns = rng.integers(table.shape[1], size=(RESAMPLES, table.shape[1]))
    low, high = np.quantile(np.take_along_axis(of_scene, columns, 1).mean(1), [0.025, 0.975])
    return float(table.mean()), float(low), float(high)


def _by_cluster(values: Sequence[float] | np.ndarray, clusters: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
    """The sum of the values of each cluster, and how many there are."""
    if len(values) != len(clusters) or not len(values):
        raise ConfigError(f"{len(values)} outcomes and {len(clusters)} clusters: expected the cluster of each outcome, and one at least.")
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    places = np.array([numbers[cluster] for cluster in clusters])
    return np.bincount(places, np.asarray(values, float)), np.bincount(places).astype(float)
