"""Attention over latents, every backend, against a dense float64 oracle over a pool full of NaN.

As tests/contract/test_attention.py. On a GPU: tests/gpu/test_latent_on_cuda.py.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.contract.test_attention import BOUNDS, CPU, MIXED, Row, dense_oracle, make_batch
from tests.contract.test_attention import make_rows as rows_of
from tests.support.interpreted import INTERPRETED, WHY, asm_of, assembled, compiling, otherwise
from tests.support.pairwise import every, in_whole, one_in, pairwise, whole
from worker.attention.base import AttentionShape
from worker.attention.build import build_attentions
from worker.attention.latent import (
    LatentNorm,
    latent_absorb_store_ref,
    latent_rope_store_ref,
    latent_values_ref,
    read_rows,
)
from worker.attention.qk_rope_store import Rotation, store_rows_ref
from worker.cache.eight_bits import E4M3, dequantized, exponents_of
from worker.cache.layout import KVLayout, KVRegion
from worker.cache.pool import KVPool
from worker.config.backends import LATENT
from worker.config.checkpoint.mask import KeyMask
from worker.errors import Unsupported
from worker.forward.batch import Batch, Bounds
from worker.forward.context import forward_context
from worker.ops.jit import HAS_TRITON
from worker.ops.rope import rope_inv_freq, rope_table
from worker.registry import resolve

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LAYERS, LAYER = 2, 1
BACKENDS = ["triton"] if INTERPRETED else ["reference"]
EIGHT = "float8_e4m3fn"
LONG = [(399, 1), (0, 2), (256, 3), (255, 1), (63, 1)]
FEW = [(9000, 1), (290, 1)]  # the first has several blocks a part


@dataclass(slots=True)
class Scene:
    """A pool, a batch over it whose rows are stored, and its queries."""

    pool: KVPool
    batch: Batch
    requests: list[Row]
    q: Tensor
    shape: AttentionShape

    def attend(self, backend: Any, batch: Batch | None = None) -> Tensor:
        """Into memory of NaN. backend: a name or an instance."""
        made, batch = self.made(backend), batch or self.batch
        out = self.q.new_full((*self.q.shape[:2], self.shape.value_dim), float("nan"))
        # Scores of keys that there are none of may be no number, before they are masked.
        seen = np.errstate(invalid="ignore" if self.pool.region().dtype == EIGHT else "warn")
        with forward_context(batch, made, made.plan(batch)), seen:
            assert made.forward(self.q, LAYER, out) is out
        return out

    def made(self, backend: Any) -> Any:
        if isinstance(backend, str):
            return resolve("attention backend", backend, LATENT)(self.pool, self.shape)
        return backend


def make(
    shapes: list[tuple[int, int]],
    heads: int = 4,
    dims: tuple[int, int] = (32, 16),
    page_size: int = 16,
    dtype: str = "float32",
    padded: tuple[int, int] = (3, 2),
    seed: int = 0,
    device: torch.device = CPU,
    queries: str = "float32",
) -> Scene:
    """Requests of (prefix, width). padded: tokens and requests; slots of nobody are NaN.

    queries: their dtype, where rows are in eight bits; these differ in size, and so in exponents.
    """
    requests, pages = rows_of(shapes, page_size, seed)
    size = sum(dims)
    region = KVRegion("target", NUM_LAYERS, 1, size, 1, page_size, dtype, 1)
    pool = KVPool(KVLayout((region,)), pages, device)
    for (part,) in pool.layers():
        if dtype == EIGHT:
            part[1:].view(torch.uint8).fill_(255)
            exponents_of(part)[1:] = 255
        else:
            part[1:] = float("nan")
    asking = getattr(torch, queries if dtype == EIGHT else dtype)
    generator = torch.Generator().manual_seed(seed)
    for request in requests:
        at = torch.arange(request.length)
        slots = torch.tensor(request.pages)[at // page_size] * page_size + at % page_size
        kept = torch.randn(request.length, 1, size, generator=generator)
        if dtype == EIGHT:
            kept *= 10 ** -torch.rand(request.length, 1, 1, generator=generator)
        store_rows_ref(kept.to(device, asking), pool.layer(LAYER)[0], slots.to(device))
    with device:
        batch = make_batch(requests, page_size, *padded)
    q = torch.randn(batch.num_tokens, heads, size, generator=generator)
    more = {"kind": "latent", "value_dim": dims[0], "dtype": str(asking).removeprefix("torch.")}
    shape = AttentionShape(heads, 1, size, size**-0.5, **more)
    return Scene(pool, batch, requests, q.to(device, asking), shape)


def worth(cache: Tensor) -> Tensor:
    """What a layer's rows are worth, on the CPU."""
    if cache.dtype != E4M3:
        return cache.cpu()
    return dequantized(cache.cpu(), exponents_of(cache).cpu(), torch.float32)


