"""Piecewise prefill graphs over a forward that torch.compile has traced and Inductor compiled.

    forward = TracedForward(model, by_inductor)
    hidden = forward(embedded, positions)  # piece, attend, piece, attend, ..., piece

Dynamo traces the layers once into one FX graph, for any number of tokens. Our backend splits it at
the attention op, compiles equal pieces once, and calls `attend` itself between them, so a capture
breaks there as in the model's own forward. `run/piecewise.py` captures and replays the result.
See ADR 0014.
"""

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, map_arg
from torch.fx.passes.split_module import split_module

from worker.errors import Unsupported
from worker.model.attention import attend
from worker.model.decoder import Decoder
from worker.ops.norms import (
    add_rms_norm,
    add_rms_norm_ref,
    rms_norm,
    rms_norm_ref,
    swiglu,
    swiglu_ref,
)
from worker.ops.packed import packed_product
from worker.ops.product import gated_product, product
from worker.ops.scaled import (
    add_rms_norm_eight,
    eight_bits,
    room,
    scaled_gated_product,
    scaled_product,
)
from worker.run.base import LoadedModel
from worker.run.piecewise import PiecewiseChunks
from worker.run.segments import GraphMemory

log = logging.getLogger("kvlane.graph")

Compiled = Callable[..., Any]  # called as the piece's own forward
PieceCompiler = Callable[[GraphModule, Sequence[Any]], Compiled]
# Largest accepted difference of a hidden-state row from eager's, relative to its norm. Measured
# with 36 layers of random weights: 3e-6, 0.008, 0.06. Two different rows differ by 0.2 or more.
ROUNDING = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


_OPS: list[tuple[Callable[..., Any], Any]] = []  # our function, the op in its place


def _custom_op(
    function: Callable[..., Any],
    schema: str,
    fake: Callable[..., Any],
    mutates: tuple[str, ...] = (),
) -> Any:
    """Register `function` as a custom op: traces hold the op, and the op calls `function`.

    fake: the op's fake (meta) implementation: shapes, strides and dtypes of outputs only.
    """
    name = f"kvlane::{function.__name__.removesuffix('_ref')}"  # without CUDA it is NAME_ref
    torch.library.custom_op(name, function, mutates_args=mutates, schema=schema).register_fake(fake)
    op = getattr(torch.ops.kvlane, name.rpartition(":")[2]).default
    _OPS.append((function, op))
    return op


@cache
def substitute() -> None:
    """Let Dynamo put the ops into its traces. This imports it, which takes a second."""
    for function, op in _OPS:
        put = torch.compiler.substitute_in_graph(function, skip_signature_check=True)
        put(lambda *args, op=op: op(*args))


