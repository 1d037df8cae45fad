"""Fields of bodies that have no effect here: which are refused, told of, or of no matter.

No field that changes an answer is ignored in silence.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from router.errors import unsupported

# Fields that would change the output and are not supported yet; what is falsy changes nothing, or
# what the table below says. Whoever builds one deletes its name and adds the field to a body.
NOT_BUILT = frozenset({
    # OpenAI's
    "audio", "functions", "modalities", "suffix", "web_search_options",
    # vLLM's
    "allowed_token_ids", "bad_words", "chat_template", "echo", "enable_response_messages",
    "guided_whitespace_pattern", "logits_processors", "logprob_token_ids",
    "max_repetition_pattern_size", "media_io_kwargs", "min_repetition_pattern_size",
    "mm_processor_kwargs", "previous_input_messages", "previous_response", "prompt_embeds",
    "repetition_detection", "repetition_min_count", "return_prompt_text",
    "return_tokens_as_token_ids", "structural_tag", "thinking_token_budget", "truncation_side",
    "use_beam_search", "vllm_xargs", "watermarking",
    # SGLang's
    "custom_logit_processor", "custom_params", "extra_key", "images_config", "input_ids",
    "lora_path", "max_dynamic_patch", "min_dynamic_patch", "no_stop_trim",
    "return_cached_tokens_details", "return_hidden_states", "return_meta_info",
    "return_prompt_token_ids", "return_routed_experts", "separate_reasoning", "session_params",
    "stop_regex", "stream_reasoning", "task", "use_audio_in_video",
})  # fmt: skip
HARMLESS: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "modalities": lambda value, fields: value == ["text"],
    "functions": lambda value, fields: not value or fields.get("function_call") == "none",
    "separate_reasoning": lambda value, fields: value is True,
    "stream_reasoning": lambda value, fields: value is True,
    "thinking_token_budget": lambda value, fields: value == -1,
    "truncation_side": lambda value, fields: value == "left",
}
# Fields that change no answer: names and places of their own, and what has no part in sampling.
NO_PART = frozenset({
    "cache_control", "custom_labels", "function_call", "guided_decoding_backend",
    "length_penalty", "metadata", "ngram_corpus_id", "prediction",
    "prompt_cache_retention", "request_id", "return_mm_kwargs",
    "return_token_offsets", "rid", "routed_experts_prompt_start", "routed_experts_start_len",
    "safety_identifier", "service_tier", "spaces_between_special_tokens", "store",
    "user",
    "stream_options.include_obfuscation", "structured_outputs.disable_additional_properties",
    "structured_outputs.disable_any_whitespace", "structured_outputs.disable_fallback",
})  # fmt: skip

# Keys that are known inside fields which are mappings, or lists of mappings.
INSIDE: dict[str, tuple[str, ...]] = {
    "stream_options": ("include_usage", "continuous_usage_stats"),
    "structured_outputs": ("json", "regex", "choice", "grammar", "json_object", "structural_tag"),
    "response_format": ("type", "json_schema"),
    "response_format.json_schema": ("name", "description", "schema", "strict"),
    "tools": ("type", "function", "custom"),
}

OF_RENDERING = "messages", "tools", "add_generation_prompt"  # no kwargs of a template change them

UNFIT = re.compile(r"[^A-Za-z0-9_.-]")  # for a header
MAX_NAMES, MAX_NAME_CHARS = 16, 128


def check_built(fields: Mapping[str, Any]) -> None:
    """Raise an ApiError, 400, that names a field which is not built; `fields`: those unknown."""
    for name in filter(NOT_BUILT.__contains__, fields):
        harmless = HARMLESS.get(name, lambda value, _: not value)
        if not harmless(fields[name], fields):
            raise unsupported(f"{name} is not supported yet with this value", name)


def unheeded(names: Iterable[str]) -> tuple[str, ...]:
    """Of unknown names those that may have been meant to change an answer."""
    return tuple(name for name in names if name not in NO_PART and name not in NOT_BUILT)


def foreign(path: str, value: Any, known: Iterable[str] = ()) -> Iterator[str]:
    """Paths of keys of a mapping, or of a list of mappings, that are neither null nor known."""
    for part in cast("list[Any]", value) if isinstance(value, list) else [value]:
        fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        for key, given in fields.items():
            if given is not None and key not in (known or INSIDE[path]):
                yield f"{path}.{key}"


def is_hosted(tool: Mapping[str, Any]) -> bool:
    """Whether a tool is one that a server runs, or that models of one maker know: no function."""
    kind = tool.get("type")
    named = isinstance(kind, str) and kind not in ("function", "custom")
    return named and "function" not in tool


def listed(names: Iterable[str]) -> str:
    """Names as one line for a header or a message: bounded, and of harmless characters."""
    shown = [UNFIT.sub("?", name[:MAX_NAME_CHARS]) for name in names]
    more = [f"+{len(shown) - MAX_NAMES}"] if len(shown) > MAX_NAMES else []
    return ", ".join([*shown[:MAX_NAMES], *more])
