"""Compiles the Triton kernels of a step by many threads at once, before any of them runs.

Triton compiles a kernel where it is first launched, one after the other: about a minute of the
first start on a machine, with one core busy. In `compile_ahead` launches only ask for kernels.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from importlib import import_module
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from worker.ops.jit import replaced, triton

MAX_THREADS = 32  # the compiler takes about 100 MB a thread
# Threads that parse Python share its count of the depth (python/cpython#106905, to 3.11.7 and
# 3.12.1): now and then that is a SystemError. So kernels are parsed one after the other; but
# other threads parse, too, for example where a traceback is printed.
_PARSING = threading.Lock()
PARSES = 5  # of one kernel, until the error is believed


def compile_ahead(step: Callable[[], object]) -> int:
    """Compile every Triton kernel that `step` launches, and run all else of it.

    Memory that a kernel would write stays as it was, and memory that `step` allocates is zeros: ids
    and rows that torch's own ops read from it are then valid. So its values must not steer `step`,
    which holds for whatever can be captured as a graph. Other threads launch as ever. Returns the
    number of kernels; raises an error of the compiler's.
    """
    return copy_context().run(_compile_ahead, step)  # in which an error leaves Triton's mode active


def _compile_ahead(step: Callable[[], object]) -> int:
    launch, thread = triton.runtime.jit.JITFunction.run, threading.get_ident()

    def ask(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != thread:
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)
        asked: Any = launch(kernel, *args, grid=grid, warmup=True, **options)
        future = getattr(asked, "future", None)  # none: it had been compiled
        if future is not None and future.done():
            asked.result()  # makes the next launch of the same kernel find it
        return asked

    def parse(kernel: Any) -> Any:
        with _PARSING:
            for _ in range(PARSES - 1):
                with suppress(SystemError):
                    return parse_alone(kernel)
            return parse_alone(kernel)

    def load_alone(name: str, path: str) -> Any:
        # CPython has one module of a name. A launcher that is loaded again puts its function there,
        # where another thread may be about to take its own: so files have names of their own.
        return load_module(f"{os.path.basename(os.path.dirname(path))}.{name}", path)

    # The class that kernels share with constexpr functions, which are parsed, too.
    owner = next(base for base in triton.runtime.jit.JITFunction.__mro__ if "parse" in vars(base))
    build: Any = import_module("triton.runtime.build")
    parse_alone, load_module = owner.parse, build._load_module_from_path
    with (
        replaced(build, "_load_module_from_path", load_alone),
        replaced(owner, "parse", parse),
        _Loading(triton.runtime.driver.active) as pool,
        triton.AsyncCompileMode(pool) as mode,
        replaced(triton.runtime.jit.JITFunction, "run", ask),
        _Zeros(),
    ):
        step()
    return len(mode.future_kernels)


class _Loading(ThreadPoolExecutor):
    """Compiles kernels, and loads them onto the caller's device."""

    def __init__(self, driver: Any) -> None:
        num_threads = min(len(os.sched_getaffinity(0)), MAX_THREADS)
        device = driver.get_current_device()
        super().__init__(num_threads, "compile", driver.set_current_device, (device,))

    def submit(self, fn: Callable[[], Any]) -> Future[Any]:  # pyright: ignore
        """Begin `fn`, which compiles one kernel."""

        def load() -> Any:
            kernel = fn()
            assert kernel.run  # makes its launcher: Triton 3.6 and before, with a C compiler
            return kernel

        return super().submit(load)


class _Zeros(TorchFunctionMode):
    """Makes torch allocate zeros where it is asked for memory of any content."""

    _ALLOCATE = torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in self._ALLOCATE else made
