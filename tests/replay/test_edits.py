"""Edits of a log's episodes: what they change in views, batches and conversions, undoing them, and losing none."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, DeadlineError, ReadOnlyError, SchemaError, UnknownNameError
from hilt.core.trajectory import INSTRUCTION
from hilt.formats import open_dataset
from hilt.replay import Log, Schema
from hilt.replay.edits import Edits, frame_labels
from hilt.replay.maintenance.merge import merge
from hilt.replay.maintenance.repair import repair, verify
from hilt.replay.sampling import MinSize
from tests.effort import rounds
from tests.replay.power import Disk, Recorder
from tests.replay.toy_steps import new_log, numbers, step, trajectory, write


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Three episodes of five steps, with the rewards 0 to 4, 10 to 14 and 20 to 24."""
    made = new_log(tmp_path)
    for number in range(3):
        write(made, [*numbers(10 * number, 4), step(10 * number + 4, terminated=True)])
        made.annotate(number, success=True)
    return made


def rewards_drawn(log: Log) -> set[float]:
    return set(log.all().sample(400, keys=["rewards"])["rewards"].tolist())


def test_edits_hide_a_bad_episode_from_views_and_batches(log: Log):
    edits, every = Edits(log, "ann"), log.all()
    human, good, last = log.by_source("policy"), log.successes(), log.last(2)
    edit = edits.bad(1)
    assert (edit.number, edit.author, edit.action, edit.episodes) == (1, "ann", "mark as bad", (1,))
    for view in (every, human, good, log.all()):
        assert view.trajectories() == [0, 2] and len(view) == 10
    assert last.trajectories() == [0, 2] and rewards_drawn(log) == {*range(5), *range(20, 25)}
    assert log.trajectories() == [0, 2] and log.trajectories(hidden=True) == [0, 1, 2]
    with pytest.raises(UnknownNameError, match="no trajectory named '1'"):
        log.trajectory_keys(1)
    assert len(log.trajectory_keys(1, hidden=True)) == 5 and log.facts.about(1) == {"success": True, "bad": True}
    edits.bad(1, False)
    assert len(every) == len(good) == 15 and log.facts.about(1) == {"success": True}


def test_edits_trim_what_batches_and_n_step_returns_see(log: Log):
    sampler = log.all().sampler(n_step=3, discount=1.0)
    whole = log.all().sampler(episodes=True)
    Edits(log).trim([0, 1], 1, 2)
    assert rewards_drawn(log) == {1, 2, 11, 12, *range(20, 25)} and len(log.all()) == 9
    batch = sampler.sample(400, keys=["rewards", "terminated"])
    ends = log.read(log.trajectory_keys(0), ["terminated", "truncated"])
    assert not ends["terminated"].any() and ends["truncated"].tolist() == [False, True], "it bootstraps there"
    returns = dict(zip(batch.steps.tolist(), batch["rewards"].tolist(), strict=True))
    assert returns[1] == 1 + 2 and returns[2] == 2, "nothing is added from behind the trimmed end"
    assert set(whole.sample(60, keys=["rewards"])["mask"].sum(axis=1).tolist()) == {2, 5}
    Edits(log).trim(0)
    assert len(log.all()) == 12 and not log.read(log.trajectory_keys(0), ["truncated"])["truncated"].any()
    stacked = log.all().sampler(stack=(2, "observations/state")).sample(400, keys=["observations/state"])
    first = {k: s[:, 0].tolist() for k, s in zip(stacked.steps.tolist(), stacked["observations"]["state"], strict=True)}
    assert first[(1 << 32) + 1] == [11, 11], "nothing is stacked from before the trimmed beginning"


