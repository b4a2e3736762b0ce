"""An agent that decides the noise of pi0, pi0.5 and SmolVLA, whose flow no update can follow: from an update to the
folder of the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError
from hilt.core.trajectory import Source
from hilt.core.tree import ArraySpec, flatten, unflatten
from hilt.policies.agent.config import AgentConfig, CriticConfig, EncoderConfig, Rlpd
from hilt.policies.frozen.frozen_policy import FrozenVlaPolicy
from hilt.policies.frozen.noise_agent import FrozenVlaAgent, NoiseAgent
from hilt.policies.registry import load_policy
from tests.policies.test_acted_noise import COLUMNS, HORIZON, KINDS, WIDTH, base_of, folders, frame, frames

__all__ = ["folders"]
torch.set_num_threads(1)
NUMBERS, ROWS = 2, 12


def agent(folder: Path, chunk: int = 2, seed: int = 0, **changes: Any) -> NoiseAgent:
    options = {"policy": str(folder), "columns": COLUMNS, "instruction": "push", "space": "noise"}
    options |= changes.pop("options", {})
    base = base_of(folder, chunk, **options)
    columns = base.of_one(frame(frames(1), 0), "push")
    spaces = {"base_policy": {base.weights: {k: ArraySpec(np.dtype(np.float32), v.shape) for k, v in columns.items()}}}
    config = AgentConfig(encoder=EncoderConfig(kind="none"), hidden=[16], kind="frozen_vla", chunk=chunk)
    config = replace(config, options=options, initial_std=0.3, **{"rlpd": Rlpd(learning_rate=1e-2), **changes})
    made = FrozenVlaAgent.make(spaces, ArraySpec(np.dtype(np.float32), (NUMBERS,)), config, seed=seed)
    assert isinstance(made, NoiseAgent)
    made.begin("push")
    return made


def seen(made: NoiseAgent, count: int = 3, seed: int = 0) -> dict[str, Any]:
    """Observations with the columns of the frozen policy."""
    tree = frames(count, seed)
    return {**tree, "base_policy": {made.weights: made._frozen.of_many(tree, ["push"] * count)}}


def batch(made: NoiseAgent, seed: int) -> dict[str, Any]:
    """As a log gives it: steps of the actor, and of a person, whose noise is not known."""
    r, tree, chunk = np.random.default_rng(seed), seen(made, ROWS, seed), made.config.chunk
    known = np.arange(ROWS) % 3 != 0
    shape = (ROWS, chunk, NUMBERS) if chunk > 1 else (ROWS, NUMBERS)
    start = r.uniform(-1.5, 1.5, (ROWS, made._acted.width)).astype(np.float32)
    source = np.where(known, Source.POLICY, Source.HUMAN)
    return {
        "observations": {"base_policy": tree["base_policy"]},
        "next_observations": {"base_policy": tree["base_policy"]},
        "actions": r.uniform(-1, 1, shape).astype(np.float32),
        "rewards": r.random(ROWS).astype(np.float32),
        "masks": np.ones(ROWS, np.float32),
        "demo": ~known,
        "n_steps": np.full(ROWS, chunk),
        "source": np.repeat(source[:, None], chunk, 1) if chunk > 1 else source,
        "noise": {"start": start * known[:, None], "known": known},
    }


@pytest.mark.parametrize("name", KINDS)
def test_from_an_update_to_the_folder_of_the_policy(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    first, second = agent(folders[name]), agent(folders[name], seed=9)
    weights = {key: tensor.clone() for key, tensor in first._frozen.policy.state_dict().items()}
    before = first.chunks(seen(first))
    infos = [first.update(batch(first, number))[1] for number in range(3)]
    assert all(info["noise_critic_loss"] > 0 and 0 < info["noise"] < 1.5 for info in infos)
    assert infos[0]["decoded"] == pytest.approx((ROWS * 2 / 3 + ROWS) / (2 * ROWS)), (
        "the actor's, and one of each frame"
    )
    assert all(torch.equal(weights[key], tensor) for key, tensor in first._frozen.policy.state_dict().items())
    second.load_state_dict(first.state_dict())
    for number in range(3, 5):
        assert first.update(batch(first, number))[1] == second.update(batch(second, number))[1], "bit for bit"
    after = first.chunks(seen(first))
    np.testing.assert_array_equal(after, second.chunks(seen(second)))
    assert np.abs(after - before).max() > 1e-3

    FrozenVlaPolicy.of(first, base_of(folders[name])).save_pretrained(tmp_path / "policy")
    policy, rows = load_policy(tmp_path / "policy"), base_of(folders[name]).rows(frames(3), ["push"] * 3)
    assert isinstance(policy.agent, NoiseAgent) and "noise_critic" not in policy.networks
    np.testing.assert_allclose(policy.act(rows, sample=False)[0], after, atol=1e-5)
    drawn = [policy.act(rows, generator=torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)]
    assert np.array_equal(drawn[0], drawn[1]) and not np.array_equal(drawn[0], drawn[2])


@pytest.mark.parametrize("chunk", [1, 2])
def test_the_log_has_the_noise_that_was_executed(folders: dict[str, Path], chunk: int) -> None:
    made = agent(folders["pi0"], chunk)
    assert made.step_columns()["noise"]["start"].shape == (WIDTH,)  # type: ignore[index]
    tree = seen(made, 3)
    actions, notes = [], []
    for step in range(3):
        one = {**frame(tree, step), "base_policy": {made.weights: {
            key: column[step] for key, column in tree["base_policy"][made.weights].items()}}}  # fmt: skip
        actions.append(made.sample_actions(one, seed=step))
        notes.append(made.acted(Source.POLICY, actions[-1])["noise"])
    begun = [0, 1, 2] if chunk == 1 else [0, 2]
    assert [step for step in range(3) if notes[step]["known"]] == begun
    for step in begun:
        noise = notes[step]["start"]
        assert 0 < np.abs(noise).max() <= 1.5
        start = np.broadcast_to(noise, (1, HORIZON, WIDTH)).astype(np.float32)
        plan = made._frozen.policy.act_from([made._frozen.row(frame(tree, step), "push")], start)[0]
        np.testing.assert_allclose(actions[step], np.clip(plan[0], -1, 1), atol=1e-6)
    if chunk == 2:
        assert not notes[1]["start"].any()
    for source in (Source.HUMAN, Source.RANDOM):
        made.sample_actions(one, seed=9)
        note = made.acted(source, actions[0])["noise"]
        assert not note["known"] and not note["start"].any()


@pytest.mark.parametrize("chunk", [1, 2])
def test_noise_is_not_known_where_another_action_was_executed_than_it_became(
    folders: dict[str, Path], chunk: int
) -> None:
    """The first command after a person has acted may be scaled down, and is still the policy's."""
    made = agent(folders["pi0"], chunk)
    tree = seen(made, 1)
    one = {**frame(tree, 0), "base_policy": {made.weights: {
        key: column[0] for key, column in tree["base_policy"][made.weights].items()}}}  # fmt: skip
    for share, known in ((0.5, False), (1.0, True)):
        made.begin("push")
        action = made.sample_actions(one, seed=0)
        given = action.copy()
        action[:] = 0  # whoever has it may change it
        note = made.acted(Source.POLICY, given.astype(np.float64) * share)["noise"]
        assert note["known"] == known and note["start"].any() == known


