"""A Hugging Face model directory's configuration, read into one checked record."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from worker.config.checkpoint.class_defaults import with_class_defaults
from worker.config.checkpoint.delta_shape import DELTA_BLOCK, DeltaShape, read_delta
from worker.config.checkpoint.experts import ExpertShape, read_experts
from worker.config.checkpoint.families import FAMILIES, Family, Features
from worker.config.checkpoint.fields import Fields, is_list, read_fields
from worker.config.checkpoint.foreign import check_kind
from worker.config.checkpoint.latent_shape import LatentShape, read_latent
from worker.config.checkpoint.mask import KEY_BLOCK, KeyMask
from worker.config.checkpoint.quantization import Quantization, read_quantization
from worker.config.checkpoint.refusals import DENSE, unknown_architecture
from worker.config.checkpoint.rope_fields import (
    PLAIN,
    ROPE_TYPES,
    Rope,
    RopeScaling,
    read_local_rope,
    read_rope,
)
from worker.config.checkpoint.windows import FULL, SLIDING, read_windows

DTYPES = ("float32", "bfloat16", "float16")
NOBODYS = Family("")  # what holds for drafters


class Scales(NamedTuple):
    """Numbers by which a model multiplies what is 1 elsewhere."""

    embedding: float = 1.0
    residual: float = 1.0  # of what attention and feed-forward add to it
    logits: float = 1.0  # they are divided by it
    attention: float | None = None  # of its scores; None: head_dim^-0.5
    attention_cap: float = 0.0  # scores are cap · tanh(score / cap); 0: as they are
    logits_cap: float = 0.0


class Layer(NamedTuple):
    """What one layer of a model is made of."""

    kind: str  # a name of worker.model.kinds.KINDS
    number: int = 0  # among the layers of its kind: its keys or its state have it in the pool
    is_sparse: bool = False  # experts stand in the place of its feed-forward


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
    experts: ExpertShape | None = None  # of those layers of `layers` that have them
    latent: LatentShape | None = None  # of layers with latents; head_dim is that of queries
    # In which other format the files have matrices; None: all are in the model's dtype.
    quantization: Quantization | None = None

    @property
    def features(self) -> Features:
        """What the layers are made of."""
        raise NotImplementedError

    @property
    def layers(self) -> tuple[Layer, ...]:
        """In their order."""
        return (Layer(self.features.attention),)

    @property
    def in_features(self) -> int:
        """Numbers of a token that q, k and v are made of."""
        return self.hidden_size

    @property
    def rope_of_most(self) -> Rope:
        """How all layers turn that are not told otherwise."""
        return Rope(self.rope_theta, self.rope_scaling, None)

    @property
    def attention_scale(self) -> float:
        """Of the scores."""
        gain = 1.0 if self.latent is None else self.latent.gain
        return (self.scales.attention or self.head_dim**-0.5) * gain

    @property
    def scale_group(self) -> int:
        """Columns of a matrix that share a scale, so that no rank's part ends within; else 1."""
        return self.quantization.step if self.quantization else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(LayerShape):
    """The shape of the weights, as the file gives it."""

    num_layers: int
    tie_word_embeddings: bool
    flags: tuple[str, ...]  # that are true, of those that the family asks for; sorted
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]  # config.json's, then generation_config.json's others
    penalizes: bool  # generation_config.json has a repetition penalty for requests that name none
    # Which layers are gated delta nets; `delta` are their heads. See also `layers`.
    is_delta: tuple[bool, ...] = ()
    delta: DeltaShape | None = None
    is_still: tuple[bool, ...] = ()  # which layers have no rope; (): none
    windows: tuple[int, ...] = ()  # keys that a layer's tokens see, 0: all; (): no layer has one
    local_rope: Rope | None = None  # of layers with a window; None: as of the others
    # Which layers have experts in the place of a feed-forward; (): none.
    is_sparse: tuple[bool, ...] = ()

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
    def masks(self) -> tuple[KeyMask, ...]:
        """Which keys the tokens see, of each layer with keys; (): all."""
        longest = self.max_position_embeddings
        seen = [window if window < longest else 0 for window in self.windows]
        return tuple(KeyMask(window=x or None) for x in seen) if any(seen) else ()

    @property
    def span(self) -> int:
        """So many tokens before its end are read of a text, by kernels in whole blocks; 0: all."""
        widest = [mask.window or 0 for mask in self.masks]
        return max(widest) + KEY_BLOCK - 1 if all(widest) and widest else 0

    def rope(self, layer: int) -> Rope | None:
        """How this layer turns; None: it has no rope."""
        if self.is_still and self.is_still[layer]:
            return None
        if self.local_rope is not None and self.windows and self.windows[layer]:
            return self.local_rope
        return self.rope_of_most

    @property
    def grain(self) -> int:
        """Chunks of a prompt that are not its last end at multiples of it."""
        return 1 if self.delta is None else DELTA_BLOCK

    @property
    def layers(self) -> tuple[Layer, ...]:
        found, none = list[Layer](), (False,) * self.num_layers
        for is_delta, is_sparse in zip(self.is_delta or none, self.is_sparse or none, strict=True):
            kind = "delta" if is_delta else self.features.attention
            number = sum(layer.kind == kind for layer in found)
            found.append(Layer(kind, number, is_sparse))
        return tuple(found)

    @property
    def num_kv_layers(self) -> int:
        """Layers with keys and values."""
        return sum(layer.kind == self.features.attention for layer in self.layers)

    @property
    def features(self) -> Features:
        """What the layers are made of, by architecture and flags."""
        return FAMILIES[self.architecture].features(self.flags)


