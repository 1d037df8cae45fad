"""Chunks as torch.compile traced them, captured as real graphs; see tests/unit/test_compiled.py.

Plain pieces are equal to eager bit for bit. Inductor's are equal to themselves launched without a
graph, and near to eager.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu.test_graphs_on_cuda import sampling_of, serve
from tests.support.prompts import problem_ids

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings(
    r"ignore:::torch\.", "ignore:TensorFloat32", "ignore:.*lru_cache"
)  # of Dynamo and Inductor

MAX_TOKENS = 600
BUCKETS = (16, 64, 256, MAX_TOKENS)
SETUPS = (
    ("float32", "plain"), ("bfloat16", "plain"),
    ("float32", "compiled"), ("bfloat16", "compiled"),
)  # fmt: skip


@pytest.fixture(scope="module", params=SETUPS, ids="-".join)
def bench(request: pytest.FixtureRequest) -> Iterator[Any]:
    from tests.support.chunks import Uncaptured, bench_of, build
    from worker.run.compiled import TracedForward
    from worker.run.piecewise import PiecewiseChunks
    from worker.run.segments import GraphMemory

    dtype, how = request.param
    graph = "compiled" if how == "compiled" else "eager"
    engine = build("cuda", graph, dtype=dtype, strict=True, max_prefill_tokens=MAX_TOKENS)
    loaded, checks = engine.runner.loaded, engine.checks
    runner: Any = engine.runner.graphs.chunks
    if how == "plain":
        traced = TracedForward(loaded.model, lambda piece, _: piece)
        runner = PiecewiseChunks(loaded, GraphMemory(loaded.state.device), traced)
        checks = runner.capture()
    made = bench_of(engine, runner)
    made.use(runner)
    made.checks = checks
    if how == "compiled":
        made.eager = Uncaptured(loaded, runner._traced)
    yield made
    engine.close()


@pytest.mark.gpu(1)
def test_every_bucket_was_compared_at_the_start(bench: Any) -> None:
    assert bench.checks
    assert all(check.equal for check in bench.checks)
    segments = {each.capture.num_segments for each in bench.runner.piecewise.values()}
    assert segments == {bench.engine.spec.num_layers + 1}


@pytest.mark.gpu(1)
@pytest.mark.parametrize(("num_reqs", "fixed_shape"), [(1, False), (12, False), (4, True)])
@pytest.mark.parametrize("prefix", [0, 37])
def test_replays_equal_what_was_piecewise_at_the_same_padded_shape(
    bench: Any, num_reqs: int, prefix: int, fixed_shape: bool
) -> None:
    """Hidden states and KV, bit for bit; a second replay; canary pages."""
    from tests.support.chunks import check_laws

    check_laws(bench, BUCKETS, num_reqs, prefix, fixed_shape=fixed_shape)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("num_tokens", [2, 33, 64, 65, 500])
def test_hidden_states_are_near_to_eager_s_and_nothing_is_compiled_anew(
    bench: Any, num_tokens: int
) -> None:
    import copy

    from torch._dynamo.utils import counters

    from tests.support.chunks import Uncaptured, layouts
    from worker.run.eager import EagerChunks

    loaded, layout = bench.engine.runner.loaded, layouts(num_tokens, 2, 5)
    before = copy.deepcopy([counters[kind] for kind in ("stats", "aot_autograd")])
    wanted = bench.run(EagerChunks(loaded).launch, layout, num_tokens)[0].float()
    found = bench.run(Uncaptured(loaded, bench.runner._traced).launch, layout, num_tokens)[0]
    assert [counters[kind] for kind in ("stats", "aot_autograd")] == before
    error = (found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() <= bench.runner.rounding


@pytest.mark.gpu(1)
@pytest.mark.parametrize("fixed_shape", [False, True])
def test_what_padding_reads_and_leaves_changes_nothing(bench: Any, fixed_shape: bool) -> None:
    from tests.support.chunks import check_padding, layouts

    check_padding(bench, layouts(50, 3, 20), 64, fixed_shape=fixed_shape)


@pytest.mark.gpu(1)
def test_what_others_allocate_changes_nothing(bench: Any) -> None:
    from tests.support.chunks import check_memory, layouts

    check_memory(bench, layouts(250, 3, 20), 256)


@pytest.mark.gpu(1)
def test_layers_are_told_once_and_in_order(bench: Any) -> None:
    from tests.support.chunks import fill, layouts

    told: list[int] = []
    fill(bench)
    with torch.inference_mode():
        bench.runner.launch(bench.batch(layouts(500, 3, 20), 512), told.append)
    assert told == list(range(bench.engine.spec.num_layers))


@pytest.mark.gpu(1)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_replay_never_waits_for_the_device(bench: Any) -> None:
    from tests.support.chunks import check_no_wait, layouts

    check_no_wait(bench, layouts(100, 3, 20))


@pytest.mark.gpu(1)
def test_texts_are_those_of_eager_in_float32(bench: Any) -> None:
    from worker.run.eager import EagerChunks

    runner = bench.engine.runner
    if bench.runner.embedded.dtype != torch.float32:
        pytest.skip("16-bit texts diverge by rounding, with any padding")
    with torch.inference_mode():
        runner.loaded.state.page_table.zero_()
    prompts, wanted = problem_ids(4), [sampling_of(i) for i in range(4)]
    texts = []
    for chunks in (EagerChunks(runner.loaded), bench.runner):
        bench.use(chunks)
        texts.append(serve(bench.engine, prompts, wanted)[0])
    bench.use(bench.runner)
    assert texts[0] == texts[1]
    assert all(texts[0])
