"""Decides `auto` values that depend on the cluster: devices before placement, transport after it.

Each function returns a new tree and notes what it chose and why. Values that depend on the machine
are decided in the worker (`WorkerConfig.resolved`). `explain` says of all what they become here.
"""

import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter

from cluster.config import Config, WorkerRole, fields, put
from worker.api import Role
from worker.config import MEMORY_FRACTION, Choice, Machine, Note, WorkerConfig, log_choice
from worker.errors import UserError
from worker.start.check import EIGHT_BITS, ON_GPUS, kv_token_bytes, model_limits, sizes_of

GRAIN = 10_000  # Ray counts a resource in units of 1/10,000
DECODE_GPUS_PER_ROUTER = 2  # by the speeds in RoutersConfig.replicas
SCALE = 4
ROLES: tuple[WorkerRole, ...] = ("prefill", "decode")

Chosen = dict[str, Choice]  # by the path of a leaf


def with_devices(
    config: Config, *, has_gpus: bool, local_gpus: float | None = None, note: Note = log_choice
) -> Config:
    """Decide `replicas`, `num_gpus`, `engine.device` where no GPU is reserved, and
    `engine.memory_fraction` where a part of one is.

    has_gpus: some node of the Ray cluster has a GPU.
    local_gpus: all GPUs if no node can join, else None. If they are few, workers of one rank share.
    """
    alone = does_both(config, local_gpus)
    config = _with(config, _num_workers(config, alone), note)
    share = 1.0 if local_gpus is None else _share(config, local_gpus)
    chosen: Chosen = {}
    for role in ROLES:
        part = config.role(role)
        device, num_gpus = part.engine.device, part.num_gpus
        if num_gpus == "auto":
            wanted = device == "cuda" or (device == "auto" and has_gpus)
            num_gpus = (share if part.tp == 1 else 1.0) if wanted else 0.0
            reason = f"device {device}, {'GPUs' if has_gpus else 'no GPU'} in the Ray cluster"
            chosen[f"{role}.num_gpus"] = num_gpus, reason
        if device == "auto" and num_gpus == 0:
            chosen[f"{role}.engine.device"] = "cpu", "no GPU is reserved for it"
        if part.engine.memory_fraction == "auto" and 0 < num_gpus < 1:
            fraction = round(MEMORY_FRACTION * num_gpus, 4)
            chosen[f"{role}.engine.memory_fraction"] = fraction, "it shares its GPU"
        if role == "decode" and config.routers.replicas == "auto":
            total = num_gpus * part.tp * part.num
            num_routers = max(1, math.ceil(total / DECODE_GPUS_PER_ROUTER))
            chosen["routers.replicas"] = num_routers, f"decode workers have {total:g} GPUs"
    return _with(config, chosen, note)


def does_both(config: Config, local_gpus: float | None) -> bool:
    """Whether one worker prefills and decodes: on one GPU, unless the settings speak of two.

    Arguments as of `with_devices`. On an H200 it gives 9,944 tokens/s where two workers that share
    the GPU give 8,626 (256 clients), and the first token after 28 ms instead of 45 (16 requests/s).
    """
    prefill, decode = config.prefill, config.decode
    plain = all(
        (part.tp, part.num_gpus) == (1, "auto") and part.engine.device != "cpu"
        for part in (prefill, decode)
    )
    single = local_gpus == 1 and prefill.replicas == "auto" and decode.replicas in ("auto", 1)
    return single and plain and config.disaggregation.mode != "always"


def _num_workers(config: Config, alone: bool) -> Chosen:
    chosen: Chosen = {}
    for role in ROLES:
        if config.role(role).replicas == "auto":
            none = alone and role == "prefill"
            why = "one GPU: the decode worker does both" if none else "the default"
            chosen[f"{role}.replicas"] = int(not none), why
    return chosen


