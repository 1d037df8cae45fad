"""POST /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from router.errors import invalid
from router.openai import chat
from router.openai.prepare import Preparer, check_size
from router.openai.schema import Many, Message, RequestModel, read
from router.openai.served import Served


class TokenizeBody(RequestModel):
    """A text, or a chat on its way through the template."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    tools: Many[dict[str, Any]] = Field([])
    chat_template_kwargs: dict[str, Any] = Field({})


class DetokenizeBody(RequestModel):
    """Token ids."""

    model: str = ""
    tokens: Many[int]


class Tokens:
    """Both endpoints; their methods run on any thread."""

    def __init__(self, served: Served, preparer: Preparer) -> None:
        self._served = served
        self._preparer = preparer

    def tokenize(self, raw: bytes) -> dict[str, Any]:
        """Text or messages to token ids.

        Raises:
            ApiError: a field is wrong.
            UserError: the template refuses the messages.
        """
        body, text = read(TokenizeBody, raw), self._served.text
        self._preparer.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("either prompt or messages is needed", "prompt")
        if body.messages is not None:
            prompt = chat.rendered(
                body.messages,
                text,
                add_generation_prompt=body.add_generation_prompt,
                extra=body.chat_template_kwargs,
                tools=body.tools,
            )
            check_size(prompt, self._served, "messages")
            tokens = text.encode(prompt, add_special_tokens=bool(body.add_special_tokens))
        else:
            check_size(body.prompt or "", self._served, "prompt")
            add_special = body.add_special_tokens is not False
            tokens = text.encode(body.prompt or "", add_special_tokens=add_special)
        return {
            "count": len(tokens),
            "max_model_len": self._served.max_model_len,
            "tokens": tokens,
            "token_strs": [text.piece(i) for i in tokens] if body.return_token_strs else None,
        }

    def detokenize(self, raw: bytes) -> dict[str, Any]:
        """Token ids to text, special tokens written out.

        Raises:
            ApiError: a field is wrong or an id does not exist.
        """
        body, text = read(DetokenizeBody, raw), self._served.text
        self._preparer.check_model(body.model)
        if any(not 0 <= token < text.vocab_size for token in body.tokens):
            raise invalid(f"tokens must be in [0, {text.vocab_size})", "tokens")
        return {"prompt": text.decode(body.tokens, skip_special_tokens=False)}
