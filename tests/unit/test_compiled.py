"""Chunks as torch.compile traced them, on the CPU; its segments are recorded: test_piecewise.py.

tests/gpu/test_piecewise_on_cuda.py has the same laws for real graphs.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.support import pairwise
from tests.support.chunks import (
    Bench,
    Uncaptured,
    bench_of,
    build,
    check_laws,
    check_layers,
    check_padding,
    check_texts,
    layouts,
)
from tests.support.recorded import RecordedMemory, as_one_op
from worker.errors import Unsupported
from worker.forward.batch import Batch
from worker.ops.scaled import E4M3, eight_bits
from worker.run.base import Forward
from worker.run.check import check_chunk_bucket
from worker.run.compiled import (
    ADD_RMS_NORM,
    ADD_RMS_NORM_EIGHT,
    ATTEND,
    EIGHT_BITS,
    GATED_PRODUCT,
    PRODUCT,
    RMS_NORM,
    ROUNDING,
    SCALED_GATED_PRODUCT,
    SCALED_PRODUCT,
    TracedForward,
    by_inductor,
    compiled_chunks,
)
from worker.run.eager import EagerChunks
from worker.run.piecewise import PiecewiseChunks

pytestmark = pytest.mark.filterwarnings(r"ignore:::torch\.")  # of Dynamo and Inductor

MAX_TOKENS = 40
NUM_PAGES = 48
ROUNDED = ROUNDING[torch.float32]
# The same C++ in half the time: not optimised, no trial of what /proc/cpuinfo says of the vector
# units, no headers compiled ahead for more kernels than these few.
QUICK = {
    "aot_inductor.debug_compile": True,
    "cpp.vec_isa_ok": True,
    "cpp_cache_precompile_headers": False,
}


def forward_of(model: Any, how: str, compiled: list[GraphModule]) -> TracedForward:
    """Its pieces are noted in `compiled`."""

    def compile_piece(piece: GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        compiled.append(piece)
        if how == "plain":
            return piece
        from torch._inductor import config

        with config.patch(QUICK):
            return as_one_op(by_inductor(piece, examples))

    return TracedForward(model, compile_piece)


# Inductor makes C++ of the pieces here, and Triton of them in tests/gpu/test_piecewise_on_cuda.py.
@pytest.fixture(scope="module", params=["plain", pytest.param("inductor", marks=pytest.mark.whole)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    engine = build("cpu", "eager", max_prefill_tokens=MAX_TOKENS, num_pages=NUM_PAGES, strict=True)
    from torch._dynamo.utils import counters  # seconds, where these tests run only

    loaded, exact = engine.runner.loaded, request.param == "plain"
    pieces, num_traced = list[GraphModule](), counters["stats"].copy()
    forward = forward_of(loaded.model, request.param, pieces)
    rounding = 0.0 if exact else ROUNDED
    runner = PiecewiseChunks(loaded, RecordedMemory(), forward, rounding)
    assert [check.equal for check in runner.capture()] == [True] * 2 * len(runner.buckets)
    assert (counters["stats"] - num_traced)["unique_graphs"] == 1
    made = bench_of(engine, runner)
    if not exact:
        made.eager = Uncaptured(loaded, forward)
    yield made
    assert len(pieces) == 3, "the first, the last, and all between are one, whatever was launched"
    engine.close()


@pytest.mark.whole
def test_long_steps_have_the_hidden_states_of_last_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near to eager, which multiplies fewer rows in the last layer.

    How many rows a product has decides the order of its sums, on some CPUs (with AVX-512) more
    often than on others. So equal bits are promised at equal shapes alone, by the same forward.
    """
    monkeypatch.setattr("worker.step.buffers.LONG_STEP_TOKENS", 16)
    monkeypatch.setattr("worker.step.buffers.MAX_LAST_TOKEN_ROWS", 4)
    engine = build("cpu", "eager", max_prefill_tokens=MAX_TOKENS, num_pages=NUM_PAGES, strict=True)
    loaded = engine.runner.loaded
    forward = forward_of(loaded.model, "plain", [])
    runner = PiecewiseChunks(loaded, RecordedMemory(), forward, ROUNDED)
    assert all(check.equal for check in runner.capture())
    made = bench_of(engine, runner)
    made.eager = Uncaptured(loaded, forward)
    for num_reqs, fixed in ((3, 1), *pairwise.more((1, 0), (3, 0))):
        check_laws(made, [32, MAX_TOKENS], num_reqs, 5, fixed=fixed)
    engine.close()


@pytest.mark.parametrize("num_tokens", [2, 3, 17, 32, MAX_TOKENS])
def test_hidden_states_are_those_of_eager_for_any_number_of_tokens(bench, num_tokens) -> None:
    from torch._dynamo.utils import counters

    loaded, exact = bench.engine.runner.loaded, not bench.runner.rounding
    layout, before = layouts(num_tokens, 2, 5), copy.deepcopy(counters)
    wanted = bench.run(EagerChunks(loaded).launch, layout, num_tokens)
    found = bench.run(Uncaptured(loaded, bench.runner.traced).launch, layout, num_tokens)
    assert counters == before, "nothing is traced or compiled by a launch"
    ids = [loaded.model.logits(hidden).argmax(-1) for hidden in (wanted[0], found[0])]
    assert torch.equal(*ids)
    if exact:
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    else:
        assert torch.allclose(wanted[0], found[0], atol=1e-4)
        for a, b in zip(wanted[1:], found[1:], strict=True):
            assert torch.allclose(a.view(torch.float32), b.view(torch.float32), atol=1e-4)


