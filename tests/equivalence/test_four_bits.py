"""Weights in four bits as published: their worth, and that whatever serves them changes nothing.

Against `transformers` with what the files are worth; the files are written by tests.support.
"""

import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import worker.weights.four_bits
import worker.weights.packed_files
from tests.equivalence import test_dense_laws as dense_laws
from tests.equivalence import test_models as models
from tests.equivalence import test_mtp as mtp
from tests.equivalence.test_eight_bit_kv import WAYS
from tests.equivalence.test_eight_bit_weights import HYBRID
from tests.equivalence.test_eight_bit_weights import KINDS as OF_EIGHT
from tests.equivalence.test_hybrid_mutants import mutate
from tests.equivalence.test_quantized_files import write
from tests.support.four_bits import FORMS, Written, compressed, config_of_gptq, publish, rounded
from tests.support.pairwise import in_whole, one_in
from tests.support.places import place
from worker.config import ModelConfig, SpecConfig
from worker.config.checkpoint.shape import read_model_shape
from worker.errors import UserError
from worker.ops.packed import worth
from worker.peers.base import SingleCollective
from worker.start.check import check_directories
from worker.start.digest import part_sums, weights_digest
from worker.start.load import saved_by
from worker.weights.base import Matrix
from worker.weights.files import as_held, count_weights
from worker.weights.formats import Readings, format_of
from worker.weights.four_bits import FourBitMatrix

pytestmark = pytest.mark.usefixtures("one_thread", "multiplied")
SIZES = {
    "vocab_size": 200, "hidden_size": 64, "intermediate_size": 192, "head_dim": 32,
    "num_hidden_layers": 1,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", SIZES),
    "phi3": ("Phi3", {"hidden_size": 128, "intermediate_size": 192, "pad_token_id": 0,
                      "num_hidden_layers": 1}),
    "glm": ("Glm4", SIZES | {"pad_token_id": 0}),  # rows of heads that are moved
    "odd": ("Qwen3", SIZES | {"intermediate_size": 99}),
    "experts": (
        "Qwen3Moe",
        SIZES | {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2,
                 "mlp_only_layers": [], "norm_topk_prob": True},
    ),
    "wide": OF_EIGHT["wide"],
}  # fmt: skip


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too, where weights would become f32 for speed."""
    monkeypatch.setattr(worker.weights.four_bits, "multiplies_packed", lambda _: True)


@cache
def saved(kind: str, form: str) -> tuple[Path, torch.nn.Module]:
    """(directory, transformers' model of what its files are worth)."""
    path = place("four") / f"{kind}-{form}"
    reference = models.save_random(path, *KINDS[kind])
    publish(path, form, reference)
    return path, reference


def linears(model: torch.nn.Module) -> dict[str, Any]:
    return {name: each for name, each in model.named_modules() if isinstance(each, Matrix)}


def values_of(matrix: Any) -> torch.Tensor:
    if not isinstance(matrix, FourBitMatrix):
        return matrix.values
    return worth(*matrix.operands)[..., : len(matrix.parts.columns)]


@pytest.mark.parametrize("form", one_in(3, FORMS))
def test_logits_are_those_of_what_the_files_are_worth(form: str) -> None:
    """Of matrices in four bits, and of what these become where none are multiplied."""
    path, reference = saved("qwen3", form)
    stay, whole = models.load(path, eight=True), models.load(path)
    assert all(isinstance(each, FourBitMatrix) for each in linears(stay).values())
    for name, each in linears(whole).items():
        assert torch.equal(values_of(linears(stay)[name]), each.values), name
    models.assert_same(reference, path, chunks=(64,))


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_and_parts_of_it_are_worth_what_was_written(form: str) -> None:
    path, reference = saved("qwen3", form)
    files, declared = sorted(path.glob("*.safetensors")), read_model_shape(path).quantization
    readings, kept = Readings(files, declared), dict(reference.named_parameters())
    num_found = 0
    with safe_open(path / "model.safetensors", framework="pt") as reader:
        for name in reader.keys():  # noqa: SIM118 - not a mapping
            if (tensor := readings.tensor_of(name)) not in kept or "proj" not in name:
                continue
            found: Any = readings.opened(name, reader.get_slice(name))
            num_found += 1
            wanted = kept[tensor].data
            torch.testing.assert_close(found[:, :], wanted, atol=1e-7, rtol=1e-6)
            torch.testing.assert_close(found[13:41, 32:64], wanted[13:41, 32:64])
            whole, width = found.roles["values"][:, :], wanted.shape[1] // 2
            assert whole.shape == (len(wanted), width)
            assert torch.equal(found.roles["values"][3:30, 16:32], whole[3:30, 16:32])
            for each in found.roles.values():
                assert torch.equal(each[21:30, :], each[:, :][21:30])
    assert num_found == 7


@pytest.mark.parametrize("form", ["awq", *in_whole(("gptq-zeros",), ("mxfp4",))])
def test_in_however_many_steps_it_is_read(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.weights.packed_files, "CHUNK", 1 << 9)
    test_a_tensor_and_parts_of_it_are_worth_what_was_written(form)


OTHERS = [("phi3", "awq"), ("glm", "gptq-zeros"), ("odd", "int4-row-zeros"), ("experts", "awq")]


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *OTHERS,
        *in_whole(
            *((kind, form) for kind in ("phi3", "glm", "experts") for form in FORMS
              if (kind, form) not in OTHERS),
            ("odd", "int4-row"),
        ),
    ],
)  # fmt: skip
def test_fused_moved_odd_and_stacked_matrices_are_worth_what_the_files_are(
    kind: str, form: str
) -> None:
    path, reference = saved(kind, form)
    stay, whole = models.load(path, eight=True), models.load(path)
    for name, each in linears(whole).items():
        held = linears(stay)[name]
        assert isinstance(held, FourBitMatrix)
        assert torch.equal(values_of(held), each.values), name
    (found, *_), (_, wanted) = stepped(stay), models.expect(reference, models.PROMPTS[0], [0])
    assert (found - wanted).abs().max() < models.BOUND


