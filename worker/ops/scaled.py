"""Products of weights in eight bits, y = x Wᵀ: both sides are e4m3 numbers times f32 scales.

A row of x has a scale a block of 128 columns, taken as it is: so a row's result depends on that
row alone, and nothing is calibrated. W has a scale for some rows and 128 columns, or for a row. A
sum over 128 columns is scaled in f32 before it enters the sum over all: as the published blocks
demand it, and because the tensor cores add e4m3 products with fewer bits.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.config.checkpoint.quantization import SCALE_BLOCK
from worker.ops.jit import aligned
from worker.ops.norms import add_rms_norm_ref, swiglu_ref
from worker.ops.op import op

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
FLOOR = 1e-10  # the least amax of a row of a block


class EightBitRows(NamedTuple):
    """x as a product in eight bits takes it, and as norms and gates may leave it."""

    values: Tensor  # see `room`, as of_rows
    of_rows: Tensor
    dtype: torch.dtype  # of x, and of the product
    x: Tensor | None = None  # itself, where it is read, too

    @property
    def shape(self) -> torch.Size:
        """That of x."""
        return self.values.shape


def room(m: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Empty (values, of_rows): [m, k] e4m3, and its scales [m, blocks of k] f32.

    Scales are contiguous along m. Both have memory for a multiple of 4 rows: torch's product wants
    that many, and columns of scales that begin at multiples of 16 bytes.
    """
    height = aligned(m)
    values = torch.empty(height, k, dtype=E4M3, device=device)
    of_rows = torch.empty(-(-k // SCALE_BLOCK), height, dtype=torch.float32, device=device)
    return values[:m], of_rows.t()[:m]


def eight_bits_ref(x: Tensor) -> tuple[Tensor, Tensor]:
    """(values, of_rows), as `room` has them; x is about values · of_rows. x: [m, k], any float."""
    m, k = x.shape
    values, of_rows = room(m, k, x.device)
    blocks = F.pad(x.float(), (0, -k % SCALE_BLOCK)).view(m, -(-k // SCALE_BLOCK), SCALE_BLOCK)
    amax = blocks.abs().amax(-1).clamp(min=FLOOR)
    inverse = amax.new_tensor(E4M3_MAX) / amax  # of a number, torch would multiply its reciprocal
    numbers = blocks * inverse.unsqueeze(-1)  # none passes 448 by half a step of e4m3
    return values.copy_(numbers.flatten(1)[:, :k].to(E4M3)), of_rows.copy_(amax * (1 / E4M3_MAX))


eight_bits = op(eight_bits_ref)


def eight_bit_rows(x: Any) -> EightBitRows:
    """x, a Tensor, in eight bits, unless it is so already."""
    return x if isinstance(x, EightBitRows) else EightBitRows(*eight_bits(x), x.dtype)


def add_rms_norm_eight_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(values, of_rows, x + residual) of eight_bits and of add_rms_norm, bit for bit.

    x, residual: [m, hidden] of one dtype; weight, total: see add_rms_norm_ref.
    """
    normed, residual = add_rms_norm_ref(x, residual, weight, eps, total)
    return *eight_bits_ref(normed), residual


def add_rms_norm_both_ref(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(values, of_rows, x + residual, the norm itself), as add_rms_norm_eight has them.

    x, residual: [m, hidden], as the norm.
    """
    normed, residual = add_rms_norm_ref(x, residual, weight, eps, total)
    return *eight_bits_ref(normed), residual, normed


def swiglu_eight_ref(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """eight_bits(swiglu(gate_up)), bit for bit; gate_up: [m, 2 · width] of any float."""
    return eight_bits_ref(swiglu_ref(gate_up))


add_rms_norm_eight = op(add_rms_norm_eight_ref)
add_rms_norm_both = op(add_rms_norm_both_ref)


def scaled_product_ref(
    values: Tensor,
    of_rows: Tensor,
    w: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    whole_blocks: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """(values · of_rows) (w · scales)ᵀ, rounded once: [m, n] of `dtype`.

    values, of_rows: see `room`; w: [n, k] e4m3; scales: [n / grain, blocks of k] f32, or with one
    column for all. whole_blocks: they are those of published blocks, which a library may multiply
    if they lie once for 128 rows. out: [m, n], where the result goes; None: to new memory.
    """
    (n, k), (height, width) = w.shape, scales.shape
    num_blocks = max(width, -(-k // SCALE_BLOCK))
    of_weights = scales.repeat_interleave(n // height, 0).expand(n, num_blocks)
    total = of_rows.new_zeros(len(values), n)
    for block, start in enumerate(range(0, k, SCALE_BLOCK)):
        at = slice(start, start + SCALE_BLOCK)
        part = F.linear(values[:, at].float(), w[:, at].float())
        total += part * (of_rows[:, block, None] * of_weights[:, block])
    return total.to(dtype) if out is None else out.copy_(total)


def scaled_gated_product_ref(
    values: Tensor,
    of_rows: Tensor,
    w: Tensor,
    scales: Tensor,
    dtype: torch.dtype,
    whole_blocks: bool = False,
) -> tuple[Tensor, Tensor]:
    """swiglu_eight(scaled_product(..)): of [m, n / 2]; w has gates in its first half, then ups."""
    return swiglu_eight_ref(scaled_product_ref(values, of_rows, w, scales, dtype))


def multiplies_eight_bits(device: torch.device) -> bool:
    """Whether products here are in e4m3: on Hopper, and on GPUs with as much shared memory.

    Tiles do not fit into that of compute capability 8.9 and 12. A CPU would have to make f32 of
    all weights in a step, which takes six times as long.
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
