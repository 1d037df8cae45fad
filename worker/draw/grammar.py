"""Grammars on the host: llguidance says which tokens may follow, as bit masks.

The router makes an llguidance grammar of the user's schema. Here a request with a grammar has a
matcher, which consumes the request's output. Masks are computed while the forward runs
(`DecodeLoop.turn`). A grammar is compiled once, in a thread of its own; requests get copies.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import takewhile
from pathlib import Path

import llguidance.numpy as bitmask
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from torch import Tensor

from worker.api import GRAMMAR_PARAM
from worker.config.checkpoint.grammar_tokens import grammar_tokenizer
from worker.config.checkpoint.tokens import read_tokens
from worker.config.limits import GRAMMAR_LIMITS
from worker.errors import KvlaneError, Unsupported, UserError, contained
from worker.forward.draws import Masks

TOO_SLOW = "grammar: too slow to follow"
MAX_PROTOTYPES = 16  # grammars that are kept compiled, some 100 MB a grammar
# Copies of a prototype share its lexer's limited states: a new one comes after so many masks.
MAX_MASKS = 1 << 13
# A token and the mask behind it take 5 ms of CPU time at most, as a rule. Time beyond USUAL_S
# adds up to a grammar's debt. With more than MAX_DEBT_S all its requests end; in a step whose masks
# have taken MAX_STEP_S already, one with more than MAX_LATE_DEBT_S ends.
USUAL_S, MAX_DEBT_S, MAX_LATE_DEBT_S, MAX_STEP_S = 0.02, 0.5, 0.05, 2.0


class Prototype:
    """A compiled grammar, from which every request that has it gets a copy."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.num_masks = 0  # that its copies have made
        self.failed = False  # one of them has; they share its limits, which are used up
        self.debt_s = 0.0  # of their time
        self.too_slow: UserError | None = None  # why all of them end

    @property
    def is_worn(self) -> bool:
        """Whether the next request is to have a new one."""
        return self.failed or self.num_masks > MAX_MASKS


class Matcher:
    """Follows the output of one request. Host state: it outlives preemption.

    Its methods never raise: a failure is kept in `error`, and the request ends with it.
    """

    def __init__(self, matcher: LLMatcher, prototype: Prototype) -> None:
        self._matcher, self._prototype = matcher, prototype
        self.stopped = False  # the grammar is complete: the token just consumed is the last
        # llguidance has given up on the grammar (too complex: a UserError), or failed.
        self.error: KvlaneError | None = None
        self._run(lambda: None)

    def consume(self, token: int) -> None:
        """Advance by `token`, which the mask allowed."""
        self._run(lambda: self._matcher.consume_token(token))

    def fill(
        self, masks: Tensor, index: int, drafts: Sequence[int] = (), max_debt_s: float = MAX_DEBT_S
    ) -> None:
        """Fill masks[index] with the tokens that may follow, masks[index + j] behind drafts[: j].

        At the end of the grammar all tokens may follow, because the request's token is not used.
        Behind a draft that the grammar forbids all may follow, because the draft is not accepted.
        """
        lines = masks[index : index + 1 + len(drafts)].numpy()
        prototype = self._prototype
        self.error = self.error or prototype.too_slow
        if drafts:
            path = [(self._matcher, 0, list(drafts))]
            fill = bitmask.fill_next_token_bitmask_par_with_draft_tokens
            self._run(lambda: fill(_executor(), path, lines))
        else:
            self._run(lambda: bitmask.fill_next_token_bitmask(self._matcher, lines))
        prototype.num_masks += len(lines)
        prototype.debt_s = max(0.0, prototype.debt_s - USUAL_S * len(lines))
        if prototype.debt_s > max_debt_s and self.error is None:
            self.error = UserError(TOO_SLOW, GRAMMAR_PARAM)
            if prototype.debt_s > MAX_DEBT_S:
                prototype.too_slow = self.error
        if self.error is not None:
            lines[:] = -1

    def _run(self, step: Callable[[], object]) -> None:
        if self.stopped or self.error is not None:
            return
        began_s = time.thread_time()
        try:
            with contained("llguidance"):
                step()
                _check(self._matcher)
                self.stopped = self._matcher.is_stopped()
        except KvlaneError as error:
            self.error, self._prototype.failed = error, True
        self._prototype.debt_s += time.thread_time() - began_s


