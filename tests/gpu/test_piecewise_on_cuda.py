"""Chunks as piecewise CUDA graphs: equal to eager at the same padded shape, whatever the batch is.

The laws are those of tests/unit/test_piecewise.py, here with real graphs and their memory pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.support.prompts import problem_ids

torch = pytest.importorskip("torch")

MAX_TOKENS = 600
BUCKETS = (16, 48, 64, 256, 512, MAX_TOKENS)
SETUPS = ("float32-triton", "bfloat16-triton", "bfloat16-flashinfer", "bfloat16-triton-long")


@pytest.fixture(scope="module", params=SETUPS)
def bench(request: pytest.FixtureRequest) -> Iterator[Any]:
    from tests.support.chunks import bench_of, build

    dtype, attention, *long = request.param.split("-")
    if attention == "flashinfer" and find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    with pytest.MonkeyPatch.context() as patch:
        if long:
            patch.setattr("worker.step.buffers.LONG_STEP_TOKENS", 64)
            patch.setattr("worker.step.buffers.MAX_LAST_TOKEN_ROWS", 4)
        engine = build(
            "cuda", "piecewise", dtype=dtype, strict=True, max_prefill_tokens=MAX_TOKENS,
            attention={"prefill": attention, "decode": "triton", "spec": "triton"},
        )  # fmt: skip
        runner: Any = engine.runner.graphs.chunks
        yield bench_of(engine, runner)
        engine.close()


@pytest.mark.gpu(1)
def test_every_bucket_was_compared_at_the_start(bench: Any) -> None:
    checks = [check for check in bench.engine.checks if check.kind != "decode"]
    for kind in ("prefill", "prefill_full"):
        compared = [check.bucket for check in checks if check.kind == kind]
        assert compared == [each.num_tokens for each in bench.runner.buckets] or not compared
    assert checks
    assert all(check.equal for check in checks)
    segments = {each.capture.num_segments for each in bench.runner.piecewise.values()}
    assert segments == {bench.engine.spec.num_layers + 1}
    assert {each.capture.num_segments for each in bench.runner.full.values()} <= {2, 3}


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("num_reqs", "fixed_shape"), [(1, False), (3, False), (12, False), (1, True), (4, True)]
)
@pytest.mark.parametrize("prefix", [0, 37])
def test_replays_equal_eager_at_the_same_padded_shape(
    bench: Any, num_reqs: int, prefix: int, fixed_shape: bool
) -> None:
    """Hidden states and KV, bit for bit; a second replay; canary pages."""
    from tests.support.chunks import check_laws

    if fixed_shape and not bench.runner.full:
        pytest.skip("this backend plans on the host")
    if bench.engine.runner.loaded.buffers.max_reqs(64) < num_reqs:
        pytest.skip("long steps of so many requests are eager")
    check_laws(bench, BUCKETS, num_reqs, prefix, fixed_shape=fixed_shape)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("fixed_shape", [False, True])
def test_what_padding_reads_and_leaves_changes_nothing(bench: Any, fixed_shape: bool) -> None:
    from tests.support.chunks import check_padding, layouts

    if fixed_shape and not bench.runner.full:
        pytest.skip("this backend plans on the host")
    check_padding(bench, layouts(50, 3, 20), 64, fixed_shape=fixed_shape)


@pytest.mark.gpu(1)
def test_what_others_allocate_changes_nothing(bench: Any) -> None:
    from tests.support.chunks import check_memory, layouts

    check_memory(bench, layouts(250, 3, 20), 256)


@pytest.mark.gpu(1)
def test_layers_are_told_once_in_order_and_their_kv_is_final(bench: Any) -> None:
    """An event of the hook is passed when that layer's KV is; later layers are under way."""
    from tests.support.chunks import bits, fill, layouts

    layout, layers = layouts(500, 3, 20), range(bench.engine.spec.num_layers)
    final = bench.run(bench.eager.launch, layout, 512)[1:]
    for launch in (bench.eager.launch, bench.runner.launch):
        told: list[int] = []
        copies: list[Any] = []
        other = torch.cuda.Stream()

        def on_layer(layer_id: int, told: Any = told, copies: Any = copies, on: Any = other) -> Any:
            told.append(layer_id)
            event = torch.cuda.Event()
            event.record()
            on.wait_event(event)
            with torch.cuda.stream(on):
                copies += [bits(each).clone() for each in bench.caches()[2 * layer_id :][:2]]

        fill(bench)
        torch.cuda.synchronize()
        with torch.inference_mode():
            launch(bench.batch(layout, 512), on_layer)
        torch.cuda.synchronize()
        assert told == list(layers)
        for copy, wanted in zip(copies, final, strict=True):
            assert torch.equal(copy, wanted)


@pytest.mark.gpu(1)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_replay_never_waits_for_the_device(bench: Any) -> None:
    from tests.support.chunks import check_no_wait, layouts

    check_no_wait(bench, layouts(100, 3, 20))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_auto_replays_chunks_on_either_worker(role: str) -> None:
    from tests.support.chunks import build
    from worker.plan import Chunk, Plan, RowPages

    engine = build("cuda", "auto", role=role, dtype="bfloat16", strict=True)
    decode = "eager" if role == "prefill" else "full"
    assert engine.config.engine.graph.model_dump() == {"prefill": "piecewise", "decode": decode}
    tokens = problem_ids(1)[0]
    plan = Plan(
        1,
        pages=(RowPages(1, 0, tuple(range(1, -(-len(tokens) // 16) + 1))),),
        chunks=(Chunk(1, 0, tokens),),
        max_seq_len_ub=len(tokens),
    )
    step = engine.runner.launch(plan)
    assert step is not None
    engine.runner.settle(step)
    labels = {"model": "tiny", "role": role, "worker": f"{role}-0"}
    replayed = [
        engine.metrics.registry.get_sample_value(
            "kvlane_engine_steps_total", labels | {"kind": "prefill", "path": path}
        )
        for path in ("graph", "piecewise")  # whichever won at the start
    ]
    engine.close()
    assert sorted(replayed, key=bool) == [None, 1]
