"""Chat templates by name, and what goes into them; `transformers` is asked in equivalence tests."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from router.dispatch.members import Members
from router.errors import ApiError
from router.openai.chat import rendered
from router.openai.prepare import ChatBody, parse
from router.openai.served import Served
from router.openai.tools import tools_of
from router.text.grammar import Validator
from router.text.template import ChatTemplate
from router.text.tokenizer import Text
from tests.fault.router_doubles import make_model
from worker.config.checkpoint.tokens import read_tokens
from worker.errors import UserError

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
USER = [{"role": "user", "content": "hi"}]
SHOWS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def made(path: Path, **named: Any) -> Path:
    """A model directory; `named`: of its tokenizer_config.json."""
    directory = make_model(path)
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return directory


def shown(text: Text, messages: list[dict[str, Any]], *tools: Any, **body: Any) -> str:
    asked = {"messages": messages} | ({"tools": tools} if tools else {}) | body
    chat = parse(ChatBody, json.dumps(asked).encode())
    return rendered(chat.messages, chat, tools_of(chat).given, text)


def of_template(path: Path, source: str) -> Text:
    return Text(made(path, chat_template=source))


def test_one_alone_is_used_whatever_its_name(tmp_path: Path) -> None:
    for name in ("rag", "tool_use", "default"):
        text = Text(made(tmp_path / name, chat_template=[{"name": name, "template": "{{ 7 }}"}]))
        assert (shown(text, USER), shown(text, USER, TOOL)) == ("7", "7")
        assert text.template_source == "{{ 7 }}"


def test_several_without_a_default_need_one(tmp_path: Path) -> None:
    text = Text(made(tmp_path, chat_template={"rag": "r", "tool_use": "{{ tools[0].type }}"}))
    assert shown(text, USER, TOOL) == "function"
    with pytest.raises(UserError, match=r"no default among its chat templates \(rag, tool_use\)"):
        shown(text, USER)
    with pytest.raises(UserError, match="no chat template; use /v1/completions"):
        shown(Text(made(tmp_path / "none", chat_template="")), USER)


def test_a_folder_without_a_default_stands_beside_the_other_files(tmp_path: Path) -> None:
    directory = made(tmp_path, chat_template="plain")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    text = Text(directory)
    assert (shown(text, USER), shown(text, USER, TOOL)) == ("plain", "tools")
    (directory / "chat_template.jinja").write_text("file")
    assert shown(Text(directory), USER) == "file"


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_files_of_multimodal_models_are_the_last_resort(tmp_path: Path, name: str) -> None:
    directory = made(tmp_path)
    (directory / name).write_text('{"chat_template": "older"}')
    assert shown(Text(directory), USER) == "older"
    (directory / "tokenizer_config.json").write_text('{"chat_template": "newer"}')
    assert shown(Text(directory), USER) == "newer"


@pytest.mark.parametrize("value", [7, ["a"], [{"name": "a"}], {"a": 7}, [{"template": "b"}]])
def test_what_is_no_template_is_refused_by_its_field(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UserError, match=r"tokenizer_config\.json: chat_template: must be a text"):
        Text(made(tmp_path, chat_template=value))


def test_each_template_has_its_own_role_of_developers(tmp_path: Path) -> None:
    text = Text(
        made(tmp_path, chat_template={"default": SHOWS, "tool_use": SHOWS + "{# developer #}"})
    )
    messages = [{"role": "developer", "content": "a"}, *USER]
    assert shown(text, messages).startswith("<system>")
    assert shown(text, messages, TOOL).startswith("<developer>")
    assert "developer" in text.template_source


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
CUSTOM = {"id": "2", "type": "custom", "custom": {"name": "g", "input": "é"}}
AS_TEXT = SHOWS.replace(
    "{% endfor %}",
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{% endfor %}",
)


def test_arguments_are_what_the_client_wrote_where_the_template_adds_strings(
    tmp_path: Path,
) -> None:
    text = of_template(tmp_path, AS_TEXT)
    assert text.probe.as_text
    bare = CALL | {"function": {"name": "h", "arguments": " "}}
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL, CUSTOM, bare]}
    assert shown(text, [*USER, turn]).endswith('<assistant>f{"a":  1}g{"input": "é"}h{}')


@pytest.mark.parametrize(
    ("test", "right"), [("m.content is none", "null"), ("m.content is not defined", "absent")]
)
def test_content_beside_calls_is_what_the_template_asks_for(
    tmp_path: Path, test: str, right: str
) -> None:
    calls = "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
    source = "{% for m in messages %}{% if " + test + " %}" + calls + "{% else %}{{ m.content }};"
    text = of_template(tmp_path, source + "{% endif %}{% endfor %}")
    assert text.probe.content == right
    for content in ({"content": None}, {"content": ""}, {"content": []}, {}):
        turn = {"role": "assistant", **content, "tool_calls": [CALL]}
        assert shown(text, [*USER, turn]) == "hi;f"
    said = {"role": "assistant", "content": "so", "tool_calls": [CALL]}
    assert text.probe.drops_calls
    assert shown(text, [*USER, said]) == "hi;f", "rather the text is lost than the call"
    assert shown(text, [*USER, {"role": "assistant", "content": None}]) == "hi;;"


def test_a_thought_stays_out_where_the_template_refuses_it_beside_text_and_calls(
    tmp_path: Path,
) -> None:
    refuses = "{% if m.content and m.thinking and m.tool_calls %}{{ raise_exception('both') }}"
    source = "{% for m in messages %}" + refuses + "{% endif %}({{ m.thinking }}){{ m.content }}"
    text = of_template(tmp_path, source + "{% endfor %}")
    assert not text.probe.thinks_beside
    turn = {"role": "assistant", "reasoning": "t", "content": "c", "tool_calls": [CALL]}
    assert shown(text, [*USER, turn]) == "()hi()c"
    assert shown(text, [*USER, turn | {"content": ""}]) == "()hi(t)"
    assert shown(text, [*USER, turn | {"tool_calls": []}]) == "()hi(t)c"


PARTS = [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "b"}]
ITERATES = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %};{% endfor %}"


def test_a_template_that_loses_strings_gets_parts(tmp_path: Path) -> None:
    text = of_template(tmp_path, ITERATES)
    assert (
        shown(text, [*USER, {"role": "assistant", "content": PARTS}, *USER]) == "[hi];[a][b];[hi];"
    )
    prefix = shown(text, [*USER, {"role": "assistant", "content": PARTS}],
                   continue_final_message=True)  # fmt: skip
    assert prefix == "[hi];[a][b"


def test_a_template_that_prints_parts_gets_a_string(tmp_path: Path) -> None:
    text = of_template(tmp_path, SHOWS)
    turn = {"role": "assistant", "content": PARTS}
    assert shown(text, [*USER, turn]) == "<user>hi<assistant>a\nb"
    assert shown(text, [*USER, turn], continue_final_message=True) == "<user>hi<assistant>a\nb"
    with pytest.raises(UserError, match="image_url"):
        shown(text, [{"role": "user", "content": [{"type": "image_url"}]}])


def test_a_probe_is_made_with_the_tools_template(tmp_path: Path) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments }}"
    uses = SHOWS.replace("{% endfor %}", calls + "{% endfor %}{% endfor %}")
    text = Text(made(tmp_path, chat_template={"default": SHOWS, "tool_use": uses}))
    assert text.probe.num_calls == 2
    assert ChatTemplate(SHOWS, {}).probe.num_calls == 0


def test_what_was_mended_is_told_once_and_holds_for_grammars(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = made(tmp_path, extra_special_tokens=["<|tool|>"])
    path = directory / "tokenizer.json"
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation": cut}))
    with caplog.at_level(logging.INFO, "kvlane.tokenizer"):
        text = Text(directory)
    (line,) = [line for line in caplog.messages if "switched off" in line]
    assert str(directory) in line
    assert "truncation of tokenizer.json: switched off" in line
    assert "'<|tool|>'" in line
    token = text.token_of("<|tool|>")
    assert token is not None
    assert text.encode("a<|tool|>", add_special_tokens=False)[-1] == token
    validator = Validator(directory, text.vocab_size)
    lark = "start: /[a-z]{9}/ <|tool|>"
    assert validator.check(json.dumps({"grammars": [{"lark_grammar": lark}]}), "x") == ()


def test_a_token_that_the_model_has_not_is_refused_in_prompts(tmp_path: Path) -> None:
    directory = made(tmp_path, chat_template=SHOWS, pad_token="[PAD]")
    size = Text(directory).token_of("[PAD]")
    assert size is not None
    (directory / "config.json").write_text(json.dumps({"vocab_size": size}))
    text = Text(directory)
    assert text.unknown_ids == {size: "[PAD]"}
    served = Served("m", text, None, Members(), 1 << 20)  # type: ignore[arg-type]
    assert served.encode("hi", "prompt", adds=False)
    with pytest.raises(ApiError, match=rf"prompt: .*'\[PAD\]'.*vocab_size of {size}"):
        served.encode("hi [PAD]", "prompt", adds=False)
    Validator(directory, size).require("x")  # its grammars know nothing of them


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"eos_token": 5}, "eos_token: must be a token, not 5"),
        ({"eos_token": {"text": "a"}}, "eos_token: must be a token"),
        ({"extra_special_tokens": [5]}, "extra_special_tokens: must be a token"),
        ({"extra_special_tokens": "a"}, "extra_special_tokens: must be a list"),
        ({"added_tokens_decoder": {"a": {"content": "b"}}}, "added_tokens_decoder.a: must be a"),
        ({"added_tokens_decoder": {"1": "b", "2": 7}}, "added_tokens_decoder.2: must be a token"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder: must be an object"),
        ({"split_special_tokens": True}, "split_special_tokens: .*set it to false"),
    ],
)
def test_malformed_tokens_are_refused_by_their_field(
    tmp_path: Path, named: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=rf"tokenizer_config\.json: {words}"):
        read_tokens(made(tmp_path, **named))


def test_a_template_that_refuses_a_tool_gets_it_with_what_it_leaves_out() -> None:
    made = ChatTemplate(
        "{% for t in tools %}{{ t.function.description | tojson }}"
        "{{ t.function.parameters.properties | tojson }}{% endfor %}",
        {},
    )
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "a"}},
        {"type": "function", "function": {"name": "b", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "c", "description": "C", "parameters": {}}},
    ]
    assert made.render([], tools=tools) == '""{}""{}"C"{}'
    assert ChatTemplate("{{ tools }}", {}).render([], tools=tools) == str(tools)
