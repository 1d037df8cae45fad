"""Windows of drafts change how many tokens a step yields, never which: the laws of speculation.

The drafts are an oracle's: the true continuation with errors at chosen places. Text, finish reasons
and logprobs have to equal those of plain decode, and the accept trace what the oracle implies, for
requests of every kind that wait for, preempt and share few rows and pages.
"""

import operator
import pkgutil
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from llguidance import LLMatcher
from torch import Tensor

from tests.support.any_width import AnyWidth
from tests.support.delay_mix import NUM_PAGES, Delays, Plain, differing, sections, seeded_mix
from tests.support.engines import Answer, value
from tests.support.lockstep import DECODE, Ask, Lockstep
from tests.support.oracle import Oracle, Script, check_windows
from tests.support.pairwise import in_whole, more, one_in, whole
from tests.support.prompts import TINY, problem_ids
from worker.api import Sampling, Window
from worker.forward.draws import Masks
from worker.step.rows import SampledRows


def requests() -> list[Ask]:
    """Every second one asks for its trace. Some have grammars in which every token allows others
    than the one before, and which end within a window.
    """
    asked = seeded_mix()
    asked[::2] = [ask.but(return_trace=True) for ask in asked[::2]]
    for number, times in ((9, 4), (14, 30), (2, 7)):
        grammar = LLMatcher.grammar_from_regex(f"([0-9][a-z]){{{times}}}")
        asked[number] = asked[number].but(grammar=grammar)
    return asked


def workers(
    num_prefill: int, page_size: int, widths: tuple[int, ...], *, overlap: bool = True, **spec: Any
) -> Lockstep:
    config = sections("cpu", "always" if num_prefill else "never")
    config["kv"]["page_size"] = page_size
    config["engine"]["num_pages"] = NUM_PAGES * 16 // page_size
    config["spec"] = {"widths": list(widths), **spec}
    made = Lockstep(config, num_prefill=num_prefill)
    made.decode.scheduler.widths = AnyWidth(widths, random.Random(3))
    if not overlap:
        made.one_at_a_time()
    return made


def scripts(asked: list[Ask], answers: list[Answer], seed: int = 1) -> dict[int, Script]:
    """Every second draft, or every third, ... is wrong or missing, or none: by request.

    Where a stop id ends the answer none is, so that it is drawn within a window.
    """
    rng, found = random.Random(seed), {}
    for number, (ask, answer) in enumerate(zip(asked, answers, strict=True)):
        text = [*ask.prompt, *answer.tokens]
        places = range(len(ask.prompt) + number % 3, len(text), 2 + number % 17)
        places = () if text[-1] in ask.sampling.stop_ids else places
        wrong = {at: rng.choice((-1, (text[at] + 1) % 1000)) for at in places}
        found[ask.sampling.seed] = Script.of(text, wrong)
    return found


@pytest.fixture(scope="module")
def plain() -> Plain:
    asked, made = requests(), workers(0, 16, (1,))
    answers = made.serve(asked)
    assert value(made.engines[DECODE].metrics.preemptions) > 5, "pages were not short"
    ends = zip(asked, (answer.tokens[-1:] for answer in answers), strict=True)
    assert sum(not {*last}.isdisjoint(ask.sampling.stop_ids) for ask, last in ends) > 2, "no stops"
    made.close()
    return asked, answers


@pytest.mark.product(
    widths=((3,), (1, 2, 4, 8, 16), *more((2,), (4,), (8,), (16,))),
    page_size=(16, 1, *more(64)),
    num_prefill=(0, 1),
    overlap=(True, False),
)
def test_windows_change_no_token(widths, page_size, num_prefill, overlap, plain: Plain) -> None:
    asked, wanted = plain
    made, known = workers(num_prefill, page_size, widths, overlap=overlap), scripts(*plain)
    Oracle(made.engines[DECODE], known)
    check_told(made, asked, obeys(made, asked, wanted, known))
    if page_size == 16 and min(widths) < 4:  # with wide windows alone requests end too early
        assert value(made.engines[DECODE].metrics.preemptions) > 0
    kept = {window.num for windows in made.windows.values() for window in windows}
    assert 1 in kept
    assert 2 in kept or min(widths) == 16
    assert max(kept) >= min(4, max(widths)), "few drafts were accepted"
    masked = [number for number, ask in enumerate(asked) if ask.sampling.grammar]
    assert any(window.num > 1 for number in masked for window in made.windows[number])


