"""The worker's configuration: refusals name their path, `resolved` leaves no `auto`."""

import itertools
import logging
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from worker.config import Machine, WorkerConfig
from worker.errors import UserError
from worker.transfer.lease import MARGIN_S, Lease

CPU = Machine("cpu", 6)
CUDA = Machine("cuda", 32)


def config(**sections: dict[str, Any]) -> WorkerConfig:
    return WorkerConfig.model_validate({"role": "decode", **sections})


def resolved(tree: WorkerConfig, machine: Machine = CPU) -> WorkerConfig:
    return tree.resolved(machine, model_max_len=2_048, model_dtype="bfloat16")


def leaves(tree: BaseModel, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in type(tree).model_fields:
        value = getattr(tree, name)
        where = f"{path}.{name}" if path else name
        found |= leaves(value, where) if isinstance(value, BaseModel) else {where: value}
    return found


@pytest.mark.parametrize(
    ("section", "leaf", "value"),
    [
        ("engine", "nmu_pages", 4),
        ("engine", "max_num_reqs", 0),
        ("engine", "penalty_rows", 0),
        ("engine", "max_waiting", -1),
        ("engine", "max_prefill_tokens", 0),
        ("engine", "threads", 0),
        ("engine", "num_pages", 0),
        ("engine", "memory_fraction", 1.5),
        ("engine", "growth_tokens", -1),
        ("engine", "device", "tpu"),
        ("engine", "collective", "carrier pigeon"),
        ("kv", "num_groups", 0),
        ("kv", "page_size", 0),
        ("model", "max_model_len", 0),
        ("model", "dtype", "int8"),
        ("ping", "interval_s", 0),
        ("ping", "max_misses", 0),
        ("transport", "kind", "carrier pigeon"),
        ("transport", "max_attempts", 0),
        ("lease", "decode_window_s", 11.0),
        ("lease", "renew_s", 4.5),
        ("disaggregation", "mode", "sometimes"),
        ("tracing", "endpoint", "ftp://host"),
        ("tracing", "endpoint", "http://["),
        ("tracing", "endpoint", "http://:4318"),
        ("tracing", "endpoint", "http://host:port"),
    ],
)
def test_what_makes_no_sense_is_refused_by_path(section: str, leaf: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        config(**{section: {leaf: value}})
    assert any(section in error["loc"] for error in caught.value.errors())


def test_an_unknown_section_and_an_unknown_role_are_refused() -> None:
    with pytest.raises(ValidationError):
        WorkerConfig.model_validate({"role": "decode", "speculation": {}})
    with pytest.raises(ValidationError):
        WorkerConfig.model_validate({"role": "router"})


@pytest.mark.parametrize("machine", [CPU, CUDA])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_resolved_leaves_no_auto_is_idempotent_and_changes_nothing_else(machine, role) -> None:
    tree = WorkerConfig.model_validate({"role": role})
    before = tree.model_dump()
    done = resolved(tree, machine)
    assert tree.model_dump() == before
    assert resolved(done, machine) == done
    auto = {path for path, value in leaves(done).items() if value == "auto"}
    # The first three, max_num_reqs and state_slots need the layout, penalty_rows, experts, kv.dtype
    # and spec.head_dtype the model; disaggregation.mode is decided for each request,
    # tracing.sample_ratio by the SDK of OpenTelemetry.
    expected = {
        "engine.num_pages", "kv.num_groups", "kv.snapshots", "engine.penalty_rows",
        "disaggregation.mode", "engine.state_slots", "tracing.sample_ratio", "engine.experts",
        "kv.dtype", "spec.head_dtype",
    }  # fmt: skip
    assert auto == expected | ({"engine.max_num_reqs"} if machine is CUDA else set())
    chosen = config(
        model={"dtype": "float16", "max_model_len": 100},
        kv={"page_size": 4},
        engine={"threads": 1, "num_pages": 9},
        transport={"name": "mooncake", "kind": "tcp"},
    )
    for before, after in ((tree, done), (chosen, resolved(chosen, machine))):
        for path, value in leaves(before).items():
            assert value in ("auto", leaves(after)[path]), path


def test_ranks_sum_by_gloo_on_the_cpu_and_as_they_are_told_on_gpus() -> None:
    assert resolved(config(), CPU).engine.collective == "gloo"
    assert resolved(config(), CUDA).engine.collective == "custom"
    named = {name: config(tp=2, engine={"collective": name}) for name in ("nccl", "gloo")}
    assert resolved(named["nccl"], CUDA).engine.collective == "nccl"
    for name, machine in (("nccl", CPU), ("gloo", CUDA)):
        with pytest.raises(UserError, match=f"collective: {name}, but this worker computes on"):
            resolved(named[name], machine)
    with pytest.raises(ValidationError):
        WorkerConfig.model_validate({"role": "decode", "tp": 0})


def test_one_attention_backend_for_all_or_one_for_each_kind_of_batch() -> None:
    one = config(engine={"attention": "triton"})
    assert one == config(engine={"attention": dict.fromkeys(("prefill", "decode"), "triton")})
    assert config(engine={"attention": "auto"}) == config()
    mixed = resolved(config(engine={"attention": {"prefill": "flashinfer"}}), CUDA)
    assert mixed.engine.attention.model_dump() == {
        "prefill": "flashinfer", "decode": "triton", "spec": "triton",
    }  # fmt: skip
    assert set(resolved(config()).engine.attention.model_dump().values()) == {"reference"}
    with pytest.raises(ValidationError) as caught:
        config(engine={"attention": {"verify": "triton"}})
    assert [error["loc"] for error in caught.value.errors()] == [("engine", "attention", "verify")]


@pytest.mark.parametrize(
    ("attention", "spec"),
    [
        ("reference", "reference"),
        ("by_length", "by_length"),
        ({"prefill": "reference"}, "triton"),
        ("flashinfer", "triton"),  # it plans on the host, which does not know lengths of windows
        ({"decode": "flashinfer"}, "triton"),
        ({"decode": "reference", "spec": "triton"}, "triton"),
    ],
)
def test_windows_are_served_as_decode_steps_are_if_that_is_possible(attention, spec) -> None:
    assert resolved(config(engine={"attention": attention}), CUDA).engine.attention.spec == spec


def test_more_positions_than_the_model_has_are_refused() -> None:
    assert resolved(config(model={"max_model_len": 2_048})).model.max_model_len == 2_048
    with pytest.raises(ValueError, match="max_model_len"):
        resolved(config(model={"max_model_len": 2_049}))


def test_every_choice_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "kvlane.config"):
        tree = config()
        done = resolved(tree)
    said = caplog.text
    for path, value in leaves(tree).items():
        if value == "auto" and leaves(done)[path] != "auto":
            assert f"{path} = {leaves(done)[path]} (" in said, f"{path} was chosen in silence"


def test_the_worker_has_few_leaves() -> None:
    """The cap of 140 is for the whole tree; the worker's share of it is bounded here."""
    assert len(leaves(config())) <= 66


@pytest.mark.parametrize(
    ("sent", "travel", "pulled"),
    list(itertools.product((0.0, 3.0), (0.0, 0.5, 30.0), (0.1, 8.5, 9.5))),
)
def test_a_trusted_pull_ended_while_prefill_still_held_the_pages(sent, travel, pulled) -> None:
    """Whatever the delays: covers() implies not expired()."""
    lease = config().lease
    window = Lease(lease.decode_window_s, sent - 5)
    pin = Lease(lease.prefill_window_s, sent - 5 + travel)
    assert not window.covers(sent - 5 + lease.decode_window_s)
    pin.renewed(sent + travel)
    window.renewed(sent)
    window.renewed(sent - 5)  # an older answer shortens nothing
    ended = sent + pulled
    assert window.covers(ended) == (pulled + MARGIN_S <= lease.decode_window_s)
    assert not window.covers(ended) or not pin.expired(ended)
    pin.renewed(sent + travel - 9)
    assert not pin.expired(sent + travel + lease.prefill_window_s - 1e-6)
    assert pin.expired(sent + travel + lease.prefill_window_s)
