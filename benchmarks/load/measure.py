"""The figures of a run. Latencies are in seconds, rates per second, shares between 0 and 1.

Percentiles are numpy's (linear interpolation), as aiperf's are. Time to first token counts from the
intended send time, so that a server that stalls cannot hide it; `ttft_from_send_s` is the same from
the moment of sending, which is what most other tools report. Only served requests have latencies.
"""

from __future__ import annotations

import io
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.load.records import Lag, Objectives, Outcome, Result, Run

LATENCIES = {
    "ttft_s": "time to first token",
    "ttft_from_send_s": "  from the send (as other tools)",
    "tpot_s": "inter-token, mean of a request",
    "gaps_s": "inter-token, every gap",
    "e2e_s": "end to end",
}
STAGES_TO_FIRST_TOKEN = (
    "router_queue_s",
    "prefill_queue_s",
    "prefill_s",
    "transfer_s",
    "decode_queue_s",
    "first_step_s",
)
STAGES = (*STAGES_TO_FIRST_TOKEN, "decode_s")
QUANTILES = {
    "p1": 0.01,
    "p25": 0.25,
    "p50": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
    "p99.9": 0.999,
}
END_TOKENS = 1  # the end token is in the server's count and has no text
LAG_LIMIT_S = 0.002
LAG_LIMIT_SHARE = 0.02  # of the median time to first token
CPU_LIMIT = 0.85  # of a core, one process


def spread(values: Iterable[float] | np.ndarray) -> dict[str, float | int | None]:
    """count, mean, std (of the population), min, percentiles, max; None where there is nothing."""
    array = values if isinstance(values, np.ndarray) else np.array(list(values), float)
    names = ("mean", "std", "min", *QUANTILES, "max")
    if not array.size:
        return {"count": 0, **dict.fromkeys(names)}
    quantiles = np.quantile(array, list(QUANTILES.values()))
    found = (array.mean(), array.std(), array.min(), *quantiles, array.max())
    return {"count": array.size, **dict(zip(names, map(float, found), strict=True))}


def was_sent(outcome: Outcome) -> bool:
    """Whether the request got as far as the socket."""
    return outcome.sent_s > 0 or not outcome.error


def gaps_of(outcome: Outcome) -> np.ndarray:
    """Seconds between each piece of output and the next."""
    return np.diff(np.array(outcome.chunk_s, float))


def samples(outcomes: Sequence[Outcome]) -> dict[str, np.ndarray]:
    """The values behind each entry of `LATENCIES`, in seconds, of the served requests."""
    served = [outcome for outcome in outcomes if not outcome.error]
    begun = [outcome for outcome in served if outcome.chunk_s]
    tpots = [outcome.tpot_s for outcome in served]
    return {
        "ttft_s": np.array([o.chunk_s[0] - o.intended_s for o in begun], float),
        "ttft_from_send_s": np.array([o.chunk_s[0] - o.sent_s for o in begun], float),
        "tpot_s": np.array([tpot for tpot in tpots if tpot is not None], float),
        "gaps_s": np.concatenate([gaps_of(o) for o in begun]) if begun else np.zeros(0),
        "e2e_s": np.array([outcome.e2e_s for outcome in served], float),
    }


def rate(times: Sequence[float]) -> float | None:
    """Events per second between the first and the last of `times`; None for fewer than two."""
    span = max(times) - min(times) if len(times) > 1 else 0.0
    return (len(times) - 1) / span if span > 0 else None


def concurrency(outcomes: Sequence[Outcome]) -> tuple[np.ndarray, np.ndarray]:
    """(times in seconds, requests at the server from that time on), a step at each time."""
    sent = [outcome for outcome in outcomes if was_sent(outcome)]
    times = np.array([o.sent_s for o in sent] + [o.end_s for o in sent], float)
    steps = np.repeat([1, -1], len(sent))
    order = np.lexsort((steps, times))  # at one time the ends come first
    return times[order], np.cumsum(steps[order])


