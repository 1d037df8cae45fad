"""One request over HTTP, and when each piece of its answer arrived.

Bytes are stamped when the loop hands them over, before they are parsed.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from benchmarks.load.pacer import now
from benchmarks.load.records import Outcome, Turn
from cluster.clients.find import trusted, untrusted

MESSAGE_CHARS = 300


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    function: _Function | None = None


class _Said(msgspec.Struct):
    """A chat's message or delta."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # as vLLM calls it now; some send both
    tool_calls: list[_Call] | None = None

    @property
    def text(self) -> str:
        """Everything of it that a reader or a program sees."""
        parts = [self.reasoning_content or self.reasoning or "", self.content or ""]
        for call in self.tool_calls or ():
            if call.function is not None:
                parts += [call.function.name or "", call.function.arguments or ""]
        return "".join(parts)


class _Choice(msgspec.Struct):
    delta: _Said | None = None
    message: _Said | None = None
    text: str | None = None
    finish_reason: str | None = None
    stages: dict[str, Any] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None


class _Answer(msgspec.Struct):
    """A whole answer or a chunk of either endpoint; what else they hold is passed over."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Answer).decode


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked, and how."""

    urls: tuple[str, ...]  # of servers of one model, without /v1
    model: str
    endpoint: str = "chat"  # or "completions"
    streamed: bool = True
    timeout_s: float = 600.0
    headers: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # fields of every body
    stages: bool = False  # ask kvlane where the time went
    cacert: str = ""  # file of certificates to trust; "": as the machine does
    session_header: str = ""  # names the session of a request; "": none does

    @property
    def path(self) -> str:
        """Of the endpoint."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"


class Conversation:
    """The prompt of a session's next turn: what was said so far, and the turn's own part."""

    def __init__(self, endpoint: str) -> None:
        self._chat = endpoint == "chat"
        self._messages: list[dict[str, Any]] = []
        self._text = ""

    def body(self, turn: Turn, target: Target) -> dict[str, Any]:
        """The JSON body for `turn`, which is from now on part of the conversation."""
        body: dict[str, Any] = {"model": target.model, "max_tokens": turn.max_tokens}
        prompt = turn.prompt
        if turn.is_whole:
            self._messages, self._text = [], ""
        if self._chat:
            new = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            self._messages = [*self._messages, *new]  # type: ignore[list-item]
            body["messages"] = self._messages
        else:
            assert isinstance(prompt, str), "traces with messages are for chats"
            self._text += prompt
            body["prompt"] = self._text
        if target.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if target.stages:
            body["return_stages"] = True
        return body | target.extra | turn.extra

    def heard(self, answer: str) -> None:
        """The server's part."""
        if self._chat:
            self._messages = [*self._messages, {"role": "assistant", "content": answer}]
        else:
            self._text += answer


