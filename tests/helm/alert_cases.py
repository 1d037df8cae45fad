"""For each alert: series under which it is quiet, fires, and resolves.

One value a minute, in promtool's notation: `1+0x5` is 1 for minute 0 to 5, `0+60x5` rises by 60 a
minute, `_x5` are five minutes without a sample.
"""

from dataclasses import dataclass, field

ROUTER = 'job="kvlane",role="router",worker="router-0",model="tiny"'
ROUTER_1 = ROUTER.replace("router-0", "router-1")
DECODE = 'job="kvlane",role="decode",worker="decode-0",model="tiny"'
PREFILL = 'job="kvlane",role="prefill",worker="prefill-0",model="tiny"'
OF_DECODE, OF_PREFILL = {"worker": "decode-0"}, {"worker": "prefill-0"}
NOT_SCRAPED = "a router, or all of them, has no metrics"


def alive(role: str, values: str) -> dict[str, str]:
    return {f'kvlane_workers_alive{{{ROUTER},worker_role="{role}"}}': values}


def requests(outcome: str, values: str) -> dict[str, str]:
    return {f'kvlane_requests_total{{{ROUTER},outcome="{outcome}"}}': values}


def queued(labels: str, **values: str) -> dict[str, str]:
    return {f'kvlane_requests_queued{{{labels},stage="{k}"}}': values[k] for k in values}


def latency(name: str, bounds: tuple[str, str], values: str) -> dict[str, str]:
    """A histogram: these values up to the lower bound, one a second up to the upper one."""
    series = f"kvlane_{name}_seconds_bucket{{{ROUTER},le="
    rest = dict.fromkeys((f'{series}"{bounds[1]}"}}', f'{series}"+Inf"}}'), "0+60x60")
    return {f'{series}"{bounds[0]}"}}': values, **rest}


def steps(labels: str, kind: str, path: str, values: str) -> dict[str, str]:
    return {f'kvlane_engine_steps_total{{{labels},kind="{kind}",path="{path}"}}': values}


@dataclass(frozen=True)
class Case:
    """An alert, and what it says."""

    alert: str
    minutes: tuple[int, int, int]  # at which it is quiet, fires and resolves
    summary: str  # after "kvlane: "
    series: dict[str, str]
    labels: dict[str, str] = field(default_factory=dict[str, str])  # beside those of its rule


