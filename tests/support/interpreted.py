"""Triton kernels on the CPU: the interpreter has to be chosen before Triton is imported.

A test file of kernels has tests for a process in which it is chosen, and others:

    if INTERPRETED: ... tests that run kernels
    else: ... tests that compile them

tests/unit/test_interpreted.py runs all these files once more in one process that has it chosen;
TRITON_INTERPRET=1 pytest FILE runs one of them so.
"""

import importlib.util
import inspect
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.support import pairwise

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WHY = (
    "Triton is not installed: its kernels run here under its interpreter only (pip install triton)"
)
ROOT = Path(__file__).parents[2]


def run_interpreted(paths: Iterable[Path]) -> None:
    """The tests of these files, under the interpreter, in a process of their own."""
    options = [f"-pno:{name}" for name in ("xdist", "cacheprovider", "schemathesis", "anyio")]
    options += ["--whole"] * pairwise.whole
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, *map(str, paths)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout


def check_columns(columns: Sequence[Tensor]) -> None:
    """Each is contiguous; a kernel's begin where Triton need not compile others for them."""
    for column in columns:
        assert column.is_contiguous()
        assert not INTERPRETED or column.data_ptr() % 16 == 0


def ptx_of(kernel: Any, types: dict[str, Any], constants: dict[str, Any], **options: Any) -> str:
    """What a @triton.jit function becomes on an sm_90, compiled without one; see asm_of."""
    return asm_of(kernel, types, constants, **options)["ptx"]


def asm_of(
    kernel: Any, types: dict[str, Any], constants: dict[str, Any], **options: Any
) -> dict[str, str]:
    """The stages of a @triton.jit function on an sm_90, compiled without one: "ttgir", "ptx" ...

    types: of each argument that is no constant, as "*bf16" or "i32", or a named tuple of these and
        of "constexpr" for None; all are multiples of 16.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    at = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    paths = {
        (*at[name], *((i,) if isinstance(found, tuple) else ())): each
        for name, found in types.items()
        for i, each in enumerate(found if isinstance(found, tuple) else (found,))
    }
    absent = {path: None for path, each in paths.items() if each == "constexpr"}
    source = ASTSource(
        fn=kernel,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs=absent | {at[name]: value for name, value in constants.items()},
        attrs={
            path: [["tt.divisibility", 16]]
            for path, each in paths.items()
            if path not in absent and not each.startswith("tensordesc")
        },
    )
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


def assembled(ptx: str) -> str:
    """What the assembler says of PTX for an sm_90."""
    from triton import knobs

    made = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", "-o", os.devnull, "/dev/stdin"]
    return subprocess.run(made, input=ptx, capture_output=True, text=True, check=True).stderr


@contextmanager
def compiling(module: Any, *only: str) -> Iterator[dict[str, str]]:
    """Launches of the module's kernels are compiled for sm_90 instead; PTX by kernel."""
    found: dict[str, str] = {}

    class Compiled:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self.compile

        def compile(self, *args: Any, **given: Any) -> None:
            names, name = self.kernel.arg_names, self.kernel.__name__
            name += "_top_p" if given.get("PROBABLE") else ""
            name += "_try" if given.get("TRY") else ""
            name += "_checked" if given.get("CHECKED") else ""
            if name in found:
                return
            types = dict(zip(names, map(type_of, args), strict=False))
            given |= {"PDL": True, "launch_pdl": True}
            constants = {each: given.pop(each) for each in names if each in given}
            ptx = ptx_of(self.kernel, types, constants, **given)
            found[name] = ptx

    kernels = only or [name for name in vars(module) if name.endswith("_kernel")]
    with mock.patch.multiple(module, **{name: Compiled(getattr(module, name)) for name in kernels}):
        yield found
    assert set(kernels) <= set(found)
    for ptx in found.values():
        assert ptx.index("griddepcontrol.wait") < ptx.index("st.global")
        assert "griddepcontrol.launch_dependents" in ptx
        assert not re.search(r"\b(red|atom)\.\S*\.(f16|bf16|f32|f64)", ptx)  # no float atomics


