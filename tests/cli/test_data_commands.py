"""``hilt data`` as a person uses it: what it prints, what it writes, how it exits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from hilt import cli
from hilt.cli.data.data_commands import strip, without_mates
from hilt.cli.show import human_bytes
from hilt.core.checksums import read_json, write_json
from hilt.core.tree import ArraySpec
from hilt.formats import images
from hilt.replay import Log, Schema

EPISODES, LENGTH = 5, 12


def run(*arguments: object, columns: int = 250) -> Result:
    return CliRunner().invoke(cli.app, ["data", *map(str, arguments)], env={"COLUMNS": str(columns)})


def picture(episode: int, t: int) -> Any:
    image = np.full((40, 48, 3), 40 * episode, np.uint8)
    image[:, 4 * t : 4 * t + 4] = (255, 10 * t, 0)
    return image


def observation(episode: int, t: int) -> dict[str, Any]:
    return {"wrist": picture(episode, t), "gray": picture(episode, t)[..., 0], "state": np.full(3, t, np.float32)}


def step(episode: int, t: int) -> dict[str, Any]:
    return {
        "observations": observation(episode, t),
        "actions": np.zeros(2, np.float32),
        "rewards": np.float32(t == LENGTH - 1),
        "next_observations": observation(episode, t + 1),
        "terminated": np.bool_(t == LENGTH - 1 and episode % 2 == 0),
        "truncated": np.bool_(t == LENGTH - 1 and episode % 2 == 1),
        "source": np.uint8(1 if episode == 3 and t > 5 else 0),
        "policy_version": np.int64(episode + 7),
    }


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "log"
    schema, compression = Schema.of(step(0, 0)), {"observations/wrist": "zlib"}
    with Log.create(folder, schema, segment_bytes=150_000, compression=compression, capacity_steps=50_000) as opened:
        for episode in range(EPISODES):
            with opened.episode(actor="arm") as running:
                for t in range(LENGTH - (episode == EPISODES - 1)):
                    running.append(step(episode, t))
            if episode < 3:
                opened.annotate(running.trajectory, success=episode == 1, operator="ann")
    return folder


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)


# --- inspect
# ----------------------------------------------------------------------------------------------------------------------


def test_inspect_shows_what_there_is(log: Path):
    result = run("inspect", log)
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for line in (
        f"path {log}",
        "format 1",
        "steps 59: 53 policy, 6 human",
        "trajectories 5, 1 of them unfinished",
        "episodes ended 4: 2 terminated, 2 truncated",
        "policy versions 7 to 11",
        "success 1 succeeded, 2 failed, 2 unknown",
        "senders arm",
        "capacity 50,000 steps",
        "durability every episode: every step is process-safe when its append returns, "
        "and power-safe when its episode or trajectory is complete",
        "segments 3 sealed, 1 growing",
        "quarantine 0 steps",
        "writer none at work",
        "actions float32 2 row 472 B",
        "observations/state float32 3 row 1.4 kB",
        (
            "next_observations has the same columns as observations, a step later; bytes are of both, and an "
            "image of both is stored once."
        ),
        "3 12 1 unknown truncated 6 policy, 6 human",
        "1 12 1 yes truncated 12 policy",
        "operator ann · ann · ann · – · –",
        "4 11 0 unknown unfinished 11 policy",
    ):
        assert line in lines, f"{line!r} is not in\n" + "\n".join(lines)
    wrist = next(line for line in lines if line.startswith("observations/wrist"))
    assert "uint8 40×48×3" in wrist and " frames " in wrist and "zlib, " in wrist and wrist.endswith("×, 3 segments")


def test_inspect_in_eighty_columns(tmp_path: Path):
    """Names were broken in the middle, and all facts repeated for each episode."""
    one = step(0, 0)
    made = {
        **one,
        **{name: {"images": {"front_left": picture(0, 0)}} for name in ("observations", "next_observations")},
    }
    facts = {
        "language_instruction": "put the carrot on the plate",
        "recorded_as": "demonstrations",
        "device": "spacemouse",
    }
    with Log.create(tmp_path / "log", Schema.of(made)) as opened:
        for state in (17, 23):
            with opened.episode(actor="arm") as running:
                running.append({**made, "terminated": True})
            opened.annotate(running.trajectory, success=True, state=state, **facts)
    text = run("inspect", tmp_path / "log", columns=80).stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert max(map(len, text.splitlines())) <= 80
    for line in (
        "column dtype shape stored in bytes",
        "observations/images/front_left uint8 40×48×3 4 frames 23.0 kB",
        "device spacemouse",
        "language_instruction put the carrot on the plate",
        "state 17 · 23",
    ):
        assert line in lines, f"{line!r} is not in\n{text}"
    assert text.count("carrot") == text.count("recorded_as") == 1


def test_columns_of_next_observations_that_differ_are_shown():
    columns = [{"column": "observations/a", "dtype": "uint8", "shape": [2], "bytes": 2, "stored": "row"}]
    other = {**columns[0], "column": "next_observations/a", "shape": [3]}
    assert without_mates([*columns, other]) == ([*columns, other], {})
    shown, follows = without_mates([*columns, {**other, "shape": [2], "bytes": 5}])
    assert follows == {"observations": "next_observations"} and [(c["column"], c["bytes"]) for c in shown] == [
        ("observations/a", 7)
    ]


@pytest.mark.parametrize("command", ["inspect", "verify", "repair"])
def test_the_folder_of_a_recording_or_run_stands_for_its_log(log: Path, command: str):
    result = run(command, log.parent)
    assert (result.exit_code == 0 and "59 steps" in result.stdout) or "59: 53 policy" in result.stdout
    assert run("merge", log.parent, "--into", log.parent / "copy").exit_code == 0
    if command == "inspect":
        (log.parent / "copy").rename(log.parent / "demos")
        assert (
            f"The run's demonstrations: hilt data inspect {log.parent / 'demos'}" in run("inspect", log.parent).stdout
        )


def test_inspect_as_json(log: Path):
    result = run("inspect", log, "--json")
    data = json.loads(result.stdout)
    assert (data["steps"], data["trajectories"], data["policy_versions"]) == (59, 5, [7, 11])
    assert data["sources"] == {"policy": 53, "human": 6, "demo": 0, "random": 0}
    assert data["facts"]["senders"] == [{"actor": "arm", "boot": "", "store": ""}]
    assert data["bytes_on_disk"] == sum(p.stat().st_size for p in log.rglob("*") if p.is_file())
    wrist = next(c for c in data["columns"] if c["column"] == "observations/wrist")
    assert wrist["compression_ratio"] > 5 and wrist["codec"] == "zlib"
    assert [t["return"] for t in data["newest"]] == [1, 1, 1, 1, 0]


def test_inspect_says_who_writes_what_is_torn_and_what_is_in_quarantine(log: Path):
    flip(log / "segments/000003/rows", 9)
    with (log / "annotations.jsonl").open("ab") as file:
        file.write(b"half")
    assert "4 torn bytes behind the last commit" in run("inspect", log).stdout
    run("repair", log)
    with Log.open(log):
        text = run("inspect", log).stdout
    assert "1 steps" in text and "segment 000003, rows: row 0 does not have its checksum" in text
    assert "process " in next(line for line in text.splitlines() if line.startswith("writer"))


def test_inspect_an_empty_log(tmp_path: Path):
    with Log.create(tmp_path / "log", Schema.of(step(0, 0)), durability="never", capacity_bytes=10**9):
        pass
    text = run("inspect", tmp_path / "log").stdout
    assert "none" in text and "1.0 GB" in text and "power-safe when sync() returns" in text
    result = run("inspect", tmp_path / "log", "--frames")
    assert result.exit_code == 1 and "holds no step yet" in result.stderr


def test_a_wide_trajectory(tmp_path: Path):
    batch = {"observations": np.zeros((6, 4, 3), np.float32), "rewards": np.ones((6, 4), np.float32)}
    with Log.create(tmp_path / "log", Schema.of(batch, leading=2)) as opened:
        opened.add(batch)
    assert "6 × 4       6" in run("inspect", tmp_path / "log").stdout


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_what_is_not_a_log_gets_one_line(log: Path, tmp_path: Path, command: str):
    (tmp_path / "foreign").mkdir()
    result = run(command, tmp_path / "foreign")
    assert (result.exit_code, result.stdout) == (1, "")
    assert (
        result.stderr
        == f"error: {tmp_path / 'foreign'}: not a Hilt log (no log.json in it). Give the folder that Log.create made. "
        "See: hilt docs replay\n"
    )
    (tmp_path / "foreign" / "meta").mkdir()
    (tmp_path / "foreign" / "meta" / "info.json").write_text('{"codebase_version": "v3.0"}')
    assert (
        f"is a dataset (lerobot), and this command is for logs: hilt data convert {tmp_path / 'foreign'} NEW"
        in run(command, tmp_path / "foreign").stderr
    )
    result = run(command, tmp_path / "absent")
    assert result.stderr.startswith(f"error: {tmp_path / 'absent'}: No such file or directory. Check the path. See: ")
    write_json(log / "log.json", {**read_json(log / "log.json"), "format": 9})
    result = run(command, log)
    told = f"error: {log}: written in format 9, this Hilt reads up to 1. Upgrade: pip install -U hilt (see: hilt docs "
    assert result.stderr.startswith(told)


# --- the picture strip
# ------------------------------------------------------------------------------------------------------------


def read_png(path: Path) -> Any:
    with Image.open(path) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        return np.asarray(image)


def contains(image: Any, part: Any) -> bool:
    height, width = part.shape[:2]
    rows, columns = image.shape[0] - height + 1, image.shape[1] - width + 1
    probes = [(y, x) for y in (0, height // 2, height - 1) for x in (0, width // 2, width - 1)]
    maybe = np.logical_and.reduce([(image[y : y + rows, x : x + columns] == part[y, x]).all(-1) for y, x in probes])
    return any((image[y : y + height, x : x + width] == part).all() for y, x in np.argwhere(maybe))


def test_a_strip_shows_frames_of_every_camera(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    result = run("inspect", log, "--frames", "--trajectory", 3)
    assert (result.exit_code, result.stdout) == (0, "log-trajectory-3.png\n")
    image = read_png(tmp_path / "log-trajectory-3.png")
    for t in (0, 2, 11):
        frame = picture(3, t).repeat(3, axis=0).repeat(3, axis=1)
        assert contains(image, frame)
        assert contains(image, np.repeat(frame[..., :1], 3, axis=-1))
    assert not contains(image, picture(3, 1).repeat(3, axis=0).repeat(3, axis=1))  # 8 of 12 steps are shown
    assert (image[:10] == strip.PAPER).all() and np.abs(image.astype(int) - strip.ACCENT).sum(-1).min() < 60


def test_a_strip_of_the_newest_goes_where_it_is_told(log: Path, tmp_path: Path):
    result = run("inspect", log, "--frames", "--out", tmp_path / "x.png")
    assert result.stdout == f"{tmp_path / 'x.png'}\n"
    assert contains(read_png(tmp_path / "x.png"), picture(4, 10).repeat(3, axis=0).repeat(3, axis=1))


def test_a_strip_without_pictures_or_trajectory_says_so(log: Path, tmp_path: Path):
    result = run("inspect", log, "--frames", "--trajectory", 77)
    assert result.exit_code == 1 and "no trajectory named '77'" in result.stderr
    with Log.create(tmp_path / "blind", Schema.of({"observations": np.zeros(3), "actions": np.zeros(2)})):
        pass
    result = run("inspect", tmp_path / "blind", "--frames")
    assert result.exit_code == 1 and "no column of it is an image (uint8, height × width" in result.stderr


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((64, 48, 3), (64, 48)),
        ((64, 48), (64, 48)),
        ((64, 48, 1), (64, 48)),
        ((3, 64, 48), (64, 48)),
        ((4, 64, 48, 3), (64, 48)),
        ((7,), None),
        ((3, 3), None),
    ],
)
def test_which_columns_are_images(shape: tuple[int, ...], size: tuple[int, int] | None):
    assert images.image_shape(shape) == size
    assert images.is_image(ArraySpec(np.dtype(np.uint8), shape)) == (size is not None)
    assert not images.is_image(ArraySpec(np.dtype(np.float32), shape))
    if size is not None:
        assert images.as_rgb(np.zeros((2, *shape), np.uint8)).shape == (2, *size, 3)


def test_large_frames_are_reduced_and_labels_fit():
    frames = np.full((2, 600, 400, 3), 90, np.uint8)
    labels = [("step 0", False), ("step 1000000000000000000000000000000000", True)]
    image = np.asarray(strip.draw_strip("a title", [strip.Row("top", frames)], labels))
    assert image.shape[0] < 320 and contains(image, np.full((200, 133, 3), 90, np.uint8))


# --- verify and repair
# ------------------------------------------------------------------------------------------------------------


def test_verify_a_whole_log(log: Path):
    result = run("verify", log)
    assert result.exit_code == 0
    assert result.stdout.startswith("ok: 59 steps, 5 trajectories, ")
    assert "facts are whole (" in result.stdout and result.stderr == ""


def test_a_flipped_bit_is_found_and_mended(log: Path):
    (frames,) = (log / "segments/000003").glob("observations.wrist.frames")
    flip(frames, 6000)
    result = run("verify", log)
    assert result.exit_code == 1
    assert "segments/000003/observations.wrist.frames  frame 1 does not have its checksum" in result.stdout
    assert "its steps go into quarantine" in result.stdout
    assert f"Run: hilt data repair {log}" in result.stdout
    data = json.loads(run("verify", log, "--json").stdout)
    assert data["ok"] is False and data["findings"][0]["steps"][0]["steps"] == 2
    result = run("repair", log)
    assert result.exit_code == 0
    assert "in quarantine\nmended: 57 steps are whole, 2 were lost." in result.stdout
    result = run("verify", log)
    assert result.exit_code == 0 and "quarantined" in result.stdout
    assert run("repair", log).stdout.startswith("nothing to mend: 57 steps")
    assert run("inspect", log).stdout.count("does not have its checksum") == 2


def test_many_findings_are_cut_short(log: Path):
    (frames,) = (log / "segments/000000").glob("observations.gray.frames")
    frames.write_bytes(bytes(len(frames.read_bytes())))
    for rows in log.glob("segments/*/rows"):
        raw = bytearray(rows.read_bytes())
        size = len(raw) // read_json(rows.parent / "seal.json")["rows"] if (rows.parent / "seal.json").exists() else 0
        for at in range(0, len(raw), 2 * size) if size else ():
            raw[at + 40] ^= 1
        rows.write_bytes(raw)
    result = run("verify", log)
    found = len(json.loads(run("verify", log, "--json").stdout)["findings"])
    assert (f"and {found - 30} more; --json lists all" in result.stdout) == (found > 30)
    assert found > 30


def test_repair_needs_to_be_the_only_writer(log: Path):
    with Log.open(log):
        result = run("repair", log)
    assert result.exit_code == 1
    assert "is writing to this log" in result.stderr


# --- merge and split
# --------------------------------------------------------------------------------------------------------------


def test_merge_and_split(log: Path, tmp_path: Path):
    result = run("split", log, tmp_path / "train", tmp_path / "held", "--ratios", "0.8,0.2", "--seed", 1)
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0] == ["log", "trajectories", "steps"]
    assert [line[1] for line in lines[1:]] == ["4", "1"]
    result = run("merge", tmp_path / "train", tmp_path / "held", "--into", tmp_path / "both")
    assert result.exit_code == 0 and result.stdout.split()[-2:] == ["5", "59"]
    assert run("verify", tmp_path / "both").exit_code == 0
    before, after = (json.loads(run("inspect", folder, "--json").stdout) for folder in (log, tmp_path / "both"))
    for same in ("steps", "sources", "episodes", "policy_versions", "facts", "durability"):
        assert before[same] == after[same]


def test_split_into_parts(log: Path, tmp_path: Path):
    assert run("split", log, "--parts", 5).exit_code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log", *(f"log-{i}" for i in range(1, 6))]


def test_other_columns_are_not_merged(log: Path, tmp_path: Path):
    with Log.create(tmp_path / "other", Schema.of({"observations": np.zeros(3)})):
        pass
    result = run("merge", log, tmp_path / "other", "--into", tmp_path / "both")
    assert result.exit_code == 1
    assert "has another schema than" in result.stderr and "actions: removed (was float32 (2,))" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect"], "Missing argument"),
        (["inspect", "log", "--out", "x.png"], "--trajectory and --out are for the picture strip"),
        (["inspect", "log", "--frames", "--json"], "--frames writes a picture"),
        (["verify", "log", "--jsn"], "No such option"),
        (["merge", "log"], "Missing option '--into'"),
        (["split", "log"], "give either the TARGET folders or --parts"),
        (["split", "log", "a", "--parts", "2"], "give either the TARGET folders or --parts"),
        (["split", "log", "--parts", "0"], "Invalid value for '--parts'"),
        (["split", "log", "a", "b", "--ratios", "half"], "expected numbers with commas between them"),
        (["split", "log", "a", "b", "--ratios", "1"], "expected 2 numbers, one for each target"),
        (["vrify", "log"], "No such command"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(arguments: list[str], message: str):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (98_400, "98.4 kB"), (2 * 10**9, "2.0 GB"), (5e12, "5000.0 GB")]
)
def test_human_bytes(size: float, text: str):
    assert human_bytes(size) == text
