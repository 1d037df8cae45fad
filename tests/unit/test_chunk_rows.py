"""What chunks of prompts become on the device: rows, padding, and row starts of the step state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.interpreted import INTERPRETED, WHY, ptx_of, run_interpreted
from worker.api import Sampling
from worker.buffers import BatchBuffers
from worker.kernels import chunk_rows
from worker.kernels.jit import HAS_TRITON
from worker.plan import Chunk, Plan, RowPages, RowStart
from worker.state import StepState

CPU = torch.device("cpu")
PAGE_SIZE = 16


def inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of rows 1 to 4 of a page table that has pages everywhere."""
    generator = torch.Generator().manual_seed(num_tokens)
    table = torch.randperm(5 * 8, generator=generator).view(5, 8).int()
    at = torch.arange(num_tokens)
    tokens = torch.stack([at * 2**33 + 5, at * 7 % (8 * PAGE_SIZE), 1 + at % 4])
    return tokens, table


if not INTERPRETED:

    @pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    def test_this_file_under_the_interpreter() -> None:
        run_interpreted(__file__)

    @pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    def test_the_kernel_compiles_for_hopper_without_one() -> None:
        types = dict.fromkeys(("tokens", "out"), "*i64") | {"page_table": "*i32"}
        types |= dict.fromkeys(
            ("num_tokens", "num_rows", "stride_tokens", "stride_table", "stride_out"), "i32"
        )
        constants = {"PAGE_SIZE": 64, "BLOCK": chunk_rows.BLOCK, "PDL": True}
        ptx = ptx_of(chunk_rows._chunk_rows_kernel, types, constants, num_warps=4, launch_pdl=True)
        assert "griddepcontrol.wait" in ptx

    def state_of(num_rows: int) -> StepState:
        return StepState(num_rows, 8, (2,), CPU, num_extras=0, vocab_size=97)

    def test_a_batch_of_chunks_lies_where_its_plan_says() -> None:
        state = state_of(5)
        pages = RowPages(2, 0, (7, 4, 9)), RowPages(5, 0, (3, 8))
        state.apply(Plan(1, pages=pages))
        chunks = Chunk(2, 30, (11, 12, 13)), Chunk(5, 0, (21, 22))
        plan = Plan(2, chunks=chunks, max_seq_len_ub=33)
        buffers = BatchBuffers(state, PAGE_SIZE, 9)
        exact, padded = [_copied(buffers.chunks(plan, num_rows)) for num_rows in (0, 9)]
        assert exact["input_ids"] == [11, 12, 13, 21, 22]
        assert exact["positions"] == [30, 31, 32, 0, 1]
        assert exact["slot_mapping"] == [4 * 16 + 14, 4 * 16 + 15, 9 * 16, 3 * 16, 3 * 16 + 1]
        assert exact["query_start"] == [0, 3, 5]
        assert exact["seq_lens"] == [33, 2]
        assert exact["page_table"] == [[7, 4, 9], [3, 8, 0]]
        assert (exact["num_tokens"], exact["max_query_len"]) == (5, 3)
        for name in ("input_ids", "positions", "slot_mapping"):
            assert padded[name] == exact[name] + [0] * 4
        for name in ("query_start", "seq_lens", "page_table", "num_reqs", "max_seq_len_ub"):
            assert padded[name] == exact[name]
        assert (padded["num_tokens"], padded["max_query_len"]) == (9, 4)

    def _copied(batch: Any) -> dict[str, Any]:
        names = [name for name in batch.__slots__ if name != "host"]
        values = {name: getattr(batch, name) for name in names}
        return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in values.items()}

    def test_a_batch_is_read_in_place_and_its_lines_are_aligned() -> None:
        """Graphs read fixed addresses; kernels are compiled anew for pointers off 16 bytes."""
        state = state_of(5)
        buffers = BatchBuffers(state, PAGE_SIZE, 9)
        at = buffers.blank_chunk(9).slot_mapping.data_ptr()
        for num_tokens in range(1, 9):
            for num_reqs in range(1, num_tokens + 1):
                sizes = [1] * (num_reqs - 1) + [num_tokens - num_reqs + 1]
                chunks = tuple(Chunk(1, 0, (1,) * size) for size in sizes)
                batch = buffers.chunks(Plan(0, chunks=chunks, max_seq_len_ub=9), 9)
                assert batch.slot_mapping.data_ptr() == at
                for each in (batch.input_ids, batch.positions, batch.slot_mapping):
                    assert each.data_ptr() % 16 == 0
                assert batch.seq_lens.data_ptr() - batch.query_start.data_ptr() & 15 == 0

    def test_rows_start_with_what_their_plan_says_and_others_keep_theirs() -> None:
        state = state_of(5)
        first = Sampling(9, temperature=0.5, top_p=0.25, top_k=4, seed=2**62, min_p=0.125)
        second = Sampling(
            9, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=2.0, stop_ids=(8, 9)
        )
        starts = (
            RowStart(4, first, 100, 3, active=True, seq_len=40, last_token=17),
            RowStart(2, second, 50, 0),
            RowStart(1, None, 60, 0),
        )
        state.apply(Plan(1, starts=starts))
        assert state.active.tolist() == [False, False, False, False, True, False]
        assert state.max_len.tolist() == [0, 60, 50, 0, 100, 0]
        assert (state.seq_len[4], state.last_token[4], state.min_len[4]) == (40, 17, 3)
        assert (state.seed[4], state.top_k[4]) == (2**62, 4)
        assert (state.temperature[4], state.top_p[4], state.min_p[4]) == (0.5, 0.25, 0.125)
        assert state.stop_ids[4].tolist() == [2] + [-1] * (state.stop_ids.shape[1] - 1)
        assert state.stop_ids[2, :3].tolist() == [8, 9, 2]
        assert state.presence_penalty.tolist() == [0, 0, 1.5, 0, 0, 0]
        assert state.frequency_penalty.tolist() == [0, 0, 0.5, 0, 0, 0]
        assert state.repetition_penalty.tolist() == [1, 1, 2, 1, 1, 1]
        assert state.top_p.tolist() == [1, 1, 1, 1, 0.25, 1]
        assert state.temperature[1] == 0.0, "no sampling is greedy"
        for column in (state.seed, state.extra, state.temperature, state.min_p):
            assert column.is_contiguous()
            assert column.data_ptr() % 16 == 0

else:

    @pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (5, 16), (130, 200), (128, 128)])
    def test_the_kernel_matches_its_twin(num_tokens: int, num_rows: int) -> None:
        tokens, table = inputs(num_tokens)
        found, wanted = (torch.full((3, 256), -5) for _ in range(2))
        chunk_rows.chunk_rows_triton(tokens, table, PAGE_SIZE, found, num_rows)
        chunk_rows.chunk_rows_ref(tokens, table, PAGE_SIZE, wanted, num_rows)
        assert torch.equal(found, wanted)
        assert not found[:, num_tokens:num_rows].any()
        assert (found[:, num_rows:] == -5).all()
