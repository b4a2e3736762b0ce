"""Estimators and losses by name: the built-in ones, and those of somebody else."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from hilt.algos.advantage import advantages
from hilt.algos.config import GROUPED, PolicyGradient
from hilt.algos.tables import ESTIMATORS, Estimator, PolicyLoss, ScoredEpisodes, estimator, policy_loss
from hilt.core.errors import ConfigError, SchemaError, UnknownNameError


class BestOf(Estimator):
    """The score less the best of the group."""

    grouped = True

    def estimate(self, episodes: ScoredEpisodes, settings: PolicyGradient) -> Tensor:
        score = episodes.returns[:, 0]
        best = torch.stack([score[episodes.group == group].max() for group in episodes.group])
        return (score - best)[:, None].expand_as(episodes.rewards)


class OfEpisodes(Estimator):
    """One number for each episode, and not for each chunk."""

    def estimate(self, episodes: ScoredEpisodes, settings: PolicyGradient) -> Tensor:
        return episodes.returns[:, 0]


class Unclipped(PolicyLoss):
    """The importance-weighted policy gradient."""

    uses = frozenset({"clip_high"})

    def figures(self, settings: PolicyGradient) -> list[str]:
        return ["large_ratios"]

    def terms(
        self, log_ratio: Tensor, advantage: Tensor, settings: PolicyGradient
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        return -advantage * log_ratio.exp(), {
            "large_ratios": (log_ratio.exp() > 1 + settings.clip_high).to(advantage.dtype)
        }


def named(kind: type) -> str:
    return f"{__name__}:{kind.__name__}"


def test_the_built_in_estimators_say_of_themselves_what_settings_ask():
    assert tuple(name for name in ESTIMATORS if estimator(name).grouped) == GROUPED
    assert [name for name in ESTIMATORS if estimator(name).needs_critic] == ["gae"]
    assert [name for name in ESTIMATORS if estimator(name).needs_greedy] == ["remax"]
    assert [name for name in ESTIMATORS if estimator(name).leave_one_out] == ["rloo"]


def test_an_estimator_of_ones_own_is_masked_and_normalized_as_the_others():
    rewards, mask = (
        torch.tensor([[0.0, 1.0], [0.0, 0.0], [3.0, 9.0]]).double(),
        torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]),
    )
    group = torch.tensor([0, 0, 1])
    settings = PolicyGradient(estimator=named(BestOf))
    settings.check()
    found, returns = advantages(settings, rewards, mask, group)
    assert found.tolist() == [[0, 0], [-1, -1], [0, 0]] and returns.tolist() == [[1, 1], [0, 0], [3, 0]]
    whitened, _ = advantages(PolicyGradient(estimator=named(BestOf), normalize="batch"), rewards, mask, group)
    assert float(whitened.sum()) == pytest.approx(0, abs=1e-9)


def test_an_estimator_that_gives_another_shape_is_refused():
    with pytest.raises(SchemaError, match=r"expected advantages of the shape \[2, 3\].* got \[2\]"):
        advantages(
            PolicyGradient(estimator=named(OfEpisodes)), torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2).long()
        )


def test_settings_ask_the_estimator_and_the_loss_what_goes_with_them():
    with pytest.raises(UnknownNameError, match="no estimator named 'gro'; did you mean 'grpo'"):
        PolicyGradient(estimator="gro").check()
    with pytest.raises(UnknownNameError, match="no loss named 'cliped'; did you mean 'clipped'"):
        PolicyGradient(loss="cliped").check()
    with pytest.raises(ConfigError, match=r"expected a subclass of hilt.algos.tables.PolicyLoss"):
        PolicyGradient(loss=named(BestOf)).check()
    PolicyGradient(loss=named(Unclipped), clip_high=0.5).check()
    with pytest.raises(
        ConfigError, match=r"clip_low=0.1 would do nothing: it needs another algorithm\.loss, one that reads clip_low"
    ):
        PolicyGradient(loss=named(Unclipped), clip_low=0.1).check()
    with pytest.raises(ConfigError, match=r"normalize=group: .*OfEpisodes has no groups"):
        PolicyGradient(estimator=named(OfEpisodes), normalize="group").check()


def test_the_clipped_loss_tells_of_what_it_is_asked():
    settings = PolicyGradient(dual_clip=3.0)
    loss, shown = policy_loss("clipped").terms(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0]), settings)
    assert loss.tolist() == pytest.approx([-1.28, -1.0]) and shown["clip_fraction"].tolist() == [1, 0]
    assert list(shown) == policy_loss("clipped").figures(settings) == ["clip_fraction", "dual_clip_fraction"]
    assert policy_loss("clipped").figures(PolicyGradient()) == ["clip_fraction"]
