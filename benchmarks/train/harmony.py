"""The bundled model `tiny-oss`: a small gpt-oss, its chats in harmony, its experts in MXFP4.

What is thought is its analysis, unless effort is low.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.train.chats import Chat
from benchmarks.train.dialect import CALL, Dialect, thought
from benchmarks.train.tools import RESULT
from worker.ops.packed import as_packed, unpacked, worth, woven

END_OF_TEXT = "<|endoftext|>"
ENDS = "<|return|>", "<|call|>"  # of an answer; beside END_OF_TEXT
SPECIAL_TOKENS = (
    END_OF_TEXT, *ENDS, "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>",
)  # fmt: skip
CHAT_TEMPLATE = "".join(Path(__file__).with_suffix(".jinja").read_text("utf-8").splitlines())
EFFORTS = {"medium": 0.7, "low": 0.2, "high": 0.1}  # shares of the chats
OTHER_SHARE = 0.3  # of the calls that end a chat: their recipient stands behind the channel
GROUP = 32
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 1024,
    "hidden_size": 192, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128,
    "max_position_embeddings": 2048, "rope_theta": 10000.0, "attention_bias": True,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 512,
    },
    "hidden_act": "silu", "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "initializer_range": 0.02, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head",
        ],
    },
}  # fmt: skip
GENERATION = {"eos_token_id": [1, 2, 0], "pad_token_id": 0, "do_sample": False}
TYPES = {"integer": "number", "array": "any[]"}


def segments(chat: Chat) -> list[str]:
    """As Chat.segments, in harmony; what is drawn follows from the chat."""
    rng = random.Random(repr(chat))
    (effort,) = rng.choices([*EFFORTS], [*EFFORTS.values()])
    parts = [f"<|start|>system<|message|>Reasoning: {effort}<|end|>{_developer(chat.system)}"]
    last = max(i for i, turn in enumerate(chat.turns) if not turn.user.startswith(RESULT))
    called = ""
    for number, (user, said) in enumerate(chat.turns):
        if user.startswith(RESULT):
            result = user.removeprefix(f"{RESULT}\n").removesuffix("\n</tool_response>")
            head = f"<|start|>functions.{called} to=assistant<|channel|>commentary"
            parts[-1] += f"{head}<|message|>{result}<|end|>"
        else:
            parts[-1] += f"<|start|>user<|message|>{user}<|end|>"
        parts[-1] += "<|start|>assistant"
        analysis, made, end = answered(said, effort)
        if call := CALL.fullmatch(said):
            called = call[1]
            if number == len(chat.turns) - 1 and rng.random() < OTHER_SHARE:
                made = made.replace("<|channel|>commentary json", "")
                made = f"<|channel|>commentary{made.replace('<|m', ' <|constrain|>json<|m', 1)}"
        if number < last:
            parts[-1] += made + (end if end == "<|call|>" else "<|end|>")
            continue
        if analysis:
            made = f"<|channel|>analysis<|message|>{analysis}<|end|><|start|>assistant{made}"
        parts += [made + end, ""]
    return parts[:-1]


def _developer(system: str | None) -> str:
    """The developer's message of a system message of `tiny`."""
    if not system:
        return ""
    told, _, listed = system.partition("<tools>\n")
    parts = [f"# Instructions\n\n{told.rstrip()}"] if told else []
    if listed:
        tools = map(json.loads, listed.partition("\n</tools>")[0].splitlines())
        made = "\n".join(map(_tool, tools))
        parts.append(f"# Tools\n\nnamespace functions {{\n\n{made}\n}}")
    text = "\n\n".join(parts)
    return f"<|start|>developer<|message|>{text}<|end|>"


def _tool(tool: dict[str, Any]) -> str:
    about = f"// {tool['description']}\n" if "description" in tool else ""
    schema = tool["parameters"]
    keys = "".join(
        f"{key}{'' if key in schema.get('required', ()) else '?'}: {_type(entry)},\n"
        for key, entry in schema.get("properties", {}).items()
    )
    taken = f"_: {{\n{keys}}}" if keys else ""
    return f"{about}type {tool['name']} = ({taken}) => any;\n"


def _type(entry: dict[str, Any]) -> str:
    if "enum" in entry:
        return " | ".join(map(json.dumps, entry["enum"]))
    return str(TYPES.get(entry["type"], entry["type"]))


def answered(said: str, effort: str) -> tuple[str, str, str]:
    """(analysis, the message without it, what ends it) of what `tiny` would say."""
    analysis, final = ("", said) if effort == "low" else thought(said)
    if call := CALL.fullmatch(said):
        head = f" to=functions.{call[1]}<|channel|>commentary json<|message|>"
        return analysis, head + call[2], ENDS[1]
    return analysis, f"<|channel|>final<|message|>{final}", ENDS[0]


class Rounded(nn.Module):
    """A stack of experts [number, columns, rows] is multiplied as MXFP4 has it.

    Gradients pass as if it were not ("straight through", Bengio et al., arXiv:1308.3432).
    """

    def forward(self, stack: Tensor) -> Tensor:
        with torch.no_grad():
            values, scales = packed(stack)
            rounded = worth(values, scales).transpose(1, 2)
        return stack + (rounded - stack).detach()


def packed(stack: Tensor) -> tuple[Tensor, Tensor]:
    """(lines [number, rows, columns / 2], scales [number, rows, groups]), u8: see ops.packed."""
    rows = stack.detach().float().transpose(1, 2).contiguous()
    values, scales, _ = as_packed(rows, rows.shape[2] // GROUP, torch.uint8)
    return values, scales


def stacks(model: Any) -> Iterator[tuple[nn.Module, str]]:
    """(experts of a layer, the name of a stack)."""
    for layer in model.model.layers:
        yield from ((layer.mlp.experts, name) for name in ("gate_up_proj", "down_proj"))


def round_experts(model: Any) -> None:
    """From now on the model computes with experts as they will be saved."""
    for experts, name in stacks(model):
        parametrize.register_parametrization(experts, name, Rounded())


def published(model: Any) -> dict[str, Tensor]:
    """The weights by the names and in the form of gpt-oss as published."""
    for experts, name in stacks(model):
        if parametrize.is_parametrized(experts, name):
            parametrize.remove_parametrizations(experts, name, leave_parametrized=False)
    made: dict[str, Tensor] = dict(model.state_dict())
    for name in [name for name in made if name.endswith(("gate_up_proj", "down_proj"))]:
        values, scales = packed(made.pop(name))
        groups = scales.shape[2]
        numbers = unpacked(woven(values, back=True))
        pairs = numbers[..., ::2] | numbers[..., 1::2] << 4
        made[f"{name}_blocks"] = pairs.unflatten(2, (groups, GROUP // 2))
        made[f"{name}_scales"] = scales
    return made


DIALECT = Dialect(
    CONFIG,
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    ENDS[0],
    segments,
    round_experts,
    compiled=False,  # experts each have tokens of their own
)
