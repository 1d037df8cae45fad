"""Models with experts against `transformers`; each part of their routing left out is seen."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.equivalence import test_models as models
from tests.equivalence.test_models import assert_same, edit, load, save_random
from tests.support.expert_families import EXPERTS
from tests.support.pairwise import in_whole, one_in
from worker.config.checkpoint.experts import Division, ExpertShape, Held, rank_experts
from worker.config.checkpoint.shape import read_model_shape
from worker.errors import Unsupported
from worker.model import decoder
from worker.model import experts as layer
from worker.ops.experts import route as routing
from worker.peers.base import SingleCollective
from worker.weights.files import count_weights

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("case", one_in(3, sorted(EXPERTS)))
def test_logits_and_greedy_ids_equal_transformers(case: str, tmp_path: Path) -> None:
    path = tmp_path / case
    assert_same(save_random(path, *EXPERTS[case]), path, chunks=(64, 5))


@pytest.mark.parametrize("num", models.RANKS)
@pytest.mark.parametrize(
    ("case", "division"),
    [
        *(("qwen3-moe-mixed", "tensor"), ("qwen3-moe-mixed", "expert")),
        *in_whole(
            *(("qwen3-next-moe", "expert"), ("qwen3-next-moe", "tensor")),
            *(("mixtral", "expert"), ("mixtral", "tensor")),
            *(("qwen3.5-moe-joined", "expert"), ("qwen3.5-moe-joined", "tensor")),
        ),
    ],
)
def test_ranks_equal_one(case: str, division: Division, num: int, tmp_path: Path) -> None:
    save_random(tmp_path, *EXPERTS[case])
    models.assert_ranks_equal_one(num, tmp_path, tmp_path, experts=division)


ONE_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")


def stack_experts(path: Path) -> None:
    """Put the experts of each layer into one tensor, as Qwen3.5 MoE is published in 16 bits."""
    weights = load_file(path / "model.safetensors")
    parts = dict[str, dict[int, dict[str, torch.Tensor]]]()
    for name in list(weights):
        if found := ONE_EXPERT.fullmatch(name):
            of_block = parts.setdefault(found[1], {})
            of_block.setdefault(int(found[2]), {})[found[3]] = weights.pop(name)
    for block, experts in parts.items():
        held = [experts[number] for number in sorted(experts)]
        both = [torch.cat((each["gate_proj"], each["up_proj"])) for each in held]
        weights[f"{block}.gate_up_proj"] = torch.stack(both)
        weights[f"{block}.down_proj"] = torch.stack([each["down_proj"] for each in held])
    save_file(weights, path / "model.safetensors")


def test_experts_in_one_tensor_are_those_of_each(tmp_path: Path) -> None:
    save_random(tmp_path, *EXPERTS["qwen3.5-moe"])
    ways: list[tuple[int, int, Division]] = [(0, 1, "auto"), (1, 2, "tensor"), (1, 2, "expert")]

    def read() -> list[dict[Any, torch.Tensor]]:
        found = []
        for rank, size, division in ways:
            group = SingleCollective()
            group.rank, group.size = rank, size
            shards = load(tmp_path, group, division).shards()
            found.append({key: shard.dest for key, shard in shards.items()})
        return found

    apart, sizes = read(), count_weights(tmp_path)
    stack_experts(tmp_path)
    for one, other in zip(apart, read(), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert count_weights(tmp_path) == sizes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stack: stack[:, :, :-1], r"experts\.0\.gate_proj\.weight has shape \(32, 63\)"),
        (
            lambda stack: torch.cat((stack, stack[:1])),
            r"unexpected tensors: .*experts\.8\.gate_proj",
        ),
        (lambda stack: stack[:-1], r"missing tensors: .*experts\.7\.gate_proj"),
        (
            lambda stack: stack.flatten(1),
            r"gate_up_proj has shape \(8, 4096\): no stack of experts",
        ),
        (
            lambda stack: stack.to(torch.float8_e4m3fn),
            r"is F8_E4M3.*take files with a tensor of each",
        ),
    ],
)
def test_a_tensor_of_all_experts_that_does_not_fit_is_named(change, message, tmp_path) -> None:
    save_random(tmp_path, *EXPERTS["qwen3.5-moe"])
    stack_experts(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    save_file(held | {name: change(held[name]).contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def wrong_weights(**changes: Any) -> Any:
    def route(x, gate, slots, sink, shape, held, load):
        return routing.route_ref(x, gate, slots, sink, shape._replace(**changes), held, load)

    return route


def by_low_score(x, gate, *rest):
    return routing.route_ref(-x, gate, *rest)


def shifted(x, gate, *rest):
    return routing.route_ref(x, gate.roll(1, 0), *rest)


def without_gate(x, gate, slots, sink, shape, *rest):
    return routing.route_ref(x, gate[: shape.num_experts], slots, sink, shape, *rest)


def without_shared(x, gate, slots, sink, shape, *rest):
    routes = routing.route_ref(x, gate, slots, sink, shape, *rest)
    routes.weights[:, shape.top_k :] = 0
    return routes


MUTANTS: dict[str, Any] = {
    "weights are not renormalised": wrong_weights(renormalizes=False),
    "one expert less": wrong_weights(top_k=2),
    "the least likely ones": by_low_score,
    "the map is off by one expert": shifted,
    "a shared expert has no gate": without_gate,
    "a shared expert has no tokens": without_shared,
}


@pytest.mark.parametrize("mutant", one_in(4, sorted(MUTANTS)))
def test_a_wrong_route_is_seen(mutant: str, tmp_path: Path) -> None:
    case = JOINED if "shared" in mutant else "qwen3-moe"
    reference = save_random(tmp_path, *EXPERTS[case])
    with mock.patch.object(layer, "route", MUTANTS[mutant]), pytest.raises(AssertionError):
        assert_same(reference, tmp_path, chunks=(64,))


JOINED = "qwen3.5-moe-joined"


def test_a_shared_expert_joins_the_others_where_it_is_as_they_are(tmp_path: Path) -> None:
    for case, division, size, joined in (
        (JOINED, "auto", 1, 1), (JOINED, "tensor", 2, 1), (JOINED, "expert", 2, 0),
        ("qwen3.5-moe", "auto", 1, 0), ("qwen3-moe", "auto", 1, 0),
    ):  # fmt: skip
        path, group = tmp_path / case, SingleCollective()
        group.size = size
        if not path.exists():
            save_random(path, *EXPERTS[case])
        found = load(path, group, division).experts[0]
        assert (found.held.shared, found.shared is None) == (joined, joined or case == "qwen3-moe")
        assert len(found.gate) == 8 + joined


def test_a_shared_expert_joins_what_is_stored_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[Any, Any]]()
    monkeypatch.setattr(decoder, "joins", lambda *how: asked.append(how) or layer.joins(*how))
    save_random(tmp_path, *EXPERTS[JOINED])
    load(tmp_path)
    shape, placement = asked[0]
    names = shape.features.experts
    ungated_names = names._replace(shared_gate="")
    without = SimpleNamespace(
        experts=shape.experts, scale_group=shape.scale_group,
        features=replace(shape.features, experts=ungated_names),
    )  # fmt: skip
    for apart, gated, ungated in (
        ("", True, True), (".experts.3.", False, False), (".shared_expert.", False, False),
        (".down_proj", False, False), ("mlp", True, False),
    ):  # fmt: skip
        kept = SimpleNamespace(takes=lambda name, a=apart: not a or a not in f"{name}.")
        how = replace(placement, format=kept)
        assert (layer.joins(shape, how), layer.joins(without, how)) == (gated, ungated), apart
    assert not layer.joins(without, placement)
    without.experts, without.features = shape.experts._replace(gain=1.5), shape.features
    assert not layer.joins(without, placement)


@pytest.mark.parametrize("case", ["qwen3-next-moe", JOINED])
@pytest.mark.parametrize("part", one_in(4, ["shared", "gate", "up and gate", "down"]))
def test_a_wrong_part_is_seen(part: str, case: str, tmp_path: Path) -> None:
    reference = save_random(tmp_path, *EXPERTS[case])
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
