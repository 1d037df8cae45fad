"""Staging: a device buffer that the host fills at every step, through a ring of pinned buffers."""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

DEPTH = 4  # uploads in flight before the host waits; an engine has at most two steps in flight
GRAIN = 256  # words; sizes of copies are multiples of it, so that their views are made once


class Staging:
    """`words` (i32, on the device) and the pinned host buffers it is copied from.

    An upload stays until the next one, which runs behind all work on the current stream. On the
    CPU the host writes `words` directly.
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
        """words[: len(values)] = values. Words up to the next multiple of GRAIN change as well."""
        assert len(values) <= len(self.words)
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.upload(values)


class _Slot:
    def __init__(self, host: Tensor, words: Tensor | None) -> None:
        self._host = host.numpy().data
        self._copies: list[tuple[Tensor, Tensor]] = []  # (from, to), by the number of grains
        if words is not None:
            ends = range(0, len(host) + 1, GRAIN)
            self._copies = [(host[:end], words[:end]) for end in ends]
            self._copied = torch.cuda.Event()

    def upload(self, values: Sequence[int]) -> None:
        if self._copies:
            self._copied.synchronize()  # the copy DEPTH uploads ago must have left this buffer
        struct.pack_into(f"{len(values)}i", self._host, 0, *values)
        if self._copies:
            source, target = self._copies[-(-len(values) // GRAIN)]
            target.copy_(source, non_blocking=True)
            self._copied.record()
