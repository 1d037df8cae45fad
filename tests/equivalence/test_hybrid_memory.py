"""Prefix hits of recurrent layers: texts equal those of prompts that are computed whole.

All in float32. The oracle computes each prompt from its first token on, without a prefix tree.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.equivalence.test_hybrid_laws import check_slots, of_model, sections
from tests.support.engines import running, value
from tests.support.hybrids import poison
from tests.support.laws import ids
from tests.support.lockstep import DECODE, PREFILL, Ask, Lockstep
from tests.support.pairwise import in_whole, more, whole
from worker.api import Sampling

Text = tuple[int, ...]
GREEDY = Sampling(max_tokens=24 if whole else 12, temperature=0.0, ignore_eos=True)
LONG = 330  # tokens of the prompt with which others begin
# How far they share it: grid lines, and what lies before, behind and between them.
SHARED = (63, 64, 65, 321, *more(1, 100, 127, 128, 129, 192, 256, 300, 319, 320, 329))


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
        ("never", MTP, True, 128),
        *in_whole(("always", {}, False, 512), ("always", MTP, True, 64), ("never", {}, False, 512)),
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
    for turn in range(4 if whole else 3):
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
NUM_LONG, NUM_SHORT = (100, 40) if whole else (70, 70)  # tokens of an answer


@pytest.mark.parametrize("spec", [MTP | {"widths": [4]}, *in_whole(({},), (NGRAM,))])
def test_a_conversation_goes_on_from_what_its_answers_have_left(spec: dict[str, Any]) -> None:
    """Snapshots that decode steps have stored, at any width, are as good as a prompt's."""
    wanted = cold_turns(NUM_LONG)
    made = Lockstep(config_of("never", spec=spec), num_prefill=0)
    try:
        poison(made.engines[DECODE])
        found = turns(made, NUM_LONG)
        assert [turn[:2] for turn in found] == [turn[:2] for turn in wanted]
        following = zip(found, found[3:], strict=False)
        deeper = [later for (prompt, *_), (*_, later) in following if later > len(prompt)]
        assert len(deeper) > len(found) // 3, found
    finally:
        made.close()


def test_a_decode_worker_pulls_the_state_and_only_pages_that_it_lacks() -> None:
    """It has those of earlier turns, answers included; prefill has computed prompts alone."""
    wanted = cold_turns(NUM_SHORT)
    made = Lockstep(config_of("always"))
    try:
        decode = made.engines[DECODE]
        found = turns(made, NUM_SHORT)
        assert [turn[:2] for turn in found] == [turn[:2] for turn in wanted]
        before = sum(len(prompt) for prompt, _, _ in found)
        moved = value(decode.metrics.pulled_bytes("shm/shm"))
        moved -= len(found) * decode.layout.state.slot_bytes
        assert moved / (decode.layout.page_bytes / decode.book.page_size) < before * 0.6
        assert resumed(made, PREFILL) >= len(found) - 3
        assert resumed(made, DECODE) == 0
    finally:
        made.close()


@pytest.mark.parametrize("place", ["always", *in_whole(("never",))])
def test_preempted_requests_and_further_choices_resume(place: str) -> None:
    """Of a pool that is too small, in which snapshots go with their pages all the time."""
    rng = random.Random(9)
    long = fresh(rng, 140)
    sampling = Sampling(70, temperature=0.0, ignore_eos=True)
    asks = [Ask((*long, *fresh(rng, 7 * i)), sampling, at=i) for i in range(5)]
    asks += [Ask(asks[0].prompt, sampling, after=0).but(seed=9, temperature=0.9) for _ in range(2)]

    def served_by(made: Lockstep, rounds: int) -> list[list[int]]:
        try:
            for engine in made.engines.values():
                poison(engine)
            answers = [[a.tokens for a in made.serve(asks)] for _ in range(rounds)]
            assert answers == answers[:1] * rounds
            return answers[0]
        finally:
            made.close()

    wanted = served_by(Lockstep(config_of("never", prefix_cache=False), num_prefill=0), 1)
    few = {"num_pages": 34, "growth_tokens": 1}
    made = Lockstep(config_of(place), decode_sections={"engine": few})
    assert served_by(made, 2) == wanted
    decode = made.engines[DECODE]
    assert value(decode.metrics.preemptions) > 3, "the pool was not small enough"
    assert resumed(made, DECODE) > 3 or place == "always"


