"""What `make lint` checks, and what importing Hilt costs."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools.measure import SOURCE, broad_excepts, measure, syntax_trees

ROOT = Path(__file__).parent.parent


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ruff():
    run("-m", "ruff", "check", ".")


def test_mypy():
    run("-m", "mypy")


def test_mypy_is_strict_where_promised(tmp_path: Path):
    """The settings in pyproject.toml refuse a function without types in core, replay and wire."""
    (tmp_path / "hilt").mkdir()
    (tmp_path / "hilt/__init__.py").touch()
    for part in ("core", "replay", "wire"):
        (tmp_path / "hilt" / part).mkdir()
        (tmp_path / "hilt" / part / "__init__.py").touch()
        (tmp_path / "hilt" / part / "loose.py").write_text("def loose(x):\n    return x\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--cache-dir",
        str(tmp_path / "cache"),
        "hilt",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1, done.stdout + done.stderr
    for part in ("core", "replay", "wire"):
        assert f"hilt/{part}/loose.py:1: error: Function is missing a type annotation" in done.stdout


def test_a_constant_of_a_module_is_assigned_once():
    """Two that were given one name by a renaming: the first value was lost, and the
    learner looked around fifty times as often."""
    twice = []
    for path, tree in syntax_trees(SOURCE).items():
        assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
        names = [
            name.id
            for node in assigned
            for target in node.targets
            for name in ast.walk(target)
            if isinstance(name, ast.Name)
        ]
        twice += [f"{path.name}: {name}" for name in sorted(set(names)) if name.isupper() and names.count(name) > 1]
    assert not twice


PROCESS_WIDE = re.compile(
    r"os\.(environ(\[.*\]|\.(setdefault|update|pop|popitem|clear))?|putenv|unsetenv|chdir|umask)"
    r"|sys\.path(\[.*\]|\.(append|insert|extend|remove|pop|clear))?"
    r"|warnings\.(filterwarnings|simplefilter)|logging\.(basicConfig|disable)|.*\.setLevel",
    re.DOTALL,
)
"""What is assigned to, deleted or called where a function changes the process that it runs in"""
MENTIONED = re.compile(
    r"environ|putenv|unsetenv|chdir|umask|sys\.path|from sys import"
    r"|filterwarnings|simplefilter|basicConfig|disable|setLevel"
)
"""What the text of a file has that does so: to walk through the syntax of all files takes seconds"""
MAY_CHANGE_THE_PROCESS = {
    "__main__.py: module": "the process is ours: python -m hilt",
    "cli/servers/serve_policy.py: serve_policy": "the process is ours: hilt serve-policy",
    "cli/servers/serve_robot.py: serve_robot": "the process is ours: hilt serve-robot",
    "cli/train_hil.py: _shown": "the process is ours: hilt learner and hilt actor",
    "cli/train_simplevla.py: simplevla_command": "the process is ours: hilt train simplevla",
    "core/names.py: import_named": "only in a process of ours: what a command names may import its neighbors later",
    "core/names.py: import_path": "a context manager, which undoes it",
    "core/platform.py: environment": "a context manager, which undoes it",
    "core/threads.py: set_threads": "only commands and the processes that they start call it",
    "core/trust.py: command_line": "a context manager, which undoes what `import_named` did",
    "distributed/shard.py: call": "within warnings.catch_warnings, which undoes it",
    "envs/libero.py: _libero": "undone as soon as LIBERO is imported",
    "envs/robotwin.py: _quiet": "a context manager, which undoes it",
}


def changes_of_the_process(tree: ast.AST, function: str = "module") -> set[str]:
    """The functions that assign to, delete or call what is process-wide."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        inner = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        targets: list[ast.AST] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [*node.targets]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call):
            targets = [node.func]
        if any(PROCESS_WIDE.fullmatch(ast.unparse(target)) for target in targets):
            found.add(function)
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "sys", "warnings"):
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            # the search would not find it by another name
            found |= {function for name in named if PROCESS_WIDE.fullmatch(name)}
        found |= changes_of_the_process(node, inner)
    return found


def test_libraries_do_not_change_the_process_that_they_are_used_in():
    """Environment, import path, current folder, filters of warnings and levels of
    loggers belong to the program that uses Hilt."""
    source, found = ROOT / "src" / "hilt", set()
    for path, tree in syntax_trees(SOURCE).items():
        if MENTIONED.search(path.read_text()):
            found |= {f"{path.relative_to(source)}: {function}" for function in changes_of_the_process(tree)}
    assert found - set(MAY_CHANGE_THE_PROCESS) == set(), (
        "use core.platform.environment, core.names.import_path or env= of a child process; or name the "
        "function here, with a reason"
    )
    assert set(MAY_CHANGE_THE_PROCESS) - found == set(), "no longer needed"


