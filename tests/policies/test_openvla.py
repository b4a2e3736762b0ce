"""OpenVLA and OpenVLA-OFT as policies: what was drawn is judged the same, each option
does what it says. Parity is in tests/golden."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, MissingFieldError, SchemaError, UnknownNameError
from hilt.policies import base, precision
from hilt.policies.io.preprocess import openvla_view
from hilt.policies.registry import load_policy
from hilt.policies.vla import llama, openvla, vit
from hilt.policies.vla.heads import pick
from hilt.policies.vla.openvla import OpenVLAConfig, OpenVLAOptions
from tests import golden
from tests.effort import sampled
from tests.golden.kinds import openvla as kind
from tests.policies.tiny_openvla import bare, observations, statistics, tiny
from tests.test_golden import change_npz, fails

PROPRIO = {"use_proprio": True, "proprio_dim": 7}
KINDS: dict[str, dict[str, Any]] = {
    "ar": {"causal": True, "value_head": True},
    "tokens": {"value_head": True},
    "tokens_2img_proprio": {"num_images": 2, **PROPRIO},
    "laplace": {"head": "laplace", **PROPRIO, "value_head": True},
    "film": {"head": "laplace", "film": True, "num_images": 2},
}


def policy_of(name: str, options: OpenVLAOptions | None = None, **more: Any) -> Any:
    """One whose weights say something: those of `initialize` are nearly nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(llama.NAME, llama.attend)  # as where one is made: some tests bring another
    policy = copy.deepcopy(made_once(name, **more))
    policy.options = options or OpenVLAOptions()
    return policy


@cache
def made_once(name: str, **more: Any) -> Any:
    policy = bare(**KINDS[name], **more)
    state = {
        key: torch.from_numpy(kind.weight(key, tuple(value.shape), 7)) for key, value in policy.state_dict().items()
    }
    policy.load_state_dict(state, strict=True, assign=True)
    return policy.reset_buffers("cpu")


def seen(count: int, equal: bool = False) -> list[dict[str, Any]]:
    rows = observations(count, state=7)
    return [{**row, "instruction": "lift it"} for row in rows] if equal else rows


def acted(policy: Any, count: int = 3, equal: bool = False, temperature: float = 1.3) -> tuple[np.ndarray, base.Record]:
    return policy.act(seen(count, equal), temperature=temperature, generator=torch.Generator().manual_seed(3))


