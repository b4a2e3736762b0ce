"""Our own small vision-language-action model, 0.5M to 20M parameters: it trains on a CPU, and is what the demos use.

    policy = SmallVLA(SmallVLAConfig(cameras=("full_image",), state_dim=8, chunk=5,
    action_dim=7, head="tokens"), seed=0)
    policy.fit(states, actions)                      # what numbers are usual, before anything is learned
    loss, figures = policy.supervised_loss(observations, actions, mask, generator)

The instruction determines where to look: it is encoded as queries, each query finds a
position in each image (a softmax over the places of a
convolution's map), and what is seen there, and where, becomes a token. Places are numbers too, so how far
two things are from each other is one subtraction away. This is a strong bias toward tasks about things in
places; ``vision="patches"`` has none of it. A few transformer layers join tokens, words and state. Their
first token is what the head (policies/vla/heads.py) sees.

Nothing is padded but the words, and these are read once for all rows that have the same ones.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from hilt.core.errors import ConfigError, SchemaError, suggest
from hilt.core.files import new_folder
from hilt.core.validate import Need, check, setting
from hilt.policies.base import (
    CONDITION,
    Evaluation,
    Observation,
    ObservedFields,
    Prefix,
    Record,
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
from hilt.policies.float8 import ROLLOUT_PRECISIONS, Float8Rollouts
from hilt.policies.io.lora import merged
from hilt.policies.io.observed_record import observed_record
from hilt.policies.io.tensor_files import Tensors, check_device, load_into, read_json, write_tensors
from hilt.policies.knots import Knots
from hilt.policies.observation_tokens import TEXT_WIDTH, Keypoints, Patches, Text, observation_tokens
from hilt.policies.precision import PRECISIONS, in_bfloat16, of_former_name
from hilt.policies.vla.augment import shifted
from hilt.policies.vla.flow import Flow, Given, given_actions, training_delays
from hilt.policies.vla.heads import FlowHead, GaussianHead, GivenActions, TokensHead
from hilt.policies.vla.tokens import ByteTokenizer, padded

MODEL_TYPE = "hilt_small_vla"
MIN_DEVIATION = 1e-3
MEMORIES = {"tokens": ("tokens",), "gaussian": ("actions",), "flow": ("chain", "step")}
"""What each head remembers, by its name in a record"""


_TOKENS = Need("head=tokens", lambda c: c.head == "tokens")


@dataclass(frozen=True)
class SmallVLAConfig:
    """Sizes, and how it answers. About 1M parameters as it is; width 256 and depth 6 make 5M, 512 and 6 make 20M."""

    cameras: tuple[str, ...] = ("full_image",)
    """Pictures of an observation, by name"""
    image_size: int = setting(64, minimum=16)
    """Pixels of their sides, a multiple of 16; others are resized"""
    state_dim: int = setting(8, minimum=0)
    """Numbers of proprioception; 0: none is looked at"""
    chunk: int = setting(5, minimum=1)
    """Actions in one answer"""
    knots: int = setting(0, minimum=0, off=0)
    """The number of actions of an answer that the head decides, evenly over the chunk: between them it goes in straight
    lines, so that there are fewer decisions and what is drawn is smooth; 0: it decides each action by itself"""
    action_dim: int = setting(7, minimum=1)
    """Numbers in one action"""
    head: str = setting("tokens", choices=tuple(MEMORIES))
    """How it answers: "tokens", "gaussian" or "flow" """
    bins: int = setting(13, minimum=2, needs=_TOKENS)
    """Of "tokens", evenly over the range of each number, both ends included. Few explore better than many"""
    decode: str = setting("mean", choices=("mean", "likeliest"), needs=_TOKENS)
    """Of "tokens" without sampling: the "mean" over the bins, or the "likeliest" bin"""
    smoothing: float = setting(1.0, minimum=0, needs=_TOKENS)
    """Of "tokens" when imitating: the deviation, in bins, of the labels around what
    was shown; 0: the nearest bin alone"""
    std: float = setting(0.3, above=0, needs=Need("head=gaussian", lambda c: c.head == "gaussian"))
    """Of "gaussian" at the start, where each number ranges from -1 to 1"""
    flow: Flow = setting(factory=lambda: Flow(steps=5), needs=Need("head=flow", lambda c: c.head == "flow"))
    """Of "flow" """
    value: str = setting("none", choices=("none", "shared", "detached"))
    """A value head: "shared" trains the trunk too, "detached" itself alone"""
    vision: str = setting("keypoints", choices=("keypoints", "patches"))
    """What a picture becomes: "keypoints" that the words ask for, or "patches" of 16 pixels"""
    keypoints: int = setting(8, minimum=1, needs=Need("vision=keypoints", lambda c: c.vision == "keypoints"))
    """In each picture"""
    width: int = setting(128, minimum=1)
    """Of the trunk"""
    depth: int = setting(4, minimum=1)
    """Layers of the trunk"""
    heads: int = setting(4, minimum=1)
    """Of its attention"""
    max_delay: int = setting(0, minimum=0)
    """In imitation up to this many actions at the start of a chunk are given, at random, so that an answer can continue
    what is executed meanwhile; 0: none"""
    shift: int = setting(0, minimum=0)
    """The maximum shift of images in each direction for imitation, in pixels"""
    precision: str = setting("auto", choices=PRECISIONS)
    """Of convolutions and the trunk's matrix products: "float32", "bfloat16" (faster on processors
    that have it, far slower on others), or "auto": the faster one. A run decides when it begins;
    the folder of a policy does not contain it"""
    rollout_precision: str = setting("same", choices=ROLLOUT_PRECISIONS)
    """Of the trunk's matrix products while it acts: "same" as it learns; "fp8", or "fp8_emulated" on any device, to
    study what rollouts in float8 do to learning. The folder of a policy does not contain it"""

    def __post_init__(self) -> None:
        check(self)

    def conflicts(self, here: str) -> Iterator[str]:
        if not self.cameras or self.image_size % 16:
            yield (
                f"{here}cameras {self.cameras} of {self.image_size} pixels: give at least one, "
                "and a multiple of 16 pixels."
            )
        if self.width % self.heads:
            yield f"{here}width is {self.width}; it is a multiple of heads, which is {self.heads}."
        if self.max_delay >= self.chunk:
            yield (
                f"{here}max_delay is {self.max_delay} and chunk is {self.chunk}: an answer has more actions than are "
                "given. Give a smaller max_delay, or a larger chunk."
            )

        if self.knots == 1 or self.knots > self.chunk:
            yield (
                f"{here}knots is {self.knots} and chunk is {self.chunk}: give 2 to {self.chunk}, or 0 to decide each "
                "action."
            )
        if self.knots and self.max_delay:
            yield (
                f"{here}max_delay={self.max_delay} gives the head the first actions of a chunk one by one, and with "
                f"{here}knots={self.knots} it does not decide them so. Leave one of them out."
            )

    @classmethod
    def from_json(cls, found: Mapping[str, object]) -> SmallVLAConfig:
        """From what `to_json` gave. A key that is not known is refused."""
        settings = of_former_name({key: value for key, value in found.items() if key != "model_type"})
        if isinstance(flow := settings.get("flow"), Mapping):
            settings["flow"] = _made(Flow, flow)
        result: SmallVLAConfig = _made(cls, settings)
        return result

    def to_json(self) -> dict[str, object]:
        """Returns all settings except the precisions, which depend on the machine."""
        settings = dataclasses.asdict(self)
        del settings["precision"], settings["rollout_precision"]
        return {"model_type": MODEL_TYPE, **settings}


class SmallVLA(Float8Rollouts):
    """A policy by the protocol of `policies/base.py`. All that is random at its birth comes from `seed`."""

    precision_option = "precision"
    learning_rate = 3e-4

    def __init__(self, config: SmallVLAConfig, seed: int = 0):
        super().__init__()
        self.config, self.rollout_precision = config, config.rollout_precision
        self.chunk, self.action_dim, self.max_delay = config.chunk, config.action_dim, config.max_delay
        self.knots = Knots(config.chunk, config.knots) if config.knots else None
        self.decides = self.knots.decides if self.knots else None
        width, cameras = config.width, len(config.cameras)
        # what torch draws here is drawn again below; the meta device would import its compiler
        with torch.random.fork_rng(devices=[]):
            self.eyes = (
                Keypoints(width, cameras, config.keypoints, config.precision)
                if config.vision == "keypoints"
                else Patches(width, cameras, config.image_size, config.precision)
            )
            self.text = Text()
            self.words = nn.Linear(TEXT_WIDTH, width)
            self.summary = nn.Sequential(
                nn.Linear(config.state_dim + self.eyes.places, width), nn.ReLU(), nn.Linear(width, width)
            )
            self.blocks = nn.ModuleList([TransformerBlock(width, config.heads) for _ in range(config.depth)])
            self.norm = nn.LayerNorm(width)
            self.action_head = _head(config)
            self.value_head = (
                nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
                if config.value != "none"
                else None
            )
        initialize(self, torch.Generator().manual_seed(seed))
        for name, size, first in (("state_mean", config.state_dim, 0.0), ("state_std", config.state_dim, 1.0)):
            self.register_buffer(name, torch.full((size,), first))
        for name, size, first in (("action_low", config.action_dim, -1.0), ("action_high", config.action_dim, 1.0)):
            self.register_buffer(name, torch.full((size,), first))

    @classmethod
    def create(cls, sizes: Mapping[str, object], options: Mapping[str, object], seed: int) -> SmallVLA:
        if not {**sizes, **options}["cameras"]:
            raise ConfigError(
                "the observations have no picture: a small_vla looks at one at least. Name it in columns=."
            )
        return cls(SmallVLAConfig.from_json({**sizes, **options}), seed=seed)

    @classmethod
    def check_options(cls, options: Mapping[str, object]) -> None:
        SmallVLAConfig.from_json(options)

    @classmethod
    def value_options(cls, kind: str, options: Mapping[str, object]) -> dict[str, object]:
        return {"value": kind}

    @classmethod
    def delay_options(cls, max_delay: int) -> dict[str, object]:
        return {"max_delay": max_delay}

    @classmethod
    def flow_kind(cls, options: Mapping[str, object]) -> str | None:
        config = SmallVLAConfig.from_json(options)
        return config.flow.kind if config.head == "flow" else None

    @property
    def takes_prefix(self) -> bool:
        """A flow can be guided toward any prefix; other heads must be trained with given actions. With knots no head
        knows single actions."""
        return self.knots is None and (self.config.head == "flow" or self.max_delay > 0)

    def act(
        self,
        observations: Sequence[Observation],
        sample: bool = True,
        temperature: float = 1.0,
        generator: Generator | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[np.ndarray, Record]:
        check_temperature(temperature, sample)
        prefix = check_prefix(self, prefix, len(observations), sample)
        record = self._record(observations)
        if self.max_delay:
            record |= prefix_record(self, prefix, len(observations))
        given = self._given(given_in(record) if self.max_delay else prefix)
        heat = torch.full((len(observations),), temperature, device=self.device)
        with torch.no_grad(), self.acting():
            features, value = self._features(record)
            drawn = self.action_head.draw(features, heat, generator, sample, given)
            actions = self.as_actions(drawn.actions)
        for name, tensor in drawn.memory.items():
            record[name] = tensor.to(tensor.dtype if tensor.is_floating_point() else torch.int32).cpu().numpy()
        log_prob = given.apart(drawn.log_prob) if given is not None and self.max_delay else self._placed(drawn.log_prob)
        record["temperature"], record["log_prob"] = heat.cpu().numpy(), log_prob.cpu().numpy()
        record |= {"answer": drawn.actions.cpu().numpy()} if self.keeps_answers else {}
        record |= {"features": features.float().cpu().numpy()} if self.keeps_features else {}
        if value is not None:
            record["value"] = value.cpu().numpy()
        answer = actions.cpu().numpy()
        return continued(answer, prefix) if self.max_delay and prefix is not None else answer, record

    @property
    def start_shape(self) -> tuple[int, int] | None:
        shape: tuple[int, int] = self.action_head.shape
        return shape if self.config.head == "flow" else None

    def act_from(self, observations: Sequence[Observation], start: np.ndarray) -> np.ndarray:
        if self.start_shape is None:
            return super().act_from(observations, start)
        noise = torch.from_numpy(check_start(self, start, len(observations))).to(self.device)
        record = self._record(observations)
        given = self._given(given_in(record | prefix_record(self, None, len(observations)))) if self.max_delay else None
        with torch.no_grad(), self.acting():
            features, _ = self._features(record)
            drawn = self.action_head.draw(features, torch.ones_like(features[:, 0]), None, False, given, start=noise)
            found: np.ndarray = self.as_actions(drawn.actions).cpu().numpy()
        return found

    def evaluate(self, record: Record) -> Evaluation:
        names = MEMORIES[self.config.head]
        check_record(record, "images", "prompt", "temperature", *names, *(["state"] if self.config.state_dim else []))
        features, value = self._features(record)
        memory = {name: torch.from_numpy(record[name]).to(self.device) for name in names}
        heat = torch.from_numpy(record["temperature"]).to(self.device)
        given = self._given(given_in(record))
        log_prob, entropy = self.action_head.evaluate(features, memory, heat, given)
        if given is not None:
            log_prob, entropy = given.apart(log_prob), given.apart(entropy)
        return Evaluation(self._placed(log_prob), self._placed(entropy), value)

    def features(self, observations: Sequence[Observation]) -> Tensor:
        with torch.no_grad(), self.acting():
            return self._features(self._record(observations))[0]

    def flow_error(self, record: Record, noise: Tensor, times: Tensor) -> Tensor:
        if self.config.head != "flow":
            return super().flow_error(record, noise, times)
        check_record(record, "images", "prompt", "answer", *(["state"] if self.config.state_dim else []))
        drawn = (each.to(self.device) for each in (torch.from_numpy(record["answer"]), noise, times))
        errors: Tensor = self.action_head.errors(self._features(record)[0], *drawn, self._given(given_in(record)))
        return self._placed(errors)

    def as_actions(self, drawn: Tensor) -> Tensor:
        """Returns what the head drew as actions of the robot, [B, chunk, action_dim]."""
        numbers = drawn.clamp(-1, 1) if self.knots is None else self.knots.actions(drawn.clamp(-1, 1))
        return self.action_low + (numbers + 1) / 2 * (self.action_high - self.action_low)

    def float8_parts(self) -> Sequence[nn.Module]:
        return list(self.blocks)

    def token_log_probs(self, record: Record) -> Tensor | None:
        if self.config.head != "tokens":
            return None
        heat = torch.from_numpy(record["temperature"]).to(self.device)
        return self.action_head.log_probs(self._features(record)[0], heat, self._given(given_in(record)))

    def supervised_loss(
        self,
        observations: Sequence[Observation],
        actions: np.ndarray,
        mask: np.ndarray,
        generator: Generator | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        actions, mask = to_imitate(self, actions, mask)
        record = self._record(observations)
        if self.config.shift:
            record["images"] = shifted(record["images"], self.config.shift, generator)
        shown = torch.as_tensor(actions, dtype=torch.float32, device=self.device)
        target, given = self._normalized(shown), None
        if self.max_delay:
            delays = training_delays(mask, self.max_delay, generator).to(self.device)
            given = given_actions(target, delays, self.chunk, self.action_dim)
        there = torch.as_tensor(mask, dtype=torch.float32, device=self.device)
        if self.knots is not None:
            target, there = self.knots.shown(target, there)
        losses, figures = self.action_head.loss(self._features(record)[0], target, generator, given)
        share = there[..., None].expand_as(losses)
        share = share if given is None else given.apart(share)  # what is given is not to be learned
        share = share / share.sum().clamp(min=1)
        loss = (losses * share).sum()
        return loss, {"loss": loss.item()} | {name: (each * share).sum().item() for name, each in figures.items()}

    def pointing_loss(self, pictures: np.ndarray, sentences: Sequence[str], places: np.ndarray) -> Tensor:
        """How little half of the keypoints look at the place that a sentence names: a
        cross-entropy over the places of the picture.

        `pictures`: uint8 [B, H, W, 3], which every camera is shown; `places`: [B, 2], x and y from 0 to 1.
        """
        if not isinstance(self.eyes, Keypoints):
            raise ConfigError(
                f"vision={self.config.vision} looks at the whole picture and cannot point; it needs vision=keypoints."
            )
        tokenizer = ByteTokenizer()
        prompt, _ = padded([tokenizer.encode(sentence) for sentence in sentences])
        cameras = len(self.config.cameras)
        images = torch.from_numpy(np.repeat(pictures[:, None], cameras, 1)).to(self.device)
        maps, logits = self.eyes.looks(images, self.text(torch.from_numpy(prompt).to(self.device)))
        h, w = maps.shape[1:3]
        column, row = (
            torch.as_tensor(places[:, axis] * length).long().clamp(0, length - 1) for axis, length in ((0, w), (1, h))
        )
        asked = logits[:, : max(1, self.eyes.keypoints // 2)]
        target = (row * w + column).to(self.device).repeat_interleave(cameras)[:, None].expand(asked.shape[:2])
        return F.cross_entropy(asked.flatten(0, 1), target.flatten())

    def fit(self, states: np.ndarray, actions: np.ndarray) -> None:
        """Learns what numbers are usual: the mean and deviation of states [N, P], the range of actions [N, action_dim].

        Before it, states are taken as they are, and actions range from -1 to 1.
        """
        fit_ranges(self, states, actions)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """A folder with the weights, adapters merged, and the config: whole or not there at all."""
        state, value = merged(self)
        with new_folder(folder) as beside:
            write_tensors(beside, state, value=value)
            (beside / "config.json").write_text(json.dumps(self.config.to_json(), indent=2) + "\n")

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], device: torch.device | str = "cpu", **changes: Any
    ) -> SmallVLA:
        """From a folder; `changes` are settings that leave the weights as they are, such as ``decode`` or ``flow``; or
        ``value`` or ``max_delay``: parts that the folder has not begin untrained."""
        tensors = Tensors(folder)
        config = SmallVLAConfig.from_json(
            of_former_name(read_json(tensors.path / "config.json")) | of_former_name(changes)
        )
        policy = cls(config)
        load_into(policy, tensors, optional=("value_head.", "action_head.given."))
        result: SmallVLA = policy.to(check_device(device))
        return result

    def _normalized(self, actions: Tensor) -> Tensor:
        """Actions of the robot from -1 to 1 over their range."""
        return 2 * (actions - self.action_low) / (self.action_high - self.action_low).clamp(min=1e-6) - 1

    def _placed(self, numbers: Tensor) -> Tensor:
        """Numbers of what the head decides, at their actions of the chunk."""
        return numbers if self.knots is None else self.knots.placed(numbers)

    def _given(self, prefix: Prefix | None) -> Given | None:
        if prefix is None:
            return None
        actions = self._normalized(torch.from_numpy(prefix.actions).to(self.device)).clamp(-1, 1)
        frozen = torch.from_numpy(prefix.frozen).to(self.device)
        return given_actions(actions, frozen, self.chunk, self.action_dim)

    def _features(self, record: Record) -> tuple[Tensor, Tensor | None]:
        """What the head sees [B, width], and the value [B]."""
        config = self.config
        state = None
        if config.state_dim:
            state = (torch.from_numpy(record["state"]).to(self.device) - self.state_mean) / self.state_std
        x = observation_tokens(self.eyes, self.text, self.words, self.summary, record, state)
        if CONDITION in record:
            asked = torch.from_numpy(record[CONDITION]).to(self.device)
            x = torch.cat([conditioned_token(self, x[:, 0], asked)[:, None], x[:, 1:]], dim=1)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=in_bfloat16(config.precision, x.device)):
            for block in self.blocks[:-1]:
                x = block(x, x)
            x = self.blocks[-1](x[:, :1], x)  # of the last layer, one token is looked at
        features = self.norm(x[:, 0])
        if self.value_head is None:
            return features, None
        return features, self.value_head(features.detach() if config.value == "detached" else features)[:, 0]

    def observed_fields(self) -> ObservedFields:
        return ObservedFields(tuple(self.config.cameras), self.config.state_dim)

    @property
    def state_token_width(self) -> int:
        return self.config.width

    def _record(self, observations: Sequence[Observation]) -> Record:
        """The part of a record that is known before anything is answered."""
        config = self.config
        record = observed_record(observations, config.cameras, config.image_size, config.state_dim)
        return record | condition_field(self, observations)


def fit_ranges(policy: nn.Module, states: np.ndarray, actions: np.ndarray) -> None:
    """Sets the buffers by which a policy normalizes: the mean and the deviation of states [N, P], and the range of
    actions [N, action_dim]."""
    for name, found in (
        ("state_mean", np.mean(states, 0)),
        ("state_std", np.maximum(np.std(states, 0), MIN_DEVIATION)),
        ("action_low", np.min(actions, 0)),
        ("action_high", np.max(actions, 0)),
    ):
        buffer = policy.get_buffer(name)
        if found.shape != buffer.shape:
            raise SchemaError(
                f"{name} has {len(buffer)} numbers by the config, and {list(found.shape)} were given. Change "
                "the config."
            )
        buffer.copy_(torch.from_numpy(found))


class TransformerBlock(nn.Module):
    """A transformer layer: the tokens `x`, which are the first of `all_of`, look at all of them."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key_value, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, all_of: Tensor) -> Tensor:
        normed = self.norm_1(all_of)
        made = (self.query(normed[:, : x.shape[1]]), *self.key_value(normed).chunk(2, dim=-1))
        # [B, heads, tokens, width / heads]
        query, key, value = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in made)
        # written out: with so few tokens it trains three times as fast in bfloat16 as torch's fused one
        attended = (query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)).softmax(-1) @ value
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.norm_2(x))))


