"""Traces of a real cluster, as a collector gets them: pulled, retried and local prefills.

    python -m tests.e2e.traces [--num 5]

Starts a cluster in a network namespace and asks it for completions with a `traceparent` each. Then
stops a prefill worker in the middle of requests, and drains both. Prints a trace of each form and
which part of the requests' time its stages tell; fails if a span lies outside its parent, if that
part is below 99 % in the median, or if no exemplar of the time to the first token names the trace.
"""

import argparse
import os
import signal
import statistics
import tempfile
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.e2e.harness import Serve, enter_namespace_of
from tests.support.collector import Collector, Span, collecting
from tests.support.prompts import problem_ids
from tests.support.trace_laws import check_request, children, named, told_share

PARENT = "b7ad6b7169203331"
MAX_TOKENS = 200
LEAST_TOLD = 0.99
TTFT = "kvlane_time_to_first_token_seconds"
SHOWN = ("kvlane.worker", "kvlane.attempt", "kvlane.cause", "kvlane.placed",
         "kvlane.prompt_tokens", "kvlane.output_tokens", "kvlane.bytes", "kvlane.transport",
         "error.type")  # fmt: skip
TIMEOUT_S = 120.0


def ask(url: str, prompt: Sequence[int]) -> str:
    """One completion; the id of its trace."""
    trace_id = uuid.uuid4().hex
    body = {"prompt": list(prompt), "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0}
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-01"}
    httpx.post(
        f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S
    ).raise_for_status()
    return trace_id


def exemplars(url: str) -> set[str]:
    """Traces that the histogram of times to the first token names."""
    accept = {"accept": "application/openmetrics-text"}
    page = httpx.get(f"{url}/metrics", headers=accept).text
    return {
        sample.exemplar.labels["trace_id"]
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if family.name == TTFT and sample.exemplar
    }


def is_whole(spans: Sequence[Span]) -> bool:
    """Whether all processes have sent what they had; whoever was killed has not."""
    ends = bool(named(spans, "respond")) and any(span.parent_id == PARENT for span in spans)
    good = [span for span in named(spans, "prefill") if not span.is_error]
    return (
        ends
        and bool(named(spans, "decode"))
        and all(named(children(spans, span), "prefill_chunk") for span in good)
    )


def shown(spans: Sequence[Span], root: Span, at: Span | None = None, depth: int = 0) -> str:
    """The trace as a tree: when each span began, how long it took, where, and what it says."""
    span = at or root
    told = [f"{name}={span.attributes[name]}" for name in SHOWN if name in span.attributes]
    line = (
        f"{(span.began_ns - root.began_ns) / 1e6:9.2f} {span.seconds * 1e3:9.2f} ms  "
        f"{'  ' * depth + span.name:28} {span.instance:10} {' '.join(told)}"
    )
    below = [shown(spans, root, each, depth + 1) for each in children(spans, span)]
    return "\n".join([line, *below])


def check(form: str, collector: Collector, trace_ids: Sequence[str]) -> list[list[Span]]:
    """The traces of one form, once they are whole and right."""
    traces = [collector.wait(each, is_whole) for each in trace_ids]
    shares = []
    for spans in traces:
        root = check_request(spans, PARENT)
        shares.append(told_share(spans, root))
    print(f"\n{form}:\n{shown(traces[-1], check_request(traces[-1], PARENT))}")
    print(
        f"{len(shares)} requests; stages tell {100 * min(shares):.2f} % of their time at least, "
        f"{100 * statistics.median(shares):.2f} % in the median",
        flush=True,
    )
    assert statistics.median(shares) >= LEAST_TOLD
    assert max(shares) <= 1 + 1e-4
    return traces


def pulled(serve: Serve, collector: Collector, prompts: Sequence[Sequence[int]]) -> None:
    """One after the other; an exemplar names the last."""
    ids = [ask(serve.url, prompt) for prompt in prompts]
    assert ids[-1] in exemplars(serve.url), "no exemplar names the last request"
    for spans in check("pulled", collector, ids):
        assert [span.attributes["kvlane.placed"] for span in named(spans, "prefill")] == ["remote"]
        assert named(spans, "pull")[0].attributes["kvlane.bytes"] > 0
        assert len({span.instance for span in spans}) == 3
    print(f"an exemplar of {TTFT} names the last one: {ids[-1]}")


def retried(serve: Serve, collector: Collector, prompts: Sequence[Sequence[int]]) -> None:
    """At once, while one of the prefill workers is stopped: those that had asked it ask another."""
    os.kill(serve.status()["prefill-0"]["pid"], signal.SIGSTOP)
    with ThreadPoolExecutor(len(prompts)) as pool:
        ids = list(pool.map(lambda prompt: ask(serve.url, prompt), prompts))
    again = [each for each in ids if len(named(collector.wait(each, is_whole), "prefill")) > 1]
    assert again, "no request had asked the worker that was stopped"
    for spans in check("retried", collector, again):
        failed, *_, last = named(spans, "prefill")
        assert failed.is_error
        assert failed.attributes["error.type"] == last.attributes["kvlane.cause"] == "worker_lost"
        assert failed.attributes["kvlane.worker"].startswith("prefill-0")
        assert not last.is_error


def local(serve: Serve, collector: Collector, prompts: Sequence[Sequence[int]]) -> None:
    """Once no prefill worker is left."""
    serve.wait_status("prefill-0", state="ready", timeout_s=120)
    for name in ("prefill-0", "prefill-1"):
        assert serve.command("drain", name).returncode == 0
    ids = [ask(serve.url, prompt) for prompt in prompts]
    for spans in check("local", collector, ids):
        assert {span.instance for span in spans} == {"router-0", "decode-0"}
        assert not named(spans, "pull")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--num", type=int, default=5, help="requests of each form")
    num = parser.parse_args().num
    enter_namespace_of("tests.e2e.traces")
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "200"
    prompts = problem_ids(3 * num)
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as root, collecting() as collector:
        serve = Serve(Path(root))
        try:
            serve.start(
                "--prefill", "2", "--decode", "1",
                "--set", "disaggregation.mode=always",
                "--set", f"tracing.endpoint={collector.url}",
                "--set", "prefill.engine.max_prefill_tokens=32",  # so that prompts have chunks
                "--set", "decode.engine.max_prefill_tokens=32",
            ).wait_ready()  # fmt: skip
            pulled(serve, collector, prompts[:num])
            retried(serve, collector, prompts[num : 2 * num])
            local(serve, collector, prompts[2 * num :])
        finally:
            serve.end()


if __name__ == "__main__":
    main()
