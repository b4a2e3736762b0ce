"""Spoilt datasets end in data or in an error of ours: never in a crash, a hang, too
much memory, or in something that runs.

A fixed number of inputs is tried; `HILT_FUZZ_SECONDS=600` looks as long, `HILT_FUZZ_SEED=7` elsewhere. A
failure names the input; alone it is tried again with

    python -m tests.formats.fuzz FORMAT FOLDER --seed SEED --first NUMBER --count 1
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.effort import rounds
from tests.formats.samples import FORMATS

SEED = int(os.environ.get("HILT_FUZZ_SEED", "0"))
SECONDS = float(os.environ.get("HILT_FUZZ_SECONDS", "420")) / len(FORMATS)
COUNT = 10**9 if "HILT_FUZZ_SECONDS" in os.environ else rounds(10, 1000)
PACKAGES = {
    "lerobot": ("pyarrow", "av", "PIL"),
    "rlinf": ("torch",),
    "robomimic": ("h5py",),
    "minari": ("h5py", "pyarrow"),
}


def fuzz(format: str, folder: Path, seconds: float, *program: str) -> tuple[int, Counter[str], list[dict[str, Any]]]:
    """How many inputs were tried, how they ended, and what went wrong. A process that dies is followed by another."""
    first, end = 0, time.monotonic() + seconds
    outcomes: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    while first == 0 or time.monotonic() < end:
        place = folder / str(first)
        options = ["--seed", str(SEED), "--first", str(first), "--seconds", str(max(1, round(end - time.monotonic())))]
        options += ["--count", str(COUNT)]
        done = subprocess.run(
            [sys.executable, *(program or ("-m", "tests.formats.fuzz")), format, str(place), *options],
            cwd=Path(__file__).parent.parent.parent, capture_output=True, text=True, timeout=600 + seconds,
        )  # fmt: skip
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        wrong += [line for line in lines if "wrong" in line]
        if done.returncode == 0:
            return first + lines[-1]["tried"], outcomes + Counter(lines[-1]["outcomes"]), wrong
        assert (place / "at").exists(), done.stderr  # not even the samples can be read
        at = json.loads((place / "at").read_text())
        if at["what"] is not None:  # else it was not us, but a library that was to spoil its own file twice
            wrong.append({**at, "wrong": f"ended the process with {done.returncode}", "at": done.stderr[-3000:]})
        first = at["number"] + 1
    return first, outcomes, wrong


@pytest.mark.timeout(240 + 2 * SECONDS)
@pytest.mark.parametrize("format", FORMATS)
def test_spoilt_datasets(format: str, memory_path: Path, counted: Callable[[str], None]):
    for package in PACKAGES.get(format, ("PIL",)):
        pytest.importorskip(package)
    tried, outcomes, wrong = fuzz(format, memory_path, SECONDS)
    counted(f"{tried} inputs of seed {SEED}: {dict(outcomes)}")
    assert not wrong, "\n".join(
        f"{one['number']} ({one['what']}): {one['wrong']}\n    {one['at']}" for one in wrong[:20]
    )
    assert tried >= 5 and any("data" in outcome for outcome in outcomes)
    assert any("refused" in outcome or "damaged" in outcome for outcome in outcomes)


@pytest.mark.parametrize(
    ("deed", "found"),
    [
        ("os.abort()", "ended the process with -6"),
        ("time.sleep(300)", "ended the process with 1"),
        ("bytearray(4 << 30)", "MemoryError"),
        ("open(path.with_name('new'), 'wb').close()", 'did ["open'),
        pytest.param("{}['x']", "KeyError", marks=pytest.mark.long),
        pytest.param("os.system('true')", 'did ["os.system', marks=pytest.mark.long),
        pytest.param("os.rename(path, path.with_name('new'))", 'did ["os.rename', marks=pytest.mark.long),
    ],
)
def test_what_a_reader_must_not_do_is_found(deed: str, found: str, memory_path: Path):
    """The same with a reader that does it, once the samples are read."""
    program = f"""
import os, sys, time
from hilt.formats import hilserl
from tests.formats import fuzz
real, fuzz.DEADLINE_S = hilserl.open_dataset, {1 if "sleep" in deed else 120}
def spoilt(path):
    if "input" in path.parts:
        {deed}
    return real(path)
hilserl.open_dataset = spoilt
sys.exit(fuzz.main(sys.argv[1:]))
"""
    _, _, wrong = fuzz("hil-serl", memory_path, 1, "-c", program)
    assert wrong and found in wrong[0]["wrong"], wrong[:3]