def stepped(model: Any) -> list[torch.Tensor]:
    """Logits of a step of two prompts."""
    engine = models.Engine(model)
    logits = engine.step([0, 0], [*models.PROMPTS])
    engine.pool.close()
    return logits


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("qwen3", "gptq-zeros"),
        *in_whole(("experts", "int4-zeros"), ("phi3", "awq"), ("glm", "nvfp4"), ("qwen3", "mxfp4")),
        *in_whole(("wide", "awq"), ("wide", "nvfp4")),
    ],
)
def test_ranks_equal_one(kind: str, form: str, tmp_path: Path) -> None:
    """Of files, and of noise."""
    models.assert_ranks_equal_one(
        4 if kind == "wide" else 2, saved(kind, form)[0], tmp_path, eight=True
    )


def test_two_ranks_have_a_layer_s_digest_together() -> None:
    """Of a layout that is turned: what a rank slices of a tensor is its part of the whole."""
    path, _ = saved("phi3", "awq")
    digests = []
    for size in (1, 2):
        sums = [
            each
            for rank in range(size)
            for each in part_sums(models.load(path, Ranked(rank, size), eight=True).shards())
        ]
        digests.append(weights_digest(sums))
    assert digests[0] == digests[1]


class Ranked(SingleCollective):
    """A rank that only loads."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size


def test_ranks_that_would_share_a_group_are_refused_by_name() -> None:
    path, _ = saved("qwen3", "awq")
    field = "prefill.engine.tensor_parallel"
    for size, said in ((2, ""), (4, rf"{field}: 0 to 48 of 192 .* \(steps of 32\).*; set it to 2")):
        ranks: Any = {field: (size, "auto")}
        model = ModelConfig(path=str(path))
        if not said:
            check_directories(model, SpecConfig(), ranks)
            continue
        with pytest.raises(UserError, match=said):
            check_directories(model, SpecConfig(), ranks)


LEFT: dict[str, tuple[str, str, dict[str, Any]]] = {
    # form, a tensor that stays in 16 bits, what says so -> the layer that is no longer packed
    "layers.0.attention.qkv": (
        "int4", "self_attn.q_proj", {"ignore": ["lm_head", "re:.*self_attn.q_proj"]},
    ),
    "layers.0.feed_forward.down": (
        "awq", "mlp.down_proj", {"modules_to_not_convert": ["down_proj"]},
    ),
    "layers.0.attention.output": (
        "gptq", "self_attn.o_proj", {"dynamic": {r"-:.*\.o_proj": {}}},
    ),
    "layers.0.feed_forward.gate_up": (
        "modelopt", "mlp.up_proj", {"ignore": ["*.mlp.up*"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("layer", LEFT)
def test_what_the_files_leave_in_16_bits_stays(layer: str, tmp_path: Path) -> None:
    """A fused matrix with such a part becomes the model's dtype."""
    form, left, said = LEFT[layer]
    reference = models.save_random(tmp_path, *KINDS["qwen3"])
    publish(tmp_path, form, reference, lambda name: left in name)
    models.edit(tmp_path, quantization_config=FORMS[form].config | said)
    model = models.load(tmp_path, eight=True)
    plain = {name for name, x in linears(model).items() if not isinstance(x, FourBitMatrix)}
    assert plain == {f"{layer}.weight"}
    found, wanted = stepped(model)[0], models.expect(reference, models.PROMPTS[0], [0])[1]
    assert (found - wanted).abs().max() < models.BOUND
    check_directories(ModelConfig(path=str(tmp_path)), SpecConfig(), {})