@cache
def _executor() -> LLExecutor:
    """One thread, the caller's: masks are made while the forward computes."""
    return LLExecutor(1)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        text = matcher.get_error().partition("\n<state>")[0]  # then llguidance dumps its state
        raise UserError(f"grammar: {text}", GRAMMAR_PARAM)


def _is_worn(compiled: Future[Prototype]) -> bool:
    return compiled.done() and compiled.exception() is None and compiled.result().is_worn


class Grammars:
    """Matchers and masks for one tokenizer. The first grammar loads it.

    wake: called in another thread when a grammar that was not `ready` is.
    """

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        eos_ids: Sequence[int],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._directory, self._eos_ids = directory, eos_ids
        self._vocab_size = vocab_size
        self._wake = wake
        self._tokenizer: LLTokenizer | None = None
        self._unusable: KvlaneError | None = None  # why there is no tokenizer
        # llguidance lets go of the GIL while it compiles. The thread starts with the first grammar.
        self._compiler = ThreadPoolExecutor(1, "kvlane-grammar")
        self._prototypes: dict[str, Future[Prototype]] = {}  # the one used last is last

    def ready(self, grammar: str) -> bool:
        """Whether `matcher` can be called without a wait; if not, it is being compiled."""
        return self._compiled(grammar).done()

    def matcher(self, grammar: str, output: Sequence[int]) -> Matcher:
        """Make a matcher that has consumed `output`.

        Raises UserError if this is no grammar or the output does not follow it, Unsupported if
        llguidance cannot use this model's tokenizer, LibraryError if llguidance failed.
        """
        compiled = self._compiled(grammar)
        error = compiled.exception()
        if error is not None:
            if not isinstance(error, UserError):  # another try may go well
                self._prototypes.pop(grammar, None)
            raise error.with_traceback(None)
        prototype = compiled.result()
        if prototype.too_slow is not None:
            raise prototype.too_slow.with_traceback(None)
        with contained("llguidance"):
            matcher = prototype.matcher.deep_copy()
            slow_at = time.thread_time() + MAX_STEP_S
            for start in range(0, len(output), 8):
                matcher.consume_tokens(list(output[start : start + 8]))
                if time.thread_time() > slow_at:
                    raise UserError(TOO_SLOW, GRAMMAR_PARAM)
            _check(matcher)
        return Matcher(matcher, prototype)

    def _compiled(self, grammar: str) -> Future[Prototype]:
        """The grammar's prototype, now or later."""
        known = self._prototypes
        prototype = known.pop(grammar, None)
        if prototype is None or _is_worn(prototype):
            done = [text for text, future in known.items() if future.done()]
            for text in done[: max(0, len(done) - MAX_PROTOTYPES + 1)]:
                del known[text]
            prototype = self._compiler.submit(self._compile, grammar)
            prototype.add_done_callback(lambda _: self._wake())
        known[grammar] = prototype
        return prototype

    def _compile(self, grammar: str) -> Prototype:
        with contained("llguidance"):
            matcher = LLMatcher(self._loaded(), grammar, log_level=0, limits=GRAMMAR_LIMITS)
            _check(matcher)
        return Prototype(matcher)

    def _loaded(self) -> LLTokenizer:
        if self._unusable is not None:  # another try would hold up the engine again
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
            return grammar_tokenizer(
                read_tokens(self._directory).file, self._vocab_size, self._eos_ids
            )
        except (OSError, ValueError) as error:
            raise Unsupported(f"no grammars for this model: {error}", GRAMMAR_PARAM) from error

    def masks(
        self, matchers: Sequence[Matcher | None], drafts: Sequence[Sequence[int]] = ()
    ) -> Masks:
        """Make the masks of rows on the host; a row whose matcher is None may draw all tokens.

        drafts: by row those of its window, width - 1 ids, -1 = none; empty: the width is 1.
        """
        width = len(drafts[0]) + 1 if drafts else 1
        line = [0] * (width * len(matchers))
        num_masks = width * sum(matcher is not None for matcher in matchers)
        masks = torch.full((1 + num_masks, -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        last, slow_at = 0, time.thread_time() + MAX_STEP_S
        for row, matcher in enumerate(matchers):
            if matcher is not None:
                first, last = last + 1, last + width
                line[row * width : (row + 1) * width] = range(first, last + 1)
                path = takewhile(lambda draft: draft >= 0, drafts[row] if drafts else ())
                is_late = time.thread_time() > slow_at
                most_s = MAX_LATE_DEBT_S if is_late else MAX_DEBT_S
                matcher.fill(masks, first, tuple(path), most_s)
        return Masks(masks, torch.tensor(line))
