"""Drafts by a copy of the head in eight bits: nearly as many count, and answers are the same."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from tests.equivalence import test_ranks as ranks
from tests.equivalence.test_hybrid_mutants import mutate
from tests.equivalence.test_mtp import load
from tests.support.drafter_cases import workers
from tests.support.engines import running
from tests.support.lockstep import DECODE, Ask
from tests.support.processes import on_ranks
from tests.support.prompts import problem_ids
from worker.api import Sampling
from worker.config import ModelConfig, SpecConfig, WorkerConfig
from worker.config.checkpoint.quantization import Quantization
from worker.drafts import build
from worker.drafts import head_copy as module
from worker.drafts.chain import ChainDrafter
from worker.drafts.drafter_config import read_chain_shape
from worker.errors import Unsupported
from worker.model.layers import VocabParallelEmbedding
from worker.model.placement import Placement
from worker.peers.base import Collective, SingleCollective
from worker.weights.base import Matrix
from worker.weights.shard import Key

pytestmark = pytest.mark.usefixtures("one_thread")
CPU, BF16 = torch.device("cpu"), torch.bfloat16
MTP = ModelConfig(path="tiny-hybrid-moe").directory
NEAR = 0.06  # of logits' length: numbers of 3 bits behind the point on both sides


class Served(NamedTuple):
    """Greedy and seeded texts, and how they were drafted."""

    answers: list[list[int]]
    num_kept: int  # drafts that counted
    num_drafts: int
    copy: Matrix | None
    agreed: float  # part of the rows of all drafts whose favourite is that of the head


def served(head_dtype: str) -> Served:
    longest = Sampling(40, temperature=0.0, ignore_eos=True)
    asked = [Ask(prompt, longest, i).but(seed=i) for i, prompt in enumerate(problem_ids(6))]
    asked[1::2] = [ask.but(temperature=0.7, top_p=0.9) for ask in asked[1::2]]
    spec = {"drafter": "mtp", "widths": [4], "head_dtype": head_dtype}
    made = workers(spec=spec, target=MTP, max_num_reqs=8, max_prefill_tokens=64)
    model: Any = made.engines[DECODE].weights.drafter
    same, logits = [torch.ones(1, dtype=torch.bool)], model.head.logits

    def compared(hidden: Tensor, *, whole: bool = True, copy: Matrix | None = None) -> Tensor:
        found = logits(hidden, whole=whole, copy=copy)
        if copy is not None:
            same.append(found.argmax(-1) == logits(hidden).argmax(-1))
        return found

    model.head.logits = compared
    try:
        answers = [answer.tokens for answer in made.serve(asked)]
        windows = [window for trace in made.windows.values() for window in trace]
        drafts = sum(draft >= 0 for window in windows for draft in window.drafts)
        kept, agreed = sum(window.num - 1 for window in windows), torch.cat(same).float().mean()
        return Served(answers, kept, drafts, model.head_copy, float(agreed))
    finally:
        made.close()


def test_answers_are_the_same_and_as_many_drafts_count(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvlane.start"):
        plain, eight = served("model"), served("float8_e4m3fn")
    assert plain.answers == eight.answers
    print(*(f"{x.num_kept} of {x.num_drafts} count, {x.agreed:.3f} agree" for x in (plain, eight)))
    assert plain.num_kept > 40
    assert eight.num_kept / eight.num_drafts > 0.95 * plain.num_kept / plain.num_drafts
    assert eight.agreed > 0.95
    assert plain.copy is None
    (told,) = (line for line in caplog.messages if "copy of the head" in line)
    copy = eight.copy
    assert copy is not None
    (rows, size), num_bytes = copy.values.shape, sum(part.nbytes for part in copy.parameters())
    assert num_bytes == rows * size + 4 * (rows // 16 + rows // 128) * -(-size // 128)
    assert f"{num_bytes / 1e9:.3g} GB here" in told


def test_wrong_scales_are_seen_in_drafts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers stay as they are, however bad a drafter is."""
    where = "drafts.head_copy:head_copy"
    mutate(monkeypatch, where, "copy_(drawn[SCALES])", "copy_(drawn[SCALES].cumsum(0))")
    plain, wrong = served("model"), served("float8_e4m3fn")
    print(f"{wrong.num_kept} of {wrong.num_drafts} count, {wrong.agreed:.3f} agree")
    assert plain.answers == wrong.answers
    assert wrong.agreed < 0.95
    assert wrong.num_kept / wrong.num_drafts < 0.95 * plain.num_kept / plain.num_drafts


def filled(rows: int, columns: int, group: Collective | None = None) -> VocabParallelEmbedding:
    """A head whose blocks differ by far, divided among ranks."""
    placement = Placement(group or SingleCollective(), torch.float32, CPU)
    head = VocabParallelEmbedding(rows, columns, placement)
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    whole *= torch.logspace(-1, 1, rows).roll(rows // 3)[:, None]
    whole *= torch.logspace(-1, 1, columns)
    shard = head.shards("head")[Key("head.weight")]
    shard.fill(whole[shard.index])
    return head


class Poisoned(Placement):
    """What is made in it is no number until it is filled."""

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        made = super().empty(*shape, dtype=dtype)
        made.data.view(torch.uint8).fill_(0xFF)
        return made


@torch.inference_mode()
def both(rows: int, columns: int, group: Collective | None = None) -> tuple[Tensor, Tensor]:
    """Logits of noise by the copy and by the head."""
    head = filled(rows, columns, group)
    head.divisor, head.cap = 2.0, 1000.0
    copy = module.head_copy(head, Poisoned(group or SingleCollective(), torch.float32, CPU))
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(2))
    return head.logits(x, copy=copy), head.logits(x)


