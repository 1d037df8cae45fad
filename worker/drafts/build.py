"""From the configuration to a drafter: its checkpoint, its regions, its place beside the target."""

from __future__ import annotations

from worker.attention.base import AttentionBackend, AttentionShape, build_attentions
from worker.cache.layout import KVRegion
from worker.cache.pool import KVPool
from worker.config import WorkerConfig
from worker.drafts.base import Drafter
from worker.drafts.chain import Chain
from worker.drafts.chain_model import ChainDrafter, Kind
from worker.drafts.dflash import DFlash
from worker.drafts.dflash_model import DFlashDrafter
from worker.drafts.dflash_spec import DFlashSpec
from worker.drafts.drafter_spec import READERS, DrafterSpec, check_block
from worker.drafts.ngram import Ngram
from worker.errors import UserError
from worker.model.decoder import Decoder
from worker.model.loader import DrafterModel, fill_drafter
from worker.model.shape import ModelSpec
from worker.model.taps import Taps
from worker.ops.mask import KeyMask
from worker.peers.base import Collective
from worker.plan import max_rows
from worker.step.state import StepState

FROM_KEY_1 = KeyMask(first_key=1)  # a chain drafter has no row for slot 0


def read_drafter(config: WorkerConfig, target: ModelSpec) -> DrafterSpec | None:
    """Read the shape of the drafter that is configured; None: it has no weights.

    Raises:
        UserError: see `read_chain_spec`, `read_dflash_spec` and `check_block`.
    """
    if not config.spec.has_weights:
        return None
    spec = READERS[config.spec.drafter](config.drafter_directory, target)
    check_block(config.spec, spec)
    return spec


def within_block(config: WorkerConfig, spec: DrafterSpec | None) -> WorkerConfig:
    """Cut the widths that `auto` gave to what a block of the drafter holds.

    config: after `WorkerConfig.resolved`.
    """
    if not isinstance(spec, DFlashSpec):
        return config
    widths = [width for width in config.spec.chosen if width <= spec.block_size]
    section = config.spec.model_copy(update={"widths": widths})
    return config.model_copy(update={"spec": section})


def regions(spec: DrafterSpec, page_size: int, dtype: str) -> tuple[KVRegion, ...]:
    """The KV regions of a drafter, see `drafts/chain.py` and `drafts/dflash.py`."""
    heads, size = spec.num_kv_heads, spec.head_dim
    if isinstance(spec, DFlashSpec):
        return (KVRegion("draft", spec.num_layers, heads, size, 1, page_size, dtype),)
    draft = KVRegion("draft", 1, heads, size, 1, page_size, dtype)
    tail = KVRegion("tail", 1, 1, spec.hidden_size, 1, page_size, dtype, parts=1, rows="page")
    return draft, tail


def load_drafter(
    config: WorkerConfig, spec: DrafterSpec, target: Decoder, collective: Collective
) -> DrafterModel:
    """Load the drafter's weights onto the target's device, in its dtype."""
    max_len = int(config.model.max_model_len)
    kind: Kind = {"device": target.placement.device, "dtype": target.placement.dtype}
    model: DrafterModel
    if isinstance(spec, DFlashSpec):
        # The last block may pass the end of the text.
        longest = max_len + spec.block_size
        model = DFlashDrafter(spec, target, collective, max_positions=longest, **kind)
    else:
        model = ChainDrafter(spec, target, collective, max_positions=max_len, **kind)
    fill_drafter(
        model,
        config.drafter_directory,
        load_format=config.model.load_format,
        seed=config.model.seed,
    )
    if isinstance(model, DFlashDrafter):
        model.settle()
    return model


def build_drafter(
    config: WorkerConfig,
    model: DrafterModel | None,
    target: Decoder,
    pool: KVPool,
    state: StepState,
) -> Drafter | None:
    """Put the drafter that is configured beside `target`, whose taps are set.

    model: loaded; None: it has no weights. Of those, prefill workers have nothing to do.

    Raises:
        UserError: the attention backend of windows cannot serve the drafter's heads or masks.
    """
    if model is None:
        if state.text is None:
            return None
        return Ngram(state, config.spec.ngram_min, config.spec.ngram_max)
    taps, strict = _taps(config, model, target), config.engine.strict
    if isinstance(model, ChainDrafter):
        attention = _attention(config, model, pool, FROM_KEY_1)
        return Chain(model, taps, attention, pool, state, poison=strict)
    assert taps is not None
    attentions = {mask: _attention(config, model, pool, mask) for mask, _ in model.runs()}
    return DFlash(
        model, taps, attentions, pool, state,
        min_block=config.spec.block, max_len=int(config.model.max_model_len), poison=strict,
    )  # fmt: skip


def _taps(config: WorkerConfig, model: DrafterModel, target: Decoder) -> Taps | None:
    """None: the drafter is fed with the target's output."""
    spec = model.spec
    if spec.taps == (target.spec.num_layers,):
        return None
    return target.tap(spec.taps, _most_tokens(config))


def _attention(
    config: WorkerConfig, model: DrafterModel, pool: KVPool, mask: KeyMask
) -> AttentionBackend:
    """The backend of windows, over the drafter's region."""
    spec, backend = model.spec, config.engine.attention.spec
    names = {"spec": backend, "prefill": backend, "decode": backend}
    heads = model.heads.num_heads, model.heads.num_kv_heads, spec.head_dim, spec.head_dim**-0.5
    shape = AttentionShape(*heads, mask, "draft")
    try:
        return build_attentions(names, pool, shape).spec
    except UserError as refusal:
        raise type(refusal)(f"spec.drafter: {refusal}", "spec.drafter") from refusal


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