CASES = (
    Case(  # a total outage
        "KvlaneRoutersNotScraped", (10, 12, 25), NOT_SCRAPED,
        alive("decode", "1+0x5 stale _x14 1+0x20"),
    ),
    Case(  # one of two
        "KvlaneRoutersNotScraped", (9, 15, 25), NOT_SCRAPED,
        alive("decode", "1+0x40")
        | {f"up{{{ROUTER}}}": "1+0x40", f"up{{{ROUTER_1}}}": "1+0x5 0+0x14 1+0x20"},
    ),
    Case(  # all
        "KvlaneWorkersNotScraped", (14, 20, 30), "1 workers have no metrics",
        alive("decode", "1+0x50")
        | {f"kvlane_requests_running{{{DECODE}}}": "0+0x5 stale _x19 0+0x20"},
    ),
    Case(  # one of two
        "KvlaneWorkersNotScraped", (14, 20, 30), "1 workers have no metrics",
        alive("decode", "1+0x50") | alive("prefill", "1+0x50")
        | {
            f"kvlane_requests_running{{{DECODE}}}": "0+0x50",
            f"kvlane_requests_running{{{PREFILL}}}": "0+0x5 stale _x19 0+0x20",
        },
    ),
    Case(
        "KvlaneWorkersMissing", (7, 11, 16), "only 0 decode workers answer",
        alive("decode", "1+0x3 0+0x10 1+0x20") | alive("prefill", "1+0x40"),
        {"worker_role": "decode"},
    ),
    Case(
        "KvlaneWorkerLost", (20, 30, 40), "4 requests lost their decode worker in 15 minutes",
        {
            f'kvlane_retries_total{{{ROUTER},cause="worker_lost"}}': "0+0x20 3+0x40",
            f'kvlane_retries_total{{{ROUTER},cause="gap"}}': "0+0x20 1+0x40",
            f'kvlane_retries_total{{{ROUTER},cause="refused"}}': "0+5x60",
        },
    ),
    Case(  # two routers, both of which count all of them
        "KvlaneWorkersDie", (32, 40, 110), "4 decode workers died within an hour",
        {
            f'kvlane_worker_deaths_total{{{router},worker_role="{role}"}}': values
            for router in (ROUTER, ROUTER_1)
            for role, values in (("decode", "0+0x10 1+0x10 2+0x10 4+0x140"), ("prefill", "2+0x80"))
        },
        {"worker_role": "decode"},
    ),
    Case(
        "KvlaneRequestsFail", (9, 25, 45), "25% of the requests end with an error",
        requests("stop", "0+90x60") | requests("invalid_value", "0+60x60")
        | requests("no_worker", "0+1x10 60+50x20 1060+0x30"),
    ),
    Case(
        "KvlaneRequestsQueue", (12, 18, 25), "7 requests wait for a decode worker",
        {f"kvlane_requests_waiting{{{ROUTER}}}": "0+0x5 7+0x15 0+0x20"},
    ),
    Case(
        "KvlaneSlowFirstToken", (12, 30, 50),
        "the 95th percentile of the time to the first token is 9.75s",
        latency("time_to_first_token", ("5.0", "10.0"), "0+60x10 600+0x25 600+60x25"),
    ),
    Case(
        "KvlaneSlowTokens", (12, 30, 50), "the 95th percentile between two tokens is 390ms",
        latency("inter_token_latency", ("0.2", "0.4"), "0+60x10 600+0x25 600+60x25"),
    ),
    Case(
        "KvlaneNoProgress", (12, 18, 25), "decode-0 has 3 requests and settles no step",
        {f"kvlane_requests_running{{{DECODE}}}": "3+0x40"} | queued(DECODE, prefill="0+0x40")
        | steps(DECODE, "decode", "graph", "0+900x10 9000+0x10 9000+900x20"),
        OF_DECODE,
    ),
    Case(  # runs no requests, ever; hangs in the last step of the only prompt
        "KvlaneNoProgress", (12, 18, 25), "prefill-0 has 1 requests and settles no step",
        {f"kvlane_requests_running{{{PREFILL}}}": "0+0x40"}
        | queued(PREFILL, prefill="0+0x40", pull="1+0x40")
        | steps(PREFILL, "prefill", "eager", "0+90x10 900+0x10 900+90x20"),
        OF_PREFILL,
    ),
    Case(  # hangs in a prefill of its own
        "KvlaneNoProgress", (12, 18, 25), "decode-0 has 1 requests and settles no step",
        {f"kvlane_requests_running{{{DECODE}}}": "0+0x40"} | queued(DECODE, prefill="1+0x40")
        | steps(DECODE, "prefill", "eager", "0+90x10 900+0x10 900+90x20"),
        OF_DECODE,
    ),
    Case(
        "KvlaneKVCacheFull", (12, 18, 25), "98% of the KV pages of decode-0 are used",
        {
            f"kvlane_kv_cache_usage_ratio{{{DECODE}}}": "0.9+0x5 0.98+0x15 0.5+0x20",
            f"kvlane_kv_cache_usage_ratio{{{PREFILL}}}": "1+0x40",  # full of what may be evicted
        },
        OF_DECODE,
    ),
    Case(
        "KvlanePreemptions", (10, 30, 50), "decode-0 preempts 500m requests a second",
        {f"kvlane_preemptions_total{{{DECODE}}}": "0+1x10 10+30x20 610+0x40"},
        OF_DECODE,
    ),
    Case(
        "KvlanePullsFail", (10, 30, 50),
        "decode-0 fails to pull KV, 500m times a second (transfer_timeout)",
        {
            f'kvlane_kv_fetch_retries_total{{{DECODE},cause="{cause}"}}': values
            for cause, values in (("transfer_timeout", "0+1x10 10+30x20 610+0x40"),
                                  ("busy", "0+1x60"))
        },
        {"cause": "transfer_timeout", **OF_DECODE},
    ),
    Case(
        "KvlanePrefillUnused", (15, 29, 45),
        "100% of the prompts find no prefill worker, though some live",
        alive("prefill", "1+0x60") | alive("decode", "1+0x60")
        | {
            f'kvlane_prefill_placed_total{{{DECODE},where="{where}"}}': values
            for where, values in (("remote", "0+60x10 600+0x20 600+60x30"),
                                  ("alone", "0+0x10 0+60x20 1200+0x30"))
        },
    ),
    Case(
        "KvlaneGraphDiffers", (5, 8, 12),
        "a CUDA graph of decode-0 (decode) computes other results than eager",
        {f'kvlane_graph_bucket_differs{{{DECODE},kind="decode",rows="8"}}': "0+0x5 1+0x5 0+0x5"},
        {"kind": "decode", **OF_DECODE},
    ),
    Case(
        "KvlaneSimulatedAcceptance", (5, 8, 12),
        "decode-0 simulates the acceptance of drafts, its answers are junk",
        {f"kvlane_spec_simulated{{{DECODE}}}": "0+0x5 1+0x5 0+0x5"},
        OF_DECODE,
    ),
    Case(
        "KvlaneAcceptanceFell", (25, 55, 85),
        "decode-0 accepts 40% of first drafts, far less than after its start",
        {
            f"kvlane_spec_first_acceptance{{{DECODE}}}": "0.8x90",
            f'kvlane_spec_drafted_at_position_total{{{DECODE},position="1"}}': "0+100x90",
            f'kvlane_spec_accepted_at_position_total{{{DECODE},position="1"}}':
                "0+80x20 1600+40x40 3200+80x30",
        },
        OF_DECODE,
    ),
    Case(
        "KvlaneOtherTransport", (4, 8, 20),
        "KV of 1 workers moves over mooncake/tcp, asked for was mooncake/rdma",
        {
            f'kvlane_transport_info{{{DECODE},transport="mooncake/tcp"}}': "_x5 1+0x5 _x20",
            f'kvlane_transport_info{{{PREFILL},transport="mooncake/rdma"}}': "1+0x30",
        },
        {"transport": "mooncake/tcp"},
    ),
)  # fmt: skip

# Workers that do not live are neither missed by Prometheus nor unused; clients' own faults are no
# errors.
SILENT = {
    "KvlaneWorkersNotScraped": alive("decode", "1+0x60") | alive("prefill", "0+0x60")
    | {f"kvlane_requests_running{{{DECODE}}}": "0+0x60"},
    "KvlanePrefillUnused": alive("prefill", "0+0x60")
    | {f'kvlane_prefill_placed_total{{{DECODE},where="alone"}}': "0+60x60"},
    "KvlaneRequestsFail": requests("invalid_value", "0+60x60"),
    "KvlaneNoProgress": queued(PREFILL, prefill="0+0x60", pull="0+0x5 5+0x2 0+0x53")  # a pull
    | {f"kvlane_requests_running{{{PREFILL}}}": "0+0x60"},
    "KvlaneSlowTokens": dict.fromkeys(latency("inter_token_latency", ("0.2", "0.4"), ""), "0+0x60"),
}  # fmt: skip
