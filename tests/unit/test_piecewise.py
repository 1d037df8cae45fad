"""Piecewise graphs on the CPU, where segments are recorded ops: tests/support/recorded.py.

tests/gpu/test_piecewise_on_cuda.py has the same laws for real graphs.
"""

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.chunks import (
    Bench,
    Uncaptured,
    bench_of,
    bits,
    build,
    check_laws,
    check_layers,
    check_padding,
    clear,
    fill,
    layouts,
)
from tests.support.pairwise import in_whole
from tests.support.recorded import RecordedMemory, noted_by
from worker.config import Machine, WorkerConfig
from worker.errors import Unsupported
from worker.forward.batch import Batch
from worker.forward.context import Breaks, current, forward_context
from worker.run.base import Forward, PaddedShape
from worker.run.piecewise import CUT_AFTER, Bucket, PiecewiseChunks, choose_shape, chunk_buckets
from worker.run.segments import Capture

MAX_TOKENS = 40
NUM_PAGES = 48
SHORT_KEYS = 64  # longer requests have unbroken graphs of their own


def captured() -> Bench:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.step.buffers.SHORT_KEYS", SHORT_KEYS)
        engine = build(
            "cpu", "eager", max_prefill_tokens=MAX_TOKENS, num_pages=NUM_PAGES, strict=True
        )
    runner = PiecewiseChunks(engine.runner.loaded, RecordedMemory())
    assert [check.equal for check in runner.capture()] == [True] * 3 * len(runner.buckets)
    return bench_of(engine, runner)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    made = captured()
    yield made
    made.engine.close()


def test_a_capture_has_a_segment_more_than_breaks(bench: Bench) -> None:
    num_layers, runner = bench.engine.shape.num_layers, bench.runner
    kinds = 0, *runner.loaded.buffers.fixed_lens
    assert set(runner.captured) == set(itertools.product((16, 32, MAX_TOKENS), kinds))
    cuts = sum(cut <= num_layers for cut in CUT_AFTER)
    for (_, fixed_len), captured in runner.captured.items():
        assert captured.num_segments == 1 + (cuts if fixed_len else num_layers)


def test_kernels_are_compiled_for_every_chunk_that_is_captured(bench: Bench, monkeypatch) -> None:
    graphs, ran = PiecewiseChunks(bench.engine.runner.loaded, RecordedMemory()), set()
    forward = graphs.forward

    def noted(batch: Batch) -> Tensor:
        ran.add((batch.num_tokens, batch.bounds.max_seq_len * (batch.host is None)))
        return forward(batch)

    monkeypatch.setattr(graphs, "forward", noted)
    ahead = noted_by(ran, graphs.run_buckets)
    assert not graphs.captured
    captures = [partial(graphs.capture_bucket, bucket) for bucket in graphs.buckets]
    assert noted_by(ran, *captures) == ahead == set(bench.runner.captured)


@torch.inference_mode()
def test_a_break_runs_with_the_context_of_the_replay_and_no_break_is_one_segment() -> None:
    x, seen = torch.zeros(4), []

    def body(read: Tensor, write: Tensor) -> None:
        plan = current().attn_plan
        seen.append(plan)
        write.copy_(read + plan)

    def forward(breaks: Breaks | None) -> Tensor:
        y = x * 2
        out = torch.empty_like(y)
        if breaks is None:
            return y
        return breaks.at(body, y, out) + 1

    capture = Capture(RecordedMemory())
    found = capture.record(forward)
    assert capture.num_segments == 2
    assert not seen, "a capture runs no break: it would read what no kernel has written"
    for value in (3.0, 5.0):
        x.fill_(value)
        with forward_context(None, None, 10 * value):  # type: ignore[arg-type]
            capture.replay()
        assert found.tolist() == [2 * value + 10 * value + 1] * 4
    assert seen == [30.0, 50.0]

    whole = Capture(RecordedMemory())
    doubled = whole.record(lambda _: x * 2)
    x.fill_(7.0)
    whole.replay()
    assert whole.num_segments == 1
    assert doubled.tolist() == [14.0] * 4


@pytest.mark.parametrize(
    ("num_reqs", "fixed", "prefix"),
    [
        *((1, 0, 0), (3, 0, 21), (12, 0, 0), (1, 1, 21), (4, 1, 0), (1, 2, 99), (4, 2, 70)),
        *in_whole((1, 0, 21), (3, 0, 0), (12, 0, 21), (1, 1, 0), (4, 1, 21), (1, 2, 0)),
    ],
)
def test_replays_equal_eager_at_the_same_padded_shape(bench, num_reqs, prefix, fixed) -> None:
    check_laws(bench, [16, MAX_TOKENS], num_reqs, prefix, fixed=fixed)


