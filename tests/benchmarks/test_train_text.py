"""Laws of the word problems, of the tokenizer and of the bundled model's files."""

from __future__ import annotations

import json
import math
import random
import re
import struct
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer

from benchmarks.train import chats, problems
from benchmarks.train.arithmetic import Inexact, evaluate, expand
from benchmarks.train.tokenizer import CHAT_TEMPLATE
from router.text.tokenizer import ChatTemplate
from tests.support.patience import HANG_S

ASSETS = Path(__file__).parents[2] / "worker" / "assets" / "tiny"
WRITTEN_STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
NUM_SAMPLE = 1500
NUM_HELD_OUT = 300  # of each kind; one drawn problem in 32 is one


@pytest.fixture(scope="module")
def sample() -> list[problems.Problem]:
    rng = random.Random(11)
    return [problems.training_problem(rng) for _ in range(NUM_SAMPLE)]


@pytest.fixture(scope="module")
def new_of_trained() -> list[problems.Problem]:
    return problems.held_out_problems(NUM_HELD_OUT)


@pytest.fixture(scope="module")
def held_out(new_of_trained: list[problems.Problem]) -> list[problems.Problem]:
    others = problems.held_out_problems(NUM_HELD_OUT, templates="held_out")
    return [*new_of_trained, *others]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "tokenizer.json"))


def test_every_written_step_is_right_and_the_last_result_is_the_answer(sample, held_out):
    for item in (*sample, *held_out):
        steps = WRITTEN_STEP.findall(item.answer)
        assert len(steps) == item.answer.count("=")
        for left, op, right, result in steps:
            assert evaluate(int(left), op, int(right)) == int(result), item
        assert int(steps[-1][3]) == item.value
        assert item.answer.splitlines()[-1] == f"#### {item.value}"
        assert problems.parse_value(item.answer) == item.value


def test_a_problem_takes_two_to_four_operations_on_numbers_of_the_question(sample, held_out):
    for item in (*sample, *held_out):
        operations = [line for line in item.answer.splitlines() if WRITTEN_STEP.search(line)]
        assert 2 <= len(operations) <= 4
        assert all(int(number) <= 999 for number in re.findall(r"\d+", item.question)), item
        assert not re.search(r"[{}\[\]|]", item.question + item.answer), item


@pytest.mark.parametrize("op", ["+", "-", "*", "/"])
def test_expansion_is_exact_and_uses_only_easy_atoms(op):
    rng = random.Random(5)
    for _ in range(500):
        left, right = rng.randint(1, 999), rng.randint(1, 99 if op == "*" else 999)
        if op == "/":
            right = right % 9 + 1
            left *= right
        try:
            expected = evaluate(left, op, right)
        except Inexact:
            continue
        atoms = expand(left, op, right)
        assert atoms[-1].result == expected
        for atom in atoms:
            assert evaluate(atom.left, atom.op, atom.right) == atom.result
            if atom.op == "*":
                assert all(len(str(side).rstrip("0")) == 1 for side in atom[0:3:2])


def test_inexact_and_negative_operations_are_refused():
    for left, op, right in ((7, "/", 2), (3, "-", 4), (3, "/", 0)):
        with pytest.raises(Inexact):
            evaluate(left, op, right)


def test_there_are_enough_templates_and_five_are_held_out(sample):
    names = set(problems.templates())
    assert len(names) >= 34
    assert len(problems.HELD_OUT_TEMPLATES) == 5
    assert names >= set(problems.HELD_OUT_TEMPLATES)
    seen = {item.template for item in sample}
    assert seen == set(problems.trained_templates())
    assert not seen & set(problems.HELD_OUT_TEMPLATES)


def test_held_out_questions_are_distinct_and_never_trained(sample, new_of_trained):
    other = problems.held_out_problems(100, templates="held_out")
    assert len({item.question for item in new_of_trained}) == NUM_HELD_OUT
    assert all(problems.is_held_out(item.question) for item in new_of_trained)
    assert not any(problems.is_held_out(item.question) for item in sample)
    assert {item.template for item in other} == set(problems.HELD_OUT_TEMPLATES)
    with pytest.raises(ValueError, match="templates must be"):
        problems.held_out_problems(1, templates="all")


def test_problems_are_a_function_of_their_seed():
    first, again, other = (problems.held_out_problems(15, seed=seed) for seed in (4, 4, 5))
    assert first == again != other
    for make in (chats.short_chat, chats.long_chat):
        assert make(random.Random(9)) == make(random.Random(9))


