"""Batches from the table of a frozen encoder, beside those that are read from the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.tree import ArraySpec, flatten
from hilt.hil.data import Experience
from hilt.hil.states import StateTable
from hilt.replay import Edits
from tests.hil.test_data import experience_for
from tests.hil.toy_run import ACTIONS, IMAGES, NO_CHUNK, demonstrations, episode, fill

N = 3


@pytest.fixture
def frozen(memory_path: Path) -> Any:
    shown = demonstrations(memory_path / "shown", range(50, 52), images=True)
    options = {"demo_path": [str(shown)], "replay_buffer_capacity": 40, "n_step": N, "agent": {"encoder": IMAGES}}
    made = experience_for(memory_path / "run", True, **options)
    yield made
    made.close()


def both_ways(experience: Experience, batch_size: int, part: str = "both") -> tuple[Any, Any]:
    """The same draws, from the table and from the log."""
    before = experience.position()
    ours = experience.sample(batch_size, part)
    after = experience.position()
    experience.seek(before)
    theirs = experience.sample(batch_size, part, images=True)
    assert experience.position() == after
    return ours, theirs


def assert_same(experience: Experience, ours: Any, theirs: Any) -> None:
    """Bit for bit; and ``z`` is what the agent makes of the observations."""
    assert set(ours) == set(theirs) - {"future"}
    for which in ("observations", "next_observations"):
        seen = theirs.pop(which)
        z = experience._agent.states({"images/front": seen["images"]["front"], "state/point": seen["state"]["point"]})
        assert np.array_equal(ours.pop(which)["z"], z)
    for path, column in flatten(ours).items():
        assert column.dtype == theirs[path].dtype and np.array_equal(column, theirs[path]), path


def test_batches_are_those_of_the_log_while_it_grows_and_forgets(frozen: Experience) -> None:
    """Episodes grow side by side, some are left unfinished, one has a gap, and the oldest are evicted."""
    rng = np.random.default_rng(0)
    running: dict[int, Any] = {}
    for number in range(200):
        place = int(rng.integers(3))
        if place not in running:
            human = (1, 2) if rng.random() < 0.3 else ()
            steps = list(episode(number, length=int(rng.integers(1, 7)), images=True, human=human))
            if len(steps) > 3 and rng.random() < 0.3:
                del steps[1]  # the next one does not begin with what this one ended with
            running[place] = (frozen.log.episode(actor=f"arm {place}", boot="1", store="actor_env"), steps)
        writer, steps = running[place]
        writer.append(steps.pop(0))
        if not steps or rng.random() < 0.05:
            writer.__exit__(None, None, None)
            del running[place]
        if number % 3 == 0:
            assert_same(frozen, *both_ways(frozen, 24))
    assert len(frozen._kept["log"]) <= 40 + 24 and frozen.total > 150
    for writer, _ in running.values():
        writer.__exit__(None, None, None)


@pytest.mark.parametrize("part", ["demo", "demonstrations", "collected"])
def test_states_of_other_parts(frozen: Experience, part: str) -> None:
    fill(frozen.log, range(6), images=True, human=(1, 2), lost=(2,))
    frozen.collect([0, 2])
    assert_same(frozen, *both_ways(frozen, 32, part))


def test_a_step_that_comes_later_makes_a_sum_longer(frozen: Experience) -> None:
    """The table was complete when the step was drawn first; what follows it came after that."""
    steps = list(episode(0, images=True))
    running = frozen.log.episode(actor="toy", boot="1", store="actor_env")
    for count, step in enumerate(steps, start=1):
        running.append(step)
        batch = frozen.sample(64)
        assert max(batch["n_steps"][~batch["demo"]]) == min(count, N)
        assert len(frozen._kept["log"]) == count


def test_steps_that_were_evicted_since_they_were_drawn(frozen: Experience) -> None:
    fill(frozen.log, range(8), images=True)
    kept = frozen._kept["log"]
    table = kept.table
    with frozen.log.lock:
        reading, keys = frozen.log.reading(), frozen.online.runs().keys()[:10]
    fill(frozen.log, range(8, 12), images=True)  # the first four of eight episodes of five steps are gone
    with reading as steps:
        slots = kept.complete(steps, keys)
        columns = steps.gather(keys, ["observations/images/front", "observations/state/point"])
    seen = {path.partition("/")[2]: column for path, column in columns.items()}
    assert np.array_equal(table.before[slots, 0], frozen._agent.states(seen))
    assert [len(set(window)) for window in table.windows(slots, N).tolist()] == 2 * [3, 3, 3, 2, 1]
    assert len(kept) == 40 + 10
    kept.refresh()
    assert len(kept) == 40 and (kept.find(keys) < 0).all()
    assert_same(frozen, *both_ways(frozen, 64))


def test_slots_are_used_again(frozen: Experience) -> None:
    for number in range(30):
        fill(frozen.log, range(number, number + 1), images=True)
        frozen.sample(16)
    assert len(frozen._kept["log"].table.before) < 40 + 40


def test_slots_given_back_while_a_batch_is_drawn_are_not_taken_before_it_is_made() -> None:
    """A batch draws from several views: what a later one forgets may be in the windows of an earlier one."""
    table = StateTable(2, {"rewards": ArraySpec(np.dtype(np.float32)), "terminated": ArraySpec(np.dtype(bool))})
    first = table.take(1)
    table.following[first] = -1
    table.before[first] = 7
    table.give_back(first[0])
    assert first[0] not in table.take(3)
    assert table.batch(table.windows(np.array(first), N), 0.9)["observations/z"].tolist() == [[7, 7]]
    assert table.take(1) == first


def test_states_follow_what_people_edit(frozen: Experience) -> None:
    fill(frozen.log, range(5), images=True, human=(1, 2))
    edits, demos, total = Edits(frozen.log, "ann"), Edits(frozen.demos, "ann"), frozen.total
    assert_same(frozen, *both_ways(frozen, 64))
    for edit in (
        lambda: edits.reward([0, 1], 1, 5.0),
        lambda: edits.trim([2, 3], 1, 2),
        lambda: edits.bad(0),
        lambda: demos.bad(0),
        lambda: edits.undo(),
        lambda: demos.undo(),
        lambda: edits.trim(2),
        lambda: edits.values(1, "terminated", [True], first=1),
    ):
        edit()
        assert_same(frozen, *both_ways(frozen, 64))
    assert frozen.total == total, "steps that are shown again are not new ones"
    edits.bad([1, 2, 3, 4])
    batch = frozen.sample(64)
    assert not batch["demo"].all() and 5.0 in batch["rewards"][~batch["demo"]] and len(frozen.human) == 2


def test_chunks_of_the_table_are_those_of_the_log(memory_path: Path) -> None:
    shown = demonstrations(memory_path / "shown", range(50, 52), images=True)
    agent = {"encoder": IMAGES, "chunk": N}
    experience = experience_for(memory_path / "run", True, demo_path=[str(shown)], agent=agent, n_step=1)
    fill(experience.log, range(6), images=True, human=(1, 2), more=NO_CHUNK)
    ours, theirs = both_ways(experience, 40)
    assert ours["actions"].shape == (40, N, ACTIONS) and ours["source"].shape == (40, N)
    assert set(ours["n_steps"]) == {1, 2, 3}
    assert_same(experience, ours, theirs)
    experience.close()


def test_each_row_of_a_batch_is_of_one_of_the_kept_shifts(memory_path: Path) -> None:
    shown = demonstrations(memory_path / "shown", range(50, 52), images=True)
    encoder = {**IMAGES, "pretrain_updates": 1, "pretrain_crop": 2, "kept_shifts": 4}
    options = {"demo_path": [str(shown)], "n_step": N, "agent": {"encoder": encoder}}
    experience = experience_for(memory_path / "run", True, **options)
    fill(experience.log, range(6), images=True)
    agent = experience._agent
    before = experience.position()
    ours = experience.sample(200)
    after = experience.position()
    experience.seek(before)
    theirs = experience.sample(200, images=True)
    drawn = []
    for which in ("observations", "next_observations"):
        seen = {"images/front": theirs[which]["images"]["front"], "state/point": theirs[which]["state"]["point"]}
        shifts = np.stack([agent.states(seen, number) for number in range(4)], axis=1)
        same = (shifts == ours[which]["z"][:, None]).all(-1)
        assert same.sum(1).tolist() == 200 * [1]
        drawn.append(same.argmax(1))
    assert all(np.bincount(numbers, minlength=4).min() > 20 for numbers in drawn)
    assert (drawn[0] != drawn[1]).any(), "an observation and its next one are shifted by themselves"
    experience.seek(before)
    again = experience.sample(200)
    assert np.array_equal(again["observations"]["z"], ours["observations"]["z"]) and experience.position() == after
    experience.close()
