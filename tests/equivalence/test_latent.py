"""Models with latent attention against `transformers`; their two forms; mutants are red."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.accuracy import load_model
from tests.equivalence import test_dense_laws as dense_laws
from tests.equivalence import test_models as models
from tests.equivalence.test_eight_bit_kv import EIGHT, WAYS
from tests.equivalence.test_hybrid_mutants import mutate
from tests.support.chain_rows import ChainRows
from tests.support.engines import running, value
from tests.support.latents import LATENT, add_mtp, save_latent
from tests.support.pairwise import in_whole, one_in
from tests.support.places import place
from worker.attention import latent as backend
from worker.cache.layout import ModelLayout
from worker.config import BUNDLED, ModelConfig
from worker.config.checkpoint.experts import Division
from worker.config.checkpoint.shape import read_model_shape
from worker.drafts.chain import ChainDrafter
from worker.drafts.drafter_config import read_chain_shape
from worker.errors import UserError
from worker.model import experts
from worker.model import latent as layer
from worker.model.kinds import Cut, regions_of
from worker.start.check import check_kv, kv_token_bytes
from worker.weights import plain

pytestmark = pytest.mark.usefixtures("one_thread")


@cache
def saved(case: str) -> tuple[Path, torch.nn.Module]:
    """(directory of a model, transformers' own)."""
    if case in BUNDLED:
        path = ModelConfig(path=case).directory
        return path, load_model(path)[0]
    path = place("latent") / case
    return path, save_latent(path, case)


@cache
def greedy(case: str) -> list[list[int]]:
    """What transformers continues the prompts of the laws with."""
    return dense_laws.greedy(saved(case)[1])


@pytest.fixture
def expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of more than a few tokens are expanded, of long texts a few heads at a time."""
    monkeypatch.setattr(backend, "MAX_ABSORBED", 3)
    monkeypatch.setattr(layer, "MAX_EXPANDED", 30)


@pytest.mark.parametrize("case", one_in(2, LATENT))
def test_logits_and_greedy_ids_equal_transformers(case: str) -> None:
    path, reference = saved(case)
    models.assert_same(reference, path, chunks=(64, 5))


@pytest.mark.parametrize("case", one_in(4, LATENT))
def test_expanded_prompts_equal_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a token too, with as many keys as heads can be made of at once, and with more."""
    monkeypatch.setattr(backend, "MAX_ABSORBED", 0)
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
            monkeypatch.setattr(backend, "MAX_ABSORBED", most)
            engine = models.Engine(models.load(saved(case)[0]))
            found.append(torch.cat([x for step in engine.prefill(chunk) for x in step]))
            engine.pool.close()
        assert not torch.equal(*found), "one form stood for both"
        assert (found[0] - found[1]).abs().max() < 2e-5 * found[0].abs().max(), chunk


@pytest.mark.parametrize("num", models.RANKS)
@pytest.mark.parametrize(
    ("case", "division"),
    [("v3", "tensor"), *in_whole(("v3", "expert"), ("v2-lite", "expert"), ("v2", "tensor"))],
)
def test_ranks_equal_one(case: str, division: Division, num: int, tmp_path: Path) -> None:
    models.assert_ranks_equal_one(num, saved(case)[0], tmp_path, experts=division)


SERVED = [(case, way) for case in ("v3", "v2-lite") for way in WAYS]
SHORT = [
    ("v3", "pulled, two ranks, ngram"), ("v3", "preempted"),
    ("v2-lite", "pulled from two ranks"), ("v2-lite", "chunks, ngram"),
]  # fmt: skip
TRAINED = "tiny-latent", "pulled, two ranks, ngram"


@pytest.mark.parametrize(
    ("case", "way"), [*SHORT, TRAINED, *in_whole(*(each for each in SERVED if each not in SHORT))]
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


@cache
def alone_in_eight_bits(case: str) -> list[list[int]]:
    """With latents in eight bits, the same model against itself: see test_eight_bit_kv."""
    return dense_laws.served(saved(case)[0], WAYS["here"], EIGHT)


IN_EIGHT_BITS = [(case, way) for case in ("v3", "v2-lite", "tiny-latent") for way in WAYS]


@pytest.mark.parametrize(
    ("case", "way"), [TRAINED, *in_whole(*(each for each in IN_EIGHT_BITS if each != TRAINED))]
)
def test_nor_does_it_with_latents_in_eight_bits(case: str, way: str) -> None:
    assert dense_laws.served(saved(case)[0], WAYS[way], EIGHT) == alone_in_eight_bits(case)


@pytest.mark.parametrize(
    ("case", "way"),
    [("v2-lite", "pulled"), *in_whole(*(each for each in IN_EIGHT_BITS if each[0] != "v2-lite"))],
)
def test_nor_where_those_are_read_back_to_be_expanded(
    case: str, way: str, request: pytest.FixtureRequest
) -> None:
    wanted = alone_in_eight_bits(case)
    request.getfixturevalue("expanded")
    assert dense_laws.served(saved(case)[0], WAYS[way], EIGHT) == wanted


@pytest.mark.parametrize("chunks", ["pieces", *in_whole(("whole",))])
@pytest.mark.parametrize("case", ["v3", *in_whole(("v2-lite",))])
def test_replays_change_nothing(case: str, chunks: str) -> None:
    dense_laws.check_replays(saved(case)[0], greedy(case), chunks)


@pytest.mark.usefixtures("expanded")
@pytest.mark.parametrize("chunks", ["pieces", *in_whole(("whole",))])
@pytest.mark.parametrize("case", ["v2-lite", *in_whole(("v3",))])
def test_nor_do_those_of_expanded_prompts(case: str, chunks: str) -> None:
    dense_laws.check_replays(saved(case)[0], greedy(case), chunks)


@pytest.mark.parametrize("chunks", ["pieces", *in_whole(("whole",))])
def test_nor_do_those_of_latents_in_eight_bits(chunks: str, request: pytest.FixtureRequest) -> None:
    wanted = alone_in_eight_bits("v3")
    request.getfixturevalue("expanded")
    dense_laws.check_replays(saved("v3")[0], wanted, chunks, EIGHT)


@cache
def drafting(case: str) -> tuple[Path, torch.nn.Module, torch.nn.Module]:
    """(directory of a model with a layer that drafts, both of transformers)."""
    path = place("latent-mtp") / case
    model = save_latent(path, case)
    return path, model, add_mtp(path, model)


@pytest.mark.parametrize("case", ["v3", *in_whole(("glm-flash",))])
@torch.inference_mode()
def test_drafts_of_its_own_layer_equal_transformers(case: str) -> None:
    """Rows on the target's output after its final norm, then rows on what the layer feeds back."""
    path, reference, layer = drafting(case)
    model: Any = reference.model
    target = models.load(path)
    drafter = ChainDrafter(read_chain_shape(path, target.shape, "mtp"), target, 64)
    drafter.fill(path)
    ids = torch.tensor(models.PROMPTS[0])
    hidden = model(ids[None], use_cache=False).last_hidden_state[0]
    rows, num, fed = ChainRows(drafter), len(ids), hidden[:-1]
    for length in range(num, num + 3):
        positions = torch.arange(1, length)[None]
        mask = torch.full((length - 1, length - 1), float("-inf")).triu(1)[None, None]
        told = fed[None], model.rotary_emb(hidden[None], positions), mask, positions, None
        wanted = layer(model.embed_tokens(ids[None, 1:length]), *told)[0]
        if length == num:
            rows.store(1, ids[1 : num - 1], fed[:-1])
        fed_back, taken = rows.forward(length - 1, ids[length - 1 : length], fed[-1:])
        assert torch.equal(fed_back, taken)
        assert (taken[0] - wanted[-1]).abs().max() < models.BOUND
        ids = torch.cat((ids, drafter.head.logits(taken)[0].argmax()[None]))
        fed = torch.cat((fed, fed_back))
    rows.pool.close()


@pytest.mark.parametrize(
    ("case", "way"),
    [
        ("v3", "pulled, two ranks, ngram"),
        *in_whole(*(("v3", way) for way in WAYS if way != "pulled, two ranks, ngram")),
        *in_whole(("glm-flash", "chunks, ngram")),
    ],
)
def test_its_own_layer_changes_nothing(case: str, way: str) -> None:
    """In windows of four where the law has n-grams, and where it has none."""
    how = WAYS[way] | {"drafter": "mtp", "widths": WAYS[way].get("widths", [4])}
    path, reference, _ = drafting(case)
    assert dense_laws.served(path, how, num=3) == dense_laws.greedy(reference)[:3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 0}, "0: no layer drafts"),
        ({"num_nextn_predict_layers": 2}, "2; supported: 1"),
        ({"index_share": 3}, "index_share: an unknown field"),
    ],
)
def test_other_layers_that_draft_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    add_mtp(tmp_path, save_latent(tmp_path, "v3"))
    target = read_model_shape(tmp_path)
    read_chain_shape(tmp_path, target, "mtp")
    models.edit(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        read_chain_shape(tmp_path, target, "mtp")


SHAPE, ATTENTION = "config.checkpoint.latent_shape", "attention.latent"
LAYER = "model.latent:LatentAttention"
EXPERTS, ROUTE = "config.checkpoint.experts", "ops.experts.route"
MUTANTS = [
    ("v2-lite", f"{SHAPE}:_gain", "return mscale * mscale", "return mscale"),
    ("v2-lite", f"{SHAPE}:_gain", "return mscale * mscale", "return 1.0"),
    ("v3", f"{ATTENTION}:pairs_rope_ref", "x[..., 0::2].float(), x[..., 1::2].float()",
     "x.float().chunk(2, -1)"),
    ("v3", f"{ATTENTION}:latent_rope_store_ref", "rms_norm_ref(latent, norm.weight, norm.eps)",
     "latent"),
    ("v3", f"{ATTENTION}:latent_rope_store_ref",
     "pairs_rope_ref(key.unsqueeze(1), rotation).squeeze(1)", "key"),
    ("v3", f"{ATTENTION}:latent_rope_store_ref", "pairs_rope_ref(q_rope, rotation)", "q_rope"),
    ("v3", f"{LAYER}.forward", "self.query(self.q_norm(q))", "self.query(q)"),
    ("v3", f"{LAYER}.shards", '"k": self.shape.nope_dim, "v": self.shape.value_dim',
     '"v": self.shape.value_dim, "k": self.shape.nope_dim'),
    ("v3", f"{LAYER}._expand", "batch.host.seq_lens", "batch.host.query_lens"),
    ("v3", f"{LAYER}._expand", "rows, heads)", "rows, slice(0, len(queries[heads])))"),
    ("v3", f"{LAYER}._expand", "start += count", "start += 0"),
    ("v3", f"{LAYER}._of_heads", ":value_dim]", "-value_dim:]"),
    ("v3", f"{LAYER}._of_heads", "is_causal=is_first", "is_causal=False"),
    ("v3", "model.latent:expansion", "torch.eye(shape.rope_dim)", "torch.ones(shape.rope_dim)"),
    ("v3", f"{LAYER}._of_heads", "self._causal(q.shape[1], len(rows))",
     "torch.ones(q.shape[1], len(rows), dtype=torch.bool).tril()"),
    ("v3", f"{ROUTE}:route_ref", "scores.gather(1, ids)", "chosen.gather(1, ids)"),
    ("v3", f"{ROUTE}:route_ref", "scores if bias is None else scores + bias", "scores"),
    ("v3", f"{ROUTE}:route_ref", "if shape.num_groups > 1:", "if False:"),
    ("v2", f"{ROUTE}:route_ref", "if shape.num_groups > 1:", "if False:"),
    ("v3", f"{ROUTE}:in_top_groups", "2 if shape.is_biased else 1", "1"),
    ("v2", f"{ROUTE}:in_top_groups", "2 if shape.is_biased else 1", "2"),
    ("v2", f"{ROUTE}:route_ref", "weights * shape.factor if shape.factor != 1 else weights",
     "weights"),
    ("glm-flash", f"{ROUTE}:route_ref", "if shape.renormalizes:", "if False:"),
    ("moonlight", f"{EXPERTS}:read_experts", "default=bool(names.shared)", "default=True) or (1"),
    ("v3", "model.experts:Experts.forward", "plus=shared", "plus=None"),
    ("v3", "weights.plain:PlainMatrix.experts", "len(x) <= MAX_BESIDE", "False"),
    ("v2-lite", f"{EXPERTS}:_sparse_layers", "range(first)", "range(0)"),
    ("glm-flash", f"{EXPERTS}:_sparse_layers", '== "sparse"', '!= "sparse"'),
]  # fmt: skip


@pytest.mark.usefixtures("expanded")
@pytest.mark.parametrize(("case", "where", "old", "new"), one_in(8, MUTANTS))
def test_a_mutant_is_red(
    case: str, where: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of seven tokens are expanded, and their shared experts are apart; not those of one."""
    path, reference = saved(case)
    for module in (experts, plain):
        monkeypatch.setattr(module, "MAX_BESIDE", 4)
    mutate(monkeypatch, where, old, new)
    try:
        errors = [error for error, _ in models.compared(reference, path, (7,))]
    except UserError:
        return
    assert max(errors) > models.BOUND


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, "n_group: 3 groups of 8 experts"),
        ({"topk_group": 5}, "topk_group: 3 experts of a token do not lie in 5 of 4 groups"),
        ({"topk_group": 1}, "topk_group: 3 experts of a token do not lie in 1 of 4 groups"),
        ({"mlp_layer_types": ["dense", "both", "sparse"]}, "mlp_layer_types: must name 3 layers"),
        ({"kv_lora_rank": 0}, "kv_lora_rank: must be a positive integer"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim: must be even"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok: 9 is more than"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_latent(tmp_path, "v3")
    read_model_shape(tmp_path)
    models.edit(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        read_model_shape(tmp_path)


def test_layers_may_have_experts_at_intervals(tmp_path: Path) -> None:
    """As DeepSeek's own code has it; transformers does not read the field."""
    save_latent(tmp_path, "v2", num_hidden_layers=6)
    models.edit(tmp_path, moe_layer_freq=2)
    assert read_model_shape(tmp_path).is_sparse == (False, False, True, False, True, False)


PUBLISHED = Path(__file__).parents[2] / "benchmarks/models"


@pytest.mark.parametrize(
    ("name", "num_layers", "num_bytes", "eight"),
    [
        ("deepseek-v2-lite", 27, 31_104, 16_038),
        ("deepseek-v3-4-layers", 61, 70_272, 36_234),
        ("glm-4.7-flash", 47, 54_144, 27_918),
    ],
)
def test_a_token_takes_the_bytes_of_its_latents(
    name: str, num_layers: int, num_bytes: int, eight: int, tmp_path: Path
) -> None:
    """On the wire and in the pool of every rank, however many there are.

    In eight bits 577 a layer, and 17 in which a page's rows begin anew at multiples of a row.
    """
    shutil.copy(PUBLISHED / f"{name}.json", tmp_path / "config.json")
    models.edit(tmp_path, num_hidden_layers=num_layers)
    assert kv_token_bytes(tmp_path, 64, "bfloat16", EIGHT) == [num_bytes, eight]
    assert eight == num_layers * (577 + 17)
    for dtype, size in (("bfloat16", num_bytes), (EIGHT, eight)):
        pages, state = regions_of(read_model_shape(tmp_path), Cut(64, 1, "bfloat16", dtype))
        assert (pages.num_kv_heads, pages.parts, pages.head_dim, state) == (1, 1, 576, None)
        layout = ModelLayout((pages,))
        assert layout.share(4, 3).page_bytes == layout.page_bytes == 64 * size


@pytest.mark.parametrize("dtype", ["auto", EIGHT])
def test_ranks_pull_each_latent_once(dtype: str) -> None:
    """Two ranks from one: each pulls its own copy of the pages of all tokens but the last."""
    path, prompt = saved("v3")[0], dense_laws.prompts()[-1]
    sections = dense_laws.sections(path, "always")
    sections["kv"]["dtype"] = dtype
    with running(sections, num_prefill=1, decode_tp=2) as cluster:
        cluster.client.generate([prompt], dense_laws.GREEDY)
        decode = cluster.workers["decode-0"].engine
        pulled = value(decode.metrics.pulled_bytes("shm/shm"))
    assert pulled == 2 * -(-(len(prompt) - 1) // 16) * decode.layout.page_bytes


def test_latents_in_eight_bits_are_served_where_those_are_and_traces_refused_by_name() -> None:
    shape = read_model_shape(saved("v3")[0])
    check_kv(EIGHT, "bfloat16", shape, (9, 0))
    with pytest.raises(UserError, match=r"kv\.dtype: float8_e4m3fn needs a model in bfloat16"):
        check_kv(EIGHT, "float16", shape)
    sections = dense_laws.sections(saved("v3")[0], graph={"prefill": "compiled"})
    with (
        pytest.raises(UserError, match=r"engine\.graph\.prefill: compiled cannot trace"),
        running(sections, num_prefill=0),
    ):
        pass
