"""Recipes for LIBERO: complete, checked, and refused with the cure where LIBERO is
not there. Runs of them are in tests/peers."""

from __future__ import annotations

import pytest

from hilt.core.config import build
from hilt.core.errors import MissingPackageError
from hilt.envs import libero
from hilt.recipes import LIBERO, sft_recipe, vla_recipe


@pytest.mark.parametrize("name", LIBERO)
def test_libero_recipes_report_missing_files_before_they_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build(vla_recipe(name), "seed=1")
    if name in libero.SUITES:
        assert config.tasks == [f"{name}/{number}" for number in range(libero.SUITES[name])]
    assert config.validation.split == "eval" and config.collect.split == "train"
    monkeypatch.setattr(libero.importlib.util, "find_spec", lambda package: None)
    with pytest.raises(MissingPackageError, match="hf-libero"):  # the last of all checks: everything else is fine
        config.check()


@pytest.mark.parametrize(("taught", "learned"), [("sft_libero", "libero_learned"), ("sft_libero_six", "libero_six")])
def test_grpo_goes_on_with_the_tasks_and_the_images_of_fine_tuning(taught: str, learned: str) -> None:
    """A policy that was taught on other images, or by chunks of another length, would begin with nothing."""
    before, after = sft_recipe(taught), vla_recipe(learned)
    assert before.tasks == after.tasks and before.task_options == after.task_options
    assert before.policy_options == {**after.policy_options, "shift": 2}
    assert before.demonstrations and before.max_steps, "from the script, without anything to be given"
    longest = {"libero_goal": 106, "libero_spatial": 134}
    """Steps of the expert in eight training states of libero_goal/6 and libero_spatial/2, the most"""
    assert all(after.task_options["step_limit"] > 1.2 * longest[task.partition("/")[0]] for task in after.tasks)
    assert after.validation.goal and after.collect.dynamic_sampling
    slots_of_a_worker = after.pool.slots // after.pool.workers
    kept = after.pool.envs_per_worker or slots_of_a_worker
    assert kept >= len(after.tasks), "or simulators are made again and again, which takes seconds each time"
