"""The weight files of a model directory, and whether they are whole. Free of torch.

Those of a GGUF model are files that worker.config.gguf.directory has checked and links to.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from worker.config.checkpoint.fields import AGAIN, read_fields, unreadable
from worker.config.checkpoint.foreign import ASIDE, no_safetensors
from worker.config.checkpoint.quantization import FORMATS, WEIGHT_SCALES, Quantization
from worker.config.checkpoint.refusals import READ, unquantized
from worker.config.checkpoint.shape import read_architecture
from worker.config.gguf.directory import LINKS
from worker.config.gguf.file import read_header
from worker.config.gguf.tensors import tensors_of
from worker.errors import Unsupported, UserError
from worker.weights.layouts import LAYOUTS
from worker.weights.stacks import is_stack, member_end

INDEX_NAME, WHOLE = "model.safetensors.index.json", "model.safetensors"
PART = re.compile(r"(?P<stem>.+)-\d+-of-(?P<count>\d+)\.safetensors")  # of several files
# How names of tensors end, in formats that are not read -> whose such are.
FOREIGN: Mapping[str, str] = {
    **dict.fromkeys(("qweight", "qzeros", "g_idx"), "four bits of AWQ or GPTQ"),
    **dict.fromkeys(("weight_packed", "weight_shape"), "packed ones of compressed-tensors"),
    **dict.fromkeys(("weight_scale_2", "weight_global_scale"), "NVFP4"),
    **dict.fromkeys(("absmax", "quant_map", "SCB", "weight_format"), "bitsandbytes"),
    **dict.fromkeys(("gate_up_proj_blocks", "down_proj_blocks"), "MXFP4"),
    **dict.fromkeys(("q_weight", "q_invperm", "trellis"), "ExLlama"),
    **dict.fromkeys(("codes", "codebooks", "Qidxs"), "AQLM or QuIP"),
    **dict.fromkeys(("W_q", "_data"), "HQQ, quanto or torchao"),
    **dict.fromkeys(("bitmask", "compressed"), "2:4 sparse ones of compressed-tensors"),
    **dict.fromkeys(("scales", "biases"), "MLX"),
    "pre_quant_scale": "ModelOpt's AWQ",
}
PACKED = {row.values.end for row in LAYOUTS.values()}
BESIDE = {end for row in LAYOUTS.values() for end in row.ends}
PLAIN = ("BF16", "F16", "F32", "F64")  # dtypes of weights, as safetensors has them
SCALED = frozenset(row.dtype for row in FORMATS.values() if not row.is_packed)


def weight_files(path: Path) -> list[Path]:
    """The model's weight files, as transformers and, without the first two, vLLM choose them.

    model.safetensors, unless it lacks tensors that the index names in other files; else these; else
    all, but a LoRA adapter's and those of Mistral's form. Without an index, what completes
    model.safetensors counts too. UserError: an index is wrong, a file is missing, or several hold
    the same tensors.
    """
    whole, index = path / WHOLE, path / INDEX_NAME
    if linked := sorted((path / LINKS).glob("*.gguf")):
        return linked
    if not index.exists():
        return [whole, *_completing(whole)] if whole.exists() else _unlisted(path)
    weight_map = _weight_map(index)
    files = [path / name for name in sorted(set(weight_map.values()))]
    absent = [file.name for file in files if not file.exists()]
    if whole.exists() and (absent or tensor_names(path, [whole]) >= set(weight_map)):
        return [whole]
    if absent:
        raise UserError(f"{index} names files that are not there: {listed(absent)}; {AGAIN}")
    return files


def _candidates(path: Path) -> list[Path]:
    return [x for x in sorted(path.glob("*.safetensors")) if not x.name.startswith(ASIDE)]


def _completing(whole: Path) -> Iterator[Path]:
    """Files with tensors of the same model that it lacks, or of layers that draft for it."""
    held = tensor_names(whole.parent, [whole])
    modules = {name.partition(".")[0] for name in held} | {"mtp"}
    for file in _candidates(whole.parent):
        try:
            names = tensor_names(file.parent, [file])
        except UserError:  # what is broken counts only if it is needed
            continue
        if held.isdisjoint(names) and {name.partition(".")[0] for name in names} <= modules:
            yield file


def _unlisted(path: Path) -> list[Path]:
    """Where neither says which they are."""
    files = _candidates(path)
    if not files:
        raise UserError(no_safetensors(path))
    sets = defaultdict[tuple[str, int], list[Path]](list)
    for file in files:
        part = PART.fullmatch(file.name)
        sets[(part["stem"], int(part["count"])) if part else (file.stem, 1)].append(file)
    for (stem, count), parts in sets.items():
        if len(parts) < count:
            problem = f"{len(parts)} of {count} files {stem}-*-of-*.safetensors are there"
            raise UserError(f"{path}: {problem}; {AGAIN}")
    if len(sets) == 1:
        return files
    names = [tensor_names(path, parts) for parts in sets.values()]
    if len(set[str]().union(*names)) == sum(map(len, names)):
        return files
    plain = [parts for (stem, _), parts in sets.items() if stem == "model"]
    if len(plain) != 1:
        problem = f"{listed([x.name for x in files])} hold the same tensors, without an index"
        raise UserError(f"{path}: {problem}; take {INDEX_NAME} too, or remove what does not count")
    return plain[0]


def is_gguf(file: Path) -> bool:
    """Whether a weight file is one."""
    return file.parent.name == LINKS


def check_weights(path: Path, declared: Quantization | None = None) -> None:
    """Compare the weight files with their own headers and with the index; reads no weights.

    declared: the format that config.json names.

    Raises UserError if a file is missing, cut short or broken, or lacks tensors of the index;
    Unsupported if tensors are of a format that is not read.
    """
    files, index = weight_files(path), path / INDEX_NAME
    dtypes = {name: dtype for file in files for name, (_, dtype) in _tensors(file).items()}
    named = _weight_map(index) if index.exists() and files != [path / WHOLE] else ()
    if missing := sorted({*named} - {*dtypes}):
        raise UserError(f"{index} names tensors that are in no file: {listed(missing)}; {AGAIN}")
    layout = None if declared is None else LAYOUTS.get(declared.format)
    known = () if layout is None else (layout.values.end, *layout.ends)
    for name, dtype in sorted(dtypes.items()):
        stem, _, end = name.rpartition(".")
        if member_end(name) in known:
            continue
        whose = FOREIGN.get(end, "")
        if end == "weight" and dtype not in (*PLAIN, *SCALED):
            whose = f"numbers of type {dtype}"
        elif end == "weight" and dtype in SCALED:
            scaled = any(f"{stem}.{scale}" in dtypes for scale in WEIGHT_SCALES)
            whose = "" if scaled else f"{dtype} without {' or '.join(WEIGHT_SCALES)}"
        if whose:
            text = f"{name}: weights in a format ({whose}) that config.json does not name"
            raise Unsupported(f"{path}: {text}; {READ}: take {unquantized(path)}")


def tensor_names(path: Path, files: Sequence[Path] | None = None) -> set[str]:
    """The names of all tensors in `files`, by default the directory's, if it has any.

    Raises UserError as `weight_files`, or if a file is cut short or broken.
    """
    if files is None:
        files = weight_files(path) if any(path.glob("*.safetensors")) else ()
    return {name for file in files for name in _tensors(file)}


def as_held(declared: Quantization | None, path: Path) -> Quantization | None:
    """Without the modules that files have in 16 bits though `declared`, in four, leaves none out.

    So some writers publish layers that draft. Raises UserError as `weight_files`.
    """
    if declared is None or not FORMATS[declared.format].is_packed:
        return declared
    tensors = {name: x for file in weight_files(path) for name, (_, x) in _tensors(file).items()}
    stems = {name.rpartition(".experts.")[0] if is_stack(name) else name.removesuffix(".weight")
             for name, dtype in tensors.items() if dtype in PLAIN}  # fmt: skip
    return declared._replace(plain=frozenset(stems))


def count_weights(path: Path) -> tuple[int, int]:
    """(numbers in matrices of layers, other numbers) of the model in directory `path`.

    The former may be in eight bits; embeddings, heads, norms, routers and delta nets' inputs are
    not. Raises UserError as `weight_files`.
    """
    matrices = others = 0
    for file in weight_files(path):
        for name, (shape, dtype) in _tensors(file).items():
            end = member_end(name)
            if end in PACKED and dtype in ("I32", "U8"):
                matrices += math.prod(shape) * (8 if dtype == "I32" else 2)
                continue
            if end in BESIDE:
                continue
            in_layer = ".layers." in name and name.endswith(".weight")
            alone = name.endswith("gate.weight") or ".in_proj_" in name
            if (len(shape) == 2 and in_layer and not alone) or is_stack(name):
                matrices += math.prod(shape)
            elif not name.endswith(("_scale", "_scale_inv")):
                others += math.prod(shape)
    return matrices, others


def stored_bytes(path: Path) -> int:
    """Of all tensors of the model in directory `path`; raises as `weight_files`."""
    sizes = {"U8": 1, "I8": 1, "F8_E4M3": 1, "I32": 4, "F32": 4, "I64": 8}
    held = (tensor for file in weight_files(path) for tensor in _tensors(file).values())
    return sum(math.prod(shape) * sizes.get(dtype, 2) for shape, dtype in held)


def _tensors(file: Path) -> dict[str, tuple[Sequence[int], str]]:
    """Shape and dtype of all tensors, as safetensors has them; raises as `tensor_names`."""
    if is_gguf(file):  # whose types are checked where its header is read
        architecture = read_architecture(read_fields(file.parents[1] / "config.json"))
        found = tensors_of(read_header(file), architecture)
        return {name: (stored.shape, PLAIN[0]) for name, stored in found.items()}
    try:  # compares the file's size with its header
        with safe_open(file, framework="numpy") as reader:
            parts = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118 - no mapping
            return {name: (part.get_shape(), part.get_dtype()) for name, part in parts.items()}
    except (SafetensorError, OSError) as error:
        problem = unreadable(file, f"cut short or not a readable safetensors file: {error}")
        raise UserError(f"{file}: {problem}") from error


def listed(names: Sequence[str]) -> str:
    """The first eight of them, and how many more there are."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _weight_map(index: Path) -> Mapping[str, str]:
    """Tensor -> file name."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(name) for tensor, name in weight_map.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        problem = unreadable(index, f"weight_map: missing or malformed: {error!r}")
        raise UserError(f"{index}: {problem}") from error
