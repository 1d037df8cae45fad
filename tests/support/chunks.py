"""Chunks of prompts launched as graphs and op by op over the same pages: the laws they share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tests.gpu.sync import no_sync
from tests.support.any_width import AnyWidth
from tests.support.prompts import problem_ids
from tests.support.shallow import shallow
from worker.api import Sampling
from worker.config import WorkerConfig
from worker.forward.batch import Batch
from worker.forward.context import LayerHook, forward_context
from worker.plan import Chunk, Plan
from worker.run.base import BucketCheck, ChunkGraphs, Forward, LoadedModel
from worker.run.chunks import padded_shape
from worker.run.eager import EagerChunks
from worker.run.piecewise import PiecewiseChunks
from worker.schedule.decode import DecodeScheduler
from worker.schedule.queues import DecodeQueues
from worker.schedule.req import Req
from worker.start.build import Place, build_engine
from worker.start.engine import Engine

PAGE_SIZE = 16
ROWS, NUM_PAGES = 12, 400
STEPS = [0]  # launched by all schedulers of `serve`: an allocator wants them to ascend

Layout = Sequence[tuple[int, int]]  # (tokens that were there before, tokens of the chunk)


def build(
    device: str,
    graph: object,
    *,
    role: str = "decode",
    widths: Sequence[int] = (),
    **engine: object,
) -> Engine:
    """An engine in float32, unless `engine` says otherwise: of the bundled model, on a CPU of a
    part of its layers. widths: of windows."""
    dtype = engine.pop("dtype", "float32")
    path = str(shallow(4)) if device == "cpu" else "tiny"
    config = WorkerConfig.model_validate(
        {
            "role": role,
            "model": {"path": path, "dtype": dtype},
            "kv": {"page_size": PAGE_SIZE},
            "engine": {
                "device": device, "graph": graph, "num_pages": NUM_PAGES, "max_num_reqs": ROWS,
                "threads": 1, "prefix_cache": False, **engine,
            },
            "spec": {"widths": list(widths)} if widths else {},
        }
    )  # fmt: skip
    return build_engine(config, Place(f"{role}-0", "1", "127.0.0.1"))


def serve(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    wanted: Sequence[Sampling],
    widths: Sequence[int] = (1,),
) -> tuple[list[list[int]], set[int]]:
    """Decode all prompts to their ends; the answers, and all pages that were ever theirs."""
    eos_ids = frozenset(engine.shape.eos_token_ids)
    queues = DecodeQueues(engine.book, engine.config.engine, grain=engine.shape.grain)
    scheduler = DecodeScheduler(queues, eos_ids)
    scheduler.step = STEPS[0]
    scheduler.widths = AnyWidth(widths, random.Random(3))
    reqs, owned, pending = [], set(), None
    for number, (prompt, sampling) in enumerate(zip(prompts, wanted, strict=True)):
        req = Req(str(number), 1, "t", list(prompt), len(prompt), sampling, float("inf"))
        assert queues.admit(req)
        queues.prefill_locally(req)
        reqs.append(req)
    live = set(reqs)
    while live or pending is not None:
        plan = scheduler.plan()
        step = engine.runner.launch(plan) if plan is not None else None
        owned |= {page for req in live if req.hold for page in req.hold.pages}
        if pending is not None:
            for req, _, _, reason in scheduler.settle(
                pending.plan.step, engine.runner.settle(pending).drawn
            ):
                if reason is not None:
                    queues.finish(req)
                    live.discard(req)
        pending = step
    STEPS[0] = scheduler.step
    return [req.tokens[req.num_prompt_tokens :] for req in reqs], owned


def sampling_of(i: int) -> Sampling:
    if i % 2 == 0:
        return Sampling(40 + i, temperature=0.0)
    return Sampling(40 + i, temperature=0.9, top_p=0.9, top_k=40, seed=i)


def layouts(num_tokens: int, num_reqs: int, prefix: int) -> Layout:
    """`num_tokens` among up to `num_reqs` requests, unevenly; every second one has a prefix."""
    num_reqs = min(num_reqs, num_tokens)
    counts = [num_tokens // num_reqs] * num_reqs
    counts[-1] += num_tokens - sum(counts)
    if num_reqs > 1 and counts[0] > 1:
        counts[0], counts[1] = counts[0] - 1, counts[1] + 1
    return [(prefix if i % 2 == 0 else 0, count) for i, count in enumerate(counts)]


@torch.inference_mode()
def poison(bench: Bench) -> None:
    """Fill every buffer that padding reads or writes with what must never be read."""
    buffers, runner = bench.engine.runner.loaded.buffers, bench.runner
    buffers._chunk.fill_(1 << 40)
    buffers._staging.words.fill_(1 << 20)
    for tables in buffers._tables.values():
        tables.fill_(1 << 20)
    buffers._last_token_rows.fill_(1 << 40)
    runner.embedded.fill_(float("nan"))
    for captured in runner.captured.values():
        captured.made.fill_(float("nan"))


def counts_of(bucket: int) -> list[int]:
    """Numbers of tokens at the edges of a bucket."""
    return sorted({max(1, n) for n in (1, bucket // 2 + 1, bucket - 1, bucket)})


def bits(cache: Tensor) -> Tensor:
    """Its bytes, so that NaNs compare."""
    return cache.view({2: torch.int16, 4: torch.int32}[cache.element_size()])


@dataclass
class Uncaptured:
    """Launches a forward that is not the model's own, without a graph.

    It computes every row to the end; of a long step it then takes the last-token rows, unless
    `every_row`.
    """

    loaded: LoadedModel
    forward: Callable[[Tensor, Tensor], Tensor] | None
    every_row: bool = False

    @torch.inference_mode()
    def launch(self, batch: Batch, on_layer: LayerHook | None = None) -> Forward:
        attention = self.loaded.attention.prefill
        embedded = self.loaded.model.embed(batch.input_ids)
        assert self.forward is not None
        with forward_context(batch, attention, attention.plan(batch), on_layer=on_layer):
            hidden, rows = self.forward(embedded, batch.positions), batch.last_token_rows
        if rows is not None and not self.every_row:
            hidden = hidden.index_select(0, rows)
        return Forward(hidden, "eager")


@dataclass
class Bench:
    """An engine whose chunks are launched both ways."""

    engine: Engine
    eager: EagerChunks | Uncaptured
    runner: PiecewiseChunks
    path: str = ""  # of the last run
    checks: Sequence[BucketCheck] = ()  # of the runner's capture
    history: list[Tensor] = field(default_factory=list[Tensor])  # what `fill` writes

    def use(self, chunks: ChunkGraphs) -> None:
        """Launch the engine's own chunks by these."""
        runner = self.engine.runner
        runner.graphs = replace(runner.graphs, chunks=chunks)

    def caches(self) -> list[Tensor]:
        """Every layer's keys and values, the sink's page left out."""
        pool, num_layers = self.engine.pool, self.engine.shape.num_layers
        return [cache[1:] for i in range(num_layers) for cache in pool.layer(i)]

    def plan(self, layout: Layout) -> Plan:
        """Row i + 1 is request i; token ids differ everywhere."""
        vocab, first, chunks = self.engine.shape.vocab_size, 3, []
        for i, (start, count) in enumerate(layout):
            tokens = tuple((first + 7 * j) % vocab for j in range(count))
            first += 11 * count
            chunks.append(Chunk(i + 1, start, tokens))
        longest = max(start + count for start, count in layout)
        return Plan(0, chunks=tuple(chunks), max_seq_len_ub=longest)

    def set_pages(self, layout: Layout) -> Tensor:
        """Give each row pages of its own, in no order; which pages, [used]."""
        table = self.engine.runner.loaded.state.page_table
        generator = torch.Generator().manual_seed(len(layout))
        num_pages = self.engine.pool.num_pages
        free = (1 + torch.randperm(num_pages - 1, generator=generator)).to(table.device).int()
        table.zero_()
        used = 0
        for i, (start, count) in enumerate(layout):
            num = -(-(start + count) // PAGE_SIZE)
            table[i + 1, :num] = free[used : used + num]
            used += num
        return free[:used]

    def batch(self, layout: Layout, num_rows: int, *, fixed: int = 0) -> Batch:
        """The layout's batch, padded to `num_rows`, requests to the `fixed`-th of `fixed_lens`."""
        self.set_pages(layout)
        buffers = self.engine.runner.loaded.buffers
        fixed_len = (0, *buffers.fixed_lens)[fixed]
        return buffers.chunks(self.plan(layout), num_rows, fixed_len=fixed_len)

    @torch.inference_mode()
    def run(
        self, launch: Callable[..., Forward], layout: Layout, num_rows: int, *, fixed: int = 0
    ) -> tuple[Tensor, ...]:
        """Hidden states of real rows, then the bits of all pages but the sink's."""
        fill(self)
        num_tokens = sum(count for _, count in layout)
        hidden, self.path = launch(self.batch(layout, num_rows, fixed=fixed))
        hidden = hidden[:num_tokens].clone()
        return hidden, *(bits(cache).clone() for cache in self.caches())


def bench_of(engine: Engine, runner: PiecewiseChunks) -> Bench:
    """Of a runner that has captured; no bucket is missing because it did not win."""
    for bucket in runner.buckets:
        with torch.inference_mode():
            runner.capture_bucket(bucket)
        bucket.piecewise, bucket.piecewise_ms = True, 0.0
        kinds = (kind for size, kind in runner.captured if size == bucket.num_tokens and kind)
        bucket.full_ms = dict.fromkeys(kinds, 0.0)
    return Bench(engine, EagerChunks(engine.runner.loaded), runner)


def fill(bench: Bench) -> None:
    """The same history in every slot, which for the pages of others is a canary."""
    with torch.inference_mode():
        for i, cache in enumerate(bench.caches()):
            if i == len(bench.history):
                generator = torch.Generator(cache.device).manual_seed(i)
                bench.history.append(torch.empty_like(cache).normal_(generator=generator))
            cache.copy_(bench.history[i])


def check_laws(
    bench: Bench, buckets: Sequence[int], num_reqs: int, prefix: int, *, fixed: int
) -> None:
    """Equal bit for bit at the same padded shape, and pages of nobody else change."""
    ran: list[tuple[Any, ...]] = []
    for bucket in buckets:
        for count in counts_of(bucket):
            layout = layouts(count, num_reqs, prefix)
            wanted = bench.run(bench.eager.launch, layout, bucket, fixed=fixed)
            found = bench.run(bench.runner.launch, layout, bucket, fixed=fixed)
            assert bench.path == ("graph" if fixed else "piecewise")
            what = f"{count} of {bucket} tokens, {len(layout)} requests, prefix {prefix}"
            assert not wanted[0].isnan().any(), what
            assert torch.equal(wanted[0], found[0]), f"hidden: {what}"
            for a, b in zip(wanted[1:], found[1:], strict=True):
                assert torch.equal(a, b), f"KV: {what}"
            check_canary(bench, layout, found[1:])
            ran.append((layout, bucket, found[0]))
    for layout, bucket, hidden in ran[::-1]:  # each again, behind another one
        assert torch.equal(bench.run(bench.runner.launch, layout, bucket, fixed=fixed)[0], hidden)


def check_padding(bench: Bench, layout: Layout, num_rows: int, *, fixed: int) -> None:
    """What padding reads, and what it leaves in the sink, changes nothing."""
    launch = bench.runner.launch
    clean = bench.run(launch, layout, num_rows, fixed=fixed)
    poison(bench)
    for i in range(bench.engine.shape.num_layers):
        for cache in bench.engine.pool.layer(i):
            cache[0].fill_(float("nan"))
    again = bench.run(launch, layout, num_rows, fixed=fixed)
    assert all(torch.equal(a, b) for a, b in zip(clean, again, strict=True))
    assert not clean[0].isnan().any()


def check_layers(bench: Bench, other: EagerChunks | Uncaptured) -> None:
    """A hook is called for each layer once and in order, by a replay as by `other`."""
    for launch in (other.launch, bench.runner.launch):
        layers: list[int] = []
        fill(bench)
        with torch.inference_mode():
            launch(bench.batch(layouts(20, 3, 5), 32), layers.append)
        assert layers == list(range(bench.engine.shape.num_layers))


def check_texts(bench: Bench) -> None:
    """Prompts in several chunks, alone and together, between decode steps: eager's texts."""
    prompts, wanted = problem_ids(4), [sampling_of(i) for i in range(4)]
    eager, texts = EagerChunks(bench.engine.runner.loaded), []
    clear(bench)
    for chunks in (eager, bench.runner):
        bench.use(chunks)
        texts.append(serve(bench.engine, prompts, wanted)[0])
    bench.use(eager)
    assert texts[0] == texts[1]
    assert all(texts[0])


@torch.inference_mode()
def clear(bench: Bench) -> None:
    bench.engine.runner.loaded.state.page_table.zero_()
    for cache in bench.caches():
        cache.zero_()


def check_memory(bench: Bench, layout: Layout, num_rows: int) -> None:
    """Captures keep no tensor alive: what others allocate changes nothing, nor is it changed."""
    clean = bench.run(bench.runner.launch, layout, num_rows)
    bench.run(bench.runner.launch, layouts(16, 1, 0), 16)
    for _ in range(3):
        torch.cuda.empty_cache()
        held = [
            torch.full((size,), float("nan"), device="cuda")
            for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24)
            for _ in range(20)
        ]
        again = bench.run(bench.runner.launch, layout, num_rows)
        assert all(torch.equal(a, b) for a, b in zip(clean, again, strict=True))
        assert all(bool(each.isnan().all()) for each in held)
        del held


