"""Frames with labels: the same from every place they may lie in, and never of one
episode on both sides of the split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.classifier.frames import Clip, ClipSource, class_count, counts, read_frames, split, with_cameras
from hilt.core.checksums import write_json
from hilt.core.errors import ConfigError, FormatError, SchemaError, UnknownNameError
from hilt.core.unpickle import dump, safe_load
from hilt.formats.convert import convert
from hilt.replay import Edits, Log
from tests.classifier.labeled import clips, drawn, write_log


def same(found: list[Clip], expected: list[Clip]) -> None:
    """The same episodes, in any order, whatever their cameras' folder is called."""

    def key(clip: Clip) -> bytes:
        return clip.labels.tobytes() + b"".join(image.tobytes() for _, image in sorted(clip.images.items()))

    assert sorted(map(key, found)) == sorted(map(key, expected))


def test_recordings_logs_and_both_kinds_of_pickles_give_the_same_episodes(tmp_path: Path):
    """HIL-SERL has an episode's successes in one file and its failures in another: here they are episodes again."""
    made = clips(6)
    log = write_log(tmp_path / "recording" / "log", made, stack=True)
    write_json(tmp_path / "recording" / "recording.json", {})
    convert(log, tmp_path / "export", to="hil-serl")
    pickles = sorted((tmp_path / "export" / "classifier_data").glob("*.pkl"))
    assert len(pickles) == 2
    for place in (
        [tmp_path / "recording"],
        [log],
        [tmp_path / "export"],
        [tmp_path / "export" / "classifier_data"],
        pickles,
    ):
        found = read_frames(place)
        same(found, made)
        assert len({clip.state for clip in found}) == 6 and sorted(found[0].images) == ["front", "wrist"]
    # as HIL-SERL's own are, without initial states: those of the first frames
    (tmp_path / "export" / "hilt.json").unlink()
    same(read_frames([tmp_path / "export"]), made)
    assert [list(clip.images) for clip in with_cameras(read_frames([log]), ["wrist"])] == [["wrist"]] * 6
    several = read_frames([write_log(tmp_path / "more", clips(3, seed=1), stack=True), log])
    assert len(several) == 9 and len({clip.state for clip in several}) == 6  # 0 to 2 are the same initial states


def test_pickles_of_hil_serl_itself_single_marks_are_put_back_in_their_place(tmp_path: Path):
    """As a person marks: some steps of success among the others. Only the file says which they are."""
    labels = np.array([0, 0, 1, 0, 1, 1, 0, 0])
    made = [Clip(drawn(labels, np.random.default_rng(i)), labels, f"state {i}", f"episode {i}") for i in range(3)]
    convert(write_log(tmp_path / "log", made, stack=True), tmp_path / "export", to="hil-serl")
    pickles = sorted((tmp_path / "export" / "classifier_data").glob("*.pkl"))
    upstream = ("observations", "actions", "next_observations", "rewards", "masks", "dones")
    for path in pickles:
        with path.open("rb") as file:
            steps = safe_load(file, where="a test")
        with path.open("wb") as file:
            dump([{name: step[name] for name in upstream} for step in steps], file)
    (tmp_path / "export" / "hilt.json").unlink()
    for place in (pickles, pickles[::-1], [tmp_path / "export"]):
        same(read_frames(place), made)
    with pytest.raises(ConfigError, match=r"9 frames of .* none is of the class 0"):
        class_count(read_frames([path for path in pickles if "success" in path.name]))
    demos = tmp_path / "somebody_20_demos_2025.pkl"
    demos.write_bytes(pickles[0].read_bytes())
    with pytest.raises(FormatError, match=r"no labels.*_success_images_"):
        read_frames([demos])


def test_frames_of_a_killed_session_are_skipped(tmp_path: Path):
    write_log(tmp_path / "log", clips(3), labels=True)
    with Log.open(tmp_path / "log") as log:
        log.annotate(log.trajectories()[0], task=None)
        keys = log.trajectory_keys(log.trajectories()[0])
        with log.episode() as episode:
            for row in range(len(keys)):
                step = log.read(keys[row : row + 1])
                episode.append(_first(step))
    assert len(read_frames([tmp_path / "log"])) == 4  # a log of somebody's own: all of it
    write_json(tmp_path / "recording.json", {})
    assert len(read_frames([tmp_path])) == 3


def _first(tree: object) -> object:
    return {key: _first(value) for key, value in tree.items()} if isinstance(tree, dict) else tree[0]  # type: ignore[index]


