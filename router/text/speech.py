"""How a model writes calls and reasoning, found out once at the start, and how that is known."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from router.config import CallFormat, ReasoningFormat, RouterConfig
from router.text.forms.form import MARK, Form, Json, Pairs, Tags, segments
from router.text.forms.known import FORMS
from router.text.forms.recognise import By, recognised
from router.text.forms.schema import listed
from router.text.reasoning import MARKS, Marks
from router.text.tokenizer import Text

log = logging.getLogger("kvlane.router")
# What a tokenizer's `response_template` calls parsers of calls (transformers 5.24), and reasoning.
PARSERS: Mapping[str, type] = {
    "json": Json, "xml-inline": Tags, "kv-lines": Tags, "python-call-list": Pairs,
}  # fmt: skip
THOUGHTS = ("thinking", "reasoning_content", "reasoning")
TEMPLATE = "response_template"


@dataclass(frozen=True, slots=True)
class Speech:
    """The forms of a model's calls and reasoning; None: these are not told apart."""

    form: Form | None = None
    form_by: By = "none"
    marks: Marks | None = None
    marks_name: str = "none"
    marks_by: By = "none"

    def shown(self) -> dict[str, dict[str, str]]:
        """What GET /config says of it."""
        form = "none" if self.form is None else self.form.name
        return {
            "calls": {"form": form, "by": self.form_by},
            "reasoning": {"form": self.marks_name, "by": self.marks_by},
        }


def speech_of(text: Text, config: RouterConfig) -> Speech:
    """By the configuration, else the tokenizer's files, else the chat template.

    What is uncertain is told in the log.
    """
    form, form_by = _form_of(config.tool_parser, text)
    speech = Speech(form, form_by, *_marks_of(config.reasoning_parser, text))
    if text.template_source and form_by in ("guess", "none") and form is not None:
        known = "a guess, as the chat template writes no calls" if form_by == "guess" else "unknown"
        log.warning("the form of tool calls is %s: %s is taken; router.tool_parser sets it",
                    known, form.name)  # fmt: skip
    return speech


def _form_of(asked: CallFormat | str, text: Text) -> tuple[Form | None, By]:
    if asked == "none":
        return None, "setting"
    found = recognised(text.probe, text.template_source)
    if asked != "auto":  # as the template writes it, if it does
        return (found.form if found.form.name == asked else FORMS[asked]), "setting"
    told = _field(text.response_template, "tool_calls")
    if told is None:
        return found.form, found.by
    opens, style = segments(_literal(told, "open")), PARSERS.get(str(told.get("content")))
    for form in (found.form, *FORMS.values()):
        if opens and form.lead[:1] == opens[:1] and isinstance(form.style, style or object):
            return form, TEMPLATE
    log.warning("%s: its tool_calls are of no form that is known", TEMPLATE)
    return found.form, found.by


def _marks_of(asked: ReasoningFormat, text: Text) -> tuple[Marks | None, str, By]:
    if asked != "auto":
        return MARKS.get(asked), asked, "setting"
    for name in THOUGHTS:
        told = _field(text.response_template, name)
        if told is not None and _literal(told, "open") and _literal(told, "close"):
            return (*_named(Marks(_literal(told, "open"), _literal(told, "close"))), TEMPLATE)
    before, between = text.probe.reasoning or ("", "")
    opens, closes = MARK.findall(before)[-1:], MARK.findall(between)[:1]
    if opens and closes == [f"{opens[0][0]}/{opens[0][1:]}"]:
        return (*_named(Marks(opens[0], closes[0]), between), "probe")
    for name, marks in MARKS.items():
        if all(mark in text.template_source for mark in (marks.opens, marks.answer_opens)):
            return marks, name, "probe" if [*marks[:2]] == opens + closes else "guess"
    return None, "none", "none"


def _named(marks: Marks, behind: str = "") -> tuple[Marks, str]:
    """Marks as they are known, where they are, and their name; behind: what follows them."""
    for name, known in MARKS.items():
        if known[:2] == marks[:2] and known.answer_opens in behind:
            return known, name
    return marks, "own"


def _field(template: Any, name: str) -> Mapping[str, Any] | None:
    for key in ("fields", name):
        template = cast("dict[str, Any]", template).get(key) if isinstance(template, dict) else None
    return cast("dict[str, Any]", template) if isinstance(template, dict) else None


def _literal(field: Mapping[str, Any], key: str) -> str:
    """What opens or closes a field: a text, the first of several, or how a pattern begins."""
    value: Any = field.get(key)
    value = next(iter(listed(value)), value)
    if isinstance(value, str):
        return value.strip()
    pattern = field.get(f"{key}_pattern")
    begins = pattern.partition("(")[0] if isinstance(pattern, str) else ""
    return re.sub(r"\\(.)", lambda found: "" if found[1] in "sS" else found[1], begins).strip(
        "*+? "
    )
