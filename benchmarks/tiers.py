"""Agents' sessions over a KV pool that holds a third of them: what a tier below it saves.

    python -m benchmarks.tiers --json tiers.json
    python -m benchmarks.tiers --sessions 4 --turns 6 --scale 0.25 --tiers none,host
    python -m benchmarks.tiers --memory --host-gib 0.25
    python -m benchmarks.tiers --model benchmarks/models/qwen3-8b.json --device cuda --hit 8192 \\
        --page-size 64 --chunk 8192 --sessions 12 --turns 8 --scale 4 --answer 8 --host-gib 40

One decode worker of this process, which prefills by itself, serves the same trace without a tier,
with host memory, and with a directory. A session has one turn in flight, and its tool takes as long
as the turns of all others: the order in which least recently used pages are of least use. Lengths
are lognormals, TraceLab's medians by a sixteenth; prompts are random tokens, so lengths alone tell.
Prefilled tokens stand beside the ideal: every token once. First tokens are of a machine that does
nothing else, which it has to be. `--hit`: of prompts as long, computed and found in host memory.
A config.json is a model of that shape with dummy weights. Exits with 1 if a tier saves less than
two thirds of the tokens, or if an answer is another one; in bfloat16 answers are not compared, as
what is computed with other chunks is rounded otherwise. `--memory` judges other figures, of a
process for each kind: how much more of it is resident than without a tier, pinned pages included,
what its directory takes, and whether the tier is full are as --host-gib says, within 3 %. On a GPU
whose kernels are not compiled yet, `--tiers none,none,host,disk`: who compiles them holds more.
"""

import argparse
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.output import parser, shown, write
from tests.support.engines import Running, Sections, running, value
from tests.support.patience import until
from tests.support.places import on_disk_bytes
from worker.api import Sampling

SYSTEM = 2048  # tokens, of all sessions
# (median, sigma) of lognormals: a session's files, what a tool returns, what the model says.
FILES, APPENDED, SAID, MOST = (312, 1.48), (50, 1.43), (19, 1.0), 3125
SHARE, LEAST_SAVED = 3, 3.0
NEAR = 0.03  # of a tier's bytes


class Session:
    """Its text, and what its next turns add."""

    def __init__(self, options: argparse.Namespace, number: int) -> None:
        self._own, self._scale = random.Random(f"{options.seed} {number}"), options.scale
        every = random.Random(options.seed)
        self.tokens = every.choices(range(5, 1000), k=int(SYSTEM * self._scale))
        self.tokens += self._drawn(*FILES)
        self.turns = [
            (self._drawn(*APPENDED), min(options.answer, len(self._drawn(*SAID))))
            for _ in range(options.turns)
        ]

    @property
    def num_tokens(self) -> int:
        """Of its own text in the end."""
        return len(self.tokens) + sum(len(added) + said for added, said in self.turns)

    def _drawn(self, middle: float, sigma: float) -> list[int]:
        num = min(MOST, self._own.lognormvariate(math.log(middle), sigma)) * self._scale
        return self._own.choices(range(5, 1000), k=max(1, int(num)))


def sections(options: argparse.Namespace, pages: int, tier: dict[str, Any]) -> Sections:
    """A worker with so many pages."""
    engine = {"device": options.device, "num_pages": pages, "max_prefill_tokens": options.chunk}
    return {
        "model": {"path": options.model, "load_format": options.load_format},
        "kv": {"page_size": options.page_size, "tier": tier},
        "engine": {**engine, "max_num_reqs": 8},
        "disaggregation": {"mode": "never"},
    }


def turns(sessions: Sequence[Session], num: int) -> Iterator[tuple[Session, list[int], int]]:
    """Session, what is added and how much is said, turn by turn of all sessions."""
    for turn in range(num):
        for session in sessions:
            yield session, *session.turns[turn]


def said_of(num: int) -> Sampling:
    """So many tokens, whatever they are."""
    return Sampling(max_tokens=num, temperature=0.0, ignore_eos=True)


def serve(cluster: Running, options: argparse.Namespace) -> tuple[list[list[int]], list[float]]:
    """Answers, and seconds to the first token of turns that are not a session's first."""
    sessions = [Session(options, number) for number in range(options.sessions)]
    said, first_s = list[list[int]](), list[float]()
    for session, added, num in turns(sessions, options.turns):
        is_first = len(said) < len(sessions)
        session.tokens += added
        sampling = said_of(num)
        (answer,) = cluster.answers([session.tokens], sampling)
        session.tokens += answer.tokens
        said.append(answer.tokens)
        if not is_first:
            first_s.append(answer.first_at - answer.sent_at)
    return said, first_s


def hits(cluster: Running, options: argparse.Namespace, pages: int) -> dict[str, float]:
    """Median seconds to the first token of prompts that evict each other: at first, and again."""
    tier = cluster.workers["decode-0"].engine.tier
    assert tier is not None
    own, num = random.Random(options.seed), 4 + pages * options.page_size // options.hit
    prompts = [own.choices(range(5, 1000), k=options.hit) for _ in range(num)]
    took: dict[str, list[float]] = {"computed": [], "found": []}
    for times in took.values():
        for prompt in prompts:
            (answer,) = cluster.answers([prompt], said_of(1))
            times.append(answer.first_at - answer.sent_at)
            until(lambda: tier.idle)
    medians = {name: median(times) for name, times in took.items()}
    return medians | {"found / computed": medians["found"] / medians["computed"]}


