"""Gather rows of many small columns in one launch: what sampling reads of the step state."""

from __future__ import annotations

from torch import Tensor

from worker.ops.op import op

Ints = tuple[Tensor, Tensor, Tensor, Tensor]  # each [num_rows] i64


Floats = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # each [num_rows] f32


Gathered = tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]


def gather_rows_ref(ints: Ints, floats: Floats, table: Tensor, rows: Tensor) -> Gathered:
    """Each column and the table at `rows`.

    rows: [n] i64; table: [num_rows, width] i64; all tensors contiguous.
    """
    return (
        tuple(column[rows] for column in ints),
        tuple(column[rows] for column in floats),
        table[rows],
    )


gather_rows = op(gather_rows_ref)
