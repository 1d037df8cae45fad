"""Training batches, made by worker processes ahead of the training loop."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.train.agents import agent_chat
from benchmarks.train.chats import END_OF_TEXT, Chat, long_chat, short_chat
from benchmarks.train.forms import form_chat, with_led_call
from benchmarks.train.sums import newcomer_chat

SHORT_ROW, LONG_ROW = 384, 1024  # tokens of a row; chats of several turns fill the long ones
LONG_EVERY = 4  # one batch in this many has long rows, of the same token count in all
# From that part of the training on: the share of the chats of long rows that are short ones of
# agents, if the model reaches further; of the others, that a grammar leads; of the rest, that
# newcomers have: short sums, JSON, calls. What has many wordings is forgotten first: it grows.
SHARES = {0.0: (0.4, 0.08, 0.4), 0.67: (0.0, 0.04, 0.5)}
# Of a model that reaches further: how long the rows are of one batch in five, in turn.
FARTHER = {
    0.0: (2048, 4096, 2048, 4096, 8192),
    0.3: (2048, 16384, 4096, 8192, 16384),
    0.55: (4096, 65536, 2048, 16384, 32768, 8192),
}
FARTHER_EVERY = 5
LEAST_ROOM = 300  # tokens in which another chat of an agent begins
IGNORED = -100  # label of a token that is not the model's to say

Row: TypeAlias = tuple[list[int], list[int]]  # ids and labels
T = TypeVar("T")


@dataclass
class ChatBatches(Dataset):
    """Batch `index` is a function of (seed, index): [rows, length] input ids and labels, i16."""

    tokenizer_file: Path
    num_batches: int
    num_rows: int  # short rows; a batch of long ones has fewer
    seed: int
    newcomers: bool = True  # else no chats of theirs, and none that a grammar leads
    reach: int = LONG_ROW  # tokens of the longest row
    segments: Callable[[Chat], list[str]] = Chat.segments
    forms: bool = True  # are there answers that a grammar leads?
    _tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rng = random.Random(self.seed * 1_000_003 + index)
        length = self._length(index)
        num_rows = max(1, self.num_rows * SHORT_ROW // length)
        agents, *others = self._phase(SHARES, index)
        agents *= self.reach > LONG_ROW == length
        shares = (agents, *(share * self.newcomers for share in others))
        shares = (shares[0], shares[1] * self.forms, shares[2])
        rows = [
            self._farther_row(rng, length + 1)
            if length > LONG_ROW
            else self._row(rng, length + 1, shares)
            for _ in range(num_rows)
        ]
        ids, labels = (
            torch.from_numpy(np.array(part, np.int16)) for part in zip(*rows, strict=True)
        )
        return ids[:, :-1].contiguous(), labels[:, 1:].contiguous()

    def _length(self, index: int) -> int:
        turn, rest = divmod(index, FARTHER_EVERY)
        if self.reach > LONG_ROW and rest == FARTHER_EVERY - 1:
            lengths = self._phase(FARTHER, index)
            return min(lengths[turn % len(lengths)], self.reach)
        return LONG_ROW if index % LONG_EVERY == LONG_EVERY - 1 else SHORT_ROW

    def _phase(self, phases: Mapping[float, T], index: int) -> T:
        return phases[max(start for start in phases if start <= index / self.num_batches)]

    def _row(self, rng: random.Random, length: int, shares: Sequence[float]) -> Row:
        """Chats one after the other from position 0 on, the last one cut off at `length`.

        Of an agent's chat the end is what counts: one that does not fit is left out.
        """
        row: Row = [], []
        agents, forms, newcomers = shares
        while len(row[0]) < length:
            if rng.random() < agents:
                made = self._encoded(with_led_call(rng, agent_chat(rng, rng.randint(50, 400))))
                if len(row[0]) + len(made[0]) > length:
                    continue
            elif rng.random() < forms:
                made = self._encoded(form_chat(rng))
            elif rng.random() < newcomers:
                made = self._encoded(newcomer_chat(rng))
            else:
                made = self._encoded((long_chat if length > LONG_ROW else short_chat)(rng))
            for part, more in zip(row, made, strict=True):
                part += more
        return row[0][:length], row[1][:length]

    def _farther_row(self, rng: random.Random, length: int) -> Row:
        """Whole chats of agents, and end marks."""
        row: Row = [], []
        most = 1.0
        while (left := length - len(row[0])) > LEAST_ROOM and most > 0.05:
            chat = agent_chat(rng, int(left * most * rng.uniform(0.3, 0.9)))
            made = self._encoded(with_led_call(rng, chat))
            if len(made[0]) > left:
                most /= 2
                continue
            for part, more in zip(row, made, strict=True):
                part += more
        end, ignored = self._encoded(None)
        return row[0] + end * left, row[1] + ignored * left

    def _encoded(self, chat: Chat | None) -> Row:
        """Ids and labels of a chat and the mark of its end."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str(self.tokenizer_file))
        ids: list[int] = []
        labels: list[int] = []
        segments = [*(self.segments(chat) if chat else ()), END_OF_TEXT]
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
