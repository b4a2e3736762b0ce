"""Our episodes as the batches of SimpleVLA-RL's rollouts, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hilt.compat.simplevla.batch import Batch
from hilt.core.errors import ConfigError, MissingFieldError, SchemaError
from hilt.policies.base import Policy, Record
from hilt.vla.episode import RolloutEpisode, Start

PAD = 32000
"""Llama's token for nothing, in OpenVLA"""


def rollout_batch(
    episodes: Sequence[RolloutEpisode],
    policy: Policy,
    max_prompt_length: int = 0,
    steps: int = 0,
    pixel_values: bool = False,
) -> Batch:
    """Episodes as SimpleVLA-RL's rollout gives them, B of S chunks; after an
    episode's last chunk there is nothing but padding.

        responses        int64 [B, S, chunk * action_dim]     tokens; 0 after the end
        input_ids        int64 [B, S, prompt]                 padded on the LEFT with 32000
        attention_mask   int64 [B, S, prompt]
        frames           uint8 [B, S, images, H, W, 3]        what the policy saw, an eighth of
                         the memory of pixel_values
        pixel_values     float32 [B, S, 6 * images, H, W]     in place of frames, with `pixel_values=True`: what
                         generate_action_verl takes
        proprio          float32 [B, S, P]                    from -1 to 1, where the policy has it
        old_log_probs    float32 [B, S * chunk * action_dim]  0 where nothing was carried out
        complete         bool [B]
        finish_step      int64 [B]                            actions that were carried out

    `steps` and `max_prompt_length` are S and the prompt's width; 0: as long as is needed.
    """
    if not episodes:
        raise SchemaError("rollout_batch() was given no episode; give it at least one.")
    for episode in episodes:
        if "tokens" not in episode.record:
            raise MissingFieldError(
                f"a record of {', '.join(episode.record)} has no 'tokens': this batch is of "
                "policies that answer in them."
            )
    length, width = _sizes(episodes, steps, max_prompt_length)
    pad = int(policy.config.upstream.get("pad_token_id", PAD))
    columns = [_columns(episode, policy, width, pad) for episode in episodes]
    tensors = {
        name: torch.from_numpy(
            np.stack([_padded(one[name], length, pad if name == "input_ids" else 0) for one in columns])
        )
        for name in columns[0]
    }
    tensors["old_log_probs"] = tensors["old_log_probs"].flatten(1)
    tensors["attention_mask"] = tensors["input_ids"].ne(pad).long()
    if pixel_values:
        frames = tensors.pop("frames")
        seen = [policy.pixels(each.to(policy.device)).flatten(1, 2).cpu() for each in frames]
        tensors["pixel_values"] = torch.stack(seen)
    tensors["complete"] = torch.tensor([episode.success for episode in episodes])
    tensors["finish_step"] = torch.tensor([episode.steps for episode in episodes])
    facts = {
        "uid": [f"{episode.start.group}" for episode in episodes],
        "task": [episode.start.task for episode in episodes],
    }
    facts["ill_formed"] = [episode.ill_formed for episode in episodes]
    return Batch(tensors, facts)


def _sizes(episodes: Sequence[RolloutEpisode], steps: int, max_prompt_length: int) -> tuple[int, int]:
    """Returns the number of chunks and the width of the prompts of a batch: what
    was given, or what the episodes need."""
    length = max(episode.rows for episode in episodes)
    width = max(int(episode.record["prompt_length"].max()) for episode in episodes)
    for name, given, needed in (("steps", steps, length), ("max_prompt_length", max_prompt_length, width)):
        if given and given < needed:
            raise ConfigError(
                f"{name}={given}, and an episode needs {needed}: give as many, or 0 for as many as are needed."
            )
    return steps or length, max_prompt_length or width


def _columns(episode: RolloutEpisode, policy: Policy, width: int, pad: int) -> dict[str, np.ndarray]:
    """The arrays of one episode by name, a row for each of its chunks, with prompts of `width` tokens."""
    record, rows = episode.record, episode.rows
    ids = np.full((rows, width), pad, np.int64)
    for row, many in enumerate(record["prompt_length"]):
        ids[row, width - many :] = record["prompt"][row, :many]
    done = np.arange(record["log_prob"].shape[1]) < episode.executed[:, None]  # [rows, chunk]
    made = {
        "responses": record["tokens"].reshape(rows, -1).astype(np.int64),
        "input_ids": ids,
        "frames": record["images"],
        "old_log_probs": np.where(done[..., None], record["log_prob"], 0).reshape(rows, -1),
    }
    if "state" in record:
        made["proprio"] = policy.scale_state.normalize(record["state"]).astype(np.float32)
    return made


