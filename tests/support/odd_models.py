"""Copies of the bundled model whose template or tokenizer fails."""

import json
import shutil
from pathlib import Path
from typing import Any

from tests.support.prompts import TINY

# `chat_template_kwargs` say `how`.
RAISING = (
    "{% macro turn(m) %}{% for c in m.content %}{{ c }}{% endfor %}{% endmacro %}"
    "{% if how == 'raise' %}{{ raise_exception('no such thing') }}{% endif %}"
    "{% if how == 'type' %}{{ 1 + messages }}{% endif %}"
    "{% if how == 'deep' %}{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}{% endif %}"
    "{% if how == 'loop' %}{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}"
    "{% endfor %}{% endif %}"
    "{% if how == 'big' %}{{ 'a'.ljust(99999999999999) }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ turn(m) }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def raising(path: Path) -> Path:
    """Its template raises, or runs on, as the request says."""
    return _copy(path, "tokenizer_config", {"chat_template": RAISING})


def unknown_decoder(path: Path) -> Path:
    """Its tokenizer works, but llguidance cannot use it."""
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": False}
    return _copy(path, "tokenizer", {"decoder": decoder})


def _copy(path: Path, stem: str, changes: dict[str, Any]) -> Path:
    if not (path / "config.json").exists():  # else it has been copied and changed before
        shutil.copytree(TINY, path, dirs_exist_ok=True)
    file = path / f"{stem}.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(fields | changes), encoding="utf-8")
    return path
