"""Grammars on the host: llguidance says which tokens may follow, as bit masks.

The router makes an llguidance grammar of the user's schema. Here each request with a grammar has a
matcher, which consumes the request's output. Masks are computed while the forward runs
(`DecodeLoop.turn`).
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path

import llguidance.numpy as bitmask
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from torch import Tensor

from worker.api import GRAMMAR_PARAM
from worker.errors import KvlaneError, Unsupported, UserError, contained
from worker.forward.draws import Masks


class Matcher:
    """Follows the output of one request. Host state: it outlives preemption.

    Its methods never raise: a failure is kept in `error`, and the request ends with it.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.stopped = False  # the grammar is complete: the token just consumed is the last
        # llguidance has given up on the grammar (too complex: a UserError), or failed.
        self.error: KvlaneError | None = None
        self._run(lambda: None)

    def consume(self, token: int) -> None:
        """Advance by `token`, which the mask allowed."""
        self._run(lambda: self._matcher.consume_token(token))

    def fill(self, masks: Tensor, index: int, drafts: Sequence[int] = ()) -> None:
        """Fill masks[index] with the tokens that may follow, masks[index + j] behind drafts[: j].

        At the end of the grammar all tokens may follow, because the request's token is not used.
        Behind a draft that the grammar forbids all may follow, because the draft is not accepted.
        """
        lines = masks[index : index + 1 + len(drafts)].numpy()
        if drafts:
            path = [(self._matcher, 0, list(drafts))]
            fill = bitmask.fill_next_token_bitmask_par_with_draft_tokens
            self._run(lambda: fill(_executor(), path, lines))
        else:
            self._run(lambda: bitmask.fill_next_token_bitmask(self._matcher, lines))
        if self.error is not None:
            lines[:] = -1

    def _run(self, step: Callable[[], object]) -> None:
        if self.stopped or self.error is not None:
            return
        try:
            with contained("llguidance"):
                step()
                _check(self._matcher)
                self.stopped = self._matcher.is_stopped()
        except KvlaneError as error:
            self.error = error


@cache
def _executor() -> LLExecutor:
    """One thread: masks are made while the forward computes."""
    return LLExecutor(1)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        text = matcher.get_error().partition("\n<state>")[0]  # then llguidance dumps its state
        raise UserError(f"grammar: {text}", GRAMMAR_PARAM)


class Grammars:
    """Matchers and masks for one tokenizer. The first grammar loads it."""

    def __init__(self, directory: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._path, self._eos_ids = directory / "tokenizer.json", list(eos_ids)
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._unusable: KvlaneError | None = None  # why there is no tokenizer

    def matcher(self, grammar: str, output: Sequence[int]) -> Matcher:
        """Make a matcher that has consumed `output`.

        Raises UserError if this is no grammar or the output does not follow it, Unsupported if
        llguidance cannot use this model's tokenizer, LibraryError if llguidance failed.
        """
        tokenizer = self._loaded()
        with contained("llguidance"):
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            if output:
                matcher.consume_tokens(list(output))
            _check(matcher)
        return Matcher(matcher)

    def _loaded(self) -> LLTokenizer:
        if self._unusable is not None:  # another try would hold up the engine each time
            raise self._unusable.with_traceback(None)
        if self._tokenizer is None:
            try:
                with contained("llguidance"):
                    self._tokenizer = self._load()
            except KvlaneError as error:
                if not isinstance(error.__cause__, OSError):  # an OSError may be gone next time
                    self._unusable = error
                raise
        return self._tokenizer

    def _load(self) -> LLTokenizer:
        try:
            text = self._path.read_text(encoding="utf-8")
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_ids)
        except (OSError, ValueError) as error:
            raise Unsupported(f"no grammars for this model: {error}", GRAMMAR_PARAM) from error

    def masks(
        self, matchers: Sequence[Matcher | None], drafts: Sequence[Sequence[int]] = ()
    ) -> Masks:
        """Make the masks of rows on the host; a row whose matcher is None may draw all tokens.

        drafts: of each row's window, width - 1 ids, -1 = none; empty: the width is 1.
        """
        width = len(drafts[0]) + 1 if drafts else 1
        line = [0] * (width * len(matchers))
        num_masks = width * sum(matcher is not None for matcher in matchers)
        masks = torch.full((1 + num_masks, -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        last = 0
        for row, matcher in enumerate(matchers):
            if matcher is not None:
                first, last = last + 1, last + width
                line[row * width : (row + 1) * width] = range(first, last + 1)
                path = takewhile(lambda draft: draft >= 0, drafts[row] if drafts else ())
                matcher.fill(masks, first, tuple(path))
        return Masks(masks, torch.tensor(line))
