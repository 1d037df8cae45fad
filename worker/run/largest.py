"""The largest steps, launched op by op: to measure their memory and to compile their kernels.

All tokens and rows are padding. Draws are run for every number of rows for which kernels differ,
so that serving compiles none.
"""

from __future__ import annotations

import torch

from worker.api import MAX_LOGPROBS
from worker.draw.sampler import Draws
from worker.forward.batch import HostLengths
from worker.forward.draws import Masks
from worker.forward.window import WindowShape
from worker.plan import TAILS, Plan, max_rows
from worker.run.base import Decoded, LoadedModel
from worker.run.eager import EagerChunks, EagerDecode, draw_rows
from worker.step.state import SampledRows


@torch.inference_mode()
def run_largest_chunks(loaded: LoadedModel) -> None:
    """Run the largest prefill step; on a prefill worker also the draws of first tokens."""
    batch = loaded.buffers.blank_chunk(int(loaded.config.max_prefill_tokens))
    hidden, _ = EagerChunks(loaded).launch(batch)
    if loaded.decodes:
        return
    most = min(int(loaded.config.max_num_reqs), int(loaded.config.max_prefill_tokens))
    for num_rows in _sizes(most):
        rows = torch.zeros(num_rows, dtype=torch.int64, device=hidden.device)
        sampled = SampledRows(rows, rows, torch.zeros_like(rows, dtype=torch.bool))
        for tail in TAILS[1:]:
            draw_rows(loaded, Decoded(hidden[rows], sampled, None, "", 0), Draws(tail))


@torch.inference_mode()
def run_largest_windows(loaded: LoadedModel) -> None:
    """Run the largest decode step of each width, and the draws with penalties and logprobs."""
    decode, device = EagerDecode(loaded), loaded.state.device
    plan = Plan(0, tail=TAILS[-1], penalized=True, num_logprobs=MAX_LOGPROBS)
    for width in loaded.widths:
        num_rows = max_rows(width, int(loaded.config.max_num_reqs))
        rows = torch.zeros(num_rows, dtype=torch.int64, device=device)
        host = HostLengths([1] * num_rows, [loaded.max_len] * num_rows) if width == 1 else None
        window = WindowShape(width, loaded.max_len + width - 1, host)
        decode.step(rows, window, TAILS[-1])
        forwarded = decode.step(rows, window)
        assert forwarded.sampled is not None
        for num in _sizes(num_rows):
            hidden, sampled = forwarded.hidden[: num * width], forwarded.sampled.first(num)
            first = forwarded._replace(hidden=hidden, sampled=sampled)
            decode.draw(first, plan, Masks.none(num * width, loaded.model.spec.vocab_size))
            if loaded.drafter is not None and width == 1:
                loaded.drafter.seed(rows[:num])


def _sizes(most: int) -> set[int]:
    return {most, *(1 << i for i in range(most.bit_length()))}