def _share(config: Config, local_gpus: float) -> float:
    """GPUs of a worker of one rank whose num_gpus is auto: 1, or the half, third, … that fits.

    Ranks of a worker share none: a rank waits in its kernels for what the others compute.
    """
    num_workers = 0
    for part in map(config.role, ROLES):
        if part.num_gpus != "auto":
            local_gpus -= part.num_gpus * part.tp * part.num
        elif part.engine.device != "cpu":
            if part.tp > 1:
                local_gpus -= part.tp * part.num
            else:
                num_workers += part.num
    if local_gpus <= 0 or num_workers <= local_gpus:
        return 1.0  # where even sharing cannot help, the placement says so
    return GRAIN // math.ceil(num_workers / local_gpus) / GRAIN


def with_collective(
    worker: WorkerConfig, nodes: Collection[str], *, note: Note = log_choice
) -> WorkerConfig:
    """Decide the collective of a worker whose GPUs are on several nodes; else it does so itself.

    worker: with its device decided. nodes: addresses of those that its ranks were placed on.
    """
    engine = worker.engine
    if engine.collective != "auto" or engine.device == "cpu" or len(set(nodes)) == 1:
        return worker
    note("engine.collective", "nccl", f"its ranks are on {len(set(nodes))} nodes")
    return worker.model_copy(update={"engine": engine.model_copy(update={"collective": "nccl"})})


def with_transport(
    config: Config,
    nodes: Collection[str],
    *,
    peer_access: bool | None = None,
    note: Note = log_choice,
) -> Config:
    """Decide the transport; shm and nvlink only where they reach every worker.

    config: with devices decided. nodes: ids of those that the workers were placed on. peer_access:
    where it is one, as `facts.Driver` has it.
    """
    devices = {config.role(role).engine.device for role in ROLES if config.role(role).replicas}
    one_node = len(set(nodes)) <= 1
    where = "one node" if one_node else f"{len(set(nodes))} nodes"
    why = f"KV of {' and '.join(sorted(devices))}, on {where}"
    name, chosen = config.transport.name, Chosen()
    if name == "auto":
        kind = config.transport.kind
        if kind != "auto":
            name = {"shm": "shm", "tcp": "sockets"}.get(kind, "mooncake")
        elif devices == {"cpu"}:
            name = "shm" if one_node else "mixed"
        elif "cpu" in devices or not one_node:
            name = "sockets"
        elif peer_access is False:
            name, why = "sockets", f"{why} with GPUs that cannot read each other's memory"
        else:
            name = "mooncake"
        chosen["transport.name"] = name, why
    if name == "mooncake" and config.transport.kind == "auto":
        kind = "nvlink" if "cpu" not in devices and one_node else "tcp"
        if kind == "nvlink" and peer_access is False:
            kind, why = "tcp", f"{why} with GPUs that cannot read each other's memory"
        chosen["transport.kind"] = kind, why
    if name == "sockets" and config.transport.kind == "auto":
        chosen["transport.kind"] = "tcp", "it has no other"
    if name == "mixed" and config.transport.kind == "auto":
        kind = "shm" if "cpu" in devices else "nvlink"
        chosen["transport.kind"] = kind, f"within a host; {why}"
    return _with(config, chosen, note)


def counts(config: Config) -> dict[Role, int]:
    """How many workers a role has, and how many routers there are, once devices are decided."""
    by_role: dict[Role, int] = {role: config.role(role).num for role in ROLES}
    by_role["router"] = config.routers.num
    return by_role


def num_ranks(config: Config, role: Role) -> int:
    """Processes of a worker or router."""
    return config.role(role).tp if role in ROLES else 1


def bundle_of(config: Config, role: Role) -> dict[str, float]:
    """Ray resources that a process of a role reserves, without zeros; devices are decided."""
    if role in ROLES:
        part = config.role(role)
        assert part.num_gpus != "auto", "with_devices comes first"
        wanted = {"CPU": part.num_cpus, "GPU": part.num_gpus, **part.resources}
    else:
        wanted = {"CPU": config.routers.num_cpus, **config.routers.resources}
    return {name: amount for name, amount in wanted.items() if amount > 0}


