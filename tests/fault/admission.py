"""Have the control plane of a running cluster hand out the keys of members that are none of its.

That is how somebody speaks who has broken into a process of a cluster. `tests.e2e.watch` does it,
as it is connected to Ray.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from tests.e2e.harness import Serve
from worker.api import Member

RECONNECT_S = 0.5


def let_in(serve: Serve, members: Sequence[Member]) -> list[Member]:
    """From now on these are announced beside the cluster's own, which are returned, with the
    controller."""
    serve.status()
    assert serve.watch is not None
    found = serve.watch.asked(msgspec.json.encode(list(members)).decode())
    return msgspec.convert(found, list[Member])


def admitted(controller: Any, line: str) -> object:
    """In the watching process. line: as `let_in` has written it."""
    from cluster.control.replicas import Replica
    from cluster.serve import launch

    # Runs in the controller's process, which cannot import this module: so it is a closure. Ray
    # runs it in a thread of its own.
    def announce(actor: Any, rogues: list[Any], kind: type[Any], reconnect_s: float) -> list[Any]:
        from collections import ChainMap

        herald, wire = actor._monitor._herald, actor._wire
        loop = actor._monitor._keeper.failed.get_loop()
        own = [replica.member for replica in herald._replicas.values() if replica.member]

        def connect() -> None:  # again and again: it is lost whenever the rogue breaks a rule
            for member in rogues:
                if member.address.startswith("tcp://"):
                    wire.connect(member.peer, member.address, member.wire_key)
            loop.call_later(reconnect_s, connect)

        def tell() -> None:
            extra = {}
            for member in rogues:
                extra[member.name] = kind(member.name, member.role)
                extra[member.name].member = member
            herald._replicas = ChainMap(herald._replicas, extra)
            herald.tell()
            connect()

        loop.call_soon_threadsafe(tell)
        return [*own, actor._site.controller]

    rogues = msgspec.json.decode(line, type=list[Member])
    found = launch.ask(controller.__ray_call__, announce, rogues, Replica, RECONNECT_S)
    return msgspec.to_builtins(found)
