"""Each reference op against its formula in float64, Philox against Random123's known answers."""

import math

import pytest
import torch

from worker.attention.qk_rope_store import rope_ref, store_kv_ref
from worker.ops import philox
from worker.ops.norms import add_rms_norm, rms_norm, swiglu
from worker.ops.philox import gumbel_ref, philox_ref
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


# Random123, tests/kat_vectors: philox4x32 10; counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def signed(key: tuple[int, int]) -> int:
    """The two key words as one int64."""
    value = key[0] | key[1] << 32
    return value - (1 << 64) if value >> 63 else value


def test_known_answers_of_counters_together() -> None:
    counters = [torch.tensor([case[0][i] for case in KNOWN]) for i in range(4)]
    keys = torch.tensor([signed(case[1]) for case in KNOWN])
    words = torch.stack(philox_ref(*counters, seed=keys), -1)
    assert words.tolist() == [list(case[2]) for case in KNOWN]


def test_noise_of_a_token_is_word_v_mod_4_of_block_v_div_4() -> None:
    seeds = torch.tensor([0, 7, 2**63 - 1, 2**40 + 3])
    positions, zero = torch.tensor([0, 1, 5_000, 2**31 + 5]), torch.tensor(0)
    noise = gumbel_ref(seeds, positions, 11)
    assert noise.shape == (4, 11)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for token in range(11):
            words = philox_ref(torch.tensor(token // 4), position, zero, zero, seed)
            word = int(words[token % 4])
            exact = -math.log(-math.log((word + 0.5) / 2**32))
            assert noise[row, token].item() == pytest.approx(exact, abs=2e-3, rel=2e-3)


def test_noise_does_not_depend_on_the_batch_or_the_vocabulary() -> None:
    seeds, positions = torch.tensor([3, 3, 9]), torch.tensor([4, 5, 4])
    noise = gumbel_ref(seeds, positions, 50)
    for row in range(3):
        alone = gumbel_ref(seeds[row : row + 1], positions[row : row + 1], 33)
        assert torch.equal(alone[0], noise[row, :33])
    assert len({tuple(row.tolist()) for row in noise}) == 3


@pytest.mark.parametrize("word", [0, 0xFF, 0x1FF, 0x80000000, 0xFFFFFEFF, 0xFFFFFF00, 0xFFFFFFFF])
def test_noise_is_finite_for_every_word(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    """Infinite noise would make its token win whatever its probability is."""
    words = (torch.tensor([[word]]),) * 4
    monkeypatch.setattr(philox, "philox_ref", lambda *_: words)
    noise = gumbel_ref(torch.tensor([0]), torch.tensor([0]), 4)
    assert torch.isfinite(noise).all(), f"word {word:#x} gives {noise[0, 0]}"


def test_noise_is_gumbel_and_independent_between_neighbours() -> None:
    from scipy.special import kolmogorov  # stats takes a second more

    noise = gumbel_ref(torch.arange(40), torch.arange(40) * 17, 2_500)
    wanted = (-(-noise.flatten().double().sort().values).exp()).exp()  # at each, by the law
    share = torch.arange(len(wanted) + 1) / len(wanted)
    gap = torch.maximum(share[1:] - wanted, wanted - share[:-1]).max().item()
    assert kolmogorov(gap * math.sqrt(len(wanted))) > 1e-3
    for left, right in (
        (noise[:, :-1], noise[:, 1:]),
        (noise[:, :-4], noise[:, 4:]),
        (noise[:-1], noise[1:]),
        (noise[:, :1250], noise[:, 1250:]),
    ):
        pairs = torch.stack((left.flatten(), right.flatten()))
        assert abs(torch.corrcoef(pairs)[0, 1].item()) < 5 / math.sqrt(left.numel())
