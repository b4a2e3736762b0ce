"""How fast a machine is, measured once and kept in a file: ``hilt doctor --calibrate``.

    calibration = measure("cpu")
    calibration.save()
    Calibration.load("cpu")

Each kind of operation is measured at several sizes: products, convolutions, attention, plain and hard element-wise
operations, and steps of Adam. Between two sizes the time is interpolated on logarithmic scales; beyond the largest it
grows with the work. What operations take together is more than the sum of their times: the calls from Python, and
caches that another operation has filled. So layers of a few widths are measured too, and the time of a policy is

    seconds = factor * (sum of the seconds of its operations) + call_s * (number of its operations)

with the two numbers fitted to those layers, for acting and for gradients. A GPU computes while the next operations are
launched, so there the longer of the two terms counts instead of their sum. On a CPU the time of the process is
measured, with one thread, so that other programs count little; on a GPU that of the clock.
"""

from __future__ import annotations

import bisect
import importlib.util
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
from torch import Tensor, nn
from torch.nn import functional as F

from hilt.algos.adam import Adam
from hilt.core.checksums import read_json, write_json
from hilt.core.errors import CorruptError
from hilt.core.files import DISK
from hilt.core.progress import Report, silent
from hilt.policies.cost.op_counts import OpCost, OpCounts, counted
from hilt.policies.io.tensor_files import check_device
from hilt.policies.precision import AUTO, FLOAT32, choose

Curve = list[tuple[float, float]]
"""Work (flops, bytes or numbers) and seconds, ascending"""
VERSION = 2
ROUND_S, ROUNDS = 0.02, 5
"""Seconds of one round of a measurement, and rounds, of which the fastest counts"""
SIZES = {
    "cpu": {"side": (16, 48, 128, 320, 640), "numbers": (2**8, 2**13, 2**17, 2**20, 2**22), "tokens": (16, 64, 256)},
    "cuda": {
        "side": (64, 256, 1024, 4096, 8192),
        "numbers": (2**10, 2**16, 2**20, 2**24, 2**27),
        "tokens": (64, 256, 1024),
    },
}
"""Sides of square products, numbers of element-wise operations, tokens of attention"""
LAYERS = {
    "cpu": ((32, 2, 16), (64, 4, 32), (128, 8, 32), (256, 8, 64)),
    "cuda": ((256, 8, 64), (1024, 8, 256), (2048, 16, 320), (4096, 16, 320)),
}
"""Width, rows and tokens of the layers"""
WAYS = ("acting", "gradient")
"""How layers are gone through; on a GPU also "compiled acting" and "compiled gradient" """


@dataclass(frozen=True)
class Fit:
    """Two numbers by which the time of many operations follows from that of each."""

    factor: float
    call_s: float
    overlap: bool = False
    """Whether operations are launched while earlier ones are computed, as on a GPU"""

    def seconds(self, bare_s: float, calls: int) -> float:
        """The time of this many operations that take `bare_s` by themselves."""
        parts = (self.factor * bare_s, self.call_s * calls)
        return max(parts) if self.overlap else sum(parts)


@dataclass(frozen=True)
class LayerTime:
    """One layer as it was measured, in seconds, and the sum of its operations."""

    way: str
    width: int
    rows: int
    tokens: int
    measured_s: float
    bare_s: float
    calls: int


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
        """The time of these operations one after the other; `way` is "acting" or "gradient"."""
        return self.fits[way].seconds(self.bare_seconds(counts), counts.calls)

    def bare_seconds(self, counts: OpCounts) -> float:
        """The sum of what each takes by itself."""
        return sum(self.seconds_of(cost) * times for cost, times in counts.ops.items() if cost.kind != "view")

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
    """What the speed of a simulator depends on: its task and its options, but for the lengths of episodes."""
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


