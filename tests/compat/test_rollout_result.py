"""Steps become trajectories as RLinf's builder makes them; what it gets wrong is right here."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from hilt.compat.rlinf.rollout_result import (
    ChunkStepResult,
    EmbodiedRolloutResult,
    EmbodiedTrajectoryBuilder,
    convert_trajectories_to_batch,
)
from hilt.core.errors import ConfigError, HiltError, SchemaError
from hilt.formats.rlinf_trajectory import Trajectory, get_model_weights_id, step_rows
from hilt.replay.tensors import to_torch
from tests.replay.rlinf_golden import EPOCHS, FOLDER, builder_of, packed, trajectory_of, under

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

SHAPES = [(3, 2), (4, 3), (2, 2), (6, 1)]
NOTES = json.loads((FOLDER / "rollout.json").read_text())


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return packed("trajectories.npz")


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return packed("rollout.npz")


def golden(stored: dict[str, Any], index: int) -> Trajectory:
    return trajectory_of(under(stored, str(index)))


def compare(ours: Trajectory, theirs: Trajectory, but: tuple[str, ...] = ()) -> None:
    for item in dataclasses.fields(Trajectory):
        a, b = getattr(ours, item.name), getattr(theirs, item.name)
        if item.name in but:
            continue
        if isinstance(b, dict):
            assert list(a) == list(b), item.name
            for key in b:
                assert a[key].dtype is b[key].dtype and torch.equal(a[key], b[key]), f"{item.name}/{key}"
        elif isinstance(b, torch.Tensor):
            assert a.dtype is b.dtype and a.shape == b.shape and torch.equal(a, b), item.name
            assert a.is_contiguous()
        else:
            assert a == b, item.name


# Against RLinf's numbers


@pytest.mark.parametrize("index", range(4))
def test_the_builder_stacks_as_rlinf_does(index: int, stored: dict[str, Any]) -> None:
    theirs = golden(stored, index)
    ours = builder_of(theirs, EPOCHS[index]).to_trajectory()
    compare(ours, theirs)
    assert ours.shape == (*SHAPES[index], 6)
    assert list(ours.to_dict()) == [item.name for item in dataclasses.fields(Trajectory)]
    compare(Trajectory.from_dict(ours.to_dict()), theirs)


@pytest.mark.parametrize("index", range(4))
def test_splitting(index: int, stored: dict[str, Any], made: dict[str, Any]) -> None:
    builder = builder_of(golden(stored, index), EPOCHS[index])
    environments = SHAPES[index][1]
    for count in range(1, environments + 1):
        parts = builder.to_splited_trajectories(count)
        assert len(parts) == count
        for i, part in enumerate(parts):
            compare(part, trajectory_of(under(made, f"split/{index}/{count}/{i}")))
    sizes = [2, 1] if environments == 3 else [1] * environments
    for i, part in enumerate(builder.to_splited_trajectories_by_sizes(sizes)):
        compare(part, trajectory_of(under(made, f"sizes/{index}/{'-'.join(map(str, sizes))}/{i}")))


@pytest.mark.parametrize("mode", ("any", "all"))
@pytest.mark.parametrize("index", range(3))
def test_interventions(index: int, mode: str, stored: dict[str, Any], made: dict[str, Any]) -> None:
    parts = golden(stored, index).extract_intervene_traj(mode)
    assert (parts and len(parts)) == NOTES[f"extract/{index}/{mode}"]
    for i, part in enumerate(parts or []):
        compare(part, trajectory_of(under(made, f"extract/{index}/{mode}/{i}")), but=("versions",))
        assert part.versions is not None and part.versions.shape == (part.rewards.shape[0], 1, 1)  # type: ignore[union-attr]


def test_interventions_of_two_epochs_keep_each_outcome_with_its_step(
    stored: dict[str, Any], made: dict[str, Any]
) -> None:
    whole = golden(stored, 3)
    (part,) = whole.extract_intervene_traj() or []
    compare(
        part, trajectory_of(under(made, "extract/3/any/0")), but=("versions", "dones", "terminations", "truncations")
    )
    # t = 1 of the first epoch, t = 4 is the second of the second one
    for name in ("dones", "terminations", "truncations"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[[2, 6]])


def test_side_by_side(made: dict[str, Any]) -> None:
    batch = convert_trajectories_to_batch([trajectory_of(under(made, f"cat_in/{i}")) for i in range(2)])
    theirs = under(made, "cat_out")
    ours = {
        f"{k}/{n}" if isinstance(v, dict) else k: t
        for k, v in batch.items()
        for n, t in (v.items() if isinstance(v, dict) else [("", v)])
    }
    assert sorted(ours) == sorted(theirs) == sorted(NOTES["cat_keys"])
    assert list(batch)[:3] == ["curr_obs", "next_obs", "forward_inputs"]
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key].numpy(), value)


@pytest.mark.parametrize("case", ("chunk/0", "chunk/1", "flat/0", "flat/1"))
def test_a_persons_action_replaces_the_last_one(case: str, made: dict[str, Any]) -> None:
    numbers = to_torch(under(made, f"update/{case}"))
    inputs = {"action": numbers["actions"], "model_action": numbers["actions"]}
    builder = EmbodiedRolloutResult()
    builder.append_step_result(ChunkStepResult(actions=numbers["actions"], forward_inputs=inputs))
    assert not builder.intervene_flags[-1].any()
    builder.mark_last_step_with_intervene_flags(numbers["flags"])
    assert torch.equal(builder.intervene_flags[-1], numbers["marked_flags"])
    builder.update_last_actions(numbers["intervene_actions"], numbers["flags"])
    assert torch.equal(builder.actions[-1], numbers["new_actions"])
    assert torch.equal(builder.intervene_flags[-1], numbers["new_flags"])
    assert torch.equal(builder.forward_inputs[-1]["action"], numbers["forward_action"])
    assert list(builder.forward_inputs[-1]) == NOTES[f"update/{case}"]
    assert list(inputs) == ["action", "model_action"]  # the caller's own dictionary is left alone


@pytest.mark.parametrize("case", NOTES["weights_ids"], ids=lambda case: case["dtype"])
def test_the_name_of_the_weights(case: dict[str, Any]) -> None:
    versions = torch.tensor(case["values"], dtype=getattr(torch, case["dtype"])).reshape(case["shape"])
    assert get_model_weights_id(versions) == case["id"]


def test_without_versions_the_name_is_that_of_zero() -> None:
    assert (
        EmbodiedRolloutResult().to_trajectory().model_weights_id
        == NOTES["weights_ids"][0]["id"]
        == get_model_weights_id(None)
    )


# What RLinf gets wrong


def step(environments: int = 2, **fields: Any) -> ChunkStepResult:
    base = {
        "actions": torch.ones(environments, 6),
        "rewards": torch.ones(environments, 2),
        "prev_values": torch.ones(environments, 1),
    }
    return ChunkStepResult(**{**base, **fields})


def test_both_names_are_one_class() -> None:
    assert EmbodiedTrajectoryBuilder is EmbodiedRolloutResult


def test_values_with_a_bootstrap_row_can_be_extracted() -> None:
    builder = EmbodiedRolloutResult()
    for t in range(3):
        builder.append_step_result(step(prev_values=torch.full((2, 1), float(t))))
        builder.mark_last_step_with_intervene_flags(torch.tensor([t != 1, False]))
    builder.append_step_result(ChunkStepResult(prev_values=torch.full((2, 1), 99.0)))
    (part,) = builder.to_trajectory().extract_intervene_traj() or []
    assert part.prev_values.reshape(-1).tolist() == [0.0, 2.0]


def test_uneven_interventions_of_two_epochs_stay_aligned() -> None:
    """RLinf keeps both reset rows; with one flagged step in the first epoch and three
    in the second, its buffer reads wrong rows."""
    steps, epochs = 6, 2
    outcome = torch.zeros(steps + epochs, 1, 1)
    rows = [1, 2, 3, 5, 6, 7]
    outcome[rows, 0, 0] = torch.arange(1.0, steps + 1)
    flags = torch.tensor([0, 1, 0, 1, 1, 1], dtype=torch.bool).reshape(steps, 1, 1)
    whole = Trajectory(
        rewards=torch.arange(1.0, steps + 1).reshape(steps, 1, 1),
        intervene_flags=flags,
        dones=outcome,
        terminations=outcome,
        truncations=outcome,
    )
    (part,) = whole.extract_intervene_traj() or []
    assert part.rewards.reshape(-1).tolist() == [2, 4, 5, 6]
    aligned = step_rows("dones", part.dones, 4)
    assert aligned.reshape(-1).tolist() == [2, 4, 5, 6]


def test_dones_may_come_without_truncations() -> None:
    flags = torch.ones(2, 1, 3, dtype=torch.bool)
    whole = Trajectory(
        rewards=torch.zeros(2, 1, 1), intervene_flags=flags, dones=torch.tensor([0, 0, 1]).reshape(3, 1, 1)
    )
    (part,) = whole.extract_intervene_traj() or []
    assert part.dones.reshape(-1).tolist() == [0, 0, 1] and part.truncations is None


def test_observations_may_be_nested() -> None:
    builder = EmbodiedRolloutResult()
    for t in range(2):
        builder.append_step_result(step())
        builder.mark_last_step_with_intervene_flags(torch.tensor([t == 1, True]))
        seen = {"images": {"front": np.full((2, 3), t, np.uint8), "none": None}, "states": torch.full((2, 1), float(t))}
        builder.append_transitions(seen, seen)
        assert "none" in seen["images"]  # type: ignore[operator]
    trajectory = builder.to_trajectory()
    assert trajectory.curr_obs["images"]["front"].shape == (2, 2, 3)
    assert list(trajectory.curr_obs["images"]) == ["front"]
    parts = trajectory.extract_intervene_traj() or []
    assert [p.curr_obs["images"]["front"].shape[0] for p in parts] == [1, 2]
    assert convert_trajectories_to_batch(builder.to_splited_trajectories(2))["curr_obs"]["images"]["front"].shape == (
        2,
        2,
        3,
    )


def test_a_not_a_number_that_was_not_done_does_not_spoil_what_was() -> None:
    builder = EmbodiedRolloutResult()
    builder.append_step_result(ChunkStepResult(actions=torch.full((1, 4), float("nan"))))
    builder.update_last_actions(torch.ones(1, 4), torch.tensor([1]))  # an integer flag counts too
    assert builder.actions[-1].tolist() == [[1, 1, 1, 1]]


def test_the_callers_dictionaries_are_left_alone() -> None:
    seen = {"states": torch.zeros(2, 1), "task_descriptions": ["a", "b"]}
    inputs = {"action": np.zeros((2, 6), np.float32)}
    builder = EmbodiedRolloutResult()
    builder.append_step_result(step(forward_inputs=inputs))
    builder.append_transitions(seen, seen)
    builder.update_last_actions(torch.ones(2, 6), torch.tensor([True, True]))
    assert list(seen) == ["states", "task_descriptions"]
    assert isinstance(inputs["action"], np.ndarray) and not inputs["action"].any()


def test_before_the_first_step_there_is_nothing_to_mark_or_replace() -> None:
    builder = EmbodiedRolloutResult()
    builder.update_last_actions(torch.ones(1, 2), torch.ones(1))
    builder.mark_last_step_with_intervene_flags(torch.ones(1))
    assert builder.to_trajectory().to_dict().keys() == {
        "max_episode_length",
        "model_weights_id",
        "forward_inputs",
        "curr_obs",
        "next_obs",
    }
    assert [t.max_episode_length for t in EmbodiedRolloutResult(max_episode_length=9).to_splited_trajectories(3)] == [
        9,
        9,
        9,
    ]


def test_clear_forgets_the_steps() -> None:
    builder = EmbodiedRolloutResult(max_episode_length=5)
    builder.append_step_result(step())
    builder.append_transitions({"a": torch.zeros(2)}, {"a": torch.zeros(2)})
    builder.clear()
    trajectory = builder.to_trajectory()
    assert trajectory.shape is None and trajectory.curr_obs == {} and trajectory.max_episode_length == 5


def test_arrays_are_taken_for_tensors() -> None:
    result = ChunkStepResult(
        actions=np.ones((2, 3), np.float32), rewards=np.zeros((2, 1)), forward_inputs={"a": {"b": np.zeros((2, 1))}}
    )
    assert isinstance(result.actions, torch.Tensor) and isinstance(result.forward_inputs["a"]["b"], torch.Tensor)


def test_step_rows() -> None:
    rows = np.arange(8)[:, None]
    assert step_rows("dones", rows, 6).reshape(-1).tolist() == [1, 2, 3, 5, 6, 7]
    assert step_rows("prev_values", rows, 6).reshape(-1).tolist() == [0, 1, 2, 4, 5, 6]
    assert step_rows("rewards", rows, 8) is rows
    for steps in (9, 5):
        with pytest.raises(
            SchemaError, match=rf"dones has 8 rows for {steps} steps; it may have one more for each rollout epoch"
        ):
            step_rows("dones", rows, steps)


# Errors


def wrong(builder: EmbodiedRolloutResult) -> EmbodiedRolloutResult:
    builder.append_step_result(step())
    return builder


def test_errors_name_the_field_and_say_what_to_do() -> None:
    cases: list[tuple[type[HiltError], str, Any]] = [
        (
            SchemaError,
            r"fields of one step have different numbers of environments \(actions 2, .*rewards 3\)",
            lambda: step(rewards=torch.ones(3, 2)),
        ),
        (SchemaError, "rewards is a single number", lambda: step(rewards=torch.tensor(1.0))),
        (SchemaError, "rewards is a list", lambda: step(rewards=[1.0, 2.0])),
        (SchemaError, "forward_inputs/task is a list", lambda: step(forward_inputs={"task": ["a"]})),
        (SchemaError, "forward_inputs is a list; pass a dictionary", lambda: step(forward_inputs=[1])),
        (
            SchemaError,
            "was given a dict; pass a ChunkStepResult",
            lambda: EmbodiedRolloutResult().append_step_result({}),
        ),  # type: ignore[arg-type]
        (SchemaError, "was given no next_obs", lambda: EmbodiedRolloutResult().append_transitions({})),
        (
            SchemaError,
            "curr_obs/name is a list",
            lambda: EmbodiedRolloutResult().append_transitions({"name": ["a"]}, {}),
        ),
        (
            SchemaError,
            r"intervene_flags has shape \(2, 4\) for actions of shape \(2, 6\)",
            lambda: wrong(EmbodiedRolloutResult()).mark_last_step_with_intervene_flags(torch.ones(2, 4)),
        ),
        (
            SchemaError,
            r"intervene_flags has shape \(3, 1\)",
            lambda: wrong(EmbodiedRolloutResult()).mark_last_step_with_intervene_flags(torch.ones(3)),
        ),
        (
            SchemaError,
            r"intervene_actions has shape \(2, 3\), the last actions have \(2, 6\)",
            lambda: wrong(EmbodiedRolloutResult()).update_last_actions(torch.ones(2, 3), torch.ones(2)),
        ),
        (ConfigError, "mode is 'most'; pass 'any' or 'all'", lambda: Trajectory().extract_intervene_traj("most")),
        (ConfigError, "split_size is 0", lambda: EmbodiedRolloutResult().to_splited_trajectories(0)),
        (SchemaError, "no field 'reward'; did you mean 'rewards'", lambda: Trajectory.from_dict({"reward": 1})),
    ]
    for kind, said, call in cases:
        with pytest.raises(kind, match=said):
            call()


def test_a_split_that_torch_would_shorten_is_refused() -> None:
    builder = EmbodiedRolloutResult()
    builder.append_step_result(step(4))
    with pytest.raises(
        ConfigError, match=r"4 environments do not make 3 trajectories of 2; .* to_splited_trajectories_by_sizes"
    ):
        builder.to_splited_trajectories(3)
    with pytest.raises(ConfigError, match=r"split_sizes are \[2, 1\], for 4 environments"):
        builder.to_splited_trajectories_by_sizes([2, 1])
    assert [t.rewards.shape[1] for t in builder.to_splited_trajectories_by_sizes([1, 0, 3])] == [1, 0, 3]  # type: ignore[union-attr]


def test_steps_that_do_not_fit_each_other_are_named() -> None:
    builder = EmbodiedRolloutResult()
    builder.append_step_result(step(rewards=torch.ones(2, 2)))
    builder.append_step_result(step(rewards=torch.ones(2, 1)))
    with pytest.raises(SchemaError, match=r"rewards has shape \(2, 1\) in step 1 and \(2, 2\) in step 0"):
        builder.to_trajectory()
    builder = EmbodiedRolloutResult()
    builder.append_transitions({"a": torch.ones(1)}, {})
    builder.append_transitions({"b": torch.ones(1)}, {})
    with pytest.raises(SchemaError, match="curr_obs/a is in step 0 but not in step 1"):
        builder.to_trajectory()
    builder = EmbodiedRolloutResult()
    builder.append_step_result(step(2))
    builder.append_transitions({"a": torch.ones(3, 1)}, {})
    with pytest.raises(SchemaError, match=r"different numbers of environments \(curr_obs/a 3, actions 2, .*\)"):
        builder.to_splited_trajectories(1)


def test_trajectories_that_do_not_fit_each_other_are_named() -> None:
    assert convert_trajectories_to_batch([]) == {}
    one, two = Trajectory(rewards=torch.ones(2, 1, 1)), Trajectory(rewards=torch.ones(3, 1, 1))
    with pytest.raises(
        SchemaError, match=r"rewards has the shapes \(2, 1, 1\), \(3, 1, 1\); only the second dimension"
    ):
        convert_trajectories_to_batch([one, two])
    two = Trajectory(rewards=torch.ones(2, 1, 1), curr_obs={"a": torch.ones(2, 1)})
    with pytest.raises(SchemaError, match="curr_obs/a is in some trajectories but not in number 0"):
        convert_trajectories_to_batch([one, two])
    three = Trajectory(rewards=torch.ones(2, 1, 1), curr_obs={"b": torch.ones(2, 1)})
    with pytest.raises(SchemaError, match="curr_obs/a is in some trajectories but not in number 1"):
        convert_trajectories_to_batch([two, three])
