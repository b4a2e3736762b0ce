"""The worker of a real run that waits, in the phase that an environment variable names,
until the folder in another one has a file `go`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hilt.vla import worker as roles

PHASE, NOTES = "HILT_TEST_PHASE", "HILT_TEST_NOTES"
WAIT_S = 300.0


def pause(wanted: Callable[[], bool] = lambda: True) -> None:
    """Says that the phase is reached, and waits for `go`, and for what else is wanted."""
    notes, deadline = Path(os.environ[NOTES]), time.monotonic() + WAIT_S
    (notes / "paused").touch()
    while not ((notes / "go").exists() and wanted()) and time.monotonic() < deadline:
        time.sleep(0.01)


def pausing(function: Callable[..., Any], when: int, wanted: Callable[[], bool] = lambda: True) -> Callable[..., Any]:
    """The same function, whose call with this number pauses first."""
    calls: list[int] = []

    def called(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == when:
            pause(wanted)
        return function(*given, **named)

    return called


def make_worker(settings: Any, run: str, *, ranks: Any, stop: Callable[[], bool], role: str = "both") -> Any:
    phase = os.environ[PHASE]
    if phase == "start" and ranks.rank == 0:
        pause()
    worker = roles.make_worker(settings, run, ranks=ranks, stop=stop, role=role)
    # of the second training step; a validation before the first counts
    if phase in ("collect", "update", "validate") and ranks.rank == 0:
        setattr(worker, phase, pausing(getattr(worker, phase), 2, stop if phase != "update" else lambda: True))
    return worker
