"""Chunks of several tokens, as steps that verify windows make: what clients get is the same."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import httpx
import pytest

from tests.fault.router_doubles import DecodeDouble, Serve, Served, metric, speak
from worker.api import FinishReason, Stages, Stop

LETTERS = "abcdefgh"
Ids = tuple[int, ...]
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


def speaks(served: Served, ids: Ids, sizes: Sequence[int] = ()) -> None:
    served.double.script = speak(ids, sizes=sizes, finish=FinishReason.LENGTH)


@pytest.mark.parametrize("ask", ASKS)
def test_the_answer_is_that_of_single_tokens_streamed_or_not(
    served: Served, ids: Ids, ask: str
) -> None:
    path, body = ASKS[ask]
    speaks(served, ids)
    wanted = served.told(path, False, **body)
    assert wanted[1]["completion_tokens"] == len(wanted[0]) * len(LETTERS)
    for sizes, streamed in product([(), *SIZES], (False, True)):
        speaks(served, ids, sizes)
        assert served.told(path, streamed, **body) == wanted, (sizes, streamed)


@pytest.mark.parametrize(("stop", "num_chars", "num_tokens"), STOPS)
def test_a_stop_string_ends_it_wherever_chunks_begin(
    served: Served, ids: Ids, stop: str, num_chars: int, num_tokens: int
) -> None:
    """It lies inside one chunk, or begins in one and ends in the next or the one after that."""
    asks = [ASKS[name] for name in ("chat, logprobs", "text, logprobs")]
    for sizes, (path, body), streamed in product([(), *SIZES], asks, (False, True)):
        speaks(served, ids, sizes)
        (choice,), usage = served.told(path, streamed, **body, stop=[stop])
        assert usage["completion_tokens"] == len(choice["logprobs"]) == num_tokens
        assert (choice["text"], choice["reason"]) == (LETTERS[:num_chars], "stop")
        at_position = served.double.expect(Stop).at_position
        assert at_position == usage["prompt_tokens"] + num_tokens


@pytest.mark.parametrize("sizes", SIZES)
def test_each_token_behind_the_first_chunk_has_a_latency(
    serve: Serve, ids: Ids, sizes: tuple[int, ...]
) -> None:
    """They are as many as tokens, and add up to the time from the first to the last chunk."""
    served = serve(DecodeDouble(script=speak(ids, sizes=sizes, stages=TOLD)))
    url = served.url
    served.post("completions", prompt="ab")
    served.post("completions", prompt="ab", stop=["g"])  # "h" does not count
    itl, stages = "inter_token_latency_seconds", "request_stage_seconds_sum"
    assert metric(url, f"{itl}_count") == 8 - sizes[0] + max(0, 7 - sizes[0])
    text = httpx.get(f"{url}/metrics").text
    (decode,) = (line for line in text.splitlines() if stages in line and '"decode"' in line)
    assert metric(url, f"{itl}_sum") == pytest.approx(float(decode.split()[-1]), abs=1e-9)
