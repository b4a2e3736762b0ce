"""Learning: the recipe tabletop_pick as ``hilt train`` runs it; with other operators and with none; beside HG-DAgger
and Stable-Baselines3's SAC with the same demonstrations, the same minutes and the same updates; beside imitation, an
operator who does everything, and learning without demonstrations; and how its processes spend their time."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench import learn_methods, learn_state, learn_switch, learn_tasks
from bench.lab import Group, Lab, remove
from bench.report import Row, Target, at_least, at_most, below
from bench.sides import ROOT, Side
from bench.timing import Rates
from hilt.policies.precision import choose

RECIPE = "tabletop_pick"
SB3 = sys.executable
"""The Python that has it"""
VARIANTS: dict[str, dict[str, Any]] = {
    "learning rate 3e-4": {"learning_rate": 3e-4},
    "learning rate 1e-3": {"learning_rate": 1e-3},
    "shared encoder, random shift": {"learning_rate": 1e-3, "shared": True, "shift": 4},
    "its own settings, shared encoder, random shift": {"learning_rate": 3e-4, "shared": True, "shift": 4, "own": True},
}
"""Of SB3's SAC; the best one counts, seed by seed. The first three have our
discount, tau, temperature, batch and updates a step"""
EQUAL_SECONDS = 1800.0
"""A run of ours that makes as many updates as SB3 made ends after this time at the latest"""
STATES, SEEDS, MINUTES = 100, 5, 5.0
"""The full size: test states of an evaluation, seeds, and minutes of learning of each"""
HZ = 20.0
LEARNER_SECONDS = (60, 4)
"""Of each way in which a learner's time is looked at; and with --quick"""
QUICK = [
    "task_options.image_size=32",
    "demonstrations=3",
    "agent.encoder.pretrain_updates=20",
    "training_starts=50",
    "log_period=1",
]
"""What --quick makes smaller besides"""


OTHERS = {
    "hg_dagger": (
        ["algorithm=hg-dagger"],
        "HG-DAgger: it imitates demonstrations and take-overs, with the same operator",
    ),
    "without_operator": (["operator=''"], "ours with the demonstrations, and nobody who takes over"),
    "delayed_operator": (
        ["operator_options.delay=5", "operator_options.noise=0.5"],
        (
            "ours with an operator who reacts half a second (5 steps) late, with noise of half a full "
            "deflection on every motion"
        ),
    ),
    "tired_operator": (
        ["operator_options.tires_after=500"],
        "ours with an operator who takes over for 500 steps in all, and then watches",
    ),
}
"""The same run in other hands: what is set besides, and what that is"""