def test_what_of_a_chunk_teaches_the_critics_of_noise(folders: dict[str, Path]) -> None:
    """Not a chunk that a person ended, nor one that a time limit cut short; one that ended with the task does."""
    made = agent(folders["pi0"], options={"noise_samples": 0})
    rows = batch(made, 0)
    rows["noise"]["known"][:] = True
    rows["source"][:] = Source.POLICY
    rows["source"][1, 1] = Source.HUMAN
    rows["n_steps"][2] = rows["n_steps"][3] = 1
    rows["masks"][3] = 0
    z = made.inputs.encode(made.encoder, made.inputs.leaves(rows["observations"]))
    decoded = made._rows(rows, z, z, z, False).decoded
    assert decoded is not None and decoded.known.shape == (ROWS, 1)
    assert decoded.known[:, 0].tolist() == [1, 0, 0, *[1] * (ROWS - 3)]
    assert decoded.counted[3, 0].tolist() == [1, 1, 0, 0] and decoded.counted[0].all()
    assert made.batch_columns == ["noise/start", "noise/known"]
    more = agent(folders["pi0"], options={"noise_samples": 2})
    both = more._rows(batch(more, 0), z, z, z, False).decoded
    assert both is not None and both.noise.shape == (ROWS, 3, WIDTH) and both.known[:, 1:].all()
    columns = batch(more, 0)["observations"]["base_policy"][more.weights]
    np.testing.assert_array_equal(both.noise[:, 1:].numpy(), columns["noise"])
    np.testing.assert_array_equal(both.actions[:, 1:].numpy(), columns["noise_actions"].reshape(ROWS, 2, -1))


