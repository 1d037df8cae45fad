"""Splits what gpt-oss says into reasoning, calls and content; see `parsers`.

Its messages are <|channel|>...<|message|>...<|end|>, and channel and recipient tell which they are.
The parser of openai-harmony (0.0.8) wants the published vocabulary from the network, and no other.
"""

import re

from router.text.forms.values import Depth
from router.text.grammar import ANY, Spelling, between
from router.text.parsers import CallPart, Calls, Cut, Parsed, kept, sure

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")  # of a message
MARKS = (CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
BEGINS = "<|start|>assistant"  # what of a message a prompt has
END = re.compile("|".join(map(re.escape, ENDS)))
RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")


def message_rules(spelling: Spelling) -> str:
    """The lark rules of `think`, messages before the answer; `final` begins one without calls."""
    analysis, commentary, final = (
        spelling.literal(f"{CHANNEL}{name}{MESSAGE}")
        for name in ("analysis", "commentary", "final")
    )
    said = f"said: ({analysis} | {commentary}) ended {spelling.literal(BEGINS)}"
    ended = between("ended", "", "<|end|>", spelling)
    return "\n".join(("think: said*", said, f"final: {final}", *ended, f"SAID: /{ANY}/"))


class Harmony(Calls):
    """Messages in channels, which are reasoning ("analysis"), calls (to a function), or content."""

    def __init__(self) -> None:
        super().__init__()
        self._in_header = True
        self._channel = ""
        self._in_call = False
        self._depth, self._is_whole = Depth(), False  # of a call's arguments

    def finish(self, *, cut: Cut = False) -> Parsed:
        text, self._text = self._text, ""
        if self._in_header:  # a mark was forgotten, unless it only says whose turn it is
            role = text.removeprefix("<|start|>").strip() in ("", "assistant")
            return Parsed.of("" if cut or role or CHANNEL in text else text)
        if self._in_call:
            return Parsed(CallPart(self.num_calls, is_whole=True)) if self._is_whole else Parsed()
        return self._as(kept(text, cut, *ENDS))

    def _step(self) -> Parsed | None:
        if self._in_header:
            header, mark, rest = self._text.partition(MESSAGE)
            if not mark:
                return None
            self._text, self._in_header = rest, False
            self._channel = (header.rpartition(CHANNEL)[2].split() or [""])[0]
            if name := RECIPIENT.search(header):
                self._in_call, self._depth, self._is_whole = True, Depth(), False
                return Parsed(CallPart.begun(self.num_calls, name[1]))
            return Parsed()
        found = END.search(self._text)
        body = self._text[: found.start()] if found else sure(self._text, *ENDS)
        if found is None and not body:
            return None
        self._text = self._text[found.end() if found else len(body) :]
        parsed = self._as(body, ends=found is not None)
        if found:
            self.num_calls += self._in_call
            self._in_header, self._in_call = True, False
        return parsed

    def _as(self, text: str, *, ends: bool = False) -> Parsed:
        if self._in_call:
            self._is_whole |= self._depth.feed(text) >= 0
            part = CallPart(self.num_calls, text, is_whole=ends and self._is_whole)
            return Parsed(part) if text or ends else Parsed()
        return Parsed.of(text, "reasoning" if self._channel == "analysis" else "text")
