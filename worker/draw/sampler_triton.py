"""Draw one token a row without sorting the logits: temperature, filters, noise, argmax.

The definition is `sampler.draw_ref`; `changes_triton.py` changes logits before a draw. A row is cut
into blocks of the vocabulary. The passes are:

  best      blocks' largest logits
  try       a draw without top_p, for rows with a high top_p and no top_k
  tops      rows' largest logits, and the tokens that they tried
  check     whether top_p keeps the token that a row tried; if so, it is the row's
  search    four bits of the threshold of top_k, then of top_p
  ties      numbers of blocks' tokens with the threshold's logit
  draw      the largest perturbed logit that is left, by block
  winner    the same by row
"""

import torch
from torch import Tensor

from worker.draw.changes_triton import (
    best_of,
    changed_logits,
    is_likely,
    probability,
    rules_of,
    threshold_of,
    weights_of,
    winner_of,
)
from worker.draw.draw_rows_triton import NUM_LISTS, list_rows, rows_at_once, tries
from worker.forward.draws import Changes, DrawParams
from worker.ops.best_pairs import VocabPart
from worker.ops.best_pairs_triton import best_ids_triton, best_pairs_triton, key_of
from worker.ops.jit import enter, tl, triton
from worker.ops.launch import aligned, overlap
from worker.ops.philox_triton import gumbel_block
from worker.plan import Tail

DRAW_BLOCK, DRAW_WARPS = 1024, 4
SEARCH_BLOCK, SEARCH_WARPS = 4096, 4
RADIX_BITS = 4
# By itself the compiler takes up to 255, and then two programs run at a time instead of three.
BEST_REGISTERS, WALK_REGISTERS = 128, 168
NUM_DRAWING = 1056  # programs of the last pass, eight a multiprocessor: they are small
Searched = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # best, tops, keys, sums, ties
TRY_FROM = 0.5  # least top_p with which a try costs less than the searches that it mostly saves


