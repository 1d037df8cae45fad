"""The products of experts with their tokens, and a token's sum of them."""

from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.config.checkpoint.experts import Held
from worker.ops.experts.route import Routes
from worker.ops.norms import swiglu
from worker.ops.op import op
from worker.ops.packed import worth
from worker.ops.scaled import eight_bits_ref, scaled_product_ref

# (scales, zeros, factors) of a stack of gates and ups, and of one of downs.
PackedPair: TypeAlias = tuple[tuple[Any, ...], tuple[Any, ...]]


class Finish(NamedTuple):
    """What is made of an expert's products: see ExpertShape for the numbers."""

    up_bias: Tensor | None = None  # [count, 2 · width], gates before ups; of any float, as the next
    down_bias: Tensor | None = None  # [count, hidden_size]
    gain: float = 1.0
    plus: float = 0.0
    limit: float = 0.0


PLAIN_FINISH = Finish()  # silu(gate) · up
MAX_BESIDE = 16  # most tokens whose shared experts are computed beside their own


class Beside(NamedTuple):
    """Shared experts, which every token has: one feed-forward as wide as some of them."""

    gate_up: Tensor  # [2 · some · width, hidden_size], gates before ups
    down: Tensor  # [hidden_size, some · width]

    def takes(self, gate_up: Tensor, finish: Finish) -> bool:
        """Whether they can be computed beside experts of this stack."""
        is_plain = finish.up_bias is finish.down_bias is None and finish[2:] == PLAIN_FINISH[2:]
        return is_plain and len(self.gate_up) % gate_up.shape[1] == 0


def gated_ref(products: Tensor, finish: Finish) -> Tensor:
    """(up + plus) · gate · sigmoid(gain · gate), both clamped; [.., width] of products' dtype.

    products: [.., 2 · width], gates before ups, biases added. In f32, and rounded once; with
    nothing to add or clamp it is swiglu.
    """
    if finish[2:] == PLAIN_FINISH[2:]:
        return swiglu(products)
    gate, up = products.float().chunk(2, -1)
    if finish.limit:
        gate, up = gate.clamp(max=finish.limit), up.clamp(-finish.limit, finish.limit)
    return ((up + finish.plus) * gate * torch.sigmoid(finish.gain * gate)).to(products.dtype)


def _plus(products: Tensor, bias: Tensor | None) -> Tensor:
    """products: [count, n, size]; bias: [count, size]."""
    return products if bias is None else products + bias[:, None]


def expert_products_ref(
    x: Tensor,
    routes: Routes,
    gate_up: Tensor,
    down: Tensor,
    held: Held,
    out: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    packed: PackedPair | None = None,
    finish: Finish = PLAIN_FINISH,
    beside: Beside | None = None,
    rows: Any = None,
) -> Tensor:
    """The sum over this rank's experts of weight · down(silu(gate(x)) · up(x)): [n, hidden_size].

    Biases are added in f32, before a product is rounded; see `gated_ref` for the rest of `finish`.

    rows: (values, of_rows, ..) of x in eight bits, where they are known; see eight_bits.

    x: [n, hidden_size]; gate_up: [total, 2 · width, hidden_size], gates before ups; down:
    [total, hidden_size, width]; all of x's dtype. out: [n, hidden_size], where the result goes;
    None: to new memory. scales: of gate_up and of down in e4m3, stacks of
    scaled_product_ref's. packed: of both in four bits, [.., columns / 2], what else
    ops.packed.worth takes. A token without experts here gets zeros. An expert's part is rounded
    to the dtype before the sum, which is in f32 and in the order of the token's experts; `beside`,
    of at most MAX_BESIDE tokens with matrices in x's dtype, or the routes' `plus` comes last. A
    row's result depends on that row alone on a GPU, bit for bit.
    """
    # Of all tokens with all experts: no shape depends on where they go, as in a graph.
    if packed is not None:
        up, low = (worth(*stack) for stack in ((gate_up, *packed[0]), (down, *packed[1])))
        gates = torch.einsum("nh,eih->eni", x.float(), up[..., : x.shape[1]])
        hidden = gated_ref(_plus(gates, finish.up_bias).to(x.dtype), finish)
        low = low[..., : hidden.shape[-1]]
        products = torch.einsum("eni,ehi->enh", hidden.float(), low)
    elif scales is None:
        gates = _plus(torch.einsum("nh,eih->eni", x, gate_up), finish.up_bias)
        hidden = gated_ref(gates.to(x.dtype), finish)
        products = torch.einsum("eni,ehi->enh", hidden.float(), down.float())
    else:
        f32, (values, of_rows, *_) = torch.float32, rows or eight_bits_ref(x)
        ups, downs = zip(gate_up, scales[0], strict=True), zip(down, scales[1], strict=True)
        gates = torch.stack([scaled_product_ref(values, of_rows, *up, f32) for up in ups])
        hidden = gated_ref(_plus(gates, finish.up_bias).to(x.dtype), finish)
        products = torch.stack([
            scaled_product_ref(*eight_bits_ref(part), *down, f32)
            for part, down in zip(hidden, downs, strict=True)
        ])  # fmt: skip
    products = _plus(products, finish.down_bias)
    total = weighted_sum(products, routes, held, x.dtype)
    if beside is not None:
        total += F.linear(swiglu(F.linear(x, beside.gate_up)), beside.down)
    if routes.plus is not None:
        total += routes.plus
    return total if out is None else out.copy_(total)


def weighted_sum(products: Tensor, routes: Routes, held: Held, dtype: torch.dtype) -> Tensor:
    """What expert_products adds up, [n, hidden_size] of `dtype`, in plain torch.

    products: [total, n, hidden_size] f32, of all tokens with all experts of this rank.
    """
    n, k = routes.ids.shape
    local = routes.ids.long() - held.first
    here = (local >= 0) & (local < held.total)
    tokens = torch.arange(n, device=products.device)[:, None]
    parts = products[local.clamp(0, held.total - 1), tokens]
    parts = torch.where(here[..., None], parts * routes.weights[..., None], 0).to(dtype)
    total = parts[:, 0].float()
    for place in range(1, k):
        total = total + parts[:, place]
    return total.to(dtype)


expert_products = op(expert_products_ref)