def test_edits_of_labels_and_rewards_are_in_batches_and_conversions(tmp_path: Path):
    example = {**step(0), "succeed": np.True_}
    schema = Schema.of({name: column for name, column in example.items() if name not in ("source", "policy_version")})
    log = new_log(tmp_path, schema)
    for _ in range(2):
        write(log, [{**step(n), "succeed": np.bool_(n == 4), "terminated": n == 4} for n in range(5)])
        log.annotate(log.trajectories()[-1], success=True)
    edits = Edits(log)
    edits.label(0, success=False, reward=-1)
    edits.reward(1, 2, 0.5)
    edits.instruction(1, "take the cup")
    edits.tag(1, "rescued")
    edits.mark(1, 3, "grasp")
    edits.trim(1, first=1)
    assert log.successes().trajectories() == [1]
    drawn = log.all().sample(400, keys=["rewards", "succeed"])
    rows = zip(drawn["rewards"].tolist(), drawn["succeed"].tolist(), strict=True)
    by_key = dict(zip(drawn.steps.tolist(), rows, strict=True))
    assert by_key[4] == (-1, False) and by_key[(1 << 32) + 2] == (0.5, False) and by_key[(1 << 32) + 4] == (4, True)
    log.close()
    first, second = (job() for job in open_dataset(tmp_path / "log").jobs())
    assert first.facts["success"] is False and first.columns["rewards"].tolist() == [0, 1, 2, 3, -1]
    assert second.columns["rewards"].tolist() == [1, 0.5, 3, 4] and not first.columns["succeed"].any()
    assert second.facts == {"success": True, INSTRUCTION: "take the cup", "tags": ["rescued"], "marks": {"grasp": [2]}}


def test_edits_count_more_than_facts_that_a_learner_writes_later(log: Log):
    edit = Edits(log, "ann").label(1, success=False)
    log.annotate(1, success=True)
    assert log.facts.success(1) is False and log.successes().trajectories() == [0, 2]
    Edits(log).undo(edit.number)
    assert log.successes().trajectories() == [0, 1, 2]


def test_edits_are_undone_and_done_again(log: Log):
    edits = Edits(log, "ann")
    edits.label(0, success=False, reward=9)
    deleted = edits.delete([0, 2], author="bob")
    assert log.all().trajectories() == [1]
    back = edits.undo(deleted.number)
    assert log.all().trajectories() == [0, 1, 2] and back.undoes == 2 and back.episodes == (0, 2)
    edits.undo(back.number)
    assert log.all().trajectories() == [1]
    edits.undo()  # the newest that counts, which is the deletion
    edits.undo()
    assert log.facts.success(0) is True and 9 not in rewards_drawn(log)
    assert [(e.number, e.author, e.undone) for e in edits.history()] == [
        (1, "ann", True),
        (2, "bob", True),
        (3, "ann", True),
        (4, "ann", False),
        (5, "ann", False),
        (6, "ann", False),
    ]
    assert [e.action for e in edits.history(2)][:2] == ["delete", "undo 2 (delete)"]
    with pytest.raises(ConfigError, match="there is no edit to undo"):
        edits.undo()
    with pytest.raises(ConfigError, match="edit 1 is undone already"):
        edits.undo(1)
    with pytest.raises(UnknownNameError, match="no edit named '77'"):
        edits.undo(77)


def test_edits_refuse_what_cannot_be(log: Log):
    edits = Edits(log)
    with pytest.raises(UnknownNameError, match="no trajectory named '7'"):
        edits.label([0, 7], success=True)
    with pytest.raises(SchemaError, match="trajectory 0 has the steps 0 to 4, and step 5 was given"):
        edits.reward(0, 5, 1.0)
    with pytest.raises(ConfigError, match="expected a first step that is not behind the last one"):
        edits.trim(0, 3, 2)
    with pytest.raises(ConfigError, match="printable characters"):
        edits.tag(0, "a\nb")
    with pytest.raises(UnknownNameError, match="tag of trajectory 0"):
        edits.untag(0, "never")
    with pytest.raises(UnknownNameError, match="mark at step 2 of trajectory 0"):
        edits.unmark(0, 2, "never")
    with pytest.raises(ConfigError, match="a method of its own"):
        edits.facts(0, tags=["a"])
    assert edits.history() == [] and not (log.path / "edits.jsonl").exists()


