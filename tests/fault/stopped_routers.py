"""Stored responses at routers of which one is stopped and one killed: what others say, and when.

    python -m tests.fault.stopped_routers --routers 4

Every router that lives is asked for what each of them keeps: to show it, its items, to go on with
it, to cancel and to delete it, and to make a new one. What is not right, or 429 with `Retry-After`,
is printed, and the longest that an answer took.
"""

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.fault.router_doubles import DecodeDouble, letter_ids, make_model, speak
from tests.support.patience import HANG_S, until
from tests.support.routers import Routers, sharing
from worker.api import WorkerStats

BUSY = 429
ASKS = ("create", "shown", "items", "continued", "cancelled")


@dataclass(frozen=True, slots=True)
class Answer:
    """To one of ASKS, by the router `at`, about a response that `keeper` has."""

    ask: str
    at: str
    keeper: str
    status: int
    message: str
    may_come_again: bool
    took_ms: float

    @property
    def is_busy(self) -> bool:
        return self.status == BUSY and self.may_come_again


def create(url: str, **more: object) -> httpx.Response:
    body = {"model": "small", "input": "a", **more}
    return httpx.post(f"{url}/v1/responses", json=body, timeout=HANG_S)


def asked(routers: Routers, at: str, keeper: str, name: str, ask: str) -> Answer:
    url = routers.own_url(at)
    path = f"{url}/v1/responses/{name}"
    began = time.monotonic()
    if ask == "create":
        answer = create(url)
    elif ask == "continued":
        answer = create(url, previous_response_id=name)
    elif ask == "deleted":
        answer = httpx.delete(path, timeout=HANG_S)
    elif ask == "cancelled":
        answer = httpx.post(f"{path}/cancel", timeout=HANG_S)
    else:
        answer = httpx.get(path + "/input_items" * (ask == "items"), timeout=HANG_S)
    took_ms = 1e3 * (time.monotonic() - began)
    message = answer.json().get("error", {}) if answer.status_code != 200 else {}
    later = "retry-after" in answer.headers
    return Answer(
        ask, at, keeper, answer.status_code, (message or {}).get("message", ""), later, took_ms
    )


def all_asked(
    routers: Routers, names: Mapping[str, str], at: Sequence[str], asks: Sequence[str] = ASKS
) -> Iterator[Answer]:
    """Everything of everybody, again where a keeper that lives says that it is busy."""
    for each, (keeper, name), ask in itertools.product(at, names.items(), asks):
        answer = asked(routers, each, keeper, name, ask)
        while answer.is_busy and keeper in at:
            answer = asked(routers, each, keeper, name, ask)
        yield answer


def stored_by_each(routers: Routers) -> dict[str, str]:
    """Router -> a background response that it keeps, and that has ended."""
    found = dict[str, str]()
    for name in routers.members:
        found[name] = create(routers.own_url(name), background=True).json()["id"]
        until(lambda at=name: is_made(routers.own_url(at), found[at]))
    return found


def is_made(url: str, name: str) -> bool:
    answer = httpx.get(f"{url}/v1/responses/{name}", timeout=HANG_S)
    return answer.json()["status"] == "completed"


def stages(routers: Routers) -> Iterator[tuple[str, list[Answer]]]:
    """What was done, and the answers. The second router is stopped, the third, if any, killed."""
    names, all_names = stored_by_each(routers), list(routers.members)
    stopped, killed = all_names[1], all_names[2:3]
    living = [name for name in all_names if name not in (stopped, *killed)]
    pid = routers.processes[stopped].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    for name in killed:
        routers.kill(name)
    yield "one stopped, one killed", [*all_asked(routers, names, living)]
    for name in killed:
        del routers.members[name]
    routers.tell()
    yield "the killed one is no member", [*all_asked(routers, names, living)]
    os.kill(pid, signal.SIGCONT)
    staying = [*living, stopped]
    until(lambda: not any(each.is_busy for each in _shown(routers, names, staying)))
    yield "the stopped one goes on", [*all_asked(routers, names, staying)]
    for keeper, at in zip(names, itertools.cycle(reversed(staying))):
        yield f"{at} deletes", [asked(routers, at, keeper, names[keeper], "deleted")]
    yield "all are deleted", [*_shown(routers, names, staying)]


def _shown(routers: Routers, names: Mapping[str, str], at: Sequence[str]) -> Iterator[Answer]:
    for each, (keeper, name) in itertools.product(at, names.items()):
        yield asked(routers, each, keeper, name, "shown")


def wrong(stage: str, answers: Sequence[Answer], routers: Routers) -> list[Answer]:
    """Those that are neither right nor 429."""
    found = list[Answer]()
    for answer in answers:
        is_gone = answer.keeper not in routers.members or stage == "all are deleted"
        right = 404 if is_gone and answer.ask != "create" else 200
        if answer.status != right and not answer.is_busy:
            found.append(answer)
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--routers", type=int, default=4)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as root:
        odd = list[Answer]()
        for stage, answers, these in at_routers(Path(root), args.routers):
            odd += these
            print(f"{stage}: {len(answers)} answers")
            for ask in (*ASKS, "deleted"):
                took = [each.took_ms for each in answers if each.ask == ask]
                statuses = sorted({each.status for each in answers if each.ask == ask})
                if took:
                    print(f"  {ask}: {statuses}, {max(took):.0f} ms at most")
    print("\n".join(f"WRONG: {each}" for each in odd))
    return int(bool(odd))


def at_routers(place: Path, num: int) -> Iterator[tuple[str, list[Answer], list[Answer]]]:
    """Stages, answers, and which of them are wrong."""
    directory = make_model(place)
    stats = WorkerStats(max_num_reqs=64, num_free_pages=1000, num_pages=1000)
    double = DecodeDouble(script=speak(letter_ids(directory)), stats=stats)
    with sharing(directory, double, num=num) as routers:
        for stage, answers in stages(routers):
            yield stage, answers, wrong(stage, answers, routers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
