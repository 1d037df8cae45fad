"""The small Triton kernels against their torch twins, under the interpreter; compiled for sm_90."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.interpreted import INTERPRETED, WHY, check_columns, compiling
from tests.support.pairwise import every, in_whole
from worker.api import MAX_STOP_IDS
from worker.attention import qk_rope_store, qk_rope_store_triton
from worker.attention.qk_rope_store import HeadNorms, Rotation
from worker.draw import draw_rows_triton as draw_rows
from worker.draw import sampler_triton as draw
from worker.draw.sampler import SamplingRows, draw_ref
from worker.ops import norms, norms_triton, philox, philox_triton
from worker.ops.rope import rope_inv_freq, rope_table
from worker.ops.scaled_triton import add_rms_norm_eight_triton, swiglu_eight_triton
from worker.step import rows as step_rows
from worker.step import rows_triton as step_rows_triton
from worker.step.rows import read_rows_ref

pytest.importorskip("triton", reason=WHY)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the largest value: a unit in the last place, and in bf16 two roundings that the interpreter
# cuts off where a GPU rounds.
BOUNDS = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 0.024}
CPU = torch.device("cpu")


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_of(n: int, device: str = "cpu", **columns: Any) -> SamplingRows:
    """n rows, each its own seed and position; `columns` are scalars or lists."""
    values: dict[str, Tensor] = {
        "position": torch.arange(n) * 7 + 3,
        "seed": torch.arange(n) * 2**33 + 11,
        "temperature": torch.ones(n),
        "top_k": torch.zeros(n, dtype=torch.int64),
        "top_p": torch.ones(n),
        "min_p": torch.zeros(n),
        "min_len": torch.zeros(n, dtype=torch.int64),
        "stop_ids": torch.full((n, MAX_STOP_IDS), -1),
        "presence_penalty": torch.zeros(n),
        "frequency_penalty": torch.zeros(n),
        "repetition_penalty": torch.ones(n),
        "penalty_slot": torch.zeros(n, dtype=torch.int64),
    }
    for name, value in columns.items():
        values[name] = torch.zeros_like(values[name]) + torch.as_tensor(value)
    return SamplingRows(**{name: value.to(device) for name, value in values.items()})


MAX_WIDTH = 8
ENDS = step_rows_triton.read_rows_triton, step_rows_triton.accept_rows_triton


def step_columns(num_rows: int, num_pages: int, device: str = "cpu") -> step_rows.RowColumns:
    """A step state in which every third row is inactive, and row 0 is nobody's.

    Some rows end within their window, some have no drafts.
    """
    at = torch.arange(num_rows + 1)
    pages = torch.randperm((num_rows + 1) * num_pages, generator=torch.Generator().manual_seed(3))
    active = (at % 3 != 0) & (at > 0)
    seq_len = torch.where(at > 0, at * 5 % (num_pages * 16 - 2), 0)
    values = active, seq_len, at + 100, seq_len + 1 + at % 4 * 2, seq_len - at % 3
    table = pages.view(num_rows + 1, num_pages).int()
    drafts = at[:, None] * 10 + torch.arange(MAX_WIDTH - 1)
    drafts[at % 5 == 0] = -1
    return step_rows.RowColumns(*(value.to(device) for value in (*values, table, drafts)))


def at_step(
    state: step_rows.RowColumns, rows: Tensor, read: Any, accept: Any, width: int = 1,
    forced: int | None = None,
) -> tuple[Any, Tensor]:  # fmt: skip
    """One step of `rows` by these two functions, in which some tokens stop their row.

    Row r accepts r % width of its drafts, unless `forced` says how many.
    """
    found = read(rows, state, 16, state.page_table.shape[1], width)
    n, device = len(rows), rows.device
    place = torch.arange(width, device=device)
    draws = found.live[:, None] * 10 + place + 500 * (place >= found.live[:, None] % width)
    stop_ids = torch.full((n, width, MAX_STOP_IDS), -1, device=device)
    stop_ids[::2, :, 5] = draws[::2, width // 2, None]
    at = torch.arange(n, device=device)
    min_len = torch.where(at % 4 == 0, 10**6, 0)[:, None].expand(n, width)
    num = None if forced is None else torch.full((n * width,), forced, device=device)
    sampled = step_rows.SampledRows(found.live, found.next_positions, found.valid, width)
    return found, accept(
        sampled, draws.view(-1), stop_ids.flatten(0, 1), min_len.reshape(-1), state, num
    )


def check_ends(
    mine: step_rows.RowColumns, wanted: step_rows.RowColumns, rows: Tensor, ends: Any,
    width: int = 1, forced: int | None = None,
) -> None:  # fmt: skip
    """`ends` leave `mine` as the twins leave `wanted`, an equal state, and say the same."""
    twins = step_rows.read_rows_ref, step_rows.accept_rows_ref
    got, drawn = at_step(mine, rows, *ends, width, forced)
    other, other_drawn = at_step(wanted, rows, *twins, width, forced)
    for each in fields(got):
        a, b = getattr(got, each.name), getattr(other, each.name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), each.name
    check_columns((got.live, got.positions, got.next_positions, got.input_ids, got.slots))
    counts = drawn[:, width] > 0
    assert torch.equal(drawn[counts], other_drawn[counts])
    assert torch.equal(counts, other_drawn[:, width] > 0)
    for each in fields(mine):
        assert torch.equal(getattr(mine, each.name), getattr(wanted, each.name)), each.name


def columns(num_rows: int, device: str = "cpu") -> Any:
    """Four of integers, six of floats and a table, of other values everywhere."""
    at = torch.arange(num_rows, device=device)
    ints = tuple(at * 2**40 + i for i in range(4))
    floats = tuple(at + i / 8 for i in range(6))
    return ints, floats, at[:, None] * 100 + torch.arange(MAX_STOP_IDS, device=device)


CASES: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": [1, 5, 400, 5000, 0]},
    "top_p": {"top_p": [1e-9, 0.3, 0.8, 0.99, 1.0]},
    "min_p": {"min_p": [0.999999, 0.5, 0.1, 1e-4, 0.0]},
    "top_k, top_p": {"top_k": [900, 3, 40, 1, 0], "top_p": [0.9, 0.95, 0.5, 0.9, 0.2]},
    "all": {
        "top_k": [50, 8, 300, 0, 20], "top_p": [0.9, 0.8, 0.99, 0.7, 1.0],
        "min_p": [0.01, 0.05, 0.0, 0.02, 0.2], "temperature": [0.8, 1.5, 1.0, 0.4, 0.0],
    },
}  # fmt: skip


if not INTERPRETED:

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_the_layer_kernels_compile_for_hopper_without_one(dtype: torch.dtype) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype)

        with compiling(norms_triton, "_rms_norm_kernel"):
            norms_triton.add_rms_norm_triton(empty(2, 4096), empty(2, 4096), empty(4096), 1e-6)
        with compiling(norms_triton, "_rms_norm_kernel"):
            add_rms_norm_eight_triton(empty(2, 4096), empty(2, 4096), empty(4096), 1e-6)
        ids, weight = torch.zeros(2, dtype=torch.int64), empty(4096)
        for given in (ids, weight, weight), (None, None, None):
            with compiling(norms_triton, "_pair_norm_kernel"):
                norms_triton.pair_norm_triton(
                    given[0], empty(9, 4096), empty(2, 4096), *given[1:], 1e-6, False
                )
        for rows in (2, norms_triton.MANY_ROWS):
            with compiling(norms_triton, "_swiglu_kernel"):
                norms_triton.swiglu_triton(empty(rows, 24576))
            with compiling(norms_triton, "_swiglu_kernel"):
                swiglu_eight_triton(empty(rows, 24576))
        cache = empty(2, 8, 16, 128)
        with compiling(qk_rope_store_triton) as found:
            rotation = Rotation(torch.empty(64, 128), ids)
            norms = HeadNorms(empty(128), empty(128), 1e-6)
            qk_rope_store_triton.qk_rope_store_triton(
                empty(2, 6144), rotation, (cache, cache), ids, norms
            )
        if dtype == torch.bfloat16:  # four numbers at once
            assert found["_qk_rope_store_kernel"].count("st.global.v2.b32") == 4  # of q; of k or v
        with compiling(qk_rope_store_triton):
            qk_rope_store_triton.qk_rope_store_triton(
                empty(2, 2048), rotation, (cache, cache), ids, None
            )

    @pytest.mark.whole  # of fewer ids, and with changes: test_changed_draws.py
    @pytest.mark.parametrize(("dtype", "block"), [(torch.bfloat16, None), (torch.float32, 512)])
    def test_the_draw_compiles_for_hopper_without_one(dtype, block, monkeypatch) -> None:
        """Once with the blocks that it has; of smaller ones a compiler is done much sooner."""
        if block is not None:
            monkeypatch.setattr(draw, "SEARCH_BLOCK", block)
            monkeypatch.setattr(draw, "DRAW_BLOCK", block)
        with compiling(draw) as found, compiling(draw_rows):
            draw.draw_triton(torch.empty(2, 151936, dtype=dtype), rows_of(2), "filtered")
        assert "mul.hi.u32" in found["_draw_kernel"]

    def test_the_gather_compiles_for_hopper_without_one() -> None:
        with compiling(step_rows_triton, "_gather_rows_kernel"):
            step_rows_triton.gather_rows_triton(*columns(40), torch.zeros(3, dtype=torch.int64))

    def test_the_ends_of_a_step_compile_for_hopper_without_one() -> None:
        state = step_columns(7, 4)
        for width in (1, 3):
            with compiling(step_rows_triton, "_read_rows_kernel"):
                found = read_rows_ref(torch.arange(7), state, 16, 4, width)
                step_rows_triton.read_rows_triton(torch.arange(7), state, 16, 4, width)
            with compiling(step_rows_triton, "_accept_rows_kernel"):
                at_step(state, torch.arange(7), lambda *_, found=found: found, ENDS[1], width)

else:
    triton = pytest.importorskip("triton", reason=WHY)
    tl = triton.language
    SHAPES = ((4, 2, 32, 4), (1, 1, 64, 1), (6, 2, 24, 16), (14, 2, 16, 5), (8, 8, 128, 2))
    pytestmark = [  # numpy's, where a GPU says nothing
        pytest.mark.filterwarnings(f"ignore:{what}") for what in ("All-NaN", "invalid value")
    ]

    def close(got: Tensor, wanted: Tensor) -> None:
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        bound = BOUNDS[got.dtype] * max(1.0, float(wanted.float().abs().max()))
        assert (got.float() - wanted.float()).abs().max() <= bound

    @pytest.mark.product(dtype=DTYPES, shape=((1, 64), (5, 200), (2, 3, 33)), wide=(False, True))
    def test_norms_match_their_twins(
        shape: tuple[int, ...], dtype: torch.dtype, wide: bool
    ) -> None:
        """wide: the weight is in f32."""
        x, residual = noise(*shape, dtype=dtype), noise(*shape, dtype=dtype, seed=1)
        weight = noise(shape[-1], dtype=torch.float32 if wide else dtype, seed=2)
        kept = x.clone(), residual.clone()
        close(norms_triton.rms_norm_triton(x, weight, 1e-5), norms.rms_norm_ref(x, weight, 1e-5))
        got = norms_triton.add_rms_norm_triton(x, residual, weight, 1e-5)
        wanted = norms.add_rms_norm_ref(x, residual, weight, 1e-5)
        close(got[0], wanted[0])
        close(got[1], wanted[1])
        assert torch.equal(x, kept[0])
        assert torch.equal(residual, kept[1])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("gathers", "normed", "hidden_first"),
        [(True, True, False), (True, True, True), (False, True, True), (True, False, False)],
    )
    def test_a_pair_of_norms_matches_its_twin(gathers, normed, hidden_first, dtype) -> None:
        """Rows of 40 within wider ones; the same token and padded rows, of token 0, among them."""
        tokens = noise(9, 48, dtype=dtype)[:, :40]
        hidden = noise(5, 100, dtype=dtype, seed=1)[:, :40]
        ids = torch.tensor([8, 3, 3, 0, 0]) if gathers else None
        weights = [noise(40, dtype=dtype, seed=i) if normed else None for i in (2, 3)]
        given = ids, tokens if gathers else tokens[:5], hidden, *weights, 1e-5, hidden_first
        got, wanted = norms_triton.pair_norm_triton(*given), norms.pair_norm_ref(*given)
        close(got, wanted)
        if not normed:
            assert torch.equal(got, wanted)

    @pytest.mark.product(dtype=DTYPES, shape=((1, 8), (3, 2 * 1030), (2, 2, 34)))
    def test_swiglu_matches_its_twin(shape: tuple[int, ...], dtype: torch.dtype) -> None:
        gate_up = noise(*shape, dtype=dtype) * 3
        close(norms_triton.swiglu_triton(gate_up), norms.swiglu_ref(gate_up))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_gated_rows_match_their_twin(dtype: torch.dtype) -> None:
        x, wide = noise(3, 40, dtype=dtype), noise(3, 100, dtype=dtype, seed=1) * 3
        wanted = norms.sigmoid_gate_ref(x, wide[:, 7:47])
        close(norms_triton.sigmoid_gate_triton(x, wide[:, 7:47]), wanted)

    @pytest.mark.parametrize(
        ("shape", "dtype", "normed"),
        [
            ((4, 2, 32, 4), torch.float32, False), ((4, 2, 32, 4), torch.float16, True),
            ((1, 1, 64, 1), torch.bfloat16, False), ((6, 2, 24, 16), torch.float32, True),
            ((14, 2, 16, 5), torch.float16, False), ((8, 8, 128, 2), torch.bfloat16, True),
            ((0, 2, 32, 4), torch.bfloat16, True), ((0, 6, 24, 2), torch.float32, False),
            *in_whole(*every({"shape": SHAPES, "dtype": DTYPES, "normed": (False, True)})),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize(
        ("turned", "in_f32"),
        [(1.0, False), (0.25, True), (0.0, True), *in_whole((1.0, True), (0.5, True))],
    )
    @pytest.mark.parametrize("many", [1, 1024])
    def test_qk_rope_store_matches_its_twin(
        shape, dtype, normed, turned, in_f32, many, monkeypatch
    ) -> None:
        """Layer 1 of 2 of a pool's memory; two padded rows meet on page 0.

        many: a program has several tokens from so many on.
        turned: the part of a head that is rotated; 0: one pair by nothing, as in layers without
        rope. in_f32: weights of norms are, as those that are stored minus 1.
        """
        monkeypatch.setattr(qk_rope_store_triton, "MANY", many)
        heads, kv_heads, head_dim, page_size = shape
        width = (heads + 2 * kv_heads) * head_dim
        qkv = noise(6, width + 8, dtype=dtype)[:, :width]
        qkv[4:] = qkv[3]  # padded rows are equal, so that it does not matter which one wins
        positions = torch.tensor([3, 63, 1, 0, 0, 0])
        slots = torch.tensor([5 * page_size - 1, page_size, 2 * page_size, 0, 0, 0])
        rotary_dim = int(head_dim * turned) // 2 * 2
        inv_freq = rope_inv_freq(rotary_dim, 1e4, None) if turned else torch.zeros(1)
        table = rope_table(inv_freq, 64, CPU)
        of_norms = torch.float32 if in_f32 else dtype
        weights = [noise(head_dim, dtype=of_norms, seed=i) for i in (1, 2)]
        norms = HeadNorms(weights[0], weights[1], 1e-6) if normed else None
        results = []
        for op in (qk_rope_store_triton.qk_rope_store_triton, qk_rope_store.qk_rope_store_ref):
            memory = torch.full((5, kv_heads, 2, 2, page_size, head_dim), 7.0, dtype=dtype)
            caches = memory[:, :, 1, 0], memory[:, :, 1, 1]
            results.append((op(qkv, Rotation(table, positions), caches, slots, norms), memory))
        (q, memory), (q_ref, memory_ref) = results
        if heads:  # else there are keys and values only
            close(q, q_ref)
        close(memory, memory_ref)
        assert torch.equal(memory == 7.0, memory_ref == 7.0)
        assert torch.equal(memory[:, :, 1, 1], memory_ref[:, :, 1, 1])  # values are copied
        if dtype == torch.float32 and not normed:
            assert torch.equal(q, q_ref)

    @triton.jit
    def _words_kernel(seed, position, out, noise, BLOCK: tl.constexpr):
        start = tl.program_id(0) * BLOCK
        at = tl.arange(0, BLOCK // 4)
        block = (start // 4 + at).to(tl.uint32)
        zero = block * 0
        counter = zero + tl.load(position).to(tl.uint32)
        words = tl.philox(tl.load(seed), block, counter, zero, zero)
        for i in tl.static_range(4):
            tl.store(out + start + at * 4 + i, words[i].to(tl.int64))
        drawn = philox_triton.gumbel_block(tl.load(seed), tl.load(position), start, BLOCK)
        tl.store(noise + start + tl.arange(0, BLOCK), drawn)

    @pytest.mark.parametrize(
        ("seed", "position"),
        [
            (0, 0), (7, 1), (2**63 - 1, 2**31 + 5), (-(2**63), 0), (2**40 + 3, 1),
            *in_whole(*every({
                "seed": (0, 7, 2**63 - 1, -(2**63), 2**40 + 3), "position": (0, 1, 2**31 + 5),
            })),
        ],
    )  # fmt: skip
    def test_words_are_philox_s_bit_for_bit(seed: int, position: int) -> None:
        seeds, positions = torch.tensor([seed]), torch.tensor([position])
        out, drawn = torch.zeros(64, dtype=torch.int64), torch.zeros(64)
        _words_kernel[(2,)](seeds, positions, out, drawn, BLOCK=32)
        zero = torch.zeros((), dtype=torch.int64)
        words = philox.philox_ref(torch.arange(16), positions, zero, zero, seeds)
        assert torch.equal(out, torch.stack(words, -1).flatten())
        torch.testing.assert_close(
            drawn, philox.gumbel_ref(seeds, positions, 64)[0], rtol=1e-6, atol=1e-6
        )

    @pytest.mark.parametrize("n", [1, 32, 70])
    def test_gathered_rows_are_the_twin_s(n: int) -> None:
        rows = torch.arange(n) * 13 % 40
        rows[-1] = 0
        got = step_rows_triton.gather_rows_triton(*columns(40), rows)
        wanted = step_rows.gather_rows_ref(*columns(40), rows)
        check_columns((*got[0], *got[1], got[2]))
        for a, b in zip(
            (*got[0], *got[1], got[2]), (*wanted[0], *wanted[1], wanted[2]), strict=True
        ):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)

    @pytest.mark.product(wide=((1, None), (3, None), (8, None), (4, 2)), n=(1, 6, 23))
    def test_both_ends_of_a_step_are_the_twins(n: int, wide: tuple[int, int | None]) -> None:
        rows = torch.cat((1 + torch.randperm(30)[:n], torch.zeros(2, dtype=torch.int64)))
        check_ends(step_columns(30, 5), step_columns(30, 5), rows, ENDS, *wide)

    def disagreements(logits: Tensor, rows: SamplingRows, tail: Any) -> int:
        got = draw.draw_triton(logits, rows, tail)
        assert got.dtype == torch.int64
        return int((got != draw_ref(logits, rows, tail)).sum())

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("vocab", [5, 2500])
    def test_unfiltered_draws_are_the_twin_s(vocab: int, dtype: torch.dtype) -> None:
        logits = (noise(6, vocab) * 2).to(dtype)
        rows = rows_of(6, temperature=[0.0, 1.0, 0.3, 1.7, 0.0, 1.0])
        assert disagreements(logits, rows, "random") == 0
        assert disagreements(logits, rows_of(6, temperature=0.0), "greedy") == 0

    @pytest.fixture
    def small_blocks() -> Iterator[None]:
        """Several blocks a row, although the rows are short."""
        with mock.patch.multiple(draw, DRAW_BLOCK=256, SEARCH_BLOCK=256):
            yield

    @pytest.mark.parametrize(  # 0: all logits are equal; 0.02: many are, in bf16
        ("name", "dtype", "scale"),
        [
            ("top_k, top_p", torch.bfloat16, 0.0),
            ("all", torch.bfloat16, 0.02),
            ("all", torch.float32, 2.0),
            *in_whole(
                *((name, torch.bfloat16, 0.02) for name in ("top_k", "top_p", "min_p")),
                ("top_k, top_p", torch.bfloat16, 0.02),
                ("top_p", torch.float32, 2.0),
            ),
        ],
    )
    @pytest.mark.usefixtures("small_blocks")
    def test_filtered_draws_are_the_twin_s(name: str, scale: float, dtype: torch.dtype) -> None:
        rows = rows_of(5, **CASES[name])
        logits = (noise(5, 500, seed=1) * scale + 3).to(dtype)
        logits[:, 100] = float("-inf")
        assert disagreements(logits, rows, "filtered") == 0
