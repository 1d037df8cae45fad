"""What clients and agents really send: taken, or refused in the words that they look for."""

import json
from typing import Any

import httpx
import pytest

from router.adapters.items import CONDENSED, MAX_NAME, flat
from router.text.template import AsWritten, ChatTemplate, billless
from router.text.tokenizer import Text
from tests.fault.router_doubles import HELLO, QWEN, DecodeDouble, Served
from tests.support.patience import HANG_S
from worker.api import FinishReason

CHAT, MESSAGES, RESPONSES = "chat/completions", "messages", "responses"
MODEL = (QWEN, ("<tool_call>", "</tool_call>"), 2048)
TOLD = "x-kvlane-unknown-fields"
NO_OBJECTS = (
    '{"city": "Par', '["Paris"]', '{"a": "He said "hello""}', "null", "5", '"text"', "Paris",
    r'{"a": "\ud83d"}', "[" * 99_999,
)  # fmt: skip
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
BILL = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={};"


def asked(path: str, arguments: Any) -> dict[str, Any]:
    """A conversation with a call that has these arguments."""
    if path == RESPONSES:
        call: Any = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
        result: Any = {"type": "function_call_output", "call_id": "c", "output": "no"}
        return {"input": [*HELLO, call, result]}
    if path == MESSAGES:
        call = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
        result = {"type": "tool_result", "tool_use_id": "c", "content": "no"}
        turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        return {"messages": [*HELLO, *turns], "max_tokens": 9}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "no"}
    return {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}, result]}


def told(served: Served, path: str, **body: Any) -> dict[str, Any]:
    response = served.post(path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def by_api(path: str, **more: Any) -> dict[str, Any]:
    """The least body of a path, with these fields."""
    least: dict[str, dict[str, Any]] = {
        RESPONSES: {"input": "hello"}, MESSAGES: {"messages": HELLO, "max_tokens": 9},
    }  # fmt: skip
    return least.get(path, {"messages": HELLO}) | more


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_arguments_that_are_no_object_are_what_the_model_wrote(
    served: Served, double: DecodeDouble, text: Text, path: str
) -> None:
    for arguments in NO_OBJECTS:
        written = arguments if len(arguments) < 999 else arguments[:99]
        double.says(text, "ok")
        told(served, path, **asked(path, written))
        assert f'"arguments": {written}}}\n</tool_call>' in double.prompt(text)


def test_arguments_that_are_no_text_are_taken_too(
    served: Served, double: DecodeDouble, text: Text
) -> None:
    for arguments, written in ((None, "{}"), (["a"], '["a"]'), (5, "5"), ({"a": 1}, '{"a": 1}')):
        double.says(text, "ok")
        told(served, CHAT, **asked(CHAT, arguments))
        assert f'"arguments": {written}}}' in double.prompt(text)


def test_no_way_of_writing_arguments_loses_a_text() -> None:
    ways = ("a | tojson", "a", "a | string", "'' ~ a", "(a | items | list)[0][1]")
    for way in (*ways, "a.items() | map('last') | join", "a if a is string else a | tojson"):
        template = ChatTemplate(f"{{% set a = messages[0].a %}}{{{{ {way} }}}}", {})
        assert template.render([{"a": AsWritten('{"b": "c')}]) == '{"b": "c', way


def test_filters_that_leave_the_likeliest_token_are_greedy(
    served: Served, double: DecodeDouble, text: Text
) -> None:
    for path, name, value in ((CHAT, "top_p", 0), (MESSAGES, "top_p", 0.0), (CHAT, "min_p", 1)):
        double.says(text, "ok")
        told(served, path, **by_api(path, temperature=1, **{name: value}))
        sampling = double.take()[1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0, 1, 0)


@pytest.mark.parametrize("length", [65, 128, 129])
def test_names_of_tools(served: Served, double: DecodeDouble, text: Text, length: int) -> None:
    tool = {"name": "m" * length, "input_schema": {"type": "object"}}
    body = by_api(MESSAGES, tools=[tool])
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        double.says(text, "ok")
        assert served.post(path, **body).status_code == (200 if length <= 128 else 400)


def test_max_tokens_of_a_message_reserve_nothing(
    served: Served, double: DecodeDouble, text: Text
) -> None:
    for max_tokens, reason in ((8192, "model_context_window_exceeded"), (9, "max_tokens")):
        double.says(text, "one", FinishReason.LENGTH)
        made = told(served, MESSAGES, messages=HELLO, max_tokens=max_tokens)
        assert made["stop_reason"] == reason
        generate = double.take()[1]
        left = 2048 - len(generate.tokens)
        assert generate.sampling.max_tokens == min(left, max_tokens)
    assert served.refusal(CHAT, messages=HELLO, max_tokens=8192)["param"] == "max_tokens"


@pytest.mark.parametrize("num", [3000, 30_000])
def test_a_prompt_that_is_too_long_is_told_in_the_words_of_either_api(
    served: Served, num: int
) -> None:
    long = [{"role": "user", "content": "a " * num}]
    for path, body in ((CHAT, {"messages": long}), (RESPONSES, {"input": long})):
        error = served.refusal(path, **body)
        assert error["message"].startswith("This model's maximum context length is 2048 tokens.")
        assert error["code"] == "context_length_exceeded"
    message = served.refusal(MESSAGES, messages=long, max_tokens=1)["message"]
    assert message.startswith("prompt is too long: ")
    assert message.endswith(" tokens > 2048 maximum")


def test_half_a_surrogate_pair_is_named(served: Served) -> None:
    for half in (rb"a\ud83d", rb"\ude00", rb"\ud83d\u0041", b"\xed\xa0\xbd"):
        body = b'{"messages": [{"role": "user", "content": "%b"}]}' % half
        response = httpx.post(f"{served.url}/v1/{CHAT}", content=body, timeout=HANG_S)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "messages.0.content"
        assert "half a surrogate pair" in error["message"]


def test_a_line_of_billing_is_no_part_of_the_prompt(
    served: Served, double: DecodeDouble, text: Text
) -> None:
    prompts = set[str]()
    for cch in ("36ee5", "0aaa9"):
        line = BILL.format(cch)
        blocks = [{"type": "text", "text": each} for each in (line, "be good")]
        said: Any = [{"role": "system", "content": f"{line}\nbe good"}, *HELLO]
        for path, body in (
            (MESSAGES, by_api(MESSAGES, system=blocks)),
            (MESSAGES, by_api(MESSAGES, system=f"{line}\nbe good")),
            (CHAT, {"messages": said, "chat_template_kwargs": {"enable_thinking": False}}),
        ):
            double.says(text, "ok")
            told(served, path, **body)
            prompts.add(double.prompt(text).replace("<think>\n\n</think>\n\n", ""))
    (prompt,) = prompts
    assert "system\nbe good<" in prompt
    double.says(text, "ok")
    told(served, MESSAGES, **by_api(MESSAGES, system=BILL.format("1")))
    assert "system" not in double.prompt(text)
    parts = [{"type": "text", "text": BILL.format(1)}, {"type": "text", "text": "a"}]
    assert billless(parts) == parts[1:]
    assert billless("I bill x-anthropic-billing-header: a") != ""


HOSTED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (CHAT, {"type": "web_search"}, {"type": "web_search"}),
    (RESPONSES, {"type": "web_search", "search_context_size": "low"}, {"type": "web_search"}),
    (RESPONSES, {"type": "mcp", "server_label": "a"}, {"type": "mcp", "server_label": "a"}),
    (MESSAGES, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
     {"type": "tool", "name": "web_search"}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "hosted", "choice"), HOSTED)
