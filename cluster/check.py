"""What can be known to be wrong before Ray starts: names, ports, files, libraries, GPUs.

Imports neither torch nor Ray, which take seconds: a mistake is told in less than one.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import msgspec

from cluster import hub
from cluster.config import Config, WorkerRole
from cluster.resolve import ROLES, reserved, with_devices, with_transport
from router.dispatch.policy import POLICIES
from router.http.keys import read_keys
from router.http.port import listen
from router.openai.defaults import defaults_of
from worker.attention.backends import ATTENTION
from worker.config import drafter_directory
from worker.drafts.drafter_config import READERS, check_block
from worker.errors import UserError
from worker.model.files import check_weights
from worker.model.shape import LayerShape, ModelSpec, read_model_spec
from worker.model.shard import split_even, split_heads
from worker.observe.tracing import check_tracing
from worker.transfer import mooncake_libraries
from worker.transfer.base import KINDS

EXTRAS = "pip install 'kvlane[cpu]', or 'kvlane[cuda]' on a machine with NVIDIA GPUs"
PACKAGES = {  # of attention backends
    "triton": "triton",
    "by_length": "flashinfer",
    "flashinfer": "flashinfer",
}


def checked(config: Config, num_gpus: int | None, *, offline: bool) -> Config:
    """The configuration with its model here, once all that can be checked without Ray is right.

    Args:
        config: as the user wrote it.
        num_gpus: that the Ray which `serve` starts will count; None: it joins one.
        offline: take no model from the network.

    Raises:
        UserError, WorldError: as the checks below and `hub.fetch`.
    """
    joins = num_gpus is None
    if num_gpus is None:
        check_before_joining(config)
    else:
        check_before_ray(config, num_gpus)
    named = hub.is_name(config.model.path)
    if named_drafter := hub.is_name(config.spec.path):
        config = hub.fetch_drafter(config, offline=offline)
    if named:
        config = hub.fetch(
            config, offline=offline, check=lambda c: check_model(c, with_weights=False)
        )
    # In a Ray cluster that we join, only the nodes of workers and routers need the model.
    if named or not joins:
        check_model(config)
    if joins:
        fetched = [config.model.directory] * named + [config.spec.path] * named_drafter
        for directory in fetched:
            print(f"every node has to see {directory}: share HF_HOME among them", file=sys.stderr)
    return config


def check_before_ray(config: Config, num_gpus: int) -> None:
    """All that has to be right where `serve` starts Ray on this machine, its model aside.

    Args:
        config: as the user wrote it.
        num_gpus: that Ray will count.

    Raises:
        UserError: a line for each mistake, with the field's path and what to do.
    """
    if errors := mistakes(config, num_gpus):
        raise _together(errors)


def mistakes(config: Config, num_gpus: int) -> list[UserError]:
    """What `check_before_ray` would say, line by line; the same arguments."""
    decided = decided_here(config, num_gpus)
    return _errors(
        *_names(config),
        lambda: _keys(config),
        lambda: _port(config),
        lambda: _cpus(decided),
        lambda: _gpus(decided, num_gpus),
        lambda: _collective(decided),
        lambda: _torch(decided, num_gpus),
        lambda: _attention(decided),
        lambda: _transport(decided),
        lambda: check_tracing(config.tracing),
    )


def check_before_joining(config: Config) -> None:
    """The same for a Ray cluster that runs already: its nodes are not this machine.

    Raises:
        UserError: as `check_before_ray`.
    """
    here = (lambda: _keys(config),) if _beside_serve(config) else ()
    if errors := _errors(*_names(config), *here):
        raise _together(errors)


def check_port(config: Config) -> None:
    """Whether routers can listen there; once it is known that no kvlane runs on that Ray cluster.

    Raises:
        UserError: something else does.
    """
    if _beside_serve(config):
        _port(config)


def decided_here(config: Config, num_gpus: int) -> Config:
    """With devices and transport as a Ray of our own on this machine leads to."""
    decided = with_devices(config, has_gpus=num_gpus > 0, local_gpus=num_gpus)
    return with_transport(decided, ["this machine"])


def check_model(config: Config, *, with_weights: bool = True) -> None:
    """Whether the model's directory is there, whole, and of a kind that can be served.

    So for the drafter's, but only with the weights: their names say what it is made of.

    Raises:
        UserError: names file and field.
    """
    model, directory = config.model, config.model.directory
    if not directory.is_dir():
        raise UserError(f"model.path: there is no directory {directory}", "model.path")
    try:
        spec = read_model_spec(directory)
        _tokenizer(directory / "tokenizer.json")
        if with_weights and model.load_format == "safetensors":
            check_weights(directory)
    except UserError as error:
        raise type(error)(f"model.path: {error}", "model.path") from error
    if config.router.generation_config == "auto":
        defaults_of(directory)
    longest = spec.max_position_embeddings
    if model.max_model_len != "auto" and model.max_model_len > longest:
        message = f"is {model.max_model_len}, but the model has {longest} positions"
        raise UserError(f"model.max_model_len: {message}", "model.max_model_len")
    _ranks(config, spec)
    if with_weights and config.spec.has_weights:
        _drafter(config, spec)


def _ranks(config: Config, spec: LayerShape) -> None:
    """Whether a model, or a drafter, can be divided among the ranks of a worker."""
    for role in ROLES:
        part, path = config.role(role), f"{role}.tp"
        if not part.replicas:
            continue
        try:
            split_heads(spec.num_heads, spec.num_kv_heads, 0, part.tp)
            split_even("intermediate_size", spec.intermediate_size, 0, part.tp)
            split_even("vocab_size", spec.vocab_size, 0, part.tp)
        except UserError as error:
            raise type(error)(f"{path}: {error}", path) from error


def _drafter(config: Config, target: ModelSpec) -> None:
    path = config.spec.path
    directory = drafter_directory(config.model, config.spec)
    if not directory.is_dir():
        raise UserError(f"spec.path: there is no directory {directory}", "spec.path")
    try:
        spec = READERS[config.spec.drafter](directory, target)
        if config.model.load_format == "safetensors":
            check_weights(directory)
    except UserError as error:
        unset = "" if path else " (spec.path is not set, so this is the model's own directory)"
        raise type(error)(f"spec.path: {error}{unset}", "spec.path") from error
    check_block(config.spec, spec)
    try:
        _ranks(config, spec)
    except UserError as error:
        raise type(error)(f"{error}: of the drafter", error.param) from error


def _errors(*checks: Callable[[], None]) -> list[UserError]:
    errors: list[UserError] = []
    for check in checks:
        try:
            check()
        except UserError as error:
            errors.append(error)
    return errors


def _together(errors: list[UserError]) -> UserError:
    if len(errors) == 1:
        return errors[0]
    return UserError("\n".join(map(str, errors)), errors[0].param)


def _names(config: Config) -> Iterable[Callable[[], None]]:
    """Names that come from tables."""
    yield lambda: _one_of("router.policy", config.router.policy, POLICIES)
    transport = config.transport
    if transport.name != "auto":
        yield lambda: _one_of("transport.name", transport.name, KINDS)
    kinds = KINDS.get(transport.name)
    if kinds and transport.kind != "auto":
        yield lambda: _one_of("transport.kind", transport.kind, kinds)
    for role in ROLES:
        for kind, name in config.role(role).engine.attention.model_dump().items():
            path = f"{role}.engine.attention.{kind}"
            yield lambda path=path, name=name: _one_of(path, name, (*ATTENTION, "auto"))


def _one_of(path: str, name: str, choices: Iterable[str]) -> None:
    if name not in choices:
        raise UserError(f"{path}: {name!r} is none of: {', '.join(sorted(choices))}", path)


def _keys(config: Config) -> None:
    if not config.router.api_key_file:
        return
    try:
        read_keys(config.router.api_key_file)
    except UserError as error:
        raise UserError(f"router.api_key_file: {error}", error.param) from error


def _beside_serve(config: Config) -> bool:
    """Whether the routers of a Ray cluster that we join run on this machine."""
    return not config.routers.num_cpus and not config.routers.resources


def _port(config: Config) -> None:
    """The routers' address is bound for a moment, as the first of them does it."""
    host, port = config.cluster.host, config.cluster.port
    try:
        listen(host, port).close()
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        if error.errno == errno.EADDRINUSE:
            remedy = "end what listens there, or choose --port N (0: any free one)"
            reason = f"{reason}; {remedy}"
        of_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        path = "cluster.port" if of_port else "cluster.host"
        raise UserError(f"{path}: {host}:{port}: {reason}", path) from error


