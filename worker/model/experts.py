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
from worker.weights.base import Operand, Parts, Reads, itself
from worker.weights.plain import PLAIN
from worker.weights.shard import Key, Part, Shard, all_of, stacked, whole

EXPERT = re.compile(r"\.experts\.(\d+)\.")  # in a tensor's name


def joins(shape: LayerShape, placement: Placement) -> bool:
    """Whether the expert that every token has lies in one stack with all others.

    So it does where it is as they are: as wide, divided and stored alike. In the model's dtype and
    without a gate it stays apart: few tokens have it in a launch of the others' (`Beside`), and of
    many it is faster by itself.
    """
    experts, names = shape.experts, shape.features.experts
    assert experts is not None
    if names is None or experts.shared_width != experts.width or experts.gain != 1:
        return False
    group, made = placement.collective, placement.format
    held, _ = rank_experts(
        experts, placement.experts, group.rank, group.size, group=shape.scale_group
    )
    kinds = {
        made.takes(f"{placement.path}.{expert}.{name}")
        for expert in (names.shared, *(f"experts.{i}" for i in range(experts.num_experts)))
        for name in (names.gate, names.up, names.down)
    }
    pays = bool(names.shared_gate) or (made is not PLAIN and kinds == {True})
    return pays and len(kinds) == 1 and held.count == experts.num_experts


class Experts(nn.Module):
    """Each token's experts, weighted: [num_tokens, hidden_size] -> this rank's part of the sum.

    shared: the expert that every token has, None if there is none, or if it `joins` the others.
    """

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
        joined = int(shared is None and self.shape.shared_width > 0)
        self.held = self.held._replace(shared=joined)
        self.gate = placement.empty(self.shape.num_experts + self._has_gate_row, size)
        self.up_bias = self.down_bias = None
        if self.shape.has_biases:
            self.up_bias = placement.empty(self.held.count, 2 * len(part))
            self.down_bias = placement.empty(self.held.count, size)
        modules = [
            f"{expert}.{name}"
            for expert in self._held_modules()
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
        # Others read what forward() takes, too.
        self.reader = Reads(self.gate_up.add_norm_both)
        self.shared = shared
        self.shared_gate = None
        if shared is not None and names.shared_gate:
            self.shared_gate = ReplicatedLinear(size, 1, placement.plain, bias=False)
        elif shared is not None:
            pair: Any = shared.pair
            self.gate_up.shared = pair if pair and self.gate_up.carries(pair) else None

    def forward(self, taken: Operand, rows: Tensor | None = None) -> Tensor:
        """taken: [n, hidden_size], of the step's tokens with these numbers; None: of all."""
        hidden = itself(taken)
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
            routes = routes._replace(plus=shared)
        return self.gate_up.experts(self.down, taken, routes, out)

    @property
    def _has_gate_row(self) -> bool:
        """Whether the gate of the expert that every token has is the router's last row."""
        return bool(self.held.shared and self._names.shared_gate)

    def _held_modules(self) -> list[str]:
        """The names of the stacks' experts, in order."""
        numbers = range(self.held.first, self.held.first + self.held.count)
        return [f"experts.{i}" for i in numbers] + [self._names.shared] * self.held.shared

    def shards(self, prefix: str) -> dict[Key, Shard]:
        num_experts = self.shape.num_experts
        shards = {Key(f"{prefix}.{self._names.router}.weight"): whole(self.gate[:num_experts])}
        if self._has_gate_row:
            name = f"{prefix}.{self._names.shared_gate}.weight"
            shards[Key(name)] = whole(self.gate[num_experts:])
        if self.bias is not None:
            shards[Key(f"{prefix}.{self._names.bias}")] = whole(self.bias)
        for i, module in enumerate(self._held_modules()):
            expert = f"{prefix}.{module}"
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
