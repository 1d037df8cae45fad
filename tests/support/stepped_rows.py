"""Rows of the step state just behind a step, drawn at random, for tests of what follows it."""

from dataclasses import fields, replace

import torch
from torch import Tensor

from worker.draw.sampler import SamplingRows
from worker.step.rows import RowColumns, SampledRows

PAGE_SIZE, NUM_PAGES, NUM_ROWS = 4, 9, 12


def columns_of(generator: torch.Generator) -> RowColumns:
    """Rows of a state in the middle of things; some have ended."""

    def drawn(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (NUM_ROWS + 1,), generator=generator)

    table = torch.randperm((NUM_ROWS + 1) * NUM_PAGES, generator=generator) + 1
    table = table.view(NUM_ROWS + 1, NUM_PAGES).int()
    table[0] = 0
    max_len = drawn(20, PAGE_SIZE * NUM_PAGES + 1)
    seq_len = torch.minimum(drawn(0, PAGE_SIZE * NUM_PAGES), max_len - 1)
    active = drawn(0, 4) > 0
    active[0], seq_len[0], max_len[0] = False, 0, 0
    drafts = torch.full((NUM_ROWS + 1, 7), -1)
    return RowColumns(active, seq_len, drawn(3, 97), max_len, seq_len.clone(), table, drafts)


def step_of(columns: RowColumns, width: int, seed: int) -> tuple[SampledRows, Tensor]:
    """(rows, accept_rows' result) of a step that has just led to `columns`; row 0 is padding."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(NUM_ROWS, generator=generator)[:7] + 1
    rows[3] = 0
    valid = rows > 0
    num = torch.randint(1, width + 1, (7,), generator=generator)
    num = torch.minimum(num, columns.seq_len[rows].clamp(min=1)) * valid
    first = columns.seq_len[rows] - num + 1  # position of the first draw
    position = (first[:, None] + torch.arange(width)).view(-1)
    draws = torch.randint(3, 97, (7, width), generator=generator)
    ended = (~columns.active[rows]).long()
    drafts = torch.full((7, width - 1), -1)
    drawn = torch.cat((draws, num[:, None], ended[:, None], drafts), 1)
    return SampledRows(rows, position, valid, width), drawn


def pick(rows: SamplingRows, index: list[int]) -> SamplingRows:
    """Some of the rows of a draw."""
    return replace(rows, **{each.name: getattr(rows, each.name)[index] for each in fields(rows)})
