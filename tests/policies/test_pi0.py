"""pi0, pi0.5 and SmolVLA keep the protocol, learn, and come from folders and go into
them. That they equal the originals: tests/golden."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.algos.adam import Adam
from hilt.core.errors import ConfigError, MissingFieldError, SchemaError, UnknownNameError
from hilt.policies.base import Prefix, given_in, join, select
from hilt.policies.io.tensor_files import Tensors, write_tensors
from hilt.policies.registry import load_policy
from hilt.policies.vla import gemma
from hilt.policies.vla.flow import Flow
from hilt.policies.vla.flow_policy import FlowPolicy
from hilt.policies.vla.gemma import StackConfig, VisionConfig
from hilt.policies.vla.normalize import statistics
from hilt.policies.vla.pi0 import Pi0, Pi0Config
from hilt.policies.vla.smolvla import SmolVLA, SmolVLAConfig
from hilt.policies.vla.tokens import ByteTokenizer, FolderTokenizer
from tests import golden
from tests.golden.kinds import pi0 as kind
from tests.policies.differences import assert_gradients

torch.set_num_threads(1)
SHARED: dict[str, Any] = {
    "vision": VisionConfig(16, 1, 2, 24, 14, 28),
    "vocabulary": 300,
    "chunk_size": 4,
    "n_action_steps": 3,
    "max_action_dim": 5,
    "max_state_dim": 6,
    "action_dim": 2,
    "state_dim": 3,
    "images": ("full_image", "wrist_image"),
    "tokenizer_max_length": 24,
}
VLM, EXPERT = StackConfig(16, 2, 24, 4, 2, 4), StackConfig(12, 2, 16, 4, 2, 4)
LLAMA = {"vlm": replace(VLM, gemma=False), "expert": replace(EXPERT, gemma=False), "shuffle": 2}
POLICIES: dict[str, tuple[type[FlowPolicy], dict[str, Any]]] = {
    "sde": (Pi0, {"vlm": VLM, "expert": EXPERT, "flow": Flow(steps=4)}),
    "noise": (Pi0, {"vlm": VLM, "expert": EXPERT, "flow": Flow("noise", steps=3), "value": "actions"}),
    "pi05": (Pi0, {"vlm": VLM, "expert": EXPERT, "adaptive": True, "flow": Flow("cps", steps=3), "value": "prefix",
                   "tokenizer_max_length": 90}),
    "smolvla": (SmolVLA, {**LLAMA, "flow": Flow(steps=3), "value": "actions"}),
}  # fmt: skip
ROWS = np.random.default_rng(4).normal(2, 3, (50, 3))
STATISTICS = {"state": statistics(ROWS), "action": statistics(ROWS[:, :2])}


def made(name: str, seed: int = 1, **more: Any) -> Any:
    made, options = POLICIES[name]
    return made(made.config_class(**SHARED | options | more), ByteTokenizer(), STATISTICS, seed)


def seen(rows: int = 3) -> list[dict[str, Any]]:
    """Rows that differ in all that may differ: sizes of pictures, which there are,
    and the length of the instruction."""
    random = np.random.default_rng(0)
    found: list[dict[str, Any]] = []
    for row in range(rows):
        size = ((28, 28), (40, 20), (64, 64))[row % 3]
        images = {name: random.integers(0, 256, (*size, 3), np.uint8) for name in SHARED["images"]}
        state = random.normal(2, 3, 3).astype(np.float32)
        found.append({**images, "state": state, "instruction": ("pick it", "open the drawer", "push")[row % 3]})
    if rows > 1:
        del found[1]["wrist_image"]
    return found


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the protocol ---


@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize("name", POLICIES)
def test_the_log_probability_of_what_was_done_is_that_of_its_record(name: str, sample: bool) -> None:
    policy = made(name)
    actions, record = policy.act(seen(), sample, 0.8, generator())
    found = policy.evaluate(record)
    assert np.array_equal(found.log_prob.detach().numpy(), record["log_prob"])
    assert actions.shape == record["log_prob"].shape == found.entropy.shape == (3, 3, 2)
    assert actions.dtype == record["state"].dtype == record["chain"].dtype == np.float32
    assert record["images"].dtype == np.uint8 and record["images"].shape == (3, 2, 28, 28, 3)
    assert record["image_mask"].tolist() == [[True, True], [True, False], [True, True]]
    assert (found.value is None) == ("value" not in record) == (not policy.config.value)
    if found.value is not None:
        assert np.array_equal(found.value.detach().numpy(), record["value"])
    assert sample == bool(record["log_prob"].any())
    # in other company, and padded otherwise, a row has the same log-probability
    longer = policy.act([seen(1)[0] | {"instruction": "a longer one than these"}], sample, 0.8, generator())[1]
    other = policy.evaluate(join([select(record, [1]), longer]))
    np.testing.assert_allclose(other.log_prob[0].detach().numpy(), record["log_prob"][1], rtol=0, atol=1e-5)
    assert policy.evaluate(select(record, [])).log_prob.shape == (0, 3, 2)
    alone = policy.evaluate(select(record, [1]))  # now its second slot is left out
    np.testing.assert_allclose(alone.log_prob[0].detach().numpy(), record["log_prob"][1], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "delay"), [("sde", 0), ("pi05", 0), ("smolvla", 0), ("sde", 2)])
def test_the_error_of_a_velocity_is_that_of_imitating_the_answer(name: str, delay: int) -> None:
    policy = made(name, max_delay=delay)
    policy.keeps_answers = True
    frozen = {"prefix": Prefix(np.zeros((3, 2, 2), np.float32), np.array([0, 1, 2]))} if delay else {}
    _, record = policy.act(seen(), generator=generator(), **frozen)
    assert record["answer"].shape == (3, 4, 5)
    noise, times = torch.randn(3, 2, 4, 5, generator=generator(1)), torch.tensor([[0.2, 0.9]]).expand(3, 2)
    error = policy.flow_error(record, noise, times)
    assert error.shape == (3, 2, 3, 2)
    known = policy._given(given_in(record))
    answer = torch.from_numpy(record["answer"]) if known is None else known.within(torch.from_numpy(record["answer"]))
    for draw in range(2):  # what was given is in its place, of time 0, and not learned, as in imitation
        own = times[:, draw] if known is None else times[:, draw, None] * ~known.frozen[..., 0]
        wanted = policy.flow_loss(policy._prefix(record), answer, noise[:, draw], own)
        wanted = (wanted if known is None else known.apart(wanted))[:, :3, :2]
        np.testing.assert_allclose(error[:, draw].square().detach(), wanted.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", POLICIES)
def test_gradients_equal_finite_differences(name: str) -> None:
    policy = made(name)
    _, record = policy.act(seen(2), generator=generator())
    policy.double().requires_grad_()
    with torch.no_grad():
        for parameter in policy.parameters():  # adaRMS begins at zero
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator(3), dtype=torch.float64)

    def score() -> Any:
        found = policy.evaluate(record)
        return (
            found.log_prob.mul(torch.arange(6).reshape(3, 2)).sum()
            + found.entropy.sum()
            + (0 if found.value is None else found.value.sum())
        )

    assert_gradients(policy, score, directions=2)


def test_a_flow_is_set_by_name_as_a_command_line_does(tmp_path: Path) -> None:
    made("sde").save_pretrained(tmp_path / "policy")
    given = {"flow": {"level": 0.25, "steps": 3}, "images": list(SHARED["images"])}
    policy = Pi0.from_pretrained(tmp_path / "policy", tokenizer=ByteTokenizer(), **given)
    assert (policy.config.flow.level, policy.config.flow.steps, policy.config.flow.kind) == (0.25, 3, "sde")
    with pytest.raises(UnknownNameError, match="no setting of a flow named 'levl'; did you mean 'level'"):
        Pi0.from_pretrained(tmp_path / "policy", tokenizer=ByteTokenizer(), flow={"levl": 1})


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    """Within 0.05 on tiny models, and act equals evaluate in it too; what is beside
    the stacks of layers stays in float32."""
    made("noise").save_pretrained(tmp_path / "policy")
    exact, rough = (
        Pi0.from_pretrained(tmp_path / "policy", dtype=dtype, tokenizer=ByteTokenizer())
        for dtype in (torch.float32, torch.bfloat16)
    )
    _, record = rough.act(seen(), generator=generator())
    assert np.array_equal(rough.evaluate(record).log_prob.detach().numpy(), record["log_prob"])
    apart = np.abs(exact.evaluate(record).log_prob.detach().numpy() - record["log_prob"]).max()
    assert 0 < apart < 0.05
    kinds = {name: parameter.dtype for name, parameter in rough.named_parameters()}
    assert kinds["paligemma_with_expert.gemma_expert.model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    for name in (
        "action_out_proj.weight",
        "noise_head.0.weight",
        "paligemma_with_expert.gemma_expert.model.norm.weight",
    ):
        assert kinds[name] == torch.float32


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("name", ["noise", "pi05", "smolvla"])
def test_bfloat16_products_over_float32_weights_of_a_flow(name: str, share: float, tmp_path: Path) -> None:
    """Log-probabilities within 0.1 of float32's; act equals evaluate; gradients are float32 and nearly float32's."""
    exact, rough = made(name), made(name, compute="bfloat16", gradient_checkpointing=share)
    _, record = rough.act(seen(), generator=generator())
    found, wanted = rough.evaluate(record), exact.evaluate(record)
    assert np.array_equal(found.log_prob.detach().numpy(), record["log_prob"])
    assert found.log_prob.dtype == torch.float32
    assert 0 < (found.log_prob - wanted.log_prob).abs().max() < 0.1
    for policy, each in ((rough, found), (exact, wanted)):
        each.log_prob.sum().backward()
        assert {weight.grad.dtype for weight in policy.parameters() if weight.grad is not None} == {torch.float32}
    ours, theirs = (
        torch.cat([weight.grad.flatten() for weight in policy.parameters() if weight.grad is not None])
        for policy in (rough, exact)
    )
    assert torch.cosine_similarity(ours, theirs, 0) > 0.999 and not torch.equal(ours, theirs)
    rough.save_pretrained(tmp_path / "policy")  # it is a setting of the run
    back = type(rough).from_pretrained(tmp_path / "policy", tokenizer=ByteTokenizer())
    assert back.config.compute == "float32"
    with pytest.raises(UnknownNameError, match=r"no compute named 'float16'.* Known: bfloat16, float32"):
        made(name, compute="float16")


def test_pi0_depends_on_images_instruction_and_state() -> None:
    for name in POLICIES:
        policy, row = made(name), seen(1)[0]

        def answer(policy: Any = policy, row: Any = row, **other: Any) -> np.ndarray:
            return policy.act([row | other], sample=False, generator=generator())[0]

        assert np.array_equal(answer(), answer(another=1))
        assert not np.array_equal(answer(), answer(instruction="other"))
        assert not np.array_equal(answer(), answer(state=row["state"] + 1))
        for image in SHARED["images"]:
            assert not np.array_equal(answer(), answer(**{image: 255 - row[image]}))
            assert not np.array_equal(answer(), answer(**{image: None}))


def test_pi0_uses_no_global_generator() -> None:
    before = torch.random.get_rng_state()
    one, two, other = (made("noise", seed=seed).act(seen(), generator=generator())[1]["log_prob"] for seed in (1, 1, 2))
    assert np.array_equal(one, two) and not np.array_equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_actions_are_in_the_robots_units() -> None:
    plain, scaled = made("sde"), made("sde")
    plain.use_statistics({"state": STATISTICS["state"]})
    found, raw = (policy.act(seen(), generator=generator())[0] for policy in (scaled, plain))
    mean, std = (np.array(STATISTICS["action"][name]) for name in ("mean", "std"))
    np.testing.assert_allclose(found, raw * (std + 1e-8) + mean, rtol=1e-5)
    scaled.use_statistics({"proprio": statistics(2 * ROWS), "action": STATISTICS["action"]}, "mine")
    record = scaled.act(seen(), generator=generator())[1]
    state = np.stack([row["state"] for row in seen()])
    np.testing.assert_allclose(record["state"], (state - 2 * ROWS.mean(0)) / (2 * ROWS.std(0)), rtol=1e-4, atol=1e-6)


def test_pi05_has_the_state_in_its_words() -> None:
    policy = made("pi05")
    assert (
        policy.prompt(" pick_the\ncube ", np.float32([-1, 0, 0.999]))
        == "Task: pick the cube, State: 0 128 255;\nAction: "
    )
    assert made("sde").prompt("pick_the cube", np.zeros(3)) == "pick the cube\n"
    assert made("smolvla").prompt("pick_the cube", np.zeros(3)) == "pick_the cube\n"
    assert made("sde", tokenizer_max_length=4).act(seen(), generator=generator())[1]["prompt_length"].tolist() == [
        4,
        4,
        4,
    ]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"state": np.zeros(4)}, SchemaError, r"the state of observation 0 has the shape \[4\]; expected is \[3\]"),
        (
            {"wrist_image": np.zeros((9, 8, 3))},
            SchemaError,
            r"wrist_image of observation 0 is float64 \[9, 8, 3\]; expected is uint8",
        ),
        (
            {"full_image": None, "wrist_image": None},
            MissingFieldError,
            "observation 0 has none of the pictures full_image, wrist_image",
        ),
    ],
)
def test_observations_that_do_not_fit(change: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        made("sde").act([seen(1)[0] | change], sample=False)


def test_pi0_refuses_wrong_inputs() -> None:
    policy = made("sde")
    assert policy.observed_fields() == (("full_image", "wrist_image"), 3, False)
    with pytest.raises(MissingFieldError, match=r"observation 0 has the fields .* and no instruction"):
        policy.act([{"state": np.zeros(3)}], sample=False)
    with pytest.raises(SchemaError, match="there is no observation"):
        policy.act([])
    with pytest.raises(ConfigError, match="draws noise and times: give supervised_loss"):
        policy.supervised_loss(seen(1), np.zeros((1, 4, 2)), np.ones((1, 4)))
    with pytest.raises(SchemaError, match=r"actions of the shape \[1, 2, 2\] .* they are \[B, 3..4, 2\]"):
        policy.supervised_loss(seen(1), np.zeros((1, 2, 2)), np.ones((1, 2)), generator())
    with pytest.raises(ConfigError, match="a temperature of 0 draws nothing"):
        policy.act(seen(1), temperature=0, generator=generator())
    with pytest.raises(SchemaError, match="the instruction of observation 0 is b'go'; expected is text"):
        policy.act([seen(1)[0] | {"instruction": b"go"}], sample=False)
    policy.tokenizer = None
    with pytest.raises(ConfigError, match="no tokenizer: give from_pretrained"):
        policy.act(seen(1))
    with pytest.raises(UnknownNameError, match=r"no value named 'both'\. Known: , actions, prefix"):
        made("sde", value="both")
    with pytest.raises(ConfigError, match="detach_value=True would do nothing: it needs a value head"):
        made("sde", detach_value=True)
    with pytest.raises(ConfigError, match="n_action_steps is 9 and chunk_size is 4: it is from 1 to that"):
        made("sde", n_action_steps=9)


# --- learning ---


def test_the_loss_of_imitation() -> None:
    """It is the mean square of the velocity's error where the mask is true, and nothing of what is masked gets in."""
    policy, rows = made("sde").eval(), seen(2)  # pictures as they are
    actions = np.random.default_rng(1).normal(2, 3, (2, 4, 2)).astype(np.float32)
    mask = np.array([[True] * 4, [True, True, False, False]])
    loss, figures = policy.supervised_loss(rows, actions, mask, generator())
    assert figures == {"flow_loss": pytest.approx(loss.item())}
    chance = generator()
    wanted = torch.zeros(2, 4, 5)
    wanted[..., :2] = torch.from_numpy(policy.normalizers["action"].normalize(actions)).float()
    noise, times = torch.randn(2, 4, 5, generator=chance), torch.rand(2, generator=chance) ** (1 / 1.5) * 0.999 + 0.001
    each = policy.flow_loss(policy._prefix(policy._read(rows)), wanted, noise, times)[..., :2]
    assert loss.item() == pytest.approx(each[torch.from_numpy(mask)].mean().item(), rel=1e-6)
    broken = np.where(mask[..., None], actions, [np.nan, np.inf])
    assert policy.supervised_loss(rows, broken, mask, generator())[0].isfinite()
    short = policy.supervised_loss(rows, actions[:, :3], mask[:, :3], generator())[0]
    assert short.isfinite() and short != loss
    assert policy.supervised_loss(rows, actions, mask, generator(1))[0] != loss


