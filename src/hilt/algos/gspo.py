"""Group sequence policy optimization (GSPO; Zheng et al. 2025, arXiv 2507.18071): PPO's surrogate of the ratio of a
whole answer, normalized by its length.

    s = (p / p_old)^(1 / n) = exp(mean over its n numbers of (log p - log p_old))
    L = max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high))

The answer of a policy to one observation is a chunk (ratio=chunk), or an action of it (ratio=action). Numbers that were
not carried out do not count in n. All numbers of an answer are clipped together, and have the same weight:

    grad L = -A s / n  sum of grad log p,  0 where the clip decides

A mean over n numbers moves less than each of them does, the less the longer the answer: the paper, with answers of
thousands of tokens, has clip_low=3e-4 and clip_high=4e-4. With one number s is PPO's ratio.

With recompute_log_prob the weight of an older policy is of the same mean, w = min((p_old / p_drawn)^(1 / n), cap): w s
is (p / p_drawn)^(1 / n), the ratio without recompute_log_prob, and only the clip is around another policy.
"""

from __future__ import annotations

from collections.abc import Iterator

from hilt.algos.config import PolicyGradient
from hilt.algos.surrogate import ClippedSurrogate


class SequenceSurrogate(ClippedSurrogate):
    """The clipped surrogate of the mean ratio of an action or a chunk."""

    uses = frozenset({"clip_low", "clip_high"})
    mean_ratio = True

    def conflicts(self, settings: PolicyGradient, here: str) -> Iterator[str]:
        if settings.ratio == "token":
            yield (
                f"{here}loss=gspo with {here}ratio=token: the ratio of a single number has no length to be normalized "
                f"by. Give {here}ratio=chunk, the whole answer, or action; or {here}loss=clipped."
            )
