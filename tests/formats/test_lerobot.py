"""LeRobot's datasets, read: what other programs wrote, and what they did not write
well. The golden datasets are in tests/golden."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError, CorruptError, FormatError, HiltError, UnsafeError
from hilt.core.tree import flatten
from hilt.formats import detect, open_dataset
from hilt.formats.lerobot import LeRobotDataset
from hilt.formats.video import VideoWriter
from tests.formats.toy_episodes import assert_all_same

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
GOLDEN = Path(__file__).parent.parent / "golden/lerobot"
LENGTHS = (3, 4)


def foreign(
    folder: Path, columns: dict[str, Any], version: str = "v3.0", group: int = 100, **features: dict[str, Any]
) -> Path:
    """A dataset of two episodes, 3 and 4 frames long; columns are arrays ``[7, ...]`` or lists."""
    (folder / "meta").mkdir(parents=True)
    total = sum(LENGTHS)
    columns = {
        "timestamp": np.concatenate([np.arange(n) / 5 for n in LENGTHS]).astype(np.float32),
        "frame_index": np.concatenate([np.arange(n) for n in LENGTHS]),
        "episode_index": np.repeat([0, 1], LENGTHS),
        "index": np.arange(total),
        "task_index": np.array([0, 0, 0, 1, 1, 0, 0]),
        **columns,
    }
    table = pa.table(
        {name: column.tolist() if isinstance(column, np.ndarray) else column for name, column in columns.items()}
    )
    arrays = {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
    described = {
        name: {"dtype": column.dtype.name, "shape": list(column.shape[1:]) or [1]} for name, column in arrays.items()
    }
    info = {
        "codebase_version": version,
        "fps": 5,
        "robot_type": "so100",
        "features": {**described, **features},
        "total_episodes": 2,
    }
    tasks, lengths = [{"task_index": 0, "task": "push"}, {"task_index": 1, "task": "pull"}], [0, *LENGTHS]
    if version == "v3.0":
        place(folder / "data/chunk-000/file-000.parquet", table, group)
        rows = [
            {"episode_index": i, "length": n, "data/chunk_index": 0, "data/file_index": 0}
            for i, n in enumerate(LENGTHS)
        ]
        for name in [name for name, feature in features.items() if feature["dtype"] == "video"]:
            for row in rows:
                row |= {f"videos/{name}/chunk_index": 0, f"videos/{name}/file_index": 0}
                row |= {f"videos/{name}/from_timestamp": lengths[row["episode_index"]] / 5}
        place(folder / "meta/episodes/chunk-000/file-000.parquet", pa.Table.from_pylist(rows))
        place(folder / "meta/tasks.parquet", pa.Table.from_pylist(tasks))
    else:
        for i, n in enumerate(LENGTHS):
            place(folder / f"data/chunk-000/episode_{i:06d}.parquet", table.slice(lengths[i], n), group)
        lines(
            folder / "meta/episodes.jsonl",
            [{"episode_index": i, "tasks": [], "length": n} for i, n in enumerate(LENGTHS)],
        )
        lines(folder / "meta/tasks.jsonl", tasks)
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def place(path: Path, table: Any, group: int = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group)


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit(folder: Path, **changes: Any) -> Path:
    """Changes meta/info.json; ``features__NAME`` changes one feature."""
    path = folder / "meta/info.json"
    info = json.loads(path.read_text())
    for name, value in changes.items():
        if name.startswith("features__"):
            info["features"][name.removeprefix("features__")] |= value
        else:
            info[name] = value
    path.write_text(json.dumps(info))
    return folder


STATE = {
    "observation.state": np.arange(14, dtype=np.float32).reshape(7, 2),
    "action": np.arange(7, dtype=np.float64)[:, None],
}


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
@pytest.mark.parametrize("group", [2, 100])
def test_frames_become_transitions(tmp_path: Path, version: str, group: int) -> None:
    dataset = open_dataset(foreign(tmp_path / "a", STATE, version, group))
    assert isinstance(dataset, LeRobotDataset) and detect(tmp_path / "a") == "lerobot" and len(dataset) == 2
    a, b = dataset
    assert a.columns["observations"]["state"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert a.columns["next_observations"]["state"].tolist() == [[2, 3], [4, 5], [4, 5]]
    assert b.columns["actions"].tolist() == [[3], [4], [5], [6]] and b.columns["actions"].dtype == np.float64
    assert set(flatten(a.columns)) == {
        "observations/state", "next_observations/state", "actions", "rewards", "terminated", "truncated", "source",
    }  # fmt: skip
    assert a.columns["rewards"].tolist() == [0, 0, 0] and a.columns["source"].tolist() == [2, 2, 2]
    assert a.columns["truncated"].tolist() == [False, False, True] and not a.columns["terminated"].any()
    assert a.facts == {"fps": 5, "robot_type": "so100", "language_instruction": "push"}
    assert b.facts["language_instruction"] == {"texts": ["pull", "push"], "begins": [0, 2]}
    assert dataset.notes.counts == {
        "no rewards in this dataset: 0 everywhere": 2,
        "what was seen after the last step is not in this dataset: the last observation stands for it": 2,
    }
    assert dataset.describe()["frames"] == 7 and dataset.describe()["version"] == version


def test_the_order_is_that_of_the_dataset_whoever_reads_it(tmp_path: Path) -> None:
    dataset = open_dataset(GOLDEN / "v3_video")
    alone = list(dataset)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda job: job(), list(dataset.jobs()) * 3))
    assert_all_same([episode for episode in together if episode], alone * 3)
    assert_all_same([episode for job in dataset.jobs(first=1) if (episode := job())], alone[1:])


def test_row_groups_are_read_once_and_only_where_an_episode_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = LeRobotDataset._read_group

    def counted(self: LeRobotDataset, file: Path, group: int, names: Any) -> Any:
        read.append(group)
        return real(self, file, group, names)

    monkeypatch.setattr(LeRobotDataset, "_read_group", counted)
    list(open_dataset(foreign(tmp_path / "many", STATE, group=2)))
    assert read == [0, 1, 2, 3]  # frame 3, in the second, is of the other episode, and is still there
    read.clear()
    (_, second) = open_dataset(tmp_path / "many").jobs()
    second()
    assert read == [1, 2, 3]
    read.clear()
    list(open_dataset(foreign(tmp_path / "one", STATE)))
    assert read == [0]


def test_without_images_no_video_is_touched(tmp_path: Path) -> None:
    folder = shutil.copytree(GOLDEN / "v3_video", tmp_path / "a")
    shutil.rmtree(folder / "videos")
    dataset = open_dataset(folder)
    episodes = [job() for job in dataset.jobs(images=False)]
    assert [len(episode) for episode in episodes if episode] == [7, 4, 11]
    assert episodes[0] and set(episodes[0].columns["observations"]) == {"state"}
    for job in dataset.jobs():
        with pytest.raises(
            CorruptError, match=r"videos/observation.images.front/chunk-000/file-000.mp4: this video is missing"
        ):
            job()


@pytest.mark.parametrize(
    ("flags", "terminated", "truncated"),
    [
        ({"next.done": [0, 0, 1]}, [0, 0, 1], [0, 0, 0]),
        ({"next.done": [0, 0, 0]}, [0, 0, 0], [0, 0, 1]),
        ({"next.done": [0, 0, 1], "next.truncated": [0, 0, 1]}, [0, 0, 0], [0, 0, 1]),
        ({"next.done": [0, 0, 1], "next.truncated": [0, 0, 0]}, [0, 0, 1], [0, 0, 0]),
        ({"next.terminated": [0, 0, 1], "next.truncated": [0, 0, 1]}, [0, 0, 1], [0, 0, 1]),
        ({"next.done": [1, 0, 1]}, [1, 0, 1], [0, 0, 0]),
    ],
)
def test_how_an_episode_ends(
    tmp_path: Path, flags: dict[str, list[int]], terminated: list[int], truncated: list[int]
) -> None:
    columns = {name: np.array([*values, 0, 0, 0, 0], bool) for name, values in flags.items()}
    first, _ = open_dataset(foreign(tmp_path / "a", {**STATE, **columns}))
    assert first.columns["terminated"].tolist() == terminated and first.columns["truncated"].tolist() == truncated
    assert "next" not in first.columns


@pytest.mark.parametrize("name", ["complementary_info.is_intervention", "is_intervention", "info.intervention"])
def test_who_acted_and_whether_it_succeeded(tmp_path: Path, name: str) -> None:
    columns = {name: np.array([0, 1, 0, 0, 0, 0, 1], bool), "next.success": np.array([0, 0, 1, 0, 0, 0, 0], bool)}
    a, b = open_dataset(foreign(tmp_path / "a", {**STATE, **columns, "next.reward": np.arange(7, dtype=np.float64)}))
    assert a.columns["source"].tolist() == [0, 1, 0] and b.columns["source"].tolist() == [0, 0, 0, 1]
    assert a.facts["success"] is True and b.facts["success"] is False
    assert a.columns["next"]["success"].tolist() == [[False], [False], [True]]
    assert b.columns["rewards"].tolist() == [3, 4, 5, 6] and b.columns["rewards"].dtype == np.float64


def test_names(tmp_path: Path) -> None:
    names = {
        "observation.images.front.depth": "observations/images/front/depth",
        "observation": "extra/observation",
        "action.arm": "actions/arm",
        "action": "extra/action",
        "complementary_info.penalty": "complementary_info/penalty",
        "source": "extra/source",
        "observations.other": "extra/observations/other",
        "a/b": "a/b",
        "discount": "discount",
        "next.reward.parts": "next/reward/parts",
    }
    rows = np.arange(7)[:, None]
    first, _ = open_dataset(foreign(tmp_path / "a", {name: rows + i for i, name in enumerate(names)}))
    found = flatten(first.columns)
    for i, path in enumerate(names.values()):
        assert found[path].tolist() == [[i], [i + 1], [i + 2]], path


def test_arrays_of_every_type(tmp_path: Path) -> None:
    types = [
        "bool",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
    ]
    shapes = [(1,), (3,), (2, 3), (2, 1, 2), (1, 1, 1, 1, 2)]
    rng = np.random.default_rng(0)
    columns = {
        f"observation.{t}_{i}": (rng.integers(0, 99, (7, *s))).astype(t) for t in types for i, s in enumerate(shapes)
    }
    episodes = list(open_dataset(foreign(tmp_path / "a", columns)))
    for name, values in columns.items():
        got = np.concatenate([episode.columns["observations"][name.split(".")[1]] for episode in episodes])
        assert got.dtype == values.dtype and np.array_equal(got, values), name


def test_text_and_subtasks_are_facts(tmp_path: Path) -> None:
    columns = {**STATE, "note": ["a", "a", None, "b", "b", "b", "b"], "subtask_index": np.array([0, 1, 1, 0, 0, 0, 0])}
    folder = foreign(tmp_path / "a", columns, note={"dtype": "string", "shape": [1]})
    place(
        folder / "meta/subtasks.parquet", pa.table({"subtask_index": [0, 1], "__index_level_0__": ["reach", "grasp"]})
    )
    a, b = open_dataset(folder)
    assert a.facts["subtask"] == {"texts": ["reach", "grasp"], "begins": [0, 1]} and b.facts["subtask"] == "reach"
    assert a.facts["note"] == {"texts": ["a", ""], "begins": [0, 2]} and b.facts["note"] == "b"
    assert "note" not in a.columns and "subtask_index" not in a.columns


def test_what_is_not_carried_over_is_noted(tmp_path: Path) -> None:
    late = np.array([0, 0.2, 0.45, 0, 0.2, 0.4, 0.6], np.float32)
    dataset = open_dataset(
        edit(foreign(tmp_path / "a", {**STATE, "timestamp": late, "odd": list("abcdefg")}), total_episodes=9)
    )
    list(dataset)
    notes = dataset.notes.counts
    assert notes["odd: not described in meta/info.json, not carried over"] == 1
    assert notes["timestamp: not those of an even frame rate, not carried over"] == 1
    assert notes["meta/info.json promises 9 episodes, meta/episodes lists 2"] == 1


@pytest.mark.parametrize(
    "declared",
    [{"shape": [16, 24, 3]}, {"shape": [3, 16, 24]}, {"shape": [3, 16, 24], "names": ["channels", "height", "width"]}],
)
def test_a_video_by_the_time_of_its_frames(tmp_path: Path, declared: dict[str, Any]) -> None:
    frames = np.arange(7 * 16 * 24 * 3).astype(np.uint8).reshape(7, 16, 24, 3)
    folder = foreign(tmp_path / "a", STATE, front={"dtype": "video", "names": None, **declared})
    file = folder / "videos/front/chunk-000/file-000.mp4"
    file.parent.mkdir(parents=True)
    writer = VideoWriter(file, 5, 16, 24, "lossless")
    writer.add(frames)
    writer.close()
    a, b = open_dataset(folder)
    assert np.array_equal(a.columns["front"], frames[:3]) and np.array_equal(b.columns["front"], frames[3:])
    edit(folder, features__front={"shape": [16, 26, 3], "names": ["height", "width", "channels"]})
    with pytest.raises(CorruptError, match=r"file-000.mp4: its frames have 16 x 24 pixels, meta/info.json has 16 x 26"):
        list(open_dataset(folder))
    late = np.array([0, 0.2, 0.45, 0, 0.2, 0.4, 0.6], np.float32)
    edit(folder, features__front={"names": None, **declared})
    place(folder / "data/chunk-000/file-000.parquet", changed(folder, timestamp=late))
    with pytest.raises(
        CorruptError, match=r"file-000.mp4: no frame within 0.0001 s of 0.4500 s, where frame 2 of the episode belongs"
    ):
        list(open_dataset(folder))
    assert len(list(open_dataset(folder, tolerance_s=0.06))) == 2


def changed(folder: Path, **columns: Any) -> Any:
    """The table of frames with other columns."""
    table = pq.read_table(folder / "data/chunk-000/file-000.parquet")
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    return table


def test_options_are_checked(tmp_path: Path) -> None:
    foreign(tmp_path / "a", STATE)
    with pytest.raises(ConfigError, match="tolerance_s: expected a part of a second, got 0"):
        open_dataset(tmp_path / "a", tolerance_s=0)
    with pytest.raises(ConfigError, match="lerobot has no such option"):
        open_dataset(tmp_path / "a", split="train")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"codebase_version": "v1.6"}, FormatError, "LeRobot's format 'v1.6'; read are v2.0, v2.1, v3.0. Convert"),
        ({"codebase_version": ["v3.0"]}, FormatError, "LeRobot's format"),
        ({"fps": 0}, CorruptError, "fps is 0, expected a number above 0"),
        ({"fps": True}, CorruptError, "fps is True"),
        ({"chunks_size": "many"}, CorruptError, "chunks_size is 'many'"),
        ({"features": [1]}, CorruptError, "'features' is not described as LeRobot describes a feature"),
        (
            {"features__action": {"dtype": "object"}},
            CorruptError,
            "'action' is not described as LeRobot describes a feature",
        ),
        ({"features__action": {"shape": [1 << 40]}}, CorruptError, "'action' is not described .* cannot be read"),
        ({"features__action": {"shape": [-1]}}, CorruptError, "'action' is not described"),
        (
            {"features__action": {"shape": [2]}},
            CorruptError,
            "episode 0: action is not float64 .2,. in every frame .3 values in 3 frames",
        ),
        ({"features__action": {"dtype": "int8"}}, None, ""),
        ({"features__observation.state": {"dtype": "image"}}, CorruptError, "pictures of shape"),
        (
            {"features__observation.state": {"dtype": "image", "shape": [2, 1, 3]}},
            CorruptError,
            "frame 0: observation.state: ",
        ),
        ({"features__action": {"dtype": "video", "shape": [16, 16, 4]}}, CorruptError, "pictures of shape"),
        ({"features__action": {"hilt": {"path": "truncated", "shape": []}}}, CorruptError, "cannot be truncated"),
        ({"features__action": {"hilt": {"path": "x", "shape": [7]}}}, CorruptError, "'action' is not described"),
        ({"features__action": {"hilt": 3}}, CorruptError, "'action' is not described"),
        (
            {"data_path": "../{file_index}.parquet"},
            UnsafeError,
            "data_path names '../0.parquet', which leads out of .*: it was not opened",
        ),
        ({"data_path": "/etc/passwd"}, UnsafeError, "leads out of"),
        ({"data_path": "data/{file_index:0999999999d}.parquet"}, CorruptError, "this file is missing"),
        ({"data_path": "data/{chunk_index.__class__}"}, CorruptError, "this file is missing"),
        ({"data_path": "data\0"}, UnsafeError, "leads out of"),
        ({"data_path": "data"}, CorruptError, "not as LeRobot writes it"),
    ],
)
def test_what_is_wrong_with_the_description(
    tmp_path: Path, changes: dict[str, Any], error: type[HiltError] | None, text: str
) -> None:
    folder = edit(foreign(tmp_path / "a", STATE), **changes)
    if error is None:
        list(open_dataset(folder))
        return
    with pytest.raises(error, match=text):
        list(open_dataset(folder))


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"episode_index": [0, 0, 1, 0, 1, 1, 1]}, "3 frames of episode 0, or not in one piece; meta has 3"),
        ({"episode_index": [0, 0, 1, 1, 1, 1, 1]}, "2 frames of episode 0, or not in one piece; meta has 3"),
        ({"episode_index": [0, 0, None, 1, 1, 1, 1]}, "episode_index is not a number in every row"),
        ({"frame_index": [0, 2, 1, 0, 1, 2, 3]}, "episode 0: its frames are not numbered from 0 to 2"),
        ({"timestamp": [0.0, float("nan"), 0.4, 0, 0.2, 0.4, 0.6]}, "episode 0: its timestamps do not rise from 0"),
        ({"timestamp": [-1.0, 0.2, 0.4, 0, 0.2, 0.4, 0.6]}, "its timestamps do not rise from 0"),
        ({"action": [[1.0], [2.0], None, [4.0], [5.0], [6.0], [7.0]]}, "action is not float64 .1,. in every frame"),
        (
            {"action": [[1.0], [2.0], [None], [4.0], [5.0], [6.0], [7.0]]},
            "action is not float64 .1,. in every frame .2 values in 3 frames",
        ),
        (
            {"observation.state": [[1.0, 2, 3], [4.0], [5.0, 6], [1, 2], [1, 2], [1, 2], [1, 2]]},
            "observation.state is not .*several sizes",
        ),
        ({"action": list("abcdefg")}, "action is not float64"),
        ({"action": [{"x": 1}] * 7}, "action is not float64"),
    ],
)
def test_what_is_wrong_with_the_frames(tmp_path: Path, columns: dict[str, Any], text: str) -> None:
    folder = foreign(tmp_path / "a", STATE)
    place(folder / "data/chunk-000/file-000.parquet", changed(folder, **columns))
    with pytest.raises(CorruptError, match=text):
        list(open_dataset(folder))


def test_a_damaged_episode_does_not_hide_the_others(tmp_path: Path) -> None:
    folder = foreign(tmp_path / "a", STATE, "v2.1")
    (folder / "data/chunk-000/episode_000000.parquet").write_bytes(b"PAR1 and no more")
    first, second = open_dataset(folder).jobs()
    with pytest.raises(CorruptError, match=r"episode_000000.parquet: not as LeRobot writes it"):
        first()
    assert len(second() or ()) == 4
    (folder / "data/chunk-000/episode_000000.parquet").unlink()
    with pytest.raises(CorruptError, match=r"episode_000000.parquet: this file is missing"):
        next(open_dataset(folder).jobs())()


def remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [shutil.rmtree(p) if (p := folder / name).is_dir() else p.unlink() for name in names] and None


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (remove("meta/episodes"), r"meta/episodes/chunk-000/file-000.parquet: this file is missing"),
        (lambda f: (f / "meta/tasks.parquet").write_bytes(b"no"), r"tasks.parquet: not as LeRobot writes it"),
        (lambda f: (f / "meta/info.json").write_bytes(b"[" * 99999), r"info.json: not readable as JSON"),
        (lambda f: (f / "meta/info.json").write_bytes(b"[]"), r"info.json: a mapping was expected, got list"),
        (
            lambda f: place(f / "meta/episodes/chunk-000/file-000.parquet", pa.table({"episode_index": [0]})),
            "file-000.parquet: not as",
        ),
        (
            lambda f: place(f / "meta/tasks.parquet", pa.table({"task_index": [0.5], "task": ["x"]})),
            "task_index is not a number in",
        ),
    ],
)
def test_what_is_wrong_with_the_lists(tmp_path: Path, spoil: Callable[[Path], None], text: str) -> None:
    spoil(folder := foreign(tmp_path / "a", STATE))
    with pytest.raises(CorruptError, match=text):
        open_dataset(folder)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{}", "'length'|'episode_index'"),
        ("[1]", "a mapping was expected"),
        ("{", "not readable as JSON"),
        ('{"episode_index": 2, "length": -1}', "is not between 0"),
    ],
)
def test_what_is_wrong_with_a_line(tmp_path: Path, line: str, text: str) -> None:
    folder = foreign(tmp_path / "a", STATE, "v2.1")
    with (folder / "meta/episodes.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(CorruptError, match=rf"episodes.jsonl: .*({text})"):
        open_dataset(folder)


def test_more_rows_than_anyone_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = foreign(tmp_path / "a", STATE)
    monkeypatch.setattr("hilt.formats.lerobot.BYTE_LIMIT", 300)
    with pytest.raises(CorruptError, match=r"row group 0 would take \d+ bytes; at most 300 are read"):
        list(open_dataset(folder))
    monkeypatch.setattr("hilt.formats.lerobot_meta.ROW_LIMIT", 6)
    with pytest.raises(CorruptError, match=r"file-000.parquet: 7 rows; at most 6 are read"):
        list(open_dataset(folder))


def test_an_episode_of_no_frames_is_nothing(tmp_path: Path) -> None:
    folder = foreign(tmp_path / "a", STATE, "v2.1")
    with (folder / "meta/episodes.jsonl").open("a") as file:
        file.write('{"episode_index": 2, "length": 0}\n')
    assert [job() is None for job in open_dataset(folder).jobs()] == [False, False, True]
