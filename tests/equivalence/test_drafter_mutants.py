"""What goes wrong in drafters without a word turns the laws red."""

import pkgutil
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.support.any_width import AnyWidth
from tests.support.drafter_cases import Known, judge, reference_of, speculation, workers
from tests.support.engines import value
from tests.support.lockstep import DECODE, Ask
from tests.support.pairwise import more, one_in
from worker.config.checkpoint.mask import KeyMask
from worker.step.rows import SampledRows

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTHS = (1, 5)


def obeys(known: Known, form: str, *, graph: bool = False) -> None:
    """Requests, then others that go on from their answers, on pulled pages and local ones.

    graph: decode steps are replays, and padded.
    """
    directory = known.directory(form)
    spec = speculation(directory, *WIDTHS)
    made = workers(num_prefill=1, graph=graph, spec=spec, max_prefill_tokens=40)
    made.decode.scheduler.widths = AnyWidth((1, 5, 5), random.Random(4))
    for engine in made.engines.values():
        assert engine.config.engine.strict, "nothing is poisoned"
    asked = [
        ends_with_a_page(ask) for ask in (*known.asked["greedy"][:2], *known.asked["seeded"][2:4])
    ]
    texts = [*known.texts("greedy")[:2], *known.texts("seeded")[2:4]]
    try:
        check(made, asked, directory)
        short = msgspec.structs.replace(asked[0].sampling, max_tokens=24)
        cut = len(asked[0].prompt) + 20  # in the answer, so decode's own rows are hit
        again = [
            Ask(tuple(text[: cut - 3 * i]), short, local=i % 2 == 0) for i, text in enumerate(texts)
        ]
        check(made, again, directory)
        assert value(made.engines[DECODE].metrics.cached_tokens) > 0
    finally:
        made.close()


def ends_with_a_page(ask: Ask) -> Ask:
    """Its last KV fills a page, so the tree gets what its last step has written."""
    most = ask.sampling.max_tokens
    most -= (len(ask.prompt) + most - 1) % 16
    return ask.but(max_tokens=most)


def check(made: Any, asked: list[Ask], directory: Path) -> None:
    made.windows.clear()
    assert judge(made, asked, made.serve(asked), reference_of(directory)) > 10


def given(change: Callable[..., tuple[Any, ...]]) -> Callable[[Any], Any]:
    """A mutant that is called with other arguments."""
    return lambda real: lambda *args, **options: real(*change(*args), **options)


