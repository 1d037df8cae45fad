"""A request that loses its decode worker gives the answer that would have come, at any token.

A real router over real workers: it takes a request for lost once its choice has so many tokens, and
sends it again to the other worker. That workers die is in tests/fault/test_chaos.py.
"""

import inspect
import shutil
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from router.dispatch.dispatcher import Dispatcher
from router.dispatch.queue import Queue
from tests.equivalence.test_quantized_files import published
from tests.fault.router_doubles import Served, routed
from tests.support.engines import running, value
from tests.support.pairwise import more, one_in, whole
from tests.support.prompts import TINY
from worker.api import TokenChunk
from worker.draw.grammar import Grammars
from worker.weights import eight_bits

NUM_TOKENS = 24
STRIDE = 1 if whole else 9  # from one token at which a request is lost to the next
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
FEW = ("choices", "grammar")  # without --whole
# Drafter, ranks of each decode worker, and the dtype of KV if it is not the model's; "both": so is
# that of the weights.
SERVED = [
    ("none", 1, "auto"),
    *more(("chain", 2, "auto"), ("none", 2, "auto"), ("chain", 1, "auto")),
    *more(("dflash", 2, "auto"), ("ngram", 1, "auto")),
    *more(("none", 1, "fp8"), ("none", 1, "both")),
]


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


@pytest.fixture(scope="module", params=SERVED, ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Served]:
    drafter, tp, dtype = request.param
    model: dict[str, Any] = {"dtype": "float32", "max_model_len": 320}
    if dtype == "both":
        path = shutil.copytree(TINY, tmp_path_factory.mktemp("eight") / "tiny")
        published(path, "fp8")
        model["path"] = str(path)
    sections: dict[str, dict[str, Any]] = {
        "model": model,
        "engine": {"threads": 1, "max_num_reqs": 8, "num_pages": 200, "strict": True},
        "kv": {"dtype": "fp8" if dtype == "both" else dtype},
        "disaggregation": {"mode": "always"},
        "spec": {} if drafter == "none" else {"drafter": drafter, "widths": [1, 4]},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eight_bits, "multiplies_eight_bits", lambda _: True)  # on a CPU, too
        with running(sections, num_decode=2, decode_tp=tp) as cluster:
            with routed(TINY, cluster.members) as (router, url):
                yield Served(None, url, router)  # type: ignore[arg-type]
            for worker in cluster.workers.values():
                assert not value(worker.engine.metrics.running)


def told(served: Served, kind: str, **more: Any) -> Any:
    """The choices and the usage."""
    body = {"messages": QUESTION, "max_tokens": NUM_TOKENS} | BODIES[kind] | more
    choices, usage = served.told("chat/completions", True, **body)
    return near(choices), usage["completion_tokens"], usage["prompt_tokens"]


