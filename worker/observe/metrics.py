"""Metric families of a worker, in a registry of their own; every name starts with `kvlane_`.

Each worker serves them on a port of its own (Member.metrics_address), and /live beside them; the
router's /metrics/targets lists the ports of all.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from threading import Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    start_http_server,
)

from worker.errors import Busy, PeerLost, Revoked, TransferError, TransferTimeout, UserError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

STEP_BUCKETS = (
    0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5,
    1.0, 2.0, 5.0,
)  # fmt: skip
WIDTH_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16)
SUM_BUCKETS = tuple(1 << power for power in range(13, 28, 2))  # 8 KiB to 128 MiB
NUM_FIRST = 1000  # windows by which a start is judged
WEIGHT = 0.05  # of the newest decode step in a moving average
STAGE_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
# What a decode worker counts from 0 on, so that the first of each shows in a rate.
PLACES = ("none", "local", "remote", "alone", "fallback")
OUTCOMES = ("stop", "length", "abort", "error")
RETRY_CAUSES = tuple(
    each.code for each in (Busy, PeerLost, Revoked, TransferError, TransferTimeout)
)

# Told of a start how far it is: the stage, `load` or `capture`, and how much of it is done, of how
# much.
Progress = Callable[[str, int, int], None]


def untold(stage: str, done: int, total: int) -> None:
    """Nobody wants to know."""


class _Families:
    """Makes families; labels model, role and worker are bound once."""

    def __init__(self, *, model: str, role: str, worker: str) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self._bound = {"model": model, "role": role, "worker": worker}

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._bind(
            Counter(f"kvlane_{name}", text, self._names(labels), registry=self.registry), labels
        )

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        return self._bind(
            Gauge(f"kvlane_{name}", text, self._names(labels), registry=self.registry), labels
        )

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Any:
        family = Histogram(
            f"kvlane_{name}", text, self._names(labels), registry=self.registry, buckets=buckets
        )
        return self._bind(family, labels)

    def _names(self, labels: tuple[str, ...]) -> list[str]:
        return [*self._bound, *labels]

    def _bind(self, family: Any, labels: tuple[str, ...]) -> Any:
        """The child itself, or for families with labels a function label values -> child."""
        if not labels:
            return family.labels(**self._bound)

        @cache  # to look one up takes the library as long as to count
        def child(*values: str) -> Any:
            return family.labels(**self._bound, **dict(zip(labels, values, strict=True)))

        return child


class WorkerMetrics(_Families):
    """All families of one worker."""

    def __init__(self, *, model: str, role: str, worker: str) -> None:
        super().__init__(model=model, role=role, worker=worker)
        self._server: tuple[WSGIServer, Thread] | None = None
        counter, histogram = self._counter, self._histogram
        self.prompt_tokens = counter("prompt_tokens_computed", "Prompt tokens computed here")
        self.queried_tokens = counter(
            "prompt_tokens_queried", "Prompt tokens that were looked up in the prefix tree"
        )
        self.cached_tokens = counter(
            "prompt_tokens_cached", "Prompt tokens that were found in the prefix tree"
        )
        self.generated_tokens = counter("generation_tokens", "Output tokens drawn here")
        self.steps = counter(
            "engine_steps", "Steps settled, by how they were launched", "kind", "path"
        )
        self.eager_steps = counter(
            "engine_eager_steps",
            "Steps launched op by op, by why no graph served",
            "kind",
            "reason",
        )
        self.step_seconds = histogram(
            "engine_step_seconds", "Time of one step on the device", STEP_BUCKETS, "kind"
        )
        self.preemptions = counter("preemptions", "Rows that gave their pages up")
        self.requests = counter("requests", "Requests that ended", "outcome")
        self._add_spec()
        self._add_ranks()
        self._add_transfers()
        self._add_gauges()
        if role == "decode":
            for where in PLACES:
                self.placed(where)
            for outcome in OUTCOMES:
                self.requests(outcome)
            for cause in RETRY_CAUSES:
                self.fetch_retries(cause)

    def _add_spec(self) -> None:
        counter = self._counter
        self.spec_steps = counter(
            "spec_steps", "Verify windows: one for each row of each decode step wider than 1"
        )
        self.spec_accepted = counter(
            "spec_accepted_tokens", "Drafts that windows accepted; each yields one token more"
        )
        self.spec_accepted_at = counter(
            "spec_accepted_at_position",
            "Drafts that windows accepted, by their place in the window; the first is 1",
            "position",
        )
        self.spec_drafted_at = counter(
            "spec_drafted_at_position",
            "Windows that had a draft to verify at this place; the first is 1",
            "position",
        )
        self.spec_undrafted = counter(
            "spec_undrafted_steps",
            "Windows without any draft: a request's first step, one behind a step of width 1, or "
            "one for which prompt lookup found nothing",
        )
        self.spec_first_acceptance = self._gauge(
            "spec_first_acceptance",
            f"Share of first drafts that the first {NUM_FIRST} windows accepted; 0 until then, and "
            "with prompt lookup, where it depends on the text",
        )
        # To be told to routers, see WorkerStats.
        self.num_windows = 0
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self._at_places: list[tuple[Any, Any]] = []  # the counters of both, of each place
        self.tokens_per_row = 0.0
        self._simulated = False
        self._first_windows = [0, 0]  # drafted, accepted at place 1
        self.spec_width = self._histogram(
            "spec_width", "Width of each decode step of a worker that verifies", WIDTH_BUCKETS
        )
        self.spec_simulated = self._gauge(
            "spec_simulated", "1 if acceptance is simulated: kvlane_spec_* is, and answers are junk"
        )

    def verifies(self, max_width: int) -> None:
        """Steps may be so wide; every place is counted from 0 on."""
        self.drafted, self.accepted = ([0] * (max_width - 1) for _ in range(2))
        places = [str(place) for place in range(1, max_width)]
        self._at_places = [(self.spec_accepted_at(p), self.spec_drafted_at(p)) for p in places]

    def simulate(self) -> None:
        """Acceptance is simulated from now on."""
        self.spec_simulated.set(1)
        self._simulated = True

    def windows(self, width: int, nums: Sequence[int], drafts: Sequence[Sequence[int]]) -> None:
        """Count a decode step.

        Args:
            width: of its windows.
            nums: tokens of each request that had not ended meanwhile.
            drafts: what their windows verified; -1 from where there is none. If acceptance is
                simulated, every place counts as a draft.
        """
        if not nums:
            return
        self.spec_width.observe(width)
        num_tokens = sum(nums)
        mean, old = num_tokens / len(nums), self.tokens_per_row or 1.0
        self.tokens_per_row = old + WEIGHT * (mean - old)
        if width == 1:
            return
        self.spec_steps.inc(len(nums))
        self.spec_accepted.inc(num_tokens - len(nums))
        self.num_windows += len(nums)
        accepted, yielded = len(nums), bytes(nums)
        # By place and not by row: there are hundreds of rows, and metrics have 1 % of a step.
        for at, column in enumerate(zip(*drafts, strict=False)):
            accepted -= yielded.count(at + 1)  # of windows that ended here
            drafted = len(nums) if self._simulated else len(nums) - column.count(-1)
            accepted_here, drafted_here = self._at_places[at]
            accepted_here.inc(accepted)
            drafted_here.inc(drafted)
            self.accepted[at] += accepted
            self.drafted[at] += drafted
            if at == 0:
                self._first_drafts(len(nums), drafted, accepted)

    def _first_drafts(self, num_windows: int, drafted: int, accepted: int) -> None:
        """Count those at place 1."""
        self.spec_undrafted.inc(num_windows - drafted)
        if self._first_windows[0] < NUM_FIRST:
            self._first_windows[0] += drafted
            self._first_windows[1] += accepted
            if self._first_windows[0] >= NUM_FIRST:
                self.spec_first_acceptance.set(self._first_windows[1] / self._first_windows[0])

    def acceptance_follows_text(self) -> None:
        """Keep no first acceptance to compare with: another text is no fault of the drafter."""
        self._first_windows[0] = NUM_FIRST

    def _add_ranks(self) -> None:
        self.drafter = self._gauge(
            "drafter_info", "1 for what proposes drafts, `none` where nothing does", "drafter"
        )
        self.ranks = self._gauge(
            "ranks", "Processes of this worker, which ends with the first that does"
        )
        self.ranks.set(1)
        self.all_reduce_bytes = self._histogram(
            "all_reduce_bytes",
            "Size of what a layer of each step sums among the ranks, by what sums it",
            SUM_BUCKETS,
            "kind",
            "algorithm",
        )

    def _add_transfers(self) -> None:
        counter, histogram = self._counter, self._histogram
        self.placed = counter("prefill_placed", "Where prompts were prefilled", "where")
        self.pulled_bytes = counter("kv_pulled_bytes", "KV bytes pulled", "transport")
        self.pulls = counter("kv_pulls", "Pulls that ended, by outcome", "transport", "outcome")
        self.pull_seconds = histogram(
            "kv_pull_seconds", "Time of one pull that landed", STAGE_BUCKETS, "transport"
        )
        self.fetch_seconds = histogram(
            "kv_fetch_seconds",
            "Time of a request's KV, from asking a prefill worker until all had landed",
            STAGE_BUCKETS,
            "transport",
        )
        self.transfer_seconds = histogram(
            "kv_transfer_seconds",
            "From a request's last announcement, or first token if later, until all KV had landed",
            STAGE_BUCKETS,
            "transport",
        )
        self.row_wait_seconds = histogram(
            "row_wait_seconds",
            "Wait of a request whose KV had landed for its first step",
            STAGE_BUCKETS,
        )
        self.fetch_retries = counter(
            "kv_fetch_retries", "Attempts to fetch KV that failed", "cause"
        )
        self.lease_expired = counter("lease_expired", "Leases that ran out without a release")
        self.dropped = counter(
            "stale_messages_dropped", "Messages of attempts that are over", "kind"
        )

    def _add_gauges(self) -> None:
        gauge = self._gauge
        self.running = gauge("requests_running", "Requests with a row")
        self.waiting = gauge("requests_waiting", "Requests admitted and without a row")
        self.queued = gauge("requests_queued", "Requests by the stage they wait in", "stage")
        self.pages = gauge("kv_pages", "KV pages by state", "state")
        self.usage = gauge("kv_cache_usage_ratio", "Share of KV pages in use or promised, 0 to 1")
        self.leases = gauge("leases", "Transfers under way, each with a lease")
        self.bucket_seconds = gauge(
            "graph_bucket_seconds", "One step as measured at the start", "kind", "rows", "path"
        )
        self.bucket_differs = gauge(
            "graph_bucket_differs", "1 where a graph's result was not eager's", "kind", "rows"
        )
        self.transport = gauge("transport_info", "1 for the transport in use", "transport")

    def serve(self, host: str, port: int = 0, stalled: Callable[[], str] = lambda: "") -> str:
        """Serve /metrics and /live on `port` of `host`, 0 is any free one; returns host:port.

        Args:
            stalled: says why the worker is not live; "" if it is.

        Raises:
            UserError: the port is taken.
        """
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            path = "cluster.worker_metrics_port"
            raise UserError(f"{path}: {host}:{port}: {error.strerror}", path) from error
        metrics = server.get_app()
        assert metrics is not None
        server.set_app(with_live(metrics, stalled))
        self._server = server, thread
        return f"{host}:{server.server_port}"

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            server, thread = self._server
            server.socket.shutdown(socket.SHUT_RDWR)  # or its thread looks up after half a second
            server.shutdown()
            server.server_close()
            thread.join()

    def on_scrape(self, gauge: Any, value: Callable[[], float]) -> None:
        """Read `value` whenever the family is scraped."""
        gauge.set_function(value)


def with_live(metrics: WSGIApplication, stalled: Callable[[], str]) -> WSGIApplication:
    """`metrics`, and GET /live: 200 while `stalled` says "", else 503 and what it says."""

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/live":
            return metrics(environ, start_response)
        reason = stalled()
        body = {"status": "not live", "reason": reason} if reason else {"status": "live"}
        status = "503 Service Unavailable" if reason else "200 OK"
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps(body).encode()]

    return app
