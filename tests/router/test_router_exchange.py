"""One HTTP request as the client and the logs see it: its id, its line, its times."""

import json
import logging
import re
from typing import Any

import httpx
import pytest

from router.observe.stages import STAGES
from tests.fault.router_doubles import (
    HANG_S,
    TOLD_STAGES,
    DecodeDouble,
    Serve,
    asking,
    ended,
    metric,
    speak,
    wait_until,
)
from worker.api import FinishReason, Stages

SCRIPT = speak([5, 6, 7], stages=TOLD_STAGES)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "kvlane")
    return caplog


def post(url: str, request_id: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if request_id is None else {"x-request-id": request_id}
    body = {"prompt": "hello"} | body
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=HANG_S)


def access(lines: pytest.LogCaptureFixture, request_id: str) -> logging.LogRecord:
    """The one line of the access log for this id; it is written after the last byte was sent."""

    def found() -> list[logging.LogRecord]:
        mine = [r for r in lines.records if r.getMessage().endswith(f"req_id={request_id}")]
        return [record for record in mine if record.name == "kvlane.access"]

    wait_until(lambda: bool(found()))
    (record,) = found()
    return record


def test_the_client_s_id_is_in_the_answer_at_the_worker_and_in_every_line(
    url: str, double: DecodeDouble, lines: pytest.LogCaptureFixture
) -> None:
    double.script = None
    mine = "Root=1-678/mine"
    with asking() as ask:
        future = ask(url, headers={"X-Request-Id": mine})
        peer, generate = double.take()
        double.chunk(peer, generate, [5], finish=FinishReason.STOP)
        response = future.result(HANG_S)
    assert response.headers["x-request-id"] == mine
    assert json.loads(response.text.split("\n")[0][6:])["id"].startswith(f"cmpl-{mine}-")
    assert generate.req_id.startswith(f"{mine}-")
    access(lines, mine)
    names = {r.name for r in lines.records if f"req_id={mine}" in r.getMessage()}
    assert names == {"kvlane.access", "kvlane.router"}


def test_two_live_requests_may_have_the_same_id(url: str, double: DecodeDouble) -> None:
    double.script = None
    with asking() as ask:
        futures = [ask(url, headers={"x-request-id": "same"}) for _ in range(2)]
        taken = [double.take() for _ in futures]
        assert len({generate.req_id for _, generate in taken}) == 2
        for i, (peer, generate) in enumerate(taken):
            double.chunk(peer, generate, [5] * (i + 1), finish=FinishReason.STOP)
        texts = sorted(ended(future)[0] for future in futures)
    assert len(texts[0]) * 2 == len(texts[1])
    assert {future.result().headers["x-request-id"] for future in futures} == {"same"}


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "é", "a\tb"], ids=ascii)
def test_an_unfit_id_is_replaced(url: str, given: str) -> None:
    headers = {b"x-request-id": given.encode()}
    response = httpx.get(f"{url}/v1/models", headers=headers)  # type: ignore[arg-type]
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


def test_a_line_for_every_request(serve: Serve, lines: pytest.LogCaptureFixture) -> None:
    """At INFO if that is asked for, but of probes; `tests/e2e/test_disconnects.py` has DEBUG."""
    _, url, _ = serve(access_log=True)
    post(url, "one", prompt=3)
    assert " 400 " in access(lines, "one").getMessage()
    httpx.head(f"{url}/v1/models/?key=secret%0a", headers={"x-request-id": "two"})
    line = access(lines, "two").getMessage()
    assert re.fullmatch(r"HEAD /v1/models/ 200 total_ms=\S+ req_id=two", line)
    httpx.get(f"{url}/a%0ab", headers={"x-request-id": "three"})
    assert access(lines, "three").getMessage().startswith("GET /a%0ab 404 ")
    httpx.get(f"{url}/health", headers={"x-request-id": "four"})
    levels = [access(lines, each).levelno for each in ("one", "two", "three", "four")]
    assert levels == [logging.INFO] * 3 + [logging.DEBUG]


def timing(response: httpx.Response) -> dict[str, float]:
    """Milliseconds by name."""
    entries = [entry.split(";dur=") for entry in response.headers["server-timing"].split(", ")]
    return {name: float(milliseconds) for name, milliseconds in entries}


def test_server_timing_has_the_stages(url: str, double: DecodeDouble) -> None:
    told = {
        "prefill_queue": 500.0, "prefill": 250.0, "transfer": 125.0, "decode_queue": 62.5,
        "first_step": 31.2,
    }  # fmt: skip
    whole = timing(post(url))
    others = [name for name in whole if name != "decode"]  # where the chunks come one by one
    assert others == ["prepare", *STAGES[:6], "total"], "what took no time did not happen"
    assert told.items() <= whole.items()
    assert whole["total"] >= whole["prepare"] + whole["router_queue"] - 0.2
    num_firsts = metric(url, "time_to_first_token_seconds_count")
    double.script = None
    with asking() as ask:  # headers leave with the first token, while the answer goes on
        future = ask(url)
        peer, generate = double.take()
        double.chunk(peer, generate, [5], stages=Stages(0.5, 0.25, 0, 0, 0, "prefill-0/x"))
        wait_until(lambda: metric(url, "time_to_first_token_seconds_count") > num_firsts)
        double.chunk(peer, generate, at=1, finish=FinishReason.STOP)
        assert list(timing(future.result(HANG_S))) == ["prepare", *STAGES[:3], "total"]
    assert set(timing(httpx.get(f"{url}/v1/models"))) == {"total"}
    assert "total" in timing(post(url, prompt=3))
