"""Settings that would change nothing are refused; what a command line switches off takes along what belongs to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hilt.core.config import build, describe
from hilt.core.errors import ConfigError
from hilt.hil.config import Hil
from hilt.hil.idle import NEEDS, refuse_idle, settings
from hilt.recipes import RECIPES, recipe

IDLE: dict[str, tuple[dict[str, Any], str]] = {
    "demonstration_options.speed=0.5": ({}, "demonstrations=2"),
    "operator_options.mode=hold": ({}, "operator=script"),
    **{f"lost_contact{change}": ({}, "operator=script") for change in ("=nobody", "_seconds=5")},
    "algorithm_options.speed=2": ({}, "algorithm=mine:Algorithm"),
    "agent.options.speed=2": ({}, "agent.kind=mine:Agent"),
    "wire.key_name=arm": ({}, "wire.keys=keys"),
    **{f"goal.{change}": ({}, "goal.success=0.9") for change in ("states=5", "period=5", "hold=3")},
    "checkpoint_path=old": ({"store": "trajectories"}, "store=log"),
    "buffer_period=100": ({"store": "trajectories"}, "store=log"),
    "agent.proprio_floor.state/q=0.1": ({}, "agent.normalize_proprio=true"),
    **{f"{name}=3": ({"algorithm": "bc"}, "algorithm=rlpd") for name in ("n_step", "cta_ratio", "update_to_data", "training_starts")},
    **{
        f"agent.rlpd.{change}": ({"algorithm": "hg-dagger"}, "algorithm=rlpd")
        for change in ("discount=0.5", "tau=0.5", "critics=3", "subset=1", "temperature=0.5", "target_entropy=-1", "backup_entropy=true")
    },
    **{
        f"agent.rlpd.{change}": ({"algorithm": "bc"}, "algorithm=rlpd")
        for change in ("reward_bias=-1", "target_range=[0,1]", "actor_q=min", "critic_warmup=5", "imitation_weight=1")
    },
    "collect_steps=50": ({}, "agent.encoder.pretrain_updates=5"),
    "agent.rlpd.feature_noise=0.1": ({}, "agent.encoder.training=frozen"),
    "agent.rlpd.imitation_updates=10": ({}, "agent.rlpd.imitation_weight=0.5"),
    "agent.rlpd.imitation_loss=mse": ({}, "agent.rlpd.critic_warmup=5"),
    "agent.rlpd.grasp_margin=0.5": ({"algorithm": "bc"}, "agent.setup_mode=single-arm-learned-gripper"),
    "agent.rlpd.random_crop=2": ({"agent": {"encoder": {"training": "frozen"}}}, "agent.encoder.training=critic"),
    "agent.encoder.pretrain_predict_weight=2": ({"agent": {"encoder": {"pretrain_updates": 1}}}, "agent.encoder.pretrain_predict=state/q"),
    **{
        f"agent.encoder.{change}": ({}, "agent.encoder.pretrain_updates=5")
        for change in ("pretrain_batch=64", "pretrain_crop=1", "pretrain_learning_rate=0.1", "pretrain_predict=state/q")
    },
    **{
        change: ({"agent": {"encoder": {"kind": "none"}}}, "agent.encoder.kind=small")
        for change in ("image_keys=[front]", "agent.encoder.training=head", "agent.encoder.features=8", "agent.encoder.precision=bfloat16")
    },
}
"""An override, in which config it would change nothing, and another override with which it would"""


@pytest.mark.parametrize("change", IDLE)
def test_idle_settings_are_refused_and_accepted_with_what_they_need(change: str):
    base, cure = IDLE[change]
    name = change.partition("=")[0]
    with pytest.raises(ConfigError, match=r"changes nothing without .*: set that, too, or leave this out\.$") as error:
        refuse_idle(build(Hil(), base, change))
    owner = name.removesuffix(".speed").removesuffix(".mode").removesuffix(".state/q")
    assert str(error.value).startswith(f"{owner}=")
    refuse_idle(build(Hil(), base, change, cure))
    refuse_idle(build(Hil(), base))


def test_every_setting_that_needs_another_is_tried_above():
    tried = {change.partition("=")[0] for change in IDLE}
    for name in {name for names, _, _ in NEEDS for name in names}:
        assert any(one == name or one.startswith(f"{name}.") for one in tried), name
        assert name in {key for key, *_ in describe(Hil)}


def test_a_grippers_margin_counts_in_imitation_only():
    learned = build(Hil(), "agent.setup_mode=single-arm-learned-gripper", "agent.rlpd.grasp_margin=0.5")
    with pytest.raises(ConfigError, match=r"agent\.rlpd\.grasp_margin=0.5 changes nothing without imitation"):
        refuse_idle(learned)
    refuse_idle(build(learned, "agent.encoder.pretrain_updates=3"))


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_has_an_idle_setting_whatever_is_switched_off(name: str):
    refuse_idle(recipe(name))
    for off in ("demonstrations=0", "operator=''", "agent.normalize_proprio=false", "agent.encoder.kind=none", "algorithm=bc"):
        refuse_idle(settings(recipe(name), off))


def test_idle_settings_of_a_recipe_are_reset_when_switched_off():
    pick = recipe("tabletop_pick")
    off = settings(pick, "demonstrations=0")
    assert pick.demonstration_options and off.demonstration_options == {}
    assert off == replace(pick, demonstrations=0, demonstration_options={}), "and nothing else"
    with pytest.raises(ConfigError, match=r"demonstration_options=.* changes nothing without demonstrations=N"):
        refuse_idle(settings(recipe("tabletop_pick"), "demonstrations=0", "demonstration_options.speed=0.4"))
    bad = build(Hil(), "agent.proprio_floor.state=1.0")
    with pytest.raises(ConfigError, match="changes nothing"):  # a recipe's own mistake stays one
        refuse_idle(settings(bad, "batch_size=8"))
