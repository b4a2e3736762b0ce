"""Processes for tests that kill them, or join them to a group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.forked import preloaded


@pytest.fixture(scope="module")
def fork(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Processes are forked from one that has only imported the test's module.

    They start as quickly as with `fork`, without what other tests did here: torch's autograd refuses to run in the fork of a process that
    has run it beside a GPU.
    """
    with preloaded(request.module.__name__) as context:
        yield context
