"""Mutated request bodies, and what every answer to one must look like.

Imports nothing of kvlane, so that the same bodies go to a double and to a real cluster.
"""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

MODEL = "MODEL"  # stands for the served name
ERROR_TYPES = {  # others: a mistake
    401: "authentication_error", 403: "permission_error", 429: "rate_limit_error",
}  # fmt: skip
LAST_EVENTS = tuple(b"event: " + name for name in (
    b"message_stop", b"response.completed", b"response.incomplete"
))  # fmt: skip
MISTAKE = "invalid_request_error"

PARAMETERS = {
    "type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
    "additionalProperties": False, "$defs": {"City": {"type": "string"}},
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time", "description": "what time it is"}},
]
CALL = {"id": "c", "type": "function", "function": {"name": "time", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    ],
    "max_completion_tokens": 5, "temperature": 0.5, "n": 2, "logprobs": True, "top_logprobs": 2,
    "logit_bias": {"5": 1}, "presence_penalty": 0.1,
    "chat_template_kwargs": {"enable_thinking": False},
    "stream_options": {"include_usage": True}, "stream": True,
}  # fmt: skip
MESSAGE: dict[str, Any] = {
    "model": MODEL, "max_tokens": 5, "system": [{"type": "text", "text": "be good"}],
    "messages": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm"},
            {"type": "tool_use", "id": "c", "name": "time", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "7"}]}
        ]},
    ],
    "tools": [{"name": "time", "input_schema": PARAMETERS}], "stop_sequences": ["x"],
    "tool_choice": {"type": "auto"}, "thinking": {"type": "enabled", "budget_tokens": 9},
    "stream": True,
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "model": MODEL, "max_output_tokens": 5, "instructions": "be good", "stream": True,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [
            {"type": "reasoning_text", "text": "hm"}
        ]},
        {"type": "function_call", "call_id": "c", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "7"},
    ],
    "tools": [{"type": "function", "name": "time", "parameters": PARAMETERS}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "time"}
    ]},
    "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "top_logprobs": 1,
    "include": ["message.output_text.logprobs"], "metadata": {"a": "b"}, "truncation": "auto",
}  # fmt: skip
HELLO = [{"role": "user", "content": "hello"}]
TOOL_CHAT = {
    "messages": HELLO, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False,
    "max_tokens": 8,
}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
FORMED = {"messages": HELLO, "response_format": FORM, "max_completion_tokens": 8}
COMPLETION: dict[str, Any] = {
    "prompt": ["hello", "a"], "max_tokens": 4, "min_tokens": 1, "best_of": 2, "logprobs": 1,
    "stop": ["x"], "stop_token_ids": [3], "seed": 1, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
    "frequency_penalty": 1, "repetition_penalty": 1.1,
}  # fmt: skip
ECHO = {"prompt": [[1, 2], [3]], "echo": True, "stream": True, "ignore_eos": True, "max_tokens": 6}
SCORED = {"prompt": ["hello", "a"], "echo": True, "logprobs": 2, "max_tokens": 0}
REGEX = {"prompt": "a", "guided_regex": "a+", "structured_outputs": {}, "max_tokens": 6}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    *[("/v1/chat/completions", body) for body in (CHAT, TOOL_CHAT, FORMED)],
    ("/v1/messages", MESSAGE),
    ("/v1/responses", RESPONSE),
    ("/v1/messages/count_tokens", MESSAGE),
    *[("/v1/completions", body) for body in (COMPLETION, ECHO, SCORED, REGEX)],
    ("/tokenize", {"messages": CHAT["messages"], "tools": TOOLS, "return_token_strs": True}),
    ("/tokenize", {"prompt": "hello", "add_special_tokens": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
DEEP: Any = []
for _ in range(60):
    DEEP = [DEEP, {"a": DEEP}] if len(json.dumps(DEEP)) < 2000 else [DEEP]
NASTY: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 128, 511, 512, 2**31, 2**63, -(2**63), 2**64, 10**30,
    10**400, 0.5, -0.0, 1e-300, 1e300, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
    "", "a", "0", "none", "required", "text", "json_object", "\x00", "\ud800", "😀" * 40,
    "a" * 3000, "{% raise %}", "{{ 7 }}", "<tool_call>", "<think>", "((((", "a{1,99999}",
    "<|im_end|>", "user", "wizard", "image_url", [], [[]], [None], [""], [1], [[1], "a"],
    [[]] * 40, ["a"] * 300, {}, {"": ""}, {"type": "image_url", "image_url": {"url": "x"}},
    {"type": "input_audio"}, {"type": "text"}, {"type": "object", "properties": 3}, {"$ref": "#"},
    {"$ref": "http://x/y"}, {"anyOf": []}, {"enum": []},
    {"type": "function", "function": {"name": "time"}}, DEEP,
]  # fmt: skip
NAMES = [
    *CHAT, *COMPLETION, *ECHO, *REGEX, *TOOL_CHAT, "guided_json", "guided_choice", "guided_grammar",
    "response_format", "max_tokens", "suffix", "include_stop_str_in_output", "unheard_of", "user",
    "return_token_ids", "truncate_prompt_tokens", "documents", "reasoning_effort", "json_schema",
    "ebnf", "regex", "include_reasoning", "chat_template_kwargs", "stream_options", "cache_salt",
    "prompt_logprobs", "continue_final_message",
]  # fmt: skip


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) in a body."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], dict | list):
            places(value[key], found)
    return found


