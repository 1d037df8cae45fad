"""What one draw takes, without the step around it: `python -m benchmarks.draws`.

    python -m benchmarks.draws                                     # on a GPU: one replay of a graph
    python -m benchmarks.draws --rows 4 --vocab 1000 --repeat 3    # anywhere

Microseconds by rows and kind of sampling, for logits that are normal with a deviation of `--scale`:
a small one leaves top_p many tokens, a large one few. Median, least and most of `--repeat`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.engine import ints, synchronize
from worker.draw.sampler import SamplingRows, sample
from worker.plan import Tail

KINDS: dict[str, tuple[Tail, float, float, int, float]] = {
    # the tail, temperature, top_p, top_k, min_p
    "greedy": ("greedy", 0.0, 1.0, 0, 0.0),
    "temperature": ("random", 0.8, 1.0, 0, 0.0),
    "top_p": ("filtered", 0.8, 0.95, 0, 0.0),
    "top_k,top_p": ("filtered", 0.8, 0.95, 50, 0.0),
    "min_p": ("filtered", 0.8, 1.0, 0, 0.05),
}
INNER = 20  # draws of one timing on a GPU


def rows_of(
    num: int, temperature: float, top_p: float, top_k: int, min_p: float, device: str
) -> SamplingRows:
    """`num` rows of one kind, each with a seed and a position of its own."""

    def floats(value: float) -> torch.Tensor:
        return torch.full((num,), value, dtype=torch.float32, device=device)

    def whole(value: int) -> torch.Tensor:
        return torch.full((num,), value, dtype=torch.int64, device=device)

    number = torch.arange(num, device=device)
    return SamplingRows(
        position=500 + number, seed=7919 * number, temperature=floats(temperature),
        top_k=whole(top_k), top_p=floats(top_p), min_p=floats(min_p), min_len=whole(0),
        stop_ids=torch.full((num, 4), -1, dtype=torch.int64, device=device),
        presence_penalty=floats(0), frequency_penalty=floats(0), repetition_penalty=floats(1),
        penalty_slot=whole(0),
    )  # fmt: skip


def replayed(draw: Callable[[], object], device: str) -> tuple[Callable[[], object], int]:
    """What to time, and how many draws it is: on a GPU replays of a graph."""
    for _ in range(3):
        draw()
    if device == "cpu":
        return draw, 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draw()

    def many() -> None:
        for _ in range(INNER):
            graph.replay()

    return many, INNER


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rows", type=ints, default=[32, 256])
    add("--vocab", type=int, default=151936)
    add("--scale", type=float, default=1.0)
    add("--repeat", type=int, default=9)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    print(f"torch {torch.__version__}, {device}, vocabulary {options.vocab}; us a draw")
    print(" rows  kind             median      min      max")
    with torch.inference_mode():
        for num in options.rows:
            logits = torch.randn(num, options.vocab, device=device, generator=generator)
            logits = (options.scale * logits).bfloat16()
            for kind, (tail, temperature, top_p, top_k, min_p) in KINDS.items():
                rows = rows_of(num, temperature, top_p, top_k, min_p, device)
                timed, count = replayed(partial(sample, logits, rows, tail), device)
                took = []
                for _ in range(options.repeat):
                    synchronize()
                    began = time.perf_counter()
                    timed()
                    synchronize()
                    took.append(1e6 * (time.perf_counter() - began) / count)
                median = statistics.median(took)
                print(f"{num:5}  {kind:12} {median:10.1f} {min(took):8.1f} {max(took):8.1f}")


if __name__ == "__main__":
    main()
