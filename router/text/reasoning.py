"""Splits the reasoning off a model's output, as it arrives; see `parsers`."""

from collections.abc import Mapping

from router.text.parsers import Parsed, Parser, sure

# What opens and closes the reasoning, by whose models write it so.
MARKS: Mapping[str, tuple[str, str]] = {
    "qwen3": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}


class Reasoning(Parser):
    """What stands between `marks` at the beginning is reasoning; what follows goes to `inner`.

    `inside`: the prompt has opened the reasoning.
    """

    def __init__(
        self, inner: Parser, *, inside: bool, marks: tuple[str, str] = MARKS["qwen3"]
    ) -> None:
        self._inner = inner
        self._open, self._close = marks
        self._inside: bool | None = True if inside else None  # None = not known yet
        self._text = ""
        self._begun = False  # some of the reasoning was returned
        self._stripping = False  # white space before the answer is still dropped

    def feed(self, text: str) -> Parsed:
        if self._inside is False:
            return self._rest(text)
        self._text += text
        if self._inside is None:
            start = self._text.lstrip()
            if len(start) < len(self._open) and self._open.startswith(start):
                return Parsed()
            self._inside = start.startswith(self._open)
            if not self._inside:
                return self._rest(self._take())
            self._text = start.removeprefix(self._open)
        return self._reasoning()

    def finish(self, *, cut: bool = False) -> Parsed:
        parsed, rest = Parsed(), self._take()
        if self._inside:
            parsed.reasoning = self._trimmed(rest)
        elif self._inside is False or not (cut and rest.strip()):  # else it is part of what opens
            parsed += self._rest(rest)
        parsed += self._inner.finish(cut=cut)
        return parsed

    def _reasoning(self) -> Parsed:
        reasoning, marker, rest = self._text.partition(self._close)
        if marker:
            self._inside, self._stripping, self._text = False, True, ""
            parsed = Parsed(reasoning=self._trimmed(reasoning))
            parsed += self._rest(rest)
            return parsed
        shown = sure(reasoning, self._close).rstrip()
        self._text = reasoning[len(shown) :]
        return Parsed(reasoning=self._trimmed(shown, end=False))

    def _trimmed(self, text: str, *, end: bool = True) -> str:
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        return text.rstrip() if end else text

    def _rest(self, text: str) -> Parsed:
        if self._stripping:
            text = text.lstrip()
            self._stripping = not text
        return self._inner.feed(text) if text else Parsed()

    def _take(self) -> str:
        text, self._text = self._text, ""
        return text
