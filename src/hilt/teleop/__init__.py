"""The person in the loop: input devices, and the wrapper that decides who acts."""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.teleop.browser import Browser
    from hilt.teleop.devices import Device, Reading, Status, open_device
    from hilt.teleop.gamepad import Gamepad
    from hilt.teleop.intervene import TakeOver
    from hilt.teleop.keyboard import Keyboard
    from hilt.teleop.operator import Script
    from hilt.teleop.spacemouse import SpaceMouse

__all__ = [
    "Browser",
    "Device",
    "Gamepad",
    "Keyboard",
    "Reading",
    "Script",
    "SpaceMouse",
    "Status",
    "TakeOver",
    "open_device",
]
__getattr__ = lazy_exports(__name__, __file__)
