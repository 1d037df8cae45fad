"""Windows: makes rows of the step state into the Batch of a decode step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.forward.batch import Batch, HostLengths
from worker.forward.window import WindowShape
from worker.step.state import SampledRows, StepState
from worker.step.step_rows import read_rows


class Windows:
    """Builds batches of verify windows for one runner; page_size: tokens a page."""

    def __init__(self, state: StepState, page_size: int) -> None:
        self._state, self._page_size = state, page_size
        ends = torch.arange(len(state.active), dtype=torch.int32, device=state.device)
        max_width = state.columns.drafts.shape[1] + 1
        self._query_start = [ends * width for width in range(max_width + 1)]  # by width

    def batch(self, rows: Tensor, window: WindowShape) -> tuple[Batch, SampledRows]:
        """A window for each of `rows` [n] i64. Enqueues device work only.

        Rows that are inactive on the device, and row 0, are padding.
        """
        width, max_seq_len_ub, host = window
        num_rows, num_pages = len(rows), -(-max_seq_len_ub // self._page_size)
        read = read_rows(rows, self._state.columns, self._page_size, num_pages, width)
        batch = Batch(
            input_ids=read.input_ids,
            positions=read.positions,
            slot_mapping=read.slots,
            query_start=self._query_start[width][: num_rows + 1],
            seq_lens=read.seq_lens,
            page_table=read.table,
            num_reqs=num_rows,
            num_tokens=num_rows * width,
            max_query_len=width,
            max_seq_len_ub=max_seq_len_ub,
            host=host,
        )
        sampled = SampledRows(
            read.live, read.next_positions, read.valid, width, max_seq_len_ub=max_seq_len_ub
        )
        return batch, sampled

    def lengths(self, rows: Sequence[int]) -> HostLengths:
        """Of a batch of `rows` of width 1, whose plan has been applied to the state."""
        return HostLengths([1] * len(rows), [self._state.seq_len_ub[row] for row in rows])