PRODUCT = _custom_op(
    product,
    "(Tensor x, Tensor w, Tensor? bias=None) -> Tensor",
    lambda x, w, bias=None: x.new_empty(x.shape[0], w.shape[0]),
)
GATED_PRODUCT = _custom_op(
    gated_product,
    "(Tensor x, Tensor w) -> Tensor",
    lambda x, w: x.new_empty(x.shape[0], w.shape[0] // 2),
)
_SCALED = (
    "(Tensor values, Tensor of_rows, Tensor w, Tensor scales, ScalarType dtype, bool whole_blocks)"
)
SCALED_PRODUCT = _custom_op(
    scaled_product,
    f"{_SCALED} -> Tensor",
    lambda x, _, w, __, dtype, *___: x.new_empty(x.shape[0], w.shape[0], dtype=dtype),
)
SCALED_GATED_PRODUCT = _custom_op(
    scaled_gated_product,
    f"{_SCALED} -> (Tensor, Tensor)",
    lambda x, _, w, *__: room(x.shape[0], w.shape[0] // 2, x.device),
)
EIGHT_BITS = _custom_op(
    eight_bits, "(Tensor x) -> (Tensor, Tensor)", lambda x: room(x.shape[0], x.shape[1], x.device)
)
ADD_RMS_NORM_EIGHT = _custom_op(
    add_rms_norm_eight,
    "(Tensor x, Tensor residual, Tensor weight, float eps, Tensor? total=None) "
    "-> (Tensor, Tensor, Tensor)",
    lambda x, *_: (*room(x.shape[0], x.shape[1], x.device), torch.empty_like(x)),
)
PACKED_PRODUCT = _custom_op(
    packed_product,
    "(Tensor x, Tensor values, Tensor scales, Tensor? zeros=None, Tensor? factors=None, "
    "bool gated=False) -> Tensor",
    lambda x, w, _, __=None, ___=None, gated=False: x.new_empty(x.size(0), w.size(0) >> gated),
)
RMS_NORM = _custom_op(
    rms_norm,
    "(Tensor x, Tensor weight, float eps) -> Tensor",
    lambda x, weight, eps: torch.empty_like(x),
)
ADD_RMS_NORM = _custom_op(
    add_rms_norm,
    # `total` is None: compiled graphs have no taps.
    "(Tensor x, Tensor residual, Tensor weight, float eps, Tensor? total=None) -> (Tensor, Tensor)",
    lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
)
SWIGLU = _custom_op(
    swiglu,
    "(Tensor gate_up) -> Tensor",
    lambda gate_up: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
)
# The KV pool that `attend` writes comes from the forward context and is not an argument. Mutating
# `out` is what keeps the op in the trace, and in order.
ATTEND = _custom_op(
    attend,
    "(Tensor qkv, Tensor positions, Tensor table, Tensor? q_weight, Tensor? k_weight, float eps, "
    "int layer_id, Tensor(a!) out) -> ()",
    lambda *_: None,
    mutates=("out",),
)

# In plain torch, so that Inductor fuses them.
DEFINITIONS = {RMS_NORM: rms_norm_ref, ADD_RMS_NORM: add_rms_norm_ref, SWIGLU: swiglu_ref}


def by_inductor(piece: GraphModule, examples: Sequence[Any]) -> Compiled:
    """Compile `piece` by Inductor: norms as plain torch, so that they fuse; products stay ours."""
    from torch._inductor.compile_fx import compile_fx  # both take seconds to import
    from torch._inductor.decomposition import select_decomp_table

    decompositions = {**select_decomp_table(), **DEFINITIONS}
    options = {"compile_threads": 1}  # few kernels; a pool of processes would never be ended
    made: Any = compile_fx(piece, examples, config_patches=options, decompositions=decompositions)
    return made


def split_and_compile(traced: GraphModule, compile_piece: PieceCompiler) -> GraphModule:
    """Compile the pieces of `traced` between its attention calls, equal ones once."""
    began = time.monotonic()
    split, made, num_pieces = _split(traced), dict[Hashable, nn.Module](), 0
    for name, part in list(split.named_children()):
        assert isinstance(part, GraphModule)
        if any(node.target is attend for node in part.graph.nodes):
            continue
        num_pieces += 1
        key = fingerprint(part)
        if key not in made:
            inputs = [x.meta["example_value"] for x in part.graph.find_nodes(op="placeholder")]
            made[key] = _Piece(compile_piece(part, inputs))
        setattr(split, name, made[key])
    log.info(
        "traced the layers into %d pieces, compiled %d different ones in %.1f s",
        num_pieces, len(made), time.monotonic() - began,
    )  # fmt: skip
    return split


class _Piece(nn.Module):
    """A function as a module, which a GraphModule can hold."""

    def __init__(self, function: Compiled) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Any) -> Any:
        return self._function(*inputs)


def _split(traced: GraphModule) -> GraphModule:
    """Split `traced` at its attention calls, which become modules of their own, in trace order.

    The call goes to `attend` itself, not to the custom op: a break within an op would end one
    capture and begin the next inside the dispatcher.
    """
    part_of, number = dict[Node, int](), 0
    for node in traced.graph.nodes:
        if node.target is ATTEND:
            node.target = attend
            part_of[node], number = number + 1, number + 2
        else:
            part_of[node] = number
    return split_module(traced, traced, part_of.__getitem__, keep_original_order=True)


def fingerprint(piece: GraphModule) -> Hashable:
    """A key that is equal for pieces with the same ops on inputs of the same types and sizes."""
    number = {node: i for i, node in enumerate(piece.graph.nodes)}

    def key(node: Node) -> Hashable:
        if node.op == "placeholder":
            value = node.meta["example_value"]
            if not isinstance(value, Tensor):
                return repr(value)
            return value.dtype, str(value.device), repr((*value.shape,)), repr(value.stride())
        arguments = map_arg((node.args, node.kwargs), lambda node: f"%{number[node]}")
        return node.op, node.target, repr(arguments)

    return tuple(map(key, piece.graph.nodes))


class TracedForward:
    """A Decoder's forward. The first call, which must be the longest, traces and compiles it.

    Later calls go to the pieces: Dynamo sees none of them, so nothing is ever compiled anew. The
    storage of the model's weights is captured and must stay; its content may change.
    """

    def __init__(self, model: Decoder, compile_piece: PieceCompiler) -> None:
        self._model, self._compile_piece = model, compile_piece
        self._split: GraphModule | None = None
        self._max_tokens = 0
        self._inputs: list[Any] = []  # of the traced graph; a str names one that differs by call

    def __call__(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """See Decoder.forward; for two tokens or more.

        The first call raises RuntimeError if the trace does not hold for fewer tokens.
        """
        num_tokens = hidden.shape[0]
        if self._split is None:
            self._trace(hidden, positions)
            self._max_tokens = num_tokens
        assert self._split is not None
        assert 2 <= num_tokens <= self._max_tokens, "outside the range of token counts traced"
        arguments = {"hidden": hidden, "positions": positions, "num_tokens": num_tokens}
        inputs = [arguments[x] if isinstance(x, str) else x for x in self._inputs]
        return self._split(*inputs)[0]

    def _trace(self, hidden: Tensor, positions: Tensor) -> None:
        substitute()

        def backend(traced: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            self._split = split_and_compile(traced, self._compile_piece)
            return called

        names = {id(hidden): "hidden", id(positions): "positions"}

        def called(*inputs: Any) -> tuple[Tensor]:
            if not self._inputs:
                for x in inputs:
                    name = "num_tokens" if isinstance(x, int) else names.get(id(x))
                    self._inputs.append(name or x)
            return (hidden,)  # not used

        for argument in (hidden, positions):
            torch._dynamo.mark_dynamic(argument, 0)
        traced = torch.compile(self._model.forward, backend=backend, fullgraph=True)
        traced(hidden, positions)
        # Check now that the trace holds for every number of tokens that can come.
        with torch.compiler.set_stance("fail_on_recompile"):
            for num_tokens in range(2, hidden.shape[0]):
                traced(hidden[:num_tokens], positions[:num_tokens])
        torch.compiler.reset()  # free what Dynamo keeps of the trace


def compiled_chunks(loaded: LoadedModel, memory: GraphMemory) -> PiecewiseChunks:
    """Build PiecewiseChunks over the forward that Inductor compiled.

    Raises Unsupported if there is a drafter, the worker has several ranks, or
    engine.max_prefill_tokens is 1, which Dynamo cannot make a dynamic size.
    """
    refusals = {
        "needs engine.max_prefill_tokens of 2 or more": int(loaded.config.max_prefill_tokens) < 2,
        "cannot serve a worker of several ranks: Dynamo cannot trace their all-reduces; set "
        "engine.graph.prefill=piecewise, or tp to 1": loaded.model.collective.size > 1,
        "cannot serve with spec.drafter: the compiled forward keeps no taps for it; set "
        "engine.graph.prefill=piecewise": loaded.drafter is not None,
    }
    for why, refused in refusals.items():
        if refused:
            raise Unsupported(f"engine.graph.prefill=compiled {why}", "engine.graph.prefill")
    rounding = ROUNDING[loaded.model.placement.dtype]
    return PiecewiseChunks(loaded, memory, TracedForward(loaded.model, by_inductor), rounding)
