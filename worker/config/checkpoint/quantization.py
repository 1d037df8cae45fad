"""Formats of weights as config.json declares them: which are read. Free of torch."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from worker.config.checkpoint.fields import Fields, is_list
from worker.config.checkpoint.refusals import unquantized, unread
from worker.errors import Unsupported

SCALE_BLOCK = 128  # rows and columns that share a scale, in files in eight bits that have blocks


class Quantization(NamedTuple):
    """Which matrices of a model are in another format than its dtype, and in which."""

    format: str  # a key of FORMATS
    group: int  # columns that share a scale; 0: a whole row does, or the tensor
    ignored: tuple[str, ...] = ()  # modules that are not: names, ends of names, "re:..."

    def takes(self, module: str) -> bool:
        """Whether the matrix of the module of this full name is in the format."""
        return not any(
            re.match(each[3:], module)
            if each.startswith("re:")
            else f".{module}.".endswith(f".{each}.") or f"{module}.".startswith(f"{each}.")
            for each in self.ignored
        )


class Compressed(NamedTuple):
    """What compressed-tensors' files say of a format."""

    format: str
    type: str  # of weights
    num_bits: int
    strategies: tuple[str, ...]  # what shares a scale
    activations: str = ""  # their type, without which weights become the model's dtype; "": any


class Format(NamedTuple):
    """A format of weights. With a `quant_method` of its own it has a reader in METHODS, too."""

    served_by: str  # "module:class", a worker.weights.base.Format
    compressed: Compressed | None = None  # None: compressed-tensors has no such format


FORMATS: Mapping[str, Format] = {
    "e4m3": Format(
        "worker.weights.eight_bits:EightBits",
        Compressed("float-quantized", "float", 8, ("tensor", "channel", "block"), "float"),
    ),
}


def read_quantization(fields: Fields) -> Quantization | None:
    """What a `quantization_config` says of matrices; None: there is none, or activations stay.

    Raises Unsupported, by field and value, for what is neither of METHODS nor of FORMATS.
    """
    if fields.get("quantization_config") is None:
        return None
    held = fields.inner("quantization_config")
    method = held.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise unread(fields)
    return METHODS[method](held)


def _read_fp8(held: Fields) -> Quantization:
    held.choice("fmt", ("e4m3",))
    held.choice("activation_scheme", ("dynamic",))
    if (size := held.get("weight_block_size")) != [SCALE_BLOCK, SCALE_BLOCK]:
        raise _refused(held, "weight_block_size", f"{size!r}; read: {[SCALE_BLOCK, SCALE_BLOCK]}")
    ignored = _names(held, "modules_to_not_convert", "ignored_layers")
    return Quantization("e4m3", SCALE_BLOCK, ignored)


def _read_compressed(held: Fields) -> Quantization | None:
    rows = {row.compressed.format: name for name, row in FORMATS.items() if row.compressed}
    held.choice("format", tuple(rows))
    if (name := rows.get(str(held.get("format")))) is None:
        raise _refused(held, "format", f"absent; read: {', '.join(rows)}")
    wanted, groups = FORMATS[name].compressed, held.inner("config_groups")
    assert wanted is not None
    found = {_read_group(groups.inner(each), wanted) for each in groups.values}
    if len(found) > 1:
        raise _refused(held, "config_groups", "groups of several forms; read: one form")
    group = next(iter(found), None)
    return None if group is None else Quantization(name, group, _names(held, "ignore"))


METHODS: Mapping[str, Callable[[Fields], Quantization | None]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
}


def _names(fields: Fields, *places: str) -> tuple[str, ...]:
    where, field = fields.place(*places)
    value: Any = where.values.get(field) or []
    if not is_list(value) or not all(isinstance(each, str) for each in value):
        raise where.error(field, f"must be a list of names, not {value!r}")
    return tuple(value)


def _read_group(group: Fields, wanted: Compressed) -> int | None:
    """Columns that share a scale, 0: all; None: activations are not as the format wants them."""
    if group.get("targets") not in (None, ["Linear"]):
        raise _refused(group, "targets", f"{group.get('targets')!r}; read: ['Linear']")
    weights = group.inner("weights")
    weights.choice("type", (wanted.type,))
    weights.choice("num_bits", (wanted.num_bits,))
    weights.choice("strategy", wanted.strategies)
    if (size := weights.get("block_structure")) not in (None, [SCALE_BLOCK, SCALE_BLOCK]):
        raise _refused(weights, "block_structure", f"{size!r}; read: {[SCALE_BLOCK, SCALE_BLOCK]}")
    # Activations are scaled as they come, by row and block: a scale that was calibrated is not
    # needed, nor one for a whole row.
    if wanted.activations:
        if group.get("input_activations") is None:
            return None
        group.inner("input_activations").choice("num_bits", (wanted.num_bits,))
        group.inner("input_activations").choice("type", (wanted.activations,))
    return SCALE_BLOCK if weights.get("strategy") == "block" else 0


def _refused(fields: Fields, field: str, problem: str) -> Unsupported:
    return fields.unsupported(field, f"{problem}; or take {unquantized(fields.path)}")
