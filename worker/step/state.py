"""Device-resident step state: what the device knows of each row without asking the host.

Filled by `apply_rows` and `apply_pages` from a Plan's starts, releases and pages (those of chunks
come with their batch, see `BatchBuffers.chunks`), and by the sampling tail of each step. Row 0 is
the sink: inactive and padded rows alias it, so whatever they write is harmless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from worker.api import MAX_STOP_IDS, Sampling
from worker.kernels.step.step_rows import RowColumns
from worker.plan import Plan, RowPages, RowStart

ALIGNMENT = 16  # elements; columns begin at multiples of it
NO_SAMPLING = Sampling(max_tokens=0, temperature=0.0)


class StepState:
    """Tensors by row, [num_rows + 1, ...]; column meanings beside each."""

    def __init__(
        self,
        num_rows: int,
        max_pages: int,
        eos_ids: Sequence[int],
        device: torch.device,
        *,
        num_extras: int,
        vocab_size: int,
    ) -> None:
        n = num_rows + 1
        self.device = device
        self._pin = device.type == "cuda"  # memory of the host that copies are made from
        self._eos_ids = tuple(eos_ids)

        def columns(num: int, dtype: torch.dtype) -> Tensor:
            padded = -(-n // ALIGNMENT) * ALIGNMENT  # so that all begin alike for the kernels
            return torch.zeros(num, padded, dtype=dtype, device=device)

        # What a row starts with, a line for each column: one copy moves them all.
        self._ints, self._floats = columns(7, torch.int64), columns(6, torch.float32)
        ints, floats = self._ints[:, :n], self._floats[:, :n]
        self.page_table = torch.zeros(n, max_pages, dtype=torch.int32, device=device)
        self._flat_table = self.page_table.view(-1)
        self.active = torch.zeros(n, dtype=torch.bool, device=device)
        self.seq_len = ints[0]  # tokens whose KV is in the pages
        self.last_token = ints[1]  # token at position seq_len, the next decode input
        self.max_len = ints[2]  # tokens of prompt + output at which the row finishes
        self.min_len = ints[3]  # no stop token is drawn at a position below this
        # Ids that end the row; -1 = unused place.
        self.stop_ids = torch.full((n, MAX_STOP_IDS), -1, dtype=torch.int64, device=device)
        self.seed = ints[4]
        self.temperature = floats[0]  # 0 = greedy
        self.top_k = ints[5]  # 0 = off
        self.top_p = floats[1].fill_(1.0)
        self.min_p = floats[2]
        self.presence_penalty = floats[3]
        self.frequency_penalty = floats[4]
        self.repetition_penalty = floats[5].fill_(1.0)
        self.extra = ints[6]  # place in the tables of `extras`; 0 = the neutral one
        # Host, counted from plans alone: KV length of each row after the last step applied. The
        # device's own for rows that are active there; those that ended unseen count on.
        self.seq_len_ub = [0] * n
        self.columns = RowColumns(
            self.active, self.seq_len, self.last_token, self.max_len, self.page_table
        )
        self.extras = Extras(num_extras, vocab_size, device)

    def upload(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        """A host list as a device tensor, without a host sync."""
        host = torch.tensor(values, dtype=dtype, pin_memory=self._pin)
        return host.to(self.device, non_blocking=True)

    def send(self, host: Tensor) -> Tensor:
        """A host tensor on the device, without a host sync."""
        if self._pin:
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)

    def apply(self, plan: Plan) -> None:
        """All changes of `plan`, ordered on the current stream."""
        self.apply_rows(plan)
        self.apply_pages(plan.pages)

    def apply_pages(self, brought: Sequence[RowPages]) -> None:
        """New entries of the page tables; `BatchBuffers.chunks` does it for rows with chunks."""
        if not brought:
            return
        num, width = sum(len(each.pages) for each in brought), self.page_table.shape[1]
        host = self._staged(num + -(-num // 2))  # where they go in i64, then what they are in i32
        flat, last = host.numpy(), 0
        pages = flat[num:].view(np.int32)
        for each in brought:
            first, last = last, last + len(each.pages)
            assert each.first + len(each.pages) <= width
            begin = each.row * width + each.first
            flat[first:last] = np.arange(begin, begin + len(each.pages))
            pages[first:last] = each.pages
        at, sent = host.to(self.device, non_blocking=True).split_with_sizes([num, len(host) - num])
        self._flat_table.index_copy_(0, at, sent.view(torch.int32)[:num])

    def _staged(self, num: int) -> Tensor:
        """[num] i64 of the host, of any value, from which copies go without a detour.

        Freed while a copy is under way, it is not given to anybody else before that has ended.
        """
        return torch.empty(num, dtype=torch.int64, pin_memory=self._pin)

    def apply_rows(self, plan: Plan) -> None:
        """Releases, then starts: what a decode step and every tail reads."""
        if plan.releases:
            self.active.index_fill_(0, self.upload(plan.releases, torch.int64), False)
        if plan.starts:
            self._start(plan.starts)
        for start in plan.starts:
            self.seq_len_ub[start.row] = start.seq_len
        for chunk in plan.chunks:
            self.seq_len_ub[chunk.row] = chunk.start + len(chunk.tokens)
        for row in plan.decode:
            self.seq_len_ub[row] += 1

    def _start(self, starts: Sequence[RowStart]) -> None:
        sampling = [start.sampling or NO_SAMPLING for start in starts]
        ints: list[tuple[int, ...]] = [
            (
                start.row, start.active, start.seq_len, start.last_token, start.max_len,
                start.min_len, each.seed, each.top_k, start.extra,
            )
            for start, each in zip(starts, sampling, strict=True)
        ]  # fmt: skip
        floats = [
            (
                each.temperature, each.top_p, each.min_p,
                each.presence_penalty, each.frequency_penalty, each.repetition_penalty,
            )
            for each in sampling
        ]  # fmt: skip
        parts = (
            torch.tensor(ints, dtype=torch.int64).T.reshape(-1),
            torch.tensor([self._stop_ids(each) for each in sampling]).view(-1),
            torch.tensor(floats, dtype=torch.float32).T.reshape(-1).view(torch.int64),
        )
        sizes = [len(part) for part in parts]
        host = torch.cat(parts, out=self._staged(sum(sizes)))
        sent = host.to(self.device, non_blocking=True).split(sizes)
        rows, active, *_ = lines = sent[0].view(-1, len(starts))
        self.active.index_copy_(0, rows, active.bool())
        self._ints.index_copy_(1, rows, lines[2:])
        self._floats.index_copy_(1, rows, sent[2].view(torch.float32).view(-1, len(starts)))
        self.stop_ids.index_copy_(0, rows, sent[1].view(len(starts), -1))
        for start in starts:
            if start.extra:
                self.extras.fill(start, self.upload)

    def _stop_ids(self, sampling: Sampling) -> list[int]:
        ids = [*sampling.stop_ids, *(() if sampling.ignore_eos else self._eos_ids)]
        assert len(ids) <= MAX_STOP_IDS
        return ids + [-1] * (MAX_STOP_IDS - len(ids))


class Extras:
    """Per-request tables over the vocabulary, for the few rows that need them.

    Entry 0 is neutral: rows without a place alias it. What such rows add to its counts is never
    seen, because their penalties are off.
    """

    def __init__(self, num_extras: int, vocab_size: int, device: torch.device) -> None:
        shape = num_extras + 1, vocab_size
        self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
        self.counts = torch.zeros(shape, dtype=torch.int32, device=device)  # of output tokens
        self.bias = torch.zeros(shape, dtype=torch.float32, device=device)

    def fill(
        self, start: RowStart, upload: Callable[[Sequence[object], torch.dtype], Tensor]
    ) -> None:
        """Begin a request's entries anew from its history."""
        at = start.extra
        for table in (self.in_prompt, self.counts, self.bias):
            table[at].zero_()
        if start.prompt:
            self.in_prompt[at].index_fill_(0, upload(start.prompt, torch.int64), True)
        drawn = Counter(start.output)
        if drawn:
            ids = upload(list(drawn), torch.int64)
            self.counts[at].index_copy_(0, ids, upload(list(drawn.values()), torch.int32))
        if start.sampling is not None and start.sampling.logit_bias:
            ids, values = zip(*start.sampling.logit_bias, strict=True)
            self.bias[at].index_copy_(0, upload(ids, torch.int64), upload(values, torch.float32))
