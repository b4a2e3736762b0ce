"""A metrics sink: it counts records by their kind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hilt.observe.sinks import Sink


class Tally(Sink):
    def __init__(self, folder: Path, run: str):
        self._file, self._run, self._counts = folder / "tally.json", run, Counter[str]()

    def write(self, record: Mapping[str, Any]) -> None:
        self._counts[record["kind"]] += 1

    def close(self) -> None:
        self._file.write_text(json.dumps({"run": self._run, **self._counts}))
