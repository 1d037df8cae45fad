"""How a router refuses those for whom it has no room, and how others fare meanwhile.

    python -m benchmarks.crowd
    python -m benchmarks.crowd --held 4096 --asked 6000 --rates 2000 5000
    python -m benchmarks.crowd --limited --held 64 --asked 10000

`--held` streams are open, as many as the router takes; with `--limited` as many as the crowd's API
key may have at a time. Then `--asked` more ask: each over a new connection, at each of `--rates` a
second and at once, and all over connections that are open. Beside them one client asks for
`/v1/models` every 10 ms over its own connection. Each line says

    told       from the moment that a request was sent until its 429 is here: p50, p99
    late       how far the client was behind its rate at most: what is above 20 ms is the client's
    CPU        microseconds for each, of the router (all of it) and of the client
    beside     the other client's waits, p50 and p99; before: undisturbed

Router, worker and the two clients are processes: on two cores the router has one and the crowd the
other, as long as no more work runs. A crowd that comes at once has to wait for each other: the last
one waits for as many times the router's CPU as there are.
"""

import multiprocessing as mp
import select
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from benchmarks.output import parser, shown, write
from benchmarks.router import Bench, parties

BODY = b'{"messages": [{"role": "user", "content": "hello"}], "stream": true}'
LENGTH = b"content-length: "
ASK = b"POST /v1/chat/completions HTTP/1.1\r\nhost: b\r\nx-api-key: bench\r\n%b%d\r\n\r\n%b"
ASK %= LENGTH, len(BODY), BODY
GET = b"GET /v1/models HTTP/1.1\r\nhost: b\r\nx-api-key: other\r\n\r\n"
KEYS = "bench name=crowd concurrency={}\nother name=other\n"
BESIDE_S = 0.01
SETTLE_S = 0.5
BATCH = 32  # sent before answers are looked for


def percentile_ms(waits: Sequence[float], share: float) -> float:
    """0: there are none."""
    ordered = sorted(waits)
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def beside(pipe: Connection, address: tuple[str, int]) -> None:
    """A process: waits (when asked, how long) since it was last asked for them."""
    waits: list[tuple[float, float]] = []
    with socket.create_connection(address) as sock:
        while True:
            began, answer = time.monotonic(), b""
            sock.sendall(GET)
            while not _is_whole(answer):
                answer += sock.recv(1 << 16)
            waits.append((began, time.monotonic() - began))
            if pipe.poll(BESIDE_S):
                if pipe.recv() is None:
                    return
                pipe.send(waits)
                waits = []


def _is_whole(answer: bytes) -> bool:
    head, end, body = answer.lower().partition(b"\r\n\r\n")
    return bool(end) and len(body) >= int(head.partition(LENGTH)[2].partition(b"\r")[0])


@dataclass
class Crowd:
    """Clients of one thread."""

    address: tuple[str, int]
    told: list[float] = field(default_factory=list[float])  # seconds
    num_other: int = 0  # that got something else than 429
    late_s: float = 0.0
    _poll: select.epoll = field(default_factory=select.epoll)
    _socks: dict[int, socket.socket] = field(default_factory=dict[int, socket.socket])
    _sent: dict[int, float] = field(default_factory=dict[int, float])

    def connect(self, num: int) -> None:
        """Connections that ask later."""
        for _ in range(num):
            sock = socket.create_connection(self.address)
            self._socks[sock.fileno()] = sock
            self._poll.register(sock, select.EPOLLIN)

    def ask(self, num: int, rate: float) -> None:
        """rate: a second, over new connections; 0: at once, over those that there are, if any."""
        waiting, began, sent = list(self._socks), time.monotonic(), 0
        while len(self.told) < num:
            due = num if not rate else min(num, int((time.monotonic() - began) * rate))
            for _ in range(min(BATCH, due - sent)):
                if rate:
                    self.late_s = max(self.late_s, time.monotonic() - began - sent / rate)
                if len(waiting) <= sent:
                    self.connect(1)
                    waiting.append(next(reversed(self._socks)))
                self._sent[waiting[sent]] = time.monotonic()
                self._socks[waiting[sent]].sendall(ASK)
                sent += 1
            self._take(0.0 if sent < due else 0.001)

    def close(self) -> None:
        for sock in self._socks.values():
            sock.close()

    def _take(self, timeout_s: float) -> None:
        for fd, _ in self._poll.poll(timeout_s):
            part = self._socks[fd].recv(1 << 16)
            if fd in self._sent:  # else it is the rest of an answer
                self.num_other += not part.startswith(b"HTTP/1.1 429")
                self.told.append(time.monotonic() - self._sent.pop(fd))


