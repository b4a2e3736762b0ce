"""The gradient of an update beside a slow reference, for every option; and that of many ranks beside that of one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hilt.algos.config import Batching, Kl, Optimizer, PolicyGradient, Prime
from hilt.algos.tables import ESTIMATORS
from hilt.core.errors import ConfigError, SchemaError
from hilt.distributed.optimizer import DataParallelOptimizer
from hilt.distributed.ranks import host_meeting, join
from hilt.policies.base import select
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.vla.episode import RolloutEpisode, Start
from hilt.vla.update import ProcessReward, Updater
from tests.algos import pg_reference as slow
from tests.effort import sampled
from tests.vla.toy_policy import Plain, Toy, collected, episodes, others

MADE = episodes([3, 1, 2, 2, 3, 1])
COEFFICIENT = 0.4
KL = {where: Kl(where, "low_var_kl" if where == "loss" else "kl", COEFFICIENT) for where in ("loss", "reward")}


def updated(
    settings: PolicyGradient, made: list[dict[str, Any]] = MADE, toy: Toy | None = None, **more: Any
) -> tuple[Plain, dict[str, float]]:
    actor = Plain(toy or Toy())
    if settings.kl.where != "none":
        more["reference"] = others()[1]
    if settings.estimator == "remax":
        more_baselines = {e["group"]: e["baseline"] for e in made}
        return actor, Updater(settings, actor, **more).update(*collected(made), baselines=more_baselines)
    return actor, Updater(settings, actor, **more).update(*collected(made))


def numbers(toy: Toy) -> slow.Params:
    return {name: p.detach().numpy().copy() for name, p in toy.named_parameters()}


def expected(
    settings: PolicyGradient, params: slow.Params, made: list[dict[str, Any]] = MADE, batch: Any = None
) -> slow.Params:
    return slow.gradient(slow.objective(settings, made, COEFFICIENT, batch, params), params)


def same(ours: slow.Params, theirs: slow.Params, tolerance: float = 1e-6) -> bool:
    return all(np.allclose(ours[name], theirs[name], rtol=0, atol=tolerance) for name in theirs)


def shared(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With one baseline for each group, as remax has it."""
    return [{**e, "baseline": made[e["group"] * 3]["baseline"]} for e in made]


