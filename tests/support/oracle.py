"""A drafter that knows the text: it proposes what follows, with errors at chosen places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.lockstep import Window
from worker.forward.batch import Batch
from worker.run.engine import Engine
from worker.step.state import SampledRows


@dataclass(frozen=True)
class Script:
    """What is proposed for one request."""

    text: Sequence[int]  # prompt and output, as far as they are known
    drafts: Sequence[int]  # by position; -1: none

    @classmethod
    def of(cls, text: Sequence[int], wrong: Mapping[int, int]) -> Script:
        """The text itself, but `wrong` by position."""
        return cls(text, [wrong.get(at, token) for at, token in enumerate(text)])


class Oracle:
    """Drafter of requests that are told apart by their seeds.

    Args:
        engine: of a decode worker; its steps verify what is proposed here.
        scripts: by `Sampling.seed`.
    """

    def __init__(self, engine: Engine, scripts: Mapping[int, Script]) -> None:
        loaded = engine.runner.loaded
        self._state = loaded.state
        self._num = loaded.state.columns.drafts.shape[1]
        length = loaded.max_len + self._num + 2
        lines = [[*each.drafts, *[-1] * (length - len(each.drafts))] for each in scripts.values()]
        device = loaded.state.device
        self._seeds = torch.tensor(list(scripts), dtype=torch.int64, device=device)
        # A line for each script, then one for requests without any.
        self._table = torch.tensor([*lines, [-1] * length], dtype=torch.int64, device=device)
        object.__setattr__(loaded, "drafter", self)

    def observe(self, batch: Batch, hidden: Tensor) -> None:
        """Keeps nothing."""

    def seed(self, rows: Tensor) -> None:
        """Keeps nothing."""

    def advance(self, sampled: SampledRows, hidden: Tensor, drawn: Tensor, *, greedy: bool) -> None:
        equal = self._state.ints.seed[sampled.rows][:, None] == self._seeds
        line = torch.where(equal.any(1), equal.long().argmax(1), len(self._seeds))
        at = self._state.ints.seq_len[sampled.rows][:, None] + 1
        at = at + torch.arange(self._num, device=at.device)
        found = self._table[line[:, None], at.clamp(max=self._table.shape[1] - 1)]
        self._state.columns.drafts[sampled.rows] = torch.where(sampled.valid[:, None], found, -1)


def check_windows(windows: Sequence[Window], script: Script, max_len: int, stops: Any) -> None:
    """Every window verified what the oracle proposed, and kept what follows from it.

    The first window of a stay in a row may have no drafts: nobody has proposed any.
    stops: whether a token at a position ends the request.
    """
    hold = None
    for window in windows:
        at = window.position
        wanted = [*script.drafts[at + 1 : at + window.width]]
        wanted += [-1] * (window.width - 1 - len(wanted))
        none = [-1] * (window.width - 1)
        entry = window.hold is not hold and list(window.drafts) == none
        assert entry or list(window.drafts) == wanted, (window, wanted)
        num = 1
        for draft in window.drafts:
            here = at + num  # position of the last draw that counts
            known = here < len(script.text)
            if not known or draft != script.text[here]:
                break
            ends = here + 1 >= min(max_len, len(script.text))  # as a grammar may end it
            if ends or stops(script.text[here], here):
                break
            num += 1
        assert window.num == num, window
        hold = window.hold
