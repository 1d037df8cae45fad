"""Which workers exchange KV: those of equal configuration and weights, whatever their names."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.engines import Client, worker_config
from tests.support.meeting import MET
from tests.support.patience import until
from worker.api import FinishReason, Sampling
from worker.config import ModelConfig
from worker.observe.paths import PullPath
from worker.start.build import Place
from worker.worker import Worker

TINY = ModelConfig().directory
DRAFTER = TINY.with_name("tiny-chain")
LIMITS = {"engine": {"num_pages": 64, "threads": 1}, "disaggregation": {"mode": "always"}}


@contextmanager
def pair(
    prefill: dict[str, object],
    decode: dict[str, object],
    page_size: int = 16,
    drafters: tuple[str | None, str | None] = (None, None),
) -> Iterator[tuple[Worker, Client]]:
    """A prefill worker and a decode worker with a section `model` each; yields the latter and its
    client.

    page_size: of the decode worker; drafters: of both, directories; "": the bundled one.
    """
    workers = []
    of_role = ("prefill", prefill, 16, drafters[0]), ("decode", decode, page_size, drafters[1])
    with ExitStack() as stack:
        for role, model, size, path in of_role:
            spec = {} if path is None else {"drafter": "chain", "path": path}
            own = {**LIMITS, "model": model, "kv": {"page_size": size}, "spec": spec}
            worker = Worker(worker_config(role, own), Place(f"{role}-0", "i", "127.0.0.1"))
            stack.callback(worker.stop)
            workers.append(worker)
        members = [worker.start() for worker in workers]
        client = Client(members)
        stack.callback(client.close)
        for worker in workers:
            worker.update_members([*members, *MET.values()])
        yield workers[1], client


def path_of(decode: Worker) -> PullPath:
    """The way of KV that `kvlane doctor --running` shows."""
    until(lambda: bool(decode.loop.measured_paths()), "the members do not arrive")
    return decode.loop.measured_paths()[0]


def check_pulled(decode: Worker, client: Client) -> None:
    assert not path_of(decode).error
    until(lambda: decode.loop.peers.num_connected == 1)
    (answer,) = client.generate([list(range(5, 45))], Sampling(4, 0.0))
    assert {each.prefilled_by for each in answer.stages} == {"prefill-0/i"}


def tuned(
    directory: Path, of: Path = TINY, name: str = "model.layers.0.input_layernorm.weight"
) -> Path:
    """A bundled model with one element of one tensor changed by its last bit."""
    shutil.copytree(of, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors[name].view(torch.int16)[7] ^= 1
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_two_checkpoints_of_one_shape_refuse_each_other_and_say_both_names(tmp_path, caplog):
    """Even if they are served under one name, as both halves of a rolling update are."""
    model = str(tuned(tmp_path / "tuned"))
    caplog.set_level(logging.WARNING, "kvlane.peers")
    with pair({"path": model, "served_name": "same"}, {"served_name": "same"}) as (decode, client):
        error = path_of(decode).error
        until(lambda: any("cannot pull" in each.message for each in caplog.records))
        assert decode.loop.peers.num_connected == 0
        (answer,) = client.generate([list(range(5, 45))], Sampling(4, 0.0))
        assert answer.finish_reason == FinishReason.LENGTH  # decode has prefilled by itself
        assert {each.prefilled_by for each in answer.stages} == {"decode-0/i"}
        ours = decode.engine.identity.digest
    assert "it serves 'same' (" in error
    assert f"we serve 'same' ({ours})" in error
    assert "weights" in error
    assert any(error in each.message for each in caplog.records)


def test_one_checkpoint_is_one_whatever_its_directory_and_name(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "copy")
    with pair({"path": str(tmp_path / "copy")}, {}) as (decode, client):
        check_pulled(decode, client)


def test_another_page_size_is_told_from_other_weights() -> None:
    with pair({}, {}, page_size=32) as (decode, _):
        error = path_of(decode).error
    assert "page_size" in error
    assert "weights" not in error


def test_workers_of_other_drafters_refuse_each_other(tmp_path: Path) -> None:
    """Text would not change, but the pages of one hold no drafts for the other."""
    other = tuned(tmp_path / "tuned", DRAFTER, "midlayer.hidden_norm.weight")
    for drafters in ((str(other), ""), (None, ""), ("", None)):
        with pair({}, {}, drafters=drafters) as (decode, _):
            assert "drafter" in path_of(decode).error
            assert decode.loop.peers.num_connected == 0
    with pair({}, {}, drafters=(str(DRAFTER), "")) as (decode, client):
        check_pulled(decode, client)
