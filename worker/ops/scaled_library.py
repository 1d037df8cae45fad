"""Products in eight bits of many rows by torch's scaled_mm, for weights whose blocks lie whole.

On an H200 (torch 2.11) cuBLASLt takes 0.63 to 0.67 of its bf16 products' time from 1024 rows on,
and half to nine tenths of our tiles' from 65 rows on (benchmarks/results/eight_bits.md).
"""

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from worker.config.checkpoint.quantization import SCALE_BLOCK
from worker.ops.scaled import E4M3

log = logging.getLogger("kvlane.kernels")

TOLERANCE = 2**-6  # of the start-up comparison, of the result's norm


def suits(w: Tensor, scales: Tensor, dtype: torch.dtype) -> bool:
    """Whether the library takes `w` [n, k] with `scales` as they lie, for a `dtype`.

    Scales need columns of 16 bytes.
    """
    n, k = w.shape
    fits = n % SCALE_BLOCK == 0 and k % (4 * SCALE_BLOCK) == 0
    one_each = scales.shape == (n // SCALE_BLOCK, k // SCALE_BLOCK) and scales.is_contiguous()
    return fits and one_each and dtype == torch.bfloat16


def multiplied(values: Tensor, of_rows: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    """(values · of_rows) (w · scales)ᵀ, bf16 [m, n].

    values: [m, k] e4m3, m a multiple of 4; of_rows: [m, blocks of k] f32, contiguous along m; w:
    [n, k] e4m3; scales: [blocks of n, blocks of k], contiguous.
    """
    recipe: Any = torch.nn.functional.ScalingType  # pyright: ignore[reportAttributeAccessIssue]
    return torch.nn.functional.scaled_mm(  # pyright: ignore[reportAttributeAccessIssue]
        values, w.t(), of_rows, recipe.BlockWise1x128, scales.t(), recipe.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip


@cache
def agrees(device: torch.device) -> bool:
    """Whether this torch has such a product on this device, and it is the definition's.

    Computes one. False is logged with the reason; products are then our own kernel's.
    """
    m, n, k = 132, 2 * SCALE_BLOCK, 4 * SCALE_BLOCK
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    of_rows = drawn(k // SCALE_BLOCK, m).exp().t()
    scales = drawn(n // SCALE_BLOCK, k // SCALE_BLOCK).exp()
    values, w = drawn(m, k).to(E4M3), drawn(n, k).to(E4M3)
    whole = scales.repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
    exact = values.float() * of_rows.repeat_interleave(SCALE_BLOCK, 1) @ (w.float() * whole).t()
    try:
        off = float((multiplied(values, of_rows, w, scales) - exact).norm() / exact.norm())
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as e:
        log.info("torch %s multiplies no blocks of e4m3 here: %s", torch.__version__, e)
        return False
    if not off < TOLERANCE:
        log.warning("torch's product of blocks of e4m3 is off by %.3g: not used", off)
    return off < TOLERANCE