@pytest.mark.parametrize("place", ["never", "always"])
def test_hits_with_pages_in_eight_bits(place: str) -> None:
    """Equal to a cold run with such pages; those that are shared are not stored again."""
    prompts = tuple(branches()[:12])

    def of(place: str, **engine: Any) -> dict[str, Any]:
        config = config_of(place, **engine)
        config["kv"]["dtype"] = "fp8"
        return config

    made = Lockstep(of("never", prefix_cache=False), num_prefill=0)
    try:
        wanted = served(made, prompts)
    finally:
        made.close()
    made = Lockstep(of(place))
    try:
        for _ in range(2):
            assert served(made, prompts) == wanted
        assert resumed(made, DECODE if place == "never" else PREFILL) > 6
    finally:
        made.close()


@pytest.mark.parametrize("ranks", [(1, 2), *in_whole(((2, 1),), ((2, 2),), ((4, 2),), ((1, 4),))])
@pytest.mark.parametrize("place", ["always", *in_whole(("never",))])
def test_hits_of_several_ranks_and_after_a_failover(place: str, ranks: tuple[int, int]) -> None:
    """ranks: of the prefill worker, of the decode workers. What one has begun the other ends."""
    prompts = tuple(branches()[:10])
    wanted = cold(prompts)
    with running(
        config_of(place), num_decode=2, prefill_tp=ranks[0], decode_tp=ranks[1]
    ) as cluster:
        client = cluster.client
        for peer in client.decodes * 2:
            assert ids(client.generate(prompts, GREEDY, decode=peer)) == wanted
        for num, peer in ((1, client.decodes[0]), (13, client.decodes[1])):
            sent = [
                client.submit(
                    (*prompt, *answer[:num]), GREEDY, decode=peer, num_prompt_tokens=len(prompt)
                )
                for prompt, answer in zip(prompts, wanted, strict=True)
            ]
            answers = [found.tokens for found in client.wait(sent)]
            assert answers == [answer[num:] for answer in wanted]
        check_slots(cluster)


@pytest.mark.parametrize("spec", [NGRAM, *in_whole((MTP | {"widths": [4]},), ({},))])
def test_further_choices_are_copies_of_the_first(spec: dict[str, Any]) -> None:
    """Of its state, and of the page in which the prompt ends; each goes its own way."""
    rng, drawn = random.Random(4), Sampling(40, temperature=1.0, ignore_eos=True)
    lengths = (1 + 16 * 3, 60, 70, 130)
    prompts = [fresh(rng, num) for num in lengths]
    asks = [Ask(prompt, drawn, at=i) for i, prompt in enumerate(prompts)]
    asks = [ask.but(seed=seed) for ask in asks for seed in range(4)]
    alone = Lockstep(config_of("never", prefix_cache=False), num_prefill=0)
    try:
        wanted = [answer.tokens for answer in alone.serve(asks)]
    finally:
        alone.close()
    asks = [replace(ask, after=i // 4 * 4 if i % 4 else None) for i, ask in enumerate(asks)]
    made = Lockstep(
        config_of("always", spec=spec), decode_sections={"engine": {"max_num_reqs": 16}}
    )
    try:
        decode = made.engines[DECODE]
        poison(decode)
        assert [answer.tokens for answer in made.serve(asks)] == wanted
        assert value(decode.metrics.placed("none")) == 3 * len(lengths)
        moved, slot = value(decode.metrics.pulled_bytes("shm/shm")), decode.layout.state.slot_bytes
        assert moved - slot * len(lengths) < sum(lengths) * decode.layout.page_bytes / 8
    finally:
        made.close()
