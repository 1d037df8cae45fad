"""A layer's latent attention (MLA): keys and values of all heads are made of one latent a token.

DeepSeek-AI, "DeepSeek-V2" (arXiv:2405.04434), section 2.1. Pages keep the latents; a token attends
in one of two forms, which are equal but for rounding:

    absorbed   a head's query is multiplied into the space of latents, and the result out of it,
               so that keys and values are the rows as they are kept: decode steps, short chunks
    expanded   keys and values of heads are made of the kept rows anew: long chunks, where so many
               queries share them that it costs less (from about 170 on, by their products)
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker.attention.base import AttentionShape
from worker.attention.latent import (
    LatentNorm,
    absorbs,
    expands,
    latent_absorb_store,
    latent_rope_store,
    latent_values,
    read_rows,
)
from worker.attention.qk_rope_store import Rotation
from worker.config.checkpoint.latent_shape import LatentShape
from worker.config.checkpoint.shape import LayerShape
from worker.forward.batch import Batch
from worker.forward.context import current
from worker.model.attention import RotaryEmbedding
from worker.model.layers import ColumnParallelLinear, RMSNorm, RowParallelLinear, selected
from worker.model.placement import Placement
from worker.weights.base import Matrix, Operand, Parts
from worker.weights.shard import Key, Part, Shard, all_of, by_head, split_heads

EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps says: as in DeepSeek's own code
MAX_EXPANDED = 1 << 17  # keys times heads that are made at once


def expansion(shape: LatentShape, num_heads: int, placement: Placement) -> Tensor:
    """[num_heads, query_dim + value_dim, width]: what makes keys and values of rows, unfilled.

    A head's key ends as a row does, with the rotated key: there this has ones already.
    """
    made = placement.empty(num_heads, shape.query_dim + shape.value_dim, shape.width).detach()
    rotated = made.zero_()[:, shape.nope_dim : shape.query_dim, shape.rank :]
    rotated.copy_(torch.eye(shape.rope_dim))
    return made


class LatentAttention(nn.Module):
    """Projections, norms, rope and attention of one layer; every rank keeps all of the latents."""

    sinks = None

    def __init__(
        self, shape: LayerShape, layer_id: int, rotary: RotaryEmbedding, placement: Placement
    ) -> None:
        """layer_id: of the pool."""
        # Which imports Dynamo: a second that models without latents need not wait.
        from torch.nn.attention.bias import causal_lower_right

        super().__init__()
        assert shape.latent is not None
        self._causal = causal_lower_right
        self.shape, size, num_heads = shape.latent, shape.hidden_size, shape.num_heads
        ranks = placement.collective.rank, placement.collective.size
        held = split_heads(num_heads, shape.num_kv_heads, *ranks)
        self._heads = Part(num_heads, slice(held.first_head, held.first_head + held.num_heads))
        self._num_heads, self._scale = held.num_heads, shape.attention_scale
        dim, rank = self.shape.query_dim, self.shape.rank
        q = Part(
            num_heads * dim,
            slice(*(at * dim for at in (held.first_head, held.first_head + held.num_heads))),
        )
        latents = {"kv_a_proj_with_mqa": all_of(self.shape.width)}
        self.q_norm = self.query = None
        if query_rank := self.shape.query_rank:
            self.q_norm = RMSNorm(query_rank, EPS, placement)
            parts = Parts({"q_b_proj": q}, all_of(query_rank))
            self.query = ColumnParallelLinear(parts, placement, bias=False)
        rows = {"q_a_proj": all_of(query_rank)} if query_rank else {"q_proj": q}
        parts = Parts(rows | latents, all_of(shape.in_features))
        self.qkv = ColumnParallelLinear(parts, placement, bias=False)
        self.norm = RMSNorm(rank, EPS, placement)
        # What makes a head's key of a kept row, and its value: of the rotated key's numbers ones.
        self._of_rows = expansion(self.shape, held.num_heads, placement)
        # The halves of kv_b_proj in it, by head: what makes keys of latents, and values.
        keys, values = self._of_rows[..., :rank].split([dim, self.shape.value_dim], dim=1)
        self.keys = nn.Parameter(keys[:, : self.shape.nope_dim], requires_grad=False)
        self.values = nn.Parameter(values, requires_grad=False)
        output = size, num_heads * self.shape.value_dim
        self.output = RowParallelLinear("o_proj", output, placement, bias=False)
        self.rotary, self.layer_id = rotary, layer_id

    @property
    def reader(self) -> Matrix | None:
        """The one matrix that multiplies what forward() takes."""
        return self.qkv.weight

    def forward(self, hidden: Operand, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """See SelfAttention.forward."""
        made = self.qkv(hidden)
        q, latents = made.split([made.shape[1] - self.shape.width, self.shape.width], dim=-1)
        if self.query is not None and self.q_norm is not None:
            made = self.query(self.q_norm(q))
        attended = self._attended(made, latents, positions)
        return self.output(selected(attended.flatten(1), rows))

    def attended(self) -> AttentionShape:
        """What a backend attends with: absorbed queries."""
        return AttentionShape(
            self._num_heads, 1, self.shape.width, self._scale,
            kind="latent", value_dim=self.shape.rank,
        )  # fmt: skip

    def store(self, hidden: Tensor, positions: Tensor) -> None:
        """See SelfAttention.store: only the rows of forward(), into the tokens' slots."""
        latents = self.qkv.last(hidden, 1)
        none = latents.new_empty(len(latents), 0, self.shape.rope_dim)
        latent_rope_store(none, latents, *self._stored(positions), none)

    def _stored(self, positions: Tensor) -> tuple[Rotation, LatentNorm, Tensor, Tensor]:
        """How latents become rows, and the slots where these go: see latent_rope_store."""
        context = current()
        (kept,) = context.attention.kv(self.layer_id)
        rotation, norm = Rotation(self.rotary.table, positions), LatentNorm(self.norm.weight, EPS)
        return rotation, norm, kept, context.batch.slot_mapping

    def _queries(self, made: Tensor) -> Tensor:
        """[num_tokens, num_heads, query_dim], in the first columns of what the products made."""
        width = self._num_heads * self.shape.query_dim
        return made[:, :width].unflatten(-1, (self._num_heads, -1))

    def _attended(self, made: Tensor, latents: Tensor, positions: Tensor) -> Tensor:
        """Results of heads [num_tokens, num_heads, value_dim]; fills the tokens' KV slots.

        made: see `_queries`, which may be rotated in place; latents: [num_tokens, width], before
        norm and rope. What stands before and behind a break depends on num_tokens alone.
        """
        context, q, x = current(), self._queries(made), made
        is_short, stored = absorbs(len(q)), self._stored(positions)
        if is_short:
            x = latent_absorb_store(q, latents, *stored, self.keys)
        else:
            rotated = q[..., self.shape.nope_dim :]
            latent_rope_store(rotated, latents, *stored, rotated)
        out = q.new_empty(
            len(q), self._num_heads, self.shape.rank if is_short else self.shape.value_dim
        )
        body = partial(self._attend, absorbed=is_short)
        if context.breaks is None:
            body(x, out)
        else:
            context.breaks.at(body, x, out)
        return latent_values(out, self.values) if is_short else out

    def _attend(self, x: Tensor, out: Tensor, *, absorbed: bool) -> None:
        """The break of captured passes; see worker.model.attention.

        absorbed: x is queries against rows, and `out` means of latents. Else x is as `_queries`
        takes it, of more tokens: of a chunk, or of a step of many requests with a few of them.
        """
        context = current()
        if context.on_layer is not None:
            context.on_layer(self.layer_id)
        if absorbed:
            context.attention.forward(x, self.layer_id, out)
        elif expands(context.batch):
            (kept,) = context.attention.kv(self.layer_id)
            self._expand(self._queries(x), kept, context.batch, out)
        else:
            absorbed_q = self._absorbed(self._queries(x))
            means = context.attention.forward(absorbed_q, self.layer_id)
            out.copy_(latent_values(means, self.values))

    def _absorbed(self, q: Tensor) -> Tensor:
        """[num_tokens, num_heads, query_dim], rotated -> the same against rows, [.., width]."""
        nope, rotated = q.split([self.shape.nope_dim, self.shape.rope_dim], dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), self.keys).transpose(0, 1)
        return torch.cat((absorbed, rotated), dim=-1)

    def _expand(self, q: Tensor, kept: Tensor, batch: Batch, out: Tensor) -> None:
        """The expanded form, request by request and some heads at a time.

        q: [num_tokens, num_heads, query_dim], rotated; kept: [num_pages, 1, page_size, width]; out:
        [num_tokens, num_heads, value_dim]. The batch's lengths are known to the host.
        """
        assert batch.host is not None
        start, page_size = 0, kept.shape[2]
        for i, (count, length) in enumerate(
            zip(batch.host.query_lens, batch.host.seq_lens, strict=True)
        ):
            if not count:
                continue
            pages = batch.page_table[i, : -(-length // page_size)]
            rows = read_rows(kept, pages, q.dtype)[:length]
            queries = q[start : start + count].transpose(0, 1)
            results = out[start : start + count].transpose(0, 1)
            step = max(1, MAX_EXPANDED // length)
            for first in range(0, self._num_heads, step):
                heads = slice(first, first + step)
                results[heads] = self._of_heads(queries[heads], rows, heads)
            start += count
        out[start:] = 0

    def _of_heads(self, q: Tensor, rows: Tensor, heads: slice) -> Tensor:
        """Of one request: q [heads, count, query_dim], rows [length, width] -> [.., value_dim].

        Behind earlier keys values have zeros up to query_dim, for kernels that want one size.
        """
        made = F.linear(rows, self._of_rows[heads].flatten(0, 1)).unflatten(1, (len(q), -1))
        query_dim, value_dim = self.shape.query_dim, self.shape.value_dim
        keys, values = made.transpose(0, 1).split([query_dim, value_dim], dim=-1)
        mask, is_first = None, q.shape[1] == len(rows)
        if not is_first:
            values = F.pad(values, (0, max(0, query_dim - value_dim)))
            mask = self._causal(q.shape[1], len(rows))
        made = F.scaled_dot_product_attention(
            q[None], keys[None], values[None], mask, is_causal=is_first, scale=self._scale
        )
        return made[0, ..., :value_dim]

    def shards(self, prefix: str) -> dict[Key, Shard]:
        shards = self.qkv.shards(prefix) | self.output.shards(prefix)
        shards |= self.norm.shards(f"{prefix}.kv_a_layernorm")
        if self.query is not None and self.q_norm is not None:
            shards |= self.query.shards(prefix) | self.q_norm.shards(f"{prefix}.q_a_layernorm")
        halves = {"k": self.keys, "v": self.values}
        sizes = {"k": self.shape.nope_dim, "v": self.shape.value_dim}
        tensor = f"{prefix}.kv_b_proj.weight"
        return shards | by_head(tensor, halves, sizes, self._heads, all_of(self.shape.rank))
