"""Rollouts in float8: large matrix products of a policy that acts are of 8-bit numbers, while it learns as before.

    policy_options.rollout_precision=fp8            # on a GPU of compute capability 8.9 or newer
    policy_options.rollout_precision=fp8_emulated   # the same numbers on any device, slower: for experiments

Within `Float8Rollouts.acting` linear layers multiply float8 copies of their weights with float8 copies of their input,
each row of both with a scale of its own, and add up in float32. The weights themselves, their gradients and whatever a
checkpoint has are untouched. A copy is made anew as soon as torch notes that its weight has changed: whoever writes
past torch (through ``.data``, or with a fused optimizer) calls `torch.autograd.graph.increment_version`, as
`hilt.algos.adam` does. Where gradients are taken, layers compute as without the option.

A policy that acts in another precision than it learns in is another policy: `mismatch` measures how far apart the two
are, and runs with this option must correct for it by importance weights (`algorithm.recompute_log_prob`).
"""

from __future__ import annotations

import importlib.util
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hilt.core.errors import ConfigError
from hilt.core.validate import Need
from hilt.policies.base import Policy, Record, join, select

SAME, FP8, EMULATED = "same", "fp8", "fp8_emulated"
ROLLOUT_PRECISIONS = (SAME, FP8, EMULATED)
KIND = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3, which has four bits of precision: a rounding error is 1/16 of a number at most"""
SMALLEST_SCALE = 1e-12
"""The scale of a row of zeros, so that nothing is divided by zero"""
CAPABILITY = (8, 9)
"""The first compute capability of NVIDIA's cards with products of float8: Ada and Hopper"""
MULTIPLE = 16
"""Numbers of inputs and outputs must be multiples of this; other layers stay as they are"""
FIRST_LAYER = 2
"""The first layer of a language model that acts in float8 by default: the error of the first two is most of the KL of a
model with random weights, and they are a sixteenth of the products"""
COMPARED_ROWS = 16
"""Chunks of a training step, at each rank, on which both precisions are compared"""

ACTS_IN_FLOAT8 = Need("{here}rollout_precision=fp8", lambda c: c.rollout_precision != SAME)


def check_float8(precision: str, device: torch.device | str) -> None:
    """Raises where a device has no products of float8."""
    place = torch.device(device)
    if precision != FP8 or place.type == "meta":  # it is only estimated
        return
    emulated = f"rollout_precision={EMULATED} computes the same numbers anywhere, slower"
    if place.type != "cuda":
        raise ConfigError(
            f"rollout_precision=fp8 needs a GPU with float8 products, and the policy is on {place.type}: leave it out; "
            f"{emulated}."
        )
    if (found := torch.cuda.get_device_capability(place)) < CAPABILITY:
        raise ConfigError(
            f"rollout_precision=fp8 needs compute capability {_dotted(CAPABILITY)} (Ada, Hopper) or newer, and "
            f"{torch.cuda.get_device_name(place)} has {_dotted(found)}: leave it out; {emulated}."
        )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


# --- numbers and layers ---


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8 [..., N] and the float32 scale [..., 1] of each row, by which it must be multiplied."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_SCALE) / LARGEST
    return (wide / scale).to(KIND), scale


