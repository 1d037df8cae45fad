"""Kernels of draft_draws.py."""

import torch
from torch import Tensor

from worker.drafts.draft_draws import DraftDraws
from worker.ops.best_pairs_triton import best_pairs_triton, id_of
from worker.ops.jit import enter, tl, triton
from worker.ops.launch import overlap
from worker.ops.philox_triton import gumbel_at, gumbel_block

BLOCK, WARPS = 1024, 4


@triton.jit(do_not_specialize=["first"])
def _best_draft_kernel(
    logits, rows, position, seed, temperature, ids, values, tokens, first, num_ids, stride,
    NUM: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MAPPED: tl.constexpr,
    GREEDY: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, n * NUM): the largest perturbed logit of each block, the lowest id with it.

    Without MAPPED the columns are ids from `first` on.
    """
    enter(PDL)
    block, i = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + i * stride + at, mask=at < num_ids, other=float("-inf")).to(tl.float32)
    token = first + at.to(tl.int64)
    if MAPPED:
        token = tl.load(ids + at, mask=at < num_ids, other=0)
    if not GREEDY:
        row = tl.load(rows + i // NUM)
        scale = tl.load(temperature + row)
        if scale != 0.0:
            here, key = tl.load(position + i) + 1, tl.load(seed + row)
            x = tl.div_rn(x, scale)
            if MAPPED:
                x += gumbel_at(key, here, token, EXACT)
            else:
                x += gumbel_block(key, here, first + block * BLOCK, BLOCK, EXACT)
    most = tl.max(x, 0)
    best = (x == most) & (at < num_ids)  # -inf beyond, which is most if all else is NaN
    tl.store(values + i * BLOCKS + block, most)
    tl.store(tokens + i * BLOCKS + block, tl.min(tl.where(best, token, 1 << 30), 0))


@triton.jit
def _keep_draft_kernel(
    values, tokens, pairs, rows, slots, drafts, out, stride,
    NUM: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n * NUM): the best of the blocks, or of the ranks' pairs [BLOCKS, n * NUM]."""
    enter(PDL)
    i = tl.program_id(0)
    at = tl.arange(0, triton.next_power_of_2(BLOCKS))
    if pairs is not None:
        here = pairs + at * tl.num_programs(0) + i
        found = id_of(tl.max(tl.load(here, mask=at < BLOCKS, other=-(1 << 63)), 0))
    else:
        value = tl.load(values + i * BLOCKS + at, mask=at < BLOCKS, other=float("-inf"))
        token = tl.load(tokens + i * BLOCKS + at, mask=at < BLOCKS, other=1 << 30)
        found = tl.min(tl.where(value == tl.max(value, 0), token, 1 << 30), 0)
    found = tl.where(found < (1 << 30), found, 0)  # 1 << 30: all are NaN
    proposes = tl.load(slots + i) > 0
    tl.store(out + i, tl.where(proposes, found, 0))
    to = drafts + tl.load(rows + i // NUM) * stride + i % NUM
    tl.store(to, tl.where(proposes, found, -1))


def draw_drafts_triton(logits: Tensor, draws: DraftDraws, drafts: Tensor) -> Tensor:
    """Two launches, with `part` three beside the gather."""
    rows, position, slots, seed, temperature, _, part = draws
    assert all(each.is_contiguous() for each in (rows, position, slots))
    n, num_ids = logits.shape
    num, blocks = drafts.shape[1], max(1, -(-num_ids // BLOCK))
    ids = draws.ids_of(logits)
    assert n == len(rows) * num
    assert logits.stride(1) == 1
    values = torch.empty(n, blocks, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(n, blocks, dtype=torch.int64, device=logits.device)
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    _best_draft_kernel[(blocks, n)](
        logits, rows, position, rows if seed is None else seed, temperature,
        rows if ids is None else ids, values, tokens,
        0 if part is None else part.first, num_ids, logits.stride(0),
        **overlap(
            logits, NUM=num, BLOCK=BLOCK, BLOCKS=blocks, MAPPED=ids is not None,
            GREEDY=seed is None, EXACT=logits.is_cuda, num_warps=WARPS,
        ),
    )  # fmt: skip
    pairs = None
    if part is not None:
        pairs = part.gather(best_pairs_triton(values, tokens, 1 << 30))
        blocks = len(pairs)
    _keep_draft_kernel[(n,)](
        values, tokens, pairs, rows, slots, drafts, out, drafts.stride(0),
        **overlap(logits, NUM=num, BLOCKS=blocks, num_warps=1),
    )  # fmt: skip
    return out
