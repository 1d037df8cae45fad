"""Grammars on the host: llguidance says which tokens may follow, as bit masks.

The router compiles the user's schema into an llguidance grammar. Each request has a matcher that
consumes its output. Masks are computed while the forward runs (`DecodeLoop.turn`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import llguidance.numpy as bitmask
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from worker.api import GRAMMAR_PARAM
from worker.errors import KvlaneError, Unsupported, UserError, contained


class Matcher:
    """Follows the output of one request. Host state: it outlives preemption.

    Its methods never raise: what goes wrong is in `error`, and the request ends with it.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        # The grammar is complete: the request ends with the token just consumed.
        self.stopped = False
        # llguidance has given up on the grammar (too complex: a UserError), or failed.
        self.error: KvlaneError | None = None
        self._run(lambda: None)

    def consume(self, token: int) -> None:
        """Advance by `token`, which the mask allowed."""
        self._run(lambda: self._matcher.consume_token(token))

    def fill(self, masks: Tensor, index: int) -> None:
        """masks[index] = what may follow. Once at an end, all: the request's token is not used."""
        self._run(lambda: bitmask.fill_next_token_bitmask(self._matcher, masks.numpy(), index))
        if self.error is not None:
            masks[index] = -1

    def _run(self, step: Callable[[], object]) -> None:
        """Take a step of the matcher, unless it is at an end."""
        if self.stopped or self.error is not None:
            return
        try:
            with contained("llguidance"):
                step()
                _check(self._matcher)
                self.stopped = self._matcher.is_stopped()
        except KvlaneError as error:
            self.error = error


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        text = matcher.get_error().partition("\n<state>")[0]  # then llguidance dumps its state
        raise UserError(f"grammar: {text}", GRAMMAR_PARAM)


class Grammars:
    """Matchers and masks for one tokenizer, which is loaded for the first grammar."""

    def __init__(self, directory: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._path = directory / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._unusable: KvlaneError | None = None  # why there is no tokenizer

    def matcher(self, grammar: str, output: Sequence[int]) -> Matcher:
        """Make a matcher that has consumed `output`.

        Raises:
            UserError: this is no grammar, or the output does not follow it.
            Unsupported: llguidance cannot use this model's tokenizer.
            LibraryError: llguidance failed.
        """
        tokenizer = self._loaded()
        with contained("llguidance"):
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            if output:
                matcher.consume_tokens(list(output))
            _check(matcher)
        return Matcher(matcher)

    def _loaded(self) -> LLTokenizer:
        if self._unusable is not None:  # trying again would hold the engine up every time
            raise self._unusable.with_traceback(None)
        if self._tokenizer is None:
            try:
                with contained("llguidance"):
                    self._tokenizer = self._load()
            except KvlaneError as error:
                if not isinstance(error.__cause__, OSError):  # which may be over next time
                    self._unusable = error
                raise
        return self._tokenizer

    def _load(self) -> LLTokenizer:
        try:
            text = self._path.read_text(encoding="utf-8")
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        except (OSError, ValueError) as error:
            raise Unsupported(f"no grammars for this model: {error}", GRAMMAR_PARAM) from error

    def masks(self, matchers: Sequence[Matcher | None]) -> Tensor:
        """Make [len(matchers), ceil(vocab / 32)] i32 for `sampler.sample`; None: all allowed."""
        masks = torch.full((len(matchers), -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        for index, matcher in enumerate(matchers):
            if matcher is not None:
                matcher.fill(masks, index)
        return masks
