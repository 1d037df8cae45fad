"""Custom tools take a text instead of arguments; the model calls them as functions of one string.

So `{"input": "…"}` is what it writes, and what stands in the quotes is the tool's input.
"""

import json
import re
from typing import Any

from router.errors import invalid, unsupported
from router.openai.reading import mapping

FORM = '{"input":"'
HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
WHOLE = re.compile(r'[^"\\]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')  # of what a string consists
FIRST_HALF = re.compile(r"\\u[dD][89abAB]")  # of a character in two escapes


def as_function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A custom tool of a chat as the function that the model hears of; others as they are.

    Raises an ApiError, 400, for a grammar that is no regular expression.
    """
    if tool.get("type") != "custom":
        return tool
    custom, text = mapping(tool.get("custom")), {"type": "string"}
    form = mapping(custom.get("format"))
    if form.get("type") == "grammar":
        grammar, param = mapping(form.get("grammar")) or form, f"{where}.custom.format"
        pattern = grammar.get("definition")
        if grammar.get("syntax") != "regex":
            raise unsupported(f"{param}: only regular expressions are supported", param)
        if not isinstance(pattern, str):
            raise invalid(f"{param}: needs a definition", param)
        text["pattern"] = f"^(?:{pattern})$"
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    named = {key: custom[key] for key in ("name", "description") if custom.get(key) is not None}
    function = {**named, "parameters": schema, "strict": "pattern" in text}
    return {"type": "function", "function": function}


class Input:
    """The input of one call, as its arguments arrive; what has another form stays what it is."""

    def __init__(self) -> None:
        self._text = ""
        self._state = "head"

    def feed(self, arguments: str) -> str:
        """What these further arguments add."""
        self._text += arguments
        if self._state == "head":
            if found := HEAD.match(self._text):
                self._text, self._state = self._text[found.end() :], "string"
            elif not FORM.startswith(re.sub(r"\s", "", self._text)):
                self._state = "raw"
            else:
                return ""
        if self._state == "raw":
            added, self._text = self._text, ""
            return added
        end = 0
        while found := WHOLE.match(self._text, end):
            rest = self._text[found.end() :]
            comes = not rest or (rest[0] == "\\" and not WHOLE.match(rest))
            if FIRST_HALF.match(found[0]) and comes:  # its second half
                break
            end = found.end()
        added, self._text = self._text[:end], self._text[end:]
        text: str = json.loads(f'"{added}"', strict=False)
        return text.encode("utf-8", "replace").decode()  # a half alone is no text
