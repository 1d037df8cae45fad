"""StepState: what the device keeps of rows between steps, without asking the host.

`apply_rows` and `apply_pages` fill it from a Plan; the tails of steps advance it. (Pages of
rows with chunks come with `BatchBuffers.chunks`.) Row 0 is the sink: it stands in for inactive and
padded rows, so whatever they write is harmless.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from worker.api import MAX_STOP_IDS, Sampling
from worker.config.checkpoint.delta_shape import snapshot_grid
from worker.forward.batch import Batch, HostLengths, StateWindows, WindowShape
from worker.forward.draws import Changes, Masks
from worker.plan import Plan, RowPages, RowStart
from worker.step.rows import RowColumns, SampledRows, accept_rows, read_rows

ALIGNMENT = 16  # elements; columns begin at multiples of it

T = TypeVar("T")


class IntColumns(NamedTuple, Generic[T]):
    """The i64 columns. T is a tensor [num_rows + 1] in StepState, or the value of one new row."""

    seq_len: T  # tokens whose KV is in the pages
    last_token: T  # token at position seq_len, the next decode input
    max_len: T  # tokens of prompt + output at which the row finishes
    min_len: T  # no stop token is drawn at a position below it
    seed: T
    top_k: T  # 0 = off
    penalty_slot: T  # index into `StepState.penalties`; 0 = neutral
    state_slot: T  # of the row's state, where layers are recurrent
    folded: T  # tokens that are in that state; see recurrent.delta_net
    snap_slot: T  # where the row stores states at the grid's lines; 0: nowhere


class FloatColumns(NamedTuple, Generic[T]):
    """The f32 columns; T as in IntColumns, of floats."""

    temperature: T  # 0 = greedy
    top_p: T
    min_p: T
    presence_penalty: T
    frequency_penalty: T
    repetition_penalty: T


class StateShape(NamedTuple):
    """Sizes of a step state."""

    num_rows: int  # requests at a time, the sink not counted
    max_pages: int  # of one row
    eos_ids: Sequence[int]  # end a row that does not ignore them
    num_penalty_slots: int  # rows at a time that may have penalties or a logit bias
    vocab_size: int  # width of the penalty tables
    max_width: int = 1  # tokens of the widest verify window
    max_text: int = 0  # tokens of a row whose ids are kept; 0: none are


class PenaltyTables:
    """Tables over the vocabulary for penalties and logit bias, by penalty slot.

    Slot 0 is neutral: rows without penalties use it, and add to counts that are never read.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        shape = num_slots + 1, vocab_size
        self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
        self.counts = torch.zeros(shape, dtype=torch.int32, device=device)  # of output tokens
        self.bias = torch.zeros(shape, dtype=torch.float32, device=device)
        self.biased = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)

    def changes(self, masks: Masks | None = None, drafts: Tensor | None = None) -> Changes:
        """The record that draws read: these tables, with `masks` and `drafts` (see `Changes`)."""
        return Changes(self.counts, self.in_prompt, self.bias, self.biased, masks, drafts)

    def fill(self, start: RowStart, upload: Callable[[Sequence[Any], torch.dtype], Tensor]) -> None:
        """Fill the slot of a request that starts, from its prompt and output."""
        slot, biases = start.penalty_slot, start.sampling.logit_bias
        for table in (self.in_prompt, self.counts, self.bias):
            table[slot].zero_()
        self.biased[slot].fill_(bool(biases))
        if start.prompt:
            self.in_prompt[slot].index_fill_(0, upload(start.prompt, torch.int64), True)
        if drawn := Counter(start.output):
            ids = upload(list(drawn), torch.int64)
            self.counts[slot].index_copy_(0, ids, upload(list(drawn.values()), torch.int32))
        if biases:
            ids, values = zip(*biases, strict=True)
            self.bias[slot].index_copy_(0, upload(ids, torch.int64), upload(values, torch.float32))


