"""The tokenizer that lengths are made with and answers are checked with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.load.records import Outcome

BUNDLED = Path(__file__).parents[2] / "worker" / "assets" / "tiny"


def directory(name: str) -> str:
    """Where the tokenizer `name` is: 'tiny' (bundled) or a directory with a tokenizer.json."""
    return str(BUNDLED) if name == "tiny" else name


def load(name: str) -> Tokenizer:
    """Read a tokenizer.

    Raises:
        ValueError: there is none.
    """
    path = Path(directory(name)) / "tokenizer.json"
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
