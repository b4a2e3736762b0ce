"""Actions as tokens, and text as tokens.

`ActionTokenizer` is OpenVLA's: 256 edges over [-1, 1], the last ids of the vocabulary. `ByteTokenizer` is a
text tokenizer without files, for small models and tests; `load_tokenizer` opens the one in a checkpoint's
folder, without running anything that lies there.
"""

from __future__ import annotations

import functools
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from hilt.core.errors import ConfigError, FormatError, MissingPackageError, optional_module
from hilt.core.hub import local
from hilt.policies.base import KEPT_ENDING, Observation, text

LOG = logging.getLogger("hilt.policies")
FILES, BYTES = ("tokenizer.json", "tokenizer_config.json"), "hilt.ByteTokenizer"
EMPTY = 29871
"""Llama's token of a lone space. OpenVLA was trained with it before the first action."""


class TextTokenizer(Protocol):
    """What a policy needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with what the model expects in front of it, and nothing behind."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


class ActionTokenizer:
    """`bins` edges evenly over [-1, 1], as the ids that end at `vocab` - 1. The greatest number has the smallest id.

    encode  d = the number of edges that are not above x, 1..bins;  id = vocab - d
    decode  the middle between edges d and d + 1; there is one interval less than edges,
            so the two smallest ids mean the same
    """

    def __init__(self, bins: int = 256, vocab: int = 32000):
        if not 2 <= bins <= vocab:
            raise ConfigError(
                f"an action tokenizer of {bins} bins in a vocabulary of {vocab} was asked for; give 2 to {vocab} bins."
            )
        self.bins, self.vocab = bins, vocab
        self.first, self.last = vocab - bins, vocab - 1
        self._edges = np.linspace(-1, 1, bins)
        self.centers = (self._edges[:-1] + self._edges[1:]) / 2
        """The numbers that tokens stand for, float64 [bins - 1], rising."""

    def encode(self, numbers: np.ndarray | torch.Tensor) -> np.ndarray | torch.Tensor:
        """Ids, int64, of numbers in [-1, 1]; what is outside counts as the border. An
        array gives an array, a tensor a tensor."""
        if isinstance(numbers, torch.Tensor):
            edges = torch.from_numpy(self._edges).to(numbers.device)
            return self.vocab - torch.bucketize(numbers.to(torch.float64).clamp(-1, 1), edges, right=True)
        return self.vocab - np.digitize(np.clip(np.asarray(numbers, np.float64), -1, 1), self._edges)

    def decode(self, ids: np.ndarray | torch.Tensor) -> np.ndarray | torch.Tensor:
        """Numbers, float64, of ids; an id that is no action's is taken for the nearest one that is."""
        if isinstance(ids, torch.Tensor):
            return torch.from_numpy(self.centers).to(ids.device)[(self.vocab - 1 - ids.long()).clamp(0, self.bins - 2)]
        return self.centers[np.clip(self.vocab - 1 - np.asarray(ids, np.int64), 0, self.bins - 2)]


class ByteTokenizer:
    """The bytes of UTF-8, from id 3 on; 0 is padding, 1 stands in front of each
    text, 2 at its end where a model wants one."""

    pad, begin, end = 0, 1, 2
    size = 259

    def encode(self, text: str) -> list[int]:
        return [self.begin, *(byte + 3 for byte in text.encode())]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(each - 3 for each in ids if each >= 3).decode(errors="replace")


