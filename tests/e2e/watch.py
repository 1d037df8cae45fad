"""Rows of `status` at any time, from one process that stays connected to Ray.

`python -m cluster status` takes seconds, most of which it imports Ray and joins it. Here a process
does that once, `python -m tests.e2e.watch ADDRESS local|joined`, and prints a line for each line
that it reads: what `status --json` would print, or null while nothing runs. A line that is not
empty has members for `tests.fault.admission`.
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
END_S = 10.0


class Watch:
    """The process, connected to one Ray; local: a `serve` started that, on 127.0.0.1."""

    def __init__(self, address: str, *, local: bool, environment: Mapping[str, str]) -> None:
        self.address = address
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.watch", address, "local" if local else "joined"],
            cwd=REPOSITORY, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip

    def rows(self) -> list[dict[str, Any]] | None:
        """One a worker, router and controller; None if no cluster runs on this Ray."""
        return self.asked("")

    def asked(self, given: str) -> Any:
        """What the process prints for a line."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{given}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the watching process is gone"
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def main(address: str, place: str) -> None:
    from cluster.serve import launch

    launch.join(address, quiet=True, loopback=place == "local")
    for line in sys.stdin:
        controller = launch.find_controller()
        if given := line.strip():
            from tests.fault.admission import admitted

            print(json.dumps(admitted(controller, given)), flush=True)
            continue
        rows = None if controller is None else launch.ask(controller.status)
        print(json.dumps(rows and [asdict(row) for row in rows]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
