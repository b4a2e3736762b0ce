"""The protocol between a policy and whatever runs, trains or stores it. Tokens, Gaussians and flows all fit it.

    actions, record = policy.act(observations, sample=True, temperature=1.0, generator=generator)
    # with gradients; evaluation.log_prob equals record["log_prob"] for the same weights
    evaluation = policy.evaluate(record)

An algorithm sees `Evaluation` only, so every algorithm works with every policy. A *record* is a tree of arrays, one row
for each observation: all that the policy needs to compute the log-probability of what it did once more. It goes into a
log as it is, once `widen` has given its prompts the width of the log's column.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hilt.core.errors import ConfigError, MissingFieldError, SchemaError

Observation = Mapping[str, npt.ArrayLike]
"""One row: ``full_image`` uint8 [H, W, 3], ``wrist_image`` and others by name, ``state`` float32 [P],
``instruction`` text. A row may differ from its neighbors in the size of its images and the length of its
instruction. Finished rows are simply not asked about."""

Record = dict[str, np.ndarray]
"""What was done, on the host: images uint8, ``prompt`` and ``prompt_length``, what was drawn, ``temperature``,
``log_prob``, and a ``value`` if the policy has one."""


CONDITION = "condition"
"""Of an observation and of a record: the number of the condition of a policy that has an embedding of it"""
KEPT_ENDING = "kept_ending"
"""Of an observation: the end of its instruction that a policy reads, however few words it can take; empty: none"""
OBSERVED_FIELDS = ("images", "image_mask", "prompt", "prompt_length", "state", CONDITION)
"""Fields of a record that come from the observation alone"""


class Evaluation(NamedTuple):
    """What an algorithm needs of a batch of records."""

    log_prob: torch.Tensor
    """float32 [B, chunk, action_dim]: of each number of the chunk, at the temperature of its record."""
    entropy: torch.Tensor
    """float32 [B, chunk, action_dim]."""
    value: torch.Tensor | None
    """float32 [B], of a policy with a value head."""


class Prefix(NamedTuple):
    """Actions that were planned before and are executed while the policy computes its next answer (real-time chunking).

    The answer continues them: its first actions are those of the prefix, and the rest joins on without a jump.
    """

    actions: np.ndarray
    """float32 [B, n, action_dim] in the robot's units, from the step of the observation on; n is 1 to `chunk`."""
    frozen: np.ndarray
    """int64 [B], from 0 to n: the number of these actions that are executed for certain before the answer arrives.
    The others are a plan that the answer may change."""


class ObservedFields(NamedTuple):
    """What a policy looks at in an observation, besides its instruction."""

    cameras: tuple[str, ...]
    """Names of pictures"""
    state_dim: int
    """Numbers in the state; 0: it is not looked at"""
    all_cameras: bool = True
    """Whether every picture is needed; otherwise one of them is enough"""


