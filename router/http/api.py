"""Generation, models and tokens: what clients ask for."""

from codecs import BOM_UTF8
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from fastapi import Request, Response

from router.adapters.message_body import MessageAnswer
from router.adapters.messages import MessagesBody, chat_of, count_tokens, model_card
from router.dispatch.claims import give_keys
from router.errors import ApiError, called, invalid
from router.http.admission import Admission
from router.http.answer import Answer
from router.http.exchange import Exchange
from router.http.identity import identify
from router.http.request_body import check_values, read_body
from router.openai.body import Prepared
from router.openai.prepare import Preparer
from router.openai.reading import read
from router.openai.reply import ModelList
from router.openai.tokens import detokenize, tokenize
from router.show.front import Front, as_json
from router.text.grammar import Validator
from router.text.writing import Slow, quickly
from worker.errors import contained

ANTHROPIC_SIGN = "anthropic-version"  # a header that its clients send
MAX_KEY_CHARS = 255  # of an idempotency key
# A body has a value for so many bytes of `router.max_body_bytes`, or two a token, or these.
VALUE_BYTES, LEAST_VALUES = 128, 1 << 16
THREAD_BODY_BYTES = 4 << 10  # a larger body is parsed and tokenized off the loop: 2 ms, and more
# Fields that may take long to prepare, and the escape with which JSON may spell their names.
SLOW_WORDS = (
    b"response_format", b"guided_", b"structured_outputs", b"json_schema", b"regex", b"ebnf",
    b"tool", b"output_", b"json_object", b"\\u",
)  # fmt: skip

Result = TypeVar("Result")
Prepare = Callable[[bytes, str], Prepared]  # from a body, and `Key.own_salt`


def is_slow(raw: bytes) -> bool:
    """Whether preparing a body could hold the loop up for other requests."""
    return len(raw) > THREAD_BODY_BYTES or any(map(raw.__contains__, SLOW_WORDS))


class Api:
    """The endpoints, and `generate` for those of other APIs."""

    def __init__(self, front: Front, admission: Admission) -> None:
        self._front, self._served, self._admission = front, front.served, admission
        text = front.served.text
        by_size = front.served.config.max_body_bytes // VALUE_BYTES
        self._max_values = max(by_size, 2 * front.served.model_max_len, LEAST_VALUES)
        self.preparer = Preparer(front.served, Validator(text.directory, text.vocab_size))

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self.generate(request, await self.body(request), self.preparer.chat)

    async def messages(self, request: Request) -> Response:
        """POST /v1/messages."""
        return await self.generate(request, await self.body(request), self._of_message)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens."""
        own_salt = Exchange.of(request.scope).own_salt
        work = partial(count_tokens, self._served, own_salt)
        return await self.told(request, await self.body(request), work)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self.generate(request, await self.body(request), self.preparer.completion)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        card = self._served.card
        if ANTHROPIC_SIGN in request.headers:
            ends = {"first_id": card.id, "last_id": card.id, "has_more": False}
            return as_json({"data": [model_card(card)], **ends})
        return as_json(ModelList([card]))

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        self._served.check_model(request.path_params["name"])
        card = self._served.card
        return as_json(model_card(card) if ANTHROPIC_SIGN in request.headers else card)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        own_salt = Exchange.of(request.scope).own_salt
        work = partial(tokenize, self._served, own_salt)
        return await self.told(request, await self.body(request), work)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        work = partial(detokenize, self._served)
        return await self.told(request, await self.body(request), work)

    async def not_served(self, request: Request) -> Response:
        """Endpoints of OpenAI's API that this server does not have."""
        message = f"{request.url.path} is not served: this server generates text only"
        raise ApiError("unsupported", message).answered(404)

    async def body(self, request: Request) -> bytes:
        """What a client has sent; raises as `read_body`."""
        config, arrival = self._served.config, Exchange.of(request.scope).arrival
        body = await read_body(request, config.max_body_bytes, config.body_timeout_s, arrival)
        return body.removeprefix(BOM_UTF8)

    async def generate(
        self, request: Request, raw: bytes, prepare: Prepare, *, slow: bool = False
    ) -> Answer:
        """Begin what `prepare` makes of a body, which may take long, whatever that is; raises a
        KvlaneError if nothing has begun.
        """
        exchange, headers = Exchange.of(request.scope), request.scope["headers"]
        given = dict[bytes, bytes](headers).get(b"idempotency-key", b"").decode("latin-1")
        if len(given) > MAX_KEY_CHARS:
            raise invalid(f"Idempotency-Key: at most {MAX_KEY_CHARS} characters")

        def work() -> Prepared:
            prepared = prepare(raw, exchange.own_salt)
            identify(prepared, headers, exchange.client, exchange.unique_id)
            if given:
                give_keys(prepared.reqs, exchange.client, given, raw, seeded=prepared.is_seeded)
            return prepared

        prepared = await self._run(exchange, raw, work, slow=slow)
        exchange.unheeded = [called(name, request.url.path) for name in prepared.unheeded]
        self._admission.begin(exchange, prepared)
        closed = partial(self._admission.end, exchange, prepared)
        return Answer(prepared, self._front, exchange, closed)

    def _of_message(self, raw: bytes, own_salt: str) -> Prepared:
        body = read(MessagesBody, raw)
        chat = chat_of(body, self._served.text.template_source)
        prepared = self.preparer.of_chat(chat, own_salt)
        return replace(prepared, form=partial(MessageAnswer, body.max_tokens))

    async def told(
        self, request: Request, raw: bytes, work: Callable[[bytes], object], *, slow: bool = False
    ) -> Response:
        """What `work` says of a body."""
        exchange = Exchange.of(request.scope)
        self._admission.told(exchange)
        return as_json(await self._run(exchange, raw, partial(work, raw), slow=slow))

    async def _run(
        self, exchange: Exchange, raw: bytes, work: Callable[[], Result], *, slow: bool
    ) -> Result:
        """What `work` makes of a body, in a thread if it takes long; raises a KvlaneError."""

        def run() -> Result:
            check_values(raw, self._max_values)
            with contained("the preparation of a request"):
                return work()

        if not (slow or is_slow(raw)):
            with suppress(Slow), quickly():
                return run()
        return await self._front.pool.run(exchange.source, run)
