"""What a chain drafter's layer begins with, in one pass: embedding, two norms, one row of both."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.jit import gdc_launch_dependents, gdc_wait, tl, triton
from worker.ops.launch import overlap, power_of_two
from worker.ops.rms_norm import rms_norm_ref


def pair_norm_ref(
    ids: Tensor | None,
    tokens: Tensor,
    hidden: Tensor,
    token_weight: Tensor | None,
    hidden_weight: Tensor | None,
    eps: float,
    hidden_first: bool,
) -> Tensor:
    """Each row's embedded token and hidden state, both normed, one behind the other.

    Args:
        ids: [n] i64, rows of `tokens`; None: row i of `tokens` is row i's token.
        tokens: [vocab_size, size], an embedding; or [n, size].
        hidden: [n, size] of one dtype with `tokens`; each row contiguous.
        token_weight: [size], of the token's norm; None: neither is normed.
        hidden_weight: [size]; None if and only if token_weight is.
        eps: of both norms; see rms_norm_ref.
        hidden_first: does the hidden state stand before the token?

    Returns:
        [n, 2 · size], contiguous.
    """
    token = tokens if ids is None else F.embedding(ids, tokens)
    if token_weight is not None and hidden_weight is not None:
        token = rms_norm_ref(token, token_weight, eps)
        hidden = rms_norm_ref(hidden, hidden_weight, eps)
    return torch.cat((hidden, token) if hidden_first else (token, hidden), dim=-1)


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
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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


def pair_norm(
    ids: Tensor | None,
    tokens: Tensor,
    hidden: Tensor,
    token_weight: Tensor | None,
    hidden_weight: Tensor | None,
    eps: float,
    hidden_first: bool,
) -> Tensor:
    """pair_norm_ref, on CUDA by one kernel."""
    op = pair_norm_triton if hidden.is_cuda else pair_norm_ref
    return op(ids, tokens, hidden, token_weight, hidden_weight, eps, hidden_first)
