"""How much of a decode step the GPU waits, and what the host did meanwhile: from a chrome trace.

    python -m benchmarks.engine --model-config benchmarks/models/qwen3-8b.json --batch 32 \\
        --profile trace.json
    python -m benchmarks.idle trace.json

The profiler slows the host down, so the shares are upper bounds.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def show(found: Idle) -> None:
    """The figures as text."""
    print(f"{found.num_steps} steps of {found.step_us / 1e3:.3f} ms")
    print(
        f"busy {found.busy:.2%}, idle between steps {found.idle_between:.2%}, "
        f"within steps {found.idle_within:.2%}"
    )
    print(f"last kernel to the next step's first: {found.between_us:.1f} us, copies included")
    for gap in found.longest:
        where = "between steps" if gap.between_steps else "within a step"
        host = ", ".join(f"{each.name} {each.us:.1f} us" for each in gap.host)
        print(f"{gap.span.us:8.1f} us {where}: {host or 'nothing of the host recorded'}")


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a chrome trace, which may be compressed."""
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", type=Path, nargs="+", help="of benchmarks.engine --profile")
    for path in parser.parse_args().traces:
        print(path)
        show(idle_of(read(path)))


if __name__ == "__main__":
    main()
