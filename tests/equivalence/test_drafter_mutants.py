"""What goes wrong in drafters without a word turns the laws red."""

from __future__ import annotations

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
from tests.support.counted import value
from tests.support.drafter_cases import Known, judge, reference_of, speculation
from tests.support.drafter_workers import workers
from tests.support.lockstep import DECODE, Ask
from tests.support.pairwise import more
from worker.ops.mask import KeyMask
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
    return replace(ask, sampling=msgspec.structs.replace(ask.sampling, max_tokens=most))


def check(made: Any, asked: list[Ask], directory: Path) -> None:
    made.windows.clear()
    assert judge(made, asked, made.serve(asked), reference_of(directory)) > 10


def taps_one_layer_early(real: Any) -> Any:
    return lambda taps, layer: real(taps, layer + 1)


def taps_that_nobody_writes(real: Any) -> Any:
    """As a graph that replays without them."""
    return lambda taps, layer: None


def injects_in_wide_steps_only(real: Any) -> Any:
    def advance(chain: Any, sampled: Any, *rest: Any, **options: Any) -> None:
        if sampled.width > 1:
            real(chain, sampled, *rest, **options)

    return advance


def seeds_nothing(real: Any) -> Any:
    return lambda chain, rows: None


def injects_what_is_active(real: Any) -> Any:
    """The last tokens of a request that ends are missing."""

    def place(sampled: SampledRows, drawn: Tensor, columns: Any, *rest: Any):
        active = columns.active[sampled.rows]
        return real(replace(sampled, valid=active), drawn, columns, *rest)

    return place


def injects_rejected_rows(real: Any) -> Any:
    def place(sampled: SampledRows, drawn: Tensor, *rest: Any):
        width = sampled.width
        return real(sampled, drawn.index_fill(1, torch.tensor([width]), width), *rest)

    return place


def a_length_too_long(real: Any) -> Any:
    """The host's bound, where the device's length belongs."""

    def place(*given: Any):
        steps = real(*given)
        return steps._replace(draft_lens=steps.draft_lens + 1)

    return place


def padding_into_a_page(real: Any) -> Any:
    def place(sampled: SampledRows, *rest: Any):
        steps = real(sampled, *rest)
        padding = ~sampled.valid.repeat_interleave(sampled.width)
        return steps._replace(slots=torch.where(padding, 16 + 3, steps.slots))

    return place


def no_tail_of_a_last_page(real: Any) -> Any:
    """Of the page in which a prompt ends: where decode begins."""

    def observe(chain: Any, batch: Any, hidden: Tensor) -> None:
        ends = batch.positions % 16 == 15
        draft = replace(batch.draft, tail_pages=batch.draft.tail_pages * ends)
        real(chain, replace(batch, draft=draft), hidden)

    return observe


def features_not_shifted(real: Any) -> Any:
    def observe(chain: Any, batch: Any, hidden: Tensor) -> None:
        source = torch.arange(batch.num_tokens)
        real(chain, replace(batch, draft=replace(batch.draft, source=source)), hidden)

    return observe


def the_draft_region_is_not_pulled(real: Any) -> Any:
    def runs(pair: Any, *args: Any) -> Any:
        number = [region.name for region in pair.local.regions].index("draft")
        return [run for run in real(pair, *args) if run[0] != number]

    return runs


def noise_of_the_place_before(real: Any) -> Any:
    def draw(logits: Tensor, rows: Tensor, position: Tensor, *rest: Any) -> Tensor:
        return real(logits, rows, position - 1, *rest)

    return draw


def noise_by_draft_id(real: Any) -> Any:
    def draw(*given: Any) -> Tensor:
        *first, ids, drafts, _ = given
        found = real(*first, None, drafts)
        drafts[given[1]] = torch.where(drafts[given[1]] >= 0, ids[found][:, None], -1)
        return ids[found]

    return draw


def feeds_back_the_normed_output(real: Any) -> Any:
    def forward(model: Any, *given: Any) -> tuple[Tensor, Tensor]:
        _, output = real(model, *given)
        return output, output

    return forward


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


def kept_padding_in_a_page(real: Any) -> Any:
    def place(sampled: SampledRows, *rest: Any):
        positions, slots = real(sampled, *rest)
        padding = ~sampled.valid.repeat_interleave(sampled.width)
        return positions, torch.where(padding, 16 + 3, slots)

    return place


def a_block_at_the_next_position(real: Any) -> Any:
    def read(*given: Any) -> Any:
        found = real(*given)
        return replace(found, positions=found.positions + 1)

    return read