def _padded(rows: np.ndarray, length: int, fill: int) -> np.ndarray:
    return np.pad(rows, [(0, length - len(rows)), *[(0, 0)] * (rows.ndim - 1)], constant_values=fill)


def episodes_of(batch: Batch, policy: Policy, temperature: float = 1.0) -> list[RolloutEpisode]:
    """The inverse of `rollout_batch`: the episodes that these rows are. Chunks of
    which nothing was carried out are left out.

    `temperature` is that of the rollout, in the units of ``rollout.temperature``. The
    pictures are ``frames`` or ``pixel_values``.
    """
    data = batch.batch
    for name in ("responses", "input_ids", "attention_mask", "finish_step", "complete"):
        if name not in data:
            raise MissingFieldError(
                f"a rollout has {name!r}, and this batch has {', '.join(data)}: give what generate_sequences gave."
            )
    if not {"frames", "pixel_values"} & data.keys():
        raise MissingFieldError(
            "a rollout has 'pixel_values' or 'frames', and this batch has neither: give what generate_sequences gave."
        )
    groups: dict[str, int] = {}
    uids = batch.non_tensor_batch.get("uid", np.array([str(row) for row in range(len(batch))], object))
    made = []
    for row, uid in enumerate(uids):
        steps, success = int(data["finish_step"][row]), bool(data["complete"][row])
        rows = -(-steps // policy.chunk)
        executed = np.clip(steps - policy.chunk * np.arange(rows), 0, policy.chunk).astype(np.int32)
        start = Start(str(_fact(batch, "task", row)), "train", 0, 0, groups.setdefault(str(uid), len(groups)), row)
        episode = RolloutEpisode(
            start,
            _record(data, row, rows, policy, temperature),
            executed,
            np.zeros(rows, np.float32),
            success,
            steps,
            not success,
            0,
            b"",
            str(_fact(batch, "ill_formed", row)),
        )
        made.append(episode)
    return made


def _fact(batch: Batch, name: str, row: int) -> Any:
    return batch.non_tensor_batch[name][row] if name in batch.non_tensor_batch else ""


def _record(data: dict[str, Tensor], row: int, rows: int, policy: Policy, temperature: float) -> Record:
    mask = data["attention_mask"][row, :rows].ne(0).long()
    order = mask.argsort(dim=1, descending=True, stable=True)  # a record is padded at the right
    prompt = torch.where(mask.gather(1, order).ne(0), data["input_ids"][row, :rows].gather(1, order), 0)
    shape = (rows, policy.chunk, policy.action_dim)
    images = data["frames"][row, :rows] if "frames" in data else policy.frames_of(data["pixel_values"][row, :rows])
    record: Record = {
        "images": images.cpu().numpy(),
        "prompt": prompt.int().cpu().numpy(),
        "prompt_length": mask.sum(1).int().cpu().numpy(),
        "temperature": np.full(rows, temperature, np.float32),
        "tokens": data["responses"][row, :rows].reshape(shape).int().cpu().numpy(),
    }
    if "old_log_probs" in data:
        record["log_prob"] = data["old_log_probs"][row].float().cpu().numpy().reshape(-1, *shape[1:])[:rows]
    if policy.scale_state is not None:
        if "proprio" not in data:
            raise MissingFieldError(
                "this policy needs the robot's state, and this batch has no 'proprio': use_proprio=True adds it."
            )
        record["state"] = policy.scale_state.unnormalize(data["proprio"][row, :rows].cpu().numpy()).astype(np.float32)
    return record


def by_token(values: Sequence[np.ndarray], length: int) -> Tensor:
    """float32 [B, length] of arrays [rows, chunk, action_dim] for each episode, 0
    after the end, as log-probabilities are there."""
    found = torch.zeros(len(values), length)
    for row, array in enumerate(values):
        found[row, : array.size] = torch.from_numpy(np.ascontiguousarray(array)).flatten()
    return found


def by_chunk(name: str, values: Tensor, episodes: Sequence[RolloutEpisode], policy: Policy) -> list[np.ndarray]:
    """float32 [rows] for each episode, of one number for each token [B, T]: the tokens of a
    chunk that were carried out have the same."""
    size, found = policy.chunk * policy.action_dim, []
    for row, episode in zip(values.detach().float().cpu().numpy(), episodes, strict=True):
        chunks = row[: episode.rows * size].reshape(episode.rows, policy.chunk, policy.action_dim)
        first = chunks[:, 0, 0]
        done = np.arange(policy.chunk) < episode.executed[:, None]
        if not np.allclose(np.where(done[..., None], chunks - first[:, None, None], 0), 0, atol=1e-5):
            raise SchemaError(f"{name} differs between the tokens of one chunk: give the same number for all of them.")
        found.append(first)
    return found
