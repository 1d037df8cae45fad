"""The blocks of a layer, divided among ranks: linear layers, norms, embedding and head."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.config.checkpoint.experts import Division
from worker.config.checkpoint.quantization import EightBits
from worker.ops.best_pairs import ALIGNMENT, VocabPart
from worker.ops.norms import add_rms_norm, rms_norm, swiglu
from worker.ops.product import product
from worker.ops.scaled import BLOCK, E4M3, EightBitRows, add_rms_norm_eight
from worker.peers.base import Collective
from worker.weights.matrices import (
    GRAIN,
    EightBitMatrix,
    Matrix,
    Operand,
    Plain,
    ScaleGrid,
    Stack,
)
from worker.weights.shard import Part, Shard, all_of, coarse, split_even, stacked, whole


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one rank of a model is built: among which ranks, in which dtype, on which device."""

    collective: Collective
    dtype: torch.dtype
    device: torch.device
    experts: Division = "auto"  # how layers of experts are divided
    eight: EightBits | None = None  # which matrices are in eight bits; None: none
    path: str = ""  # of the module that is built, in the checkpoint

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """An uninitialised weight without gradient, of the model's dtype; the loader fills it."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)

    def below(self, name: str) -> "Placement":
        """The same for the module `name` of this one."""
        return replace(self, path=f"{self.path}.{name}" if self.path else name)

    def where_kept(self, modules: Iterable[str]) -> "Placement":
        """The same if the files have all these modules in eight bits; else in the model's dtype."""
        eight = self.eight
        if eight is None or all(eight.takes(f"{self.path}.{name}") for name in modules):
            return self
        return replace(self, eight=None)

    def matrix(self, rows: Mapping[str, Part], columns: Part, *, moved: bool) -> Matrix:
        """An uninitialised matrix of these rows, one below the other.

        moved: the rows of one head may lie apart from one another in the checkpoint.
        """
        tensor, scales = self._stores((), rows, columns, moved)
        return Plain(tensor) if scales is None else EightBitMatrix(tensor, scales)

    def stack(self, count: int, rows: Mapping[str, Part], columns: Part) -> Stack:
        """As many uninitialised matrices, of these rows each."""
        return Stack(*self._stores((count,), rows, columns, moved=False))

    def _stores(
        self, lead: tuple[int, ...], rows: Mapping[str, Part], columns: Part, moved: bool
    ) -> tuple[nn.Parameter, ScaleGrid | None]:
        """Values, and scales if they are in eight bits."""
        num_rows, eight = sum(map(len, rows.values())), self.eight
        if eight is None:
            return self.empty(*lead, num_rows, len(columns)), None
        grain, whole_blocks = 1, False
        if eight.by_block and not moved and not any(part.size % GRAIN for part in rows.values()):
            grain, parts = GRAIN, rows.values()
            ends = [end for part in parts for end in (part.size, part.held.start, part.held.stop)]
            whole_blocks = not any(end % BLOCK for end in ends)
        part = coarse(columns, BLOCK) if eight.by_block else all_of(1)
        scales = self.empty(*lead, num_rows // grain, len(part), dtype=torch.float32)
        grid = ScaleGrid(scales, grain, whole_blocks, part)
        return self.empty(*lead, num_rows, len(columns), dtype=E4M3), grid


class Linear(nn.Module):
    """y = x Wᵀ + b. W stacks several of the checkpoint's matrices, so one product serves them all.

    rows: this rank's rows of the matrices, by name below the layer's prefix; columns: of all.
    """

    def __init__(
        self,
        rows: Mapping[str, Part],
        columns: Part,
        placement: Placement,
        *,
        bias: bool,
        moved: bool = False,
        modules: Iterable[str] = (),
    ) -> None:
        """moved: see Placement.matrix.

        modules: that have the rows in the checkpoint; (): `rows` names them.
        """
        super().__init__()
        self._rows, self.columns = dict(rows), columns
        self.part_sizes = [len(part) for part in rows.values()]
        num_rows = sum(self.part_sizes)
        placement = placement.where_kept(modules or rows)
        self.weight = placement.matrix(rows, columns, moved=moved)
        self.bias = placement.empty(num_rows) if bias else None

    @property
    def in_eight_bits(self) -> bool:
        """Whether it takes x in eight bits, too."""
        return isinstance(self.weight, EightBitMatrix)

    def forward(self, x: Operand) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, sum(part_sizes)], parts in order.

        x may be EightBitRows where the matrix is `in_eight_bits`, here and below.
        """
        return self.weight.product(x, self.bias)

    def shards(self, prefix: str) -> dict[str, Shard]:
        parts = {f"{prefix}.{name}".rstrip("."): part for name, part in self._rows.items()}
        shards = self.weight.shards(parts, self.columns)
        if self.bias is not None:
            biases = {f"{name}.bias": part for name, part in parts.items()}
            shards |= stacked(self.bias, biases)
        return shards


class ColumnParallelLinear(Linear):
    """Each rank computes some columns of y, and nothing is exchanged."""

    def __init__(
        self,
        in_features: int,
        rows: Mapping[str, Part],
        placement: Placement,
        *,
        bias: bool,
        moved: bool = False,
        modules: Iterable[str] = (),
    ) -> None:
        """moved, modules: as of Linear."""
        columns = all_of(in_features)
        super().__init__(rows, columns, placement, bias=bias, moved=moved, modules=modules)

    def last(self, x: Tensor, num_parts: int) -> Tensor:
        """The last `num_parts` of forward()'s parts alone: [num_tokens, sum of their sizes]."""
        start = sum(self.part_sizes[:-num_parts])
        bias = None if self.bias is None else self.bias[start:]
        return self.weight.product(x, bias, first_row=start)

    def gated(self, x: Operand) -> Operand:
        """silu(gate) · up of two parts: [num_tokens, in_features] -> [num_tokens, size of one]."""
        return self.weight.gated(x) if self.bias is None else swiglu(self(x))


