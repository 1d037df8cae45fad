"""What a format of weights is: how matrices are stored, filled and multiplied by.

A further format is a module beside `plain` and `eight_bits`, with a `Format`, a `Matrix` and a
`Reading` of its own, and a row of config.checkpoint.quantization.FORMATS.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from worker.config.checkpoint.experts import Held
from worker.config.checkpoint.quantization import Quantization
from worker.errors import UserError
from worker.ops.experts.product import PLAIN_FINISH, Finish
from worker.ops.experts.route import Routes
from worker.weights.shard import VALUES, Key, Part, Shard, coarse, stacked


class Rows(Protocol):
    """Rows of x, [num_rows, num_columns], in the form that a format's products take."""

    @property
    def dtype(self) -> torch.dtype:
        """Of x, and of a product."""
        ...

    @property
    def shape(self) -> torch.Size:
        """That of x."""
        ...

    @property
    def x(self) -> Tensor | None:
        """Itself, if `add_norm_both` has made the rows."""
        ...


Operand: TypeAlias = Tensor | Rows  # x of a product


def itself(x: Operand) -> Tensor:
    """x as a tensor; of rows that have it."""
    found = x if isinstance(x, Tensor) else x.x
    assert found is not None
    return found


# As ops.norms.add_rms_norm, (rows for a product, the sum).
AddNorm: TypeAlias = Callable[
    [Tensor, Tensor, Tensor, float, Tensor | None], tuple[Operand, Tensor]
]


class Reads(NamedTuple):
    """A reader of a norm beside which others take it as a tensor; see `Matrix`."""

    add_norm: AddNorm | None


class Parts(NamedTuple):
    """What a rank holds of matrices that lie one below the other, so that one product serves all.

    In a stack there are such matrices for every expert that the rank holds.
    """

    rows: Mapping[str, Part]  # of the matrices, by module below the layer's
    columns: Part  # of all
    moved: bool = False  # the rows of one head may lie apart from one another in the checkpoint
    modules: Sequence[str] = ()  # that have the rows in the checkpoint; (): `rows` names them
    held: Held | None = None  # of a stack: whose matrices these are

    @property
    def num_rows(self) -> int:
        """Of all the matrices, on this rank."""
        return sum(map(len, self.rows.values()))

    @property
    def num_numbers(self) -> int:
        """That this rank has of the matrices, of all experts if it is a stack."""
        count = 1 if self.held is None else self.held.total
        return count * self.num_rows * len(self.columns)

    def named(self, prefix: str, end: str) -> dict[str, Part]:
        """The rows by the checkpoint's tensors, which end so."""
        return {f"{prefix}.{name}".rstrip(".") + end: part for name, part in self.rows.items()}


class Grid(NamedTuple):
    """One of the tensors that a matrix is stored as."""

    columns: Part  # of the tensor
    grain: int = 1  # rows of the matrix to a row of the tensor
    dtype: torch.dtype | None = None  # None: the model's
    room: int = 0  # for columns in memory; those beyond the tensor's are zeros


class Empty(Protocol):
    """Makes weights that are not filled yet; None: of the model's dtype."""

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter: ...


