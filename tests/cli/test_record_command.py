"""``hilt record`` as a program: recorded for real, killed, interrupted, driven over
a terminal; and what becomes of the recording."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from hilt import cli
from hilt.formats import open_dataset
from hilt.replay import Log
from hilt.teleop.devices import Device, Reading, Status
from tests.envs.toy_robot import ToyRobot, scene

ROOT = Path(__file__).parent.parent.parent
TOY = "tests.hil.toy:Toy"
DEADLINE_S = 120
HILT = [sys.executable, "-c", "from hilt.cli import main; main()"]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "MUJOCO_GL": os.environ.get("MUJOCO_GL", "egl")}


def run(*arguments: object, code: int = 0) -> Result:
    """In this process, which is quicker."""
    result = CliRunner().invoke(cli.app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*HILT, "record", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENV
    )


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """What a program says, up to a line with these words. It is ended by whoever started it, or by its own deadline."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"{words!r} was not said: {said}")


def test_a_script_records_tabletop(tmp_path: Path):
    """What the issue shows: episodes in the log, a video of each, and both next commands work."""
    out = tmp_path / "reach"
    process = start("tabletop/reach", "--device", "script", "--episodes", 3, "--out", out, "--image-size", 32)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    assert re.findall(r"episode (\d): \d+ steps, success, power-safe; have (\d) of 3", said) == [
        ("1", "1"),
        ("2", "2"),
        ("3", "3"),
    ]
    assert "3 episodes, 3 of them succeeded" in said and len(list((out / "videos").glob("*.mp4"))) == 3
    with Log.open(out / "log", "r") as log:
        assert log.schema.columns["observations/images/wrist"].shape == (32, 32, 3)
        assert len(log.by_source("demo")) == len(log) and log.facts.about(0)["options"] == {"image_size": 32}
        states = {log.facts.about(number)["state"] for number in log.trajectories()}
    for command in [line.split()[1:] for line in map(str.strip, said.splitlines()) if line.startswith("hilt data")]:
        run(*command)
    assert len(list(open_dataset(out / "lerobot"))) == 3
    again = run(
        "record", "tabletop/reach", "--device", "script", "--successes-needed", 4, "--out", out, "--image-size", 32
    )
    assert "have 3 of 4" in again.stdout and "1 episode," in again.stdout and "finishing the videos" in again.stdout
    enough = run("record", "tabletop/reach", "--device", "script", "--episodes", 3, "--out", out, "--image-size", 32)
    assert "already has 4: --episodes 7 records 3 more" in enough.stdout
    with Log.open(out / "log", "r") as log:
        assert log.facts.about(log.trajectories()[-1])["state"] not in states
    other = run("record", "tabletop/push", "--device", "script", "--out", out, code=1)
    assert "has demonstrations of tabletop/reach" in other.stderr and "Choose another folder with --out" in other.stderr


def test_killed_at_random_moments(tmp_path: Path, counted: Callable[[str], None]):
    """Only the running episode is lost; the same command goes on, and nobody is left behind."""
    rng, out, places, promised = np.random.default_rng(5), tmp_path / "a", {}, 0
    arguments = [TOY, "--device", "script", "--episodes", 8, "--out", out, "-o", "delay=0.02", "-o", "hz=10"]
    for _ in range(3):
        process = start(*arguments, "--no-video")
        said = read_until(process, "recording into")
        began = int(re.findall(r"have (\d+) of 8", said)[0])
        assert began >= promised, f"{promised} were promised, {began} are there"
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        assert process.stdout is not None
        said += process.stdout.read()
        process.wait(DEADLINE_S)
        promised = max(promised, *map(int, re.findall(r"power-safe; have (\d+) of 8", said)), began)
        dropped = "after an unfinished one" if "unfinished" in said else "after whole ones"
        places[dropped] = places.get(dropped, 0) + 1
    done = run("record", *arguments)
    assert "in the log    8 episodes, 8 of them succeeded" in done.stdout
    assert len(list((out / "videos").glob("episode-*.mp4"))) == 8, "also those of killed sessions"
    assert not list((out / "videos").glob(".*"))
    with Log.open(out / "log", "r") as log:
        assert len(log.trajectories()) == 8 and all(log.facts.about(number)["success"] for number in log.trajectories())
    assert not others_of(out), "a process was left behind"
    counted(f"3 kills, sessions began {places}; {promised} episodes promised before the last kill, 0 lost")


