"""``hilt demo store``, small; and that it sees what it says it would see."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from hilt import cli
from hilt.cli import recorder
from hilt.cli.demos import demo_store
from hilt.core.errors import DeadlineError, HiltError
from hilt.replay import Log

STEPS = 1000


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["demo", "store", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture(autouse=True)
def few_batches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo_store, "BATCHES", 1)


def test_it_records_is_killed_recovers_and_goes_on(tmp_path: Path):
    result = run("--steps", STEPS, "--folder", tmp_path)
    assert result.exit_code == 0, result.output
    values = dict(line.split("  ", 1) for line in result.stdout.splitlines() if "  " in line)
    values = {name: value.strip() for name, value in values.items()}
    assert values["recorded"] == f"{STEPS:,} steps"
    assert values["lost"] == values["duplicated"] == "0 steps"
    promised, found = (
        int(values[name].split()[0].replace(",", "")) for name in ("promised before the kill", "found after")
    )
    assert STEPS * 0.4 <= promised <= found <= STEPS
    assert 98_304 < int(values["on disk"].split()[0].replace(",", "")) < 105_000
    assert values["killed at"].startswith("episode ")
    assert int(values["inserted"].partition(" steps/s")[0].replace(",", "")) > 0
    for name in (
        "recovered in",
        "sampled, uniform",
        "sampled, human",
        "sampled, mix 50/50",
        "sampled, n-step",
        "verified",
    ):
        assert values[name]
    assert "All is right: nothing promised was lost" in result.stdout
    assert "recording, until it is killed ..." in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_log_is_kept_when_asked(tmp_path: Path):
    result = run("--steps", 40, "--folder", tmp_path, "--keep")
    assert result.exit_code == 0, result.output
    (folder,) = tmp_path.glob("*/log")
    assert f"hilt data inspect {folder}" in result.stdout
    with Log.open(folder, "r") as log:
        assert len(log) == 40
        batch = log.read(log.all().keys())
        for i in range(40):
            wanted = recorder.episode(int(batch["episode"][i])).step(int(batch["time"][i]))
            assert np.array_equal(batch["observations"]["wrist"][i], wanted["observations"]["wrist"])


def test_it_sees_a_wrong_pixel_a_lost_step_and_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The world is changed behind its back: what it compares with, what it was promised, what lies on disk."""
    monkeypatch.setattr(demo_store, "expected", lambda *arguments: {"rewards": np.float32(77)})
    heard = demo_store.StoreStory._hear

    def hear(self: demo_store.StoreStory, line: str) -> None:
        self.promised.add((9999, 0))
        heard(self, line)

    monkeypatch.setattr(demo_store.StoreStory, "_hear", hear)
    look = demo_store.StoreStory.check_bytes

    def damage_first(self: demo_store.StoreStory) -> None:
        with (self.folder / "segments/000000/observations.front.frames").open("r+b") as file:
            file.seek(1000)
            file.write(b"x")
        look(self)

    monkeypatch.setattr(demo_store.StoreStory, "check_bytes", damage_first)
    result = run("--steps", 60, "--folder", tmp_path)
    assert result.exit_code == 1
    verdict = next(line for line in result.stdout.splitlines() if line.startswith("WRONG: "))
    assert "1 promised steps are gone" in verdict
    assert "uniform: rewards of episode" in verdict
    assert "frame 0 does not have its checksum" in verdict
    assert list(tmp_path.glob("*/log")), "what is wrong is kept to be looked at"


def test_too_little_room_is_one_line(tmp_path: Path):
    result = run("--steps", 10**12, "--folder", tmp_path)
    assert result.exit_code == 1
    assert (
        "1,000,000,000,000 steps need 110000000.0 GB" in result.stderr and "give --steps or --folder" in result.stderr
    )
    assert list(tmp_path.iterdir()) == []


def test_a_recorder_that_fails_or_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "log").write_text("not a folder")
    with (
        demo_store.RecorderProcess(tmp_path / "log", 0, 5) as failing,
        pytest.raises(HiltError, match="ended with exit code 1"),
    ):
        list(failing.lines())
    monkeypatch.setattr(demo_store, "SILENCE_SECONDS", 0.01)
    with demo_store.RecorderProcess(tmp_path / "other", 0, 5) as slow:
        slow._process.send_signal(signal.SIGSTOP)
        with pytest.raises(DeadlineError, match=r"reported nothing for 0 s"):
            list(slow.lines())
        # it is killed now, and a busy machine takes its time for that
        monkeypatch.setattr(demo_store, "SILENCE_SECONDS", 20.0)


def test_the_world_moves_and_can_be_recomputed():
    first, again = recorder.episode(5), recorder.episode.__wrapped__(5)
    for t in (0, 50, 100):
        assert np.array_equal(first.front(t), again.front(t)) and np.array_equal(first.wrist(t), again.wrist(t))
    assert not np.array_equal(first.front(0), first.front(60))
    assert not np.array_equal(first.wrist(0), recorder.episode(6).wrist(0))
    assert [{recorder.episode(e).source(t).name for t in range(100)} for e in (1, 4)] == [
        {"RANDOM"},
        {"POLICY", "HUMAN"},
    ]
    assert ((first.places >= 0) & (first.places <= 1)).all()
