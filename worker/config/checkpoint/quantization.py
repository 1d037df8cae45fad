"""Formats of weights as a checkpoint declares them: which are read. Free of torch."""

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeAlias

from worker.config.checkpoint.declared import declared
from worker.config.checkpoint.fields import Fields, is_list

SCALE_BLOCK = 128  # rows and columns that share a scale, in files in eight bits that have blocks
# Of DeepSeek's and Qwen's files, and of compressed-tensors and ModelOpt; all are multiplied with.
WEIGHT_SCALES = ("weight_scale_inv", "weight_scale")
# How a list of modules is meant: "names": whole names or the ends or beginnings of such, and what
# stands behind "re:"; "patterns": beside those regular expressions, up to the end of a part of the
# name, and ends of any kind (as should_convert_module of transformers); "globs": with "*".
Naming: TypeAlias = Literal["names", "patterns", "globs"]


class Quantization(NamedTuple):
    """Which matrices of a model are in another format than its dtype, and in which."""

    format: str  # a key of FORMATS
    group: int  # columns that share a scale; 0: a whole row does, or the tensor
    ignored: tuple[str, ...] = ()  # modules that are not
    naming: Naming = "names"

    def takes(self, module: str) -> bool:
        """Whether the matrix of the module of this full name is in the format."""
        return not any(_names(self.naming, text, module) for text in self.ignored)


def _names(naming: Naming, text: str, module: str) -> bool:
    if text.startswith("re:"):
        return re.match(text[3:], module) is not None
    if f".{module}.".endswith(f".{text}.") or f"{module}.".startswith(f"{text}."):
        return True
    if naming == "globs" or text.startswith("*"):
        parts = module.split(".")
        return any(fnmatchcase(".".join(parts[:i]), text) for i in range(1, len(parts) + 1))
    if naming == "names":
        return False
    return module.endswith(text) or re.match(rf"(?:{text})(?:(?<=\.)|(?=\.|$))", module) is not None


class Compressed(NamedTuple):
    """What compressed-tensors' files say of a format."""

    formats: tuple[str, ...]  # its names there
    type: str  # of weights
    num_bits: int
    strategies: tuple[str, ...]  # what shares a scale
    activations: str = ""  # their type, without which weights become the model's dtype; "": any


class Format(NamedTuple):
    """A format of weights. With a `quant_method` of its own it has a reader in METHODS, too."""

    served_by: str  # "module:class", a worker.weights.base.Format
    dtype: str  # of its matrices, as safetensors has it
    compressed: Compressed | None = None  # None: compressed-tensors has no such format


FORMATS: Mapping[str, Format] = {
    "e4m3": Format(
        "worker.weights.eight_bits:EightBits",
        "F8_E4M3",
        Compressed(
            ("float-quantized", "naive-quantized"), "float", 8, ("tensor", "channel", "block"),
            "float",
        ),
    ),
}  # fmt: skip
# ModelOpt's `quant_algo` -> are activations in e4m3, too? Else weights become the model's dtype.
MODELOPT = {"FP8": True, "FP8_PER_CHANNEL_PER_TOKEN": True, "FP8_PB_WO": False}

# Fields that decide something here, or nothing anywhere: of the objects that `declared` finds, of
# compressed-tensors' groups, and of what these say of weights and activations.
KNOWN = """
    activation_scheme config_groups dequantize exclude_modules expert_dtype fmt format
    global_compression_ratio group_size ignore ignored_layers kv_cache_quant_algo
    kv_cache_quantized_layers kv_cache_scheme modules_to_convert modules_to_not_convert producer
    quant_algo quant_method quantization_status quantized_layers run_compressed scale_fmt
    sparsity_config transform_config version weight_block_size
"""
KNOWN_OF_GROUPS = "format input_activations output_activations targets weights"
KNOWN_OF_NUMBERS = """
    actorder block_structure dynamic group_size num_bits observer observer_kwargs scale_dtype
    strategy symmetric type zp_dtype
"""


def read_quantization(*sources: Fields) -> Quantization | None:
    """What a checkpoint says of matrices; None: nothing, or that activations stay as they are.

    sources: objects of config.json, the whole first; see `declared`. Raises Unsupported, by field
    and value, for what is neither of METHODS nor of FORMATS.
    """
    found = declared(*sources)
    if found is None:
        return None
    if found.method not in METHODS:
        raise found.refused()
    held = Fields(found.held.path, found.held.values, found.held.prefix, f"or {found.remedy}")
    _refuse_unknown(held, KNOWN)
    return METHODS[found.method](held)


