"""The command line of a run, checked: text in, `Options` out."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from benchmarks.load import prompts
from benchmarks.load.records import Objectives
from benchmarks.load.traces import READERS
from cluster.clients.find import DEFAULT_URL, add_server, key_of
from worker.errors import UserError

VLLM_NAMES = {"tpot": "itl", "e2el": "e2e"}
AGENTS = "agents:tracelab,16"  # what --sessions sends where nothing is said
PROCESSES_SHARE = 0.5  # of the machine's cores, at most, when nobody says how many

EPILOG = """\
commands (kvlane bench COMMAND --help):
  run                              what is described here; it need not be named
  report RESULT…                   result files side by side; --plot: as a page
  selfcheck                        is what it measures true on this machine?
  stub                             a server with known delays

without arguments: --concurrency 8 --num 64; --concurrency N alone: 8 N requests; --rate alone: 30 s

--url A,B,… share the load among servers of one model

workloads (--source):
  problems                         word problems with checkable answers
  random:IN,OUT                    vLLM's name of the next one; random alone: 1024,128
  synthetic:IN,OUT                 lengths in tokens: 512 | 128-1024 | normal(512,100) |
                                   lognormal(512,0.5) | 64+lognormal(448,1)
  shared-prefix:GROUPS,PREFIX,IN,OUT
  sharegpt:FILE                    first questions of ShareGPT's conversations, as long answers
  mooncake:FILE  burstgpt:FILE     traces, with their own times
  weka:FILE                        sessions as InferenceX replays them
  agents:aiperf|tracelab[,SCALE[,TURNS]]   agents; with --sessions tracelab,16 by itself

arrivals (--rate), open loop, timed from the intended moment:
  10 | poisson:10 | constant:10 | gamma:10,0.5

examples: benchmarks/load/README.md
"""


@dataclass(slots=True, frozen=True)
class Options:
    """What a run was asked to be. Times in seconds, rates in requests per second."""

    objectives: Objectives
    prompts: prompts.Options
    urls: tuple[str, ...] = (DEFAULT_URL,)  # of one server, or of several that serve the same
    model: str = ""  # "" = the first that the server lists
    endpoint: str = "chat"
    streamed: bool = True
    source: str = "problems"
    rate: str = ""  # arrivals; "" = closed loop, or the trace's own times
    concurrency: int = 0  # closed loop; 0 = open
    sessions: tuple[int, ...] = ()  # closed loops, one after another, with figures by session
    num_gpus: int = 1  # of the server, for figures a GPU
    session_header: str = "X-Session-ID"
    simulated: float = 0.0  # acceptance that the server must say it simulates
    num: int = 0
    duration_s: float = 0.0
    warmup: int = 4
    seed: int = 0
    tokenizer: str = ""
    num_processes: int = 1
    repeat: int = 1
    timeout_s: float = 600.0
    search: bool = False
    search_from: float = 1.0
    share: float = 0.99
    precision: float = 0.1
    extra: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    cacert: str = ""  # file of certificates to trust; "": as the machine does
    json_path: str = ""
    quiet: bool = False
    agree: bool = False  # compare with the server's own metrics

    def shown(self) -> dict[str, Any]:
        """For the result file; keys are left out."""
        limits = msgspec.structs.asdict(self.objectives)
        return asdict(self) | {
            "objectives": {name: value for name, value in limits.items() if value is not None},
            "prompts": msgspec.structs.asdict(self.prompts),
            "headers": sorted(self.headers),
        }


def parser() -> argparse.ArgumentParser:
    """The flags of a run; a flag whose `dest` is a field of `Options` becomes that field."""
    made = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="kvlane bench",
        usage="kvlane bench [run | report | selfcheck | stub] [options]",
        description="Measure an OpenAI-compatible server.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add_server(made)
    add("--model", default="", help="default: the first that it lists")
    add("--endpoint", choices=("chat", "completions"), default="chat")
    add("--no-stream", dest="streamed", action="store_false", help="ask for whole answers")
    add("--source", default="problems", help="what to send, see below (%(default)s)")
    add("--rate", default="", help="open loop: when to send, see below")
    add("--concurrency", type=int, default=0, help="closed loop: so many sessions at a time")
    add(
        "--sessions",
        default="",
        metavar="N,…",
        help="so many sessions at a time, with a report by session; several: one after another",
    )
    add("--gpus", dest="num_gpus", type=int, default=1, help="of the server, for figures a GPU")
    add("--session-header", default="X-Session-ID", help="names a session; '': none (%(default)s)")
    add(
        "--simulated",
        type=float,
        default=0.0,
        metavar="LEN",
        help="tokens of a step that the server must simulate, and nothing else; said on every page",
    )
    add("--num", type=int, default=0, help="sessions (requests, if they have one turn)")
    add("--duration", dest="duration_s", type=float, default=0.0, help="in which sessions begin, s")
    add("--warmup", type=int, default=4, help="requests before the run, not counted (%(default)s)")
    add("--seed", type=int, default=0)
    add("--tokenizer", default="", help="directory with tokenizer.json; 'tiny': the bundled one")
    own = max(1, int((os.cpu_count() or 1) * PROCESSES_SHARE))
    add("--processes", dest="num_processes", type=int, default=own, help="clients (%(default)s)")
    add("--repeat", type=int, default=1, help="runs, for the spread (%(default)s)")
    add("--timeout", dest="timeout_s", type=float, default=600.0, help="s (%(default)g)")
    add("--slo", default="", help="objectives: ttft=S,tpot=S (or itl),stall=S,e2e=S (or e2el)")
    add("--search", action="store_true", help="find the highest rate that holds them")
    add("--search-from", type=float, default=1.0, help="its first rate (%(default)g)")
    add("--share", type=float, default=0.99, help="of requests that have to be good (%(default)g)")
    add("--precision", type=float, default=0.1, help="of the search (%(default)g)")
    add("--time-scale", type=float, default=1.0, help="of a trace: 2 = twice as slow")
    add("--input-scale", type=float, default=1.0, help="of a trace's prompt lengths")
    add("--block-size", type=int, default=512, help="tokens of a Mooncake hash id (%(default)s)")
    add("--max-len", type=int, default=0, help="prompt + output tokens; longer ones are clipped")
    add("--extra", default="{}", help="JSON object: further fields of every body")
    add("--header", action="append", default=[], metavar="NAME: VALUE")
    add("--json", dest="json_path", default="", metavar="FILE", help="write all that was measured")
    add("--agree", action="store_true", help="compare with the server's /metrics; no warm-up")
    add("--quiet", action="store_true", help="no progress")
    return made


def parse(argv: Sequence[str]) -> Options:
    """Options of a run; raises ValueError, which names the flag, if they contradict each other."""
    given = vars(parser().parse_args(argv))
    made = {
        "objectives": objectives(given.pop("slo")),
        "headers": _headers(given.pop("header"), given.pop("api_key_file")),
        "extra": _object(given.pop("extra")),
        "rate": _arrivals(given.pop("rate")),
        "sessions": _counts(given.pop("sessions")),
        "urls": tuple(
            url.rstrip("/").removesuffix("/v1")
            for url in (given.pop("url") or DEFAULT_URL).split(",")
        ),
        "prompts": prompts.Options(
            chat=given["endpoint"] == "chat",
            max_len=given.pop("max_len"),
            time_scale=given.pop("time_scale"),
            input_scale=given.pop("input_scale"),
            block_size=given.pop("block_size"),
        ),
    }
    options = with_defaults(Options(**made, **given))
    if options.agree:
        options = replace(options, warmup=0)
    _check(options)
    return options


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; 1 if nothing at all was served."""
    asked = parse(argv)
    from benchmarks.load import measurement  # aiohttp: help and mistakes do without

    return measurement.run(asked)


