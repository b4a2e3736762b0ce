"""How fast a machine is, measured once and kept in a file: ``hilt doctor --calibrate``.

    calibration = measure("cpu")
    calibration.save()
    Calibration.load("cpu")

Each kind of operation is measured at several sizes: products, convolutions, attention, plain and hard element-wise
operations, and steps of Adam. Between two sizes the time is interpolated on logarithmic scales; beyond the largest it
grows with the work. What operations take together is not the sum of their times: there are the calls from Python,
caches that another operation has filled, and compiled code that joins several. So layers of a few sizes are measured
too, in each way in which policies go through theirs, and the numbers of `hilt.policies.cost.fits` are fitted to them.

On a CPU the time of the process is measured, with one thread, so that other programs count little. On a GPU it is that
of the clock, and each operation is measured many times in one CUDA graph, so that its time is the GPU's alone: what
launching takes is known from the layers.
"""

from __future__ import annotations

import bisect
import contextlib
import importlib.util
import itertools
import math
import os
import platform as system
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hilt.algos.adam import Adam
from hilt.core.checksums import read_json, write_json
from hilt.core.errors import CorruptError
from hilt.core.files import DISK
from hilt.core.progress import Report, silent
from hilt.policies.cost.calibration_layers import layer_counts, make_layer, trained_parameters
from hilt.policies.cost.fits import HEAVY, BareTime, Fit, LayerTime, fitted, fitted_captured, fitted_overlapping
from hilt.policies.cost.op_counts import OpCost, OpCounts
from hilt.policies.graphs import WARM_UP, compiling
from hilt.policies.io.tensor_files import check_device
from hilt.policies.precision import AUTO, FLOAT32, choose

Curve = list[tuple[float, float]]
"""Work (flops, bytes or numbers) and seconds, ascending"""
VERSION = 3
ROUND_S, ROUNDS = 0.02, {"cpu": 5, "cuda": 3}
"""Seconds of one round of a measurement, and rounds, of which the fastest counts"""
IN_GRAPH = 20
"""Calls of a short operation in one CUDA graph"""
SIZES = {
    "cpu": {
        "side": (16, 48, 128, 320, 640),
        "numbers": (2**8, 2**13, 2**17, 2**20, 2**22),
        "tokens": (16, 64, 256),
        "heads": (4, 4, 32),
        "pictures": (1, 4, 16),
    },
    "cuda": {
        "side": (64, 256, 1024, 2048, 4096, 8192),
        "numbers": (2**10, 2**16, 2**20, 2**24, 2**27),
        "tokens": (64, 256, 1024),
        "heads": (8, 16, 64),
        "pictures": (1, 16, 256),
    },
}
"""Sides of square products, numbers of element-wise operations, tokens of attention, its rows, heads and numbers of a
head, and rows of convolutions"""
LAYERS = {
    "cpu": (("plain", 32, 2, 16), ("plain", 64, 4, 32), ("plain", 128, 8, 32), ("plain", 256, 8, 64)),
    "cuda": (
        *(("plain", 1024, 2, 64), ("plain", 1024, 8, 256), ("plain", 1024, 64, 256)),
        *(("gated", 2048, 2, 64), ("gated", 2048, 8, 512), ("gated", 2048, 32, 512)),
        *(("adapted", 4096, 2, 64), ("adapted", 4096, 4, 400), ("adapted", 4096, 16, 400)),
    ),
}
"""Kind, width, rows and tokens of the layers. On a GPU those of one kind and width are compiled once; one row would be
compiled by itself"""
WAYS = ("acting", "gradient")
"""How layers are gone through. On a GPU also as compiled code ("compiled acting", "compiled gradient"), and as CUDA
graphs ("captured acting", "captured compiled acting")"""
COMPILED, CAPTURED = "compiled ", "captured "


@dataclass(frozen=True)
class SimulatorTime:
    """Seconds of one environment in one process."""

    start_s: float
    step_s: float
    observe_s: float


