"""What stays of a session, what is counted, and what the log says of each episode."""

from __future__ import annotations

import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

from hilt.core.errors import ConfigError, HiltError, SchemaError, UnknownNameError
from hilt.core.files import DISK, Files, _path_of
from hilt.core.tree import flatten
from hilt.envs.task import as_task, make
from hilt.formats import open_dataset
from hilt.formats.convert import convert
from hilt.recording.buffered_device import BufferedDevice, as_hil_serl
from hilt.recording.film import frames
from hilt.recording.record import FAILURES_IN_A_ROW, Recorded, RecordingSummary, Settings, record
from hilt.recording.recording_folder import replay_open_loop
from hilt.replay import Log
from hilt.teleop.devices import Device, Reading, Status
from hilt.teleop.operator import Script
from tests.effort import need_rendering
from tests.hil.toy import Toy, points

TOY = "tests.hil.toy:Toy"


class Person(Device):
    """Acts as it was told, step by step: an axis' motion, what it presses, or a whole reading; None does nothing."""

    name = "person"

    def __init__(self, *steps: float | str | Reading | None):
        super().__init__()
        self._steps = list(steps)
        self.shown: list[Status] = []

    def show(self, images: Any, status: Status) -> None:
        self.shown.append(status)

    def read(self) -> Reading:
        what = self._steps.pop(0) if self._steps else "stop"
        if isinstance(what, str):
            return Reading(events=(what,))
        if isinstance(what, Reading):
            return what
        return Reading(np.array([what or 0, 0, 0, 0, 0, 0]), engaged=what is not None)


class Seen:
    """A watch that remembers."""

    def __init__(self) -> None:
        self.episodes: list[Recorded] = []
        self.have: list[int] = []

    def begin(self, summary: RecordingSummary) -> None:
        self.have.append(summary.have)

    def step(self, summary: RecordingSummary) -> None: ...

    def episode(self, recorded: Recorded, summary: RecordingSummary) -> None:
        self.episodes.append(recorded)

    def end(self, summary: RecordingSummary) -> None: ...


def session(
    folder: Path, device: Device | None = None, toy: dict[str, Any] | None = None, **settings: Any
) -> tuple[RecordingSummary, Seen]:
    watch, videos = Seen(), settings.pop("videos", False)
    given = {"task": TOY, "options": toy or {}, "episodes": 3, **settings}
    return record(Toy(**(toy or {})), device or Script(), folder, Settings(**given), watch=watch, videos=videos), watch


def opened(folder: Path) -> Log:
    return Log.open(folder / "log", "r")


def test_only_successes_stay_and_the_rest_is_counted(tmp_path: Path):
    summary, watch = session(tmp_path / "a", toy={"hopeless": [0, 1, 2, 3]}, episodes=4)
    assert (summary.have, summary.episodes, summary.successes, summary.complete) == (4, 4, 4, True)
    assert summary.discarded == {"no success": summary.attempts - 4} and summary.attempts > 4
    assert [r.dropped for r in watch.episodes if not r.success] == ["no success"] * (summary.attempts - 4)
    with opened(tmp_path / "a") as log:
        assert len(log.trajectories()) == 4 and len(log.successes()) == len(log) == len(log.by_source("demo"))
        for number in log.trajectories():
            facts = log.facts.about(number)
            assert facts["state"] in (4, 5, 6, 7) and facts["split"] == "train" and facts["success"] is True
            assert (facts["task"], facts["device"], facts["language_instruction"]) == (TOY, "script", "reach the goal")
            assert facts["fps"] == 200 and facts["recorded_as"] == "demonstrations"
            assert facts["intervention_steps"] == facts["steps"] == len(log.trajectory_keys(number))
            assert set(facts["versions"]) >= {"hilt", "gymnasium", "numpy"} and facts["options"] == {
                "hopeless": [0, 1, 2, 3]
            }
        steps = log.read(log.trajectory_keys(log.trajectories()[0]))
        assert (
            steps["terminated"].tolist() == [False] * (len(steps["rewards"]) - 1) + [True]
            and not steps["truncated"].any()
        )
        moved = points(log, log.trajectories()[0])
        assert np.allclose(np.diff(moved, axis=0), 0.2 * steps["actions"], atol=1e-6), (
            "the action recorded is the action executed"
        )
        times = steps["times"]
        assert (
            (times["observed"] <= times["sent"]).all()
            and (times["sent"] <= times["applied"]).all()
            and times["observed"][0] > 1.7e9
        )
        assert (steps["policy_version"] == -1).all()


