"""What can be learned from demonstrations, an operator and a policy's own episodes in the same minutes: RLPD as its
recipes have it, with chunks and with a value model as dense reward; small actor-critics beside a frozen policy of
imitation; RECAP; the best of eight chunks; and imitation of the same episodes.

A run is one task, one method, one seed. Every run has the same demonstrations, those that `hilt record` makes of this
seed, and the clock runs from before they are recorded to the end of the last command: what is spent on imitation or on
a value model is missing from what follows. A command that would take longer is asked to end by Ctrl-C, as a user would
do. All have the same number of steps by the operator at most, besides the demonstrations: methods that learn while
acting are taken over from until that number is reached; those that imitate get whole episodes of the same operator,
and those that do both, as beside a frozen policy, half of them in each way. The 100 test states are tried once, at the
end, outside of the clock. Each command of a run is one of `hilt`'s, and is in the note of its row.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.lab import Lab, NotKeptError, remove
from bench.report import Row
from bench.sides import ROOT
from hilt.value.value_episodes import MIN_OF_EACH

TASKS = ("pick_red", "drawer", "push", "insert", "peg")
SEEDS, STATES, MINUTES = 3, 100, 20.0
"""The full size"""
OPERATOR_STEPS = (20_000, 150)
"""By the operator in a run at most, besides the demonstrations; and with --quick"""
DEMONSTRATIONS = (20, 10)
EPISODES = (60, 8)
"""Of the policy of imitation that are learned from; and with --quick"""
VALUE_STEPS = (300, 10)
NOISE = 0.15
"""Standard deviation on the operator's motions in episodes with noise, as a share of a full deflection"""
FAILING = (0.2, 0.5)
"""The same on what is executed, where about half of the episodes are to fail on `peg`; and with --quick nearly all"""
PLANNED = 0.85
"""Of the operator's steps, for methods that have nothing but such episodes, whose lengths differ much"""
TRAIN_STATES = "train_states=2000"
"""With which an operator's episodes, and the policy's, begin, instead of 50"""
RATE_HZ = 10.0
"""Control steps a second of a task whose recipe gives no other number"""
LITTLE_EXPLORED = (
    f"task_options.{TRAIN_STATES}",
    "agent.encoder.pretrain_crop=3",
    "collect_steps=0",
    "agent.initial_std=0.05",
    "agent.std_range=[0.0183,0.15]",
)
ENDLESS = 1_000_000_000
"""Updates of a run that ends by the clock"""
QUICK_UPDATES = 20
QUICK_RUN = ["training_starts=50", "log_period=1"]
QUICK_RLPD = ["agent.encoder.pretrain_updates=5", "agent.rlpd.critic_warmup=5", "collect_steps=0"]
POLICY = ["policy_options.width=96", "policy_options.depth=2", "policy_options.chunk=3", "policy_options.shift=2"]
"""The policy of imitation: 0.4M parameters, three actions at a time"""
QUICK_POLICY = ["policy_options.width=32", "policy_options.depth=1", "batch_size=8"]
QUICK_VALUE = ["hidden=32", "evaluate_every=5", "batch_size=32"]
END_S, MAX_S = 600.0, 3600.0
"""Seconds within which a command ends that is asked to; and that one may take which ends by itself"""


