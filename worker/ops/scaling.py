"""How a model stretches its rope frequencies. Free of torch: a model's description holds it."""

from dataclasses import dataclass

from worker.errors import Unsupported

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A scaling of rope; the last three fields are llama3's only. Unsupported: of another type."""

    rope_type: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise Unsupported(
                f"config.rope_scaling: rope type {self.rope_type!r} is not supported; "
                f"supported: {', '.join(ROPE_TYPES)}",
                param="rope_scaling",
            )
