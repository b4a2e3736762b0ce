"""What pi0 and SmolVLA share: a prefix that is read once, a flow over the suffix, and folders of files.

A subclass defines its modules (`build`), how it encodes the prefix (`prefix`) and the suffix (`suffix`), and the format
of a prompt. Here is the rest: observations to tensors and back to actions, log-probabilities by
`hilt.policies.vla.flow`, the loss of imitation, a value head, and folders as openpi and lerobot write them.
"""

from __future__ import annotations

import contextlib
import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hilt.core.errors import ConfigError, MissingFieldError, SchemaError
from hilt.policies.base import (
    CONDITION,
    Evaluation,
    Observation,
    ObservedFields,
    Prefix,
    Record,
    at_least_float32,
    check_prefix,
    check_record,
    check_start,
    check_temperature,
    continued,
    given_in,
    prefix_record,
    to_imitate,
)
from hilt.policies.condition_embedding import condition_field, conditioned_token
from hilt.policies.float8 import Float8Rollouts
from hilt.policies.flow_context import SEEN, Context, LastContext, seen_in
from hilt.policies.graphs import Graphs, bucket, compiling, with_more_rows
from hilt.policies.io import flow_folders
from hilt.policies.io.observed_record import pictures_in_slots
from hilt.policies.io.preprocess import resize_with_pad, to_float, with_all_slots
from hilt.policies.vla import augment
from hilt.policies.vla import flow as flows
from hilt.policies.vla.flow import seeded
from hilt.policies.vla.flow_config import FlowPolicyConfig
from hilt.policies.vla.gemma import (
    MLP,
    GemmaAttention,
    Runner,
    SiglipAttention,
    compiled,
    for_gradients,
    in_precision,
    mean_values,
    mlp,
    plain,
    projected,
    quick,
    row_of,
)
from hilt.policies.vla.normalize import Normalizer
from hilt.policies.vla.tokens import fitted_ids, padded

if TYPE_CHECKING:
    from typing_extensions import Self


BATCHES = (1, 2, 4, 8, 16, 32, 64)
"""Rows for which a decision is captured: fewer are filled up"""
LENGTHS = 4
"""Lengths of a prompt for which a decision is captured: shorter ones are filled up"""


