"""Published chain drafters: how their directories are read, loaded and computed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import embedding

from tests.support.chain_checkpoints import FORMS, TARGET, write_chain
from tests.support.chain_reference import Layer
from tests.support.chain_rows import PAGE_SIZE, PAGES, ChainRows
from worker.config.checkpoint.shape import read_model_shape
from worker.drafts.chain import ChainDrafter
from worker.drafts.drafter_config import read_chain_shape
from worker.errors import Unsupported, UserError
from worker.model.decoder import Decoder
from worker.model.load import load_model
from worker.model.placement import Placement
from worker.peers.base import SingleCollective
from worker.start.digest import part_sums, weights_digest

CPU = torch.device("cpu")
PLACEMENT = Placement(SingleCollective(), torch.float32, CPU)
IDS = "eagle_aux_hidden_state_layer_ids"
REDUCED = {"draft_vocab_size": 40}
# What of each form can be set, all of it somewhere. A name begins with the form's.
CASES: dict[str, dict[str, Any]] = {
    "specforge": REDUCED,
    "specforge-full": {},
    "specforge-prefixed": {**REDUCED, "prefix": "model.", "own": ("embed_tokens",)},
    "specforge-own": {"own": ("embed_tokens", "lm_head"), "norm_before_fc": True},
    "specforge-3.1": {
        **REDUCED, "own": ("t2d",), "fc_norm": True, "norm_output": True,
        "eagle_config": {"return_hidden_post_norm": True, IDS: [0, 3, 6, 9]},
    },
    "specforge-early-3.1": {
        "norm_output": True, "eagle_config": {"return_hidden_post_norm": False},
    },
    "specforge-one": {"eagle_config": {"use_aux_hidden_state": False}},
    "specforge-bias": {"layer": {"attention_bias": True, "head_dim": 16}},
    "specforge-narrow": {
        **REDUCED, "own": ("embed_tokens",), "target_hidden_size": 32,
        "layer": {"hidden_size": 24, "intermediate_size": 40},
    },
    "speculators": {**REDUCED, "own": ("embed_tokens", "t2d")},
    "speculators-normed": {
        **REDUCED, "norm_before_residual": True, "norm_before_fc": True, "norm_output": True,
    },
    "speculators-qwen3": {
        "draft_vocab_size": None, IDS: [2, 5],
        "layer": {
            "model_type": "qwen3", "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    },
    "eagle": {},
    "eagle-plain": {"bias": False, "own": ("embed_tokens",), "prefix": "model."},
    "mimo": {},
}  # fmt: skip


def write_case(path: Path, case: str) -> dict[str, Tensor]:
    return write_chain(path, case.partition("-")[0], TARGET, **CASES[case])


@pytest.fixture(scope="module")
def target() -> Decoder:
    return load_model(Path(), TARGET, PLACEMENT, noise=0)


def load(path: Path, target: Decoder, **options: Any) -> ChainDrafter:
    drafter = ChainDrafter(read_chain_shape(path, TARGET), target, 64)
    drafter.fill(path, **options)
    return drafter


def weights(path: Path) -> Path:
    (file,) = path.glob("*.safetensors")
    return file


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(weights(path))
    change(tensors)
    save_file(tensors, weights(path))


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_used_and_one_more_or_less_is_an_error(case, tmp_path, target) -> None:
    tensors = write_case(tmp_path, case)
    drafter = load(tmp_path, target)
    found = {key.tensor: shard.dest for key, shard in drafter.shards().items()}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
    own = CASES[case].get("own", ())
    assert (drafter.embedding is target.embedding) == ("embed_tokens" not in own)
    assert (drafter.head is target.head) == ("lm_head.weight" not in tensors)

    more = "model.mtp_layers.0.extra" if case == "mimo" else "extra"
    rewrite(tmp_path, lambda held: held.update({f"{more}.weight": torch.ones(2)}))
    with pytest.raises(UserError, match=f"unexpected tensors: {more}.weight"):
        load(tmp_path, target)
    for name in ("d2t", *(each for each in tensors if "fc" in each), next(iter(tensors))):
        if name in tensors:
            save_file({k: v for k, v in tensors.items() if k != name}, weights(tmp_path))
            with pytest.raises(
                UserError, match=f"missing tensors: .*{name.removeprefix('model.')}"
            ):
                load(tmp_path, target)


def test_a_layer_is_found_by_the_name_that_either_project_gives_it(tmp_path, target) -> None:
    expected = write_chain(tmp_path, "specforge", TARGET, **REDUCED)

    def rename(tensors: dict[str, Tensor]) -> None:
        """Everything behind "model.", the head and the tables too."""
        for name in list(tensors):
            tensors[f"model.{name}".replace("midlayer", "layers.0")] = tensors.pop(name)

    rewrite(tmp_path, rename)
    shards = load(tmp_path, target).shards()
    assert len(shards) == len(expected)
    found = {key.tensor: shard.dest for key, shard in shards.items()}
    norm = "model.layers.0.hidden_norm.weight"
    assert torch.equal(found[norm], expected["midlayer.hidden_norm.weight"])
    assert torch.equal(found["model.d2t"], expected["d2t"])


def test_ids_are_the_target_s(tmp_path: Path, target: Decoder) -> None:
    tensors = write_chain(tmp_path, "specforge", TARGET, own=("t2d",), **REDUCED)
    id_map = load(tmp_path, target).id_map
    assert id_map.dtype == torch.int64
    assert id_map.tolist() == tensors["t2d"].nonzero().flatten().tolist()
    write_chain(tmp_path / "full", "specforge", TARGET)
    assert load(tmp_path / "full", target).id_map is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors["d2t"][-1].add_(97), "ids beyond the target's 97"),
        (lambda tensors: tensors["d2t"][0].fill_(-1), "ids beyond the target's 97"),
        (lambda tensors: tensors["d2t"][3].copy_(tensors["d2t"][4] + 1), "ascending"),
        (lambda tensors: tensors["t2d"].logical_not_(), "t2d and d2t name different ids"),
    ],
)
def test_ids_that_cannot_be_are_refused(change, message, tmp_path: Path, target: Decoder) -> None:
    write_chain(tmp_path, "specforge", TARGET, own=("t2d",), **REDUCED)
    rewrite(tmp_path, change)
    with pytest.raises(UserError, match=message):
        load(tmp_path, target)


def test_a_target_takes_no_notice_of_the_drafter_in_its_files(tmp_path, target: Decoder) -> None:
    """MiMo's own directory, whose layers are Qwen2's."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 97, "rms_norm_eps": 1e-6,
                "max_position_embeddings": 64, "eos_token_id": 0,
            }
        )
    )  # fmt: skip
    save_file(
        {key.tensor: shard.dest.contiguous() for key, shard in target.shards().items()},
        tmp_path / "model.safetensors",
    )
    tensors = write_chain(tmp_path, "mimo", TARGET)
    spec = read_model_shape(tmp_path)
    assert spec == replace(TARGET, architecture="MiMoForCausalLM", dtype=spec.dtype)
    whole = load_model(tmp_path, spec, PLACEMENT)
    assert weights_digest(part_sums(whole.shards())) == weights_digest(part_sums(target.shards()))

    def load_drafter() -> ChainDrafter:
        drafter = ChainDrafter(read_chain_shape(tmp_path, spec), whole, 64)
        drafter.fill(tmp_path)
        return drafter

    assert {key.tensor for key in load_drafter().shards()} == tensors.keys()
    del tensors["model.mtp_layers.0.final_layernorm.weight"]
    save_file(tensors, tmp_path / "mtp.safetensors")
    with pytest.raises(UserError, match=r"missing tensors: model\.mtp_layers\.0\.final_layernorm"):
        load_drafter()


