"""Post-training: collect episodes, learn from them, and look how good the policy is, until there are enough steps.

    RUN/config.yaml, run.json   every setting, frozen; its identity
    RUN/rollouts/rank-N/        every episode that a rank collected, as a log
    RUN/evaluations/            what each validation gave, by task, with intervals; videos beside
    RUN/best/STEP/              what was trained, as it was at the best validation so far
    RUN/checkpoints/            where --resume goes on, bit for bit
    RUN/actor/global_step_N/    with export_period: a complete checkpoint of the policy after N steps; copy_to has all
                                but rollouts at a URL
    RUN/policy/                 at its end or stop: a complete checkpoint of the policy at its best, adapters merged;
                                alone: RUN/adapter/

This is the controller: one process that tells the workers (`hilt.vla.worker`) what to do and writes
down what they answer. It holds no policy and sees no frame: a worker answers with figures and with
summaries of its episodes, which stay in its log.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hilt.core.checksums import write_json
from hilt.core.errors import AlarmError, CorruptError, Problems, StorageError
from hilt.core.files import DISK, new_folder
from hilt.core.progress import Report, silent
from hilt.core.trust import check_names
from hilt.distributed.group import open_group
from hilt.distributed.remote_workers import STOP_INTERVAL_S, CallProgress, Group, LostWorkerError, Stopped
from hilt.observe.alarm_watch import AlarmWatch, stopped
from hilt.observe.metrics import Metrics
from hilt.policies.io.tensor_files import write_tensors
from hilt.policies.registry import is_new
from hilt.runs import checkpoint
from hilt.runs.evaluation import as_pairs, over_tasks
from hilt.runs.folder import RunKind, check_new, failure_noted, note_end
from hilt.runs.last_good import went_back_to
from hilt.runs.run_precision import described, settle
from hilt.runs.run_precision import frozen as frozen_settings
from hilt.value.rollout_watch import value_figures
from hilt.vla import exports
from hilt.vla.config import Vla
from hilt.vla.footprint import disk
from hilt.vla.plan import recomputation
from hilt.vla.tally import ENOUGH, summed
from hilt.vla.trained import BEST, SIZES, policy_of, sizes_of_run
from hilt.vla.trials import evaluations_of
from hilt.vla.worker import check_value, trained_policy

WORKER = "hilt.vla.worker:make_worker"
RESULT = "result.json"
CHANGEABLE = frozenset(
    {
        *("max_steps", "max_seconds", "checkpoint_period", "checkpoint_keep", "sinks", "device", "pool", "placement"),
        *("validation.period", "validation.after", "validation.videos", "validation.goal", "validation.hold"),
        *("export_period", "export_keep", "copy_to", "memory_limit_gb", "value"),
        *("collect", "algorithm", "optimizer", "critic.optimizer", "critic.warmup_steps", "solved_steps", "stop_on"),
    }
)
"""What may be another when a run is resumed: a setting, or all of a section"""
MAX_SKIPPED = 5
"""Steps of the optimizer in a row whose gradient is not finite, after which a run ends with an error"""
GOES_ON = ("stopped", "alarm")
"""Reasons for which a run ends in the middle: --resume goes on, and no validation is made for it"""
WAITING = 20
"""Steps in a row, at least, that may collect without learning before a run ends"""
NAMES = {"collect": "collecting episodes", "update": "learning from the chunks", "validate": "validating"}
"""What a rank is asked for, in words"""
FAILURE_STEPS = (3, 10, 30, 100)
"""Training steps after which a run in which no episode succeeded is mentioned"""
DRAWN = ("simulator", "model", "update")
"""Where a step's time should go; the rest of it is `other`"""


# --- the folder of a run ---


KIND = RunKind("vla", Vla, CHANGEABLE, Vla.check, thaw=partial(frozen_settings, Vla))


def begin_run(run: Path, recipe: str, config: Vla) -> Vla:
    """Begins a run: makes its folder and freezes its settings. Whatever cannot work
    is refused before anything is made."""
    problems = Problems()
    if problems.check(config.check):
        problems.check(check_value, config)
    problems.check(check_new, run)
    problems.report()
    check_names(config)
    config, choice = settle(config.settled())
    config, recomputed = recomputation.settle(config)
    recomputation.check_limit(config, recomputed)
    return KIND.begin(run, recipe, config, described(choice) | recomputation.described(recomputed))