def reserved(config: Config, resource: str) -> float:
    """How much of a resource all processes reserve together; devices are decided."""
    return sum(
        bundle_of(config, role).get(resource, 0.0) * num_ranks(config, role) * count
        for role, count in counts(config).items()
    )


def num_cpus(config: Config) -> int:
    """How many CPUs Ray shall count: the machine's, or more if the configuration reserves more.

    SCALE times as many: Ray only counts them, and what `kvlane scale` adds has to fit as well.
    """
    config = with_devices(config, has_gpus=True)  # which needs no fewer routers than without
    return SCALE * max(os.cpu_count() or 1, math.ceil(reserved(config, "CPU")))


def _with(config: Config, chosen: Chosen, note: Note) -> Config:
    tree = config.model_dump()
    for path, (value, why) in chosen.items():
        note(path, value, why)
        put(tree, path, value)
    return Config.model_validate(tree)


def explain(
    config: Config, origins: Mapping[str, str], num_gpus: int, peer_access: bool | None = None
) -> Iterator[str]:
    """`kvlane config --explain`: a line a leaf, with its value, its source, and why.

    What is `auto` is decided as `serve` would decide it with a Ray of its own on this machine.

    origins: as `config.origins` has them. num_gpus: that Ray would find here. peer_access: as of
    `with_transport`.

    Raises UserError if the model cannot be served.
    """
    choices = _choices(config, num_gpus, peer_access)
    for path, field in fields():
        value: object = attrgetter(path)(config)
        source = next((s for p, s in origins.items() if f"{path}.".startswith(f"{p}.")), "default")
        if path in choices and value == "auto":
            value, why = choices[path]
            source = f"auto: {why}" if source == "default" else f"auto by {source}: {why}"
        elif value == "auto":
            text = " ".join((field.description or "").split())
            source += f"; {text.partition('auto:')[2].strip() or text}"
        left = f"{path} = {value if value != '' else repr('')}"
        yield f"{left:<56} # {source}"


def _choices(config: Config, num_gpus: int, peer_access: bool | None) -> Chosen:
    choices: Chosen = {}

    def note(path: str, value: object, why: str) -> None:
        choices.setdefault(path, (value, why))

    config = with_devices(config, has_gpus=num_gpus > 0, local_gpus=num_gpus, note=note)
    config = with_transport(config, ["this machine"], peer_access=peer_access, note=note)
    if not config.model.directory.is_dir():
        return choices
    longest, dtype = model_limits(config.model.directory)
    for role in ROLES:

        def note_of_role(path: str, value: object, why: str, role: str = role) -> None:
            choices[f"{role}.{path}" if path.startswith("engine.") else path] = value, why

        part = config.role(role)
        # Ray tells a worker through OMP_NUM_THREADS how many CPUs it has.
        num_cpus, device = max(1, int(part.num_cpus)), "cuda" if part.num_gpus else "cpu"
        machine = Machine(device, num_cpus)
        worker = config.worker(role)
        made = worker.resolved(machine, model_max_len=longest, model_dtype=dtype, note=note_of_role)
        directory, size = config.model.directory, int(made.kv.page_size)
        own, eight = kv_token_bytes(directory, size, made.model.dtype, EIGHT_BITS)
        why = f"the model's: {own:,} bytes a token; with {EIGHT_BITS} {eight:,} {ON_GPUS}"
        choices["kv.dtype"] = made.model.dtype, why
    if "model.dtype" in choices:
        with suppress(UserError):  # there are no weights, or none that can be read
            held, (value, why) = sizes_of(config.model.directory), choices["model.dtype"]
            choices["model.dtype"] = value, f"{why}; {held.told}"
    return choices
