"""y = x @ w.T for the tens of rows of a full batch or a short prompt: every SM reads as much of w.

With 64 rows and more the tensor cores work nearly as long as the memory does, and x, which every
tile reads again from the L2, weighs as much as the weights. So tiles are wide (up to 256 rows of w;
192 is 128 and 64 with one copy of x), loads go through the copy engine (TMA), and the work, tiles
times steps of K, is cut into equal shares whatever the number of tiles (stream-K): share i of P is
[i·U/P, (i+1)·U/P) of the U steps. Shares that end where a tile does make that split-K.

Whoever computed a part of a tile adds a part of its sum: all f32 partial sums are written, and each
program waits for the others for a bounded time, then adds up its own rows of the tile in the order
of K. One that has waited in vain leaves its rows to the last one to come, so no program depends on
another's being scheduled. Which program adds up changes nothing in the sum: a row's result depends
on that row, the weights' shape and the tile alone, bit for bit.
"""

# A @triton.jit function seems never to return where another one calls it.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from worker.kernels.jit import (
    INTERPRETED,
    TensorDescriptor,
    gdc_launch_dependents,
    gdc_wait,
    tl,
    triton,
)
from worker.kernels.skinny_gemm import SkinnyWorkspace, check_operands, skinny_gemm_ref

MAX_PARTS = 15  # of one tile: bits in its word
PATIENCE = 16
ALIGNMENT = 16  # bytes: of a TMA tensor's base and of its rows


@triton.jit
def _dot(x_tile, w_tile, acc, X_LEFT: tl.constexpr):
    left = x_tile if X_LEFT else w_tile
    right = w_tile if X_LEFT else x_tile
    return tl.dot(left, tl.trans(right), acc)


@triton.jit
def _step(
    x, w, w_rest, col, k, acc, rest, BLOCK_N: tl.constexpr, REST: tl.constexpr,
    X_LEFT: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of K. UPCAST: the interpreter multiplies no bf16."""
    x_tile = x.load([0, k])
    w_tile = w.load([col, k])
    if UPCAST:
        x_tile, w_tile = x_tile.to(tl.float32), w_tile.to(tl.float32)
    acc = _dot(x_tile, w_tile, acc, X_LEFT)
    if REST > 0:
        rest_tile = w_rest.load([col + BLOCK_N, k])
        if UPCAST:
            rest_tile = rest_tile.to(tl.float32)
        rest = _dot(x_tile, rest_tile, rest, X_LEFT)
    return acc, rest


@triton.jit
def _accumulate(
    x, w, w_rest, col, k_begin, steps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST: tl.constexpr, BLOCK_K: tl.constexpr,
    X_LEFT: tl.constexpr, UPCAST: tl.constexpr, SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """x[:, K range] @ w[col : col + BLOCK_N + REST, K range].T as two f32 tiles.

    [BLOCK_M, columns] if X_LEFT, else [columns, BLOCK_M]. Outside of x and w all is 0.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N) if X_LEFT else (BLOCK_N, BLOCK_M), tl.float32)
    rest = acc
    if REST > 0:
        rest = tl.zeros((BLOCK_M, REST) if X_LEFT else (REST, BLOCK_M), tl.float32)
    if UPCAST:  # the interpreter's ranges want constants
        step = 0
        while step < steps:
            k = k_begin + step * BLOCK_K
            acc, rest = _step(x, w, w_rest, col, k, acc, rest, BLOCK_N, REST, X_LEFT, UPCAST)
            step += 1
    else:
        for step in tl.range(0, steps, warp_specialize=SPECIALIZE):
            k = k_begin + step * BLOCK_K
            acc, rest = _step(x, w, w_rest, col, k, acc, rest, BLOCK_N, REST, X_LEFT, UPCAST)
    return acc, rest


