"""The small kernels of a decode step of the Qwen3-8B shape, each alone, in a CUDA graph.

    python -m benchmarks.kernels --json out.json

A graph holds REPEATS calls over buffers of their own; a time is a replay's over REPEATS, median of
many. The floor is the bytes that a call must move over the read bandwidth (an H200: 4600 GB/s); the
twin is the plain-torch form, captured alike. On a CPU the shape is a small one and the kernels are
the twins: it only shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.api import MAX_STOP_IDS
from worker.kernels.attention.qk_rope_store import qk_rope_store, qk_rope_store_ref
from worker.kernels.attention.rope import rope_inv_freq, rope_table
from worker.kernels.rms_norm import add_rms_norm, add_rms_norm_ref, rms_norm, rms_norm_ref
from worker.kernels.swiglu import swiglu, swiglu_ref
from worker.plan import Tail
from worker.sampling.sampler import SamplingRows, draw_ref, sample

REPEATS = 36  # as many as layers
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernels' sizes follow from."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    page_size: int = 64


QWEN3_8B = Shape(4096, 32, 8, 128, 12288, 151936)
SMALL = Shape(64, 4, 2, 16, 96, 300)


@dataclass(slots=True)
class Case:
    """One kernel over one set of buffers."""

    name: str
    run: Callable[[], object]
    twin: Callable[[], object]
    num_bytes: int


class Cases:
    """Fresh buffers for each call that a graph holds."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype, seed: int) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def noise(self, *size: int) -> Tensor:
        """Standard normal, of the model's dtype."""
        return torch.randn(size, generator=self.generator, device=self.device).to(self.dtype)

    def layer(self, m: int) -> list[Case]:
        """The kernels that every layer runs."""
        s = self.shape
        x, residual, weight = self.noise(m, s.hidden), self.noise(m, s.hidden), self.noise(s.hidden)
        gate_up = self.noise(m, 2 * s.mlp)
        return [
            Case(
                "rms_norm",
                lambda: rms_norm(x, weight, EPS),
                lambda: rms_norm_ref(x, weight, EPS),
                2 * x.nbytes,
            ),
            Case(
                "add_rms_norm",
                lambda: add_rms_norm(x, residual, weight, EPS),
                lambda: add_rms_norm_ref(x, residual, weight, EPS),
                4 * x.nbytes,
            ),
            Case(
                "swiglu",
                lambda: swiglu(gate_up),
                lambda: swiglu_ref(gate_up),
                gate_up.nbytes * 3 // 2,
            ),
            self.qkv(m),
            self.embedding(m),
        ]

    def qkv(self, m: int) -> Case:
        """Norms, rope and store of m tokens, each on a page of its own, layer 1 of 2."""
        s = self.shape
        qkv = self.noise(m, (s.num_heads + 2 * s.num_kv_heads) * s.head_dim)
        table = rope_table(rope_inv_freq(s.head_dim, 1e6, None), 1024, torch.device(self.device))
        pages = self.noise(m + 1, s.num_kv_heads, 2, 2, s.page_size, s.head_dim)
        slots = torch.arange(1, m + 1, device=self.device) * s.page_size + 5
        positions = torch.full((m,), 517, device=self.device)
        weights = self.noise(s.head_dim), self.noise(s.head_dim)
        given = (qkv, positions, table, pages[:, :, 1, 0], pages[:, :, 1, 1], slots, *weights, EPS)
        return Case(
            "qk_rope_store",
            lambda: qk_rope_store(*given),
            lambda: qk_rope_store_ref(*given),
            2 * qkv.nbytes,
        )

    def embedding(self, m: int) -> Case:
        """Torch's own gather: what a kernel of ours would have to beat."""
        s = self.shape
        weight = torch.zeros(min(s.vocab, 8192), s.hidden, device=self.device, dtype=self.dtype)
        ids = torch.arange(m, device=self.device) * 17 % len(weight)
        return Case(
            "embedding (torch)",
            lambda: F.embedding(ids, weight),
            lambda: weight.index_select(0, ids),
            2 * m * s.hidden * weight.itemsize,
        )

    def rows(self, m: int, **filters: float) -> SamplingRows:
        """m rows of their own seeds; T = 0.8 unless `filters` say otherwise."""

        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((m,), value, dtype=dtype, device=self.device)

        n, zero = torch.arange(m, device=self.device), column(0, torch.int64)
        return SamplingRows(
            position=n + 600,
            seed=n * 12345 + 1,
            temperature=column(filters.get("temperature", 0.8), torch.float32),
            top_k=column(filters.get("top_k", 0), torch.int64),
            top_p=column(filters.get("top_p", 1.0), torch.float32),
            min_p=column(filters.get("min_p", 0.0), torch.float32),
            min_len=zero,
            stop_ids=torch.full((m, MAX_STOP_IDS), -1, device=self.device),
            presence_penalty=column(0.0, torch.float32),
            frequency_penalty=column(0.0, torch.float32),
            repetition_penalty=column(1.0, torch.float32),
            extra=zero,
        )

    def sampling(self, m: int) -> list[Case]:
        """Each tail over bf16 logits; peaked and flat distributions for top_p."""

        def case(name: str, tail: Tail, logits: Tensor, **filters: float) -> Case:
            rows = self.rows(m, **filters)
            return Case(
                f"sample {name}",
                lambda: sample(logits, rows, tail),
                lambda: draw_ref(logits, rows, tail),
                logits.nbytes,
            )

        flat, peaked = self.noise(m, self.shape.vocab), self.noise(m, self.shape.vocab) * 3
        return [
            case("greedy", "greedy", flat, temperature=0.0),
            case("random", "random", flat),
            case("top_p 0.95 flat", "filtered", flat, top_p=0.95),
            case("top_p 0.95 peaked", "filtered", peaked, top_p=0.95),
            case("top_k 20 top_p 0.95", "filtered", peaked, top_p=0.95, top_k=20),
            case("top_p 0.95 f32", "filtered", peaked.float(), top_p=0.95),
        ]


