"""The layout of the memory that ranks share, and how messages are cut for it."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

CHUNK_BYTES = 16
# Two i64 words in pinned host memory. A poll that lasts longer than the limit sets the fault, and a
# poll that sees the fault set ends, so all polls of a step with a lost peer end together. Reading
# them crosses PCIe, which takes milliseconds if all threads of a kernel do so; the peers then wait
# as long, read them too, and never catch up (measured: 2 ms a sum once one rank was late by
# 0.7 ms). So a poll looks there only once it has lasted 20 ms, and one thread in 128 at a time.
CONTROL_WORDS = 2  # fault, limit_ns
FAULT, LIMIT_NS = range(CONTROL_WORDS)
CHANNELS = 128
MAX_ROW_CHUNKS = 2048  # of the fused form: a row is held in the registers of one program
NUM_BUFFERS = 3
GATHER_BLOCK = 128
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PeerLayout:
    """The parts of a rank's region; offsets and sizes in bytes.

    turns: i32 [3, CHANNELS], calls so far of one-shot, two-shot, gather.
    flags: i64 [2, CHANNELS, world], by sender; upper half the turn, lower half x's offset / 16.
    marked: [CHANNELS, 2, world, marked_piece] chunks of gathers.
    slots: [CHANNELS, 2, world, piece] chunks of one-shot; ABSENT between calls.
    buffers: NUM_BUFFERS times buffer_bytes, for summands.
    """

    flags: ClassVar[int] = 4096
    marked_piece: ClassVar[int] = 512  # as `piece`, of a gather; a chunk carries eight bytes
    world: int
    buffer_bytes: int = 64 * MIB

    @property
    def piece(self) -> int:
        """Chunks of one part that a channel takes in one call."""
        return 4096 if self.world == 2 else 2048

    @property
    def marked(self) -> int:
        """Where the slots of gathers begin."""
        return self.flags + 2 * CHANNELS * self.world * 8

    @property
    def slots(self) -> int:
        """Where the slots of one-shot calls begin."""
        return self.marked + CHANNELS * 2 * self.world * self.marked_piece * CHUNK_BYTES

    @property
    def buffers(self) -> int:
        """Where the buffers begin."""
        return self.slots + CHANNELS * 2 * self.world * self.piece * CHUNK_BYTES

    @property
    def num_bytes(self) -> int:
        """Size of a region."""
        return self.buffers + NUM_BUFFERS * self.buffer_bytes

    def fits_one_shot(self, num_bytes: int) -> bool:
        """Whether a message of so many bytes can go by one shot."""
        tiles = one_shot_tiles(-(-num_bytes // CHUNK_BYTES))
        return tiles.steps * tiles.block <= self.piece

    def fits_fused(self, num_rows: int, row_bytes: int) -> bool:
        """Whether rows of so many bytes can be summed and normed by one kernel."""
        row = row_bytes // CHUNK_BYTES
        whole = row_bytes % CHUNK_BYTES == 0 and 0 < row <= MAX_ROW_CHUNKS
        return whole and -(-num_rows // CHANNELS) * row <= self.piece

    def fits_gather(self, num_bytes: int) -> bool:
        """Whether parts of so many bytes can be gathered by our kernel."""
        return num_bytes % 8 == 0 and 0 < num_bytes // 8 <= self.marked_piece * CHANNELS

    def clear(self, region: Tensor) -> None:
        """Make a region, u8 [num_bytes], ready for the first calls."""
        region[: self.slots].zero_()
        region[self.slots : self.buffers].fill_(0xFF)


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The regions of all ranks, as one rank sees them."""

    rank: int
    layout: PeerLayout
    bases: tuple[int, ...]  # by rank: where its region is mapped here; [rank] is this rank's own
    control: int  # address of i64 [2]: fault, limit_ns

    @property
    def own(self) -> int:
        """Where this rank's region is."""
        return self.bases[self.rank]

    @property
    def peers(self) -> tuple[int, ...]:
        """Where those of the others are; ranks begin with different ones."""
        return self.bases[self.rank + 1 :] + self.bases[: self.rank]

    def offset(self, x: Tensor) -> int | None:
        """Where x lies in this rank's buffers; None: somewhere else."""
        at = x.data_ptr() - self.own
        inside = self.layout.buffers <= at <= self.layout.num_bytes - x.nbytes
        return at if inside else None


class Tiles(NamedTuple):
    """A message as `programs` programs take it: `steps` tiles of `block` chunks a program."""

    programs: int
    steps: int
    block: int


def tiles_of(num_chunks: int, block: int) -> Tiles:
    """Cut a message for at most one program a channel."""
    tiles = -(-num_chunks // block)
    programs = min(tiles, CHANNELS)
    return Tiles(programs, -(-tiles // programs), block)


def one_shot_tiles(num_chunks: int) -> Tiles:
    """Of the one-shot kernel, for 256 threads a program."""
    return tiles_of(num_chunks, 256 if num_chunks <= CHANNELS * 256 else 1024)


def share_of(num_chunks: int, world: int) -> int:
    """Chunks that a rank sums of a message, by two shots; shares begin at lines of 128 bytes."""
    return -(-num_chunks // (world * 8)) * 8


def two_shot_tiles(num_chunks: int, world: int) -> Tiles:
    """Of the two-shot kernel, for 512 threads a program and one rank's share."""
    share = share_of(num_chunks, world)
    large = 2048 if world == 2 else 1024
    return tiles_of(share, 512 if share <= CHANNELS * 512 else large)