def test_edits_label_single_frames(log: Log):
    edits = Edits(log, "ann")
    edit = edits.label_frame([0, 1], -1, True)
    assert (edit.action, edit.episodes, edit.author) == ("frame label success at step -1", (0, 1), "ann")
    edits.label_frame(0, 2, None)
    assert frame_labels(log.facts.about(0)) == {4: True, 2: None} and frame_labels(log.facts.about(1)) == {4: True}
    again = edits.label_frame(0, 4, False)
    assert log.facts.about(0)["marks"] == {"failure frame": [4], "unknown frame": [2]}  # in place of the first
    edits.undo(again.number)
    assert frame_labels(log.facts.about(0)) == {4: True, 2: None}
    edits.split(0, 3)
    pieces = [frame_labels(log.facts.about(number)) for number in log.trajectories()[-2:]]
    assert pieces == [{2: None}, {1: True}]
    with pytest.raises(SchemaError, match="trajectory 1 has the steps 0 to 4, and step 5 was given"):
        edits.label_frame(1, 5, True)
    with pytest.raises(ConfigError, match="this name is kept for frame labels, such as --frame success --step 12"):
        edits.mark(1, 0, "success frame")


def test_edits_split_an_episode_at_its_marks(log: Log):
    edits = Edits(log)
    edits.trim(1, first=1)
    for at in (2, 4):
        edits.mark(1, at, "grasp")
    edits.reward(1, 3, 50.0)
    made = edits.split(1, "grasp")
    assert made.episodes == (1, 3, 4, 5) and made.undoes is None and log.all().trajectories() == [0, 2, 3, 4, 5]
    columns = [log.read(log.trajectory_keys(number)) for number in (3, 4, 5)]
    assert [piece["rewards"].tolist() for piece in columns] == [[11], [12, 50], [14]]
    assert [piece["truncated"].tolist() for piece in columns] == [[True], [False, True], [False]]
    assert columns[2]["terminated"].tolist() == [True] and columns[1]["observations"]["image"][0, 0, 0, 0] == 12
    assert [log.facts.about(number) for number in (3, 4, 5)] == [
        {},
        {"marks": {"grasp": [0]}},
        {"success": True, "marks": {"grasp": [0]}},
    ]
    batch = log.all().sampler(n_step=2, discount=1.0).sample(300, keys=["rewards"])
    assert dict(zip(batch.steps.tolist(), batch["rewards"].tolist(), strict=True))[4 << 32] == 62
    undone = edits.undo()
    assert undone.undoes == made.number and log.all().trajectories() == [0, 1, 2] and len(log.all()) == 14
    edits.undo(undone.number)
    assert log.all().trajectories() == [0, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match="expected a step from 1 to 4 of trajectory 0"):
        edits.split(0, 0)
    with pytest.raises(ConfigError, match="or a mark of the episode"):
        edits.split(0, "grasp")
    log.close()
    assert verify(log.path).ok
    with Log.open(log.path, "r") as reader:
        assert reader.all().trajectories() == [0, 2, 3, 4, 5]
        assert [e.number for e in Edits(reader).history()] == [1, 2, 3, 4, 6, 7, 8], "its part is not in the history"
        with pytest.raises(ReadOnlyError, match="opened for reading"):
            Edits(reader).split(0, 2)
        assert len(Edits(reader).history()) == 7


def test_edits_join_what_was_split(log: Log):
    edits = Edits(log)
    edits.mark(0, 3, "grasp")
    edits.split(0, 2)
    edits.tag(3, "left")
    made = edits.join([3, 4])
    assert log.all().trajectories() == [1, 2, 5] and made.action == "join 3, 4"
    whole = log.read(log.trajectory_keys(5))
    assert whole["rewards"].tolist() == [0, 1, 2, 3, 4] and whole["terminated"].tolist() == [False] * 4 + [True]
    assert not whole["truncated"].any()
    assert log.facts.about(5) == {"success": True, "tags": ["left"], "marks": {"grasp": [3]}}
    with log.reading() as steps:
        assert steps.follows(log.trajectory_keys(5)).tolist() == [False, True, True, True, True]
    edits.undo()
    edits.undo()  # the tag
    edits.undo()
    assert log.all().trajectories() == [0, 1, 2] and len(log.all()) == 15
    with pytest.raises(ConfigError, match="two or more episodes, each once"):
        edits.join([1])