GROUPS = compressed("pack-quantized", 32)
REFUSED: list[tuple[dict[str, Any], str]] = [
    (config_of_gptq(32, desc_act=True), "desc_act: True; supported: False; rows of a group"),
    (config_of_gptq(32, lm_head=True), "lm_head: True"),
    (config_of_gptq(48), "group_size: 48; read: -1, 32, 64, 128"),
    (config_of_gptq(32, checkpoint_format="marlin"), "checkpoint_format: 'marlin'"),
    (config_of_gptq(32, dynamic={"+:.*q_proj": {"bits": 8}}), r"dynamic: '\+:\.\*q_proj'"),
    (config_of_gptq(32, adapter={"lora": 1}), "adapter: an unknown field"),
    (config_of_gptq(32) | {"bits": 8}, "bits: 8; read: 4"),
    (FORMS["awq"].config | {"version": "gemv"}, "version: 'gemv'"),
    (FORMS["awq"].config | {"zero_point": False}, "zero_point: False"),
    (compressed("pack-quantized", 256), r"weights\.group_size: 256; read: \[32, 64, 128\]"),
    (compressed("pack-quantized", 32, num_bits=8), r"group_0\.weights\.num_bits: 8"),
    (compressed("pack-quantized", 32, actorder="group"), r"weights\.actorder: 'group'"),
    (compressed("mxfp4-pack-quantized", 64), r"weights\.group_size: 64; read: \[32\]"),
    (FORMS["modelopt"].config | {"group_size": 32}, "group_size: 32"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_another_form_is_refused_by_field_and_value(config, said: str, tmp_path: Path) -> None:
    write(tmp_path, quantization_config=config)
    with pytest.raises(UserError, match=said) as caught:
        read_model_shape(tmp_path)
    assert "take" in str(caught.value)


DOWN = "model.layers.0.mlp.down_proj."


@pytest.mark.parametrize(
    ("form", "end", "change", "said"),
    [
        ("gptq", "g_idx", lambda x: x.flip(0), "g_idx moves columns, as desc_act"),
        ("gptq", "qzeros", lambda x: x + 1, r"qzeros has \[7, 8\], and sym: true means all 8"),
        ("awq", "scales", lambda x: x[1:].clone(), r"has scales of shape \[64, 5\]"),
        ("awq", "scales", None, "qweight has no scales beside it"),
        ("mxfp4", "weight_scale", lambda x: x.fill_(255), "weight_scale has a 255"),
        ("mxfp4", "weight_scale", lambda x: x.fill_(193), "193: .* none above 192 is computed"),
        ("int4", "weight_shape", lambda x: x + 9, r"has room for \[64, 192\], weight_shape says"),
    ],
)
def test_a_file_that_says_otherwise_is_refused_by_tensor(
    form: str, end: str, change: Any, said: str, tmp_path: Path
) -> None:
    shutil.copytree(saved("qwen3", form)[0], tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        held = load_file(file)
        if DOWN + end in held:
            tensor = held.pop(DOWN + end)
            save_file(held | ({} if change is None else {DOWN + end: change(tensor)}), file)
    with pytest.raises(UserError, match=f"mlp.down_proj.*{said}"):
        models.load(tmp_path / "model", eight=True)


def test_a_bias_of_zeros_is_none_and_another_is_refused(tmp_path: Path) -> None:
    """Older files of GPTQ have one everywhere."""
    path = shutil.copytree(saved("qwen3", "gptq")[0], tmp_path / "model")
    held = load_file(path / "model.safetensors")
    save_file(held | {f"{DOWN}bias": torch.zeros(64)}, path / "model.safetensors")
    models.load(path)
    save_file(held | {f"{DOWN}bias": torch.ones(64)}, path / "model.safetensors")
    with pytest.raises(UserError, match=r"unexpected tensors: .*down_proj\.bias"):
        models.load(path)


def test_packed_tensors_that_config_json_does_not_declare_are_refused(tmp_path: Path) -> None:
    shutil.copytree(saved("qwen3", "awq")[0], tmp_path / "model")
    models.edit(tmp_path / "model", quantization_config=GROUPS)
    model = ModelConfig(path=str(tmp_path / "model"))
    with pytest.raises(UserError, match=r"qweight: weights in a format \(four bits of AWQ or GPTQ"):
        check_directories(model, SpecConfig(), {})
    models.edit(tmp_path / "model", quantization_config="absent")
    with pytest.raises(UserError, match="json does not name"):
        check_directories(model, SpecConfig(), {})
    assert count_weights(saved("qwen3", "awq")[0]) == count_weights(saved("qwen3", "int4")[0])


@pytest.mark.filterwarnings(r"ignore:::torch\.")  # of Dynamo
@pytest.mark.parametrize("form", in_whole(("awq",), ("nvfp4",)))
def test_traced_layers_are_those_of_eager(form: str) -> None:
    dense_laws.check_traced(saved("qwen3", form)[0])


SHORT = ("pulled, two ranks, ngram",)
REST = [(way,) for way in WAYS if way != SHORT[0] and "four" not in way]


@pytest.mark.parametrize("way", [*SHORT, *in_whole(*REST)])
@pytest.mark.parametrize(
    ("kind", "form"), [("qwen3", "int4-zeros"), *in_whole(("experts", "awq"), ("phi3", "nvfp4"))]
)
def test_whatever_serves_a_request_changes_nothing(kind: str, form: str, way: str) -> None:
    path, reference = saved(kind, form)
    assert dense_laws.served(path, WAYS[way]) == dense_laws.greedy(reference)


def test_the_last_rows_of_a_product_are_those_of_the_whole() -> None:
    qkv = models.load(saved("phi3", "awq")[0], eight=True).layers[0].attention.qkv
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))
    size = qkv.part_sizes[-1]
    torch.testing.assert_close(qkv.last(x, 1), qkv(x)[:, -size:])


@cache
def with_mtp() -> Path:
    """A hybrid with experts in four bits, whose MTP layer is in 16, which nothing says."""
    path = place("four") / "mtp"
    mtp.save_mtp(path, "Qwen3_5Moe", HYBRID)
    publish(path, "awq", left=lambda name: name.startswith("mtp"))
    return path


def test_a_drafter_that_the_files_have_in_16_bits_is_in_16_bits() -> None:
    declared = read_model_shape(with_mtp()).quantization
    assert declared is not None
    held = as_held(declared, with_mtp())
    assert held is not None
    for module in ("self_attn.q_proj", "mlp.experts.3.up_proj", "mlp.shared_expert.down_proj"):
        assert declared.takes(f"mtp.layers.0.{module}")
        assert not held.takes(f"mtp.layers.0.{module}")
        assert held.takes(f"model.layers.1.{module}")


@pytest.mark.whole
@pytest.mark.parametrize("way", ["here", "preempted", "pulled, two ranks, ngram"])
def test_a_drafter_in_16_bits_changes_nothing(way: str) -> None:
    how = WAYS[way] | {"max_prefill_tokens": 64}
    plain = dense_laws.served(with_mtp(), WAYS["here"] | {"max_prefill_tokens": 64}, num=2)
    drafts = {"drafter": "mtp", "widths": [4]}
    assert dense_laws.served(with_mtp(), how | drafts, num=2) == plain


def test_a_start_says_what_is_saved() -> None:
    model = models.load(saved("qwen3", "awq")[0], eight=True)
    kept = format_of(model.shape.quantization)
    said = saved_by(kept, model, torch.float32)
    assert re.fullmatch(
        r"4 matrices in four bits \(awq\) take \S+ GB here, \S+ GB in torch.float32", said
    )
    here, before = (float(each.split()[0]) for each in said.split("take ")[1].split(", "))
    assert here == pytest.approx(before * (4 + 16 / 32 + 8 / 32) / 32, rel=0.01)


@pytest.mark.whole
@pytest.mark.parametrize("form", [form for form in FORMS if form.startswith(("int4", "mx", "nv"))])
def test_logits_are_those_of_what_compressed_tensors_has_written(form: str, tmp_path: Path) -> None:
    """By its own compressor and decompressor; the package takes ten seconds to import."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme

    config = FORMS[form].config
    group = config["config_groups"]["group_0"]
    library: Any = BaseCompressor.get_value_from_registry(config["format"])
    scheme = QuantizationScheme(**group)

    def written(w: torch.Tensor) -> Written:
        ours, _ = FORMS[form].write(w)
        made = {"weight": w, "weight_scale": ours["weight_scale"].float()}
        if form == "mxfp4":
            made["weight_scale"] = (ours["weight_scale"].float() - 127).exp2()
        if form == "nvfp4":
            made["weight_global_scale"] = ours["weight_global_scale"]
        if form.endswith("zeros"):
            zero = rounded(w, group["weights"].get("group_size", 0), w.dtype, zeros=True)[2]
            made["weight_zero_point"] = (zero - 8).to(torch.int8)
        theirs = library.compress(made, scheme)
        if form.startswith("int4"):
            same = [end for end in ours if torch.equal(theirs[end], ours[end])]
            assert {*ours} - {*same} <= {"weight_packed"}, "ties are rounded otherwise"
            return theirs, library.decompress(theirs, scheme)["weight"]
        codes = unpack_fp4_from_uint8(theirs["weight_packed"], *w.shape, dtype=torch.float32)
        steps = made["weight_scale"].to(theirs["weight_scale"].dtype).float()  # its own has bf16
        steps = made["weight_scale"] if form == "mxfp4" else steps / made["weight_global_scale"]
        return theirs, (codes.unflatten(1, (steps.shape[1], -1)) * steps[..., None]).flatten(1)

    reference = models.save_random(tmp_path, *KINDS["qwen3"])
    publish(tmp_path, form, reference, write=written)
    models.assert_same(reference, tmp_path, chunks=(64, 5))


FILES = "weights.packed_files:PackedMatrix"
MUTANTS = [
    (f"{FILES}._numbers", "nibbles = nibbles[..., list(at.places)]", "pass"),
    (f"{FILES}._numbers", "(stored & 15, stored >> 4)", "(stored >> 4, stored & 15)"),
    (f"{FILES}._numbers", ".narrow(0, skip,", ".narrow(0, 0,"),
    (f"{FILES}._pair", "place % 2 == high", "place % 2 != high"),
    (f"{FILES}._pair", "even, odd = words", "odd, even = words"),
    (f"{FILES}._values", "narrow(0, rows.start % per,", "narrow(0, 0,"),
    (f"{FILES}._zeros", "+ self._layout.more", "+ 0"),
    (f"{FILES}._zeros", " & 15", ""),
    (f"{FILES}._scales", "stored[columns, rows].t()", "stored[columns, rows].roll(1, 0).t()"),
    (f"{FILES}._factors", "self._layout.divides", "False"),
    ("ops.packed:unpacked", "(lines & 15, lines >> 4)", "(lines >> 4, lines & 15)"),
    ("ops.packed:unpacked", "movedim(-3, -1)", "movedim(-3, -2)"),
    ("ops.packed:worth", "- E8M0_BIAS", "- E8M0_BIAS + 1"),
    ("ops.packed:worth", "zeros.unsqueeze(-1).float()", "zeros.unsqueeze(-1).float() + 1"),
    ("ops.packed:worth", "numbers * factors", "numbers"),
    ("weights.four_bits:FourBits.stores", "coarse(columns, self._group)", "all_of(3)"),
    ("weights.four_bits:FourBitMatrix.product", "x[first_row:]", "x[:-first_row]"),
    ("ops.experts.product:expert_products_ref", "(down, *packed[1])", "(down, *packed[0])"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "old", "new"), one_in(6, MUTANTS))
def test_a_mutant_is_red(where: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, form in (("phi3", "awq"), ("experts", "awq")):
        saved(kind, form)
    for form in ("awq", "gptq-zeros", "mxfp4", "nvfp4"):
        saved("qwen3", form)
    mutate(monkeypatch, where, old, new)
    with pytest.raises((AssertionError, RuntimeError, UserError)):  # noqa: PT012 - whichever
        for form in ("awq", "gptq-zeros", "mxfp4", "nvfp4"):
            test_a_tensor_and_parts_of_it_are_worth_what_was_written(form)
        test_two_ranks_have_a_layer_s_digest_together()
        test_the_last_rows_of_a_product_are_those_of_the_whole()
        test_fused_moved_odd_and_stacked_matrices_are_worth_what_the_files_are("experts", "awq")