class RowParallelLinear(Linear):
    """Each rank holds some columns of x and of W, and computes its part of a sum.

    The norm that follows adds the parts up (RMSNorm.reduce_add), in one op where the collective has
    one. Parts are computed where the collective sums them without a copy.
    """

    def __init__(
        self, name: str, in_features: int, out_features: int, placement: Placement, *, bias: bool
    ) -> None:
        collective = placement.collective
        held = split_even(f"{name} columns", in_features, collective.rank, collective.size)
        super().__init__(
            {name: all_of(out_features)}, Part(in_features, held), placement, bias=bias
        )
        self._local_bias = self.bias if collective.rank == 0 else None  # it enters the sum once
        self._collective = collective

    def forward(self, x: Operand) -> Tensor:
        """x: [num_tokens, in_features of this rank] -> [num_tokens, out_features], to be summed.

        With several ranks the result lies in a Collective.buffer.
        """
        if self._collective.size == 1:
            return self.weight.product(x, self._local_bias)
        out = self._collective.buffer((x.shape[0], self.part_sizes[0]), x.dtype)
        return self.weight.product(x, self._local_bias, out)


class ReplicatedLinear(Linear):
    """Every rank computes the whole of y."""

    def __init__(
        self, in_features: int, out_features: int, placement: Placement, *, bias: bool
    ) -> None:
        super().__init__({"": all_of(out_features)}, all_of(in_features), placement, bias=bias)


def selected(x: Tensor, rows: Tensor | None) -> Tensor:
    """The rows of `x` with these numbers; None: all."""
    return x if rows is None else x.index_select(0, rows)