def check_told(made: Lockstep, asked: list[Ask], found: list[Answer]) -> None:
    """What a request is told of its windows, and what is counted, is what the scheduler settled."""
    for number, (ask, answer) in enumerate(zip(asked, found, strict=True)):
        if not ask.sampling.return_trace:
            assert not answer.windows
        elif ask.abort is None and not ask.abort_in_chunk and ask.cut is None:
            assert answer.windows == [  # of the others the last chunk may have come too late
                Window(each.position, each.width, each.drafts, each.num - 1)
                for each in made.windows[number]
            ]
            for before, after in pairwise(answer.windows):  # tokens of a prefill may lie between
                assert before.position + before.num_accepted + 1 <= after.position
    wide = [each for settled in made.windows.values() for each in settled if each.width > 1]
    windows = made.engines[DECODE].meter.windows
    assert windows.num_windows == len(wide)
    places = range(1, len(windows.accepted) + 1)
    assert windows.accepted == [sum(each.num > at for each in wide) for at in places]


@pytest.mark.parametrize("num_prefill", [1, *in_whole((0,))])
def test_delays_change_no_token_of_windows_that_change(num_prefill: int, plain: Plain) -> None:
    asked, wanted = plain
    made = workers(num_prefill, 16, (1, 2, 4, 8))
    Oracle(made.engines[DECODE], scripts(*plain))
    put = Delays(made, 5)
    found = made.serve(asked)
    made.close()
    assert put.num_on_device > 100
    assert not differing(asked, found, wanted, exact=False)


def ends(ask: Ask, made: Lockstep) -> tuple[int, Callable[[int, int], bool]]:
    """Where a request ends: its max_len, and whether a token at a position is a stop."""
    sampling, num = ask.sampling, len(ask.prompt)
    eos = () if sampling.ignore_eos else made.engines[DECODE].shape.eos_token_ids
    stops, least = {*sampling.stop_ids, *eos}, num + sampling.min_tokens
    return num + sampling.max_tokens, lambda token, at: token in stops and at >= least


ENDS = ("wrong draft", "max_tokens", "stop id", "stop id below min_tokens")


def ending(how: str, place: int, text: Sequence[int], num: int) -> tuple[Sampling, dict[int, int]]:
    """What ends the run of drafts behind the first window, which yields one token, at `place`.

    text: of the request, `num` of it prompt. Returns also what is wrong with the drafts.
    """
    at = 1 + place  # of the output
    long = Sampling(len(text) - num, temperature=0.0, ignore_eos=True)
    match how:
        case "wrong draft":
            return long, {num + at: (text[num + at] + 1) % 1000}
        case "max_tokens":
            return msgspec.structs.replace(long, max_tokens=at + 1), {}
        case "stop id":
            return msgspec.structs.replace(long, stop_ids=(text[num + at],)), {}
    stop = text[num + at]
    return msgspec.structs.replace(long, stop_ids=(stop,), min_tokens=at + 1), {num + at: stop}


