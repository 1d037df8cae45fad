"""The fields of DFlash drafters' config.json, as the projects that train them write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worker.drafts.chain_fields import FIXED, SHAPE, SPECULATORS

# z-lab, SpecForge and ModelOpt, at the top level.
ZLAB = frozenset(
    {
        "block_size",
        "dflash_config",
        "draft_vocab_size",
        "mask_token_id",
        "num_target_layers",
        "target_hidden_size",
    }
)
# The same projects, in `dflash_config`.
DFLASH_CONFIG = frozenset(
    {
        "block_size",
        "causal",
        "mask_token",  # its text; we need the id
        "mask_token_id",
        "num_target_layers",
        "swa_window_size",
        "target_layer_ids",
        "use_swa",
    }
)
SPECULATORS_DFLASH = SPECULATORS | {
    "aux_hidden_state_layer_ids",
    "block_size",
    "draft_vocab_size",
    "mask_token_id",
    "max_anchors",  # how many blocks of a text it was trained on
    "num_hidden_layers",
    "sliding_window_non_causal",
    "target_hidden_size",
}
# What speculators nests. There `is_causal` stands beside `sliding_window_non_causal`, and nobody
# says which one counts.
LAYER = SHAPE - {"is_causal"}

# The only value of each that we compute, wherever it stands.
FIXED_DFLASH: Mapping[str, Any] = {
    "add_swa_attention_sink_bias": False,
    "attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "pure_draft_prefix_len": 1,
    "sample_from_anchor": False,
    "shift_label": False,
    "use_aux_hidden_state": True,
}
# Of the transformer's fields. A DFlash layer has norms of q and k, whatever `model_type` is.
FIXED_LAYER: Mapping[str, Any] = {
    name: value for name, value in FIXED.items() if name != "is_causal"
} | {"qk_norm": True}

# Relatives of DFlash, by `architectures[0]` and by `speculators_model_type`, and what they need.
RELATIVES: Mapping[str, str] = {
    "DFlash2DraftModel": "a selector and grouped convolutions (DFlash 2)",
    "DFlareDraftModel": "a fusion of hidden states in every layer (DFlare)",
    "DSparkDraftModel": "a Markov head (DSpark)",
    "DominoDraftModel": "a GRU behind the block (Domino)",
    "PEagleDraftModel": "a hidden state that stands for what is not known (P-EAGLE)",
    "Qwen3DSparkModel": "a Markov head (DSpark)",
    "dflare": "a fusion of hidden states in every layer (DFlare)",
    "dflash2": "a selector and grouped convolutions (DFlash 2)",
    "domino": "a GRU behind the block (Domino)",
    "dspark": "a Markov head (DSpark)",
    "peagle": "a hidden state that stands for what is not known (P-EAGLE)",
}
# How relatives' fields begin, and what such a field asks for.
PARTS_OF_RELATIVES: Mapping[str, str] = {
    "confidence": "a confidence head (DSpark)",
    "conv_": "grouped convolutions (DFlash 2)",
    "enable_confidence": "a confidence head (DSpark)",
    "gru": "a GRU behind the block (Domino)",
    "markov": "a Markov head (DSpark)",
    "mask_hidden": "a hidden state that stands for what is not known (P-EAGLE)",
    "projector_type": "a projector of its own (Domino, DSpark, DFlash 2)",
    "selector": "a selector among candidates (DFlash 2)",
}
