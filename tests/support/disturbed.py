"""What a cluster must show after somebody has misbehaved: everybody lives, nothing is left.

Descriptors, threads and memory are read of every process of the namespace that belongs to it, Ray's
own as well. A process of Ray or of a grammar's trial may end; what `status` names may not.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.harness import Serve, processes
from tests.e2e.shared import identity
from tests.support.bystander import NUM_CLIENTS, Bystander, Stretch
from tests.support.patience import HANG_S

MAX_MORE_BYTES = 200 << 20  # of a process's memory
MAX_MORE_THREADS = 12  # pools of threads fill as they are needed
MAX_MORE_FILES = 24
SETTLE_S = 30.0  # for memory, threads and descriptors to come back
OF_REQUESTS = ("holds", "requests", "leases", "num_inflight")  # counters
LASTING = ("gcs_server", "raylet", "-m cluster serve")


@dataclass(frozen=True, slots=True)
class Size:
    """Of one process."""

    line: str  # its command
    num_bytes: int
    num_threads: int
    num_files: int
    num_mapped_bytes: int  # shared, beside these: all of what it has mapped, used or not

    @property
    def lasts(self) -> bool:
        """Whether it may not end, although `status` does not name it."""
        return any(word in self.line for word in LASTING)

    def exceeds(self, before: "Size") -> bool:
        """Whether it has grown by more than is allowed."""
        return (
            self.num_bytes > before.num_bytes + MAX_MORE_BYTES
            or self.num_threads > before.num_threads + MAX_MORE_THREADS
            or self.num_files > before.num_files + MAX_MORE_FILES
        )

    def __str__(self) -> str:
        mib = self.num_bytes / (1 << 20)
        return f"{mib:.0f} MiB, {self.num_threads} threads, {self.num_files} files"


def size_of(pid: int, line: str) -> Size | None:
    """None: it has ended. Shared memory counts by what is mapped of it: pages of a worker's KV
    pool, whose size is given, are the process's from their first use on.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        maps = Path(f"/proc/{pid}/maps").read_text()
        num_files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    fields = dict(each.split(":", 1) for each in status.splitlines() if ":" in each)
    if "VmRSS" not in fields:
        return None
    all_kib, shared_kib = (int(fields[name].split()[0]) for name in ("VmRSS", "RssShmem"))
    shared = re.findall(r"^(\w+)-(\w+) ...s", maps, re.MULTILINE)
    mapped = sum(int(end, 16) - int(start, 16) for start, end in shared)
    sizes = int(fields["Threads"]), num_files, mapped
    return Size(line[:60], (all_kib - shared_kib) << 10, *sizes)


def sizes() -> dict[int, Size]:
    """Of every process of a cluster, by pid; those of our own session are ours."""
    own, found = os.getsid(0), dict[int, Size]()
    for pid, line in processes().items():
        try:
            is_ours = os.getsid(pid) == own
        except ProcessLookupError:
            continue
        if not is_ours and (size := size_of(pid, line)) is not None:
            found[pid] = size
    return found


