"""Which prompts a step computes first: those with least left, and none is passed for ever.

Were it first come first served, a prompt of 512 tokens would wait for all of the 32k before it. So
the prompt that has fewest tokens left goes first. But once later prompts have passed one with as
many tokens as it is long itself, it keeps its place among those. So a prompt waits for those before
it, for so many tokens of later ones and a step at most, and for a row if none is free. While rows
are scarce, who has one goes before who has none and can still be passed: rows are not for prompts
that wait.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar


class Prompt(Protocol):
    """A prompt of which tokens wait to be planned."""

    num_planned_tokens: int
    num_passed_tokens: int  # of later prompts, planned before its last
    row: int  # 0: none yet

    @property
    def tokens(self) -> Sequence[int]:
        """All of them."""
        ...


P = TypeVar("P", bound=Prompt)


def in_order(waiting: Iterable[P], *, begun_first: bool) -> list[P]:
    """In the order in which the next step takes them; waiting: oldest first."""

    def key(req: P) -> tuple[bool, int]:
        left = _left(req)
        return begun_first and not req.row and left > 0, left

    return sorted(waiting, key=key)


def num_before(waiting: Iterable[Prompt], num_tokens: int, begun_first: bool) -> int:
    """How many tokens are computed before a prompt that comes now, of which so many are to be."""
    before = (req for req in waiting if _left(req) <= num_tokens or (begun_first and req.row))
    return sum(len(req.tokens) - req.num_planned_tokens for req in before)


def _left(req: Prompt) -> int:
    """Tokens that are not planned; 0 if it is not to be passed any more."""
    num_tokens = len(req.tokens)
    return num_tokens - req.num_planned_tokens if req.num_passed_tokens < num_tokens else 0


def note_passed(waiting: Sequence[P], planned: Mapping[P, int]) -> None:
    """Note by how many tokens of a step later prompts have passed earlier ones.

    waiting: before the step, oldest first; planned: tokens of those that it computes.
    """
    later = 0
    for req in reversed(waiting):
        req.num_passed_tokens += later
        later += planned.get(req, 0)
