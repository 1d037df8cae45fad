"""How a model's rope turns, and the fields of config.json that say so. Free of torch."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from worker.config.checkpoint.fields import Fields, is_list

ROPE_TYPES = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")
# What drafters were trained with; their files have no fields of others.
PLAIN = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A scaling of rope, of one of ROPE_TYPES.

    "dynamic" stretches nothing up to a model's own positions, and nothing longer is served.
    """

    rope_type: str
    factor: float = 1.0
    low_freq_factor: float = 1.0  # of llama3, as the next
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192  # of llama3, yarn and longrope
    attention_factor: float = 1.0  # of cosines and sines: of yarn and longrope
    beta_fast: float = 32.0  # of yarn, as the next two: rotations within the original length
    beta_slow: float = 1.0
    truncate: bool = True  # are the ramp's ends whole numbers?
    short_factors: tuple[float, ...] = ()  # of longrope, of each rotated pair, as the next
    long_factors: tuple[float, ...] = ()
    is_long: bool = True  # which of them are used


class Rope(NamedTuple):
    """Fields of a LayerShape."""

    theta: float
    scaling: RopeScaling | None
    part: float | None  # of each head that is rotated; None: the file does not say


def read_rope(fields: Fields, types: tuple[str, ...] = ROPE_TYPES, layers: str = "") -> Rope:
    """What `rope_parameters` says, or `rope_theta`, `rope_scaling` and `partial_rotary_factor`.

    layers: the type of layers whose rope it is, where `rope_parameters` has several. Raises
    UserError for what is wrong there, or said in both objects and not alike; Unsupported for other
    types than `types`.
    """
    held = [name for name in ("rope_parameters", "rope_scaling") if fields.inner(name).values]
    first, *others = [_read(fields, name, types, layers) for name in held or ["rope_parameters"]]
    if others and first != others[0]:
        remedy = "remove the one that is not the model's, or take the file as published"
        raise fields.error("rope_scaling", "differs from rope_parameters", remedy)
    return first


def _read(fields: Fields, name: str, types: tuple[str, ...], layers: str) -> Rope:
    inner = fields.inner(name)
    is_shared = layers not in inner.values  # by layers of all types
    inner = inner if is_shared else inner.inner(layers)
    theta = inner.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    name_of_part = "partial_rotary_factor"
    held = (x.number(name_of_part) for x in (inner, fields) if x.get(name_of_part) is not None)
    part = next(held, None)
    kind = inner.values.get("rope_type", inner.values.get("type", "default"))
    if kind in ("su", "yarn") and "long_factor" in inner.values:
        kind = "longrope"  # as older files of Phi-3 call it
    if kind not in types:
        problem = f"rope type {kind!r} is not supported; supported: {', '.join(types)}"
        raise fields.unsupported(name, problem)
    if kind == "default":
        return Rope(theta, None, part)
    if kind in ("linear", "dynamic"):
        return Rope(theta, RopeScaling(kind, inner.number("factor")), part)
    original = _original(fields, inner, is_shared=is_shared)
    if kind == "longrope":
        return Rope(theta, _longrope(fields, inner, original), part)
    factor = inner.number("factor")
    if kind == "yarn":
        return Rope(theta, _yarn(inner, factor, original), part)
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if high <= low:
        raise inner.error("high_freq_factor", f"{high} must exceed low_freq_factor {low}")
    return Rope(theta, RopeScaling(kind, factor, low, high, original), part)


def read_local_rope(fields: Fields, layers: str, theta: str) -> Rope:
    """That of such layers, which is never stretched unless `rope_parameters` says so.

    theta: the field of its base, where files are older.
    """
    parameters = fields.inner("rope_parameters")
    if layers in parameters.values:
        return read_rope(fields, layers=layers)
    if parameters.values and not any(isinstance(x, dict) for x in parameters.values.values()):
        remedy = "set it to an object for each type of layers, as layer_types names them"
        raise fields.error("rope_parameters", "is of all layers, whose ropes differ", remedy)
    return Rope(fields.number(theta, default=10000.0), None, None)


def _original(fields: Fields, inner: Fields, *, is_shared: bool) -> int:
    """For how many positions the model was trained before its rope was stretched.

    Of a rope that all layers share, the file's own field counts before the object's, as in
    transformers 5.24 (modeling_rope_utils.py, standardize_rope_params).
    """
    field = "original_max_position_embeddings"
    longest = fields.integer("max_position_embeddings")
    if is_shared and fields.get(field) is not None:
        return fields.integer(field)
    return inner.integer(field, default=fields.integer(field, default=longest))


def _yarn(inner: Fields, factor: float, original: int) -> RopeScaling:
    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    both = [inner.get(x) and inner.number(x) for x in ("mscale", "mscale_all_dim")]
    computed = grown(both[0]) / grown(both[1]) if all(both) else grown(1.0)
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=original,
        attention_factor=inner.number("attention_factor", default=computed),
        beta_fast=inner.number("beta_fast", default=32.0),
        beta_slow=inner.number("beta_slow", default=1.0),
        truncate=inner.flag("truncate", default=True),
    )


def _longrope(fields: Fields, inner: Fields, original: int) -> RopeScaling:
    for field in ("short_mscale", "long_mscale"):
        if inner.get(field) is not None:
            raise inner.unsupported(field, "cosines and sines scaled by length")
    longest = fields.integer("max_position_embeddings")
    factor = inner.number("factor", default=longest / original)
    computed = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        "longrope",
        factor,
        original_max_position_embeddings=original,
        attention_factor=inner.number("attention_factor", default=computed),
        short_factors=_factors(inner, "short_factor"),
        long_factors=_factors(inner, "long_factor"),
        is_long=longest > original,
    )


def _factors(inner: Fields, field: str) -> tuple[float, ...]:
    value = inner.get(field)
    numbers = value if is_list(value) else []
    if not numbers or not all(isinstance(x, int | float) and x > 0 for x in numbers):
        raise inner.error(field, f"must be a list of positive numbers, not {value!r}")
    return tuple(map(float, numbers))
