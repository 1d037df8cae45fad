"""Loads a model onto its device: weights, KV pool, step state and graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec
import torch

from worker.attention.base import build_attentions
from worker.cache.layout import KVLayout
from worker.cache.pool import KVPool
from worker.config import WorkerConfig
from worker.drafts.build import build_drafter, load_drafter, poison
from worker.drafts.drafter import DrafterModel
from worker.drafts.drafter_shape import ChainShape, DrafterShape
from worker.draw.simulated import SimulatedAcceptance
from worker.errors import Unsupported
from worker.model.decoder import Decoder
from worker.model.loader import load_model
from worker.model.shape import ModelSpec
from worker.observe.metrics import Progress, untold
from worker.peers.base import COLLECTIVES, Collective
from worker.peers.rank_group import RankGroup
from worker.peers.rendezvous import free_rendezvous
from worker.registry import resolve
from worker.run.base import BucketCheck, LoadedModel
from worker.run.build import Graphs, build_graphs
from worker.run.stream_cuda import on_step_stream
from worker.start import memory
from worker.start.digest import (
    PartSum,
    combined,
    dummy_digest,
    model_digest,
    part_sums,
    weights_digest,
)
from worker.step.buffers import BatchBuffers
from worker.step.state import StepState, Windows

log = logging.getLogger("kvlane.start")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    config: WorkerConfig,
    spec: ModelSpec,
    drafter_spec: DrafterShape | None,
    layout: KVLayout,
    configured_len: int | str,
    rank_group: RankGroup,
    progress: Progress = untold,
) -> tuple[WorkerConfig, LoadedModel, Graphs, Sequence[BucketCheck], str]:
    """Load everything that `config` names. Workers that share a GPU load one after the other.

    Args:
        config: after `WorkerConfig.resolved`, which replaces "auto" where the machine decides.
        spec: the model's shape.
        drafter_spec: its drafter's; None: it has none.
        layout: how a KV page is laid out.
        configured_len: model.max_model_len as configured, maybe "auto".
        rank_group: of the worker's ranks, which all load at once.
        progress: told how far it is.

    Returns:
        The config without "auto" (max_num_reqs and max_model_len are what the memory holds); the
        model; its graphs; their checks; the digest of what makes its KV.

    Raises:
        UserError: see `build_engine`.
    """
    device = torch.device(config.engine.device)
    took = _Took()
    with memory.turn(device), on_step_stream(device):
        memory.wait_for_share(config, device)
        took.ended("waiting for the device")
        with memory.explain_shortage("loading the weights", device):
            model, drafter = _load_models(config, spec, drafter_spec, rank_group, device, progress)
            digest = _digest(config, model, drafter, rank_group)
        took.ended("weights")
        config = memory.with_max_num_reqs(config, layout, device, rank_group.minimum)
        config = memory.with_penalty_rows(config, all_requests=spec.penalizes)
        with memory.explain_shortage("running the largest steps", device):
            reserve_bytes = memory.peak_bytes(
                lambda: run_largest_steps(config, layout, model, drafter), device
            )
            model.taps = None  # those of that run
        took.ended("largest steps")
        num_pages = rank_group.minimum(memory.num_pages(config, layout, device, reserve_bytes))
        config = memory.fit(config, configured_len, num_pages)
        with memory.explain_shortage("allocating the KV pool and the graphs", device):
            pool = KVPool(layout, num_pages, device)
            log.info("KV pool: %d pages, %s", num_pages, layout.describe())
            took.ended("pool")
            with memory.taking(reserve_bytes, device):
                loaded = _assemble(config, pool, model, drafter)
                graphs = build_graphs(loaded)
                checks = graphs.capture(progress)
                if config.engine.strict:
                    poison(pool)
                took.ended("graphs and their checks")
                model.collective.check()
                log.info("%s worker loaded in %s", config.role, took)
                return config, loaded, graphs, checks, digest


class _Took:
    """Seconds of each part of a start."""

    def __init__(self) -> None:
        self._began_at = self._last_at = time.monotonic()
        self._parts: list[str] = []

    def ended(self, part: str) -> None:
        """End `part`, which began where the last one ended. Work in flight counts for the next."""
        now = time.monotonic()
        self._parts.append(f"{part} {now - self._last_at:.1f}")
        self._last_at = now

    def __str__(self) -> str:
        return f"{self._last_at - self._began_at:.1f} s: {', '.join(self._parts)}"


def _collective(config: WorkerConfig, device: torch.device, rank_group: RankGroup) -> Collective:
    """What `engine.collective` names, over the ranks of `rank_group`; "single" for one rank."""
    if rank_group.size == 1:
        return resolve("collective", "single", COLLECTIVES)(device=device)
    # Rank 0 picks the port: only it is sure to run on that host.
    address = free_rendezvous(rank_group.host) if rank_group.rank == 0 else ""
    address = rank_group.broadcast(address.encode()).decode()
    cls = resolve("collective", config.engine.collective, COLLECTIVES)
    collective = cls(rank_group.rank, rank_group.size, device, address)
    collective.calibrate()
    return collective


def _load_models(
    config: WorkerConfig,
    spec: ModelSpec,
    drafter_spec: DrafterShape | None,
    rank_group: RankGroup,
    device: torch.device,
    progress: Progress,
) -> tuple[Decoder, DrafterModel | None]:
    collective = _collective(config, device, rank_group)
    model = load_model(
        config.model.directory,
        spec,
        collective,
        device=device,
        dtype=DTYPES[config.model.dtype],
        load_format=config.model.load_format,
        seed=config.model.seed,
        progress=progress,
    )
    if drafter_spec is None:
        return model, None
    return model, load_drafter(config, drafter_spec, model)


def _digest(
    config: WorkerConfig, model: Decoder, drafter: DrafterModel | None, rank_group: RankGroup
) -> str:
    """Digest all that a page's bytes depend on; equal for any number of ranks."""

    def weights(part: Decoder | DrafterModel) -> str:
        if config.model.load_format == "dummy":
            dtype, device = DTYPES[config.model.dtype], torch.device(config.engine.device)
            return dummy_digest(config.model.seed, dtype, device)
        told = rank_group.gather(msgspec.msgpack.encode(part_sums(part.shards())))
        return weights_digest(
            each for ranks in told for each in msgspec.msgpack.decode(ranks, type=list[PartSum])
        )

    digests = {"target": model_digest(model.spec, weights(model))}
    if drafter is not None:
        digests["draft"] = model_digest(drafter.spec, weights(drafter))
    return combined(digests)