def measured(
    bench: Bench, pipe: Connection, num: int, rate: float, *, opened: bool
) -> dict[str, float]:
    """One crowd."""
    crowd = Crowd(bench.clients.address)
    crowd.connect(num * opened)
    time.sleep(SETTLE_S)
    pipe.send("begin")
    pipe.recv()
    time.sleep(2 * SETTLE_S)
    began, own, cpu = time.monotonic(), time.process_time(), bench.router_cpu_s()
    crowd.ask(num, rate)
    ended, own = time.monotonic(), time.process_time() - own
    time.sleep(SETTLE_S)
    cpu = bench.router_cpu_s() - cpu
    pipe.send("end")
    waits: list[tuple[float, float]] = pipe.recv()
    crowd.close()
    assert not crowd.num_other, f"{crowd.num_other} were not refused"
    before = [took for at, took in waits if at + took < began]
    during = [took for at, took in waits if at + took >= began and at < ended]
    return {
        "told p50 ms": percentile_ms(crowd.told, 0.5),
        "told p99 ms": percentile_ms(crowd.told, 0.99),
        "late ms": 1e3 * crowd.late_s,
        "router us": 1e6 * cpu / num,
        "client us": 1e6 * own / num,
        "before p99 ms": percentile_ms(before, 0.99),
        "beside p50 ms": percentile_ms(during, 0.5),
        "beside p99 ms": percentile_ms(during, 0.99),
    }


def run(
    bench: Bench, held: int, asked: int, rates: Sequence[float]
) -> Iterator[tuple[str, dict[str, float]]]:
    """Figures of each crowd by name."""
    bench.hold(held)
    mine, theirs = mp.get_context("spawn").Pipe()
    process = mp.get_context("spawn").Process(
        target=beside, args=(theirs, bench.clients.address), daemon=True
    )
    process.start()
    for rate in rates:
        yield f"{rate:g} a second", measured(bench, mine, asked, rate, opened=False)
    yield "at once", measured(bench, mine, asked, 0, opened=False)
    yield "at once, connected", measured(bench, mine, asked, 0, opened=True)
    mine.send(None)
    process.join()
    bench.let_go()


def main() -> None:
    """Measure, print a line a crowd, write JSON."""
    made = parser(__doc__)
    made.add_argument("--held", type=int, default=4096, help="streams, and the limit")
    made.add_argument("--asked", type=int, default=5904)
    made.add_argument("--rates", type=float, nargs="*", default=(1000.0, 3000.0, 5000.0))
    made.add_argument(
        "--limited",
        action="store_true",
        help="the limit is of the crowd's API key, and not router.max_inflight",
    )
    options = made.parse_args()
    figures: dict[str, dict[str, float]] = {}
    with tempfile.NamedTemporaryFile("w") as keys, ExitStack() as stack:
        limits: dict[str, object] = {"max_inflight": options.held}
        if options.limited:
            keys.write(KEYS.format(options.held))
            keys.flush()
            limits = {"api_key_file": keys.name}
        bench = stack.enter_context(parties("none", **limits))
        for name, found in run(bench, options.held, options.asked, options.rates):
            figures[name] = found
            line = ", ".join(f"{key} {value:.1f}" for key, value in found.items())
            print(f"{name}: {line}", flush=True)
    write(options.json, {"options": shown(options), "figures": figures})


if __name__ == "__main__":
    main()
