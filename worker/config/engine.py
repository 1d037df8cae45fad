"""What one engine is told: memory, limits of a batch, backends, speculation."""

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

Auto = Literal["auto"]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A part of the tree."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True
    )


# Of worker.config.backends.ATTENTION: without `static_plan`, so no windows are served by them.
PLANNED_ON_HOST = frozenset({"flashinfer"})
MAX_WIDTH = 16
MAX_NGRAM = 16


class AttentionConfig(Section):
    """Attention backends by kind of batch; a bare string stands for `prefill` and `decode`.

    Values are `auto` or names of worker.config.backends.ATTENTION.
    """

    prefill: Auto | str = "auto"
    """Backend of chunks of prompts, on either role; auto: reference on CPU, triton on CUDA."""
    decode: Auto | str = "auto"
    """Backend of decode steps, one token of each row; auto as for prefill."""
    spec: Auto | str = "auto"
    """Backend of verification, windows of several tokens of each row. auto: that of `decode`, but
    triton if that plans on the host, as flashinfer, which is refused here."""

    @model_validator(mode="before")
    @classmethod
    def _one_for_all(cls, given: object) -> object:
        return {"prefill": given, "decode": given} if isinstance(given, str) else given


ChunkGraph = Literal["eager", "piecewise", "compiled"]


class GraphConfig(Section):
    """CUDA graphs by kind of step: `full` replays decode steps, `piecewise` and `compiled` chunks.

    The graphs of `compiled` hold what torch.compile made of the layers; `eager` has no graphs. A
    bare name stands for the kind that knows it, and the other kind is then eager.
    """

    prefill: Auto | ChunkGraph = "auto"
    """Of chunks of prompts, on either role; auto: eager on CPU, piecewise on CUDA."""
    decode: Auto | Literal["eager", "full"] = "auto"
    """Of decode steps; auto: full on CUDA if the worker decodes, else eager."""

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
    """auto: what the worker's machine has."""
    threads: Auto | PositiveInt = "auto"
    """Threads of one operation on CPU; auto: the CPUs that Ray gave the worker."""
    collective: Auto | Literal["gloo", "nccl", "custom"] = "auto"
    """What sums among the ranks of a worker, if it has several. auto: gloo on CPU; on CUDA custom
    (our own kernels over peer memory) within a host, nccl across hosts."""
    experts: Literal["auto", "tensor", "expert"] = "auto"
    """How layers of experts are divided among the ranks of a worker. tensor: a part of each expert;
    expert: some experts whole; auto: tensor, unless parts were uneven or less than 64 wide."""
    num_pages: Auto | PositiveInt = "auto"
    """KV pages; auto: on CUDA what memory_fraction leaves, on CPU up to cpu_pool_bytes."""
    memory_fraction: Auto | Fraction = "auto"
    """Of the GPU's whole memory; auto: 0.85 of what the worker reserves of a GPU."""
    cpu_pool_bytes: int = Field(default=512 << 20, gt=0)
    """Upper limit of the KV pool on CPU."""
    max_num_reqs: Auto | PositiveInt = "auto"
    """Requests of one batch (rows); auto: 64 on CPU; on CUDA as many as the memory beside the
    weights holds with 1024 tokens each, 64 at least and 256 at most."""
    max_waiting: int = Field(default=256, ge=0)
    """Admitted requests beyond those that run."""
    max_prefill_tokens: Auto | PositiveInt = "auto"
    """Most tokens of one prefill step (chunk). auto: 512, of a prefill worker on CUDA 2048. A
    prefill worker that has measured its graphs takes the size of one of its buckets, up to 4096."""
    growth_tokens: int = Field(default=64, ge=1)
    """Output tokens for which a request reserves KV pages at admission."""
    state_slots: Auto | PositiveInt = "auto"
    """Requests whose state is held at a time, where layers are recurrent. auto: max_num_reqs."""
    penalty_rows: Auto | PositiveInt = "auto"
    """Requests with penalties or logit bias at a time. auto: 16; max_num_reqs if the model's
    generation_config.json has a repetition penalty, which routers may be told to ignore."""
    prefix_cache: bool = True
    """Keep the KV of finished requests for prompts that begin alike."""
    attention: AttentionConfig = AttentionConfig()
    graph: GraphConfig = GraphConfig()
    step_log: str = ""
    """Directory on the worker's host for a file of JSON lines, one for each step: where its time
    went. Empty: none."""
    strict: bool = False
    """A graph that differs from eager at the start is an error, not a metric. A drafter's pages and
    inputs are NaN until they are written, so that a read of anything else shows."""


