"""llguidance's reading of a tokenizer: added tokens are text, unless they are special.

By itself llguidance takes every added token that looks like <…> for special. Where a grammar leaves
but one text it offers the token that a prompt would have there, and then refuses it, as no text
holds a special token. So it gets the tokens' bytes here, and ids of texts that are true to these.
"""

import json
from collections.abc import Sequence
from functools import partial
from itertools import chain

from llguidance import LLTokenizer, TokenizerWrapper

from worker.config.checkpoint.tokens import FLAGS, Token, TokenizerFile


def grammar_tokenizer(
    file: TokenizerFile, vocab_size: int, eos_ids: Sequence[int] = ()
) -> LLTokenizer:
    """For a model with so many tokens; eos_ids: what ends its texts, else what llguidance finds.

    Raises a ValueError if llguidance cannot use the tokenizer.
    """
    held: list[Token] = file.fields.get("added_tokens") or []
    off: Token = dict.fromkeys(FLAGS, False)
    kept = (token for token in held if token["id"] < vocab_size)
    added = [{**token, **off, "special": token["special"]} for token in kept]
    text = file.text if added == held else json.dumps({**file.fields, "added_tokens": added})
    plain = LLTokenizer(text, n_vocab=vocab_size, slices=[])
    texts: set[int] = {token["id"] for token in added if not token["special"]}
    make = partial(LLTokenizer, TokenizerWrapper(_Tokens(plain, texts)), n_vocab=vocab_size)
    return make(eos_token=[*eos_ids]) if eos_ids else make()


class _Tokens:
    """The tokens of `plain`, of which `texts` are text; by the names that llguidance asks for."""

    def __init__(self, plain: LLTokenizer, texts: set[int]) -> None:
        self._plain = plain
        self.bos_token_id, self.eos_token_id = None, plain.eos_token
        ids = range(plain.vocab_size)
        self.tokens = [plain.decode_bytes([i]) for i in ids]
        self.special_token_ids = [i for i in ids if plain.is_special_token(i) and i not in texts]
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: bytes) -> list[int]:
        """Ids of a text, in which special tokens are spelled, a character at a time."""
        ids = self._plain.tokenize_bytes(text)
        return ids if self._special.isdisjoint(ids) else [*chain(*map(self._spelled, ids))]

    def _spelled(self, token: int) -> list[int]:
        if token not in self._special:
            return [token]
        return [*chain(*map(self._plain.tokenize_str, self.tokens[token].decode()))]
