"""`kvlane cache`: where KV that prompts began with was found, what tiers keep, and forget."""

import sys
from collections import defaultdict

import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.clients.server import Server
from cluster.tables import plain, table
from worker.errors import WorldError

TIMEOUT = httpx.Timeout(5.0)
MB = 1e6
HEAD = ("WORKER", "ROLE", "QUERIED", "POOL", "HOST", "DISK", "COMPUTED", "HOST MB", "DISK MB",
        "DROPPED", "MISSED", "FAILED")  # fmt: skip
NOTES = (
    "QUERIED, COMPUTED: tokens of prompts; POOL, HOST, DISK: found there, of those queried. "
    "DROPPED: pages evicted that no tier kept; MISSED: prompts that asked for one of them lately"
)

Sums = dict[str, float]


def show(server: Server, *, forget: bool) -> None:
    """Print a row a worker; forget: first have all of them delete what no request uses.

    Raises WorldError if there is no answer, or no leave.
    """
    with server.answering():
        if forget:
            _good(server.post("/reset_prefix_cache"))
            print("forgotten: pool and tiers keep what running requests use", file=sys.stderr)
        groups = _good(server.get("/metrics/targets")).json()
        targets = {target for group in groups for target in group["targets"]}
        pages = [httpx.get(f"http://{target}/metrics", timeout=TIMEOUT) for target in targets]
    rows = sorted(row for page in pages if (row := row_of(_good(page).text)))
    print(plain([table(HEAD, rows, range(2, len(HEAD)))]) + f"\n{NOTES}")


def row_of(page: str) -> tuple[str, ...]:
    """Of a worker's metrics; nothing for a router's."""
    sums, worker, role = defaultdict[str, float](float), "", ""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            worker = worker or sample.labels.get("worker", "")
            role = role or sample.labels.get("role", "")
            kinds = (sample.labels.get(name, "") for name in ("tier", "copy"))
            name = sample.name.removeprefix("kvlane_").removesuffix("_total")
            sums[" ".join(filter(None, (name, *kinds)))] += sample.value
            sums[name] += sample.value * (name == "kv_tier_failures")
    if role not in ("prefill", "decode"):
        return ()
    queried = sums["prompt_tokens_queried"]
    found = (
        sums[name] / queried if queried else 0.0
        for name in ("prompt_tokens_cached", "kv_tier_tokens host", "kv_tier_tokens disk")
    )  # fmt: skip
    kept = (f"{sums[f'kv_tier_bytes {tier}'] / MB:,.0f}" for tier in ("host", "disk"))
    rest = ("kv_pages_evicted dropped", "kv_evicted_early", "kv_tier_failures")
    return (
        worker, role, f"{queried:,.0f}", *(f"{share:.0%}" for share in found),
        f"{sums['prompt_tokens_computed']:,.0f}", *kept, *(f"{sums[name]:,.0f}" for name in rest),
    )  # fmt: skip


def _good(answer: httpx.Response) -> httpx.Response:
    if not answer.is_success:
        raise WorldError(f"{answer.url}: {answer.status_code} {answer.text[:200]}")
    return answer
