"""BatchBuffers: makes a prefill plan into a Batch, all tensors of one forward at once."""

import struct
from collections.abc import Sequence
from itertools import accumulate, cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.config.checkpoint.delta_shape import DELTA_BLOCK, block_table
from worker.forward.batch import SHORT_KEYS, Batch, DraftRows, HostLengths, StateChunks
from worker.ops.jit import power_of_two
from worker.ops.product import MAX_STREAMED_ROWS
from worker.plan import LONG_STEP_TOKENS, Plan, RowPages
from worker.step.chunk_rows import DRAFT_LINES, NUM_LINES, TOKEN_LINES, chunk_rows, line_width, pack
from worker.step.state import StepState

# Most requests of a fixed-shape batch: attention splits its work without the true lengths, and with
# more requests the parts would be too uneven. Their tokens are few, or as many as a row may have:
# these two, as a bound over SHORT_KEYS asks for other tiles.
FIXED_REQS = 4
# Most requests of a long step for which only hidden states of last tokens are computed.
MAX_LAST_TOKEN_ROWS = MAX_STREAMED_ROWS
DEPTH = 4  # uploads in flight before the host waits; an engine has at most two steps in flight
GRAIN = 256  # words; sizes of copies are multiples of it, so that their views are made once


class Staging:
    """`words` (i32, on the device), which the host fills at every step, through pinned buffers.

    An upload stays until the next one, which runs behind all work on the current stream. On the
    CPU the host writes `words` directly.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        num_words = -(-num_words // GRAIN) * GRAIN
        self.words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._host = None if device.type == "cuda" else self.words.numpy().data
        ends = range(0, num_words + 1, GRAIN)
        # Memory of a pinned buffer; (from, to) of its copies by the number of grains; the event
        # behind the latest of these copies.
        ring = []
        for _ in range(DEPTH if self._host is None else 0):
            pinned = torch.zeros(num_words, dtype=torch.int32, pin_memory=True)
            copies = [(pinned[:end], self.words[:end]) for end in ends]
            ring.append((pinned.numpy().data, copies, torch.cuda.Event()))
        self._ring = cycle(ring)

    def upload(self, values: Sequence[int]) -> None:
        """words[: len(values)] = values. Words up to the next multiple of GRAIN change as well."""
        num = len(values)
        assert num <= len(self.words)
        if self._host is not None:
            struct.pack_into(f"{num}i", self._host, 0, *values)
            return
        host, copies, copied = next(self._ring)
        copied.synchronize()  # the copy DEPTH uploads ago must have left this buffer
        struct.pack_into(f"{num}i", host, 0, *values)
        source, target = copies[-(-num // GRAIN)]
        target.copy_(source, non_blocking=True)
        copied.record()


class _Lengths(NamedTuple):
    """Of the requests of a batch, i32."""

    query_start: Tensor  # [num_reqs + 1]
    seq_lens: Tensor  # [num_reqs]
    state_slots: Tensor  # [num_reqs]
    snap_lens: Tensor  # [num_reqs]
    snap_slots: Tensor  # [num_reqs]


class BatchShape(NamedTuple):
    """What the batches of one runner have."""

    page_size: int
    max_chunk_tokens: int
    drafts: bool = False  # they have `DraftRows`
    # A drafter reads the last layer's output of all tokens of a prompt. Otherwise long steps
    # compute it for last tokens alone, unless a prompt's logprobs are wanted.
    all_hidden: bool = False
    recurrent: bool = False  # they have `states`


class BatchBuffers:
    """Builds batches of chunks for one runner from its step state."""

    def __init__(self, state: StepState, shape: BatchShape) -> None:
        page_size, max_chunk_tokens, drafts, self._all_hidden, self._recurrent = shape
        self._state, self._page_size = state, page_size
        capacity = max_chunk_tokens + max_chunk_tokens % 2  # even: its lines are 16-byte aligned
        # Token ids, positions and slots of the latest batch of chunks, then its draft rows. Graphs
        # read them here.
        num_lines = DRAFT_LINES if drafts else TOKEN_LINES
        self._chunk = torch.zeros(num_lines, capacity, dtype=torch.int64, device=state.device)
        num_rows, max_pages = len(state.active) - 1, state.page_table.shape[1]
        # Filled by one upload a batch of chunks, see SentChunks. Fixed-shape graphs read
        # query_start and seq_lens from this memory.
        self._page_words = max_pages + max_chunk_tokens // page_size + num_rows
        num_words = NUM_LINES * line_width(num_rows) + max_chunk_tokens + self._page_words
        self._staging = Staging(num_words, state.device)
        self._blocks = Staging(2 * (max_chunk_tokens // DELTA_BLOCK + num_rows), state.device)
        self.fixed_reqs = min(FIXED_REQS, num_rows)
        # Tokens that a request of a fixed-shape batch may have, ascending, with its table.
        lengths = sorted({min(SHORT_KEYS, max_pages * page_size), max_pages * page_size})
        self._tables = {
            length: torch.zeros_like(state.page_table[: self.fixed_reqs, : -(-length // page_size)])
            for length in lengths
        }
        # By padded tokens and the length; all over the same buffers.
        self._fixed_batches: dict[tuple[int, int], Batch] = {}
        self._last_token_rows = self._chunk.new_zeros(MAX_LAST_TOKEN_ROWS)

    def chunks(self, plan: Plan, padded_tokens: int = 0, *, fixed_len: int = 0) -> Batch:
        """Build the batch of a prefill plan, and write the plan's pages to the page table.

        The batch lies in buffers that the next call overwrites. padded_tokens: pad it to so many
        and round max_query_len up to a power of two, so that few kernel variants are compiled; 0:
        do neither. fixed_len: one of `fixed_lens`; pad the requests to `fixed_reqs` too, all of up
        to so many tokens. Shapes and host bounds then depend on these two alone.
        """
        counts = [len(chunk.tokens) for chunk in plan.chunks]
        assert not self._recurrent or all(chunk.start % DELTA_BLOCK == 0 for chunk in plan.chunks)
        num_reqs, longest, table = len(counts), max(counts), self._state.page_table
        num_lines = self.fixed_reqs if fixed_len else num_reqs
        values, sent = pack(self._staging.words, plan.chunks, self._new_pages(plan), num_lines)
        self._staging.upload(values)
        num_tokens = max(padded_tokens, sent.num_tokens)
        query_start = [0, *accumulate(counts)] + [sent.num_tokens] * (num_lines - num_reqs)
        blocks = self._block_table(query_start, num_tokens)
        if fixed_len:
            key, tables = (num_tokens, fixed_len), self._tables[fixed_len]
            chunk_rows(sent, table, self._page_size, self._chunk, num_tokens, tables)
            if (batch := self._fixed_batches.get(key)) is not None:
                self._last_tokens(num_tokens, batch.query_start)
                return batch
            batch = self._fixed_batches[key] = self._of_chunks(
                num_tokens,
                self._lengths(num_lines, sent.width),
                blocks,
                page_table=tables,
                max_query_len=num_tokens,
                max_seq_len_ub=fixed_len,
            )
            return batch
        if padded_tokens:
            longest = min(padded_tokens, power_of_two(longest))
        num_pages = min(-(-plan.max_seq_len_ub // self._page_size), table.shape[1])
        tables = table.new_empty(num_reqs, num_pages)
        chunk_rows(sent, table, self._page_size, self._chunk, num_tokens, tables)
        ends = [chunk.start + len(chunk.tokens) for chunk in plan.chunks]
        return self._of_chunks(
            num_tokens,
            self._lengths(num_reqs, sent.width),
            blocks,
            page_table=tables,
            max_query_len=longest,
            max_seq_len_ub=plan.max_seq_len_ub,
            host=HostLengths(counts, ends),
            all_hidden=plan.num_prompt_logprobs >= 0,
        )

    @property
    def fixed_lens(self) -> Sequence[int]:
        """Tokens that a request of a fixed-shape batch may have, ascending."""
        return tuple(self._tables)

    def max_reqs(self, padded_tokens: int) -> int:
        """Most requests that a graph of `padded_tokens` tokens can serve."""
        return MAX_LAST_TOKEN_ROWS if self._is_long(padded_tokens) else padded_tokens

    def _is_long(self, num_tokens: int) -> bool:
        return num_tokens >= LONG_STEP_TOKENS and not self._all_hidden

    def blank_chunk(self, num_tokens: int) -> Batch:
        """Build a batch of one prompt, all padding (KV goes to page 0), for warm-up and capture."""
        self._chunk[:, :num_tokens].zero_()
        host = [0, num_tokens], [num_tokens], [0], [0], [0]
        lengths = _Lengths(*(self._state.upload(values, torch.int32) for values in host))
        num_pages = -(-num_tokens // self._page_size)
        return self._of_chunks(
            num_tokens,
            lengths,
            self._block_table([0, num_tokens], num_tokens),
            page_table=torch.zeros(1, num_pages, dtype=torch.int32, device=self._state.device),
            max_query_len=num_tokens,
            max_seq_len_ub=num_tokens,
            host=HostLengths([num_tokens], [num_tokens]),
        )

    def _of_chunks(
        self,
        num_tokens: int,
        lengths: _Lengths,
        blocks: Tensor | None,
        *,
        all_hidden: bool = False,
        **rest: Any,
    ) -> Batch:
        query_start, seq_lens = lengths[:2]
        states = None if blocks is None else StateChunks(*lengths, blocks)
        ids, positions, slots, *draft = self._chunk[:, :num_tokens]
        return Batch(
            input_ids=ids,
            positions=positions,
            slot_mapping=slots,
            query_start=query_start,
            seq_lens=seq_lens,
            num_reqs=len(seq_lens),
            num_tokens=num_tokens,
            last_token_rows=None if all_hidden else self._last_tokens(num_tokens, query_start),
            draft=DraftRows(*draft) if draft else None,
            states=states,
            **rest,
        )

    def _block_table(self, query_start: Sequence[int], num_tokens: int) -> Tensor | None:
        """Upload StateChunks.blocks, if layers are recurrent: always to the same place."""
        if not self._recurrent:
            return None
        requests, firsts = block_table(query_start, num_tokens)
        self._blocks.upload(requests + firsts)
        return self._blocks.words[: 2 * len(requests)].view(2, -1)

    def _last_tokens(self, num_tokens: int, query_start: Tensor) -> Tensor | None:
        """Fill `Batch.last_token_rows`; its length is the same for any number of requests."""
        num_reqs = len(query_start) - 1
        if not self._is_long(num_tokens) or num_reqs > MAX_LAST_TOKEN_ROWS:
            return None
        self._last_token_rows.zero_()
        torch.sub(query_start[1:], 1, out=self._last_token_rows[:num_reqs])
        return self._last_token_rows

    def _lengths(self, num_reqs: int, width: int) -> _Lengths:
        """Views of the uploaded words; layout: SentChunks."""
        lines = self._staging.words[: NUM_LINES * width].view(NUM_LINES, width)
        others = (lines[line, :num_reqs] for line in (2, 6, 8, 9))
        return _Lengths(lines[1, : num_reqs + 1], *others)

    def _new_pages(self, plan: Plan) -> dict[int, RowPages]:
        """Choose the new pages that go with the upload, by row; apply the rest at once.

        The rest is pages for which the upload has no room, and pages of rows without a chunk in
        this plan: a decode worker may start decode rows in a prefill step.
        """
        new, others, num_pages = dict[int, RowPages](), [], 0
        rows, width = {chunk.row for chunk in plan.chunks}, self._state.page_table.shape[1]
        for entry in plan.pages:
            fits = num_pages + len(entry.pages) <= self._page_words
            if entry.row in rows and entry.row not in new and fits:
                assert entry.first + len(entry.pages) <= width
                new[entry.row] = entry
                num_pages += len(entry.pages)
            else:
                others.append(entry)
        self._state.apply_pages(others)
        return new
