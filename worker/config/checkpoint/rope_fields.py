"""How a model's rope turns, and the fields of config.json that say so. Free of torch."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from worker.config.checkpoint.fields import Fields, is_list
from worker.errors import Unsupported

ROPE_TYPES = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")
# What drafters were trained with; their files have no fields of others.
PLAIN = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A scaling of rope. Unsupported: of another type.

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

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise Unsupported(
                f"config.rope_scaling: rope type {self.rope_type!r} is not supported; "
                f"supported: {', '.join(ROPE_TYPES)}",
                param="rope_scaling",
            )


class Rope(NamedTuple):
    """Fields of a LayerShape."""

    theta: float
    scaling: RopeScaling | None
    part: float | None  # of each head that is rotated; None: the file does not say


def read_rope(fields: Fields, types: tuple[str, ...] = ROPE_TYPES, layers: str = "") -> Rope:
    """What `rope_parameters` says, or `rope_theta`, `rope_scaling` and `partial_rotary_factor`.

    layers: the type of layers whose rope it is, where `rope_parameters` has several. Raises
    UserError for what is wrong there, Unsupported for other types than `types`.
    """
    name = "rope_parameters" if fields.get("rope_parameters") is not None else "rope_scaling"
    inner = fields.inner(name)
    inner = inner.inner(layers) if layers in inner.values else inner
    theta = inner.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    part = inner.get("partial_rotary_factor")
    part = fields.get("partial_rotary_factor") if part is None else part
    kind = inner.values.get("rope_type", inner.values.get("type", "default"))
    if kind in ("su", "yarn") and "long_factor" in inner.values:
        kind = "longrope"  # as older files of Phi-3 call it
    if kind not in types:
        problem = f"rope type {kind!r} is not supported; supported: {', '.join(types)}"
        raise fields.unsupported(name, problem)
    if kind == "default":
        return Rope(theta, None, part)
    if kind == "longrope":
        return Rope(theta, _longrope(fields, inner), part)
    factor = inner.number("factor")
    if kind in ("linear", "dynamic"):
        return Rope(theta, RopeScaling(kind, factor), part)
    if kind == "yarn":
        return Rope(theta, _yarn(fields, inner, factor), part)
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if high <= low:
        raise inner.error("high_freq_factor", f"{high} must exceed low_freq_factor {low}")
    original = inner.integer("original_max_position_embeddings")
    return Rope(theta, RopeScaling(kind, factor, low, high, original), part)


def read_local_rope(fields: Fields, layers: str, theta: str) -> Rope:
    """That of such layers, which is never stretched unless `rope_parameters` says so.

    theta: the field of its base, where files are older.
    """
    if layers in fields.inner("rope_parameters").values:
        return read_rope(fields, layers=layers)
    return Rope(fields.number(theta, default=10000.0), None, None)


def _original(fields: Fields, inner: Fields) -> int:
    """For how many positions the model was trained before its rope was stretched."""
    field = "original_max_position_embeddings"
    longest = fields.integer("max_position_embeddings")
    return inner.integer(field, default=fields.integer(field, default=longest))


def _yarn(fields: Fields, inner: Fields, factor: float) -> RopeScaling:
    def grown(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    both = [inner.get(each) for each in ("mscale", "mscale_all_dim")]
    computed = grown(both[0]) / grown(both[1]) if all(both) else grown(1.0)
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=_original(fields, inner),
        attention_factor=inner.number("attention_factor", default=computed),
        beta_fast=inner.number("beta_fast", default=32.0),
        beta_slow=inner.number("beta_slow", default=1.0),
        truncate=inner.flag("truncate", default=True),
    )


def _longrope(fields: Fields, inner: Fields) -> RopeScaling:
    for field in ("short_mscale", "long_mscale"):
        if inner.get(field) is not None:
            raise inner.unsupported(field, "cosines and sines scaled by length")
    original = _original(fields, inner)
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
