"""Kernels of norms.py."""

import torch
from torch import Tensor

from worker.ops.e4m3_triton import store_in_e4m3
from worker.ops.jit import enter, overlap, power_of_two, tl, triton


@triton.jit(do_not_specialize=["stride_scales"])
def _rms_norm_kernel(
    x, residual, weight, normed, total, scales, plain, stride_x, stride_residual, stride_total,
    stride_scales, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    EIGHT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row; SIZE <= BLOCK. The order of its sum depends on SIZE alone.

    EIGHT: `normed` is in e4m3 and has `scales`; plain: it as it is, too, unless None.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    enter(PDL)
    dtype = x.dtype.element_ty
    y = tl.load(x + row * stride_x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(residual + row * stride_residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = y.to(dtype)
        tl.store(total + row * stride_total + at, rounded, mask=inside)
        y = rounded.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, 0) / SIZE + eps)
    out = (y.to(weight.dtype.element_ty).to(tl.float32) * scale).to(dtype)
    if EIGHT:
        store_in_e4m3(out, normed, scales, row, 0, SIZE, stride_scales, BLOCK)  # pyright: ignore
        if plain is not None:
            tl.store(plain + row * SIZE + at, out, mask=inside)
    else:
        tl.store(normed + row * SIZE + at, out, mask=inside)


def launch_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    normed: Tensor,
    total: Tensor,
    eps: float,
    scales: Tensor | None = None,
    plain: Tensor | None = None,
) -> None:
    """normed[:] = rms_norm(total), where total[:] = x + residual unless it is `normed` itself.

    scales: [rows, blocks of 128] f32, contiguous along rows: `normed` is in e4m3 with these, and in
    x's dtype it goes to `plain`, if that is not None.
    """
    size = x.shape[-1]
    rows, others = x.reshape(-1, size), residual.reshape(-1, size)
    sums = total.view(-1, size)
    assert rows.stride(1) == others.stride(1) == sums.stride(1) == 1
    assert weight.shape == (size,)
    block = power_of_two(size if scales is None else max(size, 128))
    _rms_norm_kernel[(rows.shape[0],)](
        rows, others, weight, normed, total, normed if scales is None else scales, plain,
        rows.stride(0), others.stride(0), sums.stride(0),
        0 if scales is None else scales.stride(1), eps,
        **overlap(
            x, SIZE=size, BLOCK=block, ADD=total is not normed, EIGHT=scales is not None,
            num_warps=min(max(block // 512, 1), 16),
        ),
    )  # fmt: skip


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See rms_norm_ref; a row's result depends on that row alone, bit for bit."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_rms_norm(x, x, weight, normed, normed, eps)
    return normed


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    # The sum goes to memory of its own: writing it over `residual` would save no traffic, and a
    # model's first residual is the embedding's output, which its caller keeps.
    assert total is None or total.shape == x.shape
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(normed) if total is None else total
    launch_rms_norm(x, residual, weight, normed, total, eps)
    return normed, total


@triton.jit
def _pair_norm_kernel(
    ids, tokens, hidden, token_weight, hidden_weight, out, stride_tokens, stride_hidden, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr, NORM: tl.constexpr,
    HIDDEN_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, 2): one program has the token of a row, one its hidden state; SIZE <= BLOCK."""
    row = tl.program_id(0).to(tl.int64)
    of_hidden = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    enter(PDL)
    if of_hidden == 1:
        x = tl.load(hidden + row * stride_hidden + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(hidden_weight + at, mask=inside, other=0.0).to(tl.float32)
    else:
        source = row
        if GATHER:
            source = tl.load(ids + row)
        x = tl.load(tokens + source * stride_tokens + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(token_weight + at, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
        x = x.to(token_weight.dtype.element_ty).to(tl.float32) * scale
    place = 1 - of_hidden if HIDDEN_FIRST else of_hidden
    tl.store(out + (2 * row + place) * SIZE + at, x.to(dtype), mask=inside)


def pair_norm_triton(
    ids: Tensor | None,
    tokens: Tensor,
    hidden: Tensor,
    token_weight: Tensor | None,
    hidden_weight: Tensor | None,
    eps: float,
    hidden_first: bool,
) -> Tensor:
    """See pair_norm_ref; a row's result depends on that row alone, bit for bit."""
    num_rows, size = hidden.shape
    assert tokens.shape[1] == size
    assert tokens.stride(1) == hidden.stride(1) == 1
    assert tokens.dtype == hidden.dtype
    out = torch.empty(num_rows, 2 * size, dtype=hidden.dtype, device=hidden.device)
    block = power_of_two(size)
    _pair_norm_kernel[(num_rows, 2)](
        out if ids is None else ids, tokens, hidden,
        tokens if token_weight is None else token_weight,
        hidden if hidden_weight is None else hidden_weight,
        out, tokens.stride(0), hidden.stride(0), eps,
        **overlap(
            hidden, SIZE=size, BLOCK=block, GATHER=ids is not None, NORM=token_weight is not None,
            HIDDEN_FIRST=hidden_first, num_warps=min(max(block // 512, 1), 16),
        ),
    )  # fmt: skip
    return out


# Columns of one program. From MANY_ROWS rows on the wide block is faster: for 2048 rows of the
# Qwen3-8B shape on an H200 it saves 10 of 36 us (benchmarks/results/kernels.md).
COLUMNS, WIDE_COLUMNS = 1024, 2048
MANY_ROWS = 1024


@triton.jit
def silu_and_mul(gate, up, dtype):
    """silu(gate) · up of f32; silu is rounded to `dtype` before the product, as in torch."""
    return tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(dtype).to(tl.float32) * up


@triton.jit(do_not_specialize=["stride_scales"])
def _swiglu_kernel(
    gate_up, out, scales, stride, stride_scales, width, BLOCK: tl.constexpr, EIGHT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of width). EIGHT: `out` is in e4m3 and has `scales`."""
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    inside = at < width
    dtype = gate_up.dtype.element_ty
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + at, mask=inside, other=0.0).to(tl.float32)
    y = silu_and_mul(gate, up, dtype).to(dtype)
    if EIGHT:
        store_in_e4m3(y, out, scales, row, first, width, stride_scales, BLOCK)  # pyright: ignore
    else:
        tl.store(out + row * width + at, y, mask=inside)


def launch_swiglu(rows: Tensor, out: Tensor, scales: Tensor | None = None) -> None:
    """out[:] = swiglu(rows); scales: see launch_rms_norm."""
    num_rows, width = rows.shape[0], rows.shape[1] // 2
    assert rows.stride(1) == 1
    block = WIDE_COLUMNS if num_rows >= MANY_ROWS else COLUMNS
    _swiglu_kernel[(num_rows, -(-width // block))](
        rows, out, out if scales is None else scales, rows.stride(0),
        0 if scales is None else scales.stride(1), width,
        **overlap(rows, BLOCK=block, EIGHT=scales is not None, num_warps=4),
    )  # fmt: skip


def swiglu_triton(gate_up: Tensor) -> Tensor:
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    launch_swiglu(gate_up.reshape(-1, 2 * width), out)
    return out


@triton.jit
def _sigmoid_gate_kernel(x, gate, out, stride_gate, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (rows, blocks of width)."""
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    dtype = out.dtype.element_ty
    g = tl.load(gate + row * stride_gate + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.div_rn(1.0, 1.0 + tl.exp(-g)).to(dtype).to(tl.float32)
    y = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32) * share
    tl.store(out + row * width + at, y.to(dtype), mask=inside)


def sigmoid_gate_triton(x: Tensor, gate: Tensor) -> Tensor:
    num_rows, width = x.shape
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    out = torch.empty_like(x)
    _sigmoid_gate_kernel[(num_rows, -(-width // COLUMNS))](
        x, gate, out, gate.stride(0), width, **overlap(x, BLOCK=COLUMNS, num_warps=4)
    )
    return out
