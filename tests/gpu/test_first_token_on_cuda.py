"""First tokens drawn by a prefill worker on CUDA leave graphs of chunks intact."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.chunks import build
from worker.api import Sampling
from worker.plan import Chunk, Plan, RowPages, RowStart, tail_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu(1)

PAGE_SIZE = 16
SAMPLINGS = [
    Sampling(9, temperature=0.0),
    Sampling(9, temperature=0.9, seed=4),
    Sampling(9, temperature=1.2, top_p=0.9, top_k=40, min_p=0.01, seed=(1 << 60) + 5),
    Sampling(9, temperature=0.0, stop_ids=tuple(range(40, 50)), min_tokens=3),
]


def plan_of(counts: Sequence[int], *, draws: bool) -> Plan:
    """A step that ends prompts of so many tokens; row i + 1 has pages of its own."""
    first, pages, chunks, starts = 1, [], [], []
    for row, count in enumerate(counts, 1):
        num = -(-count // PAGE_SIZE)
        pages.append(RowPages(row, 0, tuple(range(first, first + num))))
        tokens = tuple((7 * row + 11 * i) % 900 + 50 for i in range(count))
        chunks.append(Chunk(row, 0, tokens, draws))
        sampling = SAMPLINGS[row % len(SAMPLINGS)]
        starts += [RowStart(row, sampling, count + 1, count + sampling.min_tokens)] * draws
        first += num
    return Plan(
        1, starts=tuple(starts), pages=tuple(pages), chunks=tuple(chunks),
        tail=tail_of(start.sampling for start in starts), max_seq_len_ub=max(counts),
    )  # fmt: skip


def launched(engine: Any, plan: Plan, *, hooked: bool) -> tuple[list[int], str, list[Any]]:
    """The tokens, how the step was launched, and all KV after it."""
    caches = [c for i in range(engine.shape.num_layers) for c in engine.pool.layer(i)]
    for cache in caches:
        cache.zero_()
    step = engine.runner.launch(plan, engine.layer_groups(lambda: None) if hooked else None)
    assert step is not None
    drawn, _, path, _ = engine.runner.settle(step)
    assert all(len(each.tokens) == 1 and each.finished for each in drawn)
    assert not engine.runner.loaded.state.active.any(), "no row of a prefill worker stays active"
    return [each.tokens[0] for each in drawn], path, [cache[1:].clone() for cache in caches]


def check_tails(device: str, graph: str, counts: Sequence[int], *, hooked: bool) -> None:
    """A tail behind a chunk changes neither its launch nor a bit of its KV, and draws as eager."""
    long: dict[str, Any] = {"max_prefill_tokens": max(512, sum(counts))}
    engine = build(device, graph, role="prefill", **long)
    tokens, path, kv = launched(engine, plan_of(counts, draws=True), hooked=hooked)
    nothing, same_path, same_kv = launched(engine, plan_of(counts, draws=False), hooked=hooked)
    engine.close()
    assert (len(tokens), nothing, path) == (len(counts), [], same_path)
    assert all(torch.equal(a, b) for a, b in zip(kv, same_kv, strict=True))
    eager = build(device, "eager", role="prefill", **long)
    assert launched(eager, plan_of(counts, draws=True), hooked=hooked)[0] == tokens
    eager.close()


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(
    "counts",
    [
        [37],
        [16, 1, 90, 33],
        [40] * 9,
        [700, 500],  # a long step: hidden states of last tokens alone
        [1100, 20, 20, 20],
    ],
)
def test_a_tail_leaves_graphs_of_chunks_alone(counts: list[int], hooked: bool) -> None:
    check_tails("cuda", "piecewise", counts, hooked=hooked)
