"""How the bundled models were made: laws of their text, and a few steps of the drafters."""

import json
import random
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from benchmarks.accuracy import load_model
from benchmarks.train import base, experts, glm, harmony, model, problems
from benchmarks.train.answers import Said, Speaker, set_right
from benchmarks.train.arithmetic import evaluate
from benchmarks.train.base import Drafter, Lesson, train_drafter
from benchmarks.train.block_drafter import BlockDrafter
from benchmarks.train.chain_drafter import ChainDrafter
from benchmarks.train.chats import long_chat
from benchmarks.train.data import IGNORED
from benchmarks.train.dialect import CALL, thought
from benchmarks.train.model import save
from benchmarks.train.mtp_drafter import SPARSE, SparseMtpDrafter
from benchmarks.train.sums import newcomer_chat
from router.text.template import ChatTemplate
from tests.equivalence.test_models import Engine
from tests.support.chain_reference import ChainReference, Layer
from tests.support.dflash_reference import DFlashReference
from worker.api import Sampling
from worker.config.checkpoint.shape import read_model_shape
from worker.model.load import load_model as load_worker_model
from worker.model.placement import Placement
from worker.peers.base import SingleCollective

TINY = Path(__file__).parents[2] / "worker" / "assets" / "tiny"
WRITTEN_STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
NUM_HELD_OUT = 200  # of each kind; one drawn problem in 32 is one
TOKENIZER = Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def trained() -> list[problems.Problem]:
    rng = random.Random(11)
    return [problems.training_problem(rng) for _ in range(1000)]


@pytest.fixture(scope="module")
def held_out() -> list[problems.Problem]:
    return [
        problem
        for split in ("trained", "held_out")
        for problem in problems.held_out_problems(NUM_HELD_OUT, templates=split)
    ]


def test_worked_answers_are_right_short_and_of_numbers_of_the_question(trained, held_out):
    for item in (*trained, *held_out):
        steps = WRITTEN_STEP.findall(item.answer)
        assert len(steps) == item.answer.count("=")
        for left, op, right, result in steps:
            assert evaluate(int(left), op, int(right)) == int(result), item
        assert item.answer.endswith(f"\n#### {item.value}")
        assert 2 <= sum(map(bool, map(WRITTEN_STEP.search, item.answer.splitlines()))) <= 4
        assert int(steps[-1][3]) == item.value == problems.parse_value(item.answer)
        assert all(int(number) <= 999 for number in re.findall(r"\d+", item.question)), item
        assert not re.search(r"[{}\[\]|]", item.question + item.answer), item
    answers = TOKENIZER.encode_batch([item.answer for item in (*trained, *held_out)])
    assert min(len(each.ids) + 1 for each in answers) >= 60
    assert max(len(each.ids) + 1 for each in answers) <= 150


def test_held_out_questions_are_distinct_and_never_trained(trained, held_out):
    new, other = held_out[:NUM_HELD_OUT], held_out[NUM_HELD_OUT:]
    assert len({item.question for item in new}) == NUM_HELD_OUT
    assert all(problems.is_held_out(item.question) for item in new)
    assert not any(problems.is_held_out(item.question) for item in trained)
    assert len(problems.templates()) >= 34 > len(problems.HELD_OUT_TEMPLATES) == 5
    assert {item.template for item in trained} == set(problems.trained_templates())
    assert {item.template for item in other} == set(problems.HELD_OUT_TEMPLATES)
    assert not {item.template for item in trained} & set(problems.HELD_OUT_TEMPLATES)
    with pytest.raises(ValueError, match="templates must be"):
        problems.held_out_problems(1, templates="all")


@pytest.fixture(scope="module")
def target() -> Any:
    return load_model(TINY)[0]


def bundled(kind: type[Drafter], target: Any) -> Any:
    """The bundled drafter, as it is trained: weights in float32."""
    drafter = kind(target.model.embed_tokens.weight)
    name = "tiny-chain" if kind is ChainDrafter else "tiny-dflash"
    saved = load_file(str(TINY.with_name(name) / "model.safetensors"))
    drafter.load_state_dict({name: weight.float() for name, weight in saved.items()})
    return drafter