class Client:
    """Asks a server, or of several the one with the fewest requests of ours; connections are kept
    and there is no limit to them."""

    def __init__(self, target: Target) -> None:
        self.origin = now()  # the run's beginning; `Outcome` counts from it
        self._target = target
        self._urls = [URL(url + target.path) for url in target.urls]
        self._num_running = [0] * len(target.urls)
        self._num_asked = 0
        # The server's own ends of idle connections are never raced against: it closes, we see it.
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=30, ssl=trusted(target.cacert) or True
        )
        self._http = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=target.timeout_s),
            headers={"content-type": "application/json", **target.headers},
            read_bufsize=1 << 20,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def ask(self, outcome: Outcome, raw: bytes, session: str = "") -> str:
        """Send one request with the body `raw`, fill `outcome`; the text of the answer.

        session: what `Target.session_header` says. Every way in which a request can fail becomes
        `outcome.error`; nothing is raised but cancellation.
        """
        texts: list[str] = []
        server = self._least_loaded()
        self._num_running[server] += 1
        outcome.sent_s = now() - self.origin
        try:
            names = {self._target.session_header: session} if session else None
            async with self._http.post(self._urls[server], data=raw, headers=names) as response:
                outcome.headers_s = now() - self.origin
                if response.status != 200:
                    outcome.error = f"http_{response.status}"
                    outcome.message = (await response.text(errors="replace"))[:MESSAGE_CHARS]
                elif response.content_type == "text/event-stream":
                    await self._stream(response, outcome, texts)
                else:
                    self._whole(await response.read(), outcome, texts)
        except TimeoutError:
            outcome.error = "timeout"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _fail(outcome, "bad_answer", str(error))
        except (aiohttp.ClientConnectorError, ConnectionError) as error:
            _fail(outcome, "connection", str(error))
        except aiohttp.ClientError as error:
            _fail(outcome, "cut" if outcome.headers_s else "connection", str(error))
        finally:
            self._num_running[server] -= 1
        outcome.end_s = now() - self.origin
        outcome.text = "".join(texts)
        return outcome.text

    def _least_loaded(self) -> int:
        """Index of a server; in turn among equals."""
        self._num_asked += 1
        num = len(self._urls)
        return min(range(num), key=lambda i: (self._num_running[i], (i - self._num_asked) % num))

    async def _stream(
        self, response: aiohttp.ClientResponse, outcome: Outcome, texts: list[str]
    ) -> None:
        rest, done = b"", False
        async for part in response.content.iter_any():
            arrived_s = now() - self.origin
            *events, rest = (rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                done = self._event(event, arrived_s, outcome, texts) or done
        if not (done or (outcome.finish_reason and outcome.counted) or outcome.error):
            _fail(outcome, "cut", "the stream ended without [DONE]")

    def _event(self, event: bytes, arrived_s: float, outcome: Outcome, texts: list[str]) -> bool:
        """Take one event of a stream; True for its end mark."""
        lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        payload = b"\n".join(lines)
        if payload == b"[DONE]":
            return True
        if payload:
            answer = _decode(payload)
            if answer.error is not None:
                _fail(outcome, "stream_error", str(answer.error))
            text = "".join(_text(choice) for choice in answer.choices)
            if text:
                texts.append(text)
                outcome.chunk_s.append(arrived_s)
            _note(outcome, answer)
        return False

    def _whole(self, raw: bytes, outcome: Outcome, texts: list[str]) -> None:
        answer = _decode(raw)
        texts += [_text(choice) for choice in answer.choices]
        outcome.chunk_s.append(now() - self.origin)
        _note(outcome, answer)


def _text(choice: _Choice) -> str:
    said = choice.delta or choice.message
    return said.text if said is not None else choice.text or ""


def _note(outcome: Outcome, answer: _Answer) -> None:
    """Usage, reasons and stages, wherever they come."""
    for choice in answer.choices:
        outcome.finish_reason = choice.finish_reason or outcome.finish_reason
        outcome.stages = choice.stages or outcome.stages
    usage = answer.usage
    if usage is not None:
        outcome.counted = True
        outcome.num_prompt_tokens = usage.prompt_tokens
        outcome.num_output_tokens = usage.completion_tokens
        outcome.num_cached_tokens = (usage.prompt_tokens_details or {}).get("cached_tokens") or 0
    elif not outcome.counted:
        outcome.num_output_tokens = len(outcome.chunk_s)


def _fail(outcome: Outcome, kind: str, message: str) -> None:
    outcome.error, outcome.message = outcome.error or kind, message[:MESSAGE_CHARS]


async def discover(url: str, headers: dict[str, str], cacert: str = "") -> dict[str, Any]:
    """The first model that the server lists; raises ConnectionError if there is none."""
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as http,
            http.get(f"{url}/v1/models", ssl=trusted(cacert) or True) as response,
        ):
            # SGLang's router calls it text/plain.
            answer = await response.json(content_type=None) if response.status == 200 else {}
            rows = answer.get("data", []) if isinstance(answer, dict) else []
            if not rows:
                raise ConnectionError(f"{url}/v1/models lists no model (status {response.status})")
            return rows[0]
    except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
        why = f"{error or type(error).__name__}{untrusted(error)}"
        raise ConnectionError(f"{url} cannot be asked: {why}") from error