# --- the originals' numbers ---


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("svla_1img", "out.leftpad_response_ids"),
        ("svla_2img_proprio", "in.proprio"),
        ("oft_l1_proprio", "out.actions_l1_proprio"),
        ("oft_l1_2img_laplace", "out.laplace_log_prob_clipped"),
        ("openvla_ar", "in.pixel_values"),
        *(
            pytest.param(name, key, marks=pytest.mark.long)
            for name, key in (
                ("svla_1img", "out.action_logits"),
                ("svla_2img_proprio", "out.leftpad_logp_temperature_1p6"),
                ("oft_l1_film", "out.patch_features"),
                ("openvla_ar", "out.generated_ids"),
            )
        ),
    ],
)
def test_one_changed_number_is_noticed(name: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "openvla").mkdir()
    path = Path(shutil.copy(golden.FOLDER / f"openvla/{name}.npz", tmp_path / "openvla"))

    def change(array: Any) -> Any:
        changed = np.array(array)
        least = 2 * kind.tolerance(array) if key.startswith("out") else 0.1
        changed.reshape(-1)[array.size // 2] += 1 if array.dtype.kind == "i" else least
        return changed

    change_npz(path, key, change)
    fails(capsys, path)


@pytest.mark.parametrize("wrong", ["causal", "tanh", "blocks"])
def test_the_tolerance_catches(wrong: str, monkeypatch: pytest.MonkeyPatch):
    """What people got wrong before: attention that is silently causal, the other GELU, features of the last block."""
    if wrong == "causal":
        right = llama.attend
        causal = lambda *args, layout, **more: right(*args, layout=llama.AttentionLayout(causal=True), **more)  # noqa: E731
        monkeypatch.setattr(llama, "attend", causal)
    elif wrong == "tanh":
        gelu = torch.nn.functional.gelu
        monkeypatch.setattr(torch.nn.functional, "gelu", lambda x: gelu(x, approximate="tanh"))
    else:
        each = vit.Vit.__init__

        def deeper(self: Any, config: vit.VitConfig, image_size: int) -> None:
            each(self, config, image_size)
            self.take = len(self.blocks)  # the output of the last one, where the last but one is right

        monkeypatch.setattr(vit.Vit, "__init__", deeper)
    result = golden.run(golden.FOLDER / "openvla/svla_1img.npz", kind)
    assert any(failure.startswith("action_logits") for failure in result.failures)
    assert "patch_features" in " ".join(result.failures) or wrong == "causal"


def test_a_causal_oft_is_refused(monkeypatch: pytest.MonkeyPatch):
    for name in ("ar", "tokens"):
        policy_of(name).check_attention()
    right = llama.attend
    for causal, name in ((True, "tokens"), (False, "ar")):
        other = lambda *args, layout, **more: right(*args, layout=llama.AttentionLayout(causal=causal), **more)  # noqa: E731, B023
        monkeypatch.setattr(llama, "attend", other)
        policy = policy_of(name)
        with pytest.raises(
            ConfigError, match=r"attention is (causal|bidirectional) here, and this model was trained with"
        ):
            policy.check_attention()


# --- what was drawn is judged the same ---


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("equal", sampled([True, False], False))
def test_evaluate_gives_the_log_prob_of_act(name: str, equal: bool):
    policy = policy_of(name)
    actions, record = acted(policy, equal=equal)
    told = policy.evaluate(record)
    assert actions.shape == told.log_prob.shape == told.entropy.shape == (3, policy.chunk, 7)
    assert actions.dtype == record["log_prob"].dtype == np.float32
    # bit for bit, with gradients and without
    np.testing.assert_array_equal(told.log_prob.detach().numpy(), record["log_prob"])
    assert record["log_prob"].std() > 0.01 and np.isfinite(record["log_prob"]).all()
    if policy.value_head is not None:
        np.testing.assert_array_equal(told.value.detach().numpy(), record["value"])
    told.log_prob.sum().backward()
    assert policy.projector.fc1.weight.grad.abs().max() > 0


@pytest.mark.parametrize("name", KINDS)
def test_rows_do_not_depend_on_their_neighbors(name: str):
    """One by one, all together, joined from records of different width, in another order, and without padding."""
    policy = policy_of(name)
    rows, generator = seen(3), torch.Generator().manual_seed(0)
    records = [policy.act([row], generator=generator)[1] for row in rows]
    assert len({record["prompt"].shape for record in records}) > 1
    joined = base.join([records[place] for place in (2, 0, 1)])
    shapes: list[Any] = []
    policy.language_model.model.norm.register_forward_pre_hook(lambda _, given: shapes.append(given[0].shape[:2]))
    whole = policy.evaluate(joined)
    policy.options.packed = True
    packed = policy.evaluate(joined)
    assert shapes[-1][0] == 1 and shapes[-1][1] < sum(rows * length for rows, length in shapes[:-1])
    for told in (whole, packed):
        np.testing.assert_allclose(told.log_prob.detach().numpy(), joined["log_prob"], atol=1e-5, rtol=0)
        np.testing.assert_allclose(told.entropy.detach().numpy(), whole.entropy.detach().numpy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["ar", "tokens", "laplace"])
def test_greedy_is_the_likeliest(name: str):
    policy = policy_of(name)
    first, record = policy.act(seen(2), sample=False)
    again, _ = policy.act(seen(2), sample=False, temperature=3.0)
    np.testing.assert_array_equal(first, again)
    drawn = [
        policy.evaluate({**record, **acted(policy, 2)[1], "temperature": record["temperature"]}).log_prob
        for _ in range(2)
    ]
    assert all((record["log_prob"].sum() > each.sum().item()) for each in drawn)


def test_draws_are_the_callers():
    policy = policy_of("tokens")
    before = torch.get_rng_state()
    once, again = (acted(policy)[0] for _ in range(2))
    np.testing.assert_array_equal(once, again)
    other = policy.act(seen(3), temperature=1.3, generator=torch.Generator().manual_seed(4))[0]
    assert (once != other).any()
    assert (policy.act(seen(3))[0] != policy.act(seen(3))[0]).any()  # its own generator goes on
    assert torch.equal(before, torch.get_rng_state())


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6).filter(lambda p: sum(p) > 0.1), st.integers(0, 2**16 - 1))
@settings(max_examples=60, deadline=None)
def test_draw_inverts_the_distribution(weights: list[float], place: int):
    chances = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    uniform = torch.tensor(place / 2**16, dtype=torch.float64)
    index = int(pick(chances.log(), uniform))
    reached = chances.cumsum(0) / chances.sum()
    assert chances[index] > 0
    assert (reached[index - 1] if index else 0) <= uniform + 1e-9 and uniform < reached[index] + 1e-9