@pytest.mark.whole
@pytest.mark.parametrize(("kind", "gain"), [(ChainDrafter, 0.7), (BlockDrafter, 0.85)])
def test_a_few_steps_lower_the_loss_and_leave_a_checkpoint_of_the_bundled_form(
    kind: type[Drafter], gain: float, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "STARTING_CHATS", 4)
    lesson = Lesson(steps=6, batch=2, round=4, passes=3)
    drafter, losses = train_drafter(kind, Speaker(target, kind.taps), TOKENIZER, lesson)
    assert sum(losses[-2:]) < gain * sum(losses[:2]), losses
    save(drafter.state_dict(), tmp_path, config=drafter.config)
    name = "tiny-chain" if kind is ChainDrafter else "tiny-dflash"
    made, shipped = (
        {name: (weight.shape, weight.dtype) for name, weight in load_file(str(path)).items()}
        for path in (place / "model.safetensors" for place in (tmp_path, TINY.with_name(name)))
    )
    assert made == shipped
    config = (TINY.with_name(name) / "config.json").read_text("utf-8")
    assert (tmp_path / "config.json").read_text("utf-8") == config


@cache
def said_by(target: Any, kind: type[Drafter]) -> list[Said]:
    return Speaker(target, kind.taps).said(TOKENIZER, random.Random(3), 4)


@pytest.mark.parametrize(("kind", "at"), [(ChainDrafter, 0), (BlockDrafter, 0), (BlockDrafter, 1)])
def test_anchors_draft_together_as_one_after_the_other_does(kind, at, target):
    """Against the references of served drafters, which see one anchor and the text before it."""
    is_chain = kind is ChainDrafter
    refer, name = (ChainReference, "chain") if is_chain else (DFlashReference, "dflash")
    reference = refer(TINY, TINY.with_name(f"tiny-{name}"))
    said = said_by(target, kind)
    batch = set_right(said, kind.num_drafts)
    with torch.inference_mode():
        together = torch.stack(list(bundled(kind, target).learn(batch, at)))
    for row, item in enumerate(said):
        tokens = item.ids.tolist()
        for anchor in (item.num_prompt, item.num_prompt + 9, len(tokens) - 2):
            column = batch.num_anchors - (len(tokens) - 1 - anchor)
            text = [*tokens[anchor + 1 :], *[IGNORED] * kind.num_drafts][: kind.num_drafts]
            assert batch.labels[:, row, column].tolist() == text
            alone = reference.drawn(tokens, anchor, len(together) + 1, Sampling(1, temperature=0.0))
            for number, (draft, margin) in enumerate(alone):
                (first, second), (found, _) = together[number, row, column].topk(2)
                assert float(first - second) == pytest.approx(margin, 3e-3, 3e-3)
                assert found == draft or margin < 6e-3
                if is_chain and draft != text[number]:
                    break  # the reference feeds back its own drafts, training the text


def test_a_layer_that_is_divided_into_experts_begins_as_it_was(monkeypatch) -> None:
    monkeypatch.setattr(experts, "ROUTER_STD", 1e-4)
    torch.manual_seed(1)
    dense, made = base.FeedForward(320), experts.Experts(SPARSE)
    held = {f"layers.0.mlp.{name}": weight for name, weight in dense.state_dict().items()}
    parts = experts.divided(held, SPARSE, 0)
    made.load_state_dict({name.removeprefix("layers.0.mlp."): w for name, w in parts.items()})
    x = torch.randn(50, base.HIDDEN)
    with torch.inference_mode():
        torch.testing.assert_close(made(x), dense(x), atol=1e-3, rtol=0.01)


