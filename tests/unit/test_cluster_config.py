"""The configuration tree: sources, error messages, size."""

from itertools import product
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from cluster.config import Config, differences, leaves, load, origins
from cluster.resolve import (
    ROLES,
    bundle_of,
    counts,
    num_cpus,
    reserved,
    with_collective,
    with_devices,
    with_transport,
)
from tests.support.commands import REPOSITORY
from worker.errors import UserError

EXAMPLES = REPOSITORY / "deploy" / "examples"


def message(*sets: str, path: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load(path, sets)
    return str(caught.value)


def test_the_tree_has_at_most_146_leaves() -> None:
    assert 50 < len(list(leaves())) <= 146


def test_flags_win_over_sets_and_sets_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("prefill: {replicas: 2}\ndecode: {replicas: 2}\nrouters: {replicas: 2}\n")
    sets = ["decode.replicas=3", "routers.replicas=3"]
    config = load(path, sets, {"routers.replicas": 4, "cluster.port": None})
    assert (config.prefill.replicas, config.decode.replicas, config.routers.replicas) == (2, 3, 4)
    assert config.cluster.port == 8000


def test_the_engine_at_the_top_is_that_of_both_roles_until_one_is_named() -> None:
    config = load(None, ["engine.threads=2", "prefill.engine.threads=3", "engine.strict=true"])
    assert (config.prefill.engine.threads, config.decode.engine.threads) == (3, 2)
    assert config.prefill.engine.strict
    assert config.decode.engine.strict
    assert load(None, ["engine={threads: 4}"]).decode.engine.threads == 4
    assert "decode.engine.thread: unknown key" in message("engine.thread=1")


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
        ("prefill.replicas=-1", "prefill.replicas: Input should be 'auto' or Input should be "
         "greater than or equal to 0"),
        ('prefill.resources={"a":"b"}', "prefill.resources.a: Input should be a valid number, "
         "unable to parse string as a number"),
        ("decode.num_gpus=-1", "decode.num_gpus: Input should be 'auto' or Input should be greater "
         "than or equal to 0"),
        ("decode.replicas=0", "decode.replicas must be at least 1: decode workers own the "
         "requests"),
        ("a", "--set a: expected PATH=VALUE, for example decode.replicas=2"),
        ("kv=tiny kv.page_size=8", "kv.page_size: kv is a value, not a section"),
        ("kv=3", "kv: a section: its keys stand below it"),
        ("model=3", "model.path: Input should be a valid string"),
    ],
)  # fmt: skip
def test_mistakes_name_the_path(text: str, expected: str) -> None:
    assert message(*text.split()) == expected


def test_every_mistake_is_told_at_once_and_alternatives_of_a_field_are_one_line() -> None:
    assert len(message("prefill.replicas=-1", "prefil.replicas=1").splitlines()) == 2
    line = message("prefill.engine.threads=many")
    assert line.startswith("prefill.engine.threads: Input should be 'auto' or ")
    assert "\n" not in line


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


def gpus(prefill: float, decode: float) -> dict[str, object]:
    return {"prefill.num_gpus": prefill, "decode.num_gpus": decode}


