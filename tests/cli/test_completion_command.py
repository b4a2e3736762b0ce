"""What shells offer behind the beginning of a command: by the function that finds it, and in real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.cli.guide import candidates as found_by
from hilt.cli.guide.candidates import candidates
from hilt.cli.guide.completion_command import Shell, written_for
from hilt.cli.help import EXAMPLES
from hilt.recipes import RECIPES, SFT_RECIPES, VLA_RECIPES


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hilt" / "completion.json"


def values(line: str) -> list[str]:
    return [one.value for one in candidates(line)[1]]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hilt tr", {"train"}),
        ("hilt serve-", {"serve-policy", "serve-robot"}),
        ("hilt data con", {"convert"}),
        ("hilt train tabletop_pi", {"tabletop_pick", "tabletop_pick_red"}),
        ("hilt --debug train pi0_p", {"pi0_ppo"}),
        ("hilt train s", {"sft", "simplevla"}),
        ("hilt train sft sft_d", {"sft_debug"}),
        ("hilt settings class", {"classifier"}),
        ("hilt train tabletop_pick operator=br", {"operator=browser"}),
        ("hilt train tabletop_pick 'operator=br", {"operator=browser"}),
        ("hilt train hil_debug agent.encoder.k", {"agent.encoder.kept_shifts=", "agent.encoder.kind="}),
        ("hilt train hil_debug agent.encoder.kind=res", {"agent.encoder.kind=resnet10"}),
        ("hilt train hil_debug --run runs/a max_env", {"max_env_steps="}),
        ("hilt record x --device game", {"gamepad"}),
        ("hilt record tabletop/pic", {"tabletop/pick", "tabletop/pick_red", "tabletop/pick_blue"}),
        ("hilt record x --episo", {"--episodes"}),
        ("hilt train hil_debug task=tabletop/dra", {"task=tabletop/drawer"}),
        ("hilt eval runs/mine --vid", {"--videos"}),
        ("hilt data label log --succ", {"--success"}),
        ("hilt docs train", {"training"}),
        ("hilt completion f", {"fish"}),
        ("hilt train hil_debug --run ", set()),
        ("hilt eval ", set()),
        ("hilt ' \"", set()),
        ("", set()),
    ],
)
def test_what_follows_the_beginning_of_a_line(line: str, expected: set[str]):
    if "tabletop/" in line:
        pytest.importorskip("mujoco")
    assert set(values(line)) == expected


def test_every_command_and_every_recipe_is_offered():
    words = {name.split()[0] for name in cli.COMMANDS}
    assert set(values("hilt ")) == words
    assert set(values("hilt data ")) == {name.split()[1] for name in EXAMPLES if name.startswith("data ")}
    assert {*RECIPES, *VLA_RECIPES, "sft", "classifier"} <= set(values("hilt train "))
    assert {*RECIPES, *VLA_RECIPES, *SFT_RECIPES} <= set(values("hilt settings "))


def test_settings_of_a_vla_are_kept_for_the_next_time(cache: Path, monkeypatch: pytest.MonkeyPatch):
    """Finding them imports torch, which takes seconds."""
    pytest.importorskip("torch")
    first = values("hilt train vla_debug algorithm.")
    assert {"algorithm.estimator=", "algorithm.batch.chunks_per_pass="} <= set(first) and cache.is_file()
    monkeypatch.setattr(found_by, "_rows_of", lambda job: pytest.fail("they are kept"))
    assert values("hilt train vla_debug algorithm.") == first
    assert values("hilt train vla_debug algorithm.normalize=gr") == ["algorithm.normalize=group"]


def test_a_file_of_settings_has_those_of_its_job(tmp_path: Path):
    pytest.importorskip("torch")
    (tmp_path / "mine.yaml").write_text("tasks: [tabletop/pick]\n")
    assert "collect.group_size=" in values(f"hilt train {tmp_path}/mine.yaml collect.")
    assert values("hilt train nowhere.yaml collect.") == []


def test_a_home_that_cannot_be_written_to_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert values("hilt train hil_debug agent.encoder.ki") == ["agent.encoder.kind="]


def test_each_shell_has_its_own_form():
    one = found_by.Candidate("task=module:", "What it is")
    assert written_for(Shell.bash, "task=mod", one) == "module:"
    assert written_for(Shell.zsh, "task=mod", one) == r"task=module\::What it is"
    assert written_for(Shell.fish, "task=mod", one) == "task=module:\tWhat it is"


ASKED = {
    "bash": """
source "$SCRIPT"
ask() { COMP_LINE="$1" COMP_POINT=${#1}; _hilt; printf '%s\\n' "${COMPREPLY[@]}"; }
ask "hilt train tabletop_pi"; ask "hilt record x --device space"
""",
    "zsh": """
autoload -U compinit && compinit -u -d "$HOME/dump"
source "$SCRIPT"
_describe() { print -l -- "${(@P)2}" | cut -d: -f1; }
ask() { words=("${(z)1}"); CURRENT=${#words}; _hilt; }
ask "hilt train tabletop_pi"; ask "hilt record x --device space"
""",
    "fish": """
source $SCRIPT
complete -C "hilt train tabletop_pi" | cut -f1
complete -C "hilt record x --device space" | cut -f1
""",
}
"""A script for each shell that loads ours and asks for completions"""


@pytest.mark.parametrize("shell", ASKED)
def test_a_real_shell_completes(shell: str, tmp_path: Path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    script, program = tmp_path / "script", tmp_path / "bin" / "hilt"
    script.write_text(CliRunner().invoke(cli.app, ["completion", shell]).stdout)
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hilt "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "SCRIPT": str(script), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [shell, "-c", ASKED[shell]], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["tabletop_pick", "tabletop_pick_red", "spacemouse"], done.stderr
