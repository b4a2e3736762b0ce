"""How the learning benchmark shares a machine among its runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from bench.lab import Lab


def test_runs_side_by_side_have_cores_of_their_own(tmp_path: Path):
    machine, words = sorted(os.sched_getaffinity(0)), [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]

    def cores_of_a_child(meet: threading.Barrier) -> list[int]:
        meet.wait(timeout=60)
        return json.loads(subprocess.run(words, capture_output=True, text=True, check=True, timeout=600).stdout)

    alone = Lab(tmp_path, quick=True).side_by_side(cores_of_a_child, [threading.Barrier(1)] * 2)
    assert alone == [machine, machine], "without a number each has the whole machine"
    together = Lab(tmp_path, quick=True, cores=1).side_by_side(cores_of_a_child, [threading.Barrier(len(machine))] * len(machine))
    assert sorted(together) == [[core] for core in machine], "all at once, as the barrier shows"
    assert sorted(os.sched_getaffinity(0)) == machine, "the bench itself moves freely"