@pytest.mark.parametrize(("name", "usual"), [("sde", True), ("smolvla", False)])
def test_imitation_sees_pictures_that_are_changed_by_chance_in_training_only(name: str, usual: bool) -> None:
    """As openpi does; lerobot trains SmolVLA without."""
    given = (seen(2), np.zeros((2, 4, 2), np.float32), np.ones((2, 4), bool))
    loss = {
        augmented: made(name, **({} if augmented is None else {"augment": augmented}))
        for augmented in (None, True, False)
    }
    trained = {key: policy.train().supervised_loss(*given, generator())[0].item() for key, policy in loss.items()}
    assert trained[None] == trained[usual] != trained[not usual]
    assert trained[True] == loss[True].supervised_loss(*given, generator())[0].item(), "the same draws, the same loss"
    assert {policy.eval().supervised_loss(*given, generator())[0].item() for policy in loss.values()} == {
        trained[False]
    }


def test_pi0_learns_by_imitation_and_by_reward() -> None:
    policy, rows = made("sde", action_normalization=""), seen(3)
    wanted = np.broadcast_to(np.float32([0.5, -0.5]), (3, 4, 2))
    weights = [weight for weight in policy.parameters() if weight.requires_grad]
    optimizer, chance = Adam(weights, 3e-3), generator()

    def step(loss: torch.Tensor) -> None:
        optimizer.step(torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True))

    def apart() -> float:
        return float(np.abs(policy.act(rows * 8, sample=False, generator=generator(9))[0] - wanted[0, 0]).mean())

    before = apart()
    for _ in range(60):
        step(policy.supervised_loss(rows, wanted, np.ones((3, 4)), chance)[0])
    assert apart() < 0.7 * before
    actions, record = policy.act(rows * 8, generator=chance)
    advantage = torch.from_numpy(actions.sum((1, 2)) > np.median(actions.sum((1, 2)))).float() * 2 - 1
    was = policy.evaluate(record).log_prob.sum((1, 2)) @ advantage
    step(-was)
    assert policy.evaluate(record).log_prob.sum((1, 2)) @ advantage > was


