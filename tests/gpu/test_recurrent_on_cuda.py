"""Recurrent layers on one GPU: their kernels as they are served, and engines against the CPU."""

from functools import cache
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.equivalence import test_hybrid_laws as laws
from tests.gpu.sync import check_no_wait
from tests.support.engines import Running, running, value
from tests.support.laws import ended
from tests.support.prompts import problem_ids
from tests.support.reference import sampling_of
from tests.unit import test_recurrent as rule
from worker.api import Sampling
from worker.attention.recurrent.delta_net import (
    DeltaState,
    DeltaWeights,
    delta_chunk,
    delta_chunk_ref,
    delta_window,
    delta_window_ref,
)
from worker.config.checkpoint.delta_shape import DeltaShape, block_table
from worker.forward.batch import StateChunks, StateWindows

pytestmark = pytest.mark.gpu(1)
SHAPES = [DeltaShape(2, 2, 128, 128), DeltaShape(1, 3, 128, 128), DeltaShape(3, 1, 128, 128)]
LARGE = DeltaShape(16, 2, 128, 128)
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative, of the whole tensor
poisoned = rule.poisoned  # in every test here
SPECS: list[dict] = [{}, {"drafter": "mtp", "widths": [4]}]
MARGIN = 0.04  # of logprobs in bfloat16: four times what 99.9 % keep


@pytest.mark.parametrize("dtype", rule.BOUND)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("prompt", [0, 3, 70])
def test_every_width_and_acceptance_has_the_bits_of_plain_decode(
    shape, prompt: int, dtype: torch.dtype
) -> None:
    with torch.device("cuda"):
        rule.test_every_width_and_acceptance_equals_the_recurrence(
            shape, prompt, rule.WIDTHS, dtype
        )


