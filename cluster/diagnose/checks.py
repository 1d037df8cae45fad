"""The list of checks that `serve` and `doctor` read, for a machine and for what a cluster runs.

`serve` refuses findings that carry an error, warns of others that are not ok, and goes on. `doctor`
shows all of them. Imports neither torch nor Ray, which take seconds: a mistake is shown in less
than one.
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from cluster import download
from cluster.config import Config, WorkerRole
from cluster.diagnose.eight_bits import eight_bits
from cluster.diagnose.facts import Facts, read_facts
from cluster.diagnose.finding import Finding, Level, failure, ok, refuse, refused, warning
from cluster.diagnose.machine import examine, versions
from cluster.resolve import ROLES, reserved, with_devices, with_transport
from router.dispatch.policy import POLICIES
from router.http.keys import read_keys
from router.http.port import listen
from router.http.tls import certificate
from router.openai.defaults import defaults_of
from worker.config import SpecConfig, check_collective
from worker.config.checkpoint.fields import unreadable
from worker.config.checkpoint.foreign import tokenizer_remedy
from worker.errors import UserError
from worker.observe.tracing import check_tracing
from worker.start.check import Ranks, check_directories, names_of
from worker.transfer.host import addresses_in

PORTS = ("cluster.host", "cluster.port")
EXTRAS = "pip install 'kvlane[cpu]', or 'kvlane[cuda]' on a machine with NVIDIA GPUs"
# Of attention backends.
PACKAGES = {"triton": "triton", "by_length": "flashinfer", "flashinfer": "flashinfer"}


@dataclass(frozen=True, slots=True)
class Settings:
    """A configuration, and what it becomes on this machine."""

    config: Config  # as the user wrote it
    num_gpus: int  # that a Ray of our own on this machine will count
    decided: Config  # with devices and transport as such a Ray leads to

    @classmethod
    def here(cls, config: Config, num_gpus: int, facts: Facts) -> Settings:
        """Where `serve` starts Ray."""
        decided = with_devices(config, has_gpus=num_gpus > 0, local_gpus=num_gpus)
        peer_access = facts.driver.peer_access
        decided = with_transport(decided, ["this machine"], peer_access=peer_access)
        return cls(config, num_gpus, decided)


def of_start(config: Config, num_gpus: int | None, facts: Facts) -> list[Finding]:
    """What a start would meet on this machine, its model aside.

    num_gpus: GPUs that a Ray started by `serve` will count; None: `serve` joins a running Ray.
    """
    if num_gpus is None:  # that cluster's nodes are not this machine
        settings = Settings(config, 0, config)
        keys = [*_keys(settings), *_certificate(settings)] if _beside_serve(config) else []
        return [*map(refused, (*_names(settings), *keys)), *_wire(config), *versions(facts)]
    settings = Settings.here(config, num_gpus, facts)
    return [*map(refused, mistakes(settings)), *_wire(config), *examine(settings.decided, facts)]


def checked(config: Config, num_gpus: int | None, *, offline: bool) -> tuple[Config, list[str]]:
    """The configuration with its model on this machine, and warnings, once nothing is refused.

    num_gpus: as of `of_start`. Raises as `refuse`, `check_model` and `download.fetch`.
    """
    findings = of_start(config, num_gpus, read_facts())
    refuse(findings)
    named, named_drafter = map(download.is_name, (config.model.path, config.spec.path))
    config = fetched(config, offline=offline)
    # In a Ray cluster that we join, only the nodes of workers and routers need the model.
    if named or num_gpus is not None:
        check_model(config)
    if num_gpus is None:
        for directory in [config.model.path] * named + [config.spec.path] * named_drafter:
            print(f"every node has to see {directory}: share HF_HOME among them", file=sys.stderr)
    return config, [
        f"warning: {f.subject}: {f.what}: {f.why}. {f.remedy}"
        for f in findings
        if f.level is not Level.OK
    ]


def fetched(config: Config, *, offline: bool) -> Config:
    """With what has a name on the hub downloaded. Raises as `download.fetch`."""
    if download.is_name(config.spec.path):
        config = download.fetch_drafter(config, offline=offline)
    if download.is_name(config.model.path):
        config = download.fetch(
            config, offline=offline, check=lambda c: check_model(c, with_weights=False)
        )
    return config


def of_machine(config: Config, num_gpus: int, facts: Facts) -> list[Finding]:
    """All that `doctor` shows of this machine; arguments as of `of_start`."""
    settings = Settings.here(config, num_gpus, facts)
    errors = mistakes(settings)
    ports = () if any(error.param in PORTS for error in errors) else _ports(config)
    judged = examine(settings.decided, facts)
    return [*ports, *map(refused, errors), *_wire(config), *_model(config, facts), *judged]


def _ports(config: Config) -> Iterator[Finding]:
    """The router's is free; a worker's may not be."""
    port = config.cluster.worker_metrics_port
    try:
        if port:
            socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        yield failure(
            "ports",
            f"cluster.worker_metrics_port: {port}: {error.strerror}",
            "a worker serves its metrics and /live there, and ends if it cannot",
            "end what listens there, or choose another; 0: any free one",
        )
    else:
        yield ok("ports", f"{config.cluster.host}:{config.cluster.port} is free")


def _wire(config: Config) -> Iterator[Finding]:
    if config.transport.authentication == "none":
        yield warning(
            "wire",
            "transport.authentication is none",
            "whoever reaches a worker's port may ask it, and take what is another's",
            "leave it at curve, unless nobody else reaches the network of the workers",
        )


def _model(config: Config, facts: Facts) -> Iterator[Finding]:
    path, drafter = config.model.path, config.spec.path
    for name in filter(download.is_name, (path, drafter)):
        yield ok("model", f"{name} is a name on the hub: serve looks for it there")
    if download.is_name(path):
        return
    if download.is_name(drafter):
        config = config.model_copy(update={"spec": SpecConfig()})
    errors = [*_raised(check_model, config)]
    yield from map(refused, errors)
    if not errors:
        yield ok("model", f"{path} is whole, and of a kind that can be served")
        yield from eight_bits(config, facts.driver)


def mistakes(settings: Settings) -> list[UserError]:
    """All that is wrong where `serve` starts Ray on this machine; an error names the field."""
    return [error for check in CHECKS for error in check(settings)]


def check_port(config: Config) -> None:
    """Raise a UserError if routers cannot listen; call it when no kvlane runs on that cluster."""
    for error in _port(Settings(config, 0, config)) if _beside_serve(config) else ():
        raise error


def _beside_serve(config: Config) -> bool:
    """Whether the routers of a Ray cluster that we join run on this machine."""
    return not config.routers.num_cpus and not config.routers.resources


def _names(settings: Settings) -> Iterator[UserError]:
    config = settings.config
    engines = {f"{role}.engine": config.role(role).engine for role in ROLES}
    named = {"router.policy": (config.router.policy, POLICIES)}
    for path, (name, choices) in (named | names_of(config.transport, engines)).items():
        if name not in choices:
            yield UserError(f"{path}: {name!r} is none of: {', '.join(sorted(choices))}", path)


def _raised(check: Callable[..., object], *args: Any, **named: Any) -> Iterator[UserError]:
    """The mistake that a check of another package raises, if it does."""
    try:
        check(*args, **named)
    except UserError as error:
        yield error


def _keys(settings: Settings) -> Iterator[UserError]:
    for error in _raised(read_keys, settings.config.router.api_key_file):
        yield UserError(f"router.api_key_file: {error}", error.param)


def _certificate(settings: Settings) -> Iterator[UserError]:
    router = settings.config.router
    return _raised(certificate, router.tls_cert_file, router.tls_key_file)


def _port(settings: Settings) -> Iterator[UserError]:
    """Binds the routers' address for a moment, as the first of them does it."""
    host, port = settings.config.cluster.host, settings.config.cluster.port
    try:
        listen(host, port).close()
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        if error.errno == errno.EADDRINUSE:
            reason += "; end what listens there, or choose --port N (0: any free one)"
        of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        path = "cluster.port" if of_port else "cluster.host"
        yield UserError(f"{path}: {host}:{port}: {reason}", path)


