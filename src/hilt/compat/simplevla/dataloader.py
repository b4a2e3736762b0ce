"""SimpleVLA-RL's datasets, its loader and its batches, over our tasks and episodes.

    dataset = LIBERO_Dataset("libero_10", num_trials_per_task=50, train_val="train")
    loader = BufferedDataLoader(DataLoader(dataset, batch_size=8, shuffle=True, drop_last=True, collate_fn=collate_fn))
    loader.start_new_epoch()
    prompts = Batch.from_single_dict(loader.get_next_batch())
    episodes = roll_out(policy, pool, starts(prompts, n_samples=8, seed=0), ...)
    loader.add_to_buffer(rollout_batch(episodes, policy))

`hilt train simplevla` needs none of this: `vla/collect.py` does the same for the trainer, and can be resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hilt.compat.simplevla.batch import Batch, objects
from hilt.core.errors import ConfigError, EmptyError, SchemaError, UnknownNameError
from hilt.envs import libero, robotwin
from hilt.recipes.simplevla_names import UnknownSuiteError, split_name
from hilt.vla.episode import Start

__all__ = ["Batch", "BufferedDataLoader", "LIBERO_Dataset", "Robotwin_Dataset", "collate_fn", "starts"]

logger = logging.getLogger("hilt.compat")

VALIDATION_TRIALS = 128
"""Trials of each kind on which RoboTwin is validated, independently of `num_trials_per_task`"""


def collate_fn(data_list: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Tensors stacked, everything else as arrays of objects."""
    if not data_list:
        raise SchemaError("collate_fn was given no row; give it at least one.")
    for place, row in enumerate(data_list):
        if row.keys() != data_list[0].keys():
            raise SchemaError(
                f"row {place} has {', '.join(row)} and row 0 has {', '.join(data_list[0])}; rows of a "
                "batch have the same keys."
            )
    columns = {key: [row[key] for row in data_list] for key in data_list[0]}
    return {
        key: torch.stack(values) if isinstance(values[0], Tensor) else objects(values)
        for key, values in columns.items()
    }


