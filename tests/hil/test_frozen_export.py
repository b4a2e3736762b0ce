"""Whole runs beside a frozen policy: learner and actor, take-overs and demonstrations, going on, evaluation, the folder
of the policy, and who opens it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hilt import cli
from hilt.cli.servers.serve_policy import find_policy
from hilt.core.errors import ConfigError
from hilt.core.trajectory import Source
from hilt.core.tree import unflatten
from hilt.envs.chunk_executor import ChunkSettings
from hilt.hil.actor import act
from hilt.hil.config import Hil, ValueUse
from hilt.hil.environment import make_env, spaces
from hilt.hil.evaluate import evaluate, load_agent
from hilt.hil.frozen.base_observations import open_base, weights_of
from hilt.hil.frozen.frozen_export import policy_of_agent, policy_of_checkpoint
from hilt.hil.launch import begin_run, resume_run
from hilt.hil.learner import Learner
from hilt.hil.make_agent import make_agent
from hilt.observe.metrics import read_metrics
from hilt.policies.frozen.frozen_policy import FrozenVlaPolicy, acting_weights
from hilt.policies.registry import load_policy
from hilt.policies.vla.normalize import statistics
from hilt.policies.vla.tokens import ByteTokenizer
from hilt.recording.recording_folder import SHAPING
from hilt.replay import Log
from hilt.runs.checkpoint import Checkpoint, latest
from hilt.value.best_of import BestOfSettings
from hilt.value.policy_features import FrozenFeatures
from hilt.value.value_episodes import ValueEpisodes, ValueInputs
from hilt.value.value_facts import write_estimates
from hilt.value.value_model import load_value_model
from hilt.vla.rollout import ChunkAgent
from tests.effort import sampled
from tests.forked import ForkServer
from tests.hil.test_base_observations import OPTIONS, TASK, config, saved, shown
from tests.policies import test_pi0, tiny_openvla
from tests.value.chosen import save_verifier
from tests.value.valued import save_untrained

__all__ = ["shown"]
torch.set_num_threads(1)
ENV = {**os.environ, "MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")}


def run_on(asked: Hil, run: Path) -> None:
    learner = Learner(asked, run, resume=True)
    with ThreadPoolExecutor(1) as pool:
        learning = pool.submit(learner.run)
        act(asked, run / "actors" / "actor-1", stop=learning.done)
        learning.result(300)


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("policy") / "small")


@pytest.fixture(scope="module")
def trained(base_folder: Path, shown: Path, tmp_path_factory) -> Path:
    """A run with demonstrations and a script that takes over, begun and then resumed."""
    run = tmp_path_factory.mktemp("trained") / "run"
    asked = config(base_folder, chunk=2, demo_path=[str(shown)], operator="script", max_steps=20, max_env_steps=1000)
    asked.training_starts, asked.log_period, asked.agent.rlpd.actor_average = 10, 5, 0.1
    asked.agent.rlpd.critic_warmup = 5
    asked.wire.port = asked.wire.broadcast_port = 0
    begin_run(run, "frozen", asked)
    run_on(resume_run(run, "", []), run)
    run_on(resume_run(run, "", ["max_steps=40"]), run)
    return run


def test_a_run_learns_from_demonstrations_take_overs_and_its_own_steps(trained: Path, base_folder: Path):
    checkpoint = latest(trained)
    assert checkpoint is not None and checkpoint.update == 40 and checkpoint.agent["actor_updates"] == 40
    weights = weights_of(config(base_folder))
    assert checkpoint.agent["base_weights"] == weights
    with Log.open(trained / "log", "r") as log, Log.open(trained / "demos", "r") as demos:
        names = [f"observations/base_policy/{weights}", f"next_observations/base_policy/{weights}", "source", "chunk"]
        read, given = log.read(log.all().keys(), names), demos.read(demos.all().keys(), names)
    human = read["source"] == Source.HUMAN
    assert human.any() and (~human).any() and (read["chunk"][human] == -1).all()
    for steps in (read, given):
        for tree in ("observations", "next_observations"):
            columns = steps[tree]["base_policy"][weights]
            assert columns["features"].shape[1:] == (32,) and columns["actions"].shape[1:] == (2, 7)
            assert np.abs(columns["features"]).max() > 0.1, "every step has them, whoever acted"
    records = [record for record in read_metrics(trained, ["update"]) if "correction" in record]
    assert records and all(0 <= record["correction"] <= 0.3 for record in records)


def test_what_it_decides_is_near_the_frozen_policy(trained: Path):
    agent, asked = load_agent(trained), config(trained / "policy" / "base", chunk=2)
    with make_env(asked, operator=False) as env:
        seen, _ = env.reset(seed=0, options={"split": "test", "state": 0})
    base = seen["base_policy"][weights_of(asked)]["actions"]
    decided = agent.chunks({"base_policy": {weights_of(asked): {
        name: column[None] for name, column in seen["base_policy"][weights_of(asked)].items()}}})[0]  # fmt: skip
    assert 0 < np.abs(decided - base).max() <= 0.3 + 1e-6
    np.testing.assert_array_equal(decided[:, 3:], base[:, 3:])


def test_the_folder_has_both_and_answers_as_the_agent_acts(trained: Path, base_folder: Path):
    folder = trained / "policy"
    assert sorted(path.name for path in folder.iterdir()) == ["base", "config.json", "model.safetensors"]
    shutil.rmtree(trained / "moved", ignore_errors=True)
    shutil.copytree(folder, trained / "moved")  # it needs nothing besides
    policy, agent, asked = load_policy(trained / "moved"), load_agent(trained), config(base_folder, chunk=2)
    assert isinstance(policy, FrozenVlaPolicy) and (policy.chunk, policy.action_dim) == (2, 3)
    with make_env(asked, operator=False) as env:
        observation, _ = env.reset(seed=0, options={"split": "test", "state": 1})
        agent.begin()
        ours = [agent.sample_actions(observation, argmax=True) for _ in range(2)]
        row = open_base(asked).suite.observe(observation, env.get_wrapper_attr("instruction"))
        answer, record = policy.act([row], sample=False)
        np.testing.assert_allclose(answer[0], np.array(ours)[:, :3], atol=1e-5)
        assert np.isnan(record["log_prob"]).all()
        sampled = [policy.act([row], generator=torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)]
        assert np.array_equal(sampled[0], sampled[1]) and not np.array_equal(sampled[0], sampled[2])
        torch.testing.assert_close(policy.features([row]), policy.base.features([row]))
        # the executor of chunks
        suite = open_base(asked).suite
        acting = ChunkAgent(policy, suite, env.get_wrapper_attr("instruction"), ChunkSettings(delay=0))
        acting.begin()
        np.testing.assert_allclose(acting.sample_actions(observation, seed=0, argmax=True), ours[0], atol=1e-5)
        acting.close()
    for refused in (lambda: policy.evaluate({}), lambda: policy.supervised_loss([], answer, answer)):
        with pytest.raises(ConfigError, match=r"docs/frozen-vla\.md"):
            refused()
    with pytest.raises(ConfigError, match="continues no chunk and has the temperature 1"):
        policy.act([row], temperature=0.5, generator=torch.Generator())


def test_a_folder_whose_base_was_exchanged_is_refused(trained: Path, tmp_path: Path):
    shutil.copytree(trained / "policy", tmp_path / "policy")
    shutil.rmtree(tmp_path / "policy" / "base")
    saved(tmp_path / "policy" / "base", seed=7)
    with pytest.raises(ConfigError, match="has features and actions of a policy whose weights have the hash"):
        load_policy(tmp_path / "policy")


def test_it_is_evaluated_and_served(trained: Path, base_folder: Path):
    asked = config(base_folder, chunk=2)
    asked.agent.encoder.kind = "none"
    done = evaluate(asked, load_agent(trained), "test", [0], folder=trained / "evaluations")
    assert len(done.outcomes) == 1 and not done.errors
    served, folder = find_policy(str(trained), "", "", {}), find_policy(str(trained / "policy"), "", "", {})
    assert served.version == 40 and served.newest is not None and served.newest() == 40
    known = dict(served.policy.named_parameters())
    newer = served.load(40)  # type: ignore[misc]
    assert newer and all(known[name].shape == tensor.shape for name, tensor in newer.items())
    with torch.no_grad():
        for name, tensor in newer.items():
            torch.testing.assert_close(known[name], tensor, msg=name)
    rows = [{"wrist_image": np.zeros((16, 16, 3), np.uint8), "state": np.zeros(1, np.float32), "instruction": "press"}]
    np.testing.assert_array_equal(*(each.policy.act(rows, sample=False)[0] for each in (served, folder)))


@pytest.mark.parametrize("features", [True, False])
def test_the_best_of_several_chunks_is_executed_and_served(
    trained: Path, tmp_path: Path, features: bool, monkeypatch: pytest.MonkeyPatch
):
    """The verifier looks at the state, or at the features that observations beside its own policy have already."""
    base = trained / "policy" / "base"
    verifier = save_verifier(tmp_path / "verifier", {}, 1, 2, 3, policy=(base, 32) if features else None)
    read_again = []
    if features:
        monkeypatch.setattr(FrozenFeatures, "of", lambda self, rows: read_again.append(rows))
    words = ["eval", str(trained), "--episodes", "1", "--best-of", "4", "--verifier", str(verifier)]
    done = CliRunner().invoke(cli.app, [*words, "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 0 and "best of 4" in done.output, done.output
    (outcome,), figures = (json.loads((tmp_path / "out.json").read_text())[name] for name in ("outcomes", "execution"))
    assert figures["plans"] == -(-outcome["steps"] // 2) and figures["gain"] > 0 and not read_again
    monkeypatch.undo()
    served = find_policy(str(trained), "", "", {})
    wrapped = served.wrapped(BestOfSettings(4, str(verifier)).wrap(served.policy))
    newer = wrapped.load(40)  # type: ignore[misc]
    assert newer.keys() <= dict(wrapped.policy.named_parameters()).keys()
    rows = [{"wrist_image": np.zeros((16, 16, 3), np.uint8), "state": np.zeros(1, np.float32), "instruction": "press"}]
    looked, look = [], served.policy._frozen.columns  # type: ignore[attr-defined]
    monkeypatch.setattr(served.policy._frozen, "columns", lambda rows: looked.append(len(rows)) or look(rows))
    actions, record = wrapped.policy.act(rows, sample=False, generator=torch.Generator().manual_seed(0))
    assert actions.shape == (1, 2, 3) and record["log_prob"].shape == (1, 2, 3)
    assert looked == [1, 1], "the frozen policy looks once for the likeliest, and once for all draws"
    assert wrapped.policy.acting_figures()["plans"] == 1


def test_a_log_of_other_weights_is_not_gone_on_with(trained: Path, tmp_path: Path):
    """The folder of the policy was trained again, under the same name."""
    run, other = tmp_path / "run", tmp_path / "small"
    shutil.copytree(trained, run)
    saved(other, seed=3)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(str(json_policy(run)), str(other)))
    asked = resume_run(run, "", [])
    with pytest.raises(ConfigError, match=r"weights have the hash .* agent\.options\.policy have"):
        Learner(asked, run, resume=True)


def json_policy(run: Path) -> str:
    return str(json.loads((run / "policy" / "config.json").read_text())["agent"]["options"]["policy"])


def test_an_agent_of_another_kind_is_not_exported(base_folder: Path):
    with pytest.raises(ConfigError, match="expected an agent beside a frozen policy"):
        policy_of_agent(config(base_folder), object())  # type: ignore[arg-type]


def test_an_agent_that_asks_for_help_is_exported_without_the_critics_that_ask(base_folder: Path, tmp_path: Path):
    asked = config(base_folder, operator="script")
    asked.help.quantile, asked.agent.rlpd.actor_average = 0.9, 0.1
    asked.agent.encoder.kind = "none"
    made = spaces(asked)
    agent = make_agent(asked, made)
    assert any(name.startswith("critic.") for name in agent.acting_state()), "actors measure how far they disagree"
    policy_of_agent(asked, agent).save_pretrained(tmp_path / "policy")
    found = Checkpoint(3, agent.state_dict(), {}, tmp_path)
    seen = unflatten({name: np.full((1, *agent.shapes[name].shape), 0.5, np.float32) for name in agent.proprio})
    for policy in (load_policy(tmp_path / "policy"), policy_of_checkpoint(asked, found)):
        assert sorted(policy.networks) == ["actor", "proprio"]
        np.testing.assert_array_equal(policy.agent.chunks(seen), agent.chunks(seen))
        assert set(acting_weights(policy, found.agent)) <= set(dict(policy.named_parameters()))


def test_weights_of_a_checkpoint_are_those_of_the_average(trained: Path):
    state = latest(trained).agent  # type: ignore[union-attr]
    found = acting_weights(find_policy(str(trained), "", "", {}).policy, state)  # type: ignore[arg-type]
    slow = state["targets"]["actor"]["mlp.out.bias"]
    assert torch.equal(found["networks.actor.mlp.out.bias"], slow)
    assert not torch.equal(slow, state["networks"]["actor"]["mlp.out.bias"])


def test_a_run_that_decides_the_noise_of_a_flow(tmp_path: Path):
    sizes = {"cameras": ["full_image"], "state_dim": 10, "action_dim": 7, "head": "flow"}
    options = {"image_size": 16, "cameras": ["front"], "control_hz": 5, "step_limit": 9}
    asked = config(saved(tmp_path / "flow", **sizes), 2, options={"space": "noise"}, action_indices=[])
    asked = replace(asked, task="tabletop/reach", task_options=options, max_steps=10, training_starts=10)
    asked.wire.port = asked.wire.broadcast_port = 0
    begin_run(tmp_path / "run", "frozen", asked)
    run_on(resume_run(tmp_path / "run", "", []), tmp_path / "run")
    agent, policy = load_agent(tmp_path / "run"), load_policy(tmp_path / "run" / "policy")
    with make_env(asked, operator=False) as env:
        observation, _ = env.reset(seed=0, options={"split": "test", "state": 1})
        row = open_base(asked).suite.observe(observation, env.get_wrapper_attr("instruction"))
    agent.begin()
    ours = np.array([agent.sample_actions(observation, argmax=True) for _ in range(2)])
    np.testing.assert_allclose(policy.act([row], sample=False)[0][0], ours, atol=1e-5)


@pytest.mark.parametrize("sees", ["state", "features"])
def test_a_run_with_the_dense_reward_of_a_value_model_of_another_frozen_run(
    trained: Path, base_folder: Path, shown: Path, tmp_path: Path, sees: str, monkeypatch: pytest.MonkeyPatch
):
    with Log.open(trained / "log", "r") as log:
        state = ValueInputs.of(log, [], pictures=False).state
    on = {} if sees == "state" else {"policy": (base_folder, 32)}
    value = save_untrained(tmp_path / "value", {} if on else state, TASK, **on)
    if on:
        with ValueEpisodes([trained]) as episodes:
            assert write_estimates(load_value_model(value), episodes).episodes == len(episodes) > 0
        assert not any((trained / name / "features").exists() for name in ("log", "demos")), "the logs have columns"
    monkeypatch.delattr(FrozenFeatures, "policy")  # the run computes the features itself, once
    asked = config(base_folder, 2, demo_path=[str(shown)], max_steps=10, training_starts=10)
    asked.value, asked.wire.port, asked.wire.broadcast_port = ValueUse(str(value), reward=1.0), 0, 0
    make_env(asked, operator=True).close()  # the model fits what it sees
    begin_run(tmp_path / "run", "frozen", asked)
    run_on(resume_run(tmp_path / "run", "", []), tmp_path / "run")
    assert latest(tmp_path / "run").update == 10  # type: ignore[union-attr]
    for name, steps in (("log", 9), ("demos", 5)):
        with Log.open(tmp_path / "run" / name, "r") as log:
            dense = log.read(log.all().keys(), [SHAPING])[SHAPING]
        assert len(dense) > steps and (dense != 0).mean() > 0.9, f"{name}: every step has a part of the reward"
    assert (tmp_path / "run" / "policy" / "config.json").is_file()


def tiny_vla(kind: str, path: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a tiny policy with random weights that fits `tabletop/reach`, and the options it is loaded with."""
    if kind.startswith("openvla"):
        made, options = tiny_openvla.tiny(causal=kind == "openvla"), {"unnorm_key": "libero_spatial"}
        options["allow_untrained"] = True
    else:
        rows = np.random.default_rng(4).normal(0, 0.3, (50, 10))
        known = {"state": statistics(rows), "action": statistics(rows[:, :7])}
        sizes = {"max_action_dim": 8, "max_state_dim": 12, "action_dim": 7, "state_dim": 10, "value": ""}
        sizes["tokenizer_max_length"] = 160
        flow_policy, more = test_pi0.POLICIES[kind]
        made = flow_policy(flow_policy.config_class(**test_pi0.SHARED | more | sizes), ByteTokenizer(), known, 1)
        options = {}
    made.save_pretrained(path)
    return path, options


