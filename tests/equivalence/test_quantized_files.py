"""Weights in eight bits as they are published, against what `transformers` computes from them."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.train.model import apart
from tests.equivalence.test_models import assert_same, edit, load, save_random
from worker.config.checkpoint.quantization import Quantization
from worker.config.checkpoint.shape import read_model_shape
from worker.errors import UserError
from worker.weights.formats import Readings
from worker.weights.scaled_files import Scaled

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
CHANNEL = compressed("channel")
NAIVE = CHANNEL | {"format": "naive-quantized"}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
FOUR = {"group_size": 64, "bits": 4}
TURNS = [{"location": "weight_output"}, {"location": "weight_input", "inverse": True}]
HARMLESS = {
    "sparsity_config": {"format": "dense"},
    "transform_config": {"config_groups": {"R1": {"type": "hadamard", "apply": TURNS}}},
}
ROTATED = {"transform_config": {"config_groups": {"R3": {"apply": [{"location": "q_attn"}]}}}}
FUSED = {"hidden_size": 192, "intermediate_size": 160, "pad_token_id": 0, "num_hidden_layers": 1}
LATENT = {  # whose keys and values are made of halves of one matrix, blocks that are a part too
    "hidden_size": 192, "intermediate_size": 160, "num_hidden_layers": 2, "num_key_value_heads": 4,
    "first_k_dense_replace": 2, "q_lora_rank": 128, "kv_lora_rank": 144, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
CASES = {
    "qwen3": ("Qwen3", SIZES), "phi3": ("Phi3", FUSED), "deepseek-v3": ("DeepseekV3", LATENT),
}  # fmt: skip


def write(path: Path, **fields: Any) -> None:
    """A config.json alone."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 99}
    sizes["num_key_value_heads"] = 2
    config = {"architectures": ["Qwen3ForCausalLM"], **sizes, **SIZES, **fields}
    (path / "config.json").write_text(json.dumps(config))


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
    ends = "proj.weight", "proj_with_mqa.weight"
    taken = [each for each in held if each.endswith(ends) and not each.startswith(left)]
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
            spread = Scaled(name, reader.get_slice(name), scale[:, None, :, None])
            assert torch.equal(spread[:, :], wanted), "as ModelOpt stores blocks"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight_block_size": [64, 64]}, r"weight_block_size: \[64, 64\]; read: \[128, 128\]"),
        ({"activation_scheme": "static"}, "activation_scheme: 'static'"),
        ({"fmt": "e5m2"}, "fmt: 'e5m2'"),
        (compressed("group"), r"config_groups\.group_0\.weights\.strategy: 'group'"),
        (compressed("channel", num_bits=4), r"weights\.num_bits: 4"),
        (compressed("channel") | {"format": "pack-quantized"}, r"weights\.type: 'float'; suppor"),
        ({"quant_method": "aqlm"}, "AQLM weights; kvlane reads"),
        ({"expert_dtype": "fp4"}, "expert_dtype: 'fp4'"),
        ({"modules_to_convert": ["embed"]}, "modules_to_convert: embeddings"),
        ({"modules_to_not_convert": ["(("]}, r"'\(\(' is no regular expression"),
        ({"unheard_of": 3}, "unheard_of: an unknown field, of value 3; remove it"),
        (compressed("channel", symmetric=False), r"weights\.symmetric: False"),
        (compressed("channel", zero_points=True), r"weights\.zero_points: an unknown field"),
        (compressed("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity"),
        (compressed("channel") | ROTATED, r"transform_config: activations are transformed"),
    ],
)
def test_another_form_is_refused_by_field_and_value(change, said: str, tmp_path: Path) -> None:
    write(tmp_path, quantization_config=BLOCKS | change)
    with pytest.raises(UserError, match=said) as caught:
        read_model_shape(tmp_path)
    assert re.search("take|set it", str(caught.value))


