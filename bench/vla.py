"""OpenVLA-OFT, pi0, pi0.5 and SmolVLA with random weights: loading, acting and updating at full size on one GPU, beside
transformers' own eager trunk and beside what the card's matrix units do. With --quick, or without a GPU, tiny ones on
the CPU."""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.lab import Group, Lab, remove
from bench.report import Row, at_least, at_most
from bench.sides import Side
from bench.timing import Rates
from bench.vla_float8 import float8, pi0_float8
from bench.vla_flows import TARGETS, flows, gradients, group
from bench.vla_sizes import PROMPT, MasterAdam, bare, lora_policy, record_of
from bench.vla_steps import CASES, steps
from hilt.policies.base import select
from hilt.policies.vla.openvla import OpenVLAOptions

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # the card is nearly full in update_full
PEER = "transformers eager, trunk alone"
MINIBATCH = 128
"""Samples of one step of the optimizer, as SimpleVLA-RL has it"""
LORA, FULL = (64, 1.0), (32, 1.0)
"""Samples of one gradient, and which share of the layers is checkpointed"""


class Bench:
    """The device, the precision and the size of the model that all rows share."""

    def __init__(self, lab: Lab):
        self.lab, self.tiny = lab, lab.quick or not torch.cuda.is_available()
        self.device = torch.device("cpu" if self.tiny else "cuda")
        self.dtype = torch.float32 if self.tiny else torch.bfloat16
        why = "" if lab.quick else ", for there is no CUDA device"
        if not self.tiny:
            lab.limits["GPU"] = torch.cuda.get_device_name()
        self.size = f"a tiny model on the CPU instead of 7.5 billion parameters on a GPU{why}" if self.tiny else ""
        self.started = time.perf_counter()
        self.measured: dict[str, int] = {}
        """Peaks of memory, in bytes"""

    def policy(self, **options: Any) -> Any:
        return bare(self.tiny, OpenVLAOptions(**options)).initialize(0, self.device, self.dtype)

    def rates(self, calls: dict[str, Callable[[], object]], rounds: int = 5, seconds: float = 1.0) -> dict[str, Rates]:
        """Calls per second, in turns. The device is waited for at the end of each turn only."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(1 + (1 if self.tiny else rounds)):
            for name, call in calls.items():
                start, done = self.now(), 0
                while done == 0 or (number and time.perf_counter() - start < (0.05 if self.tiny else seconds)):
                    call()
                    done += 1
                    if done % 4 == 0:
                        self.now()
                if number:
                    found[name].append(done / (self.now() - start))
        return {name: Rates(values) for name, values in found.items()}

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def clear(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch._dynamo.reset()  # of what was compiled, which is done for a GPU only
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0

    def captured(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The same as one CUDA graph."""
        if self.device.type != "cuda":
            return call
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = call()

        def replay(held: Any = (call, made)) -> None:  # what the graph reads and writes stays where it is
            graph.replay()

        return replay

    def tell(self, text: str) -> None:
        self.lab.progress(f"{time.perf_counter() - self.started:6.1f} s  {text}")

    def matrix_rate(self) -> Callable[[], object]:
        """One product of 8192 x 8192 random matrices: 1.1 TFLOP."""
        side = 128 if self.tiny else 8192
        a, b = (torch.randn(side, side, device=self.device, dtype=self.dtype) for _ in range(2))
        out = torch.empty_like(a)
        self.product = 2.0 * side**3
        return lambda: torch.mm(a, b, out=out)


def load(lab: Lab) -> list[Row]:
    bench = Bench(lab)
    folder = lab.new("checkpoint")
    policy = bench.policy()
    start = bench.now()
    policy.save_pretrained(folder)
    wrote = bench.now() - start
    bench.tell(
        f"load: {sum(p.numel() for p in policy.parameters()) / 1e9:.2f} billion parameters written in {wrote:.0f} s"
    )
    with Side("bench.vla_sides", "load") as side:
        found = side.ask("load", timeout=300, folder=str(folder), device=str(bench.device))
    same = float(sum(parameter.detach().float().abs().mean() for parameter in policy.parameters()))
    if found["check"] != same:
        raise RuntimeError(f"what was loaded is not what was saved: {found['check']} and {same}")
    remove(folder)
    note = (
        f"{found['peak'] / 1e9:.2f} GB at most, of which {found['before'] / 1e9:.2f} before (Python, "
        f"torch, CUDA), for weights of {found['copy'] / 1e9:.2f} GB; loaded in {found['seconds']:.1f} s, every "
        f"checksum compared; written in {wrote:.1f} s, power-safe"
    )
    what = (
        "peak resident memory of a process that opens a checkpoint of safetensors shards on the device, "
        "over the size of its weights"
    )
    return [
        Row(
            "load_host_memory",
            found["peak"] / found["copy"],
            "x one copy",
            what,
            [at_most(1.3)],
            size=bench.size,
            note=note,
        )
    ]


