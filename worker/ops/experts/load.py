"""What a model's experts have had, counted on the device and read at a scrape."""

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FRESH_S = 1.0  # for so long one reading serves all metrics of a scrape


class Load(NamedTuple):
    """Of all layers of experts of one rank, since the start."""

    layer_steps: int = 0
    distinct: int = 0  # experts that had tokens, summed over layers and steps
    busiest_share: float = 0.0  # of a layer's tokens, the mean of the layers


class ExpertLoads:
    """Reads what `new_load` made for the layers; nothing in a step waits for it."""

    def __init__(self, loads: Sequence[Tensor]) -> None:
        self._loads = list(loads)
        self._lock = threading.Lock()
        self._read, self._read_at = Load(), float("-inf")

    def read(self) -> Load:
        """The counts, at most FRESH_S old."""
        with self._lock:
            if time.monotonic() - self._read_at > FRESH_S:
                self._read, self._read_at = self._now(), time.monotonic()
            return self._read

    @torch.inference_mode()
    def _now(self) -> Load:
        tokens, steps = torch.stack(self._loads).cpu().unbind(1)  # [layers, count + 1]
        rows = tokens[:, :-1].sum(1)
        shares = tokens.amax(1) / rows.clamp_min(1)
        layer_steps, distinct = int(steps[:, -1].sum()), int(steps[:, :-1].sum())
        return Load(layer_steps, distinct, shares.mean().item())
