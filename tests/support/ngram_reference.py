"""Prompt lookup, token by token."""

from collections.abc import Sequence


def ngram_reference(text: Sequence[int], num: int, shortest: int, longest: int) -> list[int]:
    """What is proposed behind `text`: `num` drafts, or nothing."""
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        run = list(text[-length:])
        for end in range(len(text) - 1, length - 1, -1):  # the run's copy is text[end - length:end]
            if list(text[end - length : end]) == run:
                follows = list(text[end:])
                return [follows[i % len(follows)] for i in range(num)]
    return []
