"""Recurrent layers on one GPU: their kernels as they are served, and engines against the CPU."""

import pytest
import torch

from tests.equivalence import test_hybrid_laws as laws
from tests.gpu.sync import fail_on_sync
from tests.support.engines import running, value
from tests.unit import test_recurrent as rule
from worker.forward.batch import StateChunks, StateWindows
from worker.recurrent.chunk import block_table, delta_chunk, delta_chunk_ref
from worker.recurrent.delta_net import DeltaState, DeltaWeights
from worker.recurrent.delta_shape import DeltaShape
from worker.recurrent.window import delta_window, delta_window_ref

pytestmark = pytest.mark.gpu(1)
SHAPES = [DeltaShape(2, 2, 128, 128), DeltaShape(1, 3, 128, 128), DeltaShape(3, 1, 128, 128)]
LARGE = DeltaShape(16, 2, 128, 128)
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative, of the whole tensor


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("prompt", [0, 3, 70])
def test_every_width_and_acceptance_has_the_bits_of_plain_decode(shape, prompt: int) -> None:
    with torch.device("cuda"):
        rule.test_every_width_and_acceptance_equals_the_recurrence(shape, prompt)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neither_cut_nor_company_changes_a_bit_of_a_prompt(shape) -> None:
    with torch.device("cuda"):
        rule.test_neither_cut_nor_company_changes_a_bit_of_a_prompt(shape)


def both(dtype: torch.dtype, num_rows: int) -> list[tuple[DeltaWeights, DeltaState]]:
    """The same weights and states on the GPU and on the CPU."""
    net = rule.Net(LARGE, num_rows)
    for each in net.state:
        each.normal_()
    conv, a_log, dt_bias, norm, eps = net.weights
    weights = conv.to(dtype), a_log, dt_bias, norm.to(dtype)
    s, conv, ring = net.state
    states = s * 0.1, conv.to(dtype), ring.to(dtype)
    return [
        (
            DeltaWeights(*(each.to(device) for each in weights), eps),  # type: ignore
            DeltaState(*(each.to(device, copy=True) for each in states)),
        )
        for device in ("cuda", "cpu")
    ]


def check_near(x: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    x, wanted = x.cpu().double(), wanted.double()
    assert (x - wanted).norm() <= BOUNDS[dtype] * wanted.norm()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_windows_match_their_definition(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    num_rows = 9
    (weights, state), (ref_weights, ref_state) = both(dtype, num_rows)
    columns = (
        torch.tensor([1, 0, 3, 2, 5, 9]), torch.arange(num_rows + 1),
        torch.tensor([0, 5, 0, 7, 1, 70, 9, 9, 9, 64]),
        torch.tensor([0, 7, 0, 8, 4, 74, 9, 9, 9, 64]),
    )  # fmt: skip
    packed = torch.randn(6 * width, LARGE.packed_width, generator=generator).to(dtype)
    wanted = delta_window_ref(packed, ref_weights, ref_state, StateWindows(*columns, width))
    rows = StateWindows(*(column.cuda() for column in columns), width)  # type: ignore
    check_near(delta_window(packed.cuda(), weights, state, rows), wanted, dtype)
    for mine, its in zip(state, ref_state, strict=True):
        check_near(mine[1:], its[1:], dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_chunks_match_their_definition(dtype: torch.dtype) -> None:
    (weights, state), (ref_weights, ref_state) = both(dtype, 6)
    counts, before = [130, 2, 0, 64, 65, 300], [0, 64, 0, 64, 128, 0]
    start = torch.tensor([0, *counts]).cumsum(0).int()
    lengths = torch.tensor([a + b for a, b in zip(counts, before, strict=True)]).int()
    num = sum(counts) + 7
    packed = torch.randn(num, LARGE.packed_width, generator=torch.Generator().manual_seed(3))
    packed, slots = packed.to(dtype), torch.tensor([3, 1, 0, 2, 5, 6]).int()
    wanted, out = (torch.full((num, LARGE.value_width), float("nan")).to(dtype) for _ in range(2))
    chunks = StateChunks(start, lengths, slots, block_table(start, num))
    delta_chunk_ref(packed, ref_weights, ref_state, chunks, wanted)
    out, on_cuda = out.cuda(), StateChunks(*(each.cuda() for each in chunks))
    delta_chunk(packed.cuda(), weights, state, on_cuda, out)
    check_near(out, wanted, dtype)
    for mine, its in zip(state[:2], ref_state[:2], strict=True):
        check_near(mine[1:], its[1:], dtype)


@pytest.fixture(scope="module")
def cpu_ids() -> list[list[int]]:
    config = laws.sections("never", device="cpu", strict=False)
    with running(config, num_prefill=0) as cluster:
        return laws.ids(cluster.client.generate(*laws.asked()))


@pytest.mark.parametrize("graph", ["eager", "auto"])
@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("spec", [{}, {"drafter": "mtp", "widths": [4]}], ids=["plain", "mtp"])
def test_cuda_equals_cpu_in_float32(mode: str, graph: str, spec: dict, cpu_ids: list) -> None:
    config = laws.sections(mode, device="cuda", num_pages=400, graph=graph)
    config["transport"] = {"name": "mooncake", "kind": "tcp"}
    config["spec"] = spec
    with running(config) as cluster:
        for _ in range(2):
            assert laws.ids(cluster.client.generate(*laws.asked())) == cpu_ids
        laws.check_slots(cluster)
        if spec:
            assert value(cluster.workers["decode-0"].engine.metrics.spec_accepted) > 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("spec", [{}, {"drafter": "mtp", "widths": [4]}], ids=["plain", "mtp"])
def test_a_step_never_waits_for_the_device(spec: dict) -> None:
    """Prompts, width 1 and width 4, under torch's own detector of host syncs."""
    config = laws.sections("never", device="cuda", num_pages=400, graph="eager", strict=False)
    config["spec"] = spec
    with running(config, num_prefill=0) as cluster:
        cluster.client.generate(*laws.asked())  # warm: allocator, kernels
        fail_on_sync(cluster.workers["decode-0"].engine.runner)
        laws.ids(cluster.client.generate(*laws.asked()))
