"""A layer's experts in the place of its feed-forward; worker.ops.experts has their kernels."""

import re
from dataclasses import replace

from torch import Tensor, nn

from worker.config.checkpoint.experts import rank_experts
from worker.config.checkpoint.shape import ModelShape
from worker.forward.context import current
from worker.model.layers import Placement, ReplicatedLinear, selected
from worker.ops.experts.computed import refuse_others
from worker.ops.experts.product import expert_products
from worker.ops.experts.route import Routes, new_load, route
from worker.weights.shard import Part, Shard, all_of, whole

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
        refuse_others(shape.experts, placement.device)
        self.shape, size = shape.experts, shape.hidden_size
        self._collective = group = placement.collective
        blocks = shape.eight is not None and shape.eight.by_block
        self.held, columns = rank_experts(
            self.shape, placement.experts, group.rank, group.size, in_blocks=blocks
        )
        names = shape.features.experts
        assert names is not None
        self._names, self._part = names, Part(self.shape.width, columns)
        self.gate = placement.empty(self.shape.num_experts, size)
        kept = placement.where_kept(
            f"experts.{i}.{name}"
            for i in range(self.held.first, self.held.first + self.held.count)
            for name in (names.gate, names.up, names.down)
        )
        rows = {names.gate: self._part, names.up: self._part}
        self.gate_up = kept.stack(self.held.count, rows, all_of(size))
        self.down = kept.stack(self.held.count, {names.down: all_of(size)}, self._part)
        self.load = new_load(self.held, placement.device)
        self.shared = shared
        self.shared_gate = None
        if shared is not None and names.shared_gate:
            whole = replace(placement, eight=None)
            self.shared_gate = ReplicatedLinear(size, 1, whole, bias=False)

    def forward(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """hidden: [n, hidden_size], of the step's tokens with these numbers; None: of all."""
        slots = selected(current().batch.slot_mapping, rows)
        routes = route(hidden, self.gate, slots, self.sink, self.shape, self.held, self.load)
        out = None
        if self._collective.size > 1:
            out = self._collective.buffer((len(hidden), hidden.shape[1]), hidden.dtype)
        if self.shared is not None:
            # Before the products: the shared expert's part may lie in the same buffer.
            shared = self.shared(hidden)
            if self.shared_gate is not None:
                shared = shared * self.shared_gate(hidden).sigmoid()
            elif self._collective.size > 1:
                shared = shared.clone()
            return self._products(hidden, routes, out).add_(shared)
        return self._products(hidden, routes, out)

    def _products(self, hidden: Tensor, routes: Routes, out: Tensor | None) -> Tensor:
        up, down = self.gate_up, self.down
        scales = None
        if up.scales is not None and down.scales is not None:
            scales = up.scales, down.scales
        return expert_products(hidden, routes, up.tensor, down.tensor, self.held, out, scales)

    def shards(self, prefix: str) -> dict[str, Shard]:
        names, size = self._names, all_of(self.gate.shape[1])
        shards = {f"{prefix}.gate.weight": whole(self.gate)}
        for i in range(self.held.count):
            expert = f"{prefix}.experts.{self.held.first + i}"
            rows = {f"{expert}.{name}": self._part for name in (names.gate, names.up)}
            shards |= self.gate_up.shards(i, rows, size)
            shards |= self.down.shards(i, {f"{expert}.{names.down}": size}, self._part)
        if self.shared is not None:
            shards |= self.shared.shards(f"{prefix}.{names.shared}")  # pyright: ignore
        if self.shared_gate is not None:
            shards |= self.shared_gate.shards(f"{prefix}.{names.shared_gate}")
        return shards

    def is_elsewhere(self, name: str) -> bool:
        """Is this a tensor of an expert that another rank holds?"""
        found = EXPERT.search(name)
        number = int(found[1]) if found else self.held.first
        return 0 <= number < self.shape.num_experts and not (
            self.held.first <= number < self.held.first + self.held.count
        )