class Matrix(nn.Module):
    """This rank's rows and columns [num_rows, num_columns] in one format, or a stack of such.

    What `Format.stores` names are attributes of these names, [(count,) rows / grain, columns].
    """

    values: nn.Parameter
    finish: Finish = PLAIN_FINISH  # of a stack of gates and ups: what `experts` makes of products
    # Of such a stack, gates and ups, and downs, of shared experts: `experts` adds what they make of
    # up to MAX_BESIDE tokens.
    shared: "tuple[Matrix, Matrix] | None" = None
    add_norm: AddNorm | None = None  # whose rows its products take; None: they take tensors alone
    add_norm_both: AddNorm | None = None  # the same, where others read the norm itself, too

    def __init__(self, kept: "Format", parts: Parts, empty: Empty) -> None:
        super().__init__()
        self.parts, self._format, self._grids = parts, kept, kept.stores(parts)
        lead = () if parts.held is None else (parts.held.total,)
        for role, grid in self._grids.items():
            held = len(grid.columns)
            shape = *lead, parts.num_rows // grid.grain, max(held, grid.room)
            setattr(self, role, empty(*shape, dtype=grid.dtype))
            getattr(self, role).detach()[..., held:] = 0

    def product(
        self, x: Operand, bias: Tensor | None = None, out: Tensor | None = None, first_row: int = 0
    ) -> Tensor:
        """x times the transposed rows from `first_row` on, plus bias: [num_tokens, rows].

        x: [num_tokens, num_columns]; first_row: where one of `parts` begins; out: where the result
        goes; None: to new memory. See ops.product.
        """
        raise NotImplementedError

    def gated(self, x: Operand) -> Operand:
        """silu(gate) · up, where gate is the product with the first half of the rows."""
        raise NotImplementedError

    def gates_for(self, other: "Matrix") -> bool:
        """Whether the other can be multiplied by what `gated` leaves."""
        return True

    def settle(self) -> None:
        """Make what products read beside the weights, which are filled by now."""

    def carries(self, shared: "tuple[Matrix, Matrix]") -> bool:
        """Whether `experts` can compute these shared experts, too."""
        return False

    def experts(
        self, down: "Matrix", x: Operand, routes: Routes, out: Tensor | None = None
    ) -> Tensor:
        """Of a stack of gates and ups, and one of downs: see ops.experts.product."""
        raise NotImplementedError

    def shards(self, prefix: str, number: int | None = None) -> dict[Key, Shard]:
        """Of the modules below `prefix`; number: of one of the stack's matrices."""
        shards = dict[Key, Shard]()
        for role, grid in self._grids.items():
            tensor: Tensor = getattr(self, role)[..., : len(grid.columns)]
            tensor = tensor if number is None else tensor[number]
            parts = self.parts.named(prefix, ".weight").items()
            rows = {name: coarse(part, grid.grain) for name, part in parts}
            for key, shard in stacked(tensor, rows, grid.columns).items():
                shards[key._replace(role=role)] = replace(shard, codec=self._format)
        return shards


class Reading:
    """How the files of a model hold tensors of a format; here: none."""

    def __init__(self, files: Sequence[Path], declared: Quantization | None = None) -> None:
        """files: all weight files of the model; they are not opened before it is necessary.

        declared: what config.json says of them.
        """

    def tensor_of(self, name: str) -> str:
        """The model's name of the tensor whose values the files have under `name`."""
        return name

    def opened(self, name: str, stored: Any) -> Any | None:
        """What slices the tensor, by its worth: [rows, columns] f32; None: of another format.

        It has safetensors' get_shape() and get_dtype(). stored: safetensors' slice of `name`.
        Raises UserError if what belongs to the tensor is not there, or does not fit.
        """
        return None

    def is_spent(self, name: str) -> bool:
        """Whether `name` came in with a tensor that was opened, or holds what is not needed."""
        return False

    def owner_of(self, name: str) -> str:
        """The tensor to which what `name` holds belongs; `name` itself: to none."""
        return name


class Format:
    """A format, of one model: which matrices are in it, and how."""

    name: str  # for people
    noise = ""  # names it in the digests of noise
    matrix: type[Matrix] = Matrix
    reading: type[Reading] = Reading

    def __init__(self, declared: Quantization | None = None) -> None:
        self._declared = declared

    def takes(self, module: str) -> bool:
        """Whether the matrix of the module of this full name is in the format."""
        return self._declared is None or self._declared.takes(module)

    def multiplies(self, device: torch.device) -> bool:
        """Whether products there take it; else what is in it becomes the model's dtype."""
        return True

    def stores(self, parts: Parts) -> dict[str, Grid]:
        """The tensors of a matrix of these parts by their roles, VALUES among them.

        Raises Unsupported if ranks cannot divide the matrix so.
        """
        raise NotImplementedError

    def part(self, stored: Any, role: str, shard: Shard) -> Tensor:
        """This rank's part of a tensor, for `shard`, which is of this role.

        stored: as `Reading.opened` returns it, or safetensors' own. Raises UserError without a
        name: its form is another than the one declared.
        """
        return whole_of(stored, shard)

    def drawn(self, whole: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Tensor]:
        """A drawn tensor in this format, by roles; shapes: of the whole tensor of each role.

        whole: f32, of the checkpoint's shape. A part follows from the tensor alone: for any number
        of ranks it is the same.
        """
        return {VALUES: whole}


def whole_of(stored: Any, shard: Shard) -> Tensor:
    """The part of a tensor that is stored as it is; raises as `Format.part`."""
    if (shape := tuple(stored.get_shape())) != shard.stored_shape:
        raise UserError(f"has shape {shape}, config.json asks for {shard.stored_shape}")
    return shard.of(stored)
