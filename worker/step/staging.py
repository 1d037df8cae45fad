"""A place on the device that the host fills anew with every step, and never waits for."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

DEPTH = 4  # uploads under way before the host waits; an engine has two steps on the device
GRAIN = 256  # words; copies are whole grains, so that there are few kinds of them


class Staging:
    """`words`, i32 on the device, and the pinned memory of the host from which they are filled.

    What is uploaded lies there until the next upload, which is ordered behind the work on the
    current stream. On the CPU the host writes the words themselves: it is its own stream.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        num_words = -(-num_words // GRAIN) * GRAIN
        self.words = torch.zeros(num_words, dtype=torch.int32, device=device)
        if device.type == "cpu":
            self._slots = [_Slot(self.words, None)]
        else:
            self._slots = [
                _Slot(torch.zeros(num_words, dtype=torch.int32, pin_memory=True), self.words)
                for _ in range(DEPTH)
            ]
        self._next = 0

    def upload(self, values: Sequence[int]) -> None:
        """words[: len(values)] = values, no more than there are; some that follow change, too."""
        assert len(values) <= len(self.words)
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.upload(values)


class _Slot:
    """Memory of the host for one upload at a time. All views of it are made here, once."""

    def __init__(self, host: Tensor, words: Tensor | None) -> None:
        self._host = host.numpy().data
        self._copies: list[tuple[Tensor, Tensor]] = []  # (from, to), by the number of grains
        if words is not None:
            ends = range(0, len(host) + 1, GRAIN)
            self._copies = [(host[:end], words[:end]) for end in ends]
            self._copied = torch.cuda.Event()

    def upload(self, values: Sequence[int]) -> None:
        """See Staging."""
        if self._copies:
            self._copied.synchronize()  # of the copy before, long since; it may have to be awaited
        struct.pack_into(f"{len(values)}i", self._host, 0, *values)
        if self._copies:
            source, target = self._copies[-(-len(values) // GRAIN)]
            target.copy_(source, non_blocking=True)
            self._copied.record()