@dataclass(frozen=True)
class Calibration:
    """What was measured."""

    device: str
    machine: str
    measured_at: str
    machine_load: float
    """Of the machine when it began: processes that wanted to run, by the system's mean over a minute"""
    curves: dict[str, Curve]
    """By kind and type, such as "product float32"; "adam" by numbers"""
    layers: tuple[LayerTime, ...] = ()
    fits: dict[str, Fit] = field(default_factory=dict)
    simulators: dict[str, SimulatorTime] = field(default_factory=dict)
    """By `simulator_key`"""

    def seconds(self, counts: OpCounts, way: str) -> float:
        """The time of these operations one after the other, in one of the ways of `WAYS`."""
        fit = self.fits[way]
        if not fit.overlap:
            return fit.seconds(self.bare(counts))
        each = {cost: self._bare_of(cost) for cost in counts.ops}
        return fit.seconds_in_turn(each[cost] for cost in counts.order or counts.ops.elements())

    def bare(self, counts: OpCounts) -> BareTime:
        """Returns the sums of what the operations take by themselves."""
        each = [(self._bare_of(cost), times) for cost, times in counts.ops.items()]
        heavy, light = (sum(one[place] * times for one, times in each) for place in range(2))
        return BareTime(heavy, light, counts.calls)

    def _bare_of(self, cost: OpCost) -> BareTime:
        seconds = 0.0 if cost.kind == "view" else self.seconds_of(cost)
        return BareTime(seconds, 0.0, 1) if cost.kind in HEAVY else BareTime(0.0, seconds, 1)

    def seconds_of(self, cost: OpCost) -> float:
        """The time of one operation: of its arithmetic, or of its bytes, whichever is longer."""
        curve = self._curve(cost.kind, cost.dtype)
        if cost.kind in ("plain", "hard"):
            return interpolated(curve, cost.nbytes)
        return max(interpolated(curve, cost.flops), self._bytes_s(cost.nbytes))

    def adam_seconds(self, numbers: int) -> float:
        return interpolated(self.curves["adam"], numbers)

    @property
    def product_rate(self) -> float:
        """Products of the largest size, in flops a second."""
        return max(
            work / seconds for name, curve in self.curves.items() if "product" in name for work, seconds in curve
        )

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the largest plain operation."""
        work, seconds = self.curves["plain float32"][-1]
        return work / seconds

    def _curve(self, kind: str, dtype: str) -> Curve:
        return self.curves.get(f"{kind} {dtype}", self.curves[f"{kind} {FLOAT32}"])

    def _bytes_s(self, nbytes: int) -> float:
        return nbytes / self.bandwidth

    def save(self, path: Path | None = None) -> Path:
        """Writes the file as a whole, in place of an older one."""
        path = path or calibration_file(self.device)
        DISK.make_folders(path.parent)
        write_json(path, {"version": VERSION, **asdict(self)})
        return path

    @classmethod
    def load(cls, device: str, path: Path | None = None) -> Calibration | None:
        """The calibration of this machine; None where there is none."""
        path = path or calibration_file(device)
        if not path.exists():
            return None
        try:
            given = read_json(path)
        except CorruptError:
            raise CorruptError(f"{path} is damaged (checksum): measure again, hilt doctor --calibrate.") from None
        if given.pop("version", None) != VERSION:
            raise CorruptError(f"{path} is of another version of Hilt: measure again, hilt doctor --calibrate.")
        given["curves"] = {name: [(x, y) for x, y in curve] for name, curve in given["curves"].items()}
        given["layers"] = tuple(LayerTime(**layer) for layer in given["layers"])
        given["fits"] = {way: Fit(**fit) for way, fit in given["fits"].items()}
        given["simulators"] = {key: SimulatorTime(**one) for key, one in given["simulators"].items()}
        return cls(**given)

    def with_simulator(self, key: str, measured: SimulatorTime) -> Calibration:
        return replace(self, simulators={**self.simulators, key: measured})


def calibration_file(device: str) -> Path:
    """Where it is kept: in the folder for the state of programs, ``XDG_STATE_HOME`` or ``~/.local/state``."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "hilt" / f"calibration-{_kind(device)}.json"


