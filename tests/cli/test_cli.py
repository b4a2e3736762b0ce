from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

import hilt
from hilt import cli
from hilt.cli.guide.installed_pages import installed_pages
from hilt.cli.help import EXAMPLES, with_page
from hilt.core.errors import CorruptError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture
def doctor_that(monkeypatch: pytest.MonkeyPatch):
    """Puts a function in the place of ``hilt doctor``."""

    def replace(function) -> None:
        app = typer.Typer()
        app.command()(function)
        monkeypatch.setitem(sys.modules, "hilt.cli.doctor", types.SimpleNamespace(app=app))

    return replace


def test_version():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"hilt {hilt.__version__}\n")


def test_help_names_every_command_and_imports_none():
    script = "import sys; from hilt.cli import app; app(['--help'], standalone_mode=False); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    text, modules = done.stdout.rsplit("[", 1)
    for name, (module, _) in cli.COMMANDS.items():
        assert name in text
        assert f"'{module}'" not in modules


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str):
    result = run(name, "-h")
    assert result.exit_code == 0
    assert "Usage:" in result.stdout and "--help" in result.stdout
    assert "<bool>" not in result.stdout and "`" not in result.stdout


@pytest.mark.parametrize(
    "words", [["--help"], ["-h"], ["data", "convert", "-h"], ["data", "convert", "--help"], ["keys", "new", "-h"]]
)
def test_help_of_commands_below(words: list[str]):
    result = run(*words)
    assert result.exit_code == 0 and "Usage:" in result.stdout
    assert "<bool>" not in result.stdout and "`" not in result.stdout


def test_unknown_command_is_a_usage_error_with_the_nearest_name():
    result = run("evall")
    assert result.exit_code == 2
    assert "Did you mean 'eval'?" in result.stderr


def test_an_error_is_one_line(doctor_that):
    @doctor_that
    def fail() -> None:
        raise CorruptError("file x: 3 bytes changed; run: hilt data repair")

    result = run("doctor")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: file x: 3 bytes changed; run: hilt data repair (see: hilt docs core)\n"


@pytest.mark.parametrize(
    ("words", "text", "shown"),
    [
        (["train", "hil_debog"], "no such recipe.", "no such recipe. See: hilt docs training"),
        (["train", "sft", "x"], "no such data.", "no such data. See: hilt docs fine-tuning"),
        (["--debug", "data", "check", "x"], "no such log", "no such log (see: hilt docs formats)"),
        (["train", "x"], "2 things:\n  - a\n  - b", "2 things:\n  - a\n  - b\nSee: hilt docs training"),
        (["train", "x"], "wrong: docs/recipes.md.", "wrong: docs/recipes.md."),
        ([], "wrong.", "wrong. See: hilt docs command-line"),
    ],
)
def test_an_error_ends_with_the_page_of_its_command(words: list[str], text: str, shown: str):
    assert with_page(text, words) == shown


def test_the_page_of_every_command_is_installed():
    pages = {f"docs/{name}.md" for name in installed_pages()}
    assert {examples[-1] for examples in EXAMPLES.values()} <= pages


def test_debug_shows_the_traceback(doctor_that):
    @doctor_that
    def fail() -> None:
        raise CorruptError("file x")

    result = run("--debug", "doctor")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr and "CorruptError: file x" in result.stderr


def test_an_error_that_is_not_ours_is_not_hidden(doctor_that):
    @doctor_that
    def fail() -> None:
        raise ZeroDivisionError("a bug")

    assert isinstance(run("doctor").exception, ZeroDivisionError)


def test_ctrl_c_exits_with_130():
    script = """
import sys, time, types, typer
app = typer.Typer()
@app.command()
def wait() -> None:
    print("waiting", flush=True)
    time.sleep(600)
sys.modules["hilt.cli.doctor"] = types.SimpleNamespace(app=app)
sys.argv = ["hilt", "doctor"]
from hilt.cli import main
main()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "waiting\n"
        time.sleep(0.1)  # into the sleep
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "Traceback" not in errors


LOST_CONNECTION = """
import hilt.cli
def lose(self, ctx, name):
    raise ConnectionError("arm 172.16.0.2: no answer.")
hilt.cli.LazyGroup.resolve_command = lose
hilt.cli.main()
"""
"""The command with a part that raises as a driver does"""


def hilt_here(*words: str, **given: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hilt", *words]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False, **given)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("words", [["data", "inspect"], ["plot"], ["eval"]])
def test_a_path_that_is_too_long_is_a_line(words: list[str]):
    done = hilt_here(*words, "x" * 300)
    lines = [line for line in done.stderr.splitlines() if line != "importing torch ..."]
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    assert re.match(r"error: x+\.\.\. \(3\d\d characters\): File name too long\. Check the path\.", lines[0])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full on this system")
def test_output_without_room_is_a_line():
    with open("/dev/full", "w") as full:
        done = hilt_here("settings", "hil_debug", stdout=full)
    assert done.returncode == 1 and done.stderr.startswith(
        "error: the output cannot be written: No space left on device."
    ), done.stderr
    assert done.stderr.count("\n") == 1


def test_connection_that_a_driver_lost_is_a_line_with_its_place():
    done = subprocess.run(
        [sys.executable, "-c", LOST_CONNECTION, "recipes"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ConnectionError: arm 172.16.0.2: no answer (raised in <string>, line 4)")
    assert "output" not in done.stderr


def test_whoever_reads_may_go_early():
    process = subprocess.Popen(
        [sys.executable, "-m", "hilt", "settings", "hil_debug"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(120) in (0, 1)


def test_letters_that_a_terminal_lacks_are_question_marks():
    code = "import hilt.cli; hilt.cli.app = lambda: print('5 \\u00d7 5 \\u2013 \\u00e9'); hilt.cli.main()"
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=120, check=True)
    assert done.stdout == b"5 \xd7 5 ? \xe9\n"


def test_every_demo_has_examples_in_its_help():
    from hilt.cli.demos.demo import app

    assert {f"demo {command.name}" for command in app.registered_commands} <= EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_fits_a_screen_with_two_examples_and_a_page(name: str):
    result = CliRunner().invoke(cli.app, [*name.split(), "--help"], env={"COLUMNS": "100"})
    assert result.exit_code == 0 and len(result.stdout.rstrip().splitlines()) <= 40, result.stdout
    *examples, page = EXAMPLES[name]
    assert len(examples) == 2 and all(f"  {example}\n" in result.stdout for example in examples)
    assert f"Documentation: {page}" in result.stdout and (Path(__file__).parents[2] / page).is_file()
    for example in examples:  # its options exist, and its command
        words = example.split(" | ")[0].split()[1:]
        command = next(" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in EXAMPLES)
        below = CliRunner().invoke(cli.app, [*command.split(), "--help"]).stdout
        assert all(f"{word} " in below for word in words if word.startswith("--")), example
