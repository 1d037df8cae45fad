"""Judges of a drafter that serves: its traces and its pages against the reference."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tests.support.chain_reference import Reference
from tests.support.lockstep import Window
from worker.api import Sampling
from worker.cache.book import PageBook
from worker.cache.prefix import Node
from worker.start.engine import Engine

TOLERANCE = 1e-4  # of the length of a row, in float32


def prefixes(book: PageBook) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens, pages) from the root of the prefix tree to each of its leaves."""
    left: list[Node] = [book.tree.root]
    while left:
        node = left.pop()
        left += node.children.values()
        if not node.children and node.parent is not None:
            path = node.path()
            yield [token for each in path for token in each.key], [each.page for each in path]


def audit(engine: Engine, reference: Reference, tolerance: float = TOLERANCE) -> int:
    """Assert that pages of an idle engine's prefix tree hold the draft rows and tails that they
    must; returns how many pages were compared. Slot 0 of a request is no row."""
    size, seen = engine.book.page_size, set[int]()
    num_layers = engine.layout.region("draft").num_layers
    caches = [engine.pool.layer(layer, "draft") for layer in range(num_layers)]
    for tokens, pages in prefixes(engine.book):
        rows, tails = reference.draft_rows(tokens), reference.tails(tokens, size)
        for number, page in enumerate(pages):
            if page in seen:
                continue
            seen.add(page)
            first = number * size
            if number in tails:
                tail = engine.pool.page_rows("tail")[page][None]
                assert not far(tail, tails[number][None], tolerance), (
                    f"tail of page {page}, which ends with token {first + size - 1}"
                )
            begin = max(first, reference.first_slot)
            parts = [
                (f"{name} of layer {layer}", *each)
                for layer, both in enumerate(zip(caches, rows, strict=True))
                for name, *each in zip("kv", *both, strict=True)
            ]
            for name, region, wanted in parts:
                found = region[page].transpose(0, 1)[begin - first :]
                wrong = far(found.flatten(1), wanted[begin : first + size].flatten(1), tolerance)
                slots = [begin + each for each in wrong]
                assert not slots, f"draft {name} of page {page}, slots {slots} of {len(tokens)}"
    return len(seen)


def far(found: Tensor, wanted: Tensor, tolerance: float) -> list[int]:
    """Numbers of the rows that differ by more than this share of their length, or are NaN."""
    found, wanted = found.float().cpu(), wanted.float()
    near = (found - wanted).norm(dim=1) <= tolerance * wanted.norm(dim=1)
    return torch.nonzero(~near).flatten().tolist()


def trace_is_right(
    windows: Sequence[Window],
    text: Sequence[int],
    reference: Reference,
    sampling: Sampling,
    max_len: int,
    block: int = 0,
) -> int:
    """Assert that each window of a request verified what the drafter must have proposed, and kept
    what is right; returns how many drafts were compared.

    The entry step of each stay in a row has no drafts. Behind a narrower step there may be fewer
    drafts than the window could hold. What is drafted for positions from max_len on is not looked
    at, as nothing is drawn there.

    text: prompt and output, which end with max_len tokens; block: `spec.block`.
    """
    hold, width_before, num_compared = None, 0, 0
    for window in windows:
        at, drafts = window.position, window.drafts
        assert len(drafts) == window.width - 1, window
        if window.hold is not hold:
            assert set(drafts) <= {-1}, f"drafts in an entry step: {window}"
        else:
            there = len(drafts)
            if width_before < window.width and set(drafts[width_before - 1 :]) <= {-1}:
                there = width_before - 1
            drawn = reference.drawn(text, at, there + 1, sampling, max(width_before, block))
            drawn = drawn[: max(0, max_len - at - 1)]
            wanted = [draft for draft, _ in drawn]
            margins = ", ".join(f"{margin:.2g}" for _, margin in drawn)
            assert list(drafts[: len(drawn)]) == wanted, (
                f"{window}: not {wanted}, which were the likeliest by {margins}"
            )
            num_compared += len(drawn)
        assert window.num == num_kept(window, text), f"{window}: not {num_kept(window, text)}"
        hold, width_before = window.hold, window.width
    return num_compared


def num_kept(window: Window, text: Sequence[int]) -> int:
    """One, and the leading drafts that are right; none behind the end of the text."""
    at, num = window.position, 1
    for draft in window.drafts:
        if at + num + 1 >= len(text) or draft != text[at + num]:
            break
        num += 1
    return num
