"""Backends chosen separately for prompts and for decode steps give the ids of the reference.

FlashInfer's runs over a double of the library, which knows no lengths but those that the host plans
with: one that is off by one anywhere, after chunks, prefix hits, preemption or a row that ended
unseen, changes the ids.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import laws
from tests.support.engines import Running, running, value
from tests.support.pairwise import in_whole
from tests.support.prompts import problem_ids
from tests.support.reference import sampling_of
from worker.api import Sampling
from worker.attention.base import AttentionShape
from worker.attention.build import build_attentions
from worker.cache.layout import KVLayout, KVRegion
from worker.cache.pool import KVPool
from worker.config.backends import ATTENTION
from worker.errors import Unsupported
from worker.run.full import FullDecode

NUM, MAX_TOKENS = 12, 40
CPU = torch.device("cpu")
DOUBLE = "tests.support.flashinfer_double:FlashInferDouble"


def sections(attention: object, mode: str, **engine: object) -> dict[str, Any]:
    return laws.sections(mode, attention=attention, max_prefill_tokens=23, **engine)


def samplings() -> list[Sampling]:
    """Greedy, with every filter, and with penalties, whose tail is a launch of its own."""
    penalties = Sampling(max_tokens=MAX_TOKENS, temperature=0.0, presence_penalty=0.7)
    return [sampling_of(i, MAX_TOKENS) if i % 3 else penalties for i in range(NUM)]


def ask(cluster: Running) -> list[list[int]]:
    """Twice the same: the second time prefixes are there."""
    for _ in range(2):
        answers = cluster.answers(problem_ids(NUM), samplings())
    return [each.tokens for each in answers]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with running(sections("reference", "never"), num_prefill=0) as cluster:
        return ask(cluster)


@pytest.mark.parametrize(
    ("attention", "mode"),
    [
        ({"decode": "flashinfer"}, "always"),
        *in_whole(
            ("flashinfer", "always"),
            ("flashinfer", "never"),
            ({"prefill": "flashinfer"}, "never"),
            ({"prefill": "flashinfer"}, "always"),
            ({"decode": "flashinfer"}, "never"),
        ),
    ],
)
def test_host_planned_attention_changes_nothing(monkeypatch, attention, mode, expected):
    monkeypatch.setitem(ATTENTION, "flashinfer", DOUBLE)
    with running(sections(attention, mode)) as cluster:
        assert ask(cluster) == expected
        built = [worker.engine.config.engine.attention for worker in cluster.workers.values()]
        names = {"prefill": "reference", "decode": "reference", "spec": "reference"}
        both = ("prefill", "decode")
        given = dict.fromkeys(both, attention) if isinstance(attention, str) else attention
        assert all(each.model_dump() == {**names, **given} for each in built)


def test_preempted_rows_are_planned_with_their_own_lengths(monkeypatch, expected):
    monkeypatch.setitem(ATTENTION, "flashinfer", DOUBLE)
    with running(
        sections("flashinfer", "never", num_pages=40, growth_tokens=1), num_prefill=0
    ) as cluster:
        assert ask(cluster) == expected
        metrics = cluster.workers["decode-0"].engine.metrics
        assert value(metrics.preemptions) > 0


def test_a_full_graph_of_host_planned_attention_is_refused_at_load(monkeypatch):
    """FullDecode asks that first, before anything that needs a GPU."""
    monkeypatch.setitem(ATTENTION, "flashinfer", DOUBLE)
    pool = KVPool(KVLayout((KVRegion("target", 1, 2, 32, 1, 16, "float32"),)), 2, CPU)
    names = {"prefill": "reference", "decode": "flashinfer", "spec": "reference"}
    shape = AttentionShape(4, 2, 32, 1.0)
    loaded: Any = SimpleNamespace(attention=build_attentions(names, pool, shape))
    missing: Any = None
    with pytest.raises(Unsupported, match=r"engine\.attention\.decode=triton"):
        FullDecode(loaded, missing)
    pool.close()
