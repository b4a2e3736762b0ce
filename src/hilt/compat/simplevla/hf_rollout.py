"""`RobHFRollout`: SimpleVLA-RL's rollouts, and its way from an observation to an
answer, over our policy and our pool of simulators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hilt.compat.simplevla.batch import Batch
from hilt.compat.simplevla.batches import PAD, rollout_batch
from hilt.compat.simplevla.dataloader import starts
from hilt.core.errors import ConfigError, RequestError
from hilt.envs.pool import Pool
from hilt.policies.io.preprocess import bicubic, center_crop, openvla_view
from hilt.policies.vla.normalize import resolve_key
from hilt.policies.vla.observation_adapters import suite
from hilt.policies.vla.tokens import openvla_ids
from hilt.recipes.simplevla_run import STEP_LIMIT
from hilt.replay.tensors import generator
from hilt.vla.episode import LostEpisode, RolloutEpisode
from hilt.vla.rollout import RolloutSettings, roll_out

NAMES = ("responses", "input_ids", "attention_mask", "pixel_values")
WRISTS = {1: (), 2: ("wrist_image",), 3: ("left_wrist", "right_wrist")}
"""By `num_images_in_input`: the pictures beside the first"""


class RobHFRollout:
    """`module` is one of our OpenVLA policies; `config` is ``actor_rollout_ref.rollout``.

    ``generate_sequences`` rolls out in simulators that stay; the other methods are
    the parts of one step, for a loop of one's own.
    """

    def __init__(
        self, module: Any, config: Any, workers: int = 0, task_options: Mapping[str, Any] | None = None, seed: int = 0
    ):
        """`workers`: processes that simulate, 0: this one. `task_options`: what the tasks are
        given; None: as SimpleVLA-RL has them."""
        self.module, self.config, self._workers, self._draws = module, config, workers, generator(seed)
        if task_options is None and self.suite_name.startswith("libero"):
            task_options = {"step_limit": STEP_LIMIT, "wait_steps": int(get(config, "num_steps_wait", 10))}
        self._options = dict(task_options or {})
        self._pool: Pool | None = None
        self.vla_preprocess()

    def vla_preprocess(self) -> None:
        """Finds the statistics that actions are scaled by: ``unnorm_key``, with
        ``_no_noops`` behind it where only that is there."""
        key = str(get(self.config, "unnorm_key", "") or "").removeprefix("robotwin_").removeprefix("robotwin2_")
        self.unnorm_key = resolve_key(self.module.norm_stats, key or self.module.unnorm_key)

    @property
    def suite_name(self) -> str:
        return str(self.config.task_suite_name)

    # --- whole episodes ---

    def generate_sequences(self, prompts: Batch) -> Batch:
        """Rolls out each prompt ``meta_info["n_samples"]`` times; without it, as in
        validation, once and with the likeliest actions.

        The rows have `responses`, `input_ids`, `attention_mask`, `pixel_values` (with
        ``meta_info["pixel_values"]=False`` uint8 `frames` in their place), `old_log_probs`, `complete`, `finish_step`,
        and `proprio` where the policy has it: see `rollout_batch`.
        """
        meta, group = prompts.meta_info, int(prompts.meta_info.get("n_samples", 1))
        sample = bool(meta.get("do_sample", get(self.config, "do_sample", True) if "n_samples" in meta else False))
        temperature = float(meta.get("temperature", get(self.config, "temperature", 1.0)))
        pool = self._simulators(group if "n_samples" in meta else 0)
        wanted = starts(prompts, group, seed=int(meta.get("seed", 0)))
        for start in wanted:  # rather than after hours of rolling out
            self._prompt(str(pool.describe(start.task)["instruction"]))
        ended: dict[Any, RolloutEpisode] = {}
        self.module.eval()
        settings = RolloutSettings(temperature, sample, retries=1)
        for outcome in roll_out(
            self.module, pool, wanted, suite=suite(wanted[0].task), settings=settings, generator=self._draws
        ):
            if isinstance(outcome, LostEpisode):
                raise RequestError(f"an episode of {outcome.start.task} was lost twice:\n{outcome.error}")
            ended[outcome.start] = outcome
        chunks = math.ceil(max(int(pool.describe(start.task)["step_limit"]) for start in wanted) / self.module.chunk)
        pixel_values = bool(meta.get("pixel_values", True))
        made = rollout_batch([ended[start] for start in wanted], self.module, self._prompt_width, chunks, pixel_values)
        made.meta_info |= {**meta, "temperature": temperature}
        return made

    _generate_minibatch_libero = _generate_minibatch_robotwin = generate_sequences

    def _simulators(self, group: int) -> Pool:
        slots = (
            int(get(self.config, "micro_batch_size", 1)) * group
            if group
            else int(get(self.config, "val_micro_batch_size", 8))
        )
        if self._pool is None or self._pool.slots != slots:
            self.close()
            self._pool = Pool(min(self._workers, slots), slots, task_options=self._options)
        return self._pool

    def close(self) -> None:
        """Ends the simulators; the next call of `generate_sequences` makes new ones."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    # --- the parts of one step ---

    def _obs_to_input(
        self, obs: Mapping[str, Any], is_robotwin: bool = False, robotwin_version: str = "1.0"
    ) -> dict[str, Any]:
        """``full_image``, the wrist cameras that `num_images_in_input` asks for, and
        ``state``, of what the environment shows.

        Pictures are as the policy was trained on them, the right way up and of its
        size; the middle is taken by `process_input`.
        """
        name = ("robotwin" if robotwin_version == "1.0" else "robotwin2") if is_robotwin else self.suite_name
        row = suite(name).views(obs)
        keys = ("full_image", *WRISTS[int(self.config.num_images_in_input)])
        size = self.module.config.image_size
        return {**{key: openvla_view(np.asarray(row[key]), size, crop=False) for key in keys}, "state": row["state"]}

    def process_input(
        self, inputs: Sequence[Mapping[str, object]], task_descriptions: Sequence[str]
    ) -> dict[str, Tensor]:
        """Returns the inputs of the model: `input_ids` and `attention_mask` [B, max_prompt_length], padded on the left;
        `pixel_values` [B, 6 * images, H, W]; and with `use_proprio` `proprio` [B, D], normalized."""
        size = self.module.config.image_size
        cameras = ("full_image", *WRISTS[int(self.config.num_images_in_input)])
        rows = [[np.asarray(row[camera]) for camera in cameras] for row in inputs]
        images = torch.from_numpy(np.stack([np.stack([bicubic(picture, size) for picture in row]) for row in rows])).to(
            self.module.device
        )
        if get(self.config, "center_crop", True):
            images = center_crop(images, size=size)
        pad = int(self.module.config.upstream.get("pad_token_id", PAD))
        ids = torch.full((len(rows), self._prompt_width), pad)
        for row, words in enumerate(task_descriptions):
            found = self._prompt(words)
            ids[row, self._prompt_width - len(found) :] = torch.tensor(found)
        made = {
            "input_ids": ids,
            "attention_mask": ids.ne(pad),
            "pixel_values": self.module.pixels(images).flatten(1, 2),
        }
        if get(self.config, "use_proprio", False):
            if self.module.scale_state is None:
                raise ConfigError("use_proprio=True, but this policy has no input for the robot's state: give False.")
            states = np.stack([np.asarray(row["state"], np.float32) for row in inputs])
            made["proprio"] = torch.from_numpy(self.module.scale_state.normalize(states).astype(np.float32))
        return made

    @property
    def _prompt_width(self) -> int:
        return int(get(self.config, "max_prompt_length", 512))

    def _prompt(self, instruction: str) -> list[int]:
        """The ids of an instruction's prompt; one that is longer than ``max_prompt_length`` is an error."""
        found, width = openvla_ids(self.module.tokenizer, instruction), self._prompt_width
        if len(found) > width:
            raise ConfigError(
                f"a prompt has {len(found)} tokens, and max_prompt_length={width}: give at least {len(found)}."
            )
        return found

    def _generate_one_step(self, prompts: Mapping[str, Any]) -> dict[str, Any]:
        """The model's answer to `process_input`: its inputs, `responses` [B,
        tokens] and `action` [B, chunk, action_dim]."""
        drawn, sampled = get(self.config, "temperature", 1.0), get(self.config, "do_sample", True)
        actions, responses = self.module.generate_action_verl(
            input_ids=prompts["input_ids"],
            pixel_values=prompts["pixel_values"],
            proprio=prompts.get("proprio"),
            attention_mask=prompts["attention_mask"],
            do_sample=bool(prompts.get("do_sample", sampled)),
            unnorm_key=self.unnorm_key,
            temperature=float(prompts.get("temperature", drawn)),
            generator=self._draws,
        )
        known = {name: prompts[name] for name in (*NAMES[1:], "proprio") if name in prompts}
        return {"responses": responses, **known, "action": actions}

    _generate_one_step_oft = _generate_one_step_openvla = _generate_one_step

    def _prepare_output_batch(
        self, vla_history: Sequence[Mapping[str, Tensor]], task_records: Sequence[Mapping[str, Any]], batch_size: int
    ) -> Batch:
        """The steps of a loop of one's own, stacked as dimension 1, with `complete`
        and `finish_step` [B] of each episode."""
        names = [*NAMES, *(["proprio"] if "proprio" in vla_history[0] else [])]
        tensors = {
            name: torch.stack([torch.as_tensor(step[name]).cpu() for step in vla_history], dim=1) for name in names
        }
        tensors["complete"] = torch.tensor([bool(record["complete"]) for record in task_records])
        tensors["finish_step"] = torch.tensor([int(record["finish_step"]) for record in task_records])
        if any(len(values) != batch_size for values in tensors.values()):
            raise ConfigError(
                f"batch_size={batch_size}, and these steps are of {len(tensors['responses'])} episodes: give as many."
            )
        return Batch(tensors)


def get(config: Any, name: str, default: object) -> Any:
    """A setting by its name, of an OmegaConf tree, a mapping or an object."""
    found = config.get(name) if isinstance(config, Mapping) or hasattr(config, "get") else getattr(config, name, None)
    return default if found is None else found
