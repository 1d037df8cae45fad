"""A model brought onto its device: weights, KV pool, step state and graphs."""

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
from worker.graph.base import BucketCheck, Capabilities, LoadedModel
from worker.graph.build import Graphs, build_graphs
from worker.models.config import ModelSpec
from worker.models.decoder import Decoder
from worker.models.loader import load_model
from worker.step.buffers import BatchBuffers
from worker.step.state import StepState

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Loaded = tuple[WorkerConfig, LoadedModel, Graphs, Sequence[BucketCheck]]


def load(
    config: WorkerConfig,
    spec: ModelSpec,
    layout: KVLayout,
    capabilities: Capabilities,
    asked_len: int | str,
) -> Loaded:
    """Load everything, one worker of a device at a time.

    Args:
        config: resolved.
        spec: of the model.
        layout: of a KV page.
        capabilities: what the worker's loop will launch.
        asked_len: model.max_model_len before `config` was resolved.

    Returns:
        The config with a max_model_len that the pool holds, the model, its graphs and their checks.

    Raises:
        UserError: see `build_engine`.
    """
    device = torch.device(config.engine.device)
    with memory.turn(device), _on_step_stream(device):
        return _load(config, spec, layout, capabilities, asked_len)


@contextmanager
def _on_step_stream(device: torch.device) -> Iterator[None]:
    """On CUDA, what is made within lies in the memory of the stream of steps, ready afterwards."""
    if device.type == "cpu":
        yield
        return
    with torch.cuda.stream(step_stream(device)):
        yield
    torch.cuda.synchronize(device)


def _load(
    config: WorkerConfig,
    spec: ModelSpec,
    layout: KVLayout,
    capabilities: Capabilities,
    asked_len: int | str,
) -> Loaded:
    device = torch.device(config.engine.device)
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
        )
    with memory.explain_shortage("trying the largest steps", device):
        reserve_bytes = memory.peak_bytes(
            lambda: try_largest_steps(config, spec, layout, capabilities, model), device
        )
    num_pages = memory.num_pages(config, layout, device, reserve_bytes)
    config = memory.fit(config, asked_len, num_pages)
    with memory.explain_shortage("allocating the KV pool and the graphs", device):
        pool = KVPool(layout, num_pages, device)
        with memory.taking(reserve_bytes, device):
            loaded = _loaded(config, spec, capabilities, pool, model)
            graphs = build_graphs(loaded)
            checks = graphs.capture()
    return config, loaded, graphs, checks


def _loaded(
    config: WorkerConfig,
    spec: ModelSpec,
    capabilities: Capabilities,
    pool: KVPool,
    model: Decoder,
) -> LoadedModel:
    """Everything that a step's device work needs, over `pool`."""
    engine, page_size = config.engine, int(config.kv.page_size)
    names, scale = engine.attention.model_dump(), spec.head_dim**-0.5
    attention = build_attentions(
        names, pool, spec.num_heads, spec.num_kv_heads, spec.head_dim, scale
    )
    max_len = int(config.model.max_model_len)
    state = StepState(
        engine.max_num_reqs,
        -(-max_len // page_size) + 1,
        spec.eos_token_ids,
        pool.device,
        num_penalty_slots=engine.penalty_rows if capabilities.decodes else 0,
        vocab_size=spec.vocab_size,
    )
    buffers = BatchBuffers(state, page_size, int(engine.max_prefill_tokens))
    return LoadedModel(model, attention, pool, state, buffers, engine, max_len, capabilities)


def try_largest_steps(
    config: WorkerConfig,
    spec: ModelSpec,
    layout: KVLayout,
    capabilities: Capabilities,
    model: Decoder,
) -> object:
    """Run the largest steps once, over a pool of two pages; returns what they keep."""
    pool = KVPool(layout, 2, torch.device(config.engine.device))
    graphs = build_graphs(_loaded(config, spec, capabilities, pool, model))
    graphs.trial()
    pool.close()
    return graphs
