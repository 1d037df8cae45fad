"""The MTP layers of Qwen3-Next and Qwen3.5 against the blocks of `transformers`, in float32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.equivalence.test_models import BOUND, CASES, PROMPTS, edit, load, save_random
from tests.support.chain_rows import ChainRows
from worker.drafts.chain import ChainDrafter
from worker.drafts.drafter_config import read_chain_shape

pytestmark = pytest.mark.usefixtures("one_thread")


def save_mtp(path: Path, case: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The target of `case` with an MTP layer in its files: (target, layer) of transformers."""
    from transformers.modeling_layers import MtpLayer

    target = save_random(path, *CASES[case])
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


@pytest.mark.parametrize("case", ["qwen3-next", "qwen3.5"])
@torch.inference_mode()
def test_drafts_equal_transformers(case: str, tmp_path: Path) -> None:
    """Rows on the target's output after its final norm, then rows on what the layer feeds back."""
    reference, layer = save_mtp(tmp_path, case)
    target = load(tmp_path)
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
