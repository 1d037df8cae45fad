"""What is refused of published drafters' configurations, each field by its name."""

from typing import Any

import pytest

from tests.support import chain_checkpoints, dflash_checkpoints
from tests.support.chain_checkpoints import ABSENT, check_refused, write_chain
from tests.support.dflash_checkpoints import write_dflash
from worker.drafts.drafter_config import read_chain_shape, read_dflash_shape

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = [FULL, SLIDING]
SLIDES = {"layer_types": KINDS, "sliding_window": 3}
IDS, AUX = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
# (fields set, message) by form; `layer` goes where the transformer's fields stand, `dflash` into
# dflash_config.
REFUSALS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "specforge": [
        ({"architectures": ["PEagleDraftModel"]}, "architectures: .*in parallel"),
        ({"architectures": ["DFlashDraftModel"]}, "architectures: .*by blocks"),
        ({"architectures": ["Qwen3NextEagle"]}, "architectures: .*gated attention"),
        ({"architectures": ["DeepseekV2ForCausalLM"]}, "architectures: .*MLA.*experts"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures: .*LlamaForCausalLMEagle"),
        ({"architectures": None}, "architectures: must be a list of one name"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: 2; supported: 1"),
        ({"num_hidden_layers": ABSENT}, "num_hidden_layers: missing"),
        ({"model_type": "qwen3"}, "model_type: 'qwen3'; supported: llama"),
        ({"sparkle": 3}, "sparkle: an unknown field, of value 3"),
        ({"eagle_config": {"sparkle": 3}}, r"eagle_config\.sparkle: an unknown field"),
        ({"eagle_config": {"parallel_draft_step": 2}}, "parallel_draft_step: 2"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm: False"),
        ({"eagle_config": 3}, "eagle_config: must be an object"),
        ({"eagle_config": {IDS: [1, "x"]}}, f"{IDS}: must be a list of integers"),
        ({"eagle_config": {IDS: [1, 4, 10]}}, f"eagle_config.{IDS}: outputs of the"),
        ({"eagle_config": {IDS: [2, 5, 7]}, IDS: [2, 5, 7]}, f"{IDS}: .*not the same"),
        ({"eagle_config": {"use_aux_hidden_state": False, IDS: [1]}},
         f"{IDS}: .*use_aux_hidden_state is false"),
        ({"eagle_config": {"use_aux_hidden_state": False}, "norm_before_fc": True},
         "norm_before_fc: .*use_aux_hidden_state is false"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states: must be 3"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm: excludes norm_before_fc"),
        ({"norm_before_residual": "yes"}, "norm_before_residual: must be true or false"),
        ({"bias": True}, "bias: True; supported: False"),
        ({"parallel_drafting": True}, "parallel_drafting: True"),
        ({"is_causal": False}, "is_causal: False"),
        ({"logit_scale": 0.5}, "logit_scale: 0.5"),
        ({"sliding_window": 64}, "sliding_window: sliding-window attention"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantized"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"mrope_section": [1]}}, r"rope_scaling\.mrope_section"),
        ({"rope_parameters": {"rope_theta": 9.0}},
         r"rope_theta: 5000.0, but rope_parameters\.rope_theta 9.0"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings: a head that is"),
        ({"vocab_size": 96}, "vocab_size: 96, but the target's is 97"),
        ({"draft_vocab_size": 98}, "draft_vocab_size: 98 exceeds .* 97"),
        ({"layer": {"hidden_size": 24}}, "hidden_size: 24, but the target's is 32"),
        ({"target_hidden_size": 48}, "target_hidden_size: 48, but the target's is 32"),
        ({"layer": {"hidden_size": 24}, "target_hidden_size": 32,
          "eagle_config": {"use_aux_hidden_state": False}},
         "hidden_size: 24, but the target's is 32.*nothing projects"),
    ],
    "speculators": [
        ({"speculators_model_type": "dflash"}, "speculators_model_type: 'dflash'"),
        ({"speculators_config": {"algorithm": "mtp"}}, r"speculators_config\.algorithm"),
        ({"norm_before_residual": ABSENT}, "norm_before_residual: .*vLLM .*true"),
        ({"eagle_config": {}}, "eagle_config: an unknown field"),
        ({"layer": {"model_type": "gpt_oss"}}, r"layer_config\.model_type: 'gpt_oss'"),
        ({"layer": {"num_hidden_layers": 2}}, r"layer_config\.num_hidden_layers: 2"),
        ({"layer": {"swiglu": 1}}, r"transformer_layer_config\.swiglu: an unknown"),
        ({IDS: [0, 5, 7]}, f"{IDS}: outputs of the layers .-1, 4, 6.; .* 0 to 9"),
        ({IDS: [2, 5, 10]}, f"{IDS}: the output of the last layer .* final norm"),
        ({IDS: [5, 2, 7]}, f"{IDS}: must be ascending, each layer once"),
        ({IDS: [2, 5, 5]}, f"{IDS}: must be ascending, each layer once"),
        ({"layer": {"vocab_size": 96}}, r"layer_config\.vocab_size: 96.* 97"),
        ({"layer": {"hidden_size": 24}}, r"layer_config\.hidden_size: 24.* 32"),
    ],
    "eagle": [
        ({"layer": {"hidden_size": 24}}, "hidden_size: 24, but the target's is 32"),
        ({"fc_norm": True}, "fc_norm: an unknown field"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: 2; supported: 1"),
    ],
    "mimo": [
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: 2; supported: 1"),
        ({"vocab_size": 96}, "vocab_size: 96, but the target's is 97"),
        ({"num_hidden_layers": 11}, "num_hidden_layers: 11; supported: 10"),
        ({"n_routed_experts": 8}, "n_routed_experts: an unknown field"),
    ],
    "dflash zlab": [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "architectures: .*drafter to chain"),
        ({"architectures": ["MiMoForCausalLM"]}, "architectures: .*drafter to chain"),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures: .*selector.*DFlash 2"),
        ({"architectures": ["DominoDraftModel"]}, "architectures: .*GRU"),
        ({"architectures": ["DSparkDraftModel"]}, "architectures: .*Markov"),
        ({"architectures": ["PEagleDraftModel"]}, "architectures: .*P-EAGLE"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures: .*supported: DFlashDraft"),
        ({"model_type": "llama"}, "model_type: 'llama'; supported: qwen3"),
        ({"dflash": {"projector_type": "domino"}}, r"dflash_config\.projector_type: .*proj"),
        ({"projector_type": "dflash2"}, "projector_type: 'dflash2' asks for a projector"),
        ({"dflash": {"selector_rank": 64}}, r"dflash_config\.selector_rank: 64 .*selector"),
        ({"dflash": {"conv_kernel_size": 2}}, r"dflash_config\.conv_kernel_size: .*convol"),
        ({"dflash": {"gru_hidden_dim": 8}}, r"dflash_config\.gru_hidden_dim: .*GRU"),
        ({"dflash": {"markov_rank": 8}}, r"dflash_config\.markov_rank: .*Markov"),
        ({"dflash": {"enable_confidence_head": True}}, "confidence_head: .*confidence head"),
        ({"dflash": {"confidence_head_alpha": 1.0}}, "head_alpha: .*confidence head"),
        ({"dflash": {"attention_sink_bias": True}}, r"dflash_config\.attention_sink_bias: T"),
        ({"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias: True"),
        ({"attention_value_scale": 0.7}, "attention_value_scale: 0.7; supported: 1.0"),
        ({"mask_hidden": True}, "mask_hidden: .*P-EAGLE"),
        ({"sample_from_anchor": True}, "sample_from_anchor: True; supported: False"),
        ({"dflash": {"use_aux_hidden_state": False}}, r"_config\.use_aux_hidden_state: False"),
        ({"dflash": {"sparkle": 3}}, r"dflash_config\.sparkle: an unknown field"),
        ({"qk_norm": False}, "qk_norm: False; supported: True"),
        ({"rope_theta": ABSENT}, "rope_theta: missing: vLLM .* set it"),
        ({"head_dim": ABSENT}, "head_dim: missing: .*128 .* set it"),
        ({"dflash": {"use_swa": True}, **SLIDES}, r"dflash_config\.use_swa: .*Leave it out"),
        ({"use_sliding_window": True}, "use_sliding_window: in which layers.*layer_types"),
        ({"sliding_window": 7}, "sliding_window: in which layers.*layer_types"),
        ({"dflash": {"swa_window_size": 7}}, "swa_window_size: in which layers"),
        ({"dflash": {"target_layer_ids": [1, 9]}}, r"_ids: the output of the last layer \(9"),
        ({"is_causal": True, "dflash": {"causal": False}}, "is_causal: True, but dflash_c"),
        ({"dflash": {"block_size": 8}}, r"block_size: 4, but dflash_config\.block_size 8"),
        ({"mask_token_id": 3}, r"mask_token_id: 3, but dflash_config\.mask_token_id 96"),
        ({"use_sliding_window": False, **SLIDES}, "use_sliding_window: false, but"),
        ({"layer_types": KINDS}, "sliding_window: missing"),
        ({"dflash": {"swa_window_size": 5}, **SLIDES}, "sliding_window: 3, but dflash_c"),
        ({"layer_types": [FULL]}, "layer_types: must be a list of 2"),
        ({"layer_types": 3}, "layer_types: must be a list of 2"),
        ({"layer_types": [FULL, "linear_attention"]}, "layer_types: .*'linear_attention'"),
        ({"block_size": ABSENT}, "block_size: missing"),
        ({"block_size": 1}, "block_size: must be an integer of at least 2, not 1"),
        ({"dflash_config": {}}, "mask_token_id: missing"),
        ({"dflash_config": {"mask_token": "<|M|>"}}, r"mask_token: .*without mask_token_id"),
        ({"dflash": {"mask_token_id": 97}}, r"dflash_config\.mask_token_id: 97 is outside"),
        ({"dflash": {"causal": "no"}}, r"dflash_config\.causal: must be true or false"),
        ({"dflash": {"target_layer_ids": [1, 10]}}, r"ids: outputs of the layers \[1, 10"),
        ({"num_target_layers": 12}, "num_target_layers: 12, but the target's is 10"),
        ({"num_target_layers": ABSENT, "dflash": {"num_target_layers": 9}}, "layers: 9, but"),
        ({"hidden_size": 48}, "hidden_size: 48, but the target's is 32"),
    ],
    "dflash speculators": [
        ({"speculators_model_type": "eagle3"}, "model_type: .*drafter to chain"),
        ({"speculators_model_type": "dspark"}, "model_type: .*Markov"),
        ({"speculators_model_type": "peagle"}, "model_type: .*P-EAGLE"),
        ({"speculators_model_type": ["x"]}, "model_type: .*supported: dflash"),
        ({"speculators_config": {"algorithm": "dspark"}}, r"_config\.algorithm"),
        ({"layer": {"model_type": "gpt_oss"}}, r"layer_config\.model_type: 'gpt_oss'"),
        ({"sample_from_anchor": True}, "sample_from_anchor: True; supported: False"),
        ({"markov_rank": 8}, "markov_rank: 8 asks for a Markov head"),
        ({"layer": {"quantization_config": {"x": 1}}}, r"layer_config\.quantization"),
        ({"quantization_config": {"x": 1}}, "quantization_config: an unknown field"),
        ({"sparkle": 3}, "sparkle: an unknown field"),
        ({"layer": {"sparkle": 3}}, r"transformer_layer_config\.sparkle: an unknown"),
        ({"layer": {"is_causal": False}}, r"layer_config\.is_causal: an unknown"),
        ({"dflash_config": {}}, "dflash_config: an unknown field"),
        ({"layer": {"rope_theta": ABSENT}}, r"layer_config\.rope_theta: missing: vLLM"),
        ({"layer": SLIDES, "sliding_window_non_causal": ABSENT},
         "sliding_window_non_causal: missing: speculators .* false"),
        ({AUX: [1, 10]}, rf"{AUX}: the output of the last layer \(9"),
        ({"num_hidden_layers": 3}, "_config.num_hidden_layers: 2, but num_hidden_layers 3"),
        ({"mask_token_id": 97}, "mask_token_id: 97 is outside .* 97 ids"),
        ({AUX: [0, 5]}, rf"{AUX}: outputs of the layers \[-1, 4\]; .* 0 to 9"),
        ({AUX: None}, f"{AUX}: missing"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("form", "fields", "message"),
    [(form, *refusal) for form, refusals in REFUSALS.items() for refusal in refusals],
)
def test_what_is_unknown_ambiguous_or_another_target_s_is_refused_by_name(
    form, fields, message, tmp_path
) -> None:
    kind, _, layout = form.rpartition(" ")
    if kind:
        write_dflash(tmp_path, form=layout)
        read, target = read_dflash_shape, dflash_checkpoints.TARGET
    else:
        write_chain(tmp_path, form, chain_checkpoints.TARGET)
        read, target = read_chain_shape, chain_checkpoints.TARGET
    check_refused(tmp_path, lambda path: read(path, target), fields, message)
