"""Splits the reasoning off a model's output, as it arrives; see `parsers`."""

from collections.abc import Mapping
from typing import NamedTuple

from router.text.parsers import Cut, Parsed, Parser, kept, sure


class Marks(NamedTuple):
    """What opens and closes the reasoning, and the answer behind it where that has marks, too."""

    opens: str
    closes: str
    answer_opens: str = ""
    answer_closes: str = ""


# By whose models write them so; of those with the same marks the one with more comes first.
MARKS: Mapping[str, Marks] = {
    "granite": Marks("<think>", "</think>", "<response>", "</response>"),
    "granite32": Marks("Here is my thought process:", "Here is my response:"),
    "cohere": Marks(
        "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"
    ),
    "cohere2": Marks("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    "qwen3": Marks("<think>", "</think>"),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
}


class _Opened(Parser):
    """Takes what an opening mark begins; without it, and behind the end, all goes to `inner`."""

    def __init__(self, inner: Parser, opens: str, closes: str) -> None:
        self._inner, self._opens, self._closes = inner, opens, closes
        self._opened: bool | None = None  # None: not known yet; False: it is not, or it was closed
        self._text = ""  # which may be a mark, or end with one

    def feed(self, text: str) -> Parsed:
        if self._opened is False:
            return self._rest(text)
        self._text += text
        if self._opened is None:
            start = self._text.lstrip()
            if len(start) < len(self._opens) and self._opens.startswith(start):
                return Parsed()
            self._opened = start.startswith(self._opens)
            if not self._opened:
                return self._rest(self._take())
            self._text = start.removeprefix(self._opens)
        return self._within()

    def _within(self) -> Parsed:
        """What is certain of the text behind the mark."""
        raise NotImplementedError

    def _rest(self, text: str) -> Parsed:
        return self._inner.feed(text) if text else Parsed()

    def _take(self, size: int | None = None) -> str:
        text = self._text[:size]
        self._text = self._text[len(text) :]
        return text


class Answer(_Opened):
    """Takes the marks off an answer that stands between them; what is left goes to `inner`."""

    def __init__(self, inner: Parser, marks: Marks) -> None:
        super().__init__(inner, marks.answer_opens, marks.answer_closes)

    def finish(self, *, cut: Cut = False) -> Parsed:
        rest = kept(self._text, cut, self._closes if self._opened else self._opens)
        if self._opened:
            rest = rest.rstrip().removesuffix(self._closes)
        parsed = self._rest(rest)
        parsed += self._inner.finish(cut=cut)
        return parsed

    def _within(self) -> Parsed:
        shown = self._text.rstrip().removesuffix(self._closes)
        return self._rest(self._take(len(sure(shown.rstrip(), self._closes).rstrip())))


class Reasoning(_Opened):
    """What stands between `marks` at the beginning is reasoning; what follows goes to `inner`.

    `inside`: the prompt has opened the reasoning. call: ends it, too, if there is any, and stays.
    """

    def __init__(
        self, inner: Parser, *, inside: bool, marks: Marks = MARKS["qwen3"], call: str = ""
    ) -> None:
        super().__init__(Answer(inner, marks) if marks.answer_opens else inner, *marks[:2])
        self._opened = True if inside else None
        self._calls = (call,) if call else ()
        self._begun = False  # some of the reasoning was returned
        self._stripping = False  # white space before the answer is still dropped

    def finish(self, *, cut: Cut = False) -> Parsed:
        if self._opened:
            rest = kept(self._text, cut, self._closes, *self._calls)
            parsed = Parsed.of(self._trimmed(rest), "reasoning")
        else:
            parsed = self._rest(kept(self._text, cut, self._opens))
        parsed += self._inner.finish(cut=cut)
        return parsed

    def _within(self) -> Parsed:
        reasoning, marker, rest = self._text.partition(self._closes)
        for call in self._calls:
            before, found, _ = reasoning.partition(call)
            if found:
                reasoning, marker, rest = before, call, self._text[len(before) :]
        if marker:
            self._opened, self._stripping, self._text = False, True, ""
            parsed = Parsed.of(self._trimmed(reasoning), "reasoning")
            parsed += self._rest(rest)
            return parsed
        shown = sure(reasoning, self._closes, *self._calls).rstrip()
        self._text = reasoning[len(shown) :]
        return Parsed.of(self._trimmed(shown, end=False), "reasoning")

    def _trimmed(self, text: str, *, end: bool = True) -> str:
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        return text.rstrip() if end else text

    def _rest(self, text: str) -> Parsed:
        if self._stripping:
            text = text.lstrip()
            self._stripping = not text
        return super()._rest(text)