def gives(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """A mutant whose result is changed; `change` gets that and the arguments."""
    return lambda real: lambda *args, **options: change(real(*args, **options), *args)


def nothing(real: Any) -> Any:
    return lambda *_: None


def in_wide_steps_only(real: Any) -> Any:
    def advance(chain: Any, sampled: Any, *rest: Any, **options: Any) -> None:
        if sampled.width > 1:
            real(chain, sampled, *rest, **options)

    return advance


def rejected_rows(sampled: SampledRows, drawn: Tensor, *rest: Any) -> Any:
    width = sampled.width
    return sampled, drawn.index_fill(1, torch.tensor([width]), width), *rest


def in_a_page(slots: Tensor, sampled: SampledRows) -> Tensor:
    """The slots, those of padding in page 1."""
    return torch.where(~sampled.valid.repeat_interleave(sampled.width), 16 + 3, slots)


def with_draft(batch: Any, **change: Any) -> Any:
    return replace(batch, draft=replace(batch.draft, **change))


def without_draft_region(runs: list[Any], pair: Any, *_: Any) -> list[Any]:
    number = [region.name for region in pair.local.regions].index("draft")
    return [run for run in runs if run[0] != number]


def noise_by_draft_id(real: Any) -> Any:
    def draw(logits: Tensor, draws: Any, drafts: Tensor) -> Tensor:
        rows, ids = draws.rows, draws.ids
        found = real(logits, draws._replace(ids=None), drafts)
        drafts[rows] = torch.where(drafts[rows] >= 0, ids[found][:, None], -1)
        return ids[found]

    return draw


def feeds_back_the_raw_output(real: Any) -> Any:
    """Where the normed one belongs."""

    def forward(model: Any, *given: Any) -> tuple[Tensor, Tensor]:
        norm = model.final_norm
        kept = {}

        def reduce_add(part: Tensor, residual: Tensor) -> Any:
            normed, kept["raw"] = type(norm).reduce_add(norm, part, residual)
            return normed, kept["raw"]

        norm.reduce_add = reduce_add
        try:
            _, output = real(model, *given)
        finally:
            del norm.reduce_add
        return kept["raw"], output

    return forward


def seen_causally(*, causal: bool, window: int | None) -> KeyMask:
    """Of layers whose rows see the whole block."""
    return KeyMask(causal=True, window=window)


CHAIN, MODEL = "worker.drafts.chain", "worker.drafts.chain.ChainDrafter"
DFLASH = "worker.drafts.dflash"
TAPS, PAIR_RUNS = "worker.model.decoder.Taps.after", "worker.transfer.layout.RankPair.runs"
ONE_LAYER_EARLY = given(lambda taps, layer: (taps, layer + 1))
# What is active instead of valid: the last tokens of a request that ends are missing.
ACTIVE = given(
    lambda sampled, drawn, columns, *rest: (
        replace(sampled, valid=columns.active[sampled.rows]), drawn, columns, *rest,
    )
)  # fmt: skip
PLACE_BEFORE = given(
    lambda logits, draws, drafts: (logits, draws._replace(position=draws.position - 1), drafts)
)
MUTANTS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "taps one layer early": ("eagle3", TAPS, ONE_LAYER_EARLY),
    "taps not written": ("eagle3", TAPS, nothing),  # as a graph that replays without them
    "no inject at width 1": ("eagle3", f"{CHAIN}.Chain.advance", in_wide_steps_only),
    "no seed": ("eagle", f"{CHAIN}.Chain.seed", nothing),
    "active, not valid": ("eagle3", f"{CHAIN}.draft_rows", ACTIVE),
    "rejected rows": ("eagle3", f"{CHAIN}.draft_rows", given(rejected_rows)),
    "a bound as length": (  # the host's bound, where the device's length belongs
        "eagle", f"{CHAIN}.draft_rows",
        gives(lambda steps, *_: steps._replace(draft_lens=steps.draft_lens + 1)),
    ),
    "padding": (
        "eagle3", f"{CHAIN}.draft_rows",
        gives(lambda steps, rows, *_: steps._replace(slots=in_a_page(steps.slots, rows))),
    ),
    "tail of the last page": (  # of the page in which a prompt ends: where decode begins
        "mtp", f"{CHAIN}.Chain.observe",
        given(lambda chain, batch, hidden: (chain, with_draft(
            batch, tail_pages=batch.draft.tail_pages * (batch.positions % 16 == 15)
        ), hidden)),
    ),
    "no shift": (
        "eagle3", f"{CHAIN}.Chain.observe",
        given(lambda chain, batch, hidden: (
            chain, with_draft(batch, source=torch.arange(batch.num_tokens)), hidden
        )),
    ),
    "not pulled": ("eagle3", PAIR_RUNS, gives(without_draft_region)),
    "noise's place": ("eagle3", f"{CHAIN}.draw_drafts", PLACE_BEFORE),
    "noise's id": ("eagle3", f"{CHAIN}.draw_drafts", noise_by_draft_id),
    "first key": ("eagle", "worker.drafts.build.FROM_KEY_1", lambda _: KeyMask()),
    "map without offset": (
        "eagle3", f"{MODEL}._map_ids",
        lambda _: lambda model, path: setattr(model, "id_map", torch.arange(300)),
    ),
    "normed fed back": ("eagle3", f"{MODEL}.forward", gives(lambda both, *_: (both[1], both[1]))),
    "raw fed back": ("mtp", f"{MODEL}.forward", feeds_back_the_raw_output),
    "block: taps": ("dflash", TAPS, ONE_LAYER_EARLY),
    "block: width 1": ("dflash", f"{DFLASH}.DFlash.advance", in_wide_steps_only),
    "block: active": ("dflash", f"{DFLASH}.kept_rows", ACTIVE),
    "block: padding": (
        "dflash", f"{DFLASH}.kept_rows",
        gives(lambda both, rows, *_: (both[0], in_a_page(both[1], rows))),
    ),
    "block: not pulled": ("dflash", PAIR_RUNS, gives(without_draft_region)),
    "block: noise": ("dflash", f"{DFLASH}.draw_drafts", PLACE_BEFORE),
    "block: positions": (
        "dflash", f"{DFLASH}.read_rows",
        gives(lambda found, *_: replace(found, positions=found.positions + 1)),
    ),
    "block: causal": ("dflash", "worker.drafts.drafter_config.KeyMask", lambda _: seen_causally),
    "block: mask": (
        "dflash", "worker.drafts.dflash.DFlashDrafter.embed",
        given(lambda model, ids, block: (
            model, ids + (torch.arange(len(ids)) % block > 0), block
        )),
    ),
}  # fmt: skip


@pytest.mark.whole  # test_drafters.py has them, too
@pytest.mark.parametrize("form", ["dflash", "eagle", "eagle3", "mtp"])
def test_the_laws_hold(form: str, known: Known) -> None:
    obeys(known, form)


@pytest.mark.parametrize("name", one_in(8, MUTANTS))
def test_the_laws_fail_for_a_mutant(name: str, known: Known, monkeypatch) -> None:
    form, target, wrong = MUTANTS[name]
    known.directory(form)  # fitted before anything is wrong
    owner, _, attribute = target.rpartition(".")
    found = pkgutil.resolve_name(owner)
    monkeypatch.setattr(found, attribute, wrong(getattr(found, attribute)))
    with pytest.raises(AssertionError):
        obeys(known, form, graph="padding" in name)


def test_long_steps_compute_all_hidden_states_where_a_drafter_reads_them(known, monkeypatch):
    """A drafter that is fed with the last layer would have junk in its pages otherwise."""
    monkeypatch.setattr("worker.step.buffers.LONG_STEP_TOKENS", 32)
    for form in ("eagle3 last", *more("mtp", "eagle3")):
        obeys(known, form)
