"""Grammars on one link: written out once, and named by their age while they are among the last.

A link is ordered, or lost as a whole. So both of its sides keep the same list, and neither asks the
other what it has. The choices of a request share a grammar, which may be long.
"""

from dataclasses import dataclass, field

from msgspec.structs import replace

from worker.api import Generate, PeerId

MAX_TEXTS, MAX_CHARS = 16, 1 << 22  # in all; the last one counts, too


@dataclass(slots=True)
class LastSaid:
    """The last texts of one link, as its sender and its reader count them."""

    texts: list[str] = field(default_factory=list[str])  # the last one said is last

    def age(self, text: str) -> int:
        """To be called by the sender: 1 = the last text again, 2 = the one before; 0: write it."""
        age = self.texts[::-1].index(text) + 1 if text in self.texts else 0
        self.text(age, text)
        return age

    def text(self, age: int, text: str) -> str:
        """To be called by the reader: what was said with this age, or `text`, which was written."""
        said = self.texts.pop(-age) if age else text
        self.texts.append(said)
        while len(self.texts) > MAX_TEXTS or sum(map(len, self.texts)) > MAX_CHARS:
            del self.texts[0]
        return said


class Said(dict[PeerId, LastSaid]):
    """What was said to a reader, by the peers of its links; who is lost is taken out."""

    def whole(self, peer: PeerId, message: Generate) -> Generate | None:
        """A request, of all in their order, with its grammar; None: of an age that nobody said."""
        sampling, age = message.sampling, message.grammar_age
        if not (sampling.grammar or age):
            return message
        said = self.setdefault(peer, LastSaid())
        if not 0 <= age <= len(said.texts):
            return None
        return replace(
            message, sampling=replace(sampling, grammar=said.text(age, sampling.grammar))
        )