is_run, resume_run, resumed_settings = KIND.is_run, KIND.resume, KIND.resumed


# --- the run ---


@dataclass(frozen=True)
class TrainSummary:
    """Why a run ended or was stopped, and with what."""

    reason: str
    """"goal": success held at validation.goal; "solved": every group succeeded in `solved_steps` training steps in a
    row; "max_steps", "max_seconds"; "exhausted": this number of steps in a row made no update; "stopped" from outside;
    or "alarm": one that `stop_on` names, which `train` raises as an `AlarmError` when the policy is written"""
    step: int
    """The last one, of all that collected"""
    best_step: int
    """Of the policy that is kept: the best so far, or without a validation the last; -1
    when it was stopped before the first step"""
    success: float
    """Of that one on the validation states; -1 when it was never validated"""
    seconds: float
    waited: int = 0
    """Steps of these in which groups were collected and only waited: no training steps, as nothing was learned from"""


def train(
    config: Vla,
    run: Path,
    *,
    notify: Callable[[str], None] = lambda text: None,
    stop: Callable[[], bool] = lambda: False,
    report: Report = silent,
) -> TrainSummary:
    """Runs to the end, or until `stop` returns True, and writes ``run/policy``. After
    a stop of any kind, the same call continues.

    `notify` is called with each line of text for the user, `report` with the
    progress of each phase (`hilt.core.progress`).
    """
    config.check()
    config, _ = recomputation.settle(settle(config)[0])  # a run is settled already; others are, for all ranks alike
    with contextlib.ExitStack() as stack:
        stack.enter_context(checkpoint.taken_back(run, "rollouts"))
        stack.enter_context(checkpoint.alone(run, "is being trained already"))
        stack.enter_context(failure_noted(run))
        arguments = (asdict(config), str(run.absolute()))
        placement = config.placement
        ranks = "the rank" if placement.kind == "here" else f"{placement.ranks + placement.rollout_ranks} ranks"
        report(f"starting {ranks}: the policy and the simulators")
        note_end(run)
        copy = exports.RunCopy(config.copy_to, run) if config.copy_to else None
        try:
            group = open_group(
                config.placement, WORKER, arguments, device=config.device, joined=config.sharding.enabled, stop=stop
            )
        except Stopped:
            return _stopped_early(config, run, notify)
        stack.callback(group.close)
        stack.enter_context(_told_to_stop(group, stop))
        if is_new(config.policy):
            write_json(run / SIZES, group.call("sizes")[0])
        for line in disk(config, sizes_of_run(run), run, begins=True):
            notify(line)
        metrics = stack.enter_context(Metrics(run, config.sinks))
        try:
            controller = Controller(config, run, group, metrics, notify, report, copy)
            done = controller.run()
        except Stopped:  # when all ranks were started again
            return _stopped_early(config, run, notify)
    _finish(config, run, done, controller.alarm, copy, report)
    return done


def _finish(
    config: Vla, run: Path, done: TrainSummary, alarm: str, copy: exports.RunCopy | None, report: Report
) -> None:
    """Writes what the end of a run leaves: its reason, the policy, and the copy. Raises the `alarm` that ended it."""
    why = alarm or in_words(config, done)
    # what --resume needs comes first: a large policy may take longer to write than a grace period
    if done.reason in GOES_ON:
        note_end(run, done.reason, done.step, why)
        if copy is not None:
            copy.update(done.step, config.export_keep, config.checkpoint_keep, report)
    if done.best_step >= 0:
        report("writing the policy")
        exports.export(policy_of(run, "last" if done.reason in GOES_ON and done.success < 0 else "best"), run)
        write_json(run / RESULT, asdict(done))
    if copy is not None:  # after what is here is complete: if this fails, --resume copies again
        copy.update(done.step, config.export_keep, config.checkpoint_keep, report)
        copy.finish(report)
    if alarm:
        raise stopped(alarm, run)
    if done.reason != "stopped":
        note_end(run, done.reason, done.step, why)


def _stopped_early(config: Vla, run: Path, notify: Callable[[str], None]) -> TrainSummary:
    """Returns the summary of a run that was stopped while its ranks were started:
    how far it is, as its checkpoint tells."""
    saved = checkpoint.latest(run, notify)
    state: Mapping[str, Any] = saved.state if saved is not None else {}
    figures = (int(state.get("best_step", -1)), float(state.get("best", -1.0)), float(state.get("elapsed", 0.0)))
    done = TrainSummary("stopped", saved.update if saved is not None else 0, *figures)
    note_end(run, done.reason, done.step, in_words(config, done))
    return done


