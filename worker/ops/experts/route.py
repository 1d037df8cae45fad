"""Which experts a token goes to, with which weight, and in which order their rows stand.

What experts have had is counted on the device; nothing in a step waits for it.

The order follows from the experts and their tokens alone: nothing is read by the host, nothing is
counted by atomics, so a replay of a graph and an eager step have the same. Tokens of padding go to
no expert.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.config.checkpoint.experts import ExpertShape, Held
from worker.errors import Unsupported
from worker.ops.op import op


class Routes(NamedTuple):
    """The experts of n tokens, k a token. Assignment token · k + i: the token's i-th expert.

    Where a rank holds the expert that every token has, it is the last of the k, and its number is
    that of all others.

    A row is an assignment to an expert of this rank. Rows of an expert stand together, in the order
    of their tokens.
    """

    ids: Tensor  # [n, k] i32; among all experts; the number of them where a token is padding
    weights: Tensor  # [n, k] f32
    starts: Tensor  # [total + 1] i32; first row of each of this rank's experts, then their number
    order: Tensor  # [n · k] i32; the rows' assignments; undefined behind the last row
    plus: Tensor | None = None  # [n, hidden_size], contiguous: is added to their sum


def new_load(held: Held, device: torch.device) -> Tensor:
    """[2, count + 1] i64: rows that each expert of a rank has had, and steps in which it had some;
    behind the latter all steps. Without what every token has. Zeros."""
    return torch.zeros(2, held.count + 1, dtype=torch.int64, device=device)


# By ExpertShape.scoring: scores of all experts, of their logits; both [n, num_experts] f32.
SCORINGS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
}
TINY = 1e-20  # of a sum of weights, which may all be zero


def in_top_groups(scores: Tensor, shape: ExpertShape) -> Tensor:
    """The scores, those of experts outside a token's best groups -inf; [n, num_experts] f32.

    A group's worth is its largest score, or where a bias is in them the sum of its two largest
    (DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434; "DeepSeek-V3", arXiv:2412.19437).
    """
    of_groups = scores.unflatten(-1, (shape.num_groups, -1))
    worth = of_groups.topk(2 if shape.is_biased else 1, dim=-1).values.sum(-1)
    ranked = worth.nan_to_num(nan=float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    left = torch.ones_like(worth, dtype=torch.bool)
    left.scatter_(1, ranked[:, : shape.top_groups], value=False)
    return of_groups.masked_fill(left.unsqueeze(-1), float("-inf")).flatten(1)


def route_ref(
    x: Tensor,
    gate: Tensor,
    slots: Tensor | None,
    sink: int,
    shape: ExpertShape,
    held: Held,
    load: Tensor,
    bias: Tensor | None = None,
) -> Routes:
    """Scores of all experts' logits in f32, then the k largest; the lower index wins a tie.

    With a bias, [num_experts] f32, those whose score and bias are the largest together; of a shape
    with biases of its products it is one of the logits instead. With groups see `in_top_groups`.

    The expert that every token has, if it is held, has the weight 1, or where the gate has a row
    more the sigmoid of that row's logit.

    x: [n, hidden_size]; gate: [num_experts, hidden_size] of x's dtype; slots: [n] i64, where a
    token's KV goes: below `sink` it is padding; None: no token is. A NaN wins after all numbers,
    and makes a NaN of its weight, so every id is one of an expert. load: [2, count + 1] i64, see
    `new_load`; is added to.
    """
    logits, of_shared = (x.float() @ gate.float().t()).tensor_split([shape.num_experts], 1)
    if shape.has_biases:
        assert bias is not None
        logits, bias = logits + bias, None
    scores = SCORINGS[shape.scoring](logits)
    chosen = scores if bias is None else scores + bias
    if shape.num_groups > 1:
        chosen = in_top_groups(chosen, shape)
    ranked = chosen.nan_to_num(nan=float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    ids = ranked[:, : shape.top_k]
    weights = scores.gather(1, ids)
    if shape.renormalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    weights = weights * shape.factor if shape.factor != 1 else weights
    if held.shared:
        one = of_shared.sigmoid() if of_shared.shape[1] else torch.ones_like(weights[:, :1])
        ids = torch.cat((ids, torch.full_like(ids[:, :1], shape.num_experts)), 1)
        weights = torch.cat((weights, one), 1)
    if slots is not None:
        ids = ids.masked_fill((slots < sink)[:, None], shape.num_experts + held.shared)
    local = ids.flatten() - held.first
    local = torch.where((local >= 0) & (local < held.total), local, held.total)
    numbers = torch.arange(held.total + 1, device=x.device)
    starts = (local < numbers[:, None]).sum(1)
    rows = starts.diff()[: held.count]
    load[0, :-1] += rows
    load[1] += torch.cat((rows > 0, torch.ones_like(rows[:1], dtype=torch.bool)))
    return Routes(ids.int(), weights, starts.int(), local.argsort(stable=True).int())


route = op(route_ref)


class Load(NamedTuple):
    """Of all layers of experts of one rank, since the start."""

    layer_steps: int = 0
    distinct: int = 0  # experts that had tokens, summed over layers and steps
    busiest_share: float = 0.0  # of a layer's tokens, the mean of the layers


@torch.inference_mode()
def load_of(loads: Sequence[Tensor]) -> Load:
    """Sum up what `new_load` made for the layers: [2, num_experts + 1] i64 a layer.

    Waits for the device.
    """
    tokens, steps = torch.stack(list(loads)).cpu().unbind(1)  # [num_layers, num_experts + 1]
    rows = tokens[:, :-1].sum(1)
    shares = tokens.amax(1) / rows.clamp_min(1)
    layer_steps, distinct = int(steps[:, -1].sum()), int(steps[:, :-1].sum())
    return Load(layer_steps, distinct, shares.mean().item())


# Experts that are computed: field of ExpertShape -> its values. No other field changes what is.
COMPUTED: Mapping[str, Collection[object]] = {"scoring": SCORINGS, "activation": ("silu",)}


def refuse_others(shape: ExpertShape) -> None:
    """Raise Unsupported, with field and value, for experts that would not be computed."""
    for field, values in COMPUTED.items():
        if (value := getattr(shape, field)) not in values:
            raise Unsupported(
                f"experts: {field} {value!r}; computed: {', '.join(map(str, values))}"
            )
