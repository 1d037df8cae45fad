"""Makes the bundled model `tiny`, `tiny-hybrid`, `tiny-moe`, `tiny-oss` or `tiny-latent` from
nothing, `tiny-hybrid-moe` from `tiny-hybrid`, or a drafter for one.

    python -m benchmarks.train [--hybrid] [--moe] [--oss] [--latent] [--out DIR]
    python -m benchmarks.train --drafter chain|dflash|mtp [--target DIR] [--out DIR]

Writes weights and configs (for the model the tokenizer, too, unless there is one) to the output
folder, and prints the figures for its README. What a drafter yields is told by
`benchmarks.accuracy --url --trace` when it is served. The text is a function of --seed. The weights
also depend on the machine, since the order of sums is not fixed.

On an H200 `--minutes 8.5` takes 510 s for `tiny`, of 12 GiB; then its drafters side by side,
`chain` 235 s, `dflash` 325 s; then `benchmarks.accuracy --held-out`, `--newcomers`, `--agents`.
"""

import argparse
import os
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from tokenizers import Tokenizer

from benchmarks import accuracy
from benchmarks.output import described
from benchmarks.train.answers import Speaker
from benchmarks.train.base import Drafter, Lesson, train_drafter
from benchmarks.train.block_drafter import BlockDrafter
from benchmarks.train.chain_drafter import ChainDrafter
from benchmarks.train.data import ChatBatches, batches
from benchmarks.train.experts import new_divided
from benchmarks.train.model import CONFIGS, DIALECTS, Recipe, new_model, save, save_model, train
from benchmarks.train.mtp_drafter import MtpDrafter, SparseMtpDrafter
from benchmarks.train.tokenizer import save_tokenizer, train_tokenizer

TARGET = Path("worker/assets/tiny")
SPLITS = ("trained", "held_out")


HYBRID = TARGET.with_name("tiny-hybrid")


class Made(NamedTuple):
    """How a model is made where the command line says nothing."""

    out: Path
    steps: int
    batch: int
    lr: float
    kind: type[Drafter] | None = None
    target: Path = TARGET


MODELS = {
    "": Made(TARGET, 7500, 384, 2e-3),
    "chain": Made(TARGET.with_name("tiny-chain"), 640, 16, 1e-2, ChainDrafter),
    "dflash": Made(TARGET.with_name("tiny-dflash"), 2000, 32, 1e-2, BlockDrafter),
    "mtp": Made(HYBRID, 1200, 16, 1e-2, MtpDrafter, HYBRID),  # into its target's folder
}


def main() -> None:
    """Trains, saves, then judges the saved weights."""
    args = _parser().parse_args()
    made = MODELS[args.drafter]
    kinds = "hybrid", "moe", "oss", "latent"
    args.name = "-".join(("tiny", *(kind for kind in kinds if getattr(args, kind))))
    if args.name != "tiny":
        made = made._replace(out=TARGET.with_name(args.name))
    for name in ("out", "steps", "batch", "lr", "target"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(made, name))
    started = time.monotonic()
    num_params = _make_target(args) if made.kind is None else _make_drafter(args, made.kind)
    minutes = (time.monotonic() - started) / 60
    on = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    if args.device.startswith("cuda"):
        on = torch.cuda.get_device_name(args.device)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    python = platform.python_version()
    print(f"{num_params} parameters, {minutes:.1f} minutes on {on}; {versions}, Python {python}")
    if args.oss:
        print("transformers reads MXFP4 with more libraries: benchmarks.accuracy --url judges it")
    elif made.kind is None:
        scores = [accuracy.local_score(args.out, args.num, each, args.device) for each in SPLITS]
        print(accuracy.table(scores))
        for item in scores:
            print(f"wrong, {item['split']}: {item['wrong_by_template']}")


