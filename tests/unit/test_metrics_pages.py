"""Pages of metrics: fit for Prometheus, as router/METRICS.md says, and with exemplars of traces."""

import shutil

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from router.http.exchange import client_trace_id
from router.observe.exposition import EOF, form_of
from router.observe.metrics import RouterMetrics
from router.observe.vllm import Live
from router.show.siblings import merged
from tests.support.metrics_pages import (
    DOCUMENT,
    complaints,
    document,
    families,
    router_page,
    worker_page,
)

PAGES = {
    "router": router_page,
    "prefill": lambda: worker_page("prefill"),
    "decode": lambda: worker_page("decode"),
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
@pytest.mark.parametrize("process", PAGES)
def test_promtool_has_nothing_to_say(process: str) -> None:
    page = PAGES[process]()
    assert complaints(page) == []
    assert complaints(page + "kvlane_uptime_total 3\n")
    assert complaints(page + 'kvlane_rows{a="b"')


@pytest.mark.parametrize("process", PAGES)
def test_every_family_has_a_series_and_one_plain_sentence(process: str) -> None:
    for name, family in families(PAGES[process]()).items():
        assert family.samples, name
        text = family.documentation
        assert text, name
        assert text[0].isupper() or text[0].isdigit(), f"{name}: {text}"
        assert ". " not in text, f"{name}: {text}"
        assert text[-1] != ".", f"{name}: {text}"


def test_the_document_lists_every_family() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(), (
        "run python -m tests.support.metrics_pages"
    )


def test_a_router_writes_the_same_text_as_the_library() -> None:
    metrics = RouterMetrics('a "model"\\of\nours', "router-0")
    metrics.watch(Live(lambda: 3, lambda: 2, lambda: [4], lambda role: 1))
    metrics.ttft("pulled").observe(0.123)
    metrics.ended("stop")
    for _ in range(2):  # the second time names come out of a table
        assert metrics.render() == generate_latest(metrics.registry)


OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TRACE, OTHER = "0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319c"


def found(page: str) -> dict[tuple[str, str], tuple[str, float]]:
    """(worker, bucket) -> (trace, value) of all exemplars of the time to the first token."""
    return {
        (sample.labels["worker"], sample.labels["le"]): (
            sample.exemplar.labels["trace_id"], sample.exemplar.value,
        )
        for family in openmetrics.text_string_to_metric_families(page)
        for sample in family.samples
        if sample.exemplar and family.name == "kvlane_time_to_first_token_seconds"
    }  # fmt: skip


def test_each_bucket_names_the_last_trace_that_fell_into_it() -> None:
    metrics = RouterMetrics("small", "router-0")
    for value, trace_id in ((0.004, TRACE), (0.0045, ""), (0.2, TRACE), (0.19, OTHER), (99, TRACE)):
        metrics.ttft("local").observe(value, trace_id)
    form = form_of(OPENMETRICS)
    assert form.startswith("application/openmetrics-text")
    assert found(metrics.render(form).decode()) == {
        ("router-0", "0.005"): (TRACE, 0.004),
        ("router-0", "0.2"): (OTHER, 0.19),
        ("router-0", "+Inf"): (TRACE, 99.0),
    }
    assert TRACE not in metrics.render().decode()


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_pages_of_several_routers_make_one_of_either_form(accept: str) -> None:
    pages = []
    for name in ("router-0", "router-1"):
        metrics = RouterMetrics("small", name)
        metrics.ttft("local").observe(0.1, TRACE)
        metrics.ended("stop")
        pages.append(metrics.render(form_of(accept)).decode())
    page = merged(pages)
    assert EOF not in page
    if accept:
        page += EOF
        assert {worker for worker, _ in found(page)} == {"router-0", "router-1"}
        families = list(openmetrics.text_string_to_metric_families(page))
    else:
        families = list(text_string_to_metric_families(page))
    assert len({family.name for family in families}) == len(families)
    (requests,) = [family for family in families if family.name == "kvlane_requests"]
    assert sum(sample.value for sample in requests.samples) == 2
    (ours,) = [family for family in families if family.name == "vllm:time_to_first_token_seconds"]
    counts = [sample for sample in ours.samples if sample.name == f"{ours.name}_count"]
    assert [count.value for count in counts] == [1, 1]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (f"00-{TRACE}-b7ad6b7169203331-01", TRACE),
        (f"00-{TRACE}-b7ad6b7169203331-03", TRACE),
        (f"00-{TRACE}-b7ad6b7169203331-00", ""),
        (f"00-{TRACE}-b7ad6b7169203331-02", ""),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (f"00-{TRACE.upper()}-b7ad6b7169203331-01", ""),
        (f"00-{TRACE}-b7ad6b7169203331-01 ", ""),
        ("", ""),
    ],
)
def test_only_a_sampled_parent_is_named(header: str, expected: str) -> None:
    assert client_trace_id({b"traceparent": header.encode()} if header else {}) == expected
