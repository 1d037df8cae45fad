"""The worker's part of the configuration tree: frozen pydantic records, unknown keys refused.

`auto` leaves are decided once, by `WorkerConfig.resolved(machine, ...)`, into a new tree.
The text below a leaf says what it does, for `kvlane config --schema`; units are in the names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveInt, field_validator, model_validator

from worker.config.engine import PLANNED_ON_HOST, Auto, EngineConfig, GraphConfig, Section
from worker.config.engine import AttentionConfig as AttentionConfig
from worker.config.engine import Fraction as Fraction
from worker.config.spec import SpecConfig
from worker.errors import UserError

log = logging.getLogger("kvlane.config")

Note = Callable[[str, object, str], None]  # path of a leaf, what auto became, why
Choice = tuple[Any, str]  # what auto becomes, why
MIN_AUTO_REQS, MAX_AUTO_REQS = 64, 256  # what engine.max_num_reqs may become
MEMORY_FRACTION = 0.85  # of the GPU memory, or part of it, that a worker has to itself


def log_choice(path: str, value: object, why: str) -> None:
    """The Note of every process that serves; `kvlane config --explain` has its own."""
    log.debug("%s = %s (%s)", path, value, why)


TINY = "tiny"  # the model that comes with kvlane; its drafters are "tiny-chain", "tiny-dflash"


class ModelConfig(Section):
    """Which weights are served, and under which name."""

    path: str = TINY
    """The bundled "tiny", a Hugging Face model directory, or a model's name on the hub, as
    "Qwen/Qwen3-0.6B", which `serve` downloads before it starts Ray."""
    revision: str = ""
    """Branch, tag or commit of a model on the hub; empty: its main branch."""
    served_name: str = ""
    """Name in the API; empty: the name on the hub, or the last part of the path."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """`dummy` is seeded random weights of the model's shape; it reads no weight file."""
    dtype: Auto | Literal["float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV; auto: float32 on CPU, as stored on CUDA."""
    max_model_len: Auto | PositiveInt = "auto"
    """Prompt and output tokens of a request; auto: the model's limit, or what the KV pool holds."""
    seed: int = 0
    """Of dummy weights."""

    @property
    def directory(self) -> Path:
        """Where config.json, weights and tokenizer lie."""
        if self.path == TINY:
            return Path(__file__).parents[1] / "assets" / TINY
        return Path(self.path).expanduser()

    @property
    def name(self) -> str:
        """The name in the API."""
        return self.served_name or self.directory.name


class KVConfig(Section):
    """What both roles must agree on: it is part of the KV layout's hash."""

    page_size: Auto | PositiveInt = "auto"
    """Tokens of a KV page; auto: 16 on CPU, 64 on CUDA."""
    num_groups: Auto | PositiveInt = "auto"
    """Layer groups of the KV. A number: every step announces them one by one. auto: 1 on CPU; on
    CUDA the largest number up to 4 that divides the layers, and steps announce them one by one
    where that pays."""


class TransportConfig(Section):
    """How KV pages move."""

    name: Auto | str = "auto"
    """auto: shm while all workers run on CPUs of one host, else mooncake."""
    kind: Auto | Literal["shm", "tcp", "rdma", "nvlink"] = "auto"
    """auto: shm for shm; for mooncake nvlink between GPUs of one node, else tcp."""
    connect_timeout_s: float = Field(default=2.0, gt=0)
    """For the probe and warm-up of a new peer."""
    pull_timeout_s: float = Field(default=8.0, gt=0)
    """A pull older than this is given up."""
    max_attempts: int = Field(default=3, ge=1)
    """Prefill workers tried for one prompt."""


class LeaseConfig(Section):
    """Lease windows. Decode's window must end before prefill's."""

    decode_window_s: float = Field(default=9.0, gt=0)
    """How long decode trusts pulled KV, from its last renewal."""
    prefill_window_s: float = Field(default=10.0, gt=0)
    """How long prefill keeps announced pages, from its receipt of that renewal."""
    renew_s: float = Field(default=2.0, gt=0)
    """Between decode's renewals."""
    final_resend_s: float = Field(default=1.0, gt=0)
    """After which a final chunk without an Ack is sent again."""

    @model_validator(mode="after")
    def _ordered(self) -> LeaseConfig:
        if not self.renew_s * 2 < self.decode_window_s < self.prefill_window_s:
            raise ValueError("needs 2 * renew_s < decode_window_s < prefill_window_s")
        return self


class PingConfig(Section):
    """Liveness on the data plane."""

    interval_s: float = Field(default=1.0, gt=0)
    """Between two pings of a peer."""
    max_misses: int = Field(default=3, ge=1)
    """Pings without an answer after which a peer counts as lost."""
    stall_s: float = Field(default=60.0, gt=0)
    """A loop that hangs for so long, or settles no step though it has work, answers no pings."""


class DisaggregationConfig(Section):
    """When decode asks a prefill worker, and when it prefills by itself."""

    mode: Literal["auto", "always", "never"] = "auto"
    """Whether decode asks a prefill worker; auto: by estimated cost."""
    first_token: Literal["prefill", "decode"] = "prefill"
    """Who draws the first token of a prompt that a prefill worker computes. `prefill`: that worker,
    unless the request has a grammar, penalties, a logit bias or logprobs; the token does not wait
    for the KV. `decode`: always the decode worker."""
    pull_overhead_s: float = Field(default=0.003, ge=0)
    """Fixed cost of asking, in that estimate."""
    pull_bytes_per_s: float = Field(default=1.0e9, gt=0)
    """First guess of the link's speed in that estimate; measured from then on."""


class TracingConfig(Section):
    """Spans of requests, for a collector that speaks OTLP over HTTP.

    The processes' variables OTEL_* count as OpenTelemetry's SDK says, where a leaf is `auto` or
    there is none for it.
    """

    endpoint: Annotated[str, Field(pattern=r"^(auto|https?://\S+)?$")] = ""
    """URL of the collector, as http://localhost:4318; /v1/traces is added if its path ends
    otherwise. Empty: no spans. auto: as OTEL_EXPORTER_OTLP_ENDPOINT says, else port 4318 of each
    process's own host."""
    sample_ratio: Auto | Annotated[float, Field(ge=0, le=1)] = "auto"
    """Part of the requests without a `traceparent` header that is traced; the others' callers have
    decided. auto: as OTEL_TRACES_SAMPLER says, else all."""

    @field_validator("endpoint")
    @classmethod
    def _is_url(cls, endpoint: str) -> str:
        if endpoint in ("", "auto"):
            return endpoint
        parts = urlsplit(endpoint)  # raises for brackets that do not match, as `port` for no number
        if not parts.hostname or parts.port == 0:
            raise ValueError("needs a host, and a port that is not 0")
        return endpoint


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of this process; `worker.start.build.probe()` fills it."""

    device: Literal["cpu", "cuda"]
    num_cpus: int
    device_memory_bytes: int
    host: str


def drafter_directory(model: ModelConfig, spec: SpecConfig) -> Path:
    """Where the drafter's config.json and weights lie, if there is a drafter."""
    if spec.path:
        return Path(spec.path).expanduser()
    directory = model.directory
    return directory.with_name(f"{TINY}-{spec.drafter}") if model.path == TINY else directory


class WorkerConfig(Section):
    """All that the processes of one worker are told."""

    role: Literal["prefill", "decode"]
    tp: PositiveInt = 1
    """Ranks of the worker: processes, each with a GPU of its own if it computes on one."""
    model: ModelConfig = ModelConfig()
    kv: KVConfig = KVConfig()
    engine: EngineConfig = EngineConfig()
    spec: SpecConfig = SpecConfig()
    transport: TransportConfig = TransportConfig()
    lease: LeaseConfig = LeaseConfig()
    ping: PingConfig = PingConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    tracing: TracingConfig = TracingConfig()

    @property
    def drafter_directory(self) -> Path:
        """See the function of that name."""
        return drafter_directory(self.model, self.spec)

    def resolved(
        self, machine: Machine, *, model_max_len: int, model_dtype: str, note: Note = log_choice
    ) -> WorkerConfig:
        """A new tree without `auto`, except for what depends on layout and model: num_pages,
        num_groups, penalty_rows, and on CUDA max_num_reqs. Idempotent.

        model_max_len and model_dtype are the checkpoint's; note is called with every choice.

        Raises:
            UserError: max_model_len is beyond what the model was made for, or the collective needs
                GPUs.
        """
        cpu = (self.engine.device if self.engine.device != "auto" else machine.device) == "cpu"
        attention = ("reference", "CPU") if cpu else ("triton", "CUDA")
        choices: dict[tuple[str, ...], Choice] = {
            ("model", "dtype"): ("float32", "CPU") if cpu else (model_dtype, "as stored"),
            ("model", "max_model_len"): (model_max_len, "the model's own limit"),
            ("kv", "page_size"): (16, "CPU") if cpu else (64, "CUDA"),
            ("engine", "device"): (machine.device, "what is here"),
            ("engine", "threads"): (machine.num_cpus, "CPUs of this process"),
            ("engine", "collective"): ("gloo", "CPU") if cpu else ("custom", "GPUs of one host"),
            ("engine", "max_prefill_tokens"): _chunk(self.role, cpu),
            ("engine", "memory_fraction"): (MEMORY_FRACTION, "a GPU to itself, or none"),
            ("engine", "attention", "prefill"): attention,
            ("engine", "attention", "decode"): attention,
            ("engine", "attention", "spec"): _spec(self.engine.attention.decode, attention),
            **{("engine", "graph", kind): why for kind, why in _graphs(self.role, cpu).items()},
            ("spec", "widths"): _widths(self.spec),
            ("transport", "name"): ("shm", "CPU, one host") if cpu else ("mooncake", "CUDA"),
        }
        if cpu:
            choices["engine", "max_num_reqs"] = MIN_AUTO_REQS, "CPU"
        tree = self.model_dump()
        for (*sections, leaf), (value, reason) in choices.items():
            node = tree
            for section in sections:
                node = node[section]
            if node[leaf] == "auto":
                node[leaf] = value
                note(".".join((*sections, leaf)), value, reason)
        if tree["transport"]["kind"] == "auto":
            name = tree["transport"]["name"]
            tree["transport"]["kind"] = kind = "shm" if name == "shm" else "tcp"
            note("transport.kind", kind, f"transport.name is {name}")
        check_length(tree["model"]["max_model_len"], model_max_len)
        check_collective(tree["engine"]["collective"], cpu=cpu)
        return WorkerConfig.model_validate(tree)


def check_length(asked: int, model_max_len: int) -> None:
    """Raise UserError if the model has fewer positions than are asked for."""
    if asked > model_max_len:
        path = "model.max_model_len"
        raise UserError(f"{path}: is {asked}, but the model has {model_max_len} positions", path)


def check_collective(
    name: str, *, cpu: bool, path: str = "engine.collective", who: str = "this worker computes"
) -> None:
    """Raise UserError if a collective is not for the devices that `who` computes on."""
    if cpu != (name == "gloo"):
        devices, remedy = (
            "CPUs" if cpu else "GPUs",
            "gloo is for CPUs, custom and nccl are for GPUs",
        )
        raise UserError(f"{path}: {name}, but {who} on {devices}; {remedy}", path)


def _widths(asked: SpecConfig) -> Choice:
    """Widths of windows."""
    if asked.drafter == "dflash":
        return [1, 2, 4, 8, 16], "drafts of dflash; those within a block of the drafter stay"
    if asked.drafter != "none":
        return [1, 2, 4, 8], f"drafts of {asked.drafter}"
    if asked.simulate_accept_len or asked.simulate_accept_share:
        return [1, 2, 4, 8], "drafts are simulated"
    return [1], "nothing proposes drafts"


def _spec(decode: str, auto: Choice) -> Choice:
    """The attention backend of windows beside a `decode` that is configured, maybe "auto"."""
    return auto if decode == "auto" or decode in PLANNED_ON_HOST else (decode, "that of decode")


def _chunk(role: str, cpu: bool) -> Choice:
    """Tokens of a prefill step at most."""
    if cpu or role == "decode":
        return 512, "CPU" if cpu else "decode steps wait meanwhile"
    return 2048, "CUDA; beyond, products are no faster"


def _graphs(role: str, cpu: bool) -> dict[str, Choice]:
    """The graphs of each kind of step."""
    if cpu:
        return dict.fromkeys(GraphConfig.model_fields, ("eager", "the CPU has no graphs"))
    nothing = "eager", "a prefill worker decodes nothing"
    decode = nothing if role == "prefill" else ("full", "CUDA")
    return {"prefill": ("piecewise", "CUDA"), "decode": decode}