def simulator_key(task: str, options: Mapping[str, Any]) -> str:
    """Returns what the speed of a simulator depends on: its task and its options, but for the lengths of episodes."""
    kept = {name: value for name, value in sorted(options.items()) if name not in ("step_limit", "wait_steps")}
    return " ".join([task, *(f"{name}={value}" for name, value in kept.items())])


def interpolated(curve: Sequence[tuple[float, float]], work: float) -> float:
    """Seconds for this much work: on a straight line between two measurements on logarithmic scales; less than the
    smallest takes as long as that, and beyond the largest time grows with the work."""
    works = [each for each, _ in curve]
    place = bisect.bisect_left(works, work)
    if place == 0:
        return curve[0][1]
    if place == len(curve):
        return curve[-1][1] * work / curve[-1][0]
    (low, fast), (high, slow) = curve[place - 1], curve[place]
    share = math.log(work / low) / math.log(high / low)
    return float(fast * (slow / fast) ** share)


# --- measuring ---


def measure(device: str = "cpu", report: Report = silent) -> Calibration:
    """Measures a machine; a minute on a CPU, less on a GPU."""
    place, kind = check_device(device), _kind(device)
    types = [torch.float32]
    if kind == "cuda" or choose(AUTO, device).precision != FLOAT32:
        types.append(torch.bfloat16)
    curves: dict[str, Curve] = {}
    parts = [(name, dtype) for dtype in types for name in KINDS]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    try:
        for number, (name, dtype) in enumerate(parts):
            label = f"{name} {str(dtype).removeprefix('torch.')}"
            report("measuring this machine", number, len(parts) + 2, label)
            curves[label] = _ascending(KINDS[name](place, dtype))
        report("measuring this machine", len(parts), len(parts) + 2, "steps of Adam")
        curves["adam"] = _ascending(_adam(place))
        begun = Calibration(device, _machine(place), _now(), load, curves)
        report("measuring this machine", len(parts) + 1, len(parts) + 2, "layers")
        layers = tuple(_layers(begun, place, types[-1] if kind == "cuda" else torch.float32, kind))
    finally:
        torch.set_num_threads(threads)
    return replace(begun, layers=layers, fits=fits_of(layers, kind))


def fits_of(layers: Sequence[LayerTime], kind: str) -> dict[str, Fit]:
    """The fit of each way to its layers, on a "cpu" or on "cuda"."""
    found = {}
    for way in dict.fromkeys(layer.way for layer in layers):
        fit = fitted if kind != "cuda" else fitted_captured if way.startswith(CAPTURED) else fitted_overlapping
        found[way] = fit([layer for layer in layers if layer.way == way])
    return found


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the fastest of several rounds."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    run()
    best, times = math.inf, 1
    for _ in range(ROUNDS[_kind(device.type)]):
        spent = _round(run, times, device, clock)
        while spent < ROUND_S / 2:
            times *= 2
            spent = _round(run, times, device, clock)
        best = min(best, spent / times)
    return best


