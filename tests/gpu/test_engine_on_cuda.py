"""The engine laws on one GPU, in float32, against the CPU's ids."""

import pytest

from tests.equivalence.test_structured import accepted, answers_of, check
from tests.gpu.sync import fail_on_sync
from tests.support.engines import running
from tests.support.prompts import problem_ids
from tests.support.reference import sampling_of

pytestmark = pytest.mark.gpu(1)
NUM = 32
MAX_TOKENS = 100


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


@pytest.mark.parametrize("mode", ["always", "never"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_cuda_equals_cpu_in_float32(mode: str, page_size: int, cpu_ids: list) -> None:
    with running(sections("cuda", mode, page_size=page_size)) as cluster:
        assert ask(cluster) == cpu_ids
        assert ask(cluster) == cpu_ids  # the prefix trees hold the prompts now


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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("widths", [[1], [4], [1, 2, 4, 8]])
def test_a_step_never_waits_for_the_device(widths: list[int]) -> None:
    """Everything that launch enqueues, under torch's own detector of host syncs."""

    config = sections("cuda", "never")
    config["spec"] = {"widths": widths, "simulate_accept_len": 2.5}
    with running(config, num_prefill=0) as cluster:
        ask(cluster)  # warm: allocator, kernels
        fail_on_sync(cluster.workers["decode-0"].engine.runner)
        ask(cluster)
