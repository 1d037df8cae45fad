"""Fields of a drafter's config.json from which no layer follows. Free of torch.

transformers, trainers and converters leave many in it: SpecForge's and ModelOpt's configurations,
PretrainedConfig and GenerationConfig of transformers 4 and 5, and what unsloth saves were read.
"""

import re
from collections.abc import Mapping

_TEXT_MARKS = "bos|eos|pad|unk|sep|cls|mask_pad|decoder_start|forced_bos|forced_eos"
_MEDIA_MARKS = r"image|video|audio|vision\w*|boi|eoi|boa|eoa"

# Why nothing follows -> a regular expression of whole names.
SILENT: Mapping[str, str] = {
    "how it was trained, and how weights began": (
        r"dropout|\w+_dropout|\w+_pdrop|initializer_\w+|init_std|router_jitter_noise|seq_aux"
        r"|router_aux_loss_coef|aux_loss_alpha|output_router_logits|mtp_loss\w*|embed_requires_grad"
        r"|gradient_checkpointing|tf_legacy_loss|use_bfloat16|pretraining_tp|base_model_\w+_plan"
        r"|enable_sp_ulysses|ep_size"
    ),
    "who saved it, by what, from where, for which target": (
        r"_\w+|\w+_version|unsloth_\w+|name_or_path|auto_map|has_no_defaults_at_init|torchscript"
        r"|target_model_type|target_model_name\w*|base_model_name\w*"
    ),
    "how transformers runs it": (
        r"use_cache|cache_implementation|attn_implementation|chunk_size_feed_forward|is_decoder"
        r"|return_dict\w*|output_(attentions|hidden_states|scores|logits)"
    ),
    "for which other task it is": (
        "finetuning_task|id2label|label2id|num_labels|problem_type|task_specific_params"
        "|tokenizer_class|prefix"
    ),
    "which tokens mean what": (
        rf"({_TEXT_MARKS})_token_id|({_MEDIA_MARKS})_token_(id|index)|language_model_only"
    ),
    "how a text is drawn, and how long it may be": (
        "temperature|top_k|top_p|min_p|typical_p|do_sample|early_stopping|remove_invalid_values"
        r"|num_beams|num_beam_groups|num_return_sequences|(\w+_)?no_repeat_ngram_size|bad_words_ids"
        r"|(begin_)?suppress_tokens|diversity_penalty|length_penalty|repetition_penalty"
        "|exponential_decay_length_penalty|min_length|max_length|max_new_tokens|model_max_length"
        "|max_position_embeddings"
    ),
}
_NAME = re.compile("|".join(SILENT.values()))


def is_silent(field: str) -> bool:
    """Whether nothing follows from this field, whatever its value is."""
    return _NAME.fullmatch(field) is not None
