"""How long decode still waits for KV once its prefill worker has computed all of it.

    python -m benchmarks.transfer exposed --kind tcp,nvlink --decode-device cuda:1 \\
        --tokens 512,2048,8192 --groups 1,4 --throttle-gb-s 0,25 --json out.json
    python -m benchmarks.transfer exposed --model-config benchmarks/models/small.json \\
        --prefill-device cpu --decode-device cpu --transport shm --page-size 16 --tokens 256,512

A prefill and a decode worker, each in a process of its own, with the product's engines, loops,
sockets and transport; prompts of random tokens, one at a time, prefix caches off. For each kind of
transport and number of layer groups (`kv.num_groups`) a pair of workers is started.

exposed: from the end of the prompt's last step, as the prefill worker's host saw it (right after
its wait for the step), until decode has committed the whole prompt, by the monotonic clock that
processes of one host share; 0 if decode was earlier. The device was through a wake-up before that.
With several groups the last one is announced before the step ends: once the last layer has stored
its KV.
lag: from the last announcement, as it was handed to the prefill worker's socket, until that commit.
transfer: `Stages.transfer_s` of the answer: decode's own figure, from the last announcement on.
prefill: `Stages.prefill_s`.

With a throttle, a pull is over no sooner than a card of that many GB/s would have brought it, one
pull after the other; see `benchmarks.throttle`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.instruments import (
    HANG_S,
    PATIENT,
    AnnouncedPages,
    LandingLoop,
    Router,
    Settled,
    StampingMeter,
)
from benchmarks.load.result import REPOSITORY, machine
from benchmarks.throttle import Throttle
from worker.api import Member, Stages
from worker.config import WorkerConfig
from worker.start.build import Place
from worker.transfer.base import TRANSPORTS
from worker.worker import ROLES, Worker

HOST = "127.0.0.1"
NUM_WARM_UP = 2  # prompts of each length
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Course:
    """What a pair of workers is measured with. Filled by `main`."""

    tokens: tuple[int, ...]  # lengths of prompts
    gb_per_s: tuple[float, ...]  # throttles; 0 = none
    repeat: int
    vocab_size: int


def built(config: dict[str, Any], role: str) -> Worker:
    """A worker of this process that does not serve yet."""
    logging.basicConfig(level=logging.WARNING, format=f"{role} %(name)s: %(message)s")
    tree = WorkerConfig.model_validate({"role": role, **config})
    return Worker(tree, Place(f"{role}-0", "i0", HOST))


def prefill(config: dict[str, Any], conn: Connection) -> None:
    """Main function of the prefill worker's process; ends with the other end of `conn`.

    Sends its Member, then for each (number of tokens, whether a digest is wanted) that it receives
    the steps (`Settled`) that computed so many tokens, when the last announcement of the last
    prompt went out, and a digest of its KV, or "".
    """
    worker = built(config, "prefill")
    worker.engine.meter = meter = StampingMeter(worker.engine.metrics)
    announced = AnnouncedPages(worker)
    conn.send(worker.start())
    with suppress(EOFError):
        while True:
            num_tokens, wanted = conn.recv()
            steps = meter.take(num_tokens)
            conn.send((steps, announced.last_at, announced.digest(num_tokens * wanted)))
    os._exit(0)


def decode(config: dict[str, Any], conn: Connection, result: Connection, course: Course) -> None:
    """Main function of the decode worker's process; sends the rows to `result`.

    Args:
        config: of the worker.
        conn: to the prefill worker's process.
        result: where rows go, one list of dicts.
        course: what to measure.
    """
    throttle = Throttle()
    ROLES["decode"] = f"{__name__}:{LandingLoop.__name__}"
    worker = built(config, "decode")
    transport: Any = worker.engine.transport
    connect = transport.connect
    transport.connect = lambda *args: throttle.over(connect(*args))
    source: Member = conn.recv()
    member = worker.start()
    worker.update_members([source, member])
    router = Router(member, source.peer)
    limit = time.monotonic() + HANG_S
    while not worker.num_peers():
        if time.monotonic() > limit:
            raise RuntimeError("the prefill worker cannot be pulled from")
        time.sleep(0.01)
    loop: Any = worker.loop  # pyright: ignore
    (known,) = loop._peers._known.values()
    measured = known.link
    rows: list[dict[str, Any]] = []
    for rate in course.gb_per_s:
        throttle.bytes_per_s = rate * 1e9
        known_rate = min(throttle.bytes_per_s or measured.bytes_per_s, measured.bytes_per_s)
        known.link = dataclasses.replace(measured, bytes_per_s=known_rate)  # of the card
        for num_tokens in course.tokens:
            found = []
            for number in range(NUM_WARM_UP + course.repeat):
                while not worker.idle():
                    time.sleep(0.001)
                throttle.num_bytes = 0
                LandingLoop.digests = number == 0  # takes the loop's time: not while measuring
                stages = router.ask(random_prompt(course, num_tokens, number))
                conn.send((num_tokens - 1, LandingLoop.digests))
                steps, announced_at, digest = conn.recv()
                landed = LandingLoop.landed.pop()
                if digest != landed.digest:
                    raise RuntimeError(f"the KV of {num_tokens} tokens came over changed")
                times = times_ms(stages, steps, announced_at, landed.at, num_tokens)
                found.append({**times, "num_bytes": throttle.num_bytes})
            figures = {name: [each[name] for each in found[NUM_WARM_UP:]] for name in found[0]}
            rows.append({"gb_per_s": rate, "tokens": num_tokens, **figures})
    result.send(rows)
    conn.close()
    router.close()
    os._exit(0)


def random_prompt(course: Course, num_tokens: int, seed: int) -> list[int]:
    """Token ids."""
    return random.Random(seed).choices(range(course.vocab_size), k=num_tokens)


def times_ms(
    stages: Stages,
    prefilled: list[Settled],
    announced_at: float,
    landed_at: float,
    num_tokens: int,
) -> dict[str, float]:
    """Milliseconds of one prompt of `num_tokens`; `prefilled` are its steps."""
    assert sum(step.num_tokens for step in prefilled) == num_tokens - 1, "another prompt's steps"
    return {
        "exposed_ms": 1e3 * max(0.0, landed_at - prefilled[-1].at),
        "lag_ms": 1e3 * (landed_at - announced_at),
        "transfer_ms": 1e3 * stages.transfer_s,
        "prefill_ms": 1e3 * stages.prefill_s,
        "num_steps": len(prefilled),
    }


def worker_config(
    options: argparse.Namespace, model: Path, kind: str, num_groups: int | str
) -> dict[str, Any]:
    """The sections that both workers share."""
    longest, page_size = max(options.tokens), options.page_size
    return {
        "model": {
            "path": str(model), "load_format": options.load_format, "max_model_len": longest + 8,
        },
        "kv": {"page_size": page_size, "num_groups": num_groups},
        "engine": {
            "prefix_cache": False, "max_num_reqs": 4, "penalty_rows": 1, "growth_tokens": 1,
            "max_prefill_tokens": options.chunk, "threads": options.threads,
            # two prompts: the last one's pages may still be leased when the next one begins
            "num_pages": 2 * (-(-longest // page_size) + 2) + 2,
        },
        "transport": {"name": options.transport, "kind": kind, "pull_timeout_s": HANG_S},
        # one token is asked for: if the prefill worker drew it, nothing would be pulled
        "disaggregation": {"mode": "always", "first_token": "decode"},
        "ping": PATIENT,
    }  # fmt: skip


@contextmanager
def on_device(device: str) -> Iterator[str]:
    """A process started here sees `device` alone; "cpu" or "cuda" for `engine.device`."""
    kind, _, index = device.partition(":")
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = before.split(",") if before else []
    number = int(index or 0)
    os.environ["CUDA_VISIBLE_DEVICES"] = (
        "" if kind == "cpu" else listed[number] if listed else str(number)
    )
    try:
        yield kind
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def pair(
    options: argparse.Namespace, config: dict[str, Any], course: Course
) -> list[dict[str, Any]]:
    """The rows of one pair of workers; both are gone afterwards.

    Raises:
        RuntimeError: one of them has failed; its own words are on stderr.
    """
    ours, theirs = SPAWN.Pipe()
    to_prefill, to_decode = SPAWN.Pipe()
    processes = []
    for target, device, extra, args in (
        (prefill, options.prefill_device, {}, (to_decode,)),
        # its own steps are not measured, so its start need not wait for graphs
        (decode, options.decode_device, {"graph": "eager"}, (to_prefill, theirs, course)),
    ):
        with on_device(device) as kind:
            engine = {**config["engine"], "device": kind, **extra}
            process = SPAWN.Process(target=target, args=({**config, "engine": engine}, *args))
            process.start()
        processes.append(process)
    for end in (theirs, to_prefill, to_decode):
        end.close()
    try:
        return ours.recv()
    except EOFError:
        raise RuntimeError("a worker has failed, see above") from None
    finally:
        for process in processes:
            process.join(HANG_S)
            process.kill()


def numbers(text: str) -> list[int]:
    """Of an option: whole numbers, comma-separated."""
    return [int(part) for part in text.split(",")]


def groups(text: str) -> list[int | str]:
    """Of an option: values of kv.num_groups, comma-separated."""
    return [part if part == "auto" else int(part) for part in text.split(",")]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer exposed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model-config", type=Path, default=REPOSITORY / "benchmarks/models/qwen3-8b.json")
    add("--load-format", default="dummy", choices=("dummy", "safetensors"))
    add("--prefill-device", default="cuda:0", help="cuda:N or cpu")
    add("--decode-device", default="cuda:0", help="may be the same one")
    add("--transport", default="mooncake", choices=sorted(TRANSPORTS))
    add("--kind", default="auto", help="of the transport; several, comma-separated")
    add("--tokens", type=numbers, default=[512, 2048, 8192], help="lengths of prompts")
    add("--groups", type=groups, default=[1, 4], help="layer groups that divide the layers; auto")
    add("--throttle-gb-s", default="0", help="GB/s of the card, comma-separated; 0: none")
    add("--chunk", type=int, default=2048, help="prompt tokens of one prefill step")
    add("--page-size", type=int, default=64)
    add("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="a worker; CPU")
    add("--repeat", type=int, default=10, help="prompts of each length")
    add("--json", type=Path)
    return parser.parse_args(arguments)


HEAD = (
    "transport         GB/s  tokens  groups"
    "   exposed ms      min      max     lag  transfer   prefill  ratio"
)


def line(row: dict[str, Any], first: dict[str, Any]) -> str:
    """A row of the table; `first` is what its ratio is against."""
    names = ("exposed_ms", "lag_ms", "transfer_ms", "prefill_ms")
    exposed, lag, transfer, prefill_ms = (statistics.median(row[name]) for name in names)
    ratio = exposed / (statistics.median(first["exposed_ms"]) or float("nan"))
    rate = f"{row['gb_per_s']:g}" if row["gb_per_s"] else "-"
    return (
        f"{row['transport']:16}{rate:>6}{row['tokens']:8}{row['groups']:>8}{exposed:13.3f}"
        f"{min(row['exposed_ms']):9.3f}{max(row['exposed_ms']):9.3f}{lag:8.3f}{transfer:10.3f}"
        f"{prefill_ms:10.2f}{ratio:7.2f}"
    )


def main(arguments: Sequence[str]) -> None:
    """Measure every pair of workers, print a table, write JSON."""
    options = parse(arguments)
    place = Path(tempfile.mkdtemp(prefix="kvlane-bench-"))
    # beside weights lies their own config.json
    model = place if options.load_format == "dummy" else options.model_config.parent
    rows: list[dict[str, Any]] = []
    try:
        shutil.copy(options.model_config, place / "config.json")
        vocab_size = json.loads(options.model_config.read_text())["vocab_size"]
        rates = tuple(float(part) for part in options.throttle_gb_s.split(","))
        course = Course(tuple(options.tokens), rates, options.repeat, vocab_size)
        for kind in options.kind.split(","):
            name = options.transport if kind == "auto" else f"{options.transport}/{kind}"
            for num_groups in options.groups:
                config = worker_config(options, model, kind, num_groups)
                found = pair(options, config, course)
                rows += [{"transport": name, "groups": num_groups, **row} for row in found]
    finally:
        shutil.rmtree(place)
    rows.sort(key=lambda row: (row["transport"], row["gb_per_s"], row["tokens"]))
    print(HEAD)
    for number, row in enumerate(rows):
        print(line(row, rows[number - number % len(options.groups)]))
    if options.json:
        about = {name: str(value) for name, value in vars(options).items()}
        whole = {"options": about, "machine": machine(), "rows": rows}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
