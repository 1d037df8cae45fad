"""Batches of chunks as one GPU gets them: equal to the CPU's, and no upload reaches into another's.

The CPU's are tested in tests/unit/test_chunk_rows.py.
"""

import pytest
import torch

from tests.gpu.sync import no_sync
from worker.plan import Chunk, Plan, RowPages
from worker.step.buffers import DEPTH, BatchBuffers, BatchShape, Staging
from worker.step.state import StateShape, StepState

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.gpu(1)
PAGE_SIZE, ROWS, MAX_PAGES, MAX_TOKENS = 16, 9, 300, 600
NAMES = ("input_ids", "positions", "slot_mapping", "query_start", "seq_lens", "page_table")
BUSY_CYCLES = 1 << 30  # of the clock of the device: half a second or more


def both() -> list[tuple[StepState, BatchBuffers]]:
    states = [
        StepState(StateShape(ROWS, MAX_PAGES, (2,), 0, 97), torch.device(device))
        for device in ("cpu", "cuda")
    ]
    return [(state, BatchBuffers(state, BatchShape(PAGE_SIZE, MAX_TOKENS))) for state in states]


def plan_of(counts: list[int], step: int) -> Plan:
    """Chunks behind those of the step before, of other pages; one more row brings some as well."""
    pages = [RowPages(ROWS, 2 * step, (1 + step, 2 + step))]
    chunks = []
    for i, count in enumerate(counts):
        first = -(-count * step // PAGE_SIZE)
        last = -(-count * (step + 1) // PAGE_SIZE)
        if first < last:
            new = tuple(10000 * i + 500 * step + j for j in range(last - first))
            pages.append(RowPages(1 + i, first, new))
        tokens = tuple(7 * j + step for j in range(count))
        chunks.append(Chunk(1 + i, count * step, tokens))
    longest = max(counts) * (step + 1)
    return Plan(step, pages=tuple(pages), chunks=tuple(chunks), max_seq_len_ub=longest)


@pytest.mark.parametrize(
    ("counts", "num_rows", "fixed_shape"),
    [
        ([16], 16, True), ([5], 64, True), ([130, 7], 192, True), ([5], 0, False),
        ([1, 200, 3, 40, 8, 17, 90, 2], 600, False), ([599], 0, False),
    ],
)  # fmt: skip
def test_batches_are_the_cpu_s(counts: list[int], num_rows: int, fixed_shape: bool) -> None:
    (cpu_state, cpu), (state, buffers) = both()
    for step in range(3 * DEPTH // 2):
        plan = plan_of(counts, step)
        wanted = cpu.chunks(plan, num_rows, fixed_shape=fixed_shape)
        found = buffers.chunks(plan, num_rows, fixed_shape=fixed_shape)
        for name in NAMES:
            assert torch.equal(getattr(found, name).cpu(), getattr(wanted, name)), name
        assert torch.equal(state.page_table.cpu(), cpu_state.page_table)


def test_an_upload_is_not_overwritten_before_it_is_copied() -> None:
    """More of them than there is memory for, behind a device that is busy."""
    staging = Staging(700, torch.device("cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    copies = []
    for i in range(3 * DEPTH):
        staging.upload([i] * (700 - i))
        copies.append(staging.words[: 700 - i].clone())
    for i, copy in enumerate(copies):
        assert (copy == i).all()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device() -> None:
    _, (state, buffers) = both()
    for step in range(2):
        buffers.chunks(plan_of([16], step), 16, fixed_shape=True)  # compiles
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    with no_sync():
        for step in range(2, 1 + DEPTH):
            buffers.chunks(plan_of([16], step), 16, fixed_shape=True)
    idle = torch.cuda.current_stream(state.device).query()
    assert not idle, "the host was there when the device had ended"
