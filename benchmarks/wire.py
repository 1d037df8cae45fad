"""What CURVE costs a frame: CPU seconds of both ends, as a multiple of those of plain sockets.

    nice python -m benchmarks.wire

Two wires of one process, plain and encrypted ones by turns, as a busy machine is busy for both.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Sequence

from worker.api import RankMessage
from worker.config import PingConfig
from worker.keyring import Keyring
from worker.wire import Event, Wire

PING = PingConfig(interval_s=1.0, max_misses=60)
SIZES = (200, 4_000, 64_000)  # bytes: a step's chunks for some streams, for many; a long prompt
WINDOW = 100  # frames on their way


class Link:
    """A wire that sends to another, in windows."""

    def __init__(self, own: tuple[Keyring | None, Keyring | None]) -> None:
        self._num_left = 0
        self._arrived = threading.Event()
        self._to = Wire("to/1", PING, self._take, keyring=own[0])
        self._by = Wire("by/1", PING, lambda _: None, keyring=own[1])
        self._to.refusals.is_limited = False
        self._by.start()
        address = self._to.start("127.0.0.1")
        self._to.admit({"by/1": self._by.key})
        self._by.connect("to/1", address, self._to.key)

    def cpu_s(self, size: int, num_windows: int) -> float:
        """Of one frame of that size."""
        message = RankMessage(bytes(size))
        self._window(message)
        began = time.process_time()
        for _ in range(num_windows):
            self._window(message)
        return (time.process_time() - began) / num_windows / WINDOW

    def close(self) -> None:
        self._by.close()
        self._to.close()

    def _window(self, message: RankMessage) -> None:
        self._num_left = WINDOW
        self._arrived.clear()
        for _ in range(WINDOW):
            self._by.send("to/1", message)
        assert self._arrived.wait(60), "frames were lost"

    def _take(self, events: Sequence[Event]) -> None:
        self._num_left -= sum(isinstance(message, RankMessage) for _, message in events)
        if not self._num_left:
            self._arrived.set()


def main() -> None:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description="What CURVE costs a frame")
    parser.add_argument("--turns", type=int, default=9, help="of plain and encrypted frames")
    parser.add_argument("--windows", type=int, default=10, help=f"of {WINDOW} frames in each turn")
    asked = parser.parse_args()
    plain, curve = Link((None, None)), Link((Keyring(), Keyring()))
    for size in SIZES:
        ratios = [
            curve.cpu_s(size, asked.windows) / plain.cpu_s(size, asked.windows)
            for _ in range(asked.turns)
        ]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        print(f"{size:6d} bytes: curve / plain = {middle:.2f} ({low:.2f} to {high:.2f})")
    curve.close()
    plain.close()


if __name__ == "__main__":
    main()
