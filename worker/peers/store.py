"""The store in which the ranks of a group find each other."""

from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from worker.errors import PeerLost

TIMEOUT_S = 60.0  # of the rendezvous and of each call: a peer this late is gone


def open_store(name: str, rank: int, size: int, init_method: str) -> Store:
    """Open the store of a group that alone uses `init_method`; keys stay until the group is gone.

    Raises PeerLost if the rank that keeps the store did not come in time.
    """
    try:
        stores = rendezvous(init_method, rank, size, timeout=timedelta(seconds=TIMEOUT_S))
        store, _, _ = next(iter(stores))
    except RuntimeError as e:
        raise PeerLost(f"{name} rank {rank} of {size}: nobody at {init_method}: {e}") from e
    return store


def exchange(store: Store, name: str, rank: int, size: int, value: str) -> list[str]:
    """Every rank's `value`, in their order; all ranks call once with each `name`, or PeerLost."""
    try:
        store.set(f"{name}/{rank}", value)
        return [store.get(f"{name}/{peer}").decode() for peer in range(size)]
    except RuntimeError as e:
        raise PeerLost(f"rank {rank} of {size}: a peer did not say its {name}: {e}") from e
