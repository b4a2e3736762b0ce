"""Newer weights are found and taken up; those that cannot be used are skipped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hilt.core.errors import CorruptError
from hilt.serving import Batcher, WeightWatcher
from tests.serving.served_toy import WAIT_S, Known


def until(met: Callable[[], bool]) -> None:
    for _ in range(int(WAIT_S / 0.005)):
        if met():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it did not happen in time")


def test_newer_weights_are_taken_up_and_damaged_ones_skipped(caplog: pytest.LogCaptureFixture):
    policy, there, read = Known(), [3], list[int]()

    def load(version: int) -> dict[str, Any]:
        read.append(version)
        if version == 4:
            raise CorruptError("checkpoint 4 is damaged")
        return {"weight": torch.zeros(9 if version == 5 else 1) + version}

    batcher = Batcher(policy, 3)
    with caplog.at_level(logging.WARNING, "hilt.serving"):
        watcher = WeightWatcher(batcher, lambda: there[0], load, interval_s=0.001)
        for version in (4, 5, 6):
            there[0] = version
            until(lambda version=version: version in read)
        until(lambda: batcher.version == 6)
        watcher.close()
    batcher.close()
    assert float(policy.weight.detach()) == 6.0 and read == [4, 5, 6], "each is read once"
    skipped = [record.getMessage() for record in caplog.records]
    assert skipped[0] == "newer weights were not taken up: checkpoint 4 is damaged"
    assert "have weight [9], and the policy that is served has [1]" in skipped[1] and len(skipped) == 2
