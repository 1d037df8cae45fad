"""The MTP layers of Qwen3-Next and Qwen3.5 against the blocks of `transformers` and plain torch.

In float32; experts of a layer are one tensor, as Qwen3.5 MoE is published.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.equivalence.test_models import BOUND, CASES, PROMPTS, Engine, edit, load, save_random
from tests.support.chain_reference import ChainReference, Layer
from tests.support.chain_rows import ChainRows
from tests.support.drafter_cases import judge, workers
from tests.support.expert_families import EXPERTS
from tests.support.lockstep import DECODE, Ask
from tests.support.pairwise import in_whole
from tests.support.processes import on_ranks
from tests.support.prompts import problem_ids
from worker.api import Sampling
from worker.config import ModelConfig
from worker.config.checkpoint.experts import Division
from worker.drafts.chain import ChainDrafter
from worker.drafts.drafter_config import read_chain_shape
from worker.model.experts import Experts
from worker.peers.base import Collective, SingleCollective

pytestmark = pytest.mark.usefixtures("one_thread")


def save_mtp(
    path: Path, family: str, changes: dict[str, Any]
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A target as of save_random with an MTP layer in its files: (target, layer) of transformers.

    Its experts are one tensor.
    """
    from transformers.modeling_layers import MtpLayer

    target = save_random(path, family, changes)
    last = target.model.layers[-1]
    assert hasattr(last, "self_attn")
    norm, number = type(target.model.norm), len(target.model.layers) - 1
    layer = MtpLayer(target.config, type(last), norm, number).float().eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    names = {
        "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc", "mtp_block": "mtp.layers.0", "post_norm": "mtp.norm",
    }  # fmt: skip
    own = {}
    for name, weight in layer.state_dict().items():
        part, _, rest = name.partition(".")
        own[f"{names[part]}.{rest}"] = weight.clone()
    file = path / "model.safetensors"
    save_file(load_file(file) | own, file)
    edit(path, mtp_num_hidden_layers=1)
    return target, layer


def plain_rows(layer: Layer, target: torch.nn.Module, ids: Tensor, fed: Tensor) -> Tensor:
    """What the head takes of rows for the slots from 1 on; ids: [n]; fed: [n, hidden]."""
    at = torch.arange(1, 1 + len(ids))
    x, residual = layer.inputs(target.model.embed_tokens(ids), fed)
    q, k, v = (layer.heads(name, x, at) for name in "qkv")
    attended = layer.attend(q, k, v, torch.ones(len(ids), len(ids), dtype=torch.bool).tril())
    return layer.outputs(layer.let_through(x, attended), residual)[0]


@pytest.mark.parametrize(
    "case", ["qwen3.5-moe", *in_whole(("qwen3-next",), ("qwen3.5",), ("qwen3-next-moe",))]
)
@torch.inference_mode()
def test_drafts_equal_transformers(case: str, tmp_path: Path) -> None:
    """Rows on the target's output after its final norm, then rows on what the layer feeds back."""
    reference, layer = save_mtp(tmp_path, *(CASES | EXPERTS)[case])
    target, plain = load(tmp_path), Layer(tmp_path, reference.config.num_hidden_layers)
    drafter = ChainDrafter(read_chain_shape(tmp_path, target.shape), target, 64)
    drafter.fill(tmp_path)
    ids = torch.tensor(PROMPTS[0])
    hidden = reference.model(ids[None], use_cache=False).last_hidden_state[0]
    rows, num = ChainRows(drafter), len(ids)
    fed = hidden[:-1]  # row t: token t and the hidden state of token t - 1
    for length in range(num, num + 3):
        positions = torch.arange(1, length)
        angles = reference.model.rotary_emb(hidden[None], positions[None].expand(3, 1, -1)[:1, 0])
        mask = torch.full((length - 1, length - 1), float("-inf")).triu(1)[None, None]
        wanted = layer(
            reference.model.embed_tokens(ids[None, 1:length]), fed[None], angles, mask,
            positions[None], None,
        )[0]  # fmt: skip
        assert (plain_rows(plain, reference, ids[1:length], fed) - wanted).abs().max() < BOUND
        if length == num:
            rows.store(1, ids[1 : num - 1], fed[:-1])
        fed_back, head_input = rows.forward(length - 1, ids[length - 1 : length], fed[-1:])
        assert torch.equal(fed_back, head_input)  # the next row takes it after the norm
        assert (head_input[0] - wanted[-1]).abs().max() < BOUND
        logits = drafter.head.logits(head_input)[0]
        assert (logits - reference.lm_head(wanted[-1])).abs().max() < BOUND
        ids = torch.cat((ids, logits.argmax()[None]))
        fed = torch.cat((fed, fed_back))
    rows.pool.close()


def drafted(path: Path, collective: Collective, experts: Division) -> list[Tensor]:
    """Logits of the target for a prompt, then g of rows on noise, and their logits."""
    target = load(path, collective, experts)
    engine = Engine(target)
    ((_, logits), _) = engine.run(64)
    engine.pool.close()
    drafter = ChainDrafter(read_chain_shape(path, target.shape), target, 64)
    drafter.fill(path)
    rows, generator = ChainRows(drafter), torch.Generator().manual_seed(3)
    g = torch.randn(7, drafter.shape.hidden_size, generator=generator)
    with torch.inference_mode():
        found, head_input = rows.forward(1, torch.arange(30, 37), g)
        drafts = drafter.head.logits(head_input)
    rows.pool.close()
    return [logits, found, drafts]


@pytest.mark.parametrize("num", [2, *in_whole((4,))])
def test_ranks_equal_one(num: int, tmp_path: Path) -> None:
    """Experts in parts, and whole ones."""
    path = tmp_path / "target"
    save_mtp(path, *EXPERTS["qwen3.5-moe"])
    ways: tuple[Division, ...] = ("tensor", "expert")
    expected = drafted(path, SingleCollective(), "auto")
    for both in on_ranks(num, tmp_path, lambda group: [drafted(path, group, way) for way in ways]):
        for found in both:
            for got, wanted in zip(found, expected, strict=True):
                assert (got - wanted).abs().max() < BOUND


def replayed(directory: Path, num_tokens: int) -> int:
    """Decode steps are replays, of 4 rows for 3 requests, in windows of 4; compared drafts."""
    made = workers(
        graph=True, spec={"drafter": "mtp", "widths": [4]}, target=directory, num_tokens=800,
        max_prefill_tokens=64, max_num_reqs=4,
    )  # fmt: skip
    model = made.engines[DECODE].weights.drafter
    assert isinstance(model, ChainDrafter)
    experts, longest = model.feed_forward, Sampling(num_tokens, temperature=0.0, ignore_eos=True)
    assert isinstance(experts, Experts)
    experts.load.zero_()
    asked = [Ask(prompt, longest).but(seed=3) for prompt in problem_ids(3)]
    asked[1] = asked[1].but(temperature=0.7)
    try:
        answers = made.serve(asked)
        reference = ChainReference(directory, directory)
        num_compared = judge(made, asked, answers, reference, in_pages=False)
        windows = [window for trace in made.windows.values() for window in trace]
        assert max(window.num for window in windows) == 4
        num_drafts = sum(draft >= 0 for window in windows for draft in window.drafts)
        assert int(experts.load[0].sum()) == num_drafts * experts.shape.top_k, "of drafts alone"
        return num_compared
    finally:
        made.close()


def test_a_layer_of_experts_drafts_in_graphs_what_plain_torch_does() -> None:
    """And padding goes to no expert."""
    assert replayed(ModelConfig(path="tiny-hybrid-moe").directory, 28) > 40
