"""The layers of an action expert in Triton kernels, for decisions in real time.

With one robot a layer has 50 tokens, and its time goes into launching kernels and reading weights, not into arithmetic.
Here rotation and activation are part of the product before them, and what has little to do is divided among more of the
card's processors than it has rows: products along their depth, attention along its keys. The parts are added, always in
the same order, by the kernel that comes next:

    normed = norm(x)
    queries, keys, values = rotate(normed @ [Wq Wk Wv])
    seen = attention(queries, [other keys, keys], [other values, values])
    x = x + (seen @ Wo) * gate;  normed = norm(x)
    inner = gelu(normed @ Wgate) * (normed @ Wup)
    x = x + (inner @ Wdown) * gate

On Hopper and later a kernel starts while the one before it still runs: it asks for its weights, and waits where it
needs the other's results.

`fits` says for which layers and inputs; others go the usual way. Weights are read where they are. Products are of
bfloat16 with sums in float32, as in the eager form; the order of roundings differs.
"""

# Triton's decorators have no types, and a kernel's parameters are pointers and numbers.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-not-found,import-untyped"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # before Triton 3.3
    gdc_launch_dependents = gdc_wait = None

ROWS = 64
"""Rows of one block of a product: a decision of one robot has 50 or 51"""
MOST_ROWS = 256
"""Above this many rows the card's own products are faster"""


@cache
def _early(device: torch.device) -> dict[str, bool]:
    """Options of a launch that does not wait for the kernel before to end, where the card and Triton can do that."""
    can = gdc_wait is not None and torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


def fits(stack: Any, x: Tensor, sight: Any, conditions: Any) -> bool:
    """Whether these kernels compute this stack of layers of these inputs."""
    return (
        attends(stack.layers[0], x, sight)
        and x.shape[0] * x.shape[1] <= MOST_ROWS
        and x.shape[2] % 16 == 0
        and all(each is None or each.shape[:-1] == (1,) for both in conditions for each in _both(both))
        and all(layer.mlp.joined.weight is not None for layer in stack.layers)
        and all(layer.crosses or layer.self_attn.joined.weight is not None for layer in stack.layers)
    )


def attends(layer: Any, x: Tensor, sight: Any) -> bool:
    """Whether `attention` computes that of this layer."""
    fit = x.is_cuda and x.dtype == torch.bfloat16 and layer.self_attn.head_dim in (64, 128, 256)
    return fit and sight.valid is not None


def fits_linear(layer: Any, x: Tensor) -> bool:
    """Whether `linear` computes this layer of this input."""
    return type(layer) is torch.nn.Linear and x.is_cuda and x.dtype == layer.weight.dtype == torch.float32


def stack(stack: Any, x: Tensor, sights: Any, cache: Any, conditions: Any) -> Tensor:
    """The output of all layers behind the final norm, as `GemmaStack.through` computes it: what a layer adds is added
    where the next one begins."""
    flat, summands, gating = x.reshape(-1, x.shape[-1]), None, None
    for layer, other, condition in zip(stack.layers, cache, conditions, strict=False):
        at, mlp, sight = layer.self_attn, layer.mlp, sights[layer.crosses]
        first, second = _both(condition)
        flat, normed = added(flat, summands, gating, layer.input_layernorm, first)
        weight = at.q_proj.weight if layer.crosses else at.joined.weight
        projected = pairs(normed, weight, at.head_dim, sight.rotation, at.heads + other[0].shape[1])
        seen = attention(projected, other, sight, x.shape[:2], at.heads)
        flat, normed = added(flat, parts(seen, at.o_proj.weight), first, layer.post_attention_layernorm, second)
        inner = pairs(normed, mlp.joined.weight, 2 * len(mlp.gate_proj.weight), gelu=mlp.gemma)
        summands, gating = parts(inner, mlp.down_proj.weight), second
    return added(flat, summands, gating, stack.norm, conditions[-1])[1].view(x.shape)


LINE = tl.constexpr(64)
"""Numbers of bfloat16 in one line of memory"""


def _lines(numbers: int) -> int:
    """Lines that hold so many numbers, or the next power of two."""
    count: int = triton.next_power_of_2(triton.cdiv(numbers, 64))
    return count


def _both(condition: Any) -> tuple[Tensor | None, Tensor | None]:
    return condition if isinstance(condition, tuple) else (condition, condition)


