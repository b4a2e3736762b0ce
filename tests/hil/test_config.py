"""Every setting of a run has a test that shows what it does, and is refused where it would do nothing."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hilt.core import validate
from hilt.core.config import build, describe, override
from hilt.core.errors import ConfigError
from hilt.hil.config import Hil, check
from hilt.recipes import RECIPES, recipe

TESTS = Path(__file__).parent.parent
RLPD, ENCODER, BODY = (
    "policies/test_agent.py::test_a_setting_of_rlpd_changes_what_is_learned",
    "policies/test_agent.py::test_a_setting_of_the_encoder_changes_what_is_learned",
    "policies/test_agent.py::test_agent_body_follows_the_config",
)
CRITIC = "policies/test_residual_critics.py::test_a_setting_of_the_critics_changes_what_is_learned"
PERIODS = "hil/test_learner.py::test_learner_periods_and_ratios"
GOAL = "hil/test_goal.py::test_learning_ends_at_the_goal_with_the_policy_that_reached_it"
WIRE = "hil/test_environment.py::test_the_wires_settings"
SHOWN = {
    "task": "hil/test_environment.py::test_an_environment_of_gymnasiums_is_taken_as_it_is",
    "task_options": "hil/test_environment.py::test_limits_observations_and_the_grippers_penalty",
    "observations": "hil/test_environment.py::test_limits_observations_and_the_grippers_penalty",
    "image_keys": "policies/test_agent.py::test_only_the_keys_asked_for_are_seen",
    "proprio_keys": "policies/test_agent.py::test_only_the_keys_asked_for_are_seen",
    **{
        name: "hil/test_environment.py::test_a_classifier_gives_the_reward_and_the_learner_does_not_need_it"
        for name in ("classifier", "classifier_threshold")
    },
    **{
        f"value.{name}": "hil/test_environment.py::test_a_value_model_adds_a_dense_reward_and_ends_hopeless_episodes"
        for name in ("model", "reward", "stop_below", "stop_patience")
    },
    **{
        f"value.{name}": "hil/test_environment.py::test_a_value_model_shows_the_operator_what_it_expects"
        for name in ("alarm_below", "alarm_patience")
    },
    "control_hz": "hil/test_actor.py::test_actor_keeps_the_control_rate_and_reports_lateness",
    "max_traj_length": "hil/test_environment.py::test_limits_observations_and_the_grippers_penalty",
    "demo_path": "hil/test_data.py::test_demonstrations_in_any_format_once",
    "demo_where": "hil/test_data.py::test_a_filter_chooses_the_demonstrations_that_are_imported",
    "demonstrations": "hil/test_launch.py::test_demonstrations_are_recorded_once_and_given_to_the_learner",
    "demonstration_options": "hil/test_launch.py::test_demonstrations_are_recorded_once_and_given_to_the_learner",
    "checkpoint_path": "hil/test_data.py::test_experience_imports_both_buffers_of_hil_serl",
    "operator": "hil/test_environment.py::test_an_operator_takes_over_with_the_options_of_device_and_take_over",
    "operator_options": "hil/test_environment.py::test_an_operator_takes_over_with_the_options_of_device_and_take_over",
    **{
        f"help.{name}": "hil/test_contact.py::test_the_policy_asks_for_help_where_its_critics_disagree"
        for name in ("quantile", "window", "wait_seconds")
    },
    "help.samples": "hil/test_vla_agent.py::test_disagreement_is_the_spread_of_chunks_that_are_drawn_beside_each_plan",
    "lost_contact": "hil/test_contact.py::test_lost_contact_pause_stays_paused_and_stop_works",
    "lost_contact_seconds": "hil/test_contact.py::test_after_a_while_the_policy_goes_on",
    "actors": "hil/test_launch.py::test_the_commands_are_one_learner_and_the_actors_that_were_asked_for",
    **{
        f"agent.{name}": "hil/test_make_agent.py::test_kind_and_options_name_another_agent"
        for name in ("kind", "options")
    },
    "view_shares": "hil/test_vla_agent.py::test_a_whole_run_with_take_overs_in_the_middle_of_chunks",
    **{
        f"mixed.{name}": "hil/test_groups.py::test_the_settings_of_groups_change_what_is_played_and_learned"
        for name in ("estimator", "clip_low", "clip_high", "weight", "temperature", "task", "task_options")
    },
    **{
        f"mixed.{name}": "hil/test_groups.py::test_groups_that_are_too_old_or_interrupted_are_dropped_and_counted"
        for name in ("max_age", "group_size", "groups", "period")
    },
    "mixed.imitation": "hil/test_groups.py::test_imitation_takes_nothing_of_groups_not_even_their_successes",
    "mixed.simulations": "hil/test_groups.py::test_hilt_train_starts_the_simulations_that_were_asked_for",
    **{
        f"recap.{name}": "hil/test_advantage_stream.py::test_the_settings_of_recap_change_what_is_learned"
        for name in ("model", "threshold", "dropout", "guidance", "condition")
    },
    "algorithm_options": "hil/test_make_agent.py::test_another_algorithm_is_made_with_its_options_and_checkpointed",
    "agent.setup_mode": "policies/test_agent.py::test_actions_have_the_layout_of_the_setup_mode",
    **{f"agent.encoder.{name}": ENCODER for name in ("kind", "training", "features", "precision")},
    "agent.encoder.weights": "policies/test_encoders.py::test_resnet10_gives_the_numbers_of_flax",
    "agent.encoder.pretrain_updates": "policies/test_agent.py::test_the_rate_of_pretraining_rises_and_falls",
    "agent.encoder.pretrain_crop": "policies/test_agent.py::test_settings_of_pretraining_are_heeded",
    "agent.encoder.kept_shifts": "hil/test_states.py::test_each_row_of_a_batch_is_of_one_of_the_kept_shifts",
    "agent.encoder.pretrain_learning_rate": "policies/test_agent.py::test_settings_of_pretraining_are_heeded",
    "agent.encoder.pretrain_batch": "hil/test_learner.py::test_the_encoder_is_pretrained_on_demonstrations_first",
    "agent.encoder.pretrain_predict": "policies/test_agent.py::test_pretraining_foresees_what_is_asked",
    "agent.encoder.pretrain_predict_weight": "policies/test_agent.py::test_pretraining_foresees_what_is_asked",
    "agent.action_indices": "policies/test_agent.py::test_the_policy_moves_only_some_of_the_numbers",
    "agent.pose_keys": "policies/test_agent.py::test_a_pose_is_seen_as_columns_of_its_rotation",
    "agent.normalize_proprio": "policies/test_agent.py::test_proprioception_is_normalized_by_the_demonstrations",
    "agent.proprio_floor": "policies/test_agent.py::test_proprioception_is_normalized_by_the_demonstrations",
    "agent.hidden": BODY,
    "agent.activation": BODY,
    **{
        f"agent.{name}": "policies/test_agent.py::test_agent_actor_initial_std"
        for name in ("actor_scale", "initial_std", "std_range")
    },
    "agent.proprio_width": "policies/test_agent.py::test_agent_actor_initial_std",
    "agent.device": "policies/test_agent.py::test_the_device_is_checked",
    **{
        f"agent.rlpd.{name}": RLPD
        for name in ("discount", "tau", "critics", "subset", "learning_rate", "temperature", "target_entropy")
    },
    **{
        f"agent.rlpd.{name}": RLPD
        for name in ("backup_entropy", "reward_bias", "target_range", "actor_q", "actor_average")
    },
    **{
        f"agent.rlpd.{name}": RLPD
        for name in ("critic_warmup", "imitation_weight", "imitation_updates", "imitation_loss", "random_crop")
    },
    **{
        f"agent.critic.{name}": CRITIC
        for name in (
            *("head", "bins", "value_range", "reward_range", "sigma", "network", "width", "depth"),
            *("weight_decay", "reset_period", "reset_hold"),
        )
    },
    **{
        f"agent.rlpd.{name}": "policies/test_agent.py::test_the_conservative_term_follows_its_settings"
        for name in ("conservative", "conservative_samples", "conservative_updates", "calibrated")
    },
    "offline_updates": "hil/test_learner.py::test_offline_updates_train_actor_and_critics_before_the_policy_acts",
    "demo_share": "hil/test_data.py::test_demo_share_of_a_batch",
    "agent.chunk": "policies/test_chunk_plan.py::test_values_of_chunks_on_a_chain_are_those_known",
    **{
        f"agent.rlpd.{name}": "policies/test_chunk_plan.py::test_samples_and_the_actor_change_what_is_done_and_learned"
        for name in ("actor", "samples")
    },
    "agent.rlpd.grasp_margin": "policies/test_agent.py::test_the_margin_of_a_gripper_is_heeded",
    "agent.rlpd.feature_noise": "policies/test_agent.py::test_noise_on_features_and_nothing_else",
    "defaults": "hil/test_defaults.py::test_defaults_keep_given_settings_and_images_keep_all",
    "algorithm": "hil/test_learner.py::test_imitation_learns_from_what_it_should",
    "store": "compat/test_rollout_experience.py::test_the_same_episodes_give_the_same_batches_and_the_same_curve",
    **{
        name: "hil/test_learner.py::test_the_seed_the_capacity_and_n_step_change_what_is_learned"
        for name in ("seed", "n_step")
    },
    "replay_buffer_capacity": "hil/test_learner.py::test_the_seed_the_capacity_and_n_step_change_what_is_learned",
    **{
        name: PERIODS
        for name in ("batch_size", "cta_ratio", "steps_per_update", "log_period", "checkpoint_period", "max_steps")
    },
    "update_to_data": "hil/test_learner.py::test_update_to_data_caps_and_waiting_is_measured",
    "updates_per_step": "hil/test_actor.py::test_updates_per_step_make_a_simulation_wait_longer",
    "max_ahead": "hil/test_actor.py::test_a_simulation_does_not_outrun_the_learner_but_acts_on_when_that_is_gone",
    "random_steps": "hil/test_actor.py::test_random_steps_come_first_and_every_step_carries_the_weights_that_made_it",
    "collect_steps": "hil/test_learner.py::test_while_it_collects_actors_need_not_wait_for_updates",
    "training_starts": "hil/test_learner.py::test_learner_waits_for_training_starts",
    "max_seconds": "hil/test_learner.py::test_learner_limits",
    "max_env_steps": "hil/test_learner.py::test_learner_limits",
    **{f"goal.{name}": GOAL for name in ("success", "states", "period", "hold")},
    "goal.take_overs": "hil/test_goal.py::test_goal_waits_until_a_person_has_taken_over_in_few_of_the_last_episodes",
    "stop_on": "hil/test_learner.py::test_an_alarm_ends_the_run_and_it_goes_on",
    "checkpoint_keep": "hil/test_learner.py::test_checkpoints_by_the_clock_and_how_many_stay",
    "buffer_period": "hil/test_learner.py::test_buffers_in_hil_serls_files",
    "sinks": "hil/test_learner.py::test_learner_keys_and_sinks",
    **{f"wire.{name}": WIRE for name in ("host", "port", "broadcast_port", "keys", "key_name")},
}


@pytest.mark.parametrize("setting", [key for key, *_ in describe(Hil)])
def test_each_setting_is_shown_by_a_test(setting: str):
    """The test is there, and it, or what it is parametrized with, speaks of the setting."""
    file, _, name = SHOWN[setting].partition("::")
    text = (TESTS / file).read_text()
    (found,) = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
    first = min([found.lineno, *(decorator.lineno for decorator in found.decorator_list)])
    lines = text.splitlines()[first - 1 : found.end_lineno]
    assert setting.rpartition(".")[2] in "\n".join(lines), f"{SHOWN[setting]} says nothing of {setting}"


def test_hil_proofs_name_only_settings():
    assert set(SHOWN) == {key for key, *_ in describe(Hil)}


VLA = {"kind": "vla", "options": {"policy": "folder"}}
BOUNDED = {"agent": {"rlpd": {"target_range": [0, 1]}}}
IDLE: dict[str, tuple[dict[str, Any], str | dict[str, Any]]] = {
    "classifier_threshold=0.8": ({}, "classifier=folder"),
    **{f"value.{change}": ({}, "value.model=folder") for change in ("reward=1", "stop_below=0.1")},
    "value.stop_patience=5": ({"value": {"model": "folder", "reward": 1.0}}, "value.stop_below=0.1"),
    "demo_where=tag=good": ({}, {"demo_path": ["log"]}),
    "value.alarm_below=0.2": ({"value": {"model": "folder"}}, "operator=script"),
    "value.alarm_patience=2": ({"value": {"model": "folder"}, "operator": "script"}, "value.alarm_below=0.1"),
    "demonstration_options.speed=0.5": ({}, "demonstrations=2"),
    "operator_options.mode=hold": ({}, "operator=script"),
    **{f"lost_contact{change}": ({}, "operator=script") for change in ("=pause", "_seconds=5")},
    "help.quantile=0.9": ({}, "operator=script"),
    **{f"help.{change}": ({"operator": "script"}, "help.quantile=0.9") for change in ("window=50", "wait_seconds=1")},
    "help.samples=3": (
        {"operator": "script", "algorithm": "hg-dagger", "agent": VLA},
        "help.quantile=0.9",
    ),
    "updates_per_step=4": ({"algorithm": "bc"}, "max_ahead=50"),
    "view_shares.human=2": ({}, "algorithm=hg-dagger"),
    **{
        f"mixed.{change}": ({"agent": VLA}, "algorithm=mixed")
        for change in (
            *("imitation=filtered", "simulations=2", "group_size=4", "groups=2", "period=5", "max_age=3"),
            *("weight=0.5", "temperature=0.8", "estimator=rloo", "clip_low=0.1", "clip_high=0.1", "task=tabletop/pick"),
        )
    },
    **{
        f"recap.{change}": ({"agent": VLA}, {"algorithm": "recap", "recap": {"model": "folder"}})
        for change in ("model=folder", "threshold=0.5", "dropout=0.1", "guidance=2", "condition=embedding")
    },
    "mixed.task_options.image_size=16": ({"agent": VLA, "algorithm": "mixed"}, "mixed.task=tabletop/pick"),
    "algorithm_options.speed=2": ({}, "algorithm=mine:Algorithm"),
    "agent.options.speed=2": ({}, "agent.kind=mine:Agent"),
    "wire.key_name=arm": ({}, "wire.keys=keys"),
    **{f"goal.{change}": ({}, "goal.success=0.9") for change in ("states=5", "period=5", "hold=3", "take_overs=0.1")},
    "agent.proprio_floor.state/q=0.1": ({}, "agent.normalize_proprio=true"),
    **{
        f"{name}=3": ({"algorithm": "bc"}, "algorithm=rlpd")
        for name in ("n_step", "cta_ratio", "update_to_data", "training_starts")
    },
    **{
        f"agent.rlpd.{change}": ({"algorithm": "hg-dagger"}, "algorithm=rlpd")
        for change in (
            "discount=0.5",
            "tau=0.5",
            "critics=3",
            "subset=1",
            "temperature=0.5",
            "target_entropy=-1",
            "backup_entropy=true",
        )
    },
    **{
        f"agent.rlpd.{change}": ({"algorithm": "bc"}, "algorithm=rlpd")
        for change in ("reward_bias=-1", "target_range=[0,1]", "actor_q=min", "critic_warmup=5", "imitation_weight=1")
    },
    "offline_updates=5": ({}, "demonstrations=2"),
    "demo_share=0.2": ({"algorithm": "bc"}, "algorithm=rlpd"),
    "agent.rlpd.conservative=1": ({"algorithm": "bc"}, "algorithm=rlpd"),
    **{
        f"agent.rlpd.{change}": ({}, "agent.rlpd.conservative=1")
        for change in ("conservative_samples=2", "conservative_updates=5", "calibrated=false")
    },
    "agent.chunk=4": ({"algorithm": "bc"}, "algorithm=rlpd"),
    "agent.rlpd.samples=4": ({"algorithm": "bc"}, "algorithm=rlpd"),
    "agent.rlpd.actor=behavior": ({"algorithm": "bc"}, {"algorithm": "rlpd", "agent": {"rlpd": {"samples": 4}}}),
    "agent.critic.head=c51": ({"algorithm": "bc"}, {"algorithm": "rlpd", **BOUNDED}),
    **{
        f"agent.critic.{change}": ({"algorithm": "bc"}, "algorithm=rlpd")
        for change in ("network=simba", "weight_decay=0.1", "reset_period=1000")
    },
    **{
        f"agent.critic.{change}": (BOUNDED, "agent.critic.head=hl_gauss")
        for change in ("bins=51", "value_range=[0,1]", "reward_range=[0,1]", "sigma=0.5")
    },
    **{f"agent.critic.{change}": ({}, "agent.critic.network=bro") for change in ("width=64", "depth=1")},
    "agent.critic.reset_hold=5": ({}, "agent.critic.reset_period=1000"),
    "collect_steps=50": ({}, "agent.encoder.pretrain_updates=5"),
    "agent.rlpd.feature_noise=0.1": ({}, "agent.encoder.training=frozen"),
    "agent.rlpd.imitation_updates=10": ({}, "agent.rlpd.imitation_weight=0.5"),
    "agent.rlpd.imitation_loss=mse": ({}, "agent.rlpd.critic_warmup=5"),
    "agent.rlpd.grasp_margin=0.5": ({"algorithm": "bc"}, "agent.setup_mode=single-arm-learned-gripper"),
    "agent.rlpd.random_crop=2": ({"agent": {"encoder": {"training": "frozen"}}}, "agent.encoder.training=critic"),
    "agent.encoder.kept_shifts=3": (
        {"agent": {"encoder": {"pretrain_updates": 1}}},
        "agent.encoder.training=frozen",
    ),
    "agent.encoder.pretrain_predict_weight=2": (
        {"agent": {"encoder": {"pretrain_updates": 1}}},
        "agent.encoder.pretrain_predict=state/q",
    ),
    **{
        f"agent.encoder.{change}": ({}, "agent.encoder.pretrain_updates=5")
        for change in ("pretrain_batch=64", "pretrain_crop=1", "pretrain_learning_rate=0.1", "pretrain_predict=state/q")
    },
    **{
        change: ({"agent": {"encoder": {"kind": "none"}}}, "agent.encoder.kind=small")
        for change in (
            "image_keys=[front]",
            "agent.encoder.training=head",
            "agent.encoder.features=8",
            "agent.encoder.precision=bfloat16",
        )
    },
}
"""An override, in which config it would change nothing, and another override with which it would"""


@pytest.mark.parametrize("change", IDLE)
def test_idle_settings_are_refused_and_accepted_with_what_they_need(change: str):
    base, cure = IDLE[change]
    name = change.partition("=")[0]
    with pytest.raises(ConfigError, match=r"would do nothing: it needs .*\. Give that, or leave \w+ out\.$") as error:
        check(build(Hil(), base, change))
    owner = name.removesuffix(".speed").removesuffix(".mode").removesuffix(".state/q").removesuffix(".human")
    owner = owner.removesuffix(".image_size")
    assert str(error.value).startswith(f"{owner}=")
    check(build(Hil(), base, change, cure))
    check(build(Hil(), base))


def test_every_setting_that_needs_another_is_tried_above():
    tried = {change.partition("=")[0] for change in IDLE}
    for name in {name for name, _ in validate.needs(Hil)}:
        assert any(one == name or one.startswith(f"{name}.") for one in tried), name
        assert name in {key for key, *_ in describe(Hil)}


def test_a_grippers_margin_counts_in_imitation_only():
    learned = build(Hil(), "agent.setup_mode=single-arm-learned-gripper", "agent.rlpd.grasp_margin=0.5")
    with pytest.raises(ConfigError, match=r"agent\.rlpd\.grasp_margin=0.5 would do nothing: it needs imitation"):
        check(learned)
    check(build(learned, "agent.encoder.pretrain_updates=3"))


@pytest.mark.parametrize("name", RECIPES)
def test_no_recipe_has_an_idle_setting_whatever_is_switched_off(name: str):
    check(recipe(name))
    for off in (
        "demonstrations=0",
        "operator=''",
        "agent.normalize_proprio=false",
        "agent.encoder.kind=none",
        "algorithm=bc",
    ):
        check(override(recipe(name), off))


def test_idle_settings_of_a_recipe_are_reset_when_switched_off():
    pick = recipe("tabletop_pick")
    off = override(pick, "demonstrations=0")
    assert pick.demonstration_options and off.demonstration_options == {}
    assert off == replace(pick, demonstrations=0, demonstration_options={}), "and nothing else"
    with pytest.raises(ConfigError, match=r"demonstration_options=.* would do nothing: it needs demonstrations=N"):
        check(override(recipe("tabletop_pick"), "demonstrations=0", "demonstration_options.speed=0.4"))
    bad = build(Hil(), "agent.proprio_floor.state=1.0")
    with pytest.raises(ConfigError, match="would do nothing"):  # a recipe's own mistake stays one
        check(override(bad, "batch_size=8"))
