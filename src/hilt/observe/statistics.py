"""Confidence intervals of success rates: of shares, of episodes that share a scene,
and of the difference between two policies.

Example:

    low, high = wilson(97, 100)                       # independent episodes
    low, high = clustered(outcomes, scenes)           # four tasks in 100 scenes each: not 400 independent episodes
    low, high, counted = over_scenes(outcomes)        # of several tasks, some of which may share their scenes
    gain, low, high = paired_difference(before, after, scenes)
    lost, error = paired_loss(before, after)          # the same states once more: how much less, in standard errors
    share, low, high = crossed(outcomes)              # [seeds, scenes]: several policies in the same scenes
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from hilt.core.errors import ConfigError

Z = 1.959963984540054
"""Of a 95% interval"""
RESAMPLES = 10_000


def wilson(successes: float, episodes: float) -> tuple[float, float]:
    """The 95% interval of a share: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
    if not 0 <= successes <= episodes or episodes < 1:
        raise ConfigError(
            f"{successes} successes of {episodes} episodes: expected at least one episode, and no more successes."
        )
    share, scale = successes / episodes, Z * Z / episodes
    half = Z * math.sqrt(share * (1 - share) / episodes + scale / (4 * episodes))
    low, high = ((share + scale / 2 + sign * half) / (1 + scale) for sign in (-1, 1))
    return (low if successes else 0.0), (high if successes < episodes else 1.0)


def clustered(outcomes: Sequence[bool], clusters: Sequence[Hashable]) -> tuple[float, float]:
    """The 95% interval of a share where outcomes of one cluster, such as one scene, may depend on each other:
    Wilson's with the `effective` number of episodes."""
    counted = effective(outcomes, clusters)
    return wilson(sum(map(bool, outcomes)) / len(outcomes) * counted, counted)


def effective(outcomes: Sequence[bool], clusters: Sequence[Hashable]) -> float:
    """The effective sample size of a share p, as of independent episodes: p(1 - p) over the variance of p
    between clusters, and at most the number of episodes. Where all outcomes are alike there is no variance
    to measure, and each cluster counts once."""
    sums, sizes = _by_cluster(outcomes, clusters)
    episodes, count = len(outcomes), len(sizes)
    share = sums.sum() / episodes
    if count < 2 or share in (0.0, 1.0):
        return float(count)
    between = float(((sums - share * sizes) ** 2).sum()) * count / (count - 1) / episodes**2
    return float(max(1.0, min(share * (1 - share) / max(between, 1e-12), episodes)))


def over_scenes(outcomes: Sequence[tuple[Hashable, Hashable, Hashable, bool]]) -> tuple[float, float, float]:
    """The 95% interval of the success of all (task, scene of the task, initial state, success) together,
    and how many independent episodes they stand for: all of them, unless tasks share a scene, and so
    begin alike. There its states are clusters."""
    successes = [bool(success) for *_, success in outcomes]
    counted = float(len(outcomes))
    if len({scene for _, scene, _, _ in outcomes}) < len({task for task, _, _, _ in outcomes}):
        counted = effective(successes, [(scene, state) for _, scene, state, _ in outcomes])
    return *wilson(sum(successes) / len(outcomes) * counted, counted), counted


def in_clusters(outcomes: Iterable[tuple[str, int, str, bool]]) -> str:
    """The (scene, initial state, task, success) of an evaluation as a text, ``"11 01"``: a word for each state of a
    scene, a digit for each episode in it. Two evaluations of the same states have words of the same lengths, in the
    same order, and can be compared in pairs."""
    words: dict[tuple[str, int], str] = {}
    for scene, state, _, success in sorted(outcomes, key=lambda one: one[:3]):
        words[scene, state] = words.get((scene, state), "") + str(int(success))
    return " ".join(words.values())


