"""SimpleVLA-RL's core algorithms: advantages, clipped losses, KL penalties,
entropy, the adaptive KL controller. Within 1e-6."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import golden

TOLERANCE = 1e-6
INPUTS = (
    "rewards",
    "group",
    "values",
    "old_log_prob",
    "log_prob",
    "ref_log_prob",
    "finish",
    "value_pred",
    "entropy_logits",
)
# the seed of a generator that is not numpy's; the logits are here
INPUTS += ("entropy_logits_seed", "adaptive_kl_inputs")


def matches(path: Path) -> Path | None:
    return path if path.suffix == ".npz" and path.parent.name == "algos" else None


def compare(case: Path) -> golden.Result:
    with np.load(case) as file:
        theirs = dict(file)
    given = {name: torch.from_numpy(theirs.pop(name)) for name in INPUTS}
    ours = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in numbers(given).items()}
    return golden.compare(ours, theirs, lambda name: golden.exact if name == "mask" else near)


def near(ours: Any, theirs: Any) -> golden.Difference:
    return golden._arrays(ours, theirs, lambda apart: apart <= TOLERANCE)


def numbers(given: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What our functions make of the inputs: an episode of theirs is a row of
    tokens, as one of ours is a row of chunks."""
    from hilt.algos.advantage import advantages, gae, whiten
    from hilt.algos.config import Kl, PolicyGradient
    from hilt.algos.kl import KLController, divergence
    from hilt.algos.surrogate import surrogate, value_loss, weights
    from hilt.policies.vla.heads import TokensHead

    rewards, values, group = given["rewards"], given["values"], given["group"]
    mask = torch.arange(rewards.shape[1]) < given["finish"][:, None]
    share = (
        weights("token_mean", mask.sum(1).float(), torch.arange(len(mask)), float(mask.sum()), len(mask), 1)[:, None]
        * mask
    )

    def advantage(**settings: Any) -> torch.Tensor:
        return advantages(PolicyGradient(**settings), rewards, mask, group)[0]

    ours: dict[str, Any] = {"mask": mask, "grpo": advantage()}
    ours["reinforce_pp_g0.98"] = advantage(estimator="reinforce_plus_plus", discount=0.98)
    raw, returns = gae(rewards, values, 0.99, 0.95)  # theirs has values after the end
    ours["gae_adv_g0.99_l0.95"], ours["gae_ret_g0.99_l0.95"] = whiten(raw, mask), returns
    change = given["log_prob"] - given["old_log_prob"]
    found = surrogate(change, ours["grpo"], 0.2, 0.28)
    ours["policy_loss_h0.28_l0.2"], ours["clip_fraction"], ours["ppo_kl"] = (
        (x * share).sum() for x in (found.loss, found.clipped, -change)
    )
    loss, clipped = value_loss(given["value_pred"], values, returns, 0.5)
    ours["value_loss_c0.5"], ours["value_clip_fraction"] = (loss * share).sum(), (clipped * share).sum()
    for kind in ("kl", "abs", "mse"):
        ours[f"kl_penalty_{kind}"] = divergence(given["old_log_prob"], given["ref_log_prob"], kind)
    logits = given["entropy_logits"]
    head = TokensHead(1, logits.shape[1], 1, logits.shape[2])
    head.out = torch.nn.Identity()  # type: ignore[assignment]
    tokens = torch.zeros(*logits.shape[:2], 1, dtype=torch.int64)
    first = mask[:, : logits.shape[1]]
    entropy = head.evaluate(logits, {"tokens": tokens}, torch.ones(len(logits)))[1][..., 0]
    ours["entropy_mean_first6"] = (entropy * first).sum() / first.sum()
    controller, followed = (
        KLController(Kl("reward", coefficient=0.1, controller="adaptive", target=6.0, horizon=10_000)),
        [],
    )
    for kl, trajectories in given["adaptive_kl_inputs"].tolist():
        controller.follow(kl, trajectories)
        followed.append(controller.coefficient)
    return ours | {"adaptive_kl_values": np.array(followed)}
