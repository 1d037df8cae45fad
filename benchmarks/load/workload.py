"""All that a run sends: a source of prompts joined with the times at which they are due."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer

from benchmarks.load import agents, prompts, traces
from benchmarks.load import arrivals as open_loop
from benchmarks.load.prompts import Options
from benchmarks.load.records import Session, Workload
from benchmarks.load.words import Words


def workload(
    source: str,
    arrivals: str | None,
    *,
    num_sessions: int | None,
    duration_s: float | None,
    seed: int,
    tokenizer: Tokenizer | None,
    options: Options | None = None,
) -> Workload:
    """The sessions of `source`, due as `arrivals` says.

    `arrivals` is a spec of arrivals.py, or None: a trace's own times, else a closed loop. The
    number of sessions may follow from `arrivals` and `duration_s`; a closed loop needs it. Start
    times and prompts come from the seed apart from each other: another source keeps the times,
    another rate the prompts. ValueError: a spec, an option or a file is wrong, or nothing is left.
    """
    options = options or Options()
    if arrivals is not None:
        open_loop.check(arrivals)
    if num_sessions is not None and num_sessions < 1:
        raise ValueError(f"sessions: must be at least 1, not {num_sessions}")
    time_seed, prompt_seed = np.random.SeedSequence(seed).spawn(2)
    kind, _, name = source.partition(":")
    is_trace = kind in traces.READERS
    about: dict[str, Any] = {"source": source, "arrivals": arrivals, "seed": seed}
    of_words = kind not in ("problems", "sharegpt")
    words = Words(tokenizer) if tokenizer is not None and of_words else None
    if is_trace:
        drawn = traces.sessions(source, words, options, seed)[:num_sessions]
        about["file_sha256"] = hashlib.sha256(Path(name).read_bytes()).hexdigest()
        num_sessions = len(drawn)
    elif kind == "agents":
        if num_sessions is None:
            raise ValueError("agents: needs the number of sessions")
        drawn = agents.sessions(name, words, options, seed, num_sessions)
    if arrivals is not None:
        times: Sequence[float | None] = open_loop.starts(
            arrivals, np.random.default_rng(time_seed), num_sessions, duration_s
        )
    elif is_trace:
        times = [each.start_s for each in drawn if _is_early(each.start_s, duration_s)]
    elif num_sessions is None:
        raise ValueError("sessions: a closed loop needs their number")
    else:
        times = [None] * num_sessions
    if not is_trace and kind != "agents":
        draw = prompts.source(source, words, options, tokenizer)
        turns = draw(np.random.default_rng(prompt_seed), len(times))
        drawn = [Session((turn,)) for turn in turns]
    # A trace is in the order of its starts, so that what is too late stands at its end.
    drawn = [
        msgspec.structs.replace(session, start_s=at_s)
        for session, at_s in zip(drawn, times, strict=False)
    ]
    if not drawn:
        raise ValueError(f"{source}: nothing to send within {duration_s} s")
    if words is not None:
        about["exact"] = words.is_additive or not is_trace
    about["options"] = msgspec.to_builtins(options)
    return Workload(tuple(drawn), about | describe(drawn))


def _is_early(start_s: float | None, duration_s: float | None) -> bool:
    return duration_s is None or start_s is None or start_s < duration_s


def describe(sessions: Sequence[Session]) -> dict[str, Any]:
    """Figures of sessions for the report: counts, times (s), lengths (tokens), a digest."""
    turns = [turn for session in sessions for turn in session.turns]
    starts = [session.start_s for session in sessions if session.start_s is not None]
    span_s = max(starts, default=0.0) - min(starts, default=0.0)
    return {
        "num_sessions": len(sessions),
        "num_requests": len(turns),
        "first_s": min(starts, default=None),
        "last_s": max(starts, default=None),
        # between the first start and the last there is one gap fewer than starts
        "sessions_per_s": (len(starts) - 1) / span_s if span_s else None,
        "prompt_tokens": _spread([turn.num_prompt_tokens for turn in turns]),
        "max_tokens": _spread([turn.max_tokens for turn in turns]),
        "digest": hashlib.sha256(msgspec.msgpack.encode(tuple(sessions))).hexdigest()[:16],
    }


def _spread(values: list[int]) -> dict[str, float]:
    """Sum, mean, least, median and most of `values`."""
    return {
        "sum": sum(values),
        "mean": sum(values) / len(values),
        "min": min(values),
        "p50": float(np.median(values)),
        "max": max(values),
    }
