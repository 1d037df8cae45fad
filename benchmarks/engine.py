"""Times of one engine in this process, without sockets.

    python -m benchmarks.engine --model-config benchmarks/models/qwen3-8b.json \\
        --batch 1,32,256,32x8192 --output-len 64 --cached --repeat 2 --also top_p@32 --json F
    python -m benchmarks.engine --model-config benchmarks/models/qwen3-8b.json --phase prefill \\
        --tokens 128,2048,8192 --chunk 8192 --batch 1 --repeat 20 --graph piecewise --json F
    python -m benchmarks.engine --model-config benchmarks/models/qwen3-8b.json --cached \\
        --drafter benchmarks/models/qwen3-8b-eagle3.json --widths 1,4 --accept 2.9 --json F

decode: the slope between two output lengths, so prompts cancel out. The floor is the bytes of
weights and mean KV over the read bandwidth of this run, with `--tp` of one rank's part. In windows
of `--widths` one token counts, or with `--accept` that many: acceptance is SIMULATED, a figure is
the time between two tokens of the slowest row, and it has no floor. `--also NAME@ROWS` draws in
other ways; `mask` uploads masks made before. `--moved N`: by turns, while pages come from host
memory as a tier's do, N at a time, and others go there.
prefill: from the launch until the first token is on the host, op by op and with `--graph`. The
floor is the larger of reading the weights and of all products at the speed of one large product.
"""

import argparse
import itertools
import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.instruments import (
    Bench,
    add_engine_options,
    build,
    decode_floor_ms,
    expert_steps,
    prefill_floor_ms,
)
from benchmarks.moving import Moving
from benchmarks.output import ints, parser, shown, write
from benchmarks.timing import product_speed, profile, read_bandwidth, told
from worker.api import Sampling
from worker.plan import Plan, max_rows
from worker.schedule.width import WidthPolicy

SHORT_OUTPUT = 8  # tokens of the shorter run
TURNS = 3  # of a conversation, before the one whose --new tokens are timed
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1}
BIAS = tuple((token, 1.0) for token in range(20))
MASK = {"grammar": "its masks are handed in"}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "penalties": {"temperature": 0.0, **PENALTIES},
    "bias": {"temperature": 0.0, "logit_bias": BIAS},
    "mask": {"temperature": 0.0, **MASK},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 1},
    "all": {"temperature": 0.8, "top_p": 0.95, "logit_bias": BIAS, "logprobs": 5}
    | MASK
    | PENALTIES,
}


class Case(NamedTuple):
    """What one row of the table is of."""

    batch: int
    prompt_len: int
    sampling: str  # a name of SAMPLINGS

    def draws(self, num_tokens: int, seed: int = 0) -> Sampling:
        """So many tokens of each request."""
        return Sampling(num_tokens, ignore_eos=True, seed=seed, **SAMPLINGS[self.sampling])


def step_times(
    bench: Bench, case: Case, options: argparse.Namespace, moving: Moving | None
) -> dict[tuple[int, bool], list[float]]:
    """Milliseconds a step, one figure a repetition, by number of snapshots and if pages move."""
    lengths = SHORT_OUTPUT, options.output_len
    ways = itertools.product(options.snapshots, (False, True)[: 1 + (moving is not None)])
    times: dict[tuple[int, bool], list[float]] = {way: [] for way in ways}
    for number, way in itertools.product(range(options.repeat + 1), times):
        seed, took = 0 if options.cached else number, list[float]()
        for length in lengths:
            bench.keep_snapshots(way[0])
            draws = case.draws(length, number)
            with moving.both_ways() if moving is not None and way[1] else nullcontext([]) as rates:
                took.append(bench.generate(case.batch, case.prompt_len, draws, seed))
        if rates:
            print(f"moved {rates[0]:.1f} GB/s in, {rates[1]:.1f} out")
        times[way] += [1e3 * (took[1] - took[0]) / (lengths[1] - lengths[0])] * (number > 0)
    return times  # the first ones warm up


def distinct_experts(bench: Bench, case: Case, num_tokens: int) -> float:
    """Experts of a layer that have tokens in a decode step of all rows, on average; 0: no layer
    has experts. Not timed: each step waits to be counted."""
    counts = list[tuple[int, int]]()

    def count(plan: Plan, all_run: bool) -> None:
        if all_run and not plan.chunks:
            counts.append(expert_steps(bench.engine))

    if expert_steps(bench.engine)[1] == 0:
        return 0.0
    bench.generate(case.batch, case.prompt_len, case.draws(num_tokens), 0, count)
    (met, steps), (all_met, all_steps) = counts[0], counts[-1]
    return (all_met - met) / (all_steps - steps)


def measure_decode(
    bench: Bench, cases: list[Case], options: argparse.Namespace, bandwidth: float
) -> list[dict[str, Any]]:
    """A row for each case and width; prints them."""
    rows: list[dict[str, Any]] = []
    widths: list[int] = options.widths
    moving = Moving(bench.engine, options.moved) if options.moved else None
    for case, width in itertools.product(cases, widths):
        if case.batch > max_rows(width, case.batch):
            continue
        bench.scheduler.widths = WidthPolicy((width,))
        counted = min(SHORT_OUTPUT * width, options.output_len)
        times = step_times(bench, case, options, moving)
        distinct = distinct_experts(bench, case, counted)
        mean_len = case.prompt_len + options.output_len / 2
        floor = decode_floor_ms(bench.engine, case.batch, mean_len, bandwidth, distinct)
        name = f"{case.batch} x {case.prompt_len}, {case.sampling}, windows of {width}"
        name += f", {distinct:.1f} experts" if distinct else ""
        about = {**case._asdict(), "width": width, "distinct_experts": distinct, "path": bench.path}
        floor *= options.accept == 1
        for (kept, moves), of in times.items():
            about |= {"accept": options.accept, "snapshots": kept, "moving": moves}
            told_as = name + f", {kept} snapshots" * (kept >= 0) + ", pages move" * moves
            rows.append(about | told(told_as, of, "ms", floor))
    if moving is not None:
        moving.close()
    return rows


