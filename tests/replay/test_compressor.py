"""Compression in the background: a fork meanwhile, a log that is closed meanwhile, and segments that are not full."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hilt.core.errors import DeadlineError
from hilt.replay import Log
from hilt.replay.storage.segment import Segment
from tests.replay.toy_steps import new_log, numbers, write

CODECS = {"observations/image": "zlib"}


def test_compressor_in_a_forked_process_has_no_threads_and_the_lock_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The process is forked while a thread compresses. Waiting for it in the child would
    be waiting for a thread that is not there."""
    begun, may_end, real = threading.Event(), threading.Event(), Segment.compress

    def slow(self: Segment, codecs: Any) -> Any:
        begun.set()
        assert may_end.wait(60)
        return real(self, codecs)

    monkeypatch.setattr(Segment, "compress", slow)
    with new_log(tmp_path, compression=CODECS) as log:
        write(log, numbers(0, 10))
        log.complete_segments()
        assert begun.wait(60)
        child = os.fork()
        if child == 0:
            try:
                log.compress()
                same = log._compressor._lock is log.lock and log.read(log.all().keys())["rewards"].tolist() == list(
                    range(10)
                )
                os._exit(0 if same else 2)
            finally:
                os._exit(1)
        end, status = time.monotonic() + 60, (0, 0)
        while status[0] == 0 and time.monotonic() < end:
            status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if status[0] == 0:
            os.kill(child, 9)
            os.waitpid(child, 0)
        with pytest.raises(DeadlineError, match=r"log: segments were not compressed within 0 s. Look at the disk."):
            log.compress(timeout=0)
        may_end.set()
        assert status[0] == child and os.waitstatus_to_exitcode(status[1]) == 0
        log.compress()
        assert log.segments[0].codecs
    assert not [thread for thread in threading.enumerate() if thread.name == "hilt-compress"]


def test_compressor_is_done_when_the_log_is_closed(tmp_path: Path):
    with new_log(tmp_path, compression=CODECS, segment_bytes=30_000) as log:
        for first in range(0, 60, 10):
            write(log, numbers(first, 10))
        log.complete_segments()
    assert not [thread for thread in threading.enumerate() if thread.name == "hilt-compress"]
    with Log.open(tmp_path / "log", "r") as log:
        assert all(segment.codecs for segment in log.segments)
        assert not list((tmp_path / "log").rglob("observations.image.frames"))
        assert sorted(log.read(log.all().keys())["rewards"].tolist()) == list(range(60))
