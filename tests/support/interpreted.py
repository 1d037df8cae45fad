"""Triton kernels on the CPU: the interpreter has to be chosen before Triton is imported.

A test file of kernels has tests for a process in which it is chosen, and others:

    if INTERPRETED: ... tests that run kernels
    else: ... tests that compile them

tests/unit/test_interpreted.py runs all these files once more in one process that has it chosen;
TRITON_INTERPRET=1 pytest FILE runs one of them so.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def ptx_of(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> str:
    """What a @triton.jit function becomes on an sm_90, compiled without one.

    types: of each argument that is no constant, as "*bf16" or "i32"; all are multiples of 16.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    at = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    source = ASTSource(
        fn=kernel,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs={at[name]: value for name, value in constants.items()},
        attrs={at[name]: [["tt.divisibility", 16]] for name in types},
    )
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
