"""The operations of a call, counted without doing them: products, convolutions, attention, and bytes that are moved.

    counts = counted(lambda: SmallVLA(config), lambda policy: policy.evaluate(record))
    calibration.seconds(counts, "acting")

As in `hilt.policies.io.memory`, there is no formula of a policy to keep true: it is built of tensors without memory,
its own code runs on them, and every operation that torch is asked for is noted with its shapes, those of a backward
pass, too. Work on the host, such as numpy's, is not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hilt.policies.base import Policy
from hilt.policies.io.memory import without_memory

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
CONVOLUTIONS = ("convolution", "convolution_backward")
ATTENTION = "_scaled_dot_product"
HARD = frozenset(
    {
        *("exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "sigmoid", "erf", "erfinv", "pow", "sqrt", "rsqrt"),
        *("gelu", "gelu_backward", "silu", "silu_backward", "tanh_backward", "logsumexp", "cumsum", "sort", "topk"),
        *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "searchsorted"),
        *("native_layer_norm", "native_layer_norm_backward", "grid_sampler_2d"),
    }
)
"""Operations that compute more than they move"""
BACKWARD = 2.5
"""Products of attention's backward pass relative to those of its forward pass"""


class OpCost(NamedTuple):
    """What one operation has to do."""

    kind: str
    """"product", "convolution", "attention", "hard", "plain" or "view" """
    dtype: str
    flops: int
    nbytes: int
    """That are read and written"""


@dataclass
class OpCounts:
    """How often each was asked for."""

    ops: Counter[OpCost] = field(default_factory=Counter)
    order: list[OpCost] = field(default_factory=list, repr=False)
    """All of them, one after the other; empty where that is not known"""

    def add(self, cost: OpCost) -> None:
        """Notes one more."""
        self.ops[cost] += 1
        self.order.append(cost)

    @property
    def calls(self) -> int:
        return sum(self.ops.values())

    @property
    def flops(self) -> int:
        return sum(cost.flops * times for cost, times in self.ops.items())


def counted(
    build: Callable[[], Policy],
    call: Callable[[Any], object],
    prepare: Callable[[Policy], object] | None = None,
    training: bool = False,
) -> OpCounts:
    """The operations of `call` with `build`'s policy; with `training`, of the backward pass from the sum of what it
    returns (a tensor), too. `build` and `prepare` are called with nothing but the meta device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        policy = build()
        if prepare is not None:
            prepare(policy)
    policy.train(training)
    with FakeTensorMode(allow_non_fake_inputs=True):
        without_memory(policy)
        counting = _Counting()
        with counting, _ZerosForNumpy(), torch.set_grad_enabled(training):
            made = call(policy)
            if training:
                assert isinstance(made, Tensor)
                wanted = [parameter for parameter in policy.parameters() if parameter.requires_grad]
                torch.autograd.grad(made.sum(), wanted, allow_unused=True)
    return counting.counts


class _Counting(TorchDispatchMode):
    """Notes every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = OpCounts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # a question, such as where a tensor is, and no operation
            self.counts.add(cost_of(func.overloadpacket.__name__, args, made))
        return made


class _ZerosForNumpy(TorchFunctionMode):
    """A tensor without memory becomes an array of zeros, so that code which answers with arrays can run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.numpy:
            return np.zeros(tuple(args[0].shape), dtype=str(args[0].dtype).removeprefix("torch."))
        return func(*args, **(kwargs or {}))


def cost_of(name: str, args: Sequence[Any], made: Any) -> OpCost:
    """What an operation of torch with these arguments and results has to do."""
    given, results = _tensors(args), _tensors(made)
    first = next((each for each in (*results, *given) if each.is_floating_point()), None)
    dtype = "float32" if first is None else str(first.dtype).removeprefix("torch.")
    nbytes = sum(each.nbytes for each in (*given, *results))
    within, name = name.endswith("_"), name.rstrip("_")
    if name in PRODUCTS:
        left = given[-2]
        return OpCost("product", dtype, 2 * results[0].numel() * left.shape[-1], nbytes)
    if name in CONVOLUTIONS:
        return OpCost("convolution", dtype, _of_convolution(name, args, given, results), nbytes)
    if name.startswith(ATTENTION):
        queries, keys = given[1:3] if "backward" in name else given[:2]
        flops = 4 * queries.numel() * keys.shape[-2]
        return OpCost("attention", dtype, int((BACKWARD if "backward" in name else 1) * flops), nbytes)
    if results and not within and _is_view(results[0], given):
        return OpCost("view", "", 0, 0)
    return OpCost("hard" if name in HARD else "plain", dtype, 0, nbytes)


def _of_convolution(name: str, args: Sequence[Any], given: list[Tensor], results: list[Tensor]) -> int:
    if name == "convolution":
        passes, answers, weight = 1, results[0], given[1]
    else:
        passes, answers, weight = sum(bool(wanted) for wanted in args[-1][:2]), given[0], given[2]
    return int(2 * passes * answers.numel() * (weight.numel() // len(weight)))


def _is_view(result: Tensor, given: list[Tensor]) -> bool:
    own = result.untyped_storage()._cdata
    return any(each.untyped_storage()._cdata == own for each in given)


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in torch.utils._pytree.tree_leaves(tree) if isinstance(each, Tensor)]
