"""Makes the bundled model `tiny` from nothing, or a drafter for it.

    python -m benchmarks.train [--out DIR]
    python -m benchmarks.train --drafter chain|dflash [--target DIR] [--out DIR]

Writes weights and configs (for the model the tokenizer, too) to the output folder, and prints the
figures for its README. The text is a function of --seed. The weights also depend on the machine,
since the order of sums is not fixed.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from benchmarks import accuracy
from benchmarks.train import acceptance
from benchmarks.train.answers import Speaker
from benchmarks.train.base import Drafter, Lesson, save_drafter, train_drafter
from benchmarks.train.block_drafter import BlockDrafter
from benchmarks.train.chain_drafter import ChainDrafter
from benchmarks.train.data import ChatBatches, batches
from benchmarks.train.model import Recipe, new_model, save_model, train
from benchmarks.train.tokenizer import save_tokenizer, train_tokenizer

TARGET = Path("worker/assets/tiny")
DEFAULTS = {"out": TARGET, "steps": 3200, "batch": 384, "lr": 2e-3}
DRAFTERS: dict[str, tuple[type[Drafter], dict[str, object]]] = {
    "chain": (
        ChainDrafter,
        {"out": TARGET.with_name("tiny-chain"), "steps": 640, "batch": 16, "lr": 1e-2},
    ),
    "dflash": (
        BlockDrafter,
        {"out": TARGET.with_name("tiny-dflash"), "steps": 2000, "batch": 32, "lr": 1e-2},
    ),
}


def main() -> None:
    """Trains, saves, then judges the saved weights."""
    args = _parser().parse_args()
    for name, value in (DRAFTERS[args.drafter][1] if args.drafter else DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.drafter:
        _make_drafter(args)
    else:
        _make_target(args)


def _make_target(args: argparse.Namespace) -> None:
    started = time.monotonic()
    save_tokenizer(train_tokenizer(args.seed), args.out)
    print(f"tokenizer {time.monotonic() - started:.0f} s", flush=True)

    dataset = ChatBatches(args.out / "tokenizer.json", args.steps, args.batch, args.seed)
    loader = batches(dataset, args.workers, pin=args.device.startswith("cuda"))
    model = new_model(args.seed)
    recipe = Recipe(args.steps, peak_lr=args.lr)
    train(model, loader, recipe, args.device, compiled=args.compile)
    num_params = save_model(model, args.out)
    _report(num_params, started, args.device)

    scores = [
        accuracy.local_score(args.out, args.num, split, args.device)
        for split in ("trained", "held_out")
    ]
    print(accuracy.table(scores), flush=True)
    for item in scores:
        print(f"wrong, {item.split}: {item.wrong_by_template}", flush=True)


def _make_drafter(args: argparse.Namespace) -> None:
    started = time.monotonic()
    model = Qwen3ForCausalLM.from_pretrained(args.target, dtype=torch.float32)
    kind, _ = DRAFTERS[args.drafter]
    speaker = Speaker(model.to(args.device), kind.taps)
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    lesson = Lesson(args.steps, args.batch, args.lr)
    drafter, losses = train_drafter(kind, speaker, tokenizer, lesson, args.seed, args.device)
    num_params = save_drafter(drafter, args.out)
    _report(num_params, started, args.device)
    print(
        f"{len(losses)} steps; of {speaker.num_read} chats the target says "
        f"{speaker.num_kept} to the letter",
        flush=True,
    )
    found = [
        acceptance.measure(kind, args.target, args.out, args.num, split, args.device)
        for split in ("trained", "held_out")
    ]
    print(acceptance.table(found), flush=True)


def _report(num_params: int, started: float, device: str) -> None:
    minutes = (time.monotonic() - started) / 60
    print(
        f"{num_params} parameters, {minutes:.1f} minutes on {_machine(device)}; "
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}",
        flush=True,
    )


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPU cores ({platform.machine()})"


def _parser() -> argparse.ArgumentParser:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="default: worker/assets/tiny, or …/tiny-DRAFTER")
    parser.add_argument("--drafter", choices=tuple(DRAFTERS), help="make a drafter of this kind")
    parser.add_argument("--target", type=Path, default=TARGET, help="the drafter's target")
    parser.add_argument(
        "--steps", type=int, help="default: 3200, a drafter 640 (chain), 2000 (dflash)"
    )
    parser.add_argument(
        "--batch", type=int, help="rows of 384 tokens in a step (384), a drafter's chats (16, 32)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, help="peak learning rate: 2e-3, a drafter's 1e-2")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--num", type=int, default=500, help="problems judged at the end")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=on_gpu,
        help="torch.compile the training step",
    )
    return parser


if __name__ == "__main__":
    main()
