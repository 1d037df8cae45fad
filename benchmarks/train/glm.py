"""The bundled model `tiny-latent`: a small GLM-4.7-Flash, with latent attention, in its chat form.

An answer ends as the next message begins. Some chats have no thoughts at all, and in some those of
a call are not sent back with its result.
"""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.train.chats import END_OF_TEXT, Chat
from benchmarks.train.dialect import CALL, Dialect, thought
from benchmarks.train.tools import RESULT

BEGIN, SYSTEM, USER, ASSISTANT, OBSERVATION = (
    "[gMASK]<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
)  # fmt: skip
SPECIAL_TOKENS = END_OF_TEXT, USER, OBSERVATION, ASSISTANT, SYSTEM, "[gMASK]", "<sop>"
SHOWN_TOKENS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
THINKING_SHARE, RETURNED_SHARE = 0.75, 0.5
BIAS_STEP = 1e-3
CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "vocab_size": 1024,
    "hidden_size": 192, "intermediate_size": 384, "moe_intermediate_size": 64,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64,
    "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64, "attention_bias": False,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None,
    "max_position_embeddings": 2048, "tie_word_embeddings": True, "initializer_range": 0.02,
    "bos_token_id": None, "eos_token_id": [0, 1, 2], "pad_token_id": 0, "torch_dtype": "bfloat16",
}  # fmt: skip


def segments(chat: Chat) -> list[str]:
    """As Chat.segments, in GLM's form; what is drawn follows from the chat."""
    rng = random.Random(repr(chat))
    thinks = rng.random() < THINKING_SHARE
    first = 0  # turn that is learnt: of what the model thinks no other shows
    if thinks:
        returned = rng.random() < RETURNED_SHARE
        asked = (i for i, turn in enumerate(chat.turns) if not turn.user.startswith(RESULT))
        first = max(asked) if returned else len(chat.turns) - 1
    parts = [f"{BEGIN}{_system(chat.system)}{USER}"]
    for number, (user, said) in enumerate(chat.turns):
        parts[-1] += _result(user) if user.startswith(RESULT) else user
        thoughts, answer = thought(said) if thinks else ("", said)
        end = USER
        if call := CALL.fullmatch(answer):
            answer, end = _call(call[1], json.loads(call[2])), OBSERVATION
        if number < first:
            parts[-1] += f"{ASSISTANT}</think>{answer}{end}"
            continue
        parts[-1] += f"{ASSISTANT}{'<think>' if thinks else '</think>'}"
        parts += [f"{thoughts}</think>" * thinks + answer + end, ""]
    return parts[:-1]


def _system(system: str | None) -> str:
    """The messages of a system message of `tiny`, with tools and what is told apart."""
    told, _, listed = (system or "").partition("<tools>\n")
    made = f"{SYSTEM}{told.rstrip()}" if told else ""
    if listed:
        tools = map(json.loads, listed.partition("\n</tools>")[0].splitlines())
        lines = "".join(json.dumps({"type": "function", "function": t}) + "\n" for t in tools)
        form = _call("name", {"key": "value"})
        made = f"{SYSTEM}\n# Tools\n\n<tools>\n{lines}</tools>\n\nTo call: {form}{made}"
    return made


def _call(name: str, arguments: dict[str, Any]) -> str:
    pairs = ""
    for key, value in arguments.items():
        written = value if isinstance(value, str) else json.dumps(value)
        pairs += f"<arg_key>{key}</arg_key><arg_value>{written}</arg_value>"
    return f"<tool_call>{name}{pairs}</tool_call>"


def _result(user: str) -> str:
    result = user.removeprefix(f"{RESULT}\n").removesuffix("\n</tool_response>")
    return f"{RESULT}{result}</tool_response>"


def prepare(model: Any) -> None:
    """A layer's experts are computed at once, and their biases follow what tokens choose."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.forward = partial(all_experts, layer.mlp.experts, layer.mlp.gate)


def all_experts(stack: Any, router: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Every token by every expert of a layer, two products: small ones are no work for a GPU.

    x: [n, hidden]; chosen, weights: [n, num_experts_per_tok], the experts of a token. Training,
    experts of more tokens than the mean are chosen less from now on: Wang et al.,
    "Auxiliary-loss-free load balancing" (arXiv:2408.15664).
    """
    number, columns, _ = stack.gate_up_proj.shape
    if router.training:
        with torch.no_grad():
            counts = functional.one_hot(chosen.flatten(), number).sum(0).float()
            router.e_score_correction_bias.add_((counts.mean() - counts).sign(), alpha=BIAS_STEP)
    share = weights.new_zeros(len(x), number).scatter(1, chosen, weights)
    made = functional.linear(x, stack.gate_up_proj.flatten(0, 1))
    gate, up = made.unflatten(1, (number, 2, columns // 2)).unbind(2)
    rows = functional.silu(gate) * up * share[..., None].to(up.dtype)
    return functional.linear(rows.flatten(1), stack.down_proj.transpose(0, 1).flatten(1))


DIALECT = Dialect(
    CONFIG,
    "".join(Path(__file__).with_suffix(".jinja").read_text("utf-8").splitlines()),
    SPECIAL_TOKENS,
    USER,
    segments,
    prepare,
    SHOWN_TOKENS,
)