def paired_loss(before: str, after: str) -> tuple[float, float] | None:
    """How much smaller the share of successes of `after` is, and its standard error if both were alike; None
    where the two texts of `in_clusters` are not of the same states. Of a cluster the difference of its sums
    counts, so that what is hard in both does not."""
    first, second = before.split(), after.split()
    if not first or [len(word) for word in first] != [len(word) for word in second]:
        return None
    losses = [one.count("1") - other.count("1") for one, other in zip(first, second, strict=True)]
    episodes = sum(map(len, first))
    return sum(losses) / episodes, math.sqrt(sum(loss * loss for loss in losses)) / episodes


def paired_difference(
    before: Sequence[bool], after: Sequence[bool], clusters: Sequence[Hashable], seed: int = 0
) -> tuple[float, float, float]:
    """How much larger the second share is, with a 95% interval: a bootstrap that draws
    whole clusters, in each of which both were tried.

    Episode i of `before` and of `after` began alike and belong to cluster i. Where all
    differences are alike, a bootstrap would say that nothing else can be: then one in each
    cluster counts as seen, and the bound is Wilson's of that.
    """
    if len(before) != len(after):
        raise ConfigError(
            f"{len(before)} and {len(after)} episodes cannot be paired: try both policies from the same initial states."
        )
    gains, sizes = _by_cluster(np.subtract(np.asarray(after, float), np.asarray(before, float)), clusters)
    mean = float(gains.sum() / sizes.sum())
    if np.ptp(gains / sizes) == 0:
        return (mean, *_alike(mean, len(sizes)))
    drawn = np.random.default_rng(seed).integers(len(sizes), size=(RESAMPLES, len(sizes)))
    low, high = np.quantile(gains[drawn].sum(1) / sizes[drawn].sum(1), [0.025, 0.975])
    return mean, float(low), float(high)


def crossed(values: np.ndarray) -> tuple[float, float, float]:
    """The mean of outcomes [seeds, scenes], or of their differences, with a 95%
    interval for other seeds and other scenes.

    Its variance is that of the means of seeds and that of the means of scenes, less what both count twice; seeds are
    few, so the width is Student's with one degree of freedom less than there are seeds. Where all values are alike the
    interval is that of one episode in each scene.
    """
    table = np.asarray(values, float)
    if table.ndim != 2 or not table.size:
        raise ConfigError(f"values have the shape {list(table.shape)}; expected is [seeds, scenes].")
    seeds, scenes = table.shape
    mean = float(table.mean())
    if table.min() == table.max():
        return (mean, *_alike(mean, scenes))
    of_seeds = table.mean(1).var(ddof=1) / seeds if seeds > 1 else 0.0
    of_scenes = table.mean(0).var(ddof=1) / scenes if scenes > 1 else 0.0
    rest = table - table.mean(0) - table.mean(1)[:, None] + mean
    both = (rest**2).sum() / max(1, (seeds - 1) * (scenes - 1)) / table.size
    half = student(max(1, seeds - 1)) * math.sqrt(max(of_seeds + of_scenes - both, of_seeds, of_scenes))
    bound = -1.0 if table.min() < 0 else 0.0
    return mean, max(bound, mean - half), min(1.0, mean + half)


def student(freedom: int) -> float:
    """How many standard deviations 95% lie within where the deviation itself comes
    from `freedom` + 1 values: Student's t."""
    known = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
    return known[freedom - 1] if freedom <= len(known) else Z + 2.4 / freedom  # within 0.01 of it from there on


def _alike(mean: float, scenes: int) -> tuple[float, float]:
    """Bounds where as many scenes as these showed the same: what is not seen in n tries may
    still be, by Wilson's bound for none of n."""
    missed = wilson(0, scenes)[1]
    return max(-1.0, mean - missed), min(1.0, mean + missed)


def _by_cluster(values: Sequence[float] | np.ndarray, clusters: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
    """The sum of the values of each cluster, and how many there are."""
    if len(values) != len(clusters) or not len(values):
        raise ConfigError(
            f"{len(values)} outcomes and {len(clusters)} clusters: expected the cluster of each "
            "outcome, and one at least."
        )
    numbers = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    places = np.array([numbers[cluster] for cluster in clusters])
    return np.bincount(places, np.asarray(values, float)), np.bincount(places).astype(float)
