"""What chunks of prompts become on the device: rows, padding, and row starts of the step state."""

import random
from collections import Counter
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from tests.support import pairwise as products
from tests.support.interpreted import INTERPRETED, WHY, compiling
from worker.api import Sampling
from worker.ops.jit import HAS_TRITON
from worker.plan import Chunk, Plan, RowPages, RowStart
from worker.step import chunk_rows, chunk_rows_triton
from worker.step.buffers import BatchBuffers, BatchShape
from worker.step.state import StateShape, StepState

CPU = torch.device("cpu")
PAGE_SIZE = 16


def state_of(num_rows: int, max_pages: int = 8) -> StepState:
    return StepState(StateShape(num_rows, max_pages, (2,), 0, 97), CPU)


def _copied(batch: Any) -> dict[str, Any]:
    names = [name for name in batch.__slots__ if name != "host"]
    values = {name: getattr(batch, name) for name in names}
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


if not INTERPRETED:

    @pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    def test_the_kernel_compiles_for_hopper_without_one(monkeypatch) -> None:
        monkeypatch.setattr("worker.step.buffers.chunk_rows", chunk_rows_triton.chunk_rows_triton)
        pages, chunks = (RowPages(1, 0, (3,)),), (Chunk(1, 0, (5, 6)),)
        with compiling(chunk_rows_triton) as found:
            BatchBuffers(state_of(4), BatchShape(PAGE_SIZE, 4)).chunks(
                Plan(1, pages=pages, chunks=chunks, max_seq_len_ub=2)
            )
        assert found

    def test_pages_for_which_an_upload_has_no_room_are_applied_all_the_same() -> None:
        state = state_of(5)
        buffers = BatchBuffers(state, BatchShape(PAGE_SIZE, 5))
        pages = tuple(RowPages(row, 0, tuple(range(8 * row, 8 * row + 8))) for row in range(1, 6))
        chunks = tuple(Chunk(row, 127, (row,)) for row in range(1, 6))
        batch = buffers.chunks(Plan(1, pages=pages, chunks=chunks, max_seq_len_ub=128))
        wanted = torch.arange(8, 48, dtype=torch.int32).view(5, 8)
        assert torch.equal(state.page_table[1:], wanted)
        assert torch.equal(batch.page_table, wanted)
        assert batch.slot_mapping.tolist() == [16 * (8 * row + 7) + 15 for row in range(1, 6)]

    def test_a_batch_is_read_in_place_and_its_lines_are_aligned() -> None:
        """Graphs read fixed addresses; kernels are compiled anew for pointers off 16 bytes."""
        state = state_of(9)
        buffers = BatchBuffers(state, BatchShape(PAGE_SIZE, 9))
        at = buffers.blank_chunk(9).slot_mapping.data_ptr()
        for num_tokens in range(1, 9):
            for num_reqs in range(1, num_tokens + 1):
                sizes = [1] * (num_reqs - 1) + [num_tokens - num_reqs + 1]
                chunks = tuple(Chunk(1, 0, (1,) * size) for size in sizes)
                batch = buffers.chunks(Plan(0, chunks=chunks, max_seq_len_ub=9), 9)
                assert batch.slot_mapping.data_ptr() == at
                for each in (batch.input_ids, batch.positions, batch.slot_mapping):
                    assert each.data_ptr() % 16 == 0
                for each in (batch.query_start, batch.seq_lens, batch.page_table):
                    assert each.data_ptr() % 16 == 0

    def test_rows_start_with_what_their_plan_says_and_others_keep_theirs() -> None:
        state = state_of(5)
        first = Sampling(9, temperature=0.5, top_p=0.25, top_k=4, seed=2**62, min_p=0.125)
        second = Sampling(
            9, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=2.0, stop_ids=(8, 9)
        )
        starts = (
            RowStart(4, first, 100, 3, active=True, seq_len=40, last_token=17),
            RowStart(2, second, 50, 0),
            RowStart(1, Sampling(9, temperature=0.0), 60, 0),
        )
        state.apply(Plan(1, starts=starts))
        ints, floats = state.ints, state.floats
        assert state.active.tolist() == [False, False, False, False, True, False]
        assert ints.max_len.tolist() == [0, 60, 50, 0, 100, 0]
        assert (ints.seq_len[4], ints.last_token[4], ints.min_len[4]) == (40, 17, 3)
        assert state.stop_ids[4].tolist() == [2] + [-1] * (state.stop_ids.shape[1] - 1)
        assert state.stop_ids[2, :3].tolist() == [8, 9, 2]
        assert floats.repetition_penalty.tolist() == [1, 1, 2, 1, 1, 1]
        assert floats.top_p.tolist() == [1, 1, 1, 1, 0.25, 1]
        for column in (*ints, *floats):
            assert column.is_contiguous()
            assert column.data_ptr() % 16 == 0


