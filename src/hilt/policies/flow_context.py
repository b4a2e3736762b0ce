"""What a flow policy has read of observations before it draws actions, and how what was read last is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hilt.policies.base import CONDITION, Record
from hilt.policies.vla.gemma import KeysValues, Runner, Sight

SEEN = ("images", "present", "prompt", "worded", "state", CONDITION)
"""What the language model reads, by its name in a decision"""


class Context(NamedTuple):
    """What the language model has read, and what does not change from step to step of the flow."""

    cache: KeysValues
    valid: Tensor
    """bool [B, tokens]"""
    sights: tuple[Sight, Sight]
    """What the actions see: in layers with keys of their own, and in those that look across"""
    run: Runner
    """How the layers are gone through"""
    output: Tensor | None = None
    """[B, tokens, width], where the value is read from it"""
    state: Tensor | None = None
    """[B, width], of a model whose suffix begins with it"""


class LastContext:
    """The context of the observations that were read last: where the next ones are equal to the bit, as when one frame
    is decoded from several draws of noise, it is not read again. For weights that do not change."""

    def __init__(self) -> None:
        self._last: tuple[dict[str, Tensor], Context] | None = None  # both at once: threads may share a policy

    def of(self, seen: Mapping[str, Tensor], read: Callable[[], Context]) -> Context:
        """The context of what is `seen`, which `read` makes where it is not kept."""
        last = self._last
        if last is None or not _equal(last[0], seen):
            self._last = last = dict(seen), read()
        return last[1]

    def forget(self) -> None:
        """Frees its memory."""
        self._last = None


def seen_in(record: Record, state_width: int, images: Tensor | None = None) -> dict[str, Tensor]:
    """What the language model reads of a record, on the host. Slots and words that no row has are left out: they would
    be masked, and cost as much as others. `images`: in place of the record's own."""
    slots = record["image_mask"].any(0) if len(record["image_mask"]) else np.arange(1)
    length = int(record["prompt_length"].max(initial=1))
    state = np.pad(record["state"], [(0, 0), (0, state_width - record["state"].shape[1])])
    return {
        "images": torch.from_numpy(record["images"] if slots.all() else record["images"][:, slots])
        if images is None
        else images[:, torch.from_numpy(slots)],
        "present": torch.from_numpy(record["image_mask"][:, slots]),
        "prompt": torch.from_numpy(record["prompt"][:, :length].astype(np.int64)),
        "worded": torch.from_numpy(np.arange(length) < record["prompt_length"][:, None]),
        "state": torch.from_numpy(state),
        **({CONDITION: torch.from_numpy(record[CONDITION])} if CONDITION in record else {}),
    }


def _equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
