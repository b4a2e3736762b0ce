"""The parts of pi0 and SmolVLA: a SigLIP tower, and Gemma or Llama layers of which two stacks share their attention.

The *prefix* (pictures, words) goes through the language model once, and leaves the keys and values of each
layer. The *suffix* (the actions) goes through the action expert, layer by layer beside it, and looks at
those. The prefix never looks at the suffix, so this is the joined attention of the original in two passes,
and the first is done once for all steps of a flow.

Parameter names are those of `transformers`, which the published checkpoints have; nothing of it is imported here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hilt.policies.base import at_least_float32
from hilt.policies.graphs import JoinedLinear
from hilt.policies.precision import BFLOAT16

KeysValues = list[tuple[Tensor, Tensor]]
"""For each layer: keys with their rotation, and values, [B, key_value_heads, tokens, head_dim]."""
Condition: TypeAlias = "Tensor | tuple[Tensor, Tensor] | None"
"""What conditions the norms of a layer: one for both, or what the dense layer of each has made of it"""
Runner = Callable[..., Any]
"""``run(layer, *inputs)``: `plain`, `recomputed`, `compiled()`, `economical`, `quick` or one of `for_gradients`"""


def plain(layer: Callable[..., Any], *inputs: Any) -> Any:
    return layer(*inputs)


def projected(layer: nn.Module, x: Tensor, silu: bool = False) -> Tensor:
    """A linear layer, activated if asked for."""
    y: Tensor = layer(x)
    return F.silu(y) if silu else y


@cache
def compiled() -> Runner:
    """One compiled form for all layers of one kind."""
    run: Runner = torch.compile(plain, dynamic=False)
    return run


def quick(layer: Any, *inputs: Any) -> Any:
    """The form for decisions on CUDA: kernels of our own where they fit, else compiled."""
    from hilt.policies import fused_layer

    if layer is projected and fused_layer.fits_linear(*inputs[:2]):
        return fused_layer.linear(*inputs)
    if isinstance(layer, GemmaLayer) and fused_layer.attends(layer, *inputs[:2]):
        x, sight, other, condition = (*inputs, None, None)[:4]
        asked, own, gate = compiled()(before_attention, layer, x, sight.rotation, other is None, condition)
        seen = fused_layer.attention(asked.flatten(0, 1), other or own, sight, x.shape[:2], layer.self_attn.heads)
        seen = seen.view(*x.shape[:2], -1)
        return compiled()(behind_attention, layer, x, seen, gate, condition), *own
    return compiled()(layer, *inputs)


def recomputed(layer: Callable[..., Any], *inputs: Any, run: Runner = plain) -> Any:
    """The inner values of the layer are computed once more in the backward pass instead of being kept."""
    if not torch.is_grad_enabled():
        return run(layer, *inputs)
    return checkpoint(run, layer, *inputs, use_reentrant=False, preserve_rng_state=False)


def economical(layer: Any, *inputs: Any) -> Any:
    """The compiled form for gradients: the layers of the vision tower are computed once more in the backward pass. That
    costs little time and saves much memory."""
    if isinstance(layer, SiglipLayer):
        return recomputed(layer, *inputs, run=compiled())
    return compiled()(layer, *inputs)


def for_gradients(policy: nn.Module, share: float, compiles: bool) -> Runner:
    """The form for gradients of which the first `share` of the layers of each stack is computed once more in the
    backward pass; with 1, everything that is run by it."""
    once: Runner = economical if compiles else plain
    twice: Runner = partial(recomputed, run=compiled()) if compiles else recomputed
    if share in (0, 1):
        return twice if share else once
    stacks = [each for each in policy.modules() if isinstance(each, nn.ModuleList) and len(each)]
    stacks = [stack for stack in stacks if isinstance(stack[0], (GemmaLayer, SiglipLayer))]
    chosen = {id(layer) for stack in stacks for layer in list(stack)[: round(share * len(stack))]}

    def run(layer: Callable[..., Any], *inputs: Any) -> Any:
        return (twice if id(layer) in chosen else once)(layer, *inputs)

    return run


def in_precision(run: Runner, compute: str) -> Runner:
    """The same form, whose layers multiply in float32 or bfloat16 where their weights are float32."""
    if compute != BFLOAT16:
        return run

    def lower(layer: Callable[..., Any], *inputs: Any) -> Any:
        if not isinstance(layer, (GemmaLayer, SiglipLayer)) or inputs[0].is_meta:
            return run(layer, *inputs)
        # without its cache, which would hold a second copy of all weights to the end of a pass
        with torch.autocast(inputs[0].device.type, torch.bfloat16, cache_enabled=False):
            return run(layer, *inputs)

    return lower


@dataclass(frozen=True)
class StackConfig:
    """Sizes of one stack of layers."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gemma: bool = True
    """Gemma: norms multiply by 1 + weight, GELU. Otherwise Llama: norms multiply by weight, SiLU."""
    epsilon: float = 1e-6
    condition: int = 0
    """Width of what conditions the norms (adaRMS); 0: they are plain."""


