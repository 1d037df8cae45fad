"""What peers compare before they exchange KV, of the bundled models.

    python -m tests.support.identity              digests and layout hashes beside the recorded ones
    python -m tests.support.identity --record     writes them into identities.json

The record is of 5fb54f23, but for younger weights. Workers of two versions serve one cluster while
it is upgraded, so a change that moves one of these numbers has to be meant. The file runs in a
checkout of that commit:

    cd CHECKOUT && PYTHONPATH=. python .../tests/support/identity.py
"""

import json
import sys
from pathlib import Path
from typing import Any

from worker.config import WorkerConfig
from worker.peers.rank_group import RankGroup
from worker.start.build import _begin
from worker.start.load import _load_weights

RECORD = Path(__file__).with_name("identities.json")
EIGHT_BITS = "float8_e4m3fn"
WITHOUT_EIGHT_BITS = ("tiny-oss",)  # keys with a bias lose too much
# Target and drafter; a drafter's directory is tiny-chain's, tiny-dflash's or the target's own.
MODELS = (
    ("tiny", "none"),
    ("tiny", "chain"),
    ("tiny", "dflash"),
    ("tiny-moe", "none"),
    ("tiny-oss", "none"),
    ("tiny-latent", "none"),
    ("tiny-hybrid", "none"),
    ("tiny-hybrid", "mtp"),
    ("tiny-hybrid-moe", "mtp"),
)


def identities(dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> dict[str, dict[str, Any]]:
    """By model, drafter, dtype and the dtype of its KV: digest, layout hash and bytes of pages.

    Loads each model once for a dtype, on the CPU.
    """
    found: dict[str, dict[str, Any]] = {}
    for path, drafter in MODELS:
        for dtype in dtypes:
            digest = ""
            for kv_dtype in ("auto",) if path in WITHOUT_EIGHT_BITS else ("auto", EIGHT_BITS):
                config = WorkerConfig.model_validate(
                    {
                        "role": "decode",
                        "model": {"path": path, "dtype": dtype},
                        "kv": {"dtype": kv_dtype, "page_size": 16, "num_groups": 1},
                        "spec": {"drafter": drafter},
                        "engine": {"device": "cpu", "threads": 1},
                    }
                )
                start = _begin(config, RankGroup(), lambda *_: None)
                digest = digest or _load_weights(start).digest
                layout = start.model_layout
                found[f"{path} {drafter} {dtype} {kv_dtype}"] = {
                    "digest": digest,
                    "layout_hash": layout.identity(path, digest).layout_hash,
                    "page_bytes": layout.page_bytes,
                    "page_bytes_of_2_ranks": [layout.share(2, i).page_bytes for i in (0, 1)],
                    "slot_bytes": layout.state.slot_bytes if layout.state else 0,
                }
    return found


def main(*, record: bool) -> None:
    found = identities()
    if record:
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
    recorded = json.loads(RECORD.read_text())
    differ = 0
    for name, own in found.items():
        for what in ("digest", "layout_hash"):
            same = own[what] == recorded[name][what]
            differ += not same
            print(f"{name:45} {what:12} {recorded[name][what]} {own[what]} {'' if same else '!'}")
    print(f"{differ} differ")


if __name__ == "__main__":
    main(record="--record" in sys.argv)
