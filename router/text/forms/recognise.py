"""Which form of calls a model uses, by what its own chat template writes for two calls.

The form is read off the text: what stands round the calls' names and arguments, what separates
two of them, how values are spelled. It counts if a parser of that form finds the same calls in the
same text. Rows of `known` give it a name, and what else such models are known to write.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from router.text.forms.form import ID, MARK, PIECE, Form, Json, Pairs, Style, Tags, segments
from router.text.forms.known import FORMS, HARMONY, SIGNS
from router.text.forms.parser import FormParser
from router.text.forms.schema import kind_of
from router.text.forms.values import DECODER, Depth, loaded
from router.text.parsers import Parsed
from router.text.probe import IDS, NAMES, WORDS, Probe, num_shared

By = Literal["setting", "response_template", "probe", "guess", "none"]
JSON_ID = re.compile(r'("\w*id"\s*:\s*")[^"]*(?=")')
ORDER = re.compile(rf"(?<=:)\d+(?=<)|{'|'.join(IDS)}")
SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class Found:
    """The form of a model's calls, and how it was found out."""

    form: Form
    by: By


def recognised(probe: Probe, source: str) -> Found:
    """The form of calls of the template with this probe and `source`."""
    if probe.text:
        form = HARMONY if f"to=functions.{NAMES[0]}<|channel|>" in probe.text else _read_off(probe)
        if form is not None:
            return Found(form, "probe")
    for text in (probe.tools_text, source) if not probe.text else ():
        for sign, name in SIGNS:
            if sign in text:
                return Found(FORMS[name], "guess")
    return Found(FORMS["hermes"], "none")


def _read_off(probe: Probe) -> Form | None:
    text = ORDER.sub(ID, JSON_ID.sub(rf"\g<1>{ID}", probe.text))
    for read in (_json, _pairs, _tags):
        found = read(text, probe.arguments)
        if found is not None and _agrees(form := _named_as(found, len(probe.arguments)), probe):
            return form
    return None


def _agrees(form: Form, probe: Probe) -> bool:
    """Whether a parser of this form finds the probe's calls in the probe's text."""
    if any(name in text for text in form.texts() for name in NAMES):  # it writes names twice
        return False
    called = list(zip(NAMES, probe.arguments, strict=False))
    schemas = {
        name: {"properties": {key: {"type": kind_of(value)} for key, value in given.items()}}
        for name, given in called
    }
    parser, parsed = FormParser(form, schemas), Parsed()
    parsed += parser.feed(probe.text)
    parsed += parser.finish()
    return called == [(call.name, loaded(call.arguments)) for call in parsed.calls]


def _named_as(form: Form, num_calls: int) -> Form:
    """A form under the name of a known one that begins calls in the same way, if there is one."""
    form = replace(form, bare=all(len(text) < 3 for text in form.lead))
    like = [row for row in FORMS.values() if row is not HARMONY and _is_like(row, form)]
    for row in sorted(like, key=lambda row: segments(row.last) != segments(form.last))[:1]:
        if num_calls == 1:  # which says nothing of what separates two
            return row
        return replace(
            row, first=form.first, opens=form.opens, named=form.named, style=form.style,
            closes=form.closes, between=form.between, last=form.last, words=form.words,
            bare=form.bare,
        )  # fmt: skip
    return replace(form, single=num_calls == 1)


def _is_like(form: Form, other: Form) -> bool:
    """Whether both begin calls in the same way."""
    return _signature(form) == _signature(other)


def _signature(form: Form) -> tuple[Any, ...]:
    lead = segments(form.first + form.opens)
    own = segments(form.style.opens) if isinstance(form.style, Tags) else ()
    return type(form.style), lead or segments(form.between), segments(form.named), own


def _json(text: str, arguments: Sequence[Mapping[str, Any]]) -> Form | None:
    spans = list[tuple[int, int]]()
    for name, given in zip(NAMES, arguments, strict=False):
        end = text.find(name)
        while (start := text.find("{", end)) >= 0:
            try:
                value, end = DECODER.raw_decode(text, start)
            except (ValueError, RecursionError):
                value, end = None, start + 1
            if value == given:
                spans.append((start, end))
                break
    return _form(text, spans, Json()) if len(spans) == len(arguments) else None