@cache
def _compiled_quantize() -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """One kernel instead of six, for layers that are not compiled themselves."""
    compiled: Callable[[Tensor], tuple[Tensor, Tensor]] = torch.compile(quantize, dynamic=True)
    return compiled


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """What `quantize` gives, by the fastest way on the device of `x`."""
    if x.device.type != "cuda" or torch.compiler.is_compiling() or not _has_triton():
        return quantize(x)
    return _compiled_quantize()(x)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class Float8Weight:
    """The float8 copy of the weight of one layer. It is in no state dict."""

    def __init__(self, layer: nn.Linear, switch: Switch):
        weight = layer.weight
        self.switch = switch
        self.values = torch.empty(weight.shape, dtype=KIND, device=weight.device)
        self.scale = torch.empty((1, len(weight)), dtype=torch.float32, device=weight.device)
        self._made_of: tuple[int, int] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a policy makes its own."""

    def is_current(self, weight: Tensor) -> bool:
        """Whether the weight is where it was and has not been written to since the copy was made."""
        return self._made_of == _version(weight)

    def refresh(self, weight: Tensor) -> None:
        """Takes over the weight of now, in place: what was captured in a CUDA graph reads the new numbers."""
        values, scale = quantized(weight.detach())
        self.values.copy_(values)
        self.scale.copy_(scale.T)
        self._made_of = _version(weight)


def _version(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), weight._version


class Switch:
    """Whether the layers of a policy compute in float8 now."""

    def __init__(self, emulated: bool):
        self.on, self.emulated = False, emulated


class Float8Linear(nn.Linear):
    """A linear layer with a float8 copy of its weight, which it uses while the policy acts."""

    float8: Float8Weight | None = None

    def computes_in_float8(self) -> bool:
        return self.float8 is not None and self.float8.switch.on and not torch.is_grad_enabled()

    def forward(self, x: Tensor) -> Tensor:
        float8 = self.float8
        if float8 is None or not self.computes_in_float8():
            return F.linear(x, self.weight, self.bias)
        kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        return product(x, float8.values, float8.scale, self.bias, float8.switch.emulated).to(kind)


def product(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, emulated: bool) -> Tensor:
    """x W' + b, with W as float8 `values` [N, K] and `scale` [1, N]: bfloat16, or float32 where it is emulated."""
    rows, row_scale = quantized(x.reshape(-1, x.shape[-1]))
    if emulated:
        with torch.autocast(x.device.type, enabled=False):
            y = rows.float() @ values.float().T * row_scale * scale
        y = y if bias is None else y + bias.float()
    else:
        y = torch._scaled_mm(
            rows, values.T, scale_a=row_scale, scale_b=scale, bias=None if bias is None else bias.to(torch.bfloat16),
            out_dtype=torch.bfloat16, use_fast_accum=True,
        )  # fmt: skip
    return y.unflatten(0, x.shape[:-1])


class Float8Copy:
    """The float8 copies of the large linear layers of a policy."""

    def __init__(self, layers: Sequence[nn.Linear], precision: str):
        if not layers:
            raise ConfigError(
                f"rollout_precision={precision}: no layer of this policy would act in float8, for which its inputs and "
                f"outputs are multiples of {MULTIPLE}. Give a lower fp8_first_layer, or leave rollout_precision out."
            )
        self.switch, self.layers = Switch(precision == EMULATED), list(layers)
        self.refresh_s = 0.0
        """Seconds that the last refresh took"""
        for layer in self.layers:
            layer.__class__ = Float8Linear
            layer.float8 = Float8Weight(layer, self.switch)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a policy makes its own."""

    def belongs_to(self, layers: Sequence[nn.Linear]) -> bool:
        """Whether these are the layers that have copies, and where the copies are."""
        return len(layers) == len(self.layers) and all(
            mine is other and mine.weight.device == mine.float8.values.device
            for mine, other in zip(self.layers, layers, strict=True)
        )

    def refresh(self) -> None:
        """Makes the copies anew whose weights have changed."""
        stale = [layer for layer in self.layers if not layer.float8.is_current(layer.weight)]
        if not stale:
            return
        began = _now(stale[0].weight.device)
        with torch.no_grad():
            for layer in stale:
                layer.float8.refresh(layer.weight)
        self.refresh_s = _now(stale[0].weight.device) - began


def _now(device: torch.device) -> float:
    """The clock, after the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def float8_bytes(layers: Sequence[nn.Linear]) -> int:
    """The memory that the float8 copies of these layers take."""
    return sum(layer.weight.numel() + 4 * len(layer.weight) for layer in layers)


# --- policies ---


