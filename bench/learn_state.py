"""Meta-World with settings that nobody has tuned: `build(Hil(), {task, demonstrations})` on five tasks, by their state
and by images, beside Stable-Baselines3's SAC by state; and what one update of equal networks costs on both sides.

It needs Meta-World (docs/metaworld.md) and Stable-Baselines3, in this Python or in the one that HILT_METAWORLD names:

    HILT_METAWORLD=.venv-metaworld/bin/python python -m bench learn --only state --only images
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.lab import Group, Lab, remove
from bench.report import Row, at_least
from bench.sides import ROOT, Side, serve

PYTHON = os.environ.get("HILT_METAWORLD", "") or (sys.executable if importlib.util.find_spec("metaworld") else "")
TASKS = {
    "button": "metaworld/button-press-topdown",
    "window": "metaworld/window-open",
    "drawer": "metaworld/drawer-open",
    "door": "metaworld/door-open",
    "pick": "metaworld/pick-place",
    "pick_50": "metaworld/pick-place",
}
MORE_DEMONSTRATIONS = {"pick_50": 50}
"""One from each initial state of `train`, where the goal may be anywhere above the table"""
DEMONSTRATIONS, SECONDS, STATES, IMAGE_SIZE = 20, 240, 50, 64
NUMBERS, ACTIONS, BATCH, HIDDEN = 39, 4, 256, [256, 256]
"""Of the update that is timed: what Meta-World shows and takes, and the sizes of SB3's SAC"""


def recipe(name: str) -> Any:
    from hilt.core.config import build
    from hilt.hil.config import Hil

    return build(Hil(), {"task": TASKS[name], "demonstrations": demonstrations(name)})


def demonstrations(name: str) -> int:
    """Returns the number of demonstrations of a row."""
    return MORE_DEMONSTRATIONS.get(name, DEMONSTRATIONS)


button, window, drawer, door, pick, pick_50 = (partial(recipe, name) for name in TASKS)
"""For `hilt train bench.learn_state:button`"""


# Sides


class Updates:
    """One update of ours and one of SB3's SAC in turns, in one process with one thread: two critics and an actor of the
    same widths, the same batch. The processor's time is counted, which does not depend on who else runs."""

    def compare(self, rounds: int) -> dict[str, Any]:
        import stable_baselines3
        import torch
        from gymnasium.spaces import Box, Dict

        from hilt.policies.agent.agent import Agent
        from hilt.policies.agent.config import AgentConfig, EncoderConfig

        torch.set_num_threads(1)
        draw = np.random.default_rng(0)
        seen, moves = Box(-np.inf, np.inf, (NUMBERS,), np.float32), Box(-1.0, 1.0, (ACTIONS,), np.float32)
        peer = stable_baselines3.SAC(
            "MlpPolicy", _still(seen, moves), batch_size=BATCH, policy_kwargs={"net_arch": HIDDEN}, device="cpu"
        )
        for _ in range(2_000):
            now, then = (draw.normal(size=(1, NUMBERS)).astype(np.float32) for _ in range(2))
            action = draw.uniform(-1, 1, (1, ACTIONS)).astype(np.float32)
            peer.replay_buffer.add(now, then, action, np.zeros(1), np.zeros(1), [{}])
        peer._setup_learn(10**6)
        settings = AgentConfig(encoder=EncoderConfig(kind="none"), proprio_width=0, activation="relu", hidden=HIDDEN)
        agent = Agent.make(Dict({"state": seen}), moves, settings)
        batch = {
            **{
                key: {"state": draw.normal(size=(BATCH, NUMBERS)).astype(np.float32)}
                for key in ("observations", "next_observations")
            },
            "actions": draw.uniform(-1, 1, (BATCH, ACTIONS)).astype(np.float32),
            "rewards": np.zeros(BATCH, np.float32),
            "masks": np.ones(BATCH, np.float32),
        }
        spent: dict[str, list[float]] = {"ours": [], "sb3": []}
        for _ in range(rounds):
            for name, update in (("ours", lambda: agent.update(batch)), ("sb3", lambda: peer.train(1, BATCH))):
                before = time.process_time()
                update()
                spent[name].append(time.process_time() - before)
        return {
            "version": stable_baselines3.__version__,
            **{name: float(np.median(each)) for name, each in spent.items()},
        }


