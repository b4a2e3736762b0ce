"""Nested arrays, their spec, and what is said about a tree that does not fit."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, MissingFieldError, SchemaError
from hilt.core.tree import ArraySpec, Spec, equal, flatten, unflatten

SPEC = Spec(
    {
        "observations": {
            "images": {"wrist_1": (np.uint8, (128, 128, 3))},
            "state": ArraySpec(np.dtype(np.float32), (3,), finite=True),
        },
        "actions": (np.float32, (2,)),
        "rewards": (np.float32, ()),
        "dones": (bool, ()),
        "count": (np.uint8, ()),
    }
)


def step(**changes: Any) -> dict[str, Any]:
    """A step that fits, with these leaves changed; a path's slashes are written as two underscores."""
    leaves = {
        "observations/images/wrist_1": np.zeros((128, 128, 3), np.uint8),
        "observations/state": np.arange(3, dtype=np.float32),
        "actions": np.zeros(2, np.float32),
        "rewards": np.float32(1),
        "dones": np.False_,
        "count": np.uint8(7),
    }
    leaves |= {name.replace("__", "/"): value for name, value in changes.items()}
    return unflatten(leaves)


def trajectory(length: int = 4, width: int = 2) -> dict[str, Any]:
    return unflatten(
        {path: np.broadcast_to(leaf, (length, width, *np.shape(leaf))) for path, leaf in flatten(step()).items()}
    )


def refusal(tree: Any, spec: Spec = SPEC, **options: Any) -> str:
    with pytest.raises(SchemaError) as caught:
        spec.check(tree, **options)
    return str(caught.value)


# -- one element
# --------------------------------------------------------------------------------------------------------------------


def test_tree_check_returns_the_order_of_the_spec():
    tree = step()
    leaves = SPEC.check({key: tree[key] for key in reversed(tree)})
    assert all(a is b for a, b in zip(leaves, (flatten(tree)[path] for path in SPEC), strict=True))


def test_wrong_type_and_shape_the_text_of_the_issue():
    said = refusal(step(observations__images__wrist_1=np.zeros((128, 128), np.float32)))
    assert said == "observations/images/wrist_1: expected uint8 (128, 128, 3), got float32 (128, 128)."


def test_tree_check_wrong_type_reports_how_to_convert():
    said = refusal(step(actions=np.zeros(2)))
    assert said == "actions: expected float32 (2,), got float64 (2,). Convert it with .astype(np.float32)."


def test_wrong_shape_is_refused_though_numpy_would_broadcast():
    """HIL-SERL's buffer writes (1,) into every element of a (2,) action without a word."""
    assert refusal(step(actions=np.zeros(1, np.float32))) == "actions: expected float32 (2,), got float32 (1,)."
    assert refusal(step(rewards=np.zeros(1, np.float32))) == "rewards: expected float32 (), got float32 (1,)."


def test_missing_with_a_suggestion():
    tree = step()
    tree["reward"] = tree.pop("rewards")
    with pytest.raises(MissingFieldError) as caught:
        SPEC.check(tree)
    assert str(caught.value) == "rewards: expected float32 (), got nothing; did you mean 'reward'? Add this field."
    assert isinstance(caught.value, KeyError)


def test_missing_without_anything_near():
    tree = step()
    del tree["observations"]["images"]
    assert refusal(tree) == "observations/images/wrist_1: expected uint8 (128, 128, 3), got nothing. Add this field."
    assert refusal(step() | {"observations": 3}).startswith(
        "observations/images/wrist_1: expected uint8 (128, 128, 3), got nothing"
    )


def test_extra_with_a_suggestion():
    said = refusal(step(observations__stat=np.zeros(3, np.float32)))
    assert (
        said
        == "observations/stat: not a field of this schema; did you mean 'observations/state'? Remove it or declare it."
    )
    assert refusal(step(zzz=1)) == "zzz: not a field of this schema. Remove it or declare it."


def test_an_extra_mapping_is_named_even_when_it_is_empty():
    assert refusal(step() | {"infos": {}}) == "infos: not a field of this schema. Remove it or declare it."
    assert refusal(step() | {"infos": {"a": {}}}) == "infos/a: not a field of this schema. Remove it or declare it."
    assert (
        refusal(step() | {"infos": {"a": {"b": 1}}})
        == "infos/a/b: not a field of this schema. Remove it or declare it."
    )


def test_a_mapping_where_an_array_is_expected():
    assert refusal(step() | {"actions": {"x": 1}}) == "actions: expected float32 (2,), got a mapping with x."
    assert refusal(step() | {"actions": {}}) == "actions: expected float32 (2,), got a mapping with no keys."


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_tree_check_not_finite(bad: float):
    said = refusal(step(observations__state=np.array([0, bad, 1], np.float32)))
    assert said == f"observations/state: expected finite numbers, got {bad} at (1,). Drop this step or mend its source."
    SPEC.check(step(rewards=np.float32(bad)))  # nobody forbade it there


