"""A Plan made into a Batch: every tensor of one forward, built whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.batch import Batch, HostLengths
from worker.kernels.chunk_rows import chunk_rows
from worker.kernels.launch import power_of_two
from worker.kernels.paged_attention import SHORT_KEYS
from worker.kernels.step_rows import read_rows
from worker.plan import Plan
from worker.state import StepState
from worker.tail import Sampled

NUM_SLOTS = 4  # requests of a steady batch; more of them divide attention's work less well
MAX_STEADY_LEN = SHORT_KEYS  # tokens of each; attention to more is better cut for what there is


class BatchBuffers:
    """Builds batches for one runner from its step state."""

    def __init__(self, state: StepState, page_size: int, max_chunk_tokens: int) -> None:
        self._state = state
        self._page_size = page_size
        capacity = max_chunk_tokens + max_chunk_tokens % 2  # lines begin at multiples of 16 bytes
        # Token ids, positions and slots of the batch of chunks under way: graphs read them here.
        self._chunk = torch.zeros(3, capacity, dtype=torch.int64, device=state.device)
        num_rows = len(state.active) - 1
        # The same for its requests, when they are few: lines of (row, query_start, seq_len).
        self.num_slots = min(NUM_SLOTS, num_rows)
        width = _width(self.num_slots)
        self._requests = torch.zeros(3, width, dtype=torch.int32, device=state.device)
        num_pages = min(-(-MAX_STEADY_LEN // page_size), state.page_table.shape[1])
        self.max_steady_len = min(MAX_STEADY_LEN, num_pages * page_size)
        self._tables = torch.zeros_like(state.page_table[: self.num_slots, :num_pages])
        self._steady_batches: dict[int, Batch] = {}  # by rows; all over the same buffers
        self._one_each = torch.arange(num_rows + 1, dtype=torch.int32, device=state.device)

    def chunks(self, plan: Plan, num_rows: int = 0, *, steady: bool = False) -> Batch:
        """The batch of a plan of chunks whose pages have been applied to the state.

        Its rows lie in buffers that stay: the batch built last is the only one that holds.

        Args:
            plan: has chunks.
            num_rows: pad it to so many rows, and let host bounds be coarse; 0: neither.
            steady: pad the requests too, to `num_slots` of up to `max_steady_len` tokens, in
                buffers that stay; the host bounds are then the highest that there are, and `host`
                is None. With `num_rows` only.
        """
        counts = [len(chunk.tokens) for chunk in plan.chunks]
        ends = [chunk.start + len(chunk.tokens) for chunk in plan.chunks]
        num_tokens, longest = sum(counts), max(counts)
        tokens, requests = self._upload(plan, counts, ends, self.num_slots if steady else 0)
        table = self._state.page_table
        if num_rows:  # so that few kernels serve all lengths: they are compiled for a tile's rows
            longest = min(num_rows, power_of_two(longest))
        num_rows = max(num_rows, num_tokens)
        chunk_rows(tokens, table, self._page_size, self._chunk, num_rows)
        if steady:
            self._requests.copy_(requests)
            table = table[:, : self._tables.shape[1]]
            torch.index_select(table, 0, self._requests[0, : self.num_slots], out=self._tables)
            return self._steady(num_rows)
        num_pages = -(-plan.max_seq_len_ub // self._page_size)
        num_reqs = len(counts)
        return self._of_chunk(
            num_rows,
            query_start=requests[1, : num_reqs + 1],
            seq_lens=requests[2, :num_reqs],
            page_table=table[:, :num_pages].index_select(0, requests[0, :num_reqs]),
            num_reqs=num_reqs,
            max_query_len=longest,
            max_seq_len_ub=plan.max_seq_len_ub,
            host=HostLengths(counts, ends),
        )

    def _steady(self, num_rows: int) -> Batch:
        if num_rows not in self._steady_batches:
            self._steady_batches[num_rows] = self._of_chunk(
                num_rows,
                query_start=self._requests[1, : self.num_slots + 1],
                seq_lens=self._requests[2, : self.num_slots],
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
        return self._of_chunk(
            num_tokens,
            query_start=self._state.upload([0, num_tokens], torch.int32),
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

    def _upload(
        self, plan: Plan, counts: list[int], ends: list[int], num_slots: int
    ) -> tuple[Tensor, Tensor]:
        """All that a plan's chunks bring, in one copy; with `num_slots` for so many requests.

        The device waits for it, and numpy takes Python's numbers faster than torch does.

        Returns tokens [3, num_tokens] i64 of (id, position, row of the state), and
        [3, num_reqs + 1 or more] i32 of (row, query_start, seq_len). Every line begins at a
        multiple of 16 bytes: kernels are compiled anew for a pointer that does not.
        """
        num_tokens, num_reqs = sum(counts), len(counts)
        stride, width = -(-num_tokens // 2) * 2, _width(max(num_reqs, num_slots))
        host = self._state.staged(3 * stride + 3 * width // 2)
        flat = host.numpy()
        tokens, requests = flat[: 3 * stride].reshape(3, stride), flat[3 * stride :].view(np.int32)
        requests = requests.reshape(3, width)
        starts = [0, *itertools.accumulate(counts)]
        for chunk, first, last in zip(plan.chunks, starts, starts[1:], strict=False):
            tokens[0, first:last] = chunk.tokens
            tokens[1, first:last] = np.arange(chunk.start, chunk.start + last - first)
            tokens[2, first:last] = chunk.row
        requests[0, :num_reqs] = [chunk.row for chunk in plan.chunks]
        requests[1, : num_reqs + 1] = starts
        requests[1, num_reqs + 1 :] = num_tokens
        requests[2, :num_reqs] = ends
        sent = self._state.send(host)
        lines = sent[3 * stride :].view(torch.int32).view(3, width)
        return sent[: 3 * stride].view(3, stride)[:, :num_tokens], lines

    def decode(
        self, rows: Tensor, max_seq_len_ub: int, host: HostLengths | None = None
    ) -> tuple[Batch, Sampled]:
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
        return batch, Sampled(read.live, read.next_positions, read.valid)

    def decode_lengths(self, rows: Sequence[int]) -> HostLengths:
        """Of a decode batch of `rows`, whose plan has been applied to the state."""
        return HostLengths([1] * len(rows), [self._state.seq_len_ub[row] for row in rows])


def _width(num_reqs: int) -> int:
    """i32 words of a line about requests: one more than they are, in whole 16 bytes."""
    return -(-(num_reqs + 1) // 4) * 4
