"""What CURVE costs a frame: CPU of both ends, and as a multiple of that of plain sockets.

    nice python -m benchmarks.wire
    nice python -m benchmarks.wire --whole

Two wires of one process, plain and encrypted ones by turns, as a busy machine is busy for both.
A step of 256 rows is the one frame that takes its tokens to a router; a pull of 512 tokens is the
prompt, the announcement of its pages and the release. All else of them is the same with and without
keys: bytes of KV travel unencrypted.

With --whole the same of whole steps, and of whole requests with 512 tokens of prompt: CPU of a
router's wire, a decode and a prefill worker with the tiny model, of two such clusters by turns.
"""

import argparse
import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from tests.support.engines import Running, Sections, running
from tests.support.patience import until
from tests.support.prompts import TINY
from worker.api import (
    AnyMessage,
    Chunks,
    KVReady,
    Prefill,
    RankMessage,
    Release,
    Sampling,
    TokenChunk,
    Xfer,
)
from worker.config import PingConfig
from worker.keyring import Keyring
from worker.wire import Event, Wire

PING = PingConfig(interval_s=1.0, max_misses=60)
SIZES = (200, 4_000, 64_000)  # bytes: a step's chunks for some streams, for many; a long prompt
WINDOW = 100  # frames on their way
ROWS, NUM_STEPS, NUM_PULLS = 256, 96, 9  # of whole steps, and of a turn
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


def cluster(authentication: str) -> contextlib.AbstractContextManager[Running]:
    """A router's wire, a decode and a prefill worker, in threads of this process."""
    sections: Sections = {
        "model": {"path": str(TINY)},
        "engine": {"max_num_reqs": ROWS, "num_pages": 2400, "prefix_cache": False},
        "transport": {"authentication": authentication},
    }
    return running(sections, client=f"client/{authentication}")


def step_s(cluster: Running, num_steps: int) -> float:
    """CPU of a step of ROWS rows until its tokens are at the router's side."""
    client, asked = cluster.client, Sampling(max_tokens=num_steps, ignore_eos=True)
    req_ids = [client.submit((7, i % 100 + 1, i // 100 + 1), asked) for i in range(ROWS)]
    answers = [client.answers[each] for each in req_ids]
    until(lambda: all(each.tokens for each in answers), act=client.pump)
    began, num_before = time.process_time(), sum(len(each.tokens) for each in answers)
    client.wait(req_ids)
    return (time.process_time() - began) * ROWS / (ROWS * num_steps - num_before)


def pulled_s(cluster: Running, num_times: int) -> float:
    """CPU of a request for one token, whose 512 tokens another worker computes."""
    began = time.process_time()
    for i in range(num_times):
        cluster.answers([(7, i + 1) * 256], Sampling(max_tokens=1, ignore_eos=True))
    return (time.process_time() - began) / num_times


def tell(
    name: str, turns: int, of_curve: Callable[[], float], of_plain: Callable[[], float]
) -> None:
    """Measure seconds by turns, and whose is the first by turns; print a line."""
    pairs = list[tuple[float, float]]()
    for turn in range(turns):
        first, second = (of_curve, of_plain) if turn % 2 else (of_plain, of_curve)
        one, other = first(), second()
        pairs.append((one, other) if turn % 2 else (other, one))
    ratios = [with_keys / without for with_keys, without in pairs]
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    more_us = 1e6 * statistics.median(with_keys - without for with_keys, without in pairs)
    plain_us = 1e6 * statistics.median(without for _, without in pairs)
    line = f"{name:20s}: {plain_us:6.1f} us, with curve {more_us:+.1f} us"
    print(f"{line}, x {middle:.3f} ({low:.2f} to {high:.2f})", flush=True)


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description="What CURVE costs a frame")
    parser.add_argument("--turns", type=int, default=9, help="of plain and encrypted frames")
    parser.add_argument("--windows", type=int, default=10, help=f"of {WINDOW} frames in each turn")
    parser.add_argument("--whole", action="store_true", help="steps and pulls of workers")
    asked = parser.parse_args()
    if asked.whole:
        with cluster("curve") as curved, cluster("none") as plain:
            for name, whole, num in (
                (f"a step of {ROWS} rows", step_s, NUM_STEPS),
                ("a pull of 512 tokens", pulled_s, NUM_PULLS),
            ):
                tell(name, asked.turns, *(partial(whole, each, num) for each in (curved, plain)))
        return
    plain_link, curve = Link((None, None)), Link((Keyring(), Keyring()))
    for name, messages in MESSAGES.items():
        ways = (partial(link.cpu_s, messages, asked.windows) for link in (curve, plain_link))
        tell(name, asked.turns, *ways)
    curve.close()
    plain_link.close()


if __name__ == "__main__":
    main()
