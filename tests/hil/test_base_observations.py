"""The columns of a frozen policy: in observations of an environment, in imported episodes, and by the hash of its
weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError
from hilt.formats.episodes import Episode, map_leaves
from hilt.hil.config import Hil, ValueUse, check
from hilt.hil.defaults import chosen
from hilt.hil.environment import make_env, spaces, trainer_config
from hilt.hil.frozen.base_observations import BaseColumns, open_base, weights_of
from hilt.hil.importing import check_imports
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.recording.record import Settings
from hilt.recording.script import record_with_script
from hilt.replay import Log
from tests.value.valued import save_untrained

TASK = "tabletop/press_red"
OPTIONS = {"image_size": 16, "cameras": ["wrist"], "control_hz": 5, "step_limit": 9}
SIZES = {"cameras": ["wrist_image"], "image_size": 16, "state_dim": 1, "action_dim": 3, "chunk": 3}


def saved(path: Path, seed: int = 0, **sizes: Any) -> Path:
    """The folder of a small policy that has learned nothing."""
    settings = {**SIZES, "width": 32, "depth": 1, "keypoints": 2, **sizes}
    SmallVLA(SmallVLAConfig.from_json(settings), seed=seed).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("policy") / "small")


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Path:
    """Two demonstrations, without columns of a frozen policy."""
    path = tmp_path_factory.mktemp("shown")
    wanted = Settings(TASK, OPTIONS, 2, seed=0)
    record_with_script(wanted, path, lambda: make_env(Hil(task=TASK, task_options=OPTIONS), operator=False), {})
    return path / "log"


def config(folder: Path, chunk: int = 1, **changes: Any) -> Hil:
    made = Hil(task=TASK, task_options=dict(OPTIONS), batch_size=8, seed=1)
    made.agent.kind, made.agent.options = "frozen_vla", {"policy": str(folder), **changes.pop("options", {})}
    made.agent.chunk, made.agent.action_indices = chunk, changes.pop("action_indices", [0, 1, 2])
    return replace(made, **changes)


def test_each_observation_has_what_the_policy_makes_of_it_once(folder: Path):
    asked = config(folder, chunk=2)
    with make_env(asked, operator=False) as env:
        base, calls = open_base(asked), []
        look_once = base.policy._features
        base.policy._features = lambda record: calls.append(len(record["images"])) or look_once(record)
        try:
            first, _ = env.reset(seed=0, options={"split": "train", "state": 1})
            after = env.step(np.array([1, 1, -1, 0, 0, 0, -1], np.float32))[0]
        finally:
            del base.policy._features
        assert calls == [1, 1], "one look at each frame, for its features and its plan"
        assert env.observation_space.contains(first) and env.observation_space.contains(after)
        words = env.get_wrapper_attr("instruction")
    ours, theirs = (each["base_policy"][weights_of(asked)] for each in (first, after))
    assert ours["features"].shape == (32,) and ours["actions"].shape == (2, 7) and ours["state"].shape == (1,)
    assert not np.array_equal(ours["features"], theirs["features"])
    row = {"wrist_image": first["images"]["wrist"], "state": ours["state"], "instruction": words}
    expected, _ = base.policy.act([row], sample=False)
    np.testing.assert_allclose(ours["actions"][:, :3], np.clip(expected[0, :2], -1, 1), atol=1e-6)
    np.testing.assert_array_equal(ours["actions"][:, 3:], [[0, 0, 0, -1]] * 2)  # the suite's: fingers are closed
    np.testing.assert_allclose(ours["features"], base.policy.features([row])[0].numpy(), atol=1e-6)


def test_episodes_without_the_columns_get_them_when_they_are_imported(folder: Path, shown: Path):
    asked = config(folder)
    with Log.open(shown, "r") as log:
        keys = log.trajectory_keys(log.trajectories()[0])
        columns, facts = log.read(keys), log.facts.about(log.trajectories()[0])
    base = open_base(asked)
    filled = BaseColumns(base)(Episode(dict(columns), dict(facts)), "shown")
    now, after = (filled.columns[name]["base_policy"][base.weights] for name in ("observations", "next_observations"))
    for place in (0, len(keys) - 1):
        for made, name in ((now, "observations"), (after, "next_observations")):
            tree = columns[name]
            one = {"images": {"wrist": tree["images"]["wrist"][place]}}
            one["state"] = {key: value[place] for key, value in tree["state"].items()}
            expected = base.of_one(one, facts["language_instruction"])
            for key, value in expected.items():
                np.testing.assert_allclose(made[key][place], value, atol=1e-5, err_msg=f"{name} {key} {place}")
    np.testing.assert_array_equal(now["features"][1:], after["features"][:-1])
    assert BaseColumns(base)(filled, "shown") is filled, "what has them stays as it is"


def test_an_imported_episode_is_asked_about_in_few_even_passes(folder: Path, shown: Path):
    with Log.open(shown, "r") as log:
        columns, facts = log.read(log.trajectory_keys(0)), log.facts.about(0)
    times = -(-40 // len(columns["rewards"]))
    columns = map_leaves(lambda column: np.concatenate([column] * times)[:40], columns)
    columns["next_observations"] = map_leaves(lambda column: np.roll(column, -1, axis=0), columns["observations"])
    base, sizes = open_base(config(folder, chunk=2)), list[int]()
    look = base.policy._features
    base.policy._features = lambda record: sizes.append(len(record["images"])) or look(record)
    try:
        made = BaseColumns(base)(Episode(columns, facts), "shown")
    finally:
        del base.policy._features
    assert sizes == [20, 21], "40 frames and the last next one, at most 32 together"
    texts = [facts["language_instruction"]] * 40
    for tree in ("observations", "next_observations"):
        alone = [base.columns([row]) for row in base.rows(columns[tree], texts)]
        for name, column in made.columns[tree]["base_policy"][base.weights].items():
            np.testing.assert_allclose(column, np.concatenate([each[name] for each in alone]), atol=1e-5)


def test_an_episode_of_one_step_gets_them(folder: Path, shown: Path):
    with Log.open(shown, "r") as log:
        columns = log.read(log.trajectory_keys(log.trajectories()[0])[:1])
    base = open_base(config(folder))
    filled = BaseColumns(base, ["press"])(Episode(dict(columns)), "shown")
    now, after = (filled.columns[name]["base_policy"][base.weights] for name in ("observations", "next_observations"))
    assert now["features"].shape == after["features"].shape == (1, 32)
    assert not np.array_equal(now["features"], after["features"])


def test_columns_of_other_weights_are_refused_by_hash(folder: Path, shown: Path, tmp_path: Path):
    base, other = open_base(config(folder)), open_base(config(saved(tmp_path / "other", seed=1)))
    assert base.weights != other.weights
    with Log.open(shown, "r") as log:
        columns = log.read(log.trajectory_keys(log.trajectories()[0]))
    filled = BaseColumns(other, ["press"])(Episode(dict(columns)), "shown")
    with pytest.raises(ConfigError, match=f"DEMOS has .* hash {other.weights}, and those of .* have {base.weights}"):
        BaseColumns(base)(filled, "DEMOS")


def test_an_episode_without_an_instruction_is_refused(folder: Path, shown: Path):
    with Log.open(shown, "r") as log:
        columns = log.read(log.trajectory_keys(log.trajectories()[0]))
    with pytest.raises(ConfigError, match=r"an episode has no instruction.*agent\.options\.instruction=TEXT"):
        BaseColumns(open_base(config(folder)))(Episode(dict(columns)), "shown")
    words = config(folder, options={"instruction": "press the red button"})
    BaseColumns(open_base(words))(Episode(dict(columns)), "shown")


def test_demonstrations_without_the_columns_pass_the_checks_before_a_run(folder: Path, shown: Path):
    asked = config(folder, demo_path=[str(shown)])
    check_imports(asked, spaces(asked))


def test_defaults_begin_at_the_frozen_policy(folder: Path):
    made, why = chosen(config(folder), spaces(config(folder)))
    assert made.agent.encoder.kind == "none" and made.agent.actor_scale == 0.01 and made.defaults == "state"
    assert "the policy sees what the frozen one computes" in str(why)
    check(made)


def test_actors_with_another_policy_do_not_reach_the_learner(folder: Path, tmp_path: Path):
    one, two = (trainer_config(config(path), learner=False) for path in (folder, saved(tmp_path / "other", seed=1)))
    assert one.version != two.version and weights_of(config(folder)) in one.version


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"chunk": 4}, "agent.chunk=4, and the policy in .*small plans 3 actions. Give agent.chunk=3 at most"),
        ({"action_indices": []}, r"does not move the numbers \[3, 4, 5, 6\] .* agent.action_indices=\[0, 1, 2\]"),
        ({"options": {"suite": "tabletop/pick"}}, "small does not fit the task"),
        ({"task": "tabletop/reach", "options": {"suite": "metaworld"}}, "small does not fit the task"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused(folder: Path, changes: dict[str, Any], error: str):
    with pytest.raises(ConfigError, match=error):
        make_env(config(folder, **changes), operator=False)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"defaults": "images"}, "give agent.encoder.kind=none"),
        ({"proprio_keys": ["state/tcp_pose"]}, "leave image_keys and proprio_keys out"),
        ({"store": "trajectories"}, "store=trajectories with agent.kind=frozen_vla"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(folder: Path, changes: dict[str, Any], error: str):
    with pytest.raises(ConfigError, match=error):
        check(config(folder, **changes))


def test_a_value_model_of_features_under_other_names_is_refused(folder: Path, tmp_path: Path):
    seen = [({}, True), ({"suite": TASK}, True), ({"columns": {"wrist_image": "images/wrist"}}, False)]
    for number, (names, fits) in enumerate(seen):
        value = save_untrained(tmp_path / str(number), {}, TASK, (folder, 32), **names)
        asked = config(folder, value=ValueUse(str(value), reward=1.0))
        if fits:
            make_env(asked, operator=True).close()
            continue
        with pytest.raises(
            ConfigError, match=r"was trained with suite='' and columns=\{'wrist_image': 'images/wrist'\}, and"
        ):
            make_env(asked, operator=True)
