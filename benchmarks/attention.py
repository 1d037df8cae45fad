"""Attention of one layer, every backend, over as many layers as a model has, in one graph.

    python -m benchmarks.attention --batch 1,8,32,128,256 --context 576 --json out.json
    python -m benchmarks.attention --prefill 512,2048,8192 --json out.json

Every layer reads KV of its own and pages lie in random order, so the L2 holds next to none of it.
For decode the figure to read is the KV's bytes over the time, against the read bandwidth of the
same run; for prefill (one whole prompt, causal) the floating-point operations over the time.
`--query-len 4` times verify windows, `--lengths IN,OUT` (see benchmarks.load) rows as a load has
them. Plans that are made on the host stay outside the graph. On a
CPU (`--model tiny --backends reference`) it checks that everything runs; the times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from benchmarks.engine import read_bandwidth
from benchmarks.gemm_step import spread, times_ms
from benchmarks.load.lengths import pair
from benchmarks.load.result import machine
from worker.attention.backends import ATTENTION
from worker.attention.base import AttentionShape
from worker.cache.layout import KVLayout, KVRegion
from worker.cache.pool import KVPool
from worker.errors import Unsupported
from worker.forward.batch import Batch, HostLengths
from worker.forward.context import forward_context
from worker.registry import resolve

Pass = Callable[[], Tensor]  # all layers; returns the last layer's result


@dataclass(frozen=True, slots=True)
class Shape:
    """The attention of a model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int


MODELS = {"qwen3-8b": Shape(36, 32, 8, 128), "tiny": Shape(2, 4, 2, 32)}


@dataclass(slots=True)
class Scene:
    """One batch over a full pool."""

    shape: Shape
    pool: KVPool
    batch: Batch
    q: Tensor
    contexts: list[int]  # keys of each request

    @property
    def device(self) -> str:
        """Its type."""
        return self.q.device.type

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.shape.head_dim**-0.5

    def kv_bytes(self) -> int:
        """Keys and values that one pass has to read."""
        each = self.shape.kv_heads * self.shape.head_dim * self.q.element_size() * 2
        return sum(self.contexts) * each * self.shape.layers

    def flops(self) -> float:
        """Floating-point operations of one pass: two products over all keys that a row may see."""
        width = self.batch.max_query_len
        pairs = sum(width * (each - width) + width * (width + 1) / 2 for each in self.contexts)
        return 4 * self.shape.head_dim * self.shape.layers * self.shape.heads * pairs


def in_flight(lengths: str, num_reqs: int) -> list[int]:
    """Keys of so many requests of these lengths, `IN,OUT`, seen at some moment of their answers.

    Long answers are seen for longer, so more often.
    """
    rng, drawn = numpy.random.default_rng(0), pair(lengths, "--lengths")
    all_drawn = [drawn(rng) for _ in range(64 * num_reqs)]
    answers = numpy.array([num_out for _, num_out in all_drawn])
    seen = rng.choice(len(all_drawn), num_reqs, p=answers / answers.sum())
    return [all_drawn[at][0] + int(rng.integers(1, answers[at] + 1)) for at in seen]


def scene_of(args: argparse.Namespace, num_reqs: int, context: int, width: int) -> Scene:
    """Requests of `context` tokens, the last `width` new, on random pages of a pool for them."""
    shape, device = MODELS[args.model], torch.device(args.device)
    dtype = getattr(torch, args.dtype)
    contexts = in_flight(args.lengths, num_reqs) if args.lengths else [context] * num_reqs
    pages = -(-max(contexts) // args.page_size)
    region = KVRegion(
        "target", shape.layers, shape.kv_heads, shape.head_dim, 1, args.page_size, args.dtype
    )
    pool = KVPool(KVLayout((region,)), num_reqs * pages + 1, device)
    torch.manual_seed(0)
    for layer_id in range(shape.layers):
        for cache in pool.layer(layer_id):
            cache.normal_()
    order = (torch.randperm(num_reqs * pages) + 1).int().view(num_reqs, pages).to(device)
    num_tokens = num_reqs * width
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * width
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=device)
    bound = max(*contexts, args.bound)
    host = HostLengths([width] * num_reqs, contexts)
    batch = Batch(ids, ids, ids, starts, lengths, order, num_reqs, num_tokens, width, bound, host)
    q = torch.randn(num_tokens, shape.heads, shape.head_dim, device=device).to(dtype)
    return Scene(shape, pool, batch, q, contexts)


