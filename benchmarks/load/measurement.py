"""One measurement, from options to figures: workload, warm-up, runs, result files."""

import asyncio
import itertools
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TextIO

import msgspec

from benchmarks.load import agree, fleet, measure, report, result, sessions, words
from benchmarks.load.client import Target, discover
from benchmarks.load.options import Options
from benchmarks.load.pacer import now
from benchmarks.load.records import SIMULATED, Outcome, Result, Run, Session, Workload
from benchmarks.load.search import Probe, highest_rate
from benchmarks.load.workload import workload

WARMUP_SEED = 1_000_003
PROGRESS_S, DRAWN_S = 5.0, 0.2  # in a file; on a terminal
RECENT_S = 5.0  # what figures of the progress are of
BAR_CHARS = 24
RED, PLAIN = "\x1b[31m", "\x1b[0m"
SETTLE_S = 2.0  # between probes, so that one that drowned does not judge the next


def run(options: Options) -> int:
    """Measure, print, write; 1 if nothing at all was served, or the server says otherwise."""
    server = options.urls[0], options.headers, options.cacert
    before = agree.read(*server) if options.agree else {}
    whole = measured(options)
    print(report.table(whole))
    if options.sessions:
        print("\n".join([whole.named("by session"), *sessions.table(whole)]))
    if options.json_path:
        result.write(options.json_path, whole)
    outcomes = [each for one in whole.runs for each in one.outcomes]
    if any(not each.error for each in outcomes):
        if not options.agree:
            return 0
        lines, same = agree.table(whole.runs, before, agree.read(*server))
        print("\n".join(lines))
        return 0 if same else 1
    print(failure(outcomes, is_terminal=sys.stderr.isatty()), file=sys.stderr)
    return 1


def failure(outcomes: Sequence[Outcome], *, is_terminal: bool) -> str:
    """That nothing was served, and why not; red on a terminal."""
    first = next(iter(outcomes), None)
    why = f"the first one: {first.error} {first.message}" if first else "none was sent"
    told = f"error: no request was served; {why}"
    return f"{RED}{told}{PLAIN}" if is_terminal else told


def measured(options: Options) -> Result:
    """Measure.

    Raises ValueError if the options do not fit the workload, ConnectionError if nobody answers.
    """
    row = asyncio.run(discover(options.urls[0], options.headers, options.cacert))
    name = options.tokenizer or ("tiny" if row["id"] == "tiny" else "")
    tokenizer = words.load(name) if name else None
    target = _target(options, row)
    if (length := row.get(SIMULATED) or 0.0) != options.simulated and options.simulated:
        raise ValueError(f"--simulated: the server simulates {length:g} tokens a step")
    probes: list[Probe] = []
    runs: list[Run] = []
    by_session: list[dict[str, Any]] = []
    if options.search:
        best, probes = _search(options, target, tokenizer, runs)
        about: dict[str, Any] = {"highest_rate": best}
    elif options.sessions:
        about = {}
        for number, at_once in enumerate(options.sessions):
            level = replace(options, concurrency=at_once, num=options.num or 2 * at_once)
            work = _workload(level, "", tokenizer, options.seed + number)
            about = about or work.about
            runs.append(_once(level, target, work, tokenizer, f"{at_once} sessions "))
            by_session.append(
                sessions.figures(
                    runs[-1], work.sessions, options.objectives, at_once, options.num_gpus
                )
            )
    else:
        for number in range(options.repeat):
            work = _workload(options, options.rate, tokenizer, options.seed + number)
            label = f"run {number + 1}/{options.repeat} " if options.repeat > 1 else ""
            runs.append(_once(options, target, work, tokenizer, label))
        about = work.about
    simulated = {SIMULATED: row[SIMULATED]} if row.get(SIMULATED) else {}
    summaries = [measure.summary(each, options.objectives) | simulated for each in runs]
    for summary, figures in zip(summaries, by_session, strict=False):
        summary["sessions"] = figures
    return Result(
        result.KIND,
        options.shown() | {"model": target.model, "argv": sys.argv[1:]},
        result.machine(),
        about,
        summaries,
        runs,
        [msgspec.to_builtins(probe) for probe in probes],
    )


