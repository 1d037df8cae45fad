"""Interrupt starts of `serve` at random moments, and look for what is left.

    python -m tests.fault.interrupts --num 200          10 s each; prints figures, exits 1 if bad

SIGINT (to the process group, as a terminal does), SIGTERM and SIGHUP take turns. Needs root: it
runs in namespaces of its own, where every process that is left is one of serve's.
"""

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.harness import SIGNALS, Serve, enter_namespace_of, processes, shared_memory
from tests.support.patience import HANG_S

SHOWN, NUM_SHOWN = 120, 10  # characters of a command line, files of one start
READY = "Ctrl-C stops it."
SPAN_S = 6.0  # in which a start is ready
CRASHES = ("Traceback", "Segmentation fault", "core dumped", "was ended by")
OURS = "cluster/cli.py"  # before it runs, Python answers SIGINT with a traceback and code 1


@dataclass(frozen=True, slots=True)
class Round:
    number: signal.Signals
    at_s: float  # after the start
    was_ready: bool
    code: int
    took_s: float  # from the signal to the end
    hung: bool
    processes: tuple[str, ...]  # left when it had ended
    files: tuple[str, ...]
    output: str

    @property
    def problems(self) -> list[str]:
        found = [f"left process {line[:SHOWN]}" for line in self.processes]
        found += [f"left file {name}" for name in self.files[:NUM_SHOWN]]
        if self.hung:
            found.append(f"runs {HANG_S:g} s after the signal")
        elif "KeyboardInterrupt" in self.output and OURS not in self.output:
            return found
        else:
            found += [f"printed {word!r}" for word in CRASHES if word in self.output]
            # Before it blocks signals the signal itself ends it; once ready it drains.
            if self.code not in (-self.number, 128 + self.number, 0):
                found.append(f"exit code {self.code}")
        return found


def interrupt(number: signal.Signals, at_s: float) -> Round:
    before, shm_before = processes(), shared_memory()
    root = Path(tempfile.mkdtemp(prefix="i", dir="/tmp"))
    try:
        serve = Serve(root, port=0).start()
        process = serve.process
        assert process is not None
        time.sleep(at_s)
        was_ready = READY in serve.output
        began = time.monotonic()
        if number is signal.SIGINT:
            serve.interrupt()
        else:
            process.send_signal(number)
        hung = False
        try:
            process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            hung = True
        took_s = time.monotonic() - began
        left = {pid: line for pid, line in processes().items() if pid not in before}
        files = [*serve.leftovers(), *(f"/dev/shm/{name}" for name in shared_memory() - shm_before)]
        if hung:
            process.kill()
        code = process.wait()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return Round(
            number, at_s, was_ready, code, took_s, hung, tuple(left.values()), tuple(files),
            serve.output,
        )  # fmt: skip
    finally:
        shutil.rmtree(root)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--span", type=float, default=SPAN_S, metavar="S", help="of a start")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    args = parser.parse_args()
    enter_namespace_of("tests.fault.interrupts")
    print(f"at moments of the first {args.span:.1f} s; seed {args.seed}", flush=True)
    took, num_bad, num_ready, chance = list[float](), 0, 0, random.Random(args.seed)
    for number in itertools.islice(itertools.cycle(SIGNALS), args.num):
        each = interrupt(number, chance.uniform(0, args.span))
        took.append(each.took_s)
        num_ready += each.was_ready
        if each.problems:
            num_bad += 1
            told = f"{len(took)}: {each.number.name} at {each.at_s:.2f} s:"
            print(told, *each.problems, each.output, sep="\n  ", flush=True)
    print(f"{num_bad} of {len(took)} starts have a problem, {num_ready} were ready; to their end "
          f"{statistics.median(took):.2f} s, slowest {max(took):.2f} s")  # fmt: skip
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
