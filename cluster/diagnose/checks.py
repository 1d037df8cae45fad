"""The list of checks that `serve` and `doctor` read, for a machine and for what a cluster runs.

`serve` refuses findings that carry an error, warns of others that are not ok, and goes on. `doctor`
shows all of them.
"""

import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from cluster import download
from cluster.config import Config
from cluster.diagnose.facts import Facts, read_facts
from cluster.diagnose.finding import Finding, Level, failure, ok, refused
from cluster.diagnose.machine import examine, versions
from cluster.diagnose.settings import Settings, mistakes, mistakes_of_joining
from cluster.resolve import ROLES
from router.openai.defaults import defaults_of
from worker.config import SpecConfig
from worker.errors import UserError
from worker.start.check import check_directories

PORTS = ("cluster.host", "cluster.port")


def of_start(config: Config, num_gpus: int | None, facts: Facts) -> list[Finding]:
    """What a start would meet on this machine, its model aside.

    num_gpus: GPUs that a Ray started by `serve` will count; None: `serve` joins a running Ray.
    """
    if num_gpus is None:
        return [*map(refused, mistakes_of_joining(config)), *versions(facts)]
    settings = Settings.here(config, num_gpus)
    return [*map(refused, mistakes(settings)), *examine(settings.decided, facts)]


def refuse(findings: Iterable[Finding]) -> None:
    """Raise the errors among the findings as one: a line for each, with path and remedy."""
    errors = [finding.error for finding in findings if finding.error is not None]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise UserError("\n".join(map(str, errors)), errors[0].param)


def checked(config: Config, num_gpus: int | None, *, offline: bool) -> tuple[Config, list[str]]:
    """The configuration with its model on this machine, and warnings, once nothing is refused.

    num_gpus: as of `of_start`. Raises as `refuse`, `check_model` and `download.fetch`.
    """
    findings = of_start(config, num_gpus, read_facts())
    refuse(findings)
    named = download.is_name(config.model.path)
    if named_drafter := download.is_name(config.spec.path):
        config = download.fetch_drafter(config, offline=offline)
    if named:
        config = download.fetch(
            config, offline=offline, check=lambda c: check_model(c, with_weights=False)
        )
    # In a Ray cluster that we join, only the nodes of workers and routers need the model.
    if named or num_gpus is not None:
        check_model(config)
    if num_gpus is None:
        for directory in [config.model.directory] * named + [config.spec.path] * named_drafter:
            print(f"every node has to see {directory}: share HF_HOME among them", file=sys.stderr)
    return config, [
        f"warning: {f.subject}: {f.what}: {f.why}. {f.remedy}"
        for f in findings
        if f.level is not Level.OK
    ]


def of_machine(config: Config, num_gpus: int, facts: Facts) -> list[Finding]:
    """All that `doctor` shows of this machine; arguments as of `of_start`."""
    settings = Settings.here(config, num_gpus)
    errors = mistakes(settings)
    ports = () if any(error.param in PORTS for error in errors) else _ports(config)
    judged = examine(settings.decided, facts)
    return [*ports, *map(refused, errors), *_model(config), *judged]


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


def _model(config: Config) -> Iterator[Finding]:
    path, drafter = config.model.path, config.spec.path
    for name in filter(download.is_name, (path, drafter)):
        yield ok("model", f"{name} is a name on the hub: serve looks for it there")
    if download.is_name(path):
        return
    if download.is_name(drafter):
        config = config.model_copy(update={"spec": SpecConfig()})
    try:
        check_model(config)
    except UserError as error:
        yield refused(error)
    else:
        yield ok("model", f"{path} is whole, and of a kind that can be served")


def check_model(config: Config, *, with_weights: bool = True) -> None:
    """Check the directories of the model and, `with_weights`, of its drafter.

    Raises:
        UserError: names file and field.
    """
    ranks = {f"{role}.tp": part.tp for role in ROLES if (part := config.role(role)).replicas}
    check_directories(config.model, config.spec, ranks, with_weights=with_weights)
    _check_tokenizer(config.model.directory / "tokenizer.json")
    if config.router.generation_config == "auto":
        defaults_of(config.model.directory)


def _check_tokenizer(path: Path) -> None:
    """It is JSON to the end; the router says what else may be wrong with it."""
    try:
        msgspec.json.decode(path.read_bytes())
        return
    except FileNotFoundError:
        reason = (
            "no such file; a slow (sentencepiece) tokenizer has to be converted with transformers "
            "first"
        )
    except OSError as error:
        reason = str(error.strerror)
    except msgspec.DecodeError as error:
        reason = f"cut short or not JSON: {error}"
    raise UserError(f"model.path: {path}: {reason}", "model.path")
