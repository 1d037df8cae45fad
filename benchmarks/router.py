"""What one router process costs and how much passes through it.

    python -m benchmarks.router --parts cost
    python -m benchmarks.router --parts cost --authentication none

A real router (`RouterServer`) stands in a process of its own between a decode worker
without an engine, which speaks the wire and sends one frame of chunks a step, and clients that do
little more than count bytes. Everything is on loopback. CPU is user and system time of the router's
process, all threads, divided by chunks or requests, and scaled by the time that a fixed loop of
Python takes meanwhile (CALIBRATION_S on the machine where the marks were set).

    cost       CPU of a chunk at 256 and 1,024 streams, of a request with 40 and with 4,096 tokens
               that were never seen, or (known) that stood in a prompt before
    full       1,024 streams at 12 ms a step: tokens/s that pass
    calls      in this process: a token of a call, read and written as a chunk, in forms of calls
"""

import gc
import itertools
import multiprocessing as mp
import select
import shutil
import socket
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks.output import parser, shown, write
from benchmarks.train.problems import held_out_problems
from router.config import RouterConfig
from router.dispatch.mailbox import Delta
from router.http.app import Place, RouterServer, Settings
from router.openai.chat import ChatWriter
from router.text.forms import known
from router.text.forms.form import Tags
from router.text.forms.parser import FormParser
from router.text.tokenizer import Text
from worker.api import Chunks, FinishReason, Generate, Member, TokenChunk, WorkerStats
from worker.config import ModelConfig, PingConfig
from worker.wire import Event, Wire, keyring

Authentication = Literal["curve", "none"]
PARTS = ("cost", "full", "calls")
FORMS = ("hermes", "qwen3_coder")
# One call, of which most is a text of a few hundred tokens.
WRITTEN: dict[str, Any] = {
    "path": "src/main.py", "text": "def f(x):\n    return {'a': [x, \"b\"]}  # why\n" * 12,
    "mode": 420, "overwrites": True,
}  # fmt: skip
KINDS = {"path": "string", "text": "string", "mode": "integer", "overwrites": "boolean"}
TINY = Path(__file__).parents[1] / "worker" / "assets" / "tiny"
PING = PingConfig(interval_s=1.0, max_misses=20)
CONFIG = b'{"vocab_size": 1024, "max_position_embeddings": 32768}'
STEP_S = 0.012
CALIBRATION_S = 0.0088  # of the two-core machine where the marks were set, when quiet
PARTS_OF_WINDOW = 20  # calibrated after each: on a shared machine it changes from second to second
FREE = WorkerStats(max_num_reqs=4096, num_free_pages=1 << 20, num_pages=1 << 20)
REQUEST = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: b\r\nx-api-key: bench\r\nx-request-id: {}\r\n"
    "content-length: {}"
)
END = b"0\r\n\r\n"


def calibration_s() -> float:
    """CPU seconds of a fixed loop of Python."""
    began, table = time.process_time(), dict[int, int]()
    for i in range(50_000):
        table[i & 1023] = table.get(i & 511, 0) + (i ^ 7)
    return time.process_time() - began


class Worker:
    """A decode worker without an engine: each step it sends each request one token. A process."""

    def __init__(self, pipe: Connection, directory: Path, authentication: Authentication) -> None:
        text = Text(directory).encode(held_out_problems(1, 5)[0].question, add_special_tokens=False)
        self._words = [(token,) for token in text]
        self._inbox: deque[Event] = deque()
        self._running: dict[str, tuple[str, Generate, int]] = {}  # peer, request, tokens sent
        own = keyring(authentication)
        self._wire = Wire("decode-0/1", PING, self._inbox.extend, lambda: FREE, own)
        pipe.send((self._wire.start("127.0.0.1"), self._wire.key))
        self._step_s = STEP_S
        self._num_sent = 0
        self._run(pipe)

    def _run(self, pipe: Connection) -> None:
        """A step each `step_s` (0: it only takes requests), and commands in between."""
        due = time.monotonic()
        while True:
            while pipe.poll(max(0.0, due - time.monotonic())):
                match pipe.recv():
                    case "counts", _:
                        pipe.send((self._num_sent, len(self._running)))
                    case "admit", keys:
                        self._wire.admit(keys)
                        pipe.send(None)
                    case "step_s", value:
                        self._step_s, due = value, time.monotonic()
                        pipe.send(None)
                    case _:
                        return
            self._step()
            due = max(due + (self._step_s or STEP_S), time.monotonic() - 5 * self._step_s)

    def _step(self) -> None:
        self._wire.beat()
        while self._inbox:
            peer, message = self._inbox.popleft()
            if isinstance(message, Generate):
                self._running[message.req_id] = peer, message, 0
        frames: dict[str, list[TokenChunk]] = {}
        for peer, asked, num in list(self._running.values() if self._step_s else ()):
            is_last = num + 1 == asked.sampling.max_tokens
            reason = FinishReason.LENGTH if is_last else None
            position = asked.num_prompt_tokens + num
            token = self._words[num % len(self._words)]
            chunk = TokenChunk(asked.req_id, asked.dispatch, position, token, reason)
            frames.setdefault(peer, []).append(chunk)
            if is_last:
                del self._running[asked.req_id]
            else:
                self._running[asked.req_id] = peer, asked, num + 1
        for peer, chunks in frames.items():
            self._num_sent += len(chunks)
            self._wire.send(peer, Chunks(tuple(chunks)))


