"""Fields of bodies that have no effect here: which are refused, told of, or of no matter.

No field that changes an answer is ignored in silence.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from router.errors import unsupported

# Fields that would change the output and are not supported yet; what is falsy changes nothing, or
# what the table below says. Whoever builds one deletes its name and adds the field to a body.
NOT_BUILT = (
    # OpenAI's
    "audio", "functions", "modalities", "suffix", "web_search_options",
    # vLLM's
    "allowed_token_ids", "bad_words", "chat_template", "echo",
    "guided_whitespace_pattern", "logits_processors", "max_repetition_pattern_size",
    "min_repetition_pattern_size", "mm_processor_kwargs", "prompt_embeds",
    "repetition_detection", "repetition_min_count", "return_tokens_as_token_ids", "structural_tag",
    "thinking_token_budget", "use_beam_search", "vllm_xargs",
    # SGLang's
    "custom_logit_processor", "custom_params", "lora_path", "no_stop_trim",
    "return_hidden_states", "separate_reasoning", "stop_regex", "stream_reasoning",
)  # fmt: skip
HARMLESS: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "modalities": lambda value, fields: value == ["text"],
    "functions": lambda value, fields: not value or fields.get("function_call") == "none",
    "separate_reasoning": lambda value, fields: value is True,
    "stream_reasoning": lambda value, fields: value is True,
}
# Fields that change no answer: names and places of their own, and what has no part in sampling.
NO_PART = frozenset({
    "function_call", "guided_decoding_backend", "length_penalty", "metadata", "prediction",
    "prompt_cache_key", "prompt_cache_retention", "request_id", "rid", "safety_identifier",
    "service_tier", "spaces_between_special_tokens", "store", "user",
    "stream_options.include_obfuscation", "structured_outputs.disable_additional_properties",
    "structured_outputs.disable_any_whitespace", "structured_outputs.disable_fallback",
})  # fmt: skip

# Keys that are known inside a field which is a mapping.
INSIDE = frozenset({
    "type", "json_schema", "json", "regex", "choice", "grammar", "json_object", "structural_tag",
})  # fmt: skip

UNFIT = re.compile(r"[^A-Za-z0-9_.-]")  # for a header
MAX_NAMES, MAX_NAME_CHARS = 16, 64


def check_built(fields: Mapping[str, Any]) -> None:
    """Raise an ApiError, 400, that names a field which is not built; `fields`: those unknown."""
    for name in NOT_BUILT:
        harmless = HARMLESS.get(name, lambda value, _: not value)
        if name in fields and not harmless(fields[name], fields):
            raise unsupported(f"{name} is not supported yet with this value", name)


def unheeded(names: Iterable[str]) -> tuple[str, ...]:
    """Of unknown names those that may have been meant to change an answer."""
    return tuple(name for name in names if name not in NO_PART and name not in NOT_BUILT)


def listed(names: Iterable[str]) -> str:
    """Names as one line for a header or a message: bounded, and of harmless characters."""
    shown = [UNFIT.sub("?", name[:MAX_NAME_CHARS]) for name in names]
    more = [f"+{len(shown) - MAX_NAMES}"] if len(shown) > MAX_NAMES else []
    return ", ".join([*shown[:MAX_NAMES], *more])
