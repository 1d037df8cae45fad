"""Full decode graphs: equal to eager, and without effect on anything that is not the batch's."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.support import chunks
from tests.support.chunks import NUM_PAGES, ROWS, STEPS, sampling_of, serve
from tests.support.engines import value
from tests.support.oracle import Oracle, Script
from tests.support.prompts import problem_ids
from worker.config import GraphConfig
from worker.plan import TAILS
from worker.run.build import build_graphs
from worker.run.full import buckets_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu(1)


def build(dtype: str, graph: str = "full", widths: Sequence[int] = (1,), **engine: Any) -> Any:
    return chunks.build("cuda", graph, dtype=dtype, widths=widths, strict=True, **engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bucket_equals_eager_bit_for_bit(dtype: str) -> None:
    widths = [1, 2, 3, 8, 16]
    engine = build(dtype, widths=widths)
    runner = engine.runner.graphs.decode
    shapes = {(each, width) for width in widths for each in buckets_of(runner.buckets, width)}
    assert {(check.bucket, check.width) for check in engine.checks} == shapes
    assert all(check.equal for check in engine.checks)
    assert {key[:2] for key in runner._captured} == shapes
    assert {tail for _, width, tail in runner._captured if width == 1} == set(TAILS)
    assert set(runner._tails) == {(*each, with_) for each in shapes for with_ in (False, True)}
    engine.close()


@pytest.mark.parametrize("widths", [(2,), (4,), (16,), (1, 2, 4, 8)])
def test_windows_through_graphs_change_no_token(widths: tuple[int, ...]) -> None:
    """Drafts of an oracle with errors; in float32, where no rounding decides a token."""
    prompts = problem_ids(ROWS)
    wanted = [msgspec.structs.replace(sampling_of(i), seed=100 + i) for i in range(ROWS)]
    engine = build("float32", "eager")
    texts, _ = serve(engine, prompts, wanted)
    engine.close()
    scripts = {}
    for i, (prompt, answer) in enumerate(zip(prompts, texts, strict=True)):
        text = [*prompt, *answer]
        wrong = {at: -1 for at in range(len(prompt) + i, len(text), 3 + i)}
        scripts[100 + i] = Script.of(text, wrong)
    engine = build("float32", "eager", widths=widths)
    Oracle(engine, scripts)
    engine.runner.graphs = build_graphs(
        replace(engine.runner.loaded, config=engine.config.engine.model_copy(
            update={"graph": GraphConfig(prefill="eager", decode="full")}
        ))
    )  # fmt: skip
    engine.runner.graphs.capture()
    before = STEPS[0]
    assert serve(engine, prompts, wanted, widths)[0] == texts
    assert STEPS[0] - before < 0.8 * max(map(len, texts)), "drafts were accepted"
    engine.close()


def test_penalties_masks_and_logprobs_through_graphs_equal_eager() -> None:
    """Batches of all mixtures, in float32; every step is a graph or a forward and a tail."""
    from tests.support.changed_asks import changed_asks, same_answers
    from tests.support.lockstep import DECODE, Lockstep

    found = []
    for graph in ("eager", "full"):
        engine = {"device": "cuda", "graph": {"prefill": "eager", "decode": graph}, "strict": True}
        sections: dict[str, Any] = {
            "model": {"dtype": "float32"},
            "engine": {**engine, "max_num_reqs": ROWS, "num_pages": NUM_PAGES, "penalty_rows": 6},
        }
        cluster = Lockstep(sections, num_prefill=0)
        found.append(cluster.serve(changed_asks(36)))
        steps = cluster.engines[DECODE].metrics.steps
        counts = {path: value(steps("decode", path)) for path in ("graph", "eager")}
        assert (counts["graph"] > 0, counts["eager"] > 0) == (graph == "full", graph == "eager")
        cluster.close()
    assert same_answers(*found)


def test_pages_of_others_and_the_batch_after_it_see_nothing() -> None:
    """Canary: only pages of the batch change, the sink aside; replays leave nothing behind."""
    engine = build("float32")
    prompts, wanted = problem_ids(ROWS), [sampling_of(i) for i in range(ROWS)]
    alone, _ = serve(engine, prompts[:3], wanted[:3])
    caches = [
        cache for layer in range(engine.shape.num_layers) for cache in engine.pool.layer(layer)
    ]
    for cache in caches:
        cache[1:].fill_(float("nan"))  # a stale slot that were read would show
    before = [cache.clone() for cache in caches]
    all_of_them, owned = serve(engine, prompts, wanted)
    others = torch.tensor([p for p in range(1, NUM_PAGES) if p not in owned], device="cuda")
    assert len(others) > 10
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[others].view(torch.int32), old[others].view(torch.int32))
    assert all_of_them[:3] == alone, "the same texts among others, after another batch"
    assert serve(engine, prompts[:3], wanted[:3])[0] == alone
    state = engine.runner.loaded.state
    assert not state.active.any()
    assert int(state.ints.seq_len[0]) == int(state.ints.last_token[0]) == 0, "row 0 is nobody's"
    engine.close()
