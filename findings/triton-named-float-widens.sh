#!/usr/bin/env bash
# triton 3.7.1 and 3.6.0: a Python float that a kernel gives a name widens bf16 to f32; written in place it does not.
#
# `x * 2.0` of a bf16 tensor is a bf16 product. With `unit = 2.0` before it, `x * unit` is an f32 product of the
# widened tensor, also where `unit` is known when the kernel is compiled. A `tl.dot` behind it then refuses its
# operands ("Both operands must be same dtype. Got fp32 and bf16"), and the interpreter, which computes bf16 in f32
# anyway, shows nothing. `unit: tl.constexpr = 2.0` keeps bf16. Kernels are compiled for sm_90, without a GPU.
#
# Seen, for both versions:
#   in place: bf16
#   named: f32
#   named constexpr: bf16
set -euo pipefail
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
cat >"$place/widen.py" <<'PYTHON'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def in_place(x, y):
    at = tl.arange(0, 16)
    tl.store(y + at, tl.load(x + at) * 2.0)


@triton.jit
def named(x, y):
    at = tl.arange(0, 16)
    unit = 2.0
    tl.store(y + at, tl.load(x + at) * unit)


@triton.jit
def named_constexpr(x, y):
    at = tl.arange(0, 16)
    unit: tl.constexpr = 2.0
    tl.store(y + at, tl.load(x + at) * unit)


for kernel in (in_place, named, named_constexpr):
    source = ASTSource(fn=kernel, signature={"x": "*bf16", "y": "*bf16"}, constexprs={})
    ir = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]
    (dtype,) = re.findall(r"arith\.mulf .*tensor<16x(\w+)>", ir)
    print(f"{kernel.__name__.replace('_', ' ')}: {dtype}")
PYTHON
for version in 3.7.1 3.6.0; do
    python3 -m venv "$place/$version"
    "$place/$version/bin/pip" install --quiet "triton==$version"
    told=$("$place/$version/bin/python" "$place/widen.py")
    echo "triton $version:"
    echo "$told"
    [ "$told" = "in place: bf16
named: f32
named constexpr: bf16" ] || { echo "this has changed" >&2; exit 1; }
done