def _assemble(
    config: WorkerConfig, pool: KVPool, model: Decoder, drafter: DrafterModel | None
) -> LoadedModel:
    """Build everything that a step's device work needs, over `pool`."""
    engine, spec, page_size = config.engine, model.spec, int(config.kv.page_size)
    max_len, decodes = int(config.model.max_model_len), config.role == "decode"
    widths = config.spec.all_widths if decodes else (1,)
    max_width = max(widths)
    # A window or a drafter's block may run past max_len.
    longest = max(max_width, config.spec.block) if decodes else 1
    names, scale = engine.attention.model_dump(), spec.head_dim**-0.5
    if max_width == 1:
        del names["spec"]
    attention = build_attentions(
        names, pool, model.heads.num_heads, model.heads.num_kv_heads, spec.head_dim, scale
    )
    if max_width > 1 and not attention.decode.static_plan:
        raise Unsupported(
            f"engine.attention.decode: {names['decode']} plans on the host, which does not know "
            "KV lengths after a step that verifies drafts; set it to triton, or spec.widths to [1]",
            "engine.attention.decode",
        )
    state = StepState(
        int(engine.max_num_reqs),
        -(-(max_len + longest - 1) // page_size) + 1,
        spec.eos_token_ids,
        pool.device,
        num_penalty_slots=int(engine.penalty_rows) if decodes else 0,
        vocab_size=spec.vocab_size,
        max_width=max_width,
        max_text=max_len + 1 if decodes and config.spec.reads_text else 0,
    )
    if decodes and (kept := config.spec.simulate_accept_share or config.spec.simulate_accept_len):
        state.accept = SimulatedAcceptance(state.ints.seed, kept)
    buffers = BatchBuffers(
        state,
        page_size,
        int(engine.max_prefill_tokens),
        drafts=drafter is not None and isinstance(drafter.spec, ChainShape),
        # Long steps end the last layer for last tokens alone; a drafter that taps it needs all.
        all_hidden=drafter is not None and max(drafter.spec.taps) >= spec.num_layers - 1,
    )
    return LoadedModel(
        model,
        attention,
        pool,
        state,
        buffers,
        Windows(state, page_size),
        engine,
        max_len,
        widths,
        decodes=decodes,
        always_hooked=not decodes and config.kv.num_groups not in ("auto", 1),
        drafter=build_drafter(config, drafter, model, pool, state),
    )


def run_largest_steps(
    config: WorkerConfig, layout: KVLayout, model: Decoder, drafter: DrafterModel | None = None
) -> object:
    """Run the largest steps once, to measure their memory; the pool has two pages.

    Returns the captured graphs: the caller counts their memory before it drops them.
    """
    pool = KVPool(layout, 2, torch.device(config.engine.device))
    graphs = build_graphs(_assemble(config, pool, model, drafter))
    graphs.run_largest_steps()
    pool.close()
    return graphs
