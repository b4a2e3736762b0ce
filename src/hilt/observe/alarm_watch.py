"""Watches the alarms of a run while it goes on: shows them, writes them down, and tells when one ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from hilt.core.checksums import read_json, write_json
from hilt.core.errors import AlarmError
from hilt.observe.alarms import Alarms, Record, RunFacts, table
from hilt.observe.metrics import GOES_ON, RESUMED, Metrics, Value, read_metrics


class AlarmSpans:
    """Since which update each alarm stands, from the records of a run in their order.

    A process that goes on with a run raises anew what still holds: such an alarm began when it was raised first. An
    evaluation beside learning ends after the update that it is of: the alarm that it raises began with that one."""

    def __init__(self) -> None:
        self.stopped = ""
        """The alarm that ended the run last"""
        self._since: dict[str, int] = {}
        self._carried: dict[str, int] = {}  # of the process before
        self._learned = False  # whether this process has written figures
        self._evaluated: int | None = None  # the update of the last evaluation

    @property
    def standing(self) -> dict[str, int]:
        """Alarms that stand now, and the update at which each was raised."""
        return self._since if self._since or self._learned else self._carried

    @property
    def earliest(self) -> int | None:
        """The update at which the first was raised of those that stand, or stood when another process went on. Those
        from before the first update are left out: there is no checkpoint before them."""
        return min([at for at in (*self._since.values(), *self._carried.values()) if at > 0], default=None)

    def take(self, record: Record) -> None:
        """Takes in a record of the metrics."""
        event, update = record.get("event"), int(record.get("update", 0))
        self._learned = self._learned or record.get("kind") == "update"
        if "validation_update" in record:
            self._evaluated = int(record["validation_update"])
        if event == GOES_ON:
            if self._learned or self._since:
                self._carried = self._since
            self._since, self._learned = {}, False
        elif event == RESUMED:
            self._since, self._carried = (
                {name: at for name, at in known.items() if at <= update} for known in (self._since, self._carried)
            )
        elif name := str(record.get("alarm", "")):
            self.stopped = name if record.get("stops") else self.stopped
            if record[f"alarm/{name}"]:
                began = update if name != "validation" or self._evaluated is None else min(update, self._evaluated)
                self._since.setdefault(name, self._carried.get(name, began))
            else:
                self._since.pop(name, None)
                self._carried.pop(name, None)


class AlarmWatch:
    """Watches a run: its alarms are shown to the user, and written into metrics.jsonl as events and into run.json."""

    def __init__(
        self, run: Path, facts: RunFacts, metrics: Metrics, notify: Callable[[str], None], stop_on: Iterable[str] = ()
    ):
        self._run_file, self._metrics, self._notify, self._stop_on = run / "run.json", metrics, notify, set(stop_on)
        self._facts, self._told = facts, set[str]()  # why alarms cannot be raised, once each
        self.alarms, self.spans = Alarms(facts), AlarmSpans()
        for record in read_metrics(run, ["update", "event"]):  # of a run that goes on
            self.spans.take(record)
            if record["kind"] == "update":
                self.alarms.take(record)
            elif record.get("stops"):
                self.alarms.forget(record["alarm"])
        self.alarms.on.clear()  # conditions that still hold are reported again

    def take(self, values: Record, *, update: int, step: int) -> str:
        """Takes the record of an update; returns the text of an alarm that ends the run, else nothing."""
        ends = ""
        self.cannot_raise(_lacking(values, self._facts.job))
        self.spans.take({**values, "kind": "update"})
        for change in self.alarms.take({**values, "update": update, "step": step}):
            stops = change.raised and change.name in self._stop_on and not ends
            event: dict[str, Value] = {"event": change.text, "alarm": change.name, "stops": stops}
            event[f"alarm/{change.name}"] = float(change.raised)
            self._metrics.write("event", event, update=update, step=step)
            self.spans.take({**event, "update": update})
            self._notify(change.text)
            if change.raised and self._run_file.is_file():
                metadata = read_json(self._run_file)
                raised = {"name": change.name, "update": update, "text": change.text}
                write_json(self._run_file, {**metadata, "alarms": [*metadata.get("alarms", []), raised]})
            ends = change.text if stops else ends
        return ends

    def cannot_raise(self, lacking: Mapping[str, str]) -> None:
        """Says once which alarms this run cannot raise, for these figures cannot be taken; with each: why."""
        for why in dict.fromkeys(lacking.values()):
            names = [one.name for one in table(self._facts) if any(lacking.get(name) == why for name in one.figures)]
            ends = [name for name in names if name in self._stop_on]
            if why in self._told or not (ends or set(names) - {"dead_relus"}):  # most policies have no ReLUs
                continue
            self._told.add(why)
            without = f" stop_on=[{', '.join(ends)}] does not end it." if ends else ""
            self._notify(f"this run cannot raise {', '.join(names)}: {why}.{without}")


def _lacking(values: Record, job: str) -> dict[str, str]:
    """What a record shows of figures that are not taken: in post-training each step that learns looks at a pass."""
    if "effective_rank" in values:
        return {} if "dead_relus" in values else {"dead_relus": "nothing that is looked at has a ReLU"}
    if job != "vla" or not values.get("optimizer_steps"):
        return {}
    return dict.fromkeys(("effective_rank", "dead_relus"), "the policy is compiled, and its passes are not looked into")


def stopped(text: str, run: Path, command: str = "hilt train", anew: bool = False) -> AlarmError:
    """The error with which a run ends that `stop_on` ends. `command`: what resumes it. `anew`: it had not begun to
    learn online, and there is no checkpoint."""
    resume = f"{text} It was ended because stop_on names this alarm; {command} --run {run} --resume"
    if anew:
        return AlarmError(f"{resume} begins learning anew: give other settings with it.")
    kept = f" The policy so far is in {run / 'policy'}." * (run / "policy").is_dir()
    return AlarmError(
        f"{resume} goes on from here.{kept} With --from-last-good it goes on from the checkpoint before the alarm."
    )


__all__ = ["AlarmSpans", "AlarmWatch", "stopped"]
