"""The small Triton kernels on one GPU, at real sizes, against their torch twins on the same GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.test_changed_draws import FILTERS, changed_rows, made_of
from tests.unit.test_kernels_triton import CASES, check_ends, columns, rows_of, step_columns
from worker.attention import qk_rope_store_triton
from worker.attention.qk_rope_store import HeadNorms, Rotation, qk_rope_store, qk_rope_store_ref
from worker.draw.logprobs import logprobs, logprobs_ref
from worker.draw.sampler import SamplingRows, change, draw_ref
from worker.draw.sampler_triton import draw_triton
from worker.forward.draws import Changes
from worker.ops.norms import (
    add_rms_norm,
    add_rms_norm_ref,
    pair_norm,
    pair_norm_ref,
    rms_norm,
    rms_norm_ref,
    swiglu,
    swiglu_ref,
)
from worker.ops.philox import gumbel_ref
from worker.ops.rope import rope_inv_freq, rope_table
from worker.step import rows as step_rows
from worker.step.rows import gather_rows, gather_rows_ref

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.gpu(1)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STEP = {torch.float32: 2.0**-21, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
HIDDEN, MLP, VOCAB = 4096, 12288, 151936


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def close(got: Tensor, wanted: Tensor, share: float = 2e-3) -> None:
    """Nearly all equal, the rest off by a unit in the last place, for sums are in another order.

    A flipped rounding before the last one may show as two, and rope subtracts what it makes of it.
    """
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    off = (got.float() - wanted.float()).abs()
    assert bool((off <= 2 * STEP[got.dtype] * wanted.float().abs().clamp(min=1.0)).all())
    if got.dtype != torch.float32:
        assert float((got != wanted).float().mean()) < share


def replayed(run: Callable[[], Any]) -> Any:
    """What `run` leaves in its results when a graph of it is replayed twice."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 33, 256])