def pick(lab: Lab) -> list[Row]:
    """Our runs first, then Stable-Baselines3, which needs the demonstrations, the time and the updates of ours. The
    result of each run is a JSON object, so that it can be kept."""
    seeds, minutes = range(lab.seeds), f"{lab.minutes:g}min"
    named = {"bare": WITHOUT, **{name: words for name, (words, _) in OTHERS.items()}}
    absent: dict[str, str] = {}

    def ours(name: str, seed: int) -> dict[str, Any]:
        """One of ours; of the first kind, what it is compared with besides."""
        kept = f"pick_{name}-{minutes}-{seed}"
        return lab.once(
            kept, lambda: our_run(lab, kept, seed) if name == "ours" else other_run(lab, name, named[name], seed)
        )

    def peer(variant: str, seed: int) -> dict[str, Any] | None:
        """For as long as ours took. One that could not be made is not kept."""
        name = f"pick_sb3-{list(VARIANTS).index(variant)}-{minutes}-{seed}"
        try:
            return lab.once(
                name, lambda: peer_run(lab, variant, lab.kept(f"pick_ours-{minutes}-{seed}"), made[seed], seed)
            )
        except (OSError, RuntimeError) as error:
            absent["Stable-Baselines3"] = f"{str(error).strip().splitlines()[-1]}; make bench ARGS=learn installs it"
            return None

    jobs = [partial(ours, name, seed) for name in ("ours", *named) for seed in seeds]
    done = lab.side_by_side(lambda job: job(), jobs)
    made = done[: lab.seeds]
    found = {name: [Trial(one[name]) for one in made] for name in ("ours", "bc", "operator")}
    facts: dict[str, list[Any]] = {"ours": [Made(*one["made"]) for one in made]}
    for number, name in enumerate(named, start=1):
        runs = done[number * lab.seeds : (number + 1) * lab.seeds]
        found[name], facts[name] = [Trial(one["trial"]) for one in runs], [Made(*one["made"]) for one in runs]
    pairs = [(variant, seed) for variant in VARIANTS for seed in seeds]
    told: dict[str, list[Made]] = {}
    for (variant, _), tried in zip(pairs, lab.side_by_side(lambda job: peer(*job), pairs), strict=True):
        if tried:
            name = f"SB3 {tried['version']} SAC, {variant}"
            found.setdefault(name, []).append(Trial(tried["trial"]))
            told.setdefault(name, []).append(Made(*tried["made"]))
    if told:
        best = max(told, key=lambda name: float(np.mean([trial.percent for trial in found[name]])))
        limits = [one.updates for one in told[best]]
        again = lab.side_by_side(
            lambda seed: lab.once(f"pick_equal-{minutes}-{seed}", lambda: equal_run(lab, limits[seed], seed)),
            range(len(limits)),
        )
        found[EQUAL], facts[EQUAL] = ([Trial(one["trial"]) for one in again], [Made(*one["made"]) for one in again])
    lanes = [f"each run on {lab.cores} cores of its own, others beside it"] if lab.cores else []
    person = [
        f"seed {seed}: person {100 * one['person']:.1f}% of the last steps, {one['took']:.0f} s in all"
        for seed, one in enumerate(made)
    ]
    demos = float(np.mean([one["demonstrated"] for one in made]))
    return pick_rows(lab, found, absent, "; ".join([*lanes, *person]), demos, {**facts, **told})


def our_run(lab: Lab, kept: str, seed: int) -> dict[str, Any]:
    """The recipe, imitation alone, and the operator alone. The settings and
    demonstrations stay, which Stable-Baselines3 needs."""
    states, seconds = lab.pick(STATES, 2), 60 * lab.minutes
    lab.progress(f"pick: seed {seed} of {lab.seeds}, ours for {seconds:g} s")
    run, place = lab.new(f"ours-{seed}"), lab.kept(kept)
    took = train(run, [f"seed={seed}", *lab.pick_words(QUICK)], seconds)
    with Side("bench.learn_sides", "operator") as side:
        operator = side.ask("alone", timeout=1200, run=str(run), states=states)
    ratio, steps = updates_per_step(run)
    result = {
        "ours": evaluated(run, states).steps,
        "bc": evaluated(run, states, checkpoint=0).steps,
        "operator": operator,
        "took": min(took, seconds) if lab.quick else took,
        "made": made_by(run),
        "updates_per_step": ratio,
        "steps": steps,
        "person": interventions(run),
        "demonstrated": demonstrated_steps(run),
    }
    remove(place)
    shutil.copytree(run / "demos", place / "demos")
    shutil.copy(run / "config.yaml", place)
    remove(run)
    return result


def other_run(lab: Lab, name: str, words: list[str], seed: int) -> dict[str, Any]:
    seconds = 60 * lab.minutes
    lab.progress(f"pick: seed {seed} of {lab.seeds}, {name} for {seconds:g} s")
    run = lab.new(f"{name}-{seed}")
    smaller = [word for word in lab.pick_words(QUICK) if name != "hg_dagger" or not word.startswith("training_starts")]
    train(run, [f"seed={seed}", *smaller, *words], seconds)
    result = {"trial": evaluated(run, lab.pick(STATES, 2)).steps, "made": made_by(run)}
    remove(run)
    return result


def peer_run(lab: Lab, variant: str, run: Path, made: dict[str, Any], seed: int) -> dict[str, Any]:
    """Stable-Baselines3 with the settings, demonstrations and time of a run of ours."""
    ratio, took = made["updates_per_step"], made["took"]
    lab.progress(f"pick: seed {seed} of {lab.seeds}, Stable-Baselines3, {variant}, for {took:.0f} s")
    return sb3(run, VARIANTS[variant], ratio, seed, lab.pick(STATES, 2), took)


EQUAL = "equal updates"


