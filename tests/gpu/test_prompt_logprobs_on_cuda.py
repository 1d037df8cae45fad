"""Logprobs of prompts on one GPU, in float32: from graphs, and from steps too long for one."""

import random

import pytest

from tests.gpu.test_engine_on_cuda import sections
from tests.support.engines import Answer, running
from tests.support.prompts import VOCAB, problem_ids
from worker.api import Sampling
from worker.plan import LONG_STEP_TOKENS

pytestmark = pytest.mark.gpu(1)
SCORING = Sampling(4, temperature=0.0, prompt_logprobs=3)


def scored(device: str, prompts: list[tuple[int, ...]]) -> list[Answer]:
    with running(sections(device, "never"), num_prefill=0) as cluster:
        together = cluster.answers(prompts, [SCORING] * len(prompts))
        alone = [cluster.answers([prompt], [SCORING])[0] for prompt in prompts]
        return [*together, *alone]


def test_scores_are_those_of_the_cpu() -> None:
    rng = random.Random(3)
    long = tuple(rng.randrange(3, VOCAB) for _ in range(LONG_STEP_TOKENS + 300))
    prompts = [*problem_ids(8), long]
    for found, wanted in zip(scored("cuda", prompts), scored("cpu", prompts), strict=True):
        assert found.tokens == wanted.tokens
        for each, other in zip(found.prompt_logprobs, wanted.prompt_logprobs, strict=True):
            assert each.logprob == pytest.approx(other.logprob, abs=1e-3)
            values = [value for _, value in other.top]
            assert [value for _, value in each.top] == pytest.approx(values, abs=1e-3)