def test_layers_are_told_once_and_in_order(bench: Bench) -> None:
    check_layers(bench, bench.eager)


def test_a_hook_finds_its_layer_s_kv_complete(bench: Bench) -> None:
    """What later layers write is missing, what this one wrote is there."""
    layout = layouts(30, 3, 5)
    fill(bench)
    with torch.inference_mode():
        bench.eager.launch(bench.batch(layout, 32))
    final = [bits(cache).clone() for cache in bench.caches()]
    fill(bench)
    found: list[list[bool]] = []

    def on_layer(layer_id: int) -> None:
        same = [torch.equal(bits(a), b) for a, b in zip(bench.caches(), final, strict=True)]
        found.append([all(same[2 * i : 2 * i + 2]) for i in range(len(same) // 2)])

    with torch.inference_mode():
        bench.runner.launch(bench.batch(layout, 32), on_layer)
    num_layers = bench.engine.shape.num_layers
    assert found == [[j <= i for j in range(num_layers)] for i in range(num_layers)]


@pytest.mark.parametrize("fixed", [0, 1, 2])
def test_what_padding_reads_and_leaves_changes_nothing(bench: Bench, fixed: int) -> None:
    check_padding(bench, layouts(19, 2, 0), 32, fixed=fixed)


def test_who_gets_pieces_and_who_one_graph(bench: Bench) -> None:
    runner = bench.runner
    short, far = runner.loaded.buffers.fixed_lens
    assert runner.padded(20, 4, short, hooked=False) == PaddedShape(32, short)
    assert runner.padded(20, 4, short + 1, hooked=False) == PaddedShape(32, far)
    assert runner.padded(20, 5, 20, hooked=False) == PaddedShape(32)
    assert runner.padded(20, 1, 20, hooked=True) == PaddedShape(32)
    assert runner.padded(MAX_TOKENS + 1, 1, 9999, hooked=False) == PaddedShape(refused="too_long")


@torch.inference_mode()
def test_the_start_up_check_leaves_an_engine_as_it_was(bench: Bench) -> None:
    runner, table = bench.runner, bench.engine.runner.loaded.state.page_table
    clear(bench)
    kept = dict(runner.captured)
    assert [check.equal for check in runner.check(Bucket(16))] == [True] * 3
    runner.captured = kept
    assert not any(bool(cache.any()) for cache in bench.caches())
    assert not table.any()


@torch.inference_mode()
def test_a_bucket_that_differs_is_an_error_when_strict(bench: Bench, monkeypatch) -> None:
    runner = bench.runner
    launch = runner.launch
    monkeypatch.setattr(
        runner, "launch", lambda batch: Forward(launch(batch).hidden + 1e-6, "piecewise")
    )
    with pytest.raises(AssertionError, match="16 tokens, piecewise differs from eager"):
        runner.check(Bucket(16))


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Steps of 16 tokens are long ones, of up to 4 requests."""
    patch.setattr("worker.step.buffers.LONG_STEP_TOKENS", 16)
    patch.setattr("worker.step.buffers.MAX_LAST_TOKEN_ROWS", 4)


@pytest.fixture(scope="module")
def built_long() -> Iterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        made = captured()
    yield made
    made.engine.close()


@pytest.fixture
def long(built_long: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    shorten(monkeypatch)
    return built_long


@torch.inference_mode()
@pytest.mark.parametrize("num_reqs", [1, 2, 4])
def test_long_steps_have_the_last_hidden_state_of_each_request(long: Bench, num_reqs: int) -> None:
    layout, loaded = layouts(27, num_reqs, 21), long.engine.runner.loaded
    whole = long.run(Uncaptured(loaded, loaded.model.forward, every_row=True).launch, layout, 32)
    few = long.run(long.eager.launch, layout, 32)
    for cache, same in zip(whole[1:], few[1:], strict=True):
        assert torch.equal(cache, same), "KV"
    last = [sum(count for _, count in layout[: i + 1]) - 1 for i in range(num_reqs)]
    assert (len(whole[0]), len(few[0])) == (27, 4)
    torch.testing.assert_close(few[0][:num_reqs], whole[0][last], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [27, 32, MAX_TOKENS])  # some as many as a bucket has rows
def test_a_long_step_of_many_requests_is_eager_and_whole(long: Bench, num_tokens: int) -> None:
    layout, runner = layouts(num_tokens, 5, 0), long.runner
    assert runner.padded(num_tokens, 4, 9999, hooked=True).num_tokens >= num_tokens
    wanted = long.run(long.eager.launch, layout, 0)
    assert len(wanted[0]) == num_tokens
    assert runner.padded(num_tokens, 5, 9999, hooked=True) == PaddedShape(refused="many")
    assert torch.equal(long.run(runner.launch, layout, 0)[0], wanted[0])
    assert long.path == "eager"


@pytest.mark.parametrize("max_tokens", [1, 16, 23, 512, 1024, 8192, 100_000])
def test_buckets_ascend_to_what_a_chunk_may_hold(max_tokens: int) -> None:
    sizes = chunk_buckets(max_tokens)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max_tokens, 4096)
    assert len(sizes) <= 20
    for below, above in itertools.pairwise(sizes[:-1]):
        assert above <= 2 * below


UNMEASURED = [Bucket(16), Bucket(128), Bucket(512)]
# Compute-bound: eager of 100 tokens lies between those of 64 and of 128.
MEASURED = [Bucket(64, 10.0, 5.0), Bucket(128, 20.0, 18.0), Bucket(256, 60.0, 30.0)]


@pytest.mark.parametrize(
    ("num_tokens", "buckets", "rows", "why"),
    [
        (1, UNMEASURED, 16, ""),
        (16, UNMEASURED, 16, ""),
        (17, UNMEASURED, 0, "padding"),  # more than twice, and not for free
        (64, UNMEASURED, 128, ""),
        (513, UNMEASURED, 0, "too_long"),
        (300, [Bucket(16), Bucket(512, piecewise=False)], 0, "dropped"),
        (20, [Bucket(16), Bucket(48)], 48, ""),  # few rows cost what one costs
        (128, MEASURED, 128, ""),
        (120, MEASURED, 128, ""),  # 18.75 ms
        (110, MEASURED, 0, "padding"),  # 17.2 ms
        (129, MEASURED, 0, "padding"),  # 20.3 ms against 30
        (200, MEASURED, 256, ""),
        (128, [Bucket(64, 10.0, 9.0), Bucket(128, 20.0, 20.2)], 128, ""),  # hardly slower
        (128, [Bucket(64, 10.0, 9.0), Bucket(128, 20.0, 20.6)], 0, "padding"),
    ],
)
def test_admission_says_why(num_tokens: int, buckets: list[Bucket], rows: int, why: str) -> None:
    assert choose_shape(num_tokens, buckets) == PaddedShape(rows, refused=why)


CPU, CUDA = (Machine(kind, 2) for kind in ("cpu", "cuda"))


def graphs(role: str, machine: Machine, **engine: object) -> tuple[str, str]:
    tree = WorkerConfig.model_validate({"role": role, "engine": engine})
    graph = tree.resolved(machine, model_max_len=2048, model_dtype="bfloat16").engine.graph
    return graph.prefill, graph.decode


def test_each_role_gets_the_graphs_it_can_use() -> None:
    assert graphs("prefill", CUDA) == ("piecewise", "eager")
    assert graphs("prefill", CPU) == graphs("decode", CPU) == ("eager", "eager")
    for asked, wanted in (
        ("auto", ("piecewise", "full")),
        ("full", ("eager", "full")),
        ("piecewise", ("piecewise", "eager")),
        ("eager", ("eager", "eager")),
        ("compiled", ("compiled", "eager")),
        ({"prefill": "compiled"}, ("compiled", "full")),
        ({"prefill": "eager"}, ("eager", "full")),
    ):
        assert graphs("decode", CUDA, graph=asked) == wanted
    with pytest.raises(ValueError, match=r"engine\.graph\.prefill"):
        graphs("decode", CUDA, graph="compile")
    with pytest.raises(ValueError, match=r"engine\.graph\.decode"):
        graphs("decode", CUDA, graph={"decode": "piecewise"})


@pytest.mark.parametrize("graph", ["piecewise", "compiled"])
def test_graphs_by_name_are_refused_on_the_cpu(graph: str) -> None:
    with pytest.raises(Unsupported, match=rf"{graph} needs CUDA.*engine\.graph=eager"):
        build("cpu", graph)
