"""A feature of a dense family that is left out, each in turn, turns that family's law red."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.equivalence import test_models as models
from tests.equivalence.test_hybrid_mutants import mutate
from tests.support.dense_families import DENSE, RANKED
from tests.support.pairwise import one_in
from worker.errors import UserError
from worker.start.digest import PartSum, part_sums, weights_digest

pytestmark = pytest.mark.usefixtures("one_thread")

oracle = models.test_logits_and_greedy_ids_equal_transformers
SCALES = "embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"
# Case -> where -> (what the line says, what it says without the feature).
MUTANTS: dict[str, dict[str, list[tuple[str, str]]]] = {
    "qwen2-yarn": {
        "ops.rope:rope_inv_freq": [
            ("stretched * (1 - kept) + inv_freq * kept", "stretched"),
            ("stretched * (1 - kept) + inv_freq * kept", "inv_freq"),
        ],
        "ops.rope:rope_table": [("factor != 1.0", "False")],
        "config.checkpoint.rope_fields:_original": [
            ("inner.integer(field, default=fields.integer(field, default=longest))", "longest")
        ],
        "config.checkpoint.rope_fields:_yarn": [
            ('inner.number("beta_fast", default=32.0)', "32.0"),
            ('inner.number("beta_slow", default=1.0)', "1.0"),
        ],
    },
    "qwen3-yarn-mscale": {
        "ops.rope:_yarn_ramp": [("if scaling.truncate:", "if True:")],
        "config.checkpoint.rope_fields:_yarn": [("if all(both)", "if False")],
    },
    "llama-yarn-factor": {
        "config.checkpoint.rope_fields:_yarn": [
            ('inner.number("attention_factor", default=computed)', "computed")
        ],
    },
    "dynamic-rope": {"ops.rope:rope_inv_freq": [('("default", "dynamic")', '("default",)')]},
    "phi4-mini": {
        "ops.rope:rope_inv_freq": [("if scaling.is_long", "if not scaling.is_long")],
        "ops.rope:rope_table": [("factor != 1.0", "False"), ("still + 1", "still")],
    },
    "phi4-mini-short": {
        "config.checkpoint.shape:ModelShape.served": [("is_long=is_long", "is_long=True")],
    },
    "phi3": {"weights.shard:joined": [("start += part[0].full_shape[0]", "pass")]},
    "granite": {
        "config.checkpoint.shape:_read_scales": [
            (
                "(fields.number(name, default=1.0) for",
                f"(1.0 if name == {left_out!r} else fields.number(name, default=1.0) for",
            )
            for left_out in SCALES
        ],
    },
    "llama-mlp-bias": {
        "model.layers:ColumnParallelLinear.gated": [("swiglu(self(x))", "self.weight.gated(x)")],
        "model.layers:RowParallelLinear.forward": [("self._local_bias)", "None)")],
        "config.checkpoint.families:Family.features": [
            ("flag in true", "flag in true and name != 'mlp_bias'"),
        ],
    },
    "seed-oss": {
        "config.checkpoint.families:Family.features": [
            ("flag in true", "flag in true and name != 'output_bias'"),
            ("flag in true", "flag in true and name != 'qkv_bias'"),
        ],
    },
    "olmo2": {
        "model.attention:SelfAttention.forward": [("if self.wide_norms is not None:", "if False:")],
        "model.attention:WideNorms.forward": [
            (".to(x.dtype) * weight", ".to(x.dtype)"),
            ("(q, k, q, k)", "(k, q, q, k)"),
        ],
        "model.decoder:DecoderLayer._leaving": [("if norm is None", "if True")],
        "model.layers:Sum.reduce_add": [("return total, total", "return part, total")],
    },
    "smollm3": {
        "config.checkpoint.shape:_read_still": [
            ("not each for each in turned", "False for _ in turned"),
        ],
    },
    "glm4": {
        "model.decoder:DecoderLayer._leaving": [("if norm is None", "if True")],
        "weights.shard:moved_rows": [("if interleaved:", "if False:")],
        "config.checkpoint.shape:read_layer_shape": [
            ("int(head_dim * factor) // 2 * 2", "head_dim"),
        ],
    },
    "glm": {
        "model.decoder:FeedForward.shards": [("if self._fused:", "if False:")],
    },
    "mistral-window": {
        "config.checkpoint.shape:ModelShape.masks": [("window=x or None", "window=None")],
        "attention.reference:ReferenceAttention.plan": [
            ("self.mask.window + 1", "self.mask.window"),
        ],
    },
    "ministral-mixed": {
        "config.checkpoint.windows:read_windows": [("kind == SLIDING for", "True for")],
        "attention.build:ByLayerAttention.forward": [
            ("self._backends[layer_id]", "self._backends[0]"),
        ],
    },
    "phi3-window": {
        "config.checkpoint.windows:read_windows": [
            ("slides = [True] * count", "slides = [False] * count"),
        ],
    },
    "qwen2-window": {
        "config.checkpoint.windows:read_windows": [
            ('fields.integer("sliding_window", default=0, least=0)', "8"),
            ('fields.flag("use_sliding_window")', "False"),
        ],
    },
    "gemma2": {
        "config.checkpoint.shape:_read_scales": [
            ('fields.number("query_pre_attn_scalar") ** -0.5', "None"),
            ('cap if whose == "gemma2"', 'cap if whose == "gemma3"'),
            ('fields.number("final_logit_softcapping", default=0.0)', "0.0"),
        ],
        "attention.reference:ReferenceAttention._weights": [("torch.tanh(scores / cap)", "scores")],
        "model.layers:VocabParallelEmbedding.logits": [("if self.cap:", "if False:")],
        "model.decoder:Decoder.embed": [("if self._scale == 1", "if True")],
        "model.decoder:FeedForward.forward": [("is not None:", "is None:")],
        "ops.norms:geglu": [('approximate="tanh"', 'approximate="none"')],
        "model.decoder:norm_of": [("features.centred", "False")],
        "model.decoder:DecoderLayer._leaving": [("if norm is None", "if True")],
    },
    "gemma3": {
        "config.checkpoint.shape:_read_scales": [('cap if whose == "gemma2" else 0.0', "cap")],
        "config.checkpoint.shape:ModelShape.rope": [
            ("and self.windows[layer]", "and False"), ("and self.windows[layer]", ""),
        ],
        "config.checkpoint.shape:read_layer_shape": [("rope_types, FULL)", "rope_types, SLIDING)")],
        "model.attention:SelfAttention.__init__": [("if features.qk_norm:", "if False:")],
    },
    "gemma3-images": {
        "config.checkpoint.shape:read_model_shape": [("if family.nested:", "if False:")],
        "model.decoder:Decoder.ignores": [("name.startswith(self.ignored_prefixes) or", "")],
    },
    "olmo3": {
        "config.checkpoint.rope_fields:_original": [
            ("inner.integer", "Fields(inner.path, {}).integer"),
        ],
        "config.checkpoint.shape:ModelShape.rope": [("and self.windows[layer]", "and False")],
    },
    "exaone4": {
        "config.checkpoint.shape:_read_still": [
            ("not each for each in windows", "False for each in windows"),
        ],
    },
    "command-r": {
        "model.decoder:DecoderLayer.forward": [
            ("if self._parallel:", "if False:"),
            ("self.feed_forward(selected(hidden", "self.feed_forward(selected(residual"),
        ],
        "model.decoder:norm_of": [("LayerNorm if features.layer_norm else", "")],
        "model.layers:VocabParallelEmbedding.logits": [("if self.divisor != 1:", "if False:")],
    },
    "command-r-norms": {
        "model.attention:HeadLayerNorms.forward": [
            ("* weight.float()", ""), ("F.layer_norm(x.", "F.rms_norm(x."),
        ],
        "model.attention:HeadLayerNorms.shards": [
            ("moved_rows_of(self._shape) or ((whole, whole),)", "((whole, whole),)"),
        ],
    },
    "command-r7b": {
        "config.checkpoint.shape:_read_still": [
            ("not each for each in windows", "False for each in windows"),
        ],
    },
    "nemotron": {
        "ops.norms:squared_relu": [(".square()", "")],
        "model.decoder:FeedForward.__init__": [("not shape.features.gated", "False")],
        "model.layers:LayerNorm.forward": [("self.bias", "None")],
        "model.decoder:norm_of": [("features.centred", "False")],
    },
}  # fmt: skip
# What one rank alone does not show.
DIVIDED: dict[str, dict[str, list[tuple[str, str]]]] = {
    "olmo2": {
        "model.attention:WideNorms.forward": [
            ("self._collective.all_reduce(means) / self._collective.size", "means"),
            (" / self._collective.size", ""),
        ]
    },
    "glm4": {
        "model.layers:RMSNorm.reduce_add": [("if self._reduces:", "if self._collective.size > 1:")],
        "model.decoder:DecoderLayer._leaving": [("self._collective.all_reduce(part)", "part")],
    },
    "command-r-norms": {
        "model.attention:HeadLayerNorms.shards": [
            (
                "held = slice(split.first_head, split.first_head + split.num_heads)",
                "held = slice(0, split.num_heads)",
            )
        ],
        "model.layers:LayerNorm.reduce_add": [("if self._reduces else part", "if False else part")],
    },
    "gemma2": {
        "model.decoder:DecoderLayer._leaving": [("self._collective.all_reduce(part)", "part")]
    },
    "phi3": {
        "weights.shard:joined": [
            ("start + rows.start, start + rows.stop", "start, start + rows.stop - rows.start")
        ]
    },
}
Law = Callable[[str, Path], None]


def two_ranks(case: str, path: Path) -> None:
    models.test_ranks_equal_one(case, 2, path)


CASES = [
    pytest.param(law, case, where, *change, id=f"{case}-{of}-{where}-{number}")
    for of, law, mutants in (("logits", oracle, MUTANTS), ("ranks", two_ranks, DIVIDED))
    for case, places in mutants.items()
    for where, changes in places.items()
    for number, change in enumerate(changes)
]


@pytest.mark.parametrize(("law", "case", "where", "old", "new"), one_in(24, CASES))
def test_a_feature_left_out_is_red(
    law: Law,
    case: str,
    where: str,
    old: str,
    new: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch, where, old, new)
    with pytest.raises((AssertionError, UserError, RuntimeError)):
        law(case, tmp_path)


@pytest.mark.parametrize("case", one_in(3, RANKED))
def test_the_digest_is_the_same_for_any_number_of_ranks(case: str, tmp_path: Path) -> None:
    path = tmp_path / case
    models.save_random(path, *DENSE[case])

    def sums(group: Any) -> list[PartSum]:
        found = part_sums(models.load(path, group).shards())
        group.all_reduce(torch.zeros(1))  # none leaves before the other has come
        return found

    parts = models.on_ranks(4, tmp_path, sums)
    alone = part_sums(models.load(path).shards())
    assert weights_digest(itertools.chain.from_iterable(parts)) == weights_digest(alone)


@pytest.mark.parametrize("case", one_in(3, ["phi3", "phi4-mini", "glm4"]))
def test_every_number_of_a_checkpoint_is_loaded_once(case: str, tmp_path: Path) -> None:
    """Tensors that are cut or moved: as many numbers, and the same ones."""
    path = tmp_path / case
    model = models.save_random(path, *DENSE[case])
    held = torch.cat([shard.dest.flatten() for shard in models.load(path).shards().values()])
    wanted = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    assert torch.equal(held.sort().values, wanted.sort().values)
