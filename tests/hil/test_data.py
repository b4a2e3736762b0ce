"""What a learner draws from: exact halves, views instead of copies, n-step sums and
masks, cached features, imports that happen once."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.algos.config import Rlpd
from hilt.core.checksums import read_json, write_json
from hilt.core.errors import ConfigError, EmptyError, SchemaError, StorageError
from hilt.core.tree import flatten
from hilt.core.unpickle import dump
from hilt.hil.data import Experience, Foresight
from hilt.hil.stream.ended_episodes import episode_figures
from hilt.policies.agent.agent import Agent
from hilt.recording.recording_folder import columns_of
from hilt.replay import Edits, Log
from hilt.replay.schema import spec_of_space
from hilt.replay.snapshot import Snapshot
from hilt.value.online_value import OnlineValue
from hilt.value.value_model import load_value_model
from tests.hil.toy_run import IMAGES, NO_CHUNK, config, demonstrations, episode, fill, spaces
from tests.value.valued import save_untrained


def agent_for(settings: Any, images: bool = False) -> Agent:
    env = spaces(images)
    return Agent.make(spec_of_space(env.observation_space, ""), env.action_space, settings.agent, seed=0)


def experience_for(run: Path, images: bool = False, said: list[str] | None = None, **changes: Any) -> Experience:
    settings = config(**changes)
    run.mkdir(exist_ok=True)
    return Experience(
        run, settings, spaces(images), agent_for(settings, images), (said if said is not None else []).append
    )


@pytest.fixture
def filled(memory_path: Path) -> Any:
    """Six online episodes, in which a person acts on steps 1 and 2 and is lost on 2; four demonstrations."""
    shown = demonstrations(memory_path / "shown", range(50, 54))
    experience = experience_for(memory_path / "run", demo_path=[str(shown)], n_step=1)
    fill(experience.log, range(6), human=(1, 2), lost=(2,))
    yield experience
    experience.close()


def identity(batch: Any) -> list[tuple[float, ...]]:
    return [tuple(row) for row in batch["observations"]["state"]["point"].tolist()]


def known(number: int, **options: Any) -> dict[tuple[float, ...], dict[str, Any]]:
    return {tuple(step["observations"]["state"]["point"].tolist()): step for step in episode(number, **options)}


@pytest.mark.parametrize("frozen", [False, True])
def test_a_grippers_penalty_is_summed_over_the_same_steps_as_the_reward(memory_path: Path, frozen: bool):
    """Its critic bootstraps n steps later: what its moves in between cost belongs to the return, as the reward does."""
    agent = {"setup_mode": "single-arm-learned-gripper", **({"encoder": IMAGES} if frozen else {})}
    experience = experience_for(memory_path / "run", frozen, n_step=3, agent=agent)
    costs, discount = {}, experience._config.agent.rlpd.discount
    for number in (0, 1):
        with experience.log.episode(actor="toy", boot="1", store="actor_env") as running:
            steps = [
                {**step, "grasp_penalty": np.float32(-1 - t)} for t, step in enumerate(episode(number, images=frozen))
            ]
            for t, step in enumerate(steps):
                running.append(step)
                costs[step["actions"].tobytes()] = [-1.0 - later for later in range(t, 5)][:3]
    expected = {actions: sum(discount**i * cost for i, cost in enumerate(each)) for actions, each in costs.items()}
    batch = experience.sample(32)
    np.testing.assert_allclose(batch["grasp_penalty"], [expected[row.tobytes()] for row in batch["actions"]], rtol=1e-6)
    experience.close()


def test_experience_with_a_classifier_keeps_task_success(memory_path: Path):
    """A run that an older version began without this column goes on, and knows nothing of what was before."""
    older = experience_for(memory_path / "run")
    fill(older.log, range(1))
    older.close()
    experience = experience_for(memory_path / "run", classifier="folder")
    for number, truth in ((1, 1), (2, 0)):
        with experience.log.episode(actor="toy", boot="1", store="actor_env") as running:
            for step in episode(number):
                running.append({**step, "task_success": np.int8(truth)})
    told = [(one["success"], one["task_success"]) for one in experience.finished()]
    assert told == [(True, None), (False, True), (True, False)]
    experience.close()


@pytest.mark.parametrize("batch_size", [16, 15])
def test_every_batch_is_half_and_half_by_exact_count(filled: Experience, batch_size: int):
    steps = {point: step for number in range(6) for point, step in known(number, human=(1, 2), lost=(2,)).items()}
    shown = {point for number in range(50, 54) for point in known(2 * number)}
    drawn: Counter[str] = Counter()
    for _ in range(300):
        batch = filled.sample(batch_size)
        points, online = identity(batch), (batch_size + 1) // 2  # of an odd number the larger half
        assert batch["demo"].tolist() == [False] * online + [True] * (batch_size - online)
        assert all(point in steps for point in points[:online])  # all of the log is online, what a person did too
        for point, source in zip(points[online:], batch["source"][online:], strict=True):
            assert (point in shown and source == 2) or (
                steps[point]["source"] == 1 and not steps[point]["lost"] and source == 1
            )
            drawn["human" if source == 1 else "demo"] += 1
        drawn["human online"] += int((batch["source"][:online] == 1).sum())
        drawn["lost online"] += sum(bool(steps[point]["lost"]) for point in points[:online])
    share = drawn["human"] / (drawn["human"] + drawn["demo"])
    # six steps that a person did, twenty that were shown: each as likely as any other
    assert abs(share - 6 / 26) < 0.04
    assert drawn["human online"] and drawn["lost online"]
    assert filled.counts() == {"log_steps": 30, "demo_steps": 26, "human_steps": 6}


def test_demo_share_of_a_batch(memory_path: Path):
    """Also with the returns of the log, which Cal-QL needs: those of demonstrations, which succeed, are known."""
    shown = demonstrations(memory_path / "shown", range(50, 54))
    calibrated = {"rlpd": {"conservative": 1.0, "discount": 0.5}}
    for share, online in ((0.5, 8), (0.25, 12), (0.0, 16)):
        run = memory_path / f"run-{online}"
        experience = experience_for(run, demo_path=[str(shown)], demo_share=share, agent=calibrated)
        fill(experience.log, range(4))
        batch = experience.sample(16)
        assert batch["demo"].tolist() == [False] * online + [True] * (16 - online)
        steps = {point: t for number in (50, 51, 52, 53) for t, point in enumerate(known(2 * number))}
        for i, point in enumerate(identity(batch)):
            if point in steps:
                assert batch["returns"][i] == 0.5 ** (4 - steps[point])
            else:  # an odd episode ran out of time
                assert np.isfinite(batch["returns"][i]) == (point[0] % 2 == 0)
        experience.close()


def test_experience_other_parts_and_missing_ones(memory_path: Path):
    said: list[str] = []
    experience = experience_for(memory_path / "run", said=said)
    with pytest.raises(EmptyError, match="no online step to draw yet"):
        experience.sample(4)
    fill(experience.log, range(2))
    with pytest.raises(EmptyError, match="no demonstrations or take-overs to learn from: give some with demo_path"):
        experience.sample(4, "demo")
    assert not experience.sample(4)["demo"].any() and not experience.sample(4)["demo"].any()
    assert sum("all online" in line for line in said) == 1
    fill(experience.log, range(2, 3), human=(0,))
    assert experience.sample(5)["demo"].tolist() == [False, False, False, True, True]
    assert set(experience.sample(6, "demo")["source"]) == {1}
    with pytest.raises(EmptyError, match="no demonstrations to learn from"):
        experience.sample(4, "demonstrations")
    experience.close()


@pytest.mark.parametrize("frozen", [False, True])
def test_batches_made_ahead_are_those_of_one_after_the_other(memory_path: Path, frozen: bool):
    """Whatever is asked for in between, whatever a thread had made that nobody took,
    and in a process that goes on from a state."""
    shown = demonstrations(memory_path / "shown", range(50, 52), images=frozen)
    changes = {"demo_path": [str(shown)], "n_step": 2, **({"agent": {"encoder": IMAGES}} if frozen else {})}
    ahead, plain = (experience_for(memory_path / name, frozen, **changes) for name in ("ahead", "plain"))
    for each in (ahead, plain):
        fill(each.log, range(4), images=frozen, human=(1,))
        each.collect([0, 2])
    asked = [(16, "both")] * 4 + [(5, "demo")] * 2 + [(5, "demonstrations"), (8, "collected")] + [(16, "both")] * 2

    def same(one: Any, other: Any) -> bool:
        ours, theirs = flatten(one), flatten(other)
        return ours.keys() == theirs.keys() and all(np.array_equal(ours[path], theirs[path]) for path in ours)

    for size, part in asked:
        images = frozen and part != "demo"  # those of numbers are made when they are asked for
        assert same(ahead.next_batch(size, part, images), plain.sample(size, part, images))
        assert ahead.state() == plain.state() and (ahead._ahead is not None) == images
    state = ahead.state()
    ahead.close()
    again = experience_for(memory_path / "ahead", frozen, **changes)
    again.load_state(state)
    assert same(again.next_batch(16, "both", frozen), plain.sample(16, "both", frozen))
    with pytest.raises(EmptyError, match="there are no demonstrations or take-overs"):
        experience_for(memory_path / "empty", frozen, **({"agent": changes["agent"]} if frozen else {})).next_batch(
            4, "demo"
        )
    assert same(again.next_batch(16, "both", frozen), plain.sample(16, "both", frozen))
    again.close()
    plain.close()


@pytest.mark.parametrize(("n", "chunk"), [(1, False), (3, False), (3, True)])
def test_rewards_of_n_steps_masks_and_where_they_end(memory_path: Path, n: int, chunk: bool):
    experience = experience_for(memory_path / "run", **({"agent": {"chunk": n}} if chunk else {"n_step": n}))
    more = NO_CHUNK if chunk else {}
    fill(experience.log, range(4), more=more)
    running = experience.log.episode(actor="toy", boot="1", store="actor_env")
    # one that goes on: what is there of it bootstraps from where it stands
    for step in itertools.islice(episode(4, more=more), 2):
        running.append(step)
    batch, discount = experience.sample(200), 0.97
    steps = {point: (number, t) for number in range(5) for t, point in enumerate(known(number))}
    assert {steps[point] for point in identity(batch)} == {
        (number, t) for number in range(5) for t in range(2 if number == 4 else 5)
    }
    for i, point in enumerate(identity(batch)):
        number, t = steps[point]
        whole = list(episode(number))[: 2 if number == 4 else 5]
        k = min(n, len(whole) - t)
        last = whole[t + k - 1]
        assert batch["rewards"][i] == np.float32(sum(discount**j * float(whole[t + j]["rewards"]) for j in range(k)))
        # a time limit bootstraps
        assert batch["n_steps"][i] == k and batch["masks"][i] == (0.0 if last["terminated"] else 1.0)
        assert (batch["next_observations"]["state"]["point"][i] == last["next_observations"]["state"]["point"]).all()
        if chunk:  # all actions of the chunk; behind its end the last one is repeated
            executed = [whole[t + min(j, k - 1)]["actions"] for j in range(n)]
            assert np.array_equal(batch["actions"][i], np.stack(executed)) and batch["source"].shape == (200, n)
    assert set(batch["masks"]) == {0.0, 1.0} and batch["masks"].dtype == np.float32
    experience.close()


def test_states_are_made_once_for_each_frame_and_forgotten_with_it(memory_path: Path):
    shown = demonstrations(memory_path / "shown", range(50, 52), images=True)
    encoder = {"agent": {"encoder": IMAGES}}
    experience = experience_for(
        memory_path / "run", True, demo_path=[str(shown)], replay_buffer_capacity=30, n_step=2, **encoder
    )
    frames, made = 0, experience._agent.states

    def counted(seen: Any, shift: int = 0) -> Any:
        nonlocal frames
        frames += len(seen["images/front"])
        return made(seen, shift)

    def state(seen: Any) -> Any:
        return made({"images/front": seen["images"]["front"][None], "state/point": seen["state"]["point"][None]})[0]

    for kept in experience._kept.values():
        kept._states = counted
    fill(experience.log, range(3), images=True)
    for _ in range(20):
        batch = experience.sample(32)
        assert set(batch["observations"]) == {"z"}
    assert frames == 3 * 6 + 2 * 6  # five steps have six frames
    plain = experience.sample(32, images=True)
    for which in ("observations", "next_observations"):
        assert plain[which]["images"]["front"].shape == (32, 32, 32, 3)
    lookup = {
        tuple(step["observations"]["state"]["point"]): step
        for number in range(3)
        for step in episode(number, images=True)
    }
    for i in np.flatnonzero(~batch["demo"]):
        z = batch["observations"]["z"][i]  # four features, then the point
        assert (z == state(lookup[tuple(z[4:])]["observations"])).all()
    fill(experience.log, range(3, 20), images=True)
    batch = experience.sample(64)
    assert len(experience._kept["log"]) == len(experience.log) <= 30
    assert len(experience._kept["log"].table.before) <= 2 * 30
    last = {
        tuple(s["next_observations"]["state"]["point"]): s
        for number in range(14, 20)
        for s in episode(number, images=True)
    }
    for i in np.flatnonzero(~batch["demo"]):
        z = batch["next_observations"]["z"][i]
        assert (z == state(last[tuple(z[4:])]["next_observations"])).all()
    experience.close()


def test_capacity_and_what_is_counted(memory_path: Path):
    experience = experience_for(memory_path / "run", replay_buffer_capacity=20)
    fill(experience.log, range(10))
    assert experience.counts()["log_steps"] == 20 and experience.total == 50
    state = experience.state()
    fill(experience.log, range(10, 11))
    experience.close()
    again = experience_for(memory_path / "run", replay_buffer_capacity=10)
    assert again.counts()["log_steps"] == 10
    again.load_state(state)
    assert again.total == 55  # those that came after that state are counted
    fill(again.log, range(11, 12))
    assert again.counts()["log_steps"] == 10 and again.total == 60
    again.close()


# Importing


def transitions(number: int, **options: Any) -> list[dict[str, Any]]:
    """An episode as HIL-SERL pickles it."""
    keep = ("observations", "actions", "rewards", "next_observations")
    return [
        {
            **{name: step[name] for name in keep},
            "masks": 1.0 - step["terminated"],
            "dones": bool(step["terminated"] or step["truncated"]),
        }
        for step in episode(number, **options)
    ]


def pickled(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        dump(rows, file)
    return path


def test_demonstrations_in_any_format_once(memory_path: Path):
    shown = demonstrations(memory_path / "recording" / "log", range(50, 52))
    pickled(memory_path / "pkl" / "a_1_demos_now.pkl", transitions(0) + transitions(2))
    pickled(memory_path / "pkl" / "b_1_demos_now.pkl", transitions(4))
    said: list[str] = []
    # one of them twice
    paths = [str(shown.parent), str(memory_path / "pkl" / "*.pkl"), f"{memory_path}/pkl/../pkl/a_1_demos_now.pkl"]
    experience = experience_for(memory_path / "run", said=said, demo_path=paths)
    assert len(experience.demos) == 10 + 15
    columns = experience.demos.read(experience.demos.all().keys())
    # two said so in their facts
    assert columns["succeed"].sum() == 2 and not columns["lost"].any() and set(columns["source"]) == {2}
    assert [line.split()[0] for line in said if "imported" in line] == ["10", "10", "5"]
    experience.close()
    shutil.rmtree(memory_path / "pkl")
    again = experience_for(memory_path / "run", said=said, demo_path=paths)
    assert len(again.demos) == 25 and sum("imported" in line for line in said) == 3
    again.close()
    with pytest.raises(
        ConfigError, match=r"demo_path was .* when .*run began, and is nothing now; it is imported once"
    ):
        experience_for(memory_path / "run")


def test_a_filter_chooses_the_demonstrations_that_are_imported(memory_path: Path):
    shown, own = demonstrations(memory_path / "shown", range(50, 54)), memory_path / "run" / "demonstrations"
    with Log.open(shown) as log:
        Edits(log).tag([1, 3], "good")
    demonstrations(own / "log", range(60, 63))
    paths = [str(shown), str(own / "log")]
    experience = experience_for(memory_path / "run", demo_path=paths, demo_where="tag=good")
    assert len(experience.demos) == 2 * 5 + 3 * 5, "what the run itself has recorded is not filtered"
    experience.close()
    with pytest.raises(ConfigError, match=r"demo_where was tag=good when .*run began, and is nothing now"):
        experience_for(memory_path / "run", demo_path=paths)
    with pytest.raises(ConfigError, match=r"where='tag=rare' chooses none of the 4 episodes of .*shown"):
        experience_for(memory_path / "none", demo_path=paths[:1], demo_where="tag=rare")
    older = experience_for(memory_path / "older", demo_path=paths[:1])
    older.close()
    for name in ("demos", "log"):  # as a run of an older version has it
        imported = memory_path / "older" / f"imported_{name}.json"
        write_json(imported, {key: one for key, one in read_json(imported).items() if key != "demo_where"})
    experience_for(memory_path / "older", demo_path=paths[:1]).close()


@pytest.mark.parametrize("frozen", [False, True])
def test_batches_have_the_dense_reward_and_the_log_has_that_of_the_task(memory_path: Path, frozen: bool):
    model = save_untrained(memory_path / "value", {"observations/state/point": 3})
    changes: dict[str, Any] = {"value": {"model": str(model), "reward": 1.0}, "n_step": 2}
    changes["agent"] = {"rlpd": {"conservative": 1.0}, **({"encoder": IMAGES} if frozen else {})}
    experience, discount = experience_for(memory_path / "run", frozen, **changes), config(**changes).agent.rlpd.discount
    assert experience.log.schema.columns["shaping_reward"].default == 0
    rewards, came, wanted = {}, {}, []
    for number in (0, 2):
        with experience.log.episode(actor="toy", boot="1", store="actor_env") as running:
            steps = [{**s, "shaping_reward": np.float32(t / 8)} for t, s in enumerate(episode(number, images=frozen))]
            for t, step in enumerate(steps):
                running.append(step)
                sums = [float(s["rewards"]) + k / 8 for k, s in enumerate(steps)][t:]
                rewards[step["actions"].tobytes()] = sum(discount**i * one for i, one in enumerate(sums[:2]))
                came[step["actions"].tobytes()] = sum(discount**i * one for i, one in enumerate(sums))
        wanted.append(np.mean([came[step["actions"].tobytes()] for step in steps]))
    batch = experience.sample(32)
    assert "shaping_reward" not in batch
    acted = [row.tobytes() for row in batch["actions"]]
    np.testing.assert_allclose(batch["rewards"], [rewards[each] for each in acted], rtol=1e-5)
    if not frozen:
        np.testing.assert_allclose(batch["returns"], [came[each] for each in acted], rtol=1e-5)
    found = list(experience.finished())
    assert [one["return"] for one in found] == [1.0, 1.0], "what is shown is the return of the task"
    assert [one["return_to_go"] for one in found] == pytest.approx(wanted), "what Q is compared with is not"
    experience.close()


def test_an_episode_that_a_value_model_ended_has_that_as_a_fact(memory_path: Path):
    model = save_untrained(memory_path / "value", {"observations/state/point": 3})
    experience = experience_for(memory_path / "run", value={"model": str(model), "stop_below": 0.1})
    fill(experience.log, range(1), more={"stopped_by_value": np.float32(0.04)})
    fill(experience.log, range(1, 2), more={"stopped_by_value": np.float32(-1)})
    for one in experience.finished():
        experience.note_outcome(one["trajectory"], one["success"])
    ended, other = (experience.log.facts.about(number) for number in experience.log.trajectories())
    assert ended["stopped_by_value"] == pytest.approx(0.04) and "stopped_by_value" not in other
    experience.close()


def test_a_log_with_a_dense_reward_in_its_rewards_goes_on_with_it_in_a_column(memory_path: Path):
    """As an older version has written it: what is learned from stays the same."""
    older = experience_for(memory_path / "run")
    fill(older.log, range(2))
    older.close()
    model = save_untrained(memory_path / "value", {"observations/state/point": 3})
    experience = experience_for(memory_path / "run", value={"model": str(model), "reward": 1.0})
    fill(experience.log, range(2, 4), more={"shaping_reward": np.float32(0.5)})
    read = experience.log.read(experience.log.all().keys(), ["rewards", "shaping_reward"])
    assert read["shaping_reward"].tolist() == [0.0] * 10 + [0.5] * 10
    assert set(np.round(experience.sample(64)["rewards"], 3)) <= {0.0, 1.0, 0.5, 1.5}
    experience.close()


def test_imported_demonstrations_get_the_dense_reward_of_the_value_model_beside_their_own(memory_path: Path):
    shown = demonstrations(memory_path / "shown", range(50, 52))
    model = save_untrained(memory_path / "value", {"observations/state/point": 3})
    changes: dict[str, Any] = {"value": {"model": str(model), "reward": 1.0}}
    experience = experience_for(memory_path / "run", demo_path=[str(shown)], **changes)
    columns = experience.demos.read(experience.demos.all().keys())
    with Log.open(shown, "r") as log:
        plain = log.read(log.all().keys())
    value = OnlineValue(load_value_model(model))
    before, after = (
        value.of_columns({"state/point": columns[name]["state"]["point"]}, [""] * 10)[0]
        for name in ("observations", "next_observations")
    )
    discount = config(**changes).agent.rlpd.discount
    want = discount * after * ~plain["terminated"].astype(bool) - before
    np.testing.assert_allclose(columns["shaping_reward"], want, rtol=1e-5, atol=1e-6)
    assert columns["rewards"].tolist() == plain["rewards"].tolist()
    experience.close()
    # in another run such a log is as good as the demonstrations themselves
    demos = [str(memory_path / "run" / "demos")]
    for run, given in (("plain", {}), ("again", {"value": {"model": str(model), "reward": 2.0}})):
        other = experience_for(memory_path / run, demo_path=demos, **given)
        read = other.demos.read(other.demos.all().keys())
        assert read["rewards"].tolist() == plain["rewards"].tolist()
        if given:
            np.testing.assert_allclose(read["shaping_reward"], 2 * want, rtol=1e-5, atol=1e-6)
        else:
            assert "shaping_reward" not in read
        other.close()
    with Log.open(shown) as log:  # one of an older version, whose rewards have it
        for number in log.trajectories():
            log.annotate(number, shaped_by="value")
    with pytest.raises(ConfigError, match="an older version of Hilt has added the dense reward of value to its"):
        experience_for(memory_path / "older", demo_path=[str(shown)], **changes)


def test_experience_imports_both_buffers_of_hil_serl(memory_path: Path):
    folder = memory_path / "checkpoint"
    pickled(folder / "buffer" / "transitions_10.pkl", transitions(0) + transitions(1))
    # two of them are among the actor's
    pickled(folder / "demo_buffer" / "transitions_10.pkl", transitions(0)[1:3] + transitions(8))
    said: list[str] = []
    experience = experience_for(memory_path / "run", said=said, checkpoint_path=str(folder))
    assert experience.counts() == {"log_steps": 10, "demo_steps": 7, "human_steps": 2} and len(experience.demos) == 5
    assert experience.total == 10 and list(experience.finished()) == []  # they are no episodes of this run
    assert any("10 steps imported" in line and line.endswith(", buffer") for line in said)
    assert any("5 steps imported" in line and line.endswith(", demo_buffer") for line in said)
    experience.close()
    again = experience_for(memory_path / "run", said=said, checkpoint_path=str(folder))
    assert len(again.log) == 10 and len(again.demos) == 5
    again.close()
    with pytest.raises(ConfigError, match=r"expected a folder of HIL-SERL's with buffer/ or demo_buffer/"):
        experience_for(memory_path / "other", checkpoint_path=str(memory_path / "run"))


def killed_at_its_third_episode(run: Path, shown: Path) -> None:
    added, count = Log.add, itertools.count(1)

    def add(log: Log, *given: Any, **named: Any) -> int:
        if next(count) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return added(log, *given, **named)

    Log.add = add  # type: ignore[method-assign]
    experience_for(run, demo_path=[str(shown)])


def test_an_import_that_was_killed_is_made_again_as_a_whole(memory_path: Path):
    shown = demonstrations(memory_path / "shown", range(50, 54))
    child = multiprocessing.get_context("fork").Process(
        target=killed_at_its_third_episode, args=(memory_path / "run", shown)
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL and not (memory_path / "run" / "demos").exists()
    experience = experience_for(memory_path / "run", demo_path=[str(shown)])
    assert len(experience.demos) == 20
    experience.close()


def test_experience_refuses_what_does_not_fit(memory_path: Path):
    with pytest.raises(StorageError, match=r"demo_path has .*nothing.*pkl, and there is no such file"):
        experience_for(memory_path / "a", demo_path=[str(memory_path / "nothing*.pkl")])
    wide = pickled(memory_path / "wide.pkl", [{**row, "actions": np.zeros(3, np.float32)} for row in transitions(0)])
    with pytest.raises(
        SchemaError, match=r"wide.pkl: actions is float32 \(3,\), and this run's task has float32 \(2,\)"
    ):
        experience_for(memory_path / "b", demo_path=[str(wide)])
    lacking = pickled(memory_path / "lacking.pkl", transitions(0))
    with pytest.raises(SchemaError, match=r"lacking.pkl has no observations/images/front, which this run's task has"):
        experience_for(memory_path / "c", True, demo_path=[str(lacking)])
    with pytest.raises(SchemaError, match="has no grasp_penalty"):
        experience_for(memory_path / "d", demo_path=[str(lacking)], agent={"setup_mode": "single-arm-learned-gripper"})
    experience_for(memory_path / "e").close()
    with pytest.raises(ConfigError, match="is of another task or setting: observations/images/front: added"):
        experience_for(memory_path / "e", True)


def test_experience_reports_an_episode_cut_by_a_restart_once(memory_path: Path):
    experience = experience_for(memory_path / "run")
    steps = list(episode(2, human=(1, 3)))
    running = experience.log.episode(actor="a", boot="1", store="actor_env")
    for number, step in enumerate(steps[:3]):
        running.append(step, sequence=number)
    assert list(experience.finished()) == []
    running.end()  # as a restart does
    running = experience.log.episode(actor="a", boot="1", store="actor_env")
    for number, step in enumerate(steps[3:], 3):
        running.append(step, sequence=number)
    (told,) = experience.finished()
    assert told == {
        "trajectory": running.trajectory,
        "success": True,
        "return": 1.0,
        "return_to_go": pytest.approx(np.mean(0.97 ** np.arange(5))),
        "cut_share": 0.0,
        "length": 5,
        "seconds": 4.5,
        "intervention_steps": 2,
        "success_alone": None,
        "intervention_count": 2,
        "lost_steps": 0,
        "actor": "a",
    }
    cut = {
        "rewards": np.ones(2),
        "terminated": np.zeros(2),
        **{name: np.zeros(2) for name in ("lost", "succeed", "source")},
    }
    facts = episode_figures(
        {**cut, "times/observed": np.arange(2), "times/applied": np.arange(2)}, Rlpd(discount=0.5, reward_bias=1.0)
    )
    assert (facts["return"], facts["return_to_go"], facts["cut_share"]) == (2.0, 2.5, 0.375), (
        "(2 + 3) / 2, and (0.5 + 0.25) / 2"
    )
    assert list(experience.finished()) == []
    # the part before it was evicted
    assert experience._episodes._figures(running.trajectory, [running.trajectory + 7])["length"] == 2
    experience.reported([running.trajectory])
    experience.close()
    again = experience_for(memory_path / "run")
    again.reported([running.trajectory])
    assert list(again.finished()) == []
    again.close()


class Counted(list[int]):
    """The trajectories that have ended; each look through them counts."""

    looks = 0

    def __contains__(self, number: object) -> bool:
        Counted.looks += 1
        return super().__contains__(number)

    def __iter__(self) -> Any:
        Counted.looks += 1
        return super().__iter__()


def test_experience_looks_through_ended_episodes_once_however_many_are_new(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A learner that looked through all of them for each new one stood still after a few thousand."""
    experience = experience_for(memory_path / "run")
    fill(experience.log, range(40))
    ended = Snapshot.ended_trajectories
    monkeypatch.setattr(Snapshot, "ended_trajectories", lambda steps: Counted(ended(steps)))
    assert len(list(experience.finished())) == 40 and Counted.looks <= 3
    experience.close()


def test_experience_foresight():
    gripper = [0.2, 0.9, 0.1, -0.7, -1.0, 0.0, 1.0, 0.6]  # open at first; closed from 3 on, opened at 6
    columns = {
        "actions": np.zeros((8, 7)),
        "observations/p": np.arange(8.0)[:, None],
        "next_observations/p": np.arange(1, 9.0)[:, None],
    }
    columns["actions"][:, 6] = gripper
    foresight = Foresight("p")
    foresight.add(range(8), columns)
    assert foresight.of(np.arange(8))[:, :, 0].tolist() == [[3, 8]] * 3 + [[6, 8]] * 3 + [[8, 8]] * 2
    assert foresight.of(np.arange(8)).dtype == np.float32


def test_columns_are_those_of_a_recording_and_what_a_run_knows_besides():
    from hilt.hil.data import columns_for

    base, learned = (
        columns_for(config(), spaces()),
        columns_for(config(agent={"setup_mode": "dual-arm-learned-gripper"}), spaces()),
    )
    assert set(flatten(base)) - set(flatten(columns_of(spaces()))) == {"succeed", "lost"}
    assert set(learned) - set(base) == {"grasp_penalty"}