def with_defaults(options: Options) -> Options:
    """With what is needed and was not said: when to send, and how much."""
    if options.sessions:
        source = AGENTS if options.source == "problems" else options.source
        return replace(options, source=source, concurrency=options.sessions[0])
    if _is_trace(options):
        return options
    if not (options.rate or options.concurrency or options.search or options.duration_s):
        options = replace(options, concurrency=8)
    if options.num or options.duration_s:
        return options
    if options.concurrency:
        return replace(options, num=8 * options.concurrency)
    return replace(options, duration_s=30.0)


def _is_trace(options: Options) -> bool:
    return options.source.partition(":")[0] in READERS


def objectives(text: str) -> Objectives:
    """`ttft=0.5,itl=0.05` as a record, times with ms or s; ValueError: a part is unknown."""
    parsed: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        name = VLLM_NAMES.get(name, name)
        if f"{name}_s" not in Objectives.__struct_fields__:
            raise ValueError(f"--slo: {name!r} is none of ttft, itl, stall, e2e")
        parsed[f"{name}_s"] = _seconds(value)
    return Objectives(**parsed)


def _seconds(text: str) -> float:
    scale = 1e-3 if text.endswith("ms") else 1.0
    try:
        value = scale * float(text.removesuffix("ms").removesuffix("s"))
    except ValueError:
        raise ValueError(f"--slo: {text!r} is no time; write 0.2, 0.2s or 200ms") from None
    if not value > 0:
        raise ValueError(f"--slo: {text!r} must be above zero")
    return value


def _arrivals(text: str) -> str:
    """A plain number is a Poisson process."""
    try:
        float(text)
    except ValueError:
        return text
    return f"poisson:{text}"


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        counts = (0,)
    if any(count < 1 for count in counts):
        raise ValueError(f"--sessions: {text!r} is no list of numbers above 0")
    return counts


def _object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"--extra: {error}") from None


def _headers(given: Sequence[str], key_file: str) -> dict[str, str]:
    headers: dict[str, str] = {}
    for each in given:
        name, colon, value = each.partition(":")
        if not colon:
            raise ValueError(f"--header: {each!r} has no colon")
        headers[name.strip()] = value.strip()
    try:
        key = key_of(key_file)
    except UserError as error:
        raise ValueError(f"--api-key-file: {error}") from None
    return headers | ({"Authorization": f"Bearer {key}"} if key else {})


def _check(options: Options) -> None:
    is_trace = _is_trace(options)
    if options.search:
        if options.concurrency or is_trace:
            raise ValueError("--search: tries rates; leave out --concurrency and traces")
        if options.objectives == Objectives():
            raise ValueError("--search: needs --slo")
    elif not options.sessions and (
        bool(options.rate) + bool(options.concurrency) + (is_trace and not options.rate) != 1
    ):
        raise ValueError("say when to send: either --rate, or --concurrency, or a trace")
    if options.sessions and (options.repeat > 1 or options.num_gpus < 1):
        raise ValueError("--sessions: no --repeat, and --gpus of at least 1")
    if options.concurrency and not options.num and not options.sessions:
        raise ValueError("say how much to send: --num, with --concurrency and --duration too")
    for name in ("concurrency", "num", "duration_s", "warmup"):
        if getattr(options, name) < 0:
            raise ValueError(f"--{name.removesuffix('_s')}: must not be negative")
    if options.repeat < 1 or options.num_processes < 1:
        raise ValueError("--repeat and --processes: at least 1")
