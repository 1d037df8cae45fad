"""Where formats of four bits have their numbers in files: a row a format. Free of torch.

A matrix is [rows, columns], as products take it; tensors are named by their ends, behind the
module's name.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

ASCENDING = tuple(range(8))


class Packed(NamedTuple):
    """Numbers of four bits, some of them in one of a tensor's: eight in 32 bits, two in eight."""

    end: str
    along: Literal["rows", "columns"]  # of the matrix: whose neighbours lie in one
    turned: bool = False  # the tensor has columns first
    # Of neighbours 0, 1, … the place, from the lowest bits on; along columns it is as ASCENDING.
    places: tuple[int, ...] = ASCENDING


class Layout(NamedTuple):
    """How the files of a format have a matrix.

    A number is (q - zero) · scale where `zeros` says what those are, else a code of e2m1 · scale.
    """

    values: Packed
    scales: str  # [rows, groups of columns]
    turned: bool = False  # scales have columns first
    zeros: Packed | None = None  # [rows, groups of columns]; they are 8 if none are stored
    more: int = 0  # zero points are larger than what is stored, modulo 16
    factor: str = ""  # f32, of all numbers
    divides: bool = False  # they are divided by it
    order: str = ""  # of a column the group, which is that of its place
    shape: str = ""  # of the matrix, whose values may be padded
    unused: tuple[str, ...] = ()  # of activations, or said already

    @property
    def ends(self) -> tuple[str, ...]:
        """Of the tensors beside the values."""
        zeros = "" if self.zeros is None else self.zeros.end
        held = self.scales, zeros, self.factor, self.order, self.shape, *self.unused
        return tuple(filter(None, held))


AWQ = 0, 4, 1, 5, 2, 6, 3, 7
GPTQ = Layout(
    Packed("qweight", "columns", turned=True), "scales", turned=True,
    zeros=Packed("qzeros", "rows", turned=True), order="g_idx",
)  # fmt: skip
E2M1 = Layout(
    Packed("weight_packed", "columns"), "weight_scale",
    unused=("weight_shape", "input_global_scale", "weight_zero_point"),
)  # fmt: skip
LAYOUTS: Mapping[str, Layout] = {
    "awq": Layout(
        Packed("qweight", "rows", turned=True, places=AWQ), "scales", turned=True,
        zeros=Packed("qzeros", "rows", turned=True, places=AWQ),
    ),
    "gptq": GPTQ._replace(more=1),
    "gptq_v2": GPTQ,
    "int4": Layout(
        Packed("weight_packed", "columns"), "weight_scale",
        zeros=Packed("weight_zero_point", "rows"), shape="weight_shape",
    ),
    "mxfp4": E2M1,
    "nvfp4": E2M1._replace(factor="weight_global_scale", divides=True),
    "modelopt_nvfp4": Layout(
        Packed("weight", "columns"), "weight_scale", factor="weight_scale_2",
        unused=("input_scale",),
    ),
}  # fmt: skip