def test_an_mtp_layer_of_experts_is_trained_as_it_is_served(tmp_path: Path) -> None:
    """First drafts of all anchors against plain torch, of random features."""
    generator = torch.Generator().manual_seed(2)
    embedding, features = (torch.randn(n, base.HIDDEN, generator=generator) for n in (1024, 30))
    drafter = SparseMtpDrafter(embedding)
    drafter.start(torch.zeros(0), features, generator)
    with torch.no_grad():
        drafter.only.mlp.gate.weight.normal_(generator=generator)
    (tmp_path / "config.json").write_text(json.dumps(SPARSE))
    state = {f"mtp.{name}": weight for name, weight in drafter.state_dict().items()}
    save_file(state, tmp_path / "mtp.safetensors")
    ids = torch.randint(1024, (30,), generator=generator)
    batch, layer = set_right([Said(ids, 12, features)], 4), Layer(tmp_path, 4)
    at = torch.arange(1, 29)
    with torch.inference_mode():
        first = next(drafter.learn(batch, 0))[0]
        x, residual = layer.inputs(embedding[ids[1:29]], features[:28])
        q, k, v = (layer.heads(name, x, at) for name in "qkv")
        attended = layer.attend(q, k, v, torch.ones(28, 28, dtype=torch.bool).tril())
        rows, _ = layer.outputs(layer.let_through(x, attended), residual)
    torch.testing.assert_close(first, (rows @ embedding.T)[-len(first) :], atol=2e-3, rtol=1e-3)


def test_a_model_of_experts_is_saved_by_the_names_of_checkpoints(tmp_path: Path) -> None:
    made = model.new_model("tiny-moe", 0).eval()
    count = model.save_model(made, tmp_path, model.CONFIGS["tiny-moe"])
    assert count == sum(weight.numel() for weight in made.parameters())
    assert 2 * count < 4 << 20  # bytes
    reloaded, _ = load_model(tmp_path, "cpu")
    ids = torch.tensor([[5, 17, 101, 3]])
    with torch.inference_mode():
        wanted, got = made(ids).logits, reloaded(ids).logits
    torch.testing.assert_close(got, wanted, atol=0.03, rtol=0.1)  # bfloat16 is stored
    shape = read_model_shape(tmp_path)
    placement = Placement(SingleCollective(), torch.float32, torch.device("cpu"))
    load_worker_model(tmp_path, shape, placement)  # every tensor of the file, no other


def test_chats_in_harmony_are_as_their_chat_template_renders_them() -> None:
    """Up to the last answer: analysis is there from the user's last message on."""
    template, rng, num_calls = ChatTemplate(harmony.CHAT_TEMPLATE, {}), random.Random(5), 0
    for made in (newcomer_chat, long_chat) * 30:
        chat = made(rng)
        *prompt, answer = harmony.segments(chat)
        told, _, listed = (chat.system or "").partition("<tools>\n")
        lines = listed.partition("\n</tools>")[0].splitlines()
        tools = [{"type": "function", "function": json.loads(line)} for line in lines]
        messages: list[dict[str, Any]] = []
        if told:
            messages = [{"role": "system", "content": told.rstrip()}]
        effort = re.findall(r"Reasoning: (\w+)", prompt[0])[0]
        for user, said in chat.turns:
            result = re.fullmatch(r"<tool_response>\n(.*)\n</tool_response>", user, re.DOTALL)
            role, content = ("tool", result[1]) if result else ("user", user)
            messages.append({"role": role, "content": content})
            analysis, message, end = harmony.answered(said, effort)
            if call := CALL.fullmatch(said):
                num_calls += 1
                called = {"name": call[1], "arguments": json.loads(call[2])}
                messages.append({"role": "assistant", "tool_calls": [{"function": called}]})
                messages[-1]["thinking"] = analysis
            else:
                final = message.removeprefix("<|channel|>final<|message|>")
                messages.append({"role": "assistant", "content": final})
        rendered = template.render(messages[:-1], tools=tools, extra={"reasoning_effort": effort})
        assert rendered == "".join(prompt)
        assert answer.endswith(end)
        assert answer.count("<|channel|>") == 1 + bool(analysis)
    assert num_calls


