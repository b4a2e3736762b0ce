"""``hilt eval``: the table, the file, and each option."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hilt import cli
from hilt.core.checksums import write_json
from hilt.core.errors import ConfigError
from hilt.observe.plots import PlottedRun, final_numbers, plot
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.runs import checkpoint
from hilt.runs.run_precision import Setting
from hilt.vla import train
from hilt.vla.trained import SIZES
from tests.hil.toy_evaluation import make_run
from tests.value.chosen import save_verifier
from tests.vla import toy_vla


def run(*words: str) -> str:
    done = CliRunner().invoke(cli.app, ["eval", *words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run", noise=0.5, shaped=0.1, broken=(4,), limit=6)


def test_the_table_says_how_good_it_is(trained: Path, tmp_path: Path):
    text = run(str(trained), "--json", str(tmp_path / "out.json"))
    card = json.loads((tmp_path / "out.json").read_text())
    assert (
        card["episodes"] == 6
        and card["update"] == 20
        and card["split"] == "test"
        and not card["sample"]
        and len(card["outcomes"]) == 6
    )
    share = (
        f"{card['successes']} of 6: {100 * card['success']:.1f}%, 95% interval {100 * card['low']:.1f}% to "
        f"{100 * card['high']:.1f}%"
    )
    assert (
        share in text
        and f"{card['length']:.1f} steps" in text
        and "after 20 learner steps, actions the most likely" in text
    )
    assert "lost: 1" in text and "the environment failed: RuntimeError: the arm fell off" in text
    made = trained / "evaluations" / re.findall(r"test-00000020(?:-\d+)?", text)[-1]
    assert (made / "log").is_dir() and not list(made.rglob("*.mp4"))


def test_a_run_of_another_machine_whose_precision_is_slow_here_is_named(trained: Path, monkeypatch: pytest.MonkeyPatch):
    slow = "precision: bfloat16 is at least 25 times slower than float32 on this CPU"
    monkeypatch.setattr("hilt.runs.run_precision.slowness", lambda value, device, name: slow)
    monkeypatch.setattr(
        "hilt.runs.run_precision.setting_of", lambda config: Setting("agent.encoder.precision", "bfloat16", "cpu")
    )
    assert run(str(trained), "--episodes", "1").splitlines()[0] == slow


def test_where_nobody_tells_success_there_is_a_dash(tmp_path: Path):
    pytest.importorskip("av")
    text = run(str(make_run(tmp_path / "silent", (10,), silent=True)), "--videos", "1")
    assert (
        "–: the environment does not tell" in text
        and "%" not in text.split("took")[0].split("–:")[1]
        and "failed states" not in text
    )
    (tmp_path / "silent" / "metrics.jsonl").write_text(
        '{"kind": "update", "time": 1, "update": 10, "step": 9, "critic_loss": 1.0}\n'
    )
    assert final_numbers(PlottedRun.load(tmp_path / "silent"), 20)["evaluation"] == "–"
    assert plot([tmp_path / "silent"], tmp_path / "plots")


def test_each_option_changes_what_happens(trained: Path, tmp_path: Path):
    def card(*words: str) -> dict[str, object]:
        run(str(trained), "--json", str(tmp_path / "out.json"), *words)
        return json.loads((tmp_path / "out.json").read_text())

    usual = card()
    assert card("--checkpoint", "10")["update"] == 10
    assert (card("--split", "eval")["split"], card("--split", "eval")["episodes"]) == ("eval", 3)
    assert card("--checkpoint", "best")["update"] == 20, "the one that was tried on eval"
    assert card("--episodes", "2")["episodes"] == 2
    assert card("--seed", "5")["outcomes"] != usual["outcomes"]
    drawn = card("--sample")
    assert drawn["sample"] and drawn["outcomes"] != usual["outcomes"]
    pytest.importorskip("av")
    assert run(str(trained), "--videos", "1").count(".mp4") == 1


def test_who_decided_is_said_and_a_person_can_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    silent = make_run(tmp_path / "silent", silent=True)
    monkeypatch.setattr("hilt.envs.rewards.ask_on_console", lambda question, seconds: "state 2" in question)
    said = run(str(silent), "--ask", "--json", str(tmp_path / "out.json"))
    assert "decided by" in said and "the person who was asked" in said and "1 of 6" in said
    assert json.loads((tmp_path / "out.json").read_text())["decided_by"] == ["person"]
    config_file = silent / "config.yaml"
    config_file.write_text(config_file.read_text().replace("classifier: ''", "classifier: folder"))
    monkeypatch.setattr("hilt.classifier.reward.reward_function", lambda folder, threshold, space: lambda seen: True)
    said = run(str(silent), "--ask")
    assert "success in 6 of 6; right in 1: 5 false successes, 0 missed" in said
    assert "the reward classifier: the task does not report success, and no person was asked (--ask)" in run(
        str(silent)
    )


def test_the_best_of_several_chunks_is_executed_in_a_run_of_post_training(tmp_path: Path, trained: Path):
    folder, sizes = tmp_path / "run", {"cameras": ["full_image"], "image_size": 16, "state_dim": 1, "action_dim": 1}
    settings = toy_vla.config()
    settings.collect.drawn_share = 0.01  # of training: an evaluation draws all or nothing
    train.begin_run(folder, "toy", settings)
    write_json(folder / SIZES, sizes)
    policy = SmallVLA(SmallVLAConfig.from_json({**toy_vla.config().policy_options, **sizes}), seed=0)
    weights = {name: value.detach().clone() for name, value in policy.named_parameters()}
    checkpoint.save(folder, 3, {"shared": {"actor": {"trained": weights}}}, {}, keep=9)
    verifier = save_verifier(tmp_path / "verifier", {"state": "state"}, 1, 2, 1)
    chosen = ("--best-of", "4", "--verifier", str(verifier))
    text = run(str(folder), "--episodes", "2", *chosen, "--json", str(tmp_path / "out.json"))
    results = json.loads((tmp_path / "out.json").read_text())
    assert text.count("best of 4") == 2 and [one["execution"]["best_of"] for one in results] == [4, 4]
    kept = [json.loads(path.read_text()) for path in folder.glob("evaluations/*/evaluation.json")]
    assert [one["execution"]["plans"] for one in kept] == [results[0]["execution"]["plans"]] * 2  # of both together
    heats = {}
    for heat in ("0.001", "100"):
        drawn = ("--episodes", "8", "--sample", "--draw-temperature", heat)
        text = run(str(folder), *drawn, "--json", str(tmp_path / "out.json"))
        assert f"actions sampled at temperature {heat}, no take-overs" in text
        heats[heat] = json.loads((tmp_path / "out.json").read_text())
        assert [one["execution"]["temperature"] for one in heats[heat]] == [float(heat)] * 2
    assert heats["0.001"][0]["outcomes"] != heats["100"][0]["outcomes"]
    for words, why in (
        ((folder, "--draw-temperature", "0.5"), "nothing is drawn; give --sample or --best-of N, too"),
        ((folder, "--sample", "--draw-temperature", "0"), "--draw-temperature 0: expected a number above 0"),
        ((trained, "--sample", "--draw-temperature", "0.5"), f"{trained} is a run with a person, whose agent has a"),
    ):
        assert why in CliRunner().invoke(cli.app, ["eval", *map(str, words)]).output
    refused = CliRunner().invoke(cli.app, ["eval", str(folder), "--guidance", "2"]).output
    assert "guidance=2: this SmallVLA was trained without a condition" in refused


PLACE = {"state": "state/left/place"}


@pytest.mark.parametrize("chunk", [1, 2])
def test_the_best_of_several_actions_is_executed_in_a_run_with_a_person(tmp_path: Path, chunk: int):
    folder = make_run(tmp_path / "run", changes={"agent": {"chunk": chunk}}, noise=0.5, shaped=0.1, limit=6)
    verifier = save_verifier(tmp_path / "verifier", PLACE, 2, chunk, 1)

    def card(*words: str) -> dict[str, Any]:
        run(str(folder), *words, "--json", str(tmp_path / "out.json"))
        return json.loads((tmp_path / "out.json").read_text())

    chosen = ("--best-of", "8", "--verifier", str(verifier))
    text = run(str(folder), *chosen)
    assert re.search(r"best of 8 +[\d.]+ ms to draw and [\d.]+ ms to judge, for each plan; the likeliest was", text)
    found, alone = card(*chosen), card()
    plans = sum(-(-one["steps"] // chunk) for one in found["outcomes"])
    assert found["execution"]["best_of"] == 8 and found["execution"]["plans"] == plans
    assert found["execution"]["draw_ms"] > 0 and found["execution"]["judge_ms"] > 0 and found["execution"]["gain"] > 0
    assert found["outcomes"] == card(*chosen)["outcomes"] != alone["outcomes"] and "execution" not in alone
    sampled = card(*chosen, "--sample")
    assert sampled["execution"]["likeliest"] == 0 and sampled["outcomes"] != found["outcomes"]
    assert sampled["outcomes"] != card("--sample")["outcomes"]


def test_what_a_verifier_cannot_choose_for_a_run_with_a_person_is_refused(tmp_path: Path, trained: Path):
    def refused(folder: Path, verifier: Path | str, *words: str) -> str:
        given = ("eval", str(folder), "--best-of", "4", "--verifier", str(verifier), *words)
        done = CliRunner().invoke(cli.app, given)
        assert done.exit_code == 1 and done.output.count("error: ") == 1, done.output
        return done.output

    fits = save_verifier(tmp_path / "fits", PLACE, 2, 1, 1)
    wide = save_verifier(tmp_path / "wide", PLACE, 2, 2, 1)
    assert "looks at 2 actions, and the policy answers with 1. Train one with actions=1. " in refused(trained, wide)
    robot = save_verifier(tmp_path / "robot", PLACE, 2, 1, 7)
    assert "judges actions of 7 numbers, and the policy gives 1: it is of another robot" in refused(trained, robot)
    state = save_verifier(tmp_path / "state", PLACE, 3, 1, 1)
    assert f"has 2 numbers, and the verifier {state} looks at 3. Train one on logs of" in refused(trained, state)
    other = save_verifier(tmp_path / "other", {"state": "state/right/place"}, 2, 1, 1)
    assert f"the verifier {other} looks at more: this observation has no 'right" in refused(trained, other)
    suite = save_verifier(tmp_path / "suite", {}, 2, 1, 1)
    assert "Train one on logs of this task: hilt train value DATA actions=N 'columns=" in refused(trained, suite)
    assert "what chooses? Give the folder of a value of chunks" in refused(trained, "")
    assert "one process chooses among chunks, and --workers is 2" in refused(trained, fits, "--workers", "2")
    heat = refused(trained, fits, "--draw-temperature", "0.5")
    assert "--draw-temperature 0.5: the agent of a run with a person draws from the distribution that it has" in heat
    assert "are for runs of hilt train sft and of post-training" in refused(trained, fits, "--mode", "ensemble")
    guided = CliRunner().invoke(cli.app, ["eval", str(trained), "--guidance", "2"]).output
    assert "--guidance 2: it is of a policy of RECAP, and" in guided and "has agent.kind=actor_critic. Leave" in guided
    imitates = {"algorithm": "bc", "agent": {"rlpd": {"imitation_loss": "mse"}}}
    alone = refused(make_run(tmp_path / "mse", changes=imitates), fits)
    assert "the policy of this run has learned one action for each observation" in alone


def test_workers_are_processes(trained: Path, monkeypatch: pytest.MonkeyPatch):
    def together(plan: Any, weights: Any, tries: Any, workers: int) -> Any:
        raise ConfigError(f"{workers} processes for {len(tries)} tries with {len(weights) > 0} weights")

    monkeypatch.setattr("hilt.hil.evaluate._together", together)
    done = CliRunner().invoke(cli.app, ["eval", str(trained), "--workers", "3"])
    assert "error: 3 processes for 6 tries with True weights" in done.output


def test_what_is_no_run_is_one_line(tmp_path: Path):
    done = CliRunner().invoke(cli.app, ["eval", str(tmp_path)])
    assert (
        done.exit_code == 1
        and "is not a run: there is no config.yaml in it. Give the folder that `hilt train` made." in done.output
    )


def test_options_of_chunks_are_refused_for_an_agent_of_single_actions(trained: Path):
    for option, value in (("--mode", "rtc"), ("--delay", "0"), ("--execute", "2"), ("--ensemble-decay", "0.1")):
        done = CliRunner().invoke(cli.app, ["eval", str(trained), option, value])
        assert done.exit_code == 1 and "are for runs of hilt train sft and of post-training" in done.output, done.output
