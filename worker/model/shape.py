"""A Hugging Face model directory's configuration, read into one checked record."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.model.families import FAMILIES, Features
from worker.model.fields import Fields, read_fields
from worker.ops.scaling import ROPE_TYPES, RopeScaling
from worker.recurrent.delta_shape import BLOCK, TAPS, DeltaShape

FULL, LINEAR = "full_attention", "linear_attention"  # in `layer_types`
DTYPES = ("float32", "bfloat16", "float16")


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

    @property
    def features(self) -> Features:
        """What the layers are made of."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(LayerShape):
    """The shape of the weights, as the file gives it."""

    num_layers: int
    tie_word_embeddings: bool
    attention_bias: bool  # the file's flag; False where the architecture alone decides
    qk_norm: bool  # the file's flag; False where the architecture alone decides
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]  # config.json's, then generation_config.json's others
    penalizes: bool  # generation_config.json has a repetition penalty for requests that name none
    # Which layers are gated delta nets and not attention; `delta` are their heads.
    is_delta: tuple[bool, ...] = ()
    delta: DeltaShape | None = None

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
        family = FAMILIES[self.architecture]
        return family.features(attention_bias=self.attention_bias, qk_norm=self.qk_norm)


def read_model_shape(path: Path) -> ModelShape:
    """The shape of the model in directory `path` (config.json, generation_config.json if any).

    Raises:
        UserError: a file is missing or no JSON object, or a field is missing or wrong; the message
            names both. Unsupported if the model is well described but cannot be computed.
    """
    outer = fields = read_fields(path / "config.json")
    architecture = read_architecture(fields)
    if architecture not in FAMILIES:
        supported = ", ".join(sorted(FAMILIES))
        problem = f"{architecture!r} is not supported; supported: {supported}"
        raise fields.unsupported("architectures", problem)
    family = FAMILIES[architecture]
    if family.nested:
        fields = fields.inner("text_config")
    refuse_what_we_cannot_compute(fields, layers=bool(family.delta))
    generation = path / "generation_config.json"
    generates = read_fields(generation) if generation.exists() else Fields(generation, {})
    return ModelShape(
        architecture=architecture,
        **read_layer_shape(fields, partial=bool(family.delta)),
        **(_read_delta(fields) if family.delta else {}),
        num_layers=fields.integer("num_hidden_layers"),
        vocab_size=fields.integer("vocab_size"),
        tie_word_embeddings=(outer if family.nested else fields).flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        qk_norm=fields.flag("qk_norm"),
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


def refuse_what_we_cannot_compute(fields: Fields, *, layers: bool = False) -> None:
    """Refuse what no layer of ours has, whatever the architecture.

    layers: whoever calls has layers of several types, and reads the fields of those itself.
    """
    if not layers:
        layer_types = fields.get("layer_types")
        if others := set(layer_types or ()) - {"full_attention"}:
            raise fields.unsupported("layer_types", f"layers of type {', '.join(sorted(others))}")
        if layer_types is None and fields.flag("use_sliding_window"):
            raise fields.unsupported("use_sliding_window", "sliding-window attention")
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.unsupported("hidden_act", f"{fields.get('hidden_act')!r}; supported: silu")
    if fields.flag("mlp_bias"):
        raise fields.unsupported("mlp_bias", "a bias in the feed-forward block")
    if fields.get("quantization_config") is not None:
        raise fields.unsupported("quantization_config", "quantized weights")


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
    dense = fields.integers("mlp_only_layers")
    if fields.integer("num_experts", default=0, least=0) and len(set(dense)) < num_layers:
        raise fields.unsupported("num_experts", "layers of experts")
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


def read_layer_shape(fields: Fields, *, partial: bool = False) -> dict[str, Any]:
    """The fields of a LayerShape but for its architecture and its vocabulary.

    partial: a part of each head may be rotated.
    """
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads}")
    head_dim = fields.integer("head_dim", default=max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for rotary embedding, not {head_dim}")
    rope_theta, rope_scaling, factor = _rope(fields)
    if factor is None:
        factor = 0.25 if partial else 1.0
    rotary_dim = int(head_dim * factor) // 2 * 2
    if not partial and factor != 1:
        raise fields.unsupported("partial_rotary_factor", "rotating a part of each head")
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": fields.integer("intermediate_size"),
        "rms_norm_eps": fields.number("rms_norm_eps", default=1e-6),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "rotary_dim": rotary_dim,
        "dtype": read_dtype(fields),
    }


def _rope(fields: Fields) -> tuple[float, RopeScaling | None, float | None]:
    """(theta, scaling, rotated part of a head) from `rope_parameters`, or `rope_theta`,
    `rope_scaling` and `partial_rotary_factor`."""
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    inner = fields.inner(name)
    theta = inner.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    part = inner.get("partial_rotary_factor")
    part = fields.get("partial_rotary_factor") if part is None else part
    rope_type = inner.values.get("rope_type", inner.values.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        supported = ", ".join(ROPE_TYPES)
        problem = f"rope type {rope_type!r} is not supported; supported: {supported}"
        raise fields.unsupported(name, problem)
    if rope_type == "default":
        return theta, None, part
    factor = inner.number("factor")
    if rope_type == "linear":
        return theta, RopeScaling(rope_type, factor), part
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if high <= low:
        raise inner.error("high_freq_factor", f"{high} must exceed low_freq_factor {low}")
    original = inner.integer("original_max_position_embeddings")
    return theta, RopeScaling(rope_type, factor, low, high, original), part


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
