"""Where all layers have a window, pages that no layer reads any more are given back."""

import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equivalence import test_models as models
from tests.equivalence.test_dense_laws import sections
from tests.equivalence.test_hybrid_mutants import mutate
from tests.support.dense_families import WINDOWED
from tests.support.lockstep import DECODE, PREFILL, Ask, Lockstep
from tests.support.pairwise import in_whole, one_in
from tests.support.places import place
from tests.unit import test_decode_scheduler as decode
from tests.unit import test_prefill_scheduler as prefill
from worker.api import Sampling
from worker.cache.book import PageBook
from worker.cache.prefix import PrefixTree
from worker.config.checkpoint.mask import KEY_BLOCK
from worker.config.checkpoint.shape import ModelShape, read_model_shape
from worker.errors import OutOfPages

pytestmark = pytest.mark.usefixtures("one_thread")

# Of prompts that begin alike.
LENGTHS, NUM_TOKENS, PAGE_SIZE, WINDOW, CHUNK = (3, 40, 300, 560, 170, 420), 150, 16, 7, 64
SPAN = WINDOW + KEY_BLOCK - 1  # kernels read whole blocks
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
# Beside what is read: a page at each end, and what a row binds ahead.
MOST_PAGES = SPAN // PAGE_SIZE + 4


@cache
def saved(case: str) -> tuple[Path, torch.nn.Module]:
    path = place("windows") / case
    family, changes = WINDOWED[case]
    return path, models.save_random(path, family, changes | {"max_position_embeddings": 1024})


def asked() -> list[Ask]:
    rng = random.Random(3)
    text = [rng.randrange(2, 199) for _ in range(max(LENGTHS))]
    prompts = [(*text[: n - 2], *rng.sample(range(2, 199), 2)) for n in LENGTHS]
    return [Ask(prompt, GREEDY, at=i) for i, prompt in enumerate(prompts)]


def in_use(book: PageBook) -> int:
    """Pages that cannot be had for anything else; those that are promised left out."""
    return book.num_pages - book.num_available - book.num_reserved


