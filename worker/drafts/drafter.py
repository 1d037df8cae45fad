"""What drafters with weights have in common: network, token ids, and the target's features."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from worker.drafts.draft_forms import ANOTHER
from worker.drafts.drafter_shape import DrafterShape
from worker.errors import UserError
from worker.forward.batch import Batch
from worker.model.attention import RotaryEmbedding
from worker.model.decoder import Decoder, Taps
from worker.model.layers import VocabParallelEmbedding
from worker.model.placement import Placement
from worker.step.state import StepState
from worker.weights.base import Matrix
from worker.weights.formats import format_of
from worker.weights.loader import fill_with_noise, read_weights, settle
from worker.weights.shard import Key, Shard, split_heads, whole


class Stack(nn.ModuleList):
    """Modules that a checkpoint numbers."""

    def shards(self, prefix: str) -> dict[Key, Shard]:
        """All modules' tensors, by checkpoint name."""
        shards: dict[Key, Shard] = {}
        for number, module in enumerate(self):
            held: Any = module
            shards |= held.shards(f"{prefix}.{number}")
        return shards


class DrafterModel(nn.Module):
    """One rank of a drafter, on the device of its target, in its dtype, divided as it is.

    It uses the target's embedding and head unless it has its own. `max_positions` is of the served
    length, whatever the drafter was trained for. Raises Unsupported if it cannot be divided among
    the target's ranks.
    """

    shape: DrafterShape

    def __init__(self, shape: DrafterShape, target: Decoder, max_positions: int) -> None:
        super().__init__()
        self.shape = shape
        self.target_is_quantised = target.shape.quantization is not None
        self.placement, self.collective = target.placement, target.collective
        device = target.placement.device
        rank, size = self.collective.rank, self.collective.size
        self.heads = split_heads(shape.num_heads, shape.num_kv_heads, rank, size)
        self.rotary = RotaryEmbedding(shape, shape.rope_of_most, max_positions, device)
        self.embedding = self._rows("embedding", shape.target_vocab_size, target.embedding)
        self.head = self._rows("head", shape.vocab_size, target.head)
        self.head_copy: Matrix | None = None  # in eight bits; None: drafts take the head itself
        # [vocab_size] i64: the target's id of each of the head's; None: they are the same.
        self.id_map: Tensor | None = None
        # d2t: target id minus draft id, by draft id. t2d: which target ids have a draft id.
        self.tables = {  # parts that are tensors, not modules
            "d2t": torch.zeros(shape.vocab_size, dtype=torch.int64, device=device),
            "t2d": torch.zeros(shape.target_vocab_size, dtype=torch.bool, device=device),
        }

    def _rows(self, part: str, num: int, shared: VocabParallelEmbedding) -> VocabParallelEmbedding:
        if part not in self.shape.names:
            return shared
        return VocabParallelEmbedding(num, self.shape.hidden_size, self.placement)

    def inside(self, part: str) -> Placement:
        """Of a part whose matrices are in the files' format, where products take it."""
        kept = format_of(self.shape.quantization)
        placement = replace(self.placement, path=self.shape.names[part])
        return replace(placement, format=kept) if kept.multiplies(placement.device) else placement

    def features(self, taps: Tensor) -> Tensor:
        """Fuse [n, num_features · target_hidden_size] into [n, hidden_size]."""
        raise NotImplementedError

    def shards(self) -> dict[Key, Shard]:
        shards: dict[Key, Shard] = {}
        for part, name in self.shape.names.items():
            if part in self.tables:
                shards[Key(name)] = whole(self.tables[part])
            else:
                shards |= getattr(self, part).shards(name)
        return shards

    def ignores(self, name: str) -> bool:
        return name.endswith(Decoder.ignored_suffixes)

    def fill(self, path: Path, *, noise: int | None = None) -> None:
        """Fill the weights from directory `path`, in eval mode; see load_model, and `_map_ids`.

        Noise gives a reduced vocabulary evenly spread ids.
        """
        if noise is not None:
            # Names of its own: a part that is called as one of the target's is not to equal it.
            shards = {
                key._replace(tensor=f"draft.{key.tensor}"): shard
                for key, shard in self.shards().items()
                if shard.dest.is_floating_point()
            }
            fill_with_noise(shards, noise)
            self._spread_ids()
        else:
            read_weights(self, path)
        self._map_ids(path)
        settle(self)
        self.eval()

    def _spread_ids(self) -> None:
        own = torch.arange(self.shape.vocab_size, device=self.placement.device)
        targets = own * self.shape.target_vocab_size // self.shape.vocab_size
        self.tables["d2t"].copy_(targets - own)
        self.tables["t2d"].zero_()[targets] = True

    def _map_ids(self, path: Path) -> None:
        """Make `id_map` of the tables, which are filled by now. Waits for the device.

        Raises UserError if ids are not the target's or not ascending, or the two tables disagree.
        """
        names, size, offsets = self.shape.names, self.shape.target_vocab_size, self.tables["d2t"]
        targets = torch.arange(self.shape.vocab_size, device=offsets.device) + offsets
        if bool(((targets < 0) | (targets >= size)).any()):
            raise UserError(
                f"{path}: {names['d2t']} leads to ids beyond the target's {size}; {ANOTHER}"
            )
        if bool((targets[1:] <= targets[:-1]).any()):
            raise UserError(f"{path}: {names['d2t']} does not lead to ascending ids; {ANOTHER}")
        if "t2d" in names and not torch.equal(self.tables["t2d"].nonzero().flatten(), targets):
            raise UserError(f"{path}: {names['t2d']} and d2t name different ids; {ANOTHER}")
        self.id_map = targets if self.shape.vocab_size < size else None


Model = TypeVar("Model", bound=DrafterModel)


@dataclass(frozen=True, slots=True)
class Features(Generic[Model]):
    """Makes a drafter's features of what the target has computed."""

    model: Model  # filled
    taps: Taps | None  # what the target leaves for it; None: it is fed with the target's output
    poison: bool  # make taps NaN once they are read, so that one that is not written is noticed

    def of(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """[num_tokens, hidden_size of the drafter], of the latest step; hidden: the target's."""
        if self.taps is None:
            return self.model.features(hidden)
        rows = self.taps.rows(num_tokens)
        features = self.model.features(rows)
        if self.poison:
            rows.fill_(float("nan"))
        return features


def stored_tokens(state: StepState, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Batch:
    """Tokens whose keys and values are stored while nothing attends; all [n] i64."""
    table = state.page_table[:0]
    return Batch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slots,
        query_start=table[:, 0],
        seq_lens=table[:, 0],
        page_table=table,
        num_reqs=0,
        num_tokens=len(positions),
        max_query_len=0,
        max_seq_len_ub=0,
    )
