"""Mistakes that `serve` tells before Ray starts, each with its path, without heavy imports."""

import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from cluster.config import Config, load
from cluster.diagnose.checks import check_model, check_port, of_start
from cluster.diagnose.facts import count_gpus, read_facts
from cluster.diagnose.finding import refuse
from tests.support.commands import REPOSITORY
from worker.config.backends import ATTENTION
from worker.errors import UserError
from worker.transfer.base import KINDS, TRANSPORTS
from worker.transfer.mooncake_engine import SELECTION
from worker.weights.files import INDEX_NAME

TINY = Config().model.directory
DRAFTER = TINY.with_name("tiny-chain")
FACTS = read_facts()
ON_CHAIN = "spec.drafter=chain"


def check(*sets: str, num_gpus: int = 0) -> None:
    refuse(of_start(load(None, ["cluster.port=0", *sets]), num_gpus, FACTS))


def refused(*sets: str, num_gpus: int = 0) -> str:
    with pytest.raises(UserError) as caught:
        check(*sets, num_gpus=num_gpus)
    assert str(caught.value).startswith(caught.value.param)
    return str(caught.value)


def fits(*sets: str) -> None:
    check_model(load(None, sets))


def model_refused(directory: Path, *sets: str) -> str:
    with pytest.raises(UserError) as caught:
        fits(f"model.path={directory}", *sets)
    return str(caught.value)


