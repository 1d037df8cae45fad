"""What one client at an address of its own does so that others wait: nothing of it is malformed.

    python -m tests.fault.fuzz_http --requests 64 --crowds

Each row has the size of what was sent, how it was answered, what the client beside it saw, the
longest wait for /live, and how large routers and workers were before and at most.
"""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

from tests.e2e.raw import Connection
from tests.fault.http_attacks import ELSEWHERE, MIB, Row, Sizes, Told, at_once, told
from tests.support.heads import head, post

TINY = Path(__file__).parents[2] / "worker" / "assets" / "tiny"
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def indenting_model(root: Path) -> Path:
    """tiny, whose chat template indents tools, as Llama's does."""
    made = root / "tiny"
    shutil.copytree(TINY, made)
    config = made / "tokenizer_config.json"
    config.write_text(config.read_text().replace("['function'] | tojson", " | tojson(indent=4)"))
    return made


async def _each(port: int, num: int, path: str, body: dict[str, Any]) -> list[Told]:
    """So many clients send this at once."""
    raw = post(path, json.dumps({"model": "tiny"} | body).encode())
    return await at_once(num, lambda each: told(each, raw), port, source=ELSEWHERE)


async def indented(port: int, sizes: Sizes) -> list[Told]:
    """A template makes 600 characters of each of their bytes."""
    inner: Any = [1] * (sizes.num_levels * 2)
    for _ in range(150):
        inner = [inner]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": inner}}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    return await _each(port, sizes.num_large, CHAT, body)


async def endless(port: int, sizes: Sizes) -> list[Told]:
    """Bodies of 30 MiB that never end."""
    begun = head("POST", CHAT, b"content-length: %d" % (30 * MIB))
    parts = [begun, *[bytes(MIB)] * 29]

    async def late(connection: Connection) -> Told:
        try:
            return await asyncio.wait_for(told(connection, *parts), sizes.wait_s)
        except TimeoutError:
            connection.drop(reset=True)
            return 0, 1e3 * sizes.wait_s

    return await at_once(sizes.num_bodies, late, port, source=ELSEWHERE)


async def many_values(port: int, sizes: Sizes) -> list[Told]:
    """Bodies of empty objects."""
    num = sizes.values_mib * MIB // 3
    body = b'{"model": "tiny", "prompt": "a", "x": [' + b",".join([b"{}"] * num) + b"]}"
    raw = post(TEXT, body)
    return await at_once(2, lambda each: told(each, raw), port, source=ELSEWHERE)


async def counted(port: int, sizes: Sizes) -> list[Told]:
    """Texts of 2 MiB whose tokens are to be told."""
    body = {"prompt": "a b " * (MIB // 2)}
    return await _each(port, sizes.num_bodies, "/tokenize", body)


async def long_grammars(port: int, sizes: Sizes) -> list[Told]:
    """128 choices, each sent to a worker with a grammar of 250,000 characters."""
    lark = "start: /[a-z ]{1,9}/\n" + "// a comment that is long\n" * 9_600
    body = {"prompt": "a", "n": 128, "max_tokens": 2, "guided_grammar": lark}
    return await _each(port, sizes.num_grammars, TEXT, body)


async def background(port: int, sizes: Sizes) -> list[Told]:
    """Responses that nobody waits for."""
    body = {"input": "a", "background": True, "max_output_tokens": 40, "ignore_eos": True}
    return await _each(port, sizes.num_background, RESPONSES, body)


async def scored(port: int, sizes: Sizes) -> list[Told]:
    """The logprobs of prompts, for 128 choices."""
    body = {"prompt": list(range(5, 55)), "n": 128, "prompt_logprobs": 20, "max_tokens": 2}
    return await _each(port, sizes.num_large, TEXT, body)


async def keyed(port: int, sizes: Sizes) -> list[Told]:
    """Answers with logprobs, which workers keep for whoever comes back."""
    body = {"prompt": "a", "max_tokens": sizes.keyed_tokens, "ignore_eos": True, "logprobs": 20}
    raw = json.dumps({"model": "tiny"} | body).encode()
    keys = iter(range(sizes.num_keyed))

    async def one(connection: Connection) -> Told:
        key = f"idempotency-key: crowd-{next(keys)}-{id(keys)}".encode()
        return await told(connection, post(TEXT, raw, key))

    return await at_once(sizes.num_keyed, one, port, source=ELSEWHERE)


CROWDS: tuple[Row, ...] = (
    ("a template that writes much", indented, (400,)),
    ("bodies that never end", endless, (429, 408, 0)),
    ("bodies of many values", many_values, (413,)),
    ("tokens of long texts", counted, (200, 400, 429)),
    ("long grammars, n = 128", long_grammars, (200, 400, 429)),
    ("responses in the background", background, (200, 429)),
    ("logprobs of prompts, n = 128", scored, (200, 429)),
    ("keyed answers with logprobs", keyed, (200, 429)),
)
