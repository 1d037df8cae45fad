"""Snapshots of recurrent state: the slots that hold one, of which prefix, and who goes first.

A snapshot is the state after all tokens of a node of the prefix tree, at a multiple of `grid`. A
request that begins alike *resumes* from one: it is copied to the request's own slot, and what lies
behind it is computed. Pages may be found deeper than a snapshot; their KV is not stored again.

A slot of snapshots is free, some Hold's (a step that stores it is launched), or a node's. Steps
alone write and read them, in the order of the device's stream. So a slot may be another's at once.
"""

from typing import NamedTuple

from worker.cache.hold import Hold
from worker.cache.prefix import Node, Watcher
from worker.plan import Copies

# On a path without branches so many stay: the last one, and the one before for who edits a turn.
KEPT_IN_LINE = 2


class Stored(NamedTuple):
    """What a chunk does beside its KV: where it ends, and the snapshot that it stores."""

    end: int
    at: int = 0  # tokens of the snapshot; 0: it stores none
    slot: int = 0


class Snapshots:
    """Of one worker. Changed by its PageBook and the schedulers."""

    def __init__(self, slots: range, grid: int, page_size: int) -> None:
        assert grid % page_size == 0
        self.grid, self.num_slots, self._page_size = grid, len(slots), page_size
        self._free = [*slots]
        self.nodes: dict[Node, None] = {}  # that have one; least recently used first
        self.num_resumed = 0  # requests
        self._num_rows = 0  # that have a slot
        self.copies: dict[int, int] = {}  # by the slot that is written: the one that is read
        self.page_copies: dict[int, tuple[int, int]] = {}  # by that slot: (from, to)
        # As of PageBook and PrefixTree, for a tier: which slots are copied, and who is told.
        self.last_launched = self.last_settled = 0
        self.watched: dict[int, object] = {}
        self.watcher: Watcher | None = None
        self.closing: list[Hold] = []  # closed, but a copy that no plan has yet reads their slots

    @property
    def num_used(self) -> int:
        """Slots that are not free: of `nodes`, or promised to a Hold."""
        return self.num_slots - len(self._free)

    def resumable(self, hold: Hold, max_tokens: int) -> int:
        """Tokens of what `hold` has matched that need not be computed; `max_tokens` at most.

        Without a state those whose pages were found, else those of the deepest snapshot.
        """
        if not hold.slot:
            return hold.num_matched
        node = self._deepest(hold, max_tokens)
        return 0 if node is None else node.depth * self._page_size

    def resume(self, hold: Hold, max_tokens: int) -> int:
        """The same; the next plan that is launched copies the snapshot to the hold's own slot."""
        node = self._deepest(hold, max_tokens) if hold.slot else None
        if node is not None:
            self.copies[hold.slot] = node.state
            self.nodes[node] = self.nodes.pop(node, None)  # the last now
            self.num_resumed += 1
        return self.resumable(hold, max_tokens)

    def drain(self) -> Copies:
        """Return what the plan being made copies before its forward."""
        slots = tuple((source, target) for target, source in self.copies.items())
        pages = tuple(self.page_copies.values())
        self.copies.clear()
        self.page_copies.clear()
        return Copies(slots, pages)

    def fork(self, source: Hold, target: Hold) -> None:
        """The next plan copies a state, and the page behind those that both share, to `target`.

        Until then PageBook.close keeps what `source` holds.
        """
        self.copies[target.slot] = source.slot
        number = target.num_matched // self._page_size
        if number < len(target.pages):
            self.page_copies[target.slot] = source.pages[number], target.pages[number]

    def store(self, hold: Hold, start: int, end: int, target: int) -> Stored:
        """Plan the snapshot of a chunk from `start` to `end` of a prompt of `target` tokens.

        Snapshots are taken where the prompt's pages were found deeper than any snapshot, as another
        text may branch off there, and at the prompt's last grid line. A chunk stores one at most,
        and ends there if it passes two.
        """
        at = self._next(hold, start, target)
        if not start < at <= end:
            return Stored(end)
        if start < self._next(hold, at, target) <= end:
            end = at
        slot = self.take()
        if not slot:
            return Stored(end)
        hold.snapshots[at] = slot
        return Stored(end, at, slot)

    def store_of_row(self, hold: Hold, bound: int) -> int:
        """A slot for the snapshots of a row with `bound` tokens at most; 0: it has one, or none.

        Rows have half of the slots at most: else those of a large batch, most of which nobody comes
        back for, were all that is kept.
        """
        if hold.row_snapshot or self._num_rows >= self.num_slots // 2:
            return 0
        hold.row_snapshot, hold.row_snapshot_from = self.take(), bound
        self._num_rows += hold.row_snapshot > 0
        return hold.row_snapshot

    def leave_row(self, hold: Hold, num_folded: int, num_folded_ub: int) -> None:
        """The row takes no step any more; those in flight fold up to num_folded_ub tokens."""
        if not hold.row_snapshot:
            return
        at = last_line(num_folded, self.grid)
        if at > hold.row_snapshot_from and last_line(num_folded_ub, self.grid) == at:
            hold.snapshots[at] = hold.row_snapshot
        else:
            self._free.append(hold.row_snapshot)
        hold.row_snapshot = 0
        self._num_rows -= 1

    def keep(self, hold: Hold) -> None:
        """Give the snapshots of a hold to the nodes that it has by now."""
        for at in [at for at in hold.snapshots if at <= len(hold.nodes) * self._page_size]:
            node, slot = hold.nodes[at // self._page_size - 1], hold.snapshots.pop(at)
            if node.state:
                self._free.append(slot)
            else:
                node.state = slot
                if self.watcher is not None:
                    self.watcher.entered(node)
                for above in superseded(node):
                    self.drop(above)
            self.nodes[node] = self.nodes.pop(node, None)  # the last now

    def drop(self, node: Node) -> None:
        """Free the snapshot of a node, if it has one."""
        if node.state:
            self._free.append(node.state)
            self.watched.pop(node.state, None)
            node.state = 0
            del self.nodes[node]

    def close(self, hold: Hold) -> None:
        """Free what a hold has, and copy nothing to its slot any more."""
        self.copies.pop(hold.slot, None)
        self.page_copies.pop(hold.slot, None)
        self._free += hold.snapshots.values()
        hold.snapshots.clear()

    def _deepest(self, hold: Hold, max_tokens: int) -> Node | None:
        nodes = hold.nodes[: max_tokens // self._page_size] if self.num_slots else []
        return next((node for node in reversed(nodes) if node.state), None)

    def _next(self, hold: Hold, start: int, target: int) -> int:
        """The first snapshot behind `start` that is to be stored; 0: there is none."""
        for at in (last_line(num, self.grid) for num in (hold.num_matched, target)):
            number = at // self._page_size
            if at > start and not (number <= len(hold.nodes) and hold.nodes[number - 1].state):
                return at
        return 0

    def take(self) -> int:
        """A slot, of the snapshot that was used least recently if none is free; 0: there is none"""
        if not self._free and self.nodes:
            self.drop(next(iter(self.nodes)))
        return self._free.pop() if self._free else 0


def give_back(snapshots: Snapshots, slot: int) -> None:
    """Free a slot that `take` gave, and that no hold or node has."""
    snapshots._free.append(slot)


def last_line(num_tokens: int, grid: int) -> int:
    """The last multiple of `grid` up to which `num_tokens` tokens go."""
    return num_tokens // grid * grid


def superseded(node: Node) -> list[Node]:
    """Nodes whose snapshots nobody needs beside that of `node`, as no path branches off between.

    A few stay.
    """
    found, above = [node], node.parent
    while above is not None and above.parent is not None and len(above.children) == 1:
        found += [above] * (above.state > 0)
        above = above.parent
    return found[KEPT_IN_LINE:]