def in_words(config: Vla, done: TrainSummary) -> str:
    """Why a run ended, in a line."""
    words = {"max_steps": "max_steps is reached", "max_seconds": "max_seconds are over", "stopped": "it was stopped"}
    words |= {"goal": "the goal is reached"}
    words["exhausted"] = (
        f"{most_waiting(config)} steps in a row found too few groups to learn from (collect: "
        "filters, group_size, tasks)"
    )
    words["solved"] = f"solved: all members of all groups succeeded in {config.solved_steps} training steps in a row"
    return words[done.reason]


def most_waiting(config: Vla) -> int:
    """Steps in a row without an update, after which a run ends."""
    return max(config.max_steps, WAITING)


@contextlib.contextmanager
def _told_to_stop(group: Group, stop: Callable[[], bool]) -> Iterator[None]:
    """Workers that are in the middle of something hear of it within `STOP_INTERVAL_S`."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(STOP_INTERVAL_S):
            if stop():
                group.stop()

    thread = threading.Thread(target=watch, name="hilt-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(5)


class Controller:
    """Tells the workers what to do in each training step, and keeps the state of the run."""

    def __init__(
        self,
        config: Vla,
        run: Path,
        group: Group,
        metrics: Metrics,
        notify: Callable[[str], None],
        report: Report = silent,
        copy: exports.RunCopy | None = None,
    ):
        self._config, self._run, self._group, self._metrics = config, run, group, metrics
        self._notify, self._report, self._copy = notify, report, copy
        self._standings: dict[int, CallProgress] = {}
        group.watch = self._heard
        self.step = 0
        """Steps so far: each collects, and all but those that wait are training steps"""
        # steps without an update: all of them, and the last ones in a row, of this process
        self._waited, self._waiting = 0, 0
        self._env_steps = 0
        self._elapsed, self._began = 0.0, time.monotonic()
        self._seconds_before = 0.0  # the first training step, such as those of the validation before it
        self._validated = self._best_step = -1
        self._best = -1.0
        self.alarm = ""
        """The text of one that `stop_on` names, which ends the run"""
        self._solved = [0, 0]  # training steps in a row in which every group succeeded, and their episodes
        self._sound = True  # whether the last step of the optimizer had a finite gradient
        self._tally = [0, 0]  # episodes and successes in training, of this process
        self._successes: list[float] = []
        """Of the validations so far, in their order"""
        self._restore()

    def run(self) -> TrainSummary:
        reason, restarts = "", 0
        while not reason:
            try:
                reason = self._go_on()
            except Stopped:
                reason = "stopped"
            except LostWorkerError as error:  # what is lost with a process is what came after the last checkpoint
                if restarts == self._config.placement.restarts:
                    raise
                restarts += 1
                self._notify(
                    f"{error} All ranks are started again, from the last checkpoint ({restarts} of "
                    f"{self._config.placement.restarts})."
                )
                self._metrics.event(f"started again: {error}", update=self.step, step=self._env_steps)
                self._report("starting all ranks again")
                self._group.restart()
                self._restore()
        if self._best < 0 and reason not in GOES_ON:  # never validated: what is last is kept, also when it goes on
            self._keep(-1.0)
        self._save()
        kept = self._best_step if self._best >= 0 or reason not in GOES_ON else self.step or -1
        return TrainSummary(reason, self.step, kept, self._best, self._seconds(), self._waited)

    def _go_on(self) -> str:
        """Until it is over; why it is."""
        validation = self._config.validation
        if validation.before and self._validated < 0:
            self._validate()
        while True:
            reason = self._over()
            if reason:
                due = validation.after and reason != "alarm"
            else:
                due = bool(self.step and validation.period) and self.step % validation.period == 0
            if due and self._validated < self.step:
                self._validate()
            reason = reason or ("alarm" if self.alarm else "goal" if self._goal_holds() else "")
            if self.step and self._sound:
                self._save_if_due()
            if reason:
                return reason
            self._train_once()

    def _goal_holds(self) -> bool:
        """Whether the last `hold` validations all reached the goal: one alone may be luck."""
        goal, last = self._config.validation.goal, self._successes[-self._config.validation.hold :]
        return bool(goal) and len(last) == self._config.validation.hold and min(last) >= goal

    def _over(self) -> str:
        if self.alarm:
            return "alarm"
        if self._learned >= self._config.max_steps:
            return "max_steps"
        if (
            self._config.may_be_solved
            and 0 < self._config.solved_steps <= self._solved[0]
            and self._solved[1] >= ENOUGH
        ):
            return "solved"
        if self._waiting >= most_waiting(self._config):
            return "exhausted"
        return "max_seconds" if self._config.max_seconds and self._seconds() >= self._config.max_seconds else ""

    @property
    def _learned(self) -> int:
        """Training steps: those with an update."""
        return self.step - self._waited

    def _progress(self) -> float:
        """How much of the run is done with the step that is under way, by whichever of its two
        ends comes first; for the learning rate."""
        cap, before = self._config.max_seconds, self._seconds_before
        seconds = (self._seconds() - before) / (cap - before) if cap > before else float(cap > 0)
        return min(1.0, max((self._learned + 1) / self._config.max_steps, seconds))

    def _seconds(self) -> float:
        """Returns the seconds of work, those before it was resumed included."""
        return self._elapsed + time.monotonic() - self._began

    # One training step

    def _train_once(self) -> None:
        began, validation = time.monotonic(), self._config.validation
        if not self.step:
            self._seconds_before = self._seconds()
        ahead = (
            not (validation.period and (self.step + 1) % validation.period == 0)
            and self._learned + 1 < self._config.max_steps
        )
        parts = self._ask("collect", self.step)
        collected = time.monotonic()
        for rank, part in enumerate(parts):
            for summary in part["episodes"]:
                self._env_steps += summary["length"]
                self._metrics.write(
                    "episode", {**summary, "actor": f"rank-{rank}"}, update=self.step + 1, step=self._env_steps
                )
            for text in part["messages"]:
                self._notify(text)
        if ahead and self._config.collect.ahead:
            self._group.call("begin_collect", self.step + 1, self.step)
        updates = self._ask("update", self._progress(), ahead)
        now = time.monotonic()
        self.step += 1
        learned = updates[0]["tokens"] > 0
        self._waited, self._waiting = self._waited + (not learned), 0 if learned else self._waiting + 1
        slowest = max((part["seconds"] for part in parts), key=lambda seconds: seconds["all"])
        spent = {name: slowest.get(name, 0.0) for name in ("simulator", "model", "beside")}
        spent["update"] = now - collected
        values = summed([part["figures"] for part in parts]) | updates[0]
        values |= {f"{name}_share": seconds / (now - began) for name, seconds in spent.items()}
        values["other_share"] = max(0.0, 1 - sum(values[f"{name}_share"] for name in DRAWN))
        values["staleness"] = self.step - 1 - min(part["version"] for part in parts)
        values |= {"weights_age": values["weights_age"] + values["staleness"]} if "weights_age" in values else {}
        episodes = [summary for part in parts for summary in part["episodes"]]
        steps = sum(summary["length"] for summary in episodes)
        values |= value_figures(episodes)
        values |= {"env_steps_per_second": steps / (now - began), "updates_per_second": learned / (now - began)}
        values |= {"step_seconds": now - began, "waited_steps": self._waited}
        self._metrics.write("update", values, update=self.step, step=self._env_steps)
        solved = 0 < values["groups"] == values["groups_all_succeeded"]
        self._solved = [self._solved[0] + 1, self._solved[1] + int(values["episodes"])] if solved else [0, 0]
        self._mind_gradient(values)
        self._mind_failure([bool(summary["success"]) for summary in episodes])
        self._mind_alarms(values)

    def _mind_alarms(self, values: Mapping[str, float | str]) -> None:
        """Ends the run, as soon as this step is done, where one is raised that `stop_on` names."""
        self.alarm = self._watch.take(values, update=self.step, step=self._env_steps) or self.alarm

    def _mind_gradient(self, values: Mapping[str, float]) -> None:
        """Steps whose gradient is not finite are left out. Where none is finite any more, the run ends, and no
        checkpoint is made of it: the last one is from before."""
        skipped, in_a_row = (int(values.get(name, 0)) for name in ("skipped_steps", "skipped_in_a_row"))
        if skipped:
            self._notify(
                f"step {self.step}: {skipped} of {values['optimizer_steps']:.0f} optimizer steps were "
                "skipped: no finite gradient"
            )
        self._sound = not in_a_row
        if in_a_row >= MAX_SKIPPED:
            rate = float(self._config.settled().optimizer.learning_rate or 0)
            last = max(checkpoint.numbers(self._run), default=0)
            note_end(self._run, "not_finite", self.step, f"the last {in_a_row} gradients were not finite")
            raise AlarmError(
                f"the last {in_a_row} steps of the optimizer had a gradient that is not finite, "
                f"and were left out. Go on from step {last}, where it was finite, with a lower rate: hilt train "
                f"--run {self._run} --resume optimizer.learning_rate={rate / 10:g}. If that does not "
                "help, look at the rewards and at the policy's checkpoint."
            )

    def _mind_failure(self, outcomes: Sequence[bool]) -> None:
        """Where success is all that is rewarded, a policy that never succeeds learns
        nothing, and its loss does not show it."""
        self._tally = [self._tally[0] + len(outcomes), self._tally[1] + sum(outcomes)]
        rewards = self._config.rewards
        if self.step in FAILURE_STEPS and not self._tally[1] and not (rewards.environment or rewards.learned):
            self._notify(
                f"after step {self.step}: none of {self._tally[0]} episodes in training succeeded, and "
                "there is nothing to learn from. Begin with a better policy (hilt train sft), look at videos "
                "(validation.videos=3), or reward more than success (rewards.environment=1)."
            )

    # Validation

    def _validate(self) -> None:
        """All states of the split, dealt to the ranks; every episode counts, a lost one as a failure."""
        began, config = time.monotonic(), self._config.validation
        parts = self._ask("validate", self.step)
        outcomes = [outcome for part in parts for outcome in part["outcomes"]]
        seconds = time.monotonic() - began
        settings = (config.split, self.step, config.sample, self._config.seed)
        # with at_most, maybe not all
        tasks = [task for task in self._config.tasks if any(outcome["task"] == task for outcome in outcomes)]
        made = evaluations_of(outcomes, tasks, *settings, seconds, self._run / "evaluations", again=True)
        values: dict[str, float] = {f"validation_success/{one.task}": one.successes / len(one.outcomes) for one in made}
        good, lost = (sum(bool(outcome[what]) for outcome in outcomes) for what in ("success", "error"))
        each = [(outcome["task"], outcome["state"], bool(outcome["success"])) for outcome in outcomes]
        low, high, counted = over_tasks(each)
        values |= {
            "validation_episodes": len(outcomes),
            "validation_success": good / len(outcomes),
            "validation_lost": lost,
        }
        values |= {"validation_low": low, "validation_high": high, "validation_effective_episodes": counted}
        pairs = {"validation_outcomes": as_pairs(each)}
        self._metrics.write(
            "update", {**values, "validation_seconds": seconds, **pairs}, update=self.step, step=self._env_steps
        )
        self._validated = self.step
        self._successes.append(values["validation_success"])
        better = values["validation_success"] > self._best
        if better:
            self._keep(values["validation_success"])
        share = (
            f"{good} of {len(outcomes)}: {100 * values['validation_success']:.1f}%, 95% interval "
            f"{100 * low:.1f}% to {100 * high:.1f}%"
        )
        note = "the best so far" if better else f"the best was {100 * self._best:.1f}% at step {self._best_step}"
        self._notify(
            f"step {self.step}: success on {config.split} states {share}; {note}" + f"; {lost} lost" * bool(lost)
        )
        self._mind_alarms({**values, **pairs})

    def _keep(self, success: float) -> None:
        self._best, self._best_step = success, self.step
        folder = self._run / BEST / str(self.step)
        DISK.remove(folder)  # of a process that was killed before it recorded it
        DISK.make_folders(folder.parent)
        with new_folder(folder) as beside:
            write_tensors(beside, self._group.call("trained")[0])

    # What is kept

    def _ask(self, method: str, *given: Any) -> list[Any]:
        """Asks every rank. One that was stopped has done nothing: the step is left as it began."""
        self._standings = {}
        self._report(f"{self._when(method)}: {NAMES[method]}")
        answers = self._group.call(method, *given)
        if any(isinstance(answer, Mapping) and answer.get("stopped") for answer in answers):
            raise Stopped
        return answers

    def _heard(self, rank: int, standing: CallProgress) -> None:
        """How far the call is that the ranks are in, all together."""
        self._standings[rank] = standing
        alike = [one for one in self._standings.values() if one.phase == standing.phase]
        done, total = sum(one.done for one in alike), sum(one.total for one in alike)
        self._report(f"{self._when(standing.phase)}: {standing.phase}", done, total, standing.note)

    def _when(self, phase: str) -> str:
        return f"after step {self.step}" if phase in ("validate", NAMES["validate"]) else f"step {self.step + 1}"

    def _save_if_due(self) -> None:
        config = self._config
        save, write = (
            bool(period) and self.step % period == 0 for period in (config.checkpoint_period, config.export_period)
        )
        if save:
            self._save()
        if write:
            self._export()
        if self._copy is not None and (save or write):
            try:
                self._copy.update(self.step, config.export_keep, config.checkpoint_keep, self._report)
            except (StorageError, CorruptError) as error:  # the run has all of it, and days of training are worth more
                text = (
                    f"after step {self.step}: the copy was not made, training goes on, and the next "
                    f"checkpoint tries again: {error}"
                )
                self._notify(text)
                self._metrics.event(text, update=self.step, step=self._env_steps)

    def _export(self) -> None:
        """The policy of now as a complete folder; one that is there already has the same weights."""
        folder = exports.folder_of(self._run, self.step)
        if not folder.exists():
            self._report(f"writing {folder.name}")
            policy = trained_policy(self._config, sizes_of_run(self._run), self._group.call("trained")[0])
            exports.save_checkpoint(policy, folder)
            exports.prune(self._run, self._config.export_keep)

    def _save(self) -> None:
        self._report("writing a checkpoint")
        own = self._group.call("own")
        tree = {"shared": self._group.call("shared")[0], "ranks": {str(rank): part for rank, part in enumerate(own)}}
        state: dict[str, Any] = {
            "best": self._best,
            "best_step": self._best_step,
            "validated": self._validated,
            "elapsed": self._seconds(),
        }
        state |= {
            "successes": self._successes,
            "solved": self._solved,
            "seconds_before": self._seconds_before,
            "waited": self._waited,
        }
        state["env_steps"], keep = self._env_steps, self._config.checkpoint_keep
        checkpoint.save(self._run, self.step, tree, state, keep=keep, alarm=self._watch.spans.earliest)
        for old in (self._run / BEST).glob("*"):
            if old.name != str(self._best_step):
                DISK.remove(old)

    def _restore(self) -> None:
        """To the last checkpoint, or to the beginning."""
        saved = checkpoint.latest(self._run, self._notify)
        state: Mapping[str, Any] = saved.state if saved is not None else {}
        self.step, self._env_steps = saved.update if saved is not None else 0, int(state.get("env_steps", 0))
        # also of what was lost
        self._elapsed, self._began = max(self._seconds(), float(state.get("elapsed", 0.0))), time.monotonic()
        self._best, self._best_step = float(state.get("best", -1.0)), int(state.get("best_step", -1))
        self._waited, self._waiting = int(state.get("waited", 0)), 0
        self._validated, self._seconds_before = int(state.get("validated", -1)), float(state.get("seconds_before", 0.0))
        self._successes, self._solved = list(state.get("successes", [])), list(state.get("solved", [0, 0]))
        self._sound = True
        own: list[Any] = []
        if saved is not None:
            self._group.call("load_shared", saved.agent["shared"])
            own = [saved.agent["ranks"][str(rank)] for rank in range(len(saved.agent["ranks"]))]
            if len(own) != (now := self._config.placement.rollout_ranks or self._config.placement.ranks):
                self._notify(
                    f"{self._run} had {len(own)} ranks that collect and has {now} now: what was learned goes "
                    "on, collecting begins anew"
                )
                own = []
        self._group.call("load_own", own, self.step, saved is not None and went_back_to(self._run) == self.step)
        exports.forget_after(self._run, self.step)
        if self._copy is not None:
            self._copy.forget_after(self.step)
        if self._metrics.path.stat().st_size:
            # without a checkpoint everything is made again, the validation before the first step, too
            self._metrics.resumed(self.step if saved is not None else -1, self._env_steps)
        self._watch = AlarmWatch(self._run, self._config.facts, self._metrics, self._notify, self._config.stop_on)


__all__ = ["Controller", "TrainSummary", "Vla", "begin_run", "is_run", "policy_of", "resume_run", "train"]
