"""Ours against a real Reverb server, live: random tables, random calls, every answer compared.

Runs in a venv with `dm-reverb` (tests/golden/reverb/README.md says how to make one):

    python -m pytest -m peers tests/peers/test_reverb.py

`HILT_FUZZ_SEED=7` starts from other random numbers; a failure names the seed of its case.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest

from hilt.replay.sampling import limiters as limiter
from hilt.replay.sampling import selectors as select
from tests.replay.toy_table import chi_square_is_plausible, replay_remover, replay_table, same

reverb = pytest.importorskip(
    "reverb", reason="no dm-reverb (Linux on x86-64, Python up to 3.11): see tests/golden/reverb/README.md"
)

from tests.peers import make_reverb_golden as real  # noqa: E402  (imports reverb)

pytestmark = pytest.mark.peers

FIRST = 1000 * int(os.environ.get("HILT_FUZZ_SEED", "0"))


def random_limiter(rng: random.Random) -> list[Any]:
    """Parameters that Reverb accepts, many of them on the edge of blocking."""
    kind = rng.choice(("MinSize", "SampleToInsertRatio", "SampleToInsertRatio", "Queue", "Stack", "RateLimiter"))
    if kind in ("MinSize", "Queue", "Stack"):
        return [kind, rng.randint(1, 6)]
    ratio = rng.choice((0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 3.7))
    min_size = rng.randint(1, 5)
    if kind == "RateLimiter":
        low = rng.uniform(-4, ratio * min_size)
        return [kind, ratio, min_size, low, max(low + 2 * max(1.0, ratio), ratio * min_size)]
    return [kind, ratio, min_size, max(1.0, ratio) + rng.choice((0.01, 0.5, 1.0, 4.0))]


@pytest.mark.parametrize("seed", range(FIRST, FIRST + 40))
def test_tables(seed: int):
    rng = random.Random(seed)
    case = real.table_case(real.random_spec(rng, random_limiter(rng)), rng, 80)
    same(replay_table(case), case["steps"])


@pytest.mark.parametrize("remover", real.DETERMINISTIC)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + 3))
def test_removers(remover: str, seed: int):
    case = real.remover_case(remover, random.Random(seed), 80)
    same(replay_remover(case), case["steps"])


@pytest.mark.parametrize("exponent", [0.0, 0.3, 0.5, 1.0, 2.0])
def test_prioritized(exponent: float):
    rng = random.Random(FIRST + int(10 * exponent))
    priorities = [rng.choice((0.0, 1.0, rng.uniform(0.1, 9.0))) for _ in range(rng.randint(4, 30))]
    for round_ in real.prioritized_case(exponent, priorities, rng, 20_000)["rounds"]:
        numbers = dict(round_["priorities"])
        ours = select.Prioritized(exponent)
        ours.insert(np.array(list(numbers)), np.array(list(numbers.values())))
        keys, probabilities = ours.sample(50_000, np.random.default_rng(FIRST))
        stated = dict(zip(keys.tolist(), probabilities.tolist(), strict=True))
        for number, probability in round_["probabilities"]:
            assert stated[number] == pytest.approx(probability, rel=1e-13)
        counts = np.array([count for _, count in round_["counts"]])
        assert chi_square_is_plausible(counts, np.array([stated.get(number, 0.0) for number in numbers]))


def test_the_same_parameters_are_refused():
    def refused(build: Any, *arguments: Any) -> bool:
        try:
            build(*arguments)
        except ValueError:  # ours is a ConfigError, which is one
            return True
        return False

    tried = 0
    for ratio in (-1.0, 0.0, 0.2, 1.0, 2.5):
        for min_size in (-1, 0, 1, 4):
            for buffer in (0.0, 0.5, 1.0, 2.5, 3.0, (-2.0, 1.0), (1.0, 9.0), (-5.0, 0.0), (10.0, 30.0), (10.0, 10.5)):
                theirs = refused(reverb.rate_limiters.SampleToInsertRatio, ratio, min_size, buffer)
                assert refused(limiter.SampleToInsertRatio, ratio, min_size, buffer) == theirs, (
                    ratio,
                    min_size,
                    buffer,
                )
                tried += 1
    for min_size in (-1, 0, 1, 2):
        assert refused(limiter.MinSize, min_size) == refused(reverb.rate_limiters.MinSize, min_size)
    assert tried == 200
