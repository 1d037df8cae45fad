"""Whether this process makes spans. OpenTelemetry is imported here, and only if it does."""

import os
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from worker.config import TracingConfig
from worker.errors import MissingLibrary, UserError

if TYPE_CHECKING:
    from worker.observe.spans import Tracer

PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
SAMPLER, SAMPLER_ARG = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
RATIO_SAMPLERS = ("traceidratio", "parentbased_traceidratio")
SAMPLERS = (
    "always_on", "always_off", "parentbased_always_on", "parentbased_always_off", *RATIO_SAMPLERS,
)  # fmt: skip


def check_tracing(config: TracingConfig) -> None:
    """Whether this machine can trace, if it is to.

    Raises MissingLibrary without OpenTelemetry, UserError if the environment's sampler is unknown.
    """
    if not config.endpoint:
        return
    for package in PACKAGES:
        with suppress(ModuleNotFoundError):  # its parent is not installed
            if find_spec(package) is not None:
                continue
        path = "tracing.endpoint"
        message = f"{path}: {package} is not installed: pip install 'kvlane[tracing]'"
        raise MissingLibrary(message, path)
    if config.sample_ratio != "auto":
        return
    # Of a sampler that it does not know the SDK would warn, and sample every request.
    name, ratio = os.environ.get(SAMPLER, "").lower(), os.environ.get(SAMPLER_ARG, "")
    if name and name not in SAMPLERS:
        raise UserError(f"{SAMPLER}={name}: must be one of {', '.join(SAMPLERS)}", SAMPLER)
    if name in RATIO_SAMPLERS and ratio:
        with suppress(ValueError):
            if 0 <= float(ratio) <= 1:
                return
        raise UserError(f"{SAMPLER_ARG}={ratio}: must be a number from 0 to 1", SAMPLER_ARG)


def tracer_of(config: TracingConfig, role: str, name: str) -> "Tracer | None":
    """The tracer of this process; None where tracing is off. Raises as `check_tracing`.

    name: of this process; stays the same when it is started again.
    """
    if not config.endpoint:
        return None
    check_tracing(config)
    from worker.observe.spans import exporting

    return exporting(config, role, name)
