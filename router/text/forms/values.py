"""Values of arguments as models write them, in JSON or as Python does, made JSON.

Numbers keep their digits. Nothing here raises: what is no value is None, or text.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from router.text.forms.schema import TEXT, kind_of

WORDS = {"True": "true", "False": "false", "None": "null"}
TOKEN = re.compile(
    r"""\s+|[\[\]{}(),:]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s\[\]{}(),:'"]+""", re.DOTALL
)
MARKED_TOKEN = re.compile(r"[\[\]{},:]|[^\s\[\]{},:][^\[\]{},:]*")
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
SURROGATES = re.compile("[\ud800-\udfff]+")
ENCODER = json.JSONEncoder(ensure_ascii=False)
DECODER = json.JSONDecoder(strict=False)
OBJECT_KEY = re.compile(r'\s*[{,]\s*("(?:[^"\\]|\\.)*")\s*:\s*')
MAX_CHARS = 1 << 20  # of a value that is looked at as JSON or Python


class Depth:
    """Finds where brackets that have opened are closed again, in text that arrives in pieces.

    quotes: round text in which brackets are none; those of one character may be escaped in it, the
    others must be fed whole. depth: of brackets open already. stops: characters that end it, too,
    at depth 1.
    """

    def __init__(self, quotes: Sequence[str] = '"', stops: str = "", depth: int = 0) -> None:
        any_quote = "|".join(map(re.escape, quotes))
        self._outside = re.compile(rf"{any_quote}|[\[\](){{}}{stops}]")
        self._stops, self._depth = stops, depth
        self._quote = ""  # in whose text it is
        self._escaped = False

    @property
    def is_quoted(self) -> bool:
        """Whether what comes stands in quotes."""
        return bool(self._quote)

    def feed(self, text: str) -> int:
        """Index just past what ends it in `text`; -1 if nothing does."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
            elif self._quote:
                at = self._behind_quote(text, at)
            elif (found := self._outside.search(text, at)) is None:
                break
            elif self._ends(found[0]):
                return found.end()
            else:
                at = found.end()
        return -1

    def _behind_quote(self, text: str, at: int) -> int:
        end = text.find(self._quote, at)
        end = len(text) if end < 0 else end
        escape = text.find("\\", at, end) if len(self._quote) == 1 else -1
        if escape >= 0:
            self._escaped = True
            return escape + 1
        quote = self._quote
        self._quote = quote if end == len(text) else ""
        return end + len(quote)

    def _ends(self, sign: str) -> bool:
        if sign in self._stops:
            return self._depth == 1
        if sign in ("[", "(", "{"):
            self._depth += 1
        elif sign in ("]", ")", "}"):
            self._depth -= 1
            return self._depth <= 0
        else:
            self._quote = sign
        return False


def text_json(text: str) -> str:
    """`text` as a string of JSON."""
    return ENCODER.encode(text)


def escaped(text: str) -> str:
    """`text` as it stands within a string of JSON."""
    return ENCODER.encode(text)[1:-1]


def loaded(text: str) -> Any:
    """The value of a text of JSON, to which NaN and Infinity are none; Ellipsis: it is none."""
    try:
        return json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return ...


def _refused(name: str) -> Any:
    raise ValueError(name)


def fields_of(text: str) -> dict[str, tuple[Any, str]]:
    """Values of a JSON object, and how they are written, by key; empty: it is no such object."""
    fields, at = dict[str, tuple[Any, str]](), 0
    try:
        while key := OBJECT_KEY.match(text, at):
            value, at = DECODER.raw_decode(text, key.end())
            fields[json.loads(key[1])] = value, text[key.end() : at]
    except (ValueError, RecursionError):
        return {}
    return fields if text[at:].strip(" \r\n\t") == "}" else {}


def as_json(text: str, quote: str = "") -> str | None:
    """A value as JSON; None: it is none. quote: round strings, instead of the usual ones."""
    text = text.strip()
    if len(text) > MAX_CHARS:
        return None
    if not quote and loaded(text) is not ...:
        return text
    pieces, last = list[str](), ""
    for piece in _marked(text, quote) if quote else _spelled(text):
        if piece in "}]" and last == ",":
            pieces.pop()
        pieces.append(piece + " " * (piece in ",:"))
        last = piece
    made = "".join(pieces)
    return None if loaded(made) is ... else made


def typed(text: str, kinds: frozenset[str]) -> str:
    """The JSON of a bare text that is to have one of these types; empty: any that it looks like."""
    made = None if kinds == TEXT else as_json(text)
    kind = "string" if made is None else kind_of(loaded(made))
    if made is None or kind == "string":
        return text_json(text)
    fits = kind in kinds or (kind == "integer" and "number" in kinds)
    return text_json(text) if "string" in kinds and not fits else made


def object_of(body: str, equals: str, quote: str = "") -> str | None:
    """The JSON of names and values in pairs, with commas between; None: they are no such pairs."""
    made = list[str]()
    while body.strip():
        end = Depth((quote,) if quote else "\"'", ",", depth=1).feed(body)
        pair, body = (body, "") if end < 0 else (body[: end - 1], body[end:])
        name, _, value = pair.partition(equals)
        value = as_json(value, quote)
        if value is None or not name.strip():
            return None
        made.append(f"{text_json(name.strip())}: {value}")
    return "{" + ", ".join(made) + "}"


def _spelled(text: str) -> Iterator[str]:
    """The tokens of JSON that those of a text, in JSON or Python, stand for."""
    at = 0
    while found := TOKEN.match(text, at):
        token, at = found[0], found.end()
        if token[0] in "'\"":
            yield text_json(_unescaped(token[1:-1]))
        elif not token.isspace():
            yield {"(": "[", ")": "]"}.get(token) or WORDS.get(token, token)
    if at < len(text):
        yield "\0"  # which is no JSON


def _marked(text: str, quote: str) -> Iterator[str]:
    """The same where `quote` stands round strings, and nothing round names."""
    for i, part in enumerate(text.split(quote)):
        if i % 2:
            yield text_json(part)
            continue
        for token in MARKED_TOKEN.finditer(part):
            word = token[0].strip()
            word = WORDS.get(word, word)
            is_name = word not in "[]{},:" and loaded(word) is ...
            yield text_json(word) if is_name else word


def _unescaped(text: str) -> str:
    """What a string of JSON or Python says; an escape that neither knows stays what it is."""
    if "\\" not in text:
        return text

    def said(found: re.Match[str]) -> str:
        code = found[1]
        if code[0] in "uxU" and len(code) > 1:
            number = int(code[1:], 16)
            return chr(number) if number < 0x110000 else found[0]
        return ESCAPED.get(code, code if code in "\\'\"/" else found[0])

    text = ESCAPE.sub(said, text)
    return SURROGATES.sub(_joined, text)


def _joined(found: re.Match[str]) -> str:
    """The characters that halves of surrogate pairs make; a half alone is none."""
    return found[0].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