def act(lab: Lab) -> list[Row]:
    bench = Bench(lab)
    bench.clear()
    policy = bench.policy(layers="eager").requires_grad_(False)
    trunk = peer(policy)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        question(policy, 1)()
    operations = float(counter.get_total_flops())
    policy.options.layers = "auto"
    product = bench.matrix_rate()
    rows = []
    for batch in (32, 64):
        with torch.no_grad():
            ours = bench.captured(question(policy, batch))
            theirs = words(policy, trunk, batch)
            bench.tell(f"act: batch {batch} compiled and captured")
            found = bench.rates({"ours": ours, "peer": theirs, "limit": product})
        rate = found["limit"].median * bench.product
        lab.limits["bf16 matrix product of 8192"] = f"{rate / 1e12:.0f} TFLOP/s"
        low, high = found["ours"].spread
        chunks = batch * found["ours"].median
        bench.tell(
            f"act: batch {batch} {chunks:.1f} chunks/s, peer {batch * found['peer'].median:.1f}, "
            f"limit {rate / operations:.1f}"
        )
        rows.append(
            Row(
                f"chunks_{batch}",
                chunks,
                "chunks/s",
                f"greedy chunks of 8 x 7 tokens from uint8 images on the device, batch {batch}: vision, "
                "projector, 346 tokens, logits",
                [at_least(0.7, "limit")],
                peers={PEER: batch * found["peer"].median},
                limit=rate / operations,
                limit_name="operations of the whole model at the measured matrix rate",
                spread=(batch * low, batch * high),
                size=bench.size,
                note=f"{operations / 1e12:.2f} TFLOP a chunk, {chunks * operations / 1e12:.0f} TFLOP/s; weights "
                "and products in bfloat16, logits in float32; layers compiled, one CUDA graph; the "
                "issue's stretch is 125 chunks/s",
            )
        )
    with torch.no_grad():
        ours = bench.captured(question(policy, 1))
        found = bench.rates({"ours": ours, "peer": words(policy, trunk, 1)})
    slow, fast = (1e3 / rate for rate in found["ours"].spread)
    rows.append(
        Row(
            "latency_1", 1e3 / found["ours"].median, "ms", "one greedy chunk, batch 1, as above", [at_most(20)],
            peers={PEER: 1e3 / found["peer"].median}, spread=(fast, slow), size=bench.size,
        )
    )  # fmt: skip
    draws, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    seen = [
        {"full_image": draws.integers(0, 256, (256, 256, 3), np.uint8), "instruction": "pick up a bowl"}
        for _ in range(32)
    ]
    found = bench.rates({"ours": lambda: policy.act(seen, True, 1.6, generator)}, rounds=3)
    low, high = found["ours"].spread
    rows.append(
        Row(
            "act_32",
            32 * found["ours"].median,
            "chunks/s",
            "policy.act() of 32 observations: frames from the host, JPEG, resize and crop on the device, "
            "sampled tokens, the record back",
            peers={},
            spread=(32 * low, 32 * high),
            size=bench.size,
            note="layers compiled, one CUDA graph for the pictures and one for the rest",
        )
    )
    bench.tell(f"act: {rows[-1].ours:.1f} chunks/s with act(), {rows[-2].ours:.1f} ms alone")
    return rows


def update(lab: Lab) -> list[Row]:
    bench = Bench(lab)
    with Side("bench.vla_sides", "memory") as lora_side, Side("bench.vla_sides", "memory") as full_side:
        for side, adapters, (micro, share) in ((lora_side, True, LORA), (full_side, False, FULL)):
            side.tell("estimate", tiny=bench.tiny, rows=micro, lora=adapters, share=share)
        rows = [
            one_update(bench, adapters, peer_update(bench, how[0]), how)
            for adapters, how in ((True, LORA), (False, FULL))
        ]
        for row, side in zip(list(rows), (lora_side, full_side), strict=True):
            estimated, measured = side.answer(300)["bytes"], bench.measured[row.name]
            name = row.name.replace("update", "memory")
            what = (
                f"the estimate of memory over the measured peak, of a gradient as in {row.name}, "
                "without optimizer and compiler"
            )
            told = f"estimated {estimated / 1e9:.1f} GB, measured {measured / 1e9:.1f} GB"
            note = told if measured else "peaks on the CPU are in tests/policies"
            ratio = estimated / measured if measured else None
            rows.append(
                Row(name, ratio, "x measured", what, [at_least(0.85), at_most(1.15)], size=bench.size, note=note)
            )
    return rows


