"""OpenVLA, one token after the other, and OpenVLA-OFT, a whole chunk of actions in one pass.

    policy = OpenVLAOFT.from_pretrained(folder, unnorm_key="libero_spatial")
    actions, record = policy.act(observations, sample=True, temperature=1.6, generator=generator)

`OpenVLAConfig` describes a checkpoint, `OpenVLAOptions` how it is run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hilt.algos.offline.recap import guided
from hilt.core.errors import ConfigError
from hilt.policies.base import CONDITION, Evaluation, Observation, Record, at_least_float32
from hilt.policies.graphs import Graphs, compiling
from hilt.policies.io.preprocess import openvla_view
from hilt.policies.vla.heads import pick
from hilt.policies.vla.llama import AttentionLayout
from hilt.policies.vla.openvla_config import OpenVLAConfig, OpenVLAOptions
from hilt.policies.vla.openvla_inputs import ModelInputs, SampledActions
from hilt.policies.vla.openvla_model import STOP, OpenVLAPolicy

__all__ = ["OpenVLA", "OpenVLAConfig", "OpenVLAOFT", "OpenVLAOptions", "OpenVLAPolicy"]


GRAPHS = 64
"""CUDA graphs that are kept: of numbers of rows, lengths of prompts and sizes of pictures"""
LARGE = 1024
"""The width of language models whose layers are worth compiling"""
WORDS = 8
"""Prompts of different length are filled up to a multiple of this, so that there are few graphs"""


class OpenVLAOFT(OpenVLAPolicy, variant="oft"):
    """Parallel decoding: every slot of the chunk is predicted at once, and everything sees everything."""

    causal = False
    _graphs: Graphs | None = None
    _unconditioned: tuple[Tensor, float] | None = None

    @contextlib.contextmanager
    def guided(self, unconditioned: Sequence[Observation], weight: float) -> Iterator[None]:
        """Within it, the tokens of observations are guided away from those of `unconditioned` ones, row by row: see
        `hilt.algos.offline.recap`."""
        with torch.no_grad(), self._precision(), self.acting():
            record, images = self._look(unconditioned, self.options.center_crop)
            self._unconditioned = self.slots_of(self._inputs(record, images)), weight
        try:
            yield
        finally:
            self._unconditioned = None

    def _logits(self, hidden: Tensor, everything: bool = False) -> Tensor:
        found = super()._logits(hidden, everything)
        if self._unconditioned is None:
            return found
        without, weight = self._unconditioned
        return guided(super()._logits(without, everything), found, weight)

    def slots_of(self, inputs: ModelInputs, noisy: Tensor | None = None, time: Tensor | None = None) -> Tensor:
        """Hidden states that predict the chunk's numbers [B, chunk * action_dim, width]: the prompt's last token
        and all slots but one, for each predicts the next. Slots are empty but for the tokens of actions that are
        given. With a diffusion head, they have embeddings of `noisy` actions, and `time` is its step's."""
        before, end = self._prefix(inputs, time)
        batch, start, width = before.shape
        stop = self._embed(torch.full_like(inputs.length, STOP))[:, None]
        slots = before.new_zeros(batch, self.slots, width) if noisy is None else noisy.to(before.dtype)
        if inputs.given is not None:
            known = self._embed(inputs.given.clamp(min=0)).to(slots.dtype)
            slots = torch.where(inputs.given[..., None] >= 0, known, slots)
        x = torch.cat([before, slots, stop.to(before.dtype)], dim=1)
        places = torch.arange(x.shape[1], device=x.device)[None]
        if (valid := self._valid(inputs, start, self.slots + 1)) is None:
            return self._run(x, places, AttentionLayout())[:, start - 1 : start - 1 + self.slots]
        # an answer follows its prompt, not the padding
        places = places - (places >= start) * (start - 1 - end[:, None])
        hidden = self._run(
            x, places, AttentionLayout(mask=valid[:, None, None], packing=self._packing(inputs, start, self.slots + 1))
        )
        last = hidden.gather(1, end[:, None, None].expand(-1, 1, width))
        return torch.cat([last, hidden[:, start : start + self.slots - 1]], dim=1)

    def action_logits(
        self, images: Tensor, prompt: Tensor, length: Tensor, proprio: Tensor | None = None, equal: bool = False
    ) -> Tensor:
        """float32 [B, chunk * action_dim, action tokens] of uint8 [B, images, H, W, 3] and prompts, all on the
        device. With `equal`, all prompts are as long as they are wide: shapes are fixed and nothing waits for
        the device, so that it can be captured."""
        with self._precision(), self.acting():
            lengths = None if equal else length.cpu().numpy()
            return self._logits(self.slots_of(ModelInputs(self.pixels(images), prompt, length, proprio, lengths)))

    def token_log_probs(self, record: Record) -> Tensor | None:
        if self.config.head != "tokens":
            return None
        with self._precision():
            return self._distribution(self.slots_of(self._inputs(record)), torch.from_numpy(record["temperature"]))

    _answering = slots_of

    def _sample_actions(
        self, inputs: ModelInputs, sample: bool, temperature: Tensor, generator: torch.Generator
    ) -> SampledActions:
        uniform = self._draws(len(inputs.prompt), sample, generator)
        return self._respond(inputs, temperature, None if uniform is None else uniform.to(self.device))

    def _draws(self, rows: int, sample: bool, generator: torch.Generator) -> Tensor | None:
        if self.config.head == "l1" and sample:
            raise ConfigError(
                "the L1 head gives one action and draws none: use sample=False, or head='laplace', which adds a scale."
            )
        return torch.rand((rows, self.chunk, self.action_dim), generator=generator) if sample else None

    def _respond(self, inputs: ModelInputs, temperature: Tensor, uniform: Tensor | None) -> SampledActions:
        """The likeliest actions, or those that `uniform` [B, chunk, action_dim] in [0, 1) points to."""
        slots = self.slots_of(inputs)
        if self.config.head == "tokens":
            log_probs = self._distribution(slots, temperature)
            place = log_probs.argmax(-1) if uniform is None else pick(log_probs, uniform.flatten(1))
            tokens = (place + self._first).view(len(slots), self.chunk, self.action_dim)
            return SampledActions(tokens, self._weigh(log_probs, tokens, self._value(slots[:, 0])))
        mean, log_scale = self._laplace(slots, temperature)
        if log_scale is None:
            return SampledActions(mean, None)
        actions = mean if uniform is None else mean + laplace(uniform.to(mean)) * log_scale.exp()
        return SampledActions(actions, self._measure(slots, mean, log_scale, actions))

    # --- compiled layers, and acting by CUDA graphs ---

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        with super()._precision(), compiling() if self._compiles() else contextlib.nullcontext():
            yield

    def _compiles(self) -> bool:
        """Whether layers are compiled; they are from the first time on that this is asked."""
        if self.options.layers == "auto":
            small = self.config.width < LARGE or importlib.util.find_spec("triton") is None
            if self.device.type != "cuda" or small or not self._in_one_piece():
                return False
        elif self.options.layers == "eager":
            return False
        if self.language_model.model.layers[0]._compiled_call_impl is None:
            self.compile_layers()
        return True

    def compile_layers(self) -> None:
        """Compiles the layers of all three transformers, each kind once for any number of rows."""
        vision = self.vision_backbone.vision_backbone if self.config.film else self.vision_backbone
        vits = [vit for vit in (vision.featurizer, vision.fused_featurizer) if vit is not None]
        for layer in [*(block for vit in vits for block in vit.blocks), *self.language_model.model.layers]:
            layer.compile(dynamic=True)

    def _in_one_piece(self) -> bool:
        """Whether this process has all weights, and not now and then: `unshard` is a method of FSDP's modules."""
        return not hasattr(self, "unshard") and type(self.projector.fc1.weight.data) is Tensor

    def _captures(self) -> bool:
        """Whether `act` is captured, where the weights are in one piece and shapes do not depend on words."""
        if self.options.acting != "captured" or self._unconditioned is not None:
            return False
        if self.device.type != "cuda":
            raise ConfigError(
                f"acting=captured makes CUDA graphs, and the policy is on {self.device}: give device=cuda, or leave "
                "acting out."
            )
        return not self.options.packed and self._in_one_piece()

    def _captured(self) -> Graphs:
        if self._graphs is None or self._graphs.device != self.device:
            self._graphs = Graphs(self._captured_part, self, self.device, kept=GRAPHS)
        return self._graphs

    def _captured_part(self, asked: Mapping[str, Tensor], part: str, **options: bool) -> dict[str, Tensor]:
        if part == "view":
            return {"images": openvla_view(asked["frames"], self.config.image_size, **options)}
        with self._precision():
            fields = {
                name: asked[name] for name in ("prompt", "length", "proprio", "given", CONDITION) if name in asked
            }
            lengths = None if options["equal"] else np.zeros(0)
            inputs = ModelInputs(self.pixels(asked["images"]), lengths=lengths, **fields)
            drawn, evaluation = self._respond(inputs, asked["temperature"], asked.get("uniform"))
        return {"drawn": drawn} | {
            n: e for n, e in (evaluation._asdict() if evaluation else {}).items() if e is not None
        }

    def _view(self, frames: Tensor, crop: bool) -> Tensor:
        if torch.is_grad_enabled() or not self._captures():
            return super()._view(frames, crop)
        made = self._captured()({"frames": _filled(frames)}, part="view", crop=crop)
        return made["images"][: len(frames)].to(self.device)

    def _answer(self, record: Record, images: Tensor, sample: bool, generator: torch.Generator) -> SampledActions:
        if not self._captures():
            return super()._answer(record, images, sample, generator)
        rows, lengths = len(images), record["prompt_length"]
        equal = bool((lengths == lengths.max()).all())
        asked = self._fields(record) | {
            "images": torch.from_numpy(record["images"]),
            "temperature": torch.from_numpy(record["temperature"]),
        }
        if not equal:  # a few widths, so that there are few graphs
            asked["prompt"] = F.pad(asked["prompt"], (0, -asked["prompt"].shape[1] % WORDS))
        if (uniform := self._draws(rows, sample, generator)) is not None:
            asked["uniform"] = uniform
        filled = {name: _filled(each) for name, each in asked.items()}
        made = self._captured()(filled, part="answer", equal=equal, float8=self.in_float8)
        answer = {name: each[:rows] for name, each in made.items()}
        drawn = answer.pop("drawn")
        return SampledActions(drawn, Evaluation(**{"value": None} | answer) if answer else None)

    def warm_up(self, sample: bool, notify: Callable[[str], None]) -> None:
        if not self._captures():
            return
        notify("compiling decisions of one robot")
        size = self.config.image_size
        blank: dict[str, Any] = {camera: np.zeros((size, size, 3), np.uint8) for camera in self.config.cameras()}
        if self.scale_state is not None:
            blank["state"] = np.zeros(self.scale_state.size, np.float32)
        self.act([{**blank, "instruction": "pick up the object"}], sample, generator=torch.Generator())

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._graphs = None  # they would keep the weights where they were
        return super()._apply(fn, recurse)

    def _by_head(
        self, inputs: ModelInputs, head: Any, projector: Any, sample: bool, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        scheduler, shape = getattr(head, "noise_scheduler", None), (len(inputs.prompt), self.chunk, self.action_dim)
        if head is None or (scheduler is None) != (projector is None):
            raise ConfigError(
                "a noisy_action_projector and an action_head with a noise_scheduler go together: give "
                "both, or an L1 head alone."
            )
        if scheduler is None:
            if sample:
                raise ConfigError("action_head gives one action and draws none: use do_sample=False.")
            hidden = self.slots_of(inputs)
            return at_least_float32(getattr(head, "predict_action", head)(hidden)).view(shape), hidden
        actions = torch.randn(shape, generator=generator).to(self.device)
        for step in scheduler.timesteps:
            time = head.time_encoder(torch.as_tensor([step], dtype=torch.float32, device=self.device)).expand(
                len(actions), -1
            )
            hidden = self.slots_of(inputs, projector(actions.flatten(1)[..., None].to(self._dtype)), time)
            actions = scheduler.step(
                at_least_float32(head.predict_noise(hidden)).view(shape), step, actions
            ).prev_sample
        return actions, hidden

    def _judge(self, inputs: ModelInputs, drawn: Tensor, temperature: Tensor) -> Evaluation:
        if self.config.head == "l1":
            raise ConfigError("the L1 head has no probabilities to evaluate: use head='laplace', which adds a scale.")
        slots = self.slots_of(inputs)
        if self.config.head == "tokens":
            return self._weigh(self._distribution(slots, temperature), drawn, self._value(slots[:, 0]))
        mean, log_scale = self._laplace(slots, temperature)
        assert log_scale is not None
        return self._measure(slots, mean, log_scale, drawn)

    def _imitate(self, inputs: ModelInputs, wanted: np.ndarray, mask: Tensor) -> tuple[Tensor, dict[str, float]]:
        slots = self.slots_of(inputs)
        if self.config.head == "tokens":
            return self._token_loss(slots, wanted, mask)
        mean, log_scale = self._laplace(slots, torch.ones(len(slots)))
        apart = (mean - torch.from_numpy(wanted).to(mean)).abs()[mask]
        if log_scale is None:
            return apart.mean(), {"loss": apart.mean().item(), "l1": apart.mean().item()}
        # the scale is fitted to a mean that it may not move: the L1 loss alone trains that
        spread = log_scale[mask]
        surprise = (spread + apart.detach() * (-spread).exp() + math.log(2)).mean()
        loss = apart.mean() + surprise
        return loss, {"loss": loss.item(), "l1": apart.mean().item(), "nll": surprise.item()}

    def _laplace(self, slots: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor | None]:
        """Middle and log-scale of each number, float32 [B, chunk, action_dim]. The temperature widens what is drawn and
        what is judged alike; RIPT-VLA widens the draws only, so that its ratios are of a policy that never acted."""
        assert self.action_head is not None
        mean = at_least_float32(self.action_head(slots))
        if self.scale_head is None:
            return mean, None
        log_scale = at_least_float32(self.scale_head(slots))
        if self.options.log_scale_range is not None:
            log_scale = log_scale.clamp(*self.options.log_scale_range)
        return mean, log_scale + temperature.to(log_scale).log()[:, None, None]

    def _measure(self, slots: Tensor, mean: Tensor, log_scale: Tensor, actions: Tensor) -> Evaluation:
        log_prob = -(actions - mean).abs() * (-log_scale).exp() - log_scale - math.log(2)
        return Evaluation(log_prob, 1 + math.log(2) + log_scale, self._value(slots[:, 0]))


class OpenVLA(OpenVLAPolicy, variant="ar"):
    """One token after the other, with what earlier tokens left in a cache; each sees only what stands before it.

    The prefix is one pass and the answer another, when acting and when judging: so both
    give the same log-probabilities, bit for bit.
    """

    causal = True

    def prefix_of(self, inputs: ModelInputs, kept: list[tuple[Tensor, Tensor]] | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states of images and prompt [B, S, width], padding included, and where each prompt ends, [B]."""
        before, end = self._prefix(inputs)
        places = torch.arange(before.shape[1], device=before.device)[None]
        # padding comes after all that counts
        return self._run(before, places, AttentionLayout(causal=True, kept=kept)), end

    def _answering(self, inputs: ModelInputs) -> Tensor:
        return _at(*self.prefix_of(inputs))

    def _sample_actions(
        self, inputs: ModelInputs, sample: bool, temperature: Tensor, generator: torch.Generator
    ) -> SampledActions:
        prefix: list[tuple[Tensor, Tensor]] = []
        hidden, end = self.prefix_of(inputs, prefix)
        uniform = torch.rand(len(hidden), self.slots, generator=generator).to(hidden.device) if sample else None
        last, past, tokens = (
            _at(hidden, end),
            prefix,
            torch.empty(len(hidden), 0, dtype=torch.int64, device=hidden.device),
        )
        while True:
            log_probs = self._distribution(last, temperature)[:, 0]
            place = log_probs.argmax(-1) if uniform is None else pick(log_probs, uniform[:, tokens.shape[1]])
            tokens = torch.cat([tokens, (place + self._first)[:, None]], dim=1)
            if tokens.shape[1] == self.slots:
                break
            kept: list[tuple[Tensor, Tensor]] = []
            last = self._follow(inputs, tokens[:, -1:], hidden.shape[1], end, past, tokens.shape[1] - 1, kept)
            past = kept
        tokens = tokens.view(-1, self.chunk, self.action_dim)
        return SampledActions(tokens, self._evaluation(inputs, tokens, temperature, hidden, end, prefix))

    def token_log_probs(self, record: Record) -> Tensor:
        tokens, prefix = torch.from_numpy(record["tokens"]).to(self.device), list[tuple[Tensor, Tensor]]()
        with self._precision():
            inputs = self._inputs(record)
            hidden, end = self.prefix_of(inputs, prefix)
            answer = self._predicting(inputs, tokens.flatten(1).long(), hidden, end, prefix)
            return self._distribution(answer, torch.from_numpy(record["temperature"]))

    def _judge(self, inputs: ModelInputs, drawn: Tensor, temperature: Tensor) -> Evaluation:
        if self.options.packed and inputs.lengths is not None:
            hidden = self._packed(inputs, drawn.flatten(1).long())
            return self._weigh(self._distribution(hidden, temperature), drawn, self._value(hidden[:, 0]))
        prefix: list[tuple[Tensor, Tensor]] = []
        hidden, end = self.prefix_of(inputs, prefix)
        return self._evaluation(inputs, drawn, temperature, hidden, end, prefix)

    def _imitate(self, inputs: ModelInputs, wanted: np.ndarray, mask: Tensor) -> tuple[Tensor, dict[str, float]]:
        tokens = torch.from_numpy(self.token.encode(wanted)).to(self.device).flatten(1)
        prefix: list[tuple[Tensor, Tensor]] = []
        hidden, end = self.prefix_of(inputs, prefix)
        return self._token_loss(self._predicting(inputs, tokens, hidden, end, prefix), wanted, mask)

    def _evaluation(
        self,
        inputs: ModelInputs,
        drawn: Tensor,
        temperature: Tensor,
        hidden: Tensor,
        end: Tensor,
        prefix: list[tuple[Tensor, Tensor]],
    ) -> Evaluation:
        answer = self._predicting(inputs, drawn.flatten(1).long(), hidden, end, prefix)
        return self._weigh(self._distribution(answer, temperature), drawn, self._value(answer[:, 0]))

    def _predicting(
        self, inputs: ModelInputs, tokens: Tensor, hidden: Tensor, end: Tensor, prefix: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Hidden states that predict `tokens` [B, slots], all known: [B, slots, width]."""
        last = _at(hidden, end)
        if self.slots == 1:
            return last
        return torch.cat([last, self._follow(inputs, tokens[:, :-1], hidden.shape[1], end, prefix, 0)], dim=1)

    def _follow(
        self,
        inputs: ModelInputs,
        tokens: Tensor,
        before: int,
        end: Tensor,
        past: list[tuple[Tensor, Tensor]],
        done: int,
        kept: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """Hidden states of `tokens` [B, n], which follow a prefix and `done` tokens of the answer."""
        number = tokens.shape[1]
        query, key = (
            torch.arange(number, device=end.device)[:, None],
            torch.arange(before + done + number, device=end.device),
        )
        mask = (key <= before + done + query)[None, None]
        if (valid := self._valid(inputs, before, done + number)) is not None:
            mask = mask & valid[:, None, None]
        places = end[:, None] + 1 + done + query.T
        return self._run(self._embed(tokens), places, AttentionLayout(mask=mask, past=past, kept=kept))

    def _packed(self, inputs: ModelInputs, tokens: Tensor) -> Tensor:
        """Does what `_predicting` does, in one pass without padding."""
        before, end = self._prefix(inputs)
        start, answer = before.shape[1], self.slots - 1
        x = torch.cat([before, self._embed(tokens[:, :answer]).to(before.dtype)], dim=1)
        places = torch.arange(x.shape[1], device=x.device)
        mask = (places <= places[:, None])[None, None]
        if (valid := self._valid(inputs, start, answer)) is not None:
            mask = mask & valid[:, None, None]
        places = places - (places >= start) * (start - 1 - end[:, None])
        hidden = self._run(x, places, AttentionLayout(mask=mask, packing=self._packing(inputs, start, answer)))
        return torch.cat([_at(hidden, end), hidden[:, start:]], dim=1)


def _filled(rows: Tensor) -> Tensor:
    """With the first row repeated up to one of a few numbers: at most an eighth more."""
    step = 1 << max(0, (len(rows) - 1).bit_length() - 3)
    more = -len(rows) % step
    return torch.cat([rows, rows[:1].expand(more, *rows.shape[1:])]) if more else rows


def _at(hidden: Tensor, end: Tensor) -> Tensor:
    """The hidden state [B, 1, width] of each prompt's last token."""
    return hidden.gather(1, end[:, None, None].expand(-1, 1, hidden.shape[-1]))


def laplace(uniform: Tensor) -> Tensor:
    """Numbers of the Laplace distribution with middle 0 and scale 1, from uniform ones in [0, 1)."""
    centered = uniform - 0.5
    return -centered.sign() * torch.log1p(-2 * centered.abs().clamp(max=0.5 - 2**-25))