class Float8Rollouts(Policy):
    """A policy whose rollouts may be in float8: its `act` computes within `acting`, its `evaluate` does not."""

    _float8: Float8Copy | None = None
    _learning_precision = False

    rollout_precision: str = SAME
    """One of `ROLLOUT_PRECISIONS`"""

    @abstractmethod
    def float8_parts(self) -> Sequence[nn.Module]:
        """The modules whose linear layers are large: those of vision and language, without heads and embeddings."""

    def token_log_probs(self, record: Record) -> Tensor | None:
        """The log-probabilities of all tokens at each place of the answers of a record, [B, ..., tokens]; None of a
        policy whose answers are not tokens."""
        return None

    def float8_layers(self) -> list[nn.Linear]:
        """The linear layers that have a float8 copy."""
        return [
            layer
            for part in self.float8_parts()
            for layer in part.modules()
            if type(layer) in (nn.Linear, Float8Linear) and not any(size % MULTIPLE for size in layer.weight.shape)
        ]

    @property
    def in_float8(self) -> bool:
        """Whether layers compute in float8 now."""
        return self._float8 is not None and self._float8.switch.on

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Within it layers compute in the precision of rollouts; without gradients."""
        if self.rollout_precision == SAME:
            yield
            return
        check_float8(self.rollout_precision, self.device)
        if self._float8 is None or not self._float8.belongs_to(self.float8_layers()):
            self._float8 = Float8Copy(self.float8_layers(), self.rollout_precision)
        if self._learning_precision:
            yield
            return
        self._float8.refresh()
        switch = self._float8.switch
        switch.on = True
        try:
            with torch.no_grad():
                yield
        finally:
            switch.on = False

    @contextmanager
    def in_learning_precision(self) -> Iterator[None]:
        """Within it `act` computes as `evaluate` does: for validations, which judge the policy that will be saved."""
        self._learning_precision = True
        try:
            yield
        finally:
            self._learning_precision = False


def learning_precision(policy: Policy) -> AbstractContextManager[None]:
    """`Float8Rollouts.in_learning_precision`; nothing is done for a policy that always computes so."""
    return policy.in_learning_precision() if isinstance(policy, Float8Rollouts) else nullcontext()


def compared(policy: Float8Rollouts, record: Record) -> dict[str, Tensor]:
    """How far the policy that acts is from the one that learns, with the weights of now, for each number of the actions
    of a record that it drew.

    rollout_kl       KL(p_acting || p_learning) in nats: exact for tokens, else r - 1 - log r with
                     r = p_learning / p_acting of what was drawn, whose mean is that
    rollout_changed  1 where the likeliest token is another one; of policies with tokens
    """
    with torch.no_grad():
        learning = policy.token_log_probs(record)
        if learning is None:
            drawn = policy.evaluate(record).log_prob
            with policy.acting():
                apart = (drawn - policy.evaluate(record).log_prob).double()
            apart = apart if policy.decides is None else apart[:, torch.from_numpy(policy.decides)]
            return {"rollout_kl": apart.exp() - 1 - apart}
        with policy.acting():
            acting = policy.token_log_probs(record)
        assert acting is not None
        kl = (acting.double().exp() * (acting.double() - learning)).sum(-1)
        return {"rollout_kl": kl, "rollout_changed": (acting.argmax(-1) != learning.argmax(-1)).double()}


def mismatch(
    policy: Policy, records: Sequence[Record], add_up: Callable[[Tensor], Tensor] = lambda sums: sums
) -> dict[str, float]:
    """The means of `compared` over some rows of these records, and `rollout_quantize_ms`, the time that the last copies
    took; empty for a policy whose rollouts have the precision of its learning. `add_up` adds the sums of all ranks."""
    if not isinstance(policy, Float8Rollouts) or policy.rollout_precision == SAME:
        return {}
    names, found = ("rollout_kl", "rollout_changed"), dict[str, Tensor]()
    if some := _some_rows(records):
        found = compared(policy, some)
    each = [found.get(name, torch.zeros(0)) for name in names]
    sums = [float(number) for x in each for number in (x.sum(), x.numel())]
    took = [1e3 * policy._float8.refresh_s, 1.0] if policy._float8 is not None else [0.0, 0.0]
    added = add_up(torch.tensor([*sums, *took], dtype=torch.float64)).tolist()
    pairs = zip((*names, "rollout_quantize_ms"), added[::2], added[1::2], strict=True)
    return {name: total / count for name, total, count in pairs if count}


def _some_rows(records: Sequence[Record]) -> Record:
    """Rows at even distances, at most `COMPARED_ROWS`; empty if there are none."""
    places = [(number, row) for number, record in enumerate(records) for row in range(len(record["log_prob"]))]
    chosen = places[:: -(-len(places) // COMPARED_ROWS) or 1]
    return join([select(records[number], slice(row, row + 1)) for number, row in chosen]) if chosen else {}
