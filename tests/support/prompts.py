"""Prompts for the bundled model, as token ids."""

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.train.problems import held_out_problems

TINY = Path(__file__).parents[2] / "worker" / "assets" / "tiny"
VOCAB, EOS = 1024, 2  # its vocabulary, and the id of the end of text


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@cache
def ll_tokenizer() -> Any:
    """llguidance's, of the same model."""
    from llguidance import LLTokenizer

    return LLTokenizer((TINY / "tokenizer.json").read_text(), n_vocab=VOCAB, eos_token=[EOS])


def chat_ids(question: str) -> list[int]:
    """One user turn in the bundled model's chat format."""
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer().encode(text, add_special_tokens=False).ids


@cache
def problem_ids(num: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(chat_ids(each.question)) for each in held_out_problems(num))
