"""A request that has passed every check: `prepare` makes it, `http.answer` answers it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.dispatch.mailbox import Delta
from router.dispatch.queue import Req
from router.openai.reply import Choice


class AnswerWriter(Protocol):
    """Writes the choices of an endpoint's answers; keeps what earlier chunks of a choice held."""

    prefix: str  # of the answer's id
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> Choice | None:
        """What the endpoint sends of a choice before its first text, if anything."""
        ...

    def chunk(self, delta: Delta) -> Choice | None:
        """What a chunk says of a delta; None when nothing is certain yet."""
        ...

    def whole(self, index: int, delta: Delta) -> Choice:
        """A choice of a whole answer; `delta` is all of it."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has passed every check."""

    writer: AnswerWriter
    model: str
    reqs: Sequence[Req]  # num_samples for each prompt, one after the other
    streamed: bool
    num_samples: int = 1
    num_kept: int = 1  # samples of each prompt to return: the best by mean logprob
    include_usage: bool = False
    continuous_usage: bool = False
    return_stages: bool = False
    grammar_param: str = ""  # the field that asked for the grammar, if there is one