def ours(scene: Scene, name: str) -> Pass:
    """A backend: one plan, then every layer, as in a step."""
    shape, batch = scene.shape, scene.batch
    attention: Any = resolve("attention backend", name, ATTENTION)(
        scene.pool, AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, scene.scale)
    )

    planned = None if attention.static_plan else attention.plan(batch)

    def run() -> Tensor:
        with forward_context(batch, attention, planned or attention.plan(batch)):
            for layer_id in range(shape.layers):
                out = attention.forward(scene.q, layer_id)
        return out

    return run


def passes(scene: Scene, names: list[str]) -> dict[str, Pass]:
    """What can run here, the reference first."""
    found: dict[str, Pass] = {}
    for name in ["reference", *(name for name in names if name != "reference")]:
        try:
            found[name] = ours(scene, name)
        except Unsupported as refusal:
            print(f"{name}: {refusal}")
    return found


def measure(scene: Scene, args: argparse.Namespace) -> dict[str, Any]:
    """Times of every backend for one batch, per layer, and how far it is from the reference."""
    batch = scene.batch
    row: dict[str, Any] = {"batch": batch.num_reqs, "query_len": batch.max_query_len}
    row |= {"context": round(statistics.mean(scene.contexts)), "longest": max(scene.contexts)}
    row["backends"] = {}
    expected: Tensor | None = None
    for name, run in passes(scene, args.backends.split(",")).items():
        out = run().float()
        expected = out if expected is None else expected
        if name not in args.backends.split(","):
            continue
        times = times_ms(run, args.device, args.replays)
        median_ms = statistics.median(times)
        row["backends"][name] = spread(times) | {
            "layer_us": round(median_ms * 1e3 / scene.shape.layers, 2),
            "gb_s": round(scene.kv_bytes() / median_ms / 1e6, 1),
            "tflop_s": round(scene.flops() / median_ms / 1e9, 1),
            "max_error": float((out - expected).abs().max()),
        }
    return row


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-8b")
    parser.add_argument("--batch", default="1,8,32,128,256", help="requests, by commas")
    parser.add_argument("--context", type=int, default=576, help="KV length of each")
    parser.add_argument("--lengths", default="", help="IN,OUT of requests in flight instead")
    parser.add_argument("--query-len", type=int, default=1, help="query rows of each")
    parser.add_argument("--prefill", default="", help="prompts of these lengths instead, by commas")
    parser.add_argument("--bound", type=int, default=0, help="max_seq_len_ub, if higher")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--backends", default="triton,flashinfer", help="by commas")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure, print a table, write the figures."""
    args = parsed()
    read_gb_s = round(read_bandwidth() / 1e9, 1)
    print(f"reads {read_gb_s} GB/s")
    report: dict[str, Any] = {"rows": [], "read_gb_s": read_gb_s, "machine": machine()}
    report |= {key: str(value) for key, value in vars(args).items() if key != "json"}
    cases = [(num, args.context, args.query_len) for num in map(int, args.batch.split(","))]
    if args.prefill:
        assert not args.lengths, "--prefill gives lengths itself"
        cases = [(1, num, num) for num in map(int, args.prefill.split(","))]
    for case in sorted(cases, reverse=True):
        scene = scene_of(args, *case)
        row = measure(scene, args)
        report["rows"].append(row)
        for name, found in row["backends"].items():
            share = found["gb_s"] / read_gb_s
            found["share"] = round(share, 4)
            print(
                f"batch {case[0]:3d} rows {case[2]:4d} {name:14s} {found['layer_us']:8.2f} us a "
                f"layer {found['gb_s']:7.1f} GB/s {share:6.1%} {found['tflop_s']:6.1f} TFLOP/s  "
                f"error {found['max_error']:.1e}",
                flush=True,
            )
        scene.pool.close()
        del scene
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
