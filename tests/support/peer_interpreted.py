"""peer_ptx under Triton's interpreter: plain loads and stores of memory that processes share."""

import time
from types import ModuleType
from typing import Any

from worker.ops.jit import tl, triton


def _poll(load: Any, is_late: Any, control: Any) -> Any:
    """`load`'s result once nothing of it `is_late`, or the fault or the limit ends the poll."""
    since, at = time.monotonic_ns(), control.to(tl.pointer_type(tl.int64))
    loaded = load()
    while tl.max(is_late(loaded), 0):
        time.sleep(0.001)  # the peer may wait for this very core
        if time.monotonic_ns() - since > int(tl.load(at + 1)):
            tl.store(at, 1)
        if bool(tl.load(at) != 0):
            break
        loaded = load()
    return loaded


@triton.jit
def load_chunks(address, mask, SHARED: tl.constexpr = False):  # pyright: ignore
    """See peer_ptx.load_chunks."""
    at = address.to(tl.pointer_type(tl.int32))
    return (
        tl.load(at, mask, 0),
        tl.load(at + 1, mask, 0),
        tl.load(at + 2, mask, 0),
        tl.load(at + 3, mask, 0),
    )


@triton.jit
def store_chunks(address, words, mask, SHARED: tl.constexpr = False):  # pyright: ignore
    """See peer_ptx.store_chunks."""
    at = address.to(tl.pointer_type(tl.int32))
    tl.store(at, words[0], mask)
    tl.store(at + 1, words[1], mask)
    tl.store(at + 2, words[2], mask)
    tl.store(at + 3, words[3], mask)


@triton.jit
def _any_is(words, value):
    a, b, c, d = words
    return (a == value) | (b == value) | (c == value) | (d == value)


@triton.jit
def poll_chunks(address, absent, control, mask):
    """See peer_ptx.poll_chunks."""
    return _poll(
        lambda: load_chunks(address, mask), lambda words: _any_is(words, absent) & mask, control
    )


@triton.jit
def store_marked(address, a, b, mark, mask):
    """See peer_ptx.store_marked."""
    at = address.to(tl.pointer_type(tl.int64))
    high = mark.to(tl.int64) << 32
    tl.store(at, high | (a.to(tl.int64) & 0xFFFFFFFF), mask)
    tl.store(at + 1, high | (b.to(tl.int64) & 0xFFFFFFFF), mask)


@triton.jit
def poll_marked(address, mark, control, mask):
    """See peer_ptx.poll_marked."""
    at = address.to(tl.pointer_type(tl.int64))
    a, b = _poll(
        lambda: (tl.load(at, mask, 0), tl.load(at + 1, mask, 0)),
        lambda both: (((both[0] >> 32) != mark) | ((both[1] >> 32) != mark)) & mask,
        control,
    )
    return a.to(tl.int32), b.to(tl.int32)


@triton.jit
def store_flags(address, value, mask):
    """See peer_ptx.store_flags."""
    tl.store(address.to(tl.pointer_type(tl.int64)), value, mask)


@triton.jit
def poll_flags(address, mark, control, mask):
    """See peer_ptx.poll_flags."""
    at = address.to(tl.pointer_type(tl.int64))
    return _poll(
        lambda: tl.load(at, mask, 0), lambda flags: ((flags >> 32) != mark) & mask, control
    )


def access_by_interpreter(kernels: ModuleType) -> None:
    """Have the kernels of all_reduce_triton, or of a copy, access memory by what is here."""
    for access in (
        *(load_chunks, store_chunks, poll_chunks, store_marked, poll_marked),
        *(store_flags, poll_flags),
    ):
        setattr(kernels, access.__name__, access)