@dataclass(frozen=True)
class VisionConfig:
    """Sizes of the SigLIP tower."""

    hidden_size: int = 1152
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    intermediate_size: int = 4304
    patch_size: int = 14
    image_size: int = 224

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2


class RMSNorm(nn.Module):
    """In float32. With a condition, [B, width] or of each token, scale, shift and the gate of the residual come from
    it (adaRMS)."""

    def __init__(self, config: StackConfig):
        super().__init__()
        self.epsilon, self.offset = config.epsilon, float(config.gemma)
        if config.condition:
            self.dense = nn.Linear(config.condition, 3 * config.width)
            nn.init.zeros_(self.dense.weight)
        else:
            self.weight = nn.Parameter(torch.full((config.width,), 1 - self.offset))

    def modulation(self, condition: Tensor) -> Tensor:
        """[..., 3 * width]: scale, shift and gate of a condition."""
        return at_least_float32(self.dense(condition.to(self.dense.weight.dtype)))

    def forward(self, x: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """`condition` may also be what `modulation` made of it."""
        wide = at_least_float32(x)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        if condition is None:
            return (wide * (self.offset + at_least_float32(self.weight))).to(x.dtype), None
        made = condition if condition.shape[-1] == 3 * x.shape[-1] else self.modulation(condition)
        scale, shift, gate = (made if made.ndim == 3 else made[:, None]).chunk(3, -1)
        return (wide * (1 + scale) + shift).to(x.dtype), gate.to(x.dtype)


class GemmaAttention(nn.Module):
    """The projections of one layer. `key_width`: its keys and values are made from
    those of the other stack, which are this wide."""

    def __init__(self, config: StackConfig, key_width: int = 0):
        super().__init__()
        self.heads, self.head_dim, self.crosses = config.num_heads, config.head_dim, key_width > 0
        inner, shared = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.width, inner, bias=False)
        self.k_proj = nn.Linear(key_width or config.width, shared, bias=False)
        self.v_proj = nn.Linear(key_width or config.width, shared, bias=False)
        self.o_proj = nn.Linear(inner, config.width, bias=False)
        self.joined = JoinedLinear()

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of one's own, [B, heads, tokens, head_dim]."""
        return tuple(self.split(one) for one in self.joined(x, self.q_proj, self.k_proj, self.v_proj))

    def split(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: StackConfig):
        super().__init__()
        self.gemma = config.gemma
        self.gate_proj = nn.Linear(config.width, config.mlp_dim, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_dim, bias=False)
        self.down_proj = nn.Linear(config.mlp_dim, config.width, bias=False)
        self.joined = JoinedLinear()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.joined(x, self.gate_proj, self.up_proj)
        return self.down_proj((F.gelu(gate, approximate="tanh") if self.gemma else F.silu(gate)) * up)