def route(pipe: Connection, directory: Path, authentication: Authentication) -> None:
    """The router's process: the router's own threads, and this one for commands."""
    config = RouterConfig(access_log=False)
    model = ModelConfig(path=str(directory))
    settings = Settings(config, model, PING, authentication=authentication)
    router = RouterServer(settings, Place("router-0", "1"))
    member = router.start()
    gc.collect()
    gc.freeze()  # as in a cluster
    pipe.send(member)
    address, key = pipe.recv()
    router.update_members([member, Member("decode-0", "decode", "1", address, wire_key=key)])
    while pipe.recv()[0] == "cpu":
        pipe.send(time.process_time())
    router.stop()


@dataclass(slots=True, eq=False)
class Stream:
    """A connection, and what arrived on it of the present answer."""

    sock: socket.socket
    head: bytes | None = b""  # until the body's first byte
    tail: bytes = b""


class Clients:
    """Connections, read by one thread that looks at nothing but the ends of answers."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("http://").rpartition(":")
        self.address = host, int(port)
        self._poll = select.epoll()
        self._numbers = itertools.count()
        self.idle: list[socket.socket] = []
        self.open: dict[int, Stream] = {}

    def ask(self, prompt: str, num_tokens: int) -> None:
        """Begin a stream of so many tokens."""
        sock = self.idle.pop() if self.idle else socket.create_connection(self.address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = {"messages": [{"role": "user", "content": prompt}], "stream": True}
        raw = msgspec.json.encode(body | {"max_tokens": num_tokens})
        head = REQUEST.format(f"u{next(self._numbers)}", len(raw))
        sock.sendall(f"{head}\r\n\r\n".encode() + raw)
        self.open[sock.fileno()] = Stream(sock)
        self._poll.register(sock, select.EPOLLIN)

    def read(self, seconds: float, until: Callable[[], bool] = bool) -> None:
        """Read what comes for so long, or until something holds."""
        end = time.monotonic() + seconds
        while not until() and (left := end - time.monotonic()) > 0:
            for fd, _ in self._poll.poll(min(left, 0.05)):
                self._take(self.open[fd])

    def drain(self) -> None:
        """Read until no stream is open."""
        self.read(120, lambda: not self.open)

    def _take(self, stream: Stream) -> None:
        part = stream.sock.recv(1 << 16)
        assert part, "the router has closed a connection"
        if stream.head is not None:
            stream.head += part
            head, end, part = stream.head.partition(b"\r\n\r\n")
            assert not end or head.startswith(b"HTTP/1.1 200"), stream.head
            if not part:
                return
            stream.head = None
        stream.tail = (stream.tail + part)[-len(END) :]
        if stream.tail == END:
            del self.open[stream.sock.fileno()]
            self._poll.unregister(stream.sock)
            self.idle.append(stream.sock)


class Bench:
    """The three parties, and what is measured."""

    def __init__(self, directory: Path, router: Connection, worker: Connection) -> None:
        self._router, self._worker = router, worker
        self._numbers = itertools.count()
        member: Member = router.recv()
        router.send(worker.recv())
        _ask(worker, "admit", {member.peer: member.wire_key})
        self.clients = Clients(member.address)
        words = " ".join(problem.question for problem in held_out_problems(200, 7))
        text = Text(directory)
        tokens = text.encode(words, add_special_tokens=False)
        self.short, self.long = (text.decode(tokens[:num]) for num in (30, 4086))
        self.clients.ask(self.short, 1)  # answered as soon as the worker answers the router
        self.clients.drain()

    def chunk_us(self, num: int, rate: float, seconds: float) -> float:
        """CPU of a chunk with `num` streams and `rate` chunks a second."""
        self._begin(num, num / rate, round(seconds * rate / num) + 4)
        cpu, sent, scales = _ask(self._router, "cpu"), _ask(self._worker, "counts")[0], []
        for _ in range(PARTS_OF_WINDOW):
            self.clients.read(seconds / PARTS_OF_WINDOW)
            scales.append(CALIBRATION_S / calibration_s())
        cpu, sent = _ask(self._router, "cpu") - cpu, _ask(self._worker, "counts")[0] - sent
        self.clients.drain()
        return 1e6 * statistics.fmean(scales) * cpu / sent

    def request_us(self, prompt: str, num: int, at_once: int = 8, *, known: bool = False) -> float:
        """CPU of a request with one token; known: its prompt is always the same."""
        _ask(self._worker, "step_s", 0.002)
        began, scales = 0.0, list[float]()
        for i in range(-at_once, num):  # the first ones open the connections
            began = _ask(self._router, "cpu") if i == 0 else began
            self.clients.ask(prompt if known else f"{next(self._numbers)} {prompt}", 1)
            self.clients.read(30, lambda: len(self.clients.open) < at_once)
            if i % max(1, num // PARTS_OF_WINDOW) == 0:
                scales.append(CALIBRATION_S / calibration_s())
        self.clients.drain()
        return 1e6 * statistics.fmean(scales) * (_ask(self._router, "cpu") - began) / num

    def full(self, num: int, num_tokens: int) -> float:
        """Tokens a second that pass with `num` streams."""
        began = self._begin(num, STEP_S, num_tokens)
        self.clients.drain()
        return num * num_tokens / (time.monotonic() - began)

    def _begin(self, num: int, step_s: float, num_tokens: int) -> float:
        """Start streams once the worker has all, which waits for that. Returns when they begin."""
        _ask(self._worker, "step_s", 0.0)
        for _ in range(num):
            self.clients.ask(self.short, num_tokens)
        while _ask(self._worker, "counts")[1] < num:
            time.sleep(0.05)
        began = time.monotonic()
        _ask(self._worker, "step_s", step_s)
        begun = self.clients.open.values()
        self.clients.read(60, lambda: all(stream.head is None for stream in begun))
        return began


def _ask(pipe: Connection, name: str, value: Any = None) -> Any:
    pipe.send((name, value))
    return pipe.recv()


@contextmanager
def parties(authentication: Authentication) -> Iterator[Bench]:
    """Router and worker in processes of their own; both end with it."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        directory, pipes = Path(folder), list[Connection]()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / name, directory)
        (directory / "config.json").write_bytes(CONFIG)
        for target in (route, Worker):
            mine, theirs = context.Pipe()
            pipes.append(mine)
            arguments = theirs, directory, authentication
            process = context.Process(target=target, args=arguments, daemon=True)
            process.start()
            stack.callback(process.join, 10)
            stack.callback(mine.send, ("stop", None))
        bench = Bench(directory, *pipes)
        stack.callback(lambda: [sock.close() for sock in bench.clients.idle])
        yield bench


