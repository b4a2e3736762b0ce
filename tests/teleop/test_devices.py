"""Names of devices, and what all keyboards share."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.teleop.devices import DEVICES, EVENTS, KEYS, acting, arms_and_gripper, motion_of_keys, open_device
from tests.teleop.played import Noting, Played


def test_an_unknown_device_lists_the_known():
    with pytest.raises(
        UnknownNameError, match=r"no device named 'joypad'.*: browser, gamepad, keyboard, .*, script, spacemouse"
    ):
        open_device("joypad")


def test_a_device_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(DEVICES, "mine", Played)
    assert open_device("mine", readings=[]).name == "played"
    assert open_device("tests.teleop.played:Played", readings=[]).name == "played"
    for wrong in ("tests.teleop.played:Absent", "no_such_module:Played"):
        with pytest.raises(ConfigError, match=f"the device '{wrong}' cannot be imported: "):
            open_device(wrong)
    (tmp_path / "at_hand.py").write_text("from tests.teleop.played import Played\n")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    monkeypatch.chdir(tmp_path)
    assert open_device("at_hand:Played", readings=[]).name == "played", "a file in the current folder"


def test_open_device_reports_wrong_names_and_options():
    with pytest.raises(ConfigError, match=r"the device 'builtins:dict' is {}: expected a hilt.teleop.devices.Device"):
        open_device("builtins:dict")
    with pytest.raises(
        ConfigError, match=r"the device keyboard cannot be made with the options {'speed': 'abc'}: .* Correct them"
    ):
        open_device("keyboard", speed="abc")
    with pytest.raises(ConfigError, match="operator is 'yes': expected true"):
        open_device("script", operator="yes")


def test_keys():
    assert motion_of_keys(["w", "arrowleft", "q", "nothing"])[0].tolist() == [1, 1, -1, 0, 0, 0]
    assert motion_of_keys(["w", "s", "j"])[0].tolist() == [0, 0, 0, 0, 0, 1]
    assert [motion_of_keys(keys)[1] for keys in (["c"], ["v"], ["c", "v"])] == [-1, 1, 0]
    assert set(KEYS.values()) >= {*EVENTS, "open", "close", "arm"}


def test_acting_follows_hil_serls_rule():
    assert [acting(np.array([value, 0, 0, 0, 0, 0]), 0) for value in (0, 0.001, 0.0011, -0.5)] == [
        False,
        False,
        True,
        True,
    ]
    assert acting(np.zeros(6), -1)


def test_arms_and_grippers_follow_from_the_length_of_actions():
    assert {length: arms_and_gripper(Noting(length)) for length in (4, 6, 7, 12, 14)} == {
        4: (1, True),
        6: (1, False),
        7: (1, True),
        12: (2, False),
        14: (2, True),
    }
