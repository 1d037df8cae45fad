"""Drafts that are drawn with the target's noise, verified by the sampler and `accept_rows`: every
token that counts follows the target's distribution, filters and temperature included, whatever the
drafter.

The model is a table: the logits of a token depend on the one before it.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.chain_reference import draw
from tests.support.pairwise import more, whole
from tests.unit.test_sampler import REJECT, Case, exact, p_of, rows_of
from worker.draw.sampler import sample
from worker.step.rows import RowColumns, SampledRows, accept_rows

VOCAB, WIDTH, ROWS, DRAWS = 12, 4, 8000, 100_000 if whole else 20_000
RANDOM = torch.Generator().manual_seed(3)
TARGET = torch.randn(VOCAB, VOCAB, generator=RANDOM) * 1.5  # logits by the token before
IDS = torch.tensor([1, 2, 4, 5, 7, 8, 9, 11])  # the draft vocabulary
NEAR = (TARGET + 0.7 * torch.randn(VOCAB, VOCAB, generator=RANDOM))[:, IDS]
CASES = {
    "plain": Case(),
    "cold": Case(0.6),
    "hot": Case(1.7),
    "top_k": Case(0.8, top_k=5),
    "top_p": Case(1.3, top_p=0.8),
    "min_p": Case(1.3, min_p=0.1),
    "all": Case(1.5, 8, 0.9, 0.05),
}


@dataclass
class Rows:
    """Requests of which each step verifies a window.

    how: "chain": each draft is drawn behind the one before it; "block": all behind the last token,
    each from what the model says so far behind it; "lookup": the likeliest tokens, as a text that
    repeats would have them.
    """

    case: Case  # sampling parameters of all
    drafter: Tensor = NEAR  # logits of the target ids `ids` by the token before, [VOCAB, num]
    ids: Tensor = IDS
    noise_at: Callable[[Tensor], Tensor] = lambda position: position  # the target's, for a draw
    drafted_at: Callable[[Tensor], Tensor] | None = None  # the drafter's; None: the target's
    keyed_by: Tensor = IDS  # the target's ids, as far as the drafter's noise is concerned
    accepts_all: bool = False  # no draw is compared with its draft
    how: str = "chain"

    def __post_init__(self) -> None:
        self.rows = torch.arange(1, ROWS + 1)
        self.seed = self.rows * 7919 + (3 << 33)
        self.columns = RowColumns(
            active=torch.ones(ROWS + 1, dtype=torch.bool),
            seq_len=torch.full((ROWS + 1,), 9),
            last_token=torch.arange(ROWS + 1) % VOCAB,
            max_len=torch.full((ROWS + 1,), 1 << 20),
            folded=torch.full((ROWS + 1,), 9),
            page_table=torch.zeros(ROWS + 1, 1, dtype=torch.int32),
            drafts=torch.full((ROWS + 1, WIDTH - 1), -1),
        )
        self.counts = np.zeros((VOCAB, VOCAB))  # of draws by the token before
        self.num_windows = 0

    def propose(self) -> None:
        last, position = self.columns.last_token[1:], self.columns.seq_len[1:] + 1
        token, far = last, torch.eye(VOCAB)
        for place in range(WIDTH - 1):
            at = (self.drafted_at or self.noise_at)(position + place)
            far = far @ TARGET.softmax(-1)
            if self.how == "lookup":
                token = TARGET.argmax(-1)[token]
                self.columns.drafts[1:, place] = token
                continue
            logits = self.drafter[token] if self.how == "chain" else far.log()[last][:, self.ids]
            temperature = self.case.temperature
            found, _ = draw(logits, self.keyed_by, temperature, self.seed, at, VOCAB)
            number = (self.keyed_by == found[:, None]).long().argmax(1)
            token = self.ids[number]
            self.columns.drafts[1:, place] = token

    def step(self) -> None:
        self.propose()
        before = torch.cat((self.columns.last_token[1:, None], self.columns.drafts[1:]), 1)
        position = (self.columns.seq_len[1:, None] + 1 + torch.arange(WIDTH)).flatten()
        one = rows_of([self.case], torch.zeros(1), torch.zeros(1))
        lines: Any = {
            each.name: getattr(one, each.name).repeat_interleave(len(position), 0)
            for each in fields(one)
        }
        drawn_at = {"position": self.noise_at(position), "seed": self.seed.repeat_interleave(WIDTH)}
        lines = replace(one, **lines | drawn_at)
        draws = sample(TARGET[before.flatten()], lines, "filtered")
        forced = torch.full_like(draws, WIDTH) if self.accepts_all else None
        valid = torch.ones(ROWS, dtype=torch.bool)
        sampled = SampledRows(self.rows, position, valid, WIDTH)
        result = accept_rows(sampled, draws, lines.stop_ids, position, self.columns, forced)
        draws, num = result[:, :WIDTH], result[:, WIDTH]
        counts = torch.arange(WIDTH) < num[:, None]
        known = torch.cat((before[:, :1], draws[:, :-1]), 1)  # what stands before each in the text
        np.add.at(self.counts, (known[counts].numpy(), draws[counts].numpy()), 1)
        self.num_windows += ROWS

    def run(self) -> "Rows":
        while self.counts.sum() < DRAWS:
            self.step()
        return self

    def p_value(self) -> float:
        tables = np.stack([exact(logits, self.case) for logits in TARGET])
        return p_of(self.counts, tables * self.counts.sum(1, keepdims=True))

    def num_accepted(self) -> float:
        return float(self.counts.sum()) / self.num_windows


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, "chain") for name in CASES)]
    + [(name, how) for how in ("block", "lookup") for name in ("all", *more("plain", "hot"))],
)
def test_tokens_that_count_follow_the_target_exactly(name: str, how: str) -> None:
    rows = Rows(CASES[name], how=how).run()
    assert rows.p_value() > REJECT
    assert 1.3 < rows.num_accepted() < WIDTH - 0.5, "drafts were not both right and wrong"


@pytest.mark.parametrize("name", ["plain", "cold", "all"])
@pytest.mark.parametrize("wrong", [{"accepts_all": True}, {"noise_at": lambda at: at // 2 * 2}])
def test_no_comparison_or_noise_at_two_positions_fails_it(name, wrong: dict[str, Any]) -> None:
    assert Rows(CASES[name], **wrong).run().p_value() < REJECT


def test_a_drafter_with_the_target_s_logits_is_always_right() -> None:
    """At any temperature, if nothing filters the target's; a filter costs a part of it."""
    every = torch.arange(VOCAB)
    right: Any = {"drafter": TARGET, "ids": every, "keyed_by": every}
    for name in ("plain", "cold", "hot"):
        assert Rows(CASES[name], **right).run().num_accepted() == WIDTH
    assert WIDTH - 1 < Rows(CASES["top_p"], **right).run().num_accepted() < WIDTH


def test_noise_at_another_position_or_id_costs_acceptance() -> None:
    coupled = Rows(CASES["hot"]).run().num_accepted()
    late = Rows(CASES["hot"], drafted_at=lambda position: position - 1).run().num_accepted()
    by_draft_id = Rows(CASES["hot"], keyed_by=torch.arange(len(IDS))).run().num_accepted()
    assert coupled > 1.3 * late
    assert coupled > 1.3 * by_draft_id
