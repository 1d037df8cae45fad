"""A layer's experts in the place of its feed-forward; worker.ops.experts has their kernels."""

import re
from dataclasses import replace

from torch import Tensor, nn

from worker.forward.context import current
from worker.model.layers import Placement, ReplicatedLinear, selected
from worker.model.shape import ModelShape
from worker.model.shard import Part, Shard, all_of, stacked, whole
from worker.ops.experts.product import expert_products
from worker.ops.experts.route import new_load, route
from worker.ops.experts.shape import rank_experts

EXPERT = re.compile(r"\.experts\.(\d+)\.")  # in a tensor's name


class Experts(nn.Module):
    """Each token's experts, weighted: [num_tokens, hidden_size] -> this rank's part of the sum.

    shared: the expert that every token has, None if there is none.
    """

    sink = 1  # tokens whose KV goes to slots below it are padding; set by Decoder.pad_below

    def __init__(
        self, shape: ModelShape, placement: Placement, shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        assert shape.experts is not None
        self.shape, size = shape.experts, shape.hidden_size
        self._collective = group = placement.collective
        self.held, self._columns = rank_experts(
            self.shape, placement.experts, group.rank, group.size
        )
        width = self._columns.stop - self._columns.start
        self._names = shape.features.experts
        self.gate = placement.empty(self.shape.num_experts, size)
        self.gate_up = placement.empty(self.held.count, 2 * width, size)
        self.down = placement.empty(self.held.count, size, width)
        self.load = new_load(self.held, placement.device)
        self.shared = shared
        self.shared_gate = None
        if shared is not None:
            whole = replace(placement, eight=None)
            self.shared_gate = ReplicatedLinear(size, 1, whole, bias=False)

    def forward(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """hidden: [n, hidden_size], of the step's tokens with these numbers; None: of all."""
        slots = selected(current().batch.slot_mapping, rows)
        routes = route(hidden, self.gate, slots, self.sink, self.shape, self.held, self.load)
        out = None
        if self._collective.size > 1:
            out = self._collective.buffer((len(hidden), hidden.shape[1]), hidden.dtype)
        if self.shared is not None and self.shared_gate is not None:
            # Before the products: the shared expert's part may lie in the same buffer.
            shared = self.shared(hidden) * self.shared_gate(hidden).sigmoid()
            products = expert_products(hidden, routes, self.gate_up, self.down, self.held, out)
            return products.add_(shared)
        return expert_products(hidden, routes, self.gate_up, self.down, self.held, out)

    def shards(self, prefix: str) -> dict[str, Shard]:
        names, size = self._names, all_of(self.gate.shape[1])
        assert names is not None
        shards = {f"{prefix}.gate.weight": whole(self.gate)}
        part = Part(self.shape.width, self._columns)
        for i in range(self.held.count):
            expert = f"{prefix}.experts.{self.held.first + i}"
            rows = {f"{expert}.{name}.weight": part for name in (names.gate, names.up)}
            shards |= stacked(self.gate_up[i], rows, size)
            down = {f"{expert}.{names.down}.weight": size}
            shards |= stacked(self.down[i], down, part)
        if self.shared is not None and self.shared_gate is not None:
            shards |= self.shared.shards(f"{prefix}.shared_expert")  # pyright: ignore
            shards |= self.shared_gate.shards(f"{prefix}.shared_expert_gate")
        return shards

    def is_elsewhere(self, name: str) -> bool:
        """Is this a tensor of an expert that another rank holds?"""
        found = EXPERT.search(name)
        number = int(found[1]) if found else self.held.first
        return 0 <= number < self.shape.num_experts and not (
            self.held.first <= number < self.held.first + self.held.count
        )