class Sac:
    """SB3's SAC with its own settings and the demonstrations of one of our runs in its buffer."""

    def learn(self, run: str, name: str, seconds: float, seed: int, states: int) -> dict[str, Any]:
        import gymnasium
        import stable_baselines3
        import torch
        from stable_baselines3.common.callbacks import BaseCallback

        from hilt.envs import make
        from hilt.replay import Log

        torch.set_num_threads(1)
        env = gymnasium.wrappers.FlattenObservation(make(TASKS[name]))
        model = stable_baselines3.SAC("MlpPolicy", env, seed=seed, device="cpu")
        with Log.open(f"{run}/demos", "r") as log:
            steps = log.read(
                log.all().keys(), ["observations", "next_observations", "actions", "rewards", "terminated"]
            )
        for t in range(len(steps["rewards"])):
            now, then = (steps[key]["state"][t][None] for key in ("observations", "next_observations"))
            over = np.array([bool(steps["terminated"][t])])
            model.replay_buffer.add(now, then, steps["actions"][t][None], steps["rewards"][t][None], over, [{}])

        class Clock(BaseCallback):  # type: ignore[misc]
            def _on_training_start(self) -> None:
                self.until = time.monotonic() + seconds

            def _on_step(self) -> bool:
                return time.monotonic() < self.until

        model.learn(10**9, callback=Clock(), log_interval=10**9)
        return {
            "successes": sum(_tried(env, model, state) for state in range(states)),
            "steps": model.num_timesteps,
            "updates": model._n_updates,
            "version": stable_baselines3.__version__,
        }


def _still(seen: Any, moves: Any) -> Any:
    """An environment of these spaces in which nothing happens."""
    import gymnasium

    class Still(gymnasium.Env):  # type: ignore[misc]
        observation_space, action_space = seen, moves

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(seen.shape, np.float32), {}

        def step(self, action: Any) -> Any:
            return np.zeros(seen.shape, np.float32), 0.0, False, False, {}

    return Still()


def _tried(env: Any, model: Any, state: int) -> bool:
    observed, info = env.reset(options={"split": "test", "state": state})
    over = False
    while not over:
        observed, _, terminated, truncated, info = env.step(model.predict(observed, deterministic=True)[0])
        over = terminated or truncated
    return bool(info["succeed"])


# Rows


def tasks(lab: Lab) -> list[Row]:
    return [success(lab, name) for name in TASKS if lab.wants("state", f"state_{name}")]


def images(lab: Lab) -> list[Row]:
    return [success(lab, name, "images") for name in TASKS if lab.wants("images", f"images_{name}")]


def updates(lab: Lab) -> list[Row]:
    lab.progress("state: updates")
    common: dict[str, Any] = {
        "name": "state_updates",
        "unit": "updates/s of a core",
        "what": "updates of all networks in a second of one core's time, ours and SB3's SAC in turns: batch "
        f"{BATCH}, two critics and an actor of {HIDDEN}, {NUMBERS} numbers seen, {ACTIONS} moved; "
        "ours has LayerNorm besides",
        "targets": [at_least(1, "peer")],
    }
    try:
        with Side("bench.learn_state", "updates", PYTHON or sys.executable) as side:
            found = side.ask("compare", timeout=600, rounds=lab.pick(300, 20))
    except RuntimeError as error:
        return [Row(ours=None, absent={"Stable-Baselines3": str(error).strip().splitlines()[-1]}, **common)]
    peers = {f"SB3 {found['version']} SAC": 1 / found["sb3"]}
    return [Row(ours=1 / found["ours"], peers=peers, size=lab.size(lab.pick(300, 20), 300, "rounds"), **common)]


