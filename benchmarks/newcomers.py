"""What a newcomer asks `tiny`, in wordings never trained: `python -m benchmarks.newcomers`.

Decodes newcomers.toml greedily, in float32, and judges the number of the last line, the JSON, or
the call. Prints how many are right, and each that is wrong with what was said.
"""

import argparse
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.accuracy import DEFAULT_MODEL, decode_chats
from benchmarks.train.problems import parse_value

_CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)


def asked(kind: str) -> list[dict[str, Any]]:
    """What is asked, of "sums", "json" or "tools"."""
    return tomllib.loads(Path(__file__).with_name("newcomers.toml").read_text("utf-8"))[kind]


def chat(item: dict[str, Any]) -> dict[str, Any]:
    """What the chat template takes."""
    made: dict[str, Any] = {"conversation": [{"role": "user", "content": item["ask"]}]}
    if tool := item.get("tool"):
        properties = {key: {"type": kind} for key, kind in tool["parameters"].items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        made["tools"] = [{"type": "function", "function": {**tool, "parameters": schema}}]
    return made


def said(kind: str, text: str) -> Any:
    """What a reply says: a number, an object, or a call's arguments; or None."""
    if kind == "sums":
        return parse_value(text)
    if kind == "tools":
        found = _CALL.fullmatch(text)
        text = found[1] if found else ""
    try:
        read = json.loads(text)
    except ValueError:
        return None
    return read if kind == "json" else read.get("arguments")


def main() -> None:
    """Prints a line for each kind, and what was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.newcomers", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="folder of the weights")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    for kind in ("sums", "json", "tools"):
        items = asked(kind)
        replies = decode_chats(args.model, [chat(item) for item in items], args.device)
        wrong = [
            (item, reply.text)
            for item, reply in zip(items, replies, strict=True)
            if said(kind, reply.text) != item["says"]
        ]
        print(f"{kind}: {len(items) - len(wrong)} of {len(items)} right")
        for item, text in wrong:
            print(f"  {item['ask']}\n    {text!r}, not {item['says']}")


if __name__ == "__main__":
    main()
