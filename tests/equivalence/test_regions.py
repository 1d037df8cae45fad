"""Pages with regions beside the target's are served and pulled as pages without are."""

import pytest
import torch

from tests.support.engines import running
from tests.support.prompts import problem_ids
from tests.support.regions import add_regions
from worker.api import Sampling

SECTIONS: dict[str, dict[str, object]] = {
    "engine": {"device": "cpu", "threads": 1, "num_pages": 200, "max_prefill_tokens": 40},
    "kv": {"page_size": 16, "num_groups": 3},
    "disaggregation": {"mode": "always"},
}
PROMPTS = [prompt * 2 for prompt in problem_ids(8)]


def test_all_regions_of_a_page_travel_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody computes, too; and texts are as without it."""
    greedy = Sampling(12, temperature=0.0)
    with running(SECTIONS) as cluster:
        expected = [each.tokens for each in cluster.answers(PROMPTS, greedy)]
    add_regions(monkeypatch)
    with running(SECTIONS) as cluster:
        there, here = (cluster.workers[f"{role}-0"].engine.pool for role in ("prefill", "decode"))
        extra = [[*pool.layer(0, "draft"), pool.page_rows("tail")] for pool in (there, here)]
        for cache in extra[0]:
            cache.normal_()
        answers = cluster.answers(PROMPTS, greedy)
        assert [each.tokens for each in answers] == expected
        assert all(each.stages[0].prefilled_by == "prefill-0/i0" for each in answers)
        theirs, ours = ([each.flatten(1) for each in caches] for caches in extra)
        pulled = ours[-1].any(1)
        sources = (theirs[-1] == ours[-1][pulled, None]).all(2).nonzero()[:, 1]
        for source, found in zip(theirs, ours, strict=True):
            assert torch.equal(found[pulled], source[sources])
            assert not found[~pulled].any()
    assert pulled.sum() >= sum(len(prompt) // 16 for prompt in PROMPTS)
