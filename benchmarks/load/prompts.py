"""What is asked: prompt sources that need no file.

    problems                                word problems that the model `tiny` never trained on
    problems:train                          word problems of its training, made faster
    synthetic:IN,OUT                        random words, lengths as lengths.py has them
    shared-prefix:GROUPS,PREFIX,IN,OUT      PREFIX tokens of one of GROUPS texts, then IN own ones;
                                            zipf=S draws group k with weight k**-S (0: alike)
    multi-turn:TURNS,IN,OUT,THINK_S         conversations; think time is exponential of mean
                                            THINK_S; prefix=N puts the same N tokens before all

All but `problems` make prompts of exactly as many tokens as they mean to, without the chat
template and special tokens, and ask for exactly OUT tokens (`Options.fixed_output`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.random import Generator
from tokenizers import Tokenizer

from benchmarks.load import lengths
from benchmarks.load import spec as read
from benchmarks.load.records import Prompt, Turn
from benchmarks.load.words import Words
from benchmarks.train.problems import held_out_problems, training_problem

Turns = tuple[Turn, ...]
Source = Callable[[Generator, int], list[Turns]]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How prompts are made; the same for every source and trace, where it applies."""

    chat: bool = True  # for chat completions; False: for completions
    as_ids: bool = False  # prompts are token ids (completions only)
    fixed_output: bool = True  # ask for exactly OUT tokens: ignore_eos and min_tokens
    max_tokens: int = 200  # where the source says nothing
    max_len: int = 0  # tokens; 0 = no bound; lengths are cut to fit, conversations end early
    template_tokens: int = 32  # kept free for the chat template, each turn
    time_scale: float = 1.0  # traces: times are multiplied by it; 0.5 is twice as fast
    input_scale: float = 1.0  # traces: prompt lengths and blocks are multiplied by it
    output_scale: float = 1.0  # traces: answer lengths are multiplied by it
    max_requests: int | None = None  # traces: rows read
    block_size: int = 512  # traces: tokens of one Mooncake hash id

    def __post_init__(self) -> None:
        if self.as_ids and self.chat:
            raise ValueError("as_ids: chat completions take no token ids")
        for name in ("time_scale", "input_scale", "output_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be above 0, not {getattr(self, name)}")
        for name in ("max_tokens", "block_size", "max_requests"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, not {getattr(self, name)}")
        if self.max_len and self.max_len < self.template_tokens + 2:
            raise ValueError(
                f"max_len: {self.max_len} leaves no room beside the"
                f" {self.template_tokens} tokens of the template"
            )

    def extra(self, num_out: int) -> dict[str, Any]:
        """Fields of the body that make the answer `num_out` tokens long."""
        return {"ignore_eos": True, "min_tokens": num_out} if self.fixed_output else {}

    def room(self, num_used: int = 0) -> int | None:
        """Tokens left for a turn after `num_used` of its conversation; None: no bound."""
        if not self.max_len:
            return None
        return self.max_len - self.template_tokens - num_used


def source(spec: str, words: Words | None, options: Options, tokenizer: Tokenizer | None) -> Source:
    """The source `spec`: a function of a generator and a number of sessions.

    `words` may be None for `problems`, whose prompts `tokenizer` then counts, if there is one.

    Raises:
        ValueError: there is no such source, or a part of it is wrong; the message names it.
    """
    kind, _, rest = spec.partition(":")
    if kind == "problems":
        return _problems(rest, options, tokenizer)
    if kind not in _KINDS:
        raise ValueError(f"source: {spec!r} is none of problems, {', '.join(_KINDS)} or a trace")
    if words is None:
        raise ValueError(f"{kind}: needs a tokenizer")
    return _KINDS[kind](rest, words, options)


def _problems(rest: str, options: Options, tokenizer: Tokenizer | None) -> Source:
    if rest not in ("", "train"):
        raise ValueError(f"problems: {rest!r} is neither empty nor 'train'")

    def draw(rng: Generator, num: int) -> list[Turns]:
        seed = int(rng.integers(2**31))
        if rest == "train":
            chance = random.Random(seed)
            questions = [training_problem(chance).question for _ in range(num)]
        else:
            questions = [problem.question for problem in held_out_problems(num, seed)]
        return [(as_turn(text, options, tokenizer),) for text in questions]

    def as_turn(text: str, options: Options, tokenizer: Tokenizer | None) -> Turn:
        ids = tokenizer.encode(text, add_special_tokens=False).ids if tokenizer else []
        if options.as_ids and not ids:
            raise ValueError("problems: needs a tokenizer for token ids")
        prompt: Prompt = ids if options.as_ids else text
        return Turn(prompt, options.max_tokens, num_prompt_tokens=len(ids))

    return draw


def _synthetic(rest: str, words: Words, options: Options) -> Source:
    pair = lengths.pair(rest, "synthetic")

    def one(rng: Generator) -> Turns:
        num_in, num_out = lengths.clip(*pair(rng), options.room())
        return (turn(words.text(rng, num_in), num_in, num_out, words, options),)

    return lambda rng, num: [one(rng) for _ in range(num)]


def _shared_prefix(rest: str, words: Words, options: Options) -> Source:
    parts = read.fields(rest, ("GROUPS", "PREFIX", "IN", "OUT"), ("zipf",), "shared-prefix")
    num_groups = read.whole(parts["GROUPS"], "shared-prefix: GROUPS", low=1)
    prefix_len = read.whole(parts["PREFIX"], "shared-prefix: PREFIX", low=1)
    skew = read.number(parts.get("zipf", "0"), "shared-prefix: zipf")
    num_in = lengths.length(parts["IN"], "shared-prefix: IN")
    num_out = lengths.length(parts["OUT"], "shared-prefix: OUT")
    room = _room_after("shared-prefix: PREFIX", prefix_len, options)
    weights = np.arange(1, num_groups + 1) ** -skew
    weights /= weights.sum()

    def one(rng: Generator, prefixes: list[str]) -> Turns:
        prefix = prefixes[int(rng.choice(num_groups, p=weights))]
        own, out = lengths.clip(num_in(rng), num_out(rng), room)
        text = f"{prefix} {words.text(rng, own, after=prefix)}"
        return (turn(text, prefix_len + own, out, words, options),)

    def draw(rng: Generator, num: int) -> list[Turns]:
        prefixes = [words.text(rng, prefix_len) for _ in range(num_groups)]
        return [one(rng, prefixes) for _ in range(num)]

    return draw


def _multi_turn(rest: str, words: Words, options: Options) -> Source:
    parts = read.fields(rest, ("TURNS", "IN", "OUT", "THINK_S"), ("prefix",), "multi-turn")
    num_turns = lengths.length(parts["TURNS"], "multi-turn: TURNS")
    num_in = lengths.length(parts["IN"], "multi-turn: IN")
    num_out = lengths.length(parts["OUT"], "multi-turn: OUT")
    think_s = read.number(parts["THINK_S"], "multi-turn: THINK_S")
    prefix_len = read.whole(parts.get("prefix", "0"), "multi-turn: prefix")
    _room_after("multi-turn: prefix", prefix_len, options)

    def one(rng: Generator, prefix: str) -> Turns:
        turns: list[Turn] = []
        used = prefix_len
        for index in range(num_turns(rng)):
            own, out = num_in(rng), num_out(rng)
            pause_s = float(rng.exponential(think_s)) if index and think_s else 0.0
            room = options.room(used)
            if index and room is not None and own + out > room:
                break
            own, out = lengths.clip(own, out, room)
            turns.append(_turn_of(rng, prefix if index == 0 else "", index, own, out, pause_s))
            used += own + out + options.template_tokens
        return tuple(turns)

    def _turn_of(
        rng: Generator, prefix: str, index: int, own: int, out: int, pause_s: float
    ) -> Turn:
        text = words.text(rng, own, after=prefix)
        total = own + (prefix_len if prefix else 0)
        if prefix and options.chat:
            messages = [
                {"role": "system", "content": prefix},
                {"role": "user", "content": text},
            ]
            return Turn(messages, out, pause_s, options.extra(out), total)
        if prefix:
            text = f"{prefix} {text}"
        elif index and not options.chat:
            text = f" {text}"  # it follows the answer before it without a border
        return turn(text, total, out, words, options, pause_s)

    def draw(rng: Generator, num: int) -> list[Turns]:
        prefix = words.text(rng, prefix_len) if prefix_len else ""
        return [one(rng, prefix) for _ in range(num)]

    return draw


def turn(
    text: str, num_in: int, num_out: int, words: Words, options: Options, think_s: float = 0.0
) -> Turn:
    """One turn of `num_in` tokens of `text` and `num_out` tokens of answer."""
    prompt: Prompt = words.ids(text) if options.as_ids else text
    return Turn(prompt, num_out, think_s, options.extra(num_out), num_in)


def _room_after(part: str, num_tokens: int, options: Options) -> int | None:
    room = options.room(num_tokens)
    if room is not None and room < 2:
        raise ValueError(f"{part}: {num_tokens} tokens leave no room of {options.max_len}")
    return room


_KINDS: dict[str, Callable[[str, Words, Options], Source]] = {
    "synthetic": _synthetic,
    "shared-prefix": _shared_prefix,
    "multi-turn": _multi_turn,
}
