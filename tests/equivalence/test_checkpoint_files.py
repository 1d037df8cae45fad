"""Tokens and prompts of a model directory, whatever its files hold, are those of `transformers`."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from router.openai.chat import rendered
from router.openai.prepare import ChatBody, parse
from router.openai.tools import tools_of
from router.text.tokenizer import Text
from tests.support.prompts import TINY
from worker.config import ModelConfig, WorkerConfig
from worker.config.checkpoint.tokens import EOS, eos_ids, read_tokens
from worker.errors import UserError
from worker.start.build import _read_shape

VOCAB = 1024  # of TINY
NAMED = json.loads((TINY / "tokenizer_config.json").read_text()) | {"chat_template": None}
TOKENIZER = json.loads((TINY / "tokenizer.json").read_text())
KINDS = ("bos", "unk", "sep", "cls", "mask", "pad", "eos")
MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
PADDING = {
    "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": 8, "pad_id": 0,
    "pad_type_id": 0, "pad_token": "<|pd|>",
}  # fmt: skip
TRUNCATION = {"direction": "Right", "max_length": 6, "strategy": "LongestFirst", "stride": 0}
LEFT = TRUNCATION | {"direction": "Left", "strategy": "OnlySecond", "stride": 2}
BEGINS = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<b>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<b>": {"id": "<b>", "ids": [1], "tokens": ["<|im_start|>"]}},
}  # fmt: skip


def token(content: str, *, special: bool = True, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"content": content, "special": special, **plain, **flags}


def typed(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **token(content, **flags)}


def decoder(**tokens: Mapping[str, Any]) -> dict[str, Any]:
    return {"added_tokens_decoder": {name[1:]: each for name, each in tokens.items()}}


def flat(content: str, **flags: bool) -> dict[str, Any]:
    return {name: each for name, each in token(content, **flags).items() if name != "special"}


# By name: what differs in tokenizer_config.json, tokenizer.json, and other files. `...`: absent.
FILES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "as it is": ({}, {}, {}),
    "decoder": (decoder(_1024=token("<|tool|>")), {}, {}),
    "decoder, ids apart": (decoder(_1100=token("<|b|>"), _1050=token("<|a|>")), {}, {}),
    "decoder, not special": (decoder(_1024=token("<|tool|>", special=False)), {}, {}),
    "decoder, normalized": (
        decoder(_1024=token("<|tool|>", special=False, normalized=True)), {}, {}
    ),
    "decoder, strips": (decoder(_1024=token("<|tool|>", lstrip=True, rstrip=True)), {}, {}),
    "decoder, one word": (decoder(_1024=token("zq", single_word=True)), {}, {}),
    "decoder, other flags": (decoder(_1=token("<|im_start|>", special=False, rstrip=True)), {}, {}),
    "decoder, other id": (decoder(_7=token("<|im_start|>")), {}, {}),
    "decoder, an end that is not special": (decoder(_2=token("<|im_end|>", special=False)), {}, {}),
    "decoder, of the vocabulary": (decoder(_300=token(" apples"), _301=token("Tom")), {}, {}),
    "decoder in place of the map": ({"added_tokens_decoder": {}}, {}, {MAP: {"bos_token": "<B>"}}),
    "decoder in place of added": (decoder(_1024=token("<|tool|>")), {}, {ADDED: {"<|x|>": 1025}}),
    "additional": ({"additional_special_tokens": ["<|tool|>", "<|im_end|>"]}, {}, {}),
    "additional objects": (
        {"additional_special_tokens": [typed("<|tool|>", lstrip=True)]}, {}, {}
    ),
    "additional null": ({"additional_special_tokens": None}, {}, {}),
    "extra": ({"extra_special_tokens": ["<|x|>", "<|y|>"]}, {}, {}),
    "extra and additional": (
        {"extra_special_tokens": ["<|x|>"], "additional_special_tokens": ["<|y|>"]}, {}, {}
    ),
    "extra by names": (
        {"extra_special_tokens": {"image_token": "<img>", "foo": "<foo>"}}, {}, {}
    ),
    "names of its own": (
        {"image_token": typed("<img>"), "boi_token": "<boi>", "a_token": {"a": 1}, "b_token": None},
        {}, {},
    ),
    "as transformers 5 saves them": (
        {
            "model_specific_special_tokens": {"image_token": "<img>", "foo": "<foo>"},
            "foo": "<foo>", "extra_special_tokens": ["<|x|>"],
        }, {}, {},
    ),
    "as it saves them, and once more": (
        {"model_specific_special_tokens": {"foo": "<foo>"}, "image_token": "<img>"}, {}, {}
    ),
    "extra by a usual name": ({"extra_special_tokens": {"bos_token": "<bos>"}}, {}, {}),
    "mask, which strips": ({"mask_token": typed("<mask>", lstrip=True)}, {}, {}),
    "all names": (
        {f"{name}_token": f"<{name}>" for name in KINDS},
        {}, {},
    ),
    "eos an object": ({"eos_token": typed("<|im_end|>")}, {}, {}),
    "eos null": ({"eos_token": None}, {}, {}),
    "eos absent": ({"eos_token": ...}, {}, {}),
    "map": ({}, {}, {MAP: {"bos_token": "<B>", "eos_token": flat("<E>", lstrip=True)}}),
    "map, eos null": ({}, {}, {MAP: {"eos_token": None}}),
    "map, additional": (
        {"additional_special_tokens": ...}, {}, {MAP: {"additional_special_tokens": ["<|q|>"]}}
    ),
    "map, additional in both": ({}, {}, {MAP: {"additional_special_tokens": ["<|q|>"]}}),
    "map, extra": ({}, {}, {MAP: {"extra_special_tokens": ["<|q|>", flat("<|r|>")]}}),
    "map, extra by names": ({}, {}, {MAP: {"extra_special_tokens": {"image_token": "<img>"}}}),
    "map, names of its own": (
        {"image_token": "<other>", "boi_token": "<boi>"}, {},
        {MAP: {"image_token": "<img>", "eoi_token": "<eoi>"}},
    ),
    "added": ({}, {}, {ADDED: {"<|x|>": 1024, "<|a|>": 1030, "</s>": 1029}}),
    "added, special by name": (
        {"eos_token": "<|x|>", "additional_special_tokens": ["<|y|>"]}, {},
        {ADDED: {"<|y|>": 1025, "<|x|>": 1024}},
    ),
    "added, old ones": ({}, {}, {ADDED: {"<|im_start|>": 1025, "<|im_end|>": 0}}),
    "added and map": ({}, {}, {ADDED: {"<|y|>": 1025, "<B>": 1026}, MAP: {"bos_token": "<B>"}}),
    "truncation": ({}, {"truncation": TRUNCATION}, {}),
    "truncation, left": ({}, {"truncation": LEFT}, {}),
    "padding": ({}, {"padding": PADDING}, {}),
    "padding names a token": ({"pad_token": ...}, {"padding": PADDING}, {}),
    "padding, pad null": (
        {"pad_token": None}, {"padding": PADDING | {"strategy": "BatchLongest"}}, {}
    ),
    "all at once": (
        decoder(_1030=token("<|tool|>")), {"truncation": LEFT, "padding": PADDING}, {}
    ),
    "flags that add tokens": (
        {"add_bos_token": True, "add_eos_token": True, "bos_token": "<|im_start|>"}, {}, {}
    ),
    "a beginning, and a flag against it": (
        {"add_bos_token": False, "bos_token": "<|im_start|>"}, {"post_processor": BEGINS}, {}
    ),
}  # fmt: skip
TEXTS = (
    "a <|tool|> b", "x<|a|>y <|b|>", "azq zq b", "<|im_start|> hi <|im_end|> Tom has 3 apples",
    "<B> x <E>  <|q|> <|r|> <|x|> <|y|>", "<img> <foo> <boi> <eoi> <other> <mask> <s> </s> <unk>",
    "<pad> <sep> <cls> <bos> <eos> <|pd|> <P>", "the cat sat on the mat " * 9,
)  # fmt: skip
SHOWN = "|".join(f"{{{{ {name}_token }}}}" for name in (*KINDS, "image", "boi", "a"))


def made(
    path: Path, named: Mapping[str, Any], files: Mapping[str, str], **tokenizer: Any
) -> Path:  # fmt: skip
    """A model directory with these files beside its own."""
    shutil.copy(TINY / "config.json", path)
    (path / "tokenizer.json").write_text(json.dumps(TOKENIZER | tokenizer))
    held = {name: each for name, each in (NAMED | named).items() if each is not ...}
    (path / "tokenizer_config.json").write_text(json.dumps(held))
    for name, text in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text)
    return path


def by_transformers(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def described(tokens: Mapping[int, Any]) -> dict[int, tuple[Any, ...]]:
    names = ("content", "special", "lstrip", "rstrip", "normalized", "single_word")
    return {i: tuple(getattr(token, name) for name in names) for i, token in tokens.items()}


@pytest.mark.parametrize("kind", FILES)
def test_tokens_are_those_of_all_files(kind: str, tmp_path: Path) -> None:
    named, tokenizer, others = FILES[kind]
    files = {name: json.dumps(each) for name, each in others.items()}
    path = made(tmp_path, named | {"chat_template": SHOWN}, files, **tokenizer)
    right, text, tokens = by_transformers(path), Text(path), read_tokens(path)
    assert described(text._tokenizer.get_added_tokens_decoder()) == described(
        right.added_tokens_decoder
    )
    for each in TEXTS:
        for adds in (False, True):
            ids = right(each, add_special_tokens=adds)["input_ids"]
            assert list(text.encode(each, add_special_tokens=adds)) == ids, each
    message = [{"role": "user", "content": ""}]
    assert text.render(message) == right.apply_chat_template(message, tokenize=False)
    assert tokens.file.id_of(tokens.named.get(EOS, "")) == right.eos_token_id
    end = right.eos_token_id
    assert eos_ids(path, 1 << 20) == (() if end is None else (end,))
    assert eos_ids(path, VOCAB) == (() if end is None or end >= VOCAB else (end,))


def test_the_tokenizers_end_ends_an_answer_too(tmp_path: Path) -> None:
    path = made(
        tmp_path, {"eos_token": "<|im_start|>"}, {"generation_config.json": '{"eos_token_id": [0]}'}
    )
    config = json.loads((path / "config.json").read_text())
    for given, right in ((2, (2, 0, 1)), (None, (0, 1)), ([1, 5], (1, 5, 0))):
        (path / "config.json").write_text(json.dumps(config | {"eos_token_id": given}))
        model = ModelConfig(path=str(path), load_format="dummy")
        configured = WorkerConfig(role="decode", model=model)
        assert _read_shape(configured).eos_token_ids == right


def tool(name: str) -> dict[str, Any]:
    text = {"type": "string", "description": "é <text>"}
    schema = {"type": "object", "properties": {"q": text}, "required": ["q"]}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


TOOLS = [tool("first"), tool("second")]
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
USES = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}" + PLAIN
JINJA, FOLDER = "chat_template.jinja", "additional_chat_templates"
BOTH = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": USES}]
RAG = {"name": "rag", "template": "rag"}
# `chat_template` of tokenizer_config.json, and other files.
TEMPLATES: dict[str, tuple[Any, dict[str, str]]] = {
    "one": (USES, {}),
    "a list": ([RAG, *BOTH], {}),
    "a list without a default": ([RAG, BOTH[1]], {}),
    "an object": ({"default": PLAIN, "tool_use": USES, "rag": "rag"}, {}),
    "tool_use alone": ([BOTH[1]], {}),
    "default alone": ({"default": USES}, {}),
    "a file": (None, {JINJA: USES}),
    "a file and a list": (BOTH, {JINJA: USES + "!"}),
    "a file and a folder": (None, {JINJA: PLAIN, f"{FOLDER}/tool_use.jinja": USES}),
    "a folder": (None, {f"{FOLDER}/default.jinja": PLAIN, f"{FOLDER}/tool_use.jinja": USES}),
    "a folder and a list": (BOTH, {f"{FOLDER}/default.jinja": "folder"}),
    "a folder before a file": (None, {JINJA: PLAIN, f"{FOLDER}/default.jinja": USES}),
}


def ours(path: Path, messages: list[dict[str, Any]], tools: Any = (), **body: Any) -> str:
    """As the API renders it, calls with their arguments as a string."""
    messages = json.loads(json.dumps(messages))
    for call in (call for message in messages for call in message.get("tool_calls") or []):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    asked = {"messages": messages} | body | ({"tools": list(tools)} if tools else {})
    chat = parse(ChatBody, json.dumps(asked).encode())
    return rendered(chat.messages, chat, tools_of(chat).given, Text(path))


def theirs(path: Path, messages: list[dict[str, Any]], tools: Any = ()) -> str:
    tokenizer = by_transformers(path)
    how: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    return tokenizer.apply_chat_template(messages, tools=list(tools) or None, **how)


@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_template_is_the_one_that_transformers_takes(kind: str, tmp_path: Path) -> None:
    named, files = TEMPLATES[kind]
    path = made(tmp_path, {"chat_template": named}, files)
    messages = [{"role": "user", "content": "hi"}]
    for tools in ((), TOOLS):
        with suppress(ValueError):  # it has no default
            assert ours(path, messages, tools) == theirs(path, messages, tools)


EXPRESSIONS = (
    "tools | tojson", "tools | tojson(indent=4)", "tools | tojson(separators=(',', ':'))",
    "tools | tojson(separators=(',', ': '), indent=2)", 
    "'é' | tojson(true)", "'é' | tojson(false, 2)",
    "tools | tojson(ensure_ascii=True, sort_keys=True)",
    "tools | tojson(False, None, (';', '='), True)",
    "'<&>\\'' | tojson", "messages | tojson | length", "1.5 | tojson", "none | tojson",
)  # fmt: skip


def test_tojson_has_the_options_of_transformers(tmp_path: Path) -> None:
    source = "\n".join(f"{{{{ {each} }}}}" for each in EXPRESSIONS)
    path = made(tmp_path, {"chat_template": source}, {})
    messages = [{"role": "user", "content": "hi"}]
    assert ours(path, messages, TOOLS) == theirs(path, messages, TOOLS)


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


IF_TEXT = "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content | trim }}"
EACH = "{% for p in m.content %}{% if p.type == 'text' %}"
ENDS = "{% endif %}{% endfor %}{% endif %}{% endfor %}"
ITERATING = (
    IF_TEXT + "{% else %}" + EACH + "{{ p.text }}" + ENDS,
    IF_TEXT
    + "{% else %}"
    + EACH
    + "{{ p['text'] | trim }} {{ p.cache_control is defined }}"
    + ENDS,
    IF_TEXT + "{% elif m.content is iterable %}" + EACH + "{{ p.text + '\n' }}" + ENDS,
)
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": parts(" one ", "two")}],
    [{"role": "user", "content": parts("one")}],
    [{"role": "user", "content": []}],
    [{"role": "user", "content": [{**parts("a")[0], "cache_control": {"type": "ephemeral"}}]}],
    [{"role": "system", "content": parts("be", "brief")}, {"role": "user", "content": " hi "}],
    [
        {"role": "user", "content": parts("a")},
        {"role": "assistant", "content": parts("b ", "c")},
        {"role": "tool", "content": parts("d", "e"), "tool_call_id": "1"},
    ],
]


@pytest.mark.parametrize("source", ITERATING)
def test_parts_go_to_templates_that_iterate(source: str, tmp_path: Path) -> None:
    path = made(tmp_path, {"chat_template": source}, {})
    for messages in CHATS:
        assert ours(path, messages) == theirs(path, messages)


CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "first", "arguments": {"q": "é"}},
}
NO_ARGUMENTS = CALL | {"function": {"name": "second", "arguments": {}}}
WRITES = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}[{{ m.reasoning_content }}]"
    "{% endif %}{{ m.thinking }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{{ c.id }}{% endfor %}"
    "{{ m.refusal }}{{ m.name }}{% endfor %}"
)


THOUGHTS: tuple[dict[str, Any], ...] = (
    {}, {"reasoning_content": "r"}, {"reasoning": "r"}, {"thinking": "t"},
    {"reasoning": "a", "thinking": "b", "reasoning_content": None},
)  # fmt: skip


def turns() -> Iterator[dict[str, Any]]:
    for calls in ([], [CALL], [CALL, NO_ARGUMENTS]):
        for content in ("", "text", None):
            for thought in THOUGHTS:
                turn = {"role": "assistant", "content": content, "refusal": None, **thought}
                yield turn | ({"tool_calls": calls} if calls else {})


def test_earlier_turns_are_written_as_by_transformers(tmp_path: Path) -> None:
    path = made(tmp_path, {"chat_template": WRITES}, {})
    messages = [{"role": "user", "content": "?"}, *turns()]
    for tools in ((), TOOLS):
        assert ours(path, messages, tools) == theirs(path, messages, tools)


def test_what_transformers_refuses_is_refused_or_told(tmp_path: Path) -> None:
    path = made(tmp_path, {"chat_template": "{% include 'other.jinja' %}"}, {})
    messages = [{"role": "user", "content": "?"}]
    with pytest.raises((TemplateError, TypeError)):
        theirs(path, messages)
    with pytest.raises(UserError, match="refused: no loader"):
        ours(path, messages)