def near(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """To be compared: logprobs are near one another, as KV may come of other steps."""
    for choice in choices:
        for call in choice["calls"]:
            call.pop("id", None)
        for each in choice["logprobs"]:
            for entry in [each, *each["top_logprobs"]]:
                entry["logprob"] = pytest.approx(entry["logprob"], abs=1e-3)
    return choices


@pytest.mark.parametrize(
    ("served", "kind"),
    [(SERVED[0], kind) for kind in BODIES if whole or kind in FEW]
    + [
        (each, kind)
        for each in SERVED[1:]
        for kind in BODIES
        if kind != "choices" or each[2] == "auto"
    ],  # in eight bits logprobs differ by more
    indirect=["served"],
    ids=str,
)
def test_a_request_that_is_lost_at_any_token_goes_on_as_if_nothing_were(
    served: Served, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing = Losing(monkeypatch)
    expected = told(served, kind)
    num = min(expected[1], NUM_TOKENS)
    assert num > 4
    for losing.at in range(1, num, STRIDE):
        assert told(served, kind) == expected, losing.at
    # What comes with the last chunk, of at most five tokens, cannot be lost: it ends the request.
    assert len(losing.lost) >= max(1, (num - 6) // STRIDE)


def stop_string(served: Served) -> str:
    """Of several tokens, in the middle of an answer."""
    text = told(served, "seeded")[0][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 6]
    assert told(served, "seeded", stop=stop)[0][0]["text"] == text[: text.index(stop)]
    return stop


@pytest.mark.parametrize("served", SERVED if whole else SERVED[:1], indirect=True, ids=str)
def test_a_stop_string_that_spans_the_seam_is_found(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing = Losing(monkeypatch)
    stop = stop_string(served)
    expected = told(served, "seeded", stop=stop)
    for losing.at in range(1, expected[1], STRIDE):
        assert told(served, "seeded", stop=stop) == expected, losing.at


@pytest.mark.parametrize("asks", [True, *more(False)])
@pytest.mark.parametrize("served", SERVED[:1], indirect=True, ids=str)
def test_a_client_that_asks_is_told_where_its_answer_goes_on(
    served: Served, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing = Losing(monkeypatch)
    losing.at = 6
    body = {"messages": QUESTION, "max_tokens": NUM_TOKENS, "stream": True, **BODIES["choices"]}
    answer = served.post("chat/completions", **body, return_resumes=asks)
    lines = [line for line in answer.text.splitlines() if "goes on" in line]
    assert sorted(lines) == [f": choice {i} goes on at another worker" for i in range(3 * asks)]


MUTANTS: dict[str, tuple[Any, str, str, str, str]] = {
    "grammar not replayed": (Grammars, "matcher", "len(output), 8", "0, 8", "grammar"),
    "seed kept but n's index lost": (
        Queue, "_send", "sampling=sampling",
        "sampling=__import__('msgspec').structs.replace(sampling, "
        "seed=req.sampling.seed if req.dispatch == 1 else 5)", "choices",
    ),
    "stop string's first half lost": (
        Dispatcher, "_lose", "req.avoid, req.waiting",
        "req.output._matcher and req.output._matcher.feed(chr(0))\n    req.avoid, req.waiting",
        "stop",
    ),
    "position off by one": (
        Queue, "_send", "(*req.prompt, *req.tokens)",
        "(*req.prompt, *req.tokens, *req.tokens[-1:])", "seeded",
    ),
    "output as prompt": (
        Queue, "_send", "num_prompt_tokens=len(req.prompt)",
        "num_prompt_tokens=len(req.prompt) + len(req.tokens)", "penalties",
    ),
    "another seed": (
        Queue, "_send", "sampling=sampling",
        "sampling=__import__('msgspec').structs.replace(sampling, "
        "seed=req.sampling.seed + (req.dispatch > 1))", "seeded",
    ),
    "usage counted twice": (
        Dispatcher, "_emit", "req.tokens.extend(tokens)",
        "req.tokens.extend(tokens * (1 + (req.dispatch > 1)))", "seeded",
    ),
}  # fmt: skip


def change(monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, old: str, new: str) -> None:
    """Put `new` where `old` stands in the source of a function of `owner`."""
    real = getattr(owner, method)
    source = textwrap.dedent(inspect.getsource(real))
    assert source.count(old) == 1
    made: dict[str, Callable[..., Any]] = {}
    exec(source.replace(old, new), vars(inspect.getmodule(real)), made)
    monkeypatch.setattr(owner, method, made[method])


@pytest.mark.parametrize("name", one_in(8, MUTANTS))
@pytest.mark.parametrize("served", SERVED[:1], indirect=True, ids=str)
def test_a_mutant_is_red(served: Served, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, old, new, kind = MUTANTS[name]
    kind, more = ("seeded", {"stop": stop_string(served)}) if kind == "stop" else (kind, {})
    expected = told(served, kind, **more)
    change(monkeypatch, owner, method, old, new)
    losing = Losing(monkeypatch)
    differs = []
    for losing.at in range(1, expected[1]) if more else (6,):
        try:
            differs.append(told(served, kind, **more) != expected)
        except KeyError:  # the answer is an error
            differs.append(True)
    assert any(differs)
