"""The roles of a worker one by one: what it earns, the reference, the critic,
imitation, what passes between machines."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError
from hilt.distributed.ranks import Alone
from hilt.policies.copies import ReferencePolicy
from hilt.policies.io.lora import HEADS
from hilt.policies.vla.small_vla import SmallVLA
from hilt.vla.config import Rewards
from hilt.vla.demonstrations import Imitating, words
from hilt.vla.episode import RolloutEpisode, episode_summary
from hilt.vla.phase_clock import PhaseClock, TimedPool
from hilt.vla.worker import (
    Worker,
    first_policy,
    make_worker,
    reward_of,
    trained_policy,
)
from tests.vla.taught import write_log
from tests.vla.test_episode_log import episode
from tests.vla.toy_vla import config

SIZES = {"cameras": ["full_image"], "image_size": 16, "state_dim": 1, "action_dim": 1}


@pytest.fixture
def worker(tmp_path: Path) -> Any:
    made: list[Worker] = []

    def make(*changes: Any, **more: Any) -> Worker:
        made.append(Worker(config(*changes, **more), tmp_path / str(len(made)), Alone()))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_what_an_episode_earns():
    one = episode(3, rewards=np.array([0.5, 0.25, 1.0], np.float32), last={"front": "the last frame"})
    judge = {"the last frame": 1.0}.__getitem__

    def earned(one: RolloutEpisode, **coefficients: Any) -> list[float]:
        given = reward_of(one, Rewards(**{"success": 0.0, **coefficients}), lambda seen: judge(seen["front"]))
        assert given.dtype == np.float32
        return given.tolist()

    assert earned(one, success=5.0) == [0, 0, 5] and earned(replace(one, success=False), success=5.0) == [0, 0, 0]
    assert earned(one, format=0.5) == [0, 0, 0.5] and earned(replace(one, ill_formed="a token"), format=0.5) == [
        0,
        0,
        0,
    ]
    assert earned(one, environment=2.0) == [1, 0.5, 2] and earned(one, learned=3.0) == [0, 0, 3]
    assert earned(one, success=1.0, format=0.5, environment=1.0, learned=-2.0) == [0.5, 0.25, 1 + 1 + 0.5 - 2]
    assert reward_of(replace(one, rewards=one.rewards[:0], executed=one.executed[:0]), Rewards()).shape == (0,)


def test_the_reference_stays_as_it_was_wherever_it_lies(worker: Any):
    one = worker("max_steps=1", "algorithm.kl.where=loss", "algorithm.kl.estimate=low_var_kl")
    one.load_own([])
    one.collect(0)
    record = one.episodes[0].record
    held, lent = ReferencePolicy(one.policy, offload=False), ReferencePolicy(one.policy, offload=True)
    before = one.policy.evaluate(record).log_prob.detach()
    one.update(1.0)
    assert not torch.equal(one.policy.evaluate(record).log_prob, before)
    assert torch.allclose(held.evaluate(record).log_prob, before, atol=1e-6)
    assert torch.equal(held.evaluate(record).log_prob, lent.evaluate(record).log_prob)
    assert not any(parameter.requires_grad for parameter in held.module.parameters())


def test_reference_beside_adapters_has_only_weights_of_its_own_that_are_trained(worker: Any):
    one = worker("max_steps=1", "algorithm.kl.where=loss", "algorithm.kl.estimate=mse", "lora.rank=2")
    one.load_own([])
    one.collect(0)
    record, reference = one.episodes[0].record, one.updater._reference
    theirs = dict(one.policy.named_parameters())
    for name, weight in reference.module.named_parameters():
        assert (weight is theirs[name]) == (not theirs[name].requires_grad) and not weight.requires_grad
    before = one.policy.evaluate(record).log_prob.detach()
    one.update(1.0)
    assert not torch.equal(one.policy.evaluate(record).log_prob, before)
    assert torch.allclose(reference.evaluate(record).log_prob, before, atol=1e-6)


def test_reference_on_the_host_comes_once_for_all_passes(worker: Any, monkeypatch: pytest.MonkeyPatch):
    moves: list[str] = []
    kept = ReferencePolicy._move

    def move(reference: ReferencePolicy, device: torch.device) -> None:
        moves.append(device.type)
        kept(reference, device)

    monkeypatch.setattr(ReferencePolicy, "_move", move)
    one = worker(
        *("max_steps=1", "algorithm.kl.where=loss", "algorithm.kl.estimate=mse"),
        *("reference.offload=true", "algorithm.batch.chunks_per_pass=1"),
    )
    one.load_own([])
    one.collect(0)
    moves.clear()
    one.update(1.0)
    assert moves == ["cpu", "cpu"], "to the device, which is the CPU here, and back"


@pytest.mark.parametrize(("kind", "trunk"), [("shared", True), ("detached", False)])
def test_a_value_head_on_the_trunk_trains_it_or_not(kind: str, trunk: bool, worker: Any, tmp_path: Path):
    first = first_policy(config(), SIZES)
    first.save_pretrained(tmp_path / "first")  # without a value head: it begins here
    settings = config(
        "algorithm.estimator=gae", f"critic.kind={kind}", policy=str(tmp_path / "first"), policy_options={}
    )
    settings.policy_options = {}
    policy = first_policy(settings, {})
    assert torch.equal(policy.words.weight, first.words.weight) and policy.config.value == kind
    one = episode(2)
    record = {
        **one.record,
        "images": one.record["images"][:, :1],
        "state": np.zeros((2, 1), np.float32),
        "temperature": np.ones(2, np.float32),
    }
    policy.evaluate({**record, "tokens": np.zeros((2, 2, 1), np.int32)}).value.sum().backward()
    assert (policy.words.weight.grad is not None) == trunk and policy.value_head[0].weight.grad is not None


def test_a_critic_of_its_own_is_really_trained(worker: Any):
    one = worker("algorithm.estimator=gae", "critic.kind=separate", "critic.warmup_steps=1")
    one.load_own([])
    policy, critic = (
        {name: p.detach().clone() for name, p in each.named_parameters()} for each in (one.policy, one.critic.module)
    )
    one.collect(0)
    figures = one.update(1.0)
    assert figures["value_loss"] > 0
    assert all(torch.equal(p, policy[name]) for name, p in one.policy.named_parameters()), (
        "the critic learns alone at first"
    )
    assert any(not torch.equal(p, critic[name]) for name, p in one.critic.module.named_parameters())


def test_with_adapters_a_critic_of_its_own_has_adapters_too(worker: Any):
    one = worker("algorithm.estimator=gae", "critic.kind=separate", "lora.rank=2")
    names = list(one.critic.trained)
    assert all("lora_" in name or name.split(".")[0] in HEADS for name in names) and any(
        "lora_" in name for name in names
    )
    assert any(name.startswith("value_head.") for name in names), "its head is trained in full"


def test_an_entropy_coefficient_of_fixed_noise_is_refused_when_the_policy_is_opened(tmp_path: Path):
    sizes = {"width": 16, "depth": 1, "heads": 2, "keypoints": 2, "chunk": 2, "head": "flow"}
    for kind in ("sde", "noise"):
        first_policy(replace(config(), policy_options={**sizes, "flow": {"kind": kind}}), SIZES).save_pretrained(
            tmp_path / kind
        )
        settings = replace(config("algorithm.entropy=0.01"), policy=str(tmp_path / kind), policy_options={})
        with (
            contextlib.nullcontext()
            if kind == "noise"
            else pytest.raises(ConfigError, match="the noise of a flow of kind sde is fixed")
        ):
            Worker(settings, tmp_path / f"run-{kind}", Alone()).close()


def test_weights_that_are_trained_are_float32(tmp_path: Path):
    first_policy(config(), SIZES).save_pretrained(tmp_path / "first")
    settings = replace(config(), policy=str(tmp_path / "first"), policy_options={})
    assert {p.dtype for p in first_policy(settings, {}).parameters()} == {torch.float32}


def test_imitation_is_a_term_of_the_loss_and_goes_on_where_it_was(tmp_path: Path):
    log = write_log(tmp_path / "log", [(4, "go", True)] * 3)
    settings = config("imitation.weight=0.5", "imitation.batch_size=5", imitation={"data": [str(log)]})
    settings.columns = {"full_image": "front", "state": "state"}
    policy = SmallVLA(first_policy(settings, {**SIZES, "state_dim": 3, "action_dim": 2}).config)
    term = Imitating(settings, tmp_path, policy, words(settings), rank=0)
    given = [term() for _ in range(3)]
    for loss, figures in given:
        assert loss.requires_grad and loss.item() == pytest.approx(0.5 * figures["imitation_loss"])
    state = term.state_dict()
    following = term()[0].item()
    again = Imitating(settings, tmp_path, policy, words(settings), rank=0)
    again.load_state_dict(state)
    assert again()[0].item() == following != given[0][0].item()


def test_the_driver_is_told_little(worker: Any):
    one = worker()
    one.load_own([])
    told = one.collect(0)
    assert len(told["episodes"]) == 16 and len(json.dumps(told)) < 16 * 500
    assert len(json.dumps(episode_summary(episode(64), 3))) < 500 and "ill_formed" not in episode_summary(
        episode(64), 3
    )


def test_an_episode_without_a_row_is_told_though_it_is_not_in_the_log(worker: Any, monkeypatch: pytest.MonkeyPatch):
    one = worker("collect.data_batch_size=4", "algorithm.batch.trajectories_per_step=4")
    one.load_own([])
    act = one.policy.act

    def fails(observations: Any, *given: Any) -> Any:
        if any(seen["state"][0] == 0 for seen in observations):  # where both tasks begin first
            raise ValueError("nonsense")
        return act(observations, *given)

    monkeypatch.setattr(one.policy, "act", fails)
    told = one.collect(0)
    ill = [summary for summary in told["episodes"] if "ill_formed" in summary]
    assert len(ill) == 8
    assert {(summary["ill_formed"], summary["trajectory"], summary["length"]) for summary in ill} == {
        ("ValueError: nonsense", -1, 0)
    }
    assert told["messages"][0].startswith("an ill-formed chunk in") and told["figures"]["dropped_ill_formed"] == 2


def test_episodes_and_weights_pass_from_one_worker_to_another(tmp_path: Path):
    settings = config()
    plain = json.loads(
        json.dumps({"tasks": settings.tasks, "columns": settings.columns, "policy_options": settings.policy_options})
    )
    plain |= {"collect": {"group_size": 4, "data_batch_size": 16}, "max_steps": 4}
    acts, learns = (
        make_worker(plain, str(tmp_path / role), ranks=Alone(), role=role) for role in ("roll_out", "train")
    )
    both = make_worker(plain, str(tmp_path / "both"), ranks=Alone())
    for one in (acts, both):
        one.load_own([])
        one.collect(0)
    learns.take_in([acts.hand_out()])
    assert learns.update(1.0) == both.update(1.0)
    version, weights = learns.weights()
    acts.take_weights(version, weights)
    assert version == 1 and acts.episodes == []
    # the one that it has: nothing is copied
    acts.take_weights(version, {name: 0 * array for name, array in weights.items()})
    assert all(torch.equal(p, dict(both.policy.named_parameters())[name]) for name, p in acts.policy.named_parameters())
    made = trained_policy(both._config, both.sizes(), both.trained())
    assert all(torch.equal(p, dict(both.policy.named_parameters())[name]) for name, p in made.named_parameters())
    for one in (acts, learns, both):
        one.close()


def test_a_task_that_does_not_begin_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match="the observations have no picture"):
        Worker(replace(config(), columns={"state": "state"}), tmp_path, Alone())


@pytest.mark.parametrize("busy", [True, False])
def test_what_is_done_while_a_simulator_works_is_the_simulators_time(busy: bool, monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("hilt.vla.phase_clock.time.perf_counter", lambda: now[0])

    class Slow:
        def busy(self, slots: Any) -> bool:
            return busy

        def step(self, *given: Any) -> None:
            now[0] += 1

        def collect(self, slots: Any) -> list[Any]:
            now[0] += 10
            return []

    clock = PhaseClock()
    pool: Any = TimedPool(Slow(), clock)  # type: ignore[arg-type]
    began = pool.begin()
    pool.step(0, [])
    with clock.at("model"):
        now[0] += 100
    now[0] += 1000  # the log is written
    pool.collect([0])
    now[0] += 10_000
    spent = clock.since(began)
    assert spent["simulator"] == 11 + 1000 * busy and spent.get("beside", 0) == 1000 * busy
    assert spent["model"] == 100 and spent["all"] == 11_111