@pytest.mark.parametrize("hidden", [HIDDEN, 1000])
def test_norms_match_their_twins(m: int, hidden: int, dtype: torch.dtype) -> None:
    x, residual = noise(m, hidden, dtype=dtype), noise(m, hidden, dtype=dtype, seed=1)
    weight = noise(hidden, dtype=dtype, seed=2)
    close(rms_norm(x, weight, 1e-6), rms_norm_ref(x, weight, 1e-6))
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    wanted, wanted_total = add_rms_norm_ref(x, residual, weight, 1e-6)
    close(normed, wanted)
    assert torch.equal(total, wanted_total)
    assert torch.equal(add_rms_norm(x[:1], residual[:1], weight, 1e-6)[0], normed[:1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("normed", "hidden_first"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize(("m", "size"), [(1, 4096), (33, 192), (300, 2880)])
def test_pair_norm_matches_its_twin(m, size, normed, hidden_first, dtype) -> None:
    tokens, hidden = noise(500, size, dtype=dtype), noise(m, 3 * size, dtype=dtype, seed=1)
    ids = torch.randint(0, 500, (m,), generator=torch.Generator().manual_seed(0)).cuda()
    weights = [noise(size, dtype=dtype, seed=i) if normed else None for i in (2, 3)]
    given: Any = ids, tokens, hidden[:, size : 2 * size], *weights, 1e-6, hidden_first
    got = pair_norm(*given)
    close(got, pair_norm_ref(*given))
    if weights[0] is not None:  # bit for bit what the norms alone give
        token = rms_norm(tokens[ids], weights[0], 1e-6)
        assert torch.equal(got[:, size:] if hidden_first else got[:, :size], token)
    assert torch.equal(replayed(lambda: pair_norm(*given)), got)
    assert torch.equal(pair_norm(None, tokens[ids], *given[2:]), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 33, 256, 1030])
@pytest.mark.parametrize("mlp", [MLP, 1001])
def test_swiglu_matches_its_twin(m: int, mlp: int, dtype: torch.dtype) -> None:
    gate_up = noise(m, 2 * mlp, dtype=dtype) * 2
    close(swiglu(gate_up), swiglu_ref(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(32, 8, 128, 64), (14, 2, 64, 16), (8, 1, 256, 1), (6, 2, 80, 16), (0, 8, 128, 64)],
)
def test_qk_rope_store_matches_its_twin(
    heads, kv_heads, head_dim, page_size, normed, dtype, monkeypatch
):
    m, num_pages = 65, 200
    width = (heads + 2 * kv_heads) * head_dim
    qkv = noise(m, width + 64, dtype=dtype)[:, :width]
    qkv[-4:] = qkv[-1]  # padded rows, all on slot 0
    order = torch.randperm(num_pages * page_size - page_size, generator=torch.Generator())[:m]
    slots, positions = (order + page_size).cuda(), torch.randint(0, 4096, (m,)).cuda()
    slots[-4:] = positions[-4:] = 0
    table = rope_table(rope_inv_freq(head_dim, 1e6, None), 4096, torch.device("cuda"))
    weights = [noise(head_dim, dtype=dtype, seed=i) for i in (1, 2)]
    norms = HeadNorms(weights[0], weights[1], 1e-6) if normed else None
    results = []
    for op in (qk_rope_store, qk_rope_store_ref, qk_rope_store):
        monkeypatch.setattr(qk_rope_store_triton, "MANY", 1 if len(results) == 2 else 1024)
        shape = num_pages, kv_heads, 2, 2, page_size, head_dim
        memory = torch.full(shape, 7.0, dtype=dtype, device="cuda")
        caches = memory[:, :, 1, 0], memory[:, :, 1, 1]
        results.append((op(qkv, Rotation(table, positions), caches, slots, norms), memory))
    (q, memory), (q_ref, memory_ref), (of_many, memory_of_many) = results
    assert torch.equal(q, of_many)  # a row's bits are those of any number of tokens
    assert torch.equal(memory, memory_of_many)
    if heads:  # else there are keys and values only
        close(q, q_ref)
    close(memory, memory_ref)
    assert torch.equal(memory == 7.0, memory_ref == 7.0)
    if not normed:  # rope's products are not fused: equal bit for bit
        assert torch.equal(q, q_ref)
        assert torch.equal(memory, memory_ref)


def gaps(
    logits: Tensor, rows: SamplingRows, got: Tensor, wanted: Tensor, changes: Changes | None = None
) -> list[float]:
    """How far below the twin's choice each differing one stands, perturbed."""
    values = change(logits, rows, changes)
    values = values / torch.where(rows.temperature == 0, 1.0, rows.temperature)[:, None]
    values += gumbel_ref(rows.seed, rows.position, logits.shape[1])
    own, its = values.gather(1, got[:, None]), values.gather(1, wanted[:, None])
    return (its - own).flatten()[got != wanted].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m", [1, 32, 200])
def test_unfiltered_draws_are_the_twin_s(m: int, dtype: torch.dtype) -> None:
    logits = noise(m, VOCAB, dtype=dtype)
    mixed = [(0.0, 0.8, 1.0, 1.7)[i % 4] for i in range(m)]
    for temperature, tail in ((mixed, "random"), (0.0, "greedy")):
        rows = rows_of(m, "cuda", temperature=temperature)
        wanted = draw_ref(logits, rows, tail)  # type: ignore[arg-type]
        got = draw_triton(logits, rows, "random")
        off = gaps(logits, rows, got, wanted)
        assert all(abs(gap) < 1e-5 for gap in off), off
        assert len(off) <= m // 100
        assert torch.equal(replayed(lambda rows=rows: draw_triton(logits, rows, "random")), got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scale", [0.02, 1.0, 4.0])
def test_filtered_draws_are_the_twin_s(name: str, scale: float, dtype: torch.dtype) -> None:
    """Many rows; at most a few may see a token at top_p's border otherwise."""
    repeat = 20
    columns = {key: list(values) * repeat for key, values in CASES[name].items()}
    rows = rows_of(5 * repeat, "cuda", **columns)
    logits = (noise(5 * repeat, VOCAB) * scale).to(dtype)
    got = draw_triton(logits, rows, "filtered")
    assert int((got != draw_ref(logits, rows, "filtered")).sum()) <= 1
    assert torch.equal(replayed(lambda: draw_triton(logits, rows, "filtered")), got)
    for row in (0, 7, 99):
        alone = {each: getattr(rows, each)[[row]] for each in rows.__dataclass_fields__}
        assert draw_triton(logits[[row]], replace(rows, **alone), "filtered") == got[row]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "width"), [(10, 1), (40, 1), (10, 4)])
def test_changed_draws_are_the_twin_s(m: int, width: int, dtype: torch.dtype) -> None:
    """Penalties, biases, masks and drafts: greedy to the last bit, drawn up to the noise's."""
    rows, changes = changed_rows(m, VOCAB, width, "cuda")
    logits = made_of(changes, m, VOCAB, 1, dtype)
    greedy = replace(rows, temperature=torch.zeros_like(rows.temperature))
    got = draw_triton(logits, greedy, "random", changes=changes)
    assert torch.equal(got, draw_ref(logits, greedy, "greedy", changes))
    got = draw_triton(logits, rows, "random", changes=changes)
    wanted = draw_ref(logits, rows, "random", changes)
    off = gaps(logits, rows, got, wanted, changes)
    assert all(abs(gap) < 1e-5 for gap in off), off
    assert len(off) <= 1

    assert torch.equal(replayed(lambda: draw_triton(logits, rows, "random", changes=changes)), got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("m", "width"), [(40, 1), (10, 4)])
def test_filtered_changed_draws_are_the_twin_s(m: int, width: int, dtype: torch.dtype) -> None:
    rows, changes = changed_rows(m, VOCAB, width, "cuda", **FILTERS)
    logits = made_of(changes, m, VOCAB, 2, dtype)
    got = draw_triton(logits, rows, "filtered", changes=changes)
    assert int((got != draw_ref(logits, rows, "filtered", changes)).sum()) <= 1
    assert changes.masks is not None
    plain = ((rows.penalty_slot == 0) & (changes.masks.line == 0)).nonzero().flatten()
    alone = {each: getattr(rows, each)[plain] for each in rows.__dataclass_fields__}
    without = draw_triton(logits[plain], replace(rows, **alone), "filtered")
    assert torch.equal(got[plain], without)


@pytest.mark.parametrize("m", [32, 256])
def test_changed_draws_and_logprobs_allocate_no_f32_of_all_logits(m: int) -> None:
    rows, changes = changed_rows(m, VOCAB, device="cuda")
    logits = noise(m, VOCAB, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token = draw_triton(logits, rows, "filtered", changes=changes)
    logprobs(logits, token, 20)
    assert torch.cuda.max_memory_allocated() - before < logits.nbytes / 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "num_top"), [(1, 0), (32, 5), (256, 20)])
