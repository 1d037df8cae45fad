"""Prompt lookup changes how many tokens a step yields, never which; its traces are those of a loop.

Requests of every kind wait for, preempt and share few rows and pages.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from llguidance import LLMatcher

from tests.equivalence.test_windows import workers
from tests.support.delay_mix import Plain, differing, seeded_mix
from tests.support.engines import value
from tests.support.lockstep import DECODE, Ask, Window
from tests.support.ngram_reference import ngram_reference
from tests.support.pairwise import more
from worker.drafts.ngram import Ngram

MIN, MAX = 1, 3


def requests() -> list[Ask]:
    """Some prompts say the same again; some grammars make the answers do so."""
    asked = seeded_mix()
    for number in range(0, len(asked), 3):
        prompt = asked[number].prompt
        asked[number] = replace(asked[number], prompt=[*prompt[:30], *prompt[:40]])
    grammar = LLMatcher.grammar_from_regex("(7 cats, ){9}")
    for number in (9, 14, 2):
        asked[number] = asked[number].but(grammar=grammar)
    return asked


@pytest.fixture(scope="module")
def plain() -> Plain:
    asked, made = requests(), workers(0, 16, (1,))
    answers = made.serve(asked)
    made.close()
    return asked, answers


def check_trace(windows: Sequence[Window], text: Sequence[int], max_len: int) -> int:
    """Each window had what the loop finds behind the window before it; returns drafts accepted.

    The first window of a stay in a row has none.
    """
    hold, proposed, accepted = None, 0, 0
    for window in windows:
        none = (-1,) * (window.width - 1)
        if window.hold is not hold:
            assert window.drafts == none
        else:
            found = ngram_reference(text[: window.position + 1], proposed, MIN, MAX)
            found = found[: max_len - window.position - 1]
            wanted = (*found, *none)[: window.width - 1]
            assert window.drafts == wanted, (window, wanted)
        accepted += window.num - 1
        hold, proposed = window.hold, window.width - 1
    return accepted


@pytest.mark.product(
    widths=((4,), (1, 2, 8), *more((2,), (16,))),
    page_size=(16, 1, *more(64)),
    num_prefill=(0, 1),
    overlap=(True, False),
)
def test_lookup_changes_no_token_and_finds_what_is_there(
    widths, page_size, num_prefill, overlap, plain: Plain
) -> None:
    asked, wanted = plain
    lookup = {"drafter": "ngram", "ngram_min": MIN, "ngram_max": MAX}
    made = workers(num_prefill, page_size, widths, overlap=overlap, **lookup)
    assert isinstance(made.engines[DECODE].runner.loaded.drafter, Ngram)
    found = made.serve(asked)
    made.close()
    assert not differing(asked, found, wanted, exact=False)
    if page_size == 16:
        assert value(made.engines[DECODE].metrics.preemptions) > 0
    accepted = 0
    for number, (ask, answer) in enumerate(zip(asked, wanted, strict=True)):
        if ask.cut is None and ask.abort is None:
            text = [*ask.prompt, *answer.tokens]
            max_len = len(ask.prompt) + ask.sampling.max_tokens
            accepted += check_trace(made.windows[number], text, max_len)
    # Which steps are wide depends on when pulls land: behind narrow ones there are few drafts.
    assert accepted > (10 if len(widths) == 1 else 1), "few drafts were accepted"
