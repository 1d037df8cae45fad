"""The judges of chain drafters are judged: audits and traces against an engine that is told its
drafts, and against ones that are wrong in a small way.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from tests.support import fitted_drafters
from tests.support.chain_reference import ChainReference, tapped_layers
from tests.support.drafter_audit import audit, prefixes, trace_is_right
from tests.support.drafter_cases import TARGET, workers
from tests.support.engines import Answer, value
from tests.support.lockstep import DECODE, Ask, Lockstep
from tests.support.oracle import Oracle
from tests.support.pairwise import more
from tests.support.prompts import VOCAB, problem_ids
from tests.support.regions import add_regions
from worker.api import Sampling

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 5
FEW = 480  # tokens of a pool for which requests preempt each other


def test_three_conventions_tap_the_same_layers() -> None:
    inner = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}
    inputs = {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}
    assert [tapped_layers(each, 36) for each in (inner, inputs, {})] == [[1, 17, 32]] * 3


Served: TypeAlias = tuple[list[Ask], list[Answer], ChainReference]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Requests that preempt each other, their answers, and a drafter that is fitted to them."""
    asked = [
        Ask(prompt, Sampling(24, temperature=(0.0, 0.8)[number % 2], seed=number), number)
        for number, prompt in enumerate(problem_ids(10))
    ]
    made = workers(num_tokens=FEW)
    answers = made.serve(asked)
    made.close()
    texts = [[*ask.prompt, *answer.tokens] for ask, answer in zip(asked, answers, strict=True)]
    directory = tmp_path_factory.mktemp("drafter")
    d2t = fitted_drafters.map_of(texts, 300, VOCAB)
    fitted_drafters.write(directory, TARGET, "eagle3", d2t=d2t)
    fitted_drafters.fit(directory, TARGET, texts)
    return asked, answers, ChainReference(TARGET, directory)


def table_of(
    served: Served, wrong: Callable[[list[int]], list[int]] = lambda drafts: drafts
) -> dict[int, Tensor]:
    """Drafts of each text, by KV length; every seventh is wrong."""
    found = {}
    for ask, answer in zip(*served[:2], strict=True):
        text = [*ask.prompt, *answer.tokens]
        table = torch.full((len(text), WIDTH - 1), -1)
        for length in range(len(ask.prompt), len(text)):
            drafts = served[2].drafts(text, length, WIDTH, ask.sampling)
            table[length] = torch.tensor(drafts if length % 7 else wrong(drafts))
        found[ask.sampling.seed] = table
    return found


def judged(served: Served, table: dict[int, Tensor], *, overlap: bool = True) -> Lockstep:
    asked, answers, reference = served
    made = workers(num_tokens=FEW, overlap=overlap, spec={"widths": [WIDTH]})
    Oracle(made.engines[DECODE], table)
    found = made.serve(asked)
    made.close()
    assert [each.tokens for each in found] == [each.tokens for each in answers]
    for number, (ask, answer) in enumerate(zip(asked, answers, strict=True)):
        text, max_len = [*ask.prompt, *answer.tokens], len(ask.prompt) + ask.sampling.max_tokens
        trace_is_right(made.windows[number], text, reference, ask.sampling, max_len)
    return made


@pytest.mark.parametrize("overlap", [True, *more(False)])
def test_traces_of_an_engine_that_is_told_its_drafts_are_right(overlap, served: Served) -> None:
    made = judged(served, table_of(served), overlap=overlap)
    assert value(made.engines[DECODE].metrics.preemptions) > 0
    windows = [window for each in made.windows.values() for window in each]
    steps = [window.num for window in windows if set(window.drafts) != {-1}]
    print(f"{sum(steps) / len(steps):.2f} of {WIDTH} tokens a step, {len(steps)} steps")
    assert set(steps) == set(range(1, WIDTH + 1))


Wrong: TypeAlias = Callable[[list[int]], list[int]]
WRONG: dict[str, Wrong] = {
    "another one": lambda drafts: [*drafts[:-1], (drafts[-1] + 1) % VOCAB],
    "none": lambda drafts: [-1] * len(drafts),
    "one less": lambda drafts: [*drafts[:-1], -1],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_trace_with_a_wrong_draft_is_found(name: str, served: Served) -> None:
    with pytest.raises(AssertionError, match="which were the likeliest"):
        judged(served, table_of(served, WRONG[name]))


def test_a_trace_with_drafts_at_its_entry_or_a_wrong_count_is_found(served: Served) -> None:
    asked, answers, reference = served
    windows = judged(served, table_of(served)).windows[0]
    text = [*asked[0].prompt, *answers[0].tokens]
    rest = reference, asked[0].sampling, len(text)
    assert trace_is_right(windows, text, *rest) > 0
    later = replace(windows[3], hold=object())
    with pytest.raises(AssertionError, match="entry"):
        trace_is_right([*windows[:3], later, *windows[4:]], text, *rest)
    few = replace(windows[3], num=windows[3].num % WIDTH + 1)
    with pytest.raises(AssertionError):
        trace_is_right([*windows[:3], few, *windows[4:]], text, *rest)


def test_pages_that_differ_from_the_reference_in_one_row_are_found(served, monkeypatch) -> None:
    asked, _, reference = served
    heads = {"num_kv_heads": fitted_drafters.KV_HEADS, "head_dim": fitted_drafters.HEAD_DIM}
    add_regions(monkeypatch, **heads)
    made = workers()
    made.serve(asked)
    engine = made.engines[DECODE]
    keys, values = engine.pool.layer(0, "draft")
    tail = engine.pool.page_rows("tail")
    known = list(prefixes(engine.book))
    for cache in (keys, values, tail):
        cache.fill_(float("nan"))
    for tokens, pages in known:
        (rows,), tails = reference.draft_rows(tokens), reference.tails(tokens, 16)
        for number, page in enumerate(pages):
            for cache, row in zip((keys, values), rows, strict=True):
                cache[page] = row[16 * number : 16 * number + 16].transpose(0, 1)
            tail[page] = tails[number]
    assert audit(engine, reference) == len({page for _, pages in known for page in pages}) > 10
    first, last = known[0][1][0], known[0][1][-1]
    for place in (keys[first, :, 1], values[last, :, 15], keys[last, 0, 7], tail[last]):
        before = place.clone()
        for wrong in (before * 1.001, before.flip(-1), before * float("nan")):
            place.copy_(wrong)
            with pytest.raises(AssertionError, match=r"^(draft|tail)"):
                audit(engine, reference)
        place.copy_(before)
    for shifted in (keys, values):
        shifted[last] = shifted[last].roll(1, 1)
        with pytest.raises(AssertionError, match=r"draft ."):
            audit(engine, reference)
        shifted[last] = shifted[last].roll(-1, 1)
    assert audit(engine, reference) > 10
    made.close()