def fitted(layers: Sequence[LayerTime]) -> Fit:
    """The two numbers with the least squares of relative errors; none is negative."""
    rows = [(layer.bare_s / layer.measured_s, layer.calls / layer.measured_s) for layer in layers]
    aa, ab, bb = (sum(x[i] * x[j] for x in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(x[i] for x in rows) for i in (0, 1))
    if (determinant := aa * bb - ab * ab) > 1e-12 * aa * bb:
        factor, call_s = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if factor >= 0 and call_s >= 0:
            return Fit(factor, call_s)
    return min((Fit(a / aa, 0.0), Fit(0.0, b / bb)), key=lambda fit: _error(fit, layers))


def fitted_overlapping(layers: Sequence[LayerTime]) -> Fit:
    """The same where the longer of the two terms counts: some layers, those with the least to compute for each
    operation, are bound by launching, and the others by computing."""
    ordered = sorted(layers, key=lambda layer: layer.bare_s / layer.calls)
    found = []
    for split in range(len(ordered) + 1):
        launching, computing = ordered[:split], ordered[split:]
        call_s = _scale([layer.calls / layer.measured_s for layer in launching])
        found.append(Fit(_scale([layer.bare_s / layer.measured_s for layer in computing]), call_s, overlap=True))
    return min(found, key=lambda fit: _error(fit, layers))


def _scale(shares: Sequence[float]) -> float:
    """The number that brings all of these nearest to 1, by the least squares; 0 if there are none."""
    return sum(shares) / sum(share**2 for share in shares) if shares else 0.0


def _error(fit: Fit, layers: Sequence[LayerTime]) -> float:
    return sum((fit.seconds(layer.bare_s, layer.calls) / layer.measured_s - 1) ** 2 for layer in layers)


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
        layers = tuple(_layers(begun, place, types[-1] if kind == "cuda" else torch.float32))
    finally:
        torch.set_num_threads(threads)
    ways = dict.fromkeys(layer.way for layer in layers)
    fit = fitted_overlapping if kind == "cuda" else fitted
    fits = {way: fit([layer for layer in layers if layer.way == way]) for way in ways}
    return replace(begun, layers=layers, fits=fits)


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the fastest of several rounds."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    run()
    best, times = math.inf, 1
    for _ in range(ROUNDS):
        spent = _round(run, times, device, clock)
        while spent < ROUND_S / 2:
            times *= 2
            spent = _round(run, times, device, clock)
        best = min(best, spent / times)
    return best


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
    return SIZES["cuda" if device.type == "cuda" else "cpu"][name]


def _products(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    for side in _sizes(device, "side"):
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        yield 2 * side**3, timed(partial(torch.matmul, left, right), device)


def _convolutions(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    weight = torch.randn(32, 32, 3, 3, device=device).to(dtype)
    for rows, pixels in ((1, 8), (4, 16), (16, 32)):
        x = torch.randn(rows, 32, pixels, pixels, device=device).to(dtype)
        work = 2 * x.numel() * weight[0].numel()
        yield work, timed(partial(F.conv2d, x, weight, padding=1), device)


def _attention(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    for tokens in _sizes(device, "tokens"):
        x = torch.randn(4, 4, tokens, 32, device=device).to(dtype)
        work = 4 * x.numel() * tokens
        yield work, timed(partial(F.scaled_dot_product_attention, x, x, x), device)


def _plain(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    for numbers in _sizes(device, "numbers"):
        x = torch.randn(numbers, device=device).to(dtype)
        yield 3 * x.nbytes, timed(partial(torch.add, x, x), device)


def _hard(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[float, float]]:
    for numbers in _sizes(device, "numbers"):
        x = torch.randn(numbers, device=device).to(dtype)
        yield 2 * x.nbytes, timed(partial(F.gelu, x), device)


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


class _Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int):
        super().__init__()
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joined, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.joined(self.before(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.behind(x))))


def _layers(begun: Calibration, device: torch.device, dtype: torch.dtype) -> Iterator[LayerTime]:
    for width, rows, tokens in LAYERS["cuda" if device.type == "cuda" else "cpu"]:
        layer = _Layer(width).to(device, dtype)
        x = torch.randn(rows, tokens, width, device=device).to(dtype)
        forms: dict[str, Callable[[Tensor], Tensor]] = {"": layer}
        if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
            forms["compiled "] = torch.compile(layer, dynamic=False)
        for way in WAYS:
            counts = _count(width, rows, tokens, dtype, way == "gradient")
            for form, forward in forms.items():
                run = (
                    partial(_learn, forward, x, list(layer.parameters()))
                    if way == "gradient"
                    else partial(_act, forward, x)
                )
                sizes = (form + way, width, rows, tokens)
                yield LayerTime(*sizes, timed(run, device), begun.bare_seconds(counts), counts.calls)


def _act(forward: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.no_grad():
        forward(x)


def _learn(forward: Callable[[Tensor], Tensor], x: Tensor, parameters: Sequence[Tensor]) -> None:
    torch.autograd.grad(forward(x).sum(), parameters)


def _count(width: int, rows: int, tokens: int, dtype: torch.dtype, training: bool) -> OpCounts:
    """Counts the operations of such a layer."""

    def build() -> Any:
        return _Layer(width).to(dtype)

    def call(layer: Any) -> Tensor:
        made: Tensor = layer(torch.zeros(rows, tokens, width, dtype=dtype))
        return made

    return counted(build, call, training=training)


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
    "fitted",
    "fitted_overlapping",
    "interpolated",
    "measure",
]
