"""Makes the bundled model `tiny` from nothing: `python -m benchmarks.train [--out DIR]`.

Writes tokenizer, weights and configs to the output folder, and prints the figures for its README.
The text is a function of --seed. The weights also depend on the machine, since the order of GPU
sums is not fixed.
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

from benchmarks import accuracy
from benchmarks.train.data import ChatBatches, batches
from benchmarks.train.model import Recipe, new_model, save_model, train
from benchmarks.train.tokenizer import save_tokenizer, train_tokenizer


def main() -> None:
    """Trains, saves, then judges the saved weights."""
    args = _parser().parse_args()
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(train_tokenizer(args.seed), args.out)
    print(f"tokenizer {time.monotonic() - started:.0f} s", flush=True)

    dataset = ChatBatches(args.out / "tokenizer.json", args.steps, args.batch, args.seed)
    loader = batches(dataset, args.workers, pin=args.device.startswith("cuda"))
    model = new_model(args.seed)
    recipe = Recipe(args.steps, peak_lr=args.lr)
    train(model, loader, recipe, args.device, compiled=args.compile)
    num_params = save_model(model, args.out)
    minutes = (time.monotonic() - started) / 60
    print(
        f"{num_params} parameters, {minutes:.1f} minutes on {_machine(args.device)}; "
        f"torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}",
        flush=True,
    )

    scores = [
        accuracy.local_score(args.out, args.num, split, args.device)
        for split in ("trained", "held_out")
    ]
    print(accuracy.table(scores), flush=True)
    for item in scores:
        print(f"wrong, {item.split}: {item.wrong_by_template}", flush=True)


def _machine(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{os.cpu_count()} CPU cores ({platform.machine()})"


def _parser() -> argparse.ArgumentParser:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("worker/assets/tiny"))
    parser.add_argument("--steps", type=int, default=3200)
    parser.add_argument("--batch", type=int, default=384, help="rows of 384 tokens in a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
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
