"""The lark rules of an answer that may call: free text up to a form's mark, from there a call.

What `parser` would take for a call is one of the form's, or does not come. A mark that may be a
word of any text (`functools`) is one only with what follows it in a call. Marks may be tokens and
may be spelled: both count. Text up to a mark is a lazy terminal, so that the first mark ends it.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from router.text.forms.form import Form, segments
from router.text.forms.rules import Called
from router.text.grammar import ANY, Spelling, regex

WORD = re.compile(r".*[\w:]", re.DOTALL)  # a mark without markup


class Around(NamedTuple):
    """What text around calls is like."""

    also: frozenset[int] = frozenset()  # special tokens that it may have
    not_first: str = ""  # a mark with which an answer must not begin, as reasoning would


def free_rules(
    form: Form, functions: Sequence[Called], spelling: Spelling, around: Around, *, several: bool
) -> list[str]:
    """The rules of `answer`, beside those that `rules_of` has made.

    several: further calls may come, and text behind them.
    """
    made = _Rules(form, functions, spelling, around)
    first = rf"\s*{regex(around.not_first)}" if around.not_first else ""
    if form.bare:
        text, calls = made.text("first", *filter(None, (first, rf"\s*{made.head}"))), made.begun()
        return [*made.rules, f"answer: {text} | {calls}"]
    answer = f"answer: {made.text('first', first)} | "
    turn = made.turn("first", first)
    if not several:
        return [*made.rules, answer + turn]
    behind = made.behind
    further, rest = made.turn("behind", behind), made.text("behind", behind)
    return [*made.rules, f"called: {turn} | called {further}", f"{answer}called {rest}"]


class _Rules:
    """Rules of one form's free text, as they are made."""

    def __init__(
        self, form: Form, functions: Sequence[Called], spelling: Spelling, around: Around
    ) -> None:
        self._form, self._functions, self._spelling = form, functions, spelling
        self.rules: list[str] = []
        self._marks: dict[str, str] = {}  # what follows each in a call
        self._nowhere: list[str] = []  # patterns that no text has
        if form.bare:
            self._nowhere = [rf"{regex(mark)}\s*{self.head}" for mark in form.marks]
        else:
            for mark in form.marks:
                self._mark(mark)
        signs = "".join((*form.lead, *form.own_lead, *form.marks, *form.skips, around.not_first))
        meant = {piece for piece in spelling.pieces(signs) if isinstance(piece, int)}
        spoken = ",".join(map(str, sorted(around.also - meant)))
        self._spoken = f"<[{spoken}]>" if spoken else ""  # any of them

    def _mark(self, mark: str) -> None:
        form = self._form
        start = form.first + form.opens
        rest = start.partition(mark if mark in start else form.marks[0])[2]
        if WORD.fullmatch(mark) and len(form.lead) > 1:
            self._nowhere.append(rf"{regex(mark)}\s*{_any((*form.lead[1:], '{'))}")
            size = rest.index(form.lead[1]) + len(form.lead[1])
            mark, rest = mark + rest[:size], rest[size:]
        self._marks[mark] = rest

    @property
    def head(self) -> str:
        """A pattern of how a call without a mark begins."""
        form, names = self._form, _any(one.name for one in self._functions)
        before = _any((*form.lead, *form.skips, *form.marks))
        if form.keys is None:
            behind = _any((*segments(form.named)[:1], "{"))
            return rf"(?:{before}\s*)*{names}\s*{behind}"
        return rf'(?:{before}\s*)*\{{{ANY}"{_any((form.keys[0], "name"))}"\s*:\s*"{names}"'

    @property
    def behind(self) -> str:
        """A pattern with which no text behind calls may begin, as it would be one more call."""
        form = self._form
        if form.last:
            return ""
        if not form.own_lead:
            return r"\s*\S"
        brackets = "{}" if form.keys is not None else "{"
        return rf"\s*{_any((*brackets, *form.own_lead[1:], *form.skips))}"

    def text(self, name: str, *not_first: str) -> str:
        """Free text that does not begin with some patterns."""
        first = self._terminal(f"text_{name}", "", *not_first)
        more = self._spoken and f" | free_{name} {self._spoken} {self._terminal('text_more', '')}"
        self.rules.append(f"free_{name}: {first}{more}")
        return f"free_{name}"

    def turn(self, name: str, not_first: str) -> str:
        """Free text that does not begin with a pattern, and the calls behind it."""
        ways = list[str]()
        for i, (mark, rest) in enumerate(self._marks.items()):
            up_to = self._up_to(i, mark, name, not_first)
            ways.append(f"({up_to}) {self._spelling.literal(rest)} told more")
        self.rules.append(f"turn_{name}: {' | '.join(ways)}")
        return f"turn_{name}"

    def begun(self) -> str:
        """Calls with which an answer begins, and which have no mark."""
        form, ways = self._form, list[str]()
        for i, one in enumerate(self._functions):
            begins = regex(form.first + form.opens + one.name + form.named)
            self.rules += [f"BEGIN_{i}: /\\s*{begins}/", f"begin_{i}[lazy]: BEGIN_{i}"]
            ways.append(f"begin_{i} rest_{i}")
        return f"({' | '.join(ways)}) more"

    def _up_to(self, i: int, mark: str, name: str, not_first: str) -> str:
        """Free text up to a mark, and this: as it is spelled, or as tokens."""
        ways = [self._ending((f"mark_{i}", name), regex(mark), not_first, lazy=True)]
        first, *rest = pieces = self._spelling.pieces(mark)
        if any(isinstance(piece, int) for piece in pieces):
            text = first if isinstance(first, str) else ""
            tokens = " ".join(map(self._spelling.piece, rest if text else pieces))
            ending = self._ending((f"token_{i}", name), regex(text), not_first)
            ways.append(f"({ending}) {tokens}")
        return " | ".join(ways)

    def _ending(
        self, keys: tuple[str, str], end: str, not_first: str, *, lazy: bool = False
    ) -> str:
        """Free text that ends in a pattern, in a rule. keys: of the end, and of the text."""
        key, name = keys
        first = self._terminal(f"{key}_{name}", end, not_first, lazy=lazy)
        if not self._spoken:
            return first
        return (
            f"{first} | free_{name} {self._spoken} {self._terminal(f'{key}_more', end, lazy=lazy)}"
        )

    def _terminal(self, name: str, end: str, *not_first: str, lazy: bool = False) -> str:
        """A terminal of text without what no text has."""
        nowhere = [f"{ANY}{one}(?s:.{'+' if end else '*'})" for one in self._nowhere]
        bans = [*nowhere, *(f"{one}{ANY}" for one in not_first if one)]
        rule = f"{name.upper()}: /{ANY}{end}/" + "".join(f" & ~/{ban}/" for ban in bans)
        if rule not in self.rules:
            self.rules += [rule, *([f"{name}_end[lazy]: {name.upper()}"] if lazy else [])]
        return f"{name}_end" if lazy else name.upper()


def _any(texts: Iterable[str]) -> str:
    return f"(?:{'|'.join(map(regex, texts))})"
