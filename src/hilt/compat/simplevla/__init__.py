"""The names of SimpleVLA-RL (verl), over Hilt's own tasks, rollouts and workers; docs/simplevla.md describes them."""

from hilt.compat.simplevla.batch import Batch
from hilt.compat.simplevla.batches import episodes_of, rollout_batch
from hilt.compat.simplevla.dataloader import BufferedDataLoader, LIBERO_Dataset, Robotwin_Dataset, collate_fn, starts
from hilt.compat.simplevla.environments import RobotwinEnvWrapper, center_crop_image, env_worker, get_libero_env
from hilt.compat.simplevla.hf_rollout import RobHFRollout
from hilt.compat.simplevla.trainer import RayTrainer, ResourcePoolManager, RobRewardManager, Role, compute_advantage
from hilt.compat.simplevla.workers import (
    CriticWorker,
    DataParallelPPOCritic,
    RobActorRolloutRefWorker,
    RobDataParallelPPOActor,
)

DataProto = Batch

__all__ = [
    "Batch",
    "BufferedDataLoader",
    "CriticWorker",
    "DataParallelPPOCritic",
    "DataProto",
    "LIBERO_Dataset",
    "RayTrainer",
    "ResourcePoolManager",
    "RobActorRolloutRefWorker",
    "RobDataParallelPPOActor",
    "RobHFRollout",
    "RobRewardManager",
    "RobotwinEnvWrapper",
    "Robotwin_Dataset",
    "Role",
    "center_crop_image",
    "collate_fn",
    "compute_advantage",
    "env_worker",
    "episodes_of",
    "get_libero_env",
    "rollout_batch",
    "starts",
]
