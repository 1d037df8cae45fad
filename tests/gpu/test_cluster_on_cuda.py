"""`serve` on GPUs: every process of its own, placed by Ray, answers as a cluster on the CPU.

In float32, with the bundled model; every prompt is computed by the prefill worker and pulled.
"""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass
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
pytestmark = pytest.mark.timeout(900)
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


def check(serve: Serve, wanted: Answers, transport: str, *, replays: bool, page_bytes: int) -> None:
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


@dataclass(frozen=True)
class Case:
    """A cluster on GPUs; by default one of the dense model, whose decode steps are replayed."""

    num_gpus: int
    arguments: tuple[str, ...]
    transport: str
    replays: bool = True
    experts: bool = False


def of_kind(kind: str) -> tuple[str, str]:
    return "--set", f"transport.kind={kind}"


def with_experts(experts: str) -> tuple[str, ...]:
    return *ranks("decode", "prefill"), "--set", f"decode.engine.experts={experts}"


# On one GPU in shares; on two what `serve` does by itself, or a worker of two ranks with a GPU
# each, whose steps have to be equal, beside one on the CPU.
CASES = {
    "one GPU, sockets": Case(1, (*SHARED, *of_kind("tcp")), "sockets/tcp"),
    "one GPU, nvlink": Case(1, (*SHARED, *of_kind("nvlink")), "mooncake/nvlink"),
    "experts": Case(1, (*SHARED, *of_kind("nvlink")), "mooncake/nvlink", experts=True),
    "two GPUs, sockets": Case(2, of_kind("tcp"), "sockets/tcp"),
    "two GPUs, nvlink": Case(2, of_kind("nvlink"), "mooncake/nvlink"),
    "ranks of decode": Case(2, ranks("decode", "prefill"), "sockets/tcp"),
    "ranks of prefill": Case(2, ranks("prefill", "decode"), "sockets/tcp", replays=False),
    "divided experts": Case(2, with_experts("tensor"), "sockets/tcp", experts=True),
    "experts by rank": Case(2, with_experts("expert"), "sockets/tcp", experts=True),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=pytest.mark.gpu(case.num_gpus))
             for name, case in CASES.items()],
)  # fmt: skip
def test_a_cluster_answers_as_one_on_the_cpu(
    case: Case, serve: Serve, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = request.getfixturevalue("moe_answers" if case.experts else "cpu_answers")
    if case.num_gpus == 1:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # of `serve`, however many there are
    model = MOE if case.experts else ()
    serve.start(*COMMON, *model, *case.arguments).wait_ready(READY_TIMEOUT_S)
    page_bytes = MOE_PAGE_BYTES if case.experts else PAGE_BYTES
    check(serve, wanted, case.transport, replays=case.replays, page_bytes=page_bytes)


@pytest.mark.gpu(1)
def test_shares_that_do_not_fit_are_one_clear_error(serve: Serve, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    too_much = ("--set", "decode.engine.memory_fraction=0.9")
    serve.start(*COMMON, *SHARED, *too_much)
    assert serve.wait(READY_TIMEOUT_S) == 2, serve.output
    errors = [line for line in serve.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "engine.memory_fraction: no room for this worker's share" in errors[0]
    assert "GiB is" in errors[0]
