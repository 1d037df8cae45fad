"""Takes calls out of an answer, whatever form they have.

Text is content until a mark of the form; behind it a call must follow, or the mark was content,
too. Of a call, the texts that stand round its name and its arguments are looked for in their order,
but any of them may be missing: what has name and arguments is a call.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from router.text.forms.arguments import JsonReader, Reader, TagsReader
from router.text.forms.form import Form, Tags, segments
from router.text.forms.head import NONE, Head, Heads
from router.text.forms.schema import kinds_of, properties_of
from router.text.forms.values import Depth
from router.text.parsers import CallPart, Calls, Cut, Parsed, kept, sure

State = Literal["content", "head", "arguments", "object", "tail"]


class FormParser(Calls):
    """Content and calls of one answer. functions: parameters of those that may be called, by name.

    Where calls are `Form.bare`, only these are.
    """

    def __init__(self, form: Form, functions: Mapping[str, Any]) -> None:
        super().__init__()
        self._form, self._functions = form, functions
        self._heads = Heads(form, functions)
        self._mark = re.compile("|".join(map(re.escape, form.marks)) or "(?!)")
        self._behind = form.tail + segments(form.between) + segments(form.last)
        self._skips = (*form.skips, "}") if form.keys is not None else form.skips
        # What may stand behind an object, and never in one but in a string.
        marks = (*self._behind[:1], *form.marks)
        self._ends = tuple(mark for mark in marks if len(mark) > 2 and mark[0] not in ' "')
        self._state: State = "head" if form.bare else "content"
        self._num_given = 0  # characters of it that are content if no call follows
        self._within = False  # behind a call, in the same section
        self._said = self._said_since = False  # content was returned; so it was since the last call
        self._gap = ""  # white space before a call that stands between two texts
        self._called = self._counted = self._silent = False
        self._num_behind = 0  # texts behind a call that have come, or were left out
        self._reader: Reader | None = None
        self._depth: Depth | None = None  # of the object in which arguments stand

    def finish(self, *, cut: Cut = False) -> Parsed:
        text, self._text = self._text, ""
        if self._state == "content":
            said = kept(text, cut, *self._form.marks)
            if self._called and not self._said_since and not said.strip():
                return Parsed()
            return Parsed.of(said if said == text else said.rstrip())
        if self._state == "head":
            is_call = text.strip() and (cut is True or (cut and self._is_head(text + cut)))
            return Parsed.of("" if is_call or (self._within and not text.strip()) else text)
        if self._state == "arguments" and self._reader is not None and not cut:
            made = self._reader.finish(text)
            return self._part(made, is_whole=bool(made))
        return Parsed()

    def _step(self) -> Parsed | None:
        """The next part that is certain; None when more text is needed."""
        match self._state:
            case "content":
                return self._content()
            case "head":
                return self._begin()
            case "arguments":
                return self._arguments()
            case "object":
                return self._object_end()
            case "tail":
                return self._tail()

    def _content(self) -> Parsed | None:
        if self._called and not self._said:  # white space behind calls separates them
            self._text = self._text.lstrip()
        text = self._text  # of what is here already only white space at its beginning may be long
        found = self._mark.search(text, len(text) - len(text.lstrip()))
        before = text[: found.start()] if found else sure(text, *self._form.marks)
        said = before.rstrip()
        self._text = text[len(said) :]
        if said:
            gap = "" if self._said_since or said[0].isspace() else self._gap
            self._said, self._said_since, self._gap = True, True, ""
            said = gap + said
        if found and self._said:
            self._gap = before[len(before.rstrip()) :]
        if found:
            self._state, self._within = "head", False
            self._num_given = len(self._text) - len(text) + found.end()
        return Parsed.of(said) if said or found else None

    def _begin(self) -> Parsed | None:
        if says := self._form.says:
            at = self._num_given
            if self._text.startswith(says, at):
                self._text, self._state = self._text[at + len(says) :], "content"
                return Parsed()
            if says.startswith(self._text[at:]):
                return None
        head = self._heads.of(self._text, within=self._within)
        if head is None:
            return None
        if head is NONE:
            num, self._num_given, self._state = self._num_given, 0, "content"
            given, self._text = self._text[:num], self._text[num:]
            self._said, self._said_since = (
                self._said or bool(given),
                self._said_since or bool(given),
            )
            return Parsed.of(given)
        self._text = self._text[head.end :]
        self._silent = head.name in self._form.silent and head.name not in self._functions
        self._called, self._said_since, self._num_behind = True, False, 0
        self._counted = False
        self._depth = Depth(depth=head.num_objects) if head.num_objects else None
        self._reader = None if head.made else self._reader_of(head)
        self._state = "tail" if head.made else "arguments"
        parsed = Parsed()
        if not self._silent:
            short = self._form.writes_ids
            part = CallPart.begun(self.num_calls, head.name, head.made, short_id=short)
            parsed.parts.append(part)
        if head.made:
            self._count_if_over()
        return parsed

    def _is_head(self, text: str) -> bool:
        return self._heads.of(text, within=self._within) is not NONE

    def _reader_of(self, head: Head) -> Reader:
        style = self._form.style
        if head.is_json or not isinstance(style, Tags):
            return JsonReader()
        root = self._functions.get(head.name)
        known = properties_of(root)

        def kinds(name: str) -> frozenset[str]:
            return kinds_of(known.get(name), root)

        return TagsReader(style, self._behind[:1] or self._form.own_lead[:1], kinds)

    def _arguments(self) -> Parsed | None:
        assert self._reader is not None
        made, num_taken = self._reader.feed(self._text)
        self._text = self._text[num_taken:]
        if self._reader.over:
            self._state, self._reader = "object" if self._depth else "tail", None
            parsed = self._part(made, is_whole=True)
            if self._depth is None:
                self._count_if_over()
            return parsed
        return self._part(made) if made else None

    def _part(self, made: str, *, is_whole: bool = False) -> Parsed:
        silent = self._silent or not made
        return Parsed() if silent else Parsed(CallPart(self.num_calls, made, is_whole=is_whole))

    def _object_end(self) -> Parsed | None:
        """Behind the arguments, to the end of the object that they stand in.

        A mark ends one whose bracket was forgotten, too.
        """
        assert self._depth is not None
        text, at, over = self._text, 0, False
        while not over and at < len(text):
            if not self._depth.is_quoted:
                if over := text.startswith(self._ends, at):
                    break
                if any(end.startswith(text[at : at + len(end)]) for end in self._ends):
                    break  # of which there is only the beginning
            over = self._depth.feed(text[at]) >= 0
            at += 1
        self._text = text[at:]
        if not over:
            return None
        self._state = "tail"
        self._count_if_over()
        return Parsed()

    def _tail(self) -> Parsed | None:
        """Behind a call: what ends it, and what separates it from the next."""
        rest, texts = self._text.lstrip(), self._behind[self._num_behind :]
        for i, part in enumerate((*texts, *self._skips)):
            if rest.startswith(part):
                self._text = rest[len(part) :]
                self._num_behind += i + 1 if i < len(texts) else 0
                self._count_if_over()
                return Parsed()
        if any(part.startswith(rest) for part in (*texts, *self._skips)):
            return None
        closed = bool(self._form.last) and self._num_behind == len(self._behind)
        self._num_behind = max(self._num_behind, len(self._form.tail))
        self._count_if_over()
        self._state, self._within, self._num_given = "content" if closed else "head", not closed, 0
        return Parsed()

    def _count_if_over(self) -> None:
        """Count a call as soon as all that belongs to it has come."""
        if not self._counted and self._num_behind >= len(self._form.tail):
            self._counted = True
            self.num_calls += not self._silent
