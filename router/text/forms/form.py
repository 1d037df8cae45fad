"""A form of calls, as data: the texts round names and arguments, and how arguments are written.

An answer's calls are, where NAME and ARGUMENTS stand for what a call says:

    first  opens NAME named ARGUMENTS closes  between  opens NAME named ARGUMENTS closes  last

`parser` reads any record of this kind and `rules` makes a grammar of it, so that both agree.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

ID = "\N{OBJECT REPLACEMENT CHARACTER}"  # where in a text a call's id stands
# Of what a text consists for those who compare two: marks, white space, single characters.
PIECE = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|\s+|.", re.DOTALL)
MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
# Of what it consists for a parser, to which white space means nothing.
SEGMENT = re.compile(rf"{ID}|<[^<>\s{ID}]+>|\[/?[A-Z_]+\]|[][(){{}},;]|<?[^][(){{}},;<\s{ID}]+|<")
KEY = re.compile(r'"(\w+)"\s*:\s*"?$')  # the last one of a JSON object that has begun


def segments(text: str) -> tuple[str, ...]:
    """The parts of `text` between which white space may be missing or more."""
    return tuple(SEGMENT.findall(text))


@dataclass(frozen=True, slots=True)
class Json:
    """Arguments are a JSON object."""


@dataclass(frozen=True, slots=True)
class Tags:
    """Arguments are texts between marks, each behind its name: typed by the function's schema.

    other: stands for `named` where the value is no string, in forms that tell these apart.
    """

    opens: str  # before an argument's name
    named: str  # between name and value
    closes: str  # behind the value
    between: str = ""
    other: str = ""
    cdata: bool = False  # a value may stand in <![CDATA[…]]>


@dataclass(frozen=True, slots=True)
class Pairs:
    """Arguments are names and values as a programming language writes them, up to a bracket.

    quote: round strings, of which nothing is escaped; empty: strings are JSON's or Python's.
    """

    equals: str  # between name and value
    ends: str  # the bracket
    between: str = ", "
    quote: str = ""


Style = Json | Tags | Pairs


@dataclass(frozen=True, kw_only=True)
class Form:
    """One form of calls. White space in its texts is a template's; a parser takes any, or none."""

    name: str
    first: str = ""
    opens: str = ""
    named: str = ""
    style: Style = Json()
    closes: str = ""
    between: str = "\n"
    last: str = ""
    # Of true, false and null outside of JSON, as a template spells them.
    words: tuple[str, str, str] = ("true", "false", "null")
    bare: bool = False  # calls have no mark: of a known function, and at an answer's start only
    single: bool = False  # an answer has one call at most
    says: str = ""  # before content
    ends_thought: str = ""  # a call's beginning that may come without the end of the reasoning
    silent: tuple[str, ...] = ()  # functions that stand for an answer without calls
    # What else models begin calls with, or write round them, than their template does.
    enters: tuple[str, ...] = ()
    skips: tuple[str, ...] = ()
    behind_name: tuple[str, ...] = ()

    @cached_property
    def keys(self) -> tuple[str, str] | None:
        """Those of name and arguments, if a call is a JSON object; "": the name is the key."""
        if "{" not in self.opens or not isinstance(self.style, Json):
            return None
        name, arguments = KEY.search(self.opens), KEY.search(self.named)
        return (name[1] if name else "", arguments[1] if arguments else "")

    @cached_property
    def lead(self) -> tuple[str, ...]:
        """What stands before a name, or the object, of an answer's first call."""
        return segments(self.first) + self.own_lead

    @cached_property
    def own_lead(self) -> tuple[str, ...]:
        """The same of each further call."""
        return segments(self.opens.partition("{")[0] if self.keys is not None else self.opens)

    @cached_property
    def tail(self) -> tuple[str, ...]:
        """What stands behind the arguments, or the object, of a call."""
        return segments(self.closes.rpartition("}")[2] if self.keys is not None else self.closes)

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """What begins calls in content; if nothing does, they are an answer's beginning."""
        own = self.lead[:1] or segments(self.between if self.bare else "")[:1]
        return (() if self.bare and self.lead else own) + self.enters

    @cached_property
    def writes_ids(self) -> bool:
        """Whether calls have ids that a template writes again, if they are short enough for it."""
        return ID in self.named + self.closes

    def texts(self) -> Iterator[str]:
        """All texts that are looked for: the special tokens in them are no tokens to skip."""
        yield from (self.first, self.opens, self.named, self.closes, self.between, self.last)
        yield from (*self.enters, *self.behind_name, self.says)
        match self.style:
            case Tags(opens, named, closes, between, other):
                yield from (opens, named, closes, between, other)
            case Pairs(quote=quote):
                yield quote
            case Json():
                pass
