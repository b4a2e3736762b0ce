"""pi0, pi0.5 and SmolVLA with random weights at their full sizes: one decision in real time, 64 at once, and a
gradient, as `policy.act` and `policy.evaluate` make them, beside eager layers and layers that are only compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bench.lab import Lab
from bench.report import Row, at_least, at_most
from bench.vla_sizes import TINY_FLOW
from hilt.policies.graphs import compiling
from hilt.policies.vla.flow_policy import FlowPolicy
from hilt.policies.vla.gemma import RMSNorm, compiled
from hilt.policies.vla.pi0 import Pi0, Pi0Config
from hilt.policies.vla.smolvla import SmolVLA, SmolVLAConfig
from hilt.policies.vla.tokens import ByteTokenizer

TARGETS: dict[str, dict[str, Any]] = {
    "pi0": {"latency": 12, "act_64": 190, "gradient_32": 80},
    "pi05": {"latency": 14, "act_64": 170, "gradient_32": 80},
    "smolvla": {"latency": 8},
}
"""Milliseconds of one decision, chunks/s at 64, samples/s of a gradient"""
VIEWS = ("full_image", "wrist_image")
INSTRUCTION = "put the bowl on it"


def flow_policy(kind: str, tiny: bool, device: torch.device, dtype: torch.dtype) -> FlowPolicy:
    """Random weights, in `dtype` where a checkpoint that is opened in it has that."""
    make, settings = (SmolVLA, SmolVLAConfig) if kind == "smolvla" else (Pi0, Pi0Config)
    options: dict[str, Any] = {"images": VIEWS}
    if kind == "pi05":
        options |= {"adaptive": True, "tokenizer_max_length": 200}
    if tiny:
        options |= TINY_FLOW[kind]
    with torch.device("meta"):
        policy = make(settings(**options), ByteTokenizer())  # type: ignore[arg-type]
    generator = torch.Generator(device).manual_seed(0)
    stacks = set(policy.get_submodule(policy.big).modules())
    for module in policy.modules():
        kept = torch.float32 if module not in stacks or isinstance(module, RMSNorm) else dtype
        for name, weight in list(module.named_parameters(recurse=False)):
            drawn = torch.empty(weight.shape, device=device, dtype=kept).normal_(0, 0.02, generator=generator)
            if isinstance(module, nn.LayerNorm) and name == "weight":
                drawn += 1
            setattr(module, name, nn.Parameter(drawn, weight.requires_grad))
    return policy.eval()


def observations(rows: int) -> list[dict[str, Any]]:
    draws = np.random.default_rng(0)
    return [
        {
            **{name: draws.integers(0, 256, (224, 224, 3), np.uint8) for name in VIEWS},
            "state": draws.normal(0, 0.3, 8).astype(np.float32),
            "instruction": INSTRUCTION,
        }
        for _ in range(rows)
    ]


class FlowBench:
    """The rows of one policy."""

    def __init__(self, bench: Any, kind: str):
        self.bench, self.kind, self.rows = bench, kind, list[Row]()
        self.policy = flow_policy(kind, bench.tiny, bench.device, bench.dtype)
        self.generator = torch.Generator().manual_seed(0)
        parameters = sum(weight.numel() for weight in self.policy.parameters())
        self.name = f"{kind}, {parameters / 1e9:.2f} billion parameters, two views, chunk {self.policy.chunk}"

    def acting(self, how: str, rows: int) -> Callable[[], Any]:
        """Calls of `act` in one of its ways; the first has compiled and captured what it needs."""
        seen, settings = observations(rows), replace(self.policy.config, acting=how)

        def call() -> None:
            self.policy.config = settings
            self.policy.act(seen, False, generator=self.generator)

        call()
        return call

    def compiled_alone(self, rows: int) -> Callable[[], Any]:
        """The same layers compiled, launched one by one."""
        policy, seen = self.policy, observations(rows)

        def call() -> None:
            record = policy._read(seen)
            shape = (rows, policy.horizon, policy.config.max_action_dim)
            asked = policy._seen(record) | {
                "temperature": torch.ones(rows),
                "start": torch.randn(shape, generator=self.generator),
                "first": torch.full((rows,), -1),
            }
            with torch.no_grad(), compiling():
                placed = {name: policy._placed(each) for name, each in asked.items()}
                policy._decide(placed, compiled())["actions"].cpu()

        call()
        return call

    def latency(self) -> Row:
        ours = self.acting("auto", 1)
        self.bench.tell(f"{self.kind}: one decision compiled and captured")
        ways = {"ours": ours, "eager": self.acting("eager", 1)}
        if self.bench.device.type == "cuda":
            ways |= {"captured": self.acting("captured", 1), "compiled and captured": self.acting("compiled", 1)}
            ways |= {"compiled alone": self.compiled_alone(1)}
        found = self.bench.rates(ways, rounds=3)
        times = []
        for _ in range(3 if self.bench.tiny else 300):
            start = time.perf_counter()
            ours()
            times.append(1e3 * (time.perf_counter() - start))
        middle, late = np.percentile(times, [50, 99])
        peers = {name: 1e3 / each.median for name, each in found.items() if name != "ours"}
        told = ", ".join(f"{name} {value:.1f}" for name, value in peers.items())
        self.bench.tell(f"{self.kind}: {middle:.2f} ms, percentile 99 {late:.2f}; {told}")
        return Row(
            f"{self.kind}_latency",
            float(middle),
            "ms",
            f"act() of one observation, from uint8 frames on the host to actions on the host: {self.name}",
            [at_most(TARGETS[self.kind]["latency"])],
            peers=peers,
            spread=(min(times), max(times)),
            size=self.bench.size,
            note=f"percentile 99: {late:.2f} ms, {late / middle:.2f}x",
        )

    def many(self, rows: int = 64) -> Row:
        rows = 2 if self.bench.tiny else rows
        policy, seen = self.policy, observations(1)
        with FlopCounterMode(display=False) as counter:
            policy.config = replace(policy.config, acting="eager")
            policy.act(seen, False, generator=self.generator)
        operations = float(counter.get_total_flops())
        ours = self.acting("auto", rows)
        self.bench.tell(f"{self.kind}: {rows} decisions compiled and captured")
        ways = {"ours": ours, "eager": self.acting("eager", rows), "limit": self.bench.matrix_rate()}
        found = self.bench.rates(ways, rounds=3)
        rate = found["limit"].median * self.bench.product
        chunks = rows * found["ours"].median
        self.bench.tell(
            f"{self.kind}: {chunks:.1f} chunks/s at {rows}, eager {rows * found['eager'].median:.1f}, limit "
            f"{rate / operations:.1f}"
        )
        return Row(
            f"{self.kind}_act_64",
            chunks,
            "chunks/s",
            f"act() of {rows} observations, as above",
            [at_least(TARGETS[self.kind]["act_64"])] if "act_64" in TARGETS[self.kind] else (),
            peers={"eager": rows * found["eager"].median},
            limit=rate / operations,
            limit_name="operations of the whole model at the measured matrix rate",
            spread=(rows * found["ours"].spread[0], rows * found["ours"].spread[1]),
            size=self.bench.size,
            note=f"{operations / 1e12:.2f} TFLOP a chunk, {chunks * operations / 1e12:.0f} TFLOP/s",
        )

    def precision(self) -> Row:
        """How far the actions of bfloat16 are from those of float32, from the same noise."""
        seen, kept = observations(4), self.policy.config
        self.policy.config = replace(kept, acting="auto")
        ours, _ = self.policy.act(seen, False, generator=torch.Generator().manual_seed(1))
        wide = flow_policy(self.kind, self.bench.tiny, self.bench.device, self.bench.dtype).float()
        wide.config = replace(kept, acting="eager")
        exact, _ = wide.act(seen, False, generator=torch.Generator().manual_seed(1))
        off = float(np.abs(ours - exact).max() / exact.std())
        self.bench.tell(f"{self.kind}: bfloat16 is {off:.4f} deviations off at most")
        return Row(
            f"{self.kind}_precision", off, "deviations",
            "largest difference of an action in bfloat16, compiled and captured, to float32, over the deviation of "
            "actions", size=self.bench.size,
        )  # fmt: skip


def flows(bench: Any) -> list[Row]:
    rows = []
    for kind in TARGETS:
        bench.clear()
        made = FlowBench(bench, kind)
        rows += [made.latency(), made.many(), made.precision()]
        del made
    return rows


def gradients(bench: Any) -> list[Row]:
    """The gradient of log-probabilities of 32 samples."""
    rows = []
    for kind, targets in TARGETS.items():
        if "gradient_32" not in targets:
            continue
        bench.clear()
        policy = flow_policy(kind, bench.tiny, bench.device, bench.dtype)
        count = 2 if bench.tiny else 32
        policy.config = replace(policy.config, acting="eager")
        _, record = policy.act(observations(count), generator=torch.Generator().manual_seed(0))
        bench.clear()

        def gradient(learning: str, policy: FlowPolicy = policy, record: Any = record) -> None:
            policy.config = replace(policy.config, learning=learning)
            policy.evaluate(record).log_prob.mean().backward()
            policy.zero_grad()

        ours, eager = partial(gradient, "auto"), partial(gradient, "eager")
        ours()
        peak = bench.peak()
        rates = bench.rates({"ours": ours, "eager": eager}, rounds=3)
        found, beside = rates["ours"], count * rates["eager"].median
        bench.tell(
            f"{kind}: {count * found.median:.1f} samples/s with gradient, {peak / 1e9:.1f} GB; eager {beside:.1f} in "
            f"{bench.peak() / 1e9:.1f} GB"
        )
        rows.append(
            Row(
                f"{kind}_gradient_32",
                count * found.median,
                "samples/s",
                f"evaluate() of {count} records and the gradient of all weights of {kind}",
                [at_least(targets["gradient_32"])],
                peers={"eager": beside},
                spread=(count * found.spread[0], count * found.spread[1]),
                size=bench.size,
                note=f"peak {peak / 1e9:.1f} GB of the asked 60; eager {bench.peak() / 1e9:.1f} GB",
            )
        )
    return rows


def group(part: Callable[[Any], list[Row]]) -> Callable[[Lab], list[Row]]:
    def measured(lab: Lab) -> list[Row]:
        from bench.vla import Bench

        return part(Bench(lab))

    return measured
