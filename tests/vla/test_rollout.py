"""Half of the slots simulate while the policy answers the other half; an episode that has ended costs nobody anything."""

from __future__ import annotations

import numpy as np
import pytest

from hilt.core.errors import ConfigError
from hilt.replay.tensors import generator
from hilt.vla.episode import LostEpisode, RolloutEpisode, Start
from hilt.vla.rollout import RolloutSettings, roll_out
from tests.vla.toy_pool import GAME, LIMIT, Dice, ToyPool

STARTS = [Start("a/b", "train", state, 0, state) for state in range(11)]


def roll(pool, policy=None, starts=STARTS, stop=lambda: False, **settings):
    chosen = RolloutSettings(**settings)
    return list(
        roll_out(policy or Dice(), pool, starts, suite=GAME, settings=chosen, generator=generator(0), stop=stop)
    )


def plain(episode):
    arrays = {name: array.tolist() for name, array in episode.record.items()}
    return (
        episode.start,
        arrays,
        episode.executed.tolist(),
        episode.rewards.tolist(),
        episode.success,
        episode.steps,
        episode.truncated,
    )


def test_every_start_is_rolled_out_once_and_the_policy_is_asked_for_no_row_more():
    policy, pool = Dice(), ToyPool(slots=4)
    episodes = roll(pool, policy)
    assert sorted(episode.start.state for episode in episodes) == list(range(11)) and pool.idle
    assert policy.asked == sum(episode.rows for episode in episodes)
    for episode in episodes:
        assert episode.steps == episode.executed.sum() and len(episode.rewards) == episode.rows == len(
            episode.record["tokens"]
        )
        assert episode.success == (episode.rewards.sum() == 1) and episode.truncated == (not episode.success)
        assert episode.truncated == (episode.steps == LIMIT and not episode.success)
        assert episode.instruction == "win" and episode.last["state"][1] == episode.steps
        # the row of each chunk has the observation that it was an answer to
        assert episode.record["state"][:, 1].tolist() == [0, *np.cumsum(episode.executed)[:-1]]
    assert {episode.success for episode in episodes} == {True, False}
    assert any(episode.executed[-1] == 1 for episode in episodes if episode.success), "a win ends a chunk early"


def test_it_is_repeated_bit_for_bit_and_the_generator_matters():
    assert [plain(episode) for episode in roll(ToyPool())] == [plain(episode) for episode in roll(ToyPool())]
    other = roll_out(Dice(), ToyPool(), STARTS, suite=GAME, generator=generator(1))
    assert [plain(episode) for episode in other] != [plain(episode) for episode in roll(ToyPool())]


def test_one_half_has_its_orders_before_the_other_is_waited_for():
    pool = ToyPool(slots=4, hard=lambda start: 2.0)
    roll(pool, starts=STARTS[:4])
    assert pool.calls[:4] == [("start", slot) for slot in range(4)]
    wave = [("collect", (0, 1)), ("step", 0), ("step", 1), ("collect", (2, 3)), ("step", 2), ("step", 3)]
    assert pool.calls[4:] == wave * (LIMIT // 2) + [("collect", (0, 1)), ("collect", (2, 3))]


def test_rows_at_once_and_execute():
    sizes: list[int] = []

    class Counted(Dice):
        def act(self, observations, *rest, **named):
            sizes.append(len(observations))
            return super().act(observations, *rest, **named)

    roll(ToyPool(slots=8), Counted(), rows_at_once=3)
    assert max(sizes) == 3
    short = roll(ToyPool(hard=lambda start: 2.0), execute=1)
    assert all(episode.executed.tolist() == [1] * LIMIT for episode in short)
    with pytest.raises(ConfigError, match="execute=3: this policy answers with 2 actions; give 1 to 2, or 0 for all"):
        roll(ToyPool(), execute=3)


def test_a_lost_episode_is_begun_again_and_then_reported():
    pool = ToyPool(lose=lambda start: start.state == 3)
    lost = [outcome for outcome in roll(pool, retries=2) if isinstance(outcome, LostEpisode)]
    assert [(one.start.state, one.error) for one in lost] == [(3, "Traceback: the simulator of the toy fell over")]
    assert sum(start.state == 3 for start in pool.started) == 3
    once = iter([True])
    assert all(
        isinstance(outcome, RolloutEpisode)
        for outcome in roll(ToyPool(lose=lambda start: next(once, False)), retries=1)
    )


@pytest.mark.parametrize(
    ("fault", "words"),
    [("nan", "not finite"), ("token", "token 99 is none of the action tokens 0 to 9"), ("raise", "gone")],
)
def test_an_ill_formed_chunk_ends_its_episode_and_no_other(fault, words):
    policy = Dice(lambda seen: fault if seen["state"][0] == 5 and seen["state"][1] >= 2 else "")
    episodes = roll(ToyPool(hard=lambda start: 2.0), policy, strict=True)
    bad = [episode for episode in episodes if episode.ill_formed]
    assert [episode.start.state for episode in bad] == [5] and words in bad[0].ill_formed
    assert (bad[0].rows, bad[0].steps, bad[0].success, bad[0].truncated) == (1, 2, False, False), (
        "the chunk was not carried out"
    )
    assert all(episode.steps == LIMIT for episode in episodes if not episode.ill_formed)


def test_without_strict_a_token_is_carried_out_and_an_exception_is_raised():
    episodes = roll(ToyPool(hard=lambda start: 20.0), Dice(lambda seen: "token" if seen["state"][0] == 5 else ""))
    bad = next(episode for episode in episodes if episode.ill_formed)
    assert bad.steps == LIMIT
    failed = roll(ToyPool(), Dice(lambda seen: "nan" if seen["state"][0] == 5 else ""))
    assert next(episode for episode in failed if episode.ill_formed).executed.tolist() == [0], (
        "one row, of which nothing was carried out"
    )
    pool = ToyPool()
    with pytest.raises(RuntimeError, match="the dice are gone"):
        roll(pool, Dice(lambda seen: "raise"))
    assert pool.idle


def test_closed_or_stopped_it_leaves_the_pool_free():
    pool = ToyPool()
    rollouts = roll_out(Dice(), pool, STARTS, suite=GAME, generator=generator(0))
    next(rollouts)
    rollouts.close()
    assert pool.idle
    asked = iter([False] * 4 + [True] * 100)
    assert len(roll(pool, stop=lambda: next(asked))) < len(STARTS) and pool.idle
    assert len(roll(pool)) == len(STARTS)
