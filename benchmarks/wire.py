"""What CURVE costs a frame: CPU of both ends, and as a multiple of that of plain sockets.

    nice python -m benchmarks.wire

Two wires of one process, plain and encrypted ones by turns, as a busy machine is busy for both.
A step of 256 rows is the one frame that takes its tokens to a router; a pull of 512 tokens is the
prompt, the announcement of its pages and the release. All else of them is the same with and without
keys: bytes of KV travel unencrypted.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Sequence

from worker.api import AnyMessage, Chunks, KVReady, Prefill, RankMessage, Release, TokenChunk, Xfer
from worker.config import PingConfig
from worker.keyring import Keyring
from worker.wire import Event, Wire

PING = PingConfig(interval_s=1.0, max_misses=60)
SIZES = (200, 4_000, 64_000)  # bytes: a step's chunks for some streams, for many; a long prompt
WINDOW = 100  # frames on their way
XFER = Xfer(f"{'5' * 32}-0:1:1", 1, "5eed5eed", "5eed5eed")
MESSAGES: dict[str, tuple[AnyMessage, ...]] = {
    **{f"{size} bytes": (RankMessage(bytes(size)),) for size in SIZES},
    "a step of 256 rows": (
        Chunks(tuple(TokenChunk(f"{i:032}-0", 1, 1000 + i, (50_000 + i,)) for i in range(256))),
    ),
    "a pull of 512 tokens": (
        Prefill(XFER, tuple(range(50_000, 50_512)), 0, key=bytes(32)),
        KVReady(XFER, 0, tuple(range(1000, 1032)), 0, 1, True, seal=bytes(16)),
        Release(XFER),
    ),
}
SENT = tuple({type(message) for messages in MESSAGES.values() for message in messages})


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

    def cpu_s(self, messages: Sequence[AnyMessage], num_windows: int) -> float:
        """Of one each of these."""
        self._window(messages)
        began = time.process_time()
        for _ in range(num_windows):
            self._window(messages)
        return (time.process_time() - began) / num_windows / WINDOW

    def close(self) -> None:
        self._by.close()
        self._to.close()

    def _window(self, messages: Sequence[AnyMessage]) -> None:
        self._num_left = WINDOW * len(messages)
        self._arrived.clear()
        for _ in range(WINDOW):
            for message in messages:
                self._by.send("to/1", message)
        assert self._arrived.wait(60), "frames were lost"

    def _take(self, events: Sequence[Event]) -> None:
        self._num_left -= sum(isinstance(message, SENT) for _, message in events)
        if not self._num_left:
            self._arrived.set()


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description="What CURVE costs a frame")
    parser.add_argument("--turns", type=int, default=9, help="of plain and encrypted frames")
    parser.add_argument("--windows", type=int, default=10, help=f"of {WINDOW} frames in each turn")
    asked = parser.parse_args()
    plain, curve = Link((None, None)), Link((Keyring(), Keyring()))
    for name, messages in MESSAGES.items():
        pairs = [
            (curve.cpu_s(messages, asked.windows), plain.cpu_s(messages, asked.windows))
            for _ in range(asked.turns)
        ]
        ratios = [with_keys / without for with_keys, without in pairs]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        more_us = 1e6 * statistics.median(with_keys - without for with_keys, without in pairs)
        plain_us = 1e6 * statistics.median(without for _, without in pairs)
        line = f"{name:20s}: {plain_us:6.1f} us, with curve {more_us:+.1f} us"
        print(f"{line}, x {middle:.2f} ({low:.2f} to {high:.2f})")
    curve.close()
    plain.close()


if __name__ == "__main__":
    main()