# Where else a format is declared: fields of config.json, files beside it -> what is refused of it.
PLACES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "older name": ({"compression_config": CHANNEL}, {}, ""),
    "older name of the format": ({"quantization_config": NAIVE}, {}, ""),
    "dense, and turned once": ({"quantization_config": CHANNEL, **HARMLESS}, {}, ""),
    "modelopt": ({}, {"hf_quant_config.json": {"quantization": MODELOPT}}, ""),
    "modelopt in config.json": (
        {"quantization_config": MODELOPT | {"quant_method": "modelopt"}}, {}, "",
    ),
    "mlx": ({"quantization": FOUR}, {}, r"config\.json: quantization: quantized \(MLX\)"),
    "mlx, twice": ({"quantization": FOUR, "quantization_config": FOUR}, {}, r"\(MLX\)"),
    "gptq": (
        {}, {"quantize_config.json": FOUR | {"desc_act": True}},
        r"quantize_config\.json: desc_act: True.*or remove",
    ),
    "awq": ({}, {"quant_config.json": {"w_bit": 4}}, r"quant_config\.json: group_size: missing"),
    "exllama": ({}, {"quantization_config.json": {"quant_method": "exl3"}}, "exl3"),
    "ascend": ({}, {"quant_model_description_w8.json": {"a.weight": "W8A8"}}, "Ascend"),
    "bitsandbytes": ({"quantization_config": {"load_in_8bit": True}}, {}, "bitsandbytes"),
    "rotated": ({"online-rotate": {"online_full_had": True}}, {}, "online-rotate: speaks of"),
    "bits": ({"quantization_bit": 8}, {}, "quantization_bit: speaks of"),
    "nvfp4": (
        {}, {"hf_quant_config.json": {"quantization": MODELOPT | {"quant_algo": "NVFP4_AWQ"}}},
        r"hf_quant_config\.json: quantization\.quant_algo: 'NVFP4_AWQ'",
    ),
    "mixed": (
        {"quantization_config": {"quant_algo": "MIXED_PRECISION"}}, {}, "'MIXED_PRECISION'; read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_a_format_is_seen_wherever_it_is_declared(case: str, tmp_path: Path) -> None:
    fields, files, refused = PLACES[case]
    write(tmp_path, **fields)
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    if not refused:
        found = read_model_shape(tmp_path).quantization
        assert found is not None
        assert (found.format, found.group, found.takes("lm_head")) == ("e4m3", 0, False)
        return
    with pytest.raises(UserError, match=refused) as caught:
        read_model_shape(tmp_path)
    assert "take" in str(caught.value)


MODULES = [
    f"model.layers.{i}.{x}"
    for i in (1, 11)
    for x in ("mlp.gate", "mlp.gate_proj", "mlp.shared_expert_gate", "self_attn.q_proj", "mlp")
] + ["lm_head", "model.embed_tokens", "mtp.layers.0.mlp.gate"]


@pytest.mark.parametrize(
    "pattern",
    [
        *("lm_head", "model.layers.1", r"model\.layers\.\d+\.mlp", "gate", "mlp.gate", "proj"),
        *("model.layers.*.self_attn", r".*(o_proj|q_proj)", "model.layers.1.mlp.gate", "layers.1"),
    ],
)
def test_what_is_not_converted_is_named_as_transformers_reads_it(pattern: str) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    found = [x for x in MODULES if Quantization("e4m3", 0, (pattern,), "patterns").takes(x)]
    assert found == [x for x in MODULES if should_convert_module(x, [pattern])]


def test_globs_name_modules_and_all_within_them() -> None:
    for glob, count in {
        "*.mlp.gate": 3, "model.layers.1.mlp*": 4, "mtp*": 1, "*self_attn": 2, "*gate": 5,
        "model.layers.1?.mlp.gate": 1, "model.layers.1": 5, "*": len(MODULES), "up_proj": 0,
    }.items():  # fmt: skip
        left = [x for x in MODULES if not Quantization("e4m3", 0, (glob,), "globs").takes(x)]
        assert len(left) == count, (glob, left)


def test_a_start_says_what_is_not_used_or_not_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    published(tmp_path, "tensor", save_random(tmp_path, *CASES["phi3"]))
    edit(tmp_path, quantization_config=CHANNEL | {"kv_cache_scheme": {"num_bits": 8}})
    scale = {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    save_file(load_file(tmp_path / "other.safetensors") | scale, tmp_path / "other.safetensors")
    save_file({"lora_A": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    caplog.set_level(logging.INFO, "kvlane.weights")
    load(tmp_path)
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "left alone, for they are not of the model: adapter_model.safetensors",
        "KV is as kv.dtype says: not used are quantization_config.kv_cache_scheme and 1 scales",
        "4 quantized matrices become the model's dtype, in which activations are",
    ]


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
