"""Checks of workers before one starts: names and directories. Free of torch."""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from worker.config import EngineConfig, ModelConfig, SpecConfig, TransportConfig, check_length
from worker.config.backends import BACKENDS
from worker.config.checkpoint.experts import Division, rank_experts
from worker.config.checkpoint.quantization import FORMATS
from worker.config.checkpoint.refusals import check_path
from worker.config.checkpoint.shape import LayerShape, ModelShape, read_model_shape
from worker.drafts.drafter_config import READERS, check_block
from worker.errors import UserError
from worker.model.kinds import Cut, kinds_of, regions_of
from worker.transfer.base import KINDS
from worker.weights.files import check_weights, count_weights, stored_bytes
from worker.weights.shard import Part, coarse, split_even

Names = dict[str, tuple[str, Collection[str]]]  # path of a field -> its value, possible values
# Path of a field -> ranks among which models are divided, and how their experts are.
Ranks = Mapping[str, tuple[int, Division]]


def names_of(transport: TransportConfig, engines: Mapping[str, EngineConfig]) -> Names:
    """The fields whose values are names in tables. engines: by the path of their section."""
    named: Names = {}
    if transport.name != "auto":
        named["transport.name"] = transport.name, KINDS
    if transport.kind != "auto" and transport.name in KINDS:
        named["transport.kind"] = transport.kind, KINDS[transport.name]
    for path, engine in engines.items():
        for kind, name in engine.attention.model_dump().items():
            named[f"{path}.attention.{kind}"] = name, {*chain(*BACKENDS.values()), "auto"}
    return named


def model_limits(directory: Path) -> tuple[int, str]:
    """Positions of a model, and its stored dtype; raises as read_model_shape."""
    shape = read_model_shape(directory)
    return shape.max_position_embeddings, shape.dtype