def call_us(text: Text, name: str, seconds: float) -> float:
    """CPU of a token of a call in a form, from its text to a chunk's JSON; the median of calls."""
    form, parameters = known.FORMS[name], {
        "type": "object", "properties": {key: {"type": kind} for key, kind in KINDS.items()}
    }  # fmt: skip
    arguments = msgspec.json.encode(WRITTEN).decode()
    if isinstance(style := form.style, Tags):
        arguments = "".join(
            f"{style.opens}{key}{style.named}{value}{style.closes}"
            for key, value in WRITTEN.items()
        )
    call = f"{form.opens}write{form.named}{arguments}{form.closes}"
    tokens = text.encode(call, add_special_tokens=False)
    deltas = [Delta(0, text.decode([token])) for token in tokens]
    found, until = list[float](), time.monotonic() + seconds
    while time.monotonic() < until:
        writer = ChatWriter(lambda: FormParser(form, {"write": parameters}), None)
        scale, began = CALIBRATION_S / calibration_s(), time.process_time()
        for delta in deltas:
            for chunk in writer.chunks(delta):
                msgspec.json.encode(chunk)
        found.append(1e6 * scale * (time.process_time() - began) / len(deltas))
    return statistics.median(found)


def run(bench: Bench, part: str, seconds: float, num: int = 1024) -> Iterator[tuple[str, float]]:
    """Figures of a part by name; `num` streams stand for 1,024."""
    if part == "full":
        yield f"{num} streams, tokens/s", bench.full(num, round(seconds / STEP_S))
        return
    if part == "calls":
        found = {name: call_us(Text(TINY), name, seconds / 4) for name in FORMS}
        yield from ((f"a token in {name}, us", value) for name, value in found.items())
        yield "XML of JSON, %", 100 * found["qwen3_coder"] / found["hermes"]
        return
    for streams in (num // 4, num):
        yield f"chunk, {streams} streams, us", bench.chunk_us(streams, 5000.0, seconds)
    num_asked = round(40 * seconds)
    yield "request, 40 tokens, us", bench.request_us(bench.short, num_asked)
    yield "request, 4096 tokens, us", bench.request_us(bench.long, num_asked)
    yield "request, 4096 known, us", bench.request_us(bench.long, num_asked, known=True)


def main() -> None:
    """Measure, print a line a figure, write JSON."""
    made = parser(__doc__)
    made.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    made.add_argument("--seconds", type=float, default=8.0, help="each measurement")
    made.add_argument("--authentication", choices=("curve", "none"), default="curve")
    options = made.parse_args()
    now_s = statistics.median(calibration_s() for _ in range(21))
    print(f"calibration {1e3 * now_s:.1f} ms; CPU is scaled to {1e3 * CALIBRATION_S:.1f}")
    figures: dict[str, float] = {}
    with parties(options.authentication) as bench:
        for part in options.parts:
            for name, value in run(bench, part, options.seconds):
                figures[f"{part}: {name}"] = value
                print(f"{part:9s} {name:28s} {value:10.1f}", flush=True)
    write(options.json, {"options": shown(options), "calibration_s": now_s, "figures": figures})


if __name__ == "__main__":
    main()
