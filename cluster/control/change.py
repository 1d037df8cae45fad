"""What of a configuration may change while the cluster serves, and who takes it when."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count, islice
from pathlib import Path

from cluster.config import Config, WorkerRole, differences
from cluster.control.replicas import Replica, State
from cluster.resolve import ROLES, bundle_of
from cluster.sites.process import Record
from router.text import template
from worker.api import Role
from worker.config.checkpoint import tokens
from worker.errors import UserError

# Sections that workers alone read, and leaves of these that decide what stays as it is.
CHANGEABLE = (
    *("model.", "kv.", "spec.", "lease.", "disaggregation."),
    *("prefill.engine.", "decode.engine."),
)
FIXED = ("model.served_name", "engine.device", "engine.collective")
# What a router reads of a model.
READ_BY_ROUTERS = (*tokens.FILES, *template.FILES, "generation_config.json")  # some are patterns


def check_change(before: Config, after: Config) -> None:
    """Raise UserError for what needs another placement, or other routers."""
    for path in differences(before, after):
        if not path.startswith(CHANGEABLE) or path.endswith(FIXED):
            raise UserError(f"{path}: workers alone are restarted; this needs another serve", path)
    folders = before.model.directory, after.model.directory
    found = {x.relative_to(at) for at in folders for name in READ_BY_ROUTERS for x in at.glob(name)}
    for name in sorted(found):
        old, new = (at / name for at in folders)
        if _bytes(old) != _bytes(new):
            raise UserError(
                f"model.path: {new} is another one than {old}, which routers have read: this needs "
                "another serve",
                "model.path",
            )


def check_role(
    config: Config, replica: Replica, role: WorkerRole, replicas: Iterable[Replica]
) -> None:
    """Raise UserError if a worker cannot turn to this role where it is. config: as placed."""
    if replica.role not in ROLES or replica.role == role:
        raise UserError(f"{replica.name} has the role {replica.role}")
    others = (r for r in replicas if r is not replica and not r.is_stopped)
    if all(other.role != replica.role for other in others):
        raise UserError(f"{replica.name} is the last {replica.role} worker")
    mine, wanted = config.role(replica.role), config.role(role)
    if mine.tp != wanted.tp:
        raise UserError(f"{role}.tp is {wanted.tp}, and {replica.name} has {mine.tp}", f"{role}.tp")
    if bundle_of(config, replica.role) != bundle_of(config, role):
        raise UserError(f"{role} workers reserve other resources than {replica.name} has")


def check_scale(config: Config, wanted: Mapping[Role, int]) -> None:
    """Raise UserError for a number of routers that the port of these does not allow."""
    if wanted.get("router", 0) > 1 and config.routers.num == 1:
        raise UserError(
            "router: this serve has one, whose port is its own; for more: serve --router N",
            "routers.replicas",
        )


def to_scale(
    wanted: Mapping[Role, int], replicas: Sequence[Replica]
) -> tuple[list[Record], list[str]]:
    """Further names, and names that leave, for as many of a role as are wanted.

    Of a role those leave first that are not ready, then those with the highest numbers.
    """
    taken, further, leaving = {r.name for r in replicas}, list[Record](), list[str]()
    for role, num in wanted.items():
        mine = [r for r in replicas if r.role == role and not r.leaving]
        mine.sort(key=lambda r: (r.state is not State.READY, len(r.name), r.name))
        leaving += [replica.name for replica in mine[num:]]
        free = (name for i in count() if (name := f"{role}-{i}") not in taken)
        further += [Record(name, role) for name in islice(free, max(0, num - len(mine)))]
    return further, leaving


def in_order(replicas: Sequence[Replica]) -> list[str]:
    """Workers: those of another revision of the model find prefill workers of it for longest."""
    prefill, decode = (
        [r.name for r in replicas if r.role == role] for role in ("prefill", "decode")
    )
    return [*prefill[:-1], *decode, *prefill[-1:]]


def is_last_of_its_model(replica: Replica, replicas: Sequence[Replica]) -> bool:
    """Whether no other decode worker can go on with what this one has begun."""
    mine = replica.member
    if mine is None or mine.role != "decode":
        return False
    others = [r.member for r in replicas if r is not replica and not r.is_stopped]
    return (mine.role, mine.digest) not in [(m.role, m.digest) for m in others if m is not None]


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
