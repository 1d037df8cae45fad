"""A small hybrid of gated delta nets and attention, with random weights, for laws."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.places import place
from worker.plan import Plan
from worker.start.engine import Engine

SHAPE = {
    "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 199, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
    "layer_types": ["full_attention", "linear_attention"] * 2, "tie_word_embeddings": False,
    "eos_token_id": 1, "rms_norm_eps": 1e-5,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "torch_dtype": "float32",
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 2], "mrope_interleaved": True,
    },
}  # fmt: skip


EXPERTS = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}  # fmt: skip


@cache
def hybrid(*, sparse: bool = False) -> Path:
    """Its directory: a configuration alone, so it is served with `load_format: dummy`.

    sparse: experts stand in the place of feed-forwards.
    """
    path = place(f"hybrid{'-moe' * sparse}")
    (path / "config.json").write_text(json.dumps(SHAPE | (EXPERTS if sparse else {})))
    return path


def poison(engine: Engine) -> None:
    """From now on slots that are handed out hold no number, nor does the ring of a row that starts.

    So whoever reads what a request has not written is found. The engine has one rank.
    """
    slots, state = engine.book._slots, engine.runner.loaded.state
    snapshots = engine.book.snapshots
    take, apply, snap = slots.take, state.apply_rows, snapshots.take

    def emptied(new: list[int]) -> None:
        for part in (part for states in engine.pool.states for part in states):
            part[new] = float("nan")

    def taken(*args: Any, **options: Any) -> list[int]:
        new = take(*args, **options)
        emptied(new)
        return new

    def promised() -> int:
        new = snap()
        emptied([new] if new else [])
        return new

    def applied(plan: Plan) -> None:
        for start in plan.starts:
            for layer in engine.runner.loaded.model.states:
                layer.ring[start.row] = float("nan")
        apply(plan)

    slots.take, state.apply_rows, snapshots.take = taken, applied, promised
