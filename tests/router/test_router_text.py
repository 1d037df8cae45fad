"""Tokens to text and back: laws over random tokens, random splits and random stop strings."""

import json
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from router.text.output import Ends, OutputText, StopMatcher, WindowDetokenizer
from router.text.template import ChatTemplate, text_of_parts
from router.text.tokenizer import Text
from tests.fault.router_doubles import make_model
from tests.support.prompts import TINY
from worker.errors import UserError


def splits(tokens: list[int], seed: int) -> list[list[int]]:
    """`tokens`, cut at random."""
    rng, parts = random.Random(seed), []
    while tokens:
        size = rng.randint(1, 5)
        parts.append(tokens[:size])
        tokens = tokens[size:]
    return parts


def through(output: OutputText, parts: list[list[int]]) -> tuple[str, int]:
    """Text and number of tokens that count."""
    found, num_tokens = "", 0
    for part in parts:
        piece = output.feed(part)
        found, num_tokens = found + piece.text, num_tokens + piece.num_tokens
        if piece.stopped:
            return found, num_tokens
    return found + output.finish(), num_tokens


@settings(max_examples=150)
@given(st.text(alphabet="ab😀é", max_size=40) | st.text(max_size=60))
def test_no_piece_of_any_text_holds_half_a_character(text: Text, sample: str) -> None:
    assume("<|" not in sample)  # no special token: Hypothesis tries strings of our sources, too
    output, tokens = text.output(()), text.encode(sample, add_special_tokens=False)
    pieces = [output.feed((token,)).text for token in tokens]
    assert "".join(pieces) == text.decode(tokens) == sample
    assert output.finish() == ""


@settings(max_examples=150)
@given(st.lists(st.integers(0, 520), max_size=60), st.integers(0, 1000), st.booleans())
def test_pieces_of_any_tokens_add_up_to_the_whole(
    text: Text, tokens: list[int], seed: int, skip: bool
) -> None:
    whole = text.decode(tokens, skip_special_tokens=skip)
    output = text.output((), skip=None if skip else frozenset())
    assert through(output, splits(tokens, seed)) == (whole, len(tokens))


def earliest(whole: str, stops: list[str]) -> str | None:
    """The text before the match that ends first, by looking at every prefix."""
    for end in range(1, len(whole) + 1):
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found:
            return whole[: end - max(map(len, found))]
    return None


@settings(max_examples=300)
@given(
    st.text(alphabet="ab😀", max_size=30),
    st.lists(st.text(alphabet="ab😀", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 1000),
)
def test_stop_strings_are_found_wherever_tokens_and_chunks_are_cut(
    text: Text, sample: str, stops: list[str], seed: int
) -> None:
    tokens = list(text.encode(sample, add_special_tokens=False))
    found, num_tokens = through(text.output((), Ends(stops)), splits(tokens, seed))
    one_by_one = through(text.output((), Ends(stops)), [[token] for token in tokens])
    assert (found, num_tokens) == one_by_one
    expected = earliest(sample, stops)
    assert found == (sample if expected is None else expected)
    if expected is not None:  # the last token that counts is the one that completed the match
        before = text.decode(tokens[: num_tokens - 1])
        assert earliest(before.rstrip("\ufffd"), stops) is None


def test_only_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["END", "NO"])
    assert matcher.feed("the E") == ("the ", False)
    assert matcher.feed("N") == ("", False)
    assert matcher.feed("T") == ("ENT", False)
    assert matcher.feed("EN") == ("", False)
    assert matcher.feed("Dx") == ("", True)


def test_min_tokens_puts_stop_strings_off(text: Text) -> None:
    tokens = [text.encode(char, add_special_tokens=False)[0] for char in "axbxc"]
    assert through(text.output((), Ends(["x"], min_tokens=2)), [tokens]) == ("axb", 4)


