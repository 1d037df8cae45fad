"""Launches a step without graphs: the host launches every op, one after the other."""

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
from worker.metrics import Progress, untold
from worker.plan import TAILS, Tail
from worker.sampling.tail import draw
from worker.step.state import SampledRows


def forward(
    loaded: LoadedModel,
    batch: Batch,
    attention: AttentionBackend,
    on_layer: LayerHook | None = None,
) -> Tensor:
    """Compute hidden states after the final norm from token ids; see Decoder.forward."""
    model, attn_plan = loaded.model, attention.plan(batch)
    with forward_context(batch, attention, attn_plan, on_layer=on_layer):
        embedded = model.embed(batch.input_ids)
        return model.forward(embedded, batch.positions, batch.last_token_rows)


class _Eager:
    """StepGraphs that captures nothing."""

    def __init__(self, loaded: LoadedModel, memory: GraphMemory | None = None) -> None:
        self._loaded = loaded

    def capture_largest(self) -> None:
        """Nothing to capture."""

    def capture(self, progress: Progress = untold) -> Sequence[BucketCheck]:
        """Nothing to prepare."""
        return ()

    def close(self) -> None:
        """Nothing to free."""


class EagerChunks(_Eager):
    """ChunkGraphs without graphs."""

    @torch.inference_mode()
    def run_largest(self) -> None:
        """Run the largest prefill step; all its tokens are padding.

        On a prefill worker also the tails of first tokens, for every number of rows for which the
        kernels differ, so that serving compiles none.
        """
        loaded = self._loaded
        batch = loaded.buffers.blank_chunk(int(loaded.config.max_prefill_tokens))
        hidden, _ = self.launch(batch)
        if loaded.decodes:
            return
        most = min(int(loaded.config.max_num_reqs), int(loaded.config.max_prefill_tokens))
        for num_rows in {*(1 << i for i in range(most.bit_length())), most}:
            rows = torch.zeros(num_rows, dtype=torch.int64, device=hidden.device)
            sampled = SampledRows(rows, rows, torch.zeros_like(rows, dtype=torch.bool))
            for tail in TAILS[1:]:
                draw(loaded.model, loaded.state, sampled, hidden[rows], tail)

    def padded(
        self, num_tokens: int, num_reqs: int, max_seq_len_ub: int, *, hooked: bool
    ) -> PaddedShape:
        """See ChunkGraphs.padded."""
        return PaddedShape()

    def launch(self, batch: Batch, on_layer: LayerHook | None = None) -> Forward:
        """See ChunkGraphs.launch."""
        hidden = forward(self._loaded, batch, self._loaded.attention.prefill, on_layer)
        return Forward(hidden, "eager")


class EagerDecode(_Eager):
    """DecodeGraphs without graphs."""

    @torch.inference_mode()
    def run_largest(self) -> None:
        """Run the largest decode step; all its rows are padding.

        Every tail runs with penalties, masks and logprobs, so that serving compiles no kernel.
        """
        loaded, device = self._loaded, self._loaded.state.device
        rows = torch.zeros(int(loaded.config.max_num_reqs), dtype=torch.int64, device=device)
        host = HostLengths([1] * len(rows), [loaded.max_len] * len(rows))
        self.step(rows, loaded.max_len, "filtered", host)
        hidden, sampled, *_ = self.step(rows, loaded.max_len, "none", host)
        assert sampled is not None
        words = -(-loaded.model.spec.vocab_size // 32)
        mask = torch.full((len(rows), words), -1, dtype=torch.int32, device=device)
        for tail in TAILS[1:]:
            for allowed in (None, mask):
                draw(
                    loaded.model, loaded.state, sampled, hidden, tail,
                    penalized=True, num_logprobs=MAX_LOGPROBS, mask=allowed,
                )  # fmt: skip

    def launch(self, rows: Sequence[int], max_seq_len_ub: int, tail: Tail) -> Decoded:
        """See DecodeGraphs.launch."""
        uploaded = self._loaded.state.upload(rows, torch.int64)
        lengths = self._loaded.buffers.decode_lengths(rows)
        return self.step(uploaded, max_seq_len_ub, tail, lengths)

    def step(
        self, rows: Tensor, max_seq_len_ub: int, tail: Tail, host: HostLengths | None = None
    ) -> Decoded:
        """As `launch`, with `rows` [n] i64 on the device. Graphs capture it with `host` None."""
        loaded = self._loaded
        batch, sampled = loaded.buffers.decode(rows, max_seq_len_ub, host)
        hidden = forward(loaded, batch, loaded.attention.decode)
        if tail == "none":
            return Decoded(hidden, sampled, None, "eager")
        result = draw(loaded.model, loaded.state, sampled, hidden, tail)
        return Decoded(hidden, None, result, "eager")