PLAIN = PolicyGradient()
OPTIONS = {
    "dr_grpo": (PLAIN, {"estimator": "dr_grpo"}),
    "rloo": (PLAIN, {"estimator": "rloo"}),
    "reinforce_plus_plus": (PLAIN, {"estimator": "reinforce_plus_plus"}),
    "remax": (PLAIN, {"estimator": "remax"}),
    "gae": (PLAIN, {"estimator": "gae"}),
    "lam": (PolicyGradient(estimator="gae"), {"lam": 0.6}),
    "discount": (PLAIN, {"discount": 0.8}),
    "normalize": (PLAIN, {"normalize": "batch"}),
    "clip_low": (PLAIN, {"clip_low": 0.05}),
    "clip_high": (PLAIN, {"clip_high": 0.05}),
    "dual_clip": (PLAIN, {"dual_clip": 1.3}),
    "entropy": (PLAIN, {"entropy": 0.3}),
    "token_mean": (PLAIN, {"reduction": "token_mean"}),
    "trajectory_sum": (PLAIN, {"reduction": "trajectory_sum"}),
    "horizon": (PolicyGradient(reduction="trajectory_sum"), {"horizon": 5}),
    "action": (PLAIN, {"ratio": "action"}),
    "chunk": (PLAIN, {"ratio": "chunk"}),
    "gspo of chunks": (PolicyGradient(ratio="chunk"), {"loss": "gspo"}),
    "gspo of actions": (PolicyGradient(ratio="action"), {"loss": "gspo"}),
    "gspo clip": (PolicyGradient(ratio="chunk", loss="gspo"), {"clip_low": 0.03, "clip_high": 0.04}),
    "cispo": (PLAIN, {"loss": "cispo"}),
    "cispo of chunks": (PolicyGradient(ratio="chunk"), {"loss": "cispo"}),
    "cispo clip": (PolicyGradient(loss="cispo"), {"clip_high": 0.05}),
    "value_coefficient": (PolicyGradient(estimator="gae"), {"value_coefficient": 2.0}),
    "value_clip": (PolicyGradient(estimator="gae"), {"value_clip": 0.1}),
    "kl in the loss": (PLAIN, {"kl": KL["loss"]}),
    "kl in the reward": (PLAIN, {"kl": KL["reward"]}),
    "mse": (PolicyGradient(kl=KL["loss"]), {"kl": Kl("loss", "mse", COEFFICIENT)}),
    "abs": (PolicyGradient(kl=KL["reward"]), {"kl": Kl("reward", "abs", COEFFICIENT)}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_changes_the_gradient_and_equals_the_reference(name: str):
    without, change = OPTIONS[name]
    made, settings = shared(MADE), dataclasses.replace(without, **change)
    before, after = (updated(each, made)[0].seen[0] for each in (without, settings))
    assert not same(before, after, 1e-4)
    assert same(after, expected(settings, numbers(Toy()), made))


def test_a_loss_and_an_estimator_of_ones_own_are_used():
    module = "tests.algos.test_tables"
    own = PolicyGradient(loss=f"{module}:Unclipped")
    actor, figures = updated(own)
    assert same(actor.seen[0], updated(PolicyGradient(clip_low=1.0, clip_high=1e6))[0].seen[0])
    assert "large_ratios" in figures and "clip_fraction" not in figures
    compared = PolicyGradient(estimator=f"{module}:BestOf")
    assert not same(updated(compared)[0].seen[0], updated(PLAIN)[0].seen[0], 1e-4)


def test_every_epoch_is_another_gradient():
    settings, params = PolicyGradient(epochs=3, estimator="gae"), numbers(Toy())
    actor, figures = updated(settings)
    for seen in actor.seen:
        assert same(seen, expected(settings, params))
        params = {name: value - 0.1 * seen[name] for name, value in params.items()}
    assert len(actor.seen) == figures["optimizer_steps"] == 3 and not same(actor.seen[0], actor.seen[2], 1e-4)


def test_fewer_episodes_than_a_whole_update_count_as_among_all():
    """A batch of one group moved the policy as far as a whole one."""
    for per_step, wanted, share in ((0, 12, 0.5), (0, 6, 1.0), (0, 3, 1.0), (8, 24, 0.75), (4, 24, 0.75)):
        settings = PolicyGradient(
            batch=Batching(trajectories_per_step=per_step, shuffle=False) if per_step else Batching()
        )
        whole, part = Plain(Toy(), rate=0.0), Plain(Toy(), rate=0.0)
        told = Updater(settings, whole).update(*collected(MADE))
        less = Updater(settings, part).update(*collected(MADE), expected=wanted)
        assert all(
            same(ours, {name: share * g for name, g in full.items()})
            for ours, full in zip(part.seen, whole.seen, strict=True)
        )
        assert {name: less[name] for name in ("policy_loss", "ppo_kl")} == {
            name: told[name] for name in ("policy_loss", "ppo_kl")
        }


def test_an_update_ends_at_its_target_kl():
    for target, steps in ((0.0, 4), (1e6, 4), (1e-9, 1)):
        actor, figures = updated(
            PolicyGradient(epochs=4, target_kl=target), episodes([3, 1, 2, 2, 3, 1], away=0.0), Toy()
        )
        assert len(actor.seen) == figures["optimizer_steps"] == steps, target
        assert figures.get("kl_stopped") == (None if not target else float(steps < 4))
        assert all(p.grad is None for p in actor.module.parameters()), "the gradient of the step that was not made"
    with pytest.raises(
        ConfigError, match=r"target_kl=0\.1 would do nothing: it needs several steps in an update, algorithm\.epochs=2"
    ):
        PolicyGradient(target_kl=0.1).check()


def test_figures_are_means_whatever_the_reduction():
    """With trajectory_sum they were divided by the horizon, and so neither the alarms
    nor target_kl saw how far the policy moved."""
    names = ("clip_fraction", "dual_clip_fraction", "ppo_kl", "entropy")
    reductions: list[dict[str, Any]] = [{"reduction": "token_mean"}, {"reduction": "trajectory_mean"}]
    reductions += [{"reduction": "trajectory_sum", "horizon": horizon} for horizon in (5, 1000)]
    for ratio in ("token", "chunk"):
        told = [updated(PolicyGradient(ratio=ratio, dual_clip=1.3, **each))[1] for each in reductions]
        for name in names:
            assert [one[name] for one in told] == pytest.approx([told[0][name]] * len(told)), (ratio, name)
        assert len({round(one["policy_loss"], 6) for one in told}) == len(told), (
            "the loss itself is reduced as it was asked for"
        )
    stopped = [
        updated(PolicyGradient(epochs=4, target_kl=0.01, **each), episodes([3, 1, 2, 2, 3, 1]))[1]
        for each in reductions
    ]
    assert [one["kl_stopped"] for one in stopped] == [1.0] * len(stopped)


def test_steps_that_are_left_out_are_counted():
    made, settings = MADE, PolicyGradient(epochs=3)
    found, rewards = collected(made)
    toy = Toy()
    actor, before = Plain(toy), numbers(toy)
    figures = Updater(settings, actor).update(found, [np.full_like(rewards[0], np.nan), *rewards[1:]])
    assert (figures["skipped_steps"], figures["skipped_in_a_row"], figures["optimizer_steps"]) == (3, 3, 3)
    assert not actor.seen and same(numbers(toy), before, 0)
    later = Updater(settings, actor).update(*collected(made))
    assert (
        (later["skipped_steps"], later["skipped_in_a_row"]) == (0, 0)
        and len(actor.seen) == 3
        and np.isfinite(later["gradient_norm"])
    )


def test_a_price_that_was_set_anew_is_the_one_that_counts():
    """The checkpoint's was taken, and the new setting did nothing."""
    settings = [PolicyGradient(kl=Kl("loss", "low_var_kl", price)) for price in (0.4, 0.1)]
    first, second = (Updater(each, Plain(Toy()), reference=others()[1]) for each in settings)
    second.load_state_dict(first.state_dict())
    assert second.update(*collected(MADE))["kl_coefficient"] == 0.1


def test_a_group_that_failed_alike_has_advantages_of_the_size_of_its_divergence():
    """grpo with the KL in the reward: the first group failed altogether, the second did not."""
    made = [{**e, "rewards": np.zeros(len(e["rewards"])) if i < 3 else e["rewards"]} for i, e in enumerate(MADE)]
    settings = PolicyGradient(kl=Kl("reward", "kl", 1e-4))
    figures = updated(settings, made[:3])[1], updated(settings, made[3:])[1]
    assert 0 < figures[0]["advantage_size"] < 1e-3 and figures[1]["advantage_size"] > 0.5


@pytest.mark.parametrize(("controller", "price"), [("adaptive", 0.7), ("fixed", 0.1)])
def test_a_resumed_run_with_a_fixed_price_pays_the_one_that_is_set(controller: str, price: float):
    """It paid the one that the adaptive controller of the run before had come to."""
    before, now = (PolicyGradient(kl=Kl("loss", "low_var_kl", 0.1, each)) for each in ("adaptive", controller))
    first, second = (Updater(each, Plain(Toy()), reference=others()[1]) for each in (before, now))
    second.load_state_dict({**first.state_dict(), "kl_coefficient": 0.7})
    assert second.update(*collected(MADE))["kl_coefficient"] == price


def test_an_adaptive_price_follows_the_divergence():
    """The second update pays what the first one's divergence made of the coefficient; a fixed one does not."""
    made, toys, seen = MADE, (Toy(), Toy()), list[slow.Params]()
    apart = [slow.divergence("low_var_kl", e["old"][where], e["ref"][where]) for e in made for where in slow.done(e)]
    cuts = np.cumsum([0, *(len(slow.done(e)) for e in made)])
    mean = np.mean([np.mean(apart[a:b]) for a, b in itertools.pairwise(cuts)])
    for controller, toy in zip(("fixed", "adaptive"), toys, strict=True):
        more: Any = {"controller": controller} | ({"target": 0.01, "horizon": 10} if controller == "adaptive" else {})
        settings = PolicyGradient(kl=Kl("loss", "low_var_kl", COEFFICIENT, **more))
        actor = Plain(toy, rate=0.0)
        updater = Updater(settings, actor, reference=others()[1])
        first = updater.update(*collected(made))
        assert first["kl"] == pytest.approx(mean, abs=1e-6) and first["kl_coefficient"] == COEFFICIENT
        later = Updater(settings, actor, reference=others()[1])
        later.load_state_dict(updater.state_dict())  # an interrupted run goes on with it
        later.update(*collected(made))
        seen.append(actor.seen[1])
        price = COEFFICIENT * (1 + 0.2 * len(made) / 10 if controller == "adaptive" else 1)
        assert later.state_dict()["updates"] == 2
        assert same(actor.seen[1], slow.gradient(slow.objective(settings, made, price), numbers(toy)))
    assert not same(*seen, 1e-4)


def test_steps_of_so_many_trajectories():
    """In order, each is the reference's of its part; shuffled, another part of the same
    whole, the same one when it is made again."""
    batch = Batching(trajectories_per_step=2, shuffle=False)
    settings, params = PolicyGradient(batch=batch), numbers(Toy())
    actor, figures = updated(settings)
    assert figures["optimizer_steps"] == 3
    for step, seen in enumerate(actor.seen):
        assert same(seen, expected(settings, params, batch=[2 * step, 2 * step + 1]))
        params = {name: value - 0.1 * seen[name] for name, value in params.items()}
    again, once_more, other = (updated(PolicyGradient(batch=Batching(2)), seed=seed)[0].seen for seed in (0, 0, 1))
    assert (
        same(again[0], once_more[0], 0)
        and not same(again[0], other[0], 1e-4)
        and not same(again[0], actor.seen[0], 1e-4)
    )


def test_passes_change_nothing_but_memory():
    whole = updated(PLAIN)[0].seen[0]
    sizes = {}
    for name, batch in {"chunks": Batching(chunks_per_pass=5), "tokens": Batching(tokens_per_pass=22)}.items():
        toy = Toy()
        assert same(updated(PolicyGradient(batch=batch), toy=toy)[0].seen[0], whole, 1e-9)
        sizes[name] = toy.asked
    # 4 numbers in each chunk; six with a prompt of 3 tokens, two with 4, two with 5, two with 6
    assert sizes == {"chunks": [5, 5, 2], "tokens": [3, 3, 2, 2, 2]}
    with pytest.raises(
        ConfigError, match="tokens_per_pass=8: one chunk with its prompt has 9 tokens; give at least as many"
    ):
        updated(PolicyGradient(batch=Batching(tokens_per_pass=8)))


def as_now(made: list[dict[str, Any]], toy: Toy) -> list[dict[str, Any]]:
    """Ratios begin with what this policy says; the rollout's log-probabilities are beside."""
    with torch.no_grad():
        now = [toy.evaluate({"seen": e["seen"], "tokens": e["tokens"]}).log_prob.numpy() for e in made]
    return [{**e, "old": each, "drawn": e["old"]} for e, each in zip(made, now, strict=True)]


@pytest.mark.parametrize(
    ("ratio", "loss"),
    [("token", "clipped"), ("action", "clipped"), ("chunk", "clipped"), ("chunk", "gspo"), ("token", "cispo")],
)
def test_recomputed_log_probabilities_begin_with_a_ratio_of_one_and_weigh_what_is_stale(ratio: str, loss: str):
    toy, fresh = Toy(), Toy()
    batch = Batching(log_prob_chunks_per_pass=7)
    cap = 1.2 if loss == "gspo" else 1.5  # a mean is less far from 0 than a sum
    settings = PolicyGradient(recompute_log_prob=True, importance_cap=cap, ratio=ratio, loss=loss, batch=batch)
    actor, figures = updated(settings, toy=toy)
    assert toy.asked == [12], "the only step begins with what its own pass computes"
    twice, asked = dataclasses.replace(settings, epochs=2), Toy()
    assert same(updated(twice, toy=asked)[0].seen[0], actor.seen[0]) and asked.asked == [7, 5, 12, 12]
    assert figures["clip_fraction"] == 0 and figures["ppo_kl"] == pytest.approx(0, abs=1e-7)
    now = as_now(MADE, fresh)
    assert same(actor.seen[0], expected(settings, numbers(fresh), now))
    apart, size = dict[Any, float](), dict[Any, int]()
    for i, e in enumerate(now):
        for t, c, d in slow.done(e):
            key = (i, t, c, d)[: {"token": 4, "action": 3, "chunk": 2}[ratio]]
            apart[key] = apart.get(key, 0.0) + e["old"][t, c, d] - e["drawn"][t, c, d]
            size[key] = size.get(key, 0) + 1
    if loss == "gspo":
        apart = {key: value / size[key] for key, value in apart.items()}
    free = np.exp(list(apart.values()))
    assert figures["importance_weight"] == pytest.approx(np.minimum(free, cap).mean(), abs=1e-6)
    assert figures["importance_weight_max"] == pytest.approx(free.max(), abs=1e-5)
    assert figures["importance_capped"] == pytest.approx((free > cap).mean()) and 0 < figures["importance_capped"] < 1
    assert figures["behavior_kl"] == pytest.approx(-np.mean(list(apart.values())), abs=1e-6)


@pytest.mark.parametrize("loss", ["clipped", "gspo", "cispo"])
def test_stale_episodes_have_one_gradient_whether_log_probabilities_are_recomputed_or_not(loss: str):
    """Where nothing is clipped or capped both are the gradient of p / p_drawn times the
    advantage. Episodes of this policy weigh 1."""
    bare: dict[str, Any] = {"loss": loss, "clip_high": 1e6, "ratio": "chunk" if loss == "gspo" else "token"}
    bare |= {} if loss == "cispo" else {"clip_low": 1.0}
    stale = episodes([3, 1, 2, 2, 3, 1], away=0.1)
    carried, again = (
        updated(PolicyGradient(**bare, recompute_log_prob=recomputed), stale) for recomputed in (False, True)
    )
    assert (
        same(carried[0].seen[0], again[0].seen[0])
        and again[1]["importance_capped"] == 0
        and again[1]["importance_weight_max"] > 1.05
    )
    _, figures = updated(PolicyGradient(recompute_log_prob=True), episodes([2, 3, 1], away=0.0))
    assert figures["importance_weight"] == pytest.approx(1, abs=1e-6) and figures[
        "importance_weight_max"
    ] == pytest.approx(1, abs=1e-5)
    assert figures["importance_capped"] == 0 and figures["behavior_kl"] == pytest.approx(0, abs=1e-6)


def test_a_critic_of_its_own_learns_first():
    """Its values count in place of the policy's head; for the first updates the policy stays as it is."""
    toy, judge = Toy(value=False), Toy(3)
    critic, actor = Plain(judge), Plain(toy)
    settings = PolicyGradient(estimator="gae", lam=0.7, value_clip=0.0, batch=Batching(log_prob_chunks_per_pass=5))
    updater = Updater(settings, actor, critic=critic, critic_warmup=1)
    told = updater.update(*collected(MADE))
    assert judge.asked == [5, 5, 2, 12] and not actor.seen and len(critic.seen) == 1
    assert "policy_loss" not in told and told["value_loss"] > 0 and told["critic_learning_rate"] == 0.1
    later = updater.update(*collected(MADE))
    assert (
        len(actor.seen) == 1
        and later["value_loss"] < told["value_loss"]
        and {"policy_loss", "explained_variance"} <= set(later)
    )

    def judged(p: slow.Params) -> list[dict[str, Any]]:
        return [{**e, "value": e["seen"] @ p["value"]} for e in MADE]

    first = numbers(Toy(3))
    both = expected(settings, {"weight": numbers(Toy())["weight"], "value": first["value"]}, judged(first))
    assert np.allclose(critic.seen[0]["value"], both["value"] / settings.value_coefficient, atol=1e-6)
    second = {"value": first["value"] - 0.1 * critic.seen[0]["value"]}
    assert np.allclose(
        actor.seen[0]["weight"], expected(settings, {**numbers(Toy()), **second}, judged(second))["weight"], atol=1e-6
    )


@pytest.mark.parametrize("kind", ["shared", "detached"])
def test_a_value_head_learns_first_without_its_policy(kind: str):
    """Its loss is all that there is meanwhile; afterwards both learn, each at its own rate."""
    sizes: Any = {
        "image_size": 16,
        "state_dim": 1,
        "chunk": 1,
        "action_dim": 1,
        "width": 8,
        "heads": 2,
        "depth": 1,
        "keypoints": 2,
    }
    policy = SmallVLA(SmallVLAConfig(**sizes, value=kind, precision="float32"))
    seen = {"full_image": np.zeros((16, 16, 3), np.uint8), "state": np.zeros(1, np.float32), "instruction": "go"}
    _, record = policy.act([seen] * 4, generator=torch.Generator().manual_seed(0))
    made = [
        RolloutEpisode(
            Start("toy", "train", 0, 0), select(record, [i]), np.int32([1]), np.zeros(1), True, 1, False, 0, b""
        )
        for i in range(4)
    ]
    optimizer = DataParallelOptimizer(policy, Optimizer(learning_rate=1e-4), head=Optimizer(learning_rate=1e-2))
    updater = Updater(PolicyGradient(estimator="gae", value_clip=0.0), optimizer, critic_warmup=1)

    def update() -> tuple[set[str], dict[str, float]]:
        before = {name: p.detach().clone() for name, p in policy.named_parameters()}
        figures = updater.update(made, [np.float32([i % 2]) for i in range(4)])
        return {
            name.split(".")[0] for name, p in policy.named_parameters() if not torch.equal(p, before[name])
        }, figures

    parts, figures = update()
    assert parts == {"value_head"} and "policy_loss" not in figures and figures["critic_learning_rate"] == 1e-2
    parts, later = update()
    assert len(parts) > 1 and later["learning_rate"] == 1e-4 and later["critic_learning_rate"] == 1e-2
    assert later["value_loss"] < figures["value_loss"] and "policy_loss" in later


def test_a_term_besides():
    toy = Toy()
    actor, figures = updated(PLAIN, toy=toy, extra_loss=lambda: (0.5 * toy.weight.square().sum(), {"imitation": 4.0}))
    assert np.allclose(actor.seen[0]["weight"], updated(PLAIN)[0].seen[0]["weight"] + numbers(Toy())["weight"])
    assert figures["imitation"] == 4


def test_what_it_tells():
    settings = PolicyGradient(dual_clip=1.3, kl=KL["loss"])
    _, told = updated(settings)
    bare = dataclasses.replace(settings, kl=Kl())
    assert told["policy_loss"] == pytest.approx(slow.objective(bare, MADE, 0.0)(numbers(Toy())), abs=1e-6)
    assert told["trajectories"] == 6 and told["chunks"] == 12 and told["tokens"] == sum(len(slow.done(e)) for e in MADE)
    assert told["score"] == pytest.approx(np.mean([e["rewards"].sum() for e in MADE]))
    assert (
        0 < told["clip_fraction"] < 1
        and 0 < told["dual_clip_fraction"] < 1
        and told["entropy"] > 0
        and told["kl_loss"] > 0
    )
    assert told["gradient_norm"] > 0 and told["learning_rate"] == 0.1


def test_numbers_that_were_not_finite_have_no_gradient():
    made = episodes([2, 2])
    made[0]["old"][0, 0, 0] = np.nan
    actor, figures = updated(PLAIN, made)
    assert figures["tokens"] == sum(len(slow.done(e)) for e in made) - 1
    assert all(np.isfinite(g).all() for g in actor.seen[0].values())


def test_a_reward_where_nothing_was_carried_out_counts():
    made = episodes([2, 2, 2])
    made[0]["executed"][-1] = 0
    assert same(updated(PLAIN, made)[0].seen[0], expected(PLAIN, numbers(Toy()), made))


def test_nothing_to_learn_from():
    actor, figures = updated(PLAIN, [])
    assert figures == {"trajectories": 0, "chunks": 0, "tokens": 0} and not actor.seen


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: Updater(PolicyGradient(kl=KL["loss"]), Plain(Toy())),
            "kl.where=loss and no reference: give both, or neither",
        ),
        (lambda: Updater(PLAIN, Plain(Toy()), reference=Toy()), "kl.where=none and a reference"),
        (lambda: Updater(PLAIN, Plain(Toy()), critic=Plain(Toy())), "a critic would do nothing with estimator=grpo"),
        (lambda: Updater(PLAIN, Plain(Toy()), critic_warmup=3), "critic_warmup=3 would do nothing with estimator=grpo"),
        (
            lambda: Updater(PolicyGradient(estimator="remax"), Plain(Toy())).update(
                *collected(MADE), baselines={0: 1.0}
            ),
            "group 1 has no greedy",
        ),
        (
            lambda: Updater(PLAIN, Plain(Toy())).update(collected(MADE)[0], []),
            "6 episodes came with 0 arrays of rewards",
        ),
    ],
)
def test_refused(make: Callable[[], Any], says: str):
    with pytest.raises((ConfigError, SchemaError), match=says):
        make()