def test_record_keep_all_marks_failures(tmp_path: Path):
    summary, _ = session(tmp_path / "a", toy={"hopeless": [0, 1, 2, 3]}, episodes=8, keep="all")
    assert (summary.have, summary.episodes, summary.successes, summary.attempts) == (8, 8, 4, 8)
    with opened(tmp_path / "a") as log:
        failed = {
            log.facts.about(number)["state"] for number in log.trajectories() if not log.facts.about(number)["success"]
        }
        assert failed == {0, 1, 2, 3}, "each initial state once, and those that are hopeless failed"


def test_a_session_goes_on_where_the_last_one_ended(tmp_path: Path):
    session(tmp_path / "a", episodes=3)
    summary, watch = session(tmp_path / "a", episodes=8)
    assert watch.have == [3] and (summary.have, summary.attempts, len(watch.episodes)) == (8, 5, 5)
    with opened(tmp_path / "a") as log:
        assert sorted(log.facts.about(number)["state"] for number in log.trajectories()) == list(range(8))
    summary, _ = session(tmp_path / "a", episodes=8)
    assert summary.attempts == 0 and summary.complete


def test_an_unfinished_episode_is_dropped_and_never_counted(tmp_path: Path):
    session(tmp_path / "a", episodes=2)
    with Log.open(tmp_path / "a" / "log") as log:
        keys = log.trajectory_keys(log.trajectories()[0])
        log.add(_wide(log.read(keys[:1])))  # as a session leaves it that is killed before its facts
        assert len(log.trajectories()) == 3
    summary, watch = session(tmp_path / "a", episodes=3)
    assert summary.unfinished == 1 and watch.have == [2] and summary.episodes == 3
    with opened(tmp_path / "a") as log:
        assert len(log.trajectories()) == 3 and all("task" in log.facts.about(number) for number in log.trajectories())


def _wide(tree: Any) -> Any:
    return {key: _wide(value) for key, value in tree.items()} if isinstance(tree, dict) else tree[:, None]


def test_an_episode_is_power_safe_when_it_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dirty: set[str] = set()

    class Tracking(Files):
        def write(self, fd: int, data: Any, offset: int) -> None:
            dirty.add(str(_path_of(fd)))
            super().write(fd, data, offset)

        def write_all(self, fd: int, buffers: Any, offset: int) -> None:
            dirty.add(str(_path_of(fd)))
            super().write_all(fd, buffers, offset)

        def sync(self, fd: int) -> None:
            dirty.discard(str(_path_of(fd)))
            super().sync(fd)

    class Asks(Seen):
        def step(self, summary: RecordingSummary) -> None:
            self.wrote = len(dirty)

        def episode(self, recorded: Recorded, summary: RecordingSummary) -> None:
            super().episode(recorded, summary)
            assert not dirty, f"{dirty} would not survive a power cut"

    monkeypatch.setattr(DISK, "__class__", Tracking)
    watch = Asks()
    record(Toy(hopeless=(0, 1)), Script(), tmp_path / "a", Settings(TOY, episodes=6), watch=watch, videos=False)
    assert len(watch.episodes) >= 6 and watch.wrote == 0, "the last step of an episode is synced with its end"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"task": "tests.hil.toy:Other"},
            ConfigError,
            "demonstrations of tests.hil.toy:Toy .* tests.hil.toy:Other .*--out",
        ),
        ({"toy": {"step_limit": 4}}, ConfigError, r"options \{\} and nested observations, and .* \{'step_limit': 4\}"),
        ({"successes_needed": 5}, ConfigError, "has demonstrations of .* labeled frames"),
        ({"split": "eval"}, UnknownNameError, "no split named 'eval'.* Known: test, train"),
        ({"states": [7, 8]}, ConfigError, "initial state 8 of train: .* has 8 there"),
        ({"keep": "some"}, UnknownNameError, "no rule of what to keep named 'some'"),
        ({"observations": "flat"}, UnknownNameError, "no kind of observations named 'flat'.* Known: hil-serl, nested"),
        ({"episodes": 0}, ConfigError, "expected at least 1"),
    ],
)
def test_record_refuses_another_task_or_settings(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], words: str
):
    session(tmp_path / "a", episodes=1)
    with pytest.raises(error, match=words):
        session(tmp_path / "a", **change)
    assert session(tmp_path / "a", episodes=2)[0].have == 2, "nothing holds the log"


