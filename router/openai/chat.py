"""POST /v1/chat/completions: messages to a prompt, answers to chat choices."""

import json
import secrets
from collections.abc import Callable, Container, Sequence
from typing import Any, cast

from msgspec import UNSET

from router.dispatch.mailbox import Delta
from router.errors import TooLong, invalid, unsupported
from router.openai.body import AnswerWriter
from router.openai.custom_calls import Input
from router.openai.logprobs import BytesOf, chat_logprobs
from router.openai.reading import mapping
from router.openai.reply import (
    AssistantMessage,
    ChatChoice,
    ChatLogprobs,
    Choice,
    ChunkChoice,
    CustomCall,
    DeltaMessage,
    FunctionCall,
    ToolCall,
)
from router.openai.schema import Message, OfTemplate
from router.text.parsers import CallPart, Parsed, Parser, Plain, TextPart
from router.text.probe import CONTENTS, Probe, json_text
from router.text.reasoning import Marks
from router.text.template import AsWritten, ChatTemplate, billless, text_of_parts, text_parts
from router.text.tokenizer import Text
from router.text.writing import TooMuch
from worker.api import FinishReason

# Names of a message's reasoning, the first that is there counts: templates get it by the first two.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")


class ChatWriter(AnswerWriter):
    """Chat completions and their chunks.

    `parser` makes the parser of one choice. `bytes_of` is None when no logprobs are wanted.
    `reasons`: the reasoning is part of the answer. `custom`: names of tools that take a text.
    """

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_one_prompt = opens_together = True

    def __init__(
        self,
        parser: Callable[[], Parser],
        bytes_of: BytesOf | None,
        *,
        reasons: bool = True,
        custom: Container[str] = (),
    ) -> None:
        self._custom = custom
        self._inputs: dict[tuple[int, int], Input] = {}  # by choice and call
        self._reasons = reasons
        self._parser = parser
        self._bytes_of = bytes_of
        self._parsers: dict[int, Parser] = {}
        self._called: dict[int, bool] = {}  # choices with a tool call: whether the last is whole
        # Most chunks are this one with another text: one is encoded before the next is made.
        self._text_chunk = ChunkChoice(
            index=0, delta=DeltaMessage(content=""), logprobs=None, finish_reason=None
        )

    def opening(self, delta: Delta) -> Choice | None:
        empty = DeltaMessage(role="assistant", content="", refusal=None)
        return ChunkChoice(index=delta.index, delta=empty, logprobs=None, finish_reason=None)

    def chunks(self, delta: Delta) -> Sequence[Choice]:
        if self._parser is Plain and delta.finish_reason is None and not delta.scored:
            text = self._text_chunk
            text.index, text.delta.content = delta.index, delta.text
            return (text,)
        told = [_told(part) for part in self.parsed(delta).parts]
        reason, logprobs = self.reason(delta), self.logprobs(delta)
        if not told and (reason is not None or delta.scored):
            told.append(DeltaMessage())
        chunks = list[Choice]()
        for i, new in enumerate(told, 1):
            why = reason if i == len(told) else None
            one = ChunkChoice(index=delta.index, delta=new, logprobs=logprobs, finish_reason=why)
            chunks.append(one)
            logprobs = None
        return chunks

    def whole(self, index: int, delta: Delta) -> Choice:
        parsed = self.parsed(delta)
        content = parsed.content if parsed.content or not parsed.calls else None
        message = AssistantMessage(
            content=content,
            reasoning_content=parsed.reasoning or UNSET,
            reasoning=parsed.reasoning or UNSET,
            tool_calls=[_tool_call(part, whole=True) for part in parsed.calls] or UNSET,
        )
        reason = self.reason(delta)
        assert reason is not None
        return ChatChoice(
            index=index, message=message, logprobs=self.logprobs(delta), finish_reason=reason
        )

    def parsed(self, delta: Delta) -> Parsed:
        """What a delta holds; deltas are to be parsed once, in order."""
        parser = self._parsers.get(delta.index)
        if parser is None:
            parser = self._parsers[delta.index] = self._parser()
        parsed = parser.feed(delta.text) if delta.text else Parsed()
        if delta.finish_reason is not None:
            is_limit = delta.finish_reason is FinishReason.LENGTH
            parsed += parser.finish(cut=delta.stopped_by or is_limit)
        parsed.parts = [part for part in parsed.parts if self._is_told(delta.index, part)]
        return parsed

    def _is_told(self, choice: int, part: TextPart | CallPart) -> bool:
        """Whether there is more to tell than that a call has ended; that is noted."""
        if isinstance(part, TextPart):
            return self._reasons or part.kind == "text"
        self._called[choice] = part.is_whole
        at = choice, part.index
        if part.id and part.name in self._custom:
            self._inputs[at] = Input()
        if at in self._inputs:
            part.is_custom, part.arguments = True, self._inputs[at].feed(part.arguments)
        return bool(part.id or part.arguments)

    def reason(self, delta: Delta) -> str | None:
        """Why its choice has ended; None: it has not. Call it after `parsed`.

        A last call that was cut is none to execute, whatever has cut it.
        """
        if delta.finish_reason is FinishReason.STOP and self._called.get(delta.index):
            return "tool_calls"
        return delta.finish_reason

    def logprobs(self, delta: Delta) -> ChatLogprobs | None:
        """Those of a delta's tokens; None if there are none, or none are wanted."""
        if self._bytes_of is None or not delta.scored:
            return None
        return chat_logprobs(delta.scored, self._bytes_of)


