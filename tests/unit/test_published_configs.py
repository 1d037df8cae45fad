"""config.json as published: fields that are absent, older names, and what no tiny model has."""

import json
from pathlib import Path
from typing import Any

import pytest

from worker.config.checkpoint.shape import ModelShape, read_model_shape

FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA_2 = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0,
    "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 128, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 4608, "intermediate_size": 36864,
    "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 32,
    "num_hidden_layers": 46, "num_key_value_heads": 16, "pad_token_id": 0,
    "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "sliding_window": 4096, "torch_dtype": "bfloat16", "vocab_size": 256000,
}  # fmt: skip
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
    "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144,
    "mm_tokens_per_image": 256, "model_type": "gemma3", "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}  # fmt: skip
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False,
    "attn_logit_softcapping": None, "eos_token_id": [1, 106], "final_logit_softcapping": None,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
    "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
    "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "vocab_size": 262144,
}  # fmt: skip
EXAONE_32B = {
    "architectures": ["Exaone4ForCausalLM"], "eos_token_id": 361, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27392,
    "max_position_embeddings": 131072, "num_attention_heads": 40, "num_hidden_layers": 64,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 102400,
}  # fmt: skip
EXAONE_1B = EXAONE_32B | {
    "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 64, "num_hidden_layers": 30,
    "layer_types": [FULL] * 30, "sliding_window": None, "sliding_window_pattern": None,
    "tie_word_embeddings": True,
}  # fmt: skip
OLMO_3 = {
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 8, "max_position_embeddings": 65536,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06, "rope_theta": 500000, "sliding_window": 4096,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 100278,
}  # fmt: skip
COMMAND_R_PLUS = {
    "architectures": ["CohereForCausalLM"], "attention_bias": False, "bos_token_id": 5,
    "eos_token_id": 255001, "hidden_act": "silu", "hidden_size": 12288, "intermediate_size": 33792,
    "layer_norm_eps": 1e-05, "logit_scale": 0.8333333333333334, "max_position_embeddings": 8192,
    "model_max_length": 131072, "model_type": "cohere", "num_attention_heads": 96,
    "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 75000000.0,
    "torch_dtype": "float16", "use_qk_norm": True, "vocab_size": 256000,
}  # fmt: skip
COMMAND_R7B = {
    "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "eos_token_id": 255001,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25,
    "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "position_embedding_type": "rope_gptj", "rope_scaling": None,
    "rope_theta": 50000, "sliding_window": 4096, "sliding_window_pattern": 4,
    "torch_dtype": "bfloat16", "vocab_size": 256000,
}  # fmt: skip


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def made(config: dict[str, Any]) -> ModelShape:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_model_shape(tmp_path)

    return made


def test_gemma_2(read: Any) -> None:
    shape = read(GEMMA_2)
    assert [mask.window for mask in shape.masks[:4]] == [4096, None, 4096, None]
    assert shape.scales.attention == 144**-0.5
    assert (shape.scales.attention_cap, shape.scales.logits_cap) == (50.0, 30.0)
    assert shape.tie_word_embeddings
    assert not shape.span


def test_gemma_3_names_little_of_what_it_is(read: Any) -> None:
    shape = read(GEMMA_3_4B)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (8, 4, 256)
    assert (shape.vocab_size, shape.max_position_embeddings) == (262208, 131072)
    assert [mask.window for mask in shape.masks[4:8]] == [1024, None, 1024, 1024]
    assert (shape.rope(0).theta, shape.rope(0).scaling) == (10000.0, None)
    assert (shape.rope(5).theta, shape.rope(5).scaling.factor) == (1e6, 8.0)
    assert shape.eos_token_ids == (1, 106)
    assert shape.tie_word_embeddings
    assert shape.dtype == "bfloat16"
    small = read(GEMMA_3_1B)
    assert [mask.window for mask in small.masks[4:7]] == [512, None, 512]
    assert (small.rope(0).theta, small.rope(5).theta) == (10000.0, 1e6)
    assert not small.scales.attention_cap


def test_exaone_4(read: Any) -> None:
    shape = read(EXAONE_32B)
    assert [mask.window for mask in shape.masks[:5]] == [4096, 4096, 4096, None, 4096]
    assert [shape.rope(i) is None for i in range(5)] == [False, False, False, True, False]
    assert shape.rope(0).scaling.rope_type == "llama3"
    small = read(EXAONE_1B)
    assert not small.masks
    assert all(small.rope(i) is not None for i in range(30))


def test_olmo_3(read: Any) -> None:
    shape = read(OLMO_3)
    assert (shape.rope(0).scaling, shape.rope(3).scaling.rope_type) == (None, "yarn")
    assert shape.rope(3).scaling.original_max_position_embeddings == 8192
    assert shape.masks[3].window is None


def test_command_r(read: Any) -> None:
    shape = read(COMMAND_R_PLUS)
    assert shape.max_position_embeddings == 131072
    assert shape.scales.logits == pytest.approx(1.2)
    assert shape.features.head_norm
    assert shape.tie_word_embeddings
    assert not read(COMMAND_R_PLUS | {"use_qk_norm": False}).features.head_norm
    small = read(COMMAND_R7B)
    assert [mask.window for mask in small.masks[:5]] == [4096, 4096, 4096, None, 4096]
    assert [small.rope(i) is None for i in range(5)] == [False, False, False, True, False]
    assert small.scales.logits == 4.0
