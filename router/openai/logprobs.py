"""Logprobs of tokens in the two forms of OpenAI's API."""

from collections.abc import Callable
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


def echoed(first: int, scored: Scored, bytes_of: BytesOf, num_top: int) -> TextLogprobs:
    """As `text_logprobs`, of a prompt: its first token, then others, with `num_top` alternatives"""
    shown = _shown(bytes_of(first))
    rest = text_logprobs(scored, bytes_of, len(shown), num_top)
    return TextLogprobs(
        tokens=[shown, *rest.tokens],
        token_logprobs=[None, *rest.token_logprobs],
        top_logprobs=[None, *rest.top_logprobs],
        text_offset=[0, *rest.text_offset],
    )


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
    scored: Scored, bytes_of: BytesOf, offset: int, num_top: int | None = None
) -> TextLogprobs:
    """choices[].logprobs of a completion; the first token begins at `offset`.

    A token's own logprob is always among the alternatives; num_top: of these; None: all.
    """
    tokens = [_shown(bytes_of(token)) for token, _ in scored]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return TextLogprobs(
        tokens=tokens,
        token_logprobs=[finite(scores.logprob) for _, scores in scored],
        top_logprobs=[
            {
                _shown(bytes_of(i)): finite(value)
                for i, value in ((token, scores.logprob), *scores.top[:num_top])
            }
            for token, scores in scored
        ],
        text_offset=offsets,
    )


def mean(scored: Scored) -> float:
    """The mean logprob of an answer, by which best_of chooses; no token is the worst answer."""
    values = [finite(scores.logprob) for _, scores in scored]
    return sum(values) / len(values) if values else LOWEST
