"""What the load tools of benchmarks/load/others.sh send: answered whole, with usage at the end."""

from typing import Any

import httpx
import pytest

from router.text.tokenizer import Text
from tests.fault.router_doubles import HELLO, DecodeDouble, Served, events, speak
from tests.router.test_router_fields import CHAT, HEADER, TEXT

USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
EACH_PIECE: Any = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PARTS: Any = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
LENGTH = {"max_completion_tokens": 3, "ignore_eos": True}
SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "guidellm": (CHAT, {"messages": PARTS} | USAGE | EACH_PIECE | LENGTH),
    "guidellm, completions": (TEXT, {"prompt": "a", "max_tokens": 3, "ignore_eos": True,
                                      "stop": None} | USAGE | EACH_PIECE),
    "aiperf": (CHAT, {"messages": HELLO, "min_tokens": 3} | USAGE | LENGTH),
    "vllm": (TEXT, {"prompt": "a", "max_tokens": 3, "ignore_eos": True, "repetition_penalty": 1.0,
                    "logprobs": None} | USAGE),
    "vllm, timed traces": (TEXT, {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True} | USAGE),
    "vllm, chats": (CHAT, {"messages": PARTS, "top_k": 5, "min_p": 0.1} | USAGE | LENGTH),
    "inference-perf": (TEXT, {"prompt": "a", "max_tokens": 3, "ignore_eos": True} | USAGE),
}  # fmt: skip


@pytest.mark.parametrize("tool", SENT)
def test_load_tools_are_told_all_that_they_count(
    served: Served, double: DecodeDouble, text: Text, tool: str
) -> None:
    path, body = SENT[tool]
    double.script = speak(text.encode("abc", add_special_tokens=False), kept=True)
    response = served.post(path, model="small", **body)
    assert (response.status_code, response.headers.get(HEADER)) == (200, None), response.text
    assert double.take()[1].sampling.ignore_eos
    *pieces, last = events(response)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    assert all(piece["choices"] for piece in pieces), "vLLM's reads usage where no choice is"
    said = [each["choices"][0] for each in pieces]
    contents = [each.get("text", each.get("delta", {}).get("content")) for each in said]
    assert "".join(filter(None, contents)) == "abc"


def test_root_is_where_the_tokenizer_lies(served: Served, text: Text) -> None:
    """`vllm bench serve` loads it from there, and tokenizes by that name, if it is given none."""
    (card,) = httpx.get(f"{served.url}/v1/models").json()["data"]
    assert card["root"] == str(text.directory)
    for path in ("tokenize", "detokenize"):
        body = {"model": card["root"], "prompt": "a", "tokens": [5]}
        assert httpx.post(f"{served.url}/{path}", json=body).status_code == 200
