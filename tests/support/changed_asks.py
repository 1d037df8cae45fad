"""Requests of every kind that changes logits or reports more than tokens, among plain ones."""

from typing import Any

from tests.equivalence.test_structured import accepted
from tests.support.delay_mix import same_logprobs
from tests.support.engines import Answer
from tests.support.lockstep import Ask
from tests.support.prompts import problem_ids
from worker.api import Sampling

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"presence_penalty": 0.8, "frequency_penalty": 0.3, "logprobs": 0},
    {"grammar": True},
    {"repetition_penalty": 1.2},
    {"logprobs": 5},
    {"logit_bias": ((300, 4.0), (12, -100.0)), "repetition_penalty": 1.1},
    {"grammar": True, "repetition_penalty": 1.1, "logprobs": 2, "temperature": 0.9},
    {"top_p": 0.9, "temperature": 0.8},
    {"frequency_penalty": 0.6, "temperature": 1.1, "top_k": 40, "min_p": 0.02},
)


def changed_asks(num: int, max_tokens: int = 24) -> list[Ask]:
    """`num` requests, one after the other, so that batches of all mixtures come about."""
    grammars = [grammar for _, grammar in accepted()]
    found = []
    for number, prompt in enumerate(problem_ids(num)):
        wanted: dict[str, Any] = {"temperature": 0.0} | KINDS[number % len(KINDS)]
        if wanted.pop("grammar", False):
            wanted["grammar"] = grammars[number % len(grammars)]
        sampling = Sampling(max_tokens + 3 * (number % 5), seed=number, **wanted)
        found.append(Ask(tuple(prompt), sampling, at=2 * number))
    return found


def same_answers(one: list[Answer], other: list[Answer]) -> bool:
    assert not [each.error for each in (*one, *other) if each.error]
    return all(
        a.tokens == b.tokens and a.finish_reason == b.finish_reason and same_logprobs(a, b, 1e-4)
        for a, b in zip(one, other, strict=True)
    )
