"""What all workers of a cluster are told of speculation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from worker.config.engine import Auto, Section

MAX_WIDTH = 16
MAX_NGRAM = 16


class SpecConfig(Section):
    """Speculation: what proposes tokens, and the windows of decode steps that check them."""

    drafter: Literal["none", "chain", "ngram"] = "none"
    """What proposes tokens. `chain`: a drafter of one layer (EAGLE, EAGLE-3, or a model's own layer
    for multi-token prediction); all workers of a cluster need the same. `ngram`: what followed the
    last tokens where the request's own text had them before; needs no weights."""
    path: str = ""
    """The drafter's checkpoint: a directory, or its name on the hub. Empty: the model's own
    directory, or for the model that comes with kvlane the drafter that does."""
    ngram_min: Annotated[int, Field(ge=1, le=MAX_NGRAM)] = 2
    """`ngram` proposes only if so many last tokens are found again."""
    ngram_max: Annotated[int, Field(ge=1, le=MAX_NGRAM)] = 4
    """Places where more last tokens are found again go first, up to so many."""
    overlap: bool = True
    """Whether a step is launched while the one before it runs. False: each is waited for first,
    which is slower and shows in a profile what each step does."""
    widths: Auto | list[Annotated[int, Field(ge=1, le=MAX_WIDTH)]] = "auto"
    """Tokens of a window, one certain and the drafts behind it, among which steps choose by what
    they cost and what is accepted. One number fixes it. Steps can always be narrowed to 1, which is
    plain decode. auto: 1, 2, 4, 8 if there is something to verify, else 1."""
    simulate_accept_len: Annotated[float, Field(ge=0, le=MAX_WIDTH)] = 0
    """Tokens of a step that count, on average, whatever the model draws: for throughput on random
    weights. The text is junk, and results and metrics are marked as simulated. 0: off."""

    @model_validator(mode="after")
    def _sensible(self) -> SpecConfig:
        if self.path and self.drafter != "chain":
            raise ValueError(
                f"path names a drafter, but drafter is {self.drafter}: set it to chain"
            )
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min is {self.ngram_min}, ngram_max only {self.ngram_max}")
        if self.widths == []:
            raise ValueError("widths must have a number, or be auto")
        if 0 < self.simulate_accept_len < 1:
            raise ValueError("simulate_accept_len must be 0, or at least 1")
        return self

    @property
    def reads_text(self) -> bool:
        """Whether drafts come from a request's own text, and so are often missing."""
        return self.drafter == "ngram"

    @property
    def chosen(self) -> tuple[int, ...]:
        """The widths that steps choose among, ascending; after `WorkerConfig.resolved`."""
        assert self.widths != "auto"
        return tuple(sorted({int(width) for width in self.widths}))

    @property
    def all_widths(self) -> tuple[int, ...]:
        """Those and 1."""
        return tuple(sorted({1, *self.chosen}))
