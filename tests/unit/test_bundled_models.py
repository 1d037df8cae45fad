"""The models in `worker/assets`: the tokenizer, its chat template, and how well drafters draft."""

import json
import random
import re
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer

from benchmarks.train import chats, forms
from benchmarks.train.agents import agent_chat
from benchmarks.train.sums import newcomer_chat
from benchmarks.train.tokenizer import CHAT_TEMPLATE
from router.text.template import ChatTemplate
from tests.support.engines import running
from tests.support.pairwise import in_whole
from tests.support.prompts import TINY, problem_ids
from worker.api import Sampling

TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))


def test_the_tokenizer_returns_any_text_unchanged_and_takes_digits_apart():
    rng = random.Random(3)
    points = [[rng.choice((rng.randrange(0x250), rng.randrange(0xD800))) for _ in range(20)]]
    points += [[rng.randrange(0xD800) for _ in range(20)] for _ in range(300)]
    texts = [
        "",
        " \n\n\tä \r\n",
        "🎉👩\u200d👧 \u0000\u2028 e\u0301",
        "<|im_start|>user\nhi<|im_end|>",
    ]
    for text in [*texts, *("".join(map(chr, each)) for each in points)]:
        ids = TOKENIZER.encode(text).ids
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    tokens = TOKENIZER.encode("In all: 120 + 3456 = 3576.").tokens
    assert [token for token in tokens if re.search(r"\d", token)] == list("12034563576")


def test_the_chat_template_renders_the_training_text():
    config = json.loads((TINY / "tokenizer_config.json").read_text("utf-8"))
    assert config["chat_template"] == CHAT_TEMPLATE
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    chat = chats.long_chat(random.Random(1))
    messages: list[dict[str, Any]] = [{"role": "system", "content": chat.system}]
    for turn in chat.turns:
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.assistant})
    messages = messages if chat.system else messages[1:]
    text = "".join(chat.segments())
    assert template.render(messages=messages, add_generation_prompt=False) == text + "\n"
    prompt = template.render(messages=messages[:-1], add_generation_prompt=True)
    assert prompt == "".join(chat.segments()[:-1])
    parts = [{"type": "text", "text": "hi"}, {"type": "image"}]
    for content, said in ((None, ""), ("hi", "hi"), (parts, "hi")):
        rendered = template.render(messages=[{"role": "user", "content": content}])
        assert rendered == f"<|im_start|>user\n{said}<|im_end|>\n"


def test_chats_of_agents_are_as_the_chat_template_renders_them():
    template, rng = ChatTemplate(CHAT_TEMPLATE, {}), random.Random(5)
    for chat in [
        made(rng) for _ in range(20) for made in (lambda r: agent_chat(r, 300), newcomer_chat)
    ]:
        told, tools = chat.system or "", []
        if chat.calls:
            told, _, listed = told.rpartition("<tools>\n")
            lines = listed.partition("\n</tools>")[0].splitlines()
            tools = [{"type": "function", "function": json.loads(line)} for line in lines]
        messages: list[dict[str, Any]] = []
        if told:
            messages = [{"role": "system", "content": told.removesuffix("\n\n")}]
        for user, answer in chat.turns:
            result = re.fullmatch(r"<tool_response>\n(.*)\n</tool_response>", user, re.DOTALL)
            role, content = ("tool", result[1]) if result else ("user", user)
            messages.append({"role": role, "content": content})
            called = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", answer)
            calls = {"tool_calls": [{"function": json.loads(called[1])}]} if called else {}
            messages.append({"role": "assistant", "content": None if calls else answer, **calls})
        text = "".join(chat.segments()[:-1])
        assert template.render(messages[:-1], tools=tools) == text


def test_a_demanded_call_is_learnt_between_what_the_grammar_writes(monkeypatch):
    monkeypatch.setattr(forms, "LED_SHARE", 1.0)
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": "x"}}\n</tool_call>'
    led = forms.with_led_call(random.Random(1), chats.Chat(None, [chats.Turn("hi", called)]))
    parts = led.segments()[1:]
    assert parts[::2] == ["", 'add"', "3,", 'x"}', "<|im_end|>"]
    opening = ['<tool_call>\n{"name": "', ', "arguments": {"a":', '"b":"', "}\n</tool_call>"]
    assert parts[1::2] == opening


@pytest.mark.parametrize("told", [False, True])
def test_the_chat_template_presents_tools_calls_and_results(told):
    numbers = {"a": {"type": "integer"}, "b": {}, "c": {"enum": ["x"]}}
    schema = {"type": "object", "properties": numbers, "required": ["a", "b", "c", "d"]}
    function = {"name": "add", "parameters": schema}
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be good."}] if told else []
    messages += [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "So.", "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": function}]
    rendered = ChatTemplate(CHAT_TEMPLATE, {}).render(messages, tools=tools)
    head, *turns = rendered.split("<|im_start|>")[1:]
    assert json.loads(head.partition("<tools>\n")[2].partition("\n</tools>")[0]) == function
    assert head.startswith("system\nBe good.\n\n<tools>" if told else "system\n<tools>")
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    blank = '{"a": 0, "b": "...", "c": "x", "d": "..."}'
    assert turns == [
        "user\nhi<|im_end|>\n",
        f'tools\n{{"name": "add", "arguments": {blank}}}\n<|im_end|>\n',
        f"assistant\n{called}\n{called}<|im_end|>\n",
        "user\n<tool_response>\n7\n</tool_response><|im_end|>\n",
        f"assistant\nSo.\n{called}<|im_end|>\n",
        "assistant\n",
    ]


@pytest.mark.parametrize(
    ("drafter", "target", "place", "width", "mean", "mib"),
    [
        ("chain", "tiny", "tiny-chain", 5, 3.3, 1.5),
        ("dflash", "tiny", "tiny-dflash", 8, 5.0, 2.2),
        ("mtp", "tiny-hybrid-moe", "tiny-hybrid-moe", 4, 3.5, 4.8),
        *in_whole(("mtp", "tiny-hybrid", "tiny-hybrid", 4, 3.5, 4)),
    ],
)
def test_the_bundled_drafters_are_small_and_draft_well(
    drafter, target, place, width, mean, mib
) -> None:
    files = TINY.with_name(place).iterdir()
    assert sum(file.stat().st_size for file in files) <= mib * 2**20
    config = {
        "model": {"path": target},
        "engine": {"device": "cpu", "threads": 1, "num_pages": 400},
        "spec": {"drafter": drafter, "widths": [width]},
    }
    asked = [Sampling(200, temperature=0.0, return_trace=True)] * 8
    with running(config) as cluster:
        answers = cluster.client.generate(problem_ids(8), asked)
    drafted = (w for answer in answers for w in answer.windows if max(w.drafts, default=-1) >= 0)
    steps = [window.num_accepted + 1 for window in drafted]
    assert sum(steps) / len(steps) >= mean
