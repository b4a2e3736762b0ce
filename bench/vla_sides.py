"""Processes of ``python -m bench vla``: one opens a checkpoint and says what memory
that took, one estimates what training takes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from bench.sides import serve
from bench.vla_sizes import bare, lora_policy, record_of
from hilt.policies.io.memory import estimate
from hilt.policies.vla.openvla import OpenVLAOFT, OpenVLAOptions


class Load:
    """A fresh process, so that its memory is that of loading and of nothing else."""

    def load(self, folder: str, device: str) -> dict[str, float]:
        if device != "cpu":
            torch.zeros(1, device=device)
        bare(tiny=True)  # transformers is imported
        before = _resident("VmRSS")
        start = time.perf_counter()
        policy = OpenVLAOFT.from_pretrained(folder, device=device, allow_untrained=True)
        took = time.perf_counter() - start
        copy = sum(parameter.nbytes for parameter in policy.parameters())
        return {"seconds": took, "peak": _resident("VmHWM"), "before": before, "copy": copy, "check": _check(policy)}


class Memory:
    def estimate(self, tiny: bool, rows: int, lora: bool, share: float) -> dict[str, float]:
        """Bytes at the worst moment of a gradient, without an optimizer."""
        policy = bare(tiny)
        record = record_of(policy, rows)
        dtype = torch.float32 if tiny else torch.bfloat16
        found = estimate(
            lambda: bare(tiny, OpenVLAOptions(checkpointed=share)),
            record,
            True,
            dtype,
            prepare=lora_policy if lora else None,
            optimizer_bytes=0,
        )
        return {"bytes": found.total}


def _check(policy: Any) -> float:
    """A number of all weights, to see that they are those that were saved."""
    return float(sum(parameter.detach().float().abs().mean() for parameter in policy.parameters()))


def _resident(kind: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))


if __name__ == "__main__":
    serve({"load": Load, "memory": Memory})
