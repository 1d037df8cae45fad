"""What all workers of a cluster are told of speculation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from worker.config.engine import Auto, Section

MAX_WIDTH = 16
MAX_NGRAM = 16


class SpecConfig(Section):
    """Speculation: what proposes tokens, and the windows of decode steps that check them."""

    drafter: Literal["none", "chain", "dflash", "ngram"] = "none"
    """What proposes tokens. `chain`: a drafter of one layer (EAGLE, EAGLE-3, or a model's own layer
    for multi-token prediction), a token at a time. `dflash`: a drafter of a few layers, a block of
    tokens at once. All workers of a cluster need the same. `ngram`: what followed the
    last tokens where the request's own text had them before; needs no weights."""
    path: str = ""
    """The drafter's checkpoint: a directory, or its name on the hub. Empty: the model's own
    directory, or for the model that comes with kvlane the drafter that does."""
    block: Annotated[int, Field(ge=0, le=MAX_WIDTH)] = 0
    """`dflash` drafts blocks of at least so many tokens, the certain one included, also where fewer
    are verified. 0: as many as are verified."""
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
    plain decode. auto: 1, 2, 4, 8 if there is something to verify, for dflash also 16, as far as
    its blocks go; else 1."""
    simulate_accept_len: Annotated[float, Field(ge=0, le=MAX_WIDTH)] = 0
    """Tokens of a step that count, on average, whatever the model draws: for throughput on random
    weights. The text is junk, and results and metrics are marked as simulated. 0: off."""
    simulate_accept_share: Annotated[float, Field(ge=0, lt=1)] = 0
    """As simulate_accept_len, by the share of drafts that count where all before them did: wider
    windows then keep more. 0: off."""

    @model_validator(mode="after")
    def _sensible(self) -> SpecConfig:
        if self.path and not self.has_weights:
            raise ValueError(
                f"path names a drafter, but drafter is {self.drafter}: set it to chain or dflash"
            )
        if self.block and self.drafter != "dflash":
            raise ValueError(f"block is {self.block}, but drafter is {self.drafter}, not dflash")
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min is {self.ngram_min}, ngram_max only {self.ngram_max}")
        if self.widths == []:
            raise ValueError("widths must have a number, or be auto")
        if 0 < self.simulate_accept_len < 1:
            raise ValueError("simulate_accept_len must be 0, or at least 1")
        if self.simulate_accept_len and self.simulate_accept_share:
            raise ValueError("simulate_accept_len excludes simulate_accept_share")
        return self

    @property
    def has_weights(self) -> bool:
        """Whether the drafter is a model with a checkpoint."""
        return self.drafter in ("chain", "dflash")

    @property
    def reads_text(self) -> bool:
        """Whether drafts come from a request's own text, and so are often missing."""
        return self.drafter == "ngram"

    @property
    def simulated_len(self) -> float:
        """Tokens of a step that are kept on average, of the widest windows; 0: as they are drawn.

        After `WorkerConfig.resolved`.
        """
        share, widest = self.simulate_accept_share, max(self.chosen)
        return (1 - share**widest) / (1 - share) if share else self.simulate_accept_len

    @property
    def chosen(self) -> tuple[int, ...]:
        """The widths that steps choose among, ascending; after `WorkerConfig.resolved`."""
        assert self.widths != "auto"
        return tuple(sorted({int(width) for width in self.widths}))

    @property
    def all_widths(self) -> tuple[int, ...]:
        """Those and 1."""
        return tuple(sorted({1, *self.chosen}))