class Policy(torch.nn.Module, ABC):
    """A policy that answers an observation with a chunk of actions."""

    chunk: int
    """Actions in one answer."""
    action_dim: int
    """Numbers in one action."""
    token_range: tuple[int, int] | None = None
    """The first and the last token that stand for an action, where record["tokens"] may have others too."""
    max_delay: int = 0
    """The largest number of given actions at the start of a chunk that it was trained with."""
    decides: np.ndarray | None = None
    """bool [chunk]: the actions of an answer whose numbers have a log-probability, where the others follow from these;
    none: all have."""
    compiles_aside: bool = False
    """Whether `act` answers more slowly at first instead of waiting until a decision of its size is compiled, of a
    policy that compiles; a thread does it meanwhile. Which decisions are compiled when is left to chance then"""
    keeps_answers: bool = False
    """Whether the records of a flow have "answer", the actions as the model drew them, which `flow_error` needs."""
    keeps_features: bool = False
    """Whether the records of `act` have "features", what `features` returns for the same observations, of a policy that
    has both from one look at them."""

    keeps_context: bool = False
    """Whether what was read of the last observations is kept, and equal ones are not read again, by a policy that can:
    for weights that do not change"""

    @property
    def takes_prefix(self) -> bool:
        """Whether `act` accepts a prefix. A policy that does not may lack the argument: ask before giving it one."""
        return False

    @property
    def start_shape(self) -> tuple[int, int] | None:
        """The shape of the noise that a flow begins with, which `act_from` takes: actions, and numbers of each. None of
        a policy without a flow."""
        return None

    @property
    def state_token_width(self) -> int:
        """The width of the token of its state, to which `hilt.policies.condition_embedding` can be added; 0: it has no
        such token."""
        return 0

    @abstractmethod
    def act(
        self,
        observations: Sequence[Observation],
        sample: bool = True,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[np.ndarray, Record]:
        """Actions in the robot's units, float32 [B, chunk, action_dim], and the record
        of them. Without `sample`, the likeliest.

        All that is random comes from `generator`, a CPU one: the same draws on every device. No gradients are kept.
        With `prefix`, the answer continues what is being executed: see `takes_prefix` and `check_prefix`.
        """

    def act_from(self, observations: Sequence[Observation], start: np.ndarray) -> np.ndarray:
        """Returns the actions in the robot's units, float32 [B, chunk, action_dim], to which a flow leads from the
        initial noise `start`, float32 [B, *start_shape]: those of ``act(observations, sample=False,
        generator=generator)`` where the generator draws this noise. Nothing is drawn here."""
        raise ConfigError(
            f"{type(self).__name__} does not begin with noise: give a policy with a flow, such as pi0, pi0.5, SmolVLA, "
            "or small_vla with policy_options.head=flow."
        )

    def forget_context(self) -> None:  # nothing by default
        """Frees the memory of what `keeps_context` keeps."""

    @abstractmethod
    def evaluate(self, record: Record) -> Evaluation:
        """The distribution of now, of what was drawn then, with gradients."""

    def flow_error(self, record: Record, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Returns the velocity of a flow less the one that leads to the answer of the record, with gradients, float32
        [B, K, chunk, action_dim], at K draws of noise [B, K, ...], of the shape of the answer, and times [B, K]."""
        raise ConfigError(f"{type(self).__name__} has no flow, whose velocity would be compared: give another policy.")

    @abstractmethod
    def supervised_loss(
        self,
        observations: Sequence[Observation],
        actions: np.ndarray,
        mask: np.ndarray,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss of imitating `actions` (robot's units, [B, chunk, action_dim]) where `mask`
        [B, chunk] is true, and figures to show.

        Noise, times and shifted pictures come from `generator`, as in `act`."""

    def features(self, observations: Sequence[Observation]) -> torch.Tensor:
        """Returns what the trunk computes from observations before an action is chosen, float [B, width], without
        gradients: for other models on top of a frozen policy, such as a value model."""
        raise ConfigError(f"{type(self).__name__} gives no features: it has no method features().")

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def warm_up(self, sample: bool, notify: Callable[[str], None]) -> None:
        """Makes the first call of `act` with one observation as fast as later ones, where compiling would delay it.
        `notify` is called with a line about each part of the work; by default there is none."""

    def acting_figures(self) -> dict[str, float]:
        """Returns what acting has cost and changed so far, of a policy that counts it, such as the best of several
        chunks; by default nothing."""
        return {}

    def observed_fields(self) -> ObservedFields | None:
        """What an observation must have, for checks before `act`; None where only `act` itself knows."""
        return None

    # How it is named, made and kept: see `hilt.policies.registry`

    precision_option: ClassVar[str] = ""
    """The option that says in which precision it computes, which a run decides when it begins; empty: there is none"""
    recomputation_option: ClassVar[str] = ""
    """The option with the share of its layers that are computed once more for the gradient; empty: there is none"""
    has_log_prob: ClassVar[bool] = True
    """Whether its records have log-probabilities, and `evaluate` computes them, which post-training needs"""
    learning_rate: ClassVar[float] = 5e-6
    """Of all weights, where the settings of post-training give none"""

    @classmethod
    def create(cls, sizes: Mapping[str, object], options: Mapping[str, object], seed: int) -> Policy:
        """A new one that has learned nothing. `sizes` are those of the task or the data, as
        `hilt.policies.registry.policy_sizes` gives them; `options` the setting policy_options."""
        raise ConfigError(f"a new {cls.__name__} cannot be made: give policy=FOLDER, that of a checkpoint.")

    @classmethod
    def check_options(cls, options: Mapping[str, object]) -> None:
        """Raises for options with which `create` could not make one; nothing is made."""
        if cls.create.__func__ is Policy.create.__func__:  # type: ignore[attr-defined]
            cls.create({}, options, 0)

    @classmethod
    def value_options(cls, kind: str, options: Mapping[str, object]) -> dict[str, object]:
        """The options by which it has a value head, besides those that are given: a "shared" one trains the
        trunk too, a "detached" one itself alone."""
        raise ConfigError(
            f"{cls.__name__} has no value head, which critic.kind needs: take an estimator "
            "without a critic, such as grpo."
        )

    @classmethod
    def delay_options(cls, max_delay: int) -> dict[str, object]:
        """The options by which it is trained to continue up to `max_delay` given actions of a chunk."""
        raise ConfigError(
            f"max_delay={max_delay}: {cls.__name__} cannot be trained with given actions; leave max_delay out, or "
            "take a policy that can, such as small_vla."
        )

    @classmethod
    def flow_kind(cls, options: Mapping[str, object]) -> str | None:
        """Returns the `kind` of the flow of a new policy with these options; None if it does not answer by a flow."""
        return None

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Policy:
        """The policy in a folder that `save_pretrained` wrote. `options`: policy_options, and the ``device``."""
        raise ConfigError(f"{cls.__name__} cannot be read from a folder: it has no from_pretrained.")

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes a new folder: whatever the policy needs, and a config.json whose ``model_type`` is its
        registered name, or ``module:Class``."""
        raise ConfigError(f"{type(self).__name__} cannot be written to a folder: it has no save_pretrained.")

    def fit(self, states: np.ndarray, actions: np.ndarray) -> None:
        """A new one is shown all states [N, P] and actions [N, action_dim] of the demonstrations, for statistics
        of its own; by default it keeps none."""


def join(records: Sequence[Record]) -> Record:
    """The rows of all records, one after the other. Where widths differ (prompts), the
    narrower are padded with zeros at their end."""
    if not records:
        raise SchemaError("join() was given no record; give it at least one.")
    names = set(records[0])
    for place, record in enumerate(records):
        if set(record) != names:
            raise SchemaError(
                f"record {place} has the fields {sorted(record)} and record 0 has {sorted(names)}: "
                "only records of one policy with one configuration can be joined."
            )
    return {name: np.concatenate(_widened([record[name] for record in records])) for name in records[0]}


def select(record: Record, rows: int | slice | Sequence[int] | np.ndarray) -> Record:
    """The rows of a record by index, slice or mask."""
    return {name: array[rows] for name, array in record.items()}


def drawn_fields(record: Record) -> Record:
    """The record without what its observations give: see `rejoin`."""
    return {name: array for name, array in record.items() if name not in OBSERVED_FIELDS}


def rejoin(policy: Policy, observations: Sequence[Observation], drawn: Record) -> Record:
    """The whole record again, from `drawn_fields` and the observations that it was drawn for."""
    _, record = policy.act(observations, sample=False)
    return {**record, **drawn}


def widen(record: Record, prompt: int) -> Record:
    """The record with prompts of this width, zeros at their end: a log's columns
    have one shape, whatever the instruction.

    It evaluates to the same numbers within rounding (1e-5): what is summed over a prompt has another width.
    """
    rows, width = record["prompt"].shape
    if prompt < width:
        raise SchemaError(f"a prompt of {width} tokens does not go into a column of {prompt}; make a wider one.")
    wide = np.zeros((rows, prompt), record["prompt"].dtype)
    wide[:, :width] = record["prompt"]
    return {**record, "prompt": wide}


# --- what every policy checks ---


def check_temperature(temperature: float, sample: bool = True) -> None:
    if sample and not 0 < temperature < math.inf:
        raise ConfigError(
            f"a temperature of {temperature} draws nothing; give one above 0, or sample=False for the likeliest."
        )


def check_prefix(policy: Policy, prefix: Prefix | None, rows: int, sample: bool) -> Prefix | None:
    """The prefix as arrays of float32 and int64, checked against the policy and its number of observations.

    A policy that was trained with given actions continues the first `max_delay` of the frozen ones, where there are
    more, and may sample. Others are guided toward the prefix, and a guided draw has no log-probability: they accept it
    without `sample` only.
    """
    if prefix is None:
        return None
    name = type(policy).__name__
    if not policy.takes_prefix:
        raise ConfigError(
            f"act() was given a prefix, and this {name} cannot continue one: leave prefix out, or train the policy "
            "with max_delay=N (hilt train sft), or take a flow."
        )
    actions, frozen = np.asarray(prefix.actions, np.float32), np.asarray(prefix.frozen)
    shape, length = list(actions.shape), actions.shape[1] if actions.ndim == 3 else 0
    if not 1 <= length <= policy.chunk or shape != [rows, length, policy.action_dim]:
        raise SchemaError(
            f"the actions of a prefix have the shape {shape}; expected [{rows}, 1 to {policy.chunk}, "
            f"{policy.action_dim}] for {rows} observations of this {name}."
        )
    if not np.isfinite(actions).all():
        row = int(np.argmin(np.isfinite(actions).all((1, 2))))
        raise SchemaError(f"the prefix of observation {row} has NaN or infinity; give finite actions, or no prefix.")
    if frozen.shape != (rows,) or frozen.dtype.kind not in "iu":
        raise SchemaError(
            f"the frozen of a prefix is {frozen.dtype} {list(frozen.shape)}; expected int64 [{rows}], the number of "
            "actions of each row that are executed before the answer arrives."
        )
    if ((frozen < 0) | (frozen > length)).any():
        wrong = int(frozen[(frozen < 0) | (frozen > length)][0])
        raise SchemaError(
            f"the frozen of a prefix is {wrong} and the prefix has {length} actions; expected 0 to {length}."
        )
    if sample and not policy.max_delay:
        raise ConfigError(
            f"act() was given a prefix and sample=True: the draw of this {name} is guided toward the prefix and has no "
            "log-probability. Give sample=False, or train the policy with max_delay=N (hilt train sft)."
        )
    return Prefix(actions, np.minimum(frozen, policy.max_delay or length).astype(np.int64))


def check_start(policy: Policy, start: npt.ArrayLike, rows: int) -> np.ndarray:
    """The initial noise of `act_from` as float32, checked."""
    given, shape = np.asarray(start, np.float32), [rows, *(policy.start_shape or ())]
    if list(given.shape) != shape:
        raise SchemaError(
            f"act_from() was given noise of the shape {list(given.shape)}; this {type(policy).__name__} takes {shape} "
            f"for {rows} observations."
        )
    if not np.isfinite(given).all():
        row = int(np.argmin(np.isfinite(given).all((1, 2))))
        raise SchemaError(f"the initial noise of observation {row} has NaN or infinity; give finite numbers.")
    return given


def continued(actions: np.ndarray, prefix: Prefix) -> np.ndarray:
    """The actions [B, chunk, action_dim] with the frozen ones of the prefix, exactly, in their places."""
    known = np.zeros_like(actions)
    known[:, : prefix.actions.shape[1]] = prefix.actions
    return np.where((np.arange(actions.shape[1]) < prefix.frozen[:, None])[..., None], known, actions)


def prefix_record(policy: Policy, prefix: Prefix | None, rows: int) -> Record:
    """The fields "prefix" and "frozen" of a record: the actions that were given, in the robot's units, 0 elsewhere.

    Every record of a policy with `max_delay` has them, so that all of its records can be joined."""
    none = np.zeros((rows, policy.chunk, policy.action_dim), np.float32)
    if prefix is None:
        return {"prefix": none, "frozen": np.zeros(rows, np.int32)}
    return {"prefix": continued(none, prefix), "frozen": prefix.frozen.astype(np.int32)}


def frozen_in(record: Record) -> np.ndarray:
    """bool [B, chunk, 1]: which actions of a record with these fields were given."""
    return (np.arange(record["prefix"].shape[1]) < record["frozen"][:, None])[..., None]


def given_in(record: Record) -> Prefix | None:
    """The prefix that a record was made with; None of a record without its fields."""
    return Prefix(record["prefix"], record["frozen"].astype(np.int64)) if "frozen" in record else None


def check_record(record: Mapping[str, object], *names: str) -> None:
    for name in names:
        if name not in record:
            raise MissingFieldError(
                f"this record has no {name!r}, but {', '.join(record)}: it is of another policy, or of another head."
            )


def picture(given: object, name: str, place: int) -> np.ndarray:
    array = np.asarray(given)
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        cure = " Of one from 0 to 1: (255 * picture).round().astype(np.uint8)." if array.dtype.kind == "f" else ""
        raise SchemaError(
            f"{name} of observation {place} is {array.dtype} {list(array.shape)}; expected is uint8 [H, W, 3].{cure}"
        )
    return array


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """Nothing is summed in less."""
    return x.float() if x.dtype.itemsize < 4 else x


def text(instruction: object, place: int) -> str:
    if not isinstance(instruction, str):
        raise SchemaError(f"the instruction of observation {place} is {instruction!r}; expected is text.")
    return instruction


def to_imitate(
    policy: Policy, actions: npt.ArrayLike, mask: npt.ArrayLike, longest: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Actions and mask of `supervised_loss`, checked. Under the mask NaN and infinity
    become 0: after an episode there may be any.

    `longest`: the maximum number of actions, for a policy that predicts more actions than it returns."""
    actions, mask, most = np.asarray(actions), np.asarray(mask, bool), longest or policy.chunk
    if mask.ndim != 2 or not policy.chunk <= mask.shape[1] <= most or actions.shape != (*mask.shape, policy.action_dim):
        length = f"{policy.chunk}" if most == policy.chunk else f"{policy.chunk}..{most}"
        raise SchemaError(
            f"actions of the shape {list(actions.shape)} with a mask of {list(mask.shape)} were given; they are "
            f"[B, {length}, {policy.action_dim}] and [B, {length}]."
        )
    return np.where(mask[..., None], actions, np.nan_to_num(actions, posinf=0.0, neginf=0.0)), mask


def _widened(arrays: list[np.ndarray]) -> list[np.ndarray]:
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) == 1:
        return arrays
    widest = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    return [
        np.pad(array, [(0, 0), *((0, most - size) for most, size in zip(widest, array.shape[1:], strict=True))])
        for array in arrays
    ]
