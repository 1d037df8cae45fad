"""Stages of a request as spans; a collector that is dead; when OpenTelemetry is missing."""

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from tests.support.collector import collecting
from tests.support.made_spans import Made
from tests.support.patience import HANG_S
from worker.api import Error, Stages
from worker.config import TracingConfig
from worker.errors import UserError
from worker.observe.timeline import Timeline
from worker.observe.tracing import check_tracing, tracer_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
DELAY = "OTEL_BSP_SCHEDULE_DELAY"  # ms


@pytest.fixture
def made() -> Iterator[Made]:
    found = Made()
    yield found
    found.tracer.close()


def test_another_attempt_says_why(made: Made) -> None:
    trace = made.tracer.carried(PARENT, 0.0)
    trace.enter("prefill", 0.0)
    trace.leave(1.0, error="worker_lost", why="prefill-0 is lost")
    trace.enter("prefill", 1.0)
    trace.enter("pull", 2.0)
    trace.enter("prefill", 3.0)
    trace.leave(4.0)
    failed, second, pull, third = made.raw()
    assert not failed.status.is_ok
    assert failed.status.description == "prefill-0 is lost"
    assert dict(failed.attributes or {}) == {"kvlane.attempt": 1, "error.type": "worker_lost"}
    assert dict(second.attributes or {}) == {"kvlane.attempt": 2, "kvlane.cause": "worker_lost"}
    assert not pull.attributes
    assert dict(third.attributes or {}) == {"kvlane.attempt": 3}


def announced(now: float, prefill_s: float, peer: str) -> tuple[str, float, float, str, str]:
    return "announced", now, prefill_s, peer, "shm/shm"


PULLED = [("enter", "prefill", 1.5), announced(4.0, 2.0, "p1"), ("landed", 5.0), ("row", 7.0)]
FAILED = [("enter", "prefill", 1.2), announced(1.4, 9.0, "p0")]