@dataclass
class Watched:
    """A cluster that is to be disturbed, and a well-behaved client beside it."""

    serve: Serve
    bystander: Bystander = field(init=False)
    undisturbed: Stretch = field(init=False)
    beside: list[Stretch] = field(default_factory=list[Stretch], init=False)
    before: dict[int, Size] = field(init=False)
    most: dict[int, int] = field(default_factory=dict[int, int], init=False)  # bytes, ever seen

    def __post_init__(self) -> None:
        self.bystander = Bystander(self.serve.url)

    def begin(self, seconds: float) -> None:
        """Ask undisturbed for so long, and note how things are."""
        self.bystander.stretch()
        time.sleep(seconds)
        self.undisturbed = self.bystander.stretch()
        self._rows = identity(self.serve.status())
        self.before = sizes()

    def rest(self) -> None:
        """Let things settle; what was large before does not count any more.

        The client goes on meanwhile, so no more is waited for than that the rest has come down.
        """
        self._until_settled(self._crowded, HANG_S)
        self.noted()
        self.most.clear()
        self._rested = sizes()

    def grown(self) -> str:
        """How large routers and workers were before, and at most since."""
        self.look()
        found = [
            f"{name} {before.num_bytes >> 20} MiB, at most {self.most[pid] >> 20}"
            for name, (pid, *_) in self._rows.items()
            if (before := self._rested.get(pid)) is not None and pid in self.most
        ]
        return ", ".join(found)

    def look(self) -> None:
        """Note how large processes are at this moment."""
        for pid, size in sizes().items():
            self.most[pid] = max(self.most.get(pid, 0), size.num_bytes)

    def is_over(self) -> bool:
        """Whether a process has ended that may not, so that nothing more can be learned."""
        pids = [pid for pid, *_ in self._rows.values() if pid]
        lasting = [pid for pid, size in self.before.items() if size.lasts]
        return not all(Path(f"/proc/{pid}").exists() for pid in (*pids, *lasting))

    def noted(self) -> Stretch:
        """How the client's requests went since the last call."""
        self.beside.append(self.bystander.stretch())
        return self.beside[-1]

    def compared(self, beside: Stretch, company: Stretch) -> Sequence[str]:
        """A line about a stretch against the undisturbed one and that beside honest requests."""
        p99 = beside.percentile(0.99)
        alone, honest = (p99 / each.percentile(0.99) for each in (self.undisturbed, company))
        return [f"p99 beside: {alone:.2f} x alone, {honest:.2f} x beside as many honest requests"]

    def close(self) -> None:
        self.bystander.close()

    def breaches(self) -> list[str]:
        """What is wrong, now that nobody misbehaves any more; waits until things have settled."""
        found = [f"a well-behaved client's request failed: {each}" for s in self.beside
                 for each in s.failed]  # fmt: skip
        found += [f"its answer is wrong: {each}" for s in self.beside for each in s.wrong]
        self.close()
        rows = identity(self.serve.status())
        found += [
            f"{name} was replaced or has ended: {was} is {rows.get(name)}"
            for name, was in self._rows.items()
            if rows.get(name) != was
        ]
        left = self._until_settled(self._counted, HANG_S)
        found += [f"left at {name}: {counters}" for name, counters in left.items()]
        grown = self._until_settled(self._grown, SETTLE_S)
        found += [f"{pid} has grown: {sizes}" for pid, sizes in grown.items()]
        alive = sizes()
        found += [
            f"{pid} has ended: {size.line}"
            for pid, size in self.before.items()
            if pid not in alive and size.lasts
        ]
        if (at := self.serve.output.find("Traceback")) >= 0:
            found.append(f"somebody has logged: {self.serve.output[max(0, at - 300) :][:3000]}")
        return found

    def report(self) -> Sequence[str]:
        """Lines about the client and about memory."""
        lines = [f"client, undisturbed: {self.undisturbed}"]
        lines += [f"client, beside:      {each}" for each in self.beside if each.num]
        after = sizes()
        for pid, before in self.before.items():
            most = self.most.get(pid, 0) / (1 << 20)
            if pid in after and after[pid] != before and before.num_bytes > 60 << 20:
                lines.append(f"{before.line}: {before}; then {after[pid]}, at most {most:.0f} MiB")
        return lines

    def _counted(self) -> dict[str, str]:
        rows = self.serve.status()
        return {
            name: str({kind: n for kind, n in row["counters"].items() if n})
            for name, row in rows.items()
            if row["counters"] and any(row["counters"].values())
        }

    def _crowded(self) -> dict[str, str]:
        """Where more requests are than the client's own."""
        counted = {name: row["counters"] or {} for name, row in self.serve.status().items()}
        most = {
            name: max((each.get(kind, 0) for kind in OF_REQUESTS), default=0)
            for name, each in counted.items()
        }
        return {name: str(num) for name, num in most.items() if num > NUM_CLIENTS}

    def _grown(self) -> dict[str, str]:
        after = sizes()
        return {
            f"{pid} ({before.line})": f"{before} before, {after[pid]} now"
            for pid, before in self.before.items()
            if pid in after and after[pid].exceeds(before)
        }

    def _until_settled(self, left: Callable[[], dict[str, str]], seconds: float) -> dict[str, str]:
        deadline = time.monotonic() + seconds
        while (found := left()) and time.monotonic() < deadline:
            time.sleep(0.3)
        return found


@contextmanager
def watching(serve: Serve, undisturbed_s: float) -> Iterator[Watched]:
    """A cluster that a client has used undisturbed for so long; the client ends with this."""
    watched = Watched(serve)
    try:
        watched.begin(undisturbed_s)
        yield watched
    finally:
        watched.close()
