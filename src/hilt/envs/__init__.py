"""Environments in which policies act: the task protocol and its checker, simulators, pools of them, and wrappers.

    env = make("tabletop_pick")
    check_task(env)

`hilt.envs.tabletop` is the simulated suite; a real arm is in `hilt.robot`.
"""

from typing import TYPE_CHECKING

from hilt.core.lazy import lazy_exports

if TYPE_CHECKING:
    from hilt.envs.adapters import Batched, from_custom, one_of
    from hilt.envs.chunk_executor import ChunkExecutor, ChunkSettings
    from hilt.envs.env_protocol import success_of
    from hilt.envs.libero import LiberoEnv
    from hilt.envs.pool import Pool
    from hilt.envs.rewards import (
        HumanClassifierWrapper,
        MultiCameraBinaryRewardClassifierWrapper,
        MultiStageBinaryRewardClassifierWrapper,
    )
    from hilt.envs.robotwin import RobotwinEnv
    from hilt.envs.tabletop.suite_env import TabletopEnv
    from hilt.envs.task import as_task, check_task, make, ready, register
    from hilt.envs.wrappers import (
        ChunkingWrapper,
        EpisodeStatistics,
        GripperCloseEnv,
        GripperPenaltyWrapper,
        Quat2EulerWrapper,
        Quat2R2Wrapper,
        RelativeFrame,
        SERLObsWrapper,
    )

__all__ = [
    "Batched",
    "ChunkExecutor",
    "ChunkSettings",
    "ChunkingWrapper",
    "EpisodeStatistics",
    "GripperCloseEnv",
    "GripperPenaltyWrapper",
    "HumanClassifierWrapper",
    "LiberoEnv",
    "MultiCameraBinaryRewardClassifierWrapper",
    "MultiStageBinaryRewardClassifierWrapper",
    "Pool",
    "Quat2EulerWrapper",
    "Quat2R2Wrapper",
    "RelativeFrame",
    "RobotwinEnv",
    "SERLObsWrapper",
    "TabletopEnv",
    "as_task",
    "check_task",
    "from_custom",
    "make",
    "one_of",
    "ready",
    "register",
    "success_of",
]
__getattr__ = lazy_exports(__name__, __file__)
