"""Prompts of different salts share nothing, wherever something is kept of them.

Pages of KV: test_pages.
"""

import pytest

from router.openai.schema import Salted
from router.text import encoder
from tests.support.tokenizer_kinds import START, made


def test_a_piece_that_was_encoded_for_one_salt_is_not_known_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoder, "MIN_CHARS", 1)
    monkeypatch.setattr(encoder, "PIECE_CHARS", 1)
    tokenizer, known = made("bytes")
    text = f"{START}the cat{START}sat on mats"
    wanted = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
    for salt in ("", "a", "b"):
        for times in (0, 1):
            before = known.num_known
            assert known.encode(text, add_special_tokens=False, salt=salt) == wanted
            assert known.num_known - before == times * len(text), salt


def test_a_salt_is_a_digest_of_the_key_and_the_body() -> None:
    asked = (None, "a", "b", "a/b", "0" * 32)
    salts = [
        Salted(cache_salt=each).salt(own) for own in ("", "0" * 32, "1" * 32) for each in asked
    ]
    assert salts[0] == ""
    assert len(set(salts)) == len(salts)
    assert {len(salt) for salt in salts[1:]} == {32}
    assert salts[1] == Salted(cache_salt="a").salt("")
