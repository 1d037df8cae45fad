"""Kernels compiled ahead of their first launch: each once, really, and none of them runs.

Without a GPU: only the driver that describes one is a double, the compiler is Triton's own.
"""

from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

from tests.support.interpreted import INTERPRETED, WHY
from worker.ops.compile_ahead import compile_ahead
from worker.ops.norms_triton import _rms_norm_kernel, _swiglu_kernel, rms_norm_triton, swiglu_triton

triton = pytest.importorskip("triton", reason=WHY)
pytestmark = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled for the interpreter")


class Hopper:
    """A driver of one sm_90 that loads kernels and cannot launch them."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.utils = self

    def set_current_device(self, device: int) -> None:
        assert device == 0

    def launcher_cls(self, src: object, metadata: object) -> Callable[..., None]:
        def launch(*args: object) -> None:
            raise AssertionError("launched")

        return launch

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        assert binary.startswith(b"\x7fELF")
        self.loaded.append(name)
        return (1, 2, 32, 0, 1024)  # module, function, registers, spills, threads

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(autouse=True)
def driver(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hopper]:
    """An sm_90, an empty cache of kernels, and kernels that no test before has asked for."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    hopper = Hopper()
    with mock.patch.object(triton.runtime.driver, "_active", hopper):
        for kernel in (_rms_norm_kernel, _swiglu_kernel):
            kernel.device_caches.clear()
        yield hopper
        for kernel in (_rms_norm_kernel, _swiglu_kernel):
            kernel.device_caches.clear()


def norm_and_gate(rows: int) -> torch.Tensor:
    x = torch.ones(rows, 64, dtype=torch.bfloat16)
    normed = rms_norm_triton(x, torch.ones(64, dtype=torch.bfloat16), 1e-6)
    return swiglu_triton(normed)


def test_each_kernel_is_compiled_and_loaded_once_and_none_runs(driver: Hopper):
    found: list[torch.Tensor] = []
    assert compile_ahead(lambda: found.extend(norm_and_gate(16) for _ in range(3))) == 2
    assert [each.abs().sum().item() for each in found] == [0.0] * 3
    assert sorted(driver.loaded) == ["_rms_norm_kernel", "_swiglu_kernel"]
    assert compile_ahead(lambda: norm_and_gate(16)) == 0
    with pytest.raises(AssertionError, match="launched"):
        norm_and_gate(16)
    assert len(driver.loaded) == 2


def test_ids_that_a_kernel_would_have_written_are_valid(monkeypatch: pytest.MonkeyPatch):
    """torch's own ops do run; an id beyond the table ends a CUDA context."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # memory of any content is then filled with the worst
    try:
        assert torch.empty(3, dtype=torch.int64).min() > 1000
        table, like = torch.ones(4, 2), torch.ones(3, dtype=torch.int64)

        def step() -> None:
            for ids in (torch.empty(3, dtype=torch.int64), torch.empty_like(like)):
                torch.nn.functional.embedding(ids, table)
            torch.nn.functional.embedding(like.new_empty(3), table)

        assert compile_ahead(step) == 0
    finally:
        torch.use_deterministic_algorithms(was)


def test_what_does_not_compile_is_an_error_and_launches_are_as_before():
    launch = triton.runtime.jit.JITFunction.run

    @triton.jit
    def broken(x):
        return x.no_such_thing

    with pytest.raises(triton.compiler.errors.CompilationError, match="no_such_thing"):
        compile_ahead(lambda: broken[(1,)](torch.ones(1)))
    assert compile_ahead(lambda: None) == 0
    assert triton.runtime.jit.JITFunction.run is launch
    assert torch.empty(1, dtype=torch.bfloat16).dtype == torch.bfloat16
