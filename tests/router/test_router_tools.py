"""Tools and reasoning through the HTTP front, in the format that a template says."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.openai.tools import detected
from router.text.reasoning import MARKS as THINKS
from router.text.tokenizer import Text
from tests.fault.router_doubles import (
    HELLO,
    QWEN,
    DecodeDouble,
    Script,
    Serve,
    Served,
    make_model,
    speak,
)
from tests.router.parser_cases import THOUGHT, message
from tests.support.mutants import TOOLS
from tests.support.prompts import accepts, ll_tokenizer
from worker.api import FinishReason, Generate, Stop
from worker.config import ModelConfig

LOOP = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ARGUMENTS = '{"city": "é 😀"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CALL2 = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def text(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Text:
    """Models to which the tags are tokens of their own, and models that spell them."""
    words = ("<tool_call>", "</tool_call>", "<think>", "</think>") if request.param else ()
    return Text(make_model(tmp_path_factory.mktemp("model"), QWEN, words, 2048))


def slowly(tokens: Sequence[int], pause_s: float, finish: FinishReason) -> Script:
    def script(double: DecodeDouble, peer: str, generate: Generate) -> None:
        for i, token in enumerate(tokens):
            double.chunk(peer, generate, [token], at=i)
            time.sleep(pause_s)
        double.chunk(peer, generate, at=len(tokens), finish=finish)

    return script


def grammar_accepts(text: Text, grammar: str, output: str) -> bool:
    return accepts(ll_tokenizer(text.directory, text.vocab_size), grammar, output)


COMPACT = CALL.replace(ARGUMENTS, '{"city":"é 😀"}')
NAMED = {"type": "function", "function": {"name": "time"}}


@pytest.mark.parametrize(
    ("more", "good", "bad"),
    [
        (
            {"tool_choice": "required"},
            [COMPACT, CALL2, f"{COMPACT}\n{CALL2}", f"<think>\nhm\n</think>\n\n{CALL2}"],
            ["hello", CALL2[:-3], CALL2.replace("time", "weather"), CALL2.replace("{}", '{"a":1}')],
        ),
        # of a context of 2048 tokens
        ({"tool_choice": "required"}, ["\n".join([CALL2] * 8)], ["\n".join([CALL2] * 9)]),
        ({"tool_choice": NAMED}, [CALL2], [COMPACT, "a", f"{CALL2}\n{CALL2}"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL2], [f"{CALL2}\n{CALL2}"]),
        (
            {"response_format": {"type": "json_object"}},
            ["{}", CALL2, "<think>a</think>\n\n{}"],
            ["hello"],
        ),
        (
            {"tool_choice": NAMED, "chat_template_kwargs": {"enable_thinking": False}},
            [CALL2],
            [f"<think>a</think>{CALL2}"],
        ),
    ],
    ids=str,
)
def test_demanded_calls_are_constrained(
    served: Served, text: Text, more: Any, good: list[str], bad: list[str]
) -> None:
    served.double.says(text, CALL2, sizes=(3, 1, 2))
    body = {"messages": HELLO, "tools": TOOLS} | more
    response = served.post("chat/completions", **body)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
    grammar = served.double.take()[1].sampling.grammar
    assert [output for output in good if not grammar_accepts(text, grammar, output)] == []
    assert [output for output in bad if grammar_accepts(text, grammar, output)] == []


STRICT = [tool | {"function": tool["function"] | {"strict": True}} for tool in TOOLS]
WRONG = COMPACT.replace('"é 😀"', "1")


@pytest.mark.parametrize(
    ("more", "good", "bad"),
    [
        (
            {},
            ["", "hello", f"I look.\n{COMPACT}\nso", f"{CALL2}\n{COMPACT}", "a {b} </tool_call>",
             f"<think>\nhm {{\n</think>\n\nhi {CALL2}"],
            [WRONG, f"hi {WRONG}", f"{CALL2} {WRONG}", "<tool_call>", f"{CALL2}\n{CALL2[12:]}",
             f"<think>a</think>{WRONG}", f"<think>{WRONG}"],
        ),
        ({"parallel_tool_calls": False}, ["", f"hi {CALL2}"], [f"{CALL2} so", f"{CALL2}{CALL2}"]),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            [CALL2, "<think>", f"<think> {COMPACT}"],
            [f"<think>{WRONG}</think>"],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_call_of_a_strict_function_that_nothing_demands_is_constrained(
    served: Served, text: Text, streamed: bool, more: Any, good: list[str], bad: list[str]
) -> None:
    served.double.says(text, f"I look.\n{COMPACT}", sizes=(3, 1, 2))
    body: Any = {"messages": HELLO, "tools": [STRICT[0], *TOOLS[1:]]} | more
    (choice,), _ = served.told("chat/completions", streamed, **body)
    assert (choice["text"], choice["reason"]) == ("I look.", "tool_calls")
    assert "".join(call["function"]["arguments"] for call in choice["calls"]) == '{"city":"é 😀"}'
    grammar = served.double.take()[1].sampling.grammar
    assert [output for output in good if not grammar_accepts(text, grammar, output)] == []
    assert [output for output in bad if grammar_accepts(text, grammar, output)] == []
    if not more:  # a mark within a thought begins no call
        assert grammar_accepts(text, grammar, f"<think>{WRONG}</think> so")


def test_a_lark_grammar_names_any_added_token(served: Served, text: Text) -> None:
    lark = 'start: <tool_call> "<tool_call>" /<tool_call>/'
    response = served.post("completions", prompt="a", guided_grammar=lark)
    if text.token_of("<tool_call>") is None:
        assert response.status_code == 400
    else:
        grammar = served.double.take()[1].sampling.grammar
        assert grammar_accepts(text, grammar, "<tool_call>" * 3)


def test_calls_that_are_not_told_apart_are_content(serve: Serve, tmp_path: Path) -> None:
    text = Text(make_model(tmp_path, f"{{# ipython #}}{LOOP}"))
    call = '{"name": "time", "parameters": {}}'
    script = speak(text.encode(call, add_special_tokens=False))
    served = serve(DecodeDouble(script=script), tool_parser="none", directory=text.directory)
    body: Any = {"messages": HELLO, "tools": TOOLS}
    error = served.refusal("chat/completions", **body, tool_choice="required")
    assert error["param"] == "tool_choice"
    found = served.post("chat/completions", **body).json()["choices"][0]
    assert found["message"]["content"] == call


def test_no_limit_of_tokens_lets_markup_into_the_content(
    served: Served, text: Text, streamed: bool
) -> None:
    tokens = text.encode(f"I look.\n{CALL}", add_special_tokens=False)
    first = len(text.encode("I look.", add_special_tokens=False))
    for num in range(first, len(tokens), 3):
        served.double.script = speak(tokens[:num], finish=FinishReason.LENGTH)
        (choice,), _ = served.told("chat/completions", streamed, messages=HELLO, tools=TOOLS)
        assert (choice["text"].strip(), choice["reason"]) == ("I look.", "length")


def test_an_answer_of_one_call_ends_with_the_call(
    served: Served, text: Text, streamed: bool
) -> None:
    double = served.double
    double.says(text, f"<think>a</think>\nI look.\n{CALL}\n{CALL2} and so on", sizes=(3, 1, 2))
    body: Any = {"messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False}
    (choice,), usage = served.told("chat/completions", streamed, **body)
    assert (choice["text"], choice["reason"]) == ("I look.", "tool_calls")
    assert "".join(call["function"]["arguments"] for call in choice["calls"]) == ARGUMENTS
    assert {call.get("index", 0) for call in choice["calls"]} == {0}
    generate = double.take()[1]
    stop = double.expect(Stop)
    assert stop.req_id == generate.req_id
    num_tokens = stop.at_position - generate.num_prompt_tokens
    assert usage["completion_tokens"] == num_tokens
    kept = text.encode(f"<think>a</think>\nI look.\n{CALL}\n{CALL2}", add_special_tokens=False)
    assert CALL in text.decode(kept[:num_tokens], skip_special_tokens=False)
    assert CALL not in text.decode(kept[: num_tokens - 1], skip_special_tokens=False)


def test_a_stream_that_says_nothing_yet_is_kept_alive(serve: Serve, text: Text) -> None:
    tokens = text.encode('<tool_call>\n{"arguments": {"a": "' + "b" * 30, add_special_tokens=False)
    body = {"messages": HELLO, "tools": TOOLS, "stream": True}
    double = DecodeDouble(script=slowly(tokens, 0.02, FinishReason.LENGTH))
    _, url, _ = serve(double, sse_ping_s=0.1, directory=text.directory)
    response = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert response.text.count(": ping\n\n") >= 2


TIME = '{"name": "time", "arguments": {}}'
WEATHER = '{"name": "weather", "arguments": {"city":"x"}}'
# What a template of each format has; tokens of its own; an answer of two calls and its grammar's.
FORMATS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "mistral": (
        "[TOOL_CALLS]",
        ("[TOOL_CALLS]",),
        f'[TOOL_CALLS][{TIME[:-1]}, "id": "abcdef123"}}, {WEATHER[:-1]}, "id": "abcdef124"}}]',
    ),
    "mistral11": (
        "[TOOL_CALLS]name[ARGS]",
        ("[TOOL_CALLS]", "[ARGS]"),
        '[TOOL_CALLS]time[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city":"x"}',
    ),
    "granite": ("<|start_of_role|>", ("<|tool_call|>",), f"<|tool_call|>[{TIME}, {WEATHER}]"),
    "phi": ("<|tool|>", (), f"<|tool_call|>[{TIME}, {WEATHER}]<|/tool_call|>"),
    "gemma": ("<start_of_turn>", (), '```tool_code\ntime()\nweather(city="x")\n```'),
    "llama3": ("ipython", (), f"{TIME}; {WEATHER}".replace("arguments", "parameters")),
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
    assert (detected(text.template_source).name, detected("x").name) == (form, "hermes")
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


def test_the_bundled_latent_model_s_thoughts_and_calls_are_told_apart(serve: Serve) -> None:
    text = Text(ModelConfig(path="tiny-latent").directory)
    call = "<tool_call>weather<arg_key>city</arg_key><arg_value>x</arg_value></tool_call>"
    said = f"I call weather.</think>{call}"
    served = answering(serve, text, said)
    for more in ({}, {"tool_choice": "required"}):
        served.double.says(text, f"{said}<|observation|>")
        body: dict[str, Any] = {"messages": HELLO, "tools": TOOLS, **more}
        choice = served.post("chat/completions", **body).json()["choices"][0]
        made = choice["message"]
        called = [each["function"] for each in made["tool_calls"]]
        assert [(each["name"], json.loads(each["arguments"])) for each in called] == [
            ("weather", {"city": "x"})
        ]
        assert (made["reasoning_content"], made["content"] or "") == ("I call weather.", "")
        assert choice["finish_reason"] == "tool_calls"
        asked = served.double.take()[1]
    assert text.decode(asked.tokens, skip_special_tokens=False).endswith("<|assistant|><think>")
    assert grammar_accepts(text, asked.sampling.grammar, said)
    assert not grammar_accepts(text, asked.sampling.grammar, "I call.</think>no call")


def test_harmony_is_told_apart_and_its_calls_are_constrained(serve: Serve, tmp_path: Path) -> None:
    words = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
    source = f"{{# <|channel|> #}}{LOOP}<|start|>assistant"
    text = Text(make_model(tmp_path, source, words, 2048))
    assert detected(text.template_source).name == "harmony"
    final = f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>so"
    served = answering(serve, text, final)
    found = served.post("chat/completions", messages=HELLO).json()["choices"][0]["message"]
    assert (found["content"], found["reasoning_content"]) == ("so", "why < so")
    assert found["reasoning"] == found["reasoning_content"]
    call = message("commentary", '{"city":"x"}', "", "weather")
    told = message("commentary", "I look.") + "<|start|>assistant"
    wrong, thought = call.replace('"x"', "1"), f"{THOUGHT}<|start|>assistant"
    body: dict[str, Any] = {"messages": HELLO, "tools": STRICT}
    form = {"response_format": {"type": "json_object"}, "tools": []}
    final_json = final.replace(">so", ">{}")
    for more, good, bad in (
        ({"tool_choice": "required"}, [call, thought + call, told + call], [final, wrong, "so"]),
        ({}, [call, thought + told + call, final], [thought + wrong, "so", ""]),
        (form, [final_json, final_json[len(thought) :]], [final, "{}"]),
    ):
        served.double.says(text, thought + call)
        choice = served.post("chat/completions", **body | more).json()["choices"][0]
        if more is not form:
            called = choice["message"]["tool_calls"][0]["function"]
            assert (called["name"], called["arguments"]) == ("weather", '{"city":"x"}')
        grammar = served.double.take()[1].sampling.grammar
        assert [output for output in good if not grammar_accepts(text, grammar, output)] == []
        assert [output for output in bad if grammar_accepts(text, grammar, output)] == []
    response = served.post("chat/completions", **body, min_tokens=1)
    assert response.headers["x-kvlane-unknown-fields"] == "tools.strict"


def test_harmony_s_reasoning_is_apart_in_responses_and_messages(
    serve: Serve, tmp_path: Path
) -> None:
    words = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
    source = f"{{# <|channel|> #}}{LOOP}<|start|>assistant"
    text = Text(make_model(tmp_path, source, words, 2048))
    begun = f"{THOUGHT}<|start|>assistant"
    final, call = message("final", "so", ""), message("commentary", '{"city":"x"}', "", "weather")
    served = answering(serve, text, begun + final)
    tools = [{"type": "function", **TOOLS[0]["function"]}]
    about = {"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}
    for said, kinds, parts in (
        (final, ["reasoning", "message"], ["thinking", "text"]),
        (call, ["reasoning", "function_call"], ["thinking", "tool_use"]),
    ):
        served.double.says(text, begun + said, sizes=(1, 5))  # drafts: several tokens a step
        made = served.post("responses", input="hi", tools=tools).json()["output"]
        assert [each["type"] for each in made] == kinds
        assert made[0]["content"][0]["text"] == "why < so"
        body = {"messages": HELLO, "max_tokens": 99, "tools": [about]}
        made = served.post("messages", **body).json()["content"]
        assert [each["type"] for each in made] == parts
        assert made[0]["thinking"] == "why < so"
        assert made[1].get("input", {"city": "x"}) == {"city": "x"}


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
