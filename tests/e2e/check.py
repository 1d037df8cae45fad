"""What a cluster of prefill and decode workers must show.

By hand: `python -m tests.e2e.check URL [NUMBER]`.
"""

import asyncio
import math
import sys

import httpx

from benchmarks.train.problems import held_out_problems
from router.observe.stages import FIELDS
from tests.support import pairwise
from tests.support.asking import Outcome, ask_all
from tests.support.patience import HANG_S
from tests.support.prompts import problem_ids
from tests.support.reference import reference_texts
from tests.support.scrape import Samples, scrape

ALL = NUM, MAX_TOKENS = 40, 200
KNOWN = ALL if pairwise.whole else (12, 60)  # problems, and tokens of an answer, of these tests
PAGE_SIZE = 16


def check_cluster(base_url: str, num: int = NUM, known: tuple[int, int] = ALL) -> None:
    """Concurrent held-out problems; every prompt computed by prefill, every page pulled."""
    before = scrape(base_url)
    outcomes = check_texts(base_url, num, known)
    prompts = problem_ids(num)
    assert [outcome.num_prompt_tokens for outcome in outcomes] == [
        len(prompt) for prompt in prompts
    ]

    page_bytes = PAGE_SIZE * 6 * 2 * 2 * 64 * 4  # layers, k and v, kv heads, head_dim, float32
    check_counts(base_url, num, PAGE_SIZE, page_bytes, 0, before)
    check_stages(base_url)


def check_counts(
    base_url: str, num: int, page_size: int, page_bytes: int, request_bytes: int, before: Samples
) -> str:
    """Of `num` prompts prefill computed or had cached all, decode none; it pulled every page and
    what belongs to a request over one transport, which is returned. before: what metrics said
    before they were asked."""
    after = scrape(base_url)

    def grown(name: str, role: str, transport: str = "") -> float:
        return after[name, role, transport] - before.get((name, role, transport), 0.0)

    prompts = problem_ids(num)
    computed = grown("kvlane_prompt_tokens_computed_total", "prefill")
    cached_there = grown("kvlane_prompt_tokens_cached_total", "prefill")
    assert computed > 0
    # The last token, too: from its hidden state the prefill worker draws the first of the answer.
    assert computed + cached_there == sum(len(prompt) for prompt in prompts)
    assert grown("kvlane_prompt_tokens_computed_total", "decode") == 0
    cached_here = grown("kvlane_prompt_tokens_cached_total", "decode")
    num_pages = sum(math.ceil(len(p) / page_size) for p in prompts) - cached_here / page_size
    (road,) = {road for name, _, road in after if name == "kvlane_kv_pulled_bytes_total"}
    pulled = grown("kvlane_kv_pulled_bytes_total", "decode", road)
    assert pulled == num_pages * page_bytes + num * request_bytes
    print(f"prefill computed {computed:.0f} tokens, decode pulled {pulled:.0f} bytes by {road}")
    return road


def check_texts(base_url: str, num: int, known: tuple[int, int] = ALL) -> list[Outcome]:
    questions = [problem.question for problem in held_out_problems(num)]
    outcomes = asyncio.run(ask_all(base_url, questions, max_tokens=known[1]))
    assert [outcome.error for outcome in outcomes] == [None] * num
    expected = reference_texts(*known)[:num]
    assert [(outcome.text, outcome.finish_reason) for outcome in outcomes] == list(expected)
    return outcomes


def check_stages(base_url: str) -> None:
    """Prompts nobody has seen: each answer says where its time went, and it adds up."""
    for problem in held_out_problems(4, seed=77):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": problem.question}],
            "max_tokens": 8,
            "return_stages": True,
        }
        answer = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=HANG_S)
        stages = answer.json()["choices"][0]["stages"]
        assert stages["prefilled_by"].startswith("prefill-")
        assert stages["decoded_by"].startswith("decode-")
        seconds = {name: stages[name] for name in stages if name.endswith("_s")}
        assert min(seconds.values()) >= 0
        assert min(stages[f"{name}_s"] for name in ("prefill", "first_step", "pull")) > 0
        assert stages["pulled_bytes"] > 0
        assert stages["first_token_after"] == "prefill"
        timing = answer.headers["server-timing"].split(", ")
        whole_ms = dict(each.split(";dur=") for each in timing)["total"]
        assert sum(stages[field] for field in FIELDS) <= float(whole_ms) / 1e3
        before = ("router_queue_s", "prefill_queue_s", "prefill_s", "messages_s")
        assert sum(seconds[name] for name in before) <= seconds["first_token_s"] + 1e-6


if __name__ == "__main__":
    check_cluster(sys.argv[1], *map(int, sys.argv[2:]))
