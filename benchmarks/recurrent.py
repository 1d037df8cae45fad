"""The gated delta net of one layer without its products, over as many layers as a model has.

    python -m benchmarks.recurrent --rows 1,32,128 --widths 1,2,4,8 --json out.json
    python -m benchmarks.recurrent --tokens 512,2048,8192 --json out.json
    python -m benchmarks.recurrent --errors 32768

Every layer has a state of its own. The floor of a decode step is reading and writing the states at
the read bandwidth of the same run; as many tokens are pending as the window has (0 at width 1).
Prompts are one request, from position 0. `--parts` has the kernels of one layer, by the profiler.
On a CPU (`--model tiny`) it checks that everything runs; the times mean nothing. `--errors`: how
far outputs are from those of states in float64.
"""

import argparse
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.output import ints, parser, shown, write
from benchmarks.timing import DEVICE, Case, read_bandwidth, timed
from worker.attention.recurrent.delta_net import (
    DeltaState,
    DeltaWeights,
    Inputs,
    delta_block,
    delta_chunk,
    delta_states,
    delta_step,
    delta_window,
)
from worker.cache.layout import KVLayout, KVRegion, StateRegion
from worker.cache.pool import KVPool
from worker.config.checkpoint.delta_shape import DELTA_BLOCK, DeltaShape, block_table
from worker.forward.batch import StateChunks, StateWindows

SHAPES = {  # layers, heads of a rank
    "9b": (24, DeltaShape(16, 2, 128, 128)),
    "27b": (48, DeltaShape(16, 3, 128, 128)),
    "tiny": (2, DeltaShape(2, 2, 32, 32)),
}


class Net:
    """Weights of one layer, and states of all layers for so many rows."""

    def __init__(self, name: str, num_rows: int, max_width: int, state_dtype: str) -> None:
        self.num_layers, self.shape = SHAPES[name]
        shape, self.dtype = self.shape, torch.bfloat16 if DEVICE == "cuda" else torch.float32
        dtype_name = str(self.dtype).removeprefix("torch.")
        self.region = StateRegion(self.num_layers, *shape, dtype_name, state_dtype)
        layout = KVLayout((KVRegion("target", 1, 1, 32, 1, 16, dtype_name),), self.region)
        self.pool = KVPool(layout, 2, torch.device(DEVICE), (num_rows + 1, 0))
        self.states = delta_states(self.pool.states, shape, num_rows, max_width)
        ones = torch.ones(shape.value_heads, device=DEVICE)
        conv, norm = 0.5 * self.noise(shape.channels, 4), self.noise(shape.value_dim)
        self.weights = DeltaWeights(conv, ones.uniform_(0.01, 4).log(), ones.clone(), norm, 1e-6)

    def noise(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, device=DEVICE).to(self.dtype)

    def decode(self, num_rows: int, width: int) -> Callable[[], object]:
        """All layers of a step; what the windows before have left is accepted."""
        rows = torch.arange(num_rows + 1, device=DEVICE)
        folded = torch.full_like(rows, 100)
        pending = 0 if width == 1 else width
        none = torch.zeros_like(rows)
        windows = StateWindows(rows[1:], rows, folded, folded + pending, none, width, 64)
        packed = self.noise(num_rows * width, self.shape.packed_width)
        lines = width if width > 1 else 0
        states = [DeltaState(state.s, state.conv, state.ring[:, :lines]) for state in self.states]
        return lambda: [delta_window(packed, self.weights, each, windows) for each in states]

    def prompt(self, num_tokens: int) -> Callable[[], object]:
        """All layers of a prompt."""
        ends = [0, num_tokens]
        start, blocks = (
            torch.tensor(each, dtype=torch.int32, device=DEVICE)
            for each in (ends, block_table(ends, num_tokens))
        )
        slots = torch.ones(1, dtype=torch.int32, device=DEVICE)
        none = torch.zeros_like(slots)
        chunks = StateChunks(start, start[1:], slots, none, none, blocks)
        packed = self.noise(num_tokens, self.shape.packed_width)
        out = packed.new_empty(num_tokens, self.shape.value_width)
        return lambda: [delta_chunk(packed, self.weights, s, chunks, out) for s in self.states]


