"""The worker's part of the configuration tree: frozen pydantic records, unknown keys refused.

`auto` leaves are decided once, by `WorkerConfig.resolved(machine, ...)`, into a new tree.
Every leaf's comment says what it does; units are in the names.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

log = logging.getLogger("kvlane.config")

Auto = Literal["auto"]
Fraction = Annotated[float, Field(gt=0, le=1)]
MEMORY_FRACTION = 0.85  # of the GPU memory, or part of it, that a worker has to itself


class Section(BaseModel):
    """A part of the tree."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelConfig(Section):
    """Which weights are served, and under which name."""

    path: str = "tiny"  # "tiny" (bundled) or a Hugging Face directory
    served_name: str = ""  # name in the API; empty: the last part of path
    load_format: Literal["safetensors", "dummy"] = "safetensors"  # dummy: seeded random weights
    dtype: Auto | Literal["float32", "bfloat16", "float16"] = "auto"
    max_model_len: Auto | PositiveInt = "auto"  # prompt + output tokens; auto: the model's
    seed: int = 0  # of dummy weights

    @property
    def directory(self) -> Path:
        """Where config.json, weights and tokenizer lie."""
        if self.path == "tiny":
            return Path(__file__).parent / "assets" / "tiny"
        return Path(self.path).expanduser()

    @property
    def name(self) -> str:
        """The name in the API."""
        return self.served_name or self.directory.name


class KVConfig(Section):
    """What both roles must agree on: it is part of the KV layout's hash."""

    page_size: Auto | PositiveInt = "auto"  # tokens a page; auto: 16 on CPU, 64 on CUDA
    # Layer groups of the KV. A number: every step announces them one by one. auto: 1 on CPU; on
    # CUDA the largest number up to 4 that divides the layers; steps announce them one by one where
    # that pays.
    num_groups: Auto | PositiveInt = "auto"


class AttentionConfig(Section):
    """Attention backends by kind of batch; a bare string stands for all three of them.

    Values are `auto` or names of worker.attention.base.ATTENTION.
    """

    prefill: Auto | str = "auto"  # chunks of prompts, on either role
    decode: Auto | str = "auto"  # one token of each row
    spec: Auto | str = "auto"  # verify and draft passes; built and checked, nothing runs on it yet

    @model_validator(mode="before")
    @classmethod
    def _one_for_all(cls, given: object) -> object:
        return dict.fromkeys(cls.model_fields, given) if isinstance(given, str) else given


ChunkGraph = Literal["eager", "piecewise", "compiled"]


class GraphConfig(Section):
    """CUDA graphs by kind of step: `full` replays decode steps, `piecewise` and `compiled` chunks.

    The graphs of `compiled` hold what torch.compile made of the layers; `eager` has no graphs. A
    bare name stands for the kind that knows it, and the other kind is then eager.
    """

    prefill: Auto | ChunkGraph = "auto"  # chunks of prompts, on either role
    decode: Auto | Literal["eager", "full"] = "auto"  # auto: full on CUDA if it decodes

    @model_validator(mode="before")
    @classmethod
    def _one_name(cls, given: object) -> object:
        if not isinstance(given, str):
            return given
        kinds = dict.fromkeys(get_args(ChunkGraph), "prefill") | {"full": "decode"}
        if given == "eager" or given not in kinds:
            return dict.fromkeys(cls.model_fields, given)
        return dict.fromkeys(cls.model_fields, "eager") | {kinds[given]: given}


class EngineConfig(Section):
    """One engine: its memory, its batch limits, its backends."""

    device: Auto | Literal["cpu", "cuda"] = "auto"
    threads: Auto | int = "auto"  # intra-op threads on CPU; auto: the CPUs that Ray gave
    num_pages: Auto | int = "auto"  # KV pages; auto: from the two limits below
    memory_fraction: Auto | Fraction = "auto"  # of total device memory, CUDA; auto: 0.85 of its GPU
    cpu_pool_bytes: int = Field(default=512 << 20, gt=0)  # upper limit of the KV pool on CPU
    max_num_reqs: int = Field(default=64, ge=1)  # rows of one batch
    max_waiting: int = Field(default=256, ge=0)  # admitted requests beyond those that run
    # Most tokens of one prefill step (chunk). auto: 512, of a prefill worker on CUDA 2048. A
    # prefill worker that has measured its graphs takes the size of one of its buckets, up to 4096.
    max_prefill_tokens: Auto | PositiveInt = "auto"
    growth_tokens: int = Field(default=64, ge=1)  # output tokens reserved a request at admission
    penalty_rows: int = Field(default=16, ge=1)  # requests with penalties or bias at a time
    prefix_cache: bool = True
    attention: AttentionConfig = AttentionConfig()
    graph: GraphConfig = GraphConfig()
    strict: bool = False  # a graph that differs from eager at the start is an error

    @model_validator(mode="after")
    def _positive(self) -> EngineConfig:
        for name in ("threads", "num_pages"):
            value = getattr(self, name)
            if value != "auto" and value < 1:
                raise ValueError(f"{name} must be at least 1 or auto")
        return self


