"""Fields of bodies: what they do, or how it is told that they do nothing."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.openai.fields import MAX_NAME_CHARS, MAX_NAMES
from router.text.tokenizer import Text
from tests.fault.router_doubles import (
    HELLO,
    KEEP,
    MAX_MODEL_LEN,
    QWEN,
    DecodeDouble,
    Serve,
    Served,
    events,
    make_model,
    speak,
)

CHAT, TEXT = "chat/completions", "completions"
FULL: dict[str, Any] = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "a"}}
HEADER = "x-kvlane-unknown-fields"
TEMPLATE = QWEN + "{{ reasoning_effort }}{% for d in documents or [] %}{{ d.text }}{% endfor %}"
MODEL = (TEMPLATE, ("<think>", "</think>"))


def told(served: Served, path: str = CHAT, **body: Any) -> str | None:
    response = served.post(path, **FULL[path] | body)
    assert response.status_code == 200, response.text
    return response.headers.get(HEADER)


def test_fields_without_effect_are_told(
    served: Served, double: DecodeDouble, streamed: bool
) -> None:
    double.script = KEEP
    said: dict[str, Any] = {"stream": streamed}
    nothing = {
        "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "seed": None,
        "prompt_cache_key": "x", "request_id": "r", "suffix": None, "unheard_of": None,
    }  # fmt: skip
    assert told(served, **said | nothing) is None
    assert told(served, TEXT, **said | nothing | {"suffix": ""}) is None
    some = {"verbosity": "low", "unheard_of": False, "structured_outputs": {"regexp": "a"}}
    assert told(served, **said | some) == "verbosity, unheard_of, structured_outputs.regexp"
    kwargs: dict[str, Any] = {
        "chat_template_kwargs": {"enable_thinking": True, "enable_smoking": True, "tools": []}
    }
    ignored = "chat_template_kwargs.enable_smoking, chat_template_kwargs.tools"
    assert told(served, **said | kwargs) == ignored
    form = {"response_format": {"type": "text", "schema": {}}, "reasoning_effort": "low"}
    assert told(served, TEXT, **said | form) == "reasoning_effort, response_format.schema"


def test_the_header_is_bounded_and_of_harmless_characters(
    served: Served, double: DecodeDouble
) -> None:
    double.script = KEEP
    unfit: dict[str, Any] = {"a\r\nSet-Cookie: é": 1}
    assert told(served, **unfit) == "a??Set-Cookie???"
    many: dict[str, Any] = {f"{i}".ljust(500, "x"): i for i in range(1000)}
    found = told(served, **many) or ""
    assert len(found) <= MAX_NAMES * (MAX_NAME_CHARS + 2) + 10
    assert found.endswith(f", +{1000 - MAX_NAMES}")


SET = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
KIND = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
UNKEPT = {  # keyword -> a schema with it
    "uniqueItems": SET, "contains": {"type": "array", "contains": {"type": "null"}},
    "not": {"not": {"type": "null"}}, "propertyNames": {"propertyNames": {"minLength": 2}},
    "format": {"type": "string", "format": "phone"}, "oneOf": KIND,
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
}  # fmt: skip
TOOL, FORM = "tools.f.properties.a", "response_format.properties.a"  # where it stands
SHORT: dict[str, Any] = {"truncate_prompt_tokens": 9}  # schemas make prompts long


def form(schema: dict[str, Any], *, strict: bool | None = None) -> dict[str, Any]:
    given = {"name": "a", "schema": {"type": "object", "properties": {"a": schema}}}
    return {"type": "json_schema", "json_schema": given | {"strict": strict}}


def tool(schema: dict[str, Any], *, strict: bool = False) -> dict[str, Any]:
    given = form(schema)["json_schema"]
    return {
        "type": "function",
        "function": {"name": "f", "parameters": given["schema"], "strict": strict},
    }


@pytest.mark.parametrize("keyword", UNKEPT)
def test_what_no_grammar_keeps_to_is_told_without_strict_and_refused_with_it(
    served: Served, double: DecodeDouble, keyword: str
) -> None:
    double.script = KEEP
    schema = UNKEPT[keyword]
    needed: dict[str, Any] = SHORT | {"tool_choice": "required"}
    assert told(served, **needed, tools=[tool(schema)]) == f"{TOOL}.{keyword}"
    body = FULL[CHAT] | needed | {"tools": [tool(schema, strict=True)]}
    assert served.refusal(CHAT, **body)["param"] == "tools"
    for path in (CHAT, TEXT):
        full, loose = FULL[path] | SHORT, {"response_format": form(schema)}
        of_strict = {"response_format": form(schema, strict=True)}
        refusal = served.refusal(path, **full | of_strict)
        assert refusal["param"] == "response_format"
        assert f"{FORM}.{keyword}: " in refusal["message"]
        if keyword == "uniqueItems":
            assert served.refusal(path, **full | loose)["param"] == "response_format"
        else:
            assert told(served, path, **SHORT | loose) == f"{FORM}.{keyword}"


def test_a_call_that_nothing_demands_is_kept_to_no_schema(
    served: Served, double: DecodeDouble
) -> None:
    double.script = KEEP
    assert told(served, **SHORT, tools=[tool(SET)]) is None  # nobody has promised to
    assert told(served, **SHORT, tools=[tool(SET), tool({}, strict=True)]) == f"{TOOL}.uniqueItems"
    body = FULL[CHAT] | SHORT | {"tools": [tool(SET, strict=True)]}
    assert served.refusal(CHAT, **body)["param"] == "tools"
    for end in ({"min_tokens": 1}, {"ignore_eos": True}):  # which no grammar can have
        assert told(served, **SHORT | end, tools=[tool(SET, strict=True)]) == "tools.strict"
    assert told(served, **SHORT, tools=[tool(SET, strict=True)], tool_choice="none") is None
    both = {"tools": [tool(SET)], "response_format": form(KIND)}
    assert told(served, **SHORT, **both) == f"{TOOL}.uniqueItems, {FORM}.oneOf"
    same = {"tools": [tool(KIND)], "response_format": form(KIND)}
    assert told(served, **SHORT, **same) == f"{TOOL}.oneOf, {FORM}.oneOf"
    free = SET | {"uniqueItems": False}
    assert told(served, **SHORT, tool_choice="required", tools=[tool(free)]) is None
    assert told(served, TEXT, **SHORT, guided_json=free) is None


def test_they_can_be_refused(serve: Serve, text: Text) -> None:
    _, url, _ = serve(DecodeDouble(script=KEEP), unknown_fields="refuse", directory=text.directory)
    body = {"messages": HELLO, "verbosity": "low", "b\n": 1}
    response = httpx.post(f"{url}/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        400,
        "unsupported",
        "verbosity",
    )
    assert error["message"].endswith("verbosity, b?")
    body = {"messages": HELLO, "user": "me", "reasoning_effort": "low"}
    assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200


def test_documents_and_effort_reach_the_template(
    served: Served, double: DecodeDouble, text: Text
) -> None:
    double.script = KEEP
    more = {"documents": [{"text": "of old"}], "reasoning_effort": "high"}
    assert told(served, **more) is None
    prompt = double.prompt(text)
    assert prompt.endswith("highof old")
    tokens = httpx.post(f"{served.url}/tokenize", json={"messages": HELLO, **more}).json()["tokens"]
    assert text.decode(tokens, skip_special_tokens=False) == prompt
    assert told(served, reasoning_effort="none") is None
    assert "<think>\n\n</think>" in double.prompt(text)
    told(served, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert "<think>" not in double.prompt(text)


def test_what_a_template_does_not_know_is_told(serve: Serve, directory: Path) -> None:
    double = DecodeDouble(script=KEEP)
    _, url, _ = serve(double, directory=directory)
    for body, expected in (
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"reasoning_effort": "none"}, "reasoning_effort"),
    ):
        response = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO} | body)
        assert (response.status_code, response.headers[HEADER]) == (200, expected)


def test_reasoning_has_both_names_or_is_left_out(
    served: Served, double: DecodeDouble, text: Text, streamed: bool
) -> None:
    answer = text.encode("<think>hm</think>a", add_special_tokens=False)
    double.script = speak(answer)
    for shown in (True, False):
        body = FULL[CHAT] | {"stream": streamed, "include_reasoning": shown}
        response = served.post(CHAT, **body)
        parts = [event["choices"][0]["delta"] for event in events(response)] if streamed else [
            response.json()["choices"][0]["message"]
        ]  # fmt: skip
        for name in ("reasoning", "reasoning_content"):
            assert "".join(part.get(name, "") for part in parts) == ("hm" if shown else "")
            assert shown or not any(name in part for part in parts)
        assert "".join(part.get("content") or "" for part in parts) == "a"


def test_reasoning_that_is_not_told_apart_cannot_be_left_out(serve: Serve, tmp_path: Path) -> None:
    model = make_model(tmp_path, QWEN)
    _, url, _ = serve(DecodeDouble(script=KEEP), reasoning_parser="none", directory=model)
    body = {"messages": HELLO, "include_reasoning": False}
    response = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert response.json()["error"]["param"] == "include_reasoning"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stop_string_can_be_kept(
    served: Served, double: DecodeDouble, text: Text, path: str, streamed: bool
) -> None:
    double.script = speak(text.encode("ab, cd ef", add_special_tokens=False), sizes=(2, 3))
    body = FULL[path] | {"stop": ["d e", "zz"]}
    for keeps, expected in ((False, "ab, c"), (True, "ab, cd e")):
        (choice,), _ = served.told(path, streamed, **body, include_stop_str_in_output=keeps)
        assert (choice["text"], choice["reason"]) == (expected, "stop")


def ids_of(response: httpx.Response, streamed: bool) -> tuple[list[Any], dict[int, list[int]]]:
    """The prompts' ids in the order in which they came, and those of each choice."""
    prompts: list[Any] = []
    ids: dict[int, list[int]] = {}
    for part in events(response) if streamed else [response.json()]:
        for each in (part, *part["choices"]):
            prompts += [each["prompt_token_ids"]] if "prompt_token_ids" in each else []
        for choice in part["choices"]:
            ids[choice["index"]] = ids.get(choice["index"], []) + choice.get("token_ids", [])
    return prompts, ids


