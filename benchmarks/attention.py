"""Attention of one layer, every backend, over as many layers as a model has, in one graph.

    python -m benchmarks.attention --batch 1,8,32,128,256 --context 576 --json out.json
    python -m benchmarks.attention --prefill 8192,32768 --backends triton,prompt_triton,cudnn

Every layer reads KV of its own and pages lie in random order, so the L2 holds little of it. The
floor is the larger of reading the KV, at the bandwidth of the same run, and of the products at the
speed of one large product. `--query-len 4` times verify windows, `--window 4096 --context 32768`
layers that see 4096 keys of more, `--cap 50` scores with a soft cap, `--sinks` heads with a learned
sink. `--model deepseek-v2-lite --expanded --context 8192 --layers 4` times latents beside all
heads' keys and values. `prompt_triton` is `triton` without Gluon, `cudnn` torch's by cuDNN. Plans
of the host stay outside the graph. A CPU's times (`--model tiny --backends reference`) say nothing.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.output import ints, parser, shown, write
from benchmarks.timing import DEVICE, Case, product_speed, read_bandwidth, timed
from worker.attention.base import AttentionShape
from worker.cache.eight_bits import fill_noise
from worker.cache.layout import KVLayout, KVRegion
from worker.cache.pool import KVPool
from worker.config.backends import BACKENDS
from worker.config.checkpoint.mask import KeyMask
from worker.errors import Unsupported
from worker.forward.batch import Batch, HostLengths
from worker.forward.context import forward_context
from worker.registry import resolve

Pass = Callable[[], Tensor]  # all layers; returns the last layer's result


class Shape(NamedTuple):
    """The attention of a model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int = 0  # of a latent's row; 0: values have rows of their own

    @property
    def kind(self) -> str:
        return "latent" if self.value_dim else "heads"


MODELS = {
    "qwen3-8b": Shape(36, 32, 8, 128),
    "hybrid-9b": Shape(8, 16, 4, 256),
    "qwen3.6-35b-a3b": Shape(10, 16, 2, 256),
    "gemma2-9b": Shape(42, 16, 8, 256),
    "gpt-oss-20b": Shape(24, 64, 8, 64),
    "phi3-mini": Shape(32, 32, 32, 96),
    "tiny": Shape(2, 4, 2, 32),
    "deepseek-v2-lite": Shape(27, 16, 1, 576, 512),
    "glm-4.7-flash": Shape(47, 20, 1, 576, 512),
    "deepseek-v3": Shape(61, 128, 1, 576, 512),
    "tiny-latent": Shape(2, 4, 1, 48, 32),
}
# Heads of as many numbers a token as the keys and values that latents stand for. The paged kernel
# has no heads of 192 and 128 numbers, so 16 of these, 5120 numbers, are timed as 20 of 128 and 128.
EXPANDED = {
    "deepseek-v2-lite": Shape(27, 20, 20, 128),
    "glm-4.7-flash": Shape(47, 20, 20, 256),
    "deepseek-v3": Shape(61, 160, 160, 128),
    "tiny-latent": Shape(2, 5, 5, 32),
}


@dataclass(slots=True)
class Scene:
    """One batch over a full pool."""

    shape: Shape
    pool: KVPool
    batch: Batch
    q: Tensor
    context: int  # keys of each request
    window: int  # keys that a row sees; 0: all
    cap: float
    sinks: list[Tensor]  # [heads] of each layer, or nothing

    def kv_bytes(self) -> int:
        """Keys and values that one pass has to read."""
        per_token = self.pool.layout.page_bytes / self.pool.layout.page_size
        seen = min(self.context, (self.window or self.context) + self.batch.max_query_len - 1)
        return int(self.batch.num_reqs * seen * per_token)

    def flops(self) -> float:
        """Floating-point operations of one pass: two products over all keys that a row may see."""
        first = self.context - self.batch.max_query_len + 1  # keys of a request's first row
        pairs = sum(min(seen, self.window or seen) for seen in range(first, self.context + 1))
        layers, heads, _, head_dim, value_dim = self.shape
        products = 2.0 * (head_dim + (value_dim or head_dim))
        return products * self.batch.num_reqs * layers * heads * pairs


def scene_of(
    options: argparse.Namespace, shape: Shape, num_reqs: int, context: int, width: int
) -> Scene:
    """Requests of `context` tokens, the last `width` new, on random pages of a pool for them."""
    dtype = getattr(torch, options.dtype)
    shape = shape._replace(layers=options.layers or shape.layers)
    pages = -(-context // options.page_size)
    kv_dtype = options.kv_dtype or options.dtype
    sizes = shape.layers, shape.kv_heads, shape.head_dim, 1, options.page_size
    region = KVRegion("target", *sizes, kv_dtype, 1 if shape.value_dim else 2)
    pool = KVPool(KVLayout((region,)), num_reqs * pages + 1, torch.device(DEVICE))
    torch.manual_seed(0)
    for cache in pool.caches():
        fill_noise(cache)
    order = (torch.randperm(num_reqs * pages) + 1).int().view(num_reqs, pages).to(DEVICE)
    num_tokens = num_reqs * width
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device=DEVICE) * width
    ids = torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE)
    lengths = torch.tensor([context] * num_reqs, dtype=torch.int32, device=DEVICE)
    host = HostLengths([width] * num_reqs, [context] * num_reqs)
    batch = Batch(ids, ids, ids, starts, lengths, order, num_reqs, num_tokens, width, context, host)
    q = torch.randn(num_tokens, shape.heads, shape.head_dim, device=DEVICE).to(dtype)
    sinks = [q.new_ones(shape.heads).normal_() for _ in range(shape.layers * options.sinks)]
    return Scene(shape, pool, batch, q, context, options.window, options.cap, sinks)


