"""The configuration tree: sources, error messages, size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cluster.config import Config, differences, leaves, load
from cluster.launch import num_cpus
from cluster.resolve import (
    ROLES,
    bundle_of,
    reserved,
    with_collective,
    with_devices,
    with_transport,
)
from cluster.seats import seats_of
from worker.errors import UserError

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "deploy" / "examples"


def message(*sets: str, path: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load(path, sets)
    return str(caught.value)


def test_the_tree_has_at_most_140_leaves() -> None:
    assert 50 < len(list(leaves())) <= 140


def test_flags_win_over_sets_and_sets_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("prefill: {replicas: 2}\ndecode: {replicas: 2}\nrouters: {replicas: 2}\n")
    config = load(
        path,
        ["decode.replicas=3", "routers.replicas=3"],
        {"routers.replicas": 4, "cluster.port": None},
    )
    assert (config.prefill.replicas, config.decode.replicas, config.routers.replicas) == (2, 3, 4)
    assert config.cluster.port == 8000


def test_a_set_value_is_yaml() -> None:
    config = load(None, ["prefill.resources={rdma: 1}", "decode.resources.nvme=2"])
    assert config.prefill.resources == {"rdma": 1}
    assert config.decode.resources == {"nvme": 2}


def test_what_is_printed_loads_again(tmp_path: Path) -> None:
    config = load(None, ["decode.engine.threads=2"])
    path = tmp_path / "f.yaml"
    path.write_text(yaml.safe_dump(config.shown()))
    assert load(path) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prefill.replica=1", "prefill.replica: unknown key, did you mean prefill.replicas?"),
        ("page_size=1", "page_size: unknown key, did you mean kv.page_size?"),
        ("engin.device=cpu", "engin: unknown key, did you mean decode.engine or prefill.engine?"),
        ("zzz=1", "zzz: unknown key"),
        ("prefill.replicas=-1", "prefill.replicas: Input should be greater than or equal to 0"),
        ("prefill.resources={a: b}", "prefill.resources.a: Input should be a valid number, "
         "unable to parse string as a number"),
        ("decode.num_gpus=-1", "decode.num_gpus: Input should be 'auto' or Input should be greater "
         "than or equal to 0"),
        ("decode.replicas=0", "decode.replicas must be at least 1: decode workers own the "
         "requests"),
        ("a", "--set a: expected PATH=VALUE, for example decode.replicas=2"),
        ("model=3", "model: Input should be a valid dictionary or instance of ModelConfig"),
    ],
)  # fmt: skip
def test_mistakes_name_the_path(text: str, expected: str) -> None:
    assert message(text) == expected


def test_every_mistake_is_told_at_once() -> None:
    lines = message("prefill.replicas=-1", "prefil.replicas=1").splitlines()
    assert len(lines) == 2


def test_alternatives_of_a_field_are_one_line() -> None:
    line = message("prefill.engine.threads=many")
    assert line.startswith("prefill.engine.threads: Input should be 'auto' or ")
    assert "\n" not in line


def test_a_value_cannot_have_keys_below_it() -> None:
    assert message("model=tiny", "model.path=tiny").startswith("model.path: model is a value")


def test_a_file_that_is_not_there_or_not_yaml(tmp_path: Path) -> None:
    assert "No such file" in message(path=tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [")
    assert "not YAML" in message(path=bad)
    bad.write_text("- 1")
    assert "expected a mapping at the top, found list" in message(path=bad)


def test_a_worker_is_told_its_own_engine_and_the_common_parts() -> None:
    config = load(None, ["prefill.engine.max_num_reqs=7", "kv.page_size=32"])
    assert config.worker("prefill").engine.max_num_reqs == 7
    assert config.worker("decode").engine.max_num_reqs == "auto"
    assert config.worker("decode").kv.page_size == 32


def test_devices_are_decided_by_what_ray_has() -> None:
    none, some = (with_devices(Config(), has_gpus=has) for has in (False, True))
    assert (none.prefill.num_gpus, none.prefill.engine.device) == (0, "cpu")
    assert (some.decode.num_gpus, some.decode.engine.device) == (1, "auto")
    assert with_devices(none, has_gpus=True) == none
    forced = with_devices(load(None, ["decode.engine.device=cpu"]), has_gpus=True)
    assert (forced.prefill.num_gpus, forced.decode.num_gpus) == (1, 0)


def test_a_worker_with_a_part_of_a_gpu_takes_that_part_of_its_memory() -> None:
    sets = ["prefill.num_gpus=0.4", "decode.num_gpus=0.5", "decode.engine.memory_fraction=0.55"]
    shared = with_devices(load(None, sets), has_gpus=True)
    assert shared.prefill.engine.memory_fraction == pytest.approx(0.34)
    assert shared.decode.engine.memory_fraction == 0.55
    assert with_devices(shared, has_gpus=True) == shared
    whole = with_devices(Config(), has_gpus=True)
    assert whole.decode.engine.memory_fraction == "auto"


@pytest.mark.parametrize(
    ("sets", "local_gpus", "expected"),
    [
        ([], 1, (0.5, 0.5)),
        ([], 2, (1, 1)),
        (["prefill.replicas=2"], 2, (0.5, 0.5)),  # two thirds each would fit twice only
        (["decode.replicas=3"], 1, (0.25, 0.25)),
        (["decode.replicas=2"], 1, (0.3333, 0.3333)),
        (["decode.num_gpus=0.5"], 1, (0.5, 0.5)),
        (["decode.num_gpus=0.75"], 1, (0.25, 0.75)),
        (["decode.engine.device=cpu"], 1, (1, 0)),
        (["decode.num_gpus=1"], 1, (1, 1)),  # has no place, and says so
    ],
)
def test_workers_share_what_gpus_there_are(
    sets: list[str], local_gpus: float, expected: tuple[float, float]
) -> None:
    config = with_devices(load(None, sets), has_gpus=True, local_gpus=local_gpus)
    assert (config.prefill.num_gpus, config.decode.num_gpus) == expected
    assert with_devices(config, has_gpus=True, local_gpus=local_gpus) == config


@pytest.mark.parametrize(
    ("sets", "has_gpus", "num"),
    [
        ([], False, 1),
        ([], True, 1),
        (["decode.replicas=3"], True, 2),
        (["decode.replicas=5", "decode.num_gpus=0.5"], True, 2),
        (["decode.replicas=3"], False, 1),
        (["decode.replicas=3", "routers.replicas=1"], True, 1),
    ],
)
def test_there_is_a_router_for_two_gpus_that_decode(
    sets: list[str], has_gpus: bool, num: int
) -> None:
    config = with_devices(load(None, sets), has_gpus=has_gpus)
    assert config.routers.replicas == num
    assert with_devices(config, has_gpus=has_gpus) == config
    assert sum(seat.role == "router" for seat in seats_of(config)) == num


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_load_and_fit_their_gpus(path: Path) -> None:
    config = with_devices(load(path), has_gpus=True)
    assert max(config.role(role).replicas for role in ROLES) == 1
    num_gpus = sum(float(config.role(role).num_gpus) for role in ROLES)
    assert num_gpus == {"one-gpu": 1, "two-gpus": 2, "two-hosts": 2}[path.stem]
    if num_gpus == 1:
        assert sum(float(config.role(role).engine.memory_fraction) for role in ROLES) < 0.98


def test_shm_is_chosen_only_where_it_reaches_everybody() -> None:
    cpu = with_devices(Config(), has_gpus=False)
    assert with_transport(cpu, ["n1", "n1"]).transport.name == "shm"
    assert with_transport(cpu, ["n1", "n2"]).transport.name == "mooncake"
    chosen = load(None, ["transport.name=mooncake"])
    assert with_transport(with_devices(chosen, has_gpus=False), ["n1"]).transport.name == "mooncake"


@pytest.mark.parametrize(
    ("sets", "has_gpus", "nodes", "kind"),
    [
        ([], True, ["n1", "n1"], "nvlink"),
        ([], True, ["n1", "n2"], "tcp"),
        (["transport.kind=tcp"], True, ["n1", "n1"], "tcp"),
        (["prefill.engine.device=cpu"], True, ["n1", "n1"], "tcp"),
        (["transport.name=mooncake"], False, ["n1", "n1"], "tcp"),
        ([], False, ["n1", "n2"], "tcp"),
        ([], False, ["n1", "n1"], "auto"),  # of shm, which has but one
    ],
)
def test_nvlink_is_chosen_only_between_gpus_of_one_node(
    sets: list[str], has_gpus: bool, nodes: list[str], kind: str
) -> None:
    config = with_devices(load(None, sets), has_gpus=has_gpus)
    assert with_transport(config, nodes).transport.kind == kind


def test_every_rank_counts() -> None:
    on_gpus = load(None, ["decode.tp=4", "decode.replicas=2", "prefill.tp=2"])
    config = with_devices(on_gpus, has_gpus=True)
    assert (config.prefill.num_gpus, config.decode.num_gpus) == (1, 1)
    assert (reserved(config, "GPU"), reserved(config, "CPU")) == (10, 10)
    assert config.routers.num == 4
    assert num_cpus(load(None, ["decode.tp=64"])) == 65
    assert (config.worker("decode").tp, config.worker("prefill").tp) == (4, 2)


def test_ranks_share_no_gpu_and_others_share_what_is_left() -> None:
    config = with_devices(load(None, ["decode.tp=2"]), has_gpus=True, local_gpus=3)
    assert (config.prefill.num_gpus, config.decode.num_gpus) == (1, 1)
    three = load(None, ["decode.tp=2", "prefill.replicas=2"])
    config = with_devices(three, has_gpus=True, local_gpus=3)
    assert (config.prefill.num_gpus, config.decode.num_gpus) == (0.5, 1)
    config = with_devices(load(None, ["decode.tp=2"]), has_gpus=True, local_gpus=2)
    assert (config.prefill.num_gpus, config.decode.num_gpus) == (1, 1)  # the check says: too few


@pytest.mark.parametrize(
    ("sets", "has_gpus", "nodes", "collective"),
    [
        ([], True, ["a", "a"], "auto"),
        ([], True, ["a", "b"], "nccl"),
        ([], False, ["a", "b"], "auto"),
        (["decode.engine.collective=custom"], True, ["a", "b"], "custom"),
    ],
)
def test_nccl_is_chosen_where_ranks_span_nodes(
    sets: list[str], has_gpus: bool, nodes: list[str], collective: str
) -> None:
    config = with_devices(load(None, ["decode.tp=2", *sets]), has_gpus=has_gpus)
    chosen = with_collective(config.worker("decode"), nodes)
    assert chosen.engine.collective == collective


def test_a_bundle_has_no_zeros() -> None:
    config = with_devices(load(None, ["prefill.resources={rdma: 1}"]), has_gpus=False)
    bundles = {seat.name: bundle_of(config, seat) for seat in seats_of(config)}
    assert bundles == {"prefill-0": {"CPU": 1, "rdma": 1}, "decode-0": {"CPU": 1}, "router-0": {}}


def test_relative_paths_are_anchored_and_others_stay(tmp_path: Path) -> None:
    config = load(None, ["model.path=models/x", "router.api_key_file=keys"]).anchored(tmp_path)
    assert config.model.path == str(tmp_path / "models" / "x")
    assert config.router.api_key_file == str(tmp_path / "keys")
    assert config.anchored(Path("/elsewhere")) == config
    assert Config().anchored(tmp_path) == Config()


def test_two_trees_differ_in_leaves() -> None:
    one = load(None, ["decode.replicas=2", "prefill.resources={a: 1}"])
    other = load(None, ["decode.replicas=3", "prefill.resources={a: 2}"])
    assert differences(one, other) == ["prefill.resources", "decode.replicas"]
    assert differences(one, one) == []


def test_a_pipe_that_closes_early_is_no_traceback() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "cluster", "config"]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=writes, stderr=subprocess.PIPE)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")
