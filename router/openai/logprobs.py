"""Logprobs of tokens in the two forms of OpenAI's API."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from router.dispatch.mailbox import Scored
from router.openai.reply import (
    ChatLogprobs,
    ContentLogprob,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
    TopLogprob,
)
from worker.api import TokenLogprob

BytesOf = Callable[[int], bytes]

LOWEST = -9999.0  # JSON has no infinity; vLLM writes this too


def finite(logprob: float) -> float:
    """A number that JSON can hold."""
    return logprob if logprob > LOWEST else LOWEST


def _shown(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def chat_logprobs(scored: Scored, bytes_of: BytesOf) -> ChatLogprobs:
    """choices[].logprobs of a chat."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = bytes_of(token)
        return {"token": _shown(raw), "bytes": list(raw), "logprob": finite(logprob)}

    content: list[ContentLogprob] = []
    for token, scores in scored:
        top = [TopLogprob(**entry(*alternative)) for alternative in scores.top]
        content.append(ContentLogprob(**entry(token, scores.logprob), top_logprobs=top))
    return ChatLogprobs(content=content)


def of_prompt(scored: Scored, bytes_of: BytesOf, num_top: int) -> PromptLogprobs:
    """`prompt_logprobs`, as vLLM has them: a token's own last, if it is not among the others."""

    def entry(token: int, logprob: float, rank: int | None) -> PromptLogprob:
        shown = _shown(bytes_of(token))
        return PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=shown)

    found: PromptLogprobs = [None]
    for token, scores in scored:
        top = scores.top[:num_top]
        entries = {str(i): entry(i, value, rank) for rank, (i, value) in enumerate(top, 1)}
        entries.setdefault(str(token), entry(token, scores.logprob, None))
        found.append(entries)
    return found


def text_logprobs(
    scored: Sequence[tuple[int, TokenLogprob | None]],
    bytes_of: BytesOf,
    offsets: Sequence[int],
    num_top: int,
) -> TextLogprobs:
    """choices[].logprobs of a completion. offsets: where the tokens begin in its text.

    None: a token without any, as the first of a prompt. A token's own logprob is always among the
    alternatives; num_top: of the others.
    """
    logprobs = TextLogprobs(
        tokens=[], token_logprobs=[], top_logprobs=[], text_offset=list(offsets)
    )
    for token, scores in scored:
        shown = _shown(bytes_of(token))
        logprobs.tokens.append(shown)
        own = top = None
        if scores is not None:
            own = finite(scores.logprob)
            others = {_shown(bytes_of(i)): finite(value) for i, value in scores.top[:num_top]}
            top = {shown: own} | others
        logprobs.token_logprobs.append(own)
        logprobs.top_logprobs.append(top)
    return logprobs


def starts_in(text: str, tokens: Sequence[int], bytes_of: BytesOf) -> Iterator[int]:
    """Where the tokens of a prompt begin in its text; one that was added has no width there."""
    raw, at, num_chars = text.encode("utf-8", "replace"), 0, 0
    for token in tokens:
        own = bytes_of(token)
        own = own if raw.startswith(own, at) else own.lstrip(b" ")
        inside = raw[at : at + 1] > b"\x7f" and raw[at] < 0xC0  # of a character that has begun
        yield num_chars - inside
        if raw.startswith(own, at):
            at += len(own)
            num_chars += sum(byte & 0xC0 != 0x80 for byte in own)


def mean(scored: Scored) -> float:
    """The mean logprob of an answer, by which best_of chooses; no token is the worst answer."""
    values = [finite(scores.logprob) for _, scores in scored]
    return sum(values) / len(values) if values else LOWEST
