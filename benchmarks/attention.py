"""Decode attention of one layer, every backend, over as many layers as a model has, in one graph.

    python -m benchmarks.attention --batch 1,8,32,128,256 --context 576 --json out.json

Every layer reads KV of its own and pages lie in random order, so the L2 holds next to none of it.
The figure to read is the KV's bytes over the time, against the read bandwidth of the same run.
`--query-len 4` times verify windows. On a CPU (`--model tiny`) it checks that everything runs; the
times mean nothing there.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gemm import about, bandwidth, spread, times_ms
from worker.attention.base import ATTENTION
from worker.batch import Batch
from worker.cache.layout import KVLayout, KVRegion
from worker.cache.pool import KVPool
from worker.context import forward_context
from worker.errors import Unsupported
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
    context: int

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
        return self.batch.num_reqs * self.context * each * self.shape.layers


def scene_of(args: argparse.Namespace, num_reqs: int) -> Scene:
    """`num_reqs` rows of `context` tokens each, on random pages of a pool that holds just them."""
    shape, device = MODELS[args.model], torch.device(args.device)
    dtype = getattr(torch, args.dtype)
    pages = -(-args.context // args.page_size)
    region = KVRegion(
        "target", shape.layers, shape.kv_heads, shape.head_dim, 1, args.page_size, args.dtype
    )
    pool = KVPool(KVLayout((region,), "benchmark"), num_reqs * pages + 1, device)
    torch.manual_seed(0)
    for layer_id in range(shape.layers):
        for cache in pool.layer(layer_id):
            cache.normal_()
    order = (torch.randperm(num_reqs * pages) + 1).int().view(num_reqs, pages).to(device)
    width = args.query_len
    num_tokens = num_reqs * width
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * width
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    lengths = torch.full((num_reqs,), args.context, dtype=torch.int32, device=device)
    bound = max(args.context, args.bound)
    batch = Batch(ids, ids, ids, starts, lengths, order, num_reqs, num_tokens, width, bound)
    q = torch.randn(num_tokens, shape.heads, shape.head_dim, device=device).to(dtype)
    return Scene(shape, pool, batch, q, args.context)


def ours(scene: Scene, name: str) -> Pass:
    """A backend of this project: one plan, then every layer, as in a step."""
    shape, batch = scene.shape, scene.batch
    attention: Any = resolve("attention backend", name, ATTENTION)(
        scene.pool, shape.heads, shape.kv_heads, shape.head_dim, scene.scale
    )

    def run() -> Tensor:
        with forward_context(batch, attention, attention.plan(batch)):
            for layer_id in range(shape.layers):
                out = attention.forward(scene.q, None, None, layer_id)
        return out

    return run


def flashinfer(scene: Scene) -> Pass:
    """FlashInfer's decode with tensor cores, planned outside the graph, on the same views."""
    library: Any = importlib.import_module("flashinfer")
    shape, batch = scene.shape, scene.batch
    num_reqs, pages = batch.page_table.shape
    device = scene.q.device
    indptr = torch.arange(num_reqs + 1, dtype=torch.int32, device=device) * pages
    page_size = scene.pool.region().page_size
    last = torch.full((num_reqs,), scene.context - (pages - 1) * page_size, dtype=torch.int32)
    indices = batch.page_table.flatten().contiguous()
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(256 << 20, dtype=torch.uint8, device=device),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.to(device),
    )
    wrapper.plan(
        indptr, indices, last.to(device), shape.heads, shape.kv_heads, shape.head_dim, page_size,
        q_data_type=scene.q.dtype, kv_data_type=scene.q.dtype, sm_scale=scene.scale,
    )  # fmt: skip
    out = torch.empty_like(scene.q)

    def run() -> Tensor:
        for layer_id in range(shape.layers):
            wrapper.run(scene.q, scene.pool.layer(layer_id), out=out)
        return out

    return run


def passes(scene: Scene, names: list[str]) -> dict[str, Pass]:
    """What can run here, the reference first."""
    found: dict[str, Pass] = {}
    for name in ["reference", *(name for name in names if name != "reference")]:
        if name == "flashinfer" and name not in ATTENTION:
            if importlib.util.find_spec(name) and scene.batch.max_query_len == 1:
                found[name] = flashinfer(scene)
            continue
        try:
            found[name] = ours(scene, name)
        except Unsupported as refusal:
            print(f"{name}: {refusal}")
    return found


def measure(scene: Scene, args: argparse.Namespace) -> dict[str, Any]:
    """Times of every backend for one batch, per layer, and how far it is from the reference."""
    row: dict[str, Any] = {"batch": scene.batch.num_reqs, "backends": {}}
    expected: Tensor | None = None
    for name, run in passes(scene, args.backends.split(",")).items():
        out = run().float()
        expected = out if expected is None else expected
        if name not in args.backends.split(","):
            continue
        times = times_ms(run, args.device, args.replays)
        gb_s = scene.kv_bytes() / statistics.median(times) / 1e6
        row["backends"][name] = spread(times) | {
            "layer_us": round(statistics.median(times) * 1e3 / scene.shape.layers, 2),
            "gb_s": round(gb_s, 1),
            "max_error": float((out - expected).abs().max()),
        }
    return row


@dataclass(slots=True)
class Memory:
    """What `benchmarks.gemm.bandwidth` reads."""

    device: str
    slab: Tensor


def read_gb_s(scene: Scene, args: argparse.Namespace) -> float:
    """GB/s of a plain streaming read of the pool's own memory."""
    keys, _ = scene.pool.layer(0)
    num_words = min(scene.pool.num_pages * scene.pool.layout.page_bytes, 8 << 30) // 4
    slab = torch.empty(0, dtype=torch.int32, device=keys.device)
    slab.set_(keys.untyped_storage(), 0, (num_words,))
    step: Any = Memory("cpu" if args.model == "tiny" else scene.device, slab)
    return bandwidth(step, args.replays)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-8b")
    parser.add_argument("--batch", default="1,8,32,128,256", help="requests, by commas")
    parser.add_argument("--context", type=int, default=576, help="KV length of each")
    parser.add_argument("--query-len", type=int, default=1, help="query rows of each")
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
    report: dict[str, Any] = {"rows": [], "read_gb_s": 0.0}
    report |= {key: str(value) for key, value in vars(args).items() if key != "json"}
    # The largest first: its pool is what the bandwidth is measured on.
    for num_reqs in sorted(map(int, args.batch.split(",")), reverse=True):
        scene = scene_of(args, num_reqs)
        if not report["rows"]:
            machine: Any = scene
            report |= about(machine)
            report["read_gb_s"] = round(read_gb_s(scene, args), 1)
            print(f"{report['device']}: reads {report['read_gb_s']} GB/s")
        row = measure(scene, args)
        report["rows"].append(row)
        for name, found in row["backends"].items():
            share = found["gb_s"] / report["read_gb_s"] if report["read_gb_s"] else 0.0
            found["share"] = round(share, 4)
            print(
                f"batch {num_reqs:3d} {name:10s} {found['layer_us']:8.2f} us a layer "
                f"{found['gb_s']:7.1f} GB/s {share:6.1%}  error {found['max_error']:.1e}",
                flush=True,
            )
        scene.pool.close()
        del scene
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
