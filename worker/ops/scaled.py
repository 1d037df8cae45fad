"""Products of weights in eight bits: y = x Wᵀ, where both sides are e4m3 numbers times f32 scales.

Of x each row has a scale for every 128 columns, taken as it is: so a row's result depends on that
row alone, and nothing is calibrated. W has a scale for some rows and 128 columns, or for a row. A
sum over 128 columns is scaled in f32 before it enters the sum over all: as the published blocks
demand it, and because the tensor cores add e4m3 products with fewer bits. (MODELS.md 3.)
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.norms import add_rms_norm_ref, swiglu_ref
from worker.ops.op import op

E4M3 = torch.float8_e4m3fn
BLOCK = 128  # columns that share a scale
LARGEST = 448.0  # of e4m3
FLOOR = 1e-10  # the least amax of a row of a block


class EightBitRows(NamedTuple):
    """What a product in eight bits takes, in place of x: see eight_bits_ref."""

    values: Tensor  # [m, k] e4m3
    scales: Tensor  # [m, blocks of k] f32, contiguous along m
    dtype: torch.dtype  # of x, and of the product

    @property
    def shape(self) -> torch.Size:
        """That of x."""
        return self.values.shape


def eight_bits_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as e4m3 [m, k], and its scales [m, blocks of k] f32, contiguous along m.

    x: [m, k] of any float. x is about values · scales.
    """
    m, k = x.shape
    blocks = F.pad(x.float(), (0, -k % BLOCK)).view(m, -1, BLOCK)
    amax = blocks.abs().amax(-1).clamp(min=FLOOR)
    inverse = amax.new_tensor(LARGEST) / amax  # of a number, torch would multiply its reciprocal
    values = blocks * inverse.unsqueeze(-1)  # none passes 448 by half a step of e4m3
    return values.view(m, -1)[:, :k].to(E4M3), (amax * (1 / LARGEST)).t().contiguous().t()


eight_bits = op(eight_bits_ref)


def scaled(x: Tensor | EightBitRows) -> EightBitRows:
    """x in eight bits, unless it is so already."""
    return x if isinstance(x, EightBitRows) else EightBitRows(*eight_bits(x), x.dtype)


def add_rms_norm_eight_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, scales, x + residual) of eight_bits and of add_rms_norm, bit for bit."""
    normed, residual = add_rms_norm_ref(x, residual, weight, eps, total)
    return *eight_bits_ref(normed), residual


def swiglu_eight_ref(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """eight_bits(swiglu(gate_up)), bit for bit; gate_up: [m, 2 · width]."""
    return eight_bits_ref(swiglu_ref(gate_up))


add_rms_norm_eight = op(add_rms_norm_eight_ref)
swiglu_eight = op(swiglu_eight_ref)


def scaled_product_ref(
    x: Tensor,
    of_rows: Tensor,
    w: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    whole_blocks: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """(x · of_rows) (w · scales)ᵀ, rounded once: [m, n] of `dtype`.

    x, of_rows: see EightBitRows; w: [n, k] e4m3; scales: [n / grain, blocks of k] f32, or with one
    column for all. whole_blocks: they are equal within each 128 rows, so that a library for
    published blocks may multiply. out: [m, n], where the result goes; None: to new memory.
    """
    (n, k), (height, width) = w.shape, scales.shape
    of_weights = scales.repeat_interleave(n // height, 0).expand(n, max(width, -(-k // BLOCK)))
    total = of_rows.new_zeros(len(x), n)
    for block, start in enumerate(range(0, k, BLOCK)):
        at = slice(start, start + BLOCK)
        part = F.linear(x[:, at].float(), w[:, at].float())
        total += part * (of_rows[:, block, None] * of_weights[:, block])
    return total.to(dtype) if out is None else out.copy_(total)


def scaled_gated_product_ref(
    x: Tensor,
    of_rows: Tensor,
    w: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    whole_blocks: bool = False,
) -> tuple[Tensor, Tensor]:
    """swiglu_eight(scaled_product(..)): of [m, n / 2]; w has gates in its first half, then ups."""
    return swiglu_eight_ref(scaled_product_ref(x, of_rows, w, scales, dtype))


def multiplies_eight_bits(device: torch.device) -> bool:
    """Whether products here are in e4m3: on Hopper, and on what has as much shared memory.

    Tiles do not fit into that of compute capability 8.9 and 12. A CPU would have to make f32 of
    each weight in each step, which takes six times as long.
    """
    if device.type != "cuda":
        return False
    return (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)


def strides_of(scales: Tensor | None) -> tuple[int, int]:
    """Elements to the next rows' scale, and to that of the next block of columns."""
    if scales is None:
        return 0, 0
    return scales.stride(0), scales.stride(1) if scales.shape[1] > 1 else 0


scaled_product = op(scaled_product_ref)
scaled_gated_product = op(scaled_gated_product_ref)
