"""Text to token ids; what was encoded before is not encoded again.

A tokenizer cuts a text at its added tokens before it does anything else. So a prompt may be cut
where a message begins, and its pieces encoded one by one. The next turn of a conversation begins
with the pieces of the last one, and all prompts with one system prompt begin alike.

A piece is kept for the salt of its request alone: the time that a known one saves can be measured.
"""

import re
import string
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from router.text.backend import Encode, is_random

MIN_CHARS = 1024  # of a text that is cut: tokenizers takes 0.3 ms at most for a shorter one
LARGEST_SHARE = 16  # of the bytes: a larger piece is not kept, as it would push out many
PIECE_CHARS = 256  # of a piece, at least, but for the last
NO_WORD = frozenset(string.punctuation) - {"_"}  # neither a space nor part of a word, for anybody
ENTRY_BYTES = 250  # of a piece beside its characters and ids, about


class Encoder:
    """The encoding half of a tokenizer; safe to use from any thread.

    `encode` gives the ids of `tokenizer`. Prompts may be cut where `cuts` matches: a pattern of
    `cut_pattern`. Pieces of `max_bytes` are kept, those asked for last longest; 0: none.
    """

    def __init__(
        self, encode: Encode, tokenizer: Tokenizer, cuts: re.Pattern[str] | None, max_bytes: int
    ) -> None:
        self.backend = encode
        self._cuts = cuts if max_bytes else None
        self._adds = bool(tokenizer.encode("", add_special_tokens=True).ids)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self.pieces: OrderedDict[tuple[str, str], array[int]] = OrderedDict()  # by salt and text
        self.num_bytes = 0
        self.num_chars = self.num_known = 0  # of texts that were cut; of those in known pieces

    def encode(self, text: str, *, add_special_tokens: bool, salt: str = "") -> tuple[int, ...]:
        """Token ids of `text`; `add_special_tokens`: with those that the tokenizer adds."""
        if self._cuts is None or len(text) < MIN_CHARS or (add_special_tokens and self._adds):
            return tuple(self.backend(text, add_special_tokens))
        ids = array("I")
        for piece in cut_up(text, self._cuts):
            ids.extend(self._ids_of(salt, piece))
        return tuple(ids)

    def _ids_of(self, salt: str, piece: str) -> "array[int]":
        key = salt, piece
        with self._lock:
            ids = self.pieces.get(key)
            self.num_chars += len(piece)
            if ids is not None:
                self.pieces.move_to_end(key)
                self.num_known += len(piece)
                return ids
        ids = array("I", self.backend(piece, False))
        if size_of(key, ids) > self._max_bytes // LARGEST_SHARE:
            return ids
        with self._lock:
            if key not in self.pieces:
                self.num_bytes += size_of(key, ids)
            self.pieces[key] = ids
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= size_of(*self.pieces.popitem(last=False))
        return ids


def size_of(key: tuple[str, str], ids: "array[int]") -> int:
    """Bytes of memory that a kept piece takes, about."""
    return sum(map(sys.getsizeof, key)) + ids.itemsize * len(ids) + ENTRY_BYTES


def cut_up(text: str, cuts: re.Pattern[str]) -> Iterator[str]:
    """`text` in pieces that begin where `cuts` match; which depends on nothing behind a piece."""
    begin = 0
    for match in cuts.finditer(text):
        if match.start() - begin >= PIECE_CHARS:
            yield text[begin : match.start()]
            begin = match.start()
    yield text[begin:]


def cut_pattern(
    tokenizer: Tokenizer, described: Mapping[str, Any], begins: set[str]
) -> re.Pattern[str] | None:
    """Matches added tokens before which any text may be cut; None: there are none.

    The ids of the two parts are those of the whole, as such a token is found wherever it stands:
    it takes no spaces before it along, no other added token reaches into it, no word before it
    goes on in it, and it is looked for before a normalizer changes the text. So is a longer token
    that begins with it.
    """
    if is_random(described):
        return None
    added = list(tokenizer.get_added_tokens_decoder().values())
    stay = {token.content for token in added if not _looks_back(token)}
    looking_back = [token.content for token in added if _looks_back(token)]
    cuts = [
        content
        for content in stay & begins
        if content[0] in NO_WORD
        and not any(other.startswith(content) for other in looking_back)
        and not any(_reaches_into(token.content, content) for token in added)
    ]
    return re.compile("|".join(map(re.escape, sorted(cuts)))) if cuts else None


def _looks_back(token: AddedToken) -> bool:
    """Whether what stands before a token says if it is one, or goes with it."""
    return token.lstrip or token.single_word or token.normalized


def _reaches_into(other: str, content: str) -> bool:
    """Whether a match of `other` can begin before one of `content` and end in or behind it."""
    ends = (content[:length] for length in range(1, len(content)))
    return content in other[1:] or any(other[1:].endswith(end) for end in ends)
