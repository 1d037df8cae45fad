"""Which rows a step draws a token for, on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from worker.step.state import StepState


@dataclass(slots=True, frozen=True)
class SampledRows:
    """The rows that a token is drawn for; index i belongs to the i-th hidden state."""

    rows: Tensor  # [n] i64; 0 = nobody
    position: Tensor  # [n] i64; index in prompt + output of the token to be drawn
    valid: Tensor  # [n] bool; whether it counts


def decoding_rows(state: StepState, rows: Tensor) -> SampledRows:
    """Those of a decode step over `rows` [n] i64; inactive ones draw for nobody."""
    live = rows * state.active[rows]
    return SampledRows(live, state.ints.seq_len[live] + 1, state.active[live])
