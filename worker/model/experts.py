"""A layer's experts in the place of its feed-forward; worker.ops.experts has their kernels."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from worker.config.checkpoint.experts import rank_experts
from worker.config.checkpoint.shape import LayerShape
from worker.forward.context import current
from worker.model.layers import ReplicatedLinear, selected
from worker.model.placement import Placement
from worker.ops.experts.product import MAX_BESIDE, Finish
from worker.ops.experts.route import new_load, refuse_others, route
from worker.weights.base import Parts
from worker.weights.shard import Key, Part, Shard, all_of, stacked, whole

EXPERT = re.compile(r"\.experts\.(\d+)\.")  # in a tensor's name


class Experts(nn.Module):
    """Each token's experts, weighted: [num_tokens, hidden_size] -> this rank's part of the sum.

    shared: the expert that every token has, None if there is none.
    """

    reader = None  # of what forward() takes: more than one
    sink = 1  # tokens whose KV goes to slots below it are padding; set by Decoder.pad_below

    def __init__(
        self, shape: LayerShape, placement: Placement, shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        assert shape.experts is not None
        refuse_others(shape.experts)
        self.shape, size = shape.experts, shape.hidden_size
        self._collective = group = placement.collective
        self.held, columns = rank_experts(
            self.shape, placement.experts, group.rank, group.size, group=shape.scale_group
        )
        names = shape.features.experts
        assert names is not None
        self._names, part = names, Part(self.shape.width, columns)
        self.gate = placement.empty(self.shape.num_experts, size)
        self.up_bias = self.down_bias = None
        if self.shape.has_biases:
            self.up_bias = placement.empty(self.held.count, 2 * len(part))
            self.down_bias = placement.empty(self.held.count, size)
        modules = [
            f"experts.{i}.{name}"
            for i in range(self.held.first, self.held.first + self.held.count)
            for name in (names.gate, names.up, names.down)
        ]
        gate_up = {names.gate: part, names.up: part}
        stacks = [(gate_up, all_of(size)), ({names.down: all_of(size)}, part)]
        self.gate_up, self.down = (
            placement.matrix(Parts(rows, columns, modules=modules, held=self.held))
            for rows, columns in stacks
        )
        self.bias = None
        if names.bias:
            self.bias = placement.empty(self.shape.num_experts, dtype=torch.float32)
        self.load = new_load(self.held, placement.device)
        sums_here = len(part) == part.size or group.rank == 0  # else it would count once a rank
        self.gate_up.finish = Finish(
            self.up_bias, self.down_bias if sums_here else None,
            self.shape.gain, self.shape.plus, self.shape.limit,
        )  # fmt: skip
        self.shared = shared
        self.shared_gate = None
        if shared is not None and names.shared_gate:
            self.shared_gate = ReplicatedLinear(size, 1, placement.plain, bias=False)
        elif shared is not None:
            pair: Any = shared.pair
            self.gate_up.shared = pair if pair and self.gate_up.carries(pair) else None

    def forward(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """hidden: [n, hidden_size], of the step's tokens with these numbers; None: of all."""
        slots = selected(current().batch.slot_mapping, rows)
        options = () if self.bias is None else (self.bias,)
        routes = route(
            hidden, self.gate, slots, self.sink, self.shape, self.held, self.load, *options
        )
        out = None
        if self._collective.size > 1:
            out = self._collective.buffer((len(hidden), hidden.shape[1]), hidden.dtype)
        is_carried = self.gate_up.shared is not None and len(hidden) <= MAX_BESIDE
        if self.shared is not None and not is_carried:
            # Before the products: the shared expert's part may lie in the same buffer.
            shared = self.shared(hidden)
            if self.shared_gate is not None:
                shared = shared * self.shared_gate(hidden).sigmoid()
            elif self._collective.size > 1:
                shared = shared.clone()
            return self.gate_up.experts(self.down, hidden, routes, out).add_(shared)
        return self.gate_up.experts(self.down, hidden, routes, out)

    def shards(self, prefix: str) -> dict[Key, Shard]:
        shards = {Key(f"{prefix}.{self._names.router}.weight"): whole(self.gate)}
        if self.bias is not None:
            shards[Key(f"{prefix}.{self._names.bias}")] = whole(self.bias)
        for i in range(self.held.count):
            expert = f"{prefix}.experts.{self.held.first + i}"
            shards |= self.gate_up.shards(expert, i) | self.down.shards(expert, i)
            if self.up_bias is not None and self.down_bias is not None:
                rows = self.gate_up.parts.named(expert, ".bias")
                shards |= stacked(self.up_bias[i], rows)
                shards[Key(f"{expert}.{self._names.down}.bias")] = whole(self.down_bias[i])
        if self.shared is not None:
            shards |= self.shared.shards(f"{prefix}.{self._names.shared}")  # pyright: ignore
        if self.shared_gate is not None:
            shards |= self.shared_gate.shards(f"{prefix}.{self._names.shared_gate}")
        return shards

    def is_elsewhere(self, name: str) -> bool:
        """Is this a tensor of an expert that another rank holds?"""
        found = EXPERT.search(name)
        number = int(found[1]) if found else self.held.first
        return 0 <= number < self.shape.num_experts and not (
            self.held.first <= number < self.held.first + self.held.count
        )
