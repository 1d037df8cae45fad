"""Kernels of accept_rows.py."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.ops.jit import gdc_launch_dependents, gdc_wait, tl, triton
from worker.ops.launch import overlap, power_of_two
from worker.step.step_rows import RowColumns


@triton.jit
def _accept_rows_kernel(
    rows, position, valid, draws, stop_ids, min_len, active, seq_len, last_token, max_len, drafts,
    num_accepted, result, stride_drafts,
    WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, STOPS: tl.constexpr, STOPS_2: tl.constexpr,
    DRAFTS: tl.constexpr, DRAFTS_2: tl.constexpr, FORCED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (n). DRAFTS: columns of `drafts`, at least WIDTH - 1."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0)
    row, counts = tl.load(rows + at), tl.load(valid + at) != 0
    place = tl.arange(0, WIDTH_2)
    inside = place < WIDTH
    first = tl.load(position + at * WIDTH)
    here = first + place
    drew = tl.load(draws + at * WIDTH + place, mask=inside, other=-1)
    columns = tl.arange(0, STOPS_2)
    ids = tl.load(stop_ids + at * WIDTH * STOPS + columns, mask=columns < STOPS, other=-1)
    equal = (ids[None, :] == drew[:, None]).to(tl.int32)
    last = (tl.sum(equal, 1) > 0) & (here >= tl.load(min_len + at * WIDTH))
    last = last | (here + 1 >= tl.load(max_len + row))
    has_draft = place < WIDTH - 1
    draft = tl.load(drafts + row * stride_drafts + place, mask=has_draft, other=-1)
    wrong = drew != draft
    if FORCED:
        wrong = place >= tl.load(num_accepted + at * WIDTH)
    # The first place whose draw is the last to count: it ends the row, or no draft equals it.
    num = tl.min(tl.where(last | wrong | (place >= WIDTH - 1), place, WIDTH - 1), 0) + 1
    is_end = place == num - 1
    token = tl.sum(tl.where(is_end, drew, 0), 0)
    finished = tl.sum((is_end & last).to(tl.int32), 0) > 0
    tl.store(seq_len + row, first + num - 1, mask=counts)
    tl.store(last_token + row, token, mask=counts)
    tl.store(active + row, (~finished).to(tl.uint8), mask=counts)
    if DRAFTS > 0:
        all_drafts = tl.arange(0, DRAFTS_2)
        none = tl.full((DRAFTS_2,), -1, tl.int64)
        tl.debug_barrier()  # the drafts above have been read
        tl.store(drafts + row * stride_drafts + all_drafts, none, mask=all_drafts < DRAFTS)
    out = result + at * (2 * WIDTH + 1)
    tl.store(out + place, drew, mask=inside)
    tl.store(out + WIDTH, tl.where(counts, num, 0).to(tl.int64))
    tl.store(out + WIDTH + 1, finished.to(tl.int64))
    tl.store(out + WIDTH + 2 + place, draft, mask=has_draft)


def accept_rows_triton(
    rows: Tensor,
    position: Tensor,
    valid: Tensor,
    draws: Tensor,
    stop_ids: Tensor,
    min_len: Tensor,
    columns: RowColumns,
    num_accepted: Tensor | None = None,
) -> Tensor:
    """See accept_rows_ref; one launch. Rows that are not valid are inactive already."""
    assert all(each.is_contiguous() for each in (rows, position, valid, draws, stop_ids, min_len))
    n, num_stops, num_drafts = len(rows), stop_ids.shape[1], columns.drafts.shape[1]
    width = len(draws) // n
    result = torch.empty(n, 2 * width + 1, dtype=torch.int64, device=rows.device)
    _accept_rows_kernel[(n,)](
        rows, position, valid.view(torch.uint8), draws, stop_ids, min_len,
        columns.active.view(torch.uint8), columns.seq_len, columns.last_token, columns.max_len,
        columns.drafts, position if num_accepted is None else num_accepted, result,
        columns.drafts.stride(0),
        **overlap(
            rows, WIDTH=width, WIDTH_2=power_of_two(width), STOPS=num_stops,
            STOPS_2=power_of_two(num_stops), DRAFTS=num_drafts,
            DRAFTS_2=power_of_two(max(num_drafts, 1)), FORCED=num_accepted is not None,
            num_warps=1,
        ),
    )  # fmt: skip
    return result
