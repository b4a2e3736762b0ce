"""Joint samplers: several views drawn from as if they were one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError, EmptyError
from hilt.replay import JointSampler, Log, MinSize, Mix
from tests.replay.toy_steps import check, new_log, numbers, step, write
from tests.replay.toy_table import chi_square_is_plausible


@pytest.fixture
def logs(tmp_path: Path) -> Any:
    """Demonstrations 0-19 in one log; 100-109 of the policy and 110-139 of a person in another."""
    for name in ("demos", "online"):
        (tmp_path / name).mkdir()
    with new_log(tmp_path / "demos") as demos, new_log(tmp_path / "online") as online:
        write(demos, numbers(0, 20, source=2))
        write(online, numbers(100, 10))
        write(online, numbers(110, 30, source=1))
        yield demos, online


def joint(logs: tuple[Log, Log], seed: Any = 0, **options: Any) -> JointSampler:
    demos, online = logs
    return JointSampler(
        {"shown": demos.all().sampler(**options), "human": online.by_source("human").sampler(**options)}, seed
    )


def drawn(sampler: Any, n: int) -> list[int]:
    return sampler.sample(n, keys=["rewards"])["rewards"].astype(int).tolist()  # type: ignore[no-any-return]


def test_every_step_of_any_source_is_as_likely_as_any_other(logs: tuple[Log, Log]):
    sampler = joint(logs)
    assert len(sampler) == 50
    counts = np.bincount([n for _ in range(50) for n in drawn(sampler, 200)], minlength=140)
    assert not counts[20:110].any()
    assert chi_square_is_plausible(np.r_[counts[:20], counts[110:]], np.full(50, 1 / 50))


def test_the_draws_are_those_of_one_view_in_the_order_in_which_they_were_drawn(logs: tuple[Log, Log]):
    batch, places = joint(logs, 3).sample(64), (np.random.default_rng(3).random(64) * 50).astype(int)
    for i, place in enumerate(places.tolist()):
        check(batch, i, step(place if place < 20 else place + 90, source=2 if place < 20 else 1))
    assert batch.counts == {"shown": int((places < 20).sum()), "human": int((places >= 20).sum())}
    keys = np.r_[logs[0].all().keys(), logs[1].by_source("human").keys()]
    assert (
        np.array_equal(batch.steps, keys[places])
        and np.allclose(batch.probabilities, 1 / 50)
        and (batch.weights == 1).all()
    )


def test_joint_elements_follow_the_sources(logs: tuple[Log, Log]):
    batch = joint(logs, n_step=3, discount=1.0).sample(32)
    assert set(batch["n_steps"]) <= {1, 2, 3} and batch["discounts"].shape == (32,)
    first = batch["observations"]["state"][:, 0]
    assert np.array_equal(
        batch["rewards"], first * batch["n_steps"] + [{1: 0, 2: 1, 3: 3}[n] for n in batch["n_steps"].tolist()]
    )


def test_a_mix_of_a_joint_sampler(logs: tuple[Log, Log]):
    def mix() -> Mix:
        return Mix({"online": logs[1].all().sampler(seed=1), "demo": joint(logs, 2)})

    batch = mix().sample(21)
    assert batch.counts == {"online": 11, "demo": 10}
    assert batch["rewards"].astype(int).tolist() == drawn(logs[1].all().sampler(seed=1), 11) + drawn(joint(logs, 2), 10)
    one, other = mix(), mix()
    batches = one.batches(8, keys=["rewards"])
    wanted = mix()
    for _ in range(3):
        assert np.array_equal(next(batches)["rewards"], wanted.sample(8)["rewards"])
    other.load_state(batches.state())
    batches.close()
    assert drawn(one, 9) == drawn(other, 9) == drawn(wanted, 9)


def test_an_empty_source_gives_nothing_and_only_empty_ones_are_an_error(logs: tuple[Log, Log]):
    demos, online = logs
    sampler = JointSampler({"random": online.by_source("random"), "shown": demos.all()}, seed=0)
    assert max(drawn(sampler, 40)) < 20 and sampler.sample(4).counts == {"random": 0, "shown": 4}
    with pytest.raises(EmptyError, match="the sources random of this joint sampler hold no step yet; fill one first"):
        JointSampler({"random": online.by_source("random")}).sample(1)


def test_joint_sampler_prefetch_state_and_stats(logs: tuple[Log, Log]):
    sampler, plain, other = joint(logs, 5), joint(logs, 5), joint(logs, 6)
    batches = sampler.batches(4, keys=["rewards"])
    for _ in range(3):
        assert next(batches)["rewards"].astype(int).tolist() == drawn(plain, 4)
    other.load_state(batches.state())
    batches.close()
    assert drawn(sampler, 5) == drawn(plain, 5) == drawn(other, 5)
    assert set(plain.stats()) == {"shown", "human"}


def test_joint_refuses_incompatible_sources(logs: tuple[Log, Log]):
    with pytest.raises(ConfigError, match="a joint sampler needs at least one source"):
        JointSampler({})
    for options in ({"how": "fifo"}, {"replace": False}, {"limiter": MinSize(1)}):
        with pytest.raises(
            ConfigError, match="the source 'a' of a joint sampler: expected a uniform sampler, with replacement"
        ):
            JointSampler({"a": logs[0].all().sampler(**options)})
    with pytest.raises(ConfigError, match="batch_size: expected at least 1, got 0"):
        joint(logs).sample(0)
    with pytest.raises(
        ConfigError, match=r"this state is of a sampler with .*'shown', 'human'.*, and this one has .*'a'"
    ):
        JointSampler({"a": logs[0].all()}).load_state(joint(logs).state())