@pytest.mark.parametrize("dtype", rule.BOUND)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_neither_cut_nor_company_changes_a_bit_of_a_prompt(shape, dtype: torch.dtype) -> None:
    with torch.device("cuda"):
        rule.test_neither_cut_nor_company_changes_a_bit_of_a_prompt(shape, dtype)


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
        torch.tensor([0, 5, 0, 62, 1, 70, 9, 9, 9, 64]),
        torch.tensor([0, 7, 0, 65, 4, 74, 9, 9, 9, 64]),
        torch.tensor([0, 0, 0, 8, 0, 7, 0, 0, 0, 0]),
    )  # fmt: skip
    packed = torch.randn(6 * width, LARGE.packed_width, generator=generator).to(dtype)
    wanted = delta_window_ref(packed, ref_weights, ref_state, StateWindows(*columns, width, 64))
    rows = StateWindows(*(column.cuda() for column in columns), width, 64)  # type: ignore
    check_near(delta_window(packed.cuda(), weights, state, rows), wanted, dtype)
    for mine, its in zip(state, ref_state, strict=True):
        check_near(mine[1:], its[1:], dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_chunks_match_their_definition(dtype: torch.dtype) -> None:
    (weights, state), (ref_weights, ref_state) = both(dtype, 9)
    counts, before = [130, 2, 0, 64, 65, 300], [0, 64, 0, 64, 128, 0]
    start = torch.tensor([0, *counts]).cumsum(0).int()
    lengths = torch.tensor([a + b for a, b in zip(counts, before, strict=True)]).int()
    num = sum(counts) + 7
    packed = torch.randn(num, LARGE.packed_width, generator=torch.Generator().manual_seed(3))
    packed, slots = packed.to(dtype), torch.tensor([3, 1, 0, 2, 5, 6]).int()
    wanted, out = (torch.full((num, LARGE.value_width), float("nan")).to(dtype) for _ in range(2))
    blocks = torch.tensor(block_table(start.tolist(), num), dtype=torch.int32)
    snap_lens, snap_slots = torch.tensor([[128, 0, 0, 128, 192, 256], [4, 0, 0, 7, 8, 9]]).int()
    chunks = StateChunks(start, lengths, slots, snap_lens, snap_slots, blocks)
    delta_chunk_ref(packed, ref_weights, ref_state, chunks, wanted)
    out, on_cuda = out.cuda(), StateChunks(*(each.cuda() for each in chunks))
    delta_chunk(packed.cuda(), weights, state, on_cuda, out)
    check_near(out, wanted, dtype)
    for mine, its in zip(state[:2], ref_state[:2], strict=True):
        check_near(mine[1:], its[1:], dtype)


def sections(device: str, mode: str, dtype: str = "float32", **engine: object) -> dict[str, dict]:
    config = laws.sections(mode, device=device, **engine)
    if device == "cuda":
        config["transport"] = {"name": "mooncake", "kind": "tcp"}
        config["engine"]["num_pages"] = 400
    return config | {"model": {"path": "tiny-hybrid", "dtype": dtype}}


def prompts() -> list[tuple[int, ...]]:
    """Of one to four problems each, 40 to 250 tokens."""
    ids = problem_ids(19)
    return [sum(ids[i : i + 1 + i % 4], ()) for i in range(16)]


def ask(cluster: Running) -> list[list[int]]:
    return laws.ids(cluster.client.generate(prompts(), [sampling_of(i, 60) for i in range(16)]))


NAMES = "tiny-hybrid", "tiny-hybrid-moe"


def of(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return config | {"model": config["model"] | {"path": name}}


@cache
def cpu_ids(name: str) -> list[list[int]]:
    config = of(name, sections("cpu", "never", strict=False))
    with running(config, num_prefill=0) as cluster:
        return ask(cluster)


@pytest.mark.parametrize("graph", ["eager", "auto"])
@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("spec", SPECS, ids=["plain", "mtp"])
@pytest.mark.parametrize("name", NAMES)
def test_cuda_equals_cpu_in_float32(name: str, mode: str, graph: str, spec: dict) -> None:
    config = of(name, sections("cuda", mode, graph=graph))
    config["spec"] = spec
    with running(config) as cluster:
        for _ in range(2):
            assert ask(cluster) == cpu_ids(name)
        laws.check_slots(cluster)
        if spec:
            assert value(cluster.workers["decode-0"].engine.metrics.spec_accepted) > 0


def test_in_bfloat16_a_prompt_ends_where_decode_does() -> None:
    """Logprobs of a token that follows by the recurrence, and by chunks over the same text."""
    with running(sections("cuda", "never", "bfloat16"), num_prefill=0) as cluster:
        greedy = Sampling(64, temperature=0.0, ignore_eos=True, logprobs=5)
        decoded = ended(cluster.client.generate(prompts(), [greedy] * 16))
        gaps = []
        for at in range(1, 64, 3):
            texts = [(*p, *a.tokens[:at]) for p, a in zip(prompts(), decoded, strict=True)]
            one = replace(greedy, max_tokens=1)
            for a, b in zip(decoded, cluster.client.generate(texts, [one] * 16), strict=True):
                here, there = a.logprobs[at], b.logprobs[0]
                gaps.append(abs(dict(here.top)[b.tokens[0]] - there.logprob))
                assert here.logprob - dict(here.top)[b.tokens[0]] < MARGIN, "no near tie"
    gaps.sort()
    shown = ", ".join(f"{gaps[int(part * len(gaps))]:.2g}" for part in (0.5, 0.9, 0.99, 0.999))
    print(f"of {len(gaps)} gaps of logprobs 50, 90, 99, 99.9 %: {shown}, the most {gaps[-1]:.2g}")
    assert gaps[-1] < MARGIN


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("spec", SPECS, ids=["plain", "mtp"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_never_waits_for_the_device(name: str, spec: dict) -> None:
    """Prompts, width 1 and width 4, under torch's own detector of host syncs."""
    config = of(name, sections("cuda", "never", graph="eager", strict=False))
    config["spec"] = spec
    check_no_wait(config, ask)