def test_an_arm_whose_settings_changed_is_refused_in_one_log(tmp_path: Path):
    class Arm(Toy):
        def __init__(self, **changes: Any):
            super().__init__()
            camera = {"kind": "opencv", "source": "0", "deadline_seconds": 5.0}
            self.settings = {
                "hz": 10.0,
                "action_scale": [0.03, 0.15],
                "limit_low": [0.0],
                "cameras": {"front": camera},
                **changes,
            }

    def recorded(episodes: int, **changes: Any) -> None:
        record(Arm(**changes), Script(), tmp_path / "a", Settings("robot/arm.yaml", episodes=episodes), videos=False)

    recorded(1)
    recorded(2, limit_low=[0.1], cameras={"front": {"kind": "opencv", "source": "0", "deadline_seconds": 9.0}})
    with pytest.raises(ConfigError, match=r"action_scale was \[0\.03, 0\.15\] .* and is \[0\.02, 0\.1\] now.*--out"):
        recorded(3, action_scale=[0.02, 0.1])
    with pytest.raises(ConfigError, match=r"cameras was .*'source': '0'.* and is \{\} now"):
        recorded(3, cameras={})
    with opened(tmp_path / "a") as log:
        assert [log.facts.about(n)["settings"]["limit_low"] for n in log.trajectories()] == [[0.0], [0.1]], (
            "each episode knows them all"
        )


def test_where_nothing_was_recorded_anything_may_be(tmp_path: Path):
    """A session that got nowhere does not decide; nor does one leave a folder whose arm does not answer."""

    class Absent(Toy):
        def connect(self) -> None:
            raise HiltError("no robot server answers")

    with pytest.raises(HiltError, match="no robot server"):
        record(Absent(), Script(), tmp_path / "a", Settings(TOY), videos=False)
    assert not (tmp_path / "a").exists()
    assert session(tmp_path / "a", Person("stop"))[0].episodes == 0
    other = Toy(step_limit=7)
    other.observation_space["images"].spaces["side"] = Box(0, 255, (8, 8, 3), np.uint8)
    assert not record(
        other, Script(), tmp_path / "a", Settings(TOY, {"step_limit": 7}), stop=lambda: True, videos=False
    ).episodes
    assert session(tmp_path / "a", toy={"step_limit": 8}, episodes=1)[0].have == 1


def test_a_log_with_another_schema_and_a_folder_of_somebody_else_are_refused(tmp_path: Path):
    session(tmp_path / "a", episodes=1)
    with pytest.raises(SchemaError, match="another schema: observations/images/front"):
        smaller = Toy()
        smaller.observation_space["images"].spaces["front"] = Box(0, 255, (8, 8, 3), np.uint8)
        record(smaller, Script(), tmp_path / "a", Settings(TOY), videos=False)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"is not a recording: thesis\.txt is in it"):
        session(tmp_path / "b")


def test_a_person(tmp_path: Path):
    """Drives at the control rate; an episode begins when they act; who lets go
    still demonstrates; what was given up goes."""
    waiting, given_up = [None] * 9, [1.0, 1.0, "reset"]  # longer than the step limit
    marked = [None, 1.0, None, 0.5, "success"]
    person = Person(*waiting, *given_up, *marked, None, 1.0, "stop")
    summary, watch = session(tmp_path / "a", person, episodes=2)
    assert [(r.dropped, r.steps) for r in watch.episodes] == [("no success", 4), ("", 5), ("stopped", 3)]
    assert summary.stopped and not summary.complete and summary.have == 1
    assert (
        summary.timing is not None and summary.timing["steps"] == summary.steps and summary.timing["nominal"] == 1 / 200
    )
    assert "p99" in summary.rate()
    assert [status.message for status in person.shown[:2]] == [
        "0 of 2 recorded",
        "0 of 2 recorded. Take over to begin.",
    ]
    assert {status.instruction for status in person.shown} == {"reach the goal"}
    with opened(tmp_path / "a") as log:
        (number,) = log.trajectories()
        steps = log.read(log.trajectory_keys(number), ["actions", "source", "terminated", "rewards"])
        assert steps["actions"][:, 0].tolist() == [0.0, 1.0, 0.0, 0.5, 0.0] and (steps["source"] == 1).all()
        assert steps["terminated"].tolist() == [False] * 4 + [True] and steps["rewards"][-1] == 1
        facts = log.facts.about(number)
        assert (facts["intervention_count"], facts["intervention_steps"], facts["success"]) == (2, 2, True)


