"""The formats of calls and reasoning through the HTTP front: as the template says, and demanded."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.openai.tools import detected
from router.text.reasoning import MARKS as THINKS
from router.text.tokenizer import Text
from tests.fault.router_doubles import HELLO, DecodeDouble, Serve, Served, make_model
from tests.router.parser_cases import THOUGHT
from tests.router.test_router_tools import grammar_accepts
from tests.support.mutants import TOOLS

LOOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TIME = '{"name": "time", "arguments": {}}'
WEATHER = '{"name": "weather", "arguments": {"city":"x"}}'
# What a template of each format has; tokens of its own; an answer of two calls and its grammar's.
FORMATS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "mistral": ("[TOOL_CALLS]", ("[TOOL_CALLS]",), f"[TOOL_CALLS][{TIME}, {WEATHER}]"),
    "mistral11": (
        "[TOOL_CALLS]name[ARGS]",
        ("[TOOL_CALLS]", "[ARGS]"),
        '[TOOL_CALLS]time[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city":"x"}',
    ),
    "granite": ("<|start_of_role|>", ("<|tool_call|>",), f"<|tool_call|>[{TIME}, {WEATHER}]"),
    "phi": ("<|tool|>", (), f"<|tool_call|>[{TIME}, {WEATHER}]"),
    "gemma": ("<start_of_turn>", (), f"```tool_code\n{TIME}\n{WEATHER}\n```"),
    "glm": ("[gMASK]", (), 'weather\n{"city":"x"}'),
}


def answering(serve: Serve, text: Text, answer: str) -> Served:
    served = serve(DecodeDouble(), directory=text.directory)
    served.double.says(text, answer, sizes=(1, 2))
    return served


@pytest.mark.parametrize("form", FORMATS)
def test_the_template_says_the_format_and_a_demanded_call_keeps_to_it(
    form: str, serve: Serve, tmp_path: Path
) -> None:
    sign, words, answer = FORMATS[form]
    text = Text(make_model(tmp_path, f"{{# {sign} #}}{LOOP}", words, 2048))
    assert detected(text.template_source) == form
    double, url, _ = answering(serve, text, answer)
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
    found = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]
    calls = [each["function"] for each in found["message"]["tool_calls"]]
    wanted = [("time", {}), ("weather", {"city": "x"})][form == "glm" :]
    assert [(each["name"], json.loads(each["arguments"])) for each in calls] == wanted
    assert not found["message"]["content"]
    assert found["finish_reason"] == "tool_calls"
    grammar = double.take()[1].sampling.grammar
    assert grammar_accepts(text, grammar, answer)
    assert not grammar_accepts(text, grammar, "no call")


def test_harmony_is_told_apart_without_tools(serve: Serve, tmp_path: Path) -> None:
    words = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>")
    text = Text(make_model(tmp_path, f"{{# <|channel|> #}}{LOOP}", words, 2048))
    assert detected(text.template_source) == "harmony"
    answer = f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>so"
    _, url, _ = answering(serve, text, answer)
    body: dict[str, Any] = {"messages": HELLO}
    found = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert (found["content"], found["reasoning_content"]) == ("so", "why < so")
    assert found["reasoning"] == found["reasoning_content"]
    body |= {"tools": TOOLS, "tool_choice": "required"}
    refused = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize("whose", ["mistral", "seed_oss"])
def test_reasoning_of_other_marks_is_told_apart(whose: str, serve: Serve, tmp_path: Path) -> None:
    marks = THINKS[whose]
    text = Text(make_model(tmp_path, f"{{# {marks[0]} #}}{LOOP}", marks, 2048))
    double, url, _ = answering(serve, text, f"{marks[0]}why{marks[1]}\nso")
    body: dict[str, Any] = {"messages": HELLO, "response_format": {"type": "json_object"}}
    found = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert (found["content"], found["reasoning_content"]) == ("so", "why")
    grammar = double.take()[1].sampling.grammar
    assert grammar_accepts(text, grammar, f"{marks[0]}why{marks[1]}{{}}")
    assert not grammar_accepts(text, grammar, "why")
