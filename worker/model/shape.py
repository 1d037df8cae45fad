"""A Hugging Face model directory's configuration, read into one checked record."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from worker.experts.shape import ExpertShape
from worker.model.families import FAMILIES, Family, Features
from worker.model.fields import Fields, read_fields
from worker.model.refusals import DENSE, quantized, unknown_architecture
from worker.model.rope_fields import PLAIN, ROPE_TYPES, read_rope
from worker.ops.scaling import RopeScaling
from worker.recurrent.delta_shape import BLOCK, TAPS, DeltaShape

FULL, LINEAR, SLIDING = (
    "full_attention",
    "linear_attention",
    "sliding_attention",
)  # in `layer_types`
DTYPES = ("float32", "bfloat16", "float16")


class Scales(NamedTuple):
    """Numbers by which a model multiplies what is 1 elsewhere."""

    embedding: float = 1.0
    residual: float = 1.0  # of what attention and feed-forward add to it
    logits: float = 1.0  # they are divided by it
    attention: float | None = None  # of its scores; None: head_dim^-0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What every layer's weights follow from: of the whole model, not of one rank."""

    architecture: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # of the head
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    rotary_dim: int  # of a head's head_dim numbers, so many are rotated
    dtype: str  # of the checkpoint
    scales: Scales = Scales()  # noqa: RUF009 - immutable

    @property
    def features(self) -> Features:
        """What the layers are made of."""
        raise NotImplementedError

    @property
    def attention_scale(self) -> float:
        """Of the scores."""
        return self.scales.attention or self.head_dim**-0.5

    @property
    def moved_rows(self) -> tuple[tuple[slice, slice], ...]:
        """(rows of each head of q and of k in the checkpoint, where they lie here); (): all stay.

        Kernels turn numbers i and i + rotary_dim/2 of a head where all or at most half of it is
        rotated. Where a model turns others, the rows lie here so that i and i + head_dim/2 are
        turned, the pairs that it leaves alone by nothing: no product of q and k changes by that.
        """
        size, turned, interleaved = self.head_dim, self.rotary_dim, self.features.interleaved
        if not interleaved and (turned == size or turned <= size // 2):
            return ()
        half, pairs = size // 2, turned // 2
        first, second = slice(0, pairs), slice(pairs, turned)
        if interleaved:
            first, second = slice(0, turned, 2), slice(1, turned, 2)
        moved = (first, slice(0, pairs)), (second, slice(half, half + pairs))
        if turned == size:
            return moved
        middle = turned + half - pairs  # of what is not turned
        still = slice(turned, middle), slice(pairs, half)
        return (*moved, still, (slice(middle, size), slice(half + pairs, size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(LayerShape):
    """The shape of the weights, as the file gives it."""

    num_layers: int
    tie_word_embeddings: bool
    flags: tuple[str, ...]  # that are true, of those that the family asks for; sorted
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]  # config.json's, then generation_config.json's others
    penalizes: bool  # generation_config.json has a repetition penalty for requests that name none
    # Which layers are gated delta nets and not attention; `delta` are their heads.
    is_delta: tuple[bool, ...] = ()
    delta: DeltaShape | None = None
    is_still: tuple[bool, ...] = ()  # which layers have no rope; (): none
    # Which layers have experts in the place of a feed-forward; (): none.
    is_sparse: tuple[bool, ...] = ()
    experts: ExpertShape | None = None

    def served(self, max_len: int | str) -> "ModelShape":
        """For requests of up to `max_len` tokens; another text than a number: of any length.

        A "longrope" has frequencies for texts up to its original length, and others for longer
        ones. Keys are stored as they were turned, so a worker can use only one set: by what it is
        configured to serve, not by what its memory holds, which differs between workers.
        """
        scaling = self.rope_scaling
        if scaling is None or scaling.rope_type != "longrope" or not isinstance(max_len, int):
            return self
        is_long = max_len > scaling.original_max_position_embeddings
        return replace(self, rope_scaling=replace(scaling, is_long=is_long))

    @property
    def grain(self) -> int:
        """Chunks of a prompt that are not its last end at multiples of it."""
        return 1 if self.delta is None else BLOCK

    @property
    def num_kv_layers(self) -> int:
        """Layers with keys and values."""
        return self.num_layers - sum(self.is_delta)

    @property
    def features(self) -> Features:
        """What the layers are made of, by architecture and flags."""
        return FAMILIES[self.architecture].features(self.flags)


def read_model_shape(path: Path) -> ModelShape:
    """The shape of the model in directory `path` (config.json, generation_config.json if any).

    Raises:
        UserError: a file is missing or no JSON object, or a field is missing or wrong; the message
            names both. Unsupported if the model is well described but cannot be computed.
    """
    outer = fields = read_fields(path / "config.json")
    architecture = read_architecture(fields)
    if architecture not in FAMILIES:
        raise unknown_architecture(fields, architecture, ", ".join(sorted(FAMILIES)))
    family = FAMILIES[architecture]
    if family.nested:
        fields = fields.inner("text_config")
    refuse_what_we_cannot_compute(fields, layers=bool(family.layers.delta), family=family)
    asked = sorted({*family.flags.values()})
    generation = path / "generation_config.json"
    generates = read_fields(generation) if generation.exists() else Fields(generation, {})
    return ModelShape(
        architecture=architecture,
        **read_layer_shape(fields, rotary=family.rotary, rope_types=ROPE_TYPES),
        **(_read_delta(fields) if family.layers.delta else {}),
        **(_read_experts(fields, family) if family.layers.experts else {}),
        num_layers=fields.integer("num_hidden_layers"),
        vocab_size=fields.integer("vocab_size"),
        tie_word_embeddings=(outer if family.nested else fields).flag("tie_word_embeddings"),
        flags=tuple(x for x in asked if fields.flag(x, default=x in family.unless_said)),
        scales=_read_scales(fields) if family.scales else Scales(),
        is_still=_read_still(fields) if family.has_still_layers else (),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        eos_token_ids=_eos_token_ids(fields, generates),
        penalizes=(generates.get("repetition_penalty") or 1) != 1,  # routers check the value
    )


def read_architecture(fields: Fields) -> str:
    """The one name in `architectures`, whether or not we know it."""
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", f"must be a list of one name, not {names!r}")
    return names[0]


def refuse_what_we_cannot_compute(
    fields: Fields, *, layers: bool = False, family: Family | None = None
) -> None:
    """Refuse what no layer of ours has, whatever the architecture.

    layers: whoever calls has layers of several types, and reads the fields of those itself.
    family: of a model; None: of a drafter.
    """
    longest = fields.integer("max_position_embeddings") if family else 0
    window = fields.integer("sliding_window", default=0, least=0)
    sees_all = 0 < longest <= window
    if not layers:
        layer_types = fields.get("layer_types")
        known = {FULL, SLIDING} if sees_all else {FULL}
        if others := set(layer_types or ()) - known:
            problem = f"layers of type {', '.join(sorted(others))}"
            raise fields.unsupported("layer_types", problem + _remedy(window, others))
        if layer_types is None and fields.flag("use_sliding_window") and not sees_all:
            problem = "sliding-window attention" + _remedy(window)
            raise fields.unsupported("use_sliding_window", problem)
    if family is not None and family.window is not None and not sees_all:
        # Null says that there is none, and an absent field what transformers takes it for.
        if "sliding_window" not in fields.values:
            window = family.window
        if 0 < window < longest:
            problem = f"attention to the last {window} tokens" + _remedy(window)
            raise fields.unsupported("sliding_window", problem)
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.unsupported("hidden_act", f"{fields.get('hidden_act')!r}; supported: silu")
    if fields.flag("mlp_bias") and (family is None or "mlp_bias" not in family.flags):
        raise fields.unsupported("mlp_bias", "a bias in the feed-forward block")
    if fields.get("quantization_config") is not None:
        raise quantized(fields)


def _remedy(window: int, kinds: Collection[str] = (SLIDING,)) -> str:
    """What can be done about layers of these kinds."""
    if set(kinds) != {SLIDING} or not window:
        return f"; {DENSE}"
    reason = "a window hides nothing in texts no longer than itself"
    return f"; {reason}: set max_position_embeddings to {window} to serve those, or {DENSE}"


def _read_delta(fields: Fields) -> dict[str, Any]:
    """What a ModelShape says of gated delta nets."""
    num_layers, kinds = fields.integer("num_hidden_layers"), fields.get("layer_types")
    interval = fields.integer("full_attention_interval", default=4)
    if kinds is None:
        kinds = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not {FULL, LINEAR} >= set(kinds):
        problem = f"must name {FULL} or {LINEAR} for each of {num_layers} layers, not {kinds!r}"
        raise fields.error("layer_types", problem)
    if FULL not in kinds:
        raise fields.unsupported("layer_types", "no layer with attention")
    fields.choice("linear_conv_kernel_dim", (TAPS,))
    fields.choice("attn_output_gate", (True,))
    key_heads = fields.integer("linear_num_key_heads", default=16)
    value_heads = fields.integer("linear_num_value_heads", default=32)
    if value_heads % key_heads:
        problem = f"{key_heads} does not divide linear_num_value_heads {value_heads}"
        raise fields.error("linear_num_key_heads", problem)
    names = "linear_key_head_dim", "linear_value_head_dim"
    dims = [fields.integer(name, default=128) for name in names]
    for name, size in zip(names, dims, strict=True):
        if size < 16 or size & (size - 1):
            raise fields.unsupported(name, f"{size}; supported: powers of two from 16 on")
    delta = DeltaShape(key_heads, value_heads // key_heads, *dims)
    return {"is_delta": tuple(kind == LINEAR for kind in kinds), "delta": delta}


def _read_experts(fields: Fields, family: Family) -> dict[str, Any]:
    """What a ModelShape says of experts: Mixtral's have the feed-forward's own fields."""
    num_layers, places = fields.integer("num_hidden_layers"), ("num_experts", "num_local_experts")
    num_experts = fields.integer(*places, default=0, least=0)
    dense = set(fields.integers("mlp_only_layers"))
    step = fields.integer("decoder_sparse_step", default=1)
    is_sparse = tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers))
    if not num_experts or not any(is_sparse):
        return {}
    own, top_k = fields.get("moe_intermediate_size"), fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        problem = f"{top_k} is more than {places[0]} {num_experts}"
        raise fields.error("num_experts_per_tok", problem)
    fields.choice("hidden_act", ("silu",))
    delta = bool(family.layers.delta)
    experts = ExpertShape(
        num_experts,
        top_k,
        fields.integer("intermediate_size" if own is None else "moe_intermediate_size"),
        renormalizes=own is None or fields.flag("norm_topk_prob", default=delta),
        shared_width=fields.integer("shared_expert_intermediate_size") if delta else 0,
    )
    return {"is_sparse": is_sparse, "experts": experts}


def _read_scales(fields: Fields) -> Scales:
    """Granite's, by the names of its config.json."""
    names = "embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"
    return Scales(*(fields.number(name, default=1.0) for name in names))


def _read_still(fields: Fields) -> tuple[bool, ...]:
    """SmolLM3's: `no_rope_layers` is 0 for layers without rope."""
    count, turned = fields.integer("num_hidden_layers"), fields.integers("no_rope_layers")
    interval = fields.integer("no_rope_layer_interval", default=4)
    turned = turned or [(i + 1) % interval for i in range(count)]
    if len(turned) < count:
        raise fields.error("no_rope_layers", f"names {len(turned)} of {count} layers")
    return tuple(not each for each in turned[:count])


def read_layer_shape(
    fields: Fields, *, rotary: float | None = None, rope_types: tuple[str, ...] = PLAIN
) -> dict[str, Any]:
    """The fields of a LayerShape but for its architecture and its vocabulary.

    rotary: which part of each head is rotated unless the file says; None: always the whole.
    """
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads}")
    head_dim = fields.integer("head_dim", default=max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for rotary embedding, not {head_dim}")
    rope = read_rope(fields, rope_types)
    factor = (rotary or 1.0) if rope.part is None else rope.part
    rotary_dim = int(head_dim * factor) // 2 * 2
    if rotary is None and factor != 1:
        raise fields.unsupported("partial_rotary_factor", "rotating a part of each head")
    if rope.scaling is not None and rope.scaling.rope_type == "longrope":
        lengths = {len(rope.scaling.short_factors), len(rope.scaling.long_factors)}
        if lengths != {rotary_dim // 2}:
            problem = f"long_factor and short_factor must have {rotary_dim // 2} numbers"
            raise fields.error("rope_scaling", problem)
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.integer("intermediate_size"),
        "rms_norm_eps": fields.number("rms_norm_eps", default=1e-6),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "rotary_dim": rotary_dim,
        "dtype": read_dtype(fields),
    }


def read_dtype(fields: Fields) -> str:
    """The checkpoint's dtype, one of DTYPES."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    fields.choice(name, DTYPES)
    return fields.get(name) or DTYPES[0]


def _eos_token_ids(*sources: Fields) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise source.error("eos_token_id", f"must be token ids, not {value!r}")
            found[token_id] = None
    return tuple(found)
