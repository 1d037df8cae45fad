"""What every trace has to be: one tree, each span within its parent, stages without gaps."""

from collections.abc import Sequence
from itertools import pairwise

from tests.support.collector import Span

ROUNDING_NS = 1000  # of monotonic seconds, which are floats
WITHIN = ("prefill_queue", "prefill_chunk")  # of a prompt: the device may do other things between


def children(spans: Sequence[Span], parent: Span) -> list[Span]:
    return [span for span in spans if span.parent_id == parent.span_id]


def named(spans: Sequence[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def check_nesting(spans: Sequence[Span], root_parent: str) -> Span:
    """All spans but one have their parent here and lie within it; returns that one, the root."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), "a span came twice"
    roots = [span for span in spans if span.parent_id not in by_id]
    assert [span.parent_id for span in roots] == [root_parent], [span.name for span in roots]
    for span in spans:
        assert span.began_ns <= span.ended_ns
        parent = by_id.get(span.parent_id)
        if parent is not None:
            assert parent.began_ns <= span.began_ns + ROUNDING_NS, (span, parent)
            assert span.ended_ns <= parent.ended_ns + ROUNDING_NS, (span, parent)
    return roots[0]


def check_stages(stages: Sequence[Span]) -> None:
    """Each begins where the one before has ended; chunks of a prompt may be apart."""
    for before, after in pairwise(stages):
        gap_ns = after.began_ns - before.ended_ns
        assert gap_ns >= -ROUNDING_NS, (before, after)
        assert after.name in WITHIN or gap_ns <= ROUNDING_NS, (before, after)


def check_request(spans: Sequence[Span], root_parent: str) -> Span:
    """A request's trace with one choice, of router and workers; returns the router's span."""
    root = check_nesting(spans, root_parent)
    assert root.is_server
    check_kinds(spans)
    stages = children(spans, root)
    check_stages(stages)
    assert stages[0].name == "prepare"
    assert stages[-1].name == "respond"
    assert abs(stages[0].began_ns - root.began_ns) <= ROUNDING_NS
    assert abs(stages[-1].ended_ns - root.ended_ns) <= ROUNDING_NS
    for dispatch in named(stages, "dispatch"):
        check_worker(spans, dispatch)
    return root


def check_kinds(spans: Sequence[Span]) -> None:
    """Whose stages are below is CLIENT; of those stages one is SERVER, and does not ask others."""
    for span in spans:
        below = [each for each in children(spans, span) if each.instance != span.instance]
        if below:
            assert span.is_client, span
            assert len([each for each in below if each.is_server]) == (
                not all(each.is_client for each in below)
            ), below


def check_worker(spans: Sequence[Span], parent: Span) -> list[Span]:
    """The stages of a decode worker below `parent`; returns them."""
    stages = children(spans, parent)
    check_stages(stages)
    for prefill in named(stages, "prefill"):
        inner = children(spans, prefill)
        check_stages(inner)
        assert {span.name for span in inner} <= set(WITHIN)
        assert len({span.instance for span in inner}) <= 1
    return stages
