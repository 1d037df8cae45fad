"""Loads a model onto its device: weights, KV pool, step state and graphs."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from worker.cache.layout import KVLayout, ModelLayout
from worker.cache.pool import KVPool
from worker.config import WorkerConfig
from worker.config.checkpoint.shape import ModelShape
from worker.config.progress import Progress
from worker.drafts.build import add_head_copy, build_drafter, load_drafter, poison
from worker.drafts.drafter import DrafterModel
from worker.drafts.drafter_shape import ChainShape, DrafterShape
from worker.draw.simulated import SimulatedAcceptance
from worker.errors import Unsupported
from worker.model.decoder import Decoder
from worker.model.load import load_model
from worker.model.placement import Placement
from worker.peers.base import COLLECTIVES, Collective
from worker.peers.rank_group import RankGroup
from worker.peers.rendezvous import free_rendezvous
from worker.registry import resolve
from worker.run.base import BucketCheck, LoadedModel, Weights
from worker.run.build import Graphs, build_graphs
from worker.run.stream import on_step_stream
from worker.start.digest import dummy_digest, models_digest
from worker.start.engine import Kept
from worker.start.memory import (
    explain_shortage,
    fit,
    memory_of,
    num_pages,
    num_slots,
    num_snapshots,
    with_max_num_reqs,
    with_penalty_rows,
)
from worker.step.buffers import BatchBuffers, BatchShape
from worker.step.chunk_rows import NOT_STORED
from worker.step.state import StateShape, StepState, Windows
from worker.weights.base import Format
from worker.weights.formats import format_of
from worker.weights.loader import Loadable
from worker.weights.plain import PLAIN

log = logging.getLogger("kvlane.start")


@dataclass(frozen=True, slots=True)
class Start:
    """A worker before its weights are loaded."""

    config: WorkerConfig  # resolved; "auto" is left where memory or weights decide
    configured_len: int | str  # model.max_model_len as configured, maybe "auto"
    shape: ModelShape
    drafter_shape: DrafterShape | None  # None: no drafter has weights
    model_layout: ModelLayout  # of all ranks together
    rank_group: RankGroup
    progress: Progress  # called as the start proceeds

    @property
    def layout(self) -> KVLayout:
        """Of this rank's pages."""
        return self.model_layout.share(self.rank_group.size, self.rank_group.rank)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker's loaded parts."""

    config: WorkerConfig  # without "auto": max_num_reqs and max_model_len are what memory holds
    graphs: Graphs
    checks: Sequence[BucketCheck]
    weights: Weights


def load(start: Start, kept: Kept | None = None) -> Loaded:
    """Load everything that the configuration names, on all ranks at once; see `build_engine`.

    Workers that share a GPU load one after the other. Kept parts are neither read nor allocated.
    """
    config, layout, rank_group = start.config, start.layout, start.rank_group
    device, memory = torch.device(config.engine.device), memory_of(config.engine)
    began_at = time.monotonic()
    ended_at = {"": began_at}  # by part; work in flight counts for the next
    with memory.exclusive(), on_step_stream(device):
        memory.wait_for_share()
        ended_at["waiting for the device"] = time.monotonic()
        with explain_shortage("loading the weights"):
            weights = _load_weights(start) if kept is None else kept.weights
            if weights.drafter is not None:
                # Beside a kept pool there is room for what is asked for alone.
                share_bytes = memory.share_bytes if kept is None else 0
                add_head_copy(config, weights.drafter, share_bytes)
        models = weights.model, weights.drafter
        ended_at["weights"] = time.monotonic()
        config = with_max_num_reqs(config, layout, memory, rank_group.minimum)
        config = with_penalty_rows(config, all_requests=start.shape.penalizes)
        with explain_shortage("running the largest steps"):
            reserve_bytes = memory.peak_bytes(lambda: run_largest_steps(config, layout, *models))
            weights.model.tap((), 0)  # drop that run's taps
        ended_at["largest steps"] = time.monotonic()
        slots = num_slots(config, layout)
        pages, _ = num_pages(config, layout, memory, reserve_bytes, slots)
        snapshots = num_snapshots(config, layout, slots, rank_group.minimum(pages))
        pages, why = num_pages(config, layout, memory, reserve_bytes, slots + snapshots)
        pages = rank_group.minimum(pages)
        config = fit(config, start.configured_len, pages)
        with explain_shortage("allocating the KV pool and the graphs"):
            pool = KVPool(layout, pages, device, (slots, snapshots)) if kept is None else kept.pool
            log.info("KV pool: %s; %s; %s", holds(config, pool), layout.describe(), why)
            ended_at["pool"] = time.monotonic()
            with memory.taking(reserve_bytes):
                graphs = build_graphs(_assemble(config, pool, *models))
                checks = graphs.capture(start.progress)
                if config.engine.strict:
                    poison(pool)
                ended_at["graphs and their checks"] = ended = time.monotonic()
                weights.model.collective.check()
    parts = pairwise(ended_at.items())
    took = ", ".join(f"{part} {end - begin:.1f}" for (_, begin), (part, end) in parts)
    log.info("%s worker loaded in %.1f s: %s", config.role, ended - began_at, took)
    return Loaded(config, graphs, checks, weights)