def expected(scene: Scene) -> Tensor:
    """[num_tokens, heads, value_dim] f64, zeros for padding."""
    cache, page_size = worth(scene.pool.layer(LAYER)[0]), scene.pool.layout.page_size
    out, start = torch.zeros(scene.q.shape, dtype=torch.float64), 0
    for request in scene.requests:
        at = torch.arange(request.length)
        kept = cache[torch.tensor(request.pages)[at // page_size], :, at % page_size].double()
        mine = slice(start, start + request.width)
        q = scene.q[mine].cpu().double()
        out[mine] = dense_oracle(q, kept, kept, request.prefix, scene.shape.scale, scene.shape.mask)
        start += request.width
    return out[..., : scene.shape.value_dim]


def check(scene: Scene, backend: Any) -> None:
    before = worth(scene.pool.layer(LAYER)[0])
    out = scene.attend(backend)
    error = (out.cpu().double() - expected(scene)).abs().max()
    assert error < BOUNDS[scene.shape.dtype], error
    assert not out[int(scene.batch.query_start[-1]) :].any(), "padded tokens are zero"
    assert torch.equal(before.nan_to_num(), worth(scene.pool.layer(LAYER)[0]).nan_to_num())
    scene.pool.close()


FACTORS = {
    "heads": (1, 4, 20, 40),
    "dims": ((32, 16), (64, 32), (128, 16)),
    "page_size": (1, 16, 64),
    "dtype": ("float32", "bfloat16", "float16"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("heads", "dims", "page_size", "dtype"),
    every(FACTORS) if whole else one_in(3 if INTERPRETED else 1, pairwise(FACTORS)),
)
def test_ragged_windows_match_the_dense_oracle(backend, heads, dims, page_size, dtype) -> None:
    check(make([(0, 5), (21, 1), (6, 3)], heads, dims, page_size, dtype), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "dtype"), [(4, "float32"), (20, "bfloat16")])
def test_widths_from_1_to_16_mix_in_one_batch(backend, heads, dtype) -> None:
    """Tiles of 16 rows in float32 and of 64 else: a request has several of either."""
    check(make(MIXED, heads, dtype=dtype), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("page_size", "dtype"), [(1, "float32"), (64, "bfloat16")])
def test_long_rows_in_many_parts(backend, page_size, dtype) -> None:
    check(make(LONG, 4, page_size=page_size, dtype=dtype, padded=(20, 0)), backend)
    check(make([(399, 1), (0, 1), (255, 1)], 20, page_size=page_size, dtype=dtype), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("page_size", "dtype"), [(64, "bfloat16"), (16, "float16"), (64, EIGHT)])
def test_few_requests_in_as_many_parts_as_there_can_be(backend, page_size, dtype) -> None:
    scene = make(FEW, 4, (32, 16), page_size, dtype, padded=(0, 0), queries="bfloat16")
    check(scene, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("heads", "dims", "page_size", "queries"),
    [
        (4, (32, 16), 16, "float32"),
        *in_whole((20, (128, 16), 64, "bfloat16"), (20, (64, 32), 1, "float32")),
    ],
)
def test_rows_in_eight_bits_are_what_they_are_worth(
    backend, heads, dims, page_size, queries
) -> None:
    """With exponents of NaN where nobody's slots are, and one of every row."""
    for shapes in ([(0, 5), (21, 1), (6, 3)], MIXED, LONG):
        check(make(shapes, heads, dims, page_size, EIGHT, queries=queries), backend)
    scene = make([(0, 5), (21, 1), (399, 2), (1, 1)], heads, dims, page_size, EIGHT)
    scene.shape = replace(scene.shape, mask=KeyMask(first_key=1))
    check(scene, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_s_bits_do_not_depend_on_the_other_rows(backend) -> None:
    """Each request alone, the others cut down to nothing, under a much higher length bound."""
    shapes = [(399, 1), (256, 3), (0, 2)]
    scene = make(shapes, padded=(0, 0))
    made = scene.made(backend)
    together = scene.attend(made)
    for number in range(len(shapes)):
        lengths = torch.zeros_like(scene.batch.seq_lens)
        lengths[number] = scene.batch.seq_lens[number]
        bound = scene.batch.max_seq_len_ub if backend == "reference" else 900
        alone = replace(scene.batch, seq_lens=lengths, max_seq_len_ub=bound)
        out = scene.attend(made, alone)
        mine = slice(*scene.batch.query_start[number : number + 2].tolist())
        assert torch.equal(out[mine], together[mine])
        out[mine] = 0
        assert not out.any(), "requests without rows"
    scene.pool.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "page_size"), [(4, 16), *in_whole((20, 64), (4, 1))])
def test_the_first_row_may_be_nobody_s(backend, heads, page_size) -> None:
    """As for a layer that drafts: it is NaN, and the row at position 0 sees nothing."""
    scene = make([(0, 5), (21, 1), (399, 2), (1, 1)], heads, page_size=page_size)
    scene.shape = replace(scene.shape, mask=KeyMask(first_key=1))
    for request in scene.requests:
        scene.pool.layer(LAYER)[0][request.pages[0], 0, 0] = float("nan")
    check(scene, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_backend_cannot_serve_is_refused_by_name(backend) -> None:
    scene = make([(0, 1)])
    names: dict[str, str] = dict.fromkeys(("prefill", "decode"), backend)
    built = build_attentions(names, scene.pool, scene.shape)
    assert isinstance(built.decode, resolve("attention backend", backend, LATENT))
    with pytest.raises(Unsupported, match=r"cannot serve .*window"):
        build_attentions(names, scene.pool, replace(scene.shape, mask=KeyMask(window=4)))
    plain = replace(scene.shape, kind="heads", value_dim=0)
    with pytest.raises(Unsupported, match="'target' has 1 parts a token; attention needs 2"):
        build_attentions(names, scene.pool, plain)
    if backend == "triton":
        with pytest.raises(Unsupported, match=r"engine.attention.prefill: .* 24 of a"):
            build_attentions(names, scene.pool, replace(scene.shape, value_dim=24))
    scene.pool.close()


def test_rows_in_eight_bits_are_read_back_as_they_are_worth() -> None:
    scene = make([(0, 5), (21, 1), (40, 3)], dtype=EIGHT)
    kept = scene.pool.layer(LAYER)[0]
    for request in scene.requests:
        pages = torch.tensor(request.pages)
        rows = read_rows(kept, pages, torch.bfloat16)[: request.length]
        assert torch.equal(rows.float(), worth(kept)[pages, 0].flatten(0, 1)[: request.length])
    scene.pool.close()


@dataclass(slots=True)
class Store:
    """Arguments of latent_rope_store: five tokens, of which two are padding."""

    heads: int
    dims: tuple[int, int]
    page_size: int
    dtype: torch.dtype
    is_eight: bool = False  # rows; dtype is the model's

    def run(
        self,
        store: Any,
        *,
        in_place: bool = False,
        absorbs: bool = False,
        device: torch.device = CPU,
    ) -> tuple[Tensor, Tensor]:
        """(queries with rotated ends, or absorbed ones; pages' worth) of an implementation."""
        value, rope = self.dims
        generator = torch.Generator().manual_seed(3)
        wide = torch.randn(5, self.heads, value + rope, generator=generator).to(self.dtype)
        latents = torch.randn(5, value + rope + 8, generator=generator).to(self.dtype)
        latents[4] = latents[3]  # padded rows are equal: it does not matter which one wins
        table = rope_table(rope_inv_freq(rope, 1e4, None), 64, CPU)
        norm = LatentNorm(torch.randn(value, generator=generator).to(self.dtype), 1e-6)
        slots = torch.tensor([5 * self.page_size - 1, self.page_size, 2 * self.page_size, 0, 0])
        positions = torch.tensor([3, 63, 1, 0, 0])
        wide, latents, slots, positions, table = (
            x.to(device) for x in (wide, latents, slots, positions, table)
        )
        norm = LatentNorm(norm.weight.to(device), norm.eps)
        dtype = EIGHT if self.is_eight else str(self.dtype).removeprefix("torch.")
        region = KVRegion("target", NUM_LAYERS, 1, value + rope, 1, self.page_size, dtype, 1)
        pool = KVPool(KVLayout((region,)), 5, device)
        layers = [part for (part,) in pool.layers()]
        every = torch.arange(5 * self.page_size, device=device)
        for part in layers:
            sevens = torch.full((len(every), 1, value + rope), 7.0, device=device)
            store_rows_ref(sevens.to(self.dtype), part, every)
        stored = Rotation(table, positions), norm, layers[LAYER], slots
        if absorbs:  # heads have 24 numbers before those that turn
            keys = torch.randn(self.heads, 24, value, generator=generator) * 24**-0.5
            keys = keys.to(device, self.dtype)
            out = store(wide[..., value - 24 :], latents[:, : value + rope], *stored, keys)
        else:
            out = wide if in_place else torch.full_like(wide, 9.0)
            store(wide[..., value:], latents[:, : value + rope], *stored, out[..., value:])
        pages = torch.stack([worth(part) for part in layers], 2)
        pool.close()
        return out, pages


STORES: list[Any] = [
    (4, (32, 16), 16, torch.float32), (20, (64, 32), 1, torch.bfloat16),
    (4, (32, 16), 16, torch.float32, True), (20, (64, 32), 16, torch.bfloat16, True),
]  # fmt: skip
HALF_A_STEP = 16 / 224  # of e4m3, of a row's largest number


@pytest.mark.parametrize("of", [Store(*each) for each in STORES], ids=str)
def test_a_row_is_a_normed_latent_and_a_key_rotated_by_pairs(of: Store) -> None:
    """The definition, against complex numbers in f64."""
    out, pages = of.run(latent_rope_store_ref)
    value, rope = of.dims
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(5, of.heads, value + rope, generator=generator).to(of.dtype).double()
    latents = torch.randn(5, value + rope + 8, generator=generator).to(of.dtype).double()
    latents, weight = latents[:, : value + rope], torch.randn(value, generator=generator)
    angles = torch.tensor([3.0, 63.0, 1.0]).double()[:, None] / 1e4 ** (
        torch.arange(0, rope, 2).double() / rope
    )
    turn = torch.polar(torch.ones_like(angles), angles)

    def turned(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn.view(3, *[1] * (x.ndim - 2), -1)).flatten(-2)

    bound = 1e-5 if of.dtype == torch.float32 else 0.03
    assert (out[:3, :, value:].double() - turned(wide[:3, :, value:])).abs().max() < bound
    assert (out[..., :value] == 9).all()
    normed = latents[:3, :value] / latents[:3, :value].square().mean(-1, True).add(1e-6).sqrt()
    wanted = torch.cat((normed * weight.to(of.dtype).double(), turned(latents[:3, value:])), -1)
    for number, slot in enumerate((5 * of.page_size - 1, of.page_size, 2 * of.page_size)):
        row = pages[slot // of.page_size, 0, 1, slot % of.page_size]
        step = wanted[number].abs().max() * HALF_A_STEP if of.is_eight else 0.0
        assert (row.double() - wanted[number]).abs().max() < 2 * bound + step
        row[:] = 7
    pages[0, 0, 1, 0] = 7
    assert (pages == 7).all(), "nothing else is written"


def asm(
    heads: int, width: int, dims: tuple[int, int] = (512, 64), kept: str = "*bf16"
) -> dict[str, str]:
    """The stages of _latent_kernel for 32 requests in bf16 in pages of 64, on an H200."""
    from worker.attention import latent_triton as kernels

    tiles = kernels.choose(Bounds(32, 32 * width, width, 8192), heads, 2, 132)
    shape = AttentionShape(heads, 1, sum(dims), 1.0, kind="latent", value_dim=dims[0])
    constants, options = kernels.constants_of(tiles, shape, 64)
    types = dict.fromkeys(("q", "out"), "*bf16") | {"rows": kept}
    types |= dict.fromkeys(("page_table", "items", "counts"), "*i32")
    types |= dict.fromkeys(("partial", "stats"), "*fp32") | {"scale": "fp32"}
    types |= dict.fromkeys(("num_tokens", "stride_q", "stride_page", "stride_table"), "i32")
    return asm_of(kernels._latent_kernel, types, constants | {"PDL": True}, **options)


if INTERPRETED:
    from worker.attention import latent_triton

    @pytest.mark.parametrize("of", [Store(*each) for each in STORES], ids=str)
    @pytest.mark.parametrize("in_place", [True, False])
    def test_the_kernel_stores_as_its_definition(of: Store, in_place: bool) -> None:
        check_store(of, latent_triton, in_place)

    @pytest.mark.parametrize("of", [Store(*each) for each in STORES], ids=str)
    def test_the_kernel_absorbs_as_its_definition(of: Store) -> None:
        check_absorbed(of, latent_triton)

    def check_absorbed(of: Store, kernels: Any) -> None:
        got = of.run(kernels.latent_absorb_store_triton, absorbs=True)
        wanted = of.run(latent_absorb_store_ref, absorbs=True)
        check_made(of, got, wanted)

    @pytest.mark.parametrize(
        ("num_tokens", "heads", "sizes", "dtype"),
        [(1, 4, (24, 32), torch.float32), (17, 3, (40, 512), torch.bfloat16)],
    )
    def test_the_kernel_makes_values_as_its_definition(num_tokens, heads, sizes, dtype) -> None:
        check_values(latent_triton, num_tokens, heads, sizes, dtype)

    def check_values(
        kernels: Any, num_tokens: int, heads: int, sizes: tuple[int, int], dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(4)
        drawn = (num_tokens, heads, sizes[1]), (heads, *sizes)
        x, values = (torch.randn(size, generator=generator).to(dtype) for size in drawn)
        got, wanted = kernels.latent_values_triton(x, values), latent_values_ref(x, values)
        bound = 1e-6 if dtype == torch.float32 else 0.024
        assert (got.float() - wanted.float()).abs().max() <= bound * wanted.float().abs().max()

    def check_store(of: Store, kernels: Any, in_place: bool = False) -> None:
        got = of.run(kernels.latent_rope_store_triton, in_place=in_place)
        wanted = of.run(latent_rope_store_ref, in_place=in_place)
        check_made(of, got, wanted)

    def check_made(of: Store, got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
        bound = 1e-6 if of.dtype == torch.float32 else 0.024
        for which, (one, other) in enumerate(zip(got, wanted, strict=True)):
            one, other = one.float(), other.float()
            step = bound
            if which and of.is_eight:  # a number may fall to the other side
                step = 2 * HALF_A_STEP
                assert (one != other).float().mean() < (0.001 if bound < 1e-3 else 0.02)
            assert (one - other).abs().max() <= step * other.abs().max()
            assert torch.equal(one == 7.0, other == 7.0)

    MUTANTS = {
        "the rotated key takes no part": (
            "tl.trans(value), scores,", "tl.trans(value), 0 * scores,",
        ),
        "tokens of a window see all of it": (
            "numbers <= tl.expand_dims(limit, KEYS)", "numbers < end",
        ),
        "the rotated key takes none of few": ("(q_value), scores,", "(q_value), 0 * scores,"),
        "sums of few queries keep their scale": ("p, acc * shrink", "p, acc"),
        "all of few tiles are the first": ("item += tl.load(", "item += 0 * tl.load("),
        "rows past the end are read": ("inside = (keys < end)", "inside = (keys >= 0)"),
        "sums keep their scale": ("value, acc * shrink", "value, acc"),
        "weights keep theirs": ("weight * shrink +", "weight +"),
        "each tile is the first": ("row = cut // 65536 * BLOCK_M + local", "row = local"),
        "the last part is left out": (
            "part < num_splits, first_item", "part < num_splits - 1, first_item",
        ),
        "parts count alike": ("sums * shares[:, None]", "sums"),
        "padding stays as it was": ("zero_padding(out, num_rows,", "zero_padding(out, num_tokens,"),
        "a head's key is its latent's end": (
            "q_at + VALUE + of_rope", "q_at + VALUE - ROPE + of_rope",
        ),
        "latents are not normed": ("x = x * tl.rsqrt", "x = x + 0 * tl.rsqrt"),
        "pairs turn backwards": ("first * cos - second", "first * cos + second"),
        "a page has one slot": ("slot % PAGE * (VALUE", "0 * (VALUE"),
        "halves are pairs": (
            "tl.reshape(x, (ROWS, PAIRS, 2))",
            "tl.permute(tl.reshape(x, (ROWS, 2, PAIRS)), (0, 2, 1))",
        ),
        "all heads have the first one's keys": ("keys + head * stride_head", "keys"),
        "queries are another head's": ("head * stride_q_head - NOPE", "-NOPE"),
        "all columns are the first": ("product % BLOCKS * COLUMNS", "0"),
        "values are of the first latents": ("w_at + (begin + BLOCK_K)", "w_at"),
        "values are the first head's": ("w + head * stride_head", "w"),
        "merged columns are the first": ("tl.program_id(2) * COLUMNS +", ""),
        "exponents are the next row's": ("+ PAGE * ROW  #", "+ PAGE * ROW + 1  #"),
        "an exponent is of the latent": (
            "tl.maximum(tl.max(tl.abs(normed), 0), tl.max(tl.abs(rope)))",
            "tl.max(tl.abs(normed), 0)",
        ),
        "exponents lie in one place": ("+ slot % PAGE, exponent", ", exponent"),
    }  # fmt: skip

    @pytest.mark.parametrize("mutant", one_in(5, MUTANTS))
    def test_a_kernel_that_computes_otherwise_is_seen(mutant: str, tmp_path: Path) -> None:
        right, wrong = MUTANTS[mutant]
        file = tmp_path / f"latent_mutant_{sorted(MUTANTS).index(mutant)}.py"
        made = otherwise(latent_triton, right, wrong, file)

        def check_all() -> None:
            scene = make([(290, 1), (5, 7), (37, 1)])
            check(scene, made.LatentTriton(scene.pool, scene.shape))
            for shapes, dtype in (([(290, 1)], "float32"), (FEW, "bfloat16")):
                scene = make(shapes, 4, (128, 16), dtype=dtype, padded=(0, 0))
                check(scene, made.LatentTriton(scene.pool, scene.shape))
            scene = make([(290, 1), (5, 7)], dtype=EIGHT)
            check(scene, made.LatentTriton(scene.pool, scene.shape))
            check_store(Store(*STORES[0]), made)
            check_store(Store(*STORES[2]), made)
            for each in STORES:
                check_absorbed(Store(*each), made)
            check_values(made, 17, 3, (40, 512), torch.float32)

        with pytest.raises((AssertionError, IndexError)):
            check_all()

else:

    @pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    @pytest.mark.parametrize(
        ("heads", "width", "product"),  # V2-Lite; its windows; GLM-4.7-Flash
        [(16, 4, "wgmma"), *in_whole((16, 1, "mma.sync"), (20, 1, "mma.sync"))],
    )
    @pytest.mark.parametrize("kept", ["*bf16", "*fp8e4nv"])
    def test_a_block_of_rows_is_loaded_once_for_both_products(heads, width, product, kept) -> None:
        stages = asm(heads, width, kept=kept)
        assert product in stages["ptx"]
        assert "cp.async" in stages["ptx"]
        assert "atom" not in stages["ptx"]
        loop = stages["ttgir"].split("scf.for")[1].split("scf.yield")[0]
        assert loop.count("ttg.async_copy_global_to_local") == 2  # latents, rotated keys
        if kept != "*bf16":
            assert loop.count("tt.fp_to_fp") == 2, "they are widened once"
            said = [assembled(each["ptx"]) for each in (stages, asm(heads, width))]
            eight, plain = (int(re.findall(r"(\d+) bytes spill stores", x)[0]) for x in said)
            assert eight <= plain

    @pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    @pytest.mark.parametrize("kept", [torch.bfloat16, E4M3], ids=str)
    def test_what_merges_parts_and_what_stores_rows_compile_for_an_h200(kept) -> None:
        from worker.attention import latent_triton as kernels

        empty, ids = torch.empty, torch.zeros(2, dtype=torch.int64)
        x, rows = empty(2, 16, 576, dtype=torch.bfloat16), empty(2, 64, 576, dtype=kept)
        with compiling(kernels, "_latent_rope_store_kernel"):
            kernels.latent_rope_store_triton(
                x[..., 512:], x[:, 0], Rotation(empty(8, 64), ids),
                LatentNorm(x[0, 0, :512], 1e-6), rows.unsqueeze(1), ids, x[..., 512:],
            )  # fmt: skip
        with compiling(kernels, "_latent_rope_store_kernel") as ptx:
            kernels.latent_absorb_store_triton(
                x[..., 384:], x[:, 0], Rotation(empty(8, 64), ids),
                LatentNorm(x[0, 0, :512], 1e-6), rows.unsqueeze(1), ids,
                empty(16, 128, 512, dtype=torch.bfloat16),
            )  # fmt: skip
        assert "mma.sync" in ptx["_latent_rope_store_kernel"]
        with compiling(kernels, "_latent_values_kernel") as ptx:
            values = empty(16, 128, 512, dtype=torch.bfloat16)
            kernels.latent_values_triton(x[..., :512].contiguous(), values)
        assert "mma.sync" in ptx["_latent_values_kernel"]
        types = {"out": "*bf16", "items": "*i32", "counts": "*i32", "partial": "*fp32"}
        sizes = {"BLOCK_M": 16, "VALUE": 512, "HEADS": 16, "SPLITS": 64, "COLUMNS": 64}
        sizes["BY_TILE"] = True
        fields = {"FIELDS": kernels.FIELDS, "PDL": True}
        made = asm_of(kernels._merge_kernel, types | {"stats": "*fp32"}, sizes | fields)
        assert "griddepcontrol.wait" in made["ptx"]
