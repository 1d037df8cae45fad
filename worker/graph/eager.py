"""Every op launched by the host, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.api import MAX_LOGPROBS
from worker.attention.base import AttentionBackend
from worker.forward.batch import Batch, HostLengths
from worker.forward.context import LayerHook, forward_context
from worker.graph.base import BucketCheck, Decoded, Forward, LoadedModel, PaddedShape
from worker.graph.segments import GraphMemory
from worker.plan import TAILS, Tail
from worker.sampling.tail import Result, draw


def forward(
    loaded: LoadedModel,
    batch: Batch,
    attention: AttentionBackend,
    on_layer: LayerHook | None = None,
) -> Tensor:
    """From token ids to hidden states after the final norm, op by op; see Decoder.forward."""
    model, attn_plan = loaded.model, attention.plan(batch)
    with forward_context(batch, attention, attn_plan, on_layer=on_layer):
        embedded = model.embed(batch.input_ids)
        return model.forward(embedded, batch.positions, batch.last_token_rows)


class EagerChunks:
    """ChunkGraphs without graphs."""

    def __init__(self, loaded: LoadedModel, memory: GraphMemory | None = None) -> None:
        self._loaded = loaded

    def try_largest(self) -> None:
        """Nothing to capture."""

    @torch.inference_mode()
    def run_largest(self) -> None:
        """The largest step of chunks; every token is the sink's."""
        self.launch(self._loaded.buffers.blank_chunk(int(self._loaded.config.max_prefill_tokens)))

    def capture(self) -> Sequence[BucketCheck]:
        """Nothing to prepare."""
        return ()

    def padded(
        self, num_tokens: int, num_reqs: int, max_seq_len_ub: int, *, hooked: bool
    ) -> PaddedShape:
        """See ChunkGraphs.padded."""
        return PaddedShape()

    def launch(self, batch: Batch, on_layer: LayerHook | None = None) -> Forward:
        """See ChunkGraphs.launch."""
        hidden = forward(self._loaded, batch, self._loaded.attention.prefill, on_layer)
        return Forward(hidden, "eager")

    def close(self) -> None:
        """Nothing to free."""


class EagerDecode:
    """DecodeGraphs without graphs."""

    def __init__(self, loaded: LoadedModel, memory: GraphMemory | None = None) -> None:
        self._loaded = loaded

    def try_largest(self) -> None:
        """Nothing to capture."""

    @torch.inference_mode()
    def run_largest(self) -> None:
        """The largest decode step, with every tail; every row is the sink's."""
        loaded, device = self._loaded, self._loaded.state.device
        rows = torch.zeros(loaded.config.max_num_reqs, dtype=torch.int64, device=device)
        host = HostLengths([1] * len(rows), [loaded.max_len] * len(rows))
        self.step(rows, loaded.max_len, "filtered", host)
        self._run_tails(rows, host)

    def _run_tails(self, rows: Tensor, host: HostLengths) -> None:
        """Tails with penalties, masks and logprobs: a kernel compiled while serving is a stall."""
        loaded = self._loaded
        batch, sampled = loaded.buffers.decode(rows, loaded.max_len, host)
        hidden = forward(loaded, batch, loaded.attention.decode)
        words = -(-loaded.model.spec.vocab_size // 32)
        mask = torch.full((len(rows), words), -1, dtype=torch.int32, device=rows.device)
        for tail in TAILS[1:]:
            for allowed in (None, mask):
                draw(
                    loaded.model, loaded.state, sampled, hidden, tail,
                    penalized=True, num_logprobs=MAX_LOGPROBS, mask=allowed,
                )  # fmt: skip

    def capture(self) -> Sequence[BucketCheck]:
        """Nothing to prepare."""
        return ()

    def launch(self, rows: Sequence[int], max_seq_len_ub: int, tail: Tail) -> Decoded:
        """See DecodeGraphs.launch."""
        uploaded = self._loaded.state.upload(rows, torch.int64)
        lengths = self._loaded.buffers.decode_lengths(rows)
        return Decoded(*self.step(uploaded, max_seq_len_ub, tail, lengths), "eager")

    def step(
        self, rows: Tensor, max_seq_len_ub: int, tail: Tail, host: HostLengths | None = None
    ) -> tuple[Tensor, Result | None]:
        """`launch` of `rows` [n] i64 on the device: what a graph captures, with `host` None."""
        loaded = self._loaded
        batch, sampled = loaded.buffers.decode(rows, max_seq_len_ub, host)
        hidden = forward(loaded, batch, loaded.attention.decode)
        if tail == "none":
            return hidden, None
        return hidden, draw(loaded.model, loaded.state, sampled, hidden, tail)

    def close(self) -> None:
        """Nothing to free."""