@pytest.mark.parametrize(
    "code",
    [
        *(
            "os.environ['A'] = '1'",
            "os.environ.setdefault('A', '1')",
            "del sys.path[0]",
            "sys.path += ['a']",
            "sys.path[:] = []",
        ),
        *(
            "logger.setLevel(10)",
            "logging.getLogger('a').setLevel(10)",
            "warnings.filterwarnings('ignore')",
            "from os import environ",
        ),
        "os.chdir('/')",
    ],
)
def test_changes_of_the_process_are_found(code: str):
    assert MENTIONED.search(code)
    assert changes_of_the_process(ast.parse(f"def f():\n    with g():\n        {code}\n")) == {"f"}
    assert (
        changes_of_the_process(
            ast.parse("x = {**os.environ}\ny = os.environ['A']\nz = sys.path[0]\nfrom os import path")
        )
        == set()
    )


AN_OPTION_EACH = "typer makes an option of the command line from each parameter; what does the work takes settings"
ANOTHER_SYSTEM = "a signature of another system, which its users know"
DOCUMENTED = "keywords that the documentation promises, and that read well at the call; most calls give two or three"
KERNEL = "a kernel for GPUs, which is given each pointer, stride and size by itself"
MANY_PARAMETERS = {
    "hilt/cli/data/data_convert.py: convert_dataset": AN_OPTION_EACH,
    "hilt/cli/data/edit_commands.py: label": AN_OPTION_EACH,
    "hilt/cli/eval_command.py: evaluate": AN_OPTION_EACH,
    "hilt/cli/record_command.py: record": AN_OPTION_EACH,
    "hilt/cli/servers/serve_policy.py: serve_policy": AN_OPTION_EACH,
    "hilt/cli/servers/serve_robot.py: serve_robot": AN_OPTION_EACH,
    "hilt/compat/ript.py: LIBEROEnvRunner.__init__": ANOTHER_SYSTEM,
    "hilt/compat/rlinf/buffer.py: TrajectoryReplayBuffer.__init__": ANOTHER_SYSTEM,
    **{
        f"hilt/policies/fused_layer.py: {name}": KERNEL
        for name in ("_added", "_attention", "_linear", "_pairs", "_parts")
    },
    "hilt/policies/vla/openvla_model.py: OpenVLAPolicy.generate_action_verl": ANOTHER_SYSTEM,
    "hilt/hil/evaluate.py: evaluate": DOCUMENTED,
    "hilt/replay/sampling/sampler.py: Sampler.__init__": DOCUMENTED,
}
"""Functions that may have more than 10 parameters, and why"""


def test_functions_are_short_and_flat_and_take_few_parameters():
    figures = measure(SOURCE)
    assert figures["functions over 60 lines"] == []
    assert figures["functions nested deeper than 4"] == []
    assert set(figures["functions with more than 10 parameters"]) == MANY_PARAMETERS.keys()


@pytest.mark.parametrize(
    ("figure", "most"),
    [("public signatures that mention Any", 0.11), ("public signatures with a bare Any", 0.035)],
)
def test_types_mean_something(figure: str, most: float):
    count, total = map(int, re.findall(r"\d+", str(measure(SOURCE)[figure]))[:2])
    assert count <= most * total, f"{figure}: {count} of {total}; name what is given, see CONTRIBUTING.md"


def test_docstrings_begin_with_a_sentence():
    assert measure(SOURCE)["docstrings that are fragments"] == 0


NOT_JOINED = {
    "core/platform.py: end_with_pipe": "watches for the end of the caller for as long as the process lives",
    "distributed/group.py: _serve": "watches for the end of the caller for as long as the process of a worker lives",
    "robot/control.py: main": "watches for the end of the caller for as long as the control process lives",
}
"""Functions and classes with a thread that nothing waits for, and why"""


def test_threads_are_joined_with_a_deadline():
    """A class or function that starts threads joins them, and every join has a timeout."""
    source, not_joined = ROOT / "src" / "hilt", []
    for path, tree in syntax_trees(SOURCE).items():
        text = path.read_text()
        for part in tree.body if ".join(" in text or "Thread(" in text else ():
            calls = [
                node for node in ast.walk(part) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            ]
            joins = [
                call
                for call in calls
                if call.func.attr == "join" and not isinstance(call.func.value, ast.Constant | ast.JoinedStr)
            ]
            place = f"{path.relative_to(source)}: {getattr(part, 'name', '')}"
            assert not [join for join in joins if not join.args and not join.keywords], (
                f"{place}: a join without a deadline"
            )
            if any(ast.unparse(call.func) == "threading.Thread" for call in calls) and not joins:
                not_joined.append(place)
    assert not_joined == sorted(NOT_JOINED), (
        "keep the thread and join it when its owner is closed; or name it here, with a reason"
    )


