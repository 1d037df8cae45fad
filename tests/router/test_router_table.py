"""The table in router/API.md of what others' fields do here: each is sent, and judged."""

import re
from typing import Any

import pytest

from router.openai.fields import NO_PART
from router.openai.schema import ChatBody, CompletionBody
from router.text.tokenizer import Text
from tests.fault.router_doubles import HELLO, QWEN, Served, make_model, speak
from tests.support.commands import REPOSITORY
from tests.support.mutants import TOOLS

PAGE = REPOSITORY / "router" / "API.md"
CHAT, TEXT = "chat/completions", "completions"
FULL: dict[str, Any] = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "a"}}
BODIES = {CHAT: ChatBody, TEXT: CompletionBody}
SCRIPT = speak([5])
# vLLM's ChatCompletionRequest and CompletionRequest, then what only SGLang's and OpenAI's have,
# each with a value that is not its default.
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
    "return_hidden_states": True, "rid": "r", "structural_tag": "{}",
}  # fmt: skip
OF_CHAT: dict[str, Any] = {
    "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 5, "tools": TOOLS,
    "tool_choice": "required", "parallel_tool_calls": False, "reasoning_effort": "low",
    "include_reasoning": False, "echo": True, "add_generation_prompt": False,
    "continue_final_message": True, "documents": [{"text": "a"}], "chat_template": "x",
    "chat_template_kwargs": {"enable_thinking": False}, "mm_processor_kwargs": {"a": 1},
    "thinking_token_budget": 9, "separate_reasoning": False, "stream_reasoning": False,
    "functions": [{"name": "f"}], "metadata": {"a": "b"}, "store": True, "service_tier": "flex",
    "modalities": ["audio"], "audio": {"voice": "a"}, "prediction": {"content": "a"},
    "verbosity": "low", "web_search_options": {"a": 1}, "safety_identifier": "a",
    "prompt_cache_key": "a", "prompt_cache_retention": "24h",
}  # fmt: skip
OF_TEXT: dict[str, Any] = {
    "logprobs": 2, "echo": True, "suffix": "b", "best_of": 2, "prompt_embeds": "a",
}  # fmt: skip
NEEDS: dict[str, dict[str, Any]] = {  # what a field cannot be without
    "stream_options": {"stream": True}, "top_logprobs": {"logprobs": True},
    "continue_final_message": {"messages": [*HELLO, {"role": "assistant", "content": "a"}]},
    "tool_choice": {"tools": TOOLS}, "parallel_tool_calls": {"tools": TOOLS},
}  # fmt: skip
WORDS = {
    "works": "work", "refused": "400 that names the field", "told": "`X-Kvlane-Unknown-Fields`",
    "no part": "change no answer here, and are ignored",
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """A model whose template reads what a request may give it."""
    template = QWEN + "{# reasoning_effort documents #}"
    return Text(make_model(tmp_path_factory.mktemp("model"), template, (), 2048))


def fate(served: Served, path: str, name: str, value: Any) -> str:
    response = served.post(path, **FULL[path] | {name: value} | NEEDS.get(name, {}))
    if response.status_code == 400:
        assert response.json()["error"]["param"] == name, response.text
        return "refused"
    assert response.status_code == 200, response.text
    if "x-kvlane-unknown-fields" in response.headers:
        assert response.headers["x-kvlane-unknown-fields"] == name
        return "told"
    return "works" if name in BODIES[path].model_fields else "no part" * (name in NO_PART)


def test_the_table_says_what_each_field_does(served: Served) -> None:
    """Where it is not so, write what this has found between the two lines of the page."""
    lines = ["| these | of `/v1/chat/completions` | of `/v1/completions` |", "|---|---|---|"]
    found: dict[str, dict[str, list[str]]] = {each: {CHAT: [], TEXT: []} for each in WORDS}
    for path, own in ((CHAT, OF_CHAT), (TEXT, OF_TEXT)):
        for name, value in (BOTH | own).items():
            found[fate(served, path, name, value)][path].append(f"`{name}`")
    for each, paths in found.items():
        lines.append(" | ".join([f"| {WORDS[each]}", *map(", ".join, paths.values())]) + " |")
    page = PAGE.read_text()
    written = re.search(r"<!-- fields -->\n(.*?)\n<!-- /fields -->", page, re.DOTALL)
    assert written is not None
    assert written[1] == "\n".join(lines), "\n".join(lines)


def test_the_table_has_every_field_of_our_own_bodies() -> None:
    ours = {"messages", "prompt", "return_stages", "return_resumes", "return_trace"}
    for path, own in ((CHAT, OF_CHAT), (TEXT, OF_TEXT)):
        assert set(BODIES[path].model_fields) - ours <= (BOTH | own).keys()