@pytest.mark.parametrize(
    ("steps", "at", "expected"),
    [
        (PULLED[:2], 4.5, Stages(1.5, 2.0, 0, 0, 0, "p1")),  # drawn there: all else comes later
        (PULLED, 7.5, Stages(1.0, 2.0, 1.0, 2.0, 0.5, "p1")),
        (FAILED + PULLED, 7.5, Stages(1.0, 2.0, 1.0, 2.0, 0.5, "p1")),
        (  # nothing but the time changes after the first row
            [*PULLED, ("enter", "preempted", 7.5), announced(8.0, 9.0, "p2"), ("landed", 8.0),
             ("row", 8.0)], 9.0, Stages(1.0, 2.0, 1.0, 2.0, 2.0, "p1"),
        ),
        (
            [*FAILED, ("prefilled_here", 2.0, "me", "fallback", 0), ("row", 3.0)], 4.0,
            Stages(2.0, 1.0, 0, 0, 0, "me"),
        ),
        ([("landed", 1.5), ("row", 2.0)], 4.0, Stages(0.5, 0, 0, 0.5, 2.0, "")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("carried", ["", PARENT])
def test_stages_add_up_to_the_time_of_the_first_token(made, steps, at, expected, carried) -> None:
    timeline = Timeline(1.0, made.tracer.carried(carried, 1.0) if carried else None)
    for method, *arguments in steps:
        getattr(timeline, method)(*arguments)
    assert timeline.token(at, in_row=steps[-1][0] == "row") == expected
    assert sum(msgspec.structs.astuple(expected)[:5]) == at - 1.0
    assert timeline.token(at + 1, in_row=True) is None
    timeline.end(10.0, 2)
    assert bool(made.raw()) == bool(carried)


def test_a_preempted_request_decodes_again_only_with_a_step_of_its_new_row(made: Made) -> None:
    """The step that was under way when it was preempted is of its old one."""
    timeline = Timeline(0.0, made.tracer.carried(PARENT, 0.0))
    for now in (1.0, 2.0):
        timeline.landed(now)
        timeline.row(now)
        timeline.token(now, in_row=True)
        assert timeline.stage == "decode"
        timeline.enter("preempted", now)
        timeline.token(now, in_row=True)
        assert timeline.stage == "preempted"
    timeline.end(3.0, 4)
    timeline.end(4.0, 4)
    names = [span.name for span in made.raw()]
    assert names == ["decode_queue", "first_step", "decode", "preempted"] * 2


def test_a_stage_that_was_cut_off_says_by_what(made: Made) -> None:
    """That nobody wants the rest is no error."""
    for cause in ("abort", "worker_lost"):
        timeline = Timeline(0.0, made.tracer.carried(PARENT, 0.0))
        timeline.prefilled_here(1.0, "decode-0", "local", 0)
        timeline.row(1.5)  # for its chunks
        timeline.end(2.0, 0, Error(cause, "why"))
    causes = [((each.attributes or {})["error.type"], each.status.is_ok) for each in made.raw()]
    assert causes == [("abort", True)] * 2 + [("worker_lost", False)] * 2


def test_what_a_message_carries_is_the_parent_with_its_tracestate(made: Made) -> None:
    trace = made.tracer.carried(PARENT + "a=b,c=d", 0.0)
    trace.enter("dispatch", 0.0)
    other = made.tracer.carried(trace.carried, 1.0)
    other.enter("decode", 1.0)
    other.leave(2.0)
    trace.leave(3.0)
    decode, dispatch = made.raw()
    assert decode.parent.span_id == dispatch.context.span_id
    assert f"{decode.context.trace_id:032x}" in PARENT
    assert decode.context.trace_state.to_header() == "a=b,c=d"


def test_a_collector_that_does_not_answer_holds_nothing_up(monkeypatch, caplog) -> None:
    """It is asked, and never answers: whoever waited for it would wait for ever."""
    monkeypatch.setenv(DELAY, "1")
    asked, heard, before = threading.Event(), list[socket.socket](), set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:

        def hear() -> None:
            heard.append(silent.accept()[0])
            asked.set()

        threading.Thread(target=hear, daemon=True).start()
        port = silent.getsockname()[1]
        config = TracingConfig(endpoint=f"http://127.0.0.1:{port}", sample_ratio=1.0)
        tracer = tracer_of(config, "router", "router-0")
        trace = tracer.of_headers({}, 0.0)
        trace.add("stage", 0.0, 1.0, {})
        assert asked.wait(HANG_S)
        trace.add("stage", 1.0, 2.0, {})
        tracer.close()
        heard[0].close()
    assert "the last spans could not be sent" in caplog.text
    for thread in set(threading.enumerate()) - before:
        thread.join(HANG_S)  # or it complains in the middle of another test


@pytest.mark.parametrize(
    ("name", "ratio", "wrong"),
    [
        ("bad", "", "OTEL_TRACES_SAMPLER"),
        ("traceidratio", "half", "OTEL_TRACES_SAMPLER_ARG"),
        ("parentbased_traceidratio", "2", "OTEL_TRACES_SAMPLER_ARG"),
        ("parentbased_traceidratio", "0.5", ""),
        ("Always_Off", "not read", ""),
        ("", "", ""),
    ],
)
def test_a_sampler_that_there_is_not_is_refused(name, ratio, wrong, monkeypatch) -> None:
    """Where the configuration leaves it to the environment."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", name)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", ratio)
    check_tracing(TracingConfig())
    check_tracing(TracingConfig(endpoint="auto", sample_ratio=0.5))
    if not wrong:
        check_tracing(TracingConfig(endpoint="auto"))
        return
    with pytest.raises(UserError, match=f"{wrong}=") as caught:
        tracer_of(TracingConfig(endpoint="auto"), "router", "router-0")
    assert caught.value.param == wrong


@pytest.mark.parametrize("endpoint", ["auto", "", "/v1/traces", "/v1/traces/", "/otlp", "/otlp/"])
def test_endpoints(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base, with or without a path, or the whole URL, or by the environment.

    The SDK's other variables count, too.
    """
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        wanted = endpoint if endpoint == "auto" else collector.url + endpoint
        tracer = tracer_of(TracingConfig(endpoint=wanted), "decode", "decode-0")
        tracer.of_headers({}, 0.0).add("stage", 0.0, 1.0, {})
        tracer.close()
    assert collector.paths == {"/otlp/v1/traces" if "otlp" in endpoint else "/v1/traces"}
    assert [(span.service, span.instance) for span in collector.spans] == [("mine", "decode-0")]
