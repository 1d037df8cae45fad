"""All products of one decode step, each way to multiply in one CUDA graph, by turns.

    python -m benchmarks.gemm --model qwen3-8b --m 1,8,16,32,64,128,256 --json out.json

`product` is what linear layers call: our kernel for few rows, then a tuned algorithm of cuBLASLt
where the table has one. `cublas` and `cublaslt` are torch's.

Every layer has weights of its own, so nothing but activations is ever found in the L2. The products
are chained: each reads the output of the one before, so overlapping launches would show as wrong
numbers, and they are checked. The floor is the weights' bytes over the read bandwidth of this run.
`layers` is the step without the head. On a CPU (`--model tiny`) it checks that everything runs.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.output import ints, parser, shown, write
from benchmarks.timing import DEVICE, read_bandwidth, spread, times_ms
from worker.config.checkpoint.quantization import SCALE_BLOCK
from worker.ops.product import product
from worker.ops.scaled import eight_bits, scaled_product
from worker.weights.eight_bits import GRAIN, as_e4m3

Multiply = Callable[[Tensor, Tensor], Tensor]  # x @ w.T


class Product(NamedTuple):
    """out [m, n] = x [m, k] @ w.T, once a layer or once a step."""

    name: str
    n: int
    k: int
    count: int


def products_of(
    layers: int, hidden: int, q_width: int, kv_width: int, mlp: int, vocab: int
) -> list[Product]:
    """In the order of a step; the last one, the head, is not part of a layer."""
    return [
        Product("qkv", q_width + 2 * kv_width, hidden, layers),
        Product("o", hidden, q_width, layers),
        Product("gate_up", 2 * mlp, hidden, layers),
        Product("down", hidden, mlp, layers),
        Product("head", vocab, hidden, 1),
    ]


MODELS = {
    "qwen3-8b": products_of(36, 4096, 4096, 1024, 12288, 151936),
    "tiny": products_of(2, 128, 128, 32, 256, 300),
}


class Step:
    """The weights of one decode step."""

    def __init__(self, products: list[Product], device: str, dtype: torch.dtype) -> None:
        self.products, self.device, self.dtype = products, device, dtype
        generator = torch.Generator(device).manual_seed(0)

        def drawn(item: Product) -> Tensor:
            weight = torch.empty(item.n, item.k, device=device, dtype=dtype)
            return weight.normal_(0, item.k**-0.5, generator=generator)

        self.weights = {item.name: [drawn(item) for _ in range(item.count)] for item in products}
        self.num_bytes = sum(w.nbytes for weights in self.weights.values() for w in weights)

    def run(self, x: Tensor, multiply: Multiply, *, head: bool = True) -> Tensor:
        """The whole step, or all of it but the head; returns the last output."""
        *layer_products, last = self.products
        for layer in range(layer_products[0].count):
            for item in layer_products:
                x = multiply(x[:, : item.k], self.weights[item.name][layer])
        return multiply(x[:, : last.k], self.weights[last.name][0]) if head else x

    def run_one(self, item: Product, x: Tensor, multiply: Multiply) -> Tensor:
        """One product with all its weights, one after the other; all read the same x."""
        return [multiply(x[:, : item.k], weight) for weight in self.weights[item.name]][-1]


def library(name: str) -> Multiply:
    """torch's product through "cublas" or "cublaslt"; on the CPU through whatever there is."""

    def multiply(x: Tensor, w: Tensor) -> Tensor:
        if x.is_cuda:
            torch.backends.cuda.preferred_blas_library(name)
        return torch.mm(x, w.t())

    return multiply