def test_problems_import_without_torch():
    code = "import sys, benchmarks.train.problems; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ASSETS.parents[2], timeout=HANG_S)


def test_answers_are_60_to_150_tokens(sample, held_out, tokenizer):
    answers = [item.answer for item in (*sample, *held_out)]
    lengths = [len(encoding.ids) + 1 for encoding in tokenizer.encode_batch(answers)]
    assert min(lengths) >= 60
    assert max(lengths) <= 150


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "  two spaces\n\n\tand tabs \r\n",
        "Zoë kauft 3 Äpfel für 4,50 €",
        "日本語 한국어 العربية עברית",
        "🎉👩‍👩‍👧‍👦 \u0000\u200d\u2028 e\u0301",
        "x = 12*(3+4) #### 5",
        "<|im_start|>user\nhi<|im_end|>",
    ],
)
def test_tokenizer_returns_any_text_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokenizer_returns_random_unicode_unchanged(tokenizer):
    rng = random.Random(3)
    for _ in range(300):
        points = (rng.choice((rng.randrange(0x250), rng.randrange(0xD800))) for _ in range(20))
        text = "".join(map(chr, points))
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_digit_is_one_token(tokenizer):
    tokens = tokenizer.encode("In all: 120 + 3456 = 3576.").tokens
    assert [token for token in tokens if re.search(r"\d", token)] == list("12034563576")


def test_chat_template_renders_the_training_text():
    config = json.loads((ASSETS / "tokenizer_config.json").read_text("utf-8"))
    template = jinja2.Environment().from_string(config["chat_template"])
    chat = chats.long_chat(random.Random(1))
    messages = [{"role": "system", "content": chat.system}] if chat.system else []
    for turn in chat.turns:
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.assistant})
    text = "".join(chat.segments())
    assert template.render(messages=messages, add_generation_prompt=False) == text + "\n"
    prompt = template.render(messages=messages[:-1], add_generation_prompt=True)
    assert prompt == "".join(chat.segments()[:-1])


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, ""), ("hi", "hi"), ([{"type": "text", "text": "hi"}, {"type": "image"}], "hi")],
)
def test_chat_template_takes_any_content(content, text):
    config = json.loads((ASSETS / "tokenizer_config.json").read_text("utf-8"))
    template = jinja2.Environment().from_string(config["chat_template"])
    messages = [{"role": "user", "content": content}]
    prompt = template.render(messages=messages, add_generation_prompt=True)
    assert prompt == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("told", [False, True])
def test_chat_template_presents_tools_calls_and_results(told):
    config = json.loads((ASSETS / "tokenizer_config.json").read_text("utf-8"))
    assert config["chat_template"] == CHAT_TEMPLATE
    template = ChatTemplate(CHAT_TEMPLATE, {})
    function = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [{"role": "system", "content": "Be good."}] if told else []
    messages += [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "So.", "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": function}]
    head, *turns = template.render(messages, tools=tools).split("<|im_start|>")[1:]
    shown = head.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert json.loads(shown) == function
    assert head.startswith("system\nBe good.\n\n<tools>" if told else "system\n<tools>")
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert turns == [
        "user\nhi<|im_end|>\n",
        f"assistant\n{called}\n{called}<|im_end|>\n",
        "user\n<tool_response>\n7\n</tool_response><|im_end|>\n",
        f"assistant\nSo.\n{called}<|im_end|>\n",
        "assistant\n",
    ]


def test_the_model_is_small_and_plain(tokenizer):
    with (ASSETS / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    shapes = {name: entry["shape"] for name, entry in header.items()}
    assert sum(math.prod(shape) for shape in shapes.values()) <= 3_000_000
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    config = json.loads((ASSETS / "config.json").read_text("utf-8"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["rope_theta"] == 10000.0
    assert config["torch_dtype"] == "bfloat16"
    vocab_size = config["vocab_size"]
    assert tokenizer.get_vocab_size() == vocab_size == shapes["model.embed_tokens.weight"][0]
    for name in ("config.json", "generation_config.json"):
        eos_id = json.loads((ASSETS / name).read_text("utf-8"))["eos_token_id"]
        assert tokenizer.id_to_token(eos_id) == chats.TURN_END
    assert sum(file.stat().st_size for file in ASSETS.iterdir()) <= 6 * 2**20