class SpecConfig(Section):
    """Speculation: what proposes tokens, and the windows of decode steps that check them."""

    drafter: Literal["none", "chain", "mtp", "dflash", "ngram"] = "none"
    """What proposes tokens. `chain`: a drafter of one layer (EAGLE, EAGLE-3), a token at a time.
    `mtp`: the same by the model's own layer for multi-token prediction. `dflash`: a drafter of a
    few layers, a block of tokens at once. All workers of a cluster need the same. `ngram`: what
    followed the last tokens where the request's own text had them before; needs no weights."""
    path: str = ""
    """The drafter's checkpoint: a directory, or its name on the hub. Empty: the model's own
    directory, or for the model that comes with kvlane the drafter that does."""
    block: Annotated[int, Field(ge=0, le=MAX_WIDTH)] = 0
    """`dflash` drafts blocks of at least so many tokens, the certain one included, also where fewer
    are verified. 0: as many as are verified."""
    ngram_min: Annotated[int, Field(ge=1, le=MAX_NGRAM)] = 2
    """`ngram` proposes only if so many last tokens are found again."""
    ngram_max: Annotated[int, Field(ge=1, le=MAX_NGRAM)] = 4
    """Places where more last tokens are found again go first, up to so many."""
    head_dtype: Auto | Literal["float8_e4m3fn", "model"] = "auto"
    """In which a drafter with weights reads the head, its own or the model's, for every draft.
    float8_e4m3fn: a copy in eight bits on decode workers, half of the bytes; answers stay the same,
    a few drafts may not. model: the head itself. auto: a copy where the model's matrices are
    quantised and its head has 16 bits, on GPUs of compute capability 9.0 to 11, if it takes at
    most a fiftieth of engine.memory_fraction."""
    overlap: bool = True
    """Whether a step is launched while the one before it runs. False: each is waited for first,
    which is slower and shows in a profile what each step does."""
    widths: Auto | list[Annotated[int, Field(ge=1, le=MAX_WIDTH)]] = "auto"
    """Tokens of a window, one certain and the drafts behind it, among which steps choose by what
    they cost and what is accepted. One number fixes it. Steps can always be narrowed to 1, which is
    plain decode. auto: 1, 2, 4, 8 if there is something to verify, for dflash also 16, as far as
    its blocks go; else 1."""
    simulate_accept_len: Annotated[float, Field(ge=0, le=MAX_WIDTH)] = 0
    """Tokens of a step that count, on average, whatever the model draws: for throughput on random
    weights. The text is junk, and results and metrics are marked as simulated. 0: off."""
    simulate_accept_share: Annotated[float, Field(ge=0, lt=1)] = 0
    """As simulate_accept_len, by the share of drafts that count where all before them did: wider
    windows then keep more. 0: off."""

    @model_validator(mode="after")
    def _sensible(self) -> "SpecConfig":
        if self.path and not self.has_weights:
            raise ValueError(
                f"path names a drafter, but drafter is {self.drafter}: set it to chain or dflash"
            )
        if self.path and self.drafter == "mtp":
            raise ValueError("path names a drafter, but mtp is a layer of the model's own files")
        if self.block and self.drafter != "dflash":
            raise ValueError(f"block is {self.block}, but drafter is {self.drafter}, not dflash")
        if self.head_dtype == "float8_e4m3fn" and not self.has_weights:
            raise ValueError(
                f"head_dtype is {self.head_dtype}, but drafter is {self.drafter}: it has no head"
            )
        if self.ngram_min > self.ngram_max:
            raise ValueError(f"ngram_min is {self.ngram_min}, ngram_max only {self.ngram_max}")
        if self.widths == []:
            raise ValueError("widths must have a number, or be auto")
        if 0 < self.simulate_accept_len < 1:
            raise ValueError("simulate_accept_len must be 0, or at least 1")
        if self.simulate_accept_len and self.simulate_accept_share:
            raise ValueError("simulate_accept_len excludes simulate_accept_share")
        return self

    @property
    def has_weights(self) -> bool:
        """Whether the drafter is a model with a checkpoint."""
        return self.drafter in ("chain", "mtp", "dflash")

    @property
    def reads_text(self) -> bool:
        """Whether drafts come from a request's own text, and so are often missing."""
        return self.drafter == "ngram"

    @property
    def simulated_len(self) -> float:
        """Tokens of a step that are kept on average, of the widest windows; 0: as they are drawn.

        After `WorkerConfig.resolved`.
        """
        share, widest = self.simulate_accept_share, max(self.chosen)
        return (1 - share**widest) / (1 - share) if share else self.simulate_accept_len

    @property
    def chosen(self) -> tuple[int, ...]:
        """The widths that steps choose among, ascending; after `WorkerConfig.resolved`."""
        assert self.widths != "auto"
        return tuple(sorted({int(width) for width in self.widths}))

    @property
    def all_widths(self) -> tuple[int, ...]:
        """Those and 1."""
        return tuple(sorted({1, *self.chosen}))