def read_model_shape(path: Path) -> ModelShape:
    """The shape of the model in directory `path` (config.json, generation_config.json if any).

    Raises:
        UserError: a file is missing or no JSON object, or a field is missing or wrong; the message
            names both. Unsupported if the model is well described but cannot be computed, or
            lies there in another form.
    """
    check_kind(path)
    outer = fields = read_fields(path / "config.json", DENSE)
    architecture = read_architecture(fields)
    if architecture not in FAMILIES:
        raise unknown_architecture(fields, architecture, ", ".join(sorted(FAMILIES)))
    family = FAMILIES[architecture]
    quantization = read_quantization(fields, *[fields.inner("text_config")] * family.nested)
    outer = fields = with_class_defaults(fields, architecture)
    if family.nested:
        dtype, fields = fields.get("dtype", "torch_dtype"), fields.inner("text_config")
        if fields.get("dtype", "torch_dtype") is None:
            fields = fields.with_defaults({"dtype": dtype})
        fields = with_class_defaults(fields, architecture)
    refuse_what_we_cannot_compute(fields, family)
    windows = () if family.layers.delta else read_windows(fields, family)
    asked = sorted({*family.flags.values()})
    generation = path / "generation_config.json"
    generates = read_fields(generation) if generation.exists() else Fields(generation, {})
    return ModelShape(
        architecture=architecture,
        **read_layers(fields, family),
        **(read_delta(fields) if family.layers.delta else {}),
        **(read_experts(fields, family) if family.layers.experts else {}),
        num_layers=fields.integer("num_hidden_layers"),
        vocab_size=fields.integer("vocab_size"),
        tie_word_embeddings=(outer if family.nested else fields).flag("tie_word_embeddings"),
        flags=tuple(x for x in asked if fields.flag(x)),
        scales=_read_scales(fields, family.scales),
        is_still=_read_still(fields, family, windows),
        windows=windows,
        local_rope=(
            read_local_rope(fields, SLIDING, family.local_theta) if family.local_theta else None
        ),
        max_position_embeddings=_longest(fields, family),
        eos_token_ids=_eos_token_ids(fields, *[outer] * family.nested, generates),
        quantization=quantization,
        penalizes=(generates.get("repetition_penalty") or 1) != 1,  # routers check the value
    )


def read_layers(fields: Fields, family: Family) -> dict[str, Any]:
    """As `read_layer_shape`, of a model: of one key for all heads where layers have latents."""
    found: dict[str, Any] = {}
    if family.layers.attention == "latent":
        latent = read_latent(fields)
        kept = {"num_key_value_heads": 1, "head_dim": latent.rope_dim}
        fields = Fields(fields.path, {**fields.values, **kept}, fields.prefix, fields.remedy)
        found = {"latent": latent, "head_dim": latent.query_dim}
    told: dict[str, Any] = {"rope_types": ROPE_TYPES, "eps": family.eps}
    return read_layer_shape(fields, rotary=family.rotary, **told) | found


