"""What drafters with weights take in of a step: the target's features of its tokens."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from worker.drafts.chain_model import ChainDrafter
from worker.drafts.dflash_model import DFlashDrafter
from worker.forward.batch import Batch
from worker.model.decoder import Taps
from worker.step.state import StepState

Model = TypeVar("Model", ChainDrafter, DFlashDrafter)


@dataclass(frozen=True, slots=True)
class Features(Generic[Model]):
    """Makes a drafter's features of what the target has computed."""

    model: Model  # filled
    taps: Taps | None  # what the target leaves for it; None: it is fed with the target's output
    poison: bool  # make taps NaN once they are read, so that one that is not written is noticed

    def of(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """[num_tokens, hidden_size of the drafter], of the latest step; hidden: the target's."""
        if self.taps is None:
            return self.model.features(hidden)
        rows = self.taps.rows(num_tokens)
        features = self.model.features(rows)
        if self.poison:
            rows.fill_(float("nan"))
        return features


def stored_tokens(state: StepState, input_ids: Tensor, positions: Tensor, slots: Tensor) -> Batch:
    """Tokens whose keys and values are stored while nothing attends; all [n] i64."""
    table = state.page_table[:0]
    return Batch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slots,
        query_start=table[:, 0],
        seq_lens=table[:, 0],
        page_table=table,
        num_reqs=0,
        num_tokens=len(positions),
        max_query_len=0,
        max_seq_len_ub=0,
    )
