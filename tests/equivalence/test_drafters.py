"""A drafter proposes the same, and leaves the same in the pages, whatever serves a request.

Every window of every request is compared with a plain-torch reference. So traces of one request
are equal in all cases, and right in all of them. Texts equal those of
plain decode. At the end draft rows and tails of all pages in the prefix trees are compared, too.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support import drafter_cases as cases
from tests.support import fitted_blocks, fitted_drafters
from tests.support.any_width import AnyWidth
from tests.support.chain_reference import Reference
from tests.support.delay_mix import differing, seeded_mix
from tests.support.drafter_cases import Known, judge, speculation, workers
from tests.support.engines import Answer, value
from tests.support.lockstep import DECODE, Ask, Lockstep
from tests.support.pairwise import each_value, every, in_whole, more, whole
from worker.api import Sampling
from worker.plan import Drawn
from worker.schedule.decode import DecodeScheduler, Settled

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 5
FORMS = (*fitted_drafters.FORMS, *fitted_blocks.FORMS)
# One form of each kind; the others are laid over the same code.
ONE_OF_EACH = ("eagle3", "dflash", *more("eagle", "mtp"))
EVERY = 9  # steps after which a row has to go
FACTORS: dict[str, Any] = {
    "form": FORMS,
    "graph": (False, True),
    "chunks": ("eager", "pieces", "whole"),
    "overlap": (True, False),
    "page_size": (16, 1, *more(64)),
    "hit": (False, True),
    "chunk": (512, 23),
    "place": ("local", "pulled in groups", *more("pulled")),
    "company": ("others", "alone", "preempting"),
    "drawn": ("greedy", "seeded"),
}
Step = tuple[int, tuple[int, ...], int]  # position, drafts and tokens of a window
# Two forms hold every value, and another kind of them has one case.
TWO = {**FACTORS, "form": ("eagle3", "dflash")}
OTHERS = [
    (form, True, "pieces", True, 16, True, 23, "pulled in groups", "others", drawn)
    for form, drawn in (("mtp", "greedy"), *more(("dflash mixed", "greedy")))
]
CASES = every(FACTORS) if whole else [*each_value(TWO), *OTHERS]


def preempt_now_and_then(scheduler: DecodeScheduler) -> None:
    """From now on the youngest row has to go at times, as if pages were short."""
    settle, steps = scheduler.settle, count(1)

    def settled(step: int, drawn: list[Drawn]) -> list[Settled]:
        results = settle(step, drawn)
        ended = [req for req, _, _, reason in results if reason is not None]
        rows = [each for each in scheduler.queues.running.values() if each not in ended]
        if next(steps) % EVERY == 0 and rows and not scheduler.queues.leaving:
            scheduler.queues.preempt(max(rows, key=lambda req: req.arrival))
        return results

    scheduler.settle = settled


def inside(trace: Sequence[Step], max_len: int) -> list[Step]:
    """Without drafts for positions at which nothing is drawn."""
    return [(at, drafts[: max_len - at - 1], num) for at, drafts, num in trace]


def only_trace(
    text: Sequence[int], first: int, sampling: Sampling, reference: Reference
) -> list[Step]:
    """The trace of a request that nobody has preempted; its first window is at `first`."""
    found: list[Step] = []
    at, drafts = first, (-1,) * (WIDTH - 1)  # the entry step has none
    while at < len(text) - 1:
        num = 1
        while num < WIDTH and at + num + 1 < len(text) and drafts[num - 1] == text[at + num]:
            num += 1
        found.append((at, drafts, num))
        at += num
        if at < len(text) - 1:
            drafts = tuple(reference.drafts(text, at, WIDTH, sampling))
    return found


@pytest.mark.parametrize(tuple(FACTORS), CASES)
def test_whatever_serves_a_request_its_trace_is_the_right_one(
    form, graph, chunks, overlap, page_size, hit, chunk, place, company, drawn, known: Known
) -> None:
    asked, wanted, texts = known.asked[drawn], known.answers[drawn], known.texts(drawn)
    reference = cases.reference_of(known.directory(form))
    made = workers(
        num_prefill=place != "local", num_groups=2 if place == "pulled in groups" else 1,
        page_size=page_size, overlap=overlap, graph=graph, chunks=chunks, max_prefill_tokens=chunk,
        spec=speculation(known.directory(form), WIDTH),
    )  # fmt: skip
    if hit:
        cases.warm(made, asked)
    if company == "preempting":
        preempt_now_and_then(made.decode.scheduler)
    answers, traces = cases.serve(made, asked, alone=company == "alone")
    assert [each.tokens for each in answers] == [each.tokens for each in wanted]
    assert judge(made, asked, answers, reference, traces=traces) > 10 * cases.NUM
    if company != "preempting":
        for ask, answer, text, trace in zip(asked, answers, texts, traces, strict=True):
            # A prompt that is all there but for its last token needs no chunk.
            all_there = answer.num_cached_tokens == len(ask.prompt) - 1
            first = len(ask.prompt) - (all_there and place == "local")
            right = only_trace(text, first, ask.sampling, reference)
            found = [(each.position, each.drafts, each.num) for each in trace]
            max_len = len(ask.prompt) + ask.sampling.max_tokens
            assert inside(found, max_len) == inside(right, max_len)
    metrics = made.engines[DECODE].metrics
    num_preempted = value(metrics.preemptions)
    stays = (len({id(window.hold) for window in trace}) for trace in traces)
    num_again = sum(stays) - len(asked)
    assert 0 <= num_again <= num_preempted
    assert (num_preempted > 0) == (company == "preempting")
    assert not hit or value(metrics.cached_tokens) > 0
    kept = {window.num for trace in traces for window in trace}
    assert max(kept) >= 3, "few drafts were right"
    made.close()


@pytest.mark.parametrize(
    ("form", "num_prefill"), [("dflash", 1), *in_whole(("eagle3", 1), ("eagle3", 0))]
)
def test_requests_of_every_kind_with_widths_that_change(form, num_prefill, known) -> None:
    """Penalties, grammars, logprobs, further choices; clients that leave; few pages."""
    asked, few = seeded_mix(), {"num_prefill": num_prefill, "num_tokens": 800}
    wanted = plain(asked, **few)
    directory, widths = known.directory(form), (1, 2, 4, 8)
    made = workers(**few, spec=speculation(directory, *widths))
    made.decode.scheduler.widths = AnyWidth(widths, random.Random(3))
    found = made.serve(asked)
    assert not differing(asked, found, wanted, exact=False)
    assert judge(made, asked, found, cases.reference_of(directory)) > 40
    made.close()


def plain(asked: Sequence[Ask], **where: Any) -> list[Answer]:
    base = workers(**where)
    found = base.serve(asked)
    base.close()
    return found


def check_against(
    wanted: Sequence[Answer], made: Lockstep, asked: Sequence[Ask], directory: Path
) -> None:
    """Serve them; texts are those of plain decode, traces those of the reference."""
    answers = made.serve(asked)
    assert [each.tokens for each in answers] == [each.tokens for each in wanted]
    judge(made, asked, answers, cases.reference_of(directory))


@pytest.mark.product(form=ONE_OF_EACH, num_prefill=(0, 1), page_size=(1, 16))
def test_a_hit_of_every_number_of_pages(form, num_prefill, page_size, known) -> None:
    first, directory = known.asked["greedy"][0], known.directory(form)
    made = workers(num_prefill=num_prefill, page_size=page_size, spec=speculation(directory, WIDTH))
    made.serve([first])
    made.windows.clear()
    cached = made.engines[DECODE].metrics.cached_tokens
    before = value(cached)
    short = Sampling(6, temperature=0.0, ignore_eos=True)
    step = max(page_size, len(first.prompt) // (len(first.prompt) if whole else 8))
    asked = [
        Ask((*first.prompt[:num], 900 + num // step, *first.prompt[:9]), short, num // step)
        for num in range(step, len(first.prompt), step)
    ]
    check_against(plain(asked), made, asked, directory)
    assert value(cached) - before == sum(len(ask.prompt) - 10 for ask in asked)
    made.close()


@pytest.mark.parametrize("form", ONE_OF_EACH)
def test_chunks_with_every_border(form: str, known: Known) -> None:
    """A prompt in chunks of 1, 2, 3, ... tokens; other tokens begin it each time."""
    text, directory = known.texts("seeded")[0], known.directory(form)
    made = workers(max_prefill_tokens=64, spec=speculation(directory, WIDTH))
    scheduler = made.decode.scheduler
    sizes = range(1, 41, 1 if whole else 7)
    asked = [
        Ask((800 + size, *text[:40]), Sampling(6, temperature=0.7, seed=size, ignore_eos=True))
        for size in sizes
    ]
    for size, ask, wanted in zip(sizes, asked, plain(asked), strict=True):
        limit = {"max_prefill_tokens": size}
        scheduler.queues._engine = scheduler.queues._engine.model_copy(update=limit)
        made.windows.clear()
        check_against([wanted], made, [ask], directory)
    made.close()


@pytest.mark.whole
@pytest.mark.parametrize("page_size", [1, 16])
def test_blocks_that_are_longer_than_what_is_verified(page_size: int, known: Known) -> None:
    """Pages are there for all of a block, also behind the end of a text that fills the model."""
    directory, asked = known.directory("dflash"), known.asked["seeded"]
    spec = speculation(directory, 1, 3) | {"block": fitted_blocks.BLOCK_SIZE}
    made = workers(num_prefill=1, page_size=page_size, num_tokens=900, spec=spec)
    made.decode.scheduler.widths = AnyWidth((1, 3, 3), random.Random(5))
    last = replace(asked[0], at=cases.NUM + 1).but(max_tokens=cases.MAX_LEN - len(asked[0].prompt))
    asked = [*asked, last]
    answers, reference = made.serve(asked), cases.reference_of(directory)
    wanted = known.answers["seeded"]
    assert [each.tokens for each in answers[:-1]] == [each.tokens for each in wanted]
    assert judge(made, asked, answers, reference, block=fitted_blocks.BLOCK_SIZE) > 100
    assert len(last.prompt) + len(answers[-1].tokens) == cases.MAX_LEN
    made.close()
