"""What a checkpoint's chat template makes of an assistant's calls: tried once, at the start.

No two families of models write calls alike, and templates differ in what they take: some raise at
two calls or drop the second, some want the arguments as a string, some write a call only where
`content` is null. So an assistant's turn with calls is rendered in one way after another, until its
names and values stand in the prompt as they were given.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, Protocol

from worker.errors import UserError

# Of a CPU for one probe; a rendering that has begun then is the last (`writing.MAX_CPU_S`).
MAX_S = 0.5
Message = dict[str, Any]
Content = Literal["empty", "null", "absent"]
CONTENTS: Mapping[Content, Message] = {
    "empty": {"content": ""}, "null": {"content": None}, "absent": {}
}  # fmt: skip
NAMES = ("probe_first", "probe_second")  # of the functions called
IDS = ("probe0001", "probe0002")  # of 9 letters and digits, as Mistral's templates demand
# Stands in each call's arguments under "word"; no form of calls escapes it.
WORDS = ("kvlaneword", "kvlanelast")
ASKED, SAID, MORE, THOUGHT = "kvlaneasks", "kvlanesays", "kvlaneadds", "kvlanethinks"
THINKS: Message = dict.fromkeys(("reasoning_content", "thinking"), THOUGHT)
RICH: tuple[Message, ...] = (
    {
        "word": WORDS[0],
        "lines": 'one\n <two> "three"\n',
        "nested": {"list": ["é", 1, 2.5, True, None]},
        "count": -3,
        "ratio": 1.5,
        "no": False,
        "nothing": None,
        "items": ["a", {"c": 1}],
        "city": "Zürich 東京",
    },
    {"empty": {}, "word": WORDS[1]},
)
PLAIN: tuple[Message, ...] = ({"word": WORDS[0], "city": "Oslo"}, {"word": WORDS[1]})
# Some templates take no schema of another type, or no parameter without a description.
TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A function.",
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": "string", "description": "A text."} for key in arguments
                },
                "required": ["word"],
            },
        },
    }
    for name, arguments in zip(NAMES, RICH, strict=True)
]
# What a few templates read beside messages and tools; given where they refuse without.
_PRINTED, _NO_VALUES, _REJECTED = 1, 2, 3  # faults of a rendering, the least first
EXTRA = {"functions": "[]", "datetime": "2026-01-01"}


class Render(Protocol):
    """`ChatTemplate.render`; raises a UserError if the template refuses."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Probe:
    """What a template writes, and how it wants to be given what it writes."""

    # The assistant's turn with calls of NAMES: from behind the generation prompt to where a turn of
    # mere text would end, too. Empty: the template writes no calls.
    text: str = ""
    num_calls: int = 0  # in `text`; 1 where the template takes no second call
    arguments: tuple[Message, ...] = ()  # of these calls: RICH, or PLAIN where it refuses RICH
    has_tools: bool = False  # calls were written in a prompt with tools
    as_text: bool = False  # it wants arguments as a string, not as an object
    content: Content = "empty"  # what it wants in `content` beside calls
    takes_parts: frozenset[str] = frozenset()  # roles whose content it takes as a list of parts
    needs_parts: frozenset[str] = frozenset()  # those of which it loses a string
    tools_text: str = ""  # what a prompt with TOOLS has that the prompt without has not
    # What stands before a `reasoning_content`, from the user's text on, and between it and the
    # content. None: the template leaves it out.
    reasoning: tuple[str, str] | None = None
    drops_calls: bool = False  # of a turn that has a text, too
    # Whether a turn may have reasoning beside a text and calls, which gpt-oss refuses.
    thinks_beside: bool = True


def probed(render: Render) -> Probe:
    """What the template behind `render` makes of calls; takes MAX_S and a rendering at most."""
    trials = _Trials(render)
    takes, needs = trials.parts("user", lambda message: [message])
    trials.asks[0]["content"] = _parts(ASKED) if needs else ASKED
    found = trials.first(RICH)
    if not found.text and trials.refused:
        found = trials.first(PLAIN)
    roles = [("user", takes, needs)]
    for role, around in trials.turns(found).items():
        roles.append((role, *trials.parts(role, around)))
    return replace(
        found,
        takes_parts=frozenset(role for role, takes, _ in roles if takes),
        needs_parts=frozenset(role for role, _, needs in roles if needs),
        tools_text=_middle(trials.prompt(TOOLS), trials.prompt(())),
        reasoning=trials.reasoning(),
        **trials.beside(found),
    )


