"""Chunks as CUDA graphs, in pieces and traced by torch.compile: equal to eager at the same shape.

The laws are those of tests/unit/test_piecewise.py and test_compiled.py, here with real graphs and
their memory pool. Plain traced pieces are equal to eager bit for bit, Inductor's to themselves
launched without a graph.
"""

import copy
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.support import chunks
from tests.support.chunks import Bench, Uncaptured
from worker.run.compiled import TracedForward
from worker.run.eager import EagerChunks
from worker.run.piecewise import MAX_FAR, PiecewiseChunks
from worker.run.segments import GraphMemory

torch = pytest.importorskip("torch")
OF_DYNAMO = r"ignore:::torch\.", "ignore:TensorFloat32", "ignore:.*lru_cache"
pytestmark = [pytest.mark.gpu(1), pytest.mark.filterwarnings(*OF_DYNAMO)]

MAX_TOKENS = 600
SHORT_KEYS = 640
BUCKETS = (16, 48, 64, 256, 512, MAX_TOKENS)
SETUPS = (
    "float32-triton", "bfloat16-triton", "bfloat16-flashinfer", "bfloat16-triton-long",
    "float32-plain", "bfloat16-plain", "float32-compiled", "bfloat16-compiled",
)  # fmt: skip


def pieces_of(dtype: str, attention: str) -> Bench:
    """Of the model's own forward."""
    engine = chunks.build(
        "cuda", "piecewise", dtype=dtype, strict=True, max_prefill_tokens=MAX_TOKENS,
        attention={"prefill": attention, "decode": "triton", "spec": "triton"},
    )  # fmt: skip
    runner: Any = engine.runner.graphs.chunks
    made = chunks.bench_of(engine, runner)
    made.checks = engine.checks
    return made


def traced_pieces(dtype: str, how: str) -> Bench:
    """Of the traced forward: plain, or as Inductor compiled it."""
    graph = "compiled" if how == "compiled" else "eager"
    engine = chunks.build("cuda", graph, dtype=dtype, strict=True, max_prefill_tokens=MAX_TOKENS)
    loaded, checks = engine.runner.loaded, engine.checks
    runner: Any = engine.runner.graphs.chunks
    if how == "plain":
        traced = TracedForward(loaded.model, lambda piece, _: piece)
        runner = PiecewiseChunks(loaded, GraphMemory(loaded.state.device), traced)
        checks = runner.capture()
    made = chunks.bench_of(engine, runner)
    made.use(runner)
    made.checks = checks
    if how == "compiled":
        made.eager = Uncaptured(loaded, runner.traced)
    return made


@pytest.fixture(scope="module", params=SETUPS)
def bench(request: pytest.FixtureRequest) -> Iterator[Any]:
    dtype, kind, *long = request.param.split("-")
    if kind == "flashinfer" and find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.step.buffers.SHORT_KEYS", SHORT_KEYS)
        if long:
            patch.setattr("worker.step.buffers.LONG_STEP_TOKENS", 64)
            patch.setattr("worker.step.buffers.MAX_LAST_TOKEN_ROWS", 4)
        make = traced_pieces if kind in ("plain", "compiled") else pieces_of
        made = make(dtype, kind)
        yield made
        made.engine.close()


def skip_unless_captured(bench: Bench, fixed: int) -> None:
    if (16, (0, *bench.runner.loaded.buffers.fixed_lens)[fixed]) not in bench.runner.captured:
        pytest.skip("this backend plans on the host")


def test_every_bucket_was_compared_at_the_start(bench: Any) -> None:
    checks = [check for check in bench.checks if check.kind != "decode"]
    for kind in {check.fixed_len for check in checks}:
        most = MAX_FAR if kind > SHORT_KEYS else MAX_TOKENS
        sizes = [each.num_tokens for each in bench.runner.buckets if each.num_tokens <= most]
        assert [check.bucket for check in checks if check.fixed_len == kind] == sizes
    assert checks
    assert all(check.equal for check in checks)
    for (_, fixed_len), captured in bench.runner.captured.items():
        wanted = {2, 3} if fixed_len else {bench.engine.shape.num_layers + 1}
        assert captured.num_segments in wanted


@pytest.mark.parametrize(
    ("num_reqs", "fixed"), [(1, 0), (3, 0), (12, 0), (1, 1), (4, 1), (1, 2), (4, 2)]
)
@pytest.mark.parametrize("prefix", [0, 37, 150])
def test_replays_equal_eager_at_the_same_padded_shape(bench, num_reqs, prefix, fixed) -> None:
    """Hidden states and KV, bit for bit; a second replay; canary pages."""
    skip_unless_captured(bench, fixed)
    if fixed == 1 and prefix > SHORT_KEYS - max(BUCKETS):
        pytest.skip("too long for this graph")
    if bench.engine.runner.loaded.buffers.max_reqs(64) < num_reqs:
        pytest.skip("long steps of so many requests are eager")
    buckets = [size for size in BUCKETS if fixed < 2 or size <= MAX_FAR]
    chunks.check_laws(bench, buckets, num_reqs, prefix, fixed=fixed)


@pytest.mark.parametrize("fixed", [0, 1, 2])
def test_what_padding_reads_and_leaves_changes_nothing(bench: Any, fixed: int) -> None:
    skip_unless_captured(bench, fixed)
    chunks.check_padding(bench, chunks.layouts(50, 3, 20), 64, fixed=fixed)


def test_what_others_allocate_changes_nothing(bench: Any) -> None:
    chunks.check_memory(bench, chunks.layouts(250, 3, 20), 256)


def test_layers_are_told_once_in_order_and_their_kv_is_final(bench: Any) -> None:
    """An event of the hook is passed when that layer's KV is; later layers are under way."""
    layout, layers = chunks.layouts(500, 3, 20), range(bench.engine.shape.num_layers)
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
                copies += [chunks.bits(each).clone() for each in bench.caches()[2 * layer_id :][:2]]

        chunks.fill(bench)
        torch.cuda.synchronize()
        with torch.inference_mode():
            launch(bench.batch(layout, 512), on_layer)
        torch.cuda.synchronize()
        assert told == list(layers)
        for stored, wanted in zip(copies, final, strict=True):
            assert torch.equal(stored, wanted)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_replay_never_waits_for_the_device(bench: Any) -> None:
    chunks.check_no_wait(bench, chunks.layouts(100, 3, 20))


@pytest.mark.parametrize("num_tokens", [2, 33, 64, 65, 500])
def test_hidden_states_are_near_to_eager_s_and_nothing_is_compiled_anew(bench, num_tokens) -> None:
    from torch._dynamo.utils import counters

    if bench.runner.traced is None:
        pytest.skip("it is the model's own forward")
    loaded, layout = bench.engine.runner.loaded, chunks.layouts(num_tokens, 2, 5)
    before = copy.deepcopy([counters[kind] for kind in ("stats", "aot_autograd")])
    wanted = bench.run(EagerChunks(loaded).launch, layout, num_tokens)[0].float()
    found = bench.run(Uncaptured(loaded, bench.runner.traced).launch, layout, num_tokens)[0]
    assert [counters[kind] for kind in ("stats", "aot_autograd")] == before
    error = (found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() <= bench.runner.rounding


def test_texts_are_those_of_eager_in_float32(bench: Any) -> None:
    if bench.runner.embedded.dtype != torch.float32:
        pytest.skip("16-bit texts diverge by rounding, with any padding")
    chunks.check_texts(bench)
    bench.use(bench.runner)
