"""The table in router/API.md of what others' fields do here: each is sent, and judged."""

import re
from collections.abc import Collection
from typing import Any

from router.adapters.messages import MessagesBody
from router.adapters.responses import ResponseBody
from router.openai.fields import NO_PART, NOT_BUILT
from router.openai.schema import ChatBody, CompletionBody
from tests.fault.router_doubles import HELLO, QWEN, Served, speak
from tests.support.commands import REPOSITORY
from tests.support.mutants import TOOLS

PAGE = REPOSITORY / "router" / "API.md"
CHAT, TEXT, RESPONSE, MESSAGE = "chat/completions", "completions", "responses", "messages"
FULL: dict[str, Any] = {
    CHAT: {"messages": HELLO}, TEXT: {"prompt": "a"}, RESPONSE: {"input": "a"},
    MESSAGE: {"messages": HELLO, "max_tokens": 5},
}  # fmt: skip
BODIES = {CHAT: ChatBody, TEXT: CompletionBody, RESPONSE: ResponseBody, MESSAGE: MessagesBody}
MODEL = (QWEN + "{# reasoning_effort documents #}", (), 2048)  # it reads what a request may give
SCRIPT = speak([5])
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "weather"}}
# vLLM's ChatCompletionRequest and CompletionRequest, then what only SGLang's and OpenAI's have,
# each with a value that is not its default; of a name with dots, what its first part holds.
BOTH: dict[str, Any] = {
    "model": "small", "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "max_tokens": 5, "n": 2,
    "presence_penalty": 0.5, "seed": 7, "stop": ["x"], "stream": True, "temperature": 0.5,
    "stream_options": {"include_usage": True}, "top_p": 0.5, "user": "me", "top_k": 5,
    "use_beam_search": True, "min_p": 0.1, "repetition_penalty": 1.5, "length_penalty": 2.0,
    "stop_token_ids": [9], "include_stop_str_in_output": True, "ignore_eos": True,
    "min_tokens": 1, "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 5, "prompt_logprobs": 1, "allowed_token_ids": [5],
    "add_special_tokens": True, "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a+"}, "priority": 1, "request_id": "r", "cache_salt": "s",
    "logits_processors": ["p"], "return_tokens_as_token_ids": True, "return_token_ids": True,
    "kv_transfer_params": {"a": 1}, "vllm_xargs": {"a": 1}, "max_repetition_pattern_size": 3,
    "min_repetition_pattern_size": 2, "repetition_min_count": 3,
    "repetition_detection": {"max_pattern_size": 3}, "guided_json": {"type": "object"},
    "guided_regex": "a+", "guided_choice": ["a"], "guided_grammar": 'start: "a"',
    "guided_decoding_backend": "xgrammar", "guided_whitespace_pattern": " ", "bad_words": ["x"],
    "json_schema": "{}", "regex": "a+", "ebnf": 'root ::= "a"', "no_stop_trim": True,
    "stop_regex": "a+", "lora_path": "x", "custom_logit_processor": "x", "custom_params": {"a": 1},
    "return_hidden_states": True, "rid": "r", "structural_tag": "{}", "watermarking": True,
    "truncation_side": "right", "logprob_token_ids": [5], "session_id": "s",
    "routed_experts_prompt_start": 1, "return_token_offsets": True, "return_mm_kwargs": False,
    "ec_transfer_params": {"a": 1}, "stream_interval": 5, "thinking_token_budget": 9,
    "return_routed_experts": True, "routed_experts_start_len": 1,
    "return_cached_tokens_details": True, "session_params": {"id": "s"},
    "images_config": {"a": 1}, "bootstrap_host": "a", "bootstrap_port": 1, "bootstrap_room": 1,
    "routed_dp_rank": 1, "disagg_prefill_dp_rank": 1, "data_parallel_rank": 1, "extra_key": "a",
    "ngram_corpus_id": "a", "custom_labels": {"a": "b"},
    "stream_options.include_usage": {"include_usage": True},
    "stream_options.continuous_usage_stats": {"continuous_usage_stats": True},
    "stream_options.include_obfuscation": {"include_obfuscation": False},
    "response_format.type": {"type": "structural_tag", "format": {}},
    "response_format.json_schema": FORM, "response_format.schema": FORM | {"schema": {}},
    "structured_outputs.json": {"json": {}}, "structured_outputs.regex": {"regex": "a"},
    "structured_outputs.choice": {"choice": ["a"]},
    "structured_outputs.grammar": {"grammar": 'start: "a"'},
    "structured_outputs.json_object": {"json_object": True},
    "structured_outputs.structural_tag": {"structural_tag": "{}"},
    "structured_outputs.whitespace_pattern": {"regex": "a", "whitespace_pattern": " "},
    "structured_outputs.disable_any_whitespace": {"regex": "a", "disable_any_whitespace": True},
    "structured_outputs.disable_additional_properties": {
        "regex": "a", "disable_additional_properties": True},
}  # fmt: skip
OF_CHAT: dict[str, Any] = {
    "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 5, "tools": TOOLS,
    "tool_choice": "required", "parallel_tool_calls": False, "reasoning_effort": "low",
    "include_reasoning": False, "echo": True, "add_generation_prompt": False,
    "continue_final_message": True, "documents": [{"text": "a"}], "chat_template": "x",
    "chat_template_kwargs": {"enable_thinking": False}, "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"a": {}}, "return_prompt_text": True, "return_prompt_token_ids": True,
    "return_meta_info": True, "task": "title", "max_dynamic_patch": 1, "min_dynamic_patch": 1,
    "use_audio_in_video": True, "input_ids": [5], "reasoning": {"effort": "low"},
    "tool_choice.function": NAMED, "tool_choice.allowed_tools": {
        "type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
    "tools.defer_loading": [TOOLS[0] | {"defer_loading": True}],
    "tools.strict": [{"type": "function", "function": {"name": "f", "strict": True}}],
    "separate_reasoning": False, "stream_reasoning": False,
    "functions": [{"name": "f"}], "metadata": {"a": "b"}, "store": True, "service_tier": "flex",
    "modalities": ["audio"], "audio": {"voice": "a"}, "prediction": {"content": "a"},
    "verbosity": "low", "web_search_options": {"a": 1}, "safety_identifier": "a",
    "prompt_cache_key": "a", "prompt_cache_retention": "24h",
    "prompt_cache_options": {"ttl": "30m"},
}  # fmt: skip
OF_TEXT: dict[str, Any] = {
    "logprobs": 2, "echo": True, "suffix": "b", "best_of": 2, "prompt_embeds": "a",
}  # fmt: skip
OF_RESPONSE: dict[str, Any] = {
    "model": "small", "background": True, "include": ["message.output_text.logprobs"],
    "include.reasoning.encrypted_content": ["reasoning.encrypted_content"], "instructions": "a",
    "max_output_tokens": 5, "max_tool_calls": 1, "metadata": {"a": "b"},
    "parallel_tool_calls": False, "prompt": {"id": "a"}, "conversation": "a", "reasoning": {},
    "reasoning.effort": {"effort": "low"}, "reasoning.summary": {"summary": "auto"},
    "service_tier": "flex", "store": False, "stream": True, "temperature": 0.5, "text": {},
    "text.format": {"format": {"type": "json_object"}}, "text.verbosity": {"verbosity": "low"},
    "tools": [], "tools.defer_loading": [
        {"type": "function", "name": "f", "parameters": {}, "defer_loading": True}],
    "tool_choice": "auto", "top_logprobs": 1, "top_p": 0.5, "truncation": "auto", "user": "me",
    "context_management": [{"type": "compaction"}], "stream_options.include_obfuscation": {
        "include_obfuscation": False}, "enable_response_messages": True,
    "previous_input_messages": [{"role": "user"}], "previous_response": {"id": "a"},
    "prompt_cache_key": "a", "prompt_cache_retention": "24h", "safety_identifier": "a",
    "prompt_cache_options": {"ttl": "30m"},
}  # fmt: skip
OF_MESSAGE: dict[str, Any] = {
    "model": "small", "max_tokens": 4, "metadata": {"user_id": "a"}, "stop_sequences": ["x"],
    "stream": True, "system": "a", "temperature": 0.5, "top_k": 5, "top_p": 0.5, "tools": [],
    "tools.input_examples": [{"name": "f", "input_schema": {}, "input_examples": [{}]}],
    "tools.cache_control": [{"name": "f", "input_schema": {}, "cache_control": {}}],
    "tool_choice": {"type": "auto"}, "thinking": {"type": "enabled"},
    "thinking.budget_tokens": {"type": "enabled", "budget_tokens": 9},
    "thinking.display": {"type": "enabled", "display": "omitted"}, "output_config": {},
    "output_config.effort": {"effort": "low"}, "output_config.format": {
        "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "output_config.task_budget": {"task_budget": {"type": "tokens", "total": 9}},
    "output_format": {"type": "json_schema", "schema": {"type": "object"}},
    "cache_control": {"type": "ephemeral"}, "container": "a", "context_management": {"edits": []},
    "inference_geo": "us", "mcp_servers": [{"name": "a"}], "service_tier": "auto", "speed": "fast",
    "chat_template_kwargs": {"enable_thinking": False}, "kv_transfer_params": {"a": 1},
}  # fmt: skip
OWN = {CHAT: BOTH | OF_CHAT, TEXT: BOTH | OF_TEXT, RESPONSE: OF_RESPONSE, MESSAGE: OF_MESSAGE}
# Parts of fields that work, each with a test of its own elsewhere.
PARTS = {
    "stream_options.include_usage", "stream_options.continuous_usage_stats",
    "response_format.json_schema", "structured_outputs.json", "structured_outputs.regex",
    "structured_outputs.choice", "structured_outputs.grammar", "structured_outputs.json_object",
    "tool_choice.function", "tool_choice.allowed_tools", "tools.strict", "reasoning.effort",
    "text.format", "thinking.display", "output_config.effort", "output_config.format",
}  # fmt: skip
NO_PARTS = {"tools.cache_control"}  # that change no answer
NEEDS: dict[str, dict[str, Any]] = {  # what a field cannot be without
    "stream_options": {"stream": True}, "top_logprobs": {"logprobs": True},
    "continue_final_message": {"messages": [*HELLO, {"role": "assistant", "content": "a"}]},
    "tool_choice": {"tools": TOOLS}, "parallel_tool_calls": {"tools": TOOLS},
}  # fmt: skip
WORDS = {
    "works": "work", "refused": "400 that names the field", "told": "`X-Kvlane-Unknown-Fields`",
    "no part": "change no answer here, and are ignored",
}  # fmt: skip


def fate(served: Served, path: str, name: str, value: Any) -> str:
    top = name.partition(".")[0]
    needs = NEEDS.get(top, {}) if path in (CHAT, TEXT) or top == "stream_options" else {}
    response = served.post(path, **FULL[path] | {top: value} | needs)
    if response.status_code == 400:
        error = response.json()["error"]
        assert error.get("param", name) == name, response.text
        assert name in error["message"]
        assert name not in NOT_BUILT or error.get("code", "unsupported") == "unsupported"
        return "refused"
    assert response.status_code == 200, response.text
    if "x-kvlane-unknown-fields" in response.headers:
        assert response.headers["x-kvlane-unknown-fields"] == name
        return "told"
    works = name in PARTS or name in BODIES[path].model_fields
    if path in (RESPONSE, MESSAGE):
        works |= name in ChatBody.model_fields
    assert works or name in NO_PART or name in NO_PARTS, name
    return "works" if works else "no part"


def test_the_table_says_what_each_field_does(served: Served) -> None:
    """Where it is not so, write what this has found between the two lines of the page."""
    fates = {
        path: {name: fate(served, path, name, value) for name, value in own.items()}
        for path, own in OWN.items()
    }
    both = {name: did for name, did in fates[CHAT].items() if fates[TEXT].get(name) == did}
    columns = {"chats and completions": both}
    for path, own in fates.items():
        column = f"`/v1/{path}`" + " alone" * (path in (CHAT, TEXT))
        columns[column] = own if path not in (CHAT, TEXT) else without(own, both)
    lines = [" | ".join(["| these", *(f"of {each}" for each in columns)]) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for each, words in WORDS.items():
        names = [
            ", ".join(f"`{name}`" for name, did in column.items() if did == each)
            for column in columns.values()
        ]
        lines.append(" | ".join([f"| {words}", *names]) + " |")
    page = PAGE.read_text()
    written = re.search(r"<!-- fields -->\n(.*?)\n<!-- /fields -->", page, re.DOTALL)
    assert written is not None
    assert written[1] == "\n".join(lines), "\n".join(lines)


def without(fates: dict[str, str], both: Collection[str]) -> dict[str, str]:
    """The fates of a path's own fields."""
    return {name: did for name, did in fates.items() if name not in both}


def test_the_table_has_every_field_of_our_own_bodies() -> None:
    ours = {"messages", "prompt", "return_stages", "return_resumes", "return_trace", "cache_ttl"}
    ours |= {"prompt_cache_key", "prompt_cache_options"}  # of chats and responses alone
    ours |= {"input", "previous_response_id", "thread"}  # the last two need what is kept
    for path, own in OWN.items():
        assert set(BODIES[path].model_fields) - ours <= own.keys()
