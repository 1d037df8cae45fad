"""What the networks of drafters have in common."""

from pathlib import Path

from torch import Tensor, nn

from worker.drafts.draft_ids import DraftIds
from worker.drafts.drafter_shape import DrafterShape
from worker.model.decoder import Decoder
from worker.model.layers import RotaryEmbedding, VocabParallelEmbedding
from worker.model.loader import LoadFormat, fill_with_noise, read_weights
from worker.model.shard import Shard, split_heads


class DrafterModel(nn.Module):
    """One rank of a drafter, on the device of its target, in its dtype, divided as it is.

    It uses the target's embedding and head unless it has its own. `max_positions` is of the served
    length, whatever the drafter was trained for. Raises Unsupported if it cannot be divided among
    the target's ranks.
    """

    spec: DrafterShape

    def __init__(self, spec: DrafterShape, target: Decoder, max_positions: int) -> None:
        super().__init__()
        self.spec = spec
        self.placement, self.collective = target.placement, target.collective
        device = target.placement.device
        rank, size = self.collective.rank, self.collective.size
        self.heads = split_heads(spec.num_heads, spec.num_kv_heads, rank, size)
        self.rotary = RotaryEmbedding(spec, max_positions, device)
        self.embedding = self._rows("embedding", spec.target_vocab_size, target.embedding)
        self.head = self._rows("head", spec.vocab_size, target.head)
        self.ids = DraftIds(spec, device)

    def _rows(self, part: str, num: int, shared: VocabParallelEmbedding) -> VocabParallelEmbedding:
        if part not in self.spec.names:
            return shared
        return VocabParallelEmbedding(num, self.spec.hidden_size, self.placement)

    @property
    def id_map(self) -> Tensor | None:
        """[vocab_size] i64: the target's id of each of the head's; None: they are the same."""
        return self.ids.targets

    def shards(self) -> dict[str, Shard]:
        """Checkpoint name -> Shard, for every tensor that this rank needs."""
        raise NotImplementedError

    def ignores(self, name: str) -> bool:
        """May a checkpoint hold the tensor `name` although no shard is made of it?"""
        return name.endswith(Decoder.ignored_suffixes)

    def fill(self, path: Path, *, load_format: LoadFormat = "safetensors", seed: int = 0) -> None:
        """Fill the weights from directory `path`, in eval mode; see load_model.

        "dummy" gives a reduced vocabulary evenly spread ids. Raises ValueError as load_model, or
        if the drafter's ids do not fit the target's.
        """
        if load_format == "dummy":
            tables = self.ids.shards()
            # Names of its own: a part that is called as one of the target's is not to equal it.
            own = {f"draft.{name}": s for name, s in self.shards().items() if name not in tables}
            fill_with_noise(own, seed)
            self.ids.spread()
        else:
            read_weights(self, path)
        self.ids.settle(path)
        self.eval()
