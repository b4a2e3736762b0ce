"""Rollouts in float8 (`policy_options.rollout_precision=fp8`): how much faster OpenVLA-OFT and pi0 act than in
bfloat16, and how far the policy that acts is from the one that learns, with random weights. Without a GPU, or with
--quick, float8 is emulated in a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.report import Row, at_least, at_most
from bench.vla_flows import FlowBench, observations
from bench.vla_sizes import record_of
from hilt.policies import float8 as float8_module
from hilt.policies.float8 import EMULATED, FIRST_LAYER, FP8, KIND, compared, product, quantize
from hilt.policies.graphs import compiling

TARGET_CHUNKS, TARGET_GAIN, TARGET_KL = 165, 1.35, 1e-3
TEMPERATURE = 1.6
"""Of rollouts, as SimpleVLA-RL has it"""
VARIANTS: dict[str, tuple[int, bool, bool]] = {
    "all layers": (0, False, False),
    "from layer 4": (4, False, False),
    "from layer 8": (8, False, False),
    "from layer 16": (16, False, False),
    "scales after the product": (FIRST_LAYER, False, True),
    "all layers, scales after the product": (0, False, True),
    "all layers, vision too": (0, True, False),
}
"""The first layer of the language model in float8; whether vision is, too; whether scales follow the product"""


def float8(bench: Any) -> list[Row]:
    """OpenVLA-OFT."""
    bench.clear()
    how, first = (EMULATED, 0) if bench.tiny else (FP8, FIRST_LAYER)
    eager = {"layers": "eager", "acting": "eager"}
    policy = bench.policy(rollout_precision=how, fp8_first_layer=first, **eager).requires_grad_(False)
    batch = 2 if bench.tiny else 64
    if bench.device.type == "cuda":
        product_rates(bench)
        bench.tell("float8, eager:")
        acting(bench, policy, batch)
        policy.options.layers, policy.options.acting = "auto", "captured"
    with compiling():
        rows = speed(bench, policy, batch)
        rows += [acting(bench, policy, batch), *distance(bench, policy, batch), refresh(bench, policy)]
        if not bench.tiny:
            variants(bench, policy, batch)
    return rows


def question(policy: Any, batch: int) -> Callable[[], Any]:
    from bench.vla import question as asked

    return asked(policy, batch)


def captured_ways(bench: Any, policy: Any, batch: int) -> dict[str, Callable[[], Any]]:
    with torch.no_grad():
        ours = bench.captured(question(policy, batch))
        with policy.in_learning_precision():
            return {"ours": ours, "bfloat16": bench.captured(question(policy, batch))}


def speed(bench: Any, policy: Any, batch: int) -> list[Row]:
    ways = captured_ways(bench, policy, batch)
    bench.tell(f"float8: batch {batch} compiled and captured in both precisions")
    with torch.no_grad():
        found = bench.rates(ways)
    chunks, before = (batch * found[name].median for name in ("ours", "bfloat16"))
    low, high = found["ours"].spread
    bench.tell(f"float8: {chunks:.1f} chunks/s, bfloat16 {before:.1f}: {chunks / before:.2f}x")
    return [
        Row(
            "fp8_chunks_64", chunks, "chunks/s",
            f"greedy chunks as in chunks_64, batch {batch}, layers of the language model from {FIRST_LAYER} on in "
            "float8, compiled, one CUDA graph; in turns with bfloat16",
            [at_least(TARGET_CHUNKS), at_least(TARGET_GAIN, "peer")], peers={"ours in bfloat16": before},
            spread=(batch * low, batch * high), size=bench.size,
        )
    ]  # fmt: skip


def acting(bench: Any, policy: Any, batch: int) -> Row:
    draws, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    seen = [
        {"full_image": draws.integers(0, 256, (256, 256, 3), np.uint8), "instruction": "pick up a bowl"}
        for _ in range(batch)
    ]

    def ours() -> None:
        policy.act(seen, True, TEMPERATURE, generator)

    def before() -> None:
        with policy.in_learning_precision():
            policy.act(seen, True, TEMPERATURE, generator)

    found = bench.rates({"ours": ours, "bfloat16": before}, rounds=3)
    chunks, other = (batch * found[name].median for name in ("ours", "bfloat16"))
    bench.tell(f"float8: act() {chunks:.1f} chunks/s, bfloat16 {other:.1f}")
    return Row(
        "fp8_act_64", chunks, "chunks/s", f"policy.act() of {batch} observations as in act_32, in float8",
        peers={"ours in bfloat16": other}, size=bench.size, note="layers compiled, CUDA graphs",
        spread=(batch * found["ours"].spread[0], batch * found["ours"].spread[1]),
    )  # fmt: skip


def apart(policy: Any, batch: int, temperature: float) -> tuple[float, float]:
    """KL and share of changed greedy tokens, at a temperature."""
    record = record_of(policy, batch)
    record["temperature"][:] = temperature
    found = compared(policy, record)
    return float(found["rollout_kl"].mean()), float(found["rollout_changed"].mean())


def distance(bench: Any, policy: Any, batch: int) -> list[Row]:
    (kl, changed), (colder, _) = apart(policy, batch, TEMPERATURE), apart(policy, batch, 1.0)
    bench.tell(
        f"float8: KL {kl:.2e} a token, {colder:.2e} at temperature 1; {100 * changed:.1f}% of greedy tokens differ"
    )
    return [
        Row(
            "fp8_kl", kl, "nats", f"KL(float8 || bfloat16) of a token at temperature {TEMPERATURE}, mean",
            [at_most(TARGET_KL)], size=bench.size,
            note=f"{colder:.2e} at temperature 1; {batch} random pictures and prompts, random weights",
        ),
        Row(
            "fp8_changed", 100 * changed, "%", "greedy tokens that differ between float8 and bfloat16", size=bench.size
        ),
    ]  # fmt: skip


def refresh(bench: Any, policy: Any) -> Row:
    """The float8 copies after all weights have changed, as after an update."""
    times = []
    for _ in range(3):
        with torch.no_grad():
            for layer in policy.float8_layers():
                layer.weight.add_(0)
        with policy.acting():
            times.append(1e3 * policy._float8.refresh_s)
    bench.tell(f"float8: copies made anew in {', '.join(f'{each:.1f}' for each in times)} ms")
    return Row(
        "fp8_refresh", sorted(times)[1], "ms", "float8 copies of all weights made anew on the device, after an update",
        size=bench.size, spread=(min(times), max(times)),
    )  # fmt: skip


def variants(bench: Any, policy: Any, batch: int) -> None:
    """Speed and distance with other layers in float8; printed, no rows."""
    kept, parts = policy.options.fp8_first_layer, policy.float8_parts
    for name, (first, vision, after) in VARIANTS.items():
        policy.options.fp8_first_layer, policy._float8 = first, None
        float8_module.product = scaled_after if after else product
        policy.float8_parts = partial(with_vision, policy) if vision else parts
        with torch.no_grad():
            rate = batch * bench.rates({"ours": bench.captured(question(policy, batch))}, rounds=3)["ours"].median
        kl, changed = apart(policy, batch, TEMPERATURE)
        bench.tell(f"float8, {name}: {rate:.1f} chunks/s, KL {kl:.2e}, {100 * changed:.1f}% greedy tokens differ")
    policy.options.fp8_first_layer, policy.float8_parts, float8_module.product = kept, parts, product


def with_vision(policy: Any) -> list[nn.Module]:
    vision = policy.vision_backbone
    return [*vision.featurizer.blocks, *vision.fused_featurizer.blocks, *policy.language_model.model.layers]


def scaled_after(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None, emulated: bool) -> Tensor:
    """`hilt.policies.float8.product` with the scales of rows in the operation that follows the product."""
    rows, row_scale = quantize(x.reshape(-1, x.shape[-1]))
    one = torch.ones((), device=x.device)
    y = torch._scaled_mm(rows, values.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    y = y.float() * row_scale * scale
    return (y if bias is None else y + bias.float()).to(torch.bfloat16).unflatten(0, x.shape[:-1])


def product_rates(bench: Any) -> None:
    """TFLOP/s of the products of a layer of OFT at batch 64, with scales of rows and of whole tensors; printed."""
    tokens = 64 * 346
    for inputs, outputs in ((4096, 4096), (4096, 11008), (11008, 4096)):
        x, weight = (torch.randn(n, inputs, device=bench.device, dtype=torch.bfloat16) for n in (tokens, outputs))
        (x8, x_scale), (w8, w_scale) = quantize(x), quantize(weight)
        one, by_output = torch.ones((), device=bench.device), w_scale.T.contiguous()
        exact = partial(torch._scaled_mm, x8, w8.T, out_dtype=torch.bfloat16)
        ways = {
            "bfloat16": partial(torch.mm, x, weight.T),
            "float8, rows": partial(exact, scale_a=x_scale, scale_b=by_output, use_fast_accum=True),
            "float8, rows, exact sums": partial(exact, scale_a=x_scale, scale_b=by_output),
            "float8, tensors": partial(exact, scale_a=one, scale_b=one, use_fast_accum=True),
        }
        found = bench.rates(ways, rounds=2, seconds=0.3)
        work = 2e-12 * tokens * inputs * outputs
        told = ", ".join(f"{name} {work * rate.median:.0f}" for name, rate in found.items())
        bench.tell(f"products of {inputs} to {outputs}, {KIND}: TFLOP/s {told}")


def device_times(policy: Any) -> dict[str, float]:
    """Milliseconds of the captured decisions of 64 rows in each precision; the best of ten."""
    found = {}
    for (shapes, options), graph in policy._graphs._graphs.items() if policy._graphs is not None else ():
        if dict((name, shape) for name, shape, _ in shapes)["state"][0] != 64:
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(10):
            start.record()
            graph._graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        found["float8" if dict(options)["float8"] else "bfloat16"] = min(times)
    return found


def pi0_float8(bench: Any) -> list[Row]:
    bench.clear()
    made = FlowBench(bench, "pi0")
    policy, batch = made.policy, 2 if bench.tiny else 64
    policy.rollout_precision = EMULATED if bench.tiny else FP8
    seen, generator = observations(batch), torch.Generator().manual_seed(0)
    if bench.tiny:
        policy.config = replace(policy.config, rollout_precision=EMULATED, fp8_first_layer=0)

    def ours() -> None:
        policy.act(seen, True, generator=generator)

    def before() -> None:
        with policy.in_learning_precision():
            policy.act(seen, True, generator=generator)

    ours(), before()
    bench.tell(f"pi0 in float8: batch {batch} compiled and captured in both precisions")
    found = bench.rates({"ours": ours, "bfloat16": before}, rounds=5, seconds=3.0)
    chunks, other = (batch * found[name].median for name in ("ours", "bfloat16"))
    alone = ", ".join(f"{ms:.0f} ms in {name}" for name, ms in device_times(policy).items())
    bench.tell(f"pi0 in float8: the graph alone takes {alone}")
    _, record = policy.act(observations(min(batch, 16)), True, generator=generator)
    kl = float(compared(policy, record)["rollout_kl"].mean())
    bench.tell(f"pi0 in float8: {chunks:.1f} chunks/s, bfloat16 {other:.1f}; KL {kl:.2e} of a number")
    return [
        Row(
            "pi0_fp8_act_64", chunks, "chunks/s",
            f"act() of {batch} observations, language model in float8: {made.name}",
            peers={"ours in bfloat16": other}, size=bench.size,
            note=f"the CUDA graph alone takes {alone}" * bool(alone),
            spread=(batch * found["ours"].spread[0], batch * found["ours"].spread[1]),
        ),
        Row(
            "pi0_fp8_kl", kl, "nats", "KL(float8 || bfloat16) of a number of an action, from what was drawn",
            [at_most(TARGET_KL)], size=bench.size,
        ),
    ]  # fmt: skip
