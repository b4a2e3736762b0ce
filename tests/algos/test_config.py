"""Settings of policy gradients: what cannot work, and what would do nothing, is refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from hilt.algos.config import Batching, Kl, Optimizer, PolicyGradient
from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.validate import check


def test_the_usual_ones_are_fine():
    for each in (PolicyGradient(), PolicyGradient("gae"), Optimizer(), Kl("loss", "mse"), Batching(tokens_per_pass=9)):
        check(each)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (PolicyGradient("gropo"), "no estimator named 'gropo'; did you mean 'grpo'"),
        (PolicyGradient(discount=1.1), "discount=1.1: expected a number from 0 to 1"),
        (PolicyGradient("remax", discount=0.9), "discount=0.9: remax compares whole scores"),
        (PolicyGradient(dual_clip=0.5), "dual_clip=0.5: expected above 1, such as 3, or 0 for none"),
        (PolicyGradient("gae", normalize="group"), "gae has no groups; take batch, or one of grpo, dr_grpo, rloo"),
        (
            PolicyGradient(lam=0.9),
            "lam=0.9 would do nothing: it needs estimator=gae, or another with a critic. Give that, or leave",
        ),
        (PolicyGradient(value_clip=0.1), "value_clip=0.1 would do nothing: it needs estimator=gae"),
        (PolicyGradient(importance_cap=5.0), "importance_cap=5.0 would do nothing: it needs recompute_log_prob=true"),
        (
            PolicyGradient(recompute_log_prob=True, importance_cap=0.5),
            "importance_cap=0.5: expected a number of at least 1",
        ),
        (PolicyGradient(horizon=5), "horizon=5 would do nothing: it needs reduction=trajectory_sum"),
        (
            PolicyGradient(kl=Kl(coefficient=0.1)),
            "kl.coefficient=0.1 would do nothing: it needs kl.where=reward or loss",
        ),
        (
            PolicyGradient(kl=Kl("reward", target=1.0)),
            "kl.target=1.0 would do nothing: it needs kl.controller=adaptive",
        ),
        (
            PolicyGradient(kl=Kl("loss")),
            "kl.estimate=kl in the loss has a gradient that is 0 on average. Give mse, whose gradient is on average",
        ),
        (
            PolicyGradient(batch=Batching(shuffle=False)),
            "batch.shuffle=False would do nothing: it needs batch.trajectories_per_step=N",
        ),
        (
            PolicyGradient(batch=Batching(chunks_per_pass=8, tokens_per_pass=9)),
            "batch.chunks_per_pass=8 would do nothing",
        ),
        (
            PolicyGradient(batch=Batching(log_prob_chunks_per_pass=8)),
            "batch.log_prob_chunks_per_pass=8 would do nothing: it needs kl.where",
        ),
        (
            PolicyGradient(batch=Batching(chunks_per_pass=0)),
            "batch.chunks_per_pass=0: expected a whole number of at least 1",
        ),
        (Optimizer(betas=[0.9]), "betas=.0.9.: expected 2 numbers, at least 0 and below 1"),
        (Optimizer(min_lr_ratio=0.1), "min_lr_ratio=0.1 would do nothing: it needs schedule=cosine"),
        (Optimizer(schedule="linear"), "no schedule named 'linear'"),
    ],
)
def test_refused(made: Any, says: str):
    with pytest.raises((ConfigError, UnknownNameError), match=says):
        check(made)
    if isinstance(made, PolicyGradient | Optimizer):
        # by its name in a run
        with pytest.raises((ConfigError, UnknownNameError), match=r"(algorithm|optimizer)\.|no estimator"):
            made.check()
