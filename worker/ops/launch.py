"""Launch options that the small kernels share."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def overlap(x: Tensor, **options: Any) -> dict[str, Any]:
    """`options`, and those by which a kernel over `x` starts while the kernel before it still ends.

    Programmatic dependent launch, compute capability 9.0 and later. A program calls gdc_wait
    before it touches anything but weights, so the kernel may follow any other kernel.
    """
    if has_dependent_launch(x):
        return {"PDL": True, "launch_pdl": True, **options}
    return {"PDL": False, **options}


def has_dependent_launch(x: Tensor) -> bool:
    """Whether the device of `x` starts a kernel while the one before it ends: Hopper and later."""
    return x.is_cuda and _capability(x.device)[0] >= 9


def aligned(n: int) -> int:
    """The smallest multiple of 4 that is not below n: the stride of columns of n values.

    Columns of 4 or 8 bytes a value then begin at multiples of 16 bytes, else Triton compiles anew.
    """
    return -(-n // 4) * 4


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
