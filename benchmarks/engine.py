"""Times of one engine in this process, without sockets: `python -m benchmarks.engine`.

    python -m benchmarks.engine --model-config benchmarks/models/qwen3-8b.json \\
        --load-format dummy --phase decode --batch 1,8,32,128,256 --prompt-len 512 \\
        --output-len 128 --also top_p@32 --json out.json

    python -m benchmarks.engine --model-config benchmarks/models/qwen3-8b.json --batch 32,256 \
        --prompt-len 128 --output-len 64 --cached --repeat 2 --json out.json \
        --also top_p,penalties,bias,mask,logprobs,all

`--also top_p` without `@32` is for every batch. `mask` hands in random masks, so its cost has the
upload and no grammar's work. `tail MiB`: peak of torch's allocator while one such tail runs op by
op, logits included.

Runs the decode worker's own scheduler, runner and overlap. A step's time is the slope between two
output lengths, so that prompts and everything before them cancel out. The floor is the bytes of the
weights and of the mean KV over the read bandwidth measured in the same run. Every step is one host
wait, and step n + 1 is launched before step n is settled.

`--tp 2` divides the model among two ranks; floors are then of one rank's part, and nothing of the
links between them.

`--widths 1,2,4,8,16` gives a column for each width of verify windows, in which one token of a step
counts, so that the figure is a step's; the drafts are none. `--drafter benchmarks/models/FILE` puts
a drafter of that shape beside the model: a step then proposes as well, and a chunk has its
part for the drafter. Tokens a second are batch x accepted tokens / the step's time.

    python -m benchmarks.engine --model-config benchmarks/models/qwen3-8b.json --batch 1,8,32,64 \
        --widths 1,2,4,5,8 --drafter benchmarks/models/qwen3-8b-eagle3.json

    python -m benchmarks.engine --model-config benchmarks/models/qwen3-8b.json --phase prefill \\
        --tokens 16,64,128,256,512,1024,2048,8192 --chunk 8192 --repeat 20 \\
        --graph piecewise,compiled --json out.json

Seconds from the launch of a prompt's chunks until its first token is on the host, launched op by op
and, beside it, with each of `--graph` (without: with what `engine.graph` says). The floor is the
larger of the weights over the read bandwidth and the products over the speed of one large product.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.load.result import machine
from benchmarks.ranks import led_engine
from worker.api import Sampling
from worker.config import GraphConfig, WorkerConfig
from worker.forward.draws import Masks
from worker.model.decoder import DecoderLayer
from worker.plan import LONG_STEP_TOKENS, Plan, max_rows, tail_of
from worker.run.base import ChunkGraphs, Decoded
from worker.run.build import build_graphs
from worker.run.eager import EagerChunks, draw_eagerly
from worker.run.engine import Engine
from worker.run.flight import Step
from worker.schedule.decode import DecodeScheduler
from worker.schedule.req import Req
from worker.schedule.width import WidthPolicy
from worker.step.state import SampledRows

SHORT_OUTPUT = 8  # tokens of the shorter run
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1}
BIAS = tuple((token, 1.0) for token in range(20))
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "penalties": {"temperature": 0.0, **PENALTIES},
    "bias": {"temperature": 0.0, "logit_bias": BIAS},
    "mask": {"temperature": 0.0, "grammar": "its masks are handed in"},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
    "all": {
        "temperature": 0.8, "top_p": 0.95, "logit_bias": BIAS, "logprobs": 5,
        "grammar": "its masks are handed in", **PENALTIES,
    },
}  # fmt: skip


def build(
    options: argparse.Namespace, max_batch: int, max_tokens: int = 0, penalty_rows: int = 1
) -> Engine:
    """A decode engine with random weights of the given shape.

    max_tokens: of all prompts of a batch together, if not each has options.prompt_len.
    """
    place = Path(tempfile.mkdtemp(prefix="kvlane-bench-"))
    shutil.copy(options.model_config, place / "config.json")
    spec: dict[str, Any] = {"widths": options.widths, "simulate_accept_len": 1}
    if options.drafter is not None:
        drafter = place / "drafter"
        drafter.mkdir()
        shutil.copy(options.drafter, drafter / "config.json")
        names = json.loads(options.drafter.read_text())["architectures"]
        kind = "dflash" if names == ["DFlashDraftModel"] else "chain"
        spec |= {"drafter": kind, "path": str(drafter)}
    max_len = options.prompt_len + options.output_len + 8
    page_size = options.page_size
    other = {"decode": "prefill", "prefill": "decode"}[options.phase]
    per_req = options.output_len + 8 + 2 * max(options.widths) + 2 * page_size
    num_tokens = max_batch * per_req + (max_tokens or max_batch * options.prompt_len)
    graphs = "eager" if options.eager else {other: "eager"}  # only of what is measured
    if options.graph and not options.eager:
        graphs = {other: "eager", options.phase: options.graph.split(",")[0]}
    config = WorkerConfig.model_validate(
        {
            "role": "decode",
            "model": {
                "path": str(place), "load_format": options.load_format, "max_model_len": max_len,
                **({"dtype": options.dtype} if options.dtype else {}),
            },
            "kv": {"page_size": page_size},
            "engine": {
                "max_num_reqs": max_batch, "penalty_rows": penalty_rows, "graph": graphs,
                "prefix_cache": options.cached, "max_prefill_tokens": options.chunk,
                "attention": options.attention, "growth_tokens": options.output_len,
                "num_pages": -(-num_tokens // page_size) + 2,
                "collective": options.collective,
            },
            "spec": spec,
            "tp": options.tp,
        }
    )  # fmt: skip
    engine = led_engine(config)
    shutil.rmtree(place)
    return engine


class Bench:
    """An engine with the scheduler that drives it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scheduler = DecodeScheduler(engine.book, engine.config.engine, frozenset())
        self.path = ""  # of the last step that was waited for
        self.num_admitted = 0
        self.widths = engine.config.spec.all_widths
        words = -(-engine.spec.vocab_size // 32)
        most = int(engine.config.engine.max_num_reqs)
        num = max(width * max_rows(width, most) for width in self.widths)
        generator = torch.Generator().manual_seed(0)
        lines = torch.randint(-(2**31), 2**31, (1 + num, words), generator=generator)
        lines[0] = -1
        self._masks = Masks(lines.to(torch.int32), torch.arange(1, 1 + num))

    def masks(self, num_rows: int) -> Masks:
        """One for each row, on the host; about half of the vocabulary is allowed."""
        return Masks(self._masks.words[: 1 + num_rows], self._masks.line[:num_rows])

    @torch.inference_mode()
    def tail_mib(self, batch: int, sampling: Sampling, width: int) -> float:
        """Peak of what one tail allocates on the device, op by op; 0 on a CPU or with ranks."""
        loaded, dev = self.engine.runner.loaded, self.engine.runner.loaded.state.device
        if dev.type == "cpu" or self.engine.ranks is not None:
            return 0.0
        weight = loaded.model.head.weight
        hidden = torch.zeros(batch * width, weight.shape[1], dtype=weight.dtype, device=dev)
        rows = torch.zeros(batch, dtype=torch.int64, device=dev)
        position = rows.new_zeros(batch * width)
        sampled = SampledRows(rows, position, torch.zeros_like(rows, dtype=torch.bool), width)
        plan = Plan(
            0, tail=tail_of([sampling]), penalized=sampling.changes_logits,
            num_logprobs=sampling.logprobs, width=width,
        )  # fmt: skip
        masks = self.masks(batch * width) if sampling.grammar else None
        synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        draw_eagerly(loaded, Decoded(hidden, sampled, None, "", len(hidden)), plan, masks)
        synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    def admit(self, batch: int, prompt_len: int, sampling: Sampling, seed: int) -> list[Req]:
        """Requests with random prompts, to be prefilled by this engine."""
        rng, reqs = random.Random(seed), []
        for number in range(batch):
            tokens = rng.choices(range(self.engine.spec.vocab_size), k=prompt_len)
            self.num_admitted += 1  # of another seed each: simulated acceptance is by seed
            own = msgspec.structs.replace(sampling, seed=self.num_admitted)
            req = Req(str(number), 1, "bench", tokens, prompt_len, own, float("inf"))
            assert self.scheduler.admit(req), "the pool is made for this batch"
            self.scheduler.prefill_locally(req)
            reqs.append(req)
        return reqs

    def generate(
        self, batch: int, prompt_len: int, output_len: int, sampling: Sampling, seed: int
    ) -> float:
        """Seconds from the first launch until each of `batch` requests has its last token."""
        scheduler, engine = self.scheduler, self.engine
        reqs = self.admit(batch, prompt_len, sampling, seed)
        synchronize()
        began = time.perf_counter()
        pending: Step | None = None
        num_left = batch
        while num_left or pending is not None:
            plan = scheduler.plan()
            step = engine.runner.launch(plan) if plan is not None else None
            if pending is not None:
                drawn = engine.runner.settle(pending)
                self.path = pending.path
                for req, _, _, reason in scheduler.settle(pending.plan.step, drawn):
                    if reason is not None:
                        scheduler.finish(req)
                        num_left -= 1
            if step is not None and step.plan.masked:
                engine.runner.launch_tail(
                    step, self.masks(len(step.plan.sampled_rows) * step.plan.width)
                )
            pending = step
        took_s = time.perf_counter() - began
        assert all(len(req.tokens) == prompt_len + output_len for req in reqs)
        return took_s


def backends(text: str) -> str | dict[str, str]:
    """`engine.attention` from the command line."""
    return dict(each.split("=", 1) for each in text.split(",")) if "=" in text else text


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def step_times(
    bench: Bench, batch: int, prompt_len: int, sampling: str, options: argparse.Namespace
) -> list[float]:
    """Milliseconds a step, one figure a repetition."""
    found = []
    for number in range(options.repeat + 1):
        took = {
            length: bench.generate(
                batch, prompt_len, length,
                Sampling(length, ignore_eos=True, seed=number, **SAMPLINGS[sampling]),
                seed=0 if options.cached else number,
            )
            for length in (SHORT_OUTPUT, options.output_len)
        }  # fmt: skip
        slope = (took[options.output_len] - took[SHORT_OUTPUT]) / (
            options.output_len - SHORT_OUTPUT
        )
        found.append(1e3 * slope)
    return found[1:]  # the first one warms up


def read_bandwidth(num_bytes: int = 4 << 30) -> float:
    """Bytes per second at which this device reads memory once: the best of several sums."""
    if not torch.cuda.is_available():
        num_bytes = 256 << 20
    source = torch.ones(num_bytes // 8, dtype=torch.int64, device=device())
    best = float("inf")
    for _ in range(10):
        synchronize()
        began = time.perf_counter()
        source.sum()
        synchronize()
        best = min(best, time.perf_counter() - began)
    return num_bytes / best


def device() -> str:
    """Where engines run here."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def floor_ms(engine: Engine, batch: int, mean_len: float, bandwidth: float) -> float:
    """Milliseconds to read the weights a step needs, and KV of `batch` requests of mean_len."""
    model = engine.runner.loaded.model
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if model.head is not model.embedding:
        weights -= model.embedding.weight.numel() * model.embedding.weight.element_size()
    per_token = engine.layout.page_bytes / int(engine.config.kv.page_size)
    return 1e3 * (weights + batch * mean_len * per_token) / bandwidth


def product_speed(dtype: torch.dtype) -> float:
    """Operations per second of one large product: the best of several."""
    size = 8192 if torch.cuda.is_available() else 512
    a, b = (torch.ones(size, size, dtype=dtype, device=device()) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        synchronize()
        began = time.perf_counter()
        torch.mm(a, b)
        synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def prefill_floor_ms(engine: Engine, num_tokens: int, bandwidth: float, speed: float) -> float:
    """Milliseconds to read all weights but the embedding's, or to multiply with them.

    In long steps the last layer multiplies next to no rows once it has stored its KV.
    """
    model = engine.runner.loaded.model
    layers = sum(p.numel() for p in model.layers.parameters())
    last, head = model.layers[-1], model.head.weight
    assert isinstance(last, DecoderLayer)
    after = (last.attention.output, last.feed_forward)
    spared = sum(p.numel() for module in after for p in module.parameters())
    products = (layers - spared * (num_tokens >= LONG_STEP_TOKENS)) * num_tokens + head.numel()
    read_s = (layers + head.numel()) * head.element_size() / bandwidth
    return 1e3 * max(read_s, 2 * products / speed)


def first_token_ms(
    bench: Bench,
    graphs: dict[str, ChunkGraphs],
    batch: int,
    num_tokens: int,
    options: argparse.Namespace,
) -> dict[str, dict[str, Any]]:
    """Milliseconds until `batch` prompts have their first tokens, and how the last was launched.

    The graphs take turns: a GPU at the limit of its power is slower the longer it works.
    """
    times: dict[str, list[float]] = {name: [] for name in graphs}
    paths: dict[str, str] = {}
    for number in range(options.repeat + 2):
        sampling = Sampling(1, ignore_eos=True, seed=number, **SAMPLINGS[options.sampling])
        for name, chunks in graphs.items():
            use(bench.engine, chunks)
            took_s = bench.generate(batch, num_tokens, 1, sampling, seed=number)
            times[name].append(1e3 * took_s)
            paths[name] = bench.path
    return {
        # the first ones warm up
        name: {"path": paths[name], "median_ms": statistics.median(of[2:]), "times_ms": of[2:]}
        for name, of in times.items()
    }


def use(engine: Engine, chunks: ChunkGraphs) -> None:
    """Launch the engine's chunks by these."""
    engine.runner.graphs = dataclasses.replace(engine.runner.graphs, chunks=chunks)


def graphs_of(engine: Engine, options: argparse.Namespace) -> dict[str, ChunkGraphs]:
    """The engine's own launch of chunks, those of `--graph` that it is not, and eager; by name."""
    loaded = engine.runner.loaded
    found = {str(loaded.config.graph.prefill): engine.runner.graphs.chunks}
    for name in options.graph.split(",")[1:]:
        graph = GraphConfig.model_validate({"prefill": name, "decode": "eager"})
        config = loaded.config.model_copy(update={"graph": graph})
        found[name] = build_graphs(dataclasses.replace(loaded, config=config)).chunks
        found[name].capture()
    return {"eager": EagerChunks(loaded)} | found


def measure_prefill(
    bench: Bench, batches: list[tuple[int, int]], options: argparse.Namespace, bandwidth: float
) -> list[dict[str, Any]]:
    """A row for each number of tokens; prints them."""
    engine = bench.engine
    own, graphs = engine.runner.graphs.chunks, graphs_of(engine, options)
    speed = product_speed(engine.runner.loaded.model.embedding.weight.dtype)
    print(f"{speed / 1e12:.1f} T operations/s; milliseconds until the first token is on the host")
    heads = "".join(f"{name:>14}      min      max" for name in graphs)
    print(f"batch tokens{heads}    floor")
    rows: list[dict[str, Any]] = []
    for batch, _ in batches:
        for num_tokens in options.tokens:
            found, figures = first_token_ms(bench, graphs, batch, num_tokens, options), ""
            for each in found.values():
                times = each["times_ms"]
                figures += f"{each['median_ms']:14.3f}{min(times):9.3f}{max(times):9.3f}"
            floor = prefill_floor_ms(engine, batch * num_tokens, bandwidth, speed)
            paths = ", ".join(each["path"] for each in found.values())
            print(f"{batch:5}{num_tokens:7}{figures}{floor:9.3f}  {paths}", flush=True)
            rows.append({"batch": batch, "tokens": num_tokens, "floor_ms": floor, "graphs": found})
    if options.profile:
        one = Sampling(1, ignore_eos=True, temperature=0.0)
        for name, graph in graphs.items():
            use(engine, graph)
            path = options.profile.with_suffix(f".{name}{options.profile.suffix}")
            profile(path, lambda: bench.generate(1, options.tokens[0], 1, one, seed=99))
    use(engine, own)
    for graph in graphs.values():
        if graph is not own:
            graph.close()
    return rows


def measure_decode(
    bench: Bench, batches: list[tuple[int, int]], options: argparse.Namespace, bandwidth: float
) -> list[dict[str, Any]]:
    """A row for each batch, (requests, tokens of each prompt); prints them."""
    engine = bench.engine
    rows: list[dict[str, Any]] = []
    print("milliseconds a step\nbatch  prompt   median      min      max    floor  tail MiB")
    wanted = [(*batch, options.sampling) for batch in batches] + options.also
    for (batch, length, sampling), width in itertools.product(wanted, options.widths):
        if batch > max_rows(width, batch):
            continue
        bench.scheduler.widths = WidthPolicy((width,))
        times = step_times(bench, batch, length, sampling, options)
        floor = floor_ms(engine, batch, length + options.output_len / 2, bandwidth)
        median = statistics.median(times)
        mib = bench.tail_mib(batch, Sampling(1, **SAMPLINGS[sampling]), width)
        figures = f"{median:9.3f}{min(times):9.3f}{max(times):9.3f}{floor:9.3f}{mib:10.1f}"
        windows = "" if width == 1 else f", windows of {width}"
        print(f"{batch:5}{length:8}{figures}  {sampling}{windows}", flush=True)
        rows.append(
            {
                "batch": batch, "prompt_len": length, "sampling": sampling, "median_ms": median,
                "width": width, "times_ms": times, "floor_ms": floor, "path": bench.path,
                "tail_mib": mib,
            }
        )  # fmt: skip
    if options.profile:
        sampling = Sampling(20, ignore_eos=True, temperature=0.0)
        profile(options.profile, lambda: bench.generate(batches[-1][0], 16, 20, sampling, seed=99))
    return rows


def ints(text: str) -> list[int]:
    """A list from the command line."""
    return [int(part) for part in text.split(",")]


def shape(text: str, options: argparse.Namespace) -> tuple[int, int]:
    """(requests, tokens of each prompt): "8", with options.prompt_len each, or "8x32768"."""
    batch, _, length = text.partition("x")
    return int(batch), int(length or options.prompt_len)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What `build` reads, but for the phase."""
    add = parser.add_argument
    add("--model-config", type=Path, help="a config.json")
    add("--load-format", default="dummy", choices=("dummy", "safetensors"))
    add("--dtype", default="", help="default: as the config says; float32 on CPU")
    add("--prompt-len", type=int, default=512)
    add("--output-len", type=int, default=128)
    add("--cached", action="store_true", help="prompts are computed once and found in the cache")
    add("--page-size", type=int, default=64)
    add("--chunk", type=int, default=4096, help="prompt tokens of one prefill step")
    add("--attention", type=backends, default="auto", help="a name, or prefill=NAME,decode=NAME")
    add("--eager", action="store_true", help="no graphs")
    add("--tp", type=int, default=1, help="ranks, a process and a GPU each")
    add("--collective", default="auto", help="of these: gloo, nccl, custom")
    add("--drafter", type=Path, help="a config.json of a drafter, which gets random weights")
    add("--widths", type=ints, default=[1], help="of verify windows: 1,2,4,8,16")
    add(
        "--graph",
        default="",
        help="of engine.graph; several for chunks: piecewise,compiled",
    )


def main() -> None:
    """Measure every batch, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_engine_options(parser)
    parser.add_argument("--phase", default="decode", choices=("decode", "prefill"))
    parser.add_argument("--tokens", default="16,64,128,256,512,1024,2048,8192", help="of a prompt")
    parser.add_argument(
        "--batch", default="1,8,32", help="requests at a time; 8x32768: of so many tokens"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--sampling", default="greedy", choices=sorted(SAMPLINGS))
    parser.add_argument("--also", default="", help="more of it: top_p@32,random")
    parser.add_argument("--profile", type=Path, help="chrome trace of some steps")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.model_config is None:
        parser.error("--model-config is required")
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    batches = [shape(part, options) for part in options.batch.split(",")]
    options.also = [
        (*batch, name)
        for name, _, at in (part.partition("@") for part in options.also.split(",") if part)
        for batch in ([shape(at, options)] if at else batches)
    ]
    options.tokens = ints(options.tokens)
    if options.phase == "prefill":
        options.output_len = SHORT_OUTPUT
        batches = [(batch, max(options.tokens)) for batch, _ in batches]
    largest = batches + [(batch, length) for batch, length, _ in options.also]
    options.prompt_len = max(length for _, length in largest)
    num_reqs, num_tokens = max(batch for batch, _ in largest), max(b * n for b, n in largest)
    names = {options.sampling, *(name for _, _, name in options.also)}
    changes = any(Sampling(1, **SAMPLINGS[name]).changes_logits for name in names)
    bench = Bench(build(options, num_reqs, num_tokens, num_reqs if changes else 1))
    engine = bench.engine
    with torch.inference_mode():
        bandwidth = read_bandwidth()
        print(f"read bandwidth {bandwidth / 1e9:.0f} GB/s")
    measure = {"decode": measure_decode, "prefill": measure_prefill}[options.phase]
    rows = measure(bench, batches, options, bandwidth)
    if options.json:
        about = {k: str(v) for k, v in vars(options).items()}
        whole = {
            "options": about, "machine": machine(), "torch": torch.__version__,
            "read_bytes_per_s": bandwidth, "graph": engine.config.engine.graph.model_dump(),
            "attention": engine.config.engine.attention.model_dump(), "steps": rows,
        }  # fmt: skip
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    engine.close()


def profile(path: Path, work: Callable[[], object]) -> None:
    """Trace `work`, the second time that it is done."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    work()
    with torch.profiler.profile(activities=activities) as trace:
        work()
    trace.export_chrome_trace(str(path))


if __name__ == "__main__":
    main()
