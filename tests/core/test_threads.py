"""One thread, unless somebody asks for more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BEFORE = "from hilt.core.threads import one_thread; one_thread(); import torch; print(torch.get_num_threads())"
AFTER = "import torch; torch.set_num_threads(2); from hilt.core.threads import one_thread; one_thread(); print(torch.get_num_threads())"


@pytest.mark.parametrize(("code", "asked", "expected"), [(BEFORE, "", "1"), (AFTER, "", "1"), (BEFORE, "2", "2"), (AFTER, "2", "2")])
def test_torch_has_one_thread_unless_the_user_asks_for_more(code: str, asked: str, expected: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | ({"OMP_NUM_THREADS": asked} if asked else {})
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == [expected]
