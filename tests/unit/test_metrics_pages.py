"""Pages of metrics: fit for Prometheus, and as router/METRICS.md says."""

import shutil

import pytest
from prometheus_client import generate_latest

from router.observe.metrics import RouterMetrics
from router.observe.vllm import Live
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
