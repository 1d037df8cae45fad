"""What latent attention (MLA) follows from. Free of torch."""

import math
from typing import NamedTuple

from worker.config.checkpoint.fields import Fields
from worker.config.checkpoint.refusals import DENSE, LATENT


class LatentShape(NamedTuple):
    """Sizes of latent attention; see worker.model.latent.

    A token's row in the pages is its latent and, behind it, one rotated key for all heads.
    """

    query_rank: int  # numbers of a token's latent of queries; 0: they are projected without one
    rank: int  # of the latent that keys and values are made of
    nope_dim: int  # of a head's query and key that are not rotated
    rope_dim: int  # of those that are
    value_dim: int  # of a head's value
    gain: float = 1.0  # of the scores, beside query_dim^-0.5

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Numbers of a token's row."""
        return self.rank + self.rope_dim


def read_latent(fields: Fields) -> LatentShape:
    """Raises as Fields; Unsupported for what its architectures have elsewhere."""
    for name in ("index_topk", "index_n_heads"):
        if fields.get(name) is not None:
            problem = "sparse attention, over keys that an indexer chooses"
            raise fields.unsupported(name, problem, f"take {LATENT}")
    if fields.flag("attention_bias"):
        raise fields.unsupported("attention_bias", "biases in latent attention", DENSE)
    fields.choice("rope_interleave", (True,))
    names = "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    rank, nope_dim, rope_dim, value_dim = map(fields.integer, names)
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", f"must be even to be rotated, not {rope_dim}")
    query_rank = fields.integer("q_lora_rank", default=0, least=0)
    return LatentShape(query_rank, rank, nope_dim, rope_dim, value_dim, _gain(fields))


def _gain(fields: Fields) -> float:
    """The square of yarn's mscale of all numbers, as DeepSeek's own code has it."""
    name = "rope_parameters" if fields.inner("rope_parameters").values else "rope_scaling"
    rope = fields.inner(name)
    kind, all_dim = rope.values.get("rope_type", rope.get("type")), rope.get("mscale_all_dim")
    if kind in (None, "default") or not all_dim:
        return 1.0
    factor = rope.number("factor")
    mscale = 0.1 * rope.number("mscale_all_dim") * math.log(factor) + 1 if factor > 1 else 1.0
    return mscale * mscale
