"""Sums: the algorithm and the bytes of each layer's all-reduces, counted step by step."""

from worker.model.decoder import Decoder
from worker.observe.metrics import WorkerMetrics
from worker.run.flight import Step


class Sums:
    """Counts all sums of a step at once, since the sums of all layers have the same size.

    A replayed graph runs no Python, so a sum cannot be counted where it is launched. But its
    algorithm depends on the number of tokens alone, in captured graphs as well.
    """

    def __init__(self, model: Decoder, metrics: WorkerMetrics) -> None:
        self._collective, self._dtype = model.collective, model.placement.dtype
        self._token_bytes = model.spec.hidden_size * self._dtype.itemsize
        self._metrics = metrics

    def settled(self, step: Step) -> None:
        """Count a step, which has finished."""
        num_bytes = step.num_tokens * self._token_bytes
        kind = "prefill" if step.plan.chunks else "decode"
        algorithm = self._collective.algorithm(num_bytes, self._dtype)
        self._metrics.all_reduce_bytes(kind, algorithm).observe(num_bytes)