def test_a_scalar_that_is_not_finite():
    spec = Spec({"x": ArraySpec(np.dtype(np.float32), (), finite=True)})
    for value in (float("nan"), np.float32("nan"), np.array(np.nan, np.float32)):
        assert (
            refusal({"x": value}, spec)
            == "x: expected finite numbers, got nan at (). Drop this step or mend its source."
        )


@pytest.mark.parametrize("value", [1, 1.0, np.float64(1), np.int32(1), np.array(1.0), np.uint8(1)])
def test_scalars_of_another_width_are_taken(value: Any):
    leaf = dict(zip(SPEC, SPEC.check(step(rewards=value)), strict=True))["rewards"]
    assert (leaf.dtype, leaf.shape, float(leaf)) == (np.float32, (), 1.0)


def test_scalars_of_another_kind_are_not():
    assert refusal(step(count=1.5)) == "count: expected uint8 (), got float64 (). Convert it with .astype(np.uint8)."
    assert refusal(step(dones=1)) == "dones: expected bool (), got int64 (). Convert it with .astype(np.bool)."
    assert "which is not an array of numbers" in refusal(step(rewards=None))
    assert refusal(step(rewards="one")).startswith("rewards: expected float32 (), got <U3 ()")


@pytest.mark.parametrize("value", [300, -1])
def test_a_number_that_does_not_fit(value: int):
    assert refusal(step(count=value)) == f"count: expected uint8, got {value}, which does not fit into it."


def test_lists_of_uneven_length_are_refused_by_name():
    assert refusal(step(actions=[[1], [1, 2]])).startswith(
        "actions: expected float32 (2,), got list, which is not an array of numbers"
    )


def test_cast_takes_another_width_of_the_same_kind():
    leaves = dict(zip(SPEC, SPEC.check(step(actions=np.array([1.5, 2.5]), rewards=True), cast=True), strict=True))
    assert leaves["actions"].dtype == np.float32 and leaves["actions"].tolist() == [1.5, 2.5]
    assert leaves["rewards"].dtype == np.float32 and float(leaves["rewards"]) == 1.0
    said = refusal(step(actions=np.array([1, 2])), cast=True)
    assert said == "actions: expected float32 (2,), got int64 (2,). Convert it with .astype(np.float32)."
    assert refusal(step(actions=np.zeros(3)), cast=True) == "actions: expected float32 (2,), got float64 (3,)."


def test_cast_names_the_number_that_does_not_fit():
    spec = Spec({"x": (np.uint8, (3,))})
    assert (
        refusal({"x": np.array([1, 2, 300])}, spec, cast=True)
        == "x: expected uint8, got 300, which does not fit into it."
    )


def test_without_cast_an_array_of_another_width_is_refused():
    assert "float64" in refusal(step(actions=np.zeros(2)))


# -- trajectories
# -------------------------------------------------------------------------------------------------------------------


def test_a_trajectory_gives_its_axes():
    axes, leaves = SPEC.check_batch(trajectory(4, 2), leading=2)
    assert axes == (4, 2)
    assert [leaf.shape[2:] for leaf in leaves] == [spec.shape for spec in SPEC.values()]


def test_axes_that_differ_name_both_fields():
    tree = trajectory(4, 2) | {"rewards": np.zeros((3, 2), np.float32)}
    said = "rewards: expected leading axes (4, 2) as observations/images/wrist_1 has, got (3, 2)."
    with pytest.raises(SchemaError, match=re.escape(said)):
        SPEC.check_batch(tree, leading=2)


def test_a_trajectory_without_its_axes():
    spec = Spec({"x": (np.float32, (3,))})
    with pytest.raises(SchemaError, match=re.escape("x: expected 2 leading axes before (3,), got shape (3,).")):
        spec.check_batch({"x": np.zeros(3, np.float32)}, leading=2)


def test_tree_check_of_a_trajectory_names_types_and_shapes():
    tree = trajectory() | {"actions": np.zeros((4, 2, 3), np.float32)}
    with pytest.raises(SchemaError, match=re.escape("actions: expected float32 (4, 2, 2), got float32 (4, 2, 3).")):
        SPEC.check_batch(tree, leading=2)
    tree = trajectory()
    tree["observations"]["state"] = np.full((4, 2, 3), np.nan, np.float32)
    with pytest.raises(
        SchemaError, match=re.escape("observations/state: expected finite numbers, got nan at (0, 0, 0).")
    ):
        SPEC.check_batch(tree, leading=2)
    with pytest.raises(SchemaError, match="zzz: not a field"):
        SPEC.check_batch(trajectory() | {"zzz": np.zeros((4, 2))}, leading=2)
    with pytest.raises(SchemaError, match="rewards: expected float32"):
        SPEC.check_batch(trajectory() | {"rewards": [[1, 2], [3]]}, leading=2)


