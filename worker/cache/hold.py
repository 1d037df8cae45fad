"""Hold: what one request holds of a worker's pages and slots."""

from dataclasses import dataclass, field

from worker.cache.prefix import MANY, Node


@dataclass(slots=True, eq=False)
class Hold:
    """What one request holds. Filled by PageBook only.

    pages[i] holds tokens [i * page_size, (i + 1) * page_size) of the request's sequence; entries
    never change while the request runs, because device tables are never rewritten. But those of
    pages that were given back as nobody reads them again are 0; see PageBook.trim.
    """

    # Of pages that were in the tree as the hold was opened, or are by `commit`. It has a lock on
    # those from index num_trimmed on.
    nodes: list[Node]
    num_matched: int  # tokens found in the tree when the hold was opened, or in a tier then
    num_slots: int  # tokens that `pages` can store
    pages: list[int] = field(default_factory=list)
    private: set[int] = field(default_factory=set)
    num_reserved: int = 0  # pages promised, not bound yet
    slot: int = 0  # of its state, where layers are recurrent; 0 = none
    salt: str = ""  # of the prefixes that it matches and leaves behind
    num_trimmed: int = 0  # its first pages, which nobody reads again
    keep_from: int = MANY  # index of a page; it and those behind it are not trimmed
    num_wanted: int = 0  # pages of the tokens that it was opened for
    # By number of tokens, slots of snapshots that launched steps store, and that no node has yet.
    snapshots: dict[int, int] = field(default_factory=dict)
    row_snapshot: int = 0  # slot to which its decode steps store one at every grid line; 0: none
    row_snapshot_from: int = 0  # all lines behind so many tokens are stored there