def test_gae_without_a_value():
    found, rewards = collected(MADE)
    for episode in found:
        del episode.record["value"]
    with pytest.raises(ConfigError, match="give the policy a value head, or the run a critic"):
        Updater(PolicyGradient(estimator="gae"), Plain(Toy(value=False))).update(found, rewards)
    with_head = Plain(Toy())
    Updater(PolicyGradient(estimator="gae"), with_head).update(found, rewards)  # asked before the update
    now = [{**e, "value": e["seen"] @ numbers(Toy())["value"]} for e in MADE]
    assert same(with_head.seen[0], expected(PolicyGradient(estimator="gae"), numbers(Toy()), now))


@pytest.mark.parametrize("head", ["tokens", "gaussian", "flow"])
def test_every_head_learns_from_every_estimator(head: str):
    """What was rewarded becomes likelier; the first ratio is 1, for the policy has not changed since it acted."""
    for estimator in ESTIMATORS:
        sizes = {
            "image_size": 16,
            "state_dim": 1,
            "chunk": 2,
            "action_dim": 2,
            "width": 16,
            "heads": 2,
            "depth": 1,
            "keypoints": 2,
        }
        policy = SmallVLA(SmallVLAConfig(**sizes, head=head, value="detached"))  # type: ignore[arg-type]
        seen = {"full_image": np.zeros((16, 16, 3), np.uint8), "state": np.zeros(1, np.float32), "instruction": "go"}
        _, record = policy.act([seen] * 8, generator=torch.Generator().manual_seed(0))
        won = np.arange(8) % 2
        made = [
            RolloutEpisode(
                Start("toy", "train", 0, 0), select(record, [i]), np.int32([2]), np.zeros(1), True, 2, False, 0, b""
            )
            for i in range(8)
        ]
        updater = Updater(PolicyGradient(estimator), DataParallelOptimizer(policy, Optimizer(learning_rate=1e-3)))
        figures = updater.update(made, [np.float32([x]) for x in won], baselines={0: 0.5})
        assert figures["ppo_kl"] == pytest.approx(0, abs=1e-5) and figures["clip_fraction"] == 0
        with torch.no_grad():
            gain = (policy.evaluate(record).log_prob.numpy() - record["log_prob"]).sum((1, 2))
        assert gain[won == 1].mean() > gain[won == 0].mean(), estimator


