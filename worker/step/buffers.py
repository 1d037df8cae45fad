"""A Plan made into a Batch: every tensor of one forward, built whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from worker.forward.batch import Batch, HostLengths
from worker.kernels.attention.paged_attention import SHORT_KEYS
from worker.kernels.gemm.product import MAX_STREAMED_ROWS
from worker.kernels.launch import power_of_two
from worker.kernels.step.chunk_rows import NUM_LINES, SentChunks, chunk_rows
from worker.kernels.step.step_rows import read_rows
from worker.plan import LONG_ROWS, Plan
from worker.step.sampled import SampledRows
from worker.step.staging import Staging
from worker.step.state import StepState

NUM_SLOTS = 4  # requests of a steady batch; more of them divide attention's work less well
MAX_STEADY_LEN = SHORT_KEYS  # tokens of each; attention to more is better cut for what there is
MAX_WANTED = MAX_STREAMED_ROWS  # requests of a long step of whose last rows alone is all computed
New = tuple[int, int, int]  # of a request's pages: first, last and word of `SentChunks`
NOTHING_NEW: New = (0, 0, 0)


class BatchBuffers:
    """Builds batches for one runner from its step state."""

    def __init__(self, state: StepState, page_size: int, max_chunk_tokens: int) -> None:
        self._state = state
        self._page_size = page_size
        capacity = max_chunk_tokens + max_chunk_tokens % 2  # lines begin at multiples of 16 bytes
        # Token ids, positions and slots of the batch of chunks under way: graphs read them here.
        self._chunk = torch.zeros(3, capacity, dtype=torch.int64, device=state.device)
        num_rows, max_pages = len(state.active) - 1, state.page_table.shape[1]
        # What the host says of it: graphs read the lines about its requests there, if they are few.
        self._page_words = max_pages + max_chunk_tokens // page_size + num_rows
        words = NUM_LINES * _width(num_rows) + max_chunk_tokens + self._page_words
        self._staging = Staging(words, state.device)
        self.num_slots = min(NUM_SLOTS, num_rows)
        num_pages = min(-(-MAX_STEADY_LEN // page_size), max_pages)
        self.max_steady_len = min(MAX_STEADY_LEN, num_pages * page_size)
        self._tables = torch.zeros_like(state.page_table[: self.num_slots, :num_pages])
        self._steady_batches: dict[int, Batch] = {}  # by rows; all over the same buffers
        self._wanted = torch.zeros(MAX_WANTED, dtype=torch.int64, device=state.device)
        self._one_each = torch.arange(num_rows + 1, dtype=torch.int32, device=state.device)

    def chunks(self, plan: Plan, num_rows: int = 0, *, steady: bool = False) -> Batch:
        """The batch of a plan of chunks, whose pages go into the state's page table on the way.

        It lies in buffers that stay: the batch built last is the only one that holds.

        Args:
            plan: has chunks, no more than the state has rows.
            num_rows: pad it to so many rows, and let host bounds be coarse; 0: neither.
            steady: pad the requests too, to `num_slots` of up to `max_steady_len` tokens; the host
                bounds are then the highest that there are, and `host` is None. With `num_rows`
                only.
        """
        counts = [len(chunk.tokens) for chunk in plan.chunks]
        ends = [chunk.start + len(chunk.tokens) for chunk in plan.chunks]
        num_reqs, longest, table = len(counts), max(counts), self._state.page_table
        sent = self._upload(plan, counts, ends, self.num_slots if steady else num_reqs)
        if num_rows:  # so that few kernels serve all lengths: they are compiled for a tile's rows
            longest = min(num_rows, power_of_two(longest))
        num_rows = max(num_rows, sent.num_tokens)
        if steady:
            chunk_rows(sent, table, self._page_size, self._chunk, num_rows, self._tables)
            return self._steady(num_rows, sent.width)
        num_pages = min(-(-plan.max_seq_len_ub // self._page_size), table.shape[1])
        tables = table.new_empty(num_reqs, num_pages)
        chunk_rows(sent, table, self._page_size, self._chunk, num_rows, tables)
        lengths = self._lengths(num_reqs, sent.width)
        return self._of_chunk(
            num_rows,
            **lengths,
            wanted=self._want(num_rows, lengths["query_start"]),
            page_table=tables,
            num_reqs=num_reqs,
            max_query_len=longest,
            max_seq_len_ub=plan.max_seq_len_ub,
            host=HostLengths(counts, ends),
        )

    def max_reqs(self, num_rows: int) -> int:
        """Requests of a batch of so many rows whose hidden states fit what graphs compute."""
        return MAX_WANTED if num_rows >= LONG_ROWS else num_rows

    def _want(self, num_rows: int, query_start: Tensor) -> Tensor | None:
        """`Batch.wanted` of a batch of `num_rows`, of so many rows at any number of requests."""
        num_reqs = len(query_start) - 1
        if num_rows < LONG_ROWS or num_reqs > MAX_WANTED:
            return None
        self._wanted.zero_()
        torch.sub(query_start[1:], 1, out=self._wanted[:num_reqs])
        return self._wanted

    def _steady(self, num_rows: int, width: int) -> Batch:
        lengths = self._lengths(self.num_slots, width)
        wanted = self._want(num_rows, lengths["query_start"])
        if num_rows not in self._steady_batches:
            self._steady_batches[num_rows] = self._of_chunk(
                num_rows,
                **lengths,
                wanted=wanted,
                page_table=self._tables,
                num_reqs=self.num_slots,
                max_query_len=num_rows,
                max_seq_len_ub=self.max_steady_len,
            )
        return self._steady_batches[num_rows]

    def blank_chunk(self, num_tokens: int) -> Batch:
        """A prompt of `num_tokens` that writes to the sink alone, for trials and captures."""
        self._chunk[:, :num_tokens].zero_()
        num_pages = -(-num_tokens // self._page_size)
        query_start = self._state.upload([0, num_tokens], torch.int32)
        return self._of_chunk(
            num_tokens,
            query_start=query_start,
            wanted=self._want(num_tokens, query_start),
            seq_lens=self._state.upload([num_tokens], torch.int32),
            page_table=torch.zeros(1, num_pages, dtype=torch.int32, device=self._state.device),
            num_reqs=1,
            max_query_len=num_tokens,
            max_seq_len_ub=num_tokens,
            host=HostLengths([num_tokens], [num_tokens]),
        )

    def _of_chunk(self, num_tokens: int, **rest: Any) -> Batch:
        ids, positions, slots = self._chunk[:, :num_tokens]
        return Batch(
            input_ids=ids, positions=positions, slot_mapping=slots, num_tokens=num_tokens, **rest
        )

    def _lengths(self, num_reqs: int, width: int) -> dict[str, Tensor]:
        """Where the device finds them after an upload of lines of that width."""
        words = self._staging.words
        return {
            "query_start": words[width : width + num_reqs + 1],
            "seq_lens": words[2 * width : 2 * width + num_reqs],
        }

    def _upload(self, plan: Plan, counts: list[int], ends: list[int], num_lines: int) -> SentChunks:
        """All that a plan of chunks brings, in one copy: the device waits for it.

        `num_lines` is the number of requests, or more. Every line begins at a multiple of 16
        bytes: kernels are compiled anew for a pointer that does not.
        """
        num_reqs, width = len(counts), _width(num_lines)
        assert num_reqs <= num_lines
        starts = [0, *itertools.accumulate(counts)]
        num_tokens, padding = starts[-1], [0] * (width - num_reqs)
        new, pages = self._new_pages(plan, NUM_LINES * width + num_tokens)
        values = [chunk.row for chunk in plan.chunks] + padding
        values += starts + [num_tokens] * (width - len(starts))
        values += ends + padding
        for line in zip(*new, strict=True):
            values += line
            values += padding
        for chunk in plan.chunks:
            values += chunk.tokens
        self._staging.upload(values + pages)
        last_page = max(last for _, last, _ in new)
        return SentChunks(self._staging.words, width, num_reqs, num_tokens, last_page)

    def _new_pages(self, plan: Plan, begin: int) -> tuple[list[New], list[int]]:
        """What is new for each chunk's row, and the pages themselves, whose first word is `begin`.

        Those of rows without a chunk are applied by themselves (a decode worker starts streams
        with the plan that computes a prompt), and so are those for which there is no room.
        """
        if not plan.pages:
            return [NOTHING_NEW] * len(plan.chunks), []
        new = {chunk.row: NOTHING_NEW for chunk in plan.chunks}
        others, pages, width = [], list[int](), self._state.page_table.shape[1]
        for each in plan.pages:
            num, last = len(pages) + len(each.pages), each.first + len(each.pages)
            if new.get(each.row) is NOTHING_NEW and num <= self._page_words:
                assert last <= width
                new[each.row] = each.first, last, begin + len(pages)
                pages += each.pages
            else:
                others.append(each)
        self._state.apply_pages(others)
        return [new[chunk.row] for chunk in plan.chunks], pages

    def decode(
        self, rows: Tensor, max_seq_len_ub: int, host: HostLengths | None = None
    ) -> tuple[Batch, SampledRows]:
        """One token for each of `rows` [n] i64; device work only, on shapes the host knows.

        Those that are inactive by now are padding, and so is row 0. `host` goes into the batch.
        """
        num_rows, num_pages = rows.shape[0], -(-max_seq_len_ub // self._page_size)
        read = read_rows(rows, self._state.columns, self._page_size, num_pages)
        batch = Batch(
            input_ids=read.input_ids,
            positions=read.positions,
            slot_mapping=read.slots,
            query_start=self._one_each[: num_rows + 1],
            seq_lens=read.seq_lens,
            page_table=read.table,
            num_reqs=num_rows,
            num_tokens=num_rows,
            max_query_len=1,
            max_seq_len_ub=max_seq_len_ub,
            host=host,
        )
        return batch, SampledRows(read.live, read.next_positions, read.valid)

    def decode_lengths(self, rows: Sequence[int]) -> HostLengths:
        """Of a decode batch of `rows`, whose plan has been applied to the state."""
        return HostLengths([1] * len(rows), [self._state.seq_len_ub[row] for row in rows])


def _width(num_reqs: int) -> int:
    """i32 words of a line about requests: one more than they are, in whole 16 bytes."""
    return -(-(num_reqs + 1) // 4) * 4