def _cpus(settings: Settings) -> Iterator[UserError]:
    num_cpus = settings.decided.cluster.local_ray.num_cpus
    needed = reserved(settings.decided, "CPU")
    if num_cpus != "auto" and needed > num_cpus:
        path = "cluster.local_ray.num_cpus"
        yield UserError(f"{path}: is {num_cpus}, but all processes reserve {needed:g}", path)


def _gpus(settings: Settings) -> Iterator[UserError]:
    decided, num_gpus = settings.decided, settings.num_gpus
    wanted = {role: _num_gpus(decided, role) for role in ROLES}
    if sum(wanted.values()) <= num_gpus:
        return
    roles = [role for role, num in wanted.items() if num]
    whose = " and ".join(f"{wanted[role]:g} for {role}" for role in roles)
    on_cpu = " ".join(f"--set {r}.num_gpus=0 --set {r}.engine.device=cpu" for r in roles)
    share = " ".join(f"--set {role}.num_gpus=0.5" for role in roles)
    of_ranks = [role for role in ROLES if wanted[role] and decided.role(role).tp > 1]
    path = f"{of_ranks[-1]}.tp" if of_ranks else f"{roles[-1]}.num_gpus"
    remedy = f"On the CPU: {on_cpu}"
    if of_ranks and wanted["prefill"] and wanted["decode"] <= num_gpus:
        remedy = f"Decode workers alone: --prefill 0. {remedy}"
    elif num_gpus and not of_ranks:
        remedy = f"{remedy}; to share a GPU: {share}"
    yield UserError(
        f"{path}: GPUs are asked for ({whose}), and here are {num_gpus}. {remedy}", path
    )


