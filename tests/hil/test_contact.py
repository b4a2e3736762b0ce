"""Contact to the operator is lost: the actor pauses, then the policy goes on or
nobody does; the learner's clock and updates wait."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.trajectory import Source
from hilt.hil import contact
from hilt.hil.config import HelpRequests, Hil, ValueUse, check
from hilt.hil.launch import Child
from hilt.observe.live import Standing
from hilt.observe.metrics import FILE, running
from hilt.teleop.devices import Device, Reading
from tests.hil import test_actor, test_learner, toy_run
from tests.hil.test_actor import acting, learner  # noqa: F401  (a fixture)
from tests.value.valued import save_untrained


class Tab(Device):
    """A page whose tab is closed at one reading and opened again at a later one;
    never, where that is 0. *Stop* at another."""

    url = "http://127.0.0.1:1/"

    def __init__(self, closed: int = 0, opened: int = 0, stop: int = 0, estop: int = 0, release: int = 0):
        super().__init__()
        self._closed, self._opened, self._reading = closed or 10**9, opened, 0
        self._presses = {stop: "stop", estop: "estop", release: "release_estop"}

    def read(self) -> Reading:
        self._reading += 1
        lost = self._reading >= self._closed and not 0 < self._opened <= self._reading
        event = self._presses.get(self._reading)
        return Reading(engaged=True, lost=lost, events=(event,) if event else ())


def tab(**options: int) -> dict[str, Any]:
    return {"operator": f"{__name__}:Tab", "operator_options": options}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contact, "POLL_INTERVAL_S", 0.002)
    monkeypatch.setattr(contact, "REPORT_AFTER_S", 0.0)


@pytest.mark.parametrize("learner", [tab(closed=3, opened=300)], indirect=True)
def test_the_actor_makes_no_steps_until_contact_is_back(learner: test_actor.Learner, tmp_path: Path):  # noqa: F811
    learner.publish(1)
    said: list[str] = []
    acting(learner, tmp_path / "actor", lambda: len(learner.log) >= 9, said=said)
    lost, source = learner.column("lost", "source")
    assert lost[:9].tolist() == [False, False, True, True] + [False] * 5, (
        "the one in which it was found, and the first one after"
    )
    assert (source == Source.HUMAN).all()
    told = [line for line in said if line.startswith(contact.CONTACT)]
    assert (
        "the run is paused, and after 30 s the policy goes on. To take over again, open http://127.0.0.1:1/" in told[0]
    )
    assert "is back" in told[1] and len(told) == 2
    assert max(stats.get("contact_losses", 0) for stats in learner.told) == 1


@pytest.mark.parametrize("learner", [{**tab(closed=3), "lost_contact_seconds": 0.05}], indirect=True)
def test_after_a_while_the_policy_goes_on(learner: test_actor.Learner, tmp_path: Path):  # noqa: F811
    learner.publish(1)
    said: list[str] = []
    acting(learner, tmp_path / "actor", lambda: len(learner.log) >= 20, said=said)
    lost, source = learner.column("lost", "source")
    assert lost[:4].tolist() == [False, False, True, True] and not lost[4:].any()
    assert (source[4:] == Source.POLICY).all(), "also in the episodes after it"
    assert any("the policy goes on. To take over again, open http://127.0.0.1:1/" in line for line in said)


@pytest.mark.parametrize("learner", [{**tab(closed=3, stop=200), "lost_contact": "pause"}], indirect=True)
def test_lost_contact_pause_stays_paused_and_stop_works(learner: test_actor.Learner, tmp_path: Path):  # noqa: F811
    learner.publish(1)
    said: list[str] = []
    assert acting(learner, tmp_path / "actor", lambda: False, said=said).reason == "stop was pressed"
    assert len(learner.log) == 4
    assert next(line for line in said if line.startswith(contact.CONTACT)).endswith(
        "paused. To take over again, open http://127.0.0.1:1/"
    )


@pytest.mark.parametrize(
    "learner", [{**tab(estop=3, release=300, closed=4, opened=320), "lost_contact_seconds": 0.0}], indirect=True
)
def test_emergency_stop_pauses_the_run_until_it_is_released(learner: test_actor.Learner, tmp_path: Path):  # noqa: F811
    """Contact is lost meanwhile, after which the policy would go on at once."""
    learner.publish(1)
    said: list[str] = []
    acting(learner, tmp_path / "actor", lambda: len(learner.log) >= 9, said=said)
    (lost,) = learner.column("lost")
    assert lost[:9].tolist() == [False, False, True, True] + [False] * 5
    told = [line for line in said if line.startswith(contact.CONTACT)]
    assert "the emergency stop is pressed. Nothing moves until it is released" in told[0]
    assert "the emergency stop was pressed for" in told[1], "and only then it matters that contact is lost"
    assert "the policy goes on" in told[2]


@pytest.mark.parametrize("learner", [tab(estop=3, stop=200)], indirect=True)
def test_emergency_stop_leaves_stop_to_end_the_run(learner: test_actor.Learner, tmp_path: Path):  # noqa: F811
    learner.publish(1)
    assert acting(learner, tmp_path / "actor", lambda: False).reason == "stop was pressed"
    assert len(learner.log) == 4 and learner.column("lost")[0].tolist() == [False, False, True, True]


def counted_seconds(made: test_learner.Learner) -> float:
    """The run's clock when the learner last looked at it. It looks in a thread of its own: of several readings one
    may be between its two assignments."""
    seen = []
    for _ in range(9):
        seen.append(made._checked - made._first)
        time.sleep(0.01)
    return sorted(seen)[4]


def test_the_learner_pauses_its_clock_and_its_updates(memory_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hilt.hil.learner.ACTIVE_S", 120.0)  # an actor that was heard of just now, on any machine
    settings = toy_run.config(training_starts=5, max_steps=10**9, max_seconds=10**6)
    made = test_learner.Learner(settings, memory_path / "run", env=toy_run.spaces(), wire=toy_run.wire())
    with test_learner.Driven(made) as driven:
        for step in toy_run.episode(4, human=(1, 2, 3), lost=(2, 3)):
            driven.spool.insert(step)
        driven.until(lambda: made.update > 3)
        driven.client.request("send-stats", {"actor": "arm", "contact_lost": True})
        driven.until(lambda: made._paused)
        updates, checked = made.update, made._checked
        driven.until(lambda: made._checked > checked + 0.3)
        assert made.update <= updates + 1, "one was under way"
        seconds = counted_seconds(made)
        driven.client.request("send-stats", {"actor": "arm", "contact_lost": True})
        driven.until(lambda: made._checked > checked + 0.6)
        assert counted_seconds(made) == pytest.approx(seconds, abs=1e-6), "0.3 s are over"
        driven.client.request("send-stats", {"actor": "other", "contact_lost": False})
        driven.until(lambda: made.update > updates + 3)
        driven.client.request("send-stats", {"actor": "arm", "contact_lost": False})
    (told,) = test_learner.records(memory_path / "run", "episode")
    assert (told["intervention_steps"], told["lost_steps"], told["intervention_count"]) == (1, 2, 1)
    events = [record for record in test_learner.records(memory_path / "run", "event") if "pause" in record]
    assert [record["pause"] for record in events] == ["begins", "ends"]


def written(run: Path, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    run.mkdir()
    (run / FILE).write_text("".join(json.dumps({"update": 0, **record}) + "\n" for record in records))
    return records


def test_a_pause_does_not_count_in_what_is_shown(tmp_path: Path):
    episode = {"kind": "episode", "length": 10, "intervention_steps": 2, "lost_steps": 3, "success": False}
    records = [
        {"kind": "update", "time": 100.0, "step": 1},
        {"kind": "event", "event": "lost", "pause": "begins", "time": 110.0, "step": 1},
        {"kind": "event", "event": "waits", "time": 150.0, "step": 1},
        {"kind": "event", "event": "goes on", "pause": "ends", "time": 170.0, "step": 1},
        {**episode, "time": 180.0, "step": 10},
    ]
    assert running(written(tmp_path / "all", records)) == [0, 10, 10, 10, 20]
    written(tmp_path / "half", records[:3])
    for folder, seconds in (("all", 21.0), ("half", 10.0)):
        standing = Standing(tmp_path / folder, now=lambda: 181.0)
        standing._before = 0
        standing.read()
        assert standing.seconds() == seconds
    whole = Standing(tmp_path / "all")
    whole.read()
    assert whole.person() == "20% of steps" and whole.lost() == "0 times so far; 3 steps of the last 1 episodes"
    assert ("contact lost", whole.lost()) in whole.rows() and "without take-over" in whole.success()


def test_lost_contact_is_shown_in_the_terminal(tmp_path: Path):
    child = Child("actor-1", [], tmp_path / "log")
    child.log.write_text(f"episode 1\n{contact.CONTACT} is lost: open http://127.0.0.1:1/\nopen http://127.0.0.1:1/\n")
    assert len(child.news()) == 2


def test_settings_of_lost_contact_are_checked():
    with pytest.raises(UnknownNameError, match="lost_contact"):
        check(Hil(lost_contact="anybody"))
    with pytest.raises(ConfigError, match="lost_contact_seconds=-1"):
        check(Hil(lost_contact_seconds=-1))
    with pytest.raises(ConfigError, match="needs an operator"):
        check(Hil(lost_contact="pause"))
    with pytest.raises(ConfigError, match="needs lost_contact=policy"):
        check(Hil(operator="browser", lost_contact="pause", lost_contact_seconds=5))


# Help


class Helper(Device):
    """A person who looks at the page, and takes over for three readings as soon as the policy asks."""

    def __init__(self, helps: bool = True):
        super().__init__()
        self._helps, self._left = helps, 0

    def asked(self) -> None:
        self._left = 3 * self._helps

    def read(self) -> Reading:
        self._left -= 1
        return Reading(engaged=self._left >= 0)


ASKS = {"quantile": 0.9, "window": 20, "wait_seconds": 0.05}


def helper(helps: bool, **asks: float) -> dict[str, Any]:
    return {
        "operator": f"{__name__}:Helper",
        "operator_options": {"helps": helps},
        "help": HelpRequests(**{**ASKS, **asks}),
    }


@pytest.mark.parametrize(
    "learner", [helper(True), helper(False), helper(False, wait_seconds=0.0), helper(True, quantile=0.0)], indirect=True
)
def test_the_policy_asks_for_help_where_its_critics_disagree(learner: test_actor.Learner, tmp_path: Path):  # noqa: F811
    """Which it does in about one step of ten, once there are `window` values, and in every tenth at most."""
    asks, helps = learner.config.help, learner.config.operator_options["helps"]
    learner.publish(1)
    said: list[str] = []
    acting(learner, tmp_path / "actor", lambda: len(learner.log) >= 150, said=said)
    told = {name: max(one.get(name, 0) for one in learner.told) for name in ("help_requests", "help_answered")}
    source = learner.column("source")[0]
    shown = [line for line in said if line.startswith(contact.HELP)]
    if not asks.quantile:
        assert told == {"help_requests": 0, "help_answered": 0} and (source == Source.POLICY).all() and not shown
        return
    assert (source[: asks.window] == Source.POLICY).all(), "there is nothing to compare with yet"
    assert 1 <= told["help_requests"] <= 14
    assert bool(shown) == (asks.wait_seconds > 0)
    if helps:
        assert told["help_answered"] > 0 and (source == Source.HUMAN).any()
    else:
        assert told["help_answered"] == 0 and (source == Source.POLICY).all(), "it goes on"
    assert any("disagreement" in one for one in learner.told)


def test_help_is_needed_above_the_quantile_of_the_last_values():
    config = Hil(operator="script", help=HelpRequests(quantile=0.75, window=20))
    asker = contact.HelpAsker(Watched(waited_for=False, engaged=False), config, print)  # type: ignore[arg-type]
    assert not any(asker.needed(float(n)) for n in range(20)), "the window is not full"
    assert not asker.needed(14.25) and not asker.needed(None) and not asker.needed(float("nan"))
    values = [*map(float, range(1, 20)), 14.25]
    assert asker.needed(float(np.quantile(values, 0.75)) + 1e-6)
    asker._since = 0
    assert not asker.needed(1e9), "it has just asked"


class Watched:
    """An environment whose value model raises an alarm, and what its operator is shown."""

    def __init__(self, waited_for: bool, engaged: bool) -> None:
        self.success, self.doubtful, self.shown = None, 0, []  # type: ignore[var-annotated]
        self.device = SimpleNamespace(waited_for=waited_for)
        self.poll, self.ask = (lambda: Reading(engaged=engaged)), self.shown.append

    def value_alarm(self) -> float | None:
        return self.success

    def has_wrapper_attr(self, name: str) -> bool:
        return hasattr(self, name)

    def get_wrapper_attr(self, name: str) -> Any:
        return getattr(self, name)


@pytest.mark.parametrize("waits", [0.0, 0.02])
def test_the_operator_is_asked_where_the_value_model_expects_a_failure(waits: float):
    env, said = Watched(waited_for=True, engaged=True), []  # type: ignore[var-annotated]
    config = Hil(operator="script", value=ValueUse("m", alarm_below=0.1), help=HelpRequests(wait_seconds=waits))
    check(config)
    asker = contact.HelpAsker(env, config, said.append)  # type: ignore[arg-type]
    assert asker.needed(None) == "" and asker.stats()["help_requests"] == 0
    env.success, env.doubtful = 0.04, 6
    text = asker.needed(None)
    assert text == "The episode is expected to fail (probability of success 4%): take over."
    env.success = None  # it raises an alarm once
    asker.ask(text, lambda: False)
    stats = asker.stats()
    assert (stats["help_requests"], stats["help_answered"]) == (1, int(waits > 0))
    if waits:
        assert env.shown == [text, ""] and said == [f"{text} It waits for 0.02 s."]
        return
    assert asker.needed(0.5) == "" and env.shown == [text], "it is shown as long as a failure is expected"
    env.doubtful = 0
    assert asker.needed(None) == "" and env.shown == [text, ""]


@pytest.mark.parametrize("random", [0, 5])
def test_an_actor_asks_for_the_operator_when_its_episode_is_about_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, random: int
):
    """After three steps in a row in which no person acts, for below 0.999 is what this model expects of every step;
    and not before the policy acts."""
    model = save_untrained(tmp_path / "value", {"observations/state/left/point": 3})
    use = ValueUse(str(model), alarm_below=0.999, alarm_patience=3)
    asked = {**helper(True), "help": HelpRequests(wait_seconds=0.05), "value": use, "random_steps": random}
    there, said = test_actor.Learner(test_actor.config(**asked), tmp_path / "log"), list[str]()
    monkeypatch.setattr("hilt.hil.actor.TELL_S", 0.0)
    there.publish(1)
    acting(there, tmp_path / "actor", lambda: len(there.log) >= 40 and len(there.told) > 3, said=said)
    source = there.column("source")[0]
    first = int((source == Source.HUMAN).argmax())
    assert first == max(3, random) and not np.isin(source[:first], [Source.HUMAN, Source.DEMO]).any()
    told = [one for one in there.told if one.get("value_alarms")]
    assert told and told[-1]["help_requests"] == told[-1]["value_alarms"] <= told[-1]["steps"] / 3
    assert 0 < told[-1]["value_success"] < 0.999 and told[-1]["help_answered"] > 0
    shown = [line for line in said if line.startswith("The episode is expected to fail (probability of success ")]
    assert shown and shown[0].endswith("take over. It waits for 0.05 s.")
    there.close()


def test_help_that_cannot_come_is_refused():
    with pytest.raises(ConfigError, match=r"help\.quantile=0\.9 would do nothing: it needs an operator"):
        check(Hil(help=HelpRequests(quantile=0.9)))
    one = Hil(operator="script", help=HelpRequests(quantile=0.9))
    one.agent.rlpd.critics = 1
    with pytest.raises(ConfigError, match=r"only several critics can disagree\. Give agent\.rlpd\.critics=2"):
        check(one)
    with pytest.raises(ConfigError, match=r"0\.9 would do nothing: it needs algorithm=rlpd or agent\.kind=vla"):
        check(Hil(operator="script", algorithm="hg-dagger", help=HelpRequests(quantile=0.9)))
    served = Hil(operator="script", algorithm="hg-dagger", help=HelpRequests(quantile=0.9))
    served.agent.kind, served.agent.options = "vla", {"policy": "folder", "server": "ws://robot:8000"}
    with pytest.raises(ConfigError, match=r"a policy server answers with one chunk.* Leave agent\.options\.server out"):
        check(served)
