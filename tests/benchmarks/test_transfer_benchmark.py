"""benchmarks.transfer exposed: its throttle over real pulls, and two small workers measured."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import exposed, transfer
from benchmarks.instruments import digest
from benchmarks.throttle import Throttle
from tests.support import pairwise
from tests.support.prompts import TINY
from worker.cache.layout import KVLayout, KVRegion
from worker.cache.pool import KVPool
from worker.transfer.base import PullState, Run

NUM_BYTES = 4096


def test_throttled_pulls_come_one_after_the_other_at_the_rate() -> None:
    clock = [0.0]
    throttle = Throttle(lambda: clock[0])
    throttle.bytes_per_s = NUM_BYTES / 2
    source, source_region = transfer.memfd_region(2 * NUM_BYTES)
    target, target_region = transfer.memfd_region(2 * NUM_BYTES)
    source[:] = np.random.default_rng(0).integers(0, 256, len(source), np.uint8)
    serving = transfer.open_transport("shm", source_region)
    pulling = transfer.open_transport("shm", target_region)
    peer = throttle.over(pulling.connect(serving.endpoint(), 1.0))
    first = peer.pull([Run(0, 0, 0, NUM_BYTES)])
    second = peer.pull([Run(0, NUM_BYTES, NUM_BYTES, NUM_BYTES // 2)])
    over = []
    for clock[0] in (0.0, 1.9, 2.0, 2.9, 3.0):
        over.append([pull.poll() is PullState.OK for pull in (first, second)])
    assert over == [[False, False], [False, False], [True, False], [True, False], [True, True]]
    clock[0] = 10.0  # the card was idle meanwhile
    third = peer.pull([Run(0, NUM_BYTES, NUM_BYTES, NUM_BYTES)])
    clock[0] = 11.9
    assert third.poll() is PullState.RUNNING
    clock[0] = 12.0
    assert third.poll() is PullState.OK
    assert throttle.num_bytes == 2 * NUM_BYTES + NUM_BYTES // 2
    assert np.array_equal(source, target)
    throttle.bytes_per_s = 0.0
    assert peer.pull([Run(0, 0, 0, NUM_BYTES)]).poll() is PullState.OK
    cancelled = peer.pull([Run(0, 0, 0, NUM_BYTES)])
    cancelled.cancel()
    assert (cancelled.poll(), cancelled.error) == (PullState.FAILED, "cancelled")
    peer.close()
    for transport in (pulling, serving):
        transport.close()


def test_a_digest_is_that_of_the_tokens_wherever_their_pages_lie() -> None:
    layout = KVLayout((KVRegion("target", 4, 2, 8, 2, 4, "float32"),))
    here, there = (KVPool(layout, 8, torch.device("cpu")) for _ in range(2))
    pages, moved, num_tokens = [3, 1, 6], [2, 7, 5], 10  # of 12 slots
    for layer_id in range(4):
        for ours, theirs in zip(here.layer(layer_id), there.layer(layer_id), strict=True):
            ours.normal_()
            theirs[moved] = ours[pages]
    wanted = digest(here, pages, num_tokens)
    assert digest(there, moved, num_tokens) == wanted
    there.layer(2)[1][5, 1, 2:] += 1  # the last two slots
    assert digest(there, moved, num_tokens) == wanted
    there.layer(2)[1][5, 1, 1, 7] += 1
    assert digest(there, moved, num_tokens) != wanted
    for pool in (here, there):
        pool.close()


def arguments(tokens: str, *more: str) -> list[str]:
    return [
        "--model-config", str(TINY / "config.json"), "--prefill-device", "cpu",
        "--decode-device", "cpu", "--transport", "shm", "--page-size", "16", "--tokens", tokens,
        "--chunk", "32", "--repeat", "2", *more,
    ]  # fmt: skip


def test_exposed_times_of_two_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    groups = (1, 3) if pairwise.whole else (3,)  # each starts two processes
    more = ("--groups", ",".join(map(str, groups)), "--throttle-gb-s", "0.01", "--json", str(path))
    exposed.main(arguments("17,64", *more))
    rows = json.loads(path.read_text())["rows"]
    places = [(row["gb_per_s"], row["tokens"], row["groups"]) for row in rows]
    assert places == [(r, n, g) for r in (0.01,) for n in (17, 64) for g in groups]
    page_bytes = rows[0]["num_bytes"][0]  # 16 tokens have KV
    for row in rows:
        num_pages = {17: 1, 64: 4}[row["tokens"]]
        assert row["num_bytes"] == [num_pages * page_bytes] * 2
        assert row["num_steps"] == [{17: 1, 64: 2}[row["tokens"]]] * 2
        assert all(
            wait > took > 0 for wait, took in zip(row["lag_ms"], row["transfer_ms"], strict=True)
        )
        # with groups decode may be done before the last layer is
        assert all(wait > 0 or row["groups"] > 1 for wait in row["exposed_ms"])
        if row["gb_per_s"]:
            # at least the last group of the last step's pages comes when all is announced
            last = min(2, num_pages) * page_bytes / row["groups"]
            assert min(row["lag_ms"]) >= 1e3 * last / 1e7
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)


@pytest.mark.whole
def test_a_worker_that_cannot_start_ends_the_benchmark() -> None:
    with pytest.raises(RuntimeError, match="a worker has failed"):
        exposed.main(arguments("5000", "--groups", "1"))  # beyond the model's positions


@pytest.mark.parametrize(
    ("before", "device", "seen"),
    [(None, "cuda:1", "1"), ("4,6", "cuda:1", "6"), ("4", "cuda", "4"), ("4,6", "cpu", "")],
)
def test_a_worker_sees_its_device_alone(
    monkeypatch: pytest.MonkeyPatch, before: str | None, device: str, seen: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    with exposed.on_device(device) as kind:
        assert (kind, os.environ["CUDA_VISIBLE_DEVICES"]) == (device.partition(":")[0], seen)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
