"""Experts of a layer that a file has as one tensor, read as those of each.

Two ways are read. Qwen3.5 MoE is published so in 16 bits, and `transformers` keeps most experts so
in memory: `experts.gate_up_proj` [number, 2 · width, hidden_size], gates first, and
`experts.down_proj` [number, hidden_size, width]. gpt-oss has pairs of a gate and an up:

    in 16 bits   gate_up_proj [number, hidden_size, 2 · width], down_proj [number, width, hidden]
    in four      gate_up_proj_blocks u8 [number, 2 · width, groups, 16], of groups of 32 numbers,
                 gate_up_proj_scales u8 [number, 2 · width, groups]; down_proj_.. alike
    its biases   gate_up_proj_bias [number, 2 · width], down_proj_bias [number, hidden_size]

Free of torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worker.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(_blocks|_scales|_bias|)")
MEMBER = re.compile(r"(.+\.experts)\.\d+\.(gate|up|down)_proj\.(\w+)")
PLAIN_NUMBERS = "BF16", "F16", "F32"  # as safetensors has them
# How a stack's name ends -> how one expert's does, the stack's dimensions, its dtypes.
ENDS: Mapping[str, tuple[str, int, tuple[str, ...]]] = {
    "": ("weight", 3, PLAIN_NUMBERS),
    "_blocks": ("weight_packed", 4, ("U8",)),
    "_scales": ("weight_scale", 3, ("U8",)),
    "_bias": ("bias", 2, PLAIN_NUMBERS),
}
STACK_ENDS = {end: of_stack for of_stack, (end, *_) in ENDS.items()}


@dataclass(frozen=True, slots=True)
class OfStack:
    """One expert's matrix, or its bias, to be sliced as safetensors' own."""

    stack: Any  # safetensors' slice of the tensor
    number: int
    first_row: int
    step: int  # in the stack to the next row
    shape: tuple[int, ...]
    turned: bool = False  # the stack has columns before rows
    inner: int = 0  # columns that are a dimension of their own; 0: they are not

    def get_shape(self) -> list[int]:
        """Of the matrix."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """As safetensors has it."""
        return self.stack.get_dtype()

    def __getitem__(self, index: tuple[slice, ...]) -> "Tensor":
        """[rows, columns] of the stack's dtype, or [rows] of a bias."""
        start, stop, _ = index[0].indices(self.shape[0])
        first = self.first_row + self.step * start
        rows = slice(first, max(first, first + self.step * (stop - start - 1) + 1), self.step)
        one = slice(self.number, self.number + 1)
        if len(self.shape) == 1:
            return self.stack[one, rows][0]
        if self.turned:
            return self.stack[one, index[1], rows][0].t()
        if not self.inner:
            return self.stack[one, rows, index[1]][0]
        first, last, _ = index[1].indices(self.shape[1])
        groups = slice(first // self.inner, -(-last // self.inner))
        held = self.stack[one, rows, groups][0].flatten(1)
        return held.narrow(1, first % self.inner, last - first)


def is_stack(name: str) -> bool:
    """Whether a tensor of this name is all experts' weights of a layer, in 16 bits."""
    found = STACK.fullmatch(name)
    return found is not None and not found[3]


def stack_of(name: str) -> str:
    """The stack in which a file may have what belongs to one expert; "": in none."""
    if (found := MEMBER.fullmatch(name)) is None or found[3] not in STACK_ENDS:
        return ""
    return f"{found[1]}.{'down' if found[2] == 'down' else 'gate_up'}_proj{STACK_ENDS[found[3]]}"


def member_end(name: str) -> str:
    """How the names end of what is in a stack; of another tensor, the end of its own name."""
    found = STACK.fullmatch(name)
    return ENDS[found[3]][0] if found else name.rpartition(".")[2]


def of_stack(name: str, stored: Any, *, paired: bool = False) -> Mapping[str, Any]:
    """The tensors in a stack by the names that files without have; {name: stored}: it is none.

    stored: safetensors' slice; paired: whether experts in 16 bits are as gpt-oss has them. Raises
    UserError if a stack has another form.
    """
    if (found := STACK.fullmatch(name)) is None:
        return {name: stored}
    (end, num, dtypes), shape = ENDS[found[3]], tuple(stored.get_shape())
    both = found[2] == "gate_up_proj"
    turned, paired = paired and not found[3], paired or bool(found[3])
    count, rows, *columns = (*shape, 0, 0, 0)
    if turned:
        rows, columns[0] = columns[0], rows
    if len(shape) != num or rows % (1 + both):
        raise UserError(f"{name} has shape {shape}: no stack of experts")
    if stored.get_dtype() not in dtypes:
        text = f"{name} is {stored.get_dtype()}, and is read in {', '.join(dtypes)}"
        raise UserError(f"{text}: take files with a tensor of each expert")
    inner = shape[3] if num == 4 else 0
    parts = ("gate_proj", "up_proj") if both else ("down_proj",)
    rows //= len(parts)
    own = (rows,) if num == 2 else (rows, columns[0] * (inner or 1))
    step, apart = (len(parts), 1) if paired else (1, rows)
    return {
        f"{found[1]}.{number}.{part}.{end}": OfStack(
            stored, number, i * apart, step, own, turned, inner
        )
        for number in range(count)
        for i, part in enumerate(parts)
    }
