"""Products of weights in four bits, y = x Wᵀ, whose x stays in 16: what the numbers are worth.

In memory all formats are alike: of every LINE columns 16 bits have the numbers of four, i, i + 8,
i + 16 and i + 24, from the lowest bits on; and every group of a row's columns has a scale. What its
dtype is says what the numbers are:

    scales   a number is                            |
    any float  (q - zero) · scale                   zero: 8, or one a group
    u8 (e8m0)  code · 2^(scale - 127)               code: e2m1, as CODES has them; groups of LINE
    e4m3       code · scale · the row's factor

(q - zero), and code · scale, are exact in bf16. So kernels multiply these and have f32 scales, or
factors, of sums: but for the order in which sums are added they compute the definition. For many
rows of x a library multiplies numbers that are rounded to x's dtype once.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.norms import swiglu
from worker.ops.op import op
from worker.ops.scaled import E4M3, multiplies_eight_bits

E8M0_BIAS, ZERO = 127, 8
MOST_E8M0 = 192  # 2^65; kernels take what is below 2^-62 for zeros, or next to them
SIGNS = (14, 12, 15, 13)  # bits of four codes' signs in 16; the others are the lowest, by threes
LINE = 32  # columns, whose numbers a thread of the kernels unpacks and joins in its registers
POSITIVE = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0
CODES = torch.tensor([*POSITIVE, *(-code for code in POSITIVE)])


def worth(
    values: Tensor, scales: Tensor, zeros: Tensor | None = None, factors: Tensor | None = None
) -> Tensor:
    """The numbers, f32 [.., n, 2 · bytes], whose last belong to no column if lines are padded.

    values: u8 [.., n, bytes], whole lines; scales: [.., n, groups], u8's see padded_groups; zeros:
    u8, of their shape;
    factors: f32 [.., n, 1].
    """
    is_code = scales.dtype in (torch.uint8, E4M3)
    q = unpacked(woven(values, back=True) if is_code else values)
    groups = q.unflatten(-1, (-1, LINE) if scales.dtype == torch.uint8 else (scales.shape[-1], -1))
    scales = scales[..., : groups.shape[-2]]
    if scales.dtype == torch.uint8:
        steps = torch.ones_like(scales, dtype=torch.float32).ldexp(scales.int() - E8M0_BIAS)
    else:
        steps = scales.float()
    if is_code:
        numbers = CODES.to(q.device)[groups.int()]
    else:
        numbers = groups.float() - (ZERO if zeros is None else zeros.unsqueeze(-1).float())
    numbers = (numbers * steps.unsqueeze(-1)).flatten(-2)
    return numbers if factors is None else numbers * factors


def packed_product_ref(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    factors: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x times the transposed numbers, summed up in f32 and rounded once: [m, n] of x's dtype.

    x: [m, k] any float; values, scales, zeros, factors: of [n, k], see `worth`; gated: its swiglu,
    [m, n / 2]; out: of the result, where it goes; None: to new memory.
    """
    w = worth(values, scales, zeros, factors)[:, : x.shape[1]]
    y = F.linear(x.float(), w).to(x.dtype)
    y = swiglu(y) if gated else y
    return y if out is None else out.copy_(y)


packed_product = op(packed_product_ref)


def multiplies_packed(device: torch.device) -> bool:
    """Whether products here take four bits: where eight are taken, too, whose tiles are as large.

    A CPU would dequantise all of them in every step.
    """
    return multiplies_eight_bits(device)


def as_packed(w: Tensor, groups: int, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A drawn matrix as (values, scales, factors); kind: of scales, which are f32 for any float.

    w: [.., k] f32, k even; scales are [.., groups], factors [.., 1].
    """
    blocks = w.unflatten(-1, (groups, -1))
    amax = blocks.abs().amax(-1, keepdim=True).clamp_(min=1e-12)
    factors = torch.full_like(w[..., :1], 2.0**-10)
    if kind not in (torch.uint8, E4M3):
        scales = amax / 7
        q = (blocks / scales).round() + ZERO
        return _paired(q.flatten(-2)), scales.squeeze(-1), factors
    if kind == torch.uint8:
        exponents = (amax / CODES[7]).log2().ceil()
        scales, steps = (exponents + E8M0_BIAS).to(kind), exponents.exp2()
    else:
        scales = (amax / CODES[7] / 2.0**-10).to(kind)
        steps = scales.float() * 2.0**-10
    parts = (blocks / steps.clamp(min=1e-12)).flatten(-2)
    between = (CODES[:7] + CODES[1:8]).to(w.device) / 2
    q = torch.bucketize(parts.abs(), between) + 8 * (parts < 0)
    return woven(_paired(q)), scales.squeeze(-1), factors


def padded_groups(groups: int) -> int:
    """Scales of e8m0 that a row has in memory: whole fours, the last of no columns and zeros."""
    return -(-groups // 4) * 4


def bytes_of(columns: int) -> int:
    """Of a row, whose last line may be padded."""
    return -(-columns // LINE) * (LINE // 2)


def _paired(q: Tensor) -> Tensor:
    """u8 [.., bytes] of numbers [.., k] of four bits, in whole lines."""
    q = _lines(q.to(torch.uint8), LINE)
    return torch.stack(tuple(q[..., i, :] | q[..., i + 1, :] << 4 for i in (0, 2)), -1).flatten(-3)


@cache
def _weaving(device: torch.device, *, back: bool) -> Tensor:
    """i16 [65536]: of what is in 16 bits, as i32 counts, how it is woven."""
    plain = torch.arange(1 << 16, dtype=torch.int32)
    found = torch.zeros_like(plain)
    for place, sign in enumerate(SIGNS):
        code = plain >> 4 * place & 15
        found |= (code & 7) << 3 * place | code >> 3 << sign
    return (found.argsort() if back else found).to(torch.int16).to(device)


def woven(values: Tensor, *, back: bool = False) -> Tensor:
    """Lines of codes of e2m1, from plain ones, or back: u8 [.., bytes]."""
    words = values.contiguous().view(torch.int16).int() & 0xFFFF
    return _weaving(values.device, back=back)[words].view(torch.uint8)


def unpacked(values: Tensor) -> Tensor:
    """u8 [.., 2 · bytes] of four bits, of [.., bytes] in whole lines."""
    lines = values.unflatten(-1, (-1, LINE // 4, 2))
    return torch.stack((lines & 15, lines >> 4), -1).movedim(-3, -1).flatten(-4)


def as_lines(pairs: Tensor) -> Tensor:
    """u8 [.., bytes] in whole lines, of bytes with neighbours' numbers, the former in low bits."""
    pairs = _lines(pairs, LINE // 2)
    first, second = pairs[..., ::2, :], pairs[..., 1::2, :]
    even, odd = first & 15 | second << 4, first >> 4 | second & 240
    return torch.stack((even, odd), -1).movedim(-3, -1).flatten(-4)


def _lines(x: Tensor, size: int) -> Tensor:
    """[.., lines, 4, size / 4] of x [.., k], padded."""
    return F.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, 4, size // 4))
