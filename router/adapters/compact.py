"""POST /v1/responses/compact: a conversation condensed to what the model sums it up to."""

from collections.abc import Sequence
from typing import Any

from msgspec.json import decode as from_json
from msgspec.json import encode as to_json

from router.adapters.items import CONDENSED
from router.adapters.response_body import ResponseAnswer
from router.adapters.store import Item
from router.dispatch.mailbox import Delta

ASK: Item = {
    "type": "message",
    "role": "user",
    "content": "Sum up our conversation so far, so that you could go on from your summary alone: "
    "what I want and have said that still holds, what was done and found, names and values that "
    "are needed again, and what is to be done next. Write the summary only.",
}


class CompactAnswer(ResponseAnswer):
    """What the user said, and an item with the summary; if that is empty, all that there was."""

    def whole(self, answers: Sequence[Delta]) -> bytes:
        made: dict[str, Any] = from_json(super().whole(answers))
        parts = [part for item in made["output"] for part in item.get("content", ())]
        text = "".join(part["text"] for part in parts if part["type"] == "output_text").strip()
        output: list[Item] = list(self._asked.conversation)
        if text:
            name = made["id"].removeprefix("resp_")
            summary = {"id": f"cmp_{name}-0", "type": "compaction"}
            output = [_said(item) for item in output if item.get("role") == "user"]
            output.append({**summary, "encrypted_content": CONDENSED + text})
        about = {name: made[name] for name in ("id", "created_at", "usage")}
        return to_json({**about, "object": "response.compaction", "output": output})


def _said(item: Item) -> Item:
    """A user's message as items of an output are written."""
    content = item.get("content")
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return {"type": "message", "status": "completed", **item, "content": parts}
