"""Build one rank of a model and fill it, from safetensors files or with seeded noise."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.drafts.chain_model import ChainDrafter
from worker.drafts.dflash_model import DFlashDrafter
from worker.errors import UserError
from worker.model.decoder import Decoder
from worker.model.files import listed, weight_files
from worker.model.shape import ModelShape
from worker.model.shard import Shard
from worker.model.weights import Placement
from worker.observe.metrics import Progress, untold
from worker.peers.base import Collective

LoadFormat = Literal["safetensors", "dummy"]
DrafterModel: TypeAlias = ChainDrafter | DFlashDrafter


def load_model(
    path: Path,
    shape: ModelShape,
    collective: Collective,
    *,
    device: torch.device,
    dtype: torch.dtype,
    load_format: LoadFormat = "safetensors",
    seed: int = 0,
    progress: Progress = untold,
) -> Decoder:
    """This rank's part of the model in directory `path`, in eval mode, cast to `dtype`.

    Reads one tensor at a time, and only this rank's part of it. "dummy" reads no file: weights
    follow from `seed` and their names, so any number of ranks makes the same model (on one
    type of device).

    Raises:
        ValueError: unknown format; a file is missing or broken; tensors are
            missing, unexpected or of another shape (all of them are named, up to eight).
    """
    _check(load_format)
    model = Decoder(shape, Placement(collective, dtype, device))
    if load_format == "dummy":
        _fill(model.shards(), seed, progress)
    else:
        _read(model, Path(path), progress)
    return model.eval()


def fill_drafter(
    drafter: DrafterModel,
    path: Path,
    *,
    load_format: LoadFormat = "safetensors",
    seed: int = 0,
    progress: Progress = untold,
) -> None:
    """Fill a drafter that is built from directory `path`, in eval mode; see load_model.

    "dummy" gives a reduced vocabulary evenly spread ids.

    Raises:
        ValueError: as load_model; or the drafter's ids do not fit the target's.
    """
    _check(load_format)
    if load_format == "dummy":
        tables = drafter.ids.shards()
        # Names of its own: a part that is called as one of the target's is not to equal it.
        own = {
            f"draft.{name}": each for name, each in drafter.shards().items() if name not in tables
        }
        _fill(own, seed, progress)
        drafter.ids.spread()
    else:
        _read(drafter, Path(path), progress)
    drafter.ids.settle(Path(path))
    drafter.eval()


def _check(load_format: str) -> None:
    if load_format not in ("safetensors", "dummy"):
        raise UserError(f"unknown load format {load_format!r}; choose safetensors or dummy")


def _read(model: Decoder | DrafterModel, path: Path, progress: Progress) -> None:
    shards = model.shards()
    missing = set(shards)
    unexpected: list[str] = []
    for file in weight_files(path):
        for name, tensor in _tensors(file, shards):
            if tensor is not None:
                shards[name].fill(tensor)
                missing.discard(name)
                progress("load", len(shards) - len(missing), len(shards))
            elif not model.ignores(name):
                unexpected.append(name)
    problems = [
        f"{label} tensors: {listed(names)}"
        for label, names in (("missing", sorted(missing)), ("unexpected", unexpected))
        if names
    ]
    if problems:
        architecture = model.spec.architecture
        raise UserError(f"{path}: not the weights of {architecture}: {'; '.join(problems)}")


def _tensors(file: Path, shards: dict[str, Shard]) -> Iterator[tuple[str, Tensor | None]]:
    """(name, this rank's part, or None if no shard asks for it) of each tensor in `file`."""
    try:
        with safe_open(file, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                shard = shards.get(name)
                if shard is None:
                    yield name, None
                    continue
                stored = reader.get_slice(name)
                shape = tuple(stored.get_shape())
                if shape != shard.full_shape:
                    raise UserError(
                        f"{file}: {name} has shape {shape}, config.json asks for {shard.full_shape}"
                    )
                yield name, stored[shard.index]
    except SafetensorError as e:
        raise UserError(f"{file}: not a readable safetensors file: {e}") from e


def _fill(shards: dict[str, Shard], seed: int, progress: Progress) -> None:
    """Noise that keeps activations near unit scale; each tensor is drawn whole, then cut."""
    for i, (name, shard) in enumerate(shards.items()):
        progress("load", i, len(shards))
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(shard.dest.device)
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        whole = torch.randn(shard.full_shape, generator=generator, device=shard.dest.device)
        if whole.dim() == 1 and "norm" in name:
            whole = 1 + 0.1 * whole
        elif whole.dim() == 1:
            whole *= 0.02
        else:
            whole *= shard.full_shape[-1] ** -0.5
        shard.fill(whole[shard.index])
