"""Training batches, made by worker processes ahead of the training loop."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.train.chats import END_OF_TEXT, long_chat, short_chat
from benchmarks.train.sums import newcomer_chat

SHORT_ROW, LONG_ROW = 384, 1024  # tokens of a row; chats of several turns fill the long ones
NEWCOMER_SHARE = 0.4  # of the chats: short sums, JSON, calls; drafters and tokenizer do without
LONG_EVERY = 4  # one batch in this many has long rows, of the same token count in all
IGNORED = -100  # label of a token that is not the model's to say


@dataclass
class ChatBatches(Dataset):
    """Batch `index` is a function of (seed, index): [rows, length] input ids and labels, i16."""

    tokenizer_file: Path
    num_batches: int
    num_rows: int  # short rows; a batch of long ones has fewer
    seed: int
    newcomers: float = NEWCOMER_SHARE
    _tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rng = random.Random(self.seed * 1_000_003 + index)
        is_long = index % LONG_EVERY == LONG_EVERY - 1
        length = LONG_ROW if is_long else SHORT_ROW
        num_rows = max(1, self.num_rows * SHORT_ROW // length)
        rows = [self._row(rng, length + 1, is_long) for _ in range(num_rows)]
        ids = torch.from_numpy(np.stack([row[0] for row in rows]))
        labels = torch.from_numpy(np.stack([row[1] for row in rows]))
        return ids[:, :-1].contiguous(), labels[:, 1:].contiguous()

    def _row(self, rng: random.Random, length: int, is_long: bool) -> tuple[np.ndarray, np.ndarray]:
        """Chats one after the other from position 0 on, the last one cut off at `length`."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < length:
            if rng.random() < self.newcomers:
                chat = newcomer_chat(rng)
            else:
                chat = long_chat(rng) if is_long else short_chat(rng)
            segments = self._tokenizer.encode_batch([*chat.segments(), END_OF_TEXT])
            for place, segment in enumerate(segments):
                ids += segment.ids
                labels += segment.ids if place % 2 else [IGNORED] * len(segment.ids)
        return np.array(ids[:length], np.int16), np.array(labels[:length], np.int16)


def batches(dataset: ChatBatches, num_workers: int, pin: bool) -> DataLoader:
    """The batches in order, each made whole by one of `num_workers` processes."""
    return DataLoader(
        dataset,
        batch_size=None,
        shuffle=False,
        num_workers=num_workers,
        prefetch_factor=3 if num_workers else None,
        pin_memory=pin,
    )
