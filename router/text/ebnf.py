"""GBNF, the grammars of llama.cpp, xgrammar and SGLang, as lark rules of llguidance.

They are plain context-free grammars, in which a rule may end wherever it can. llguidance's own
rewriter makes lark terminals of rules without references, which take as much as they can. So every
rule stays a rule here, and a terminal is one character.
Syntax: https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md, and xgrammar's EBNF,
where a rule may go on in further lines.
"""

import re
from typing import Any, NamedTuple

MAX_CHARS, MAX_RULES = 1 << 14, 256
MAX_DEPTH = 100  # of parentheses
MAX_REPEATS = 1 << 12  # in one `{m,n}`
MAX_COPIES = 1 << 15  # of all that stands in repeats, if they were written out

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)|(?P<defines>::=)|(?P<name>[A-Za-z_][\w.-]*|\d[\w.-]*)
    |(?P<text>"(?:\\.|[^"\\\n])*")|(?P<chars>\[\^?(?:\\.|[^\]\\\n])*\])
    |(?P<repeat>\{\s*\d+\s*(?:,\s*\d*\s*)?\}|[*+?])|(?P<mark>[().|])""",
    re.VERBOSE | re.ASCII,
)
_CHAR = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|([^\\])", re.DOTALL
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {c: c for c in "\"'\\[]-^/?."}


class Bad(ValueError):
    """What is wrong with a grammar, and where."""


class _Token(NamedTuple):
    kind: str
    text: str
    at: int  # characters before it


class _Made(NamedTuple):
    """What a part of a rule has become."""

    lark: str
    size: int  # terminals and references, those in repeats as often as they may stand
    needs: list[list[Any]]  # ways to meet it, lists of rules' names and further such lists


_EMPTY = _Made('""', 1, [[]])


def lark_of(text: str) -> str:
    """The lark grammar of a GBNF grammar; raises `Bad`."""
    if len(text) > MAX_CHARS or text.count("::=") > MAX_RULES:
        raise Bad(f"at most {MAX_CHARS} characters and {MAX_RULES} rules")
    return _Reader(text).grammar()


class _Reader:
    """Reads one grammar by descent."""

    def __init__(self, text: str) -> None:
        self._text, self._depth, self._i = text, 0, 0
        self._tokens = list[_Token]()
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise self._bad("this cannot be read", at)
            if found.lastgroup != "space":
                self._tokens.append(_Token(found.lastgroup, found[0], at))
            at = found.end()
        self._tokens += [_Token("end", "", at)] * 2

    def grammar(self) -> str:
        rules, names = dict[str, _Made](), dict[str, str]()
        starts = (i for i in range(len(self._tokens) - 1) if self._starts(i))
        for i in starts:
            name = self._tokens[i].text
            if name in names:
                raise self._bad(f"a second rule {name}", self._tokens[i].at)
            names[name] = f"r{len(names)}"
        self._names = names
        while self._tokens[self._i].kind != "end":
            start = self._tokens[self._i]
            if not self._starts(self._i):
                raise self._bad("a rule begins with its name and ::=", start.at)
            self._i += 2
            rules[start.text] = self._ways()
        if "root" not in rules:
            raise Bad("it needs a rule `root`")
        if sum(made.size for made in rules.values()) > MAX_COPIES:
            raise Bad(f"its repeats stand for more than {MAX_COPIES} parts")
        ends = set[str]()  # rules that some text meets
        while more := {n for n, m in rules.items() if n not in ends and _ends(m.needs, ends)}:
            ends |= more
        if "root" not in ends:
            raise Bad("no text ends: `root` always leads to a further rule")
        lines = [f"{names[name]}: {made.lark}" for name, made in rules.items()]
        return "\n".join([f"start: {names['root']}", *lines])

    def _starts(self, i: int) -> bool:
        return self._tokens[i].kind == "name" and self._tokens[i + 1].kind == "defines"

    def _bad(self, why: str, at: int) -> Bad:
        line = self._text.count("\n", 0, at) + 1
        return Bad(f"line {line}, at {self._text[at : at + 20]!r}: {why}")

    def _ways(self) -> _Made:
        made = [self._sequence()]
        while self._tokens[self._i].text == "|":
            self._i += 1
            made.append(self._sequence())
        lark = " | ".join(one.lark for one in made)
        return _Made(lark, sum(m.size for m in made), [way for m in made for way in m.needs])

    def _sequence(self) -> _Made:
        made = list[_Made]()
        while (token := self._tokens[self._i]).kind != "end" and token.text not in ("|", ")"):
            if self._starts(self._i):
                break
            made.append(self._repeated(self._item(token)))
        if not made:
            return _EMPTY
        lark, size = " ".join(one.lark for one in made), sum(one.size for one in made)
        return _Made(lark, size, [[one.needs for one in made]])

    def _item(self, token: _Token) -> _Made:
        self._i += 1
        if token.kind == "name":
            if token.text not in self._names:
                raise self._bad("no rule has this name", token.at)
            return _Made(self._names[token.text], 1, [[token.text]])
        if token.kind == "text":
            chars = [_regex(char) for char in self._chars(token, token.text[1:-1])]
            lark = " ".join(f"/{char}/" for char in chars)
            return _Made(f"({lark})", len(chars), [[]]) if chars else _EMPTY
        if token.kind == "chars":
            return _Made(self._class(token), 1, [[]])
        if token.text == ".":
            return _Made("/(?s:.)/", 1, [[]])
        if token.text != "(":
            raise self._bad("this has no place here", token.at)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._bad("parentheses are nested too deeply", token.at)
        inner = self._ways()
        if self._tokens[self._i].text != ")":
            raise self._bad("a parenthesis is not closed", token.at)
        self._i += 1
        self._depth -= 1
        return inner._replace(lark=f"({inner.lark})")

    def _repeated(self, made: _Made) -> _Made:
        while (token := self._tokens[self._i]).kind == "repeat":
            self._i += 1
            marks = {"*": (0, None), "+": (1, None), "?": (0, 1)}
            least, most = marks.get(token.text) or self._limits(token)
            if most == 0:
                return _EMPTY
            many = (
                "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
            )
            needs: list[list[Any]] = made.needs if least else [[]]
            made = _Made(f"({made.lark}){many}", made.size * (most or least or 1), needs)
        return made

    def _limits(self, token: _Token) -> tuple[int, int | None]:
        least, comma, most = token.text[1:-1].replace(" ", "").partition(",")
        low, high = int(least), (int(most) if most else None if comma else int(least))
        if max(low, high or 0) > MAX_REPEATS or (high is not None and high < low):
            raise self._bad(f"repeats are in order, and at most {MAX_REPEATS}", token.at)
        return low, high

    def _chars(self, token: _Token, text: str) -> list[str]:
        chars = list[str]()
        for found in _CHAR.finditer(text):
            code, escaped = found[1] or found[2] or found[3], found[4]
            if escaped is not None and escaped not in _ESCAPES:
                raise self._bad(f"no escape: {found[0]}", token.at)
            number = int(code, 16) if code else 0
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise self._bad(f"no character: {found[0]}", token.at)
            chars.append(chr(number) if code else _ESCAPES[escaped] if escaped else found[5])
        return chars

    def _class(self, token: _Token) -> str:
        """A class of characters; a `-` is a range unless it is escaped, first or last."""
        negated = token.text.startswith("[^")
        inner = token.text[2 if negated else 1 : -1]
        parts = [found[0] for found in _CHAR.finditer(inner)]
        chars, ranges, i = self._chars(token, inner), list[str](), 0
        while i < len(parts):
            first = last = chars[i]
            if i + 2 < len(parts) and parts[i + 1] == "-":
                last, i = chars[i + 2], i + 2
            if last < first:
                raise self._bad("a range is backwards", token.at)
            ranges.append(_regex(first) + (f"-{_regex(last)}" if last != first else ""))
            i += 1
        if not ranges:
            raise self._bad("no character is in it", token.at)
        return f"/[{'^' if negated else ''}{''.join(ranges)}]/"


def _regex(char: str) -> str:
    """A character as a regular expression has it, within a class and outside."""
    return char if char.isascii() and char.isalnum() else f"\\u{{{ord(char):x}}}"


def _ends(ways: list[list[Any]], ends: set[str]) -> bool:
    """Whether one of `ways` needs no rule but those of `ends`."""
    return any(
        all(need in ends if isinstance(need, str) else _ends(need, ends) for need in way)
        for way in ways
    )