def test_in_a_bandit_it_finds_the_best_action_that_the_flow_can_give(folders: dict[str, Path]) -> None:
    """One state, and the reward of an action is less the further it is from one that some noise leads to."""
    made = agent(
        folders["smolvla"],
        chunk=1,
        options={"pull": 0.0},
        rlpd=Rlpd(learning_rate=3e-3, tau=0.1, temperature=1e-3, target_entropy=-4.0),
        actor_scale=0.01,
        std_range=[0.05, 0.5],
        hidden=[32, 32],
        activation="relu",
    )
    tree, steps = seen(made, 1, seed=3), []
    one = {**frame(tree, 0), "base_policy": {made.weights: {
        key: column[0] for key, column in tree["base_policy"][made.weights].items()}}}  # fmt: skip
    row = [made._frozen.row(frame(tree, 0), "push")]
    noises = np.random.default_rng(0).uniform(-1.5, 1.5, (60, WIDTH)).astype(np.float32)
    reached = np.array([made._acted.actions(row, noise[None])[0, 0] for noise in noises])
    first = made.sample_actions(one, argmax=True)
    best = reached[np.abs(reached - first).sum(1).argmax()]  # the furthest from where it begins

    def worth(action: np.ndarray) -> float:
        return 1 - float(np.square(action - best).sum())

    r = np.random.default_rng(1)
    for _ in range(250):
        action = made.sample_actions(one)
        steps.append((action, worth(action), made.acted(Source.POLICY, action)["noise"]["start"]))
        rows = [steps[place] for place in r.integers(0, len(steps), 32)]
        base = {made.weights: {k: np.repeat(v, 32, 0) for k, v in tree["base_policy"][made.weights].items()}}
        actions, rewards, starts = (np.array(each, np.float32) for each in zip(*rows, strict=True))
        made.update({
            "observations": {"base_policy": base},
            "next_observations": {"base_policy": base},
            "actions": actions,
            "rewards": rewards,
            "masks": np.zeros(32, np.float32),
            "demo": np.zeros(32, bool),
            "noise": {"start": starts, "known": np.ones(32, bool)},
        })  # fmt: skip
    last = made.sample_actions(one, argmax=True)
    assert 1 - worth(last) < 0.2 * (1 - worth(first))


def test_numbers_that_it_does_not_move_are_those_of_the_plan(folders: dict[str, Path]) -> None:
    made = agent(folders["smolvla"], action_indices=[1])
    tree = seen(made)
    decided, plan = made.chunks(tree, seed=1, argmax=False), tree["base_policy"][made.weights]["actions"]
    np.testing.assert_array_equal(decided[..., 0], plan[..., 0])
    assert np.abs(decided - plan)[..., 1].max() > 1e-4
    made.update({**batch(made, 0)})


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"rlpd": Rlpd(samples=4)}, r"agent\.rlpd\.samples=4 with a critic of noise"),
        (
            {"critic": CriticConfig(head="hl_gauss", value_range=[0, 1])},
            r"agent\.critic\.head=hl_gauss with a critic of",
        ),
        ({"critic": CriticConfig(reset_period=900)}, r"agent\.critic\.reset_period=900 with a critic of noise"),
        ({"rlpd": Rlpd(imitation_weight=1.0)}, "space=noise with imitation: the noise of an action is not known"),
        ({"options": {"noise_gradient": "flow"}}, "the policy in .* does not compute its actions by a flow from its"),
    ],
)
def test_what_cannot_be_is_refused(folders: dict[str, Path], changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        agent(folders["pi0"], **changes)


def test_help_and_imitation_are_refused(folders: dict[str, Path]) -> None:
    made = agent(folders["pi0"])
    with pytest.raises(
        ConfigError, match=r"help\.quantile with agent\.options\.space=noise: the critics of actions are"
    ):
        made.measure_disagreement()
    with pytest.raises(ConfigError, match="cannot imitate: the noise of an action is not known"):
        made.imitate(batch(made, 0))


def test_settings_of_the_networks_reach_the_critics_of_noise(folders: dict[str, Path]) -> None:
    made = agent(folders["pi0"], rlpd=Rlpd(critics=3, target_entropy=-3.0), critic=CriticConfig(weight_decay=0.1))
    assert len(made.networks["noise_critic"].weights[0]) == 3  # type: ignore[index,arg-type]
    assert made.target_entropy == WIDTH * -3.0 / NUMBERS, "each number of noise has that of one of an action"
    assert agent(folders["pi0"]).target_entropy == -WIDTH / 2
    simba = agent(folders["pi0"], critic=CriticConfig(network="simba", width=8, depth=1))
    assert simba.update(batch(simba, 0))[1]["noise_critic_loss"] > 0
    wide = agent(folders["pi0"], options={"repeat_noise": False})
    assert wide.update(batch(wide, 0))[1]["entropy"] != 0 and wide._acted.width == HORIZON * WIDTH
    made.update(batch(made, 0))
    before = made.chunks(seen(made))
    made.begin_anew()
    assert not np.array_equal(made.chunks(seen(made)), before) and made.updates == 0


def test_several_draws_are_of_one_look_at_an_observation(folders: dict[str, Path]) -> None:
    made = agent(folders["pi0"])
    tree = seen(made, 2)
    drawn = made.chunks(tree, seed=1, argmax=False, draws=3)
    repeated = unflatten({path: np.repeat(leaf, 3, axis=0) for path, leaf in flatten(tree).items()})
    assert drawn.shape == (6, 2, NUMBERS) and np.abs(drawn[0] - drawn[1]).max() > 1e-4
    np.testing.assert_allclose(drawn, made.chunks(repeated, seed=1, argmax=False), atol=1e-5)