def one_update(bench: Bench, adapters: bool, beside: Rates, how: tuple[int, float]) -> Row:
    bench.clear()
    micro, share = (2, 0.5) if bench.tiny else how
    policy = bench.policy(checkpointed=share, layers="eager")
    parameters = lora_policy(policy) if adapters else list(policy.parameters())
    record = record_of(policy, MINIBATCH)
    advantages = torch.randn(MINIBATCH, 1, 1, generator=torch.Generator().manual_seed(0)).to(bench.device)

    def gradient(first: int, count: int = micro) -> None:
        """The clipped objective of PPO on a few samples of the minibatch."""
        part = select(record, slice(first, first + count))
        evaluation = policy.evaluate(part)
        ratio = (evaluation.log_prob - torch.from_numpy(part["log_prob"]).to(bench.device)).exp()
        gain = advantages[first : first + count]
        loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.28) * gain).mean() * (count / MINIBATCH)
        loss.backward()

    name = "update_lora" if adapters else "update_full"
    with FlopCounterMode(display=False) as counter:
        gradient(0, 1)
    operations = counter.get_total_flops()
    policy.zero_grad()
    bench.clear()  # the counter holds on to what it saw
    gradient(0)
    bench.measured[name] = bench.peak()
    policy.zero_grad()
    policy.options.layers = "auto"
    optimizer = MasterAdam(parameters, 5e-6)

    def step() -> None:
        for first in range(0, 4 if bench.tiny else MINIBATCH, micro):
            gradient(first)
        optimizer.step()

    step()
    bench.tell(f"{name}: compiled")
    found = bench.rates({"ours": step}, rounds=3, seconds=6.0)["ours"]
    samples = 4 if bench.tiny else MINIBATCH
    trained = sum(parameter.numel() for parameter in parameters)
    kind = (
        f"LoRA of rank 32 on every linear layer ({trained / 1e6:.0f} million)"
        if adapters
        else f"all {trained / 1e9:.2f} billion"
    )
    rate = samples * found.median
    bench.tell(f"{name}: {rate:.1f} samples/s, {rate * operations / 1e12:.0f} TFLOP/s, {bench.peak() / 1e9:.1f} GB")
    return Row(
        name,
        rate,
        "samples/s",
        f"PPO's clipped objective on records: {MINIBATCH} samples, {micro} at a time, clipping and a step "
        f"of AdamW; {kind} parameters",
        [at_least(32 if adapters else 24)],
        peers={PEER + ", gradients only": beside.median},
        spread=(samples * found.spread[0], samples * found.spread[1]),
        size=bench.size,
        note=f"{operations / 1e12:.1f} TFLOP a sample, recomputation included, "
        f"{rate * operations / 1e12:.0f} TFLOP/s; weights and gradients in bfloat16, master weights and both moments "
        f"of AdamW in float32; {100 * share:.0f}% of the layers checkpointed, all compiled; peak "
        f"{bench.peak() / 1e9:.1f} GB",
    )


def question(policy: Any, batch: int) -> Callable[[], Any]:
    """Images and prompts on the device to action tokens there."""
    record = record_of(policy, batch)
    images, prompt, length = (
        torch.from_numpy(record[name]).to(policy.device) for name in ("images", "prompt", "prompt_length")
    )
    prompt, length = prompt.long(), length.long()
    return lambda: policy.action_logits(images, prompt, length, equal=True).argmax(-1)


def peer(policy: Any) -> Any:
    """transformers' own Llama on the same weights, as anybody runs it: eager, with its choice of attention."""
    from transformers import LlamaModel

    config = copy.deepcopy(policy.language_model.config)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = LlamaModel(config)
    model.load_state_dict(policy.language_model.model.state_dict(), assign=True)
    with torch.device(policy.device):
        model.rotary_emb = type(model.rotary_emb)(config)
    return model.eval()


def words(policy: Any, trunk: Any, batch: int) -> Callable[[], Any]:
    tokens = policy.vision_backbone.patches + PROMPT + policy.slots + 1
    x = torch.randn(batch, tokens, policy.config.width, device=policy.device, dtype=policy.projector.fc1.weight.dtype)
    return lambda: trunk(inputs_embeds=x, use_cache=False).last_hidden_state


def peer_update(bench: Bench, rows: int) -> Rates:
    """Gradients of all weights of the trunk, checkpointed, of as many samples at a time as ours; samples per second."""
    bench.clear()
    policy = bench.policy()
    trunk = peer(policy).train().requires_grad_()
    trunk.gradient_checkpointing_enable()
    batch = 2 if bench.tiny else rows
    call = words(policy, trunk, batch)

    def gradient() -> None:
        call().float().square().mean().backward()

    found = bench.rates({"peer": gradient}, rounds=3)["peer"]
    bench.tell(f"update: peer {batch * found.median:.1f} samples/s, {batch} at a time")
    return Rates([batch * rate for rate in found.rounds])


GROUPS = {
    "load": Group(["load_host_memory"], load),
    "act": Group(["chunks_32", "chunks_64", "latency_1", "act_32"], act),
    "flows": Group([f"{kind}_{row}" for kind in TARGETS for row in ("latency", "act_64", "precision")], group(flows)),
    "float8": Group(["fp8_chunks_64", "fp8_act_64", "fp8_kl", "fp8_changed", "fp8_refresh"], group(float8)),
    "pi0_float8": Group(["pi0_fp8_act_64", "pi0_fp8_kl"], group(pi0_float8)),
    "gradients": Group(["pi0_gradient_32", "pi05_gradient_32"], group(gradients)),
    "steps": Group(list(CASES), steps),
    "update": Group(["update_lora", "update_full", "memory_lora", "memory_full"], update),
}