# -- specs
# ----------------------------------------------------------------------------------------------------------------------


def test_spec_of_an_example_and_through_json():
    assert dict(Spec.of(step())) == {path: ArraySpec(spec.dtype, spec.shape) for path, spec in SPEC.items()}
    assert dict(Spec.of(trajectory(), leading=2)) == dict(Spec.of(step()))
    assert dict(Spec.from_json(SPEC.to_json())) == dict(SPEC)
    assert len(Spec.from_json({})) == 0


def test_an_example_that_cannot_be_stored_is_named():
    with pytest.raises(ConfigError, match=re.escape("infos/why: dtype object cannot be stored")):
        Spec.of({"a": np.zeros(2), "infos": {"why": None}})


def test_difference():
    other = Spec({"a": (np.float32, (2,)), "b": (np.uint8, ())})
    assert Spec({"a": (np.float32, (3,)), "c": (bool, ())}).difference(other) == [
        "c: removed (was bool ())",
        "b: added (uint8 ())",
        "a: float32 (3,) became float32 (2,)",
    ]
    assert other.difference(other) == []
    strict = Spec({"a": ArraySpec(np.dtype(np.float32), (2,), finite=True), "b": (np.uint8, ())})
    assert other.difference(strict) == ["a: finite=False became finite=True"]


def test_an_unknown_path_lists_the_known_ones():
    with pytest.raises(MissingFieldError) as caught:
        SPEC["action"]
    assert str(caught.value).startswith(
        "action: no such field; did you mean 'actions'? Fields: observations/images/wrist_1, "
    )


def test_array_spec_refuses_what_cannot_be_stored():
    with pytest.raises(ConfigError, match="dtype object cannot be stored"):
        ArraySpec(np.dtype(object))
    with pytest.raises(ConfigError, match="negative axis"):
        ArraySpec(np.dtype(np.uint8), (-1, 2))


def test_a_default_is_a_plain_value_of_the_column():
    spec = ArraySpec(np.dtype(np.float32), (), default=np.float32(0.5))
    assert type(spec.default) is float
    assert ArraySpec.from_json(spec.to_json()) == spec
    with pytest.raises(ConfigError, match="default 300: expected a value that fits into uint8"):
        ArraySpec(np.dtype(np.uint8), default=300)
    with pytest.raises(ConfigError, match="default 'x'"):
        ArraySpec(np.dtype(np.uint8), default="x")  # type: ignore[arg-type]


def test_a_leaf_and_a_subtree_of_one_name():
    for leaves in ({"a": (np.uint8, ()), "a/b": (np.uint8, ())}, {"a/b": (np.uint8, ()), "a": (np.uint8, ())}):
        with pytest.raises(SchemaError, match="a: a field and a subtree of the same name"):
            Spec(leaves)


# -- paths
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "a/b", 3, None])
def test_keys_that_cannot_be_paths(key: Any):
    with pytest.raises(SchemaError, match="keys are non-empty strings without '/'"):
        flatten({"x": {key: 1}})


NAMES = st.text(st.characters(blacklist_characters="/", min_codepoint=33), min_size=1, max_size=4)
TREES = st.recursive(
    st.integers(), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3), max_leaves=8
).filter(lambda tree: isinstance(tree, dict))


@given(TREES)
def test_flatten_and_unflatten_undo_each_other(tree: dict[str, Any]):
    assert unflatten(flatten(tree)) == tree


def test_unflatten_leaves_what_it_was_given_alone():
    inner = {"x": 1}
    assert unflatten({"a": inner, "a/y": 2}) == {"a": {"x": 1, "y": 2}}
    assert inner == {"x": 1}


# -- equal
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.uint8, bool])
@pytest.mark.parametrize("shape", [(), (3,), (2, 4), (0, 3)])
def test_equal(dtype: Any, shape: tuple[int, ...]):
    a = np.ones(shape, dtype)
    assert equal(a, a.copy())
    assert not equal(a, np.ones((*shape, 1), dtype))
    assert not equal(a, np.ones(shape, np.int16))
    if a.size:
        b = a.copy()
        b[(-1,) * a.ndim] = 0
        assert not equal(a, b)


def test_equal_compares_bytes():
    assert equal(np.array([np.nan]), np.array([np.nan]))
    assert not equal(np.array([0.0]), np.array([-0.0]))
    assert equal(np.arange(12).reshape(3, 4).T, np.ascontiguousarray(np.arange(12).reshape(3, 4).T))
    assert not equal(np.arange(12).reshape(3, 4).T, np.zeros((4, 3), int))
