"""Rollouts in float8: the error of products, copies that follow their weights, what a policy that learns never notices,
and how far acting is from learning. What needs a GPU is skipped without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hilt.algos.adam import Adam
from hilt.algos.surrogate import importance, surrogate
from hilt.compat.simplevla.workers import RobDataParallelPPOActor
from hilt.core.config import build
from hilt.core.errors import ConfigError
from hilt.observe.metrics import read_metrics
from hilt.policies import float8
from hilt.policies.base import join
from hilt.policies.copies import ActingCopy
from hilt.policies.float8 import EMULATED, FP8, Float8Linear, check_float8, compared, mismatch, product, quantize
from hilt.policies.graphs import compiling
from hilt.policies.io import lora
from hilt.policies.vla.openvla import OpenVLAOptions
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.vla.config import Vla
from hilt.vla.train import begin_run, train
from hilt.vla.update import Updater
from tests.effort import need
from tests.policies import test_pi0, test_small_vla, tiny_openvla
from tests.vla.toy_vla import DOWN, UP

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ROUNDING = 1 / 16
"""The largest relative error of a number in e4m3 that is not tiny"""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def oft(precision: str = EMULATED, causal: bool = False, **options: Any) -> Any:
    options = {"fp8_first_layer": 0, **options} if precision != "same" else options
    return tiny_openvla.tiny(causal=causal, options=OpenVLAOptions(rollout_precision=precision, **options)).eval()


def small(precision: str = EMULATED, head: str = "tokens") -> Any:
    policy = test_small_vla.made(head)
    policy.rollout_precision = precision
    return policy.eval()


def pi0(precision: str = EMULATED, kind: str = "sde") -> Any:
    more = {"rollout_precision": precision, "fp8_first_layer": 0} if precision != "same" else {}
    return test_pi0.made(kind, **more).eval()


def seen(policy: Any, rows: int = 3) -> Any:
    if isinstance(policy, test_pi0.FlowPolicy):
        return test_pi0.seen(rows)
    return test_small_vla.seen(rows) if hasattr(policy, "eyes") else tiny_openvla.observations(rows)


KINDS = {
    "oft": oft,
    "openvla": lambda precision=EMULATED: oft(precision, causal=True),
    "small_vla": small,
    "gaussian": lambda precision=EMULATED: small(precision, "gaussian"),
    "pi0": pi0,
    "smolvla": lambda precision=EMULATED: pi0(precision, "smolvla"),
}


# --- numbers ---


def test_each_row_has_a_scale_of_its_own():
    x = drawn(5, 64) * torch.tensor([1e-6, 1.0, 1e6, 0.0, 1.0])[:, None]
    x[4, 0] = 1e4  # an outlier costs its own row alone
    values, scale = quantize(x)
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (5, 1) and scale.dtype == torch.float32
    back = values.float() * scale
    ordinary = x[:3].abs() > x[:3].abs().amax(-1, keepdim=True) * 2**-8  # not among the smallest
    assert ((back - x)[:3].abs() <= ROUNDING * x[:3].abs())[ordinary].all()
    assert (back[3] == 0).all() and back[4, 0] == pytest.approx(1e4) and back[1].std() > 0.5


@pytest.mark.parametrize("bias", [True, False])
def test_emulated_product_is_float32_within_the_error_of_e4m3(bias: bool):
    x, layer = drawn(2, 17, 256), nn.Linear(256, 48, bias=bias)
    values, scale = quantize(layer.weight.detach())
    found = product(x, values, scale.T, layer.bias, emulated=True)
    exact = layer(x).detach()
    off = (found - exact).detach()
    assert found.shape == exact.shape and found.dtype == torch.float32
    bound = (2 * ROUNDING + ROUNDING**2) * (x.abs() @ layer.weight.detach().abs().T)
    assert (off.abs() <= bound + 1e-4).all()
    assert 0.005 < float(off.norm() / exact.norm()) < 0.06  # rounded, and no more than that


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(value: float):
    x, weight = drawn(3, 32), drawn(16, 32, seed=1)
    x[1, 5] = value
    values, scale = quantize(weight)
    found = product(x, values, scale.T, None, emulated=True)
    assert found[[0, 2]].isfinite().all() and not found[1].isfinite().any()


# --- what a policy that learns notices: nothing ---


@pytest.mark.parametrize("kind", KINDS)
def test_acting_differs_a_little_and_learning_not_at_all(kind: str):
    ours, plain = KINDS[kind](), KINDS[kind]("same")
    before = [*ours.state_dict()]
    _, record = ours.act(seen(ours), generator=generator())
    _, other = plain.act(seen(plain), generator=generator())
    # neither the weights nor their names, nor gradients
    assert [*ours.state_dict()] == before == [*plain.state_dict()] and tiny_openvla.same_weights(ours, plain)
    results = [policy.evaluate(record) for policy in (ours, plain)]
    assert torch.equal(results[0].log_prob, results[1].log_prob)
    for found in results:
        found.log_prob.sum().backward()
    for one, two in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None) and (one.grad is None or torch.equal(one.grad, two.grad))
    gap = np.abs(results[0].log_prob.detach().numpy() - record["log_prob"])
    assert 0 < gap.max() < 0.5
    with ours.in_learning_precision():
        _, again = ours.act(seen(ours), generator=generator())
    np.testing.assert_array_equal(again["log_prob"], other["log_prob"])


def test_only_large_layers_of_the_language_model_act_in_float8():
    policy, late = oft(), oft(fp8_first_layer=1)
    for each in (policy, late):
        each.act(seen(each), generator=generator())
    names = {name for name, module in policy.named_modules() if isinstance(module, Float8Linear)}
    assert len(names) == 2 * 7 and all(name.startswith("language_model.model.layers.") for name in names)
    layers = late.float8_layers()
    assert {name.split(".")[3] for name, module in late.named_modules() if module in layers} == {"1"}
    assert float8.float8_bytes(layers) == sum(each.weight.numel() + 4 * len(each.weight) for each in layers) > 0


def test_copies_follow_an_update_of_the_weights():
    policy = small()
    _, before = policy.act(seen(policy), generator=generator())
    adam = Adam(list(policy.parameters()), 1e-2)
    gradients = torch.autograd.grad(policy.evaluate(before).log_prob.sum(), adam.parameters, allow_unused=True)
    adam.step(gradients)
    _, after = policy.act(seen(policy), generator=generator())
    fresh = small()
    fresh.load_state_dict(policy.state_dict())
    _, wanted = fresh.act(seen(fresh), generator=generator())
    np.testing.assert_array_equal(after["log_prob"], wanted["log_prob"])
    assert np.abs(after["log_prob"] - before["log_prob"]).max() > 1e-3
    kept = [layer.float8.values.data_ptr() for layer in policy.float8_layers()]
    policy.load_state_dict(small().state_dict())
    _, again = policy.act(seen(policy), generator=generator())
    np.testing.assert_array_equal(again["log_prob"], before["log_prob"])
    # in place, for graphs that read them there
    assert kept == [layer.float8.values.data_ptr() for layer in policy.float8_layers()]
    took = policy._float8.refresh_s
    policy.act(seen(policy), generator=generator())
    assert policy._float8.refresh_s == took  # nothing changed, nothing was made


def test_a_copy_of_a_policy_has_float8_copies_of_its_own():
    policy = small()
    _, record = policy.act(seen(policy), generator=generator())
    beside = ActingCopy(policy)
    acting = beside.refresh()
    assert acting._float8 is None and not any(layer.float8 for layer in acting.float8_layers())
    _, other = acting.act(seen(acting), generator=generator())
    np.testing.assert_array_equal(other["log_prob"], record["log_prob"])
    ours, theirs = ({layer.float8.values.data_ptr() for layer in each.float8_layers()} for each in (policy, acting))
    assert not ours & theirs
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.1)
    _, still = acting.act(seen(acting), generator=generator())
    np.testing.assert_array_equal(still["log_prob"], record["log_prob"])  # until the next refresh


def test_adapters_are_added_to_a_product_in_float8():
    need("peft")
    policy, plain = oft(), oft("same")
    for each in (policy, plain):
        trained = lora.attach(each, 4, 8, dtype=torch.float32)
        with torch.no_grad():
            for number, weight in enumerate(trained):
                weight.add_(0.05 * drawn(*weight.shape, seed=number))
    _, record = policy.act(seen(policy), generator=generator())
    assert len(policy.float8_layers()) == 14  # those below the adapters, and no adapter
    gap = np.abs(plain.evaluate(record).log_prob.detach().numpy() - record["log_prob"])
    assert 0 < gap.max() < 0.5
    lora.merge(policy)
    _, merged = policy.act(seen(policy), generator=generator())
    fresh = oft()
    fresh.load_state_dict(policy.state_dict())
    _, wanted = fresh.act(seen(fresh), generator=generator())
    np.testing.assert_array_equal(merged["log_prob"], wanted["log_prob"])


@pytest.mark.parametrize("kind", ["small_vla", "pi0"])
def test_a_saved_policy_acts_as_it_learned(kind: str, tmp_path: Path):
    policy = KINDS[kind]()
    policy.save_pretrained(tmp_path / "policy")
    for path in tmp_path.rglob("*.json"):
        assert "rollout_precision" not in json.dumps(json.loads(path.read_text()))
    opened = type(policy).from_pretrained(tmp_path / "policy")
    assert opened.rollout_precision == "same"


# --- how far apart they are ---


def test_mismatch_of_tokens_is_their_exact_divergence():
    policy = small()
    with torch.no_grad():
        policy.action_head.out.weight.mul_(20)  # so that the likeliest token is not the one of before everywhere
    _, record = policy.act(seen(policy, 8), generator=generator())
    found, shape = compared(policy, record), record["tokens"].shape
    assert found["rollout_kl"].shape == found["rollout_changed"].shape == shape
    q = policy.token_log_probs(record).detach().double()
    with policy.acting():
        p = policy.token_log_probs(record).double()
    wanted = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(found["rollout_kl"], wanted)
    assert (found["rollout_kl"] >= -1e-9).all() and found["rollout_kl"].mean() > 1e-5
    # what was drawn was drawn by the policy that acts
    taken = p.gather(-1, torch.from_numpy(record["tokens"]).long()[..., None])[..., 0]
    np.testing.assert_allclose(taken.numpy(), record["log_prob"], atol=1e-5)


def test_mismatch_of_a_gaussian_is_estimated_from_what_was_drawn():
    policy = small(head="gaussian")
    _, record = policy.act([*seen(policy, 8)] * 40, generator=generator())
    found = compared(policy, record)
    assert found.keys() == {"rollout_kl"} and (found["rollout_kl"] >= 0).all()
    with torch.no_grad():
        heat = torch.ones(len(record["temperature"]))
        mean, std = policy.action_head._law(policy._features(record)[0], heat)
        with policy.acting():
            moved, _ = policy.action_head._law(policy._features(record)[0], heat)
    exact = float(((moved - mean) ** 2 / (2 * std**2)).mean())  # of two Gaussians of one deviation
    assert exact > 0 and float(found["rollout_kl"].mean()) == pytest.approx(exact, rel=0.2)


def test_mismatch_adds_up_over_ranks_and_looks_at_some_rows():
    policy = small()
    _, record = policy.act([*seen(policy, 8)] * 8, generator=generator())
    figures = mismatch(policy, [record, record])
    assert figures.keys() == {"rollout_kl", "rollout_changed", "rollout_quantize_ms"}
    some = float8._some_rows([record, record])
    assert len(some["log_prob"]) == float8.COMPARED_ROWS
    assert figures["rollout_kl"] == pytest.approx(float(compared(policy, some)["rollout_kl"].mean()))
    assert mismatch(policy, [record, record], lambda sums: 3 * sums)["rollout_kl"] == pytest.approx(
        figures["rollout_kl"]
    )
    assert mismatch(policy, []).keys() == {"rollout_quantize_ms"} and mismatch(small("same"), [record]) == {}
    few = float8._some_rows([join([record])])
    assert len(few["log_prob"]) <= float8.COMPARED_ROWS


def test_a_bandit_that_acts_in_float8_has_the_gradient_of_the_policy_that_learns():
    """Over all arms, each as often as it is drawn in float8: the weight makes up for the other precision exactly."""
    x, weight = drawn(1, 64), drawn(16, 64, seed=1) / 4
    rewards = torch.linspace(0, 1, 16)
    values, scale = quantize(weight)
    acting = product(x, values, scale.T, None, emulated=True)[0].log_softmax(0)
    learns = weight.clone().requires_grad_()
    now = (x @ learns.T)[0].log_softmax(0)
    (true,) = torch.autograd.grad(-(now.exp() * rewards).sum(), learns, retain_graph=True)

    def gradient(cap: float, weighs: bool) -> torch.Tensor:
        old, advantage = now.detach(), rewards - (now.detach().exp() * rewards).sum()
        share = importance(old, acting).clamp(max=cap) if weighs else 1.0
        loss = (acting.exp() * share * surrogate(now - old, advantage, 0.2, 0.28).loss).sum()
        return torch.autograd.grad(loss, learns, retain_graph=True)[0]

    def off(found: torch.Tensor) -> float:
        return float((found - true).norm() / true.norm())

    assert off(gradient(2.0, weighs=True)) < 1e-5 < 1e-3 < off(gradient(2.0, weighs=False))
    assert off(gradient(1.0, weighs=True)) > 1e-3  # truncated where it matters


def rough_policy(seed: int) -> SmallVLA:
    """A policy whose trunk counts so much that float8 changes its answers as those of a large model."""
    sizes = {"image_size": 16, "state_dim": 1, "action_dim": 1, "chunk": 2, "bins": 5, "smoothing": 0.5}
    policy = SmallVLA(SmallVLAConfig(width=32, depth=3, heads=2, keypoints=2, **sizes), seed=seed)
    with torch.no_grad():
        for block in policy.blocks:
            block.out.weight.mul_(6)
            block.down.weight.mul_(6)
        policy.action_head.out.weight.mul_(6)
        policy.words.weight.mul_(8)  # so that each task is learned as itself
    return policy


def learned(run: Path, policy: Path, seed: int, *changes: str) -> tuple[list[float], list[float]]:
    """Success of the rollouts of each training step, and the measured KL."""
    sizes = ["collect.group_size=8", "collect.data_batch_size=64", "algorithm.batch.trajectories_per_step=32"]
    sizes += ["pool.slots=16", "max_steps=14", "solved_steps=0", "checkpoint_period=1000", f"seed={seed}"]
    sizes += [f"validation.{name}" for name in ("before=false", "period=0", "after=false")]
    sizes += [
        "optimizer.learning_rate=2e-3",
        "algorithm.entropy=0.02",
        "optimizer.weight_decay=0",
        "policy_options.precision=float32",
    ]
    toy = [f"policy={policy}", f"tasks=[{UP},{DOWN}]", "columns={full_image: front, state: state}"]
    settings = build(Vla(), *toy, *sizes, *changes)
    begin_run(run, "toy", settings)
    train(settings, run)
    steps: dict[int, list[float]] = {}
    for episode in read_metrics(run, ["episode"]):
        steps.setdefault(int(episode["training_step"]), []).append(float(episode["success"]))
    kl = [record["rollout_kl"] for record in read_metrics(run, ["update"]) if "rollout_kl" in record]
    return [float(np.mean(steps[step])) for step in sorted(steps)], kl


@pytest.mark.long
def test_learning_from_rollouts_in_float8_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs whose rollouts are in float8 learn. Three seeds cannot show that they learn as well as others: the curves of
    six, which `-s` prints three of, are in docs/benchmarks.md with their interval."""
    acted = ["policy_options.rollout_precision=fp8_emulated", "algorithm.recompute_log_prob=true"]
    weighed = Updater._weighed

    def not_weighed(updater: Updater, rows: Any) -> dict[str, float]:
        figures = weighed(updater, rows)
        rows.importance = None
        return figures

    ways = {"float32": ([], weighed), "float8": (acted, weighed), "float8, not corrected": (acted, not_weighed)}
    ends: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(3):
        rough_policy(seed).save_pretrained(tmp_path / f"policy-{seed}")
        for name, (changes, how) in ways.items():
            monkeypatch.setattr(Updater, "_weighed", how)
            curve, kl = learned(tmp_path / f"{name}-{seed}", tmp_path / f"policy-{seed}", seed, *changes)
            print(name, seed, [round(share, 2) for share in curve], [f"{each:.1e}" for each in kl])
            ends[name].append(float(np.mean(curve[-4:])))
            assert not changes or max(kl) > 1e-4
    # they differ as seeds do: after so few steps some have learned one of the two tasks only
    assert np.mean(ends["float8"]) > max(0.5, np.mean(ends["float32"]) - 0.3)


