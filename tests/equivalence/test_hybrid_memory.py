"""Prefix hits of recurrent layers: texts equal those of prompts that are computed whole.

All in float32. The oracle computes each prompt from its first token on, without a prefix tree.
"""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from tests.equivalence.test_hybrid_laws import of_model, sections
from tests.support.hybrids import poison
from tests.support.lockstep import DECODE, PREFILL, Ask, Lockstep
from tests.support.pairwise import in_whole
from worker.api import Sampling

Text = tuple[int, ...]
GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
LONG = 330  # tokens of the prompt with which others begin
# How far they share it: grid lines, and what lies before, behind and between them.
SHARED = (1, 63, 64, 65, 100, 127, 128, 129, 192, 256, 300, 319, 320, 321, 329)


def fresh(rng: random.Random, count: int) -> Text:
    return tuple(rng.randrange(2, 199) for _ in range(count))


def branches(seed: int = 3) -> list[Text]:
    """The long prompt first, then those that share a part of it, some twice."""
    rng = random.Random(seed)
    long = fresh(rng, LONG)
    cut = [(*long[:num], *fresh(rng, rng.choice((1, 2, 40, 64, 90)))) for num in SHARED]
    again = [(*prompt[:-1], 5) for prompt in cut[::3]]
    return [long, *cut, long, *again]


def served(made: Lockstep, prompts: Sequence[Text]) -> list[list[int]]:
    """All at once."""
    return [answer.tokens for answer in made.serve([Ask(prompt, GREEDY) for prompt in prompts])]


def config_of(place: str, *, sparse: bool = False, spec: dict[str, Any] | None = None, **engine):
    config = of_model(sections(place, max_num_reqs=8, **engine), sparse=sparse)
    config["spec"] = spec or {}
    config["kv"]["snapshots"] = 32
    return config


@cache
def cold(prompts: tuple[Text, ...], *, sparse: bool = False) -> list[list[int]]:
    """By an engine that keeps nothing."""
    made = Lockstep(config_of("never", sparse=sparse, prefix_cache=False), num_prefill=0)
    try:
        return served(made, prompts)
    finally:
        made.close()


def resumed(made: Lockstep, peer: str) -> int:
    return made.engines[peer].book.snapshots.num_resumed


MTP = {"drafter": "mtp", "widths": [1, 4]}


@pytest.mark.parametrize(
    ("place", "spec", "sparse", "chunks"),
    [
        ("always", {}, False, 512),
        ("never", MTP, True, 128),
        *in_whole(("always", MTP, True, 64), ("never", {}, False, 512)),
    ],
)
def test_a_prompt_that_begins_like_another_gets_the_text_of_a_cold_run(
    place: str, spec: dict[str, Any], sparse: bool, chunks: int
) -> None:
    prompts = tuple(branches())
    wanted = cold(prompts, sparse=sparse)
    made = Lockstep(config_of(place, sparse=sparse, spec=spec, max_prefill_tokens=chunks))
    try:
        for engine in made.engines.values():
            poison(engine)
        assert served(made, prompts[:1]) == wanted[:1]
        for _ in range(2):
            assert served(made, prompts) == wanted
        assert resumed(made, DECODE if place == "never" else PREFILL) > len(prompts)
    finally:
        made.close()


def turns(made: Lockstep, answers: int) -> list[tuple[Text, list[int], int]]:
    """Three conversations side by side, each prompt the one before, its answer and a new part.

    Of each turn: prompt, answer, tokens that were not computed.
    """
    rng, sampling = random.Random(5), Sampling(answers, temperature=0.0, ignore_eos=True)
    system = fresh(rng, 90)
    talks, found = [(*system, *fresh(rng, num)) for num in (20, 37, 54)], []
    for turn in range(4):
        replies = made.serve([Ask(talk, sampling) for talk in talks])
        for i, reply in enumerate(replies):
            found.append((talks[i], reply.tokens, reply.num_cached_tokens))
            talks[i] = (*talks[i], *reply.tokens, *fresh(rng, 3 + 9 * turn + i))
    return found


@cache
def cold_turns(answers: int) -> list[tuple[Text, list[int], int]]:
    made = Lockstep(config_of("never", prefix_cache=False), num_prefill=0)
    try:
        return turns(made, answers)
    finally:
        made.close()


NGRAM = {"drafter": "ngram", "widths": [4]}


@pytest.mark.parametrize("spec", [{}, MTP | {"widths": [4]}, NGRAM])
def test_a_conversation_goes_on_from_what_its_answers_have_left(spec: dict[str, Any]) -> None:
    """Snapshots that decode steps have stored, at any width, are as good as a prompt's."""
    wanted = cold_turns(100)
    made = Lockstep(config_of("never", spec=spec), num_prefill=0)
    try:
        poison(made.engines[DECODE])
        found = turns(made, 100)
        assert [turn[:2] for turn in found] == [turn[:2] for turn in wanted]
        deeper = [
            later for (prompt, _, _), (_, _, later) in zip(found, found[3:]) if later > len(prompt)
        ]
        assert len(deeper) > len(found) // 2, found
    finally:
        made.close()
