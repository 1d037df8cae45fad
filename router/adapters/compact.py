"""POST /v1/responses/compact: a conversation condensed to what the model sums it up to."""

from collections.abc import Iterable, Sequence

from msgspec import Raw
from msgspec.json import encode as to_json
from msgspec.structs import replace

from router.adapters.items import CONDENSED, fit
from router.adapters.response_body import ResponseAnswer
from router.adapters.store import Item, Kept, MissingResponse, joined
from router.dispatch.mailbox import Delta
from router.errors import ApiError

ASK: Item = {
    "type": "message",
    "role": "user",
    "content": "Sum up our conversation so far, so that you could go on from your summary alone: "
    "what I want and have said that still holds, what was done and found, names and values that "
    "are needed again, and what is to be done next. Write the summary only.",
}


class CompactAnswer(ResponseAnswer):
    """What the user said, and an item with the summary; if that is empty, all that there was.

    The first of its parts is what the user said, the others are all that there was.
    """

    _parts: Sequence[bytes] = ()  # where the store has no room for them

    def _begin(self, begun: Kept) -> None:
        asked, self.name = self._asked, f"cmp_{self._unique_id}"
        if not asked.store.put(replace(begun, name=self.name, parts=tuple(asked.parts))):
            self._parts = asked.parts
        asked.parts = ()

    def whole(self, answers: Sequence[Delta]) -> bytes:
        for _ in self._steps(answers[0]):
            pass
        text = "".join(block.text for block in self._blocks.all if block.kind == "text").strip()
        asked = self._asked
        try:
            said, *parts = self._parts or asked.store.get(asked.owner, self.name).parts
        except MissingResponse:
            message = "the conversation had to go meanwhile: router.stored_responses_mib is full"
            raise ApiError("busy", message) from None
        if text:
            summary = {"id": f"{self.name}-0", "type": "compaction"}
            parts = [said, to_json([{**summary, "encrypted_content": CONDENSED + text}])]
        about = {name: self._head[name] for name in ("id", "created_at")}
        about |= {"usage": self._usage(), "object": "response.compaction"}
        return to_json({**about, "output": Raw(joined(parts))})


def said_in(items: Iterable[Item]) -> bytes:
    """The user's messages, as items of an output are written."""
    return to_json([_said(fit(item)) for item in items if item.get("role") == "user"])


def _said(item: Item) -> Item:
    content = item.get("content")
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return {"type": "message", "status": "completed", **item, "content": parts}
