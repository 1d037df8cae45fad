"""The seam between a batch and the launch of its forward."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from worker.batch import Batch


class GraphRunner(Protocol):
    """Runs the model's body over batches."""

    def capture(self) -> None:
        """Prepare every bucket; called once, before the first launch."""
        ...

    def launch(self, batch: Batch) -> Tensor:
        """Enqueue one forward; hidden states after the final norm, [num_tokens, hidden]."""
        ...

    def close(self) -> None:
        """Free captured graphs."""
        ...


GRAPHS = {"eager": "worker.graph.eager:EagerRunner"}