@pytest.mark.parametrize(
    ("kind", "space"),
    sampled(
        itertools.product(["sde", "pi05", "smolvla", "openvla", "openvla-oft"], ["residual", "edit"]),
        *[("sde", "edit"), ("pi05", "residual"), ("smolvla", "edit"), ("openvla", "edit"), ("openvla-oft", "residual")],
        names=2,
    ),
)
def test_a_run_beside_each_kind_of_policy(kind: str, space: str, tmp_path: Path):
    # "sde" is a pi0
    folder, loading = tiny_vla(kind, tmp_path / kind)
    chunk = 1 if kind == "openvla" else 2  # the autoregressive one plans one action
    options = {"image_size": 28, "control_hz": 5, "step_limit": 9}
    asked = config(folder, chunk, options={"space": space, "policy_options": loading}, action_indices=[])
    asked = replace(asked, task="tabletop/reach", task_options=options, max_steps=10, training_starts=10)
    asked.wire.port = asked.wire.broadcast_port = 0
    begin_run(tmp_path / "run", "frozen", asked)
    run_on(resume_run(tmp_path / "run", "", []), tmp_path / "run")
    assert latest(tmp_path / "run").agent["actor_updates"] == 10  # type: ignore[union-attr]
    with make_env(asked, operator=False) as env:
        observation, _ = env.reset(seed=0, options={"split": "test", "state": 1})
        row = open_base(asked).suite.observe(observation, env.get_wrapper_attr("instruction"))
    agent = load_agent(tmp_path / "run")
    agent.begin()
    ours = np.array([agent.sample_actions(observation, argmax=True) for _ in range(chunk)])
    base = observation["base_policy"][weights_of(asked)]["actions"]
    assert 0 < np.abs(ours - base).max() <= (0.3 + 1e-6 if space == "residual" else 2)
    for where in ("run", "run/policy"):
        served = find_policy(str(tmp_path / where), "", "", {})
        np.testing.assert_allclose(served.policy.act([row], sample=False)[0][0], ours, atol=1e-5)
        shutil.rmtree(folder, ignore_errors=True)  # what the run has written needs nothing besides


def test_hilt_train_in_its_own_processes(base_folder: Path, tmp_path: Path, fork_server: ForkServer):
    options = ",".join(f"{key}: {json.dumps(value)}" for key, value in OPTIONS.items())
    command = ["train", "frozen_vla", "--run", "run", f"policy={base_folder}", f"task={TASK}"]
    command += [f"task_options={{{options}}}", "agent.action_indices=[0,1,2]", "agent.rlpd.target_entropy=-3"]
    command += ["demonstrations=1", "goal.success=0", "max_steps=20", "training_starts=10", "max_ahead=40"]
    command += ["batch_size=16", "agent.hidden=[16]", "agent.options.space=edit", "agent.options.pull=0.5"]
    command += ["agent.rlpd.critic_warmup=5"]
    done = fork_server.hilt(command, tmp_path, ENV)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "policy" / "base" / "config.json").is_file() and "ended: run" in done.stdout
    again = fork_server.hilt(["train", "--run", "run", "--resume", "max_steps=30"], tmp_path, ENV)
    assert again.returncode == 0, again.stdout + again.stderr
    assert latest(tmp_path / "run").update == 30  # type: ignore[union-attr]
