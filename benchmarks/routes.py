"""Which experts tokens have where weights are random: `benchmarks.engine --routing KIND`.

    real     as the model's own routers say
    uniform  any experts, all alike
    zipf     the expert of rank r is drawn in proportion to 1 / r; each layer ranks them anew
    table    round robin: token i of a step has the experts i · k, i · k + 1, ... modulo all

The routers still run, on rows whose logits are the wanted ones; which row of `uniform` and `zipf`,
the slot of a token's KV says. Picking them costs two small kernels a layer.
"""

from typing import Any

import torch
from torch import Tensor

import worker.model.experts
from worker.config.checkpoint.experts import ExpertShape
from worker.ops.experts.route import Routes, route

KINDS = ("real", "uniform", "zipf", "table")
ROWS = 4096  # after which tokens have the same experts again


def logits_of(kind: str, shape: ExpertShape, layer: int) -> Tensor:
    """[ROWS, num_experts] f32 of one layer. The k largest of a row are its experts."""
    generator = torch.Generator().manual_seed(layer)
    number, k = shape.num_experts, shape.top_k
    if kind == "table":
        behind = (torch.arange(number) - k * torch.arange(ROWS)[:, None]) % number
        return -behind.float() / number
    # The k largest of log p + Gumbel noise are k draws by p without repetition (Yellott 1977).
    noise = -torch.empty(ROWS, number).exponential_(generator=generator).log()
    if kind == "zipf":
        ranks = torch.randperm(number, generator=generator) + 1
        noise -= ranks.float().log()
    return noise


class ChosenRoutes:
    """In place of `route` where `worker.model.experts` calls it."""

    def __init__(self, kind: str) -> None:
        self._kind, self._rows = kind, dict[int, Tensor]()  # [ROWS, hidden_size] of each router

    def __call__(
        self,
        x: Tensor,
        gate: Tensor,
        slots: Tensor | None,
        sink: int,
        shape: ExpertShape,
        *rest: Any,
    ) -> Routes:
        """As `route`, but for the experts."""
        rows = self._rows.get(gate.data_ptr())
        if rows is None:
            logits = logits_of(self._kind, shape, len(self._rows)).to(gate.device)
            rows = (logits @ torch.linalg.pinv(gate.float()).t()).to(x.dtype)
            self._rows[gate.data_ptr()] = rows
        numbers = torch.arange(len(x), device=x.device)
        if slots is not None and self._kind != "table":
            numbers = slots
        return route(rows[numbers % ROWS], gate, slots, sink, shape, *rest)


def install(kind: str) -> None:
    """For all models of this process."""
    if kind != "real":
        worker.model.experts.route = ChosenRoutes(kind)  # pyright: ignore
