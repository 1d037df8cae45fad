"""Who reads the directory of a drafter with weights. Free of torch."""

from collections.abc import Callable, Mapping
from pathlib import Path

from worker.config import SpecConfig
from worker.drafts.chain_config import read_chain_shape
from worker.drafts.dflash_config import read_dflash_shape
from worker.drafts.drafter_shape import DFlashShape, DrafterShape
from worker.errors import UserError
from worker.model.shape import ModelShape

# spec.drafter -> who reads the directory of one, for a target.
READERS: Mapping[str, Callable[[Path, ModelShape], DrafterShape]] = {
    "chain": read_chain_shape,
    "dflash": read_dflash_shape,
}


def check_block(asked: SpecConfig, shape: DrafterShape) -> None:
    """Refuse windows and blocks that are longer than a block of the drafter, by a UserError."""
    if not isinstance(shape, DFlashShape):
        return
    widths = [] if asked.widths == "auto" else asked.widths
    for name, value in (("widths", max(widths, default=0)), ("block", asked.block)):
        if value > shape.block_size:
            raise UserError(
                f"spec.{name}: {value}, but the drafter's block has {shape.block_size} tokens",
                f"spec.{name}",
            )
