"""In which precision a policy computes: float32, or bfloat16 where the processor is
faster with it. `auto` decides once in a process.

    choose("auto")              # Choice("float32", "this CPU has no bfloat16 instructions")
    choose("auto", "cuda:0")    # Choice("float32", "networks of this size are no faster in bfloat16 on a GPU")
    choose("bfloat16")          # Choice("bfloat16", "as set")
    slowness("bfloat16")        # "precision: bfloat16 is at least 31 times slower than float32 ...", or ""

Weights, losses and optimizer states are float32 either way. A CPU's instructions decide where they are conclusive.
Where they are not (AVX-512's or Arm's bfloat16, a system that does not list them, an environment variable that
restricts oneDNN), a few convolutions are measured. A run decides when it begins and freezes the answer with its
settings, so that all of its processes compute alike, on any machine and after any resume. Without torch until something
is measured, so that a command line that only reads settings is quick.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from hilt.core.errors import ConfigError, UnknownNameError
from hilt.core.platform import cpu_instructions

if TYPE_CHECKING:
    import torch

AUTO, FLOAT32, BFLOAT16 = "auto", "float32", "bfloat16"
PRECISIONS = (AUTO, FLOAT32, BFLOAT16)

WORTH_IT = 1.1
"""bfloat16 must be this many times as fast as float32 to be chosen: it has 8 bits, and a measurement has noise"""
SLOW = 3.0
"""A choice that was made by hand and is more than this many times slower than the other gets a line of warning"""
STAGES = ((1, 32), (8, 64), (64, 64))
"""Images, and pixels at their sides, of the trial: more only where less does not
decide, for an emulated bfloat16 would take seconds"""
ROUNDS = 5
TRIAL_S = 0.25
"""Seconds after which no further round of a stage begins"""
RESTRICTING = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY",
)
"""Environment variables by which a CPU computes otherwise than its instructions suggest"""


@dataclass(frozen=True)
class PrecisionChoice:
    """A precision, and the reason in words."""

    precision: str
    why: str

    def __str__(self) -> str:
        return f"precision: {self.precision} ({self.why})"


@dataclass(frozen=True)
class Trial:
    """Seconds of the same convolutions, forward and backward, in both precisions."""

    float32_s: float
    bfloat16_s: float

    @property
    def gain(self) -> float:
        """How many times as fast bfloat16 is as float32."""
        return self.float32_s / self.bfloat16_s


def choose(setting: str, device: str = "cpu") -> PrecisionChoice:
    """What a setting comes to on a device; `auto` is decided once in a process."""
    if setting not in PRECISIONS:
        raise UnknownNameError("precision", setting, PRECISIONS)
    return PrecisionChoice(setting, "as set") if setting != AUTO else _automatic(str(device))


def in_bfloat16(setting: str, device: str | torch.device) -> bool:
    """Whether a module with this setting computes in bfloat16 where its input is;
    cheap enough to be asked at each pass."""
    return (setting if setting != AUTO else _automatic(str(device)).precision) == BFLOAT16


def measures(setting: str, device: str = "cpu") -> bool:
    """Whether `choose` or `slowness` needs the trial, and with it torch, whose import may take many seconds."""
    known = _by_instructions()
    return _kind(device) == "cpu" and (known is None if setting == AUTO else setting != known)


def slowness(setting: str, device: str = "cpu", name: str = "precision") -> str:
    """One line where what was set is far slower than the other choice on this CPU;
    else empty. `name` is that of the setting."""
    if setting not in (FLOAT32, BFLOAT16) or not measures(setting, device):
        return ""
    other, gain = (FLOAT32, 1 / trial().gain) if setting == BFLOAT16 else (BFLOAT16, trial().gain)
    if gain <= SLOW:
        return ""
    return (
        f"precision: {setting} is at least {int(gain)} times slower than {other} on this CPU: a run with "
        f"{name}={other} would be faster"
    )


def of_former_name(settings: Mapping[str, object]) -> dict[str, Any]:
    """Settings in which `bfloat16: true` or `false`, as it was called before there
    was `auto`, is the precision that it meant."""
    if "bfloat16" not in settings:
        return dict(settings)
    given = settings["bfloat16"]
    if not isinstance(given, bool) or "precision" in settings:
        beside = f" beside precision={settings['precision']}" if "precision" in settings else ""
        raise ConfigError(
            f"bfloat16={given}{beside}: this setting is now precision, which is auto, float32 or "
            "bfloat16. Give that alone."
        )
    renamed = {name: value for name, value in settings.items() if name != "bfloat16"}
    return renamed | {"precision": BFLOAT16 if given else FLOAT32}


def _kind(device: Any) -> str:
    return str(device).partition(":")[0]


@cache
def _automatic(device: str) -> PrecisionChoice:
    if _kind(device) == "cpu":
        return _of_cpu()
    # measured on an H200: most of the time goes into launching kernels, and casting launches more of them
    return PrecisionChoice(FLOAT32, "networks of this size are no faster in bfloat16 on a GPU")


def _of_cpu() -> PrecisionChoice:
    if (known := _by_instructions()) is not None:
        return PrecisionChoice(
            known, "this CPU has AMX" if known == BFLOAT16 else "this CPU has no bfloat16 instructions"
        )
    gain = trial().gain
    how = f"bfloat16 is {gain:.1f} times as fast" if gain >= 1 else f"bfloat16 is {1 / gain:.1f} times as slow"
    return PrecisionChoice(BFLOAT16 if gain > WORTH_IT else FLOAT32, f"measured on this CPU: {how}")


def _by_instructions() -> str | None:
    """Returns the choice by the CPU's instruction set; None if it is not conclusive."""
    flags = cpu_instructions()
    if flags is None:
        return None
    if platform.machine().lower() in ("aarch64", "arm64"):
        return None if "bf16" in flags else FLOAT32
    if not flags & {"amx_bf16", "avx512_bf16", "avx_ne_convert"}:
        return FLOAT32
    restricted = any(os.environ.get(name) for name in RESTRICTING)
    return BFLOAT16 if "amx_bf16" in flags and not restricted else None