def measure_prefill(
    bench: Bench, cases: list[Case], options: argparse.Namespace, bandwidth: float
) -> list[dict[str, Any]]:
    """A row for each batch, number of tokens, of new ones, graph, and of snapshots; prints them.

    The last two take turns: a GPU at the limit of its power is slower the longer it works.
    """
    engine, graphs, speed = bench.engine, bench.chunk_graphs(), product_speed()
    rows: list[dict[str, Any]] = []
    lengths: list[int] = options.tokens
    news: list[int] = options.new
    keeps: list[int] = options.snapshots
    for (batch, _, sampling), num_tokens, new in itertools.product(cases, lengths, news):
        draws = Case(batch, num_tokens, sampling).draws(1)
        turns = min(TURNS, (num_tokens - 1) // new) if new else 0
        times = {way: list[float]() for way in itertools.product(graphs, keeps)}
        found: dict[tuple[str, int], tuple[str, int, int, int]] = {}
        for number, way in itertools.product(range(options.repeat + 2), times):
            bench.launch_chunks_by(graphs[way[0]])
            bench.keep_snapshots(way[1])
            for num in range(num_tokens - turns * new, num_tokens, new or 1):
                bench.generate(batch, num, draws, seed=number)
            took_s = bench.generate(batch, num_tokens, draws, seed=number)
            times[way] += [1e3 * took_s] * (number > 1)  # the first ones warm up
            found[way] = bench.path, *bench.found, engine.book.snapshots.num_used
        for (name, kept), of in times.items():
            path, matched, resumed, used = found[name, kept]
            about = {"batch": batch, "tokens": num_tokens, "launch": name, "path": path, "new": new}
            about |= {"snapshots": kept, "matched": matched, "resumed": resumed, "kept": used}
            told_as = f"{batch} x {num_tokens}, {name}, {path}"
            if kept >= 0:
                told_as += f", {new} new, {resumed} of {matched} resumed, {used} of {kept} kept"
            floor = prefill_floor_ms(engine, batch, num_tokens - resumed // batch, bandwidth, speed)
            rows.append(about | told(told_as, of, "ms", floor))
    return rows


def parsed() -> tuple[argparse.Namespace, list[Case]]:
    """The command line, and the cases that it asks for."""
    made = parser(__doc__)
    add_engine_options(made)
    add = made.add_argument
    add("--phase", default="decode", choices=("decode", "prefill"))
    add("--tokens", type=ints, default="16,64,128,256,512,1024,2048,8192", help="of a prompt")
    add("--new", type=ints, default=[0], help="of them so many behind each turn; 0: no turns")
    add("--batch", default="1,8,32", help="requests at a time; 8x32768: of so many tokens")
    add("--repeat", type=int, default=3)
    add("--sampling", default="greedy", choices=sorted(SAMPLINGS))
    add("--also", default="", help="more of it: top_p@32,random; without @: of every batch")
    add("--profile", type=Path, help="chrome trace of the largest batch, or the longest prompts")
    options = made.parse_args()

    def cases(batches: str, sampling: str) -> list[Case]:
        parts = (part.partition("x") for part in batches.split(","))
        return [Case(int(num), int(len_ or options.prompt_len), sampling) for num, _, len_ in parts]

    if options.phase == "prefill":
        options.output_len, options.prompt_len = SHORT_OUTPUT, max(options.tokens)
    wanted = cases(options.batch, options.sampling)
    for part in filter(None, options.also.split(",")):
        name, _, batches = part.partition("@")
        wanted += cases(batches or options.batch, name)
    return options, wanted


def main() -> None:
    """Measure every case, print a table, write JSON."""
    options, cases = parsed()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    options.prompt_len = max(case.prompt_len for case in cases)
    num_reqs = max(case.batch for case in cases)
    num_tokens = max(case.batch * case.prompt_len for case in cases)
    penalized = any(case.draws(1).changes_logits for case in cases)
    bench = Bench(build(options, num_reqs, num_tokens, num_reqs if penalized else 1))
    engine = bench.engine
    with torch.inference_mode():
        bandwidth = read_bandwidth()
    measure = measure_decode if options.phase == "decode" else measure_prefill
    rows = measure(bench, cases, options, bandwidth)
    if options.profile:
        decodes = options.phase == "decode"
        num, draws = (16, 20) if decodes else (options.prompt_len, 1)
        draw = Case(num_reqs, num, "greedy").draws(draws)
        work = partial(bench.generate, num_reqs, num, draw, 99)
        profile(options.profile, work, 1 if decodes else options.repeat)
    graph, attention = engine.config.engine.graph, engine.config.engine.attention
    about = {"graph": graph.model_dump(), "attention": attention.model_dump()}
    about |= {"options": shown(options), "read_bytes_per_s": bandwidth, "steps": rows}
    write(options.json, about)
    engine.close()


if __name__ == "__main__":
    main()
