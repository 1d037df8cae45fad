"""Whom workers and doubles of a test process hear: what a controller would tell them."""

from typing import Protocol
from weakref import WeakSet

from worker.api import Member, PeerId


class Listener(Protocol):
    def meet(self) -> None:
        """Hear all of MET from now on."""


MET: dict[PeerId, Member] = {}  # routers and clients that tests have started
LISTENERS: WeakSet[Listener] = WeakSet()


def introduce(member: Member) -> Member:
    """Have the listeners of now and later hear a router or a client."""
    MET[member.peer] = member
    for listener in list(LISTENERS):
        listener.meet()
    return member