def test_edits_cut_and_join_instructions_that_change(log: Log):
    edits, said = Edits(log), {"texts": ["reach", "lift"], "begins": [0, 3]}
    edits.facts(0, **{INSTRUCTION: said})
    edits.split(0, 2)
    assert log.facts.about(3)[INSTRUCTION] == "reach"
    assert log.facts.about(4)[INSTRUCTION] == {"texts": ["reach", "lift"], "begins": [0, 1]}
    edits.instruction(1, "lift")
    edits.trim(1, first=2)
    made = edits.join([3, 4, 1])
    assert log.facts.about(5)[INSTRUCTION] == said and len(log.trajectory_keys(5)) == 8
    edits.trim(4, first=1)
    edits.undo(made.number)
    log.close()
    texts = [job().facts.get(INSTRUCTION) for job in open_dataset(log.path).jobs()]
    assert texts == ["lift", None, "reach", "lift"]


def test_edits_that_were_cut_short_hide_nothing_else(log: Log, monkeypatch: pytest.MonkeyPatch):
    """A process is killed, or fails, between the copies of a split and the edit that shows them."""
    monkeypatch.setattr(log, "add", lambda *_, **__: (_ for _ in ()).throw(ConfigError("disk")))
    with pytest.raises(ConfigError, match="disk"):
        Edits(log).split(0, 2)
    assert log.all().trajectories() == [0, 1, 2]
    write(log, numbers(70, 2))
    assert log.all().trajectories() == [0, 1, 2, 5]
    log.close()
    with Log.open(log.path) as again:
        write(again, numbers(80, 2))
        assert again.all().trajectories() == [0, 1, 2, 5, 6] and Edits(again).history() == []


def test_edits_of_wide_trajectories_count_steps_in_time(tmp_path: Path):
    log = new_log(tmp_path)
    log.add(trajectory([numbers(0, 4), numbers(10, 4)]))
    edits = Edits(log)
    edits.trim(0, 1, 2)
    edits.reward(0, -1, 7.0)
    assert log.read(log.trajectory_keys(0), ["rewards"])["rewards"].tolist() == [1, 11, 7, 7]


def test_edits_while_an_episode_is_written(tmp_path: Path):
    log = new_log(tmp_path)
    every, policy = log.all(), log.by_source("policy")
    with log.episode() as episode:
        for made in numbers(0, 2):
            episode.append(made)
        Edits(log).bad(0)
        episode.append(step(2))
        assert len(every) == len(policy) == 0
        Edits(log).bad(0, False)
        assert len(every) == len(policy) == 3
        Edits(log).trim(0, 0, 1)
        episode.append(step(3))
    assert every.keys().tolist() == policy.keys().tolist() == [0, 1]


def test_edits_count_for_rate_limiters_and_prioritized_samplers(log: Log):
    sampler = log.all().sampler("prioritized", limiter=MinSize(11))
    sampler.sample(4)
    edits = Edits(log)
    edits.bad(0)
    with pytest.raises(DeadlineError):
        sampler.sample(4, timeout=0.01)
    edits.undo()
    assert len(sampler) == 15 and len(sampler.sample(4, timeout=60).steps) == 4


