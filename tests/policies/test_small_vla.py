"""The small VLA keeps the protocol with every head; it learns by imitation and by
reward, and comes back from its folder as it was."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.algos.adam import Adam
from hilt.core.errors import ConfigError, MissingFieldError, SchemaError, StorageError, UnknownNameError
from hilt.policies.base import given_in, join, select
from hilt.policies.io.lora import attach
from hilt.policies.registry import load_policy
from hilt.policies.vla.flow import Flow, training_times
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from tests.effort import sampled
from tests.policies.differences import assert_gradients

SIZES: dict[str, Any] = {
    "cameras": ("full_image", "wrist_image"), "image_size": 32, "state_dim": 3, "chunk": 2, "action_dim": 2,
    "width": 16, "depth": 2, "heads": 2, "keypoints": 3,
}  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "tokens": {"head": "tokens", "bins": 5, "value": "shared"},
    "patches": {"head": "tokens", "vision": "patches", "keypoints": 8},
    "gaussian": {"head": "gaussian", "value": "detached"},
    "sde": {"head": "flow", "flow": Flow(steps=3)},
    "noise": {"head": "flow", "flow": Flow("noise", steps=3), "value": "shared"},
    "bfloat16": {"head": "tokens", "precision": "bfloat16"},
}
TEXTS = ["touch the red cube", "touch the blue one", "open"]


def made(kind: str, **more: Any) -> SmallVLA:
    return SmallVLA(SmallVLAConfig(**SIZES | HEADS[kind] | more), seed=1)


def seen(rows: int, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [
        {
            "full_image": random.integers(0, 256, (32, 32, 3), np.uint8),
            "wrist_image": random.integers(0, 256, (32, 32, 3), np.uint8),
            "state": random.normal(size=3).astype(np.float32),
            "instruction": TEXTS[row % 3],
        }
        for row in range(rows)
    ]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("sample", [True, False])
def test_the_log_probability_of_what_was_done_is_that_of_its_record(kind: str, sample: bool) -> None:
    policy = made(kind)
    actions, record = policy.act(seen(7), sample, 0.8, generator())
    found = policy.evaluate(record)
    assert np.array_equal(found.log_prob.detach().numpy(), record["log_prob"])
    assert actions.shape == record["log_prob"].shape == found.entropy.shape == (7, 2, 2)
    assert actions.dtype == np.float32 and np.abs(actions).max() <= 1
    assert (
        record["images"].dtype == np.uint8
        and record["prompt"].dtype == np.int32
        and record["temperature"].tolist() == [np.float32(0.8)] * 7
    )
    assert (found.value is None) == (policy.config.value == "none") == ("value" not in record)
    if found.value is not None:
        assert np.array_equal(found.value.detach().numpy(), record["value"])
    assert policy.evaluate(select(record, [])).log_prob.shape == (0, 2, 2)
    # in other company, and padded otherwise, a row has the same log-probability
    other = join(
        [
            select(record, [6, 2]),
            policy.act([seen(1)[0] | {"instruction": "a longer sentence than these"}], sample, 0.8, generator())[1],
        ]
    )
    near = 2e-2 if policy.config.precision == "bfloat16" else 1e-5
    np.testing.assert_allclose(
        policy.evaluate(other).log_prob.detach().numpy()[:2], record["log_prob"][[6, 2]], rtol=0, atol=near
    )


@pytest.mark.parametrize("more", [{}, {"max_delay": 1}])
def test_the_error_of_a_velocity_is_that_of_imitating_the_answer(more: dict[str, Any]) -> None:
    policy = made("sde", **more)
    policy.keeps_answers = True
    _, record = policy.act(seen(3), generator=generator())
    draws = generator(2)
    noise, times = torch.randn(3, 2, 2, generator=draws), training_times(3, draws)
    answer = torch.from_numpy(record["answer"])
    assert record["answer"].shape == (3, 2, 2) and np.isfinite(record["answer"]).all()
    given = policy._given(given_in(record))
    imitated, _ = policy.action_head.loss(policy._features(record)[0], answer, generator(2), given)
    error = policy.flow_error(record, torch.stack([noise, -noise], 1), torch.stack([times, times], 1))
    assert error.shape == (3, 2, 2, 2) and torch.allclose(error[:, 0].square(), imitated, atol=1e-6)
    error.sum().backward()
    assert all(p.grad is not None for name, p in policy.named_parameters() if "given" not in name)
    with pytest.raises(ConfigError, match="SmallVLA has no flow"):
        made("gaussian").flow_error(record, noise[:, None], times[:, None])


def test_bfloat16_is_near_float32() -> None:
    _, record = made("bfloat16").act(seen(16), generator=generator())
    exact = made("bfloat16", precision="float32").evaluate(record).log_prob.detach().numpy()
    assert 0 < np.abs(exact - record["log_prob"]).max() < 0.02


@pytest.mark.parametrize("kind", [kind for kind in HEADS if kind != "bfloat16"])
def test_gradients_equal_finite_differences(kind: str) -> None:
    policy = made(kind)
    _, record = policy.act(seen(3), generator=generator())
    record = {name: each.astype(np.float64) if each.dtype == np.float32 else each for name, each in record.items()}
    policy.double()
    assert_gradients(policy, lambda: policy.evaluate(record).log_prob.sum(), directions=2)
    if kind != "sde":
        assert_gradients(policy, lambda: policy.evaluate(record).entropy.sum(), directions=2)
    if kind in ("tokens", "noise"):
        assert_gradients(policy, lambda: policy.evaluate(record).value.sum(), directions=2)  # type: ignore[union-attr]


@pytest.mark.parametrize("value", ["shared", "detached"])
def test_a_detached_value_trains_itself_alone(value: str) -> None:
    policy = made("tokens", value=value)
    _, record = policy.act(seen(2), generator=generator())
    assert policy.value_head is not None
    total = policy.evaluate(record).value
    assert total is not None
    trunk = torch.autograd.grad(total.sum(), [*policy.value_head.parameters(), policy.words.weight], allow_unused=True)
    assert all(gradient is not None and gradient.any() for gradient in trunk[:-1])
    assert (trunk[-1] is None) == (value == "detached")


@pytest.mark.parametrize("kind", ["tokens", "patches"])
def test_pictures_words_and_state_all_matter(kind: str) -> None:
    policy, row = made(kind), seen(1)[0]

    def answer(**other: Any) -> np.ndarray:
        return policy.act([row | other], sample=False)[0]

    assert np.array_equal(answer(), answer(other_image=1))
    for name in ("full_image", "wrist_image"):
        assert not np.array_equal(answer(), answer(**{name: 255 - row[name]}))
    assert not np.array_equal(answer(), answer(state=row["state"] + 1))
    assert not np.array_equal(answer(), answer(instruction="touch the blue one"))
    assert not np.array_equal(answer(), answer(instruction="red touch cube the"))


def test_pictures_of_other_sizes_are_resized() -> None:
    policy, (first, second) = made("tokens"), seen(2)
    first["full_image"] = np.repeat(np.repeat(second["full_image"], 2, 0), 2, 1)
    _, record = policy.act([first, second], generator=generator())
    assert (
        record["images"].shape == (2, 2, 32, 32, 3)
        and np.abs(record["images"][0, 0].astype(int) - second["full_image"]).mean() < 30
    )


def test_small_vla_uses_no_global_generator() -> None:
    before = torch.random.get_rng_state()
    one, two, other = made("sde"), made("sde"), SmallVLA(made("sde").config, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.words.weight, other.words.weight)
    one.supervised_loss(seen(2), np.zeros((2, 2, 2)), np.ones((2, 2), bool), generator())
    assert np.array_equal(one.act(seen(2), generator=generator())[0], two.act(seen(2), generator=generator())[0])
    assert torch.equal(before, torch.random.get_rng_state())


def test_ranges_are_learned_and_kept() -> None:
    policy = made("gaussian")
    states, actions = np.random.default_rng(0).normal(5, 2, (50, 3)), np.array([[10.0, -1.0], [30.0, -1.0]])
    policy.fit(states, actions)
    answers = np.concatenate([policy.act(seen(50), temperature=30.0, generator=generator())[0]])
    assert answers[..., 0].min() == 10 and answers[..., 0].max() == 30 and (answers[..., 1] == -1).all()
    near, far = (policy.act([seen(1)[0] | {"state": np.full(3, value)}], sample=False)[0] for value in (5, 500))
    assert not np.array_equal(near, far)
    # five deviations are the most
    assert np.array_equal(far, policy.act([seen(1)[0] | {"state": np.full(3, 5000.0)}], sample=False)[0])
    with pytest.raises(SchemaError, match=r"state_mean has 3 numbers by the config, and \[4\] were given"):
        policy.fit(np.zeros((2, 4)), actions)


def test_small_vla_does_not_imitate_masked_actions() -> None:
    policy, actions, mask = made("tokens"), np.zeros((4, 2, 2), np.float32), np.ones((4, 2), bool)
    mask[:, 1] = False
    loss, _ = policy.supervised_loss(seen(4), actions, mask)
    actions[:, 1] = np.nan  # beyond an episode's end there may be anything
    assert torch.equal(policy.supervised_loss(seen(4), actions, mask)[0], loss)
    actions[:, 0] = 1
    assert not torch.equal(policy.supervised_loss(seen(4), actions, mask)[0], loss)
    assert policy.supervised_loss(seen(4), actions, np.zeros((4, 2), bool))[0] == 0


def test_pictures_are_moved_when_imitating() -> None:
    still, moved = made("tokens"), made("tokens", shift=3)
    given = seen(4), np.zeros((4, 2, 2), np.float32), np.ones((4, 2), bool)
    plain = still.supervised_loss(*given)[0]
    assert plain != moved.supervised_loss(*given, generator=generator())[0]
    flat = [
        row | {"full_image": np.full((32, 32, 3), 9, np.uint8), "wrist_image": np.full((32, 32, 3), 7, np.uint8)}
        for row in given[0]
    ]
    assert (
        still.supervised_loss(flat, *given[1:])[0] == moved.supervised_loss(flat, *given[1:], generator=generator())[0]
    )
    with pytest.raises(ConfigError, match="shift=3 moves pictures at random: give supervised_loss a generator"):
        moved.supervised_loss(*given)


def spots(rows: int, seed: int) -> tuple[list[dict[str, Any]], np.ndarray]:
    """A red and a blue spot on gray; what the words name is where to go."""
    random, found, goals = np.random.default_rng(seed), [], []
    for row in range(rows):
        picture, places = np.full((32, 32, 3), 100, np.uint8), random.integers(3, 29, (2, 2))
        for (x, y), color in zip(places, ((220, 30, 30), (30, 60, 220)), strict=True):
            picture[y - 2 : y + 3, x - 2 : x + 3] = color
        found.append({"full_image": picture, "instruction": f"go to {'red' if row % 2 else 'blue'}"})
        goals.append(places[0 if row % 2 else 1] / 15.5 - 1)
    return found, np.array(goals, np.float32)[:, None]


@pytest.mark.parametrize("kind", sampled(["tokens", "gaussian", "sde", "noise"], "tokens"))
def test_small_vla_learns_by_imitation_and_then_from_reward(kind: str) -> None:
    """Imitation finds the spot that the words name. Then a reward for half of the way
    (no picture says so) moves the answer there."""
    one = {"cameras": ("full_image",), "state_dim": 0, "chunk": 1, "width": 32, "value": "none"}
    policy = SmallVLA(SmallVLAConfig(**SIZES | HEADS[kind] | {"bins": 13} | one), seed=0)
    parameters, chance = list(policy.parameters()), generator()
    optimizer = Adam(parameters, 1.5e-3)

    def descend(loss: torch.Tensor) -> None:
        optimizer.step(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))

    shown, goals = spots(256, 0)
    for step in range(80):
        rows = np.random.default_rng(step).integers(0, 256, 32)
        descend(policy.supervised_loss([shown[i] for i in rows], goals[rows], np.ones((32, 1), bool), chance)[0])
    fresh, aims = spots(128, 1)

    def away(share: float) -> float:
        return float(np.abs(policy.act(fresh, sample=False)[0] - share * aims).mean())

    assert away(1.0) < 0.6 * float(np.abs(aims).mean())
    before, optimizer.learning_rate = away(0.5), 5e-4
    for step in range(20):
        observations, targets = spots(48, 100 + step)
        actions, record = policy.act(observations, generator=chance)
        reward = -np.abs(actions - 0.5 * targets).sum(-1)[..., None]
        advantage = torch.from_numpy((reward - reward.mean()) / reward.std())
        ratio = (policy.evaluate(record).log_prob - torch.from_numpy(record["log_prob"])).exp()
        descend(-(ratio * advantage).mean())
    assert away(0.5) < 0.85 * before


@pytest.mark.parametrize("kind", HEADS)
def test_a_folder_gives_back_the_same_policy(kind: str, tmp_path: Path) -> None:
    policy = made(kind)
    policy.fit(np.random.default_rng(0).normal(size=(9, 3)), np.random.default_rng(1).normal(size=(9, 2)))
    policy.save_pretrained(tmp_path / "policy")
    again = load_policy(tmp_path / "policy", precision=policy.config.precision)  # which belongs to whoever computes
    assert isinstance(again, SmallVLA) and again.config == policy.config
    actions, record = policy.act(seen(4), generator=generator())
    same, kept = again.act(seen(4), generator=generator())
    # without bfloat16 instructions, the first product in a process is computed in another way
    near = 1e-5 if kind == "bfloat16" else 0
    np.testing.assert_array_equal(actions, same)
    for name in record:
        np.testing.assert_allclose(kept[name], record[name], rtol=near, atol=near)


def test_adapters_are_trained_with_the_heads_and_saved_as_part_of_the_weights(tmp_path: Path) -> None:
    policy = made("tokens")
    _, plain = policy.act(seen(4), generator=generator())
    trained = attach(policy, rank=2)
    _, record = policy.act(seen(4), generator=generator())
    np.testing.assert_allclose(record["log_prob"], plain["log_prob"], rtol=0, atol=1e-6)
    assert np.array_equal(policy.evaluate(record).log_prob.detach().numpy(), record["log_prob"])
    assert (
        any(each is policy.action_head.out.weight for each in trained)
        and not policy.eyes.stem.layers[0].weight.requires_grad
    )
    optimizer = Adam(trained, 0.05)
    for _ in range(2):  # an adapter's second factor is 0 before the first step
        optimizer.descend(policy.evaluate(record).log_prob.mean() + policy.evaluate(record).value.mean())  # type: ignore[union-attr]
    policy.save_pretrained(tmp_path / "policy")
    now = policy.evaluate(record).log_prob.detach().numpy()
    assert np.abs(now - record["log_prob"]).max() > 0.01
    np.testing.assert_allclose(
        load_policy(tmp_path / "policy").evaluate(record).log_prob.detach().numpy(), now, rtol=0, atol=1e-5
    )


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    made("tokens").save_pretrained(folder := tmp_path / "policy")
    greedy = [
        SmallVLA.from_pretrained(folder, decode=how).act(seen(1), sample=False)[0] for how in ("mean", "likeliest")
    ]
    assert not np.array_equal(*greedy)
    with pytest.raises(StorageError, match="exists and is not empty"):
        made("tokens").save_pretrained(folder)
    with pytest.raises(
        SchemaError,
        match=r"the tensor action_head.out.weight has the shape \[20, 16\], and the config asks for \[28, 16\]",
    ):
        SmallVLA.from_pretrained(folder, bins=7)
    with pytest.raises(ConfigError, match=r"a small VLA has no setting 'bin'; did you mean 'bins'\?"):
        SmallVLA.from_pretrained(folder, bin=7)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "hilt_small_vla"
    with pytest.raises(ConfigError, match=r"has no setting 'stepz'; did you mean 'steps'\?"):
        SmallVLAConfig.from_json(config | {"flow": {"stepz": 3}})
    assert (
        SmallVLAConfig.from_json(config) == made("tokens").config and SmallVLAConfig.from_json({}) == SmallVLAConfig()
    )
    made("sde").save_pretrained(tmp_path / "flow")
    assert SmallVLA.from_pretrained(tmp_path / "flow", flow=Flow(steps=2)).config.flow.steps == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"full_image": None},
            (
                r"observation 1 has no 'full_image', which this policy looks at; it has "
                r"\['instruction', 'state', 'wrist_image'\]"
            ),
        ),
        ({"instruction": None}, "observation 1 has no 'instruction'"),
        ({"state": None}, "observation 1 has no 'state'"),
    ],
)
def test_an_observation_that_lacks_something_is_refused(change: dict[str, None], said: str) -> None:
    rows = seen(2)
    for name in change:
        del rows[1][name]
    with pytest.raises(MissingFieldError, match=said):
        made("tokens").act(rows, sample=False)
    fields = made("tokens").observed_fields()
    assert fields.all_cameras and {*fields.cameras, "instruction", "state"} == seen(1)[0].keys()
    assert fields.state_dim == len(seen(1)[0]["state"])


def test_small_vla_refuses_wrong_settings() -> None:
    for change, said in (
        ({"head": "token"}, "no head named 'token'; did you mean 'tokens'"),
        ({"vision": "keypoint"}, "no vision named"),
        ({"decode": "x"}, "no decode named"),
        ({"value": "x"}, "no value named"),
    ):
        with pytest.raises(UnknownNameError, match=said):
            SmallVLAConfig(**change)
    for setting, text in (
        ({"chunk": 0}, "chunk=0: expected a whole number of at least 1"),
        ({"bins": 1}, "bins=1: expected a whole number of at least 2"),
        ({"image_size": 40}, "a multiple of 16 pixels"),
        ({"cameras": ()}, "give at least one"),
        ({"width": 30}, "width is 30; it is a multiple of heads, which is 4"),
        ({"std": 0.0}, "std=0.0: expected a number above 0"),
        (
            {"bins": 99, "head": "gaussian"},
            "bins=99 would do nothing: it needs head=tokens. Give that, or leave bins out",
        ),
        ({"std": 0.1}, "std=0.1 would do nothing: it needs head=gaussian"),
        ({"flow": Flow(steps=3)}, "flow.steps=3 would do nothing: it needs head=flow"),
        ({"keypoints": 9, "vision": "patches"}, "keypoints=9 would do nothing: it needs vision=keypoints"),
    ):
        with pytest.raises(ConfigError, match=text):
            SmallVLAConfig(**setting)
    with pytest.raises(SchemaError, match="no observation was given"):
        made("tokens").act([])
    for wrong, text in (
        ({"state": np.zeros(4)}, r"the state of observation 0 is \[4\]; expected is \[3\]"),
        (
            {"full_image": np.zeros((32, 32, 3))},
            r"full_image of observation 0 is float64 \[32, 32, 3\]; expected is uint8 \[H, W, 3\]",
        ),
        ({"wrist_image": np.zeros((32, 32), np.uint8)}, r"wrist_image of observation 0 is uint8 \[32, 32\]"),
        ({"instruction": b"go"}, "the instruction of observation 0 is b'go'; expected is text"),
    ):
        with pytest.raises(SchemaError, match=text):
            made("tokens").act([seen(1)[0] | wrong], sample=False)
    with pytest.raises(
        MissingFieldError, match=r"this record has no 'actions', but images, .*: it is of another policy"
    ):
        made("gaussian").evaluate(made("tokens").act(seen(1), sample=False)[1])
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="draws nothing; give one above 0"):
            made("gaussian").act(seen(1), temperature=temperature, generator=generator())
    with pytest.raises(
        SchemaError, match=r"\[1, 3, 2\] with a mask of \[1, 3\] were given; they are \[B, 2, 2\] and \[B, 2\]"
    ):
        made("tokens").supervised_loss(seen(1), np.zeros((1, 3, 2)), np.ones((1, 3), bool), generator())


def test_sizes_are_as_documented() -> None:
    for millions, change in ((1, {}), (5, {"width": 256, "depth": 6}), (20, {"width": 512, "depth": 6})):
        with torch.device("meta"):
            policy = SmallVLA(dataclasses.replace(SmallVLAConfig(), **change))
        assert 0.85 < sum(p.numel() for p in policy.parameters()) / 1e6 / millions < 1.15


def test_no_policy_needs_what_a_gpu_machine_lacks() -> None:
    parts = [
        "vla.small_vla",
        "vla.openvla",
        "vla.pi0",
        "vla.smolvla",
        "vla.observation_adapters",
        "io.folders",
        "io.lora",
        "io.memory",
    ]
    names = ", ".join(f"hilt.policies.{name}" for name in parts)
    code = f"import {names}, sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
        ).stdout.split()
    )
    assert "torch" in loaded
    absent = {
        "transformers",
        "peft",
        "PIL",
        "simplejpeg",
        "crc32c",
        "omegaconf",
        "msgpack",
        "zmq",
        "yaml",
        "rich",
        "typer",
        "ml_dtypes",
    }
    assert not loaded & absent
