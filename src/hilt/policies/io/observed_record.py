"""What a policy sees, as the first fields of its record: images of one size, or in the slots of its cameras; of a small
policy also the words as bytes, and the state."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from hilt.core.errors import MissingFieldError, SchemaError
from hilt.policies.base import Observation, Record, picture, text
from hilt.policies.io.preprocess import resize_with_pad
from hilt.policies.vla.tokens import ByteTokenizer, padded

TEXTS_KEPT = 1024
"""Instructions whose bytes are kept, so that each is read once"""


@functools.lru_cache(TEXTS_KEPT)
def _ids(instruction: str) -> tuple[int, ...]:
    return tuple(ByteTokenizer().encode(instruction))


def observed_record(
    observations: Sequence[Observation], cameras: Sequence[str], image_size: int, state_dim: int
) -> Record:
    """Returns ``images`` uint8 [B, cameras, image_size, image_size, 3], ``prompt`` and ``prompt_length``, and ``state``
    float32 [B, state_dim] unless that is 0."""
    if not observations:
        raise SchemaError("no observation was given; give at least one.")
    pixels, states, ids = [], [], []
    for row, seen in enumerate(observations):
        for name in (*cameras, "instruction", *(["state"] if state_dim else [])):
            if name not in seen:
                raise MissingFieldError(
                    f"observation {row} has no {name!r}, which this policy looks at; it has {sorted(seen)}."
                )
        pictures = [picture(seen[name], name, row) for name in cameras]
        pixels.append(
            [
                each if each.shape[:2] == (image_size, image_size) else resize_with_pad(each, image_size)
                for each in pictures
            ]
        )
        states.append(np.asarray(seen.get("state", ()), np.float32))
        if state_dim and states[-1].shape != (state_dim,):
            raise SchemaError(f"the state of observation {row} is {list(states[-1].shape)}; expected is [{state_dim}].")
        ids.append(_ids(text(seen["instruction"], row)))
    prompt, length = padded(ids)
    record = {"images": np.array(pixels), "prompt": prompt, "prompt_length": length}
    if state_dim:
        record["state"] = np.stack(states)
    return record


def pictures_in_slots(
    observations: Sequence[Observation],
    names: Sequence[str],
    size: int,
    as_they_are: bool,
    anchor: str,
    device: torch.device,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pictures of these names, uint8 [B, names, H, W, 3], and which of them there are, bool [B, names].

    They are fitted into squares of `size`, where `anchor` says; `as_they_are`, they have their own size, if all have
    the same."""
    present = np.array([[observation.get(name) is not None for name in names] for observation in observations])
    if not present.any(1).all():
        row = int(np.argmin(present.any(1)))
        raise MissingFieldError(
            f"observation {row} has none of the pictures {', '.join(names)}: it needs at least one."
        )
    places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for row, slot in np.argwhere(present).tolist():
        places.setdefault(np.shape(observations[row][names[slot]]), []).append((row, slot))
    fitted = next(iter(places))[:2] if as_they_are and len(places) == 1 else (size, size)
    images = np.empty((*present.shape, *fitted, 3), np.uint8)
    images[~present] = 0
    for shape, found in places.items():  # those of one size together
        pictures = [picture(observations[row][names[slot]], names[slot], row) for row, slot in found]
        if shape[:2] != fitted:
            stacked = torch.from_numpy(np.stack(pictures)).to(device)  # the same numbers on each device
            pictures = list(resize_with_pad(stacked, size, anchor=anchor).cpu().numpy())
        for (row, slot), one in zip(found, pictures, strict=True):
            images[row, slot] = one
    return images, present
