"""GGUF files against the models of `transformers` that they were made from, and its own reading."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tests.equivalence.test_models import LINEAR_ROPE, LLAMA3_ROPE, assert_same, load, save_random
from tests.support import smollm2
from tests.support.dense_families import MIXED, NO_PAD, YARN
from tests.support.engines import running
from tests.support.gguf_files import read_by_transformers, write_model
from tests.support.pairwise import whole
from worker.api import Sampling
from worker.config import ModelConfig, SpecConfig
from worker.config.checkpoint.shape import read_model_shape
from worker.peers.base import SingleCollective
from worker.start.check import check_directories, sizes_of
from worker.start.digest import part_sums, weights_digest
from worker.weights.files import weight_files
from worker.weights.gguf_tensors import GgufTensors

pytestmark = pytest.mark.usefixtures("one_thread", "own_directory")

LOCAL = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA = NO_PAD | MIXED | {
    "head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": False,
    "rope_parameters": LOCAL, "final_logit_softcapping": 5.0,
}  # fmt: skip
# The file's architecture, the model's family and what differs in it.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-bias": ("llama", "Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("llama", "Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 32}),
    "linear-rope": ("llama", "Llama", {"rope_parameters": LINEAR_ROPE}),
    "qwen2": ("qwen2", "Qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 32}),
    "gemma3": ("gemma3", "Gemma3", GEMMA),
}  # fmt: skip
# Types of matrices by the ends of their names.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
MIXED_KINDS = {
    "attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q5_0", "attn_output": "Q5_1",
    "ffn_gate": "Q8_0", "ffn_up": "F16", "ffn_down": "BF16", "token_embd": "Q8_0",
}  # fmt: skip
K_KINDS = {
    "attn_q": "Q4_K", "attn_k": "Q5_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "attn_v": "IQ4_NL"
}  # fmt: skip


@pytest.fixture
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def directory(file: Path) -> Path:
    return ModelConfig(path=str(file)).directory


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_ids_are_those_of_the_model_it_was_made_from(
    case: str, tmp_path: Path
) -> None:
    architecture, family, changes = CASES[case]
    model, file = save_random(tmp_path / "saved", family, changes), tmp_path / "m.gguf"
    write_model(file, model, architecture)
    assert_same(model, directory(file), chunks=(64,))
    if case == "linear-rope":
        sums = [part_sums(load(each).shards()) for each in (directory(file), tmp_path / "saved")]
        assert weights_digest(sums[0]) == weights_digest(sums[1])


def slices(path: Path) -> dict[str, torch.Tensor]:
    """All tensors, whole, of a directory that was made of files."""
    shape, found = read_model_shape(path), {}
    for file in weight_files(path):
        with GgufTensors(file, shape) as reader:
            for name in list(reader.keys()):
                part = reader.get_slice(name)
                found[name] = part[tuple(slice(size) for size in part.get_shape())]
    return found


@pytest.mark.parametrize(
    ("case", "kinds", "changes"),
    [
        ("linear-rope", MIXED_KINDS, {}),
        ("qwen2", MIXED_KINDS, {}),
        ("qwen3", K_KINDS, WIDE),
        ("gemma3", MIXED_KINDS | {"attn_norm": "F32"}, {}),
    ],
)
def test_weights_are_as_transformers_reads_them_and_as_the_library_dequantises(
    case: str, kinds: dict[str, str], changes: dict[str, Any], tmp_path: Path, caplog
) -> None:
    architecture, family, own = CASES[case]
    model, file = save_random(tmp_path / "saved", family, own | changes), tmp_path / "m.gguf"
    write_model(file, model, architecture, kinds=kinds)
    wanted, found = read_by_transformers(file, model), slices(directory(file))
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
    # A part of rows and columns is the whole's, whatever lies in a block.
    with GgufTensors(weight_files(directory(file))[0], read_model_shape(directory(file))) as reader:
        for name in (
            "model.layers.1.self_attn.q_proj.weight",
            "model.layers.1.mlp.down_proj.weight",
        ):
            index = slice(16, 48), slice(8, 40)
            assert torch.equal(reader.get_slice(name)[index], found[name][index])
    model.load_state_dict(found, strict=False)
    with caplog.at_level(logging.INFO, "kvlane.weights"):
        assert_same(model, directory(file), chunks=(64,))
    assert f"{'3 of Q4_K' if case == 'qwen3' else '3 of Q4_0'}" in caplog.text
    assert "MB as torch.float32" in caplog.text


def test_two_ranks_hold_what_one_does_and_a_model_may_lie_in_several_files(tmp_path: Path) -> None:
    model = save_random(tmp_path / "saved", "Llama", {"vocab_size": 200})
    write_model(tmp_path / "m.gguf", model, "llama", kinds=MIXED_KINDS, tensors_a_file=9)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [each.name for each in parts] == [f"m-{i:05}-of-00004.gguf" for i in range(1, 5)]
    config = ModelConfig(path=str(parts[0]))
    assert config.name == "m"
    assert ModelConfig(path=str(tmp_path)).directory == config.directory
    check_directories(config, SpecConfig(), {"decode.tp": (2, "auto")})
    sizes = sizes_of(config.directory)
    assert sizes.weights == 2 * sum(each.numel() for each in model.state_dict().values())
    wanted = slices(config.directory)
    for rank in range(2):
        group = SingleCollective()
        group.rank, group.size = rank, 2
        for key, shard in load(config.directory, group).shards().items():
            assert torch.equal(shard.dest, shard.of(wanted[key.tensor])), key


@pytest.mark.whole
@pytest.mark.skipif(not smollm2.IS_HERE, reason=smollm2.ABSENT)
def test_a_real_model_answers_as_transformers_does() -> None:
    """`tests.support.smollm2` shows it at length, of a cluster. Here prompt lookup drafts; with
    --whole decode has three ranks."""
    reference = smollm2.Reference(slices(ModelConfig(path=smollm2.NAME).directory))
    tokenizer, asked = reference.tokenizer(), smollm2.chats(4 if whole else 2, seed=2)
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in asked]
    ids = [each["input_ids"][:60] for each in prompts]
    engine = {"device": "cpu", "threads": 1, "cpu_pool_bytes": 48 << 20, "max_num_reqs": 4}
    sections = {
        "model": {"path": smollm2.NAME, "max_model_len": 256}, "engine": engine,
        "spec": {"drafter": "ngram"}, "disaggregation": {"mode": "always"},
    }  # fmt: skip
    greedy = Sampling(8 if whole else 4, temperature=0.0, logprobs=0)
    with running(sections, decode_tp=3 if whole else 1) as cluster:
        answers = cluster.answers(ids, greedy)
        (again,) = cluster.answers(ids[:1], replace(greedy, max_tokens=2))
        text = tokenizer.encode(smollm2.TEXT, add_special_tokens=False)[: 100 if whole else 40]
        (scored,) = cluster.answers([text], Sampling(1, temperature=0.0, prompt_logprobs=0))
    for prompt, answer in zip([*ids, ids[0]], [*answers, again], strict=True):
        told = [each.logprob for each in answer.logprobs]
        assert reference.check(prompt, answer.tokens, told) < smollm2.BOUND
    assert again.tokens == answers[0].tokens[:2]
    assert again.num_cached_tokens > 0
    told = torch.tensor([each.logprob for each in scored.prompt_logprobs], dtype=torch.float64)
    assert float(told.mean().neg().exp()) == pytest.approx(reference.perplexity(text), abs=1e-3)