@pytest.mark.parametrize("name", ["sde", "smolvla"])
def test_pi0_trained_parameters(name: str) -> None:
    def trained(**options: Any) -> set[str]:
        return {each for each, parameter in made(name, **options).named_parameters() if parameter.requires_grad}

    everything, expert, no_vision = trained(), trained(trained="expert"), trained(trained="no_vision")
    assert {each for each in everything if "vision" in each} == everything - no_vision != set()
    assert not any(".paligemma." in each or ".vlm." in each for each in expert) and len(expert) > 20


@pytest.mark.parametrize("name", ["noise", "smolvla"])
def test_options_of_training(name: str) -> None:
    """Checkpointing changes nothing but memory; a detached value trains its head alone."""
    _, record = made(name).act(seen(2), generator=generator())

    def gradients(of: Callable[[Any], Any], **options: Any) -> dict[str, torch.Tensor]:
        policy = made(name, **options)
        of(policy.evaluate(record)).sum().backward()
        return {each: parameter.grad for each, parameter in policy.named_parameters() if parameter.grad is not None}

    plain, twice = (
        gradients(lambda found: found.log_prob),
        gradients(lambda found: found.log_prob, gradient_checkpointing=True),
    )
    assert plain.keys() == twice.keys() and all(torch.equal(plain[each], twice[each]) for each in plain)
    calls: list[int] = []
    policy = made(name, gradient_checkpointing=True)
    policy.get_submodule(
        f"{policy.big}.{'gemma_expert.model' if name == 'noise' else 'lm_expert'}.layers.0.self_attn.q_proj"
    ).register_forward_hook(lambda *_: calls.append(1))
    policy.evaluate(record).log_prob.sum().backward()
    assert len(calls) == 2 * policy.config.flow.drawn
    assert len(gradients(lambda found: found.value)) > 20
    assert all(each.startswith("value_head") for each in gradients(lambda found: found.value, detach_value=True))


