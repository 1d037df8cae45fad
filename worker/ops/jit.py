"""Triton where it is installed; without it the kernel files still import, for their torch twins.

With TRITON_INTERPRET=1 set before the import, every kernel runs on CPU tensors instead.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

if TYPE_CHECKING:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]

    enter: Any
    gdc_launch_dependents: Any
    gdc_wait: Any
    prefetch: Any
elif HAS_TRITON:
    import triton
    import triton.language as tl

    # Programmatic dependent launch, compute capability 9.0: let the next kernel start; wait for the
    # kernel before.
    gdc_launch_dependents = tl.extra.cuda.gdc_launch_dependents
    gdc_wait = tl.extra.cuda.gdc_wait

    @triton.jit
    def enter(PDL: "tl.constexpr"):
        """What a kernel begins with that may be resident before the one before it has ended."""
        if PDL:
            gdc_wait()
            gdc_launch_dependents()

    @triton.jit
    def prefetch(rows, K, AHEAD: "tl.constexpr"):
        """Ask for the first values of rows of weights of length K, up to AHEAD (a power of two).

        For a kernel that still waits for the one before it; they come into the L2.
        """
        LINE: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth  # values of 128 bytes
        at = tl.arange(0, AHEAD // LINE) * LINE
        lines = rows[:, None] + tl.where(at < K, at, 0)[None, :]
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(
            asm, "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
else:

    def _jit(function: Any = None, **_options: Any) -> Any:
        return function if function is not None else _jit

    triton = tl = SimpleNamespace(jit=_jit, constexpr=lambda value: value)
    enter = gdc_launch_dependents = gdc_wait = prefetch = None


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give the attribute `name` of `owner` another value within the block."""
    former = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)
