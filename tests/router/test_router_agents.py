"""What coding agents send, in our own words (agents.json), and when a turn of one counts."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from llguidance import LLTokenizer

from router.text.tokenizer import Text
from tests.clients.coding import Agent, calls, lacks
from tests.clients.relay import Exchange
from tests.fault.router_doubles import QWEN, Served
from tests.support.call_checks import accepts
from tests.support.patience import HANG_S

MODEL = (QWEN, ("<tool_call>", "</tool_call>"), 4096)
ROUTER = {"strict_tools": True}
CASES = json.loads(Path(__file__).with_name("agents.json").read_text())
CALL = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
NONE = "called nothing"
ASKS = """import httpx
tool = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
body = {"model": "MODEL", "messages": [{"role": "user", "content": "hello"}], "tools": [tool]}
httpx.post("$URL/v1/chat/completions", json=body, timeout=600).raise_for_status()
"""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["who"])
def test_no_request_of_a_coding_agent_is_refused(case: Any, served: Served, text: Text) -> None:
    served.double.says(text, "so")
    url, body = f"{served.url}/v1/{case['path']}", {"model": "small", **case["body"]}
    response = httpx.post(url, json=body, headers=case["headers"], timeout=HANG_S)
    assert response.status_code == 200, response.text
    assert response.headers.get("x-kvlane-unknown-fields", "") == case["unheeded"]
    grammar, file = served.double.take()[1].sampling.grammar, text.directory / "tokenizer.json"
    assert bool(grammar) == ("tools" in body), "calls are kept to schemas that are not strict"
    if grammar:
        tokenizer = LLTokenizer(file.read_text(), n_vocab=text.vocab_size)
        assert accepts(tokenizer, grammar, "so") == (body.get("tool_choice") != "required")
        assert not accepts(tokenizer, grammar, CALL), "of a tool that there is not"


@pytest.mark.parametrize(("model", "says", "lacks"), [
    ("small", CALL, ""), ("small", CALL[1:], NONE), ("large", "", f".* 404 .*{NONE}; exit code 1"),
])  # fmt: skip
def test_a_turn_counts_if_its_answer_has_a_call(
    model: str, says: str, lacks: str, served: Served, text: Text, tmp_path: Path
) -> None:
    served.double.says(text, says)
    python, port = Path(sys.executable), int(served.url.rpartition(":")[2])
    agent = Agent(
        "", "chat", python.name, "a.py", files={"work/a.py": ASKS.replace("MODEL", model)}
    )
    assert re.fullmatch(lacks, agent.take_turn(python.parent, port, tmp_path), re.DOTALL)


@pytest.mark.parametrize("answer", [
    '{"output": [{"type": "function_call", "name": "run", "arguments": "{}"}]}',
    'event: x\ndata: {"content_block": {"type": "tool_use", "id": "1", "name": "run"}}\n\n',
    'data: {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "run"}}]}}]}\n'
    'data: {"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{"}}]}}]}\n'
    "data: [DONE]\n",
])  # fmt: skip
def test_a_call_counts_if_the_agent_has_that_tool(answer: str) -> None:
    """In all APIs, whole and streamed."""
    assert calls(answer) == {"run"}
    of_namespace = {"type": "namespace", "name": "shell", "tools": [{"name": "run"}]}
    for tools, wanted in (([of_namespace], ""), ([{"function": {"name": "ran"}}], "called run")):
        asked = json.dumps({"tools": tools}).encode()
        turn = [Exchange("/v1/responses", asked, 200, answer)]
        assert (lacks(turn), lacks(turn, has_tools=False)) == (wanted, "it has tools by now")
    turn = [Exchange("/v1/responses", b"{}", 200, "{}")]
    assert (lacks(turn), lacks(turn, has_tools=False)) == ("called nothing", "")
    assert lacks([], has_tools=False) == "has not reached the model"
