"""Wrong requests at the HTTP port of a running cluster, over many connections.

    python -m tests.fault.fuzz_http --seconds 60
    python -m tests.fault.fuzz_http --requests 200000 --seconds 3600 --rate 60 --seed 7
    python -m tests.fault.fuzz_http --seconds 30 --keys --attacks
    python -m tests.fault.fuzz_http --requests 64 --crowds

Bodies, heads, fields, framing, depth and sizes are mutated; some requests stay halves, some clients
leave. Prints what was sent and answered, and how a well-behaved client beside it fared: also as a
multiple of how it fares beside as many honest requests a second, of which as many generate, since
on few cores any requests slow others down. --keys: that client and the fuzzer each have an API key.
--attacks: then what `tests.fault.http_attacks` and `stored_attacks` do; with a word, what it names.
--elsewhere: a second cluster on this machine gets them, so that what the client then waits longer
is what any program costs it that works as much.

Exits with 1, and keeps the request in a file, if an answer is a 5xx (but 503 with Retry-After), is
not in OpenAI's form or never comes, if a process ends or is replaced, if that client fails or gets
a wrong text, if somebody logs a traceback, or if memory, threads, descriptors or anything that a
request holds does not come back. Needs root: it runs in namespaces of its own.
"""

import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.harness import Serve, enter_namespace_of
from tests.e2e.raw import Connection
from tests.e2e.shared import BRIEF
from tests.fault.crowd_attacks import CROWDS, indenting_model
from tests.fault.http_attacks import ATTACKS, attack
from tests.fault.stored_attacks import ATTACKS as STORED
from tests.support.bystander import ASKS
from tests.support.disturbed import Watched
from tests.support.fuzzing import kept, parser_of, tell_breaches, watched_cluster
from tests.support.heads import Request, post, requests
from tests.support.mutants import judge, seeds
from tests.support.patience import HANG_S

KEYS = "fuzz name=fuzz\nbystander name=bystander\nlimited name=limited concurrency=64\n"
MODEL = "tiny"
NUM_CONNECTIONS = 32
LOOK_S = 2.0
ODD_S = 0.5  # for an answer to what may be none
COMPANY_S = 20.0  # of honest requests, at most
OVERLOAD = 503
GENERATING = {path for path, _ in seeds(MODEL)} - {"/tokenize"}


@dataclass
class Answers:
    """How requests were answered, and which of them not as they should."""

    kinds: Counter[str] = field(default_factory=Counter[str])
    statuses: Counter[str] = field(default_factory=Counter[str])
    bad: list[tuple[str, Request]] = field(default_factory=list[tuple[str, Request]])
    num_generated: int = 0  # that got what they asked for

    def shown(self) -> list[dict[str, object]]:
        """Requests that were not answered as they should be, for a file."""
        return [{"why": why, **request._asdict(), "raw": request.raw.hex()}
                for why, request in self.bad[:200]]  # fmt: skip

    @property
    def num(self) -> int:
        """Requests that were sent."""
        return sum(self.kinds.values())


async def plain(connection: Connection, request: Request) -> int:
    """A request with a right head to the end of its answer; raises if that is not as it must be."""
    await connection.send_raw(request.raw)
    status = await asyncio.wait_for(connection.head(), HANG_S)
    body = await asyncio.wait_for(connection.body(), HANG_S)
    if status != OVERLOAD or "retry-after" not in connection.headers:
        judge(status, body)
    return status


async def odd(connection: Connection, request: Request, rng: random.Random) -> int:
    """Something else, and the status of the first answer to it, 0 if none came."""
    raw = request.raw
    if request.how == "half":
        raw = raw[: rng.randrange(1, len(raw) + 1)]
    if request.how == "slow":
        for at in range(0, min(len(raw), 400), 40):
            await connection.send_raw(raw[at : at + 40])
            await asyncio.sleep(0.001)
        raw = raw[400:]
    await connection.send_raw(raw)
    status = 0
    if request.how in ("whole", "slow"):
        with contextlib.suppress(TimeoutError):
            status = await asyncio.wait_for(connection.head(), ODD_S)
        wants_retry = status == OVERLOAD and "retry-after" in connection.headers
        # 501: a method or an encoding that HTTP knows and we do not; 505: another version.
        assert status < 500 or wants_retry or status in (501, 505), status
    connection.drop(reset=rng.random() < 0.5)
    return status


async def ask(
    connection: Connection, request: Request, rng: random.Random, answers: Answers
) -> None:
    """Send one, and note how it was answered."""
    answers.kinds[f"{request.kind}, {request.how}"] += 1
    is_right = request.is_plain and request.how == "whole"
    try:
        status = await (plain(connection, request) if is_right else odd(connection, request, rng))
        answers.statuses[str(status or "none")] += 1
        answers.num_generated += status == 200 and request.path in GENERATING
    except (OSError, asyncio.IncompleteReadError) as error:
        connection.drop()
        answers.statuses["closed"] += 1
        if is_right:
            answers.bad.append((f"{type(error).__name__} {error}", request))
    except (AssertionError, ValueError, IndexError, TimeoutError, ZeroDivisionError) as error:
        connection.drop()
        answers.bad.append((f"{type(error).__name__} {error}", request))


async def client(
    port: int, row: Iterator[tuple[float, Request]], number: int, answers: Answers
) -> None:
    """Takes requests until there are no more, and sends each when it is due."""
    rng, connection = random.Random(number), Connection(port)
    for due, request in row:
        await asyncio.sleep(due - time.monotonic())
        await ask(connection, request, rng, answers)
    connection.drop()


