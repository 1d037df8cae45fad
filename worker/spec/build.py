"""From the configuration to a drafter: its checkpoint, its regions, its place beside the target."""

from __future__ import annotations

from worker.attention.base import build_attentions
from worker.cache.layout import KVRegion
from worker.cache.pool import KVPool
from worker.comm.base import Collective
from worker.config import WorkerConfig
from worker.errors import UserError
from worker.kernels.attention.mask import KeyMask
from worker.models.chain import ChainDrafter
from worker.models.chain_config import read_chain_spec
from worker.models.chain_spec import ChainSpec
from worker.models.config import ModelSpec
from worker.models.decoder import Decoder
from worker.models.loader import load_chain
from worker.models.taps import Taps
from worker.plan import max_rows
from worker.spec.base import Drafter
from worker.spec.chain import Chain
from worker.spec.ngram import Ngram
from worker.step.state import StepState

FROM_KEY_1 = KeyMask(first_key=1)  # a chain drafter has no row for slot 0


def read_drafter(config: WorkerConfig, target: ModelSpec) -> ChainSpec | None:
    """Read the shape of the drafter that is configured; None: it has no weights.

    Raises:
        UserError: see `read_chain_spec`.
    """
    if config.spec.drafter != "chain":
        return None
    return read_chain_spec(config.drafter_directory, target)


def regions(spec: ChainSpec, page_size: int, dtype: str) -> tuple[KVRegion, KVRegion]:
    """The KV regions of a chain drafter, see `spec/chain.py`."""
    draft = KVRegion("draft", 1, spec.num_kv_heads, spec.head_dim, 1, page_size, dtype)
    tail = KVRegion("tail", 1, 1, spec.hidden_size, 1, page_size, dtype, parts=1, rows="page")
    return draft, tail


def load_drafter(
    config: WorkerConfig, spec: ChainSpec, target: Decoder, collective: Collective
) -> ChainDrafter:
    """Load the drafter's weights onto the target's device, in its dtype."""
    weight = target.embedding.weight
    return load_chain(
        config.drafter_directory,
        spec,
        target,
        collective,
        max_positions=int(config.model.max_model_len),
        device=weight.device,
        dtype=weight.dtype,
        load_format=config.model.load_format,
        seed=config.model.seed,
    )


def build_drafter(
    config: WorkerConfig,
    model: ChainDrafter | None,
    target: Decoder,
    pool: KVPool,
    state: StepState,
) -> Drafter | None:
    """Put the drafter that is configured beside `target`, whose taps are set.

    model: loaded; None: it has no weights. Of those, prefill workers have nothing to do.

    Raises:
        UserError: the attention backend of windows cannot serve the drafter's heads.
    """
    if model is None:
        if state.text is None:
            return None
        return Ngram(state, config.spec.ngram_min, config.spec.ngram_max)
    engine, spec = config.engine, model.spec
    taps = None
    if spec.taps != (target.spec.num_layers,):  # else it is fed with the target's output
        taps = Taps(
            spec.taps,
            _most_tokens(config),
            target.spec.hidden_size,
            dtype=target.embedding.weight.dtype,
            device=pool.device,
        )
    target.taps = taps
    backend = engine.attention.spec
    names = {"spec": backend, "prefill": backend, "decode": backend}
    heads = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.head_dim**-0.5
    try:
        attention = build_attentions(names, pool, *heads, mask=FROM_KEY_1, region="draft").spec
    except UserError as refusal:
        raise type(refusal)(f"spec.drafter: {refusal}", "spec.drafter") from refusal
    return Chain(model, taps, attention, pool, state, poison=engine.strict)


def poison(pool: KVPool) -> None:
    """Fill a drafter's regions with NaN, so that what nobody has written is noticed."""
    for region in pool.layout.regions[1:]:
        for cache in pool.caches(region.name):
            cache.fill_(float("nan"))


def _most_tokens(config: WorkerConfig) -> int:
    """Tokens of a step at most, padding included."""
    engine = config.engine
    most, chunk = int(engine.max_num_reqs), int(engine.max_prefill_tokens)
    if config.role == "prefill":
        return chunk
    return max(chunk, *(w * max_rows(w, most) for w in config.spec.all_widths))