def test_with_toggle_an_episode_begins_at_the_toggle(tmp_path: Path):
    """What is held before moves nothing, so no step limit runs either."""
    person = Person(*[1.0] * 9, "toggle", 1.0, 1.0, "success")
    _, watch = session(tmp_path / "a", person, episodes=1, mode="toggle")
    assert [(r.dropped, r.steps) for r in watch.episodes] == [("", 5)]


REST = Reading(engaged=True)  # as on the page, where one has taken over and presses nothing
LOST = Reading(engaged=True, lost=True)


def held(x: float = 0.0, z: float = 0.0) -> Reading:
    return Reading(np.array([x, 0, z, 0, 0, 0]), engaged=True)


@pytest.mark.parametrize("mode", ["hold", "toggle"])
def test_record_waits_for_a_person_who_took_over_and_rests(tmp_path: Path, mode: str):
    """The page says *toggle* once more at each reset, for its seat is still taken."""
    again = Reading(engaged=True, events=("toggle",))
    first = [None, again, 1.0, "success"]
    person = Person(*first, again, *[REST] * 9, 1.0, 1.0, "success")
    _, watch = session(tmp_path / "a", person, episodes=2, mode=mode)
    assert [(r.dropped, r.steps) for r in watch.episodes] == [("", 4), ("", 4)]
    assert "Recorded: 1 of 2. Move to begin." in [status.message for status in person.shown]
    with opened(tmp_path / "a") as log:
        assert log.read(log.trajectory_keys(1), ["actions"])["actions"][:, 0].tolist() == [0, 1, 1, 0]


def test_record_does_not_begin_with_inputs_held_before(tmp_path: Path):
    """A key held over the reset, a stick that never rests: all that moves nothing. The person is told to let go."""
    person = Person(*[held(1)] * 9, REST, held(1), "success", *[held(z=-0.5)] * 9, held(1, -0.5), "success")
    _, watch = session(tmp_path / "a", person, episodes=2)
    assert [(r.dropped, r.steps) for r in watch.episodes] == [("", 3), ("", 3)]
    told = {status.message for status in person.shown}
    assert {f"{how}. Let go, then press again to begin." for how in ("0 of 2 recorded", "Recorded: 1 of 2")} <= told
    with opened(tmp_path / "a") as log:
        actions = log.read(log.all().keys(), ["actions"])["actions"]
        assert actions[:, 0].tolist() == [0, 1, 0, 0, 1, 0] and not actions[:, 2].any()


def test_lost_contact_begins_nothing_and_does_not_stay(tmp_path: Path):
    """The page is closed in an episode: that one goes, and no other begins by itself."""
    person = Person(None, held(1), *[LOST] * 30, None, held(1), held(1), LOST, "success")
    _, watch = session(tmp_path / "a", person, episodes=1, keep="all")
    assert [(r.dropped, r.steps) for r in watch.episodes] == [("contact lost", 6), ("", 5)]


def test_a_recording_passes_everything_on_to_its_device():
    """A leader, which must know where the arm is, led nothing in a recording."""
    device = Person()
    seat = BufferedDevice(device, marks=False, toggles=False)
    own = {"press", "take_events"}  # of its own queue, which has nothing
    for name in {name for name in vars(Device) if not name.startswith("_")} - own - vars(BufferedDevice).keys():
        assert getattr(seat, name) == getattr(device, name), name


def test_emergency_stop_pauses_a_recording_until_it_is_released(tmp_path: Path):
    person = Person(None, held(1), "estop", *[held(1)] * 20, "release_estop", REST, held(1), "success")
    _, watch = session(tmp_path / "a", person, episodes=1)
    assert [(r.dropped, r.steps) for r in watch.episodes] == [("", 6)]
    with opened(tmp_path / "a") as log:
        actions = log.read(log.all().keys(), ["actions"])["actions"]
        assert actions[:, 0].tolist() == [0, 1, 0, 0, 1, 0], "the step that finds it, and the one after it"


def test_record_shows_how_each_episode_ended_and_the_end(tmp_path: Path):
    person = Person(None, 1.0, "fail", None, 1.0, "success", None, 1.0, "stop")
    session(tmp_path / "a", person, episodes=3)
    told = [status.message for status in person.shown if "begin" not in status.message]
    assert [text for text, before in zip(told, ["", *told], strict=False) if text != before] == [
        *("0 of 3 recorded", "Dropped, no success: 0 of 3."),
        *("0 of 3 recorded", "Recorded: 1 of 3."),
        *("1 of 3 recorded", "Dropped, stopped: 1 of 3.", "Recording has ended: 1 of 3."),
    ]


