"""The engine laws on one GPU, in float32, against the CPU's ids."""

import random

import pytest

from tests.equivalence.test_structured import accepted, answers_of, check
from tests.gpu.sync import check_no_wait
from tests.support.engines import Answer, running, value
from tests.support.prompts import VOCAB, problem_ids
from tests.support.reference import sampling_of
from worker.api import Sampling
from worker.plan import LONG_STEP_TOKENS

pytestmark = pytest.mark.gpu(1)
NUM = 32
MAX_TOKENS = 100
SCORING = Sampling(4, temperature=0.0, prompt_logprobs=3)


def sections(device: str, mode: str, **kv: object) -> dict[str, dict[str, object]]:
    transport: dict[str, object] = {"name": "mooncake", "kind": "tcp"} if device == "cuda" else {}
    return {
        "model": {"dtype": "float32"},
        "engine": {"device": device, "num_pages": 2000, "threads": 1},
        "disaggregation": {"mode": mode},
        "transport": transport,
        "kv": kv,
    }


@pytest.fixture(scope="module")
def cpu_ids() -> list[list[int]]:
    with running(sections("cpu", "never"), num_prefill=0) as cluster:
        return ask(cluster)


def ask(cluster) -> list[list[int]]:
    sampling = [sampling_of(i, MAX_TOKENS) for i in range(NUM)]
    return [each.tokens for each in cluster.answers(problem_ids(NUM), sampling)]


@pytest.mark.product(
    mode=("always", "never"), page_size=(16, 64), num_groups=(1, 2),
    graph=("eager", "auto"), first_token=("prefill", "decode"),
)  # fmt: skip
def test_cuda_equals_cpu_in_float32(
    mode: str, page_size: int, num_groups: int, graph: str, first_token: str, cpu_ids: list
) -> None:
    """Also where a prefill worker draws; with layer groups its token follows the last KV."""
    config = sections("cuda", mode, page_size=page_size, num_groups=num_groups)
    config["engine"]["graph"], config["disaggregation"]["first_token"] = graph, first_token
    with running(config, num_prefill=int(mode == "always")) as cluster:
        for _ in range(2):  # the prefix trees hold the prompts then
            assert ask(cluster) == cpu_ids
        if mode == "always":
            drawn = value(cluster.workers["prefill-0"].engine.metrics.generated_tokens)
            assert (drawn >= NUM) == (first_token == "prefill")


def test_bfloat16_serves_as_stored(cpu_ids: list) -> None:
    config = sections("cuda", "always")
    config["model"] = {}
    with running(config) as cluster:
        same = sum(a == b for a, b in zip(ask(cluster), cpu_ids, strict=True))
    assert same > NUM // 2, f"only {same} of {NUM} texts agree with float32"


def test_masked_steps_on_cuda_equal_the_cpu() -> None:
    """Grammars with every filter and penalty: the tail that waits for the host's masks."""
    asked = accepted()[::4]
    extras = {"top_p": 0.9, "top_k": 20, "presence_penalty": 1.5, "min_tokens": 30}
    answers = answers_of(asked, device="cuda", path="tiny", **extras)
    for (schema, grammar), answer in zip(asked, answers, strict=True):
        check(schema, grammar, answer)
    wanted = answers_of(asked, path="tiny", **extras)
    assert [each.tokens for each in answers] == [each.tokens for each in wanted]


def scored(device: str, prompts: list[tuple[int, ...]]) -> list[Answer]:
    with running(sections(device, "never"), num_prefill=0) as cluster:
        together = cluster.answers(prompts, [SCORING] * len(prompts))
        return together + [cluster.answers([prompt], [SCORING])[0] for prompt in prompts]


def test_logprobs_of_prompts_are_those_of_the_cpu() -> None:
    """From graphs, and from a step too long for one."""
    rng = random.Random(3)
    long = tuple(rng.randrange(3, VOCAB) for _ in range(LONG_STEP_TOKENS + 300))
    prompts = [*problem_ids(8), long]
    for found, wanted in zip(scored("cuda", prompts), scored("cpu", prompts), strict=True):
        assert found.tokens == wanted.tokens
        for each, other in zip(found.prompt_logprobs, wanted.prompt_logprobs, strict=True):
            assert each.logprob == pytest.approx(other.logprob, abs=1e-3)
            values = [value for _, value in other.top]
            assert [value for _, value in each.top] == pytest.approx(values, abs=1e-3)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("widths", [[1], [4], [1, 2, 4, 8]])
def test_a_step_never_waits_for_the_device(widths: list[int]) -> None:
    """Everything that launch enqueues, under torch's own detector of host syncs."""
    config = sections("cuda", "never")
    config["spec"] = {"widths": widths, "simulate_accept_len": 2.5}
    check_no_wait(config, ask)