def errors(shape: DeltaShape, num_tokens: int) -> list[dict[str, object]]:
    """Rows of outputs' errors against states of f64, token by token and in blocks, by state dtype.

    One key head, inputs of unit noise; an error is of the root of mean squares of a stretch's
    outputs before their norm, which end with that many tokens.
    """
    shape, generator = shape._replace(key_heads=1), torch.Generator().manual_seed(0)
    heads, keys = shape.value_heads, (num_tokens, shape.value_heads, shape.key_dim)

    def noise(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    q, k = (torch.nn.functional.normalize(noise(*keys), dim=-1) for _ in range(2))
    rates = torch.linspace(-4, 2, heads).exp()  # of heads that remember long, and short
    g = -rates * torch.nn.functional.softplus(noise(num_tokens, heads) - 2)
    x = Inputs(q, k, noise(*keys[:2], shape.value_dim), g, noise(num_tokens, heads).sigmoid())
    sizes = heads, shape.key_dim, shape.value_dim

    def run(dtype: torch.dtype, number: torch.dtype, block: int) -> Tensor:
        s, outputs = torch.zeros(sizes, dtype=number), list[Tensor]()
        for at in range(0, num_tokens, block):
            part = Inputs(*(each[at : at + block].to(number) for each in x))
            if block > 1:
                s, o = delta_block(s, part)
            else:
                (s,), o = delta_step(s[None], part)
            s = s.to(dtype).to(number)
            outputs.append(o)
        return torch.cat(outputs).double()

    exact, rows = run(torch.float64, torch.float64, 1), []
    for dtype, block in itertools.product((torch.float32, torch.bfloat16), (1, DELTA_BLOCK)):
        wrong = run(dtype, torch.float32, block) - exact
        for end in (num_tokens // 32, num_tokens // 4, num_tokens):
            part = slice(end // 2, end)
            of = wrong[part].square().mean().sqrt() / exact[part].square().mean().sqrt()
            how = "token by token" if block == 1 else "in blocks"
            rows.append({"state": str(dtype)[6:], "how": how, "tokens": end, "error": f"{of:.2g}"})
    return rows


def main() -> None:
    """Measure, print a table, write the file."""
    made = parser(__doc__)
    add = made.add_argument
    add("--model", choices=sorted(SHAPES), default="9b")
    add("--rows", type=ints, default="1,8,32,128,256", help="rows of decode steps, by commas")
    add("--widths", type=ints, default="1,4", help="of their windows, by commas")
    add("--tokens", type=ints, default=[], help="prompts of these lengths instead, by commas")
    add("--parts", action="store_true", default=argparse.SUPPRESS, help="each case's kernels, too")
    add("--state-dtype", choices=("float32", "bfloat16"), default="float32")
    add("--replays", type=int, default=30)
    add("--errors", type=int, default=0, metavar="TOKENS", help="of states' dtypes instead")
    options = made.parse_args()
    if options.errors:
        rows = errors(SHAPES[options.model][1], options.errors)
        print("\n".join("  ".join(map(str, row.values())) for row in rows))
        write(options.json, {"options": shown(options), "figures": rows})
        return
    bandwidth = read_bandwidth()
    num_rows = 1 if options.tokens else max(options.rows)
    net = Net(options.model, num_rows, max(options.widths), options.state_dtype)
    num, figures = net.num_layers, []
    for tokens in options.tokens:
        figures += timed(Case(f"{tokens} tokens", {"": net.prompt(tokens)}, num), options)
    for rows, width in itertools.product([] if figures else options.rows, options.widths):
        floor_us = 2e6 * rows * net.region.slot_bytes / num / bandwidth
        case = Case(f"{rows} rows, width {width}", {"": net.decode(rows, width)}, num, floor_us)
        figures += timed(case, options)
    write(options.json, {"options": shown(options), "figures": figures})


if __name__ == "__main__":
    main()