def test_laplace_numbers():
    uniform = torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = openvla.laplace(uniform)
    assert (
        abs(drawn.mean()) < 0.01 and abs(drawn.abs().mean() - 1) < 0.01 and abs(drawn.abs().square().mean() - 2) < 0.05
    )
    assert torch.isfinite(openvla.laplace(torch.tensor([0.0, 0.5, 1 - 2**-24]))).all()
    ours = torch.distributions.Laplace(0.0, 1.0)
    torch.testing.assert_close(ours.cdf(drawn[:100]), uniform[:100])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_widens_draws_and_judgment_alike(temperature: float):
    policy = policy_of("laplace")
    _, record = policy.act(seen(40, equal=True), temperature=temperature, generator=torch.Generator().manual_seed(0))
    one = policy.evaluate({**record, "temperature": np.ones(40, np.float32)})
    told = policy.evaluate(record)
    torch.testing.assert_close(told.entropy - one.entropy, torch.full_like(one.entropy, np.log(temperature)))
    # the entropy is the mean surprise of what was drawn, as it is only if both are of one distribution
    assert abs((told.log_prob + told.entropy).mean().item()) < 0.1


# --- gradients ---


@pytest.mark.parametrize("name", KINDS)
def test_gradients_and_entropy_against_finite_differences(name: str, monkeypatch: pytest.MonkeyPatch):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    exact = lambda self, x: self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()  # noqa: E731
    monkeypatch.setattr(LlamaRMSNorm, "forward", exact)  # theirs is in float32 always
    policy = policy_of(name)
    _, record = acted(policy, 2)
    policy = policy.double()
    tune = [p for key, p in policy.named_parameters() if "embed_tokens" not in key and "lm_head" not in key]

    def score() -> torch.Tensor:
        told = policy.evaluate(record)
        weights = torch.arange(told.log_prob.numel(), dtype=torch.float64).cos().view_as(told.log_prob)
        return (weights * (told.log_prob + 0.7 * told.entropy)).sum() + (0 if told.value is None else told.value.sum())

    gradients = torch.autograd.grad(score(), tune, allow_unused=True)
    draws = torch.Generator().manual_seed(0)
    ways = [torch.randn(p.shape, generator=draws, dtype=torch.float64) for p in tune]
    slope = sum((g * w).sum() for g, w in zip(gradients, ways, strict=True) if g is not None)
    sides, step = [], 1e-5
    with torch.no_grad():
        for sign in (1, -2):
            for p, way in zip(tune, ways, strict=True):
                p += sign * step * way
            sides.append(score())
    torch.testing.assert_close(slope, (sides[0] - sides[1]) / (2 * step), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", sampled(["ar", "tokens"], "tokens"))
def test_checkpointing_changes_memory_only(name: str, monkeypatch: pytest.MonkeyPatch):
    policy = policy_of(name)
    _, record = acted(policy)
    calls = []
    right = llama.attend
    monkeypatch.setattr(llama, "attend", lambda *args, **more: calls.append(1) or right(*args, **more))
    policy = policy_of(name)

    def gradient() -> tuple[torch.Tensor, list[Any], int]:
        calls.clear()
        policy.zero_grad()
        told = policy.evaluate(record)
        told.log_prob.sum().backward()
        return told.log_prob, [p.grad for p in policy.parameters() if p.grad is not None], len(calls)

    plain = gradient()
    policy.options.checkpointed = 0.5
    assert gradient()[2] == 1.5 * plain[2]
    policy.options.checkpointed = 1.0
    blocks: list[int] = []
    policy.vision_backbone.featurizer.blocks[0].mlp.fc1.register_forward_hook(lambda *_: blocks.append(1))
    twice = gradient()
    assert torch.equal(plain[0], twice[0]) and twice[2] == 2 * plain[2] and len(blocks) == 2
    for ours, theirs in zip(plain[1], twice[1], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_compiled_layers_share_one_graph_of_each_kind(monkeypatch: pytest.MonkeyPatch):
    policy = policy_of("tokens")
    _, record = acted(policy)
    graphs: list[Any] = []
    compiled = torch.nn.Module.compile
    traced = lambda graph, _: graphs.append(graph) or graph.forward  # noqa: E731
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **more: compiled(self, backend=traced, fullgraph=True, **more)
    )
    torch._dynamo.reset()
    policy.options.layers = "compiled"
    np.testing.assert_array_equal(policy.evaluate(record).log_prob.detach().numpy(), record["log_prob"])
    torch._dynamo.reset()
    assert len(graphs) == 3  # a decoder layer's, and one of each vision transformer


def test_the_value_can_leave_the_trunk_alone():
    policy = policy_of("tokens", OpenVLAOptions(detach_value=True))
    _, record = acted(policy)
    policy.evaluate(record).value.sum().backward()
    assert policy.projector.fc1.weight.grad is None and policy.value_head.fc2.weight.grad is not None
    policy.options.detach_value = False
    policy.evaluate(record).value.sum().backward()
    assert policy.projector.fc1.weight.grad.abs().max() > 0


# --- bfloat16 ---


# on a CPU without its instructions bfloat16 takes seconds
@pytest.mark.parametrize("name", sampled(KINDS, "tokens", "laplace"))
def test_bfloat16_products_over_float32_weights(name: str):
    """Stated bound: log-probabilities within 0.1 of float32's, whose spread is several
    units; gradients and weights stay float32."""
    policy = policy_of(name)
    _, record = acted(policy, 1)
    policy.options.compute = "bfloat16"
    _, half = acted(policy, 1)
    np.testing.assert_array_equal(policy.evaluate(half).log_prob.detach().numpy(), half["log_prob"])
    told = policy.evaluate(record)
    assert told.log_prob.dtype == told.entropy.dtype == torch.float32
    apart = np.abs(told.log_prob.detach().numpy() - record["log_prob"])
    assert 0 < apart.max() < 0.1
    told.log_prob.sum().backward()
    assert {p.grad.dtype for p in policy.parameters() if p.grad is not None} == {torch.float32}


def test_auto_is_what_is_faster_on_this_cpu(monkeypatch: pytest.MonkeyPatch):
    results = {}
    for compute in ("float32", "bfloat16", "auto"):
        results[compute] = acted(policy_of("tokens", options=OpenVLAOptions(compute=compute)), 1)[1]["log_prob"]
    np.testing.assert_array_equal(results["auto"], results["float32"])
    monkeypatch.setattr(precision, "_automatic", lambda device: precision.PrecisionChoice("bfloat16", "it is faster"))
    again = acted(policy_of("tokens", options=OpenVLAOptions(compute="auto")), 1)[1]["log_prob"]
    np.testing.assert_array_equal(again, results["bfloat16"])
    assert not np.array_equal(again, results["float32"])


def test_weights_in_bfloat16():
    policy = policy_of("tokens")
    _, record = acted(policy)
    told = policy.to(torch.bfloat16).evaluate(record)
    assert {buffer.dtype for buffer in policy.buffers()} == {torch.float32}  # frequencies of positions stay exact
    assert told.log_prob.dtype == torch.float32
    assert 0 < np.abs(told.log_prob.detach().numpy() - record["log_prob"]).max() < 0.2


# --- options and upstream's names ---


def test_support():
    policy = policy_of("tokens", OpenVLAOptions(support="vocabulary"))
    _, record = policy.act(seen(2), temperature=4.0, generator=torch.Generator().manual_seed(0))
    np.testing.assert_array_equal(policy.evaluate(record).log_prob.detach().numpy(), record["log_prob"])
    assert policy.evaluate(base.select(record, [])).log_prob.shape == (0, 3, 7)
    with pytest.raises(MissingFieldError, match="this record has no 'tokens', but images"):
        policy.evaluate({name: array for name, array in record.items() if name != "tokens"})
    assert record["tokens"].min() < policy.token.first
    policy.options.support = "actions"
    assert acted(policy)[1]["tokens"].min() >= policy.token.first
    mass = policy.action_token_mass()
    assert 0 < mass < 0.1
    with torch.no_grad():
        rows = policy.language_model.lm_head.weight
        rows[: policy.token.first] = rows[policy.token.last + 1 :] = 0
        rows[policy.token.first : policy.token.last + 1] *= 100
    assert policy.action_token_mass() > 0.9


def test_center_crop():
    policy = policy_of("tokens")
    cropped = policy.act(seen(1), sample=False)[1]["images"]
    policy.options.center_crop = False
    whole = policy.act(seen(1), sample=False)[1]["images"]
    assert cropped.shape == whole.shape == (1, 1, 28, 28, 3) and (cropped != whole).any()


def test_log_scale_range():
    policy = policy_of("laplace")
    _, record = acted(policy)
    policy.options.log_scale_range = (-1.0, -1.0)
    told = policy.evaluate({**record, "temperature": np.ones(3, np.float32)})
    torch.testing.assert_close(told.entropy, torch.full_like(told.entropy, float(np.log(2))))


def test_images_of_different_size_in_one_batch():
    policy = policy_of("tokens")
    rows = seen(2)
    rows[1] = {**rows[1], "full_image": np.zeros((40, 48, 3), np.uint8)}
    record = policy.act(rows, sample=False)[1]
    assert record["images"].shape == (2, 1, 28, 28, 3) and not record["images"][1].any()


def test_upstreams_face():
    policy = policy_of("tokens_2img_proprio")
    assert policy.get_action_stats("libero_spatial") == policy.norm_stats["libero_spatial_no_noops"]["action"]
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 29000, (2, 6), generator=draws)
    ids[1, :2] = 32000
    pixels, proprio = torch.randn(2, 12, 28, 28, generator=draws), torch.randn(2, 7, generator=draws)
    asked = {"do_sample": True, "temperature": 1.6, "padding_idx": 32000, "proprio": proprio}
    once, response = policy.generate_action_verl(ids, pixels, generator=torch.Generator().manual_seed(1), **asked)
    again, _ = policy.generate_action_verl(
        ids, pixels, ids != 32000, generator=torch.Generator().manual_seed(1), **asked
    )
    np.testing.assert_array_equal(once, again)
    assert once.shape == (2, 3, 7) and once.dtype == np.float64 and response.shape == (2, 21)
    policy.set_num_images_in_input(1)
    one, _ = policy.generate_action_verl(ids, pixels[:, :6], **{**asked, "do_sample": False})
    assert one.shape == (2, 3, 7) and policy.config.cameras() == ("full_image",)
    with pytest.raises(ConfigError, match=r"num_images=0: expected a whole number of at least 1"):
        policy.set_num_images_in_input(0)
    with pytest.raises(ConfigError, match="a token at a time from one image"):
        policy_of("ar").set_num_images_in_input(2)
    with pytest.raises(ConfigError, match="given to a policy that has no projector for it; leave it out"):
        policy_of("tokens").generate_action_verl(ids, pixels[:, :6], proprio=proprio)
    with pytest.raises(ConfigError, match="a temperature of 0 draws nothing"):
        policy.generate_action_verl(ids, pixels[:, :6], do_sample=True, temperature=0)


