"""What one router process costs and how much passes through it: `python -m benchmarks.router`.

A real router (`RouterServer`) stands in a process of its own between a decode worker
without an engine, which speaks the wire and sends one frame of chunks a step, and clients that do
little more than count bytes. Everything is on loopback. CPU is user and system time of the router's
process, all threads, divided by chunks or requests, and scaled by the time that a fixed loop of
Python takes meanwhile (CALIBRATION_S on the machine where the marks were set).

    cost       CPU of a chunk at 256 and 1,024 streams, of a request with 40 and with 4,096 tokens
               that were never seen, or (known) that stood in a prompt before
    steady     4,000 tokens/s: ms from the worker's send to the client's read, of chunks and of the
               first chunks of short prompts that arrive; how late the router's loop is
    arrivals   the same, and prompts of 4,096 tokens arrive
    fast       the same as steady at 21,000 tokens/s
    full       1,024 streams at 12 ms a step: tokens/s that pass
"""

from __future__ import annotations

import argparse
import gc
import itertools
import mmap
import multiprocessing as mp
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.calibration import CALIBRATION_S, calibration_s
from benchmarks.counting import MARK, Clients
from benchmarks.train.problems import held_out_problems
from router.config import RouterConfig
from router.http.app import Place, RouterServer, Settings
from router.text.tokenizer import Text
from worker.api import Chunks, FinishReason, Generate, Member, TokenChunk, WorkerStats
from worker.config import ModelConfig, PingConfig
from worker.wire import Event, Wire

PARTS = ("cost", "steady", "arrivals", "fast", "full")
TINY = Path(__file__).parents[1] / "worker" / "assets" / "tiny"
PING = PingConfig(interval_s=1.0, max_misses=20)
CONFIG = b'{"vocab_size": 1024, "max_position_embeddings": 32768}'
STEP_S = 0.012
PROBE_S = 0.005
PARTS_OF_WINDOW = 20  # calibrated after each: on a shared machine it changes from second to second
ROOM = WorkerStats(max_num_reqs=4096, num_free_pages=1 << 20, num_pages=1 << 20)


class Worker:
    """A decode worker without an engine: each step it sends each request one token. A process."""

    def __init__(self, pipe: Connection, directory: Path) -> None:
        text = Text(directory)
        self._mark = text.encode(MARK, add_special_tokens=False)
        words = text.encode(held_out_problems(1, 5)[0].question, add_special_tokens=False)
        self._words = [(token,) for token in words]
        self._inbox: deque[Event] = deque()
        self._running: dict[str, tuple[str, Generate, Iterator[tuple[int, ...]]]] = {}
        self._wire = Wire("decode-0/1", PING, self._inbox.extend, lambda: ROOM)
        pipe.send(self._wire.start("127.0.0.1"))
        self._step_s = STEP_S
        self._num_sent = 0
        # When each token of a client's id was sent; of unmarked streams only until they end.
        self._sent: dict[str, list[float]] = {}
        self._run(pipe)

    def _run(self, pipe: Connection) -> None:
        """A step each `step_s` (0: it only takes requests), and commands in between."""
        due = time.monotonic()
        while True:
            while pipe.poll(max(0.0, due - time.monotonic())):
                match pipe.recv():
                    case "counts", _:
                        pipe.send((self._num_sent, len(self._running)))
                    case "times", _:
                        pipe.send(self._sent)
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
                name = message.req_id.partition("-")[0]
                tokens = itertools.cycle(self._words if name[0] == "u" else [self._mark])
                self._running[message.req_id] = peer, message, tokens
                self._sent[name] = []
        frames: dict[str, list[TokenChunk]] = {}
        for peer, asked, tokens in list(self._running.values() if self._step_s else ()):
            times = self._sent[asked.req_id.partition("-")[0]]
            position, reason = asked.num_prompt_tokens + len(times), None
            times.append(time.monotonic())
            if len(times) == asked.sampling.max_tokens:
                reason = FinishReason.LENGTH
                del self._running[asked.req_id]
                self._forget(asked.req_id.partition("-")[0])
            chunk = TokenChunk(asked.req_id, asked.dispatch, position, next(tokens), reason)
            frames.setdefault(peer, []).append(chunk)
        for peer, chunks in frames.items():
            self._num_sent += len(chunks)
            self._wire.send(peer, Chunks(tuple(chunks)))

    def _forget(self, name: str) -> None:
        """Nobody asks for the times of unmarked streams, and there may be a million of them."""
        if name[0] == "u":
            del self._sent[name]


