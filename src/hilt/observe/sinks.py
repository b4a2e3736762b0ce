"""Where metrics go besides ``metrics.jsonl``: TensorBoard, Weights & Biases, trackio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hilt.core.errors import UnknownNameError


class Sink(Protocol):
    """What `Metrics` writes to."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def resumed(self, update: int) -> None: ...

    def close(self) -> None: ...


SINKS: dict[str, Any] = {}


def open_sinks(names: Sequence[str], folder: Path, run: str) -> list[Sink]:
    """The sinks of these names, for the run in this folder."""
    for name in names:
        if name not in SINKS:
            raise UnknownNameError("sink", name, SINKS)
    return [SINKS[name](folder, run) for name in names]
