"""What OpenVLA and OpenVLA-OFT have in common: the model, how observations come in and how actions go out.

The sequence is: BOS, the patches of all images, the robot's state if there is one, the prompt, and then
what answers: the tokens so far, or, in OFT, one empty slot for each number of the chunk and a stop, all of
which see each other. A row's padding stands between its prompt and its output, which is masked: the
position of a token is given explicitly, not by its index.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hilt.core.errors import ConfigError, SchemaError
from hilt.core.validate import Need, check
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
    check_temperature,
    continued,
    frozen_in,
    prefix_record,
    to_imitate,
)
from hilt.policies.condition_embedding import condition_field, conditioned_token
from hilt.policies.float8 import Float8Rollouts
from hilt.policies.io.folders import load_openvla, save_openvla
from hilt.policies.io.preprocess import openvla_view
from hilt.policies.precision import in_bfloat16
from hilt.policies.vla import augment, llama
from hilt.policies.vla.flow import training_delays
from hilt.policies.vla.llama import AttentionLayout, Packing
from hilt.policies.vla.normalize import Normalizer, resolve_key
from hilt.policies.vla.openvla_config import OpenVLAConfig, OpenVLAOptions
from hilt.policies.vla.openvla_inputs import (
    ModelInputs,
    SampledActions,
    observed_pictures,
    observed_states,
    observed_words,
    without_given,
)
from hilt.policies.vla.prismatic import (
    FilmBackbone,
    L1Head,
    Projector,
    ProprioProjector,
    ScaleHead,
    ValueHead,
    VisionBackbone,
)
from hilt.policies.vla.tokens import ActionTokenizer, openvla_ids, padded

STOP = 2
"""The token that ends every answer"""


class OpenVLAPolicy(Float8Rollouts):
    """A new one has no weights: `from_pretrained` loads them, `initialize` makes random ones."""

    VARIANTS: ClassVar[dict[str, type[OpenVLAPolicy]]] = {}
    """The classes by the variant of a checkpoint; see `hilt.policies.vla.openvla`"""
    variant: ClassVar[str]
    causal: bool
    precision_option = "compute"
    recomputation_option = "checkpointed"

    def __init_subclass__(cls, variant: str = "") -> None:
        super().__init_subclass__()
        if variant:
            cls.variant = variant
            OpenVLAPolicy.VARIANTS[variant] = cls

    def __init__(
        self,
        config: OpenVLAConfig,
        norm_stats: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        unnorm_key: str | None = None,
        options: OpenVLAOptions | None = None,
        seed: int = 0,
    ):
        super().__init__()
        self.config, self.options, self.tokenizer = config, options or OpenVLAOptions(), tokenizer
        self.norm_stats, self.rollout_precision = dict(norm_stats or config.norm_stats), self.options.rollout_precision
        needs = {
            "support": Need("head=tokens", lambda _: config.head == "tokens"),
            "log_scale_range": Need("head=laplace", lambda _: config.head == "laplace"),
            "detach_value": Need("value_head=True", lambda _: config.value_head),
            **dict.fromkeys(("acting", "layers"), Need("variant=oft", lambda _: config.variant == "oft")),
        }
        check(self.options, outside=needs)
        self.chunk, self.action_dim, self.max_delay = config.chunk, config.action_dim, config.max_delay
        self._scale_by(resolve_key(self.norm_stats, unnorm_key))
        self.slots = self.chunk * self.action_dim
        self.source: Path | None = None
        """The folder that it came from"""
        self.generator = torch.Generator().manual_seed(seed)
        """Draws for a caller who brings no generator"""
        self.token = ActionTokenizer(config.n_action_bins, config.vocabulary)
        self.token_range = self.token.first, self.token.last
        with torch.device("meta"):
            self._build()

    def _build(self) -> None:
        config, width = self.config, self.config.width
        vision = VisionBackbone(config.vits(), config.image_size)
        self.vision_backbone = FilmBackbone(vision, width) if config.film else vision
        self.projector = Projector(vision.width, width, fused=vision.fused_featurizer is not None)
        self.language_model = llama.make(config.text_config)
        self.proprio_projector = ProprioProjector(config.proprio_dim, width) if config.use_proprio else None
        self.action_head = L1Head(width, self.chunk, self.action_dim) if config.head != "tokens" else None
        self.scale_head = ScaleHead(width, self.chunk, self.action_dim) if config.head == "laplace" else None
        self.value_head = ValueHead(width) if config.value_head else None
        for name in ("mean", "std"):
            self.register_buffer(f"pixel_{name}", torch.empty(1, 1, 3 * len(config.vits()), 1, 1), persistent=False)

    # --- weights ---

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> Any:
        """From a checkpoint folder, read as files; see `hilt.policies.io.folders.load_openvla`. Of this class itself:
        the folder says whether it is OpenVLA or OpenVLA-OFT."""
        return load_openvla(folder, OpenVLAPolicy.VARIANTS if cls is OpenVLAPolicy else {cls.variant: cls}, **options)

    @classmethod
    def delay_options(cls, max_delay: int) -> dict[str, Any]:
        return {"max_delay": max_delay}

    @classmethod
    def value_options(cls, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"value_head": True, "detach_value": kind == "detached"}

    def save_pretrained(self, folder: str | Path) -> None:
        """A complete folder, which upstream's loader opens too."""
        save_openvla(self, folder)

    def initialize(
        self, seed: int = 0, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, only: str = ""
    ) -> Any:
        """Random weights: of everything, or of the parameters whose name begins with
        `only`, such as a head that a folder lacks."""
        draws = torch.Generator(device).manual_seed(seed)
        for name, old in list(self.named_parameters()):
            if not name.startswith(only):
                continue
            new = torch.empty(old.shape, dtype=dtype, device=device)
            if name == "scale_head.log_b_head.bias":
                new.fill_(ScaleHead.START)
            elif name == "value_head.fc2.weight" or (new.ndim < 2 and name.endswith("bias")):
                new.zero_()
            elif new.ndim < 2:
                new.fill_(1.0)
            else:
                new.normal_(0, 0.0002 if name == "scale_head.log_b_head.weight" else 0.02, generator=draws)
            owner, _, leaf = name.rpartition(".")
            self.get_submodule(owner)._parameters[leaf] = nn.Parameter(new, requires_grad=old.requires_grad)
        return self.reset_buffers(device)

    def reset_buffers(self, device: str | torch.device) -> Any:
        """The numbers that no checkpoint has: the frequencies of positions, the means of pixels."""
        trunk = self.language_model.model
        with torch.device(device):
            trunk.rotary_emb = type(trunk.rotary_emb)(trunk.config)
            for name, values in (("mean", self.config.means), ("std", self.config.stds)):
                setattr(self, f"pixel_{name}", torch.tensor(values).view(1, 1, -1, 1, 1))
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves and casts as any module does, but for those numbers: positions in bfloat16 would be off by some."""
        super()._apply(fn, recurse)
        return self if self.device.type == "meta" else self.reset_buffers(self.device)

    def float8_parts(self) -> Sequence[nn.Module]:
        return list(self.language_model.model.layers[self.options.fp8_first_layer :])

    # --- statistics, and upstream's names ---

    def use_statistics(self, statistics: Mapping[str, Any], name: str) -> None:
        """Normalizes by these from now on, under this name: ``action`` and ``proprio``,
        as `normalize.statistics` makes them."""
        self.norm_stats[name] = dict(statistics)
        self._scale_by(name)

    def _scale_by(self, key: str) -> None:
        stats, kind = self.norm_stats[key], self.config.normalization
        # as upstream has it, in each of the two
        scale = Normalizer(stats["action"], kind, 0.0 if self.causal else 1e-8)
        if self.action_dim not in (0, scale.size):
            raise ConfigError(
                f"this policy's actions have {self.action_dim} numbers, and the statistics of {key} {scale.size}."
            )
        self.scale_actions, self.action_dim, self.unnorm_key = scale, scale.size, key
        self.scale_state = (
            Normalizer(stats.get("proprio", {}), kind, 1e-8, clip=True) if self.config.use_proprio else None
        )
        size = self.config.proprio_dim
        if self.scale_state is not None and self.scale_state.size != size:
            raise ConfigError(
                f"this policy's state has {size} numbers, and the statistics of {key} {self.scale_state.size}."
            )

    def get_action_stats(self, unnorm_key: str | None = None) -> Any:
        return self.norm_stats[resolve_key(self.norm_stats, unnorm_key or self.unnorm_key)]["action"]

    def set_num_images_in_input(self, number: int) -> None:
        self.config = replace(self.config, num_images=number)

    def generate_action_verl(
        self,
        input_ids: Tensor,
        pixel_values: Tensor,
        attention_mask: Tensor | None = None,
        padding_idx: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        unnorm_key: str | None = None,
        proprio: Any = None,
        action_head: Any = None,
        noisy_action_projector: Any = None,
        use_film: bool | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[np.ndarray, Tensor]:
        """Actions float64 [B, chunk, action_dim] and their token ids [B, chunk * action_dim], as SimpleVLA-RL
        asks for them: prompts padded on the left, or anywhere; pixels [B, 6 * images, H, W]; proprioception
        normalized, or left out of the sequence.

        `action_head`: a continuous head of OpenVLA-OFT (``predict_action``, or a module of ours) answers instead of
        the policy's own; the second result is then the hidden states that it read, [B, chunk * action_dim, width].
        With `noisy_action_projector` it is one of diffusion (``noise_scheduler``, ``time_encoder``,
        ``predict_noise``). `use_film`: whether the words modulate the vision transformers; None: as the checkpoint
        was trained, and nothing else is possible.
        """
        check_temperature(temperature, do_sample)
        if use_film is not None and use_film != self.config.film:
            raise ConfigError(
                f"use_film={use_film}, and this checkpoint was trained "
                f"{'with' if self.config.film else 'without'} FiLM: leave it out."
            )
        if attention_mask is None and padding_idx is not None:
            attention_mask = input_ids.ne(padding_idx)
        inputs = self.inputs_of(input_ids, pixel_values, attention_mask, proprio)
        stats, draws = self.get_action_stats(unnorm_key), generator or self.generator
        scale = (
            self.scale_actions
            if unnorm_key is None
            else Normalizer(stats, self.config.normalization, self.scale_actions.epsilon)
        )
        with torch.no_grad(), self._precision():
            if action_head is not None or noisy_action_projector is not None:
                actions, hidden = self._by_head(inputs, action_head, noisy_action_projector, do_sample, draws)
                return scale.unnormalize(actions.double().cpu().numpy()), hidden
            sampled = self._sample_actions(inputs, do_sample, torch.full((len(input_ids),), float(temperature)), draws)
        return scale.unnormalize(self._plain(sampled.drawn)), sampled.drawn.flatten(1)

    def _by_head(
        self, inputs: ModelInputs, head: Any, projector: Any, sample: bool, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Normalized actions of a continuous head that was given, and the hidden states that it read."""
        raise ConfigError(
            "action_head and noisy_action_projector read the slots of OpenVLA-OFT; OpenVLA answers "
            "in tokens. Leave them out."
        )

    def inputs_of(
        self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor | None = None, proprio: Any = None
    ) -> ModelInputs:
        """The batch that upstream's tensors are."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.ne(0).long()
        order = mask.argsort(dim=1, descending=True, stable=True)  # padding goes to the end
        lengths = mask.sum(1)
        prompt = input_ids.gather(1, order)[:, : int(lengths.max())]
        state = None
        if proprio is not None:
            if self.proprio_projector is None:
                raise ConfigError("proprioception was given to a policy that has no projector for it; leave it out.")
            state = torch.as_tensor(proprio, dtype=torch.float32).view(len(input_ids), -1).to(self.device)
        pixels = pixel_values.to(self.device).unflatten(1, (self.config.num_images, -1))
        equal = bool((lengths == prompt.shape[1]).all())
        host = None if equal else lengths.cpu().numpy()
        return ModelInputs(pixels, prompt.to(self.device), lengths.to(self.device), state, host)

    # --- acting ---

    @property
    def takes_prefix(self) -> bool:
        return self.max_delay > 0

    def act(
        self,
        observations: Sequence[Observation],
        sample: bool = True,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        prefix: Prefix | None = None,
    ) -> tuple[np.ndarray, Record]:
        if not observations:
            raise SchemaError("act() was given no observation; give it at least one.")
        check_temperature(temperature, sample)
        prefix = check_prefix(self, prefix, len(observations), sample)
        with torch.no_grad(), self._precision(), self.acting():
            record, images = self._look(observations, self.options.center_crop)
            record["temperature"] = np.full(len(observations), temperature if sample else 1.0, np.float32)
            if self.max_delay:
                record |= prefix_record(self, prefix, len(observations))
            sampled = self._answer(record, images, sample, generator or self.generator)
        record[self._drawn] = sampled.drawn.cpu().numpy().astype(np.int32 if self._drawn == "tokens" else np.float32)
        if sampled.evaluation is not None:
            evaluation = without_given(sampled.evaluation, record)
            record["log_prob"] = evaluation.log_prob.cpu().numpy()
            if evaluation.value is not None:
                record["value"] = evaluation.value.cpu().numpy()
        actions = self.scale_actions.unnormalize(self._plain(sampled.drawn)).astype(np.float32)
        return actions if prefix is None else continued(actions, prefix), record

    def evaluate(self, record: Record) -> Evaluation:
        needed = ("images", "prompt", "prompt_length", "temperature", self._drawn)
        check_record(record, *needed, *(["state"] if self.scale_state else []))
        drawn = torch.from_numpy(record[self._drawn]).to(self.device)
        if not len(drawn):
            none = torch.zeros(drawn.shape, device=self.device)
            return Evaluation(none, none, None if self.value_head is None else none[:, 0, 0])
        with self._precision():
            temperature = torch.from_numpy(record["temperature"]).to(self.device)
            return without_given(self._judge(self._inputs(record), drawn, temperature), record)

    def supervised_loss(
        self,
        observations: Sequence[Observation],
        actions: np.ndarray,
        mask: np.ndarray,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """In training, images are changed at random, with draws of `generator`: see `OpenVLAOptions.augment`."""
        actions, mask = to_imitate(self, actions, mask)
        augmented = self.training and self.options.augment
        with torch.no_grad():
            record, images = self._look(observations, crop=self.options.center_crop and not augmented)
            if augmented:
                changed = augment.openvla(images.flatten(0, 1), generator, crop=self.options.center_crop)
                images = changed.unflatten(0, images.shape[:2])
        if self.max_delay:  # the first actions are given, and not to be learned
            delays = training_delays(mask, self.max_delay, generator).numpy()
            record |= prefix_record(self, Prefix(actions, delays), len(actions))
            mask = mask & ~frozen_in(record)[..., 0]
        wanted = self._scaled(actions)
        with self._precision():
            return self._imitate(self._inputs(record, images), wanted, torch.from_numpy(mask.copy()).to(self.device))

    def features(self, observations: Sequence[Observation]) -> Tensor:
        with torch.no_grad(), self._precision():
            record, images = self._look(observations, crop=self.options.center_crop)
            return at_least_float32(self._answering(self._inputs(record, images))[:, 0])

    @property
    def _drawn(self) -> str:
        """The field of a record that has what was drawn."""
        return "tokens" if self.config.head == "tokens" else "actions"

    def _answer(self, record: Record, images: Tensor, sample: bool, generator: torch.Generator) -> SampledActions:
        """The answer to a record without one, whose images are on the device."""
        temperature = torch.from_numpy(record["temperature"])
        return self._sample_actions(self._inputs(record, images), sample, temperature, generator)

    @abstractmethod
    def _sample_actions(
        self, inputs: ModelInputs, sample: bool, temperature: Tensor, generator: torch.Generator
    ) -> SampledActions: ...

    @abstractmethod
    def _judge(self, inputs: ModelInputs, drawn: Tensor, temperature: Tensor) -> Evaluation: ...

    @abstractmethod
    def _imitate(self, inputs: ModelInputs, wanted: np.ndarray, mask: Tensor) -> tuple[Tensor, dict[str, float]]: ...

    # --- observations ---

    def observed_fields(self) -> ObservedFields:
        return ObservedFields(self.config.cameras(), 0 if self.scale_state is None else self.scale_state.size)

    @property
    def state_token_width(self) -> int:
        return 0 if self.proprio_projector is None else self.config.width

    def _look(self, observations: Sequence[Observation], crop: bool) -> tuple[Record, Tensor]:
        """Returns the inputs of a record, and its images on the device, center-cropped with `crop`."""
        cameras, size = self.config.cameras(), self.config.image_size
        seen = observed_pictures(observations, cameras)
        images = torch.empty(len(seen), size, size, 3, dtype=torch.uint8, device=self.device)
        for shape in {image.shape for image in seen}:  # rows may have cameras of different size
            rows = [place for place, image in enumerate(seen) if image.shape == shape]
            frames = torch.from_numpy(np.stack([seen[place] for place in rows]))
            images[rows] = self._view(frames, crop)
        images = images.unflatten(0, (len(observations), len(cameras)))
        prompt, length = padded([openvla_ids(self.tokenizer, each) for each in observed_words(observations)])
        if 0 < (most := self.options.max_prompt_length) < int(length.max()):
            raise ConfigError(
                f"a prompt has {length.max()} tokens, and max_prompt_length={most}: give {length.max()}, or 0 for any."
            )
        record: Record = {"images": images.cpu().numpy(), "prompt": prompt, "prompt_length": length}
        if self.scale_state is not None:
            record["state"] = observed_states(observations, self.scale_state.size)
        return record | condition_field(self, observations), images

    def _view(self, frames: Tensor, crop: bool) -> Tensor:
        return openvla_view(frames.to(self.device), self.config.image_size, crop=crop)

    def _scaled(self, actions: np.ndarray) -> np.ndarray:
        """Actions of the robot from -1 to 1, float64."""
        scaled: np.ndarray = np.clip(self.scale_actions.normalize(actions.astype(np.float64)), -1, 1)
        return scaled

    def _inputs(self, record: Record, images: Tensor | None = None) -> ModelInputs:
        images = torch.from_numpy(record["images"]).to(self.device) if images is None else images
        given = {name: each.to(self.device) for name, each in self._fields(record).items()}
        lengths = record["prompt_length"]
        return ModelInputs(self.pixels(images), lengths=None if (lengths == lengths.max()).all() else lengths, **given)

    def _fields(self, record: Record) -> dict[str, Tensor]:
        """What else the model reads of a record, on the host, by the names of `ModelInputs`."""
        lengths, widest = record["prompt_length"], int(record["prompt_length"].max())
        fields = {"prompt": record["prompt"][:, :widest].astype(np.int64), "length": lengths.astype(np.int64)}
        if self.scale_state is not None:
            fields["proprio"] = self.scale_state.normalize(record["state"]).astype(np.float32)
        if "frozen" in record:
            tokens = np.where(frozen_in(record), self.token.encode(self._scaled(record["prefix"])), -1)
            fields["given"] = tokens.astype(np.int64).reshape(len(tokens), -1)
        fields |= {CONDITION: record[CONDITION]} if CONDITION in record else {}
        return {name: torch.from_numpy(field) for name, field in fields.items()}

    def pixels(self, images: Tensor) -> Tensor:
        """uint8 [B, images, H, W, 3] as each vision transformer wants it, one behind the
        other: [B, images, 3 for each, H, W]."""
        planes = images.permute(0, 1, 4, 2, 3).to(torch.float32) / 255
        return (planes.repeat(1, 1, self.pixel_mean.shape[2] // 3, 1, 1) - self.pixel_mean) / self.pixel_std

    def frames_of(self, pixel_values: Tensor) -> Tensor:
        """The inverse of `pixels`, exactly: uint8 [B, images, H, W, 3] of [B, 3 for
        each vision transformer and image, H, W]."""
        pixels = pixel_values.to(self.device).unflatten(1, (self.config.num_images, -1))[:, :, :3]
        planes = pixels.float() * self.pixel_std[:, :, :3] + self.pixel_mean[:, :, :3]
        return (planes * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 1, 3, 4, 2)

    def _plain(self, drawn: Tensor) -> np.ndarray:
        """Actions from -1 to 1, float64."""
        values: np.ndarray = drawn.cpu().numpy()
        return self.token.decode(values) if self.config.head == "tokens" else values.astype(np.float64)

    # --- the model ---

    def _precision(self) -> Any:
        # without its cache, which would hold a second copy of all weights to the end of a pass
        low = in_bfloat16(self.options.compute, self.device)
        return torch.autocast(self.device.type, torch.bfloat16, low, cache_enabled=False)

    def patch_features(self, inputs: ModelInputs) -> Tensor:
        """What the vision transformers make of all images: [B, images * patches, width]."""
        pixels, twice = inputs.pixels.to(self._dtype), self.options.checkpointed
        if not self.config.film:
            return self.vision_backbone(pixels, checkpointed=twice)
        words = self._embed(inputs.prompt)
        inside = torch.arange(words.shape[1], device=words.device) < inputs.length[:, None]
        stop = self._embed(torch.full_like(inputs.length, STOP))  # upstream's mean has it too
        mean = ((words * inside[..., None]).sum(1) + stop) / (inputs.length[:, None] + 1).to(words.dtype)
        return self.vision_backbone(pixels, mean, twice)

    def _prefix(self, inputs: ModelInputs, time: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Embeddings up to the end of the prompt [B, S, width], padding included, and where each
        prompt's last token lies, [B]. `time`: the embedding of a diffusion head's step, [B, width],
        which follows the patches and the state."""
        words, patches = self._embed(inputs.prompt), self.projector(self.patch_features(inputs))
        parts = [words[:, :1], patches]
        if inputs.proprio is not None and self.proprio_projector is not None:
            state = self.proprio_projector(inputs.proprio.to(self._dtype))
            parts.append(conditioned_token(self, state, inputs.condition)[:, None])
        if time is not None:
            parts.append(time.to(words.dtype)[:, None])
        before = torch.cat([*parts, words[:, 1:]], dim=1)
        return before, before.shape[1] - words.shape[1] + inputs.length - 1

    def _valid(self, inputs: ModelInputs, before: int, after: int) -> Tensor | None:
        """bool [B, before + after]: which tokens of a row are real, when `before` of
        them end with the padding. None: all are."""
        if inputs.lengths is None:
            return None
        place = torch.arange(before + after, device=inputs.length.device)
        return (place < before - inputs.prompt.shape[1] + inputs.length[:, None]) | (place >= before)

    def _packing(self, inputs: ModelInputs, before: int, after: int) -> Packing | None:
        if not self.options.packed or inputs.lengths is None:
            return None
        place = np.arange(before + after)  # on the host: how many tokens there are decides shapes
        real = (place < before - inputs.prompt.shape[1] + inputs.lengths[:, None]) | (place >= before)
        return Packing(torch.from_numpy(np.flatnonzero(real)).to(self.device), *real.shape)

    def _run(self, x: Tensor, positions: Tensor, layout: AttentionLayout) -> Tensor:
        return llama.run(self.language_model, x, positions, layout, self.options.checkpointed)

    def _embed(self, ids: Tensor) -> Tensor:
        return self.language_model.model.embed_tokens(ids)

    @property
    def _dtype(self) -> torch.dtype:
        return self.language_model.model.embed_tokens.weight.dtype

    def _logits(self, hidden: Tensor, everything: bool = False) -> Tensor:
        """float32, over the action tokens, or over the whole vocabulary."""
        head = self.language_model.lm_head
        if everything or type(head) is not nn.Linear:  # an adapter on the head is asked as a whole
            logits = at_least_float32(head(hidden))
            return logits if everything else logits[..., self.token.first : self.token.last + 1]
        rows = head.weight[self.token.first : self.token.last + 1]
        with torch.autocast(self.device.type, enabled=False):
            return F.linear(at_least_float32(hidden), at_least_float32(rows))

    def _distribution(self, hidden: Tensor, temperature: Tensor) -> Tensor:
        """Log-probabilities of the tokens that may be drawn, at a temperature [B]."""
        logits = self._logits(hidden, everything=self.options.support == "vocabulary")
        return F.log_softmax(logits / temperature.view(-1, *[1] * (logits.ndim - 1)).to(logits), dim=-1)

    @property
    def _first(self) -> int:
        """The token id of the first log-probability."""
        return self.token.first if self.options.support == "actions" else 0

    def _weigh(self, log_probs: Tensor, tokens: Tensor, value: Tensor | None) -> Evaluation:
        """Weighs log-probabilities [B, slots, tokens] and what was drawn."""
        shape = (len(tokens), self.chunk, self.action_dim)
        place = tokens.reshape(len(tokens), -1, 1).long() - self._first
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return Evaluation(log_probs.gather(-1, place).view(shape), entropy.view(shape), value)

    def _token_loss(self, hidden: Tensor, wanted: np.ndarray, mask: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy over the whole vocabulary, so that the other tokens become unlikely too."""
        tokens = torch.from_numpy(self.token.encode(wanted)).to(hidden.device, torch.int64)  # [B, chunk, action_dim]
        logits = self._logits(hidden, everything=True).view(*tokens.shape, -1)
        chosen = mask[..., None].expand(tokens.shape)
        loss = F.cross_entropy(logits[chosen], tokens[chosen])
        with torch.no_grad():
            found = logits[..., self.token.first : self.token.last + 1].argmax(-1) + self.token.first
            right = (found == tokens)[chosen].float().mean()
        apart = np.abs(self.token.decode(found.cpu().numpy()) - wanted)[chosen.cpu().numpy()].mean()
        return loss, {"loss": loss.item(), "token_accuracy": right.item(), "l1": float(apart)}

    def _value(self, hidden: Tensor) -> Tensor | None:
        if self.value_head is None:
            return None
        return at_least_float32(self.value_head(hidden.detach() if self.options.detach_value else hidden))

    def check_attention(self) -> None:
        """Tries whether an early token sees a later one, as it must in OFT and must not in OpenVLA."""
        x = self._embed(torch.arange(3, 11, device=self.device)[None])
        other = torch.cat([x[:, :-1], x[:, :1]], dim=1)
        places = torch.arange(x.shape[1], device=self.device)[None]
        with torch.no_grad(), self._precision():
            first, second = (self._run(each, places, AttentionLayout(causal=self.causal))[:, 0] for each in (x, other))
        if torch.equal(first, second) != self.causal:
            found, wanted = ("causal", "bidirectional") if not self.causal else ("bidirectional", "causal")
            raise ConfigError(
                f"attention is {found} here, and this model was trained with {wanted}: its actions would be noise. "
                "Another attention was put in the place of hilt.policies.vla.llama.attend; take that away."
            )

    def action_token_mass(self, inputs: ModelInputs | None = None) -> float:
        """How much of the probability lies on action tokens, from 0 to 1, on `inputs` or on a picture of noise. Near
        256 / 32000 means that this model was not trained to output tokens."""
        if inputs is None:
            noise = torch.Generator().manual_seed(0)
            size, text = self.config.image_size, openvla_ids(self.tokenizer, "pick up the object")
            images = torch.randint(
                0, 256, (1, self.config.num_images, size, size, 3), generator=noise, dtype=torch.uint8
            ).to(self.device)
            prompt = torch.tensor([text], device=self.device)
            state = torch.zeros(1, self.config.proprio_dim, device=self.device) if self.config.use_proprio else None
            inputs = ModelInputs(
                self.pixels(images), prompt, torch.full((1,), len(text), device=self.device), state, None
            )
        with torch.no_grad(), self._precision():
            chance = self._logits(self._answering(inputs), everything=True).softmax(-1)
        return float(chance[..., self.token.first : self.token.last + 1].sum(-1).mean())

    @abstractmethod
    def _answering(self, inputs: ModelInputs) -> Tensor:
        """Hidden states that predict tokens [B, 1 or more, width]."""
