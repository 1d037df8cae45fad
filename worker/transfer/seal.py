"""Seals of announced KV: it comes from the worker that was asked for it, word for word.

An attempt of a decode worker has a key of its own, which goes to the prefill worker with the
`Prefill`. So nobody else can announce pages for it: no other member, and nobody who only knows its
names, also where links are plain (transport.authentication: none).
"""

import hmac
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from worker.api import KVReady

KEY_BYTES, SEAL_BYTES = 32, 16

# Made on import, as `sources.READER` is.
_WRITER = msgspec.msgpack.Encoder()


def sealed(message: KVReady, key: bytes) -> KVReady:
    """The message with its seal: over all other fields, the transfer's identity among them."""
    return replace(message, seal=_seal(message, key))


def is_sealed(message: KVReady, key: bytes) -> bool:
    """Whether its seal was made with this key, and over its fields."""
    return hmac.compare_digest(message.seal, _seal(message, key))


def _seal(message: KVReady, key: bytes) -> bytes:
    bare = _WRITER.encode(replace(message, seal=b""))
    return blake2b(bare, key=key[:KEY_BYTES], digest_size=SEAL_BYTES).digest()
