"""Tools, calls and results in chats, as the chat template writes them."""

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.train.chats import Turn

RESULT = "<tool_response>"  # what a turn that is a result begins with
_BLANKS = {"integer": "0", "number": "0", "boolean": "false", "array": "[]", "object": "{}"}


def system_text(tools: Sequence[dict[str, Any]]) -> str:
    """The end of the system's turn."""
    listed = "".join(json.dumps(tool) + "\n" for tool in tools)
    form = '{"name": ..., "arguments": {...}}'
    return f"<tools>\n{listed}</tools>\nTo call: <tool_call>\n{form}\n</tool_call>"


def calls_text(tools: Sequence[dict[str, Any]]) -> str:
    """The turn behind a user's: a call of each tool, its required arguments blank."""
    return "".join(_call(tool, {}) + "\n" for tool in tools)


def call_turn(user: str, tool: dict[str, Any], arguments: dict[str, Any]) -> Turn:
    """What calls a tool; what `arguments` lack or have in another type stays blank."""
    return Turn(user, f"<tool_call>\n{_call(tool, arguments)}\n</tool_call>")


def result_turn(result: str, answer: str) -> Turn:
    """What a call gave, and what is said to it."""
    return Turn(f"{RESULT}\n{result}\n</tool_response>", answer)


def _call(tool: dict[str, Any], arguments: dict[str, Any]) -> str:
    schema = tool["parameters"]
    written = list[str]()
    for key in schema.get("required", ()):
        entry = schema["properties"][key]
        blank = (
            json.dumps(entry["enum"][0]) if "enum" in entry else _BLANKS.get(entry["type"], '"..."')
        )
        given = json.dumps(arguments[key]) if key in arguments else blank
        if "enum" in entry or (blank[0] != given[0] and not (blank == "0" and given.isdigit())):
            given = blank
        written.append(f"{json.dumps(key)}: {given}")
    return f'{{"name": {json.dumps(tool["name"])}, "arguments": {{{", ".join(written)}}}}}'
