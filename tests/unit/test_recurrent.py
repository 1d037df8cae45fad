"""The gated delta rule, step by step and in chunks, against the recurrence written down in float64.

In a process with Triton's interpreter the kernels, otherwise their definitions.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.support import pairwise
from tests.support.interpreted import INTERPRETED, WHY, compiling
from worker.attention.recurrent.delta_net import DeltaState, DeltaWeights
from worker.config.checkpoint.delta_shape import VALUES, DeltaShape, block_table
from worker.forward.batch import StateChunks, StateWindows
from worker.ops.jit import HAS_TRITON

if INTERPRETED:
    from worker.attention.recurrent.delta_net_triton import delta_chunk_triton as delta_chunk
    from worker.attention.recurrent.delta_net_triton import delta_window_triton as delta_window
else:
    from worker.attention.recurrent.delta_net import delta_chunk, delta_window

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [DeltaShape(2, 1, 16, 32), DeltaShape(1, 2, 32, 16), DeltaShape(2, 3, 16, 16)]
WIDEST = 4
F32, BF16 = torch.float32, torch.bfloat16
BOUND = {F32: 4e-5, BF16: 0.03}  # on a GPU 0.0206 of one number of (1, 3, 128, 128)
NAN = float("nan")
NONE: Mapping[int, tuple[int, int]] = {}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Memory that nobody has written is NaN, the kernels' scratch too."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    # Not torch.use_deterministic_algorithms, which imports the compiler.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    yield
    torch._C._set_deterministic_algorithms(False)


class Net:
    """One layer: weights, and slots and ring that are NaN until a request writes them."""

    def __init__(self, shape: DeltaShape, num_rows: int, dtype: torch.dtype = F32) -> None:
        """dtype: of states."""
        self.shape = shape
        generator = torch.Generator("cpu").manual_seed(sum(shape))
        device = torch.get_default_device()

        def noise(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=generator, device="cpu").to(device)

        heads = shape.value_heads
        a_log, dt_bias = noise(heads).sub(1.0), 0.5 * noise(heads)
        a_log[0] = math.log(4)  # strong: e to minus the sum over a block overflows
        norm = 1 + 0.2 * noise(shape.value_dim)
        self.weights = DeltaWeights(0.5 * noise(shape.channels, 4), a_log, dt_bias, norm, 1e-6)
        values = min(VALUES, shape.value_dim)
        blocks = shape.value_dim // values
        sizes = shape.key_heads, shape.ratio, blocks, shape.key_dim, values
        self.state = DeltaState(
            torch.full((num_rows + 1, *sizes), NAN, dtype=dtype),
            torch.full((num_rows + 1, shape.key_heads, 3, shape.head_channels), NAN),
            torch.full((num_rows + 1, WIDEST, shape.raw_width), NAN),
        )
        slots = torch.randperm(num_rows, generator=generator, device="cpu") + 1
        self.state_slot = torch.tensor([0, *slots.tolist()])
        none = torch.zeros_like(self.state_slot)
        self.folded, self.seq_len, self.snap_slot = none, none.clone(), none.clone()
        self.noise = noise

    def tokens(self, count: int) -> Tensor:
        return self.noise(count, self.shape.packed_width)

    def prefill(
        self,
        parts: Sequence[tuple[int, Tensor]],
        padding: int = 0,
        snapshots: Mapping[int, tuple[int, int]] = NONE,
    ) -> list[Tensor]:
        """A batch of chunks, each the next tokens of a row; returns their outputs.

        snapshots: by row, a number of tokens, and the row to whose slot their state goes.
        """
        counts = [len(tokens) for _, tokens in parts]
        rows = torch.tensor([row for row, _ in parts])
        start = torch.tensor([0, *counts]).cumsum(0).int()
        self.seq_len[rows] += torch.tensor(counts)
        self.folded[rows] = self.seq_len[rows]
        packed = torch.cat([tokens for _, tokens in parts] + [self.tokens(padding)])
        chunks = StateChunks(
            start,
            self.seq_len[rows].int(),
            self.state_slot[rows].int(),
            torch.tensor([snapshots.get(row, (0, 0))[0] for row, _ in parts]).int(),
            self.state_slot[[snapshots.get(row, (0, 0))[1] for row, _ in parts]].int(),
            torch.tensor(block_table(start.tolist(), len(packed)), dtype=torch.int32),
        )
        out = torch.full((len(packed), self.shape.value_width), NAN)
        delta_chunk(packed, self.weights, self.state, chunks, out)
        assert not out[sum(counts) :].any()
        return list(out[: sum(counts)].split(counts))

    def decode(self, rows: Sequence[int], windows: Tensor, accepted: Sequence[int]) -> Tensor:
        """A step with windows [n, width, packed_width]; returns [n, width, value_width]."""
        n, width, _ = windows.shape
        live = torch.tensor(rows)
        columns = StateWindows(
            live, self.state_slot, self.folded, self.seq_len, self.snap_slot, width, 64
        )
        out = delta_window(windows.flatten(0, 1), self.weights, self.state, columns)
        before = self.seq_len[live]
        self.folded[live] = before + 1 if width == 1 else before
        self.seq_len[live] = before + torch.tensor(accepted)
        self.folded[0] = self.seq_len[0] = 0
        return out.view(n, width, -1)


def recurrence(net: Net, tokens: Tensor) -> Tensor:
    """Outputs [count, value_width] f64: no cuts, no windows, one number after the other."""
    shape, tokens, eps = net.shape, tokens.cpu(), net.weights.eps
    weights = DeltaWeights(*(weight.cpu() for weight in net.weights[:-1]), eps)
    keys, width = shape.key_heads * shape.key_dim, shape.value_dim
    conv, norm = weights.conv.double(), weights.norm.double()
    raw = torch.cat((tokens.new_zeros(3, shape.channels), tokens[:, : shape.channels])).double()
    z, b, a = tokens[:, shape.channels :].double().split(
        [shape.value_width, shape.value_heads, shape.value_heads], dim=-1
    )  # fmt: skip
    outputs = raw.new_zeros(len(tokens), shape.value_width)
    states = raw.new_zeros(shape.value_heads, shape.key_dim, width)
    for t in range(len(tokens)):
        x = sum(raw[t + tap] * conv[:, tap] for tap in range(4))
        x = x * torch.sigmoid(x)
        for head in range(shape.value_heads):
            first = head // shape.ratio * shape.key_dim
            q, k = x[first : first + shape.key_dim], x[keys + first : keys + first + shape.key_dim]
            v = x[2 * keys + head * width : 2 * keys + (head + 1) * width]
            q, k = (y / math.sqrt(y @ y + 1e-6) for y in (q, k))
            rate = math.log1p(math.exp(a[t, head] + weights.dt_bias[head]))
            decay = math.exp(-math.exp(weights.a_log[head]) * rate)
            beta = 1 / (1 + math.exp(-b[t, head]))
            s = states[head] * decay
            s = s + torch.outer(k, beta * (v - s.T @ k))
            states[head] = s
            o = s.T @ q / math.sqrt(shape.key_dim)
            o = o / math.sqrt((o @ o) / width + weights.eps) * norm
            gate = z[t, head * width : (head + 1) * width]
            outputs[t, head * width : (head + 1) * width] = o * gate * torch.sigmoid(gate)
    return outputs


def spans(borders: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(borders))


def check_right(x: Tensor, wanted: Tensor, dtype: torch.dtype = F32) -> None:
    bound = BOUND[dtype]
    torch.testing.assert_close(x.cpu().double(), wanted, rtol=bound, atol=bound)


def check_same(x: Tensor, y: Tensor, dtype: torch.dtype = F32) -> None:
    """The kernels' order of sums is fixed; torch's depends on a tensor's sizes."""
    bound = 0 if INTERPRETED or x.is_cuda else 1e-5 if dtype is F32 else BOUND[dtype]
    torch.testing.assert_close(x, y, rtol=0, atol=bound)


