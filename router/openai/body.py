"""The bytes of an answer: its whole body, or the events of its stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET
from msgspec.json import encode as to_json

from router.dispatch.mailbox import Delta
from router.dispatch.queue import Req, counted
from router.observe.metrics import by_stage
from router.openai.prepared import Prepared, Said
from router.openai.reply import Choice, Completion, StageTimes, TracedStep, Usage

TEXT = secrets.token_hex(16)  # stands for the text in a frame
QUOTED_TEXT = to_json(TEXT)


class Body:
    """What one answer says, in the form of its endpoint.

    Args:
        prepared: the request.
        unique_id: of the request.
        reqs: gets its choices as they are submitted.
    """

    def __init__(self, prepared: Prepared, unique_id: str, reqs: Sequence[Req]) -> None:
        self._prepared = prepared
        self._reqs = reqs
        self._id = f"{prepared.writer.prefix}-{unique_id}"
        self._created = int(time.time())
        self._opened = set[int]()  # choices that have their first event
        self._frames: dict[tuple[int, str], tuple[bytes, bytes]] = {}

    def whole(self, answers: Sequence[Delta]) -> bytes:
        """An answer that is not streamed; `answers` are its choices."""
        writer = self._prepared.writer
        choices = [writer.whole(i, answer) for i, answer in enumerate(answers)]
        for choice, answer in zip(choices, answers, strict=True):
            self._account(choice, answer)
        return to_json(self._completion(writer.whole_object, choices, self._usage()))

    def events(self, deltas: list[Delta]) -> bytes:
        """The events that tell of `deltas`; nothing if they hold nothing certain yet."""
        writer, events = self._prepared.writer, list[bytes]()
        for delta in merged(deltas) if len(deltas) > 1 else deltas:
            if delta.index not in self._opened:
                self._opened.add(delta.index)
                opening = writer.opening(delta.index)
                if opening is not None:
                    events.append(self._said(delta, opening))
            chunk = writer.chunk(delta)
            if isinstance(chunk, Said):
                events.append(self._said(delta, chunk))
            elif chunk is not None:
                events.append(self._chunk(chunk, delta))
        return b"".join(events)

    def usage(self) -> bytes:
        """The last event, if it was asked for."""
        return self._event([], self._usage()) if self._prepared.include_usage else b""

    def _said(self, delta: Delta, said: Said) -> bytes:
        if said.text and not said.reason and not self._prepared.continuous_usage:
            before, after = self._frame(delta.index, said.field)
            return b"%b%b%b" % (before, to_json(said.text), after)
        choice = self._prepared.writer.saying(delta.index, said)
        return self._chunk(choice, delta if said.reason else None)

    def _frame(self, index: int, field: str) -> tuple[bytes, bytes]:
        """What stands around the text in events of which only that differs: most of a stream."""
        frame = self._frames.get((index, field))
        if frame is None:
            event = self._event([self._prepared.writer.saying(index, Said(field, TEXT))])
            before, _, after = event.partition(QUOTED_TEXT)
            frame = self._frames[index, field] = before, after
        return frame

    def _chunk(self, choice: Choice, delta: Delta | None) -> bytes:
        if delta is not None:
            self._account(choice, delta)
        return self._event([choice], self._usage() if self._prepared.continuous_usage else None)

    def _event(self, choices: Sequence[Choice], usage: Usage | None = None) -> bytes:
        completion = self._completion(self._prepared.writer.chunk_object, choices, usage)
        return b"data: %b\n\n" % to_json(completion)

    def _completion(
        self, kind: str, choices: Sequence[Choice], usage: Usage | None
    ) -> Completion[Choice]:
        return Completion(
            id=self._id,
            object=kind,
            created=self._created,
            model=self._prepared.model,
            choices=choices,
            usage=usage if usage is not None or self._prepared.include_usage else UNSET,
        )

    def _account(self, choice: Choice, delta: Delta) -> None:
        """Add the accept trace and the time of each stage, if asked for and known."""
        if delta.windows is not None:
            steps = map(msgspec.structs.asdict, delta.windows)
            choice.kvlane_trace = [TracedStep(**step) for step in steps]
        if not self._prepared.return_stages or delta.spent is None:
            return
        spent = delta.spent
        choice.stages = StageTimes(
            **{f"{stage}_s": seconds for stage, seconds in by_stage(spent).items()},
            first_token_s=spent.first_token_s,
            prefilled_by=spent.stages.prefilled_by.partition("/")[0] or None,
            decoded_by=spent.decoded_by.partition("/")[0],
        )

    def _usage(self) -> Usage:
        return Usage.of(*counted(self._reqs))


def num_scored(deltas: Sequence[Delta]) -> int:
    """Tokens with logprobs, and steps of accept traces, in `deltas`."""
    return sum([len(delta.scored) + len(delta.windows or ()) for delta in deltas])


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """One delta for each choice: the sum of its deltas."""
    piled: dict[int, list[Delta]] = {}
    for delta in deltas:
        piled.setdefault(delta.index, []).append(delta)
    return [_sum(found) if len(found) > 1 else found[0] for found in piled.values()]


def _sum(deltas: Sequence[Delta]) -> Delta:
    text = "".join(delta.text for delta in deltas)
    scored = tuple(each for delta in deltas for each in delta.scored)
    last = deltas[-1]
    return Delta(last.index, text, last.finish_reason, None, scored, last.spent, last.windows)