def equal_run(lab: Lab, updates: int, seed: int) -> dict[str, Any]:
    """Ours once more, which ends after as many critic updates as Stable-Baselines3 made."""
    from hilt.recipes import recipe

    lab.progress(f"pick: seed {seed} of {lab.seeds}, ours for {updates:,} updates")
    run = lab.new(f"equal-{seed}")
    ends = f"max_steps={updates // recipe(RECIPE).cta_ratio}"
    train(run, [f"seed={seed}", *lab.pick_words(QUICK), ends], EQUAL_SECONDS)
    result = {"trial": evaluated(run, lab.pick(STATES, 2)).steps, "made": made_by(run)}
    remove(run)
    return result


class Made(NamedTuple):
    """The work of a run: environment steps, updates of the critics (or of
    imitation), and steps on which the operator acted."""

    steps: int
    updates: int
    operator: int

    def __str__(self) -> str:
        return f"{self.steps:,} steps, {self.updates:,} updates" + f", {self.operator:,} steps by the operator" * bool(
            self.operator
        )


def made_by(run: Path) -> Made:
    from hilt.core.config import thaw
    from hilt.hil.config import Hil
    from hilt.observe.metrics import read_metrics

    config, last = thaw(Hil, run / "config.yaml"), read_metrics(run)[-1]
    updates = last["update"] * (config.cta_ratio if config.algorithm == "rlpd" else 1)
    return Made(last["step"], updates, sum(int(episode["intervention_steps"]) for episode in metrics(run, "episode")))


TRAINED = ["agent.encoder.training=critic", "agent.encoder.pretrain_updates=0", "agent.encoder.pretrain_predict=''"]
"""The encoder is trained by the critic from the start"""
WITHOUT = [
    *TRAINED,
    "demonstrations=0",
    "operator=''",
    "agent.rlpd.critic_warmup=0",
    "agent.normalize_proprio=false",
    "random_steps=500",
]
"""Nobody shows anything, so nothing can be pretrained, imitated or normalized either"""


class Trial:
    """Of an evaluation: the steps that each state took to success, 0 where there was none."""

    def __init__(self, steps: list[int]):
        self.steps = steps

    @property
    def percent(self) -> float:
        return 100 * float(np.mean(np.array(self.steps) > 0))

    def __str__(self) -> str:
        from hilt.observe.statistics import wilson

        low, high = wilson(sum(s > 0 for s in self.steps), len(self.steps))
        return f"{self.percent:.0f}% ({100 * low:.0f}-{100 * high:.0f})"


