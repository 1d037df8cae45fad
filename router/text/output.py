"""Tokens to text as they arrive: incremental detokenizers and the search for stop strings.

Both take time in proportion to the new tokens, however long the answer already is.
"""

import codecs
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 5  # of the prompt's end: they decide whether the answer's first space is kept
MAX_WINDOW_TOKENS = 16  # bytes that make no character after so many tokens never will


class Detokenizer(Protocol):
    """Turns tokens into text so that the pieces add up to the text of all tokens at once."""

    def feed(self, tokens: Sequence[int]) -> str:
        """The characters that these tokens complete; bytes of an unfinished one are held back."""
        ...

    def finish(self) -> str:
        """What is still held back, as replacement characters."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level vocabularies write bytes (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in shown}
    hidden = [byte for byte in range(256) if byte not in shown]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_OF = _byte_alphabet()


def token_bytes(piece: str) -> bytes:
    """The bytes of an entry of a byte-level vocabulary; other added tokens stand for themselves."""
    if all(char in BYTE_OF for char in piece):
        return bytes(BYTE_OF[char] for char in piece)
    return piece.encode()


class ByteDetokenizer(Detokenizer):
    """For byte-level vocabularies, whose tokens are bytes: exact for any bytes.

    `text_of`: the text of a token whose bytes are whole characters; of others None. Tokens in
    `skip` leave no text.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        text_of: Callable[[int], str | None],
        skip: frozenset[int],
    ) -> None:
        self._bytes_of = bytes_of
        self._text_of = text_of
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds = False  # bytes of an unfinished character

    def feed(self, tokens: Sequence[int]) -> str:
        if len(tokens) == 1 and not self._holds:  # most often
            text = "" if tokens[0] in self._skip else self._text_of(tokens[0])
            if text is not None:
                return text
        shown = [token for token in tokens if token not in self._skip]
        text = self._decoder.decode(b"".join(map(self._bytes_of, shown)))
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """For every other vocabulary: decodes a short window twice and takes the difference.

    Invariant: the text of _tokens[:_num_done] was returned; decoding may begin at _tokens[0].
    `decode` shows special tokens, too; those in `skip` leave no text. The end of `prompt` is the
    context of the first window.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], skip: frozenset[int]
    ) -> None:
        self._decode = decode
        self._skip = skip
        context = [token for token in prompt[-4 * CONTEXT_TOKENS :] if token not in skip]
        self._tokens = context[-CONTEXT_TOKENS:]
        self._num_done = len(self._tokens)
        self._done_text = decode(self._tokens)

    def feed(self, tokens: Sequence[int]) -> str:
        return "".join(self._feed(token) for token in tokens if token not in self._skip)

    def finish(self) -> str:
        return self._advance(self._decode(self._tokens)) if self._num_held else ""

    @property
    def _num_held(self) -> int:
        return len(self._tokens) - self._num_done

    def _feed(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        unfinished = text.endswith(REPLACEMENT) or len(text) <= len(self._done_text)
        if unfinished and self._num_held < MAX_WINDOW_TOKENS:
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        added = text[len(self._done_text) :]
        self._tokens = self._tokens[self._num_done :]
        self._num_done = len(self._tokens)
        self._done_text = self._decode(self._tokens)
        return added


@lru_cache(maxsize=256)  # the choices of a request share them
def _fallbacks(stop: str) -> "array[int]":
    """Of the beginnings of `stop`: how much of `stop` they end with, but themselves."""
    fallback, matched = array("i", bytes(4 * len(stop))), 0
    for i in range(1, len(stop)):
        while matched and stop[i] != stop[matched]:
            matched = fallback[matched - 1]
        matched += stop[i] == stop[matched]
        fallback[i] = matched
    return fallback


class _Automaton:
    """How much of one stop string the text so far ends with (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallback = _fallbacks(stop)

    def feed(self, piece: str) -> int:
        """Index just past the first match's end in `piece`; -1 when none ends there."""
        stop, fallback, matched = self.stop, self._fallback, self.num_matched
        for i, char in enumerate(piece):
            while matched and char != stop[matched]:
                matched = fallback[matched - 1]
            if char == stop[matched]:
                matched += 1
                if matched == len(stop):
                    return i + 1
        self.num_matched = matched
        return -1


class StopMatcher:
    """Finds the stop string that ends first (of those the longest), across any split of the text.

    Holds back only what could still be the beginning of a stop string. `keeps`: the text ends
    behind the stop string instead of before it.
    """

    def __init__(self, stops: Sequence[str], *, keeps: bool = False) -> None:
        self._keeps = keeps
        self.found = ""  # the stop string
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops)]
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """Text that may be sent now, and whether a stop string was found; then nothing follows."""
        ends = [(automaton.feed(piece), -len(automaton.stop)) for automaton in self._automata]
        first = min((end for end in ends if end[0] >= 0), default=None)
        text = self._held + piece
        if first is not None:
            end, size = len(self._held) + first[0], -first[1]
            self.found = text[end - size : end]
            self._held = ""
            return text[: end if self._keeps else end - size], True
        num_held = max((automaton.num_matched for automaton in self._automata), default=0)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut], False

    def finish(self) -> str:
        """What was held back; the text has ended, so it is not the beginning of a stop string."""
        held, self._held = self._held, ""
        return held


