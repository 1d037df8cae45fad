"""A text's token ids by fastokens, where they are those of Hugging Face's tokenizers.

fastokens takes a seventh of the CPU or less (benchmarks/results/router.md). What a model was
trained on are the ids of tokenizers, and a wrong id is a worse answer that nobody notices. So both
encode PROBES at the start and, later, some of the texts that come. Once they differ, fastokens is
not asked again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from router.config import TokenizerBackend
from worker.errors import LibraryError, UserError, contained

log = logging.getLogger("kvlane.tokenizer")

Encode = Callable[[str, bool], Sequence[int]]
"""(text, whether tokens are added that the tokenizer itself adds) -> ids."""

ALL_COMPARED = 32  # of the first texts of a process
COMPARED_EVERY = (
    257  # of later ones; a prime, as a request may always have the same number of parts
)
MOST_REFUSED = 16  # one after another, then it is not asked again
FIELD = "router.tokenizer_backend"
PROBES = (
    "",
    " ",
    "The quick brown fox can't jump, WE'LL see: it's 12345.67 km/h (€9) — naïve café.\n\n\tEnd  ",
    "def f(x):\r\n    return {'a': [1, 2], \"b\": x**2}  # ok\r\n\r\n\r\n<tag attr='1'/>",
    "中文字符。日本語のカナｶﾅ、한국어 русский язык العربية हिन्दी ไทย",
    "e\u0301 \u212b \u017f \u212a '\u017f İ ǅ \u0345 ٣ Ⅷ ½",
    "\u00a0\u2003 \u2028\u3000 \u0085\u001c \ufeff\u200d \x00",
    "🙂👩\u200d👩\u200d👧🏽🇩🇪 \U00010437\U0001e900\U00031350 \ue000\U0010ffff"
    + "a" * 300
    + " " * 70,
)


def encode_of(
    path: Path, tokenizer: Tokenizer, described: Mapping[str, Any], backend: TokenizerBackend
) -> Encode:
    """What encodes texts.

    Args:
        path: of the tokenizer.json that `tokenizer` is from.
        described: what stands in it.
        backend: auto: fastokens where it can read this file and agrees, else tokenizers.

    Raises:
        UserError: fastokens was asked for by name and cannot be used.
    """

    def right(text: str, adds: bool) -> Sequence[int]:
        with contained("the tokenizer"):  # the fast one leaves out where each token stands
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=adds)
        return encoding.ids

    if backend == "huggingface":
        return right
    try:
        fast = _fastokens(path, described)
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        for probe in (*PROBES, "".join(added), " x ".join(added)):
            for adds in (False, True):
                difference = differs(fast(probe, adds), right(probe, adds))
                if difference:
                    raise _Declined(difference)
    except (_Declined, LibraryError) as reason:
        if backend == "fastokens":
            raise UserError(f"fastokens cannot encode for {path}: {reason}", FIELD) from reason
        log.info("encoding by tokenizers: %s", reason)
        return right
    log.info("encoding by fastokens, which agrees with tokenizers")
    return Checked(right, fast)


def differs(found: Sequence[int], right: Sequence[int]) -> str:
    """In which way, without the text; empty: they are equal."""
    if list(found) == list(right):
        return ""
    return f"the ids of fastokens and tokenizers differ ({len(found)} and {len(right)} tokens)"


def needs_all(described: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json makes the ids depend on the length of a text, or on chance."""
    model = cast("dict[str, Any]", described.get("model") or {})
    return bool(described.get("truncation") or described.get("padding") or model.get("dropout"))


class _Declined(Exception):
    """Why fastokens is not asked."""


class Checked:
    """An Encode that asks `fast`, and `right` as well now and then; safe to use from any thread.

    `when_wrong` is called when what `fast` gave was wrong, so that others forget what it gave.
    """

    def __init__(self, right: Encode, fast: Encode) -> None:
        self._right = right
        self._fast: Encode | None = fast
        self._numbers = count()  # of texts
        self._num_refused = 0  # in a row, about
        self.when_wrong: Callable[[], None] = lambda: None

    def __call__(self, text: str, adds: bool) -> Sequence[int]:
        """The ids of `text`; those of `right` if the two differ, or `fast` refuses it."""
        fast, number = self._fast, next(self._numbers)
        if fast is None:
            return self._right(text, adds)
        try:
            found = fast(text, adds)
        except LibraryError as error:  # its patterns have limits that those of `right` have not
            self._note_refused(len(text), error)
            return self._right(text, adds)
        self._num_refused = 0
        if number >= ALL_COMPARED and number % COMPARED_EVERY:
            return found
        right = self._right(text, adds)
        difference = differs(found, right)
        if difference:
            self._give_up(f"{difference}; please tell kvlane and fastokens")
            self.when_wrong()
        return right

    def _note_refused(self, num_chars: int, error: LibraryError) -> None:
        log.debug("a text of %d characters: %s", num_chars, error)
        self._num_refused += 1
        if self._num_refused >= MOST_REFUSED:  # two threads may count as one, or both at once
            self._give_up(f"{error}, {MOST_REFUSED} times one after another")

    def _give_up(self, why: str) -> None:
        if self._fast is not None:
            self._fast = None
            log.warning("encoding by tokenizers from now on: %s", why)


def _fastokens(path: Path, described: Mapping[str, Any]) -> Encode:
    if needs_all(described):
        raise _Declined("the tokenizer truncates, pads or draws by chance")
    try:
        from fastokens import Tokenizer as Fast  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise _Declined(str(error)) from error
    try:
        with contained("fastokens"):
            fast = Fast.from_file(str(path))
    except LibraryError as error:
        raise _Declined(str(error.__cause__)) from error

    def encode(text: str, adds: bool) -> Sequence[int]:
        with contained("fastokens"):
            return fast.encode(text, add_special_tokens=adds).ids

    return encode