def test_token_ids_of_prompts_and_answers(
    served: Served, double: DecodeDouble, text: Text, streamed: bool
) -> None:
    answer = list(text.encode("<think>é 😀</think>ab", add_special_tokens=False))
    double.script = speak(answer, sizes=(2, 1, 3), kept=True)
    wish = {"return_token_ids": True, "stream": streamed}
    found = ids_of(served.post(CHAT, messages=HELLO, n=2, **wish), streamed)
    assert found == ([list(double.take()[1].tokens)], {0: answer, 1: answer})
    found = ids_of(served.post(TEXT, prompt=[[5, 6], [7]], **wish), streamed)
    assert sorted(found[0]) == [[5, 6], [7]]
    assert found[1] == {0: answer, 1: answer}
    assert ids_of(served.post(TEXT, prompt="a", stream=streamed), streamed) == ([], {0: []})
    cut = ids_of(served.post(TEXT, prompt="a", stop="a", **wish), streamed)[1][0]
    assert cut == answer[: len(cut)]
    assert len(cut) < len(answer)


def test_prompts_are_truncated_from_the_left(
    served: Served, double: DecodeDouble, text: Text
) -> None:
    double.script = speak([9], kept=True)
    prompt = [1 + i % 100 for i in range(300)]
    assert served.refusal(TEXT, prompt=prompt)["code"] == "context_length_exceeded"
    for asked, max_tokens, num in ((3, 5, 3), (-1, 7, MAX_MODEL_LEN - 7), (200, None, 200)):
        body: dict[str, Any] = {"truncate_prompt_tokens": asked, "max_tokens": max_tokens}
        response = served.post(TEXT, prompt=prompt, echo=True, **body)
        assert response.status_code == 200, response.text
        assert list(double.take()[1].tokens) == prompt[-num:]
        assert response.json()["choices"][0]["text"].startswith(text.decode(prompt[-num:]))
    assert told(served, truncate_prompt_tokens=4) is None
    assert len(double.take()[1].tokens) == 4
    said = [{"role": "user", "content": json.dumps("a" * 900)}]
    assert served.refusal(CHAT, messages=said)["code"] == "context_length_exceeded"
    assert told(served, messages=said, truncate_prompt_tokens=-1) is None
    assert len(double.take()[1].tokens) == MAX_MODEL_LEN - 1
