"""Weights in eight bits as they are published, against what `transformers` computes from them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.train.model import apart
from tests.equivalence.test_models import assert_same, edit, load, save_random
from worker.config.checkpoint.shape import read_model_shape
from worker.errors import UserError
from worker.weights.formats import Readings

BLOCK = 128
# Two blocks of rows and of columns in every matrix, of which the last one is a part.
SIZES = {"hidden_size": 192, "intermediate_size": 160, "head_dim": 32}
DYNAMIC = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = DYNAMIC | {"weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": ["lm_head"]}


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True} | more
    group = {"weights": weights, "input_activations": {"dynamic": True}, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


FORMS: dict[str, tuple[dict[str, Any], str]] = {  # quantization_config, what a scale ends with
    "fp8": (BLOCKS, "weight_scale_inv"),
    "tensor": (compressed("tensor"), "weight_scale"),
    "channel": (compressed("channel"), "weight_scale"),
    "block": (compressed("block", block_structure=[BLOCK, BLOCK]), "weight_scale"),
}
FUSED = {"hidden_size": 192, "intermediate_size": 160, "pad_token_id": 0, "num_hidden_layers": 1}
CASES = {"qwen3": ("Qwen3", SIZES), "phi3": ("Phi3", FUSED)}


def published(
    path: Path, form: str, reference: torch.nn.Module | None = None, left: tuple[str, ...] = ()
) -> None:
    """Rewrite a saved model as such a form, and give the reference what that is worth.

    left: modules, below which all stays as it is.
    """
    config, end = FORMS[form]
    if left:
        config = config | {"modules_to_not_convert": ["lm_head", *left]}
    edit(path, quantization_config=config)
    held = apart(load_file(path / "model.safetensors"))
    kept = {} if reference is None else dict(reference.named_parameters())
    scales = {}
    taken = [each for each in held if each.endswith("proj.weight") and not each.startswith(left)]
    for name in taken:
        values, found = held[name], []
        rows, columns = values.shape
        tall, wide = {
            "tensor": (rows, columns), "channel": (1, columns)
        }.get(form, (BLOCK, BLOCK))  # fmt: skip
        eight = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
        for row in range(0, rows, tall):
            found.append([])
            for column in range(0, columns, wide):
                at = slice(row, row + tall), slice(column, column + wide)
                scale = values[at].abs().max() / 448
                eight[at] = (values[at] / scale).to(eight.dtype)
                if kept:
                    with torch.no_grad():
                        kept[name][at] = eight[at].float() * scale
                found[-1].append(scale)
        held[name] = eight
        scale = torch.tensor(found)
        scales[name.removesuffix("weight") + end] = scale.view(1) if form == "tensor" else scale
    last = sorted(scales)[-1]
    save_file({last: scales.pop(last)}, path / "other.safetensors")  # it may lie anywhere
    save_file(held | scales, path / "model.safetensors")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_what_the_file_is_worth(case: str, form: str, tmp_path: Path) -> None:
    reference = save_random(tmp_path, *CASES[case])
    published(tmp_path, form, reference)
    assert_same(reference, tmp_path, chunks=(64,))


def test_transformers_reads_the_same_weights(tmp_path: Path) -> None:
    """Its own dequantisation, which takes whole blocks; from_pretrained wants `accelerate`."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8}
    published(
        tmp_path, "fp8", save_random(tmp_path, "Qwen3", SIZES | sizes | {"num_key_value_heads": 4})
    )
    files = sorted(tmp_path.glob("*.safetensors"))
    held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    ours, theirs = Readings(files), Fp8Dequantize(None)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as reader:
        for name in [name for name in held if name.endswith("proj.weight")]:
            scale = held[f"{name}_scale_inv"]
            wanted = theirs._dequantize_one(held[name], scale, torch.float32)
            found = ours.opened(name, reader.get_slice(name))
            assert torch.equal(found[:, :], wanted)
            assert torch.equal(found[100:150, 7:131], wanted[100:150, 7:131]), "a rank's part"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight_block_size": [64, 64]}, r"weight_block_size: \[64, 64\]; read: \[128, 128\]"),
        ({"activation_scheme": "static"}, "activation_scheme: 'static'"),
        ({"fmt": "e5m2"}, "fmt: 'e5m2'"),
        (compressed("group"), r"config_groups\.group_0\.weights\.strategy: 'group'"),
        (compressed("channel", num_bits=4), r"weights\.num_bits: 4"),
        (compressed("channel") | {"format": "pack-quantized"}, "format: 'pack-quantized'"),
        ({"quant_method": "awq"}, "AWQ weights; kvlane reads"),
    ],
)
def test_another_form_is_refused_by_field_and_value(change, said: str, tmp_path: Path) -> None:
    save_random(tmp_path, *CASES["qwen3"])
    edit(tmp_path, quantization_config=BLOCKS | change)
    with pytest.raises(UserError, match=said):
        read_model_shape(tmp_path)


@pytest.mark.parametrize("wrong", ["gone", "transposed", "unused"])
def test_a_scale_that_does_not_fit_is_named(wrong: str, tmp_path: Path) -> None:
    published(tmp_path, "fp8", save_random(tmp_path, *CASES["qwen3"]))
    name = "model.layers.0.mlp.down_proj.weight_scale_inv"
    held = load_file(tmp_path / "model.safetensors")
    scale = held.pop(name)
    if wrong == "transposed":
        held[name] = torch.ones(scale.shape[1] + 1, scale.shape[0])
    elif wrong == "unused":
        held |= {name: scale, "model.layers.0.input_layernorm.weight_scale": torch.ones(1)}
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"down_proj|input_layernorm\.weight_scale"):
        load(tmp_path)
