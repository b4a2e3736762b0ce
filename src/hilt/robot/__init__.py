"""A robot arm behind HTTP: the server with its control loop and cameras, and the
gymnasium environment on the client's side."""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.robot.backends import Backend, RobotState, open_backend
    from hilt.robot.cameras import Camera, CameraConfig, open_camera
    from hilt.robot.control import ArmLimits
    from hilt.robot.env import DualRobotEnv, RobotConfig, RobotEnv
    from hilt.robot.robot_client import RobotClient
    from hilt.robot.robot_server import RobotServer

__all__ = [
    "ArmLimits",
    "Backend",
    "Camera",
    "CameraConfig",
    "DualRobotEnv",
    "RobotClient",
    "RobotConfig",
    "RobotEnv",
    "RobotServer",
    "RobotState",
    "open_backend",
    "open_camera",
]
__getattr__ = lazy_exports(__name__, __file__)