def _read_fp8(held: Fields) -> Quantization | None:
    held.choice("fmt", ("e4m3", "float8_e4m3fn"))
    held.choice("activation_scheme", ("dynamic",))
    held.choice("expert_dtype", ("fp8",))
    if held.get("modules_to_convert"):
        raise held.unsupported("modules_to_convert", "embeddings or others in eight bits")
    if (size := held.get("weight_block_size")) != [SCALE_BLOCK, SCALE_BLOCK]:
        problem = f"{size!r}; read: {[SCALE_BLOCK, SCALE_BLOCK]}"
        raise held.unsupported("weight_block_size", problem)
    ignored = _modules(held, "patterns", "modules_to_not_convert", "ignored_layers")
    if held.flag("dequantize"):
        return None
    return Quantization("e4m3", SCALE_BLOCK, ignored, "patterns")


def _read_modelopt(held: Fields) -> Quantization | None:
    if (algorithm := held.get("quant_algo")) is None:  # KV alone, which kv.dtype decides on
        return None
    if str(algorithm).upper() not in MODELOPT:
        raise held.unsupported("quant_algo", f"{algorithm!r}; read: {', '.join(MODELOPT)}")
    ignored = _modules(held, "globs", "exclude_modules", "ignore")
    is_scaled = MODELOPT[str(algorithm).upper()]
    return Quantization("e4m3", 0, ignored, "globs") if is_scaled else None


def _read_compressed(held: Fields) -> Quantization | None:
    named = {name: row.compressed for name, row in FORMATS.items() if row.compressed}
    rows = {text: name for name, row in named.items() for text in row.formats}
    held.choice("format", tuple(rows))
    if (name := rows.get(str(held.get("format")))) is None:
        raise held.unsupported("format", f"absent; read: {', '.join(rows)}")
    groups = held.inner("config_groups")
    found = {_read_group(groups.inner(group), named[name]) for group in groups.values}
    if len(found) > 1:
        raise held.unsupported("config_groups", "groups of several forms; read: one form")
    ignored = _modules(held, "names", "ignore")
    group = next(iter(found), None)
    return None if group is None else Quantization(name, group, ignored)


METHODS: Mapping[str, Callable[[Fields], Quantization | None]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt,
}


def _refuse_unknown(fields: Fields, known: str) -> None:
    """Refuse fields that might say of the weights what nothing here reads."""
    for field, value in fields.values.items():
        if value and field not in known.split():
            problem = f"an unknown field, of value {value!r}"
            remedy = f"remove it if it says nothing of the weights; {fields.remedy}"
            raise fields.unsupported(field, problem, remedy)


def _modules(fields: Fields, naming: Naming, *places: str) -> tuple[str, ...]:
    where, field = fields.place(*places)
    value: Any = where.values.get(field) or []
    if not is_list(value) or not all(isinstance(text, str) for text in value):
        raise where.error(field, f"must be a list of names, not {value!r}")
    for text in value:
        try:
            _names(naming, text, "")
        except re.error as error:
            raise where.error(field, f"{text!r} is no regular expression: {error}") from error
    return tuple(value)


def _read_group(group: Fields, wanted: Compressed) -> int | None:
    """Columns that share a scale, 0: all; None: activations are not as the format wants them."""
    _refuse_unknown(group, KNOWN_OF_GROUPS)
    group.choice("format", wanted.formats)
    if group.get("targets") not in (None, ["Linear"]):
        raise group.unsupported("targets", f"{group.get('targets')!r}; read: ['Linear']")
    weights, activations = group.inner("weights"), group.inner("input_activations")
    for scheme in (weights, activations):
        _refuse_unknown(scheme, KNOWN_OF_NUMBERS)
    weights.choice("type", (wanted.type,))
    weights.choice("num_bits", (wanted.num_bits,))
    weights.choice("strategy", wanted.strategies)
    weights.choice("symmetric", (True,))
    if (size := weights.get("block_structure")) not in (None, [SCALE_BLOCK, SCALE_BLOCK]):
        raise weights.unsupported(
            "block_structure", f"{size!r}; read: {[SCALE_BLOCK, SCALE_BLOCK]}"
        )
    # Activations are scaled as they come, by row and block: a scale that was calibrated is not
    # needed, nor one for a whole row.
    if wanted.activations:
        if group.get("input_activations") is None:
            return None
        activations.choice("num_bits", (wanted.num_bits,))
        activations.choice("type", (wanted.activations,))
    return SCALE_BLOCK if weights.get("strategy") == "block" else 0
