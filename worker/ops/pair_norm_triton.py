"""Kernels of pair_norm.py."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.ops.jit import enter, tl, triton
from worker.ops.launch import overlap, power_of_two


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
        x = x.to(dtype).to(tl.float32) * scale
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