def _target(options: Options, row: dict[str, Any]) -> Target:
    return Target(
        options.urls,
        options.model or row["id"],
        options.endpoint,
        options.streamed,
        options.timeout_s,
        options.headers,
        options.extra,
        stages=row.get("owned_by") == "kvlane",
        cacert=options.cacert,
        session_header=options.session_header,
    )


def _workload(
    options: Options, rate: str | None, tokenizer: Any, seed: int, num: int = 0
) -> Workload:
    """Of the runs; with `num` so many sessions, whenever they are due."""
    how = options.prompts
    return workload(
        options.source,
        rate or None,
        num_sessions=num or options.num or None,
        duration_s=None if num else options.duration_s or None,
        seed=seed,
        tokenizer=tokenizer,
        options=msgspec.structs.replace(how, max_requests=num) if num else how,
    )


def _warmup(options: Options, tokenizer: Any) -> list[Session]:
    """First turns of the same kind of sessions, with prompts that the run does not send."""
    if not (num := options.warmup):
        return []
    other = _workload(options, None, tokenizer, options.seed + WARMUP_SEED, num)
    return [Session(each.turns[:1]) for each in other.sessions[:num]]


def _once(options: Options, target: Target, work: Workload, tokenizer: Any, label: str = "") -> Run:
    whole = fleet.run(
        work,
        target,
        warmup=_warmup(options, tokenizer),
        concurrency=options.concurrency or None,
        duration_s=options.duration_s or None,
        num_processes=options.num_processes,
        watch=progress(work.num_requests, label, sys.stderr) if not options.quiet else None,
    )
    words.count(whole.outcomes, tokenizer)
    return whole


def progress(num_requests: int, label: str, out: TextIO) -> fleet.Watch:
    """Draws a bar with the figures of now on a terminal, else writes a line every few seconds.

    They are counts, failures by class, and, of the last seconds, tokens/s and the median time to
    first token.
    """
    errors: Counter[str] = Counter()
    on_terminal = out.isatty()
    recent: deque[tuple[float, Outcome]] = deque()
    begun_at = written_at = now()
    num_done = 0

    def watch(outcomes: Sequence[Outcome], num_running: int) -> None:
        nonlocal num_done, written_at
        at = now()
        num_done += len(outcomes)
        errors.update(each.error for each in outcomes if each.error)
        recent.extend((at, each) for each in outcomes if not each.error)
        while recent and recent[0][0] < at - RECENT_S:
            recent.popleft()
        is_last = on_terminal and num_done == num_requests and bool(outcomes)
        if not is_last and at - written_at < (DRAWN_S if on_terminal else PROGRESS_S):
            return
        written_at = at
        parts = [f"{label}{num_done}/{num_requests} done, {num_running} running"]
        if ttfts := [each.ttft_s for _, each in recent if each.ttft_s is not None]:
            per_s = sum(each.num_output_tokens for _, each in recent) / min(at - begun_at, RECENT_S)
            parts.append(f"{per_s:,.0f} tokens/s, first token {report.ms(median(ttfts))} ms")
        parts += [f"{name} {num}" for name, num in errors.most_common()]
        line = ", ".join(parts)
        if on_terminal:
            full = BAR_CHARS * num_done // max(1, num_requests)
            bar = "█" * full + "░" * (BAR_CHARS - full)
            print(f"\r\x1b[K{bar} {line}", end="\n" * is_last, file=out, flush=True)
        else:
            print(line, file=out)

    return watch


def _search(
    options: Options, target: Target, tokenizer: Any, runs: list[Run]
) -> tuple[float, list[Probe]]:
    """Leaves in `runs` the last run that held, or else the first one."""
    seeds = itertools.count(options.seed)  # else a probe would find the last one's prompts cached

    def share_at(rate: float) -> float:
        if runs:
            time.sleep(SETTLE_S)
        work = _workload(options, f"poisson:{rate}", tokenizer, next(seeds))
        one = _once(options, target, work, tokenizer, f"{rate:.3g} req/s ")
        share = sum(map(options.objectives.met_by, one.outcomes)) / max(1, len(one.outcomes))
        held = share >= options.share
        if held or not runs:
            runs[:] = [one]
        verdict = "holds" if held else "fails"
        print(f"{rate:8.3g} req/s: {100 * share:5.1f} % good, {verdict}", file=sys.stderr)
        return share

    return highest_rate(
        share_at, start=options.search_from, share=options.share, precision=options.precision
    )
