"""A Plan made into a Batch: every tensor of one forward, built whole."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.batch import Batch
from worker.kernels.step_rows import read_rows
from worker.plan import Plan
from worker.state import StepState
from worker.tail import Sampled


class BatchBuffers:
    """Builds batches for one runner from its step state."""

    def __init__(self, state: StepState, page_size: int) -> None:
        self._state = state
        self._page_size = page_size
        num_rows = len(state.active) - 1
        self._one_each = torch.arange(num_rows + 1, dtype=torch.int32, device=state.device)

    def chunks(self, plan: Plan) -> Batch:
        """The batch of a plan of chunks whose row changes have been applied to the state."""
        upload = self._state.upload
        counts = [len(chunk.tokens) for chunk in plan.chunks]
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        input_ids = [token for chunk in plan.chunks for token in chunk.tokens]
        positions = [chunk.start + i for chunk in plan.chunks for i in range(len(chunk.tokens))]
        owner = [i for i, count in enumerate(counts) for _ in range(count)]
        rows = upload([chunk.row for chunk in plan.chunks], torch.int64)
        ends = [chunk.start + len(chunk.tokens) for chunk in plan.chunks]
        table = self._table(rows, plan.max_seq_len_ub)
        at = upload(positions, torch.int64)
        return Batch(
            input_ids=upload(input_ids, torch.int64),
            positions=at,
            slot_mapping=self._slots(table[upload(owner, torch.int64)], at),
            query_start=upload(starts, torch.int32),
            seq_lens=upload(ends, torch.int32),
            page_table=table,
            num_reqs=len(plan.chunks),
            num_tokens=len(input_ids),
            max_query_len=max(counts),
            max_seq_len_ub=plan.max_seq_len_ub,
        )

    def blank_chunk(self, num_tokens: int) -> Batch:
        """A prompt of `num_tokens` that writes to the sink alone, for trials."""
        device = self._state.device
        zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        num_pages = -(-num_tokens // self._page_size)
        return Batch(
            input_ids=zeros,
            positions=torch.arange(num_tokens, device=device),
            slot_mapping=zeros,
            query_start=self._state.upload([0, num_tokens], torch.int32),
            seq_lens=self._state.upload([num_tokens], torch.int32),
            page_table=torch.zeros(1, num_pages, dtype=torch.int32, device=device),
            num_reqs=1,
            num_tokens=num_tokens,
            max_query_len=num_tokens,
            max_seq_len_ub=num_tokens,
        )

    def decode(self, rows: Tensor, max_seq_len_ub: int) -> tuple[Batch, Sampled]:
        """One token for each of `rows` [n] i64; device work only, on shapes the host knows.

        Those that are inactive by now are padding, and so is row 0.
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
        )
        return batch, Sampled(read.live, read.next_positions, read.valid)

    def _table(self, rows: Tensor, max_seq_len: int) -> Tensor:
        """[len(rows), pages of max_seq_len] i32."""
        num_pages = -(-max_seq_len // self._page_size)
        return self._state.page_table[rows, :num_pages]

    def _slots(self, table: Tensor, positions: Tensor) -> Tensor:
        """[num_tokens] i64 slots of `positions`, given each token's own row of the table."""
        page = table.gather(1, (positions // self._page_size)[:, None])[:, 0].to(torch.int64)
        return page * self._page_size + positions % self._page_size
