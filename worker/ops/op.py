"""An op: a definition in plain torch, and a Triton kernel that computes the same on a GPU.

The definition `NAME_ref` stands in `FILE.py`, its kernel's launcher `NAME_triton` in
`FILE_triton.py` beside it. A CPU never imports the latter.
"""

import functools
import importlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def op(definition: Callable[P, R]) -> Callable[P, R]:
    """`definition`, called NAME_ref, computed by its kernel where its tensors are on a GPU.

    With a torch that knows no GPU it is `definition` itself.
    """
    if not torch.backends.cuda.is_built():
        return definition
    name = definition.__name__.removesuffix("_ref")
    kernel: Callable[P, R] | None = None

    @functools.wraps(definition)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal kernel
        if not next(x.is_cuda for x in args if isinstance(x, Tensor)):
            return definition(*args, **kwargs)
        if kernel is None:
            module = importlib.import_module(f"{definition.__module__}_triton")
            kernel = getattr(module, f"{name}_triton")
        assert kernel is not None
        return kernel(*args, **kwargs)

    run.__name__ = run.__qualname__ = name
    return run
