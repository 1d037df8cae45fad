"""Logprobs of prompts are those of `transformers`, however the prompts are computed. In float32."""

import random
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.support.engines import Answer
from tests.support.laws import sections
from tests.support.lockstep import Ask, Lockstep
from tests.support.pairwise import in_whole
from tests.support.prompts import VOCAB
from tests.support.shallow import shallow
from worker.api import Sampling

NUM_TOP = 3
SCORING = Sampling(2, temperature=0.0, ignore_eos=True, prompt_logprobs=NUM_TOP)
PLAIN = Sampling(2, temperature=0.0, ignore_eos=True)
LONG = 1300  # a step of so many computes hidden states of last tokens alone, where it may


@cache
def model() -> Any:
    from transformers import Qwen3ForCausalLM  # seconds, where these tests run only

    return Qwen3ForCausalLM.from_pretrained(shallow(), dtype=torch.float32)


def prompts(lengths: Sequence[int], seed: int = 5) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(3, VOCAB) for _ in range(length)) for length in lengths]


def check(prompt: Sequence[int], answer: Answer, num_top: int = NUM_TOP) -> None:
    with torch.inference_mode():
        thought = model()(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    found = answer.prompt_logprobs
    assert len(found) == len(prompt) - 1
    ours = torch.tensor([each.logprob for each in found], dtype=torch.float64)
    theirs = thought[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert (ours - theirs).abs().max() < 1e-4
    for each, line in zip(found, thought, strict=False):
        values, ids = line.topk(num_top)
        assert [v for _, v in each.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert len(each.top) == num_top
        clear = all(a - b > 1e-4 for a, b in pairwise(values.tolist()))
        assert not clear or [i for i, _ in each.top] == ids.tolist()


def served(asked: Sequence[Ask], mode: str = "never", **engine: Any) -> list[Answer]:
    lockstep = Lockstep(sections(mode, **engine), num_prefill=int(mode == "always"))
    try:
        return lockstep.serve(asked)
    finally:
        lockstep.close()


@pytest.mark.parametrize("size", [5, 16, 4096, *in_whole((1,), (33,))])
def test_chunks_that_end_anywhere(size: int) -> None:
    """Some end at, before and behind borders of pages and of other prompts."""
    made = prompts([*range(2, 36), 70])
    asked = [Ask(prompt, SCORING, at=i % 3) for i, prompt in enumerate(made)]
    answers = served(asked, max_prefill_tokens=size)
    for prompt, answer in zip(made, answers, strict=True):
        check(prompt, answer)
    plain = served([Ask(prompt, PLAIN) for prompt in made])
    assert [each.tokens for each in answers] == [each.tokens for each in plain]


def test_a_long_step() -> None:
    (long, short), (alone,) = prompts([LONG, 40]), prompts([1], seed=6)
    asked = [Ask(long, SCORING), Ask(short, PLAIN), Ask(short, SCORING), Ask(alone, SCORING)]
    answers = served(asked, max_prefill_tokens=2 * LONG)
    check(long, answers[0])
    assert answers[1].prompt_logprobs == answers[3].prompt_logprobs == []
    check(short, answers[2])


def test_prefixes_that_are_cached_and_prefill_workers_are_no_help_but_no_harm() -> None:
    (first,) = prompts([100])
    (tail,) = prompts([20], seed=8)
    second = first[:64] + tail
    asked = [
        Ask(first, PLAIN), Ask(first, SCORING, at=60), Ask(second, SCORING, at=120),
        Ask(second, PLAIN, at=180),
    ]  # fmt: skip
    answers = served(asked, "always")
    check(first, answers[1])
    check(second, answers[2])
    assert [each.num_cached_tokens for each in answers[1:3]] == [0, 0]
    assert answers[3].num_cached_tokens >= 64  # what was computed for scores is kept for others
    assert answers[0].tokens == answers[1].tokens


def test_each_gets_what_it_asked_for() -> None:
    """In one step, with grammars and logprobs of outputs beside them."""
    made = prompts([30, 31, 32, 33])
    wishes: list[dict[str, Any]] = [
        {"prompt_logprobs": 0}, {"prompt_logprobs": 5, "logprobs": 1}, {"prompt_logprobs": -1},
        {"prompt_logprobs": 2, "grammar": 'start: "yes"', "ignore_eos": False},
    ]  # fmt: skip
    asked = [Ask(prompt, SCORING).but(**wish) for prompt, wish in zip(made, wishes, strict=True)]
    answers = served(asked)
    for prompt, answer, wish in zip(made, answers, wishes, strict=True):
        if wish["prompt_logprobs"] < 0:
            assert answer.prompt_logprobs == []
        else:
            check(prompt, answer, wish["prompt_logprobs"])
    assert len(answers[1].logprobs) == 2


def test_who_is_preempted_is_scored_once() -> None:
    made = prompts([60] * 6)
    asked = [Ask(prompt, SCORING).but(max_tokens=60) for prompt in made]
    lockstep = Lockstep(sections("never", cpu_pool_bytes=1 << 20, growth_tokens=1), num_prefill=0)
    try:
        answers = lockstep.serve(asked)
        assert lockstep.decode._engine.metrics.preemptions._value.get() > 0
    finally:
        lockstep.close()
    for prompt, answer in zip(made, answers, strict=True):
        check(prompt, answer)
        assert len(answer.tokens) == 60
