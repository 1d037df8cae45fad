"""Items of OpenAI's responses as messages of a chat."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from router.adapters.messages import text_of, word
from router.errors import invalid, unsupported
from router.openai.reading import mapping

TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
CONDENSED = "kvlane-compaction:"  # what such a text begins with; it is not encrypted
MAX_NAME = 128  # characters, of a function
# A call's item -> its type in a chat, and where its text is in both.
CALLS = {"function_call": ("function", "arguments"), "custom_tool_call": ("custom", "input")}
# Fields of items that are kept: strings, and contents.
WORDS = (
    "type", "id", "role", "status", "call_id", "name", "namespace", "arguments", "input",
    "encrypted_content",
)  # fmt: skip
CONTENTS = ("content", "summary", "output")
PART_WORDS = ("type", "text", "refusal")


def messages_of(items: Sequence[Mapping[str, Any]], param: str) -> list[dict[str, Any]]:
    """The messages of a conversation; what the assistant said, thought and called is one of them.

    Raises an ApiError, 400, that names the item in `param`.
    """
    messages = list[dict[str, Any]]()
    for i, item in enumerate(items):
        where, kind = f"{param}.{i}", item.get("type") or "message"
        if kind == "message":
            role, content = word(item, "role", where), texts(item.get("content"), where)
            if role == "assistant":
                _turn(messages, ("content", "tool_calls"))["content"] = content
            else:
                messages.append({"role": role, "content": content})
        elif kind == "reasoning":
            parts: Any = item.get("content") or item.get("summary") or []
            _turn(messages, ("reasoning", "content", "tool_calls"))["reasoning"] = texts(
                parts, where
            )
        elif isinstance(kind, str) and kind in CALLS:
            of, text = CALLS[kind]
            called = {name: word(item, name, where) for name in ("name", text)}
            if isinstance(space := item.get("namespace"), str):
                called["name"] = flat(space, called["name"])
            call = {"id": word(item, "call_id", where), "type": of, of: called}
            _turn(messages, ()).setdefault("tool_calls", []).append(call)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            call_id, output = word(item, "call_id", where), texts(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif kind == "compaction":
            _condense(messages, word(item, "encrypted_content", where), where)
        else:
            raise unsupported(f"{where}: items of type {kind!r} are not supported", where)
    return messages


def fit(item: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a client's item: what `messages_of` reads, and no field that it does not."""
    kept = _words(item, WORDS)
    if kept.get("type") == "reasoning":  # nothing here is encrypted
        kept.pop("encrypted_content", None)
    for name in CONTENTS:
        content = item.get(name)
        if isinstance(content, list):
            content = [_fit_part(mapping(part)) for part in cast("list[Any]", content)]
        if isinstance(content, str | list):
            kept[name] = content
    return kept


def _fit_part(part: Mapping[str, Any]) -> dict[str, Any]:
    is_output = part.get("type") == "output_text"
    return _words(part, PART_WORDS) | ({"annotations": []} if is_output else {})


def _words(fields: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: fields[name] for name in names if isinstance(fields.get(name), str)}


def flat(namespace: str, name: str) -> str:
    """What the model calls a function of a namespace."""
    return f"{namespace.removesuffix('__')}__{name}"[-MAX_NAME:]


def _condense(messages: list[dict[str, Any]], content: str, where: str) -> None:
    """Add what a conversation was condensed to; the user's texts before it become one."""
    if not content.startswith(CONDENSED):
        name = f"{where}.encrypted_content"
        raise unsupported(f"{name}: it was not made by /v1/responses/compact here", name)
    while len(messages) > 1 and messages[-1]["role"] == messages[-2]["role"] == "user":
        last = messages.pop()["content"]
        messages[-1]["content"] += f"\n\n{last}"
    messages.append({"role": "assistant", "content": content.removeprefix(CONDENSED)})


def _turn(messages: list[dict[str, Any]], but: Sequence[str]) -> dict[str, Any]:
    """The assistant's last message, or a new one if it has one of these fields already."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in but):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def texts(content: Any, param: str) -> str:
    """The text of a content, which is one or has parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{param}: must be a string or a list of parts", param)
    parts = [mapping(part) for part in cast("list[Any]", content)]
    shown = [
        {"text": part.get("refusal"), **part} if part.get("type") == "refusal" else part
        for part in parts
    ]
    return "\n".join(text_of(part, f"{param}.{i}", TEXTS) for i, part in enumerate(shown))
