"""Drafters with weights: what they compute, and who reads their directories. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from worker.config import SpecConfig
from worker.drafts.chain_config import read_chain_spec
from worker.drafts.chain_spec import ChainSpec
from worker.drafts.dflash_config import read_dflash_spec
from worker.drafts.dflash_spec import DFlashSpec
from worker.errors import UserError
from worker.model.shape import ModelSpec

DrafterSpec: TypeAlias = ChainSpec | DFlashSpec

# spec.drafter -> who reads the directory of one, for a target.
READERS: Mapping[str, Callable[[Path, ModelSpec], DrafterSpec]] = {
    "chain": read_chain_spec,
    "dflash": read_dflash_spec,
}


def check_block(asked: SpecConfig, spec: DrafterSpec) -> None:
    """Refuse windows and blocks that are longer than a block of the drafter.

    Raises:
        UserError: they are; the message begins with the field.
    """
    if not isinstance(spec, DFlashSpec):
        return
    widths = [] if asked.widths == "auto" else asked.widths
    for name, value in (("widths", max(widths, default=0)), ("block", asked.block)):
        if value > spec.block_size:
            raise UserError(
                f"spec.{name}: {value}, but the drafter's block has {spec.block_size} tokens",
                f"spec.{name}",
            )
