"""The files of examples/: each is read, checked and shown by the command that its
first lines name, and starts nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.core.config import build
from hilt.envs import task
from hilt.hil.config import Hil
from hilt.policies.vla.tokens import ByteTokenizer
from hilt.recipes import PUBLISHED, file_of, recipe, sft_recipe
from tests.cli.test_train_simplevla import GOLDEN, StandIn
from tests.golden.kinds.openvla import made as openvla
from tests.policies.test_pi0 import made as pi0

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "arm": ["train", "examples/arm.yaml"],
    "tabletop": ["train", "examples/tabletop.yaml"],
    "sft": ["train", "sft", "examples/sft.yaml"],
    "vla": ["train", "examples/vla.yaml"],
    "pi0_libero": ["train", "examples/pi0_libero.yaml", "policy=POLICY"],
    "oft_libero": ["train", "examples/oft_libero.yaml", "policy=POLICY", "policy_options.unnorm_key=tiny"],
    "rloo": ["train", "rloo", "--config", "examples/rloo.yaml"],
}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train examples/sft.yaml", "hilt train sft examples/sft.yaml"),
        ("train examples/rloo.yaml", "hilt train rloo --config examples/rloo.yaml"),
        ("train examples/robot.yaml", "task: robot/examples/robot.yaml"),
        ("train sft examples/vla.yaml", "hilt train examples/vla.yaml"),
        ("train sft_debug", "hilt train sft sft_debug"),
    ],
)
def test_a_file_of_another_job_is_named_with_its_command(words: str, says: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(cli.app, [*words.split(), "--dry-run"])
    assert done.exit_code == 1 and f"{says}. See: hilt docs " in done.stderr


@pytest.mark.parametrize("name", ["arm", "tabletop", "sft", "vla", "pi0_libero", "oft_libero"])
def test_settings_shows_those_of_a_file(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(cli.app, ["settings", f"examples/{name}.yaml", "max_steps", "--json"])
    assert done.exit_code == 0, done.output
    assert [row["setting"] for row in json.loads(done.stdout)][-1] == "max_steps"


def test_every_example_is_tried_and_listed():
    files = {path.stem for path in (ROOT / "examples").glob("*.yaml")}
    assert files == {*COMMANDS, "robot"}, "robot.yaml is what arm.yaml names"
    listed = re.findall(r"\]\((\w+)\.yaml\)", (ROOT / "examples" / "README.md").read_text())
    assert set(listed) == files


@pytest.fixture
def policy(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny checkpoint of the kind, and a stand-in for LIBERO."""
    monkeypatch.setitem(task.TASKS, "libero_spatial", lambda number, step_limit=220: StandIn(number, step_limit, 10))
    if request.param.startswith("oft"):
        with np.load(GOLDEN) as file:
            made = openvla(json.loads(str(file["config"])), json.loads(str(file["keys"])), int(file["seed"]))
        made.tokenizer = ByteTokenizer()
        made.save_pretrained(tmp_path / "policy")
    elif request.param.startswith("pi0"):
        pi0("pi05" if request.param.startswith("pi05") else "sde", value="").save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


@pytest.mark.parametrize(("name", "policy"), [(name, name) for name in COMMANDS], indirect=["policy"])
def test_an_example_is_shown_by_a_dry_run(name: str, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    words = [word.replace("POLICY", str(policy)) for word in COMMANDS[name]]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, [*words, "--run", str(tmp_path / "run"), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "would begin in" in result.output or name == "sft"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, name, marks=[pytest.mark.long] * (name in ("pi0_ppo", "oft_grpo")))
        for name in PUBLISHED  # test_published.py runs these two, and the others only in `make test-long`
    ],
    indirect=["policy"],
)
def test_a_published_recipe_is_shown_by_a_dry_run(name: str, policy: Path, tmp_path: Path):
    """Its options are those of the policy, with a value head where there is a critic;
    what is too large for a tiny one is smaller."""
    small = ["policy_options.unnorm_key=tiny"] if name.startswith("oft") else ["policy_options.n_action_steps=2"]
    words = ["train", name, f"policy={policy}", *small, "--run", str(tmp_path / "run"), "--dry-run"]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    assert "would begin in" in result.output and ("; of the critic" in result.output) == ("ppo" in name)


def test_example_files_of_recipes_have_the_same_settings():
    assert build(Hil(), ROOT / "examples" / "tabletop.yaml") == recipe("tabletop_pick")
    assert sft_recipe(str(ROOT / "examples" / "sft.yaml")) == sft_recipe("sft_tabletop")


def test_an_installed_example_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert file_of("examples/vla.yaml") == Path("examples/vla.yaml") or file_of("examples/vla.yaml").exists()
    monkeypatch.setattr("hilt.recipes.__file__", str(tmp_path / "hilt" / "recipes" / "__init__.py"))
    (tmp_path / "hilt" / "examples").mkdir(parents=True)
    (tmp_path / "hilt" / "examples" / "vla.yaml").write_text("tasks: []")
    assert file_of("examples/vla.yaml") == tmp_path / "hilt" / "examples" / "vla.yaml"
    assert file_of("vla.yaml") == Path("vla.yaml")
