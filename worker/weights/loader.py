"""Fill one rank of a model, from its files or with seeded noise."""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from worker.config.checkpoint.declared import kv_field
from worker.config.checkpoint.families import FAMILIES
from worker.config.checkpoint.fields import unreadable
from worker.config.checkpoint.shape import LayerShape, ModelShape
from worker.config.progress import Progress, no_progress
from worker.errors import UserError
from worker.weights.base import Matrix
from worker.weights.files import is_gguf, listed, tensor_names, weight_files
from worker.weights.formats import Readings
from worker.weights.plain import PLAIN
from worker.weights.scaled_files import KV_SCALES
from worker.weights.shard import VALUES, Key, Shard
from worker.weights.stacks import of_stack

log = logging.getLogger("kvlane.weights")
HEAD, HEAD_ROWS = "lm_head.weight", 1 << 12  # the latter are compared at once


class Loadable(Protocol):
    """One rank of a model, a drafter too, that waits for its weights."""

    @property
    def shape(self) -> LayerShape:
        """Of the whole model."""
        ...

    def shards(self) -> dict[Key, Shard]:
        """Of every tensor that this rank needs, and of every piece of it."""
        ...

    def ignores(self, name: str) -> bool:
        """May a checkpoint hold the tensor `name` although no shard is made of it?"""
        ...


def read_weights(model: Loadable, path: Path, progress: Progress = no_progress) -> None:
    """Fill `model` from the weight files of directory `path`, one tensor after the other.

    Raises UserError if a file is missing or broken, or if tensors are missing, unexpected or of
    another shape (all of them are named, up to eight).
    """
    shards, files = model.shards(), weight_files(path)
    readings, others = Readings(files, model.shape.quantization), list[str]()
    missing = set(shards)
    for file in files:
        for key, part in _tensors(file, model.shape, shards, readings):
            if part is not None:
                shards[key].fill(part)
                missing.discard(key)
                progress("load", len(shards) - len(missing), len(shards))
            else:
                others.append(key.tensor)
    unexpected = [
        name
        for name in others
        if not readings.is_spent(name)
        and not model.ignores(name)
        and not model.ignores(readings.owner_of(name))
    ]
    absent = sorted({key.tensor for key in missing})
    kinds = ("missing", absent), ("unexpected", unexpected)
    if problems := [f"{kind} tensors: {listed(names)}" for kind, names in kinds if names]:
        architecture = model.shape.architecture
        text = f"{path}: not the weights of {architecture}: {'; '.join(problems)}"
        raise UserError(f"{text}; take config.json and weights of one model")
    plain = {key.tensor for key, shard in shards.items() if shard.codec in (None, PLAIN)}
    _tell(path, files, others, len(plain & readings.made))


def _tell(path: Path, files: list[Path], unused: list[str], num_changed: int) -> None:
    """Say what of the directory is not used, or not as it is."""
    if aside := sorted({x.name for x in path.glob("*.safetensors")} - {x.name for x in files}):
        log.info("%s: left alone, for they are not of the model: %s", path, listed(aside))
    of_kv = sum(name.endswith(KV_SCALES) for name in unused)
    if (field := kv_field(path)) or of_kv:
        asks = f"{field} and {of_kv} scales" if field else f"{of_kv} scales"
        log.info("%s: KV is as kv.dtype says: not used are %s", path, asks)
    if num_changed:
        text = "%s: %d quantized matrices become the model's dtype, in which activations are"
        log.info(text, path, num_changed)


def _tensors(
    file: Path, shape: LayerShape, shards: dict[Key, Shard], readings: Readings
) -> Iterator[tuple[Key, Tensor | None]]:
    """The parts of each tensor in `file`, by key; None if no shard asks for it."""
    keys = defaultdict[str, list[Key]](list)
    for key in shards:
        keys[key.tensor].append(key)
    try:
        with _opened(file, shape, shards) as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                of_file = _matrices(file, shape, name, reader.get_slice(name))
                for matrix, slices in of_file.items():
                    if (tensor := readings.tensor_of(matrix)) not in keys:
                        yield Key(matrix), None
                        continue
                    stored = readings.opened(matrix, slices)
                    for key in keys[tensor]:
                        yield key, _part(f"{file}: {matrix}", stored, key.role, shards[key])
    except SafetensorError as e:
        problem = unreadable(file, f"not a readable safetensors file: {e}")
        raise UserError(f"{file}: {problem}") from e


