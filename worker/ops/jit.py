"""Triton where it is installed, and how kernels are launched.

Without it the kernel files still import, for their torch twins. With TRITON_INTERPRET=1 set before
the import, every kernel runs on CPU tensors instead.
"""

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

log = logging.getLogger("kvlane.kernels")
HAS_TRITON = importlib.util.find_spec("triton") is not None

if TYPE_CHECKING:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    INTERPRETED: Any
    TensorDescriptor: Any
    enter: Any
    gdc_launch_dependents: Any
    gdc_wait: Any
elif HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    # Whether kernels run in the interpreter: a constant that they read as well.
    INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
    # Programmatic dependent launch (sm_90): let the next kernel start; wait for the one before.
    gdc_launch_dependents = tl.extra.cuda.gdc_launch_dependents
    gdc_wait = tl.extra.cuda.gdc_wait

    @triton.jit
    def enter(PDL: "tl.constexpr"):
        """Begin a kernel that may be resident before the one before it has ended."""
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
else:

    def _jit(function: Any = None, **_options: Any) -> Any:
        return function if function is not None else _jit

    triton = tl = SimpleNamespace(jit=_jit, constexpr=lambda value: value)
    INTERPRETED, TensorDescriptor, enter = False, None, None
    gdc_launch_dependents, gdc_wait = None, None


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give the attribute `name` of `owner` another value within the block."""
    former = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)


def overlap(x: Tensor, **options: Any) -> dict[str, Any]:
    """`options`, and those by which a kernel over `x` starts while the kernel before it still ends.

    Programmatic dependent launch, compute capability 9.0 and later. A program calls gdc_wait
    before it touches anything but weights, so the kernel may follow any other kernel; latents' read
    items before, behind whose plan another kernel has waited in full.
    """
    if has_dependent_launch(x):
        return {"PDL": True, "launch_pdl": True, **options}
    return {"PDL": False, **options}


def has_dependent_launch(x: Tensor) -> bool:
    """Whether the device of `x` starts a kernel while the one before it ends: Hopper and later."""
    return x.is_cuda and _capability(x.device)[0] >= 9


def is_hopper(x: Tensor) -> bool:
    """Whether the device of `x` has the instructions that Hopper alone has."""
    return x.is_cuda and _capability(x.device) == (9, 0)


@cache
def from_gluon(module: str, name: str) -> Any:
    """What a module in Gluon has by a name, or None, which is told, if it lacks what that needs."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError) as missing:
        log.warning("Triton's Gluon is not as expected: prompts are slower (%s)", missing)
        return None


def aligned(n: int) -> int:
    """The smallest multiple of 4 that is not below n: the stride of columns of n values.

    Columns of 4 or 8 bytes a value then begin at multiples of 16 bytes, else Triton compiles anew.
    """
    return -(-n // 4) * 4


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << (n - 1).bit_length()


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; for what is no GPU, those of an H200."""
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 132


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
