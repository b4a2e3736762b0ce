"""Whole runs whose actor decides the noise of a frozen policy's flow, and learns by a critic of noise: take-overs and
demonstrations, the noise in the log, going on, and the folder of the policy."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hilt.cli.servers.serve_policy import find_policy
from hilt.core.errors import ConfigError
from hilt.core.trajectory import Source
from hilt.envs.chunk_executor import ChunkSettings
from hilt.hil.config import Hil
from hilt.hil.data import Experience
from hilt.hil.environment import make_env, spaces
from hilt.hil.evaluate import evaluate, load_agent
from hilt.hil.frozen.base_observations import open_base, weights_of
from hilt.hil.launch import begin_run, resume_run
from hilt.hil.make_agent import make_agent
from hilt.hil.preflight import check_begin
from hilt.observe.metrics import read_metrics
from hilt.policies.registry import load_policy
from hilt.policies.vla.normalize import statistics
from hilt.replay import Log
from hilt.runs.checkpoint import latest
from hilt.vla.rollout import ChunkAgent
from tests.hil.test_base_observations import config, saved, shown
from tests.hil.test_frozen_export import run_on
from tests.policies import tiny_pi0

__all__ = ["shown"]
torch.set_num_threads(1)
OPTIONS = {"space": "noise", "noise_gradient": "critic", "noise_samples": 2}
CHUNK, ACTIONS = 2, 3


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("policy") / "flow", head="flow")


def asked_of(base_folder: Path, **changes) -> Hil:
    made = config(base_folder, CHUNK, options=dict(OPTIONS), **changes)
    made.wire.port = made.wire.broadcast_port = 0
    made.training_starts, made.log_period = 10, 5
    return made


@pytest.fixture(scope="module")
def trained(base_folder: Path, shown: Path, tmp_path_factory) -> Path:
    """A run with demonstrations and a script that takes over, begun and then resumed."""
    run = tmp_path_factory.mktemp("trained") / "run"
    asked = asked_of(base_folder, demo_path=[str(shown)], operator="script", max_steps=15, max_env_steps=1000)
    begin_run(run, "frozen", asked)
    run_on(resume_run(run, "", []), run)
    run_on(resume_run(run, "", ["max_steps=30"]), run)
    return run


def test_the_log_has_the_noise_of_the_actor_and_draws_of_every_frame(trained: Path, base_folder: Path):
    base = open_base(asked_of(base_folder))
    with make_env(asked_of(base_folder), operator=False) as env:
        words = env.get_wrapper_attr("instruction")
    names = ["observations", "noise", "source", "chunk_index", "actions"]
    with Log.open(trained / "log", "r") as log, Log.open(trained / "demos", "r") as demos:
        read, given = log.read(log.all().keys(), names), demos.read(demos.all().keys(), names)
    policy = (read["source"] == Source.POLICY) & (read["chunk_index"] == 0)
    known = read["noise"]["known"]
    assert policy.any() and (read["source"] == Source.HUMAN).any()
    np.testing.assert_array_equal(known, policy)
    assert not given["noise"]["known"].any() and not read["noise"]["start"][~known].any()
    for steps in (read, given):
        columns = steps["observations"]["base_policy"][base.weights]
        assert columns["noise"].shape[1:] == (2, ACTIONS) and columns["noise_actions"].shape[1:] == (2, CHUNK, 7)
        assert np.abs(columns["noise"]).max() > 0.1, "whoever acted"
    assert base.acted is not None
    for place in np.flatnonzero(known)[:3]:
        tree = read["observations"]
        one = {"images": {"wrist": tree["images"]["wrist"][place]}}
        one["state"] = {key: value[place] for key, value in tree["state"].items()}
        made = base.acted.actions([base.row(one, words)], read["noise"]["start"][place][None])
        np.testing.assert_allclose(made[0, 0, :3], read["actions"][place][:3], atol=1e-5)


def test_it_learns_from_all_steps_and_goes_on(trained: Path):
    checkpoint = latest(trained)
    assert checkpoint is not None and checkpoint.update == 30 and checkpoint.agent["actor_updates"] == 30
    assert "noise_critic" in checkpoint.agent["networks"] and "noise_critic" in checkpoint.agent["optimizers"]
    records = [record for record in read_metrics(trained, ["update"]) if "noise_critic_loss" in record]
    assert records and all(2 / 3 <= record["decoded"] <= 1 and np.isfinite(record["q"]) for record in records)


def test_the_folder_answers_as_the_agent_acts(trained: Path, base_folder: Path):
    policy, agent, asked = load_policy(trained / "policy"), load_agent(trained), asked_of(base_folder)
    with make_env(asked, operator=False) as env:
        words = env.get_wrapper_attr("instruction")
        observation, _ = env.reset(seed=0, options={"split": "test", "state": 1})
        agent.begin(words)
        ours = [agent.sample_actions(observation, argmax=True) for _ in range(CHUNK)]
        row = open_base(asked).suite.observe(observation, words)
        np.testing.assert_allclose(policy.act([row], sample=False)[0][0], np.array(ours)[:, :3], atol=1e-5)
        acting = ChunkAgent(policy, open_base(asked).suite, words, ChunkSettings(delay=0))
        acting.begin()
        np.testing.assert_allclose(acting.sample_actions(observation, seed=0, argmax=True), ours[0], atol=1e-5)
        acting.close()
    plan = observation["base_policy"][weights_of(asked)]["actions"]
    assert np.abs(np.array(ours) - plan).max() > 1e-4
    done = evaluate(asked, agent, "test", [0], folder=trained / "evaluations")
    assert len(done.outcomes) == 1 and not done.errors
    served = find_policy(str(trained), "", "", {})
    assert served.version == 30 and served.load is not None
    known, newer = dict(served.policy.named_parameters()), served.load(30)
    assert newer and all(torch.equal(known[name], tensor) for name, tensor in newer.items())
    np.testing.assert_allclose(served.policy.act([row], sample=False)[0], policy.act([row], sample=False)[0], atol=1e-6)


def test_demonstrations_without_the_draws_get_them(base_folder: Path, trained: Path, tmp_path: Path):
    """The log of the run, as demonstrations of one that asks for more draws of each frame."""
    asked = asked_of(base_folder, demo_path=[str(trained / "log")], max_steps=1)
    asked.agent.options["noise_samples"] = 3
    begin_run(tmp_path / "run", "frozen", asked)
    made = resume_run(tmp_path / "run", "", [])
    agent = make_agent(made, spaces(made))
    experience = Experience(tmp_path / "run", made, spaces(made), agent)
    with closing(experience):
        batch = experience.sample(4, "demo")
        assert batch["observations"]["base_policy"][weights_of(asked)]["noise"].shape == (4, 3, ACTIONS)
        assert batch["noise"]["start"].shape == (4, ACTIONS)
        agent.update(batch)


def test_the_log_of_a_run_with_noise_of_another_width_can_be_demonstrations(
    base_folder: Path, trained: Path, tmp_path: Path
):
    """Each action of a plan has noise of its own here, and that of the actor of the other run is not known."""
    asked = asked_of(base_folder, demo_path=[str(trained / "log")], max_steps=1)
    asked.agent.options["repeat_noise"] = False
    begin_run(tmp_path / "run", "frozen", asked)
    made = resume_run(tmp_path / "run", "", [])
    agent, width = make_agent(made, spaces(made)), 3 * ACTIONS
    with closing(Experience(tmp_path / "run", made, spaces(made), agent)) as experience:
        batch = experience.sample(8, "demo")
        assert batch["observations"]["base_policy"][weights_of(asked)]["noise"].shape == (8, 2, width)
        assert batch["noise"]["start"].shape == (8, width) and not batch["noise"]["start"].any()
        assert not batch["noise"]["known"].any()
        agent.update(batch)
    with Log.open(trained / "log", "r") as log:
        assert log.read(log.all().keys(), ["noise/known"])["noise"]["known"].any(), "which it was there"


REACH = {"image_size": 16, "cameras": ["front"], "control_hz": 5, "step_limit": 9}


def pi0_folder(path: Path) -> Path:
    """The folder of a pi0 that has learned nothing, for `tabletop/reach`."""
    policy = tiny_pi0.tiny()
    rows = np.random.default_rng(0).normal(0, 0.2, (50, 10))
    sizes = {**tiny_pi0.SIZES, "state_dim": 10, "max_state_dim": 10, "images": ("full_image",)}
    policy = type(policy)(
        type(policy.config)(**sizes), policy.tokenizer, {"state": statistics(rows), "action": statistics(rows[:, :7])}
    )
    policy.save_pretrained(path)
    return path


def test_a_run_beside_pi0(tmp_path: Path):
    asked = config(pi0_folder(tmp_path / "pi0"), 2, options={"space": "noise"}, action_indices=[])
    asked = replace(asked, task="tabletop/reach", task_options=dict(REACH), max_steps=10, training_starts=10)
    asked.wire.port = asked.wire.broadcast_port = 0
    begin_run(tmp_path / "run", "frozen", asked)
    run_on(resume_run(tmp_path / "run", "", []), tmp_path / "run")
    agent, exported = load_agent(tmp_path / "run"), load_policy(tmp_path / "run" / "policy")
    with make_env(asked, operator=False) as env:
        observation, _ = env.reset(seed=0, options={"split": "test", "state": 1})
        words = env.get_wrapper_attr("instruction")
    agent.begin(words)
    ours = np.array([agent.sample_actions(observation, argmax=True) for _ in range(2)])
    row = open_base(asked).suite.observe(observation, words)
    np.testing.assert_allclose(exported.act([row], sample=False)[0][0], ours, atol=1e-5)


@pytest.mark.parametrize("gradient", ["critic", "auto"])
def test_what_a_critic_of_noise_does_not_know_is_refused_before_a_run(base_folder: Path, tmp_path: Path, gradient: str):
    made = asked_of(base_folder)
    made.agent.options["noise_gradient"] = gradient
    if gradient == "auto":
        made = asked_of(pi0_folder(tmp_path / "pi0"), task="tabletop/reach", task_options=dict(REACH))
        made.agent.options, made.agent.action_indices = {"policy": str(tmp_path / "pi0"), "space": "noise"}, []
    made.agent.critic.head, made.agent.critic.value_range = "c51", [0.0, 1.0]
    made.agent.critic.reset_period, made.agent.rlpd.samples = 1000, 4
    made.help.quantile, made.operator = 0.99, "script"
    with pytest.raises(ConfigError) as refused:
        check_begin(made)
    words = str(refused.value)
    assert re.search(
        r"agent\.rlpd\.samples=4 and agent\.critic\.head=c51 and agent\.critic\.reset_period=1000 with a", words
    )
    assert "help.quantile with agent.options.space=noise: the critics of actions" in words


def test_what_would_do_nothing_is_refused_before_a_run(base_folder: Path):
    flow = asked_of(base_folder)
    flow.agent.options |= {"noise_gradient": "flow"}
    with pytest.raises(ConfigError, match=r"noise_samples=2 would do nothing"):
        make_env(flow, operator=False)