def _matrices(file: Path, shape: LayerShape, name: str, stored: Any) -> Mapping[str, Any]:
    """What slices each of the tensors that the file's tensor holds, by name; mostly itself."""
    names = shape.features.experts
    try:
        return of_stack(name, stored, paired=names is not None and names.paired)
    except UserError as e:
        raise UserError(f"{file}: {e}") from None


def _opened(file: Path, shape: LayerShape, shards: Mapping[Key, Shard]) -> Any:
    if not is_gguf(file):
        return safe_open(file, framework="pt", device="cpu")
    from worker.weights.gguf_tensors import GgufTensors  # whose library others need not wait for

    tensors = GgufTensors(file, shape)
    dtype = next(iter(shards.values())).dest.dtype
    held = tensors.num_numbers * dtype.itemsize / 1e6
    text = "%s: %s; its numbers take %.1f MB as %s, of all ranks together"
    log.info(text, file.name, tensors.describe(), held, dtype)
    return tensors


def _part(place: str, stored: Any, role: str, shard: Shard) -> Tensor:
    try:
        return (shard.codec or PLAIN).part(stored, role, shard)
    except UserError as e:
        raise UserError(f"{place} {e}") from None


def has_own_head(shape: ModelShape, path: Path) -> bool:
    """Whether the files' head is not the embedding: it counts, as in transformers 5.24."""
    names = f"{FAMILIES[shape.architecture].prefix}.embed_tokens.weight", HEAD
    where = {name: file for file in weight_files(path) for name in tensor_names(path, [file])}
    if not where.keys() >= {*names}:
        return False
    slices = [safe_open(where[x], framework="pt", device="cpu").get_slice(x) for x in names]
    for i in range(0, shape.vocab_size, HEAD_ROWS):
        embedding, head = (each[i : i + HEAD_ROWS].float() for each in slices)
        if not embedding.equal(head):
            log.info("%s: tie_word_embeddings, but %s differs, and counts", path, HEAD)
            return True
    return False


def fill_with_noise(
    shards: Mapping[Key, Shard], seed: int, progress: Progress = no_progress
) -> None:
    """Noise that keeps activations near unit scale; each tensor is drawn whole, then cut."""
    roles = defaultdict[Key, dict[str, Shard]](dict)
    for key, shard in shards.items():
        roles[key._replace(role=VALUES)][key.role] = shard
    num_filled = 0
    for key, of_roles in roles.items():
        progress("load", num_filled, len(shards))
        shapes = {role: shard.full_shape for role, shard in of_roles.items()}
        values = of_roles[VALUES]
        drawn = (values.codec or PLAIN).drawn(_noise(key, values, seed), shapes)
        for role, shard in of_roles.items():
            shard.fill(drawn[role][shard.index])
        num_filled += len(of_roles)


def _noise(key: Key, shard: Shard, seed: int) -> Tensor:
    """The whole tensor [*shard.full_shape] f32, by the shard's name."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    generator = torch.Generator(shard.dest.device)
    generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    shape, device, tensor = shard.full_shape, shard.dest.device, key.tensor
    whole = torch.randn(shape, generator=generator, device=device)
    if tensor.endswith(".A_log"):  # as these are initialised for training, so states stay finite
        return (0.01 + 15.99 * torch.rand(shape, generator=generator, device=device)).log()
    if tensor.endswith(".dt_bias"):
        return torch.ones_like(whole)
    if whole.dim() == 1 and "norm" in tensor:
        return 1 - shard.plus + 0.1 * whole
    return whole.mul_(0.02 if whole.dim() == 1 else shape[-1] ** -0.5)


def settle(model: nn.Module) -> None:
    """Let all matrices of a model make what follows from their weights, which are filled."""
    for module in model.modules():
        if isinstance(module, Matrix):
            module.settle()
