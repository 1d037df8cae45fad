"""A text's token ids by fastokens, where they are those of Hugging Face's tokenizers.

fastokens takes a fifth to an eighth of the CPU (benchmarks/results/router.md). What a model was
trained on are the ids of tokenizers, and a wrong id is a worse answer that nobody notices. So both
encode PROBES at the start and, later, some of the texts that come. Once they differ, fastokens is
not asked again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from router.config import TokenizerBackend
from worker.errors import LibraryError, UserError, contained

log = logging.getLogger("kvlane.tokenizer")

Encode = Callable[[str, bool], Sequence[int]]
"""(text, whether tokens are added that the tokenizer itself adds) -> ids."""

ALL_COMPARED = 32  # of the first texts of a process
COMPARED_EVERY = 256  # of later ones: 1/30 of what fastokens saves
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
        checked = Checked(right, _fastokens(path, described))
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        for probe in (*PROBES, "".join(added), " x ".join(added)):
            for adds in (False, True):
                checked.compare(probe, adds)
    except _Declined as reason:
        if backend == "fastokens":
            raise UserError(f"fastokens cannot encode for {path}: {reason}", FIELD) from reason
        log.info("encoding by tokenizers: %s", reason)
        return right
    return checked


class _Declined(Exception):
    """Why fastokens is not asked."""


class Checked:
    """An Encode that asks `fast`, and `right` as well now and then; safe to use from any thread."""

    def __init__(self, right: Encode, fast: Encode) -> None:
        self._right = right
        self._fast: Encode | None = fast
        self._num_texts = 0

    def __call__(self, text: str, adds: bool) -> Sequence[int]:
        """The ids of `text`; those of `right` if the two differ."""
        fast = self._fast
        if fast is None:
            return self._right(text, adds)
        self._num_texts += 1  # one that two threads count as one changes nothing
        if self._num_texts > ALL_COMPARED and self._num_texts % COMPARED_EVERY:
            try:
                return fast(text, adds)
            except LibraryError as error:  # its patterns have limits that those of `right` have not
                log.debug("a text of %d characters: %s", len(text), error)
                return self._right(text, adds)
        ids = self._right(text, adds)
        try:
            self.compare(text, adds, ids)
        except _Declined as reason:
            self._fast = None
            log.warning("encoding by tokenizers from now on: %s", reason)
        return ids

    def compare(self, text: str, adds: bool, right: Sequence[int] | None = None) -> None:
        """Raises _Declined where `fast` has other ids for `text`; it tells no text."""
        if self._fast is None:
            return
        try:
            found = self._fast(text, adds)
        except LibraryError as error:
            raise _Declined(f"{error} over a text of {len(text)} characters") from error
        ids = self._right(text, adds) if right is None else right
        if list(found) != list(ids):
            raise _Declined(
                f"its ids of a text of {len(text)} characters are not those of tokenizers "
                f"({len(found)} and {len(ids)}); please report it to kvlane and fastokens"
            )


def _fastokens(path: Path, described: Mapping[str, Any]) -> Encode:
    model = cast("dict[str, Any]", described.get("model") or {})
    if described.get("truncation") or described.get("padding") or model.get("dropout"):
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