# --- refusals ---


def test_float8_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch):
    told = r"rollout_precision=fp8 needs a GPU with float8 products, and the policy is on cpu: leave it out; "
    with pytest.raises(ConfigError, match=told + "rollout_precision=fp8_emulated computes the same numbers anywhere"):
        oft(FP8).act(seen(oft()), generator=generator())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA RTX A6000")
    with pytest.raises(ConfigError, match=r"capability 8\.9 .*, and NVIDIA RTX A6000 has 8\.6: leave it out"):
        check_float8(FP8, "cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_float8(FP8, "cuda:0")
    for precision, device in ((EMULATED, "cpu"), ("same", "cpu"), (FP8, "meta")):
        check_float8(precision, device)


def test_float8_is_refused_by_an_actor_that_corrects_for_nothing():
    with pytest.raises(ConfigError, match=r"rollout_precision=fp8_emulated: this actor learns from log-probabilities"):
        RobDataParallelPPOActor(Vla(), small())


def test_options_that_would_do_nothing_are_refused():
    with pytest.raises(ConfigError, match="fp8_first_layer=3 would do nothing: it needs rollout_precision=fp8"):
        OpenVLAOptions(fp8_first_layer=3)
    with pytest.raises(
        ConfigError, match=r"no layer of this policy would act in float8.* Give a lower fp8_first_layer"
    ):
        policy = oft(fp8_first_layer=2)
        policy.act(seen(policy), generator=generator())


# --- on a GPU that has it ---


def _answer(policy: Any) -> np.ndarray:
    """Numbers that depend on the weights: of a flow, log-probabilities are of its noise alone."""
    actions, record = policy.act(seen(policy), generator=generator())
    return actions if "chain" in record else record["log_prob"]


def on_gpu(kind: str, precision: str) -> Any:
    return KINDS[kind](precision).to("cuda:0")


@GPU
@pytest.mark.parametrize("rows", [1, 17, 128])
@pytest.mark.parametrize("bias", [True, False])
def test_products_of_the_gpu_are_the_emulated_ones(rows: int, bias: bool):
    x, layer = drawn(rows, 256).cuda(), nn.Linear(256, 48, bias=bias).cuda()
    values, scale = quantize(layer.weight.detach())
    with torch.no_grad():
        found = product(x, values, scale.T.contiguous(), layer.bias, emulated=False)
        wanted = product(x, values, scale.T.contiguous(), layer.bias, emulated=True)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


@GPU
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_on_the_gpu_acts_as_the_emulated_one(kind: str):
    ours, emulated = on_gpu(kind, FP8), on_gpu(kind, EMULATED)
    _, record = ours.act(seen(ours), generator=generator())
    assert [*ours.state_dict()] == [*emulated.state_dict()]
    with torch.no_grad(), emulated.acting():
        wanted = emulated.evaluate(record).log_prob.cpu().numpy()
    np.testing.assert_allclose(record["log_prob"], wanted, rtol=5e-2, atol=5e-2 * np.abs(wanted).max())
    learned = ours.evaluate(record).log_prob
    assert float(np.abs(learned.detach().cpu().numpy() - record["log_prob"]).max()) > 0
    with ours.in_learning_precision():
        _, other = ours.act(seen(ours), generator=generator())
    np.testing.assert_allclose(
        other["log_prob"],
        ours.evaluate(other).log_prob.detach().cpu().numpy(),
        rtol=2e-2,
        atol=2e-2 * np.abs(wanted).max(),
    )
    _, again = ours.act(seen(ours), generator=generator())  # and back
    np.testing.assert_allclose(again["log_prob"], record["log_prob"], rtol=1e-3, atol=1e-3 * np.abs(wanted).max())


@GPU
@pytest.mark.parametrize("kind", ["oft", "pi0"])
def test_graphs_on_the_gpu_read_the_copies_of_now(kind: str):
    policy = on_gpu(kind, FP8)
    before = _answer(policy)
    with torch.no_grad():
        for layer in policy.float8_layers():
            layer.weight.mul_(-1)
    after = _answer(policy)
    fresh = on_gpu(kind, FP8)
    fresh.load_state_dict(policy.state_dict())
    np.testing.assert_allclose(after, _answer(fresh), rtol=1e-3, atol=1e-3)
    assert np.abs(after - before).max() > 1e-4


@GPU
def test_compiled_layers_on_the_gpu_act_in_float8():
    ours, plain = (on_gpu("oft", FP8) for _ in range(2))
    ours.compile_layers()
    with compiling():
        _, record = ours.act(seen(ours), generator=generator())
        with torch.no_grad(), plain.acting():
            wanted = plain.evaluate(record).log_prob.cpu().numpy()
        learned = ours.evaluate(record).log_prob.detach().cpu().numpy()
    np.testing.assert_allclose(record["log_prob"], wanted, rtol=2e-2, atol=2e-2 * np.abs(wanted).max())
    np.testing.assert_allclose(learned, plain.evaluate(record).log_prob.detach().cpu().numpy(), rtol=1e-2, atol=1e-2)