@pytest.mark.parametrize(("num_reqs", "fixed"), [(3, 0), (12, 0), (4, 1)])
def test_replays_equal_what_was_piecewise_at_the_same_padded_shape(
    bench: Bench, num_reqs, fixed
) -> None:
    """With plain pieces that is eager itself."""
    check_laws(bench, [16, MAX_TOKENS], num_reqs, prefix=21, fixed=fixed)


def test_a_capture_has_a_segment_more_than_layers(bench: Bench) -> None:
    segments = {key: each.num_segments for key, each in bench.runner.captured.items() if not key[1]}
    num_segments = bench.engine.shape.num_layers + 1
    assert segments == {(size, 0): num_segments for size in (16, 32, MAX_TOKENS)}


def test_layers_are_told_once_and_in_order(bench: Bench) -> None:
    check_layers(bench, Uncaptured(bench.engine.runner.loaded, bench.runner.traced))


@pytest.mark.parametrize("fixed", [0, 1])
def test_what_padding_reads_and_leaves_changes_nothing(bench: Bench, fixed: int) -> None:
    check_padding(bench, layouts(19, 2, 0), 32, fixed=fixed)


def test_texts_are_those_of_eager(bench: Bench) -> None:
    check_texts(bench)


@pytest.fixture(scope="module")
def alone() -> Iterator[Bench]:
    """Nothing is captured."""
    engine = build("cpu", "eager", max_prefill_tokens=MAX_TOKENS, num_pages=NUM_PAGES)
    loaded = engine.runner.loaded
    yield Bench(engine, EagerChunks(loaded), PiecewiseChunks(loaded, RecordedMemory()))
    engine.close()


def test_layers_that_differ_are_compiled_apart(alone: Bench) -> None:
    loaded = alone.engine.runner.loaded
    model, pieces = copy.deepcopy(loaded.model), list[GraphModule]()
    model.layers[2].post_norm.eps = 1e-2  # type: ignore[union-attr]
    forward, layout = forward_of(model, "plain", pieces), layouts(20, 1, 0)
    found = alone.run(Uncaptured(loaded, forward).launch, layout, 20)[0]
    assert len(pieces) == 4
    wanted = alone.run(Uncaptured(loaded, model.forward).launch, layout, 20)[0]
    other = alone.run(alone.eager.launch, layout, 20)[0]
    assert torch.equal(found, wanted)
    assert not torch.equal(found, other)


def test_a_trace_that_holds_for_some_numbers_of_tokens_is_refused() -> None:
    def forward(hidden: Tensor, positions: Tensor) -> Tensor:
        return (hidden * 2 if hidden.shape[0] > 20 else hidden) + positions[:, None]

    model: Any = SimpleNamespace(forward=forward)
    with pytest.raises(RuntimeError, match=r"recompile(.|\n)*20"):
        TracedForward(model, lambda piece, _: piece)(torch.zeros(40, 8), torch.zeros(40))
    torch.compiler.reset()


@torch.inference_mode()
def test_ops_do_what_they_say_to_a_compiler() -> None:
    """Shapes and strides without content, and nothing written but what the schema says."""
    x = torch.randn(5, 8)
    weight, w, bias = torch.randn(8), torch.randn(6, 8), torch.randn(6)
    for op, args in (
        (PRODUCT, (x, w)), (PRODUCT, (x, w, bias)), (GATED_PRODUCT, (x, w)),
        (RMS_NORM, (x, weight, 1e-5)), (ADD_RMS_NORM, (x, x + 1, weight, 1e-5)),
    ):  # fmt: skip
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    values, of_rows = eight_bits(x)
    product = values, of_rows, w.to(E4M3), torch.ones(6, 1), torch.float32, False
    for op, args in (
        (EIGHT_BITS, (x,)), (ADD_RMS_NORM_EIGHT, (x, x + 1, weight, 1e-5)),
        (SCALED_PRODUCT, product), (SCALED_GATED_PRODUCT, product),
    ):  # fmt: skip
        torch.library.opcheck(op, args, test_utils="test_faketensor")  # as torch compares no e4m3
    assert [arg.name for arg in ATTEND._schema.arguments if arg.is_write] == ["out"]


@torch.inference_mode()
def test_the_start_up_check_allows_rounding_and_no_more(alone: Bench) -> None:
    loaded, launch = alone.engine.runner.loaded, alone.eager.launch

    def equal(change: Callable[[Tensor], Tensor], rounding: float) -> bool:
        def changed(batch: Batch) -> Forward:
            return Forward(change(launch(batch).hidden), "changed")

        found = check_chunk_bucket(loaded, 16, (launch, changed), fixed_len=0, rounding=rounding)
        return found.equal

    assert equal(lambda hidden: hidden * (1 + ROUNDED / 2), ROUNDED)
    assert not equal(lambda hidden: hidden * (1 + ROUNDED / 2), 0.0)
    assert not equal(lambda hidden: torch.cat((hidden[1:2], hidden[1:])), ROUNDED)
    for rounding in ROUNDING.values():
        assert not equal(lambda hidden: hidden.roll(1, 0), rounding)
        assert not equal(lambda hidden: hidden * float("nan"), rounding)


def test_it_is_refused_for_chunks_of_one_token() -> None:
    engine = build("cpu", "eager", max_prefill_tokens=1)
    with pytest.raises(Unsupported, match="max_prefill_tokens of 2 or more"):
        compiled_chunks(engine.runner.loaded, RecordedMemory())
    engine.close()