def _make_target(args: argparse.Namespace) -> int:
    """Trains and saves tokenizer and model; the number of parameters."""
    args.out.mkdir(parents=True, exist_ok=True)
    file = str(args.out / "tokenizer.json")
    of_text: Any = ()
    of_files: Any = ()
    dialect = DIALECTS.get(args.name)
    if dialect:
        of_text = dialect.special, dialect.shown, dialect.plain_text
        of_files = dialect.template, dialect.special, dialect.end
    kept = (
        Tokenizer.from_file(file) if Path(file).exists() else train_tokenizer(args.seed, *of_text)
    )
    save_tokenizer(kept, args.out, *of_files)
    dataset = ChatBatches(args.out / "tokenizer.json", args.steps, args.batch, args.seed)
    if args.name == "tiny":
        dataset.reach = args.reach
    if dialect:
        dataset.segments, dataset.forms = dialect.segments, False
    if args.name == "tiny-hybrid-moe":
        dataset.newcomers = False  # of which the model that it is made of has seen none
    loader = batches(dataset, args.workers, pin=args.device.startswith("cuda"))
    if args.hybrid and args.moe:
        made = new_divided(args.name, HYBRID.name, args.out, args.seed)
    else:
        made = new_model(args.name, args.seed)
    recipe = Recipe(args.steps, peak_lr=args.lr)
    compiled = args.compile and (dialect is None or dialect.compiled)
    train(made, loader, recipe, args.device, compiled, 60 * args.minutes)
    return save_model(made, args.out, CONFIGS[args.name])


def _make_drafter(args: argparse.Namespace, kind: type[Drafter]) -> int:
    """Trains and saves a drafter of args.target; the number of parameters."""
    target, _ = accuracy.load_model(args.target, args.device)
    if kind is MtpDrafter and hasattr(target.config, "num_experts"):
        kind = SparseMtpDrafter
    speaker = Speaker(target, kind.taps)
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    lesson = Lesson(args.steps, args.batch, args.lr, seed=args.seed, device=args.device)
    drafter, losses = train_drafter(kind, speaker, tokenizer, lesson)
    kept = f"{speaker.num_kept} of {speaker.num_read} chats"
    print(f"{len(losses)} steps; the target says {kept} to the letter", flush=True)
    state = drafter.state_dict()
    if issubclass(kind, MtpDrafter):
        state = {f"mtp.{name}": weight for name, weight in state.items()}
        return save(state, args.out, "mtp")
    return save(state, args.out, config=drafter.config)


def _parser() -> argparse.ArgumentParser:
    on_gpu = torch.cuda.is_available()
    made = described(__doc__)
    add = made.add_argument
    add("--out", type=Path, help="default: worker/assets/tiny, or …/tiny-DRAFTER")
    add("--hybrid", action="store_true", help="make tiny-hybrid: layers with a recurrent state")
    add(
        "--moe", action="store_true", help="make tiny-moe: layers of experts; both: tiny-hybrid-moe"
    )
    add("--oss", action="store_true", help="make tiny-oss: chats in harmony, experts in MXFP4")
    add("--latent", action="store_true", help="make tiny-latent: latent attention, GLM's chats")
    add("--drafter", choices=tuple(MODELS), default="", help="make a drafter of this kind")
    add("--target", type=Path, help="the drafter's target")
    add("--steps", type=int, help="default: 7500, a drafter 640 (chain), 2000 (dflash), 1200 (mtp)")
    add("--minutes", type=float, default=60.0, help="limit of the training steps of a model")
    add("--reach", type=int, default=65536, help="tokens of the longest row of tiny")
    add("--batch", type=int, help="rows of 384 tokens in a step (384), a drafter's chats (16, 32)")
    add("--seed", type=int, default=0)
    add("--lr", type=float, help="peak learning rate: 2e-3, a drafter's 1e-2")
    add("--device", default="cuda" if on_gpu else "cpu")
    add("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    add("--num", type=int, default=500, help="problems judged at the end")
    compiled = argparse.BooleanOptionalAction
    add("--compile", action=compiled, default=on_gpu, help="torch.compile the training step")
    return made


if __name__ == "__main__":
    main()
