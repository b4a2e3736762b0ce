"""LeRobot's datasets, written: everything comes back, and LeRobot's own files say the
same. The real LeRobot reads them in tests/peers."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hilt.core.errors import ConfigError, CorruptError, MissingPackageError, SchemaError, UnknownNameError
from hilt.core.files import temporary_folder
from hilt.core.tree import flatten, unflatten
from hilt.formats import Writer, create, lerobot_write, open_dataset
from hilt.formats.convert import convert
from hilt.formats.episodes import Episode, transitions
from tests.effort import rounds
from tests.formats.test_video import decibels, drawn
from tests.formats.toy_episodes import (
    assert_all_same,
    assert_same,
    made,
    write,
    write_killed,
    write_stopped_at_every_call,
)
from tests.replay.toy_steps import new_log, numbers, step, trajectory

pq = pytest.importorskip("pyarrow.parquet")
png = partial(create, format="lerobot", images="png")


def written(folder: Path, episodes: list[Episode], **options: Any) -> Path:
    write(create(folder, "lerobot", **options), episodes)
    return folder


def info(folder: Path) -> dict[str, Any]:
    described: dict[str, Any] = json.loads((folder / "meta/info.json").read_text())
    return described


def table(folder: Path, name: str = "data/chunk-000/file-000.parquet") -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = pq.read_table(folder / name).to_pydict()
    return columns


@pytest.mark.parametrize("options", [{"images": "png"}, {"codec": "lossless"}])
def test_everything_comes_back(tmp_path: Path, options: dict[str, str]) -> None:
    episodes = [made(5, 0), made(1, 1, source=1, ended="truncated"), made(4, 2, source=[0, 1, 1, 3], ended="")]
    episodes[0].facts |= {"fps": 30, "robot_type": "panda", "episode_metadata": {"who": "ü", "list": [1, None, 2.5]}}
    episodes[2].facts = {"language_instruction": {"texts": ["a", "b"], "begins": [0, 3]}}
    folder = written(tmp_path / "a", episodes, **options)
    dataset = open_dataset(folder)
    assert_all_same(list(dataset), episodes)
    assert not dataset.notes.counts and dataset.describe()["fps"] == 30 and dataset.describe()["robot_type"] == "panda"
    assert_all_same(list(open_dataset(written(tmp_path / "b", list(dataset), **options))), episodes)


def test_a_log_comes_back(tmp_path: Path) -> None:
    with new_log(tmp_path) as log:
        number = log.add(trajectory([[*numbers(0, 4), step(4, terminated=True, source=2)]]))
        log.annotate(number, success=True, language_instruction="pick", odd=0.1)
        log.add(trajectory([numbers(10, 3)]))
    convert(log.path, tmp_path / "a", to="lerobot", images="png", fps=20)
    convert(tmp_path / "a", tmp_path / "back")
    assert_all_same(list(open_dataset(tmp_path / "back")), list(open_dataset(log.path)))


names = st.sampled_from(["a", "b.c", "timestamp", "index", "task", "images", "é", "A", "..", "next", "source"])
shapes = st.lists(st.integers(1, 3), max_size=6).map(tuple)
integers = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
columns = st.dictionaries(
    st.tuples(st.sampled_from(["observations", "actions", "extra", ""]), names),
    st.tuples(shapes, st.sampled_from(["bool", *integers, "float16", "float32", "float64"])),
    max_size=6,
)


@settings(max_examples=rounds(10, 100), deadline=None)
@given(columns, st.integers(0, 9))
def test_any_columns_come_back(columns: dict[tuple[str, str], Any], seed: int) -> None:
    rng, leaves, seen = np.random.default_rng(seed), {}, {}
    for (head, name), (shape, dtype) in columns.items():
        raw = np.frombuffer(
            rng.bytes(5 * int(np.prod(shape)) * np.dtype(dtype).itemsize), "uint8" if dtype == "bool" else dtype
        )
        values = (raw > 99 if dtype == "bool" else raw).reshape(5, *shape)
        if head == "observations":
            seen[name] = values
        elif (head, name) != ("", "source"):
            leaves[f"{head}/{name}" if head else name] = values[:4]
    episode = made(4, seed)
    flat = {**flatten(episode.columns), **flatten(transitions(seen))}
    try:
        episode.columns = unflatten({**flat, **leaves})
    except SchemaError:
        return  # a name that has others below it
    with temporary_folder("hilt-test-") as folder:
        assert_all_same(list(open_dataset(written(folder / "a", [episode], images="png"))), [episode])
        assert all("/" not in name for name in info(folder / "a")["features"])


def test_the_names_that_lerobot_knows(tmp_path: Path) -> None:
    more = {"discount": np.ones(4), "times": {"sent": np.arange(4.0)}, "timestamp": np.arange(4)}
    episode = made(4, 1, source=[0, 1, 1, 0], ended="truncated", **more)
    folder = written(tmp_path / "a", [episode], images="png", fps=5, robot_type="so100")
    features = info(folder)["features"]
    assert {name: (feature["dtype"], feature["shape"]) for name, feature in features.items()} == {
        "observation.state": ("float32", [3]),
        "observation.images.front": ("image", [20, 24, 3]),
        "action": ("float32", [2]),
        "next.reward": ("float32", [1]),
        "next.terminated": ("bool", [1]),
        "next.truncated": ("bool", [1]),
        "next.done": ("bool", [1]),
        "next.success": ("bool", [1]),
        "complementary_info.source": ("uint8", [1]),
        "complementary_info.policy_version": ("int64", [1]),
        "complementary_info.is_intervention": ("bool", [1]),
        "discount": ("float64", [1]),
        "times.sent": ("float64", [1]),
        "extra.timestamp": ("int64", [1]),
        "timestamp": ("float32", [1]),
        "frame_index": ("int64", [1]),
        "episode_index": ("int64", [1]),
        "index": ("int64", [1]),
        "task_index": ("int64", [1]),
    }
    rows = table(folder)
    assert set(rows) == set(features)
    assert rows["next.done"] == rows["next.success"] == [False, False, False, True]
    assert rows["complementary_info.is_intervention"] == [False, True, True, False]
    assert rows["timestamp"] == [np.float32(i / 5) for i in range(4)] and rows["frame_index"] == [0, 1, 2, 3]
    assert rows["observation.images.front"][0]["bytes"].startswith(b"\x89PNG")
    said = info(folder)
    assert (said["codebase_version"], said["fps"], said["robot_type"], said["video_path"]) == ("v3.0", 5, "so100", None)
    assert (said["total_episodes"], said["total_frames"], said["total_tasks"], said["splits"]) == (
        1,
        4,
        1,
        {"train": "0:1"},
    )


def test_pictures_that_no_video_holds_are_png(tmp_path: Path) -> None:
    rng, shapes = np.random.default_rng(0), dict[str, tuple[int, ...]]()
    shapes |= {"odd": (21, 33, 3), "gray": (32, 32, 1), "clear": (32, 32, 4), "small": (8, 8, 3), "even": (32, 48, 3)}
    shapes["stack"] = (1, 32, 48, 3)
    seen = {name: rng.integers(0, 256, (6, *shape), np.uint8) for name, shape in shapes.items()}
    episode = made(5)
    episode.columns |= transitions(seen)
    folder = written(tmp_path / "a", [episode], codec="h264")
    kinds = {name.split(".")[-1]: feature["dtype"] for name, feature in info(folder)["features"].items()}
    assert {name: kinds[name] for name in shapes} == {
        name: "video" if name in ("even", "stack") else "image" for name in shapes
    }
    (back,) = open_dataset(folder)
    for name, values in seen.items():
        assert back.columns["observations"][name].shape == values[:-1].shape
        assert np.array_equal(back.columns["next_observations"][name][-1], values[-1])  # kept beside the video, exactly
        if kinds[name] == "image":
            assert np.array_equal(back.columns["observations"][name], values[:-1])


@pytest.mark.parametrize("codec", ["av1", "h264"])
def test_videos_of_several_episodes_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    monkeypatch.setattr(lerobot_write, "UNIT_BYTES", 10 * 32 * 48 * 3)
    frames, episodes = drawn(31), []
    for first, length in ((0, 7), (7, 4), (11, 12), (23, 7)):
        episode = made(length, first)
        episode.columns |= transitions(
            {"state": np.zeros((length + 1, 1)), "front": frames[first : first + length + 1]}
        )
        episodes.append(episode)
    folder = written(tmp_path / "a", episodes, codec=codec, fps=12.5)
    assert len(list(folder.glob("videos/*/*/*.mp4"))) == len(list(folder.glob("data/*/*.parquet"))) == 3
    for got, wanted in zip(open_dataset(folder), episodes, strict=True):
        pictures = [episode.columns["observations"].pop("front") for episode in (got, wanted)]
        last = [episode.columns["next_observations"].pop("front")[-1] for episode in (got, wanted)]
        assert min(decibels(a, b) for a, b in zip(*pictures, strict=True)) > 28 and np.array_equal(*last)
        assert_same(got, wanted)
    rows = [
        row
        for unit in range(3)
        for row in pq.read_table(folder / f"meta/episodes/chunk-000/file-{unit:03d}.parquet").to_pylist()
    ]
    assert [row["data/file_index"] for row in rows] == [0, 0, 1, 2]
    assert [row["dataset_from_index"] for row in rows] == [0, 7, 11, 23] and [
        row["dataset_to_index"] for row in rows
    ] == [7, 11, 23, 30]
    times = [
        (row["videos/observation.images.front/from_timestamp"], row["videos/observation.images.front/to_timestamp"])
        for row in rows
    ]
    assert np.allclose(times, np.array([(0, 7), (7, 11), (0, 12), (0, 7)]) / 12.5)


@pytest.mark.parametrize("fps", [0.0123, pytest.param(0.123457, marks=pytest.mark.long), 14.285714])
def test_the_time_of_a_frame_is_exact_however_late_it_is(tmp_path: Path, fps: float) -> None:
    """Seconds in float32, as LeRobot writes them, are too coarse after an hour."""
    frames, episode = drawn(81), made(80)
    episode.columns |= transitions({"front": frames})
    folder = written(tmp_path / "a", [episode, episode], codec="lossless", fps=fps)
    assert_all_same(list(open_dataset(folder)), [episode, episode])


def test_statistics_are_those_of_all_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot_write, "UNIT_BYTES", 1)
    episodes = [made(length, length) for length in (9, 4, 30)]
    episodes[1].columns["actions"][2, 0] = np.nan
    for episode in episodes:
        episode.columns["broken"] = np.full(len(episode), np.inf)
        episode.columns["many"] = np.zeros((len(episode), 5000), np.uint8)
    folder = written(tmp_path / "a", episodes, images="png")
    stats = json.loads((folder / "meta/stats.json").read_text())
    state = np.concatenate([episode.columns["observations"]["state"] for episode in episodes]).astype(float)
    found = stats["observation.state"]
    for name, value in {
        "min": state.min(0),
        "max": state.max(0),
        "mean": state.mean(0),
        "std": state.std(0),
        "count": [43],
    }.items():
        assert np.allclose(found[name], value), name
    assert (np.diff([found[name] for name in ("min", "q01", "q10", "q50", "q90", "q99", "max")], axis=0) >= 0).all()
    pictures = np.concatenate([episode.columns["observations"]["front"] for episode in episodes]) / 255
    assert np.allclose(np.ravel(stats["observation.images.front"]["mean"]), pictures.mean((0, 1, 2)), atol=0.01)
    assert np.allclose(np.ravel(stats["observation.images.front"]["std"]), pictures.std((0, 1, 2)), atol=0.01)
    assert np.shape(stats["observation.images.front"]["q50"]) == (3, 1, 1)
    assert np.isfinite(stats["action"]["mean"]).all() and stats["broken"]["max"] == [0] and "many" not in stats
    one = table(folder, "meta/episodes/chunk-000/file-000.parquet")
    assert np.allclose(
        one["stats/observation.state/q50"][0], np.median(episodes[0].columns["observations"]["state"], axis=0)
    )


def test_an_episode_is_cut_at_its_gaps(tmp_path: Path) -> None:
    episode = made(6, 3)
    episode.columns["observations"] = {name: column.copy() for name, column in episode.columns["observations"].items()}
    episode.columns["observations"]["state"][2] += 1
    episode.facts["language_instruction"] = {"texts": ["a", "b", "c"], "begins": [0, 1, 5]}
    writer = png(tmp_path / "a")
    write(writer, [episode])
    assert writer.notes.counts["an episode with gaps between its steps, which LeRobot cannot hold, was cut there"] == 1
    a, b = open_dataset(tmp_path / "a")
    whole = flatten(episode.columns)
    for path in whole:
        assert np.array_equal(np.concatenate([flatten(a.columns)[path], flatten(b.columns)[path]]), whole[path]), path
    assert a.facts == {"language_instruction": {"texts": ["a", "b"], "begins": [0, 1]}}  # one success stays one
    assert b.facts == {"success": True, "language_instruction": {"texts": ["b", "c"], "begins": [0, 3]}}
    assert table(tmp_path / "a")["next.success"] == [False] * 5 + [True]  # nothing ended at the cut


def test_files_are_of_the_size_that_was_asked_for(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    episodes = [made(3, i, noise=rng.normal(size=(3, 20000))) for i in range(6)]
    folder = written(tmp_path / "a", episodes, images="png", data_files_size_in_mb=1)
    sizes = [file.stat().st_size for file in sorted(folder.glob("data/*/*.parquet"))]
    assert (
        len(sizes) > 1
        and all(1 << 20 <= size < 2 << 20 for size in sizes[:-1])
        and info(folder)["data_files_size_in_mb"] == 1
    )
    assert_all_same(list(open_dataset(folder)), episodes)


def many(monkeypatch: pytest.MonkeyPatch, count: int = 7) -> list[Episode]:
    """Episodes for three units: tasks come back in later ones, and numbers of damaged episodes are missing."""
    monkeypatch.setattr(lerobot_write, "UNIT_BYTES", 9 * 20 * 24 * 3)
    episodes = [made(2 + i % 4, i, ended="truncated" if i % 2 else "terminated") for i in range(count)]
    for i, episode in enumerate(episodes):
        episode.facts["language_instruction"] = f"put {i % 3} down"
    return episodes


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("stopped", {"images": "png"}),
        pytest.param("killed", {"images": "png"}, marks=pytest.mark.long),
        ("killed", {"codec": "lossless"}),
    ],
)
def test_a_stopped_writer_goes_on(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, options: dict[str, str]
) -> None:
    episodes = many(monkeypatch, count=4)

    def make(path: Path) -> Writer:
        return create(path, "lerobot", **options)

    write(make(memory_path / "whole"), episodes)
    whole = bytes_of(memory_path / "whole")
    assert_all_same(list(open_dataset(memory_path / "whole")), episodes)
    assert sum(name.startswith("data/") for name in whole) == 2

    def check(path: Path) -> None:
        assert bytes_of(path) == whole

    if how == "stopped":
        assert write_stopped_at_every_call(make, episodes, check, memory_path / "stopped", monkeypatch) > 50
    else:
        write_killed(make, episodes, check, memory_path, kills=rounds(3, 12))


def test_a_writer_goes_on_after_the_last_complete_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = many(monkeypatch)
    writer = png(tmp_path / "a")
    for number in (0, 1, 3, 6):  # the others were damaged
        writer.add(number, episodes[number])
    writer.close()
    again = png(tmp_path / "a")
    assert again.next == 4
    again.add(6, episodes[6])
    again.finish()
    assert_all_same(list(open_dataset(tmp_path / "a")), [episodes[i] for i in (0, 1, 3, 6)])


def test_what_is_in_a_folder_already_stays(tmp_path: Path) -> None:
    (tmp_path / "a/data").mkdir(parents=True)
    (tmp_path / "a/data/precious").touch()
    with pytest.raises(
        ConfigError, match=r"a: expected a new or empty folder, or an unfinished dataset. Choose another path"
    ):
        png(tmp_path / "a")
    written(tmp_path / "b", [made(3)], images="png")
    (tmp_path / "b/data/more").touch()
    writer = png(tmp_path / "b")  # as after a power cut, when the writer was done and its caller not
    assert writer.next == 1
    with pytest.raises(ConfigError, match=r"b: this dataset is complete. Choose another path"):
        writer.add(1, made(3))
    writer.finish()
    writer.close()
    assert (tmp_path / "a/data/precious").exists() and (tmp_path / "b/data/more").exists()
    assert_all_same(list(open_dataset(tmp_path / "b")), [made(3)])


def test_facts_that_only_some_episodes_have(tmp_path: Path) -> None:
    episodes = [made(2), made(2), made(2)]
    del episodes[1].facts["success"]
    episodes[0].facts["robot_type"] = ["left", "right"]
    episodes[2].facts["fps"] = 30
    writer = png(tmp_path / "a", fps=20)
    write(writer, episodes)
    assert writer.notes.counts == {
        "success: known of some episodes only; what the first one lacks is kept, but LeRobot does not see it": 1,
        "fps: not that of the first episode or of the option, 20 is written": 1,
    }
    assert_all_same(list(open_dataset(tmp_path / "a")), episodes)


def test_episodes_that_are_not_alike(tmp_path: Path) -> None:
    writer = png(tmp_path / "a")
    writer.add(0, made(3))
    with pytest.raises(SchemaError, match="discount: the first episode has no such column, and all must be alike"):
        writer.add(1, made(3, discount=np.ones(3)))
    with pytest.raises(SchemaError, match=r"actions: float64 \(2,\), where the first episode has float32 \(2,\)"):
        writer.add(1, made(3, actions=np.ones((3, 2))))
    with pytest.raises(SchemaError, match=r"actions: the first episode has it, this one does not"):
        episode = made(3)
        del episode.columns["actions"]
        writer.add(1, episode)
    writer.add(1, made(3, 1))
    writer.finish()
    assert_all_same(list(open_dataset(tmp_path / "a")), [made(3), made(3, 1)])


def test_what_cannot_be_written_is_noted(tmp_path: Path) -> None:
    writer = png(tmp_path / "a")
    write(writer, [made(n, i, wave=np.ones(n, complex), nothing=np.ones((n, 0))) for i, n in enumerate((3, 2))])
    assert writer.notes.counts == {
        "fps: not known, 10 is written; give it with the option fps": 2,
        "wave: complex128 () is nothing that LeRobot stores, not carried over": 2,
        "nothing: float64 (0,) is nothing that LeRobot stores, not carried over": 2,
    }
    assert_all_same(list(open_dataset(tmp_path / "a")), [made(3), made(2, 1)])


@pytest.mark.parametrize("package", ["pyarrow", "av"])
def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    folder = written(tmp_path / "a", [made(3)], codec="lossless")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingPackageError, match=rf"'{package}', which is not installed: pip install 'hilt\[formats\]'"
    ):
        list(open_dataset(folder))
    with pytest.raises(MissingPackageError, match=rf"'{package}', which is not installed"):
        written(tmp_path / "b", [made(3)])


def test_options_are_checked(tmp_path: Path) -> None:
    for options, text in (
        ({"fps": 0}, "fps: expected frames per second, from 0.01 on, got 0"),
        ({"data_files_size_in_mb": 0}, "expected 1 or more"),
        ({"images": "png", "codec": "h264"}, "codec=h264: only videos have one"),
    ):
        with pytest.raises(ConfigError, match=text):
            create(tmp_path / "a", "lerobot", **options)
    with pytest.raises(UnknownNameError, match="no codec named 'av2'; did you mean 'av1'"):
        create(tmp_path / "a", "lerobot", codec="av2")
    with pytest.raises(UnknownNameError, match="no way to store images named 'jpeg'"):
        create(tmp_path / "a", "lerobot", images="jpeg")
    with pytest.raises(ConfigError, match="there is not one episode with a transition to write"):
        png(tmp_path / "a").finish()


@pytest.mark.parametrize("options", [{}, {"codec": "h264"}, {"codec": "lossless"}, {"images": "png"}], ids=str)
def test_lossy_pictures_are_noted(tmp_path: Path, options: dict[str, Any]) -> None:
    writer = create(tmp_path / "a", "lerobot", fps=10, **options)
    write(writer, [made(3), made(2, 1)])
    lossy = "png" not in str(options) and options.get("codec") != "lossless"
    codec = options.get("codec", "av1")
    said = {f"images were stored as {codec} video, which changes them a little; images=png keeps every bit": 2}
    assert dict(writer.notes.counts) == (said if lossy else {})


ODD = [{"en": "go"}, ["a", "b"], None, 5, {"texts": ["a"], "begins": [0, 3]}, {"texts": "ab", "begins": [3, 10**9]}]


@pytest.mark.parametrize("fact", ODD, ids=str)
def test_an_instruction_that_is_no_text_stays_a_fact(tmp_path: Path, fact: Any) -> None:
    episode = made(4)
    episode.facts["language_instruction"] = fact
    assert_all_same(list(open_dataset(written(tmp_path / "a", [episode], images="png"))), [episode])


def test_without_what_hilt_keeps_it_is_still_a_dataset(tmp_path: Path) -> None:
    """As after a copy by a program that knows of LeRobot's files only."""
    folder = written(tmp_path / "a", [made(4, 1, ended="")], images="png")
    (folder / "meta/hilt/chunk-000/file-000.parquet").unlink()
    dataset = open_dataset(folder)
    (episode,) = dataset
    whole = made(4, 1, ended="")
    assert np.array_equal(episode.columns["observations"]["front"], whole.columns["observations"]["front"])
    assert np.array_equal(episode.columns["next_observations"]["state"][-1], whole.columns["observations"]["state"][-1])
    assert episode.columns["truncated"].tolist() == [False, False, False, True]
    assert (
        episode.facts == {"fps": 10, "language_instruction": "put 1 down", "success": True}
        and len(dataset.notes.counts) == 1
    )


def test_what_hilt_keeps_belongs_to_its_frames(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", [made(4)], images="png"), written(tmp_path / "b", [made(5)], images="png")
    kept = "meta/hilt/chunk-000/file-000.parquet"
    (a / kept).write_bytes((b / kept).read_bytes())
    with pytest.raises(
        CorruptError, match=r"not of the 4 frames of episode 0. Remove meta/hilt to read the dataset without it"
    ):
        list(open_dataset(a))