def test_statistics_of_other_data():
    policy = policy_of("tokens_2img_proprio")
    before, record = policy.act(seen(1), sample=False)
    wide = {"q01": [-4.0] * 7, "q99": [4.0] * 7}
    policy.use_statistics({"action": wide, "proprio": wide}, "mine")
    assert policy.unnorm_key == "mine" and policy.norm_stats["mine"]["action"] == wide
    after, other = policy.act(seen(1), sample=False)
    assert np.abs(after).max() > 1.5 and np.abs(before).max() <= 1 and (record["log_prob"] != other["log_prob"]).any()
    with pytest.raises(ConfigError, match="actions have 7 numbers, and the statistics of other 6"):
        policy.use_statistics(statistics(6), "other")


def test_action_logits_are_those_of_evaluate():
    policy = policy_of("tokens_2img_proprio")
    _, record = policy.act(seen(2, equal=True), generator=torch.Generator().manual_seed(0))
    given = policy._inputs(record)
    images = torch.from_numpy(record["images"])
    logits = policy.action_logits(images, given.prompt, given.length, given.proprio, equal=True)
    place = torch.from_numpy(record["tokens"]).long().flatten(1)[..., None] - policy.token.first
    np.testing.assert_array_equal(
        logits.log_softmax(-1).gather(-1, place).detach().numpy().reshape(2, 3, 7), record["log_prob"]
    )
    wider = torch.nn.functional.pad(given.prompt, (0, 4))
    torch.testing.assert_close(policy.action_logits(images, wider, given.length, given.proprio), logits)