def timed_alone(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call. On a GPU: of what the GPU does in one of many calls in a CUDA graph."""
    if device.type != "cuda":
        return timed(run, device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    once = _round(run, 1, device, time.perf_counter)
    times, graph = max(1, min(IN_GRAPH, int(ROUND_S / once))), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(times):
            run()
    return timed(graph.replay, device) / times


def _round(run: Callable[[], object], times: int, device: torch.device, clock: Callable[[], float]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = clock()
    for _ in range(times):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - began


def _sizes(device: torch.device, name: str) -> tuple[int, ...]:
    return SIZES[_kind(device.type)][name]


def _products(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    for side in _sizes(device, "side"):
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        yield 2 * side**3, timed_alone(partial(torch.matmul, left, right), device)


def _convolutions(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    weight = torch.randn(32, 32, 3, 3, device=device).to(dtype)
    for rows, pixels in zip(_sizes(device, "pictures"), (8, 16, 32), strict=True):
        x = torch.randn(rows, 32, pixels, pixels, device=device).to(dtype)
        work = 2 * x.numel() * weight[0].numel()
        yield work, timed_alone(partial(F.conv2d, x, weight, padding=1), device)


def _attention(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    rows, heads, numbers = _sizes(device, "heads")
    for tokens in _sizes(device, "tokens"):
        x = torch.randn(rows, heads, tokens, numbers, device=device).to(dtype)
        work = 4 * x.numel() * tokens
        yield work, timed_alone(partial(F.scaled_dot_product_attention, x, x, x), device)


def _plain(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    for numbers in _sizes(device, "numbers"):
        x = torch.randn(numbers, device=device).to(dtype)
        yield 3 * x.nbytes, timed_alone(partial(torch.add, x, x), device)


def _hard(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    for numbers in _sizes(device, "numbers"):
        x = torch.randn(numbers, device=device).to(dtype)
        yield 2 * x.nbytes, timed_alone(partial(F.gelu, x), device)


KINDS: dict[str, Callable[[torch.device, torch.dtype], Iterator[tuple[float, float]]]] = {
    "product": _products,
    "convolution": _convolutions,
    "attention": _attention,
    "plain": _plain,
    "hard": _hard,
}


def _adam(device: torch.device) -> Iterator[tuple[float, float]]:
    """Steps of 64 tensors, as policies have them."""
    for numbers in _sizes(device, "numbers")[1:-1]:
        parameters = [torch.zeros(max(1, numbers // 64), device=device) for _ in range(64)]
        adam = Adam(parameters, 1e-3)
        gradients: list[Tensor | None] = [torch.ones_like(each) for each in parameters]
        yield numbers, timed(partial(adam.step, gradients), device)


def _layers(begun: Calibration, device: torch.device, dtype: torch.dtype, kind: str) -> Iterator[LayerTime]:
    """The layers of a "cpu" or of "cuda", each in all ways."""
    for (shape, width), sizes in itertools.groupby(LAYERS[kind], key=lambda size: size[:2]):
        layer = make_layer(shape, width).to(device, dtype)
        forms: dict[str, Callable[[Tensor], Tensor]] = {"": layer}
        if kind == "cuda" and importlib.util.find_spec("triton") is not None:
            forms[COMPILED] = torch.compile(layer, dynamic=True)
        for _, _, rows, tokens in sizes:
            x = torch.randn(rows, tokens, width, device=device).to(dtype)
            bare = {way: begun.bare(layer_counts(shape, width, rows, tokens, dtype, way == "gradient")) for way in WAYS}
            for form, forward in forms.items():
                runs = {
                    "acting": partial(_act, forward, x),
                    "gradient": partial(_learn, forward, x, trained_parameters(layer)),
                }
                with compiling() if form else contextlib.nullcontext():
                    taken = {way: timed(run, device) for way, run in runs.items()}
                    taken |= {CAPTURED: timed_alone(runs["acting"], device)} if kind == "cuda" else {}
                for way, seconds in taken.items():
                    named, counted_as = (f"{CAPTURED}{form}acting", "acting") if way == CAPTURED else (form + way, way)
                    yield LayerTime(named, shape, width, rows, tokens, seconds, *bare[counted_as])


def _act(forward: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.no_grad():
        forward(x)


def _learn(forward: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[Tensor]) -> None:
    torch.autograd.grad(forward(x).sum(), parameters)


def _ascending(points: Iterator[tuple[float, float]]) -> Curve:
    """In the order of their work; more work is never faster than less, so that noise does not turn a curve around."""
    curve: Curve = []
    for work, seconds in sorted(points):
        curve.append((float(work), max(seconds, curve[-1][1] if curve else 0.0)))
    return curve


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{system.machine()}, {os.cpu_count()} cores, one thread, torch {torch.__version__}"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _kind(device: str) -> str:
    return str(device).partition(":")[0]


__all__ = [
    "Calibration",
    "Fit",
    "LayerTime",
    "SimulatorTime",
    "fits_of",
    "interpolated",
    "measure",
]