def test_an_arm_that_keeps_its_own_rate_waits_too(tmp_path: Path):
    """Meanwhile the scene is put in order: pictures go on, and the episode begins
    with what is seen when somebody acts."""

    class Paced(Toy):
        looks = 0

        def timing(self) -> dict[str, float]:
            return {"nominal": 0.1, "p50": 0.1, "p99": 0.11, "max": 0.2, "steps": 3, "missed": 0}

        def look(self) -> Any:
            Paced.looks += 1
            seen = self._seen()
            seen["images"]["front"][:] = Paced.looks
            return seen

    class Looks(Person):
        screen = True

        def show(self, images: Any, status: Status) -> None:
            pictures.add(int(images["front"][0, 0, 0]))

    pictures: set[int] = set()
    person = Looks(*[None] * 9, 1.0, 1.0, "success")
    watch = Seen()
    summary = record(Paced(), person, tmp_path / "a", Settings(TOY, episodes=1, keep="all"), watch=watch, videos=False)
    assert [(r.dropped, r.steps) for r in watch.episodes] == [("", 4)] and Paced.looks == 9
    assert set(range(1, 9)) <= pictures
    assert summary.rate() == "period 100.0 ms: p50 100.0, p99 110.0, at most 200.0 ms; 0 periods lost"
    assert replace(summary, timing={**(summary.timing or {}), "missed": 1.0}).rate().endswith("; 1 period lost")
    with opened(tmp_path / "a") as log:
        assert (log.read(log.trajectory_keys(0)[:1], ["observations"])["observations"]["images"]["front"] == 9).all()
    summary = record(Paced(), Person(*[None] * 9, "stop"), tmp_path / "b", Settings(TOY), videos=False)
    assert summary.stopped and summary.discarded == {"stopped": 1}


def test_stop_from_outside_drops_the_running_episode(tmp_path: Path):
    class Second(Seen):
        reached = False

        def step(self, summary: RecordingSummary) -> None:
            self.reached = summary.attempts == 2 and summary.step == 1

    watch = Second()
    summary = record(
        Toy(), Script(), tmp_path / "a", Settings(TOY), watch=watch, stop=lambda: watch.reached, videos=False
    )
    assert summary.stopped and (summary.have, summary.discarded) == (1, {"stopped": 1})
    assert (watch.episodes[1].dropped, watch.episodes[1].steps) == ("stopped", 1)
    with opened(tmp_path / "a") as log:
        assert len(log.trajectories()) == 1


def test_record_reports_a_script_that_always_fails(tmp_path: Path):
    with pytest.raises(HiltError, match=f"device script failed {FAILURES_IN_A_ROW} times"):
        session(tmp_path / "a", toy={"hopeless": list(range(8))})


