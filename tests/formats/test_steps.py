"""N steps of RLDS as N - 1 transitions, and back."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import SchemaError
from hilt.core.tree import flatten, unflatten
from hilt.formats.episodes import Episode, Notes, StoredSteps, transitions
from hilt.formats.steps import to_episode, to_steps
from tests.effort import rounds
from tests.formats.rlds_steps import episode, step


def read(rlds_episode: dict[str, Any], **options: Any) -> tuple[Episode, dict[str, int]]:
    notes = Notes()
    found = to_episode(rlds_episode, notes, **options)
    assert found is not None
    return found, dict(notes.counts)


def same(a: Any, b: Any) -> None:
    """Columns with the same names, types and values."""
    a, b = flatten(a), flatten(b)
    assert set(a) == set(b)
    for path in a:
        assert a[path].dtype == b[path].dtype and a[path].shape == b[path].shape, path
        assert a[path].tobytes() == b[path].tobytes(), path


# Steps to transitions


def test_steps_become_transitions_without_copies() -> None:
    columns = {
        "observation": {"image": np.zeros((5, 8, 8, 3), np.uint8)},
        "action": np.ones((5, 2)),
        "reward": np.arange(5),
    }
    found, notes = read({"steps": StoredSteps(columns)})
    assert np.shares_memory(found.columns["observations"]["image"], found.columns["next_observations"]["image"])
    assert found.columns["rewards"].dtype == np.float32 and found.columns["rewards"].tolist() == [0, 1, 2, 3]
    assert found.columns["actions"].dtype == np.float64 and found.columns["actions"].shape == (4, 2)
    assert found.columns["truncated"].tolist() == [False, False, False, True]  # without flags it is taken for whole
    assert notes == {"the last step's action and reward belong to no transition: kept as the fact last_step": 1}


@pytest.mark.parametrize(
    ("terminal", "last", "ends"),
    [(True, True, (True, False)), (False, True, (False, True)), (False, False, (False, False))],
)
def test_how_an_episode_ends(terminal: bool, last: bool, ends: tuple[bool, bool]) -> None:
    found, _ = read({"steps": [step(0, first=True), step(1), step(2, last=last, terminal=terminal)]})
    assert (found.columns["terminated"][-1], found.columns["truncated"][-1]) == ends
    assert not found.columns["terminated"][0] and not found.columns["truncated"][0]


def test_a_terminal_step_inside_is_no_end() -> None:
    found, notes = read({"steps": [step(0, first=True), step(1, terminal=True), step(2, last=True)]})
    assert (
        not found.columns["terminated"].any()
        and notes["is_terminal on a step that is not the last: not taken for an end"] == 1
    )


def test_a_step_alone_is_no_transition() -> None:
    notes = Notes()
    assert to_episode(episode(0, 1), notes) is None and to_episode({"steps": []}, notes) is None
    assert notes.counts == {"an episode of one step has no transition": 2}


def test_the_last_step_can_be_kept() -> None:
    found, notes = read(episode(0, 3), keep_last=True)
    assert found.columns["rewards"].tolist() == [0, 1, 2] and found.columns["terminated"].tolist() == [
        False,
        False,
        True,
    ]
    assert found.columns["observations"][:, 0].tolist() == [0, 1, 2] and found.columns["next_observations"][
        :, 0
    ].tolist() == [1, 2, 2]
    assert "last_step" not in found.facts and notes == {}
    (single, _) = read(episode(7, 1, terminal=False), keep_last=True)
    assert single.columns["rewards"].tolist() == [7] and single.columns["truncated"].tolist() == [True]


def test_what_a_last_step_says_is_kept_and_its_nan_is_not() -> None:
    made = episode(0, 3)
    made["steps"][-1] |= {"action": np.float32(np.nan), "reward": np.float32(1), "discount": np.float32(0)}
    assert read(made)[0].facts["last_step"] == {"action": None, "reward": 1.0, "discount": 0.0}
    for value in (np.float32(np.nan), np.float32(0)):
        made["steps"][-1] |= {"action": value, "reward": value}
        found, notes = read(made)
        assert found.facts == {} and notes == {}


def test_texts_metadata_and_success_become_facts() -> None:
    made = episode(
        0,
        3,
        episode_id=np.int64(4),
        episode_metadata={"file_path": b"a/b.h5", "score": np.float32(np.nan), "success": np.bool_(True)},
    )
    for i, one in enumerate(made["steps"]):
        one["observation"] = {
            "state": np.zeros(2, np.float32),
            "natural_language_instruction": "pick 杯".encode(),
            "tag": f"t{min(i, 1)}",
        }
    found, _ = read(made)
    assert list(found.columns["observations"]) == ["state"]
    assert found.facts["language_instruction"] == "pick 杯" and found.facts["success"] is True
    assert found.facts["texts"] == {"observation/tag": {"texts": ["t0", "t1"], "begins": [0, 1]}}
    assert found.facts["episode_metadata"] == {"episode_id": 4, "file_path": "a/b.h5", "score": None, "success": True}
    json.dumps(found.facts, allow_nan=False)


def test_success_from_the_steps() -> None:
    made = episode(0, 3)
    for i, one in enumerate(made["steps"]):
        one["is_success"] = np.bool_(i == 2)
    found, _ = read(made)
    assert found.facts["success"] is True and found.columns["is_success"].tolist() == [False, False]


def test_interventions_are_the_humans() -> None:
    made = episode(0, 4)
    for i, one in enumerate(made["steps"]):
        one["is_intervention"] = np.bool_(i == 1)
    assert read(made)[0].columns["source"].tolist() == [0, 1, 0]


def test_names_that_mean_something_else_in_a_log() -> None:
    made = episode(0, 3)
    for one in made["steps"]:
        one |= {"source": np.int64(9), "terminated": np.float32(3), "rewards": np.zeros(2), "mine": {"x": np.int8(1)}}
    found, _ = read(made)
    assert found.columns["source"].tolist() == [2, 2] and found.columns["terminated"].tolist() == [False, True]
    assert found.columns["extra"]["source"].tolist() == [9, 9] and set(found.columns["extra"]) == {
        "source",
        "terminated",
        "rewards",
    }
    assert found.columns["mine"]["x"].tolist() == [1, 1]


def test_what_has_no_fixed_shape_is_left_out_with_a_note() -> None:
    made = episode(0, 3)
    for i, one in enumerate(made["steps"]):
        one["observation"] = {"state": np.zeros(2), "cloud": np.zeros((i + 1, 3))}
        del one["reward"]
    found, notes = read(made)
    assert list(found.columns["observations"]) == ["state"] and found.columns["rewards"].tolist() == [0, 0]
    assert notes["observation/cloud: its shape changes from step to step, not carried over"] == 1
    assert notes["no rewards in this dataset: 0 everywhere"] == 1


def test_only_first_steps_are_no_transition() -> None:
    notes = Notes()
    assert to_episode({"steps": [step(i, first=True) for i in range(4)]}, notes) is None
    assert notes.counts == {"an episode of one step has no transition": 1}


def test_a_last_step_of_another_width_does_not_cost_the_column() -> None:
    made = episode(0, 3)
    made["steps"][-1] |= {"action": 0.0, "reward": np.float64(0)}
    found, _ = read(made)
    assert found.columns["actions"].dtype == np.float32 and found.columns["rewards"].tolist() == [0, 1]


def test_steps_may_be_columns_or_a_generator() -> None:
    made = episode(0, 3)["steps"]
    same(
        read({"steps": {k: np.stack([s[k] for s in made]) for k in made[0]}})[0].columns,
        read({"steps": iter(made)})[0].columns,
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"is_first": np.zeros(2, bool)}, r"is_first: expected one number for each of 3 steps, got shape \(3, 2\)"),
        ({"is_last": {"a": np.False_}}, r"is_last: expected one number for each of 3 steps, got shape \(\)"),
    ],
)
def test_flags_that_are_none(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        read({"steps": [{**one, **changes} for one in episode(0, 3)["steps"]]})


def test_steps_that_are_no_dictionaries() -> None:
    with pytest.raises(SchemaError, match="steps: expected a dictionary of arrays for each step, got int"):
        read({"steps": [1, 2]})


def test_odd_columns_and_metadata_are_carried() -> None:
    made = episode(0, 3, episode_metadata=b"free text", more={"x": np.arange(2)})
    for one in made["steps"]:
        one |= {"extra": np.int8(1), "source": np.int8(2), "reward": {"a": np.float64(1), "b": np.int8(2)}}
    found, _ = read(made)
    assert set(found.columns["extra"]) == {"extra", "source"} and found.facts["episode_metadata"] == {
        "episode_metadata": "free text",
        "more": {"x": [0, 1]},
    }
    assert found.columns["rewards"]["a"].dtype == np.float64 and found.columns["rewards"]["b"].dtype == np.float32


# And back

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
)


def random_episode(seed: int, cuts: bool = False) -> Episode:
    """Columns of every type, names that RLDS uses for something else, facts, and,
    if asked for, gaps and ends inside."""
    rng = np.random.default_rng(seed)
    length = int(rng.integers(1, 9))

    def column(*shape: int, dtype: str | None = None) -> Any:
        dtype = dtype or str(rng.choice(DTYPES))
        count = (length + 1, *shape)
        if dtype.startswith("float"):
            return np.where(rng.random(count) < 0.1, np.nan, rng.normal(size=count)).astype(dtype)
        return (
            rng.integers(0, 2, count).astype(bool)
            if dtype == "bool"
            else rng.integers(0, 256, (*count, 8), np.uint8).view(dtype)[..., 0]
        )

    seen = (
        {"image": column(4, 5, 3, dtype="uint8"), "inner": {"a": column(3), "b": column()}}
        if rng.random() < 0.7
        else column(3)
    )
    columns: dict[str, Any] = transitions(seen)
    rest = {
        "actions": column(2),
        "rewards": column(dtype="float32"),
        "policy_version": column(dtype="int64"),
        "is_first": column(),
        "mine": {"x": column()},
    }
    rest |= {"discount": column(dtype="float32")} if rng.random() < 0.5 else {}
    columns |= {
        name: value[:-1] if not isinstance(value, dict) else {k: v[:-1] for k, v in value.items()}
        for name, value in rest.items()
    }
    columns |= {
        "source": rng.integers(0, 4, length, np.uint8),
        "terminated": np.zeros(length, bool),
        "truncated": np.zeros(length, bool),
    }
    columns["terminated"][-1], columns["truncated"][-1] = rng.random() < 0.4, rng.random() < 0.4
    if cuts:
        columns["terminated"] |= rng.random(length) < 0.3
        after = {
            path: values.copy() for path, values in flatten(columns).items() if path.startswith("next_observations")
        }
        first = next(iter(after.values()))
        first[rng.random(length) < 0.3] = 1
        columns |= unflatten(after)
    facts: dict[str, Any] = {
        "success": bool(rng.integers(2)),
        "fps": 12.5,
        "episode_metadata": {"file": "a", "n": 3, "x": None},
    }
    facts |= {
        "language_instruction": [{"texts": ["a", "b"], "begins": [0, 1]} if length > 1 else "a", "pick 杯", None][
            rng.integers(3)
        ]
    }
    return Episode(columns, {name: value for name, value in facts.items() if value is not None})


@settings(deadline=None, max_examples=rounds(40, 500))
@given(st.integers(0, 2**32))
def test_an_episode_comes_back_as_it_was(seed: int) -> None:
    made, notes = random_episode(seed), Notes()
    (piece,) = to_steps(made, notes)
    steps = piece["steps"]
    assert len(steps) == len(made) + 1 and not notes.counts
    assert steps.columns["is_first"].tolist() == [True] + [False] * len(made)
    assert steps.columns["is_last"].tolist() == [False] * len(made) + [True]
    assert steps.columns["is_terminal"].tolist() == [False] * len(made) + [made.columns["terminated"][-1]]
    back = to_episode(piece, Notes())
    assert back is not None and back.facts == made.facts
    same(back.columns, made.columns)


@settings(deadline=None, max_examples=rounds(30, 500))
@given(st.integers(0, 2**32))
def test_an_episode_with_gaps_and_ends_inside_comes_in_pieces(seed: int) -> None:
    made, notes = random_episode(seed, cuts=True), Notes()
    pieces = to_steps(made, notes)
    assert sum(notes.counts.values()) == len(pieces) - 1
    back = [to_episode(piece, Notes()) for piece in pieces]
    assert all(one is not None for one in back)
    joined = {
        path: np.concatenate([flatten(one.columns)[path] for one in back if one]) for path in flatten(made.columns)
    }
    same(unflatten(joined), made.columns)
    assert [one.facts.get("success") for one in back if one] == [None] * (len(back) - 1) + [made.facts["success"]], (
        "one outcome stays one"
    )


def test_the_pieces_of_texts_that_change() -> None:
    made = Episode({"rewards": np.zeros(4, np.float32), "terminated": np.array([0, 1, 0, 1], bool)}, {})
    made.facts["language_instruction"] = {"texts": ["a", "b", "c"], "begins": [0, 1, 3]}
    first, second = to_steps(made, Notes())
    assert first["steps"].columns["language_instruction"].tolist() == [b"a", b"b", b"b"]
    assert second["steps"].columns["language_instruction"].tolist() == [b"b", b"c", b"c"]
    assert [to_episode(p, Notes()).facts["language_instruction"] for p in (first, second)] == [  # type: ignore[union-attr]
        {"texts": ["a", "b"], "begins": [0, 1]},
        {"texts": ["b", "c"], "begins": [0, 1]},
    ]


@pytest.mark.parametrize(
    "fact", [["a"], {"texts": []}, {"texts": ["a"], "begins": [0, 7]}, {"texts": ["a", "b"], "begins": [0, 9]}, 3]
)
def test_an_instruction_of_another_shape_does_no_harm(fact: Any) -> None:
    made = Episode({"rewards": np.zeros(2, np.float32)}, {"language_instruction": fact})
    (piece,) = to_steps(made, Notes())
    assert len(piece["steps"].columns["language_instruction"]) == 3
    back = to_episode(piece, Notes())
    assert back is not None and back.facts == made.facts


def test_what_a_last_step_said_is_written_again() -> None:
    found, _ = read(episode(0, 3, terminal=False))
    (piece,) = to_steps(found, Notes())
    assert (
        piece["steps"][2]["action"] == 20 and piece["steps"][2]["reward"] == 2 and piece["steps"][2]["discount"] == 0.5
    )
    back = to_episode(piece, Notes())
    assert back is not None and back.facts == found.facts


def test_columns_without_observations_or_without_next_ones() -> None:
    for columns in (
        {"rewards": np.ones(3)},
        {"observations": np.ones((3, 2)), "rewards": np.ones(3)},
        {"observations": {"a": np.ones(3)}, "next_observations": {"b": np.ones(3)}},
    ):
        (piece,) = to_steps(Episode(columns), Notes())
        back = to_episode(piece, Notes())
        assert back is not None
        same(back.columns, columns)


@pytest.mark.parametrize(
    "mark",
    [
        "",
        "[]",
        "{}",
        '{"columns": 3, "facts": {}, "paired": true}',
        '{"columns": {"action": ["x"]}, "facts": {}, "paired": true}',
        '{"columns": {"reward": "rewards", "gone": "terminated"}, "facts": {}, "paired": false}',
        '{"columns": {"nothing": "x"}, "facts": {}, "paired": true}',
        '{"columns": {}, "facts": [], "paired": 1}',
        "[" * 100_000,
    ],
)
def test_metadata_that_only_looks_like_ours(mark: str) -> None:
    found, _ = read(episode(0, 3, episode_metadata={"hilt": mark.encode()}))
    assert found.columns["rewards"].tolist() == [0, 1] and found.facts["episode_metadata"]["hilt"] == mark
