"""mooncake's calls of listen(2): what it listens on is deaf before it hears anybody.

It listens at all addresses, takes what anybody sends, and starts to within a call of its own. So
the slots through which its libraries call listen(2) name a function of ours.
"""

import ctypes
import re
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

from worker.errors import Unsupported
from worker.peers.deaf import deafen

Made = TypeVar("Made")

LIBC = ctypes.CDLL(None, use_errno=True)
DYNAMIC, LOAD = 2, 1  # kinds of segments of an ELF file
SYMBOLS, STRINGS = 6, 5  # tags of its dynamic section
RELOCATIONS = ((23, 2), (7, 8))  # tags of tables of slots and of their sizes
READ_WRITE = 3
PAGE = 4096
# A library of its package, or of those that a wheel brings beside it: where it begins, its path.
MAPPED = re.compile(r"^(\w+)-\w+ \S+ 0{8} .*?(/.*/mooncake(?:_\w+\.libs)?/[^/\n]+)$", re.MULTILINE)

_opened: list[int] = []  # descriptors that listen since the last call of `opening`


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, use_errno=True)
def _listen(fd: int, backlog: int) -> int:
    """It is called within `initialize`, by the thread that holds the interpreter's lock."""
    deafen(fd)
    _opened.append(fd)
    return LIBC.listen(fd, backlog)


def opening(make: Callable[[], Made]) -> tuple[Made, list[int]]:
    """What `make` makes, and the descriptors on which that listens, deaf. One call at a time."""
    _divert()
    _opened.clear()
    return make(), list(_opened)


@cache
def _divert() -> None:
    """Once mooncake is imported. Raises Unsupported if it calls in a way that is not known."""
    slots = [
        int(begin, 16) + offset
        for begin, path in MAPPED.findall(Path("/proc/self/maps").read_text())
        for offset in _slots(Path(path).read_bytes(), b"listen\0")
    ]
    for slot in slots:
        if LIBC.mprotect(ctypes.c_void_p(slot & -PAGE), 2 * PAGE, READ_WRITE):
            raise Unsupported("mooncake: the pages by which it calls listen(2) cannot be changed")
        ctypes.c_void_p.from_address(slot).value = ctypes.cast(_listen, ctypes.c_void_p).value
    if not slots:
        raise Unsupported("mooncake: this build does not call listen(2) in a way that is known")


def _slots(elf: bytes, symbol: bytes) -> Iterator[int]:
    """Where a library keeps the address of a function of another, from its beginning in memory."""
    (table,), (size, num) = struct.unpack_from("<Q", elf, 32), struct.unpack_from("<HH", elf, 54)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(num)]

    def at(address: int) -> int:
        """Where it is in the file."""
        fits = (h for h in heads if h[0] == LOAD and h[3] <= address < h[3] + h[5])
        return next(address - head[3] + head[2] for head in fits)

    _, _, begin, _, _, length = next(head for head in heads if head[0] == DYNAMIC)
    tags = dict(struct.iter_unpack("<qQ", elf[begin : begin + length]))
    for where, how_long in RELOCATIONS:
        if where not in tags:
            continue
        found = elf[at(tags[where]) :][: tags[how_long]]
        for offset, kind, _ in struct.iter_unpack("<QQq", found):
            (name,) = struct.unpack_from("<I", elf, at(tags[SYMBOLS]) + 24 * (kind >> 32))
            if elf.startswith(symbol, at(tags[STRINGS]) + name):
                yield offset
