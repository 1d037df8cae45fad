"""POST /v1/completions: prompts as text or token ids, answers to text choices."""

from __future__ import annotations

from pydantic import BaseModel

from router.schema import CompletionBody, TextChoice
from router.text import Text
from worker.errors import UserError


class TextShape:
    """Text completions; chunks have the same form."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> BaseModel | None:
        """Nothing comes before the text."""
        return None

    def chunk(self, index: int, text: str, finish_reason: str | None) -> BaseModel:
        """See `router.sse.Shape`."""
        return TextChoice(index=index, text=text, logprobs=None, finish_reason=finish_reason)

    def whole(self, index: int, text: str, finish_reason: str) -> BaseModel:
        """See `router.sse.Shape`."""
        return TextChoice(index=index, text=text, logprobs=None, finish_reason=finish_reason)


def prompts(body: CompletionBody, text: Text) -> list[tuple[int, ...]]:
    """Every prompt of the request, each of which becomes a choice.

    Raises:
        UserError: a token id does not exist.
    """
    add_special = body.add_special_tokens is not False
    found: list[tuple[int, ...]] = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            found.append(text.encode(prompt, add_special_tokens=add_special))
        elif all(0 <= token < text.vocab_size for token in prompt):
            found.append(tuple(prompt))
        else:
            raise UserError(f"prompt: token ids must be in [0, {text.vocab_size})", "prompt")
    return found
