"""Kernels of logprobs.py."""

import torch
from torch import Tensor

from worker.ops.best_pairs_triton import key_of, value_of
from worker.ops.jit import enter, tl, triton
from worker.ops.launch import overlap
from worker.ops.philox_triton import natural_log

VOCAB_BLOCK, WARPS = 1024, 4


@triton.jit
def _ranked(logits, row, block, vocab, stride, BLOCK: tl.constexpr):
    """(logits of a block in f32, integers in the order of their ranks: by logit, then lowest id)"""
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < vocab
    x = tl.load(logits + row * stride + tokens, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(x == 0.0, 0.0, x)
    ranked = (key_of(x, 32).to(tl.int64) << 32) + (0x7FFFFFFF - tokens).to(tl.int64)
    return x, tl.where(inside, ranked, -9223372036854775808)


@triton.jit
def _blocks_kernel(
    logits, first, sums, vocab, stride,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, rows): a block's first in rank, and its sum relative to that one."""
    enter(PDL)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block_of = _ranked(logits, row, block, vocab, stride, BLOCK)
    x, ranked = block_of[0], block_of[1]
    highest = tl.max(x, 0)
    weight = tl.where(x > float("-inf"), tl.exp(x - highest), 0.0)
    tl.store(first + row * BLOCKS + block, tl.max(ranked, 0))
    tl.store(sums + row * BLOCKS + block, tl.sum(weight, 0))


@triton.jit
def _value_of(ranked):
    """The logit within a rank."""
    return value_of((ranked >> 32).to(tl.int32), 32)


@triton.jit(do_not_specialize=["num_top"])
def _walk_kernel(
    logits, token, first, sums, values, ids, vocab, stride, num_top,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, triton.next_power_of_2(BLOCKS))
    here = blocks < BLOCKS
    firsts = tl.load(first + row * BLOCKS + blocks, mask=here, other=-9223372036854775808)
    highest = _value_of(tl.max(firsts, 0))
    most = tl.where(here, _value_of(firsts), float("-inf"))
    share = tl.where(most > float("-inf"), tl.exp(most - highest), 0.0)
    total = tl.sum(share * tl.load(sums + row * BLOCKS + blocks, mask=here, other=0.0), 0)
    log_sum = highest + natural_log(total, EXACT)
    drawn = tl.load(token + row)
    at = row * (num_top + 1)
    tl.store(ids + at, drawn)
    tl.store(values + at, tl.load(logits + row * stride + drawn).to(tl.float32) - log_sum)
    i = 0
    while i < num_top:
        best = tl.max(firsts, 0)
        likeliest = 0x7FFFFFFF - (best & 0xFFFFFFFF)
        tl.store(ids + at + 1 + i, likeliest)
        tl.store(values + at + 1 + i, _value_of(best) - log_sum)
        block = (likeliest // BLOCK).to(tl.int32)
        ranked = _ranked(logits, row, block, vocab, stride, BLOCK)[1]
        following = tl.max(tl.where(ranked < best, ranked, -9223372036854775808), 0)
        firsts = tl.where(blocks == block, following, firsts)
        i += 1


def logprobs_triton(logits: Tensor, token: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Two launches, no host sync."""
    n, vocab = logits.shape
    assert logits.stride(1) == 1
    assert num_top <= vocab
    blocks, device = -(-vocab // VOCAB_BLOCK), logits.device
    first = torch.empty(n, blocks, dtype=torch.int64, device=device)
    sums = torch.empty(n, blocks, dtype=torch.float32, device=device)
    values = torch.empty(n, 1 + num_top, dtype=torch.float32, device=device)
    ids = torch.empty(n, 1 + num_top, dtype=torch.int64, device=device)
    _blocks_kernel[(blocks, n)](
        logits, first, sums, vocab, logits.stride(0),
        **overlap(logits, BLOCK=VOCAB_BLOCK, BLOCKS=blocks, num_warps=WARPS),
    )  # fmt: skip
    _walk_kernel[(n,)](
        logits, token, first, sums, values, ids, vocab, logits.stride(0), num_top,
        **overlap(
            logits, BLOCK=VOCAB_BLOCK, BLOCKS=blocks, EXACT=logits.is_cuda, num_warps=WARPS
        ),
    )  # fmt: skip
    return values, ids
