"""CUDA graphs of a function of tensors: captured once for each set of shapes, and replayed from then on.

    decide = Graphs(function, policy, device)
    answer = decide({"images": images, "state": state})   # tensors of the host in and out

A policy that acts for one robot launches thousands of small kernels, and the processor that launches them is slower
than the card. A graph launches all of them at once. It reads the weights where they are: an optimizer that changes
them in place changes what the next replay computes. Weights that were moved, and layers that were replaced (by
adapters, say), are noticed, and the graphs are captured anew.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hilt.core.errors import DeadlineError

Tensors = Mapping[str, Tensor]
Function = Callable[..., dict[str, Tensor]]

WARM_UP = 3
"""Calls before the capture: the first one compiles, and the libraries choose their kernels"""
KEPT = 12
"""Graphs that are kept, unless another number is given"""
MOST_COMPILED = 4096
"""Sets of shapes for which a layer is compiled; torch gives up after eight otherwise, and runs it eagerly"""
CAPTURE_S = 600.0
"""Within which the graphs that are wanted are there, or something is wrong"""
LOG = logging.getLogger("hilt.policies")


class Graphs:
    """`function(tensors, **options)` on the device of a module, by graphs.

    On a device without graphs it calls the function. One thread at a time; others wait. With `aside` nobody waits for a
    capture: a thread makes it, and until then calls of these shapes are answered by `meanwhile`, without a graph.
    """

    def __init__(
        self,
        function: Function,
        module: nn.Module,
        device: torch.device,
        before: Callable[[], None] = lambda: None,
        kept: int = KEPT,
    ):
        """`before` prepares the module each time its weights have been moved. `kept`: graphs; the one that was not used
        for longest is dropped for a new one."""
        self._kept, self.aside, self.meanwhile = kept, False, function
        self._wanted: OrderedDict[Any, tuple[Tensors, Mapping[str, Any]]] = OrderedDict()
        self._refused: set[Any] = set()
        self._capturing: threading.Thread | None = None
        self._function, self._module, self.device, self._before = function, module, device, before
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._lock = threading.Lock()
        self._pool: Any = None
        self.clear()

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(self, inputs: Tensors, **options: Any) -> dict[str, Tensor]:
        if self.device.type != "cuda":
            return self._without_graph(self._function, inputs, options)
        if not self.aside:
            self.settle()
        with self._lock, torch.cuda.device(self.device):
            if not self.aside or (_key(inputs, options) in self._graphs and self._places.unchanged()):
                answer = self._replayed(inputs, options)
                if not self._places.unchanged():
                    self.clear()
                    answer = self._replayed(inputs, options)
                return answer.fetch()
        self._capture_aside(inputs, options)
        return self._without_graph(self.meanwhile, inputs, options)

    def clear(self) -> None:
        """Forgets all graphs, and where the weights were."""
        self._graphs.clear()
        self._before()
        self._places = Places(self._module)

    def settle(self) -> None:
        """Waits until all graphs are there that were wanted with `aside`."""
        if (capturing := self._capturing) is not None:
            capturing.join(CAPTURE_S)
            if capturing.is_alive():
                raise DeadlineError(
                    f"decisions are not compiled after {CAPTURE_S:g} s: give policy_options.acting=eager."
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a policy captures its own."""

    def _without_graph(self, function: Function, inputs: Tensors, options: Mapping[str, Any]) -> dict[str, Tensor]:
        with torch.no_grad():
            made = function({name: each.to(self.device) for name, each in inputs.items()}, **options)
        return {name: each.cpu() for name, each in made.items()}

    def _replayed(self, inputs: Tensors, options: Mapping[str, Any]) -> _Graph:
        """A graph that has been started: its answer is there when the device has finished."""
        key = _key(inputs, options)
        if key not in self._graphs:
            self._keep(key, self._new(inputs, options))
        self._graphs.move_to_end(key)
        graph = self._graphs[key]
        graph.start(inputs)
        return graph

    def _new(self, inputs: Tensors, options: Mapping[str, Any]) -> _Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return _Graph(lambda tensors: self._function(tensors, **options), inputs, self.device, self._pool)

    def _keep(self, key: Any, graph: _Graph) -> None:
        while len(self._graphs) >= self._kept:
            self._graphs.popitem(last=False)
        self._graphs[key] = graph

    # Captures beside calls

    def _capture_aside(self, inputs: Tensors, options: Mapping[str, Any]) -> None:
        """A graph of these shapes is captured, after those that were wanted before, in a thread. If it cannot be, calls
        of these shapes stay without one."""
        key = _key(inputs, options)
        with self._lock:
            if key in self._refused or key in self._wanted:
                return
            self._wanted[key] = inputs, options
            if self._capturing is None or not self._capturing.is_alive():
                self._capturing = threading.Thread(target=self._capture_wanted, name="hilt-capture", daemon=True)
                self._capturing.start()

    def _capture_wanted(self) -> None:
        while True:
            with self._lock, torch.cuda.device(self.device):
                if not self._wanted:
                    self._capturing = None
                    return
                key, (inputs, options) = next(iter(self._wanted.items()))
                if not self._places.unchanged():
                    self.clear()
            try:
                with torch.cuda.device(self.device):
                    graph = self._new(inputs, options)  # graphs that are there answer meanwhile
                with self._lock:
                    self._keep(key, graph)
                LOG.info("decisions of %d observations are compiled", len(next(iter(inputs.values()))))
            except Exception as error:  # noqa: BLE001  # broad: compilers raise anything; decisions go on without a graph
                self._refused.add(key)
                first = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
                LOG.warning("decisions of a size stay without a CUDA graph, and are slower: %s", first)
            finally:
                with self._lock:
                    self._wanted.pop(key)


