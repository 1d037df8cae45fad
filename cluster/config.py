"""The root of the configuration tree, and how it is put together.

Sources, later ones win: the YAML file, `--set a.b=c` (c is read as YAML), the plain flags. A
mistake is a `UserError` that names the path of every field that is wrong. `--set engine.a=c` sets
the leaf for both roles. Nothing here reads the environment.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from router.config import RouterConfig
from worker.config import (
    BY_NAME,
    Auto,
    DisaggregationConfig,
    EngineConfig,
    KVConfig,
    LeaseConfig,
    ModelConfig,
    PingConfig,
    Section,
    SpecConfig,
    TracingConfig,
    TransportConfig,
    WorkerConfig,
)
from worker.errors import UserError

WorkerRole = Literal["prefill", "decode"]
OF_BOTH = "engine"  # at the top level it stands for that section of both roles
Resources = dict[str, float]

NAMED_BY = {"model": "path", "spec": "drafter", "transport": "name"} | dict.fromkeys(
    ("prefill", "decode", "routers"), "replicas"
)
STOP_MARGIN_S = 15.0  # beyond the configured time-outs


class RoleConfig(Section):
    """The workers of one role."""

    replicas: Auto | NonNegativeInt = "auto"
    """Workers of this role. auto: 1; no prefill worker where a Ray of its own has one GPU, whose
    decode worker then does both."""
    tp: PositiveInt = 1
    """Ranks of a worker (tensor parallelism): processes that share every layer's weights and KV,
    with a GPU to a rank if they compute on GPUs."""
    num_cpus: float = Field(default=1, ge=0)
    """CPUs reserved in Ray for a rank of a worker."""
    num_gpus: Auto | NonNegativeFloat = "auto"
    """GPUs reserved in Ray for a rank of a worker; 0.5 is half a GPU, only with tp 1. auto: none
    on CPUs, else 1; where the machine has too few, workers of one rank get the part that fits."""
    resources: Resources = Field(default_factory=dict)
    """Ray's custom resources reserved for a rank of a worker, by name."""
    engine: EngineConfig = EngineConfig()

    @property
    def num(self) -> int:
        """Of workers, once it is decided."""
        assert self.replicas != "auto", "resolve.with_devices comes first"
        return self.replicas

    @model_validator(mode="after")
    def _ranks_share_no_gpu(self) -> RoleConfig:
        cpu = self.engine.device == "cpu"
        if self.tp > 1 and self.num_gpus != "auto" and self.num_gpus < 1 and not cpu:
            raise ValueError(
                f"num_gpus is {self.num_gpus:g} and tp {self.tp}: ranks of a worker share no GPU; "
                "set num_gpus to 1, or tp to 1"
            )
        return self


class RoutersConfig(Section):
    """Where the routers run; without resources of their own they run beside `serve`."""

    replicas: Auto | PositiveInt = "auto"
    """Routers, processes that share cluster.port. auto: one for two GPUs of decode workers, 1 on
    CPUs. A router passes more than 60,000 tokens/s on, and a GPU decodes 5,000 to 17,000; the rest
    is for prompts, whose tokenization takes milliseconds."""
    num_cpus: float = Field(default=0, ge=0)
    """CPUs reserved in Ray for a router."""
    resources: Resources = Field(default_factory=dict)
    """Ray's custom resources reserved for a router, by name."""

    @property
    def num(self) -> int:
        """Of routers, once it is decided."""
        assert self.replicas != "auto", "resolve.with_devices comes first"
        return self.replicas


class LocalRayConfig(Section):
    """The Ray that `serve` starts when there is none to join."""

    num_cpus: Auto | NonNegativeInt = "auto"
    """CPUs that Ray counts; auto: 4 times the machine's, or what the workers reserve if that is
    more: workers share them, and further ones may come (kvlane scale)."""
    num_gpus: Auto | NonNegativeInt = "auto"
    """GPUs that Ray counts; auto: the machine's."""
    object_store_bytes: int = Field(default=100_000_000, ge=80_000_000)
    """Of Ray's object store, in which kvlane stores nothing."""


