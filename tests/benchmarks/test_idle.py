"""benchmarks.idle on a trace written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import idle


def event(cat: str, name: str, ts: float, dur: float, correlation: int = 0) -> dict:
    return {
        "ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur,
        "args": {"correlation": correlation},
    }  # fmt: skip


def trace(num_steps: int = 10) -> list[dict]:
    """Steps of 100 us: kernels at 0..40 and 35..60, 10 us idle, a kernel to 90, a copy.

    The copy takes 90..92; 8 us are idle until the next step. Step 5 begins 20 us late.
    """
    events: list[dict] = [{"ph": "M", "name": "process_name"}]
    for number in range(num_steps):
        at, one = 1000 + 100.0 * number + (20 if number >= 5 else 0), 50 + number
        events += [
            event("cuda_runtime", "cudaGraphLaunch", at - 60, 5, one),
            event("kernel", "a", at, 40, one),
            event("kernel", "b", at + 35, 25, one),
            event("kernel", "c", at + 70, 20, one),
            event("gpu_memcpy", "to host", at + 90, 2, 9000 + number),
        ]
    late = 1000 + 100 * 5
    events += [
        event("cpu_op", "aten::slow", late - 20, 100),
        event("cuda_runtime", "cudaMalloc", late - 10, 40),
        event("cuda_runtime", "cudaGraphLaunch", 10, 5, 7),  # of a prompt: another graph
        event("kernel", "prompt", 20, 900, 7),
    ]
    return events


def test_shares_and_gaps_of_a_known_trace() -> None:
    found = idle.idle_of(trace())
    assert found.num_steps == 4  # 10, less 3 and 2, and the last one only ends a gap
    assert found.step_us == 100
    whole = 4 * 100 + 20
    assert found.idle_between == pytest.approx((4 * 8 + 20) / whole)
    assert found.idle_within == pytest.approx(4 * 10 / whole)
    assert found.busy == pytest.approx(1 - found.idle_between - found.idle_within)
    assert found.between_us == 10
    worst = found.longest[0]
    assert (worst.span.us, worst.between_steps) == (28, True)
    assert [(each.name, each.us) for each in worst.host] == [("cudaMalloc", 28), ("aten::slow", 28)]
    assert [gap.span.us for gap in found.longest[1:]] == [10, 10, 10, 10]
    assert not any(gap.between_steps for gap in found.longest[1:])


def test_a_trace_without_replays_is_refused() -> None:
    events = [each for each in trace() if each["name"] != "cudaGraphLaunch"]
    with pytest.raises(ValueError, match="too few replays"):
        idle.idle_of(events)


def test_a_trace_file_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": trace()}))
    monkeypatch.setattr("sys.argv", ["idle", str(file)])
    idle.main()
    said = capsys.readouterr().out
    assert "4 steps of 0.100 ms" in said
    assert "28.0 us between steps: cudaMalloc 28.0 us, aten::slow 28.0 us" in said