# Widths of three steps, one after the other, so that every change of width occurs.
WIDTHS = [(2, 1, 4), (4, 3, 1), (1, 2, 2)]
PROMPTS = [0, 70, 1, 3, 64]
# The fewest rows have the long prompt, which costs most.
SOME = [(SHAPES[0], 1, WIDTHS[:1]), (SHAPES[1], 70, WIDTHS[2:])]
CASES = [*SOME[-1:], *pairwise.more(SOME[0], *product(SHAPES, PROMPTS, [WIDTHS]))]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("shape", "prompt", "all_widths"), CASES, ids=str)
def test_every_width_and_acceptance_equals_the_recurrence(
    shape: DeltaShape, prompt: int, all_widths: list[tuple[int, ...]], dtype: torch.dtype
):
    """Rows differ in how many drafts are accepted. All have the same text; plain decode's bits."""
    for widths in all_widths:
        ways = list(product(*(range(1, width + 1) for width in widths)))
        if not pairwise.whole:  # each number once
            ways = [tuple(min(i, width) for width in widths) for i in range(1, max(widths) + 1)]
        rows = range(1, len(ways) + 2)  # and one that decodes plainly
        net = Net(shape, len(rows), dtype)
        text = net.tokens(prompt + sum(widths) + 1)
        wanted = recurrence(net, text)
        for first, last in spans([*range(0, prompt, 64), prompt]):
            for out in net.prefill([(row, text[first:last]) for row in rows], padding=3):
                check_right(out, wanted[first:last], dtype)
        plain = [
            net.decode([rows[-1]], text[None, at : at + 1], [1])[0, 0]
            for at in range(prompt, len(text))
        ]
        at = [prompt] * len(ways)
        for step, width in enumerate((*widths, 1)):
            accepted = [way[step] if step < len(widths) else 1 for way in ways]
            windows = net.tokens(len(ways) * width).view(len(ways), width, -1)  # drafts to reject
            for i, num in enumerate(accepted):
                windows[i, :num] = text[at[i] : at[i] + num]
            idle = net.tokens(width)[None]  # of a row that is not there
            out = net.decode([*rows[:-1], 0], torch.cat((windows, idle)), [*accepted, 0])
            assert not out[-1].any()
            for i, num in enumerate(accepted):
                for j in range(num):
                    position = at[i] + j
                    check_right(out[i, j], wanted[position], dtype)
                    check_same(out[i, j], plain[position - prompt], dtype)
                at[i] += num


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [SHAPES[1], *pairwise.more(SHAPES[0], SHAPES[2])], ids=str)
def test_neither_cut_nor_company_changes_a_bit_of_a_prompt(shape: DeltaShape, dtype: torch.dtype):
    net = Net(shape, 4, dtype)
    text, other = net.tokens(240 if pairwise.whole else 140), net.tokens(130)
    whole = net.prefill([(1, text)])[0]
    check_right(whole, recurrence(net, text), dtype)
    more = pairwise.more((2, [0, 128, 192, 240]), (3, [0, 64, 240]))
    for row, cuts in more or [(2, [0, 128, 140])]:
        parts = [text[first:last] for first, last in spans(cuts)]
        outs = [net.prefill([(4, other[:2]), (row, part)] if i else [(row, part)], padding=i)[-1]
                for i, part in enumerate(parts)]  # fmt: skip
        net.seq_len[4] = 0
        check_same(torch.cat(outs), whole, dtype)
        for part in net.state[:2]:
            check_same(part[net.state_slot[row]], part[net.state_slot[1]], dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", [SHAPES[1], *pairwise.more(SHAPES[0], SHAPES[2])], ids=str)
def test_a_snapshot_is_the_state_of_a_prompt_that_ends_there(
    shape: DeltaShape, dtype: torch.dtype
) -> None:
    """At a block's end in a chunk, at the chunk's own end, and in company."""
    net = Net(shape, 8, dtype)
    text, other = net.tokens(140), net.tokens(70)
    net.prefill([(1, text[:64])], snapshots={1: (64, 3)})
    net.prefill([(2, other), (1, text[64:])], padding=3, snapshots={1: (128, 4), 2: (64, 5)})
    for row, tokens in ((3, text[:64]), (4, text[64:128]), (5, other[:64])):
        net.seq_len[6] *= row != 5
        net.prefill([(6, tokens)])
        for part in net.state[:2]:
            check_same(part[net.state_slot[row]], part[net.state_slot[6]], dtype)
    assert net.state.s[net.state_slot[7:]].isnan().all()
    net.seq_len[4] = 128
    resumed = net.prefill([(4, text[128:])])[0]
    check_right(resumed, recurrence(net, text)[128:], dtype)


@pytest.mark.parametrize("shape", [SHAPES[1], *pairwise.more(SHAPES[0], SHAPES[2])], ids=str)
@pytest.mark.parametrize("start", [63, *pairwise.more(62, 64)])
def test_a_fold_that_passes_a_line_of_the_grid_stores_the_state_there(
    shape: DeltaShape, start: int
) -> None:
    """At any width and acceptance, of rows that have a slot for it; those beside it do not."""
    ways = list(product((1, 2, 3), (1, 2), (1, 2, 3)))
    ways = ways if pairwise.whole else ways[start % 5 :: 9]
    rows, plain = range(1, len(ways) + 1), (2 * len(ways) + 1, 2 * len(ways) + 2)
    net = Net(shape, plain[1])
    texts = [net.tokens(start + 10) for _ in plain]
    for row in rows[::2] if start == 63 else rows:
        net.snap_slot[row] = net.state_slot[len(ways) + row]
    net.prefill([(row, texts[row % 2][:start]) for row in [*rows, *plain]])
    at = [start] * len(ways)
    for step, width in enumerate((3, 2, 3, 1)):
        accepted = [(*way, 1)[step] for way in ways]
        windows = net.tokens(len(ways) * width).view(len(ways), width, -1)
        for i, num in enumerate(accepted):
            windows[i, :num] = texts[rows[i] % 2][at[i] : at[i] + num]
            at[i] += num
        net.decode(rows, windows, accepted)
        for row in rows:
            slot = net.state_slot[len(ways) + row]
            is_passed = start < 64 <= int(net.folded[row]) and bool(net.snap_slot[row])
            empty = [bool(part[slot].isnan().all()) for part in net.state[:2]]
            assert empty == [not is_passed] * 2
    for row, text in zip(plain, (texts[1], texts[0]), strict=True):
        for i in range(start, 64):  # to the line
            net.decode([row], text[None, i : i + 1], [1])
    for row in rows if start < 64 else ():
        for part in net.state[:2] if net.snap_slot[row] else ():
            check_same(part[net.snap_slot[row]], part[net.state_slot[plain[1 - row % 2]]])


def test_blocks_of_a_batch():
    requests, firsts = block_table([0, 130, 130, 131, 195], 200)
    assert requests == [0, 0, 0, 2, 3, 4, 4]
    assert firsts[:5] == [0, 64, 128, 130, 131]
    assert len(firsts) == len(requests)


if not INTERPRETED:

    @pytest.mark.skipif(not HAS_TRITON, reason=WHY)
    def test_the_kernels_compile_for_an_h200_one_for_all_widths() -> None:
        """With --whole of a 9B's sizes. Widths are arguments that nothing is specialised for."""
        from worker.attention.recurrent import delta_net_triton as kernels

        for kernel in (kernels._inputs_kernel, kernels._state_kernel):
            numbers = {param.name for param in kernel.params if param.do_not_specialize}
            assert {"width", "max_tokens"} <= numbers
            assert not {"width", "WIDTH"} & {p.name for p in kernel.params if p.is_constexpr}
        net = Net(DeltaShape(16, 2, *((128, 128) if pairwise.whole else (64, 64))), 2)
        *weights, eps = (net.weights[0].bfloat16(), *net.weights[1:])
        weights = DeltaWeights(*weights[:3], net.weights.norm.bfloat16(), eps)
        s, *raw = net.state
        state = DeltaState(s, *(each.bfloat16() for each in raw))
        packed, live = net.tokens(8).bfloat16(), torch.tensor([1, 2])
        rows = StateWindows(live, net.state_slot, net.folded, net.seq_len, net.snap_slot, 4, 64)
        start, lengths = torch.tensor([0, 8]).int(), torch.tensor([8]).int()
        blocks = torch.tensor(block_table([0, 8], 8), dtype=torch.int32)
        chunks = StateChunks(start, lengths, live[:1].int(), lengths, lengths, blocks)
        out = packed.new_empty(8, net.shape.value_width)
        with compiling(kernels) as made:
            kernels.delta_window_triton(packed, weights, state, rows)
            kernels.delta_chunk_triton(packed, weights, state, chunks, out)
        assert ".reqntid 32" in made["_state_kernel"], "sums over keys cross warps"
        assert "wgmma" in made["_scan_kernel"]
