"""llguidance's reading of a tokenizer: added tokens are text, unless they are special.

By itself llguidance takes all added tokens like <…> for special; where a grammar leaves one text
alone, it offers the token that a prompt would have there, and refuses it.
"""

import json
from collections.abc import Container, Sequence
from itertools import chain

from llguidance import LLTokenizer, TokenizerWrapper

from worker.config.checkpoint.tokens import FLAGS, Token, TokenizerFile


def grammar_tokenizer(file: TokenizerFile, vocab_size: int, eos: Sequence[int] = ()) -> LLTokenizer:
    """eos: ends texts; without, llguidance finds one. ValueError if it cannot use the tokenizer."""
    held: list[Token] = file.fields.get("added_tokens") or []
    off, kept = dict.fromkeys(FLAGS, False), (token for token in held if token["id"] < vocab_size)
    added = [{**token, **off, "special": token["special"]} for token in kept]
    text = file.text if added == held else json.dumps({**file.fields, "added_tokens": added})
    plain = LLTokenizer(text, n_vocab=vocab_size, slices=[])
    tokens = _Tokens(plain, {token["id"] for token in added if not token["special"]})
    return LLTokenizer(TokenizerWrapper(tokens), n_vocab=vocab_size, eos_token=[*eos] or None)


class _Tokens:
    """The tokens of `plain`, of which `texts` are text; by the names that llguidance asks for."""

    def __init__(self, plain: LLTokenizer, texts: Container[int]) -> None:
        self._plain, ids = plain, range(plain.vocab_size)
        self.bos_token_id, self.eos_token_id = None, plain.eos_token
        self.tokens = [plain.decode_bytes([i]) for i in ids]
        self.special_token_ids = [i for i in ids if plain.is_special_token(i) and i not in texts]
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: bytes) -> list[int]:
        ids = list[int]()  # special tokens are spelled, a character at a time
        for token in self._plain.tokenize_bytes(text):
            chars = self.tokens[token].decode() if token in self._special else ""
            ids += chain(*map(self._plain.tokenize_str, chars)) if chars else [token]
        return ids