def call(words: Sequence[str], folder: Path, env: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Runs ``hilt WORDS`` in a folder. After this number of seconds it is asked to end, as by Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hilt", *words],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate(timeout=60)
            raise RuntimeError(f"hilt {words[0]} does not end within {END_S:g} s:\n{output[-2000:]}") from None
    return subprocess.CompletedProcess(list(words), process.returncode, output, "")


class Attempt:
    """One run: its folder, its clock, and what it has spent. Commands are started in the folder, so that their words
    are those that a user would type."""

    def __init__(self, lab: Lab, task: str, method: str, seed: int):
        from hilt.recipes import recipe

        self.lab, self.task, self.seed, self.recipe = lab, task, seed, recipe(f"tabletop_{task}")
        self.folder = lab.new(f"methods-{task}-{method}-{seed}")
        self.folder.mkdir(parents=True)
        self.image_size = lab.pick(64, 32)
        self.operator = lab.pick(*OPERATOR_STEPS)
        """Steps that the operator may still make"""
        self.operator_steps, self.demonstrated_steps = 0, 0
        self.updates: dict[str, int] = {}
        self.phases: dict[str, float] = {}
        self.commands: list[str] = []
        self.remarks: list[str] = []
        self._seconds, self._began = 60 * lab.minutes, time.monotonic()

    @property
    def left(self) -> float:
        """Seconds"""
        return max(0.0, self._seconds - (time.monotonic() - self._began))

    def until(self, share: float) -> float:
        """Seconds until this share of the clock is spent."""
        return self.left - (1 - share) * self._seconds

    def hilt(self, phase: str, *words: object, seconds: float | None = None, threads: int = 1) -> None:
        """One command. It is asked to end after these seconds, if some are given; with --quick it ends by itself."""
        given = [str(word) for word in words]
        if seconds is not None and seconds < 1 and not self.lab.quick:
            raise RuntimeError(
                f"no time is left for {phase}: {self.summary()}. Give more minutes, or look at what took so long"
            )
        self.commands.append(f"OMP_NUM_THREADS={threads} " * (threads > 1) + shlex.join(["hilt", *given]))
        places = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        env = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": str(threads)}
        begins, limit = time.monotonic(), MAX_S if seconds is None or self.lab.quick else seconds
        done = call(given, self.folder, env, limit)
        self.phases[phase] = round(self.phases.get(phase, 0.0) + time.monotonic() - begins, 1)
        asked = seconds is not None and not self.lab.quick
        if done.returncode not in ((0, 128 + signal.SIGINT) if asked else (0,)):
            raise RuntimeError(f"{self.commands[-1]} failed:\n{(done.stdout + (done.stderr or ''))[-4000:]}")

    def summary(self) -> str:
        return ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in self.phases.items())

    @property
    def cores(self) -> int:
        """Of this lane: threads of a command that is one process"""
        return len(os.sched_getaffinity(0))

    # What is recorded

    def demonstrations(self) -> str:
        """The recording that all methods begin with: slow and not exact, as the recipe of the task has it."""
        options = {**self.recipe.demonstration_options, "seed": self.seed}
        self._record("demonstrations", "demos", self.lab.pick(*DEMONSTRATIONS), self.seed, options)
        self.demonstrated_steps = self.steps_of("demos")
        return "demos"

    def episodes_of_operator(self, steps: int, kind: str = "") -> str:
        """Records whole episodes of the operator, of about `steps` steps in all; the first 40 show how long one is.
        With a kind they begin in many initial states, and are kept where they fail, too: each step shows what to do
        there. "noise": on the operator's motions, and the recording has them as they were executed; "disturb": on what
        is executed, and the recording has the operator's motions without it; "fail": so much that many episodes fail;
        "states": neither."""
        seed, first = 1000 + self.seed, self.lab.pick(40, 8 if kind == "fail" else 2)
        options = {"seed": seed, **({"noise": NOISE} if kind == "noise" else {})}
        keep = ["--keep", "all", "-o", TRAIN_STATES] if kind else []
        disturbed = {"disturb": NOISE, "fail": self.lab.pick(*FAILING)}
        keep += ["--disturb", f"{disturbed[kind]:g}"] if kind in disturbed else []
        self._record("operator", "operator", first, seed, options, *keep)
        wanted = int(steps * first / max(1, self.steps_of("operator")))
        if wanted > first:
            self._record("operator", "operator", wanted, seed, options, *keep)
        made = self.steps_of("operator")
        self.operator_steps, self.operator = self.operator_steps + made, max(0, self.operator - made)
        return "operator"

    def _record(self, phase: str, out: str, episodes: int, seed: int, options: dict[str, Any], *more: str) -> None:
        options = {"action_indices": self.recipe.agent.action_indices, **options}
        device = [word for name, value in options.items() for word in ("-d", f"{name}={json.dumps(value)}")]
        words = ["--device", "script", *device, "--seed", seed, "--episodes", episodes, "--no-video"]
        self.hilt(
            phase, "record", f"tabletop/{self.task}", *words, "--image-size", self.image_size, *more, "--out", out
        )

    def steps_of(self, recording: str) -> int:
        from hilt.replay import Log

        with Log.open(self.folder / recording / "log", "r") as log:
            return len(log)

    # What is trained

    def rlpd(self, phase: str, demos: Sequence[str], *words: str, share: float = 1.0, operator: int = 0) -> None:
        """A run of the recipe, until this share of the clock is spent, taken over from for `operator` steps at most."""
        smaller = [f"max_steps={QUICK_UPDATES}", f"task_options.image_size={self.image_size}", *QUICK_RUN, *QUICK_RLPD]
        self._with_operator(
            phase,
            f"tabletop_{self.task}",
            *("demonstrations=0", "demonstration_options={}", f"demo_path=[{','.join(demos)}]"),
            *(smaller if self.lab.quick else [f"max_steps={ENDLESS}"]),
            *words,
            share=share,
            operator=operator or self.operator,
        )

    def frozen(self, phase: str, demos: Sequence[str], *words: str) -> None:
        """A small actor-critic beside the policy of imitation, until the clock ends."""
        moves, hz = self.recipe.agent.action_indices, self.recipe.task_options.get("control_hz", RATE_HZ)
        ends = [f"max_steps={QUICK_UPDATES}", *QUICK_RUN] if self.lab.quick else [f"max_steps={ENDLESS}"]
        self._with_operator(
            phase,
            "frozen_vla",
            *(f"task=tabletop/{self.task}", f"task_options={{image_size: {self.image_size}, control_hz: {hz:g}}}"),
            *(f"agent.action_indices={moves}", f"agent.rlpd.target_entropy={-len(moves)}"),
            *("policy=imitation/policy", f"demo_path=[{','.join(demos)}]", *ends, *words),
            share=1.0,
            operator=self.operator,
        )

    def _with_operator(self, phase: str, recipe: str, *words: str, share: float, operator: int) -> None:
        from bench import learn  # which lists this group among its own

        self.hilt(
            phase,
            *("train", recipe, *words, f"seed={self.seed}", "goal.success=0", "max_seconds=0"),
            *(f"operator_options.tires_after={max(1, operator)}", "wire.port=0", "wire.broadcast_port=0"),
            *("--run", phase),
            seconds=self.until(share),
        )
        made = learn.made_by(self.folder / phase)
        self.updates[phase], self.operator_steps = made.updates, self.operator_steps + made.operator
        self.operator = max(0, self.operator - made.operator)

    def imitated(self, phase: str, data: Sequence[str], *words: str, share: float) -> None:
        """Fine-tuning until this share of the clock is spent; for the last quarter of the time the learning rate is a
        tenth."""
        seconds, quick = self.until(share), self.lab.quick
        begun = ["train", "sft", *data, f"tasks=[tabletop/{self.task}]", f"task_options.image_size={self.image_size}"]
        begun += [f"seed={self.seed}", "validation=0", "learning_rate=0.001", "warmup_steps=50", *words]
        begun += [f"max_steps={QUICK_UPDATES // 2 if quick else ENDLESS}", "--run", phase]
        self.hilt(phase, *begun, seconds=0.75 * seconds, threads=self.cores)
        resumed = ["train", "sft", "--run", phase, "--resume", "learning_rate=0.0001"]
        resumed += [f"max_steps={QUICK_UPDATES}"] if quick else []
        self.hilt(phase, *resumed, seconds=self.until(share), threads=self.cores)
        self.updates[phase] = int(json.loads((self.folder / phase / "result.json").read_text())["step"])

    def imitation(self, data: Sequence[str], share: float, head: str = "tokens") -> None:
        """The first policy of a vision-language-action model, of nothing but what was recorded."""
        smaller = QUICK_POLICY if self.lab.quick else []
        self.imitated("imitation", data, *POLICY, f"policy_options.head={head}", *smaller, share=share)

    def tried(self, run: str, number: int) -> tuple[str, int]:
        """Episodes of a policy in training states, with sampled actions: their log, and how many of them failed."""
        episodes, out = self.lab.pick(*EPISODES), self.folder / "tried.json"
        before = set(self.folder.glob(f"{run}/evaluations/*"))
        words = ["eval", run, "--split", "train", "--sample", "--seed", 1000 * number + self.seed]
        self.hilt("collection", *words, "--episodes", episodes, "--json", out.name)
        found = json.loads(out.read_text())
        remove(out)
        (made,) = set(self.folder.glob(f"{run}/evaluations/*")) - before
        return str(made.relative_to(self.folder) / "log"), episodes - int(found["successes"])

    def value(self, data: Sequence[str], *words: str, out: str) -> None:
        smaller = QUICK_VALUE if self.lab.quick else []
        given = [*data, f"steps={self.lab.pick(*VALUE_STEPS)}", f"seed={self.seed}", *words, *smaller]
        self.hilt("value", "train", "value", *given, "--out", out, threads=self.cores)

    def judged(self, run: str, *words: str) -> dict[str, Any]:
        """The outcome of each test state, outside of the clock; and what the run has spent."""
        seconds, out = time.monotonic() - self._began, self.folder / "tested.json"
        spent = dict(self.phases)
        states = self.lab.pick(STATES, 2)
        words = ("eval", run, "--split", "test", "--episodes", str(states), *words, "--json", out.name)
        self.hilt("test", *words)
        found = json.loads(out.read_text())["outcomes"]
        return {
            "outcomes": [bool(one["success"]) for one in found],
            "steps": [int(one["steps"]) for one in found],
            "seconds": round(seconds, 1),
            "phases": spent,
            "updates": self.updates,
            "operator": self.operator_steps,
            "demonstrated": self.demonstrated_steps,
            "commands": self.commands,
            "remarks": self.remarks,
        }