@triton.jit
def _ask_for(pointers):
    """Has the lines of memory at these places brought to the card's second cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


# --- a sum and its norm ---


def added(
    x: Tensor, summands: Tensor | None, gating: Tensor | None, norm: Any, condition: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``x + sum(summands) * gate``, and the norm of that. The gate is the last third of `gating`; scale and shift are
    the first two of `condition`."""
    rows, width = x.shape
    total = x if summands is None else torch.empty_like(x)
    normed = x if norm is None else torch.empty_like(x)
    scale = shift = x if norm is None or condition is not None else norm.weight
    if condition is not None:
        scale, shift = condition[:, :width], condition[:, width : 2 * width]
    offset = norm.offset if norm is not None and condition is None else 1.0
    _added[(rows,)](
        x, x if summands is None else summands, x if gating is None else gating[:, 2 * width :], scale, shift, total,
        normed, rows, 1.0 if norm is None else norm.epsilon, offset, WIDTH=width, ROOM=triton.next_power_of_2(width),
        PARTS=0 if summands is None else len(summands), GATES=gating is not None, NORMS=norm is not None,
        SHIFTS=condition is not None, num_warps=4, **_early(x.device),
    )  # fmt: skip
    return total, normed


@triton.jit
def _added(
    x, summands, gate, scale, shift, total, normed, rows, epsilon, offset,
    WIDTH: tl.constexpr, ROOM: tl.constexpr, PARTS: tl.constexpr, GATES: tl.constexpr, NORMS: tl.constexpr,
    SHIFTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    column = tl.arange(0, ROOM)
    real = column < WIDTH
    at = row * WIDTH + column
    here = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    if PARTS:
        more = tl.load(summands + at, mask=real, other=0.0)
        for part in tl.static_range(1, PARTS):
            more += tl.load(summands + part * rows * WIDTH + at, mask=real, other=0.0)
        if GATES:
            more *= tl.load(gate + column, mask=real, other=0.0).to(tl.float32)
        here = (here + more).to(tl.bfloat16)
        tl.store(total + at, here, mask=real)
        here = here.to(tl.float32)
    if NORMS:
        size = tl.rsqrt(tl.sum(here * here, 0) / WIDTH + epsilon)
        here = here * size * (offset + tl.load(scale + column, mask=real, other=0.0).to(tl.float32))
        if SHIFTS:
            here += tl.load(shift + column, mask=real, other=0.0).to(tl.float32)
        tl.store(normed + at, here.to(tl.bfloat16), mask=real)


# --- a product whose columns meet in pairs ---

PAIRS = [
    triton.Config({"COLUMNS": columns, "DEPTH": depth}, num_warps=warps, num_stages=stages)
    for columns, depth, warps, stages in (
        (16, 128, 4, 4), (16, 256, 4, 3), (16, 64, 4, 8), (32, 128, 4, 4), (32, 64, 4, 6), (32, 256, 8, 2),
        (64, 64, 4, 4), (64, 128, 8, 3),
    )
]  # fmt: skip


def pairs(x: Tensor, weight: Tensor, group: int, rotation: Any = None, turned: int = 0, gelu: bool = True) -> Tensor:
    """``x @ weight.T`` in groups of columns whose halves belong together. With a rotation: pairs of the first `turned`
    groups are rotated by their positions, [rows, columns]. Without: the first half is activated and multiplied with
    the second, [rows, columns / 2]."""
    rows, width = x.shape
    columns, half, turns = len(weight), group // 2, rotation is not None
    out = x.new_empty(rows, columns if turns else columns // 2)
    cos, sin = (rotation.cos, rotation.sin) if turns else (x, x)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(rows, ROWS), (columns // group) * triton.cdiv(half, meta["COLUMNS"])

    _pairs[grid](
        x, weight, out, cos, sin, rows, turned, out.stride(0),
        WIDTH=width, HALF=half, TURNS=turns, GELU=gelu, ROWS=ROWS, LINES=_lines(width), **_early(x.device),
    )  # fmt: skip
    return out


@triton.autotune(configs=PAIRS, key=["rows", "WIDTH", "HALF"])
@triton.jit
def _pairs(
    x, weight, out, cos, sin, rows, turned, stride,
    WIDTH: tl.constexpr, HALF: tl.constexpr, TURNS: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr,
    LINES: tl.constexpr, EARLY: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(HALF, COLUMNS)
    group = tl.program_id(1) // tiles
    place = (tl.program_id(1) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, within = (row < rows)[:, None], (place < HALF)[None, :]
    first = group * 2 * HALF + place
    if EARLY:
        line = tl.minimum(tl.arange(0, LINES) * LINE, WIDTH - 1)
        known = tl.minimum(place, HALF - 1) + group * 2 * HALF
        _ask_for(weight + known[:, None] * WIDTH + line[None, :])
        _ask_for(weight + (known + HALF)[:, None] * WIDTH + line[None, :])
        gdc_wait()
        gdc_launch_dependents()
    a = tl.zeros((ROWS, COLUMNS), tl.float32)
    b = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, WIDTH, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        real = depth < WIDTH
        part = tl.load(x + row[:, None] * WIDTH + depth[None, :], mask=inside & real[None, :], other=0.0)
        one = tl.load(weight + first[None, :] * WIDTH + depth[:, None], mask=within & real[:, None], other=0.0)
        two = tl.load(weight + (first + HALF)[None, :] * WIDTH + depth[:, None], mask=within & real[:, None], other=0.0)
        a = tl.dot(part, one, a)
        b = tl.dot(part, two, b)
    if TURNS:
        if group < turned:
            turn = row[:, None] * HALF + place[None, :]
            c = tl.load(cos + turn, mask=inside & within, other=1.0)
            s = tl.load(sin + turn, mask=inside & within, other=0.0)
            a, b = a * c - b * s, b * c + a * s
        to = out + row[:, None] * stride + first[None, :]
        tl.store(to, a.to(tl.bfloat16), mask=inside & within)
        tl.store(to + HALF, b.to(tl.bfloat16), mask=inside & within)
    else:
        if GELU:
            inner = 0.7978845608028654 * (a + 0.044715 * a * a * a)
            a = a / (1.0 + tl.exp(-2.0 * inner))  # 0.5 * (1 + tanh(inner)) is the sigmoid of 2 * inner
        else:
            a = a / (1.0 + tl.exp(-a))
        to = out + row[:, None] * stride + (group * HALF + place)[None, :]
        tl.store(to, (a * b).to(tl.bfloat16), mask=inside & within)


# --- a product in parts ---

SPLIT = 4
"""Parts of a product, along its depth"""
PRODUCTS = [
    triton.Config({"COLUMNS": columns, "DEPTH": depth}, num_warps=warps, num_stages=stages)
    for columns, depth, warps, stages in (
        (16, 128, 4, 4), (16, 256, 4, 3), (32, 128, 4, 4), (32, 64, 4, 6), (32, 256, 8, 2), (64, 64, 4, 5),
        (64, 128, 4, 3),
    )
]  # fmt: skip


def parts(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [SPLIT, rows, columns], whose sum is ``x @ weight.T``."""
    (rows, depth), width = x.shape, len(weight)
    out = torch.empty(SPLIT, rows, width, device=x.device)

    def grid(meta: dict[str, int]) -> tuple[int, int, int]:
        return triton.cdiv(rows, ROWS), triton.cdiv(width, meta["COLUMNS"]), SPLIT

    share = triton.cdiv(depth, SPLIT)
    _parts[grid](
        x, weight, out, rows, LENGTH=depth, WIDTH=width, SHARE=share, ROWS=ROWS, LINES=_lines(share), **_early(x.device)
    )
    return out


@triton.autotune(configs=PRODUCTS, key=["rows", "LENGTH", "WIDTH"])
@triton.jit
def _parts(
    x, weight, out, rows,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr,
    EARLY: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.program_id(2) * SHARE
    inside, within = (row < rows)[:, None], (column < WIDTH)[None, :]
    if EARLY:
        line = tl.minimum(begin + tl.arange(0, LINES) * LINE, LENGTH - 1)
        _ask_for(weight + tl.minimum(column, WIDTH - 1)[:, None] * LENGTH + line[None, :])
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, SHARE, DEPTH):
        own = start + tl.arange(0, DEPTH)
        place = begin + own
        real = (own < SHARE) & (place < LENGTH)
        part = tl.load(x + row[:, None] * LENGTH + place[None, :], mask=inside & real[None, :], other=0.0)
        factor = tl.load(weight + column[None, :] * LENGTH + place[:, None], mask=within & real[:, None], other=0.0)
        total = tl.dot(part, factor, total)
    at = (tl.program_id(2) * rows + row)[:, None] * WIDTH + column[None, :]
    tl.store(out + at, total, mask=inside & within)


# --- a product in float32 ---

LINEAR = [
    triton.Config({"COLUMNS": columns, "DEPTH": depth}, num_warps=4, num_stages=stages)
    for columns, depth, stages in ((16, 32, 4), (16, 64, 3), (16, 128, 2), (32, 32, 4), (32, 64, 3), (64, 32, 4))
]


def linear(layer: Any, x: Tensor, silu: bool = False) -> Tensor:
    """``x @ weight.T + bias``, activated if asked for, to the precision of float32."""
    flat = x.reshape(-1, x.shape[-1])
    (rows, depth), width = flat.shape, len(layer.weight)
    out = torch.empty(rows, width, device=x.device)

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(rows, ROWS), triton.cdiv(width, meta["COLUMNS"])

    _linear[grid](
        flat, layer.weight, out if layer.bias is None else layer.bias, out, rows, LENGTH=depth, WIDTH=width,
        ADDS=layer.bias is not None, SILU=silu, ROWS=ROWS, LINES=2 * _lines(depth), **_early(x.device),
    )  # fmt: skip
    return out.view(*x.shape[:-1], width)


@triton.autotune(configs=LINEAR, key=["rows", "LENGTH", "WIDTH"])
@triton.jit
def _linear(
    x, weight, bias, out, rows,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr,
    LINES: tl.constexpr, EARLY: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside, within = (row < rows)[:, None], (column < WIDTH)[None, :]
    if EARLY:
        line = tl.minimum(tl.arange(0, LINES) * (LINE // 2), LENGTH - 1)  # of numbers twice as large
        _ask_for(weight + tl.minimum(column, WIDTH - 1)[:, None] * LENGTH + line[None, :])
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, LENGTH, DEPTH):
        place = start + tl.arange(0, DEPTH)
        real = place < LENGTH
        part = tl.load(x + row[:, None] * LENGTH + place[None, :], mask=inside & real[None, :], other=0.0)
        factor = tl.load(weight + column[None, :] * LENGTH + place[:, None], mask=within & real[:, None], other=0.0)
        total = tl.dot(part, factor, total, input_precision="tf32x3")  # three products: nearly all bits of float32
    if ADDS:
        total += tl.load(bias + column, mask=column < WIDTH, other=0.0)[None, :]
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + row[:, None] * WIDTH + column[None, :], total, mask=inside & within)


# --- attention over the keys of the other stack and one's own ---

FEW = 64
"""Blocks of queries and heads from which on the keys are not divided: half of the processors of a large card"""
SHARE = 128
"""Keys of the other stack that one part looks at"""
ATTENTION = [
    triton.Config({"QUERIES": queries, "KEYS": keys}, num_warps=warps, num_stages=stages)
    for queries, keys, warps, stages in (
        (16, 64, 4, 2), (16, 128, 4, 1), (32, 64, 4, 2), (32, 128, 4, 1), (32, 128, 8, 1), (64, 64, 4, 2),
        (64, 64, 8, 2), (64, 128, 8, 1), (128, 64, 8, 2),
    )
]  # fmt: skip


def attention(projected: Tensor, other: tuple[Tensor, Tensor], sight: Any, shape: Any, heads: int) -> Tensor:
    """[rows * tokens, heads * dim] of queries, keys and values side by side, [rows * tokens, columns], and of the keys
    and values of the other stack. Where there are only queries, a token sees no other of its own stack.

    Of the other stack it sees what is `sight.valid`, of its own all but that the first `sight.alone` see no later one.
    """
    keys, values = (one.contiguous() for one in other)
    groups, before, dim = keys.shape[1:]
    (rows, tokens), shared, owns = shape, heads // groups, projected.shape[1] > heads * dim
    few = rows * groups * triton.cdiv(shared * tokens, 64) < FEW
    share = SHARE if few else before
    shares = triton.cdiv(before, share)
    out = projected.new_empty(rows * tokens, heads * dim)
    partial = torch.empty(shares, rows * tokens, heads, dim, device=out.device) if few else out
    sums = torch.empty(2, shares, rows * tokens, heads, device=out.device) if few else out

    def grid(meta: dict[str, int]) -> tuple[int, int, int]:
        return triton.cdiv(shared * tokens, meta["QUERIES"]), rows * groups, shares

    early = _early(out.device)
    _attention[grid](
        projected, keys, values, sight.valid.view(torch.uint8), partial, sums, tokens, before, groups, rows,
        sight.alone, share, projected.stride(0), dim**-0.5 * 1.4426950408889634,
        SHARED=shared, DIM=dim, OWNS=owns, DIVIDED=few, SHARES=shares, SHARE=triton.next_power_of_2(min(share, 128)),
        **early,
    )  # fmt: skip
    if few:
        _combined[(rows * tokens, heads)](
            partial, sums, out, rows * tokens, heads, DIM=dim, SHARES=shares, num_warps=1, **early
        )
    return out


@triton.autotune(configs=ATTENTION, key=["tokens", "before", "rows", "OWNS"])
@triton.jit
def _attention(
    projected, keys, values, valid, partial, sums, tokens, before, groups, rows, alone, share_of_keys, stride, scale,
    SHARED: tl.constexpr, DIM: tl.constexpr, OWNS: tl.constexpr, DIVIDED: tl.constexpr, SHARES: tl.constexpr,
    SHARE: tl.constexpr, EARLY: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(1) // groups, tl.program_id(1) % groups
    query = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    token, head = query % tokens, group * SHARED + query // tokens
    asked = (query < SHARED * tokens)[:, None]
    dim = tl.arange(0, DIM)
    begin = tl.program_id(2) * share_of_keys
    end = tl.minimum(begin + share_of_keys, before)
    cached = (row * groups + group) * before * DIM
    if EARLY:
        if DIVIDED:
            known = tl.minimum(begin + tl.arange(0, SHARE), before - 1)[:, None] * DIM
            line = cached + known + (tl.arange(0, DIM // LINE) * LINE)[None, :]
            _ask_for(keys + line)
            _ask_for(values + line)
        gdc_wait()
        gdc_launch_dependents()
    q = tl.load(
        projected + (row * tokens + token)[:, None] * stride + head[:, None] * DIM + dim[None, :], mask=asked, other=0.0
    )
    largest = tl.full((QUERIES,), -1e30, tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    total = tl.zeros((QUERIES, DIM), tl.float32)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < end
        k = tl.load(keys + cached + key[None, :] * DIM + dim[:, None], mask=inside[None, :], other=0.0)
        v = tl.load(values + cached + key[:, None] * DIM + dim[None, :], mask=inside[:, None], other=0.0)
        visible = tl.load(valid + row * before + key, mask=inside, other=0) != 0
        largest, weight, total = _looked_at(q, k, v, visible[None, :], scale, largest, weight, total)
    if OWNS:  # noqa: SIM102 (known when it is compiled)
        if tl.program_id(2) == SHARES - 1:
            own = projected + row * tokens * stride + (groups * SHARED + group) * DIM
            for start in range(0, tokens, KEYS):
                key = start + tl.arange(0, KEYS)
                inside = key < tokens
                k = tl.load(own + key[None, :] * stride + dim[:, None], mask=inside[None, :], other=0.0)
                v = tl.load(own + groups * DIM + key[:, None] * stride + dim[None, :], mask=inside[:, None], other=0.0)
                visible = inside[None, :] & ((key[None, :] <= token[:, None]) | (token >= alone)[:, None])
                largest, weight, total = _looked_at(q, k, v, visible, scale, largest, weight, total)
    heads = SHARED * groups
    if DIVIDED:
        all_tokens = rows * tokens
        at = (tl.program_id(2) * all_tokens + row * tokens + token) * heads + head
        tl.store(partial + at[:, None] * DIM + dim[None, :], total, mask=asked)
        tl.store(sums + at, largest, mask=query < SHARED * tokens)
        tl.store(sums + SHARES * all_tokens * heads + at, weight, mask=query < SHARED * tokens)
    else:
        at = (row * tokens + token) * heads + head
        answer = total / tl.maximum(weight, 1e-30)[:, None]
        tl.store(partial + at[:, None] * DIM + dim[None, :], answer.to(tl.bfloat16), mask=asked)


@triton.jit
def _looked_at(q, k, v, visible, scale, largest, weight, total):
    """The sums of an attention with these keys and values in them, too."""
    scores = tl.where(visible, tl.dot(q, k) * scale, -1e30)
    now = tl.maximum(largest, tl.max(scores, 1))
    share = tl.where(visible, tl.exp2(scores - now[:, None]), 0.0)
    kept = tl.exp2(largest - now)
    weight = weight * kept + tl.sum(share, 1)
    return now, weight, tl.dot(share.to(tl.bfloat16), v, total * kept[:, None])


@triton.jit
def _combined(
    partial, sums, out, tokens, heads, DIM: tl.constexpr, SHARES: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """The parts of each query's attention, weighed by how much they saw."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0) * heads + tl.program_id(1)
    dim = tl.arange(0, DIM)
    largest = tl.load(sums + at)
    for share in tl.static_range(1, SHARES):
        largest = tl.maximum(largest, tl.load(sums + share * tokens * heads + at))
    total = tl.zeros((DIM,), tl.float32)
    weight = 0.0
    for share in tl.static_range(SHARES):
        here = share * tokens * heads + at
        factor = tl.exp2(tl.load(sums + here) - largest)
        weight += tl.load(sums + SHARES * tokens * heads + here) * factor
        total += tl.load(partial + here * DIM + dim) * factor
    tl.store(out + at * DIM + dim, (total / tl.maximum(weight, 1e-30)).to(tl.bfloat16))
