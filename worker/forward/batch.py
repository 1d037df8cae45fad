"""All tensors of one forward pass, as one record that is built whole and then only read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostLengths:
    """The lengths of a batch as the host knows them, for attention backends that plan there.

    seq_lens equal the device's for every request that is active there. A request that has ended on
    the device stays in the host's batch for one step more, with a length that is too high by one.
    Its page table is the sink's by then, so computing it does no harm, and nobody reads the result.
    """

    query_lens: Sequence[int]  # [num_reqs]; rows of each request
    seq_lens: Sequence[int]  # [num_reqs]; KV lengths after this step, at least query_lens


@dataclass(frozen=True, slots=True)
class Batch:
    """Ragged rows of `num_reqs` requests, all tensors on the worker's device.

    Request i owns rows query_start[i] : query_start[i + 1]; they are its last tokens, so the
    first of them stands at position seq_lens[i] − (number of its rows). Rows from query_start[-1]
    on are padding: slots on page 0, token 0, position 0. A padded request has no rows,
    seq_len 0 and page 0 in its table.
    """

    input_ids: Tensor  # [num_tokens] i64
    positions: Tensor  # [num_tokens] i64; position of each row's token in its request
    slot_mapping: Tensor  # [num_tokens] i64; page * page_size + offset that the row's KV goes to
    query_start: Tensor  # [num_reqs + 1] i32
    seq_lens: Tensor  # [num_reqs] i32; KV length after this step; true on the device
    page_table: Tensor  # [num_reqs, max_pages] i32; entries past the KV's end: any valid page
    num_reqs: int  # rows of the tables, padded ones included
    num_tokens: int  # rows of input_ids, padded ones included
    max_query_len: int  # host bound of the rows of one request
    max_seq_len_ub: int  # host bound of seq_lens: acceptance is not known here yet
    host: HostLengths | None = None  # None in a step that is captured: lengths differ by replay
    # [n] i64: the row of each request's last token, then padding; the forward returns hidden states
    # of these rows alone. None: of all rows.
    last_token_rows: Tensor | None = None