# --- folders ---


@pytest.mark.parametrize("name", POLICIES)
def test_a_folder_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    policy = made(name)
    policy.save_pretrained(tmp_path / "policy")
    again = load_policy(tmp_path / "policy")
    assert type(again) is type(policy) and again.config == policy.config and again.statistics == policy.statistics
    for one, other in zip(
        policy.act(seen(), generator=generator())[1].values(),
        again.act(seen(), generator=generator())[1].values(),
        strict=True,
    ):
        assert np.array_equal(one, other)
    frozen = [{each for each, value in p.named_parameters() if not value.requires_grad} for p in (policy, again)]
    assert frozen[0] == frozen[1]
    # what RL added is in a file of its own: theirs has published names only
    names = {each.removeprefix("model.") for each in Tensors(tmp_path / "policy")}
    assert not any(each.startswith(("value_head", "noise_head")) for each in names)
    assert names == {each for each in policy.state_dict() if "_head." not in each or "lm_head" in each} - (
        {policy.tied[1]} & names ^ {policy.tied[1]}
    )
    other = load_policy(tmp_path / "policy", tokenizer=ByteTokenizer(), value="", n_action_steps=2)
    assert other.act(seen(), generator=generator())[0].shape == (3, 2, 2) and not hasattr(other, "value_head")
    usual = load_policy(tmp_path / "policy", tokenizer=ByteTokenizer(), value="auto").config.value
    assert usual == ("prefix" if name == "pi05" else "actions")
    with pytest.raises(UnknownNameError, match="valeu"):
        load_policy(tmp_path / "policy", valeu="actions")
    assert load_policy(tmp_path / "policy", dtype="bfloat16").get_parameter(policy.tied[0]).dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="device 'cuda:77' is not on this machine"):
        load_policy(tmp_path / "policy", device="cuda:77")