def test_window_detokenizer_agrees_with_a_sentencepiece_decoder() -> None:
    pieces = ["<unk>", "▁hello", "▁world", "lo", "▁", "s"] + [f"<0x{b:02X}>" for b in range(256)]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])

    def decode(tokens: object) -> str:
        return tokenizer.decode(list(tokens), skip_special_tokens=False)  # type: ignore[call-overload]

    rng = random.Random(5)
    for _ in range(100):
        tokens: list[int] = []
        for _ in range(rng.randint(1, 12)):
            if rng.random() < 0.3:
                tokens += [6 + byte for byte in rng.choice("é€😀").encode()]
            else:
                tokens.append(rng.randint(1, 5))
        prompt = [1, 2]
        detokenizer = WindowDetokenizer(decode, prompt, frozenset())
        found = "".join(detokenizer.feed((token,)) for token in tokens) + detokenizer.finish()
        assert decode(prompt) + found == decode(prompt + tokens)


def test_window_detokenizer_gives_up_on_bytes_that_never_make_a_character() -> None:
    calls: list[int] = []

    def decode(tokens: object) -> str:
        calls.append(len(list(tokens)))  # type: ignore[call-overload]
        return "\ufffd" * calls[-1]

    detokenizer = WindowDetokenizer(decode, (), frozenset())
    found = detokenizer.feed([7] * 200) + detokenizer.finish()
    assert found == "\ufffd" * 200
    assert max(calls) <= 33


def test_chat_template_gets_what_hugging_face_gives() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{{ m.role }}:{% generation %}{{ m.content | tojson }}{% endgeneration %};{% endfor %}"
        "{% if mood is defined %}{{ mood }}{% endif %}{% if add_generation_prompt %}>{% endif %}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    messages = [{"role": "user", "content": "<é>"}, {"role": "x", "content": "y"}, {"role": "z"}]
    assert template.render(messages, extra={"mood": "!"}) == '<s>user:"<é>";x:"y";!>'


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}", "{{ messages + 1 }}"]
)
def test_chat_template_that_refuses_is_the_users_error(source: str) -> None:
    with pytest.raises(UserError, match="chat template refused"):
        ChatTemplate(source, {}).render([])


def test_template_file_wins_and_named_templates_have_a_default(tmp_path: Path) -> None:
    directory = make_model(tmp_path)
    named = '{"chat_template": [{"name": "default", "template": "D"}]}'
    (directory / "tokenizer_config.json").write_text(named)
    assert Text(directory).render([]) == "D"
    (directory / "chat_template.jinja").write_text("J")
    assert Text(directory).render([]) == "J"


def test_ids_that_only_the_model_knows_leave_no_text(tmp_path: Path) -> None:
    """A vocabulary padded beyond the tokenizer's, as checkpoints have."""
    for file in TINY.glob("tokenizer*.json"):
        shutil.copy(file, tmp_path)
    config = json.loads((TINY / "config.json").read_text()) | {"vocab_size": 151936}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = Text(tmp_path)
    known = text.encode("Tom has 3 apples", add_special_tokens=False)
    tokens = [known[0], 150_000, *known[1:], 1500, 151_935]
    for output in (text.output([5, 140_000]), text.output([5], Ends(["zz"]))):
        assert output.feed(tokens).text + output.finish() == "Tom has 3 apples"
    assert text.decode(tokens) == "Tom has 3 apples"
    assert (text.piece(150_000), text.token_bytes(150_000)) == ("", b"")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_broken_files_are_named(tmp_path: Path, name: str) -> None:
    directory = make_model(tmp_path)
    (directory / name).write_text("{% broken", encoding="utf-8")
    with pytest.raises(UserError, match=r"broken|not valid JSON|not a tokenizer") as caught:
        Text(directory)
    assert str(directory) in str(caught.value)
    with pytest.raises(UserError, match="has no config"):
        Text(tmp_path / "none")


def test_parts_of_a_message_are_joined() -> None:
    assert (
        text_of_parts([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "m") == "a\nb"
    )
    with pytest.raises(UserError, match="image_url"):
        text_of_parts([{"type": "image_url"}], "m")


def test_choices_share_what_is_known_of_their_stop_strings() -> None:
    stop = "ab" * 4000
    first, second = (StopMatcher([stop]) for _ in range(2))
    tables = [matcher._automata[0]._fallback for matcher in (first, second)]
    assert tables[0] is tables[1]
    assert tables[0].itemsize * len(tables[0]) <= 4 * len(stop)
    assert first.feed("x" + stop[:-1])[0] == "x"
    assert second.feed("b" + stop) == ("b", True)
    assert first.feed("b") == ("", True)