class _Prompts:
    """What a dataset is: rows of where to begin, no pictures; those come from the simulator."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.dataframe = rows

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self.dataframe[place]


class LIBERO_Dataset(_Prompts):
    """Every task of a suite from its first `num_trials_per_task` initial states, by
    the number that LIBERO stores each under.

    ``train`` and ``valid`` have the same states, as in SimpleVLA-RL. With `held_out=True` they have none in common:
    those of our splits ``train`` (0 to 29) and ``eval`` (30 to 39), as `hilt train simplevla` has them.
    """

    def __init__(
        self, task_suite_name: str, num_trials_per_task: int = 50, train_val: str = "train", held_out: bool = False
    ):
        if task_suite_name not in libero.SUITES:
            raise UnknownSuiteError("LIBERO suite", task_suite_name, libero.SUITES)
        split = _split(train_val)
        if not 1 <= num_trials_per_task <= libero.STORED:
            raise ConfigError(
                f"num_trials_per_task={num_trials_per_task}: LIBERO stores {libero.STORED} "
                "initial states; give 1 to 50."
            )
        trials = [
            trial
            for trial in (libero.SPLITS[split] if held_out else range(libero.STORED))
            if trial < num_trials_per_task
        ]
        if not trials:
            raise ConfigError(
                f"num_trials_per_task={num_trials_per_task} leaves no state to {train_val}: give 50, or held_out=False."
            )
        tasks = range(libero.SUITES[task_suite_name])
        super().__init__(
            [_row(task_suite_name, task, trial, -1, task_suite_name) for task in tasks for trial in trials]
        )
        self.task_suite_name, self.num_trials_per_task, self.train_val = task_suite_name, num_trials_per_task, train_val
        other = (
            "held out from the other dataset"
            if held_out
            else "the same in train and valid; held_out=True separates them"
        )
        self.states = f"initial states {trials[0]} to {trials[-1]} of each of {len(tasks)} tasks, {other}"
        """One line with the states that were chosen"""
        logger.info("%s", self)

    def __repr__(self) -> str:
        return (
            f"LIBERO_Dataset({self.task_suite_name!r}, train_val={self.train_val!r}): {len(self)} rows, {self.states}"
        )


class Robotwin_Dataset(_Prompts):
    """A task of RoboTwin, or every task of a version (``robotwin_all``, ``robotwin2_all``), from seeds.

    ``train`` has `num_trials_per_task` seeds for each task. ``valid`` has 128 of them, with data_source
    ``<task>_train_iid``, and 128 that training never has, ``<task>_eval_ood``. Version 2 has files of seeds at which
    its own script succeeds, in SimpleVLA-RL's ``verl/utils/envs/robotwin2/seeds``: give them as `train_seeds` and
    `eval_seeds`. Each row has the name of its own task.
    """

    def __init__(
        self,
        task_name: str,
        num_trials_per_task: int = 50,
        train_val: str = "train",
        train_seeds: str = "",
        eval_seeds: str = "",
    ):
        _split(train_val)
        version, tasks = split_name(task_name)
        count = num_trials_per_task if train_val == "train" else VALIDATION_TRIALS
        rows = []
        for task in tasks:
            name, found = f"{version}_{task}", robotwin.seeds(version, task, train_seeds, eval_seeds)
            for kind, split in [("train_iid", "train")] + [("eval_ood", "eval")] * (train_val == "valid"):
                if len(found[split]) < count:
                    raise ConfigError(
                        f"{name} has {len(found[split])} seeds of {split}, and {count} were asked for: "
                        "give fewer, or more seeds."
                    )
                rows += [_row(name, -1, seed, seed, f"{name}_{kind}") for seed in found[split][:count]]
        super().__init__(rows)
        self.task_name, self.num_trials_per_task, self.train_val = task_name, count, train_val


class BufferedDataLoader:
    """A loader, and rows that were made of its prompts and wait for the next step."""

    def __init__(self, dataloader: Any):
        self.dataloader, self.batch_size = dataloader, dataloader.batch_size
        self.buffer: Batch | None = None
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.dataloader)

    def start_new_epoch(self) -> None:
        self._batches = iter(self.dataloader)

    def get_next_batch(self) -> Any:
        """Raises StopIteration at the end of an epoch."""
        if self._batches is None:
            raise ConfigError("no epoch has begun: call start_new_epoch() before get_next_batch().")
        return next(self._batches)

    def add_to_buffer(self, samples: Batch) -> None:
        self.buffer = samples if not self.buffer_size() else Batch.concat([self._held(), samples])

    def get_from_buffer(self, count: int, dp_size: int) -> Batch:
        """The first `count` rows, which leave the buffer. Where there are fewer: as
        many as divide among `dp_size` ranks."""
        held = self._held()
        if count > len(held):
            count = len(held) // dp_size * dp_size
        self.buffer = held[count:]
        return held[:count]

    def buffer_size(self) -> int:
        return 0 if self.buffer is None else len(self.buffer)

    def _held(self) -> Batch:
        if self.buffer is None:
            raise EmptyError("nothing is in the buffer yet: add_to_buffer() comes first.")
        return self.buffer


def starts(prompts: Batch, n_samples: int, seed: int = 0, train_seeds: str = "", eval_seeds: str = "") -> list[Start]:
    """Each row `n_samples` times, one after the other, as a group: what our `roll_out` begins from. `seed` is LIBERO's;
    RoboTwin has the row's own. A task of ours, by its full name, is one with the state of ``trial_id``."""
    made = []
    names, tasks, trials = (
        prompts.non_tensor_batch["task_suite_name"],
        prompts.batch["task_id"],
        prompts.batch["trial_id"],
    )
    for group, (name, task, trial) in enumerate(
        zip(names, tasks.flatten().tolist(), trials.flatten().tolist(), strict=True)
    ):
        split, state = place_of(name, trial, train_seeds, eval_seeds)
        if name in libero.SUITES or "/" in name:
            full, begin = name if "/" in name else f"{name}/{task}", seed
        else:
            version, (of, *_) = split_name(name)
            full, begin = f"{version}/{of}", trial
        made += [Start(full, split, state, begin, group, member) for member in range(n_samples)]
    return made


def place_of(name: str, trial: int, train_seeds: str = "", eval_seeds: str = "") -> tuple[str, int]:
    """Our split and the number in it of a trial: a state that LIBERO stores, a seed
    of RoboTwin, or a state of a task of ours."""
    if "/" in name:
        return "train", trial
    states = {split: list(numbers) for split, numbers in libero.SPLITS.items()}
    if name not in libero.SUITES:
        version, (task, *_) = split_name(name)
        states = robotwin.seeds(version, task, train_seeds, eval_seeds)
    split = next((split for split, numbers in states.items() if trial in numbers), None)
    if split is None:
        raise ConfigError(
            f"{name} has no initial state {trial}; give the files of seeds that its dataset was made with."
        )
    return split, states[split].index(trial)


def _row(suite: str, task: int, trial: int, seed: int, source: str) -> dict[str, Any]:
    numbers = {"task_id": task, "trial_id": trial, "trial_seed": seed}
    return {
        "task_suite_name": suite,
        "data_source": source,
        **{name: torch.tensor([number]) for name, number in numbers.items()},
    }


def _split(train_val: str) -> str:
    """Our split of a dataset's part."""
    kinds = {"train": "train", "valid": "eval"}
    if train_val not in kinds:
        raise UnknownNameError("train_val", train_val, kinds)
    return kinds[train_val]
