"""The command `doctor`, and what `serve` says of its machine before it starts."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.check import decided_here
from cluster.config import Config
from cluster.doctor import running
from cluster.doctor.facts import read_facts
from cluster.doctor.finding import Finding, Level, has_failure, shown
from cluster.doctor.local import of_this_machine
from cluster.doctor.machine import examine, versions


def of_machine(config: Config, num_gpus: int) -> list[Finding]:
    """What a `serve` with a Ray of its own would meet here; arguments of `of_this_machine`."""
    return list(of_this_machine(config, read_facts(), num_gpus))


def of_cluster(config: Config, examined: running.Examined) -> list[Finding]:
    """What is wrong with what runs; of `config` counts the transport, where it names one."""
    return list(running.of_cluster(config.transport, examined))


def warnings(config: Config, num_gpus: int | None) -> Iterator[str]:
    """A line for each finding that is not ok, for `serve`, which goes on.

    num_gpus: that the Ray which it starts will count; None: it joins one of other nodes.
    """
    facts = read_facts()
    found = versions(facts) if num_gpus is None else examine(decided_here(config, num_gpus), facts)
    for each in found:
        if each.level is not Level.OK:
            yield f"warning: {each.subject}: {each.what}: {each.why}. {each.remedy}"


def tell(findings: list[Finding], *, as_json: bool) -> int:
    """Print them; the exit code."""
    print(shown(findings, as_json=as_json))
    return int(has_failure(findings))
