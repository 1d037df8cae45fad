"""Text of an exact number of tokens, made of words that are one token each.

The words come from the tokenizer's own vocabulary. A tokenizer that splits text at spaces before
it merges gives every such word one token wherever it stands, so texts joined by a space have the
sum of their tokens; `Words.is_additive` says whether that held on a long sample.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.random import Generator
from tokenizers import Tokenizer

from benchmarks.load.records import Outcome

BUNDLED = Path(__file__).parents[2] / "worker" / "assets" / "tiny"
MAX_TRIED = 6000  # words of the vocabulary that are looked at
MIN_WORDS = 8
NUM_SAMPLE = 2000  # words of the text that `is_additive` is judged on
MAX_FIXES = 200

_WORD = re.compile(r"[ \u2581\u0120]?([A-Za-z]{2,12})")


class Words:
    """Draws texts for one tokenizer; ValueError: too few words of its vocabulary are one token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        known = _candidates(tokenizer)
        anchor = known[0] if known else "a"
        base = self.count(anchor)
        inner = [
            word
            for word, num in zip(known, self._counts([f"{anchor} {w}" for w in known]), strict=True)
            if num == base + 1
        ]
        first = [word for word, num in zip(inner, self._counts(inner), strict=True) if num == 1]
        if min(len(inner), len(first)) < MIN_WORDS:
            raise ValueError(f"tokenizer: only {len(first)} words of its vocabulary are one token")
        self._inner = np.array(inner, object)  # one token after a space
        self._first = np.array(first, object)  # and one token at the beginning of a text too
        sample = self.stream(np.random.default_rng(0), NUM_SAMPLE)
        self.is_additive = self.count(" ".join(sample)) == NUM_SAMPLE

    def count(self, text: str) -> int:
        """Tokens of `text`, special ones left out."""
        return len(self.ids(text))

    def ids(self, text: str) -> list[int]:
        """Token ids of `text`, special ones left out."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def stream(self, rng: Generator, num_words: int) -> list[str]:
        """Words that may stand at the beginning of a text or after a space.

        With the same `rng`, fewer words are the beginning of more.
        """
        first = self._first[rng.integers(len(self._first))]
        rest = self._inner[rng.integers(len(self._inner), size=max(num_words - 1, 0))]
        return [first, *rest.tolist()][:num_words]

    def text(self, rng: Generator, num_tokens: int, after: str = "") -> str:
        """Random words of exactly `num_tokens`; with `after`, counted as what they add to
        `after` and a space. ValueError: found none (never, if `is_additive`)."""
        head, base = (f"{after} ", self.count(after)) if after else ("", 0)
        words = self.stream(rng, num_tokens)
        for _ in range(MAX_FIXES):
            excess = self.count(head + " ".join(words)) - base - num_tokens
            if excess == 0:
                return " ".join(words)
            if excess > 0:  # a few more than it takes, or the same two lengths may take turns
                del words[-(excess // 2 + int(rng.integers(1, 5))) :]
            if excess < 0 or not words:
                words += self.stream(rng, max(1, -excess // 2))
        raise ValueError(f"tokenizer: found no text of exactly {num_tokens} tokens")

    def fixed(self, key: tuple[int, ...], num_words: int) -> list[str]:
        """`stream` from a generator that depends on `key` alone (whole numbers, also negative)."""
        return self.stream(np.random.default_rng([number % 2**64 for number in key]), num_words)

    def _counts(self, texts: list[str]) -> list[int]:
        batch = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        return [len(encoding.ids) for encoding in batch]


def text_number(text: str) -> int:
    """A whole number that stands for `text`, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _candidates(tokenizer: Tokenizer) -> list[str]:
    """Words of the vocabulary, in a fixed order, at most MAX_TRIED of them."""
    matches = (_WORD.fullmatch(token) for token in tokenizer.get_vocab(with_added_tokens=False))
    known = sorted({match[1] for match in matches if match})
    return known[:: -(-len(known) // MAX_TRIED)] if known else []


def load(name: str) -> Tokenizer:
    """The tokenizer of a directory, 'tiny' the bundled one; raises ValueError if there is none."""
    path = (BUNDLED if name == "tiny" else Path(name)) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"--tokenizer: there is no {path}")
    return Tokenizer.from_file(str(path))


def count(outcomes: Sequence[Outcome], tokenizer: Tokenizer | None) -> None:
    """Count the tokens of every answer, if there is a tokenizer, and drop the texts."""
    for outcome in outcomes:
        if tokenizer is not None and not outcome.error:
            ids = tokenizer.encode(outcome.text, add_special_tokens=False).ids
            outcome.num_text_tokens = len(ids)
        outcome.text = ""