def type_of(value: Any) -> Any:
    if isinstance(value, tuple):
        types = tuple(map(type_of, value))
        return type(value)(*types) if hasattr(value, "_fields") else types
    if value is None:
        return "constexpr"
    if hasattr(value, "block_shape"):
        return f"tensordesc<{type_of(value.base)[1:]}{value.block_shape}>"
    if isinstance(value, Tensor):
        names = {
            torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
            torch.float8_e4m3fn: "fp8e4nv",
        }  # fmt: skip
        return "*" + names.get(value.dtype, f"i{value.dtype.itemsize * 8}")
    return "fp32" if isinstance(value, float) else "i32"


def quicken() -> None:
    """Triton's interpreter, which else takes several times as long.

    At each call of a @triton.jit function it looks through all of triton.language for what it has
    to replace, and does so again for those that a kernel calls. For each result of an operation it
    hashes all types that there are, and makes the type of its shape anew. Whether an integer
    overflows is ten more operations, and no one asks for the answer.
    """
    interpreter: Any = import_module("triton.runtime.interpreter")
    tl, core = interpreter.tl, interpreter.tl.core
    semantic: Any = import_module("triton.language.semantic").TritonSemantic

    @cache
    def names(package: Any) -> list[str]:
        return [name for name, each in inspect.getmembers(package) if core.is_builtin(each)]

    def members(package: Any) -> list[tuple[str, Any]]:
        return [(name, getattr(package, name)) for name in names(package)]

    @cache
    def modules(function: Any) -> list[Any]:
        return [each for each in function.__globals__.values() if each is tl or each is core]

    def patch(function: Any) -> Any:
        if all(each.static_print is print for each in modules(function)):  # by a caller
            return SimpleNamespace(restore=lambda: None)
        return patch_lang(function)

    def numpy_type(dtype: Any) -> Any:
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = np_dtype(dtype)
        return found

    def tuple_type(values: Any, fields: Any = None) -> Any:
        key = tuple(each.value if isinstance(each, core.constexpr) else each for each in values)
        if fields is not None or any(type(each) is not int for each in key):
            return type_of(values, fields)
        if key not in types:
            types[key] = type_of(values)
        return types[key]

    @cache
    def of_shape(*shape: int) -> tuple[Any, Any]:
        sizes = core.tuple([core.constexpr(size) for size in shape])
        return core.constexpr(math.prod(shape)), sizes

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = of_shape(*(kind.shape if kind.is_block() else ()))

    def block(self: Any, element: Any, shape: Sequence[Any]) -> None:
        sizes = tuple(core._unwrap_shape(shape))
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        self.element_ty, self.shape, self.numel = element, unwrapped(sizes), valid(sizes)

    def of_element(self: Any, element: Any) -> Any:
        made = core.block_type.__new__(core.block_type)
        made.element_ty, made.shape, made.numel = element, self.shape, self.numel
        return made

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        a, b = left.type, right.type
        if a.is_block() and b.is_block() and a.shape is b.shape:
            return left, right
        return broadcast_of(self, left, right)

    broadcast_of, semantic.broadcast_impl_value = semantic.broadcast_impl_value, broadcast
    semantic.binary_op_sanitize_overflow_impl = lambda *_: None  # its asserts are off
    valid, unwrapped = cache(core.validate_block_shape), cache(core.tuple)
    core.tensor.__init__, core.block_type.__init__ = tensor, block
    core.block_type.with_element_ty = of_element
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    known, np_dtype = dict[str, Any](), interpreter._get_np_dtype
    types, type_of = dict[tuple[int, ...], Any](), core._type_for_tuple_values
    patch_lang = interpreter._patch_lang
    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": members})
    interpreter._patch_lang, interpreter._get_np_dtype = patch, numpy_type
    core._type_for_tuple_values = tuple_type


if INTERPRETED:
    quicken()


def otherwise(module: Any, right: str, wrong: str, file: Path) -> Any:
    """The module of kernels with `wrong` in the place of `right`, written to `file` and imported.

    A file, as Triton reads the sources of its functions.
    """
    source = inspect.getsource(module)
    assert right in source
    file.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = made
    spec.loader.exec_module(made)
    return made