def _pairs(text: str, arguments: Sequence[Mapping[str, Any]]) -> Form | None:
    written = re.compile(rf"{NAMES[0]}\s*([({{]).*?\bword\s*([=:])\s*(\S*?){WORDS[0]}", re.DOTALL)
    found = written.search(text)
    if found is None or not found[3]:
        return None
    quote = "" if found[3] in "'\"" else found[3]
    between = re.search(r"[^\w\s],(\s*)\w+\s*[=:]", text[found.start() :])
    space = between[1] if between else " "
    style = Pairs(found[2], ")" if found[1] == "(" else "}", f",{space}", quote)
    spans = list[tuple[int, int]]()
    for name, _ in zip(NAMES, arguments, strict=False):
        start = text.find(found[1], text.find(name)) + 1
        end = Depth((quote,) if quote else "'\"", depth=1).feed(text[start:])
        if end < 0:
            return None
        spans.append((start, start + end))
    return _form(text, spans, style)


def _tags(text: str, arguments: Sequence[Mapping[str, Any]]) -> Form | None:
    keys = list(arguments[0])
    begins = text.find(NAMES[0]) + len(NAMES[0])
    value = text.find(WORDS[0], begins)
    key, end = text.rfind(keys[0], begins, value), value + len(WORDS[0])
    following = text.find(keys[1], end)
    if min(key, following) < 0 or keys[0] != "word":
        return None
    named, before = text[key + len(keys[0]) : value], _pieces(text[begins:key])
    behind = _pieces(text[end:following])
    num = num_shared(before[::-1], behind[::-1])
    opens, behind = "".join(before[len(before) - num :]), behind[: len(behind) - num]
    ends = [text.find(given, end) + len(given) for given in (arguments[0][keys[-1]], WORDS[1])]
    names = [text.find(name, end) for name in NAMES[1:]]
    tail = text[ends[0] : names[0] if len(arguments) > 1 else len(text)]
    num = num_shared(behind, _pieces(tail))
    closes, between = "".join(behind[:num]), "".join(behind[num:])
    other = ""
    if "count" in keys:
        at = text.find("count", end)
        other = text[at + len("count") : text.find("-3", at)]
    style = Tags(
        opens, named, closes, between, "" if other == named else other, "<![CDATA[" in text
    )
    start = begins + len("".join(before)) - len(opens)
    second = names[0] + len(NAMES[1])
    spans = [(start, ends[0] + len(closes)), (text.find(opens, second), ends[1] + len(closes))]
    return _form(text, spans[: len(arguments)], style)


def _form(text: str, spans: Sequence[tuple[int, int]], style: Style) -> Form:
    """The form of a text with arguments at `spans`."""
    names = [text.rfind(name, 0, start) for name, (start, _) in zip(NAMES, spans, strict=False)]
    named = text[names[0] + len(NAMES[0]) : spans[0][0]]
    before, last = text[: names[0]], text[spans[-1][1] :]
    first = between = ""
    if len(spans) > 1:
        pieces, middle = _pieces(before), _pieces(text[spans[0][1] : names[1]])
        num = num_shared(pieces[::-1], middle[::-1])
        first, opens = "".join(pieces[: len(pieces) - num]), "".join(pieces[len(pieces) - num :])
        middle, behind = middle[: len(middle) - num], _pieces(last)
        num = num_shared(middle, behind)
        closes, between = "".join(middle[:num]), "".join(middle[num:])
        last = _as_many_marks("".join(behind[num:]), first)
    else:
        opens, closes, last, between = before, _as_many_marks(last, before), "", "\n"
    if not first:
        space = SPACE.match(opens)
        assert space is not None
        opens, between = opens[space.end() :], between + space[0]
    if isinstance(style, Tags):
        space = SPACE.match(style.opens)
        assert space is not None
        if space[0] and closes.startswith(space[0]):  # it rather stands behind every value
            named, closes = named + space[0], closes[space.end() :]
            style = replace(style, opens=style.opens[space.end() :], closes=style.closes + space[0])
    return Form(
        name="own", first=first.lstrip("\n"), opens=opens, named=named, style=style, closes=closes,
        between=between, last=last, words=_words(text),
    )  # fmt: skip


def _as_many_marks(text: str, first: str) -> str:
    """The beginning of `text` with as many marks as `first` has: what follows ends the turn."""
    num = len(MARK.findall(first)) if first else -1
    for i, mark in enumerate(MARK.finditer(text)):
        if i >= num:
            return text[: mark.start()].rstrip() if num >= 0 else ""
    return text if num >= 0 else ""


def _words(text: str) -> tuple[str, str, str]:
    """How true, false and null are spelled where they are no JSON."""
    found = re.search(r"\bno\b.*?\b([Ff])alse\b", text, re.DOTALL)
    true, false = ("True", "False") if found and found[1] == "F" else ("true", "false")
    nothing = re.search(r"\bnothing\b.*?\b(None|null)\b", text, re.DOTALL)
    return true, false, nothing[1] if nothing else "null"


def _pieces(text: str) -> list[str]:
    return PIECE.findall(text)
