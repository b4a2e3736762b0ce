"""The learner: takes in what actors send, trains the agent from it, and gives them its weights.

    learner = Learner(config, Path("runs/pick"), resume=True)
    summary = learner.run(stop=lambda: False)

It never waits for the disk: the log is synced by a thread, checkpoints are written by another from a copy, and
steps are received by the wire's own. It may be killed at any moment: the log has every step, and the newest
whole checkpoint has the state to continue from.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hilt.algos.adam import denormals_flushed
from hilt.core.checksums import read_json, write_json
from hilt.core.errors import ConfigError, HiltError, NotFiniteError
from hilt.core.files import DISK
from hilt.core.names import load_own
from hilt.core.trajectory import STARTS, VERSIONS_PER_START
from hilt.envs.env_protocol import HasSpaces
from hilt.hil.config import GROUP, PARTS, STORES, Hil, check, facts, imitation, reinforces
from hilt.hil.contact import CONTACT
from hilt.hil.data import Batch
from hilt.hil.goal import GoalWatch, described
from hilt.hil.groups import groups_of
from hilt.hil.learner_phases import ActorReports, LearnerClock, LearnerSummary, Preparation, not_finite
from hilt.hil.make_agent import make_agent
from hilt.observe.alarm_watch import AlarmWatch, stopped
from hilt.observe.metrics import PAUSE, Metrics, flat_scalars, read_metrics
from hilt.policies.agent.config import FROZEN_VLA
from hilt.runs.checkpoint import Buffers, Saver, alone, latest, numbers
from hilt.runs.folder import note_end
from hilt.runs.run_precision import settle
from hilt.wire import TrainerConfig, TrainerServer

CHECKPOINT_S = 300.0
"""Between two checkpoints, when no number of updates is given for it"""
TELL_S, REPORT_INTERVAL_S, POLL_INTERVAL_S = 5.0, 0.5, 0.01
"""Seconds between two messages about what it waits for, between two looks for what is to
be reported, and of each sleep while it waits"""
GOODBYE_S, ACTIVE_S = 10.0, 5.0
"""After its end it serves at most the first number of seconds, until every actor
heard within the second number of seconds has left"""
SAVE_S = 120.0
"""The timeout of the last checkpoint, in seconds"""
COLLECTED = "collected.json"
"""When collecting was over: the seconds and the online steps until then, and the
trajectories that pretraining is repeated with"""
MAX_SKIPPED = 20
"""Updates in a row with a loss or a gradient that is not finite, after which a run ends with an error"""
LOOK_RECORDS = 20
"""Records of metrics between two looks at whether the networks can still learn"""
REALIZED = 20
"""Episodes, the last ones, whose returns Q is compared with"""
logger = logging.getLogger("hilt.hil")


class Learner:
    """One learner of a run folder; a second one is refused. `env` is anything with an observation_space and an
    action_space, by default what the config's task has; `wire` replaces the config's own settings of the wire."""

    def __init__(
        self,
        config: Hil,
        run: Path,
        resume: bool = False,
        env: HasSpaces | None = None,
        wire: TrainerConfig | None = None,
    ):
        check(config)
        self.config, self.run_folder = settle(config)[0], run
        DISK.make_folders(run)
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                alone(run, "has a learner already", "One run has one learner; give this one another folder.")
            )
            if not resume and (numbers(run) or (run / "log").exists()):
                raise ConfigError(f"{run} has a run in it already. Go on with it (--resume), or choose another folder.")
            self.metrics = stack.enter_context(Metrics(run, config.sinks))
            self.update, self._elapsed = 0, 0.0
            self._reason, self._pressed = "", False
            self._make(env, wire, stack)
            self._undo = stack.pop_all()

    def _make(self, env: HasSpaces | None, wire: TrainerConfig | None, stack: contextlib.ExitStack) -> None:
        config, run = self.config, self.run_folder
        if env is None or wire is None:
            from hilt.hil.environment import spaces, trainer_config

            env, wire = env or spaces(config), wire or trainer_config(config, learner=True)
        path = run / COLLECTED
        self._collected: dict[str, Any] = read_json(path) if path.exists() else {}
        self._elapsed = self._collected.get("elapsed", 0.0)
        checkpoint = latest(run, self.notify)
        self.agent = make_agent(config, env)
        if checkpoint is not None:
            self.agent.load_state_dict(checkpoint.agent)
        imports = ", and imports into them what the run begins with" * (not (run / "log").exists())
        self.notify("opens the logs" + imports)
        self.experience = load_own(STORES[config.store])(run, config, env, self.agent, self.notify)
        stack.callback(self.experience.close)
        self._reports = ActorReports()
        self._groups = groups_of(config, self.experience, self.agent, env, self._reports.update_of)
        if checkpoint is not None:
            self.update, self._elapsed = checkpoint.update, max(self._elapsed, checkpoint.state["elapsed"])
            self.experience.load_state(checkpoint.state["experience"])
            if self._groups is not None:
                self._groups.load_state(checkpoint.state["groups"])
        known = read_metrics(run, ["episode", "update"])
        self.experience.reported([record["trajectory"] for record in known if record["kind"] == "episode"])
        # a killed one saved no newer
        self._elapsed = max([self._elapsed, *(record.get("elapsed_seconds", 0.0) for record in known)])
        self.server = stack.enter_context(TrainerServer(wire, request_callback=self._answer))
        self._run_id = str(read_json(run / "run.json").get("id", "")) if (run / "run.json").exists() else ""
        self.experience.register(self.server, self._run_id)
        self._resumed = checkpoint is not None
        returns = [(one["return_to_go"], one["cut_share"]) for one in known if one.get("return_to_go") is not None]
        self._realized: deque[tuple[float, float]] = deque(returns[-REALIZED:], REALIZED)
        anew = not self._resumed and any("prepared_updates" in record for record in known)
        self._watch, self._alarm = self._alarm_watch(self.update if self._resumed else -1 if anew else None), ""
        self._sent: dict[str, float] = {}
        self._goal = GoalWatch(config, run) if config.goal.success else None
        if self._goal is not None:
            self._goal.forget_after(self.update)
            stack.callback(self._goal.close)
        self._to_evaluate = 0  # the checkpoint that is evaluated next, as soon as it is written
        self._saver, self._buffers = Saver(run, config.checkpoint_keep), Buffers(run, config.buffer_period)
        for writer in (self._saver, self._buffers):
            stack.callback(writer.close, SAVE_S)  # before the log is closed and the run is free for another learner
        self._saved_at, self._saved_update = time.monotonic(), self.update
        self._imported = sum(read_json(run / "imported_log.json")["steps"].values())
        self._clock = LearnerClock(self.update, self.experience.total)
        steps = self._imitate, self._learn_offline
        self._preparation = Preparation(config, self.agent, *steps, self._over, self._look, self.notify)
        self._expect_actors()

    def _alarm_watch(self, begins: int | None = None) -> AlarmWatch:
        """`begins`: the update from which learning goes on, -1 where it begins anew; what came later is forgotten."""
        if begins is not None:
            self.metrics.resumed(begins, self.experience.total)
        decided = self.agent.layout.continuous * self.config.agent.chunk
        known = replace(facts(self.config), target_entropy=self.agent.target_entropy, actions=decided)
        return AlarmWatch(self.run_folder, known, self.metrics, partial(logger.info, "%s"), self.config.stop_on)

    def _expect_actors(self) -> None:
        """Nothing was heard of any actor yet, and no update was made."""
        self._actor_reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._heard: dict[str, float] = {}
        self._out_of_reach: set[str] = set()  # actors whose operator is
        self._paused = False  # the clock and learning are, for the operators of all actors are out of reach
        self._checked = time.monotonic()
        self._says: dict[str, str] = {}  # whether an actor's environment tells success: "yes", "no" or "not yet"
        self._ended: list[tuple[float, dict[str, Any]]] = []
        self._simulations: set[str] = set()  # actors that play groups of episodes, without an operator
        self._first: float | None = None  # when the first online step was seen that was not imported
        self._looked = self._said = 0.0
        self._owes = False  # a checkpoint, however long ago the last one was
        self._skipped = self._skipped_in_a_row = 0  # updates that were left out: a loss or a gradient was not finite

    # The whole

    def run(self, stop: Callable[[], bool] = lambda: False) -> LearnerSummary:
        """Learns until one of the limits is reached, or `stop()` is true. Closes everything."""
        config = self.config
        with self._undo:
            self._stop = stop
            note_end(self.run_folder)  # it has not ended yet, or no longer
            if not self._resumed and config.agent.normalize_proprio:
                self.agent.fit_proprio(self.experience.demonstrated())
            if self._resumed or not self._pretraining():
                self._publish(first=True)  # before anything else: actors wait for it
            self.server.start(threaded=True)
            if self._pretraining() and not self._over():
                self._pretrain()
                if not self._pretraining():
                    self._publish(first=not self._reports.update_of)
            if not self._resumed and not self._pretraining():
                self._save()  # what there is before learning
            if config.collect_steps and not self.update:
                self._collect()
            self._clock = LearnerClock(self.update, self.experience.total)
            with denormals_flushed():
                self._learn()
            self._end()
            words = f"{self._reason}, after {self.update:,} updates with {self.experience.total:,} online steps"
            note_end(self.run_folder, self._reason, self.update, self._alarm or words)
            if self._alarm:
                raise stopped(self._alarm, self.run_folder, anew=self._pretraining())
            return LearnerSummary(self._reason, self.update, self.experience.total)

    def notify(self, text: str) -> None:
        """Logs a line of text for the user, as an event of the metrics too."""
        logger.info("%s", text)
        self.metrics.event(text, update=self.update, step=self.experience.total if hasattr(self, "experience") else 0)

    def _learn(self) -> None:
        while not self._over():
            self._look()
            if why := self._must_wait():
                self._wait(why)
                continue
            self._said = 0.0
            info: dict[str, float] = {}
            with self._finite():
                info = self._step(details=(self.update + 1) % self.config.log_period == 0)
            self.update += 1
            if self.update % self.config.steps_per_update == 0:
                self._publish()
            if self.update % self.config.log_period == 0:
                self._log(info)
            self._save_if_due()

    @contextlib.contextmanager
    def _finite(self) -> Iterator[None]:
        """An update with a loss or a gradient that is not finite changes nothing, is left out and counted;
        several in a row end the run. Updates of the critics that the same step had made before
        (`cta_ratio`) stay, and the message mentions them."""
        before = self.agent.updates
        try:
            yield
            self._skipped_in_a_row = 0
        except NotFiniteError as error:
            self._skipped, self._skipped_in_a_row = self._skipped + 1, self._skipped_in_a_row + 1
            made = self.agent.updates - before
            problem = str(error)
            if made:
                problem += f" Before it, in the same step, the critics had {made} good updates, which stay."
            if self._skipped_in_a_row == 1:
                self.notify(f"update {self.update + 1:,} is left out: {problem}")
            if self._skipped_in_a_row == MAX_SKIPPED:
                run, rate = self.run_folder, self.config.agent.rlpd.learning_rate
                note_end(run, "not_finite", self.update, f"{MAX_SKIPPED} updates in a row were not finite")
                raise not_finite(MAX_SKIPPED, problem, run, max(numbers(run), default=0), rate) from error

    def _step(self, details: bool, part: str = "both", number: int = 0) -> dict[str, float]:
        """One learner step: `cta_ratio` - 1 updates of the critics, and one of everything; or one of imitation.
        `part`: of the data, where it does not imitate; `number`: of the step, if it is none of the online ones."""
        config = self.config
        looks = details and (number or self.update + 1) % (LOOK_RECORDS * config.log_period) == 0
        if not reinforces(config):
            encoder = config.agent.encoder
            trained = encoder.training != "frozen" and not encoder.pretrain_updates  # else it was, and rests
            batch = self._sample(config.batch_size, PARTS[imitation(config)])
            counts = getattr(batch, "counts", {}).items()
            shares = {f"share/{name}": count / config.batch_size for name, count in counts}
            more = {"beside": partial(self._groups.learn, self.update + 1)} if self._groups is not None else {}
            with self._clock("torch"):
                learned = self.agent.imitate(batch, encoder=trained, **more)
                return {**learned, **shares, **(self.agent.health(batch) if looks else {})}
        critics = self.agent.critics
        for _ in range(config.cta_ratio - 1 if critics else 0):
            batch = self._sample(config.batch_size, part)
            with self._clock("torch"):
                self.agent.update(batch, critics)
        batch = self._sample(config.batch_size, part)
        with self._clock("torch"):
            info = self.agent.update(batch, details=details)[1]
            return info | (self.agent.health(batch) if looks else {})

    def _sample(self, batch_size: int, part: str, images: bool = False) -> Batch:
        encoded, began = self.experience.torch_seconds, time.perf_counter()
        with self._clock("data"):
            batch: Batch = self.experience.next_batch(batch_size, part, images)
        waited = time.perf_counter() - began  # also for the encoder, in the thread that makes batches ahead
        self._clock.move("data", "torch", min(waited, self.experience.torch_seconds - encoded))
        return batch

    # Before learning, and between

    def _pretraining(self) -> bool:
        return self._preparation.pending

    def _pretrain(self, part: str = "demonstrations") -> None:
        self._preparation.run(part)

    def _imitate(self, part: str, number: int) -> Mapping[str, float]:
        batch = self._sample(self.config.agent.encoder.pretrain_batch, part, images=True)
        with self._clock("torch"), self._finite():
            return self._prepared(self.agent.imitate(batch, encoder=True), number)
        return {}

    def _learn_offline(self, part: str, number: int) -> Mapping[str, float]:
        with self._finite():
            return self._prepared(self._step(number % self.config.log_period == 0, part, number), number)
        return {}

    def _prepared(self, info: Mapping[str, float], number: int) -> Mapping[str, float]:
        """Writes the figures of an update before online learning, at every `log_period`."""
        if number % self.config.log_period == 0:
            counted = {"prepared_updates": float(number), "skipped_updates": float(self._skipped)}
            self._write({**info, **counted, **self._clock.shares(), **self.experience.counts()})
        return info

    def _collect(self) -> None:
        """The pretrained policy and the operator drive; then pretraining is repeated with what succeeded.
        Nothing of it is in a checkpoint before the first update is: a process that was killed begins the
        repetition anew, with the same trajectories."""
        wanted = self.config.collect_steps
        while not self._over() and "trajectories" not in self._collected:
            self._look()
            if (have := self.experience.total - self._imported) < wanted:
                self._wait(f"{have} of {wanted} steps are collected, with the pretrained policy and the operator")
            else:
                self._note(online=self.experience.total, trajectories=self.experience.successful())
        if self._over():
            return
        trajectories = self._collected["trajectories"]
        steps = self.experience.collect(trajectories)
        self.notify(
            f"collected {len(trajectories)} successful episodes, of {steps} steps: pretraining is repeated with these"
        )
        self.agent.begin_anew()
        self._watch = self._alarm_watch(-1)
        if self.config.agent.normalize_proprio:
            self.agent.fit_proprio(self.experience.demonstrated())
        self._pretrain("collected")
        if not self._pretraining():
            self._publish()
            self._owes = True

    def _note(self, **facts: Any) -> None:
        """What a resumed learner has to know of collecting."""
        self._collected |= {"elapsed": self._seconds(), **facts}
        write_json(self.run_folder / COLLECTED, self._collected)

    def _must_wait(self) -> str:
        """What has to come before the next update; empty when it may be made."""
        config, have, counts = self.config, self.experience.total, self.experience.counts()
        if self._paused:
            return f"{CONTACT} is lost at {', '.join(sorted(self._out_of_reach))}"
        if not reinforces(config):
            if imitation(config) != "bc" and not any(counts.get(f"{n}_steps") for n in ("demo", "success", "policy")):
                return "there are no demonstrations and no take-overs to imitate yet"
            return "" if self._groups is None else self._groups.must_wait(self.update + 1)
        if self.update == 0 and have < config.training_starts:
            return f"learning starts with {config.training_starts} online steps, and there are {have}"
        if not counts["log_steps"]:
            return "there is no online step yet"
        if config.update_to_data and self.update + 1 > config.update_to_data * have:
            return (
                f"update_to_data={config.update_to_data:g}: {self.update} updates for {have} "
                "online steps, more are to come"
            )
        return ""

    def _wait(self, why: str) -> None:
        with self._clock("wait"):
            time.sleep(POLL_INTERVAL_S)
        now = time.monotonic()
        if self._said == 0.0:
            self._said = now if self.update else now - TELL_S
        if now - self._said >= TELL_S:
            self.notify(f"waits: {why}")
            self._said = now

    def _over(self) -> bool:
        """Whether it is time to end; then `_reason` is set."""
        config, online = self.config, self.experience.total
        if self._first is None and online > self._imported:
            self._first = time.monotonic() - self._elapsed
        self._mind_contact()
        limits = {
            "stopped": self._stop(),
            "pressed": self._pressed,
            "alarm": bool(self._alarm),
            "goal": self._goal is not None and self._goal.reached,
            "max_steps": self.update >= config.max_steps,
            "max_env_steps": bool(config.max_env_steps) and online >= config.max_env_steps,
            "max_seconds": bool(config.max_seconds) and self._seconds() >= config.max_seconds,
        }
        self._reason = next((reason for reason, reached in limits.items() if reached), "")
        return bool(self._reason)

    def _mind_contact(self) -> None:
        """While the operators of all actors are out of reach, the run's clock stands still."""
        now, was = time.monotonic(), self._paused
        heard = {name for name, at in list(self._heard.items()) if now - at < ACTIVE_S} - self._simulations
        self._paused = bool(heard) and heard <= self._out_of_reach
        if self._paused and was and self._first is not None:
            self._first += now - self._checked
        self._checked = now
        if self._paused != was:
            lost = f"{CONTACT} is lost: the run's clock and learning are paused"
            text = lost if self._paused else "goes on after a pause"
            logger.info("%s", text)
            pause = {"event": text, PAUSE: "begins" if self._paused else "ends"}
            self.metrics.write("event", pause, update=self.update, step=self.experience.total)

    def _seconds(self) -> float:
        """Since the first online step, without the time between two starts, and without pauses."""
        return 0.0 if self._first is None else time.monotonic() - self._first

    # Weights, checkpoints, metrics

    def _publish(self, first: bool = False) -> None:
        version = None
        if first:
            path = self.run_folder / STARTS
            starts = (read_json(path)["starts"] if path.exists() else 0) + 1
            write_json(path, {"starts": starts})
            version = starts * VERSIONS_PER_START
        began = time.perf_counter()
        published = self.server.publish_network(self.agent.acting_state(), version)
        self._sent = {"weights_mb": self.server.weights_bytes / 1e6, "publish_ms": 1e3 * (time.perf_counter() - began)}
        self._reports.published(published, self.update)

    def _save_if_due(self) -> None:
        period, since = self.config.checkpoint_period, self.update - self._saved_update
        due = since >= period if period else time.monotonic() - self._saved_at >= CHECKPOINT_S
        evaluate = self._evaluation_due()
        if (due or self._owes or evaluate) and since and not self._evaluating:
            self._save()
            self._to_evaluate = self._saved_update if evaluate and self._saved_update == self.update else 0
        self._buffers.write_if_due(self.experience)

    def _save(self) -> None:
        """Begins a checkpoint, unless one is still being written: then the next update tries again."""
        if self._saver.busy:
            return
        if self._saver.error is not None:
            self.notify(f"the checkpoint before was not written, and learning goes on: {self._saver.error}")
        state = {"elapsed": self._seconds(), "experience": self.experience.state(), "seed": self.config.seed}
        state |= {} if self._groups is None else {"groups": self._groups.state()}
        if self._saver.save(self.update, self.agent.state_dict(), state, self._watch.spans.earliest):
            self._saved_at, self._saved_update, self._owes = time.monotonic(), self.update, False

    # The goal

    @property
    def _evaluating(self) -> bool:
        """While an evaluation goes on, and once it has reached the goal, no newer checkpoint is written: a policy that
        reaches the goal is the last one then."""
        return self._goal is not None and (self._goal.busy or self._to_evaluate > 0 or self._goal.reached)

    def _evaluation_due(self) -> bool:
        goal = self._goal
        return goal is not None and not self._evaluating and self.update - goal.last >= goal.goal.period

    def _evaluate(self) -> None:
        """Hands on the checkpoint that is to be evaluated, and takes what came of the one before."""
        goal = self._goal
        if goal is None:
            return
        if (result := goal.poll()) is not None:
            self._report(result)
        if self._to_evaluate and not self._saver.busy:
            if self._to_evaluate in numbers(self.run_folder):
                goal.ask(self._to_evaluate)
            self._to_evaluate = 0

    def _report(self, result: Mapping[str, Any]) -> None:
        """Shows the result of an evaluation, and writes it to the metrics."""
        if "error" in result:
            self.notify(f"evaluation: {result['error']}")
            return
        text, values = described(result, self.config.goal)
        self.notify(text)
        self._write(values)

    def _write(self, values: Mapping[str, float | str]) -> None:
        """Writes to the metrics. Alarms that these raise are shown, and end the run if `stop_on` names them."""
        self.metrics.write("update", values, update=self.update, step=self.experience.total)
        self._watch.cannot_raise(self.agent.lacking)
        self._alarm = self._alarm or self._watch.take(values, update=self.update, step=self.experience.total)

    def _log(self, info: Mapping[str, float]) -> None:
        made, arrived, seconds = self._clock.since(self.update, self.experience.total)
        versions = self.experience.newest_versions(max(1, len(self._heard)))
        behind = [self.update - at for version in versions if (at := self._reports.update_of.get(version, -1)) >= 0]
        values = {
            **info,
            "elapsed_seconds": self._seconds(),
            "skipped_updates": float(self._skipped),
            "updates_per_second": made / seconds,
            "env_steps_per_second": arrived / seconds,
            **self._clock.shares(),
            **self._sent,
            **({"staleness": sum(behind) / len(behind)} if behind else {}),
            **self._reports.figures(),
            **self.experience.counts(),
            **({} if self._groups is None else self._groups.figures()),
        }
        # what Q is to be; beyond a time limit, its own estimate
        if "q/online" in info and len(self._realized) == REALIZED:
            values["realized_q"] = sum(came + cut * info["q/online"] for came, cut in self._realized) / REALIZED
        self._write(values)

    def _look(self) -> None:
        """Called periodically: takes in new steps, and writes metrics of episodes that ended and of actors' reports."""
        if (now := time.monotonic()) - self._looked < REPORT_INTERVAL_S:
            return
        self._looked = now
        self.experience.take()
        self._ended += [(now, episode) for episode in self.experience.finished()]
        while self._ended and self._may_tell(*self._ended[0]):
            episode = self._ended.pop(0)[1] | {"elapsed_seconds": self._seconds()}
            self._realized.append((episode["return_to_go"], episode["cut_share"]))
            if self._says.get(episode["actor"]) == "no":
                episode |= {"success": None, "success_alone": None}
            self.experience.note_outcome(episode["trajectory"], episode["success"])
            if GROUP in episode:  # the policy sampled its actions: the curves are of what it does by itself
                continue
            self.metrics.write("episode", episode, update=self.update, step=self.experience.total)
            if self._goal is not None:
                self._goal.note_episode(bool(episode["intervention_steps"]))
        if self._groups is not None:
            self._groups.look()
        self._evaluate()
        while not self._actor_reports.empty():
            self.metrics.write("actor", self._actor_reports.get(), update=self.update, step=self.experience.total)

    def _may_tell(self, since: float, episode: Mapping[str, Any]) -> bool:
        """Whether an episode may be reported: not before its actor has reported
        whether its environment knows success."""
        waits = self._says.get(episode["actor"]) == "not yet" and episode["actor"] in self._heard
        return not waits or bool(self._reason) or time.monotonic() - since > ACTIVE_S

    # Actors

    def _answer(self, _: str, payload: Any) -> dict[str, Any]:
        """Answers "send-stats", in a thread of the wire's."""
        reported = flat_scalars(payload)
        name = str(reported.get("actor", ""))
        self._pressed = self._pressed or bool(reported.get("stop"))
        ended = self._reason not in ("", "stopped")
        if reported.pop("bye", False):
            self._heard.pop(name, None)
            self._reports.left(name)
        elif name:
            self._heard[name] = time.monotonic()
            self._reports.heard(name, reported)
        if "contact_lost" in reported:
            (self._out_of_reach.add if reported["contact_lost"] else self._out_of_reach.discard)(name)
        if "rewound_at" in reported:
            self.experience.note_rewind(name, reported.pop("rewound_at"), reported.pop("rewound_to"))
        if reported.get("simulation"):
            self._simulations.add(name)
        if "says_success" in reported:
            self._says[name] = str(reported["says_success"])
        if len(reported) > 1:
            own = {"kind", "time", "update", "step"}  # of the learner's records
            self._actor_reports.put({f"actor_{key}" if key in own else key: value for key, value in reported.items()})
        left = {"left": self.config.max_env_steps - self.experience.total} if self.config.max_env_steps else {}
        encoder = self.config.agent.encoder
        looks = {} if encoder.kind == "none" else {"precision": encoder.precision}
        left |= {} if self._groups is None else {"groups": self._groups.waiting}
        return {"stop": ended, "update": self.update, "online": self._to_learn(), "run": self._run_id, **looks, **left}

    def _to_learn(self) -> int:
        """Online steps that updates are to keep up with: not those that were collected before."""
        if not self.config.collect_steps:
            result: int = self.experience.total
            return result
        return self.experience.total - self._collected["online"] if "online" in self._collected else 0

    def _end(self) -> None:
        self.notify(f"ends: {self._reason}, after {self.update} updates with {self.experience.total} online steps")
        if self._goal is not None and self._reason == "goal":
            self.notify(f"the policy that reached the goal is the last checkpoint, of update {self._goal.last:,}")
        with contextlib.suppress(HiltError):  # of the one before; the last one is what counts
            self._saver.wait(SAVE_S)
        if self._reports.update_of and not self._pretraining():
            self._publish()
        collecting = self.config.collect_steps and not self.update
        if collecting:
            self._note()
        if self._reason != "stopped":
            self._say_goodbye()
        self._looked = 0.0
        self._look()
        begins_anew = collecting and 0 in numbers(self.run_folder)  # half pretrained, or repeated
        if not self._pretraining() and not begins_anew and self._reason != "goal":  # whose policy is saved already
            self._save()
        self._saver.wait(SAVE_S)
        self._buffers.finish(self.experience, SAVE_S)
        if self.config.agent.kind == FROZEN_VLA:
            from hilt.hil.frozen.frozen_export import export_policy  # late: it loads the frozen policy

            self.notify(f"the policy is in {export_policy(self.config, self.agent, self.run_folder)}")

    def _say_goodbye(self) -> None:
        """Serves until every actor knows of the end, and its remaining steps have arrived."""
        deadline = time.monotonic() + GOODBYE_S
        while time.monotonic() < deadline and not self._stop():
            asking = any(time.monotonic() - heard < ACTIVE_S for heard in list(self._heard.values()))
            if not asking and all(one["silent_s"] >= ACTIVE_S for one in self.server.stats()["actors"].values()):
                return
            time.sleep(POLL_INTERVAL_S)
            self._looked = 0.0 if self.config.store == "trajectories" else self._looked
            self._look()