def test_logprobs_are_the_twin_s(m: int, num_top: int, dtype: torch.dtype) -> None:
    logits = noise(m, VOCAB, dtype=dtype) * 3
    logits[0] = 1.0  # of equal ones the lowest ids
    token = torch.randint(0, VOCAB, (m,), device="cuda")
    got, ids = replayed(lambda: logprobs(logits, token, num_top))
    wanted, wanted_ids = logprobs_ref(logits, token, num_top)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("n", [1, 32, 257])
def test_gathered_rows_are_the_twin_s(n: int) -> None:
    rows = torch.randint(0, 300, (n,), device="cuda")
    ints, floats, stop_ids = columns(300, "cuda")
    got = replayed(lambda: gather_rows(ints, floats, stop_ids, rows))
    wanted = gather_rows_ref(ints, floats, stop_ids, rows)
    for a, b in zip((*got[0], *got[1], got[2]), (*wanted[0], *wanted[1], wanted[2]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("width", "forced"), [(1, None), (3, None), (8, None), (4, 2)])
@pytest.mark.parametrize("n", [1, 32, 257])
def test_both_ends_of_a_step_are_the_twins(n: int, width: int, forced: int | None) -> None:
    rows = torch.cat((1 + torch.randperm(300)[:n], torch.zeros(2, dtype=torch.int64))).cuda()
    states = step_columns(300, 5, "cuda"), step_columns(300, 5, "cuda")
    check_ends(*states, rows, (step_rows.read_rows, step_rows.accept_rows), width, forced)
