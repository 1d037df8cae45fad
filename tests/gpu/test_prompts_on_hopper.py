"""Long chunks by the kernel in Gluon; test_attention_on_cuda.py has what holds of any kernel."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.gpu import test_attention_on_cuda as plain
from worker.attention.prompt_triton import PromptPlan
from worker.config.checkpoint.mask import KeyMask
from worker.forward.batch import Batch
from worker.forward.context import forward_context

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not HOPPER, reason="needs Hopper")]

# Heads and rows of padding; other numbers of heads are other kernels, 2 s to compile.
SHAPES = [((8, 2), 40), ((14, 2), 0), ((4, 4), 1)]
SINKS: list[dict[str, Any]] = [{}, {"sinks": True}]
WINDOWS: list[dict[str, Any]] = [
    {"mask": KeyMask(window=1000)},
    {"mask": KeyMask(window=50), "sinks": True},
]
NAMES = "plain", "sinks", "window", "window, sinks"


def chosen(case: plain.Case, **options: Any) -> Any:
    """The backend, whose prompts are Gluon's."""
    from worker.attention.prompt_gluon import KERNEL

    attention = plain.backend("triton", case, **options)
    assert attention.prompt_kernel is KERNEL
    plan = attention.plan(case.batch)
    assert isinstance(plan, PromptPlan)
    assert plan.kernel is KERNEL
    return attention


def test_what_it_lacks_stays_with_triton_s() -> None:
    assert plain.backend("triton", plain.make([(0, 1300)]), cap=20.0).prompt_kernel is None


@pytest.mark.parametrize("options", SINKS + WINDOWS, ids=NAMES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_matches_the_reference(dtype: str, head_dim: int, options: dict[str, Any]) -> None:
    for shapes in plain.LONG:
        for heads, padded_rows in SHAPES[: 3 if dtype == "bfloat16" and not options else 1]:
            case = plain.make(shapes, heads, head_dim, 64, 4, dtype, padded_rows=padded_rows)
            chosen(case, **options)
            plain.check(case, **options)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_no_key_and_very_many(head_dim: int) -> None:
    """Requests whose keys are gone leave zeros; tiles are many times the multiprocessors."""
    case = plain.make([(30000, 1500), (0, 900), (0, 1)], (32, 8), head_dim, 64)
    attention = chosen(case)
    whole = plain.attend(attention, case)
    assert torch.equal(plain.attend(attention, case), whole)
    plain.check(case)
    gone = case.batch.seq_lens.clone()
    gone[1] = 0
    batch = replace(case.batch, seq_lens=gone)
    with forward_context(batch, attention, attention.plan(batch)):
        out = attention.forward(case.q, plain.LAYER)
    assert torch.equal(out[:1500], whole[:1500])
    assert torch.equal(out[2400:], whole[2400:])
    assert not out[1500:2400].any()


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_the_queries_may_be_part_of_longer_rows(head_dim: int) -> None:
    case = plain.make(plain.LONG[1], (8, 2), head_dim, 64, 4)
    attention = chosen(case)
    whole = plain.attend(attention, case)
    rows = torch.full((case.batch.num_tokens, 14, head_dim), float("nan"), device="cuda")
    rows = rows.to(case.q.dtype)
    rows[:, 2:10] = case.q
    case.q = rows[:, 2:10]
    assert torch.equal(plain.attend(attention, case), whole)


@pytest.mark.parametrize("options", SINKS + WINDOWS, ids=NAMES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_neither_cuts_nor_neighbours_change_a_bit(head_dim: int, options: dict[str, Any]) -> None:
    case = plain.make([(0, 5200), (100, 1100)], (32, 8), head_dim, 64, padded_reqs=0, padded_rows=0)
    attention = chosen(case, **options)
    whole = plain.attend(attention, case)
    for first, end in pairwise((0, 1025, 2304, 3391, 5200)):
        batch = alone(case.batch, first, end)
        with forward_context(batch, attention, attention.plan(batch)):
            part = attention.forward(case.q[first:end], plain.LAYER)
        assert torch.equal(part, whole[first:end])


def alone(batch: Batch, first: int, end: int) -> Batch:
    """These rows of the first request."""
    starts, lens = (torch.tensor(x, dtype=torch.int32).cuda() for x in ([0, end - first], [end]))
    width = end - first
    return replace(
        batch, query_start=starts, seq_lens=lens, page_table=batch.page_table[:1], num_reqs=1,
        num_tokens=width, max_query_len=width,
    )  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_a_graph_replays_it_with_other_lengths(head_dim: int) -> None:
    case = plain.make([(700, 1100), (300, 500)], (32, 8), head_dim, 64, padded_reqs=0)
    attention, live = chosen(case), case.batch
    wanted = plain.attend(attention, case)
    buffer = replace(live, seq_lens=live.seq_lens.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plain.attend(attention, case, buffer)
    graph.replay()
    assert torch.equal(out, wanted)
    for fewer in (200, 650):
        buffer.seq_lens.copy_(live.seq_lens)
        buffer.seq_lens[0] -= fewer
        graph.replay()
        eager = plain.attend(attention, case, replace(live, seq_lens=buffer.seq_lens.clone()))
        assert torch.equal(out, eager)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_many_runs_have_the_same_bits(head_dim: int) -> None:
    case = plain.make([(0, 4096), (3000, 1500)], (32, 8), head_dim, 64)
    attention = chosen(case)
    first = plain.attend(attention, case)
    assert all(torch.equal(plain.attend(attention, case), first) for _ in range(50))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_it_is_as_near_as_triton_s(head_dim: int) -> None:
    case = plain.make([(0, 3000)], (8, 2), head_dim, 64)
    wanted = plain.oracle(case)
    errors = []
    for kernel in (chosen(case).prompt_kernel, None):
        attention = plain.backend("triton", case)
        attention.prompt_kernel = kernel
        errors.append(
            float((plain.attend(attention, case).float() - wanted).square().mean().sqrt())
        )
    assert errors[0] < 1.02 * errors[1]