def test_chats_in_glm_form_are_as_their_chat_template_renders_them() -> None:
    """Up to the last answer; a call's thoughts are there where a client sends them back."""
    template, rng, num = ChatTemplate(glm.DIALECT.template, {}), random.Random(5), Counter[str]()
    for made in (newcomer_chat, newcomer_chat, long_chat) * 40:
        chat = made(rng)
        *parts, answer = glm.segments(chat)
        thinks = parts[-1].endswith("<think>")
        told, _, listed = (chat.system or "").partition("<tools>\n")
        lines = listed.partition("\n</tools>")[0].splitlines()
        tools = [{"type": "function", "function": json.loads(line)} for line in lines]
        messages: list[dict[str, Any]] = []
        if told:
            messages = [{"role": "system", "content": told.rstrip()}]
        for user, said in chat.turns:
            result = re.fullmatch(r"<tool_response>\n(.*)\n</tool_response>", user, re.DOTALL)
            role, content = ("tool", result[1]) if result else ("user", user)
            messages.append({"role": role, "content": content})
            thoughts, final = thought(said) if thinks else ("", said)
            if call := CALL.fullmatch(said):
                called = {"name": call[1], "arguments": json.loads(call[2])}
                messages.append({"role": "assistant", "tool_calls": [{"function": called}]})
                if thinks and len(parts) > 1:
                    messages[-1]["reasoning_content"] = thoughts
                    num["sent back"] += 1
                num["calls"] += 1
            else:
                messages.append({"role": "assistant", "content": final})
        given: dict[str, Any] = {"extra": {"enable_thinking": thinks}}
        assert template.render(messages[:-1], tools=tools, **given) == "".join(parts)
        last = messages[-1]
        last["reasoning_content"] = thoughts
        whole = template.render(messages, tools=tools, add_generation_prompt=False, **given)
        if thinks and not thoughts:  # which who reads it cannot tell
            answer = answer.replace("</think>", "", 1)
            whole = "<think>".join(whole.rsplit("</think>", 1))
        end = "<|observation|>" if "tool_calls" in last else "<|user|>"
        assert "".join(parts) + answer == whole + end
        num["thinks"] += thinks
    assert 60 < num["thinks"] < 120
    assert 0 < num["sent back"] < num["calls"]


@pytest.mark.parametrize("name", ["tiny-oss", "tiny-latent"])
def test_a_model_of_a_dialect_is_trained_as_it_is_saved_and_served(
    name: str, tmp_path: Path
) -> None:
    """Experts are rounded to MXFP4, or all computed, while it learns: served they say the same."""
    made, is_oss = model.new_model(name, 0), name == "tiny-oss"
    ids = torch.tensor([[5, 17, 101, 3]])
    for _ in range(20):
        made(ids)  # training: experts that no token has chosen gain
    stored = {part: weight.bfloat16().float() for part, weight in made.state_dict().items()}
    made.load_state_dict(stored)
    with torch.inference_mode():
        wanted = made.eval()(ids).logits[0]
    model.save_model(made, tmp_path, model.CONFIGS[name])
    assert (tmp_path / "model.safetensors").stat().st_size < 4e6
    shape = read_model_shape(tmp_path)
    assert (shape.quantization is not None) == is_oss
    assert set(shape.eos_token_ids) == {0, 1, 2}
    placement = Placement(SingleCollective(), torch.float32, torch.device("cpu"))
    engine = Engine(load_worker_model(tmp_path, shape, placement))
    found, _ = engine.step([0, 0], [ids[0].tolist(), [1]])
    engine.pool.close()
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
    saved = load_file(tmp_path / "model.safetensors")
    if is_oss:
        assert saved["model.layers.0.mlp.experts.down_proj_blocks"].shape == (8, 192, 2, 16)
    else:
        bias = saved["model.layers.1.mlp.gate.e_score_correction_bias"]
        assert bias.min() < 0 < bias.max()
