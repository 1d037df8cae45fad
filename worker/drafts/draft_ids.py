"""Which of the target's token ids a drafter's head has rows for."""

from pathlib import Path

import torch
from torch import Tensor, nn

from worker.drafts.drafter_shape import DrafterShape
from worker.errors import UserError
from worker.model.shard import Shard, whole


class DraftIds(nn.Module):
    """A drafter's own ids, and the target's id of each: its id + d2t[its id]."""

    offsets: Tensor  # [vocab_size] i64, d2t as the checkpoint has it
    used: Tensor  # [target_vocab_size] bool, t2d as the checkpoint has it

    def __init__(self, spec: DrafterShape, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.targets: Tensor | None = None  # [vocab_size] i64; None: the ids are the target's
        offsets = torch.zeros(spec.vocab_size, dtype=torch.int64, device=device)
        used = torch.zeros(spec.target_vocab_size, dtype=torch.bool, device=device)
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("used", used, persistent=False)

    def shards(self) -> dict[str, Shard]:
        tables, names = {"d2t": self.offsets, "t2d": self.used}, self.spec.names
        return {names[part]: whole(table) for part, table in tables.items() if part in names}

    def spread(self) -> None:
        """Fill the tables of a drafter without a checkpoint: evenly spaced ids of the target."""
        own = torch.arange(self.spec.vocab_size, device=self.offsets.device)
        targets = own * self.spec.target_vocab_size // self.spec.vocab_size
        self.offsets.copy_(targets - own)
        self.used.zero_()[targets] = True

    def settle(self, path: Path) -> None:
        """Make `targets` of the tables, which are filled by now. Waits for the device.

        Raises UserError if an id is not the target's, or stands twice or out of order, or the two
        tables of directory `path` disagree.
        """
        names, size = self.spec.names, self.spec.target_vocab_size
        targets = torch.arange(self.spec.vocab_size, device=self.offsets.device) + self.offsets
        if bool(((targets < 0) | (targets >= size)).any()):
            raise UserError(f"{path}: {names['d2t']} leads to ids beyond the target's {size}")
        if bool((targets[1:] <= targets[:-1]).any()):
            raise UserError(f"{path}: {names['d2t']} does not lead to ascending ids")
        if "t2d" in names and not torch.equal(self.used.nonzero().flatten(), targets):
            raise UserError(f"{path}: {names['t2d']} and d2t name different ids")
        self.targets = targets if self.spec.vocab_size < size else None
