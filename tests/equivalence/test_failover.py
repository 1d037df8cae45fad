"""A request that loses its decode worker gives the answer that would have come, at any token.

A real router over real workers: it takes a request for lost once its choice has so many tokens, and
sends it again to the other worker. That workers die is in tests/fault/test_kill_under_load.py.
"""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.queue import Queue
from tests.fault.router_doubles import Served, routed
from tests.support.engines import running, value
from tests.support.pairwise import whole
from tests.support.prompts import TINY
from worker.api import TokenChunk

NUM_TOKENS = 24
QUESTION: Any = [{"role": "user", "content": "What is 12 + 7?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["one", "two"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
SEEDED = {"temperature": 2.0, "seed": 5, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": SEEDED | {"top_p": 0.95},
    "choices": SEEDED | {"n": 3, "logprobs": True, "top_logprobs": 2},
    "penalties": SEEDED
    | {"presence_penalty": 1.5, "repetition_penalty": 1.3, "logit_bias": {"7": 3.0}},
    "grammar": {"guided_regex": "[a-f]{6}-[0-9]{6}-(yes|no)", "temperature": 1.0, "seed": 9},
    "tool": {"tools": [TOOL], "tool_choice": "required", "temperature": 1.0, "seed": 3},
    "min_tokens": {"temperature": 1.0, "seed": 8, "min_tokens": 16},
}
SPECS: list[dict[str, Any]] = [{}, {"drafter": "ngram", "widths": [1, 4]}]


class Losing:
    """The router that loses each choice once, when it has `at` output tokens or more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: int | None = None
        self.lost: set[str] = set()
        on_chunk = Dispatcher._on_chunk

        def heard(dispatcher: Dispatcher, peer: str, chunk: TokenChunk, now: float) -> None:
            on_chunk(dispatcher, peer, chunk, now)
            req = dispatcher._reqs.get(chunk.req_id)
            if req is None or self.at is None or req.req_id in self.lost:
                return
            if len(req.tokens) >= self.at:
                self.lost.add(req.req_id)
                dispatcher._queue.abort(req)
                dispatcher._lose(req, "worker_lost")

        monkeypatch.setattr(Dispatcher, "_on_chunk", heard)


@pytest.fixture(scope="module", params=SPECS, ids=["plain", "ngram"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": str(TINY), "dtype": "float32", "max_model_len": 256},
        "engine": {"threads": 1, "max_num_reqs": 8, "num_pages": 200, "strict": True},
        "disaggregation": {"mode": "always"},
        "spec": request.param,
    }
    with running(sections, num_decode=2) as cluster:
        members = cluster.members
        with routed(TINY, members) as (router, url):
            yield Served(None, url, router)  # type: ignore[arg-type]
        for worker in cluster.workers.values():
            assert not value(worker.engine.metrics.running)


def told(served: Served, kind: str, **more: Any) -> Any:
    """The choices and the usage. Logprobs are near one another: KV may come of other steps."""
    body = {"messages": QUESTION, "max_tokens": NUM_TOKENS} | BODIES[kind] | more
    choices, usage = served.told("chat/completions", True, **body)
    for choice in choices:
        for call in choice["calls"]:
            call.pop("id", None)
        for each in choice["logprobs"]:
            for entry in [each, *each["top_logprobs"]]:
                entry["logprob"] = pytest.approx(entry["logprob"], abs=1e-3)
    return choices, usage["completion_tokens"], usage["prompt_tokens"]


@pytest.mark.parametrize("kind", BODIES)
def test_a_request_that_is_lost_at_any_token_goes_on_as_if_nothing_were(
    served: Served, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing = Losing(monkeypatch)
    expected = told(served, kind)
    num = min(expected[1], NUM_TOKENS)
    assert num > 4
    for losing.at in range(1, num, 1 if whole else 5):
        assert told(served, kind) == expected, losing.at
    assert len(losing.lost) >= (num - 2) // (1 if whole else 5)


def test_a_stop_string_that_spans_the_seam_is_found(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing = Losing(monkeypatch)
    text = told(served, "seeded")[0][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 6]
    expected = told(served, "seeded", stop=stop)
    assert expected[0][0]["text"] == text[: text.index(stop)]
    for losing.at in range(1, expected[1]):
        assert told(served, "seeded", stop=stop) == expected, losing.at


MUTANTS: dict[str, tuple[Any, str, str, str, str]] = {
    "position off by one": (
        Queue, "_send", "(*req.prompt, *req.tokens)",
        "(*req.prompt, *req.tokens, *req.tokens[-1:])", "seeded",
    ),
    "output as prompt": (
        Queue, "_send", "num_prompt_tokens=len(req.prompt)",
        "num_prompt_tokens=len(req.prompt) + len(req.tokens)", "penalties",
    ),
    "another seed": (
        Queue, "_send", "sampling=req.sampling",
        "sampling=__import__('msgspec').structs.replace(req.sampling, "
        "seed=req.sampling.seed + (req.dispatch > 1))", "seeded",
    ),
    "usage counted twice": (
        Dispatcher, "_emit", "req.tokens.extend(tokens)",
        "req.tokens.extend(tokens * (1 + (req.dispatch > 1)))", "seeded",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_red(served: Served, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, old, new, kind = MUTANTS[name]
    expected = told(served, kind)
    real = getattr(owner, method)
    source = textwrap.dedent(inspect.getsource(real))
    assert source.count(old) == 1
    made: dict[str, Callable[..., Any]] = {}
    exec(source.replace(old, new), vars(inspect.getmodule(owner)), made)
    monkeypatch.setattr(owner, method, made[method])
    losing = Losing(monkeypatch)
    losing.at = 6
    with pytest.raises((AssertionError, KeyError)):  # the latter where the answer is an error
        assert told(served, kind) == expected