def check_near(rows: int, columns: int) -> None:
    found, wanted = both(rows, columns)
    assert found.shape == wanted.shape == (5, rows)
    check_close(found, wanted)


def check_close(found: Tensor, wanted: Tensor) -> None:
    off = (found - wanted).norm(dim=0) / wanted.norm(dim=0)
    assert 0 < float(off.median()) < NEAR
    assert float(off.max()) < 8 * NEAR, "of some token"


# Blocks of 128 rows; parts of them; more rows than are copied at a time; one by one.
SIZES = [(512, 256), (208, 192), (8192 + 640, 128), (301, 200)]


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_logits_are_nearly_those_of_the_head(rows: int, columns: int) -> None:
    check_near(rows, columns)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("scales.copy_(drawn[SCALES])", "scales.fill_(0.01)"),
        ("copy_(drawn[SCALES])", "copy_(drawn[SCALES].roll(8, 0))"),
        ("copy_(drawn[SCALES])", "copy_(drawn[SCALES].roll(1, 1))"),
        ("made.scales[start // grain :]", "made.scales"),
        ("made.values[start:]", "made.values"),
    ],
)
def test_a_mutant_is_red(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, "drafts.head_copy:head_copy", old, new)
    with pytest.raises(AssertionError):  # noqa: PT012 - whichever size
        for size in SIZES:
            check_near(*size)


@pytest.mark.parametrize("rows", [512, 301])  # of ranks as whole blocks, and with padding
def test_ranks_copy_the_rows_that_they_hold(rows: int, tmp_path: Path) -> None:
    """A row's scale is of a rank's own rows, and the gathered logits are those of one rank."""
    _, wanted = both(rows, 256)
    for found, theirs in on_ranks(2, tmp_path, lambda group: both(rows, 256, group)):
        assert (theirs - wanted).abs().max() < 1e-3
        check_close(found, wanted)


def test_two_ranks_draft_and_answer_as_one() -> None:
    wanted = ranks.sections("chain", "never")
    wanted["spec"] = wanted["spec"] | {"head_dtype": "float8_e4m3fn"}
    with running(wanted, num_prefill=0, decode_tp=2) as cluster:
        found = ranks.asked(cluster)
    plain = ranks.of_one_rank("chain")
    assert [each.tokens for each in found] == [each.tokens for each in plain]
    kept, before = (sum(len(each.windows) for each in answers) for answers in (found, plain))
    assert kept <= 1.1 * before


def test_auto_copies_where_it_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large enough worker of a quantised model that decodes, on a GPU that multiplies e4m3."""
    monkeypatch.setattr(build, "multiplies_eight_bits", lambda device: device.type == "cuda")
    monkeypatch.setattr(build, "head_copy", lambda *_: torch.nn.Linear(1, 1))

    def copies(
        asked: str = "auto", *, role: Any = "decode", dtype: torch.dtype = BF16,
        quantised: bool = True, share: int = 50 * 64, device: str = "cuda", width: int = 4,
    ) -> bool:  # fmt: skip
        spec = SpecConfig.model_validate(
            {"drafter": "chain", "head_dtype": asked, "widths": [width]}
        )
        model: Any = SimpleNamespace(
            head=SimpleNamespace(weight=torch.empty(8, 8, dtype=dtype)), head_copy=None,
            placement=SimpleNamespace(device=torch.device(device)), target_is_quantised=quantised,
        )  # fmt: skip
        config = WorkerConfig(role=role, spec=spec)
        build.add_head_copy(config, model, share)
        made = model.head_copy
        build.add_head_copy(config, model, share)  # as a worker that turns, with what it has
        assert model.head_copy is made
        return model.head_copy is not None

    assert copies()
    assert not copies(role="prefill"), "which drafts nothing"
    assert not copies(width=1), "which drafts nothing"
    assert not copies(dtype=torch.float32)
    assert not copies(quantised=False)
    assert not copies(share=50 * 64 - 1)
    assert not copies(device="cpu")
    assert not copies("model")
    assert copies("float8_e4m3fn", quantised=False, share=0, device="cpu")
    monkeypatch.setattr(build, "multiplies_eight_bits", lambda _: False)
    with pytest.raises(Unsupported, match=r"spec\.head_dtype: .* set it to model"):
        copies("float8_e4m3fn")


def test_what_has_no_head_is_refused() -> None:
    with pytest.raises(ValidationError, match="head_dtype is float8_e4m3fn, but drafter is ngram"):
        SpecConfig(drafter="ngram", head_dtype="float8_e4m3fn")


def test_a_target_says_whether_it_is_quantised() -> None:
    target: Any = load(MTP)
    shape = read_chain_shape(MTP, target.shape)
    assert not ChainDrafter(shape, target, 64).target_is_quantised
    target.shape = replace(target.shape, quantization=Quantization("e4m3", 128))
    assert ChainDrafter(shape, target, 64).target_is_quantised
