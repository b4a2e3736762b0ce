"""An advantage estimator and a loss for post-training."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hilt.algos.config import PolicyGradient
from hilt.algos.tables import Estimator, PolicyLoss, ScoredEpisodes


class BestOf(Estimator):
    """The score of an episode less the best score of its group."""

    grouped = True

    def estimate(self, episodes: ScoredEpisodes, settings: PolicyGradient) -> Tensor:
        score = episodes.returns[:, 0]
        best = torch.stack([score[episodes.group == group].max() for group in episodes.group])
        return (score - best)[:, None].expand_as(episodes.rewards)


class Unclipped(PolicyLoss):
    """The importance-weighted policy gradient, -A r."""

    def figures(self, settings: PolicyGradient) -> list[str]:
        return ["mean_ratio"]

    def terms(
        self, log_ratio: Tensor, advantage: Tensor, settings: PolicyGradient
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        ratio = log_ratio.exp()
        return -advantage * ratio, {"mean_ratio": ratio.detach()}