def others_of(folder: Path) -> list[str]:
    """Processes whose command names this folder, once they had a moment to end."""
    for _ in range(600):
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            found += [command] if str(folder) in command and int(pid) != os.getpid() else []
        if not found:
            break
        time.sleep(0.1)
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_in_an_episode(tmp_path: Path, number: signal.Signals, code: int):
    out = tmp_path / "a"
    # an episode takes 2 s
    slow = ["-o", "delay=0.3", "-o", "hz=3", "-o", "hopeless=[0,1,2,3,4,5,6,7]", "--keep", "all"]
    for _ in range(5):  # on a busy machine the signal may come between two episodes: then the same command goes on
        process = start(TOY, "--device", "script", "--out", out, *slow)
        said = read_until(process, "power-safe; have ")
        time.sleep(0.7)
        process.send_signal(number)
        assert process.stdout is not None
        said += process.stdout.read()
        assert process.wait(DEADLINE_S) == code, said
        if "dropped: stopped" in said:
            break
    with Log.open(out / "log", "r") as log:
        have = len(log.trajectories())  # one, where the machine is not so busy that the signal comes late
    assert (
        have
        and f"dropped: stopped; have {have} of 20" in said
        and f"There are {have} of 20. The same command goes on." in said
    )
    assert "Traceback" not in said and f"hilt data inspect {out}" in said
    assert len(list((out / "videos").glob("*.mp4"))) == have and not others_of(out)


