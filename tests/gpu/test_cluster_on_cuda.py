"""`serve` on GPUs: every process of its own, placed by Ray, answers as a cluster on the CPU.

In float32, with the bundled model; every prompt is computed by the prefill worker and pulled.
"""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.train.problems import held_out_problems
from tests.e2e.check import check_stages
from tests.e2e.harness import Serve, processes
from tests.support.asking import ask_all
from tests.support.prompts import problem_ids
from tests.support.scrape import scrape

NUM = 32
MAX_TOKENS = 100
PAGE_SIZE = 64
PAGE_BYTES = PAGE_SIZE * 6 * 2 * 2 * 64 * 4  # layers, k and v, kv heads, head_dim, float32
MOE = ("--model", "tiny-moe", "--set", "model.served_name=tiny")
MOE_PAGE_BYTES = PAGE_BYTES * 4 // 6
READY_TIMEOUT_S = 400.0  # kernels are compiled, by one worker after the other
COMMON = (
    "--set", "model.dtype=float32",
    "--set", f"kv.page_size={PAGE_SIZE}",
    "--set", "disaggregation.mode=always",
)  # fmt: skip
CPU = ("--set", "prefill.engine.device=cpu", "--set", "decode.engine.device=cpu")
SHARED = (
    "--set", "prefill.num_gpus=0.5", "--set", "prefill.engine.memory_fraction=0.2",
    "--set", "decode.num_gpus=0.5", "--set", "decode.engine.memory_fraction=0.3",
)  # fmt: skip

ROADS = {"tcp": "sockets/tcp", "nvlink": "mooncake/nvlink"}  # by transport.kind
Answers = list[tuple[str, str | None]]


def ask(serve: Serve) -> Answers:
    """Greedy and seeded problems, all at once."""
    questions = [problem.question for problem in held_out_problems(NUM)]
    outcomes = asyncio.run(ask_all(serve.url, questions, max_tokens=MAX_TOKENS))
    assert [each.error for each in outcomes] == [None] * NUM
    return [(each.text, each.finish_reason) for each in outcomes]


def on_the_cpu(directory: Path, *arguments: str) -> Iterator[Answers]:
    serve = Serve(directory, port=8710)
    try:
        yield ask(serve.start(*COMMON, *CPU, *arguments).wait_ready(READY_TIMEOUT_S))
    finally:
        serve.end()


@pytest.fixture(scope="module")
def cpu_answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    yield from on_the_cpu(tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="module")
def moe_answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    yield from on_the_cpu(tmp_path_factory.mktemp("moe"), *MOE)


def check(
    serve: Serve,
    wanted: Answers,
    transport: str,
    *,
    replays: bool = True,
    page_bytes: int = PAGE_BYTES,
) -> None:
    """The same answers, all KV pulled over `transport`, nothing held and nothing left after it."""
    assert ask(serve) == wanted
    after = scrape(serve.url)
    prompts = problem_ids(NUM)
    computed = after["kvlane_prompt_tokens_computed_total", "prefill", ""]
    cached_there = after["kvlane_prompt_tokens_cached_total", "prefill", ""]
    assert computed + cached_there == sum(len(prompt) for prompt in prompts)
    assert after["kvlane_prompt_tokens_computed_total", "decode", ""] == 0
    cached_here = after["kvlane_prompt_tokens_cached_total", "decode", ""]
    num_pages = sum(math.ceil(len(p) / PAGE_SIZE) for p in prompts) - cached_here / PAGE_SIZE
    assert after["kvlane_kv_pulled_bytes_total", "decode", transport] == num_pages * page_bytes > 0
    assert (replayed_steps(serve) > 0) == replays
    check_stages(serve.url)
    rows = serve.wait_idle()
    assert {row["restarts"] for row in rows.values()} == {0}
    serve.interrupt()
    assert serve.wait() == 0, serve.output
    assert "Traceback" not in serve.output
    assert not {row["pid"] for row in rows.values()} & set(processes())
    assert serve.leftovers() == []


def ranks(several: str, other: str) -> tuple[str, ...]:
    """Two ranks of a role with a GPU each, and the other role on the CPU."""
    return (
        "--set", f"{several}.tp=2", "--set", f"{several}.engine.strict=true",
        "--set", f"{other}.engine.device=cpu", "--set", "transport.kind=tcp",
        "--set", "kv.num_groups=1",  # else more on a GPU, and the two would refuse each other
    )  # fmt: skip


def replayed_steps(serve: Serve) -> float:
    """Decode steps that were not launched op by op."""
    address = serve.status()["decode-0"]["metrics_address"]
    text = httpx.get(f"http://{address}/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "kvlane_engine_steps_total"
        and sample.labels["kind"] == "decode"
        and sample.labels["path"] != "eager"
    )


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    cluster = Serve(tmp_path, port=8720)
    yield cluster
    cluster.end()


@pytest.mark.gpu(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["tcp", "nvlink"])
def test_two_workers_on_one_gpu(kind: str, cpu_answers: Answers, serve: Serve, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # of `serve`, however many there are
    arguments = (*COMMON, *SHARED, "--set", f"transport.kind={kind}")
    serve.start(*arguments).wait_ready(READY_TIMEOUT_S)
    check(serve, cpu_answers, ROADS[kind])


@pytest.mark.gpu(1)
@pytest.mark.timeout(900)
def test_experts_on_one_gpu(moe_answers: Answers, serve: Serve, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    serve.start(*COMMON, *MOE, *SHARED, "--set", "transport.kind=nvlink")
    serve.wait_ready(READY_TIMEOUT_S)
    check(serve, moe_answers, "mooncake/nvlink", page_bytes=MOE_PAGE_BYTES)


@pytest.mark.gpu(1)
@pytest.mark.timeout(900)
def test_shares_that_do_not_fit_are_one_clear_error(serve: Serve, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    too_much = ("--set", "decode.engine.memory_fraction=0.9")
    serve.start(*COMMON, *SHARED, *too_much)
    assert serve.wait(READY_TIMEOUT_S) == 2, serve.output
    errors = [line for line in serve.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "engine.memory_fraction: no room for this worker's share" in errors[0]
    assert "GiB is" in errors[0]


@pytest.mark.gpu(2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("several", "other"), [("decode", "prefill"), ("prefill", "decode")])
def test_a_worker_on_two_gpus(several: str, other: str, cpu_answers: Answers, serve: Serve) -> None:
    """Two ranks with a GPU each, whose steps have to be equal, beside a worker on the CPU."""
    serve.start(*COMMON, *ranks(several, other)).wait_ready(READY_TIMEOUT_S)
    check(serve, cpu_answers, "sockets/tcp", replays=several == "decode")


@pytest.mark.gpu(2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("experts", ["tensor", "expert"])
def test_experts_on_two_gpus(experts: str, moe_answers: Answers, serve: Serve) -> None:
    divided = ("--set", f"decode.engine.experts={experts}")
    serve.start(*COMMON, *MOE, *ranks("decode", "prefill"), *divided).wait_ready(READY_TIMEOUT_S)
    check(serve, moe_answers, "sockets/tcp", page_bytes=MOE_PAGE_BYTES)


@pytest.mark.gpu(2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["tcp", "nvlink"])
def test_two_workers_on_two_gpus(kind: str, cpu_answers: Answers, serve: Serve) -> None:
    """What `serve` does by itself where there are GPUs: one each."""
    serve.start(*COMMON, "--set", f"transport.kind={kind}").wait_ready(READY_TIMEOUT_S)
    check(serve, cpu_answers, ROADS[kind])
