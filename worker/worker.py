"""Worker: one engine, its thread and its role, as the control plane sees them."""

import time
from collections.abc import Sequence

import torch

from worker.api import Lost, Member, RankMessage
from worker.config import WorkerConfig
from worker.errors import PeerLost
from worker.keyring import keyring
from worker.loop import DrainAsked, EngineThread, Incoming, MembersChanged
from worker.observe.card import watch
from worker.observe.metrics import watch_wire
from worker.plan import Ended, Launched
from worker.rank import Ranks, from_rank, rank_listeners
from worker.registry import resolve
from worker.start.build import Place, build_engine
from worker.start.engine import Addresses, Kept

ROLES = {"prefill": "worker.prefill:PrefillLoop", "decode": "worker.decode:DecodeLoop"}


class Worker:
    """The worker of this process; if it has several ranks, its leader. For control-plane threads.

    The constructor loads the model and raises as `build_engine`. kept: left by `retire` of the
    worker that this process was before.
    """

    def __init__(
        self,
        config: WorkerConfig,
        place: Place,
        metrics_ports: range = range(1),
        kept: Kept | None = None,
    ) -> None:
        self._config, self._place, self._metrics_ports = config, place, metrics_ports
        self.engine = build_engine(config, place, kept=kept)
        authentication = self.engine.config.transport.authentication
        self._thread = EngineThread(place.peer, self.engine.config.ping, keyring(authentication))
        watch_wire(self.engine.metrics.wire_refused, self._thread.refusals)
        role = resolve("role", config.role, ROLES)
        self.loop = role(self.engine, self._thread, place.incarnation)
        self._ranks: Ranks | None = None  # the other ranks, once they are known
        self.join = self._thread.join

    def start(self) -> Member:
        """Begin to serve; returns the record under which other processes know this worker."""
        place, group = self._place, self.engine.rank_group
        metrics_address = self.engine.metrics.serve(
            place.host, self._metrics_ports, self._thread.stalled
        )
        endpoints = tuple(group.gather(self.engine.endpoint()))
        address = self._thread.start(place.host, self._turn)
        if group.size > 1:
            listeners = rank_listeners(group, place.name, place.incarnation, self._thread.key)
            strict = self.engine.config.engine.strict
            # Before the first is connected, as one may be lost at once.
            self._ranks = Ranks(tuple(listeners), self._thread.send, compared=strict)
            self.engine.runner.followers = self._ranks
            for peer, (rank_address, key) in listeners.items():
                self._thread.connect(peer, rank_address, key)
            group.part()
        device = self.engine.pool.device
        if device.type == "cuda":
            uuid = torch.cuda.get_device_properties(device).uuid
            watch(f"GPU-{uuid}", self._thread.note_card)
        addresses = Addresses(address, self._thread.key, metrics_address)
        return self.engine.member(place.name, place.incarnation, addresses, endpoints)

    def update_members(self, members: Sequence[Member]) -> None:
        """Take the control plane's whole list of live members, also before the start.

        They alone may connect.
        """
        self._thread.admit({member.peer: member.wire_key for member in members})
        self._thread.post(MembersChanged(tuple(members)))

    def drain(self) -> None:
        """Refuse new requests; those that are here are served to their end."""
        self._thread.post(DrainAsked())

    def idle(self) -> bool:
        """Whether no request, page or lease is held."""
        return not any(self.counters().values())

    def counters(self) -> dict[str, int]:
        """Number of resources held, by kind; all zero when idle."""
        book = self.engine.book
        return {
            "holds": book.num_holds,
            "reserved_pages": book.num_reserved,
            "private_pages": book.num_private,
            "promised_snapshots": book.snapshots.num_used - len(book.snapshots.nodes),
            **self.loop.counters(),
        }

    def stop(self) -> None:
        """End the loop and free everything."""
        self.engine.tell_ranks(Ended())
        self._thread.stop()
        self.loop.close()
        self.engine.close()

    def retire(self) -> Kept:
        """End the loop, but leave to a worker of another role all that need not be loaded again.

        That one begins with an empty prefix tree. Only for a worker of one rank.
        """
        engine = self.engine
        assert engine.rank_group.size == 1
        self._thread.stop()
        now = time.monotonic()
        # Decode workers may read the pages that they have leases of, which are extended no more.
        leased = self.loop.counters().get("leases", 0)
        read_until = now + engine.config.lease.prefill_window_s if leased else now
        self.loop.close()
        engine.retire()
        return Kept(self._config, engine.weights, engine.pool, engine.transport, read_until)

    def _turn(self, events: list[Incoming]) -> float:
        """Take the messages of ranks, whose death is the worker's, and hand the role the rest."""
        ranks = self._ranks
        if ranks is None:
            return self.loop.turn(events)
        rest: list[Incoming] = []
        for peer, event in events:
            if peer not in ranks.peers:
                rest.append((peer, event))
            elif isinstance(event, Lost):
                raise PeerLost(f"rank {peer} is lost: {event.reason}")
            elif isinstance(event, RankMessage):
                message = from_rank(event.body)
                if isinstance(message, Launched):
                    ranks.reported(message)
                else:
                    rest.append((peer, message))
        return self.loop.turn(rest)
