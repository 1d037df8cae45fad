"""An op: a definition in plain torch, and a Triton kernel that computes the same on a GPU.

The definition `NAME_ref` stands in `FILE.py`, its kernel's launcher `NAME_triton` in
`FILE_triton.py` beside it. A CPU never imports the latter.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class op(Generic[P, R]):
    """`definition`, computed by its kernel where its tensors are on a CUDA device.

    definition: called `NAME_ref`.
    """

    def __init__(self, definition: Callable[P, R]) -> None:
        self.definition = definition
        self.__doc__ = definition.__doc__
        self._kernel: Callable[P, R] | None = None

    @property
    def kernel(self) -> Callable[P, R]:
        """The launcher of the kernel; imports it at its first use."""
        if self._kernel is None:
            name = self.definition.__name__.removesuffix("_ref")
            module = importlib.import_module(f"{self.definition.__module__}_triton")
            self._kernel = getattr(module, f"{name}_triton")
        return self._kernel

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The definition's result."""
        on_cuda = next(x.is_cuda for x in args if isinstance(x, Tensor))
        return (self.kernel if on_cuda else self.definition)(*args, **kwargs)
