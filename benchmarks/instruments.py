"""An engine that a benchmark builds, drives and looks into.

What benchmarks of whole steps know of `worker` stands here and in `benchmarks.ranks`.
"""

import argparse
import dataclasses
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from benchmarks.output import ints
from benchmarks.ranks import led_engine
from benchmarks.timing import synchronize
from worker.api import Sampling
from worker.cache.prefix import PrefixTree
from worker.cache.snapshots import Snapshots
from worker.config import WorkerConfig
from worker.config.checkpoint.delta_shape import DELTA_BLOCK
from worker.forward.draws import Masks
from worker.model.decoder import DecoderLayer
from worker.model.experts import Experts
from worker.plan import LONG_STEP_TOKENS, Plan, max_rows
from worker.run.base import ChunkGraphs
from worker.run.eager import EagerChunks
from worker.run.flight import MaskedStep, Step
from worker.schedule.decode import DecodeScheduler
from worker.schedule.queues import DecodeQueues
from worker.schedule.req import Req
from worker.start.engine import Engine
from worker.weights.base import Matrix

FP8 = {  # as Qwen3-*-FP8 has it
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"],
}  # fmt: skip


def _four(form: str, group: int, kind: str = "int") -> dict[str, Any]:
    weights = {"num_bits": 4, "type": kind, "strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }  # fmt: skip


WEIGHTS: dict[str, dict[str, Any]] = {
    "fp8": FP8, "int4": _four("pack-quantized", 128), "int4-32": _four("pack-quantized", 32),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "mxfp4": _four("mxfp4-pack-quantized", 32, "float"),
    "nvfp4": _four("nvfp4-pack-quantized", 16, "float"),
}  # fmt: skip
ACCEPT = "tokens of a window that count, on average; below 1: the share of drafts; SIMULATED"

Watch = Callable[[Plan, bool], None]  # what was launched, and whether every request still runs


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What `build` reads, but for the phase."""
    add = parser.add_argument
    add("--model-config", type=Path, required=True, help="a config.json")
    add("--layers", type=int, default=0, help="so many of the model's, from the first on; 0: all")
    add("--load-format", default="dummy", choices=("dummy", "safetensors"))
    add("--dtype", default="auto", help="auto: as the config says; float32 on CPU")
    add("--prompt-len", type=int, default=512)
    add("--output-len", type=int, default=128)
    add("--cached", action="store_true", help="prompts are computed once and found in the cache")
    add("--snapshots", type=ints, default=[-1], help="by turns, of an empty cache; -1: as it is")
    add("--moved", type=int, default=0, help="by turns, while pages come from host memory and go")
    add("--page-size", type=int, default=64)
    add("--kv-dtype", default="auto", help="as kv.dtype")
    add("--state-dtype", default="float32", help="as kv.state_dtype")
    add("--weights", default="", choices=("", *WEIGHTS), help="fp8: in blocks of 128 x 128")
    add("--chunk", type=int, default=4096, help="prompt tokens of one prefill step")
    add("--attention", type=backends, default="auto", help="a name, or prefill=NAME,decode=NAME")
    add("--eager", action="store_true", help="no graphs")
    add("--tp", type=int, default=1, help="ranks, a process and a GPU each")
    add("--collective", default="auto", help="of these: gloo, nccl, custom")
    add("--drafter", type=Path, help="a config.json of a drafter, which gets random weights")
    add("--head-dtype", default="auto", help="as spec.head_dtype")
    add("--widths", type=ints, default=[1], help="of verify windows: 1,2,4,8,16")
    add("--accept", type=float, default=1.0, help=ACCEPT)
    add("--graph", default="", help="of engine.graph, for the phase")


def backends(text: str) -> str | dict[str, str]:
    """`engine.attention` from the command line."""
    return dict(part.split("=", 1) for part in text.split(",")) if "=" in text else text


def build(
    options: argparse.Namespace, max_batch: int, max_tokens: int = 0, penalty_rows: int = 1
) -> Engine:
    """A decode engine with random weights of the given shape.

    max_tokens: of all prompts of a batch together, if not each has options.prompt_len.
    """
    with tempfile.TemporaryDirectory(prefix="kvlane-bench-") as folder:
        place = Path(folder)
        config = json.loads(options.model_config.read_text())
        config |= {"quantization_config": WEIGHTS[options.weights]} if options.weights else {}
        config |= {"num_hidden_layers": options.layers} if options.layers else {}
        (place / "config.json").write_text(json.dumps(config))
        simulated = "simulate_accept_len" if options.accept >= 1 else "simulate_accept_share"
        spec: dict[str, Any] = {"widths": options.widths, simulated: options.accept}
        if options.drafter is not None:
            spec |= _drafter(options.drafter, place / "drafter")
            spec["head_dtype"] = options.head_dtype
        page_size, kept = options.page_size, max(options.snapshots)
        per_req = options.output_len + 8 + 2 * max(options.widths) + 2 * page_size
        num_tokens = max_batch * per_req + (max_tokens or max_batch * options.prompt_len)
        model = {
            "path": str(place), "load_format": options.load_format, "dtype": options.dtype,
            "max_model_len": options.prompt_len + options.output_len + 8,
        }  # fmt: skip
        engine = {
            "max_num_reqs": max_batch, "penalty_rows": penalty_rows, "graph": _graph(options),
            "prefix_cache": options.cached or kept >= 0, "max_prefill_tokens": options.chunk,
            "attention": options.attention, "growth_tokens": options.output_len,
            "num_pages": -(-num_tokens // page_size) + 2 + 2 * options.moved,
            "collective": options.collective,
        }  # fmt: skip
        config = {
            "role": "decode", "model": model, "engine": engine, "spec": spec, "tp": options.tp,
            "kv": {
                "page_size": page_size, "dtype": options.kv_dtype,
                "state_dtype": options.state_dtype,
            },
        }  # fmt: skip
        config["kv"] |= {"snapshots": kept} if kept >= 0 else {}
        return led_engine(WorkerConfig.model_validate(config))


def _drafter(config: Path, place: Path) -> dict[str, str]:
    """`spec` of a drafter of that shape, whose directory is made at `place`."""
    place.mkdir()
    shutil.copy(config, place / "config.json")
    is_block = json.loads(config.read_text())["architectures"] == ["DFlashDraftModel"]
    return {"drafter": "dflash" if is_block else "chain", "path": str(place)}


def _graph(options: argparse.Namespace) -> str | dict[str, str]:
    """`engine.graph`: graphs of nothing but what is measured."""
    if options.eager:
        return "eager"
    graphs = {"prefill" if options.phase == "decode" else "decode": "eager"}
    return graphs | ({options.phase: options.graph} if options.graph else {})


class Bench:
    """An engine with the scheduler that drives it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        queues = DecodeQueues(engine.book, engine.config.engine, grain=engine.shape.grain)
        self.scheduler = DecodeScheduler(queues, frozenset())
        self.path = ""  # of the last step that was waited for
        self.found: tuple[int, int] = (0, 0)  # of the last batch's prompts: cached, not computed
        self._num_admitted = 0
        words = -(-engine.shape.vocab_size // 32)
        most = int(engine.config.engine.max_num_reqs)
        num = max(width * max_rows(width, most) for width in engine.config.spec.all_widths)
        generator = torch.Generator().manual_seed(0)
        lines = torch.randint(-(2**31), 2**31, (1 + num, words), generator=generator)
        lines[0] = -1
        self._masks = Masks(lines.to(torch.int32), torch.arange(1, 1 + num))

    def admit(self, batch: int, prompt_len: int, sampling: Sampling, seed: int) -> list[Req]:
        """Requests with random prompts, to be prefilled by this engine."""
        vocabulary, reqs = range(self.engine.shape.vocab_size), list[Req]()
        for number in range(batch):  # longer prompts of a seed begin as its shorter ones
            tokens = random.Random(f"{seed} {number}").choices(vocabulary, k=prompt_len)
            self._num_admitted += 1  # of another seed each: simulated acceptance is by seed
            own = msgspec.structs.replace(sampling, seed=self._num_admitted)
            req = Req(str(number), 1, "bench", tokens, prompt_len, own, float("inf"))
            assert self.scheduler.queues.admit(req), "the pool is made for this batch"
            self.scheduler.queues.prefill_locally(req)
            reqs.append(req)
        matched = sum(req.num_computed_tokens for req in reqs)
        self.found = matched, sum(req.num_planned_tokens for req in reqs)
        return reqs

    def generate(
        self, batch: int, prompt_len: int, sampling: Sampling, seed: int, watch: Watch | None = None
    ) -> float:
        """Seconds from the first launch until each of `batch` requests has its last token.

        Step n + 1 is launched before step n is settled, after which `watch` is called.
        """
        scheduler, engine = self.scheduler, self.engine
        reqs = self.admit(batch, prompt_len, sampling, seed)
        synchronize()
        began = time.perf_counter()
        pending: Step | None = None
        num_left = batch
        while num_left or pending is not None:
            plan = scheduler.plan()
            step = None if plan is None else engine.runner.launch(plan)
            if pending is not None:
                drawn, _, self.path, _ = engine.runner.settle(pending)
                for req, _, _, reason in scheduler.settle(pending.plan.step, drawn):
                    if reason is not None:
                        scheduler.queues.finish(req)
                        num_left -= 1
                if watch is not None:
                    watch(pending.plan, num_left == batch)
            if isinstance(step, MaskedStep):
                num = len(step.plan.sampled_rows) * step.plan.width
                words, line = self._masks  # about half of the vocabulary is allowed
                step = engine.runner.launch_tail(step, Masks(words[: 1 + num], line[:num]))
            pending = step
        took_s = time.perf_counter() - began
        assert all(len(req.tokens) == prompt_len + sampling.max_tokens for req in reqs)
        return took_s

    def keep_snapshots(self, num: int) -> None:
        """From now on so many, and the cache is empty; below 0 nothing changes."""
        book = self.engine.book
        if num < 0:
            return
        book.forget()
        slots = range(book.num_slots + 1, book.num_slots + 1 + num)
        book.snapshots = Snapshots(slots, book.snapshots.grid, book.page_size)
        book.tree = PrefixTree(book.page_size, book.span, book.snapshots.drop)

    def launch_chunks_by(self, chunks: ChunkGraphs) -> None:
        """Launch prompts' chunks by these graphs from now on."""
        runner = self.engine.runner
        runner.graphs = dataclasses.replace(runner.graphs, chunks=chunks)

    def chunk_graphs(self) -> dict[str, ChunkGraphs]:
        """Eager, and the engine's own launch of chunks, by name."""
        loaded, own = self.engine.runner.loaded, self.engine.runner.graphs.chunks
        return {"eager": EagerChunks(loaded), str(loaded.config.graph.prefill): own}


def expert_steps(engine: Engine) -> tuple[int, int]:
    """(experts that had tokens, summed over steps and layers; steps of all layers) until now."""
    loads = [each.load[1] for each in engine.runner.loaded.model.experts]
    return sum(int(load[:-1].sum()) for load in loads), sum(int(load[-1]) for load in loads)


def decode_floor_ms(
    engine: Engine, batch: int, mean_len: float, bandwidth: float, distinct: float = 0.0
) -> float:
    """Milliseconds to read the weights a step needs, and KV of `batch` requests of mean_len, and to
    read and write their states.

    distinct: experts of a layer that had tokens, on average over the steps.
    """
    model = engine.runner.loaded.model
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    for each in model.modules():
        if isinstance(each, Experts):
            held = *each.gate_up.parameters(), *each.down.parameters()
            stacks = sum(p.numel() * p.element_size() for p in held)
            weights -= stacks * (1 - distinct / each.held.count)
    if model.head is not model.embedding:
        weights -= model.embedding.weight.numel() * model.embedding.weight.element_size()
    per_token = engine.layout.page_bytes / int(engine.config.kv.page_size)
    if masks := model.shape.masks:
        mean_len = sum(min(mask.window or mean_len, mean_len) for mask in masks) / len(masks)
    state = 0 if engine.layout.state is None else 2 * engine.layout.state.slot_bytes
    return 1e3 * (weights + batch * (mean_len * per_token + state)) / bandwidth


def _multiplied(module: nn.Module) -> int:
    """Weights that a token is multiplied by: of experts, those of its own alone."""
    total = sum(p.numel() for p in module.parameters())
    for each in module.modules():
        if isinstance(each, Matrix):
            total += each.parts.num_numbers - sum(p.numel() for p in each.parameters())
        elif isinstance(each, Experts):
            stacks = each.gate_up.parts.num_numbers + each.down.parts.num_numbers
            total -= stacks - stacks * each.shape.top_k // each.held.count
    return total


def prefill_floor_ms(
    engine: Engine, batch: int, prompt_len: int, bandwidth: float, speed: float
) -> float:
    """Milliseconds to read all weights but the embedding's, or for the products of a step of
    `batch` prompts: with the weights, of attention, of delta nets in blocks.

    In long steps the last layer multiplies next to no rows once it has stored its KV.
    """
    model, num_tokens = engine.runner.loaded.model, batch * prompt_len
    layers, stored = _multiplied(model.layers), sum(p.nbytes for p in model.layers.parameters())
    last, head = model.layers[-1], model.head.weight
    assert isinstance(last, DecoderLayer)
    after = (last.attention.output, last.feed_forward)
    spared = sum(map(_multiplied, after))
    products = (layers - spared * (num_tokens >= LONG_STEP_TOKENS)) * num_tokens + head.numel()
    heads = model.attended.num_heads * model.attended.head_dim
    products += (len(model.layers) - len(model.states)) * heads * prompt_len * num_tokens
    if (delta := model.shares.get("delta")) is not None:
        _, _, keys, values = delta
        a_token = DELTA_BLOCK * (3 * keys + 2 * values) + 3 * keys * values  # of a value head
        products += len(model.states) * delta.value_heads * a_token * num_tokens
    read_s = (stored + head.nbytes) / bandwidth
    return 1e3 * max(read_s, 2 * products / speed)
