"""Digests that say whether two workers compute the same KV: of configuration and weights.

They find accidents: another fine-tune, another revision, a damaged file. They do not withstand
somebody who makes two models of one digest on purpose.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import chain
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from worker.config.checkpoint.experts import ExpertShape
from worker.config.checkpoint.shape import LayerShape, ModelShape
from worker.peers.rank_group import RankGroup
from worker.weights.loader import Loadable
from worker.weights.shard import Key, Shard

# No KV depends on these: where a text ends, how it is drawn, how long it may be, how it was stored.
NOT_OF_KV = ("eos_token_ids", "penalizes", "max_position_embeddings", "dtype")
NUM_EARLY = 5  # fields of ExpertShape
# Elements of a block, whose products take 8 bytes an element: for a CPU's cache, and to fill a GPU.
CPU_BLOCK, GPU_BLOCK = 1 << 18, 1 << 24
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PartSum(NamedTuple):
    """`tensor_sum` of the part of one tensor that a rank holds. Crosses to other ranks."""

    name: str  # in the checkpoint
    dtype: str
    full_shape: tuple[int, ...]
    part: tuple[tuple[int, int], ...]  # by dimension, first and last + 1
    number: int


def part_sums(shards: Mapping[Key, Shard]) -> list[PartSum]:
    """Sum up a rank's tensors as they were loaded (after the cast to the served dtype)."""
    numbers = torch.stack([tensor_sum(shard) for shard in shards.values()]).tolist()  # one wait
    sums = []
    for (key, shard), number in zip(shards.items(), numbers, strict=True):
        part = tuple((span.start, span.stop) for span in shard.index)
        sums.append(PartSum(str(key), str(shard.dest.dtype), shard.full_shape, part, number))
    return sums


def weights_digest(sums: Iterable[PartSum]) -> str:
    """Digest a model, of which ranks hold parts; the same for any number of ranks.

    It covers name, dtype, shape and every bit of the tensors that the model needs, under the
    checkpoint's names: so neither stacking nor the order of files matters.

    sums: of all ranks. Parts that several ranks hold, as copies, count once.
    """
    totals: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name, dtype, full_shape, _, number in {(x.name, x.part): x for x in sums}.values():
        total = number + (totals[name][2] if name in totals else 0)
        totals[name] = dtype, full_shape, (total + (1 << 63)) % (1 << 64) - (1 << 63)  # an i64
    return _sha256(totals)


def dummy_digest(seed: int, dtype: torch.dtype, device: torch.device, noise: str = "") -> str:
    """Replaces weights_digest for noise (`load_format: dummy`), which follows from these alone.

    noise: names it in the format of the matrices; see weights.base.Format.
    """
    return _sha256(["noise 1", seed, str(dtype), device.type, *filter(None, [noise])])


def model_digest(shape: LayerShape, weights: str) -> str:
    """Digest a model or a drafter: its configuration of KV, and its weights' digest."""
    fields = {name: value for name, value in asdict(shape).items() if name not in NOT_OF_KV}
    del fields["quantization"], fields["experts"]
    if shape.latent is None:
        del fields["latent"]
    # Under its first name; dtypes and shapes of the weights tell what the format is.
    held = shape.quantization
    later = {
        "eight": None if held is None else (held.group > 0, held.ignored),
        "experts": None if shape.experts is None else _said(shape.experts),
    }
    # Digests of drafters without have never had them, those of models always.
    is_model = isinstance(shape, ModelShape)
    fields |= {name: value for name, value in later.items() if is_model or value is not None}
    return _sha256([fields, weights])


def _said(experts: ExpertShape) -> list[object]:
    """The fields that digests have always had, then those of the later ones that say something.

    So workers of an older version still exchange KV of models that say nothing there.
    """
    later = dict(zip(experts._fields[NUM_EARLY:], experts[NUM_EARLY:], strict=True))
    said = {name: x for name, x in later.items() if x != experts._field_defaults[name]}
    return [*experts[:NUM_EARLY], *[said] * bool(said)]


def combined(digests: Mapping[str, str]) -> str:
    """One digest of all models whose state lies in the pages, by the name of their KV region."""
    return _sha256(dict(digests))


def models_digest(models: Mapping[str, Loadable], rank_group: RankGroup, noise: str = "") -> str:
    """Digest all models whose state lies in the pages, by the name of their KV region.

    rank_group: of the ranks that hold parts of the weights; noise: stands for all weights.
    """
    digests, decode = {}, msgspec.msgpack.Decoder(list[PartSum]).decode
    for region, model in models.items():
        weights = noise
        if not noise:
            sums = rank_group.gather(msgspec.msgpack.encode(part_sums(model.shards())))
            weights = weights_digest(chain.from_iterable(map(decode, sums)))
        digests[region] = model_digest(model.shape, weights)
    return combined(digests)


def tensor_sum(shard: Shard) -> Tensor:
    """[] i64: sum over all elements of bits · a(row) · b(column), modulo 2^64, on their device.

    Rows are all dimensions but the last; both are counted in the whole tensor, of which `shard` is
    a part. The factors are odd and look random. So a changed element always changes the sum, an
    exchange does but once in billions. Addition may be in any order; sums of parts add up.
    """
    part = shard.dest.detach()
    *rows_shape, num_columns = shard.full_shape
    rows = torch.arange(math.prod(rows_shape), device=part.device).view(rows_shape)
    a = _factors(rows[shard.index[:-1]].flatten(), 1)
    b = _factors(torch.arange(num_columns, device=part.device)[shard.index[-1]], 2)
    bits = part.view(INTEGERS[part.element_size()]).reshape(len(a), len(b))
    block = CPU_BLOCK if part.device.type == "cpu" else GPU_BLOCK
    step = max(1, block // len(b))
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for i in range(0, len(a), step):
        total += ((bits[i : i + step] * b).sum(1) * a[i : i + step]).sum()
    return total


def _factors(numbers: Tensor, kind: int) -> Tensor:
    """Odd i64 of 64 bits that look random: splitmix64 of `numbers`, another sequence a kind."""
    x = numbers * -7046029254386353131 + kind * 2862933555777941757
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _shifted(x, shift)) * factor
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by as if x were unsigned."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _sha256(tree: object) -> str:
    """16 hex digits, of the tree in JSON."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]