def measured(options: argparse.Namespace, kind: str, pages: int) -> tuple[list[list[int]], Any]:
    """Answers and figures of one kind of tier."""
    with tempfile.TemporaryDirectory(prefix="kvlane-tiers-") as folder:
        tier: dict[str, Any] = {
            "host": {"host_bytes": most_bytes(options)},
            "disk": {"directory": folder, "directory_bytes": most_bytes(options)},
        }
        config = sections(options, pages, tier.get(kind, {}))
        with running(config, num_prefill=0) as cluster:
            engine = cluster.workers["decode-0"].engine
            made_at, metrics, below = time.monotonic(), engine.metrics, engine.tier
            until(lambda: below is None or below.idle)  # its memory is taken
            began_at = time.monotonic()
            said, first_s = serve(cluster, options)
            took_s = time.monotonic() - began_at
            until(lambda: below is None or below.idle)
            figures = {
                "prefilled": value(metrics.prompt_tokens),
                "asked": value(metrics.queried_tokens),
                "in the pool": value(metrics.cached_tokens),
                "in the tier": 0 if below is None else value(metrics.tier_tokens(kind)),
                "late loads": 0 if below is None else value(metrics.tier_failures(kind, "late")),
                "dropped pages": 0 if below is None else value(metrics.tier_evicted("dropped")),
                "first token, median s": median(first_s),
                "first token, p90 s": sorted(first_s)[int(0.9 * len(first_s))],
                "tier made s": began_at - made_at,
                "took s": took_s,
                "kept bytes": 0 if below is None else value(metrics.tier_bytes(kind)),
                "on disk bytes": on_disk_bytes(Path(folder)),
                "resident bytes": psutil.Process().memory_info().rss,
            }
            if options.hit and kind == "host":
                figures["hit"] = hits(cluster, options, pages)
    return said, figures


def most_bytes(options: argparse.Namespace) -> int:
    """Of a tier."""
    return int(options.host_gib * (1 << 30))


def off(options: argparse.Namespace, figures: dict[str, dict[str, float]]) -> list[str]:
    """What memory or files are not as configured; `figures` by kind, "none" among them."""
    most, found = most_bytes(options), list[str]()
    for kind in [kind for kind in figures if kind != "none"]:
        own = figures[kind]
        more = own["resident bytes"] - figures["none"]["resident bytes"]
        for what, got, wanted in (
            ("resident", more, most * (kind == "host")),
            ("on disk", own["on disk bytes"], most * (kind == "disk")),
            ("kept", own["kept bytes"], most),
        ):
            share = (got - wanted) / most
            print(f"{kind}: {what} {got / 2**20:,.1f} MiB of {wanted / 2**20:,.1f}, {share:+.1%}")
            found += [f"{kind}: {what}"] * (abs(share) > NEAR)
    return found


def main() -> int:
    """0 if all answers are the same, and tiers save enough."""
    made = parser(__doc__)
    add = made.add_argument
    add("--sessions", type=int, default=8)
    add("--turns", type=int, default=20)
    add("--scale", type=float, default=0.5, help="of all lengths in tokens")
    add("--tiers", default="none,host,disk", help="in this order, the first to compare with")
    add("--model", default="tiny", help="or a config.json")
    add("--page-size", type=int, default=16)
    add("--chunk", type=int, default=512, help="prompt tokens of one prefill step")
    add("--answer", type=int, default=MOST, help="tokens that a model says at most")
    add("--host-gib", type=float, default=1, help="of a tier")
    add("--memory", action="store_true", help="judge memory and files, not savings")
    add("--hit", type=int, default=0, help="tokens of prompts; 0: not measured")
    add("--device", default="cpu")
    add("--seed", type=int, default=0)
    options = made.parse_args()
    with modelled(options):
        return compared(options)


@contextmanager
def modelled(options: argparse.Namespace) -> Iterator[None]:
    """Where --model is a config.json, make a directory of it."""
    options.load_format, config = "safetensors", Path(options.model)
    with tempfile.TemporaryDirectory(prefix="kvlane-model-") as folder:
        if config.suffix == ".json":
            shutil.copy(config, Path(folder) / "config.json")
            options.model, options.load_format = folder, "dummy"
        yield


def compared(options: argparse.Namespace) -> int:
    """Measure all kinds of tiers."""
    sessions = [Session(options, number) for number in range(options.sessions)]
    system = int(SYSTEM * options.scale)
    ideal = system + sum(session.num_tokens - system for session in sessions)
    page_size = options.page_size
    pages = ideal // page_size // SHARE
    longest = max(session.num_tokens for session in sessions)
    holds = pages * page_size
    if longest + 2 * page_size > holds:
        sys.exit(f"a pool of {holds} tokens holds no session of {longest}: more --sessions")
    print(f"{ideal:,} tokens, the longest session {longest:,}; a pool of {holds:,}")
    figures, answers = dict[str, Any](), dict[str, Any]()
    for kind in options.tiers.split(","):
        if options.memory:
            with ProcessPoolExecutor(1, get_context("spawn")) as alone:
                answers[kind], figures[kind] = alone.submit(measured, options, kind, pages).result()
        else:
            answers[kind], figures[kind] = measured(options, kind, pages)
        print(f"{kind}: {figures[kind]}", flush=True)
    base, *others = figures
    saved = {kind: figures[base]["prefilled"] / figures[kind]["prefilled"] for kind in others}
    wrong = [kind for kind in others if answers[kind] != answers[base]]
    wrong = wrong if options.device == "cpu" else []
    if options.memory:
        wrong += off(options, figures)
    print(f"prefilled tokens of {base}, times those of others: {saved}; wrong: {wrong}")
    about = {"options": shown(options), "ideal": ideal, "pages": pages, "figures": figures}
    write(options.json, about | {"saved": saved, "wrong": wrong})
    saves = options.memory or min(saved.values(), default=LEAST_SAVED) >= LEAST_SAVED
    return int(bool(wrong) or not saves)


if __name__ == "__main__":
    sys.exit(main())
