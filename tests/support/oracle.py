"""A drafter that knows the text: it proposes what follows, with errors at chosen places."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.support.lockstep import Window
from worker.forward.batch import Batch
from worker.start.engine import Engine
from worker.step.state import SampledRows


@dataclass(frozen=True)
class Script:
    """What is proposed for one request."""

    text: Sequence[int]  # prompt and output, as far as they are known
    drafts: Sequence[int]  # by position; -1: none

    @classmethod
    def of(cls, text: Sequence[int], wrong: Mapping[int, int]) -> "Script":
        """The text itself, but `wrong` by position."""
        return cls(text, [wrong.get(at, token) for at, token in enumerate(text)])

    def by_length(self, num: int) -> Tensor:
        """[len(drafts), num]: what is proposed behind each length of KV."""
        return torch.tensor([*self.drafts[1:], *[-1] * num]).unfold(0, num, 1)


class Oracle:
    """Drafter of a decode worker's requests, which are told apart by their seeds.

    scripts: by `Sampling.seed`, each a Script or what that has by length.
    """

    def __init__(self, engine: Engine, scripts: "Mapping[int, Script | Tensor]") -> None:
        loaded = engine.runner.loaded
        self._state, device = loaded.state, loaded.state.device
        num = loaded.state.columns.drafts.shape[1]
        lines = [each.by_length(num) if isinstance(each, Script) else each
                 for each in scripts.values()]  # fmt: skip
        self._seeds = torch.tensor(list(scripts), dtype=torch.int64, device=device)
        # A line for each script, then one for requests without any.
        lines.append(torch.full((1, num), -1))
        self._table = pad_sequence(lines, batch_first=True, padding_value=-1).to(device)
        object.__setattr__(loaded, "drafter", self)

    def observe(self, batch: Batch, hidden: Tensor) -> None: ...

    def seed(self, rows: Tensor) -> None: ...

    def advance(self, sampled: SampledRows, hidden: Tensor, drawn: Tensor, *, greedy: bool) -> None:
        equal = self._state.ints.seed[sampled.rows][:, None] == self._seeds
        line = torch.where(equal.any(1), equal.long().argmax(1), len(self._seeds))
        at = self._state.ints.seq_len[sampled.rows].clamp(max=self._table.shape[1] - 1)
        found = self._table[line, at]
        self._state.columns.drafts[sampled.rows] = torch.where(sampled.valid[:, None], found, -1)


def check_windows(windows: Sequence[Window], script: "Script", max_len: int, stops: Any) -> None:
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
