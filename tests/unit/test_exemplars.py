"""Exemplars: the last trace of each bucket of a latency histogram, in OpenMetrics' form only."""

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from router.http.exchange import client_trace_id
from router.observe.exposition import EOF, form_of
from router.observe.metrics import RouterMetrics
from router.show.siblings import merged

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
