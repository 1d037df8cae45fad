"""Every op launched by the host, one after the other."""

from __future__ import annotations

from torch import Tensor

from worker.attention.base import AttentionBackend
from worker.batch import Batch
from worker.context import forward_context
from worker.models.decoder import Decoder


class EagerRunner:
    """The GraphRunner without graphs."""

    def __init__(self, model: Decoder, attention: AttentionBackend) -> None:
        self._model = model
        self._attention = attention

    def capture(self) -> None:
        """Nothing to prepare."""

    def launch(self, batch: Batch) -> Tensor:
        """See GraphRunner.launch."""
        attn_plan = self._attention.plan(batch)
        with forward_context(batch, self._attention, attn_plan):
            return self._model.forward(self._model.embed(batch.input_ids), batch.positions)

    def close(self) -> None:
        """Nothing to free."""