def test_edits_of_a_reader_reach_the_writer_that_samples(log: Log, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hilt.replay.edit_state.POLL_INTERVAL_S", 0.0)
    sampler = log.all().sampler()
    sampler.sample(1)
    with Log.open(log.path, "r") as reader:
        Edits(reader, "bob").bad([0, 1])
        Edits(reader, "bob").reward(2, 0, 99)
    drawn = sampler.sample(200, keys=["rewards"])
    assert set(drawn["rewards"].tolist()) == {99, 21, 22, 23, 24}
    Edits(log, "ann").bad(0, False)
    with Log.open(log.path, "r") as reader:
        assert reader.all().trajectories() == [0, 2]
        assert [edit.author for edit in Edits(reader).history()] == ["bob", "bob", "ann"]


def test_edits_stay_with_merged_logs_and_pass_verification(log: Log, tmp_path: Path):
    edits = Edits(log, "ann")
    edits.bad(0)
    edits.label([1, 2], success=False, reward=5)
    edits.undo(edits.delete(2).number)
    log.close()
    merge([log.path], tmp_path / "merged")
    with Log.open(tmp_path / "merged", "r") as merged:
        assert merged.trajectories() == [1, 2] and merged.trajectories(hidden=True) == [0, 1, 2]
        assert [(e.author, e.action) for e in Edits(merged).history()] == [
            ("ann", "mark as bad"),
            ("ann", "label failure, reward 5"),
        ]
        assert merged.read(merged.trajectory_keys(2)[-1:], ["rewards"])["rewards"] == [5]
    assert verify(log.path).ok and verify(tmp_path / "merged").ok


def test_edits_on_damaged_lines_are_passed_over_and_mended(log: Log):
    edits = Edits(log)
    edits.bad(0)
    edits.tag(1, "kept")
    log.close()
    path = log.path / "edits.jsonl"
    raw = bytearray(path.read_bytes())
    raw[30] ^= 1
    path.write_bytes(raw)
    with Log.open(log.path, "r") as reader:
        assert reader.trajectories() == [0, 1, 2] and reader.facts.about(1)["tags"] == ["kept"]
        assert Edits(reader).tag(2, "new").number == 3, "the number of the damaged edit is not given again"
    (finding,) = verify(log.path).of("damage")
    assert finding.file == "edits.jsonl" and "line 1 does not have its checksum" in finding.what
    repair(log.path)
    assert verify(log.path).ok and (log.path / "damaged/edits.jsonl").exists()
    with Log.open(log.path, "r") as reader:
        assert [edit.number for edit in Edits(reader).history()] == [2, 3]


def _edit_many(path: str, author: str, count: int, report: Any) -> None:
    with Log.open(path, "r") as log:
        edits = Edits(log, author)
        for i in range(count):
            report.send(edits.tag(i % 3, f"{author}-{i}").number)


def test_edits_of_processes_at_once_are_all_kept(log: Log, fork: Any):
    log.close()
    pipes, processes = [], []
    for author in ("ann", "bob"):
        receive, send = fork.Pipe(duplex=False)
        process = fork.Process(target=_edit_many, args=(str(log.path), author, 40, send))
        process.start()
        send.close()
        pipes.append(receive)
        processes.append(process)
    given = [number for pipe in pipes for number in [pipe.recv() for _ in range(40)]]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    with Log.open(log.path, "r") as reader:
        made = Edits(reader).history()
    assert sorted(given) == [edit.number for edit in made] == list(range(1, 81))
    assert {edit.author for edit in made} == {"ann", "bob"}


def test_edits_survive_a_kill_at_any_moment(log: Log, fork: Any):
    log.close()
    acknowledged: list[int] = []
    for round_number in range(3):
        receive, send = fork.Pipe(duplex=False)
        process = fork.Process(target=_edit_many, args=(str(log.path), f"round{round_number}", 10_000, send))
        process.start()
        send.close()
        acknowledged += [receive.recv() for _ in range(5)]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        while receive.poll():
            try:
                acknowledged.append(receive.recv())
            except EOFError:
                break
    with (log.path / "edits.jsonl").open("ab") as file:
        file.write(b"0badf00d {torn")  # as a kill in the middle of a write leaves it
    with Log.open(log.path, "r") as reader:
        last = Edits(reader).tag(0, "after").number
        found = [edit.number for edit in Edits(reader).history()]
    assert set(acknowledged) <= set(found) and found == list(range(1, last + 1))
    assert np.all(np.diff(found) == 1) and verify(log.path).ok


def compacting(monkeypatch: pytest.MonkeyPatch, above: int) -> None:
    """Edits of episodes that are gone are removed as soon as there are more than this."""
    monkeypatch.setattr("hilt.replay.edit_state.MIN_GONE", above)
    monkeypatch.setattr("hilt.replay.catalog.MIN_GONE", above)


def history(path: Path) -> list[tuple[int, str, bool]]:
    with Log.open(path, "r") as log:
        return [(edit.number, edit.action, edit.undone) for edit in Edits(log).history()]


def test_edits_of_episodes_that_are_gone_for_good_are_removed_and_no_number_is_given_again(
    log: Log, monkeypatch: pytest.MonkeyPatch
):
    edits = Edits(log, "ann")
    edits.undo(edits.bad(1).number)
    split = edits.split(2, 3)
    for i in range(20):
        edits.tag(0, f"tag {i}")
    edits.tag([0, 1], "both")
    edits.undo(edits.reward(0, 0, 7.0).number)  # the newest edit is of an episode that is gone, too
    reader = Log.open(log.path, "r")
    before, size = history(log.path), (log.path / "edits.jsonl").stat().st_size
    log.delete(0)
    log.close()
    with Log.open(log.path, "a"):
        assert history(log.path) == before, "there are too few to be worth it"
    compacting(monkeypatch, 10)
    with Log.open(log.path, "a") as again:
        kept = [edit for edit in before if edit[1] in ("mark as bad", "undo 1 (mark as bad)", "split at 3", "tag both")]
        assert history(log.path) == [*kept, before[-1]] and (log.path / "edits.jsonl").stat().st_size < size / 2
        assert [(e.number, e.action, e.undone) for e in Edits(again).history()] == history(log.path)
        assert again.facts.about(1) == {"success": True, "tags": ["both"]} and not again.facts.edits.values.by_column
        reader.refresh()
        assert Edits(reader, "bob").tag(1, "after").number == before[-1][0] + 1
        assert Edits(again).bad(2).number == before[-1][0] + 2
        Edits(again).undo(split.number)
        assert reader.refresh() is None and again.trajectories() == reader.trajectories() == [1]
    reader.close()
    assert verify(log.path).ok


def test_edits_are_removed_while_the_log_evicts_what_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compacting(monkeypatch, 10)
    lines = []
    with new_log(tmp_path, capacity_steps=20, segment_bytes=20_000) as log:
        for number in range(150):
            write(log, numbers(10 * number, 3))
            Edits(log).tag(number, "seen")
            lines.append(len((log.path / "edits.jsonl").read_bytes().splitlines()))
        assert len(log.trajectories()) < 10 and max(lines) < 60
        assert all(log.facts.about(number)["tags"] == ["seen"] for number in log.trajectories())
        assert Edits(log).history()[-1].number == 150


def test_edits_made_while_others_are_removed_are_all_kept(log: Log, fork: Any, monkeypatch: pytest.MonkeyPatch):
    compacting(monkeypatch, 2)
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=_edit_many, args=(str(log.path), "ann", 60, send))
    process.start()
    send.close()
    sizes, own = [], []
    while process.is_alive() or len(sizes) < 5:
        write(log, numbers(100, 1))
        gone = log.trajectories()[-1]
        own += [Edits(log, "bob").tag(gone, f"tag {i}").number for i in range(5)]
        log.delete(gone)
        log.close()
        log = Log.open(log.path, "a")
        sizes.append(len(Edits(log).history()))
    given = [receive.recv() for _ in range(60)]
    process.join(60)
    assert process.exitcode == 0 and len({*given, *own}) == len(given) + len(own), "each number is given once"
    found = {number: action for number, action, _ in history(log.path)}
    assert {*given} <= {*found} and len(found) < len(given) + len(own)
    assert [found[number] for number in given] == [f"tag ann-{i}" for i in range(60)]
    log.close()