def _key(inputs: Tensors, options: Mapping[str, Any]) -> Any:
    """What a graph is captured for."""
    shapes = tuple((name, tuple(each.shape), each.dtype) for name, each in sorted(inputs.items()))
    return shapes, tuple(sorted(options.items()))


class _Graph:
    """One captured call: from page-locked memory to the device, the function, and back to page-locked memory."""

    def __init__(
        self,
        function: Callable[[dict[str, Tensor]], dict[str, Tensor]],
        inputs: Tensors,
        device: torch.device,
        pool: Any,
    ):
        self._staged = {name: torch.empty(each.shape, dtype=each.dtype).pin_memory() for name, each in inputs.items()}
        placed = {name: torch.empty_like(each, device=device) for name, each in inputs.items()}
        for name, each in inputs.items():
            self._staged[name].copy_(each)
            placed[name].copy_(each)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.no_grad(), torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                made = function(placed)
            self._answer = {name: torch.empty(each.shape, dtype=each.dtype).pin_memory() for name, each in made.items()}
            del made
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                for name, each in placed.items():
                    each.copy_(self._staged[name], non_blocking=True)
                for name, each in function(placed).items():
                    self._answer[name].copy_(each, non_blocking=True)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._placed, self._done = placed, torch.cuda.Event()

    def start(self, inputs: Tensors) -> None:
        for name, each in inputs.items():
            self._staged[name].copy_(each)
        self._graph.replay()
        self._done.record()

    def fetch(self) -> dict[str, Tensor]:
        """The answer of the last start; its tensors are the caller's own."""
        self._done.synchronize()
        return {name: each.clone() for name, each in self._answer.items()}


class Places:
    """Where the weights of a module lie, and which modules it is made of."""

    def __init__(self, module: nn.Module):
        self._modules = [
            (each._modules, name, child) for each in module.modules() for name, child in each._modules.items()
        ]
        self._tensors = [
            (held, name, tensor, tensor.data_ptr())
            for each in module.modules()
            for held in (each._parameters, each._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]

    def unchanged(self) -> bool:
        return all(held.get(name) is child for held, name, child in self._modules) and all(
            held.get(name) is tensor and tensor.data_ptr() == place for held, name, tensor, place in self._tensors
        )


def compiling() -> AbstractContextManager[Any]:
    """Within it torch compiles a function for any number of sets of shapes."""
    import torch._dynamo

    config: Any = torch._dynamo.config
    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before torch 2.7
    patch: AbstractContextManager[Any] = config.patch({limit: MOST_COMPILED, f"accumulated_{limit}": MOST_COMPILED})
    return patch


def bucket(count: int, steps: tuple[int, ...]) -> int:
    """The least of the ascending sizes that has room for `count`; above the last, multiples of it."""
    found = next((size for size in steps if size >= count), None)
    return -(-count // steps[-1]) * steps[-1] if found is None else found


def with_more_rows(tensor: Tensor, more: int, dim: int) -> Tensor:
    """The last row is there `more` times again."""
    last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
    return torch.cat([tensor, last.repeat_interleave(more, dim)], dim) if more else tensor


class JoinedLinear:
    """Several linear layers of one input as one product, in compiled code without gradients; elsewhere each by itself.

    After `join` the weights of the layers are parts of one tensor: what changes one changes the other. A copy of a
    module has its layers apart again.
    """

    def __init__(self) -> None:
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.widths: tuple[int, ...] = ()

    def __call__(self, x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
        if self.weight is None or torch.is_grad_enabled() or not torch.compiler.is_compiling():
            return tuple(layer(x) for layer in layers)
        parts: tuple[Tensor, ...] = F.linear(x, self.weight, self.bias).split(self.widths, -1)
        return parts

    def __deepcopy__(self, memo: dict[int, Any]) -> JoinedLinear:
        return JoinedLinear()

    def forget(self) -> None:
        self.weight = self.bias = None

    def join(self, *layers: nn.Module) -> None:
        """Nothing is done where it cannot be: a layer is of another kind (adapters), or its weight is spread over
        several devices."""
        self.forget()
        weights, biases = zip(
            *((layer._parameters.get("weight"), layer._parameters.get("bias")) for layer in layers), strict=True
        )
        if all(type(layer) is nn.Linear for layer in layers) and all(type(each.data) is Tensor for each in weights):
            self.widths = tuple(len(each) for each in weights)
            self.weight = _one_tensor(weights)
            self.bias = None if biases[0] is None else _one_tensor(biases)


def _one_tensor(parts: Sequence[Tensor]) -> Tensor:
    first, rows = parts[0].data, [len(part) for part in parts]
    ends = itertools.accumulate((part.numel() * part.element_size() for part in parts), initial=first.data_ptr())
    if all(
        part.is_contiguous()
        and part.data_ptr() == end
        and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for part, end in zip(parts, ends, strict=False)
    ):  # they are one already, perhaps for another policy that shares them
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride(), first.storage_offset())
    whole = torch.cat([part.data for part in parts])
    for part, own in zip(parts, whole.split(rows), strict=True):
        part.data = own
    return whole