@triton.jit
def _spots(row, col, BLOCK_M: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
           X_LEFT: tl.constexpr):  # fmt: skip
    """For `ROWS` rows of a tile, from `row`: tokens, columns and places in a partial sum."""
    if X_LEFT:
        tokens = row + tl.arange(0, ROWS)[:, None]
        cols = tl.arange(0, COLS)[None, :]
        spots = tokens * COLS + cols
    else:
        tokens = tl.arange(0, BLOCK_M)[None, :]
        cols = row + tl.arange(0, ROWS)[:, None]
        spots = cols * BLOCK_M + tokens
    return tokens, col + cols, spots


@triton.jit
def _store(acc, out, col, M, N, stride_out, BLOCK_M: tl.constexpr, COLS: tl.constexpr,
           X_LEFT: tl.constexpr):  # fmt: skip
    """A whole sum into out[:, col : col + COLS]."""
    tokens, cols, _ = _spots(0, col, BLOCK_M, COLS, BLOCK_M if X_LEFT else COLS, X_LEFT)
    at = out + tokens.to(tl.int64) * stride_out + cols
    tl.store(at, acc.to(out.dtype.element_ty), mask=(tokens < M) & (cols < N))


@triton.jit
def _store_partial(acc, at, M, BLOCK_M: tl.constexpr, COLS: tl.constexpr, X_LEFT: tl.constexpr):
    tokens, _, spots = _spots(0, 0, BLOCK_M, COLS, BLOCK_M if X_LEFT else COLS, X_LEFT)
    if X_LEFT:
        tl.store(at + spots, acc, mask=tokens < M)
    else:  # a mask along the rows would take the wide stores apart
        tl.store(at + spots, acc)


