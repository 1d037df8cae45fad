"""The kinds of layers by name, one row each: what they keep of a text, and what computes them.

A layer's kind is what stands in the place of attention. A window of keys is no kind but a property
of heads: layers with and without one lie in one region of pages, and differ in their masks alone.
Backends over pages stand in `worker.config.backends`, by the same names. Free of torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from worker.cache.layout import KVRegion, StateRegion
from worker.config.checkpoint.delta_shape import DELTA_BLOCK, DeltaShape
from worker.config.checkpoint.shape import LayerShape, ModelShape
from worker.registry import imported
from worker.weights.shard import HeadSplit, split_even, split_heads


class Cut(NamedTuple):
    """What regions follow from beside the model's shape."""

    page_size: int
    num_groups: int
    dtype: str  # of the model
    kv_dtype: str  # of keys and values
    state_dtype: str = "float32"  # of recurrent states


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What the layers of one kind have in common."""

    mixer: str  # name in the checkpoint
    people: str  # name in messages
    # "package.module:Class" of one layer; built as `cls(shape, number, rotary, placement)`.
    module: str
    # What `n` such layers keep: rows of tokens in pages, or a state of each request in a slot.
    region: Callable[[ModelShape, int, Cut], KVRegion | StateRegion]
    # (shape, rank, number of ranks) -> the heads of a rank; Unsupported if they cannot be divided.
    share: Callable[[Any, int, int], Any]
    width: Callable[[Any], int]  # columns of the last product, which ranks divide
    grain: int = 1  # chunks of a prompt that are not its last end at multiples of it
    is_traced: bool = True  # engine.graph.prefill: compiled can trace it

    def build(self, *args: Any) -> Any:
        """One layer's module, of these arguments of its class."""
        return imported(self.module)(*args)


def _heads_region(shape: ModelShape, num_layers: int, cut: Cut) -> KVRegion:
    sizes = num_layers, shape.num_kv_heads, shape.head_dim
    return KVRegion("target", *sizes, cut.num_groups, cut.page_size, cut.kv_dtype)


def _latent_region(shape: ModelShape, num_layers: int, cut: Cut) -> KVRegion:
    assert shape.latent is not None
    sizes = num_layers, 1, shape.latent.width
    return KVRegion("target", *sizes, cut.num_groups, cut.page_size, cut.kv_dtype, parts=1)


def _delta_region(shape: ModelShape, num_layers: int, cut: Cut) -> StateRegion:
    assert shape.delta is not None
    return StateRegion(num_layers, *shape.delta, cut.dtype, cut.state_dtype)


def delta_share(shape: ModelShape, rank: int, size: int) -> DeltaShape:
    """The heads of one rank's gated delta nets; Unsupported if they cannot be divided evenly."""
    assert shape.delta is not None
    held = split_even("linear_num_key_heads", shape.delta.key_heads, rank, size)
    return shape.delta._replace(key_heads=held.stop - held.start)


def heads_share(shape: ModelShape, rank: int, size: int) -> HeadSplit:
    """The heads of one rank; raises as `split_heads`."""
    return split_heads(shape.num_heads, shape.num_kv_heads, rank, size)


# By Layer.kind.
KINDS: Mapping[str, LayerKind] = {
    "heads": LayerKind(
        mixer="self_attn",
        people="attention",
        module="worker.model.attention:SelfAttention",
        region=_heads_region,
        share=heads_share,
        width=lambda shape: shape.num_heads * shape.head_dim,
    ),
    "latent": LayerKind(
        mixer="self_attn",
        people="latent attention",
        module="worker.model.latent:LatentAttention",
        region=_latent_region,
        share=heads_share,
        width=lambda shape: shape.num_heads * shape.latent.value_dim,
        is_traced=False,
    ),
    "delta": LayerKind(
        mixer="linear_attn",
        people="gated delta nets",
        module="worker.model.delta_net:DeltaNet",
        region=_delta_region,
        share=delta_share,
        width=lambda shape: shape.delta.value_width,
        grain=DELTA_BLOCK,
        is_traced=False,
    ),
}


def kinds_of(shape: LayerShape) -> Mapping[str, LayerKind]:
    """The rows of a model's or a drafter's layers, by name."""
    return {layer.kind: KINDS[layer.kind] for layer in shape.layers}


def regions_of(shape: ModelShape, cut: Cut) -> tuple[KVRegion, StateRegion | None]:
    """(pages, slots) of the whole model: of the kind with keys, and of the one with a state."""
    count = [layer.kind for layer in shape.layers].count
    made = [kind.region(shape, count(name), cut) for name, kind in kinds_of(shape).items()]
    (pages,) = (each for each in made if isinstance(each, KVRegion))
    return pages, next((each for each in made if isinstance(each, StateRegion)), None)
