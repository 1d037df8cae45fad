"""Kernels of experts against their definitions, under Triton's interpreter; compiled for sm_90."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support import pairwise
from tests.support.interpreted import INTERPRETED, WHY, assembled, compiling, otherwise
from tests.support.pairwise import in_whole
from worker.config.checkpoint.experts import ExpertShape, Held
from worker.config.checkpoint.quantization import SCALE_BLOCK
from worker.errors import Unsupported
from worker.ops import jit, scaled_triton
from worker.ops.compile_ahead import compile_ahead
from worker.ops.experts import product_triton, route_triton
from worker.ops.experts.product import MAX_BESIDE, PLAIN_FINISH, Beside, Finish, expert_products_ref
from worker.ops.experts.product_triton import choose, expert_products_triton
from worker.ops.experts.route import Routes, new_load, refuse_others, route_ref
from worker.ops.experts.route_triton import route_triton as route
from worker.weights.eight_bits import as_e4m3

pytest.importorskip("triton", reason=WHY)
pytestmark = [  # of numpy, in the interpreter
    pytest.mark.filterwarnings("ignore:invalid value"),
    pytest.mark.filterwarnings("ignore:All-NaN slice"),
    pytest.mark.filterwarnings("ignore:overflow"),
]
# The interpreter cuts f32 to bf16 where a GPU rounds.
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 0.03}
SINK = 16
CPU = torch.device("cpu")
ALL = Held(0, 4)


def noise(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    drawn = torch.randn(sizes, generator=torch.Generator().manual_seed(seed))
    return (drawn * sizes[-1] ** -0.5).to(dtype)


def in_eight_bits(stack: Tensor, grain: int = 16) -> tuple[Tensor, Tensor]:
    """Matrices [count, n, k] in e4m3, and their scales."""
    count, n, k = stack.shape
    return as_e4m3(stack.float(), (count, n // grain, -(-k // SCALE_BLOCK)))


def test_a_nan_wins_after_all_numbers_and_ties_go_to_the_lower_index() -> None:
    shape, size = ExpertShape(5, 3, 8, renormalizes=True), 4
    gate = torch.zeros(5, size)
    gate[3, 0] = 1.0
    x = torch.stack([torch.ones(size), torch.full((size,), float("nan"))])
    for each in [route_ref, *([route] if INTERPRETED else [])]:
        routes = each(x, gate, None, 0, shape, Held(0, 5), new_load(Held(0, 5), CPU))
        assert routes.ids.tolist() == [[3, 0, 1], [0, 1, 2]]
        assert routes.weights[1].isnan().all()
        assert routes.weights[0].sum() == pytest.approx(1)


OTHERS = {"scoring": "tanh", "activation": "gelu"}


def test_experts_that_would_not_be_computed_are_refused_by_field_and_value() -> None:
    plain = ExpertShape(8, 2, 16, renormalizes=True)
    refuse_others(plain)
    for field, value in OTHERS.items():
        with pytest.raises(Unsupported, match=f"{field} {value!r}; computed: "):
            refuse_others(plain._replace(**{field: value}))
    # Every other field is computed as it says.
    later = ExpertShape._fields[ExpertShape._fields.index("scoring") :]
    anywhere = "limit", "gain", "plus", "has_biases", "is_biased", "num_groups", "factor"
    assert {*OTHERS, *anywhere, "top_groups"} == {*later}


def test_a_bias_counts_in_the_choice_and_a_factor_in_the_weights() -> None:
    shape = ExpertShape(4, 2, 16, renormalizes=False)
    x, gate, held = (
        torch.eye(4)[:1],
        torch.tensor([[0.0, 1.0, 2.0, 3.0]]).t() @ torch.ones(1, 4),
        ALL,
    )
    plain = route_ref(x, gate, None, 0, shape, held, new_load(held, CPU))
    bias = torch.tensor([1.0, 0.0, 0.0, -1.0])
    biased = route_ref(
        x, gate, None, 0, shape._replace(factor=2.5), held, new_load(held, CPU), bias
    )
    assert (plain.ids.tolist(), biased.ids.tolist()) == ([[3, 2]], [[0, 2]])
    scores = torch.tensor([0.0, 1.0, 2.0, 3.0]).softmax(0)
    torch.testing.assert_close(plain.weights[0], scores[[3, 2]])
    torch.testing.assert_close(biased.weights[0], 2.5 * scores[[0, 2]])


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 128, 300, 8192])
def test_no_routing_needs_more_items_than_there_are(num_tokens: int) -> None:
    for num_experts, top_k in ((8, 2), (128, 8), (512, 10)):
        tiles = {choose(num_tokens, top_k, num_experts, gated=gated) for gated in (True, False)}
        for tile in tiles:
            ring = (tile.tokens + tile.rows) * tile.block_k * 2 * tile.num_stages
            assert ring <= 227 * 1024


# How experts are chosen beside softmax: fields of ExpertShape.
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {}, "biases of products": {"has_biases": True},
    "DeepSeek-V2": {"num_groups": 2, "top_groups": 1, "factor": 16.0},
    "DeepSeek-V3": {
        "scoring": "sigmoid", "is_biased": True, "num_groups": 2, "top_groups": 1,
        "factor": 2.5,
    },
    "Kimi-K2": {"scoring": "sigmoid", "is_biased": True, "factor": 2.827},
}  # fmt: skip

if not INTERPRETED:
    from tests.unit.test_compile_ahead import Hopper

    @pytest.mark.parametrize(
        ("num_tokens", "num_experts", "choice"),
        [
            (1, 128, "plain"), (64, 256, "DeepSeek-V3"),
            *in_whole((64, 128, "plain"), (300, 512, "plain"), (4096, 128, "plain")),
            *in_whole((1, 256, "DeepSeek-V3"), (4096, 384, "Kimi-K2"), (64, 160, "DeepSeek-V2")),
        ],
    )  # fmt: skip
    def test_they_compile_for_hopper_without_one(
        num_tokens: int, num_experts: int, choice: str
    ) -> None:
        shape, held = (
            ExpertShape(num_experts, 8, 64, renormalizes=num_tokens > 1),
            Held(0, num_experts),
        )
        shape = shape._replace(**CHOICES[choice])
        if shape.num_groups > 1:
            shape = shape._replace(num_groups=8, top_groups=4)
        bias = (torch.zeros(num_experts),) if shape.is_biased else ()
        x, gate = noise(num_tokens, 256).bfloat16(), noise(num_experts, 256).bfloat16()
        only = ["_router_kernel", "_route_kernel", *["_arrange_kernel"] * (num_tokens > 4)]
        with compiling(route_triton, *only) as ptx:
            slots = torch.zeros(num_tokens, dtype=torch.int64)
            routes = route(x, gate, slots, SINK, shape, held, new_load(held, CPU), *bias)
        assert "wgmma.mma_async.sync.aligned.m64n" in ptx["_router_kernel"]
        up, down = noise(num_experts, 128, 256).bfloat16(), noise(num_experts, 256, 64).bfloat16()
        with compiling(product_triton) as ptx:
            expert_products_triton(x, routes, up, down, held)
        columns = choose(num_tokens, 8, num_experts, gated=True).tokens
        assert re.search(rf"wgmma\S+m64n{columns}k16\.f32\.bf16\.bf16", ptx["_grouped_kernel"])
        for text in ptx.values():
            assert not re.search(r"\b(st|ld)\.local\b", text)  # nothing spills
        eight, scales = zip(*(in_eight_bits(each) for each in (up, down)), strict=True)
        with compiling(product_triton) as ptx, compiling(scaled_triton, "_eight_bits_kernel"):
            expert_products_triton(x, routes, eight[0], eight[1], held, scales=scales)
        text = ptx["_grouped_kernel"]
        columns = choose(num_tokens, 8, num_experts, gated=True, kind="eight").tokens
        assert re.search(rf"wgmma\S+m64n{columns}k32\.f32\.e4m3\.e4m3", text)
        assert not re.search(r"\b(st|ld)\.local\b", text)

    def test_weights_of_prompts_come_in_boxes() -> None:
        shape, held = ExpertShape(8, 2, 64, renormalizes=True), Held(0, 8)
        x, gate = noise(512, 256).bfloat16(), noise(8, 256).bfloat16()
        routes = route_ref(x, gate, None, 0, shape, held, new_load(held, CPU))
        up, down = noise(8, 128, 256).bfloat16(), noise(8, 256, 64).bfloat16()
        hopper = mock.patch.object(product_triton, "has_dependent_launch", return_value=True)
        with hopper, compiling(product_triton) as ptx:
            expert_products_triton(x, routes, up, down, held)
        text = ptx["_grouped_kernel"]
        assert "cp.async.bulk.tensor.2d" in text
        assert not re.search(r"\b(st|ld)\.local\b", text)

    def product_of(
        rows: int = product_triton.GLUON_FROM, sm: int = 90, dtype: torch.dtype = torch.bfloat16,
        kind: str = "plain", k: int = 128, more: int = 0, has_gluon: bool = True, **finish: Any,
    ) -> str:  # fmt: skip
        """Whose kernel multiplies 8 experts, of whom each has so many rows."""
        n, held, w = 4 * rows, Held(0, 8), torch.zeros(8, 256, k, dtype=dtype)
        x, out = torch.zeros(n, k + more, dtype=dtype)[:, :k], torch.zeros(2 * n, 128, dtype=dtype)
        scales = torch.zeros(8, 16, 1) if kind == "eight" else None
        packed = (torch.zeros(8, 256, 8), None, None) if kind == "packed" else ()
        bias = torch.zeros(8, 256, dtype=dtype) if kind == "biased" else None
        routes = Routes(*(torch.zeros(n, 2, dtype=torch.int32) for _ in range(4)))
        gluon, triton = mock.Mock(), mock.MagicMock()
        with mock.patch.multiple(
            product_triton, has_dependent_launch=lambda _: sm >= 90, is_hopper=lambda _: sm == 90,
            from_gluon=lambda *_: gluon if has_gluon else None, _grouped_kernel=triton,
            eight_bits_triton=lambda x: (x, x), steps_of=lambda *_: (4, 32),
            words_of=lambda x: x,
        ):  # fmt: skip
            stack = product_triton._Stack(w, scales, packed, bias, None)
            stack.multiply(x, routes, held, n, out, PLAIN_FINISH._replace(**finish))
        assert gluon.called != triton.__getitem__.called
        assert not gluon.called or gluon.call_args.args[4] == rows
        return "gluon" if gluon.called else "triton"

    @pytest.mark.parametrize(
        "other",
        [
            {"rows": product_triton.GLUON_FROM - 1}, {"sm": 80}, {"sm": 100}, {"sm": 120},
            {"dtype": torch.float16}, {"dtype": torch.float32}, {"kind": "biased"},
            {"kind": "eight"}, {"kind": "packed"}, {"k": 96}, {"more": 8}, {"gain": 1.702},
            {"plus": 1.0}, {"limit": 7.0},
        ],
        ids=str,
    )  # fmt: skip
    def test_what_gluon_s_kernel_lacks_stays_with_triton_s(other: dict[str, Any]) -> None:
        assert (product_of(), product_of(**other)) == ("gluon", "triton")

    def test_a_gluon_that_is_not_as_expected_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
        jit.from_gluon.cache_clear()
        with mock.patch.dict(sys.modules, {product_triton.IN_GLUON[0]: None}):
            assert [jit.from_gluon(*product_triton.IN_GLUON) for _ in range(3)] == [None] * 3
        jit.from_gluon.cache_clear()
        assert [record.message.count("Gluon") for record in caplog.records] == [1]
        assert product_of(has_gluon=False) == "triton"

    @pytest.mark.parametrize(("num_tokens", "columns"), [(512, 128), (1300, 256)])
    def test_products_of_prompts_are_gluon_s_on_hopper(num_tokens: int, columns: int) -> None:
        """By a double of the driver: they compile, without a spilled register, and overlap."""
        try:
            kernel = import_module(product_triton.IN_GLUON[0])._grouped_kernel
        except (ImportError, AttributeError, TypeError) as missing:
            pytest.skip(f"Triton's Gluon for sm_90 is not as expected: {missing}")
        shape, held = ExpertShape(8, 2, 64, renormalizes=True), Held(0, 8)
        x, gate = noise(num_tokens, 256).bfloat16(), noise(8, 256).bfloat16()
        routes = route_ref(x, gate, None, 0, shape, held, new_load(held, CPU))
        up, down = noise(8, 128, 256).bfloat16(), noise(8, 256, 64).bfloat16()
        kernel.device_caches.clear()
        with (
            mock.patch.object(product_triton, "has_dependent_launch", return_value=True),
            mock.patch.object(product_triton, "is_hopper", return_value=True),
            mock.patch.object(jit.triton.runtime.driver, "_active", Hopper()),
        ):
            compile_ahead(lambda: expert_products_triton(x, routes, up, down, held))
        kept, *_ = next(iter(kernel.device_caches.values()))
        texts = [found.asm["ptx"] for found in kept.values()]
        kernel.device_caches.clear()
        assert sorted("cp.async.cg" in text for text in texts) == [False, True]  # rows are gathered
        for text in texts:
            for part in (f"m64n{columns}k16", "cp.async.bulk.tensor", "setmaxnreg"):
                assert part in text
            said = assembled(text)
            assert "0 bytes spill stores, 0 bytes spill loads" in said
            assert "serialized" not in said

else:

    @contextmanager
    def poisoned() -> Iterator[None]:
        """Memory that is asked for holds what no result may hold."""
        empty, new_empty = torch.empty, Tensor.new_empty

        def poison(made: Tensor) -> Tensor:
            return made.fill_(float("nan") if made.is_floating_point() else 1 << 30)

        with (
            mock.patch.object(torch, "empty", lambda *a, **k: poison(empty(*a, **k))),
            mock.patch.object(Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k))),
        ):
            yield

    Case = tuple[
        int, tuple[int, int, tuple[int, ...]], tuple[int, int], torch.dtype, bool, str
    ]  # fmt: skip

    def check(
        case: Case,
        routes: Any = route_triton,
        products: Any = product_triton,
        alike: float = 1,
        eight_bits: bool = True,
    ) -> None:
        """Kernels of these modules against the definitions; some tokens are padding, all NaN.

        alike: how far tokens differ from the first; little: all have its experts. A shared expert
        has a gate where weights are renormalised.
        """
        num_tokens, (num_experts, top_k, of_rank), sizes, dtype, renormalizes, name = case
        (size, width), held = sizes, Held(*of_rank)
        num_gates = num_experts + (held.shared and renormalizes)
        shape = ExpertShape(num_experts, top_k, width, renormalizes)._replace(**CHOICES[name])
        bias, finish = (), PLAIN_FINISH
        if shape.is_biased:  # some are below all scores
            bias = (noise(num_experts),)
        if shape.has_biases:
            bias = (8 * noise(num_experts),)
            biases = (noise(held.total, n, dtype=dtype, seed=3) for n in (2 * width, size))
            finish = Finish(*biases, gain=1.702, plus=1.0, limit=1.0)
        x, gate = 8 * noise(num_tokens, size, dtype=dtype), noise(num_gates, size, dtype=dtype)
        x = x[:1] + alike * (x - x[:1])
        slots = torch.arange(num_tokens) + SINK
        slots[num_tokens // 2 : num_tokens // 2 + num_tokens // 4] = 3
        up = noise(held.total, 2 * width, size, dtype=dtype, seed=1)
        down = noise(held.total, size, width, dtype=dtype, seed=2)
        padded = torch.where((slots < SINK)[:, None], float("nan"), x.float()).to(dtype)
        loads = [new_load(held, CPU) for _ in range(2)]
        for _ in range(2):
            wanted = route_ref(x, gate, slots, SINK, shape, held, loads[0], *bias)
            with poisoned():
                got = routes.route_triton(padded, gate, slots, SINK, shape, held, loads[1], *bias)
        assert torch.equal(*loads)
        assert loads[0][1, -1] == 2
        assert torch.equal(got.ids, wanted.ids)
        live = slots >= SINK
        torch.testing.assert_close(got.weights[live], wanted.weights[live], atol=1e-6, rtol=1e-5)
        assert torch.equal(got.starts, wanted.starts)
        last = int(got.starts[-1])
        assert torch.equal(got.order[:last], wanted.order[:last])
        with poisoned():
            sums = products.expert_products_triton(padded, got, up, down, held, finish=finish)
        how: dict[str, Any] = {"finish": finish}
        exact = expert_products_ref(x, wanted, up, down, held, **how)
        assert (sums - exact).abs().max() <= BOUNDS[dtype] * exact.abs().max().clamp_min(1e-3)
        assert not sums[~live].any()
        wanted = wanted._replace(plus=noise(num_tokens, size, dtype=dtype, seed=6))
        if num_tokens <= MAX_BESIDE and finish is PLAIN_FINISH:
            shared = noise(4 * width, size, dtype=dtype, seed=4), noise(size, 2 * width, seed=5)
            how = {"beside": Beside(shared[0], shared[1].to(dtype))}
        with poisoned():
            both = got._replace(plus=wanted.plus)
            sums = products.expert_products_triton(padded, both, up, down, held, **how)
        exact = expert_products_ref(x, wanted, up, down, held, **how)
        wanted = wanted._replace(plus=None)
        error = (sums - exact)[live].abs().max()
        assert error <= BOUNDS[dtype] * exact.abs().max().clamp_min(1e-3)
        if 2 * width % 16 or size % 16 or not eight_bits:
            return
        eight, scales = zip(*(in_eight_bits(each) for each in (up, down)), strict=True)
        with poisoned():
            how = {"scales": scales, "finish": finish}
            sums = products.expert_products_triton(padded, got, eight[0], eight[1], held, **how)
        exact = expert_products_ref(x, wanted, eight[0], eight[1], held, **how)
        assert (sums - exact).abs().max() <= 0.03 * exact.abs().max().clamp_min(1e-3)
        assert not sums[~live].any()

    @pytest.mark.product(
        num_tokens=(1, 5, 70, *pairwise.more(2, 17)),
        experts=((8, 2, (0, 8)), (6, 3, (2, 3)), (16, 4, (4, 8)), (6, 3, (0, 6, 1))),
        sizes=((64, 32), (72, 48), (300, 32)),
        dtype=tuple(BOUNDS),
        renormalizes=(True, False),
        choice=tuple(CHOICES),
    )
    def test_they_are_their_definitions(
        num_tokens, experts, sizes, dtype, renormalizes, choice
    ) -> None:
        check((num_tokens, experts, sizes, dtype, renormalizes, choice))

    MUTANTS: dict[str, tuple[Any, str, str]] = {
        "what comes last is the first token's": (
            product_triton, "plus + token * size", "plus + 0 * token",
        ),
        "padding is counted": (route_triton, "live &= tl", "real &= tl"),
        "a row begins behind its own": (
            route_triton, "rank = tl.cumsum(own, 0) - own", "rank = tl.cumsum(own, 0)",
        ),
        "other ranks' experts come first": (route_triton, "(some >= first) &", "(some >= 0) &"),
        "the least likely first": (
            route_triton, "high = tl.max(keys, 1)",
            "high = tl.min(tl.where(keys > 0, keys, 1 << 30), 1)",
        ),
        "a bias is in the weights": (
            route_triton, "tl.sum(tl.where(this, scores", "tl.sum(tl.where(this, _values(keys)",
        ),
        "a group is worth its largest": (route_triton, "if ADDS:", "if False:"),
        "the first groups are the best": (
            route_triton, "kept |= group[None, :] == best[:, None]",
            "kept |= group[None, :] < TOP_GROUPS",
        ),
        "a factor is left out": (route_triton, "total[:, None]) * factor", "total[:, None])"),
        "scores are softmax's": (
            route_triton, "scores = tl.sigmoid(logits)",
            "scores = tl.exp(logits - tl.max(logits, 1)[:, None])",
        ),
        "a part of K is left out": (
            route_triton, "for _ in tl.static_range(PARTS)", "for _ in tl.static_range(PARTS - 1)",
        ),
        "the weight is the row's": (product_triton, "weights + at, mask", "weights + rows, mask"),
        "gate and up are exchanged": (
            product_triton, "gate, up = tl.split(pair)", "up, gate = tl.split(pair)",
        ),
        "all programs have the first expert": (
            product_triton, "return tl.where(expert < COUNT, expert, -1)",
            "return tl.where(expert < COUNT, 0, -1)",
        ),
        "a token has the next one's experts": (
            product_triton, "source = at // TOP_K", "source = at // TOP_K + 1",
        ),
        "what another rank computes is summed": (
            product_triton, "held = (expert >= first) & (expert < first + count)",
            "held = expert >= 0",
        ),
        "an expert's second tile is its first": (
            product_triton, "begins + (item - behind + items) * BLOCK_T", "begins",
        ),
        "gates are not clamped": (
            product_triton, "gate = tl.where(gate > LIMIT, LIMIT, gate)", "gate = gate",
        ),
        "nothing is added to ups": (product_triton, "(up + PLUS) *", "up *"),
        "a bias is another expert's": (
            product_triton, "tl.load(bias + numbers)", "tl.load(bias + lines)",
        ),
        "a box is of another expert": (product_triton, "expert * height + tile", "tile"),
        "boxes of ups are of gates": (product_triton, "[box + N, begin]", "[box, begin]"),
        "all tiles are a tail": (product_triton, "end - first <= TAIL", "end > 0"),
        "shared experts are the first one": (product_triton, "number * N if GATED", "0 if GATED"),
        "shared experts have the first one's columns": (
            product_triton, "N if GATED else number", "N if GATED else 0",
        ),
        "shared experts have the rows of others": (
            product_triton, "rows, at)\n", "0 * rows, at)\n",
        ),
        "the last shared expert is left out": (
            product_triton, "tl.static_range(TOP_K, TOP_K + SHARED)",
            "tl.static_range(TOP_K, TOP_K + SHARED - (SHARED > 0))",
        ),
        "a shared expert has no gate": (
            route_triton, "tl.sigmoid(of_shared) if HAS_GATE", "of_shared if HAS_GATE",
        ),
        "padding has the shared expert": (
            route_triton, "ids + last, tl.where(live,", "ids + last, tl.where(real,",
        ),
        "rows of a shared expert are the first": (route_triton, "order + all_rows +", "order +"),
        "shared experts are counted": (
            route_triton, "met + tl.where(row > begins, 1, 0), mask=expert < count",
            "met + tl.where(row > begins, 1, 0)",
        ),
        "the router has no bias": (route_triton, "if bias is not None:", "if False:"),
    }  # fmt: skip

    ONE_HAS_ALL: Case = (40, (16, 1, (0, 16)), (64, 32), torch.float32, False, "plain")
    # With weights in boxes.
    MORE_THAN_A_TAIL: Case = (240, (6, 1, (0, 6)), (64, 64), torch.bfloat16, False, "plain")
    FEW = (
        "padding is counted",
        "gate and up are exchanged",
        "an expert's second tile is its first",
    )

    @pytest.mark.parametrize(
        "mutant",
        [pytest.param(name, marks=[pytest.mark.whole] * (name not in FEW)) for name in MUTANTS],
    )
    def test_a_kernel_that_reads_otherwise_is_seen(mutant: str, tmp_path: Path) -> None:
        module, right, wrong = MUTANTS[mutant]
        file = tmp_path / f"mutant_{sorted(MUTANTS).index(mutant)}.py"
        made = otherwise(module, right, wrong, file)
        changed: dict[str, Any] = {"routes" if module is route_triton else "products": made}
        case = 40, (6, 3, (2, 3)), (300, 32), torch.float32, True  # of a part of K, too
        with_shared = (6, 3, (0, 6, 1)), *case[2:], "plain"

        def check_all() -> None:
            for choice in CHOICES:
                check((*case, choice), **changed)
            check(ONE_HAS_ALL, **changed, alike=0.01)
            check((5, *case[1:], "plain"), **changed)
            for num_tokens in (3, 40):
                check((num_tokens, *with_shared), **changed)
            check(MORE_THAN_A_TAIL, **changed, alike=0.01, eight_bits=False)

        with pytest.raises((AssertionError, IndexError, ValueError)):
            check_all()

    def test_an_expert_may_have_all_tokens() -> None:
        check(ONE_HAS_ALL, alike=0.01)
        check(MORE_THAN_A_TAIL, alike=0.01, eight_bits=False)

    def test_rows_are_arranged_over_several_looks_at_them() -> None:
        with mock.patch.object(route_triton, "AT_ONCE", 32):
            check((70, (6, 3, (0, 6, 1)), *MORE_THAN_A_TAIL[2:]), eight_bits=False)
