"""Prompts for the bundled model, as token ids."""

import re
from functools import cache
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from benchmarks.train.problems import held_out_problems
from worker.config.checkpoint.grammar_tokens import grammar_tokenizer
from worker.config.checkpoint.tokens import eos_ids, read_tokens

TINY = Path(__file__).parents[2] / "worker" / "assets" / "tiny"
VOCAB, EOS = 1024, 2  # its vocabulary, and the id of the end of text


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@cache
def ll_tokenizer(directory: Path = TINY, vocab_size: int = VOCAB) -> LLTokenizer:
    """llguidance's, of a model."""
    ends = eos_ids(directory, vocab_size)
    return grammar_tokenizer(read_tokens(directory).file, vocab_size, ends)


def written(made: LLTokenizer, text: str) -> list[int]:
    """Ids of a text in which special tokens are these."""
    ids = list[int]()
    special = {mark: i for i in _special(made) if (mark := made.decode_str([i]))}
    for piece in re.split(f"({'|'.join(map(re.escape, special)) or '(?!)'})", text):
        ids += [special[piece]] if piece in special else made.tokenize_str(piece)
    return ids


@cache
def _special(made: LLTokenizer) -> list[int]:
    return [i for i in range(made.vocab_size) if made.is_special_token(i)]


def accepts(made: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether a grammar takes a text, all of it and nothing more."""
    matcher, tokens = LLMatcher(made, grammar, log_level=0), written(made, text)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def chat_ids(question: str) -> list[int]:
    """One user turn in the bundled model's chat format."""
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer().encode(text, add_special_tokens=False).ids


@cache
def problem_ids(num: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(chat_ids(each.question)) for each in held_out_problems(num))
