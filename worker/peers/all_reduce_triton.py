"""Sums over the ranks of one host, through memory that all of them have mapped (`PeerLayout`).

Sums are made in f32 in the order of ranks and rounded once, by the same binary everywhere, so all
ranks get the same bits. A NaN stays a NaN; which one is not kept. Small messages go by one shot,
large ones by two. A gather is one shot without a sum, and exact for any payload: 4 bytes
travel with the number of the call in one access of 8 (NCCL's LL), so nothing need be reset.

All programs of a launch must be resident together, or two ranks could wait for programs that have
not started: CHANNELS programs of 512 threads are, on any GPU with NVLink. A program whose peer is
late beyond a limit sets a fault and ends (`peer_layout`); result and regions are of no use then.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.ops.jit import enter, tl, triton
from worker.ops.launch import overlap, power_of_two
from worker.peers.peer_layout import (
    CHANNELS,
    CHUNK_BYTES,
    GATHER_BLOCK,
    PeerMemory,
    one_shot_tiles,
    share_of,
    tiles_of,
    two_shot_tiles,
)
from worker.peers.peer_ptx import (
    load_chunks,
    poll_chunks,
    poll_flags,
    poll_marked,
    store_chunks,
    store_flags,
    store_marked,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def all_reduce_ref(parts: Sequence[Tensor]) -> Tensor:
    """The sum of equal shapes and dtypes, f32 in the order given, rounded once to their dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@triton.jit
def _turn(own, KIND: tl.constexpr, CHANNELS: tl.constexpr):
    """Where this program's count of calls is."""
    at = own + (KIND * CHANNELS + tl.program_id(0)) * 4
    return at.to(tl.pointer_type(tl.int32))


@triton.jit
def _end_turn(at, turn):
    tl.debug_barrier()  # all threads have read it
    tl.store(at, turn)


@triton.jit
def _sendable(address, mask):
    """Chunks of this rank's part, without ABSENT words."""
    a, b, c, d = load_chunks(address, mask)  # pyright: ignore
    return (
        tl.where(a == -1, 0x7FFF7FFF, a),
        tl.where(b == -1, 0x7FFF7FFF, b),
        tl.where(c == -1, 0x7FFF7FFF, c),
        tl.where(d == -1, 0x7FFF7FFF, d),
    )


@triton.jit
def _either(first, a, b):
    return (
        tl.where(first, a[0], b[0]),
        tl.where(first, a[1], b[1]),
        tl.where(first, a[2], b[2]),
        tl.where(first, a[3], b[3]),
    )


@triton.jit
def _low(word, dtype: tl.constexpr):
    """The first of a word's two values of 16 bits, as f32."""
    if dtype == tl.bfloat16:
        return (word << 16).to(tl.float32, bitcast=True)
    return word.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _high(word, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        return (word & -65536).to(tl.float32, bitcast=True)
    return (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _values(words, dtype: tl.constexpr):
    """A chunk's values in f32: eight, or four of a dtype of 32 bits."""
    a, b, c, d = words
    if dtype == tl.float32:
        return (
            a.to(tl.float32, bitcast=True), b.to(tl.float32, bitcast=True),
            c.to(tl.float32, bitcast=True), d.to(tl.float32, bitcast=True),
        )  # fmt: skip
    else:
        return (
            _low(a, dtype), _high(a, dtype), _low(b, dtype), _high(b, dtype),
            _low(c, dtype), _high(c, dtype), _low(d, dtype), _high(d, dtype),
        )  # fmt: skip


@triton.jit
def _pair(low, high, dtype: tl.constexpr):
    """One word of two values, rounded."""
    first = low.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
    second = high.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
    return (first | (second << 16)).to(tl.int32, bitcast=True)


@triton.jit
def _words(v, dtype: tl.constexpr):
    """Inverse of _values."""
    if dtype == tl.float32:
        return (
            v[0].to(tl.int32, bitcast=True), v[1].to(tl.int32, bitcast=True),
            v[2].to(tl.int32, bitcast=True), v[3].to(tl.int32, bitcast=True),
        )  # fmt: skip
    else:
        return (
            _pair(v[0], v[1], dtype), _pair(v[2], v[3], dtype),
            _pair(v[4], v[5], dtype), _pair(v[6], v[7], dtype),
        )  # fmt: skip


@triton.jit
def _plus(a, b, dtype: tl.constexpr):
    if dtype == tl.float32:
        return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]
    else:
        return (
            a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3],
            a[4] + b[4], a[5] + b[5], a[6] + b[6], a[7] + b[7],
        )  # fmt: skip


