"""The sampling tail: from hidden states to drawn tokens and the step state after them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.api import TokenLogprob
from worker.kernels.step.step_rows import leave_rows
from worker.models.decoder import Decoder
from worker.plan import Drawn, Tail
from worker.sampling.sampler import SamplingRows, logprobs, sample
from worker.step.state import SampledRows, StepState


@dataclass(slots=True)
class Result:
    """What a tail has drawn, on its way to the host."""

    drawn: Tensor  # [num sampled rows, 3] i64 of (token, valid, finished)
    values: Tensor | None = None  # [num sampled rows, 1 + num_logprobs] f32
    ids: Tensor | None = None  # [num sampled rows, 1 + num_logprobs] i64

    def to_host(self) -> Result:
        """Enqueue copies to pinned memory on the current stream."""

        def copy(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return host.copy_(tensor, non_blocking=True)

        drawn = copy(self.drawn)
        assert drawn is not None
        return Result(drawn, copy(self.values), copy(self.ids))

    def read(self) -> list[Drawn]:
        """Read one entry for each sampled row; only once the device has finished."""
        logprobs: list[TokenLogprob | None] = [None] * len(self.drawn)
        if self.values is not None and self.ids is not None:
            pairs = zip(self.values.tolist(), self.ids.tolist(), strict=True)
            logprobs = [TokenLogprob(v[0], tuple(zip(i[1:], v[1:], strict=True))) for v, i in pairs]
        return [
            Drawn(token, bool(valid), bool(finished), logprob)
            for (token, valid, finished), logprob in zip(self.drawn.tolist(), logprobs, strict=True)
        ]


def draw(
    model: Decoder,
    state: StepState,
    sampled: SampledRows,
    hidden: Tensor,
    tail: Tail,
    *,
    penalized: bool = False,
    num_logprobs: int = -1,
    mask: Tensor | None = None,
) -> Result:
    """Draw one token for each of `sampled` and advance its row in the step state. Never waits.

    Args:
        model: has the head.
        state: of the rows; changed.
        sampled: rows to draw for, with their positions.
        hidden: [n, hidden] after the final norm.
        tail: which kernels are needed, see `sampler.sample`.
        penalized: whether some row has a penalty slot.
        num_logprobs: likeliest alternatives to report; -1 = no logprobs.
        mask: what grammars allow, [n, words] i32, on the device.
    """
    rows, position = sampled.rows, sampled.position
    params = SamplingRows.gather(state, rows, position)
    logits = model.logits(hidden)
    penalties = state.penalties if penalized else None
    token = sample(logits, params, tail, penalties, mask)
    drawn = leave_rows(
        rows, position, sampled.valid, token, params.stop_ids, params.min_len, state.columns
    )
    if penalties is not None:
        # No two rows share a slot but 0, whose counts are never read.
        penalties.counts[params.penalty_slot, token] += 1
    result = Result(drawn)
    if num_logprobs >= 0:
        result.values, result.ids = logprobs(logits, token, num_logprobs)
    return result
