"""``hilt train sft`` as a person meets it: from a recipe to a policy that is tried."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.core.checksums import read_json
from hilt.policies.io.tensor_files import Tensors
from hilt.policies.registry import load_policy
from hilt.vla import sft
from tests.lines import all_lines, no_line_twice
from tests.value.chosen import save_verifier
from tests.vla.taught import write_log

TINY = (
    "policy_options.width=16",
    "policy_options.depth=1",
    "policy_options.heads=2",
    "policy_options.keypoints=2",
    "policy_options.chunk=2",
)
COLUMNS = "columns={full_image: front, state: state}"


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def test_from_a_recipe_to_a_policy_that_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "run"
    all_lines(monkeypatch)
    said = no_line_twice(run("train", "sft", "sft_debug", *TINY, "max_steps=12", "--run", folder))
    for phase in (
        *(
            "loading the policy",
            "recording demonstrations of tabletop/reach: 1 of 3",
            "reading ",
            "making the policy, ",
        ),
        *("training: 9 of 12, loss ", "validating after step 10, samples: ", "writing the policy"),
    ):
        assert f"\n{phase}" in f"\n{said}"
    for words in ("precision: float32 (this is a test)\n", "recorded 3 of 3 demonstrations",
                  "steps of 2 episodes to learn from", "1 held out", "step 10 of 12: validation loss",
                  "max_steps is reached: 12 steps", f"hilt eval {folder} --episodes 10 "):  # fmt: skip
        assert words in said
    said = run("eval", folder, "--split", "eval", "--episodes", 2, "--json", tmp_path / "card.json")
    assert f"loading the policy of {folder}\n" in said and "tabletop/reach, eval states: 1 of 2, " in said, (
        "no bar is seen in a pipe"
    )
    assert (
        "tabletop/reach, 2 episodes from the states of eval" in said
        and '"episodes": 2' in (tmp_path / "card.json").read_text()
    )
    said = run("eval", folder, "--episodes", 1, "--mode", "asynchronous", "--delay", 2, "--execute", 1)
    assert "asynchronous, a delay of 2 steps, 1 action of each; the arm held in " in said
    said = run("eval", folder, "--episodes", 1, "--mode", "ensemble", "--ensemble-decay", 0.1)
    assert "ensemble, a delay of 0 steps, the mean of all with a decay of 0.1; the arm held in 0.0%" in said
    assert "ensemble_decay=0.1 would do nothing" in run("eval", folder, "--ensemble-decay", 0.1, code=1)
    said = run("eval", folder, "--episodes", 1, "--sample", "--draw-temperature", 0.5)
    assert "actions sampled at temperature 0.5, no take-overs" in said
    verifier = save_verifier(tmp_path / "verifier", {"state": "state/tcp_pose"}, 10, 2, 7)
    said = run(
        "eval", folder, "--episodes", 1, "--best-of", 3, "--verifier", verifier, "--json", tmp_path / "best.json"
    )
    found = json.loads((tmp_path / "best.json").read_text())["execution"]
    assert found["best_of"] == 3 and found["plans"] > 0
    assert f"{found['draw_ms']:.1f} ms to draw and {found['judge_ms']:.1f} ms to judge, for each plan; the " in said
    assert "what chooses? Give the folder" in run("eval", folder, "--best-of", 3, code=1)
    assert "--verifier value: it chooses among chunks; give --best-of N" in run(
        "eval", folder, "--verifier", "value", code=1
    )
    refused = run("eval", folder, "--mode", "rtc", code=1)
    assert "mode=rtc: this SmallVLA cannot continue a chunk" in refused and "Traceback" not in refused
    assert "leave --checkpoint and --workers out" in run("eval", folder, "--workers", 2, code=1)
    assert run("plot", folder).count("/curves") == 3
    said = run("train", "sft", "--run", folder, "--resume", "max_steps=14")
    assert "max_steps is reached: 14 steps" in said and "precision: float32 (as the run was begun)\n" in said
    assert "has a run already: --resume goes on with it" in run("train", "sft", "sft_debug", "--run", folder, code=1)
    assert "is not a run" not in run("train", "sft", "sft_debug", "--dry-run", "--run", tmp_path / "new")


@pytest.mark.parametrize(("recipe", "kind"), [("act", "hilt_act"), ("flow_bc", "hilt_small_vla")])
def test_baselines_learn_from_demonstrations_that_are_there(tmp_path: Path, recipe: str, kind: str):
    """With demonstrations=0 and tasks=[] the settings of the recipe that need them are left out, too."""
    log = write_log(tmp_path / "log", [(6, "go", True)] * 4)
    changes = ("demonstrations=0", "tasks=[]", "max_steps=3", "validation_period=2", "batch_size=4", "log_period=1")
    said = run("train", "sft", recipe, log, COLUMNS, *changes, *TINY, "--run", tmp_path / recipe)
    assert "18 steps of 3 episodes to learn from, 6 of 1 held out" in said and "max_steps is reached: 3 steps" in said
    policy = tmp_path / recipe / "policy"
    assert json.loads((policy / "config.json").read_text())["model_type"] == kind and load_policy(policy).chunk == 2
    run("plot", tmp_path / recipe)
    page = (tmp_path / recipe / "plots" / "curves.html").read_text()
    assert ("KL of the style" in page) == (recipe == "act") and "KL to the reference" not in page


def test_adapters_are_trained_alone_and_merged(tmp_path: Path):
    log, first = write_log(tmp_path / "log", [(6, "go", True)] * 4), tmp_path / "first"
    run("train", "sft", log, COLUMNS, *TINY, "max_steps=2", "validation_period=1", "--run", first)
    options = (
        f"policy={first / 'policy'}",
        "lora.rank=2",
        "lora.targets=[up,down]",
        "learning_rate=0.01",
        "max_steps=3",
        "validation_period=1",
    )
    run("train", "sft", log, COLUMNS, *options, "--run", tmp_path / "second")
    before, after = Tensors(first / "policy"), Tensors(tmp_path / "second/policy")
    changed = {name for name in before if not np.array_equal(before[name].numpy(), after[name].numpy())}
    assert set(before) == set(after)
    assert {name.split(".", 2)[2] for name in changed if "blocks" in name} == {"up.weight", "down.weight"}
    # trained in full
    assert {name for name in changed if "blocks" not in name} == {"action_head.out.weight", "action_head.out.bias"}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in (tmp_path / "second/adapter").iterdir()
    }
    assert read_json(tmp_path / "second/result.json")["best_step"] > 0


def test_what_would_be_done_is_shown_and_what_is_wrong_told_in_a_line(tmp_path: Path):
    log = write_log(tmp_path / "log", [(3, "go", True)] * 3)
    said = run("train", "sft", log, COLUMNS, "batch_size=7", "--dry-run", "--run", tmp_path / "new")
    assert "batch_size: 7" in said and f"{log}: log" in said and not (tmp_path / "new").exists()
    said = run("train", "sft", "--settings")
    assert "lora.rank" in said and "Gradient steps at most" in said
    assert "hilt train sft" in run("train", "--help") and "hilt train classifier" in run("train", "--help")
    for words, expected in (
        (
            ["sft_debag"],
            "sft_debag is no recipe (sft_debug, sft_tabletop, act, flow_bc, recap_debug, recap_tabletop, distill, "
            "sft_libero, sft_libero_six), no setting",
        ),
        (["sft_debug", "sft_tabletop"], "two recipes were given, sft_debug and sft_tabletop: give one."),
        (["sft_debug", "batchsize=3"], "did you mean 'batch_size'?"),
        (["sft_debug", "policy_options.widht=3"], "a small VLA has no setting 'widht'"),
        ([log, COLUMNS, "validation=0.5", "policy=nowhere"], "policy=nowhere: expected the folder of a checkpoint"),
        ([log, COLUMNS, "--resume"], "a resumed run has its data; leave it out"),
        (["--resume", "max_steps=3"], "has no run of `hilt train sft` to resume"),
    ):
        said = run("train", "sft", *words, "--run", tmp_path / f"wrong-{abs(hash(str(words)))}", code=1)
        assert expected in said and "Traceback" not in said


def test_a_run_without_tasks_is_not_tried(tmp_path: Path):
    log = write_log(tmp_path / "log", [(3, "go", True)] * 3)
    run("train", "sft", log, COLUMNS, *TINY, "max_steps=1", "validation_period=1", "--run", tmp_path / "run")
    assert "names no task to try its policy on" in run("eval", tmp_path / "run", code=1)


def test_ctrl_c_keeps_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log, whole = write_log(tmp_path / "log", [(6, "go", True)] * 4), sft.train

    def interrupted(config: Any, folder: Path, *, watch: Any, **rest: Any) -> Any:
        def loud(step: int, values: dict[str, float]) -> None:
            watch(step, values)
            if "validation_loss" in values:
                signal.raise_signal(signal.SIGINT)

        return whole(config, folder, watch=loud, **rest)

    monkeypatch.setattr(sft, "train", interrupted)
    said = run("train", "sft", log, COLUMNS, *TINY, "validation_period=2", "--run", tmp_path / "run", code=130)
    assert "it was stopped: 2 steps" in said and "--resume" in said and (tmp_path / "run/policy/config.json").is_file()


def test_a_recipe_that_is_none():
    from hilt.core.errors import ConfigError, UnknownNameError
    from hilt.recipes import sft_recipe

    with pytest.raises(ConfigError, match=r"expected a hilt.vla.sft.Sft, or a function that returns one"):
        sft_recipe("hilt.recipes.hil:hil_debug")
    with pytest.raises(UnknownNameError, match="no recipe of hilt train sft named 'hil_debug'"):
        sft_recipe("hil_debug")


def test_recap_in_rounds_from_demonstrations_to_a_policy_that_is_guided(tmp_path: Path):
    """Every part of it, with a small_vla in a task of the tabletop."""
    folder = tmp_path / "run"
    said = run("train", "sft", "recap_debug", *TINY, "--run", folder)
    for words in (
        "recorded 8 of 8 demonstrations",
        "round 1, tabletop/reach: ",
        " of 8 sampled episodes succeeded",
        "ranks held-out episodes half-way with an AUC of ",
        "tabletop/reach: 1",  # steps of the policy, and what counts as good
        "is kept",
    ):
        assert words in said, said
    (result,) = read_json(folder / "rounds.json")["rounds"]
    assert result["episodes"] == 8 and (folder / "policy" / "policy" / "model.safetensors").is_file()
    said = run("eval", folder, "--episodes", 1, "--guidance", 2)
    assert "tabletop/reach, 1 episode from the states of test" in said
    assert "has a run already" in run("train", "sft", "recap_debug", "--run", folder, code=1)
