"""How the bundled models were made: laws of their text, and a few steps of the drafters."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from benchmarks.accuracy import load_model
from benchmarks.train import base, chats, problems
from benchmarks.train.answers import Speaker, set_right
from benchmarks.train.arithmetic import evaluate
from benchmarks.train.base import Drafter, Lesson, train_drafter
from benchmarks.train.block_drafter import BlockDrafter
from benchmarks.train.chain_drafter import ChainDrafter
from benchmarks.train.model import save
from tests.support.patience import HANG_S

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
    assert {item.template for item in trained} == set(problems.trained_templates())
    assert {item.template for item in other} == set(problems.HELD_OUT_TEMPLATES)
    assert not {item.template for item in trained} & set(problems.HELD_OUT_TEMPLATES)
    with pytest.raises(ValueError, match="templates must be"):
        problems.held_out_problems(1, templates="all")


def test_text_is_a_function_of_its_seed_and_needs_no_torch():
    first, again, other = (problems.held_out_problems(15, seed=seed) for seed in (4, 4, 5))
    assert first == again != other
    for make in (chats.short_chat, chats.long_chat):
        assert make(random.Random(9)) == make(random.Random(9))
    code = "import sys, benchmarks.train.problems; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=TINY.parents[2], timeout=HANG_S)


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


@pytest.mark.parametrize(("kind", "gain"), [(ChainDrafter, 0.7), (BlockDrafter, 0.85)])
def test_a_few_steps_lower_the_loss_and_leave_a_checkpoint_of_the_bundled_form(
    kind: type[Drafter], gain: float, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "STARTING_CHATS", 4)
    lesson = Lesson(steps=6, batch=2, round=8, passes=2)
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


@pytest.mark.parametrize("kind", [ChainDrafter, BlockDrafter])
def test_a_drafter_knows_nothing_of_the_text_behind_its_anchor(
    kind: type[Drafter], target: Any
) -> None:
    """Of a chain the first draft alone: later ones are made from the text's own tokens."""
    drafter, last = bundled(kind, target), 3  # anchors that may change
    said = Speaker(target, kind.taps).said(TOKENIZER, random.Random(3), 4)
    batch = set_right(said, kind.num_drafts)
    ids, features = batch.ids.clone(), batch.features.clone()
    ids[:, features.shape[1] - last :] = 7
    features[:, features.shape[1] - last :] = 1
    with torch.inference_mode():
        first, second = (
            next(drafter.learn(each, 0))
            for each in (batch, replace(batch, ids=ids, features=features))
        )
    assert torch.equal(first[:, :-last], second[:, :-last])
    assert not torch.equal(first[:, -last:], second[:, -last:])