@pytest.mark.parametrize("width", [4, *more(2, 3, 8, 16)])
def test_a_run_ends_at_every_place_and_offset_of_a_page(width: int) -> None:
    """Greedy and seeded requests; their prompts have every length modulo the page."""
    cases = [(how, place) for place in range(1, width + 1) for how in ENDS]
    cases *= max(2, 16 // width) if whole else max(1, 8 // width)
    ids = problem_ids(32)
    prompts = [(ids[i] + ids[i + 1])[: 20 + i] for i in range(31)]
    drawn = [{"temperature": (0.0, 0.8, 0.0)[seed % 3], "seed": seed} for seed in range(len(cases))]
    base, asked, texts, errors = workers(0, 16, (1,)), [], [], []
    before = [
        Ask(prompts[seed % 31], Sampling(2 * width + 4, ignore_eos=True, **each))
        for seed, each in enumerate(drawn)
    ]
    for seed, (first, answer) in enumerate(zip(before, base.serve(before), strict=True)):
        text = [*first.prompt, *answer.tokens]
        sampling, wrong = ending(*cases[seed], text, len(first.prompt))
        asked.append(Ask(first.prompt, sampling).but(**drawn[seed]))
        texts.append(text)
        errors.append(wrong)
    wanted = base.serve(asked)
    base.close()
    scripted = {}
    for seed, (ask, answer) in enumerate(zip(asked, wanted, strict=True)):
        own = [*ask.prompt, *answer.tokens]  # what lies behind its end is proposed, too
        scripted[seed] = Script.of(own + texts[seed][len(own) :], errors[seed])
    made = workers(0, 16, (width,))
    Oracle(made.engines[DECODE], scripted)
    obeys(made, asked, wanted, scripted)
    kept = {(w.num, w.position % 16) for windows in made.windows.values() for w in windows}
    lengths = {num for num, _ in kept}  # an earlier stop id cuts some runs short
    assert lengths == set(range(1, width + 1)) or (width == 16 and not whole and len(lengths) > 12)
    assert {offset for _, offset in kept} == set(range(16))


@pytest.mark.parametrize("width", [16, *in_whole((3,))])
def test_windows_pass_the_last_position_of_the_model(width: int) -> None:
    """The rotary table ends there, and so do the row's pages but for a window."""
    found = []
    for widths in ((1,), (width,)):
        config = sections("cpu", "never", num_pages=300, max_prefill_tokens=512, strict=True)
        config["model"] |= {"max_model_len": "auto", "path": str(TINY.with_name("tiny-moe"))}
        config["spec"] = {"widths": list(widths)}
        made = Lockstep(config, num_prefill=0)
        longest = made.engines[DECODE].shape.max_position_embeddings
        prompt = sum(problem_ids(100), ())[: longest - 12]
        asked = [Ask(prompt, Sampling(12, temperature=0.0, ignore_eos=True, seed=7))]
        if found:
            text = [*prompt, *found[0][0].tokens]
            Oracle(made.engines[DECODE], {7: Script.of(text, {longest - 4: -1})})
        found.append(made.serve(asked))
        made.close()
    assert found[0][0].tokens == found[1][0].tokens
    assert len(found[1][0].tokens) == 12


# Mutants: what would go wrong in silence. Each has to change a text or a trace.


def same_noise_in_the_whole_window(real: Any) -> Any:
    def gather(state: Any, rows: Tensor, position: Tensor) -> Any:
        width = len(rows) // max(1, len(rows.unique_consecutive()))
        return real(state, rows, position // width * width if width > 1 else position)

    return gather


def accepts_without_comparing(real: Any) -> Any:
    def accept(sampled: SampledRows, draws: Tensor, *rest: Any) -> Tensor:
        return real(sampled, draws, *rest[:3], torch.full_like(draws, 99))

    return accept


def one_token_too_many(real: Any) -> Any:
    """A row keeps its draw behind the first wrong draft."""

    def accept(sampled: SampledRows, draws: Tensor, *rest: Any) -> Tensor:
        width = sampled.width
        if width == 1:
            return real(sampled, draws, *rest)
        drafts = rest[2].drafts[sampled.rows, : width - 1]
        right = (draws.view(-1, width)[:, :-1] == drafts).long().cumprod(1).sum(1) + 1
        return real(sampled, draws, *rest[:3], right.repeat_interleave(width))

    return accept


def stops_count_in_the_first_row_only(real: Any) -> Any:
    def accept(sampled: SampledRows, draws: Tensor, stops: Tensor, *rest: Any) -> Tensor:
        width = sampled.width
        is_first = (stops[::width] == draws[::width, None]).any(1)
        stops = torch.where(is_first.repeat_interleave(width)[:, None], stops, -1)
        return real(sampled, draws, stops, *rest)

    return accept


def drafts_one_place_late(real: Any) -> Any:
    def read(rows: Tensor, columns: Any, page_size: int, num_pages: int, width: int = 1) -> Any:
        late = replace(columns, drafts=columns.drafts.roll(1, 1))
        return real(rows, late, page_size, num_pages, width)

    return read


def binds_no_slots_behind_the_end(bound: int, width: int, ahead: int, max_len: int) -> int:
    """Windows write there, and the page table has what other rows have had."""
    return min(bound + 2 * width, max_len)


def binds_no_slots_of_steps_in_flight(bound: int, width: int, ahead: int, max_len: int) -> int:
    return min(bound + 1, max_len + width - 1)


def rejected_kv_is_committed(real: Any) -> Any:
    """The host's bound is used as a length."""

    def commit(hold: Any, tokens: Sequence[int]) -> None:
        pages = len(hold.pages) * 16
        real(hold, [*tokens, *range(pages)][: max(len(tokens), pages)])

    return commit


def masks_of_the_first_row_only(real: Any) -> Any:
    def masks(matchers: Any, drafts: Any = ()) -> Masks:
        width = len(drafts[0]) + 1 if drafts else 1
        words, line = real(matchers)
        return Masks(words, line.repeat_interleave(width))

    return masks


# Of a module or class, or of an object of the decode worker's.
ACCEPT, SLOTS = "runner.loaded.state.accept", "worker.schedule.decode.window_slots"
MUTANTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "noise": ("worker.draw.sampler.SamplingRows.gather", same_noise_in_the_whole_window),
    "accept all": (ACCEPT, accepts_without_comparing),
    "one too many": (ACCEPT, one_token_too_many),
    "stops": (ACCEPT, stops_count_in_the_first_row_only),
    "drafts": ("worker.step.state.read_rows", drafts_one_place_late),
    "behind the end": (SLOTS, lambda _: binds_no_slots_behind_the_end),
    "slots": (SLOTS, lambda _: binds_no_slots_of_steps_in_flight),
    "commit": ("book.commit", rejected_kv_is_committed),
    "masks": ("requests.admission.grammars.masks", masks_of_the_first_row_only),
}


@pytest.mark.parametrize("name", one_in(8, MUTANTS))
def test_the_laws_fail_for_a_mutant(name: str, plain: Plain, monkeypatch) -> None:
    asked, wanted = plain
    known = scripts(*plain)
    # A token behind a stop is there to be kept where the stop is not its window's last.
    page_size, width = {"behind the end": (1, 16), "stops": (16, 8)}.get(name, (16, 4))
    made = workers(0, page_size, (width,))
    Oracle(made.engines[DECODE], known)
    target, wrong = MUTANTS[name]
    owner, _, attribute = target.rpartition(".")
    if owner.startswith("worker."):
        patched = pkgutil.resolve_name(owner)
    else:
        root = made.decode if owner.startswith("requests.") else made.engines[DECODE]
        patched = operator.attrgetter(owner)(root)
    monkeypatch.setattr(patched, attribute, wrong(getattr(patched, attribute)))
    with pytest.raises((AssertionError, IndexError)):
        obeys(made, asked, wanted, known)


def obeys(
    made: Lockstep, asked: list[Ask], wanted: list[Answer], known: dict[int, Script]
) -> list[Answer]:
    """The answers to `asked`: text and traces are as they have to be."""
    found = made.serve(asked)
    made.close()
    assert not differing(asked, found, wanted, exact=False)
    for number, ask in enumerate(asked):
        if ask.cut is None and ask.abort is None:
            check_windows(made.windows[number], known[ask.sampling.seed], *ends(ask, made))
    return found
