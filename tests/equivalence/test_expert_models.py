"""Models with experts against `transformers`; each part of their routing left out is seen."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.equivalence import test_models as models
from tests.equivalence.test_models import assert_same, edit, load, save_random
from tests.support.expert_families import EXPERTS
from tests.support.pairwise import in_whole
from worker.config.checkpoint.experts import Division, ExpertShape, Held, rank_experts
from worker.config.checkpoint.shape import read_model_shape
from worker.errors import Unsupported
from worker.model import experts as layer
from worker.ops.experts import route as routing

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", sorted(EXPERTS))
def test_logits_and_greedy_ids_equal_transformers(case: str, tmp_path: Path) -> None:
    path = tmp_path / case
    assert_same(save_random(path, *EXPERTS[case]), path, chunks=(64, 5))


@pytest.mark.parametrize(
    ("case", "division"),
    [
        *(("qwen3-moe-mixed", "tensor"), ("qwen3-next-moe", "expert")),
        *in_whole(
            *(("qwen3-moe-mixed", "expert"), ("qwen3-next-moe", "tensor")),
            *(("mixtral", "expert"), ("mixtral", "tensor")),
        ),
    ],
)
def test_two_ranks_equal_one(case: str, division: Division, tmp_path: Path) -> None:
    save_random(tmp_path, *EXPERTS[case])
    models.assert_two_ranks_equal_one(tmp_path, tmp_path, experts=division)


def wrong_weights(**changes: Any) -> Any:
    def route(x, gate, slots, sink, shape, held, load):
        return routing.route_ref(x, gate, slots, sink, shape._replace(**changes), held, load)

    return route


def by_low_score(x, gate, *rest):
    return routing.route_ref(-x, gate, *rest)


def shifted(x, gate, *rest):
    return routing.route_ref(x, gate.roll(1, 0), *rest)


MUTANTS: dict[str, Any] = {
    "weights are not renormalised": wrong_weights(renormalizes=False),
    "one expert less": wrong_weights(top_k=2),
    "the least likely ones": by_low_score,
    "the map is off by one expert": shifted,
}


@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_a_wrong_route_is_seen(mutant: str, tmp_path: Path) -> None:
    reference = save_random(tmp_path, *EXPERTS["qwen3-moe"])
    with mock.patch.object(layer, "route", MUTANTS[mutant]), pytest.raises(AssertionError):
        assert_same(reference, tmp_path, chunks=(64,))


@pytest.mark.parametrize("part", ["shared", "gate", "up and gate", "down"])
def test_a_wrong_part_is_seen(part: str, tmp_path: Path) -> None:
    reference = save_random(tmp_path, *EXPERTS["qwen3-next-moe"])
    file = tmp_path / "model.safetensors"
    weights, changed = load_file(file), dict[str, torch.Tensor]()
    names = {
        "shared": ("shared_expert.down_proj", "shared_expert.down_proj"),
        "gate": ("shared_expert_gate", "shared_expert_gate"),
        "up and gate": ("experts.1.up_proj", "experts.1.gate_proj"),
        "down": ("experts.0.down_proj", "experts.1.down_proj"),
    }[part]
    for name, weight in weights.items():
        if names[0] in name:
            other = name.replace(*names)
            changed[name], changed[other] = weights[other].clone(), weight.clone()
            if name == other:
                changed[name].zero_()
    assert changed
    save_file(weights | changed, file)
    with pytest.raises(AssertionError):
        assert_same(reference, tmp_path, chunks=(64,))


def test_tensors_that_are_missing_or_of_no_expert_are_named(tmp_path: Path) -> None:
    save_random(tmp_path, *EXPERTS["qwen3-moe"])
    file = tmp_path / "model.safetensors"
    good = load_file(file)
    name = "model.layers.0.mlp.experts.7.up_proj.weight"
    bad = {key: value for key, value in good.items() if key != name}
    bad[name.replace("7", "8")] = good[name]
    save_file(bad, file)
    for division in ("tensor", "expert"):
        message = r"missing tensors: .*experts\.7\.up_proj.*unexpected tensors: .*experts\.8\.up"
        with pytest.raises(ValueError, match=message):
            load(tmp_path, None, division)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than num_experts 8"),
        ({"moe_intermediate_size": "wide"}, "moe_intermediate_size: must be a positive integer"),
        ({"norm_topk_prob": 1}, "norm_topk_prob: must be true or false"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_random(tmp_path, *EXPERTS["qwen3-moe"])
    edit(tmp_path, num_experts=8, num_local_experts="absent")
    read_model_shape(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_model_shape(tmp_path)


def test_experts_are_divided_by_parts_or_whole() -> None:
    shape = ExpertShape(128, 8, 768, renormalizes=True)
    assert rank_experts(shape, "auto", 1, 2) == (Held(0, 128), slice(384, 768))
    assert rank_experts(shape, "auto", 1, 8) == (Held(16, 16), slice(0, 768))  # parts of 96
    assert rank_experts(shape, "tensor", 7, 8) == (Held(0, 128), slice(672, 768))
    assert rank_experts(shape, "expert", 3, 4) == (Held(96, 32), slice(0, 768))
    with pytest.raises(Unsupported, match="128 experts of 768 cannot be divided among 3 ranks"):
        rank_experts(shape, "expert", 0, 3)
