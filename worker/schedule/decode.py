"""What a decode worker runs next, decode rows or local prefill chunks, and what came of it.

Lengths: a request has n = len(req.tokens) settled tokens, and KV of n - 1. A step in flight adds
its width at most. So KV on the device is n - 1 + num_slots_in_flight tokens at most.
"""

from typing import NamedTuple, TypeAlias

from worker.api import FinishReason
from worker.errors import OutOfPages
from worker.plan import TAILS, Chunk, Drawn, Plan
from worker.schedule.queues import ARRIVAL, DecodeQueues
from worker.schedule.req import Phase, Req
from worker.schedule.width import WidthPolicy

DISAGREE = "device and host disagree"

# What a step did for one request: what was drawn, how many of its tokens count (the last ones of
# req.tokens), why it ends if it does. A plain tuple, as there are hundreds a step.
Settled: TypeAlias = tuple[Req, Drawn, int, FinishReason | None]


class InFlight(NamedTuple):
    """The requests of a step in flight."""

    sampled: list[Req]  # it draws for them
    computed: list[tuple[Req, Chunk]]  # its chunks, if it has any
    width: int = 1


class DecodeScheduler:
    """Steps over the requests in `queues`."""

    def __init__(
        self,
        queues: DecodeQueues,
        eos_ids: frozenset[int],
        widths: WidthPolicy | None = None,
        block: int = 0,
    ) -> None:
        """block: slots of drafts that the drafter stores behind a window; see SpecConfig.block."""
        self.queues, self.eos_ids = queues, eos_ids
        self.widths = widths or WidthPolicy((1,))
        self.step = 0  # number of the step planned last
        self.launched: dict[int, InFlight] = {}  # by step number, until it settles
        self._book, self._block = queues.book, block
        self._last_was_prefill = False  # prefill and decode alternate while both have work

    def plan(self, now: float = 0.0) -> Plan | None:
        """Return the next step, or None if nothing can run now.

        None may also mean that a request is being preempted: its pages become free when its step
        settles. now: noted in the timeline of a request that gets a row.
        """
        queues = self.queues
        if queues.ready:
            queues.start_ready(now)
        may_prefill = queues.local and not (self._last_was_prefill and queues.running)
        if may_prefill and (computed := queues.take_chunks(now)):
            self._last_was_prefill = True
            sampled = [req for req, chunk in computed if chunk.sample]
            ends = [req.num_planned_tokens for req, _ in computed]
            return self._launch(InFlight(sampled, computed), ends)
        self._last_was_prefill = False
        width = self.widths.choose(len(queues.running)) if self.widths.max_width > 1 else 1
        return (self._plan_decode(width) if width > 1 else None) or self._plan_decode(1)

    def settle(self, step: int, drawn: list[Drawn]) -> list[Settled]:
        """Append the tokens of step `step`, which has finished.

        For results with a finish reason the caller calls `DecodeQueues.finish`. Requests that have
        ended since the launch are left out.
        """
        queues = self.queues
        self._book.settled(step)
        results: list[Settled] = []
        sampled, from_chunk, width = self.launched.pop(step)
        for req, chunk in from_chunk:
            if req.hold is not None:
                self._book.trim(req.hold, chunk.start + len(chunk.tokens), req.tokens)
        for req, result in zip(sampled, drawn, strict=True):
            req.num_in_flight -= 1
            req.num_slots_in_flight -= width
            req.num_folded = len(req.tokens) - (1 if width > 1 else 0)
            if req.phase is Phase.FINISHED:
                continue
            num = len(result.tokens)
            assert num, f"{req.key} drew from an inactive row"
            if num == 1 and req.matcher is None:  # most rows of most steps
                req.tokens.append(result.tokens[0])
                reason = finish_reason(req, self.eos_ids)
                assert (reason is not None) == result.finished, f"{req.key}: {DISAGREE}"
                req.num_computed_tokens = len(req.tokens) - 1
            else:
                num, reason = append(req, result, self.eos_ids)
            if from_chunk:
                assert req.hold is not None
                self._book.commit(req.hold, req.tokens[:-1])
            results.append((req, result, num, reason))
            if queues.leaving and req in queues.leaving:
                queues.leaving.discard(req)
                if reason is None:
                    queues.put_off(req)
        return results

    def _plan_decode(self, width: int) -> Plan | None:
        """The next step with windows of `width`, whose pages are bound here.

        The slots of the step after it, and of its drafts, are bound one step early (`ahead`: more
        than the width where the drafter's block is longer). Where pages are too few, width 1
        preempts requests and wider ones return None.
        """
        queues, chosen = self.queues, list[Req]()
        lengths: list[int] = []
        ahead = max(width, self._block) if width > 1 else 1
        for req in sorted(queues.running.values(), key=ARRIVAL):
            if len(req.tokens) + req.num_in_flight >= req.max_len or req in queues.leaving:
                continue  # its last token is in flight, or it is being preempted
            # Making room for an older request may just have preempted this one.
            if req.hold is None:
                continue
            bound = len(req.tokens) - 1 + req.num_slots_in_flight
            fits = bound + width + ahead <= req.hold.num_slots
            if not fits and not self._bind(req, bound, width, ahead):
                if width > 1:
                    return None
                continue
            chosen.append(req)
            if req.hold.slot:
                self._snapshot(req, bound, width)
            # An active row has KV of less than max_len tokens, whatever the host's bound is.
            lengths.append((bound if bound < req.max_len else req.max_len - 1) + width)
        return self._launch(InFlight(chosen, [], width), lengths) if chosen else None

    def _launch(self, launched: InFlight, lengths: list[int]) -> Plan:
        """The plan of the next step; lengths: its rows' bounds of KV."""
        self.step += 1
        for req in launched.sampled:
            req.num_in_flight += 1
            req.num_slots_in_flight += launched.width
        self.launched[self.step] = launched
        self._book.launched(self.step)
        draws = {req.draw for req in launched.sampled}
        chunks = tuple(chunk for _, chunk in launched.computed)
        snapshots = self._book.snapshots
        return Plan(
            self.step,
            *self.queues.rows.drain(),
            chunks,
            () if chunks else tuple(req.row for req in launched.sampled),
            TAILS[max((draw.tail for draw in draws), default=0)],
            max(lengths),
            penalized=any(draw.penalized for draw in draws),
            num_logprobs=max((draw.num_logprobs for draw in draws), default=-1),
            masked=any(draw.masked for draw in draws),
            width=launched.width,
            num_keys=sum(lengths),
            num_prompt_logprobs=max(
                (req.sampling.prompt_logprobs for req, chunk in launched.computed if chunk.scored),
                default=-1,
            ),
            snapshots=self.queues.rows.drain_snapshots(),
            copies=snapshots.drain() if snapshots.copies else None,
        )

    def _snapshot(self, req: Req, bound: int, width: int) -> None:
        """Give a row a slot for snapshots before it can pass a line of the grid.

        bound: of its KV before this step. A step folds what came before its window, and a window of
        one token with it.
        """
        assert req.hold is not None
        snapshots, req.num_folded_ub = self._book.snapshots, bound + (width == 1)
        left = snapshots.grid - bound % snapshots.grid
        if left <= 2 * self.widths.max_width and (slot := snapshots.store_of_row(req.hold, bound)):
            self.queues.rows.snapshots.append((req.row, slot))

    def _bind(self, req: Req, bound: int, width: int, ahead: int) -> bool:
        """Bind pages for a window and `ahead` slots behind it; at width 1 preempt requests for it.

        The youngest request is preempted first. False: `req` cannot run in this step. Either it was
        preempted itself, or pages become free only when a preempted request's step settles, or
        windows of `width` are too wide.
        """
        assert req.hold is not None
        slots = window_slots(bound, width, ahead, req.max_len)
        self._book.trim(req.hold, req.num_computed_tokens)
        while True:
            try:
                self._book.bind(req.hold, slots)
            except OutOfPages:
                if width > 1 or self.queues.leaving:
                    return False
                victim = max(self.queues.running.values(), key=ARRIVAL)
                if not self.queues.preempt(victim) or victim is req:
                    return False
            else:
                self.queues.rows.queue_pages(req)
                return True