def test_an_environment_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its error comes at once, not after the videos; what was recorded before stays, and no half of an episode does."""
    popen = subprocess.Popen
    # videos take long
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen(["sleep", "3600"], **options))
    steps = []

    class Fails(Toy):
        def step(self, action: Any) -> Any:
            steps.append(action)
            if len(steps) == 6:
                raise RuntimeError("the cable is loose")
            return super().step(action)

    with pytest.raises(RuntimeError, match="the cable is loose"):  # without waiting for the videos
        record(Fails(), Script(), tmp_path / "a", Settings(TOY, episodes=9))
    with opened(tmp_path / "a") as log:
        assert all("task" in log.facts.about(number) for number in log.trajectories()) and log.trajectories()
        assert len(log) == sum(log.facts.about(number)["steps"] for number in log.trajectories()) < 6


def test_a_success_that_is_no_answer_leaves_nothing_behind(tmp_path: Path):
    class Vague(Toy):
        def step(self, action: Any) -> Any:
            *rest, _ = super().step(action)
            return *rest, {"success": "perhaps"}

    with pytest.raises(SchemaError, match="expected True or False"):
        record(Vague(), Script(), tmp_path / "a", Settings(TOY), videos=False)
    with opened(tmp_path / "a") as log:
        assert not log.trajectories()


def test_arrays_that_the_environment_uses_again_are_copied(tmp_path: Path):
    class Reuses(Toy):
        kept: Any = None

        def _seen(self) -> Any:
            fresh = super()._seen()
            self.kept = self.kept or fresh
            self.kept["state"]["left/point"][:] = fresh["state"]["left/point"]
            self.kept["images"]["front"][:] = fresh["images"]["front"]
            return self.kept

    record(Reuses(), Script(), tmp_path / "a", Settings(TOY, episodes=1), videos=False)
    with opened(tmp_path / "a") as log:
        moved, steps = points(log, 0), log.read(log.trajectory_keys(0))
        assert np.allclose(np.diff(moved, axis=0), 0.2 * steps["actions"], atol=1e-6) and (moved[0] == 0).all()
        shown = [steps[name]["images"]["front"][:, 0, 0, 1] for name in ("observations", "next_observations")]
        assert (shown[1] - shown[0] == 10).all()


def test_the_clock_of_the_computer_may_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = iter(np.linspace(2e9, 1e9, 100))
    monkeypatch.setattr(time, "time", lambda: next(now))
    session(tmp_path / "a", episodes=2)
    with opened(tmp_path / "a") as log:
        times = log.read(log.all().keys(), ["times"])["times"]
        assert (np.diff(np.stack([times[name] for name in ("observed", "sent", "applied")], 1).ravel()) >= 0).all()


def test_no_seed_comes_twice(tmp_path: Path):
    """A state whose first attempt failed was recorded with the seed of the second;
    a session that goes on must not repeat it."""

    class Unlucky(Toy):
        attempts = 0

        def expert(self) -> Any:
            Unlucky.attempts += 1
            return (lambda: np.zeros(3)) if Unlucky.attempts == 1 else super().expert()

    for episodes in (1, 2):
        record(Unlucky(), Script(), tmp_path / "a", Settings(TOY, episodes=episodes, states=[3]), videos=False)
    with opened(tmp_path / "a") as log:
        assert len({log.facts.about(number)["seed"] for number in log.trajectories()}) == 2


def test_the_seed_decides_the_order(tmp_path: Path):
    orders = []
    for number, seed in enumerate((0, 0, 1)):
        session(tmp_path / str(number), episodes=5, seed=seed)
        with opened(tmp_path / str(number)) as log:
            orders.append([log.facts.about(trajectory)["state"] for trajectory in log.trajectories()])
    assert orders[0] == orders[1] != orders[2]


def test_record_with_an_environment_that_never_reports_success(tmp_path: Path):
    """With a script that is an error, or with all kept unknown; a person marks it."""

    class Silent(Toy):
        def step(self, action: Any) -> Any:
            *rest, _ = super().step(action)
            return *rest, {}

    with pytest.raises(HiltError, match=r"does not report success in info.*--keep all"):
        record(Silent(), Script(), tmp_path / "a", Settings(TOY), videos=False)
    asked = iter([False, False, True, True])  # stopped after its first step
    assert record(Silent(), Script(), tmp_path / "a", Settings(TOY), stop=lambda: next(asked), videos=False).stopped
    watch = Seen()
    record(Silent(), Script(), tmp_path / "b", Settings(TOY, episodes=2, keep="all"), watch=watch, videos=False)
    assert [r.success for r in watch.episodes] == [None, None]
    with opened(tmp_path / "b") as log:
        assert "success" not in log.facts.about(0) and list(frames(log, 0, 1)), "the video's end says neither"
    person = Person(None, 1.0, "success", None, *[1.0] * 5)
    summary = record(Silent(), person, tmp_path / "c", Settings(TOY, episodes=2), videos=False)
    assert (summary.have, summary.discarded) == (1, {"no success": 1, "stopped": 1})


def test_a_plain_environment(tmp_path: Path):
    """Numbered states, words and a limit come from `as_task`, in Python as in the command."""
    env = gymnasium.make("Pendulum-v1", max_episode_steps=5)
    script = Script(expert=lambda env: lambda: np.array([0.5]))
    record(
        env,
        script,
        tmp_path / "a",
        Settings("Pendulum-v1", episodes=2, keep="all", split="eval", states=[3, 4]),
        videos=False,
    )
    with opened(tmp_path / "a") as log:
        assert [log.facts.about(number)["state"] for number in log.trajectories()] == [3, 4]
        assert log.facts.about(0)["language_instruction"] == "pendulum" and log.facts.about(0)["split"] == "eval"
        assert max(replay_open_loop(log, 0, as_task(env)).values()) == 0


def test_a_person_drives_a_plain_environment(tmp_path: Path):
    """Whose actions no device knows: the device was opened with `action_of`."""
    person = Person(None, 1.0, -1.0, 1.0, "success")
    person.action_of = lambda reading, space: int(reading.motion[0] > 0)
    env = gymnasium.make("CartPole-v1", max_episode_steps=50)
    record(env, person, tmp_path / "a", Settings("CartPole-v1", episodes=1), videos=False)
    with opened(tmp_path / "a") as log:
        assert log.read(log.trajectory_keys(0), ["actions"])["actions"].tolist() == [0, 1, 0, 1, 0]
        assert log.facts.about(0)["success"] is True


def test_record_refuses_a_device_with_invalid_readings(tmp_path: Path):
    with pytest.raises(SchemaError, match="person"):
        session(tmp_path / "a", Person(Reading(motion=np.zeros(3))))


def test_two_sessions_in_one_folder(tmp_path: Path):
    class Second(Seen):
        def step(self, summary: RecordingSummary) -> None:
            with pytest.raises(HiltError, match="is writing to this log"):
                session(tmp_path / "a", episodes=9)

    assert record(Toy(), Script(), tmp_path / "a", Settings(TOY, episodes=1), watch=Second(), videos=False).have == 1


def test_a_penalty_that_comes_late_is_refused(tmp_path: Path):
    class Late(Toy):
        def step(self, action: Any) -> Any:
            *rest, info = super().step(action)
            return *rest, {**info, **({"grasp_penalty": -0.02} if self.steps > 1 else {})}

    with pytest.raises(SchemaError, match=r"grasp_penalty is not in every info\. Give it in each step"):
        record(Late(), Script(), tmp_path / "a", Settings(TOY), videos=False)


def test_the_penalty_of_the_gripper_becomes_a_column(tmp_path: Path):
    session(tmp_path / "a", episodes=1)
    record(Toy(penalty=True), Script(), tmp_path / "a", Settings(TOY, episodes=2), videos=False)
    record(Toy(penalty=True), Script(), tmp_path / "a", Settings(TOY, episodes=3), videos=False)
    with opened(tmp_path / "a") as log:
        first, *others = [
            log.read(log.trajectory_keys(number), ["grasp_penalty"])["grasp_penalty"] for number in log.trajectories()
        ]
        assert (first == 0).all()
        for penalty in others:
            assert np.allclose(penalty, -0.02 * np.arange(1, len(penalty) + 1))


def test_frames_for_a_classifier_from_a_script(tmp_path: Path):
    """Success is the environment's word; it goes on after it, and what was near before is failure."""
    toy = {"step_limit": 30}
    summary, _ = session(tmp_path / "a", toy=toy, successes_needed=30)
    assert summary.have >= 30 and summary.attempts == 2
    summary, watch = session(tmp_path / "a", toy=toy, successes_needed=41)
    assert watch.have == [40] and summary.attempts == 1
    with opened(tmp_path / "a") as log:
        for number in log.trajectories():
            steps = log.read(log.trajectory_keys(number))
            moved, goal = points(log, number)[1:], points(log, number)[-1]
            near = np.abs(moved - goal).max(axis=1)
            assert steps["labels"].sum() == 20 and (steps["labels"] == (steps["rewards"] > 0)).all()
            assert (near[steps["labels"] == 0] >= 0.05).all() and (steps["labels"] == 0).any()
            assert steps["truncated"][-1] and not steps["terminated"].any()


