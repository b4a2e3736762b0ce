"""What tests counted is printed at the end of the run, passed or not: how often a writer was killed, and where."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from hilt.core.signals import ENDING
from tests import effort, forked, schedule

# other tests run beside this one: two threads of torch on busy cores are slower than one
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes depends on what else the machine does; no test fails for that.
settings.register_profile("short", max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("short"), max_examples=1000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="what `make test` shortens, at full length, and the tests marked `long`"
    )
    parser.addoption(
        "--fast", action="store_true", help=f"the files with the quickest tests, {schedule.FAST_S:g} s in all"
    )


def pytest_configure(config: pytest.Config) -> None:
    # as in a job that a shell starts in the background, or with nohup; children would inherit it
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if config.getoption("--long"):
        os.environ[effort.LONG] = "1"
    settings.load_profile("long" if effort.is_long() else "short")
    forked.find_tests_in_fork_servers()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --fast, files that take longer are not even imported."""
    if not config.getoption("--fast") or collection_path.suffix != ".py":
        return None
    taken = schedule.recorded()
    file = collection_path.relative_to(config.rootpath).as_posix()
    return True if file in taken and file not in schedule.fast(set(taken), taken) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """What is imported for tests stays to the end, so Python's garbage collection
    need not look through it, now or later."""
    gc.disable()
    config = session.config
    if worker := getattr(config, "workerinput", None):
        files = [
            file for file in schedule.files_in(config.rootpath, config.args) if not pytest_ignore_collect(file, config)
        ]
        schedule.import_share(config.rootpath, files, int(worker["workerid"].removeprefix("gw")), worker["workercount"])


def pytest_collection_finish() -> None:
    """From here on garbage is collected less often than by default: it took 3% of the CPU time of tests."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(trylast=True)  # the tests that -m and -k leave out are gone by then: the order counts those that run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not effort.is_long() and (gone := [item for item in items if "long" in item.keywords]):
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if "long" not in item.keywords]
    if workers := getattr(config, "workerinput", {}).get("workercount"):
        tests = [item.nodeid for item in items]
        items[:] = [items[index] for index in schedule.longest_first(tests, schedule.recorded(), workers)]


@pytest.fixture(autouse=True, scope="session")
def _same_precision_everywhere() -> Iterator[None]:
    """Within the tests' own process `auto` is float32, on any CPU: numbers must not depend
    on it, those of a module's fixtures neither. Processes that a test starts decide."""
    from hilt.policies import precision

    choice = precision.PrecisionChoice(precision.FLOAT32, "this is a test")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(precision, "_automatic", lambda device: choice)
        yield


@pytest.fixture(autouse=True)
def _same_number_of_threads() -> Iterator[None]:
    """A rank in the tests' own process takes all cores; how a product of matrices is
    summed must not depend on the test before."""
    asked = os.environ.get("OMP_NUM_THREADS")
    yield
    if os.environ.get("OMP_NUM_THREADS") != asked:
        os.environ.pop("OMP_NUM_THREADS")
        os.environ.update({} if asked is None else {"OMP_NUM_THREADS": asked})
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_signal_handlers() -> Iterator[None]:
    """A test that leaves a handler behind, or a signal blocked, fails itself:
    another test would wait for Ctrl-C in vain."""
    handlers = {number: signal.getsignal(number) for number in ENDING}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    changed = [number.name for number in ENDING if signal.getsignal(number) != handlers[number]]
    for number, handler in handlers.items():
        signal.signal(number, handler)
    left = signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert not changed and left == blocked, f"this test left other handlers of {changed}, and blocked {left - blocked}"


@pytest.fixture(autouse=True, scope="session")
def _memory_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests trust is not remembered for whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def fork(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Processes are forked from one that has imported the test's module, of tests of the log and its edits, or torch.

    They start as quickly as with `fork`, without what other tests did here: torch's autograd refuses to run in the
    fork of a process that has run it beside a GPU.
    """
    is_light = request.path.parent.name == "replay"
    with forked.preloaded(request.module.__name__) if is_light else forked.with_torch() as context:
        yield context


@pytest.fixture(scope="session")
def fork_server() -> Iterator[forked.ForkServer]:
    """Scripts and `hilt` in processes that are forked from one, started when a test first asks for it."""
    server = forked.ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def one_chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser for all tests. Starting it and compiling its pages takes seconds."""
    from tests.teleop import chromium

    browser = chromium.start(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def chromium_tab(one_chromium: Any) -> Iterator[Any]:
    """The browser, as if it had just been started, for the tests of a module."""
    from tests.teleop import chromium

    one_chromium.set_window_size(*chromium.SIZE)
    yield one_chromium
    chromium.leave(one_chromium)


@pytest.fixture
def counted(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a line in the summary of the run."""
    return lambda line: request.node.user_properties.append(("counted", f"{request.node.name}: {line}"))


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: thousands of syncs cost nothing there,
    and a killed process leaves the same bytes."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="hilt-test-", dir="/dev/shm"))
    yield folder
    deadline = time.monotonic() + 60
    while folder.exists():
        with suppress(OSError) if time.monotonic() < deadline else nullcontext():  # who was killed may still write
            shutil.rmtree(folder)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A test's report brings its lines, also from another process. The last of its reports has them all."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    ended = [report for report in reports if getattr(report, "when", None) == "teardown"]
    lines = [line for report in ended for name, line in report.user_properties if name == "counted"]
    if lines:
        terminalreporter.section("counted")
        for line in lines:
            terminalreporter.write_line(line)
