"""What clients ask, and one request: its answer, and how long its client waited for pieces."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from benchmarks.train.problems import held_out_problems

TOLERANCE = 1e-3  # of logprobs: sums depend on the batch
MOST_ASKED = 20  # times, with a key
AGAIN_S = 0.2  # until then
SLOW_S = 0.1  # that a slow reader waits after each piece
FUNCTION = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"type": "string", "maxLength": 12}, "answer": {"type": "integer"}},
    "required": ["unit", "answer"],
}
SEEDED = {"temperature": 0.9, "top_p": 0.95}
# Kind -> what a request has besides its question and its seed.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": SEEDED,
    "choices": {**SEEDED, "n": 3, "logprobs": True, "top_logprobs": 2},
    "stop": {"temperature": 0, "stop": ["In all: ", "#### "]},
    "penalties": {
        **SEEDED, "presence_penalty": 0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.1,
        "logit_bias": {"100": 2.0},
    },
    "schema": {
        **SEEDED,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "tool": {
        **SEEDED, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required",
    },
    "long": {"temperature": 0},
}  # fmt: skip


class Ask(NamedTuple):
    """A request; `body` has no `stream`."""

    kind: str
    path: str
    body: Mapping[str, Any]


@dataclass(slots=True)
class Choice:
    """What one choice has said so far."""

    text: str = ""
    calls: dict[int, str] = field(default_factory=dict)  # name and arguments, by index
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Answer:
    """An answer, whole or as far as it came."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] = 0, 0  # prompt and completion tokens
    error: str = ""  # status, code or exception; empty: the answer is whole, or we left
    longest_s: float = 0.0  # between two pieces, or before the first
    is_cut: bool = False  # its connection broke
    num_asked: int = 1


def make_asks(model: str, num: int, seed: int) -> list[Ask]:
    """`num` of each kind, the same ones for the same arguments."""
    questions = [problem.question for problem in held_out_problems(num * (len(KINDS) + 8), seed)]
    asks = []
    for kind, extra in KINDS.items():
        for _ in range(num):
            body = {"model": model, "max_tokens": 120, "seed": seed + len(asks), **extra}
            if kind == "long":
                text = "\n".join(questions.pop() for _ in range(8))
                asks.append(Ask(kind, "completions", {**body, "prompt": text, "max_tokens": 60}))
            else:
                messages = [{"role": "user", "content": questions.pop()}]
                asks.append(Ask(kind, "chat/completions", {**body, "messages": messages}))
    return asks


async def ask(
    http: aiohttp.ClientSession, url: str, asked: Ask, *, stream: bool = True, slow: bool = False,
    leave_after: int = 0, key: str = "",
) -> Answer:  # fmt: skip
    """Its answer; slow: reads slowly; leave_after: of so many pieces (0: never).

    key: an idempotency key, with which it is asked again where the connection breaks.
    """
    answer, began, num = Answer(is_cut=True), time.monotonic(), 0
    while answer.is_cut and num < (MOST_ASKED if key else 1):
        if num:
            await asyncio.sleep(AGAIN_S)
        longest_s = max(answer.longest_s, time.monotonic() - began if num else 0.0)
        began, num = time.monotonic(), num + 1
        answer = await _once(
            http, url, asked, stream=stream, slow=slow, leave_after=leave_after, key=key
        )
        answer.longest_s, answer.num_asked = max(answer.longest_s, longest_s), num
    return answer


async def _once(
    http: aiohttp.ClientSession, url: str, asked: Ask, *, stream: bool, slow: bool,
    leave_after: int, key: str,
) -> Answer:  # fmt: skip
    answer, body = Answer(), dict(asked.body)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    began = last = time.monotonic()

    def waited() -> None:
        nonlocal last
        now = time.monotonic()
        answer.longest_s, last = max(answer.longest_s, now - last), now

    try:
        headers = {"idempotency-key": key} if key else {}
        async with http.post(f"{url}/v1/{asked.path}", json=body, headers=headers) as response:
            if response.status != 200:
                answer.error = f"{response.status} {(await response.text())[:300]}"
            elif not stream:
                _add(answer, await response.json())
                answer.longest_s = time.monotonic() - began
            else:
                await _read(answer, response, waited, slow=slow, leave_after=leave_after)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        answer.error = f"{type(error).__name__}: {error}"
        answer.is_cut = not isinstance(error, TimeoutError)
    return answer


async def _read(
    answer: Answer, response: aiohttp.ClientResponse, waited: Callable[[], None], *, slow: bool,
    leave_after: int,
) -> None:  # fmt: skip
    num, is_done = 0, False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        waited()
        is_done = line.startswith(b"data: [DONE]")
        if not is_done:
            _add(answer, json.loads(line[6:]))
        num += 1
        if num == leave_after:
            return
        if slow:
            await asyncio.sleep(SLOW_S)
            waited()
    if not (is_done or answer.error):
        answer.error, answer.is_cut = "the stream ended before its end", True


def _add(answer: Answer, piece: Mapping[str, Any]) -> None:
    """Add a chunk or a whole answer."""
    if "error" in piece:
        answer.error = json.dumps(piece["error"])
    if usage := piece.get("usage"):
        answer.usage = usage["prompt_tokens"], usage["completion_tokens"]
    for each in piece.get("choices", ()):
        choice = answer.choices.setdefault(each["index"], Choice())
        said = each.get("delta") or each.get("message") or {}
        choice.text += said.get("content") or each.get("text") or ""
        for i, call in enumerate(said.get("tool_calls") or ()):
            function, at = call["function"], call.get("index", i)
            words = (function.get("name") or "") + (function.get("arguments") or "")
            choice.calls[at] = choice.calls.get(at, "") + words
        scored = (each.get("logprobs") or {}).get("content") or ()
        choice.logprobs += [(token["token"], token["logprob"]) for token in scored]
        choice.finish_reason = each.get("finish_reason") or choice.finish_reason


def difference(answer: Answer, wanted: Answer, *, whole: bool) -> str:
    """What of a right answer it is not; not whole: it may end anywhere."""
    if whole and (answer.usage != wanted.usage or answer.choices.keys() != wanted.choices.keys()):
        return f"usage {answer.usage}, choices {sorted(answer.choices)}"
    for index, choice in answer.choices.items():
        right = wanted.choices[index]
        scored = zip(choice.logprobs, right.logprobs, strict=False)
        if any(a != b or abs(x - y) > TOLERANCE for (a, x), (b, y) in scored):
            return f"choice {index}: logprobs"
        if not whole:
            calls = all(right.calls[at].startswith(call) for at, call in choice.calls.items())
            if not (calls and right.text.startswith(choice.text)):
                return f"choice {index}: {choice} is no beginning of {right}"
        elif (choice.text, choice.calls, choice.finish_reason, len(choice.logprobs)) != (
            right.text, right.calls, right.finish_reason, len(right.logprobs)
        ):  # fmt: skip
            return f"choice {index}: {choice} instead of {right}"
    return ""


def draw_manner(rng: random.Random) -> dict[str, Any]:
    """How a client asks: most read a stream, some slowly, some leave."""
    drawn = rng.random()
    if drawn < 0.1:
        return {"stream": False}
    if drawn < 0.2:
        return {"slow": True}
    return {"leave_after": rng.randint(1, 30)} if drawn < 0.3 else {}
