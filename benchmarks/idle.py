"""How much of a decode step, or of one prompt, the GPU waits: from a trace, or without one.

    python -m benchmarks.engine --model-config benchmarks/models/qwen3-8b.json --batch 32 \\
        --profile trace.json
    python -m benchmarks.idle trace.json
    python -m benchmarks.idle --model-config benchmarks/models/qwen3-8b.json --batch 32
    python -m benchmarks.engine --model-config benchmarks/models/qwen3-8b.json --phase prefill \
        --tokens 128 --profile prompt.json
    python -m benchmarks.idle --prompt prompt.piecewise.json prompt.eager.json

A trace shows every gap and what the host did in it, but the profiler slows the host down, so its
share is an upper bound. Without a trace, the same steps run twice: by the overlapped loop, which
waits for step n - 1 after it has launched step n, and launched all at once and waited for at the
end. The second leaves the device nothing to wait for, so the difference is what the loop costs it.

Of a prompt it is the time from its first to its last activity on the device: where that waits for
most of it, launching is what takes the time, and the host is in the gaps.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine import SHORT_OUTPUT, Bench, add_engine_options, build, synchronize
from worker.api import Sampling

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST = {"cuda_runtime", "cuda_driver", "cpu_op", "user_annotation", "python_function"}
WARM_STEPS, LAST_STEPS = 3, 2  # left out at either end
NUM_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, in microseconds of the trace's clock."""

    begin: float
    end: float
    name: str = ""

    @property
    def us(self) -> float:
        """How long."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Gap:
    """The device does nothing; and what the host did longest meanwhile."""

    span: Span
    between_steps: bool
    host: tuple[Span, ...]  # cut to the gap


@dataclass(frozen=True, slots=True)
class Idle:
    """What `idle_of` found over the steady steps."""

    num_steps: int
    step_us: float  # median, from start to start
    busy: float  # share of the time in which something runs on the device
    idle_between: float  # share: idle time from a step's last kernel to the next one's first
    idle_within: float  # share: idle time between the kernels of a step
    between_us: float  # median from a step's last kernel to the next one's first, copies included
    longest: tuple[Gap, ...]


def idle_of(events: Iterable[dict[str, Any]]) -> Idle:
    """Idle times of the device in the decode steps of a chrome trace, each one replay of a graph.

    Raises:
        ValueError: too few replays of one graph.
    """
    events = [event for event in events if event.get("ph") == "X"]
    device = [event for event in events if event.get("cat") in DEVICE]
    steps = _steps(events, device)
    if len(steps) < 2:
        raise ValueError("the trace has too few replays of a decode graph to look between them")
    begin, end = steps[0].begin, steps[-1].begin
    gaps = [
        Span(max(gap.begin, begin), min(gap.end, end))
        for gap in _gaps([_span(event) for event in device])
        if gap.end > begin and gap.begin < end
    ]
    pairs = list(itertools.pairwise(steps))
    between = [gap for gap in gaps if any(_inside(gap, a.end, b.begin) for a, b in pairs)]
    whole, idle = end - begin, sum(gap.us for gap in gaps)
    idle_between = sum(gap.us for gap in between)
    host = [_span(event) for event in events if event.get("cat") in HOST]
    longest = sorted(gaps, key=lambda gap: gap.us, reverse=True)[:NUM_SHOWN]
    return Idle(
        num_steps=len(pairs),
        step_us=statistics.median(b.begin - a.begin for a, b in pairs),
        busy=1 - idle / whole,
        idle_between=idle_between / whole,
        idle_within=(idle - idle_between) / whole,
        between_us=statistics.median(b.begin - a.end for a, b in pairs),
        longest=tuple(Gap(gap, gap in between, _meanwhile(gap, host)) for gap in longest),
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    """What `prompt_of` found."""

    device_us: float  # from the first to the last activity
    busy: float  # share of it in which something runs
    num_activities: int  # kernels and copies
    num_launches: int  # calls of the host that enqueued them
    longest: tuple[Gap, ...]


def prompt_of(events: Iterable[dict[str, Any]]) -> Prompt:
    """A chrome trace of one prompt, graphs or not.

    Raises:
        ValueError: nothing ran on a device.
    """
    events = [event for event in events if event.get("ph") == "X"]
    device = [event for event in events if event.get("cat") in DEVICE]
    if not device:
        raise ValueError("nothing in this trace ran on a device")
    spans = [_span(event) for event in device]
    gaps = _gaps(spans)
    whole = max(span.end for span in spans) - min(span.begin for span in spans)
    host = [_span(event) for event in events if event.get("cat") in HOST]
    longest = sorted(gaps, key=lambda gap: gap.us, reverse=True)[:NUM_SHOWN]
    return Prompt(
        device_us=whole,
        busy=1 - sum(gap.us for gap in gaps) / whole,
        num_activities=len(device),
        num_launches=len({event.get("args", {}).get("correlation") for event in device}),
        longest=tuple(Gap(gap, False, _meanwhile(gap, host)) for gap in longest),
    )


def _steps(events: Sequence[dict[str, Any]], device: Sequence[dict[str, Any]]) -> list[Span]:
    """First to last activity of each steady replay, in their order.

    The graph is the one with the most activities over all its replays: others, of prompts, are
    shorter or run less often.
    """
    launches = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in HOST and "GraphLaunch" in event["name"]
    }
    of_launch: dict[int, list[Span]] = defaultdict(list)
    for event in device:
        if (number := event.get("args", {}).get("correlation")) in launches:
            of_launch[number].append(_span(event))
    by_size: dict[int, list[Span]] = defaultdict(list)
    for spans in of_launch.values():
        whole = Span(min(span.begin for span in spans), max(span.end for span in spans))
        by_size[len(spans)].append(whole)
    if not by_size:
        return []
    _, steps = max(by_size.items(), key=lambda item: item[0] * len(item[1]))
    steps.sort(key=lambda step: step.begin)
    return steps[WARM_STEPS : len(steps) - LAST_STEPS]


def _span(event: dict[str, Any]) -> Span:
    begin = float(event["ts"])
    return Span(begin, begin + float(event.get("dur", 0)), event["name"])


def _gaps(spans: Sequence[Span]) -> list[Span]:
    """What lies between the union of `spans`."""
    found, end = [], float("inf")
    for span in sorted(spans, key=lambda span: span.begin):
        if span.begin > end:
            found.append(Span(end, span.begin))
        end = span.end if end == float("inf") else max(end, span.end)
    return found


def _inside(gap: Span, begin: float, end: float) -> bool:
    return begin <= gap.begin and gap.end <= end


def _meanwhile(gap: Span, host: Sequence[Span]) -> tuple[Span, ...]:
    """What the host was in for the longest part of `gap`; of equals, the innermost."""
    cut = [
        (each.us, Span(max(each.begin, gap.begin), min(each.end, gap.end), each.name))
        for each in host
        if each.end > gap.begin and each.begin < gap.end
    ]
    cut.sort(key=lambda pair: (-pair[1].us, pair[0]))
    return tuple(span for _, span in cut[:3])


def show_prompt(found: Prompt) -> None:
    """The figures as text."""
    print(
        f"{found.device_us / 1e3:.3f} ms from the first activity to the last, busy "
        f"{found.busy:.1%}; {found.num_activities} of them by {found.num_launches} launches"
    )
    _show_gaps(found.longest)


def show(found: Idle) -> None:
    """The figures as text."""
    print(f"{found.num_steps} steps of {found.step_us / 1e3:.3f} ms")
    print(
        f"busy {found.busy:.2%}, idle between steps {found.idle_between:.2%}, "
        f"within steps {found.idle_within:.2%}"
    )
    print(f"last kernel to the next step's first: {found.between_us:.1f} us, copies included")
    _show_gaps(found.longest)


def _show_gaps(gaps: Iterable[Gap]) -> None:
    for gap in gaps:
        where = "between steps" if gap.between_steps else "within a step"
        host = ", ".join(f"{each.name} {each.us:.1f} us" for each in gap.host)
        print(f"{gap.span.us:8.1f} us {where}: {host or 'nothing of the host recorded'}")


def ahead(bench: Bench, batch: int, prompt_len: int, output_len: int, seed: int) -> float:
    """Seconds for what `Bench.generate` does, with every step launched before any is waited for."""
    engine, scheduler = bench.engine, bench.scheduler
    greedy = Sampling(output_len, ignore_eos=True, seed=seed, temperature=0.0)
    bench.admit(batch, prompt_len, greedy, seed)
    synchronize()
    began = time.perf_counter()
    steps = []
    while (plan := scheduler.plan()) is not None or scheduler.local:
        if plan is not None:
            steps.append(engine.launch(plan))
    for step in steps:
        assert step is not None
        for req, _, reason in scheduler.settle(step.plan.step, engine.settle(step)):
            if reason is not None:
                scheduler.finish(req)
    return time.perf_counter() - began


def without_trace(options: argparse.Namespace) -> list[dict[str, float]]:
    """Milliseconds a step of the loop and of all at once, one entry a repetition."""
    bench, found = Bench(build(options, options.batch)), []
    batch, prompt_len, last = options.batch, options.prompt_len, options.output_len
    for number in range(options.repeat + 1):
        greedy = [Sampling(n, ignore_eos=True, temperature=0.0) for n in (SHORT_OUTPUT, last)]
        loop = [bench.generate(batch, prompt_len, s.max_tokens, s, number) for s in greedy]
        free = [ahead(bench, batch, prompt_len, s.max_tokens, number) for s in greedy]
        ms = [1e3 * (long - short) / (last - SHORT_OUTPUT) for short, long in (loop, free)]
        found.append({"loop_ms": ms[0], "ahead_ms": ms[1], "idle": 1 - ms[1] / ms[0]})
    bench.engine.close()
    return found[1:]  # the first one warms up


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a chrome trace, which may be compressed."""
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path, nargs="*", help="of benchmarks.engine --profile")
    parser.add_argument("--prompt", action="store_true", help="they are of one prompt each")
    add_engine_options(parser)
    parser.set_defaults(phase="decode")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    if bool(options.traces) == bool(options.model_config):
        parser.error("give traces, or --model-config to measure without one")
    return options


def main() -> None:
    """Print what was found."""
    options = parsed()
    for path in options.traces:
        events = read(path)
        print(path)
        if options.prompt:
            show_prompt(prompt_of(events))
        else:
            show(idle_of(events))
    if options.traces:
        return
    rows = without_trace(options)
    for row in rows:
        print(f"loop {row['loop_ms']:.3f} ms, ahead {row['ahead_ms']:.3f}, idle {row['idle']:.2%}")
    print(
        f"batch {options.batch}: idle {statistics.median(row['idle'] for row in rows):.2%}, median"
    )


if __name__ == "__main__":
    main()