@cache
def trial() -> Trial:
    """Convolutions as an encoder has them, measured alternately with one thread, the best of several rounds each.

    It ends with the first stage in which bfloat16 is far slower, or with the last, which is a training batch.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            for images, pixels in STAGES:
                measured = _measured(images, pixels)
                if measured.gain < 1 / SLOW:
                    break
            return measured
    finally:
        torch.set_num_threads(threads)


def _measured(images: int, pixels: int) -> Trial:
    import torch

    step = {precision: _step(images, pixels, getattr(torch, precision)) for precision in (FLOAT32, BFLOAT16)}
    best = dict.fromkeys(step, float("inf"))
    for run in step.values():  # the first pass makes oneDNN's kernels
        run()
    deadline = time.perf_counter() + TRIAL_S
    for _ in range(ROUNDS):
        for precision, run in step.items():
            began = time.perf_counter()
            run()
            best[precision] = min(best[precision], time.perf_counter() - began)
        measured = Trial(best[FLOAT32], best[BFLOAT16])
        if time.perf_counter() > deadline:
            break
    return measured


def _step(images: int, pixels: int, dtype: Any) -> Callable[[], None]:
    """A forward and backward pass through the layers of the small encoder."""
    import torch
    from torch.nn import functional as F

    def values(*shape: int) -> torch.Tensor:  # torch's global generator is not touched
        return (
            torch.linspace(-1, 1, torch.Size(shape).numel())
            .reshape(shape)
            .contiguous(memory_format=torch.channels_last)
        )

    seen = values(images, 3, pixels, pixels).to(dtype)
    weights = [values(32, 3, 5, 5), values(32, 32, 3, 3), values(32, 32, 3, 3)]
    for weight in weights:
        weight.requires_grad_()

    def run() -> None:
        x = seen
        for weight, (stride, padding) in zip(weights, ((4, 2), (2, 1), (1, 1)), strict=True):
            x = F.relu(F.conv2d(x, weight.to(dtype), stride=stride, padding=padding))
        torch.autograd.grad(x.float().sum(), weights)

    return run