def test_an_adapter_on_the_lm_head_is_heard():
    policy = policy_of("tokens")
    _, record = acted(policy)
    before = policy.evaluate(record).log_prob
    policy.language_model.lm_head = torch.nn.Sequential(policy.language_model.lm_head)
    torch.testing.assert_close(policy.evaluate(record).log_prob, before)


# --- imitation ---


@pytest.mark.parametrize("name", ["tokens", "laplace"])
def test_oft_continues_the_actions_that_are_given(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    policy, plain, rows = policy_of(name, max_delay=2).eval(), policy_of(name).eval(), seen(3)
    known = np.random.default_rng(1).uniform(-0.9, 0.9, (3, 3, 7)).astype(np.float32)
    prefix, frozen = base.Prefix(known, np.array([2, 1, 0])), np.array([2, 1, 0])
    is_given = np.arange(3) < frozen[:, None]
    for sample in (True, False):
        draws = [torch.Generator().manual_seed(3) for _ in range(3)]
        actions, record = policy.act(rows, sample, 1.3, draws[0], prefix)
        assert np.array_equal(actions[is_given], known[is_given])
        found = policy.evaluate(record)
        assert np.array_equal(found.log_prob.detach().numpy(), record["log_prob"])
        assert not record["log_prob"][is_given].any() and record["log_prob"][~is_given].all()
        assert not found.entropy.detach().numpy()[is_given].any()
        # a row without given actions is answered as by the policy that it would be anyway
        usual, _ = plain.act(rows, sample, 1.3, draws[1])
        assert np.array_equal(policy.act(rows, sample, 1.3, draws[2])[0], usual)
        np.testing.assert_allclose(actions[2], usual[2], rtol=1e-5, atol=1e-5)
    other = policy.evaluate({**record, "prefix": -record["prefix"]}).log_prob.detach().numpy()
    assert np.abs(other - record["log_prob"])[0, 2].max() > 1e-3, "what is given plays no role"
    # what is given is not learned
    monkeypatch.setattr("hilt.policies.vla.openvla_model.training_delays", lambda *_: torch.from_numpy(frozen))
    loss, masked = (policy.supervised_loss(rows, known, mask)[0].item() for mask in (np.ones((3, 3), bool), ~is_given))
    assert loss == masked != plain.supervised_loss(rows, known, ~is_given)[0].item()
    policy.save_pretrained(tmp_path / "policy")
    again = load_policy(tmp_path / "policy", tokenizer=policy.tokenizer, allow_untrained=True)
    assert again.max_delay == 2 and np.array_equal(again.act(rows, False, prefix=prefix)[0], actions)
    with pytest.raises(
        ConfigError, match="cannot continue one: leave prefix out, or train the policy with max_delay=N"
    ):
        plain.act(rows, False, prefix=prefix)


@pytest.mark.parametrize("name", ["ar", "tokens", "laplace", "film"])
def test_imitation(name: str):
    """Some steps of it make the wanted actions likelier, and what the mask leaves out has no say."""
    policy = policy_of(name).eval()  # pictures as they are
    wanted = np.random.default_rng(0).uniform(-1, 1, (2, policy.chunk, 7)).astype(np.float32)
    mask = np.ones((2, policy.chunk), bool)
    mask[1] = False
    loss, figures = policy.supervised_loss(seen(2), wanted, mask)
    masked, _ = policy.supervised_loss(seen(2), np.where(mask[..., None], wanted, np.nan), mask)
    assert loss.item() == masked.item() == figures["loss"]
    trained = [p for p in policy.parameters() if p.requires_grad]
    assert all(g is None or g.isfinite().all() for g in torch.autograd.grad(masked, trained, allow_unused=True))
    for _ in range(4):
        loss = policy.supervised_loss(seen(2), wanted, mask)[0]
        for p, g in zip(trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
            p.data -= 0 if g is None else 0.02 * g / (g.norm() + 1e-9)
    _, after = policy.supervised_loss(seen(2), wanted, mask)
    assert after["loss"] < figures["loss"] and after["l1"] >= 0


@pytest.mark.parametrize("name", ["ar", "laplace"])
def test_imitation_sees_pictures_that_are_changed_by_chance_in_training_only(name: str):
    policy, rows = policy_of(name).train(), seen(2)
    mask = np.ones((2, policy.chunk), bool)

    def loss(seed: int | None = 0) -> float:
        draws = None if seed is None else torch.Generator().manual_seed(seed)
        return policy.supervised_loss(rows, np.zeros((2, policy.chunk, 7), np.float32), mask, draws)[0].item()

    changed = loss()
    assert changed == loss() != loss(1), "the same draws, the same loss"
    with pytest.raises(ConfigError, match="augment=true changes pictures at random"):
        loss(None)
    policy.options = replace(policy.options, augment=False)
    still = loss(None)
    assert still != changed
    policy.options = replace(policy.options, augment=True)
    policy.eval()
    assert loss(None) == still, "what is measured is not changed"
    record = policy.act(rows, sample=False)[1]
    assert np.array_equal(
        record["images"][:, 0], openvla_view(np.stack([row["full_image"] for row in rows]), policy.config.image_size)
    )


def test_the_scale_does_not_move_the_mean():
    policy = policy_of("laplace").eval()
    given = policy.supervised_loss(seen(1), np.zeros((1, 3, 7), np.float32), np.ones((1, 3), bool))[0]
    laplace = torch.autograd.grad(given, policy.action_head.model.fc2.weight)[0]
    policy.scale_head = None
    given = policy.supervised_loss(seen(1), np.zeros((1, 3, 7), np.float32), np.ones((1, 3), bool))[0]
    torch.testing.assert_close(torch.autograd.grad(given, policy.action_head.model.fc2.weight)[0], laplace)


# --- what is refused ---


def test_l1_draws_nothing():
    policy = tiny(head="l1")
    with pytest.raises(
        ConfigError, match="the L1 head gives one action and draws none: use sample=False, or head='laplace'"
    ):
        policy.act(seen(1))
    actions, record = policy.act(seen(1), sample=False)
    assert actions.shape == (1, 3, 7) and "log_prob" not in record
    with pytest.raises(ConfigError, match="the L1 head has no probabilities to evaluate"):
        policy.evaluate(record)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"variant": "mamba"}, UnknownNameError, "variant"),
        ({"head": "diffusion"}, UnknownNameError, "head"),
        ({"variant": "ar", "head": "l1"}, ConfigError, "a token at a time from one image"),
        ({"max_delay": 3}, ConfigError, "max_delay is 3, variant oft and chunk 3: actions are given to variant=oft"),
        ({"variant": "ar", "max_delay": 2}, ConfigError, "max_delay is 2, variant ar and chunk 3"),
        ({"use_proprio": True}, ConfigError, "proprio_dim=0: expected at least 1"),
        (
            {"use_proprio": True, "proprio_dim": 8},
            ConfigError,
            "state has 8 numbers, and the statistics of libero_spatial_no_noops 7",
        ),
        ({"vit": [{"depht": 3}]}, UnknownNameError, "depht"),
        ({"action_dim": 6}, ConfigError, "actions have 6 numbers, and the statistics of libero_spatial_no_noops 7"),
        ({"norm_stats": {"a": {"action": statistics()["action"]}}, **PROPRIO}, UnknownNameError, "libero_spatial"),
        ({"vit": None, "upstream": {"vision_backbone_id": "clip-vit-l"}}, UnknownNameError, "clip-vit-l"),
        (
            {"vit": None, "upstream": {"timm_override_act_layers": ["quick_gelu"]}},
            ConfigError,
            "needs another activation",
        ),
    ],
)
def test_configs_that_cannot_work(changes: dict[str, Any], error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        tiny(**changes)


def test_a_config_goes_through_json():
    document = {
        "norm_stats": {"a": {}},
        "use_proprio": True,
        "proprio_dim": 8,
        "image_sizes": [384, 384],
        "auto_map": {"x": "y"},
    }
    config = OpenVLAConfig.from_json(document, chunk=25, head="l1")
    assert (config.image_size, config.proprio_dim, config.chunk, config.width, config.vocabulary) == (
        384,
        8,
        25,
        4096,
        32000,
    )
    written = config.to_json()
    assert written["auto_map"] == {"x": "y"} and written["norm_stats"] == {"a": {}}
    assert OpenVLAConfig.from_json(written) == config
    with pytest.raises(UnknownNameError, match="chnuk"):
        OpenVLAConfig.from_json({"hilt": {"chnuk": 3}})
    with pytest.raises(UnknownNameError, match="float16"):
        OpenVLAOptions(compute="float16")
    with pytest.raises(ConfigError, match="checkpointed=2: expected a number from 0 to 1"):
        OpenVLAOptions(checkpointed=2)


def test_one_vision_transformer():
    policy = tiny(vit=[{"patch_size": 14, "embed_dim": 24, "depth": 3, "num_heads": 2, "class_token": False}])
    assert policy.pixel_mean.flatten().tolist() == [0.5] * 3 and policy.projector.fc3 is None
    assert policy.act(seen(1))[0].shape == (1, 3, 7)


def test_full_size_has_upstreams_parameters():
    """Built without memory: the counts of the published checkpoint."""
    policy = openvla.OpenVLAOFT(OpenVLAConfig(norm_stats={"a": statistics()}))
    assert policy.device.type == "meta"
    count = lambda module: sum(p.numel() for p in module.parameters())  # noqa: E731
    assert count(policy.vision_backbone.featurizer) == 303_230_976
    assert count(policy.vision_backbone.fused_featurizer) == 427_680_704
    assert count(policy.projector) == 71_385_600
    assert count(policy) == 7_541_237_184


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ({"head": "l1"}, {"support": "vocabulary"}, "support=vocabulary would do nothing: it needs head=tokens"),
        ({}, {"log_scale_range": (-2, 0.5)}, r"log_scale_range=\(-2, 0\.5\) would do nothing: it needs head=laplace"),
        ({}, {"detach_value": True}, "detach_value=True would do nothing: it needs value_head=True"),
    ],
)
def test_options_without_effect(changes: dict[str, Any], options: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        tiny(options=OpenVLAOptions(**options), **changes)


def test_observations_that_lack_something():
    policy = policy_of("tokens_2img_proprio")
    assert policy.observed_fields() == (("full_image", "wrist_image"), 7, True)
    row = seen(1)[0]
    with pytest.raises(
        SchemaError,
        match=r"wrist_image of observation 1 is float64 \[8, 9, 3\].* Of one from 0 to 1: \(255 \* picture\)",
    ):
        policy.act([row, {**row, "wrist_image": np.zeros((8, 9, 3))}], sample=False)
    for name in ("wrist_image", "state", "instruction"):
        with pytest.raises(MissingFieldError, match=f"observation 1 has no '{name}', which this policy needs; it has"):
            policy.act([row, {key: value for key, value in row.items() if key != name}])
    with pytest.raises(SchemaError, match=r"the instruction of observation 0 is b'go'; expected is text"):
        policy.act([{**row, "instruction": b"go"}])
    with pytest.raises(SchemaError, match=r"the state of observation 1 is \[3\]; expected is \[7\]"):
        policy.act([row, {**row, "state": np.zeros(3)}])
    with pytest.raises(
        SchemaError, match=r"\[1, 4, 7\] with a mask of \[1, 4\] were given; they are \[B, 3, 7\] and \[B, 3\]"
    ):
        policy.supervised_loss([row], np.zeros((1, 4, 7)), np.ones((1, 4), bool))
    with pytest.raises(SchemaError, match="no observation"):
        policy.act([])
    with pytest.raises(ConfigError, match=r"a temperature of 0 draws nothing"):
        policy.act([row], temperature=0)
