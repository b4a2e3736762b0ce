"""Compression of complete segments, in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from hilt.core.errors import DeadlineError, HiltError
from hilt.core.files import Files
from hilt.replay.catalog import Catalog
from hilt.replay.storage.segment import Segment

logger = logging.getLogger("hilt.replay")


class Compressor:
    """Writes the frames of complete segments again with a codec, a thread for each
    segment, and removes the uncompressed files."""

    def __init__(self, catalog: Catalog, lock: threading.RLock, files: Files):
        """`lock` is the log's."""
        self._catalog, self._lock, self._files = catalog, lock, files
        self._codecs: Mapping[str, str] = catalog.settings["compression"]
        self._threads: list[threading.Thread] = []

    def start(self, segment: Segment) -> None:
        """Compresses a segment, if the settings say so."""
        if self._codecs:
            thread = threading.Thread(target=self._compress, args=(segment,), name="hilt-compress", daemon=True)
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
            thread.start()

    def wait(self, seconds: float) -> None:
        """Waits until every complete segment is compressed; raises `DeadlineError` after this number of seconds."""
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                raise DeadlineError(
                    f"{self._catalog.path}: segments were not compressed within {seconds:g} s. Look at the disk."
                )
        self._threads = []

    def after_fork(self, lock: threading.RLock) -> None:
        """In a forked process the log has another lock, and the threads do not exist."""
        self._lock, self._threads = lock, []

    def _compress(self, segment: Segment) -> None:
        uncompressed = self._write_again(segment)
        with self._lock:
            if uncompressed and self._is_open(segment):
                self._catalog.reopen(segment.number)
                for path in uncompressed:
                    self._files.remove(path)

    def _write_again(self, segment: Segment) -> list[Path]:
        """Writes the compressed files; returns the uncompressed ones, which are no longer needed."""
        readers = self._catalog.segments.readers
        with self._lock:
            if not self._is_open(segment):
                return []
            epoch = readers.enter()  # so that the segment is not closed meanwhile
        try:
            return segment.compress(self._codecs)
        except HiltError as error:
            logger.warning("%s: not compressed, its frames stay as they are: %s", segment.folder, error)
            return []
        finally:
            with self._lock:
                readers.leave(epoch)

    def _is_open(self, segment: Segment) -> bool:
        return not self._catalog.closed and segment.number in self._catalog.segments
