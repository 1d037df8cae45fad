"""OpenAI's client against a cluster: texts as of one process, prompts computed by prefill workers."""

from __future__ import annotations

import asyncio
import math

from benchmarks.train.problems import held_out_problems
from tests.e2e.harness import Serve
from tests.support.asking import ask_all
from tests.support.prompts import problem_ids
from tests.support.reference import reference_texts
from tests.support.scrape import scrape

NUM = 64
MAX_TOKENS = 200
PAGE_SIZE = 16
ARGUMENTS = (
    "--router", "1", "--prefill", "2", "--decode", "2",
    "--set", "transport.name=mooncake",
    "--set", "disaggregation.mode=always",
)  # fmt: skip


def check_cluster(base_url: str) -> None:
    """64 concurrent held-out problems; every prompt computed by prefill, every page pulled."""
    before = scrape(base_url)
    questions = [problem.question for problem in held_out_problems(NUM)]
    outcomes = asyncio.run(ask_all(base_url, questions, max_tokens=MAX_TOKENS))
    assert [each.error for each in outcomes] == [None] * NUM
    expected = reference_texts(NUM, MAX_TOKENS)
    assert [(each.text, each.finish_reason) for each in outcomes] == list(expected)
    prompts = problem_ids(NUM)
    assert [each.num_prompt_tokens for each in outcomes] == [len(prompt) for prompt in prompts]

    after = scrape(base_url)

    def grown(name: str, role: str, transport: str = "") -> float:
        return after[name, role, transport] - before.get((name, role, transport), 0.0)

    computed = grown("kvlane_prompt_tokens_computed_total", "prefill")
    cached_there = grown("kvlane_prompt_tokens_cached_total", "prefill")
    assert computed > 0
    assert computed + cached_there == sum(len(prompt) - 1 for prompt in prompts)
    assert grown("kvlane_prompt_tokens_computed_total", "decode") == 0
    cached_here = grown("kvlane_prompt_tokens_cached_total", "decode")
    num_pages = sum(math.ceil((len(p) - 1) / PAGE_SIZE) for p in prompts) - cached_here / PAGE_SIZE
    pulled = grown("kvlane_kv_pulled_bytes_total", "decode", "mooncake/tcp")
    page_bytes = PAGE_SIZE * 6 * 2 * 2 * 64 * 4  # layers, k and v, kv heads, head_dim, float32
    assert pulled == num_pages * page_bytes
    print(f"prefill computed {computed:.0f} tokens, decode pulled {pulled:.0f} bytes")


def test_64_concurrent_problems_equal_one_process(serve: Serve) -> None:
    serve.start(*ARGUMENTS).wait_ready()
    check_cluster(serve.url)
    rows = serve.wait_idle()
    assert {name for name, row in rows.items() if row["counters"]} >= {"prefill-1", "decode-1"}


def test_two_routers_share_the_workers(serve: Serve) -> None:
    serve.start("--router", "2", "--prefill", "1", "--decode", "1").wait_ready()
    questions = [problem.question for problem in held_out_problems(8)]
    for port in (serve.port, serve.port + 1):
        url = f"http://127.0.0.1:{port}"
        outcomes = asyncio.run(ask_all(url, questions, max_tokens=MAX_TOKENS))
        assert [each.text for each in outcomes] == [
            text for text, _ in reference_texts(NUM, MAX_TOKENS)[:8]
        ]