def test_edits_survive_a_power_cut_while_others_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compacting(monkeypatch, 5)
    root = tmp_path / "disk"
    root.mkdir()
    recorder = Recorder(root)
    with new_log(root, files=recorder, durability="every episode") as log:
        for first in (0, 10):
            write(log, numbers(first, 3))
        for i in range(12):
            Edits(log).tag(0, f"tag {i}")
        Edits(log).tag(1, "kept")
        log.delete(0)
    recorder.promise("kept")
    with Log.open(root / "log", files=recorder) as log:
        assert len(Edits(log).history()) == 1
    monkeypatch.setattr("hilt.replay.storage.segment.boot_id", lambda: "after the power cut")
    rng, first = np.random.default_rng(0), [event.what for event in recorder.events].index("promise")
    lengths = set()
    for moment in range(first + 1, len(recorder.events) + 1):
        disk = Disk(root)
        disk.play(recorder.events[:moment])
        disk.cut(rng, found := tmp_path / f"found-{moment}")
        with Log.open(found / "log", "r") as again:
            assert again.facts.about(1)["tags"] == ["kept"], f"cut after {moment} operations"
            lengths.add(len(Edits(again).history()))
            assert Edits(again).tag(1, "next").number == 14
    assert lengths == {1, 13}, "some cuts came before the file was replaced, some after"


