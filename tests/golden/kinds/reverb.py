"""Answers of a real Reverb server to random calls, by our selectors and limiters.

Exact, but for probabilities (1e-14 of them) and for what was drawn by chance: those
counts have to be plausible for our probabilities.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hilt.replay.sampling.selectors import Prioritized
from tests import golden
from tests.replay.toy_table import chi_square_is_plausible, replay_remover, replay_table


def matches(path: Path) -> Path | None:
    return path if path.name in ("tables.json", "removers.json", "prioritized.json") and path.is_file() else None


def compare(case: Path) -> golden.Result:
    cases = json.loads(case.read_text())["cases"]
    if case.name == "prioritized.json":
        return probabilities(cases)
    replay = replay_table if case.name == "tables.json" else replay_remover
    theirs = {f"case {n}": one["steps"] for n, one in enumerate(cases)}
    return golden.compare({f"case {n}": replay(one) for n, one in enumerate(cases)}, theirs)


def probabilities(cases: list[dict[str, Any]]) -> golden.Result:
    result = golden.Result()
    for n, case in enumerate(cases):
        for i, one in enumerate(case["rounds"]):
            keys, priorities = (np.array(column) for column in zip(*one["priorities"], strict=True))
            selector = Prioritized(case["exponent"])
            selector.insert(keys, priorities.astype(float))
            drawn, stated = selector.sample(10 * case["draws"], np.random.default_rng(0))
            ours = dict(zip(drawn.tolist(), stated.tolist(), strict=True))
            theirs = dict(one["probabilities"])
            counts = dict(one["counts"])
            wanted = {key: theirs.get(key) for key in keys.tolist() if counts[key]}
            result.add(f"case {n}/{i}/keys", golden.exact(sorted(counts), keys.tolist()))
            result.add(f"case {n}/{i}/draws", golden.exact(sum(counts.values()), case["draws"]))
            result.add(f"case {n}/{i}/probabilities of", golden.exact(sorted(theirs), sorted(wanted)))
            for key in theirs:
                result.add(f"case {n}/{i}/{key}", golden.close(1e-14)(ours.get(key, np.nan), theirs[key]))
            shares = np.array([ours.get(key, 0.0) for key in keys.tolist()])
            plausible = chi_square_is_plausible(np.array([counts[key] for key in keys.tolist()]), shares)
            result.add(f"case {n}/{i}/counts", (0.0, None if plausible else ": not plausible for our probabilities"))
    return result
