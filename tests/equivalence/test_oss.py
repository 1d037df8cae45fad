"""gpt-oss as published, and as transformers saves it, against `transformers`; mutants are red."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import worker.weights.four_bits
from tests.equivalence import test_dense_laws as dense_laws
from tests.equivalence import test_models as models
from tests.equivalence.test_eight_bit_kv import WAYS
from tests.equivalence.test_four_bits import linears, stepped, values_of
from tests.equivalence.test_hybrid_mutants import mutate
from tests.support.chain_checkpoints import write_chain
from tests.support.engines import running
from tests.support.laws import ids
from tests.support.oss import OSS, dequantized, publish_oss, save_oss
from tests.support.pairwise import in_whole, one_in
from tests.support.places import place
from worker.config import ModelConfig, SpecConfig
from worker.config.checkpoint.shape import read_model_shape
from worker.errors import UserError
from worker.start.check import check_directories, sizes_of
from worker.weights.files import count_weights
from worker.weights.four_bits import FourBitMatrix

pytestmark = pytest.mark.usefixtures("one_thread", "multiplied")


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too, where weights would become f32 for speed."""
    monkeypatch.setattr(worker.weights.four_bits, "multiplies_packed", lambda _: True)


@cache
def saved(form: str) -> tuple[Path, torch.nn.Module]:
    """(directory, transformers' model of what its files are worth)."""
    path = place("oss") / form
    reference = save_oss(path)
    if form == "mxfp4":
        publish_oss(path, reference)
    return path, reference


@pytest.mark.parametrize("form", ["mxfp4", "plain"])
def test_logits_and_greedy_ids_equal_transformers(form: str) -> None:
    path, reference = saved(form)
    models.assert_same(reference, path, chunks=(64, 5))
    check_directories(ModelConfig(path=str(path)), SpecConfig(), {})


def test_experts_stay_in_four_bits_and_are_worth_what_transformers_reads() -> None:
    path, reference = saved("mxfp4")
    stay, whole = models.load(path, eight=True), models.load(path)
    packed = {name for name, x in linears(stay).items() if isinstance(x, FourBitMatrix)}
    assert packed == {name for name in linears(stay) if ".feed_forward." in name}
    for name, each in linears(whole).items():
        assert torch.equal(values_of(linears(stay)[name]), each.values), name
    held = load_file(path / "model.safetensors") | load_file(path / "other.safetensors")
    stem = "model.layers.1.mlp.experts."
    up = dequantized(held[f"{stem}gate_up_proj_blocks"], held[f"{stem}gate_up_proj_scales"])
    down = dequantized(held[f"{stem}down_proj_blocks"], held[f"{stem}down_proj_scales"])
    of_layer: Any = whole.layers[1]
    experts = of_layer.feed_forward
    both = torch.cat((up[..., ::2], up[..., 1::2]), -1).transpose(1, 2)
    assert torch.equal(experts.gate_up.values, both)
    assert torch.equal(experts.down.values, down.transpose(1, 2))
    found, wanted = stepped(stay)[0], models.expect(reference, models.PROMPTS[0], [0])[1]
    assert (found - wanted).abs().max() < models.BOUND
    assert count_weights(path) == count_weights(saved("plain")[0])
    sizes = sizes_of(path)
    assert sizes.weights == sum(each.nbytes for each in held.values())
    assert sizes.told.endswith("GB in four bits (mxfp4)")


@pytest.mark.parametrize(
    ("form", "division", "num"),
    [("mxfp4", "tensor", 2), *in_whole(("mxfp4", "expert", 4), ("plain", "tensor", 4))],
)
def test_ranks_equal_one(form: str, division: Any, num: int, tmp_path: Path) -> None:
    path = saved(form)[0]
    models.assert_ranks_equal_one(num, path, tmp_path, experts=division, eight=form == "mxfp4")


def test_ranks_that_would_share_a_group_are_refused_by_name() -> None:
    field = "decode.engine.tensor_parallel"
    ranks: Any = {field: (4, "tensor")}
    said = rf"{field}: 0 to 16 of 64 .* \(steps of 32\).*; set it to 2"
    with pytest.raises(UserError, match=said):
        check_directories(ModelConfig(path=str(saved("mxfp4")[0])), SpecConfig(), ranks)