@dataclass(slots=True)
class _Trials:
    """Renderings of one template, while there is time."""

    render: Render
    until: float = field(default_factory=lambda: time.thread_time() + MAX_S)
    refused: bool = False  # the template has, at least once
    asks: list[Message] = field(default_factory=lambda: [{"role": "user", "content": ASKED}])

    def of(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), *, begins: bool = False
    ) -> str:
        """Empty where the template refuses, or the time is over."""
        for extra in ({}, EXTRA):
            if time.thread_time() > self.until:
                break
            try:
                return self.render(messages, tools=tools, add_generation_prompt=begins, extra=extra)
            except UserError:
                self.refused = True
        return ""

    def prompt(self, tools: Sequence[Message]) -> str:
        return self.of(self.asks, tools, begins=True)

    def parts(self, role: str, around: Callable[[Message], list[Message]]) -> tuple[bool, bool]:
        """Whether a content of parts is written as their texts; whether a string is not."""
        shown = self.of(around({"role": role, "content": _parts(SAID, MORE)}))
        between, found, _ = shown.partition(SAID)[2].partition(MORE)
        if not found or "text" in between:  # a list that is printed
            return False, False
        return True, SAID not in self.of(around({"role": role, "content": SAID}))

    def turns(self, found: Probe) -> dict[str, Callable[[Message], list[Message]]]:
        """Chats of which a message is the turn of a role, by role."""
        called = _turn(_calls(found.arguments[:1] or RICH[:1], found.as_text), found.content)
        answers = {"tool_call_id": IDS[0], "name": NAMES[0]}
        return {
            "system": lambda message: [message, *self.asks],
            "assistant": lambda message: [*self.asks, message],
            "tool": lambda message: [*self.asks, called, message | answers],
        }

    def reasoning(self) -> tuple[str, str] | None:
        shown = self.of([*self.asks, {"role": "assistant", "content": SAID, **THINKS}])
        before, found, after = shown.rpartition(ASKED)[2].partition(THOUGHT)
        between, ended, _ = after.partition(SAID)
        return (before, between) if found and ended else None

    def beside(self, found: Probe) -> dict[str, bool]:
        """What becomes of calls beside a text, and of a thought beside both."""
        calls = _calls(found.arguments[:1] or RICH[:1], found.as_text)
        tools = TOOLS if found.has_tools else ()
        turn = _turn(calls, "empty") | {"content": SAID}
        tail = self.of([*self.asks, turn], tools).rpartition(ASKED)[2]
        writes = found.num_calls or found.content != "empty"
        return {
            "drops_calls": bool(tail and writes and NAMES[0] not in tail),
            "thinks_beside": not tail or bool(self.of([*self.asks, turn | THINKS], tools)),
        }

    def first(self, arguments: Sequence[Message]) -> Probe:
        """The first way of the ladder in which calls are written.

        If there is none, `text` is empty, and the rest is the way in which most of a call was.
        """
        best: tuple[int, str, Probe] = (_REJECTED, "", Probe())
        for tools, num, as_text in product((TOOLS, ()), (2, 1), (False, True)):
            way = Probe("", num, tuple(arguments[:num]), has_tools=bool(tools), as_text=as_text)
            # Of two without a fault the shorter has no empty turn and no "None".
            found = min(self.written(way), key=lambda found: (found[0], len(found[1])))
            if found[0] < best[0]:
                best = found
            if not best[0]:
                break
        fault, tail, way = best
        if fault < _NO_VALUES:
            return replace(way, text=self.turn(tail, TOOLS if way.has_tools else ()))
        return replace(way, num_calls=0, arguments=())

    def written(self, way: Probe) -> Iterator[tuple[int, str, Probe]]:
        """Of each content beside calls: what is wrong with them, the prompt's end, the way."""
        calls, arguments = _calls(way.arguments, way.as_text), way.arguments
        tools = TOOLS if way.has_tools else ()
        for content in CONTENTS:
            shown = self.of([*self.asks, _turn(calls, content)], tools)
            tail, fault = shown.rpartition(ASKED)[2], 0
            if not all(name in tail for name in NAMES[: len(calls)]):
                fault = _REJECTED
            elif not all(word in tail and f"{word}\\" not in tail for word in WORDS[: len(calls)]):
                fault = _NO_VALUES
            elif str(arguments[0]) in tail:  # as Python prints an object: a string was expected
                fault = _PRINTED
            yield fault, tail, replace(way, content=content)

    def turn(self, tail: str, tools: Sequence[Message]) -> str:
        """The assistant's own of `tail`, which is what follows the user's text."""
        begun = self.prompt(tools).rpartition(ASKED)[2]
        said = self.of([*self.asks, {"role": "assistant", "content": SAID}], tools)
        head, _, end = said.rpartition(ASKED)[2].partition(SAID)
        start = max(_common(tail, begun), _common(tail, head))
        tail = tail[start:]
        return tail.removesuffix(end) if end.strip() else tail


def _parts(*texts: str) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


def _turn(calls: Sequence[Message], content: Content) -> Message:
    return {"role": "assistant", **CONTENTS[content], "tool_calls": list(calls)}


def _calls(arguments: Sequence[Message], as_text: bool) -> list[Message]:
    given = map(json_text, arguments) if as_text else arguments
    return [
        {"id": id, "type": "function", "function": {"name": name, "arguments": one}}
        for id, name, one in zip(IDS, NAMES, given, strict=False)
    ]


def json_text(value: Any) -> str:
    """A call's arguments, as models write them."""
    return json.dumps(value, ensure_ascii=False)


def _common(text: str, before: str) -> int:
    """How much of its beginning `text` has in common with `before`; no mark <…> or […] is cut."""
    shared = text[: num_shared(text, before)]
    if shared == before:
        return len(shared)
    mark = max(shared.rfind("<"), shared.rfind("["))
    return mark if mark > max(shared.rfind(">"), shared.rfind("]")) else len(shared)


def _middle(text: str, other: str) -> str:
    """What `text` has between the beginning and the end that it shares with `other`."""
    start = num_shared(text, other)
    rest, shorter = text[start:], other[start:]
    end = num_shared(rest[::-1], shorter[::-1])
    return rest[: len(rest) - end]


def num_shared(some: Sequence[str], others: Sequence[str]) -> int:
    """How many characters, or pieces, both begin with."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(some), len(others)))
