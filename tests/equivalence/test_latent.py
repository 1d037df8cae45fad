"""Models with latent attention against `transformers`; their two forms; mutants are red."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equivalence import test_dense_laws as dense_laws
from tests.equivalence import test_models as models
from tests.equivalence.test_eight_bit_kv import WAYS
from tests.equivalence.test_hybrid_mutants import mutate
from tests.support.latents import LATENT, save_latent
from tests.support.pairwise import in_whole, one_in
from tests.support.places import place
from worker.config.checkpoint.experts import Division
from worker.model import latent as layer

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def saved(case: str) -> tuple[Path, torch.nn.Module]:
    """(directory of a model, transformers' own)."""
    path = place("latent") / case
    return path, save_latent(path, case)


@cache
def greedy(case: str) -> list[list[int]]:
    """What transformers continues the prompts of the laws with."""
    return dense_laws.greedy(saved(case)[1])


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of more than a few tokens are expanded, of long texts a few heads at a time."""
    monkeypatch.setattr(layer, "MAX_ABSORBED", 6)
    monkeypatch.setattr(layer, "MAX_EXPANDED", 90)


@pytest.mark.parametrize("case", LATENT)
def test_logits_and_greedy_ids_equal_transformers(case: str) -> None:
    path, reference = saved(case)
    models.assert_same(reference, path, chunks=(64, 5))


@pytest.mark.parametrize("case", LATENT)
def test_expanded_prompts_equal_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a token too, with as many keys as heads can be made of at once, and with more."""
    monkeypatch.setattr(layer, "MAX_ABSORBED", 0)
    monkeypatch.setattr(layer, "MAX_EXPANDED", 30)
    path, reference = saved(case)
    models.assert_same(reference, path, chunks=(64, 5))


@pytest.mark.parametrize("case", one_in(2, ("v3", "v2-lite")))
@torch.inference_mode()
def test_both_forms_are_within_rounding_at_every_length(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of chunks that begin a prompt and that continue it; of one token to all."""
    longest = max(map(len, models.PROMPTS))
    for chunk in range(1, longest + 1):
        found = []
        for most in (longest, 0):
            monkeypatch.setattr(layer, "MAX_ABSORBED", most)
            engine = models.Engine(models.load(saved(case)[0]))
            found.append(torch.cat([x for step in engine.prefill(chunk) for x in step]))
            engine.pool.close()
        assert not torch.equal(*found), "one form stood for both"
        assert (found[0] - found[1]).abs().max() < 2e-5 * found[0].abs().max(), chunk


@pytest.mark.parametrize(
    ("case", "division"),
    [("v3", "tensor"), *in_whole(("v3", "expert"), ("v2-lite", "expert"), ("v2", "tensor"))],
)
def test_two_ranks_equal_one(case: str, division: Division, tmp_path: Path) -> None:
    models.assert_two_ranks_equal_one(saved(case)[0], tmp_path, experts=division)


SERVED = [(case, way) for case in ("v3", "v2-lite") for way in WAYS]
SHORT = [
    ("v3", "pulled, two ranks, ngram"), ("v3", "preempted"),
    ("v2-lite", "pulled from two ranks"), ("v2-lite", "chunks, ngram"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "way"), [*SHORT, *in_whole(*(each for each in SERVED if each not in SHORT))]
)
def test_whatever_serves_a_request_changes_nothing(case: str, way: str) -> None:
    assert dense_laws.served(saved(case)[0], WAYS[way]) == greedy(case)


@pytest.mark.usefixtures("expanded")
@pytest.mark.parametrize(
    ("case", "way"),
    [*SHORT[::-2], *in_whole(*(each for each in SERVED if each not in SHORT[::-2]))],
)
def test_nor_does_it_where_prompts_are_expanded(case: str, way: str) -> None:
    assert dense_laws.served(saved(case)[0], WAYS[way]) == greedy(case)


@pytest.mark.parametrize("chunks", ["pieces", *in_whole(("whole",))])
@pytest.mark.parametrize("case", ["v3", *in_whole(("v2-lite",))])
def test_replays_change_nothing(case: str, chunks: str) -> None:
    dense_laws.check_replays(saved(case)[0], greedy(case), chunks)


@pytest.mark.usefixtures("expanded")
@pytest.mark.parametrize("chunks", ["pieces", *in_whole(("whole",))])
@pytest.mark.parametrize("case", ["v2-lite", *in_whole(("v3",))])
def test_nor_do_those_of_expanded_prompts(case: str, chunks: str) -> None:
    dense_laws.check_replays(saved(case)[0], greedy(case), chunks)