def _cpus(decided: Config) -> None:
    there = decided.cluster.local_ray.num_cpus
    needed = reserved(decided, "CPU")
    if there != "auto" and needed > there:
        path = "cluster.local_ray.num_cpus"
        raise UserError(f"{path}: is {there}, but all processes reserve {needed:g}", path)


def _gpus(decided: Config, num_gpus: int) -> None:
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
    raise UserError(
        f"{path}: GPUs are asked for ({whose}), and here are {num_gpus}. {remedy}", path
    )


def _num_gpus(decided: Config, role: WorkerRole) -> float:
    """That all workers of a role reserve together."""
    part = decided.role(role)
    return float(part.num_gpus) * part.tp * part.replicas


def _collective(decided: Config) -> None:
    for role in ROLES:
        engine, path = decided.role(role).engine, f"{role}.engine.collective"
        name, on_cpu = engine.collective, engine.device == "cpu"
        if name != "auto" and on_cpu != (name == "gloo"):
            where = "CPUs" if on_cpu else "GPUs"
            raise UserError(
                f"{path}: {name}, but {role} workers compute on {where}; gloo is for CPUs, custom "
                "and nccl are for GPUs",
                path,
            )


def _torch(decided: Config, num_gpus: int) -> None:
    path = next((f"{role}.engine.device" for role in ROLES if _num_gpus(decided, role)), "")
    if find_spec("torch") is None:
        path = path or "decode.engine.device"
        raise UserError(f"{path}: torch is not installed: {EXTRAS}", path)
    build = metadata.version("torch")
    if path and num_gpus and build.endswith("+cpu"):
        remedy = "--set prefill.engine.device=cpu --set decode.engine.device=cpu"
        raise UserError(
            f"{path}: torch {build} cannot use the GPU: pip install 'kvlane[cuda]', or {remedy}",
            path,
        )


def _attention(decided: Config) -> None:
    """Packages of the backends that were chosen by name."""
    for role in ROLES:
        part = decided.role(role)
        for kind, name in part.engine.attention.model_dump().items():
            package = PACKAGES.get(name)
            if part.replicas and package and find_spec(package) is None:
                path = f"{role}.engine.attention.{kind}"
                remedy = "which is not installed: pip install 'kvlane[cuda]'"
                raise UserError(f"{path}: {name} needs {package}, {remedy}", path)


def _transport(decided: Config) -> None:
    if decided.transport.name != "mooncake":
        return
    try:
        mooncake_libraries.check_installed()
    except UserError as error:
        raise type(error)(f"transport.name: {error}", "transport.name") from error


def _tokenizer(path: Path) -> None:
    """It is JSON to the end; the router says what else may be wrong with it."""
    try:
        msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; a slow (sentencepiece) tokenizer has to be "
                        "converted with transformers first") from None  # fmt: skip
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: cut short or not JSON: {error}") from error
