"""Answers that can be claimed: bounded as they are held, those that run among them."""

from sys import getsizeof

import pytest

from worker.api import FinishReason, Sampling, TokenChunk, TokenLogprob
from worker.requests import kept as module
from worker.requests.kept import KeptAnswers, keep
from worker.schedule.req import Req

SCORED = TokenLogprob(-0.5, tuple((i, -float(i)) for i in range(20)))


def begun(kept: KeptAnswers, number: int, num_chunks: int = 100) -> tuple[Req, list[TokenChunk]]:
    """A request, and what was sent of it."""
    sampling = Sampling(max_tokens=999, logprobs=20)
    key = f"k{number}"
    req = Req(f"r{number}", 1, "router", [1, 2], 2, sampling, 99.0, claim_key=key)
    kept.begin(req)
    chunks = [TokenChunk(*req.key, 2 + i, (i,), logprobs=(SCORED,)) for i in range(num_chunks)]
    assert req.sent is not None
    for chunk in chunks:
        keep(req.sent, chunk)
    return req, chunks


def test_whoever_claims_gets_the_same_chunks() -> None:
    kept = KeptAnswers()
    req, chunks = begun(kept, 1)
    assert kept.find("k1") == (req, chunks)
    kept.end(req, FinishReason.STOP, 1.0)
    assert kept.find("k1") == (None, chunks)
    kept.sweep(1.0 + module.KEPT_S / 2)
    assert kept.find("k1") is not None
    kept.sweep(1.1 + module.KEPT_S)
    assert kept.find("k1") is None


def test_what_is_too_much_is_forgotten_the_oldest_that_has_ended_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, trimmed = KeptAnswers(), list[int]()
    ended = [begun(kept, i)[0] for i in range(3)]
    running = [begun(kept, i)[0] for i in range(3, 6)]
    one = getsizeof(ended[0].sent)
    monkeypatch.setattr(module, "MAX_BYTES", 4 * one)
    monkeypatch.setattr(module, "TRIM_BYTES", one)
    monkeypatch.setattr(module, "_trim", trimmed.append)
    for req in ended:
        kept.end(req, FinishReason.LENGTH, 1.0)
    kept.sweep(2.0)
    assert [kept.find(f"k{i}") is not None for i in range(6)] == [False, False, True, *[True] * 3]
    assert trimmed == [0]
    monkeypatch.setattr(module, "MAX_BYTES", 2 * one)
    kept.sweep(2.0)
    assert [kept.find(f"k{i}") is not None for i in range(6)] == [*[False] * 4, True, True]
    assert running[0].sent is None
    assert not kept.orphan(running[0], 2.0)
    kept.end(running[0], FinishReason.STOP, 3.0)
    assert kept.find("k3") is None
    assert kept.orphan(running[1], 2.0)


def test_logprobs_take_little() -> None:
    """As objects they take 2 kB a token."""
    req, chunks = begun(KeptAnswers(), 1, 1000)
    assert getsizeof(req.sent) < 400 * len(chunks)