def check_no_wait(bench: Bench, layout: Layout) -> None:
    plan = bench.plan(layout)
    bench.set_pages(layout)
    shape = padded_shape(bench.engine.runner.graphs, plan, hooked=False)
    bench.engine.runner.run(plan, shape)  # warm: allocator, kernels
    torch.cuda.synchronize()
    with no_sync():
        outcome = bench.engine.runner.run(plan, shape)
    assert outcome.path in ("graph", "piecewise")


def check_canary(bench: Bench, layout: Layout, written: Sequence[Tensor]) -> None:
    """Only slots of the chunks differ from the history."""
    fill(bench)
    pages = bench.set_pages(layout)
    table = bench.engine.runner.loaded.state.page_table
    num_pages = bench.engine.pool.num_pages
    mine = torch.zeros(num_pages, PAGE_SIZE, dtype=torch.bool, device=pages.device)
    for i, (start, count) in enumerate(layout):
        at = torch.arange(start, start + count, device=pages.device)
        mine[table[i + 1].long()[at // PAGE_SIZE], at % PAGE_SIZE] = True
    for cache, now in zip(bench.caches(), written, strict=True):
        changed = (bits(cache) != now).any(-1).any(1)  # [pages, page_size]
        assert not (changed & ~mine[1:]).any()
        assert changed[mine[1:]].all()