def _longest(fields: Fields, family: Family) -> int:
    """Positions that the model has; files of Command-R say in another field what it really has."""
    longest = fields.integer("max_position_embeddings")
    if family.scales != "cohere":
        return longest
    return max(longest, fields.integer("model_max_length", default=longest))


def read_architecture(fields: Fields) -> str:
    """The one name in `architectures`, whether or not we know it."""
    names = fields.get("architectures")
    if not is_list(names) or len(names) != 1 or not isinstance(names[0], str):
        problem = f"must be a list of one name, not {names!r}"
        raise fields.error("architectures", problem, 'set it to the class, as ["LlamaForCausalLM"]')
    return names[0]


def refuse_what_we_cannot_compute(fields: Fields, family: Family = NOBODYS) -> None:
    """Refuse what no layer of ours has, of a family or a drafter."""
    activation = family.layers.activation
    for name in ("hidden_act", "hidden_activation"):
        if fields.get(name) not in (None, activation):
            raise fields.unsupported(name, f"{fields.get(name)!r}; supported: {activation}")
    if fields.flag("mlp_bias") and "mlp_bias" not in family.flags:
        raise fields.unsupported("mlp_bias", "a bias in the feed-forward block")
    if fields.flag("use_bidirectional_attention"):
        raise fields.unsupported("use_bidirectional_attention", "it embeds texts", DENSE)


def _read_scales(fields: Fields, whose: str) -> Scales:
    """By the names of their config.json."""
    if whose == "granite":
        names = "embedding_multiplier", "residual_multiplier", "logits_scaling"
        names = *names, "attention_multiplier"
        return Scales(*(fields.number(name, default=1.0) for name in names))
    if whose == "cohere":
        return Scales(logits=1 / fields.number("logit_scale"))
    if not whose:
        return Scales()
    cap = fields.number("attn_logit_softcapping", default=0.0)
    return Scales(
        attention=fields.number("query_pre_attn_scalar") ** -0.5,
        attention_cap=cap if whose == "gemma2" else 0.0,  # transformers has it, and leaves it out
        logits_cap=fields.number("final_logit_softcapping", default=0.0),
    )


def _read_still(fields: Fields, family: Family, windows: tuple[int, ...]) -> tuple[bool, ...]:
    """Which layers have no rope; SmolLM3's `no_rope_layers` is 0 for them."""
    if family.still != "listed":
        return tuple(not each for each in windows) if family.still else ()
    count, turned = fields.integer("num_hidden_layers"), fields.integers("no_rope_layers")
    interval = fields.integer("no_rope_layer_interval", default=4)
    turned = turned or [(i + 1) % interval for i in range(count)]
    if len(turned) < count:
        raise fields.error("no_rope_layers", f"names {len(turned)} of {count} layers")
    return tuple(not each for each in turned[:count])


def read_layer_shape(
    fields: Fields,
    *,
    rotary: float | None = None,
    rope_types: tuple[str, ...] = PLAIN,
    eps: str = "rms_norm_eps",
) -> dict[str, Any]:
    """The fields of a LayerShape but for its architecture and its vocabulary.

    rotary: which part of each head is rotated unless the file says; None: always the whole.
    eps: the field of norms' eps.
    """
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads}")
    head_dim = fields.integer("head_dim", default=max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for rotary embedding, not {head_dim}")
    rope = read_rope(fields, rope_types, FULL)
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
        "rms_norm_eps": fields.number(eps, default=1e-6),
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "rotary_dim": rotary_dim,
        "dtype": read_dtype(fields),
    }


def read_dtype(fields: Fields) -> str:
    """The checkpoint's dtype, one of DTYPES."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    fields.choice(name, DTYPES, "set it to that of norms and embeddings")
    return fields.get(name) or DTYPES[0]


def _eos_token_ids(*sources: Fields) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        ids = value if is_list(value) else [] if value is None else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise source.error("eos_token_id", f"must be token ids, not {value!r}")
            found[token_id] = None
    return tuple(found)
