"""Processes for tests that kill them, or join them to a group."""

from __future__ import annotations

import multiprocessing.forkserver
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def fork(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Processes are forked from one that has only imported the test's module.

    They start as quickly as with `fork`, without what other tests did here: torch's autograd refuses to run in the fork of a process that
    has run it beside a GPU.
    """
    server = multiprocessing.forkserver._forkserver
    server._stop()
    before, context = server._preload_modules, multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([request.module.__name__])
    yield context
    server._stop()
    server._preload_modules = before
