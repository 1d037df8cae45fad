"""What routers decide, by what clients see of a cluster.

    python -m benchmarks.routing policies --out results
    python -m benchmarks.routing overload --out results
    python -m benchmarks.routing overload --gpu-model benchmarks/models/qwen3-8b.json --out results

`policies`: the same traffic for each policy, a fresh cluster each: conversations of several turns
of which some begin with the same text, single prompts that begin alike, and prompts that have
nothing in common. Pools are small, as where many users share a worker.

`overload`: two API keys. One asks for three times what the cluster gets through, the other for a
tenth of that; then the other one alone. `else_s` is what of end to end was no decode step: steps of
all rows take longer than those of a few, whoever has the others. `told_s`: until a refusal came.
With --gpu-model both workers share a GPU, with random weights of that shape: there a step of eight
rows takes about as long as a lone row's.
"""

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_cluster import totals
from benchmarks.judges.served import enter_namespace, make_model, serving
from benchmarks.load.measure import spread
from benchmarks.output import parser, shown, write

BLOCK = 64  # tokens of a hash id
NUM_GROUPS, GROUP_BLOCKS = 6, 3  # texts that conversations begin with
FIRST, NEXT, ANSWER = 64, 48, 32  # tokens of a first turn beyond that text, of a later one, answer
SESSIONS_PER_S = 4.0  # that begin
COMPUTED = "kvlane_prompt_tokens_computed_total"
POLICIES = ("least_loaded", "prefix_aware")
TRAFFIC = {
    "conversations": "",
    "beginnings": "shared-prefix:16,512,48,24",
    "nothing in common": "synthetic:256,24",
}
KEYS = {"much": "aaaaaaaa", "little": "bbbbbbbb"}
PROMPT_S = 0.1  # in which a refusal is told
WARM_S = 8.0  # by which the one who asks much is ahead


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, or these."""
    made = parser(__doc__)
    add = made.add_argument
    add("what", choices=("policies", "overload"))
    add("--sessions", type=int, default=80, help="conversations")
    add("--turns", type=int, default=5, help="of each")
    add("--num", type=int, default=300, help="single prompts")
    add("--rounds", type=int, default=2)
    add("--traffic", default=",".join(TRAFFIC), help="kinds of it")
    add("--pages", type=int, default=260, help="of each worker's pool, 16 tokens each")
    add("--seconds", type=float, default=120, help="of overload")
    add("--queue-s", type=float, default=5, help="router.queue_timeout_s in overload")
    add("--gpu-model", type=Path, metavar="CONFIG", help="of overload; default: the bundled one")
    add("--port", type=int, default=8000)
    add("--out", type=Path, required=True)
    return made.parse_args(arguments)


def conversations(path: Path, sessions: int, turns: int) -> str:
    """A trace of them, as `benchmarks.load` names it."""
    rng, rows = random.Random(0), list[dict[str, Any]]()
    for session in range(sessions):
        group = rng.randrange(NUM_GROUPS)
        own = NUM_GROUPS * GROUP_BLOCKS + session * turns  # further ids are nobody else's
        blocks = [*range(GROUP_BLOCKS * group, GROUP_BLOCKS * (group + 1)), own]
        first = {
            "timestamp": round(1000 * session / SESSIONS_PER_S),
            "input_length": GROUP_BLOCKS * BLOCK + FIRST, "hash_ids": blocks,
        }  # fmt: skip
        for turn in range(turns):
            later = {"delay": 200, "input_length": NEXT, "hash_ids": [own + turn]}
            about = {"session_id": f"s{session}", "output_length": ANSWER}
            rows.append(about | (later if turn else first))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"mooncake:{path}"


def on_gpu(config: Path, place: Path) -> list[str]:
    """`serve`'s arguments: workers that share a GPU, with a model of that shape made at `place`."""
    make_model(config, place)
    sets = {
        "model.path": place, "model.load_format": "dummy", "model.max_model_len": 512,
        "prefill.num_gpus": 0.5, "decode.num_gpus": 0.5, "cluster.local_ray.num_gpus": 1,
    }  # fmt: skip
    return [word for path, value in sets.items() for word in ("--set", f"{path}={value}")]


def load(out: Path, name: str, url: str, *words: str) -> subprocess.Popen[bytes]:
    """`benchmarks.load`, under way; its result is NAME.json."""
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.load", "--endpoint", "completions", "--url", url,
         "--tokenizer", "tiny", "--quiet", "--json", str(out / f"{name}.json"), *words],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def summary(out: Path, name: str) -> dict[str, Any]:
    """What a load has seen, once it has ended: requests, times in seconds."""
    seen = json.loads((out / f"{name}.json").read_text())["summaries"][0]
    times = {
        kind: {part: seen["latency"][kind][part] for part in ("p50", "p99")}
        for kind in ("ttft_s", "e2e_s")
    }
    return {"requests": seen["requests"], "per_s": seen["throughput"]["requests_per_s"]} | times


