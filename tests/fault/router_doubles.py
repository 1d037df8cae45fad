"""Doubles for tests of the router: a small model directory, and workers that misbehave on demand.

The worker speaks the real wire. What it does with a request is the test's: either a script, run in
the double's own thread for every Generate, or the test itself takes requests with `take`.
"""

import json
import queue
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from router.config import RouterConfig
from router.http.app import Place, RouterServer, Settings
from router.http.orders import Operator
from router.text.tokenizer import Text
from tests.support.meeting import LISTENERS, MET, introduce
from tests.support.patience import HANG_S
from tests.support.patience import until as wait_until
from worker import api
from worker.api import FinishReason, Generate, Lost, Member, Stages
from worker.config import ModelConfig, PingConfig
from worker.config.said import Said
from worker.keyring import Keyring
from worker.observe.spans import Tracer
from worker.wire import Wire

MAX_MODEL_LEN = 256
HELLO: Any = [{"role": "user", "content": "hello"}]
TOLD_STAGES = Stages(0.5, 0.25, 0.125, 0.0625, 0.03125, "prefill-3/abc")
PING = PingConfig(interval_s=0.1, max_misses=50, stall_s=4 * HANG_S)  # doubles beat when asked
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (
    "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "</tools>\n{# <tool_call> #}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls %}<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{{ '\n' if not loop.last }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, how are you today? I am fine, thank you.",
    "stop here and never look back; the end of the story is near",
]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def letter_ids(directory: Path) -> tuple[int, ...]:
    """Tokens of the model of `make_model`, one a letter: "a" to "h"."""
    text = Text(directory)
    return tuple(text.encode(char, add_special_tokens=False)[0] for char in "abcdefgh")


def make_model(
    directory: Path, template: str = CHATML, words: Sequence[str] = (), max_len: int = MAX_MODEL_LEN
) -> Path:
    """A byte-level BPE of a few hundred entries with a ChatML template, in Hugging Face's form."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"vocab_size": 512, "max_position_embeddings": max_len}
    (directory / "config.json").write_text(json.dumps(config))
    named = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return directory


def scores(tokens: Sequence[int], num_top: int) -> tuple[api.TokenLogprob, ...]:
    """Logprobs that tell which token they belong to: -token / 8; the next ids are as likely."""
    if num_top < 0:
        return ()
    return tuple(
        api.TokenLogprob(-token / 8, tuple((token + i, -token / 8 - i) for i in range(num_top)))
        for token in tokens
    )


Script = Callable[["DecodeDouble", str, Generate], None]


class DecodeDouble:
    """A decode worker without an engine; `stats` are what its Pongs say.

    `script` is called in the double's thread; without one, requests wait for `take`.
    """

    def __init__(
        self,
        name: str = "decode-0",
        script: Script | None = None,
        stats: api.WorkerStats | None = None,
        role: api.Role = "decode",
        digest: str = "",
    ) -> None:
        self.stats = stats or api.WorkerStats(max_num_reqs=8, num_free_pages=100, num_pages=100)
        self.incarnation = uuid.uuid4().hex[:8]
        self.taken: queue.Queue[tuple[str, Generate]] = queue.Queue()
        self.others: queue.Queue[Any] = queue.Queue()  # Stop, Abort, Ack, Claim, in order
        self.router = ""  # the last that has sent one of these
        self.frame_bytes: list[int] = []  # of requests, as they came
        self.script = script
        self._inbox: queue.Queue[tuple[str, Generate] | None] = queue.Queue()
        self._wire = Wire(
            f"{name}/{self.incarnation}", PING, self._deliver, lambda: self.stats, Keyring()
        )
        self._dead, self._said = False, Said()
        address = self._wire.start("127.0.0.1")
        self.member = Member(
            name, role, self.incarnation, address, metrics_address="127.0.0.1:9", digest=digest,
            wire_key=self._wire.key,
        )  # fmt: skip
        LISTENERS.add(self)
        self.meet()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def meet(self) -> None:
        """As `meeting.Listener`."""
        self._wire.admit({peer: member.wire_key for peer, member in list(MET.items())})

    def reset(self) -> None:
        """Forget what has come; from now on requests wait for `take`."""
        self.script = None
        for kept in (self.taken, self.others):
            while not kept.empty():
                kept.get()

    def says(
        self, text: Text, answer: str, finish: FinishReason = FinishReason.STOP, **how: Any
    ) -> None:
        """Answer with these words from now on, and keep what is asked; how: of `speak`."""
        self.reset()
        tokens = text.encode(answer, add_special_tokens=False)
        self.script = speak(tokens, kept=True, finish=finish, **{"cached": 4} | how)

    def prompt(self, text: Text) -> str:
        """Of the next request."""
        return text.decode(self.take()[1].tokens, skip_special_tokens=False)

    def take(self) -> tuple[str, Generate]:
        """The next request: who sent it, and what."""
        return self.taken.get(timeout=HANG_S)

    def expect(self, kind: type[Any]) -> Any:
        """The next Stop, Abort or Ack of this kind; earlier others are passed over."""
        while True:
            message = self.others.get(timeout=HANG_S)
            if isinstance(message, kind):
                return message

    def chunk(
        self,
        peer: str,
        generate: Generate,
        tokens: Sequence[int] = (),
        *,
        at: int = 0,
        finish: FinishReason | None = None,
        error: api.Error | None = None,
        cached: int = 0,
        stages: Stages | None = None,
    ) -> None:
        """Send tokens; `at` counts from the end of the prompt."""
        chunk = api.TokenChunk(
            req_id=generate.req_id,
            dispatch=generate.dispatch,
            position=generate.num_prompt_tokens + at,
            tokens=tuple(tokens),
            finish_reason=finish,
            error=error,
            num_cached_tokens=cached,
            logprobs=scores(tokens, generate.sampling.logprobs),
            stages=stages,
        )
        self.send(peer, chunk)

    def score(self, peer: str, generate: Generate) -> None:
        """Send the prompt's logprobs, if they are asked for, in two chunks."""
        num_top = generate.sampling.prompt_logprobs
        found = scores(generate.tokens[1 : generate.num_prompt_tokens], num_top)
        at, key = len(generate.tokens), (generate.req_id, generate.dispatch)
        for part in filter(None, (found[:2], found[2:])):
            self.send(peer, api.TokenChunk(*key, at, prompt_logprobs=part))

    def answer(self, message: api.Claimed) -> None:
        """To the router that has asked last."""
        self._wire.send(self.router, message)

    def send(self, peer: str, *chunks: api.TokenChunk) -> None:
        self._wire.send(peer, api.Chunks(chunks))

    def refuse(
        self, peer: str, generate: Generate, code: str = "busy", *,
        retry_after_s: float = 0.05, param: str | None = None,
    ) -> None:  # fmt: skip
        error = api.Error(code, f"refused: {code}", param)
        self._wire.send(peer, api.Refused(generate.req_id, generate.dispatch, error, retry_after_s))

    def die(self) -> None:
        if self._dead:
            return
        self._dead = True
        self._wire.close()
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _deliver(self, events: Sequence[tuple[str, Any]]) -> None:
        for peer, message in events:
            if isinstance(message, Generate):
                self.frame_bytes.append(len(api.encode(message)))
                whole = self._said.whole(peer, message)
                assert whole is not None
                self._inbox.put((peer, whole))
            else:
                if isinstance(message, Lost):
                    self._said.pop(peer, None)
                self.router = peer
                self.others.put(message)

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            self._wire.beat()
            if self.script is None:
                self.taken.put(item)
            else:
                self.script(self, *item)


def speak(
    tokens: Sequence[int],
    *,
    sizes: Sequence[int] = (),
    at: int = 0,
    finish: FinishReason = FinishReason.STOP,
    cached: int = 0,
    stages: Stages | None = None,
    kept: bool = False,
) -> Script:
    """A script that answers every request with `tokens`, in chunks of `sizes` (then of one).

    at: output tokens before these, which had come from another worker.

    With `kept` the test may `take` what was asked, too.
    """

    def script(double: DecodeDouble, peer: str, generate: Generate) -> None:
        if kept:
            double.taken.put((peer, generate))
        double.score(peer, generate)
        num, left = 0, list(sizes)
        while num < len(tokens):
            size = left.pop(0) if left else 1
            told, some = None if num else stages, tokens[num : num + size]
            double.chunk(peer, generate, some, at=at + num, cached=cached, stages=told)
            num += size
        double.chunk(peer, generate, at=at + num, finish=finish, cached=cached)

    return script


KEEP = speak((), kept=True)  # ends every request at once


def client_of(url: str) -> openai.OpenAI:
    """OpenAI's client to the router at `url`; close it."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=HANG_S)


def num_live(url: str) -> int:
    """Workers that have answered the router at `url`."""
    return list(httpx.get(f"{url}/live").json()["workers"].values()).count("live")


@contextmanager
def routed(
    directory: Path,
    members: Sequence[Member],
    *,
    ping: PingConfig = PING,
    port: int = 0,
    shared: bool = False,
    joins: bool = False,
    tracer: Tracer | None = None,
    operator: Operator | None = None,
    **config: Any,
) -> Iterator[tuple[RouterServer, str]]:
    """A started router that knows `members`; yields it and its base URL; it ends with this.

    shared, joins: see `Place` and `RouterServer.start`.
    """
    model = ModelConfig(path=str(directory), served_name="small")
    settings = Settings(RouterConfig(**config), model, ping, {"router": config}, operator=operator)
    place = Place("router-0", uuid.uuid4().hex[:8], port=port, shared=shared)
    router = RouterServer(settings, place, tracer=tracer)
    member = introduce(router.start(joins=joins))
    try:
        router.update_members([member, *members])
        wait_until(lambda: num_live(f"http://{member.metrics_address}") == len(members))
        yield router, member.address
    finally:
        router.stop()


@contextmanager
def serving(
    directory: Path, *doubles: DecodeDouble, **options: Any
) -> Iterator[tuple[RouterServer, str]]:
    """`routed`, before doubles that end with it."""
    try:
        with routed(directory, [double.member for double in doubles], **options) as found:
            yield found
    finally:
        for double in doubles:
            double.die()


class Served(NamedTuple):
    double: DecodeDouble
    url: str
    router: RouterServer

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", json=body, timeout=HANG_S)

    def told(self, path: str, streamed: bool, **body: Any) -> tuple[list[dict[str, Any]], Any]:
        """The choices of an answer and its usage; the chunks of a stream are added up.

        Of each choice `text`, `reasoning`, `calls`, `logprobs` (one entry a token) and `reason`.
        """
        more = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
        return told_by(self.post(path, **body | more), streamed)

    def refusal(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.post(path, **body)
        assert response.status_code == 400, response.text
        return response.json()["error"]

    def connect(self) -> socket.socket:
        """A client that writes its own HTTP; close it."""
        return connected(self.url)


def told_by(response: httpx.Response, streamed: bool) -> tuple[list[dict[str, Any]], Any]:
    """As `Served.told`."""
    assert response.status_code == 200, response.text
    made: dict[int, dict[str, Any]] = {}
    usage: Any = None
    for part in events(response) if streamed else [response.json()]:
        usage = part["usage"] or usage
        for choice in part["choices"]:
            new = {"text": "", "reasoning": "", "calls": [], "logprobs": [], "reason": None}
            one = made.setdefault(choice["index"], new)
            assert one["reason"] is None, "something follows the finish reason"
            message = choice.get("delta", choice.get("message", {}))
            one["text"] += choice.get("text") or message.get("content") or ""
            one["reasoning"] += message.get("reasoning_content") or ""
            one["calls"] += message.get("tool_calls", [])
            one["logprobs"] += flat(choice["logprobs"])
            one["reason"] = choice["finish_reason"]
    return [made[index] for index in sorted(made)], usage


def flat(logprobs: dict[str, Any] | None) -> list[Any]:
    """One entry a token, of either endpoint."""
    if logprobs is None or "content" in logprobs:
        return [] if logprobs is None else logprobs["content"]
    return list(zip(*(logprobs[name] for name in sorted(logprobs)), strict=True))


def connected(url: str, buffer: int = 0) -> socket.socket:
    """A socket to the server at `url`, which takes so many bytes unread; 0: as many as usual."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    client.settimeout(HANG_S)
    if buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.connect((host, int(port)))
    return client


def read_until(client: socket.socket, end: bytes) -> bytes:
    """What the server sends up to and with the part that has `end` in it."""
    data = b""
    while end not in data:
        part = client.recv(4096)
        assert part, data
        data += part
    return data


def read_all(client: socket.socket) -> bytes:
    """What the server sends until it closes; a hang is a failure."""
    data = b""
    with client, suppress(ConnectionResetError):  # it closed while bytes of ours were on their way
        while part := client.recv(4096):
            data += part
    return data


def raw_post(path: str = "completions", headers: str = "", **body: Any) -> bytes:
    """A request as it is sent; `headers` with their line ends."""
    raw = json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: a\r\n{headers}content-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def events(response: httpx.Response) -> list[Any]:
    """The data of every event of a stream; `[DONE]` must be the last."""
    data = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
    assert data.count("[DONE]") == 1
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


Serve = Callable[..., Served]
Ask = Callable[..., "Future[httpx.Response]"]


@contextmanager
def asking() -> Iterator[Ask]:
    """A function that sends a completion request from a thread and gives its future response."""
    with ThreadPoolExecutor(16) as pool:

        def send(url: str, headers: Any = None, **body: Any) -> Future[httpx.Response]:
            body = {"prompt": "hello", "stream": True} | body
            url = f"{url}/v1/completions"
            return pool.submit(httpx.post, url, json=body, headers=headers, timeout=HANG_S)

        yield send


def ended(future: Future[httpx.Response]) -> tuple[str, str | None, str | None]:
    """Text, finish reason and error code of a stream, which must end in exactly one way."""
    response = future.result(HANG_S)
    assert response.status_code == 200, response.text
    found = events(response)
    errors = [event["error"]["code"] for event in found if "error" in event]
    choices = [event["choices"][0] for event in found if "error" not in event]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(errors) + len(reasons) == 1
    return "".join(c["text"] for c in choices), *(reasons or [None]), *(errors or [None])  # type: ignore[return-value]


def failed(future: Future[httpx.Response]) -> tuple[int, str, httpx.Headers]:
    """Status, error code and headers of a request that got no answer."""
    response = future.result(HANG_S)
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status_code, error["code"], response.headers


def metric(url: str, name: str) -> float:
    """The sum of the samples whose name and labels begin with kvlane_`name`."""
    lines = httpx.get(f"{url}/metrics").text.split("\n")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"kvlane_{name}"))