class Piece(NamedTuple):
    """What some tokens added to the text; `num_tokens` of them count, fewer only if `stopped`."""

    text: str
    num_tokens: int
    stopped: bool = False
    starts: Sequence[int] = ()  # `Ends.places`: where they begin in the text before stop strings


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends an answer's text, beside the model. Nothing does within the first `min_tokens`."""

    stops: Sequence[str] = ()  # strings, none of them empty
    keeps_stop: bool = False  # the text ends behind the stop string and not before it
    min_tokens: int = 0
    over: Callable[[str], bool] | None = None  # gets a token's text, says whether it is the last
    is_wanted: bool = True  # False: the answer ends before its first token
    places: bool = False  # of tokens are wanted


BY_MODEL = Ends()


class OutputText:
    """The text of one answer: its own detokenizer, then stop strings.

    The token that completes a stop string is the last that counts. So the result does not depend on
    how many tokens arrive at a time.
    """

    def __init__(self, detokenizer: Detokenizer, ends: Ends) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(ends.stops, keeps=ends.keeps_stop) if ends.stops else None
        self._num_unmatched = ends.min_tokens
        self._over, self._is_wanted = ends.over, ends.is_wanted
        self._places, self._num_chars = ends.places, 0

    @property
    def stopped_by(self) -> str:
        """The stop string that has ended it; "": none has."""
        return "" if self._matcher is None else self._matcher.found

    def feed(self, tokens: Sequence[int]) -> Piece:
        """Take the next tokens; after a `stopped` piece nothing may follow."""
        if not self._is_wanted:
            return Piece("", 0, stopped=True)
        if self._matcher is None and self._over is None and not self._places:
            return Piece(self._detokenizer.feed(tokens), len(tokens))
        texts, starts = list[str](), list[int]()
        for i, token in enumerate(tokens):
            text = self._detokenizer.feed((token,))
            starts.append(self._num_chars)
            self._num_chars += len(text)
            stopped, may_stop = False, self._num_unmatched <= 0
            self._num_unmatched -= 1
            if may_stop and self._matcher is not None:
                text, stopped = self._matcher.feed(text)
            texts.append(text)
            is_over = self._over is not None and self._over(text)
            if stopped or (may_stop and is_over):
                return Piece("".join(texts), i + 1, stopped=True, starts=starts)
        return Piece("".join(texts), len(tokens), starts=starts)

    def finish(self) -> str:
        """The rest of the text once the last token was fed."""
        rest = self._detokenizer.finish()
        if self._matcher is None:
            return rest
        text, stopped = self._matcher.feed(rest)
        return text if stopped else text + self._matcher.finish()
