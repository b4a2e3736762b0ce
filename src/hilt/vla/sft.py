"""Supervised fine-tuning: a policy imitates demonstrations until the loss on held-out episodes is lowest.

    RUN/config.yaml, run.json   every setting, frozen; its identity
    RUN/tasks/NAME/             demonstrations that the script of a task recorded before
    RUN/data/                   logs that were made of datasets in other formats
    RUN/chosen_episodes.json    those that `where` has chosen when the run began
    RUN/best/STEP/              what was trained, as it was at the lowest validation loss so far
    RUN/checkpoints/            where --resume goes on, bit for bit
    RUN/policy/                 the end: a complete checkpoint of the policy at its best, adapters merged

It works with every `hilt.policies.base.Policy`, through `supervised_loss`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hilt.algos.adam import Adam
from hilt.core.checksums import write_json
from hilt.core.errors import ConfigError
from hilt.core.files import DISK, new_folder, replacing
from hilt.core.hub import local
from hilt.core.progress import Report, silent
from hilt.core.trust import check_names
from hilt.envs.fitted import open_task
from hilt.observe.alarm_watch import stopped
from hilt.observe.metrics import Metrics, read_metrics
from hilt.policies.base import Policy
from hilt.policies.io.memory import free_bytes
from hilt.policies.precision import of_former_name
from hilt.policies.registry import is_new, load_policy, new_policy, policy_class, policy_sizes
from hilt.policies.vla.normalize import statistics
from hilt.recording.record import Settings
from hilt.recording.script import record_with_script
from hilt.replay.tensors import generator
from hilt.runs import checkpoint
from hilt.runs.folder import RunKind, check_new, failure_noted, note_end
from hilt.runs.run_precision import described, settle
from hilt.runs.run_precision import frozen as frozen_settings
from hilt.vla.demonstrations import Demonstrations, batches, words
from hilt.vla.imitation.sft_guard import SftGuard, rows_to_look_at
from hilt.vla.imitation.sft_settings import Lora, Sft, learning_rate, options_of
from hilt.vla.recap.advantage_labels import advantage_labels

POLICY, RESULT = "policy", "result.json"
CHANGEABLE = frozenset(
    {
        *("max_steps", "patience", "log_period", "checkpoint_period", "sinks", "device", "samples_at_once"),
        *("learning_rate", "stop_on"),
    }
)
"""What may be another when a run is resumed"""
RECORDED = {"data", "tasks", "task_options", "demonstrations", "demonstration_options", "seed"}
"""What may not even where it has learned nothing yet: what was recorded or converted depends on it"""


# --- the run ---


def _may_change(run: Path, key: str) -> bool:
    """Nearly everything may change until the run has learned something."""
    return not checkpoint.numbers(run) and key.partition(".")[0] not in RECORDED


KIND = RunKind("sft", Sft, CHANGEABLE, Sft.check, thaw=partial(frozen_settings, Sft), may_change=_may_change)


def begin_run(run: Path, recipe: str, config: Sft) -> Sft:
    """Begins a run: makes its folder and freezes its settings. Whatever cannot work
    is refused before anything is made."""
    check_names(config)
    config.check()
    check_new(run)
    config, choice = settle(config)
    return KIND.begin(run, recipe, config, described(choice))


is_run, resume_run = KIND.is_run, KIND.resume


@dataclass(frozen=True)
class SftSummary:
    """How a run, or this part of it, ended."""

    reason: str
    """"best": validation did not fall any more; "max_steps"; "stopped" from outside; "kept": nothing was learned; or
    "alarm": one that `stop_on` names, which `train` raises as an `AlarmError` when the policy is written"""
    step: int
    best_step: int
    """Of the policy that is kept"""
    loss: float
    """Its validation loss; without validation, the last training loss"""
    seconds: float


def demonstrations_of(run: Path, task: str) -> Path:
    """Returns the folder in which a run records the demonstrations of a task."""
    return run / "tasks" / task.replace("/", "-") / "demonstrations"


def open_policy(run: Path, config: Sft) -> Policy:
    """What a run made, run as it was taught: with the same `center_crop`, for one.
    Statistics and sizes are in its folder."""
    kind, options = policy_class(config.policy), of_former_name(config.policy_options)
    kept = {kind.precision_option} if is_new(config.policy) else options.keys() - {"unnorm_key"}
    options = {name: value for name, value in options.items() if name in kept} | {"device": config.device}
    return (
        load_policy(run / POLICY, **options)
        if config.recap.threshold
        else kind.from_pretrained(run / POLICY, **options)
    )


Watch = Callable[[int, dict[str, float]], None]
"""Called with each record of metrics: the step, and the values"""


def train(
    config: Sft,
    run: Path,
    *,
    notify: Callable[[str], None] = lambda text: None,
    watch: Watch = lambda step, values: None,
    stop: Callable[[], bool] = lambda: False,
    report: Report = silent,
) -> SftSummary:
    """Records, learns, and writes ``run/policy``. After a stop of any kind, the same call continues.

    `notify` is called with each line of text for the user, `report` with the
    progress of each phase (`hilt.core.progress`).
    """
    config.check()
    if config.recap.rounds:
        raise ConfigError("recap.rounds: hilt.vla.recap.recap_rounds.train trains such a run, not this function.")
    with contextlib.ExitStack() as stack:
        stack.enter_context(checkpoint.taken_back(run, "tasks", "data", "best"))
        stack.enter_context(checkpoint.alone(run, "is being trained already"))
        stack.enter_context(failure_noted(run))
        report(f"loading the policy {config.policy}")
        # its errors are raised before anything is recorded
        policy = None if is_new(config.policy) else open_first(config)
        paths = [local(path) for path in config.data]
        for task in config.tasks if config.demonstrations else []:
            folder = demonstrations_of(run, task)
            wanted = Settings(task, config.task_options, config.demonstrations, seed=config.seed)
            make_task = partial(open_task, task, config.task_options)
            record_with_script(wanted, folder, make_task, config.demonstration_options, notify, stop, report)
            paths.append(folder / "log")
        if stop():
            return _stopped_early(run, notify)
        good_only = config.successes_only and not config.recap.threshold
        chosen = [config.where] * len(config.data)
        given = (words(config), config.instruction, good_only, notify, report, chosen, run)
        lessons = Demonstrations(paths, run / "data", *given)
        stack.callback(lessons.close)
        if config.recap.threshold:
            lessons.labels = advantage_labels(lessons, config.recap.threshold, notify)
        metrics = stack.enter_context(Metrics(run, config.sinks))
        report("making the policy, its statistics and its optimizer")
        note_end(run)
        training = Training(config, run, policy, lessons, metrics, notify, watch, report)
        done = training.run(stop)
        if done.reason in ("best", "max_steps") and not done.best_step:
            raise training.guard.nothing_kept(done.step)
        alarm = training.guard.alarm if done.reason == "alarm" else ""
        note_end(run, done.reason, done.step, alarm or f"{done.reason}, after {done.step:,} steps")
        if alarm:
            raise stopped(alarm, run, "hilt train sft")
        return done


def _stopped_early(run: Path, notify: Callable[[str], None]) -> SftSummary:
    """Returns the summary of a run that was stopped before it went on: how far it is, as its checkpoint tells."""
    saved = checkpoint.latest(run, notify)
    if saved is None:
        return SftSummary("stopped", 0, 0, math.nan, 0.0)
    loss = saved.state["best"] if saved.state["best"] is not None else math.nan
    return SftSummary(
        "stopped", saved.update, int(saved.state["best_step"]), float(loss), float(saved.state["elapsed"])
    )


class Training:
    """One policy, its optimizer, and where they stand."""

    def __init__(
        self,
        config: Sft,
        run: Path,
        policy: Policy | None,
        lessons: Demonstrations,
        metrics: Metrics,
        notify: Callable[[str], None],
        watch: Watch,
        report: Report = silent,
    ):
        self._config, self._run, self._lessons, self._metrics = config, run, lessons, metrics
        self._notify, self._watch, self._report = notify, watch, report
        learned, held = lessons.split(config.validation, config.seed)
        self._rows, self._held = lessons.rows(learned), lessons.rows(held)
        notify(
            f"{len(self._rows):,} steps of {len(learned)} episodes to learn from, "
            f"{len(self._held):,} of {len(held)} held out"
        )
        self.policy = make_policy(config, policy, lessons, learned)
        if self.policy.action_dim != lessons.action_dim:
            raise ConfigError(
                f"the policy gives actions of {self.policy.action_dim} numbers, and the data has {lessons.action_dim}."
            )
        self._draws = generator(config.seed)
        self._horizon = int(getattr(self.policy, "horizon", self.policy.chunk))
        if config.lora.rank:
            from hilt.policies.io.lora import attach

            targets = config.lora.targets or "all-linear"
            attach(self.policy, config.lora.rank, config.lora.alpha, targets, seed=config.seed, dtype=torch.float32)
        self._trained = {name: p for name, p in self.policy.named_parameters() if p.requires_grad}
        self._fits()
        self._adam: Adam | None = None
        self.step, self._elapsed = 0, 0.0
        self._best, self._best_step, self._waited = math.inf, 0, 0
        self._last = math.nan
        if (saved := checkpoint.latest(run, notify)) is not None:
            self._load(saved)
        elif read_metrics(run, ["update"]):  # of a process that ended before its first checkpoint
            metrics.resumed(0)
        self.guard = SftGuard(config, run, metrics, notify)
        self._watched = rows_to_look_at(self._held, self._rows)

    def run(self, stop: Callable[[], bool]) -> SftSummary:
        config, began = self._config, time.monotonic() - self._elapsed
        drawn = batches(self._rows, config.batch_size, config.seed, self.step)
        values, measured = dict[str, float](), (time.monotonic(), self._samples())
        reason = self._over()
        while not reason and not stop():
            values = self._learn(next(drawn))
            self.step += 1
            self._report("training", self.step, config.max_steps, f"loss {values['loss']:.4f}")
            reason = self._over()
            if self.step % config.log_period == 0 or reason:
                now = time.monotonic()
                values["samples_per_second"] = (self._samples() - measured[1]) / (now - measured[0])
                measured = now, self._samples()
                self._tell({**values, **self.guard.figures(), **self._look()})
            if len(self._held) and (self.step % config.validation_period == 0 or reason):
                self._tell(self._validate())
                reason = reason or self._over()
            reason = "alarm" if self.guard.alarm else reason
            self._elapsed = time.monotonic() - began
            if self.step % (config.checkpoint_period or config.validation_period) == 0 and self.guard.is_sound:
                self._save()
        if not len(self._held):
            self._keep(self._last)
        self._save()
        done = SftSummary(reason or "stopped", self.step, self._best_step, self._best, self._elapsed)
        if self._best_step:
            self._report("writing the policy")
            self._finish()
            write_json(self._run / RESULT, asdict(done))
        return done

    def _fits(self) -> None:
        """Refuses before the first step what would run out of memory at it; what a
        pass needs besides is not counted."""
        need = sum(3 * p.numel() * p.element_size() for p in self._trained.values())
        free = free_bytes(self.policy.device)
        if need > free:
            raise ConfigError(
                f"gradients and optimizer need {need / 1e9:.1f} GB on {self.policy.device}, which has "
                f"{free / 1e9:.1f} GB free: train adapters (lora.rank=32), or on another device."
            )

    def _over(self) -> str:
        if len(self._held) and self._waited >= self._config.patience:
            return "best"
        return "max_steps" if self.step >= self._config.max_steps else ""

    def _learn(self, rows: np.ndarray) -> dict[str, float]:
        """One gradient step. Parts of a batch count by the actions in them, so that
        they add up to the loss of the whole."""
        self.policy.train()
        rate = learning_rate(self._config, self.step)
        total, figures = 0.0, dict[str, float]()
        everything: tuple[Any, ...] = self._lessons.batch(rows, self._horizon)
        at_once = self._config.samples_at_once or len(rows)
        for first in range(0, len(rows), at_once):
            observations, actions, mask = (part[first : first + at_once] for part in everything)
            share = float(mask.sum() / everything[2].sum())
            loss, shown = self.policy.supervised_loss(observations, actions, mask, generator=self._draws)
            (loss * share).backward()
            total += float(loss.detach()) * share
            for name, value in shown.items():
                figures[name] = figures.get(name, 0.0) + float(value) * share
        shown_anyway = {"loss": total, "learning_rate": rate, **figures}
        if not math.isfinite(total):
            return self._left_out("loss", total, shown_anyway)
        if self._adam is None:  # heads that imitation does not use have no gradient, and are left alone
            self._trained = {name: p for name, p in self._trained.items() if p.grad is not None}
            self._adam = Adam(self._trained.values(), rate, self._config.weight_decay)
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._trained.values()]
        length = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in gradients])))
        if not math.isfinite(length):
            return self._left_out("norm of the gradient", length, shown_anyway)
        if self._config.gradient_clip and length > self._config.gradient_clip:
            torch._foreach_mul_(gradients, self._config.gradient_clip / length)
        self._adam.learning_rate = rate
        self._adam.step(gradients)
        self._forget_gradients()
        self._last = total
        self.guard.learned()
        return {**shown_anyway, "gradient_norm": length}

    def _left_out(self, what: str, value: float, shown: dict[str, float]) -> dict[str, float]:
        """Leaves out a step whose loss or gradient is not finite, before any weight is changed by it."""
        self._forget_gradients()
        self.guard.left_out(self.step + 1, what, value)
        return shown

    def _forget_gradients(self) -> None:
        for parameter in self._trained.values():
            parameter.grad = None

    def _look(self) -> dict[str, float]:
        """Figures of whether the policy can still learn and how far it has moved, when they are due."""
        if not self.guard.is_due(self.step):
            return {}
        return self.guard.look(self.policy, *self._lessons.batch(self._watched, self._horizon))

    def _validate(self) -> dict[str, float]:
        """The loss of all that was held out, with the same draws every time; a new minimum is kept."""
        self.policy.eval()
        draws, sums, weight = generator(self._config.seed + 1), dict[str, float](), 0.0
        at_once = self._config.samples_at_once or self._config.batch_size
        for first in range(0, len(self._held), at_once):
            self._report(f"validating after step {self.step}, samples", first, len(self._held))
            observations, actions, mask = self._lessons.batch(self._held[first : first + at_once], self._horizon)
            with torch.no_grad():
                loss, shown = self.policy.supervised_loss(observations, actions, mask, generator=draws)
            for name, value in {"loss": float(loss), **shown}.items():
                sums[name] = sums.get(name, 0.0) + float(value) * float(mask.sum())
            weight += float(mask.sum())
        values = {f"validation_{name}": value / weight for name, value in sums.items()}
        self._waited += 1
        if values["validation_loss"] < self._best:
            self._keep(values["validation_loss"])
        return {**values, "best_step": self._best_step}

    def _tell(self, values: Mapping[str, float]) -> None:
        self._metrics.write("update", dict(values), update=self.step, step=self._samples())
        self._watch(self.step, dict(values))
        self.guard.take(values, self.step, self._samples())

    def _samples(self) -> int:
        """That it has learned from so far."""
        return self.step * min(self._config.batch_size, len(self._rows))

    # What is kept

    def _keep(self, loss: float) -> None:
        from hilt.policies.io.tensor_files import write_tensors

        self._best, self._best_step, self._waited = loss, self.step, 0
        folder = self._run / "best" / str(self.step)
        DISK.remove(folder)  # of a process that was killed before it recorded it
        DISK.make_folders(folder.parent)
        with new_folder(folder) as beside:
            write_tensors(beside, {name: p.detach() for name, p in self._trained.items()})

    def _save(self) -> None:
        tree = {"trained": {name: p.detach().cpu() for name, p in self._trained.items()}}
        if self._adam is not None:
            tree["adam"] = {name: tensor.cpu() for name, tensor in self._adam.tensors().items()}
        numbers = {"best": self._best, "last": self._last, "elapsed": self._elapsed}
        state = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        state |= {"best_step": self._best_step, "waited": self._waited}
        everything = {**state, "draws": checkpoint.generator_state(self._draws)}
        checkpoint.save(self._run, self.step, tree, everything, keep=1, alarm=self.guard.alarm_since)
        for old in (self._run / "best").glob("*"):
            if old.name != str(self._best_step):
                DISK.remove(old)

    def _load(self, saved: checkpoint.Checkpoint) -> None:
        self.step, state = saved.update, saved.state
        self._trained = {name: self._trained[name] for name in saved.agent["trained"]}
        with torch.no_grad():
            for name, tensor in saved.agent["trained"].items():
                self._trained[name].copy_(tensor)
            if "adam" in saved.agent:
                self._adam = Adam(self._trained.values(), 0.0, self._config.weight_decay)
                for name, tensor in self._adam.tensors().items():
                    tensor.copy_(saved.agent["adam"][name])
        self._best_step, self._waited, self._elapsed = (
            int(state["best_step"]),
            int(state["waited"]),
            float(state["elapsed"]),
        )
        self._best, self._last = (math.inf if state[name] is None else float(state[name]) for name in ("best", "last"))
        checkpoint.set_generator_state(self._draws, state["draws"])
        self._metrics.resumed(self.step, self._samples())

    def _finish(self) -> None:
        """The policy as it was at its best becomes a whole checkpoint. It is of no use for training after that."""
        from hilt.policies.io.tensor_files import Tensors

        kept = Tensors(self._run / "best" / str(self._best_step))
        for name, parameter in self._trained.items():
            kept.read(name, parameter)
        if self._config.lora.rank:
            from hilt.policies.io import lora

            DISK.remove(self._run / "adapter")
            lora.save_adapter(self.policy, self._run / "adapter")
            lora.merge(self.policy)
        with replacing(self._run / POLICY, sole_writer=True) as made:
            self.policy.save_pretrained(made)


def open_to_train(folder: str, device: str, options: Mapping[str, Any], dtype: str | None, lora: Lora) -> Policy:
    """The policy of a folder, in float32 unless a `dtype` is given, which only adapters can be trained on."""
    policy: Policy = load_policy(folder, device=device, **options)
    if dtype is None:  # whatever the files have: small steps are lost in 8 bits
        policy.float()
    elif not lora.rank and any(p.dtype != torch.float32 for p in policy.parameters()):
        raise ConfigError(
            f"policy_options.dtype={dtype}: weights that are trained are float32. Leave it out "
            "(policy_options.compute=bfloat16 is for products), or train adapters (lora.rank=32)."
        )
    return policy


def open_first(config: Sft) -> Policy:
    """The policy of a folder, as a run begins with it, but for the statistics of its data."""
    dtype = config.policy_options.get("dtype")
    policy = open_to_train(config.policy, config.device, options_of(config), dtype, config.lora)
    if config.statistics == "data" and not hasattr(policy, "use_statistics"):
        raise ConfigError(
            f"statistics=data: {config.policy} is a {type(policy).__name__}, which keeps its own; leave statistics out."
        )
    return policy


def make_policy(config: Sft, policy: Policy | None, lessons: Demonstrations, episodes: Sequence[int]) -> Policy:
    """The policy that learns: the one that was opened, with the statistics of the
    data if it is to have them; or a new one."""
    if policy is None:
        new: Policy = _new(config, lessons, episodes).to(config.device)
        return config.recap.conditioned(new)
    if config.statistics == "data":
        states, actions = lessons.numbers(episodes)
        policy.use_statistics(
            {"action": statistics(actions)} | ({"proprio": statistics(states)} if states.size else {}), "data"
        )
    return config.recap.conditioned(policy)


def _new(config: Sft, lessons: Demonstrations, episodes: Sequence[int]) -> Any:
    row, (states, actions) = lessons.batch(lessons.rows(episodes[:1])[:1], 1)[0][0], lessons.numbers(episodes)
    sizes = policy_sizes(row, states.shape[1], lessons.action_dim)
    policy = new_policy(config.policy, sizes, options_of(config), config.seed)
    policy.fit(states, actions)
    return policy


__all__ = [
    "Lora",
    "Sft",
    "SftSummary",
    "Training",
    "begin_run",
    "learning_rate",
    "make_policy",
    "resume_run",
    "train",
]