class ClusterConfig(Section):
    """Start, stop and restart."""

    host: str = "127.0.0.1"
    """Address that the routers listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port of all routers, on each node that has some; 0: any free one."""
    worker_metrics_port: int = Field(default=0, ge=0, le=65535)
    """First port of workers' /metrics; 0: any free one."""
    worker_metrics_ports: PositiveInt = 1
    """Ports from there on, of which each worker takes the first that is free: as many as a node has
    workers."""
    placement_timeout_s: float = Field(default=30.0, gt=0)
    """For Ray to find room for all processes."""
    start_timeout_s: float = Field(default=900.0, gt=0)
    """For one worker to start: wait for its GPU, load, capture, warm up."""
    drain_timeout_s: float = Field(default=5.0, ge=0)
    """For running requests to end, after Ctrl-C."""
    stop_timeout_s: float = Field(default=5.0, gt=0)
    """For a process to stop; then it is killed."""
    restart_backoff_s: float = Field(default=0.5, gt=0)
    """Before a dead process is replaced; doubles with every early death in a row."""
    max_restart_backoff_s: float = Field(default=30.0, gt=0)
    """Upper limit of that."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Of all processes of the cluster."""
    log_format: Literal["text", "json"] = "text"
    """Of all lines, those of `serve` included; json: an object a line."""
    local_ray: LocalRayConfig = LocalRayConfig()

    @model_validator(mode="after")
    def _ordered(self) -> ClusterConfig:
        if self.restart_backoff_s > self.max_restart_backoff_s:
            raise ValueError("needs restart_backoff_s <= max_restart_backoff_s")
        return self

    @property
    def metrics_ports(self) -> range:
        """Of which a worker takes one; 0 is any free one."""
        first = self.worker_metrics_port
        return range(first, first + self.worker_metrics_ports)

    @property
    def stop_limit_s(self) -> float:
        """When stopping everything, routers and then workers, is given up."""
        return 2 * (self.drain_timeout_s + self.stop_timeout_s) + STOP_MARGIN_S


class Config(Section):
    """The whole configuration of one cluster."""

    model: ModelConfig = ModelConfig()
    kv: KVConfig = KVConfig()
    spec: SpecConfig = SpecConfig()
    transport: TransportConfig = TransportConfig()
    lease: LeaseConfig = LeaseConfig()
    ping: PingConfig = PingConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    prefill: RoleConfig = RoleConfig()
    decode: RoleConfig = RoleConfig()
    router: RouterConfig = RouterConfig()
    routers: RoutersConfig = RoutersConfig()
    tracing: TracingConfig = TracingConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _can_answer(self) -> Config:
        if self.decode.replicas == 0:
            raise ValueError("decode.replicas must be at least 1: decode workers own the requests")
        return self

    def role(self, role: WorkerRole) -> RoleConfig:
        """The section of one role."""
        return self.prefill if role == "prefill" else self.decode

    def worker(self, role: WorkerRole) -> WorkerConfig:
        """The configuration of one worker of `role`; values that are `auto` stay `auto`."""
        part = self.role(role)
        shared = WorkerConfig.model_fields.keys() & Config.model_fields.keys()
        sections: dict[str, Any] = {name: getattr(self, name) for name in shared}
        return WorkerConfig(role=role, tp=part.tp, engine=part.engine, **sections)

    def anchored(self, directory: Path) -> Config:
        """With absolute paths: the processes do not run in the `directory` that ours mean."""
        sections: dict[str, Section] = {}
        for name, leaf in (
            ("model", "path"), ("spec", "path"), ("router", "api_key_file"),
            ("router", "tls_cert_file"), ("router", "tls_key_file"),
        ):  # fmt: skip
            section: Section = sections.get(name) or getattr(self, name)
            path: str = getattr(section, leaf)
            if path and not (name == "model" and path in BY_NAME):
                anchored = str(directory / Path(path).expanduser())
                sections[name] = section.model_copy(update={leaf: anchored})
        return self.model_copy(update=sections)

    def shown(self) -> dict[str, Any]:
        """The tree in plain types, for the `config` command, GET /config and Helm."""
        return self.model_dump(mode="json")