@triton.jit
def _add_up(
    partial, first, parts, chunk, out, col, M, N, stride_out, OFFSET: tl.constexpr,
    BLOCK_M: tl.constexpr, COLS: tl.constexpr, SIZE: tl.constexpr, CHUNKS: tl.constexpr,
    PARTS: tl.constexpr, SPLIT: tl.constexpr, X_LEFT: tl.constexpr,
):  # fmt: skip
    """Rows [chunk] of CHUNKS of one tile: all partial sums in the order of K, into out."""
    ROWS: tl.constexpr = (BLOCK_M if X_LEFT else COLS) // CHUNKS
    tokens, cols, spots = _spots(chunk * ROWS, col, BLOCK_M, COLS, ROWS, X_LEFT)
    here = (tokens < M) & (cols < N)
    loaded = here if X_LEFT else cols < N
    total = tl.load(
        partial + _slot(first, 0, SPLIT) * SIZE + OFFSET + spots,
        mask=loaded, other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    for i in tl.static_range(1, PARTS):
        total += tl.load(
            partial + _slot(first, i, SPLIT) * SIZE + OFFSET + spots,
            mask=loaded & (i < parts), other=0.0, cache_modifier=".cg",
        )  # fmt: skip
    at = out + tokens.to(tl.int64) * stride_out + cols
    tl.store(at, total.to(out.dtype.element_ty), mask=here)


@triton.jit
def _slot(first, part, SPLIT: tl.constexpr):
    """Where part `part` of a tile lies, whose first part is program `first`'s.

    A share has at most two ends inside of a tile: the end of one, the beginning of another.
    """
    slot = first + part
    if SPLIT == 0:
        slot = slot * 2 + (part == 0)
    return slot.to(tl.int64)


@triton.jit
def _whose(word, part, parts, patience):
    """The parts of whose rows this program adds up the sum, as bits; all partial sums are there.

    word: bits 0-7 count programs that have written, 8-15 those that are done; bits 16+ are those
    that have given up waiting. The last one to write has theirs to do.
    """
    tl.debug_barrier()  # all threads' sums are written before the one atomic releases them
    seen = tl.atomic_add(word, 1, sem="acq_rel", scope="gpu")
    whose = 1 << part
    if (seen & 255) == parts - 1:
        whose = whose | (seen >> 16)
    else:
        polls = 0
        while ((seen & 255) != parts) & (polls < patience):
            seen = tl.atomic_add(word, 0, sem="acq_rel", scope="gpu")
            polls += 1
        if (seen & 255) != parts:
            seen = tl.atomic_or(word, 1 << (16 + part), sem="acq_rel", scope="gpu")
            if (seen & 255) != parts:
                whose = 0
    return whose


@triton.jit
def _finish(
    acc, rest, out, partial, words, tile, first, part, parts, M, N, stride_out, patience,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST: tl.constexpr, PARTS: tl.constexpr,
    SPLIT: tl.constexpr, CHUNKS: tl.constexpr, X_LEFT: tl.constexpr,
):  # fmt: skip
    """Part `part` of `parts` of a tile is computed: what is left to do for the tile."""
    SIZE: tl.constexpr = BLOCK_M * (BLOCK_N + REST)
    OFFSET: tl.constexpr = BLOCK_M * BLOCK_N
    col = tile * (BLOCK_N + REST)
    if parts == 1:
        _store(acc, out, col, M, N, stride_out, BLOCK_M, BLOCK_N, X_LEFT)
        if REST > 0:
            _store(rest, out, col + BLOCK_N, M, N, stride_out, BLOCK_M, REST, X_LEFT)
    else:
        at = partial + _slot(first, part, SPLIT) * SIZE
        _store_partial(acc, at, M, BLOCK_M, BLOCK_N, X_LEFT)
        if REST > 0:
            _store_partial(rest, at + OFFSET, M, BLOCK_M, REST, X_LEFT)
        whose = _whose(words + tile, part, parts, patience)
        if whose != 0:
            for chunk in tl.range(0, CHUNKS, num_stages=1):
                if ((whose >> (chunk % parts)) & 1) != 0:
                    _add_up(partial, first, parts, chunk, out, col, M, N, stride_out, 0,
                            BLOCK_M, BLOCK_N, SIZE, CHUNKS, PARTS, SPLIT, X_LEFT)  # fmt: skip
                    if REST > 0:
                        _add_up(partial, first, parts, chunk, out, col + BLOCK_N, M, N, stride_out,
                                OFFSET, BLOCK_M, REST, SIZE, CHUNKS, PARTS, SPLIT,
                                X_LEFT)  # fmt: skip
        seen = tl.atomic_add(words + tile, 256, sem="relaxed", scope="gpu")
        if ((seen >> 8) & 255) == parts - 1:
            tl.store(words + tile, 0)


@triton.jit(do_not_specialize=["M", "patience"])
def _stream_k_kernel(
    x, w, w_rest, out, partial, words, M, N, stride_out, units, patience,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, REST: tl.constexpr, BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr, SPLIT: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr,
    X_LEFT: tl.constexpr, SPECIALIZE: tl.constexpr, PDL: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (number of shares).

    x: descriptor of [M, K] in blocks [BLOCK_M, BLOCK_K]; w, w_rest: of [N, K] in blocks of BLOCK_N
    and REST rows. out: [M, N], rows contiguous. partial: f32 [slots, BLOCK_M · (BLOCK_N + REST)].
    words: i32 [tiles], all 0 before and after. STEPS: blocks of K of a tile; units: of all tiles.
    SPLIT: the programs of a tile where every share lies in one tile, else 0. PARTS: the most
    programs that a tile has.
    """
    if PDL:
        gdc_launch_dependents()
        # Invariant: every program waits, so this kernel's end implies that of all before it.
        gdc_wait()
    share = tl.program_id(0)
    if SPLIT > 0:
        tile, part = share // SPLIT, share % SPLIT
        SHARE: tl.constexpr = STEPS // SPLIT
        acc, rest = _accumulate(
            x, w, w_rest, tile * (BLOCK_N + REST), part * (SHARE * BLOCK_K), SHARE,
            BLOCK_M, BLOCK_N, REST, BLOCK_K, X_LEFT, UPCAST, SPECIALIZE,
        )  # fmt: skip
        _finish(acc, rest, out, partial, words, tile, tile * SPLIT, part, SPLIT, M, N, stride_out,
                patience, BLOCK_M, BLOCK_N, REST, PARTS, SPLIT, CHUNKS, X_LEFT)  # fmt: skip
    else:
        shares = tl.num_programs(0)
        begin, end = share * units // shares, (share + 1) * units // shares
        tile = begin // STEPS
        while tile * STEPS < end:
            from_step = tl.maximum(begin - tile * STEPS, 0)
            to_step = tl.minimum(end - tile * STEPS, STEPS)
            acc, rest = _accumulate(
                x, w, w_rest, tile * (BLOCK_N + REST), from_step * BLOCK_K, to_step - from_step,
                BLOCK_M, BLOCK_N, REST, BLOCK_K, X_LEFT, UPCAST, SPECIALIZE,
            )  # fmt: skip
            # Share i holds step u of all where i · U/P <= u, rounded down, and no later one does.
            first = ((tile * STEPS + 1) * shares - 1) // units
            last = ((tile + 1) * STEPS * shares - 1) // units
            _finish(acc, rest, out, partial, words, tile, first, share - first, last - first + 1,
                    M, N, stride_out, patience, BLOCK_M, BLOCK_N, REST, PARTS, SPLIT, CHUNKS,
                    X_LEFT)  # fmt: skip
            tile += 1


@dataclass(frozen=True, slots=True)
class StreamTile:
    """How one product is cut up.

    block_n + rest: columns of a tile; rest is 0 or a smaller power of two. shares: programs, see
    `cut`. x_left: x is the left operand of the tensor cores, not w. specialize: warps of their own
    for the loads. patience: looks at the others' progress, 0.7 µs each on an H200, before a program
    leaves its rows to the last one.
    """

    block_m: int
    block_n: int
    rest: int
    block_k: int
    shares: int
    num_warps: int
    num_stages: int
    x_left: bool = True
    specialize: bool = False
    patience: int = PATIENCE

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.block_n + self.rest

    def cut(self, n: int, k: int) -> Cut:
        """The shares of w: [n, k]."""
        tiles, steps = -(-n // self.width), -(-k // self.block_k)
        units = tiles * steps
        shares = min(self.shares, units)
        split = shares // tiles if shares % tiles == 0 and steps % (shares // tiles) == 0 else 0
        parts = split or -(-steps // (units // shares)) + 1
        return Cut(tiles, steps, shares, split, parts)

    def num_tiles(self, n: int) -> int:
        """Words of workspace that a product with n outputs needs."""
        return -(-n // self.width)

    def num_partials(self, n: int) -> int:
        """Floats of workspace that a product with n outputs needs, whatever its k."""
        if self.num_tiles(n) % self.shares == 0:  # shares of whole tiles
            return 0
        return 2 * self.shares * self.block_m * self.width


@dataclass(frozen=True, slots=True)
class Cut:
    """Work of one product: `tiles` of `steps` blocks of K, in equal `shares`; see the kernel."""

    tiles: int
    steps: int
    shares: int
    split: int
    parts: int

    @property
    def chunks(self) -> int:
        """Groups of rows of which each program of a tile adds up some; a power of two."""
        return 1 if self.parts == 1 else min(16, 1 << (self.parts - 1).bit_length())


# By row class: (block_n, rest, block_k, warps, stages, x_left), in the order of preference. None
# spills registers, and each takes 160 to 208 KiB of shared memory.
_SHAPES = {
    64: ((128, 64, 64, 4, 6, True), (128, 0, 64, 4, 8, True)),
    128: ((128, 64, 64, 8, 5, True), (128, 0, 64, 8, 6, True)),
    256: ((128, 64, 64, 8, 3, False), (128, 0, 64, 8, 4, False)),
}
FULL = 0.85  # of the SMs at work in whole tiles or equal splits; below, stream-K is worth its price


@cache
def choose(rows: int, n: int, k: int, num_sms: int) -> StreamTile:
    """The tile for up to `rows` (64, 128 or 256) rows and w: [n, k].

    Not measured: the widest tile whose programs fill the SMs once or some whole times over.
    """
    best, best_full = None, FULL
    for block_n, rest, block_k, warps, stages, x_left in _SHAPES[rows]:
        tiles, steps = -(-n // (block_n + rest)), -(-k // block_k)
        split = max(min(num_sms // tiles, MAX_PARTS), 1)
        while steps % split:
            split -= 1
        shares = tiles * split
        full = shares / (-(-shares // num_sms) * num_sms)
        if full > best_full:
            best = StreamTile(rows, block_n, rest, block_k, shares, warps, stages, x_left)
            best_full = full
    if best is None:
        block_n, rest, block_k, warps, stages, x_left = _SHAPES[rows][-1]
        tiles, steps = -(-n // (block_n + rest)), -(-k // block_k)
        smallest = -(-steps // (MAX_PARTS - 1))  # of the shares: no more than MAX_PARTS a tile
        shares = max(min(num_sms, tiles * steps // smallest), 1)
        best = StreamTile(rows, block_n, rest, block_k, shares, warps, stages, x_left)
    return best


@cache
def _cut(tile: StreamTile, n: int, k: int) -> Cut:
    return tile.cut(n, k)


def fits(x: Tensor, w: Tensor) -> bool:
    """Whether the copy engine can read both: [m, k] and [n, k] with contiguous rows."""
    return all(
        each.data_ptr() % ALIGNMENT == 0 and each.stride(0) * each.element_size() % ALIGNMENT == 0
        for each in (x, w)
    )


def stream_k_gemm(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    workspace: SkinnyWorkspace,
    tile: StreamTile,
    *,
    pdl: bool = False,
) -> Tensor:
    """out[:] = x @ w.T; allocates nothing on the device, so a CUDA graph may hold it.

    On the CPU torch computes it, except under Triton's interpreter.

    x: [m, k] bf16 or f16, m <= tile.block_m, rows contiguous; w: [n, k] contiguous; both as `fits`
    says; out: [m, n] of x's dtype, rows contiguous. `pdl` as for `skinny_gemm`. Hopper and later.
    """
    if not x.is_cuda and not INTERPRETED:
        return out.copy_(skinny_gemm_ref(x, w))
    grid, arguments, constants = _launch(x, w, out, workspace, tile, pdl)
    _stream_k_kernel[grid](*arguments, **constants)
    return out


def compile_for(
    x: Tensor, w: Tensor, out: Tensor, workspace: SkinnyWorkspace, tile: StreamTile, *, pdl: bool
) -> None:
    """Have the kernel ready for these, without a launch."""
    grid, arguments, constants = _launch(x, w, out, workspace, tile, pdl)
    _stream_k_kernel.warmup(*arguments, grid=grid, **constants)


def _launch(
    x: Tensor, w: Tensor, out: Tensor, workspace: SkinnyWorkspace, tile: StreamTile, pdl: bool
) -> tuple[tuple[int], tuple[Any, ...], dict[str, Any]]:
    """Grid, arguments and constants of one launch, checked."""
    (m, k), n = x.shape, w.shape[0]
    cut = _cut(tile, n, k)
    check_operands(x, w, out, workspace, tile)
    assert fits(x, w)
    assert cut.parts <= MAX_PARTS
    # The interpreter runs one program after the other.
    patience = min(tile.patience, 1) if INTERPRETED else tile.patience
    w_blocks = TensorDescriptor.from_tensor(w, [tile.block_n, tile.block_k])
    arguments = (
        TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
        w_blocks,
        TensorDescriptor.from_tensor(w, [tile.rest, tile.block_k]) if tile.rest else w_blocks,
        out, workspace.partial, workspace.arrivals,
        m, n, out.stride(0), cut.tiles * cut.steps, patience,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "REST": tile.rest,
        "BLOCK_K": tile.block_k, "STEPS": cut.steps, "SPLIT": cut.split, "PARTS": cut.parts,
        "CHUNKS": cut.chunks, "X_LEFT": tile.x_left, "SPECIALIZE": tile.specialize, "PDL": pdl,
        "UPCAST": not x.is_cuda, "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip
    if pdl:
        constants["launch_pdl"] = True
    return (cut.shares,), arguments, constants
