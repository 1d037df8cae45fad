"""Wrong frames at every socket of a running cluster, by strangers and by members gone bad.

    python -m tests.fault.fuzz_wire --seconds 60
    python -m tests.fault.fuzz_wire --seconds 60 --set decode.tp=2      also at the ports of ranks
    python -m tests.fault.fuzz_wire --seconds 3600 --rate 500 --workers 2 --set decode.tp=2 \\
        --set transport.name=sockets    or mooncake, which members alone reach, too

Three members gone bad (a router, a decode and a prefill worker, each with a key that the controller
has announced) send to every worker, and to routers, decode workers and the controller where these
have connected to them. Strangers speak ZMTP by hand to every port at which it is spoken, or have
keys that nobody knows; to all other ports, Ray's for one, they say what HTTP/2 and others begin
with. Prints what was sent and how a well-behaved client beside it fared.

Exits with 1, and keeps the last frames in a file, if a process ends or is replaced, if that client
fails or gets a wrong text, if somebody logs a traceback, or if memory, threads, descriptors or
anything that a request holds does not come back. Needs root: it runs in namespaces of its own.
"""

import random
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from tests.e2e.harness import Serve, enter_namespace_of
from tests.e2e.shared import BRIEF
from tests.fault.admission import let_in
from tests.fault.rogues import DEAF, Impostor, Ledger, Noise, Rogue, Stranger
from tests.support.disturbed import Watched
from tests.support.frames import Frames, seeds
from tests.support.fuzzing import kept, parser_of, tell_breaches, watched_cluster
from tests.support.greet import connects, listening_ports

LOCAL = "127.0.0.1"
LOOK_S = 2.0
BURST = 8  # frames a link, before what came is read
MAX_BURST_S = 0.05


def speaks_zmtp(port: int) -> bool:
    """Whether somebody there greets as ZeroMQ does."""
    try:
        with socket.create_connection((LOCAL, port), timeout=1) as raw:
            raw.settimeout(0.3)
            raw.sendall(b"\xff" + bytes(8) + b"\x7f")
            greeting = raw.recv(10)
    except OSError:
        return False
    return greeting[:1] == b"\xff" and greeting[9:10] == b"\x7f"


class Crowd:
    """All who misbehave, against one cluster."""

    def __init__(self, serve: Serve, rng: random.Random, stack: ExitStack) -> None:
        self.ledger = ledger = Ledger()
        roles = ("router", "decode", "prefill")
        everywhere = sorted(listening_ports())
        ports = [port for port in everywhere if speaks_zmtp(port)]
        self._rogues = [Rogue(f"{role}-9", role, rng, ledger) for role in roles]
        for rogue in self._rogues:
            stack.callback(rogue.close)
        own = let_in(serve, [rogue.member for rogue in self._rogues])
        for rogue in self._rogues:
            rogue.meet(own)
        names = {int(m.address.rpartition(":")[2]): m.name for m in own if m.address}
        workers = [member for member in own if member.address.startswith("tcp://")]
        frames = Frames(rng, seeds("router-0/x", workers[0].peer, "prefill-0/x"))
        self._strangers: list[Stranger | Impostor | Noise] = [
            Stranger(port, names.get(port, f"port {port}"), frames, rng, ledger) for port in ports
        ]
        self._strangers += [
            Noise(port, frames, rng, ledger, is_deaf=not connects((LOCAL, port)))
            for port in everywhere
            if port not in ports
        ]
        for plain in (True, False):
            for member in workers:
                impostor = Impostor(member, frames, rng, ledger, plain=plain)
                stack.callback(impostor.close)
                self._strangers.append(impostor)

    def turn(self) -> None:
        """Everybody sends something, and reads what came."""
        for rogue in self._rogues:
            for _ in range(BURST):
                rogue.send()
            rogue.hear()
        for stranger in self._strangers:
            stranger.send()

    def release(self) -> None:
        """As `Rogue.release`."""
        for rogue in self._rogues:
            rogue.release()

    def hear(self) -> None:
        """Keep links up while nothing is sent."""
        for rogue in self._rogues:
            rogue.hear()


def fuzz(
    watched: Watched, *, seconds: float, num: int, seed: int, rate: float, releases: bool = False
) -> tuple[Ledger, float]:
    """Send so many frames, for so long at most, so many a second (0: as many as go).

    releases: in the end, what has leases, so that nobody has to wait for their end.
    """
    with ExitStack() as stack:
        crowd = Crowd(watched.serve, random.Random(seed), stack)
        watched.noted()  # letting them in took a while
        began = now = look_at = time.monotonic()
        while now - began < seconds and (not num or crowd.ledger.num < num):
            crowd.turn()
            now = time.monotonic()
            if now >= look_at:
                watched.look()
                look_at = now + LOOK_S
                if watched.is_over():
                    break
            if rate:
                due = began + crowd.ledger.num / rate
                while (wait_s := due - time.monotonic()) > 0:
                    time.sleep(min(wait_s, MAX_BURST_S))
                    crowd.hear()
        took_s = time.monotonic() - began
        if releases:
            crowd.release()
        return crowd.ledger, took_s


def told(ledger: Ledger, took_s: float) -> Iterator[str]:
    """Lines about what was sent."""
    yield f"{ledger.num} frames in {took_s:.1f} s, {ledger.num / took_s:.0f}/s"
    for name, num in sorted(ledger.by_door.items()):
        yield f"  {num:8} {name}"
    kinds = sorted({kind.split()[0] for kind in ledger.by_kind})
    hows = sorted({kind.partition(" ")[2] or "valid" for kind in ledger.by_kind})
    yield f"  of types: {', '.join(kinds)}"
    yield f"  done to them: {', '.join(hows)}"


def main(argv: Sequence[str]) -> int:
    parser = parser_of(__doc__, "frames")
    parser.add_argument("--workers", default="1", help="of each of both roles")
    args = parser.parse_args(argv)
    workers = "--prefill", args.workers, "--decode", args.workers
    with watched_cluster(args, *BRIEF, *workers) as (serve, watched):
        ledger, took_s = fuzz(
            watched, seconds=args.seconds, num=args.frames, seed=args.seed, rate=args.rate
        )
        watched.noted()
        breaches = watched.breaches() + [DEAF] * bool(ledger.by_door[DEAF])
        print("\n".join([f"seed {args.seed}", *told(ledger, took_s), *watched.report()]))
        if breaches:
            path = kept("wire", args.seed, breaches, ledger.shown(), args.out)
            tell_breaches(serve, breaches, path)
    return int(bool(breaches))


if __name__ == "__main__":
    enter_namespace_of("tests.fault.fuzz_wire")
    sys.exit(main(sys.argv[1:]))
