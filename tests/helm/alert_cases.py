"""For each alert: series under which it is quiet, fires, and resolves.

One value a minute, in promtool's notation: `1+0x5` is 1 for minute 0 to 5, `0+60x5` rises by 60 a
minute, `_x5` are five minutes without a sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROUTER = 'job="kvlane",role="router",worker="router-0",model="tiny"'
DECODE = 'job="kvlane",role="decode",worker="decode-0",model="tiny"'
PREFILL = 'job="kvlane",role="prefill",worker="prefill-0",model="tiny"'
TTFT = f"kvlane_time_to_first_token_seconds_bucket{{{ROUTER}"
ITL = f"kvlane_inter_token_latency_seconds_bucket{{{ROUTER}"


@dataclass(frozen=True)
class Case:
    """Minutes at which an alert is quiet, fires with this summary, and resolves."""

    alert: str
    series: dict[str, str]
    quiet: int
    fires: int
    resolved: int
    summary: str
    labels: dict[str, str] = field(default_factory=dict[str, str])


CASES = (
    Case(  # a total outage
        "KvlaneRoutersNotScraped",
        {
            f'kvlane_workers_alive{{{ROUTER},worker_role="decode"}}': "1+0x5 stale _x14 1+0x20",
        },
        quiet=10, fires=12, resolved=25,
        summary="kvlane: a router, or all of them, has no metrics",
    ),
    Case(  # one of two
        "KvlaneRoutersNotScraped",
        {
            f'kvlane_workers_alive{{{ROUTER},worker_role="decode"}}': "1+0x40",
            f"up{{{ROUTER}}}": "1+0x40",
            f"up{{{ROUTER.replace('router-0', 'router-1')}}}": "1+0x5 0+0x14 1+0x20",
        },
        quiet=9, fires=15, resolved=25,
        summary="kvlane: a router, or all of them, has no metrics",
    ),
    Case(  # all
        "KvlaneWorkersNotScraped",
        {
            f"kvlane_requests_running{{{DECODE}}}": "0+0x5 stale _x19 0+0x20",
            f'kvlane_workers_alive{{{ROUTER},worker_role="decode"}}': "1+0x50",
        },
        quiet=14, fires=20, resolved=30,
        summary="kvlane: 1 workers have no metrics",
    ),
    Case(  # one of two
        "KvlaneWorkersNotScraped",
        {
            f"kvlane_requests_running{{{DECODE}}}": "0+0x50",
            f"kvlane_requests_running{{{PREFILL}}}": "0+0x5 stale _x19 0+0x20",
            f'kvlane_workers_alive{{{ROUTER},worker_role="decode"}}': "1+0x50",
            f'kvlane_workers_alive{{{ROUTER},worker_role="prefill"}}': "1+0x50",
        },
        quiet=14, fires=20, resolved=30,
        summary="kvlane: 1 workers have no metrics",
    ),
    Case(
        "KvlaneWorkersMissing",
        {
            f'kvlane_workers_alive{{{ROUTER},worker_role="decode"}}': "1+0x3 0+0x10 1+0x20",
            f'kvlane_workers_alive{{{ROUTER},worker_role="prefill"}}': "1+0x40",
        },
        quiet=7, fires=11, resolved=16,
        summary="kvlane: only 0 decode workers answer",
        labels={"worker_role": "decode"},
    ),
    Case(
        "KvlaneWorkersMissing",
        {
            f'kvlane_workers_alive{{{ROUTER},worker_role="decode"}}': "1+0x40",
            f'kvlane_workers_alive{{{ROUTER},worker_role="prefill"}}': "1+0x3 0+0x10 1+0x20",
        },
        quiet=7, fires=11, resolved=16,
        summary="kvlane: only 0 prefill workers answer",
        labels={"worker_role": "prefill"},
    ),
    Case(
        "KvlaneWorkerLost",
        {
            f'kvlane_retries_total{{{ROUTER},cause="worker_lost"}}': "0+0x20 1+0x40",
            f'kvlane_requests_total{{{ROUTER},outcome="worker_lost"}}': "0+0x20 3+0x40",
            f'kvlane_retries_total{{{ROUTER},cause="refused"}}': "0+5x60",
        },
        quiet=20, fires=30, resolved=40,
        summary="kvlane: 4 requests lost their decode worker in 15 minutes",
    ),
    Case(  # two routers, both of which count all of them
        "KvlaneWorkersDie",
        {
            f'kvlane_worker_deaths_total{{{router},worker_role="{role}"}}': values
            for router in (ROUTER, ROUTER.replace("router-0", "router-1"))
            for role, values in (("decode", "0+0x10 1+0x10 2+0x10 4+0x140"), ("prefill", "2+0x80"))
        },
        quiet=32, fires=40, resolved=110,
        summary="kvlane: 4 decode workers died within an hour",
        labels={"worker_role": "decode"},
    ),
    Case(
        "KvlaneRequestsFail",
        {
            f'kvlane_requests_total{{{ROUTER},outcome="stop"}}': "0+90x60",
            f'kvlane_requests_total{{{ROUTER},outcome="invalid_value"}}': "0+60x60",
            f'kvlane_requests_total{{{ROUTER},outcome="worker_lost"}}': "0+1x10 60+50x20 1060+0x30",
        },
        quiet=9, fires=25, resolved=45,
        summary="kvlane: 25% of the requests end with an error",
    ),
    Case(
        "KvlaneRequestsQueue",
        {f"kvlane_requests_waiting{{{ROUTER}}}": "0+0x5 7+0x15 0+0x20"},
        quiet=12, fires=18, resolved=25,
        summary="kvlane: 7 requests wait for a decode worker",
    ),
    Case(
        "KvlaneSlowFirstToken",
        {
            f'{TTFT},le="5.0"}}': "0+60x10 600+0x25 600+60x25",
            f'{TTFT},le="10.0"}}': "0+60x60",
            f'{TTFT},le="+Inf"}}': "0+60x60",
        },
        quiet=12, fires=30, resolved=50,
        summary="kvlane: the 95th percentile of the time to the first token is 9.75s",
    ),
    Case(
        "KvlaneSlowTokens",
        {
            f'{ITL},le="0.2"}}': "0+60x10 600+0x25 600+60x25",
            f'{ITL},le="0.4"}}': "0+60x60",
            f'{ITL},le="+Inf"}}': "0+60x60",
        },
        quiet=12, fires=30, resolved=50,
        summary="kvlane: the 95th percentile between two tokens is 390ms",
    ),
    Case(
        "KvlaneNoProgress",
        {
            f"kvlane_requests_running{{{DECODE}}}": "3+0x40",
            f'kvlane_requests_queued{{{DECODE},stage="prefill"}}': "0+0x40",
            f"kvlane_engine_steps_total{{{DECODE},kind=\"decode\",path=\"graph\"}}":
                "0+900x10 9000+0x10 9000+900x20",
        },
        quiet=12, fires=18, resolved=25,
        summary="kvlane: decode-0 has 3 requests and settles no step",
        labels={"worker": "decode-0"},
    ),
    Case(  # runs no requests, ever; hangs in the last step of the only prompt
        "KvlaneNoProgress",
        {
            f"kvlane_requests_running{{{PREFILL}}}": "0+0x40",
            f'kvlane_requests_queued{{{PREFILL},stage="prefill"}}': "0+0x40",
            f'kvlane_requests_queued{{{PREFILL},stage="pull"}}': "1+0x40",
            f"kvlane_engine_steps_total{{{PREFILL},kind=\"prefill\",path=\"eager\"}}":
                "0+90x10 900+0x10 900+90x20",
        },
        quiet=12, fires=18, resolved=25,
        summary="kvlane: prefill-0 has 1 requests and settles no step",
        labels={"worker": "prefill-0"},
    ),
    Case(  # hangs in a prefill of its own
        "KvlaneNoProgress",
        {
            f"kvlane_requests_running{{{DECODE}}}": "0+0x40",
            f'kvlane_requests_queued{{{DECODE},stage="prefill"}}': "1+0x40",
            f"kvlane_engine_steps_total{{{DECODE},kind=\"prefill\",path=\"eager\"}}":
                "0+90x10 900+0x10 900+90x20",
        },
        quiet=12, fires=18, resolved=25,
        summary="kvlane: decode-0 has 1 requests and settles no step",
        labels={"worker": "decode-0"},
    ),
    Case(
        "KvlaneKVCacheFull",
        {
            f"kvlane_kv_cache_usage_ratio{{{DECODE}}}": "0.9+0x5 0.98+0x15 0.5+0x20",
            f"kvlane_kv_cache_usage_ratio{{{PREFILL}}}": "1+0x40",  # full of what may be evicted
        },
        quiet=12, fires=18, resolved=25,
        summary="kvlane: 98% of the KV pages of decode-0 are used",
        labels={"worker": "decode-0"},
    ),
    Case(
        "KvlanePreemptions",
        {f"kvlane_preemptions_total{{{DECODE}}}": "0+1x10 10+30x20 610+0x40"},
        quiet=10, fires=30, resolved=50,
        summary="kvlane: decode-0 preempts 500m requests a second",
        labels={"worker": "decode-0"},
    ),
    Case(
        "KvlanePullsFail",
        {
            f"kvlane_kv_fetch_retries_total{{{DECODE},cause=\"transfer_timeout\"}}":
                "0+1x10 10+30x20 610+0x40",
            f'kvlane_kv_fetch_retries_total{{{DECODE},cause="busy"}}': "0+1x60",
        },
        quiet=10, fires=30, resolved=50,
        summary="kvlane: decode-0 fails to pull KV, 500m times a second (transfer_timeout)",
        labels={"worker": "decode-0", "cause": "transfer_timeout"},
    ),
    Case(
        "KvlanePrefillUnused",
        {
            f'kvlane_workers_alive{{{ROUTER},worker_role="prefill"}}': "1+0x60",
            f'kvlane_workers_alive{{{ROUTER},worker_role="decode"}}': "1+0x60",
            f'kvlane_prefill_placed_total{{{DECODE},where="remote"}}': "0+60x10 600+0x20 600+60x30",
            f'kvlane_prefill_placed_total{{{DECODE},where="alone"}}': "0+0x10 0+60x20 1200+0x30",
        },
        quiet=15, fires=29, resolved=45,
        summary="kvlane: 100% of the prompts find no prefill worker, though some live",
    ),
    Case(
        "KvlaneGraphDiffers",
        {f'kvlane_graph_bucket_differs{{{DECODE},kind="decode",rows="8"}}': "0+0x5 1+0x5 0+0x5"},
        quiet=5, fires=8, resolved=12,
        summary="kvlane: a CUDA graph of decode-0 (decode) computes other results than eager",
        labels={"worker": "decode-0", "kind": "decode"},
    ),
    Case(
        "KvlaneSimulatedAcceptance",
        {f"kvlane_spec_simulated{{{DECODE}}}": "0+0x5 1+0x5 0+0x5"},
        quiet=5, fires=8, resolved=12,
        summary="kvlane: decode-0 simulates the acceptance of drafts, its answers are junk",
        labels={"worker": "decode-0"},
    ),
    Case(
        "KvlaneAcceptanceFell",
        {
            f"kvlane_spec_first_acceptance{{{DECODE}}}": "0.8x90",
            f'kvlane_spec_drafted_at_position_total{{{DECODE},position="1"}}': "0+100x90",
            f'kvlane_spec_accepted_at_position_total{{{DECODE},position="1"}}':
                "0+80x20 1600+40x40 3200+80x30",
        },
        quiet=25, fires=55, resolved=85,
        summary=(
            "kvlane: decode-0 accepts 40% of first drafts, far less than after its start"
        ),
        labels={"worker": "decode-0"},
    ),
    Case(
        "KvlaneOtherTransport",
        {
            f'kvlane_transport_info{{{DECODE},transport="mooncake/tcp"}}': "_x5 1+0x5 _x20",
            f'kvlane_transport_info{{{PREFILL},transport="mooncake/rdma"}}': "1+0x30",
        },
        quiet=4, fires=8, resolved=20,
        summary="kvlane: KV of 1 workers moves over mooncake/tcp, asked for was mooncake/rdma",
        labels={"transport": "mooncake/tcp"},
    ),
)  # fmt: skip

# Workers that do not live are neither missed by Prometheus nor unused; clients' own faults are no
# errors.
SILENT = {
    "KvlaneWorkersNotScraped": {
        f"kvlane_requests_running{{{DECODE}}}": "0+0x60",
        f'kvlane_workers_alive{{{ROUTER},worker_role="decode"}}': "1+0x60",
        f'kvlane_workers_alive{{{ROUTER},worker_role="prefill"}}': "0+0x60",
    },
    "KvlanePrefillUnused": {
        f'kvlane_workers_alive{{{ROUTER},worker_role="prefill"}}': "0+0x60",
        f'kvlane_prefill_placed_total{{{DECODE},where="alone"}}': "0+60x60",
    },
    "KvlaneRequestsFail": {
        f'kvlane_requests_total{{{ROUTER},outcome="invalid_value"}}': "0+60x60",
    },
    "KvlaneNoProgress": {
        f"kvlane_requests_running{{{PREFILL}}}": "0+0x60",
        f'kvlane_requests_queued{{{PREFILL},stage="prefill"}}': "0+0x60",
        f'kvlane_requests_queued{{{PREFILL},stage="pull"}}': "0+0x5 5+0x2 0+0x53",  # a pull
    },
    "KvlaneSlowTokens": {f'{ITL},le="+Inf"}}': "0+0x60", f'{ITL},le="0.2"}}': "0+0x60"},
}  # fmt: skip
