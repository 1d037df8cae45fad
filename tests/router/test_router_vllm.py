"""The router's figures under vLLM's names: what public queries ask for is there, and is true."""

from collections.abc import Sequence
from functools import partial

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.dispatch.members import Members, drafting
from router.observe.metrics import RouterMetrics
from router.observe.stages import StageTimes
from router.observe.vllm import Live
from router.show.siblings import merged
from tests.support.public_queries import MODEL, PICKED, QUERIES, asked
from worker.api import Member, WorkerStats

STATS = (
    WorkerStats(num_pages=100, num_free_pages=70, page_size=16),
    WorkerStats(num_pages=300, num_free_pages=30, page_size=16, num_windows=10,
                drafted=(8, 6, 4), accepted=(6, 3, 0)),
)  # fmt: skip
SPENT = StageTimes(
    router_queue_s=1, prefill_queue_s=2, prefill_s=4, transfer_s=8, decode_queue_s=16,
    first_step_s=32, decode_s=64, messages_s=0.0, pull_s=0.0, pull_span_s=0.0, pulled_bytes=0,
    first_token_s=0, first_token_after="first_step",
    prefilled_by=None, decoded_by="",
)  # fmt: skip
Found = dict[str, list[tuple[dict[str, str], float]]]


def members(said: Sequence[WorkerStats], num_routers: int = 3) -> Members:
    """Of a cluster with so many routers, and a decode worker for each of `said`."""
    found = Members()
    workers = [Member(f"decode-{i}", "decode", "1", "tcp://x") for i in range(len(said))]
    routers = [Member(f"router-{i}", "router", "1", "http://x") for i in range(num_routers)]
    found.update([*workers, *routers])
    for worker, each in zip(workers, said, strict=True):
        found.pong(worker.peer, each)
    return found


def router(
    name: str = "router-0", *, queued: int = 2, unstarted: int = 3, decoding: int = 7
) -> RouterMetrics:
    """With two decode workers, and so many choices in each state."""
    metrics = RouterMetrics(MODEL, name)
    live = Live(
        lambda: unstarted + decoding, lambda: queued, lambda: [20] * decoding, lambda role: 2,
        lambda: STATS, partial(drafting, members(STATS)),
    )  # fmt: skip
    metrics.watch(live)
    return metrics


def series(*pages: bytes) -> Found:
    """Name -> labels and value of each series on the page that several routers have together."""
    found: Found = {}
    text = merged([page.decode() for page in pages])
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def values(found: Found, name: str) -> Sequence[float]:
    return [value for _, value in found[f"vllm:{name}"]]


@pytest.mark.parametrize(("source", "query"), QUERIES)
def test_what_public_queries_ask_for_is_there(source: str, query: str) -> None:
    found = series(router().render())
    names, labels = asked(query)
    assert names, source
    for name in names:
        assert name in found, f"{query} ({source})"
        known = {label for each, _ in found[name] for label in each}
        assert labels <= known, f"{query} ({source})"


@pytest.mark.parametrize("num_routers", [1, 3])
def test_an_endpoint_picker_finds_one_series_of_each_gauge(num_routers: int) -> None:
    found = series(*(router(f"router-{i}").render() for i in range(num_routers)))
    for name, labels in PICKED.items():
        ((its_labels, _),) = found[name]
        assert labels | {"model_name", "engine"} == set(its_labels)
    assert found["vllm:cache_config_info"][0][0]["num_gpu_blocks"] == "400"
    assert values(found, "num_requests_waiting") == [5 * num_routers]
    assert values(found, "num_requests_running") == [7 * num_routers]
    assert values(found, "kv_cache_usage_perc") == values(found, "gpu_cache_usage_perc") == [0.75]
    reasons = {each["reason"]: v for each, v in found["vllm:num_requests_waiting_by_reason"]}
    assert reasons == {"capacity": 2 * num_routers, "deferred": 3 * num_routers}


@pytest.mark.parametrize("num_routers", [1, 3])
def test_drafts_of_each_worker_are_told_once(num_routers: int) -> None:
    found = series(*(router(f"router-{i}").render() for i in range(num_routers)))
    for name, value in (
        ("num_drafts_total", 8),
        ("num_draft_tokens_total", 18),
        ("num_accepted_tokens_total", 9),
        ("num_emitted_tokens_total", 19),
        ("draft_acceptance_rate", 0.5),
        ("efficiency", 19 / 28),
    ):
        worker = {"model_name": MODEL, "engine": "1"}  # decode-0 verifies nothing
        assert found[f"vllm:spec_decode_{name}"] == [(worker, value)], name
    places = found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert {each["position"]: value for each, value in places} == {"0": 6, "1": 3, "2": 0}