def backend_pass(scene: Scene, name: str) -> Pass:
    """A backend: one plan, then every layer, as in a step."""
    shape, batch = scene.shape, scene.batch
    more: dict[str, Any] = {"cap": scene.cap, "sinks": bool(scene.sinks)}
    more |= {"kind": shape.kind, "value_dim": shape.value_dim}
    dtype, mask = str(scene.q.dtype).removeprefix("torch."), KeyMask(window=scene.window or None)
    seen = AttentionShape(*shape[1:4], shape.head_dim**-0.5, mask, dtype=dtype, **more)
    made: Any = resolve("attention backend", name.removeprefix("prompt_"), BACKENDS[shape.kind])
    attention = made(scene.pool, seen, scene.sinks)
    if name == "prompt_triton":
        attention.prompt_kernel = None
    planned = None if attention.static_plan else attention.plan(batch)

    def run() -> Tensor:
        with forward_context(batch, attention, planned or attention.plan(batch)):
            for layer_id in range(shape.layers):
                out = attention.forward(scene.q, layer_id)
        return out

    return run


def cudnn_pass(scene: Scene) -> Pass:
    """cuDNN's, on a CPU torch's own, over dense copies of keys and values."""
    table, width = scene.batch.page_table, scene.batch.max_query_len
    if width < scene.context or scene.window or scene.cap or scene.sinks or scene.shape.value_dim:
        raise Unsupported("is timed with whole prompts, causal alone")
    q = scene.q.unflatten(0, (-1, width)).transpose(1, 2)
    paged = [[part[table] for part in parts] for parts in scene.pool.layers()]
    dense = [[x.transpose(1, 2).flatten(2, 3)[:, :, :width] for x in parts] for parts in paged]

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if DEVICE == "cuda" else SDPBackend.MATH):
            for k, v in dense:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return run


def measure(scene: Scene, name: str, floor_us: float, options: argparse.Namespace) -> list[Any]:
    """A row for each backend, and how far it is from the reference."""
    expected = backend_pass(scene, "reference")().float()
    ways: dict[str, Pass] = {}
    for way in options.backends.split(","):
        try:
            ways[way] = cudnn_pass(scene) if way == "cudnn" else backend_pass(scene, way)
        except Unsupported as refusal:
            print(f"{way}: {refusal}")
    errors = {way: float((run().float() - expected).abs().max()) for way, run in ways.items()}
    rows = timed(Case(name, ways, scene.shape.layers, floor_us), options)
    for row in rows:
        tflops = scene.flops() / scene.shape.layers / row["median_us"] / 1e6
        row |= {"max_error": errors[row["way"]], "tflops": tflops}
        print(f"    {row['way']}: {tflops:.0f} TFLOP/s, largest error {row['max_error']:.1e}")
    return rows


def measure_latents(options: argparse.Namespace, name: str, case: tuple[int, ...]) -> list[Any]:
    """A row for latents in pages and one for keys and values of all heads, which take turns."""
    shapes = {"latents": MODELS[options.model], "expanded": EXPANDED[options.model]}
    scenes = {way: scene_of(options, shape, *case) for way, shape in shapes.items()}
    backend = options.backends.split(",")[0]
    ways = {way: backend_pass(scene, backend) for way, scene in scenes.items()}
    rows = timed(Case(name, ways, scenes["latents"].shape.layers), options)
    for row, scene in zip(rows, scenes.values(), strict=True):
        row["num_bytes"] = scene.kv_bytes() // scene.shape.layers
        print(f"    {row['way']}: {row['num_bytes'] / row['median_us'] / 1e3:.0f} GB/s")
        scene.pool.close()
    time, size = (rows[0][of] / rows[1][of] for of in ("median_us", "num_bytes"))
    print(f"    latents / expanded: {time:.3f} of the time, {size:.3f} of the bytes")
    return rows


def main() -> None:
    """Measure, print a line a backend, write the figures."""
    made = parser(__doc__)
    add = made.add_argument
    add("--model", choices=sorted(MODELS), default="qwen3-8b")
    add("--layers", type=int, default=0, help="instead of the model's")
    add("--batch", type=ints, default="1,8,32,128,256", help="requests, by commas")
    add("--context", type=int, default=576, help="KV length of each")
    add("--query-len", type=int, default=1, help="query rows of each")
    add("--prefill", type=ints, default=[], help="prompts of these lengths instead, by commas")
    add("--window", type=int, default=0, help="keys that a row sees; 0: all")
    add("--cap", type=float, default=0.0, help="soft cap of scores; 0: none")
    add("--sinks", action="store_true", help="each head has a sink")
    add("--expanded", action="store_true", help="of a model with latents: beside all its heads")
    add("--page-size", type=int, default=64)
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--kv-dtype", default="", help="float8_e4m3fn; default: that of --dtype")
    add("--backends", default="triton,flashinfer", help="by commas")
    add("--replays", type=int, default=30)
    options = made.parse_args()
    bandwidth, speed, rows = read_bandwidth(), product_speed(), list[Any]()
    cases = [(num, options.context, options.query_len) for num in options.batch]
    cases = [(1, num, num) for num in options.prefill] or cases
    for case in sorted(cases, reverse=True):
        name = "batch {}, context {}, rows {}".format(*case)
        if options.expanded:
            rows += measure_latents(options, name, case)
        else:
            scene = scene_of(options, MODELS[options.model], *case)
            floor_us = 1e6 * max(scene.kv_bytes() / bandwidth, scene.flops() / speed)
            rows += measure(scene, name, floor_us / scene.shape.layers, options)
            scene.pool.close()
        write(options.json, {"options": shown(options), "rows": rows})


if __name__ == "__main__":
    main()
