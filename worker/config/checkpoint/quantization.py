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
    has_zeros: bool = False  # zero points are stored, as numbers lie about none
    plain: frozenset[str] = frozenset()  # modules that are not, as the files have them

    @property
    def step(self) -> int:
        """Columns of a matrix within which no rank's part may end."""
        return self.group or (2 if FORMATS[self.format].is_packed else 1)

    def takes(self, module: str) -> bool:
        """Whether the matrix of the module of this full name is in the format."""
        is_plain = module in self.plain or module.partition(".experts.")[0] in self.plain
        return not is_plain and not any(_names(self.naming, x, module) for x in self.ignored)


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
    groups: tuple[int, ...] = ()  # columns that may share a scale; (): blocks or rows do
    has_zeros: bool = False  # there may be zero points


class Format(NamedTuple):
    """A format of weights. With a `quant_method` of its own it has a reader in METHODS, too."""

    served_by: str  # "module:class", a worker.weights.base.Format
    dtype: str  # of its matrices, as safetensors has it
    compressed: Compressed | None = None  # None: compressed-tensors has no such format

    @property
    def is_packed(self) -> bool:
        """Whether several numbers lie in one of the dtype."""
        return self.served_by == FOUR_BITS


FOUR_BITS = "worker.weights.four_bits:FourBits"  # whose formats are keys of its LAYOUTS
GROUPS = 32, 64, 128
FORMATS: Mapping[str, Format] = {
    "e4m3": Format(
        "worker.weights.eight_bits:EightBits",
        "F8_E4M3",
        Compressed(
            ("float-quantized", "naive-quantized"), "float", 8, ("tensor", "channel", "block"),
            "float",
        ),
    ),
    "awq": Format(FOUR_BITS, "I32"),
    "gptq": Format(FOUR_BITS, "I32"),
    "gptq_v2": Format(FOUR_BITS, "I32"),
    "int4": Format(
        FOUR_BITS, "I32",
        Compressed(("pack-quantized",), "int", 4, ("group", "channel"), "", GROUPS, True),
    ),
    "mxfp4": Format(
        FOUR_BITS, "U8",
        Compressed(("mxfp4-pack-quantized",), "float", 4, ("group",), "", (32,)),
    ),
    "nvfp4": Format(
        FOUR_BITS, "U8",
        Compressed(("nvfp4-pack-quantized",), "float", 4, ("tensor_group", "group"), "", (16,)),
    ),
    "modelopt_nvfp4": Format(FOUR_BITS, "U8"),
}  # fmt: skip
# ModelOpt's `quant_algo` -> the format; "": activations are not in it, and weights become the
# model's dtype.
MODELOPT = {
    "FP8": "e4m3", "FP8_PER_CHANNEL_PER_TOKEN": "e4m3", "FP8_PB_WO": "",
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4", "NVFP4_W4A16"), "modelopt_nvfp4"),
}  # fmt: skip

# Fields that decide something here, or nothing anywhere: of the objects that `declared` finds, of
# compressed-tensors' groups, and of what these say of weights and activations.
KNOWN = """
    activation_scheme config_groups dequantize exclude_modules expert_dtype fmt format
    global_compression_ratio group_size ignore ignored_layers kv_cache_quant_algo
    kv_cache_quantized_layers kv_cache_scheme modules_to_convert modules_to_not_convert producer
    quant_algo quant_method quantization_status quantized_layers run_compressed scale_fmt
    sparsity_config transform_config version weight_block_size
"""
KNOWN_OF_METHODS = {
    "awq": """
        backend bits do_fuse exllama_config fuse_max_seq_len modules_to_fuse q_group_size w_bit
        zero_point
    """,
    "gptq": """
        act_group_aware backend batch_size bits block_name_to_quantize cache_block_outputs
        checkpoint_format damp_auto_increment damp_percent dataset desc_act dynamic exllama_config
        is_marlin_format lm_head max_input_length meta model_file_base_name model_name_or_path
        model_seqlen module_name_preceding_first_block mse pack_dtype pad_token_id static_groups
        sym tokenizer true_sequential use_cuda_fp16 use_exllama
    """,
}
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
    _refuse_unknown(held, KNOWN + KNOWN_OF_METHODS.get(found.method, ""))
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
    if not (name := MODELOPT[str(algorithm).upper()]):
        return None
    if not FORMATS[name].is_packed:
        return Quantization(name, 0, ignored, "globs")
    held.choice("group_size", (16,))
    return Quantization(name, 16, ignored, "globs")


