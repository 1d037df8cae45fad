"""Do the harness and the server's own metrics say the same? `kvlane bench --agree`.

The server's /metrics is read before and after all runs, which must be all that it serves meanwhile;
warm-ups are left out. What it counts under the names of vLLM (kvlane has them) or llama.cpp is
compared; of a server that tells of nothing, its usage with our tokenizer's counts of its texts.
Times are sums over all requests: from the send, which is all that a server knows.
"""

import asyncio
import re
from collections.abc import Iterable

import aiohttp

from benchmarks.load.measure import samples
from benchmarks.load.records import Outcome, Run
from benchmarks.load.report import aligned, number, percent
from cluster.clients.find import trusted

MOST = 0.03
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? ([^ ]+)")
# By what the harness counts: counters to add up, of the first server that has them all.
NAMES = {
    "requests": (("vllm:e2e_request_latency_seconds_count",),),
    "prompt tokens": (
        ("vllm:prompt_tokens_total",),
        ("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"),
        ("llamacpp:prompt_tokens_total",),  # as older ones have it
    ),
    "output tokens": (("vllm:generation_tokens_total",), ("llamacpp:tokens_predicted_total",)),
    "to first tokens, s": (
        ("vllm:time_to_first_token_seconds_sum",),
        ("llamacpp:prompt_seconds_total",),
    ),
    "end to end, s": (
        ("vllm:e2e_request_latency_seconds_sum",),
        ("llamacpp:prompt_seconds_total", "llamacpp:tokens_predicted_seconds_total"),
    ),
}
Sums = dict[str, float]  # of all series of a name


def read(url: str, headers: dict[str, str], cacert: str) -> Sums:
    """What the server tells now; nothing of one that has no such page. Raises ConnectionError."""

    async def page() -> str:
        timeout = aiohttp.ClientTimeout(total=30)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as http,
            http.get(f"{url}/metrics", ssl=trusted(cacert) or True) as response,
        ):
            return await response.text() if response.status == 200 else ""

    sums: Sums = {}
    try:
        text = asyncio.run(page())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConnectionError(f"{url}/metrics cannot be asked: {error}") from error
    for found in filter(None, map(SAMPLE.match, text.splitlines())):
        sums[found[1]] = sums.get(found[1], 0.0) + float(found[2])
    return sums


def told(before: Sums, after: Sums) -> dict[str, float]:
    """What the server says of the time between, by what the harness calls it."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    says: dict[str, float] = {}
    for label, ways in NAMES.items():
        known = (names for names in ways if grown.keys() >= set(names))
        if names := next(known, None):
            says[label] = sum(grown[name] for name in names)
    return says


def seen(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """The same as the harness has it."""
    served = [outcome for outcome in outcomes if not outcome.error]
    return {
        "requests": float(len(served)),
        "prompt tokens": float(sum(outcome.num_prompt_tokens for outcome in served)),
        "output tokens": float(sum(outcome.num_output_tokens for outcome in served)),
        "to first tokens, s": float(samples(served)["ttft_from_send_s"].sum()),
        "end to end, s": sum(outcome.end_s - outcome.sent_s for outcome in served),
    }


def table(runs: Iterable[Run], before: Sums, after: Sums) -> tuple[list[str], bool]:
    """Both beside each other, and whether all are within MOST."""
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    ours, theirs = seen(outcomes), told(before, after)
    if not theirs:
        counted = [o for o in outcomes if o.num_text_tokens is not None and not o.error]
        ours = {"output tokens": float(sum(o.num_output_tokens for o in counted))}
        theirs = {"output tokens": float(sum(o.num_text_tokens or 0 for o in counted))}
    rows = [["", "harness", "server", "apart"]]
    apart: list[float] = []
    for name, value in theirs.items():
        apart.append(abs(ours[name] - value) / value if value else float(bool(ours[name])))
        rows.append([name, number(ours[name], 3), number(value, 3), percent(apart[-1])])
    return aligned(rows), bool(apart) and max(apart) <= MOST