# --- many ranks ---

MANY = [{**e, "success": i % 3 == 1} for i, e in enumerate(episodes([3, 1, 2, 2, 3, 1, 1, 2, 2]))]
DEALS = {1: [9], 2: [9, 0], 3: [3, 0, 6], 4: [0, 3, 0, 6]}
"""Episodes of each rank, by the number of ranks: whole groups, uneven, and none at all"""
CASES = [
    PLAIN,
    PolicyGradient(
        estimator="gae",
        lam=0.7,
        reduction="token_mean",
        ratio="action",
        kl=KL["reward"],
        batch=Batching(chunks_per_pass=4),
    ),
    PolicyGradient(estimator="reinforce_plus_plus", entropy=0.1, reduction="trajectory_sum", kl=KL["loss"]),
    PolicyGradient(
        estimator="rloo", recompute_log_prob=True, epochs=2, batch=Batching(trajectories_per_step=4, chunks_per_pass=3)
    ),
]
PROCESS = [
    Prime(coefficient=0.7, granularity="token"),
    Prime(coefficient=0.7, scale="none", update="before", beta=0.5),
    None,
    None,
]
"""Process rewards of the cases"""


def in_step(policy: Toy, ranks: Any) -> Toy:
    """As a module in pieces is: each pass is a call that all ranks make together, and that no other call answers."""
    alone = policy.evaluate

    def evaluate(record: Any) -> Any:
        assert ranks.gather("a pass") == ["a pass"] * ranks.size
        return alone(record)

    policy.evaluate = evaluate  # type: ignore[method-assign]
    return policy


