"""Policy gradients once more, slowly: plain numbers in float64, one loop for each
sum, gradients by central differences.

Shares no code with hilt.algos. An episode is a dict: ``seen`` [T, F], ``tokens`` [T, C, D], ``executed``
[T], ``old`` and ``ref`` [T, C, D], ``value`` and ``rewards`` [T], ``group``, ``baseline``; and ``drawn``
[T, C, D] where another policy drew than ``old`` is of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Rows = list[list[float]]
Params = dict[str, np.ndarray]
Objective = Callable[[Params], float]


def advantages(
    settings: Any,
    earned: Rows,
    groups: Sequence[int],
    values: Rows,
    baselines: Sequence[float],
    paid: Rows | None = None,
) -> tuple[Rows, Rows]:
    """Of each chunk of each episode; and the returns that a critic learns."""
    gamma, kind = settings.discount, settings.estimator
    paid = paid or [[0.0] * len(r) for r in earned]
    rewards = [[a - b for a, b in zip(r, p, strict=True)] for r, p in zip(earned, paid, strict=True)]
    task, cost = ([sum(gamma**t * x for t, x in enumerate(each)) for each in rows] for rows in (earned, paid))
    togo = [[sum(gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))] for r in rewards]
    returns, found = togo, list[list[float]]()
    how = settings.normalize
    if how == "auto":
        how = {"grpo": "group", "gae": "batch", "reinforce_plus_plus": "batch"}.get(kind, "none")
    for i, r in enumerate(rewards):
        if kind in ("grpo", "dr_grpo", "rloo"):
            members = [j for j in range(len(rewards)) if groups[j] == groups[i]]
            others = [j for j in members if j != i or kind != "rloo"] if len(members) > 1 else []
            scale, mean = 1.0, sum(task[j] for j in members) / len(members)
            if how == "group" and len(members) > 1:
                scale = math.sqrt(sum((task[j] - mean) ** 2 for j in members) / (len(members) - 1)) + 1e-6
            apart = [x[i] - (sum(x[j] for j in others) / len(others) if others else 0.0) for x in (task, cost)]
            found.append([apart[0] / scale - apart[1]] * len(r))
        elif kind == "remax":
            found.append([g - baselines[i] for g in togo[i]])
        elif kind == "reinforce_plus_plus":
            found.append(list(togo[i]))
        else:
            v = [*values[i], 0.0]
            delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
            found.append(
                [sum((gamma * settings.lam) ** (k - t) * delta[k] for k in range(t, len(r))) for t in range(len(r))]
            )
    if kind == "gae":
        returns = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(found, values, strict=True)]
    if how == "batch":
        flat = [x for each in found for x in each]
        mean = sum(flat) / len(flat)
        spread = math.sqrt(sum((x - mean) ** 2 for x in flat) / max(1, len(flat) - 1) + 1e-8)
        found = [[(x - mean) / spread for x in each] for each in found]
    return found, returns


def divergence(kind: str, p: float, q: float) -> float:
    return {"kl": p - q, "abs": abs(p - q), "mse": (p - q) ** 2 / 2, "low_var_kl": math.exp(q - p) - (q - p) - 1}[kind]


def objective(
    settings: Any,
    episodes: Sequence[Mapping[str, Any]],
    coefficient: float,
    batch: Sequence[int] | None = None,
    held: Params | None = None,
) -> Objective:
    """What one step minimizes, of the episodes of `batch` among all whose advantages are compared. `held`: the
    parameters of what has no gradient, where the loss has such a factor."""
    rewards = [list(map(float, e["rewards"])) for e in episodes]
    paid = [[0.0] * len(r) for r in rewards]
    if settings.kl.where == "reward":
        for e, p in zip(episodes, paid, strict=True):
            for t, c, d in done(e):
                p[t] += coefficient * divergence(settings.kl.estimate, e["old"][t, c, d], e["ref"][t, c, d])
    values = [list(map(float, e["value"])) for e in episodes]
    worth, returns = advantages(
        settings, rewards, [e["group"] for e in episodes], values, [e["baseline"] for e in episodes], paid
    )
    chosen = [(episodes[i], worth[i], returns[i]) for i in (range(len(episodes)) if batch is None else batch)]
    fixed = None if held is None else {name: value.tolist() for name, value in held.items()}
    return lambda params: loss(
        settings, {name: value.tolist() for name, value in params.items()}, chosen, coefficient, fixed
    )


def loss(
    settings: Any,
    params: Mapping[str, Any],
    chosen: Sequence[tuple[Any, list[float], list[float]]],
    coefficient: float,
    held: Mapping[str, Any] | None = None,
) -> float:
    surrogates, entropies, distances, errors = (
        list[list[float]](),
        list[list[float]](),
        list[list[float]](),
        list[float](),
    )
    for e, worth, returns in chosen:
        ratios, stale, entropy, distance = dict[Any, float](), dict[Any, float](), list[float](), list[float]()
        size, weighed = dict[Any, int](), dict[Any, float]()
        seen, tokens, old, ref = (e[name].tolist() for name in ("seen", "tokens", "old", "ref"))
        drawn = e.get("drawn", e["old"]).tolist()
        for t, c, d in done(e):
            logits = [sum(w * x for w, x in zip(row, seen[t], strict=True)) for row in params["weight"][c][d]]
            total = math.log(sum(math.exp(x) for x in logits))
            new = logits[tokens[t][c][d]] - total
            key = {"token": (t, c, d), "action": (t, c), "chunk": (t,)}[settings.ratio]
            ratios[key] = ratios.get(key, 0.0) + new - old[t][c][d]
            size[key] = size.get(key, 0) + 1
            if held is not None:
                kept = [sum(w * x for w, x in zip(row, seen[t], strict=True)) for row in held["weight"][c][d]]
                kept_new = kept[tokens[t][c][d]] - math.log(sum(math.exp(x) for x in kept))
                weighed[key] = weighed.get(key, 0.0) + kept_new - old[t][c][d]
            stale[key] = stale.get(key, 0.0) + old[t][c][d] - drawn[t][c][d]
            entropy.append(-sum(math.exp(x - total) * (x - total) for x in logits))
            distance.append(divergence(settings.kl.estimate, new, ref[t][c][d]))
        surrogate = []
        for key, change in ratios.items():
            length = size[key] if settings.loss == "gspo" else 1
            a, r = worth[key] if isinstance(worth, Mapping) else worth[key[0]], math.exp(change / length)
            if settings.loss == "cispo":
                term = -a * min(math.exp(weighed.get(key, change)), 1 + settings.clip_high) * change
            else:
                term = max(-a * r, -a * min(max(r, 1 - settings.clip_low), 1 + settings.clip_high))
                term = min(term, -a * settings.dual_clip) if settings.dual_clip and a < 0 else term
            surrogate.append(term * min(math.exp(stale[key] / length), settings.importance_cap))
        for t, target in enumerate(returns):
            v, before = sum(w * x for w, x in zip(params["value"], seen[t], strict=True)), float(e["value"][t])
            near = min(max(v, before - settings.value_clip), before + settings.value_clip) if settings.value_clip else v
            errors.append(max((v - target) ** 2, (near - target) ** 2) / 2)
        for kept, terms in ((surrogates, surrogate), (entropies, entropy), (distances, distance)):
            kept.append(terms)
    total = reduced(settings, surrogates) - settings.entropy * reduced(settings, entropies)
    if settings.kl.where == "loss":
        total += coefficient * reduced(settings, distances)
    return total + (settings.value_coefficient * sum(errors) / len(errors) if settings.estimator == "gae" else 0.0)


def log_ratios(
    params: Mapping[str, Any], reference: Mapping[str, Any], e: Mapping[str, Any]
) -> dict[tuple[int, int, int], float]:
    """log p - log p_reference of each number that was carried out, in order."""
    found = {}
    for t, c, d in done(e):
        logs = []
        for weight in (params["weight"], reference["weight"]):
            logits = [sum(float(w) * float(x) for w, x in zip(row, e["seen"][t], strict=True)) for row in weight[c][d]]
            logs.append(logits[e["tokens"][t, c, d]] - math.log(sum(math.exp(x) for x in logits)))
        found[t, c, d] = logs[0] - logs[1]
    return found


def outcome_loss(
    beta: float, params: Mapping[str, Any], reference: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]]
) -> float:
    """What PRIME's reward policy minimizes: the mean cross-entropy of outcomes."""
    losses = []
    for e in episodes:
        p = 1 / (1 + math.exp(-beta * sum(log_ratios(params, reference, e).values())))
        losses.append(-math.log(p if e["success"] else 1 - p))
    return sum(losses) / len(losses)


