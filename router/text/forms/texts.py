"""What bare texts of calls have to fit: patterns and formats of their schemas, as lark has them."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import regex_to_lark

from router.text.keywords import Tried, own_format, readable

# Of patterns: what is no constraint of characters, so that no grammar is made of it.
AROUND = re.compile(r"\\[1-9bBkKGZzA]|\(\?[=!<P]|[*+?}]\+|(?<!\\)[$^]")
CLASS = re.compile(r"(?<!\\)\[(?:\\.|[^\]\\])*\]")
# Texts of formats where they stand as they are, without quotes: those whose kind is common.
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]"
    r"|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26]))-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE, _LABEL = (
    "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])",
    "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?",
)
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
PATTERNS = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}", "hostname": _HOST,
    "duration": r"P(?:[0-9]{1,9}W|[0-9]{1,9}D(?:T[0-9]{1,9}H)?|T[0-9]{1,9}[HMS])",
    "email": rf"[A-Za-z0-9_+-]{{1,64}}(?:\.[A-Za-z0-9_+-]{{1,64}}){{0,3}}@{_HOST}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}", "ipv6": "(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": rf"[a-z][a-z0-9+.-]{{0,15}}:\/\/{_HOST}(?::[0-9]{{1,5}})?"
    r"(?:\/[A-Za-z0-9._~+,=&;-]{0,64}){0,8}(?:\?[A-Za-z0-9._~+,=&;\/-]{0,64})?",
}  # fmt: skip


def patterns_of(schema: Mapping[str, Any], tried: Tried, tell: Callable[[str], None]) -> list[str]:
    """Patterns that all of a text has to fit, by a schema: those that can be kept to.

    `tell` hears of keywords that are not, and refuses them if the schema is strict.
    """
    pattern, form = schema.get("pattern"), schema.get("format")
    found = [PATTERNS[form]] if isinstance(form, str) and form in PATTERNS else []
    if isinstance(form, str) and not found and not own_format(form, pattern):
        tell("format")
    if not isinstance(pattern, str):
        return found
    pattern = readable(pattern)
    starts, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    core = pattern[starts : len(pattern) - ends]
    one: dict[str, Any] = {"type": "string", "pattern": pattern}
    if AROUND.search(CLASS.sub("x", core)) or tried(one):
        tell("pattern")
        return found
    if found and tried(one | {"format": form}):  # no text fits both
        tell("format")
        found = []
    core = re.sub(r"(?<!\\)/", r"\/", regex_to_lark(core, "dw").replace("\n", r"\n"))
    return [f"{'' if starts else '.*'}(?-s:{core}){'' if ends else '.*'}", *found]
