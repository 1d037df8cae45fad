"""POST /v1/chat/completions: messages to a prompt, answers to chat choices."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from router.schema import AssistantMessage, ChatBody, ChatChoice, ChunkChoice, Delta
from router.text import Text, joined
from worker.errors import UserError


class ChatShape:
    """Chat completions and their chunks."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> BaseModel | None:
        """The role comes first, in a chunk of its own."""
        delta = Delta(role="assistant", content="", refusal=None)
        return ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)

    def chunk(self, index: int, text: str, finish_reason: str | None) -> BaseModel:
        """See `router.sse.Shape`."""
        delta = Delta(content=text) if text else Delta()
        return ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=finish_reason)

    def whole(self, index: int, text: str, finish_reason: str) -> BaseModel:
        """See `router.sse.Shape`."""
        message = AssistantMessage(role="assistant", content=text, refusal=None)
        return ChatChoice(index=index, message=message, logprobs=None, finish_reason=finish_reason)


def prompts(body: ChatBody, text: Text) -> list[tuple[int, ...]]:
    """The one prompt of a chat. Templates write special tokens out, so none are added.

    Raises:
        UserError: a content part is not text, or the template refuses the messages.
    """
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(body.messages):
        content = message.content
        try:
            plain = content if isinstance(content, str) else joined(content)
        except UserError as error:
            raise UserError(str(error), f"messages.{i}.content") from None
        messages.append({"role": message.role, "content": plain, **(message.model_extra or {})})
    prompt = text.render(
        messages,
        add_generation_prompt=body.add_generation_prompt,
        extra=body.chat_template_kwargs,
    )
    return [text.encode(prompt, add_special_tokens=bool(body.add_special_tokens))]
