"""The figures of a run. Latencies are in seconds, rates per second, shares between 0 and 1.

Percentiles are numpy's (linear interpolation), as aiperf's are. Time to first token counts from the
intended send time, so that a server that stalls cannot hide it; `ttft_from_send_s` is the same from
the moment of sending, which is what most other tools report. Only served requests have latencies.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from benchmarks.load.records import Objectives, Outcome, Run

STAGES = (
    "router_queue_s", "prefill_queue_s", "prefill_s", "transfer_s", "decode_queue_s",
    "first_step_s", "messages_s", "decode_s",
)  # fmt: skip
QUANTILES = {
    "p1": 0.01, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99,
    "p99.9": 0.999,
}  # fmt: skip
END_TOKENS = 1  # the end token is in the server's count and has no text
LAG_LIMIT_S = 0.002
LAG_LIMIT_SHARE = 0.02  # of the median time to first token
COARSE_SHARE = 0.25  # of that median; what is less exact says nothing of the server
CPU_LIMIT = 0.85  # of a core, one process


def spread(values: Iterable[float] | np.ndarray) -> dict[str, float | int | None]:
    """count, mean, std (of the population), min, percentiles, max; None where there is nothing."""
    array = values if isinstance(values, np.ndarray) else np.array(list(values), float)
    names = ("mean", "std", "min", *QUANTILES, "max")
    if not array.size:
        return {"count": 0, **dict.fromkeys(names)}
    quantiles = np.quantile(array, list(QUANTILES.values()))
    figures = (array.mean(), array.std(), array.min(), *quantiles, array.max())
    return {"count": array.size, **dict(zip(names, map(float, figures), strict=True))}


def was_sent(outcome: Outcome) -> bool:
    """Whether the request got as far as the socket."""
    return outcome.sent_s > 0 or not outcome.error


def samples(outcomes: Sequence[Outcome]) -> dict[str, np.ndarray]:
    """The values of each latency, in seconds, of the served requests."""
    served = [outcome for outcome in outcomes if not outcome.error]
    begun = [outcome for outcome in served if outcome.chunk_s]
    tpots = [outcome.tpot_s for outcome in served]
    gaps = [np.diff(np.array(outcome.chunk_s, float)) for outcome in begun]
    return {
        "ttft_s": np.array([o.chunk_s[0] - o.intended_s for o in begun], float),
        "ttft_from_send_s": np.array([o.chunk_s[0] - o.sent_s for o in begun], float),
        "tpot_s": np.array([tpot for tpot in tpots if tpot is not None], float),
        "gaps_s": np.concatenate(gaps or [np.zeros(0)]),
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
    """All figures of `run`, as plain JSON values; `report` shows them."""
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
    """Requests within every objective. A failed one is not: a time that ran out counts as
    infinite."""
    num = len(run.outcomes)
    good = sum(objectives.met_by(outcome) for outcome in run.outcomes)
    limits = msgspec.structs.asdict(objectives)
    return {
        "objectives": {name: limit for name, limit in limits.items() if limit is not None},
        "good": good,
        "good_per_s": good / run.wall_s if run.wall_s else 0.0,
        "share": good / num if num else None,
    }


def tokens(served: Sequence[Outcome]) -> dict[str, Any]:
    """Totals of the server's usage, and how often our tokenizer counts the text differently."""
    prompt = sum(outcome.num_prompt_tokens for outcome in served)
    output = sum(outcome.num_output_tokens for outcome in served)
    pieces = sum(len(outcome.chunk_s) for outcome in served)
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
        "output": output,
        "per_piece": output / pieces if pieces else None,
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


def stages(served: Sequence[Outcome]) -> dict[str, Any]:
    """Percentiles of each stage; `unaccounted_s` is what the client saw beyond them, apart from its
    own lag: network, HTTP, and the router's own work. Empty if the server told no stages."""
    told = [(outcome, outcome.stages) for outcome in served if outcome.stages is not None]
    if not told:
        return {}
    parts = np.array([[float(each.get(name) or 0.0) for name in STAGES] for _, each in told])
    seen = np.array([outcome.e2e_s - outcome.lag_s for outcome, _ in told])
    firsts = [each.get("first_token_s") for _, each in told]
    pulled = [each for _, each in told if each.get("pulled_bytes")]
    return {
        **{name: spread(column) for name, column in zip(STAGES, parts.T, strict=True)},
        "unaccounted_s": spread(seen - parts.sum(axis=1)),
        "first_token_s": spread(s for s in firsts if s is not None),
        "pull_s": spread(float(each["pull_s"]) for each in pulled),
        "pulled": {
            "requests": len(pulled),
            "of": len(told),
            "bytes": sum(each["pulled_bytes"] for each in pulled),
            "seconds": sum(each["pull_s"] for each in pulled),
        },
    }


def harness(run: Run) -> dict[str, Any]:
    """The harness's own lateness, in seconds, and its processes' shares of a core."""
    shares = {str(lag.process): lag.cpu_s / (lag.wall_s or float("inf")) for lag in run.lags}
    return {
        "lag_s": spread(o.lag_s for o in run.outcomes if was_sent(o)),
        "loop_s": spread(late_s for lag in run.lags for late_s in lag.loop_s),
        "cpu_share": shares,
    }


def verdict(run: Run, median_ttft_s: float | None) -> tuple[bool, str]:
    """Whether the figures are the server's, and why.

    They are where the p99 of both lags stays below 2 ms or 2 % of the median time to first token,
    whichever is more, and every process below 0.85 of a core. Processes that were late with CPU
    time to spare were held up by others, as by a server on the same machine: then times are known
    to within that p99 only, which is told, and is too much from a quarter of that median on.
    """
    figures = harness(run)
    limit_s = max(LAG_LIMIT_S, LAG_LIMIT_SHARE * (median_ttft_s or 0.0))
    lag_s, loop_s = figures["lag_s"]["p99"], figures["loop_s"]["p99"]
    busiest = max(figures["cpu_share"].values(), default=0.0)
    if lag_s is None:
        return False, "nothing was sent, so nothing was measured"
    told = f"p99 of the send lag {lag_s * 1e3:.2f} ms, of the loop lag {(loop_s or 0) * 1e3:.2f} ms"
    told += f" (limit {limit_s * 1e3:.2f} ms), busiest process {busiest:.2f} of a core"
    late_s = max(lag_s, loop_s or 0.0)
    if busiest >= CPU_LIMIT:
        return False, (
            f"THE HARNESS DID NOT KEEP UP: {told} (limit {CPU_LIMIT}); the figures may be its own. "
            "Use more client processes or more cores."
        )
    if late_s < limit_s:
        return True, f"the harness kept up: {told}"
    known = f"others on this machine held the harness up: {told}; times are known to within"
    if late_s < COARSE_SHARE * (median_ttft_s or 0.0):
        return True, f"{known} {late_s * 1e3:.1f} ms"
    return False, f"THIS MACHINE CANNOT TELL: {known} {late_s * 1e3:.1f} ms. Measure from another."
