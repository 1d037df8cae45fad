"""The bytes of an answer: its whole body, or the events of its stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec

from router.dispatch.mailbox import Delta
from router.dispatch.queue import Req, counted
from router.observe.metrics import by_stage
from router.openai.prepared import Prepared, Said
from router.openai.reply import Choice, Completion, StageTimes, TracedStep, Usage, to_json

# Stand in an event's form for what differs: id, created, model, index, text; in this order.
PLACES = secrets.token_hex(16), 7 * 10**17, secrets.token_hex(16), 8 * 10**17, secrets.token_hex(16)
_forms: dict[tuple[str, str, str | None, bool], tuple[bytes, ...]] = {}  # see `Body._form`


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
        self._frames: dict[tuple[int, str, str | None], tuple[bytes, bytes]] = {}  # see `_said`

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
        """An event of which only the text differs from others of its choice: the rest is kept."""
        prepared, index = self._prepared, delta.index
        tells_more = said.reason and (prepared.return_stages or delta.windows is not None)
        if prepared.continuous_usage or tells_more:
            return self._chunk(prepared.writer.saying(index, said), delta)
        frame = self._frames.get((index, said.field, said.reason))
        if frame is None:
            known = (self._id, self._created, prepared.model, index)
            before, *parts, after = self._form(said)
            for value, part in zip(known, parts, strict=True):
                before += msgspec.json.encode(value) + part
            frame = self._frames[index, said.field, said.reason] = before, after
        before, after = frame
        return b"%b%b%b" % (before, msgspec.json.encode(said.text), after) if after else before

    def _form(self, said: Said) -> tuple[bytes, ...]:
        """What stands around PLACES in such an event; the last is empty if there is no text.

        Taken from an event that the models of `router.openai.reply` have written, once.
        """
        prepared = self._prepared
        key = prepared.writer.chunk_object, said.field, said.reason, prepared.include_usage
        form = _forms.get(key)
        if form is None:
            answer_id, created, model, index, text = PLACES
            choice = prepared.writer.saying(index, said._replace(text=text))
            rest = self._event([choice], named=(answer_id, created, model))
            parts: list[bytes] = []
            for place in PLACES:
                part, _, rest = rest.partition(msgspec.json.encode(place))
                parts.append(part)
            form = _forms[key] = (*parts, rest)
        return form

    def _chunk(self, choice: Choice, delta: Delta) -> bytes:
        self._account(choice, delta)
        return self._event([choice], self._usage() if self._prepared.continuous_usage else None)

    def _event(
        self,
        choices: Sequence[Choice],
        usage: Usage | None = None,
        named: tuple[str, int, str] | None = None,
    ) -> bytes:
        kind = self._prepared.writer.chunk_object
        return b"data: %s\n\n" % to_json(self._completion(kind, choices, usage, named))

    def _completion(
        self,
        kind: str,
        choices: Sequence[Choice],
        usage: Usage | None,
        named: tuple[str, int, str] | None = None,
    ) -> Completion[Choice]:
        answer_id, created, model = named or (self._id, self._created, self._prepared.model)
        completion = Completion[Choice](
            id=answer_id, object=kind, created=created, model=model, choices=choices
        )
        if usage is not None or self._prepared.include_usage:
            completion.usage = usage
        return completion

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
