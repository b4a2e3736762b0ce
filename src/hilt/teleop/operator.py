"""A script at the controls: it demonstrates, or it takes over like a person who watches.

It acts through actions only, at the control rate, and never sets a simulator's state. The rule of the operator is fixed
here, and is the same in every run; evaluation never has one.

    It compares what the policy does with what the expert would do, with a new plan at every step, so that a policy may
    take a way of its own. Over the last `PROGRESS_WINDOW` steps (or `window`), the *progress* of the policy is

        sum of (its action · the expert's action) / sum of (the expert's action · the expert's action)

    (grippers left out).

    1 is as fast as the expert in the expert's direction, standing still is 0. Below `PROGRESS` the operator takes over
    with a plan from where things are, acts for `TURN` steps, gives back, and watches again. When `LATE` of the step
    limit is over without success, it goes on with its plan until the end. An operator that teaches (in its first
    `teaches` episodes) takes over as soon as a single step makes less than `TEACHING` of the expert's progress.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hilt.core.errors import ConfigError
from hilt.core.trajectory import Source
from hilt.envs.env_protocol import Env
from hilt.teleop.devices import Device, Reading, function

PROGRESS_WINDOW = 15
TURN = 30
PROGRESS = 0.25
TEACHING = 0.9
LATE = 0.5

Expert = Callable[[], Any]


class Script(Device):
    """`operator=False` demonstrates: acts from the first step to the last, as source *demo*. `operator=True` takes over
    by the rule above, as source *human*. The expert is ``env.expert()``, or ``expert(env)`` where that is given (or
    "module:name" of it): a function without arguments that gives the next action, a new one for each plan.

    It is too good for a person: `speed` slows its motions down, `noise` adds normal noise of this standard deviation to
    them, and `action_indices` are the only numbers of an action that it uses, the others are 0. `seed` is the noise's.
    An operator has a reaction time: it takes over, acts and gives back `delay` steps after it decided to; and it may
    tire: once it has driven `tires_after` steps in all, it only watches (0: it never tires). `window` is the number of
    the policy's last steps by which it judges whether the policy makes progress. In its first `teaches` episodes it
    takes over earlier, at the first step that is not nearly as good as the expert's."""

    name = "script"
    gives_actions = True
    waited_for = False

    def __init__(
        self,
        operator: bool = False,
        expert: Callable[[Any], Expert] | str | None = None,
        speed: float = 1.0,
        noise: float = 0.0,
        action_indices: Sequence[int] | None = None,
        seed: int = 0,
        delay: int = 0,
        tires_after: int = 0,
        window: int = PROGRESS_WINDOW,
        teaches: int = 0,
    ):
        super().__init__()
        if not isinstance(operator, bool):
            raise ConfigError(
                f"operator is {operator!r}: expected true (takes over from a policy) or false (demonstrates)"
            )
        if not 0 < speed <= 1 or noise < 0:
            raise ConfigError(
                f"speed={speed}, noise={noise}: expected a share of the expert's speed, up to 1, "
                "and a deviation from 0 on"
            )
        if delay < 0 or tires_after < 0 or ((delay or tires_after) and not operator):
            given = f"delay={delay}, tires_after={tires_after}"
            raise ConfigError(
                f"{given}: expected numbers of steps from 0 on, of an operator (operator=true), "
                "who takes over from a policy"
            )
        if window < 1 or teaches < 0:
            raise ConfigError(
                f"window={window}, teaches={teaches}: expected a number of steps from 1 on, and a number of episodes "
                "from 0 on"
            )
        self._speed, self._noise, self._indices = speed, noise, action_indices
        self._tires_after, self._driven, self._teaches, self._episodes = tires_after, 0, teaches, 0
        self._decided: deque[tuple[bool, np.ndarray]] = deque(maxlen=delay + 1)  # the oldest is what it does now
        self._rng = np.random.default_rng(seed)
        self.operator = operator
        self.source = Source.HUMAN if operator else Source.DEMO
        self._make = None if expert is None else function(expert, "expert", Callable)  # type: ignore[arg-type]  # a class for isinstance and issubclass
        self._env: Any = None
        self._limit = 0
        # (made, possible) of the policy's last steps
        self._seen: deque[tuple[float, float]] = deque(maxlen=window)
        self.reset()

    def attach(self, env: Env) -> None:
        if self._make is None:
            if not env.has_wrapper_attr("expert"):
                raise ConfigError(
                    f"{type(env.unwrapped).__name__} has no expert() for the device script: give it a "
                    "method expert() that returns a function for the next action, or open the device with expert= (-d "
                    "expert=module:function), a function that makes one for an environment: docs/devices.md"
                )
            self._make = lambda env: env.get_wrapper_attr("expert")()
        if self.operator and not (hasattr(env.action_space, "low") and len(env.action_space.shape) == 1):
            raise ConfigError(
                f"the action space is {env.action_space}: an operator judges actions of a Box with one axis"
            )
        self._env = env
        self._limit = int(env.get_wrapper_attr("step_limit")) if env.has_wrapper_attr("step_limit") else 0

    def reset(self) -> None:
        super().reset()
        self._plan: Expert | None = None
        self._wanted: np.ndarray | None = None
        self._engaged, self._steps, self._left = False, 0, 0
        self._seen.clear()
        self._decided.clear()

    def watch(self, action: npt.ArrayLike) -> None:
        if self.operator:
            self._wanted = np.clip(np.asarray(action, float), self._env.action_space.low, self._env.action_space.high)

    def asked(self) -> None:
        """Takes over for a turn, as soon as its reaction time is over."""
        if self.operator:
            self._plan, self._left = None, TURN + 1
            self._seen.clear()

    def read(self) -> Reading:
        self._episodes += self._steps == 0
        wants = self._decide()
        self._steps += 1
        planned = self._next(watches=not wants)
        self._decided.append((wants, planned))
        engaged, action = self._decided[0] if len(self._decided) == self._decided.maxlen else (False, planned)
        if engaged != self._engaged:
            self.press("toggle")
        self._engaged = engaged
        self._driven += engaged
        if not engaged and self._wanted is not None:
            moves = ~gripper_dimensions(len(action))
            self._seen.append((self._wanted[moves] @ action[moves], action[moves] @ action[moves]))
        return Reading(engaged=engaged, events=self.take_events(), action=action)

    def _decide(self) -> bool:
        if not self.operator:
            return True
        self._left -= 1
        if self._tires_after and self._driven >= self._tires_after:
            return False
        if self._stuck():
            self._plan, self._left = None, TURN
            self._seen.clear()
        return self._left > 0 or (self._limit > 0 and self._steps >= LATE * self._limit)

    def _stuck(self) -> bool:
        if not self._seen:
            return False
        made, possible = np.sum(self._seen, axis=0)
        wrong = self._episodes <= self._teaches and self._seen[-1][0] < TEACHING * self._seen[-1][1]
        return bool(wrong or (len(self._seen) == self._seen.maxlen and made < PROGRESS * possible))

    def _next(self, watches: bool) -> np.ndarray:
        """The plan's next action, without the gripper where the environment leaves it out (`GripperCloseEnv`)."""
        if self._plan is None or watches:  # who watches judges from where things are now
            assert self._make is not None, "attach comes first"
            self._plan = _checked(self._make(self._env))
        assert self._plan is not None, "made above"
        action, expected = np.asarray(self._plan()), self._env.action_space.shape
        if action.ndim == 1 and action.shape != expected and (len(action) // 7 * 6,) == expected:
            action = action[~gripper_dimensions(len(action))]
        return self._imperfect(action) if (self._speed, self._noise, self._indices) != (1.0, 0.0, None) else action

    def _imperfect(self, action: np.ndarray) -> np.ndarray:
        moves = ~gripper_dimensions(len(action))
        action = np.where(moves, self._speed * action + self._noise * self._rng.standard_normal(len(action)), action)
        return (
            action if self._indices is None else np.where(np.isin(np.arange(len(action)), self._indices), action, 0.0)
        )


def _checked(plan: Any) -> Expert:
    """What an expert made for an environment, if it can be called without arguments."""
    if not callable(plan):
        raise ConfigError(
            f"the expert made {plan!r} for the environment: expected a function that gives the next action"
        )
    try:
        inspect.signature(plan).bind()
    except TypeError as error:
        raise ConfigError(
            f"the expert made a function that cannot be called without arguments ({error}): expected one that "
            "takes none and gives the next action. It is made for an environment, which it may ask "
            "for what it needs to know."
        ) from None
    except ValueError:  # its arguments are unknown, as for some builtins
        pass
    result: Callable[[], Any] = plan
    return result


def gripper_dimensions(length: int) -> np.ndarray:
    """Returns the numbers of an action that are grippers: the last one of each arm, where it has one."""
    per_arm = 7 if length in (7, 14) else 4 if length == 4 else length + 1
    result: np.ndarray = np.arange(length) % per_arm == per_arm - 1
    return result