def _head(config: SmallVLAConfig) -> Any:
    sizes = (config.width, config.knots or config.chunk, config.action_dim)
    if config.head == "tokens":
        head: Any = TokensHead(*sizes, config.bins, config.decode, config.smoothing)
    else:
        head = GaussianHead(*sizes, config.std) if config.head == "gaussian" else FlowHead(*sizes, config.flow)
    if config.max_delay:
        head.given = GivenActions(*sizes)
    return head


def initialize(module: nn.Module, generator: Generator) -> None:
    """Weights by their fan-in, biases 0; what ends a branch begins small, so that a new layer changes little."""
    for name, part in module.named_modules():
        if isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
        elif isinstance(part, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            small = (
                0.2
                if name.split(".")[-1] in ("out", "down") and "blocks" in name
                else 0.1
                if name == "action_head.out"
                else 0.0
                if name == "action_head.given.leave"
                else 1.0
            )
            nn.init.normal_(part.weight, std=small / math.sqrt(math.prod(part.weight.shape[1:])), generator=generator)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, generator=generator)
        elif isinstance(part, (Keypoints, Patches)):
            nn.init.normal_(part.which, std=0.5, generator=generator)
        elif isinstance(part, GaussianHead):
            nn.init.zeros_(part.more)
        if isinstance(getattr(part, "bias", None), Tensor):
            nn.init.zeros_(part.bias)


def _made(kind: Any, found: Mapping[str, Any]) -> Any:
    known = [each.name for each in dataclasses.fields(kind)]
    if unknown := sorted(set(found) - set(known)):
        raise ConfigError(f"a small VLA has no setting {unknown[0]!r}{suggest(unknown[0], known)}")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in found.items()})
