"""`serve` on GPUs: every process of its own, placed by Ray, answers as a cluster on the CPU.

In float32, with the bundled model; every prompt is computed by the prefill worker and pulled.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.train.problems import held_out_problems
from tests.e2e.check import check_counts, check_stages
from tests.e2e.harness import Serve, processes
from tests.support.asking import ask_all

NUM = 32
MAX_TOKENS = 100
PAGE_SIZE = 64
LAYER_BYTES = PAGE_SIZE * 2 * 2 * 64 * 4  # of a page: k and v, kv heads, head_dim, float32
EIGHT_BITS = PAGE_SIZE * 2 * 2 * (64 + 2)  # and an exponent
STATE_BYTES = 3 * (4 * 32 * 32 + 3 * 256) * 4  # layers; heads, their keys and values, inputs
HIDDEN_BYTES = 192 * 4  # of a prompt's last token, for a drafter
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
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    yield from on_the_cpu(tmp_path_factory.mktemp("cpu"), *of_model(request.param))


def check(serve: Serve, wanted: Answers, case: "Case") -> None:
    """The same answers, all KV pulled over its road, nothing held and nothing left after it."""
    assert ask(serve) == wanted
    pulled = case.page_bytes, case.request_bytes
    assert check_counts(serve.url, NUM, PAGE_SIZE, *pulled, {}) == case.transport
    assert (replayed_steps(serve) > 0) == case.replays
    check_stages(serve.url)
    rows = serve.wait_idle()
    assert {row["restarts"] for row in rows.values()} == {0}
    serve.interrupt()
    assert serve.wait() == 0, serve.output
    assert "Traceback" not in serve.output
    assert not {row["pid"] for row in rows.values()} & set(processes())
    assert serve.leftovers() == []


def ranks(several: str, other: str, num: int = 2) -> tuple[str, ...]:
    """So many ranks of a role with a GPU each, and the other role on the CPU."""
    return (
        "--set", f"{several}.tp={num}", "--set", f"{several}.engine.strict=true",
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
    model: str = "tiny"
    page_bytes: int = 6 * LAYER_BYTES
    request_bytes: int = 0


def of_kind(kind: str) -> tuple[str, str]:
    return "--set", f"transport.kind={kind}"


def of_model(name: str) -> tuple[str, ...]:
    return "--model", name, "--set", "model.served_name=tiny"


def unequal(prefill: int, decode: int) -> Case:
    """Ranks of both roles, a GPU each."""
    wanted = ("--set", f"prefill.tp={prefill}", "--set", f"decode.tp={decode}", *of_kind("nvlink"))
    return Case(prefill + decode, wanted, "mooncake/nvlink")


def of_ranks(num: int) -> dict[str, Case]:
    """One role's; each of two heads is pulled by a rank or by two, latents by all."""

    def case(several: str, other: str, *more: str, pages: int = 6, **model: Any) -> Case:
        arguments = *ranks(several, other, num), *more
        pages *= num // 2 * LAYER_BYTES if several == "decode" else LAYER_BYTES
        return Case(num, arguments, "sockets/tcp", several == "decode", page_bytes=pages, **model)

    def experts(way: str) -> Case:
        more = "--set", f"decode.engine.experts={way}"
        return case("decode", "prefill", *more, pages=4, model="tiny-moe")

    prefill = case("prefill", "decode", "--set", f"decode.tp={num // 2}")
    of_latents = case("decode", "prefill", model="tiny-latent")
    pages = num * 4 * PAGE_SIZE * (64 + 16) * 4
    return {
        "decode": case("decode", "prefill"), "prefill": prefill,
        "divided experts": experts("tensor"), "whole experts": experts("expert"),
        "latents": replace(of_latents, page_bytes=pages),
    }  # fmt: skip


def hybrid(arguments: tuple[str, ...], transport: str, *, replays: bool = True) -> Case:
    """Its own drafter's windows, state and drafts' KV pulled as well."""
    arguments = *arguments, "--spec", "mtp"
    more = STATE_BYTES + HIDDEN_BYTES
    return Case(2, arguments, transport, replays, "tiny-hybrid", 2 * LAYER_BYTES, more)


# On one GPU in shares; on two what `serve` does by itself, or a worker of two ranks with a GPU
# each, whose steps have to be equal, beside one on the CPU.
CASES = {
    "one GPU, sockets": Case(1, (*SHARED, *of_kind("tcp")), "sockets/tcp"),
    "one GPU, nvlink": Case(1, (*SHARED, *of_kind("nvlink")), "mooncake/nvlink"),
    "experts": Case(
        1, (*SHARED, *of_kind("nvlink")), "mooncake/nvlink", True, "tiny-moe", 4 * LAYER_BYTES
    ),
    "two GPUs, sockets": Case(2, of_kind("tcp"), "sockets/tcp"),
    "two GPUs, nvlink": Case(2, of_kind("nvlink"), "mooncake/nvlink"),
    **{f"{p} to {d} ranks, nvlink": unequal(p, d) for p, d in ((2, 1), (1, 2), (2, 2), (4, 2))},
    **{f"{name}, {num} ranks": case for num in (2, 4) for name, case in of_ranks(num).items()},
    "two GPUs, experts": Case(
        2, of_kind("nvlink"), "mooncake/nvlink", True, "tiny-moe", 4 * LAYER_BYTES
    ),
    "two GPUs, KV in eight bits": Case(
        2, ("--set", "kv.dtype=float8_e4m3fn", *of_kind("nvlink")), "mooncake/nvlink",
        page_bytes=6 * EIGHT_BITS,
    ),
    "two GPUs, windows": Case(
        2, ("--spec", "chain", *of_kind("nvlink")), "mooncake/nvlink",
        page_bytes=7 * LAYER_BYTES, request_bytes=HIDDEN_BYTES,
    ),
    "two GPUs, hybrid": hybrid(of_kind("nvlink"), "mooncake/nvlink"),
    "ranks of a hybrid's decode": hybrid(ranks("decode", "prefill"), "sockets/tcp"),
    "ranks of a hybrid's prefill": hybrid(ranks("prefill", "decode"), "sockets/tcp", replays=False),
}  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "case"),
    [pytest.param(case.model, case, id=name, marks=pytest.mark.gpu(case.num_gpus))
     for name, case in sorted(CASES.items(), key=lambda item: item[1].model)],
    indirect=["answers"],
)  # fmt: skip
def test_a_cluster_answers_as_one_on_the_cpu(
    answers: Answers, case: Case, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case.num_gpus == 1:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # of `serve`, however many there are
    serve.start(*COMMON, *of_model(case.model), *case.arguments).wait_ready(READY_TIMEOUT_S)
    check(serve, answers, case)


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