EDITS = st.one_of(
    st.tuples(st.just("bad"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("trim"), st.integers(0, 2), st.integers(0, 4), st.integers(0, 4)),
    st.tuples(st.just("show"), st.integers(0, 2)),
    st.tuples(st.just("reward"), st.integers(0, 2), st.integers(0, 4), st.integers(100, 110)),
    st.tuples(st.just("delete"), st.integers(0, 2)),
    st.tuples(st.just("undo"), st.integers(1, 12)),
)


def expected(made: list[tuple[Any, ...]]) -> dict[int, float]:
    """The keys that are shown and their rewards, worked out from the beginning: `made` has what edit i + 1 was."""
    undone: set[int] = set()
    for number in range(len(made), 0, -1):
        if made[number - 1][0] == "undo" and number not in undone:
            undone.add(made[number - 1][1])
    out = {}
    for episode in range(3):
        rewards, hidden = {offset: 10.0 * episode + offset for offset in range(5)}, {"bad": False, "delete": False}
        shown = range(5)
        for number, (what, *said) in enumerate(made, 1):
            if number in undone or what == "undo" or said[0] != episode:
                continue
            if what in hidden:
                hidden[what] = said[1] if what == "bad" else True
            elif what == "reward":
                rewards[said[1]] = float(said[2])
            else:
                shown = range(5) if what == "show" else range(min(said[1:]), max(said[1:]) + 1)
        if not any(hidden.values()):
            out |= {(episode << 32) + offset: rewards[offset] for offset in shown}
    return out


@settings(max_examples=rounds(15, 300), deadline=None)
@given(st.lists(EDITS, max_size=12))
def test_edits_in_any_order_come_to_what_a_plain_reading_of_them_says(made: list[tuple[Any, ...]]):
    with tempfile.TemporaryDirectory() as folder, new_log(Path(folder)) as log:
        every, policy = log.all(), log.by_source("policy")
        for number in range(3):
            write(log, [*numbers(10 * number, 4), step(10 * number + 4, terminated=True)])
        edits, done = Edits(log), list[tuple[Any, ...]]()
        for what, *given_to in made:
            number, *more = given_to
            if what == "undo" and (number > len(done) or edits.history()[number - 1].undone):
                continue
            deeds = {"trim": lambda n, *ends: edits.trim(n, min(ends), max(ends)), "show": edits.trim}
            {**deeds, "bad": edits.bad, "reward": edits.reward, "delete": edits.delete, "undo": edits.undo}[what](
                number, *more
            )
            done.append((what, *given_to))
        wanted = expected(done)
        with Log.open(log.path, "r") as reader:
            for view in (every, policy, log.all(), reader.all(), reader.by_source("policy")):
                keys = view.keys()
                assert keys.tolist() == list(wanted)
                assert view.log.read(keys, ["rewards"])["rewards"].tolist() == list(wanted.values())


def test_edits_are_power_safe_when_their_call_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = tmp_path / "disk"
    root.mkdir()
    recorder = Recorder(root)
    with new_log(root, files=recorder, durability="every episode") as log:
        write(log, numbers(0, 3))
        edits = Edits(log)
        for i in range(6):
            edits.tag(0, f"tag {i}")
            recorder.promise(f"tag {i}")
    monkeypatch.setattr("hilt.replay.storage.segment.boot_id", lambda: "after the power cut")
    rng, first = np.random.default_rng(0), [event.what for event in recorder.events].index("promise")
    checked = 0
    for moment in range(first + 1, len(recorder.events) + 1):
        disk = Disk(root)
        disk.play(recorder.events[:moment])
        disk.cut(rng, found := tmp_path / f"found-{moment}")
        with Log.open(found / "log") as again:
            assert set(disk.promises) <= set(again.facts.about(0)["tags"]), f"cut after {moment} operations"
        checked += len(disk.promises)
    assert checked > 10
