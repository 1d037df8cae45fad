"""Chunks of prompts as graphs in pieces whose forward is what torch.compile traced.

    forward = TracedForward(model, by_inductor)
    hidden = forward(embedded, positions)  # piece, attend, piece, attend, ..., piece

Dynamo traces the layers into one FX graph, once, for any number of tokens. Our backend splits it at
the attention op, compiles equal pieces once, and calls attention's own function between them, with
its breaks and all. So `graph.piecewise` captures and replays this forward like the model's own.
See ADR 0014.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, map_arg
from torch.fx.passes.split_module import split_module

from worker.errors import Unsupported
from worker.graph.base import LoadedModel
from worker.graph.opaque import ATTEND, TWINS
from worker.graph.piecewise import PiecewiseChunks
from worker.graph.segments import GraphMemory
from worker.layers.attention import attend
from worker.models.decoder import Decoder

log = logging.getLogger("kvlane.graph")

Compiled = Callable[..., Any]  # called as the piece's own forward
PieceCompiler = Callable[[GraphModule, Sequence[Any]], Compiled]
# How far a row of hidden states may lie from eager's when ops are fused, in parts of its norm; with
# 36 layers of random weights it was 3e-6, 0.008 and 0.06. Another row is 0.2 and more away.
ROUNDING = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


def by_inductor(piece: GraphModule, examples: Sequence[Any]) -> Compiled:
    """Inductor's code for it: norms fused from their twins, products our own."""
    from torch._inductor.compile_fx import compile_fx  # both take seconds to import
    from torch._inductor.decomposition import select_decomp_table

    decompositions = {**select_decomp_table(), **TWINS}
    # A few kernels: no pool of compiler processes, which would stay.
    options = {"compile_threads": 1}
    made: Any = compile_fx(piece, examples, config_patches=options, decompositions=decompositions)
    return made


def split_and_compile(traced: GraphModule, compile_piece: PieceCompiler) -> GraphModule:
    """`traced` with its calls of attention as they are, and what is between them compiled."""
    began = time.monotonic()
    split, made, num_pieces = _split(traced), dict[Hashable, nn.Module](), 0
    for name, part in list(split.named_children()):
        assert isinstance(part, GraphModule)
        if any(node.target is attend for node in part.graph.nodes):
            continue
        num_pieces += 1
        key = fingerprint(part)
        if key not in made:
            inputs = [node.meta["example_value"] for node in _inputs(part)]
            made[key] = _Piece(compile_piece(part, inputs))
        setattr(split, name, made[key])
    log.info(
        "traced the layers into %d pieces, compiled %d different ones in %.1f s",
        num_pieces, len(made), time.monotonic() - began,
    )  # fmt: skip
    return split


class _Piece(nn.Module):
    """Any function as part of a GraphModule."""

    def __init__(self, function: Compiled) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Any) -> Any:
        return self._function(*inputs)


def _split(traced: GraphModule) -> GraphModule:
    """Its pieces and, alone, its calls of attention, in the order of the trace.

    A call becomes one of the function itself. Through the dispatcher, which the op is for, breaks
    would be made and graphs begun within an op.
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
    """Equal for pieces that compute the same of inputs of the same types and sizes."""
    number = {node: i for i, node in enumerate(piece.graph.nodes)}

    def ops() -> Any:
        for node in piece.graph.nodes:
            arguments = map_arg((node.args, node.kwargs), lambda each: f"%{number[each]}")
            if node.op == "placeholder":
                yield _type_of(node.meta["example_value"])
            else:
                yield node.op, node.target, repr(arguments)

    return tuple(ops())


def _type_of(value: object) -> Hashable:
    if not isinstance(value, Tensor):
        return repr(value)
    return value.dtype, str(value.device), repr((*value.shape,)), repr(value.stride())


def _inputs(piece: GraphModule) -> list[Node]:
    return [node for node in piece.graph.nodes if node.op == "placeholder"]


class TracedForward:
    """A Decoder's forward, traced and compiled by its first call, which has the most tokens.

    Later calls go to the pieces: Dynamo sees none of them, so nothing is ever compiled anew.

    Args:
        model: its weights are kept, whose content may change.
        compile_piece: for the pieces.
    """

    def __init__(self, model: Decoder, compile_piece: PieceCompiler) -> None:
        self._model, self._compile_piece = model, compile_piece
        self._split: GraphModule | None = None
        self._max_tokens = 0
        self._inputs: list[Any] = []  # of the trace: weights, and names of what differs by call

    def __call__(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """See Decoder.forward; for two tokens or more.

        Raises:
            RuntimeError: by the first call: the trace does not hold for all smaller numbers.
        """
        num_tokens = hidden.shape[0]
        if self._split is None:
            self._trace(hidden, positions)
            self._max_tokens = num_tokens
        assert self._split is not None
        assert 2 <= num_tokens <= self._max_tokens, "a number that was not asked for at the trace"
        given = {"hidden": hidden, "positions": positions, "num_tokens": num_tokens}
        inputs = [given[each] if isinstance(each, str) else each for each in self._inputs]
        return self._split(*inputs)[0]

    def _trace(self, hidden: Tensor, positions: Tensor) -> None:
        def backend(traced: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            self._split = split_and_compile(traced, self._compile_piece)
            return called

        def called(*inputs: Any) -> tuple[Tensor]:
            if not self._inputs:
                self._inputs += (_name(each, hidden, positions) for each in inputs)
            return (hidden,)  # which nobody reads

        for each in (hidden, positions):
            torch._dynamo.mark_dynamic(each, 0)
        traced = torch.compile(self._model.forward, backend=backend, fullgraph=True)
        traced(hidden, positions)
        # What tracing and compiling assumed of the number of tokens: checked now, for all there is.
        with torch.compiler.set_stance("fail_on_recompile"):
            for num_tokens in range(2, hidden.shape[0]):
                traced(hidden[:num_tokens], positions[:num_tokens])
        torch.compiler.reset()  # Dynamo keeps what it traced; it is of no more use


def _name(given: object, hidden: Tensor, positions: Tensor) -> object:
    """How an input of a trace is remembered."""
    if isinstance(given, int):
        return "num_tokens"
    return "hidden" if given is hidden else "positions" if given is positions else given


def compiled(loaded: LoadedModel, memory: GraphMemory) -> PiecewiseChunks:
    """The ChunkGraphs that replays chunks as Inductor compiled them; see PiecewiseChunks.

    Raises:
        Unsupported: chunks of one token, for which a number of tokens is no symbol.
    """
    rounding = ROUNDING[loaded.model.embedding.weight.dtype]
    return PiecewiseChunks(loaded, memory, traced_forward(loaded, by_inductor), rounding)


def traced_forward(loaded: LoadedModel, compile_piece: PieceCompiler) -> TracedForward:
    """A traced forward for chunks of any length that the engine takes.

    Raises:
        Unsupported: see `compiled`.
    """
    if int(loaded.config.max_prefill_tokens) < 2:
        raise Unsupported(
            "engine.graph.prefill=compiled needs engine.max_prefill_tokens of 2 or more",
            "engine.graph.prefill",
        )
    return TracedForward(loaded.model, compile_piece)
