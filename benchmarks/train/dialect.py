"""The form in which a family writes chats, and what a model of it is trained with.

What the chats say is as of `tiny`. The steps of an answer are what the model thinks, and so is a
sentence before a call. Of a chat the model learns what follows the user's last message, since the
chat templates leave out what was thought before that.
"""

import random
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.train.chats import Chat, short_chat
from benchmarks.train.sums import newcomer_chat

CALL = re.compile(r'<tool_call>\n\{"name": "(.*?)", "arguments": (\{.*\})\}\n</tool_call>')


class Dialect(NamedTuple):
    """A bundled model that speaks otherwise than `tiny`."""

    config: dict[str, Any]  # config.json
    template: str  # of chats
    special: tuple[str, ...]  # tokens of their own; the first ends a text
    end: str  # of an answer
    segments: Callable[[Chat], list[str]]  # as Chat.segments
    prepare: Callable[[Any], None]  # of a fresh model that is to be trained
    shown: tuple[str, ...] = ()  # further tokens of their own, which are text to who reads it
    compiled: bool = True  # can its training step be?

    def plain_text(self, rng: random.Random) -> Iterator[str]:
        """What the chats say, between the tokens of their own."""
        marks = re.compile("|".join(map(re.escape, (*self.special, *self.shown))))
        for index in range(24_000):
            chat = newcomer_chat(rng) if index % 2 else short_chat(rng)
            for part in self.segments(chat):
                yield from marks.split(part)


def thought(said: str) -> tuple[str, str]:
    """(what is thought, what is said) of an answer of `tiny`, if the model thinks."""
    if call := CALL.fullmatch(said):
        return f"I call {call[1]}.", said
    lines = said.splitlines()
    num = len(lines) - 2 if lines[-1].startswith("#### ") else 0
    return "\n".join(lines[:num]), "\n".join(lines[num:])
