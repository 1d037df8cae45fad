"""A text's token ids by fastokens, where they are those of Hugging Face's tokenizers.

fastokens takes a seventh of the CPU or less (benchmarks/results/router.md). What a model was
trained on are the ids of tokenizers, and a wrong id is a worse answer that nobody notices. So both
encode PROBES at the start, and CI compares them over every kind of tokenizer
(`test_router_encoding.py`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from tokenizers import Tokenizer

from router.config import TokenizerBackend
from worker.config.checkpoint.tokens import TokenizerFile
from worker.errors import LibraryError, UserError, contained

log = logging.getLogger("kvlane.tokenizer")

Encode = Callable[[str, bool], Sequence[int]]
"""(text, whether tokens are added that the tokenizer itself adds) -> ids."""

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


def encode_of(file: TokenizerFile, tokenizer: Tokenizer, backend: TokenizerBackend) -> Encode:
    """What encodes texts; auto: fastokens where it can read `file` and agrees, else `tokenizer`.

    Raises a UserError if fastokens was asked for by name and cannot be used.
    """

    def right(text: str, adds: bool) -> Sequence[int]:
        with contained("the tokenizer"):  # the fast one leaves out where tokens stand
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=adds)
        return encoding.ids

    if backend == "huggingface":
        return right
    try:
        fast = _fastokens(file)
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        for probe in (*PROBES, "".join(added), " x ".join(added)):
            for adds in (False, True):
                if list(fast(probe, adds)) != list(right(probe, adds)):
                    raise _Declined("the ids of fastokens and tokenizers differ")
    except (_Declined, LibraryError) as reason:
        if backend == "fastokens":
            raise UserError(f"fastokens cannot encode for {file.path}: {reason}", FIELD) from reason
        log.info("encoding by tokenizers: %s", reason)
        return right
    log.info("encoding by fastokens, which agrees with tokenizers")
    return FastFirst(fast, right)


def is_random(described: Mapping[str, Any]) -> bool:
    """Whether a tokenizer.json makes the ids depend on chance."""
    model = cast("dict[str, Any]", described.get("model") or {})
    return bool(model.get("dropout"))


class _Declined(Exception):
    """Why fastokens is not asked."""


class FastFirst:
    """An Encode that asks `fast`, and `right` for texts that `fast` refuses. For any thread."""

    def __init__(self, fast: Encode, right: Encode) -> None:
        self.fast = fast
        self.right = right

    def __call__(self, text: str, adds: bool) -> Sequence[int]:
        try:
            return self.fast(text, adds)
        except LibraryError as error:  # its patterns have limits that those of `right` have not
            log.debug("a text of %d characters: %s", len(text), error)
            return self.right(text, adds)


def _fastokens(file: TokenizerFile) -> Encode:
    if is_random(file.fields):
        raise _Declined("the tokenizer draws by chance")
    try:
        from fastokens import Tokenizer as Fast  # pyright: ignore[reportMissingTypeStubs]
    except ImportError as error:
        raise _Declined(str(error)) from error
    try:
        with contained("fastokens"):
            fast = Fast.from_json_str(file.text)
    except LibraryError as error:
        raise _Declined(str(error.__cause__)) from error

    def encode(text: str, adds: bool) -> Sequence[int]:
        with contained("fastokens"):
            return fast.encode(text, add_special_tokens=adds).ids

    return encode
