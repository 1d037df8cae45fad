"""Metrics of a loaded cluster: promtool on every process, and public queries put to Prometheus.

    python -m tests.e2e.live_metrics      # as root, with Debian's prometheus; two minutes

Two routers share a port, one prefill worker and one decode worker of two ranks serve the bundled
model with its drafter, all in namespaces of their own. Prometheus scrapes the port of the API. Each
query of `tests.support.public_queries`, from public documents for vLLM, has to return numbers.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx

from benchmarks.namespace import start_over
from benchmarks.train.problems import held_out_problems
from tests.e2e.harness import INSIDE, Serve
from tests.support.asking import ask_all
from tests.support.metrics_pages import complaints
from tests.support.prometheus import Prometheus, scraping
from tests.support.public_queries import PICKED, QUERIES

SCRAPE_S = 2
LOAD_S = 45.0  # before the queries: rates need scrapes over most of their minute
SETTINGS = (
    "routers.replicas=2", "prefill.replicas=1", "decode.replicas=1",
    "spec.drafter=chain", "decode.tp=2",
)  # fmt: skip


def load(url: str, over: Event) -> None:
    """The same requests, over and over."""
    questions = [problem.question for problem in held_out_problems(8)]
    while not over.is_set():
        outcomes = asyncio.run(ask_all(url, questions, max_tokens=24))
        assert [each.error for each in outcomes] == [None] * len(questions)


def check_pages(url: str) -> None:
    """`promtool check metrics` on the page of the port, and on that of every process."""
    groups: list[dict[str, Any]] = httpx.get(f"{url}/metrics/targets").json()
    pages = {"the API's port": f"{url}/metrics"}
    for group in groups:
        pages[group["labels"]["worker"]] = f"http://{group['targets'][0]}/metrics"
    assert len(pages) == 5, pages
    for name, address in pages.items():
        page = httpx.get(address).text
        found = complaints(page)
        print(f"promtool check metrics, {name}: {len(page.splitlines())} lines, {found or 'clean'}")
        assert not found
    for name in PICKED:
        page = httpx.get(f"{url}/metrics").text.splitlines()
        (line,) = (line for line in page if line.startswith(f"{name}{{"))
        print(f"an endpoint picker reads {line}")


def check_queries(prometheus: Prometheus) -> None:
    """Each has to return something, and numbers only."""
    bad: list[str] = []
    for source, query in QUERIES:
        values = prometheus.now(query)
        good = bool(values) and not any(map(math.isnan, values))
        bad += [] if good else [query]
        shown = ", ".join(f"{value:.4g}" for value in values[:3])
        print(f"{'ok ' if good else 'BAD'} {query}\n    -> {shown}  [{source}]")
    print(f"{len(QUERIES) - len(bad)} of {len(QUERIES)} public queries return numbers")
    assert not bad, bad


def main() -> None:
    """See the module."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        raise SystemExit("no prometheus: apt-get install --no-install-recommends prometheus")
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        start_over([sys.executable, "-m", "tests.e2e.live_metrics"])
    with tempfile.TemporaryDirectory() as folder:
        serve = Serve(Path(folder), port=8741)
        over = Event()
        loader = Thread(target=load, args=(serve.url, over))
        sets = [word for each in SETTINGS for word in ("--set", each)]
        try:
            serve.start(*sets).wait_ready()
            loader.start()
            target = serve.url.removeprefix("http://")
            with Prometheus(Path(folder), scraping(target), SCRAPE_S) as prometheus:
                time.sleep(LOAD_S)
                check_pages(serve.url)
                check_queries(prometheus)
        finally:
            over.set()
            if loader.is_alive():
                loader.join()
            serve.end()


if __name__ == "__main__":
    main()