def mutated(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A body with one to three things wrong, in its values or in its bytes."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 2, 3])):
        kind, where = rng.random(), places(body, [])
        holder, key = rng.choice(where) if where else (body, "a")
        if kind < 0.6 and where:
            holder[key] = copy.deepcopy(rng.choice(NASTY))
        elif kind < 0.75:
            body[rng.choice(NAMES)] = copy.deepcopy(rng.choice(NASTY))
        elif kind < 0.85 and isinstance(holder, dict):
            holder.pop(key, None)
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(rng.choice(NASTY)))
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    raw = bytearray(text.encode("utf-8", "surrogatepass"))
    if rng.random() < 0.15:
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    if rng.random() < 0.05:
        del raw[rng.randrange(len(raw)) :]
    return bytes(raw)


def seeds(model: str) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of requests that are served, each with a small limit of tokens."""
    named = [(path, copy.deepcopy(body)) for path, body in SEEDS]
    for _, body in named:
        if "model" in body:
            body["model"] = model
    return named


def mutants(num: int, seed: int, model: str) -> Iterator[tuple[str, bytes]]:
    rng, originals = random.Random(seed), seeds(model)
    for _ in range(num):
        path, body = rng.choice(originals)
        yield path, mutated(rng, body)


def judge(status: int, found: bytes) -> None:
    """An answer is whole and valid, or a client's mistake in the form of OpenAI or Anthropic."""
    if status == 200 and found.startswith((b"data:", b": ping")):
        assert found.endswith(b"data: [DONE]\n\n")
        for event in found.split(b"\n\n")[:-2]:
            if event.startswith(b"data: "):
                assert "error" not in strict(event[6:])
    elif status == 200 and found.startswith(b"event:"):
        *events, last = found.removesuffix(b"\n\n").split(b"\n\n")
        assert last.startswith(LAST_EVENTS)
        for event in events:
            if event.startswith(b"event: "):
                assert not event.startswith(b"event: error")
                strict(event.partition(b"\ndata: ")[2])
    elif status == 200:
        strict(found)
    else:
        assert 400 <= status < 500
        answer = strict(found)
        error = answer["error"]
        if "type" in answer:
            assert answer.keys() == {"type", "error"}
            assert error.keys() - {"details"} == {"type", "message"}
            return
        assert answer.keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["type"] == ERROR_TYPES.get(status, MISTAKE)
        assert error["message"]
        assert isinstance(error["code"], str)
        assert error["param"] is None or error["param"]


def strict(raw: bytes) -> Any:
    return json.loads(raw, parse_constant=lambda name: 1 / 0)
