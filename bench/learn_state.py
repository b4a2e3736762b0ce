"""Learning from numbers alone, with settings that nobody has tuned: `build(Hil(), {task, demonstrations})` on two tasks
of Meta-World, beside Stable-Baselines3's SAC; and what one update of equal networks costs on both sides.

Meta-World pins another MuJoCo than ours, so it lives in a Python of its own, which HILT_METAWORLD names:

    uv venv .venv-metaworld
    uv pip install --python .venv-metaworld/bin/python metaworld stable-baselines3 packaging 'hilt[torch,formats]'
    HILT_METAWORLD=.venv-metaworld/bin/python python -m bench learn --only state
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.lab import Group, Lab, remove
from bench.report import Row, at_least
from bench.sides import ROOT, Side, serve

PYTHON = os.environ.get("HILT_METAWORLD", "")
TASKS = {"button": "button-press-topdown-v3", "window": "window-open-v3"}
DEMONSTRATIONS, SECONDS, STATES = 20, 240, 50
NUMBERS, ACTIONS, BATCH, HIDDEN = 39, 4, 256, [256, 256]
"""Of the update that is timed: what Meta-World shows and takes, and the sizes of SB3's SAC"""
STEP_LIMIT = 200


def make(env_name: str, step_limit: int = STEP_LIMIT) -> Any:
    """A task of Meta-World by its state; success is the reward, and ends the episode. Its states are those of its
    benchmark MT1: 50 with the seed 0 to train on, and 50 others with the seed 1 to be tested on."""
    import gymnasium
    import metaworld
    import metaworld.policies

    made, others = metaworld.MT1(env_name, seed=0), metaworld.MT1(env_name, seed=1)
    inner, states = made.train_classes[env_name](), {"train": made.train_tasks, "test": others.train_tasks}
    script = getattr(metaworld.policies, f"Sawyer{''.join(part.capitalize() for part in env_name.split('-'))}Policy")

    class Task(gymnasium.Env):  # type: ignore[misc]
        instruction = env_name.rsplit("-", 1)[0].replace("-", " ")
        initial_states = {split: len(each) for split, each in states.items()}  # noqa: RUF012
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (NUMBERS,), np.float32)
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (ACTIONS,), np.float32)

        def __init__(self) -> None:
            self.step_limit = step_limit

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            super().reset(seed=seed)
            split = (options or {}).get("split", "train")
            state = (options or {}).get("state")
            state = int(self.np_random.integers(len(states[split]))) if state is None else state
            inner.set_task(states[split][state])
            self._seen, self._steps = inner.reset()[0], 0
            return self._seen.astype(np.float32), {"succeed": False, "split": split, "state": state}

        def step(self, action: Any) -> Any:
            self._seen, _, _, _, info = inner.step(np.clip(action, -1.0, 1.0).astype(np.float64))
            self._steps += 1
            done = bool(info["success"])
            return self._seen.astype(np.float32), float(done), done, self._steps >= self.step_limit, {"succeed": done}

        def expert(self) -> Any:
            act = script()
            return lambda: np.clip(act.get_action(self._seen), -1.0, 1.0).astype(np.float32)

    return Task()


def recipe(name: str) -> Any:
    from hilt.core.config import build
    from hilt.hil.config import Hil

    return build(
        Hil(),
        {"task": "bench.learn_state:make", "task_options": {"env_name": TASKS[name]}, "demonstrations": DEMONSTRATIONS},
    )


def button() -> Any:
    return recipe("button")


def window() -> Any:
    return recipe("window")


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
        import stable_baselines3
        import torch
        from stable_baselines3.common.callbacks import BaseCallback

        from hilt.replay import Log

        torch.set_num_threads(1)
        env = make(TASKS[name])
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
    return [success(lab, name) for name in TASKS]


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


def success(lab: Lab, name: str) -> Row:
    seconds, states = lab.pick(SECONDS, 10), lab.pick(STATES, 2)
    common: dict[str, Any] = {
        "name": f"state_{name}",
        "unit": "%",
        "what": f"success of `hilt train bench.learn_state:{name}` of {states} new states of Meta-World's "
        f"{TASKS[name]}, by its state: no setting but the task and {DEMONSTRATIONS} demonstrations of its script, "
        f"{seconds} s from the first step; SB3's SAC with these in its buffer, its own settings, the "
        "same seconds and one thread",
        "targets": [at_least(90)],
        "size": ", ".join(
            part for part in (lab.size(seconds, SECONDS, "seconds"), lab.size(states, STATES, "states")) if part
        ),
    }
    try:
        ours = lab.once(f"state_{name}", lambda: our_run(lab, name, seconds, states))
        peer = lab.once(f"state_{name}-sb3", lambda: peer_run(lab, name, seconds, states))
    except LookupError as error:
        return Row(ours=None, absent={"Meta-World": str(error.args[0])}, **common)
    return Row(
        ours=100 * ours["successes"] / states,
        peers={f"SB3 {peer['version']} SAC": 100 * peer["successes"] / states},
        note=f"ours: {ours['updates']:,} updates, {ours['steps']:,} steps, {100 * ours['before'] / states:.0f}% "
        f"before the first update; SB3: {peer['updates']:,} updates, {peer['steps']:,} steps",
        **common,
    )


def our_run(lab: Lab, name: str, seconds: int, states: int) -> dict[str, Any]:
    """The demonstrations stay, which Stable-Baselines3 needs."""
    need_metaworld()
    lab.progress(f"state: {name}, ours for {seconds} s")
    run, place = lab.new(f"run-{name}"), lab.kept(f"state_{name}")
    words = [
        f"max_seconds={seconds}",
        "max_steps=1000000000",
        "seed=0",
        "wire.port=0",
        "wire.broadcast_port=0",
        *(lab.pick_words(QUICK)),
    ]
    _hilt("train", f"bench.learn_state:{name}", *words, "--run", str(run), timeout=seconds + 600)
    _hilt("eval", str(run), "--episodes", str(states), "--json", str(run / "out.json"), timeout=1200)
    _hilt(
        "eval",
        str(run),
        "--checkpoint",
        "0",
        "--episodes",
        str(states),
        "--json",
        str(run / "before.json"),
        timeout=1200,
    )
    done, before = (json.loads((run / file).read_text())["successes"] for file in ("out.json", "before.json"))
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    remove(place)
    shutil.copytree(run / "demos", place / "demos")
    remove(run)
    return {"successes": done, "before": before, "updates": last["update"], "steps": last["step"]}


def peer_run(lab: Lab, name: str, seconds: int, states: int) -> dict[str, Any]:
    need_metaworld()
    lab.progress(f"state: {name}, Stable-Baselines3 for {seconds} s")
    with Side("bench.learn_state", "sac", PYTHON) as side:
        run = str(lab.kept(f"state_{name}"))
        return side.ask("learn", timeout=seconds + 1200, run=run, name=name, seconds=seconds, seed=0, states=states)  # type: ignore[no-any-return]


def need_metaworld() -> None:
    if not PYTHON:
        raise LookupError("HILT_METAWORLD names no Python that has it: see bench/learn_state.py")


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
}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(ROOT, "src")))
    serve({"updates": Updates, "sac": Sac})
