"""Answers in Anthropic's form: one message, whole or as events."""

from collections.abc import Sequence
from typing import Any

from msgspec.json import encode as to_json
from pydantic_core import from_json

from router.adapters.blocks import Block, Blocks, Kind, Step
from router.dispatch.mailbox import Delta
from router.dispatch.queue import Req, counted
from router.errors import ApiError
from router.openai.body import AnswerForm, Prepared, event_json, merged
from router.openai.chat import ChatWriter

DELTAS: dict[Kind, tuple[str, str]] = {  # their types, and where their texts are; none is custom
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageAnswer(AnswerForm):
    """The one choice of a chat as a message; `reqs` gets it meanwhile.

    max_tokens: as the client asked; the context may leave less.
    """

    def __init__(
        self, max_tokens: int, prepared: Prepared, unique_id: str, reqs: Sequence[Req]
    ) -> None:
        assert isinstance(prepared.writer, ChatWriter)
        self._reqs = reqs
        self._max_tokens = max_tokens
        self._blocks = Blocks(prepared.writer)
        self._begun = False
        self._head: dict[str, Any] = {
            "id": f"msg_{unique_id}", "type": "message", "role": "assistant",
            "model": prepared.model,
        }  # fmt: skip

    def whole(self, answers: Sequence[Delta]) -> bytes:
        for _ in self._blocks.feed(answers[0]):
            pass
        content = [_shown(block, whole=True) for block in self._blocks.all]
        return to_json({**self._head, "content": content, **self._ended(), "usage": self._usage()})

    def events(self, deltas: list[Delta]) -> bytes:
        events = list[bytes]()
        for delta in merged(deltas):
            if not self._begun:
                self._begun = True
                empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
                message = {**self._head, **empty, "usage": self._usage()}
                events.append(_event("message_start", message=message))
            events += [_told(step) for step in self._blocks.feed(delta)]
        return b"".join(events)

    def end(self) -> bytes:
        return _event("message_delta", delta=self._ended(), usage=self._usage()) + _event(
            "message_stop"
        )

    def failed(self, error: ApiError) -> bytes:
        return _event("error", error=error.anthropic["error"])

    def _ended(self) -> dict[str, Any]:
        reason = REASONS[self._blocks.reason or "stop"]
        stop = self._reqs[0].output.stopped_by if reason == "end_turn" else ""
        if stop:
            reason = "stop_sequence"
        if reason == "max_tokens" and self._reqs[0].sampling.max_tokens < self._max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": stop or None}

    def _usage(self) -> dict[str, int]:
        """What was found in caches counts apart."""
        num_prompt, num_output, num_cached = counted(self._reqs)
        return {
            "input_tokens": num_prompt - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": num_output,
        }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), event_json({"type": kind, **fields}))


def _shown(block: Block, *, whole: bool) -> dict[str, Any]:
    """A block; one that begins is empty. Of arguments that were cut it has what is whole."""
    text = block.text if whole else ""
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": _object(text)}
    kind = DELTAS[block.kind][1]
    return {"type": kind, kind: text} | ({"signature": ""} if kind == "thinking" else {})


def _told(step: Step) -> bytes:
    move, block, text = step
    if move == "open":
        shown = _shown(block, whole=False)
        return _event("content_block_start", index=block.index, content_block=shown)
    if move == "close":
        return _event("content_block_stop", index=block.index)
    kind, name = DELTAS[block.kind]
    return _event("content_block_delta", index=block.index, delta={"type": kind, name: text})


def _object(text: str) -> Any:
    """As Anthropic's client reads what comes of a stream."""
    try:
        return from_json(text, allow_partial=True)
    except ValueError:
        return {}
