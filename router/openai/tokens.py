"""POST /tokenize and /detokenize, in vLLM's form."""

from typing import Annotated, Any

from pydantic import Field

from router.errors import invalid
from router.openai.chat import rendered
from router.openai.custom_calls import as_function
from router.openai.fields import is_hosted
from router.openai.reading import Many, RequestModel, read
from router.openai.reply import DetokenizeReply, TokenizeReply
from router.openai.schema import Message, OfTemplate, Salted
from router.openai.served import Served


class TokenizeBody(OfTemplate, Salted):
    """A text, or a chat on its way through the template."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    tools: Many[dict[str, Any]] = Field([])


class DetokenizeBody(RequestModel):
    """Token ids."""

    model: str = ""
    tokens: Many[int]


def tokenize(served: Served, own_salt: str, raw: bytes) -> TokenizeReply:
    """Text or messages to token ids; raises an ApiError, or what `rendered` raises.

    own_salt: `Key.own_salt` of who asks.
    """
    body, text = read(TokenizeBody, raw), served.text
    served.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("either prompt or messages is needed", "prompt")
    salt = body.salt(own_salt)
    if body.messages is not None:
        tools = enumerate(body.tools)
        heard = [as_function(tool, f"tools.{i}") for i, tool in tools if not is_hosted(tool)]
        prompt = rendered(body.messages, body, heard, text)
        adds = bool(body.add_special_tokens)
        tokens = served.encode(prompt, "messages", adds=adds, salt=salt)
    else:
        adds = body.add_special_tokens is not False
        tokens = served.encode(body.prompt or "", "prompt", adds=adds, salt=salt)
    return TokenizeReply(
        count=len(tokens),
        max_model_len=served.max_model_len,
        tokens=tokens,
        token_strs=[text.piece(i) for i in tokens] if body.return_token_strs else None,
    )


def detokenize(served: Served, raw: bytes) -> DetokenizeReply:
    """Token ids to text, special tokens written out; raises an ApiError if a field is wrong."""
    body = read(DetokenizeBody, raw)
    served.check_model(body.model)
    served.check_tokens(body.tokens, "tokens")
    return DetokenizeReply(prompt=served.text.decode(body.tokens, skip_special_tokens=False))
