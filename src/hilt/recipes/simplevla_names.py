"""The names of SimpleVLA-RL's datasets (``data.task_suite_name``), and our tasks that each of them stands for."""

from __future__ import annotations

from hilt.core.errors import UnknownNameError
from hilt.envs import libero, robotwin

ALL = "all"
"""``robotwin_all`` and ``robotwin2_all`` are every task of a version"""


class UnknownSuiteError(UnknownNameError, ValueError):
    """Raised when a dataset is asked for by a name that does not exist. It is a
    ValueError, as it is in SimpleVLA-RL."""


def suites() -> list[str]:
    """All values of ``data.task_suite_name``."""
    return [*libero.SUITES, *robotwin_names()]


def robotwin_names() -> list[str]:
    return [f"{version}_{task}" for version, tasks in robotwin.TASKS.items() for task in (*tasks, ALL)]


def split_name(task_name: str) -> tuple[str, list[str]]:
    """Version and tasks: ``robotwin2_lift_pot`` is one of the second version,
    ``robotwin_all`` is every one of the first."""
    version, _, task = task_name.partition("_")
    tasks = robotwin.TASKS.get(version, ())
    if task not in (*tasks, ALL) or not tasks:
        raise UnknownSuiteError("RoboTwin task", task_name, robotwin_names())
    return version, list(tasks) if task == ALL else [task]


def tasks_of(suite: str) -> list[str]:
    """The full names of our tasks that a dataset has; a task of ours by its full name is one, too."""
    if suite in libero.SUITES:
        return [f"{suite}/{number}" for number in range(libero.SUITES[suite])]
    if "/" in suite:
        return [suite]
    if suite not in suites():
        raise UnknownSuiteError("task suite", suite, suites(), all_listed=True)
    version, tasks = split_name(suite)
    return [f"{version}/{task}" for task in tasks]