def pick_rows(
    lab: Lab,
    found: dict[str, list[Trial]],
    absent: dict[str, str],
    facts: str,
    demo_steps: float,
    made: dict[str, list[Any]],
) -> list[Row]:
    peers = {name: trials for name, trials in found.items() if name.startswith("SB3") and len(trials) == lab.seeds}
    best = [max(trials[seed].percent for trials in peers.values()) for seed in range(lab.seeds)] if peers else []
    rates = {name: float(np.mean([trial.percent for trial in trials])) for name, trials in peers.items()}
    ours = [trial.percent for trial in found["ours"]]
    steps = [float(np.mean([s for s in trial.steps if s])) for trial in found["ours"] if trial.percent]
    sizes = [lab.size(len(found["ours"][0].steps), STATES, "states"), lab.size(lab.seeds, SEEDS, "seeds")]
    sizes += [f"{lab.minutes:g} minutes instead of {MINUTES:g}"] if lab.minutes != MINUTES else []
    size = ", ".join(part for part in sizes if part)
    common: dict[str, Any] = {"unit": "%", "size": size}
    task = f"of {len(found['ours'][0].steps)} test states, mean action, nobody takes over"

    def each(trials: list[Trial]) -> str:
        return "seeds 0.." + f"{len(trials) - 1}: " + ", ".join(map(str, trials))

    def did(name: str) -> str:
        return "; ".join(map(str, made.get(name, [])))

    def row(name: str, key: str, what: str, **more: Any) -> Row:
        rates = Rates([trial.percent for trial in found[key]])
        more["note"] = "; ".join(part for part in (each(found[key]), did(key), more.get("note", "")) if part)
        return Row(name, float(np.mean(rates.rounds)), what=what, spread=rates.spread, **{**common, **more})

    return [
        row(
            "pick_success",
            "ours",
            f"success of the last checkpoint of `hilt train {RECIPE}` {task}, {lab.minutes:g} "
            "minutes from the first step",
            targets=[at_least(95)],
            note=facts,
        ),
        Row(
            name="pick_margin",
            ours=min(a - b for a, b in zip(ours, best, strict=True)) if best else None,
            what="how far it is above Stable-Baselines3's SAC after the same time, in the seed where it is "
            "least; its best variant counts",
            targets=[at_least(1)],
            absent=absent,
            **{**common, "unit": "points"},
        ),
        Row(
            name="pick_steps",
            ours=max(steps) if len(steps) == lab.seeds else None,
            spread=(min(steps), max(steps)) if steps else None,
            what="steps per success of the last checkpoint, the slowest seed",
            targets=[Target("limit", "<", 1.0)],
            limit=demo_steps,
            limit_name="steps of a demonstration",
            **{**common, "unit": "steps"},
        ),
        row(
            "pick_bc",
            "bc",
            f"imitation of the same demonstrations: the checkpoint before any update, {task}",
            targets=[below(70)],
        ),
        Row(
            name="pick_sb3",
            ours=None,
            what=f"Stable-Baselines3's SAC {task}: the same environment, demonstrations in its buffer, "
            "convolutions, widths, and all the time that our command took, start and demonstrations included; "
            "with our batch, discount and updates a step, or its own",
            peers=rates,
            absent=absent,
            note="; ".join(f"{name}: {each(trials)} ({did(name)})" for name, trials in peers.items()),
            **common,
        ),
        Row(
            name="pick_equal_updates",
            ours=float(np.mean([trial.percent for trial in found[EQUAL]])) if found.get(EQUAL) else None,
            what="ours after as many critic updates as the best variant of Stable-Baselines3 made in its time; "
            f"pretraining comes before them, {task}",
            peers=dict([max(rates.items(), key=lambda one: one[1])]) if rates else {},
            absent=absent,
            note=f"{each(found[EQUAL])} ({did(EQUAL)})" if found.get(EQUAL) else "",
            **common,
        ),
        Row(
            name="pick_operator_steps",
            ours=float(np.mean([one.operator for one in made["ours"]])),
            what="steps on which the operator of pick_success acted, in all; demonstrations besides",
            note="; ".join(f"{name}: {', '.join(f'{one.operator:,}' for one in made[name])}" for name in OTHERS),
            **{**common, "unit": "steps"},
        ),
        *(row(f"pick_{name}", name, f"{what}, {task}") for name, (_, what) in OTHERS.items()),
        row(
            "pick_without_demonstrations",
            "bare",
            f"ours without demonstrations and operator, the encoder trained by the critic, {task}",
        ),
        row(
            "pick_operator_alone",
            "operator",
            "the scripted operator beside a policy that stands still, taking over by its rule",
        ),
    ]


WAYS = {
    "learner_in_torch": (TRAINED, "the encoder trained by the critic"),
    "learner_in_torch_frozen": (
        [],
        "the encoder pretrained and frozen, what it makes of each frame kept, as the recipe has it",
    ),
}
"""Settings of a learner whose time is looked at, and what they mean"""
PRECISIONS = {"learner_updates": "float32", "learner_updates_bfloat16": "bfloat16"}
"""Of the encoder, which is frozen: an update does not use it, what it makes of new frames does"""


def learner(lab: Lab) -> list[Row]:
    """What a learner that may make as many updates as it can does with its time, and how many it makes."""
    return lab.side_by_side(
        lambda measure: measure(),
        [partial(in_torch, lab, name) for name in WAYS] + [partial(updates, lab, name) for name in PRECISIONS],
    )


