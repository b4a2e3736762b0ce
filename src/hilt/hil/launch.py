"""A whole run: its folder, the demonstrations that it records itself, and a learner
and actors as processes that are looked after.

RUN/config.yaml       every setting, frozen; written last, so that it says that there is a run
RUN/run.json          its identity, its recipe, its precision and why, and what was changed when it was resumed
RUN/demonstrations/   what the script recorded before the run began
RUN/actors/NAME/      each actor's spool
RUN/logs/NAME.log     the output of each process
RUN/log, demos, checkpoints, metrics.jsonl, ...    the learner's: docs/learner.md
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hilt.core.children import ChildProcess, final_error, run_module
from hilt.core.config import build, override, thaw
from hilt.core.errors import ConfigError, HiltError
from hilt.core.files import DISK, storage_errors
from hilt.core.progress import Report, silent
from hilt.core.signals import ASK_TO_END
from hilt.core.web import is_loopback
from hilt.envs.rewards import REWARDS
from hilt.hil.config import MIXED, Hil, Wire, check
from hilt.hil.contact import CONTACT
from hilt.hil.environment import person_moves, task, task_options, trainer_config
from hilt.hil.preflight import check_begin, logger
from hilt.observe.metrics import FILE as METRICS
from hilt.replay.storage.lock import writer_of
from hilt.runs.folder import CONFIG, HIL, RunKind, check_new, note_end, note_failure
from hilt.runs.run_precision import described, settle
from hilt.wire.sockets import require_keys

CHANGEABLE = frozenset(
    {
        *(
            "max_steps",
            "max_seconds",
            "max_env_steps",
            "update_to_data",
            "max_ahead",
            "updates_per_step",
            "steps_per_update",
            "log_period",
            "sinks",
        ),
        *("checkpoint_period", "checkpoint_keep", "buffer_period"),
        *("goal.success", "goal.states", "goal.period", "goal.hold", "goal.take_overs", "stop_on"),
        *(f"mixed.{name}" for name in ("simulations", "groups", "period", "max_age", "weight")),
        *("help.quantile", "help.window", "help.wait_seconds", "help.samples"),
        *("value.alarm_below", "value.alarm_patience"),
        *(f"recap.{name}" for name in ("model", "threshold", "dropout", "guidance")),
        *("actors", "operator", "operator_options", "lost_contact", "lost_contact_seconds", "control_hz"),
        *("wire.host", "wire.port", "wire.broadcast_port", "wire.keys", "wire.key_name"),
        *(
            f"agent.rlpd.{name}"
            for name in (
                "learning_rate",
                "tau",
                "subset",
                "target_entropy",
                "backup_entropy",
                "target_range",
                "actor_q",
            )
        ),
        *("agent.rlpd.imitation_weight", "agent.rlpd.imitation_updates"),
        *(f"agent.critic.{name}" for name in ("weight_decay", "reset_period", "reset_hold")),
    }
)
"""What may be another when a run is resumed: limits, what is saved and shown, who is there and how they speak, and how
it learns. Everything else decides what the steps mean, or what the checkpoint holds."""
JUDGING = ("classifier", "classifier_threshold")
"""May be another where the run was begun with a classifier"""
POLL_INTERVAL_S = 0.25
RESTARTS_PER_MINUTE = 3
END_S = 30.0
"""Seconds after which a process that was asked to end is killed"""
SAVING_S = 270.0
"""Further seconds for a learner, which writes its checkpoint, and buffers if they are asked for"""
LOOPBACK_S = 5.0
"""Timeout in seconds for a connection of this machine to itself"""
PARENT = "HILT_PARENT"
"""The environment variable with the process that started this one: it ends when that process is gone"""


def _thawed(run: Path) -> Hil:
    frozen = thaw(Hil, run / CONFIG)
    # of a version that did not choose: its settings are what they are, for its actors too
    return replace(frozen, defaults="images") if frozen.defaults == "auto" else frozen


def _overridden(frozen: Hil, *overrides: str | Mapping[str, Any]) -> Hil:
    made = _with_ports(override(frozen, *overrides))
    there = made.classifier and Path(made.classifier, "classifier.json").is_file()
    if frozen.classifier and made.classifier != frozen.classifier and not (there or REWARDS.is_name(made.classifier)):
        raise ConfigError(
            f"classifier={made.classifier}: no classifier is there, and this run has {frozen.classifier}. Make one "
            "with: hilt train classifier"
        )
    return made


def _may_change(run: Path, key: str) -> bool:
    """Another classifier may judge from now on where one did so before: the log of such a run has the column for what
    the task itself reports. Steps that are there keep their rewards."""
    return key in JUDGING and bool(_thawed(run).classifier)


KIND = RunKind(HIL, Hil, CHANGEABLE, check, thaw=_thawed, override=_overridden, may_change=_may_change)


def begin_run(
    run: Path,
    recipe: str,
    config: Hil,
    *more: Callable[[], Any],
    whole: bool = False,
    notify: Callable[[str], None] = logger.warning,
) -> Hil:
    """Begins a run: makes its folder and freezes its settings. Whatever cannot work is refused before anything is made,
    all of it at once: see `hilt.hil.preflight.check_begin`."""
    config, defaults = check_begin(config, lambda: check_new(run), *more, whole=whole, notify=notify)
    config, choice = settle(_with_ports(config))
    return KIND.begin(
        run, recipe, config, {**described(choice), **(defaults.described() if defaults is not None else {})}
    )


resume_run, resumed_settings = KIND.resume, KIND.resumed


# Demonstrations


def demonstrate(
    config: Hil,
    run: Path,
    notify: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
    report: Report = silent,
) -> None:
    """Records the demonstrations that the run is to have and does not have yet."""
    if not config.demonstrations:
        return
    from hilt.recording.record import Settings
    from hilt.recording.script import record_with_script

    indices = person_moves(config)
    script = {**({"action_indices": indices} if indices else {}), **config.demonstration_options}
    wanted = Settings(
        config.task, task_options(config), config.demonstrations, seed=config.seed, observations=config.observations
    )
    record_with_script(wanted, run / "demonstrations", lambda: task(config), script, notify, stop, report)


def with_demonstrations(config: Hil, run: Path) -> Hil:
    """The settings as the learner has them: its own demonstrations among the others."""
    return (
        replace(config, demo_path=[*config.demo_path, str(run / "demonstrations" / "log")])
        if config.demonstrations
        else config
    )


# Processes


@dataclass
class LaunchOutcome:
    """How a run ended, and what happened to its processes."""

    ended: bool = False
    """Whether it ended by itself, or because an operator pressed stop at an actor; else it was stopped from outside"""
    restarts: dict[str, int] = field(default_factory=dict)
    """Processes that were killed from outside and started again"""


def commands(config: Hil, run: Path, debug: bool = False) -> dict[str, list[str]]:
    """Name to command of each process of a run."""
    hilt = run_module("hilt", *(["--debug"] if debug else []))
    learner = [*hilt, "learner", "--run", str(run), "--resume"]
    names = [f"actor-{number + 1}" for number in range(config.actors)]
    own = ["--learner", config.wire.host]
    simulations = [f"simulation-{n + 1}" for n in range(config.mixed.simulations if config.algorithm == MIXED else 0)]
    names += simulations
    actors = {
        name: [*hilt, "actor", str(run / CONFIG), "--name", name, "--spool", str(run / "actors" / name), *own]
        for name in names
    }
    return {"learner": learner, **actors, **{name: [*actors[name], "--simulation"] for name in simulations}}


def train(
    config: Hil,
    run: Path,
    *,
    notify: Callable[[str], None] = lambda text: None,
    look: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
    report: Report = silent,
    debug: bool = False,
) -> LaunchOutcome:
    """Runs learner and actors until the learner ends, the operator of an actor presses stop, or `stop()` returns True.

    `notify` is called with each line of text for the user, `report` with the progress of each phase
    (`hilt.core.progress`), and `look` periodically. If a process fails, the run ends with its error message; if one is
    killed from outside, it is started again. When this function returns, no process is left.
    """
    check(config)
    demonstrate(config, run, notify, stop, report)
    children = {
        name: Child(name, command, run / "logs" / f"{name}.log")
        for name, command in commands(config, run, debug).items()
    }
    children["learner"].end_timeout_s = END_S + SAVING_S
    outcome = LaunchOutcome()
    _await_former(run, notify, stop, report)
    known: int | None = _size(run / METRICS)
    report("waiting until the learner has started")
    try:
        if not stop():
            note_end(run)  # it has not ended yet, or no longer
            for child in children.values():
                child.start()
                notify(f"{child.name}: process {child.pid}, says what it does in {child.log}")
        while not stop() and not outcome.ended:
            time.sleep(POLL_INTERVAL_S)
            look()
            if known is not None and _size(run / METRICS) != known:  # from now on the learner itself says what happens
                report("")
                known = None
            for child in children.values():
                for line in child.news():
                    notify(f"{child.name}: {line}")
                outcome.ended |= _looked_after(child, outcome, notify)
        report("waiting until the learner and the actors have ended")
        end(children.values(), notify)
        for child in children.values():
            if child.failed:
                raise child.error()
    except BaseException as error:
        # of one of them, of this process, or Ctrl-C where no handler is installed: the others end in order
        end(children.values(), notify)
        if isinstance(error, HiltError):
            note_failure(run, error.line if isinstance(error, ProcessFailure) else str(error))
        raise
    finally:
        end(children.values(), notify, at_once=True)
        look()
    return outcome


def _await_former(run: Path, notify: Callable[[str], None], stop: Callable[[], bool], report: Report) -> None:
    """Waits for the processes of a killed `hilt train`, which are about to end; one that
    stays is named by the errors of the new ones."""
    deadline, said = time.monotonic() + END_S, False
    folders = [run, *sorted(run.glob("actors/*/spool"))]
    while (
        (there := [who for folder in folders if (who := writer_of(folder))])
        and time.monotonic() < deadline
        and not stop()
    ):
        if not said:
            notify(f"{there[0]} is still at work in {run}: waiting until it has ended")
        said = True
        report(f"waiting until {there[0]} has ended")
        time.sleep(POLL_INTERVAL_S)


def _looked_after(child: Child, outcome: LaunchOutcome, notify: Callable[[str], None]) -> bool:
    """Whether this one has ended in order, and the run with it."""
    code = child.poll()
    if code is None or code == 0:
        return code == 0
    if code > 0 and code != 128 + ASK_TO_END:
        raise child.error()
    outcome.restarts[child.name] = outcome.restarts.get(child.name, 0) + 1
    if not child.may_start_again():
        often = f"{RESTARTS_PER_MINUTE + 1} times within a minute, last by {_signal(code)}"
        raise HiltError(f"{child.name} was killed {often}. Find out by whom; --resume goes on.")
    killed = f"{child.name} was killed by {_signal(code)} and is started again"
    child.start(killed)
    notify(f"{killed}, process {child.pid}")
    return False


class ProcessFailure(HiltError):
    """The error of a process of a run; `line` is the process and its error in a line."""

    def __init__(self, text: str, line: str):
        super().__init__(text)
        self.line = line


class Child:
    """One process of a run. It leaves signals to its parent, which asks it to end: see `hilt.core.signals`."""

    def __init__(self, name: str, command: Sequence[str], log: Path):
        self.end_timeout_s = END_S
        """Seconds in which it has to end when it was asked to"""
        self.name, self.log, self._command = name, log, list(command)
        self._process: ChildProcess | None = None
        self._said = self._heard = 0  # the log's size when it was started, and as far as it was looked at
        self._starts: deque[float] = deque(maxlen=RESTARTS_PER_MINUTE)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def failed(self) -> bool:
        """Whether it failed by itself, and not because it was asked to end."""
        return (self.poll() or 0) > 0 and self.poll() != 128 + ASK_TO_END

    def start(self, note: str = "") -> None:
        """Starts it, after a line in its log that says why."""
        DISK.make_folders(self.log.parent)
        with storage_errors(self.log), self.log.open("ab") as out:
            if note:
                out.write(f"{time.strftime('%H:%M:%S')} {note}\n".encode())
            self._said = self._heard = out.tell()
            environment = {**os.environ, PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
            self._process = ChildProcess(self._command, stdout=out, stderr=out, env=environment, start_new_session=True)

    def may_start_again(self) -> bool:
        now = time.monotonic()
        often = len(self._starts) == RESTARTS_PER_MINUTE and now - self._starts[0] < 60
        self._starts.append(now)
        return not often

    def poll(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def ask_to_end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(ASK_TO_END)

    def wait(self, seconds: float) -> bool:
        """Returns whether it ends within the timeout."""
        return self._process is None or self._process.ends_within(seconds)

    def kill(self) -> None:
        if self._process is not None:
            self._process.end()

    def news(self) -> list[str]:
        """Returns the new lines of its log that a person must see now: where a page is
        to be opened, and that contact is lost."""
        with storage_errors(self.log), self.log.open("rb") as file:
            file.seek(self._heard)
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        self._heard += sum(map(len, whole))
        return [
            line.decode(errors="replace").strip() for line in whole if line.startswith((b"open http", CONTACT.encode()))
        ]

    def error(self) -> ProcessFailure:
        """Returns its last words as an error."""
        with storage_errors(self.log):
            words = self.log.read_bytes()[self._said :].decode(errors="replace").strip().splitlines()
        errors = [number for number, line in enumerate(words) if line.startswith("error: ")]
        ended = f"{self.name} ended with exit code {self.poll()}"
        line = f"{self.name}: {found}" if (found := final_error(words)) else ended
        if errors:  # one of several lines goes on to the end
            return ProcessFailure(f"{self.name}: " + "\n".join(words[errors[-1] :]).removeprefix("error: "), line)
        last = "\n".join(words[-30:]) or "it said nothing"
        return ProcessFailure(f"{ended}; its last words, from {self.log}:\n{last}", line)


def end(children: Iterable[Child], notify: Callable[[str], None], at_once: bool = False) -> None:
    """Asks all processes to end, waits for them, and kills those that do not."""
    for child in children:
        child.ask_to_end()
    began = time.monotonic()
    for child in sorted(children, key=lambda child: child.end_timeout_s):
        if not child.wait(began + (1.0 if at_once else child.end_timeout_s) - time.monotonic()):
            notify(f"{child.name} did not end within {child.end_timeout_s:g} s: killed") if not at_once else None
            child.kill()


def _with_ports(config: Hil) -> Hil:
    """Port 0 is a free one, chosen now and frozen with the rest."""
    wire, free = config.wire, _free_ports(2)
    return build(config, {"wire": {"port": wire.port or free[0], "broadcast_port": wire.broadcast_port or free[1]}})


def own_ports(config: Hil, notify: Callable[[str], None] = lambda text: None) -> Hil:
    """For a run that starts both sides itself: where one of the usual ports is taken, both are free ones. Ports that
    were asked for, and those at which actors of other machines look, stay."""
    wire, usual = config.wire, Wire()
    asked = (wire.port, wire.broadcast_port) != (usual.port, usual.broadcast_port) or not is_loopback(wire.host)
    if asked or not (taken := [port for port in (wire.port, wire.broadcast_port) if _taken(wire.host, port)]):
        return config
    config = _with_ports(build(config, {"wire": {"port": 0, "broadcast_port": 0}}))
    notify(f"port {taken[0]} is taken: this run uses {config.wire.port} and {config.wire.broadcast_port}")
    return config


def _taken(host: str, port: int) -> bool:
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE  # else it is an address that the wire itself will judge
    return False


def _unreachable(host: str) -> str:
    """Why nothing that listens on an address of this machine can be reached; empty when it can."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listening:
            socket.create_connection(listening.getsockname()[:2], LOOPBACK_S).close()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return ""


def check_wire(config: Hil) -> None:
    """Refuses a learner without keys beyond this machine, and ports that are in use, before anything is started."""
    config = _with_ports(config)
    wire = trainer_config(config, learner=True)
    require_keys(wire, wire.bind_ip, "listening on")
    if is_loopback(config.wire.host) and (why := _unreachable(config.wire.host)):
        raise ConfigError(
            f"this machine cannot reach itself at {config.wire.host} ({why}), and a learner and its actors "
            "speak through it. Bring the loopback interface up: ip link set lo up"
        )
    for port in (config.wire.port, config.wire.broadcast_port):
        if _taken(config.wire.host, port):
            cure = "give this one free ports with wire.port=0 wire.broadcast_port=0"
            raise ConfigError(f"port {port} is taken on {config.wire.host}, by another run perhaps: {cure}.")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def _signal(code: int) -> str:
    return signal.Signals(-code if code < 0 else code - 128).name


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
