"""Chunks of several tokens, as steps that verify windows make: what clients get is the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fault.router_doubles import (
    HANG_S,
    DecodeDouble,
    Serve,
    Served,
    events,
    letter_ids,
    metric,
    speak,
)
from worker.api import FinishReason, Stages, Stop

LETTERS = "abcdefgh"
TOLD = Stages(0.5, 0.25, 0.125, 0.0625, 0.03125, "prefill-0/abc")
SIZES = [(2, 3, 1, 2), (1, 4, 3), (3, 3, 2), (8,), (1, 7)]
CHAT: Any = {"messages": [{"role": "user", "content": "hi"}]}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", CHAT),
    "chat, logprobs": ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
    "chat, n": ("chat/completions", CHAT | {"n": 3, "logprobs": True}),
    "text": ("completions", {"prompt": "ab"}),
    "text, logprobs": ("completions", {"prompt": "ab", "logprobs": 1}),
    "text, echo, n": ("completions", {"prompt": ["ab", "cd"], "echo": True, "n": 2}),
    "text, ids": ("completions", {"prompt": [70, 71], "logprobs": 0}),
}
# A stop string, and the text and number of tokens that are left of LETTERS.
STOPS = [(LETTERS[at : at + size], at, at + size) for size in (1, 2, 3, 5) for at in (0, 1, 2, 3)]


def answer(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """What a client makes of the whole answer, without what differs by name and time."""
    found = httpx.post(f"{url}/v1/{path}", json=body, timeout=HANG_S)
    assert found.status_code == 200, found.text
    whole = found.json()
    return {"usage": whole["usage"], "choices": whole["choices"]}


def streamed(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The same of a stream: its chunks, added up."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    made: dict[int, dict[str, Any]] = {}
    usage: Any = None
    for event in events(httpx.post(f"{url}/v1/{path}", json=body, timeout=HANG_S)):
        usage = event["usage"] or usage
        for choice in event["choices"]:
            one = made.setdefault(choice["index"], {"text": "", "logprobs": [], "reason": None})
            said = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            assert one["reason"] is None, "something follows the finish reason"
            one["text"] += said
            one["logprobs"] += flat(choice["logprobs"])
            one["reason"] = choice["finish_reason"]
    return {"usage": usage, "choices": made}


def flat(logprobs: dict[str, Any] | None) -> list[Any]:
    """One entry a token, of either endpoint."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return logprobs["content"]
    return list(zip(*(logprobs[name] for name in sorted(logprobs)), strict=True))


def speaks(double: DecodeDouble, directory: Path, sizes: Sequence[int] = ()) -> None:
    double.script = speak(letter_ids(directory), sizes=sizes, finish=FinishReason.LENGTH)


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("way", [answer, streamed])
def test_the_answer_is_that_of_single_tokens(
    served: Served, directory: Path, ask: str, way: Any
) -> None:
    (double, url, _), (path, body) = served, ASKS[ask]
    speaks(double, directory)
    wanted = way(url, path, body)
    num_choices = len(wanted["choices"])
    assert wanted["usage"]["completion_tokens"] == num_choices * len(LETTERS)
    for sizes in SIZES:
        speaks(double, directory, sizes)
        assert way(url, path, body) == wanted, sizes


@pytest.mark.parametrize(("stop", "num_chars", "num_tokens"), STOPS)
def test_a_stop_string_ends_it_wherever_chunks_begin(
    served: Served, directory: Path, stop: str, num_chars: int, num_tokens: int
) -> None:
    """It lies inside one chunk, or begins in one and ends in the next or the one after that."""
    double, url, _ = served
    for sizes in [(), *SIZES]:
        speaks(double, directory, sizes)
        for ask in ("chat, logprobs", "text, logprobs"):
            path, body = ASKS[ask]
            body = body | {"stop": [stop]}
            for way in (answer, streamed):
                found = way(url, path, body)
                assert found["usage"]["completion_tokens"] == num_tokens
                (choice,) = found["choices"] if way is answer else found["choices"].values()
                text = choice.get("text", (choice.get("message") or {}).get("content"))
                assert text == LETTERS[:num_chars]
                assert choice.get("finish_reason", choice.get("reason")) == "stop"
                told = choice["logprobs"]
                assert len(told if way is streamed else flat(told)) == num_tokens
                sent = double.expect(Stop)
                assert sent.at_position == found["usage"]["prompt_tokens"] + num_tokens


@pytest.mark.parametrize("sizes", SIZES)
def test_each_token_behind_the_first_chunk_has_a_latency(
    serve: Serve, directory: Path, sizes: tuple[int, ...]
) -> None:
    """They are as many as tokens, and add up to the time from the first to the last chunk."""
    script = speak(letter_ids(directory), sizes=sizes, stages=TOLD)
    _, url, _ = serve(DecodeDouble(script=script))
    answer(url, "completions", {"prompt": "ab"})
    answer(url, "completions", {"prompt": "ab", "stop": ["g"]})  # "h" does not count
    itl, stages = "inter_token_latency_seconds", "request_stage_seconds_sum"
    assert metric(url, f"{itl}_count") == 8 - sizes[0] + max(0, 7 - sizes[0])
    text = httpx.get(f"{url}/metrics").text
    (decode,) = (line for line in text.splitlines() if stages in line and '"decode"' in line)
    assert metric(url, f"{itl}_sum") == pytest.approx(float(decode.split()[-1]), abs=1e-9)
