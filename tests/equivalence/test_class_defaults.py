"""What config.json leaves out is what the class of `transformers` says, for every family."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.published import published, write
from worker.config.checkpoint.families import FAMILIES
from worker.config.checkpoint.shape import ModelShape, read_model_shape

# Which no class has a default of that counts.
SIZES = {"hidden_size": 3840, "intermediate_size": 96, "num_hidden_layers": 8}
# What every family reads, of values that are no default of any.
SAID: Mapping[str, Any] = SIZES | {
    "num_attention_heads": 160, "num_key_value_heads": 1, "head_dim": 96, "vocab_size": 999,
    "max_position_embeddings": 777, "rope_theta": 5e4,
}  # fmt: skip
# What some read.
ASKED = (
    *("attention_bias", "mlp_bias", "attention_out_bias", "use_qk_norm", "rms_norm_eps"),
    *("layer_norm_eps", "norm_eps", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("tie_word_embeddings", "logit_scale", "query_pre_attn_scalar", "attn_logit_softcapping"),
    *("final_logit_softcapping", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("attention_multiplier", "num_experts", "num_local_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
    *("shared_expert_intermediate_size", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim", "no_rope_layer_interval"),
    *("original_max_position_embeddings", "partial_rotary_factor", "rope_local_base_freq"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("n_routed_experts", "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"),
    "routed_scaling_factor",
)
# Of latent attention, where head_dim is another name of qk_rope_head_dim for some.
REFUSED = ("attention_bias", "mlp_bias", "head_dim")
NEEDED = {"DeepseekV2ForCausalLM": {"num_experts_per_tok": 3}}  # has no default
OTHER = {
    "mlp_only_layers": [1], "decoder_sparse_step": 2, "partial_rotary_factor": 0.25,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64, "num_experts": 20,
    "num_local_experts": 20, "num_experts_per_tok": 3, "no_rope_layer_interval": 3,
    "linear_num_key_heads": 4, "linear_num_value_heads": 64, "max_window_layers": 2,
    "attn_logit_softcapping": 0.375, "final_logit_softcapping": 0.375,
    "n_routed_experts": 64, "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2,
}  # fmt: skip

EPS = "rms_norm_eps", "layer_norm_eps", "norm_eps"


PLAIN = [  # published ones in 16 bits
    name
    for name, (config, files) in published().items()
    if config["architectures"][0] in FAMILIES and not files and "quantization" not in str(config)
]


def other(field: str, config: Any) -> Any:
    """A value that is not the class's."""
    default = getattr(config, field, None)
    if isinstance(default, bool):
        return not default
    return OTHER.get(field, 0.375 if isinstance(default, float) else 48)


def in_place(architecture: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"text_config": {**values}} if FAMILIES[architecture].nested else {**values}