def _num_gpus(decided: Config, role: WorkerRole) -> float:
    part = decided.role(role)
    return float(part.num_gpus) * part.tp * part.num


def _collective(settings: Settings) -> Iterator[UserError]:
    for role in ROLES:
        engine, path = settings.decided.role(role).engine, f"{role}.engine.collective"
        cpu, who = engine.device == "cpu", f"{role} workers compute"
        if engine.collective != "auto":
            yield from _raised(check_collective, engine.collective, cpu=cpu, path=path, who=who)


def _torch(settings: Settings) -> Iterator[UserError]:
    on_gpus = [f"{role}.engine.device" for role in ROLES if _num_gpus(settings.decided, role)]
    path = [*on_gpus, "decode.engine.device"][0]
    if find_spec("torch") is None:
        yield UserError(f"{path}: torch is not installed: {EXTRAS}", path)
    elif on_gpus and settings.num_gpus and metadata.version("torch").endswith("+cpu"):
        lack = f"{path}: torch {metadata.version('torch')} cannot use the GPU"
        remedy = "--set prefill.engine.device=cpu --set decode.engine.device=cpu"
        yield UserError(f"{lack}: pip install 'kvlane[cuda]', or {remedy}", path)


def _attention(settings: Settings) -> Iterator[UserError]:
    for role in ROLES:
        part = settings.decided.role(role)
        for kind, name in part.engine.attention.model_dump().items():
            package = PACKAGES.get(name)
            if part.replicas and package and find_spec(package) is None:
                path = f"{role}.engine.attention.{kind}"
                remedy = "which is not installed: pip install 'kvlane[cuda]'"
                yield UserError(f"{path}: {name} needs {package}, {remedy}", path)


def _networks(settings: Settings) -> Iterator[UserError]:
    transport, path = settings.decided.transport, "transport.networks"
    if len(transport.networks) > 1 and transport.name not in ("sockets", "mixed"):
        lack = f"{path}: {transport.name} moves KV on one network"
        yield UserError(f"{lack}; several need --set transport.name=sockets, or mixed", path)
    try:
        addresses_in(transport.networks)
    except ValueError as e:
        yield UserError(f"{path}: {e}", path)


def _tracing(settings: Settings) -> Iterator[UserError]:
    return _raised(check_tracing, settings.config.tracing)


CHECKS = (
    *(_names, _keys, _certificate, _port, _cpus, _gpus, _collective, _torch, _attention),
    *(_networks, _tracing),
)


def check_model(config: Config, *, with_weights: bool = True) -> None:
    """Check the model's directory and, `with_weights`, its drafter's; raises UserError."""
    ranks: Ranks = {
        f"{role}.tp": (part.tp, part.engine.experts)
        for role in ROLES
        if (part := config.role(role)).replicas
    }
    model, spec, dtypes = config.model, config.spec, (config.kv.dtype, config.kv.state_dtype)
    check_directories(model, spec, ranks, dtypes, with_weights=with_weights)
    _check_tokenizer(config.model.directory / "tokenizer.json")
    if config.router.generation_config == "auto":
        defaults_of(config.model.directory)


def _check_tokenizer(path: Path) -> None:
    """It is JSON to the end; the router says what else may be wrong with it."""
    try:
        msgspec.json.decode(path.read_bytes())
        return
    except FileNotFoundError:
        reason = tokenizer_remedy(path.parent)
    except OSError as error:
        reason = str(error.strerror)
    except msgspec.DecodeError as error:
        reason = unreadable(path, f"cut short or not JSON: {error}")
    raise UserError(f"model.path: {path}: {reason}", "model.path")
