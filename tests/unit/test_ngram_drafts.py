"""Prompt lookup: twin and kernel against a plain loop."""

import random
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.interpreted import INTERPRETED, WHY, compiling
from tests.support.ngram_reference import ngram_reference
from tests.support.pairwise import in_whole
from tests.support.stepped_rows import columns_of, step_of
from worker.drafts import ngram, ngram_triton
from worker.ops.jit import HAS_TRITON
from worker.step.rows import RowColumns, SampledRows

NUM_ROWS, LENGTH, NUM_COLUMNS = 9, 61, 7


def check(op: Any, width: int, seed: int) -> int:
    """One step over rows of every kind; returns how many rows got drafts."""
    rng = random.Random(seed)
    shortest = rng.choice((1, 2, 3))
    longest = shortest + rng.choice((0, 1, 4))
    texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 50))] for _ in range(NUM_ROWS + 1)]
    max_len = [0, *(rng.randrange(len(text) + 1, LENGTH) for text in texts[1:])]
    active = [False, *(rng.random() < 0.8 for _ in texts[1:])]
    kept = [rng.randrange(1, min(width, len(text)) + 1) for text in texts]
    rows = rng.sample(range(1, NUM_ROWS + 1), 6)
    rows[2] = 0  # padding
    stored = torch.full((NUM_ROWS + 1, LENGTH), -1, dtype=torch.int32)
    drawn = torch.zeros(len(rows), 2 * width + 1, dtype=torch.int64)
    position = torch.zeros(len(rows), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        before = len(text) - kept[row]
        stored[row, :before] = torch.tensor(text[:before])
        if row in rows[:2] + rows[3:]:
            i = rows.index(row)
            follows = [*text[before:], *(rng.randrange(3) for _ in range(width - kept[row]))]
            drawn[i, : width + 1] = torch.tensor([*follows, kept[row]])
            position[i] = torch.arange(before, before + width)
    wanted_text = stored.clone()
    for row in set(rows) - {0}:
        wanted_text[row, : len(texts[row])] = torch.tensor(texts[row])
    columns = RowColumns(
        torch.tensor(active),
        torch.tensor([len(text) - 1 for text in texts]),
        torch.tensor([text[-1] for text in texts]),
        torch.tensor(max_len),
        torch.zeros(NUM_ROWS + 1, dtype=torch.int64),
        torch.zeros(NUM_ROWS + 1, 1, dtype=torch.int32),
        torch.full((NUM_ROWS + 1, NUM_COLUMNS), -1),
    )
    index = torch.tensor(rows)
    sampled = SampledRows(index, position.view(-1), index > 0, width, stored.shape[1])
    op(sampled, drawn, columns, stored, range(shortest, longest + 1))
    assert torch.equal(stored[1:], wanted_text[1:])
    wanted = torch.full((NUM_ROWS + 1, NUM_COLUMNS), -1)
    for row in set(rows) - {0}:
        if active[row]:
            found = ngram_reference(texts[row], width - 1, shortest, longest)
            found = found[: max(max_len[row] - len(texts[row]), 0)]
            wanted[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
    assert torch.equal(columns.drafts, wanted)
    return int((wanted >= 0).any(1).sum())


@pytest.mark.parametrize("width", [1, 3, *in_whole((2,), (5,), (8,))])
def test_drafts_are_those_of_a_plain_loop(width: int) -> None:
    ops: list[Any] = [ngram.ngram_drafts_ref]
    if INTERPRETED:
        ops = [ngram_triton.ngram_drafts_triton]
    with mock.patch.object(ngram_triton, "BLOCK", 16):
        found = [check(op, width, seed) for op in ops for seed in range(12)]
    assert (sum(found) > 20) == (width > 1)


@pytest.mark.skipif(INTERPRETED or not HAS_TRITON, reason=WHY)
def test_the_kernel_compiles_for_hopper_without_one() -> None:
    columns, text = columns_of(torch.Generator().manual_seed(0)), torch.zeros(13, 40961).int()
    with compiling(ngram_triton):
        ngram_triton.ngram_drafts_triton(*step_of(columns, 4, 0), columns, text, range(2, 5))
