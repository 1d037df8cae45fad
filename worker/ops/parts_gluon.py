"""What the kernels in Gluon share: groups of four warps with 64 rows, tiles by TMA, barriers."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROWS = gl.constexpr(64)  # of a group
TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# A Gluon without what kernels name is met here and not by its compiler.
NAMES = gl.warp_specialize, gl.NVMMADistributedLayout, gl.DistributedLinearLayout, gl.SliceLayout


@gluon.constexpr_function
def stored(columns: int) -> Any:
    """Threads of a group have 8 numbers in a row of its result, next to what they are given."""
    more = [[0, 1 << i] for i in range(5, 9) if 1 << i < columns]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *more, [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    """NUM of them, which COUNT arrivals complete."""
    made = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM):
        mbarrier.init(made.index(i), count=COUNT)
    return made
