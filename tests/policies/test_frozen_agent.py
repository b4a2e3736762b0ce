"""An actor-critic beside a frozen policy: what it sees, what it decides, how it goes on, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hilt.core.errors import ConfigError
from hilt.core.tree import ArraySpec
from hilt.core.validate import check
from hilt.policies.agent.config import AgentConfig, EncoderConfig, Rlpd
from hilt.policies.frozen.frozen_agent import FrozenAgent
from hilt.policies.frozen.frozen_config import FrozenOptions, base_hash, base_path, frozen_options

torch.set_num_threads(1)
HASH, WIDTH, NUMBERS, STATE = "0123456789ab", 6, 3, 2
ACTION = ArraySpec(np.dtype(np.float32), (NUMBERS,))


def spaces(chunk: int = 1, weights: str = HASH, state: bool = True) -> dict[str, Any]:
    """Observations with the columns of a frozen policy, and others that the agent does not see."""
    columns = {"actions": (chunk, NUMBERS), "features": (WIDTH,), **({"state": (STATE,)} if state else {})}
    made = {name: ArraySpec(np.dtype(np.float32), shape) for name, shape in columns.items()}
    images = {"front": ArraySpec(np.dtype(np.uint8), (16, 16, 3))}
    return {"base_policy": {weights: made}, "images": images, "pose": ArraySpec(np.dtype(np.float32), (7,))}


def config(folder: Path, chunk: int = 1, options: dict[str, Any] | None = None, **changes: Any) -> AgentConfig:
    plain = AgentConfig(encoder=EncoderConfig(kind="none"), hidden=[16], proprio_width=4, kind="frozen_vla")
    made = replace(plain, chunk=chunk, options={"policy": str(folder), "suite": "tabletop", **(options or {})})
    return replace(made, **{"rlpd": Rlpd(learning_rate=1e-2), **changes})


def agent(folder: Path, chunk: int = 1, seed: int = 0, weights: str = HASH, **changes: Any) -> FrozenAgent:
    return FrozenAgent.make(spaces(chunk, weights), ACTION, config(folder, chunk, **changes), seed=seed)


def seen(r: np.random.Generator, rows: int, chunk: int = 1) -> dict[str, Any]:
    base = r.uniform(-1, 1, (rows, chunk, NUMBERS)).astype(np.float32)
    numbers = {"actions": base, "features": r.normal(size=(rows, WIDTH)).astype(np.float32)}
    numbers["state"] = r.normal(size=(rows, STATE)).astype(np.float32)
    return {"base_policy": {HASH: numbers}}


def batch(seed: int = 0, rows: int = 16, chunk: int = 1) -> dict[str, Any]:
    r = np.random.default_rng(seed)
    shape = (rows, chunk, NUMBERS) if chunk > 1 else (rows, NUMBERS)
    return {
        "observations": seen(r, rows, chunk),
        "next_observations": seen(r, rows, chunk),
        "actions": r.uniform(-1, 1, shape).astype(np.float32),
        "rewards": r.random(rows).astype(np.float32),
        "masks": np.ones(rows, np.float32),
        "demo": np.arange(rows) >= rows // 2,
        "n_steps": np.full(rows, chunk),
        "source": np.zeros((rows, chunk) if chunk > 1 else rows, np.int64),
    }


@pytest.mark.parametrize("chunk", [1, 2])
def test_it_begins_as_the_frozen_policy_and_never_leaves_its_bound(tmp_path: Path, chunk: int):
    made = agent(tmp_path, chunk, options={"bound": 0.25}, actor_scale=1e-6)
    rows = seen(np.random.default_rng(1), 50, chunk)
    base = rows["base_policy"][HASH]["actions"]
    np.testing.assert_allclose(made.chunks(rows), base, atol=1e-5)
    assert made.sample_actions(rows, argmax=True).shape == (50, NUMBERS)
    for number in range(20):
        made.update(batch(number, chunk=chunk))
    for argmax in (True, False):
        away = np.abs(made.chunks(rows, seed=3, argmax=argmax) - base)
        assert 0.01 < away.max() <= 0.25 + 1e-6
    assert np.abs(made.chunks(rows)).max() <= 1


def test_an_edit_begins_as_the_frozen_policy_is_pulled_to_it_and_may_go_anywhere(tmp_path: Path):
    rows = seen(np.random.default_rng(1), 50)
    base = rows["base_policy"][HASH]["actions"]

    def trained(pull: float) -> np.ndarray:
        made = agent(tmp_path, options={"space": "edit", "pull": pull}, actor_scale=1e-6)
        np.testing.assert_allclose(made.chunks(rows), np.clip(base, -0.99, 0.99), atol=1e-4)
        for number in range(60):
            made.update(batch(number))
        return np.abs(made.chunks(rows) - base)

    loose, tight = trained(0.0), trained(30.0)
    assert loose.max() > 0.5 and tight.mean() < 0.5 * loose.mean()


def test_a_pull_fades_with_the_updates_of_the_actor_and_goes_on_where_it_was(tmp_path: Path):
    def pulls(made: FrozenAgent, updates: int) -> list[float]:
        found = []
        for number in range(updates):
            made.update(batch(number))
            found.append(made.space.pull)
        return found

    changes = {"options": {"pull": 4.0, "pull_halved_after": 2}, "rlpd": Rlpd(critic_warmup=1)}
    made = agent(tmp_path, **changes)
    assert pulls(made, 6) == pytest.approx([4, 4, 8**0.5, 2, 2**0.5, 1])
    made.update(batch(), ["critic"])
    state = made.state_dict()
    other = agent(tmp_path, seed=5, **changes)
    other.load_state_dict(state)
    assert pulls(other, 1) == pytest.approx([0.5**0.5]), "an update of the critics alone does not count"
    assert pulls(agent(tmp_path, options={"pull": 4.0}), 3) == [4, 4, 4]

    rows = seen(np.random.default_rng(1), 50)
    base = rows["base_policy"][HASH]["actions"]

    def away(halved_after: int) -> float:
        options = {"space": "edit", "pull": 30.0, "pull_halved_after": halved_after}
        made = agent(tmp_path, options=options, actor_scale=1e-6)
        for number in range(60):
            made.update(batch(number))
        return float(np.abs(made.chunks(rows) - base).mean())

    assert away(5) > 2 * away(0)


def test_it_sees_the_columns_of_the_frozen_policy_and_nothing_else(tmp_path: Path):
    made = agent(tmp_path)
    assert made.proprio == [base_path(HASH, name) for name in ("features", "actions", "state")] and not made.image_paths
    assert made.networks["actor"].inputs.features == WIDTH, "features are taken as they are, the rest has a branch"
    rows = seen(np.random.default_rng(0), 4)
    before = made.chunks(rows)
    for name in ("features", "actions", "state"):
        other = {"base_policy": {HASH: dict(rows["base_policy"][HASH])}}
        other["base_policy"][HASH][name] = -other["base_policy"][HASH][name]
        assert np.abs(made.chunks(other) - before).max() > 1e-4, name
    without = FrozenAgent.make(spaces(state=False), ACTION, config(tmp_path))
    assert without.proprio == [base_path(HASH, name) for name in ("features", "actions")]


def test_numbers_that_it_does_not_move_are_the_frozen_policys(tmp_path: Path):
    made = agent(tmp_path, action_indices=[1])
    rows = seen(np.random.default_rng(0), 5)
    base = rows["base_policy"][HASH]["actions"]
    decided = made.chunks(rows, seed=1, argmax=False)
    np.testing.assert_array_equal(decided[..., [0, 2]], base[..., [0, 2]])
    assert np.abs(decided - base)[..., 1].max() > 1e-3


def test_a_frozen_policy_acts_unnormalized_where_the_rest_is_normalized(tmp_path: Path):
    made = agent(tmp_path, normalize_proprio=True, actor_scale=1e-6)
    rows = seen(np.random.default_rng(0), 30)
    made.fit_proprio(rows)
    assert made.networks["proprio"].mean.abs().max() > 1e-3
    np.testing.assert_allclose(made.chunks(rows), rows["base_policy"][HASH]["actions"], atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2])
def test_it_goes_on_bit_for_bit(tmp_path: Path, chunk: int):
    first = agent(tmp_path, chunk)
    for number in range(3):
        first.update(batch(number, chunk=chunk))
    second = agent(tmp_path, chunk, seed=9)
    second.load_state_dict(first.state_dict())
    for number in range(7, 10):
        assert first.update(batch(number, chunk=chunk))[1] == second.update(batch(number, chunk=chunk))[1]
    ours, theirs = first.state_dict()["networks"], second.state_dict()["networks"]
    assert all(torch.equal(ours[net][key], theirs[net][key]) for net in ours for key in ours[net])


def test_a_state_of_other_frozen_weights_is_refused_by_hash(tmp_path: Path):
    state = agent(tmp_path).state_dict()
    with pytest.raises(ConfigError, match=f"weights have the hash {HASH}, and those of this run.* have ffff00001111"):
        agent(tmp_path, weights="ffff00001111").load_state_dict(state)


def test_imitation_shows_corrections(tmp_path: Path):
    made = agent(tmp_path, options={"bound": 0.5})
    rows = batch(0, 64)
    base = rows["observations"]["base_policy"][HASH]["actions"][:, 0]
    rows["actions"] = np.clip(base + 0.2, -1, 1)
    losses = [made.imitate(rows)["imitation_loss"] for _ in range(150)]
    away = made.chunks(rows["observations"])[:, 0] - base
    assert losses[-1] < losses[0] and np.abs(np.median(away) - 0.2) < 0.07


def test_it_begins_anew(tmp_path: Path):
    made = agent(tmp_path)
    rows = seen(np.random.default_rng(0), 5)
    before = made.chunks(rows)
    made.update(batch())
    assert (made.chunks(rows) != before).any()
    made.begin_anew()
    np.testing.assert_array_equal(made.chunks(rows), before)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"setup_mode": "single-arm-learned-gripper"}, "the frozen policy moves the gripper as it moves the arm"),
        (
            {"rlpd": Rlpd(conservative=1.0)},
            "rlpd.conservative=1 with agent.kind=frozen_vla: its term needs the density",
        ),
        ({"encoder": EncoderConfig()}, "sees what the frozen policy computes, and nothing else"),
        ({"options": {"space": "latent"}}, "latent"),
        ({"options": {"bound": 0.0}}, "bound"),
        ({"options": {"space": "edit", "bound": 0.5}}, "bound=0.5 would do nothing"),
        ({"options": {"pull": -0.5}}, "pull=-0.5: expected a number of at least 0"),
        ({"options": {"pull_halved_after": -1}}, "pull_halved_after=-1: expected a whole number of at least 0"),
        ({"options": {"pull": 0, "pull_halved_after": 9}}, "pull_halved_after=9 would do nothing"),
        ({"options": {"policy": "small_vla"}}, "policy is 'small_vla'; expected the folder of a policy"),
        ({"options": {"policy": "nowhere"}}, "agent.options.policy=nowhere: expected the folder of a checkpoint"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, changes: dict[str, Any], error: str):
    with pytest.raises((ConfigError, KeyError), match=error):
        agent(tmp_path, **changes)


def test_observations_without_the_columns_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="the observations have no columns of a frozen policy"):
        FrozenAgent.make({"pose": ArraySpec(np.dtype(np.float32), (7,))}, ACTION, config(tmp_path))
    with pytest.raises(ConfigError, match=r"the agent takes \[2, 3\] as agent.chunk=2 says"):
        FrozenAgent.make(spaces(1), ACTION, config(tmp_path, 2))
    with pytest.raises(ConfigError, match="another algorithm takes the actor's numbers for actions"):
        agent(tmp_path).use_algorithm(object())  # type: ignore[arg-type]


def test_names_of_columns(tmp_path: Path):
    assert base_hash(["images/front", f"observations/{base_path(HASH, 'features')}"]) == HASH
    assert base_hash(["base_policy", "state/base_policy"]) == ""
    check(FrozenOptions(policy=str(tmp_path)))
    assert frozen_options({"policy": str(tmp_path)}).space == "residual"
