"""What a worker tells of its GPU: read from a driver that is a double here."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.patience import HANG_S
from worker.api import Card
from worker.observe import card


class NVMLError(Exception):
    pass


def driver(**more: Any) -> SimpleNamespace:
    def by_uuid(uuid: str) -> str:
        if uuid != "GPU-1":
            raise NVMLError
        return uuid

    found = SimpleNamespace(
        NVMLError=NVMLError, NVML_CLOCK_SM=1, nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=60, total=80),
        nvmlDeviceGetPowerUsage=lambda gpu: 312_500,
        nvmlDeviceGetEnforcedPowerLimit=lambda gpu: 700_000,
        nvmlDeviceGetClockInfo=lambda gpu, clock: 1755,
    )  # fmt: skip
    vars(found).update(more)
    return found


def refuse(*about: object) -> int:
    raise NVMLError


@pytest.mark.parametrize(
    ("uuid", "more", "expected"),
    [
        ("GPU-1", {}, [Card(60, 80, 312.5, 700.0, 1755)] * 2),
        ("GPU-1", {"nvmlDeviceGetPowerUsage": refuse}, [Card(60, 80, 0.0, 700.0, 1755)] * 2),
        ("GPU-2", {}, []),
        ("GPU-1", {"nvmlInit": refuse}, []),
    ],
    ids=["told", "without power", "unknown", "no driver"],
)
def test_it_is_told_again_and_again_until_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, uuid: str, more: dict[str, Any], expected: list[Card]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(**more))
    monkeypatch.setattr(card, "EVERY_S", 0.0)
    told: list[Card] = []

    def tell(found: Card) -> bool:
        told.append(found)
        return len(told) < 2

    card.watch(uuid, tell)
    for thread in threading.enumerate():
        if thread.name == "kvlane-card":
            thread.join(HANG_S)
    assert told == expected
