"""Code that a file names is run only at the user's word, and never before it is known to be of the right type."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.core import trust
from hilt.core.checksums import write_json
from hilt.core.children import ChildProcess, PipedProcess, run_code
from hilt.core.config import build, freeze, thaw
from hilt.core.errors import ConfigError, UnsafeError
from hilt.core.names import load
from hilt.core.signals import leave_to_parent
from hilt.hil.config import Hil
from hilt.recipes import recipe

pytest.importorskip("gymnasium")
MODULE = """
import gymnasium
open("was_imported", "a").close()
def untold():
    open("was_called", "a").close()
    return gymnasium.make("Pendulum-v1")
def told() -> gymnasium.Env:
    return untold()
class Config:
    pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with somebody's module and settings in it; nothing is trusted before, nor after."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    monkeypatch.setattr(trust, "_word", trust._Word())
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("somebodys.py").write_text(MODULE)
    yield tmp_path / "here"
    sys.modules.pop("somebodys", None)
    monkeypatch.delenv(trust.VARIABLE, raising=False)


def settings(path: str, **values: Any) -> None:
    freeze(build(Hil(), values), path)
    for remembered in (Path.cwd().parent / "state").rglob("*.json"):  # somebody else wrote it
        remembered.unlink()
    trust._word = trust._Word()