# The methods. Each makes a run, and returns what `Attempt.judged` tells of it.


def rlpd(attempt: Attempt, *words: str) -> dict[str, Any]:
    attempt.rlpd("rlpd", [attempt.demonstrations()], *words)
    return attempt.judged("rlpd")


def recorded(attempt: Attempt, share: float, kind: str = "") -> list[str]:
    """Demonstrations, and episodes for this share of the operator's steps; the rest is left for take-overs. `kind`: of
    `Attempt.episodes_of_operator`. What noise did to the arm is corrected in the next steps, so that such episodes show
    how to recover."""
    return [attempt.demonstrations(), attempt.episodes_of_operator(int(share * attempt.operator), kind)]


def episodes_first(attempt: Attempt) -> dict[str, Any]:
    """Nothing needs to be collected before the encoder is trained for good."""
    data = recorded(attempt, 0.5)
    attempt.rlpd(
        "rlpd", data, *([] if attempt.lab.quick else ["agent.encoder.pretrain_updates=3000"]), "collect_steps=0"
    )
    return attempt.judged("rlpd")


def noisy_episodes(attempt: Attempt) -> dict[str, Any]:
    """The policy explores little and goes on imitating, so as to keep what imitation has reached."""
    data = recorded(attempt, 0.75, "noise")
    pretrained = [] if attempt.lab.quick else ["agent.encoder.pretrain_updates=4000"]
    entropy = -1.8 * len(attempt.recipe.agent.action_indices)
    attempt.rlpd(
        "rlpd",
        data,
        *pretrained,
        *(*LITTLE_EXPLORED, "agent.encoder.kept_shifts=8", "agent.rlpd.discount=0.98"),
        *(f"agent.rlpd.target_entropy={entropy:g}", "agent.rlpd.imitation_weight=3"),
    )
    return attempt.judged("rlpd")


