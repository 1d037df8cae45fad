"""Grammars on a link: its two sides keep the same list, so each reads what the other has said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from worker.api import Generate, Sampling
from worker.config import said
from worker.config.said import LastSaid, Said


@given(st.lists(st.integers(0, 9), max_size=60))
def test_what_is_named_is_what_was_said(numbers: list[int]) -> None:
    texts = [str(number) * (1 + 9 * number) for number in range(10)]
    ours, theirs = LastSaid(), LastSaid()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(said, "MAX_TEXTS", 4)
        patch.setattr(said, "MAX_CHARS", 150)
        for text in (texts[number] for number in numbers):
            age = ours.age(text)
            assert theirs.text(age, "" if age else text) == text
            assert ours.texts == theirs.texts
            assert len(ours.texts) <= 4
            assert sum(map(len, ours.texts)) <= 150


@pytest.mark.parametrize("age", [-1, 1, 2, 1 << 40])
def test_an_age_of_which_nothing_was_said_is_refused(age: int) -> None:
    asked = Generate("r", 1, (1,), 1, Sampling(5), 9.0, grammar_age=age)
    assert Said().whole("router-0/a", asked) is None


def test_each_link_has_its_own() -> None:
    heard = Said()
    first = Generate("r", 1, (1,), 1, Sampling(5, grammar="start: /a/"), 9.0)
    again = Generate("s", 1, (1,), 1, Sampling(5), 9.0, grammar_age=1)
    free = Generate("t", 1, (1,), 1, Sampling(5), 9.0)
    assert heard.whole("a", first) == first
    assert heard.whole("a", again) == replace(again, sampling=first.sampling)
    assert heard.whole("a", free) is free
    assert heard.whole("b", again) is None
