"""Configurations of drafters as they are published: what is read, and what a refusal says to do."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.chain_checkpoints import TARGET, write_chain
from tests.support.family_table import MODELS
from worker.config.checkpoint.experts import ExpertShape
from worker.config.checkpoint.shape import read_model_shape
from worker.drafts.drafter_config import READERS, read_chain_shape
from worker.drafts.drafter_shape import ChainShape
from worker.drafts.silent_fields import SILENT, is_silent
from worker.errors import Unsupported

NETS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text", "attention_bias": False, "attention_dropout": 0.0,
    "attn_output_gate": True, "dtype": "bfloat16", "eos_token_id": 7, "full_attention_interval": 4,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 256, "initializer_range": 0.02,
    "intermediate_size": 384, "layer_types": NETS, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_value_head_dim": 32, "mamba_ssm_dtype": "float32", "max_position_embeddings": 2048,
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 4,
    "num_hidden_layers": 4, "num_key_value_heads": 2, "output_gate_type": "swish",
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "use_cache": True, "vocab_size": 500,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.25,
        "rope_theta": 1e7, "rope_type": "default",
    },
}  # fmt: skip
SEES = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
    "image_token_id": 490, "text_config": TEXT, "tie_word_embeddings": False,
    "transformers_version": "5.2.0", "video_token_id": 491, "vision_config": {"depth": 1},
    "vision_end_token_id": 492, "vision_start_token_id": 493,
}  # fmt: skip
EXPERTS = {
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
SPARSE_TEXT = {k: v for k, v in TEXT.items() if k != "intermediate_size"} | EXPERTS
SPARSE = SEES | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "text_config": SPARSE_TEXT | {"model_type": "qwen3_5_moe_text"},
}  # fmt: skip
_NOT_NEXT = "layer_types", "rope_parameters", "attn_output_gate", "output_gate_type"
NEXT = {k: v for k, v in TEXT.items() if k not in _NOT_NEXT and not k.startswith("mtp_")} | {
    **EXPERTS, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "rope_scaling": None,
    "rope_theta": 1e7, "tie_word_embeddings": False,
}  # fmt: skip
MIMO = {
    "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True,
    "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
    "bos_token_id": 1, "head_dim": 64, "hidden_act": "silu", "hidden_size": 256,
    "initializer_range": 0.02, "intermediate_size": 384, "max_position_embeddings": 2048,
    "max_window_layers": 4, "num_attention_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5,
    "rope_theta": 640000, "sliding_window": 2048, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
    "vocab_size": 500,
}  # fmt: skip
FP8 = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
    "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "mtp.fc"],
}  # fmt: skip
SHAPE = ExpertShape(16, 4, 128, renormalizes=True, shared_width=128)
PUBLISHED: dict[str, tuple[dict[str, Any], ExpertShape | None]] = {
    "qwen3.5": (SEES, None),
    "qwen3.5, by unsloth": (SEES | {"unsloth_version": "2026.3.1", "unsloth_fixed": True}, None),
    "qwen3.5 moe": (SPARSE, SHAPE),
    "qwen3.5 moe, text alone": (
        SPARSE_TEXT | {"architectures": ["Qwen3_5MoeForCausalLM"], "tie_word_embeddings": True},
        SHAPE,
    ),
    "qwen3.5 moe, fp8": (SPARSE | {"quantization_config": FP8}, SHAPE),
    "qwen3.5, fp8 in the inner object": (
        SEES | {"text_config": TEXT | {"quantization_config": FP8}}, None
    ),
    "qwen3-next": (NEXT, SHAPE),
    "qwen3-next, fp8": (NEXT | {"quantization_config": FP8}, SHAPE),
    "mimo": (MIMO, None),
}  # fmt: skip


def read(path: Path, config: dict[str, Any], drafter: str = "mtp") -> ChainShape:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    shape = READERS[drafter](path, read_model_shape(path))
    assert isinstance(shape, ChainShape)
    return shape


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_layer_that_drafts_is_read_as_published(name: str, tmp_path: Path) -> None:
    config, experts = PUBLISHED[name]
    shape = read(tmp_path, config)
    assert (shape.form, shape.experts, shape.taps) == ("mtp", experts, (4,))
    assert [layer.is_sparse for layer in shape.layers] == [experts is not None]
    assert (shape.quantization is not None) == ("fp8" in name)
    assert (shape.features.experts is not None) == (experts is not None)
    if name != "mimo":
        assert (shape.rotary_dim, shape.rope_theta, shape.centred) == (16, 1e7, True)


def test_its_tensors_say_whether_it_has_experts_where_some_layers_have_none(tmp_path: Path) -> None:
    mixed = NEXT | {"mlp_only_layers": [1]}
    assert read(tmp_path, mixed).experts is None
    one = np.zeros(1, "float32")
    save_file({"mtp.layers.0.mlp.gate.weight": one}, tmp_path / "model.safetensors")
    assert read(tmp_path, mixed).experts == SHAPE
    save_file({"mtp.layers.0.mlp.up_proj.weight": one}, tmp_path / "model.safetensors")
    assert read(tmp_path, NEXT).experts is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MIMO | {"architectures": ["Qwen2ForCausalLM"]},
         "architectures: 'Qwen2ForCausalLM' has no layer that drafts.*known: MiMo.*Qwen3_5Moe"),
        (SEES | {"text_config": TEXT | {"mtp_num_hidden_layers": 0}},
         r"text_config\.mtp_num_hidden_layers: 0: no layer drafts; .*take the original's files"),
        (SEES | {"text_config": TEXT | {"mtp_num_hidden_layers": 2}},
         r"text_config\.mtp_num_hidden_layers: 2; supported: 1"),
        (SEES | {"text_config": TEXT | {"mtp_use_dedicated_embeddings": True}},
         "mtp_use_dedicated_embeddings: True; supported: False"),
        (NEXT | {"sparkle": 3}, "sparkle: an unknown field.* take it out of the file"),
        (MIMO | {"use_mrope": True}, "use_mrope: True; supported: False"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_to_do_and_never_to_take_mtp(config, message, tmp_path) -> None:
    with pytest.raises(Unsupported, match=message) as refused:
        read(tmp_path, config)
    assert "mtp," not in str(refused.value).split("config.json: ")[-1].split("known: ")[-1]
    assert not any(f"drafter{link}mtp" in str(refused.value) for link in (": ", " to ", " "))


def test_files_without_such_a_layer_are_told_apart_before_the_start(tmp_path: Path) -> None:
    """As transformers saves them, and many that quantise: config.json says that there is one."""
    read(tmp_path, NEXT)
    one = np.zeros(1, "float32")
    save_file({"model.norm.weight": one}, tmp_path / "model.safetensors")
    with pytest.raises(Unsupported, match=r"no tensor is named mtp\.layers\.0\.\*.*original's"):
        read(tmp_path, NEXT)


def test_a_drafter_of_another_form_is_refused_with_what_the_target_has(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(SPARSE))
    target = read_model_shape(tmp_path / "own")
    for name, part in (
        ("Qwen3MoeForCausalLMEagle3", "experts outside"),
        ("Qwen3_5EagleForCausalLM", "gated attention outside"),
        ("Eagle3DeepseekV2ForCausalLM", r"latent attention \(MLA\)"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        with pytest.raises(Unsupported, match=f"{part}.*to mtp, the target's own layer"):
            READERS["chain"](tmp_path, target)
        with pytest.raises(Unsupported, match=f"{part}.*ngram, which needs no weights$"):
            READERS["chain"](tmp_path, TARGET)


def test_gpt_oss_s_are_read_as_others_for_their_targets(tmp_path: Path) -> None:
    """SpecForge's configs/gpt-oss-120B-eagle3.json."""
    target = shape_file("gpt-oss-120b", tmp_path / "target")
    drafter = shape_file("gpt-oss-120b-eagle3", tmp_path / "drafter")
    shape = READERS["chain"](drafter, read_model_shape(target))
    assert isinstance(shape, ChainShape)
    assert (shape.taps, shape.num_heads, shape.head_dim) == ((1, 17, 33), 64, 64)
    assert (shape.features.sinks, shape.experts, shape.rope_scaling) == (False, None, None)
    (drafter / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLMEagle3"]}))
    with pytest.raises(Unsupported, match=r"gpt-oss's own layers.*ngram, which needs no weights"):
        READERS["chain"](drafter, read_model_shape(target))


def shape_file(name: str, path: Path) -> Path:
    """A directory with the configuration of that name in benchmarks/models."""
    path.mkdir()
    shutil.copy(MODELS / f"{name}.json", path / "config.json")
    return path


# Fields that published drafters carry, by who writes them.
CARRIED: dict[str, dict[str, Any]] = {
    "SpecForge": {
        "additional_fc": False, "max_window_layers": 48, "pretraining_tp": 1,
        "reuse_target_lm_head": True, "sliding_window": 512, "target_model_type": "gemma3_text",
        "use_sliding_window": False,
    },
    "SpecForge, of Phi": {"model_type": "phi3"},
    "ModelOpt": {
        "eagle_config": {"parallel_draft_heads_num_layers": 1, "parallel_draft_step": 1},
    },
    "transformers 4": {
        "add_cross_attention": False, "chunk_size_feed_forward": 0, "diversity_penalty": 0.0,
        "do_sample": False, "early_stopping": False, "encoder_no_repeat_ngram_size": 0,
        "id2label": {"0": "LABEL_0"}, "is_decoder": False, "is_encoder_decoder": False,
        "label2id": {"LABEL_0": 0}, "length_penalty": 1.0, "max_length": 20, "min_length": 0,
        "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1,
        "num_return_sequences": 1, "output_attentions": False, "output_hidden_states": False,
        "output_scores": False, "pruned_heads": {}, "remove_invalid_values": False,
        "repetition_penalty": 1.0, "return_dict": True, "return_dict_in_generate": False,
        "temperature": 1.0, "tf_legacy_loss": False, "tie_encoder_decoder": False, "top_k": 50,
        "top_p": 1.0, "torchscript": False, "typical_p": 1.0, "use_bfloat16": False,
        "_commit_hash": "1", "_attn_implementation": "sdpa", "tokenizer_class": "LlamaTokenizer",
    },
    "tuners": {
        "unsloth_version": "1", "unsloth_fixed": True, "hidden_dropout": 0.0, "resid_pdrop": 0.1,
        "initializer_factor": 1.0, "model_max_length": 4096, "gradient_checkpointing": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("writer", CARRIED)
def test_fields_from_which_no_layer_follows_change_nothing(writer: str, tmp_path: Path) -> None:
    write_chain(tmp_path / "plain", "specforge", TARGET)
    write_chain(tmp_path / "more", "specforge", TARGET, **CARRIED[writer])
    plain, more = (read_chain_shape(tmp_path / name, TARGET) for name in ("plain", "more"))
    assert more == plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"additional_fc": True}, "additional_fc: True"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads: "),
        ({"is_encoder_decoder": True}, "is_encoder_decoder: True"),
        ({"moe_intermediate_size": 32}, "asks for experts"),
    ],
)
def test_what_they_may_not_say_is_refused(fields, message, tmp_path: Path) -> None:
    write_chain(tmp_path, "specforge", TARGET, **fields)
    with pytest.raises(Unsupported, match=message):
        read_chain_shape(tmp_path, TARGET)


def test_what_says_something_of_a_layer_is_not_silent() -> None:
    speak = "hidden_size", "mask_token_id", "d_model", "logit_scale", "norm_eps", "eagle_config"
    assert not any(map(is_silent, (*speak, "num_experts", "rope_theta", "mtp_num_hidden_layers")))
    assert all(reason and not reason.endswith(".") for reason in SILENT)
