"""Which experts a token goes to, with which weight, and in which order their rows stand.

The order follows from the experts and their tokens alone: nothing is read by the host, nothing is
counted by atomics, so a replay of a graph and an eager step have the same. Tokens of padding go to
no expert.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from worker.config.checkpoint.experts import ExpertShape, Held
from worker.ops.op import op


class Routes(NamedTuple):
    """The experts of n tokens, k a token. Assignment token · k + i: the token's i-th expert.

    A row is an assignment to an expert of this rank. Rows of an expert stand together, in the order
    of their tokens.
    """

    ids: Tensor  # [n, k] i32; among all experts; the number of all experts where a token is padding
    weights: Tensor  # [n, k] f32
    starts: Tensor  # [count + 1] i32; first row of each of this rank's experts, then their number
    order: Tensor  # [n · k] i32; the rows' assignments; undefined behind the last row


def new_load(held: Held, device: torch.device) -> Tensor:
    """[2, count + 1] i64: rows that each expert of a rank has had, and steps in which it had some;
    behind the latter all steps. Zeros."""
    return torch.zeros(2, held.count + 1, dtype=torch.int64, device=device)


# By ExpertShape.scoring: scores of all experts, of their logits; both [n, num_experts] f32.
SCORINGS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
}


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

    With a bias, [num_experts] f32, those whose score and bias are the largest together.

    x: [n, hidden_size]; gate: [num_experts, hidden_size] of x's dtype; slots: [n] i64, where a
    token's KV goes: below `sink` it is padding; None: no token is. A NaN wins after all numbers,
    and makes a NaN of its weight, so every id is one of an expert. load: [2, count + 1] i64, see
    `new_load`; is added to.
    """
    scores = SCORINGS[shape.scoring](x.float() @ gate.float().t())
    chosen = scores if bias is None else scores + bias
    ranked = chosen.nan_to_num(nan=float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    ids = ranked[:, : shape.top_k]
    weights = scores.gather(1, ids)
    if shape.renormalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * shape.factor if shape.factor != 1 else weights
    if slots is not None:
        ids = ids.masked_fill((slots < sink)[:, None], shape.num_experts)
    local = ids.flatten() - held.first
    local = torch.where((local >= 0) & (local < held.count), local, held.count)
    numbers = torch.arange(held.count + 1, device=x.device)
    starts = (local < numbers[:, None]).sum(1)
    rows = starts.diff()
    load[0, :-1] += rows
    load[1] += torch.cat((rows > 0, torch.ones_like(rows[:1], dtype=torch.bool)))
    return Routes(ids.int(), weights, starts.int(), local.argsort(stable=True).int())


route = op(route_ref)
