"""Workers of several ranks: the texts and accept traces of one rank, whatever the two sides are.

Ranks of this process sum over gloo. In float32 sums in another order differ in their last bits, and
no draw of these texts is so close that it shows.
"""

import time
from collections import deque
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import pairwise
from tests.support.engines import Answer, Running, running
from tests.support.prompts import problem_ids
from tests.support.shallow import shallow
from worker.api import Sampling
from worker.model.attention import SelfAttention
from worker.peers.gloo import GlooCollective
from worker.peers.peer_layout import NUM_BUFFERS

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = problem_ids(4)
NUM_TOKENS = 20 if pairwise.whole else 14
DIGITS = "%llguidance {}\nstart: /[0-9 ]{1,12}/"
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "seed": 8, "presence_penalty": 0.5, "logprobs": 3},
    {"temperature": 0.0, "grammar": DIGITS, "logit_bias": ((17, 2.0),)},
]
PLAIN: list[dict[str, Any]] = [  # no filter, change or logprobs
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.2, "seed": 6},
    {"temperature": 0.0, "min_tokens": 9},
]
DRAFTERS = {
    "none": {},
    "chain": {"drafter": "chain", "widths": [4]},
    "dflash": {"drafter": "dflash", "widths": [4]},
    "ngram": {"drafter": "ngram", "widths": [3]},
}


def sections(drafter: str, mode: str, **kv: object) -> dict[str, dict[str, Any]]:
    return {
        "model": {"path": str(shallow())} if drafter == "none" else {},
        "engine": {
            "device": "cpu", "threads": 1, "num_pages": 160, "max_num_reqs": 16, "strict": True,
        },
        "kv": {"page_size": 16, **kv},
        "spec": DRAFTERS[drafter],
        "disaggregation": {"mode": mode},
    }  # fmt: skip


def asked(cluster: Running, wishes: list[dict[str, Any]] = WISHES) -> list[Answer]:
    """All wishes at once; with --whole twice: cold, then with what the prefix trees kept."""
    samplings = [Sampling(NUM_TOKENS, return_trace=True, **wish) for wish in wishes]
    rounds = range(1 + pairwise.whole)
    return [each for _ in rounds for each in cluster.answers(PROMPTS, samplings)]


def alike(found: list[Answer], expected: list[Answer], *, pulled: bool = False) -> None:
    """Texts, reasons, windows; logprobs but for rounding.

    pulled: where decode draws the first token, its first window is one token earlier.
    """
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.tokens == other.tokens
        assert one.finish_reason == other.finish_reason
        if not pulled or Sampling(NUM_TOKENS, **WISHES[number % len(WISHES)]).is_plain:
            assert one.windows == other.windows
        # Of the prompt, then of the answer.
        scores = ([*each.prompt_logprobs, *each.logprobs] for each in (one, other))
        for mine, theirs in zip(*scores, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


@cache
def of_one_rank(drafter: str, *, plain: bool = False) -> list[Answer]:
    with running(sections(drafter, "never"), num_prefill=0) as cluster:
        return asked(cluster, PLAIN if plain else WISHES)


# With 4, two ranks have copies of each kv head.
@pytest.mark.parametrize(
    ("drafter", "tp"),
    [("chain", 2), *pairwise.more(("ngram", 2), ("dflash", 4), ("none", 2), ("none", 4))],
)
def test_several_ranks_answer_like_one(drafter: str, tp: int) -> None:
    with running(sections(drafter, "never"), num_prefill=0, decode_tp=tp) as cluster:
        alike(asked(cluster), of_one_rank(drafter))


def buffers_that_are_reused(after: int) -> Any:
    """GlooCollective.buffer: as many calls later a buffer is lost, as those of a GPU may be."""

    def buffer(self: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        given = self.__dict__.setdefault("given", deque())
        given.append(torch.empty(shape, dtype=dtype))
        if len(given) > after:
            given.popleft().fill_(float("nan"))
        return given[-1]

    return buffer


@pytest.mark.parametrize("drafter", ["none", *pairwise.more("chain", "dflash")])
def test_nothing_outlives_the_buffers_that_are_summed_in(drafter: str, monkeypatch) -> None:
    monkeypatch.setattr(GlooCollective, "buffer", buffers_that_are_reused(NUM_BUFFERS))
    with running(sections(drafter, "always"), prefill_tp=2, decode_tp=2) as cluster:
        alike(asked(cluster), of_one_rank(drafter), pulled=True)


def test_a_part_that_does_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding is the first residual: with one buffer it is gone."""
    monkeypatch.setattr(GlooCollective, "buffer", buffers_that_are_reused(1))
    with running(sections("none", "never"), num_prefill=0, decode_tp=2) as cluster:
        assert asked(cluster)[0].tokens != of_one_rank("none")[0].tokens


@pytest.mark.product(
    drafter=("chain", *pairwise.more("none", "ngram", "dflash")),
    prefill=(1, 4, *pairwise.more(2)),
    decode=(2, *pairwise.more(4, 1)),
    num_groups=(2, *pairwise.more(1)),
)
def test_kv_is_pulled_between_any_numbers_of_ranks(drafter, prefill, decode, num_groups) -> None:
    wanted = sections(drafter, "always", num_groups=num_groups)
    with running(wanted, prefill_tp=prefill, decode_tp=decode) as cluster:
        found = asked(cluster)
        alike(found, of_one_rank(drafter), pulled=True)
        assert all(each.stages[0].prefilled_by for each in found[: len(PROMPTS)])


def test_a_rank_that_stores_a_drafters_rows_late_spoils_none(monkeypatch) -> None:
    """The leader, which announces them, has stored its own long before."""
    store = SelfAttention.store

    def late(attention: SelfAttention, hidden: Tensor, positions: Tensor) -> None:
        if attention.output.parts.columns.held.start:  # not the leader's
            time.sleep(0.05)
        store(attention, hidden, positions)

    monkeypatch.setattr(SelfAttention, "store", late)
    wanted = sections("chain", "always", num_groups=2)
    with running(wanted, prefill_tp=2) as cluster:
        alike(asked(cluster), of_one_rank("chain"), pulled=True)
