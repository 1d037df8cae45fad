"""From the configuration to a drafter: its checkpoint, its regions, its place beside the target."""

import logging
from dataclasses import replace

from worker.attention.base import AttentionBackend, AttentionShape
from worker.attention.build import build_attentions
from worker.cache.layout import KVRegion
from worker.cache.pool import KVPool
from worker.config import WorkerConfig
from worker.config.checkpoint.mask import KeyMask
from worker.config.checkpoint.shape import ModelShape
from worker.drafts.base import Drafter
from worker.drafts.chain import Chain, ChainDrafter
from worker.drafts.dflash import DFlash, DFlashDrafter
from worker.drafts.drafter import DrafterModel, Features
from worker.drafts.drafter_config import READERS, check_block
from worker.drafts.drafter_shape import ChainShape, DFlashShape, DrafterShape
from worker.drafts.head_copy import head_copy
from worker.drafts.ngram import Ngram
from worker.errors import Unsupported, UserError
from worker.model.decoder import Decoder
from worker.ops.scaled import multiplies_eight_bits
from worker.plan import max_rows
from worker.step.state import StepState

log = logging.getLogger("kvlane.start")
HEAD_SHARE = 50  # one part in so many of a worker's memory, for the head in eight bits by itself
FROM_KEY_1 = KeyMask(first_key=1)  # a chain drafter has no row for slot 0


def read_drafter(config: WorkerConfig, target: ModelShape) -> DrafterShape | None:
    """The shape of the configured drafter, None without weights; UserError as its reader."""
    if not config.spec.has_weights:
        return None
    shape = READERS[config.spec.drafter](config.model.drafter_directory(config.spec), target)
    check_block(config.spec, shape)
    return shape


def within_block(config: WorkerConfig, shape: DrafterShape | None) -> WorkerConfig:
    """Drop the widths that `auto` gave a resolved `config` and that exceed the drafter's block."""
    if not isinstance(shape, DFlashShape):
        return config
    widths = [width for width in config.spec.chosen if width <= shape.block_size]
    section = config.spec.model_copy(update={"widths": widths})
    return config.model_copy(update={"spec": section})


def regions(shape: DrafterShape, page_size: int, dtype: str) -> tuple[KVRegion, ...]:
    """The KV regions of a drafter, as `drafts/chain.py` and `drafts/dflash.py` describe them."""
    heads, size = shape.num_kv_heads, shape.head_dim
    if isinstance(shape, DFlashShape):
        return (KVRegion("draft", shape.num_layers, heads, size, 1, page_size, dtype),)
    parts = 2
    if shape.latent is not None:
        size, parts = shape.latent.width, 1
    draft = KVRegion("draft", 1, heads, size, 1, page_size, dtype, parts)
    tail = KVRegion("tail", 1, 1, shape.hidden_size, 1, page_size, dtype, parts=1, rows="page")
    return draft, tail


def load_drafter(config: WorkerConfig, shape: DrafterShape, target: Decoder) -> DrafterModel:
    """Load the drafter's weights onto the target's device, in its dtype."""
    max_len = int(config.model.max_model_len)
    model: DrafterModel
    if isinstance(shape, DFlashShape):
        model = DFlashDrafter(shape, target, max_len)
    else:
        assert isinstance(shape, ChainShape)
        model = ChainDrafter(shape, target, max_len)
    model.fill(config.model.drafter_directory(config.spec), noise=config.model.noise)
    return model


def add_head_copy(config: WorkerConfig, model: DrafterModel, share_bytes: int) -> None:
    """Give a filled drafter what spec.head_dtype asks for, on a decode worker, if it has it not.

    share_bytes: of the device, that the worker has to itself, and no pool takes yet. Raises
    Unsupported if the GPU multiplies no eight bits.
    """
    asked, head, device = config.spec.head_dtype, model.head.weight, model.placement.device
    drafts = config.role == "decode" and max(config.spec.all_widths) > 1
    if not drafts or asked == "model" or model.head_copy is not None:
        return
    multiplies = multiplies_eight_bits(device)
    if asked == "auto":
        is_large = head.numel() > share_bytes // HEAD_SHARE
        if not (multiplies and model.target_is_quantised) or is_large or head.itemsize != 2:
            return
    elif device.type == "cuda" and not multiplies:
        raise Unsupported(
            f"spec.head_dtype: {asked} needs a GPU of compute capability 9 to 11; set it to model",
            "spec.head_dtype",
        )
    model.head_copy = made = head_copy(model.head, model.placement)
    log.info(
        "drafts read a copy of the head in eight bits: %.3g GB here beside %.3g GB in %s",
        sum(part.nbytes for part in made.parameters()) / 1e9, head.nbytes / 1e9, head.dtype,
    )  # fmt: skip


def build_drafter(
    config: WorkerConfig,
    model: DrafterModel | None,
    target: Decoder,
    pool: KVPool,
    state: StepState,
) -> Drafter | None:
    """Put the drafter that is configured beside `target`, whose taps are set.

    model: None: n-gram lookup (on a decode worker; else None is returned), or no drafter. Raises
    UserError if the attention backend of windows cannot serve the drafter's heads or masks.
    """
    if model is None:
        if state.text is None:
            return None
        return Ngram(state, config.spec.ngram_min, config.spec.ngram_max)
    taps = None  # the drafter is fed with the target's output
    if model.shape.taps != (target.shape.num_layers,):
        taps = target.tap(model.shape.taps, _most_tokens(config))
    strict = config.engine.strict
    if isinstance(model, ChainDrafter):
        attended = replace(model.attention.attended(), mask=FROM_KEY_1, region="draft")
        attention = _attention(config, attended, pool)
        return Chain(Features(model, taps, poison=strict), attention, pool, state)
    assert isinstance(model, DFlashDrafter)
    heads, size = model.heads, model.shape.head_dim
    sizes = heads.num_heads, heads.num_kv_heads, size, size**-0.5
    attentions = {
        mask: _attention(config, AttentionShape(*sizes, mask, "draft"), pool)
        for mask, _ in model.runs
    }
    features = Features(model, taps, poison=strict)
    return DFlash(features, attentions, pool, state, config.spec.block)


def _attention(config: WorkerConfig, shape: AttentionShape, pool: KVPool) -> AttentionBackend:
    backend = config.engine.attention.spec
    names = {"spec": backend, "prefill": backend, "decode": backend}
    try:
        return build_attentions(names, pool, shape).spec
    except UserError as refusal:
        raise type(refusal)(f"spec.drafter: {refusal}", "spec.drafter") from refusal


def poison(pool: KVPool) -> None:
    """Fill a drafter's regions and all slots with NaN: what nobody has written is noticed then."""
    for states in pool.states:
        for each in states:
            each.fill_(float("nan"))
    for region in pool.layout.regions[1:]:
        for cache in pool.caches(region.name):
            cache.fill_(float("nan"))


def _most_tokens(config: WorkerConfig) -> int:
    most, chunk = int(config.engine.max_num_reqs), int(config.engine.max_prefill_tokens)
    if config.role == "prefill":
        return chunk
    return max(chunk, *(w * max_rows(w, most) for w in config.spec.all_widths))
