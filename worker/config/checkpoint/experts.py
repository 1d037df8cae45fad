"""What layers of experts follow from. Free of torch."""

import math
from typing import Any, Literal, NamedTuple

from worker.config.checkpoint.class_defaults import NUM_EXPERTS
from worker.config.checkpoint.families import ExpertNames, Family
from worker.config.checkpoint.fields import Fields, is_list
from worker.errors import Unsupported

Division = Literal["auto", "tensor", "expert"]
GRAIN = 64  # numbers of an expert's hidden layer below which a rank's part makes small products


class ExpertShape(NamedTuple):
    """Experts of one layer, of the whole model."""

    num_experts: int
    top_k: int  # experts of a token
    width: int  # of an expert's hidden layer
    renormalizes: bool  # weights of a token's experts are divided by their sum
    shared_width: int = 0  # of the expert that every token has; 0: there is none
    # What follows is left out of digests where it has these defaults: see start/digest.py.
    scoring: str = "softmax"  # what makes scores of logits: a name of ops/experts/route.SCORINGS
    is_biased: bool = False  # a bias of each expert counts where the k are chosen, not in weights
    num_groups: int = 1  # of experts, as many in each; a token's lie in `top_groups` of them
    top_groups: int = 1
    factor: float = 1.0  # of the weights
    activation: str = "silu"  # of an expert's hidden layer: gate · sigmoid(gain · gate)
    limit: float = 0.0  # to which gate, from above, and up are clamped; 0: they are not
    gain: float = 1.0
    plus: float = 0.0  # is added to up before the product of both
    has_biases: bool = False  # of products; the router's bias is one of logits


class Held(NamedTuple):
    """The experts of one rank: from `first`, so many; and the one that every token has."""

    first: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - nobody counts in a pair
    shared: int = 0  # 1: that one lies behind them; the rank has all others then

    @property
    def total(self) -> int:
        """Experts whose matrices lie in one stack."""
        return self.count + self.shared


def rank_experts(
    shape: ExpertShape, division: Division, rank: int, size: int, *, group: int = 1
) -> tuple[Held, slice]:
    """(experts of one rank, its part of their hidden layers).

    tensor: a part of each expert; expert: some experts whole; auto: the former unless parts would
    be small or uneven, or divide what shares a scale: groups of so many numbers. Raises Unsupported
    if they cannot be divided evenly.
    """
    if division == "auto":
        grain = math.lcm(GRAIN, group)
        division = "expert" if shape.width % (size * grain) and size > 1 else "tensor"
    divided = shape.width if division == "tensor" else shape.num_experts
    if divided % size:
        what = f"{shape.num_experts} experts of {shape.width} cannot be divided among {size} ranks"
        raise Unsupported(f"{what} (engine.experts: {division})")
    part = divided // size
    if division == "tensor":
        return Held(0, shape.num_experts), slice(rank * part, (rank + 1) * part)
    return Held(rank * part, part), slice(0, shape.width)


def read_experts(fields: Fields, family: Family) -> dict[str, Any]:
    """What a ModelShape says of experts: Mixtral's have the feed-forward's own fields."""
    num_experts = fields.integer(*NUM_EXPERTS, default=0, least=0)
    is_sparse = _sparse_layers(fields)
    if not num_experts or not any(is_sparse):
        return {}
    own, top_k = fields.get("moe_intermediate_size"), fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        problem = f"{top_k} is more than {NUM_EXPERTS[0]} {num_experts}"
        raise fields.error("num_experts_per_tok", problem)
    fields.choice("hidden_act", ("silu",))
    names, shared = family.layers.experts, 0
    assert names is not None
    width = fields.integer("intermediate_size" if own is None else "moe_intermediate_size")
    if names.shared:
        shared = width * fields.integer("n_shared_experts", default=0, least=0)
        if fields.get("n_shared_experts") is None:
            shared = fields.integer("shared_expert_intermediate_size")
    limit = fields.number("swiglu_limit", default=0.0)
    if limit and shared:
        raise fields.unsupported("swiglu_limit", "of an expert that every token has")
    num_groups, top_groups = _groups(fields, num_experts, top_k, names)
    experts = ExpertShape(
        num_experts,
        top_k,
        width,
        renormalizes=own is None or fields.flag("norm_topk_prob", default=bool(names.shared)),
        shared_width=shared,
        scoring=names.scoring,
        is_biased=bool(names.bias) and not names.paired,
        num_groups=num_groups,
        top_groups=top_groups,
        factor=fields.number("routed_scaling_factor", default=1.0),
        limit=limit,
        gain=fields.number("swiglu_alpha", default=1.0),
        plus=names.plus,
        has_biases=names.paired,
    )
    return {"is_sparse": is_sparse, "experts": experts}


def _sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Which layers have experts: `mlp_layer_types` names them, or other fields count them."""
    num_layers, kinds = fields.integer("num_hidden_layers"), fields.get("mlp_layer_types")
    if kinds is not None:
        known = is_list(kinds) and all(kind in ("dense", "sparse") for kind in kinds)
        if not known or len(kinds) != num_layers:
            problem = f"must name {num_layers} layers, as dense or sparse, not {kinds!r}"
            raise fields.error("mlp_layer_types", problem)
        return tuple(kind == "sparse" for kind in kinds)
    first = fields.integer("first_k_dense_replace", default=0, least=0)
    dense = {*range(first), *fields.integers("mlp_only_layers")}
    step = fields.integer("decoder_sparse_step", default=1)
    every = fields.integer("moe_layer_freq", default=1)
    return tuple(
        (i + 1) % step == 0 and i % every == 0 and i not in dense for i in range(num_layers)
    )


def _groups(fields: Fields, num_experts: int, top_k: int, names: ExpertNames) -> tuple[int, int]:
    """(groups of experts, those of them in which a token's lie); (1, 1): they lie anywhere."""
    is_biased = bool(names.bias) and not names.paired
    methods = ("noaux_tc",) if is_biased else ("greedy", "group_limited_greedy")
    fields.choice("topk_method", methods)
    fields.choice("scoring_func", (names.scoring,))
    if fields.get("topk_method") in ("greedy", "group_limited_greedy"):
        # transformers, as DeepSeek's own files, never divides by the sum there.
        fields.choice("norm_topk_prob", (False,))
    count = fields.integer("n_group", default=1)
    if fields.get("topk_method") == "greedy" or count == 1:
        return 1, 1
    top = fields.integer("topk_group", default=1)
    if num_experts % count or (is_biased and num_experts < 2 * count):
        raise fields.error("n_group", f"{count} groups of {num_experts} experts")
    if top > count or top_k > top * num_experts // count:
        problem = f"{top_k} experts of a token do not lie in {top} of {count} groups"
        raise fields.error("topk_group", problem)
    return count, top
