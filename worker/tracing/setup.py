"""Whether this process makes spans. OpenTelemetry is imported here, and only if it does."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from worker.config import TracingConfig
from worker.errors import MissingLibrary

if TYPE_CHECKING:
    from worker.tracing.spans import Tracer

PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


def check_libraries(config: TracingConfig) -> None:
    """Whether this machine can trace, if it is to.

    Raises:
        MissingLibrary: OpenTelemetry is not installed.
    """
    if not config.endpoint:
        return
    for package in PACKAGES:
        try:
            found = find_spec(package) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            path = "tracing.endpoint"
            message = f"{path}: {package} is not installed: pip install 'kvlane[tracing]'"
            raise MissingLibrary(message, path)


def tracer_of(config: TracingConfig, role: str, name: str) -> Tracer | None:
    """What makes the spans of this process; None where tracing is off.

    Args:
        config: whether, where to and how many.
        role: of this process.
        name: of this process; stays the same when it is started again.

    Raises:
        MissingLibrary: as `check_libraries`.
    """
    if not config.endpoint:
        return None
    check_libraries(config)
    from worker.tracing.export import exporting

    return exporting(config, role, name)