def hilt(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli.app, words, env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


def run_of_somebody(**values: Any) -> None:
    Path("run").mkdir()
    settings("run/config.yaml", **values)
    write_json(Path("run/run.json"), {"id": "0", "recipe": "hil_debug", "changed": []})


POPEN = {"task": "subprocess:check_output", "task_options": {"args": ["touch", "was_called"]}}


@pytest.mark.parametrize("values", [POPEN, {"task": "somebodys:told"}, {"task": "somebodys:Id-v0"}])
@pytest.mark.parametrize(
    "words", ["train --run run --resume --dry-run", "train run/config.yaml --dry-run", "learner run/config.yaml"]
)
def test_names_in_a_file_are_refused_before_anything_is_imported(words: str, values: dict[str, Any]):
    run_of_somebody(**values)
    module = values["task"].partition(":")[0]
    said = hilt(*words.split(), code=1)
    assert f"config.yaml names {values['task']!r}, code that is not Hilt's; nothing of it was run." in said
    assert f"add --trust {module} to the command" in said
    assert not Path("was_called").exists() and not Path("was_imported").exists()


def test_names_of_an_evaluated_run_need_trust(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch")
    from hilt.hil import evaluate

    run_of_somebody(**POPEN)
    monkeypatch.setattr(evaluate, "find_checkpoint", lambda run, which: None)
    assert "names 'subprocess:check_output', code that is not Hilt's" in hilt("eval", "run", code=1)
    assert not Path("was_called").exists()


@pytest.mark.parametrize(
    "values",
    [
        {"task": "hilt.recipes.migrate:HilSerlTask", "task_options": {"config": "somebodys:Config"}},
        {"task": "robotwin2/lift_pot", "task_options": {"root": "."}},
    ],
)
def test_options_that_name_code_are_names_too(values: dict[str, Any]):
    (Path("envs")).mkdir()
    Path("envs/lift_pot.py").write_text("open('was_imported', 'a').close()\n")
    run_of_somebody(**values)
    assert "nothing of it was run" in hilt("learner", "run/config.yaml", code=1)
    assert not Path("was_imported").exists()


def test_trusted_module_must_have_the_right_type():
    settings("bad.yaml", **POPEN)
    for words in (["--trust", "subprocess"], []):  # remembered, and still refused
        said = hilt("learner", "bad.yaml", *words, code=1)
        assert "'subprocess:check_output', which was not called: expected a subclass of gymnasium" in said
    settings("untold.yaml", task="somebodys:untold")
    said = hilt("learner", "untold.yaml", "--trust", "somebodys", code=1)
    assert "annotated to return one. If it makes one, add --trust somebodys:untold" in said
    assert not Path("was_called").exists()
    settings("ours.yaml", task="hilt.core.checksums:read_json", task_options={"path": "x"})
    assert "which was not called: expected a subclass of gymnasium" in hilt("learner", "ours.yaml", code=1)


SHOWN = {"demonstrations": 1, "demonstration_options": {"expert": "somebodys:told"}}


@pytest.mark.parametrize("values", [{"operator": "somebodys:Config"}, SHOWN])
def test_a_run_is_refused_before_its_folder_is_made(values: dict[str, Any]):
    settings("foreign.yaml", **{"task": "tabletop/reach", **values})
    assert "nothing of it was run" in hilt("learner", "foreign.yaml", "wire.port=0", "wire.broadcast_port=0", code=1)
    assert not Path("runs").exists()


def test_names_of_experts_devices_and_actions_need_trust():
    from hilt.teleop.devices import open_device

    with trust.command_line([]):
        trust.trust("subprocess")
        for name, options in (
            ("script", {"expert": "subprocess:call"}),
            ("script", {"action_of": "subprocess:call"}),
            ("subprocess:Popen", {"args": ["touch", "was_called"]}),
        ):
            with pytest.raises(UnsafeError, match="which was not called: expected a subclass of"):
                open_device(name, **options)
        with pytest.raises(UnsafeError, match="nothing of it was run"):
            open_device("somebodys:Config")
    assert not Path("was_called").exists()


def test_a_dry_run_imports_nothing_that_a_file_names():
    settings("told.yaml", task="somebodys:told", agent={"encoder": {"kind": "none"}})
    said = hilt("train", "told.yaml", "--dry-run", "--trust", "somebodys")
    assert "somebodys:told: code that a file names, which a dry run does not import" in said
    assert not Path("was_imported").exists()


def test_the_users_word_is_remembered_for_the_file_as_it_is_where_it_is():
    settings("told.yaml", task="somebodys:told")
    with trust.command_line(["told.yaml"]):
        trust.trust("somebodys")
        load(thaw(Hil, "told.yaml").task)
    with trust.command_line(["told.yaml"]):
        trust.permit(thaw(Hil, "told.yaml").task)
    Path("moved").mkdir()
    Path("moved/told.yaml").write_bytes(Path("told.yaml").read_bytes())
    for path, more in (("moved/told.yaml", ""), ("told.yaml", "seed: 7\n")):
        Path(path).write_text(Path(path).read_text().replace("seed: 42\n", more or "seed: 42\n"))
        with trust.command_line([path]), pytest.raises(UnsafeError, match="nothing of it was run"):
            trust.permit(thaw(Hil, path).task)


def test_a_name_that_was_typed_is_the_users_word_and_the_run_keeps_it():
    with trust.command_line(["train", "hil_debug", "task=somebodys:untold"]):
        load("somebodys:untold", int)
        freeze(Hil(task="somebodys:untold"), "config.yaml")
    with trust.command_line(["eval", "."]):
        load(thaw(Hil, "config.yaml").task, int)
    with trust.command_line(["eval", "."]), pytest.raises(UnsafeError):
        trust.permit("somebodys:told")  # that one, and not the module


@pytest.mark.parametrize(
    "word, found",
    [
        ("task=a.b:make", {"a.b:make"}),
        ("mine:recipe", {"mine:recipe"}),
        ("hil-serl:a.config:TrainConfig", {"a.config:TrainConfig"}),
        ("hil-serl:usb_pickup", {trust.EXPERIMENTS}),
        ("tasks=[a:b,c:d]", {"a:b", "c:d"}),
        ("operator_options={action_of: mine:steer}", {"mine:steer"}),
        ("task=gym_hil:gym_hil/PandaPickCube-v0", {"gym_hil:gym_hil/PandaPickCube-v0"}),
        ("agent.device=cuda:0", set()),
        ("task=robot/127.0.0.1:5000", set()),
        ("subprocess:run", set()),  # it is a folder here
        ("demo_path=subprocess:run", set()),
        (f"policy_options={{text: {'x' * 300}, of: mine:steer}}", {"mine:steer"}),  # too long for a file's name
    ],
)
def test_names_among_the_words_of_a_command(word: str, found: set[str]):
    Path("subprocess:run").mkdir()
    assert set(trust._typed([word])) == found


def test_a_program_is_free_in_what_it_names_and_not_in_what_a_file_names():
    assert load("somebodys:untold", int).__name__ == "untold"
    settings("run.yaml", task="somebodys:told", task_options={"config": "json:loads"})
    config = build(Hil(), "run.yaml")
    with pytest.raises(UnsafeError, match=r"run\.yaml names 'somebodys:told'"):
        load(config.task)
    with pytest.raises(UnsafeError, match="'json:loads'"):
        load(config.task_options["config"])
    trust.trust("somebodys")
    assert load(config.task).__name__ == "told"


def test_names_of_data_are_not_taken_for_code(folder: Path):
    Path("a:b").mkdir()
    settings("run.yaml", demo_path=["hf:org/name", "a:b"], agent={"device": "cuda:0"})
    with trust.command_line(["train", "run.yaml"]):
        assert trust.check_names(build(Hil(), "run.yaml")) == []
        for name in ("hf:org", "a:b"):  # and as code they are not run
            with pytest.raises(UnsafeError):
                load(name)


def test_processes_inherit_it(folder: Path):
    settings("run.yaml", task="somebodys:told")
    code = "from hilt.core.names import load; load('somebodys:told')"
    with trust.command_line([]):
        refused = ChildProcess(run_code(code), leaves_signals=False, stderr=subprocess.PIPE, text=True)
        assert "nothing of it was run" in refused.communicate(timeout=120)[1]
        trust.trust("somebodys")
        assert ChildProcess(run_code(code), leaves_signals=False).end(120) == 0
        assert trust.VARIABLE not in os.environ, "other programs that this one starts need not know"


def _answer_trust(pipe: Any) -> None:
    leave_to_parent()
    pipe.send((trust.is_command(), sorted(trust._word.trusted)))


def test_processes_of_multiprocessing_inherit_it(folder: Path):
    with trust.command_line([]):
        trust.trust("somebodys")
        process = PipedProcess(_answer_trust, name="hilt-test")
        try:
            assert process.pipe.poll(120) and process.pipe.recv() == (True, ["somebodys"])
        finally:
            process.end()


def test_registered_names_need_no_trust(monkeypatch: pytest.MonkeyPatch):
    from hilt.envs.task import make

    monkeypatch.setattr(
        trust, "registered", lambda group: {"theirs": "somebodys:told"} if group == "hilt.tasks" else {}
    )
    with trust.command_line([]):
        assert load("somebodys:told").__name__ == "told"
        with pytest.raises(UnsafeError):
            make("somebodys:untold")


def test_modules_in_the_current_folder_are_not_installed(monkeypatch: pytest.MonkeyPatch):
    package = Path("somebodys-1.0.dist-info")
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[hilt.tasks]\nlab = somebodys:told\n")
    try:
        for path, found in ((str(Path.cwd()), {}), ("", {}), (str(Path.cwd().parent), {})):
            trust.installed.cache_clear()
            monkeypatch.syspath_prepend(path)
            assert dict(trust.registered("hilt.tasks")) == found
        monkeypatch.chdir("..")  # as seen from elsewhere, it is a place like any other
        trust.installed.cache_clear()
        assert dict(trust.registered("hilt.tasks")) == {"lab": "somebodys:told"}
    finally:
        trust.installed.cache_clear()


def test_the_current_folder_is_on_the_path_only_while_something_there_is_imported():
    here, before = str(Path.cwd()), [*sys.path]
    Path("neighbor.py").write_text(f"import sys\nassert sys.path[-1] == {here!r}\n")
    load("hilt.core.checksums:read_json")
    load("neighbor:sys")
    load("somebodys:told")
    assert sys.path == before


def test_the_current_folder_stays_on_the_path_of_a_command_that_named_something_there():
    """A module of the user's may import others of that folder later."""
    here, before = str(Path.cwd()), [*sys.path]
    with trust.command_line(["train", "hil_debug", "task=somebodys:told"]):
        load("hilt.core.checksums:read_json")
        assert here not in sys.path
        load("somebodys:told")
        assert sys.path == [*before, here]
    assert sys.path == before


def test_trust_takes_modules_names_and_folders():
    with pytest.raises(ConfigError, match="--trust 'my tasks': expected the name of a module"):
        trust.trust("my tasks")
    trust.trust("a.b", "c:d", "./e")
    assert trust._word.trusted == {"a.b", "c:d", str(Path("e").resolve())}
    with pytest.raises(UnsafeError, match="a folder of code"), trust.command_line([]):
        trust._word.trusted.clear()
        trust.permit_folder(Path("f"), "root")


@pytest.mark.parametrize(
    "value", ["${oc.env:HOME}", "x${oc.env:HOME,none}y", "${oc.decode:'1'}", "${a.${oc.env:HOME}}"]
)
def test_a_file_of_settings_calls_no_resolver(value: str):
    Path("run.yaml").write_text(f'checkpoint_path: "{value}"\n')
    with pytest.raises(ConfigError, match="a file of settings calls nothing"):
        build(Hil(), "run.yaml")
    Path("run.yaml").write_text("seed: 7\nbatch_size: ${seed}\n")
    assert build(Hil(), "run.yaml").batch_size == 7


def test_a_file_of_settings_does_not_grow_when_it_is_read():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]" for n in range(9)]
    Path("bomb.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="more than 100,000 values"):
        build(Hil(), "bomb.yaml")
    for text in ("task_options: &a {b: *a}", "task_options: " + "[" * 500 + "]" * 500):
        Path("bomb.yaml").write_text(text)
        with pytest.raises(ConfigError):
            build(Hil(), "bomb.yaml")
    Path("fine.yaml").write_text("demo_path: &paths [a, b]\nimage_keys: *paths\n")
    assert build(Hil(), "fine.yaml").image_keys == ["a", "b"]


def test_a_recipe_of_the_users_may_name_a_config_of_hil_serls(folder: Path):
    Path("somebodys.py").write_text(
        MODULE + "    def get_environment(self, fake_env=False, save_video=False, classifier=False): ...\n"
    )
    body = "def run():\n    return from_hil_serl('somebodys:Config', encoder_type='small')\n"
    Path("mine.py").write_text(f"from hilt.recipes.migrate import from_hil_serl\n{body}")
    with trust.command_line(["train", "mine:run"]):
        assert recipe("mine:run").task_options["config"] == "somebodys:Config"
    sys.modules.pop("mine", None)