def random_plan(rng: random.Random, num_rows: int, max_pages: int, max_tokens: int) -> Plan:
    """Chunks of rows, some of which have several, and pages of rows with and without any."""
    rows = rng.choices(range(1, num_rows + 1), k=rng.randint(1, min(num_rows, max_tokens)))
    chunks, left = [], max_tokens - len(rows)  # tokens, beyond one for each
    for row in rows:
        more = rng.randint(0, min(left, max_pages * PAGE_SIZE - 1))
        left -= more
        start = rng.randint(0, max_pages * PAGE_SIZE - 1 - more)
        tokens, kept = tuple(rng.choices(range(1, 97), k=1 + more)), rng.choice((0, 0, 1, 20, 200))
        chunks.append(Chunk(row, start, tokens, store_from=kept and start + kept - 1))
    pages = []
    for row in range(1, num_rows + 1):
        cuts = sorted(rng.sample(range(max_pages + 1), rng.choice((0, 2, 2, 3))))
        pages += [
            RowPages(row, first, tuple(rng.choices(range(1000, 9999), k=last - first)))
            for first, last in pairwise(cuts)
        ]
    rng.shuffle(pages)
    longest = max(chunk.start + len(chunk.tokens) for chunk in chunks)
    return Plan(1, pages=tuple(pages), chunks=tuple(chunks), max_seq_len_ub=longest)


def expected(plan: Plan, table: torch.Tensor, num_rows: int, num_reqs: int) -> dict[str, Any]:
    """The batch of a plan whose pages are in `table`, padded with zeros, token by token."""
    tokens = [
        (
            token,
            at,
            int(table[chunk.row, at // PAGE_SIZE]) * PAGE_SIZE + at % PAGE_SIZE
            if at >= chunk.store_from
            else chunk_rows.NOT_STORED,
        )
        for chunk in plan.chunks
        for at, token in enumerate(chunk.tokens, chunk.start)
    ]
    tokens += [(0, 0, 0)] * (num_rows - len(tokens))
    ids, positions, slots = (list(each) for each in zip(*tokens, strict=True))
    counts = [len(chunk.tokens) for chunk in plan.chunks]
    padding = [0] * (num_reqs - len(counts))
    return {
        "input_ids": ids,
        "positions": positions,
        "slot_mapping": slots,
        "query_start": [0, *accumulate(counts + padding)],
        "seq_lens": [chunk.start + len(chunk.tokens) for chunk in plan.chunks] + padding,
        "page_table": table[[chunk.row for chunk in plan.chunks] + padding].tolist(),
    }


@pytest.mark.parametrize("order", ["forwards", "backwards"] if INTERPRETED else ["twin"])
def test_any_plan_of_chunks_is_as_if_its_pages_had_come_first(order, monkeypatch) -> None:
    """Whichever of the kernel's programs is first, and whatever was uploaded before."""
    on_twin, seen = order == "twin", Counter[str]()
    op = chunk_rows.chunk_rows_ref if on_twin else chunk_rows_triton.chunk_rows_triton
    monkeypatch.setattr("worker.step.buffers.chunk_rows", op)
    if order == "backwards":
        _run_programs_backwards(monkeypatch, seen)
    num_seeds = 60 if on_twin or products.whole else 8
    for seed in range(num_seeds):
        rng = random.Random(seed)
        max_pages, max_tokens = rng.choice((2, 5, 8, 140, 300)), rng.choice((5, 9, 33, 300))
        state = state_of(rng.randint(1, 9), max_pages)
        table, num_rows = state.page_table, len(state.active) - 1
        table[1:] = torch.arange(1, 1 + num_rows * max_pages).view(num_rows, -1)
        buffers = BatchBuffers(state, BatchShape(PAGE_SIZE, max_tokens))
        for _ in range(3):
            plan = random_plan(rng, num_rows, max_pages, max_tokens)
            wanted = table.clone()
            for each in plan.pages:
                new = slice(each.first, each.first + len(each.pages))
                wanted[each.row, new] = torch.tensor(each.pages, dtype=torch.int32)
                table[each.row, new] = 1 << 30  # no page that anybody may use
            buffers._staging.words.fill_(1)  # of uploads before: what follows this one's
            num_reqs, num_tokens = len(plan.chunks), sum(len(c.tokens) for c in plan.chunks)
            fits = [most for most in buffers.fixed_lens if plan.max_seq_len_ub <= most]
            fixed_len = rng.choice(fits) if num_reqs <= buffers.fixed_reqs else 0
            padded = rng.randint(num_tokens, max_tokens) if fixed_len or seed % 2 else 0
            found = _copied(buffers.chunks(plan, padded, fixed_len=fixed_len))
            lines = expected(
                plan, wanted, padded or num_tokens, buffers.fixed_reqs if fixed_len else num_reqs
            )
            width = len(found["page_table"][0])
            lines["page_table"] = [line[:width] for line in lines["page_table"]]
            assert width * PAGE_SIZE >= plan.max_seq_len_ub
            assert {name: found[name] for name in lines} == lines
            assert torch.equal(table, wanted)
            per_row = Counter(chunk.row for chunk in plan.chunks)
            seen["shared"] += any(per_row[each.row] > 1 for each in plan.pages)
            seen["fixed"] += fixed_len > 0
            seen["far"] += fixed_len > buffers.fixed_lens[0]
    assert seen["shared"] > num_seeds * 3 // 4
    assert seen["fixed"] > 5
    assert seen["far"]
    assert (seen["backwards"] > 0) is (order == "backwards")


def _run_programs_backwards(monkeypatch: pytest.MonkeyPatch, seen: Counter[str]) -> None:
    """Those of the page table before those of rows: the device runs them in any order."""
    from triton.runtime.interpreter import InterpreterBuilder

    set_grid_idx = InterpreterBuilder.set_grid_idx

    def backwards(self: Any, x: int, y: int, z: int) -> None:
        set_grid_idx(self, self.grid_dim[0] - 1 - x, y, z)
        seen["backwards"] += self.grid_idx[0] > x

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", backwards)