def test_a_person_at_a_keyboard(tmp_path: Path):
    """Over a real terminal: keys move the arm, Enter marks success, Escape stops; the log has it as human."""
    out, said = tmp_path / "a", b""
    arguments = ["tabletop/reach", "--device", "keyboard", "--episodes", 5, "--out", out, "--no-video"]
    arguments += ["-o", "image_size=16"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(ENV)
        os.execv(HILT[0], [*HILT, "record", *map(str, arguments)])

    def until(words: bytes) -> None:
        nonlocal said
        end = time.monotonic() + DEADLINE_S
        while words not in said and time.monotonic() < end:
            if select.select([terminal], [], [], 0.05)[0]:
                try:
                    said += os.read(terminal, 65536)
                except OSError:  # it ended
                    break
        assert words in said, said.decode(errors="replace")

    try:
        until(b"recording: 0 of 5, episode 1: Take over to begin")
        pressed, end = 0, time.monotonic() + DEADLINE_S
        # a key that repeats, until so many steps were made, however slow the machine is
        while pressed < 20 or not re.search(rb"step (1[5-9]|[2-9]\d),", said):
            os.write(terminal, b"w")
            pressed += 1
            if select.select([terminal], [], [], 0.04)[0]:
                said += os.read(terminal, 65536)
            assert time.monotonic() < end, said.decode(errors="replace")
        time.sleep(0.4)
        os.write(terminal, b"\r")
        until(b"success, power-safe")
        time.sleep(0.5)
        os.write(terminal, b"\x1b")
        until(b"There are 1 of 5. The same command goes on.")
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"period 100.0 ms: p50" in said and b" steps/s" in said, "the rate at the end, and what goes on meanwhile"
    assert re.search(rb"[\r\n](\x1b\[[0-9;?]*[A-Za-z])*episode 1: \d+ steps, success", said), "a line for each episode"
    assert b"keys: W or arrowup +x, " in said and b"enter success" in said
    with Log.open(out / "log", "r") as log:
        (number,) = log.trajectories()
        facts, steps = log.facts.about(number), log.read(log.trajectory_keys(number), ["actions", "source", "rewards"])
        assert (facts["device"], facts["success"]) == ("keyboard", True) and facts["intervention_steps"] >= 5
        assert (steps["source"] == 1).all() and (steps["actions"][:, 0] == 1).sum() == facts["intervention_steps"]
        assert steps["rewards"][-1] == 1 and log.by_source("human").keys().size == len(log)


class Pusher(Device):
    """A person who begins to push at the second reading, and says at the fourth that it succeeded."""

    limits: ClassVar[list[int]] = []

    def reset(self) -> None:
        self.readings = 0

    def show(self, images: Any, status: Status) -> None:
        self.limits.append(status.step_limit)

    def read(self) -> Reading:
        self.readings += 1
        motion = np.array([self.readings > 1, 0, 0, 0, 0, 0.0])
        return Reading(motion, engaged=self.readings > 1, events=("success",) if self.readings == 4 else ())


PUSHER = ["--device", "tests.cli.test_record_command:Pusher", "--episodes", 1]


def test_an_arm_without_cameras_and_one_that_is_not_there(tmp_path: Path):
    with ToyRobot(scene()) as arm:
        done = run("record", f"robot/{arm.url}", *PUSHER, "--out", tmp_path / "a")
    assert done.stdout.count("NO CAMERAS") == 1 and """-o 'cameras=["front", "wrist"]'""" in done.stdout
    gone = run("record", f"robot/{arm.url}", *PUSHER, "--out", tmp_path / "b", code=1)
    assert "no robot server answers" in gone.stderr and not (tmp_path / "b").exists() and not gone.stdout


def test_a_person_has_three_times_the_steps(tmp_path: Path):
    for name, more, limit in (("a", [], 120), ("b", ["-o", "step_limit=50"], 50)):
        Pusher.limits.clear()
        run("record", "tabletop/reach", *PUSHER, "-o", "image_size=null", *more, "--out", tmp_path / name)
        assert set(Pusher.limits) == {limit}


def test_motions_are_disturbed(tmp_path: Path):
    arguments = ["record", TOY, "--device", "script", "--episodes", 2, "--keep", "all", "--no-video"]
    run(*arguments, "--disturb", 0.4, "--out", tmp_path / "a")
    with Log.open(tmp_path / "a" / "log", "r") as log:
        assert [log.facts.about(number)["disturb"] for number in log.trajectories()] == [0.4, 0.4]
    wrong = run(*arguments, "--disturb", -1, "--out", tmp_path / "b", code=1)
    assert "--disturb -1: expected a standard deviation above 0, such as 0.15." in wrong.stderr
    assert not (tmp_path / "b").exists(), "nothing is left behind"


def test_all_episodes_and_chosen_states(tmp_path: Path):
    out = tmp_path / "a"
    options = [
        "-o",
        "hopeless=[1, 5]",
        "--states",
        "0-1,5",
        "--split",
        "train",
        "--keep",
        "all",
        "--no-video",
        "--seed",
        7,
    ]
    done = run("record", TOY, "--device", "script", "--episodes", 4, "--out", out, *options)
    assert "no success, power-safe" in done.stdout and "4 episodes, 2 of them succeeded" in done.stdout
    assert not (out / "videos").exists()
    with Log.open(out / "log", "r") as log:
        found = [(log.facts.about(n)["state"], log.facts.about(n)["success"]) for n in log.trajectories()]
    assert found == [(0, True), (1, False), (5, False), (0, True)]


def test_observations_of_hil_serl_and_the_mode(tmp_path: Path):
    small = ["-o", "image_size=16", "--no-video", "--observations", "hil-serl", "--mode", "toggle"]
    done = run("record", "tabletop/reach", "--device", "script", "--episodes", 1, "--out", tmp_path / "a", *small)
    assert "--to hil-serl" in done.stdout
    with Log.open(tmp_path / "a" / "log", "r") as log:
        assert log.schema.columns["observations/state"].shape == (1, 19) and log.facts.about(0)["mode"] == "toggle"


def test_frames_for_a_classifier(tmp_path: Path):
    out = tmp_path / "a"
    done = run(
        "record", TOY, "--device", "script", "--classifier", "--successes-needed", 10, "--out", out, "--no-video"
    )
    assert "of 10 frames marked" in done.stdout
    with Log.open(out / "log", "r") as log:
        steps = log.read(log.all().keys(), ["labels", "rewards"])
        assert (
            steps["labels"].sum() >= 10 and 0 in steps["labels"] and (steps["labels"] == (steps["rewards"] > 0)).all()
        )


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--classifier", "--episodes", "3"], 2, "give --successes-needed instead of --episodes"),
        (["--classifier", "--keep", "all"], 2, "leave out --keep"),
        (["--successes-needed", "3", "--episodes", "3"], 2, "give one of them"),
        (["--states", "1-x"], 2, "expected numbers and ranges"),
        (["--states", "5-3"], 2, "expected numbers and ranges"),
        (["--states", "1,,2"], 2, "expected numbers and ranges"),
        (["-o", "delay"], 2, "expected NAME=VALUE"),
        (
            ["-o", "color=red"],
            1,
            "cannot be made with the options {'color': 'red'}: Toy.__init__() got an unexpected keyword argument",
        ),
        (["-d", "haste=2"], 1, "script cannot be made with the options {'haste': 2}"),
        (["--device", "mouse"], 1, "no device named 'mouse'; did you mean 'spacemouse'?"),
        (["--mode", "press"], 1, "mode is 'press'"),
        (["--device", "keyboard", "-d", "terminal=/dev/null"], 1, "the keyboard needs a terminal"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(tmp_path: Path, arguments: list[str], code: int, words: str):
    given = [
        "record",
        TOY,
        "--out",
        str(tmp_path / "a"),
        *([] if "--device" in arguments else ["--device", "script"]),
        *arguments,
    ]
    assert words in " ".join(run(*given, code=code).output.split())


def test_the_next_command_has_the_rate_of_the_recording_where_the_recipe_has_another(tmp_path: Path):
    words = ["tabletop/button", "--device", "script", "--episodes", 1, "--no-video", "--image-size", 32]
    said = " ".join(run("record", *words, "--out", tmp_path / "shown").output.split())
    assert "task_options.control_hz=10.0 demonstrations=0" in said, said


def test_what_is_done_next_with_a_recording():
    from hilt.cli.record_command import next_commands
    from hilt.recording.record import Settings

    made = Path("recordings/my pick")
    assert next_commands(made, Settings("tabletop/pick", {"image_size": 32}), "browser") == [
        "hilt data inspect 'recordings/my pick'",
        (
            "hilt train tabletop_pick task_options.image_size=32 demonstrations=0 "
            "'demo_path=[recordings/my pick]' operator=browser"
        ),
        "hilt data convert 'recordings/my pick' 'recordings/my pick/lerobot' --to lerobot",
    ]
    assert (  # the recipe has a rate of its own
        "hilt train tabletop_button task_options.control_hz=4 demonstrations=0"
        in next_commands(made, Settings("tabletop/button", {"control_hz": 4}), "script")[1]
    )
    assert (
        "hilt train RECIPE task=robot/arm.yaml demonstrations=0"
        in next_commands(made, Settings("robot/arm.yaml"), "spacemouse")[1]
    )
    assert next_commands(made, Settings("tabletop/pick", successes_needed=5), "browser")[1] == (
        "hilt train classifier 'recordings/my pick' --out classifier"
    )
    assert next_commands(made, Settings("tabletop/pick", observations="hil-serl"), "script")[2].endswith(
        "--to hil-serl"
    )


def test_what_is_done_next_with_a_served_arm():
    from hilt.cli.servers.serve_robot import next_commands

    assert next_commands(["http://127.0.0.1:5000/"], True, False) == [
        'hilt record robot/127.0.0.1:5000 --device browser -o \'cameras=["front", "wrist"]\''
    ]
    assert next_commands(["http://10.0.0.2:5000/", "http://10.0.0.2:5001/"], False, True) == [
        "hilt record robot/10.0.0.2:5000,10.0.0.2:5001 --device browser -o token_file=FILE"
    ]
