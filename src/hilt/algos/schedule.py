"""The schedule of a learning rate: a linear warm-up, then constant or a half cosine. With the progress p, the share of
the run that is done, from 0 to 1, the share w of the warm-up and the factor m at the end, the rate is the highest one
times

    f(p) = p / w                                                    where p < w
    f(p) = 1                                                        elsewhere, if it is constant
    f(p) = m + (1 - m) (1 + cos(pi min(1, (p - w) / (1 - w)))) / 2  elsewhere, if it is a cosine
"""

from __future__ import annotations

import math


def learning_rate_factor(progress: float, warmup: float = 0.0, schedule: str = "cosine", final: float = 0.0) -> float:
    """The factor of the highest learning rate for a step.

    `progress` is the share of the run that is done with this step, above 0 and up to 1. The factor
    rises linearly over the first `warmup` of the run; then it stays 1 (``constant``), or falls along a
    half cosine to `final` at the end (``cosine``).
    """
    if progress < warmup:
        return progress / warmup
    if schedule == "constant":
        return 1.0
    passed = min(1.0, (progress - warmup) / max(1e-9, 1 - warmup))
    return final + (1 - final) * (1 + math.cos(math.pi * passed)) / 2
