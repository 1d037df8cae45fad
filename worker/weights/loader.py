"""Fill one rank of a model, from safetensors files or with seeded noise."""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.config.checkpoint.quantization import BLOCK
from worker.config.checkpoint.shape import LayerShape
from worker.errors import UserError
from worker.observe.metrics import Progress, no_progress
from worker.weights.files import listed, weight_files
from worker.weights.matrices import quantized
from worker.weights.quantized import Scaled, Scales
from worker.weights.shard import Shard, scales_of, tensor_of

LoadFormat = Literal["safetensors", "dummy"]


class Loadable(Protocol):
    """One rank of a model, a drafter too, that waits for its weights."""

    @property
    def shape(self) -> LayerShape:
        """Of the whole model."""
        ...

    def shards(self) -> dict[str, Shard]:
        """Checkpoint name -> Shard, for every tensor that this rank needs; see also `piece`."""
        ...

    def ignores(self, name: str) -> bool:
        """May a checkpoint hold the tensor `name` although no shard is made of it?"""
        ...


def read_weights(model: Loadable, path: Path, progress: Progress = no_progress) -> None:
    """Fill `model` from the safetensors files of directory `path`, one tensor after the other.

    Raises UserError if a file is missing or broken, or if tensors are missing, unexpected or of
    another shape (all of them are named, up to eight).
    """
    shards, files = model.shards(), weight_files(path)
    scales, others = Scales(files), list[str]()
    missing = set(shards)
    for file in files:
        for name, tensor in _tensors(file, shards, scales):
            if tensor is not None:
                shards[name].fill(tensor)
                missing.discard(name)
                progress("load", len(shards) - len(missing), len(shards))
            else:
                others.append(name)
    unexpected = [
        name
        for name in others
        if not (scales.is_one(name) or model.ignores(name) or model.ignores(scales.weight_of(name)))
    ]
    kinds = ("missing", sorted(set(map(tensor_of, missing)))), ("unexpected", unexpected)
    if problems := [f"{kind} tensors: {listed(names)}" for kind, names in kinds if names]:
        architecture = model.shape.architecture
        raise UserError(f"{path}: not the weights of {architecture}: {'; '.join(problems)}")


def _tensors(
    file: Path, shards: dict[str, Shard], scales: Scales
) -> Iterator[tuple[str, Tensor | None]]:
    """(shard's key, its part) of each tensor in `file`; (name, None) if no shard asks for it."""
    keys = defaultdict[str, list[str]](list)
    for key in shards:
        keys[tensor_of(key)].append(key)
    try:
        with safe_open(file, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                if name not in keys:
                    yield name, None
                    continue
                stored = scales.scaled(name, reader.get_slice(name))
                shape = tuple(stored.get_shape())
                for key in keys[name]:
                    shard, wanted = shards[key], shards[key].stored_shape
                    if shard.what and not isinstance(stored, Scaled):
                        text = f"{file}: {name} is {stored.get_dtype()}, config.json says F8_E4M3"
                        raise UserError(text)
                    if shard.what == "scales":
                        yield key, shard.of(stored.scales(wanted))
                        continue
                    if shape != wanted:
                        text = f"{file}: {name} has shape {shape}, config.json asks for {wanted}"
                        raise UserError(text)
                    yield key, shard.of(stored)
    except SafetensorError as e:
        raise UserError(f"{file}: not a readable safetensors file: {e}") from e


def fill_with_noise(
    shards: Mapping[str, Shard], seed: int, progress: Progress = no_progress
) -> None:
    """Noise that keeps activations near unit scale; each tensor is drawn whole, then cut."""
    for i, (name, shard) in enumerate(shards.items()):
        progress("load", i, len(shards))
        if shard.what == "scales":  # follow from the values
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(shard.dest.device)
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        whole = torch.randn(shard.full_shape, generator=generator, device=shard.dest.device)
        if name.endswith(".A_log"):  # as these are initialised for training, so states stay finite
            whole = torch.rand(shard.full_shape, generator=generator, device=shard.dest.device)
            whole = (0.01 + 15.99 * whole).log()
        elif name.endswith(".dt_bias"):
            whole = torch.ones_like(whole)
        elif whole.dim() == 1 and "norm" in name:
            whole = 1 - shard.plus + 0.1 * whole
        elif whole.dim() == 1:
            whole *= 0.02
        else:
            whole *= shard.full_shape[-1] ** -0.5
        if shard.what == "values":
            of_it = shards[scales_of(name)]
            height, *width = of_it.full_shape
            # In blocks as published, however finely their scales are kept; so for any number of
            # ranks, and for what multiplies whole blocks.
            blocks = height
            if height < len(whole) and len(whole) % BLOCK == 0:
                blocks = len(whole) // BLOCK
            whole, scales = quantized(whole, (blocks, *width))
            of_it.fill(scales.repeat_interleave(height // blocks, 0)[of_it.index])
        shard.fill(whole[shard.index])