def test_hosted_tools_are_dropped_with_a_word_and_refused_if_forced(
    served: Served, double: DecodeDouble, text: Text, path: str, hosted: Any, choice: Any
) -> None:
    own = {CHAT: {"type": "function", "function": {"name": "weather"}}, RESPONSES: WEATHER}
    mine = own.get(path, {"name": "weather", "input_schema": {"type": "object"}})
    for tools in ([hosted], [hosted, mine]):
        double.says(text, "ok")
        response = served.post(path, **by_api(path, tools=tools))
        assert response.status_code == 200, response.text
        assert response.headers[TOLD] == f"tools.{hosted['type']}"
        prompt = double.prompt(text)
        assert hosted["type"] not in prompt
        assert ("weather" in prompt) == (mine in tools)
    any_of = {"type": "any"} if path == MESSAGES else "required"
    for wanted in (choice, any_of):
        error = served.refusal(path, **by_api(path, tools=[hosted], tool_choice=wanted))
        assert "tool_choice" in error["message"]
        assert "run here" in error["message"]


SPACE = {"type": "namespace", "name": "mcp__crm", "description": "Customers.", "tools": [
    WEATHER, {**WEATHER, "name": "find", "description": "finds one"}]}  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
def test_calls_of_a_namespace_come_back_under_their_names(
    served: Served, double: DecodeDouble, text: Text, streamed: bool
) -> None:
    call = '<tool_call>\n{"name": "mcp__crm__find", "arguments": {}}\n</tool_call>'
    double.says(text, call)
    body = {"input": "hello", "tools": [SPACE, {**WEATHER, "name": "mine"}], "stream": streamed}
    response = served.post(RESPONSES, **body)
    assert response.status_code == 200, response.text
    assert TOLD not in response.headers
    if streamed:
        datas = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(data) for data in datas]
        done = [event["item"] for event in events if event["type"].endswith("output_item.done")]
        made = events[-1]["response"]
        assert made["output"] == done
    else:
        made = response.json()
    (item,) = made["output"]
    assert (item["namespace"], item["name"]) == ("mcp__crm", "find")
    prompt = double.prompt(text)
    for part in ("mcp__crm__weather", "mcp__crm: Customers.", "finds one", '"mine"'):
        assert prompt.count(part) == 1
    double.says(text, "ok")
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "no"}
    told(served, RESPONSES, input=[*HELLO, item, result], tools=[SPACE])
    assert '{"name": "mcp__crm__find", "arguments": {}}' in double.prompt(text)


