"""mooncake's calls of listen(2) and connect(2): they come to functions of ours first.

It starts to listen and hears whoever comes within one call of ours, and nothing of its own asks who
that is. So the slots through which its libraries find these functions name others.
"""

import ctypes
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from worker.errors import Unsupported

LIBC = ctypes.CDLL(None, use_errno=True)
# A library of its package, or of those that a wheel brings beside it: where it begins, its path.
MAPPED = re.compile(r"^(\w+)-\w+ \S+ 0{8} .*?(/.*/mooncake(?:_\w+\.libs)?/[^/\n]+)$", re.MULTILINE)
LOAD, DYNAMIC = 1, 2  # kinds of segments of an ELF file
SYMBOLS, STRINGS = 6, 5  # tags of its dynamic section
RELOCATIONS = ((23, 2), (7, 8))  # tags of tables of slots and of their sizes
READ_WRITE, PAGE = 3, 4096


def divert(calls: Mapping[str, Any]) -> None:
    """Have mooncake, once it is imported, call these functions of ctypes by their names in libc.

    Raises Unsupported if it calls in a way that is not known.
    """
    missing = set(calls)
    for begin, path in MAPPED.findall(Path("/proc/self/maps").read_text()):
        for name, offset in _slots(Path(path).read_bytes()):
            if name in calls:
                slot = int(begin, 16) + offset
                LIBC.mprotect(ctypes.c_void_p(slot & -PAGE), 2 * PAGE, READ_WRITE)
                at = ctypes.cast(calls[name], ctypes.c_void_p)
                ctypes.c_void_p.from_address(slot).value = at.value
                missing.discard(name)
    if missing:
        raise Unsupported(f"mooncake: this build does not call {', '.join(missing)} as others do")


def _slots(elf: bytes) -> Iterator[tuple[str, int]]:
    """Names of what a library calls of others; where it keeps the address, from its beginning."""
    (table,), (size, num) = struct.unpack_from("<Q", elf, 32), struct.unpack_from("<HH", elf, 54)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(num)]

    def at(address: int) -> int:
        """Where it is in the file."""
        fits = (h for h in heads if h[0] == LOAD and h[3] <= address < h[3] + h[5])
        return next(address - head[3] + head[2] for head in fits)

    _, _, begin, _, _, length = next(head for head in heads if head[0] == DYNAMIC)
    tags = dict(struct.iter_unpack("<qQ", elf[begin : begin + length]))
    symbols, strings = at(tags[SYMBOLS]), at(tags[STRINGS])
    for where, how_long in RELOCATIONS:
        found = elf[at(tags[where]) :][: tags[how_long]] if where in tags else b""
        for offset, kind, _ in struct.iter_unpack("<QQq", found):
            (name,) = struct.unpack_from("<I", elf, symbols + 24 * (kind >> 32))
            begin = strings + name
            yield elf[begin : elf.index(b"\0", begin)].decode(), offset