class TransportConfig(Section):
    """How KV pages move."""

    name: Auto | str = "auto"  # auto: shm on CPU while all workers share a host, else mooncake
    # auto: shm for shm; nvlink between GPUs of one node; else tcp.
    kind: Auto | Literal["shm", "tcp", "rdma", "nvlink"] = "auto"
    connect_timeout_s: float = Field(default=2.0, gt=0)  # probe and warm-up of a new peer
    pull_timeout_s: float = Field(default=8.0, gt=0)  # a pull older than this is given up
    max_attempts: int = Field(default=3, ge=1)  # prefill workers tried for one prompt


class LeaseConfig(Section):
    """Lease windows (ARCHITECTURE section 4). Decode's window must end before prefill's."""

    decode_window_s: float = Field(default=9.0, gt=0)  # from decode's last renewal
    prefill_window_s: float = Field(default=10.0, gt=0)  # from prefill's receipt of that renewal
    renew_s: float = Field(default=2.0, gt=0)
    final_resend_s: float = Field(default=1.0, gt=0)  # for final chunks without an Ack

    @model_validator(mode="after")
    def _ordered(self) -> LeaseConfig:
        if not self.renew_s * 2 < self.decode_window_s < self.prefill_window_s:
            raise ValueError("needs 2 * renew_s < decode_window_s < prefill_window_s")
        return self


class PingConfig(Section):
    """Liveness on the data plane."""

    interval_s: float = Field(default=1.0, gt=0)
    max_misses: int = Field(default=3, ge=1)
    stall_s: float = Field(default=60.0, gt=0)  # a loop silent this long stops answering


class DisaggregationConfig(Section):
    """When decode asks a prefill worker, and when it prefills by itself."""

    mode: Literal["auto", "always", "never"] = "auto"  # auto: by estimated cost
    pull_overhead_s: float = Field(default=0.003, ge=0)  # fixed cost of asking
    pull_bytes_per_s: float = Field(default=1.0e9, gt=0)  # first guess; measured from then on


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of this process; `worker.engine.machine.probe()` fills it."""

    device: Literal["cpu", "cuda"]
    num_cpus: int
    device_memory_bytes: int
    host: str


class WorkerConfig(Section):
    """All that one worker process is told."""

    role: Literal["prefill", "decode"]
    model: ModelConfig = ModelConfig()
    kv: KVConfig = KVConfig()
    engine: EngineConfig = EngineConfig()
    transport: TransportConfig = TransportConfig()
    lease: LeaseConfig = LeaseConfig()
    ping: PingConfig = PingConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()

    def resolved(self, machine: Machine, *, model_max_len: int, model_dtype: str) -> WorkerConfig:
        """A new tree without `auto`, except num_pages and num_groups, which need the layout.

        Idempotent.

        Args:
            machine: what this process runs on.
            model_max_len: positions the checkpoint was made for.
            model_dtype: dtype its weights are stored in.

        Raises:
            ValueError: max_model_len is beyond what the model was made for.
        """
        cpu = (self.engine.device if self.engine.device != "auto" else machine.device) == "cpu"
        attention = ("reference", "CPU") if cpu else ("triton", "CUDA")
        choices: dict[tuple[str, ...], tuple[Any, str]] = {
            ("model", "dtype"): ("float32", "CPU") if cpu else (model_dtype, "as stored"),
            ("model", "max_model_len"): (model_max_len, "the model's own limit"),
            ("kv", "page_size"): (16, "CPU") if cpu else (64, "CUDA"),
            ("engine", "device"): (machine.device, "what is here"),
            ("engine", "threads"): (machine.num_cpus, "CPUs of this process"),
            ("engine", "max_prefill_tokens"): _chunk(self.role, cpu),
            ("engine", "memory_fraction"): (MEMORY_FRACTION, "a GPU to itself, or none"),
            **{("engine", "attention", kind): attention for kind in AttentionConfig.model_fields},
            **{("engine", "graph", kind): why for kind, why in _graphs(self.role, cpu).items()},
            ("transport", "name"): ("shm", "CPU, one host") if cpu else ("mooncake", "CUDA"),
        }
        tree = self.model_dump()
        for (*sections, leaf), (value, reason) in choices.items():
            node = tree
            for section in sections:
                node = node[section]
            if node[leaf] == "auto":
                node[leaf] = value
                log.debug("%s.%s = %s (%s)", ".".join(sections), leaf, value, reason)
        if tree["transport"]["kind"] == "auto":
            name = tree["transport"]["name"]
            tree["transport"]["kind"] = kind = "shm" if name == "shm" else "tcp"
            log.debug("transport.kind = %s (transport.name is %s)", kind, name)
        if tree["model"]["max_model_len"] > model_max_len:
            raise ValueError(
                f"model.max_model_len is {tree['model']['max_model_len']}, "
                f"but the model has {model_max_len} positions"
            )
        return WorkerConfig.model_validate(tree)


def _chunk(role: str, cpu: bool) -> tuple[int, str]:
    """Tokens of a prefill step at most, and why."""
    if cpu or role == "decode":
        return 512, "CPU" if cpu else "decode steps wait meanwhile"
    return 2048, "CUDA; beyond, products are no faster"


def _graphs(role: str, cpu: bool) -> dict[str, tuple[str, str]]:
    """The graphs that `auto` means for each kind of step, and why."""
    if cpu:
        return dict.fromkeys(GraphConfig.model_fields, ("eager", "the CPU has no graphs"))
    if role == "prefill":
        decode = "eager", "a prefill worker decodes nothing"
    else:
        decode = "full", "CUDA"
    return {"prefill": ("piecewise", "CUDA"), "decode": decode}