@pytest.mark.parametrize(
    ("sets", "local_gpus", "expected"),  # None: of a Ray of several nodes that has some
    [
        ("", 0, gpus(0, 0) | {"prefill.engine.device": "cpu"}),
        ("", None, gpus(1, 1) | {"decode.engine.device": "auto"}),
        ("decode.engine.device=cpu", None, gpus(1, 0)),
        ("prefill.replicas=1", 1, gpus(0.5, 0.5)),
        # Of one GPU one worker does both, unless the settings speak of two.
        ("", 1, {"prefill.replicas": 0, "decode.replicas": 1, "decode.num_gpus": 1,
                 "decode.engine.memory_fraction": "auto"}),
        ("decode.replicas=1", 1, {"prefill.replicas": 0}),
        ("", 0, {"prefill.replicas": 1, "decode.replicas": 1}),
        ("disaggregation.mode=always", 1, {"prefill.replicas": 1}),
        ("", 2, gpus(1, 1)),
        ("prefill.replicas=2", 2, gpus(0.5, 0.5)),  # two thirds each would fit twice only
        ("decode.replicas=3", 1, gpus(0.25, 0.25)),
        ("decode.replicas=2", 1, gpus(0.3333, 0.3333)),
        ("decode.num_gpus=0.5", 1, gpus(0.5, 0.5)),
        ("decode.num_gpus=0.75", 1, gpus(0.25, 0.75)),
        ("decode.engine.device=cpu", 1, gpus(1, 0)),
        ("decode.num_gpus=1", 1, gpus(1, 1)),  # has no place, and says so
        # Ranks share none, and others share what is left; the check says where that is too few.
        ("decode.tp=2", 3, gpus(1, 1)),
        ("decode.tp=2 prefill.replicas=2", 3, gpus(0.5, 1)),
        ("decode.tp=2", 2, gpus(1, 1)),
        # A worker with a part of a GPU takes that part of its memory.
        ("prefill.num_gpus=0.4", None, {"prefill.engine.memory_fraction": 0.34}),
        ("decode.num_gpus=0.5 decode.engine.memory_fraction=0.55", None,
         {"decode.engine.memory_fraction": 0.55, "prefill.engine.memory_fraction": "auto"}),
        # There is a router for two GPUs that decode.
        ("", 0, {"routers.replicas": 1}),
        ("", None, {"routers.replicas": 1}),
        ("decode.replicas=3", None, {"routers.replicas": 2}),
        ("decode.replicas=5 decode.num_gpus=0.5", None, {"routers.replicas": 2}),
        ("decode.replicas=3", 0, {"routers.replicas": 1}),
        ("decode.replicas=3 routers.replicas=1", None, {"routers.replicas": 1}),
    ],
)  # fmt: skip
def test_devices_and_routers_are_decided_by_what_ray_has(sets, local_gpus, expected) -> None:
    config = with_devices(load(None, sets.split()), has_gpus=local_gpus != 0, local_gpus=local_gpus)
    assert {path: attrgetter(path)(config) for path in expected} == expected
    assert with_devices(config, has_gpus=True, local_gpus=local_gpus) == config
    assert counts(config)["router"] == config.routers.replicas


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_load_and_fit_their_gpus(path: Path) -> None:
    config = with_devices(load(path), has_gpus=True)
    assert [config.role(role).num for role in ROLES] == [1, 1]
    num_gpus = sum(float(config.role(role).num_gpus) for role in ROLES)
    assert num_gpus == {"one-gpu": 1, "two-gpus": 2, "two-hosts": 2}[path.stem]
    if num_gpus == 1:
        assert sum(float(config.role(role).engine.memory_fraction) for role in ROLES) < 0.98


@pytest.mark.parametrize(
    ("sets", "has_gpus", "nodes", "peer_access", "transport"),
    [
        ("", False, "n1 n1", None, ("shm", "auto")),  # which has one kind
        ("", False, "n1 n2", None, ("mixed", "shm")),
        ("transport.kind=tcp", False, "n1", None, ("sockets", "tcp")),
        ("transport.kind=tcp", False, "n1 n2", None, ("sockets", "tcp")),
        ("transport.name=mixed", True, "n1 n2", None, ("mixed", "nvlink")),
        ("transport.name=mooncake", False, "n1", None, ("mooncake", "tcp")),
        ("", True, "n1 n1", None, ("mooncake", "nvlink")),
        ("", True, "n1 n1", True, ("mooncake", "nvlink")),
        ("", True, "n1 n1", False, ("sockets", "tcp")),
        ("transport.kind=nvlink", True, "n1 n1", False, ("mooncake", "nvlink")),
        ("", True, "n1 n2", None, ("sockets", "tcp")),
        ("transport.kind=tcp", True, "n1 n1", None, ("sockets", "tcp")),
        ("prefill.engine.device=cpu", True, "n1 n1", None, ("sockets", "tcp")),
    ],
)
def test_shm_and_nvlink_are_chosen_only_where_they_reach_everybody(
    sets, has_gpus, nodes, peer_access, transport
) -> None:
    config = with_devices(load(None, sets.split()), has_gpus=has_gpus)
    notes: list[str] = []
    chosen = with_transport(
        config, nodes.split(), peer_access=peer_access, note=lambda *note: notes.append(note[2])
    ).transport
    assert (chosen.name, chosen.kind) == transport
    told = [text for text in notes if "cannot read each other's memory" in text]
    assert len(told) == (peer_access is False and not sets)


