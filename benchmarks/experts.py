"""A layer's experts in a decode step or a prompt, over some layers with weights of their own.

    python -m benchmarks.experts --tokens 1,8,32,128,256,512,2048,8192 --json out.json

Tokens are random and so are routers, so a token's experts are spread. The floor is the larger of
reading, at the read bandwidth of the same run, the experts that any token has, and of their
products at the speed of one large product. `--parts` has the kernels of one layer, by the profiler.
On a CPU (`--model tiny`) it checks that everything runs; the times mean nothing.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.output import ints, parser, shown, write
from benchmarks.timing import DEVICE, Case, product_speed, read_bandwidth, timed
from worker.config.checkpoint.experts import ExpertShape, Held
from worker.config.checkpoint.quantization import SCALE_BLOCK
from worker.ops.experts.product import expert_products
from worker.ops.experts.route import Routes, new_load, route
from worker.weights.eight_bits import GRAIN, as_e4m3

SHAPES = {  # hidden size, experts
    "30b": (2048, ExpertShape(128, 8, 768, renormalizes=True)),
    "mixtral": (4096, ExpertShape(8, 2, 14336, renormalizes=True)),
    "tiny": (64, ExpertShape(8, 2, 32, renormalizes=True)),
}


class Experts:
    """Weights of some layers of experts."""

    def __init__(self, name: str, num_layers: int, *, eight: bool) -> None:
        self.size, self.shape = SHAPES[name]
        self.num_layers, self.held = num_layers, Held(0, self.shape.num_experts)
        self.dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        self.load = new_load(self.held, torch.device(DEVICE))
        e, i, h = self.shape.num_experts, self.shape.width, self.size
        self.gates = [self.noise(e, h) for _ in range(num_layers)]
        self.ups = [self.noise(e, 2 * i, h) for _ in range(num_layers)]
        self.downs = [self.noise(e, h, i) for _ in range(num_layers)]
        self.scales: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        if eight:
            for layer, stacks in enumerate(zip(self.ups, self.downs, strict=True)):
                made = [
                    as_e4m3(w.float(), (e, w.shape[1] // GRAIN, -(-w.shape[2] // SCALE_BLOCK)))
                    for w in stacks
                ]
                (self.ups[layer], of_up), (self.downs[layer], of_down) = made
                self.scales[layer] = of_up, of_down

    def noise(self, *sizes: int) -> Tensor:
        """Normal numbers that keep the scale of what is multiplied by them."""
        return torch.randn(sizes, device=DEVICE, dtype=self.dtype) * sizes[-1] ** -0.5

    def routed(self, x: Tensor, gate: Tensor) -> Routes:
        """By one layer's router."""
        return route(x, gate, None, 0, self.shape, self.held, self.load)

    def run(self, x: Tensor) -> Callable[[], object]:
        """All layers."""
        layers = list(zip(self.gates, self.ups, self.downs, self.scales, strict=True))
        return lambda: [
            expert_products(x, self.routed(x, gate), up, down, self.held, scales=scales)
            for gate, up, down, scales in layers
        ]

    def distinct(self, x: Tensor) -> float:
        """Experts that any token has, the mean over the layers."""
        return statistics.mean(len(self.routed(x, gate).ids.unique()) for gate in self.gates)


def main() -> None:
    """Measure, print a table, write the file."""
    made = parser(__doc__)
    add = made.add_argument
    add("--model", choices=sorted(SHAPES), default="30b")
    add("--tokens", type=ints, default="1,8,32,128,256,512,2048,8192", help="of steps, by commas")
    add("--layers", type=int, default=8)
    add("--eight", action="store_true", help="weights in e4m3, with scales as of blocks")
    add("--parts", action="store_true", default=argparse.SUPPRESS, help="each case's kernels, too")
    add("--replays", type=int, default=30)
    options = made.parse_args()
    bandwidth, speed, figures = read_bandwidth(), product_speed(), []
    experts = Experts(options.model, options.layers, eight=options.eight)
    numbers = 3 * experts.size * experts.shape.width  # of an expert's weights
    for count in options.tokens:
        x = torch.randn(count, experts.size, device=DEVICE).to(experts.dtype)
        distinct = experts.distinct(x)
        reading = distinct * numbers * experts.ups[0].element_size() / bandwidth
        multiplying = 2 * count * experts.shape.top_k * numbers / speed
        floor_us = 1e6 * max(reading, multiplying)
        name = f"{count} tokens, {distinct:.1f} experts"
        figures += timed(Case(name, {"": experts.run(x)}, options.layers, floor_us), options)
    write(options.json, {"options": shown(options), "figures": figures})


if __name__ == "__main__":
    main()
