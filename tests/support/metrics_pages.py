"""Pages of metrics: those of every kind of process, what promtool says of one, and their table.

python -m tests.support.metrics_pages       # writes router/METRICS.md, after a change
"""

import asyncio
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.dispatch.members import Members
from router.observe.metrics import PREFILLS, RouterMetrics
from router.observe.stages import StageTimes
from router.observe.vllm import Live
from router.show.siblings import Siblings
from router.text.tokenizer import Text
from tests.support.prompts import TINY
from worker.api import Member, WorkerStats
from worker.keyring import Refusals
from worker.observe.meter import StepMeter
from worker.observe.metrics import WorkerMetrics, watch_wire
from worker.observe.window_counts import WindowCounts

DOCUMENT = Path(__file__).parents[2] / "router" / "METRICS.md"
HEAD = "## Families\n"  # from here on the document is generated
OF_VLLM = "\n## vLLM's names (`vllm:`…)\n"
KINDS = ("counter", "gauge", "histogram")
COMMON = {"model", "role", "worker", "model_name", "engine", "le"}
COLON = re.compile(r"^vllm:\w+ metric names should not contain ':'$")


def router_page() -> str:
    """Of a router that has served; with how many routers answered, as on a shared port."""
    metrics = RouterMetrics("tiny", "router-0")
    stats = WorkerStats(num_pages=8, num_free_pages=6, page_size=16, drafted=(3,), accepted=(2,))
    live = Live(
        lambda: 3, lambda: 2, lambda: [4], lambda role: 1, lambda: [stats],
        lambda router: {"decode-0": stats},
    )  # fmt: skip
    metrics.watch(live)
    metrics.watch_encoder(Text(TINY).encoder)
    watch_wire(metrics.wire_refused, Refusals())
    for where in PREFILLS:
        metrics.ttft(where).observe(0.05)
    metrics.ended("stop")
    metrics.ended("busy")
    spent = StageTimes(
        router_queue_s=0.0, prefill_queue_s=0.1, prefill_s=0.2, transfer_s=0.01, decode_queue_s=0.0,
        first_step_s=0.01, messages_s=0.0, decode_s=1.0, first_token_s=0.3,
        first_token_after="first_step", pull_s=0.02, pull_span_s=0.03, pulled_bytes=4096,
    prefilled_by=None, decoded_by="",
    )  # fmt: skip
    metrics.spent(spent, num_tokens=20)
    member = Member("router-0", "router", "1", "http://127.0.0.1:8000", model="tiny")
    return asyncio.run(Siblings(Members(), member, lambda _: {}).page(metrics.render())).decode()


def worker_page(role: str) -> str:
    """With at least one series of every family."""
    metrics = WorkerMetrics(model="tiny", role=role, worker=f"{role}-0")
    meter = StepMeter(metrics)
    watch_wire(metrics.wire_refused, Refusals())
    meter.verifies(WindowCounts(4))
    meter.verified(4, [3, 1], [(7, 8, -1), (7, 8, 9)])
    for attribute, family in metrics.table().items():
        series = getattr(metrics, attribute)
        series = series(*family.labels) if family.labels and family.kind != "reading" else series
        match family.kind:
            case "counter":
                series.inc()
            case "gauge":
                series.set(1)
            case "histogram":
                series.observe(family.buckets[0])
            case "reading":
                pass  # of the windows
    return generate_latest(metrics.registry).decode()


def complaints(page: str) -> list[str]:
    """What `promtool check metrics` says of it, but for the colons of vLLM's names.

    Prometheus keeps colons for recording rules; those names are vLLM's to choose.
    """
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False
    )
    lines = (done.stdout + done.stderr).splitlines()
    found = [line for line in lines if not COLON.match(line)]
    if done.returncode and not lines:
        found.append(f"promtool ended with {done.returncode}")
    return found


def families(page: str) -> dict[str, Metric]:
    """By the name under which series are asked for, a histogram's without its suffixes."""
    found = text_string_to_metric_families(page)
    return {each.name + ("_total" if each.type == "counter" else ""): each for each in found}


def series(name: str, family: Metric) -> str:
    """The name of a family with its own labels, as in a query."""
    labels = sorted({label for sample in family.samples for label in sample.labels} - COMMON)
    return f"`{name}{{{','.join(labels)}}}`" if labels else f"`{name}`"


def tables(of: str, page: str) -> Iterator[str]:
    for kind in KINDS:
        yield f"\n{of} {kind}s |\n---|---\n"
        for name, family in sorted(families(page).items()):
            if name.startswith("kvlane_") and family.type == kind:
                yield f"{series(name, family)} | {family.documentation}\n"


def of_vllm(page: str) -> Iterator[str]:
    for kind in KINDS:
        names = [
            series(name.removeprefix("vllm:"), family)
            for name, family in sorted(families(page).items())
            if name.startswith("vllm:") and family.type == kind
        ]
        yield "\n" + fill(f"{kind}s: {', '.join(names)}", 110, break_on_hyphens=False) + "\n"


def document() -> str:
    """router/METRICS.md, as it should be."""
    prose = DOCUMENT.read_text(encoding="utf-8").partition(HEAD)[0]
    router = router_page()
    ours = [*tables("router", router), *tables("worker", worker_page("decode"))]
    return "".join([prose, HEAD, *ours, OF_VLLM, *of_vllm(router)])


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