def success(lab: Lab, name: str, seen: str = "state") -> Row:
    """`seen`: what ours observes, "state" or "images"; SB3's SAC has the state in both."""
    seconds, states = lab.pick(SECONDS, 10), lab.pick(STATES, 2)
    size = f"two cameras of {IMAGE_SIZE} pixels" if seen == "images" else "its state"
    common: dict[str, Any] = {
        "name": f"{seen}_{name}",
        "unit": "%",
        "what": f"success of `hilt train bench.learn_state:{name}` of {states} new states of {TASKS[name]}, by "
        f"{size}: no setting but the task and {demonstrations(name)} demonstrations of its script, {seconds} s from "
        "the first step; SB3's SAC by state with these in its buffer, its own settings, as long, and one thread",
        "targets": [at_least(90)],
        "size": ", ".join(
            part for part in (lab.size(seconds, SECONDS, "seconds"), lab.size(states, STATES, "states")) if part
        ),
    }
    try:
        if seen == "images":
            ours = lab.once(f"images_{name}", lambda: our_run(lab, name, seconds, states, seen))
        by_state = lab.once(f"state_{name}", lambda: our_run(lab, name, seconds, states))
        peer = lab.once(f"state_{name}-sb3", lambda: peer_run(lab, name, seconds, states))
    except LookupError as error:
        return Row(ours=None, absent={"Meta-World": str(error.args[0])}, **common)
    ours = ours if seen == "images" else by_state
    return Row(
        ours=100 * ours["successes"] / states,
        peers={f"SB3 {peer['version']} SAC": 100 * peer["successes"] / states},
        note=f"ours: {ours['updates']:,} updates, {ours['steps']:,} steps, {100 * ours['before'] / states:.0f}% "
        f"before the first update; SB3: {peer['updates']:,} updates, {peer['steps']:,} steps",
        **common,
    )


def our_run(lab: Lab, name: str, seconds: int, states: int, seen: str = "state") -> dict[str, Any]:
    """The demonstrations stay, which Stable-Baselines3 needs."""
    need_metaworld()
    lab.progress(f"{seen}: {name}, ours for {seconds} s")
    run, place = lab.new(f"run-{seen}-{name}"), lab.kept(f"{seen}_{name}")
    words = [
        f"max_seconds={seconds}",
        "max_steps=1000000000",
        "seed=0",
        "wire.port=0",
        "wire.broadcast_port=0",
        *([f"task_options.image_size={IMAGE_SIZE}", "task_options.quality=draft"] if seen == "images" else []),
        *(lab.pick_words(QUICK)),
    ]
    _hilt("train", f"bench.learn_state:{name}", *words, "--run", str(run), timeout=seconds + 1200)
    found = {}
    for when, checkpoint in (("after", []), ("before", ["--checkpoint", "0"])):
        out = run / f"{when}.json"
        _hilt("eval", str(run), *checkpoint, "--episodes", str(states), "--json", str(out), timeout=1800)
        found[when] = json.loads(out.read_text())["successes"]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    remove(place)
    shutil.copytree(run / "demos", place / "demos")
    remove(run)
    return {"successes": found["after"], "before": found["before"], "updates": last["update"], "steps": last["step"]}


def peer_run(lab: Lab, name: str, seconds: int, states: int) -> dict[str, Any]:
    need_metaworld()
    lab.progress(f"state: {name}, Stable-Baselines3 for {seconds} s")
    with Side("bench.learn_state", "sac", PYTHON) as side:
        run = str(lab.kept(f"state_{name}"))
        return side.ask("learn", timeout=seconds + 1200, run=run, name=name, seconds=seconds, seed=0, states=states)  # type: ignore[no-any-return]


def need_metaworld() -> None:
    if not PYTHON:
        raise LookupError("neither this Python nor one that HILT_METAWORLD names has it: see docs/metaworld.md")


QUICK = ["demonstrations=3", "agent.encoder.pretrain_updates=20"]


def _hilt(*words: str, timeout: float) -> None:
    places = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-m", "hilt", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"hilt {words[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")


GROUPS = {
    "state_updates": Group(("state_updates",), updates),
    "state": Group(tuple(f"state_{name}" for name in TASKS), tasks),
    "images": Group(tuple(f"images_{name}" for name in TASKS), images),
}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(ROOT, "src")))
    serve({"updates": Updates, "sac": Sac})
