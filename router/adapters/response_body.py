"""Answers in the form of OpenAI's responses: items, whole or as numbered events."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.json import encode as to_json
from msgspec.structs import replace

from router.adapters.blocks import Blocks, Step
from router.adapters.response_items import Items
from router.adapters.store import NOTHING, OPEN, Kept, ResponseStore
from router.dispatch.mailbox import Delta
from router.dispatch.queue import Req, counted
from router.errors import ApiError
from router.openai.body import AnswerForm, Prepared, event_json, merged
from router.openai.chat import ChatWriter

TOO_LARGE = "the answer is larger than router.stored_response_mib"
UNFIT = re.compile(r"[^A-Za-z0-9_-]")  # for an id, which stands in paths
STREAM_ENDS = {"completed": "response.completed", "incomplete": "response.incomplete"}


@dataclass(slots=True)
class Asked:
    """What a response needs of its request. parts: its conversation, until the store has it."""

    head: Mapping[str, Any]
    owner: str
    tag: str  # of this router
    parts: Sequence[bytes]
    store: ResponseStore
    spaces: Mapping[str, tuple[str, str]]  # `spaces_of`
    think_end: int | None  # the token behind which reasoning has ended, if there is such a one
    keeps: bool = True
    is_background: bool = False  # nobody waits for it


class ResponseAnswer(AnswerForm):
    """The one choice of a chat as a response; `reqs` gets it meanwhile."""

    def __init__(
        self, asked: Asked, prepared: Prepared, unique_id: str, reqs: Sequence[Req]
    ) -> None:
        assert isinstance(prepared.writer, ChatWriter)
        self._asked, self._writer, self._reqs = asked, prepared.writer, reqs
        self._session = prepared.reqs[0].session
        self._blocks = Blocks(prepared.writer)
        # A client's own part of an id may hold anything.
        self._unique_id = f"{UNFIT.sub('_', unique_id)}-{asked.tag}"
        self._items = Items(self._unique_id, asked.spaces)
        self._num_events = 0
        self.name, self.is_background = f"resp_{self._unique_id}", asked.is_background
        self._head: dict[str, Any] = {
            "id": self.name, "created_at": int(time.time()), **asked.head,
        }  # fmt: skip
        self._begin(self._response(OPEN, []))

    def _begin(self, begun: Kept) -> None:
        """Keep it from now on, with its conversation, which is then the store's alone to hold."""
        asked = self._asked
        if asked.keeps:
            asked.store.put(replace(begun, parts=(*asked.parts, NOTHING)))
        asked.parts = ()

    def whole(self, answers: Sequence[Delta]) -> bytes:
        for _ in self._steps(answers[0]):
            pass
        return self._ended().shown

    def events(self, deltas: list[Delta]) -> bytes:
        events = list[bytes]()
        for delta in merged(deltas):
            if not self._num_events:
                begun = Raw(self.begun)
                events += [
                    self._event(f"response.{name}", response=begun)
                    for name in ("created", "in_progress")
                ]
            for step in self._steps(delta):
                for kind, fields in self._items.told(step):
                    events.append(self._event(f"response.{kind}", **fields))
        return b"".join(events)

    def end(self) -> bytes:
        response = self._ended()
        return self._event(STREAM_ENDS[response.status], response=Raw(response.shown))

    def failed(self, error: ApiError) -> bytes:
        response = self._failed(error.message)
        if self._num_events or self.is_background:  # else nobody knows its name
            self._keep(response)
        return self._event("response.failed", response=Raw(response.shown))

    def close(self) -> None:
        self._asked.store.close(self._asked.owner, self.name)

    @property
    def begun(self) -> bytes:
        """The response while it is being made."""
        return self._response(OPEN, []).shown

    def _ended(self) -> Kept:
        is_cut, is_limit = self._blocks.is_cut, self._blocks.reason == "length"
        output = [self._items.item(block, whole=True) for block in self._blocks.all]
        status = "incomplete" if is_cut else "completed"
        more = {
            "usage": self._usage(),
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_limit else None,
        }
        response = self._response(status, output, **more)
        if not self._keep(response):
            if self.is_background:  # who polls learns it
                self._keep(self._failed(TOO_LARGE))
            response = self._response(status, output, **more, store=False)
        return response

    def _usage(self) -> dict[str, Any]:
        thought = any(block.kind == "reasoning" for block in self._blocks.all)
        return _usage(self._reqs, thought=thought, think_end=self._asked.think_end)

    def _failed(self, message: str) -> Kept:
        return self._response("failed", [], error={"code": "server_error", "message": message})

    def _response(self, status: str, output: list[dict[str, Any]], **more: Any) -> Kept:
        """As it is shown; of its conversation it has its output alone."""
        empty = dict.fromkeys(("error", "incomplete_details", "usage", "completed_at"))
        asked, head = self._asked, {**self._head, **empty, "store": self._asked.keeps, **more}
        made = to_json(output) if output else NOTHING
        made_of = asked.owner, self.name, to_json(head), (made,), status, asked.is_background
        return Kept(*made_of, self._session)

    def _keep(self, response: Kept) -> bool:
        """Whether it is kept, if it is to be."""
        return not self._asked.keeps or self._asked.store.end(response)

    def _steps(self, delta: Delta) -> Iterator[Step]:
        found = self._writer.logprobs(delta)
        scored = () if found is None else found.content
        return self._blocks.feed(delta, [msgspec.to_builtins(token) for token in scored])

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        data = event_json({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _usage(reqs: Sequence[Req], *, thought: bool, think_end: int | None) -> dict[str, Any]:
    """thought, think_end: reasoning counts up to and with this token, if there is any."""
    num_prompt, num_output, num_cached = counted(reqs)
    tokens, num_thought = reqs[0].tokens, 0
    if thought and think_end is not None:
        num_thought = tokens.index(think_end) + 1 if think_end in tokens else num_output
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": num_thought},
        "total_tokens": num_prompt + num_output,
    }