class Counted(Lockstep):
    """Counts what its workers have at a time."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.most: Counter[str] = Counter()
        self.scheduler: Any = self.decode.scheduler
        self.scheduler.queues.on_preempt = lambda _: self.most.update(("preempted",))
        for engine in self.engines.values():
            book: Any = engine.book
            book.launched = self._launched(book.launched)

    def _launched(self, launched: Callable[[int], None]) -> Callable[[int], None]:
        """A step has its pages, and those of the one before it are not given back yet."""
        return lambda step: (launched(step), self._count())[0]

    def _turns(self, *, whole: bool) -> None:
        super()._turns(whole=whole)
        self._count()

    def _count(self) -> None:
        found = {peer: in_use(engine.book) for peer, engine in self.engines.items()}
        rows = self.scheduler.queues.running.values()
        held = [len(req.hold.pages) - req.hold.pages.count(0) for req in rows if req.hold]
        for name, count in {**found, "of a row": max(held, default=0)}.items():
            self.most[name] = max(self.most[name], count)

    def pulled_bytes(self) -> int:
        metrics = self.engines[DECODE].metrics
        return int(metrics.pulled_bytes("shm/shm")._value.get())


def made_of(case: str, mode: str, **changes: Any) -> Counted:
    path, _ = saved(case)
    spec = changes.pop("spec", None)
    made = sections(path, mode, **{"num_pages": 200, "max_prefill_tokens": CHUNK, **changes})
    return Counted(made | ({"spec": spec} if spec else {}))


def serve(case: str, mode: str, **changes: Any) -> tuple[list[list[int]], Counter[str]]:
    """(ids, counts)."""
    made = made_of(case, mode, **changes)
    try:
        ids = []
        for _ in range(2):  # the second time with cached prefixes
            ids = [answer.tokens for answer in made.serve(asked())]
            for engine in made.engines.values():
                assert engine.book.num_private == 0
                assert engine.book.num_available == engine.book.num_pages
    finally:
        made.close()
    return ids, made.most


WAYS: dict[str, dict[str, Any]] = {
    "here": {"mode": "never"},
    "here, whole": {"mode": "never", "max_prefill_tokens": 640},
    "pulled, ngram": {"mode": "always", "spec": {"drafter": "ngram", "widths": [1, 4]}},
    "preempted": {"mode": "always", "num_pages": 46, "growth_tokens": 8},
}


@pytest.mark.parametrize(
    "way",
    ["pulled, ngram", "preempted", *in_whole(("here",), ("here, whole",))],
)
def test_pages_of_rows_stay_flat_beyond_the_window_and_no_token_changes(way: str) -> None:
    ids, most = serve("mistral-window", **WAYS[way])
    assert bool(most["preempted"]) is (way == "preempted")
    _, model = saved("mistral-window")
    for ask, mine in zip(asked(), ids, strict=True):
        assert models.expect(model, [*ask.prompt], mine)[0] == mine
    assert most["of a row"] <= MOST_PAGES + WAYS[way].get("max_prefill_tokens", CHUNK) // PAGE_SIZE


def served_alone(length: int, mode: str) -> tuple[int, int, int]:
    """(most pages in use at the prefill worker, at the decode worker, bytes of the pull)."""
    made = made_of("mistral-window", mode)
    prompt = tuple(random.Random(length).randrange(2, 199) for _ in range(length))
    try:
        made.serve([Ask(prompt, Sampling(max_tokens=4, temperature=0.0, ignore_eos=True))])
        return made.most[PREFILL], made.most[DECODE], made.pulled_bytes()
    finally:
        made.close()


PAGE_BYTES = 3 * 2 * 2 * 16 * 4 * PAGE_SIZE  # of 3 layers, keys and values, 2 heads of 16 floats


def test_a_prompt_of_four_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In use while it is computed and pulled, and bytes of the pull: the figure of ADR 0039."""
    four = 4 * SPAN
    for length in (four, four + 2 * CHUNK):  # as many for a longer one
        assert served_alone(length, "always") == (17, 10, 10 * PAGE_BYTES)
    assert served_alone(four, "never") == (0, 17, 0)
    monkeypatch.setattr(ModelShape, "span", 0)
    assert served_alone(four, "always") == (34, 34, 34 * PAGE_BYTES)
    assert served_alone(four, "never") == (0, 34, 0)


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_no_kernel_reads_a_page_that_is_given_back(page_size: int) -> None:
    """A block of keys that holds one of a window is read whole."""
    tree = PrefixTree(page_size, SPAN)
    for position in range(1500):
        oldest = max(0, position + 1 - WINDOW) // KEY_BLOCK * KEY_BLOCK
        assert tree.first_read(position // page_size) <= oldest // page_size


MUTANTS = [
    ("cache.prefix:PrefixTree.first_read", "+ 1 - self.span", "+ 1 + size - self.span"),
    ("cache.prefix:PrefixTree.match", "if num_passed <= ", "if 0 * num_passed <= "),
    ("cache.prefix:PrefixTree._can_go", "not node.num_locks", "True"),
    ("cache.book:PageBook.trim", "hold.num_reserved + len(bound)", "hold.num_reserved"),
    ("cache.book:PageBook.trim", "min(self.first_read(num_tokens), hold.keep_from)",
     "self.first_read(num_tokens)"),
    ("cache.book:PageBook.trim", "if last > len(hold.nodes):", "if True:"),
    ("cache.book:PageBook.commit", "self.tree.lock(nodes[first:])", "self.tree.lock(nodes)"),
    ("schedule.prefill:PrefillScheduler.commit", "not self.book.span or", "True or"),
]  # fmt: skip


def simulate() -> None:
    for case in prefill.CASES:
        if case[-1]:
            prefill.test_every_prompt_is_covered_once_and_short_ones_first(*case)
    for name, load in decode.LOADS.items():
        if load.span:
            decode.test_text_is_that_of_a_lonely_request_whatever_happens_around_it(name)


@pytest.mark.parametrize(
    "mutant", one_in(4, [pytest.param(m, id=f"{m[0]} {m[2]}") for m in MUTANTS])
)
def test_a_mutant_is_red(mutant: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, *mutant)
    with pytest.raises((AssertionError, OutOfPages)):
        simulate()


def test_a_model_with_a_layer_that_sees_all_keeps_its_pages() -> None:
    path, _ = saved("ministral-mixed")
    assert read_model_shape(path).span == 0
    _, most = serve("ministral-mixed", "always")
    assert most["of a row"] >= (max(LENGTHS) + NUM_TOKENS) // PAGE_SIZE
    assert read_model_shape(saved("mistral-window")[0]).span == SPAN