def times_us(calls: list[Callable[[], object]], device: str, replays: int) -> list[float]:
    """Per call, of each replay; all calls in one graph."""
    if device == "cpu":
        began = time.perf_counter()
        for call in calls:
            call()
        return [(time.perf_counter() - began) * 1e6 / len(calls)]
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e3 for a, b in pairwise(events)]
    return [each / len(calls) for each in times]


def measure(m: int, shape: Shape, args: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """One record for each kernel at m rows."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    results = []
    for make, repeats in ((Cases.layer, REPEATS), (Cases.sampling, 4)):
        sets = [make(Cases(shape, device, dtype, seed), m) for seed in range(repeats)]
        for cases in zip(*sets, strict=True):
            name = cases[0].name
            if args.only and not any(each in name for each in args.only.split(",")):
                continue
            spent = times_us([case.run for case in cases], device, args.replays)
            record = {
                "name": name,
                "m": m,
                "us": statistics.median(spent),
                "us_p10_p90": [statistics.quantiles(spent, n=10)[i] for i in (0, 8)]
                if len(spent) > 1
                else spent * 2,
                "floor_us": cases[0].num_bytes / args.bandwidth * 1e-3,
            }
            if m <= args.twin_up_to:
                twins = times_us([case.twin for case in cases], device, max(1, args.replays // 4))
                record["twin_us"] = statistics.median(twins)
            results.append(record)
            print(
                f"{name:24} m={m:<4} {record['us']:9.2f} us  floor {record['floor_us']:8.2f}"
                f"  twin {record.get('twin_us', float('nan')):9.2f}",
                flush=True,
            )
    return results


def machine(device: str) -> dict[str, Any]:
    """Where this ran, and of which commit."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit.stdout.strip() or None,
    }
    if device == "cuda":
        import triton

        found["triton"] = triton.__version__
    return found


@torch.inference_mode()
def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--m", default="1,8,32,128,256")
    parser.add_argument("--only", default="", help="parts of kernels' names, comma-separated")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--twin-up-to", type=int, default=32, help="the largest m of the twins")
    parser.add_argument("--bandwidth", type=float, default=4600.0, help="GB/s")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = QWEN3_8B if device == "cuda" else SMALL
    results: list[dict[str, Any]] = []
    for m in map(int, args.m.split(",")):
        results += measure(m, shape, args, device)
    if args.json:
        report = {"machine": machine(device), "shape": asdict(shape), "results": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
