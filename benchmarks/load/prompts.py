"""What is asked: prompt sources, traces aside.

    problems                                word problems that the model `tiny` never trained on
    synthetic:IN,OUT                        random words, lengths as lengths.py has them; also by
                                            vLLM's name, random, whose lengths are 1024,128 then
    shared-prefix:GROUPS,PREFIX,IN,OUT      PREFIX tokens of one of GROUPS texts, then IN own ones
    sharegpt:FILE                           first questions of conversations in ShareGPT's form;
                                            an answer may be as long as the one there

The middle two make prompts of exactly as many tokens as they mean to, without the chat template and
special tokens, and ask for exactly OUT tokens.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from numpy.random import Generator
from tokenizers import Tokenizer

from benchmarks.load import lengths
from benchmarks.load.records import Turn
from benchmarks.load.words import Words
from benchmarks.train.problems import held_out_problems

Source = Callable[[Generator, int], list[Turn]]  # as many first turns

KINDS = ("problems", "synthetic", "random", "shared-prefix", "sharegpt")
RANDOM = "1024,128"  # tokens, as vLLM's
MAX_TOKENS = 200  # of an answer, where the source says nothing
TEMPLATE_TOKENS = 32  # kept free for the chat template, each turn


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts are made; the same for every source and trace, where it applies."""

    chat: bool = True  # for chat completions; False: for completions
    max_len: int = 0  # tokens; 0 = no bound; lengths are cut to fit, conversations end early
    time_scale: float = 1.0  # traces: times are multiplied by it; 0.5 is twice as fast
    input_scale: float = 1.0  # traces: prompt lengths and blocks are multiplied by it
    block_size: int = 512  # traces: tokens of one Mooncake hash id
    max_requests: int | None = None  # traces: rows read

    def __post_init__(self) -> None:
        for name in ("time_scale", "input_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be above 0, not {getattr(self, name)}")
        if self.block_size < 1:
            raise ValueError(f"block_size: must be at least 1, not {self.block_size}")
        if self.max_len and self.max_len < TEMPLATE_TOKENS + 2:
            raise ValueError(
                f"max_len: {self.max_len} leaves no room beside the"
                f" {TEMPLATE_TOKENS} tokens of the template"
            )

    def room(self, num_used: int = 0) -> int | None:
        """Tokens left for a turn after `num_used` of its conversation; None: no bound."""
        return self.max_len - TEMPLATE_TOKENS - num_used if self.max_len else None


class _Said(msgspec.Struct):
    value: str
    speaker: str = msgspec.field(name="from")


class _Conversation(msgspec.Struct):
    conversations: list[_Said] = []


def exactly(num_out: int) -> dict[str, Any]:
    """Fields of the body that make the answer `num_out` tokens long."""
    return {"ignore_eos": True, "min_tokens": num_out}


def source(spec: str, words: Words | None, options: Options, tokenizer: Tokenizer | None) -> Source:
    """The source `spec`: a function of a generator and a number of requests.

    `words` may be None for `problems`, whose prompts `tokenizer` then counts, if there is one.
    Raises ValueError, which names the part that is wrong.
    """
    kind, _, rest = spec.partition(":")
    if kind not in KINDS or (kind == "problems" and rest):
        raise ValueError(f"source: {spec!r} is none of {', '.join(KINDS)} or a trace")
    if kind == "problems":
        return _problems(tokenizer)
    if kind == "sharegpt":
        return _sharegpt(rest, tokenizer, options)
    if words is None:
        raise ValueError(f"{kind}: needs a tokenizer")
    if kind == "shared-prefix":
        return _shared_prefix(rest, words, options)
    return _synthetic(rest or RANDOM * (kind == "random"), words, options)


def _sharegpt(name: str, tokenizer: Tokenizer | None, options: Options) -> Source:
    """Each conversation that begins with a question and an answer, in an order of its own."""
    try:
        rows = msgspec.json.decode(Path(name).read_bytes(), type=list[_Conversation])
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"sharegpt: {name}: {error}") from None
    pairs = [
        (asked.value, answered.value)
        for asked, answered in (row.conversations[:2] for row in rows if len(row.conversations) > 1)
        if asked.speaker in ("human", "user") and answered.speaker in ("gpt", "assistant")
    ]
    if not pairs:
        raise ValueError(f"sharegpt: {name}: no conversation begins with a question and an answer")

    def turn(asked: str, answered: str) -> Turn | None:
        if tokenizer is None:
            return Turn(asked, MAX_TOKENS)
        sides = tokenizer.encode_batch([asked, answered], add_special_tokens=False)
        num_in, num_out = (len(side.ids) for side in sides)
        room = options.room()
        fits = num_out > 0 and (room is None or num_in + num_out <= room)
        return Turn(asked, num_out, num_prompt_tokens=num_in) if fits else None

    def draw(rng: Generator, num: int) -> list[Turn]:
        found: list[Turn] = []
        for at in rng.permutation(len(pairs)).tolist():
            made = turn(*pairs[at])
            found += [made] if made else []
            if len(found) == num:
                break
        if not found:
            raise ValueError(f"sharegpt: {name}: nothing is short enough for --max-len")
        return [found[i % len(found)] for i in range(num)]

    return draw


def _problems(tokenizer: Tokenizer | None) -> Source:
    def draw(rng: Generator, num: int) -> list[Turn]:
        seed = int(rng.integers(2**31))
        questions = [problem.question for problem in held_out_problems(num, seed)]
        return [Turn(text, MAX_TOKENS, num_prompt_tokens=count(text)) for text in questions]

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids) if tokenizer else 0

    return draw


def _synthetic(rest: str, words: Words, options: Options) -> Source:
    pair = lengths.pair(rest, "synthetic")

    def one(rng: Generator) -> Turn:
        num_in, num_out = lengths.clip(*pair(rng), options.room())
        return Turn(words.text(rng, num_in), num_out, 0.0, exactly(num_out), num_in)

    return lambda rng, num: [one(rng) for _ in range(num)]


def _shared_prefix(rest: str, words: Words, options: Options) -> Source:
    parts = lengths.fields(rest, ("GROUPS", "PREFIX", "IN", "OUT"), "shared-prefix")
    num_groups = lengths.whole(parts["GROUPS"], "shared-prefix: GROUPS", low=1)
    prefix_len = lengths.whole(parts["PREFIX"], "shared-prefix: PREFIX", low=1)
    num_in = lengths.length(parts["IN"], "shared-prefix: IN")
    num_out = lengths.length(parts["OUT"], "shared-prefix: OUT")
    room = options.room(prefix_len)
    if room is not None and room < 2:
        raise ValueError(
            f"shared-prefix: PREFIX: {prefix_len} tokens leave no room of {options.max_len}"
        )

    def one(rng: Generator, prefix: str) -> Turn:
        own, out = lengths.clip(num_in(rng), num_out(rng), room)
        text = f"{prefix} {words.text(rng, own, after=prefix)}"
        return Turn(text, out, 0.0, exactly(out), prefix_len + own)

    def draw(rng: Generator, num: int) -> list[Turn]:
        prefixes = [words.text(rng, prefix_len) for _ in range(num_groups)]
        return [one(rng, prefixes[int(rng.integers(num_groups))]) for _ in range(num)]

    return draw