def kv_token_bytes(directory: Path, page_size: int, *dtypes: str) -> list[int]:
    """Bytes that a token of the model's KV takes, by dtype; raises as read_model_shape."""
    shape = read_model_shape(directory)
    regions = [regions_of(shape, Cut(page_size, 1, shape.dtype, dtype)) for dtype in dtypes]
    return [pages.page_bytes // page_size for pages, _ in regions]


EIGHT_BITS = "float8_e4m3fn"  # of kv.dtype
WITH_EIGHT_BITS = 8, 9  # compute capability of the first GPUs that have it
ON_GPUS = "on GPUs from compute capability {}.{} on".format(*WITH_EIGHT_BITS)


class Sizes(NamedTuple):
    """Bytes of a model as it is served, and with all in eight bits that may be."""

    weights: int  # in 16 bits, or in the four that its files have
    kv_token: int
    fp8_weights: int  # as weights where these are in four bits
    fp8_kv_token: int  # as kv_token where KV may not
    form: str = "16 bits"  # of most weights

    @property
    def told(self) -> str:
        """What weights take, for people."""
        text = f"weights {self.weights / 1e9:.3g} GB in {self.form}"
        if self.fp8_weights == self.weights:
            return text
        return f"{text}, {self.fp8_weights / 1e9:.3g} as an FP8 checkpoint"


def sizes_of(directory: Path, page_size: int = 64) -> Sizes:
    """Of the model whose weights lie there. Raises UserError as read_model_shape, weight_files."""
    matrices, others = count_weights(directory)
    whole, eight = kv_token_bytes(directory, page_size, "bfloat16", EIGHT_BITS)
    shape = read_model_shape(directory)
    try:
        check_kv(EIGHT_BITS, "bfloat16", shape)
    except UserError:
        eight = whole
    if (held := shape.quantization) is not None and FORMATS[held.format].is_packed:
        stored = stored_bytes(directory)
        return Sizes(stored, whole, stored, eight, f"four bits ({held.format})")
    return Sizes(2 * (matrices + others), whole, matrices + 2 * others, eight)


def check_kv(
    dtype: str, model_dtype: str, shape: ModelShape, capability: tuple[int, int] | None = None
) -> None:
    """Raise a UserError where KV of `dtype`, as kv.dtype has it, cannot be, or reads badly.

    capability: the GPU's compute capability; None: a CPU's, or not known.
    """
    if dtype == "auto":
        return
    path, remedy = "kv.dtype", "leave it auto"
    if model_dtype == "float16":  # its range is less than that of a scale
        raise UserError(f"{path}: {dtype} needs a model in bfloat16 or float32; {remedy}", path)
    if capability is not None and capability < WITH_EIGHT_BITS:
        has = ".".join(map(str, capability))
        raise UserError(
            f"{path}: {dtype} is served {ON_GPUS}, and this one has {has}; {remedy}", path
        )
    if shape.features.qkv_bias:
        raise UserError(
            f"{path}: {dtype} loses too much of keys with a bias, whose channels differ by far; "
            f"{remedy} for this architecture",
            path,
        )


def check_states(dtype: str, shape: ModelShape) -> None:
    """Raise a UserError where kv.state_dtype is of no layer."""
    if dtype != "float32" and shape.delta is None:
        path = "kv.state_dtype"
        raise UserError(f"{path}: no layer of this model has a state; leave it float32", path)


def check_directories(
    model: ModelConfig,
    spec: SpecConfig,
    ranks: Ranks,
    kept: tuple[str, str] = ("auto", "float32"),
    *,
    with_weights: bool = True,
) -> None:
    """Check a model's directory; with_weights: its files and drafter too.

    kept: kv.dtype and kv.state_dtype. UserErrors name file and field.
    """
    kv_dtype, state_dtype = kept
    directory = model.directory
    try:
        check_path(directory)
        if not directory.exists():
            raise UserError(f"there is no directory {directory}; take one, or a model's name")
        shape = read_model_shape(directory)
        if with_weights and model.load_format == "safetensors":
            check_weights(directory, shape.quantization)
    except UserError as error:
        raise type(error)(f"model.path: {error}", "model.path") from error
    if model.max_model_len != "auto":
        check_length(model.max_model_len, shape.max_position_embeddings)
    check_kv(kv_dtype, shape.dtype if model.dtype == "auto" else model.dtype, shape)
    check_states(state_dtype, shape)
    _check_ranks(shape, ranks)
    if with_weights and spec.has_weights:
        _check_drafter(model, spec, shape, ranks)


def _check_ranks(shape: LayerShape, ranks: Ranks, whose: str = "") -> None:
    for path, (size, division) in ranks.items():
        if error := _undivided(shape, size, division):
            fewer = (n for n in range(size - 1, 1, -1) if not _undivided(shape, n, division))
            remedy = f"set it to {next(fewer, 1)}"
            raise type(error)(f"{path}: {error}{whose}; {remedy}", path) from error


def _undivided(shape: LayerShape, size: int, division: Division) -> UserError | None:
    """Why the model cannot be divided among `size` ranks."""
    try:
        for kind in kinds_of(shape).values():
            kind.share(shape, 0, size)
        if not all(layer.is_sparse for layer in shape.layers):
            split_even("intermediate_size", shape.intermediate_size, 0, size)
        if shape.experts is not None:
            _, columns = rank_experts(shape.experts, division, 0, size, group=shape.scale_group)
            coarse(Part(shape.experts.width, columns), shape.scale_group)
        split_even("vocab_size", shape.vocab_size, 0, size)
        for width in _divided_widths(shape):
            coarse(Part(width, slice(0, width // size)), shape.scale_group)
    except UserError as error:
        return error
    return None


def _divided_widths(shape: LayerShape) -> Iterator[int]:
    """Columns of the matrices, but experts', whose columns ranks divide."""
    for kind in kinds_of(shape).values():
        yield kind.width(shape)
    if not all(layer.is_sparse for layer in shape.layers):
        yield shape.intermediate_size
    if shape.experts is not None:
        yield shape.experts.shared_width


def _check_drafter(model: ModelConfig, spec: SpecConfig, target: ModelShape, ranks: Ranks) -> None:
    directory = model.drafter_directory(spec)
    if not directory.is_dir():
        remedy = "set it to a drafter's directory or name, or spec.drafter to another"
        raise UserError(f"spec.path: there is no directory {directory}; {remedy}", "spec.path")
    try:
        shape = READERS[spec.drafter](directory, target)
        if model.load_format == "safetensors" and directory != model.directory:
            check_weights(directory)
    except UserError as error:
        field, unset = "spec.path", ""
        if spec.drafter == "mtp":
            field = "spec.drafter"
        elif not spec.path:
            unset = " (spec.path is not set, so this is the model's own directory)"
        raise type(error)(f"{field}: {error}{unset}", field) from error
    check_block(spec, shape)
    _check_ranks(shape, ranks, ": of the drafter")
