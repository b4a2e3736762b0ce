"""A log read and written as one of the formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError, SchemaError, UnknownNameError
from hilt.core.tree import flatten
from hilt.formats import create, open_dataset
from hilt.formats.convert import convert
from hilt.formats.episodes import Episode, gaps, text_fact, texts_of
from hilt.replay import Edits, Log
from hilt.replay.maintenance.merge import merge
from hilt.replay.maintenance.repair import verify
from tests.replay.toy_steps import SCHEMA, new_log, numbers, step, trajectory, write


def rewards(log: Path, **options: Any) -> list[list[float]]:
    return [episode.columns["rewards"].tolist() for episode in open_dataset(log, **options)]


def test_every_row_of_a_wide_trajectory_is_cut_where_its_episodes_end(tmp_path: Path) -> None:
    a = [*numbers(0, 2), step(2, terminated=True), *numbers(10, 2)]
    b = [*numbers(100, 4), step(104, truncated=True)]
    with new_log(tmp_path) as log:
        log.add(trajectory([a, b]), facts={"success": True})
        write(log, numbers(50, 3))
    assert rewards(log.path) == [[0, 1, 2], [10, 11], [100, 101, 102, 103, 104], [50, 51, 52]]
    assert [e.facts for e in open_dataset(log.path)] == [{"success": True}] * 3 + [{}]
    assert len(open_dataset(log.path)) == 4


def test_a_view_chooses_steps(tmp_path: Path) -> None:
    with new_log(tmp_path) as log:
        write(log, [*numbers(0, 2), step(2, source=1), step(3), step(4, source=1)])
    assert rewards(log.path, view="human") == [[2, 4]]
    (episode,) = open_dataset(log.path, view="human")
    assert gaps(episode).tolist() == [1]
    with pytest.raises(UnknownNameError, match="no view named 'humans'; did you mean 'human'"):
        open_dataset(log.path, view="humans")


def test_the_log_of_a_run_learns_rate_and_instruction_from_the_run_beside_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for place, facts in (("log", {"task": "press"}), ("demos", {"language_instruction": "press the red button"})):
        with Log.create(run / place, SCHEMA, durability="never") as log:
            log.add(trajectory([numbers(0, 3)]), facts=facts)
    assert [e.facts for e in open_dataset(run / "log")] == [{"task": "press"}]  # the folder holds no run
    (run / "config.yaml").write_text("control_hz: 0.0\ntask_options:\n  control_hz: 5\n")
    known = {"task": "press", "fps": 5.0, "language_instruction": "press the red button"}
    assert [e.facts for e in open_dataset(run / "log")] == [known]
    (run / "config.yaml").write_text("control_hz: 4.0\n")
    with Log.open(run / "log", "a") as log:
        log.annotate(log.trajectories()[0], language_instruction="another one")
    assert [e.facts for e in open_dataset(run / "log")] == [known | {"fps": 4.0, "language_instruction": "another one"}]
    (run / "config.yaml").write_text("control_hz: [")
    assert "fps" not in next(iter(open_dataset(run / "log"))).facts
    assert [e.facts.get("fps") for e in open_dataset(run / "demos")] == [None]


def test_without_images_only_small_columns_are_read(tmp_path: Path) -> None:
    with new_log(tmp_path) as log:
        write(log, numbers(0, 3))
    (job,) = open_dataset(log.path).jobs(images=False)
    episode = job()
    assert episode is not None and "observations/image" not in flatten(episode.columns)
    assert episode.columns["observations"]["state"].shape == (3, 2)


def test_a_writer_goes_on_where_the_one_before_was_stopped(tmp_path: Path) -> None:
    with new_log(tmp_path) as log:
        for first in (0, 10, 20):
            write(log, [*numbers(first, 2), step(first + 2, terminated=True)])
    source = list(open_dataset(log.path))
    writer = create(tmp_path / "copy", "log")
    writer.add(0, source[0])
    writer.add(2, source[2])  # number 1 was damaged, say
    writer.close()
    again = create(tmp_path / "copy", "log")
    assert again.next == 3
    again.add(3, source[1])
    again.finish()
    assert rewards(tmp_path / "copy") == [[0, 1, 2], [20, 21, 22], [10, 11, 12]]


def test_what_a_writer_stores_is_what_was_read(tmp_path: Path) -> None:
    with new_log(tmp_path) as log:
        number = log.add(trajectory([[*numbers(0, 4), step(4, terminated=True, source=2)]]))
        log.annotate(number, success=True, language_instruction="pick", odd=float("0.1"))
    writer = create(tmp_path / "copy", "log", compression="zlib", durability="every step")
    for i, episode in enumerate(open_dataset(log.path)):
        writer.add(i, episode)
    writer.finish()
    (a,), (b,) = open_dataset(log.path), open_dataset(tmp_path / "copy")
    assert a.facts == b.facts
    for path, column in flatten(a.columns).items():
        assert np.array_equal(column, flatten(b.columns)[path]) and column.dtype == flatten(b.columns)[path].dtype
    with Log.open(tmp_path / "copy", "r") as copy:
        assert copy.settings["compression"] == {"observations/image": "zlib"} and copy.durability.words == "every step"


def test_an_episode_with_other_columns_is_refused(tmp_path: Path) -> None:
    writer = create(tmp_path / "copy", "log")
    writer.add(0, Episode({"actions": np.zeros((3, 2), np.float32)}))
    with pytest.raises(SchemaError, match="actions: expected float32"):
        writer.add(1, Episode({"actions": np.zeros((3, 4), np.float32)}))
    writer.close()


def test_nothing_to_write_is_an_error_with_a_cure(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="not one episode with a transition to write; look at the source with: hilt data inspect"
    ):
        create(tmp_path / "copy", "log").finish()


def test_texts_that_change_are_kept_with_the_steps_they_begin_at() -> None:
    texts = ["reach", "reach", "lift", "reach"]
    assert text_fact(texts) == {"texts": ["reach", "lift", "reach"], "begins": [0, 2, 3]}
    assert texts_of(text_fact(texts), 4) == texts
    assert text_fact(["a"] * 3) == "a" and texts_of("a", 3) == ["a"] * 3


def test_gaps_are_found_by_content_and_nan_is_like_nan() -> None:
    seen = np.array([[1.0], [np.nan], [3.0], [4.0]])
    assert gaps(Episode({"observations": seen[:-1], "next_observations": seen[1:]})).tolist() == []
    assert gaps(Episode({"observations": seen[:-1].copy(), "next_observations": seen[1:].copy()})).tolist() == []
    zeros = np.array([[1.0], [0.0], [1.0]])
    assert gaps(Episode({"observations": zeros[:-1], "next_observations": np.array([[-0.0], [1.0]])})).tolist() == [1]
    moved = seen[1:].copy()
    moved[1] = 9
    assert gaps(Episode({"observations": seen[:-1], "next_observations": moved})).tolist() == [2]


@pytest.mark.parametrize("codec", ["zlib", "zstd"])
def test_compression_of_a_small_set(tmp_path: Path, codec: str) -> None:
    """A set that fills no segment was not compressed at all, without a word."""
    if codec == "zstd":
        pytest.importorskip("zstandard")
    with new_log(tmp_path) as log:
        for first in (0, 10, 20):
            write(log, [*numbers(first, 2), step(first + 2, terminated=True)])
    summary = convert(log.path, tmp_path / "small", compression=codec)
    with Log.open(tmp_path / "small", "r") as made:
        assert [segment.codecs["observations/image"]["codec"] for segment in made.segments] == [codec]
        assert not summary.notes and verify(made.path).ok
    for one, other in zip(open_dataset(log.path), open_dataset(tmp_path / "small"), strict=True):
        np.testing.assert_array_equal(one.columns["observations"]["image"], other.columns["observations"]["image"])
    merge([tmp_path / "small", log.path], tmp_path / "merged")
    with Log.open(tmp_path / "merged", "r") as made:
        assert all("observations/image" in segment.codecs for segment in made.segments)


def test_compression_that_can_do_nothing_is_said(tmp_path: Path) -> None:
    with new_log(tmp_path) as log:
        write(log, [*numbers(0, 2), step(2, terminated=True)])
    with pytest.raises(UnknownNameError, match="no codec named 'zst'; did you mean 'zstd'"):
        convert(log.path, tmp_path / "out", compression="zst")
    summary = convert(log.path, tmp_path / "out", compression="zlib", drop=["observations/image"])
    assert "compression=zlib had nothing to do: no column is an image of at least 1,024 bytes" in summary.notes


def test_a_filter_chooses_episodes_of_a_log(tmp_path: Path) -> None:
    with new_log(tmp_path) as log:
        for first in (0, 10, 20, 30):
            log.add(trajectory([[*numbers(first, 2), step(first + 2, terminated=True)]]), facts={"success": first > 5})
        Edits(log).tag([0, 2, 3], "good")
        Edits(log).bad([3])
    assert rewards(log.path, where="tag=good success=true") == [[20, 21, 22]]
    assert rewards(log.path, where="success=true", trajectories="0-1") == [[10, 11, 12]]
    with pytest.raises(
        ConfigError, match=r"where='success=true' with trajectories=0 chooses none of the 3 episodes of .*data inspect"
    ):
        open_dataset(log.path, where="success=true", trajectories="0")
    with pytest.raises(ConfigError, match=r"where='tag=rare' chooses none of the 3 episodes of .*hilt data inspect"):
        open_dataset(log.path, where="tag=rare")
    with pytest.raises(ConfigError, match=r"none of the 3 episodes of .*: 1 episodes that are bad or deleted"):
        open_dataset(log.path, where="bad=true")
    with pytest.raises(UnknownNameError, match="advantage_percentile"):
        open_dataset(log.path, where="advantage_percentile>=60")
    with pytest.raises(ConfigError, match="has no order; use = or !="):
        open_dataset(log.path, where="source>3")


def test_a_filter_chooses_among_the_rows_of_a_wide_trajectory(tmp_path: Path) -> None:
    """All rows of a trajectory were taken if one of them matched."""
    won, lost = ([step(n, rewards=r) for n, r in enumerate(row)] for row in ([0, 0, 1], [0, 0, 0]))
    with new_log(tmp_path) as log:
        log.add(trajectory([won, lost]))
        log.add(trajectory([lost]))
    assert rewards(log.path, where="return>=1") == [[0, 0, 1]]
    assert rewards(log.path, where="return<1") == [[0, 0, 0], [0, 0, 0]]
    assert rewards(log.path, where="return<1", trajectories="0") == [[0, 0, 0]]
    dataset = open_dataset(log.path, where="return<1")
    assert [dataset.label(number) for number in range(2)] == ["trajectory 0", "trajectory 1"]
    with pytest.raises(ConfigError, match="where='return>=1' with trajectories=1 chooses none"):
        open_dataset(log.path, where="return>=1", trajectories="1")
    assert convert(log.path, tmp_path / "few", where="return>=1").episodes == 1
