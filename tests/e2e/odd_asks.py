"""What a request may bring to a model whose template raises and whose tokenizer knows no grammars:
no process of its cluster ends."""

from __future__ import annotations

from typing import Any

import httpx

from tests.e2e.harness import Serve
from tests.e2e.shared import identity
from tests.support.patience import HANG_S

PROBLEM: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def check_odd_asks(serve: Serve) -> None:
    """`serve` serves such a model, of tests/support/odd_models.py."""
    url = f"{serve.url}/v1/chat/completions"

    def ask(**more: Any) -> tuple[int, str]:
        response = httpx.post(url, json=PROBLEM | more, timeout=HANG_S)
        return response.status_code, response.json().get("error", {}).get("param", "")

    assert ask() == (200, "")
    before = serve.wait_idle()
    for how in ("raise", "type", "deep", "loop", "big"):
        assert ask(chat_template_kwargs={"how": how}) == (400, "messages")
    assert ask(guided_regex="[ab]+") == (400, "guided_regex")
    assert ask(tools=TOOLS, tool_choice="required") == (400, "tools")
    assert ask() == (200, "")
    after = serve.wait_idle()
    print({name: row["pid"] for name, row in after.items()})
    assert identity(after) == identity(before)
