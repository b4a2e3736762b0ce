"""A run that ends when its task is learned: checkpoints are evaluated beside
learning, on initial states that are not trained on.

    watch = GoalWatch(config, run)
    watch.ask(2_000)              # evaluate this checkpoint; returns at once
    watch.note_episode(helped)    # an episode of the run has ended
    watch.poll()                  # its Evaluation when it has come, else None
    watch.reached                 # whether the last `goal.hold` evaluations in a row all reached `goal.success`

Each evaluation tries the same initial states of the split "eval", every one once, without an operator, and every
episode counts. Looking often at one noisy figure and ending at the first good one would flatter the policy. That is why
several evaluations in a row must reach the goal, each of another checkpoint; and the figure to quote is another one:
`hilt eval RUN --split test`, on states that no evaluation here has tried. With `goal.take_overs`, a person must also
have taken over in few of the last episodes of the run, when the last of the evaluations ended.

A process of its own evaluates, so that the learner never waits for a simulator.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hilt.core.checksums import read_json, write_json
from hilt.core.children import PipedProcess
from hilt.core.errors import ConfigError, HiltError
from hilt.core.signals import leave_to_parent
from hilt.core.threads import one_thread
from hilt.hil.config import GOAL_SPLIT, Goal, Hil
from hilt.observe.metrics import FILE, read_metrics

END_S = 10.0
"""Timeout in seconds for the process to end"""
LAST_EPISODES = 50
"""Number of episodes of which `goal.take_overs` is a share"""
MAX_DEATHS = 3
"""Number of times in a row that the process may die, killed from outside, before the run ends"""


class GoalWatch:
    """Evaluates checkpoints of a run in another process, one at a time, and knows when the goal is reached."""

    def __init__(self, config: Hil, run: Path):
        self.goal, self.busy = config.goal, False
        self._config, self._run = config, run
        self._shares = {int(result["update"]): float(result["success"]) for result in evaluations(run, config.goal)}
        self._helped: deque[bool] = deque(maxlen=LAST_EPISODES)
        if config.goal.take_overs < 1 and (run / FILE).exists():
            for episode in read_metrics(run, ["episode"]):
                self.note_episode(bool(episode["intervention_steps"]))
        self._alone = self._acts_alone()
        self._process: PipedProcess | None = None
        self._deaths = 0

    @property
    def reached(self) -> bool:
        return self._alone and holds(self.goal, [share for _, share in sorted(self._shares.items())])

    def note_episode(self, helped: bool) -> None:
        """Counts an episode of the run that has ended, and whether a person took over in it."""
        self._helped.append(helped)

    def _acts_alone(self) -> bool:
        helped = self._helped
        return self.goal.take_overs == 1 or (
            len(helped) == LAST_EPISODES and sum(helped) <= self.goal.take_overs * LAST_EPISODES
        )

    @property
    def last(self) -> int:
        """The newest update that was evaluated or is being evaluated; 0 when none was."""
        return max([0, *self._shares])

    def forget_after(self, update: int) -> None:
        """A resumed run goes on from this update: what was measured later counts no more."""
        self._shares = {at: share for at, share in self._shares.items() if at <= update}

    def ask(self, update: int) -> None:
        """Begins the evaluation of a checkpoint that has been written."""
        if self._process is None or not self._process.is_alive():
            self._process = PipedProcess(_evaluate, self._config, self._run, name="hilt-goal")
        self._process.pipe.send(update)
        self.busy = True

    def poll(self) -> dict[str, object] | None:
        """Returns the result of the evaluation that was asked for, once it is there; None before, and afterwards."""
        if self._process is None or not self.busy or not self._process.pipe.poll():
            return None
        self.busy = False
        try:
            answer = self._process.pipe.recv()
        except (EOFError, ConnectionResetError):
            return self._died(self._process)
        if isinstance(answer, HiltError):
            raise answer
        if answer["success"] is None:
            raise ConfigError(
                f"goal.success={self.goal.success:g}: {self._config.task} does not report "
                "success, so it is never reached."
            )
        self._deaths = 0
        self._keep(answer["update"], answer["success"])
        return dict(answer)

    def _keep(self, update: int, share: float) -> None:
        self._shares[update], self._alone = share, self._acts_alone()

    def _died(self, process: PipedProcess) -> dict[str, Any]:
        code, self._process = process.exit_code(END_S), None
        self._deaths += 1
        if self._deaths == MAX_DEATHS:
            raise HiltError(
                f"the process that evaluates for goal.success ended {MAX_DEATHS} times in a row, last with exit "
                f"code {code}. Find out why (too little memory?), or go on without it: --resume goal.success=0."
            )
        return {"error": f"the process that evaluates ended with exit code {code}; another one is started"}

    def close(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process, self.busy = None, False


def holds(goal: Goal, shares: Sequence[float]) -> bool:
    """Whether the last `goal.hold` of these evaluations, in the order of their checkpoints, all reached the goal."""
    return goal.success > 0 and len(shares) >= goal.hold and min(shares[-goal.hold :]) >= goal.success


def evaluations(run: Path, goal: Goal) -> list[dict[str, Any]]:
    """The results of the evaluations that this goal has asked for, in the order of their updates."""
    results = [read_json(path) for path in sorted(run.glob("evaluations/*/evaluation.json"))]
    mine = [result for result in results if result.get("goal") and result["episodes"] == goal.states]
    return sorted(mine, key=lambda result: int(result["update"]))


def _evaluate(pipe: Any, config: Hil, run: Path) -> None:
    """Runs in the process until its parent is gone."""
    leave_to_parent()
    from hilt.hil.environment import spaces
    from hilt.hil.evaluate import evaluate, make_agent
    from hilt.runs.checkpoint import load
    from hilt.runs.evaluation import EVALUATION_FILE, as_pairs, new_folder

    one_thread()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            agent = make_agent(config, spaces(config))
            while True:
                update = pipe.recv()
                agent.load_state_dict(load(run, update).agent)
                done = evaluate(config, agent, GOAL_SPLIT, range(config.goal.states), update=update)
                result = {**done.to_json(), "goal": config.goal.success}
                write_json(new_folder(run / "evaluations", GOAL_SPLIT, update) / EVALUATION_FILE, result)
                figures = ("update", "success", "successes", "episodes", "errors", "low", "high", "seconds")
                pairs = as_pairs((config.task, one.state, bool(one.success)) for one in done.outcomes)
                pipe.send({**{name: result[name] for name in figures}, "pairs": pairs})
        except HiltError as error:
            pipe.send(error)


def described(result: Mapping[str, Any], goal: Goal) -> tuple[str, dict[str, float | str]]:
    """The result of an evaluation in words, and as figures for the metrics."""
    enough = "which reaches the goal" if result["success"] >= goal.success else f"the goal is {goal.success:.0%}"
    low, high = result["low"], result["high"]
    share = f"{result['successes']} of {result['episodes']} evaluation states, {low:.0%} to {high:.0%}; {enough}"
    names = ("success", "episodes", "low", "high", "update", "seconds")
    values = {f"validation_{name}": float(result[name]) for name in names}
    text = f"evaluation of update {result['update']:,}: success in {share}"
    return text, {**values, "validation_outcomes": result["pairs"]}