def _collective(start: Start) -> Collective:
    """A new collective of the group's ranks; "single" for one rank."""
    engine, group = start.config.engine, start.rank_group
    device = torch.device(engine.device)
    if group.size == 1:
        return resolve("collective", "single", COLLECTIVES)(device=device)
    # Rank 0 picks the port: only it is sure to run on that host.
    address = free_rendezvous(group.host) if group.rank == 0 else ""
    address = group.broadcast(address.encode()).decode()
    cls = resolve("collective", engine.collective, COLLECTIVES)
    collective = cls(group.rank, group.size, device, address)
    collective.calibrate()
    return collective


def _load_weights(start: Start) -> Weights:
    """The models of a worker, and the digest of both."""
    config, device = start.config, torch.device(start.config.engine.device)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    seed = config.model.noise
    kept = format_of(start.shape.quantization)
    if not kept.multiplies(device):
        log.info("%s multiplies no %s: weights become %s", device, kept.name, config.model.dtype)
        kept = PLAIN
    model = load_model(
        config.model.directory,
        start.shape,
        Placement(_collective(start), dtype, device, config.engine.experts, kept),
        noise=seed,
        progress=start.progress,
    )
    if kept is not PLAIN:
        log.info("%s: %s", config.model.directory, saved_by(kept, model, dtype))
    drafter, models = None, dict[str, Loadable](target=model)
    if start.drafter_shape is not None:
        drafter = models["draft"] = load_drafter(config, start.drafter_shape, model)
    noise = "" if seed is None else dummy_digest(seed, dtype, device, kept.noise)
    return Weights(model, drafter, models_digest(models, start.rank_group, noise))


def saved_by(kept: Format, model: Decoder, dtype: torch.dtype) -> str:
    """What a format's matrices take on this rank's device, and would take in the model's dtype."""
    matrices = [x for x in model.modules() if isinstance(x, kept.matrix)]
    held = sum(part.nbytes for matrix in matrices for part in matrix.parameters())
    numbers = sum(matrix.parts.num_numbers for matrix in matrices) * dtype.itemsize
    text = f"{len(matrices)} matrices in {kept.name} take {held / 1e9:.3g} GB here"
    return f"{text}, {numbers / 1e9:.3g} GB in {dtype}"


def _assemble(
    config: WorkerConfig, pool: KVPool, model: Decoder, drafter: DrafterModel | None
) -> LoadedModel:
    """Build everything that a step's device work needs, over `pool`."""
    engine, shape, page_size = config.engine, model.shape, int(config.kv.page_size)
    max_len, decodes = int(config.model.max_model_len), config.role == "decode"
    widths = config.spec.all_widths if decodes else (1,)
    max_width = max(widths)
    # A window or a drafter's block may run past max_len.
    longest = max(max_width, config.spec.block) if decodes else 1
    names = engine.attention.model_dump()
    if max_width == 1:
        del names["spec"]
    attention = model.attentions(names, pool, config.model.dtype)
    if max_width > 1 and not attention.decode.static_plan:
        raise Unsupported(
            f"engine.attention.decode: {names['decode']} plans on the host, which does not know "
            "KV lengths after a step that verifies drafts; set it to triton, or spec.widths to [1]",
            "engine.attention.decode",
        )
    rows = StateShape(
        int(engine.max_num_reqs),
        -(-(max_len + longest - 1) // page_size) + 1,
        shape.eos_token_ids,
        num_penalty_slots=int(engine.penalty_rows) if decodes else 0,
        vocab_size=shape.vocab_size,
        max_width=max_width,
        max_text=max_len + 1 if decodes and config.spec.reads_text else 0,
    )
    state = StepState(rows, pool.device)
    if decodes and (kept := config.spec.simulate_accept_share or config.spec.simulate_accept_len):
        state.accept = SimulatedAcceptance(state.ints.seed, kept)
    batches = BatchShape(
        page_size,
        int(engine.max_prefill_tokens),
        drafts=drafter is not None and isinstance(drafter.shape, ChainShape),
        # Long steps end the last layer for last tokens alone; a drafter that taps it needs all.
        all_hidden=drafter is not None and max(drafter.shape.taps) >= shape.num_layers - 1,
        recurrent=model.is_recurrent,
    )
    buffers = BatchBuffers(state, batches)
    # Tokens with a state may be computed without storing their KV; see chunk_rows.NOT_STORED.
    model.pad_below(NOT_STORED if model.is_recurrent else page_size)
    model.keep(pool, int(engine.max_num_reqs), max_width)
    return LoadedModel(
        model,
        attention,
        pool,
        state,
        buffers,
        Windows(state, page_size, recurrent=model.is_recurrent),
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
    pool = KVPool(layout, 2, torch.device(config.engine.device), (1, 0))
    graphs = build_graphs(_assemble(config, pool, model, drafter))
    graphs.run_largest_steps()
    pool.close()
    return graphs


def holds(config: WorkerConfig, pool: KVPool) -> str:
    """The tokens and requests that a pool holds, in words; page 0 and slot 0 are nobody's."""
    longest = int(config.model.max_model_len)
    tokens = (pool.num_pages - 1) * int(config.kv.page_size)
    size = f"{tokens:,} tokens, {tokens // longest:,} requests of {longest:,}"
    states = f", {pool.num_slots - 1:,} states, {pool.num_snapshots:,} snapshots"
    return size + states * (pool.num_slots > 0)
