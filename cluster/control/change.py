"""What of a configuration may change while the cluster serves, and who takes it when."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from cluster.config import Config, WorkerRole, differences
from cluster.control.replicas import Replica
from cluster.resolve import ROLES, bundle_of
from router.text import template
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
