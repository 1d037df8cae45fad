"""The file of API keys, and what they may do.

A line is a key, and perhaps what there is to say of it:

    sk-5f1e name=alice requests_per_minute=60 tokens_per_minute=20000 concurrency=4
    sk-77aa name=bob expires=2027-01-31
    sk-90c1 name=ops admin=yes
    sk-09c4 name=carol cache=own

Apart from `allowance.py`, so that the command line reads it at little cost.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from worker.errors import UserError

PARAM = "router.api_key_file"
LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrency")


@dataclass(frozen=True, slots=True)
class Key:
    """One line of the file; a limit of 0 is none."""

    secret: bytes
    name: str
    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # of prompts and answers
    concurrency: int = 0  # requests at a time
    expires_at: float = math.inf  # seconds since the epoch
    admin: bool = False  # opens operators' pages; where no key says so, every key does
    own_salt: str = ""  # a digest of the key, if what its requests leave in caches is for it alone


def read_keys(path: str) -> tuple[Key, ...]:
    """The keys of a file, one a line; empty lines do not count. Without a path there are none.

    Raises a UserError if the file cannot be read, holds no key, or says what it cannot.
    """
    if not path:
        return ()
    try:
        lines = Path(path).expanduser().read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}", PARAM) from error
    numbered = [(number, line.split()) for number, line in enumerate(lines, 1) if line.strip()]
    keys = tuple(_read(words, f"{path}, line {number}") for number, words in numbered)
    if not keys:
        raise UserError(f"{path} holds no key", PARAM)
    if len({key.name for key in keys}) < len(keys):
        raise UserError(f"{path}: two keys have the same name", PARAM)
    return keys


def _read(words: Sequence[bytes], where: str) -> Key:
    """A line's key; never shown in an error."""
    options: dict[str, str | int | float] = {"name": f"key-{_digest(words[0], 4)}"}
    for word in words[1:]:
        name, _, value = word.decode("utf-8", "replace").partition("=")
        try:
            if name == "name" and value:
                options["name"] = value
            elif name == "expires":
                at = datetime.fromisoformat(value)
                options["expires_at"] = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
            elif name == "admin" and value == "yes":
                options["admin"] = True
            elif name == "cache" and value == "own":
                options["own_salt"] = _digest(words[0], 16)
            elif name in LIMITS and int(value) > 0:
                options[name] = int(value)
            else:
                raise ValueError
        except ValueError:
            known = ", ".join(f"{option}=…" for option in ("name", *LIMITS, "expires"))
            known += ", admin=yes, cache=own"
            raise UserError(f"{where}: what follows the key is not {known}", PARAM) from None
    return Key(words[0], **options)  # type: ignore[arg-type]


def _digest(secret: bytes, num_bytes: int) -> str:
    return hashlib.blake2b(secret, digest_size=num_bytes).hexdigest()
