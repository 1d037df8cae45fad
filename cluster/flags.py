"""Flags that set leaves of the configuration: ours, and those that other servers' users type."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cluster.config import Config, load
from worker.errors import UserError

# Flag, the leaf that it sets, its type, its metavar, its help.
FLAGS: tuple[tuple[str, str, type, str, str], ...] = (
    ("--model", "model.path", str, "PATH",
     "'tiny' (bundled), a model directory, or a name on the hub"),
    ("--prefill", "prefill.replicas", int, "N", "prefill workers"),
    ("--decode", "decode.replicas", int, "N", "decode workers"),
    ("--router", "routers.replicas", int, "N", "routers, all on one port"),
    ("--host", "cluster.host", str, "HOST", "address that the routers listen on"),
    ("--port", "cluster.port", int, "PORT", "port of the routers; 0: any free one"),
    ("--api-key-file", "router.api_key_file", str, "PATH", "bearer keys to serve, one a line"),
    ("--log-format", "cluster.log_format", str, "FORM", "text, or json: an object a line"),
    ("--spec", "spec.drafter", str, "DRAFTER", "what drafts: none, chain, mtp, dflash, ngram"),
    ("--spec-path", "spec.path", str, "PATH", "directory of the drafter"),
    ("--spec-simulate-accept-len", "spec.simulate_accept_len", float, "X",
     "to measure speculation on random weights: X tokens of a step count; answers are junk"),
)  # fmt: skip
# vLLM's names; what they mean here, and their type. The help does not show them.
ALIASES: tuple[tuple[str, str, type], ...] = (
    ("--tensor-parallel-size", "prefill.tp decode.tp", int),
    ("--max-model-len", "model.max_model_len", int),
    ("--gpu-memory-utilization",
     "prefill.engine.memory_fraction decode.engine.memory_fraction", float),
    ("--served-model-name", "model.served_name", str),
    ("--kv-cache-dtype", "kv.dtype", str),
    ("--mamba-ssm-cache-dtype", "kv.state_dtype", str),
)  # fmt: skip
API_KEY = "--api-key"
NO_KEY = (
    f"{API_KEY} would show the key to everyone on this machine, in the list of processes; "
    "write it into a file and give that: --api-key-file PATH"
)


class _Refused(argparse.Action):
    """A flag whose value must not stand on a command line; it is not repeated either."""

    def __call__(self, *_: object) -> None:
        raise UserError(NO_KEY, "router.api_key_file")


def add_flags(parser: argparse.ArgumentParser, *, positional: bool) -> None:
    """The flags and their aliases; `positional`: MODEL may stand alone, as in other servers."""
    if positional:
        parser.add_argument("named_model", nargs="?", metavar="MODEL", help="the same as --model")
    for flag, leaf, kind, metavar, text in FLAGS:
        parser.add_argument(flag, dest=leaf, type=kind, metavar=metavar, help=text)
    for flag, _, kind in ALIASES:
        parser.add_argument(flag, dest=flag, type=kind, help=argparse.SUPPRESS)
    parser.add_argument(API_KEY, action=_Refused, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML, see the config command")
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="one leaf of the configuration"
    )


def given(args: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """Flag, leaf and value of all that a command line sets, ours last: they win.

    Raises UserError for two models.
    """
    for flag, leaves, _ in ALIASES:
        value = getattr(args, flag)
        if value is not None:
            yield from ((flag, leaf, value) for leaf in leaves.split())
    model = getattr(args, "named_model", None)
    if model is not None:
        if getattr(args, "model.path") is not None:
            raise UserError(f"both {model} and --model name a model; name one", "model.path")
        yield "MODEL", "model.path", model
    for flag, leaf, *_ in FLAGS:
        value = getattr(args, leaf)
        if value is not None:
            yield flag, leaf, value


def load_config(args: argparse.Namespace) -> Config:
    """The tree that a command line asks for; raises UserError as `load`."""
    return load(args.config, args.set, {leaf: value for _, leaf, value in given(args)})


def tell_aliases(args: argparse.Namespace, tell: Callable[[str, str], None]) -> None:
    """Say of the aliases that were given what we call them."""
    for flag, leaves, _ in ALIASES:
        value = getattr(args, flag, None)  # not all commands have flags
        if value is not None:
            ours = " ".join(f"--set {leaf}={value}" for leaf in _shortened(leaves))
            tell("INFO", f"{flag} {value}: here this is {ours}")


def _shortened(leaves: str) -> list[str]:
    """`engine.x` says `prefill.engine.x` and `decode.engine.x` at once."""
    if ".engine." in leaves:
        return [leaves.split()[0].removeprefix("prefill.")]
    return leaves.split()