def summary(run: Run, objectives: Objectives) -> dict[str, Any]:
    """All figures of `run`, as plain JSON values; `table` and `report` show them."""
    served = [outcome for outcome in run.outcomes if not outcome.error]
    latency = {name: spread(values) for name, values in samples(served).items()}
    ok, says = verdict(run, latency["ttft_s"]["p50"])
    return {
        "begun_at": run.begun_at,
        "wall_s": run.wall_s,
        "requests": counts(run.outcomes),
        "throughput": throughput(run, served),
        "latency": latency,
        "goodput": goodput(run, objectives),
        "tokens": tokens(served),
        "concurrency": concurrency_figures(run.outcomes),
        "stages": stages(served),
        "harness": harness(run),
        "harness_ok": ok,
        "harness_says": says,
    }


def counts(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How many were sent, served, failed (by class), and served without any output."""
    errors = Counter(outcome.error for outcome in outcomes if outcome.error)
    return {
        "sent": len(outcomes),
        "served": len(outcomes) - errors.total(),
        "failed": errors.total(),
        "errors": dict(errors.most_common()),
        "without_output": sum(not o.error and not o.chunk_s for o in outcomes),
    }


def throughput(run: Run, served: Sequence[Outcome]) -> dict[str, float | None]:
    """Of served requests over the wall time; `offered` and `started`: first turns, as planned and
    as really sent (None where nothing was planned, as in a closed loop)."""
    wall_s = run.wall_s or float("inf")
    starts = [o.sent_s for o in run.outcomes if o.turn == 0 and was_sent(o)]
    return {
        "requests_per_s": len(served) / wall_s,
        "output_tokens_per_s": sum(o.num_output_tokens for o in served) / wall_s,
        "input_tokens_per_s": sum(o.num_prompt_tokens for o in served) / wall_s,
        "offered_per_s": rate(run.schedule),
        "started_per_s": rate(starts) if run.schedule else None,
    }


def goodput(run: Run, objectives: Objectives) -> dict[str, Any]:
    """Requests within every objective, and within each alone. A failed one is within none: a time
    that ran out counts as infinite."""
    num = len(run.outcomes)
    good = sum(objectives.met_by(outcome) for outcome in run.outcomes)
    limits = {name: s for name, s in msgspec.structs.asdict(objectives).items() if s is not None}
    alone = {name: Objectives(**{name: limit}) for name, limit in limits.items()}
    return {
        "objectives": limits,
        "good": good,
        "good_per_s": good / run.wall_s if run.wall_s else 0.0,
        "share": good / num if num else None,
        "share_by_objective": {
            name: sum(one.met_by(outcome) for outcome in run.outcomes) / num if num else None
            for name, one in alone.items()
        },
    }


def tokens(served: Sequence[Outcome]) -> dict[str, Any]:
    """Totals of the server's usage, and how often our tokenizer counts the text differently."""
    prompt = sum(outcome.num_prompt_tokens for outcome in served)
    cached = sum(outcome.num_cached_tokens for outcome in served)
    apart = [
        abs(outcome.num_text_tokens - outcome.num_output_tokens)
        for outcome in served
        if outcome.counted and outcome.num_text_tokens is not None
    ]
    return {
        "prompt": prompt,
        "cached_prompt": cached,
        "cached_share": cached / prompt if prompt else None,
        "output": sum(outcome.num_output_tokens for outcome in served),
        "without_usage": sum(not outcome.counted for outcome in served),
        "checked": len(apart),
        "mismatched": sum(off > END_TOKENS for off in apart),
        "worst_mismatch": max(apart, default=0),
        "finish_reasons": dict(Counter(o.finish_reason or "none" for o in served).most_common()),
    }


def concurrency_figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Requests at the server: the mean over the time from the first send to the last end, the most
    at once."""
    times, at_once = concurrency(outcomes)
    if not times.size or times[-1] <= times[0]:
        return {"mean": 0.0, "max": int(at_once.max(initial=0))}
    area = float(np.sum(at_once[:-1] * np.diff(times)))
    return {"mean": area / float(times[-1] - times[0]), "max": int(at_once.max())}


def parts_s(outcome: Outcome) -> dict[str, float] | None:
    """Seconds of each of `STAGES`, or None if the server did not tell."""
    if outcome.stages is None:
        return None
    return {name: float(outcome.stages.get(name) or 0.0) for name in STAGES}


def stages(served: Sequence[Outcome]) -> dict[str, Any]:
    """Percentiles of each stage; `unaccounted_s` is what the client saw beyond them, apart from its
    own lag: network, HTTP, and the router's own work. Empty without stages."""
    told = [(outcome, parts) for outcome in served if (parts := parts_s(outcome)) is not None]
    if not told:
        return {}
    figures: dict[str, Any] = {
        name: spread(np.array([parts[name] for _, parts in told])) for name in STAGES
    }
    figures["unaccounted_s"] = spread(
        np.array([o.e2e_s - o.lag_s - sum(parts.values()) for o, parts in told])
    )
    firsts = [o.stages.get("first_token_s") for o, _ in told if o.stages is not None]
    figures["first_token_s"] = spread(s for s in firsts if s is not None)
    return figures


def cpu_share(lag: Lag) -> float:
    """Share of one core that a client process used."""
    return lag.cpu_s / lag.wall_s if lag.wall_s else 0.0


def harness(run: Run) -> dict[str, Any]:
    """The harness's own lateness, in seconds, and its processes' shares of a core."""
    return {
        "lag_s": spread(o.lag_s for o in run.outcomes if was_sent(o)),
        "loop_s": spread(np.concatenate([np.array(lag.loop_s, float) for lag in run.lags]))
        if run.lags
        else spread(()),
        "cpu_share": {str(lag.process): cpu_share(lag) for lag in run.lags},
    }


def verdict(run: Run, median_ttft_s: float | None) -> tuple[bool, str]:
    """Whether the figures are the server's, and why. The p99 of both lags has to stay below 2 ms or
    2 % of the median time to first token, whichever is more, and every process below 0.85 of a
    core."""
    found = harness(run)
    limit_s = max(LAG_LIMIT_S, LAG_LIMIT_SHARE * (median_ttft_s or 0.0))
    lag_s, loop_s = found["lag_s"]["p99"], found["loop_s"]["p99"]
    busiest = max(found["cpu_share"].values(), default=0.0)
    if lag_s is None:
        return False, "nothing was sent, so nothing was measured"
    told = f"p99 of the send lag {lag_s * 1e3:.2f} ms, of the loop lag {(loop_s or 0) * 1e3:.2f} ms"
    told += f" (limit {limit_s * 1e3:.2f} ms), busiest process {busiest:.2f} of a core"
    if max(lag_s, loop_s or 0.0) < limit_s and busiest < CPU_LIMIT:
        return True, f"the harness kept up: {told}"
    return False, (
        f"THE HARNESS DID NOT KEEP UP: {told} (limit {CPU_LIMIT}); the figures may be its own. "
        "Use more client processes or more cores."
    )


def pick(figures: dict[str, Any], *path: str) -> float | None:
    """The number at `path` of a summary, None if there is none."""
    value: Any = figures
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return None if value is None else float(value)


def median(summaries: Sequence[dict[str, Any]], *path: str) -> float | None:
    """The median over the runs of the number at `path`."""
    found = [value for each in summaries if (value := pick(each, *path)) is not None]
    return statistics.median(found) if found else None


def ms(seconds: float | None) -> str:
    """Milliseconds with three digits or more; a dash for None."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:,.{0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2}f}"


def number(value: float | None, digits: int = 1) -> str:
    """With thousands marked; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """Of a share; a dash for None."""
    return "-" if share is None else f"{share * 100:.1f} %"


SHOWN = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")


def table(summaries: Sequence[dict[str, Any]], result: Result, colour: bool = False) -> str:
    """The text for the terminal at the end. Of several runs it shows the median of each figure, and
    then a line for each run."""
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=colour, highlight=False)
    if not summaries:
        return "no runs\n"
    runs = f"median of {len(summaries)} runs" if len(summaries) > 1 else "1 run"
    named = [str(result.options[name]) for name in ("url", "model") if name in result.options]
    console.print(" · ".join([result.kind, *named, summaries[0]["begun_at"], runs]), markup=False)
    console.print(latency_table(summaries))
    for line in sentences(summaries):
        console.print(line, markup=False)
    if len(summaries) > 1:
        console.print(runs_table(summaries))
    for index, each in enumerate(summaries):
        prefix = f"run {index + 1}: " if len(summaries) > 1 else ""
        style = None if each["harness_ok"] else "bold white on red"
        console.print(prefix + each["harness_says"], style=style, markup=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def latency_table(summaries: Sequence[dict[str, Any]]) -> Table:
    """Latencies and stages in milliseconds."""
    shown = Table("ms", box=SIMPLE, pad_edge=False)
    for column in SHOWN:
        shown.add_column(column, justify="right")
    rows = [("latency", name, label) for name, label in LATENCIES.items()]
    if any(each["stages"] for each in summaries):
        names = (*STAGES, "unaccounted_s")
        rows += [("stages", name, f"  {name[:-2].replace('_', ' ')}") for name in names]
    for part, name, label in rows:
        cells = [ms(median(summaries, part, name, column)) for column in SHOWN]
        shown.add_row(label, *cells)
    return shown


def sentences(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """What has no percentiles, a line each."""

    def of(*path: str, digits: int = 1) -> str:
        return number(median(summaries, *path), digits)

    errors: Counter[str] = Counter()
    for each in summaries:
        errors.update(each["requests"]["errors"])
    failed = ", ".join(f"{name} {num}" for name, num in errors.most_common())
    total = {name: sum(s["requests"][name] for s in summaries) for name in ("sent", "served")}
    limits = {
        name[:-2]: f"{ms(limit)} ms"
        for name, limit in summaries[0]["goodput"]["objectives"].items()
    }
    under = ", ".join(f"{name} <= {limit}" for name, limit in limits.items())
    return [
        f"requests    {total['served']} of {total['sent']} served"
        + (f"; FAILED: {failed} (not in the latencies)" if failed else ""),
        f"throughput  {of('throughput', 'requests_per_s', digits=2)} requests/s, "
        f"{of('throughput', 'output_tokens_per_s')} output and "
        f"{of('throughput', 'input_tokens_per_s')} input tokens/s in {of('wall_s')} s",
        f"arrivals    {of('throughput', 'offered_per_s', digits=2)}/s offered, "
        f"{of('throughput', 'started_per_s', digits=2)}/s started; at the server "
        f"{of('concurrency', 'mean')} on average, {of('concurrency', 'max', digits=0)} at most",
        f"goodput     {of('goodput', 'good_per_s', digits=2)} requests/s, "
        f"{percent(median(summaries, 'goodput', 'share'))} of all"
        + (f" within {under}" if under else " (no objectives)"),
        f"tokens      {of('tokens', 'prompt', digits=0)} prompt "
        f"({percent(median(summaries, 'tokens', 'cached_share'))} cached), "
        f"{of('tokens', 'output', digits=0)} output; {of('tokens', 'mismatched', digits=0)} of "
        f"{of('tokens', 'checked', digits=0)} texts counted differently by our tokenizer, "
        f"{of('tokens', 'without_usage', digits=0)} without usage",
    ]


def runs_table(summaries: Sequence[dict[str, Any]]) -> Table:
    """A line for each run."""
    columns = {
        "requests/s": ("throughput", "requests_per_s"),
        "tokens/s": ("throughput", "output_tokens_per_s"),
        "ttft p50": ("latency", "ttft_s", "p50"),
        "ttft p99": ("latency", "ttft_s", "p99"),
        "gap p50": ("latency", "gaps_s", "p50"),
        "gap p99": ("latency", "gaps_s", "p99"),
        "good": ("goodput", "share"),
    }
    shown = Table("run", box=SIMPLE, pad_edge=False)
    for column in columns:
        shown.add_column(column, justify="right")
    for index, each in enumerate(summaries):
        cells = []
        for path in columns.values():
            value = pick(each, *path)
            latency = path[0] == "latency"
            cells.append(ms(value) if latency else number(value, 2))
        shown.add_row(str(index + 1), *cells)
    return shown
