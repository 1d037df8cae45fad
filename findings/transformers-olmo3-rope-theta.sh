#!/usr/bin/env bash
# transformers 5.24.0: Olmo3Config gives a `rope_theta` to its full layers alone; layers with windows keep the default.
#
# A config.json of OLMo 3 as it was published names one `rope_theta` at its top, for all layers. The class takes it
# out of the keywords twice, once for each kind of layer, and the second time it is gone: layers with sliding
# attention, three of four, turn with the class's default base, 500000, in silence. A checkpoint whose base is
# another one is computed with two bases. (Published OLMo 3 has 500000, so nobody sees it there.)
#
# Seen:
#   full_attention 700000.0
#   sliding_attention 500000.0
set -euo pipefail
place=$(mktemp -d)
trap 'rm -r "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet transformers==5.24.0
told=$("$place/venv/bin/python" - 2>/dev/null <<'PYTHON'
from transformers import AutoConfig

ropes = AutoConfig.for_model("olmo3", rope_theta=700000.0).rope_parameters
for kind in sorted(ropes):
    print(kind, ropes[kind]["rope_theta"])
PYTHON
)
echo "$told"
[ "$told" = "full_attention 700000.0
sliding_attention 500000.0" ] || { echo "this has changed" >&2; exit 1; }
