"""Every op launched by the host, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from worker.api import MAX_LOGPROBS
from worker.attention.base import AttentionBackend
from worker.forward.batch import Batch, HostLengths
from worker.forward.context import forward_context
from worker.graph.base import BucketCheck, Padding, Parts
from worker.plan import TAILS, Tail
from worker.sampling.tail import Result, draw


class EagerRunner:
    """The GraphRunner without graphs."""

    def __init__(self, parts: Parts) -> None:
        self.path = "eager"
        self.checks: list[BucketCheck] = []
        self._parts = parts

    @torch.inference_mode()
    def trial(self) -> None:
        """See GraphRunner.trial; every token and every row is the sink's."""
        state, config = self._parts.state, self._parts.config
        if config.role == "decode":
            rows = torch.zeros(config.engine.max_num_reqs, dtype=torch.int64, device=state.device)
            longest = [self._parts.max_len] * len(rows)
            host = HostLengths([1] * len(rows), longest)
            self.step(rows, self._parts.max_len, "filtered", host)
            self._all_tails(rows, host)
        self.launch(self._parts.buffers.blank_chunk(int(config.engine.max_prefill_tokens)))

    def _all_tails(self, rows: Tensor, host: HostLengths) -> None:
        """Tails with penalties, masks and logprobs: a kernel compiled while serving is a stall."""
        parts = self._parts
        batch, sampled = parts.buffers.decode(rows, parts.max_len, host)
        hidden = self._forward(batch, parts.attention.decode)
        words = -(-parts.model.spec.vocab_size // 32)
        mask = torch.full((len(rows), words), -1, dtype=torch.int32, device=rows.device)
        for tail in TAILS[1:]:
            for allowed in (None, mask):
                draw(
                    parts.model, parts.state, sampled, hidden, tail,
                    adjust=True, num_logprobs=MAX_LOGPROBS, mask=allowed,
                )  # fmt: skip

    def capture(self) -> None:
        """Nothing to prepare."""

    def padded(
        self, num_tokens: int, num_reqs: int, max_seq_len_ub: int, *, hooked: bool
    ) -> Padding:
        """See GraphRunner.padded."""
        return Padding()

    def launch(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """See GraphRunner.launch."""
        return self._forward(batch, self._parts.attention.prefill, on_layer)

    def decode(
        self, rows: Sequence[int], max_seq_len_ub: int, tail: Tail
    ) -> tuple[Tensor, Result | None]:
        """See GraphRunner.decode."""
        uploaded = self._parts.state.upload(rows, torch.int64)
        return self.step(uploaded, max_seq_len_ub, tail, self._parts.buffers.decode_lengths(rows))

    def step(
        self, rows: Tensor, max_seq_len_ub: int, tail: Tail, host: HostLengths | None = None
    ) -> tuple[Tensor, Result | None]:
        """`decode` of `rows` [n] i64 on the device: all that a graph of it holds (host: None)."""
        parts = self._parts
        batch, sampled = parts.buffers.decode(rows, max_seq_len_ub, host)
        hidden = self._forward(batch, parts.attention.decode)
        if tail == "none":
            return hidden, None
        return hidden, draw(parts.model, parts.state, sampled, hidden, tail)

    def close(self) -> None:
        """Nothing to free."""

    def _forward(
        self,
        batch: Batch,
        attention: AttentionBackend,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        model, attn_plan = self._parts.model, attention.plan(batch)
        with forward_context(batch, attention, attn_plan, on_layer=on_layer):
            return model.forward(model.embed(batch.input_ids), batch.positions, batch.wanted)
