"""Batch: all tensors of one forward pass, in a record that is built whole and then only read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

SHORT_KEYS = 2048  # a bound of seq_lens up to which attention of chunks may have smaller tiles


class Bounds(NamedTuple):
    """A batch's padded shape and host bounds of its lengths, by which kernels are chosen."""

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class HostLengths:
    """The lengths of a batch as the host knows them, for attention backends that plan there.

    seq_lens equal the device's for every request that is active there. One that has ended on the
    device stays in the host's batch for one more step, with a length that is too high by one. Its
    page table is the sink's by then, and its result is not used.
    """

    query_lens: Sequence[int]  # [num_reqs]; tokens of the requests
    seq_lens: Sequence[int]  # [num_reqs]; KV lengths after this step, at least query_lens


class WindowShape(NamedTuple):
    """What a decode step's work depends on besides its rows."""

    width: int  # tokens of a row's window: the last drawn one and the drafts behind it
    max_seq_len_ub: int  # host bound of the KV lengths after the step, with whole windows
    host: HostLengths | None = None  # None: wider than 1, so nobody knows them; or captured


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What a chain drafter's rows of a batch of chunks are made of, a line a token.

    The draft row of the token at position t is made of it and the feature of token t - 1.
    """

    # [num_tokens] i64: index in this batch of the token whose feature that is; for a request's
    # first token in this batch -1 - page, whose tail holds it (page 0 at position 0: there is none)
    source: Tensor
    slots: Tensor  # [num_tokens] i64; as slot_mapping, but 0 at position 0, which has no row
    # [num_tokens] i64: page whose tail the token's feature becomes; 0: of none
    tail_pages: Tensor


class StateWindows(NamedTuple):
    """Rows of a decode step with states: n windows of `width` tokens."""

    live: Tensor  # [n] i64; numbers of rows; 0: no row, which writes nothing but zeros
    state_slot: Tensor  # [num_rows + 1] i64
    folded: Tensor  # [num_rows + 1] i64; tokens that are in the slot's state
    seq_len: Tensor  # [num_rows + 1] i64; those and the accepted ones behind, which the ring has
    # [num_rows + 1] i64; a slot for the state at a multiple of `grid` that a step passes; 0: none
    snap_slot: Tensor
    width: int
    grid: int  # more than twice the widest window


class StateChunks(NamedTuple):
    """Chunks of n requests with states, as Batch has them. A padded request has no tokens."""

    query_start: Tensor  # [n + 1] i32
    seq_lens: Tensor  # [n] i32; with the chunk
    slots: Tensor  # [n] i32; of the requests' states
    # [n] i32: a state that is stored as well, if the chunk passes or reaches it: a multiple of 64
    snap_lens: Tensor  # after so many tokens of the request; 0: none
    snap_slots: Tensor  # where
    # [2, at least all blocks] i32: request (n: none) and first token of the batch's blocks
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of `num_reqs` requests, flattened; all tensors on the worker's device.

    Request i owns tokens query_start[i] : query_start[i + 1], the last ones of its sequence: the
    first of them is at position seq_lens[i] - (number of them). Tokens from query_start[-1] on are
    padding: slots on page 0, token 0, position 0. A padded request has no tokens, seq_len 0 and
    page 0 in its table.
    """

    input_ids: Tensor  # [num_tokens] i64
    positions: Tensor  # [num_tokens] i64; positions of the tokens in their requests
    slot_mapping: Tensor  # [num_tokens] i64; page * page_size + offset where the token's KV goes
    query_start: Tensor  # [num_reqs + 1] i32
    seq_lens: Tensor  # [num_reqs] i32; KV length after this step; true on the device
    page_table: Tensor  # [num_reqs, max_pages] i32; entries past the KV's end: any valid page
    num_reqs: int  # padded ones included
    num_tokens: int  # padded ones included
    max_query_len: int  # host bound of the tokens of one request
    max_seq_len_ub: int  # host bound of seq_lens: steps in flight are not settled yet
    host: HostLengths | None = None  # None while capturing: lengths differ by replay
    # [n] i64: index of the requests' last tokens, then zeros. If given, the forward returns hidden
    # states of these tokens only.
    last_token_rows: Tensor | None = None
    draft: DraftRows | None = None  # of chunks, if a chain drafter reads them
    states: StateWindows | StateChunks | None = None  # if layers are recurrent

    @property
    def bounds(self) -> Bounds:
        """Of this batch."""
        return Bounds(self.num_reqs, self.num_tokens, self.max_query_len, self.max_seq_len_ub)
