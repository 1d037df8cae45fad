"""The bytes of an answer: its whole body, or the events of its stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec

from router.exchange import Exchange
from router.mailbox import Delta
from router.metrics import by_stage
from router.prepared import Prepared, Said
from router.reply import Choice, Completion, StageTimes, Usage, to_json
from router.waiting import counted

PLACE = secrets.token_hex(16)  # where the text stands in a prepared event


class Body:
    """What one answer says, in the form of its endpoint.

    Args:
        prepared: the request.
        exchange: has its choices once they are submitted.
    """

    def __init__(self, prepared: Prepared, exchange: Exchange) -> None:
        self._prepared = prepared
        self._reqs = exchange.reqs
        self._id = f"{prepared.writer.prefix}-{exchange.unique_id}"
        self._created = int(time.time())
        self._opened = set[int]()  # choices that have their first event
        self._frames: dict[tuple[int, str], tuple[bytes, bytes]] = {}  # see `_said`

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
                    events.append(self._chunk([opening]))
            chunk = writer.chunk(delta)
            if isinstance(chunk, Said):
                events.append(self._said(delta.index, chunk))
            elif chunk is not None:
                self._account(chunk, delta)
                events.append(self._chunk([chunk]))
        return b"".join(events) if len(events) != 1 else events[0]

    def usage(self) -> bytes:
        """The last event, if it was asked for."""
        return self._chunk([], self._usage()) if self._prepared.include_usage else b""

    def _said(self, index: int, said: Said) -> bytes:
        """An event of which only the text differs from others of its choice: the rest is kept."""
        if self._prepared.continuous_usage:
            return self._chunk([self._prepared.writer.saying(index, said)])
        frame = self._frames.get((index, said.field))
        if frame is None:
            place = self._prepared.writer.saying(index, said._replace(text=PLACE))
            before, _, after = self._chunk([place]).partition(b'"%b"' % PLACE.encode())
            frame = self._frames[index, said.field] = before, after
        return b"%b%b%b" % (frame[0], msgspec.json.encode(said.text), frame[1])

    def _chunk(self, choices: Sequence[Choice], usage: Usage | None = None) -> bytes:
        if usage is None and self._prepared.continuous_usage:
            usage = self._usage()
        completion = self._completion(self._prepared.writer.chunk_object, choices, usage)
        return b"data: %s\n\n" % to_json(completion)

    def _completion(
        self, kind: str, choices: Sequence[Choice], usage: Usage | None
    ) -> Completion[Choice]:
        completion = Completion[Choice](
            id=self._id,
            object=kind,
            created=self._created,
            model=self._prepared.model,
            choices=choices,
        )
        if usage is not None or self._prepared.include_usage:
            completion.usage = usage
        return completion

    def _account(self, choice: Choice, delta: Delta) -> None:
        """Add the time of each stage, if that was asked for and is known."""
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
    """Tokens with logprobs in `deltas`."""
    return sum([len(delta.scored) for delta in deltas])


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
    return Delta(last.index, text, last.finish_reason, None, scored, last.spent)