def noisy_imitation(attempt: Attempt, kind: str = "noise") -> dict[str, Any]:
    """Such episodes are imitated, by encoder and actor together, and nothing else is done: one update ends the run.
    Some of the operator's steps are left, as episodes may be longer than the first 40."""
    data = recorded(attempt, PLANNED, kind)
    pretrained = [] if attempt.lab.quick else ["agent.encoder.pretrain_updates=4000", "training_starts=200"]
    attempt.rlpd("imitation", data, *pretrained, *LITTLE_EXPLORED, "max_steps=1", operator=1)
    return attempt.judged("imitation")


def value_reward(attempt: Attempt) -> dict[str, Any]:
    """Episodes in which the operator is disturbed, for a fifth of the steps, show what can fail."""
    demos = attempt.demonstrations()
    episodes = attempt.episodes_of_operator(attempt.operator // 5, "fail")
    discount = f"discount={attempt.recipe.agent.rlpd.discount:g}"
    attempt.value([demos, episodes], "returns=discounted", discount, out="value")
    attempt.rlpd("rlpd", [demos], "value.model=value", "value.reward=1", "agent.rlpd.target_range=null")
    return attempt.judged("rlpd")


def frozen(attempt: Attempt, space: str, kind: str = "") -> dict[str, Any]:
    data = recorded(attempt, 0.5, kind)
    attempt.imitation(data, 0.4, head="flow" if space == "noise" else "tokens")
    attempt.frozen(space, data, f"agent.options.space={space}")
    return attempt.judged(space)


def sft(attempt: Attempt, kind: str = "", head: str = "tokens") -> dict[str, Any]:
    """Imitation once more, of the policy's own successes besides."""
    data = recorded(attempt, PLANNED if kind else 1.0, kind)
    attempt.imitation(data, 0.4, head)
    log, _ = attempt.tried("imitation", 1)
    attempt.imitated("sft", [*data, log], "policy=imitation/policy", share=1.0)
    return attempt.judged("sft")


def recap(attempt: Attempt, rounds: int, kind: str = "") -> dict[str, Any]:
    """Each round learns from all episodes so far, from the policy of imitation on."""
    data, run = recorded(attempt, PLANNED if kind else 1.0, kind), "imitation"
    attempt.imitation(data, 0.4)
    failures = 0
    for number in range(1, rounds + 1):
        log, failed = attempt.tried(run, number)
        failures += failed
        if failures < MIN_OF_EACH:
            attempt.remarks.append(ALL_GOOD)
            break
        data.append(log)
        attempt.value(data, out=f"value-{number}")
        run, share = f"recap-{number}", 0.4 + 0.6 * number / rounds
        attempt.imitated(run, data, "policy=imitation/policy", "recap.threshold=0.6", share=share)
    return attempt.judged(run)


def best_of(attempt: Attempt, count: int, kind: str = "") -> dict[str, Any]:
    data = recorded(attempt, PLANNED if kind else 1.0, kind)
    attempt.imitation(data, 0.8)
    log, failed = attempt.tried("imitation", 1)
    if failed < MIN_OF_EACH:
        attempt.remarks.append(ALL_GOOD)
        return attempt.judged("imitation")
    attempt.value([*data, log], "actions=3", out="verifier")
    return attempt.judged("imitation", "--best-of", str(count), "--verifier", "verifier")


ALL_GOOD = (
    f"fewer than {MIN_OF_EACH} sampled episodes failed, so that no value can be learned: the policy is kept as it was"
)


class Method(NamedTuple):
    """How a run is made, and what it is, in a line."""

    make: Callable[[Attempt], dict[str, Any]]
    what: str


METHODS = {
    "rlpd": Method(rlpd, "RLPD, the recipe of the task"),
    "q_chunking": Method(
        lambda attempt: rlpd(attempt, "agent.chunk=4", "n_step=1"), "the same with chunks of four actions"
    ),
    "strong_critics": Method(
        lambda attempt: rlpd(attempt, "agent.critic.head=hl_gauss", "agent.critic.network=simba"),
        "the same with critics of residual blocks that state a distribution",
    ),
    "episodes_first": Method(episodes_first, "RLPD that imitates whole episodes of the operator first"),
    "noisy_episodes": Method(
        noisy_episodes, "RLPD that imitates whole episodes of the operator with noise first, and explores little"
    ),
    "noisy_imitation": Method(noisy_imitation, "imitation of such episodes alone"),
    "disturbed_imitation": Method(
        partial(noisy_imitation, kind="disturb"), "the same, where the noise is not in the recording"
    ),
    "value_reward": Method(
        value_reward,
        "RLPD with the dense reward of a value model of episodes in which the operator was disturbed, and often failed",
    ),
    "residual": Method(partial(frozen, space="residual"), "a bounded correction of a frozen policy of imitation"),
    "edit": Method(partial(frozen, space="edit"), "an actor that begins at the actions of such a policy"),
    "noise": Method(partial(frozen, space="noise"), "the noise of the flow of a frozen policy of imitation"),
    "recap_1": Method(partial(recap, rounds=1), "RECAP, one round"),
    "recap_3": Method(partial(recap, rounds=3), "RECAP, three rounds"),
    "best_of_8": Method(partial(best_of, count=8), "a policy of imitation, the best of eight chunks by a value model"),
    "sft": Method(sft, "imitation of what was recorded, and then of the policy's own successes besides"),
    "flow_sft": Method(partial(sft, head="flow"), "the same by a policy with a flow, as `noise` has it"),
    "varied_sft": Method(partial(sft, kind="states"), "`sft` of episodes from 2,000 initial states instead of 50"),
    "disturbed_sft": Method(partial(sft, kind="disturb"), "the same of such episodes that were disturbed"),
    **{
        f"disturbed_{name}": Method(partial(make, kind="disturb"), f"{name}, from such episodes")
        for name, make in {
            "residual": partial(frozen, space="residual"),
            "edit": partial(frozen, space="edit"),
            "noise": partial(frozen, space="noise"),
            "recap_1": partial(recap, rounds=1),
            "best_of_8": partial(best_of, count=8),
        }.items()
    },
}
REFERENCE = "rlpd"
ROWS = tuple(f"methods_{task}_{method}" for task in TASKS for method in METHODS)


# The table


def methods(lab: Lab) -> list[Row]:
    """The rows that are wanted. Those of the reference are read where they are kept, but not run for the sake of the
    others."""
    wanted = [
        (task, method) for task in TASKS for method in METHODS if lab.wants("methods", f"methods_{task}_{method}")
    ]
    if lab.quick and not lab.only:
        wanted = [pair for pair in wanted if pair[0] == TASKS[0]]
    jobs = [(task, method, seed) for seed in lab.seed_range for task, method in wanted]
    done = dict(zip(jobs, lab.side_by_side(lambda job: result(lab, *job), jobs), strict=True))
    for task, seed in {(task, seed) for task, _, seed in jobs if (task, REFERENCE, seed) not in done}:
        done[task, REFERENCE, seed] = lab.read(name_of(lab, task, REFERENCE, seed)) or {"error": "not run"}
    return [
        row(lab, task, method, *({s: done[task, one, s] for s in lab.seed_range} for one in (method, REFERENCE)))
        for task, method in wanted
    ]


def name_of(lab: Lab, task: str, method: str, seed: int) -> str:
    return f"methods_{task}_{method}-{lab.minutes:g}min-{seed}"


def result(lab: Lab, task: str, method: str, seed: int) -> dict[str, Any]:
    """Of one run. One that fails is not kept, and does not end the others."""
    from hilt.core.errors import HiltError

    try:
        return lab.once(name_of(lab, task, method, seed), partial(measured, lab, task, method, seed))
    except NotKeptError:
        return {"error": "not run"}
    except (OSError, RuntimeError, ValueError, LookupError, subprocess.SubprocessError, HiltError) as error:
        lab.progress(f"methods: {task}, {method}, seed {seed} failed: {error}")
        return {"error": f"failed: {str(error).strip().splitlines()[-1]}"}


def measured(lab: Lab, task: str, method: str, seed: int) -> dict[str, Any]:
    lab.progress(f"methods: {task}, {method}, seed {seed}")
    attempt = Attempt(lab, task, method, seed)
    made = METHODS[method].make(attempt)
    remove(attempt.folder)
    return made


def row(lab: Lab, task: str, method: str, runs: dict[int, Any], reference: dict[int, Any]) -> Row:
    """`runs`, `reference`: the result of each seed."""
    good = {seed: run for seed, run in runs.items() if "outcomes" in run}
    why = [f"seed {seed}: no result, {run['error']}" for seed, run in runs.items() if seed not in good]
    common: dict[str, Any] = {
        "name": f"methods_{task}_{method}",
        "unit": "%",
        "what": f"tabletop/{task}: {METHODS[method].what}; {lab.minutes:g} minutes, nobody takes over in the end",
    }
    if not good:
        return Row(ours=None, note="; ".join(why), **common)
    outcomes = np.array([run["outcomes"] for run in good.values()], float)
    size = [lab.size(len(good), SEEDS, "seeds"), lab.size(outcomes.shape[1], STATES, "states")]
    size += [f"{lab.minutes:g} minutes instead of {MINUTES:g}"] if lab.minutes != MINUTES else []
    share, low, high = interval(outcomes)
    each = ", ".join(f"{100 * one:.0f}" for one in outcomes.mean(1))
    note = [f"95% interval {100 * low:.0f} - {100 * high:.0f}; seeds {', '.join(map(str, good))}: {each}%"]
    if method != REFERENCE:
        note.append(difference(good, reference))
    note += [
        spent(list(good.values())),
        *why,
        *remarks(good),
        f"commands: {' && '.join(next(iter(good.values()))['commands'])}",
    ]
    rates = 100 * outcomes.mean(1)
    return Row(
        ours=100 * share,
        spread=(float(rates.min()), float(rates.max())),
        size=", ".join(part for part in size if part),
        note="; ".join(note),
        **common,
    )


def interval(outcomes: np.ndarray) -> tuple[float, float, float]:
    """The mean of [seeds, states] and its 95% interval: for other seeds and states; of one seed, for other states."""
    from hilt.observe.statistics import crossed, wilson

    if len(outcomes) > 1:
        return crossed(outcomes)
    return float(outcomes.mean()), *wilson(float(outcomes.sum()), outcomes.shape[1])


def difference(good: dict[int, Any], reference: dict[int, Any]) -> str:
    """Beside the reference, in the seeds and states that both have."""
    from hilt.observe.statistics import crossed, paired_difference

    seeds = [seed for seed in good if "outcomes" in reference.get(seed, {})]
    if not seeds:
        return f"{REFERENCE} has no result to compare with"
    ours, theirs = (np.array([runs[seed]["outcomes"] for seed in seeds], float) for runs in (good, reference))
    if len(seeds) > 1:
        gain, low, high = crossed(ours - theirs)
    else:
        gain, low, high = paired_difference(list(theirs[0] > 0), list(ours[0] > 0), range(ours.shape[1]))
    return f"{100 * gain:+.0f} points beside {REFERENCE} ({100 * low:+.0f} to {100 * high:+.0f}, {len(seeds)} seeds)"


def remarks(good: dict[int, Any]) -> list[str]:
    return [f"seed {seed}: {text}" for seed, run in good.items() for text in run["remarks"]]


def spent(runs: list[dict[str, Any]]) -> str:
    """Means over seeds"""

    def mean(name: str, key: str) -> float:
        return float(np.mean([run[name].get(key, 0) for run in runs]))

    phases = ", ".join(f"{phase} {mean('phases', phase):.0f}" for phase in runs[0]["phases"])
    updates = ", ".join(f"{phase} {mean('updates', phase):,.0f}" for phase in runs[0]["updates"])
    steps = (np.mean([run[name] for run in runs]) for name in ("operator", "demonstrated"))
    return (
        f"steps by the operator {next(steps):,.0f}, demonstrated {next(steps):,.0f}; updates: {updates}; "
        f"seconds: {phases}, {np.mean([run['seconds'] for run in runs]):.0f} in all"
    )
