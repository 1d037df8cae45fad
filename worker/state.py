"""Device-resident step state: what the device knows of each row without asking the host.

Filled by `apply` from a Plan's starts, pages and releases, and by the sampling tail of each step.
Row 0 is the sink: inactive and padded rows alias it, so whatever they write is harmless.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from worker.api import MAX_STOP_IDS, Sampling
from worker.kernels.step_rows import RowColumns
from worker.plan import Plan, RowStart

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
        self._eos_ids = tuple(eos_ids)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(n, *shape, dtype=torch.int64, device=device)

        def floats(value: float) -> Tensor:
            return torch.full((n,), value, dtype=torch.float32, device=device)

        self.page_table = torch.zeros(n, max_pages, dtype=torch.int32, device=device)
        self.active = torch.zeros(n, dtype=torch.bool, device=device)
        self.seq_len = ints()  # tokens whose KV is in the pages
        self.last_token = ints()  # token at position seq_len, the next decode input
        self.max_len = ints()  # tokens of prompt + output at which the row finishes
        self.min_len = ints()  # no stop token is drawn at a position below this
        self.stop_ids = ints(MAX_STOP_IDS) - 1  # ids that end the row; -1 = unused place
        self.seed = ints()
        self.temperature = floats(0.0)  # 0 = greedy
        self.top_k = ints()  # 0 = off
        self.top_p = floats(1.0)
        self.min_p = floats(0.0)
        self.presence_penalty = floats(0.0)
        self.frequency_penalty = floats(0.0)
        self.repetition_penalty = floats(1.0)
        self.extra = ints()  # place in the tables of `extras`; 0 = the neutral one
        self.columns = RowColumns(
            self.active, self.seq_len, self.last_token, self.max_len, self.page_table
        )
        self.extras = Extras(num_extras, vocab_size, device)

    def upload(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        """A host list as a device tensor, without a host sync."""
        return self.send(torch.tensor(values, dtype=dtype))

    def send(self, host: Tensor) -> Tensor:
        """A host tensor on the device, without a host sync."""
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    def apply(self, plan: Plan) -> None:
        """Releases, then starts, then pages of `plan`, ordered on the current stream."""
        if plan.releases:
            self.active.index_fill_(0, self.upload(plan.releases, torch.int64), False)
        if plan.starts:
            self._start(plan.starts)
        if plan.pages:
            rows = [each.row for each in plan.pages for _ in each.pages]
            cols = [each.first + i for each in plan.pages for i in range(len(each.pages))]
            pages = [page for each in plan.pages for page in each.pages]
            where = self.upload(rows, torch.int64), self.upload(cols, torch.int64)
            self.page_table.index_put_(where, self.upload(pages, torch.int32))

    def _start(self, starts: Sequence[RowStart]) -> None:
        rows = self.upload([start.row for start in starts], torch.int64)
        sampling = [start.sampling or NO_SAMPLING for start in starts]
        columns: list[tuple[Tensor, list[object]]] = [
            (self.active, [start.active for start in starts]),
            (self.seq_len, [start.seq_len for start in starts]),
            (self.last_token, [start.last_token for start in starts]),
            (self.max_len, [start.max_len for start in starts]),
            (self.min_len, [start.min_len for start in starts]),
            (self.stop_ids, [self._stop_ids(each) for each in sampling]),
            (self.seed, [each.seed for each in sampling]),
            (self.temperature, [each.temperature for each in sampling]),
            (self.top_k, [each.top_k for each in sampling]),
            (self.top_p, [each.top_p for each in sampling]),
            (self.min_p, [each.min_p for each in sampling]),
            (self.presence_penalty, [each.presence_penalty for each in sampling]),
            (self.frequency_penalty, [each.frequency_penalty for each in sampling]),
            (self.repetition_penalty, [each.repetition_penalty for each in sampling]),
            (self.extra, [start.extra for start in starts]),
        ]
        for column, values in columns:
            column[rows] = self.upload(values, column.dtype)
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
