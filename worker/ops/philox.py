"""Counter-based noise: Philox4x32-10, so that a draw depends on (seed, position, token id) alone.

Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011. The same constants and rounds as Random123 and Triton's tl.philox.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MUL = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def _mul_hi_lo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low half of the 64-bit product; int64 wraps, which leaves all 64 bits right."""
    product = b * a
    return (product >> 32) & _MASK, product & _MASK


def philox_ref(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    """Four words of 32 random bits a counter: i64 in [0, 2**32), of the broadcast shape.

    c0..c3: i64 counters in [0, 2**32). seed: i64; its low and high 32 bits are the two key words.
    """
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(ROUNDS):
        hi0, lo0 = _mul_hi_lo(_MUL[0], c0)
        hi1, lo1 = _mul_hi_lo(_MUL[1], c2)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel_ref(seed: Tensor, position: Tensor, num_ids: int, first: int = 0) -> Tensor:
    """Standard Gumbel noise for some token ids at one position a row.

    seed: [num_rows] i64; position: [num_rows] i64, index of the token to be drawn in prompt +
    output; first: of the `num_ids` token ids, a multiple of 4. Returns [num_rows, num_ids] f32;
    entry (r, v) depends on (seed[r], position[r], first + v) alone.
    """
    assert first % 4 == 0
    blocks = first // 4 + torch.arange(-(-num_ids // 4), device=seed.device)
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    words = philox_ref(blocks[None, :], position[:, None], zero, zero, seed[:, None])
    bits = torch.stack(words, dim=-1).flatten(1)[:, :num_ids]
    # 23 bits, centred: exact in f32 and never 0 or 1 (24 bits and a half round to 1).
    uniform = ((bits >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))