def in_torch(lab: Lab, name: str) -> Row:
    options, what = WAYS[name]
    told = learned(lab, name, ["batch_size=256", *options])
    shares = Rates([100 * record["torch_share"] for record in told])
    means = {
        key: np.mean([100 * record[key] for record in told])
        for key in ("sample_wait_share", "wait_share", "other_share")
    }
    return Row(
        name=name,
        ours=float(np.mean(shares.rounds)),
        spread=shares.spread,
        unit="%",
        what=f"share of a learner's time in torch, batch 256, two cameras of 64 pixels, {what}, "
        "while an actor acts beside it",
        targets=[at_least(90)],
        size=lab.size(lab.pick(*LEARNER_SECONDS), LEARNER_SECONDS[0], "seconds"),
        note=f"waiting for batches {means['sample_wait_share']:.1f}%, for steps "
        f"{means['wait_share']:.1f}%, the rest (logging, weights, checkpoints) {means['other_share']:.1f}%; "
        f"{np.median([r['updates_per_second'] for r in told]):.0f} updates/s",
    )


def updates(lab: Lab, name: str) -> Row:
    """Where bfloat16 is emulated, it is not measured: pretraining alone would take hours."""
    precision, why = PRECISIONS[name], choose("auto")
    common: dict[str, Any] = {
        "name": name,
        "unit": "updates/s",
        "what": f"the same learner at the recipe's batch of 128, its encoder in {precision} and frozen",
    }
    if precision == "bfloat16" and why.precision != precision:
        return Row(ours=None, note=f"not measured: {why.why}", **common)
    rates = Rates(
        [record["updates_per_second"] for record in learned(lab, name, [f"agent.encoder.precision={precision}"])]
    )
    size = lab.size(lab.pick(*LEARNER_SECONDS), LEARNER_SECONDS[0], "seconds")
    return Row(ours=rates.median, spread=rates.spread, size=size, **common)


def learned(lab: Lab, name: str, options: list[str]) -> list[dict[str, Any]]:
    """What a learner tells of its updates, without the first quarter, which has what is slow only once."""
    seconds = lab.pick(*LEARNER_SECONDS)
    lab.progress(f"{name}: {seconds} s")
    run = lab.new(name)
    train(run, [*lab.pick_words(QUICK), "update_to_data=0", "log_period=5", *options], seconds)
    told = [record for record in metrics(run, "update") if "torch_share" in record]
    remove(run)
    assert told, "the learner has told nothing of itself"
    return told[len(told) // 4 :]


def control(lab: Lab) -> list[Row]:
    return lab.side_by_side(lateness, [lab])


def lateness(lab: Lab) -> Row:
    """An actor that keeps 20 Hz while the learner learns, and a loop that only sleeps, in the same minutes."""
    seconds = lab.pick(120, 5)
    lab.progress(f"control: {seconds} s")
    run = lab.new("control")
    with Side("bench.learn_sides", "sleep") as side:
        rate = [f"control_hz={HZ:g}", f"task_options.control_hz={HZ:g}"]
        words = ["batch_size=256", "update_to_data=0", "operator=''", "training_starts=20", *rate]
        process = started(run, [*lab.pick_words(QUICK), *words], seconds)
        try:
            wait_for_steps(run, process)
            idle = np.array(side.ask("watch", timeout=seconds + 60, hz=HZ, seconds=seconds))
        finally:
            ended(process, seconds)
    late = [record for record in metrics(run, "actor") if "lateness_p99_ms" in record][-1]
    remove(run)
    idle_p99 = float(np.percentile(idle, 99))
    return Row(
        name="control_lateness_p99",
        ours=late["lateness_p99_ms"] - idle_p99,
        unit="ms",
        what=f"99th percentile of how late the actor's loop at {HZ:g} Hz is while a learner makes as many "
        "updates as it can, beyond that of a loop that only sleeps, at the same time on the same machine",
        targets=[at_most(5)],
        size=lab.size(seconds, 120, "seconds"),
        note=f"the actor's {late['lateness_p99_ms']:.2f} ms, p50 {late['lateness_p50_ms']:.2f} ms, "
        f"{late['missed']:.0f} periods lost of {late['steps']:.0f}; the sleeping loop's {idle_p99:.2f} ms, p50 "
        f"{np.percentile(idle, 50):.2f} ms",
    )


# A run, as a user starts it


def started(run: Path, options: list[str], seconds: float) -> subprocess.Popen[str]:
    ports = ["wire.port=0", "wire.broadcast_port=0"]
    limits = [f"max_seconds={seconds}", "max_steps=1000000000", "goal.success=0"]  # both sides learn for the same time
    words = [sys.executable, "-m", "hilt", "train", RECIPE, *limits, *options, *ports, "--run", str(run)]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str], seconds: float) -> None:
    """Within what pretraining and the end may take besides; it fails as it failed."""
    try:
        said, _ = process.communicate(timeout=seconds + 600)
    except subprocess.TimeoutExpired:
        process.terminate()
        said, _ = process.communicate(timeout=60)
        raise RuntimeError(f"hilt train does not end:\n{said[-2000:]}") from None
    if process.returncode:
        raise RuntimeError(f"hilt train failed:\n{said[-4000:]}")


