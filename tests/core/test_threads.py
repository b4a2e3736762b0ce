"""One thread, unless somebody asks for more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hilt.core.threads import one_thread

CODE = "from hilt.core.threads import one_thread; one_thread(); import torch; print(torch.get_num_threads())"


@pytest.mark.parametrize(("asked", "expected"), [("", "1"), pytest.param("2", "2", marks=pytest.mark.long)])
def test_torch_has_one_thread_unless_the_user_asks_for_more(asked: str, expected: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | (
        {"OMP_NUM_THREADS": asked} if asked else {}
    )
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.split() == [expected]


@pytest.mark.parametrize(("asked", "expected"), [("", 1), ("2", 2)])
def test_threads_are_limited_in_an_imported_torch(asked: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    if not asked:
        monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(2)
    one_thread()
    assert torch.get_num_threads() == expected