def test_drafts_are_told_by_one_router_also_while_its_place_is_taken() -> None:
    """The page of one that is gone stands for it for a while, with older counts."""
    older = [msgspec.structs.replace(STATS[1], drafted=(7, 6, 4))]
    pages: list[bytes] = []
    for stats, first in (([STATS[1]], "router-1"), (older, "router-0")):
        metrics, known = RouterMetrics(MODEL, first), members(stats)
        if first == "router-1":
            known.update([each.member for each in known.all() if each.member.name != "router-0"])
        metrics.watch(Live(decodes=lambda: STATS, drafting=partial(drafting, known)))
        pages.append(metrics.render())
    for both in (pages, pages[::-1]):
        assert values(series(*both), "spec_decode_num_drafts_total") == [8]
        assert values(series(*both), "spec_decode_num_emitted_tokens_total") == [19]


def test_counts_of_routers_of_one_port_are_series_of_their_own() -> None:
    routers = [router(f"router-{i}") for i in range(2)]
    for i, metrics in enumerate(routers):
        metrics.prompt(10 + i, 0)
        metrics.ended("stop")
    found = series(*(metrics.render() for metrics in routers))
    for name, each in found.items():
        labels = [tuple(sorted(labels.items())) for labels, _ in each]
        assert len(set(labels)) == len(labels), f"{name} has a series twice"
    tokens = {labels["engine"]: value for labels, value in found["vllm:prompt_tokens_total"]}
    assert tokens == {"0": 10, "1": 11}
    assert values(found, "generation_tokens_total") == [140, 140], "of open choices, too"
    assert sum(values(found, "num_incoming_requests_total")) == 2 + 2 * (2 + 3 + 7)


def test_it_shares_the_counts_of_our_own_families() -> None:
    metrics = router()
    metrics.ttft("local").observe(0.05)
    metrics.ttft("pulled").observe(0.25)
    metrics.itl.observe(0.004)
    metrics.prompt(20, 16)
    for outcome in ("stop", "stop", "length", "timeout", "busy"):
        metrics.ended(outcome)
    metrics.requests("invalid_value").inc()  # no choice was made of it
    found = series(metrics.render())
    assert values(found, "time_to_first_token_seconds_count") == [2]
    assert values(found, "time_to_first_token_seconds_sum") == [pytest.approx(0.3)]
    below = {each["le"]: v for each, v in found["vllm:time_to_first_token_seconds_bucket"]}
    assert (below["0.04"], below["0.1"], below["0.3"], below["+Inf"]) == (0, 1, 2, 2)
    assert values(found, "time_per_output_token_seconds_count") == [1]
    assert values(found, "prefix_cache_hits_total") == [16]
    ended = {each["finished_reason"]: v for each, v in found["vllm:request_success_total"]}
    assert ended == {"stop": 2, "length": 1, "abort": 0, "error": 2}


def test_a_choice_counts_once_in_each_of_vllms_stages() -> None:
    metrics = router()
    metrics.spent(SPENT, num_tokens=5)
    found = series(metrics.render())
    for name, seconds in (
        ("request_queue_time", 1 + 2 + 16),
        ("request_prefill_time", 4 + 8 + 32),
        ("request_decode_time", 64),
        ("request_inference_time", 4 + 8 + 32 + 64),
        ("request_time_per_output_token", 16),
    ):
        assert values(found, f"{name}_seconds_sum") == [seconds]
        assert values(found, f"{name}_seconds_count") == [1]
    metrics.spent(SPENT, num_tokens=1)
    assert values(series(metrics.render()), "request_time_per_output_token_seconds_count") == [1]


def test_without_workers_there_is_no_room() -> None:
    found = series(RouterMetrics(MODEL, "router-0").render())
    assert values(found, "kv_cache_usage_perc") == [1]
    assert "vllm:cache_config_info" not in found


def test_it_can_be_switched_off() -> None:
    metrics = RouterMetrics(MODEL, "router-0", vllm=False)
    metrics.watch(Live())
    metrics.spent(SPENT, num_tokens=5)
    assert b"kvlane_" in metrics.render()
    assert b"vllm:" not in metrics.render()