def seen_causally(*, causal: bool, window: int | None) -> KeyMask:
    """Of layers whose rows see the whole block."""
    return KeyMask(causal=True, window=window)


def another_mask(real: Any) -> Any:
    def embed(model: Any, input_ids: Tensor, block: int) -> Tensor:
        first = torch.arange(len(input_ids)) % block == 0
        return real(model, torch.where(first, input_ids, input_ids + 1), block)

    return embed


CHAIN, MODEL = "worker.drafts.chain", "worker.drafts.chain_model.ChainDrafter"
DFLASH = "worker.drafts.dflash"
PAIR_RUNS = "worker.transfer.layout.RankPair.runs"
MUTANTS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "taps one layer early": ("eagle3", "worker.model.taps.Taps.after", taps_one_layer_early),
    "taps not written": ("eagle3", "worker.model.taps.Taps.after", taps_that_nobody_writes),
    "no inject at width 1": ("eagle3", f"{CHAIN}.Chain.advance", injects_in_wide_steps_only),
    "no seed": ("eagle", f"{CHAIN}.Chain.seed", seeds_nothing),
    "active, not valid": ("eagle3", f"{CHAIN}.draft_rows", injects_what_is_active),
    "rejected rows": ("eagle3", f"{CHAIN}.draft_rows", injects_rejected_rows),
    "a bound as length": ("eagle", f"{CHAIN}.draft_rows", a_length_too_long),
    "padding": ("eagle3", f"{CHAIN}.draft_rows", padding_into_a_page),
    "tail of the last page": ("mtp", f"{CHAIN}.Chain.observe", no_tail_of_a_last_page),
    "no shift": ("eagle3", f"{CHAIN}.Chain.observe", features_not_shifted),
    "not pulled": ("eagle3", PAIR_RUNS, the_draft_region_is_not_pulled),
    "noise's place": ("eagle3", f"{CHAIN}.draw_drafts", noise_of_the_place_before),
    "noise's id": ("eagle3", f"{CHAIN}.draw_drafts", noise_by_draft_id),
    "first key": ("eagle", "worker.drafts.build.FROM_KEY_1", lambda _: KeyMask()),
    "map without offset": (
        "eagle3", f"{MODEL}.id_map", lambda _: property(lambda model: torch.arange(300)),
    ),
    "normed fed back": ("eagle3", f"{MODEL}.forward", feeds_back_the_normed_output),
    "raw fed back": ("mtp", f"{MODEL}.forward", feeds_back_the_raw_output),
    "block: taps": ("dflash", "worker.model.taps.Taps.after", taps_one_layer_early),
    "block: width 1": ("dflash", f"{DFLASH}.DFlash.advance", injects_in_wide_steps_only),
    "block: active": ("dflash", f"{DFLASH}.kept_rows", injects_what_is_active),
    "block: padding": ("dflash", f"{DFLASH}.kept_rows", kept_padding_in_a_page),
    "block: not pulled": ("dflash", PAIR_RUNS, the_draft_region_is_not_pulled),
    "block: noise": ("dflash", f"{DFLASH}.draw_drafts", noise_of_the_place_before),
    "block: positions": ("dflash", f"{DFLASH}.read_rows", a_block_at_the_next_position),
    "block: causal": ("dflash", "worker.drafts.dflash_config.KeyMask", lambda _: seen_causally),
    "block: mask": ("dflash", "worker.drafts.dflash_model.DFlashDrafter.embed", another_mask),
}  # fmt: skip


@pytest.mark.parametrize("form", ["eagle3", "eagle", "mtp", "dflash"])
def test_the_laws_hold(form: str, known: Known) -> None:
    obeys(known, form)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_laws_fail_for_a_mutant(
    name: str, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, target, wrong = MUTANTS[name]
    known.directory(form)  # fitted before anything is wrong
    owner, _, attribute = target.rpartition(".")
    found = pkgutil.resolve_name(owner)
    monkeypatch.setattr(found, attribute, wrong(getattr(found, attribute)))
    with pytest.raises(AssertionError):
        obeys(known, form, graph="padding" in name)


def test_long_steps_compute_all_hidden_states_where_a_drafter_reads_them(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that is fed with the last layer would have junk in its pages otherwise."""
    monkeypatch.setattr("worker.step.buffers.LONG_STEP_TOKENS", 32)
    for form in ("mtp", "eagle3 last", *more("eagle3")):
        obeys(known, form)
