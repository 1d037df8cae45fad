"""KV in eight bits: the same request gives the same ids, whatever serves it.

Against itself, not against `transformers`: it is another model than the one in 32 bits, and a near
one (`python -m benchmarks.accuracy --set kv.dtype=float8_e4m3fn`).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.train.problems import held_out_problems
from tests.contract import test_eight_bits as contract
from tests.contract import test_latent_attention as latents
from tests.equivalence import test_dense_laws as dense_laws
from tests.equivalence import test_models as models
from tests.equivalence.test_dense_laws import SERVED, saved
from tests.equivalence.test_hybrid_mutants import mutate
from tests.support.identity import WITHOUT_EIGHT_BITS
from tests.support.pairwise import in_whole, one_in
from tests.support.prompts import chat_ids, tokenizer
from worker.config import BUNDLED, ModelConfig

EIGHT = "float8_e4m3fn"
WAYS: dict[str, dict[str, Any]] = SERVED | {
    "preempted": {"mode": "always", "num_pages": 14, "growth_tokens": 4}
}
pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def alone(case: str) -> list[list[int]]:
    return served(case, "here")


def served(case: str, way: str, dtype: str = EIGHT) -> list[list[int]]:
    return dense_laws.served(saved(case)[0], WAYS[way], dtype)


SHORT = ("pulled", "preempted")  # of gemma2 alone without --whole
REST = [(way,) for way in WAYS if way not in (*SHORT, "here")]


@pytest.mark.parametrize("way", [SHORT[1], *in_whole(SHORT[:1], *REST)])
@pytest.mark.parametrize("case", ["gemma2", *in_whole(("granite",), ("mixtral",))])
def test_whatever_serves_a_request_changes_nothing(case: str, way: str) -> None:
    assert served(case, way) == alone(case)


@pytest.mark.parametrize("way", ["pulled", *in_whole(("chunks, ngram",))])
def test_nor_does_it_where_pages_go_back_behind_a_window(way: str) -> None:
    assert served("mistral-window", way) == alone("mistral-window")


@pytest.mark.parametrize(
    ("where", "old", "new"),
    one_in(
        4,
        [
            ("attention.qk_rope_store:store_rows_ref", "= exponents", "= 127"),
            ("cache.eight_bits:quantized", "- 8 +", "- 9 +"),
            ("cache.eight_bits:quantized", "> 0x600000", "> 0x700000"),
            ("cache.eight_bits:quantized", "wide.abs()", "wide"),
            ("cache.eight_bits:exponents_of", "rows * head_dim", "head_dim"),
            ("cache.eight_bits:dequantized", "<< 23", "<< 22"),
            ("attention.latent:read_rows", "(kept)[:, 0]", "(kept)[:, 0].roll(1, 1)"),
        ],
    ),
)
def test_a_mutant_is_red(where: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, where, old, new)
    with pytest.raises(AssertionError):  # noqa: PT012 - whichever of them
        contract.test_every_number_is_near_and_every_row_uses_the_range()
        contract.test_a_page_has_exponents_and_no_number_overlaps(96, 16)
        contract.test_attention_is_that_over_what_the_cache_is_worth(
            "reference", "mixed", 32, "16", "causal"
        )
        latents.test_rows_in_eight_bits_are_read_back_as_they_are_worth()


def mean_kl(whole: Callable[[], models.Engine], eight: Callable[[], models.Engine]) -> float:
    """Of the next token's distribution over problems with their answers, in nats."""
    problems, diverged = held_out_problems(8), list[torch.Tensor]()
    texts = [[*chat_ids(each.question), *tokenizer().encode(each.answer).ids] for each in problems]
    texts = [text[: models.PAGE_SIZE * 12] for text in texts]
    for pair in zip(texts[::2], texts[1::2], strict=True):
        found = []
        for made in (whole, eight):
            engine = made()
            found.append(torch.cat(engine.step([0, 0], list(pair))).log_softmax(-1))
            engine.pool.close()
        diverged.append(((found[0] - found[1]) * found[0].exp()).sum(-1))
    return float(torch.cat(diverged).mean())


@pytest.mark.parametrize("name", one_in(2, [n for n in BUNDLED if n not in WITHOUT_EIGHT_BITS]))
def test_a_bundled_model_says_nearly_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean KL of the next token's distribution over problems with their answers, in nats.

    Nearly all of it is of the questions, which the models were not taught to say. tiny-latent's
    is of rotated keys: it is 0.022 where latents alone are in eight bits, and answers are the same.
    """
    monkeypatch.setattr(models, "PAGE_SIZE", 16)
    path = ModelConfig(path=name).directory
    engines = [
        lambda dtype=dtype: models.Engine(models.load(path), kv_dtype=dtype)
        for dtype in ("float32", EIGHT)
    ]
    kl = mean_kl(*engines)
    print(f"{name}: mean KL {kl:.2g} nats")
    assert 0 < kl <= (0.1 if name == "tiny-latent" else 0.02)
