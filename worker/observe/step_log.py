"""StepLog: a line of JSON for each settled step, to see where the time of served steps goes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from worker.errors import UserError
from worker.plan import Drawn, Plan

FLUSH_S = 1.0


class StepLine(msgspec.Struct, omit_defaults=True):
    """One line of the log, JSON."""

    step: int
    at: float  # Unix time at which it was settled, s
    path: str  # see StepResult.path
    rows: int  # that decode
    tokens: int  # of chunks
    num_keys: int  # upper bound, of all rows
    longest: int  # upper bound of the longest row's keys
    joined: bool  # it was launched while another step was in flight
    late: bool  # that other step ended before this launch did: the device was idle up to launch_us
    launch_us: float  # of the host: from the plan to the last kernel
    wait_us: float  # of the host: blocked until the step had ended
    host_us: float  # CPU time of the loop's thread since the last settling, without the wait
    gpu_us: float = 0.0  # from the begin of its launch, or the last step's end if later, to its end
    idle_us: float = 0.0  # from the last step's end to the begin of this one's launch
    width: int = 1  # of the windows that it verified
    kept: int = 0  # tokens that these yielded, of all rows, if they are wider than 1


@dataclass(slots=True)
class _Launched:
    launch_s: float
    joined: bool
    late: bool
    began: torch.cuda.Event | None
    ended: torch.cuda.Event | None


class StepLog:
    """The log of the worker `name`: <directory>/<name>.jsonl, begun anew, or a UserError."""

    def __init__(self, directory: str, name: str, device: torch.device) -> None:
        path = Path(directory).expanduser() / f"{name}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")
        except OSError as error:
            param = "engine.step_log"
            raise UserError(f"{param}: {path}: {error.strerror}", param) from error
        self._cuda = device.type == "cuda"
        self._launched: dict[int, _Launched] = {}
        self._ended: torch.cuda.Event | None = None  # of the step that settled last
        self._cpu_at: float | None = None  # of the loop's thread, at the last settling
        self._waits_at = 0.0, 0.0  # monotonic, and CPU time of the loop's thread
        self._flushed_at = 0.0

    def event(self) -> torch.cuda.Event | None:
        """An event in the current stream's order; None on the CPU."""
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def launched(self, plan: Plan, began: torch.cuda.Event | None, launch_s: float) -> None:
        """Note a launch; began: an event from before its first kernel."""
        before = next(reversed(self._launched.values()), None)
        late = before is not None and before.ended is not None and before.ended.query()
        joined = before is not None
        self._launched[plan.step] = _Launched(launch_s, joined, late, began, self.event())

    def tail_launched(self, plan: Plan) -> None:
        """Note that the tail of a masked step was launched: the step ends behind it."""
        self._launched[plan.step].ended = self.event()

    def waits(self) -> None:
        """Note that the loop begins to wait for the step that settles next."""
        self._waits_at = time.monotonic(), time.thread_time()

    def settled(self, plan: Plan, path: str, drawn: Sequence[Drawn]) -> None:
        """Write the line of a step that has settled."""
        launched, cpu_at = self._launched.pop(plan.step), time.thread_time()
        wait_s, wait_cpu_s = time.monotonic() - self._waits_at[0], cpu_at - self._waits_at[1]
        since = cpu_at if self._cpu_at is None else self._cpu_at
        line = StepLine(
            plan.step, time.time(), path, len(plan.decode),
            sum(len(chunk.tokens) for chunk in plan.chunks), plan.num_keys, plan.max_seq_len_ub,
            launched.joined, launched.late,
            1e6 * launched.launch_s, 1e6 * wait_s, 1e6 * max(0.0, cpu_at - since - wait_cpu_s),
        )  # fmt: skip
        if plan.width > 1:
            line.width, line.kept = plan.width, sum(len(row.tokens) for row in drawn)
        self._cpu_at = cpu_at
        if launched.began is not None and launched.ended is not None:
            launched.ended.synchronize()
            line.gpu_us = 1e3 * launched.began.elapsed_time(launched.ended)
            if self._ended is not None:
                line.idle_us = 1e3 * self._ended.elapsed_time(launched.began)
            self._ended = launched.ended
        self._file.write(msgspec.json.encode(line) + b"\n")
        if line.at - self._flushed_at > FLUSH_S:
            self._flushed_at = line.at
            self._file.flush()

    def close(self) -> None:
        self._file.close()