def at_a_rank(
    mine: list[dict[str, Any]], ranks: Any, lockstep: bool
) -> list[tuple[list[slow.Params], dict[str, float], slow.Params]]:
    """The gradients, figures and weights of all cases."""
    done = []
    for settings, prime in zip(CASES, PROCESS, strict=True):
        toy, judge, kept = (in_step(each, ranks) if lockstep else each for each in (Toy(), Toy(seed=3), others()[1]))
        process = None if prime is None else ProcessReward(prime, Plain(judge, 0.1, ranks, lockstep), kept)
        actor = Plain(toy, 0.1, ranks, lockstep)
        reference = None
        if settings.kl.where != "none":
            reference = in_step(others()[1], ranks) if lockstep else others()[1]
        updater = Updater(
            settings,
            actor,
            ranks=ranks,
            reference=reference,
            extra_loss=lambda toy=toy: (toy.weight.square().sum(), {"x": 1.0}),
            process=process,
        )
        figures = updater.update(*collected(mine))
        calls = sum(len(asked) for asked in [toy.asked, judge.asked, kept.asked, reference.asked if reference else []])
        weights = numbers(toy) | {f"judge.{name}": value for name, value in numbers(judge).items()}
        done.append((actor.seen, figures | {"calls": float(calls)}, weights))
        assert updater.update([], []) == {"trajectories": 0, "chunks": 0, "tokens": 0}  # all ranks skip it together
    return done


