"""Pages with regions beside the target's are served and pulled as pages without are."""

import pytest
import torch

from tests.support.engines import running, worker_config
from tests.support.prompts import problem_ids
from tests.support.regions import add_regions
from worker.api import Sampling
from worker.forward.batch import Batch
from worker.run.base import Forward
from worker.run.check import check_chunk_bucket
from worker.run.eager import EagerChunks
from worker.start.build import Place, build_engine

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


@pytest.mark.parametrize("region", ["draft", "tail", None])
@torch.inference_mode()
def test_the_start_up_check_compares_all_regions(monkeypatch, region: str | None) -> None:
    add_regions(monkeypatch)
    engine = build_engine(worker_config("prefill", SECTIONS), Place("prefill-0", "1", "127.0.0.1"))
    loaded, launch = engine.runner.loaded, EagerChunks(engine.runner.loaded).launch

    def writes(batch: Batch) -> Forward:
        if region is not None:
            regions[region][1, ..., -1] += 1  # of page 1
        return launch(batch)

    regions = {"draft": engine.pool.layer(0, "draft")[1], "tail": engine.pool.page_rows("tail")}
    found = check_chunk_bucket(loaded, 32, (launch, writes), fixed_shape=False)
    assert found is not None
    assert found.equal is (region is None)
    assert not any(cache.any() for cache in engine.pool.caches()), "the check leaves nothing"
    engine.close()
