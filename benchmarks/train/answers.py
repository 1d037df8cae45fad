"""What the target says on trained templates, with its features: the text of drafters.

A chat is kept if the target, reading it, gives every token of its last answer the highest
logit: then the answer is the target's own greedy one, and nothing need be decoded.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.train.agents import agent_chat
from benchmarks.train.chats import long_chat, short_chat
from benchmarks.train.data import IGNORED

LONG_SHARE = 0.08  # of chats that begin with other turns
AGENT_SHARE = 0.15  # of chats with tools
LONGEST = 640  # tokens of a chat
READ_AT_ONCE = 32  # chats of one forward


class Said(NamedTuple):
    """One chat that ends with an answer of the target."""

    ids: Tensor  # [length] i64
    num_prompt: int
    features: Tensor  # [length, taps · hidden] f32


@dataclass(frozen=True, slots=True)
class Batch:
    """Chats set flush right: the last column of a chat's rows is the token before its last one.

    A row stands for a slot, which holds a token and the features of the token before. Anchors,
    from which drafts start, are the last rows: the answer's tokens but the last.
    """

    features: Tensor  # [batch, rows, taps · hidden] f32
    slots: Tensor  # [batch, rows] i64; 0 where there is no row
    mask: Tensor  # [batch, 1, 1, anchors, rows] f32 added to scores: rows 1 … anchor of the chat
    ids: Tensor  # [batch, rows + drafts] i64; column c is the token of row c; 0 where there is none
    labels: Tensor  # [drafts, batch, anchors] i64; what each draft should be, or IGNORED

    @property
    def num_anchors(self) -> int:
        return self.labels.shape[2]

    def tokens(self, ahead: int, num: int) -> Tensor:
        """[batch, num]: tokens of the last `num` rows, `ahead` places further on."""
        end = self.features.shape[1] + ahead
        return self.ids[:, end - num : end]


def set_right(said: Sequence[Said], num_drafts: int, device: str = "cpu") -> Batch:
    """The chats as one batch."""
    num_rows = max(len(item.ids) for item in said) - 2
    num_anchors = max(len(item.ids) - 1 - item.num_prompt for item in said)
    width = said[0].features.shape[1]
    features = torch.zeros(len(said), num_rows, width)
    ids = torch.zeros(len(said), num_rows + num_drafts, dtype=torch.long)
    is_token = torch.zeros(ids.shape, dtype=torch.bool)
    slots = torch.zeros(len(said), num_rows, dtype=torch.long)
    is_anchor = torch.zeros(len(said), num_anchors, dtype=torch.bool)
    for row, item in enumerate(said):
        num = len(item.ids) - 2  # slots 1 … num
        features[row, num_rows - num :] = item.features[:num]
        ids[row, num_rows - num : num_rows + 1] = item.ids[1:]
        is_token[row, num_rows - num : num_rows + 1] = True
        slots[row, num_rows - num :] = torch.arange(1, num + 1)
        is_anchor[row, num_anchors - (num + 1 - item.num_prompt) :] = True
    column = torch.arange(num_rows)
    seen = (column <= column[num_rows - num_anchors :, None]) & (slots > 0)[:, None]
    seen |= (column == column[num_rows - num_anchors :, None]) & ~is_anchor[..., None]  # no NaN
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[:, None, None]
    first = num_rows - num_anchors
    labels = torch.full((num_drafts, len(said), num_anchors), IGNORED)
    for step in range(num_drafts):
        there = slice(first + step + 1, first + step + 1 + num_anchors)
        kept = is_anchor & is_token[:, there]
        labels[step][kept] = ids[:, there][kept]
    parts = (features, slots, mask, ids, labels)
    return Batch(*(part.to(device) for part in parts))


class Speaker:
    """The frozen target, f32, its features taken by hooks: the residual after the layers `taps`.

    Without taps they are its output after the final norm.
    """

    def __init__(self, model: Any, taps: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.num_read, self.num_kept = 0, 0
        self._taps = taps

    @torch.inference_mode()
    def read(self, chats: Sequence[tuple[Tensor, int]], own_only: bool = True) -> list[Said]:
        """One forward over (ids, number of prompt tokens); `own_only` drops what is not its own."""
        ids = pad_sequence([item[0] for item in chats], batch_first=True).to(self.model.device)
        tapped: list[Tensor] = []

        def tap(_layer: object, _args: object, output: Tensor) -> None:
            tapped.append(output)

        with ExitStack() as hooks:
            for layer in self._taps:
                hooks.enter_context(self.model.model.layers[layer].register_forward_hook(tap))
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        features = (torch.cat(tapped, -1) if tapped else hidden).cpu()
        own = []
        for row, (tokens, num_prompt) in enumerate(chats):
            if own_only:
                logits = self.model.lm_head(hidden[row, num_prompt - 1 : len(tokens) - 1])
                self.num_read += 1
                if not torch.equal(logits.argmax(-1).cpu(), tokens[num_prompt:]):
                    continue
                self.num_kept += 1
            own.append(Said(tokens, num_prompt, features[row, : len(tokens)].clone()))
        return own

    def said(self, tokenizer: Tokenizer, rng: random.Random, num: int) -> list[Said]:
        """What the target itself says in about `num` new chats of trained templates."""
        chats = sorted((_encode(tokenizer, rng) for _ in range(num)), key=lambda chat: len(chat[0]))
        starts = range(0, num, READ_AT_ONCE)
        return [said for at in starts for said in self.read(chats[at : at + READ_AT_ONCE])]


def batches(said: Sequence[Said], num: int, rng: random.Random) -> Iterator[list[Said]]:
    """Every chat once, in batches of about `num` that are alike in length, at random."""
    alike = sorted(said, key=lambda item: _length_class(item, rng))
    starts = list(range(0, len(said), num))
    rng.shuffle(starts)
    for start in starts:
        yield alike[start : start + num]


def _length_class(item: Said, rng: random.Random) -> tuple[int, float]:
    """By the whole, then by the answer, with noise so that passes differ."""
    num_answer = len(item.ids) - item.num_prompt
    return len(item.ids) // 96, num_answer + 12 * rng.random()


def _encode(tokenizer: Tokenizer, rng: random.Random) -> tuple[Tensor, int]:
    """Ids of a chat that ends with an answer, and how many of them stand before that answer."""
    while True:
        kind = rng.random()
        if kind < AGENT_SHARE:
            chat = agent_chat(rng, rng.randint(30, 200))
        else:
            chat = long_chat(rng) if kind < AGENT_SHARE + LONG_SHARE else short_chat(rng)
        *prompt, answer = tokenizer.encode_batch(chat.segments())
        ids = [number for segment in prompt for number in segment.ids]
        if len(ids) + len(answer.ids) <= LONGEST:
            return torch.tensor(ids + answer.ids), len(ids)
