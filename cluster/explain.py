"""`kvlane config --explain`: each value, where it comes from, and why it is what it is.

What is `auto` is decided as `serve` would decide it with a Ray of its own on this machine.
"""

from collections.abc import Iterator, Mapping
from operator import attrgetter

from cluster.config import Config, fields
from cluster.resolve import ROLES, Chosen, with_devices, with_transport
from worker.config import Machine
from worker.start.check import model_limits


def explain(config: Config, origins: Mapping[str, str], num_gpus: int) -> Iterator[str]:
    """A line for each leaf; raises UserError if the model cannot be served.

    origins: as `config.origins` has them. num_gpus: that Ray would find here.
    """
    choices = _choices(config, num_gpus)
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


def _choices(config: Config, num_gpus: int) -> Chosen:
    """Of the cluster, and of each worker for itself."""
    choices: Chosen = {}

    def note(path: str, value: object, why: str) -> None:
        choices.setdefault(path, (value, why))

    config = with_devices(config, has_gpus=num_gpus > 0, local_gpus=num_gpus, note=note)
    config = with_transport(config, ["this machine"], note=note)
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
        worker.resolved(machine, model_max_len=longest, model_dtype=dtype, note=note_of_role)
    return choices