@cache
def types() -> Mapping[str, str]:
    """`model_type` by architecture."""
    from transformers.models.auto import modeling_auto as auto

    tables = (
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    found = {name: kind for table in tables for kind, name in table.items()}
    several = {"MiMoForCausalLM": "qwen2", "DeepseekV3ForCausalLM": "deepseek_v3"}
    return {name: found[name] for name in FAMILIES if name in found} | several


def config_of(architecture: str, values: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(types()[architecture], **values)


def cases(architecture: str) -> Iterator[dict[str, Any]]:
    """Sizes alone; all that the class has but each field; sizes and each field."""
    needed = SIZES | NEEDED.get(architecture, {})
    default = config_of(architecture, in_place(architecture, needed)).get_text_config()
    said = SAID | {x: other(x, default) for x in ASKED if hasattr(type(default), x)}
    if not FAMILIES[architecture].windows:
        said.pop("use_sliding_window", None)  # those are refused
    if architecture.startswith("Olmo3"):  # 5.24 takes rope_theta for layers without a window alone
        del said["rope_theta"]
    if FAMILIES[architecture].layers.attention == "latent":
        refused = (*REFUSED, *["norm_topk_prob"] * architecture.startswith("DeepseekV2"))
        said = {x: value for x, value in said.items() if x not in refused}
    yield {**needed}
    for field in said.keys() - needed:
        yield {x: value for x, value in said.items() if x != field}
        yield needed | {field: said[field]}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_field_that_is_absent_means_what_its_class_says(
    architecture: str, tmp_path: Path
) -> None:
    """Read from a file as from all fields that `transformers` makes of it."""

    def read(values: Mapping[str, Any]) -> ModelShape:
        text = json.dumps({**values, "architectures": [architecture]}, default=str)
        (tmp_path / "config.json").write_text(text)
        return replace(read_model_shape(tmp_path), eos_token_ids=())  # not of the class: see there

    for case in cases(architecture):
        values = in_place(architecture, case)
        assert read(values) == read(config_of(architecture, values).to_dict()), case


def wanted_windows(text: Any) -> tuple[int, ...]:
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    kinds = kinds or ["sliding_attention"] * text.num_hidden_layers  # one field says so for all
    slides = [kind == "sliding_attention" for kind in kinds]
    return tuple(window * each for each in slides) if window and any(slides) else ()


def check_rope(shape: ModelShape, text: Any) -> None:
    ropes = text.rope_parameters
    whole = ropes.get("full_attention", ropes)
    scaling = shape.rope_scaling
    assert shape.rope_theta == whole["rope_theta"]
    assert (scaling.rope_type if scaling else "default") == whole["rope_type"]
    for field in ("factor", "original_max_position_embeddings", "attention_factor"):
        if scaling and field in whole:
            assert getattr(scaling, field) == whole[field], field
    if "sliding_attention" in ropes:
        assert shape.local_rope is not None
        assert shape.local_rope.theta == ropes["sliding_attention"]["rope_theta"]


@pytest.mark.parametrize("name", PLAIN)
def test_published_shapes_are_those_that_transformers_reads(name: str, tmp_path: Path) -> None:
    shape = read_model_shape(write(name, tmp_path))
    values = json.loads(json.dumps(published()[name][0]))
    del values["model_type"]
    theirs = config_of(shape.architecture, values)
    text = theirs.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    num_kv_heads = text.num_key_value_heads
    if shape.latent is not None:  # what pages keep, and what a query has
        num_kv_heads, head_dim = 1, text.qk_nope_head_dim + text.qk_rope_head_dim
        assert shape.latent.width == text.kv_lora_rank + text.qk_rope_head_dim
    eps = next(getattr(text, x) for x in EPS if hasattr(text, x))
    assert (
        shape.num_layers, shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim,
        shape.vocab_size, shape.rms_norm_eps, shape.tie_word_embeddings, shape.windows,
    ) == (
        text.num_hidden_layers, text.hidden_size, text.num_attention_heads,
        num_kv_heads, head_dim, text.vocab_size, eps, theirs.tie_word_embeddings,
        wanted_windows(text),
    )  # fmt: skip
    check_rope(shape, text)
    if (experts := shape.experts) is not None:
        width = getattr(text, "moe_intermediate_size", 0) or text.intermediate_size
        found = experts.num_experts, experts.top_k, experts.width
        count = getattr(text, "n_routed_experts", 0) or text.num_experts
        assert found == (count, text.num_experts_per_tok, width)
        num_dense = values.get("first_k_dense_replace", 0)
        assert shape.is_sparse == tuple(i >= num_dense for i in range(shape.num_layers))
    else:
        assert shape.intermediate_size == text.intermediate_size


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
LLAMA_3 = YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("scaling", [YARN, LLAMA_3], ids=["yarn", "llama3"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_of_two_original_lengths_that_of_the_file_counts(
    place: str, scaling: dict[str, Any], tmp_path: Path
) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    name = "original_max_position_embeddings"
    for more in ({}, {name: 1000}, {name: 2000}):
        values = SAID | more | {place: {**scaling}}
        text = json.dumps({**values, "architectures": ["LlamaForCausalLM"]})
        (tmp_path / "config.json").write_text(text)
        theirs = LlamaRotaryEmbedding(config_of("LlamaForCausalLM", values)).config
        ours = read_model_shape(tmp_path).rope_scaling
        assert ours is not None
        assert ours.original_max_position_embeddings == theirs.rope_parameters[name]


def test_phi_3_has_an_original_length_whatever_its_rope_says(tmp_path: Path) -> None:
    numbers, name = [1.0] * 48, "original_max_position_embeddings"
    for more in ({}, {name: 1234}):
        scaling = {"type": "longrope", "short_factor": numbers, "long_factor": numbers} | more
        values = SIZES | {"num_attention_heads": 40, "rope_scaling": scaling}
        text = json.dumps({**values, "architectures": ["Phi3ForCausalLM"]})
        (tmp_path / "config.json").write_text(text)
        theirs = config_of("Phi3ForCausalLM", json.loads(json.dumps(values))).rope_parameters
        ours = read_model_shape(tmp_path).rope_scaling
        assert ours is not None
        assert ours.original_max_position_embeddings == theirs[name] == 4096
