"""A request that has passed every check, and the bytes of its answer, whole or streamed."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, Raw
from msgspec.json import encode as to_json
from msgspec.structs import replace

from router.dispatch.mailbox import Delta, Scored
from router.dispatch.queue import Req, counted
from router.errors import ApiError
from router.openai.reply import (
    Choice,
    Completion,
    PromptLogprobs,
    PromptTokensDetails,
    TextChoice,
    TracedStep,
    Usage,
)


class AnswerWriter(Protocol):
    """Writes the choices of an endpoint's answers; keeps what earlier chunks of a choice held."""

    prefix: str  # of the answer's id
    whole_object: str
    chunk_object: str
    has_one_prompt: bool  # then its ids stand beside the choices, else in them
    opens_together: bool  # all choices begin, in order, before any text

    def opening(self, delta: Delta) -> Choice | None:
        """What the endpoint sends of a delta's choice before its first text, if anything."""
        ...

    def chunks(self, delta: Delta) -> Sequence[Choice]:
        """What chunks say of a delta, part by part; none when nothing is certain yet."""
        ...

    def whole(self, index: int, delta: Delta) -> Choice:
        """A choice of a whole answer; `delta` is all of it."""
        ...


class AnswerForm(Protocol):
    """Writes one answer as an endpoint's clients know it."""

    def whole(self, answers: Sequence[Delta]) -> bytes:
        """An answer that is not streamed; `answers` are its choices."""
        ...

    def events(self, deltas: list[Delta]) -> bytes:
        """The events that tell of `deltas`; nothing if they hold nothing certain yet."""
        ...

    def end(self) -> bytes:
        """The last events of a stream, when all choices have ended."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that breaks off."""
        ...

    def close(self) -> None:
        """Nothing more is written."""


class Named(NamedTuple):
    """What a body says of the session that it is a turn of; see `http.identity`."""

    session_id: str = ""
    cache_key: str = ""  # prompt_cache_key, or what stands inside metadata.user_id
    ttl_s: float | None = None  # `cache_ttl`
    previous: str = ""  # the session of the response that it goes on with, as `Req.session`
    begins: bool = False  # others may go on with it


