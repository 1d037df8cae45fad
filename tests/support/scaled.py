"""Products in eight bits, of what is in more."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from worker.config.checkpoint.quantization import SCALE_BLOCK
from worker.ops.scaled import eight_bits, scaled_product_ref


def product_of(x: Tensor, *rest: Any, by: Callable[..., Any] = scaled_product_ref) -> Any:
    """by(x in eight bits, w, scales, x's dtype, ..); rest: w, scales, and what `by` takes more."""
    w, scales, *more = rest
    return by(*eight_bits(x), w, scales, x.dtype, *more)


def worth(values: Tensor, scales: Tensor) -> Tensor:
    """In f64; values: [n, k]; scales: [n / grain, blocks of k], or with one column."""
    n, k = values.shape
    whole = scales.double().repeat_interleave(n // len(scales), 0)
    if scales.shape[1] > 1:
        whole = whole.repeat_interleave(SCALE_BLOCK, 1)[:, :k]
    return values.double() * whole