def test_folders_of_others(tmp_path: Path) -> None:
    """lerobot's with its processors, older ones of it, openpi's; code in a folder is neither run nor copied."""
    policy = made("sde")
    state = {name: value for name, value in policy.state_dict().items() if name != policy.tied[1]}
    sizes = {name: SHARED[name] for name in ("vision", "vocabulary", "images", "tokenizer_max_length")} | {
        "vlm": VLM,
        "expert": EXPERT,
        "flow": Flow(steps=4),
    }

    def opened(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], **options: Any) -> Any:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "modeling_pi0.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        write_tensors(folder, tensors)
        return load_policy(folder, tokenizer=ByteTokenizer(), **sizes, **options)

    def same(other: Any) -> None:
        for one, two in zip(
            policy.act(seen(), generator=generator()), other.act(seen(), generator=generator()), strict=True
        ):
            for each in (one,) if isinstance(one, np.ndarray) else one:
                np.testing.assert_allclose(
                    *((one, two) if isinstance(one, np.ndarray) else (one[each], two[each])), rtol=1e-5, atol=1e-6
                )

    lerobot = {
        "type": "pi0",
        "chunk_size": 4,
        "n_action_steps": 3,
        "max_action_dim": 5,
        "max_state_dim": 6,
        "num_inference_steps": 4,
        "input_features": {
            "observation.state": {"type": "STATE", "shape": [3]},
            "observation.images.a": {"type": "VISUAL", "shape": [3, 28, 28]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [2]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    }
    prefixed = {f"model.{name}": value for name, value in state.items()}
    numbers = {
        f"{feature}.{number}": torch.tensor(STATISTICS[ours][number], dtype=torch.float64)
        for feature, ours in (("observation.state", "state"), ("action", "action"))
        for number in ("mean", "std")
    }
    step = {
        "registry_name": "normalizer_processor",
        "config": {},
        "state_file": "policy_preprocessor_step_5_normalizer_processor.safetensors",
    }
    new = tmp_path / "new"
    new.mkdir()
    (new / "policy_preprocessor.json").write_text(
        json.dumps({"name": "policy_preprocessor", "steps": [{"registry_name": "to_batch_processor"}, step]})
    )
    write_tensors(new, numbers, name=step["state_file"])
    other = opened(new, lerobot, prefixed)
    same(other)
    other.tokenizer = FolderTokenizer.__new__(FolderTokenizer)
    other.tokenizer.folder = tmp_path / "words"
    (tmp_path / "words").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        (tmp_path / "words" / name).write_text("{}")
    other.use_statistics({"state": statistics(ROWS + 1), "action": STATISTICS["action"]})
    other.save_pretrained(tmp_path / "saved")
    assert Tensors(tmp_path / "saved" / step["state_file"])["observation.state.mean"].tolist() == pytest.approx(
        (ROWS + 1).mean(0), rel=1e-6
    )
    assert {file.name for file in (tmp_path / "saved").glob("*token*")} == {"tokenizer.json", "tokenizer_config.json"}
    assert (tmp_path / "saved" / step["state_file"]).is_file() and not list((tmp_path / "saved").rglob("*.py"))
    renamed = {name.replace("vision_tower.vision_model.", "vision_tower."): value for name, value in prefixed.items()}
    buffers = {
        f"normalize_inputs.buffer_observation_state.{number}": numbers[f"observation.state.{number}"]
        for number in ("mean", "std")
    }
    buffers |= {
        f"unnormalize_outputs.buffer_action.{number}": numbers[f"action.{number}"] for number in ("mean", "std")
    }
    same(opened(tmp_path / "old", lerobot, renamed | buffers))

    openpi = {
        "action_dim": 5,
        "action_horizon": 4,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "precision": "float32",
    }
    more = {"n_action_steps": 3, "state_dim": 3, "action_dim": 2, "max_state_dim": 6}
    for name in ("libero", "droid"):
        assets = tmp_path / "openpi/assets/physical-intelligence" / name
        assets.mkdir(parents=True)
        stats = {"state": STATISTICS["state"], "actions": STATISTICS["action"]} if name == "libero" else {}
        (assets / "norm_stats.json").write_text(json.dumps({"norm_stats": stats}))
    same(opened(tmp_path / "openpi", openpi, state, asset="physical-intelligence/libero", **more))
    with pytest.raises(
        ConfigError,
        match=r"has the statistics of physical-intelligence/droid, physical-intelligence/libero\. Say which: asset=",
    ):
        opened(tmp_path / "openpi", openpi, state, **more)
    with pytest.raises(MissingFieldError, match=r"openpi: of its tensors 1 missing \(action_in_proj.bias\)"):
        opened(
            tmp_path / "openpi",
            openpi,
            {k: v for k, v in state.items() if k != "action_in_proj.bias"},
            asset="physical-intelligence/libero",
            **more,
        )
    assert not (tmp_path / "ran").exists()


def test_published_sizes() -> None:
    """As openpi and lerobot have them; SmolVLA's published checkpoint has 500 tensors with 450,046,176 numbers."""
    with torch.device("meta"):
        smol = SmolVLA(SmolVLAConfig.from_published({"type": "smolvla"}, frozenset()))
        pi0 = Pi0(Pi0Config.from_published({"type": "pi0"}, frozenset()))
        pi05 = Pi0(Pi0Config.from_published({"action_horizon": 10}, frozenset({"time_mlp_in.weight"})))
    assert (len(smol.state_dict()), sum(value.numel() for value in smol.state_dict().values())) == (500, 450_046_176)
    assert pi0.state_dict()[
        "paligemma_with_expert.paligemma.model.vision_tower.vision_model.embeddings.position_embedding.weight"
    ].shape == (256, 1152)
    assert (
        pi05.config.adaptive
        and pi05.horizon == 10
        and pi05.config.tokenizer_max_length == 200
        and pi05.config.state_normalization == "q99"
    )
    assert pi05.state_dict()["paligemma_with_expert.gemma_expert.model.norm.dense.weight"].shape == (3072, 1024)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"use_relative_actions": True}, ConfigError, "use_relative_actions=True, which is not built here"),
        (
            {"time_sampling_beta_alpha": 2.0},
            ConfigError,
            "time_sampling_beta_alpha=2.0; flows are trained with 1.5 here",
        ),
        ({"paligemma_variant": "gemma_9b"}, UnknownNameError, "gemma_9b"),
        ({"normalization_mapping": {"STATE": "QUANTILE10"}}, UnknownNameError, "QUANTILE10"),
    ],
)
def test_published_configurations_that_are_refused(given: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Pi0Config.from_published(given, frozenset())
    if "time" in says or "use" in says:
        with pytest.raises(error, match=says):
            SmolVLAConfig.from_published(given, frozenset())


def test_a_key_of_ours_that_is_unknown(tmp_path: Path) -> None:
    made("sde").save_pretrained(tmp_path / "policy")
    ours = json.loads((tmp_path / "policy/hilt.json").read_text())
    ours["config"]["flow"]["levle"] = 1
    (tmp_path / "policy/hilt.json").write_text(json.dumps(ours))
    with pytest.raises(UnknownNameError, match="levle"):
        load_policy(tmp_path / "policy")


# --- what the tolerance notices ---


def causal(policy: FlowPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gemma.attend

    def attend(queries: Any, keys: Any, values: Any, mask: Any) -> Any:
        return plain(
            queries,
            keys,
            values,
            mask & torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - queries.shape[2]),
        )

    monkeypatch.setattr(gemma, "attend", attend)


def exact_gelu(policy: FlowPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gemma.F.gelu
    monkeypatch.setattr(gemma.F, "gelu", lambda x, approximate="none": plain(x))


def block_too_many(policy: FlowPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = next(module for module in policy.modules() if isinstance(module, gemma.Siglip)).encoder["layers"]
    layers.append(layers[-1])


@pytest.mark.parametrize("wrong", [causal, exact_gelu, block_too_many])
@pytest.mark.parametrize("name", ["pi05", "smolvla"])
def test_the_tolerance_is_narrow_enough(
    name: str, wrong: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = golden.FOLDER / f"pi0/{name}_tiny.npz"
    with np.load(case) as file:
        keys, config, seed = json.loads(str(file["keys"])), json.loads(str(file["config"])), int(file["seed"])
        inputs = {key[3:]: torch.from_numpy(file[key]) for key in file.files if key.startswith("in.")}
        theirs = file["out.sample_actions"]
    policy = kind.made(config, keys, seed)
    assert kind.near(kind.in_float64(kind.numbers, policy, inputs)["sample_actions"], theirs)[1] is None
    wrong(policy, monkeypatch)
    assert kind.near(kind.in_float64(kind.numbers, policy, inputs)["sample_actions"], theirs)[1] is not None