class StepState:
    """Tensors [num_rows + 1, ...] of a row's state, on one device."""

    def __init__(self, shape: StateShape, device: torch.device) -> None:
        num_rows, max_pages, eos_ids, num_penalty_slots, vocab_size, max_width, max_text = shape
        n = num_rows + 1
        self.device = device
        self._pin = device.type == "cuda"  # whether host tensors are pinned
        self._eos_ids = tuple(eos_ids)
        padded = -(-n // ALIGNMENT) * ALIGNMENT  # all columns begin aligned for the kernels
        # One line a column, so that one copy moves what a row starts with.
        num_ints, num_floats = len(IntColumns._fields), len(FloatColumns._fields)
        self._ints = torch.zeros(num_ints, padded, dtype=torch.int64, device=device)
        self._floats = torch.zeros(num_floats, padded, dtype=torch.float32, device=device)
        self.ints = IntColumns(*self._ints[:, :n])
        self.floats = FloatColumns(*self._floats[:, :n])
        self.active = torch.zeros(n, dtype=torch.bool, device=device)
        self.page_table = torch.zeros(n, max_pages, dtype=torch.int32, device=device)
        self._flat_table = self.page_table.view(-1)
        # Ids that end the row; -1 = unused.
        self.stop_ids = torch.zeros(n, MAX_STOP_IDS, dtype=torch.int64, device=device)
        # Bounds of KV lengths by row after the last step applied, counted on the host from plans.
        # Exact if all widths were 1 and the row has not ended on the device.
        self.seq_len_ub = [0] * n
        self.columns = RowColumns(
            self.active,
            self.ints.seq_len,
            self.ints.last_token,
            self.ints.max_len,
            self.ints.folded,
            self.page_table,
            torch.zeros(n, max_width - 1, dtype=torch.int64, device=device),
        )
        # Known tokens of the rows by position, for a drafter that reads text; None: there is none.
        self.text: Tensor | None = None
        if max_text:
            self.text = torch.full((n, max_text), -1, dtype=torch.int32, device=device)
        self.penalties = PenaltyTables(num_penalty_slots, vocab_size, device)
        self.accept: Callable[..., Tensor] = accept_rows
        self.reset()

    def reset(self) -> None:
        """Reset rows and page table (not the penalty tables) to their initial state."""
        for table in (self._ints, self._floats, self.active, self.page_table):
            table.zero_()
        self.floats.top_p.fill_(1.0)
        self.floats.repetition_penalty.fill_(1.0)
        self.stop_ids.fill_(-1)
        self.columns.drafts.fill_(-1)
        self.seq_len_ub = [0] * len(self.seq_len_ub)

    def upload(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        """Copy a host list to the device without waiting."""
        host = torch.tensor(values, dtype=dtype, pin_memory=self._pin)
        return host.to(self.device, non_blocking=True)

    def pinned(self, host: Tensor) -> Tensor:
        """On CUDA, a copy in pinned memory, from which copies to the device do not wait."""
        return host.pin_memory() if self._pin else host

    def apply(self, plan: Plan) -> None:
        """Apply all changes of `plan` on the current stream."""
        self.apply_rows(plan)
        self.apply_pages(plan.pages)

    def apply_pages(self, new: Sequence[RowPages]) -> None:
        """Write new page-table entries (those of rows with chunks are uploaded with the batch)."""
        if not new:
            return
        num, width = sum(len(entry.pages) for entry in new), self.page_table.shape[1]
        host = self._staged(num + -(-num // 2))  # table indices in i64, then page ids in i32
        flat, last = host.numpy(), 0
        pages = flat[num:].view(np.int32)
        for entry in new:
            first, last = last, last + len(entry.pages)
            assert entry.first + len(entry.pages) <= width
            begin = entry.row * width + entry.first
            flat[first:last] = np.arange(begin, begin + len(entry.pages))
            pages[first:last] = entry.pages
        at, sent = host.to(self.device, non_blocking=True).split_with_sizes([num, len(host) - num])
        self._flat_table.index_copy_(0, at, sent.view(torch.int32)[:num])

    def _staged(self, num: int) -> Tensor:
        # It may be freed at once: torch reuses pinned memory after the copies from it have ended.
        return torch.empty(num, dtype=torch.int64, pin_memory=self._pin)

    def apply_rows(self, plan: Plan) -> None:
        """Apply releases, then starts and snapshots, and update seq_len_ub."""
        if plan.releases:
            self.active.index_fill_(0, self.upload(plan.releases, torch.int64), False)
        if plan.starts:
            self._start(plan.starts)
            for start in plan.starts:
                self.seq_len_ub[start.row] = start.seq_len
        if plan.snapshots:
            rows, slots = self.upload(plan.snapshots, torch.int64).T
            self.ints.snap_slot.index_copy_(0, rows, slots)
        for chunk in plan.chunks:
            self.seq_len_ub[chunk.row] = chunk.start + len(chunk.tokens)
        for row in plan.decode:
            self.seq_len_ub[row] += plan.width

    def _start(self, starts: Sequence[RowStart]) -> None:
        ints = [
            IntColumns(
                x.seq_len, x.last_token, x.max_len, x.min_len,
                x.sampling.seed, x.sampling.top_k, x.penalty_slot, x.state_slot, x.seq_len, 0,
            )
            for x in starts
        ]  # fmt: skip
        floats = [[getattr(x.sampling, name) for name in FloatColumns._fields] for x in starts]
        rows_active = [(start.row, start.active) for start in starts]
        stops = [self._stop_ids(start.sampling) for start in starts]
        parts = (
            torch.tensor(rows_active, dtype=torch.int64).T.reshape(-1),
            torch.tensor(ints, dtype=torch.int64).T.reshape(-1),
            torch.tensor(stops).view(-1),
            torch.tensor(floats, dtype=torch.float32).T.reshape(-1).view(torch.int64),
        )
        sizes = [len(part) for part in parts]
        host = torch.cat(parts, out=self._staged(sum(sizes)))
        sent = host.to(self.device, non_blocking=True).split(sizes)
        rows, active = sent[0].view(2, -1)
        self.active.index_copy_(0, rows, active.bool())
        self._ints.index_copy_(1, rows, sent[1].view(-1, len(starts)))
        self.stop_ids.index_copy_(0, rows, sent[2].view(len(starts), -1))
        if self.columns.drafts.shape[1]:
            self.columns.drafts.index_fill_(0, rows, -1)
        self._floats.index_copy_(1, rows, sent[3].view(torch.float32).view(-1, len(starts)))
        for start in starts:
            if start.penalty_slot:
                self.penalties.fill(start, self.upload)
            if start.text and self.text is not None:
                text = self.upload(start.text, torch.int32)
                self.text[start.row, : len(text)].copy_(text)

    def _stop_ids(self, sampling: Sampling) -> list[int]:
        ids = [*sampling.stop_ids, *(() if sampling.ignore_eos else self._eos_ids)]
        assert len(ids) <= MAX_STOP_IDS
        return ids + [-1] * (MAX_STOP_IDS - len(ids))


class Windows:
    """Builds batches of verify windows for one runner; page_size: tokens a page.

    recurrent: batches have `states`.
    """

    def __init__(self, state: StepState, page_size: int, *, recurrent: bool = False) -> None:
        self._state, self._page_size, self._recurrent = state, page_size, recurrent
        ends = torch.arange(len(state.active), dtype=torch.int32, device=state.device)
        max_width = state.columns.drafts.shape[1] + 1
        self._query_start = [ends * width for width in range(max_width + 1)]  # by width

    def batch(self, rows: Tensor, window: WindowShape) -> tuple[Batch, SampledRows]:
        """Windows for `rows` [n] i64; inactive ones are padding. Device work only."""
        width, max_seq_len_ub, host = window
        num_pages = -(-max_seq_len_ub // self._page_size)
        read = read_rows(rows, self._state.columns, self._page_size, num_pages, width)
        batch = read.batch(self._query_start[width], width, max_seq_len_ub, host)
        if self._recurrent:
            ints = self._state.ints
            columns = ints.state_slot, ints.folded, ints.seq_len, ints.snap_slot
            states = StateWindows(read.live, *columns, width, snapshot_grid(self._page_size))
            batch = replace(batch, states=states)
        return batch, SampledRows(read.live, read.next_positions, read.valid, width, max_seq_len_ub)

    def lengths(self, rows: Sequence[int]) -> HostLengths:
        """Lengths of `rows` at width 1, after their plan is applied."""
        return HostLengths([1] * len(rows), [self._state.seq_len_ub[row] for row in rows])