def train(run: Path, options: list[str], seconds: float) -> float:
    """Gives the seconds of the whole command."""
    start = time.monotonic()
    ended(started(run, options, seconds), seconds)
    return time.monotonic() - start


def wait_for_steps(run: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while not (run / "metrics.jsonl").exists() or not any(
        "lateness_p99_ms" in record for record in metrics(run, "actor")
    ):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the actor of {run} has not begun to act; see its logs/")
        time.sleep(0.5)


def evaluated(run: Path, states: int, checkpoint: int | None = None) -> Trial:
    out = run / "evaluation.json"
    which = [] if checkpoint is None else ["--checkpoint", str(checkpoint)]
    words = [
        sys.executable,
        "-m",
        "hilt",
        "eval",
        str(run),
        "--split",
        "test",
        "--episodes",
        str(states),
        "--json",
        str(out),
        *which,
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        raise RuntimeError(f"hilt eval failed:\n{(done.stdout + done.stderr)[-4000:]}")
    outcomes = json.loads(out.read_text())["outcomes"]
    remove(out)
    return Trial([one["steps"] if one["success"] else 0 for one in outcomes])


def sb3(run: Path, variant: dict[str, Any], ratio: float, seed: int, states: int, seconds: float) -> dict[str, Any]:
    """Its version, how it did in each state, steps and updates (as of `Made`), and seconds."""
    with Side("bench.learn_sides", "sb3", SB3) as side:
        about = side.ask("start", run=str(run), updates_per_step=ratio, seed=seed, **variant)
        made = side.ask("train", timeout=seconds + 300, seconds=seconds)
        trial = side.ask("evaluate", timeout=1200, states=states)
    return {
        "version": about["version"],
        "trial": trial,
        "made": Made(made["steps"], made["updates"], 0),
        "seconds": made["seconds"],
    }


# What a run tells


def metrics(run: Path, kind: str) -> list[dict[str, Any]]:
    from hilt.observe.metrics import read_metrics

    return [record for record in read_metrics(run) if record["kind"] == kind]


def updates_per_step(run: Path) -> tuple[float, int]:
    """(critic updates for each step of the environment, steps)"""
    from hilt.core.config import thaw
    from hilt.hil.config import Hil
    from hilt.observe.metrics import read_metrics

    last = read_metrics(run)[-1]
    return max(0.1, last["update"] * thaw(Hil, run / "config.yaml").cta_ratio / max(1, last["step"])), last["step"]


def interventions(run: Path) -> float:
    """The share of steps on which a person acted, in the last fifth of the episodes."""
    episodes = metrics(run, "episode")
    last = episodes[-max(1, len(episodes) // 5) :]
    return sum(e["intervention_steps"] for e in last) / max(1, sum(e["length"] for e in last))


def demonstrated_steps(run: Path) -> float:
    """The mean length of a demonstration."""
    from hilt.replay import Log

    with Log.open(run / "demos", "r") as log:
        return len(log) / max(1, len(log.trajectories()))


PICK = (
    *(
        "pick_success",
        "pick_margin",
        "pick_steps",
        "pick_bc",
        "pick_sb3",
        "pick_equal_updates",
        "pick_operator_steps",
    ),
    *(f"pick_{name}" for name in OTHERS),
    *("pick_without_demonstrations", "pick_operator_alone"),
)
GROUPS = {
    "pick": Group(PICK, pick),
    "learner": Group((*WAYS, *PRECISIONS), learner),
    "control": Group(("control_lateness_p99",), control),
    "tasks": Group(learn_tasks.ROWS, learn_tasks.tasks),
    "methods": Group(learn_methods.ROWS, learn_methods.methods),
    **learn_switch.GROUPS,
    **learn_state.GROUPS,
}