class RMSNorm(nn.Module):
    """Every rank holds the whole weight; x: [..., size]."""

    def __init__(
        self,
        size: int,
        eps: float,
        placement: Placement,
        *,
        centred: bool = False,
        reduces: bool = True,
    ) -> None:
        """centred: the checkpoint has the weight minus 1; here it is f32, and rounded once.

        reduces: parts are to be summed over the ranks; False: they are whole.
        """
        super().__init__()
        self.eps, self._plus = eps, float(centred)
        self.weight = placement.empty(size, dtype=torch.float32 if centred else None)
        self.tap: Tensor | None = None  # [max_tokens, size], where sums are kept; see Decoder.tap
        self._collective = placement.collective
        self._reduces = reduces and placement.collective.size > 1

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def reduce_add(self, part: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(normed, new residual), which is residual + the sum of all ranks' `part`.

        Both are [num_tokens, size]. With a residual, the content of `part` is lost. Without one,
        `part` is whole, as the embedded tokens are, and becomes the residual.
        """
        if residual is None:
            return self(part), part
        operands = part, residual, self.weight, self.eps, self._kept(part)
        if self._reduces:
            return self._collective.all_reduce_rms_norm(*operands)
        return add_rms_norm(*operands)

    def reduce_add_eight(self, part: Tensor, residual: Tensor | None) -> tuple[Operand, Tensor]:
        """The same for products in eight bits alone: where one kernel norms, it quantises, too."""
        if residual is None or self._reduces:
            return self.reduce_add(part, residual)
        operands = part, residual, self.weight, self.eps, self._kept(part)
        values, of_rows, total = add_rms_norm_eight(*operands)
        return EightBitRows(values, of_rows, part.dtype), total

    def _kept(self, part: Tensor) -> Tensor | None:
        """Where the sum goes, if somebody reads it."""
        return None if self.tap is None else self.tap[: len(part)]

    def shards(self, prefix: str) -> dict[str, Shard]:
        return {f"{prefix}.weight": whole(self.weight, self._plus)}


class LayerNorm(RMSNorm):
    """Ba et al., "Layer Normalization" (arXiv:1607.06450), in plain torch; see RMSNorm."""

    def __init__(
        self,
        size: int,
        eps: float,
        placement: Placement,
        *,
        centred: bool = False,
        reduces: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__(size, eps, placement, reduces=reduces)
        self._plus = float(centred)  # rounded to the weight's dtype, as transformers does
        self.bias = placement.empty(size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def reduce_add(self, part: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self(part), part
        part = self._collective.all_reduce(part) if self._reduces else part
        total = added(part, residual, self.tap)
        return self(total), total

    def reduce_add_eight(self, part: Tensor, residual: Tensor | None) -> tuple[Operand, Tensor]:
        return self.reduce_add(part, residual)

    def shards(self, prefix: str) -> dict[str, Shard]:
        bias = {} if self.bias is None else {f"{prefix}.bias": whole(self.bias)}
        return super().shards(prefix) | bias


def added(part: Tensor, residual: Tensor, tap: Tensor | None) -> Tensor:
    """Their sum, in plain torch, kept in `tap` if there is one."""
    total = torch.add(part, residual)
    if tap is not None:
        tap[: len(part)] = total
    return total


class Sum(nn.Module):
    """Stands where a layer has no norm: what is there taken is the residual itself.

    Parts are whole: the norm that came before has reduced them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tap: Tensor | None = None  # see RMSNorm

    def reduce_add(self, part: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(new residual, new residual); see RMSNorm."""
        if residual is None:
            return part, part
        total = added(part, residual, self.tap)
        return total, total

    def reduce_add_eight(self, part: Tensor, residual: Tensor | None) -> tuple[Operand, Tensor]:
        """See RMSNorm."""
        return self.reduce_add(part, residual)

    def shards(self, prefix: str) -> dict[str, Shard]:
        return {}


class VocabParallelEmbedding(nn.Module):
    """Each rank holds the same number of rows; rows beyond the vocabulary are zero.

    With several ranks the number is a multiple of ALIGNMENT, so some may hold no token's row.
    """

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._collective = collective = placement.collective
        rows = -(-vocab_size // collective.size)
        if collective.size > 1:
            rows = -(-rows // ALIGNMENT) * ALIGNMENT
        self.start = min(collective.rank * rows, vocab_size)
        self.stop = min(self.start + rows, vocab_size)
        self.weight = placement.empty(rows, hidden_size)
        self.weight.zero_()
        self.divisor, self.cap = 1.0, 0.0  # of logits; see Scales
        # The ids whose logits this rank computes, before any gather; None: all ids.
        self.part: VocabPart | None = None
        if collective.size > 1:
            self.part = VocabPart(
                collective.rank * rows,
                vocab_size,
                lambda pairs: collective.all_gather(pairs, dim=0).view(collective.size, -1),
            )

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids: [num_tokens] i64 -> [num_tokens, hidden_size], equal on all ranks.

        With several ranks the result lies in a Collective.buffer.
        """
        if self._collective.size == 1:
            return F.embedding(input_ids, self.weight)
        elsewhere = (input_ids < self.start) | (input_ids >= self.stop)
        rows = (input_ids - self.start).masked_fill(elsewhere, 0)
        shape = len(input_ids), self.weight.shape[1]
        part = self._collective.buffer(shape, self.weight.dtype)
        torch.index_select(self.weight, 0, rows, out=part)
        return self._collective.all_reduce(part.masked_fill_(elsewhere.unsqueeze(-1), 0.0))

    def logits(self, hidden: Tensor, *, whole: bool = True) -> Tensor:
        """hidden: [n, hidden_size] -> [n, vocab_size]: products with every token's row.

        whole: gathered from all ranks; else [n, ids of `part`].
        """
        part = product(hidden, self.weight)
        if self.divisor != 1:
            part = part.div_(self.divisor)
        if self.cap:
            part = part.div_(self.cap).tanh_().mul_(self.cap)
        if not whole or self._collective.size == 1:
            return part[:, : self.stop - self.start]
        return self._collective.all_gather(part, dim=-1)[:, : self.vocab_size]

    def shards(self, prefix: str) -> dict[str, Shard]:
        rows = Part(self.vocab_size, slice(self.start, self.stop))
        return stacked(self.weight, {f"{prefix}.weight": rows}, all_of(self.weight.shape[1]))
