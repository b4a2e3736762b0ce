from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wire.pair import Pair


@pytest.fixture
def pair(memory_path: Path) -> Iterator[Pair]:
    """A learner and its clients on free ports."""
    made = Pair(memory_path)
    yield made
    made.close()
