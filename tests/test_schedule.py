"""The tests' own order and selection, and the processes that they fork."""

from __future__ import annotations

import itertools
import multiprocessing.forkserver
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilt.core.children import process_context
from tests import forked, schedule
from tests.effort import LONG, rounds, some_of

FILES = [f"tests/test_{name}.py" for name in "abcdefgh"]


def test_rounds_follow_the_effort(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(LONG, raising=False)
    assert rounds(3, 100) == 3
    monkeypatch.setenv(LONG, "1")
    assert rounds(3, 100) == 100


def test_some_of_many_places_are_the_ends_of_each_kind_and_others_between(monkeypatch: pytest.MonkeyPatch):
    kinds = ["create", *50 * ["write"], "sync", "rename", *47 * ["write"]]
    monkeypatch.delenv(LONG, raising=False)
    chosen = some_of(kinds, 10)
    assert chosen == sorted(set(chosen)) and {0, 1, 51, 52, 99} <= set(chosen) and len(chosen) <= 12
    assert max(b - a for a, b in itertools.pairwise(chosen)) < 35
    assert some_of(kinds[:10], 10) == list(range(10))
    monkeypatch.setenv(LONG, "1")
    assert some_of(kinds, 10) == list(range(100))


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.lists(st.floats(0, 50), min_size=8, max_size=8),
    st.integers(1, 4),
)
def test_longest_first(counts: list[int], seconds: list[float], workers: int):
    """Every test once; it begins with the longest, and a single worker goes from long to quick."""
    tests = [f"{file}::test_{number}" for file, count in zip(FILES, counts, strict=False) for number in range(count)]
    taken = {file: schedule.Taken(duration, duration) for file, duration in zip(FILES, seconds, strict=True)}
    row = [tests[index] for index in schedule.longest_first(tests, taken, workers)]
    assert Counter(row) == Counter(tests)
    longest = max(taken[file].longest for file in FILES[: len(counts)])
    assert taken[schedule.file_of(row[0])].longest == longest or len(tests) < workers
    if workers == 1:
        durations = [taken[schedule.file_of(test)].longest for test in row]
        assert durations == sorted(durations, reverse=True)


def test_the_quickest_files():
    taken = {"a": schedule.Taken(100, 1, 1000), "b": schedule.Taken(19, 19, 1), "c": schedule.Taken(30, 15, 2)}
    assert schedule.fast({"a", "b", "c", "new"}, taken) == {"a", "new"}
    assert schedule.fast({"b", "c"}, taken) == {"b", "c"}


def test_durations_name_existing_files():
    """`python3 tools/durations.py` writes it anew. A file that was renamed only loses its place in the order."""
    taken = schedule.recorded()
    there = [file for file in taken if (schedule.DURATIONS.parent.parent / file).exists()]
    assert len(there) > 0.8 * len(taken) > 100 and all(0 <= row.longest <= row.together for row in taken.values())


def test_each_worker_imports_another_share_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Together all files, each once; one that is skipped or broken is left to pytest, which reports it."""
    (folder := tmp_path / "shares").mkdir()
    texts = {
        "a": "",
        "b": "import pytest\npytest.skip('not here', allow_module_level=True)",
        "c": "1 / 0",
        "d": "",
        "e": "",
    }
    for file, text in texts.items():
        (folder / f"test_{file}.py").write_text(text)
    (folder / "helper.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    files = schedule.files_in(tmp_path, ["shares", "shares/test_a.py::test_x"])
    assert [file.name for file in files] == [f"test_{name}.py" for name in "abcde"]
    shares = []
    for worker in range(2):
        schedule.import_share(tmp_path, files, worker, workers=2)
        shares.append({name for name in sys.modules if name.startswith("shares.test_")})
        for name in shares[-1]:
            del sys.modules[name]
    assert shares == [{"shares.test_a", "shares.test_e"}, {"shares.test_d"}]


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="its fork server is started without the environment: see hilt.core.children"
)
def test_a_fork_server_has_imported_what_its_children_need_wherever_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    process_context("forkserver")  # from now on without the current folder on the path
    with forked.preloaded("tests.replay.writers") as context:
        ours, theirs = context.Pipe(False)
        child = context.Process(target=forked.tell_modules, args=(theirs,))
        child.start()
        assert ours.poll(60) and {"tests.replay.writers", "hilt.replay"} <= set(ours.recv())
        child.join(60)


def test_a_fork_server_goes_on_after_another_was_used():
    server = multiprocessing.forkserver._forkserver
    with forked.preloaded("json") as context:
        first = server._forkserver_pid
        with forked.preloaded("csv"):
            assert server._forkserver_pid != first
        assert server._forkserver_pid == first
        child = context.Process(target=int)
        child.start()
        child.join(60)
        assert child.exitcode == 0