def apart(out: Path, name: str) -> dict[str, Any]:
    """Decode steps and all else of who was served, in seconds; how soon the others were told."""
    outcomes = json.loads((out / f"{name}.json").read_text())["runs"][0]["outcomes"]
    served = [each for each in outcomes if not each["error"] and len(each["chunk_s"]) > 2]
    steps_s = [each["chunk_s"][-1] - each["chunk_s"][1] for each in served]
    ends_s = [each["end_s"] - each["intended_s"] for each in served]
    told_s = [each["end_s"] - each["sent_s"] for each in outcomes if each["error"] == "http_429"]
    figures = {
        "step_s": [s / (len(each["chunk_s"]) - 2) for s, each in zip(steps_s, served, strict=True)],
        "router_queue_s": [each["stages"]["router_queue_s"] for each in served],
        "else_s": [end_s - s for end_s, s in zip(ends_s, steps_s, strict=True)],
        "told_s": told_s,
    }
    parts = {
        kind: {part: spread(values)[part] for part in ("p50", "p99", "max")}
        for kind, values in figures.items()
    }
    return parts | {"told_late": sum(s > PROMPT_S for s in told_s)}


def done(loading: subprocess.Popen[bytes]) -> None:
    """Raises SystemExit where a load could not be measured."""
    if code := loading.wait():
        raise SystemExit(f"benchmarks.load ended with {code}")


def policies(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each kind of traffic, policy and round."""
    out: Path = options.out
    trace = conversations(out / "conversations.jsonl", options.sessions, options.turns)
    rows: list[dict[str, Any]] = []
    for kind in options.traffic.split(","):
        source = TRAFFIC[kind]
        single = ["--source", source, "--concurrency", "12", "--num", str(options.num)]
        asked = single if source else ["--source", trace, "--block-size", str(BLOCK)]
        for number in range(options.rounds):
            for policy in POLICIES if number % 2 == 0 else reversed(POLICIES):
                arguments = [
                    "--decode", "4", "--prefill", "0",
                    "--set", f"decode.engine.num_pages={options.pages}",
                    "--set", "decode.engine.max_num_reqs=8", "--set", f"router.policy={policy}",
                ]  # fmt: skip
                with serving(arguments, options.port, keep=out) as url:
                    done(load(out, "load", url, *asked))
                    computed = totals(url)[COMPUTED]
                row = {"kind": kind, "policy": policy, "computed": computed}
                rows.append(row | summary(out, "load"))
                print(rows[-1], flush=True)
    return rows


def overload(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What each key's client has seen: alone, and beside the other."""
    out: Path = options.out
    files = {name: out / f"{name}.key" for name in KEYS}
    for name, key in KEYS.items():
        files[name].write_text(f"{key}\n")
    (out / "keys").write_text("".join(f"{key}\n" for key in KEYS.values()))
    arguments = [
        "--api-key-file", str(out / "keys"), "--set", "decode.engine.max_num_reqs=8",
        "--set", f"router.queue_timeout_s={options.queue_s}",
    ]  # fmt: skip
    common = ["--source", "synthetic:64,64", "--timeout", "60", "--num", "1000000"]
    with contextlib.ExitStack() as held:
        if options.gpu_model:
            place = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="kvlane-bench-")))
            arguments += on_gpu(options.gpu_model, place)
        url = held.enter_context(serving(arguments, options.port, keep=out))

        def asking(name: str, key: str, *words: str) -> subprocess.Popen[bytes]:
            return load(out, name, url, *common, "--api-key-file", str(files[key]), *words)

        closed = ["--concurrency", "16", "--duration", "15", "--num", "20000"]
        done(asking("capacity", "much", *closed))
        most = summary(out, "capacity")["per_s"]
        seconds = ["--duration", str(options.seconds)]
        little = ["--rate", f"poisson:{0.3 * most}", *seconds]
        done(asking("alone", "little", *little))
        longer = ["--duration", str(options.seconds + 2 * WARM_S)]
        much = asking("much", "much", "--rate", f"poisson:{3 * most}", *longer)
        time.sleep(WARM_S)
        done(asking("beside", "little", *little))
        done(much)
    rows = [
        {"kind": name, **summary(out, name), **apart(out, name)}
        for name in ("capacity", "alone", "beside", "much")
    ]
    for row in rows:
        print(row, flush=True)
    return rows


def main() -> int:
    """0, once all is measured."""
    options = parse()
    enter_namespace("benchmarks.routing")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = policies(options) if options.what == "policies" else overload(options)
    path = options.json or options.out / f"{options.what}.json"
    write(path, {"options": shown(options), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
