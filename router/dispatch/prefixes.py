"""Which workers probably hold the KV of a prompt's beginning, by what this router has sent them."""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence

from worker.api import PeerId

BLOCK = 32  # tokens; what is shared of a block that is not whole is not seen
CAPACITY = 1 << 16  # blocks: 2 million tokens, and some 20 MB
SHARE = 0.2  # of the latest report in the trust in a worker's cache


def blocks_of(tokens: Sequence[int], salt: str = "") -> list[int]:
    """The numbers of whole blocks, with all before them; equal beginnings have equal numbers.

    Of one salt: as in workers' prefix trees, prompts of different ones have nothing in common.
    """
    numbers, number = list[int](), hash(salt) if salt else 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        number = hash((number, tuple(tokens[end - BLOCK : end])))
        numbers.append(number)
    return numbers


class Prefixes:
    """An estimate: workers also serve other routers, and evict."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._at: OrderedDict[int, set[PeerId]] = OrderedDict()  # block -> who; used last is last
        self._ends: dict[int, PeerId] = {}  # last blocks of conversations, and where they are
        self.num_at = Counter[PeerId]()  # of these
        self._parted: set[int] = set()  # blocks behind which conversations differ
        self._trust: dict[PeerId, float] = {}  # of what was expected, how much was there, 0 to 1

    def held(self, blocks: Sequence[int], peer: PeerId, grid: int = 0) -> float:
        """How many tokens of a prompt of these blocks the worker is expected to have.

        grid: see WorkerStats.snapshot_grid; with one, up to which of its lines it has the state.
        """
        num = self._num_found(blocks, peer)
        if grid:
            lines = range(num * BLOCK // grid * grid // BLOCK, 0, -(grid // BLOCK))
            found = (line for line in lines if peer in self._at.get(~blocks[line - 1], ()))
            num = next(found, 0)
        return num * BLOCK * self._trust.get(peer, 1.0)

    def is_common(self, blocks: Sequence[int]) -> bool:
        """Whether conversations have parted before where this prompt parts from all of them."""
        return any(block in self._parted for block in self._last_known(blocks))

    def turned(self, blocks: Sequence[int], peer: PeerId) -> None:
        """A conversation goes on, or begins, at a decode worker. Before `sent`."""
        known = set(self._last_known(blocks))
        self._parted |= known - self._ends.keys()
        for block in known.union(blocks[-1:]):
            self._over(block)
        if blocks:
            self._ends[blocks[-1]] = peer
            self.num_at[peer] += 1

    def _last_known(self, blocks: Sequence[int]) -> Sequence[int]:
        """The last block up to which anybody was sent them, or none."""
        num = bisect_left(blocks, True, key=lambda block: not self._at.get(block))
        return blocks[max(0, num - 1) : num]

    def _over(self, block: int) -> None:
        if (peer := self._ends.pop(block, None)) is not None:
            self.num_at[peer] -= 1

    def sent(self, blocks: Sequence[int], peer: PeerId, grid: int = 0) -> None:
        """A prompt goes to a worker, which has it from then on.

        Its state where it ends, and where it was found to branch off; the key of a state is the
        complement of its last block's.
        """
        found = self._num_found(blocks, peer) if grid else 0
        ends = {num * BLOCK // grid * grid // BLOCK for num in (found, len(blocks))} if grid else ()
        numbers = [*reversed(blocks), *(~blocks[num - 1] for num in ends if num)]
        for block in numbers:  # its beginning is the last to be forgotten
            self._at.setdefault(block, set()).add(peer)
            self._at.move_to_end(block)
        while len(self._at) > self._capacity:
            oldest, _ = self._at.popitem(last=False)
            self._over(oldest)
            self._parted.discard(oldest)

    def fresh(self, blocks: Sequence[int], peer: PeerId) -> Sequence[int]:
        """Those behind what the worker was sent."""
        return blocks[
            bisect_left(blocks, True, key=lambda block: peer not in self._at.get(block, ())) :
        ]

    def unsent(self, blocks: Sequence[int], peer: PeerId) -> None:
        """The worker was not asked for them after all."""
        for number in (*blocks, *(~block for block in blocks)):
            if number in self._at:
                self._at[number].discard(peer)

    def _num_found(self, blocks: Sequence[int], peer: PeerId) -> int:
        """Blocks that the worker was sent."""
        missing = (i for i, block in enumerate(blocks) if peer not in self._at.get(block, ()))
        return next(missing, len(blocks))

    def found(self, peer: PeerId, expected: float, num_cached: int) -> None:
        """A worker has said how many tokens it found where so many were expected."""
        if expected:
            trust = self._trust.get(peer, 1.0)
            seen = min(1.0, num_cached * trust / expected)
            self._trust[peer] = (1 - SHARE) * trust + SHARE * seen