class EightBits:
    """Products of the same weights in e4m3, with scales as of blocks; half the bytes of the floor.

    Chained results differ by what each product rounds of its activations.
    """

    def __init__(self, step: Step) -> None:
        self._held = {
            id(weight): self._published(weight.float())
            for weights in step.weights.values()
            for weight in weights
            if not len(weight) % SCALE_BLOCK
        }

    @staticmethod
    def _published(weight: Tensor) -> tuple[Tensor, Tensor]:
        """In blocks of 128 x 128, whose scales are kept as layers keep them."""
        values, scales = as_e4m3(
            weight, (len(weight) // SCALE_BLOCK, -(-weight.shape[1] // SCALE_BLOCK))
        )
        return values, scales.repeat_interleave(SCALE_BLOCK // GRAIN, 0)

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        if (found := self._held.get(id(w))) is None:
            return product(x, w)
        return scaled_product(*eight_bits(x), *found, x.dtype, True)


def error(got: Tensor, expected: Tensor) -> float:
    """Relative, in the 2-norm."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def measure(
    step: Step, m: int, replays: int, libraries: list[str], eight: EightBits | None = None
) -> dict[str, Any]:
    """Times for m rows, whole step and product by product, and how far the results differ."""
    x = torch.randn(m, max(item.k for item in step.products), device=step.device).to(step.dtype)
    ways = {name: library(name) for name in libraries} | {"product": product}
    if eight is not None:
        ways["fp8"] = eight

    def timed(run: Callable[..., Tensor], *first: Any, **more: Any) -> dict[str, dict[str, float]]:
        runs = {name: partial(run, *first, x, way, **more) for name, way in ways.items()}
        times = times_ms(runs, step.device, replays)
        return {name: spread(of) for name, of in times.items()}

    row: dict[str, Any] = {"m": m, "layers": timed(step.run, head=False), "step": timed(step.run)}
    row["products"] = {item.name: timed(step.run_one, item) for item in step.products}
    results = {name: step.run(x, way) for name, way in ways.items()}
    errors = {name: error(of, results[libraries[0]]) for name, of in results.items()}
    row["fp8_error"] = errors.pop("fp8", 0.0)
    row["errors"] = errors
    return row


def print_row(row: dict[str, Any]) -> None:
    """One line a way to multiply."""
    for name, took in row["step"].items():
        by_product = " ".join(
            f"{item}={1e3 * ways[name]['median_ms']:.0f}" for item, ways in row["products"].items()
        )
        print(
            f"m={row['m']:3d} {name:15s} {took['median_ms']:.3f} ms "
            f"[{took['p10_ms']:.3f}, {took['p90_ms']:.3f}] "
            f"layers {row['layers'][name]['median_ms']:.3f}  all of one product, us: {by_product}",
            flush=True,
        )
    print(
        f"      largest difference of results: {max(row['errors'].values()):.2g}; "
        f"in eight bits {row['fp8_error']:.2g}",
        flush=True,
    )


def parsed() -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__)
    add = made.add_argument
    add("--model", choices=sorted(MODELS), default="qwen3-8b")
    add("--m", type=ints, default="1,8,16,32,64", help="rows, by commas")
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    add("--device", default=DEVICE)
    add("--replays", type=int, default=30)
    add("--eight", action="store_true", help="the same weights in e4m3, too: way fp8")
    add("--libraries", default="cublas", help="cublas, cublaslt or both, by commas")
    return made.parse_args()


def main() -> None:
    """Measure, print a table, write the figures."""
    options = parsed()
    step = Step(MODELS[options.model], options.device, getattr(torch, options.dtype))
    read_gb_s = read_bandwidth() / 1e9
    floor_ms = step.num_bytes / read_gb_s / 1e6
    print(f"reads {read_gb_s:.1f} GB/s, floor {floor_ms:.3f} ms")
    about = {"options": shown(options), "read_gb_s": read_gb_s, "floor_ms": floor_ms, "rows": []}
    eight = EightBits(step) if options.eight else None
    for m in options.m:
        about["rows"].append(measure(step, m, options.replays, options.libraries.split(","), eight))
        print_row(about["rows"][-1])
        write(options.json, about)


if __name__ == "__main__":
    main()