def test_frames_that_people_label_are_used(tmp_path: Path):
    """In a log without labels only those; in one with labels they take precedence."""
    made = clips(4)
    path = write_log(tmp_path / "log", made, labels=False)
    with pytest.raises(FormatError, match=r"no labels\..* Of a log, label frames with: hilt open LOG"):
        read_frames([path])
    with Log.open(path, "r") as log:
        edits = Edits(log, "ann")
        edits.label_frame(1, 7, True)
        edits.label_frame(1, 3, False)
        edits.label_frame(1, 5, None)
        edits.label_frame(3, -1, True)
        edits.trim(1, first=2)
    one, other = read_frames([path])
    assert (one.steps.tolist(), one.labels.tolist()) == ([1, 5], [0, 1])  # of what is shown
    assert one.source == ClipSource(str(path), 1, 2) and one.before_success(1).tolist() == [True, False]
    np.testing.assert_array_equal(one.images["images/front"], made[1].images["images/front"][[3, 7]])
    assert (other.steps.tolist(), other.labels.tolist(), other.state) == ([11], [1], f"{path}, episode 3")
    recorded = write_log(tmp_path / "recorded", made)
    with Log.open(recorded, "r") as log:
        Edits(log).label_frame(1, 0, True)
        Edits(log).label_frame(1, 6, None)
    changed = read_frames([recorded])[1]
    assert len(changed) == 11 and changed.labels[0] == 1 and 6 not in changed.steps
    classes = write_log(tmp_path / "classes", clips(3, classes=3))
    with Log.open(classes, "r") as log:
        Edits(log).label_frame(1, 0, True)
    with pytest.raises(SchemaError, match="has the class 2, and its frame labels are success or failure"):
        read_frames([classes])


def test_frames_count_near_misses():
    labels = np.array([0, 0, 0, 1, 0, 1, 0])
    clip = Clip({}, labels, "", "")
    assert (
        clip.before_success(1, 2).tolist() == [False, True, True, False, True, False, False]
        and not clip.failed(1).any()
    )
    assert Clip({}, labels * 0, "", "").failed(1).all() and not Clip({}, labels * 0, "", "").before_success(1).any()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=4)), min_size=2, max_size=14
    ),
    st.floats(0.05, 0.8),
    st.integers(0, 99),
)
def test_no_episode_and_no_initial_state_is_on_both_sides(
    episodes: list[tuple[int, list[int]]], share: float, seed: int
):
    made = [Clip({}, np.array(labels), f"state {state}", f"episode {i}") for i, (state, labels) in enumerate(episodes)]
    try:
        classes = class_count(made)
        learned, held, by = split(made, share, classes, seed)
    except ConfigError as error:
        assert "Record" in str(error) or "record" in str(error)
        return
    assert not {clip.where for clip in learned} & {clip.where for clip in held}
    assert len(learned) + len(held) == len(made)
    assert counts(learned, classes).all() and counts(held, classes).all()
    if by == "initial state":
        assert not {clip.state for clip in learned} & {clip.state for clip in held}


def test_frames_with_one_initial_state_are_split_by_episode():
    assert split(clips(8), 0.25, 2, 0)[2] == "initial state"
    learned, held, by = split(clips(8, states=1), 0.25, 2, 0)
    assert by == "episode" and len(held) == 2 + 0 * len(learned)
    shares = [len(split(clips(24), share, 2, 0)[1]) for share in (0.1, 0.5)]
    assert shares[0] < 4 and shares[1] == 12
    assert [c.where for c in split(clips(24), 0.25, 2, 1)[1]] != [c.where for c in split(clips(24), 0.25, 2, 0)[1]]


def test_frames_that_cannot_be_trained_from_are_refused(tmp_path: Path):
    failures = [Clip(clip.images, clip.labels * 0, clip.state, clip.where) for clip in clips(3)]
    with pytest.raises(
        ConfigError, match=r"36 frames of 3 episodes, and none is of the class 1 \(success\).*mark frames of success"
    ):
        class_count(failures)
    with pytest.raises(ConfigError, match=r"none is of the class 0 \(failure\).*near misses above all"):
        class_count([Clip({}, np.ones(3, int), "", "")])
    with pytest.raises(ConfigError, match=r"class 1 \(1\)"):
        class_count([Clip({}, np.array([0, 2]), "", "")])
    with pytest.raises(ConfigError, match=r"too few episodes to hold some out: 2 in all, and of class 1"):
        split(clips(2), 0.25, 2, 0)
    log = write_log(tmp_path / "log", clips(2))
    with pytest.raises(ConfigError, match="given twice"):
        read_frames([log, tmp_path / "x" / ".." / "log"])
    with pytest.raises(ConfigError, match="no data: give at least one recording"):
        read_frames([])
    with pytest.raises(
        UnknownNameError, match=r"image_keys: no camera named 'images/side'.*Known: images/front, images/wrist"
    ):
        with_cameras(read_frames([log]), ["images/side"])
    with pytest.raises(FormatError, match=r"no labels\. Record some with: hilt record TASK --classifier"):
        read_frames([write_log(tmp_path / "demos", clips(2), labels=False)])
    small = [
        Clip(drawn(clip.labels, np.random.default_rng(0), 28), clip.labels, clip.state, clip.where) for clip in clips(2)
    ]
    with pytest.raises(SchemaError, match=r"images/front is \(28, 28, 3\) in .*small, episode 0 and \(32, 32, 3\) in"):
        with_cameras(read_frames([log, write_log(tmp_path / "small", small)]), [])
    with pytest.raises(SchemaError, match="images/front is absent"):
        with_cameras(read_frames([log, write_log(tmp_path / "stacked", clips(2), stack=True)]), [])
    huge = [Clip(clip.images, clip.labels * 1000, clip.state, clip.where) for clip in clips(2)]
    with pytest.raises(SchemaError, match=r"labels are int32 \(12,\); expected a number from 0 to 99 a step"):
        read_frames([write_log(tmp_path / "huge", huge)])
