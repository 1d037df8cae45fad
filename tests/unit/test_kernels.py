"""Each reference op against its formula in float64, written another way."""

import math

import pytest
import torch

from worker.attention.qk_rope_store import rope_ref, store_kv_ref
from worker.ops.norms import add_rms_norm, rms_norm, swiglu
from worker.ops.rope import rope_inv_freq, rope_table


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0.04)])
@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 32)])
def test_rms_norm_matches_the_formula(dtype, bound, shape):
    x, weight = noise(*shape, dtype=dtype), noise(shape[-1], dtype=dtype, seed=1)
    rms = torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True) / math.sqrt(shape[-1])
    expected = x.double() / torch.sqrt(rms**2 + 1e-6) * weight.double()
    out = rms_norm(x, weight, 1e-6)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() < bound


def test_rms_norm_reduces_bf16_in_f32():
    x = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    x[0, ::2] = 1.0078125  # a bf16 sum of 4096 squares would stop at 256
    weight = torch.ones(4096, dtype=torch.bfloat16)
    assert (rms_norm(x, weight, 1e-6).float() - 1.0).abs().max() < 0.01


def test_add_rms_norm_is_the_sum_then_the_norm_and_writes_neither_input():
    x, residual, weight = noise(5, 64), noise(5, 64, seed=1), noise(64, seed=2)
    x_before, residual_before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x_before + residual_before)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))
    assert torch.equal(x, x_before)
    assert torch.equal(residual, residual_before)


def test_swiglu_gates_the_second_half_by_the_first():
    gate, up = noise(7, 24), noise(7, 24, seed=1)
    expected = gate.double() / (1 + torch.exp(-gate.double())) * up.double()
    assert (swiglu(torch.cat((gate, up), -1)).double() - expected).abs().max() < 1e-6


@pytest.mark.parametrize("head_dim", [32, 128])
def test_rope_is_a_complex_rotation_of_pairs(head_dim):
    q, k = noise(6, 4, head_dim), noise(6, 2, head_dim, seed=1)
    positions = torch.tensor([0, 1, 2, 77, 500, 1023])
    table = rope_table(rope_inv_freq(head_dim, 1e4, None), 1024, torch.device("cpu"))
    got = rope_ref(q, k, positions, table)
    half = head_dim // 2
    rates = torch.tensor([1e4 ** (-2 * i / head_dim) for i in range(half)], dtype=torch.float64)
    turn = torch.polar(torch.ones(6, 1, half).double(), (positions[:, None] * rates)[:, None])
    for x, out in zip((q, k), got, strict=True):
        rotated = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
        expected = torch.cat((rotated.real, rotated.imag), -1)
        assert out.shape == x.shape
        assert (out.double() - expected).abs().max() < 5e-4  # angles up to 1023 rad in f32


@pytest.mark.parametrize("page_size", [1, 16])
def test_store_kv_writes_the_mapped_slots_and_no_other(page_size):
    # Strided as in the pool: [page, head, layer, k|v, token, head_dim], layer 1 of 2.
    memory = torch.zeros(5, 2, 2, 2, page_size, 8)
    k_cache, v_cache = memory[:, :, 1, 0], memory[:, :, 1, 1]
    slots = torch.tensor([4 * page_size + page_size - 1, page_size, 2 * page_size])
    k, v = noise(3, 2, 8), noise(3, 2, 8, seed=1)
    store_kv_ref(k, v, (k_cache, v_cache), slots)
    for i, slot in enumerate(slots.tolist()):
        assert torch.equal(k_cache[slot // page_size, :, slot % page_size], k[i])
        assert torch.equal(v_cache[slot // page_size, :, slot % page_size], v[i])
    assert int((memory != 0).sum()) == 2 * 3 * 2 * 8
