"""An engine that a benchmark leads, and its other ranks: a process each, with a GPU each."""

import atexit
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager

from worker.config import WorkerConfig
from worker.keyring import keyring
from worker.peers.rendezvous import free_rendezvous
from worker.rank import Rank, Ranks, rank_listeners
from worker.start.build import Place, build_engine
from worker.start.engine import Engine
from worker.wire import Wire

HOST, NAME, INCARNATION = "127.0.0.1", "bench", "1"


def serve_rank(config: WorkerConfig, rank: int, rendezvous: str) -> None:
    """One rank, until its process is ended."""
    served = Rank(config, Place(NAME, INCARNATION, HOST, rendezvous), rank)
    served.start()
    served.join()


def led_engine(config: WorkerConfig) -> Engine:
    """An engine of `config.tp` ranks. This process is the leader, on the first GPU.

    The other ranks end with this process.
    """
    if config.tp == 1:
        return build_engine(config, Place(NAME, INCARNATION, HOST))
    rendezvous = free_rendezvous(HOST)
    for rank in range(1, config.tp):
        process = multiprocessing.get_context("spawn").Process(
            target=serve_rank, args=(config, rank, rendezvous), daemon=True
        )
        with gpu(rank):
            process.start()
        atexit.register(process.kill)  # a signal would wait for what it is doing
    engine = build_engine(config, Place(NAME, INCARNATION, HOST, rendezvous))
    engine.rank_group.gather(engine.endpoint())
    own = keyring(config.transport.authentication)
    wire = Wire(f"{NAME}/{INCARNATION}", config.ping, lambda events: None, keyring=own)
    wire.start()
    listeners = rank_listeners(engine.rank_group, NAME, INCARNATION, wire.key)
    engine.runner.followers = Ranks(tuple(listeners), wire.send, compared=False)
    for peer, (address, key) in listeners.items():
        wire.connect(peer, address, key)
    return engine


@contextmanager
def gpu(number: int) -> Iterator[None]:
    """Processes that the body starts see this GPU alone."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    os.environ[name] = str(number)
    yield
    if before is None:
        del os.environ[name]
    else:
        os.environ[name] = before