@triton.jit
def _push(words, peers, there, mask, WORLD: tl.constexpr):
    """Writes words to the same place of every peer's region."""
    for nth in tl.static_range(0, WORLD - 1):  # pyright: ignore
        store_chunks(peers[nth] + there, words, mask, True)


@triton.jit
def _take(mine, slot, source: tl.constexpr, rank, control, mask):
    """The part of one rank, from its slot, which is left ABSENT; of this rank it is `mine`."""
    sent = mask & (source != rank)
    part = poll_chunks(slot, -1, control, sent)
    absent = tl.full(slot.shape, -1, tl.int32)
    store_chunks(slot, (absent, absent, absent, absent), sent)
    return _either(source == rank, mine, part)


@triton.jit
def _sum(mine, slot, rank, control, mask, WORLD: tl.constexpr, PIECE: tl.constexpr, dtype):
    """The parts of all ranks added in f32, in their order. slot: of rank 0."""
    total = _values(_take(mine, slot, 0, rank, control, mask), dtype)
    for source in tl.static_range(1, WORLD):
        part = _take(mine, slot + source * (PIECE * 16), source, rank, control, mask)
        total = _plus(total, _values(part, dtype), dtype)
    return total


# One shot: a rank writes its part into a slot of every peer, polls its own slots and sums. There
# is no barrier and no atomic: a slot holds ABSENT words until data comes, and the data is its own
# flag. ABSENT, -1, is a NaN in every dtype (of bf16 and f16, a pair of them); a payload's word that
# equals it is sent as another NaN. (The idea is NCCL's LL and TensorRT-LLM's "Lamport" all-reduce.)
#
# Program c of a rank exchanges with program c of its peers alone, by turns in two sets of slots
# that only they use: a channel. Whose turn it is stands in the region, and the program moves it on:
# so replays of graphs, eager calls and changing sizes mix.
#
# With one set a writer could end call e, and push call e + 1, while the reader still reads call e.
# Two suffice. The writer uses the set of call e again in call e + 2, so after its own call e + 1
# has seen what the reader had pushed in call e + 1. That began after the end of the reader's call
# e, in which the thread that read a word reset it: kernels of a stream follow each other. With
# programmatic dependent launch a kernel may be resident earlier, but every program calls gdc_wait
# before its first access, which returns when all memory operations of the kernel before are done;
# and every kernel of ours waits, so that one's end implies that of all before it. The same wait
# orders our reads of `x` behind the product that made it, and lets the kernel after us read `out`.
@triton.jit(do_not_specialize=["rank", "num_chunks", "steps"])
def _one_shot_kernel(
    x, out, peers, own, control, rank, num_chunks, steps,
    WORLD: tl.constexpr, CHANNELS: tl.constexpr, SLOTS: tl.constexpr, PIECE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program c takes tiles c, c + programs, … of BLOCK chunks, `steps` of them.

    x, out: num_chunks chunks; may be the same. First everything is pushed, then everything is
    summed, so that all of a large message is under way together.
    """
    enter(PDL)
    channel, width = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    dtype: tl.constexpr = out.dtype.element_ty
    turn_at = _turn(own, 0, CHANNELS)
    turn = tl.load(turn_at)
    slots = SLOTS + (channel * 2 + (turn & 1)) * (WORLD * PIECE * 16)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    x_at, out_at = x.to(tl.int64), out.to(tl.int64)
    for step in range(steps):
        at = (step * width + channel) * BLOCK + lanes
        inside = at < num_chunks
        mine = _sendable(x_at + at * 16, inside)
        there = slots + (rank.to(tl.int64) * PIECE + step * BLOCK + lanes) * 16
        _push(mine, peers, there, inside, WORLD)
    for step in range(steps):
        at = (step * width + channel) * BLOCK + lanes
        inside = at < num_chunks
        mine = _sendable(x_at + at * 16, inside)
        slot = own + slots + (step * BLOCK + lanes) * 16
        total = _sum(mine, slot, rank, control, inside, WORLD, PIECE, dtype)
        store_chunks(out_at + at * 16, _words(total, dtype), inside)
    _end_turn(turn_at, turn + 1)


@triton.jit(do_not_specialize=["rank", "num_rows", "steps"])
def _one_shot_rms_norm_kernel(
    x, residual, weight, normed, total, peers, own, control, rank, num_rows, steps,
    stride_residual, stride_total, eps,
    WORLD: tl.constexpr, CHANNELS: tl.constexpr, SLOTS: tl.constexpr, PIECE: tl.constexpr,
    ROW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program c takes rows c, c + programs, …, `steps` of them.

    x, normed: [num_rows, ROW chunks]; residual, total: likewise, rows stride_* bytes apart;
    weight: ROW chunks. ROW <= BLOCK. Rounds where rms_norm's kernel does after an all-reduce.
    """
    dtype: tl.constexpr = normed.dtype.element_ty
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    in_row = lanes < ROW
    scale = _values(load_chunks(weight.to(tl.int64) + lanes * 16, in_row), dtype)
    enter(PDL)
    channel, width = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    turn_at = _turn(own, 0, CHANNELS)
    turn = tl.load(turn_at)
    slots = SLOTS + (channel * 2 + (turn & 1)) * (WORLD * PIECE * 16)
    x_at = x.to(tl.int64) + lanes * 16
    for step in range(steps):
        row = step * width + channel
        inside = in_row & (row < num_rows)
        mine = _sendable(x_at + row * (ROW * 16), inside)
        there = slots + (rank.to(tl.int64) * PIECE + step * ROW + lanes) * 16
        _push(mine, peers, there, inside, WORLD)
    for step in range(steps):
        row = step * width + channel
        inside = in_row & (row < num_rows)
        mine = _sendable(x_at + row * (ROW * 16), inside)
        others = load_chunks(residual.to(tl.int64) + row * stride_residual + lanes * 16, inside)
        slot = own + slots + (step * ROW + lanes) * 16
        summed = _sum(mine, slot, rank, control, inside, WORLD, PIECE, dtype)
        rounded = _values(_words(summed, dtype), dtype)
        words = _words(_plus(rounded, _values(others, dtype), dtype), dtype)
        store_chunks(total.to(tl.int64) + row * stride_total + lanes * 16, words, inside)
        y = _values(words, dtype)
        words = _words(_normed(y, scale, eps, ROW, dtype), dtype)
        store_chunks(normed.to(tl.int64) + (row * ROW + lanes) * 16, words, inside)
    _end_turn(turn_at, turn + 1)


@triton.jit
def _rounded(v, dtype: tl.constexpr):
    return v.to(dtype).to(tl.float32)


@triton.jit
def _normed(y, scale, eps, ROW: tl.constexpr, dtype: tl.constexpr):
    """A row's values over their root mean square, rounded, times `scale`. Zeros beyond the row."""
    squares = y[0] * y[0] + y[1] * y[1] + y[2] * y[2] + y[3] * y[3]
    if dtype == tl.float32:
        r = tl.rsqrt(tl.sum(squares, 0) / (ROW * 4) + eps)
        return y[0] * r * scale[0], y[1] * r * scale[1], y[2] * r * scale[2], y[3] * r * scale[3]
    else:
        squares += y[4] * y[4] + y[5] * y[5] + y[6] * y[6] + y[7] * y[7]
        r = tl.rsqrt(tl.sum(squares, 0) / (ROW * 8) + eps)
        return (
            _rounded(y[0] * r, dtype) * scale[0], _rounded(y[1] * r, dtype) * scale[1],
            _rounded(y[2] * r, dtype) * scale[2], _rounded(y[3] * r, dtype) * scale[3],
            _rounded(y[4] * r, dtype) * scale[4], _rounded(y[5] * r, dtype) * scale[5],
            _rounded(y[6] * r, dtype) * scale[6], _rounded(y[7] * r, dtype) * scale[7],
        )  # fmt: skip


@triton.jit
def _tell(there, mark, value, ids, WORLD: tl.constexpr):
    """Sets this rank's flag at all ranks, after all that this program has written or read."""
    tl.debug_barrier()
    flag = (mark.to(tl.int64) << 32) | value
    store_flags(there, flag, ids < WORLD)


# Two shots: `x` lies in the region. A rank reads its share of every peer's x, sums, and writes
# the sum back into every peer's x. An element is read and written by one thread of one rank, so
# this is done in place. Flags of a channel tell that all x are complete, before, and that all are
# summed, after; a flag carries the turn and where x lies, so ranks need not use the same buffer.
# Flags are released and acquired at the scope of the system. A kernel ends when all peers have
# written here and read here: its x may be written by the next kernel.
@triton.jit(do_not_specialize=["rank", "num_chunks", "share", "steps"])
def _two_shot_kernel(
    x, bases, own, control, rank, num_chunks, share, steps,
    WORLD: tl.constexpr, WORLD_2: tl.constexpr, CHANNELS: tl.constexpr, FLAGS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rank r sums chunks r · share, … of all ranks' x; its program c tiles c, c + programs, ….

    x: num_chunks chunks in this rank's region; afterwards the sum.
    """
    enter(PDL)
    channel, width = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    dtype: tl.constexpr = x.dtype.element_ty
    turn_at = _turn(own, 1, CHANNELS)
    turn = tl.load(turn_at) + 1
    ids = tl.arange(0, WORLD_2)
    regions = tl.zeros((WORLD_2,), tl.int64)
    for peer in tl.static_range(0, WORLD):
        regions = tl.where(ids == peer, bases[peer], regions)
    begun = FLAGS + channel * (WORLD * 8)
    ended = begun + CHANNELS * WORLD * 8
    here = (x.to(tl.int64) - own) // 16
    _tell(regions + begun + rank * 8, turn, here, ids, WORLD)
    theirs = poll_flags(own + begun + ids * 8, turn, control, ids < WORLD) & 0xFFFFFFFF
    tl.debug_barrier()

    first = rank.to(tl.int64) * share
    end = tl.minimum(first + share, num_chunks)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for step in range(steps):
        at = first + (step * width + channel) * BLOCK + lanes
        inside = at < end
        x_0 = bases[0] + tl.sum(tl.where(ids == 0, theirs, 0), 0) * 16
        total = _values(load_chunks(x_0 + at * 16, inside, True), dtype)
        for source in tl.static_range(1, WORLD):
            x_s = bases[source] + tl.sum(tl.where(ids == source, theirs, 0), 0) * 16
            total = _plus(total, _values(load_chunks(x_s + at * 16, inside, True), dtype), dtype)
        words = _words(total, dtype)
        for peer in tl.static_range(0, WORLD):
            x_p = bases[peer] + tl.sum(tl.where(ids == peer, theirs, 0), 0) * 16
            store_chunks(x_p + at * 16, words, inside, True)

    _tell(regions + ended + rank * 8, turn, here, ids, WORLD)
    poll_flags(own + ended + ids * 8, turn, control, ids < WORLD)
    _end_turn(turn_at, turn)


@triton.jit(do_not_specialize=["rank", "num_pairs", "steps"])
def _gather_kernel(
    x, out, peers, own, control, rank, num_pairs, steps,
    WORLD: tl.constexpr, CHANNELS: tl.constexpr, MARKED: tl.constexpr, PIECE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[r] = x of rank r. x: i32 [num_pairs, 2]; out: i32 [WORLD, num_pairs, 2]."""
    enter(PDL)
    channel, width = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    turn_at = _turn(own, 2, CHANNELS)
    turn = tl.load(turn_at) + 1
    slots = MARKED + (channel * 2 + (turn & 1)) * (WORLD * PIECE * 16)
    lanes = tl.arange(0, BLOCK).to(tl.int64)
    for step in range(steps):
        at = (step * width + channel) * BLOCK + lanes
        inside = at < num_pairs
        first = tl.load(x + at * 2, inside, 0)
        second = tl.load(x + at * 2 + 1, inside, 0)
        there = slots + (rank.to(tl.int64) * PIECE + step * BLOCK + lanes) * 16
        store_marked(own + there, first, second, turn, inside)
        for nth in tl.static_range(0, WORLD - 1):
            store_marked(peers[nth] + there, first, second, turn, inside)
    for step in range(steps):
        at = (step * width + channel) * BLOCK + lanes
        inside = at < num_pairs
        slot = own + slots + (step * BLOCK + lanes) * 16
        for source in tl.static_range(0, WORLD):
            first, second = poll_marked(slot + source * (PIECE * 16), turn, control, inside)
            to = out + (source * num_pairs + at) * 2
            tl.store(to, first, inside)
            tl.store(to + 1, second, inside)
    _end_turn(turn_at, turn)


def chunks_of(x: Tensor) -> int:
    """Chunks of a contiguous tensor that starts and ends at one."""
    assert x.is_contiguous()
    assert x.nbytes % CHUNK_BYTES == 0
    assert x.data_ptr() % CHUNK_BYTES == 0
    return x.nbytes // CHUNK_BYTES


def one_shot(memory: PeerMemory, x: Tensor) -> Tensor:
    """The sum of all ranks' x, in x itself; all ranks call with one shape.

    x: contiguous, of DTYPES, fits_one_shot; it may lie anywhere.
    """
    assert x.dtype in DTYPES
    num_chunks, layout = chunks_of(x), memory.layout
    tiles = one_shot_tiles(num_chunks)
    assert tiles.steps * tiles.block <= layout.piece
    _one_shot_kernel[(tiles.programs,)](
        x, x, memory.peers, memory.own, memory.control, memory.rank,
        num_chunks, tiles.steps,
        **overlap(
            x, WORLD=layout.world, CHANNELS=CHANNELS, SLOTS=layout.slots, PIECE=layout.piece,
            BLOCK=tiles.block, num_warps=8,
        ),
    )  # fmt: skip
    return x


def one_shot_rms_norm(
    memory: PeerMemory,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """add_rms_norm(one_shot(x), residual, weight, eps, total) by one kernel; x is kept.

    x: [num_rows, hidden], contiguous, fits_fused; residual, total: likewise, rows maybe strided.
    """
    assert x.dtype == residual.dtype == weight.dtype
    assert weight.data_ptr() % CHUNK_BYTES == 0
    assert x.dtype in DTYPES
    hidden, layout = x.shape[-1], memory.layout
    row_bytes, num_rows = hidden * x.element_size(), x.numel() // hidden
    assert chunks_of(x)
    assert layout.fits_fused(num_rows, row_bytes)
    normed = torch.empty_like(x)
    total = torch.empty_like(x) if total is None else total
    assert total.dtype == x.dtype
    assert total.shape == x.shape == residual.shape
    row = row_bytes // CHUNK_BYTES
    block = max(32, power_of_two(row))
    programs = min(num_rows, CHANNELS)
    _one_shot_rms_norm_kernel[(programs,)](
        x, residual, weight, normed, total, memory.peers, memory.own,
        memory.control, memory.rank, num_rows, -(-num_rows // programs),
        _row_stride(residual), _row_stride(total), eps,
        **overlap(
            x, WORLD=layout.world, CHANNELS=CHANNELS, SLOTS=layout.slots, PIECE=layout.piece,
            ROW=row, BLOCK=block, num_warps=min(block // 32, 16),
        ),
    )  # fmt: skip
    return normed, total


def _row_stride(x: Tensor) -> int:
    """Bytes from a row to the next one; rows are read in chunks."""
    rows = x.view(-1, x.shape[-1])
    stride = rows.stride(0) * x.element_size()
    assert rows.stride(1) == 1
    assert stride % CHUNK_BYTES == 0
    assert x.data_ptr() % CHUNK_BYTES == 0
    return stride


def two_shot(memory: PeerMemory, x: Tensor) -> Tensor:
    """The sum of all ranks' x, in x itself; all ranks call with one shape.

    x: contiguous, of DTYPES, in this rank's buffers (PeerMemory.offset).
    """
    assert x.dtype in DTYPES
    assert memory.offset(x) is not None
    num_chunks, layout = chunks_of(x), memory.layout
    tiles = two_shot_tiles(num_chunks, layout.world)
    _two_shot_kernel[(tiles.programs,)](
        x, memory.bases, memory.own, memory.control, memory.rank, num_chunks,
        share_of(num_chunks, layout.world), tiles.steps,
        **overlap(
            x, WORLD=layout.world, WORLD_2=power_of_two(layout.world), CHANNELS=CHANNELS,
            FLAGS=layout.flags, BLOCK=tiles.block, num_warps=16,
        ),
    )  # fmt: skip
    return x


def gather(memory: PeerMemory, x: Tensor) -> Tensor:
    """[world, *x.shape]: every rank's x, of any dtype, bit for bit; fits_gather."""
    assert x.is_contiguous()
    layout = memory.layout
    assert layout.fits_gather(x.nbytes)
    out = torch.empty((layout.world, *x.shape), dtype=x.dtype, device=x.device)
    num_pairs = x.nbytes // 8
    tiles = tiles_of(num_pairs, GATHER_BLOCK)
    source, to = (tensor.view(-1).view(torch.uint8).view(torch.int32) for tensor in (x, out))
    _gather_kernel[(tiles.programs,)](
        source, to, memory.peers, memory.own, memory.control, memory.rank,
        num_pairs, tiles.steps,
        **overlap(
            x, WORLD=layout.world, CHANNELS=CHANNELS, MARKED=layout.marked,
            PIECE=layout.marked_piece, BLOCK=tiles.block, num_warps=4,
        ),
    )  # fmt: skip
    return out
