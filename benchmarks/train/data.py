"""Training batches, made by worker processes ahead of the training loop."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.train.agents import agent_chat
from benchmarks.train.chats import END_OF_TEXT, Chat, long_chat, short_chat
from benchmarks.train.forms import form_chat
from benchmarks.train.sums import newcomer_chat

SHORT_ROW, LONG_ROW = 384, 1024  # tokens of a row; chats of several turns fill the long ones
NEWCOMER_SHARE = 0.4  # of the chats: short sums, JSON, calls; the tokenizer does without
FORM_SHARE = 0.08  # of the chats: answers that a grammar leads
AGENT_SHARE = 0.4  # of the chats of long rows, if the model reaches further: short ones of agents
LONG_EVERY = 4  # one batch in this many has long rows, of the same token count in all
# Of a model that reaches further, from that part of the training on: how long the rows are of one
# batch in five, in turn.
FARTHER = {
    0.0: (2048, 4096, 2048, 4096, 8192),
    0.3: (2048, 16384, 4096, 8192, 16384),
    0.55: (4096, 65536, 2048, 16384, 32768, 8192),
}
FARTHER_EVERY = 5
LEAST_ROOM = 300  # tokens in which another chat of an agent begins
IGNORED = -100  # label of a token that is not the model's to say


@dataclass
class ChatBatches(Dataset):
    """Batch `index` is a function of (seed, index): [rows, length] input ids and labels, i16."""

    tokenizer_file: Path
    num_batches: int
    num_rows: int  # short rows; a batch of long ones has fewer
    seed: int
    newcomers: float = NEWCOMER_SHARE
    reach: int = LONG_ROW  # tokens of the longest row
    _tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rng = random.Random(self.seed * 1_000_003 + index)
        length = self._length(index)
        num_rows = max(1, self.num_rows * SHORT_ROW // length)
        row = self._farther_row if length > LONG_ROW else self._row
        rows = [row(rng, length + 1) for _ in range(num_rows)]
        ids, labels = (
            torch.from_numpy(np.array(part, np.int16)) for part in zip(*rows, strict=True)
        )
        return ids[:, :-1].contiguous(), labels[:, 1:].contiguous()

    def _length(self, index: int) -> int:
        turn, rest = divmod(index, FARTHER_EVERY)
        if self.reach > LONG_ROW and rest == FARTHER_EVERY - 1:
            part = index / self.num_batches
            lengths = FARTHER[max(start for start in FARTHER if start <= part)]
            return min(lengths[turn % len(lengths)], self.reach)
        return LONG_ROW if index % LONG_EVERY == LONG_EVERY - 1 else SHORT_ROW

    def _row(self, rng: random.Random, length: int) -> tuple[list[int], list[int]]:
        """Chats one after the other from position 0 on, the last one cut off at `length`.

        Of an agent's chat the end is what counts: one that does not fit is left out.
        """
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < length:
            may_act = length > LONG_ROW and self.reach > LONG_ROW
            if may_act and rng.random() < AGENT_SHARE:
                more, told = self._encoded(agent_chat(rng, rng.randint(50, 400)))
                if len(ids) + len(more) <= length:
                    ids += more
                    labels += told
                continue
            if self.newcomers and rng.random() < FORM_SHARE:
                chat = form_chat(rng)
            elif rng.random() < self.newcomers:
                chat = newcomer_chat(rng)
            else:
                chat = long_chat(rng) if length > LONG_ROW else short_chat(rng)
            for part, more in zip((ids, labels), self._encoded(chat), strict=True):
                part += more
        return ids[:length], labels[:length]

    def _farther_row(self, rng: random.Random, length: int) -> tuple[list[int], list[int]]:
        """Whole chats of agents, and end marks."""
        ids: list[int] = []
        labels: list[int] = []
        most = 1.0
        while (left := length - len(ids)) > LEAST_ROOM and most > 0.05:
            more, told = self._encoded(agent_chat(rng, int(left * most * rng.uniform(0.3, 0.9))))
            if len(more) > left:
                most /= 2
                continue
            ids += more
            labels += told
        end = self._encoded(None)[0]
        return ids + end * (length - len(ids)), labels + [IGNORED] * (length - len(labels))

    def _encoded(self, chat: Chat | None) -> tuple[list[int], list[int]]:
        """Ids and labels of a chat and the mark of its end."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        ids: list[int] = []
        labels: list[int] = []
        segments = [*(chat.segments() if chat else ()), END_OF_TEXT]
        for place, segment in enumerate(self._tokenizer.encode_batch(segments)):
            ids += segment.ids
            labels += segment.ids if place % 2 else [IGNORED] * len(segment.ids)
        return ids, labels


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
