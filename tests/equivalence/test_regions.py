"""Pages with regions beside the target's are served and pulled as pages without are."""

import pytest
import torch

from tests.support.engines import Running, running, worker_config
from tests.support.prompts import problem_ids
from tests.support.regions import add_regions
from worker.api import Sampling
from worker.forward.batch import Batch
from worker.run.base import Forward
from worker.run.check import check_chunk_bucket
from worker.run.eager import EagerChunks
from worker.start.build import build_engine

SECTIONS: dict[str, dict[str, object]] = {
    "engine": {"device": "cpu", "threads": 1, "num_pages": 200, "max_prefill_tokens": 40},
    "kv": {"page_size": 16, "num_groups": 3},
    "disaggregation": {"mode": "always"},
}
PROMPTS = [prompt * 2 for prompt in problem_ids(8)]


def ask(cluster: Running) -> list[list[int]]:
    answers = cluster.answers(PROMPTS, Sampling(12, 0.0))
    assert all(each.stages[0].prefilled_by == "prefill-0/i0" for each in answers)
    return [each.tokens for each in answers]


def test_all_regions_of_a_page_travel_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(SECTIONS) as cluster:
        expected = ask(cluster)
    add_regions(monkeypatch)
    with running(SECTIONS) as cluster:
        there, here = (
            cluster.workers[name].engine.pool for name in ("prefill-0", "decode-0")
        )  # fmt: skip
        for cache in (*there.layer(0, "draft"), there.page_rows("tail")):
            cache.normal_()
        assert ask(cluster) == expected
        draft_here, draft_there = (pool.layer(0, "draft") for pool in (here, there))
        tails, num_whole = there.page_rows("tail"), 0
        for page, tail in enumerate(here.page_rows("tail")):
            if not tail.any():
                assert not any(cache[page].any() for cache in draft_here)
                continue
            (source,) = (tails == tail).all(1).nonzero().flatten().tolist()
            for ours, theirs in zip(draft_here, draft_there, strict=True):
                assert torch.equal(ours[page], theirs[source])
            num_whole += all(
                torch.equal(ours[page], theirs[source])
                for layer in range(here.region().num_layers)
                for ours, theirs in zip(here.layer(layer), there.layer(layer), strict=True)
            )
    assert num_whole >= sum(len(prompt) // 16 for prompt in PROMPTS)


@pytest.mark.parametrize("region", ["draft", "tail", None])
@torch.inference_mode()
def test_the_start_up_check_compares_all_regions(
    monkeypatch: pytest.MonkeyPatch, region: str | None
) -> None:
    add_regions(monkeypatch)
    engine = build_engine(worker_config("prefill", SECTIONS), name="prefill-0", host="127.0.0.1")
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
