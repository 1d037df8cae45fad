"""The weight files of a model directory, and whether they are whole. Free of torch."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from worker.config.checkpoint.refusals import no_safetensors
from worker.errors import UserError
from worker.weights.stacks import is_stack

INDEX_NAME = "model.safetensors.index.json"


def weight_files(path: Path) -> list[Path]:
    """The weight files that the index names, or all. UserError: it is wrong, or one is missing."""
    index = path / INDEX_NAME
    if index.exists():
        files = [path / name for name in sorted(set(_weight_map(index).values()))]
    else:
        files = sorted(path.glob("*.safetensors"))
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise UserError(f"{index} names files that are not there: {listed(absent)}")
    if not files:
        raise UserError(no_safetensors(path))
    return files


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
    held: set[str] = set()
    for file in files:
        try:  # compares the file's size with its header
            with safe_open(file, framework="numpy") as reader:
                held.update(reader.keys())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: cut short or not a safetensors file: {error}") from error
    return held


def count_weights(path: Path) -> tuple[int, int]:
    """(numbers in matrices of layers, other numbers) of the model in directory `path`.

    The former may be in eight bits; embeddings, heads, norms, routers and delta nets' inputs are
    not. Raises UserError as `weight_files`.
    """
    matrices = others = 0
    for file in weight_files(path):
        with safe_open(file, framework="numpy") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                shape = reader.get_slice(name).get_shape()
                in_layer = ".layers." in name and name.endswith(".weight")
                alone = name.endswith("gate.weight") or ".in_proj_" in name
                if (len(shape) == 2 and in_layer and not alone) or is_stack(name):
                    matrices += math.prod(shape)
                elif not name.endswith(("_scale", "_scale_inv")):
                    others += math.prod(shape)
    return matrices, others


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