UNNAMED = Named()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has passed every check."""

    writer: AnswerWriter
    model: str
    reqs: Sequence[Req]  # num_samples for a prompt, prompt by prompt
    streamed: bool
    num_samples: int = 1
    num_kept: int = 1  # samples of a prompt to return: the best by mean logprob
    include_usage: bool = False
    continuous_usage: bool = False
    return_stages: bool = False
    return_resumes: bool = False
    return_token_ids: bool = False
    # What is written of the scores of a prompt, if they were asked for as such.
    prompt_logprobs: Callable[[Scored], PromptLogprobs] | None = None
    unheeded: Sequence[str] = ()  # fields that have no effect
    priority: int = 0
    is_seeded: bool = False  # the body has a seed
    is_background: bool = False  # nobody waits for it
    named: Named = UNNAMED
    grammar_param: str = ""  # the field that asked for the grammar, if there is one
    # Given this, the answer's own id and its choices, which come meanwhile; None: `Body`.
    form: "Callable[[Prepared, str, Sequence[Req]], AnswerForm] | None" = None


DONE = b"data: [DONE]\n\n"
# What is no end of a line in JSON, and is one to clients that read lines of text.
NEW_LINES = {char.encode(): b"\\u%04x" % ord(char) for char in "\u0085\u2028\u2029"}
RESUMED = b": choice %d goes on at another worker\n\n"


class Body(AnswerForm):
    """OpenAI's chat and text completions; `reqs` gets the choices meanwhile."""

    def __init__(self, prepared: Prepared, unique_id: str, reqs: Sequence[Req]) -> None:
        self._prepared = prepared
        self._reqs = reqs
        self._opened = set[int]()  # choices that have their first event
        self._num_told: dict[int, int] = {}  # by choice: token ids that were written
        self._scored: tuple[Scored, PromptLogprobs] | None = None  # of the last prompt
        self.answer_id = f"{prepared.writer.prefix}-{unique_id}"
        self._completion = Completion[Choice](
            id=self.answer_id,
            object=prepared.writer.chunk_object,
            created=int(time.time()),
            model=prepared.model,
            choices=(),
            usage=None if prepared.include_usage else UNSET,
        )
        if prepared.return_token_ids and prepared.writer.has_one_prompt:
            self._completion.prompt_token_ids = prepared.reqs[0].prompt

    def whole(self, answers: Sequence[Delta]) -> bytes:
        writer, completion = self._prepared.writer, self._completion
        choices = list[Choice]()
        for i, answer in enumerate(answers):
            choice = writer.whole(i, answer)
            self._account(choice, answer)
            self._identify(choice, answer.index)
            self._score(choice, answer)
            # One by one: a collection of garbage would walk through the parts of all.
            choices.append(_as_json(choice) if len(answers) > 1 else choice)
        completion.object, completion.choices = writer.whole_object, choices
        completion.usage = self._usage()
        return to_json(completion)

    def events(self, deltas: list[Delta]) -> bytes:
        writer, events = self._prepared.writer, list[bytes]()
        if self._prepared.return_resumes:
            events += [RESUMED % delta.index for delta in deltas if delta.resumed]
        for delta in merged(deltas) if len(deltas) > 1 else deltas:
            if delta.index not in self._opened:
                events += self._open(delta)
            choices = writer.chunks(delta)
            if choices:
                if delta.finish_reason is not None:
                    self._account(choices[-1], delta)
                self._identify(choices[0], delta.index)
                for choice in choices:
                    events.append(self._event(choice))
        return b"".join(events)

    def _open(self, delta: Delta) -> Iterator[bytes]:
        """OpenAI's own client fails where a choice comes before one of a lower index."""
        together = self._prepared.writer.opens_together
        for index in range(len(self._prepared.reqs)) if together else (delta.index,):
            self._opened.add(index)
            own = delta if index == delta.index else Delta(index)
            opening = self._prepared.writer.opening(own)
            if opening is not None:
                yield self._event(opening)

    def end(self) -> bytes:
        if not self._prepared.include_usage:
            return DONE
        self._completion.usage = self._usage()
        return self._event() + DONE

    def failed(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % event_json(error.body) + DONE

    def _event(self, *choices: Choice) -> bytes:
        completion = self._completion
        completion.choices = choices
        if self._prepared.continuous_usage:
            completion.usage = self._usage()
        event = b"data: %b\n\n" % event_json(completion)
        completion.prompt_token_ids = UNSET
        return event

    def _account(self, choice: Choice, delta: Delta) -> None:
        """Add the accept trace and the times of stages, if asked for and known."""
        if delta.windows is not None:
            steps = list[TracedStep]
            choice.kvlane_trace = msgspec.convert(delta.windows, steps, from_attributes=True)
        if self._prepared.return_stages and delta.spent is not None:
            choice.stages = delta.spent

    def _score(self, choice: Choice, answer: Delta) -> None:
        """Add the logprobs of its prompt, if asked for; choices of one prompt have the same."""
        if self._prepared.prompt_logprobs is not None:
            if self._scored is None or self._scored[0] is not answer.prompt:
                found = self._prepared.prompt_logprobs(answer.prompt)
                self._scored = answer.prompt, _as_json(found)
            target = choice if isinstance(choice, TextChoice) else self._completion
            target.prompt_logprobs = self._scored[1]

    def _identify(self, choice: Choice, index: int) -> None:
        """Add the ids of its tokens since the last time, if asked for.

        They may be a little ahead of its text, of which some can wait for a client, or to be
        parsed.
        """
        if not self._prepared.return_token_ids:
            return
        req, num_told = self._reqs[index], self._num_told.get(index)
        if num_told is None and isinstance(choice, TextChoice):
            choice.prompt_token_ids = req.prompt
        choice.token_ids = req.tokens[num_told or 0 :]
        self._num_told[index] = (num_told or 0) + len(choice.token_ids)

    def _usage(self) -> Usage:
        num_prompt, num_output, num_cached = counted(self._reqs)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        )


def _as_json(part: object) -> Any:
    """The same, written already: what one call writes keeps all other threads waiting."""
    return Raw(to_json(part))


def event_json(body: object) -> bytes:
    """JSON for an event, in which every kind of line is one."""
    data = to_json(body)
    if not data.isascii():
        for raw, escaped in NEW_LINES.items():
            data = data.replace(raw, escaped)
    return data


def num_scored(deltas: Sequence[Delta]) -> int:
    """Logprobs in `deltas`, alternatives among them, and steps of accept traces: 1 µs for one."""
    num = 0
    for delta in deltas:  # most have none
        for part in (delta.scored, delta.prompt):
            num += len(part) * (1 + len(part[0][1].top)) if part else 0
        num += len(delta.windows) if delta.windows else 0
    return num


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """One delta a choice: the sum of its deltas."""
    piled: dict[int, list[Delta]] = {}
    for delta in deltas:
        piled.setdefault(delta.index, []).append(delta)
    return [_sum(deltas_of) if len(deltas_of) > 1 else deltas_of[0] for deltas_of in piled.values()]


def _sum(deltas: Sequence[Delta]) -> Delta:
    text = "".join(delta.text for delta in deltas)
    scored = tuple(token for delta in deltas for token in delta.scored)
    starts = [start for delta in deltas for start in delta.starts]
    last, prompt = deltas[-1], next((delta.prompt for delta in deltas if delta.prompt), ())
    return replace(last, text=text, scored=scored, starts=starts, prompt=prompt)
