"""All products of one decode step, each way to multiply in one CUDA graph, by turns.

    python -m benchmarks.gemm --model qwen3-8b --m 1,8,16,32,64,128,256 --json out.json

`product` is what linear layers call: our kernel for few rows, then a tuned algorithm of cuBLASLt
where the table has one. `cublas` and `cublaslt` are torch's.

Every layer has weights of its own, so nothing but activations is ever found in the L2. The products
are chained: each reads the output of the one before, so overlapping launches would show as wrong
numbers, and they are checked. The floor is the weights' bytes over the read bandwidth of this run.
`layers` is the step without the head. On a CPU (`--model tiny`) it checks that everything runs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.output import ints, parser, shown, write
from benchmarks.timing import DEVICE, Case, read_bandwidth, timed
from worker.config.checkpoint.quantization import SCALE_BLOCK
from worker.ops.product import product
from worker.ops.scaled import eight_bits, scaled_product
from worker.weights.eight_bits import as_e4m3

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

    def __init__(self, products: list[Product]) -> None:
        self.products = products
        generator = torch.Generator(DEVICE).manual_seed(0)

        def drawn(item: Product) -> Tensor:
            weight = torch.empty(item.n, item.k, device=DEVICE, dtype=torch.bfloat16)
            return weight.normal_(0, item.k**-0.5, generator=generator)

        self.weights = {item.name: [drawn(item) for _ in range(item.count)] for item in products}

    def num_bytes(self, part: str) -> int:
        """Of the weights of a product, of the "step", or of its "layers", which have no head."""
        named = {name: sum(w.nbytes for w in of) for name, of in self.weights.items()}
        whole = sum(named.values())
        return named.get(part, whole if part == "step" else whole - named["head"])

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
        """In blocks of 128 x 128, whose scales are as products of layers get them."""
        blocks = len(weight) // SCALE_BLOCK, -(-weight.shape[1] // SCALE_BLOCK)
        return as_e4m3(weight, blocks)

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        if (found := self._held.get(id(w))) is None:
            return product(x, w)
        return scaled_product(*eight_bits(x), *found, x.dtype, True)


def main() -> None:
    """Measure, print a line a way, write the figures."""
    made = parser(__doc__)
    add = made.add_argument
    add("--model", choices=sorted(MODELS), default="qwen3-8b")
    add("--m", type=ints, default="1,8,16,32,64", help="rows, by commas")
    add("--replays", type=int, default=30)
    add("--eight", action="store_true", help="the same weights in e4m3, too: way fp8")
    add("--libraries", default="cublas", help="cublas, cublaslt or both, by commas")
    options = made.parse_args()
    step, read_gb_s = Step(MODELS[options.model]), read_bandwidth() / 1e9
    ways = {name: library(name) for name in options.libraries.split(",")} | {"product": product}
    if options.eight:
        ways["fp8"] = EightBits(step)
    about: dict[str, Any] = {"options": shown(options), "read_gb_s": read_gb_s, "rows": []}
    for m in options.m:
        x = torch.randn(m, max(item.k for item in step.products), device=DEVICE).bfloat16()
        parts = {"step": step.run, "layers": partial(step.run, head=False)}
        parts |= {item.name: partial(step.run_one, item) for item in step.products}
        for name, run in parts.items():
            floor_us = step.num_bytes(name) / read_gb_s / 1e3
            runs = {way: partial(run, x, ways[way]) for way in ways}
            rows = timed(Case(f"m={m}, {name}", runs, 1, floor_us), options)
            about["rows"] += [{"m": m, **row} for row in rows]
        results = {way: step.run(x, multiply).double() for way, multiply in ways.items()}
        first, *others = results
        for way in others:  # relative, in the 2-norm
            error = float((results[way] - results[first]).norm() / results[first].norm())
            about["rows"].append({"m": m, "way": way, "error": error})
            print(f"m={m}, {way} differs from {first} by {error:.2g}", flush=True)
        write(options.json, about)


if __name__ == "__main__":
    main()
