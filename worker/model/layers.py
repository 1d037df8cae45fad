"""The blocks of a layer, divided among ranks: linear layers, norms, embedding and head."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.model.placement import Placement
from worker.ops.best_pairs import ALIGNMENT, VocabPart
from worker.ops.norms import add_rms_norm, rms_norm, swiglu
from worker.ops.product import product
from worker.weights.base import AddNorm, Matrix, Operand, Parts, Reads
from worker.weights.shard import Key, Part, Shard, all_of, split_even, stacked, whole


class Linear(nn.Module):
    """y = x Wᵀ + b. W is several of the checkpoint's matrices, so that one product serves all."""

    def __init__(self, parts: Parts, placement: Placement, *, bias: bool) -> None:
        super().__init__()
        self.parts = parts
        self.part_sizes = [len(part) for part in parts.rows.values()]
        self.weight = placement.matrix(parts)
        self.bias = placement.empty(parts.num_rows) if bias else None

    def forward(self, x: Operand) -> Tensor:
        """x: [num_tokens, in_features] -> [num_tokens, sum(part_sizes)], parts in order.

        x may be rows as `Matrix.add_norm` leaves them for this matrix, here and below.
        """
        return self.weight.product(x, self.bias)

    def shards(self, prefix: str) -> dict[Key, Shard]:
        shards = self.weight.shards(prefix)
        if self.bias is not None:
            shards |= stacked(self.bias, self.parts.named(prefix, ".bias"))
        return shards


class ColumnParallelLinear(Linear):
    """Each rank computes some columns of y, and nothing is exchanged."""

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
        self, name: str, shape: tuple[int, int], placement: Placement, *, bias: bool
    ) -> None:
        """shape: (out_features, in_features), as the checkpoint's tensor has it."""
        collective, (num_rows, num_columns) = placement.collective, shape
        held = split_even(f"{name} columns", num_columns, collective.rank, collective.size)
        parts = Parts({name: all_of(num_rows)}, Part(num_columns, held))
        super().__init__(parts, placement, bias=bias)
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
        parts = Parts({"": all_of(out_features)}, all_of(in_features))
        super().__init__(parts, placement, bias=bias)


def selected(x: Tensor, rows: Tensor | None) -> Tensor:
    """The rows of `x` [num_tokens, size] with these numbers, [n] i64; None: all."""
    return x if rows is None else x.index_select(0, rows)


class NormOptions(NamedTuple):
    """How a norm differs from others."""

    centred: bool = False  # the checkpoint has the weight minus 1
    reduces: bool = True  # parts are to be summed over the ranks; False: they are whole
    bias: bool = False
    is_f32: bool = False  # the weight is, and so is what it is multiplied by


USUAL = NormOptions()


class RMSNorm(nn.Module):
    """Every rank holds the whole weight; x: [..., size]."""

    def __init__(
        self, size: int, eps: float, placement: Placement, options: NormOptions = USUAL
    ) -> None:
        """A centred norm's weight is f32 here, and rounded once."""
        super().__init__()
        self.eps, self._plus = eps, float(options.centred)
        is_f32 = options.centred or options.is_f32
        self.weight = placement.empty(size, dtype=torch.float32 if is_f32 else None)
        self.tap: Tensor | None = None  # [max_tokens, size], where sums are kept; see Decoder.tap
        self._collective = placement.collective
        self._reduces = options.reduces and placement.collective.size > 1
        self._add_norm: AddNorm = add_rms_norm

    def leave_for(self, reader: Matrix | Reads | None) -> None:
        """Let reduce_add leave what suits the products of `reader`.

        A Matrix alone reads it; beside `Reads` others take the norm itself; None: no product's rows
        are made. Where one kernel adds and norms, it may make the rows of a format.
        """
        if reader is not None:
            self._add_norm = reader.add_norm or self._add_norm

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def reduce_add(self, part: Tensor, residual: Tensor | None) -> tuple[Any, Tensor]:
        """(normed, new residual), which is residual + the sum of all ranks' `part`.

        Both are [num_tokens, size]; normed is a Tensor, or what `leave_for` says. With a residual,
        the content of `part` is lost. Without one, `part` is whole, as the embedded tokens are, and
        becomes the residual.
        """
        if residual is None:
            return self(part), part
        kept = None if self.tap is None else self.tap[: len(part)]
        if self._reduces:
            weight, eps = self.weight, self.eps
            return self._collective.all_reduce_rms_norm(part, residual, weight, eps, kept)
        return self._add_norm(part, residual, self.weight, self.eps, kept)

    def shards(self, prefix: str) -> dict[Key, Shard]:
        return {Key(f"{prefix}.weight"): whole(self.weight, self._plus)}


class LayerNorm(RMSNorm):
    """Ba et al., "Layer Normalization" (arXiv:1607.06450), in plain torch; see RMSNorm."""

    def __init__(
        self, size: int, eps: float, placement: Placement, options: NormOptions = USUAL
    ) -> None:
        """A centred norm's weight is rounded to the model's dtype, as transformers does."""
        super().__init__(size, eps, placement, options._replace(centred=False))
        self._plus = float(options.centred)
        self.bias = placement.empty(size) if options.bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def reduce_add(self, part: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self(part), part
        part = self._collective.all_reduce(part) if self._reduces else part
        total = added(part, residual, self.tap)
        return self(total), total

    def shards(self, prefix: str) -> dict[Key, Shard]:
        bias = {} if self.bias is None else {Key(f"{prefix}.bias"): whole(self.bias)}
        return super().shards(prefix) | bias


def added(part: Tensor, residual: Tensor, tap: Tensor | None) -> Tensor:
    """Their sum [num_tokens, hidden], in plain torch; kept in `tap` of as many rows or more."""
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

    def leave_for(self, reader: Matrix | Reads | None) -> None:
        """Do nothing: what is here taken is the residual."""

    def shards(self, prefix: str) -> dict[Key, Shard]:
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

    def logits(self, hidden: Tensor, *, whole: bool = True, copy: Matrix | None = None) -> Tensor:
        """hidden: [n, hidden_size] -> [n, vocab_size]: products with every token's row.

        whole: gathered from all ranks; else [n, ids of `part`]. copy: of the weight, multiplies.
        """
        part = product(hidden, self.weight) if copy is None else copy.product(hidden)
        if self.divisor != 1:
            part = part.div_(self.divisor)
        if self.cap:
            part = part.div_(self.cap).tanh_().mul_(self.cap)
        if not whole or self._collective.size == 1:
            return part[:, : self.stop - self.start]
        return self._collective.all_gather(part, dim=-1)[:, : self.vocab_size]

    def shards(self, prefix: str) -> dict[Key, Shard]:
        rows = Part(self.vocab_size, slice(self.start, self.stop))
        return stacked(self.weight, {f"{prefix}.weight": rows}, all_of(self.weight.shape[1]))
