"""Grammars on the host: llguidance says which tokens may follow, as bit masks.

The router compiles the user's schema into an llguidance grammar. Each request has a matcher that
consumes its output. Masks are computed while the forward runs (`DecodeLoop.turn`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import llguidance.numpy as bitmask
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from worker.errors import Unsupported, UserError


class Matcher:
    """Follows the output of one request. Host state: it outlives preemption."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def stopped(self) -> bool:
        """Whether the grammar is complete: the request ends with the token just consumed."""
        return self._matcher.is_stopped()

    @property
    def error(self) -> str:
        """Why llguidance has given up on the grammar (too complex); "" = it has not."""
        error = self._matcher.get_error() if self._matcher.is_error() else ""
        return error.partition("\n<state>")[0]  # the rest dumps llguidance's state and grammar

    def consume(self, token: int) -> None:
        """Advance by `token`, which the mask allowed."""
        if not self.stopped:
            self._matcher.consume_token(token)

    def fill(self, masks: Tensor, index: int) -> None:
        """masks[index] = what may follow. Once stopped, all: the request's token is not used."""
        if not self.stopped:
            bitmask.fill_next_token_bitmask(self._matcher, masks.numpy(), index)


class Grammars:
    """Matchers and masks for one tokenizer, which is loaded for the first grammar."""

    def __init__(self, directory: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._path = directory / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._tokenizer: LLTokenizer | None = None

    def matcher(self, grammar: str, output: Sequence[int]) -> Matcher:
        """Make a matcher that has consumed `output`.

        Raises:
            UserError: this is no grammar, or the output does not follow it.
            Unsupported: llguidance cannot use this model's tokenizer.
        """
        if self._tokenizer is None:
            self._tokenizer = self._load()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error() or (output and not matcher.consume_tokens(list(output))):
            raise UserError(f"grammar: {matcher.get_error()}", "response_format")
        return Matcher(matcher)

    def _load(self) -> LLTokenizer:
        try:
            text = self._path.read_text(encoding="utf-8")
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        except (OSError, ValueError) as error:
            raise Unsupported(f"no grammars for this model: {error}", "response_format") from error

    def masks(self, matchers: Sequence[Matcher | None]) -> Tensor:
        """Make [len(matchers), ceil(vocab / 32)] i32 for `sampler.sample`; None: all allowed."""
        masks = torch.full((len(matchers), -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        for index, matcher in enumerate(matchers):
            if matcher is not None:
                matcher.fill(masks, index)
        return masks