def _told(part: TextPart | CallPart) -> DeltaMessage:
    """What a chunk says of a part: of a call id, type and name come once."""
    if isinstance(part, CallPart):
        return DeltaMessage(tool_calls=[_tool_call(part)])
    if part.kind == "text":
        return DeltaMessage(content=part.text)
    return DeltaMessage(reasoning_content=part.text, reasoning=part.text)


def _tool_call(part: CallPart, *, whole: bool = False) -> ToolCall:
    call = ToolCall(index=UNSET if whole else part.index, id=part.id or UNSET)
    name = part.name if part.id else UNSET
    if part.is_custom:
        call.custom = CustomCall(name=name, input=part.arguments)
    else:
        call.function = FunctionCall(name=name, arguments=part.arguments)
    if part.id:
        call.type = "custom" if part.is_custom else "function"
    return call


def rendered(
    messages: Sequence[Message], asked: OfTemplate, tools: Sequence[dict[str, Any]], text: Text
) -> str:
    """The prompt of a chat, special tokens written out.

    Raises a UserError or ApiError if the template refuses the messages or a part is malformed.
    """
    template = text.templates.of(tools=bool(tools))
    plain = [_turn(message, f"messages.{i}", template) for i, message in enumerate(messages)]
    extra, continues = asked.of_template, asked.continue_final_message
    begins, mark = asked.add_generation_prompt and not continues, ""
    if continues:
        mark = f"{secrets.token_hex(8)} "  # its place in the prompt is where the answer goes on
        if isinstance(said := plain[-1]["content"], str):
            plain[-1]["content"] = said + mark
        else:
            said[-1]["text"] += mark
    try:
        prompt = text.render(plain, add_generation_prompt=begins, extra=extra, tools=tools)
    except TooMuch as error:
        least = f"at least {text.model_max_len + 1}"
        asked_for = f"the chat template {error}"
        raise TooLong(text.model_max_len, asked_for, least, "messages") from error
    return _until(mark, prompt) if continues else prompt


def _turn(message: Message, where: str, template: ChatTemplate) -> dict[str, Any]:
    """A message as a template gets it; as in transformers 5.24 no key of it is null.

    Raises as `rendered` does.
    """
    role, probe = message.role, template.probe
    if role == "developer" and "developer" not in template.source:
        role = "system"
    content = _content(message.content, f"{where}.content", role, probe)
    if role in ("system", "developer"):
        content = billless(content)
    one: dict[str, Any] = {"role": role, "content": content, **(message.model_extra or {})}
    one = {name: value for name, value in one.items() if value is not None}
    thought = next((one[name] for name in THOUGHTS if name in one), None)
    if thought is not None:
        one = {"thinking": thought, **one, "reasoning_content": thought}
    if not message.tool_calls:
        return one
    one["tool_calls"] = [
        _earlier_call(call, f"{where}.tool_calls.{j}", as_text=probe.as_text)
        for j, call in enumerate(message.tool_calls)
    ]
    if not message.content or probe.drops_calls:  # a tool's answer needs its call before it
        del one["content"]
        one |= CONTENTS[probe.content]
    elif not probe.thinks_beside:
        one.pop("thinking", None)
    return one


def _content(
    content: str | list[dict[str, Any]], where: str, role: str, probe: Probe
) -> str | list[dict[str, Any]]:
    """A message's content as a text or in parts, as the template takes that of the role."""
    if isinstance(content, str):
        needs = role in probe.needs_parts
        return [{"type": "text", "text": content}] if needs else content
    takes = role in probe.takes_parts
    return text_parts(content, where) if takes else text_of_parts(content, where)


def is_thinking(last: Message, marks: Marks) -> bool:
    """Whether a last message, with which an answer goes on, has begun to reason and not ended.

    marks: what opens and closes the reasoning.
    """
    said = last.content
    said = said if isinstance(said, str) else text_of_parts(said, "messages")
    opened, closed = marks[:2]
    return opened in said and closed not in said.rpartition(opened)[2]


def _until(mark: str, prompt: str) -> str:
    """What stands before `mark`; a template that trims messages trims what it continues, too."""
    before, found, after = prompt.rpartition(mark.strip())
    if not found:
        name = "continue_final_message"
        raise unsupported(f"{name}: the chat template leaves the last message out", name)
    return before if after.startswith(" ") else before.rstrip()


def _earlier_call(call: dict[str, Any], where: str, *, as_text: bool) -> dict[str, Any]:
    """A call with its arguments as an object, which is what most templates expect, or as a text.

    They are what a model wrote, perhaps no object: no reason to end a conversation.
    """
    if call.get("type") == "custom":
        custom = mapping(call.get("custom"))
        arguments = {"input": custom.get("input")}
        call = {"id": call.get("id"), "type": "function"}
        call["function"] = {"name": custom.get("name"), "arguments": arguments}
    fields = mapping(call.get("function"))
    if not isinstance(fields.get("name"), str):
        raise invalid(f"{where}.function.name: must be a string", f"{where}.function.name")
    given: Any = fields.get("arguments")
    if given is None or (isinstance(given, str) and not given.strip()):
        given = {}
    arguments = given
    if as_text:
        arguments = given if isinstance(given, str) else json_text(given)
    elif not isinstance(given, dict):
        arguments = _read(given if isinstance(given, str) else json_text(given))
    return call | {"function": fields | {"arguments": arguments}}


def _read(arguments: str) -> dict[str, Any]:
    """The object that is written there; what is none, such as a call cut off, stays as it is."""
    try:
        read = json.loads(arguments)
        if "\\u" in arguments:
            json_text(read).encode()  # raises for half a surrogate pair
    except (ValueError, RecursionError):
        read = None
    return cast("dict[str, Any]", read) if isinstance(read, dict) else AsWritten(arguments)
