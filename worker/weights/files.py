"""The weight files of a model directory, and whether they are whole. Free of torch.

Those of a GGUF model are files that worker.config.gguf.directory has checked and links to.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from worker.config.checkpoint.fields import read_fields
from worker.config.checkpoint.refusals import no_safetensors
from worker.config.checkpoint.shape import read_architecture
from worker.config.gguf.directory import LINKS
from worker.config.gguf.file import read_header
from worker.config.gguf.tensors import tensors_of
from worker.errors import UserError

INDEX_NAME = "model.safetensors.index.json"


def weight_files(path: Path) -> list[Path]:
    """The weight files that the index names, or all. UserError: it is wrong, or one is missing."""
    index = path / INDEX_NAME
    if index.exists():
        files = [path / name for name in sorted(set(_weight_map(index).values()))]
    else:
        files = sorted(path.glob("*.safetensors")) or sorted((path / LINKS).glob("*.gguf"))
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise UserError(f"{index} names files that are not there: {listed(absent)}")
    if not files:
        raise UserError(no_safetensors(path))
    return files


def is_gguf(file: Path) -> bool:
    """Whether a weight file is one."""
    return file.parent.name == LINKS


def check_weights(path: Path) -> None:
    """Compare the weight files with their own headers and with the index; reads no weights.

    Raises UserError if a file is missing, cut short or broken, or lacks tensors of the index.
    """
    held = tensor_names(path, weight_files(path))
    index = path / INDEX_NAME
    if index.exists() and (missing := sorted(set(_weight_map(index)) - held)):
        raise UserError(f"{index} names tensors that are in no file: {listed(missing)}")


def tensor_names(path: Path, files: Sequence[Path] | None = None) -> set[str]:
    """The names of all tensors in `files`, by default the directory's, if it has any.

    Raises UserError as `weight_files`, or if a file is cut short or broken.
    """
    if files is None:
        files = weight_files(path) if any(path.glob("*.safetensors")) else ()
    return {name for file in files for name in _shapes(file)}


def count_weights(path: Path) -> tuple[int, int]:
    """(numbers in matrices of layers, other numbers) of the model in directory `path`.

    The former may be in eight bits; embeddings, heads, norms, routers and delta nets' inputs are
    not. Raises UserError as `weight_files`.
    """
    matrices = others = 0
    for file in weight_files(path):
        for name, shape in _shapes(file).items():
            in_layer = ".layers." in name and name.endswith(".weight")
            alone = name.endswith("gate.weight") or ".in_proj_" in name
            if len(shape) == 2 and in_layer and not alone:
                matrices += math.prod(shape)
            elif not name.endswith(("_scale", "_scale_inv")):
                others += math.prod(shape)
    return matrices, others


def _shapes(file: Path) -> dict[str, Sequence[int]]:
    """Of all tensors; raises as `tensor_names`."""
    if is_gguf(file):
        architecture = read_architecture(read_fields(file.parents[1] / "config.json"))
        found = tensors_of(read_header(file), architecture)
        return {name: stored.shape for name, stored in found.items()}
    try:  # compares the file's size with its header
        with safe_open(file, framework="numpy") as reader:
            names: list[str] = reader.keys()
            return {name: reader.get_slice(name).get_shape() for name in names}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: cut short or not a safetensors file: {error}") from error


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
        raise UserError(f"{index}: weight_map: missing or malformed: {error!r}") from error
