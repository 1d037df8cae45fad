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
elif HAS_TRITON:
    import triton
    import triton.language as tl

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
    enter = gdc_launch_dependents = gdc_wait = None


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give the attribute `name` of `owner` another value within the block."""
    former = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)