def test_which_functions_of_a_namespace_may_be_called(
    served: Served, double: DecodeDouble, text: Text
) -> None:
    find = {"type": "function", "name": "find"}
    for choice, called, other in (
        (find, "mcp__crm__find", "mcp__crm__weather"),
        (find | {"namespace": "mcp__crm"}, "mcp__crm__find", "mcp__crm__weather"),
        ({"type": "namespace", "name": "mcp__crm"}, "mcp__crm__weather", "mine"),
        ({"type": "allowed_tools", "mode": "required",
          "tools": [{"type": "namespace", "name": "mcp__crm"}]}, "mcp__crm__find", "mine"),
    ):  # fmt: skip
        double.says(text, "ok")
        tools = [SPACE, {**WEATHER, "name": "mine"}]
        told(served, RESPONSES, input="a", tools=tools, tool_choice=choice)
        grammar = double.take()[1].sampling.grammar
        assert called in grammar
        assert other not in grammar
    twice = [SPACE, {**WEATHER, "name": "mcp__crm__find"}]
    assert served.refusal(RESPONSES, input="a", tools=[SPACE, {"type": "function", "name": []}])
    for tools in (twice, [{**SPACE, "tools": [{"type": "mcp"}]}], [{**SPACE, "tools": 5}]):
        param = served.refusal(RESPONSES, input="a", tools=tools)["param"]
        assert param.startswith("tools.0.tools")
    assert len(flat("a" * 100, "b" * 100)) == MAX_NAME


def test_references_to_items_are_resolved(served: Served, double: DecodeDouble, text: Text) -> None:
    double.says(text, "Hi there.")
    (item,) = told(served, RESPONSES, input="hello")["output"]
    double.take()
    for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
        double.says(text, "ok")
        body = {"input": [*HELLO, reference, {"role": "user", "content": "and?"}]}
        again = told(served, RESPONSES, **body)
        prompt = double.prompt(text)
        assert "assistant\nHi there.<|im_end|>\n<|im_start|>user\nand?" in prompt
        double.says(text, "ok")
        more = {"previous_response_id": again["id"], "input": [*body["input"][1:]]}
        told(served, RESPONSES, **more)  # what is kept needs no other response
        assert double.prompt(text).count("Hi there.") == 2
    for name in ("msg_nothing", f"{item['id']}0", ""):
        wrong = {"input": [{"type": "item_reference", "id": name}]}
        response = served.post(RESPONSES, **wrong)
        assert response.status_code == 404
        assert response.json()["error"]["param"] == "input.0.id"


def test_tokens_are_counted_as_they_are_served(
    served: Served, double: DecodeDouble, text: Text
) -> None:
    for more in ({}, {"add_special_tokens": True}):
        double.says(text, "ok")
        usage = told(served, MESSAGES, **by_api(MESSAGES, **more))["usage"]
        counted = told(served, f"{MESSAGES}/count_tokens", messages=HELLO, **more)
        assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
        double.says(text, "ok")
        body: Any = {"input": "hello", "instructions": "a", "tools": [WEATHER], **more}
        made = told(served, RESPONSES, **body)
        counted = told(served, f"{RESPONSES}/input_tokens", **body)
        num = made["usage"]["input_tokens"]
        assert counted == {"object": "response.input_tokens", "input_tokens": num}
        counted = told(served, f"{RESPONSES}/input_tokens", previous_response_id=made["id"])
        assert counted["input_tokens"] > 0
    assert served.refusal(f"{RESPONSES}/input_tokens", model="small")["param"] == "input"


def test_a_conversation_is_condensed(served: Served, double: DecodeDouble, text: Text) -> None:
    double.says(text, "The user greets.")
    said = [*HELLO, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "and?"}]
    made = told(served, f"{RESPONSES}/compact", input=said, tools=[WEATHER])
    prompt = double.prompt(text)
    assert "assistant\nHi.<" in prompt
    assert "Sum up" in prompt
    assert "weather" not in prompt
    assert made["object"] == "response.compaction"
    assert made["usage"]["output_tokens"] > 0
    assert [item["type"] for item in made["output"]] == ["message", "message", "compaction"]
    assert served.post(f"{RESPONSES}/{made['id']}").status_code in (404, 405)
    double.says(text, "ok")
    told(served, RESPONSES, input=[*made["output"], {"role": "user", "content": "go on"}])
    assert double.prompt(text).startswith(
        "<|im_start|>user\nhello\n\nand?<|im_end|>\n<|im_start|>assistant\nThe user greets."
        "<|im_end|>\n<|im_start|>user\ngo on<"
    )
    double.says(text, "")
    assert told(served, f"{RESPONSES}/compact", input=said)["output"] == said
    for path, wrong, param in (
        (RESPONSES, {"input": [{"type": "compaction", "encrypted_content": "gAAAA"}]},
         "input.0.encrypted_content"),
        (f"{RESPONSES}/compact", {"input": "a", "stream": True}, "stream"),
        (f"{RESPONSES}/compact", {}, "input"),
    ):  # fmt: skip
        assert served.refusal(path, **wrong)["param"] == param
    assert CONDENSED not in prompt