async def company(port: int, found: Answers, took_s: float) -> tuple[Answers, float]:
    """As many honest requests a second as were found, of which as many generate."""
    answers, began = Answers(), time.monotonic()
    rate, share = found.num / took_s, found.num_generated / found.num
    numbers = iter(range(round(rate * min(took_s, COMPANY_S))))

    async def honest() -> None:
        rng, connection = random.Random(0), Connection(port)
        for i in numbers:
            await asyncio.sleep(began + i / rate - time.monotonic())
            generates = int((i + 1) * share) > int(i * share)
            path, asked = ("/v1/completions" if generates else "/tokenize"), ASKS[i % len(ASKS)]
            body = {"model": MODEL} | (asked if generates else {"prompt": asked["prompt"]})
            raw = post(path, json.dumps(body).encode())
            await ask(connection, Request("honest", path, raw, is_plain=True), rng, answers)
        connection.drop()

    await asyncio.gather(*(honest() for _ in range(NUM_CONNECTIONS)))
    return answers, time.monotonic() - began


async def fuzz(
    watched: Watched, *, seconds: float, num: int, seed: int, rate: float = 0.0
) -> tuple[Answers, float]:
    """Send so many requests (0: any number), for so long at most, so many a second (0: as many as
    are answered).
    """
    answers, began = Answers(), time.monotonic()
    over = asyncio.Event()

    def row() -> Iterator[tuple[float, Request]]:
        for number, request in enumerate(requests(seed, MODEL)):
            if over.is_set() or time.monotonic() - began > seconds or (num and number >= num):
                return
            yield (began + number / rate if rate else began), request

    async def look() -> None:
        while not over.is_set():
            watched.look()
            if watched.is_over():
                over.set()
            await asyncio.sleep(LOOK_S)

    shared, looking = row(), asyncio.create_task(look())
    port = watched.serve.port
    await asyncio.gather(*(client(port, shared, i, answers) for i in range(NUM_CONNECTIONS)))
    over.set()
    looking.cancel()
    return answers, time.monotonic() - began


def breaches_of(answers: Answers) -> list[str]:
    """Answers that are not as they should be."""
    return [
        f"{why}: {request.kind}, {request.how}, {request.path}, {request.raw[:300]!r}"
        for why, request in answers.bad[:20]
    ]


def told(answers: Answers, took_s: float) -> Iterator[str]:
    """Lines about what was sent and answered."""
    rate, generated = answers.num / took_s, answers.num_generated / took_s
    yield f"{answers.num} requests in {took_s:.1f} s, {rate:.0f}/s; {generated:.0f}/s generate"
    yield f"  sent: {dict(sorted(answers.kinds.items()))}"
    yield f"  answered: {dict(sorted(answers.statuses.items()))}"


@contextlib.contextmanager
def another_cluster(*arguments: str) -> Iterator[int]:
    """Its port; it ends with the body."""
    with tempfile.TemporaryDirectory(prefix="kvl-", dir="/tmp") as root:
        serve = Serve(Path(root), port=8100).start(*arguments)
        try:
            yield serve.wait_ready().port
        finally:
            serve.end()


def main(argv: Sequence[str]) -> int:
    parser = parser_of(__doc__, "requests")
    parser.add_argument("--keys", action="store_true", help="each of them has an API key")
    parser.add_argument(
        "--attacks", nargs="?", const="", help="also floods of large things: whose names have this"
    )
    parser.add_argument("--crowds", action="store_true", help="of one client: crowd_attacks alone")
    parser.add_argument("--elsewhere", action="store_true", help="at a second cluster")
    args = parser.parse_args(argv)
    with tempfile.NamedTemporaryFile("w") as keys, ExitStack() as stack:
        keys.write(KEYS)
        keys.flush()
        more = ("--api-key-file", keys.name) if args.keys else ()
        if args.crowds:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvl-", dir="/tmp")))
            more += ("--set", f"model.path={indenting_model(root)}")
            more += ("--set", "model.max_model_len=1024")
        port = stack.enter_context(another_cluster(*BRIEF, *more)) if args.elsewhere else None
        serve, watched = stack.enter_context(watched_cluster(args, *BRIEF, *more))
        fuzzing = fuzz(
            watched, seconds=args.seconds, num=args.requests, seed=args.seed, rate=args.rate
        )
        answers, took_s = asyncio.run(fuzzing)
        beside = watched.noted()
        lines = [f"seed {args.seed}", *told(answers, took_s)]
        others, others_s = asyncio.run(company(watched.serve.port, answers, took_s))
        lines += [*told(others, others_s), *watched.compared(beside, watched.noted())]
        breaches = breaches_of(answers) + breaches_of(others)
        rows = CROWDS if args.crowds else (*ATTACKS, *STORED)
        if args.attacks is not None or args.crowds:
            rows = [row for row in rows if (args.attacks or "") in row[0]]
            for made in attack(watched, attacks=rows, twin=args.crowds and not port, port=port):
                print(made, flush=True)
                breaches += made.breaches
        breaches += watched.breaches()
        print("\n".join([*lines, *watched.report()]))
        if breaches:
            path = kept("http", args.seed, breaches, answers.shown(), args.out)
            tell_breaches(serve, breaches, path)
    return int(bool(breaches))


if __name__ == "__main__":
    enter_namespace_of("tests.fault.fuzz_http")
    sys.exit(main(sys.argv[1:]))
