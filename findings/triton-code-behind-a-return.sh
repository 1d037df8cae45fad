#!/usr/bin/env bash
# triton 3.7.1 and 3.6.0: what stands behind an `if` of constexprs that returns is compiled in that case, too.
#
# A function adds up a row in halves: `if SIZE == 1: return x`, and behind it a call of itself with SIZE // 2. Compiled, the
# call of size 1 goes on behind its return, splits one number in two, and the kernel is refused ("reshape() cannot change total
# number of elements in tensor"). With the rest under `else:` it compiles. The interpreter, which is Python, ends at the return,
# so it does not see this. Kernels are compiled for sm_90, without a GPU.
#
# Seen, for both versions:
#   behind the return: refused: reshape() cannot change total number of elements in tensor
#   under else: compiled
set -euo pipefail
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
cat >"$place/halves.py" <<'PYTHON'
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def sum_behind(x, SIZE: tl.constexpr):
    if SIZE == 1:
        return x
    even, odd = tl.split(tl.reshape(x, (SIZE // 2, 2)))
    return sum_behind(even + odd, SIZE // 2)


@triton.jit
def sum_under_else(x, SIZE: tl.constexpr):
    if SIZE == 1:
        return x
    else:
        even, odd = tl.split(tl.reshape(x, (SIZE // 2, 2)))
        return sum_under_else(even + odd, SIZE // 2)


@triton.jit
def behind(x, y):
    tl.store(y + tl.arange(0, 1), sum_behind(tl.load(x + tl.arange(0, 16)), 16))


@triton.jit
def under_else(x, y):
    tl.store(y + tl.arange(0, 1), sum_under_else(tl.load(x + tl.arange(0, 16)), 16))


def outcome(kernel):
    source = ASTSource(fn=kernel, signature={"x": "*fp32", "y": "*fp32"}, constexprs={})
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
    except triton.CompilationError as error:
        cause = error
        while cause.__cause__ or cause.__context__:
            cause = cause.__cause__ or cause.__context__
        return f"refused: {str(cause).splitlines()[-1]}"
    return "compiled"


print("behind the return:", outcome(behind))
print("under else:", outcome(under_else))
PYTHON
wanted='behind the return: refused: reshape() cannot change total number of elements in tensor
under else: compiled'
for version in 3.7.1 3.6.0; do
    python3 -m venv "$place/$version"
    "$place/$version/bin/pip" install --quiet "triton==$version"
    found=$("$place/$version/bin/python" "$place/halves.py")
    printf 'triton %s\n%s\n' "$version" "$found"
    [ "$found" = "$wanted" ] || { echo "this has changed" >&2; exit 1; }
done