@triton.jit
def _reaches(digit, least, EXACT: tl.constexpr):
    """1.0 where digit >= least, else 0.0; both are whole numbers.

    EXACT: one saturating addition, half the work of a comparison on a GPU.
    """
    if EXACT:
        return tl.inline_asm_elementwise(
            "add.sat.f32 $0, $1, $2;", "=f,f,f", [digit, 1.0 - least],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.where(digit >= least, 1.0, 0.0)


@triton.jit(do_not_specialize=["n"])
def _best_kernel(
    logits, rules, temperatures, best, keys, arrivals, kept, n, vocab, stride,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STOPS: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, rows). Also resets the rest: the lowest key, no arrivals, no token kept."""
    enter(PDL)
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if block == 0:
        lowest = -32768 if BITS == 16 else -2147483648
        tl.store(keys + row, lowest)
        tl.store(keys + n + row, lowest)
        tl.store(arrivals + row, 0)
        tl.store(kept + row, 0)
    if tl.load(temperatures + row) == 0.0:
        return
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = changed_logits(logits, row, tokens, vocab, stride, rules, STOPS, WIDTH, EXACT)
    tl.store(best + row * BLOCKS + block, tl.max(x, 0))


@triton.jit(do_not_specialize=["n", "least"])
def _tops_kernel(
    logits, rules, temperatures, top_k, top_p, least, best, values, ids, tops, tried, n, vocab,
    stride, BLOCKS: tl.constexpr, DRAW_BLOCKS: tl.constexpr, STOPS: tl.constexpr,
    WIDTH: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row: its largest logit and, where it tried, the token and its logit.

    So programs of later passes read three numbers, and need not reduce a row of blocks first.
    """
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature == 0.0:
        return
    tl.store(tops + row, best_of(best, row, BLOCKS))
    if tries(temperature, tl.load(top_k + row), tl.load(top_p + row), vocab, least):
        token = winner_of(values, ids, row, vocab, DRAW_BLOCKS)
        few = tl.arange(0, 16)
        near = changed_logits(logits, row, token + few, vocab, stride, rules, STOPS, WIDTH, EXACT)
        tl.store(tops + n + row, tl.max(tl.where(few == 0, near, float("-inf")), 0))
        tl.store(tried + row, token)


@triton.jit(do_not_specialize=["n"])
def _check_kernel(
    rows, logits, rules, temperatures, top_k, top_p, min_p,
    tops, tried, keys, sums, partial, arrivals, kept, n, vocab, stride,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STOPS: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, RADIX: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, rows at once): weight of tokens before the one that was tried, and of all.

    The block that arrives last compares the two.
    """
    enter(PDL)
    block, i = tl.program_id(0), tl.program_id(1)
    num = tl.load(rows)
    while i < num:
        row = tl.load(rows + 1 + i).to(tl.int64)
        token, its = tl.load(tried + row), tl.load(tops + n + row)
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        x = changed_logits(logits, row, tokens, vocab, stride, rules, STOPS, WIDTH, EXACT)
        highest, temperature = tl.load(tops + row), tl.load(temperatures + row)
        weight = weights_of(
            x, key_of(x, BITS), row, n, vocab, highest, temperature, top_k, min_p, keys, sums,
            True, EXACT,
        )  # fmt: skip
        to = partial + (row * BLOCKS + block) * RADIX
        tl.store(to, tl.sum(tl.where(x > its, weight, 0.0), 0))
        tl.store(to + 1, tl.sum(weight, 0))
        tl.store(to + 2, tl.sum(tl.where((x == its) & (tokens < token), 1.0, 0.0), 0))
        tl.debug_barrier()  # as in the search
        arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu")
        if arrived == BLOCKS - 1:
            blocks = tl.arange(0, triton.next_power_of_2(BLOCKS))
            here, at = blocks < BLOCKS, partial + (row * BLOCKS + blocks) * RADIX
            above = tl.sum(tl.load(at, mask=here, other=0.0, cache_modifier=".cg"), 0)
            total = tl.sum(tl.load(at + 1, mask=here, other=0.0, cache_modifier=".cg"), 0)
            ties = tl.sum(tl.load(at + 2, mask=here, other=0.0, cache_modifier=".cg"), 0)
            before = above + ties * probability(its, highest, temperature)
            is_kept = before < tl.maximum(tl.load(top_p + row) * total, 1e-30)
            tl.store(kept + row, is_kept.to(tl.uint8))
            tl.store(arrivals + row, 0)
        i += tl.num_programs(1)


@triton.jit
def _narrow(
    partial, row, n, limit, keys, sums, shift, first,
    PROBABLE: tl.constexpr, RADIX: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Find four more bits of the row's threshold; the sums of all blocks have been stored.

    keys: [2, n], of two searches. sums: [2, 3, n]: weight above the threshold, from it on, target.
    """
    blocks, digits = tl.arange(0, triton.next_power_of_2(BLOCKS)), tl.arange(0, RADIX)
    at = (row * BLOCKS + blocks)[:, None] * RADIX + digits[None, :]
    parts = tl.load(partial + at, mask=(blocks < BLOCKS)[:, None], other=0.0, cache_modifier=".cg")
    from_digit = tl.sum(parts, 0)  # never rises along the digits
    sums += PROBABLE * 3 * n + row
    if first:
        if PROBABLE:
            total = tl.sum(tl.where(digits == 0, from_digit, 0.0), 0)
            target = tl.maximum(limit * total, 1e-30)
        else:
            target = limit.to(tl.float32)
        tl.store(sums + 2 * n, target)
    else:
        target = tl.load(sums + 2 * n)
    reached = tl.sum((from_digit >= target).to(tl.int32), 0)
    digit = tl.maximum(reached - 1, 0)
    here = tl.sum(tl.where(digits == digit, from_digit, 0.0), 0)
    if digit < RADIX - 1:
        tl.store(sums, tl.sum(tl.where(digits == digit + 1, from_digit, 0.0), 0))
    elif first:
        tl.store(sums, 0.0)
    tl.store(sums + n, here)
    keys += PROBABLE * n + row
    tl.store(keys, tl.load(keys) + (digit << shift))


@triton.jit(do_not_specialize=["n", "shift"])
def _search_kernel(
    rows, logits, rules, temperatures, top_k, top_p, min_p,
    tops, keys, sums, partial, arrivals, n, vocab, stride, shift,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STOPS: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, RADIX: tl.constexpr, RADIX_BITS: tl.constexpr, PROBABLE: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, rows at once): the weights at or above RADIX keys.

    The block that arrives last runs _narrow. PROBABLE: search for top_p; else for top_k.
    """
    enter(PDL)
    block, i = tl.program_id(0), tl.program_id(1)
    num = tl.load(rows)
    while i < num:
        row = tl.load(rows + 1 + i).to(tl.int64)
        temperature = tl.load(temperatures + row)
        limit = tl.load((top_p if PROBABLE else top_k) + row)
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        x = changed_logits(logits, row, tokens, vocab, stride, rules, STOPS, WIDTH, EXACT)
        key = key_of(x, BITS)
        highest = tl.load(tops + row)
        weight = weights_of(
            x, key, row, n, vocab, highest, temperature, top_k, min_p, keys, sums, PROBABLE, EXACT
        )
        prefix = tl.load(keys + PROBABLE * n + row)
        digit = ((key - prefix).to(tl.uint32, bitcast=True) >> shift).to(tl.float32)
        digit = tl.where(key < prefix, -1.0, digit)
        to = partial + (row * BLOCKS + block) * RADIX
        for least in tl.static_range(RADIX):
            tl.store(to + least, tl.sum(weight * _reaches(digit, least, EXACT), 0))
        tl.debug_barrier()  # all threads' sums are written before the one atomic releases them
        arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu")
        if arrived == BLOCKS - 1:
            first = shift == BITS - RADIX_BITS
            _narrow(partial, row, n, limit, keys, sums, shift, first, PROBABLE, RADIX, BLOCKS)
            tl.store(arrivals + row, 0)
        i += tl.num_programs(1)


@triton.jit(do_not_specialize=["n"])
def _ties_kernel(
    rows, logits, rules, temperatures, top_k, top_p, min_p,
    tops, keys, sums, ties, n, vocab, stride,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STOPS: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, rows at once): how many tokens of a block are at the threshold."""
    enter(PDL)
    block, i = tl.program_id(0), tl.program_id(1)
    num = tl.load(rows)
    while i < num:
        row = tl.load(rows + 1 + i).to(tl.int64)
        temperature = tl.load(temperatures + row)
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        x = changed_logits(logits, row, tokens, vocab, stride, rules, STOPS, WIDTH, EXACT)
        highest = tl.load(tops + row)
        threshold = threshold_of(
            row, n, vocab, highest, temperature, top_k, top_p, keys, sums, BITS
        )
        likely = is_likely(x, highest, temperature, tl.load(min_p + row), EXACT)
        here = likely & (key_of(x, BITS) == threshold[0])
        tl.store(ties + row * BLOCKS + block, tl.sum(here.to(tl.int32), 0))
        i += tl.num_programs(1)


@triton.jit
def _draw_block(
    logits, rules, seed, temperatures, top_k, top_p, min_p,
    best, tops, keys, sums, ties, values, ids, row, n, first, vocab, stride,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SEARCH_BLOCKS: tl.constexpr, STOPS: tl.constexpr,
    WIDTH: tl.constexpr, BITS: tl.constexpr, FILTERED: tl.constexpr, TRY: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Draw in the program's block of one row, whose tokens are first … vocab - 1.

    TRY: without top_p, and before `tops` has been filled.
    """
    block = tl.program_id(0)
    start = first + block * BLOCK
    tokens = start + tl.arange(0, BLOCK)
    x = changed_logits(logits - first, row, tokens, vocab, stride, rules, STOPS, WIDTH, EXACT)
    temperature = tl.load(temperatures + row)
    if temperature != 0.0:
        if FILTERED:
            highest = best_of(best, row, SEARCH_BLOCKS) if TRY else tl.load(tops + row)
            likely = is_likely(x, highest, temperature, tl.load(min_p + row), EXACT)
            x = tl.where(likely, x, float("-inf"))
        if FILTERED and not TRY:
            key = key_of(x, BITS)
            threshold = threshold_of(
                row, n, vocab, highest, temperature, top_k, top_p, keys, sums, BITS
            )
            cut, room = threshold[0], threshold[1]
            x = tl.where(key >= cut, x, float("-inf"))
            blocks = tl.arange(0, triton.next_power_of_2(BLOCKS))
            at = ties + row * BLOCKS + blocks
            before = tl.sum(tl.load(at, mask=blocks < block, other=0), 0)
            own = tl.load(ties + row * BLOCKS + block)
            if before + own > room:
                tie = ((key == cut) & (x > float("-inf"))).to(tl.int32)
                rank = before + tl.cumsum(tie, 0) - tie
                x = tl.where((tie > 0) & (rank >= room), float("-inf"), x)
        # Noise is the costly part, and after filters few blocks have tokens left.
        if tl.max(x, 0) > float("-inf"):
            x = tl.div_rn(x, temperature)
            position = tl.load(rules.position + row)
            x += gumbel_block(tl.load(seed + row), position, start, BLOCK, EXACT)
    most = tl.max(x, 0)
    tl.store(values + row * BLOCKS + block, most)
    tl.store(ids + row * BLOCKS + block, tl.min(tl.where(x == most, tokens, vocab - 1), 0))


@triton.jit(do_not_specialize=["n", "least"])
def _draw_kernel(
    rows, logits, rules, seed, temperatures, top_k, top_p, min_p, least,
    best, tops, keys, sums, ties, values, ids, n, first, vocab, stride,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SEARCH_BLOCKS: tl.constexpr, STOPS: tl.constexpr,
    WIDTH: tl.constexpr, BITS: tl.constexpr, FILTERED: tl.constexpr, TRY: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, rows): a block's largest perturbed logit, the lowest id with it.

    FILTERED: some row may have filters. TRY: draw without top_p, for rows that try. FILTERED and
    not TRY: draw for the list `rows`, grid (blocks, rows at once).

    The tokens are first … vocab - 1. If not FILTERED, they may be the part of one rank.
    """
    enter(PDL)
    if FILTERED and not TRY:
        i, num = tl.program_id(1), tl.load(rows)
        while i < num:
            row = tl.load(rows + 1 + i).to(tl.int64)
            _draw_block(
                logits, rules, seed, temperatures, top_k, top_p, min_p,
                best, tops, keys, sums, ties, values, ids, row, n, first, vocab, stride,
                BLOCK, BLOCKS, SEARCH_BLOCKS, STOPS, WIDTH, BITS, FILTERED, TRY, EXACT,
            )  # fmt: skip
            i += tl.num_programs(1)
    else:
        row = tl.program_id(1).to(tl.int64)
        wanted = True
        if TRY:
            k, p = tl.load(top_k + row), tl.load(top_p + row)
            wanted = tries(tl.load(temperatures + row), k, p, vocab, least)
        if wanted:
            _draw_block(
                logits, rules, seed, temperatures, top_k, top_p, min_p,
                best, tops, keys, sums, ties, values, ids, row, n, first, vocab, stride,
                BLOCK, BLOCKS, SEARCH_BLOCKS, STOPS, WIDTH, BITS, FILTERED, TRY, EXACT,
            )  # fmt: skip


@triton.jit
def _winner_kernel(values, ids, out, vocab, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """One program a row."""
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = winner_of(values, ids, row, vocab, BLOCKS)
    tl.store(out + row, token.to(tl.int64))


class _Draw:
    """Scratch of one call, and the launches of its passes.

    Check. A token that is the largest of all is the largest of those that top_p keeps, if top_p
    keeps it. With a top_p of p it does with probability p or more. Then later passes skip the row.

    Search. A threshold is the smallest logit such that all tokens above it weigh less than the
    target. For top_k a token weighs 1 and the target is top_k. For top_p a token weighs its
    probability and the target is top_p of their sum. The search works on the logits' bits, read as
    integers of the same order: 16 bits in bf16 (4 passes), otherwise 32 (8 passes). Penalties leave
    numbers that no bf16 holds; rows without penalties still need the first 4 passes only.
    """

    def __init__(
        self, logits: Tensor, params: DrawParams, changes: Changes | None, part: VocabPart | None
    ) -> None:
        n, vocab = logits.shape
        self.part, self.first = part, 0 if part is None else part.first
        self.logits, self.params, self.rules = logits, params, rules_of(logits, params, changes)
        self.sizes = n, vocab, logits.stride(0)
        self.limits = params.temperature, params.top_k, params.top_p, params.min_p
        bf16 = logits.dtype == torch.bfloat16
        self.bits = 16 if bf16 and changes is None else 32
        # Only rows with a slot have keys of more than 16 bits; None: all rows may, or none does.
        self.long_slots = self.rules.slot if bf16 else None
        self.shared = dict(
            STOPS=params.stop_ids.shape[1], WIDTH=1 if changes is None else changes.width,
            BITS=self.bits, EXACT=logits.is_cuda,
        )  # fmt: skip
        self.blocks, self.search_blocks = max(1, -(-vocab // DRAW_BLOCK)), -(-vocab // SEARCH_BLOCK)
        self.values = self._scratch(n, self.blocks, dtype=torch.float32)
        self.ids = self._scratch(n, self.blocks, dtype=torch.int32)

    def _scratch(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.logits.device)

    def run(self, *, filtered: bool) -> Tensor:
        n, vocab, _ = self.sizes
        if filtered:
            self._filter()
        else:  # no tensor of the filters is read
            unread = self.values
            searched = unread, unread, unread, unread, unread
            self._draw(unread, searched, n, FILTERED=False, TRY=False)
        if self.part is not None:
            pairs = best_pairs_triton(self.values, self.ids, self.part.vocab_size - 1)
            return best_ids_triton(self.part.gather(pairs))
        out = self._scratch(n, dtype=torch.int64)
        _winner_kernel[(n,)](
            self.values, self.ids, out, vocab,
            **overlap(self.logits, BLOCKS=self.blocks, num_warps=1),
        )  # fmt: skip
        return out

    def _draw(self, rows: Tensor, searched: Searched, num: int, **constants: int) -> None:
        n, vocab, stride = self.sizes
        _draw_kernel[(self.blocks, num)](
            rows, self.logits, self.rules, self.params.seed, *self.limits, TRY_FROM, *searched,
            self.values, self.ids, n, self.first, self.first + vocab, stride,
            **overlap(
                self.logits, BLOCK=DRAW_BLOCK, BLOCKS=self.blocks,
                SEARCH_BLOCKS=self.search_blocks, num_warps=DRAW_WARPS, **constants, **self.shared,
            ),
        )  # fmt: skip

    def _filter(self) -> None:
        n, vocab, stride = self.sizes
        logits, rules, limits, blocks = self.logits, self.rules, self.limits, self.search_blocks
        best = self._scratch(n, blocks, dtype=torch.float32)
        partial = self._scratch(n, blocks, 1 << RADIX_BITS, dtype=torch.float32)
        sums = self._scratch(2, 3, n, dtype=torch.float32)
        keys = self._scratch(2, n, dtype=torch.int32)
        arrivals = self._scratch(n, dtype=torch.int32)
        kept = self._scratch(n, dtype=torch.uint8)
        ties = self._scratch(n, self.blocks, dtype=torch.int32)
        tops, tried = self._scratch(2, n, dtype=torch.float32), self._scratch(n, dtype=torch.int32)
        lists = self._scratch(NUM_LISTS, aligned(n + 1), dtype=torch.int32)
        try_rows, undrawn, rows_left, *search_rows = lists
        searched = best, tops, keys, sums, ties
        grid = blocks, rows_at_once(n, blocks)
        common = dict(BLOCK=SEARCH_BLOCK, BLOCKS=blocks, num_warps=SEARCH_WARPS, **self.shared)
        walks = common | {"RADIX": 1 << RADIX_BITS, "maxnreg": WALK_REGISTERS}
        _best_kernel[(blocks, n)](
            logits, rules, limits[0], best, keys, arrivals, kept, n, vocab, stride,
            **overlap(logits, maxnreg=BEST_REGISTERS, **common),
        )  # fmt: skip
        self._draw(try_rows, searched, n, FILTERED=True, TRY=True)
        _tops_kernel[(n,)](
            logits, rules, *limits[:3], TRY_FROM, best, self.values, self.ids, tops, tried,
            n, vocab, stride,
            **overlap(
                logits, BLOCKS=blocks, DRAW_BLOCKS=self.blocks, num_warps=1,
                **{name: self.shared[name] for name in ("STOPS", "WIDTH", "EXACT")},
            ),
        )  # fmt: skip
        list_rows(limits[:3], kept, self.long_slots, lists, vocab, TRY_FROM, checked=False)
        _check_kernel[grid](
            try_rows, logits, rules, *limits,
            tops, tried, keys, sums, partial, arrivals, kept, n, vocab, stride,
            **overlap(logits, **walks),
        )  # fmt: skip
        list_rows(limits[:3], kept, self.long_slots, lists, vocab, TRY_FROM, checked=True)
        for probable in (False, True):
            for shift in range(self.bits - RADIX_BITS, -1, -RADIX_BITS):
                is_long = self.long_slots is not None and shift < 16
                rows = search_rows[2 * is_long + probable]
                _search_kernel[grid](
                    rows, logits, rules, *limits,
                    tops, keys, sums, partial, arrivals, n, vocab, stride, shift,
                    **overlap(logits, RADIX_BITS=RADIX_BITS, PROBABLE=probable, **walks),
                )  # fmt: skip
        _ties_kernel[(self.blocks, rows_at_once(n, self.blocks))](
            rows_left, logits, rules, *limits, tops, keys, sums, ties, n, vocab, stride,
            **overlap(
                logits, BLOCK=DRAW_BLOCK, BLOCKS=self.blocks, num_warps=DRAW_WARPS, **self.shared
            ),
        )  # fmt: skip
        at_once = rows_at_once(n, self.blocks, NUM_DRAWING)
        self._draw(undrawn, searched, at_once, FILTERED=True, TRY=False)


def draw_triton(
    logits: Tensor,
    rows: DrawParams,
    tail: Tail,
    changes: Changes | None = None,
    part: VocabPart | None = None,
) -> Tensor:
    """Draw with no host sync, fit for a CUDA graph; see draw_ref. Rows and tensors are contiguous.

    The tokens kept may differ from draw_ref's in two cases. The probability before a token is
    within f32's rounding of top_p: sums are pairwise here and sequential there. Or, in f32, two
    logits differ but become equal when divided by the temperature: here the larger one comes first,
    there the lower id. top_k and min_p are exact.
    """
    filtered = tail == "filtered"
    assert logits.stride(1) == 1
    assert part is None or not (filtered or changes), "these need the logits of all tokens"
    return _Draw(logits, rows, changes, part).run(filtered=filtered)
