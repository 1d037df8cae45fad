"""The seam of drafters: what proposes the tokens that verify windows check."""

from typing import Protocol

from torch import Tensor

from worker.forward.batch import Batch
from worker.step.rows import SampledRows


class Drafter(Protocol):
    """Fills `RowColumns.drafts` for the next step of each row. Enqueues device work only.

    A draft is accepted iff the target draws the same token. What a drafter's model keeps of a text
    lies in regions of the KV layout: it travels with the page, and a page is never without it.
    """

    def observe(self, batch: Batch, hidden: Tensor) -> None:
        """Take in a chunk of prompts; hidden: what its forward returned. Graphs may hold it."""
        ...

    def seed(self, rows: Tensor) -> None:
        """Rows begin to decode: they have a last token, and KV of all before it. Never in a graph.

        Nothing is proposed, so the first window of each yields one token. Rows that are not active
        are left alone. rows: [n] i64, of the step state.
        """
        ...

    def advance(self, sampled: SampledRows, hidden: Tensor, drawn: Tensor, *, greedy: bool) -> None:
        """Take in what a decode step has kept of its windows, then propose; graphs hold it.

        A step of windows of W tokens proposes W - 1; -1 stands for drafts that are not proposed,
        as those behind the end of a row. sampled: rows of the step, as when it began; hidden:
        [n * width, hidden], after the final norm; drawn: what `accept_rows` returned, the step
        state is advanced already; greedy: no row draws at random.
        """
        ...
