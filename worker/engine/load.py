"""Loads a model onto its device: weights, KV pool, step state and graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from worker.attention.base import build_attentions
from worker.cache.layout import KVLayout
from worker.cache.pool import KVPool
from worker.comm.single import SingleCollective
from worker.config import WorkerConfig
from worker.engine import memory
from worker.engine.runner import step_stream
from worker.graph.base import BucketCheck, LoadedModel
from worker.graph.build import Graphs, build_graphs
from worker.metrics import Progress, untold
from worker.models.config import ModelSpec
from worker.models.decoder import Decoder
from worker.models.loader import load_model
from worker.step.buffers import BatchBuffers
from worker.step.state import StepState

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    config: WorkerConfig,
    spec: ModelSpec,
    layout: KVLayout,
    configured_len: int | str,
    progress: Progress = untold,
) -> tuple[WorkerConfig, LoadedModel, Graphs, Sequence[BucketCheck]]:
    """Load everything that `config` names. Workers that share a GPU load one after the other.

    Args:
        config: after `WorkerConfig.resolved`, which replaces "auto" where the machine decides.
        spec: the model's shape.
        layout: how a KV page is laid out.
        configured_len: model.max_model_len as configured, maybe "auto".
        progress: told how far it is.

    Returns:
        The config without "auto", with the max_num_reqs and the max_model_len that the memory
        holds, the model, its graphs and their checks.

    Raises:
        UserError: see `build_engine`.
    """
    device = torch.device(config.engine.device)
    with memory.turn(device), _on_step_stream(device):
        memory.wait_for_share(config, device)
        with memory.explain_shortage("loading the weights", device):
            model = load_model(
                config.model.directory,
                spec,
                SingleCollective(),
                device=device,
                dtype=DTYPES[config.model.dtype],
                load_format=config.model.load_format,
                seed=config.model.seed,
                progress=progress,
            )
        config = memory.with_max_num_reqs(config, layout, device)
        config = memory.with_penalty_rows(config, all_requests=spec.penalizes)
        with memory.explain_shortage("running the largest steps", device):
            reserve_bytes = memory.peak_bytes(
                lambda: run_largest_steps(config, layout, model), device
            )
        num_pages = memory.num_pages(config, layout, device, reserve_bytes)
        config = memory.fit(config, configured_len, num_pages)
        with memory.explain_shortage("allocating the KV pool and the graphs", device):
            pool = KVPool(layout, num_pages, device)
            with memory.taking(reserve_bytes, device):
                loaded = _assemble(config, pool, model)
                graphs = build_graphs(loaded)
                return config, loaded, graphs, graphs.capture(progress)


@contextmanager
def _on_step_stream(device: torch.device) -> Iterator[None]:
    """On CUDA, run the body on the step stream, then wait for the device.

    Steps can then reuse the memory that the body has freed. On the CPU, just run the body.
    """
    if device.type == "cpu":
        yield
        return
    with torch.cuda.stream(step_stream(device)):
        yield
    torch.cuda.synchronize(device)


def _assemble(config: WorkerConfig, pool: KVPool, model: Decoder) -> LoadedModel:
    """Build everything that a step's device work needs, over `pool`."""
    engine, spec, page_size = config.engine, model.spec, int(config.kv.page_size)
    names, scale = engine.attention.model_dump(), spec.head_dim**-0.5
    attention = build_attentions(
        names, pool, spec.num_heads, spec.num_kv_heads, spec.head_dim, scale
    )
    max_len, decodes = int(config.model.max_model_len), config.role == "decode"
    state = StepState(
        int(engine.max_num_reqs),
        -(-max_len // page_size) + 1,
        spec.eos_token_ids,
        pool.device,
        num_penalty_slots=int(engine.penalty_rows) if decodes else 0,
        vocab_size=spec.vocab_size,
    )
    return LoadedModel(
        model,
        attention,
        pool,
        state,
        BatchBuffers(state, page_size, int(engine.max_prefill_tokens)),
        engine,
        max_len,
        decodes=decodes,
        always_hooked=not decodes and config.kv.num_groups not in ("auto", 1),
    )


def run_largest_steps(config: WorkerConfig, layout: KVLayout, model: Decoder) -> object:
    """Run the largest steps once, to measure their memory; the pool has two pages.

    Returns the captured graphs: the caller counts their memory before it drops them.
    """
    pool = KVPool(layout, 2, torch.device(config.engine.device))
    graphs = build_graphs(_assemble(config, pool, model))
    graphs.run_largest_steps()
    pool.close()
    return graphs
