"""Engines whose pages have a drafter's regions as well, before there are drafters."""

from dataclasses import replace

import pytest

from worker.cache.layout import KVRegion, ModelLayout
from worker.start import build as engine


def add_regions(monkeypatch: pytest.MonkeyPatch, **draft: int) -> None:
    """From now on engines are built with "draft" and "tail" beside "target"; nobody writes them.

    draft: what of its layers differs from the target's.
    """
    plain = engine.model_layout

    def with_regions(*args) -> ModelLayout:
        (target,) = plain(*args).regions
        own = replace(target, name="draft", num_layers=1, num_groups=1, **draft)
        tail = KVRegion("tail", 1, 1, 192, 1, target.page_size, target.dtype, 1, "page")
        return ModelLayout((target, own, tail))

    monkeypatch.setattr(engine, "model_layout", with_regions)
