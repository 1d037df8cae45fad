"""What cannot be served is refused with what could be done instead."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.hybrids import hybrid
from worker.config import ModelConfig, SpecConfig
from worker.config.checkpoint.families import FAMILIES, served
from worker.config.checkpoint.refusals import NEEDED, READ
from worker.config.checkpoint.shape import read_model_shape
from worker.errors import Unsupported, UserError
from worker.start.check import EIGHT_BITS, check_directories, check_kv, check_states

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 99,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32768,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SU = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
DENSE = "take a dense model, as Qwen/Qwen3-8B"
# Models that refusals advise to take, by the architecture of their files.
ADVISED = {
    "Qwen/Qwen3-30B-A3B": "Qwen3MoeForCausalLM", "zai-org/GLM-4.7-Flash": "Glm4MoeLiteForCausalLM",
    "deepseek-ai/DeepSeek-V3.1": "DeepseekV3ForCausalLM", "Qwen/Qwen3-8B": "Qwen3ForCausalLM",
    "Qwen/Qwen3.5-9B": "Qwen3_5ForConditionalGeneration",
    "meta-llama/Llama-3.1-8B-Instruct": "LlamaForCausalLM",
    "mistralai/Mistral-Nemo-Instruct-2407": "MistralForCausalLM",
    "allenai/OLMo-2-1124-7B-Instruct": "Olmo2ForCausalLM",
    "microsoft/phi-4": "Phi3ForCausalLM", "google/gemma-3-1b-it": "Gemma3ForCausalLM",
}  # fmt: skip
# Architecture, fields beside SIZES, what the refusal says.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("DbrxForCausalLM", {}, "experts of another form.*Qwen/Qwen3-30B-A3B"),
    ("Llama4ForConditionalGeneration", {}, "experts of another form.*Qwen/Qwen3-30B-A3B"),
    ("Qwen2MoeForCausalLM", {}, "experts of another form.*Qwen/Qwen3-30B-A3B"),
    ("DeepseekV32ForCausalLM", {"quantization_config": FP8}, "sparse.*take zai-org/GLM-4.7-Flash"),
    ("GlmMoeDsaForCausalLM", {}, "sparse attention.*DeepSeek-V3.1"),
    ("KimiK25ForConditionalGeneration", {}, "MLA.*take zai-org/GLM-4.7-Flash.*Qwen/Qwen3-8B"),
    ("MiniCPM3ForCausalLM", {}, "another form of latent attention"),
    ("DeepseekV3ForCausalLM", {"index_topk": 2048}, "index_topk: sparse.*take zai-org/GLM"),
    ("DeepseekV3ForCausalLM", {"attention_bias": True}, "attention_bias: biases in latent"),
    ("DeepseekV3ForCausalLM", {"rope_interleave": False}, "rope_interleave: False.*: True"),
    ("Glm4MoeLiteForCausalLM", {"topk_method": "greedy"}, "topk_method: 'greedy'.*noaux_tc"),
    ("Glm4MoeLiteForCausalLM", {"scoring_func": "softmax"}, "scoring_func: 'softmax'.*sigmoid"),
    *[
        ("DeepseekV2ForCausalLM", {"num_experts_per_tok": 2, field: wrong}, f"{field}: .*: {right}")
        for field, wrong, right in (
            ("topk_method", "noaux_tc", "greedy, group_limited_greedy"),
            ("scoring_func", "sigmoid", "softmax"),
            ("norm_topk_prob", True, False),
        )
    ],
    ("MambaForCausalLM", {}, "recurrent layers.*take Qwen/Qwen3.5-9B"),
    ("GraniteMoeHybridForCausalLM", {}, "recurrent layers"),
    ("NemotronHForCausalLM", {}, "recurrent layers"),
    ("GemmaForCausalLM", {}, "take one of those, as google/gemma-3-1b-it"),
    ("Gemma3nForConditionalGeneration", {}, "images.*a model of text alone"),
    ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, f"embeds texts; {DENSE}"),
    ("Step3TextForCausalLM", {}, "sliding windows.*OLMo-2"),
    ("Starcoder2ForCausalLM", {}, "LayerNorm.*take a model with RMSNorm"),
    ("Qwen2_5_VLForConditionalGeneration", {}, "images.*a model of text alone"),
    ("BertForMaskedLM", {}, "another task.*ForCausalLM"),
    ("NobodysForCausalLM", {}, "take a model of an architecture that is: Cohere2ForCausalLM"),
    ("Qwen3ForCausalLM", {"quantization_config": {"quant_method": "fp8"}}, "block_size.*; or take"),
    ("LlamaForCausalLM", {"quantization_config": {"quant_method": "aqlm"}}, f"AQLM.*{READ}"),
    ("LlamaForCausalLM", {"quantization_config": {"quant_method": "exl2"}}, f"exl2.*{READ}"),
    ("LlamaForCausalLM", {"quantization_config": {"load_in_4bit": True}}, f"quantized.*{READ}"),
    (
        "SmolLM3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 4096},
        "sliding-window attention.*embeddings to 4096",
    ),
    (
        "Qwen3ForCausalLM",
        {"layer_types": ["full_attention", "chunked_attention"]},
        f"layer_types: layers of type chunked_attention; {DENSE}",
    ),
]
LINEAR = {"rope_type": "linear", "factor": 2.0}
REFUSED += [
    (
        "LlamaForCausalLM",
        {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        "rope_scaling: differs from rope_parameters; remove the one that .* or take",
    ),
    (
        "LlamaForCausalLM",
        {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"rope_theta": 5e5}},
        "rope_scaling: differs",
    ),
    (
        "Gemma3ForCausalLM",
        {"rope_parameters": LINEAR | {"rope_theta": 1e6}, "head_dim": 16},
        "rope_parameters: is of all layers, whose ropes differ; set it to an object for each type",
    ),
    ("LlamaForCausalLM", {"torch_dtype": "float8_e4m3fn"}, "torch_dtype: .*; set it to that of"),
    ("LlamaForCausalLM", {"mlp_bias": 3}, "mlp_bias: must be true or false, .*; set it right"),
    ("Glm4ForCausalLM", {"partial_rotary_factor": "0.5"}, "rotary_factor: must be a positive numb"),
    ("LlamaForCausalLM", {"rope_scaling": YARN | {"mscale": "1"}}, "rope_scaling.mscale: must be"),
    ("MistralModel", {}, "another task.*take a model ...ForCausalLM"),
]
# Architecture, fields beside SIZES, of models that are served; others: tests/equivalence.
SERVED: list[tuple[str, dict[str, Any]]] = [
    ("MistralForCausalLM", {"sliding_window": 32768}),
    ("MistralForCausalLM", {"max_position_embeddings": 4096}),
    ("Phi3ForCausalLM", {"sliding_window": 262144}),
    ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 131072}),
    (
        "Phi3ForCausalLM",  # as Phi-3-mini-128k calls it
        {"rope_scaling": SU, "original_max_position_embeddings": 4096},
    ),
    ("Glm4ForCausalLM", {"rope_scaling": YARN, "partial_rotary_factor": 0.5, "head_dim": 128}),
    ("SmolLM3ForCausalLM", {"use_sliding_window": False}),
    ("SmolLM3ForCausalLM", {"use_sliding_window": True}),  # and no window
    (
        "LlamaForCausalLM",
        {
            "rope_scaling": LINEAR,
            "rope_theta": 5e5,
            "rope_parameters": {"type": "linear", "factor": 2, "rope_theta": 5e5},
        },
    ),
]


def write(directory: Path, architecture: str, fields: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(SIZES | fields | {"architectures": [architecture]})
    (directory / "config.json").write_text(text)
    return directory


@pytest.mark.parametrize(("architecture", "fields", "message"), REFUSED)
def test_a_refusal_names_a_remedy(
    architecture: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_model_shape(write(tmp_path, architecture, fields))
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert re.search("take|set", str(caught.value))


@pytest.mark.parametrize(("architecture", "fields"), SERVED)
def test_what_hides_nothing_is_served(
    architecture: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    assert read_model_shape(write(tmp_path, architecture, fields)).architecture == architecture


def check(path: Path) -> None:
    check_directories(ModelConfig(path=str(path)), SpecConfig(), {})


def test_gguf_files_that_are_not_there_or_beside_a_configuration_are_told(tmp_path: Path) -> None:
    hub = tmp_path / "models--unsloth--Qwen3-8B-GGUF" / "snapshots" / "1"
    write(hub, "Qwen3ForCausalLM", {})
    for _ in range(2):  # with a configuration, as some have it, and without
        with pytest.raises(Unsupported, match=r"GGUF .*hf download.*or take unsloth/Qwen3-8B,"):
            check(hub)
        (hub / "config.json").unlink(missing_ok=True)
    write(tmp_path, "LlamaForCausalLM", {})
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"no \*.safetensors file, but m.gguf: give the path"):
        check(tmp_path)
    with pytest.raises(UserError, match=r"model\.path: there is no directory"):
        check(tmp_path / "absent")


def test_weights_of_other_kinds_are_named(tmp_path: Path) -> None:
    write(tmp_path, "LlamaForCausalLM", {})
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"no \*.safetensors file, but pytorch_model.bin; .*save_"):
        check(tmp_path)


def test_what_is_advised_is_served_and_what_is_served_is_not_refused() -> None:
    assert set(ADVISED.values()) <= set(FAMILIES)
    texts = [text for _, text in NEEDED.values()]
    assert all(any(name in text for text in texts) for name in ADVISED)


def test_layers_without_rope_follow_from_an_interval_where_none_are_named(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 5, "no_rope_layer_interval": 2}
    shape = read_model_shape(write(tmp_path, "SmolLM3ForCausalLM", sizes))
    assert shape.is_still == (False, True, False, True, False)
    few = {"num_hidden_layers": 5, "no_rope_layers": [1, 0]}
    with pytest.raises(UserError, match="no_rope_layers: names 2 of 5 layers"):
        read_model_shape(write(tmp_path, "SmolLM3ForCausalLM", few))


@pytest.mark.parametrize(
    ("architecture", "dtype", "capability", "why"),
    [
        ("Qwen3ForCausalLM", "float16", (9, 0), "needs a model in bfloat16 or float32"),
        (
            "Qwen3ForCausalLM",
            "bfloat16",
            (8, 0),
            "is served on GPUs from compute capability 8.9 on, and this one has 8.0",
        ),
        ("Qwen2ForCausalLM", "bfloat16", (9, 0), "loses too much of keys with a bias"),
        ("Qwen3ForCausalLM", "bfloat16", (8, 9), ""),
        ("Qwen3ForCausalLM", "bfloat16", None, ""),
    ],
)
def test_kv_in_eight_bits_is_refused_where_it_cannot_be(
    architecture: str, dtype: str, capability: tuple[int, int] | None, why: str, tmp_path: Path
) -> None:
    shape = read_model_shape(write(tmp_path, architecture, {}))
    check_kv("auto", dtype, shape, capability)
    if not why:
        check_kv(EIGHT_BITS, dtype, shape, capability)
        return
    with pytest.raises(UserError, match=f"kv.dtype: {EIGHT_BITS} {why}.*leave it auto") as caught:
        check_kv(EIGHT_BITS, dtype, shape, capability)
    assert caught.value.param == "kv.dtype"


def test_states_in_sixteen_bits_are_refused_where_there_are_none(tmp_path: Path) -> None:
    shape = read_model_shape(write(tmp_path, "Qwen3ForCausalLM", {}))
    check_states("float32", shape)
    with pytest.raises(UserError, match="no layer of this model has a state") as caught:
        check_states("bfloat16", shape)
    assert caught.value.param == "kv.state_dtype"
    check_states("bfloat16", read_model_shape(hybrid()))


def test_the_readme_lists_what_is_served() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"Any Hugging Face directory of {served()} with " in " ".join(readme.split())
