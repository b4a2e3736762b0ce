"""A vision-language-action policy as the agent of a run with a person: ``agent.kind=vla``.

It acts in chunks through a `ChunkExecutor`, which drops the rest of a chunk when a person takes over, and plans anew
from where they left. It learns by imitation (``algorithm=hg-dagger`` or ``filtered``), from steps with the actions that
followed them; with ``algorithm=mixed`` from groups of simulated episodes besides; with ``algorithm=recap`` from good
and bad steps, conditioned on which they are. Everything else of the run is as with any other agent: the wire, the logs,
checkpoints, evaluation.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hilt.algos.adam import Adam
from hilt.algos.chunks import spread
from hilt.core.errors import (
    ConfigError,
    DeadlineError,
    MissingFieldError,
    NotFiniteError,
    RequestError,
    SchemaError,
)
from hilt.core.trajectory import Source
from hilt.core.tree import Array, ArraySpec, Tree, unflatten
from hilt.envs.chunk_executor import ChunkExecutor, ChunkSettings, ChunkStep, ExecutedChunk, Planned
from hilt.hil.agents.vla_options import VlaOptions, check_options, open_policy
from hilt.hil.config import CHUNK, CHUNK_INDEX, DECIDED, RECORD, TASK_COLUMN
from hilt.hil.stream.labelled import GOOD
from hilt.policies.agent.config import AgentConfig
from hilt.policies.agent.layout import ActionLayout, fit
from hilt.policies.agent.step_agent import StepAgent
from hilt.policies.base import Observation, Policy, Prefix, Record, drawn_fields
from hilt.policies.conditioned import ADVANTAGE, NEGATIVE, POSITIVE, WRONG_LOSS, Condition
from hilt.policies.plasticity import ChunkLooks
from hilt.policies.vla.observation_adapters import columns, no_motion, suite
from hilt.serving.policy_links import ServerAbsentError
from hilt.serving.remote_policy import RemotePolicy, server_key

if TYPE_CHECKING:
    from gymnasium.spaces import Space

BASE = "#base"
"""In what is sent to actors: the checksum of the weights that are not trained"""
PLANS_COMPARED = 200
"""Earlier plans with which the newest is compared, to say how sure the policy is of it"""
FEWEST_COMPARED = 10
SERVER_TIMEOUT_S = 2.0
"""Seconds for each answer of a policy server; after that the arm holds, and it is asked again"""
ALIVE_S, FORGET_S = 0.08, 0.5
"""Seconds after the last sign of life of a policy server from which the arm holds, so that it holds 0.1 s after the
server was lost; and seconds of that after which the rest of the chunk is dropped"""
BETAS = (0.9, 0.95)
"""Of AdamW, as in openpi. With the usual 0.999, a gradient that is much larger than those of the last hundreds of
updates moves the weights by three learning rates, and a policy that has learned what it was shown has such small
gradients that the next correction of a person could undo all of it"""
IMITATES = "agent.kind=vla learns by imitation: give algorithm=hg-dagger, filtered, recap, mixed or bc."


class PlanNote(NamedTuple):
    """What is noted of a plan."""

    record: dict[str, Any] | None
    """What the policy drew; None of a policy server, which sends no records"""
    spread: float | None
    """How much the chunks differ that were drawn beside it; None where that is not measured"""


AddedGradient = Callable[[Policy], dict[str, float]]
"""Adds the gradient of a loss to those that a policy has, and gives figures of it"""


class VlaAgent(StepAgent):
    """An agent that acts in chunks and imitates them."""

    proprio: Sequence[str]

    def __init__(self, options: VlaOptions, action_dim: int, layout: ActionLayout, seed: int, device: str = "cpu"):
        self.options, self.layout = options, layout
        self.instructions: tuple[str, ...] = (options.instruction,) if options.instruction else ()
        self._suite = columns(options.columns) if options.columns else suite(options.suite)
        self._device, self._seed = device, seed
        self._action_dim, self._draws = action_dim, torch.Generator().manual_seed(seed)
        self._empty: dict[str, Any] = {}  # an observation of zeros
        self._remote: RemotePolicy | None = None
        self._absent = False  # the server did not answer the last plan
        self._lost_at: float | None = None  # since when the server gives no sign of life
        self._adam: Adam | None = None
        self._learned: list[str] = []
        self._newest: dict[str, torch.Tensor] = {}  # what is trained, where the policy has its average
        self._images: list[str] = []
        self._instruction, self._argmax = "", not options.sample
        self._executor: ChunkExecutor | None = None
        self._new: Mapping[str, Any] | None = None  # weights that the next plan is made with
        self._step: ChunkStep | None = None
        self._helped = False
        self._policy_dim = action_dim  # the numbers in an action of the policy, which a suite may turn into another
        self._last: Any = None  # the last action that was executed, in the policy's units
        self._blank: Record = {}  # what steps without a record have in its columns
        self._sure: deque[float] = deque(maxlen=PLANS_COMPARED)  # the log-probabilities of plans
        self._confidence: float | None = None
        self._versions: dict[int, int] = {}  # of the weights with which each chunk of the episode was planned
        self._acting: Policy | None = None  # what acts in place of the policy
        self._condition: Condition | None = None
        self._looks = ChunkLooks(seed)
        self._samples, self._asks = 0, False  # chunks that are drawn beside each plan, and whether it acts in the run
        self._others = torch.Generator().manual_seed(seed)  # of their own, so that they change no action

    @classmethod
    def make(
        cls,
        observation_space: Space,
        action_space: Space,
        config: AgentConfig | None = None,
        image_keys: Sequence[str] = (),
        proprio_keys: Sequence[str] = (),
        seed: int = 42,
        squashed: bool = True,
    ) -> VlaAgent:
        config = config or AgentConfig(kind="vla")
        if squashed:
            raise ConfigError(IMITATES)
        seen = fit(observation_space, action_space, config, image_keys, proprio_keys)
        layout = ActionLayout(config.setup_mode, seen.actions, config.action_indices)
        agent = cls(check_options(config.options), seen.actions, layout, seed, config.device)
        agent._images, agent.proprio = list(seen.images), list(seen.proprio)
        agent._empty = unflatten({path: np.zeros(spec.shape, spec.dtype) for path, spec in seen.shapes.items()})
        if not agent.options.server:
            agent._check(agent.policy, agent.options.policy)
        return agent

    @cached_property
    def policy(self) -> Policy:
        """The policy, with its adapters. It is loaded when it is needed: an actor that asks a server does without."""
        return open_policy(self.options, self._device, self._seed, condition=self._condition)

    @property
    def horizon(self) -> int:  # type: ignore[override]
        """The number of actions that it imitates from each step on."""
        return int(getattr(self.policy, "horizon", self.policy.chunk))

    @cached_property
    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.policy.named_parameters() if p.requires_grad}

    def _check(self, policy: Policy, where: str) -> None:
        """Refuses a policy that does not fit the task: by one answer to an observation of zeros."""
        try:
            with torch.no_grad():
                actions, record = policy.act([self._suite.observe(self._empty, "-")], sample=False)
        except (SchemaError, MissingFieldError, RequestError) as error:
            raise ConfigError(f"the policy in {where} does not fit the task: {error}") from error
        self._blank = {name: np.zeros_like(array[0]) for name, array in drawn_fields(record).items()}
        commands, self._policy_dim = self._suite.command(actions[0]), actions.shape[-1]
        if commands.shape[-1] != self._action_dim:
            raise ConfigError(
                f"the policy in {where} gives actions of {commands.shape[-1]} numbers, and the task takes "
                f"{self._action_dim}."
            )
        if self.options.mode == "rtc" and not policy.takes_prefix:
            raise ConfigError(
                f"mode=rtc needs a policy that continues a chunk, and {type(policy).__name__} in {where} does not: "
                "give mode=asynchronous, or train it with max_delay."
            )
        if self.options.mode == "rtc" and self.options.sample and not self.policy.max_delay:
            raise ConfigError(
                f"mode=rtc with sample=true needs a policy that was trained with max_delay, and the one in "
                f"{self.options.policy} was not: give sample=false, or train it with max_delay (hilt train sft)."
            )

    def condition(self, by: Condition) -> None:
        self._condition = by
        if "policy" in self.__dict__:  # it was loaded to see whether it fits the task
            self.policy = by.of(self.policy)
            self._check(self.policy, self.options.policy)

    # Acting

    def choose_by(self, wrap: Callable[[Policy], Policy]) -> None:
        """Lets another policy act, which is made of this one, such as the best of several chunks."""
        self._acting = wrap(self.policy)
        self._check(self._acting, self.options.policy)

    def execution(self) -> dict[str, float]:
        """Returns what acting has cost and changed, of a policy that counts it."""
        return {} if self._acting is None else self._acting.acting_figures()

    def use_instructions(self, instructions: Sequence[str]) -> None:
        if not self.options.instruction:
            self.instructions = tuple(instructions)

    def begin(self, instruction: str = "", paced: bool = False) -> None:
        self._instruction = self.options.instruction or instruction
        if not self._instruction:
            raise ConfigError("the task does not say what is to be done: give agent.options.instruction=TEXT.")
        if self.options.server and self._remote is None:
            key = server_key(self.options.server, self.options.server_key)
            self._remote = RemotePolicy(self.options.server, key=key, timeout_s=SERVER_TIMEOUT_S)
            self._check(self._remote, self.options.server)
        delay = None if paced else 0
        if self._executor is None or self._executor.settings.delay != delay:
            self.close()
            settings = ChunkSettings(self.options.mode, self.options.execute, delay, self.options.ensemble_decay)
            self._executor = ChunkExecutor(self._plan, settings, action_dim=self._policy_dim, hold=self._hold)
        self._executor.reset()
        self._step, self._helped, self._last = None, False, None
        self._versions.clear()

    def sample_actions(
        self, observations: Tree, seed: int | None = None, argmax: bool | None = None
    ) -> npt.NDArray[np.float32]:
        if self._executor is None:
            raise ConfigError("begin() comes before the first action of an episode.")
        if seed is not None:
            self._draws.manual_seed(seed)
        self._argmax = not self.options.sample if argmax is None else argmax
        self._asks, self.disagreement = argmax is None, None  # nobody is asked in an evaluation
        if self._helped:  # the person may go on: the policy plans when they have let go
            self._step = None
            return self._command(self._hold(observations, self._last))
        if not self._has_server():
            self._plan_without_acting(observations)
            return self._command(self._hold(observations, self._last))
        self._step = self._executor.next(observations)
        if self._step.asked >= 0:
            self._versions[self._step.asked] = self.version  # the plan has these weights, or newer ones
        self.disagreement = None if self._step.note is None else self._step.note.spread
        return self._command(self._step.action)

    def _has_server(self) -> bool:
        """Whether chunks may be executed: at a control rate the arm holds as soon as a policy server is lost, in the
        middle of a chunk, too."""
        assert self._executor is not None
        if self._remote is None or self._executor.settings.delay is not None or self._remote.is_alive(ALIVE_S):
            self._lost_at = None
            return True
        self._lost_at = time.monotonic() if self._lost_at is None else self._lost_at
        return False

    def _plan_without_acting(self, observation: Any) -> None:
        """While the server is lost: it goes on with the chunk if the server is back in a moment; later it drops that,
        and asks for another one until there is an answer."""
        assert self._executor is not None and self._lost_at is not None
        self._step = None
        if time.monotonic() - self._lost_at >= FORGET_S and (
            self._executor.has_action() or not self._executor.next(observation).held
        ):
            self._executor.interrupt(self._last)

    def _command(self, action: Any) -> npt.NDArray[np.float32]:
        return np.asarray(self._suite.command(action), np.float32)

    def _hold(self, observation: Any, last: Any) -> npt.NDArray[np.float32]:
        """The policy's action with which the arm stays as it is; where that is not known, no motion."""
        return np.asarray((self._suite.hold or no_motion)(observation, last, self._policy_dim), np.float32)

    def acted(self, source: Source, executed: npt.ArrayLike | None) -> dict[str, object]:
        helped = source in (Source.HUMAN, Source.DEMO)
        self._last = None if executed is None else self._suite.taught(np.asarray(executed, np.float32))
        if source != Source.POLICY and self._executor is not None:
            self._executor.interrupt(self._last)
            self._step = None
        step, self._helped = None if helped or self._absent else self._step, helped
        planned = {}
        if step is not None and not step.held:
            version = self._versions[step.chunk] if self._remote is None else self._remote.version
            planned = {"policy_version": np.int64(version)}
        return {
            **planned,
            CHUNK: np.int32(-1 if step is None else step.chunk),
            CHUNK_INDEX: np.int16(-1 if step is None else step.index),
            **self._recorded(step),
        }

    def step_columns(self) -> dict[str, object]:
        if not self._blank:  # of a policy server, which sends no records
            return {}
        record = {name: ArraySpec(array.dtype, array.shape, default=0) for name, array in self._blank.items()}
        return {RECORD: record, DECIDED: ArraySpec(np.dtype(np.int16), default=-1)}

    def _recorded(self, step: ChunkStep | None) -> dict[str, Any]:
        """The columns of `step_columns` of a step: the record of a chunk in its first one."""
        if not self._blank:
            return {}
        record = None if step is None or step.note is None else step.note.record
        if step is None or record is None:
            return {RECORD: self._blank, DECIDED: np.int16(-1)}
        if any(record[name].shape != blank.shape for name, blank in self._blank.items()):
            found = {name: list(array.shape) for name, array in record.items()}
            expected = {name: list(array.shape) for name, array in self._blank.items()}
            raise SchemaError(f"the policy's record has the shapes {found}; at the start of the run it had {expected}.")
        return {RECORD: record, DECIDED: np.int16(step.since)}

    def _plan(self, observation: Any, planned: Any, frozen: int) -> Planned:
        """In a thread of the executor's, where the run has a control rate."""
        self._take_up()
        policy, prefix = self._remote or self._acting or self.policy, None
        if planned is not None:
            prefix = Prefix(planned[None], np.array([frozen]))
        row = self._suite.observe(observation, self._instruction)
        self._absent = False
        heat = 1.0 if self._argmax else self.options.temperature
        try:
            actions, record = policy.act(
                [row], sample=not self._argmax, temperature=heat, generator=self._draws, prefix=prefix
            )
        except (ServerAbsentError, DeadlineError):  # the arm holds, and the server is asked again
            self._absent = True
            return Planned(np.repeat(self._hold(observation, self._last)[None], self.options.execute or 1, 0), None)
        self._compare(record)
        drawn = {name: array[0] for name, array in drawn_fields(record).items()} if self._blank else None
        measured = self._spread(row, planned, frozen) if self._samples and self._asks else None
        return Planned(np.asarray(actions[0], np.float32), PlanNote(drawn, measured))

    def measure_disagreement(self, samples: int = 4) -> None:
        self._samples = samples
        if not self._spread(self._suite.observe(self._empty, "-")):
            raise ConfigError(
                f"the policy in {self.options.policy} draws the same chunk each time, so that nothing tells where to "
                "ask for help: leave help.quantile out, or give one that samples."
            )

    def _spread(self, row: Observation, planned: Any = None, frozen: int = 0) -> float:
        """Returns how much several draws of the policy differ in this observation. All of them continue the same
        `frozen` first actions of the plan."""
        count, prefix = self._samples, None
        if planned is not None and self.policy.max_delay:  # a guided flow continues the likeliest chunk alone
            prefix = Prefix(np.repeat(planned[None], count, 0), np.full(count, frozen))
        with torch.no_grad():
            drawn, _ = (self._acting or self.policy).act(
                [row] * count, sample=True, temperature=self.options.temperature, generator=self._others, prefix=prefix
            )
        return spread(torch.as_tensor(np.asarray(drawn)))

    def _compare(self, record: Mapping[str, Any]) -> None:
        """How sure the policy is of a plan, beside its earlier ones. A flow that does not sample has no say."""
        likely = np.asarray(record.get("log_prob", 0.0))
        if not likely.any() or not np.isfinite(likely).all():
            self._confidence = None
            return
        sure = float(likely.mean())
        compared = len(self._sure) >= FEWEST_COMPARED
        self._confidence = float(np.mean(np.array(self._sure) < sure)) if compared else None
        self._sure.append(sure)

    def planned(self) -> ExecutedChunk | None:
        chunk = None if self._executor is None or self._step is None else self._executor.chunk
        if chunk is None or self._absent:
            return None
        return replace(chunk, actions=self._command(chunk.actions), confidence=self._confidence)

    def metrics(self) -> dict[str, float]:
        if self._executor is None:
            return {}
        absent = {} if self._remote is None else {"server_absent": float(self._absent or self._lost_at is not None)}
        return {**{f"chunks/{name}": value for name, value in self._executor.metrics().items()}, **absent}

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor = None
        if self._remote is not None:
            self._remote.close()

    # Learning

    @property
    def image_paths(self) -> Sequence[str]:
        return self._images

    def observed(self, observations: Tree, numbers: Array, instructions: Sequence[str] = ()) -> list[Observation]:
        """The observations of a batch as the policy takes them, with the instructions of the tasks of these numbers:
        by default those of the run's own."""
        views, words = self._suite.views(observations), self.instructions
        if not self.options.instruction:
            words = tuple(instructions) or words
        return [
            {**{name: column[place] for name, column in views.items()}, "instruction": self._words(int(number), words)}
            for place, number in enumerate(numbers)
        ]

    def imitate(
        self, batch: Mapping[str, Any], encoder: bool = False, beside: AddedGradient | None = None
    ) -> dict[str, float]:
        """`beside` adds the gradient of another loss before the step."""
        rows, actions = self._taught(batch)
        with self._newest_weights():
            self.policy.train()
            loss, figures = self.policy.supervised_loss(rows, actions, batch["mask"], generator=self._draws)
            self.policy.zero_grad(set_to_none=True)
            loss.backward()
            self.policy.eval()
            more = {} if beside is None else beside(self.policy)
            norm = self._descend(every=beside is not None)
        self.imitations += 1
        shown = {f"imitation/{name}": value for name, value in figures.items()}
        shown |= {"share/good": float(np.mean(batch[GOOD]))} if GOOD in batch else {}
        return {**shown, **more, "imitation/gradient_norm": norm}

    def _taught(self, batch: Mapping[str, Any]) -> tuple[list[Observation], Array]:
        """The observations of a batch, with their condition if they have one, and its actions."""
        rows = self.observed(batch["observations"], batch.get(TASK_COLUMN, np.zeros(len(batch["actions"]), np.int64)))
        if GOOD in batch:
            labels = [POSITIVE if good else NEGATIVE for good in batch[GOOD]]
            rows = [{**row, ADVANTAGE: label} for row, label in zip(rows, labels, strict=True)]
        return rows, self._suite.taught(np.asarray(batch["actions"])).astype(np.float32)

    def health(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """``effective_rank``, ``dead_relus``, and of a policy with log-probabilities ``policy_kl`` and ``entropy``
        (`ChunkLooks`), of the weights that learn. With a condition: the loss with it, and with good and bad exchanged.
        If the second is no higher, the policy does not look at it, or the labels are noise."""
        with self._exchanged():
            found = self._looks.look(self.policy, *self._taught(batch), batch["mask"])
        if GOOD not in batch:
            return found
        draws = torch.Generator()
        draws.set_state(self._draws.get_state())
        with torch.no_grad():
            loss, figures = self.policy.supervised_loss(*self._taught(batch), batch["mask"], generator=draws)
        return {**found, "imitation/conditioned_loss": float(loss), f"imitation/{WRONG_LOSS}": figures[WRONG_LOSS]}

    @property
    def lacking(self) -> Mapping[str, str]:
        return self._looks.lacking

    @contextlib.contextmanager
    def _newest_weights(self) -> Iterator[None]:
        """Within it the policy has the weights that are trained; after it their moving average, if there is one."""
        if not self.options.average:
            yield
            return
        if not self._newest:
            if any(p.dtype != torch.float32 for p in self._trained.values()):
                raise ConfigError(
                    "agent.options.average needs weights in float32, and these have fewer digits than a small share of "
                    "them: give lora_rank, whose adapters have them, or average=0."
                )
            self._newest = {name: p.detach().clone() for name, p in self._trained.items()}
        with self._exchanged():
            yield
        with torch.no_grad():
            torch._foreach_lerp_(list(self._trained.values()), list(self._newest.values()), self.options.average)

    @contextlib.contextmanager
    def _exchanged(self) -> Iterator[None]:
        """Within it the policy has the newest weights, where it has their average otherwise."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name in self._newest:
            p = self._trained[name]
            p.data, self._newest[name] = self._newest[name], p.data

    def _words(self, number: int, words: Sequence[str]) -> str:
        if not words:
            raise ConfigError("the task does not say what is to be done: give agent.options.instruction=TEXT.")
        return words[min(number, len(words) - 1)]

    def _descend(self, every: bool = False) -> float:
        """One step down the gradients, whose norm is returned. `every`: weights that have no gradient in the first
        step may have one later."""
        if self._adam is None:
            self._begin_descent([name for name, p in self._trained.items() if every or p.grad is not None])
        assert self._adam is not None
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._adam.parameters]
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in gradients])))
        if not np.isfinite(norm):
            raise NotFiniteError(f"the norm of the gradient is {norm}. Nothing was changed by it.")
        if self.options.gradient_clip and norm > self.options.gradient_clip:
            torch._foreach_mul_(gradients, self.options.gradient_clip / norm)
        self._adam.learning_rate = self.options.learning_rate_after(self.imitations)
        self._adam.step(gradients)
        self.policy.zero_grad(set_to_none=True)
        return norm

    def _begin_descent(self, names: Sequence[str]) -> None:
        """Heads that imitation does not use have no gradient, and are left alone."""
        options = self.options
        self._learned = list(names)
        parameters = [self._trained[name] for name in names]
        self._adam = Adam(parameters, options.learning_rate, options.weight_decay, BETAS)

    def update(
        self, batch: Mapping[str, object], networks_to_update: Iterable[str] | None = None, details: bool = False
    ) -> tuple[StepAgent, dict[str, float]]:
        raise ConfigError(IMITATES)

    # Keeping

    def acting_state(self, slow: bool = False) -> dict[str, npt.NDArray[np.float32]]:
        """Returns what is trained, with adapters these alone; and a checksum of the rest."""
        trained = {name: p.detach().float().cpu().numpy().copy() for name, p in self._trained.items()}
        return {**trained, BASE: self._base}

    def load_acting_state(self, state: Mapping[str, Any]) -> None:
        """Takes over what a learner sent; an actor that asks a server leaves it: the server has weights of its own."""
        if self._remote is not None:
            return
        if state.keys() != {*self._trained, BASE} or not np.array_equal(state[BASE], self._base):
            raise ConfigError(
                f"these are weights for another policy than the one in {self.options.policy}: "
                f"{len(state) - 1} arrays, expected {len(self._trained)}, or what is not trained differs. Give "
                "learner and actors the same folder."
            )
        self._new = state
        if self._executor is None or self._executor.settings.delay is not None:
            self._take_up()

    def _take_up(self) -> None:
        """Uses the newest weights: where a control rate is kept, in the thread that plans, between two plans."""
        state, self._new = self._new, None
        with torch.no_grad():
            for name, weights in (state or {}).items():
                if name != BASE:
                    p = self._trained[name]
                    p.copy_(torch.tensor(np.asarray(weights)).to(p.device, p.dtype))

    @cached_property
    def _base(self) -> npt.NDArray[np.float32]:
        """The checksum of what is not trained, which must be the same at the learner and at its actors."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.policy.state_dict().items()):
            if name not in self._trained:
                whole = tensor.detach().cpu().contiguous().reshape(-1)
                digest.update(name.encode() + whole.view(torch.uint8).numpy().tobytes())
        return np.frombuffer(digest.digest()[:16], np.uint8).astype(np.float32)

    def state_dict(self) -> dict[str, object]:
        adam = {} if self._adam is None else {name: tensor.clone() for name, tensor in self._adam.tensors().items()}
        return {
            "policy": {name: p.detach().clone() for name, p in self._trained.items()},
            "newest": {name: tensor.clone() for name, tensor in self._newest.items()},
            "adam": adam,
            "learned": torch.tensor([name in self._learned for name in self._trained]),
            "imitations": self.imitations,
            "draws": self._draws.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trained = {name: tensor.float().cpu().numpy() for name, tensor in state["policy"].items()}
        self.load_acting_state({**trained, BASE: self._base})
        self._newest = {name: tensor.to(self._device) for name, tensor in state.get("newest", {}).items()}
        self.imitations = int(state["imitations"])
        if state["learned"].any():
            self._begin_descent([name for name, yes in zip(self._trained, state["learned"], strict=True) if yes])
            assert self._adam is not None
            for name, tensor in self._adam.tensors().items():
                tensor.copy_(state["adam"][name])
        self._draws.set_state(state["draws"])