def route(pipe: Connection, directory: Path) -> None:
    """The router's process: the router's own threads, and this one for commands."""
    config, model = RouterConfig(access_log=False), ModelConfig(path=str(directory))
    router = RouterServer(Settings(config, model, PING), Place("router-0", "1"))
    member = router.start()
    gc.collect()
    gc.freeze()  # as in a cluster
    pipe.send(member.address)
    router.update_members([member, Member("decode-0", "decode", "1", pipe.recv())])
    loop: Any = router.loop
    lags: list[float] = []  # of the loop, at each multiple of PROBE_S, missed ones included
    probed = False

    def probe(due: float) -> None:
        now = loop.time()
        while due <= now:
            lags.append(now - due)
            due += PROBE_S
        if probed:
            loop.call_at(due, probe, due)

    while (name := pipe.recv()[0]) != "stop":
        if name == "cpu":
            pipe.send(time.process_time())
            continue
        if name == "rss":
            num_pages = int(Path("/proc/self/statm").read_text().split()[1])
            pipe.send(num_pages * mmap.PAGESIZE)
            continue
        pipe.send(lags)  # of the time since the call before
        lags, probed = [], not probed
        if probed:
            loop.call_soon_threadsafe(probe, loop.time())
    router.stop()


class Bench:
    """The three parties, and what is measured."""

    def __init__(self, directory: Path, router: Connection, worker: Connection) -> None:
        self._router, self._worker = router, worker
        self._numbers = itertools.count()
        address = router.recv()
        router.send(worker.recv())
        self._clients = Clients(address)
        words = " ".join(problem.question for problem in held_out_problems(200, 7))
        text = Text(directory)
        tokens = text.encode(words, add_special_tokens=False)
        self.short, self.long = (text.decode(tokens[:num]) for num in (30, 4086))
        self._clients.ask(self.short, 1)  # answered as soon as the worker answers the router
        self._clients.drain()

    def close(self) -> None:
        """Close the clients' connections."""
        for sock in self._clients.idle:
            sock.close()

    def chunk_us(self, num: int, rate: float, seconds: float) -> float:
        """CPU of a chunk with `num` streams and `rate` chunks a second."""
        self._begin(num, num / rate, round(seconds * rate / num) + 4, "u")
        cpu, sent, scales = _told(self._router, "cpu"), _told(self._worker, "counts")[0], []
        for _ in range(PARTS_OF_WINDOW):
            self._clients.read(seconds / PARTS_OF_WINDOW)
            scales.append(CALIBRATION_S / calibration_s())
        cpu, sent = _told(self._router, "cpu") - cpu, _told(self._worker, "counts")[0] - sent
        self._clients.drain()
        return 1e6 * statistics.fmean(scales) * cpu / sent

    def request_us(self, prompt: str, num: int, at_once: int = 8, *, known: bool = False) -> float:
        """CPU of a request with one token; known: its prompt is always the same."""
        _told(self._worker, "step_s", 0.002)
        began, scales = 0.0, list[float]()
        for i in range(-at_once, num):  # the first ones open the connections
            began = _told(self._router, "cpu") if i == 0 else began
            self._clients.ask(prompt if known else self._another(prompt), 1)
            self._clients.read(30, lambda: len(self._clients.open) < at_once)
            if i % max(1, num // PARTS_OF_WINDOW) == 0:
                scales.append(CALIBRATION_S / calibration_s())
        self._clients.drain()
        return 1e6 * statistics.fmean(scales) * (_told(self._router, "cpu") - began) / num

    def late_ms(self, num: int, seconds: float, prompt: str) -> dict[str, float]:
        """Delays with `num` streams, while `prompt` arrives 20 times a second."""
        self._clients.ended.clear()
        self._begin(num, STEP_S, round((seconds + 2) / STEP_S), "m")
        self._clients.read(1.0)  # all have begun in one step, and will end in one: neither counts
        _told(self._router, "lags")
        began, end = time.monotonic(), time.monotonic() + seconds
        num_asked = 0
        while time.monotonic() < end or num_asked < 2:  # of one there is no quantile
            self._clients.ask(self._another(prompt), 1, "f")
            self._clients.read(0.05)
            num_asked += 1
        figures = {"lag": _told(self._router, "lags"), "chunk": [], "first": []}
        self._clients.drain()
        all_sent = _told(self._worker, "times")  # of all requests until now
        for each in self._clients.ended:
            times = iter(all_sent[each.name])
            pairs = [(next(times), at) for at, marks in each.reads for _ in range(marks)]
            if each.name[0] == "f":  # however late its answer was sent
                figures["first"] += [at - sent for sent, at in pairs]
            else:
                figures["chunk"] += [at - sent for sent, at in pairs if began < sent < end]
        return {
            f"{name} p{point}, ms": 1e3 * statistics.quantiles(found, n=100)[point - 1]
            for name, found in figures.items()
            for point in (50, 99)
        }

    def full(self, num: int, num_tokens: int) -> float:
        """Tokens a second that pass with `num` streams."""
        began = self._begin(num, STEP_S, num_tokens, "u")
        self._clients.drain()
        return num * num_tokens / (time.monotonic() - began)

    def ask_all(self, num: int, at_once: int, num_tokens: int) -> None:
        """Pass `num` streams through it, so many at once; every prompt is another one."""
        _told(self._worker, "step_s", 0.005)
        for _ in range(num):
            self._clients.ask(self._another(self.short), num_tokens)
            self._clients.read(60, lambda: len(self._clients.open) < at_once)
        self._clients.drain()

    def _another(self, prompt: str) -> str:
        return f"{next(self._numbers)} {prompt}"

    def rss_bytes(self) -> int:
        """Resident memory of the router's process."""
        return _told(self._router, "rss")

    def _begin(self, num: int, step_s: float, num_tokens: int, kind: str) -> float:
        """Start streams; the worker sends nothing until it has all. Returns when it begins."""
        _told(self._worker, "step_s", 0.0)
        for _ in range(num):
            self._clients.ask(self.short, num_tokens, kind)
        while _told(self._worker, "counts")[1] < num:
            time.sleep(0.05)
        began = time.monotonic()
        _told(self._worker, "step_s", step_s)
        begun = self._clients.open.values()
        self._clients.read(60, lambda: all(stream.head is None for stream in begun))
        return began


def _told(pipe: Connection, name: str, value: Any = None) -> Any:
    pipe.send((name, value))
    return pipe.recv()


@contextmanager
def parties() -> Iterator[Bench]:
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
            process = context.Process(target=target, args=(theirs, directory), daemon=True)
            process.start()
            stack.callback(process.join, 10)
            stack.callback(mine.send, ("stop", None))
        bench = Bench(directory, *pipes)
        stack.callback(bench.close)
        yield bench


def run(bench: Bench, part: str, seconds: float, num: int = 1024) -> Iterator[tuple[str, float]]:
    """Figures of a part by name; `num` streams stand for 1,024."""
    if part == "cost":
        for each in (num // 4, num):
            yield f"chunk, {each} streams, us", bench.chunk_us(each, 5000.0, seconds)
        for name, prompt in (("40", bench.short), ("4096", bench.long)):
            yield f"request, {name} tokens, us", bench.request_us(prompt, round(40 * seconds))
        known = bench.request_us(bench.long, round(40 * seconds), known=True)
        yield "request, 4096 known, us", known
    elif part == "full":
        yield f"{num} streams, tokens/s", bench.full(num, round(seconds / STEP_S))
    else:
        prompt = bench.long if part == "arrivals" else bench.short
        each = num * (252 if part == "fast" else 48) // 1024
        yield from bench.late_ms(each, seconds, prompt).items()


def main() -> None:
    """See the module."""
    plain = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=8.0, help="each measurement")
    asked = parser.parse_args()
    now_s = statistics.median(calibration_s() for _ in range(21))
    print(f"calibration {1e3 * now_s:.1f} ms; CPU is scaled to {1e3 * CALIBRATION_S:.1f}")
    with parties() as bench:
        for part in asked.parts:
            for name, value in run(bench, part, asked.seconds):
                print(f"{part:9s} {name:28s} {value:10.1f}", flush=True)


if __name__ == "__main__":
    main()