def test_frames_for_a_classifier_from_a_person(tmp_path: Path):
    person = Person(None, 1.0, "success", "success", None, 1.0, None, 1.0, "success", None, None, None)
    summary, watch = session(tmp_path / "a", person, successes_needed=3)
    assert summary.have == 3 and [r.steps for r in watch.episodes] == [6, 6]
    counted = [status.message for status in person.shown if status.step]
    assert counted[:6] == [f"{n} of 3 frames marked" for n in (0, 0, 0, 1, 2, 2)], "live"
    with opened(tmp_path / "a") as log:
        labels = [log.read(log.trajectory_keys(number), ["labels"])["labels"].tolist() for number in log.trajectories()]
        assert labels == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0]]


def test_episodes_played_again_reach_the_recorded_states(tmp_path: Path):
    """Exactly, pixels too, in tabletop; and with one other action they do not."""
    need_rendering()
    env = make("tabletop/push")
    summary = record(env, Script(), tmp_path / "a", Settings("tabletop/push", episodes=2, seed=3), videos=False)
    assert summary.have == 2
    with Log.open(tmp_path / "a" / "log") as log:
        again = make(log.facts.about(log.trajectories()[0])["task"])
        for number in log.trajectories():
            furthest = replay_open_loop(log, number, again)
            assert {path for path in furthest if "images" in path} == {
                "observations/images/front",
                "observations/images/wrist",
            }
            assert set(furthest.values()) == {0.0}, furthest
        keys = log.trajectory_keys(log.trajectories()[0])
        wrong = -log.read(keys[4:5], ["actions"])["actions"]
        log.relabel(log.trajectories()[0], "actions", wrong, first=4)
        assert replay_open_loop(log, log.trajectories()[0], again)["observations/state/tcp_pose"] > 1e-3
    env.close()
    again.close()


