"""A cluster that drafts: sums over all steps are equal as integers, whatever serves the requests.

Means would hide a small loss of drafts. The model and its drafter are those that come with kvlane.
"""

import operator
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.harness import Serve
from tests.support.patience import HANG_S, until
from tests.support.prompts import problem_ids
from tests.support.scrape import scrape

NUM, WIDTH, MAX_TOKENS = 24, 5, 160
ARGUMENTS = (
    "--prefill", "2", "--decode", "1",
    "--set", f"spec.widths=[{WIDTH}]",
    "--set", "decode.engine.strict=true",
    # A prompt that is all there has its first token drawn in a window, others before their first.
    "--set", "decode.engine.prefix_cache=false",
)  # fmt: skip


@dataclass(frozen=True)
class Counts:
    """Of one request; its text beside them."""

    num_steps: int
    num_accepted: int
    text: str
    finish_reason: str
    first_in_window: bool  # else the first token was drawn with the prompt

    @classmethod
    def of(cls, answer: dict[str, Any]) -> "Counts":
        (choice,), num_tokens = answer["choices"], answer["usage"]["completion_tokens"]
        steps = choice["kvlane_trace"]
        assert {step["width"] for step in steps} == {WIDTH}
        accepted = sum(step["num_accepted"] for step in steps)
        first_in_window = len(steps) + accepted == num_tokens
        assert len(steps) + accepted + (not first_in_window) == num_tokens
        return cls(len(steps), accepted, choice["text"], choice["finish_reason"], first_in_window)


def sums(found: list[Counts]) -> tuple[int, int]:
    """Windows and accepted drafts of all requests."""
    return sum(each.num_steps for each in found), sum(each.num_accepted for each in found)


def check_equal(found: list[Counts], wanted: list[Counts]) -> None:
    """A worker that dies after its last page has come and before its token has leaves a prompt that
    is all there: that request's windows begin a token earlier."""
    assert [each.text for each in found] == [each.text for each in wanted]
    shifted = [each.first_in_window for each in found]
    same = [mine == its for mine, its in zip(found, wanted, strict=True)]
    assert all(map(operator.or_, same, shifted)), (found, wanted)
    assert sum(shifted) <= NUM // 4


def ask(pool: ThreadPoolExecutor, url: str) -> list[Future[dict[str, Any]]]:
    """Problems that the model has not seen, of kinds that it was trained for; some are sampled."""

    def one(number: int, prompt: tuple[int, ...]) -> dict[str, Any]:
        body = {"prompt": list(prompt), "max_tokens": MAX_TOKENS, "return_trace": True}
        body |= {"temperature": 0.4 * (number % 3), "seed": number, "model": "tiny"}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=HANG_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return [pool.submit(one, number, prompt) for number, prompt in enumerate(problem_ids(NUM))]


def counts(serve: Serve, *, kill: bool = False) -> list[Counts]:
    """kill: one of the prefill workers, as soon as some requests have ended."""
    with ThreadPoolExecutor(NUM) as pool:
        asked = ask(pool, serve.url)
        if kill:
            until(lambda: any(each.done() for each in asked))
            os.kill(serve.status()["prefill-0"]["pid"], signal.SIGKILL)
        found = [Counts.of(each.result()) for each in asked]
    if kill:
        serve.wait_status("prefill-0", restarts=1, state="ready")
    return found


def counted(serve: Serve) -> tuple[int, int]:
    """Windows and accepted drafts, as the decode worker counts them."""
    found, names = scrape(serve.url), ("steps", "accepted_tokens")
    steps, accepted = (found[f"kvlane_spec_{name}_total", "decode", ""] for name in names)
    return int(steps), int(accepted)


@pytest.mark.whole
@pytest.mark.parametrize(("drafter", "least"), [("ngram", 1.1), ("chain", 2.0), ("dflash", 3.0)])
def test_totals_are_equal_pulled_after_a_kill_and_local_without_overlap(drafter, least, clusters):
    arguments = "--spec", drafter, *ARGUMENTS
    serve = clusters.fresh(*arguments, "--set", "disaggregation.mode=always")
    pulled = counts(serve)
    num_steps, num_accepted = sums(pulled)
    print(f"{num_steps} steps, {1 + num_accepted / num_steps:.2f} of {WIDTH} tokens each")
    assert counted(serve) == (num_steps, num_accepted)
    assert 1 + num_accepted / num_steps > least
    assert not any(each.first_in_window for each in pulled)
    check_equal(counts(serve, kill=True), pulled)
    assert counts(serve) == pulled, "by its successor"
    alone = "--prefill", "1", "--set", "disaggregation.mode=never"  # one stands by
    serve = clusters.fresh(*arguments, *alone, "--set", "spec.overlap=false")
    assert counts(serve) == pulled
    assert counted(serve) == sums(pulled)
