"""Plan: one step, as the scheduler decided it on the host. Small, msgspec, no tensors.

A plan is all that a tensor-parallel rank needs to run the step, grammar masks aside. The KV length
of a row that decodes is not in it: only the device knows it (`max_seq_len_ub` bounds it).

A *row* is a request's place in the device-resident step state; row 0 is the sink of padded rows.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from worker.api import Sampling, TokenLogprob

Tail = Literal["none", "greedy", "random", "filtered"]
# Ascending generality: a row that one tail can sample gets the same token from every later one.
TAILS: tuple[Tail, ...] = ("none", "greedy", "random", "filtered")

# From this many tokens on (padding included) a prefill step is long: its last layer stores the KV
# of every token, but computes hidden states of requests' last tokens only. A shorter step would
# gain nothing: there a layer takes the time of reading its weights.
LONG_STEP_TOKENS = 1024

# Rows of a step times its width, at most, for widths above 1: their logits alone are 0.3 GB for a
# vocabulary of 152k. So many tokens take a GPU long enough that plain decode is as fast.
MAX_WINDOW_TOKENS = 1024


def max_rows(width: int, most: int) -> int:
    """Most rows of a step of so wide windows, where a step has `most` at all."""
    return most if width == 1 else min(most, MAX_WINDOW_TOKENS // width)


class RowStart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request takes a row in this step.

    With `active`, the row decodes from this step on: KV of tokens[: seq_len] is stored and
    `last_token` is tokens[seq_len]. Without, prefill chunks follow; a chunk with `sample` activates
    the row, unless its token is the row's last (on a prefill worker it always is).
    """

    row: int
    sampling: Sampling
    max_len: int  # tokens of prompt + output at which the row finishes
    min_len: int  # no stop token is drawn at a position below this
    active: bool = False
    seq_len: int = 0
    last_token: int = 0
    penalty_slot: int = 0  # of its penalties and logit bias; 0 = it has none
    prompt: tuple[int, ...] = ()  # with a penalty slot: counts for repetition
    output: tuple[int, ...] = ()  # with a penalty slot: drawn before, most often nothing
    text: tuple[int, ...] = ()  # all tokens that are known, if a drafter reads them
    state_slot: int = 0  # where layers are recurrent: its state is of tokens[: seq_len]


class RowPages(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """page_table[row, first : first + len(pages)] = pages."""

    row: int
    first: int
    pages: tuple[int, ...]


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compute KV of `tokens` at positions start, start + 1, ... of `row`.

    With `sample`, `tokens` ends the prompt, and the token after it is drawn from the last hidden.
    """

    row: int
    start: int
    tokens: tuple[int, ...]
    sample: bool = False
    state_slot: int = 0  # where layers are recurrent: of the state before these tokens, then after
    # Tokens behind the first, second, ... of `tokens`, whose logprobs are wanted.
    scored: tuple[int, ...] = ()
    store_from: int = 0  # KV of positions below it is there, in pages that others read, and stays
    # Where layers are recurrent: the state after so many tokens goes to that slot as well.
    snapshot: tuple[int, int] = (0, 0)


class Copies(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """(from, to) of whole slots of state, then of whole pages, one after the other."""

    slots: tuple[tuple[int, int], ...]
    pages: tuple[tuple[int, int], ...]


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """One step: either chunks of prompts or windows of the rows `decode`, never both.

    A window is `width` tokens of a row: the last drawn one, then drafts to verify. 1: plain decode.

    A decode step: copies, releases, starts, pages, forward, tail. A prefill step: copies, pages,
    forward, releases, starts, tail. The forward of a prefill step reads only the page table, so the
    host can enqueue releases and starts while the device is busy.
    """

    step: int
    releases: tuple[int, ...] = ()
    starts: tuple[RowStart, ...] = ()
    pages: tuple[RowPages, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    decode: tuple[int, ...] = ()
    tail: Tail = "none"
    max_seq_len_ub: int = 0  # host bound of every row's KV length after this step
    penalized: bool = False  # some sampled row has a penalty slot
    num_logprobs: int = -1  # likeliest alternatives to report; -1 = no logprobs
    masked: bool = False  # the tail waits for grammar masks: `ModelRunner.launch_tail`
    width: int = 1  # tokens that a row of `decode` computes, and draws at most
    num_keys: int = 0  # sum of all rows' bounds, for logs
    num_prompt_logprobs: int = -1  # as num_logprobs, of `Chunk.scored`; -1: nothing is scored
    copies: Copies | None = None
    snapshots: tuple[tuple[int, int], ...] = ()  # (row, slot): where it stores them from now on

    @property
    def sampled_rows(self) -> tuple[int, ...]:
        """Rows for which this step draws a token, in the order of the result."""
        return self.decode or tuple(chunk.row for chunk in self.chunks if chunk.sample)


def tail_of(samplings: Iterable[Sampling]) -> Tail:
    """Choose the cheapest tail that can draw for all of them; "none" if there are none."""
    return TAILS[max(map(tail_index, samplings), default=0)]


def tail_index(sampling: Sampling) -> int:
    """Index into TAILS of the cheapest tail that can draw for a request."""
    if sampling.temperature == 0:
        return TAILS.index("greedy")
    filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return TAILS.index("filtered" if filters else "random")


class PaddedShape(msgspec.Struct, frozen=True, array_like=True):
    """How to build a batch of chunks for `ChunkGraphs.launch`; see `BatchBuffers.chunks`."""

    num_tokens: int = 0  # pad to this many; 0: do not pad
    fixed_len: int = 0  # pad requests as well, of up to so many tokens; 0: do not
    refused: str = ""  # why no graph serves the batch, for metrics


class Launch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Leader to rank: launch this step, as the leader does at the same time.

    Which graph serves chunks follows from times that ranks would measure a little differently,
    so the leader's choice comes with the plan.
    """

    plan: Plan
    shape: PaddedShape = PaddedShape()


class LaunchTail(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Leader to rank: the masks of the masked step that was launched last; launch its tail.

    Fields: `worker.forward.draws.Masks`, in the leader's byte order.
    """

    num_masks: int  # lines of `words`
    words: bytes  # i32
    line: tuple[int, ...]


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Leader to rank: nothing follows, and the leader goes."""


class Launched(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Rank to leader, with engine.strict: the result of a step of its own."""

    step: int
    drawn: int  # digest of the tokens


class Drawn(msgspec.Struct, frozen=True, gc=False):
    """One entry of a step's result, in the order of Plan.sampled_rows."""

    # At least one, and Plan.width at most; none: the row was not active when the step began, which
    # the scheduler asserts against.
    tokens: tuple[int, ...]
    finished: bool  # the row went inactive with the last of them
    logprobs: tuple[TokenLogprob, ...] = ()  # by token, if the plan asks for them
    drafts: tuple[int, ...] = ()  # verified by the step: Plan.width - 1 ids; -1 = there was none