def finish_reason(req: Req, eos_ids: frozenset[int]) -> FinishReason | None:
    """Say why `req` ends with its last token, if it does, by the same rules as on the device."""
    token, sampling = req.tokens[-1], req.sampling
    num_output = len(req.tokens) - req.num_prompt_tokens
    is_stop = token in sampling.stop_ids or (not sampling.ignore_eos and token in eos_ids)
    if is_stop and num_output > sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(req.tokens) >= req.max_len else None


def append(req: Req, result: Drawn, eos_ids: frozenset[int]) -> tuple[int, FinishReason | None]:
    """Append the tokens of a step; returns how many, and why the request ends, if it does.

    Tokens behind the end of a grammar are left out, because the device does not know of that end.
    """
    tokens, matcher = req.tokens, req.matcher
    num_before, reason = len(tokens), None
    for token in result.tokens:
        assert reason is None, f"{req.key}: {DISAGREE}"
        tokens.append(token)
        reason = finish_reason(req, eos_ids)
        if matcher is not None:
            matcher.consume(token)
            if matcher.stopped or matcher.error is not None:
                # The grammar is complete: STOP wins over LENGTH.
                reason = FinishReason.STOP if matcher.stopped else reason
                break
    else:
        assert (reason is not None) == result.finished, f"{req.key}: {DISAGREE}"
    num_after = len(tokens)
    req.num_computed_tokens = num_after - 1
    return num_after - num_before, reason


def window_slots(bound: int, width: int, ahead: int, max_len: int) -> int:
    """Slots of a row with KV of up to `bound` tokens: for this window, and `ahead` for the next.

    Both may pass the end of the text; what lies there is computed and never used.
    """
    return min(bound + width + ahead, max_len + ahead - 1)