def process_advantages(
    settings: Any, prime: Any, ratios: Sequence[Mapping[Any, float]], groups: Sequence[int]
) -> list[dict[Any, float]]:
    """Of each number of each episode, by the position (t, c, d): what PRIME adds to the
    advantage of the outcome, without coefficient."""
    rewards = []
    for q in ratios:
        terms, last = dict[Any, float](), max(q)
        for (t, c, d), x in q.items():
            key = {"token": (t, c, d), "chunk": (t,), "whole": (last[0],)}[prime.granularity]
            terms[key] = terms.get(key, 0.0) + x
        rewards.append(terms)
    returns = [abs(sum(x for other, x in terms.items() if other >= key)) for terms in rewards for key in terms]
    scale = prime.beta if prime.scale == "none" else 1 / max(1.0, *returns)
    rewards = [{key: scale * x for key, x in terms.items()} for terms in rewards]
    means, found = [sum(terms.values()) / len(terms) for terms in rewards], []
    for i, (q, terms) in enumerate(zip(ratios, rewards, strict=True)):
        members = [j for j in range(len(ratios)) if groups[j] == groups[i]]
        others = [j for j in members if j != i or settings.estimator != "rloo"]
        baseline = sum(means[j] for j in others) / len(others) if len(members) > 1 else 0.0
        worth = {}
        for place in q:
            first = place if prime.granularity == "token" else place[:1]
            later = [(key[0] - place[0], x) for key, x in terms.items() if key >= first]
            worth[place] = sum(settings.discount**chunks * (x - baseline) for chunks, x in later)
        found.append(worth)
    return found


def done(e: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """The numbers that were carried out."""
    chunk, dim = e["tokens"].shape[1:]
    return [(t, c, d) for t, n in enumerate(e["executed"]) for c in range(chunk) for d in range(dim) if c < n]


def reduced(settings: Any, terms: Sequence[Sequence[float]]) -> float:
    if settings.reduction == "token_mean":
        return sum(sum(each) for each in terms) / sum(len(each) for each in terms)
    if settings.reduction == "trajectory_mean":
        return sum(sum(each) / len(each) for each in terms) / len(terms)
    return sum(sum(each) / settings.horizon for each in terms) / len(terms)


def gradient(of: Objective, params: Params, step: float = 1e-5) -> Params:
    """By central differences."""
    found = {name: np.zeros_like(value) for name, value in params.items()}
    for name, value in params.items():
        for place in np.ndindex(value.shape):
            sides = []
            for sign in (1, -1):
                moved = value.copy()
                moved[place] += sign * step
                sides.append(of(params | {name: moved}))
            found[name][place] = (sides[0] - sides[1]) / (2 * step)
    return found
