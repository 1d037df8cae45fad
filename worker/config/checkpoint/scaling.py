"""How a model stretches its rope frequencies. Free of torch: a model's description holds it."""

from dataclasses import dataclass

from worker.errors import Unsupported

ROPE_TYPES = ("default", "linear", "llama3", "dynamic", "yarn", "longrope")


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
