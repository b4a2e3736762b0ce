"""One update of a policy from the episodes that it made: advantages, then epochs of
optimizer steps, each of passes that fit in memory.

    figures = Updater(PolicyGradient(), DataParallelOptimizer(policy,
    Optimizer(learning_rate=3e-4))).update(episodes, rewards)

Each rank brings its own episodes, any number of them. The gradient of a step is that of one process with the
episodes of all ranks: what a term counts is known before its pass, from numbers that were added up over ranks.
All ranks make the same calls in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hilt.algos import prime
from hilt.algos.advantage import advantages, returns_to_go
from hilt.algos.config import PolicyGradient, Prime
from hilt.algos.kl import KLController, divergence
from hilt.algos.surrogate import terms, value_loss, weights
from hilt.algos.tables import FlowLoss, estimator, policy_loss
from hilt.core.errors import ConfigError, SchemaError
from hilt.core.progress import Report, silent
from hilt.distributed.optimizer import DataParallelOptimizer
from hilt.distributed.ranks import Alone, Ranks
from hilt.policies.base import Record, select
from hilt.policies.copies import on_device
from hilt.policies.plasticity import WatchedPasses
from hilt.vla.episode import RolloutEpisode, token_mask
from hilt.vla.rows import FlowDraws, LossWeights, Rows, added, loss_weights, mean_of_finite, per_row

Extra = Callable[[], tuple[Tensor, dict[str, float]]]
"""A term of the loss besides, such as imitation, weighted by its maker, and figures of it"""


@dataclass(frozen=True)
class ProcessReward:
    """PRIME's reward for each term, and who learns it: see `hilt.algos.prime`."""

    settings: Prime
    optimizer: DataParallelOptimizer
    """The reward policy"""
    reference: Any = None
    """A policy that stays as it is; none: the one that is updated, as it was before the update"""