@pytest.mark.parametrize(
    ("form", "fields", "taps"),
    [
        ("specforge", {"eagle_config": {IDS: [1, 4, 6]}}, (1, 4, 6)),
        ("specforge", {IDS: [2, 5, 7]}, (1, 4, 6)),
        ("specforge", {}, (1, 4, 6)),
        ("specforge", {"eagle_config": {IDS: []}}, (1, 4, 6)),
        ("specforge", {"eagle_config": {IDS: [1, 4, 6]}, IDS: [2, 5, 7]}, (1, 4, 6)),
        ("speculators", {IDS: [2, 5, 7]}, (1, 4, 6)),
        ("speculators", {}, (1, 4, 6)),
        ("specforge", {"eagle_config": {IDS: [0, 9]}}, (0, 9)),
        ("specforge", {"eagle_config": {"use_aux_hidden_state": False}}, (10,)),
        ("eagle", {}, (10,)),
        ("mimo", {}, (10,)),
    ],
)
def test_all_ways_to_name_the_tapped_layers_mean_the_same(form, fields, taps, tmp_path) -> None:
    write_chain(tmp_path, form, TARGET, **fields)
    spec = read_chain_shape(tmp_path, TARGET)
    assert spec.taps == taps
    assert spec.num_features == len(taps)


