"""Experts of a layer that a file has as one tensor, read as those of each.

Qwen3.5 MoE is published so in 16 bits, and `transformers` keeps them so in memory:
`experts.gate_up_proj` [number, 2 · width, hidden_size], gates first, and `experts.down_proj`
[number, hidden_size, width]. Free of torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from worker.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
PLAIN_NUMBERS = "BF16", "F16", "F32"  # as safetensors has them


@dataclass(frozen=True, slots=True)
class OfStack:
    """One expert's matrix, to be sliced as safetensors' own."""

    stack: Any  # safetensors' slice of the tensor
    number: int
    first_row: int
    shape: tuple[int, int]

    def get_shape(self) -> list[int]:
        """Of the matrix."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """As safetensors has it."""
        return self.stack.get_dtype()

    def __getitem__(self, index: tuple[slice, slice]) -> "Tensor":
        """[rows, columns] of the stack's dtype."""
        start, stop, _ = index[0].indices(self.shape[0])
        rows = slice(self.first_row + start, self.first_row + stop)
        return self.stack[self.number : self.number + 1, rows, index[1]][0]


def is_stack(name: str) -> bool:
    """Whether a tensor of this name is all experts' of a layer."""
    return STACK.fullmatch(name) is not None


def of_stack(name: str, stored: Any) -> Mapping[str, OfStack]:
    """The matrices in a stack by the names that files without have; stored: safetensors' slice.

    Raises UserError if it has another form.
    """
    found, (count, rows, columns) = STACK.fullmatch(name), (*stored.get_shape(), 0, 0, 0)[:3]
    assert found is not None
    parts = ("gate_proj", "up_proj") if found[2] == "gate_up_proj" else ("down_proj",)
    if len(stored.get_shape()) != 3 or rows % len(parts):
        raise UserError(f"{name} has shape {tuple(stored.get_shape())}: no stack of experts")
    if stored.get_dtype() not in PLAIN_NUMBERS:
        text = f"{name} is {stored.get_dtype()}, and stacks of experts are read in 16 and 32 bits"
        raise UserError(f"{text}: take files with a tensor of each expert")
    shape = rows // len(parts), columns
    return {
        f"{found[1]}.{number}.{part}.weight": OfStack(stored, number, i * shape[0], shape)
        for number in range(count)
        for i, part in enumerate(parts)
    }
