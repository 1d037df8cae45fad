"""What layers of experts follow from. Free of torch."""

import math
from typing import Literal, NamedTuple

from worker.errors import Unsupported

Division = Literal["auto", "tensor", "expert"]
GRAIN = 64  # numbers of an expert's hidden layer below which a rank's part makes small products


class ExpertShape(NamedTuple):
    """Experts of one layer, of the whole model."""

    num_experts: int
    top_k: int  # experts of a token
    width: int  # of an expert's hidden layer
    renormalizes: bool  # weights of a token's experts are divided by their sum
    shared_width: int = 0  # of the expert that every token has, behind a gate; 0: there is none


class Held(NamedTuple):
    """The experts of one rank: from `first`, so many."""

    first: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride] - nobody counts in a pair


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