class FolderTokenizer:
    """A Hugging Face tokenizer: a folder's `tokenizer.json`, and the first and last
    tokens of `tokenizer_config.json`."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        file = self.folder / FILES[0]
        if not file.is_file():
            cure = (
                "; transformers makes one of the tokenizer.model there" if file.with_suffix(".model").is_file() else ""
            )
            raise FormatError(
                f"{folder}: a checkpoint's tokenizer is its tokenizer.json, and there is none here{cure}."
            )
        try:
            self.inner = optional_module("tokenizers", "A checkpoint's tokenizer", "vla").Tokenizer.from_file(str(file))
            settings = _settings(self.folder)
        except (MissingPackageError, FormatError):
            raise
        except Exception as error:  # the package raises plain Exception for a file that it cannot read
            raise FormatError(f"{file}: this is no tokenizer that can be opened: {error}") from error
        self.inner.no_padding()
        self.inner.no_truncation()
        self.begin, self.end = (self._id(settings.get(name)) for name in ("bos_token", "eos_token"))
        self._begins = bool(settings.get("add_bos_token"))

    def encode(self, text: str) -> list[int]:
        ids = list(self.inner.encode(text).ids)
        if self._begins and self.begin is not None and ids[:1] != [self.begin]:
            ids.insert(0, self.begin)
        return ids[:-1] if ids and ids[-1] == self.end else ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.inner.decode(list(ids)))

    def _id(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        return self.inner.token_to_id(text) if text else None


def load_tokenizer(folder: str | Path) -> FolderTokenizer | ByteTokenizer:
    """The tokenizer of a checkpoint's folder; Hilt's own if its settings select it."""
    folder = local(folder)
    return ByteTokenizer() if _settings(folder).get("tokenizer_class") == BYTES else FolderTokenizer(folder)


def save_tokenizer(tokenizer: object, folder: str | Path) -> None:
    """Puts into a folder what `load_tokenizer` finds there again. One that comes
    from no folder is its owner's to save."""
    if isinstance(tokenizer, ByteTokenizer):
        (Path(folder) / FILES[1]).write_text(json.dumps({"tokenizer_class": BYTES}) + "\n")
    elif isinstance(tokenizer, FolderTokenizer):
        for name in FILES:
            if (tokenizer.folder / name).is_file():
                shutil.copyfile(tokenizer.folder / name, Path(folder) / name)


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / FILES[1]
    try:
        found = json.loads(file.read_text()) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise FormatError(f"{file}: no settings of a tokenizer can be read from it: {error}") from error
    return found if isinstance(found, dict) else {}


def openvla_prompt(instruction: str) -> str:
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


def openvla_ids(tokenizer: TextTokenizer, instruction: str) -> list[int]:
    """The prompt in ids, with the lone space at its end that OpenVLA's first action follows."""
    ids = tokenizer.encode(openvla_prompt(instruction))
    return ids if ids[-1] == EMPTY else [*ids, EMPTY]


def fitted_ids(
    tokenizer: TextTokenizer, prompt: Callable[[str], str], observation: Observation, place: int, longest: int
) -> list[int]:
    """The prompt of an observation in `longest` ids at most; `prompt` makes it of an instruction.

    A longer one is cut off at its end, as the published policies do. Where the end of the instruction is to be read in
    any case (`KEPT_ENDING`), words before that are left out instead, or letters of a text without spaces, such as a
    Chinese one. Both are reported, once for each instruction."""
    instruction = text(observation["instruction"], place)
    ids = tokenizer.encode(prompt(instruction))
    if len(ids) <= longest:
        return ids
    ending = observation.get(KEPT_ENDING)
    if not isinstance(ending, str) or not ending:
        _report_once(f"the prompt of {instruction!r} has {len(ids)} tokens and is cut off after {longest}, which is")
        return ids[:longest]
    for shortened in _beginnings(instruction.removesuffix(ending)):
        if len(fitting := tokenizer.encode(prompt(shortened + ending))) <= longest:
            _report_once(
                f"{instruction!r} is read as {shortened + ending!r}, as its prompt has at most {longest} tokens,"
            )
            return fitting
    raise ConfigError(
        f"the prompt of {instruction!r} has {len(ids)} tokens and may have {longest}, so that the condition at its end "
        "would be cut off, or nothing of the instruction would be left. Give policy_options.tokenizer_max_length="
        f"{len(ids)}, or a shorter instruction."
    )


def _beginnings(instruction: str) -> Iterator[str]:
    """The beginnings of an instruction, the longest first: of whole words, or of a text like a Chinese one, which has
    no spaces, of letters."""
    space = " " if " " in instruction or instruction.isascii() else ""
    parts = instruction.split(" ") if space else list(instruction)
    for count in range(len(parts) - 1, 0, -1):
        yield space.join(parts[:count])


@functools.lru_cache(1024)
def _report_once(what: str) -> None:
    LOG.warning("%s tokenizer_max_length of the policy.", what)


def padded(rows: Sequence[Sequence[int]], pad: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as a record has them: int32 [B, longest], padded at the right, and their lengths, int32 [B]."""
    lengths = np.array([len(row) for row in rows], np.int32)
    ids = np.full((len(rows), max(lengths, default=0)), pad, np.int32)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    return ids, lengths
