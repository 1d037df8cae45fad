"""The digest of configuration and weights: what changes it, and what does not."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support import identity
from worker.config import ModelConfig
from worker.config.checkpoint.experts import ExpertShape
from worker.config.checkpoint.quantization import Quantization
from worker.config.checkpoint.shape import read_model_shape
from worker.model.load import load_model
from worker.model.placement import Placement
from worker.peers.base import SingleCollective
from worker.start.digest import (
    NOT_OF_KV,
    combined,
    dummy_digest,
    model_digest,
    part_sums,
    tensor_sum,
    weights_digest,
)
from worker.weights.shard import Shard

CPU = torch.device("cpu")
TINY = ModelConfig().directory
SPEC = read_model_shape(TINY)
NAME = "model.layers.3.mlp.down_proj.weight"


def whole(tensor: Tensor) -> Shard:
    return Shard(tensor, tuple(tensor.shape), tuple(slice(0, n) for n in tensor.shape))


def total(tensor: Tensor) -> int:
    return int(tensor_sum(whole(tensor)))


def digest_of(directory: Path, dtype: torch.dtype = torch.float32) -> str:
    model = load_model(directory, SPEC, Placement(SingleCollective(), dtype, CPU))
    return weights_digest(part_sums(model.shards()))


def changed(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of the bundled model with `change` made to its tensors."""
    shutil.copytree(TINY, directory, dirs_exist_ok=True)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


OTHER = NAME.replace(".3.", ".4.")
CHANGES: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "one bit": lambda held: held[NAME].view(torch.int16).view(-1)[4321].bitwise_xor_(1),
    "two layers": lambda held: held.update({NAME: held[OTHER], OTHER: held[NAME]}),
    "two rows": lambda held: held[NAME][:2].copy_(held[NAME][:2].flip(0)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_checkpoint_has_another_digest(change: str, tmp_path: Path) -> None:
    assert digest_of(changed(tmp_path, CHANGES[change])) != digest_of(TINY)


def test_the_same_tensors_in_other_files_have_the_same_digest(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    tensors = list(load_file(tmp_path / "model.safetensors").items())
    for number in (1, 2):
        save_file(dict(tensors[number % 2 :: 2]), tmp_path / f"part-{number}.safetensors")
    (tmp_path / "model.safetensors").unlink()
    assert digest_of(tmp_path) == digest_of(TINY)


def test_the_dtype_of_serving_is_part_of_the_digest() -> None:
    assert digest_of(TINY, torch.bfloat16) != digest_of(TINY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (5, 3), (700, 900), (3, 4, 6)])
def test_every_element_its_sign_and_its_place_count(dtype: torch.dtype, shape) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(shape, generator=generator).to(dtype)
    flat, sums = tensor.view(-1), {total(tensor)}
    places = torch.randint(len(flat), (20,), generator=generator).unique().tolist()
    for place in places:
        flat[place] *= -1
        sums.add(total(tensor))
        flat[place] *= -1
    assert len(sums) == len(places) + 1
    signs = total(-tensor)
    assert signs not in sums
    first, last = flat[0].clone(), flat[-1].clone()
    flat[0], flat[-1] = last, first
    assert total(tensor) not in {*sums, signs}


def test_the_sums_of_parts_add_up_to_that_of_the_whole() -> None:
    """So ranks, each with its rows or columns, can make the digest that one rank makes."""
    tensor = torch.randn(96, 1000, generator=torch.Generator().manual_seed(1))
    for dim, cuts in ((0, [0, 32, 96]), (1, [0, 1, 500, 1000])):
        parts = []
        for start, stop in itertools.pairwise(cuts):
            index = [slice(0, 96), slice(0, 1000)]
            index[dim] = slice(start, stop)
            part = tensor[tuple(index)].contiguous()
            parts.append(tensor_sum(Shard(part, (96, 1000), tuple(index))))
        assert int(torch.stack(parts).sum()) == total(tensor)


def test_of_the_configuration_what_kv_depends_on_counts() -> None:
    digests = {model_digest(SPEC, "w"), model_digest(SPEC, "v")}
    for field in dataclasses.fields(SPEC):
        value = getattr(SPEC, field.name)
        match value:
            case str():
                other: object = value + "x"
            case tuple():
                other = (7,)
            case None if field.name == "quantization":
                other = Quantization("e4m3", 128)
            case None if field.name == "experts":
                other = ExpertShape(4, 2, 128, renormalizes=True)
            case None:
                other = "another"
            case _:
                other = 2 * value + 1
        digest = model_digest(dataclasses.replace(SPEC, **{field.name: other}), "w")
        assert (digest == model_digest(SPEC, "w")) == (field.name in NOT_OF_KV), field.name
        digests.add(digest)
    assert len(digests) == 2 + len(dataclasses.fields(SPEC)) - len(NOT_OF_KV)


def test_noise_follows_from_seed_dtype_and_device() -> None:
    f32, bf16, cuda = torch.float32, torch.bfloat16, torch.device("cuda")
    kinds = (0, f32, CPU), (0, f32, CPU), (1, f32, CPU), (0, bf16, CPU), (0, f32, cuda)
    assert len({dummy_digest(*each) for each in (*kinds, (0, f32, CPU, "e4m3"))}) == 5


def test_a_drafter_joins_the_digest_by_its_name() -> None:
    alone = combined({"target": "a"})
    assert combined({"target": "a", "draft": "b"}) == combined({"draft": "b", "target": "a"})
    assert len({alone, combined({"target": "a", "draft": "b"}), combined({"target": "b"})}) == 3


def test_bundled_models_are_what_they_were_to_workers_of_an_older_version():
    recorded = json.loads(identity.RECORD.read_text())
    found = identity.identities(("bfloat16",))
    assert len(found) == 2 * len(identity.MODELS) - len(identity.WITHOUT_EIGHT_BITS)
    assert found == {name: recorded[name] for name in found}


def test_what_experts_say_beyond_the_usual_is_in_the_digest():
    plain = read_model_shape(ModelConfig(path="tiny-moe").directory)
    assert plain.experts is not None
    others = [
        dataclasses.replace(plain, experts=plain.experts._replace(**{field: value}))
        for field, value in (("scoring", "sigmoid"), ("is_biased", True), ("factor", 2.5))
    ]
    digests = {model_digest(shape, "") for shape in (plain, *others)}
    assert len(digests) == 1 + len(others)
