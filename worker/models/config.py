"""A Hugging Face model directory's configuration, read into one checked record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.errors import Unsupported, UserError
from worker.kernels.attention.scaling import ROPE_TYPES, RopeScaling
from worker.models.architectures import ARCHITECTURES

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of the weights, as the file gives it: of the whole model, not of one rank."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    attention_bias: bool  # the file's flag; False where the architecture alone decides
    qk_norm: bool  # the file's flag; False where the architecture alone decides
    max_position_embeddings: int
    dtype: str  # of the checkpoint
    eos_token_ids: tuple[int, ...]  # config.json's, then generation_config.json's others
    penalizes: bool  # generation_config.json has a repetition penalty for requests that name none


class _Fields:
    """Typed access to one JSON object; every complaint names the file and the field."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def error(self, field: str, problem: str) -> UserError:
        return UserError(f"{self.path}: {field}: {problem}", param=field)

    def unsupported(self, field: str, problem: str) -> Unsupported:
        return Unsupported(f"{self.path}: {field}: {problem}", param=field)

    def get(self, field: str) -> Any:
        """The value, None if it is absent or null."""
        return self.values.get(field)

    def integer(self, field: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.values.get(field)
        value = default if value is None else value
        if value is None:
            raise self.error(field, "missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(field, f"must be a positive integer, not {value!r}")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.values.get(field)
        value = default if value is None else value
        if value is None:
            raise self.error(field, "missing")
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(field, f"must be a positive number, not {value!r}")
        return float(value)

    def flag(self, field: str) -> bool:
        """A boolean, False if absent."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.error(field, f"must be true or false, not {value!r}")
        return bool(value)


def read_model_spec(path: Path) -> ModelSpec:
    """The spec of the model in directory `path` (config.json, generation_config.json if any).

    Raises:
        ValueError: a file is missing or no JSON object, or a field is missing or wrong; the
            message names file and field. Unsupported (a ValueError) if the model is well
            described but uses what we cannot compute.
    """
    fields = _read(path / "config.json")
    architecture = _architecture(fields)
    _refuse_what_we_cannot_compute(fields)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads}")
    head_dim = fields.integer("head_dim", default=max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for rotary embedding, not {head_dim}")
    rope_theta, rope_scaling = _rope(fields)
    generation = path / "generation_config.json"
    generates = _read(generation) if generation.exists() else _Fields(generation, {})
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        qk_norm=fields.flag("qk_norm"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        dtype=_dtype(fields),
        eos_token_ids=_eos_token_ids(fields, generates),
        penalizes=(generates.get("repetition_penalty") or 1) != 1,  # routers check the value
    )


def _read(path: Path) -> _Fields:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise UserError(f"{path}: no such file; is this a Hugging Face model directory?") from e
    except ValueError as e:
        raise UserError(f"{path}: not valid JSON: {e}") from e
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold a JSON object, not a {type(values).__name__}")
    return _Fields(path, values)


def _architecture(fields: _Fields) -> str:
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", f"must be a list of one name, not {names!r}")
    if names[0] not in ARCHITECTURES:
        raise fields.unsupported(
            "architectures",
            f"{names[0]!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}",
        )
    return names[0]


def _refuse_what_we_cannot_compute(fields: _Fields) -> None:
    layer_types = fields.get("layer_types")
    if layer_types is None:
        if fields.flag("use_sliding_window"):
            raise fields.unsupported("use_sliding_window", "sliding-window attention")
    elif set(layer_types) - {"full_attention"}:
        others = sorted(set(layer_types) - {"full_attention"})
        raise fields.unsupported("layer_types", f"layers of type {', '.join(others)}")
    if fields.get("hidden_act") not in (None, "silu"):
        raise fields.unsupported("hidden_act", f"{fields.get('hidden_act')!r}; supported: silu")
    if fields.flag("mlp_bias"):
        raise fields.unsupported("mlp_bias", "a bias in the feed-forward block")
    if fields.get("quantization_config") is not None:
        raise fields.unsupported("quantization_config", "quantized weights")


def _rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) from `rope_parameters`, or from `rope_theta` and `rope_scaling`."""
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    values = fields.get(name)
    default_theta = fields.number("rope_theta", default=10000.0)
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fields.unsupported("partial_rotary_factor", "rotating a part of each head")
    if values is None:
        return default_theta, None
    if not isinstance(values, dict):
        raise fields.error(name, f"must be an object, not {values!r}")
    inner = _Fields(fields.path, {f"{name}.{key}": value for key, value in values.items()})
    theta = inner.number(f"{name}.rope_theta", default=default_theta)
    if inner.get(f"{name}.partial_rotary_factor") not in (None, 1, 1.0):
        raise inner.unsupported(f"{name}.partial_rotary_factor", "rotating a part of each head")
    rope_type = values.get("rope_type", values.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise inner.unsupported(
            name,
            f"config.rope_scaling: rope type {rope_type!r} is not supported; "
            f"supported: {', '.join(ROPE_TYPES)}",
        )
    if rope_type == "default":
        return theta, None
    factor = inner.number(f"{name}.factor")
    if rope_type == "linear":
        return theta, RopeScaling(rope_type, factor)
    low = inner.number(f"{name}.low_freq_factor")
    high = inner.number(f"{name}.high_freq_factor")
    if high <= low:
        raise inner.error(f"{name}.high_freq_factor", f"{high} must exceed low_freq_factor {low}")
    original = inner.integer(f"{name}.original_max_position_embeddings")
    return theta, RopeScaling(rope_type, factor, low, high, original)


def _dtype(fields: _Fields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    if value is None:
        return "float32"
    if value not in DTYPES:
        raise fields.unsupported(name, f"{value!r}; supported: {', '.join(DTYPES)}")
    return value


def _eos_token_ids(*sources: _Fields) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise source.error("eos_token_id", f"must be token ids, not {value!r}")
            found[token_id] = None
    return tuple(found)
