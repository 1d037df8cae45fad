"""What the laws of workers have in common: a configuration, and answers that have ended."""

from collections.abc import Sequence
from typing import Any

from tests.support.engines import Answer, Client
from tests.support.prompts import problem_ids
from tests.support.shallow import shallow
from worker.api import FinishReason, Sampling


def sections(
    mode: str = "always", page_size: int = 16, first_token: str = "prefill", **engine: object
) -> dict[str, Any]:
    """Of a shallow model on a CPU, with room for every request at once."""
    own = {"device": "cpu", "threads": 1, "cpu_pool_bytes": 48 << 20, "max_num_reqs": 80}
    return {
        "model": {"path": str(shallow()), "served_name": "tiny"},
        "engine": {**own, **engine},
        "kv": {"page_size": page_size},
        "disaggregation": {"mode": mode, "first_token": first_token},
    }


def one_that_stops(client: Client) -> tuple[tuple[int, ...], Answer]:
    """A prompt, and its greedy answer of 12 to 99 tokens and the end of text."""
    prompts = problem_ids(12)
    answers = client.generate(prompts, Sampling(100, temperature=0.0))
    stopped = FinishReason.STOP
    found = zip(prompts, answers, strict=True)
    fits = (each for each in found if each[1].finish_reason is stopped)
    return next(each for each in fits if len(each[1].tokens) > 12)


def ended(answers: Sequence[Answer]) -> Sequence[Answer]:
    """`answers`, each of which has ended once and without an error."""
    for answer in answers:
        assert answer.error is None
        assert answer.num_finals == 1
    return answers


def ids(answers: Sequence[Answer]) -> list[list[int]]:
    """Of each, which has ended so."""
    return [answer.tokens for answer in ended(answers)]