class FlowPolicy(Float8Rollouts):
    """A flow over a chunk of actions, given pictures, words and a state."""

    config: FlowPolicyConfig
    config_class: ClassVar[type[FlowPolicyConfig]]
    anchor: ClassVar[str] = "center"
    """Where a picture lies in the square that it is fitted into"""
    big: ClassVar[str]
    """The module with the two stacks; what is beside it stays in float32"""
    tied: ClassVar[tuple[str, str]]
    """Two names of one parameter: the head for words, and their embedding"""
    recomputation_option = "gradient_checkpointing"
    stored_prefix: ClassVar[str] = ""
    """Of the names in files that we write"""
    guide: Callable[[flows.Field], flows.Field] | None = None
    """What is made of a field before it is followed: see `hilt.policies.guidance`"""

    def __init__(
        self,
        config: FlowPolicyConfig,
        tokenizer: Any = None,
        statistics: Mapping[str, Any] | None = None,
        seed: int = 0,
    ):
        """`tokenizer.encode(text)` gives the ids of a prompt. `statistics`: of "state" and "action", by which they are
        normalized.

        Weights are drawn from `seed`; those of a folder replace them.
        """
        super().__init__()
        self.config, self.tokenizer, self.rollout_precision = config, tokenizer, config.rollout_precision
        self.use_statistics(statistics or {})
        self.chunk, self.action_dim, self.horizon = config.n_action_steps, config.action_dim, config.chunk_size
        self.max_delay = config.max_delay
        self._graphs: Graphs | None = None
        self._last = LastContext()
        self.source: Path | None = None
        """The folder that it came from."""
        with seeded(seed):
            self.build()
        self.add_heads(seed=seed)
        self.freeze()

    def add_heads(self, device: torch.device | str | None = None, seed: int = 0) -> None:
        """New heads of the kinds that the configuration asks for."""
        prefix_width, expert_width = self.config.widths
        with seeded(seed):
            if self.config.value:
                width = prefix_width if self.config.value == "prefix" else expert_width
                self.value_head = mlp((width, 512, 256, 128, 1), nn.ReLU).to(device)
            if self.config.flow.kind == "noise":
                self.noise_head = mlp((expert_width, 128, 64, self.config.max_action_dim), nn.Tanh).to(device)

    def use_statistics(self, statistics: Mapping[str, Any], name: str = "") -> None:
        """Normalizes by these from now on, and saves them: of "action" and "state" (or
        "proprio"), as `normalize.statistics` makes them.

        They may have an `epsilon`, if it is not 1e-8. The name of the dataset plays no role: these policies have one.
        """
        kinds = {"state": self.config.state_normalization, "action": self.config.action_normalization}
        self.statistics = {{"proprio": "state"}.get(key, key): dict(stats) for key, stats in statistics.items()}
        self.normalizers = {
            key: Normalizer(stats, kinds[key], stats.get("epsilon", 1e-8))
            for key, stats in self.statistics.items()
            if kinds.get(key)
        }

    # --- the parts of a subclass ---

    @abstractmethod
    def build(self) -> None:
        """Makes the modules, under the names that the published checkpoints have, among them `action_out_proj`."""

    @abstractmethod
    def freeze(self) -> None:
        """Sets aside the parameters that are not trained."""

    @abstractmethod
    def prefix(
        self,
        pixels: Tensor,
        present: Tensor,
        prompt: Tensor,
        worded: Tensor,
        state: Tensor,
        run: Runner = plain,
        condition: Tensor | None = None,
    ) -> Context:
        """Reads pictures [B, slots, 3, H, W], of which [B, slots] are `present`, ids [B, L], of
        which [B, L] are `worded`, a state, and the number of a condition [B]."""

    @abstractmethod
    def moments(self, times: Tensor) -> Any:
        """Computes what depends on the times alone, which are [B], or [B, horizon] for each action. With one row, it
        is the same for the whole batch."""

    @abstractmethod
    def suffix(self, context: Context, noisy: Tensor, moments: Any) -> Tensor:
        """The expert's output float32 [B, horizon, width] of actions [B, horizon, max_action_dim] at `moments`."""

    def other_name(self, name: str) -> str:
        """What a parameter is called in some checkpoints."""
        return name

    @abstractmethod
    def prompt(self, instruction: str, state: np.ndarray) -> str:
        """The text that is read, given the normalized state."""

    # --- the protocol ---

    @property
    def takes_prefix(self) -> bool:
        return True

    def act(
        self,
        observations: Sequence[Observation],
        sample: bool = True,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[np.ndarray, Record]:
        check_temperature(temperature, sample)
        prefix = check_prefix(self, prefix, len(observations), sample)
        record = self._read(observations, as_they_are=self._captures())
        draws = flows.draws(self._shape(len(observations)), self.config.flow, generator, sample)
        return self._act(record, draws, temperature, prefix)

    @property
    def start_shape(self) -> tuple[int, int]:
        return self._shape(1)[1:]

    def act_from(self, observations: Sequence[Observation], start: np.ndarray) -> np.ndarray:
        noise = torch.from_numpy(check_start(self, start, len(observations)))
        record = self._read(observations, as_they_are=self._captures())
        return self._act(record, flows.Draws(noise, torch.full((len(noise),), -1), None))[0]

    def _act(
        self, record: Record, draws: flows.Draws, temperature: float = 1.0, prefix: Prefix | None = None
    ) -> tuple[np.ndarray, Record]:
        """The answer to what was read, by these draws."""
        record["temperature"] = np.full(len(draws.start), temperature, np.float32)
        if self.max_delay:
            record |= prefix_record(self, prefix, len(draws.start))
        with self.acting():
            found = self._answer(record, given_in(record) if self.max_delay else prefix, draws)
        actions = self._normalize("action", found.pop("actions"), back=True)
        if "images" in found:
            found["images"] = with_all_slots(found["images"], record["image_mask"])
        record |= found
        return continued(actions, prefix) if self.max_delay and prefix is not None else actions, record

    def _shape(self, rows: int) -> tuple[int, int, int]:
        return rows, self.horizon, self.config.max_action_dim

    def _answer(self, record: Record, given: Prefix | None, draws: flows.Draws) -> dict[str, np.ndarray]:
        """The actions of the model, and what a record has of them."""
        asked = seen_in(record, self.config.max_state_dim) | {"temperature": torch.from_numpy(record["temperature"])}
        asked |= {name: each for name, each in draws._asdict().items() if each is not None}
        if given is not None:
            asked |= {"given": torch.from_numpy(self._normalize("action", given.actions))}
            asked |= {"frozen": torch.from_numpy(given.frozen)}
        if (given is None or self.max_delay) and self._captures():  # what is guided needs gradients
            made = self._captured(asked)
        else:
            with torch.no_grad():
                placed = {name: self._placed(each) for name, each in asked.items()}
                kept = self._last if self.keeps_context else None
                made = {name: each.cpu() for name, each in self._decide(placed, kept=kept).items()}
        return {name: each.numpy() for name, each in made.items()}

    def _decide(
        self, asked: Mapping[str, Tensor], run: Runner = plain, kept: LastContext | None = None
    ) -> dict[str, Tensor]:
        """The answer to `asked` on its device: what was seen, what was drawn, and which actions are given. Nothing in
        it waits for the device, unless there is a context that may be `kept`."""
        given = None
        if "given" in asked:
            given = flows.given_actions(asked["given"], asked["frozen"], self.horizon, self.config.max_action_dim)
        images, size = asked["images"], self.config.image_size
        if fitted := images.shape[2:4] != (size, size):
            images = resize_with_pad(images.flatten(0, 1), size, anchor=self.anchor).unflatten(0, images.shape[:2])
        seen = {name: each for name, each in asked.items() if name in SEEN} | {"images": images}
        context = self._context(seen, run) if kept is None else kept.of(seen, lambda: self._context(seen, run))
        fields: flows.Field | list[flows.Field]
        if given is not None:
            fields = self._field(context, given) if self.max_delay else flows.guided(self._field(context), given)
        else:  # eager ones have the shapes of `evaluate`, and so its numbers to the bit
            fields = self._field(context) if run is plain else self._fields(context)
        draws = flows.Draws(asked["start"], asked["first"], asked.get("noise"))
        drawn = flows.follow(fields, draws, self.config.flow, asked["temperature"])
        value = self._value(context) if self.config.value == "prefix" else drawn.value
        answer = {
            "actions": self._answered(drawn.actions),
            "chain": drawn.chain,
            "step": drawn.step.int(),
            "log_prob": self._answered(_open(drawn.log_prob, given if self.max_delay else None)),
        }
        answer |= {"answer": drawn.actions} if self.keeps_answers else {}
        answer |= {"features": mean_values(context.cache, context.valid)} if self.keeps_features else {}
        answer |= {"images": images} if fitted else {}
        return answer if value is None else answer | {"value": value}

    def evaluate(self, record: Record) -> Evaluation:
        check_record(record, "images", "image_mask", "prompt", "prompt_length", "state", "chain", "step", "temperature")
        chain, step, temperature = (self._tensor(record[name]) for name in ("chain", "step", "temperature"))
        given = self._given(given_in(record))
        with compiling() if self._compiles() else contextlib.nullcontext():
            context = self._prefix(record)
            found = flows.evaluate(self._field(context, given), chain, step.long(), self.config.flow, temperature)
        value = self._value(context) if self.config.value == "prefix" else found.value
        log_prob, entropy = (self._answered(_open(each, given)) for each in (found.log_prob, found.entropy))
        return Evaluation(log_prob, entropy, value)

    def features(self, observations: Sequence[Observation]) -> Tensor:
        with torch.no_grad():
            context = self._prefix(self._read(observations))
            return mean_values(context.cache, context.valid)

    def flow_error(self, record: Record, noise: Tensor, times: Tensor) -> Tensor:
        check_record(record, "images", "image_mask", "prompt", "prompt_length", "state", "answer")
        answer, given = self._tensor(record["answer"]), self._given(given_in(record))
        with compiling() if self._compiles() else contextlib.nullcontext():
            field = self._field(self._prefix(record), given)
            errors = flows.velocity_errors(field, answer, self._placed(noise), self._placed(times), given)
        return errors[:, :, : self.chunk, : self.action_dim]

    def supervised_loss(
        self,
        observations: Sequence[Observation],
        actions: np.ndarray,
        mask: np.ndarray,
        generator: torch.Generator | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The flow's mean square error. `actions` may be `chunk` to `horizon` long; what is missing is masked."""
        if generator is None:
            raise ConfigError(
                "the loss of a flow draws noise and times: give supervised_loss() a generator of the CPU."
            )
        known, mask = to_imitate(self, actions, mask, self.horizon)
        rows, length, dim = known.shape
        wanted = self._normalize("action", known.astype(np.float32))
        wanted = np.pad(wanted, [(0, 0), (0, self.horizon - length), (0, 0)], mode="edge")
        wanted = np.pad(wanted, [(0, 0), (0, 0), (0, self.config.max_action_dim - dim)])
        noise = torch.randn(wanted.shape, generator=generator).to(self.device)
        times = flows.training_times(rows, generator)
        record = self._read(observations)
        images = self._augmented(record, generator) if self.training and self.config.augment else None
        weights = self._tensor(np.asarray(mask, np.float32))[..., None].expand(-1, -1, dim)
        if self.max_delay:  # the given actions are clean: of time 0, and not to be learned
            delays = flows.training_delays(mask, self.max_delay, generator)
            free = torch.arange(self.horizon) >= delays[:, None]
            times, weights = times[:, None] * free, weights * free[:, :length, None].to(self.device)
        with compiling() if self._compiles() else contextlib.nullcontext():
            loss = self.flow_loss(self._prefix(record, images), self._tensor(wanted), noise, times)
        loss = (loss[:, :length, :dim] * weights).sum() / weights.sum().clamp(min=1)
        return loss, {"flow_loss": loss.item()}

    def flow_loss(self, context: Context, actions: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        """The square error of the velocity, for each number: [B, horizon, max_action_dim]. `times` are [B], or
        [B, horizon] of each action."""
        times = times.to(self.device)
        noisy, velocity = flows.toward(actions, noise, times)
        return (self.action_out_proj(self.suffix(context, noisy, self.moments(times))) - velocity).square()

    # --- inputs and outputs ---

    def _fields(self, context: Context) -> list[flows.Field]:
        """The field of each step of the flow; what depends on its time alone is computed for all of them together."""
        times = flows.schedule(self.config.flow, self.action_out_proj.weight)[:-1]
        moments = self.moments(times)
        return [self._field(context, moments=row_of(moments, place)) for place in range(len(times))]

    def _field(self, context: Context, given: flows.Given | None = None, moments: Any = None) -> flows.Field:
        """The field of a trained policy, with `given` actions in their places, of time 0. `moments` of its time, if
        they are known."""
        config = self.config

        def field(noisy: Tensor, times: Tensor) -> flows.FlowStep:
            if given is not None:
                noisy, times = given.within(noisy), torch.where(given.frozen[..., 0], 0.0, times[:, None])
            features = self.suffix(context, noisy, self.moments(times) if moments is None else moments)
            std = flows.bounded_std(self.noise_head(features), config.flow) if config.flow.kind == "noise" else None
            value = self._critic(features.mean(1)) if config.value == "actions" else None
            return flows.FlowStep(context.run(projected, self.action_out_proj, features), std, value)

        return field if self.guide is None else self.guide(field)

    def forget_context(self) -> None:
        self._last.forget()

    def field_of(self, observations: Sequence[Observation]) -> flows.Field:
        """Returns the field of observations, whose context is computed once."""
        return self._field(self._prefix(self._read(observations)))

    def _given(self, prefix: Prefix | None) -> flows.Given | None:
        if prefix is None:
            return None
        actions = self._tensor(self._normalize("action", prefix.actions))
        frozen = torch.from_numpy(prefix.frozen).to(self.device)
        return flows.given_actions(actions, frozen, self.horizon, self.config.max_action_dim)

    def _value(self, context: Context) -> Tensor:
        """Returns the value of the mean over the valid tokens of the language model's output."""
        assert context.output is not None  # where the value is read from it
        valid = context.valid[..., None]
        return self._critic((at_least_float32(context.output) * valid).sum(1) / valid.sum(1))

    def _critic(self, features: Tensor) -> Tensor:
        return self.value_head(features.detach() if self.config.detach_value else features)[:, 0]

    def _augmented(self, record: Record, generator: torch.Generator) -> Tensor:
        """The pictures of a record on the device, each changed by chance."""
        images = self._tensor(record["images"])
        wrist = torch.tensor(["wrist" in name for name in self.config.images]).repeat(len(images))
        return augment.openpi(images.flatten(0, 1), wrist, generator).unflatten(0, images.shape[:2])

    def _prefix(self, record: Record, images: Tensor | None = None) -> Context:
        """The context of a record, with gradients."""
        seen = {name: self._placed(each) for name, each in seen_in(record, self.config.max_state_dim, images).items()}
        run = for_gradients(self, self.config.gradient_checkpointing, compiles := self._compiles())
        return self._context(seen | self._filled_up(seen) if compiles else seen, run)

    def _context(self, seen: Mapping[str, Tensor], run: Runner) -> Context:
        present, prompt, worded, state = (seen[name] for name in ("present", "prompt", "worded", "state"))
        run = in_precision(run, self.config.compute)
        return self.prefix(run(to_float, seen["images"]), present, prompt, worded, state, run, seen.get(CONDITION))

    def state_token(self, state: Tensor, condition: Tensor | None) -> Tensor:
        """The token of a state, with the embedding of its condition if there is one."""
        return conditioned_token(self, self.state_proj(state), condition)

    # --- layers that are compiled, and decisions that are captured as CUDA graphs ---

    def _compiles(self) -> bool:
        """Whether gradients go through compiled layers."""
        if self.config.learning == "auto":
            return self._on_one_gpu() and importlib.util.find_spec("triton") is not None
        return self.config.learning == "compiled"

    def _captures(self) -> bool:
        """Whether decisions are captured."""
        return self.guide is None and self.config.acting != "eager" and self._on_one_gpu()

    def _on_one_gpu(self) -> bool:
        """Whether the weights are on CUDA, in one piece, and not only now and then: `unshard` is a method of FSDP's
        modules."""
        if self.device.type != "cuda" or hasattr(self, "unshard"):
            return False
        return all(type(weight.data) is Tensor for weight in self.action_out_proj.parameters())

    def _captured(self, asked: dict[str, Tensor]) -> dict[str, Tensor]:
        """The answer by a CUDA graph of these shapes, filled up to one of a few sizes."""
        if self._graphs is None or self._graphs.device != self.device:
            made = self._graphs = Graphs(self._captured_decision, self, self.device, before=self._join_layers)
            made.meanwhile = lambda asked, **_: self._decide(asked)
        self._graphs.aside = self.compiles_aside and not self.in_float8  # whose layers are so only within `acting`
        rows = len(asked["prompt"])
        more = bucket(rows, BATCHES) - rows
        asked |= self._filled_up(asked)
        filled = {name: with_more_rows(each, more, 1 if name == "noise" else 0) for name, each in asked.items()}
        acting = self.config.acting
        if acting in ("auto", "fused"):  # a GPU whose torch came without Triton cannot compile
            acting = "fused" if importlib.util.find_spec("triton") else "captured"
        return {name: each[:rows] for name, each in self._graphs(filled, acting=acting, float8=self.in_float8).items()}

    def _captured_decision(self, asked: Mapping[str, Tensor], acting: str, float8: bool) -> dict[str, Tensor]:
        """`float8` is what the layers know already: each precision has graphs of its own."""
        if acting == "captured":
            return self._decide(asked)
        with compiling():
            return self._decide(asked, compiled() if acting == "compiled" else quick)

    def _filled_up(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The prompts, as long as one of the lengths for which layers are compiled."""
        words = seen["prompt"].shape[1]
        more = bucket(words, self._prompt_lengths()) - words
        return {name: F.pad(seen[name], (0, more)) for name in ("prompt", "worded")}

    def _prompt_lengths(self) -> tuple[int, ...]:
        """A few lengths, so that prompts which differ by a few words (a state, say) share a graph."""
        longest = self.config.tokenizer_max_length
        step = 8 * -(-longest // (8 * LENGTHS))
        return tuple(min(length, longest) for length in range(step, longest + step, step))

    def warm_up(self, sample: bool, notify: Callable[[str], None]) -> None:
        if not self._captures():
            return
        lengths = self._prompt_lengths()
        size, slots = self.config.image_size, len(self.config.images)
        record: Record = {
            "images": np.zeros((1, slots, size, size, 3), np.uint8),
            "image_mask": np.ones((1, slots), bool),
            "state": np.zeros((1, self.config.state_dim), np.float32),
            "temperature": np.ones(1, np.float32),
        }
        for place, length in enumerate(lengths):
            notify(f"compiling decisions of one robot, prompts of up to {length} tokens: {place} of {len(lengths)}")
            record |= {"prompt": np.zeros((1, length), np.int32), "prompt_length": np.full(1, length, np.int32)}
            record |= prefix_record(self, None, 1) if self.max_delay else {}
            record |= condition_field(self, [{}])
            given = given_in(record) if self.max_delay else None
            generator = torch.Generator().manual_seed(0)
            with self.acting():
                self._answer(record, given, flows.draws(self._shape(1), self.config.flow, generator, sample))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Weights are moved: graphs that would read them where they were are dropped, with what keeps them there."""
        self._graphs = None
        self._last.forget()
        for module in self.modules():
            if isinstance(module, (MLP, GemmaAttention, SiglipAttention)):
                module.joined.forget()
        moved: Self = super()._apply(fn, recurse)
        return moved

    def _join_layers(self) -> None:
        """Projections of one input become one product."""
        for module in self.modules():
            if isinstance(module, MLP):
                module.joined.join(module.gate_proj, module.up_proj)
            elif isinstance(module, (GemmaAttention, SiglipAttention)) and not module.crosses:
                module.joined.join(module.q_proj, module.k_proj, module.v_proj)

    def observed_fields(self) -> ObservedFields:
        return ObservedFields(tuple(self.config.images), self.config.state_dim, all_cameras=False)

    def _read(self, observations: Sequence[Observation], as_they_are: bool = False) -> Record:
        """The part of a record that comes from the observations. Pictures `as_they_are` have their own size, if they
        have the same."""
        if not observations:
            raise SchemaError("there is no observation; give at least one.")
        if self.tokenizer is None:
            raise ConfigError(
                "the policy has no tokenizer: give from_pretrained() the folder of one, tokenizer=FOLDER."
            )
        states = np.stack([self._state(row, observation) for row, observation in enumerate(observations)])
        states = self._normalize("state", states)
        longest = self.config.tokenizer_max_length
        ids = [
            fitted_ids(self.tokenizer, partial(self.prompt, state=state), observation, row, longest)
            for row, (observation, state) in enumerate(zip(observations, states, strict=True))
        ]
        prompt, lengths = padded(ids)
        images, present = pictures_in_slots(
            observations, self.config.images, self.config.image_size, as_they_are, self.anchor, self.device
        )
        words = {"prompt": prompt, "prompt_length": lengths}
        asked = condition_field(self, observations)
        return {"images": images, "image_mask": present, **words, "state": states, **asked}

    def _state(self, row: int, observation: Observation) -> np.ndarray:
        for name in ("state", "instruction"):
            if name not in observation:
                raise MissingFieldError(
                    f"observation {row} has the fields {sorted(observation)} and no {name}: it needs one."
                )
        state = np.asarray(observation["state"], np.float32)
        if state.shape != (self.config.state_dim,):
            raise SchemaError(
                f"the state of observation {row} has the shape {list(state.shape)}; expected is "
                f"[{self.config.state_dim}]."
            )
        return state

    def _normalize(self, name: str, x: np.ndarray, back: bool = False) -> np.ndarray:
        if (normalizer := self.normalizers.get(name)) is None:
            return x
        result: np.ndarray = (normalizer.unnormalize(x) if back else normalizer.normalize(x)).astype(np.float32)
        return result

    def _answered(self, x: Tensor) -> Tensor:
        return x[:, : self.chunk, : self.action_dim]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return self._placed(torch.from_numpy(array))

    def _placed(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device)
        return tensor.to(self.action_out_proj.weight.dtype) if tensor.is_floating_point() else tensor

    # --- folders ---

    @classmethod
    def delay_options(cls, max_delay: int) -> dict[str, Any]:
        return {"max_delay": max_delay}

    @classmethod
    def value_options(cls, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"value": options.get("value", "auto"), "detach_value": kind == "detached"}

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = torch.float32,
        tokenizer: Any = None,
        **options: Any,
    ) -> Self:
        """The policy in a folder of openpi, lerobot or ours, read as files. See
        `hilt.policies.io.flow_folders.load`."""
        return flow_folders.load(cls, Path(folder), device, dtype, tokenizer, options)

    def save_pretrained(self, folder: str | Path) -> None:
        """A complete folder, which from_pretrained and the policy's own library open."""
        flow_folders.save(self, Path(folder))


def _open(numbers: Tensor, given: flows.Given | None) -> Tensor:
    return numbers if given is None else given.apart(numbers)
