"""Videos of episodes: what they show, and that they are whole or absent."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Dict

from hilt.core.tree import Array
from hilt.envs.task import make
from hilt.recording import film as film_module
from hilt.recording.film import BAR, CAPTION, COLORS, GREEN, RED, film, frames, picture, video_of
from hilt.recording.record import Settings, record
from hilt.replay import Log
from hilt.teleop.operator import Script
from tests.hil.toy import Toy

av = pytest.importorskip("av")


def decode(path: Path) -> list[Array]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, float(stream.average_rate)) == ("h264", 10.0)
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]


def near(color: Any, wanted: Any) -> bool:
    return bool(np.abs(np.asarray(color, int) - wanted).max() < 25)


def test_each_kept_episode_gets_a_video_from_another_process(tmp_path: Path):
    """It shows every frame in order, who acted, and how it ended."""
    settings = Settings("toy", episodes=4, keep="all", states=[0, 1])
    summary = record(Toy(hopeless=[1], hz=10), Script(), tmp_path / "a", settings)
    assert summary.videos == 4 and not summary.notes
    with Log.open(tmp_path / "a" / "log", "r") as log:
        for number in log.trajectories():
            shown, facts = decode(video_of(tmp_path / "a" / "videos", number)), log.facts.about(number)
            length, (height, width, _) = facts["steps"], shown[0].shape
            assert len(shown) == length + 10 and height == BAR + 240 + CAPTION and width == 360
            for step, frame in enumerate(shown[: length + 1]):
                assert near(frame[BAR // 2 - 1, width // 2], COLORS[2]), "a script demonstrates"
                assert near(frame[BAR + 120, width // 2], (facts["state"], 10 * step, 10 * step)), f"frame {step}"
            assert near(shown[-1][-3, width - 4], GREEN if facts["success"] else RED)
            assert not near(shown[0][-3, width - 4], GREEN) and not near(shown[0][-3, width - 4], RED)
            for made, seen in zip(frames(log, number, 10.0), shown, strict=True):
                assert np.abs(made.astype(int) - seen).mean() < 4
    assert sorted(p.name for p in (tmp_path / "a" / "videos").iterdir()) == [f"episode-{n:06d}.mp4" for n in range(4)]


def test_cameras_of_different_sizes_and_odd_ones(tmp_path: Path):
    small, odd = np.full((64, 64, 3), 200, np.uint8), np.full((301, 33, 3), 100, np.uint8)
    made = picture([small, odd], COLORS[1], ["words", "more"], ("marked", GREEN))
    assert made.shape[0] % 2 == made.shape[1] % 2 == 0 and made.shape[1] >= 256 + 33
    assert (
        near(made[BAR + 100, 100], (200, 200, 200))
        and near(made[BAR + 300, 256 + 10], (100, 100, 100))
        and near(made[0, 0], COLORS[1])
    )


def test_film_of_a_killed_session_is_made_by_the_next(tmp_path: Path):
    record(Toy(hz=10), Script(), tmp_path / "a", Settings("toy", episodes=2), videos=False)
    videos = tmp_path / "a" / "videos"
    videos.mkdir()
    (videos / ".episode-000000.mp4.new").write_bytes(b"half a video")
    summary = record(Toy(hz=10), Script(), tmp_path / "a", Settings("toy", episodes=2))
    assert summary.attempts == 0 and summary.videos == 2 and len(list(videos.iterdir())) == 2
    assert len(decode(video_of(videos, 0))) > 10


def test_a_missing_package_is_one_line_and_no_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "av" else there(name, *rest))
    summary = record(Toy(hz=10), Script(), tmp_path / "a", Settings("toy", episodes=1))
    (note,) = summary.notes
    assert (
        note == "no videos: A video of each episode needs the package 'av', which is not installed: "
        "pip install 'hilt[formats]'"
    )
    assert summary.have == 1 and summary.videos == 0


def test_without_images_there_is_no_video(tmp_path: Path):
    class Blind(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = Dict({"state": self.observation_space["state"]})

        def _seen(self) -> Any:
            return {"state": super()._seen()["state"]}

    summary = record(Blind(), Script(), tmp_path / "a", Settings("toy", episodes=1))
    assert summary.notes == ["no videos: the observations have no images."] and summary.have == 1


def test_film_that_cannot_be_made_is_reported_and_leaves_nothing(tmp_path: Path):
    record(Toy(hz=10), Script(), tmp_path / "a", Settings("toy", episodes=1), videos=False)
    (tmp_path / "v").mkdir()
    command = [sys.executable, "-m", "hilt.recording.film", str(tmp_path / "a" / "log"), str(tmp_path / "v"), "10"]
    done = subprocess.run(command, input="7\n0\n", capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0 and "no video of trajectory 7: no trajectory named '7'" in done.stdout
    assert [p.name for p in (tmp_path / "v").iterdir()] == ["episode-000000.mp4"]


def test_an_encoder_that_fails_costs_one_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    record(Toy(hz=10), Script(), tmp_path / "a", Settings("toy", episodes=2), videos=False)
    made = []

    def fails(log: Log, trajectory: int, path: Path, hz: float) -> None:
        if trajectory == 0:
            raise ValueError("no such codec")
        made.append(trajectory)

    monkeypatch.setattr(film_module, "film", fails)
    monkeypatch.setattr(os, "nice", lambda more: 0)
    monkeypatch.setattr(film_module, "leave_to_parent", lambda: None)  # this is not a process of its own
    monkeypatch.setattr(sys, "stdin", ["0", "1"])
    film_module.main(str(tmp_path / "a" / "log"), str(tmp_path / "v"), "10")
    assert made == [1] and capsys.readouterr().out == "no video of trajectory 0: no such codec\n"


def test_the_recorder_itself_never_loads_an_encoder(tmp_path: Path):
    code = """if True:
        import sys, pathlib
        from hilt.recording.record import Settings, record
        from hilt.teleop.operator import Script
        from tests.hil.toy import Toy
        assert record(Toy(hz=10), Script(), pathlib.Path(sys.argv[1]), Settings("toy", episodes=1)).videos == 1
        assert "av" not in sys.modules and "PIL" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_film_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    record(Toy(hz=10), Script(), tmp_path / "a", Settings("toy", episodes=1), videos=False)
    with Log.open(tmp_path / "a" / "log", "r") as log:
        monkeypatch.setattr("hilt.recording.film.frames", lambda *given: (_ for _ in [0] if 1 / 0))
        with pytest.raises(ZeroDivisionError):
            film(log, 0, tmp_path / "x.mp4", 10.0)
    assert not (tmp_path / "x.mp4").exists()


def test_small_pictures_are_pictures_too(tmp_path: Path):
    env = make("tabletop/reach", image_size=8)
    summary = record(env, Script(), tmp_path / "a", Settings("tabletop/reach", episodes=1))
    assert summary.videos == 1 and not summary.notes
    env.close()
