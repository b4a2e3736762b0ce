"""Requests by our names and by openpi's, and what is wrong with one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import HiltError
from hilt.policies.base import ObservedFields
from hilt.serving import pack, unpack
from hilt.serving.observation_names import EXTRAS, openpi_name, our_name, read_request
from tests.effort import rounds
from tests.serving.served_toy import STATE, seen

FIELDS = ObservedFields(("full_image", "wrist_image"), STATE)


@pytest.mark.parametrize("name", ["full_image", "wrist_image", "left_wrist", "state", "instruction"])
def test_names_go_there_and_back(name: str):
    assert our_name(openpi_name(name)) == name == our_name(name)


def test_both_names_give_the_same_observation():
    by_openpi = seen(2.0)
    by_ours = {our_name(name): value for name, value in by_openpi.items()}
    assert set(by_ours) == {"full_image", "wrist_image", "state", "instruction"}
    for message in (by_openpi, by_ours):
        request = read_request(message, FIELDS)
        assert request.observation.keys() == by_ours.keys() and request.observation["instruction"] == "do it"
        np.testing.assert_array_equal(request.observation["state"], by_ours["state"])
        assert (request.sample, request.temperature) == (False, 1.0)


def test_how_actions_are_drawn_is_the_requests_or_the_servers():
    assert read_request(seen(), FIELDS, sample=True).sample
    request = read_request(seen(sample=False, temperature=0.5), FIELDS, sample=True)
    assert (request.sample, request.temperature) == (False, 0.5)


def test_a_picture_that_the_policy_does_not_look_at_is_left_out():
    assert "left" not in read_request(seen(**{"observation/left": np.zeros(3)}), FIELDS).observation


def test_a_state_of_doubles_becomes_floats():
    state = read_request(seen(**{"observation/state": np.ones(STATE)}), FIELDS).observation["state"]
    assert state.dtype == np.float32


def test_one_picture_is_enough_for_a_policy_that_masks_the_others():
    some = FIELDS._replace(all_cameras=False)
    message = seen(**{"observation/wrist_image": None})
    assert "wrist_image" not in read_request(message, some).observation
    with pytest.raises(HiltError, match="no 'full_image'"):
        read_request(seen(**{"observation/wrist_image": None, "observation/image": None}), some)


def test_what_is_not_known_of_a_policy_is_left_to_it():
    message = {"prompt": "x", "observation/odd": np.zeros((2, 2))}
    assert read_request(message, None).observation.keys() == {"instruction", "odd"}


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-5, 5) | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
arrays = st.sampled_from([np.zeros(s, t) for s in ((), (4,), (8, 8, 3), (0,)) for t in ("u1", "f4", "?", "i8")])


@settings(max_examples=rounds(100, 5000))
@given(st.dictionaries(st.sampled_from([*seen(), *EXTRAS, "full_image", "other"]), values | arrays))
def test_any_request_is_read_or_refused_with_one_line(changes: dict[str, Any]):
    for message in (changes, {**seen(), **changes}):
        try:
            assert read_request(unpack(pack(message)), FIELDS).observation["state"].dtype == np.float32
        except HiltError as error:
            assert "\n" not in str(error)


STATE_NAME, IMAGE = "observation/state", "observation/image"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ([1, 2], "a request is a list; expected one map"),
        ({b"x": 1}, "a request is a dict; expected one map of names"),
        (
            seen(prompt=None),
            r"no 'instruction' \(openpi: 'prompt'\), which the policy looks at; it has 'observation/im",
        ),
        (seen(prompt=b"x"), "'prompt' is a bytes; expected a text"),
        (seen(**{IMAGE: None}), r"no 'full_image' \(openpi: 'observation/image'\)"),
        (seen(full_image=np.zeros((8, 8, 3), np.uint8)), "'observation/image' and 'full_image' are two names of one"),
        (
            seen(**{IMAGE: np.zeros((8, 8, 3))}),
            r"'observation/image' is float64 \[8, 8, 3\]; expected a picture, uint8",
        ),
        (seen(**{IMAGE: np.zeros((3, 8, 8), np.uint8)}), r"uint8 \[3, 8, 8\]; expected a picture, uint8 \[H, W, 3\]"),
        (seen(**{IMAGE: np.zeros((0, 8, 3), np.uint8)}), r"uint8 \[0, 8, 3\]; expected"),
        (seen(**{IMAGE: [1, 2]}), "is a list; expected a picture"),
        (seen(**{STATE_NAME: None}), r"no 'state' \(openpi: 'observation/state'\)"),
        (
            seen(**{STATE_NAME: np.zeros(3, np.float32)}),
            r"'observation/state' is float32 \[3\]; expected floating \[4\]",
        ),
        (seen(**{STATE_NAME: np.zeros(4, np.int64)}), r"int64 \[4\]; expected floating \[4\]"),
        (seen(math.nan), "'observation/state' has nan at place 0; expected finite numbers"),
        (seen(**{STATE_NAME: np.full(4, 1e300)}), "has 1e.300 at place 0; expected finite"),
        (seen(protocol=2), "of protocol 2; this server speaks 1"),
        (seen(sample="yes"), "'sample' is a str; expected true or false"),
        (seen(frozen=1), "'frozen' was given without 'prefix'"),
        (
            seen(prefix=np.zeros(3), frozen=1),
            r"'prefix' is float64 \[3\]; expected actions, floating \[n, action_dim\]",
        ),
        (seen(prefix=np.zeros((2, 2))), "'frozen' is None; expected a whole number from 0 to 2"),
        (seen(temperature=0), "'temperature' is 0; expected a number above 0"),
        (seen(temperature=True), "'temperature' is True; expected a number above 0"),
    ],
)
def test_what_is_wrong_with_a_request_is_one_sentence(message: Any, expected: str):
    with pytest.raises(HiltError, match=expected) as raised:
        read_request(message, FIELDS)
    assert "\n" not in str(raised.value)