def test_observations_as_hil_serl_has_them(tmp_path: Path):
    """Its shapes, its relative actions and the gripper's penalty; played again
    through the same wrappers, the same happens."""
    need_rendering()
    env = make("tabletop/pick")
    settings = Settings("tabletop/pick", episodes=1, observations="hil-serl")
    assert record(env, Script(), tmp_path / "a", settings).videos == 1
    with opened(tmp_path / "a") as log:
        shapes = {path: spec.shape for path, spec in log.schema.columns.items() if path.startswith("observations")}
        assert shapes == {
            "observations/state": (1, 19),
            "observations/front": (1, 64, 64, 3),
            "observations/wrist": (1, 64, 64, 3),
        }
        steps = log.read(log.trajectory_keys(0), ["actions", "grasp_penalty", "observations/state"])
        assert np.allclose(np.unique(steps["grasp_penalty"]), [-0.02, 0]), "the gripper was told to close"
        assert np.allclose(steps["observations"]["state"][0, 0, 4:10], 0, atol=1e-6), "poses are relative to the first"
        assert len(log.trajectory_keys(0)) == log.facts.about(0)["intervention_steps"]
        assert replay_open_loop(log, 0, as_hil_serl(env))["observations/state"] < 1e-2
    env.close()
    with pytest.raises(
        ConfigError, match=r"and hil-serl observations, and .* and nested observations were to be added"
    ):
        session(tmp_path / "a", task="tabletop/pick")


@pytest.mark.parametrize(
    "device", [None, Person(None, 1.0, 1.0, "success", None, 0.5, "success")], ids=["script", "person"]
)
def test_demonstrations_become_hil_serl_files(tmp_path: Path, device: Device | None):
    session(tmp_path / "a", device, episodes=2)
    convert(tmp_path / "a" / "log", tmp_path / "out", to="hil-serl", exp_name="toy")
    (file,) = (tmp_path / "out" / "demo_data").glob("toy_2_demos_*.pkl")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["demo_data", "hilt.json"]
    episodes = list(open_dataset(file))  # as a stranger reads it: without what we write beside it
    assert len(episodes) == 2 and all(episode.facts["success"] for episode in episodes)
    assert same_log(tmp_path, "hil-serl")


def test_labeled_frames_become_hil_serl_files(tmp_path: Path):
    person = Person(None, 1.0, "success", "success", None, 1.0, None, 1.0, "success", *[None] * 3)
    session(tmp_path / "a", person, successes_needed=3)
    convert(tmp_path / "a" / "log", tmp_path / "out", to="hil-serl", exp_name="toy")
    good, bad = (
        sorted((tmp_path / "out" / "classifier_data").glob(f"toy_{name}_images_*.pkl"))
        for name in ("3_success", "failure")
    )
    assert len(good) == len(bad) == 1 and sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "classifier_data",
        "hilt.json",
    ]
    for (file,), label, steps in ((good, 1, 3), (bad, 0, 9)):
        episodes = list(open_dataset(file))
        assert sum(map(len, episodes)) == steps and all(episode.facts["success"] == bool(label) for episode in episodes)
        assert all((episode.columns["labels"] == label).all() for episode in episodes)
    assert same_log(tmp_path, "hil-serl")


def same_log(folder: Path, format: str) -> bool:
    """Whether what was written comes back, step for step; episodes may be cut and in another order."""
    convert(folder / "out", folder / "again", format=format)
    with Log.open(folder / "a" / "log", "r") as before, Log.open(folder / "again", "r") as after:
        found = []
        for log in (before, after):
            steps = log.read(log.all().keys())
            order = np.argsort(steps["times"]["sent"])
            found.append({path: column[order] for path, column in flatten(steps).items()})
        return found[0].keys() == found[1].keys() and all(
            np.array_equal(found[0][path], found[1][path]) for path in found[0]
        )