def a_rank(address: str, rank: int, size: int, answer: Any) -> None:
    torch.set_num_threads(1)
    first = sum(DEALS[size][:rank])
    ranks = join(address, rank, size, timeout_seconds=300)
    answer.send([at_a_rank(MANY[first : first + DEALS[size][rank]], ranks, lockstep) for lockstep in (False, True)])
    ranks.barrier()


@pytest.mark.parametrize("size", sampled(DEALS, 1, 3))  # with 3, one rank has nothing
def test_the_gradient_of_many_ranks_is_that_of_one(size: int, fork: Any):
    """Through gloo. In lockstep every rank makes the same number of passes, with zeros where it has nothing."""
    store, address = host_meeting()
    pipes = [fork.Pipe(False) for _ in range(size)]
    made = [
        fork.Process(target=a_rank, args=(address, rank, size, pipes[rank][1]), daemon=True) for rank in range(size)
    ]
    for process, (_, theirs) in zip(made, pipes, strict=True):
        process.start()
        theirs.close()  # so that a rank that ends without an answer is noticed at once
    found = [ours.recv() if ours.poll(300) else pytest.fail("a rank does not answer") for ours, _ in pipes]
    for process in made:
        process.join(60)
        assert process.exitcode == 0
    del store
    for lockstep, alone in enumerate([at_a_rank(MANY, None, False)] * 2):
        for case, (seen, figures, weights) in enumerate(alone):
            results = [found[rank][lockstep][case] for rank in range(size)]
            assert all(
                same(results[0][2], result[2], 0) and result[1] | {"calls": 0} == results[0][1] | {"calls": 0}
                for result in results
            )
            assert len({result[1]["calls"] for result in results}) == 1 or not lockstep
            if len(seen) == 1:  # with several steps, ranks deal their trajectories each by itself
                assert same(results[0][0][0], seen[0]) and same(results[0][2], weights)
                assert {**results[0][1], "calls": 0} == pytest.approx({**figures, "calls": 0}, abs=1e-6)
            else:
                assert all(len(result[0]) == result[1]["optimizer_steps"] == len(seen) for result in results)


def test_advantages_may_be_given():
    made, rewards = collected(episodes([2, 1, 3], away=0.0))
    given = [np.full(each.rows, sign, np.float32) for each, sign in zip(made, (1.0, -1.0, 0.0), strict=True)]
    first, second = (Plain(Toy()) for _ in range(2))
    Updater(PolicyGradient(), first).update(made, rewards, given=given)
    Updater(PolicyGradient(), second).update(made, rewards, given=[-each for each in given])
    one, other = (optimizer.seen[0]["weight"] for optimizer in (first, second))
    assert np.abs(one).max() > 0 and np.allclose(one, -other), "nothing is clipped in the first step"
    with pytest.raises(SchemaError, match="give one number for each chunk of each"):
        Updater(PolicyGradient(), first).update(made, rewards, given=given[:2])
    with pytest.raises(ConfigError, match="estimator=gae computes its own"):
        Updater(PolicyGradient(estimator="gae"), first).update(made, rewards, given=given)