def test_mooncake_s_tcp_is_taken_by_its_name_only() -> None:
    kinds = ("auto", "shm", "tcp", "rdma", "nvlink")
    for kind, has_gpus, nodes, peer_access in product(
        kinds, (True, False), ("a", "ab"), (True, False, None)
    ):
        config = with_devices(load(None, [f"transport.kind={kind}"]), has_gpus=has_gpus)
        chosen = with_transport(config, nodes, peer_access=peer_access).transport
        assert (chosen.name, chosen.kind) != ("mooncake", "tcp")
        assert chosen.name != "mooncake" or chosen.kind in ("rdma", "nvlink")
    for kind in ("auto", "tcp"):
        sets = ["transport.name=mooncake", f"transport.kind={kind}"]
        config = with_devices(load(None, sets), has_gpus=True)
        chosen = with_transport(config, "ab").transport
        assert (chosen.name, chosen.kind) == ("mooncake", "tcp")


def test_every_rank_counts() -> None:
    on_gpus = load(None, ["decode.tp=4", "decode.replicas=2", "prefill.tp=2"])
    config = with_devices(on_gpus, has_gpus=True)
    assert (config.prefill.num_gpus, config.decode.num_gpus) == (1, 1)
    assert (reserved(config, "GPU"), reserved(config, "CPU")) == (10, 10)
    assert config.routers.num == 4
    assert num_cpus(load(None, ["decode.tp=64"])) == 4 * 65
    assert (config.worker("decode").tp, config.worker("prefill").tp) == (4, 2)


@pytest.mark.parametrize(
    ("asked", "has_gpus", "nodes", "collective"),
    [
        ("auto", True, "aa", "auto"),
        ("auto", True, "ab", "nccl"),
        ("auto", False, "ab", "auto"),
        ("custom", True, "ab", "custom"),
    ],
)
def test_nccl_is_chosen_where_ranks_span_nodes(asked, has_gpus, nodes, collective) -> None:
    asked_for = load(None, ["decode.tp=2", f"decode.engine.collective={asked}"])
    worker = with_devices(asked_for, has_gpus=has_gpus).worker("decode")
    assert with_collective(worker, list(nodes)).engine.collective == collective


def test_a_bundle_has_no_zeros() -> None:
    config = with_devices(load(None, ["prefill.resources={rdma: 1}"]), has_gpus=False)
    bundles = {role: bundle_of(config, role) for role in counts(config)}
    assert bundles == {"prefill": {"CPU": 1, "rdma": 1}, "decode": {"CPU": 1}, "router": {}}


def test_relative_paths_are_anchored_and_others_stay(tmp_path: Path) -> None:
    files = "api_key_file", "tls_cert_file", "tls_key_file"
    sets = ["model.path=models/x", *(f"router.{each}=keys/{each}" for each in files)]
    config = load(None, sets).anchored(tmp_path)
    assert config.model.path == str(tmp_path / "models" / "x")
    for each in files:
        assert getattr(config.router, each) == str(tmp_path / "keys" / each)
    assert config.anchored(Path("/elsewhere")) == config
    assert Config().anchored(tmp_path) == Config()


def test_two_trees_differ_in_leaves() -> None:
    one = load(None, ["decode.replicas=2", "prefill.resources={a: 1}"])
    other = load(None, ["decode.replicas=3", "prefill.resources={a: 2}"])
    assert differences(one, other) == ["prefill.resources", "decode.replicas"]
    assert differences(one, one) == []


def test_a_value_may_stand_for_a_section_with_one_obvious_leaf(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("model: tiny\nspec: ngram\ntransport: shm\nprefill: 2\ndecode: 3\nrouters: 1\n")
    told = load(path)
    assert (told.model.path, told.spec.drafter, told.transport.name) == ("tiny", "ngram", "shm")
    assert (told.prefill.replicas, told.decode.replicas, told.routers.replicas) == (2, 3, 1)
    assert load(path, ["model.dtype=float32"], {"model.path": "other"}).model.path == "other"
    assert load(None, ["model=other", "model.dtype=float32"]).model.path == "other"
    assert origins(path)["model.path"] == str(path)
    for text in ("kv: 3", "router: 2", "decode: {engine: 3}", "cluster:"):
        path.write_text(text)
        section = "decode.engine" if "engine" in text else text.partition(":")[0]
        with pytest.raises(UserError, match=f"^{section}: a section: its keys stand below it$"):
            load(path)
