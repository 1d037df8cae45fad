"""What is refused of DFlash drafters' configurations, each by its name."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.chain_checkpoints import ABSENT, check_refused
from tests.support.dflash_checkpoints import TARGET, write_dflash
from worker.drafts.dflash_config import read_dflash_shape

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = [FULL, SLIDING]

# (form, fields set, message); `layer` goes where the transformer's fields stand, `dflash`
# into dflash_config.

SLIDES = {"layer_types": KINDS, "sliding_window": 3}
IDS = "aux_hidden_state_layer_ids"
REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    # Other kinds of drafters.
    ("zlab", {"architectures": ["LlamaForCausalLMEagle3"]}, "architectures: .*drafter to chain"),
    ("zlab", {"architectures": ["MiMoForCausalLM"]}, "architectures: .*drafter to chain"),
    ("zlab", {"architectures": ["DFlash2DraftModel"]}, "architectures: .*selector.*DFlash 2"),
    ("zlab", {"architectures": ["DominoDraftModel"]}, "architectures: .*GRU"),
    ("zlab", {"architectures": ["DSparkDraftModel"]}, "architectures: .*Markov"),
    ("zlab", {"architectures": ["PEagleDraftModel"]}, "architectures: .*P-EAGLE"),
    ("zlab", {"architectures": ["LlamaForCausalLM"]}, "architectures: .*supported: DFlashDraft"),
    ("zlab", {"architectures": None}, "architectures: must be a list of one name"),
    ("zlab", {"model_type": "llama"}, "model_type: 'llama'; supported: qwen3"),
    ("speculators", {"speculators_model_type": "eagle3"}, "model_type: .*drafter to chain"),
    ("speculators", {"speculators_model_type": "dspark"}, "model_type: .*Markov"),
    ("speculators", {"speculators_model_type": "peagle"}, "model_type: .*P-EAGLE"),
    ("speculators", {"speculators_model_type": ["x"]}, "model_type: .*supported: dflash"),
    ("speculators", {"speculators_config": {"algorithm": "dspark"}}, r"_config\.algorithm"),
    ("speculators", {"layer": {"model_type": "gpt_oss"}}, r"layer_config\.model_type: 'gpt_oss'"),
    # What relatives have.
    ("zlab", {"dflash": {"projector_type": "domino"}}, r"dflash_config\.projector_type: .*proj"),
    ("zlab", {"projector_type": "dflash2"}, "projector_type: 'dflash2' asks for a projector"),
    ("zlab", {"dflash": {"selector_rank": 64}}, r"dflash_config\.selector_rank: 64 .*selector"),
    ("zlab", {"dflash": {"conv_kernel_size": 2}}, r"dflash_config\.conv_kernel_size: .*convol"),
    ("zlab", {"dflash": {"gru_hidden_dim": 8}}, r"dflash_config\.gru_hidden_dim: .*GRU"),
    ("zlab", {"dflash": {"markov_rank": 8}}, r"dflash_config\.markov_rank: .*Markov"),
    ("zlab", {"dflash": {"enable_confidence_head": True}}, "confidence_head: .*confidence head"),
    ("zlab", {"dflash": {"confidence_head_alpha": 1.0}}, "head_alpha: .*confidence head"),
    ("zlab", {"dflash": {"attention_sink_bias": True}}, r"dflash_config\.attention_sink_bias: T"),
    ("zlab", {"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias: True"),
    ("zlab", {"attention_value_scale": 0.7}, "attention_value_scale: 0.7; supported: 1.0"),
    ("zlab", {"mask_hidden": True}, "mask_hidden: .*P-EAGLE"),
    ("zlab", {"sample_from_anchor": True}, "sample_from_anchor: True; supported: False"),
    ("zlab", {"dflash": {"use_aux_hidden_state": False}}, r"_config\.use_aux_hidden_state: False"),
    ("speculators", {"sample_from_anchor": True}, "sample_from_anchor: True; supported: False"),
    ("speculators", {"markov_rank": 8}, "markov_rank: 8 asks for a Markov head"),
    ("zlab", {"quantization_config": {"bits": 4}}, "quantization_config: quantized"),
    ("speculators", {"layer": {"quantization_config": {"x": 1}}}, r"layer_config\.quantization"),
    ("speculators", {"quantization_config": {"x": 1}}, "quantization_config: an unknown field"),
    # What nobody knows.
    ("zlab", {"sparkle": 3}, "sparkle: an unknown field, of value 3"),
    ("zlab", {"dflash": {"sparkle": 3}}, r"dflash_config\.sparkle: an unknown field"),
    ("zlab", {"eagle_config": {}}, "eagle_config: an unknown field"),
    ("speculators", {"sparkle": 3}, "sparkle: an unknown field"),
    ("speculators", {"layer": {"sparkle": 3}}, r"transformer_layer_config\.sparkle: an unknown"),
    ("speculators", {"layer": {"is_causal": False}}, r"layer_config\.is_causal: an unknown"),
    ("speculators", {"dflash_config": {}}, "dflash_config: an unknown field"),
    ("zlab", {"layer": {"rope_scaling": {"mrope_section": [1]}}}, r"rope_scaling\.mrope_section"),
    ("zlab", {"layer": {"rope_scaling": {"rope_type": "yarn"}}}, "rope type 'yarn'"),
    ("zlab", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
    ("zlab", {"qk_norm": False}, "qk_norm: False; supported: True"),
    ("zlab", {"logit_scale": 0.5}, "logit_scale: 0.5"),
    # Two readings.
    ("zlab", {"rope_theta": ABSENT}, "rope_theta: missing: vLLM .* set it"),
    ("speculators", {"layer": {"rope_theta": ABSENT}}, r"layer_config\.rope_theta: missing: vLLM"),
    ("zlab", {"head_dim": ABSENT}, "head_dim: missing: .*128 .* set it"),
    ("zlab", {"tie_word_embeddings": True}, "tie_word_embeddings: a head that is"),
    ("zlab", {"dflash": {"use_swa": True}, **SLIDES}, r"dflash_config\.use_swa: .*Leave it out"),
    ("zlab", {"use_sliding_window": True}, "use_sliding_window: in which layers.*layer_types"),
    ("zlab", {"sliding_window": 7}, "sliding_window: in which layers.*layer_types"),
    ("zlab", {"dflash": {"swa_window_size": 7}}, "swa_window_size: in which layers"),
    (
        "speculators",
        {"layer": SLIDES, "sliding_window_non_causal": ABSENT},
        "sliding_window_non_causal: missing: speculators .* false",
    ),
    ("zlab", {"dflash": {"target_layer_ids": [1, 9]}}, r"_ids: the output of the last layer \(9"),
    ("speculators", {IDS: [1, 10]}, rf"{IDS}: the output of the last layer \(9"),
    # What contradicts itself.
    ("zlab", {"is_causal": True, "dflash": {"causal": False}}, "is_causal: True, but dflash_c"),
    ("zlab", {"dflash": {"block_size": 8}}, r"block_size: 4, but dflash_config\.block_size 8"),
    ("zlab", {"mask_token_id": 3}, r"mask_token_id: 3, but dflash_config\.mask_token_id 96"),
    ("zlab", {"use_sliding_window": False, **SLIDES}, "use_sliding_window: false, but"),
    ("zlab", {"layer_types": KINDS}, "sliding_window: missing"),
    ("zlab", {"dflash": {"swa_window_size": 5}, **SLIDES}, "sliding_window: 3, but dflash_c"),
    ("zlab", {"layer_types": [FULL]}, "layer_types: must be a list of 2"),
    ("zlab", {"layer_types": 3}, "layer_types: must be a list of 2"),
    ("zlab", {"layer_types": [FULL, "linear_attention"]}, "layer_types: .*'linear_attention'"),
    (
        "speculators",
        {"num_hidden_layers": 3},
        "_config.num_hidden_layers: 2, but num_hidden_layers 3",
    ),
    # What is wrong or missing.
    ("zlab", {"block_size": ABSENT}, "block_size: missing"),
    ("zlab", {"block_size": 1}, "block_size: must be an integer of at least 2, not 1"),
    ("zlab", {"dflash_config": {}}, "mask_token_id: missing"),
    ("zlab", {"dflash_config": {"mask_token": "<|M|>"}}, r"mask_token: .*without mask_token_id"),
    ("zlab", {"dflash_config": 3}, "dflash_config: must be an object"),
    ("zlab", {"dflash": {"mask_token_id": 97}}, r"dflash_config\.mask_token_id: 97 is outside"),
    ("zlab", {"dflash": {"mask_token_id": -1}}, "mask_token_id: must be an integer of at least 0"),
    ("speculators", {"mask_token_id": 97}, "mask_token_id: 97 is outside .* 97 ids"),
    ("zlab", {"dflash": {"causal": "no"}}, r"dflash_config\.causal: must be true or false"),
    ("zlab", {"is_causal": 1}, "is_causal: must be true or false"),
    ("zlab", {"dflash": {"target_layer_ids": [1, "x"]}}, "target_layer_ids: must be a list of int"),
    ("zlab", {"dflash": {"target_layer_ids": [4, 1]}}, "target_layer_ids: must be ascending"),
    ("zlab", {"dflash": {"target_layer_ids": [1, 10]}}, r"ids: outputs of the layers \[1, 10"),
    ("speculators", {IDS: [0, 5]}, rf"{IDS}: outputs of the layers \[-1, 4\]; .* 0 to 9"),
    ("speculators", {IDS: None}, f"{IDS}: missing"),
    # Another target's.
    ("zlab", {"num_target_layers": 12}, "num_target_layers: 12, but the target's is 10"),
    ("zlab", {"num_target_layers": ABSENT, "dflash": {"num_target_layers": 9}}, "layers: 9, but"),
    ("zlab", {"vocab_size": 96}, "vocab_size: 96, but the target's is 97"),
    ("zlab", {"hidden_size": 48}, "hidden_size: 48, but the target's is 32"),
    ("zlab", {"target_hidden_size": 48}, "target_hidden_size: 48, but the target's is 32"),
    ("zlab", {"draft_vocab_size": 98}, "draft_vocab_size: 98 exceeds .* 97"),
    ("speculators", {"layer": {"vocab_size": 96}}, r"layer_config\.vocab_size: 96.* 97"),
    ("speculators", {"layer": {"hidden_size": 48}}, r"layer_config\.hidden_size: 48.* 32"),
]


@pytest.mark.parametrize(("form", "fields", "message"), REFUSALS)
def test_what_is_unknown_ambiguous_or_another_target_s_is_refused_by_name(
    form, fields, message, tmp_path: Path
) -> None:
    write_dflash(tmp_path, form=form)
    check_refused(tmp_path, lambda path: read_dflash_shape(path, TARGET), fields, message)
