"""Makes traffic in the form of a Mooncake trace, for machines that cannot download a real one.

    python -m benchmarks.load.write_trace benchmarks/load/traces/tiny.mooncake.jsonl

made the bundled trace with the defaults. Half of it is conversations, whose prompts hold all that
was said before them, and half are tools, which put one of a few long instructions before a short
question. A block's id stands for its tokens and all before them; the last id of a prompt that
ends within a block is used nowhere else, as aiperf and our own replay need it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.random import Generator

from benchmarks.load import arrivals as open_loop

SHAPES = ("conversation", "toolagent", "mixed")
PAUSE_S = 3.0  # at least so long after a turn comes the next of its conversation
NEW_CHAT_SHARE = 0.35  # of the turns of conversations, where there is one to go on with
NUM_TOOLS = 6


class Request(msgspec.Struct):
    """One line of the file."""

    timestamp: int  # ms
    input_length: int  # tokens
    output_length: int  # tokens
    hash_ids: list[int]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests are like; the defaults fit a model of 1024 tokens."""

    shape: str = "mixed"
    block_size: int = 64  # tokens of one hash id
    max_input: int = 832  # tokens
    output: tuple[int, int] = (16, 96)  # tokens, both ends included


class Maker:
    """Draws requests one after the other."""

    def __init__(self, shape: Shape, rng: Generator) -> None:
        if shape.shape not in SHAPES:
            raise ValueError(f"shape: {shape.shape!r} is none of {', '.join(SHAPES)}")
        if shape.max_input < 8 * shape.block_size:
            raise ValueError("max_input: must hold at least 8 blocks")
        self.shape = shape
        self._rng = rng
        self._num_ids = 0
        size = shape.block_size
        most = shape.max_input // (2 * size)
        self._tools = [self._ids(int(rng.integers(2, most + 1))) for _ in range(NUM_TOOLS)]
        self._chats: list[Request] = []

    def request(self, at_s: float) -> Request:
        """The request that comes at `at_s` seconds."""
        shape = self.shape.shape
        is_chat = shape == "conversation" or (shape == "mixed" and self._rng.random() < 0.5)
        low, high = self.shape.output
        num_out = int(self._rng.integers(low, high + 1))
        at_ms = round(at_s * 1000)
        return self._chat(at_ms, num_out) if is_chat else self._tool(at_ms, num_out)

    def _chat(self, at_ms: int, num_out: int) -> Request:
        own = max(8, round(self._rng.lognormal(np.log(60), 0.7)))
        own = min(own, self.shape.max_input)
        waiting = [
            index
            for index, last in enumerate(self._chats)
            if last.timestamp + PAUSE_S * 1000 <= at_ms
            and last.input_length + last.output_length + own <= self.shape.max_input
        ]
        if not waiting or self._rng.random() < NEW_CHAT_SHARE:
            made = self._request(at_ms, [], own, num_out)
            self._chats.append(made)
            return made
        index = waiting[int(self._rng.integers(len(waiting)))]
        last = self._chats[index]
        full = last.hash_ids[: last.input_length // self.shape.block_size]
        num_in = last.input_length + last.output_length + own
        self._chats[index] = self._request(at_ms, full, num_in, num_out)
        return self._chats[index]

    def _tool(self, at_ms: int, num_out: int) -> Request:
        ranks = np.arange(1, NUM_TOOLS + 1)
        tool = self._tools[int(self._rng.choice(NUM_TOOLS, p=(1 / ranks) / (1 / ranks).sum()))]
        before = len(tool) * self.shape.block_size
        own = max(8, round(self._rng.lognormal(np.log(80), 0.6)))
        return self._request(at_ms, tool, min(before + own, self.shape.max_input), num_out)

    def _request(self, at_ms: int, full: list[int], num_in: int, num_out: int) -> Request:
        num_blocks = -(-num_in // self.shape.block_size)
        return Request(at_ms, num_in, num_out, [*full, *self._ids(num_blocks - len(full))])

    def _ids(self, num: int) -> list[int]:
        self._num_ids += num
        return list(range(self._num_ids - num, self._num_ids))


def write_mooncake(
    path: Path,
    *,
    arrivals: str = "poisson:2",
    num: int | None = 120,
    duration_s: float | None = None,
    seed: int = 0,
    shape: Shape | None = None,
) -> int:
    """Write a trace; times count from its first request. Returns the number of requests.

    Raises:
        ValueError: `arrivals` or `shape` is wrong.
    """
    rng = np.random.default_rng(seed)
    times = open_loop.starts(arrivals, rng, num, duration_s)
    maker = Maker(shape or Shape(), rng)
    lines = [msgspec.json.encode(maker.request(at_s - times[0])) for at_s in times]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return len(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Make a trace in Mooncake's form.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--arrivals", default="poisson:2", help="see benchmarks/load/arrivals.py")
    parser.add_argument("--num", type=int, help="requests (default: 120 without --duration)")
    parser.add_argument("--duration", type=float, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shape", choices=SHAPES, default="mixed")
    parser.add_argument("--block-size", type=int, default=64, help="tokens of one hash id")
    parser.add_argument("--max-input", type=int, default=832, help="tokens")
    parser.add_argument("--output", type=int, nargs=2, default=(16, 96), help="tokens, low high")
    args = parser.parse_args(argv)
    shape = Shape(
        shape=args.shape,
        block_size=args.block_size,
        max_input=args.max_input,
        output=(args.output[0], args.output[1]),
    )
    num = 120 if args.num is None and args.duration is None else args.num
    made = write_mooncake(
        args.path,
        arrivals=args.arrivals,
        num=num,
        duration_s=args.duration,
        seed=args.seed,
        shape=shape,
    )
    print(f"{args.path}: {made} requests")


if __name__ == "__main__":
    main()