def test_what_is_fed_back_follows_the_field_of_one_meaning(tmp_path: Path) -> None:
    def fed_back(**fields: Any) -> bool:
        write_chain(tmp_path, "specforge", TARGET, **fields)
        return read_chain_shape(tmp_path, TARGET).norm_output

    said: dict[bool, dict[str, Any]] = {
        value: {"eagle_config": {"return_hidden_post_norm": value}} for value in (False, True)
    }
    assert not fed_back()
    assert fed_back(**said[True])
    assert fed_back(norm_output=True, **said[True])
    assert not fed_back(norm_output=True, **said[False])
    assert not fed_back(norm_output=False, **said[False])
    for value in (False, True):
        with pytest.raises(Unsupported, match=r"norm_output: .*return_hidden_post_norm"):
            fed_back(norm_output=value)
    with pytest.raises(UserError, match="norm_output: false, but"):
        fed_back(norm_output=False, **said[True])


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_rows_equal_plain_torch(case: str, tmp_path: Path, target: Decoder) -> None:
    """Stored rows for known tokens, then rows that attend, on features and on what is fed back."""
    write_case(tmp_path, case)
    drafter, plain = load(tmp_path, target), Layer(tmp_path, TARGET.num_layers)
    spec, rows = drafter.shape, ChainRows(drafter)
    table = plain.weights.get("embed_tokens", target.embedding.weight)
    head = plain.weights.get("lm_head", target.head.weight)

    def wanted(ids: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """(what is fed back, what the head takes) of rows for the slots from 1 on, by full
        attention."""
        at = torch.arange(1, 1 + len(ids))
        x, residual = plain.inputs(embedding(ids, table), g)
        q, k, v = (plain.heads(name, x, at) for name in "qkv")
        causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        return plain.outputs(plain.attend(q, k, v, causal), residual)[::-1]

    generator = torch.Generator().manual_seed(3)
    taps = torch.randn(10, spec.num_features * 32, generator=generator)
    ids = torch.randint(97, (13,), generator=generator)
    g = drafter.features(taps)
    assert torch.allclose(
        g, plain.features(taps.split(32, 1) if plain.taps else (), taps), atol=1e-4
    )
    rows.store(1, ids[1:7], g[:6])
    before = [cache.clone() for cache in rows.caches]
    found = rows.forward(7, ids[7:10], g[6:9])
    for step in range(10, 13):
        for got, expected in zip(found, wanted(ids[1:step], g[: step - 1]), strict=True):
            assert torch.allclose(got, expected[-len(got) :], atol=1e-4)
        fed_back, head_input = found
        logits = drafter.head.logits(head_input)
        assert logits.shape == (len(head_input), spec.vocab_size)
        assert torch.allclose(logits, head_input @ head.T, atol=1e-4)
        g = torch.cat((g[: step - 1], fed_back[-1:]))
        found = rows.forward(step, ids[step : step + 1], g[-1:])

    rows.forward(1, ids[1:7], g[:6])
    slots = {(PAGES[t // PAGE_SIZE], t % PAGE_SIZE) for t in range(1, 13)}
    for cache, stored in zip(rows.caches, before, strict=True):
        written = cache.isfinite().all(-1).all(1)
        assert {(page, row) for page, row in written.nonzero().tolist()} == slots
        both = stored.isfinite()  # the keys and values that store() made and forward() made again
        assert both.sum() == 6 * spec.num_kv_heads * spec.head_dim
        assert torch.allclose(cache[both], stored[both], atol=1e-5)
    rows.pool.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_pass_reads_no_value_from_the_device(form: str, tmp_path: Path) -> None:
    """On the meta device any .item(), .tolist() or copy to the host raises."""
    write_chain(tmp_path, form, TARGET)
    meta, kind = torch.device("meta"), torch.bfloat16
    target = Decoder(TARGET, Placement(SingleCollective(), kind, meta))
    drafter = ChainDrafter(read_chain_shape(tmp_path, TARGET), target, 64)
    taps = torch.empty(6, drafter.shape.num_features * 32, dtype=kind, device=meta)
    rows, g = ChainRows(drafter), drafter.features(taps)
    rows.store(1, torch.zeros(6), g)
    fed_back, head_input = rows.forward(7, torch.zeros(6), g)
    logits = drafter.head.logits(head_input)
    assert (fed_back.shape, fed_back.dtype) == ((6, 32), kind)
    assert (logits.shape, logits.dtype) == ((6, 97), kind)
