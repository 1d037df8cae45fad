"""The objects that a tier keeps: a page of KV with all its regions, behind a header.

A key is a hash over whose KV it is (the layout's identity, which covers the weights of model and
drafter), the salt, and all tokens of the text up to the page's end. The page's own tokens stand in
the header and are compared, as everything else there: a store is never trusted.

A snapshot of recurrent state is kept beside the page at whose end it was taken, in parts that are
as long as a page, so that all objects are.
"""

import struct
import zlib
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from worker.cache.prefix import Node

MAGIC = b"kvlane\x00\x01"
HEAD = struct.Struct("<8s32s16sQII")  # magic, key, owner, bytes behind, checksum, every
KEY_BYTES = 32
BLOCK = 16384  # bytes that a checksum takes at once, without the GIL


class Corrupt(Exception):
    """An object is not what was kept under its key."""


class Form(NamedTuple):
    """Of all objects of a rank: they are equally long."""

    layout_hash: str
    rank: int
    tp_size: int
    page_size: int  # tokens
    page_bytes: int  # of all regions of this rank
    state_bytes: int  # of a slot of recurrent state; 0: none

    @property
    def owner(self) -> str:
        """Whose KV it is, for people and as the name of a folder."""
        return f"{self.layout_hash}-{self.rank}of{self.tp_size}"

    @property
    def num_parts(self) -> int:
        """Objects of a snapshot."""
        return -(-self.state_bytes // self.page_bytes)

    @property
    def header_bytes(self) -> int:
        """Of the header, tokens included."""
        return -(-(HEAD.size + 4 * self.page_size) // 64) * 64

    @property
    def object_bytes(self) -> int:
        """Of an object."""
        return self.header_bytes + self.page_bytes

    def seal(self, view: memoryview, key: bytes, tokens: Sequence[int], every: int) -> None:
        """Write the header of an object whose bytes are there; every: see `checksum`."""
        body = view[self.header_bytes :]
        crc = checksum(body, every)
        HEAD.pack_into(view, 0, MAGIC, key, self._owner, self.page_bytes, crc, every)
        text = array("I", tokens).tobytes()
        view[HEAD.size : HEAD.size + len(text)] = text

    def body(self, view: memoryview, key: bytes, tokens: Sequence[int]) -> memoryview:
        """The page in an object; raises Corrupt unless it is what was kept of these tokens."""
        if len(view) != self.object_bytes:
            raise Corrupt(f"{len(view)} bytes, not {self.object_bytes}")
        *said, crc, every = HEAD.unpack_from(view)
        if said != [MAGIC, key, self._owner, self.page_bytes] or not every:
            raise Corrupt("its header is another's")
        text = array("I", tokens).tobytes()
        if view[HEAD.size : HEAD.size + len(text)] != text:
            raise Corrupt("its tokens are others")
        body = view[self.header_bytes :]
        if checksum(body, every) != crc:
            raise Corrupt("its checksum is wrong")
        return body

    @property
    def _owner(self) -> bytes:
        return blake2b(self.owner.encode(), digest_size=16).digest()


def checksum(body: memoryview, every: int) -> int:
    """CRC-32 of every so-manieth block, the first among them."""
    if every == 1:
        return zlib.crc32(body)
    crc = 0
    for at in range(0, len(body), every * BLOCK):
        crc = zlib.crc32(body[at : at + BLOCK], crc)
    return crc


class Source(NamedTuple):
    """An object by its key, with its page's tokens, and where it is in the pool."""

    key: bytes
    tokens: tuple[int, ...]
    place: int  # a page, or a slot
    part: int = -1  # of the slot; -1: it is a page


def first_key(layout_hash: str, salt: str) -> bytes:
    """Of the empty text of a salt."""
    return blake2b(salt.encode(), key=layout_hash.encode(), digest_size=KEY_BYTES).digest()


def part_key(key: bytes, part: int) -> bytes:
    """Of a part of the snapshot behind the page of that key."""
    return blake2b(key, key=b"state %d" % part, digest_size=KEY_BYTES).digest()


def next_key(key: bytes, tokens: Sequence[int]) -> bytes:
    """Of the text that a page of tokens makes longer."""
    return blake2b(key + array("I", tokens).tobytes(), digest_size=KEY_BYTES).digest()


def key_of(node: Node, layout_hash: str) -> bytes:
    """Of a node of a prefix tree, which keeps it."""
    missing: list[Node] = []
    while node.parent is not None and not node.digest:
        missing.append(node)
        node = node.parent
    digest = node.digest
    for below in reversed(missing):
        tokens = below.key
        if below.depth == 1:
            salt = tokens[0] if isinstance(tokens[0], str) else ""
            digest, tokens = first_key(layout_hash, salt), tokens[bool(salt) :]
        below.digest = digest = next_key(digest, [int(token) for token in tokens])
    return digest


def tokens_of(node: Node) -> tuple[int, ...]:
    """Of a node's page."""
    return tuple(token for token in node.key if isinstance(token, int))