def _read_compressed(held: Fields) -> Quantization | None:
    named = {name: row.compressed for name, row in FORMATS.items() if row.compressed}
    rows = {text: name for name, row in named.items() for text in row.formats}
    held.choice("format", tuple(rows))
    if (name := rows.get(str(held.get("format")))) is None:
        raise held.unsupported("format", f"absent; read: {', '.join(rows)}")
    groups = held.inner("config_groups")
    found = {_read_group(groups.inner(group), name, named[name]) for group in groups.values}
    if len(found) > 1:
        raise held.unsupported("config_groups", "groups of several forms; read: one form")
    ignored = _modules(held, "names", "ignore")
    group = next(iter(found), None)
    return None if group is None else group._replace(ignored=ignored)


def _read_awq(held: Fields) -> Quantization:
    group = _read_four_bits(held)
    held.choice("zero_point", (True,))
    for field in ("version", "format"):
        held.choice(field, ("gemm", "GEMM"))
    ignored = _modules(held, "patterns", "modules_to_not_convert")
    return Quantization("awq", group, ignored, "patterns", has_zeros=True)


def _read_gptq(held: Fields) -> Quantization:
    group = _read_four_bits(held)
    reason = "rows of a group lie apart then, and take a look-up apiece"
    for field in ("desc_act", "lm_head", "is_marlin_format"):
        told = f"{reason}; {held.remedy}" if field == "desc_act" else None
        held.choice(field, (False,), told)
    held.choice("pack_dtype", ("int32",))
    where, field = held.place("checkpoint_format", "format")
    where.choice(field, ("gptq", "gptq_v2"))
    ignored, rules = list[str](), held.inner("dynamic").values
    for rule in rules:  # of modules: "-:" and a pattern leaves them alone
        if not rule.startswith("-:"):
            raise held.unsupported("dynamic", f"{rule!r}: modules in forms of their own")
        ignored.append(f"re:{rule[2:]}")
    has_zeros = not held.flag("sym", default=True)
    name = where.get(field) or "gptq"
    return Quantization(name, group, tuple(ignored), has_zeros=has_zeros)


def _read_mxfp4(held: Fields) -> Quantization:
    held.choice("dequantize", (False,))
    return Quantization("mxfp4", 32, _modules(held, "globs", "modules_to_not_convert"), "globs")


def _read_four_bits(held: Fields) -> int:
    """Columns that share a scale, 0: all, of AWQ or GPTQ."""
    if (bits := held.integer("w_bit", "bits")) != 4:
        raise held.unsupported("bits", f"{bits}; read: 4")
    group = held.integer("q_group_size", "group_size", least=-1)
    if group not in (-1, *GROUPS):
        raise held.unsupported("group_size", f"{group}; read: -1, {', '.join(map(str, GROUPS))}")
    return max(group, 0)


METHODS: Mapping[str, Callable[[Fields], Quantization | None]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "mxfp4": _read_mxfp4,
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


def _read_group(group: Fields, name: str, wanted: Compressed) -> Quantization | None:
    """The format without what is left alone; None: activations are not as it wants them."""
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
    weights.choice("symmetric", (True, False) if wanted.has_zeros else (True,))
    if (size := weights.get("block_structure")) not in (None, [SCALE_BLOCK, SCALE_BLOCK]):
        raise weights.unsupported(
            "block_structure", f"{size!r}; read: {[SCALE_BLOCK, SCALE_BLOCK]}"
        )
    if wanted.groups:
        weights.choice("actorder", (False, "weight", "static"))
        size = 0 if weights.get("strategy") == "channel" else weights.integer("group_size")
        if size and size not in wanted.groups:
            raise weights.unsupported("group_size", f"{size}; read: {list(wanted.groups)}")
        has_zeros = wanted.has_zeros and not weights.flag("symmetric", default=True)
        return Quantization(name, size, has_zeros=has_zeros)
    # Activations are scaled as they come, by row and block: a scale that was calibrated is not
    # needed, nor one for a whole row.
    if wanted.activations:
        if group.get("input_activations") is None:
            return None
        activations.choice("num_bits", (wanted.num_bits,))
        activations.choice("type", (wanted.activations,))
    return Quantization(name, SCALE_BLOCK if weights.get("strategy") == "block" else 0)