def rewritten(directory: Path, **fields: object) -> Path:
    """With other fields in its config.json than the bundled one's."""
    bundled = DRAFTER if directory.name == "drafter" else TINY
    config = json.loads((bundled / "config.json").read_text()) | fields
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model, in two files with an index."""
    directory = tmp_path / "model"
    shutil.copytree(TINY, directory)
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    with safe_open(TINY / "model.safetensors", framework="numpy") as reader:
        names = list(reader.keys())
    save_file({"extra": np.zeros(3)}, directory / "model-2.safetensors")
    weight_map = dict.fromkeys(names, "model-1.safetensors") | {"extra": "model-2.safetensors"}
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return directory


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DRAFTER, tmp_path / "drafter"))


def test_a_drafter_is_checked_with_its_target(model: Path, drafter: Path) -> None:
    fits(ON_CHAIN)  # the bundled model has one
    with_path = ON_CHAIN, f"spec.path={drafter}"
    fits(f"model.path={model}", *with_path)
    unset = model_refused(model, ON_CHAIN)
    assert unset.startswith(f"spec.path: {model}/config.json: architectures: ")
    assert "spec.path is not set" in unset
    none = model_refused(model, ON_CHAIN, "spec.path=/none")
    assert "spec.path: there is no directory /none" in none
    rewritten(drafter, vocab_size=7)
    assert "vocab_size: 7, but the target's is" in model_refused(model, *with_path)
    weights = rewritten(drafter) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "model.safetensors: cut short" in model_refused(model, *with_path)
    with pytest.raises(UserError, match="spec: path names a drafter, but drafter is none"):
        load(None, [f"spec.path={drafter}"])


def test_windows_fit_into_a_drafter_s_block() -> None:
    on = "spec.drafter=dflash"
    for fitting in ("spec.widths=auto", "spec.widths=[1,8]", "spec.block=8"):
        fits(on, fitting)
    for field, value in (("widths", "[1,16]"), ("block", "16")):
        with pytest.raises(UserError, match=f"spec.{field}: 16, but the drafter's block has 8"):
            fits(on, f"spec.{field}={value}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "router.policy=fair",
            "router.policy: 'fair' is none of: least_loaded, prefix_aware, round_robin",
        ),
        ("transport.name=nixl", "transport.name: 'nixl' is none of: mixed, mooncake"),
        ("transport.name=shm transport.kind=rdma", "transport.kind: 'rdma' is none of: shm"),
        ("decode.engine.attention.decode=fa9", "decode.engine.attention.decode: 'fa9' is none of"),
        ("router.api_key_file=/no/keys", "router.api_key_file: /no/keys: No such file"),
        ("cluster.host=192.0.2.1", "cluster.host: 192.0.2.1:0: "),
        ("cluster.host=no.such.host.invalid", "cluster.host: no.such.host.invalid:0: "),
        ("cluster.local_ray.num_cpus=1", "cluster.local_ray.num_cpus: is 1, but all processes re"),
        ("decode.tp=4 cluster.local_ray.num_cpus=4", "cluster.local_ray.num_cpus: is 4, but all "
         "processes reserve 5"),
        ("decode.num_gpus=2", "decode.num_gpus: GPUs are asked for (2 for decode), and here are 0"),
        ("prefill.engine.device=cuda", "prefill.num_gpus: GPUs are asked for (1 for prefill), and"),
        ("prefill.engine.attention.prefill=flashinfer", "prefill.engine.attention.prefill: "
         "flashinfer needs flashinfer, which is not"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_path(text: str, expected: str) -> None:
    if "flashinfer needs" in expected and find_spec("flashinfer"):
        pytest.skip("flashinfer is installed")
    assert refused(*text.split()).startswith(expected)


def test_every_mistake_is_told_at_once() -> None:
    lines = refused("router.policy=x", "transport.name=y", "decode.num_gpus=1").splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "router.policy", "transport.name", "decode.num_gpus",
    ]  # fmt: skip


@pytest.mark.parametrize("shared", [False, True])
def test_a_port_in_use_is_told_even_if_it_could_be_shared(shared: bool) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=shared) as taken:
        port = taken.getsockname()[1]
        message = refused(f"cluster.port={port}", "routers.replicas=2")
        assert message.startswith(f"cluster.port: 127.0.0.1:{port}: Address already in use")
        assert "--port" in message
        with pytest.raises(UserError, match="already in use"):
            check_port(load(None, [f"cluster.port={port}"]))
        check_port(load(None, [f"cluster.port={port}", "routers.num_cpus=1"]))
    check(f"cluster.port={port}")


def test_gpus_are_counted_over_both_roles() -> None:
    message = refused("prefill.num_gpus=1", "decode.num_gpus=1", num_gpus=1)
    assert "(1 for prefill and 1 for decode), and here are 1" in message
    assert "--set prefill.num_gpus=0.5 --set decode.num_gpus=0.5" in message
    assert "decode.num_gpus" in refused("decode.num_gpus=0.5", "decode.replicas=3", num_gpus=1)


def test_gpus_are_counted_rank_by_rank_and_ranks_share_none() -> None:
    message = refused("decode.tp=4", "decode.replicas=2", num_gpus=4)
    assert message.startswith("decode.tp: GPUs are asked for (1 for prefill and 8 for decode), and")
    assert "0.5" not in message
    alone = refused("decode.tp=2", num_gpus=2)
    assert "here are 2. Decode workers alone: --prefill 0. On the CPU: " in alone
    assert "prefill.tp: GPUs are asked for (2 for prefill" in refused("prefill.tp=2", num_gpus=2)
    with pytest.raises(UserError, match=r"decode: num_gpus is 0\.5 and tp 2: ranks of a worker"):
        load(None, ["decode.num_gpus=0.5", "decode.tp=2"])


def test_a_collective_of_other_devices_is_refused() -> None:
    for role, name, devices in (
        ("decode", "custom", "CPUs"), ("decode", "nccl", "CPUs"), ("prefill", "gloo", "GPUs")
    ):  # fmt: skip
        sets = "decode.tp=2", f"{role}.engine.collective={name}"
        message = refused(*sets, num_gpus=2 if devices == "GPUs" else 0)
        says = f"{name}, but {role} workers compute on {devices}; gloo is for CPUs"
        assert f"{role}.engine.collective: {says}" in message


def test_a_model_that_cannot_be_divided_among_ranks_is_refused(model: Path) -> None:
    for fitting in ("decode.tp=2", "prefill.tp=4", "prefill.tp=1"):
        fits(fitting)
        fits(fitting, "spec.drafter=dflash")
    message = model_refused(TINY, "decode.tp=3")
    assert message == "decode.tp: 4 attention heads cannot be divided among 3 ranks; set it to 2"
    for fields, says in (
        ({"vocab_size": 1022}, "vocab_size 1022 cannot be divided among 4 ranks"),
        ({"intermediate_size": 510}, "intermediate_size 510 cannot be divided among 4 ranks"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            "3 kv heads can be neither divided among 4",
        ),
    ):
        changed = rewritten(model, **fields), "prefill.tp=4", "model.load_format=dummy"
        assert model_refused(*changed).startswith(f"prefill.tp: {says}")
    fits(f"model.path={model}", "prefill.tp=4", "prefill.replicas=0")


def test_a_drafter_that_cannot_be_divided_among_ranks_is_refused(drafter: Path) -> None:
    rewritten(drafter, num_attention_heads=3, num_key_value_heads=3)
    message = model_refused(TINY, "decode.tp=2", ON_CHAIN, f"spec.path={drafter}")
    says = "3 attention heads cannot be divided among 2 ranks: of the drafter; set it to 1"
    assert message == f"decode.tp: {says}"


def test_a_torch_without_cuda_is_told_where_there_is_a_gpu() -> None:
    if torch.version.cuda:
        pytest.skip("this torch has CUDA")
    assert "cannot use the GPU: pip install 'kvlane[cuda]'" in refused(num_gpus=2)
    check("prefill.engine.device=cpu", "decode.engine.device=cpu", num_gpus=2)


@pytest.mark.parametrize(("visible", "most"), [(None, 99), ("", 0), ("NoDevFiles", 0), ("0", 1)])
def test_gpus_that_are_hidden_do_not_count(visible: str | None, most: int) -> None:
    assert count_gpus(visible) == min(most, torch.cuda.device_count())


def test_a_model_is_checked_file_by_file(model: Path) -> None:
    assert model_refused(model / "nope").startswith("model.path: there is no directory ")
    fits(f"model.path={model}")
    for name in ("config.json", "tokenizer.json", "model-1.safetensors"):
        path, whole = model / name, (model / name).read_bytes()
        path.unlink()
        for _ in ("it is not there", "it is cut short"):
            message = model_refused(model)
            assert message.startswith("model.path: ")
            assert name in message
            path.write_bytes(whole[:-100])
        path.write_bytes(whole)


def test_an_index_that_names_what_no_file_holds_is_told(model: Path) -> None:
    index = json.loads((model / INDEX_NAME).read_text())
    index["weight_map"]["gone.weight"] = "model-2.safetensors"
    (model / INDEX_NAME).write_text(json.dumps(index))
    assert "names tensors that are in no file: gone.weight" in model_refused(model)


def test_dummy_weights_need_no_weight_files(model: Path) -> None:
    for path in model.glob("*.safetensors*"):
        path.unlink()
    assert "no *.safetensors" in model_refused(model)
    fits(f"model.path={model}", "model.load_format=dummy")


def test_what_a_model_cannot_be_or_do_is_told(model: Path) -> None:
    message = model_refused(rewritten(model, architectures=["MambaForCausalLM"]))
    assert "'MambaForCausalLM' is not supported, for it needs recurrent layers" in message
    assert "; take Qwen/Qwen3.5-9B" in message
    says = "model.max_model_len: is 999999, but the model has "
    assert model_refused(TINY, "model.max_model_len=999999").startswith(says)


def test_tables_of_names_agree_with_what_they_name() -> None:
    assert set(KINDS) == set(TRANSPORTS)
    assert set(KINDS["mooncake"]) == set(SELECTION)
    assert {"reference", "triton"} <= set(ATTENTION)


def test_neither_torch_nor_ray_is_imported_to_tell_a_mistake_which_leaves_nothing(
    tmp_path: Path,
) -> None:
    program = (
        "import sys; from cluster.cli import main; "
        "assert main(['serve', '--model', '/no/such/model', '--port', '0']) == 2; "
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    own = {"TMPDIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=os.environ | own,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "[]\n"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    remedy = "take one, or a model's name"
    assert done.stderr == f"error: model.path: there is no directory /no/such/model; {remedy}\n"