SHORT = ("pulled, two ranks, ngram",)


@pytest.mark.parametrize(
    ("form", "way"),
    [
        ("mxfp4", SHORT[0]),
        *in_whole(*(("mxfp4", way) for way in WAYS if way not in SHORT), ("plain", "pulled")),
    ],
)
def test_whatever_serves_a_request_changes_nothing(form: str, way: str) -> None:
    path, reference = saved(form)
    assert dense_laws.served(path, WAYS[way]) == dense_laws.greedy(reference)


@pytest.mark.whole  # of other models: test_dense_laws.py
@pytest.mark.parametrize("chunks", ["pieces", "whole"])
def test_replays_change_nothing(chunks: str) -> None:
    path, reference = saved("mxfp4")
    dense_laws.check_replays(path, dense_laws.greedy(reference), chunks)


@pytest.mark.whole
def test_a_chain_that_is_fed_by_the_layers_changes_nothing(tmp_path: Path) -> None:
    """As published EAGLE-3 drafters for it: Llama's layer, which taps three of the target's."""
    path, reference = saved("mxfp4")
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    target = read_model_shape(path)
    write_chain(tmp_path, "specforge", target, own=("lm_head",), eagle_config=taps)
    made = dense_laws.sections(path, "always")
    made["spec"] = {"drafter": "chain", "path": str(tmp_path), "widths": [4]}
    with running(made, num_prefill=1) as cluster:
        found = ids(cluster.client.generate(dense_laws.prompts(), dense_laws.GREEDY))
    assert found == dense_laws.greedy(reference)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quantization_config": {"quant_method": "mxfp4", "dequantize": True}},
            "dequantize: True",
        ),
        ({"swiglu_limit": -1}, "swiglu_limit: must be a positive number"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than"),
        ({"hidden_act": "gelu"}, "hidden_act.*silu"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_oss(tmp_path)
    models.edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_model_shape(tmp_path)


def test_what_published_files_do_not_say_is_as_their_class_has_it(tmp_path: Path) -> None:
    save_oss(tmp_path)
    fields = "rope_parameters", "dtype", "swiglu_limit", "layer_types", "attention_bias"
    models.edit(tmp_path, **dict.fromkeys(fields, "absent"))
    shape = read_model_shape(tmp_path)
    assert shape.dtype == "bfloat16"
    assert shape.rope_scaling is not None
    assert not shape.rope_scaling.truncate
    assert shape.rope_scaling.attention_factor == pytest.approx(1.34657, abs=1e-5)
    assert shape.windows == (OSS["sliding_window"], 0) * 2
    assert shape.experts is not None
    assert (shape.experts.limit, shape.experts.gain, shape.experts.plus) == (7.0, 1.702, 1.0)


MUTANTS = [
    ("ops.experts.product:gated_ref", "gate.clamp(max=finish.limit)", "gate"),
    ("ops.experts.product:gated_ref", "up.clamp(-finish.limit, finish.limit)", "up"),
    ("ops.experts.product:gated_ref", "finish.gain * gate", "gate"),
    ("ops.experts.product:gated_ref", "up + finish.plus", "up"),
    ("ops.experts.product:_plus", "products + bias[:, None]", "products"),
    ("ops.experts.route:route_ref", "logits + bias, None", "logits, None"),
    ("attention.reference:ReferenceAttention._weights", "if sinks is not None:", "if False:"),
    ("config.checkpoint.windows:read_windows", "kind == SLIDING", "kind != SLIDING"),
    ("weights.stacks:of_stack", "i * apart", "(len(parts) - 1 - i) * apart"),
    ("weights.stacks:of_stack", "(len(parts), 1) if paired", "(1, rows) if paired"),
    ("ops.rope:_yarn_ramp", "if scaling.truncate:", "if True:"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "old", "new"), one_in(6, MUTANTS))
def test_a_mutant_is_red(where: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reference = saved("mxfp4")
    mutate(monkeypatch, where, old, new)
    prompt = models.PROMPTS[0]
    found = stepped(models.load(path))[0]
    assert (found - models.expect(reference, prompt, [0])[1]).abs().max() > models.BOUND
