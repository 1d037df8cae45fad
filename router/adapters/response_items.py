"""Items of the output of OpenAI's responses, whole or as what events say of them."""

from collections.abc import Mapping
from typing import Any

from router.adapters.blocks import Block, Kind, Step

KINDS: dict[Kind, tuple[str, str, str]] = {  # what ids begin with; of the text: its field, events
    "reasoning": ("rs", "text", "reasoning_text"),
    "text": ("msg", "text", "output_text"),
    "call": ("fc", "arguments", "function_call_arguments"),
    "custom": ("ctc", "input", "custom_tool_call_input"),
}
CALLS = {"call": "function_call", "custom": "custom_tool_call"}  # types of items


class Items:
    """Those of one answer. spaces: as of `spaces_of`."""

    def __init__(self, unique_id: str, spaces: Mapping[str, tuple[str, str]]) -> None:
        self._unique_id, self._spaces = unique_id, spaces
        self._num_told = 0  # logprobs of the last text

    def item(self, block: Block, *, whole: bool) -> dict[str, Any]:
        """An item; one that begins is empty."""
        begin, of, _ = KINDS[block.kind]
        item: dict[str, Any] = {
            "id": f"{begin}_{self._unique_id}-{block.index}",
            "status": "in_progress" if not whole else "incomplete" if block.is_cut else "completed",
        }
        if block.kind in CALLS:
            call = {"type": CALLS[block.kind], "call_id": block.id, **self._named(block)}
            return item | call | {of: block.text if whole else ""}
        parts = [_part(block, whole=True)] if whole else []
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": parts}
        return item | {"type": "message", "role": "assistant", "content": parts}

    def _named(self, block: Block) -> dict[str, str]:
        space = self._spaces.get(block.name)
        return {"name": block.name} if space is None else {"namespace": space[0], "name": space[1]}

    def told(self, step: Step) -> list[tuple[str, dict[str, Any]]]:
        """The events of a step: the ends of their names, and their fields."""
        move, block, text = step
        _, of, name = KINDS[block.kind]
        is_whole, has_part = move == "close", block.kind not in CALLS
        if move == "open":
            self._num_told = 0
        item = self.item(block, whole=is_whole)
        place: dict[str, Any] = {"output_index": block.index}
        inner = {**place, "item_id": item["id"]} | ({"content_index": 0} if has_part else {})
        if move == "more":
            if block.kind == "text":
                inner["logprobs"] = block.scored[self._num_told :]
                self._num_told = len(block.scored)
            return [(f"{name}.delta", {**inner, "delta": text})]
        verb = "done" if is_whole else "added"
        told = [(f"output_item.{verb}", {**place, "item": item})]
        if has_part:
            part = _part(block, whole=is_whole)
            told.append((f"content_part.{verb}", {**inner, "part": part}))
        if is_whole:
            inner |= {"name": self._named(block)["name"]} if block.kind == "call" else {}
            inner[of] = block.text
            inner |= {"logprobs": block.scored} if block.kind == "text" else {}
            told.append((f"{name}.done", inner))
            told.reverse()  # what was opened last ends first
        return told


def _part(block: Block, *, whole: bool) -> dict[str, Any]:
    """All there is of text or reasoning; one that begins is empty."""
    part: dict[str, Any] = {"type": KINDS[block.kind][2], "text": block.text if whole else ""}
    if block.kind == "text":
        part |= {"annotations": [], "logprobs": block.scored if whole else []}
    return part
