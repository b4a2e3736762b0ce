"""Half of the slots simulate while the policy answers the other half; an episode
that has ended costs nobody anything."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError
from hilt.envs.chunk_executor import ChunkSettings
from hilt.policies.base import Prefix
from hilt.policies.vla.observation_adapters import columns, no_motion
from hilt.policies.vla.small_vla import SmallVLA, SmallVLAConfig
from hilt.replay.tensors import generator
from hilt.value.rollout_watch import CHECKED_SHARE, RolloutValue, RolloutWatch
from hilt.vla.episode import LostEpisode, RolloutEpisode, Start
from hilt.vla.rollout import (
    ChunkAgent,
    ChunkOptions,
    RolloutSettings,
    _Asking,
    check_chunks,
    roll_out,
    roll_out_steps,
)
from tests.value.valued import save_untrained
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


def watched(folder: Path, limit: float, patience: int = 3, seen: str = "observations/state") -> RolloutWatch:
    save_untrained(folder, {seen: 3}, "a/b")
    return RolloutWatch(RolloutValue(str(folder), limit, patience), ["a/b"])


@pytest.mark.parametrize("seen", ["observations/state", "record/state"])
def test_hopeless_episodes_end_early_as_failures_and_make_room_for_others(tmp_path: Path, seen: str):
    # below 0.9999 is every probability; three steps of a hopeless row are reached with the second chunk
    starts = [Start("a/b", "train", state % 10, state, state) for state in range(60)]
    watch = watched(tmp_path / "value", 0.9999, seen=seen)

    def rolled(watch: RolloutWatch | None) -> dict[int, RolloutEpisode]:
        pool, policy = ToyPool(hard=lambda start: 0.95), Dice()
        made = list(roll_out(policy, pool, starts, suite=GAME, generator=generator(0), watch=watch))
        assert pool.idle and {one.start for one in made} == set(starts)
        for one in made:
            assert isinstance(one, RolloutEpisode) and one.rows == len(one.record["tokens"]) == len(one.rewards)
        return {one.start.group: one for one in made}  # type: ignore[union-attr,misc]

    made = rolled(watch)
    stopped = {group for group, one in made.items() if one.stopped_by_value is not None}
    checked = {group for group, one in made.items() if one.outlook is not None and one.outlook.checked}
    chosen = {g for g in range(60) if np.random.default_rng([g, g, 0]).random() < CHECKED_SHARE}
    assert len(stopped) > 30 and stopped.isdisjoint(chosen) and checked and checked <= chosen
    for group in stopped:
        one = made[group]
        assert (one.success, one.truncated, one.executed.tolist()) == (False, True, [2, 2])
        assert 0 < one.stopped_by_value < 1  # type: ignore[operator]
        assert one.outlook is not None and one.outlook.looks == 3 and one.last is not None
    for group in made.keys() - stopped:
        assert made[group].success or made[group].steps == LIMIT
    assert {group: plain(one) for group, one in rolled(watch).items()} == {g: plain(one) for g, one in made.items()}
    alone, watching = rolled(None), rolled(watched(tmp_path / "other", 0.0, seen=seen))
    assert {group: plain(one) for group, one in alone.items()} == {g: plain(one) for g, one in watching.items()}
    assert all(one.outlook is not None and one.stopped_by_value is None for one in watching.values())
    assert all(one.outlook is None for one in alone.values())


def test_an_ill_formed_answer_is_not_judged(tmp_path: Path):
    watch = watched(tmp_path / "value", 0.9999, seen="record/state")
    policy = Dice(lambda seen: "raise" if seen["state"][0] == 3 and seen["state"][1] else "")
    made = list(
        roll_out(
            policy,
            ToyPool(hard=lambda start: 2.0),
            STARTS,
            suite=GAME,
            settings=RolloutSettings(strict=True),
            generator=generator(0),
            watch=watch,
        )
    )
    (ill,) = [one for one in made if isinstance(one, RolloutEpisode) and one.ill_formed]
    assert ill.start.state == 3 and ill.stopped_by_value is None and ill.outlook is not None and ill.outlook.looks == 1


def test_of_a_share_of_the_chunks_that_is_drawn_the_others_are_the_likeliest_and_have_no_log_probability():
    rolled = roll(ToyPool(), starts=40 * STARTS, drawn_share=0.25)
    tokens = np.concatenate([episode.record["tokens"] for episode in rolled])
    logs = np.concatenate([episode.record["log_prob"] for episode in rolled])
    drawn = np.isfinite(logs).all((1, 2))
    assert np.isnan(logs[~drawn]).all() and (tokens[~drawn] == 5).all()
    assert set(tokens[drawn].flatten()) == set(range(10))
    assert abs(drawn.mean() - 0.25) < 0.05, "440 episodes have more than a thousand chunks"
    for episode in rolled:  # each answer is that to its own observation
        assert episode.record["state"][:, 1].tolist() == [0, *np.cumsum(episode.executed)[:-1]]
    assert [plain(one)[1:3] for one in rolled[:5]] != [plain(one)[1:3] for one in roll(ToyPool(), drawn_share=0.5)[:5]]
    assert all(np.isfinite(one.record["log_prob"]).all() for one in roll(ToyPool(), sample=False, drawn_share=0.25))


@pytest.mark.parametrize("head", ["tokens", "gaussian", "flow"])
def test_of_a_drawn_share_of_any_head_the_others_are_what_it_answers_without_sampling(head: str):
    sizes = {"image_size": 16, "state_dim": 1, "action_dim": 1, "chunk": 2, "width": 16, "heads": 2, "depth": 1}
    policy = SmallVLA(SmallVLAConfig(**sizes, keypoints=2, head=head, precision="float32"), seed=0)  # type: ignore[arg-type]
    seen = [
        {
            "full_image": np.full((16, 16, 3), place, np.uint8),
            "state": np.float32([place]),
            "instruction": "go " * place,
        }
        for place in range(1, 31)
    ]
    asking = _Asking(policy, RolloutSettings(drawn_share=0.5), generator(0))
    answers = list(asking(seen))
    likeliest, _ = policy.act(seen, sample=False)
    drawn = np.array([np.isfinite(record["log_prob"]).all() for _, record, _ in answers])
    assert 5 < drawn.sum() < 25 and not any(fault for *_, fault in answers)
    for given, (actions, _, _), was_drawn in zip(likeliest, answers, drawn, strict=True):
        assert np.allclose(actions, given, atol=1e-4) == (not was_drawn)
    again = [actions for actions, _, _ in _Asking(policy, RolloutSettings(drawn_share=0.5), generator(0))(seen)]
    assert np.array_equal(again, [actions for actions, _, _ in answers])


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


STEADY = columns({"state": "state"}, hold=no_motion)


class Planned(Dice):
    """Gives what is planned already, where there is something, and keeps what it was given."""

    chunk, takes_prefix = 4, True

    def __init__(self, max_delay: int = 0):
        super().__init__()
        self.max_delay, self.prefixes = max_delay, list[Prefix | None]()

    def act(self, observations: Any, sample: bool = True, temperature: float = 1.0, generator: Any = None,
            prefix: Prefix | None = None) -> Any:  # fmt: skip
        self.prefixes.append(prefix)
        actions = np.full((1, 4, 1), len(self.prefixes) / 100, np.float32)
        return actions, {"log_prob": actions, "state": np.stack([seen["state"] for seen in observations])}


def by_steps(pool: ToyPool, policy: Any, chunks: ChunkSettings, starts=STARTS, **settings: Any) -> Any:
    chosen = RolloutSettings(**{"sample": False, **settings}, chunks=chunks)
    return list(roll_out_steps(policy, pool, starts, suite=STEADY, settings=chosen, seed=(0, 1)))


def test_step_by_step_without_a_delay_is_as_chunk_by_chunk():
    hard = {"hard": lambda start: 0.5 if start.state % 2 else 2.0}
    stepped = by_steps(ToyPool(slots=4, **hard), Dice(), ChunkSettings(delay=0))
    whole = roll(ToyPool(slots=4, **hard), sample=False)
    stepped.sort(key=lambda pair: pair[0].start.state)
    whole.sort(key=lambda episode: episode.start.state)
    assert [plain(episode) for episode, _ in stepped] == [plain(episode) for episode in whole]
    assert all(agent.execution()["held"] == 0 for _, agent in stepped)


def test_step_by_step_the_arm_holds_while_the_policy_plans():
    pool = ToyPool(slots=2, hard=lambda start: 2.0)
    ((episode, agent),) = by_steps(pool, Dice(), ChunkSettings("synchronous", 2, 1), STARTS[:1])
    assert agent.chunks == [-1, 0, 0, -1, 1, 1] and episode.steps == LIMIT and pool.idle
    assert episode.executed.tolist() == [2, 2] and episode.record["state"][:, 1].tolist() == [0, 3]
    assert agent.execution() == {
        **{"mode": "synchronous", "execute": 2, "delay": 1, "steps": 6.0, "held": 2.0, "late": 0.0},
        **{"idle_share": 1 / 3, "delay_steps": 1.0, "planning_seconds": agent.execution()["planning_seconds"]},
    }
    won = by_steps(ToyPool(slots=2, hard=lambda start: 0.5), Dice(), ChunkSettings(delay=1), STARTS[:1])
    assert (won[0][0].success, won[0][0].steps, won[0][0].executed.tolist()) == (True, 2, [1])
    assert won[0][0].rewards.tolist() == [1.0]


def test_step_by_step_episodes_do_not_depend_on_the_slots():
    def outcomes(slots: int) -> Any:
        chunks = ChunkSettings("asynchronous", 1, 1)
        found = by_steps(ToyPool(slots=slots), Dice(), chunks, sample=True, temperature=0.5)
        return sorted((episode.start.state, plain(episode)[1:]) for episode, _ in found)

    assert outcomes(2) == outcomes(5) and len({repr(each[1]) for each in outcomes(2)}) > 5


def test_step_by_step_a_lost_episode_is_begun_again_and_a_chunk_that_is_not_finite_ends_its_episode():
    once = iter([True])
    pool = ToyPool(lose=lambda start: start.state == 3 and next(once, False), hard=lambda start: 2.0)
    policy = Dice(lambda seen: "nan" if seen["state"][0] == 5 and seen["state"][1] >= 2 else "")
    found = {episode.start.state: episode for episode, _ in by_steps(pool, policy, ChunkSettings(delay=0), retries=1)}
    assert sorted(found) == list(range(11)) and found[3].steps == LIMIT
    assert "of the chunk of 2 that the policy planned is [nan]" in found[5].ill_formed
    assert (found[5].steps, found[5].success, found[5].executed.tolist()) == (2, False, [2, 0])


def test_step_by_step_rtc_gives_the_policy_its_prefix():
    policy = Planned()
    by_steps(ToyPool(slots=2, hard=lambda start: 2.0), policy, ChunkSettings("rtc", 2, 1), STARTS[:1])
    first, second, *_ = policy.prefixes
    assert first is None and second is not None
    assert second.actions.dtype == np.float32 and second.actions.shape == (1, 2, 1)
    assert second.frozen.dtype == np.int64 and second.frozen.tolist() == [1]


@pytest.mark.parametrize(
    ("policy", "chunks", "sample", "text"),
    [
        (Dice(), ChunkSettings("rtc", 1, 1), False, "mode=rtc: this Dice cannot continue a chunk. Take asynchronous"),
        (Planned(), ChunkSettings("rtc", 1, 1), True, "mode=rtc with sampled actions: this Planned is guided toward"),
        (Dice(), ChunkSettings(execute=3, delay=0), False, "execute=3: this policy answers with 2 actions; give 1 to"),
        (Dice(), ChunkSettings(), False, "the simulators of a pool wait for the policy; give a number of control"),
    ],
)
def test_what_a_policy_cannot_do_with_its_chunks_is_refused(policy: Any, chunks: Any, sample: bool, text: str):
    with pytest.raises(ConfigError, match=text):
        by_steps(ToyPool(), policy, chunks, sample=sample)


def test_a_delay_is_refused_where_it_is_not_known_how_the_arm_holds():
    text = "delay=2: an arm holds until the policy has answered, and how it does is not known"
    with pytest.raises(ConfigError, match=text):
        check_chunks(Dice(), GAME, ChunkSettings(delay=2))
    check_chunks(Dice(), GAME, ChunkSettings(delay=0))


def test_options_that_are_not_given_are_left_to_the_run_and_its_task():
    assert ChunkOptions().settings(execute=4, real_time=True) is None
    assert ChunkOptions("rtc").settings(execute=4) == ChunkSettings("rtc", 4, 0)
    assert ChunkOptions("rtc", execute=0).settings(execute=4, real_time=True) == ChunkSettings("rtc", 0, None)
    assert ChunkOptions(delay=2).settings(real_time=True) == ChunkSettings("synchronous", 0, 2)


def test_an_agent_without_an_instruction_has_that_of_each_episode():
    words = []

    class Reading(Dice):
        def act(self, observations: Any, *rest: Any, **named: Any) -> Any:
            words.append(observations[0]["instruction"])
            return super().act(observations, *rest, **named)

    seen = {"state": np.zeros(3, np.float32)}
    for given in ("", "win"):
        with contextlib.closing(ChunkAgent(Reading(), STEADY, given)) as agent:
            for instruction in ("turn it up", "turn it down"):
                agent.begin(instruction)
                agent.sample_actions(seen, argmax=True)
    assert words == ["turn it up", "turn it down", "win", "win"]


def test_an_agent_in_real_time_holds_until_the_policy_has_answered():
    gate, done = threading.Event(), threading.Event()

    class Slow(Dice):
        def act(self, observations: Any, *rest: Any, **named: Any) -> Any:
            assert gate.wait(60), "the control loop waits for the policy"
            try:
                return super().act(observations, *rest, **named)
            finally:
                done.set()

    suite = replace(STEADY, command=lambda actions: 10 * actions, hold=lambda raw, last, size: np.full(size, -0.1))
    with contextlib.closing(ChunkAgent(Slow(), suite, "win", ChunkSettings("asynchronous"))) as agent:
        seen = {"state": np.zeros(3, np.float32)}
        assert [float(agent.sample_actions(seen, argmax=True)[0]) for _ in range(3)] == [-1, -1, -1]
        gate.set()
        assert done.wait(60)
        deadline = time.monotonic() + 60
        while agent.chunks[-1] < 0 and time.monotonic() < deadline:
            action = agent.sample_actions(seen, argmax=True)
        assert float(action[0]) == 5 and agent.chunks[:3] == [-1] * 3 and agent.chunks[-1] == 0
        assert agent.execution()["delay"] is None and agent.execution()["delay_steps"] >= 3