BROAD_EXCEPTS = {
    "hilt/compat/ript.py: distributed_collect_batches": "compat/test_ript.py: test_a_failed_rollout_counts_and_is_told",
    "hilt/core/url_folder.py: _probe": (
        "seeds/test_004_simplevla_checkpoints.py: test_an_unreachable_url_is_an_error_before_training"
    ),
    "hilt/distributed/remote_workers.py: _attempt": (
        "distributed/test_group.py: test_an_exception_arrives_as_itself_with_its_place"
    ),
    "hilt/distributed/remote_workers.py: portable": (
        "distributed/test_group.py: test_an_exception_that_cannot_travel_is_told_in_words"
    ),
    "hilt/envs/chunk_executor.py: run": (
        "envs/test_chunk_executor.py: test_what_the_policy_raises_is_raised_in_the_control_loop_with_its_cause"
    ),
    "hilt/envs/simulators.py: answer": "envs/test_pool.py: test_an_exception_costs_its_episode_alone",
    "hilt/policies/graphs.py: _capture_wanted": (
        "policies/test_graphs.py: test_a_capture_aside_that_fails_is_told_once_and_answers_go_on"
    ),
    "hilt/replay/sampling/prefetch.py: _fill": (
        "replay/test_prefetch.py: test_prefetch_raises_whatever_its_function_raises"
    ),
    "hilt/replay/view.py: _admit": "replay/test_view.py: test_view_predicate_that_fails_does_not_disturb_writers",
    "hilt/runs/checkpoint.py: _write": "runs/test_checkpoint.py: test_a_thread_writes_a_copy",
    "hilt/serving/batcher.py: _answer": "serving/test_batcher.py: test_a_policy_that_raises_fails_only_the_request",
    "hilt/wire/ingest.py: _take_block": "wire/test_exactly_once.py: test_an_unexpected_error_in_the_middle_of_a_block",
    "hilt/wire/ingest.py: _take_one": "wire/test_server.py: test_an_insert_that_raises_anything",
    "hilt/wire/requests.py: _carry_out": "wire/test_client.py: test_answers",
    "hilt/wire/server.py: _call_back": "wire/test_server.py: test_a_data_callback_that_raises",
    "hilt/wire/server.py: _data": (
        "wire/test_server.py: test_server_answers_after_an_unexpected_error_and_the_steps_come_again"
    ),
    "hilt/wire/server.py: _take_messages": "wire/test_server.py: test_server_goes_on_after_a_message_that_fails",
    "hilt/wire/weights.py: _deliver": (
        "wire/test_weights.py: test_a_failing_callback_is_logged_and_the_next_weights_come"
    ),
}
"""Where any exception is caught and not raised again, and the test that shows why:
without the except, or with a narrower one, it fails"""


def test_broad_excepts_have_a_reason_and_a_test():
    found = list(broad_excepts(ROOT / "src" / "hilt"))
    assert [place for place, reason in found if not reason] == [], "name the exceptions, or raise it again"
    assert sorted(place for place, _ in found) == sorted(BROAD_EXCEPTS)
    for file, _, name in (test.partition(": ") for test in BROAD_EXCEPTS.values()):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"tests/{file} has no {name}"


@pytest.mark.parametrize("module", ["hilt", "hilt.core", "hilt.replay", "hilt.cli.demos.demo"])
def test_import_brings_no_torch(module: str):
    assert run("-c", f"import sys, {module}; print('torch' in sys.modules)").strip() == "False"


def test_import_is_quick():
    # the machine may be busy
    clock = "import time; start = time.process_time(); import hilt; print(time.process_time() - start)"
    seconds = min(float(run("-c", clock)) for _ in range(3))
    assert seconds < 0.3


def test_a_cpu_build_of_torch_brings_no_cuda():
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("this is a CUDA build of torch: pip knows of no CPU build here, or the machine has a GPU")
    names = [distribution.metadata["Name"] for distribution in importlib.metadata.distributions()]
    assert [name for name in names if name.startswith(("nvidia-", "cuda-"))] == []


def test_every_extra_that_an_error_names_exists():
    """``optional_module(name, purpose, extra)`` and ``MissingPackageError(package,
    purpose, extra)``; an empty one has its own cure."""
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = \[", section, re.MULTILINE))
    named = {
        call.args[2].value: f"{path.name}:{call.lineno}"
        for path in (ROOT / "src").rglob("*.py")
        if re.search("optional_module|MissingPackageError", path.read_text())
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("optional_module", "MissingPackageError")
        if len(call.args) > 2 and isinstance(call.args[2], ast.Constant) and (call.args[2].value or len(call.args) < 5)
    }
    assert {"sim", "robot", "teleop", "formats"} <= set(named)
    assert {extra: place for extra, place in named.items() if extra not in extras} == {}


def test_the_makefile_stays_small():
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:"))
    assert len(phony.split()) - 1 <= 12