class Updater:
    """Holds how to update, and what is remembered from one update to the next."""

    def __init__(
        self,
        settings: PolicyGradient,
        actor: DataParallelOptimizer,
        *,
        ranks: Ranks | None = None,
        critic: DataParallelOptimizer | None = None,
        reference: Any = None,
        extra_loss: Extra | None = None,
        critic_warmup: int = 0,
        process: ProcessReward | None = None,
        seed: int = 0,
    ):
        """`critic`: trained apart; without, gae takes the policy's own value head.
        `reference`: a policy that stays as it is.

        `extra_loss` is called once in each step, on every rank; the mean over ranks counts. The
        first `critic_warmup` updates train only the
        critic:
        of a policy with a value head, that head. `process`: rewards for each term,
        beside those that an update is given.
        """
        settings.check()
        if process is not None:
            process.settings.check()
            prime.check(settings, process.settings)
        if (settings.kl.where != "none") != (reference is not None):
            raise ConfigError(
                f"kl.where={settings.kl.where} and {'no' if reference is None else 'a'} "
                "reference: give both, or neither."
            )
        self._estimator, self._policy_loss = estimator(settings.estimator), policy_loss(settings.loss)
        self._terms = partial(terms, ratio=settings.ratio, mean=self._policy_loss.mean_ratio)
        if critic is not None and not self._estimator.needs_critic:
            raise ConfigError(
                f"a critic would do nothing with estimator={settings.estimator}: take gae, or leave the critic out."
            )
        if critic_warmup and not self._estimator.needs_critic:
            raise ConfigError(
                f"critic_warmup={critic_warmup} would do nothing with estimator={settings.estimator}: "
                "take gae, or leave it out."
            )
        self.settings, self.actor, self.ranks, self._critic, self._reference = (
            settings,
            actor,
            ranks or Alone(),
            critic,
            reference,
        )
        self.report: Report = silent
        self._watched = WatchedPasses()
        self._extra, self._warmup, self._seed, self._process = extra_loss, critic_warmup, seed, process
        self._controller, self.updates = KLController(settings.kl), 0
        self._flow = self._policy_loss if isinstance(self._policy_loss, FlowLoss) else None
        self._actor_figures = ["policy_loss", *self._policy_loss.figures(settings)]
        self._actor_figures += ["ppo_kl", "entropy"] * (self._flow is None)
        self._actor_figures += ["kl_loss"] * (settings.kl.where == "loss")
        self._critic_figures = ["value_loss", "value_clip_fraction"] * self._estimator.needs_critic

    def update(
        self,
        episodes: Sequence[RolloutEpisode],
        rewards: Sequence[np.ndarray],
        *,
        progress: float = 1.0,
        baselines: Mapping[int, float] | None = None,
        beside: Sequence[tuple[int, np.ndarray]] = (),
        expected: int = 0,
        given: Sequence[np.ndarray] | None = None,
    ) -> dict[str, float]:
        """Learns from this rank's episodes and the rewards of their chunks [rows];
        gives figures, the same at every rank.

        `progress`: how much of the run is done with this update, for the learning rate. `baselines`, of
        remax: by group, the sum of the rewards of a greedy episode from the same start. `beside`: the group,
        and the rewards of the chunks, of episodes that other updates learn from and whose groups have members
        here, which are compared with them, too. `expected`: the episodes of all ranks that a whole update
        has; where there are fewer, each counts as much as it would among all of them, and the loss of a step
        is as much smaller. 0: as many as there are.
        `given`: advantages of the chunks [rows] that the caller has computed, in place of the
        estimator's; no critic learns with them.
        """
        rows = self._rows(episodes, rewards)
        if given is not None:
            if self._estimator.needs_critic:
                own = f"estimator={self.settings.estimator} computes its own"
                raise ConfigError(f"advantages were given, and {own}: give another estimator, or no advantages.")
            if self._process is not None:
                raise ConfigError(
                    "advantages were given, and a process reward would not count: give "
                    "prime.coefficient=0, or none of them."
                )
            if [len(each) for each in given] != [episode.rows for episode in episodes]:
                raise SchemaError(
                    "the given advantages are not of these episodes: give one number for each chunk of each."
                )
            rows.given = torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *given]))
        all_episodes, all_rows, all_tokens = self._sum(len(episodes), len(rows), rows.mask.sum())
        figures = {"trajectories": all_episodes, "chunks": all_rows, "tokens": all_tokens}
        if all_tokens:
            blank = self._blank(rows) if self.actor.lockstep else None
            figures |= self._score(rows, baselines, beside, blank, progress)
            figures |= self._learn(rows, progress, blank, expected) | self._watched.figures(self._sum)
            self.updates += 1
        if math.isfinite(figures.get("kl", math.nan)):
            self._controller.follow(figures["kl"], int(figures["trajectories"]))
        return figures

    def state_dict(self) -> dict[str, object]:
        """In JSON; the weights and the state of the optimizers are saved with the optimizers."""
        began = self.settings.kl.coefficient
        return {"updates": self.updates, "kl_coefficient": self._controller.coefficient, "kl_coefficient_began": began}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.updates, kl = int(state["updates"]), self.settings.kl
        # else the price is what is set: a fixed one never was another, and one may have
        # been set anew when the run was resumed
        if kl.controller == "adaptive" and float(state.get("kl_coefficient_began", kl.coefficient)) == kl.coefficient:
            self._controller.coefficient = float(state["kl_coefficient"])

    # Before the first step: what each chunk is worth

    def _rows(self, episodes: Sequence[RolloutEpisode], rewards: Sequence[np.ndarray]) -> Rows:
        if [len(each) for each in rewards] != [each.rows for each in episodes]:
            raise SchemaError(
                f"{len(episodes)} episodes came with {len(rewards)} arrays of rewards; give one number for each chunk."
            )
        policy = self.actor.module
        shape = (0, int(policy.chunk), int(policy.action_dim))
        old = np.concatenate([np.zeros(shape, np.float32), *(e.record["log_prob"] for e in episodes)])
        masks = (token_mask(e, shape[2], policy.decides) for e in episodes)
        mask = np.concatenate([np.zeros(shape, bool), *masks]) & np.isfinite(old)
        return Rows(
            list(episodes),
            of=torch.tensor([row for row, e in enumerate(episodes) for _ in range(e.rows)], dtype=torch.int64),
            at=torch.cat([torch.arange(e.rows) for e in episodes]) if episodes else torch.zeros(0, dtype=torch.int64),
            mask=torch.from_numpy(mask),
            drawn=torch.from_numpy(np.where(mask, old, 0)),
            old=torch.from_numpy(np.where(mask, old, 0)),
            rewards=torch.from_numpy(np.concatenate([np.zeros(0), *rewards])),
            penalty=torch.zeros(len(old), dtype=torch.float64),
            values=torch.zeros(len(old)),
            success=torch.tensor([float(e.success) for e in episodes], dtype=torch.float64),
        )

    def _score(
        self,
        rows: Rows,
        baselines: Mapping[int, float] | None,
        beside: Sequence[tuple[int, np.ndarray]],
        blank: Record | None,
        progress: float,
    ) -> dict[str, float]:
        """Fills in what the losses need of each chunk."""
        settings, figures = self.settings, dict[str, float]()
        if self._flow is not None:
            self._draw_flow(rows, blank)
        rows.seen_late = settings.recompute_log_prob and self._one_step(rows)
        if settings.recompute_log_prob and not rows.seen_late:
            rows.old = torch.where(rows.mask, self._evaluate_no_grad(self.actor.module, rows, blank), 0)
            figures |= rows.weigh(self._terms, self.settings.importance_cap, self._sum, self.ranks)
        if self._reference is not None:
            rows.reference = torch.where(rows.mask, self._evaluate_no_grad(self._reference, rows, blank), 0)
            apart = divergence(rows.old, rows.reference, settings.kl.estimate).double() * rows.mask
            tokens = rows.mask.sum((1, 2)).double()
            share = weights("trajectory_mean", tokens, rows.of, 0, 1, 1)
            summed, trajectories = self._sum((apart.sum((1, 2)) * share).sum(), len(rows.of[tokens > 0].unique()))
            figures |= {"kl": summed / trajectories, "kl_coefficient": self._controller.coefficient}
            if settings.kl.where == "reward":
                rows.penalty = self._controller.coefficient * apart.sum((1, 2))
        if self._estimator.needs_critic:
            rows.values = self._values(rows, blank)
        if rows.given is not None:
            rows.advantage, rows.returns = rows.given.float(), torch.zeros(len(rows))
            return figures | rows.figures(self._sum, self._estimator.needs_critic)
        group = torch.tensor([e.start.group for e in rows.episodes], dtype=torch.int64)
        baseline = None
        if self._estimator.needs_greedy:
            if missing := [e.start.group for e in rows.episodes if e.start.group not in (baselines or {})]:
                raise ConfigError(
                    f"estimator={settings.estimator}: group {missing[0]} has no greedy episode beside it; "
                    "give its score in baselines."
                )
            baseline = torch.tensor([(baselines or {})[e.start.group] for e in rows.episodes], dtype=torch.float64)
        there = rows.padded(torch.ones(len(rows)))  # a chunk of which nothing was carried out may have its reward
        rewards, penalty, values = (rows.padded(each) for each in (rows.rewards, rows.penalty, rows.values))
        others = [float((each * settings.discount ** np.arange(len(each))).sum()) for _, each in beside]
        scored = (
            torch.tensor(others, dtype=torch.float64),
            torch.tensor([number for number, _ in beside], dtype=torch.int64),
        )
        process = None
        if self._process is not None:
            earned, shown = self._process_rewards(rows, blank, progress)
            figures |= shown
            if self._estimator.grouped:
                process = prime.advantages(earned, group, settings.discount, self._estimator.leave_one_out)
            else:
                rewards = rewards + earned.value.sum(2)
        if self._estimator.needs_critic:
            figures |= rows.realized(returns_to_go(rewards - penalty, settings.discount), self._sum)
        known = (values, baseline, self.ranks.sum_, penalty, scored if beside else None, process)
        worth, returns = advantages(settings, rewards, there, group, *known)
        rows.advantage, rows.returns = worth[rows.of, rows.at].float(), returns[rows.of, rows.at].float()
        return figures | rows.figures(self._sum, self._estimator.needs_critic)

    # PRIME: what each term earns by a policy that learns from outcomes

    def _process_rewards(
        self, rows: Rows, blank: Record | None, progress: float
    ) -> tuple[prime.Process, dict[str, float]]:
        """The coefficient times the reward of each term; the reward policy learns before or after."""
        assert self._process is not None
        settings, module = self._process.settings, self._process.optimizer.module
        reference = (
            rows.old
            if self._process.reference is None
            else self._evaluate_no_grad(self._process.reference, rows, blank)
        )
        figures, found = dict[str, float](), None
        if settings.update == "before":
            figures = self._learn_outcomes(rows, reference, blank, progress)
        else:
            found = self._evaluate_no_grad(module, rows, blank)
        log_ratio = (self._evaluate_no_grad(module, rows, blank) if found is None else found) - reference
        if settings.update == "after":
            figures = self._learn_outcomes(rows, reference, blank, progress, found)
        numbers = rows.mask[0].numel() if len(rows) else 1
        apart, mask = (
            rows.padded(x.reshape(len(rows), numbers)) for x in (torch.where(rows.mask, log_ratio, 0.0), rows.mask)
        )
        sums = prime.rewards(apart, mask > 0, settings.granularity)
        largest = max(self.ranks.gather(prime.largest_return(sums)))
        earned = prime.scaled(sums, settings, largest)
        earned = earned._replace(value=settings.coefficient * earned.value)
        added, episodes = self._sum(earned.value.sum(), len(rows.episodes))
        return earned, figures | {"prime_reward": added / episodes}

    def _learn_outcomes(
        self, rows: Rows, reference: Tensor, blank: Record | None, progress: float, found: Tensor | None = None
    ) -> dict[str, float]:
        """One epoch of the reward policy over the outcomes of these episodes, in the steps that the policy
        has, too. `found`: its log-probabilities of now. The log-odds of an episode are computed first, so
        that its chunks may be in several passes."""
        assert self._process is not None
        optimizer, beta = self._process.optimizer, self._process.settings.beta
        shown, sums = list[dict[str, float]](), torch.zeros(3, dtype=torch.float64)
        for minibatch in self._minibatches(rows, 0):
            (episodes,) = self._sum(len(minibatch))
            if not episodes:
                continue
            chosen = torch.nonzero(torch.isin(rows.of, torch.from_numpy(minibatch)))[:, 0]
            if found is None:
                found = self._evaluate_no_grad(optimizer.module, rows, blank, chosen=chosen)
            apart = per_row(torch.where(rows.mask, found - reference, 0.0).double())
            logit = beta * torch.zeros(len(rows.episodes), dtype=torch.float64).index_add_(0, rows.of, apart)
            weight, mine = prime.slope(logit, rows.success, beta, episodes), torch.from_numpy(minibatch)
            right = ((logit > 0) == (rows.success > 0)).double()
            sums += torch.stack(
                [x[mine].sum() for x in (prime.outcome_loss(logit, rows.success), right, torch.ones_like(right))]
            )
            optimizer.module.train()
            for part in self._passes(rows, chosen):
                seen = optimizer.module.evaluate(rows.record(part, blank)).log_prob
                own = weight[rows.of[part]].to(seen)
                mask = rows.mask[part].to(seen.device)
                optimizer.backward(
                    (per_row(torch.where(mask, seen, 0.0)) * own).sum() if len(part) else 0.0 * seen.sum()
                )
            shown.append({f"prime_{name}": value for name, value in optimizer.step(progress).items()})
            found = None  # of weights that are no more
        optimizer.module.eval()
        loss, right_ones, counted = self._sum(*sums)
        return {"prime_loss": loss / counted, "prime_accuracy": right_ones / counted} | {
            name: mean_of_finite([each[name] for each in shown]) for name in shown[0]
        }

    def _draw_flow(self, rows: Rows, blank: Record | None) -> None:
        """Draws where each epoch looks at velocities; and for several steps, how wrong they are before the first."""
        for epoch in range(self.settings.epochs):
            seed = np.random.SeedSequence([self._seed, self.ranks.rank, self.updates, epoch, 1]).generate_state(1)
            rows.flow.append(
                FlowDraws.of_rows(rows, self.settings.nft.draws, torch.Generator().manual_seed(int(seed[0])), blank)
            )
        for draws in [] if self._one_step(rows) else rows.flow:
            draws.old = self._evaluate_no_grad(self.actor.module, rows, blank, flow=draws)

    def _one_step(self, rows: Rows) -> bool:
        """Whether the log-probabilities of the policy before this update are those that its passes compute anyway: it
        makes a single step, and nothing before that asks for them. The same for velocities."""
        asked = self._reference is not None or self._process is not None or self._estimator.needs_critic
        dropout = any(isinstance(each, nn.modules.dropout._DropoutNd) for each in self.actor.module.modules())
        return not (asked or dropout) and self.settings.epochs == 1 and len(self._minibatches(rows, 0)) == 1

    def _values(self, rows: Rows, blank: Record | None) -> Tensor:
        absent = any("value" not in e.record for e in rows.episodes)
        if self._critic is None and not self.settings.recompute_log_prob and not self.ranks.any(absent):
            return torch.from_numpy(
                np.concatenate([np.zeros(0, np.float32), *(e.record["value"] for e in rows.episodes)])
            )
        return self._evaluate_no_grad((self._critic or self.actor).module, rows, blank, values=True)

    def _evaluate_no_grad(
        self,
        module: Any,
        rows: Rows,
        blank: Record | None,
        values: bool = False,
        chosen: Tensor | None = None,
        flow: FlowDraws | None = None,
    ) -> Tensor:
        """The log-probabilities that a module gives to all rows, the values, or with `flow` the errors of velocities;
        without gradients. `chosen`: of these rows alone, 0 of the others."""
        found, done = torch.zeros_like(rows.values if values else rows.old), 0
        if flow is not None:
            found = torch.zeros(*flow.times.shape, *rows.old.shape[1:])
        module.eval()
        with torch.no_grad(), on_device(module):
            rows_seen = torch.arange(len(rows)) if chosen is None else chosen
            for part in self._passes(rows, rows_seen, self.settings.batch.log_prob_chunks_per_pass):
                record, given = rows.record(part, blank), None
                if flow is not None:
                    given = module.flow_error(record, *flow.of(part))
                else:
                    seen = module.evaluate(record)
                    given = seen.value if values else seen.log_prob
                if given is None:
                    raise ConfigError(
                        f"estimator={self.settings.estimator} needs values: give the policy a value "
                        "head, or the run a critic."
                    )
                found[part] = given[: len(part)].float().cpu()
                done += len(part)
                self.report("evaluating the chunks", done, len(rows_seen))
        return found

    # The steps

    def _learn(self, rows: Rows, progress: float, blank: Record | None, expected: int) -> dict[str, float]:
        moved = [self._critic] if self._critic is not None else []
        moved += [self.actor] if self._acts or self._critic is None else []
        names = self._actor_figures * self._acts + self._critic_figures
        sums, seen, measured, far = dict.fromkeys(names, 0.0), list[dict[str, float]](), 0, False
        for optimizer in moved:
            optimizer.module.train()
        done, all_chunks = 0, self.settings.epochs * len(rows)
        for draws, minibatch in (
            (rows.flow[epoch] if rows.flow else None, minibatch)
            for epoch in range(self.settings.epochs)
            for minibatch in self._minibatches(rows, epoch)
        ):
            chosen = torch.nonzero(torch.isin(rows.of, torch.from_numpy(minibatch)))[:, 0]
            share = loss_weights(
                rows, chosen, self._part(len(minibatch), expected), self.settings, self._terms, self._sum
            )
            if share is None:
                continue
            before = sums.get("ppo_kl", 0.0)
            for part in self._passes(rows, chosen):
                for name, value in self._pass(rows, part, share, blank, draws).items():
                    sums[name] += value
                done += len(part)
                self.report("learning from the chunks", done, all_chunks)
            measured += 1
            if far := self._too_far(sums.get("ppo_kl", 0.0) - before, len(seen)):
                break
            shown = self._imitate() if self._extra is not None and self._acts else {}
            for optimizer in moved:
                prefix = "" if optimizer is self.actor else "critic_"
                step = optimizer.step(progress, head_only=optimizer is self.actor and not self._acts)
                shown |= {prefix + name: value for name, value in step.items()}
            seen.append(shown)
        for optimizer in moved:
            optimizer.clear()
            optimizer.module.eval()
        metrics = dict(zip(names, [x / measured for x in self._sum(*(sums[name] for name in names))], strict=True))
        metrics |= {name: mean_of_finite([each[name] for each in seen]) for name in seen[0]}
        metrics |= {"kl_stopped": float(far)} if self.settings.target_kl else {}
        metrics |= (
            rows.weigh(self._terms, self.settings.importance_cap, self._sum, self.ranks) if rows.seen_late else {}
        )
        skipped = sum(
            not all(math.isfinite(value) for name, value in each.items() if name.endswith("gradient_norm"))
            for each in seen
        )
        in_a_row = max(optimizer.skipped_in_a_row for optimizer in moved)
        return metrics | {
            "optimizer_steps": float(len(seen)),
            "skipped_steps": float(skipped),
            "skipped_in_a_row": float(in_a_row),
        }

    def _too_far(self, ppo_kl: float, steps: int) -> bool:
        """Whether the policy is so far from the one that collected that this update ends before
        its next step. Its first step is made."""
        return bool(self.settings.target_kl and self._acts and steps) and self._sum(ppo_kl)[0] > self.settings.target_kl

    def _part(self, minibatch: int, expected: int) -> float:
        """The share of a whole step's episodes that a step has, at all ranks together."""
        return (
            min(1.0, self._sum(minibatch)[0] / (self.settings.batch.trajectories_per_step or expected))
            if expected
            else 1.0
        )

    @property
    def _acts(self) -> bool:
        """Whether the policy learns, and not the critic alone"""
        return self.updates >= self._warmup

    def _imitate(self) -> dict[str, float]:
        assert self._extra is not None
        loss, shown = self._extra()
        self.actor.backward(loss / self.ranks.size)
        names = sorted(shown)
        return dict(zip(names, [x / self.ranks.size for x in self._sum(*(shown[name] for name in names))], strict=True))

    def _minibatches(self, rows: Rows, epoch: int) -> list[np.ndarray]:
        """Returns the episodes of each step: the same number of steps at every rank, some of them maybe without any."""
        batch, order = self.settings.batch, np.arange(len(rows.episodes))
        if not batch.trajectories_per_step:
            return [order]
        steps = math.ceil(self._sum(len(order))[0] / batch.trajectories_per_step)
        if batch.shuffle:
            order = np.random.default_rng([self._seed, self.ranks.rank, self.updates, epoch]).permutation(order)
        # ranks that have as many fill each step evenly
        place = np.arange(len(order)) * self.ranks.size + self.ranks.rank
        step = place * steps // max(len(order) * self.ranks.size, 1)
        return [order[step == number] for number in range(steps)]

    def _pass(
        self, rows: Rows, part: Tensor, share: LossWeights, blank: Record | None, draws: FlowDraws | None = None
    ) -> dict[str, float]:
        """Adds the gradient of some rows; gives their part of the figures. Without rows:
        all the calls, and a gradient of zeros."""
        record, figures = rows.record(part, blank), dict[str, Tensor]()
        if draws is not None:
            with self._watched.first(self.actor.module, len(part)):
                error = self.actor.module.flow_error(record, *draws.of(part))
            loss = self._flow_loss(rows, part, share, error, draws, figures) if len(part) else 0.0 * error.sum()
            self.actor.backward(share.part * loss)
        elif self._acts or self._critic is None:
            with self._watched.first(self.actor.module, len(part)):
                seen = self.actor.module.evaluate(record)
            if rows.seen_late and len(part):
                rows.see(part, seen.log_prob, self._terms, self.settings.importance_cap)
            loss = (
                self._loss(rows, part, share, seen, figures)
                if len(part)
                else 0.0 * sum(x.sum() for x in seen if x is not None)
            )
            self.actor.backward(share.part * loss)
        if self._critic is not None:
            value = self._critic.module.evaluate(record).value
            loss = self._value_loss(rows, part, share, value, figures) if len(part) else 0.0 * value.sum()
            self._critic.backward(share.part * loss)
        return (
            dict(zip(figures, torch.stack([x.detach().double() for x in figures.values()]).tolist(), strict=True))
            if figures
            else {}
        )

    def _loss(self, rows: Rows, part: Tensor, share: LossWeights, seen: Any, figures: dict[str, Tensor]) -> Tensor:
        settings, device = self.settings, seen.log_prob.device
        if not self._acts:
            return self._value_loss(rows, part, share, seen.value, figures)
        mask, old, term, token = (x[part].to(device) for x in (rows.mask, rows.old, share.term, share.token))
        log_prob, there = self._terms(seen.log_prob, mask)
        change = log_prob - self._terms(old, mask)[0]
        advantage = rows.advantage[part].to(device)  # of each chunk, or of each of its numbers
        numbers = change.shape[1:] if advantage.dim() > 1 and advantage.shape[1] > 1 else (1,) * (change.dim() - 1)
        advantage = advantage.view(-1, *numbers).expand_as(change)
        each, shown = self._policy_loss.terms(change, advantage, settings)
        weight = rows.importance[part].to(device) if rows.importance is not None else 1.0
        loss = figures["policy_loss"] = added(weight * each, there, term)
        figures |= {name: added(x, there, share.mean_term) for name, x in {"ppo_kl": -change, **shown}.items()}
        figures["entropy"] = added(seen.entropy, mask, share.mean_token)
        if settings.entropy:
            loss = loss - settings.entropy * added(seen.entropy, mask, token)
        if settings.kl.where == "loss" and rows.reference is not None:
            apart = divergence(
                torch.where(mask, seen.log_prob, 0.0), rows.reference[part].to(device), settings.kl.estimate
            )
            figures["kl_loss"] = added(apart, mask, token)
            loss = loss + self._controller.coefficient * figures["kl_loss"]
        if self._estimator.needs_critic and self._critic is None:
            loss = loss + settings.value_coefficient * self._value_loss(rows, part, share, seen.value, figures)
        return loss

    def _flow_loss(
        self, rows: Rows, part: Tensor, share: LossWeights, error: Tensor, draws: FlowDraws, figures: dict[str, Tensor]
    ) -> Tensor:
        assert self._flow is not None
        near = (draws.times, rows.advantage, rows.mask, share.token)
        times, advantage, mask, token = (x[part].to(error.device) for x in near)
        old = error.detach() if draws.old is None else draws.old[part].to(error)
        each, shown = self._flow.flow_terms(error, old, times, advantage, mask, self.settings)
        figures["policy_loss"] = added(each, mask, token)
        figures |= {name: added(x, mask, share.mean_token) for name, x in shown.items()}
        return figures["policy_loss"]

    def _value_loss(
        self, rows: Rows, part: Tensor, share: LossWeights, value: Tensor, figures: dict[str, Tensor]
    ) -> Tensor:
        old, returns, chunk = (x[part].to(value.device) for x in (rows.values, rows.returns, share.chunk))
        loss, clipped = value_loss(value, old, returns, self.settings.value_clip)
        figures["value_clip_fraction"] = (clipped * chunk).sum()
        figures["value_loss"] = (loss * chunk).sum()
        return figures["value_loss"]

    # Passes, and what is agreed with the other ranks

    def _passes(self, rows: Rows, chosen: Tensor, size: int = 0) -> Iterator[Tensor]:
        """The rows in parts that go through the policy together. In lockstep all ranks
        have as many, the last ones maybe empty."""
        batch, limit = self.settings.batch, self.settings.batch.tokens_per_pass
        if limit and not size:
            parts = rows.packed(chosen, limit)
        else:
            parts = list(chosen.split(size or batch.chunks_per_pass)) if len(chosen) else []
        # agreed before the first: in lockstep a pass is itself a call of all ranks,
        # and one with fewer would ask too early
        missing = self.ranks.max(len(parts)) - len(parts) if self.actor.lockstep else 0
        yield from [*parts, *[chosen[:0]] * missing]

    def _blank(self, rows: Rows) -> Record:
        """One row of a record, of the first rank that has any: for the passes of one that has none."""
        mine = select(rows.episodes[0].record, slice(0, 1)) if len(rows) else {}
        layouts = self.ranks.gather({name: [str(array.dtype), list(array.shape)] for name, array in mine.items()})
        giver = next(rank for rank, layout in enumerate(layouts) if layout)
        record: Record = {}
        for name, (kind, shape) in layouts[giver].items():
            wide = np.dtype(np.float64 if np.dtype(kind).kind == "f" else np.int64)
            row = mine[name].astype(wide) if self.ranks.rank == giver else np.zeros(shape, wide)
            record[name] = self.ranks.sum_(torch.from_numpy(row)).numpy().astype(kind)
        return record

    def _sum(self, *values: Any) -> list[float]:
        """Numbers, added up over ranks."""
        result: list[float] = self.ranks.sum_(
            torch.tensor([float(value) for value in values], dtype=torch.float64)
        ).tolist()
        return result