def load(
    path: Path | None, sets: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> Config:
    """Build the tree from a YAML file, "a.b=c" texts (c is YAML) and flags.

    flags: path of a leaf -> value; None: not given.

    Raises UserError for a file or a --set that cannot be read; for unknown keys and bad values, a
    line for each.
    """
    return _built(_read(path) if path else {}, sets, flags)


def changed(config: Config, sets: Sequence[str], flags: Mapping[str, Any] | None = None) -> Config:
    """With other values of some leaves; arguments and errors as of `load`."""
    return _built(config.shown(), sets, flags)


def _built(tree: dict[str, Any], sets: Sequence[str], flags: Mapping[str, Any] | None) -> Config:
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    for key, value in (*_assigned(sets), *given.items()):
        put(tree, key, value)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        paths, lines = _explain(error)
        raise UserError("\n".join(lines), param=paths[0]) from None


def fields(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Paths and descriptions of all leaves of a tree of sections."""
    for name, field in model.model_fields.items():
        section = _section_of(field.annotation)
        if section is None:
            yield prefix + name, field
        else:
            yield from fields(section, f"{prefix}{name}.")


def differences(one: Config, other: Config) -> list[str]:
    """Paths of the leaves in which two trees differ."""
    return [path for path in leaves() if attrgetter(path)(one) != attrgetter(path)(other)]


def leaves() -> Iterator[str]:
    """Paths of all leaves."""
    return (path for path, _ in fields())


def origins(
    path: Path | None, sets: Sequence[str] = (), flags: Mapping[str, object] | None = None
) -> dict[str, str]:
    """Where values come from: path of a leaf, or of a section given as one value -> source.

    flags: of those that were given: path of a leaf -> name.
    """
    sources: dict[str, str] = {}

    def give(key: str, value: object, source: str) -> None:
        for known in [k for k in sources if k == key or k.startswith(f"{key}.")]:
            del sources[known]
        if isinstance(value, dict):
            for name, below in cast("dict[str, object]", value).items():
                give(f"{key}.{name}" if key else name, below, source)
        else:
            sources[key] = source

    if path:
        give("", _read(path), str(path))
    for key, value in _assigned(sets):
        give(key, value, "--set")
    return sources | {key: str(flag) for key, flag in (flags or {}).items()}


def _assigned(sets: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Path and value of all --set; raises UserError if it cannot be read."""
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {text}: expected PATH=VALUE, for example decode.replicas=2")
        try:
            read = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--set {text}: the value is not YAML: {_one_line(error)}") from error
        path = key.strip()
        of_both = path.partition(".")[0] == OF_BOTH
        paths = [f"{role}.{path}" for role in ("prefill", "decode")] if of_both else [path]
        yield from ((path, _section(path, read)) for path in paths)


def _section(key: str, value: object) -> object:
    """A value in the place of a section as that section: `model: tiny` names its path."""
    is_leaf = key in NAMED_BY and isinstance(value, str | int | float)
    return {NAMED_BY[key]: value} if is_leaf else value


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not YAML: {_one_line(error)}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a mapping at the top, found {type(tree).__name__}")
    return {key: _section(key, value) for key, value in cast("dict[str, Any]", tree).items()}


def put(tree: dict[str, Any], key: str, value: object) -> None:
    """Set the leaf at a dotted path; UserError if it is below a value."""
    *parents, leaf = key.split(".")
    node = tree
    for i, name in enumerate(parents):
        below = node.setdefault(name, {})
        if not isinstance(below, dict):
            raise UserError(f"{key}: {'.'.join(parents[: i + 1])} is a value, not a section", key)
        node = cast("dict[str, Any]", below)
    node[leaf] = value


def _explain(error: ValidationError) -> tuple[list[str], list[str]]:
    """(paths, lines), one entry per field; messages of a union's alternatives joined by 'or'."""
    problems: dict[str, list[str]] = {}
    for entry in error.errors(include_url=False):
        path = _path(entry["loc"])
        if entry["type"] == "extra_forbidden":
            message = "unknown key" + _suggestion(path)
        elif entry["type"] == "model_type":
            message = "a section: its keys stand below it"
        else:
            message = entry["msg"].removeprefix("Value error, ")
        problems.setdefault(path, []).append(message)
    lines = [
        f"{path}: {' or '.join(dict.fromkeys(messages))}" if path else messages[0]
        for path, messages in problems.items()
    ]
    return list(problems), lines


def _path(loc: Iterable[int | str]) -> str:
    """A path in our tree from a pydantic location, which also names a union's alternatives."""
    section: type[BaseModel] | None = Config
    names: list[str] = []
    for part in map(str, loc):
        names.append(part)
        field = section.model_fields.get(part) if section else None  # None: a key of a mapping
        if field is None:
            break
        section = _section_of(field.annotation)
        if section is None and field.annotation != Resources:
            break
    return ".".join(names)


def _suggestion(path: str) -> str:
    """', did you mean …?' or ''; by the full path, else by the last name anywhere."""
    known = sorted({*leaves(), *(name.rpartition(".")[0] for name in leaves())} - {""})
    last = path.rpartition(".")[2]
    close = difflib.get_close_matches(path, known, n=1, cutoff=0.8)
    close += [name for name in known if name.rpartition(".")[2] == last]
    if not close:
        names = {name.rpartition(".")[2] for name in known}
        similar = difflib.get_close_matches(last, names, n=1, cutoff=0.75)
        close = [name for name in known if name.rpartition(".")[2] in similar]
    best = list(dict.fromkeys(close))[:3]
    return f", did you mean {' or '.join(best)}?" if best else ""


def _section_of(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
