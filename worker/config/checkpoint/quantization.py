"""Weights in eight bits as config.json declares them: which forms are read. Free of torch."""

import re
from typing import Any, NamedTuple

from worker.config.checkpoint.fields import Fields, is_list
from worker.config.checkpoint.refusals import quantized, unquantized
from worker.errors import Unsupported

BLOCK = 128  # rows and columns that share a scale, in files that have blocks


class EightBits(NamedTuple):
    """Which matrices of a model are in eight bits, and of what its scales are."""

    by_block: bool  # a scale for 128 × 128 numbers; else one for a row or the tensor
    ignored: tuple[str, ...] = ()  # modules that are not: names, ends of names, "re:..."

    def takes(self, module: str) -> bool:
        """Whether the matrix of the module of this full name is in eight bits."""
        return not any(
            re.match(each[3:], module)
            if each.startswith("re:")
            else f".{module}.".endswith(f".{each}.") or f"{module}.".startswith(f"{each}.")
            for each in self.ignored
        )


def read_quantization(fields: Fields) -> EightBits | None:
    """What a `quantization_config` says of matrices; None: there is none, or activations stay.

    Read: `fp8` with blocks of 128 × 128, and compressed-tensors' `float-quantized` with a scale a
    tensor, channel or block. Raises Unsupported for any other, by field and value.
    """
    if fields.get("quantization_config") is None:
        return None
    held = fields.inner("quantization_config")
    method = held.get("quant_method")
    if method == "fp8":
        held.choice("fmt", ("e4m3",))
        held.choice("activation_scheme", ("dynamic",))
        if (size := held.get("weight_block_size")) != [BLOCK, BLOCK]:
            raise _refused(held, "weight_block_size", f"{size!r}; read: {[BLOCK, BLOCK]}")
        return EightBits(True, _names(held, "modules_to_not_convert", "ignored_layers"))
    if method == "compressed-tensors":
        held.choice("format", ("float-quantized",))
        if held.get("format") is None:
            raise _refused(held, "format", "absent; read: float-quantized")
        groups = held.inner("config_groups")
        found = {_read_group(groups.inner(name)) for name in groups.values}
        if len(found) > 1:
            raise _refused(held, "config_groups", "groups of several forms; read: one form")
        by_block = next(iter(found), None)
        return None if by_block is None else EightBits(by_block, _names(held, "ignore"))
    raise quantized(fields)


def _names(fields: Fields, *places: str) -> tuple[str, ...]:
    where, field = fields.place(*places)
    value: Any = where.values.get(field) or []
    if not is_list(value) or not all(isinstance(each, str) for each in value):
        raise where.error(field, f"must be a list of names, not {value!r}")
    return tuple(value)


def _read_group(group: Fields) -> bool | None:
    """Whether scales are those of blocks; None: activations are not in eight bits."""
    if group.get("targets") not in (None, ["Linear"]):
        raise _refused(group, "targets", f"{group.get('targets')!r}; read: ['Linear']")
    weights = group.inner("weights")
    weights.choice("type", ("float",))
    weights.choice("num_bits", (8,))
    weights.choice("strategy", ("tensor", "channel", "block"))
    if (size := weights.get("block_structure")) not in (None, [BLOCK, BLOCK]):
        raise _refused(weights, "block_structure", f"{size!r}; read: {[BLOCK, BLOCK]}")
    # Activations are scaled as they come, by row and block: a scale that was calibrated is not
    # needed, nor one for a whole row.
    if group.get("input_activations") is None:
        return None
    group.inner("input_activations").choice("num_bits", (8,))
    group.inner("input_activations").choice("type", ("float",))
    return weights.get("strategy") == "block"


def _refused(fields: Fields, field: str, problem: str) -> Unsupported:
    return fields.unsupported(field, f"{problem}; or take {unquantized(fields.path)}")
