"""Where all layers have a window, pages that no layer reads any more are given back."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equivalence import test_models as models
from tests.equivalence.test_dense_laws import sections
from tests.equivalence.test_hybrid_mutants import mutate
from tests.support.books import check_book
from tests.support.dense_families import WINDOWED
from tests.support.lockstep import Ask, Lockstep
from tests.support.places import place
from worker.api import Sampling
from worker.cache.book import PageBook
from worker.model.shape import read_model_shape

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS, NUM_TOKENS, PAGE_SIZE = (3, 40, 170, 300), 400, 16
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
# Of a window of 7: what kernels read in whole blocks, and what a row binds ahead.
MOST_PAGES = (7 + 127) // PAGE_SIZE + 4


def test_a_trimmed_hold_keeps_the_book_whole() -> None:
    book = PageBook(40, PAGE_SIZE)
    tokens = list(range(20 * PAGE_SIZE))
    first = book.open(tokens, 20 * PAGE_SIZE, max_matched=0)
    assert first is not None
    book.bind(first, 20 * PAGE_SIZE)
    book.commit(first, tokens[: 3 * PAGE_SIZE])
    shared = first.pages[:3]
    for end in (-5, 2 * PAGE_SIZE, 5 * PAGE_SIZE + 7, 5 * PAGE_SIZE, 12 * PAGE_SIZE):
        book.trim(first, end)
        check_book(book, [first])
    assert first.pages[:12] == [*shared, *[0] * 9], "pages of the tree are kept"
    assert book.num_private == 8
    book.commit(first, tokens)  # at its end; what lies behind a gap is no prefix
    assert book.tree.num_pages == 3
    second = book.open(tokens, 20 * PAGE_SIZE, max_matched=19 * PAGE_SIZE)
    assert second is not None
    assert second.pages == shared
    check_book(book, [first, second])
    for hold in (first, second):
        book.close(hold)
    assert book.num_available == book.num_pages


@cache
def saved(case: str) -> tuple[Path, torch.nn.Module]:
    path = place("windows") / case
    family, changes = WINDOWED[case]
    return path, models.save_random(path, family, changes | {"max_position_embeddings": 1024})


def asked() -> list[Ask]:
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(2, 199) for _ in range(n)) for n in LENGTHS]
    return [Ask(prompt, GREEDY, at=i) for i, prompt in enumerate(prompts)]


def serve(case: str, mode: str, **changes: Any) -> tuple[list[list[int]], int, int]:
    """(ids, the most private pages of a row, preemptions)."""
    path, _ = saved(case)
    spec = changes.pop("spec", None)
    made_of = sections(path, mode, **{"num_pages": 200, "max_prefill_tokens": 64, **changes})
    if spec:
        made_of["spec"] = spec
    made = Lockstep(made_of)
    scheduler: Any = made.decode.scheduler
    most, settle = 0, scheduler.settle
    preempted, preempt = 0, scheduler._preempt

    def counted(req: Any) -> None:
        nonlocal preempted
        preempted += 1
        preempt(req)

    def settled(*arguments: Any) -> Any:
        nonlocal most
        result = settle(*arguments)
        held = [len(req.hold.private) for req in scheduler.running.values() if req.hold]
        most = max([most, *held])
        return result

    scheduler.settle, scheduler._preempt = settled, counted
    try:
        ids = []
        for _ in range(2):  # the second time with cached prefixes
            ids = [answer.tokens for answer in made.serve(asked())]
            assert scheduler.book.num_private == 0
            assert scheduler.book.num_available == scheduler.book.num_pages
    finally:
        made.close()
    return ids, most, preempted


WAYS: dict[str, dict[str, Any]] = {
    "here": {"mode": "never"},
    "pulled, ngram": {"mode": "always", "spec": {"drafter": "ngram", "widths": [1, 4]}},
    "preempted": {"mode": "always", "num_pages": 60, "growth_tokens": 8},
}


@pytest.mark.parametrize("way", WAYS)
def test_pages_in_use_stay_flat_beyond_the_window_and_no_token_changes(way: str) -> None:
    ids, most, preempted = serve("mistral-window", **WAYS[way])
    assert bool(preempted) is (way == "preempted")
    _, model = saved("mistral-window")
    for ask, mine in zip(asked(), ids, strict=True):
        assert models.expect(model, [*ask.prompt], mine)[0] == mine
    if WAYS[way]["mode"] == "always":  # prompts lie in the tree
        assert most <= MOST_PAGES


@pytest.mark.parametrize(
    ("where", "old", "new"),
    [
        ("model.shape:ModelShape.span", "max(widest) + KEY_BLOCK - 1", "1"),
        ("cache.book:PageBook.commit", "0 in pages", "False"),
        ("cache.book:PageBook.trim", "if page in hold.private:", "if False:"),
    ],
)
def test_a_mutant_is_red(where: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, where, old, new)
    with pytest.raises(Exception):  # noqa: B017, PT011 - an assertion, here or in a loop
        test_pages_in_use_stay_flat_beyond_the_window_and_no_token_changes("preempted")


def test_a_model_with_a_layer_that_sees_all_keeps_its_pages() -> None:
    path, _ = saved("ministral-mixed")
    assert read_model_shape(path).span == 0
    _, most, _ = serve("ministral-mixed", "always")
    assert most >= NUM_TOKENS // PAGE_SIZE
    assert read_model_shape(saved("mistral-window")[0]).span == 7 + 127