class GemmaLayer(nn.Module):
    """One layer of a stack. `crosses`: it looks at the other stack only, through projections of its own."""

    def __init__(self, config: StackConfig, key_width: int = 0):
        super().__init__()
        self.crosses = key_width > 0
        self.self_attn = GemmaAttention(config, key_width)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config)
        self.post_attention_layernorm = RMSNorm(config)

    def forward(
        self, x: Tensor, sight: Sight, other: tuple[Tensor, Tensor] | None = None, condition: Condition = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's output, its keys and values. `other`: keys and values of the other stack, which are looked at as
        well; those that `across` made, if it crosses."""
        at, rotation = self.self_attn, sight.rotation
        normed, gate = self.input_layernorm(x, _both(condition)[0])
        if self.crosses and other is not None:
            queries, (keys, values) = rotation(at.split(at.q_proj(normed))), other
        else:
            queries, keys, values = at.project(normed)
            queries, keys = rotation(queries), rotation(keys)
        if other is None or self.crosses:
            seen = attend(queries, keys, values, sight.mask)
        else:
            seen = attend(queries, torch.cat([other[0], keys], 2), torch.cat([other[1], values], 2), sight.mask)
        return behind_attention(self, x, _flat(seen), gate, condition), keys, values

    def across(self, other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Projects the keys and values of the other stack for a layer that crosses; this is done once per decision."""
        at, (keys, values) = self.self_attn, (_flat(one) for one in other)
        return at.split(at.k_proj(keys)).contiguous(), at.split(at.v_proj(values)).contiguous()

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Its keys and values alone, where nobody asks for its output."""
        at = self.self_attn
        normed, _ = self.input_layernorm(x)
        return rotation(at.split(at.k_proj(normed))), at.split(at.v_proj(normed))


def before_attention(
    layer: GemmaLayer, x: Tensor, rotation: Rotation, apart: bool, condition: Condition
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None], Tensor | None]:
    """Queries [B, tokens, columns]; its own keys and values, if it has some, `apart` or in the same columns; and its
    gate."""
    at = layer.self_attn
    normed, gate = layer.input_layernorm(x, _both(condition)[0])
    if layer.crosses:
        return _flat(rotation(at.split(at.q_proj(normed)))), (None, None), gate
    queries, keys, values = at.project(normed)
    asked, keys = _flat(rotation(queries)), rotation(keys)
    if apart:
        return asked, (keys.contiguous(), values.contiguous()), gate
    return torch.cat([asked, _flat(keys), _flat(values)], -1), (None, None), gate


def behind_attention(layer: GemmaLayer, x: Tensor, seen: Tensor, gate: Tensor | None, condition: Condition) -> Tensor:
    """The output of a layer whose attention has `seen` [B, tokens, columns]."""
    x = _add(x, layer.self_attn.o_proj(seen), gate)
    normed, gate = layer.post_attention_layernorm(x, _both(condition)[1])
    return _add(x, layer.mlp(normed), gate)


class GemmaStack(nn.Module):
    """Layers and a final norm; with `vocabulary`, an embedding of words, too."""

    def __init__(self, config: StackConfig, vocabulary: int = 0, key_width: Callable[[int], int] = lambda layer: 0):
        super().__init__()
        self.config = config
        if vocabulary:
            self.embed_tokens = embedding(vocabulary, config.width)
        self.layers = nn.ModuleList(GemmaLayer(config, key_width(i)) for i in range(config.depth))
        self.norm = RMSNorm(config)

    def read(self, x: Tensor, sight: Sight, run: Runner, output: bool) -> tuple[KeysValues, Tensor | None]:
        """The keys and values of all layers, and, if asked for, the output behind the final norm."""
        cache: KeysValues = []
        last = len(self.layers) - 1
        for place, layer in enumerate(self.layers):
            if place == last and not output:
                keys, values = layer.keys_values(x, sight.rotation)
                return [*cache, (keys.contiguous(), values.contiguous())], None
            x, keys, values = run(layer, x, sight)
            cache.append((keys.contiguous(), values.contiguous()))  # they are read at each step of a flow
        return cache, self.norm(x)[0]

    def through(
        self, x: Tensor, sights: tuple[Sight, Sight], cache: KeysValues, run: Runner, conditions: Any = None
    ) -> Tensor:
        """The output behind the final norm of a suffix that looks at the `cache` of the other stack. Sights are those
        of layers with keys of their own, and of those that cross; conditions those of each layer and the final norm."""
        own, across = sights
        conditions = conditions or [None] * (len(self.layers) + 1)
        if run is quick:
            from hilt.policies import fused_layer

            if fused_layer.fits(self, x, own, conditions):
                return fused_layer.stack(self, x, sights, cache, conditions)
        for layer, kept, condition in zip(self.layers, cache, conditions, strict=False):
            x, *_ = run(layer, x, across if layer.crosses else own, kept, condition)
        normed: Tensor = run(self.norm, x, conditions[-1])[0]
        return normed

    def modulations(self, condition: Tensor) -> list[Any]:
        """What the norms of each layer, and the final one, make of a condition."""
        each: list[Any] = [
            (layer.input_layernorm.modulation(condition), layer.post_attention_layernorm.modulation(condition))
            for layer in self.layers
        ]
        return [*each, self.norm.modulation(condition)]


class Rotation:
    """Rotary positions [B, tokens] of keys and queries; computed in float32."""

    def __init__(self, positions: Tensor, head_dim: int, wavelength: float = 10_000.0):
        half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
        angles = positions[:, None, :, None].float() * (1.0 / wavelength ** (half / head_dim))
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, x: Tensor) -> Tensor:
        first, second = at_least_float32(x).chunk(2, -1)
        return torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], -1).to(x.dtype)


class Sight(NamedTuple):
    """Where the tokens of a stack are, and what they see."""

    rotation: Rotation
    mask: Tensor | None
    """bool [B, 1, tokens, keys], keys of the other stack first; None: all"""
    valid: Tensor | None = None
    """bool [B, keys] of the other stack, or of the only one, where all tokens see the same of it"""
    alone: int = 0
    """First tokens that see no later one of their own stack; the others see all of it"""


def looking_at(valid: Tensor, tokens: int, alone: int, rotation: Rotation) -> Sight:
    """The sight of a suffix: it sees what is `valid` of the prefix and itself, but its first tokens no later one."""
    place = torch.arange(tokens, device=valid.device)
    own = place[None, :] <= torch.where(place < alone, place, tokens)[:, None]
    mask = torch.cat([valid[:, None, :].expand(-1, tokens, -1), own.expand(len(valid), -1, -1)], 2)
    return Sight(rotation, mask[:, None], valid, alone)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attention [B, heads, queries, head_dim] where fewer heads of keys serve several heads of queries: their queries
    are put one after the other, so that no key is copied."""
    heads, count = queries.shape[1:3]
    shared = heads // keys.shape[1]
    if shared == 1:
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    if mask is not None and mask.shape[2] > 1:
        mask = mask.repeat(1, 1, shared, 1)
    grouped = queries.reshape(len(queries), keys.shape[1], shared * count, queries.shape[3])
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(queries.shape)


def embedding(rows: int, width: int) -> nn.Embedding:
    """Returns torch's embedding; on the meta device its numbers are not drawn: that
    would import torch's compiler, for seconds."""
    weight = torch.empty(rows, width)
    return nn.Embedding(rows, width, _weight=weight if weight.is_meta else weight.normal_())


def mlp(sizes: Sequence[int], activation: type[nn.Module]) -> nn.Sequential:
    """A head of these widths."""
    layers: list[nn.Module] = []
    for size, after in itertools.pairwise(sizes):
        layers += [nn.Linear(size, after), activation()]
    return nn.Sequential(*layers[:-1])


def _both(condition: Condition) -> tuple[Tensor | None, Tensor | None]:
    return condition if isinstance(condition, tuple) else (condition, condition)


def _flat(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).flatten(2)


def _add(x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
    return x + y if gate is None else x + y * gate


# --- pictures ---


class SiglipAttention(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.heads, self.crosses = config.num_attention_heads, False
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            self.add_module(name, nn.Linear(config.hidden_size, config.hidden_size))
        self.joined = JoinedLinear()

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for one in self.joined(x, self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(_flat(F.scaled_dot_product_attention(queries, keys, values)))


class SiglipLayer(nn.Module):
    def __init__(self, config: VisionConfig):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.self_attn = SiglipAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.mlp = nn.ModuleDict(
            {
                "fc1": nn.Linear(config.hidden_size, config.intermediate_size),
                "fc2": nn.Linear(config.intermediate_size, config.hidden_size),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.layer_norm2(x)), approximate="tanh"))


class Siglip(nn.Module):
    """Pictures [B, 3, H, W] in -1..1 to features [B, patches, hidden_size]."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        patch = nn.Conv2d(3, config.hidden_size, config.patch_size, stride=config.patch_size)
        self.embeddings = nn.ModuleDict(
            {"patch_embedding": patch, "position_embedding": embedding(config.tokens, config.hidden_size)}
        )
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(SiglipLayer(config) for _ in range(config.num_hidden_layers))}
        )
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=1e-6)

    def forward(self, pixels: Tensor, run: Runner = plain) -> Tensor:
        patch, position = self.embeddings["patch_embedding"], self.embeddings["position_embedding"]
        x = patch(pixels.to(patch.weight.dtype)).flatten(2).transpose(1, 2) + position.weight
        for layer in self.encoder["layers"]:
            x = run(layer, x)
        return self.post_layernorm(x)


def row_of(moments: Any, place: int) -> Any:
    """One row of each tensor in lists and tuples of them."""
    if isinstance(moments, Tensor):
        return moments[place : place + 1]
    return type(moments)(row_of(each, place) for each in moments)


def mean_values(cache: KeysValues, valid: Tensor) -> Tensor:
    """The values of the last layer, all heads side by side, in the mean over the valid tokens [B, tokens]: [B, width].
    They are computed whether or not anybody asks for the layer's output."""
    values, there = cache[-1][1].transpose(1, 2).flatten(2), valid[..., None]
    return (at_least_float32(values) * there).sum(1) / there.sum(1)
